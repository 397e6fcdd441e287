"""Properties of the scheduler core under random arrivals, cancels, stops, failures and losses of executors."""

import os
from array import array
from collections import defaultdict, deque
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import MAX_LOSSES, Fleet, NeverFits
from services.scheduler.core.prefix_cache import ChainedPrefixCache, NoPrefixCache
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceTokens, ExecutorCapacity, Outcome, StepPlan
from shared.sampling import SamplingParams
from tests.scheduler.fake_executor import VOCABULARY, FakeExecutor, undisturbed_output

MODEL = "model"
PREFIXES = [[7] * 12, [7] * 8 + [9] * 8, [1, 2, 3, 4, 5]]


class _Sent:
    """A request as the test knows it, and what came back."""

    def __init__(self, request: Request, prompt: list[int]) -> None:
        self.request = request
        self.prompt = prompt
        self.logs: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, str] = {}
        self.ends: list[RequestEnded] = []
        self.stopped_at: dict[int, int] = {}
        self.is_cancelled = False
        self.may_fail = False
        self._undisturbed: dict[int, list[int]] = {}

    def undisturbed(self, index: int) -> list[int]:
        """The whole output that a choice must give."""
        if index not in self._undisturbed:
            sampling = self.request.sampling
            self._undisturbed[index] = undisturbed_output(
                self.prompt, sampling.seed, index, self.request.max_tokens, sampling.end_token_ids
            )
        return self._undisturbed[index]

    def check_finished(self, index: int) -> None:
        """A choice ends where the undisturbed one does, for the same reason, unless its text reached a stop string."""
        if index in self.stopped_at:
            assert self.finished[index] == "stop"
            return
        whole = self.undisturbed(index)
        assert self.logs[index] == whole
        assert self.finished[index] == ("stop" if whole[-1] in self.request.end_token_ids else "length")


