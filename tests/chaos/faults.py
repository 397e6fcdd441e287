"""What is done to a mesh: an instance is killed, frozen for a while, or told to stop; the broker killed or frozen."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from shared.ids import Service
from tests.chaos.progress import Moment
from tests.chaos.protocol import Instance, Mesh

FROZEN_S: Final = 4.0
"""Longer than it takes to count as dead, shorter than a supervisor's patience."""
BROKER_AWAY_S: Final = 1.0


class Blow(StrEnum):
    """How a process is hit."""

    KILL = "SIGKILL"
    FREEZE = "SIGSTOP"
    TERMINATE = "SIGTERM"


BROKER_BLOWS: Final = (Blow.KILL, Blow.FREEZE)


@dataclass(frozen=True, slots=True)
class Fault:
    """One blow; `service` None is the broker, which is killed and started again, or frozen."""

    service: Service | None
    blow: Blow
    moment: Moment
    hits_all: bool = False
    """Whether it hits every instance of the service at once, instead of the busiest."""

    def __str__(self) -> str:
        """For the names of tests."""
        who = f"every-{self.service}" if self.hits_all else self.service or "broker"
        return f"{who}-{self.blow}-{self.moment}"


class Listener(Protocol):
    """Whoever hears the mesh's beats."""

    def busiest(self, service: Service) -> str | None:
        """The name of the instance of a service that has most to do, if any lives."""
        ...


async def strike(mesh: Mesh, beats: Listener, service: Service | None, blow: Blow) -> str:
    """Hit the busiest instance of a service, or the broker; its name. Returns once a frozen one goes on."""
    if service is None:
        if blow is Blow.FREEZE:
            await mesh.freeze_broker(FROZEN_S)
        else:
            await mesh.restart_broker(BROKER_AWAY_S)
        return "broker"
    name = beats.busiest(service)
    instance = mesh.named(name) if name is not None else mesh.of(service)[0]
    await _hit(instance, blow)
    return instance.name


async def strike_all(mesh: Mesh, service: Service, blow: Blow) -> None:
    """Hit every instance of a service at once. Returns once frozen ones go on."""
    await asyncio.gather(*(_hit(instance, blow) for instance in mesh.of(service)))


async def _hit(instance: Instance, blow: Blow) -> None:
    match blow:
        case Blow.KILL:
            await asyncio.to_thread(instance.kill)
        case Blow.TERMINATE:
            await asyncio.to_thread(instance.terminate)
        case Blow.FREEZE:
            await asyncio.to_thread(instance.freeze)
            try:
                await asyncio.sleep(FROZEN_S)
            finally:
                await asyncio.to_thread(instance.thaw)


def every_fault() -> list[Fault]:
    """Each service × each blow × each moment, once one instance and once all; and the broker at each moment."""
    faults = [
        Fault(service, blow, moment, hits_all)
        for hits_all in (False, True)
        for service in Service
        for blow in Blow
        for moment in Moment
    ]
    return [*faults, *(Fault(None, blow, moment) for blow in BROKER_BLOWS for moment in Moment)]


def short_list() -> list[Fault]:
    """Each service with each blow, at moments that go round, so that every moment has met every blow; then all of a
    service at once, and the broker."""
    moments = list(Moment)
    faults = [
        Fault(service, blow, moments[(row + column) % len(moments)])
        for row, service in enumerate(Service)
        for column, blow in enumerate(Blow)
    ]
    everybody = [Fault(service, Blow.KILL, Moment.DECODE, hits_all=True) for service in Service]
    return [*faults, *everybody, *(Fault(None, blow, Moment.DECODE) for blow in BROKER_BLOWS)]
