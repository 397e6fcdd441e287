"""The detokenizer's open requests on a workbench: what they are told, and what they send."""

from collections.abc import Sequence

from services.detokenizer.open_requests import OpenRequests
from services.detokenizer.outbox import Outbox
from shared.ids import InstanceId, RequestId
from shared.messages import (
    ChoiceText,
    ChoiceTokens,
    DecodeTokens,
    ErrorInfo,
    FinishReason,
    Message,
    Outcome,
    RequestClosed,
    RequestOpened,
    TextOptions,
    TextProduced,
    Timing,
    Usage,
    int32s,
)
from tests.detokenizer.vocabularies import Case

ME, SCHEDULER, GATEWAY = InstanceId("detokenizer-1"), InstanceId("scheduler-1"), InstanceId("gateway-1")
OTHER_SCHEDULER, OTHER_GATEWAY = InstanceId("scheduler-2"), InstanceId("gateway-2")
A, B = RequestId("req-a"), RequestId("req-b")
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
PLAIN = TextOptions()


class Bench:
    """Open requests, and what they have sent."""

    def __init__(self, case: Case, max_open_choices: int = 10) -> None:
        self.case = case
        self.outbox = Outbox(ME)
        self.requests = OpenRequests(
            case.decoding, self.outbox, model="m", max_open_choices=max_open_choices, max_silence_s=60
        )
        self.sent: list[tuple[InstanceId, Message]] = []

    def take(
        self,
        opened: Sequence[RequestOpened] = (),
        tokens: Sequence[ChoiceTokens] = (),
        closed: Sequence[RequestClosed] = (),
        scheduler_id: InstanceId = SCHEDULER,
        now: float = 0.0,
    ) -> list[tuple[InstanceId, Message]]:
        """Handle one message; what follows from it."""
        self.requests.take(DecodeTokens(scheduler_id, tuple(opened), tuple(tokens), tuple(closed)), now)
        sent = self.outbox.take(max_message_bytes=1 << 20)
        self.sent += sent
        return sent

    def closed(self) -> list[RequestClosed]:
        """All ends so far."""
        return [end for _, message in self.sent if isinstance(message, TextProduced) for end in message.closed]

    def texts(self) -> list[ChoiceText]:
        """All text so far."""
        return [text for _, message in self.sent if isinstance(message, TextProduced) for text in message.texts]

    def entry(
        self, request_id: RequestId, offset: int, tokens: str, reason: FinishReason | None = None, index: int = 0
    ) -> ChoiceTokens:
        """Entries of a log; `tokens` are words of the vocabulary."""
        token_ids = int32s(self.case.id_of(token) for token in tokens.split())
        return ChoiceTokens(request_id, index, offset, token_ids, reason)


def opened(request_id: RequestId, *, num_choices: int = 1, text: TextOptions = PLAIN) -> RequestOpened:
    return RequestOpened(request_id, SCHEDULER, GATEWAY, "m", text, num_choices)


def closed(
    request_id: RequestId, *counts: int, outcome: Outcome = Outcome.COMPLETED, error: ErrorInfo | None = None
) -> RequestClosed:
    return RequestClosed(request_id, outcome, Usage(5, 2, counts), Timing(1.0, 2.0, 3.0), error)
