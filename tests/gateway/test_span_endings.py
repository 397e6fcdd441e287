"""There is a span of each request however it ends: refused, failed, cancelled, resumed, taken over, given elsewhere."""

import asyncio
from typing import Any

import pytest

from shared.errors import Overloaded, Unavailable
from shared.ids import RequestId
from shared.messages import ErrorInfo, Outcome, RequestMoved
from shared.telemetry import names
from tests.gateway.fake_mesh import MODEL
from tests.gateway.following import HEADERS, PARENT, going_on, only, scheduler_leaves, spans
from tests.gateway.harness import CHAT, OTHER_SCHEDULER, Harness, events_of, running_gateway
from tests.gateway.peers import Peer, connected
from tests.gateway.resuming import left_behind, rest, resume

# Refusals.


@pytest.mark.parametrize(
    ("body", "status", "code", "name"),
    [
        (b"not JSON", 400, "invalid_value", "chat"),
        (CHAT | {"temperature": 9}, 400, "invalid_value", "chat"),
        (CHAT | {"model": "other"}, 404, "model_not_found", "chat other"),
        (CHAT | {"messages": [{"role": "user", "content": "x" * 3000}]}, 413, "request_too_large", f"chat {MODEL}"),
        (CHAT | {"priority": -1}, 403, "not_allowed", f"chat {MODEL}"),
    ],
)
async def test_a_refused_body_has_a_span(body: Any, status: int, code: str, name: str) -> None:
    async with running_gateway(max_payload=2000) as harness:
        data = (
            {"data": body, "headers": {"Content-Type": "application/json"}}
            if isinstance(body, bytes)
            else {"json": body}
        )
        async with harness.http.post(f"{harness.url}/v1/chat/completions", **data) as response:
            assert response.status == status
            request_id = response.headers["X-Request-Id"]
        span = only(harness, request_id)
        assert span.name == name
        assert span.attributes[names.ERROR_TYPE] == code
        assert span.attributes[names.HTTP_STATUS] == status
        assert span.attributes[names.OUTCOME] == "refused"
        assert "xxx" not in repr(span)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_wrong_key_has_a_span_that_is_nobodys(path: str) -> None:
    async with running_gateway(api_keys=("acme:key",)) as harness:
        async with harness.post(path, CHAT) as response:
            assert response.status == 401
            request_id = RequestId(response.headers["X-Request-Id"])
        assert only(harness, request_id).attributes[names.HTTP_STATUS] == 401
        kept = harness.tracing.store.find(request_id)
        assert kept is not None
        assert kept.owner is None
        assert (await _look(harness, request_id, key="key"))[0] == 404


