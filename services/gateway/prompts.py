"""Raw prompts, as completions and `/tokenize` take them: text or token ids, one or several."""

from collections.abc import Sequence
from typing import Any, Final

from services.gateway.validation import MAX_INT32, check_length, check_range
from shared.errors import InvalidRequest
from shared.messages import Int32Array, TextPrompt, TokenPrompt, int32s

MAX_PROMPTS: Final = 128
_KINDS = "a string, an array of strings, an array of token ids, or an array of such arrays"


def raw_prompts(prompt: str | list[Any], *, parses_special: bool | None) -> tuple[TextPrompt | TokenPrompt, ...]:
    """The prompts in a body's `prompt`. Raises InvalidRequest that names the element at fault."""
    if isinstance(prompt, str):
        return (_text_prompt(prompt, parses_special),)
    if not prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    match prompt[0]:
        case str():
            _check_kinds(prompt, str)
            return tuple(_text_prompt(text, parses_special) for text in prompt)
        case list():
            _check_kinds(prompt, list)
            return tuple(TokenPrompt(token_ids(ids, f"prompt[{number}]")) for number, ids in enumerate(prompt))
        case _:
            return (TokenPrompt(token_ids(prompt, "prompt")),)


def token_ids(values: Sequence[Any], param: str) -> Int32Array:
    """The token ids in an array. Raises InvalidRequest that names the first that is none."""
    if not values:
        raise InvalidRequest(f"{param} must not be empty.", param=param)
    for number, value in enumerate(values):
        if type(value) is not int:
            place = f"{param}[{number}]"
            if number == 0 and param == "prompt":
                raise InvalidRequest(f"prompt must be {_KINDS}.", param="prompt")
            raise InvalidRequest(f"{place} must be a token id.", param=place)
        if not 0 <= value <= MAX_INT32:
            check_range(value, f"{param}[{number}]", 0, MAX_INT32)
    return int32s(values)


def _text_prompt(text: str, parses_special: bool | None) -> TextPrompt:
    return TextPrompt(text) if parses_special is None else TextPrompt(text, parses_special)


def _check_kinds(prompts: list[Any], kind: type) -> None:
    check_length(prompts, "prompt", MAX_PROMPTS)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, kind):
            raise InvalidRequest(f"prompt must be {_KINDS}; prompt[{number}] differs.", param=f"prompt[{number}]")
