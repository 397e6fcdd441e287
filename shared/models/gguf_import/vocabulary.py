"""The text side of a GGUF file's metadata: tokens and their kinds, merges, special tokens, the chat template."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from shared.errors import ModelError
from shared.models.gguf_import.reader import GGUFFile

_END_TOKENS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "</s>",
)
"""Control tokens that end a turn or a text wherever they occur, whatever else a file says (llama.cpp does the same)."""


class TokenKind(IntEnum):
    """llama.cpp's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer is built from."""

    model: str
    """gpt2 (byte-level BPE) or llama (SentencePiece BPE)."""
    pre_tokenizer: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    merges: list[str] | None
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    padding_id: int | None
    adds_bos: bool | None
    """None if the file leaves it to the kind of tokenizer."""
    adds_eos: bool
    adds_space_prefix: bool
    chat_template: str | None
    end_token_ids: tuple[int, ...]

    def token(self, token_id: int | None) -> str | None:
        """The text of a token."""
        return None if token_id is None else self.tokens[token_id]

    def ids_of(self, kind: TokenKind) -> list[int]:
        """The tokens of one kind."""
        return [token_id for token_id, its in enumerate(self.kinds) if its == kind]


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """The vocabulary in the metadata. Raises ModelError if there is none, or if it contradicts itself."""
    reader = _Reader(file)
    tokens = reader.get("tokens", list)
    if not tokens:
        raise ModelError(f"{file.path} holds no vocabulary (tokenizer.ggml.tokens)")
    kinds = reader.get("token_type", list) or [TokenKind.NORMAL] * len(tokens)
    scores, model = reader.get("scores", list), reader.get("model", str) or "none"
    if len(kinds) != len(tokens) or (scores is not None and len(scores) != len(tokens)):
        raise ModelError(f"{file.path}: the vocabulary's {len(tokens)} tokens have not one type and score each")
    if reader.get("precompiled_charsmap", list) or reader.get("remove_extra_whitespaces", bool):
        raise ModelError(f"{file.path}: its tokenizer rewrites characters or white space, which is not supported")
    # llama.cpp's defaults for SentencePiece vocabularies of files that do not say.
    defaults = (1, 2, 0) if model == "llama" else (None, None, None)
    bos_id, eos_id, unknown_id = (
        reader.token_id(name, len(tokens), default)
        for name, default in zip(("bos", "eos", "unknown"), defaults, strict=True)
    )
    others = [reader.token_id(name, len(tokens)) for name in ("eot", "eom")]
    return Vocabulary(
        model=model,
        pre_tokenizer=reader.get("pre", str) or "default",
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        merges=reader.get("merges", list),
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=unknown_id,
        padding_id=reader.token_id("padding", len(tokens)),
        adds_bos=reader.get("add_bos_token", bool),
        adds_eos=reader.get("add_eos_token", bool) or False,
        adds_space_prefix=reader.get("add_space_prefix", bool) is not False,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        end_token_ids=_end_token_ids(tokens, kinds, [eos_id, *others]),
    )


def _end_token_ids(tokens: list[str], kinds: list[int], named: list[int | None]) -> tuple[int, ...]:
    """The tokens that end a generation: those that the file names, then those known by their text."""
    ids = [token_id for token_id in named if token_id is not None]
    by_text = {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] == TokenKind.CONTROL}
    ids += [by_text[token] for token in _END_TOKENS if token in by_text]
    return tuple(dict.fromkeys(ids))


class _Reader:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def get(self, name: str, kind: type) -> Any:
        value = self._file.metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and not isinstance(value, kind):
            raise ModelError(f"{self._file.path}: tokenizer.ggml.{name} is a {type(value).__name__}")
        return value

    def token_id(self, name: str, num_tokens: int, default: int | None = None) -> int | None:
        value = self.get(f"{name}_token_id", int)
        if value is None:
            value = default
        if value is not None and not 0 <= value < num_tokens:
            raise ModelError(f"{self._file.path}: tokenizer.ggml.{name}_token_id is {value}, of {num_tokens} tokens")
        return None if value is None else int(value)
