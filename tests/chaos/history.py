"""What a client saw of one request, and the judge of it: nothing doubled, nothing missing, one end.

A history is everything that arrived, in the order in which it arrived, over all connections that it took.
`broken_rules` needs nothing else to judge; `differences` compares what it adds up to with an undisturbed run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Logprob = tuple[str, float, tuple[tuple[str, float], ...]]
"""One output position: the token, its log-probability, and the alternatives with theirs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one choice, and the tokens that came with it."""

    index: int
    text: str
    offset: int | None = None
    """Of the text in characters, if the protocol says it."""
    token_ids: tuple[int, ...] = ()
    token_offset: int | None = None
    """Of the tokens, if the protocol says it."""
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """A terminal event."""

    kind: str
    """completed, failed or cancelled."""
    finish_reasons: tuple[str | None, ...] = ()
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the output; what the prefix cache had may differ from run to run."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Connected:
    """The client reached a gateway, for the first time or again; what follows came over this connection."""

    gateway: str
    why: str = ""
    """What became of the connection before."""


Event = Piece | Ending | Connected


@dataclass(slots=True)
class Output:
    """What the pieces of one choice add up to."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


def outputs(events: Iterable[Event], num_choices: int) -> list[Output]:
    """What a history adds up to, for each choice, taking every piece as it came."""
    choices = [Output() for _ in range(num_choices)]
    for event in events:
        if isinstance(event, Piece) and event.index < num_choices:
            choice = choices[event.index]
            choice.text += event.text
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs
    return choices


def broken_rules(events: Sequence[Event], num_choices: int) -> list[str]:
    """The rules that a history breaks by itself: every index once and in order, and one terminal event, the last."""
    broken: list[str] = []
    num_chars, num_tokens = [0] * num_choices, [0] * num_choices
    endings: list[Ending] = []
    for event in events:
        if isinstance(event, Ending):
            endings.append(event)
        elif isinstance(event, Piece):
            if endings:
                broken.append(f"choice {event.index}: {event.text!r} came after the end")
            if not 0 <= event.index < num_choices:
                broken.append(f"there is no choice {event.index}")
                continue
            broken += _misplaced("characters", event.index, num_chars, event.offset, len(event.text))
            broken += _misplaced("tokens", event.index, num_tokens, event.token_offset, len(event.token_ids))
    if not endings:
        broken.append("there was no terminal event")
    elif len(endings) > 1:
        broken.append(f"there were {len(endings)} terminal events: {', '.join(end.kind for end in endings)}")
    return broken


def _misplaced(what: str, index: int, known: list[int], offset: int | None, count: int) -> list[str]:
    """What is wrong with the place of a piece; then `known` is where it says that it ends."""
    expected = known[index]
    start = expected if offset is None else offset
    known[index] = max(expected, start + count)
    if start < expected:
        return [f"choice {index}: {what} {start} to {min(start + count, expected)} came twice"]
    if start > expected:
        return [f"choice {index}: {what} {expected} to {start} are missing"]
    return []


def differences(events: Sequence[Event], undisturbed: Sequence[Event], num_choices: int) -> list[str]:
    """In what the result of a history differs from that of an undisturbed run. Of one that ended in another way, what
    it said until then has to be right as far as it goes, and that it is not all is not said in so many words."""
    found: list[str] = []
    end, wanted_end = _end(events), _end(undisturbed)
    is_cut_off = end is not None and wanted_end is not None and end.kind != wanted_end.kind
    pairs = zip(outputs(events, num_choices), outputs(undisturbed, num_choices), strict=True)
    for index, (choice, wanted) in enumerate(pairs):
        for what, given, there in (
            ("tokens", choice.token_ids, wanted.token_ids),
            ("characters", choice.text, wanted.text),
            ("log-probabilities", choice.logprobs, wanted.logprobs),
        ):
            there = there[: len(given)] if is_cut_off else there
            found += _first_difference(f"choice {index}: {what}", given, there)
    if is_cut_off and end is not None:
        found.append(f"it is {end.kind} instead of completed, {end.error}")
    elif end != wanted_end:
        found.append(f"the end is {end}, and was {wanted_end}")
    return found


def _end(events: Iterable[Event]) -> Ending | None:
    return next((event for event in events if isinstance(event, Ending)), None)


def _first_difference(what: str, given: Sequence[Any], wanted: Sequence[Any]) -> list[str]:
    if given == wanted:
        return []
    place = next(
        (place for place, (one, other) in enumerate(zip(given, wanted, strict=False)) if one != other),
        min(len(given), len(wanted)),
    )
    here, there = given[place : place + 3], wanted[place : place + 3]
    return [f"{what} differ from {place} on: {here!r} instead of {there!r} ({len(given)} instead of {len(wanted)})"]
