"""Run one gateway: `python -m services.gateway`."""

from services.gateway.config import GatewayConfig
from services.gateway.service import Gateway
from shared.ids import Service
from shared.process import Parts, run


async def build(parts: Parts[GatewayConfig]) -> Gateway:
    """The gateway of this process."""
    return Gateway(
        parts.identity,
        parts.transport,
        parts.clock,
        parts.config,
        logs_content=parts.mesh.log_content,
        tracing=parts.tracing,
    )


if __name__ == "__main__":
    run(Service.GATEWAY, GatewayConfig, build)
