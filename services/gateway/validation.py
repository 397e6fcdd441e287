"""From bytes to a body of a known shape, or a sentence that says what is wrong with it and where.

Owns decoding, types, unknown and unsupported fields, ranges. What a body means is with its endpoint.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from shared.errors import InvalidRequest, UnsupportedField

B = TypeVar("B", bound=msgspec.Struct)

MAX_INT32: Final = 2**31 - 1
_MAX_SHOWN_CHARS: Final = 100

_ARTICLES: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
    "bytes": "binary data",
    "ext": "an extension value",
}
_EXPECTED: Final = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<given>[^`]+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)


def decode_json(data: bytes | str) -> dict[str, Any]:
    """The JSON object in `data`. Raises InvalidRequest for anything else."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except msgspec.ValidationError:  # the only one without a type to check against: a number that no double holds
        raise InvalidRequest("The body holds a number that is out of range.") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {_malformed(str(error), data)}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {_kind(value)}.")
    return value


def convert(raw: Mapping[str, Any], kind: type[B], *, unsupported: Mapping[str, tuple[Any, ...]]) -> B:
    """The body of type `kind` in `raw`.

    `unsupported` are fields that clients of OpenAI may send and that ask for nothing at certain values, which they
    may have; null is always one. Raises UnsupportedField for any other value of them and for unknown fields, and
    InvalidRequest for wrong types; both name the field.
    """
    fields = dict(raw)
    for name in [name for name in fields if name in unsupported]:
        value = fields.pop(name)
        if not is_neutral(value, unsupported[name]):
            raise UnsupportedField(f"{name} is not supported.", param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise plain_error(str(error)) from None


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value of a field that is not supported asks for nothing."""
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


def check_range(value: float | None, param: str, low: float, high: float, *, excludes_low: bool = False) -> None:
    """Raises InvalidRequest that names `param` and both limits if `value` is given and outside them, or not finite."""
    if value is None or (low < value <= high) or (value == low and not excludes_low):
        return
    lowest = f"greater than {low:g}" if excludes_low else f"at least {_number(low)}"
    raise InvalidRequest(f"{param} must be {lowest} and at most {_number(high)}, not {_number(value)}.", param=param)


def check_length(value: list[Any] | str, param: str, highest: int) -> None:
    """Raises InvalidRequest that names `param` if a list is empty or has more than `highest` elements."""
    if not value:
        raise InvalidRequest(f"{param} must not be empty.", param=param)
    if len(value) > highest:
        raise InvalidRequest(f"{param} must have at most {highest} elements, not {len(value)}.", param=param)


def _number(value: float) -> str:
    text = str(value) if isinstance(value, int) else f"{value:g}"
    return text if len(text) <= 40 else text[:40] + "…"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")


def _malformed(reason: str, data: bytes | str) -> str:
    reason = reason.removeprefix("JSON is malformed: ")
    if reason == "Input data was truncated":
        if not data:
            return "it is empty"
        if _ends_in_half_a_pair(data):
            return "it holds half of a surrogate pair"
        return "it ends too early"
    return reason[0].lower() + reason[1:]


def _ends_in_half_a_pair(data: bytes | str) -> bool:
    """The decoder calls an input truncated when too little follows the first half of an escaped surrogate pair."""
    tail = data[-24:] if isinstance(data, str) else data[-24:].decode("latin-1")
    return re.search(r"\\u[dD][89abAB][0-9a-fA-F]{2}", tail) is not None


def plain_error(message: str) -> InvalidRequest:
    """What is wrong with a value in a plain sentence, from the words of msgspec's ValidationError."""
    place = _PLACE.search(message)
    what = message[: place.start()] if place else message
    path = (place["path"] if place else "").removeprefix(".").replace("[...]", "")
    if match := _UNKNOWN.fullmatch(what):
        field = _join(path, match["field"])
        return UnsupportedField(f"{field} is an unknown field.", param=field)
    if match := _MISSING.fullmatch(what):
        field = _join(path, match["field"])
        return InvalidRequest(f"{field} is missing.", param=field)
    if match := _EXPECTED.fullmatch(what):
        wanted = [_ARTICLES.get(name, name) for name in match["wanted"].split(" | ") if name != "null"]
        given = _ARTICLES.get(match["given"], match["given"])
        given = "a number with a fraction or exponent" if match["given"] == "float" and "number" in wanted[0] else given
        return InvalidRequest(f"{path or 'The body'} must be {' or '.join(wanted)}, not {given}.", param=path or None)
    return InvalidRequest(f"{path or 'The body'} is not valid: {what[0].lower()}{what[1:]}.", param=path or None)


def _join(path: str, field: str) -> str:
    field = field if len(field) <= _MAX_SHOWN_CHARS else field[:_MAX_SHOWN_CHARS] + "…"
    return f"{path}.{field}" if path else field
