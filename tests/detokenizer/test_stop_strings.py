"""The first stop string to be complete ends the text before it, however the text is cut; nothing else is lost."""

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.stop_strings import StopScanner, StopStrings


def scan(stops: Sequence[str], pieces: Iterable[str]) -> tuple[list[str], bool]:
    """What each piece lets through, and at the end the rest; whether a stop string was found."""
    scanner = StopScanner(StopStrings(stops))
    given_out = []
    for piece in pieces:
        given_out.append(scanner.feed(piece))
        if scanner.is_found:
            break
    return [*given_out, scanner.finish()], scanner.is_found


def plainly(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The same by looking at every beginning of the text."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "given_out", "is_found"),
    [
        pytest.param(["END"], ["abc", "def"], ["abc", "def", ""], False, id="no match holds nothing back"),
        pytest.param(["END"], ["abcE"], ["abc", "E"], False, id="a beginning is held and given out at the end"),
        pytest.param(["END"], ["aE", "N", "X"], ["a", "", "ENX", ""], False, id="a beginning that fails is given out"),
        pytest.param(["END"], ["aE", "N", "Db"], ["a", "", "", ""], True, id="across pieces, the rest is dropped"),
        pytest.param(["END"], ["abENDcd"], ["ab", ""], True, id="inside one piece"),
        pytest.param(["END"], ["END"], ["", ""], True, id="nothing before it"),
        pytest.param(["END"], ["EEN", "D"], ["E", "", ""], True, id="a false start just before"),
        pytest.param(["aab"], ["aa", "ab"], ["", "a", ""], True, id="overlaps itself"),
        pytest.param(["x", "yz"], ["ayz", "x"], ["a", ""], True, id="several, the first in the text wins"),
        pytest.param(
            ["abcd", "bc"], ["abcd"], ["a", ""], True, id="the first to be complete wins, not the first begun"
        ),
        pytest.param(["abcd", "bc"], ["ab", "c", "d"], ["", "a", ""], True, id="and so it does cut differently"),
        pytest.param(["b", "ab"], ["xab"], ["x", ""], True, id="complete at once: the first begun wins"),
        pytest.param(["ab", "b"], ["xa", "b"], ["x", "", ""], True, id="in any order of the strings"),
        pytest.param(["abcx", "bcd"], ["abc", "d"], ["", "a", ""], True, id="falls back to a shorter one inside"),
        pytest.param(["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], True, id="line ends"),
        pytest.param(["終わり"], ["これ終", "わ", "り。"], ["これ", "", "", ""], True, id="any script"),
        pytest.param(["👍"], ["ok 👍🏽"], ["ok ", ""], True, id="inside a composed emoji"),
        pytest.param(["", "x"], ["a", "x"], ["a", "", ""], True, id="an empty one matches nothing"),
        pytest.param([""], ["a", "b"], ["a", "b", ""], False, id="only an empty one"),
        pytest.param(["[.]*"], ["a[.", "]", "*"], ["a", "", "", ""], True, id="no patterns"),
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], given_out: list[str], is_found: bool) -> None:
    assert scan(stops, pieces) == (given_out, is_found)


SMALL = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(deadline=None, max_examples=1000)
@given(stops=st.lists(SMALL, min_size=1, max_size=4), pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=8))
def test_the_outcome_is_the_plain_one_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    given_out, is_found = scan(stops, pieces)
    assert ("".join(given_out), is_found) == plainly(stops, "".join(pieces))


@settings(deadline=None, max_examples=500)
@given(stops=st.lists(SMALL, min_size=1, max_size=4), text=st.text(alphabet="abc", max_size=20))
def test_exactly_the_longest_possible_beginning_is_held_back(stops: list[str], text: str) -> None:
    scanner = StopScanner(StopStrings(stops))
    given_out = ""
    for num_read, character in enumerate(text, start=1):
        given_out += scanner.feed(character)
        if scanner.is_found:
            return
        seen = text[:num_read]
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((beginning for beginning in beginnings if seen.endswith(beginning)), key=len)
        assert given_out == seen.removesuffix(held)


def test_many_long_stop_strings_cost_no_more_than_one_short() -> None:
    def seconds(stops: list[str]) -> float:
        scanner, text = StopScanner(StopStrings(stops)), "aaaa" * 500
        started = time.thread_time()
        for start in range(0, len(text), 4):
            scanner.feed(text[start : start + 4])
        return time.thread_time() - started

    one = min(seconds(["ab"]) for _ in range(3))
    many = min(seconds(["a" * n + "b" for n in range(100, 164)]) for _ in range(3))
    assert many < 10 * one + 0.01  # looking for each would make it 64 times as much
