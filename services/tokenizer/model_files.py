"""What a model's folder says about text besides `tokenizer.json`: template, special tokens, BOS, end tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The text side of one model."""

    folder: Path
    chat_template: str | None
    chat_template_path: Path
    """Where the template stands."""
    special_tokens: dict[str, str]
    """By role, such as `bos_token`: the text of the token."""
    adds_bos: bool | None
    """Whether a prompt begins with the BOS token; None if only `tokenizer.json` knows."""
    names_end_tokens: bool
    """Whether `generation_config.json` says which tokens end a generation."""


def read_model_files(folder: Path) -> ModelFiles:
    """The text side of the model in `folder`. Raises ModelError that names the file and field at fault."""
    path = folder / "tokenizer_config.json"
    settings = _read_json(path)
    generation = _read_json(folder / "generation_config.json")
    jinja_path = folder / "chat_template.jinja"
    in_own_file = jinja_path.exists()
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool | None):
        raise ModelError(f"{path}: add_bos_token must be true or false, not {adds_bos!r}")
    return ModelFiles(
        folder=folder,
        chat_template=_read_text(jinja_path) if in_own_file else _template(path, settings.get("chat_template")),
        chat_template_path=jinja_path if in_own_file else path,
        special_tokens=_special_tokens(_read_json(folder / "special_tokens_map.json") | settings),
        adds_bos=adds_bos,
        names_end_tokens=generation.get("eos_token_id") is not None,
    )


def _template(path: Path, value: Any) -> str | None:
    """A string, or a list of named ones of which `default` is for conversations."""
    if value is None or isinstance(value, str):
        return value or None
    try:
        return {str(named["name"]): str(named["template"]) for named in value}.get("default")
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path}: chat_template is neither text nor a list of named templates") from error


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Tokens are written as text, or as an object with their `content`."""
    tokens = {}
    for role, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(text, str):
            tokens[role] = text
    return tokens


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file is not there."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value
