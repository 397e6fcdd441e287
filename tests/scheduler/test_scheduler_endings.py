"""The core scheduler on one executor: requests that are cancelled, stopped, or fail."""

import pytest

from shared.messages import ChoiceTokens, FinishReason, Outcome
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

LONG = list(range(1, 21))


def test_cancel_while_waiting_holds_and_frees_nothing() -> None:
    bench = Bench(make_capacity(max_slots=1))
    running, waiting = make_request("running", LONG), make_request("waiting", LONG, arrival=1)
    bench.add(running, waiting)
    bench.step()
    free = bench.num_free_blocks
    events = bench.scheduler.end(waiting, Outcome.CANCELLED)
    assert [event.outcome for event in events if not isinstance(event, ChoiceTokens)] == [Outcome.CANCELLED]
    assert bench.num_free_blocks == free
    bench.scheduler.check_invariants()


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_cancel_between_chunks_or_while_decoding_frees_everything_at_once(num_steps: int) -> None:
    bench = Bench(max_chunk=7)
    request = make_request("r", LONG, max_tokens=9, num_choices=2)
    bench.add(request)
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.end(request, Outcome.CANCELLED)
    assert bench.num_free_blocks == bench.capacity.num_blocks
    assert bench.plan() is None
    assert bench.scheduler.end(request, Outcome.CANCELLED) == []


def test_cancel_in_the_middle_of_a_step_drops_what_the_step_returns() -> None:
    bench = Bench()
    request, other = make_request("r", LONG), make_request("other", [5], arrival=1)
    bench.add(request, other)
    bench.plan()
    bench.scheduler.end(request, Outcome.CANCELLED)
    bench.run()
    bench.finish()
    assert bench.output(request) == []
    assert bench.output(other) == expected_output(other)


def test_a_stop_string_cuts_the_log_where_the_text_reached_it() -> None:
    bench = Bench()
    request = make_request("r", LONG, max_tokens=9)
    bench.add(request)
    for _ in range(4):
        bench.step()
    events = bench.scheduler.stop(request.choices[0], 2)
    last = events[0]
    assert isinstance(last, ChoiceTokens)
    assert (last.offset, list(last.token_ids), last.finish_reason) == (2, [], FinishReason.STOP)
    assert len(request.choices[0].output) == 2
    assert bench.scheduler.stop(request.choices[0], 1) == []
    assert bench.num_free_blocks == bench.capacity.num_blocks


def test_a_row_that_failed_ends_its_request_and_spoils_its_blocks() -> None:
    bench = Bench()
    bad, good = make_request("bad", LONG), make_request("good", [5], arrival=1)
    bench.executor.failing_requests.add("bad")
    bench.add(bad, good)
    bench.finish()
    assert bench.ends() == {"bad": Outcome.FAILED, "good": Outcome.COMPLETED}
    again = make_request("again", LONG, arrival=2)
    bench.add(again)
    bench.finish()
    assert again.num_cached_tokens == 0
