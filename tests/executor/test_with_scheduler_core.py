"""The scheduler's core drives a real model, without messages or processes between them.

Requests share prefixes, have several choices, arrive at random moments and run short of blocks; plans are made ahead of
results. Every choice's tokens must be those that it has alone.
"""

import random
from collections import deque
from collections.abc import Sequence

import msgspec
import pytest

from services.executor.config import ExecutorConfig
from services.executor.factory import load
from services.executor.model_runner import ModelRunner
from services.scheduler.core.budget import StepLimits
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.prefix_cache import ChainedPrefixCache
from services.scheduler.core.request import Choice, Request
from services.scheduler.core.scheduler import Scheduler
from shared.ids import RequestId
from shared.messages import StepPlan, int32s
from shared.sampling import SamplingParams
from tests.executor.conftest import TinyFolder
from tests.executor.driver import Driver
from tests.tiny_models import VOCAB_SIZE

SETTINGS = ExecutorConfig(
    kv_cache_mb=1, block_size=4, max_slots=6, max_step_tokens=64, max_draft_tokens=5, max_model_len=100, threads=1
)
END_TOKENS = (2, 5, 9)
MAX_PLANS_AHEAD = 3


def requests_of(chance: random.Random) -> list[Request]:
    shared = chance.choices(range(VOCAB_SIZE), k=30)
    return [
        Request(
            RequestId(f"req-{number}"),
            int32s(shared[: chance.randrange(30)] + chance.choices(range(VOCAB_SIZE), k=chance.randrange(1, 20))),
            SamplingParams(
                seed=number,
                temperature=chance.choice([0.0, 1.0, 1.3]),
                frequency_penalty=chance.choice([0.0, 0.5]),
                end_token_ids=END_TOKENS,
            ),
            arrival=number,
            max_tokens=chance.randrange(1, 30),
            num_choices=chance.choice([1, 1, 3]),
        )
        for number in range(12)
    ]


def serve(scheduler: Scheduler, runner: ModelRunner, requests: Sequence[Request], chance: random.Random) -> None:
    """Let requests arrive, plans go ahead and results come back in any order of events, until all have ended."""
    arriving, ahead = deque(requests), deque[StepPlan]()
    while arriving or ahead or scheduler.running or scheduler.waiting:
        if arriving and chance.random() < 0.5:
            scheduler.add(arriving.popleft())
        plan = scheduler.schedule() if len(ahead) < MAX_PLANS_AHEAD else None
        if plan is not None:
            ahead.append(plan)
        if ahead and (plan is None or chance.random() < 0.5):
            scheduler.apply(runner.run(ahead.popleft()))
        scheduler.check_invariants()


def alone(runner: ModelRunner, request: Request, choice: Choice) -> list[int]:
    runner.reset()
    driver = Driver(runner)
    seat = driver.seat(list(request.prompt), request.sampling, choice_index=choice.index)
    while len(seat.output) < request.max_tokens and not (seat.output and seat.output[-1] in END_TOKENS):
        driver.step({seat: seat.num_left})
    return seat.output


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [26, 80], ids=["few blocks", "many blocks"])
def test_every_choice_gets_the_tokens_that_it_has_alone(seed: int, num_blocks: int, tiny_folder: TinyFolder) -> None:
    chance = random.Random(seed)
    requests, runner = requests_of(chance), load(tiny_folder(), "tiny", SETTINGS)
    shares = FairShares()
    shares.opened("")
    scheduler = Scheduler(
        msgspec.structs.replace(runner.capacity, num_blocks=num_blocks),
        StepLimits(max_tokens=24, max_chunk_tokens=chance.choice([5, 24])),
        ChainedPrefixCache(),
        shares,
    )
    serve(scheduler, runner, requests, chance)
    assert (scheduler.num_preemptions > 0) == (num_blocks == 26)  # else this would not test what it says
    for request in requests:
        for choice in request.choices:
            assert list(choice.output) == alone(runner, request, choice), (request.request_id, choice.index)
