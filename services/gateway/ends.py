"""How a request ends for its client, given what the mesh says of it."""

from services.gateway.open_request import OpenRequest
from services.gateway.streams import End
from shared.errors import RequestError, Unavailable
from shared.messages import ErrorInfo, Outcome, RequestClosed

_RETRY_AFTER_S = 1.0


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
