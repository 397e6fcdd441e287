"""The tokenizer's metrics: every question once, by what came of it and where it was answered."""

from services.tokenizer.encoding import PromptEncoder
from shared.messages import DetokenizeTokens, TextPrompt, TokenizePrompt, int32s
from shared.telemetry.metering import MetricsSettings, metering
from tests.shared.telemetry.scrape import read
from tests.tokenizer.test_service import GATEWAY, Mesh, submit

LONG = TextPrompt("word " * 100)


async def test_questions_are_counted_by_kind_and_result(encoder: PromptEncoder) -> None:
    mesh = Mesh(encoder)
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        await mesh.gateway.ask(submit(TextPrompt("hello")))
        await mesh.scheduler.receive()
        for question in (
            submit(TextPrompt("hello"), model="other"),
            submit(TextPrompt("hello"), max_tokens=10**6),
            TokenizePrompt("c", GATEWAY, "m", TextPrompt("hello")),
            DetokenizeTokens("d", GATEWAY, "m", int32s([1, 2])),
            DetokenizeTokens("e", GATEWAY, "m", int32s([10**6])),
        ):
            await mesh.gateway.ask(question)
            await mesh.gateway.receive()
        page = await read(made.page)
    counts = {
        (sample.labels["kind"], sample.labels["result"]): sample.value
        for sample in page.families["shoal_tokenizer_requests"].samples
    }
    assert counts == {
        ("submit", "answered"): 1,
        ("submit", "refused"): 2,
        ("tokenize", "answered"): 1,
        ("detokenize", "answered"): 1,
        ("detokenize", "refused"): 1,
    }
    assert page.value("shoal_tokenizer_tokens_total") == mesh.service.status().num_tokens > 0
    assert page.value("shoal_tokenizer_duration_seconds_count", place="inline") == 6
    assert page.value("shoal_tokenizer_duration_seconds_sum", place="inline") > 0


async def test_long_prompts_are_timed_apart_and_those_that_wait_are_counted(encoder: PromptEncoder) -> None:
    mesh = Mesh(encoder, max_waiting_prompts=2)
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        for name in "abc":
            await mesh.gateway.ask(submit(TextPrompt("wait" + LONG.text), name))
        await mesh.gateway.receive()  # there is no room for the third
        assert (await read(made.page)).value("shoal_tokenizer_prompts_waiting") == 2
        mesh.encoder.open.set()
        for _ in range(2):
            await mesh.scheduler.receive()
        page = await read(made.page)
    assert page.value("shoal_tokenizer_prompts_waiting") == 0
    assert page.value("shoal_tokenizer_duration_seconds_count", place="thread") == 2
    assert page.value("shoal_tokenizer_requests_total", kind="submit", result="refused") == 1


async def test_answer_that_the_mesh_does_not_carry_counts_as_refused(encoder: PromptEncoder) -> None:
    mesh = Mesh(encoder, max_payload=600)
    async with mesh.started(), metering(mesh.service, MetricsSettings()) as made:
        await mesh.gateway.ask(TokenizePrompt("c", GATEWAY, "m", LONG))
        await mesh.gateway.receive()
        page = await read(made.page)
    assert page.by("shoal_tokenizer_requests_total", "result") == {"refused": 1}
