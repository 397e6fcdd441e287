"""What the tests of streams share."""

import shoal
from tests.client.fake_gateway import Conversation, accepted, completed, delta


async def read(stream: shoal.Stream, texts: list[str]) -> None:
    """Add the texts of the deltas to `texts`, whatever comes after them."""
    async for one in stream:
        texts.append(one.text)  # noqa: PERF401  # what came before an exception counts


async def hello(peer: Conversation) -> None:
    """All of one request."""
    await peer.receive()
    await peer.send(accepted(), delta(0, "Hel"), delta(3, "lo"), completed())
    await peer.closed()
