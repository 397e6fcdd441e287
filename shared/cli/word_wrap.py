"""Breaks the lines of a text between words while it is still coming. Pure: pieces in, what to print out."""

from typing import Final

from rich.cells import cell_len

_SURE_ROOM: Final = 24
"""Columns that nearly every word fits into: with so many left it is shown as it comes, with fewer when it is whole."""
_TAB: Final = 8


class WordWrap:
    """The text so far on a terminal of `width` columns, from the left edge on.

    A word that is longer than a line is left to the terminal, so that an address can still be copied in one piece.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._held: str | None = None
        """The beginning of a word that may have to go to the next line; None if the word is shown as it comes."""
        self._is_in_word = False

    def add(self, text: str) -> str:
        """What can be printed now that `text` has come too."""
        return "".join(map(self._add_character, text))

    def finish(self) -> str:
        """What was held back. The text is over."""
        return self._end_word()

    def _add_character(self, character: str) -> str:
        if character == "\n":
            before, self._column = self._end_word(), 0
            return before + "\n"
        if character in " \t":
            return self._end_word() + self._space(character)
        num_columns = cell_len(character)
        if num_columns > 1:  # scripts without spaces can be broken anywhere
            return self._end_word() + self._place(character, num_columns)
        if not self._is_in_word:
            self._is_in_word = True
            self._held = None if self._column == 0 or self._width - self._column >= _SURE_ROOM else ""
        if self._held is None:
            self._advance(num_columns)
            return character
        self._held += character
        if cell_len(self._held) <= self._width - self._column:
            return ""
        word, self._held, self._column = self._held, None, 0
        self._advance(cell_len(word))
        return "\n" + word

    def _end_word(self) -> str:
        word, self._held, self._is_in_word = self._held or "", None, False
        self._advance(cell_len(word))
        return word

    def _space(self, character: str) -> str:
        num_columns = _TAB - self._column % _TAB if character == "\t" else 1
        if self._column + num_columns < self._width:
            self._column += num_columns
            return character
        self._column = 0
        return "\n"

    def _place(self, character: str, num_columns: int) -> str:
        is_full = self._column + num_columns > self._width
        self._column = num_columns + (0 if is_full else self._column)
        return "\n" + character if is_full else character

    def _advance(self, num_columns: int) -> None:
        """The terminal itself goes on in the next line when one is full."""
        self._column += num_columns
        while self._column > self._width:
            self._column -= self._width
