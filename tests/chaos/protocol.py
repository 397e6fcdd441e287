"""What a mesh is for chaos, whatever it runs in: who can be struck, and how, and where clients and tests come in.

`mesh` has processes, `containers` has containers. Whoever is struck comes back by itself while the mesh is supervised.
What strikes blocks until it is done; call it on a thread of its own.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from shared.ids import Service


class Instance(Protocol):
    """One member of a mesh, over all its lives."""

    @property
    def name(self) -> str:
        """As its beats call it."""
        ...

    @property
    def service(self) -> Service:
        """What it does."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def terminate(self) -> None:
        """Tell it to end by itself."""
        ...

    def freeze(self) -> None:
        """Let it stand still and keep its connections."""
        ...

    def thaw(self) -> None:
        """Let it go on, if it stands still."""
        ...


class Mesh(Protocol):
    """A broker and two instances of each service."""

    @property
    def urls(self) -> Sequence[str]:
        """Where clients come in."""
        ...

    @property
    def nats_url(self) -> str:
        """Where the tests hear beats and read the books, as somebody who may do so."""
        ...

    @property
    def died(self) -> list[str]:
        """Ends that nobody brought about; whoever has told of them clears it."""
        ...

    def start(self) -> None:
        """Start everything; when it can serve, its beats say so."""
        ...

    def stop(self) -> None:
        """End everything."""
        ...

    def supervised(self) -> AbstractAsyncContextManager[None]:
        """While it lasts, whatever ends is started again."""
        ...

    def of(self, service: Service) -> Sequence[Instance]:
        """The instances of one service."""
        ...

    def named(self, name: str) -> Instance:
        """The instance of this name."""
        ...

    def renew(self) -> None:
        """Kill everything but the broker, so that the next run begins with a clean mesh; call it while supervised."""
        ...

    async def restart_broker(self, away_s: float) -> None:
        """Kill the broker and start it again with what it kept."""
        ...

    async def freeze_broker(self, for_s: float) -> None:
        """Let the broker stand still for a while, with all its connections."""
        ...
