"""A fleet on fake executors that a test drives as it likes, and that checks whatever comes out of it.

What it holds to be true at any time: each request ends once; each log has no hole, and goes on like the undisturbed
one; plans follow the protocol; a draining executor gets nothing new. `finish` adds what is true at the end.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import MAX_LOSSES, Fleet, NeverFits
from services.scheduler.core.prefix_cache import ChainedPrefixCache, NoPrefixCache
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceTokens, ExecutorCapacity, Outcome, StepPlan, StepResult
from tests.scheduler.fake_executor import BECAUSE_OF, FakeExecutor, undisturbed_output

FAILED_BY_HAND = "failed by hand"


class Sent:
    """A request as the test knows it, and what came back."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt = list(request.prompt)
        self.logs: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, str] = {}
        self.ends: list[RequestEnded] = []
        self.stopped_at: dict[int, int] = {}
        self.is_cancelled = False
        self.is_failed = False
        self._undisturbed: dict[int, list[int]] = {}

    def undisturbed(self, index: int) -> list[int]:
        """The whole output that a choice must give."""
        if index not in self._undisturbed:
            sampling = self.request.sampling
            self._undisturbed[index] = undisturbed_output(
                self.prompt, sampling.seed, index, self.request.max_tokens, sampling.end_token_ids
            )
        return self._undisturbed[index]

    def append(self, tokens: ChoiceTokens) -> None:
        """Take in an entry of the log."""
        assert not self.ends, "tokens after the end of the request"
        assert tokens.index not in self.finished, "tokens after the end of the choice"
        log = self.logs[tokens.index]
        if tokens.index in self.stopped_at:
            del log[self.stopped_at[tokens.index] :]
        assert tokens.offset == len(log), "a hole or a repetition in the log"
        log.extend(tokens.token_ids)
        assert log == self.undisturbed(tokens.index)[: len(log)], "differs from the undisturbed run"
        if tokens.finish_reason is not None:
            self.finished[tokens.index] = tokens.finish_reason
            self._check_finished(tokens.index)

    def end(self, event: RequestEnded) -> None:
        """Take in the end. It must be the only one, and for a reason that the test gave."""
        assert not self.ends, "ended twice"
        self.ends.append(event)
        reason = event.reason or ""
        match event.outcome:
            case Outcome.COMPLETED:
                assert self.finished.keys() == set(range(len(self.request.choices)))
            case Outcome.CANCELLED:
                assert self.is_cancelled
            case Outcome.FAILED if "cannot fit" in reason:
                num_tokens, max_tokens = (int(word) for word in reason.replace(";", "").split() if word.isdigit())
                assert num_tokens == len(self.prompt) + self.request.max_tokens > max_tokens
            case Outcome.FAILED if "in a row died" in reason:
                assert self.request.num_losses == MAX_LOSSES
            case Outcome.FAILED:
                assert self.is_failed if reason == FAILED_BY_HAND else reason.startswith(BECAUSE_OF)

    def _check_finished(self, index: int) -> None:
        """A choice ends where the undisturbed one does, for the same reason, unless its text reached a stop string."""
        if index in self.stopped_at:
            assert self.finished[index] == "stop"
            return
        whole = self.undisturbed(index)
        assert self.logs[index] == whole
        assert self.finished[index] == ("stop" if whole[-1] in self.request.end_token_ids else "length")


@dataclass(slots=True)
class Member:
    """An executor of the fleet."""

    fake: FakeExecutor
    seconds_of: Callable[[StepPlan], float]
    """How long it takes for a step."""
    plans: deque[StepPlan] = field(default_factory=deque)
    open_when_draining: set[RequestId] | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """How all schedulers of a world plan."""

    depth: int = 2
    max_chunk_tokens: int = 16
    has_cache: bool = True
    max_wait_tokens: int = 1 << 20
    target_step_s: float = 0.0


