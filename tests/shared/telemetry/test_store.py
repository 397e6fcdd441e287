"""The spans of the latest requests: found by the client's request, bounded in requests and in spans."""

from hypothesis import given
from hypothesis import strategies as st

from shared.ids import RequestId
from shared.telemetry.store import MAX_SPANS_OF_A_REQUEST, SpanStore
from tests.shared.telemetry.spans import request_id, span_of


def _names(store: SpanStore, number: int) -> list[str]:
    kept = store.find(request_id(number))
    return [] if kept is None else [span.name for span in kept.spans]


def test_spans_of_a_request_are_found_in_the_order_they_came() -> None:
    store = SpanStore(10)
    store.add(span_of(1, "queue"))
    store.add(span_of(2, "other"))
    store.add(span_of(1, "decode"))
    assert _names(store, 1) == ["queue", "decode"]
    assert _names(store, 3) == []


def test_the_prompts_of_one_request_are_found_together() -> None:
    store = SpanStore(10)
    first = span_of(1)
    for suffix in ("", "-1", "-2"):
        name = f"queue{suffix}"
        store.add(span_of(1, name).__class__(RequestId(first.request_id + suffix), name, b"", first.context, 1, 2))
    assert _names(store, 1) == ["queue", "queue-1", "queue-2"]


def test_the_owner_is_whoever_was_told_of() -> None:
    store = SpanStore(10)
    store.add(span_of(1))
    kept = store.find(request_id(1))
    assert kept is not None
    assert kept.owner is None
    store.add(span_of(1), "acme")
    store.add(span_of(1))
    assert kept.owner == "acme"


def test_requests_of_which_nothing_was_heard_for_longest_give_way() -> None:
    store = SpanStore(2)
    store.add(span_of(1))
    store.add(span_of(2))
    store.add(span_of(1))
    store.add(span_of(3))
    assert [bool(_names(store, number)) for number in (1, 2, 3)] == [True, False, True]
    assert (store.num_requests, store.num_spans) == (2, 3)


def test_a_store_for_no_requests_keeps_nothing() -> None:
    store = SpanStore(0)
    store.add(span_of(1))
    assert (store.num_requests, store.num_spans) == (0, 0)


def test_one_request_has_a_largest_number_of_spans_and_tells_how_many_were_too_many() -> None:
    store = SpanStore(10)
    for _ in range(MAX_SPANS_OF_A_REQUEST + 3):
        store.add(span_of(1))
    kept = store.find(request_id(1))
    assert kept is not None
    assert (len(kept.spans), kept.num_left_out) == (MAX_SPANS_OF_A_REQUEST, 3)


@given(st.integers(1, 4), st.lists(st.integers(0, 9), max_size=400))
def test_whatever_comes_both_bounds_hold_and_the_latest_request_is_there(max_requests: int, numbers: list[int]) -> None:
    store = SpanStore(max_requests)
    for number in numbers:
        store.add(span_of(number))
        assert store.num_requests <= max_requests
        assert store.num_spans <= max(32 * max_requests, MAX_SPANS_OF_A_REQUEST)
        assert store.num_spans == sum(len(_names(store, each)) for each in range(10))
        assert _names(store, number)
