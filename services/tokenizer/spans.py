"""The tokenizer's part of a request's trace: one span, from the arrival of a prompt to its tokens' departure."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from services.tokenizer.answers import Answer, Question
from shared.ids import RequestId, client_request_id
from shared.messages import Attributes, RequestRefused, Span, SubmitRequest
from shared.telemetry import names
from shared.telemetry.tracing import Tracing, new_span_id


class _Begun(NamedTuple):
    request: SubmitRequest
    span_id: bytes
    start_ns: int


class TokenizerSpans:
    """Makes the spans of one tokenizer."""

    def __init__(self, tracing: Tracing, unix_time_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracing = tracing
        self._unix_time_ns = unix_time_ns
        self._begun: dict[tuple[RequestId, int], _Begun] = {}
        tracing.open_spans.append(self.open_spans)

    def began(self, question: Question) -> None:
        """A question has arrived."""
        if isinstance(question, SubmitRequest) and self._tracing.follows(question.trace):
            key = question.request_id, question.attempt
            self._begun[key] = _Begun(question, new_span_id(), self._unix_time_ns())

    def ended(self, answer: Answer) -> None:
        """It has been answered."""
        request = answer.question
        if not isinstance(request, SubmitRequest):
            return
        begun = self._begun.pop((request.request_id, request.attempt), None)
        if begun is not None:
            self._tracing.record(_span(begun, self._unix_time_ns(), answer), request.owner)

    def open_spans(self, request_id: RequestId) -> Iterator[Span]:
        """Those of prompts of a client request that wait for the thread, or are with it."""
        for begun in self._begun.values():
            if client_request_id(begun.request.request_id) == request_id:
                yield _span(begun, 0)


def _span(begun: _Begun, end_ns: int, answer: Answer | None = None) -> Span:
    request = begun.request
    assert request.trace is not None
    attributes: Attributes = {names.ATTEMPT: request.attempt, names.SCHEDULER: request.scheduler_id}
    if answer is not None:
        attributes[names.PROMPT_TOKENS] = answer.num_tokens
        if isinstance(answer.message, RequestRefused):
            attributes[names.ERROR_TYPE] = answer.message.error.code
    return Span(request.request_id, "tokenize", begun.span_id, request.trace, begun.start_ns, end_ns, attributes)
