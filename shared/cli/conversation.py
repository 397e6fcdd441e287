"""A conversation in the terminal: its turns, and what a line that a person typed asks for. Pure."""

from dataclasses import dataclass, field
from typing import Any, Final

HELP: Final = """\
/clear          forget the conversation (the system prompt stays)
/system TEXT    set the system prompt; without TEXT, take it away
/stats          show or hide speed after each answer
/exit           leave; so does Ctrl-D
Ctrl-C stops an answer. A backslash at the end of a line goes on with the next; lines that are pasted together stay
together. Two slashes begin a text with one."""


@dataclass(frozen=True, slots=True)
class Say:
    """The text is for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """The line is for us."""

    name: str
    argument: str = ""


def read_input(text: str) -> Say | Command | None:
    """What a person means by `text`; None if nothing."""
    if not text.strip():
        return None
    if text.startswith("//"):
        return Say(text[1:])
    if text.startswith("/"):
        name, *argument = text[1:].split(maxsplit=1) or [""]
        return Command(name, "".join(argument).strip())
    return Say(text)


def join_lines(lines: list[str]) -> str:
    """Lines of which all but the last end in a backslash, as one text."""
    return "\n".join([*(line.removesuffix("\\") for line in lines[:-1]), *lines[-1:]])


@dataclass(slots=True)
class Conversation:
    """The turns so far, and how the model is asked for the next."""

    model: str
    system: str = ""
    options: dict[str, float | int] = field(default_factory=dict)
    """Further fields of each request, such as `temperature`."""
    turns: list[dict[str, str]] = field(default_factory=list)

    def body(self, text: str) -> dict[str, Any]:
        """The request that asks for the answer to `text`. Changes nothing."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns, {"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, **self.options}

    def add(self, text: str, answer: str) -> None:
        """Remember a turn. One without any answer is as if it had not been."""
        if answer:
            self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()
