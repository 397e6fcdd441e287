"""What goes to another scheduler, what is told to one that comes back, and logs that are put together from two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.left_behind import LeftBehind
from services.gateway.streams import ChoiceLog, LogprobsLost, OutputGap
from services.gateway.submissions import next_attempt
from shared import subjects
from shared.codec import Decoder
from shared.ids import InstanceId, RequestId
from shared.messages import (
    CancelRequest,
    ChoiceText,
    FinishReason,
    RequestPast,
    SubmitRequest,
    SubmitTokens,
    TextAlternative,
    TextLogprobs,
    TextOptions,
    TextPrompt,
    int32s,
)
from shared.sampling import SamplingParams

R, GATEWAY, SCHEDULER = RequestId("req-1"), InstanceId("gateway-1"), InstanceId("scheduler-2")
REQUEST = SubmitRequest(
    R, GATEWAY, InstanceId("scheduler-1"), "m", "t", TextPrompt("a"), SamplingParams(seed=3), client=b"c"
)
TOKENS = SubmitTokens(R, GATEWAY, "m", "t", int32s([1, 2]), SamplingParams(seed=3), TextOptions(), 1, 9, client=b"c")


PAST = RequestPast(3.0, first_token_s=1.0)


def position(number: int, num_top: int = 1) -> TextLogprobs:
    """Log-probabilities whose values say where they belong."""
    top = tuple(TextAlternative("t", -float(number) - 0.5, b"t", number + 100) for _ in range(num_top))
    return TextLogprobs(TextAlternative("t", -float(number), b"t", number), top)


def log_of(num_tokens: int, *, num_top: int = 1, reason: FinishReason | None = None) -> ChoiceLog:
    log = ChoiceLog()
    logprobs = tuple(position(number, num_top) for number in range(num_tokens))
    log.append(ChoiceText(R, 0, 0, int32s(range(num_tokens)), 0, "x" * num_tokens, reason, logprobs))
    return log


def test_a_request_goes_through_a_tokenizer_to_its_next_scheduler() -> None:
    subject, payload = next_attempt(
        REQUEST, [log_of(2)], scheduler_id=SCHEDULER, attempt=2, timeout_ms=500, past=PAST, max_bytes=10_000
    )
    message = Decoder[SubmitRequest](SubmitRequest).decode(payload)
    assert subject == subjects.tokenize("m")
    assert (message.scheduler_id, message.attempt, message.timeout_ms) == (SCHEDULER, 2, 500)
    assert message.past == PAST
    assert (message.prompt, message.sampling, message.client) == (REQUEST.prompt, REQUEST.sampling, b"c")
    (resumed,) = message.resumed
    assert resumed.token_ids.tolist() == [0, 1]
    assert [lp and (lp.logprob, lp.top_token_ids.tolist(), lp.top_logprobs) for lp in resumed.logprobs] == [
        (0.0, [100], (-0.5,)),
        (-1.0, [101], (-1.5,)),
    ]


def test_what_another_gateway_had_goes_to_the_scheduler_directly() -> None:
    subject, payload = next_attempt(
        TOKENS, [ChoiceLog()], scheduler_id=SCHEDULER, attempt=3, timeout_ms=None, past=PAST, max_bytes=10_000
    )
    message = Decoder[SubmitTokens](SubmitTokens).decode(payload)
    assert subject == subjects.inbox(SCHEDULER)
    assert (message.attempt, message.resumed) == (3, ()), "nothing yet"


def test_a_choice_that_ended_is_handed_over_as_ended_even_without_tokens() -> None:
    empty = log_of(0, reason=FinishReason.STOP)
    _, payload = next_attempt(
        REQUEST, [empty, ChoiceLog()], scheduler_id=SCHEDULER, attempt=2, timeout_ms=None, past=PAST, max_bytes=10_000
    )
    resumed = Decoder[SubmitRequest](SubmitRequest).decode(payload).resumed
    assert [choice.finish_reason for choice in resumed] == [FinishReason.STOP, None]


def test_log_probabilities_stay_behind_where_they_would_fill_the_message() -> None:
    def resumed(max_bytes: int) -> tuple[int, int]:
        _, payload = next_attempt(
            REQUEST,
            [log_of(100, num_top=20)],
            scheduler_id=SCHEDULER,
            attempt=2,
            timeout_ms=None,
            past=PAST,
            max_bytes=max_bytes,
        )
        (choice,) = Decoder[SubmitRequest](SubmitRequest).decode(payload).resumed
        return len(choice.token_ids), len(choice.logprobs)

    assert resumed(1 << 20) == (100, 100)
    assert resumed(20_000) == (100, 0)


def test_a_scheduler_is_told_once_and_only_what_was_left_there() -> None:
    left = LeftBehind(GATEWAY)
    other = RequestId("req-2")
    left.add(SCHEDULER, R, 1, goes_on=True)
    left.add(SCHEDULER, other, 4, goes_on=False)
    left.add(InstanceId("scheduler-3"), R, 2, goes_on=True)
    assert left.take(SCHEDULER) == [CancelRequest(R, GATEWAY, 1, goes_on=True), CancelRequest(other, GATEWAY, 4)]
    assert left.take(SCHEDULER) == []
    assert left.take(InstanceId("scheduler-3")) == [CancelRequest(R, GATEWAY, 2, goes_on=True)]


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 12), st.integers(1, 4))
def test_log_probabilities_of_two_schedulers_make_one_row(known: int, start: int, total: int, cut: int) -> None:
    """The second one does not know those of the tokens that it was given, and says everything from some place on."""
    start, total = min(start, known), max(known, total)
    log = log_of(known)
    for first in range(start, total, cut):
        tokens = range(first, min(first + cut, total))
        logprobs = tuple(position(number) for number in tokens if number >= known)
        log.append(ChoiceText(R, 0, first, int32s(tokens), first, "x" * len(tokens), None, logprobs))
    assert log.token_ids.tolist() == list(range(total))
    assert [one.chosen.logprob for one in log.logprobs] == [-float(number) for number in range(total)]


def test_log_probabilities_that_nobody_has_are_noticed_and_change_nothing() -> None:
    log = ChoiceLog()
    log.append(ChoiceText(R, 0, 0, int32s([0, 1]), 0, "xx"))
    piece = ChoiceText(R, 0, 2, int32s([2]), 2, "x", None, (position(2),))
    with pytest.raises(LogprobsLost):
        log.append(piece)
    with pytest.raises(OutputGap):
        log.append(ChoiceText(R, 0, 3, int32s([3]), 3, "x", None, (position(3),)))
    assert (log.text, log.token_ids.tolist(), log.logprobs) == ("xx", [0, 1], [])
