"""Moments by which requests have to have ended: told of once, forgotten when they end, and never hoarded."""

import hypothesis.strategies as st
from hypothesis import given

from services.scheduler.deadlines import Deadlines
from shared.ids import RequestId


def test_each_is_told_of_once_when_its_moment_has_come_earliest_first() -> None:
    deadlines = Deadlines()
    for name, moment in (("late", 9.0), ("soon", 1.0), ("later", 10.0)):
        deadlines.set(RequestId(name), moment)
    assert deadlines.passed(0.9) == []
    assert deadlines.passed(9.0) == ["soon", "late"]
    assert deadlines.passed(9.0) == []
    assert len(deadlines) == 1


def test_a_request_that_ended_is_not_told_of() -> None:
    deadlines = Deadlines()
    deadlines.set(RequestId("r"), 1.0)
    deadlines.discard(RequestId("r"))
    deadlines.discard(RequestId("unknown"))
    assert deadlines.passed(2.0) == []


def test_a_moment_set_again_replaces_the_first() -> None:
    deadlines = Deadlines()
    deadlines.set(RequestId("r"), 1.0)
    deadlines.set(RequestId("r"), 5.0)
    assert deadlines.passed(4.0) == []
    assert deadlines.passed(5.0) == ["r"]


def test_requests_that_ended_long_before_their_moment_take_no_room() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(RequestId(f"r{number}"), 1e9)
        deadlines.discard(RequestId(f"r{number}"))
    assert len(deadlines._heap) <= 200


@given(
    st.lists(st.tuples(st.sampled_from(["set", "discard", "pass"]), st.integers(0, 5), st.integers(0, 9)), max_size=200)
)
def test_any_sequence_tells_what_a_table_would(moves: list[tuple[str, int, int]]) -> None:
    deadlines, table, now = Deadlines(), dict[RequestId, float](), 0.0
    for move, number, moment in moves:
        request_id = RequestId(str(number))
        if move == "set":
            deadlines.set(request_id, now + moment)
            table[request_id] = now + moment
        elif move == "discard":
            deadlines.discard(request_id)
            table.pop(request_id, None)
        else:
            now += moment
            late = {each for each, due in table.items() if due <= now}
            told = deadlines.passed(now)
            assert len(told) == len(set(told))
            assert set(told) == late
            for each in late:
                del table[each]
        assert len(deadlines) == len(table)
