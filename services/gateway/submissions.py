"""How a request is sent to the mesh again: to another scheduler, with the output that it has so far; and stopped. Pure.

The output of a request is a function of the request, its seed and the output so far, so whoever gets all of these goes
on exactly where another scheduler left off.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from services.gateway.streams import ChoiceLog
from shared import subjects
from shared.codec import encode
from shared.ids import InstanceId, RequestId
from shared.messages import (
    CancelRequest,
    RequestPast,
    ResumedChoice,
    SubmitRequest,
    SubmitTokens,
    TextLogprobs,
    TokenLogprobs,
    int32s,
)

Outgoing = tuple[str, bytes]
"""A subject and what to publish on it."""

Submission = SubmitRequest | SubmitTokens
"""What is known of a request: as its client gave it, or, if another gateway had it before, as a scheduler got it."""


def next_attempt(
    submission: Submission,
    choices: Sequence[ChoiceLog],
    *,
    scheduler_id: InstanceId,
    attempt: int,
    timeout_ms: int | None,
    past: RequestPast,
    max_bytes: int,
) -> Outgoing:
    """What submits a request to `scheduler_id` again.

    Log-probabilities are left out where the message would have more than half of `max_bytes` with them: whoever
    follows the request has them already, and services behind need room of their own.
    """
    has_output = any(choice.token_ids or choice.finish_reason is not None for choice in choices)
    outgoing = ("", b"")
    for has_logprobs in (True, False):
        resumed = tuple(_resumed(choice, has_logprobs=has_logprobs) for choice in choices) if has_output else ()
        changes = {"attempt": attempt, "resumed": resumed, "timeout_ms": timeout_ms, "past": past}
        if isinstance(submission, SubmitRequest):
            message: Submission = replace(submission, scheduler_id=scheduler_id, **changes)
            outgoing = subjects.tokenize(submission.model), encode(message)
        else:
            outgoing = subjects.inbox(scheduler_id), encode(replace(submission, **changes))
        if len(outgoing[1]) <= max_bytes // 2:
            break
    return outgoing


def cancellation(
    scheduler_id: InstanceId, request_id: RequestId, *, gateway_id: InstanceId, attempt: int, goes_on: bool = False
) -> Outgoing:
    """What has a scheduler stop a request for a gateway, or forget it because it goes on elsewhere."""
    return subjects.inbox(scheduler_id), encode(CancelRequest(request_id, gateway_id, attempt, goes_on=goes_on))


def _resumed(choice: ChoiceLog, *, has_logprobs: bool) -> ResumedChoice:
    logprobs = tuple(map(_token_logprobs, choice.logprobs)) if has_logprobs else ()
    return ResumedChoice(choice.token_ids[:], choice.finish_reason, logprobs)


def _token_logprobs(position: TextLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        position.chosen.logprob,
        int32s(alternative.token_id for alternative in position.top),
        tuple(alternative.logprob for alternative in position.top),
    )
