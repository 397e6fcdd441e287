"""NATS subjects: any name becomes exactly one token, and different names different tokens."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared import subjects
from shared.ids import InstanceId, Service, new_instance_id
from shared.transport.memory import matches

_TOKEN = re.compile(r"[A-Za-z0-9_%-]+")
NAMES = st.text(st.characters(), max_size=20)


def test_the_subjects_are_these() -> None:
    assert subjects.PRESENCE == "shoal.v1.presence.*"
    assert subjects.presence(Service.EXECUTOR) == "shoal.v1.presence.executor"
    assert subjects.USAGE == "shoal.v1.usage"
    assert subjects.ADOPTIONS == "shoal.v1.adoptions"
    assert subjects.tokenize("smollm2-135m") == "shoal.v1.tokenize.smollm2-135m"
    assert subjects.inbox(InstanceId("executor-1f0c9a7e")) == "shoal.v1.executor.1f0c9a7e.inbox"


@pytest.mark.parametrize(
    ("name", "token"),
    [("a.b", "a%2Eb"), ("org/name", "org%2Fname"), ("a b", "a%20b"), ("*", "%2A"), (">", "%3E"), ("é", "%C3%A9")],
)
def test_what_nats_gives_a_meaning_to_is_escaped(name: str, token: str) -> None:
    assert subjects.tokenize(name) == f"shoal.v1.tokenize.{token}"


@given(NAMES)
@example("")
@example("\ud800")
@example("a\r\nPUB x 0")
def test_any_model_name_is_one_valid_token(name: str) -> None:
    tokens = subjects.tokenize(name).split(".")
    assert len(tokens) == 4
    assert all(_TOKEN.fullmatch(token) for token in tokens)


@given(NAMES)
@example("")
@example("-")
@example("a.*-b c")
def test_any_instance_id_even_a_forged_one_gives_a_valid_inbox(instance_id: str) -> None:
    tokens = subjects.inbox(InstanceId(instance_id)).split(".")
    assert len(tokens) == 5
    assert all(_TOKEN.fullmatch(token) for token in tokens)


@given(NAMES, NAMES)
@example("", "%")
@example("%2E", ".")
@example("a-b", "a_b")
def test_different_models_have_different_subjects(one: str, other: str) -> None:
    assert (subjects.tokenize(one) == subjects.tokenize(other)) == (one == other)


@given(st.sampled_from(Service), st.sampled_from(Service), NAMES, NAMES)
def test_different_instances_have_different_inboxes(a: Service, b: Service, one: str, other: str) -> None:
    first, second = InstanceId(f"{a}-{one}"), InstanceId(f"{b}-{other}")
    assert (subjects.inbox(first) == subjects.inbox(second)) == (first == second)


@pytest.mark.parametrize("service", Service)
def test_one_pattern_hears_the_beats_of_every_service_and_nothing_else(service: Service) -> None:
    assert matches(subjects.PRESENCE, subjects.presence(service))
    assert not matches(subjects.PRESENCE, subjects.inbox(new_instance_id(service)))
    assert not matches(subjects.PRESENCE, subjects.tokenize(service))
