"""Trace Context as clients send it: what is as the standard says is taken, everything else passed over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import TraceContext
from shared.telemetry import w3c

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_a_good_header_names_trace_span_and_decision() -> None:
    expected = TraceContext(bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID), is_sampled=True)
    assert w3c.parse([GOOD]) == expected
    assert w3c.parse([f" {GOOD}\t"]) == expected, "white space around a header's value means nothing"


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_of_the_flags_only_the_first_bit_says_sampled(flags: str, is_sampled: bool) -> None:
    context = w3c.parse([f"00-{TRACE_ID}-{SPAN_ID}-{flags}"])
    assert context is not None
    assert context.is_sampled is is_sampled


@pytest.mark.parametrize("more", ["", "-", "-what-the-future-holds"])
def test_a_later_version_is_read_as_far_as_it_is_like_the_first(more: str) -> None:
    context = w3c.parse([f"cc-{TRACE_ID}-{SPAN_ID}-01{more}"])
    assert context is not None
    assert context.trace_id.hex() == TRACE_ID


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID}-{SPAN_ID}-01-",
        f"cc-{TRACE_ID}-{SPAN_ID}-01.more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}0-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID}-{SPAN_ID}-xy",
        f"00_{TRACE_ID}_{SPAN_ID}_01",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
        f"00-{TRACE_ID[:-1]}٣-{SPAN_ID}-01",
        f"{GOOD},{GOOD}",
    ],
)
def test_a_bad_header_is_no_header(header: str) -> None:
    assert w3c.parse([header], ["vendor=1"]) is None


def test_two_headers_are_no_header() -> None:
    assert w3c.parse([GOOD, GOOD]) is None
    assert w3c.parse([]) is None


@pytest.mark.parametrize(
    ("headers", "state"),
    [
        ([], ""),
        (["vendor=1"], "vendor=1"),
        (["a=1 , b=2,", "", "c@d=~x y"], "a=1,b=2,c@d=~x y"),
        (["a=" + "x" * 256], "a=" + "x" * 256),
        (["a=" + "x" * 257], ""),
        (["k" * 256 + "=1"], "k" * 256 + "=1"),
        (["k" * 257 + "=1"], ""),
        (["A=1"], ""),
        (["a=1,a=2"], ""),
        (["a"], ""),
        (["a="], ""),
        (["a=b=c"], ""),
        (["a=ü"], ""),
        ([",".join(f"k{number}=1" for number in range(32))], ",".join(f"k{number}=1" for number in range(32))),
        ([",".join(f"k{number}=1" for number in range(33))], ""),
        (["a=" + "x" * 250, "b=" + "x" * 250, "c=" + "x" * 20], ""),
    ],
)
def test_state_is_passed_on_whole_or_not_at_all(headers: list[str], state: str) -> None:
    context = w3c.parse([GOOD], headers)
    assert context is not None
    assert context.state == state


@given(st.text(max_size=80), st.lists(st.text(max_size=600), max_size=3))
def test_whatever_comes_it_is_taken_or_passed_over(header: str, states: list[str]) -> None:
    for text in (header, GOOD[:3] + header, GOOD[:-2] + header):
        context = w3c.parse([text], states)
        assert context is None or (len(context.trace_id), len(context.span_id)) == (16, 8)
        assert context is None or len(context.state) <= 512
