"""Reading on from where a client left off, in a log that is here already or is only just being said again."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.completions import completion_draft
from services.gateway.presentation import Presentation
from services.gateway.resumption import Offsets, ResumedReader, counts_in, find
from services.gateway.streams import Delta, End, Stream
from shared.errors import InvalidRequest, NotFound, UnsupportedField
from shared.ids import RequestId
from shared.messages import ChoiceText, ErrorInfo, FinishReason, Outcome, int32s
from tests.gateway.fake_mesh import logprobs_of
from tests.gateway.harness import COMPLETION

REQUEST = RequestId("req-1")


class Teller:
    """Says given pieces of text, one token each, into a stream."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces
        self.text = "".join(pieces)
        self.num_said = 0

    def say(self, stream: Stream, count: int) -> None:
        for number in range(self.num_said, min(self.num_said + count, len(self.pieces))):
            offset = len("".join(self.pieces[:number]))
            stream.append(
                ChoiceText(
                    REQUEST, 0, number, int32s([number]), offset, self.pieces[number], None, (logprobs_of(str(number)),)
                )
            )
            self.num_said += 1

    def finish(self, stream: Stream) -> None:
        self.say(stream, len(self.pieces))
        stream.append(
            ChoiceText(REQUEST, 0, len(self.pieces), int32s(), len(self.text), "", finish_reason=FinishReason.STOP)
        )
        stream.close(End(Outcome.COMPLETED))


def reader_at(stream: Stream, chars: int, tokens: int = 0, num_tokens: int = 0) -> ResumedReader:
    stream.accept()
    return ResumedReader([stream], lambda: None, Offsets((chars,), (tokens,)), (num_tokens,))


def put_together(deltas: Sequence[Delta], chars: int, tokens: int) -> tuple[str, list[int]]:
    """The text and tokens of deltas, which must have no hole and say nothing twice."""
    text, token_ids = "", list[int]()
    for delta in deltas:
        assert delta.offset == chars + len(text)
        assert delta.token_offset == tokens + len(token_ids)
        assert [position.chosen.token for position in delta.logprobs] == [str(token) for token in delta.token_ids]
        text += delta.text
        token_ids += delta.token_ids
    return text, token_ids


@given(st.lists(st.text(max_size=5), max_size=12), st.data())
def test_rest_is_what_the_client_does_not_have(pieces: list[str], data: st.DataObject) -> None:
    teller = Teller(pieces)
    chars = data.draw(st.integers(0, len(teller.text)))
    tokens = data.draw(st.integers(0, len(pieces)))
    stream = Stream(REQUEST, 1)
    teller.say(stream, data.draw(st.integers(0, len(pieces)), label="said before the reader comes"))
    reader = reader_at(stream, chars, tokens, num_tokens=len(pieces))
    deltas = reader.take()
    while teller.num_said < len(pieces):
        teller.say(stream, 1)
        deltas += reader.take()
    teller.finish(stream)
    deltas += reader.take()
    assert put_together(deltas, chars, tokens) == (teller.text[chars:], list(range(len(pieces)))[tokens:])
    assert reader.is_over
    assert reader.failure is None


def test_nothing_is_told_before_the_log_has_come_so_far() -> None:
    teller, stream = Teller(["ab", "cd", "ef"]), Stream(REQUEST, 1)
    reader = reader_at(stream, chars=3, num_tokens=3)
    teller.say(stream, 1)
    assert (reader.is_accepted, reader.failure, reader.take()) == (False, None, [])
    teller.say(stream, 1)
    assert reader.is_accepted
    assert [(delta.offset, delta.text) for delta in reader.take()] == [(3, "d")]


def test_offset_beyond_a_complete_choice_is_refused() -> None:
    teller, stream = Teller(["ab"]), Stream(REQUEST, 1)
    teller.finish(stream)
    reader = reader_at(stream, chars=3, num_tokens=1)
    assert not reader.is_accepted
    assert reader.refusal is not None
    assert reader.refusal.error is not None
    assert (reader.refusal.error.status, reader.refusal.error.param) == (400, "offset")
    assert reader.refusal.error.message == "offset is 3, but choice 0 has 2 characters."


def test_token_offset_beyond_is_refused_by_its_own_name() -> None:
    teller, stream = Teller(["ab"]), Stream(REQUEST, 1)
    teller.finish(stream)
    reader = reader_at(stream, chars=0, tokens=2, num_tokens=1)
    assert reader.refusal is not None
    assert reader.refusal.error is not None
    assert reader.refusal.error.param == "token_offset"


