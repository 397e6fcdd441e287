"""Resuming on a WebSocket that another reader, another key or a wrong offset stands in the way of."""

import asyncio
from typing import Any

import pytest

from shared.messages import Outcome
from tests.gateway.fake_mesh import PATIENCE_S
from tests.gateway.harness import Harness, running_gateway
from tests.gateway.peers import Peer, connected
from tests.gateway.resuming import begun, left_behind, nobody_has_it, rest, resume

# Two readers.


async def test_newer_reader_wins_and_the_older_one_is_told(harness: Harness, peer: Peer) -> None:
    older, request = await begun(harness, "Hel")
    await peer.send(resume(request, 3))
    failed = await older.receive()
    assert (failed["type"], failed["id"], failed["request_id"]) == ("request.failed", "a", request.request_id)
    assert failed["error"]["code"] == "resumed_elsewhere"
    assert (await peer.receive())["type"] == "request.accepted"
    await older.socket.close()
    await request.say("lo")
    assert (await peer.receive())["text"] == "lo"
    await request.finish()
    assert (await peer.receive())["type"] == "request.completed"
    assert harness.fake.cancellations.empty(), "the older one's close ended nothing"
    assert harness.mesh.num_disconnects == 0


async def test_resuming_on_the_same_connection_ends_the_older_reading_first(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await request.say("Hel")
    assert (await peer.receive())["text"] == "Hel"
    await peer.send(resume(request, 1))
    assert (await peer.receive())["error"]["code"] == "resumed_elsewhere"
    assert (await peer.receive())["type"] == "request.accepted"
    assert (await peer.receive())["text"] == "el"
    await request.finish()
    assert (await peer.receive())["type"] == "request.completed"


# Refusals.


async def test_unknown_request_is_not_found(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.resume", "id": "x", "request_id": "req-unknown", "offset": 5})
    await nobody_has_it(harness)
    failed = await peer.receive()
    assert (failed["type"], failed["id"], failed["request_id"]) == ("request.failed", "x", "req-unknown")
    assert (failed["error"]["code"], failed["error"]["param"]) == ("not_found", "request_id")


async def test_wrong_key_looks_like_an_unknown_request() -> None:
    async with (
        running_gateway(api_keys=("acme:one", "acme:two")) as harness,
        connected(harness, "shoal.v1.json", "shoal.key.one") as owner,
        connected(harness, "shoal.v1.json", "shoal.key.two") as other,
    ):
        request = await owner.create(harness)
        await other.send(resume(request))
        refusal = await other.receive()
        await other.send({"type": "request.resume", "request_id": "req-unknown"})
        await nobody_has_it(harness)
        assert refusal["error"] == (await other.receive())["error"]
        await request.say("still mine")
        assert (await owner.receive())["text"] == "still mine"


async def test_offset_beyond_the_text_is_refused_and_ends_nothing(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness, "Hel")
    await peer.send(resume(request, 4))
    failed = await peer.receive()
    assert (failed["type"], failed["error"]["param"]) == ("request.failed", "offset")
    assert failed["error"]["message"] == "offset is 4, but choice 0 has 3 characters."
    await harness.settle()
    assert harness.fake.cancellations.empty()
    await peer.send(resume(request, 3))
    assert (await peer.receive())["type"] == "request.accepted"


@pytest.mark.parametrize(
    ("offset", "param"), [(-1, "offset"), ([0, -1], "offset"), ([0, 0], "offset"), (2**40, "offset")]
)
async def test_offset_that_makes_no_sense_is_refused(harness: Harness, peer: Peer, offset: Any, param: str) -> None:
    request = await left_behind(harness, "Hel")
    await peer.send(resume(request, offset))
    failed = await peer.receive()
    assert (failed["type"], failed["error"]["param"]) == ("request.failed", param)


@pytest.mark.parametrize(
    ("fields", "param"), [({"offset": "5"}, "offset"), ({"offset": [1.5]}, "offset[0]"), ({"ofset": 5}, "ofset")]
)
async def test_resume_of_wrong_types_is_no_message(harness: Harness, peer: Peer, fields: Any, param: str) -> None:
    await peer.send({"type": "request.resume", "request_id": "req-1"} | fields)
    answer = await peer.receive()
    assert (answer["type"], answer["error"]["param"]) == ("error", param)


def hold_up_searches(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on the gateway looks for requests only once this is set."""
    may_search = asyncio.Event()
    search = harness.mesh.resume

    async def slowly(*arguments: Any) -> Any:
        await may_search.wait()
        return await search(*arguments)

    monkeypatch.setattr(harness.mesh, "resume", slowly)
    return may_search


async def test_search_holds_up_nothing_else_on_the_socket(
    harness: Harness, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await left_behind(harness, "Hel")
    may_search = hold_up_searches(harness, monkeypatch)
    await peer.send(resume(request))
    await peer.create(harness, "b")
    await peer.send({"type": "request.cancel", "request_id": request.request_id})
    await peer.send({"type": "ping"})
    assert await peer.receive() == {"type": "pong"}
    may_search.set()
    assert await harness.fake.next_cancellation() == request.request_id, "it was cancelled while it was looked for"
    await request.close(Outcome.CANCELLED)
    texts, end = await rest(peer)
    assert (texts, end["type"]) == ({0: "Hel"}, "request.cancelled")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_peer_that_left_while_its_request_was_looked_for_leaves_it_as_it_is(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """It may be on another connection by now, and go on there; unless it has said what shall become of the request."""
    request = await left_behind(harness, "Hel")
    may_search = hold_up_searches(harness, monkeypatch)
    async with connected(harness) as peer:
        await peer.send(resume(request))
        if is_cancelled:
            await peer.send({"type": "request.cancel", "request_id": request.request_id})
        await peer.send({"type": "ping"})
        await asyncio.wait_for(peer.receive(), PATIENCE_S)
    may_search.set()
    if is_cancelled:
        assert await harness.fake.next_cancellation() == request.request_id
        return
    await harness.until(lambda: harness.gateway.server.num_connections == 1)
    await harness.advance(29.0)
    assert harness.fake.cancellations.empty()
    await harness.advance(1.5)
    assert await harness.fake.next_cancellation() == request.request_id, "nobody came"
