"""What tests of resuming on WebSockets share: requests whose clients vanish and come back."""

from typing import Any

from tests.gateway.fake_mesh import FakeRequest
from tests.gateway.harness import Harness
from tests.gateway.peers import Peer


async def begun(
    harness: Harness, *texts: str, protocol: str = "shoal.v1.json", **create: Any
) -> tuple[Peer, FakeRequest]:
    """A request that has said `texts` to a client of its own."""
    peer = Peer(await harness.http.ws_connect(harness.url + "/v1/stream", protocols=[protocol]))
    request = await peer.create(harness, **create)
    harness.fake.keep(request)
    for text in texts:
        await request.say(text)
        assert (await peer.receive())["text"] == text
    return peer, request


async def left_behind(harness: Harness, *texts: str, **create: Any) -> FakeRequest:
    """A request that has said `texts` to a client whose connection then broke."""
    peer, request = await begun(harness, *texts, **create)
    peer.vanish()
    await harness.until(lambda: harness.mesh.num_disconnects == 1)
    return request


async def nobody_has_it(harness: Harness) -> None:
    """Let the time pass in which a scheduler could say that it has what is looked for."""
    await harness.fake.next_search()
    await harness.advance(1.5)


def resume(request: FakeRequest, offset: Any = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "request.resume", "request_id": request.request_id, "offset": offset} | fields


async def rest(peer: Peer, name: str = "a") -> tuple[dict[int, str], dict[str, Any]]:
    """What is told from an acceptance to the terminal message: the text of each choice, and that message."""
    message = await peer.receive()
    assert (message["type"], message["id"]) == ("request.accepted", name), message
    texts: dict[int, str] = {}
    while (message := await peer.receive())["type"] == "request.delta":
        texts[message["index"]] = texts.get(message["index"], "") + message["text"]
    return texts, message
