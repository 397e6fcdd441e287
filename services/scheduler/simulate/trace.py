"""Who asks for what, when: arrivals of five kinds, and all of them at once. Random only by the generator given.

Times are those of a trace with one request a second; `pace` brings it to the speed that the executors can bear.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log
from random import Random
from typing import Final

from shared.messages import Int32Array

MAX_OUTPUT_TOKENS: Final = 1024
"""What every request allows. Few outputs are so long, and nobody knows before."""
_MAX_PROMPT_TOKENS: Final = 6000
_NUM_TENANTS: Final = 8


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request to come."""

    arrives_s: float
    """When; of a request that follows another, how long after that one's end."""
    prompt: Int32Array
    output: Int32Array
    """What will be generated."""
    tenant: str
    follows: int | None = None
    """The position in the trace of the request that has to end before."""


Trace = list[TraceRequest]


def poisson(random: Random, num_requests: int) -> Trace:
    """Requests that know nothing of one another, of moderate length."""
    moments = accumulate(random.expovariate(1.0) for _ in range(num_requests))
    return [_independent(random, moment, _tenant(random)) for moment in moments]


def bursts(random: Random, num_requests: int) -> Trace:
    """The same, but a hundred or so arrive at ten times the speed, and then nobody for a while."""
    trace: Trace = []
    moment = 0.0
    while len(trace) < num_requests:
        size = 1 + int(random.expovariate(1 / 100))
        for _ in range(min(size, num_requests - len(trace))):
            moment += random.expovariate(10.0)
            trace.append(_independent(random, moment, _tenant(random)))
        moment += 0.9 * size
    return trace


def sessions(random: Random, num_requests: int) -> Trace:
    """Conversations under the system prompt of one of eight applications, each a tenant.

    Every turn's prompt is the whole conversation so far and some new words; it comes a few seconds after the answer
    before it.
    """
    system_prompts = [_tokens(random, 512) for _ in range(_NUM_TENANTS)]
    trace: Trace = []
    moment = 0.0
    while len(trace) < num_requests:
        num_turns = min(random.randint(1, 8), num_requests - len(trace))
        moment += random.expovariate(1 / num_turns)
        application = random.randrange(_NUM_TENANTS)
        history = system_prompts[application]
        for turn in range(num_turns):
            prompt = history + _tokens(random, random.randint(16, 96))
            output = _tokens(random, _length(random, 96, 0.6, 400))
            arrives_s, follows = (random.expovariate(1 / 5.0), len(trace) - 1) if turn else (moment, None)
            trace.append(TraceRequest(arrives_s, prompt, output, f"tenant-{application}", follows))
            history = prompt + output
    return trace


def long_tail(random: Random, num_requests: int) -> Trace:
    """Lengths as they are found: most are short, and a few are longer than all others together (lognormal)."""
    moments = accumulate(random.expovariate(1.0) for _ in range(num_requests))
    return [
        TraceRequest(
            moment,
            _tokens(random, _length(random, 120, 1.4, _MAX_PROMPT_TOKENS)),
            _tokens(random, _length(random, 60, 1.0, MAX_OUTPUT_TOKENS)),
            _tenant(random),
        )
        for moment in moments
    ]


def tenants(random: Random, num_requests: int) -> Trace:
    """Seven modest tenants that ask now and then, and one that sends four times as much as all of them together, in
    the first half of the time."""
    moments = sorted(random.uniform(0, num_requests) for _ in range(num_requests))
    trace = [_independent(random, moment, f"modest-{random.randrange(7)}") for moment in moments]
    for at in random.sample(range(num_requests), num_requests * 4 // 5):
        trace[at] = replace(trace[at], arrives_s=random.uniform(0, num_requests / 2), tenant="flood")
    return sorted(trace, key=lambda request: request.arrives_s)


def mixed(random: Random, num_requests: int) -> Trace:
    """A fifth of each kind, at the same time."""
    kinds = (poisson, bursts, sessions, long_tail, tenants)
    merged: Trace = []
    for number, kind in enumerate(kinds):
        size = num_requests // len(kinds) + (number < num_requests % len(kinds))
        offset = len(merged)
        for request in kind(random, size):
            if request.follows is None:
                merged.append(replace(request, arrives_s=request.arrives_s * len(kinds)))
            else:
                merged.append(replace(request, follows=request.follows + offset))
    return merged


TRACES: Final[dict[str, Callable[[Random, int], Trace]]] = {
    "mixed": mixed,
    "poisson": poisson,
    "bursts": bursts,
    "sessions": sessions,
    "long-tail": long_tail,
    "tenants": tenants,
}


def pace(trace: Trace, seconds_per_request: float) -> Trace:
    """The same requests at another speed. How long somebody thinks before going on stays as it is."""
    return [
        request if request.follows is not None else replace(request, arrives_s=request.arrives_s * seconds_per_request)
        for request in trace
    ]


def followers(trace: Trace) -> dict[int, int]:
    """For each request that another waits for, which."""
    return dict(_followed(trace))


def _followed(trace: Trace) -> Iterator[tuple[int, int]]:
    for index, request in enumerate(trace):
        if request.follows is not None:
            yield request.follows, index


def _independent(random: Random, moment: float, tenant: str) -> TraceRequest:
    prompt = _tokens(random, _length(random, 200, 0.6, 2000))
    return TraceRequest(moment, prompt, _tokens(random, _length(random, 96, 0.6, 600)), tenant)


def _tenant(random: Random) -> str:
    return f"tenant-{random.randrange(_NUM_TENANTS)}"


def _length(random: Random, median: float, sigma: float, most: int) -> int:
    """Lognormal, at least 1."""
    return max(1, min(most, round(random.lognormvariate(log(median), sigma))))


def _tokens(random: Random, count: int) -> Int32Array:
    """Tokens of a vocabulary of 65,536."""
    return array("i", array("H", random.randbytes(2 * count)))
