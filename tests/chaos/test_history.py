"""The judge itself: it finds whatever may be wrong with a stream, and nothing wrong with one that is right."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.history import Connected, Ending, Event, Logprob, Piece, broken_rules, differences

COMPLETED = Ending("completed", ("stop",), (10, 6))
TOKENS = (5, 6, 7, 8, 9, 10)
TEXT = "abcdef"


def piece(start: int, stop: int, *, has_offsets: bool = True) -> Piece:
    """Tokens `start` to `stop` of a choice in which every token is a character."""
    return Piece(
        0,
        TEXT[start:stop],
        start if has_offsets else None,
        TOKENS[start:stop],
        start if has_offsets else None,
        tuple(logprob(position) for position in range(start, stop)),
    )


def logprob(position: int) -> Logprob:
    return TEXT[position], -position / 8, ((TEXT[position], -position / 8), ("z", -9.0))


UNDISTURBED: list[Event] = [Connected("a"), piece(0, 6), COMPLETED]


def judged(*events: Event) -> list[str]:
    return broken_rules(events, 1)


@given(st.sets(st.integers(1, 5)), st.booleans(), st.integers(0, 6))
def test_a_stream_in_any_pieces_over_any_connections_is_right(
    cuts: set[int], has_offsets: bool, reconnects_at: int
) -> None:
    edges = [0, *sorted(cuts), 6]
    events: list[Event] = [piece(start, stop, has_offsets=has_offsets) for start, stop in itertools.pairwise(edges)]
    events.insert(min(reconnects_at, len(events)), Connected("b"))
    events.append(COMPLETED)
    assert judged(*events) == []
    assert differences(events, UNDISTURBED, 1) == []


def test_tokens_that_came_twice_are_found() -> None:
    assert judged(piece(0, 4), Connected("b"), piece(2, 6), COMPLETED) == [
        "choice 0: characters 2 to 4 came twice",
        "choice 0: tokens 2 to 4 came twice",
    ]


def test_tokens_that_came_twice_without_their_text_are_found() -> None:
    doubled = Piece(0, "e", 4, (8, 9), 3)
    assert judged(piece(0, 4), doubled, piece(5, 6), COMPLETED) == ["choice 0: tokens 3 to 4 came twice"]


def test_missing_tokens_are_found() -> None:
    assert judged(piece(0, 2), piece(3, 6), COMPLETED) == [
        "choice 0: characters 2 to 3 are missing",
        "choice 0: tokens 2 to 3 are missing",
    ]


def test_pieces_that_changed_places_are_found() -> None:
    assert len(judged(piece(0, 2), piece(4, 6), piece(2, 4), COMPLETED)) == 4


def test_doubled_missing_and_swapped_tokens_are_found_in_a_protocol_that_says_no_offsets() -> None:
    doubled: list[Event] = [piece(0, 4, has_offsets=False), piece(2, 6, has_offsets=False), COMPLETED]
    missing: list[Event] = [piece(0, 2, has_offsets=False), piece(3, 6, has_offsets=False), COMPLETED]
    swapped: list[Event] = [
        piece(0, 2, has_offsets=False),
        piece(4, 6, has_offsets=False),
        piece(2, 4, has_offsets=False),
        COMPLETED,
    ]
    for events in (doubled, missing, swapped):
        found = differences(events, UNDISTURBED, 1)
        assert [line.partition(" differ")[0] for line in found] == [
            "choice 0: tokens",
            "choice 0: characters",
            "choice 0: log-probabilities",
        ]


def test_two_tokens_that_changed_places_within_a_piece_are_found() -> None:
    swapped = dataclasses.replace(piece(0, 6), token_ids=(5, 7, 6, 8, 9, 10))
    assert judged(swapped, COMPLETED) == []
    assert differences([swapped, COMPLETED], UNDISTURBED, 1) == [
        "choice 0: tokens differ from 1 on: [7, 6, 8] instead of [6, 7, 8] (6 instead of 6)"
    ]


def test_a_second_terminal_event_is_found() -> None:
    failed = Ending("failed", error="unavailable")
    assert judged(piece(0, 6), COMPLETED, failed) == ["there were 2 terminal events: completed, failed"]
    assert judged(piece(0, 6), COMPLETED, COMPLETED) == ["there were 2 terminal events: completed, completed"]


def test_a_missing_terminal_event_is_found() -> None:
    assert judged(piece(0, 6)) == ["there was no terminal event"]


def test_text_after_the_end_is_found() -> None:
    assert judged(piece(0, 3), COMPLETED, piece(3, 6)) == ["choice 0: 'def' came after the end"]


def test_a_choice_that_was_not_asked_for_is_found() -> None:
    assert judged(dataclasses.replace(piece(0, 6), index=1), COMPLETED) == ["there is no choice 1"]


def test_one_choice_too_few_is_found() -> None:
    two: list[Event] = [piece(0, 6), dataclasses.replace(piece(0, 6), index=1), COMPLETED]
    assert differences(two, two, 2) == []
    assert len(differences([piece(0, 6), COMPLETED], two, 2)) == 3


def test_another_end_than_the_undisturbed_one_is_found() -> None:
    for end, words in (
        (dataclasses.replace(COMPLETED, finish_reasons=("length",)), "the end is"),
        (dataclasses.replace(COMPLETED, usage=(10, 7)), "the end is"),
        (Ending("failed", error="unavailable"), "it is failed instead of completed, unavailable"),
        (Ending("cancelled"), "it is cancelled"),
    ):
        (found,) = differences([piece(0, 6), end], UNDISTURBED, 1)
        assert found.startswith(words)


def test_what_a_stream_said_before_it_failed_has_to_be_right() -> None:
    failed = Ending("failed", error="unavailable")
    wrong = dataclasses.replace(piece(0, 2), token_ids=(5, 9))
    assert [line[:9] for line in differences([piece(0, 2), failed], UNDISTURBED, 1)] == ["it is fai"]
    assert [line[:9] for line in differences([wrong, failed], UNDISTURBED, 1)] == ["choice 0:", "it is fai"]


def test_a_stream_that_completed_too_early_is_found() -> None:
    assert len(differences([piece(0, 3), COMPLETED], UNDISTURBED, 1)) == 3


@given(st.integers(0, 5), st.sampled_from([-1.0, 0.0001]))
def test_a_log_probability_that_is_not_exactly_the_same_is_found(position: int, change: float) -> None:
    whole = piece(0, 6)
    changed = list(whole.logprobs)
    token, value, top = changed[position]
    changed[position] = token, value + change, top
    events: list[Event] = [dataclasses.replace(whole, logprobs=tuple(changed)), COMPLETED]
    assert [line.partition(" differ")[0] for line in differences(events, UNDISTURBED, 1)] == [
        "choice 0: log-probabilities"
    ]


@given(st.integers(0, 5), st.integers(0, 5))
def test_any_doubled_or_dropped_token_is_found_one_way_or_another(cut: int, resumed_at: int) -> None:
    """A client that got `cut` tokens and is resumed anywhere else than there gets something wrong."""
    events: list[Event] = [piece(0, cut), Connected("b"), piece(resumed_at, 6), COMPLETED]
    assert bool(judged(*events)) == (cut != resumed_at)
    silent: list[Event] = [piece(0, cut, has_offsets=False), piece(resumed_at, 6, has_offsets=False), COMPLETED]
    assert bool(differences(silent, UNDISTURBED, 1)) == (cut != resumed_at)
