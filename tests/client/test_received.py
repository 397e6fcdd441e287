"""What a client has: every character and token once, whatever is said twice and however it is cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.received import Gap, Received
from shoal.results import Alternative, Delta, TokenLogprob, Usage
from tests.client.fake_gateway import completed, delta

PIECES = st.lists(st.text(max_size=4), min_size=1, max_size=12)


def logprob(token: int) -> dict[str, Any]:
    return {
        "token": str(token),
        "logprob": -0.5,
        "bytes": [65],
        "top_logprobs": [{"token": "x", "logprob": -1.0, "bytes": [120]}],
    }


def event(pieces: list[str], first: int, last: int) -> dict[str, Any]:
    """A delta with the pieces from `first` to before `last`, each of which is one token."""
    tokens = list(range(first, last))
    return delta(
        len("".join(pieces[:first])),
        "".join(pieces[first:last]),
        token_offset=first,
        token_ids=tokens,
        logprobs=[logprob(token) for token in tokens],
    )


@given(PIECES, st.data())
def test_deltas_put_together_are_the_text_whatever_is_said_twice(pieces: list[str], data: st.DataObject) -> None:
    received, deltas, reached = Received(), list[Delta](), 0
    while reached < len(pieces):
        first = data.draw(st.integers(0, reached))
        last = data.draw(st.integers(reached + 1, len(pieces)))
        new = received.take(event(pieces, first, last))
        reached = last
        deltas += [new] if new is not None else []
    assert "".join(new.text for new in deltas) == "".join(pieces)
    assert [token for new in deltas for token in new.token_ids] == list(range(len(pieces)))
    assert [int(one.token) for new in deltas for one in new.logprobs] == list(range(len(pieces)))
    assert received.offsets() == ([len("".join(pieces))], [len(pieces)])
    (choice,) = received.result(completed()).choices
    assert (choice.text, choice.token_ids) == ("".join(pieces), tuple(range(len(pieces))))


@given(PIECES, st.data())
def test_missing_text_is_noticed(pieces: list[str], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(pieces)))
    received = Received()
    with pytest.raises(Gap):
        received.take(event(pieces, first, len(pieces)))


def test_offsets_name_every_choice_up_to_the_last_that_said_something() -> None:
    received = Received()
    assert received.offsets() == ([], [])
    assert received.is_empty
    received.take(delta(0, "abc", index=2, token_offset=0, logprobs=[logprob(0)]))
    assert received.offsets() == ([0, 0, 3], [0, 0, 1])
    assert not received.is_empty


def test_characters_are_code_points() -> None:
    received = Received()
    received.take(delta(0, "a😀é"))
    assert received.offsets()[0] == [3]


def test_what_somebody_else_has_is_counted_and_not_told() -> None:
    received = Received(offset=4, token_offset=2)
    assert received.offsets() == ([4], [2])
    new = received.take(delta(2, "llo", token_offset=1, token_ids=[7, 8]))
    assert new == Delta(0, 4, "o", (8,))


def test_result_says_what_the_terminal_event_says() -> None:
    received = Received()
    received.take(delta(0, "Hi", token_offset=0, token_ids=[5], logprobs=[logprob(5)]))
    result = received.result(completed(num_choices=2))
    assert (result.request_id, result.text, result.finish_reason) == ("req-1", "Hi", "stop")
    assert result.usage == Usage(3, 4, 2)
    assert result.usage.total_tokens == 7
    assert (result.timing.queue_s, result.timing.first_token_s, result.timing.total_s) == (0.1, 0.2, 0.3)
    assert result.choices[0].logprobs == (TokenLogprob("5", -0.5, b"A", (Alternative("x", -1.0, b"x"),)),)
    assert result.choices[1].text == ""
