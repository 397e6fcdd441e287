"""The page of the gateway's metrics, and what it says of connections and of the mesh."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.ids import Service
from shared.messages import Outcome
from tests.gateway.harness import Harness, running_gateway
from tests.gateway.metering import endings, measured, scrape
from tests.gateway.peers import Peer, connected


@pytest.fixture
async def harness(harness: Harness) -> AsyncIterator[Harness]:
    """One whose metrics are shown."""
    async with measured(harness):
        yield harness


async def test_connections_are_counted_by_protocol(harness: Harness) -> None:
    async with connected(harness, "shoal.v1.json"), connected(harness, "shoal.v1.json"):
        page = await scrape(harness)
    assert page.value("shoal_gateway_connections", protocol="websocket") == 2
    assert page.value("shoal_gateway_connections", protocol="http") == 1


async def test_instances_and_readiness_are_those_that_are_heard(harness: Harness) -> None:
    page = await scrape(harness)
    assert page.value("shoal_gateway_ready", model="test/model-1") == 1
    assert page.value("shoal_gateway_instances", service="scheduler", state="up") == 1
    harness.fake.draining = {Service.EXECUTOR}
    harness.fake.silent = {Service.DETOKENIZER}
    await harness.advance(3)
    page = await scrape(harness)
    assert page.value("shoal_gateway_ready", model="test/model-1") == 0
    heard = page.by("shoal_gateway_instances", "service")
    assert {service: heard.get(service) for service in ("tokenizer", "scheduler", "executor", "detokenizer")} == {
        "tokenizer": 1,
        "scheduler": 1,
        "executor": 1,
        "detokenizer": None,
    }
    assert page.value("shoal_gateway_instances", service="executor", state="draining") == 1


async def test_answers_over_http_are_timed_by_route_and_status(harness: Harness) -> None:
    await harness.chat(temperature=9)
    for path in ("/v1/models/a", "/v1/models/b", "/no/such/path", "/readyz"):
        await (await harness.http.get(harness.url + path)).read()
    await (await harness.http.request("PROPFIND", f"{harness.url}/readyz")).read()
    async with connected(harness, "shoal.v1.json"):
        pass
    page = await scrape(harness)
    counts = {
        (each.labels["http_request_method"], each.labels["http_route"], each.labels["http_response_status_code"]): value
        for each in page.families["http_server_request_duration_seconds"].samples
        if each.name.endswith("_count") and (value := each.value)
    }
    assert counts == {
        ("POST", "/v1/chat/completions", "400"): 1,
        ("GET", "/v1/models/{model}", "404"): 2,
        ("GET", "", "404"): 1,
        ("GET", "/readyz", "200"): 1,
        ("_other", "", "405"): 1,
    }


async def test_client_that_leaves_has_no_status(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    asking.cancel()
    await harness.fake.next_cancellation()
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    page = await scrape(harness)
    assert page.by("http_server_request_duration_seconds_count", "http_response_status_code") == {"": 1}


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, 200),
        ({"metrics": "off"}, 404),
        ({"api_keys": ("acme:KEY",)}, 404),
        ({"api_keys": ("acme:KEY",), "metrics": "on"}, 200),
    ],
)
async def test_page_is_at_the_clients_port_where_the_operator_wants_it(settings: dict[str, Any], status: int) -> None:
    async with (
        running_gateway(**settings) as harness,
        measured(harness),
        harness.http.get(f"{harness.url}/metrics", headers={"Authorization": "Bearer KEY"}) as response,
    ):
        assert response.status == status


async def test_gateway_without_metrics_has_no_page(harness: Harness) -> None:
    harness.gateway.server.metrics_page = None
    async with harness.http.get(f"{harness.url}/metrics") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_peers_of_both_encodings_are_measured_alike(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await request.say("a")
    await peer.receive()
    await request.finish()
    await peer.receive()
    assert endings(await scrape(harness)) == {("chat", "completed", ""): 1}
