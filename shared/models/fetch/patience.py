"""Trying again: how often, and after which pause."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from shared.models.fetch.faults import FAULTS, explain, is_passing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How many failures in a row are borne, and how long to wait after each: twice as long as before."""

    max_failures: int = 5
    first_pause_s: float = 0.5
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    say: Callable[[str], None] = lambda _sentence: None
    """Told before each pause why there is one, and how long."""

    async def bear(self, error: Exception, num_failures: int, *, url: str, access_hint: str) -> None:
        """Wait before another attempt, or raise the ModelError for `error` if there should be none."""
        explained = explain(error, url, access_hint)
        if not is_passing(error) or num_failures > self.max_failures:
            raise explained from error
        pause_s = self.first_pause_s * 2 ** (num_failures - 1)
        self.say(f"{explained}; trying again in {pause_s:g} s")
        await self.sleep(pause_s)

    async def persist(self, attempt: Callable[[], Awaitable[T]], *, url: str, access_hint: str) -> T:
        """The result of the first attempt that succeeds. Raises ModelError when there should be no further one."""
        num_failures = 0
        while True:
            try:
                return await attempt()
            except FAULTS as error:
                num_failures += 1
                await self.bear(error, num_failures, url=url, access_hint=access_hint)
