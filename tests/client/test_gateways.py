"""Which gateway comes next, and when."""

import random

import pytest

from shoal.gateways import Gateways


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://host:1/v1", "http://host:1"),
        ("https://host/mesh/v1/", "https://host/mesh"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_address_is_taken_as_people_write_it(given: str, meant: str) -> None:
    assert Gateways(given).preferred == meant


@pytest.mark.parametrize("given", ["ftp://x", "http://", "", "http://x?y=1", []])
def test_what_is_no_address_is_refused(given: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address"):
        Gateways(given)


def test_next_one_is_preferred_after_a_failure_and_the_first_comes_again_at_the_end() -> None:
    gateways = Gateways(["a:1", "b:1", "c:1"])
    order = []
    for _ in range(4):
        order.append(gateways.preferred)
        gateways.avoid(gateways.preferred)
    assert order == ["http://a:1", "http://b:1", "http://c:1", "http://a:1"]


def test_failure_of_one_that_is_not_preferred_changes_nothing() -> None:
    gateways = Gateways(["a:1", "b:1"])
    gateways.avoid("http://a:1")
    gateways.avoid("http://a:1")
    assert gateways.preferred == "http://b:1"


def test_every_gateway_is_tried_at_once_then_waits_grow_to_a_bound() -> None:
    gateways = Gateways(["a:1", "b:1"], draw=random.Random(1))
    assert [gateways.wait_s(number) for number in (0, 1)] == [0.0, 0.0]
    longest = [max(gateways.wait_s(number) for _ in range(200)) for number in (2, 4, 6, 200)]
    assert longest == sorted(longest)
    assert 0.15 < longest[0] <= 0.2
    assert 4.5 < longest[-1] <= 5.0


def test_clients_that_lost_the_same_gateway_do_not_wait_alike() -> None:
    waits = {Gateways("a:1").wait_s(5) for _ in range(20)}
    assert len(waits) == 20