def test_offset_beyond_what_a_running_choice_has_is_refused_once_all_that_is_known_has_come() -> None:
    teller, stream = Teller(["ab", "cd", "ef"]), Stream(REQUEST, 1)
    reader = reader_at(stream, chars=5, num_tokens=2)
    teller.say(stream, 1)
    assert reader.refusal is None, "the second token is still on its way"
    teller.say(stream, 1)
    assert reader.refusal is not None


def test_failure_comes_after_the_rest_of_the_text() -> None:
    teller, stream = Teller(["ab", "cd"]), Stream(REQUEST, 1)
    teller.say(stream, 2)
    stream.close(End(Outcome.FAILED, error=ErrorInfo.of(InvalidRequest("No."))))
    reader = reader_at(stream, chars=3, num_tokens=2)
    assert reader.is_accepted
    assert reader.refusal is None
    assert [delta.text for delta in reader.take()] == ["d"]
    assert reader.failure is stream.end


def test_failure_before_the_log_came_so_far_is_no_wrong_offset() -> None:
    teller, stream = Teller(["ab", "cd"]), Stream(REQUEST, 1)
    reader = reader_at(stream, chars=3, tokens=2, num_tokens=2)
    teller.say(stream, 1)
    stream.close(End(Outcome.FAILED, error=ErrorInfo.of(InvalidRequest("No."))))
    assert reader.is_accepted
    assert reader.failure is stream.end
    assert reader.take() == []


# What clients say.


def test_offsets_are_of_the_first_choice_or_of_each() -> None:
    assert Offsets.of(5, [1, 2], 3) == Offsets((5, 0, 0), (1, 2, 0))
    with pytest.raises(InvalidRequest, match="4 numbers, and the request 3 choices") as caught:
        Offsets.of([1, 2, 3, 4], 0, 3)
    assert caught.value.param == "offset"


def test_query_says_offsets_with_commas() -> None:
    assert counts_in({}) == ([0], [0])
    assert counts_in({"offset": "5", "token_offset": "1,0,22"}) == ([5], [1, 0, 22])


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1,", ",1", "1 ", "٣", "9" * 11])
def test_offset_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        counts_in({"token_offset": text})
    assert caught.value.param == "token_offset"


def test_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedField) as caught:
        counts_in({"offset": "1", "ofset": "1"})
    assert caught.value.param == "ofset"


# Finding.


class FakeResumed:
    """A request that was found."""

    def __init__(self, request_id: str, client: bytes) -> None:
        self.stream = Stream(RequestId(request_id), 1)
        self.client = client
        self.num_tokens = (7,)


class FakeFinder:
    """Knows some requests of one owner."""

    def __init__(self, *request_ids: str, client: bytes) -> None:
        self._known = {request_id: FakeResumed(request_id, client) for request_id in request_ids}

    async def resume(self, request_id: RequestId, owner: str) -> Any:
        if owner != "me" or request_id not in self._known:
            raise NotFound("No such request.", param="request_id")
        return self._known[request_id]


async def test_all_requests_of_a_client_request_are_found_by_the_first_id() -> None:
    presentation = Presentation.of(completion_draft(COMPLETION | {"prompt": ["x", "y"]}))
    finder = FakeFinder("req-1", "req-1-1", client=presentation.pack())
    found = await find(finder, "req-1", "me", chars=[3, 4], tokens=1)
    assert [stream.request_id for stream in found.streams] == ["req-1", "req-1-1"]
    assert found.presentation == presentation
    assert found.offsets == Offsets((3, 4), (1, 0))
    assert found.num_tokens == (7, 7)


async def test_what_is_found_in_part_or_is_somebody_elses_is_not_found() -> None:
    presentation = Presentation.of(completion_draft(COMPLETION | {"prompt": ["x", "y"]}))
    finder = FakeFinder("req-1", client=presentation.pack())
    for request_id, owner in (("req-1", "me"), ("req-2", "me"), ("req-1", "you")):
        with pytest.raises(NotFound):
            await find(finder, request_id, owner, chars=0)


@pytest.mark.parametrize("offset", [-1, 2**31, [0, -1]])
async def test_offset_out_of_range_is_refused_before_anybody_is_asked(offset: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await find(FakeFinder(client=b""), "req-1", "me", chars=offset)
    assert caught.value.param == "offset"
