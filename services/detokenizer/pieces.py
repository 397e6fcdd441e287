"""The decoder of models whose tokens are pieces of text, with tokens for single bytes where the text has no piece.

That is SentencePiece's way: Llama 2, Mistral, Gemma. `▁` stands for a space, and the first space of a text may be
dropped, so the text of a token depends on whether it is the first.

A run of byte tokens is decoded as a whole: if any of it is no UTF-8, each of its bytes becomes one U+FFFD, even those
that spell characters. So a run is held back until it ends; but once it is longer than `MAX_HELD_BYTES`, its characters
are given out as they come, and only in such a run may the text differ from the library's, which would take back
characters that the client has seen.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.detokenizer.incremental import TextDecoder
from services.detokenizer.vocabulary import DecoderStep, Vocabulary

MAX_HELD_BYTES: Final = 64
_NONE: Final[frozenset[int]] = frozenset()
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How a token's own text becomes a piece of the whole text."""

    replacements: tuple[tuple[str, str], ...] = ()
    """Made in every token."""
    first_replacements: tuple[tuple[str, str], ...] | None = None
    """Made in the first token instead, if it differs."""
    has_byte_tokens: bool = False
    stripped: str = ""
    """The character that is taken from the start of the whole text, up to `max_stripped` times."""
    max_stripped: int = 0

    def piece(self, token: str) -> str | int:
        """The text of a token that is not the first, or the byte that it stands for."""
        token = _replaced(token, self.replacements)
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        return token


def piece_rules(steps: Sequence[DecoderStep]) -> PieceRules | None:
    """The rules that these steps of a decoder amount to, or None if they are of another kind."""
    kinds = "".join(f"{step.type} " for step in steps)
    if kinds == "Metaspace ":
        return _metaspace(steps[0])
    replacements = tuple((step.pattern.get("String", ""), step.content) for step in steps if step.type == "Replace")
    strip = next((step for step in steps if step.type == "Strip"), DecoderStep("Strip"))
    if not re.fullmatch(r"(Replace )*(ByteFallback )?Fuse (Strip )?", kinds) or strip.stop:
        return None
    if not all(pattern for pattern, _ in replacements):
        return None  # a regular expression
    return PieceRules(replacements, None, "ByteFallback " in kinds, strip.content, strip.start)


def _metaspace(step: DecoderStep) -> PieceRules:
    drops_first = step.prepend_scheme != "never" and step.add_prefix_space
    return PieceRules(((step.replacement, " "),), ((step.replacement, ""),) if drops_first else None)


def _replaced(token: str, replacements: tuple[tuple[str, str], ...]) -> str:
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    return token


class PieceDecoding:
    """The text is the tokens' pieces one after the other, under `PieceRules`."""

    def __init__(self, vocabulary: Vocabulary, rules: PieceRules) -> None:
        self._tokens = vocabulary.tokens
        self._rules = rules
        self._pieces = {token_id: rules.piece(token) for token_id, token in vocabulary.tokens.items()}
        self._special_token_ids = vocabulary.special_token_ids

    def new_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for one choice."""
        first = None if self._rules.first_replacements is None else self._first_piece
        skipped = self._special_token_ids if skip_special_tokens else _NONE
        return _PieceDecoder(self._pieces, self._rules, first, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, with its space; empty for an unknown token."""
        piece = self._pieces.get(token_id, "")
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def _first_piece(self, token_id: int) -> str:
        return _replaced(self._tokens[token_id], self._rules.first_replacements or ())


class _PieceDecoder:
    __slots__ = ("_first", "_pieces", "_rules", "_run", "_run_is_long", "_skipped", "_to_strip")

    def __init__(
        self,
        pieces: Mapping[int, str | int],
        rules: PieceRules,
        first: Callable[[int], str] | None,
        skipped: frozenset[int],
    ) -> None:
        self._pieces = pieces
        self._rules = rules
        self._first = first
        self._skipped = skipped
        self._to_strip = rules.max_stripped
        self._run = bytearray()
        self._run_is_long = False

    def push(self, token_ids: Sequence[int]) -> str:
        texts: list[str] = []
        for token_id in token_ids:
            piece = self._pieces.get(token_id)
            if piece is None or token_id in self._skipped:
                continue  # as if it were not there: it does not even end a run of bytes
            if isinstance(piece, int):
                texts.append(self._take_byte(piece))
                continue
            if self._run:
                texts.append(self._end_run())
            if self._first is not None:
                piece, self._first = self._first(token_id), None
            texts.append(piece)
        return self._stripped("".join(texts))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _take_byte(self, byte: int) -> str:
        self._run.append(byte)
        if len(self._run) <= MAX_HELD_BYTES and not self._run_is_long:
            return ""
        self._run_is_long = True
        text, num_decoded = utf_8_decode(self._run, "replace", False)
        del self._run[:num_decoded]
        return text

    def _end_run(self) -> str:
        run, is_long = bytes(self._run), self._run_is_long
        self._run.clear()
        self._run_is_long = False
        try:
            return run.decode()
        except UnicodeDecodeError:
            return run.decode("utf-8", "replace") if is_long else "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] == self._rules.stripped:
                text = text[1:]
                self._to_strip -= 1
            else:
                self._to_strip = 0
        return text
