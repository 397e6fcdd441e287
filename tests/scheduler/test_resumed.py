"""A request that begins with output it had elsewhere goes on as if it had never been anywhere else."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.events import RequestEnded
from services.scheduler.core.request import ChoiceState, Request
from services.scheduler.recording.calls import AddRequest
from shared.ids import RequestId
from shared.messages import ChoiceTokens, FinishReason, Outcome, ResumedChoice, TokenLogprobs
from shared.sampling import SamplingParams
from tests.scheduler.driver import Bench, make_capacity
from tests.scheduler.fake_executor import undisturbed_output

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SEED, MAX_TOKENS, END = 7, 12, (11, 23)


def whole(index: int) -> list[int]:
    return undisturbed_output(PROMPT, SEED, index, MAX_TOKENS, END)


def resume(cuts: list[int], *, tells_finish: bool = True, num_logprobs: int | None = None) -> Request:
    """A request of which each choice has so many tokens already."""
    resumed = []
    for index, cut in enumerate(cuts):
        output = whole(index)[:cut]
        reason = None
        if tells_finish and output and output[-1] in END:
            reason = FinishReason.STOP
        elif tells_finish and len(output) == MAX_TOKENS:
            reason = FinishReason.LENGTH
        resumed.append(ResumedChoice(array("i", output), reason))
    return Request(
        RequestId("r"),
        array("i", PROMPT),
        SamplingParams(seed=SEED, end_token_ids=END, num_logprobs=num_logprobs),
        arrival=SEED,
        max_tokens=MAX_TOKENS,
        num_choices=len(cuts),
        resumed=resumed,
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, MAX_TOKENS), min_size=1, max_size=3),
    st.integers(6, 64),
    st.booleans(),
    st.integers(0, 2),
)
def test_any_cut_gives_the_undisturbed_output(
    cuts: list[int], num_blocks: int, tells_finish: bool, num_others: int
) -> None:
    """With few blocks it is preempted as well; others run beside."""
    bench = Bench(make_capacity(num_blocks=max(num_blocks, 6), max_slots=4))
    for number in range(num_others):
        sampling = SamplingParams(seed=100 + number)
        bench.add(Request(RequestId(f"o{number}"), array("i", [number, 2]), sampling, arrival=number, max_tokens=9))
    request = resume(cuts, tells_finish=tells_finish)
    if not request.is_finished:
        bench.add(request)
    bench.finish()
    assert [choice.output.tolist() for choice in request.choices] == [whole(index) for index in range(len(cuts))]
    reasons = [FinishReason.STOP if whole(i)[-1] in END else FinishReason.LENGTH for i in range(len(cuts))]
    assert [choice.finish_reason for choice in request.choices] == reasons
    events = [event for event in bench.events if isinstance(event, ChoiceTokens) and event.request_id == "r"]
    told = [[t for e in events if e.index == index for t in e.token_ids] for index in range(len(cuts))]
    assert told == [whole(index)[cut:] for index, cut in enumerate(cuts)], "only what is new is told of"
    assert bench.scheduler.blocks.num_free_blocks == bench.capacity.num_blocks


def test_further_choices_do_not_wait_for_a_first_one_that_has_computed_its_prompt_elsewhere() -> None:
    done = resume([MAX_TOKENS, 0, 3])
    assert [choice.state for choice in done.choices] == [
        ChoiceState.FINISHED,
        ChoiceState.WAITING,
        ChoiceState.PREEMPTED,
    ]
    begun = resume([2, 0])
    assert [choice.state for choice in begun.choices] == [ChoiceState.PREEMPTED, ChoiceState.WAITING]
    fresh = resume([0, 0, 2])
    assert [choice.state for choice in fresh.choices] == [ChoiceState.WAITING, ChoiceState.HELD, ChoiceState.PREEMPTED]


def test_a_first_choice_that_is_stopped_before_its_next_token_does_not_leave_the_others_waiting() -> None:
    bench = Bench()
    request = resume([2, 0])
    bench.add(request)
    bench.take(bench.scheduler.stop(request.choices[0], 2))
    bench.finish()
    assert request.choices[1].output.tolist() == whole(1)
    assert [event.outcome for event in bench.events if isinstance(event, RequestEnded)] == [Outcome.COMPLETED]


def test_log_probabilities_that_did_not_travel_leave_their_places_free() -> None:
    request = resume([3, 0], num_logprobs=1)
    assert request.choices[0].logprobs == [None, None, None]
    assert request.choices[1].logprobs == []
    known = TokenLogprobs(-0.5)
    choice = ResumedChoice(array("i", [1]), None, (known,))
    request.choices[1].resume(choice)
    assert request.choices[1].logprobs == [known]


def test_the_output_of_another_number_of_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="2 choices cannot go on from the output of 1"):
        Request(
            RequestId("r"),
            array("i", PROMPT),
            SamplingParams(seed=0),
            arrival=0,
            max_tokens=3,
            num_choices=2,
            resumed=[ResumedChoice()],
        )


def test_a_recorded_arrival_has_the_output_that_came_with_it() -> None:
    request = resume([2, MAX_TOKENS])
    recorded = AddRequest.of(request)
    request.choices[0].extend(array("i", [5]))
    assert [list(choice.token_ids) for choice in recorded.resumed] == [whole(0)[:2], whole(1)]
    assert [choice.finish_reason for choice in recorded.resumed] == [None, request.choices[1].finish_reason]
    assert AddRequest.of(resume([0, 0])).resumed == ()
