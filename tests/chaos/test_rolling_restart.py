"""Every process is told to stop and replaced, one after the other, while clients keep asking: nobody is refused."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Final

import aiohttp
import pytest

from shared.ids import Service
from shared.presence import BEAT_INTERVAL_S
from tests.answers import SameTexts, WrongAnswer, text_of
from tests.chaos.beats import Beats
from tests.chaos.endpoints import new_session
from tests.chaos.mesh import ChaosMesh, Instance
from tests.chaos.runs import READY_WITHIN_S, watched
from tests.chaos.stalls import TOO_LONG_S, watching_for_stalls
from tests.chaos.workload import MODEL

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

NUM_CLIENTS: Final = 6
ANSWER_WITHIN_S: Final = 20.0
"""No request takes a second by itself."""
_LOOK_S: Final = 0.05


class Load:
    """Clients that ask one gateway or the other for short answers, without a break and without a second try."""

    def __init__(self, session: aiohttp.ClientSession, urls: list[str]) -> None:
        self.failures: list[str] = []
        self.num_answered = 0
        self.happening = "nothing"
        """Who is being restarted, for the report."""
        self._session = session
        self._num_open = dict.fromkeys(urls, 0)
        self._avoided: set[str] = set()
        self._texts = SameTexts()

    async def run(self, numbers: Iterator[int]) -> None:
        """One client."""
        for number in numbers:
            url = min(self._num_open.keys() - self._avoided, key=self._num_open.__getitem__)
            self._num_open[url] += 1
            happening = self.happening
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    self._texts.check(number % 8, await self._ask(url, number % 8))
            except (aiohttp.ClientError, TimeoutError, WrongAnswer) as error:
                self.failures.append(f"from {happening} to {self.happening}: {type(error).__name__} {error}"[:200])
            self.num_answered += 1
            self._num_open[url] -= 1

    async def avoid(self, url: str) -> None:
        """Ask a gateway nothing more, as whoever spreads requests over gateways does before one is stopped."""
        self._avoided.add(url)
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while self._num_open[url]:  # noqa: ASYNC110  # clients are looked at together
                await asyncio.sleep(_LOOK_S)

    async def use(self, url: str) -> None:
        """Ask a gateway again, as soon as it says that it can serve."""
        async with asyncio.timeout(READY_WITHIN_S):
            while url in self._avoided:
                async with self._session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        self._avoided.discard(url)
                await asyncio.sleep(_LOOK_S)

    async def _ask(self, url: str, number: int) -> str:
        body = {"model": MODEL, "prompt": f"Sack {number}: ", "max_tokens": 16, "seed": number, "ignore_eos": True}
        is_stream = number % 2 == 0
        async with self._session.post(f"{url}/v1/completions", json=body | {"stream": is_stream}) as answer:
            return text_of(answer.status, await answer.text(), is_stream=is_stream)


async def restart(instance: Instance, beats: Beats, load: Load) -> None:
    """Tell a process to stop, and return when another one has taken its place."""
    num_starts, load.happening = instance.num_starts, instance.name
    instance.terminate()
    async with asyncio.timeout(READY_WITHIN_S):
        while instance.num_starts == num_starts or not beats.is_whole():  # noqa: ASYNC110  # beats are looked at together
            await asyncio.sleep(_LOOK_S)
    await asyncio.sleep(BEAT_INTERVAL_S)  # a gateway that is new as well hears of the others within a beat
    load.happening = "nothing"


async def restart_everything(mesh: ChaosMesh) -> tuple[Load, float]:
    """The load that went on meanwhile, and how long these tests themselves stood still."""
    async with watched(mesh) as beats, watching_for_stalls() as watch, new_session() as session:
        load, numbers = Load(session, mesh.urls), itertools.count()
        clients = [asyncio.create_task(load.run(numbers)) for _ in range(NUM_CLIENTS)]
        try:
            for service in Service:
                for place, instance in enumerate(mesh.of(service)):
                    if service is Service.GATEWAY:
                        await load.avoid(mesh.urls[place])
                    await restart(instance, beats, load)
                    if service is Service.GATEWAY:
                        await load.use(mesh.urls[place])
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        return load, watch.worst_s


async def test_a_rolling_restart_fails_no_new_request(mesh: ChaosMesh) -> None:
    load, stood_still_s = await restart_everything(mesh)
    if load.failures and stood_still_s > TOO_LONG_S:
        load, _ = await restart_everything(mesh)
    assert not load.failures, "\n".join(load.failures[:12])
    assert load.num_answered > 100, "there was not much to refuse"
    assert not mesh.died