class World:
    """The fleet, its executors, and all requests that were ever sent."""

    def __init__(self, rules: Rules, tenant_weights: dict[str, float] | None = None) -> None:
        self.rules = rules
        self.fleet = Fleet(self._make_scheduler, tenant_weights)
        self.sent: dict[RequestId, Sent] = {}
        self.members: dict[InstanceId, Member] = {}
        self._num_members = 0

    def send(self, request: Request) -> bool:
        """Submit a request; False if no executor could ever hold it, and it was refused."""
        limit = self.fleet.max_total_tokens(request.model)
        if limit is not None and request.max_total_tokens > limit:
            with pytest.raises(NeverFits) as refusal:
                self.fleet.add(request)
            assert (refusal.value.num_tokens, refusal.value.max_tokens) == (request.max_total_tokens, limit)
            return False
        self.fleet.add(request)
        self.sent[request.request_id] = Sent(request)
        return True

    def open_ids(self) -> list[RequestId]:
        """The requests that have not ended."""
        return [request_id for request_id, sent in self.sent.items() if not sent.ends]

    def cancel(self, request_id: RequestId) -> None:
        """Cancel, twice."""
        self.sent[request_id].is_cancelled = True
        self.take(self.fleet.cancel(request_id))
        assert self.fleet.cancel(request_id) == []

    def fail(self, request_id: RequestId) -> None:
        """Fail, twice."""
        self.sent[request_id].is_failed = True
        self.take(self.fleet.fail(request_id, FAILED_BY_HAND))
        assert self.fleet.fail(request_id, FAILED_BY_HAND) == []

    def stop(self, request_id: RequestId, index: int, num_tokens: int) -> None:
        """Stop a choice at one of its tokens; it must end there at once, or have ended before."""
        sent = self.sent[request_id]
        if sent.ends or index in sent.finished or not 0 < num_tokens <= len(sent.logs[index]):
            assert self.fleet.stop(request_id, index, num_tokens) == []
            return
        sent.stopped_at[index] = num_tokens
        self.take(self.fleet.stop(request_id, index, num_tokens))
        assert sent.finished[index] == "stop"

    def attach(self, capacity: ExecutorCapacity, step_s: float = 0.0, token_s: float = 0.0) -> InstanceId:
        """Add an executor whose steps take so long, and so much longer for each token; 0: it does not say."""
        executor_id = InstanceId(f"executor-{self._num_members}")
        self._num_members += 1

        def seconds_of(plan: StepPlan) -> float:
            return step_s + token_s * sum(plan.counts)

        self.members[executor_id] = Member(FakeExecutor(capacity, seconds_of), seconds_of)
        self.take(self.fleet.add_executor(executor_id, capacity))
        return executor_id

    def drain(self, executor_id: InstanceId) -> None:
        """Have an executor finish what it runs."""
        if self.members[executor_id].open_when_draining is None:
            self.members[executor_id].open_when_draining = set(self.open_ids())
        self.take(self.fleet.drain_executor(executor_id))

    def remove(self, executor_id: InstanceId, *, has_died: bool) -> None:
        """Take an executor away, with its plans."""
        del self.members[executor_id]
        self.take(self.fleet.remove_executor(executor_id, has_died=has_died))

    def plan(self, executor_id: InstanceId) -> bool:
        """Plan a step ahead, if there is one and the pipeline is not full."""
        member = self.members[executor_id]
        plan = self.fleet.schedule(executor_id) if len(member.plans) < self.rules.depth else None
        if plan is None:
            return False
        member.plans.append(plan)
        if member.open_when_draining is not None:
            late = {each.request_id for each in plan.assigned if each.request_id in self.sent}
            assert late <= member.open_when_draining, "a draining executor got something new"
        return True

    def run(self, executor_id: InstanceId) -> bool:
        """Run the oldest plan and take in its result."""
        member = self.members[executor_id]
        if not member.plans:
            return False
        plan = member.plans.popleft()
        result = member.fake.run(plan)
        last_step_id = member.plans[-1].step_id if member.plans else plan.step_id
        self.take(self.fleet.apply(executor_id, result))
        self._note_failures(member, result, last_step_id)
        return True

    def take(self, events: list[Event]) -> None:
        """Check what the fleet tells of."""
        for event in events:
            if isinstance(event, ChoiceTokens):
                self.sent[event.request_id].append(event)
            else:
                self.sent[event.request.request_id].end(event)

    def work(self) -> bool:
        """Plan and run a step on each executor; let go of those that have drained. False if there was nothing to do."""
        worked = sum([self.plan(executor_id) + self.run(executor_id) for executor_id in tuple(self.members)]) > 0
        for executor_id in self.fleet.drained_executors():
            self.remove(executor_id, has_died=False)
        self.fleet.check_invariants()
        return worked

    def finish(self) -> None:
        """Let everything end. Nobody may wait for ever, and nothing may be held afterwards."""
        num_tokens = sum(sent.request.max_total_tokens * len(sent.request.choices) for sent in self.sent.values())
        for _ in range(1000 + 20 * num_tokens):
            if not self.work():
                break
        else:
            raise AssertionError("goes on and on")
        for name in tuple(self.fleet.pins):
            self.fleet.unpin(name)
        assert [request_id for request_id, sent in self.sent.items() if len(sent.ends) != 1] == [], "did not end once"
        assert self.fleet.num_requests == 0, "requests are left though no executor has work"
        assert self.fleet.waiting() == (0, 0)
        for scheduler in self.fleet.schedulers.values():
            assert scheduler.is_empty
            assert scheduler.blocks.num_free_blocks == scheduler.capacity.num_blocks, "blocks leaked"
            scheduler.check_invariants()

    def outputs(self) -> dict[tuple[RequestId, int], list[int]]:
        """What each choice gave."""
        return {(request_id, index): log for request_id, sent in self.sent.items() for index, log in sent.logs.items()}

    def _note_failures(self, member: Member, result: StepResult, last_step_id: int) -> None:
        for failure in result.failures:
            member.fake.spoiled(failure.reason.removeprefix(BECAUSE_OF), last_step_id)

    def _make_scheduler(self, capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
        rules = self.rules
        limits = StepLimits(capacity.max_step_tokens, rules.max_chunk_tokens, target_step_s=rules.target_step_s)
        cache = ChainedPrefixCache() if rules.has_cache else NoPrefixCache()
        return Scheduler(capacity, limits, cache, shares, max_wait_tokens=rules.max_wait_tokens)
