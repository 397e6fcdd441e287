"""Every request that is opened ends with one `RequestClosed`; what goes wrong with one touches no other."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from services.detokenizer.incremental import TextDecoder
from services.detokenizer.open_requests import OpenRequests
from services.detokenizer.outbox import Outbox
from shared.errors import RequestError
from shared.messages import (
    CancelRequest,
    ChoiceText,
    ChoiceTokens,
    DecodeTokens,
    ErrorInfo,
    Outcome,
    ReplayLog,
    StopStringFound,
    TextOptions,
    TextProduced,
    TokenLogprobs,
    int32s,
)
from tests.detokenizer.bench import GATEWAY, LENGTH, ME, SCHEDULER, STOP, A, B, Bench, closed, opened
from tests.detokenizer.vocabularies import Case


def test_a_request_goes_through_in_one_message(bench: Bench) -> None:
    sent = bench.take([opened(A)], [bench.entry(A, 0, "the Ġcat", LENGTH)], [closed(A, 2)])
    token_ids = bench.entry(A, 0, "the Ġcat").token_ids
    text = ChoiceText(A, 0, 0, token_ids, 0, "the cat", LENGTH)
    assert sent == [(GATEWAY, TextProduced(ME, (text,), (closed(A, 2),)))]
    assert (len(bench.requests), bench.requests.num_open_choices, bench.requests.num_tokens) == (0, 0, 2)


def test_requests_in_one_message_keep_their_own_options(bench: Bench) -> None:
    stopping = opened(A, text=TextOptions(stop=("cat",)))
    showing = opened(B, text=TextOptions(skip_special_tokens=False))
    bench.take([stopping, showing], [bench.entry(A, 0, "the Ġcat </s>"), bench.entry(B, 0, "the Ġcat </s>")])
    assert [text.text for text in bench.texts()] == ["the ", "the cat</s>"]


def test_a_stop_string_is_reported_to_the_scheduler_once(bench: Bench) -> None:
    bench.take([opened(A, text=TextOptions(stop=("cat",)))])
    sent = bench.take(tokens=[bench.entry(A, 0, "the Ġcat Ġdog")])
    assert (SCHEDULER, StopStringFound(A, 0, 2)) in sent
    assert bench.take(tokens=[bench.entry(A, 3, "the the")]) == []
    assert bench.take(tokens=[bench.entry(A, 2, "", STOP)])
    bench.take(closed=[closed(A, 2)])
    assert [text.finish_reason for text in bench.texts()] == [None, STOP]
    assert bench.closed() == [closed(A, 2)]


def test_a_scheduler_that_closed_before_it_heard_of_the_stop_string_is_corrected(bench: Bench) -> None:
    text = TextOptions(stop=("cat",))
    bench.take(
        [opened(A, num_choices=2, text=text)],
        [bench.entry(A, 0, "the Ġcat Ġdog the", LENGTH), bench.entry(A, 0, "the the", LENGTH, index=1)],
        [closed(A, 4, 2)],
    )
    assert [(text.index, text.text, text.finish_reason) for text in bench.texts()] == [
        (0, "the ", STOP),
        (1, "thethe", LENGTH),
    ]
    assert bench.closed() == [closed(A, 2, 2)]


def test_a_stopped_choice_without_a_last_entry_is_finished_by_the_close(bench: Bench) -> None:
    bench.take([opened(A, text=TextOptions(stop=("cat",)))], [bench.entry(A, 0, "the Ġcat")], [closed(A, 2)])
    assert [(text.text, text.finish_reason) for text in bench.texts()] == [("the ", None), ("", STOP)]
    assert bench.closed() == [closed(A, 2)]


def test_a_cancelled_request_gets_its_held_text_and_then_its_end(bench: Bench) -> None:
    bench.take([opened(A, text=TextOptions(stop=("cats",)))], [bench.entry(A, 0, "the Ġcat")])
    cancelled = closed(A, 2, outcome=Outcome.CANCELLED)
    ((_, message),) = bench.take(closed=[cancelled])
    assert isinstance(message, TextProduced)
    assert [(text.text, text.finish_reason) for text in message.texts] == [("cat", None)]
    assert message.closed == (cancelled,)


def test_a_failure_is_passed_on_with_its_error(bench: Bench) -> None:
    failed = closed(A, 0, outcome=Outcome.FAILED, error=ErrorInfo(503, "t", "c", "gone"))
    bench.take([opened(A)], closed=[failed])
    assert bench.closed() == [failed]


def test_lost_entries_are_asked_for_and_no_other_request_waits(bench: Bench) -> None:
    bench.take([opened(A), opened(B)], [bench.entry(A, 0, "the"), bench.entry(B, 0, "the")])
    sent = bench.take(tokens=[bench.entry(A, 2, "Ġdog"), bench.entry(B, 1, "Ġcat", LENGTH)], closed=[closed(B, 2)])
    assert (SCHEDULER, ReplayLog(A, ME)) in sent
    assert bench.closed() == [closed(B, 2)]
    assert bench.take(tokens=[bench.entry(A, 3, "the")], now=0.5) == [], "one question for a gap, not one an entry"
    bench.take([opened(A)], [bench.entry(A, 0, "the Ġcat Ġdog the", LENGTH)], [closed(A, 4)], now=0.6)
    assert [text.text for text in bench.texts() if text.request_id == A] == ["the", " cat dogthe"]
    assert bench.closed() == [closed(B, 2), closed(A, 4)]
    assert len(bench.requests) == 0


def test_a_gap_is_asked_for_again_until_it_is_filled(bench: Bench) -> None:
    bench.take([opened(A)], [bench.entry(A, 1, "the")])
    asked_at = []
    for tenth in range(1, 300):
        bench.requests.tick(tenth / 10)
        asked_at += [tenth / 10] * len(bench.outbox.take(max_message_bytes=1 << 20))
    assert asked_at == [1.0, 3.0, 7.0, 15.0, 23.0], "after longer and longer pauses"
    bench.take(tokens=[bench.entry(A, 0, "the the")], now=30.0)
    bench.requests.tick(60.0)
    assert len(bench.outbox) == 0


@pytest.mark.parametrize("outcome", Outcome)
def test_an_end_before_all_entries_came_waits_for_them(bench: Bench, outcome: Outcome) -> None:
    bench.take([opened(A, num_choices=2)], [bench.entry(A, 0, "the", LENGTH), bench.entry(A, 0, "the", index=1)])
    sent = bench.take(closed=[closed(A, 1, 2, outcome=outcome)])
    assert sent == [(SCHEDULER, ReplayLog(A, ME))]
    whole = [bench.entry(A, 0, "the", LENGTH), bench.entry(A, 0, "the Ġcat", LENGTH, index=1)]
    bench.take([opened(A)], whole, [closed(A, 1, 2, outcome=outcome)])
    assert bench.closed() == [closed(A, 1, 2, outcome=outcome)]
    assert [(text.index, text.text) for text in bench.texts()] == [(0, "the"), (1, "the"), (1, " cat")]


@pytest.mark.parametrize("index", [-1, 1])
def test_an_entry_for_a_choice_that_is_not_there_fails_its_request(bench: Bench, index: int) -> None:
    bench.take([opened(A)], [bench.entry(A, 0, "the", index=index)])
    (failed,) = bench.closed()
    assert failed.error is not None
    assert failed.error.status == 500


def test_an_end_with_counts_of_other_choices_fails_its_request(bench: Bench) -> None:
    bench.take([opened(A)], [bench.entry(A, 0, "the", LENGTH)], [closed(A, 1, 1)])
    assert [end.outcome for end in bench.closed()] == [Outcome.FAILED]
    assert len(bench.requests) == 0


def test_a_request_beyond_the_limit_fails_and_the_others_go_on(case_of: Callable[[str], Case]) -> None:
    bench = Bench(case_of("byte level"), max_open_choices=3)
    sent = bench.take([opened(A, num_choices=2), opened(B, num_choices=2)], [bench.entry(A, 0, "the")])
    assert (SCHEDULER, CancelRequest(B, GATEWAY)) in sent
    (failed,) = bench.closed()
    assert failed.request_id == B
    assert failed.error is not None
    assert (failed.error.status, failed.error.retry_after_s, failed.usage.num_output_tokens) == (503, 1.0, (0, 0))
    assert [text.request_id for text in bench.texts()] == [A]
    bench.take(closed=[closed(A, 1, 0, outcome=Outcome.CANCELLED)])
    bench.take([opened(B, num_choices=3)])
    assert bench.requests.num_open_choices == 0, "what failed is over"
    bench.take([msgspec.structs.replace(opened(B, num_choices=3), replay=1)])
    assert bench.requests.num_open_choices == 3


def test_a_request_for_another_model_fails(bench: Bench) -> None:
    bench.take([msgspec.structs.replace(opened(A), model="other")])
    (failed,) = bench.closed()
    assert failed.error is not None
    assert (failed.error.status, failed.error.code) == (404, "model_not_found")


def test_opening_again_changes_nothing(bench: Bench) -> None:
    bench.take([opened(A)], [bench.entry(A, 0, "the")])
    bench.take([opened(A)], [bench.entry(A, 1, "Ġcat")])
    assert [(text.char_offset, text.text) for text in bench.texts()] == [(0, "the"), (3, " cat")]
    assert bench.requests.num_open_choices == 1


def test_requests_of_a_scheduler_that_is_gone_are_dropped_silently(bench: Bench) -> None:
    bench.take([opened(A, num_choices=2)], now=10.0)
    alive = {GATEWAY}
    assert bench.requests.drop_stale(alive.__contains__, 11.0) == 0, "it may not have been heard of yet"
    assert bench.requests.drop_stale(alive.__contains__, 12.0) == 1
    assert (len(bench.requests), bench.requests.num_open_choices) == (0, 0)
    assert len(bench.outbox) == 0


def test_requests_of_a_gateway_that_is_gone_are_kept_for_the_one_that_comes_for_them(bench: Bench) -> None:
    bench.take([opened(A)], now=10.0)
    assert bench.requests.drop_stale({SCHEDULER}.__contains__, 20.0) == 0


def test_log_probabilities_end_where_a_stop_string_does(bench: Bench) -> None:
    logprobs = tuple(TokenLogprobs(-float(n)) for n in range(4))
    whole = msgspec.structs.replace(bench.entry(A, 0, "the Ġcat Ġdog the", LENGTH), logprobs=logprobs)
    bench.take([opened(A, text=TextOptions(stop=("cat",)))], [whole])
    positions = [position for text in bench.texts() for position in text.logprobs]
    assert [position.chosen.logprob for position in positions] == [0.0, -1.0]


def test_a_request_of_which_nothing_is_heard_is_dropped(bench: Bench) -> None:
    bench.take([opened(A), opened(B)], now=10.0)
    bench.take(tokens=[bench.entry(A, 0, "the")], now=50.0)
    assert bench.requests.drop_stale(lambda _: True, 69.0) == 0
    assert bench.requests.drop_stale(lambda _: True, 71.0) == 1
    assert bench.requests.drop_stale(lambda _: True, 111.0) == 1


class Undecodable:
    """A model whose tokens cannot be decoded, but for their number."""

    def new_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        return self

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def push(self, token_ids: Sequence[int]) -> str:
        if 13 in token_ids:
            raise RequestError("13 cannot be decoded")
        return "x" * len(token_ids)

    def finish(self) -> str:
        return ""


def test_tokens_that_cannot_be_decoded_fail_their_request_alone() -> None:
    outbox = Outbox(ME)
    requests = OpenRequests(Undecodable(), outbox, model="m", max_open_choices=10, max_silence_s=60)
    entries = (ChoiceTokens(A, 0, 0, int32s([13])), ChoiceTokens(B, 0, 0, int32s([12])))
    requests.take(DecodeTokens(SCHEDULER, (opened(A), opened(B)), entries), 0.0)
    messages = dict(outbox.take(max_message_bytes=1 << 20))
    produced = messages[GATEWAY]
    assert isinstance(produced, TextProduced)
    assert [text.request_id for text in produced.texts] == [B]
    assert [(end.request_id, end.outcome) for end in produced.closed] == [(A, Outcome.FAILED)]
    assert len(requests) == 1


def test_a_context_that_cannot_be_decoded_fails_its_request() -> None:
    outbox = Outbox(ME)
    requests = OpenRequests(Undecodable(), outbox, model="m", max_open_choices=10, max_silence_s=60)
    requests.take(DecodeTokens(SCHEDULER, (opened(A, text=TextOptions(context_token_ids=int32s([13]))),)), 0.0)
    assert len(requests) == 0
    assert len(outbox) == 2


def test_a_context_makes_the_first_word_keep_its_space(case_of: Callable[[str], Case]) -> None:
    bench = Bench(case_of("llama"))
    context = TextOptions(context_token_ids=bench.entry(A, 0, "▁cat").token_ids)
    bench.take([opened(A, text=context), opened(B)], [bench.entry(A, 0, "▁the"), bench.entry(B, 0, "▁the")])
    assert [text.text for text in bench.texts()] == [" the", "the"]
