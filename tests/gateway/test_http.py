"""The HTTP server itself: bodies it does not take, paths it does not have, keys, and questions about the gateway."""

import asyncio
import gzip
import io
import json
from typing import Any

import pytest

from services.gateway.http import HttpServer
from shared.ids import InstanceId, Service
from shared.messages import Outcome
from tests.gateway.fake_mesh import MODEL, PATIENCE_S, FakeMesh
from tests.gateway.harness import CHAT, Harness, running_gateway

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


async def post_raw(harness: Harness, data: Any, path: str = PATHS[0], **headers: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with harness.http.post(harness.url + path, data=data, headers=headers) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


@pytest.mark.parametrize("path", PATHS)
async def test_body_that_is_no_json_is_a_400(harness: Harness, path: str) -> None:
    for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"a": NaN}', b"[" * 50_000):
        status, answer = await post_raw(harness, data, path)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "caf\xe9/\xff"])
async def test_other_content_types_are_a_400(harness: Harness, content_type: str) -> None:
    status, answer = await post_raw(harness, json.dumps(CHAT), Content_Type=content_type)
    assert status == 400
    assert "application/json" in answer["error"]["message"]


async def test_content_type_may_name_a_charset(harness: Harness) -> None:
    status, answer = await post_raw(harness, b"{}", Content_Type="application/json; charset=utf-8")
    assert (status, answer["error"]["param"]) == (400, "model")


async def test_huge_body_is_a_413_whether_or_not_it_says_its_size(harness: Harness) -> None:
    async def chunks() -> Any:
        for _ in range(50):
            yield b" " * (1 << 20)

    for data in (io.BytesIO(b" " * (50 << 20)), chunks()):
        status, answer = await post_raw(harness, data)
        assert status == 413
        assert answer["error"]["code"] == "request_too_large"
    assert (await harness.chat(model="x"))[0] == 404, "the service lives"


async def test_compressed_body_is_taken_and_a_bomb_is_a_413(harness: Harness) -> None:
    status, answer = await post_raw(harness, gzip.compress(b"{}"), Content_Encoding="gzip")
    assert (status, answer["error"]["param"]) == (400, "model")
    status, _ = await post_raw(harness, gzip.compress(b" " * (50 << 20)), Content_Encoding="gzip")
    assert status == 413


async def test_body_that_is_not_encoded_as_it_says_is_a_400(harness: Harness) -> None:
    async with harness.http.post(
        harness.url + PATHS[0], data=b"{}", headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}
    ) as response:
        assert response.status == 400


async def test_message_larger_than_the_broker_carries_is_a_413_that_it_never_sees() -> None:
    async with running_gateway(max_payload=4096) as harness:
        status, answer = await harness.chat(messages=[{"role": "user", "content": "x" * 5000}])
        assert status == 413
        assert "4096" in answer["error"]["message"]
        async with harness.post("/tokenize", {"model": MODEL, "prompt": "x" * 5000}) as response:
            assert response.status == 413
        await harness.settle()
        assert harness.fake.submissions.empty()
        assert harness.fake.questions.empty()
        assert len(harness.mesh.requests) == 0


