"""What is pinned in a fleet, and which requests compute it where. Queues nothing itself: that is the fleet's.

What an executor lacks is not remembered but found out: whatever is wanted there, not held and not being computed. So a
pin for which there was no room, or that had to give way, comes when there is room.
"""

from collections.abc import Iterator
from typing import NamedTuple

from services.scheduler.core.events import RequestEnded
from services.scheduler.core.pins import Pin
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from shared.ids import RequestId
from shared.messages import Outcome
from shared.sampling import SamplingParams


class _Making(NamedTuple):
    """A request that computes a prefix."""

    name: str
    where: Scheduler
    num_blocks: int


class FleetPins:
    """The pins of a fleet."""

    def __init__(self) -> None:
        self.wanted: dict[str, Pin] = {}
        """By name."""
        self._making: dict[RequestId, _Making] = {}
        self._num_requests = 0

    @property
    def is_making(self) -> bool:
        """Whether a prefix is being computed."""
        return bool(self._making)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request computes a prefix, for nobody else."""
        return request_id in self._making

    def requests_of(self, name: str) -> list[RequestId]:
        """Those that compute a prefix at this moment."""
        return [request_id for request_id, making in self._making.items() if making.name == name]

    def missing(self, where: Scheduler) -> Iterator[Pin]:
        """What an executor of the model lacks and has room for now, beside what runs and is next there."""
        for name, pin in self.wanted.items():
            if pin.model == where.capacity.model and name not in where.pins and self.fits(pin, where):
                is_being_made = any(making.where is where and making.name == name for making in self._making.values())
                if not is_being_made and where.has_spare_blocks(_num_blocks(pin, where)):
                    yield pin

    def fits(self, pin: Pin, where: Scheduler) -> bool:
        """Whether an executor could hold a pin: all pins together, held and being computed, take at most half of its
        blocks."""
        num_blocks = _num_blocks(pin, where) + where.pins.num_blocks
        num_blocks += sum(making.num_blocks for making in self._making.values() if making.where is where)
        return 2 * num_blocks <= where.capacity.num_blocks and len(pin.token_ids) < where.max_total_tokens

    def start(self, pin: Pin, where: Scheduler) -> Request:
        """The request that computes a pin's prefix on an executor. It goes before others of its tenant."""
        self._num_requests += 1
        request = Request(
            RequestId(f"pin-{self._num_requests}"),
            pin.token_ids,
            SamplingParams(seed=0, temperature=0.0),
            arrival=-self._num_requests,
            max_tokens=1,
            model=pin.model,
            tenant=pin.tenant,
            salts=pin.salts,
        )
        self._making[request.request_id] = _Making(pin.name, where, _num_blocks(pin, where))
        return request

    def end(self, event: RequestEnded) -> None:
        """A request has ended: if it computed a prefix, hold that. One that cannot be computed is not tried again."""
        making = self._making.pop(event.request.request_id, None)
        if making is not None and event.outcome is Outcome.COMPLETED:
            making.where.pins.hold(making.name, event.request)
        elif making is not None and event.outcome is Outcome.FAILED:
            making.where.pins.give_up(making.name)


def _num_blocks(pin: Pin, where: Scheduler) -> int:
    return -(-len(pin.token_ids) // where.capacity.block_size)
