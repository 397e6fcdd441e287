"""What a request and its answer are in the words of OpenTelemetry's conventions. Never a prompt, never an output.

Also where in a trace a client says that its request belongs.
"""

from collections.abc import Sequence
from typing import Final

from multidict import MultiMapping

from services.gateway.drafts import Draft
from services.gateway.streams import End, Stream, total_usage
from shared.messages import Attributes, Outcome, TraceContext
from shared.telemetry import names, w3c

_PROVIDER: Final = "shoal"
_OK: Final = 200
_NS: Final = 1_000_000_000


def parent_in(headers: MultiMapping[str]) -> TraceContext | None:
    """Where in a trace of its own a client's request belongs; None if its headers do not say."""
    if "traceparent" not in headers:
        return None
    return w3c.parse(headers.getall("traceparent"), headers.getall("tracestate", ()))


def of_draft(draft: Draft) -> Attributes:
    """What was asked for. What nobody asked for is there only if it decides something."""
    sampling, answer = draft.sampling, draft.answer
    attributes: Attributes = {
        names.PROVIDER: _PROVIDER,
        names.OPERATION: answer.endpoint.operation,
        names.REQUEST_MODEL: draft.model,
        names.RESPONSE_MODEL: draft.model,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
    }
    if draft.max_tokens is not None:
        attributes[names.REQUEST_MAX_TOKENS] = draft.max_tokens
    if draft.has_seed:
        attributes[names.REQUEST_SEED] = sampling.seed
    if draft.priority is not None:
        attributes[names.PRIORITY] = draft.priority
    if answer.num_choices > 1:
        attributes[names.REQUEST_CHOICES] = answer.num_choices
    if len(draft.prompts) > 1:
        attributes[names.NUM_PROMPTS] = len(draft.prompts)
    for name, value in (
        (names.REQUEST_STREAM, answer.is_stream),
        (names.REQUEST_STOP, draft.text.stop),
        (names.REQUEST_TOP_K, sampling.top_k),
        (names.REQUEST_FREQUENCY_PENALTY, sampling.frequency_penalty),
        (names.REQUEST_PRESENCE_PENALTY, sampling.presence_penalty),
    ):
        if value:
            attributes[name] = value
    return attributes


def of_answer(streams: Sequence[Stream], since_ns: int, *, is_stream: bool) -> Attributes:
    """What came of it: so far, or in the end once all of it has ended. Its client asked at `since_ns`."""
    attributes = _delivery(streams, since_ns) if is_stream else {}
    if streams and all(stream.end is not None for stream in streams):
        attributes |= _usage(streams) | _ending(streams, is_stream=is_stream)
    return attributes


def _delivery(streams: Sequence[Stream], since_ns: int) -> Attributes:
    first_ns = min((stream.first_told_ns for stream in streams if stream.num_told), default=None)
    if first_ns is None:
        return {}
    return {
        names.NUM_DELTAS: sum(stream.num_told for stream in streams),
        names.TIME_TO_FIRST_CHUNK: (first_ns - since_ns) / _NS,
    }


def _usage(streams: Sequence[Stream]) -> Attributes:
    if all(stream.end is None or stream.end.usage is None for stream in streams):
        return {}
    usage = total_usage(streams)
    return {
        names.INPUT_TOKENS: usage.num_prompt_tokens,
        names.CACHED_TOKENS: usage.num_cached_tokens,
        names.OUTPUT_TOKENS: sum(usage.num_output_tokens),
    }


def _ending(streams: Sequence[Stream], *, is_stream: bool) -> Attributes:
    end = _worst(streams)
    attributes: Attributes = {names.OUTCOME: end.outcome.value}
    reasons = [log.finish_reason for stream in streams for log in stream.choices]
    if any(reasons):
        attributes[names.RESPONSE_FINISH_REASONS] = tuple(str(reason) for reason in reasons if reason is not None)
    if end.outcome is Outcome.COMPLETED:
        attributes[names.HTTP_STATUS] = _OK
    elif end.error is not None:
        has_begun = is_stream and all(stream.is_accepted for stream in streams)
        attributes[names.ERROR_TYPE] = end.error.code
        attributes[names.HTTP_STATUS] = _OK if has_begun else end.error.status
    return attributes


def _worst(streams: Sequence[Stream]) -> End:
    """How all of it ended: failed if any part did, else cancelled if any was."""
    ends = [stream.end for stream in streams if stream.end is not None]
    order = (Outcome.FAILED, Outcome.CANCELLED, Outcome.COMPLETED)
    return min(ends, key=lambda end: order.index(end.outcome))
