"""What a run of the simulator comes to. Functions of how each request fared."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Final

from services.scheduler.core.fairness import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT
from services.scheduler.simulate.simulation import Served

SHORT_PROMPT_TOKENS: Final = 128
"""Whoever asks no more than this should not wait for those who do."""

_NUM_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run. Times are the simulated ones, but for `wall_s`."""

    throughput_tok_s: float
    """Output tokens a second, from the first arrival to the last token."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    """From arrival to the first token."""
    itl_p99_ms: float
    """Between two tokens of a request."""
    jain: float
    """Jain's index over the tenants; 1 if each had its fair share at all times. See `fairness`."""
    hit_rate: float
    """Prompt tokens from the prefix cache, of all."""
    preemptions: int
    wall_s: float
    """What the simulation took."""

    def as_json(self) -> dict[str, float]:
        """The figures by name, rounded to what they mean."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def sum_up(served: Sequence[Served], *, num_preemptions: int, wall_s: float) -> Report:
    """The figures of a run in which every request has ended."""
    num_tokens = sum(len(each.token_times) for each in served)
    began_s = min(each.arrived_s for each in served)
    ended_s = max(each.token_times[-1] for each in served)
    times_to_first = first_token_times(served)
    gaps = sorted(chain.from_iterable(_gaps(each.token_times) for each in served))
    num_prompt_tokens = sum(len(each.request.prompt) for each in served)
    return Report(
        throughput_tok_s=num_tokens / (ended_s - began_s),
        ttft_p50_ms=percentile(times_to_first, 0.5) * 1e3,
        ttft_p99_ms=percentile(times_to_first, 0.99) * 1e3,
        itl_p99_ms=percentile(gaps, 0.99) * 1e3,
        jain=fairness(served),
        hit_rate=sum(each.num_cached_tokens for each in served) / num_prompt_tokens,
        preemptions=num_preemptions,
        wall_s=wall_s,
    )


def first_token_times(served: Sequence[Served]) -> list[float]:
    """Seconds from arrival to first token, shortest first."""
    return sorted(each.token_times[0] - each.arrived_s for each in served)


def with_short_prompts(served: Sequence[Served]) -> list[Served]:
    """The requests whose prompts are short."""
    return [each for each in served if len(each.request.prompt) <= SHORT_PROMPT_TOKENS]


def of_modest_tenants(served: Sequence[Served]) -> list[Served]:
    """The requests of all tenants but the one that has most; all, if there is only one."""
    [(largest, num_requests)] = Counter(each.request.tenant for each in served).most_common(1)
    return [each for each in served if each.request.tenant != largest or num_requests == len(served)]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ordered values that at least `share` of all do not exceed; 0 if there are none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def fairness(served: Sequence[Served]) -> float:
    """Jain's index over what each tenant was served, in parts of what would have been fair; the mean over 20 moments.

    A moment's service is that since the first arrival, in tokens weighted as the scheduler counts them: a prompt with
    its first token, an output token as it comes. What is fair is the max-min share: what all were served together,
    divided evenly, but to nobody more than they had to ask for: what they were served, and all of their requests that
    have not begun (one that has begun goes on as fast as it can). Tenants here all have the weight 1. The moments lie
    evenly between first and last arrival: afterwards everybody is served in full, under any policy.
    """
    by_tenant: dict[str, list[Served]] = {}
    for each in served:
        by_tenant.setdefault(each.request.tenant, []).append(each)
    began_s = min(each.arrived_s for each in served)
    span_s = max(each.arrived_s for each in served) - began_s
    indexes = []
    for look in range(1, _NUM_LOOKS + 1):
        moment_s = began_s + span_s * look / _NUM_LOOKS
        got = {tenant: sum(_service(each, moment_s) for each in requests) for tenant, requests in by_tenant.items()}
        asked = {tenant: sum(_demand(each, moment_s) for each in requests) for tenant, requests in by_tenant.items()}
        fair = max_min_shares(sum(got.values()), asked)
        indexes.append(jain([got[tenant] / fair[tenant] for tenant in got if fair[tenant] > 0]))
    return sum(indexes) / len(indexes)


def jain(values: Collection[float]) -> float:
    """The square of the sum over the count times the sum of squares: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def max_min_shares(total: float, demands: Mapping[str, float]) -> dict[str, float]:
    """`total` divided evenly, but to nobody more than demanded: what some do not want is divided among the others."""
    shares: dict[str, float] = {}
    left = total
    for number, name in enumerate(sorted(demands, key=lambda name: demands[name])):
        shares[name] = min(demands[name], left / (len(demands) - number))
        left -= shares[name]
    return shares


def _service(served: Served, moment_s: float) -> float:
    num_tokens = bisect_right(served.token_times, moment_s)
    prompt = PROMPT_TOKEN_WEIGHT * len(served.request.prompt) if num_tokens else 0.0
    return prompt + OUTPUT_TOKEN_WEIGHT * num_tokens


def _demand(served: Served, moment_s: float) -> float:
    if served.arrived_s > moment_s:
        return 0.0
    if served.token_times[0] <= moment_s:
        return _service(served, moment_s)
    return PROMPT_TOKEN_WEIGHT * len(served.request.prompt) + OUTPUT_TOKEN_WEIGHT * len(served.token_times)


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
