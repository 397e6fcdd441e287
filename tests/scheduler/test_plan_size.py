"""A plan is never larger than the message that carries it may be, whoever runs and whoever comes."""

from array import array

import pytest

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.prefix_cache import ChainedPrefixCache
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from shared.codec import encode
from shared.ids import RequestId
from shared.messages import ExecutorCapacity, Int32Array, RunStep, StepPlan, StepResult
from shared.sampling import SamplingParams

NUM_SLOTS = 256
MAX_BYTES = 60_000
ROOM = ExecutorCapacity(
    "model", num_blocks=40_000, block_size=4, max_slots=NUM_SLOTS, max_model_len=100_000, max_step_tokens=270
)
BIASED = SamplingParams(
    seed=1 << 62,
    logit_bias=dict.fromkeys(range(100_000, 101_024), 0.5),
    end_token_ids=tuple(range(100_000, 100_128)),
)


class Crowd:
    """A scheduler on which all slots but two compute prompts, a token of each in a step."""

    def __init__(self) -> None:
        self._shares = FairShares()
        limits = StepLimits(270, 1, max_plan_bytes=MAX_BYTES)
        self.scheduler = Scheduler(ROOM, limits, ChainedPrefixCache(), self._shares)
        for number in range(NUM_SLOTS - 2):
            self.add(number, array("i", [number] * 200))
        for _ in range(20):
            self.step()
        assert len(self.scheduler.running) == NUM_SLOTS - 2

    def add(self, number: int, prompt: Int32Array, sampling: SamplingParams | None = None) -> None:
        request_id = RequestId(f"req-{number:032x}")
        sampling = sampling or SamplingParams(seed=number)
        self._shares.opened("a")
        self.scheduler.add(
            Request(request_id, prompt, sampling, arrival=number, max_tokens=1, model="model", tenant="a")
        )

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        assert len(encode(RunStep(1 << 20, plan))) <= MAX_BYTES
        self.scheduler.apply(StepResult(plan.step_id, array("i", [7] * len(plan.sampled_rows))))
        return plan


def unlike_any(num_tokens: int, first: int) -> Int32Array:
    return array("i", range(first, first + num_tokens))


@pytest.mark.parametrize("sampling", [None, BIASED], ids=["plain", "with long lists"])
def test_the_largest_request_that_is_accepted_joins_a_crowd_at_once(sampling: SamplingParams | None) -> None:
    crowd = Crowd()
    crowd.add(100, unlike_any(crowd.scheduler.max_total_tokens - 1, 100_000), sampling)
    assert len(crowd.step().assigned) == 1


def test_two_that_come_together_share_a_plan_only_if_it_stays_within_the_limit() -> None:
    """Whatever the size of the second: where it just fits, and where it does not any more."""
    num_together = 0
    sizes = range(3600, 6000, 100)
    for num_tokens in sizes:
        crowd = Crowd()
        crowd.add(100, unlike_any(5500, 100_000))
        crowd.add(101, unlike_any(num_tokens, 200_000))
        num_assigned = len(crowd.step().assigned)
        num_together += num_assigned == 2
        assert num_assigned + len(crowd.step().assigned) == 2, "the other comes with the next plan"
    assert 0 < num_together < len(sizes), "the limit was met on the way"
