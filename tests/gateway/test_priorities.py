"""Priorities: who may ask for which, and what reaches the mesh."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.config import GatewayConfig
from services.gateway.priorities import NotAllowed, Priorities, parse_priorities
from shared.config import load
from shared.errors import ConfigError
from tests.gateway.harness import CHAT, COMPLETION, Harness, running_gateway
from tests.gateway.peers import Peer, connected

PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("wanted", "given_to_it"), [(None, 0), (0, 0), (1, 1), (100, 100)])
def test_without_settings_everybody_may_step_back(wanted: int | None, given_to_it: int) -> None:
    assert Priorities(()).of("default", wanted) == given_to_it


def test_without_settings_nobody_goes_before_the_others() -> None:
    with pytest.raises(NotAllowed, match="priority must be at least 0 for your key, not -1") as caught:
        Priorities(()).of("default", -1)
    assert (caught.value.status, caught.value.param) == (403, "priority")


@given(best=st.integers(-100, 100), wanted=st.none() | st.integers(-100, 100))
def test_nobody_gets_better_than_the_best_and_the_default_is_as_near_to_0_as_may_be(
    best: int, wanted: int | None
) -> None:
    priorities = Priorities((f"a={best}",))
    if wanted is not None and wanted < best:
        with pytest.raises(NotAllowed):
            priorities.of("a", wanted)
    else:
        assert priorities.of("a", wanted) == (max(best, 0) if wanted is None else wanted)


def test_star_stands_for_all_who_are_not_named() -> None:
    priorities = Priorities(("vip=-50", "*=10"))
    assert priorities.of("vip", -50) == -50
    assert priorities.of("vip", None) == 0
    assert priorities.of("other", None) == 10
    with pytest.raises(NotAllowed):
        priorities.of("other", 9)


@pytest.mark.parametrize("pair", ["a", "a=", "=1", "a=high", "a=1.5", "a=-101", "a=101", ""])
def test_malformed_setting_is_named(pair: str) -> None:
    with pytest.raises(ValueError, match=r"best_priorities: .* is not tenant=priority"):
        parse_priorities((pair,))


def test_tenant_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="best_priorities: 'a' is there twice"):
        parse_priorities(("a=1", "b=1", "a=2"))


def test_setting_is_read_and_checked_at_the_start() -> None:
    config = load(GatewayConfig, {"SHOAL_GATEWAY_BEST_PRIORITIES": "vip=-50, *=5"})
    assert config.best_priorities == ("vip=-50", "*=5")
    with pytest.raises(ConfigError, match="SHOAL_GATEWAY_BEST_PRIORITIES='vip=first'"):
        load(GatewayConfig, {"SHOAL_GATEWAY_BEST_PRIORITIES": "vip=first"})


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize(
    ("fields", "expected"), [({}, (0, None)), ({"priority": 7, "timeout_ms": 1500}, (7, 1500))], ids=["none", "both"]
)
async def test_priority_and_timeout_reach_the_mesh(
    harness: Harness, path: str, body: dict[str, Any], fields: dict[str, Any], expected: tuple[int, int | None]
) -> None:
    _, request = await harness.open_stream(body | fields, path)
    assert (request.message.priority, request.message.timeout_ms) == expected
    await request.finish()
    await harness.nothing_is_left()


async def test_priority_and_timeout_of_a_request_on_a_socket_reach_the_mesh(harness: Harness, peer: Peer) -> None:
    for body in (CHAT, COMPLETION):
        request = await peer.create(harness, body=body | {"priority": 7, "timeout_ms": 1500})
        assert (request.message.priority, request.message.timeout_ms) == (7, 1500)
        await request.finish()
        assert (await peer.receive())["type"] == "request.completed"


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_better_priority_than_allowed_is_a_403_that_the_mesh_never_sees(
    harness: Harness, path: str, body: dict[str, Any]
) -> None:
    async with harness.post(path, body | {"priority": -1}) as response:
        assert response.status == 403
        error = (await response.json())["error"]
    assert (error["type"], error["code"], error["param"]) == ("permission_error", "not_allowed", "priority")
    assert harness.fake.submissions.empty()
    assert len(harness.mesh.requests) == 0


async def test_better_priority_than_allowed_fails_a_request_on_a_socket(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": CHAT | {"priority": -1}})
    failed = await peer.receive()
    assert (failed["type"], failed["id"]) == ("request.failed", "a")
    assert (failed["error"]["code"], failed["error"]["param"]) == ("not_allowed", "priority")
    await peer.create(harness, "a")


async def test_key_decides_what_may_be_asked_for() -> None:
    async with running_gateway(
        api_keys=("vip:first", "batch:last"), best_priorities=("vip=-50", "batch=20")
    ) as harness:
        for key, wanted, expected in (("first", -50, -50), ("first", None, 0), ("last", None, 20), ("last", 30, 30)):
            async with connected(harness, "shoal.v1.json", headers=authorized(key)) as peer:
                request = await peer.create(harness, body=CHAT | {"priority": wanted})
                assert request.message.priority == expected
                await request.finish()
                await peer.receive()
        async with harness.post(PATHS[0][0], CHAT | {"priority": 0}, headers=authorized("last")) as response:
            assert response.status == 403
            assert "at least 20" in (await response.json())["error"]["message"]
