"""Resuming on a WebSocket: what outlives a connection, who may go on with it, and from where."""

import json

import pytest

from shared.errors import InvalidRequest
from shared.messages import ErrorInfo, FinishReason, Outcome
from tests.gateway.fake_mesh import logprobs_of
from tests.gateway.harness import CHAT, COMPLETION, Harness, running_gateway
from tests.gateway.peers import Peer, connected, masked_frame, raw_socket
from tests.gateway.resuming import begun, left_behind, nobody_has_it, rest, resume

# Going on.


async def test_request_outlives_its_connection_and_is_told_from_the_offset(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness, "Hel")
    await request.say("lo, ")
    await peer.send(resume(request, 2))
    assert await peer.receive() == {"type": "request.accepted", "id": "a", "request_id": request.request_id}
    delta = await peer.receive()
    assert (delta["request_id"], delta["offset"], delta["text"]) == (request.request_id, 2, "llo, ")
    await request.say("world")
    assert (await peer.receive())["text"] == "world"
    await request.finish()
    completed = await peer.receive()
    assert (completed["type"], completed["id"], completed["usage"]["completion_tokens"]) == (
        "request.completed",
        "a",
        3,
    )
    await harness.nothing_is_left()
    assert harness.fake.cancellations.empty()


async def test_offsets_are_in_characters_of_any_script(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness, "a😀é")
    await request.say("漢字")
    await request.finish()
    await peer.send(resume(request, 2))
    assert (await rest(peer))[0] == {0: "é漢字"}


async def test_every_choice_has_its_own_offset(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness, "Hel", body=CHAT | {"n": 3})
    await request.say("one", index=1)
    await request.say("two", index=2)
    await request.finish()
    await peer.send(resume(request, [3, 1]))
    texts, completed = await rest(peer)
    assert texts == {1: "ne", 2: "two"}
    assert len(completed["choices"]) == 3


async def test_tokens_and_logprobs_have_an_offset_of_their_own(harness: Harness, peer: Peer) -> None:
    body = CHAT | {"logprobs": True}
    first, request = await begun(harness, body=body, token_ids=True)
    await request.say("Hel", num_tokens=2, logprobs=[logprobs_of("H"), logprobs_of("el")])
    delta = await first.receive()
    assert (delta["token_offset"], delta["token_ids"]) == (0, [0, 1])
    first.vanish()
    await request.say("lo", num_tokens=2, logprobs=[logprobs_of("l"), logprobs_of("o")])
    await harness.settle()
    await peer.send(resume(request, 3, token_offset=2))
    await peer.receive()
    delta = await peer.receive()
    assert (delta["offset"], delta["text"], delta["token_offset"], delta["token_ids"]) == (3, "lo", 2, [2, 3])
    assert [position["token"] for position in delta["logprobs"]] == ["l", "o"]


async def test_all_prompts_are_resumed_by_the_first_id(harness: Harness, peer: Peer) -> None:
    first = Peer(await harness.http.ws_connect(harness.url + "/v1/stream"))
    await first.send({"type": "request.create", "id": "a", "body": COMPLETION | {"prompt": ["x", "y"]}})
    requests = [await harness.fake.next_request() for _ in range(2)]
    for request in requests:
        await request.accept()
        harness.fake.keep(request)
    assert (await first.receive())["request_id"] == requests[0].request_id
    first.vanish()
    await harness.until(lambda: harness.mesh.num_disconnects == 1)
    for number, request in enumerate(requests):
        await request.say(f"text {number}")
        await request.finish()
    await peer.send(resume(requests[0], [0, 5]))
    texts, completed = await rest(peer)
    assert texts == {0: "text 0", 1: "1"}
    assert completed["usage"]["prompt_tokens"] == 6


async def test_request_is_resumed_after_its_end(harness: Harness, peer: Peer) -> None:
    first, request = await begun(harness, "Hello")
    await request.finish()
    assert (await first.receive())["type"] == "request.completed"
    await peer.send(resume(request, 4))
    texts, completed = await rest(peer)
    assert texts == {0: "o"}
    assert completed["type"] == "request.completed"
    await peer.send(resume(request, 5))
    assert (await rest(peer))[0] == {}


async def test_failure_is_told_after_the_rest_of_the_text(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness, "Hel")
    await request.say("lo")
    await request.close(Outcome.FAILED, ErrorInfo.of(InvalidRequest("No.")))
    await peer.send(resume(request, 3))
    texts, failed = await rest(peer)
    assert texts == {0: "lo"}
    assert (failed["type"], failed["error"]["message"]) == ("request.failed", "No.")


async def test_request_is_lost_and_resumed_again_and_again(harness: Harness) -> None:
    peer, request = await begun(harness)
    text = ""
    for number in range(10):
        peer.vanish()
        await request.say(f"{number} ")
        peer = Peer(await harness.http.ws_connect(harness.url + "/v1/stream"))
        await peer.send(resume(request, len(text)))
        assert (await peer.receive())["type"] == "request.accepted"
        delta = await peer.receive()
        assert delta["offset"] == len(text)
        text += delta["text"]
    await request.finish()
    assert (await peer.receive())["type"] == "request.completed"
    assert text == "".join(f"{number} " for number in range(10))
    await harness.nothing_is_left()


