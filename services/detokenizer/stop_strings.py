"""Finding stop strings in text that arrives in pieces, without looking at any of it twice.

The stop strings of a request are one automaton (Aho and Corasick, 1975). Its state after a text is the longest end of
that text which could begin a stop string: exactly what must be held back. The match found is the one that is complete
first; of several complete at the same character, the one that began first. So the outcome depends on the text alone and
not on how it was cut into tokens or messages.
"""

import re
from collections import deque
from collections.abc import Iterable
from functools import lru_cache


class StopStrings:
    """The stop strings of a request; immutable, shared by all its choices."""

    def __init__(self, strings: Iterable[str]) -> None:
        """Empty strings are left out."""
        self.transitions: list[dict[str, int]] = [{}]
        """For each state, the next one for each character; any other character leads to state 0."""
        self.depths = [0]
        """For each state, how many characters of some stop string the text ends with."""
        self.match_lengths = [0]
        """For each state, the length of the longest stop string that the text ends with, or 0."""
        for string in strings:
            if string:
                self._insert(string)
        self.starts = re.compile("|".join(map(re.escape, self.transitions[0])) or "(?!)")
        """Matches the first character of any stop string."""
        self._complete()

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self.transitions[state]:
                self.transitions[state][character] = len(self.transitions)
                self.transitions.append({})
                self.depths.append(self.depths[state] + 1)
                self.match_lengths.append(0)
            state = self.transitions[state][character]
        self.match_lengths[state] = len(string)

    def _complete(self) -> None:
        """Give each state the transitions and matches of the longest proper end of its text, shallow states first."""
        fallbacks = deque((child, 0) for child in self.transitions[0].values())
        while fallbacks:
            state, fallback = fallbacks.popleft()
            for character, child in self.transitions[state].items():
                fallbacks.append((child, self.transitions[fallback].get(character, 0)))
            self.transitions[state] = self.transitions[fallback] | self.transitions[state]
            self.match_lengths[state] = max(self.match_lengths[state], self.match_lengths[fallback])


@lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings; requests often share them."""
    return StopStrings(strings)


class StopScanner:
    """One choice's search."""

    __slots__ = ("_held", "_state", "_strings", "is_found")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        """The text that is certain to come before any stop string.

        Once a stop string is complete, `is_found` is true, the text ends before it, and what follows it is dropped.
        Nothing may be fed afterwards.
        """
        strings = self._strings
        if not self._state and strings.starts.search(text) is None:
            return text
        state, transitions, match_lengths = self._state, strings.transitions, strings.match_lengths
        for num_read, character in enumerate(text, start=1):
            state = transitions[state].get(character, 0)
            if match_lengths[state]:
                self.is_found = True
                whole, self._held = self._held + text[:num_read], ""
                return whole[: -match_lengths[state]]
        self._state = state
        whole = self._held + text
        num_certain = len(whole) - strings.depths[state]
        self._held = whole[num_certain:]
        return whole[:num_certain]

    def finish(self) -> str:
        """The text that was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held
