"""Requests that are opened again: by a later attempt, by a replay, with all that was said before."""

import msgspec

from shared.codec import encode
from shared.messages import (
    CancelRequest,
    DecodeTokens,
    ReplayLog,
    RequestOpened,
    TextOptions,
    TextProduced,
    TokenLogprobs,
    int32s,
)
from tests.detokenizer.bench import (
    GATEWAY,
    LENGTH,
    ME,
    OTHER_GATEWAY,
    OTHER_SCHEDULER,
    SCHEDULER,
    A,
    Bench,
    closed,
    opened,
)


def again(request: RequestOpened, *, attempt: int = 1, replay: int = 0) -> RequestOpened:
    """The request in a later attempt, which another scheduler has, or said once more."""
    scheduler_id = OTHER_SCHEDULER if attempt > 1 else SCHEDULER
    return msgspec.structs.replace(request, scheduler_id=scheduler_id, attempt=attempt, replay=replay)


def test_a_later_attempt_begins_again_and_the_earlier_one_is_not_heard_any_more(bench: Bench) -> None:
    bench.take([opened(A)], [bench.entry(A, 0, "the")])
    later = [again(opened(A), attempt=2)]
    bench.take(later, [bench.entry(A, 0, "the Ġcat")], scheduler_id=OTHER_SCHEDULER)
    sent = bench.take(tokens=[bench.entry(A, 1, "Ġdog")], closed=[closed(A, 2)])
    assert sent == [(SCHEDULER, ReplayLog(A, ME))], "it may be a still later one, whose opening was lost"
    assert [(text.text, text.attempt) for text in bench.texts()] == [("the", 1), ("the cat", 2)]
    assert (bench.requests.num_open_choices, bench.requests.num_unknown) == (1, 2)


def test_a_scheduler_that_opens_an_earlier_attempt_is_told_to_stop_it(bench: Bench) -> None:
    bench.take([again(opened(A), attempt=2)], scheduler_id=OTHER_SCHEDULER)
    sent = bench.take([again(opened(A), replay=7)], [bench.entry(A, 0, "the")])
    assert (SCHEDULER, CancelRequest(A, GATEWAY, 1)) in sent
    assert bench.texts() == []
    bench.take(tokens=[bench.entry(A, 0, "the", LENGTH)], closed=[closed(A, 1)], scheduler_id=OTHER_SCHEDULER)
    assert len(bench.requests) == 0
    sent = bench.take([again(opened(A), replay=8)])
    assert sent == [(SCHEDULER, CancelRequest(A, GATEWAY, 1))], "after its end as well"


def test_a_replay_says_everything_once_more_also_to_another_gateway(bench: Bench) -> None:
    bench.take([opened(A)], [bench.entry(A, 0, "the Ġcat")])
    elsewhere = msgspec.structs.replace(again(opened(A), replay=1), gateway_id=OTHER_GATEWAY)
    sent = bench.take([elsewhere], [bench.entry(A, 0, "the Ġcat"), bench.entry(A, 2, "Ġdog")])
    assert [instance_id for instance_id, _ in sent] == [OTHER_GATEWAY]
    assert [(text.char_offset, text.text) for text in bench.texts()] == [(0, "the cat"), (0, "the cat"), (7, " dog")]
    assert bench.requests.num_open_choices == 1


def test_an_ended_request_is_opened_again_by_a_replay_and_by_nothing_else(bench: Bench) -> None:
    whole = [bench.entry(A, 0, "the", LENGTH)]
    bench.take([opened(A)], whole, [closed(A, 1)])
    assert bench.take([opened(A)], whole, [closed(A, 1)]) == []
    bench.take([again(opened(A), replay=1)], whole, [closed(A, 1)])
    assert bench.closed() == [closed(A, 1), closed(A, 1)]


def test_what_belongs_to_no_request_is_counted_and_asked_for_now_and_then(bench: Bench) -> None:
    sent = bench.take(tokens=[bench.entry(A, 0, "the")], closed=[closed(A, 1)])
    assert sent == [(SCHEDULER, ReplayLog(A, ME))]
    assert bench.requests.num_unknown == 2
    questions = [len(bench.take(tokens=[bench.entry(A, n, "the")], now=n / 10)) for n in range(100)]
    assert sum(questions) == 3, "after 1, 3 and 7 seconds"
    bench.take([opened(A)], [bench.entry(A, 0, "the")], now=10.0)
    assert [text.text for text in bench.texts()] == ["the"]


def test_log_probabilities_that_nobody_knows_leave_those_of_later_tokens_in_their_places(bench: Bench) -> None:
    known = [TokenLogprobs(-float(n)) for n in range(4)]
    words = [bench.entry(A, 0, "the"), bench.entry(A, 1, "â")]
    resumed = [msgspec.structs.replace(entry, logprobs=(None,)) for entry in words]
    rest = msgspec.structs.replace(bench.entry(A, 2, "Ĥ ¬ Ġcat"), logprobs=tuple(known[1:]))
    bench.take([opened(A)], [*resumed, rest])
    first, second = bench.texts()
    assert (first.text, first.logprobs) == ("the", ())
    assert (second.token_offset, len(second.token_ids)) == (1, 4)
    assert [position.chosen.logprob for position in second.logprobs] == [-1.0, -2.0, -3.0]
    assert [position.chosen.token_id for position in second.logprobs] == list(second.token_ids[1:])


def test_a_whole_log_that_another_detokenizer_left_comes_in_parts_that_a_message_carries(bench: Bench) -> None:
    words = "the Ġcat Ġdog " * 400
    logprobs = tuple(TokenLogprobs(-float(n), int32s(range(20)), (-1.0,) * 20) for n in range(1200))
    whole = msgspec.structs.replace(bench.entry(A, 0, words, LENGTH), logprobs=logprobs)
    bench.requests.take(DecodeTokens(SCHEDULER, (opened(A),), (whole,), (closed(A, 1200),)), 0.0)
    messages = [message for _, message in bench.outbox.take(max_message_bytes=1 << 20)]
    assert all(len(encode(message)) < 1 << 20 for message in messages)
    texts = [text for message in messages if isinstance(message, TextProduced) for text in message.texts]
    assert "".join(text.text for text in texts) == "the cat dog" * 400
    assert [token_id for text in texts for token_id in text.token_ids] == list(whole.token_ids)
    assert [place.chosen.logprob for text in texts for place in text.logprobs] == [-float(n) for n in range(1200)]
    assert [text.finish_reason for text in texts] == [None] * (len(texts) - 1) + [LENGTH]
    assert [text.char_offset for text in texts] == [sum(len(t.text) for t in texts[:n]) for n in range(len(texts))]


def test_a_whole_log_ends_at_its_stop_string(bench: Bench) -> None:
    whole = bench.entry(A, 0, "the Ġcat Ġdog " * 200, LENGTH)
    bench.take([opened(A, text=TextOptions(stop=("x", "dogthe cat dogthe")))], [whole], [closed(A, 600)])
    assert "".join(text.text for text in bench.texts()) == "the cat "
    assert bench.closed() == [closed(A, 7)]
