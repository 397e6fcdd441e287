"""The gateway's settings: where it listens, who may use it, how much it takes on, and how long it waits for whom."""

import dataclasses
from typing import ClassVar

from services.gateway.keys import parse_keys
from services.gateway.priorities import parse_priorities
from shared.config import Config, setting


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConfig(Config):
    """Read from `SHOAL_GATEWAY_*`."""

    prefix: ClassVar[str] = "SHOAL_GATEWAY_"

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", minimum=0, maximum=65_535)
    api_keys: tuple[str, ...] = setting(
        (), "keys of clients, each as tenant:key, separated by commas; none: everybody may come in", is_secret=True
    )
    best_priorities: tuple[str, ...] = setting(
        (),
        "the best (smallest) priority that tenants may ask for where it is not 0, each as tenant=priority, "
        "separated by commas; * stands for all others",
    )
    metrics: str = setting(
        "auto",
        "whether /metrics can be read at this port too; auto: as long as clients need no key",
        choices=("auto", "on", "off"),
    )
    max_open_requests: int = setting(1024, "requests open at once; the next is answered 429", minimum=1)
    max_body_bytes: int = setting(4 << 20, "largest HTTP body or WebSocket message", minimum=1024)
    max_requests_per_socket: int = setting(128, "requests open at once on one WebSocket", minimum=1)
    resubmit_after_s: float = setting(2.0, "a request that nobody acknowledges is sent again after this", minimum=0.05)
    max_submissions: int = setting(4, "how often a request is sent before it fails", minimum=1)
    queue_timeout_s: float = setting(600.0, "longest wait for a request's first token", minimum=0.1)
    stall_timeout_s: float = setting(120.0, "longest silence of a request after its first token", minimum=0.1)
    cancel_timeout_s: float = setting(5.0, "longest wait for the mesh to confirm a cancellation", minimum=0.1)
    failover_timeout_s: float = setting(
        20.0, "longest wait for another scheduler or detokenizer to go on when a request's own is gone", minimum=0.1
    )
    placement_timeout_s: float = setting(
        5.0, "longest wait of a new request for a scheduler that takes it, when executors change hands", minimum=0.1
    )
    replay_after_s: float = setting(
        2.0, "a request that produces nothing for so long has its scheduler asked for what may be lost", minimum=0.1
    )
    adopt_timeout_s: float = setting(
        1.0, "longest wait for a scheduler to say that it has a request that a client comes back for", minimum=0.1
    )
    resume_grace_s: float = setting(
        30.0,
        "how long a request whose connection broke goes on without a reader, for its client to come back; "
        "0 stops it at once",
        minimum=0,
    )
    call_timeout_s: float = setting(10.0, "longest wait for a tokenizer's answer to /tokenize", minimum=0.1)
    write_timeout_s: float = setting(30.0, "a client whose socket takes nothing for so long is cut off", minimum=0.1)
    body_timeout_s: float = setting(30.0, "longest time that a client may take to send a body", minimum=0.1)
    keep_alive_s: float = setting(15.0, "an event stream that is silent for so long gets a comment", minimum=0.1)
    heartbeat_s: float = setting(
        20.0, "a silent WebSocket is pinged after this, and closed if it stays so", minimum=0.1
    )

    def __post_init__(self) -> None:
        """Raises ValueError if `api_keys` or `best_priorities` are not what they should be."""
        parse_keys(self.api_keys)
        parse_priorities(self.best_priorities)
