"""What a model's `tokenizer.json` says about decoding: each token's own text, the special ones, the decoder's rules.

Reads the file itself: decoding the common families is a table, and a table of 49,000 tokens costs a tenth of the memory
of the library's tokenizer. Does not own how tokens become text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as its file writes them, before any decoder."""

    path: Path
    tokens: Mapping[int, str]
    special_token_ids: frozenset[int]
    steps: tuple["DecoderStep", ...]
    """The steps of the decoder, in order; empty if the file names none."""


class DecoderStep(msgspec.Struct, frozen=True):
    """One step of a decoder, with the fields of all kinds of step that are decoded without the library."""

    type: str
    decoders: tuple["DecoderStep", ...] = ()
    """Of a Sequence."""
    pattern: dict[str, str] = {}
    """Of Replace: `String` or `Regex`."""
    content: str = " "
    """Of Replace: the replacement. Of Strip: the character."""
    start: int = 0
    stop: int = 0
    replacement: str = "▁"
    """Of Metaspace: what stands for a space."""
    prepend_scheme: str = "always"
    add_prefix_space: bool = True


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: DecoderStep | None = None


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of the model in `folder`. Raises ModelError that names the file at fault."""
    path = folder / "tokenizer.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: this is not a model folder") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    return Vocabulary(
        path=path,
        tokens=_tokens(file),
        special_token_ids=frozenset(token.id for token in file.added_tokens if token.special),
        steps=tuple(_steps(file.decoder)) if file.decoder else (),
    )


def _tokens(file: _File) -> dict[int, str]:
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        tokens = {token_id: token for token, token_id in vocab.items()}
    else:  # a Unigram model lists its tokens with their scores
        tokens = {token_id: token for token_id, (token, _score) in enumerate(vocab)}
    return tokens | {added.id: added.content for added in file.added_tokens}


def _steps(decoder: DecoderStep) -> list[DecoderStep]:
    """A decoder's steps: a sequence, which may hold sequences, becomes one flat list."""
    if decoder.type != "Sequence":
        return [decoder]
    return [step for inner in decoder.decoders for step in _steps(inner)]