async def _look(harness: Harness, request_id: str, key: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with harness.http.get(f"{harness.url}/v1/requests/{request_id}/trace", headers=headers) as response:
        return response.status, await response.json()


async def test_too_many_and_none_to_serve_have_spans() -> None:
    async with running_gateway(max_open_requests=1) as harness:
        asking, request = await harness.start_chat()
        async with harness.post("/v1/chat/completions", CHAT) as response:
            refused = response.headers["X-Request-Id"]
        assert only(harness, refused).attributes[names.HTTP_STATUS] == 429
        await request.complete("Hello")
        await asking
        harness.mesh.is_draining = True
        async with harness.post("/v1/chat/completions", CHAT) as response:
            refused = response.headers["X-Request-Id"]
        assert only(harness, refused).attributes[names.HTTP_STATUS] == 503


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_the_mesh_refuses_has_its_status(harness: Harness, is_stream: bool) -> None:
    asking, request = await harness.start_chat(stream=is_stream)
    await request.refuse(ErrorInfo.of(Overloaded("Later.")))
    assert (await asking)[0] == 429
    await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert (span.attributes[names.HTTP_STATUS], span.attributes[names.ERROR_TYPE]) == (429, "queue_full")
    assert span.attributes[names.OUTCOME] == "failed"


async def test_a_refusal_on_a_websocket_tells_how_it_is_found(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": CHAT | {"temperature": 9}})
    failed = await peer.receive()
    span = only(harness, failed["request_id"])
    assert (span.name, span.attributes[names.HTTP_STATUS]) == ("chat", 400)


async def test_a_connection_that_is_refused_has_a_span() -> None:
    async with running_gateway(api_keys=("acme:key",)) as harness:
        async with harness.http.get(f"{harness.url}/v1/stream", headers=HEADERS) as response:
            assert response.status == 401
            request_id = response.headers["X-Request-Id"]
        assert harness.mesh.num_refused == {"invalid_api_key": 1}
        span = only(harness, request_id)
        assert (span.name, span.context) == ("GET /v1/stream", PARENT)
        assert span.attributes[names.ERROR_TYPE] == "invalid_api_key"


async def test_a_client_that_leaves_before_its_body_is_there_has_a_span(harness: Harness) -> None:
    host, port = harness.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\ntraceparent: {HEADERS['traceparent']}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n".encode() + b"{")
    await harness.until(lambda: len(harness.mesh.spans._following) == 1)
    (request_id,) = harness.mesh.spans._following
    writer.transport.abort()
    await harness.until(lambda: spans(harness, request_id) != [])
    assert only(harness, request_id).attributes[names.ERROR_TYPE] == "client_disconnected"
    assert names.HTTP_STATUS not in only(harness, request_id).attributes


async def test_a_bug_is_an_error_of_the_server(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(harness.mesh.admission, "check_model", broken)
    async with harness.post("/v1/chat/completions", CHAT) as response:
        assert response.status == 500
    (kept,) = harness.tracing.store._kept.values()
    assert kept.spans[0].attributes[names.HTTP_STATUS] == 500


async def test_a_bug_in_a_request_on_a_socket_is_one_too(
    harness: Harness, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(harness.mesh.admission, "check_model", broken)
    await peer.send({"type": "request.create", "id": "a", "body": CHAT})
    await harness.until(lambda: bool(harness.tracing.store._kept))
    (kept,) = harness.tracing.store._kept.values()
    assert kept.spans[0].attributes[names.HTTP_STATUS] == 500
    assert not harness.mesh.spans._following


# Other ends.


async def test_a_failure_in_mid_stream_has_the_status_that_the_stream_began_with(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await request.close(Outcome.FAILED, ErrorInfo(504, "timeout_error", "deadline_exceeded", "Late.", None))
    await events_of(response)
    await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert (span.attributes[names.HTTP_STATUS], span.attributes[names.ERROR_TYPE]) == (200, "deadline_exceeded")
    assert span.attributes[names.OUTPUT_TOKENS] == 1


async def test_a_cancelled_request_is_no_error(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await peer.send({"type": "request.cancel", "id": "a"})
    await harness.fake.next_cancellation()
    assert going_on(harness, request.request_id) == [f"chat {MODEL}"], "the mesh has not confirmed yet"
    await request.close(Outcome.CANCELLED)
    assert (await peer.receive())["type"] == "request.cancelled"
    await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert span.attributes[names.OUTCOME] == "cancelled"
    assert names.ERROR_TYPE not in span.attributes


async def test_a_client_that_leaves_cancels_its_request(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    response.close()
    await harness.fake.next_cancellation()
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    assert only(harness, request.request_id).attributes[names.OUTCOME] == "cancelled"


async def test_a_gateway_that_leaves_tells_of_what_it_hands_over(harness: Harness) -> None:
    request = await left_behind(harness, "a")
    harness.gateway.drain(0)
    await harness.running
    await harness.gateway.on_stop()
    assert only(harness, request.request_id).attributes[names.OUTCOME] == "handed_over"


async def test_a_request_that_moves_to_another_gateway_ends_here(harness: Harness) -> None:
    request = await left_behind(harness, "a")
    moved = RequestMoved(request.request_id, harness.fake.scheduler_id, attempt=2)
    await harness.fake.send_to(harness.gateway.identity.instance_id, moved)
    await harness.settle()
    assert only(harness, request.request_id).attributes[names.OUTCOME] == "moved"


# Resumption and resubmission.


async def test_a_resumed_request_is_one_span_that_counts(harness: Harness) -> None:
    request = await left_behind(harness, "a", body=CHAT)
    assert going_on(harness, request.request_id) == [f"chat {MODEL}"]
    async with connected(harness) as peer:
        await peer.send(resume(request, 1))
        assert (await peer.receive())["type"] == "request.accepted"
        await request.say("b")
        await request.finish()
        while (await peer.receive())["type"] != "request.completed":
            pass
        await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert span.attributes[names.NUM_RESUMPTIONS] == 1
    assert [event.name for event in span.events] == ["resumed"]
    assert span.start_ns < span.events[0].at_ns < span.end_ns
    assert span.attributes[names.OUTCOME] == "completed"


async def test_a_request_that_is_taken_over_has_a_span_below_that_of_its_first_gateway(harness: Harness) -> None:
    async with running_gateway() as first:
        request = await left_behind(first, "a")
        assert request.message.trace is not None
    elsewhere = harness.fake.submissions
    assert elsewhere.empty()
    request._mesh = harness.fake
    harness.fake.keep(request)
    async with connected(harness) as peer:
        await peer.send(resume(request))
        await harness.fake.next_adoption()
        await request.say("b")
        await request.finish()
        texts, end = await rest(peer)
        assert (texts, end["type"]) == ({0: "ab"}, "request.completed")
        await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert span.name == f"resume {MODEL}"
    assert span.context == request.message.trace
    assert span.attributes[names.NUM_RESUMPTIONS] == 1
    assert span.attributes[names.OUTCOME] == "completed"
    assert span.attributes[names.REQUEST_MODEL] == MODEL


async def test_the_way_to_another_scheduler_is_told_of(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    await scheduler_leaves(harness)
    again = await harness.fake.next_request()
    assert again.message.attempt == 2
    assert going_on(harness, request.request_id) == [f"chat {MODEL}", "resubmission"]
    await again.accept()
    again._num_tokens, again._num_chars = [1], [1]
    await again.finish()
    await events_of(response)
    await harness.nothing_is_left()
    (resubmission,) = spans(harness, request.request_id, "resubmission")
    (root,) = spans(harness, request.request_id, f"chat {MODEL}")
    assert resubmission.context.span_id == root.span_id
    assert resubmission.attributes == {
        names.ATTEMPT: 2,
        names.REASON: "scheduler_lost",
        names.SCHEDULER: OTHER_SCHEDULER,
    }
    assert (root.attributes[names.ATTEMPT], root.attributes[names.SCHEDULER]) == (2, OTHER_SCHEDULER)


async def test_a_request_that_its_scheduler_does_not_know_says_so(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.deny()
    await harness.fake.next_request()
    (resubmission,) = [span for span in harness.mesh.spans.open_spans(request.request_id) if not span.is_server]
    assert resubmission.attributes == {names.ATTEMPT: 2, names.REASON: "scheduler_lost_it"}
    response.close()


async def test_a_request_that_no_other_scheduler_takes_ends_its_search_with_an_error(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await scheduler_leaves(harness)
    await harness.advance(21.0)
    await events_of(response)
    await harness.nothing_is_left()
    (resubmission,) = spans(harness, request.request_id, "resubmission")
    assert resubmission.attributes[names.ERROR_TYPE] == "not_taken"
    (root,) = spans(harness, request.request_id, f"chat {MODEL}")
    assert root.attributes[names.ERROR_TYPE] == "unavailable"


async def test_an_offer_to_another_scheduler_is_told_of(harness: Harness) -> None:
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    asking, request = await harness.start_chat()
    await request.refuse(ErrorInfo.of(Unavailable("No executor.")))
    again = await harness.fake.next_request()
    await again.complete("Hello")
    assert (await asking)[0] == 200
    await harness.nothing_is_left()
    (resubmission,) = spans(harness, request.request_id, "resubmission")
    assert resubmission.attributes[names.REASON] == "refused"


async def test_submissions_that_nobody_acknowledged_are_counted(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await harness.advance(2.5)
    assert (await harness.fake.next_request()).request_id == request.request_id
    await request.complete("Hello")
    await asking
    await harness.nothing_is_left()
    assert only(harness, request.request_id).attributes[names.NUM_SUBMISSIONS] == 2
