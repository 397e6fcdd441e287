"""The traces: as many requests as asked for, about one a second, reproducible, and of the kind they are named for."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from services.scheduler.simulate.step_times import PROFILES
from services.scheduler.simulate.trace import MAX_OUTPUT_TOKENS, TRACES, Trace, followers, pace


def _make(kind: str, requests: int = 1000, seed: int = 3) -> Trace:
    return TRACES[kind](Random(seed), requests)


def _gaps(trace: Trace) -> list[float]:
    moments = sorted(request.arrives_s for request in trace)
    return [after - before for before, after in pairwise(moments)]


@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("requests", [1, 7, 500])
def test_there_are_as_many_requests_as_asked_for(kind: str, requests: int) -> None:
    assert len(_make(kind, requests)) == requests


@pytest.mark.parametrize("kind", TRACES)
def test_the_same_seed_gives_the_same_trace_and_another_one_another(kind: str) -> None:
    assert _make(kind, 50) == _make(kind, 50)
    assert _make(kind, 50) != _make(kind, 50, seed=4)


@pytest.mark.parametrize("kind", TRACES)
def test_about_one_request_a_second_arrives(kind: str) -> None:
    """Within 20 %: a thousand arrivals scatter by 3 %, sessions and bursts, of which there are fewer, by up to 10 %."""
    trace = _make(kind)
    span_s = max(request.arrives_s for request in trace if request.follows is None)
    assert span_s == pytest.approx(1000, rel=0.2)


@pytest.mark.parametrize("kind", TRACES)
def test_every_request_fits_every_kind_of_executor(kind: str) -> None:
    for request in _make(kind):
        assert request.prompt
        assert request.output
        for profile in PROFILES.values():
            assert len(request.prompt) + MAX_OUTPUT_TOKENS <= profile.capacity.max_model_len


@pytest.mark.parametrize("kind", ["sessions", "mixed"])
def test_a_turn_begins_with_the_conversation_so_far(kind: str) -> None:
    trace = _make(kind)
    turns = [request for request in trace if request.follows is not None]
    assert len(turns) > 100
    for turn in turns:
        assert turn.follows is not None
        before = trace[turn.follows]
        history = before.prompt + before.output
        assert turn.prompt[: len(history)] == history
        assert len(turn.prompt) > len(history)
        assert turn.tenant == before.tenant


def test_nobody_is_followed_by_two() -> None:
    trace = _make("mixed")
    assert len(followers(trace)) == sum(request.follows is not None for request in trace)


def test_bursts_are_dense_and_far_apart() -> None:
    gaps = _gaps(_make("bursts"))
    assert sum(gap < 0.5 for gap in gaps) > 0.9 * len(gaps)
    assert max(gaps) > 20


def test_the_longest_tenth_has_most_of_the_tokens_of_a_long_tail() -> None:
    lengths = sorted(len(request.prompt) for request in _make("long-tail"))
    assert sum(lengths[-100:]) > 0.4 * sum(lengths)
    assert lengths[500] < 200


def test_one_tenant_floods_the_first_half() -> None:
    trace = _make("tenants")
    assert Counter(request.tenant for request in trace).most_common(1) == [("flood", 800)]
    assert max(request.arrives_s for request in trace if request.tenant == "flood") <= 500
    assert max(request.arrives_s for request in trace) > 900


def test_pacing_changes_arrivals_but_not_the_time_to_think() -> None:
    trace = _make("sessions", 100)
    for before, after in zip(trace, pace(trace, 0.25), strict=True):
        factor = 1 if before.follows is not None else 0.25
        assert after.arrives_s == before.arrives_s * factor
        assert (after.prompt, after.output, after.follows) == (before.prompt, before.output, before.follows)
