"""What a failed row computed is found by nobody, however its request was doing when the failure became known."""

from services.scheduler.core.prefix_cache import NoPrefixCache
from shared.messages import Outcome
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

PROMPT = [1, 2, 3]
BLOCK = 4


def retry_works(bench: Bench, prompt: list[int]) -> None:
    """The same prompt gives its tokens, and nobody else's failure: the fake executor checks what it reads."""
    bench.executor.failing_requests.clear()
    again = make_request("again", prompt, arrival=100, max_tokens=4)
    bench.add(again)
    bench.finish()
    assert bench.output(again) == expected_output(again)
    assert bench.ends()["again"] == "completed"


def test_a_block_that_became_full_by_the_row_that_failed_is_not_found() -> None:
    bench = Bench(make_capacity(block_size=BLOCK))
    bad = make_request("bad", PROMPT, max_tokens=8)
    bench.add(bad)
    bench.plan()
    bench.plan()  # computes the token that fills the block, before it is known
    bench.run()
    bench.executor.failing_requests.add("bad")
    bench.run()
    assert bench.ends() == {"bad": "failed"}
    retry_works(bench, [*PROMPT, bench.output(bad)[0], 9])


def test_a_request_preempted_while_its_failing_row_was_on_its_way_leaves_nothing() -> None:
    bench = Bench(make_capacity(num_blocks=8, max_slots=1))
    bad = make_request("bad", [7] * 8, priority=1, max_tokens=8)
    bench.executor.failing_requests.add("bad")
    bench.add(bad)
    bench.plan()
    bench.add(make_request("urgent", [5] * 4, arrival=1, max_tokens=1))
    bench.plan()
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    assert bench.ends() == {"bad": "failed"}
    bench.run()
    retry_works(bench, [7] * 9)


def test_a_request_cancelled_while_its_failing_row_was_on_its_way_leaves_nothing() -> None:
    bench = Bench()
    bad = make_request("bad", [7] * 8, max_tokens=8)
    bench.executor.failing_requests.add("bad")
    bench.add(bad)
    bench.plan()
    bench.take(bench.scheduler.end(bad, Outcome.CANCELLED))
    bench.run()
    assert bench.ends() == {"bad": "cancelled"}
    retry_works(bench, [7] * 9)


def test_failures_without_a_cache_end_the_request_alone() -> None:
    bench = Bench(cache=NoPrefixCache())
    bench.executor.failing_requests.add("bad")
    bench.add(make_request("bad", [7] * 8), make_request("good", [7] * 8, arrival=1))
    bench.finish()
    assert bench.ends() == {"bad": "failed", "good": "completed"}


def test_a_row_that_fails_beyond_a_later_cut_leaves_nothing() -> None:
    """Its block is full and can be found; then the text before it reaches a stop string, and then the row fails."""
    bench = Bench(make_capacity(block_size=BLOCK))
    bad = make_request("bad", PROMPT, max_tokens=12)
    bench.add(bad)
    for _ in range(5):
        bench.step()
    bench.executor.failing_requests.add("bad")
    bench.plan()
    assert len(bench.output(bad)) == 5
    assert bad.choices[0].num_computed_tokens == 8, "the row on its way fills the second block"
    prompt = [*PROMPT, *bench.output(bad), 9]
    bench.take(bench.scheduler.stop(bad.choices[0], 2))
    bench.run()
    assert bench.scheduler.blocks.num_cached_blocks == 0
    retry_works(bench, prompt)
