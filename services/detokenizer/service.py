"""The detokenizer as an actor: a scheduler's tokens in, gateways' texts out.

A shell around `OpenRequests`: what arrived together leaves together, as one message for each gateway.
"""

import logging
from collections.abc import Sequence
from typing import TypeAlias, assert_never

from services.detokenizer.incremental import Decoding
from services.detokenizer.metrics import detokenizer_instruments
from services.detokenizer.open_requests import OpenRequests
from services.detokenizer.outbox import Outbox
from services.detokenizer.spans import DetokenizerSpans
from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import Clock
from shared.ids import InstanceId
from shared.messages import DecodeTokens, DetokenizerInbound, DetokenizerStatus, Presence
from shared.presence import Directory
from shared.telemetry.metrics import Instrument
from shared.telemetry.tracing import Tracing
from shared.transport import Transport

log = logging.getLogger(__name__)

Inbound: TypeAlias = DecodeTokens | Presence

_MAX_WAITING_EVENTS = 512
"""So many are sent even if more messages wait to be handled."""


class DetokenizerService(Actor[Inbound]):
    """Decodes the output of one model."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        clock: Clock,
        *,
        model: str,
        decoding: Decoding,
        max_open_choices: int,
        max_silence_s: float,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(identity, transport, DetokenizerInbound, clock)
        self._model = model
        self._max_open_choices = max_open_choices
        self._outbox = Outbox(identity.instance_id)
        self._spans = DetokenizerSpans(tracing or Tracing())
        self._requests = OpenRequests(
            decoding,
            self._outbox,
            model=model,
            max_open_choices=max_open_choices,
            max_silence_s=max_silence_s,
            spans=self._spans,
        )
        self._directory = Directory(clock)

    async def on_start(self) -> None:
        """Hear who lives."""
        await self.listen(subjects.PRESENCE)

    async def handle(self, message: Inbound | Tick) -> None:
        """React to one message."""
        match message:
            case DecodeTokens():
                await self._on_tokens(message)
            case Presence():
                self._directory.observe(message)
            case Tick():
                self._on_tick()
            case _:
                assert_never(message)

    async def on_idle(self) -> None:
        """Send what all the messages that arrived together led to."""
        await self._send_waiting()

    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not len(self._requests)

    async def on_stop(self) -> None:
        """Send what a drain left waiting."""
        await self._send_waiting()
        self._spans.leave()

    def status(self) -> DetokenizerStatus:
        """Open choices and tokens so far."""
        return DetokenizerStatus(self._requests.num_open_choices, self._requests.num_tokens, len(self._requests))

    def instruments(self) -> Sequence[Instrument]:
        """Requests, tokens, and what was missing."""
        return detokenizer_instruments(self._requests, self._max_open_choices)

    def models(self) -> tuple[str, ...]:
        """The one model whose vocabulary was loaded."""
        return (self._model,)

    async def _on_tokens(self, message: DecodeTokens) -> None:
        num_unknown = self._requests.num_unknown
        self._requests.take(message, self.clock.now())
        self.num_dropped_messages += self._requests.num_unknown - num_unknown
        if len(self._outbox) >= _MAX_WAITING_EVENTS:
            await self._send_waiting()

    def _on_tick(self) -> None:
        now = self.clock.now()
        self._requests.tick(now)
        if not self.transport.is_connected:
            return  # nobody can be heard, which says nothing about them
        self._directory.expire()
        if num_forgotten := self._requests.drop_stale(self._is_alive, now):
            log.debug(
                "forgot requests that are quiet or whose scheduler is gone", extra={"num_requests": num_forgotten}
            )

    def _is_alive(self, instance_id: InstanceId) -> bool:
        return self._directory.get(instance_id) is not None

    async def _send_waiting(self) -> None:
        for instance_id, message in self._outbox.take(max_message_bytes=self.transport.max_payload):
            await self.send_to(instance_id, message)
