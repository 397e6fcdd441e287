"""Properties of the scheduler core under whatever can happen to a fleet, in any order.

TEST_EXAMPLES=2000 looks harder than the default run does.
"""

import os
from array import array
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.pins import Pin
from services.scheduler.core.request import Request
from shared.ids import RequestId
from shared.messages import ExecutorCapacity
from shared.sampling import SamplingParams
from tests.scheduler.fake_executor import VOCABULARY
from tests.scheduler.world import Rules, World

NUM_EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "100"))
PREFIXES = [[7] * 12, [7] * 8 + [9] * 8, [1, 2, 3, 4, 5]]

tokens = st.integers(0, VOCABULARY - 1)
models = st.sampled_from(["model", "model", "model", "other"])
tenants = st.sampled_from(["a", "b", "c"])

capacities = st.builds(
    lambda model, num_blocks, block_size, max_slots, spare, drafts: ExecutorCapacity(
        model, num_blocks, block_size, max_slots, 100, max_step_tokens=max_slots + spare, max_draft_tokens=drafts
    ),
    models,
    num_blocks=st.integers(6, 40),
    block_size=st.integers(1, 6),
    max_slots=st.integers(1, 5),
    spare=st.integers(0, 12),
    drafts=st.sampled_from([0, 1, 3, 6]),
)
rules_of_worlds = st.builds(
    Rules,
    depth=st.integers(1, 3),
    max_chunk_tokens=st.integers(1, 20),
    has_cache=st.booleans() | st.just(True),
    max_wait_tokens=st.sampled_from([0, 10, 100, 10_000]),
    target_step_s=st.sampled_from([0.0, 0.05]),
)


@st.composite
def requests(draw: st.DrawFn, number: int, *, one_model: bool = False) -> Request:
    """A short request, often with a beginning that others have too."""
    prompt = draw(st.sampled_from(PREFIXES)) + draw(st.lists(tokens, max_size=10))
    tenant = draw(tenants)
    return Request(
        RequestId(f"request-{number}"),
        array("i", prompt),
        SamplingParams(seed=draw(st.integers(0, 3)), end_token_ids=tuple(draw(st.lists(tokens, max_size=3)))),
        arrival=number,
        max_tokens=draw(st.integers(1, 14)),
        num_choices=draw(st.sampled_from([1, 1, 2, 3])),
        priority=draw(st.integers(0, 2)),
        model="model" if one_model else draw(models),
        tenant=tenant,
        salts=(("tenant", tenant),),
    )


