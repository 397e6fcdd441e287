"""A service of its own for the tests of `shared.process`: run it as a script, with what it shall do as its name.

It repeats every `AttachExecutor` it hears to a subject, so that a test knows that it works.
"""

import asyncio
import dataclasses
import threading
from typing import Any, ClassVar

from shared import process
from shared.actor import Actor, Tick
from shared.config import Config, setting
from shared.errors import ModelError
from shared.ids import Service
from shared.messages import AttachExecutor, DetokenizerStatus, Status
from shared.process import Parts


@dataclasses.dataclass(frozen=True, slots=True)
class EchoConfig(Config):
    """What the tests tell it."""

    prefix: ClassVar[str] = "SHOAL_DETOKENIZER_"

    mode: str = setting(
        "work",
        "what to do",
        choices=("work", "no-model", "bug-in-build", "bug-in-handler", "build-for-ever", "busy-for-ever"),
    )
    echo_to: str = setting("echo", "subject to repeat messages to")


class Echo(Actor[AttachExecutor]):
    """Repeats what it hears."""

    def __init__(self, parts: Parts[EchoConfig]) -> None:
        super().__init__(parts.identity, parts.transport, AttachExecutor, parts.clock)
        self._config = parts.config

    async def handle(self, message: AttachExecutor | Tick) -> None:
        if isinstance(message, Tick):
            return
        if self._config.mode == "bug-in-handler":
            raise ZeroDivisionError("a bug")
        await self.send(self._config.echo_to, message)

    def is_idle(self) -> bool:
        return self._config.mode != "busy-for-ever"

    def status(self) -> Status:
        return DetokenizerStatus()

    def models(self) -> tuple[str, ...]:
        return ()


async def build(parts: Parts[EchoConfig]) -> Actor[Any]:
    """The actor, or what the mode says."""
    if parts.config.mode == "no-model":
        raise ModelError("the model tiny is not in the store; fetch it with `shoal pull tiny`")
    if parts.config.mode == "bug-in-build":
        raise ZeroDivisionError("a bug")
    if parts.config.mode == "build-for-ever":
        print("building", flush=True)
        await asyncio.to_thread(threading.Event().wait)  # as loading a model does, which nothing can interrupt
    return Echo(parts)


if __name__ == "__main__":
    process.run(Service.DETOKENIZER, EchoConfig, build)
