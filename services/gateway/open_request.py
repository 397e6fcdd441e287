"""One request that this gateway has in the mesh: what was asked for, who has it, and since when nothing was heard.

Owns the state of one request. What happens to it when is decided by the table of all of them (`requests`).
"""

import math
from dataclasses import dataclass, field

from msgspec.structs import replace

from services.gateway.config import GatewayConfig
from services.gateway.streams import Stream
from services.gateway.submissions import Outgoing, Submission, cancellation
from shared import subjects
from shared.codec import encode
from shared.errors import DeadlineExceeded, RequestError, Stalled, Unavailable
from shared.ids import InstanceId, RequestId
from shared.messages import ErrorInfo, Outcome, ReplayRequest, RequestAdopted, RequestClosed, RequestPast

_MAX_REPLAY_PAUSE_S = 30.0
_MAX_INCOMPLETE_ENDS = 5
"""So often an end without all of the output before it is taken for a loss on the way."""
_REPLAY_INTERVAL_S = 0.5
"""However much seems to be missing, a scheduler is not asked for it more often than this."""


@dataclass(slots=True)
class OpenRequest:
    """One request to the mesh that is not known to have ended there. Times are the clock's, in seconds."""

    stream: Stream
    spec: Submission
    scheduler_id: InstanceId | None
    """Who has it, or was asked to take it; None while there is nobody to ask."""
    opened_at: float
    heard_at: float
    submission: Outgoing | None = None
    """How to send it again; None once it is accepted, and while there is nobody to send it to."""
    is_taken: bool = False
    """Whether a scheduler has accepted this attempt."""
    attempt: int = 1
    sent_at: float = 0.0
    num_submissions: int = 1
    deadline: float = math.inf
    num_prompt_tokens: int = 0
    """As its scheduler said; 0 before."""
    lost_at: float | None = None
    """Since when no scheduler is known to have it, although one had, or was to."""
    waits_since: float | None = None
    """Since when it, new, waits for a scheduler that takes it."""
    refusal: ErrorInfo | None = None
    """What the last one said that did not."""
    try_again_at: float = 0.0
    num_losses: int = 0
    """Schedulers that lost it since its last token."""
    ask_at: float = math.inf
    """When its scheduler is asked whether there is more."""
    asked_at: float = -math.inf
    ask_pause_s: float = 0.0
    num_incomplete_ends: int = 0
    first_token_at: float | None = None
    """When the first token came that this gateway heard of."""
    detokenizer_id: InstanceId | None = None
    """Known from its first text on."""
    bereft_at: float | None = None
    """Since when there is no detokenizer for it."""
    cancelled_at: float | None = None
    cancel_sent_at: float = 0.0
    detached_until: float | None = None
    """Nobody reads it; then it is cancelled."""
    num_tokens_at_adoption: tuple[int, ...] = field(default=())
    accepted_at: float | None = None
    """When a scheduler first accepted it, here or at another gateway."""
    past: RequestPast = RequestPast()
    """What is known for sure of what is behind it, but for its age."""
    had_ended: bool = False
    """Whether its end was told to another gateway already."""

    @property
    def request_id(self) -> RequestId:
        """Its id."""
        return self.stream.request_id

    @property
    def is_resumable(self) -> bool:
        """Whether its client may come back for it."""
        return bool(self.spec.client)

    @staticmethod
    def adopted(message: RequestAdopted, now: float, config: GatewayConfig) -> "OpenRequest":
        """One that another gateway had, without a reader so far."""
        submission = message.submission
        stream = Stream(submission.request_id, submission.num_choices)
        request = OpenRequest(stream, submission, message.scheduler_id, now, now, had_ended=message.has_ended)
        request.detached_until = now + config.resume_grace_s
        return request

    def follow(self, message: RequestAdopted, now: float) -> None:
        """Hear of it from the scheduler that has pointed it to this gateway."""
        self.scheduler_id, self.attempt = message.scheduler_id, message.submission.attempt
        self.num_prompt_tokens = len(message.submission.prompt_token_ids)
        self.num_tokens_at_adoption = message.num_output_tokens
        if message.submission.past is not None:
            self.remember(message.submission.past, now)

    def remember(self, past: RequestPast, now: float) -> None:
        """Take over what a scheduler says of what is behind it."""
        self.accepted_at, self.past = now - past.age_s, past

    def past_until(self, now: float) -> RequestPast:
        """What is behind it, for the scheduler that goes on with it."""
        return replace(self.past, age_s=now - (self.opened_at if self.accepted_at is None else self.accepted_at))

    def num_tokens(self) -> tuple[int, ...]:
        """How many tokens of each choice are here, or are known to be on their way."""
        here = [len(choice.token_ids) for choice in self.stream.choices]
        coming = self.num_tokens_at_adoption or (0,) * len(here)
        return tuple(map(max, here, coming))

    def timeout_ms(self, now: float) -> int | None:
        """What is left of the time that its client gave it, at least 1; None if it takes as long as it takes."""
        if self.spec.timeout_ms is None:
            return None
        return max(1, round(self.spec.timeout_ms - (now - self.opened_at) * 1000))

    def begin_next_attempt(self, now: float) -> None:
        """Its scheduler does not have it, or cannot be heard: nothing that is said of this attempt counts any more."""
        self.attempt += 1
        self.scheduler_id, self.submission, self.is_taken = None, None, False
        self.lost_at = now if self.lost_at is None else self.lost_at

    def overdue(self, now: float, config: GatewayConfig, *, is_connected: bool) -> RequestError | None:
        """What to tell a client that has waited too long, if it has. Without the broker, silence means nothing."""
        if now >= self.deadline:
            return DeadlineExceeded("The request's timeout_ms is over.")
        if is_connected and self.lost_at is not None and now - self.lost_at >= config.failover_timeout_s:
            return Unavailable("The scheduler of this request is gone, and no other took it over in time.")
        if is_connected and self.waits_since is not None and now - self.waits_since >= config.placement_timeout_s:
            return self.not_taken()
        if is_connected and self.bereft_at is not None and now - self.bereft_at >= config.failover_timeout_s:
            return Unavailable("The detokenizer of this request is gone.")
        if self.submission is not None:
            is_out_of_tries = self.num_submissions >= config.max_submissions and self._is_unanswered(now, config)
            return Unavailable("No service took the request in time.") if is_connected and is_out_of_tries else None
        if self.detokenizer_id is None and now - self.opened_at >= config.queue_timeout_s:
            return Stalled(f"The request waited {config.queue_timeout_s:g} s and produced nothing.")
        if self.detokenizer_id is not None and now - self.heard_at >= config.stall_timeout_s:
            return Stalled(f"The mesh went silent for {config.stall_timeout_s:g} s in mid-request.")
        return None

    def not_taken(self) -> Unavailable:
        """What to tell the client of a new request that no scheduler takes."""
        if self.refusal is None:
            return Unavailable("No scheduler takes this request at the moment.")
        return Unavailable(self.refusal.message, retry_after_s=self.refusal.retry_after_s)

    def repetition(self, now: float, config: GatewayConfig) -> list[Outgoing]:
        """Submit it again if nobody has answered for a while."""
        if self.submission is None or not self._is_unanswered(now, config):
            return []
        self.num_submissions += 1
        self.sent_at = now
        return [self.submission]

    def _is_unanswered(self, now: float, config: GatewayConfig) -> bool:
        return now - self.sent_at >= config.resubmit_after_s

    def went_on(self, now: float, config: GatewayConfig) -> None:
        """It was accepted, or has new output: its scheduler need not be asked for a while."""
        self.ask_pause_s = config.replay_after_s
        self.ask_at = now + self.ask_pause_s

    def produced(self, now: float) -> None:
        """It has output that it had not before."""
        if self.past.first_token_s is None and self.accepted_at is not None:
            self.past = replace(self.past, first_token_s=now - self.accepted_at)

    def hurry(self, now: float) -> None:
        """Something is missing: ask soon."""
        self.ask_at = min(self.ask_at, max(now, self.asked_at + _REPLAY_INTERVAL_S))

    def is_cut_short(self, closed: RequestClosed) -> bool:
        """Whether an end has come without all of the output before it, which may still be had from its scheduler."""
        is_complete = all(choice.finish_reason is not None for choice in self.stream.choices)
        if closed.outcome is not Outcome.COMPLETED or is_complete or self.cancelled_at is not None:
            return False
        self.num_incomplete_ends += 1
        return self.num_incomplete_ends < _MAX_INCOMPLETE_ENDS and self.scheduler_id is not None

    def question(self, gateway_id: InstanceId, now: float) -> Outgoing:
        """Ask its scheduler whether there is more than what is here, and after a longer pause once more."""
        assert self.scheduler_id is not None
        self.asked_at = now
        self.ask_at = now + self.ask_pause_s
        self.ask_pause_s = min(2 * self.ask_pause_s, _MAX_REPLAY_PAUSE_S)
        here = tuple(len(choice.token_ids) for choice in self.stream.choices)
        message = ReplayRequest(self.request_id, gateway_id, self.attempt, here)
        return subjects.inbox(self.scheduler_id), encode(message)

    def dismissal(self, gateway_id: InstanceId) -> Outgoing:
        """Tell its scheduler to forget it: it goes on elsewhere, as a later attempt."""
        assert self.scheduler_id is not None
        to, attempt = self.scheduler_id, self.attempt
        return cancellation(to, self.request_id, gateway_id=gateway_id, attempt=attempt, goes_on=True)

    def cancellation(self, gateway_id: InstanceId, now: float) -> Outgoing:
        """Tell its scheduler to stop it."""
        assert self.scheduler_id is not None
        self.cancel_sent_at = now
        return cancellation(self.scheduler_id, self.request_id, gateway_id=gateway_id, attempt=self.attempt)