async def test_resumed_request_may_have_another_name(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness)
    await peer.send(resume(request, id="again"))
    assert (await peer.receive())["id"] == "again"
    await peer.send({"type": "request.cancel", "id": "again"})
    assert await harness.fake.next_cancellation() == request.request_id
    await request.close(Outcome.CANCELLED)
    cancelled = await peer.receive()
    assert (cancelled["type"], cancelled["id"]) == ("request.cancelled", "again")


async def test_name_of_another_open_request_is_refused(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness)
    await peer.create(harness, "a")
    await peer.send(resume(request))
    failed = await peer.receive()
    assert (failed["type"], failed["error"]["code"], failed["error"]["param"]) == (
        "request.failed",
        "duplicate_id",
        "id",
    )
    await peer.send(resume(request, id="b"))
    assert (await peer.receive())["id"] == "b"


async def test_resumed_requests_count_against_the_limit_of_the_socket() -> None:
    async with running_gateway(max_requests_per_socket=1) as harness:
        request = await left_behind(harness)
        async with connected(harness) as peer:
            await peer.create(harness, "b")
            await peer.send(resume(request))
            failed = await peer.receive()
            assert (failed["error"]["code"], failed["request_id"]) == ("queue_full", request.request_id)


# What ends a request and what does not.


async def test_request_that_nobody_comes_back_for_is_cancelled_after_the_grace_period(harness: Harness) -> None:
    request = await left_behind(harness, "Hel")
    await harness.advance(29.0)
    assert harness.fake.cancellations.empty()
    await harness.advance(1.5)
    assert await harness.fake.next_cancellation() == request.request_id


async def test_who_came_back_stops_the_clock(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness, "Hel")
    await harness.advance(29.0)
    await peer.send(resume(request, 3))
    assert (await peer.receive())["type"] == "request.accepted"
    await harness.advance(60.0)
    await request.say("lo")
    assert (await peer.receive())["text"] == "lo"


async def test_without_a_grace_period_a_broken_connection_cancels_at_once() -> None:
    async with running_gateway(resume_grace_s=0) as harness:
        request = await left_behind(harness, "Hel")
        assert await harness.fake.next_cancellation() == request.request_id


@pytest.mark.parametrize("code", [1000, 1001])
async def test_peer_that_says_it_is_through_cancels_at_once(harness: Harness, code: int) -> None:
    peer, request = await begun(harness, "Hel")
    await peer.socket.close(code=code)
    assert await harness.fake.next_cancellation() == request.request_id


@pytest.mark.parametrize("code", [1002, 1011, 4000])
async def test_peer_that_closes_for_any_other_reason_may_come_back(harness: Harness, peer: Peer, code: int) -> None:
    first, request = await begun(harness, "Hel")
    await first.socket.close(code=code)
    await harness.until(lambda: harness.mesh.num_disconnects == 1)
    await peer.send(resume(request, 3))
    assert (await peer.receive())["type"] == "request.accepted"
    assert harness.fake.cancellations.empty()


async def test_request_whose_id_its_client_never_heard_is_cancelled_at_once(harness: Harness) -> None:
    peer = Peer(await harness.http.ws_connect(harness.url + "/v1/stream"))
    await peer.send({"type": "request.create", "id": "a", "body": CHAT})
    request = await harness.fake.next_request()
    peer.vanish()
    assert await harness.fake.next_cancellation() == request.request_id


async def test_request_that_is_not_to_be_resumable_is_not(harness: Harness, peer: Peer) -> None:
    request = await left_behind(harness, "Hel", body=CHAT | {"resumable": False})
    assert not request.message.client, "so no scheduler gives it away"
    assert await harness.fake.next_cancellation() == request.request_id
    harness.fake.kept.clear()
    await peer.send(resume(request, 3))
    await nobody_has_it(harness)
    assert (await peer.receive())["error"]["code"] == "not_found"


async def test_slow_reader_that_was_cut_off_gets_the_rest_when_it_comes_back(harness: Harness) -> None:
    async with raw_socket(harness) as (_, writer):
        writer.write(masked_frame(1, json.dumps({"type": "request.create", "id": "a", "body": CHAT}).encode()))
        request = await harness.fake.next_request()
        await request.accept()
        harness.fake.keep(request)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        num_said = 0
        while max(harness.unsent()) < 1 << 16:
            await request.say("x" * 10_000)
            num_said += 1
            await harness.settle()
        await harness.advance(31.0)
        await harness.until(lambda: harness.mesh.num_disconnects == 1)
    assert harness.fake.cancellations.empty()
    async with connected(harness, max_msg_size=0) as peer:
        await peer.send(resume(request, 7))
        assert (await peer.receive())["type"] == "request.accepted"
        delta = await peer.receive()
        assert (delta["offset"], delta["text"]) == (7, "x" * (num_said * 10_000 - 7))
        await request.finish(FinishReason.LENGTH)
        assert (await peer.receive())["choices"][0]["finish_reason"] == "length"
