"""What a request came to when it has ended for its client: what metrics count and what the log tells of it.

Pure but for the log. Counts tokens as they were delivered, which also holds where the mesh never said an end.
"""

import logging
from dataclasses import dataclass
from typing import Final

from services.gateway.drafts import Endpoint
from services.gateway.open_request import OpenRequest
from services.gateway.presentation import Presentation
from services.gateway.streams import End
from services.gateway.submissions import Submission
from services.gateway.usage import usage_of
from shared.errors import Unavailable
from shared.ids import RequestId
from shared.log import about
from shared.messages import ChatPrompt, Outcome, Prompt, SubmitRequest, TraceContext, Usage

log = logging.getLogger(__name__)

UNKNOWN_OPERATION: Final = "unknown"
"""Stands where it cannot be told which of an `Endpoint`'s operations a request is."""

REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True)
class Account:
    """One request to the mesh that has ended."""

    request_id: RequestId
    operation: str
    model: str
    tenant: str
    ending: str
    """An outcome, or `refused`: it failed before any scheduler had taken it."""
    code: str
    """Of the error; empty if there was none."""
    attempt: int
    duration_s: float
    """From admission to the end."""
    first_token_s: float | None
    """From admission to the first token; None if there was none, or another gateway told it."""
    per_token_s: float | None
    """The rest of the time over the rest of the tokens, of the longest choice, if it completed and all of that was
    here."""
    usage: Usage | None
    """What was consumed; None if no scheduler had taken it."""
    trace: TraceContext | None = None
    """None if it has none."""


def account_of(request: OpenRequest, end: End, now: float) -> Account:
    """The account of a request that ends now."""
    usage = usage_of(request, end)
    is_refused = end.outcome is Outcome.FAILED and usage is None
    told_here = not any(request.num_tokens_at_adoption)
    first_token_at = request.first_token_at if told_here else None
    longest = max(len(choice.token_ids) for choice in request.stream.choices)
    return Account(
        request_id=request.request_id,
        operation=operation_of(request.spec),
        model=request.spec.model,
        tenant=request.spec.tenant,
        ending=REFUSED if is_refused else str(end.outcome),
        code=end.error.code if end.error else "",
        attempt=request.attempt,
        duration_s=max(now - request.opened_at, end.timing.total_s),  # of one taken over, its scheduler knows more
        first_token_s=None if first_token_at is None else first_token_at - request.opened_at,
        per_token_s=(now - first_token_at) / (longest - 1)
        if first_token_at is not None and end.outcome is Outcome.COMPLETED and longest > 1
        else None,
        usage=usage,
        trace=request.spec.trace,
    )


def operation_of(spec: Submission) -> str:
    """Which kind of request it is."""
    if isinstance(spec, SubmitRequest):
        return (Endpoint.CHAT if isinstance(spec.prompt, ChatPrompt) else Endpoint.COMPLETION).operation
    try:
        return Presentation.unpack(spec.client).endpoint.operation
    except Unavailable:
        return UNKNOWN_OPERATION


def record(account: Account) -> None:
    """Write the access event of a request."""
    usage = account.usage
    log.info(
        "request ended",
        extra=about(account.request_id, account.trace)
        | {
            "tenant": account.tenant,
            "model": account.model,
            "operation": account.operation,
            "ending": account.ending,
            "code": account.code or None,
            "attempt": account.attempt,
            "num_prompt_tokens": usage.num_prompt_tokens if usage else None,
            "num_cached_tokens": usage.num_cached_tokens if usage else None,
            "num_output_tokens": sum(usage.num_output_tokens) if usage else None,
            "ttft_ms": _ms(account.first_token_s),
            "total_ms": _ms(account.duration_s),
        },
    )


def record_refusal(operation: str, code: str, request_id: str, trace: TraceContext | None) -> None:
    """Write the access event of a request that was never opened. The id may be empty: its client was told none."""
    whose = about(request_id, trace) if request_id else {}
    log.info("request refused", extra=whose | {"operation": operation, "code": code})


def record_content(request: OpenRequest) -> None:
    """Write what was said, which is done only where the operator has asked for it."""
    spec = request.spec
    prompt = _shown(spec.prompt) if isinstance(spec, SubmitRequest) else spec.prompt_token_ids.tolist()
    output = [choice.text for choice in request.stream.choices]
    log.info("content of a request", extra=about(request.request_id, spec.trace) | {"prompt": prompt, "output": output})


def _shown(prompt: Prompt) -> object:
    if isinstance(prompt, ChatPrompt):
        return [{"role": message.role, "content": message.content} for message in prompt.messages]
    return prompt.text if hasattr(prompt, "text") else prompt.token_ids.tolist()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
