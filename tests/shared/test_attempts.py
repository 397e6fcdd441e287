"""Numbers of attempts: in order, and never the same for two."""

from hypothesis import given
from hypothesis import strategies as st

from shared import attempts
from shared.ids import InstanceId, Service, new_instance_id

GATEWAYS = [new_instance_id(Service.GATEWAY) for _ in range(4)]
COUNTS = st.integers(0, 30_000)


def test_the_first_gateway_counts_from_one() -> None:
    assert attempts.FIRST == 1


@given(st.lists(st.tuples(st.sampled_from(GATEWAYS), COUNTS), min_size=1, max_size=1000), COUNTS)
def test_an_adoption_comes_after_everything_that_the_gateway_before_could_reach(
    adoptions: list[tuple[InstanceId, int]], num_more: int
) -> None:
    seen = attempts.FIRST
    for gateway_id, count in adoptions:
        adopted = attempts.after_adoption(seen, gateway_id)
        assert adopted > seen + num_more
        assert adopted + count < 2**63, "every msgpack library can carry it"
        seen = adopted + count


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_two_gateways_that_adopt_what_two_schedulers_have_never_say_the_same(
    seen_by_one: int, seen_by_other: int, count: int, other_count: int
) -> None:
    one, other, *_ = GATEWAYS
    first = attempts.after_adoption(attempts.FIRST + seen_by_one, one) + count
    second = attempts.after_adoption(attempts.FIRST + seen_by_other, other) + other_count
    assert first != second


def test_the_next_adoption_beats_all_that_were_made_at_once() -> None:
    at_once = [attempts.after_adoption(1, gateway_id) for gateway_id in GATEWAYS]
    assert len(set(at_once)) == len(at_once)
    assert attempts.after_adoption(min(at_once), GATEWAYS[0]) > max(at_once)
