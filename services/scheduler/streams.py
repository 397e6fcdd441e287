"""The output of one request as it is delivered: while the request is open, and for a while after its end.

A stream is all that it takes to say everything again, to another detokenizer or for another gateway.
"""

from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from services.scheduler.core.request import Choice, Request
from shared.ids import InstanceId, RequestId
from shared.messages import RequestClosed, RequestOpened, RequestPast, ResumedChoice, SubmitTokens, Timing


@dataclass(slots=True)
class Stream:
    """One open request. Times are the clock's, in seconds."""

    request: Request
    submission: SubmitTokens
    """As it came, less the output that it brought."""
    opened: RequestOpened
    """What its detokenizer was told, or will be: it names the gateway of the moment."""
    arrived_at: float
    """At its first scheduler."""
    detokenizer_id: InstanceId | None = None
    first_step_at: float | None = None
    first_token_at: float | None = None
    closed: RequestClosed | None = None
    """Its end, while there is no detokenizer to tell."""
    replayed_at: float = -inf
    stopped_after: dict[int, int] = field(default_factory=dict)
    """Choices that ended by themselves, and whose text had reached a stop string with fewer tokens: so many."""
    age_before_s: float = 0.0
    """How long ago it had arrived in the mesh when it came here, at schedulers before this one."""
    is_released: bool = False
    """Whether nothing here computes it any more: it is kept for its gateway to take it to another scheduler."""

    @property
    def request_id(self) -> RequestId:
        """Whose output it is."""
        return self.opened.request_id

    @property
    def attempt(self) -> int:
        """Which submission of the request runs here."""
        return self.opened.attempt

    def log(self) -> list[ResumedChoice]:
        """All tokens so far, of each choice."""
        return [_log_of(choice, self.stopped_after.get(choice.index)) for choice in self.request.choices]

    def num_tokens(self) -> tuple[int, ...]:
        """How many they are."""
        counts = [len(choice.output) for choice in self.request.choices]
        for index, count in self.stopped_after.items():
            counts[index] = min(counts[index], count)
        return tuple(counts)

    def cut(self, index: int, num_tokens: int) -> None:
        """A choice's text was complete with so many tokens: what was sampled after them is not delivered."""
        choices = self.request.choices
        if 0 <= index < len(choices) and num_tokens <= len(choices[index].output):
            self.stopped_after[index] = num_tokens

    @property
    def came_at(self) -> float:
        """When it came to this scheduler."""
        return self.arrived_at + self.age_before_s

    @property
    def num_cached_tokens(self) -> int:
        """Of its prompt, found in the prefix cache when it first ran, as far as that is known."""
        before = self.submission.past
        if before is None or before.num_cached_tokens is None:
            return self.request.num_cached_tokens
        return before.num_cached_tokens

    def past(self, now: float) -> RequestPast:
        """What it has behind it, here and at schedulers before."""
        before = self.submission.past or RequestPast()
        first_token_s = before.first_token_s
        if first_token_s is None and self.first_token_at is not None:
            first_token_s = self.first_token_at - self.arrived_at
        queue_s = before.queue_s
        if queue_s is None and self.first_step_at is not None:
            queue_s = self.first_step_at - self.arrived_at
        if queue_s is not None and first_token_s is not None:
            queue_s = min(queue_s, first_token_s)  # whoever knew when it first ran is gone; it was before that
        has_run = queue_s is not None
        return RequestPast(now - self.arrived_at, queue_s, first_token_s, self.num_cached_tokens if has_run else None)

    def timing(self, now: float) -> Timing:
        """Where its time went; what did not happen counts as until now."""
        past = self.past(now)
        return Timing(
            queue_s=past.age_s if past.queue_s is None else past.queue_s,
            first_token_s=past.age_s if past.first_token_s is None else past.first_token_s,
            total_s=past.age_s,
        )

    def ended(self, closed: RequestClosed, now: float) -> "EndedStream":
        """What is kept of it after its end."""
        return EndedStream(self.submission, self.opened, tuple(self.log()), closed, now, self.detokenizer_id)


@dataclass(slots=True)
class EndedStream:
    """One request that has ended, without what it took to compute it."""

    submission: SubmitTokens
    opened: RequestOpened
    tokens: tuple[ResumedChoice, ...]
    closed: RequestClosed
    ended_at: float
    detokenizer_id: InstanceId | None
    """Who was told of its end; it may ask for what it has missed."""
    replayed_at: float = -inf

    @property
    def request_id(self) -> RequestId:
        """Whose output it is."""
        return self.opened.request_id

    @property
    def attempt(self) -> int:
        """Which submission of the request ended here."""
        return self.opened.attempt

    def log(self) -> list[ResumedChoice]:
        """All its tokens, of each choice."""
        return list(self.tokens)

    def num_tokens(self) -> tuple[int, ...]:
        """How many they are."""
        return tuple(len(choice.token_ids) for choice in self.tokens)

    def cut(self, index: int, num_tokens: int) -> None:
        """As of an open one; its end says what was delivered then."""
        if not 0 <= index < len(self.tokens) or num_tokens >= len(self.tokens[index].token_ids):
            return
        tokens = list(self.tokens)
        tokens[index] = _first(tokens[index], num_tokens)
        self.tokens = tuple(tokens)
        usage = replace(self.closed.usage, num_output_tokens=self.num_tokens())
        self.closed = replace(self.closed, usage=usage)


AnyStream = Stream | EndedStream


def adopt(stream: AnyStream, gateway_id: InstanceId, attempt: int) -> None:
    """Go on as another attempt, for another gateway: nothing counts any more that is said of the one before."""
    stream.opened = replace(stream.opened, gateway_id=gateway_id, attempt=attempt)
    if stream.closed is not None:
        stream.closed = replace(stream.closed, attempt=attempt)


def _log_of(choice: Choice, num_tokens: int | None) -> ResumedChoice:
    whole = ResumedChoice(choice.output[:], choice.finish_reason, tuple(choice.logprobs))
    return whole if num_tokens is None else _first(whole, num_tokens)


def _first(log: ResumedChoice, num_tokens: int) -> ResumedChoice:
    return replace(log, token_ids=log.token_ids[:num_tokens], logprobs=log.logprobs[:num_tokens])
