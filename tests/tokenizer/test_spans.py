"""What a tokenizer tells of a request: from its prompt's arrival to the departure of its tokens, or its refusal."""

import asyncio

import msgspec

from services.tokenizer.encoding import PromptEncoder
from shared.ids import RequestId
from shared.messages import Attributes, Prompt, SubmitRequest, SubmitTokens, TextPrompt, TokenPrompt, int32s
from shared.telemetry import names
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing
from tests.shared.telemetry.spans import CONTEXT
from tests.tokenizer.test_service import SCHEDULER, TIMEOUT_S, Mesh, submit


class _Mesh(Mesh):
    """A tokenizer whose spans are kept."""

    def __init__(self, encoder: PromptEncoder, **settings: int) -> None:
        self.tracing = Tracing(SpanStore(10))
        super().__init__(encoder, **settings)

    def told(self, request_id: str = "a") -> list[Attributes]:
        """The attributes of each span of a request."""
        kept = self.tracing.store.find(RequestId(request_id))
        if kept is None:
            return []
        assert kept.owner == "acme"
        assert all((span.name, span.context) == ("tokenize", CONTEXT) for span in kept.spans)
        assert all(0 < span.start_ns <= span.end_ns for span in kept.spans)
        return [span.attributes for span in kept.spans]

    def going_on(self, request_id: str = "a") -> int:
        (open_spans,) = self.tracing.open_spans
        return sum(span.end_ns == 0 for span in open_spans(RequestId(request_id)))


def traced(prompt: Prompt, name: str = "a", max_tokens: int | None = None) -> SubmitRequest:
    return msgspec.structs.replace(submit(prompt, name, max_tokens=max_tokens), trace=CONTEXT, owner="acme", attempt=2)


async def test_a_prompt_has_a_span_and_its_trace_goes_on(encoder: PromptEncoder) -> None:
    mesh = _Mesh(encoder)
    async with mesh.started():
        await mesh.gateway.ask(traced(TextPrompt("the cat")))
        submitted = await mesh.scheduler.receive()
        assert isinstance(submitted, SubmitTokens)
        assert submitted.trace == CONTEXT
        await asyncio.sleep(0)
    num_tokens = len(submitted.prompt_token_ids)
    assert mesh.told() == [{names.ATTEMPT: 2, names.SCHEDULER: SCHEDULER, names.PROMPT_TOKENS: num_tokens}]


async def test_a_long_prompt_is_told_of_while_it_is_with_the_thread(encoder: PromptEncoder) -> None:
    mesh = _Mesh(encoder)
    async with mesh.started():
        await mesh.gateway.ask(traced(TextPrompt("wait " * 30)))
        await asyncio.to_thread(mesh.encoder.is_waiting.wait, TIMEOUT_S)
        assert (mesh.told(), mesh.going_on(), mesh.going_on("b")) == ([], 1, 0)
        mesh.encoder.open.set()
        await mesh.scheduler.receive()
        await asyncio.sleep(0)
    assert (len(mesh.told()), mesh.going_on()) == (1, 0)


async def test_a_refusal_is_an_error(encoder: PromptEncoder) -> None:
    mesh = _Mesh(encoder)
    async with mesh.started():
        await mesh.gateway.ask(traced(TextPrompt("cat"), max_tokens=600))
        await mesh.gateway.receive()
        await asyncio.sleep(0)
    assert [told[names.ERROR_TYPE] for told in mesh.told()] == ["context_length_exceeded"]


async def test_tokens_that_the_broker_does_not_carry_are_an_error(encoder: PromptEncoder) -> None:
    mesh = _Mesh(encoder)
    async with mesh.started():
        await mesh.gateway.ask(traced(TokenPrompt(int32s([1] * 200))))
        mesh.broker.max_payload = 500
        await mesh.gateway.receive()
        await asyncio.sleep(0)
    assert [told[names.ERROR_TYPE] for told in mesh.told()] == ["request_too_large"]


async def test_a_request_without_a_context_is_not_told_of(encoder: PromptEncoder) -> None:
    mesh = _Mesh(encoder)
    async with mesh.started():
        await mesh.gateway.ask(submit(TextPrompt("cat")))
        await mesh.scheduler.receive()
        await asyncio.sleep(0)
    assert mesh.told() == []
