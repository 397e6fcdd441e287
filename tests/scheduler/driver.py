"""Small helpers that build requests and let a core scheduler run against the fake executor."""

from array import array
from collections import deque
from collections.abc import Callable, Mapping

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.prefix_cache import ChainedPrefixCache, PrefixCache
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from shared.ids import RequestId
from shared.messages import ChoiceTokens, ExecutorCapacity, StepPlan
from shared.sampling import SamplingParams
from tests.scheduler.fake_executor import BECAUSE_OF, FakeExecutor, undisturbed_output


def make_capacity(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_slots: int = 8,
    max_step_tokens: int = 64,
    model: str = "model",
    max_draft_tokens: int = 0,
) -> ExecutorCapacity:
    """An executor's capacity with room for a few short requests."""
    return ExecutorCapacity(
        model, num_blocks, block_size, max_slots, num_blocks * block_size, max_step_tokens, max_draft_tokens
    )


def make_request(
    name: str,
    prompt: list[int],
    *,
    arrival: int = 0,
    max_tokens: int = 4,
    num_choices: int = 1,
    priority: int = 0,
    end_token_ids: tuple[int, ...] = (),
    tenant: str = "a",
) -> Request:
    """A request whose output the fake executor determines."""
    return Request(
        RequestId(name),
        array("i", prompt),
        SamplingParams(seed=arrival, end_token_ids=end_token_ids),
        arrival=arrival,
        max_tokens=max_tokens,
        num_choices=num_choices,
        priority=priority,
        model="model",
        tenant=tenant,
        salts=(("tenant", tenant),),
    )


class Bench:
    """A scheduler and a fake executor, stepped by hand."""

    def __init__(
        self,
        capacity: ExecutorCapacity | None = None,
        *,
        max_chunk: int = 64,
        target_step_s: float = 0.0,
        cache: PrefixCache | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        max_wait_tokens: int = 1 << 20,
        step_seconds: Callable[[StepPlan], float] | None = None,
    ) -> None:
        self.capacity = capacity or make_capacity()
        limits = StepLimits(self.capacity.max_step_tokens, max_chunk, target_step_s=target_step_s)
        self.shares = FairShares(tenant_weights)
        cache = ChainedPrefixCache() if cache is None else cache
        self.scheduler = Scheduler(self.capacity, limits, cache, self.shares, max_wait_tokens=max_wait_tokens)
        self.executor = FakeExecutor(self.capacity, step_seconds)
        self.num_steps = 0
        self.ended_in_step: dict[str, int] = {}
        self.plans: deque[StepPlan] = deque()
        self.events: list[Event] = []

    def add(self, *requests: Request) -> None:
        """Queue requests."""
        for request in requests:
            self.shares.opened(request.tenant)
            self.scheduler.add(request)

    def plan(self) -> StepPlan | None:
        """Make the next plan, without running it."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
        self.scheduler.check_invariants()
        return plan

    def run(self) -> list[Event]:
        """Run the oldest plan and take in its result."""
        plan = self.plans.popleft()
        result = self.executor.run(plan)
        events = self.scheduler.apply(result)
        for failure in result.failures:
            last_step_id = self.plans[-1].step_id if self.plans else plan.step_id
            self.executor.spoiled(failure.reason.removeprefix(BECAUSE_OF), last_step_id)
        self.scheduler.check_invariants()
        self.num_steps += 1
        self.take(events)
        return events

    def take(self, events: list[Event]) -> None:
        """Remember what the scheduler told of."""
        self.events += events
        for event in events:
            if isinstance(event, RequestEnded):
                self.shares.closed(event.request.tenant)
                self.ended_in_step[event.request.request_id] = self.num_steps

    def step(self) -> StepPlan | None:
        """Plan and run one step."""
        plan = self.plan()
        if plan is not None:
            self.run()
        return plan

    def finish(self) -> None:
        """Step until nothing is left to do."""
        while self.step() is not None:
            pass

    def finish_pipelined(self, depth: int) -> None:
        """Step until nothing is left to do, with up to `depth` plans ahead of their results."""
        while True:
            while len(self.plans) < depth and self.plan() is not None:
                pass
            if not self.plans:
                return
            self.run()

    def output(self, request: Request, index: int = 0) -> list[int]:
        """The tokens that came for one choice."""
        tokens: list[int] = []
        for event in self.events:
            if isinstance(event, ChoiceTokens) and (event.request_id, event.index) == (request.request_id, index):
                assert event.offset == len(tokens)
                tokens += event.token_ids
        return tokens

    def ends(self) -> dict[str, str]:
        """How each request ended."""
        return {event.request.request_id: event.outcome for event in self.events if isinstance(event, RequestEnded)}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.scheduler.blocks.num_free_blocks


def expected_output(request: Request, index: int = 0) -> list[int]:
    """What a choice must give whatever else happens."""
    return undisturbed_output(
        list(request.prompt), request.sampling.seed, index, request.max_tokens, request.sampling.end_token_ids
    )
