"""How a request ends: for its client, with exactly one terminal event whatever the mesh does, and in the mesh.

A request that ended here but perhaps not in the mesh (cancelled, stalled) stays in the table of open requests until the
mesh confirms, so that a lost cancellation is sent again.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from services.gateway.config import GatewayConfig
from services.gateway.handover import Handover
from services.gateway.open_request import OpenRequest
from services.gateway.spans import GatewaySpans
from services.gateway.streams import End
from services.gateway.submissions import Outgoing
from services.gateway.usage import delivered
from shared.errors import RequestError, Unavailable
from shared.ids import InstanceId, RequestId
from shared.messages import ErrorInfo, Outcome, RequestClosed

_REPEAT_CANCEL_AFTER_S: Final = 1.0
_RETRY_AFTER_S: Final = 1.0

OnEnd = Callable[[OpenRequest, End], None]


class Ends:
    """Ends the requests of a table, and takes out those that the mesh is through with."""

    def __init__(
        self,
        gateway_id: InstanceId,
        config: GatewayConfig,
        requests: dict[RequestId, OpenRequest],
        handover: Handover,
        *,
        spans: GatewaySpans,
        on_end: OnEnd,
    ) -> None:
        """`on_end` is told of each request that ends for its client, also of one whose end another gateway may have
        told."""
        self.num_ended: Counter[Outcome] = Counter()
        self._gateway_id = gateway_id
        self._config = config
        self._requests = requests
        self._handover = handover
        self._spans = spans
        self._on_end = on_end

    def cancel(self, request: OpenRequest, now: float) -> list[Outgoing]:
        """Have the mesh stop a request. It ends once that is confirmed; at once if nobody has it."""
        request.cancelled_at = now
        request.submission, request.detached_until = None, None
        if request.scheduler_id is None:
            self.settle(request, End(Outcome.CANCELLED))
            return []
        return [request.cancellation(self._gateway_id, now)]

    def press(self, request: OpenRequest, now: float) -> list[Outgoing]:
        """Cancel again while the mesh does not confirm; after a while believe it without."""
        assert request.cancelled_at is not None
        if now - request.cancelled_at >= self._config.cancel_timeout_s:
            self.believe(request)
            return []
        if now - request.cancel_sent_at < _REPEAT_CANCEL_AFTER_S:
            return []
        return [request.cancellation(self._gateway_id, now)]

    def believe(self, request: OpenRequest) -> None:
        """A cancellation that nobody can confirm is taken for done; its scheduler is told should it come back."""
        self._handover.leave_behind(request, goes_on=False)
        self.settle(request, End(Outcome.CANCELLED))

    def abandon(self, request: OpenRequest, error: RequestError, now: float) -> list[Outgoing]:
        """End a request for the client, and have the mesh stop it."""
        if request.cancelled_at is not None:
            self._close(request, End(Outcome.CANCELLED))
            return []
        self._close(request, End(Outcome.FAILED, error=ErrorInfo.of(error)))
        return self.cancel(request, now)

    def settle(self, request: OpenRequest, end: End) -> None:
        """The mesh is through with a request: so are we."""
        self._close(request, end)
        del self._requests[request.request_id]

    def _close(self, request: OpenRequest, end: End) -> None:
        if end.usage is None and any(choice.token_ids for choice in request.stream.choices):
            end = replace(end, usage=delivered(request, None))
        if not request.stream.close(end):
            return
        self._on_end(request, end)
        self._spans.ended(request)
        if not request.had_ended:
            self.num_ended[end.outcome] += 1


def end_of(request: OpenRequest, closed: RequestClosed) -> End:
    """What the end that the mesh reports is for the client."""
    outcome, error = closed.outcome, closed.error
    if outcome is Outcome.COMPLETED and any(choice.finish_reason is None for choice in request.stream.choices):
        outcome, error = Outcome.FAILED, ErrorInfo.of(unavailable("A part of the output was lost on its way."))
    elif outcome is Outcome.CANCELLED and request.cancelled_at is None and not request.had_ended:
        outcome, error = Outcome.FAILED, ErrorInfo.of(unavailable("The mesh stopped this request."))
    elif outcome is Outcome.FAILED and error is None:
        error = ErrorInfo.of(RequestError("The mesh failed this request and did not say why."))
    return End(outcome, closed.usage, closed.timing, error)


def unavailable(message: str) -> Unavailable:
    """The mesh cannot go on with a request; its client may try again."""
    return Unavailable(message, retry_after_s=_RETRY_AFTER_S)
