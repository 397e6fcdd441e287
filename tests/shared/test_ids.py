"""Identifiers: fresh, unguessable, and saying what they name."""

import re

import pytest

from shared.ids import Service, is_instance_id, new_instance_id, new_request_id, new_seed


def test_request_ids_carry_128_bits_and_are_never_the_same() -> None:
    ids = {new_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"req-[0-9a-f]{32}", request_id) for request_id in ids)


@pytest.mark.parametrize("service", Service)
def test_instance_ids_start_with_the_service(service: Service) -> None:
    one, other = new_instance_id(service), new_instance_id(service)
    assert one != other
    assert re.fullmatch(rf"{service}-[0-9a-f]{{8}}", one)
    assert is_instance_id(one, service)


@pytest.mark.parametrize(
    "text", ["", "gateway", "gateway-1", "executor-0123abcd", "gateway-0123abcd\n", "gateway-0123.bcd"]
)
def test_other_texts_are_no_instance_ids_of_a_gateway(text: str) -> None:
    assert not is_instance_id(text, Service.GATEWAY)


def test_seeds_use_all_63_bits() -> None:
    seeds = [new_seed() for _ in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):  # 1000 coin tosses: fewer than 350 heads has a probability of about 1e-21
        assert 350 < sum(seed >> bit & 1 for seed in seeds) < 650


def test_there_are_five_services() -> None:
    assert [str(service) for service in Service] == ["gateway", "tokenizer", "scheduler", "executor", "detokenizer"]
