"""Tokens to text as they arrive: what every decoder promises. The decoders are in the modules beside this one.

The promise: however a choice's tokens are cut into calls, the pieces of text put together are the text of all its
tokens decoded at once, and no piece ends inside a character. What is held back is bounded, and so is the work for a
token. The library's own `DecodeStream` keeps neither: its work grows with the square of the length of a run of bytes
that are no UTF-8, and over byte-fallback tokens it fails. (One exception to the promise is in `pieces`.)
"""

from collections.abc import Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """The text of one choice."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now that these tokens follow; whole characters, perhaps none."""
        ...

    def finish(self) -> str:
        """What was held back; unfinished characters become U+FFFD. Nothing may be pushed afterwards."""
        ...


class Decoding(Protocol):
    """How one model's tokens become text."""

    def new_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for one choice."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, which need not be whole characters; empty for an unknown token."""
        ...


def decoder_after(decoding: Decoding, context: Sequence[int], *, skip_special_tokens: bool) -> TextDecoder:
    """A decoder for one choice whose text is that of context and output together, less that of the context."""
    decoder = decoding.new_decoder(skip_special_tokens=skip_special_tokens)
    if not context:
        return decoder
    probe = decoding.new_decoder(skip_special_tokens=skip_special_tokens)
    decoder.push(context)
    probe.push(context)
    held = probe.finish()
    return _AfterContext(decoder, held) if held else decoder


def without_shared_start(text: str, known: str) -> str:
    """`text` without the characters that it and `known` both start with."""
    if text.startswith(known):
        return text[len(known) :]
    num_shared = next((n for n, (ours, theirs) in enumerate(zip(text, known, strict=False)) if ours != theirs), None)
    return "" if num_shared is None else text[num_shared:]


class _AfterContext:
    """A decoder that starts in the middle of a character; `held` is the text that the context alone would end with."""

    __slots__ = ("_decoder", "_held")

    def __init__(self, decoder: TextDecoder, held: str) -> None:
        self._decoder = decoder
        self._held = held

    def push(self, token_ids: Sequence[int]) -> str:
        return self._less_held(self._decoder.push(token_ids))

    def finish(self) -> str:
        return self._less_held(self._decoder.finish())

    def _less_held(self, text: str) -> str:
        if not text or not self._held:
            return text
        held, self._held = self._held, ""
        return without_shared_start(text, held)
