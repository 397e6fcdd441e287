"""What must be found out about a tokenizer once, before it is used: its BOS and end tokens, and what it may spell."""

import json
import re
from typing import Any, Final

from tokenizers import Tokenizer

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.model_files import ModelFiles
from shared.errors import ModelError
from shared.models.config import ModelConfig

_POSITION_FREE: Final = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Replace"})
"""Steps of a decoder under which a token has the same text wherever it stands."""
_MARKER: Final = re.compile(r"[<\[].+[>\]]", re.DOTALL)


def bos_token_id(tokenizer: Tokenizer, files: ModelFiles) -> int | None:
    """The token that every prompt begins with, or None.

    `add_bos_token` decides if it is given, else what the tokenizer puts before an empty text. Raises ModelError if a
    BOS token is wanted and there is none.
    """
    if files.adds_bos is False:
        return None
    added = tokenizer.encode("", add_special_tokens=True).ids
    named = _id_of(tokenizer, files, "bos_token")
    if files.adds_bos:
        if named is None and not added:
            raise ModelError(f"{files.folder}: add_bos_token is true, but no file names a bos_token of the vocabulary")
        return added[0] if named is None else named
    is_eos = added[:1] == [_id_of(tokenizer, files, "eos_token")] and added[0] != named
    return added[0] if added and not is_eos else None


def end_token_ids(tokenizer: Tokenizer, files: ModelFiles, config: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a generation.

    `generation_config.json` decides if it says so, else those of `config.json` and the tokenizer's `eos_token`, which
    for chat models is often the one that ends a turn.
    """
    token_ids = list(config.end_token_ids)
    named = _id_of(tokenizer, files, "eos_token")
    if named is not None and not files.names_end_tokens:
        token_ids.append(named)
    return tuple(dict.fromkeys(token_id for token_id in token_ids if 0 <= token_id < config.vocab_size))


def control_texts(tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[str]:
    """The texts of control tokens, which only a template may write: see `services.tokenizer.control_tokens`."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = frozenset(token.content for token in added if token.special)
    markers = {token.content for token in added if not token.special and _MARKER.fullmatch(token.content)}
    return special if template is None else special | template.writes(markers)


def is_positional(tokenizer: Tokenizer) -> bool:
    """Whether the text of a token depends on what precedes it, such as a first space that is dropped."""
    if tokenizer.decoder is None:
        return True  # a space between any two
    return not all(_is_position_free(step) for step in _steps(json.loads(tokenizer.decoder.__getstate__())))


def _is_position_free(step: dict[str, Any]) -> bool:
    return step["type"] in _POSITION_FREE or (step["type"] == "Metaspace" and step["prepend_scheme"] == "never")


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _id_of(tokenizer: Tokenizer, files: ModelFiles, role: str) -> int | None:
    text = files.special_tokens.get(role)
    return None if text is None else tokenizer.token_to_id(text)