async def test_body_that_does_not_arrive_is_a_400_in_time() -> None:
    async with running_gateway(body_timeout_s=0.1) as harness:
        host, port = harness.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 100\r\n\r\n{")
        assert b" 400 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()
        await writer.wait_closed()


async def test_client_that_leaves_in_mid_body_leaves_nothing(harness: Harness) -> None:
    host, port = harness.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: 100\r\n\r\n{")
    await writer.drain()
    await harness.until(lambda: harness.gateway.server.num_answering == 1)
    writer.close()
    await writer.wait_closed()
    await harness.nothing_is_left()
    await harness.until(lambda: harness.gateway.server.num_connections == 0)


async def test_unknown_paths_and_methods_are_json_errors(harness: Harness) -> None:
    async with harness.http.get(harness.url + "/v2/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with harness.http.get(harness.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["message"] == "Method Not Allowed."


async def test_http_garbage_ends_its_connection_only(harness: Harness) -> None:
    host, port = harness.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 what is this\r\n\r\n")
    assert b"400" in await asyncio.wait_for(reader.readline(), PATIENCE_S)
    writer.close()
    await writer.wait_closed()
    async with harness.http.get(harness.url + "/healthz") as response:
        assert response.status == 200


async def test_bug_in_a_handler_fails_its_request_only(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(harness.mesh, "admit", broken)
    status, answer = await harness.chat()
    assert status == 500
    assert answer["error"] == {
        "message": "Internal error.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "ZeroDivisionError" in caplog.text
    async with harness.http.get(harness.url + "/healthz") as response:
        assert response.status == 200


# Keys.


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer caf\xe9"},
    ],
)
async def test_no_or_wrong_key_is_a_401(headers: dict[str, str]) -> None:
    async with running_gateway(api_keys=("acme:secret", "zenith:other")) as harness:
        for path in PATHS:
            async with harness.post(path, CHAT, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            async with harness.http.get(harness.url + path, headers=headers) as response:
                assert response.status == 401
        assert harness.fake.submissions.empty()


async def test_key_decides_the_tenant() -> None:
    async with running_gateway(api_keys=("acme:secret", "zenith:other")) as harness:
        for key, tenant in (("secret", "acme"), ("other", "zenith")):
            asking = asyncio.create_task(
                harness.http.post(harness.url + PATHS[0], json=CHAT, headers={"Authorization": f"Bearer {key}"})
            )
            request = await harness.fake.next_request()
            assert request.message.tenant == tenant
            await request.complete("x")
            (await asking).release()


async def test_key_is_checked_before_the_body_is_looked_at() -> None:
    async with running_gateway(api_keys=("acme:secret",)) as harness:
        status, _ = await post_raw(harness, b"not json")
        assert status == 401


async def test_health_needs_no_key() -> None:
    async with running_gateway(api_keys=("acme:secret",)) as harness:
        for path in ("/healthz", "/readyz"):
            async with harness.http.get(harness.url + path) as response:
                assert response.status == 200


# Models and readiness.


async def readyz(harness: Harness) -> tuple[int, Any]:
    async with harness.http.get(harness.url + "/readyz") as response:
        return response.status, await response.json()


async def test_ready_once_every_service_is_there() -> None:
    async with running_gateway(starts_mesh=False) as harness:
        status, report = await readyz(harness)
        assert status == 503
        assert (report["status"], report["missing"]) == ("no model", {})
        await harness.fake.start()
        await harness.settle()
        status, report = await readyz(harness)
        assert status == 200
        assert report == {
            "status": "ready",
            "is_broker_connected": True,
            "is_draining": False,
            "models": {MODEL: {"tokenizer": 1, "scheduler": 1, "executor": 1, "detokenizer": 1}},
            "missing": {},
        }


@pytest.mark.parametrize("service", [Service.TOKENIZER, Service.SCHEDULER, Service.EXECUTOR, Service.DETOKENIZER])
async def test_not_ready_within_two_seconds_of_a_service_falling_silent(harness: Harness, service: Service) -> None:
    harness.fake.silent.add(service)
    await harness.advance(2.0)
    status, report = await readyz(harness)
    assert (status, report["missing"]) == (503, {MODEL: [str(service)]})
    status, answer = await harness.chat()
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert str(service) in answer["error"]["message"]
    harness.fake.silent.clear()
    await harness.advance(0.5)
    assert (await readyz(harness))[0] == 200


async def test_draining_service_takes_nothing_new(harness: Harness) -> None:
    harness.fake.draining.add(Service.EXECUTOR)
    await harness.advance(0.5)
    assert (await readyz(harness))[0] == 503
    async with harness.post(PATHS[0], CHAT) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"


async def test_lost_broker_is_a_503_that_forgets_nobody(harness: Harness) -> None:
    harness.transport._is_connected = False
    await harness.advance(3.0, beats=False)
    assert (await readyz(harness))[0] == 503
    async with harness.post(PATHS[0], CHAT) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
    harness.transport._is_connected = True
    assert (await readyz(harness))[0] == 200


async def test_unknown_model_is_a_404(harness: Harness) -> None:
    for model in ("other", "", "x" * 10_000, "a\x00b", "a.b *>"):
        status, answer = await harness.chat(model=model)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")


async def test_model_whose_services_all_vanished_is_unavailable_for_a_while_then_unknown(harness: Harness) -> None:
    await harness.advance(3.0, beats=False)
    assert (await harness.chat())[0] == 503
    await harness.advance(60.0, beats=False)
    assert (await harness.chat())[0] == 404


async def test_models_are_listed_with_their_context_length(harness: Harness) -> None:
    async with harness.http.get(harness.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == (MODEL, 2048, "model")
    async with harness.http.get(harness.url + f"/v1/models/{MODEL}") as response:
        assert await response.json() == model
    async with harness.http.get(harness.url + "/v1/models/nothing") as response:
        assert response.status == 404


# Limits.


async def test_one_request_too_many_is_a_429_and_place_is_made_at_the_end() -> None:
    async with running_gateway(max_open_requests=2) as harness:
        first, request = await harness.start_chat()
        async with harness.post("/v1/completions", {"model": MODEL, "prompt": ["a", "b"]}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        assert harness.fake.submissions.empty(), "all prompts of a request or none"
        await request.complete("x")
        await first
        again, request = await harness.start_chat()
        await request.complete("x")
        assert (await again)[0] == 200


async def test_requests_go_to_the_scheduler_with_the_fewest(harness: Harness) -> None:
    other = FakeMesh(harness.transport.broker)
    other.scheduler_id = InstanceId("scheduler-bbbbbbbb")
    other.silent = {Service.TOKENIZER, Service.EXECUTOR, Service.DETOKENIZER}
    await other._transport.connect()
    harness.fake.num_running = 3
    await harness.fake.beat()
    await other.beat()
    await harness.settle()
    chosen = []
    tasks = []
    for _ in range(7):
        asking, request = await harness.start_chat()
        chosen.append(request.message.scheduler_id)
        tasks.append((asking, request))
    assert chosen[:3] == [other.scheduler_id] * 3, "until it has as many as the other one reported"
    assert abs(chosen.count(other.scheduler_id) - 3 - chosen.count(harness.fake.scheduler_id)) <= 1
    for asking, request in tasks:
        await request.complete("x")
        await asking
    await other.stop()


async def test_address_and_counts_are_announced(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    status = harness.gateway.status()
    assert status.address == harness.url
    assert (status.num_open_requests, status.num_requests, status.num_connections) == (1, 1, 1)
    await request.complete("x")
    await asking
    assert harness.gateway.status().num_open_requests == 0


async def test_refusals_are_counted_by_code(harness: Harness) -> None:
    await harness.chat(model="other")
    await harness.chat(temperature=9)
    await harness.chat(temperature=9)
    assert harness.mesh.num_refused == {"model_not_found": 1, "invalid_value": 2}
    assert harness.gateway.status().num_refused == 3


async def test_every_end_is_counted_and_announced(harness: Harness) -> None:
    for outcome in (Outcome.FAILED, Outcome.FAILED, Outcome.COMPLETED):
        asking, request = await harness.start_chat()
        await (request.finish() if outcome is Outcome.COMPLETED else request.close(outcome))
        await asking
        await request.accept()
    asking, request = await harness.start_chat()
    asking.cancel()
    await harness.fake.next_cancellation()
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    status = harness.gateway.status()
    assert (status.num_requests, status.num_open_requests, status.num_refused) == (4, 0, 0)
    assert (status.num_completed, status.num_failed, status.num_cancelled) == (1, 2, 1)
    assert (status.num_disconnects, status.num_cut_off, status.num_orphans) == (1, 0, 3)


def test_server_without_connections_counts_none(harness: Harness) -> None:
    assert HttpServer(harness.mesh, harness.gateway.server._config).num_connections == 0