class CoreMachine(RuleBasedStateMachine):
    """Lets anything happen to a fleet; the world says what must hold."""

    world: World

    @initialize(rules=rules_of_worlds, weight=st.sampled_from([0.5, 1.0, 3.0]), first=st.lists(capacities, max_size=2))
    def start(self, rules: Rules, weight: float, first: list[ExecutorCapacity]) -> None:
        self.world = World(rules, {"c": weight})
        self.num_requests = 0
        for capacity in first:
            self.world.attach(capacity)

    @rule(data=st.data(), how_many=st.integers(1, 4))
    def send(self, data: Any, how_many: int) -> None:
        for _ in range(how_many):
            self.num_requests += 1
            self.world.send(data.draw(requests(self.num_requests)))

    @precondition(lambda self: self.world.open_ids())
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.world.open_ids())))

    @precondition(lambda self: self.world.open_ids())
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        self.world.fail(data.draw(st.sampled_from(self.world.open_ids())))

    @precondition(lambda self: self.world.sent)
    @rule(data=st.data(), index=st.integers(0, 2), cut=st.integers(0, 3))
    def stop(self, data: Any, index: int, cut: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.world.sent)))
        self.world.stop(request_id, index, len(self.world.sent[request_id].logs[index]) - cut)

    @precondition(lambda self: len(self.world.members) < 3)
    @rule(capacity=capacities, step_s=st.sampled_from([0.0, 0.01, 0.1]), token_s=st.sampled_from([0.0, 0.001, 0.01]))
    def attach(self, capacity: ExecutorCapacity, step_s: float, token_s: float) -> None:
        self.world.attach(capacity, step_s, token_s)

    @precondition(lambda self: self.world.members)
    @rule(data=st.data(), has_died=st.booleans())
    def remove(self, data: Any, has_died: bool) -> None:
        self.world.remove(data.draw(st.sampled_from(sorted(self.world.members))), has_died=has_died)

    @precondition(lambda self: self.world.members)
    @rule(data=st.data())
    def drain(self, data: Any) -> None:
        self.world.drain(data.draw(st.sampled_from(sorted(self.world.members))))

    @precondition(lambda self: self.world.members and self.world.open_ids())
    @rule(data=st.data())
    def let_rows_fail(self, data: Any) -> None:
        member = self.world.members[data.draw(st.sampled_from(sorted(self.world.members)))]
        member.fake.failing_requests.add(data.draw(st.sampled_from(self.world.open_ids())))

    @rule(name=st.sampled_from(["one", "two"]), prefix=st.sampled_from(PREFIXES), model=models, tenant=tenants)
    def pin(self, name: str, prefix: list[int], model: str, tenant: str) -> None:
        self.world.fleet.pin(Pin(name, model, array("i", prefix), (("tenant", tenant),), tenant))

    @rule(name=st.sampled_from(["one", "two"]))
    def unpin(self, name: str) -> None:
        self.world.fleet.unpin(name)

    @precondition(lambda self: self.world.members)
    @rule(turns=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=16))
    def work(self, turns: list[tuple[int, bool]]) -> None:
        executor_ids = sorted(self.world.members)
        for number, is_planning in turns:
            executor_id = executor_ids[number % len(executor_ids)]
            (self.world.plan if is_planning else self.world.run)(executor_id)
            self.world.fleet.check_invariants()

    @precondition(lambda self: self.world.members and self.world.open_ids())
    @rule(num_rounds=st.integers(1, 12))
    def work_on_all(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.world.work()

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.fleet.check_invariants()

    def teardown(self) -> None:
        """Let everything finish, with one more executor of each model in case that there is none."""
        if hasattr(self, "world"):
            for model in ("model", "other"):
                self.world.attach(ExecutorCapacity(model, 40, 4, 4, max_model_len=100, max_step_tokens=16))
            self.world.finish()


CoreMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCore = CoreMachine.TestCase


@st.composite
def workloads(draw: st.DrawFn) -> list[Any]:
    """How to make the same requests twice."""
    seeds = draw(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=8))
    return [draw(requests(number, one_model=True)) for number, _ in enumerate(seeds)]


def run(workload: list[Request], rules: Rules, machines: list[ExecutorCapacity]) -> dict[tuple[RequestId, int], Any]:
    """The outputs of fresh copies of some requests."""
    world = World(rules)
    for capacity in machines:
        world.attach(capacity)
    for request in workload:
        world.send(
            Request(
                request.request_id,
                request.prompt,
                request.sampling,
                arrival=request.arrival,
                max_tokens=request.max_tokens,
                num_choices=len(request.choices),
                priority=request.priority,
                model=request.model,
                tenant=request.tenant,
                salts=request.salts,
            )
        )
        world.work()
    world.finish()
    return world.outputs()


@settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tokens_depend_neither_on_depth_nor_blocks_nor_slots_nor_executors_nor_guesses(data: Any) -> None:
    workload = data.draw(workloads())
    roomy = st.builds(
        lambda num_blocks, block_size, max_slots, drafts: ExecutorCapacity(
            "model", num_blocks, block_size, max_slots, 100, max_step_tokens=max_slots + 8, max_draft_tokens=drafts
        ),
        num_blocks=st.integers(10, 40),
        block_size=st.integers(4, 8),
        max_slots=st.integers(1, 5),
        drafts=st.sampled_from([0, 2, 5]),
    )
    alone = ExecutorCapacity("model", 100, 4, 1, max_model_len=100, max_step_tokens=100)
    one_by_one = run(workload, Rules(depth=1, has_cache=False, max_chunk_tokens=100), [alone])
    together = run(workload, data.draw(rules_of_worlds), data.draw(st.lists(roomy, min_size=1, max_size=3)))
    assert together == one_by_one
