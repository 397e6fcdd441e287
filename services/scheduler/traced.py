"""Requests that are followed, as the scheduler sees them, and the spans that are made of them. Decides nothing."""

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from services.scheduler.streams import Stream
from shared.ids import InstanceId
from shared.messages import Attributes, Span, StepPlan, TraceContext
from shared.telemetry import names
from shared.telemetry.tracing import new_span_id


class Wait(NamedTuple):
    """A choice is without a slot, although it had one."""

    name: str
    span_id: bytes
    since_ns: int
    attributes: Attributes


@dataclass(slots=True, eq=False)
class Traced:
    """One request that is followed."""

    stream: Stream
    context: TraceContext
    num_tokens_before: int
    """Of the output, brought along from elsewhere."""
    executor_id: InstanceId | None = None
    """Where it ran last."""
    waits: dict[int, Wait] = field(default_factory=dict)
    """By choice."""
    num_chunks: int = 0
    """Parts of its prompt that were computed."""
    rest: Span | None = None
    """The parts that share a span, because there are too many."""

    @property
    def has_several_choices(self) -> bool:
        """Whether spans have to say which choice they are of."""
        return len(self.stream.request.choices) > 1

    def queue(self, start_ns: int, end_ns: int, ending: Attributes) -> Span:
        """Its wait for the first step."""
        submission = self.stream.submission
        attributes: Attributes = {
            names.PROMPT_TOKENS: len(submission.prompt_token_ids),
            names.PRIORITY: submission.priority,
        }
        return self.span("queue", start_ns, end_ns, attributes | ending)

    def decode(self, start_ns: int, end_ns: int, ending: Attributes) -> Span:
        """Its output, from the first token on."""
        request = self.stream.request
        num_tokens = sum(self.stream.num_tokens()) - self.num_tokens_before
        attributes: Attributes = {
            names.DECODE_TOKENS: num_tokens,
            names.DECODE_STEPS: max(0, num_tokens - request.num_guessed_right),
            names.DECODE_DRAFTS: request.num_guessed,
            names.DECODE_DRAFTS_RIGHT: request.num_guessed_right,
        }
        if self.executor_id is not None:
            attributes[names.EXECUTOR] = self.executor_id
        return self.span("decode", start_ns, end_ns, attributes | ending)

    def wait(self, wait: Wait, end_ns: int, ending: Attributes) -> Span:
        """A choice's time without a slot."""
        return self.span(wait.name, wait.since_ns, end_ns, wait.attributes | ending, wait.span_id)

    def span(self, name: str, start_ns: int, end_ns: int, attributes: Attributes, span_id: bytes | None = None) -> Span:
        """One phase of it."""
        attributes = {names.ATTEMPT: self.stream.attempt, **attributes}
        request_id = self.stream.request_id
        return Span(request_id, name, span_id or new_span_id(), self.context, start_ns, end_ns, attributes)


class Seat(NamedTuple):
    """A slot that a choice has."""

    traced: Traced
    choice: int


class Chunk(NamedTuple):
    """A part of a prompt in one step, or of an output that is computed once more."""

    seat: Seat
    start: int
    num_tokens: int

    def span(self, executor_id: InstanceId, step_id: int, start_ns: int, end_ns: int) -> Span:
        """Its computation."""
        attributes: Attributes = {
            names.EXECUTOR: executor_id,
            names.STEP_ID: step_id,
            names.CHUNK_START: self.start,
            names.CHUNK_TOKENS: self.num_tokens,
        }
        if self.seat.traced.has_several_choices:
            attributes[names.CHOICE] = self.seat.choice
        return self.seat.traced.span("prefill", start_ns, end_ns, attributes)


@dataclass(slots=True)
class Seats:
    """The choices that are followed on one executor, by slot."""

    seats: dict[int, Seat] = field(default_factory=dict)
    computing: dict[int, int] = field(default_factory=dict)
    """Of those whose known tokens are not all computed yet: how many these are."""

    def take(self, slot: int, seat: Seat, num_known_tokens: int) -> None:
        """A choice gets a slot."""
        self.seats[slot] = seat
        self.computing[slot] = num_known_tokens

    def free(self, slot: int) -> Seat | None:
        """A slot is free; whose it was, if that one is followed."""
        self.computing.pop(slot, None)
        return self.seats.pop(slot, None)

    def chunks_in(self, plan: StepPlan) -> list[Chunk]:
        """The rows of a plan that compute tokens which were known when their choice got its slot.

        Once all of these are computed a choice is not looked at any more: its output goes on by a token a step.
        """
        if not self.computing:
            return []
        rows = dict(zip(plan.slots, range(len(plan.slots)), strict=True))
        chunks = []
        for slot, num_known_tokens in list(self.computing.items()):
            if (row := rows.get(slot)) is None:
                continue
            start, count = plan.starts[row], plan.counts[row]
            chunks.append(Chunk(self.seats[slot], start, count))
            if start + count >= num_known_tokens:
                del self.computing[slot]
        return chunks


def joined(rest: Span, span: Span, num_chunks: int) -> Span:
    """One span for the chunks of both, `num_chunks` in all."""
    before, more = rest.attributes[names.CHUNK_TOKENS], span.attributes[names.CHUNK_TOKENS]
    assert isinstance(before, int)
    assert isinstance(more, int)
    attributes = rest.attributes | {names.CHUNK_TOKENS: before + more, names.NUM_CHUNKS: num_chunks}
    return replace(rest, end_ns=span.end_ns, attributes=attributes)
