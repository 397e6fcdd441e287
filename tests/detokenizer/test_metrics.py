"""The detokenizer's metrics: what is open, what was decoded, and what was missing."""

import logging
from collections.abc import Callable

import pytest

from shared.actor import Tick
from shared.ids import RequestId
from shared.messages import DecodeTokens, FinishReason, Outcome, RequestClosed, TextOptions, Usage
from shared.telemetry.metering import MetricsSettings, metering
from tests.detokenizer.test_service import SCHEDULER, Mesh, closed, opened
from tests.detokenizer.vocabularies import Case
from tests.shared.telemetry.scrape import read


@pytest.fixture
def mesh(case_of: Callable[[str], Case]) -> Mesh:
    return Mesh(case_of("byte level"))


async def test_requests_are_counted_while_open_and_by_their_end(mesh: Mesh) -> None:
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        await mesh.scheduler.send(
            DecodeTokens(SCHEDULER, (opened("a"), opened("b")), (mesh.entry("a", 0, "the Ġcat"),))
        )
        await mesh.gateway.receive_texts()
        page = await read(made.page)
        assert page.value("shoal_detokenizer_requests_open") == page.value("shoal_detokenizer_choices_open") == 2
        assert page.value("shoal_detokenizer_choices_limit") == 10
        last = mesh.entry("a", 2, "<|im_end|>", FinishReason.STOP)
        cancelled = RequestClosed(RequestId("b"), Outcome.CANCELLED, Usage(1, 0, (0,)))
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (), (last,), (closed("a", 3), cancelled)))
        await mesh.gateway.receive_texts()
        page = await read(made.page)
    assert page.value("shoal_detokenizer_requests_open") == 0
    assert page.by("shoal_detokenizer_requests_total", "ending") == {"completed": 1, "cancelled": 1}
    assert page.value("shoal_detokenizer_tokens_total") == 3


async def test_requests_that_are_too_many_fail_and_are_counted(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        with caplog.at_level(logging.CRITICAL):
            await mesh.scheduler.send(DecodeTokens(SCHEDULER, tuple(opened(str(number)) for number in range(12))))
            await mesh.gateway.receive_texts()
        page = await read(made.page)
    assert page.by("shoal_detokenizer_requests_total", "ending") == {"failed": 2}
    assert page.value("shoal_detokenizer_requests_open") == 10


async def test_stop_strings_are_counted_once(mesh: Mesh) -> None:
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        first = opened("a", text=TextOptions(stop=("cat",)))
        for offset, words in ((0, "the Ġcat"), (2, "Ġcat")):
            await mesh.scheduler.send(
                DecodeTokens(SCHEDULER, (first,) if offset == 0 else (), (mesh.entry("a", offset, words),))
            )
        await mesh.scheduler.receive()
        page = await read(made.page)
    assert page.value("shoal_detokenizer_stop_strings_total") == 1
    assert page.value("shoal_detokenizer_tokens_total") == 2, "what comes after it is not decoded"


async def test_gaps_strangers_and_questions_are_counted(mesh: Mesh) -> None:
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        entries = (mesh.entry("a", 5, "the"), mesh.entry("stranger", 0, "the"), mesh.entry("stranger", 1, "the"))
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (opened("a"),), entries))
        for _ in range(2):
            await mesh.scheduler.receive()
        page = await read(made.page)
    assert page.value("shoal_detokenizer_gaps_total") == 3
    assert page.value("shoal_detokenizer_replays_total") == 2, "the stranger is asked for once"
    assert page.value("shoal_detokenizer_messages_unknown_total") == 2


async def test_requests_that_are_quiet_are_forgotten(mesh: Mesh) -> None:
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        await mesh.scheduler.send(DecodeTokens(SCHEDULER, (opened("a"),), (mesh.entry("a", 0, "the"),)))
        await mesh.gateway.receive_texts()
        mesh.clock.advance(100)
        await mesh.service.handle(Tick())
        page = await read(made.page)
    assert page.value("shoal_detokenizer_requests_forgotten_total") == 1
    assert page.value("shoal_detokenizer_requests_open") == 0
