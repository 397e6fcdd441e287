"""Questions to tokenizers that wait for answers. Asking is idempotent, so a question that gets none is repeated."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, TypeVar

from services.gateway.config import GatewayConfig
from services.gateway.failures import RequestFailed
from services.gateway.submissions import Outgoing
from shared.errors import RequestError, Unavailable
from shared.messages import CallFailed, ErrorInfo, PromptTokenized, TokensDetokenized

Answer = PromptTokenized | TokensDetokenized
A = TypeVar("A", PromptTokenized, TokensDetokenized)


@dataclass(slots=True)
class _Call:
    answer: asyncio.Future[Any]
    kind: type[Answer]
    question: Outgoing
    asked_at: float
    sent_at: float


def new_call_id() -> str:
    """A fresh name for one question."""
    return f"call-{secrets.token_hex(8)}"


class Calls:
    """The questions of this gateway that have no answer yet."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._calls: dict[str, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call_id: str, kind: type[A], question: Outgoing, now: float) -> asyncio.Future[A]:
        """Follow a question that is being sent. The future gives an answer of type `kind`, or raises RequestFailed."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = _Call(answer, kind, question, now, now)
        answer.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return answer

    def answered(self, answer: Answer) -> None:
        """A tokenizer has answered. A second answer, or one to another question, is ignored."""
        call = self._calls.get(answer.call_id)
        if call is not None and isinstance(answer, call.kind) and not call.answer.done():
            call.answer.set_result(answer)

    def failed(self, message: CallFailed) -> None:
        """A tokenizer has no answer, and says why."""
        self._fail(message.call_id, message.error)

    def fail_all(self, error: RequestError) -> None:
        """Nothing will be answered any more."""
        for call_id in list(self._calls):
            self._fail(call_id, ErrorInfo.of(error))

    def tick(self, now: float) -> list[Outgoing]:
        """Time has passed: the questions to repeat. Fails what has waited too long."""
        repeated = []
        for call_id, call in list(self._calls.items()):
            if now - call.asked_at >= self._config.call_timeout_s:
                self._fail(call_id, ErrorInfo.of(Unavailable("No tokenizer answered in time.", retry_after_s=1.0)))
            elif now - call.sent_at >= self._config.resubmit_after_s:
                call.sent_at = now
                repeated.append(call.question)
        return repeated

    def _fail(self, call_id: str, error: ErrorInfo) -> None:
        call = self._calls.pop(call_id, None)
        if call is not None and not call.answer.done():
            call.answer.set_exception(RequestFailed(error))
