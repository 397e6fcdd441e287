"""What is pinned in the mesh reaches the scheduler from the broker's bucket, whatever happens to messages about it."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from services.scheduler import pinning
from services.scheduler.core.budget import StepLimits
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.pins import Pin
from services.scheduler.core.prefix_cache import ChainedPrefixCache
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pinning import PinReader, PinsRead, follow_pins
from shared.codec import encode
from shared.ids import InstanceId
from shared.messages import PINS_BUCKET, ExecutorCapacity, PinnedPrefix, int32s
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.scheduler.driver import make_capacity, make_request
from tests.scheduler.fake_executor import FakeExecutor

PATIENCE_S = 30.0
PREFIX = PinnedPrefix("tiny", "", int32s(range(40)))
OTHER = PinnedPrefix("tiny", "acme", int32s(range(7)))


class _World:
    """A reader on a broker, and what it has told."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.transport = MemoryTransport(broker)
        self.bucket = self.transport.bucket(PINS_BUCKET)
        self.told: asyncio.Queue[PinsRead] = asyncio.Queue()
        self.reader = PinReader(self.transport, self.told.put_nowait)

    async def next_told(self) -> Mapping[str, PinnedPrefix]:
        return (await asyncio.wait_for(self.told.get(), PATIENCE_S)).pins


@pytest.fixture
async def world(memory_broker: MemoryBroker) -> AsyncIterator[_World]:
    world = _World(memory_broker)
    await world.transport.connect()
    yield world
    await world.reader.stop()
    await world.transport.close()


async def test_what_was_pinned_before_the_start_is_read(world: _World) -> None:
    await world.bucket.put("system", encode(PREFIX))
    world.reader.start()
    assert await world.next_told() == {"system": PREFIX}


async def test_a_change_is_read_when_it_is_told_of(world: _World) -> None:
    await world.bucket.put("system", encode(PREFIX))
    world.reader.start()
    await world.next_told()
    await world.bucket.put("other", encode(OTHER))
    world.reader.read_again()
    assert await world.next_told() == {"system": PREFIX, "other": OTHER}
    await world.bucket.delete("system")
    world.reader.read_again()
    assert await world.next_told() == {"other": OTHER}


async def test_a_change_that_nobody_told_of_is_read_a_little_later(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_READ_AGAIN_S", 0.01)
    world.reader.start()
    await asyncio.sleep(0)
    await world.bucket.put("system", encode(PREFIX))
    assert await world.next_told() == {"system": PREFIX}


async def test_a_broker_that_was_away_is_read_when_it_is_back(world: _World, caplog: pytest.LogCaptureFixture) -> None:
    await world.bucket.put("system", encode(PREFIX))
    await world.transport.close()
    world.reader.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "those known stay" in caplog.text
    await world.transport.connect()
    world.transport.reconnect()
    assert await world.next_told() == {"system": PREFIX}


async def test_a_pin_that_cannot_be_read_does_not_hide_the_others(
    world: _World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.bucket.put("broken", b"not a pin")
    await world.bucket.put("system", encode(PREFIX))
    world.reader.start()
    assert await world.next_told() == {"system": PREFIX}
    assert "a pin cannot be read" in caplog.text


class _CountingFleet(Fleet):
    """Knows how often it was asked to pin."""

    def __init__(self) -> None:
        super().__init__(_make_scheduler)
        self.num_pinned = 0

    def pin(self, pin: Pin) -> None:
        self.num_pinned += 1
        super().pin(pin)


def _make_scheduler(capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
    return Scheduler(capacity, StepLimits(capacity.max_step_tokens, 64), ChainedPrefixCache(), shares)


def test_only_what_changed_is_pinned_again() -> None:
    fleet = _CountingFleet()
    follow_pins(fleet, {"system": PREFIX, "other": OTHER}, shares_prefixes=True)
    follow_pins(fleet, {"system": PREFIX, "other": OTHER}, shares_prefixes=True)
    assert fleet.num_pinned == 2
    follow_pins(fleet, {"system": OTHER}, shares_prefixes=True)
    assert fleet.num_pinned == 3
    assert list(fleet.pins) == ["system"]
    assert fleet.pins["system"].token_ids == OTHER.token_ids


def test_tenants_who_share_nothing_have_pins_of_their_own() -> None:
    salts = {}
    for shares_prefixes in (False, True):
        fleet = _CountingFleet()
        follow_pins(fleet, {"other": OTHER}, shares_prefixes=shares_prefixes)
        salts[shares_prefixes] = fleet.pins["other"].salts
    assert salts == {False: (("tenant", "acme"),), True: ()}


class _OneExecutor:
    """A fleet on one fake executor."""

    def __init__(self, num_blocks: int) -> None:
        self.id = InstanceId("executor-a")
        self.fleet = Fleet(_make_scheduler)
        self.executor = FakeExecutor(make_capacity(num_blocks=num_blocks))
        self.fleet.add_executor(self.id, self.executor.capacity)
        self.scheduler = self.fleet.schedulers[self.id]

    def finish(self) -> None:
        while (plan := self.fleet.schedule(self.id)) is not None:
            self.fleet.apply(self.id, self.executor.run(plan))
            self.fleet.check_invariants()


def test_a_pin_that_gave_way_comes_back_when_its_room_is_free() -> None:
    one = _OneExecutor(num_blocks=10)
    large = make_request("large", [3] * 30, max_tokens=10)
    one.fleet.add(large)
    one.fleet.pin(Pin("system", "model", int32s(range(1, 17))))
    one.finish()
    assert one.scheduler.pins.num_blocks == 4
    large = make_request("another", [4] * 20, max_tokens=4)
    one.fleet.add(large)
    one.scheduler.pins.give_way()
    one.finish()
    assert one.scheduler.pins.num_blocks == 4


def test_a_pin_that_gave_way_and_was_unpinned_stays_away() -> None:
    one = _OneExecutor(num_blocks=10)
    one.fleet.pin(Pin("system", "model", int32s(range(1, 17))))
    one.finish()
    one.scheduler.pins.give_way()
    one.fleet.unpin("system")
    one.finish()
    assert one.scheduler.pins.num_blocks == 0


def test_evictions_are_counted_with_the_time_that_nobody_needed_them() -> None:
    one = _OneExecutor(num_blocks=10)
    blocks = one.scheduler.blocks
    one.fleet.add(make_request("first", list(range(1, 17)), max_tokens=1))
    one.finish()
    assert (blocks.num_evictions, blocks.eviction_age_s) == (0, 0.0)
    blocks.busy_s += 7.0
    one.fleet.add(make_request("second", list(range(51, 87)), max_tokens=1))
    one.finish()
    assert blocks.num_evictions == 3
    assert blocks.eviction_age_s == pytest.approx(7.0, abs=0.5)
