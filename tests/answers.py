"""Answers of `/v1/completions`, whole or as events: their text, and that it is the same each time it is asked for."""

import json
from typing import Any


class WrongAnswer(Exception):
    """What came is not what a client may expect."""


def text_of(status: int, body: str, *, is_stream: bool) -> str:
    """The text in an answer. Raises WrongAnswer for an error, and for a stream without its end."""
    if status != 200:
        raise WrongAnswer(f"{status} {body}")
    if not is_stream:
        return _text_in(json.loads(body))
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        raise WrongAnswer(f"a stream that ends with {events[-1:]}")
    return "".join(_text_in(json.loads(event)) for event in events[:-1])


class SameTexts:
    """Remembers what was answered to each question."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def check(self, number: int, text: str) -> None:
        """Raises WrongAnswer for no text, and for another one than last time."""
        if not text or self._texts.setdefault(number, text) != text:
            raise WrongAnswer(f"{text!r} instead of {self._texts.get(number)!r}")


def _text_in(answer: dict[str, Any]) -> str:
    if "error" in answer:
        raise WrongAnswer(answer["error"]["message"])
    text: str = answer["choices"][0]["text"]
    return text
