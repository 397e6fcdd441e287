"""The tokenizer as its peers see it: every question gets one answer, at the right place, and none holds up another."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.tokenizer.encoding import PromptEncoder
from services.tokenizer.service import TokenizerService
from shared import subjects
from shared.actor import Identity
from shared.clock import FakeClock
from shared.codec import encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    CallFailed,
    ChatMessage,
    ChatPrompt,
    DetokenizeTokens,
    GatewayInbound,
    Int32Array,
    Message,
    Prompt,
    PromptTokenized,
    RequestRefused,
    SchedulerInbound,
    SubmitRequest,
    SubmitTokens,
    TextPrompt,
    TokenizePrompt,
    TokenizerStatus,
    TokenPrompt,
    TokensDetokenized,
    int32s,
)
from shared.sampling import SamplingParams
from shared.telemetry.tracing import Tracing
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests import peers
from tests.tokenizer.conftest import Model

GATEWAY, SCHEDULER = InstanceId("gateway-1"), InstanceId("scheduler-1")
TIMEOUT_S = 30


class Peer(peers.Peer):
    """Somebody who talks to the service."""

    async def ask(self, message: Message) -> None:
        """Send to any tokenizer of the model."""
        await self.transport.publish(subjects.tokenize("m"), encode(message))

    def has_received(self) -> bool:
        """Whether a message waits."""
        return not self._received.empty()


class Gate(PromptEncoder):
    """An encoder whose work on prompts that start with `wait` stops until it is let through."""

    def __init__(self, inner: PromptEncoder) -> None:
        self.__dict__ |= vars(inner)
        self.is_waiting = threading.Event()
        self.open = threading.Event()
        self.threads: list[str] = []
        self.bug: Exception | None = None

    def encode(self, prompt: Prompt) -> Int32Array:
        """Encode, perhaps later."""
        self.threads.append(threading.current_thread().name)
        if isinstance(prompt, TextPrompt) and prompt.text.startswith("wait"):
            self.is_waiting.set()
            assert self.open.wait(TIMEOUT_S)
        if self.bug is not None:
            raise self.bug
        return super().encode(prompt)


class Mesh:
    """A tokenizer between a gateway and a scheduler."""

    tracing = Tracing()

    def __init__(self, encoder: PromptEncoder, *, max_payload: int = 1 << 20, max_waiting_prompts: int = 2) -> None:
        self.broker = MemoryBroker(max_payload=max_payload)
        self.encoder = Gate(encoder)
        self.transport = MemoryTransport(self.broker)
        self.service = self.new_service("tokenizer-1", self.transport, max_waiting_prompts)
        self.gateway = Peer(self.broker, GATEWAY, GatewayInbound)
        self.scheduler = Peer(self.broker, SCHEDULER, SchedulerInbound)

    def new_service(self, instance_id: str, transport: MemoryTransport, max_waiting_prompts: int) -> TokenizerService:
        """One tokenizer."""
        return TokenizerService(
            Identity(Service.TOKENIZER, InstanceId(instance_id), instance_id),
            transport,
            FakeClock(),
            model="m",
            encoder=self.encoder,
            inline_chars=100,
            max_waiting_prompts=max_waiting_prompts,
            tracing=self.tracing,
        )

    @asynccontextmanager
    async def started(self) -> AsyncIterator[asyncio.Task[None]]:
        """Everybody is there and the tokenizer handles messages."""
        for peer in (self.gateway, self.scheduler):
            await peer.connect()
        await self.transport.connect()
        async with self.service:
            running = asyncio.create_task(self.service.run())
            try:
                yield running
            finally:
                self.encoder.open.set()
                self.service.drain(0)
                await asyncio.wait({running}, timeout=TIMEOUT_S)


def submit(prompt: Prompt, name: str = "a", model: str = "m", max_tokens: int | None = None) -> SubmitRequest:
    """A request."""
    sampling = SamplingParams(seed=1)
    return SubmitRequest(RequestId(name), GATEWAY, SCHEDULER, model, "tenant", prompt, sampling, max_tokens=max_tokens)


@pytest.fixture
def mesh(encoder: PromptEncoder) -> Mesh:
    return Mesh(encoder)


async def test_a_request_goes_to_its_scheduler_as_tokens(mesh: Mesh, chatml: Model) -> None:
    async with mesh.started():
        await mesh.gateway.ask(submit(ChatPrompt((ChatMessage("user", "hi"),))))
        submitted = await mesh.scheduler.receive()
        assert isinstance(submitted, SubmitTokens)
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert list(submitted.prompt_token_ids) == chatml.encode(text)
        assert submitted.max_tokens is None
        assert not mesh.gateway.has_received()
        assert mesh.service.status() == TokenizerStatus(512, 1, len(submitted.prompt_token_ids))


async def test_tokenize_gives_exactly_what_the_scheduler_gets(mesh: Mesh) -> None:
    async with mesh.started():
        for prompt in (
            ChatPrompt((ChatMessage("user", "a <|im_end|> b"),), {"add_generation_prompt": False}),
            TextPrompt("cat <|im_end|>"),
            TextPrompt("cat <|im_end|>", parse_special_tokens=False),
            TokenPrompt(int32s([3, 1, 2])),
        ):
            await mesh.gateway.ask(TokenizePrompt("call", GATEWAY, "m", prompt))
            tokenized = await mesh.gateway.receive()
            await mesh.gateway.ask(submit(prompt))
            submitted = await mesh.scheduler.receive()
            assert isinstance(submitted, SubmitTokens)
            assert tokenized == PromptTokenized("call", submitted.prompt_token_ids, 512)


async def test_tokens_are_spelt(mesh: Mesh, chatml: Model) -> None:
    async with mesh.started():
        token_ids = int32s(chatml.encode("cat<|im_end|>"))
        await mesh.gateway.ask(DetokenizeTokens("call", GATEWAY, "m", token_ids))
        assert await mesh.gateway.receive() == TokensDetokenized("call", "cat<|im_end|>")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "param"),
    [
        (TextPrompt(""), None, "invalid_value", "prompt"),
        (TokenPrompt(int32s([1] * 600)), None, "context_length_exceeded", "prompt"),
        (TextPrompt("cat"), 600, "context_length_exceeded", "max_tokens"),
        (ChatPrompt((), {"messages": 1}), None, "invalid_value", "chat_template_kwargs"),
    ],
)
async def test_a_fault_of_the_request_goes_back_to_its_gateway(
    mesh: Mesh, prompt: Prompt, max_tokens: int | None, code: str, param: str
) -> None:
    async with mesh.started():
        await mesh.gateway.ask(submit(prompt, max_tokens=max_tokens))
        refused = await mesh.gateway.receive()
        assert isinstance(refused, RequestRefused)
        assert (refused.request_id, refused.error.status, refused.error.code) == ("a", 400, code)
        assert refused.error.param == param
        assert not mesh.scheduler.has_received()


async def test_a_question_that_has_no_answer_is_answered_so(mesh: Mesh) -> None:
    async with mesh.started():
        await mesh.gateway.ask(TokenizePrompt("t", GATEWAY, "m", TextPrompt("")))
        await mesh.gateway.ask(DetokenizeTokens("d", GATEWAY, "m", int32s([-5])))
        tokenized, detokenized = await mesh.gateway.receive(), await mesh.gateway.receive()
        assert isinstance(tokenized, CallFailed)
        assert (tokenized.call_id, tokenized.error.status, tokenized.error.param) == ("t", 400, "prompt")
        assert isinstance(detokenized, CallFailed)
        assert (detokenized.call_id, detokenized.error.status, detokenized.error.param) == ("d", 400, "tokens")


async def test_another_models_request_is_refused(mesh: Mesh) -> None:
    async with mesh.started():
        await mesh.gateway.ask(submit(TextPrompt("cat"), model="other"))
        refused = await mesh.gateway.receive()
        assert isinstance(refused, RequestRefused)
        assert (refused.error.status, refused.error.code) == (404, "model_not_found")


async def test_a_long_prompt_does_not_hold_up_a_short_one(mesh: Mesh) -> None:
    async with mesh.started():
        await mesh.gateway.ask(submit(TextPrompt("wait" + " cat" * 100), "long"))
        await mesh.gateway.ask(submit(TextPrompt("cat"), "short"))
        first = await mesh.scheduler.receive()
        mesh.encoder.open.set()
        second = await mesh.scheduler.receive()
        assert isinstance(first, SubmitTokens)
        assert isinstance(second, SubmitTokens)
        assert (first.request_id, second.request_id) == ("short", "long")
        assert list(second.prompt_token_ids) == list(
            PromptEncoder.encode(mesh.encoder, TextPrompt("wait" + " cat" * 100))
        )
        assert sorted(name.startswith("encode") for name in mesh.encoder.threads) == [False, True]


async def test_long_prompts_beyond_the_limit_are_refused_and_the_others_are_not(mesh: Mesh) -> None:
    async with mesh.started():
        for name in ("a", "b", "c"):
            await mesh.gateway.ask(submit(TextPrompt("wait" + " cat" * 100), name))
        refused = await mesh.gateway.receive()
        assert isinstance(refused, RequestRefused)
        assert (refused.request_id, refused.error.status, refused.error.retry_after_s) == ("c", 429, 1.0)
        mesh.encoder.open.set()
        names = [message.request_id for message in (await mesh.scheduler.receive(), await mesh.scheduler.receive())
                 if isinstance(message, SubmitTokens)]  # fmt: skip
        assert names == ["a", "b"]
        await mesh.gateway.ask(submit(TextPrompt(" cat" * 100), "d"))
        assert isinstance(await mesh.scheduler.receive(), SubmitTokens)


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt((ChatMessage("user", "hi"),), {"tools": ["x" * 200]}),
        ChatPrompt((ChatMessage("user", "x" * 101),)),
        ChatPrompt((ChatMessage("user", ""),) * 20),
    ],
)
async def test_all_that_makes_a_conversation_long_sends_it_to_the_thread(mesh: Mesh, prompt: ChatPrompt) -> None:
    async with mesh.started():
        await mesh.gateway.ask(submit(prompt))
        await mesh.scheduler.receive()
        assert mesh.encoder.threads[0].startswith("encode")


async def test_a_refusal_from_the_thread_reaches_the_gateway(mesh: Mesh) -> None:
    async with mesh.started():
        await mesh.gateway.ask(submit(TextPrompt("cat " * 1000)))
        refused = await mesh.gateway.receive()
        assert isinstance(refused, RequestRefused)
        assert refused.error.code == "context_length_exceeded"


@pytest.mark.parametrize("text", ["cat", "cat" * 100])
async def test_a_bug_ends_the_process(mesh: Mesh, text: str) -> None:
    async with mesh.started() as running:
        mesh.encoder.bug = ZeroDivisionError("a bug")
        await mesh.gateway.ask(submit(TextPrompt(text)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(running, TIMEOUT_S)


async def test_arguments_nested_beyond_reason_are_refused(mesh: Mesh) -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    question = submit(ChatPrompt((ChatMessage("user", "hi"),), {"tools": nested}))
    async with mesh.started():
        mesh.service.post(question)
        refused = await mesh.gateway.receive()
        assert isinstance(refused, RequestRefused)
        assert (refused.error.status, refused.error.param) == (400, "chat_template_kwargs")
    while isinstance(nested, list):  # taken apart here, for to be freed at once it is too deep
        nested = nested.pop()


async def test_tokens_that_the_broker_does_not_carry_are_refused_as_too_large(encoder: PromptEncoder) -> None:
    mesh = Mesh(encoder, max_payload=1500)
    async with mesh.started():
        mesh.service.post(submit(TokenPrompt(int32s([5] * 500))))
        refused = await mesh.gateway.receive()
        assert isinstance(refused, RequestRefused)
        assert (refused.error.status, refused.error.code) == (413, "request_too_large")
        assert not mesh.scheduler.has_received()
        mesh.service.post(TokenizePrompt("call", GATEWAY, "m", TokenPrompt(int32s([5] * 500))))
        failed = await mesh.gateway.receive()
        assert isinstance(failed, CallFailed)
        assert failed.error.status == 413


async def test_draining_waits_for_the_thread(mesh: Mesh) -> None:
    async with mesh.started() as running:
        await mesh.gateway.ask(submit(TextPrompt("wait" + " cat" * 100)))
        assert await asyncio.to_thread(mesh.encoder.is_waiting.wait, TIMEOUT_S)
        mesh.service.drain(1000)
        await mesh.gateway.ask(submit(TextPrompt("cat"), "short"))
        await mesh.scheduler.receive()
        assert not running.done()
        mesh.encoder.open.set()
        await asyncio.wait_for(running, TIMEOUT_S)
        last = await mesh.scheduler.receive()
        assert isinstance(last, SubmitTokens)
        assert last.request_id == "a"


async def test_two_tokenizers_share_the_work(mesh: Mesh) -> None:
    async with mesh.started():
        transport = MemoryTransport(mesh.broker)
        await transport.connect()
        other = mesh.new_service("tokenizer-2", transport, 2)
        async with other:
            running = asyncio.create_task(other.run())
            for n in range(10):
                await mesh.gateway.ask(submit(TextPrompt("cat"), f"req-{n}"))
            received = [await mesh.scheduler.receive() for _ in range(10)]
            other.drain(0)
            await asyncio.wait_for(running, TIMEOUT_S)
        names = sorted(message.request_id for message in received if isinstance(message, SubmitTokens))
        assert names == [f"req-{n}" for n in range(10)]
        assert [mesh.service.status().num_requests, other.status().num_requests] == [5, 5]


async def test_one_requests_options_do_not_touch_the_next(mesh: Mesh, chatml: Model) -> None:
    async with mesh.started():
        end = chatml.id_of("<|im_end|>")
        counts = []
        for parse in (False, True, False):
            await mesh.gateway.ask(submit(TextPrompt("a<|im_end|>", parse_special_tokens=parse)))
            submitted = await mesh.scheduler.receive()
            assert isinstance(submitted, SubmitTokens)
            counts.append(list(submitted.prompt_token_ids).count(end))
        assert counts == [0, 1, 0]
