"""The logs of open requests: what is repeated is dropped, what is missing is noticed, every reader sees all of it."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.streams import ChoiceLog, End, OutputGap, Reader, Stream, total_usage
from shared.ids import RequestId
from shared.messages import ChoiceText, FinishReason, Outcome, Usage, int32s
from tests.gateway.fake_mesh import logprobs_of

REQUEST = RequestId("req-1")


def nothing() -> None:
    """A reader that is asked again anyway needs no telling."""


def piece(
    token_offset: int, num_tokens: int, char_offset: int, text: str, finish: FinishReason | None = None, index: int = 0
) -> ChoiceText:
    tokens = range(token_offset, token_offset + num_tokens)
    return ChoiceText(
        REQUEST,
        index,
        token_offset,
        int32s(tokens),
        char_offset,
        text,
        finish,
        tuple(logprobs_of(str(t)) for t in tokens),
    )


@st.composite
def logs(draw: st.DrawFn) -> tuple[str, list[ChoiceText]]:
    """The text of a choice, and the pieces that say it, cut anywhere: tokens never lag behind their text."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.text(max_size=4)), max_size=8))
    pieces, num_tokens, text = [], 0, ""
    for count, part in sizes:
        pieces.append(piece(num_tokens, count, len(text), part))
        num_tokens, text = num_tokens + count, text + part
    pieces.append(piece(num_tokens, 0, len(text), "", FinishReason.STOP))
    return text, pieces


def whole(log: ChoiceLog) -> tuple[str, list[int], list[str]]:
    return log.text, log.token_ids.tolist(), [position.chosen.token for position in log.logprobs]


@given(logs(), st.data())
def test_pieces_may_come_again_and_cut_otherwise(said: tuple[str, list[ChoiceText]], data: Any) -> None:
    text, pieces = said
    num_tokens = pieces[-1].token_offset
    log = ChoiceLog()
    for number, one in enumerate(pieces):
        log.append(one)
        for again in data.draw(st.lists(st.sampled_from(pieces[: number + 1]), max_size=2)):
            log.append(again)
        if data.draw(st.booleans()):  # another detokenizer says all of it again, in one piece
            end = one.token_offset + len(one.token_ids)
            log.append(piece(0, end, 0, text[: one.char_offset + len(one.text)]))
    assert whole(log) == (text, list(range(num_tokens)), [str(token) for token in range(num_tokens)])
    assert log.finish_reason is FinishReason.STOP


@given(logs(), st.data())
def test_missing_piece_is_noticed_and_changes_nothing(said: tuple[str, list[ChoiceText]], data: Any) -> None:
    _, pieces = said
    if len(pieces) < 2:
        return
    missing = data.draw(st.integers(0, len(pieces) - 2))
    log = ChoiceLog()
    for one in pieces[:missing]:
        log.append(one)
    before = whole(log)
    with pytest.raises(OutputGap):
        log.append(pieces[missing + 1])
    assert whole(log) == before


@given(logs(), st.lists(st.booleans(), min_size=12, max_size=12))
def test_readers_of_any_pace_see_everything_once(said: tuple[str, list[ChoiceText]], looks: list[bool]) -> None:
    text, pieces = said
    stream = Stream(REQUEST, 1)
    eager, lazy, late = Reader([stream], nothing), Reader([stream], nothing), None
    seen: dict[int, list[Any]] = {id(eager): [], id(lazy): []}
    for one, looks_now in zip(pieces, looks, strict=False):
        stream.append(one)
        seen[id(eager)] += eager.take()
        if looks_now:
            seen[id(lazy)] += lazy.take()
    late = Reader([stream], nothing)
    seen[id(lazy)] += lazy.take()
    seen[id(late)] = late.take()
    for deltas in seen.values():
        position = 0
        for delta in deltas:
            assert delta.text or delta.finish_reason
            assert delta.offset == position
            position += len(delta.text)
        assert "".join(delta.text for delta in deltas) == text
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == list(range(pieces[-1].token_offset))
        assert [p.chosen.token for delta in deltas for p in delta.logprobs] == [str(token) for token in tokens]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.STOP]
    assert eager.take() == lazy.take() == late.take() == []


def test_nothing_follows_the_finish_of_a_choice() -> None:
    log = ChoiceLog()
    log.append(piece(0, 1, 0, "a", FinishReason.LENGTH))
    log.append(piece(1, 1, 1, "b", FinishReason.STOP))
    assert (log.text, log.finish_reason) == ("a", FinishReason.LENGTH)


def test_nothing_follows_the_end_of_a_stream() -> None:
    stream = Stream(REQUEST, 1)
    assert stream.close(End(Outcome.CANCELLED))
    assert not stream.close(End(Outcome.COMPLETED))
    stream.append(piece(0, 1, 0, "late"))
    assert stream.end == End(Outcome.CANCELLED)
    assert stream.choices[0].text == ""


def test_reader_is_told_of_acceptance_text_and_end() -> None:
    told: list[str] = []
    stream = Stream(REQUEST, 1)
    reader = Reader([stream], lambda: told.append("news"))
    ends_only = Reader([stream], lambda: told.append("end"), wants_text=False)
    stream.accept()
    stream.accept()
    assert told == ["news", "end"]
    stream.append(piece(0, 1, 0, "a"))
    assert told == ["news", "end", "news"]
    stream.close(End(Outcome.COMPLETED))
    assert told == ["news", "end", "news", "news", "end"]
    assert reader.is_over
    assert ends_only.is_over


def test_choices_of_several_streams_are_numbered_through() -> None:
    streams = [Stream(RequestId(f"req-{number}"), 2) for number in range(2)]
    reader = Reader(streams, nothing)
    streams[1].append(piece(0, 1, 0, "d", index=1))
    streams[0].append(piece(0, 1, 0, "a", index=0))
    assert [(delta.index, delta.text) for delta in reader.take()] == [(0, "a"), (3, "d")]


def test_reader_of_several_streams_is_over_when_all_are_and_fails_with_the_first() -> None:
    streams = [Stream(RequestId(f"req-{number}"), 1) for number in range(2)]
    reader = Reader(streams, nothing)
    streams[0].accept()
    assert not reader.is_accepted
    streams[0].close(End(Outcome.COMPLETED))
    assert (reader.is_over, reader.failure) == (False, None)
    failure = End(Outcome.FAILED)
    streams[1].close(failure)
    assert (reader.is_accepted, reader.is_over, reader.failure) == (True, True, failure)


def test_usage_is_the_sum_of_what_is_known() -> None:
    streams = [Stream(RequestId(f"req-{number}"), 1) for number in range(3)]
    streams[0].close(End(Outcome.COMPLETED, Usage(3, 1, (4,))))
    streams[1].close(End(Outcome.CANCELLED))
    assert total_usage(streams) == Usage(3, 1, (4,))
    assert total_usage([]) == Usage(0, 0, ())


def test_log_costs_little_more_than_its_text() -> None:
    log = ChoiceLog()
    for number in range(1000):
        log.append(ChoiceText(REQUEST, 0, number, int32s([number]), number, "x"))
    assert isinstance(log.token_ids, array)
    assert len(log.texts) == 1000
    assert log.logprobs == []
