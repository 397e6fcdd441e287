"""The mesh as the front doors see it: admit a request, follow it, cancel it, ask a tokenizer something.

Joins what knows of models (`admission`), of open requests (`requests`) and of questions (`calls`), and publishes what
they say. HTTP and WebSocket handlers call it from their own tasks, the actor feeds it with what arrives; all of that
happens on one event loop, and state changes only between awaits.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from services.gateway.accounts import account_of, operation_of, record, record_content, record_refusal
from services.gateway.admission import Admission
from services.gateway.adoptions import Adoptions, unknown_request
from services.gateway.calls import Calls, new_call_id
from services.gateway.config import GatewayConfig
from services.gateway.drafts import Draft
from services.gateway.handover import Handover
from services.gateway.keys import Caller
from services.gateway.metrics import GatewayMetrics
from services.gateway.open_request import OpenRequest
from services.gateway.priorities import Priorities
from services.gateway.requests import OpenRequests
from services.gateway.spans import GatewaySpans
from services.gateway.streams import End, Stream
from services.gateway.submissions import Outgoing
from services.gateway.usage import UsageRecords
from shared import subjects
from shared.clock import Clock
from shared.codec import encode
from shared.errors import Disconnected, InvalidRequest, MessageError, Overloaded, TooLarge, Unavailable
from shared.ids import InstanceId, RequestId, Service, new_request_id, sibling_ids
from shared.messages import (
    Message,
    Presence,
    PromptTokenized,
    RequestAdopted,
    RequestFound,
    RequestMoved,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    TextProduced,
    TokensDetokenized,
)
from shared.presence import Directory
from shared.telemetry.tracing import Tracing
from shared.transport import Transport
from shared.usage import UsageOutbox

log = logging.getLogger(__name__)

A = TypeVar("A", PromptTokenized, TokensDetokenized)

_RETRY_AFTER_S = 1.0
_NOBODY = InstanceId("")
"""The scheduler of a request for which there is none at the moment."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request that was found again."""

    stream: Stream
    client: bytes
    """What the gateway that admitted it gave."""
    num_tokens: tuple[int, ...]
    """For each choice, how many tokens there are for sure. They may still be on their way into `stream`."""


