"""Configuration: frozen dataclasses read from `SHOAL_*` variables, validated as a whole, printed at start.

Only a service's `__main__` and the command line read the environment; everything else is given a configuration.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.ids import Service
from shared.log import without_passwords

C = TypeVar("C", bound="Config")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_NATS_SCHEMES: Final = ("nats", "tls", "ws", "wss")


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...] | None
    is_secret: bool


def setting(
    default: Any,
    help: str,  # noqa: A002  # the word that argparse and click use
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    is_secret: bool = False,
) -> Any:
    """A field of a configuration: its default, one sentence for people, and what values it takes."""
    rule = _Rule(help, minimum, maximum, tuple(choices) if choices else None, is_secret)
    return dataclasses.field(default=default, metadata={"rule": rule})


class Config:
    """The base of configurations: subclasses are frozen dataclasses whose fields are made by `setting`."""

    prefix: ClassVar[str]


@dataclasses.dataclass(frozen=True, slots=True)
class MeshConfig(Config):
    """What every service of a mesh is told."""

    prefix: ClassVar[str] = "SHOAL_"

    nats_url: str = setting("nats://127.0.0.1:4222", "address of the NATS server; several with commas")
    home: Path = setting(Path("~/.shoal"), "folder for models and the state of embedded meshes")
    model: str = setting("smollm2-135m", "name of the model in the store that this instance serves")
    instance_id: str = setting("", "id of this life of the process, which a supervisor gives it; by default a new one")
    instance_name: str = setting(
        "", "name of this instance for people; by default its id. {hostname} in it is the name of its host or container"
    )
    log_level: str = setting("info", "least severe events to log", choices=("debug", "info", "warning", "error"))
    log_format: str = setting(
        "auto",
        "json: an event a line; pretty: for people; auto: by terminal",
        choices=("auto", "json", "pretty"),
    )
    log_content: bool = setting(
        False, "write prompts and outputs into the gateways' logs; who reads the logs then reads all conversations"
    )
    health_file: Path | None = setting(
        None, "file to touch while this instance handles messages and is connected; `python -m shared.health` reads it"
    )
    metrics_host: str = setting("127.0.0.1", "address on which this instance shows its metrics and answers probes")
    metrics_port: int = setting(
        0, "port for /metrics, /healthz and /readyz, of every service; 0: none", minimum=0, maximum=65_535
    )
    drain_deadline_s: float = setting(20.0, "after SIGTERM, how long to finish what runs", minimum=0, maximum=3600)
    trace_sample_ratio: float = setting(
        1.0,
        "share of requests whose spans are exported, where clients did not decide; 0: none, whatever clients say",
        minimum=0,
        maximum=1,
    )
    trace_store_requests: int = setting(
        1000, "the latest so many requests can be looked up with `shoal trace`; 0: none", minimum=0, maximum=1_000_000
    )
    switch_interval_ms: float = setting(
        1.0,
        "how long one thread of a process may hold Python's lock when another wants it",
        minimum=0.05,
        maximum=1000,
    )

    def __post_init__(self) -> None:
        """Raises ValueError if `nats_url` cannot be an address of NATS."""
        try:
            check_nats_url(self.nats_url)
        except ValueError as error:
            raise ValueError(f"nats_url: {error}") from None


def check_nats_url(text: str) -> None:
    """Raises ValueError that says what is wrong if `text` is not one or several addresses of NATS servers."""
    for address in text.split(","):
        url = urlsplit(address.strip() if "://" in address else f"nats://{address.strip()}")
        if url.scheme not in _NATS_SCHEMES:
            raise ValueError(f"the scheme of a NATS address is one of {', '.join(_NATS_SCHEMES)}, not {url.scheme}")
        if not url.hostname:
            raise ValueError("a NATS address names a host, as nats://127.0.0.1:4222 does")
        _ = url.port  # raises ValueError if it is none


def load(kind: type[C], environ: Mapping[str, str]) -> C:
    """The configuration in `environ`. Raises ConfigError that names every offending variable at once."""
    values: dict[str, Any] = {}
    problems = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # every Config is a dataclass
        text = environ.get(variable(kind, field.name))
        if text is None:
            continue
        try:
            values[field.name] = _parse(text, hints[field.name], field.metadata["rule"])
        except ValueError as error:
            shown = "(hidden)" if field.metadata["rule"].is_secret else repr(without_passwords(text))
            problems.append(f"{variable(kind, field.name)}={shown}: {error}")
    problems += _unknown(kind, environ)
    try:
        config = kind(**values)
    except ValueError as error:
        raise ConfigError("; ".join([*problems, _own_rule(kind, environ, str(error))])) from error
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def _own_rule(kind: type[Config], environ: Mapping[str, str], text: str) -> str:
    """The problem that a configuration's own check tells as `field: what is wrong`, or of several fields at once."""
    name, colon, what = text.partition(": ")
    rules = {field.name: field.metadata["rule"] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not colon or name not in rules:
        return f"{kind.prefix}*: {text}"
    value = environ.get(variable(kind, name), "")
    shown = "(hidden)" if rules[name].is_secret else repr(without_passwords(value))
    return f"{variable(kind, name)}={shown}: {what}"


def variable(kind: type[Config], field_name: str) -> str:
    """The environment variable of a field."""
    return kind.prefix + field_name.upper()


def describe(config: Config) -> dict[str, str]:
    """Each variable with its value in force; secrets are hidden."""
    rows = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        hidden = field.metadata["rule"].is_secret and value
        rows[variable(type(config), field.name)] = "(set)" if hidden else _show(value)
    return rows


def explain(kind: type[Config]) -> list[tuple[str, str, str]]:
    """For each variable: its name, its default, and what it is for, with the values it takes."""
    rows = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        rule: _Rule = field.metadata["rule"]
        limits = f" ({', '.join(rule.choices)})" if rule.choices else _range(rule)
        rows.append((variable(kind, field.name), _show(field.default), rule.help + limits))
    return rows


def _range(rule: _Rule) -> str:
    match rule.minimum, rule.maximum:
        case None, None:
            return ""
        case low, None:
            return f" (at least {low:g})"
        case None, high:
            return f" (at most {high:g})"
        case low, high:
            return f" ({low:g} to {high:g})"


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return "" if value is None else without_passwords(str(value))


def _parse(text: str, hint: Any, rule: _Rule) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if text == "":
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    if hint is bool:
        return _parse_bool(text)
    if hint is Path:
        return _parse_path(text)
    if hint in (int, float):
        return _parse_number(text, hint, rule)
    if rule.choices and text not in rule.choices:
        raise ValueError(f"must be one of {', '.join(rule.choices)}")
    return text


def _parse_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("must be true or false")
    return text.lower() in _TRUE


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("must be a path")
    return Path(text)


def _parse_number(text: str, kind: type[int] | type[float], rule: _Rule) -> float:
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"must be {'a whole number' if kind is int else 'a number'}") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    low = -float("inf") if rule.minimum is None else rule.minimum
    high = float("inf") if rule.maximum is None else rule.maximum
    if not low <= number <= high:
        raise ValueError(f"must be{_range(rule).replace('(', '').replace(')', '')}")
    return number


def _unknown(kind: type[Config], environ: Mapping[str, str]) -> list[str]:
    known = [variable(kind, field.name) for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    others = tuple(f"SHOAL_{service.upper()}_" for service in Service if f"SHOAL_{service.upper()}_" != kind.prefix)
    problems = []
    for name in sorted(environ):
        if name.startswith(kind.prefix) and name not in known and not name.startswith(others):
            endings = [variable_name.removeprefix(kind.prefix) for variable_name in known]
            near = difflib.get_close_matches(name.removeprefix(kind.prefix), endings, n=1)
            problems.append(f"{name} is not a setting" + (f"; did you mean {kind.prefix}{near[0]}?" if near else ""))
    return problems
