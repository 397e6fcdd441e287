"""A mesh of one model that does what a test tells it to: tokenizer, scheduler, executor and detokenizer in one.

It sees exactly what the gateway sends, and sends exactly what a real mesh could, or what a broken one would.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from shared import subjects
from shared.codec import Decoder, encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    AdoptRequest,
    CancelRequest,
    ChoiceText,
    DetokenizerStatus,
    DetokenizeTokens,
    ErrorInfo,
    ExecutorStatus,
    FindRequest,
    FinishReason,
    Message,
    Outcome,
    Presence,
    ReplayRequest,
    RequestAccepted,
    RequestAdopted,
    RequestClosed,
    RequestFound,
    RequestPast,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    SchedulerStatus,
    Status,
    SubmitRequest,
    SubmitTokens,
    TextAlternative,
    TextLogprobs,
    TextProduced,
    Timing,
    TokenizePrompt,
    TokenizerInbound,
    TokenizerStatus,
    Usage,
    int32s,
)
from shared.transport.memory import MemoryBroker, MemoryTransport

MODEL = "test/model-1"
PATIENCE_S = 30.0


def logprobs_of(token: str, logprob: float = -0.5, top: Sequence[tuple[str, float]] = ()) -> TextLogprobs:
    """Log-probabilities at one position."""
    return TextLogprobs(
        TextAlternative(token, logprob, token.encode()),
        tuple(TextAlternative(text, value, text.encode()) for text, value in top),
    )


class FakeRequest:
    """One request as the mesh has it, from submission to its end."""

    def __init__(self, mesh: "FakeMesh", message: SubmitRequest) -> None:
        self.message = message
        self.request_id = message.request_id
        self.detokenizer_id = mesh.detokenizer_id
        self.gateway_id = message.gateway_id
        """Who follows it."""
        self.pieces: list[ChoiceText] = []
        self.end: RequestClosed | None = None
        self._mesh = mesh
        self._num_tokens = [0] * message.num_choices
        self._num_chars = [0] * message.num_choices

    async def accept(self) -> None:
        """Take it."""
        await self._send(RequestAccepted(self.request_id, self.message.scheduler_id, 3, self.message.attempt))

    async def refuse(self, error: ErrorInfo) -> None:
        """Do not take it."""
        await self._send(RequestRefused(self.request_id, error, self.message.attempt))

    async def deny(self) -> None:
        """Its scheduler does not know it."""
        await self._send(RequestUnknown(self.request_id, self.message.scheduler_id, self.message.attempt))

    async def release(self, past: RequestPast | None = None) -> None:
        """Its scheduler cannot go on with it, and keeps it for another one."""
        message, past = self.message, past or RequestPast()
        await self._send(RequestReleased(self.request_id, message.scheduler_id, message.attempt, past))

    async def say(
        self,
        text: str,
        *,
        index: int = 0,
        num_tokens: int = 1,
        finish_reason: FinishReason | None = None,
        logprobs: Sequence[TextLogprobs] = (),
    ) -> None:
        """Produce text for one choice."""
        await self.send_piece(self.piece(text, index, num_tokens, finish_reason, logprobs))

    def piece(
        self,
        text: str,
        index: int = 0,
        num_tokens: int = 1,
        finish_reason: FinishReason | None = None,
        logprobs: Sequence[TextLogprobs] = (),
    ) -> ChoiceText:
        """The next text of one choice; its tokens are numbered through."""
        first = self._num_tokens[index]
        token_ids = int32s(range(first, first + num_tokens))
        piece = ChoiceText(
            self.request_id,
            index,
            first,
            token_ids,
            self._num_chars[index],
            text,
            finish_reason,
            tuple(logprobs),
            self.message.attempt,
        )
        self._num_tokens[index] += num_tokens
        self._num_chars[index] += len(text)
        self.pieces.append(piece)
        return piece

    async def send_piece(self, piece: ChoiceText) -> None:
        """Send text, whether it fits what went before or not."""
        await self._send(TextProduced(self.detokenizer_id, texts=(piece,)))

    async def finish(self, reason: FinishReason = FinishReason.STOP) -> None:
        """End every choice and complete the request."""
        texts = tuple(self.piece("", index, 0, reason) for index in range(self.message.num_choices))
        await self._send(TextProduced(self.detokenizer_id, texts=texts, closed=(self.closed(Outcome.COMPLETED),)))

    async def close(self, outcome: Outcome, error: ErrorInfo | None = None) -> None:
        """End the request without a word for its choices."""
        await self._send(TextProduced(self.detokenizer_id, closed=(self.closed(outcome, error),)))

    async def complete(self, *texts: str) -> None:
        """Live a whole life: accepted, the texts for choice 0, an end token."""
        await self.accept()
        for text in texts:
            await self.say(text)
        await self.finish()

    def closed(self, outcome: Outcome, error: ErrorInfo | None = None) -> RequestClosed:
        """The end."""
        usage = Usage(num_prompt_tokens=3, num_cached_tokens=2, num_output_tokens=tuple(self._num_tokens))
        timing = Timing(0.01, 0.02, 0.03)
        self.end = RequestClosed(self.request_id, outcome, usage, timing, error, self.message.attempt)
        return self.end

    async def tell(self, question: FindRequest) -> None:
        """Say that it is here."""
        found = RequestFound(question.query_id, self.request_id, self.message.scheduler_id, self.message.attempt)
        await self._mesh.send_to(question.gateway_id, found)

    async def hand_to(self, query: AdoptRequest) -> None:
        """Point it to the gateway that adopts it, and say all of it again."""
        assert query.attempt == self.message.attempt
        self.gateway_id = query.gateway_id
        self.message = replace(self.message, attempt=query.next_attempt)
        self.pieces = [replace(piece, attempt=query.next_attempt) for piece in self.pieces]
        if self.end is not None:
            self.end = replace(self.end, attempt=query.next_attempt)
        await self._send(self._adopted(query.query_id))
        await self.replay()

    async def replay(self) -> None:
        """Say everything again."""
        ends = () if self.end is None else (self.end,)
        await self._send(TextProduced(self.detokenizer_id, texts=tuple(self.pieces), closed=ends))

    def _adopted(self, query_id: str) -> RequestAdopted:
        message = self.message
        submission = SubmitTokens(
            request_id=message.request_id,
            gateway_id=self.gateway_id,
            model=message.model,
            tenant=message.tenant,
            prompt_token_ids=int32s(range(3)),
            sampling=message.sampling,
            text=message.text,
            num_choices=message.num_choices,
            max_tokens=message.max_tokens,
            attempt=message.attempt,
            owner=message.owner,
            client=message.client,
            trace=message.trace,
        )
        num_tokens = tuple(self._num_tokens)
        return RequestAdopted(query_id, message.scheduler_id, submission, num_tokens, self.end is not None)

    async def _send(self, message: Message) -> None:
        await self._mesh.send_to(self.gateway_id, message)


class FakeMesh:
    """All services but the gateway, as one participant of the broker."""

    def __init__(self, broker: MemoryBroker, *, model: str = MODEL) -> None:
        self.model = model
        self.scheduler_id = InstanceId("scheduler-aaaaaaaa")
        self.detokenizer_id = InstanceId("detokenizer-aaaaaaaa")
        self.silent: set[Service] = set()
        """Services that send no beats."""
        self.draining: set[Service] = set()
        self.num_running = 0
        self.submissions: asyncio.Queue[FakeRequest] = asyncio.Queue()
        self.cancellations: asyncio.Queue[CancelRequest] = asyncio.Queue()
        self.replays: asyncio.Queue[ReplayRequest] = asyncio.Queue()
        """What schedulers are asked to say again."""
        self.searches: asyncio.Queue[FindRequest] = asyncio.Queue()
        """Questions to all schedulers."""
        self.adoptions: asyncio.Queue[AdoptRequest] = asyncio.Queue()
        self.kept: dict[RequestId, FakeRequest] = {}
        """Requests that can be found again."""
        self.questions: asyncio.Queue[TokenizePrompt | DetokenizeTokens] = asyncio.Queue()
        self._transport = MemoryTransport(broker)
        self._tokenizer: Decoder[TokenizerInbound] = Decoder(TokenizerInbound)
        self._scheduler: Decoder[CancelRequest | ReplayRequest | AdoptRequest] = Decoder(
            CancelRequest | ReplayRequest | AdoptRequest
        )
        self._search: Decoder[FindRequest] = Decoder(FindRequest)
        self._other_schedulers: dict[InstanceId, bool] = {}
        """Whether each holds executors."""

    async def start(self) -> None:
        """Listen, and announce every service."""
        await self._transport.connect()
        await self._transport.subscribe(subjects.tokenize(self.model), self._on_tokenizer_message, queue="tokenizers")
        await self._transport.subscribe(subjects.inbox(self.scheduler_id), self._on_scheduler_message)
        await self._transport.subscribe(subjects.ADOPTIONS, self._on_search)
        await self.beat()

    async def add_scheduler(self, instance_id: InstanceId, *, has_executors: bool = True) -> None:
        """Have one more scheduler, which beats even if `silent` has the others."""
        self._other_schedulers[instance_id] = has_executors
        await self._transport.subscribe(subjects.inbox(instance_id), self._on_scheduler_message)
        await self.beat()

    async def give_executors(self, instance_id: InstanceId) -> None:
        """Have a scheduler that was added hold executors from now on."""
        self._other_schedulers[instance_id] = True
        await self.beat()

    async def stop(self) -> None:
        """Say nothing more."""
        await self._transport.close()

    async def take_submissions(self, instance_id: InstanceId, take: Callable[[SubmitTokens], None]) -> None:
        """Have one more scheduler, whose submissions by gateways are given to `take`."""
        decoder = Decoder[SubmitTokens](SubmitTokens)

        async def on_message(payload: bytes, _headers: Mapping[str, str]) -> None:
            take(decoder.decode(payload))

        self._other_schedulers[instance_id] = True
        await self._transport.subscribe(subjects.inbox(instance_id), on_message)
        await self.announce(Service.SCHEDULER, instance_id)

    async def next_request(self) -> FakeRequest:
        """The next submission, which may be a repetition."""
        return await asyncio.wait_for(self.submissions.get(), PATIENCE_S)

    def keep(self, request: FakeRequest) -> None:
        """Give the request to whichever gateway looks for it, on behalf of its owner."""
        self.kept[request.request_id] = request

    async def next_cancellation(self) -> RequestId:
        """The request that is cancelled next."""
        return (await asyncio.wait_for(self.cancellations.get(), PATIENCE_S)).request_id

    async def next_replay(self) -> ReplayRequest:
        """What a scheduler is asked to say again next."""
        return await asyncio.wait_for(self.replays.get(), PATIENCE_S)

    async def next_search(self) -> FindRequest:
        """Which request is looked for next."""
        return await asyncio.wait_for(self.searches.get(), PATIENCE_S)

    async def next_adoption(self) -> AdoptRequest:
        """Which request is adopted next."""
        return await asyncio.wait_for(self.adoptions.get(), PATIENCE_S)

    async def next_question(self) -> TokenizePrompt | DetokenizeTokens:
        """What the tokenizer is asked next."""
        return await asyncio.wait_for(self.questions.get(), PATIENCE_S)

    async def beat(self) -> None:
        """Every service that is not silent says that it lives."""
        for service in (Service.TOKENIZER, Service.SCHEDULER, Service.EXECUTOR, Service.DETOKENIZER):
            if service not in self.silent:
                await self.announce(service, self._instance_id(service), is_draining=service in self.draining)
        for instance_id, has_executors in self._other_schedulers.items():
            await self.announce(Service.SCHEDULER, instance_id, model=None if has_executors else "")

    async def announce(
        self,
        service: Service,
        instance_id: InstanceId,
        *,
        model: str | None = None,
        status: Status | None = None,
        is_draining: bool = False,
        is_leaving: bool = False,
    ) -> None:
        """One beat of one instance. `model` "" is for none."""
        models = () if model == "" else (model or self.model,)
        beat = Presence(
            service,
            instance_id,
            instance_id,
            models,
            status or self._status(service),
            is_draining=is_draining,
            is_leaving=is_leaving,
        )
        await self._transport.publish(subjects.presence(service), encode(beat))

    async def send_to(self, instance_id: InstanceId, message: Message) -> None:
        """Put a message into an instance's inbox."""
        await self._transport.publish(subjects.inbox(instance_id), encode(message))

    def _instance_id(self, service: Service) -> InstanceId:
        ids = {Service.SCHEDULER: self.scheduler_id, Service.DETOKENIZER: self.detokenizer_id}
        return ids.get(service, InstanceId(f"{service}-aaaaaaaa"))

    def _status(self, service: Service) -> Status:
        match service:
            case Service.TOKENIZER:
                return TokenizerStatus(max_model_len=2048)
            case Service.SCHEDULER:
                return SchedulerStatus(num_running=self.num_running)
            case Service.EXECUTOR:
                return ExecutorStatus()
            case _:
                return DetokenizerStatus()

    async def _on_tokenizer_message(self, payload: bytes, _headers: Mapping[str, str]) -> None:
        message = self._tokenizer.decode(payload)
        if isinstance(message, SubmitRequest):
            self.submissions.put_nowait(FakeRequest(self, message))
        else:
            self.questions.put_nowait(message)

    async def _on_scheduler_message(self, payload: bytes, _headers: Mapping[str, str]) -> None:
        message = self._scheduler.decode(payload)
        if isinstance(message, CancelRequest):
            self.cancellations.put_nowait(message)
        elif isinstance(message, ReplayRequest):
            self.replays.put_nowait(message)
        else:
            self.adoptions.put_nowait(message)
            if (request := self._kept(message)) is not None:
                await request.hand_to(message)

    async def _on_search(self, payload: bytes, _headers: Mapping[str, str]) -> None:
        question = self._search.decode(payload)
        self.searches.put_nowait(question)
        if (request := self._kept(question)) is not None:
            await request.tell(question)

    def _kept(self, question: FindRequest | AdoptRequest) -> FakeRequest | None:
        request = self.kept.get(question.request_id)
        return request if request is not None and request.message.owner == question.owner else None
