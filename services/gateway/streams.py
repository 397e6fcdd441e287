"""What has been said: the append-only log of each open request, and readers that follow it from their own places.

A reader that is slow finds more at its next look, as one longer piece; nobody waits for it, and what is kept is bounded
by the request's own output. Owns the logs. Does not own deadlines, nor what is sent to the mesh (`requests`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.ids import RequestId
from shared.messages import (
    ChoiceText,
    ErrorInfo,
    FinishReason,
    Int32Array,
    Outcome,
    TextLogprobs,
    Timing,
    Usage,
    int32s,
)


class OutputGap(Exception):
    """A piece arrived whose predecessor never did."""


class LogprobsLost(Exception):
    """Log-probabilities of earlier tokens are missing, and nobody has them any more."""


@dataclass(frozen=True, slots=True)
class End:
    """The terminal event of one request; the last thing in its log."""

    outcome: Outcome
    usage: Usage | None = None
    """None if the mesh never said, and nothing has come of it."""
    timing: Timing = Timing()
    error: ErrorInfo | None = None
    """Set if and only if it failed."""


class ChoiceLog:
    """Everything that one choice has said so far."""

    __slots__ = ("finish_reason", "logprobs", "num_chars", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.num_chars = 0
        self.token_ids = int32s()
        self.logprobs: list[TextLogprobs] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All of it in one piece."""
        return "".join(self.texts)

    def append(self, piece: ChoiceText) -> None:
        """Take in what `piece` has that is new.

        Raises OutputGap if it begins after the end of what is known, and LogprobsLost if its log-probabilities do;
        both change nothing.
        """
        if self.finish_reason is not None:
            return
        num_known_tokens = len(self.token_ids) - piece.token_offset
        num_known_chars = self.num_chars - piece.char_offset
        if num_known_tokens < 0 or num_known_chars < 0:
            raise OutputGap
        logprobs: Sequence[TextLogprobs] = ()
        if piece.logprobs:
            num_known = len(self.logprobs) - (piece.token_offset + len(piece.token_ids) - len(piece.logprobs))
            if num_known < 0:
                raise LogprobsLost
            logprobs = piece.logprobs[num_known:]
        text = piece.text[num_known_chars:] if num_known_chars else piece.text
        if text:
            self.texts.append(text)
            self.num_chars += len(text)
        self.token_ids.extend(piece.token_ids[num_known_tokens:] if num_known_tokens else piece.token_ids)
        self.logprobs.extend(logprobs)
        self.finish_reason = piece.finish_reason


