"""The gateway's actor: takes what arrives from the mesh, keeps time, and runs the HTTP server beside its mailbox."""

from collections.abc import Sequence
from typing import assert_never

from services.gateway.config import GatewayConfig
from services.gateway.http import HttpServer
from services.gateway.instruments import gateway_instruments
from services.gateway.mesh import Mesh
from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import Clock
from shared.errors import ConfigError
from shared.messages import (
    CallFailed,
    GatewayInbound,
    GatewayStatus,
    Outcome,
    Presence,
    PromptTokenized,
    RequestAccepted,
    RequestAdopted,
    RequestFound,
    RequestMoved,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    TextProduced,
    TokensDetokenized,
)
from shared.telemetry.metrics import Instrument, MetricsPage
from shared.telemetry.tracing import Tracing
from shared.transport import Transport


class Gateway(Actor[GatewayInbound]):
    """One gateway instance."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        clock: Clock,
        config: GatewayConfig,
        *,
        logs_content: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        """`logs_content`: write prompts and outputs into the log."""
        super().__init__(identity, transport, GatewayInbound, clock)
        self.mesh = Mesh(identity.instance_id, transport, clock, config, logs_content=logs_content, tracing=tracing)
        self.server = HttpServer(self.mesh, config)

    async def handle(self, message: GatewayInbound | Tick) -> None:
        """React to one message from the mesh."""
        match message:
            case TextProduced():
                await self.mesh.text_produced(message)
            case RequestAccepted():
                self.mesh.requests.accepted(message, self.clock.now())
            case RequestRefused():
                await self.mesh.refused(message)
            case RequestUnknown() | RequestReleased():
                await self.mesh.given_back(message)
            case RequestMoved():
                await self.mesh.moved(message)
            case RequestFound():
                await self.mesh.found(message)
            case RequestAdopted():
                await self.mesh.adopted(message)
            case PromptTokenized() | TokensDetokenized():
                self.mesh.calls.answered(message)
            case CallFailed():
                self.mesh.calls.failed(message)
            case Presence():
                await self.mesh.heard(message)
            case Tick():
                await self.mesh.tick()
            case _:
                assert_never(message)

    def status(self) -> GatewayStatus:
        """Where it listens, how much it has to do, and how what it had to do ended."""
        requests = self.mesh.requests
        return GatewayStatus(
            address=self.server.address,
            num_open_requests=len(requests),
            num_connections=self.server.num_connections,
            num_requests=self.mesh.num_requests,
            num_refused=self.mesh.num_refused.total(),
            num_completed=requests.num_ended[Outcome.COMPLETED],
            num_failed=requests.num_ended[Outcome.FAILED],
            num_cancelled=requests.num_ended[Outcome.CANCELLED],
            num_disconnects=self.mesh.num_disconnects,
            num_cut_off=self.server.num_cut_off,
            num_orphans=requests.num_orphans,
            num_detached_requests=requests.num_detached,
            num_unrecorded=self.mesh.usage.num_unrecorded,
        )

    def instruments(self) -> Sequence[Instrument]:
        """Requests and their ends, connections, and what is heard of the mesh."""
        return gateway_instruments(self.mesh, self.server)

    def show_metrics(self, page: MetricsPage) -> None:
        """Also at `/metrics` of its API."""
        self.server.metrics_page = page

    def models(self) -> tuple[str, ...]:
        """A gateway serves whatever the mesh does."""
        return ()

    async def on_start(self) -> None:
        """Listen to presence, and to clients. Raises ConfigError if the address cannot be had."""
        await self.listen(subjects.PRESENCE)
        self.mesh.usage.start()
        try:
            await self.server.start()
        except OSError as error:
            raise ConfigError(f"SHOAL_GATEWAY_HOST and SHOAL_GATEWAY_PORT: {error}") from error

    def drain(self, deadline_s: float) -> None:
        """Take nothing new, let what runs finish, and tell clients on WebSockets to go elsewhere."""
        if not self.is_draining:
            self.mesh.is_draining = True
            self.server.say_going_away(deadline_s)
        super().drain(deadline_s)

    def is_idle(self) -> bool:
        """Whether no request is open and every answer is written."""
        return len(self.mesh.requests) == 0 and self.server.num_answering == 0

    async def on_stop(self) -> None:
        """Let go what can be resumed elsewhere, fail the rest, each once, close every connection, and hand over what
        usage has not been recorded yet."""
        self.mesh.is_draining = True
        await self.mesh.end_all()
        await self.server.stop()
        self.mesh.spans.leave()
        await self.mesh.usage.stop()
