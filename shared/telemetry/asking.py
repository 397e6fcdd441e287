"""Asking all instances of a mesh for the spans of one request, and waiting a moment for what they have.

Whoever is dead, or does not answer in time, is missed: that its spans are not there is part of the answer.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shared import subjects
from shared.codec import Decoder, encode
from shared.errors import MessageError, Overloaded
from shared.ids import InstanceId, RequestId
from shared.messages import SpansFound, SpansWanted
from shared.transport import Transport

log = logging.getLogger(__name__)

PATIENCE_S: Final = 1.0
_MAX_QUESTIONS: Final = 16
"""At once: each of them makes every instance look and answer."""


@dataclass(slots=True)
class _Question:
    missing: set[InstanceId]
    found: dict[InstanceId, SpansFound] = field(default_factory=dict)
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, answer: SpansFound) -> None:
        self.found[answer.instance_id] = answer
        self.missing.discard(answer.instance_id)
        if not self.missing:
            self.is_complete.set()


@dataclass(frozen=True, slots=True)
class Answers:
    """What came."""

    found: tuple[SpansFound, ...]
    silent: tuple[InstanceId, ...]
    """Those that were thought alive and did not answer."""


class Asking:
    """Asks for one instance, or for somebody at a terminal."""

    def __init__(self, asker_id: InstanceId, transport: Transport) -> None:
        self._asker_id = asker_id
        self._transport = transport
        self._decoder: Decoder[SpansFound] = Decoder(SpansFound)
        self._questions: dict[str, _Question] = {}

    async def start(self) -> None:
        """Hear answers from now on."""
        await self._transport.subscribe(subjects.trace_answers(self._asker_id), self._on_answer)

    async def ask(
        self, request_id: RequestId, alive: Iterable[InstanceId], *, patience_s: float = PATIENCE_S
    ) -> Answers:
        """What all instances know of a client request. Returns when all that are `alive` have answered, or the time is
        over.

        Raises Overloaded if too many ask at once, and Disconnected without the broker.
        """
        if len(self._questions) >= _MAX_QUESTIONS:
            raise Overloaded("Too many requests are looked up at once.", retry_after_s=1.0)
        query_id = f"trace-{secrets.token_hex(8)}"
        question = self._questions[query_id] = _Question(set(alive))
        try:
            await self._transport.publish(subjects.TRACES, encode(SpansWanted(query_id, self._asker_id, request_id)))
            if question.missing:
                async with asyncio.timeout(patience_s):
                    await question.is_complete.wait()
        except TimeoutError:
            pass
        finally:
            del self._questions[query_id]
        return Answers(tuple(question.found.values()), tuple(sorted(question.missing)))

    async def _on_answer(self, payload: bytes, _headers: Mapping[str, str]) -> None:
        try:
            answer = self._decoder.decode(payload)
        except MessageError as error:
            log.warning("dropped an answer about spans", extra={"error": str(error)})
            return
        if (question := self._questions.get(answer.query_id)) is not None:
            question.take(answer)
