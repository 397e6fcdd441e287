"""API keys: how they are configured and what opens the gateway."""

import hashlib

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.keys import Caller, Keys, parse_keys
from shared.config import describe, load
from shared.errors import ConfigError, Unauthorized


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert Keys(()).caller({}) == Caller("default", "")
    assert Keys(()).caller({"Authorization": "Bearer whatever"}) == Caller("default", "")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_key_gives_its_tenant(scheme: str) -> None:
    keys = Keys(("acme:one", "acme:two", "zenith:three:with:colons"))
    assert keys.caller({"Authorization": f"{scheme} one"}).tenant == "acme"
    assert keys.caller({"Authorization": f"{scheme} two"}).tenant == "acme"
    assert keys.caller({"Authorization": f"{scheme}  three:with:colons "}).tenant == "zenith"
    assert keys.caller({"Sec-WebSocket-Protocol": "shoal.v1.json, shoal.key.two"}).tenant == "acme"


def test_owner_is_the_key_and_not_the_tenant_and_does_not_show_it() -> None:
    keys = Keys(("acme:one", "acme:two"))
    by_header = keys.caller({"Authorization": "Bearer one"})
    assert keys.caller({"Sec-WebSocket-Protocol": "shoal.v1.json, shoal.key.one"}) == by_header
    assert by_header.owner == hashlib.sha256(b"one").hexdigest()
    assert keys.caller({"Authorization": "Bearer two"}).owner != by_header.owner


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer on"},
        {"Authorization": "Bearer one2"},
        {"Authorization": "Bearer acme:one"},
        {"Authorization": "Bearer \udcff"},
        {"Authorization": "one"},
        {"Sec-WebSocket-Protocol": "shoal.v1.json"},
        {"Sec-WebSocket-Protocol": "shoal.key."},
        {"Sec-WebSocket-Protocol": "one"},
    ],
)
def test_anything_else_is_unauthorized(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        Keys(("acme:one",)).caller(headers)


@pytest.mark.parametrize("entries", [["secret"], [":secret"], ["acme:"], ["acme:secret", "zenith:secret"]])
def test_malformed_entry_is_an_error_that_shows_no_key(entries: list[str]) -> None:
    with pytest.raises(ValueError, match="api_keys") as caught:
        parse_keys(entries)
    assert "secret" not in str(caught.value)


def test_configuration_with_a_malformed_key_names_the_variable_and_hides_the_key() -> None:
    with pytest.raises(ConfigError, match="SHOAL_GATEWAY_") as caught:
        load(GatewayConfig, {"SHOAL_GATEWAY_API_KEYS": "acme:one,verysecret"})
    assert "verysecret" not in str(caught.value)


def test_keys_are_read_from_the_environment_and_hidden_in_the_log() -> None:
    config = load(GatewayConfig, {"SHOAL_GATEWAY_API_KEYS": "acme:one, zenith:two"})
    assert config.api_keys == ("acme:one", "zenith:two")
    assert "one" not in describe(config)["SHOAL_GATEWAY_API_KEYS"]