class Stream:
    """The log of one request: accepted, the text of its choices, and its end."""

    def __init__(self, request_id: RequestId, num_choices: int) -> None:
        self.request_id = request_id
        self.choices = [ChoiceLog() for _ in range(num_choices)]
        self.is_accepted = False
        self.end: End | None = None
        self.num_told = 0
        """Deltas that readers took: of this request, and of those that belong to the same client request."""
        self.first_told_ns = 0
        """When they took the first, in nanoseconds since 1970."""
        self._readers: list[Reader] = []

    def accept(self) -> None:
        """Note that the mesh has taken the request."""
        if not self.is_accepted and self.end is None:
            self.is_accepted = True
            for reader in self._readers:
                reader.notify()

    def append(self, piece: ChoiceText) -> None:
        """Add text to a choice; nothing is added after the end. Raises what `ChoiceLog.append` raises."""
        if self.end is not None:
            return
        self.choices[piece.index].append(piece)
        for reader in self._readers:
            if reader.wants_text:
                reader.notify()

    def close(self, end: End) -> bool:
        """Add the terminal event. False if there was one already: the first stands."""
        if self.end is not None:
            return False
        self.end = end
        for reader in self._readers:
            reader.notify()
        return True

    def told(self, num_deltas: int) -> None:
        """Note that a reader took so many deltas."""
        if not self.num_told:
            self.first_told_ns = time.time_ns()
        self.num_told += num_deltas

    def attach(self, reader: "Reader") -> None:
        """Have `reader` told of what is new."""
        self._readers.append(reader)

    def detach(self, reader: "Reader") -> None:
        """Tell `reader` nothing more."""
        if reader in self._readers:
            self._readers.remove(reader)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice since a reader last looked: some text, or the finish reason, or both."""

    index: int
    offset: int
    """Of `text`, in characters."""
    text: str
    token_offset: int
    """Of `token_ids`, in tokens."""
    token_ids: Int32Array
    """Tokens whose text came with, or before, `text`."""
    logprobs: Sequence[TextLogprobs]
    finish_reason: FinishReason | None


class _Place:
    """How far a reader has come in one choice."""

    __slots__ = ("_has_finished", "_index", "_log", "_num_chars", "_num_texts", "_num_tokens")

    def __init__(self, index: int, log: ChoiceLog) -> None:
        self._index = index
        self._log = log
        self._num_texts = 0
        self._num_chars = 0
        self._num_tokens = 0
        self._has_finished = False

    def take(self) -> Delta | None:
        log = self._log
        finishes = log.finish_reason is not None and not self._has_finished
        if len(log.texts) == self._num_texts and not finishes:
            return None  # tokens without text wait for the text that they become
        texts = log.texts[self._num_texts :]
        delta = Delta(
            index=self._index,
            offset=self._num_chars,
            text=texts[0] if len(texts) == 1 else "".join(texts),
            token_offset=self._num_tokens,
            token_ids=log.token_ids[self._num_tokens :],
            logprobs=log.logprobs[self._num_tokens :] if log.logprobs else (),
            finish_reason=log.finish_reason,
        )
        self._num_texts = len(log.texts)
        self._num_chars = log.num_chars
        self._num_tokens = len(log.token_ids)
        self._has_finished = finishes
        return delta


class Reader:
    """One consumer's places in the logs of one client request, which may be several requests to the mesh."""

    def __init__(self, streams: Sequence[Stream], notify: Callable[[], None], *, wants_text: bool = True) -> None:
        """`notify` is called whenever there may be something new: of text only if `wants_text`, of the rest always."""
        self.streams = streams
        self.notify = notify
        self.wants_text = wants_text
        logs = [log for stream in streams for log in stream.choices]
        self._places = [_Place(index, log) for index, log in enumerate(logs)]
        for stream in streams:
            stream.attach(self)

    @property
    def is_accepted(self) -> bool:
        """Whether the mesh has taken all of it, or is already through with it."""
        return all(stream.is_accepted or stream.end is not None for stream in self.streams)

    @property
    def is_over(self) -> bool:
        """Whether all of it has ended."""
        return all(stream.end is not None for stream in self.streams)

    @property
    def failure(self) -> End | None:
        """How it failed or was cancelled, if any part of it was: then nothing is worth waiting for."""
        for stream in self.streams:
            if stream.end is not None and stream.end.outcome is not Outcome.COMPLETED:
                return stream.end
        return None

    @property
    def refusal(self) -> End | None:
        """How it ended, if it did before there was anything to tell."""
        return self.failure

    def take(self) -> list[Delta]:
        """Everything that is new since the last call, at most one delta a choice, by index."""
        deltas = [delta for place in self._places if (delta := place.take()) is not None]
        if deltas:
            self.streams[0].told(len(deltas))
        return deltas

    def close(self) -> None:
        """Be told of nothing more."""
        for stream in self.streams:
            stream.detach(self)


def total_usage(streams: Sequence[Stream]) -> Usage:
    """What all these requests consumed together, as far as the mesh has said."""
    usages = [stream.end.usage for stream in streams if stream.end is not None and stream.end.usage is not None]
    return Usage(
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
        num_output_tokens=tuple(count for usage in usages for count in usage.num_output_tokens),
    )
