"""Keeping text that merely spells a control token from becoming one.

A control token is an added token that only the template may write: every one that its file calls special, and every
other one that the template writes and does not look for in messages, such as a role marker that was not marked special.
(`<think>` in a template that cuts it out of old answers is not one: the template relies on finding it.)

Two things are needed. While the template runs, each control token's text in what the client sent is **disguised** as
one private-use character that occurs nowhere else, so no trimming, cutting or joining can take it apart, and afterwards
the control tokens in the rendered text are the template's own. Then the text is encoded by a **guarded** tokenizer: the
same model and rules, but its control tokens are spelt with a secret, so that their usual spelling is ordinary text.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from shared.errors import InvalidRequest

_PRIVATE_USE: Final = range(0xF0000, 0x10FFFE)
_PRIVATE: Final = re.compile(f"[{chr(_PRIVATE_USE[0])}-{chr(_PRIVATE_USE[-1])}]")

_IN_ASCII: Final = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
"""A character beyond U+FFFF as JSON writes it in ASCII."""


class ControlTokens:
    """The control tokens of one model, and the tokenizer that takes their text for text."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        """`texts` are the control tokens; each is an added token of `tokenizer`."""
        secret = secrets.token_hex(8)
        longest_first = sorted(texts, key=len, reverse=True)
        self._spellings = {text: f"\U0010fff0{secret}{n}\U0010fff1" for n, text in enumerate(longest_first)}
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._tokenizer, self._token_ids = _guarded(tokenizer, self._spellings)

    def occur_in(self, values: Iterable[Any]) -> bool:
        """Whether any text in these values, however deep, spells a control token."""
        return any(self._pattern.search(text) for value in values for text in _texts(value))

    def disguise(self, values: Iterable[Any]) -> "Disguise":
        """A disguise for all control tokens in these values.

        Raises InvalidRequest if they use up the private-use characters, which takes half a megabyte of them.
        """
        texts = [text for value in values for text in _texts(value)]
        spelt = sorted({match for text in texts for match in self._pattern.findall(text)})
        stand_ins = dict(zip(spelt, _unused(texts), strict=False))
        if len(stand_ins) < len(spelt):
            raise InvalidRequest("the messages use too many private-use characters", param="messages")
        return Disguise(self._pattern, stand_ins)

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text, none of them a control token."""
        return [self._token_ids.get(i, i) for i in self._tokenizer.encode(text, add_special_tokens=False).ids]

    def encode_rendered(self, text: str, disguise: "Disguise") -> list[int]:
        """The tokens of a rendered conversation; control tokens are only those that the template wrote."""
        guarded = self._pattern.sub(lambda match: self._spellings[match[0]], text)
        return self.encode_text(disguise.reveal(guarded))


class Disguise:
    """Stand-ins for the control tokens that one client's messages spell."""

    def __init__(self, pattern: re.Pattern[str], stand_ins: Mapping[str, str]) -> None:
        self._pattern = pattern
        self._stand_ins = stand_ins
        self._originals = str.maketrans({stand_in: text for text, stand_in in stand_ins.items()})

    def hide(self, value: Any) -> Any:
        """A copy of a value with the stand-ins in all its text, keys included."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._stand_ins[match[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with the stand-ins replaced by what they stand for, also where a template wrote JSON in ASCII."""
        for original, stand_in in self._stand_ins.items():
            text = text.replace(_in_ascii(stand_in), original)
        return text.translate(self._originals)


def _unused(texts: list[str]) -> Iterator[str]:
    """The private-use characters that occur in none of the texts, neither as such nor as JSON writes them in ASCII."""
    taken = {found for text in texts for pattern in (_PRIVATE, _IN_ASCII) for found in pattern.findall(text)}
    for character in map(chr, _PRIVATE_USE):
        if character not in taken and _in_ascii(character) not in taken:
            yield character


def _in_ascii(character: str) -> str:
    return json.dumps(character)[1:-1]


def _guarded(tokenizer: Tokenizer, spellings: Mapping[str, str]) -> tuple[Tokenizer, dict[int, int]]:
    """A tokenizer that shares the other's model, and which of its ids mean which of the other's."""
    guarded = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        guarded.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        guarded.pre_tokenizer = tokenizer.pre_tokenizer
    token_ids = {}
    for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        spelling = spellings.get(token.content)
        guarded.add_tokens([_respelt(token, spelling) if spelling else token])
        new_id = guarded.token_to_id(spelling or token.content)
        if new_id is not None:
            token_ids[new_id] = token_id
    return guarded, token_ids


def _respelt(token: AddedToken, spelling: str) -> AddedToken:
    """The same token, found in the raw text by another spelling."""
    return AddedToken(spelling, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=True)


def _texts(value: Any) -> Iterator[str]:
    """All text in a value of JSON's kinds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
