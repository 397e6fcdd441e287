"""The decoder of models whose tokens are bytes written as characters: GPT-2, Llama 3, Qwen, SmolLM.

A table from token to bytes, and an incremental UTF-8 decoder: exact, and under a microsecond a token.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Final

from services.detokenizer.incremental import TextDecoder
from services.detokenizer.vocabulary import Vocabulary

_NONE: Final[frozenset[int]] = frozenset()


def is_byte_level(vocabulary: Vocabulary) -> bool:
    """Whether the tokens of this vocabulary are bytes written as characters."""
    return [step.type for step in vocabulary.steps if step.type != "Fuse"] == ["ByteLevel"]


class ByteLevelDecoding:
    """The text is the tokens' bytes as UTF-8, with U+FFFD for what is none."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes = {token_id: _bytes(token) for token_id, token in vocabulary.tokens.items()}
        self._special_token_ids = vocabulary.special_token_ids

    def new_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for one choice."""
        return _ByteLevelDecoder(self._bytes, self._special_token_ids if skip_special_tokens else _NONE)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself; empty for an unknown token."""
        return self._bytes.get(token_id, b"")


class _ByteLevelDecoder:
    """Holds back at most the three bytes of an unfinished character."""

    __slots__ = ("_bytes", "_held", "_skipped")

    def __init__(self, table: dict[int, bytes], skipped: frozenset[int]) -> None:
        self._bytes = table
        self._skipped = skipped
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        known, skipped = self._bytes.get, self._skipped
        data = self._held + b"".join([known(token_id, b"") for token_id in token_ids if token_id not in skipped])
        text, num_decoded = utf_8_decode(data, "replace", False)
        self._held = data[num_decoded:]
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's way to write bytes: the printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES: Final = _byte_of_character()


def _bytes(token: str) -> bytes:
    """A token that has any other character, such as an added one with a space, stands for itself."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
