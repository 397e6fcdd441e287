"""Those that wait on one executor, in the order in which they will be admitted.

The order: whoever has waited for too long, longest first; then the better priority; then the tenant that was served
least; then arrival. Preempted choices have the arrival they always had, so each is the first of its tenant again.

Time is counted in tokens computed on this executor. A choice's waiting adds up over preemptions.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any, Final, NamedTuple

from services.scheduler.core.fairness import FairShares
from services.scheduler.core.request import Choice

_Key = Callable[[Choice], Any]

_by_arrival: _Key = attrgetter("request.arrival", "index")
_by_wait: _Key = attrgetter("waits_since", "request.arrival", "index")


class Load(NamedTuple):
    """How much waits."""

    num_choices: int
    num_tokens: int


NO_LOAD: Final = Load(0, 0)


def sum_loads(loads: Iterable[Load]) -> Load:
    """All of them together."""
    return Load(*map(sum, zip(NO_LOAD, *loads, strict=True)))


class WaitingQueue:
    """A queue for each priority and tenant, and one over all of them by how long they have waited."""

    def __init__(self, shares: FairShares, max_wait_tokens: int) -> None:
        """Whoever has waited while `max_wait_tokens` tokens were computed goes first from then on.

        Whoever asks for those that are next says how many may go first for that reason.
        """
        self.shares = shares
        self.max_wait_tokens = max_wait_tokens
        self._by_priority: dict[int, dict[str, list[Choice]]] = {}
        self._longest_first: list[Choice] = []
        self._num_tokens_passed = 0
        self._load: dict[str, Load] = {}

    def load(self, tenant: str | None = None) -> Load:
        """What waits, of one tenant or in all."""
        if tenant is not None:
            return self._load.get(tenant, NO_LOAD)
        return sum_loads(self._load.values())

    def add(self, choice: Choice) -> None:
        """Queue a choice."""
        choice.waits_since = self._num_tokens_passed - choice.num_tokens_waited
        tenants = self._by_priority.setdefault(choice.request.priority, {})
        insort(tenants.setdefault(choice.request.tenant, []), choice, key=_by_arrival)
        insort(self._longest_first, choice, key=_by_wait)
        choice.num_tokens_queued = choice.num_known_tokens
        self._count(choice, 1)

    def remove(self, choice: Choice) -> None:
        """Take a choice out. Raises ValueError if it is not there."""
        _remove(self._longest_first, choice, _by_wait)
        choice.num_tokens_waited = self._num_tokens_passed - choice.waits_since
        self._count(choice, -1)
        request = choice.request
        tenants = self._by_priority[request.priority]
        _remove(tenants[request.tenant], choice, _by_arrival)
        if not tenants[request.tenant]:
            del tenants[request.tenant]
        if not tenants:
            del self._by_priority[request.priority]

    @property
    def tenants(self) -> set[str]:
        """Those that have somebody waiting."""
        return {tenant for tenants in self._by_priority.values() for tenant in tenants}

    def in_order(self, max_overdue: int | None = None) -> Iterator[Choice]:
        """Those that wait, the next first. Of those that have waited for too long, only `max_overdue` go first.

        Whoever was given may be removed meanwhile; nothing may be added.
        """
        overdue = list(islice(takewhile(self.is_overdue, self._longest_first), max_overdue))
        yield from overdue
        were_first = set(overdue)
        for priority in sorted(self._by_priority):
            tenants = self._by_priority[priority]
            for tenant in sorted(tenants, key=lambda name: (self.shares.served(name), _by_arrival(tenants[name][0]))):
                for choice in tuple(tenants[tenant]):
                    if choice not in were_first:
                        yield choice

    def is_overdue(self, choice: Choice) -> bool:
        """Whether one that waits has waited for too long."""
        return self._num_tokens_passed - choice.waits_since >= self.max_wait_tokens

    def pass_tokens(self, num_tokens: int) -> None:
        """Let so many tokens' time pass."""
        self._num_tokens_passed += num_tokens

    def clear(self) -> None:
        """Let everyone go."""
        for choice in list(self._longest_first):
            self.remove(choice)

    def _count(self, choice: Choice, sign: int) -> None:
        tenant = choice.request.tenant
        load = self._load.get(tenant, NO_LOAD)
        load = Load(load.num_choices + sign, load.num_tokens + sign * choice.num_tokens_queued)
        if load.num_choices:
            self._load[tenant] = load
        else:
            del self._load[tenant]

    def __iter__(self) -> Iterator[Choice]:
        """Longest waiting first."""
        return iter(self._longest_first)

    def __len__(self) -> int:
        return len(self._longest_first)

    def __contains__(self, choice: object) -> bool:
        return isinstance(choice, Choice) and _find(self._longest_first, choice, _by_wait) is not None

    def check_invariants(self) -> None:
        """Raise AssertionError if the queues hold different choices or are out of order."""
        queued = [c for tenants in self._by_priority.values() for queue in tenants.values() for c in queue]
        assert set(queued) == set(self._longest_first), "the queues differ"
        assert len(queued) == len(self._longest_first), "a choice waits twice"
        for tenant in {*self._load, *(choice.request.tenant for choice in queued)}:
            tokens = [choice.num_tokens_queued for choice in queued if choice.request.tenant == tenant]
            assert self.load(tenant) == (len(tokens), sum(tokens)), f"what waits of {tenant} is counted wrongly"
        assert self._longest_first == sorted(self._longest_first, key=_by_wait), "the queue by waiting is out of order"
        for tenants in self._by_priority.values():
            assert all(queue and queue == sorted(queue, key=_by_arrival) for queue in tenants.values()), "a queue"


def _find(queue: list[Choice], choice: Choice, key: _Key) -> int | None:
    at = bisect_left(queue, key(choice), key=key)
    return at if at < len(queue) and queue[at] is choice else None


def _remove(queue: list[Choice], choice: Choice, key: _Key) -> None:
    at = _find(queue, choice, key)
    if at is None:
        raise ValueError(f"choice {choice.index} of {choice.request.request_id} does not wait here")
    del queue[at]
