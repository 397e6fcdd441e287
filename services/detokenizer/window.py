"""The decoder for every other kind of tokenizer: the library decodes a window of the last tokens again and again.

New text is what the window's text has more than before. A few tokens of context are enough for decoders that look at
the token before, or treat the first one apart. Text that ends in U+FFFD may be an unfinished character and waits.
Slower than a table: two calls into the library for each token.
"""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from services.detokenizer.incremental import TextDecoder, without_shared_start
from services.detokenizer.vocabulary import Vocabulary
from shared.errors import ModelError, RequestError

_NONE: Final[frozenset[int]] = frozenset()
_MAX_CONTEXT_TOKENS: Final = 8
_MAX_HELD_TOKENS: Final = 32


def load_window_decoding(vocabulary: Vocabulary) -> "WindowDecoding":
    """The library's decoding of this vocabulary's file. Raises ModelError if the library cannot read it."""
    try:
        tokenizer = Tokenizer.from_file(str(vocabulary.path))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{vocabulary.path} is not a tokenizer: {error}") from error
    return WindowDecoding(vocabulary, tokenizer)


class WindowDecoding:
    """The text is whatever the library says."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer

    def new_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for one choice. Its methods raise RequestError if the library cannot decode the tokens."""
        skipped = self._vocabulary.special_token_ids if skip_special_tokens else _NONE
        return _WindowDecoder(self._tokenizer, self._vocabulary, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token as the vocabulary writes it; empty for an unknown token."""
        return self._vocabulary.tokens.get(token_id, "").encode()


class _WindowDecoder:
    __slots__ = ("_context", "_context_text", "_held", "_skipped", "_tokenizer", "_vocabulary")

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._give_out(self._decode(self._context + self._held)) if self._held else ""

    def _push_one(self, token_id: int) -> str:
        if token_id in self._skipped or token_id not in self._vocabulary.tokens:
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def _give_out(self, text: str) -> str:
        new = without_shared_start(text, self._context_text)
        self._context = (self._context + self._held)[-_MAX_CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)
        self._held = []
        return new

    def _decode(self, token_ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        except BaseException as error:  # the library raises bare Exceptions, and its panics are not even that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RequestError(f"the output cannot be decoded: {error}") from error
