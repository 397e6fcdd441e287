"""An instance's answer to who asks for the spans of a request: what is kept of it, and what goes on at this moment.

Heard beside the mailbox: it concerns no request's fate, and is answered while the actor has its hands full.
"""

import logging
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from shared import subjects
from shared.actor import Identity
from shared.codec import Decoder, encode
from shared.errors import Disconnected, MessageError
from shared.messages import SpansFound, SpansWanted
from shared.telemetry.store import Kept
from shared.telemetry.tracing import Tracing
from shared.transport import Transport

log = logging.getLogger(__name__)

_MAX_STEPS: Final = 8192
"""The latest so many; a longer output than that is told of in part."""


class Answering:
    """Answers for one instance."""

    def __init__(self, identity: Identity, transport: Transport, tracing: Tracing) -> None:
        self._identity = identity
        self._transport = transport
        self._tracing = tracing
        self._decoder: Decoder[SpansWanted] = Decoder(SpansWanted)

    async def start(self) -> None:
        """Hear questions from now on."""
        await self._transport.subscribe(subjects.TRACES, self._on_question)

    def answer(self, question: SpansWanted) -> SpansFound:
        """All that is known here."""
        request_id = question.request_id
        kept = self._tracing.store.find(request_id) or Kept()
        going_on = [span for spans_of in self._tracing.open_spans for span in spans_of(request_id)]
        steps = list(self._tracing.steps_of(request_id))
        return SpansFound(
            question.query_id,
            self._identity.instance_id,
            self._identity.name,
            kept.owner,
            (*kept.spans, *going_on),
            tuple(steps[-_MAX_STEPS:]),
            kept.num_left_out + max(0, len(steps) - _MAX_STEPS),
        )

    async def _on_question(self, payload: bytes, _headers: Mapping[str, str]) -> None:
        try:
            question = self._decoder.decode(payload)
        except MessageError as error:
            log.warning("dropped a question for spans", extra={"error": str(error)})
            return
        answer = self._fitting(self.answer(question))
        try:
            await self._transport.publish(subjects.trace_answers(question.asker_id), answer)
        except (Disconnected, MessageError) as error:
            log.warning("spans not told", extra={"error": str(error)})

    def _fitting(self, answer: SpansFound) -> bytes:
        """The bytes of an answer; if there are too many for the broker, without the steps, then without spans."""
        payload = encode(answer)
        for without in ("steps", "spans"):
            if len(payload) > self._transport.max_payload:
                num_left_out = answer.num_left_out + len(getattr(answer, without))
                answer = replace(answer, num_left_out=num_left_out, **{without: ()})
                payload = encode(answer)
        return payload
