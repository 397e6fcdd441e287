"""Presence: every instance says twice a second that it lives, what it serves and how busy it is."""

from shared.ids import InstanceId, Service
from shared.messages.base import Message


class GatewayStatus(Message, frozen=True, tag="gateway"):
    """Counts since start, unless they are open things."""

    address: str
    num_open_requests: int = 0
    num_connections: int = 0
    num_requests: int = 0
    num_refused: int = 0
    """Asked for by clients and never opened here, so not among `num_requests`."""
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_disconnects: int = 0
    """Clients that left before their answer was complete."""
    num_cut_off: int = 0
    """Connections closed because the client did not read."""
    num_orphans: int = 0
    """Messages about requests that are not open: late ones, mostly."""
    num_detached_requests: int = 0
    """Open, but nobody reads them at the moment."""
    num_unrecorded: int = 0
    """Requests that ended and of whose usage the broker has no record, for the moment or for ever."""


class TokenizerStatus(Message, frozen=True, tag="tokenizer"):
    """Counts since start."""

    max_model_len: int
    num_requests: int = 0
    num_tokens: int = 0


class ExecutorView(Message, frozen=True):
    """One executor as the scheduler that holds it sees it."""

    executor_id: InstanceId
    model: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    """Held by no choice; many of them keep reusable prefixes."""
    num_cached_blocks: int
    """Held or free, they can be found by their content."""
    num_pinned_blocks: int = 0
    num_evicted_blocks: int = 0
    """Cached blocks that were given to other content, since this scheduler holds the executor."""
    eviction_age_s: float = 0.0
    """How long those evicted lately had been of no use, in seconds that the executor worked."""


class SchedulerStatus(Message, frozen=True, tag="scheduler"):
    """Queues now; counts since start."""

    executors: tuple[ExecutorView, ...] = ()
    num_waiting: int = 0
    num_running: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_open_requests: int = 0
    """Now, like the next two: those whose end has not been told yet."""
    num_orphaned_requests: int = 0
    """Of these, whose gateway is lost."""
    num_retained_requests: int = 0
    """That have ended and whose output is kept."""
    num_unrecorded: int = 0
    """Requests that ended without a gateway and of whose usage the broker has no record."""


class ExecutorStatus(Message, frozen=True, tag="executor"):
    """Counts since start."""

    held_by: InstanceId | None = None
    epoch: int = 0
    """The latest one, whether or not it is over."""
    device: str = ""
    num_steps: int = 0
    num_tokens: int = 0
    """Rows of the forward pass: prompt and output tokens computed."""
    busy_s: float = 0.0
    """Time spent inside steps."""
    num_guessed: int = 0
    """Of these rows, tokens guessed ahead."""
    num_guessed_right: int = 0


class DetokenizerStatus(Message, frozen=True, tag="detokenizer"):
    """Open choices now; counts since start."""

    num_open_choices: int = 0
    num_tokens: int = 0
    num_open_requests: int = 0


Status = GatewayStatus | TokenizerStatus | SchedulerStatus | ExecutorStatus | DetokenizerStatus


class Presence(Message, frozen=True, tag="presence"):
    """One beat."""

    service: Service
    instance_id: InstanceId
    name: str
    """For people: stays the same when the supervisor restarts the process."""
    models: tuple[str, ...]
    """The models this instance can serve now; empty for a gateway."""
    status: Status
    num_dropped_messages: int = 0
    is_draining: bool = False
    """Still serving what it has; give it nothing new."""
    is_leaving: bool = False
    """The last beat."""
    metrics_address: str = ""
    """Where it shows its metrics, such as `http://127.0.0.1:9464`; empty if nowhere."""
    has_died: bool = False
    """Of a last beat: its supervisor says it, who has seen the process end without a word."""