class CoreMachine(RuleBasedStateMachine):
    """Drives a fleet of fake executors at random and compares every output with the undisturbed one."""

    sent_requests = Bundle("sent_requests")

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[RequestId, _Sent] = {}
        self.executors: dict[InstanceId, FakeExecutor] = {}
        self.plans: dict[InstanceId, deque[StepPlan]] = {}
        self.num_executors_made = 0

    @initialize(
        has_cache=st.booleans(),
        max_chunk=st.integers(1, 20),
        block_size=st.integers(1, 6),
        num_blocks=st.integers(6, 40),
        max_slots=st.integers(1, 5),
        depth=st.integers(1, 3),
        max_wait_tokens=st.sampled_from([0, 10, 100, 10_000]),
    )
    def start(
        self,
        has_cache: bool,
        max_chunk: int,
        block_size: int,
        num_blocks: int,
        max_slots: int,
        depth: int,
        max_wait_tokens: int,
    ) -> None:
        self.depth = depth
        self.capacity = ExecutorCapacity(
            model=MODEL,
            num_blocks=num_blocks,
            block_size=block_size,
            max_slots=max_slots,
            max_model_len=100,
            max_step_tokens=max_slots + 8,
        )

        def make(capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
            limits = StepLimits(max_tokens=capacity.max_step_tokens, max_chunk_tokens=max_chunk)
            cache = ChainedPrefixCache() if has_cache else NoPrefixCache()
            return Scheduler(capacity, limits, cache, shares, max_wait_tokens=max_wait_tokens)

        self.fleet = Fleet(make)

    @rule(
        target=sent_requests,
        prefix=st.sampled_from(PREFIXES),
        suffix=st.lists(st.integers(0, VOCABULARY - 1), max_size=10),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        num_choices=st.integers(1, 3),
        priority=st.integers(0, 1),
        end_token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        tenant=st.sampled_from(["a", "b"]),
    )
    def add(
        self,
        prefix: list[int],
        suffix: list[int],
        seed: int,
        max_tokens: int,
        num_choices: int,
        priority: int,
        end_token_ids: list[int],
        tenant: str,
    ) -> RequestId:
        number = len(self.sent)
        prompt = prefix + suffix
        request = Request(
            RequestId(f"request-{number}"),
            array("i", prompt),
            SamplingParams(seed=seed, end_token_ids=tuple(end_token_ids)),
            arrival=number,
            max_tokens=max_tokens,
            num_choices=num_choices,
            priority=priority,
            model=MODEL,
            tenant=tenant,
            salts=(("tenant", tenant),),
        )
        sent = self.sent[request.request_id] = _Sent(request, prompt)
        sent.may_fail = len(prompt) + max_tokens > self.capacity.num_blocks * self.capacity.block_size
        if sent.may_fail and self.executors:
            with pytest.raises(NeverFits, match=str(len(prompt) + max_tokens)):
                self.fleet.add(request)
            sent.ends.append(RequestEnded(request, Outcome.FAILED))
        else:
            self.fleet.add(request)
        return request.request_id

    @rule(request_id=consumes(sent_requests))
    def cancel(self, request_id: RequestId) -> None:
        sent = self.sent[request_id]
        sent.is_cancelled |= not sent.ends
        self.take(self.fleet.cancel(request_id))
        assert self.fleet.cancel(request_id) == []

    @rule(request_id=sent_requests, index=st.integers(0, 2), cut=st.integers(0, 3))
    def stop(self, request_id: RequestId, index: int, cut: int) -> None:
        sent = self.sent[request_id]
        num_tokens = len(sent.logs[index]) - cut
        if num_tokens < 1 or sent.ends or index in sent.finished:
            assert sent.ends == [] or self.fleet.stop(request_id, index, 1) == []
            return
        sent.stopped_at[index] = num_tokens
        self.take(self.fleet.stop(request_id, index, num_tokens))
        assert sent.finished[index] == "stop"

    @rule()
    def add_executor(self) -> None:
        if len(self.executors) == 3:
            return
        executor_id = InstanceId(f"executor-{self.num_executors_made}")
        self.num_executors_made += 1
        self.executors[executor_id] = FakeExecutor(self.capacity)
        self.plans[executor_id] = deque()
        self.take(self.fleet.add_executor(executor_id, self.capacity))

    @precondition(lambda self: self.executors)
    @rule(data=st.data())
    def lose_executor(self, data: Any) -> None:
        executor_id = data.draw(st.sampled_from(sorted(self.executors)))
        del self.executors[executor_id], self.plans[executor_id]
        self.take(self.fleet.remove_executor(executor_id))

    @precondition(lambda self: self.executors)
    @rule(data=st.data())
    def fail_a_request(self, data: Any) -> None:
        executor = self.executors[data.draw(st.sampled_from(sorted(self.executors)))]
        open_ids = sorted(request_id for request_id, sent in self.sent.items() if not sent.ends)
        if open_ids:
            request_id = data.draw(st.sampled_from(open_ids))
            executor.failing_requests.add(request_id)
            self.sent[request_id].may_fail = True

    @precondition(lambda self: self.executors)
    @rule(data=st.data(), num_turns=st.integers(1, 12))
    def work(self, data: Any, num_turns: int) -> None:
        for _ in range(num_turns):
            executor_id = data.draw(st.sampled_from(sorted(self.executors)))
            if data.draw(st.booleans()):
                self.plan(executor_id)
            else:
                self.run(executor_id)

    def plan(self, executor_id: InstanceId) -> bool:
        if len(self.plans[executor_id]) >= self.depth:
            return False
        plan = self.fleet.schedule(executor_id)
        if plan is not None:
            self.plans[executor_id].append(plan)
        return plan is not None

    def run(self, executor_id: InstanceId) -> bool:
        if not self.plans[executor_id]:
            return False
        result = self.executors[executor_id].run(self.plans[executor_id].popleft())
        self.take(self.fleet.apply(executor_id, result))
        return True

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ChoiceTokens):
                sent = self.sent[event.request_id]
                assert not sent.ends, "tokens after the end of the request"
                assert event.index not in sent.finished, "tokens after the end of the choice"
                log = sent.logs[event.index]
                if event.index in sent.stopped_at:
                    del log[sent.stopped_at[event.index] :]
                assert event.offset == len(log), "a hole or a repetition in the log"
                log.extend(event.token_ids)
                assert log == sent.undisturbed(event.index)[: len(log)], "differs from the undisturbed run"
                if event.finish_reason is not None:
                    sent.finished[event.index] = event.finish_reason
                    sent.check_finished(event.index)
            else:
                sent = self.sent[event.request.request_id]
                assert not sent.ends, "ended twice"
                sent.ends.append(event)

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check_invariants()

    def teardown(self) -> None:
        """Let everything finish: each request must end, and nothing may be held afterwards."""
        if not hasattr(self, "fleet"):
            return
        if not self.executors:
            self.add_executor()
        while sum(self.plan(executor_id) + self.run(executor_id) for executor_id in self.executors):
            self.is_consistent()
        assert self.fleet.num_requests == 0, "requests are left though no executor has work"
        for sent in self.sent.values():
            (end,) = sent.ends
            self.check_end(sent, end.outcome)
        for scheduler in self.fleet.schedulers.values():
            assert scheduler.blocks.num_free_blocks == self.capacity.num_blocks, "blocks leaked"

    def check_end(self, sent: _Sent, outcome: Outcome) -> None:
        if outcome is Outcome.COMPLETED:
            assert sent.finished.keys() == set(range(len(sent.request.choices)))
        elif outcome is Outcome.CANCELLED:
            assert sent.is_cancelled
        else:
            assert sent.may_fail or sent.request.num_losses == MAX_LOSSES


CoreMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("TEST_EXAMPLES", "100")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCore = CoreMachine.TestCase