class Mesh:
    """This gateway's side of the mesh."""

    def __init__(
        self,
        gateway_id: InstanceId,
        transport: Transport,
        clock: Clock,
        config: GatewayConfig,
        *,
        logs_content: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        """`logs_content`: write what was asked and answered into the log."""
        self.transport = transport
        self.clock = clock
        self.directory = Directory(clock)
        self.admission = Admission(self.directory, clock)
        self.usage = UsageOutbox(transport)
        self.metrics = GatewayMetrics()
        self.spans = GatewaySpans(tracing or Tracing())
        handover = Handover(
            gateway_id,
            self.admission.choose_scheduler,
            lambda model: not self.admission.missing(model),
            lambda: self.transport.max_payload,
        )
        self.requests = OpenRequests(
            gateway_id,
            config,
            handover,
            on_end=self._ended,
            on_first_token=self._first_token,
            spans=self.spans,
        )
        self.adoptions = Adoptions(gateway_id, config)
        self.calls = Calls(config)
        self.is_draining = False
        self.num_requests = 0
        self.num_disconnects = 0
        """Requests whose client left before the end."""
        self.num_refused: Counter[str] = Counter()
        """Client requests that were never opened, by the error's code."""
        self.on_tick: set[Callable[[], None]] = set()
        """Called whenever time has passed."""
        self.gateway_id = gateway_id
        self._config = config
        self._priorities = Priorities(config.best_priorities)
        self._records = UsageRecords(gateway_id, self.usage.add)
        self._logs_content = logs_content
        self._scheduler_lost_at = clock.now()
        """When the last one was lost. Before this gateway began it heard of none, so one may have died just then."""

    # For the front doors.

    def check_open(self) -> None:
        """Raises Unavailable if nothing new is taken: this gateway drains, or has lost its broker."""
        if self.is_draining:
            raise Unavailable("This gateway is shutting down.", retry_after_s=_RETRY_AFTER_S)
        if not self.transport.is_connected:
            raise Unavailable("This gateway has lost its message broker.", retry_after_s=_RETRY_AFTER_S)

    def admit(
        self, draft: Draft, caller: Caller, *, request_id: RequestId | None = None, client: bytes = b""
    ) -> list[Stream]:
        """Open one request for each prompt of `draft`, all or none; `submit` sends them.

        `request_id` is that of the first, a fresh one by default; `client` is what any gateway needs to tell the answer
        again; without it the request cannot be resumed. Whoever calls this calls `cancel` with the result when it loses
        interest, whatever happened until then. Raises Unavailable, ModelNotFound, NotAllowed, Overloaded or TooLarge.
        """
        request_id = request_id or new_request_id()
        trace = self.spans.asked(request_id, draft, caller.tenant)
        self.check_open()
        self.admission.check_model(draft.model)
        priority = self._priorities.of(caller.tenant, draft.priority)
        num_free = self._config.max_open_requests - len(self.requests)
        if len(draft.prompts) > num_free:
            raise Overloaded("Too many requests are open at this gateway.", retry_after_s=_RETRY_AFTER_S)
        scheduler_id = self.admission.choose_scheduler(draft.model, len(draft.prompts))
        subject = subjects.tokenize(draft.model)
        request_ids = sibling_ids(request_id, len(draft.prompts))
        messages = [
            draft.submission(
                prompt,
                request_id,
                gateway_id=self.gateway_id,
                scheduler_id=scheduler_id or _NOBODY,
                tenant=caller.tenant,
                priority=priority,
                owner=caller.owner,
                client=client,
                trace=trace,
            )
            for prompt, request_id in zip(draft.prompts, request_ids, strict=True)
        ]
        submissions = [(subject, self._fitting(message)) for message in messages]
        now = self.clock.now()
        self.num_requests += len(messages)
        for message in messages:
            self.metrics.request_opened(operation_of(message))
        sent = submissions if scheduler_id is not None else [None] * len(messages)
        streams = [self.requests.open(*one, now) for one in zip(messages, sent, strict=True)]
        self.spans.admitted(streams, caller.owner)
        return streams

    def turned_away(self, operation: str, code: str, request_id: RequestId | None = None) -> None:
        """A client was refused a request, with an error's code, that was never opened."""
        self.metrics.request_refused(operation, code)
        trace = None if request_id is None else self.spans.context_of(request_id)
        record_refusal(operation, code, request_id or "", trace)

    async def submit(self, streams: Sequence[Stream]) -> None:
        """Send what was admitted. What gets lost is sent again later."""
        for stream in streams:
            await self.publish(self.requests.submission(stream.request_id))

    async def cancel(self, streams: Sequence[Stream]) -> None:
        """Stop those that have not ended."""
        self.spans.left(streams)
        for stream in streams:
            await self.publish(self.requests.cancel(stream, self.clock.now()))

    async def detach(self, streams: Sequence[Stream]) -> None:
        """Nobody reads these any more, but somebody may come back for them: those that are not resumed within the
        grace period are cancelled. Nothing happens to those that have ended, or in a gateway that leaves."""
        self.spans.left(streams)
        for stream in streams:
            await self.publish(self.requests.detach(stream, self.clock.now()))

    def attach(self, streams: Sequence[Stream]) -> None:
        """Somebody reads these (again)."""
        self.spans.attached(streams)
        for stream in streams:
            self.requests.attach(stream)

    async def resume(self, request_id: RequestId, owner: str) -> Resumed:
        """One resumable request of this owner, running or ended, wherever in the mesh it is.

        One that comes from elsewhere begins without a reader, as after `detach`. Raises NotFound for one that is
        unknown, of another owner, expired or not resumable, and Unavailable or Overloaded as `admit` does.
        """
        self.check_open()
        request = self.requests.find(request_id)
        is_here = request is not None
        if request is None:
            if len(self.requests) + len(self.adoptions) >= self._config.max_open_requests:
                raise Overloaded("Too many requests are open at this gateway.", retry_after_s=_RETRY_AFTER_S)
            answer, outgoing = self.adoptions.look_for(request_id, owner, self.clock.now())
            await self.publish(outgoing)
            request = await answer
        elif not request.is_resumable or request.spec.owner != owner:
            raise unknown_request()
        self.metrics.request_resumed(is_here=is_here)
        return Resumed(request.stream, request.spec.client, request.num_tokens())

    async def ask(self, model: str, kind: type[A], question: Callable[[str, InstanceId], Message]) -> A:
        """A tokenizer's answer, of type `kind`, to `question`, which is given a call id and who asks.

        Raises RequestFailed if there is none, and otherwise as `admit` does.
        """
        self.check_open()
        self.admission.check_model(model, (Service.TOKENIZER,))
        if len(self.calls) >= self._config.max_open_requests:
            raise Overloaded("Too many questions are open at this gateway.", retry_after_s=_RETRY_AFTER_S)
        call_id = new_call_id()
        outgoing = subjects.tokenize(model), self._fitting(question(call_id, self.gateway_id))
        answer = self.calls.add(call_id, kind, outgoing, self.clock.now())
        await self.publish([outgoing])
        return await answer

    # For the actor.

    async def heard(self, beat: Presence) -> None:
        """Another instance lives, or says that it leaves."""
        is_news = self.directory.observe(beat)
        if beat.is_leaving:
            await self._lose([beat])
            return
        self.admission.observe(beat)
        if is_news and beat.service is Service.DETOKENIZER:
            self.requests.detokenizer_found(beat.models)
        elif is_news and beat.service is Service.SCHEDULER:
            await self.publish(self.requests.scheduler_found(beat.instance_id, self.clock.now()))

    async def refused(self, message: RequestRefused) -> None:
        """A tokenizer or a scheduler did not take a request."""
        await self.publish(self.requests.refused(message, self.clock.now()))

    async def given_back(self, message: RequestUnknown | RequestReleased) -> None:
        """A scheduler does not have a request that it should have, or cannot go on with it."""
        if isinstance(message, RequestUnknown):
            await self.publish(self.requests.unknown(message, self.clock.now()))
        else:
            await self.publish(self.requests.released(message, self.clock.now()))

    async def moved(self, message: RequestMoved) -> None:
        """The client of a request is at another gateway."""
        await self.publish(self.requests.moved(message))

    async def found(self, message: RequestFound) -> None:
        """A scheduler has a request that a client has come back for."""
        await self.publish(self.adoptions.found(message, self.requests.find(message.request_id)))

    async def adopted(self, message: RequestAdopted) -> None:
        """A scheduler has pointed a request to this gateway."""
        is_new = self.requests.find(message.submission.request_id) is None
        request, outgoing = self.requests.adopted(message, self.clock.now())
        if is_new and request is not None and not request.had_ended:
            self.num_requests += 1  # it will be counted here when it ends
        if is_new and request is not None:
            self.spans.adopted(request)
        await self.publish(outgoing)
        if request is not None:
            await self.publish(self.adoptions.adopted(message.query_id, request))

    async def text_produced(self, message: TextProduced) -> None:
        """A detokenizer has text and ends for us."""
        if outgoing := self.requests.text_produced(message, self.clock.now()):
            await self.publish(outgoing)

    async def tick(self) -> None:
        """Time has passed."""
        now = self.clock.now()
        is_connected = self.transport.is_connected
        if is_connected:  # without the broker nobody can be heard, which says nothing about them
            await self._lose(self.directory.expire())
        await self.publish(self.requests.tick(now, is_connected=is_connected))
        await self.publish(self.calls.tick(now))
        has_heard_all = partial(self.directory.has_heard_all, Service.SCHEDULER)
        await self.publish(self.adoptions.tick(now, lost_at=self._scheduler_lost_at, has_heard_all=has_heard_all))
        self.admission.tick()
        for callback in list(self.on_tick):
            callback()

    async def end_all(self) -> None:
        """This gateway leaves: fail everything that is still open and cannot be resumed at another one."""
        error = Unavailable("This gateway is shutting down.", retry_after_s=_RETRY_AFTER_S)
        self.calls.fail_all(error)
        self.adoptions.fail_all()
        await self.publish(self.requests.end_all(error, self.clock.now()))

    def _first_token(self, request: OpenRequest) -> None:
        self.metrics.first_token(request, operation_of(request.spec), self.clock.now())

    def _ended(self, request: OpenRequest, end: End) -> None:
        """A request has ended for its client; what another gateway may have told before is not told again."""
        self._records.ended(request, end)
        if request.had_ended:
            return
        account = account_of(request, end, self.clock.now())
        self.metrics.request_ended(account)
        record(account)
        if self._logs_content:
            record_content(request)

    async def _lose(self, gone: Iterable[Presence]) -> None:
        now = self.clock.now()
        for beat in gone:
            if beat.service is Service.SCHEDULER:
                self._scheduler_lost_at = now
                await self.publish(self.requests.scheduler_lost(beat.instance_id, now))
            elif beat.service is Service.DETOKENIZER:
                without = [model for model in beat.models if not self.directory.alive(Service.DETOKENIZER, model)]
                self.requests.detokenizer_lost(beat.instance_id, without, now)

    def _fitting(self, message: Message) -> bytes:
        """The bytes of a message. Raises TooLarge if the broker does not carry so many, before it ever sees them."""
        try:
            payload = encode(message)
        except MessageError as error:
            raise InvalidRequest(f"The request cannot be sent: {error}.") from error
        if len(payload) > self.transport.max_payload:
            limit = self.transport.max_payload
            raise TooLarge(f"The request takes {len(payload)} bytes, and at most {limit} can be carried.")
        return payload

    async def publish(self, outgoing: Sequence[Outgoing]) -> None:
        """Send messages. What cannot be sent now is repeated, or fails its request, when time has passed."""
        for subject, payload in outgoing:
            try:
                await self.transport.publish(subject, payload)
            except (Disconnected, MessageError) as error:
                log.warning("message not sent", extra={"subject": subject, "error": str(error)})
