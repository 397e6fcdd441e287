"""Lines of a terminal end between words, whatever the pieces that a text comes in."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.cells import cell_len

from shared.cli.word_wrap import WordWrap

_TEXTS = st.text(st.sampled_from("abc日🐟\u0301 \t\n"), max_size=200)


def _wrapped(text: str, width: int) -> str:
    wrap = WordWrap(width)
    return wrap.add(text) + wrap.finish()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two ", "three"]),
        ("one two thr", ["one two thr"]),
        ("one two\nthree", ["one two", "three"]),
        ("aaaa bbbbbb ccccc", ["aaaa bbbbbb", "ccccc"]),
        ("a 日本語日本語", ["a 日本語日", "本語"]),
        ("x\n\n  - item", ["x", "", "  - item"]),
    ],
)
def test_lines_end_between_words(text: str, lines: list[str]) -> None:
    assert _wrapped(text, 11).split("\n") == lines


def test_a_word_longer_than_a_line_stays_in_one_piece() -> None:
    address = "https://example.org/a/very/long/address"
    assert _wrapped(f"see {address} there", 20) == f"see \n{address}\nthere"


def test_words_are_shown_as_they_come_while_there_is_room() -> None:
    wrap = WordWrap(80)
    assert [wrap.add(piece) for piece in ("On and", " o", "n")] == ["On and", " o", "n"]


def test_at_the_end_of_a_line_a_word_waits_until_it_is_whole() -> None:
    wrap = WordWrap(30)
    assert [wrap.add(piece) for piece in ("12345 ab", "cd", " lett", "ers, ")] == ["12345 ab", "cd", " ", "letters, "]
    assert [wrap.add(piece) for piece in ("over", "flow", "ing", " it")] == ["", "", "\noverflowing", " "]
    assert [wrap.add(" is"), wrap.finish()] == ["it ", "is"]


@given(_TEXTS, st.integers(8, 40), st.lists(st.integers(1, 20)))
def test_how_a_text_is_cut_into_pieces_changes_nothing(text: str, width: int, sizes: list[int]) -> None:
    wrap, rest, printed = WordWrap(width), text, ""
    for size in sizes:
        printed += wrap.add(rest[:size])
        rest = rest[size:]
    assert printed + wrap.add(rest) + wrap.finish() == _wrapped(text, width)


@given(_TEXTS, st.integers(8, 40))
def test_only_white_space_changes_and_no_line_is_too_wide_but_for_long_words(text: str, width: int) -> None:
    wrapped = _wrapped(text, width)
    assert "".join(wrapped.split()) == "".join(text.split())
    for line in wrapped.split("\n"):
        assert _num_columns(line) <= width or max(map(cell_len, line.split())) > width


def _num_columns(line: str) -> int:
    first, *others = line.split("\t")
    num_columns = cell_len(first)
    for other in others:
        num_columns += 8 - num_columns % 8 + cell_len(other)
    return num_columns
