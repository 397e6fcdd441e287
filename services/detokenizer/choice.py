"""One choice of a request: how far its log and its text have come, and what is held back.

Token ids travel with the text that they led to: those that led to none yet, because a character is unfinished, a stop
string may be completing or the token is special, wait for the next text or the end, but not more than 32 of them: what
has no text yet shows that the choice goes on. So every event covers the log from where the last one ended.

Log-probabilities that nobody knows any more, because a scheduler was lost and they were too many to travel, are those
of the log's first tokens. So those of an event belong to its last tokens.
"""

from typing import Final

from services.detokenizer.incremental import TextDecoder
from services.detokenizer.logprobs import LogprobTexts
from services.detokenizer.stop_strings import StopScanner
from shared.ids import RequestId
from shared.messages import ChoiceText, ChoiceTokens, FinishReason, Int32Array, TextLogprobs, TokenLogprobs, int32s

_MAX_HELD_TOKENS: Final = 32
"""Tokens that led to no text yet are told of when there are so many."""


class LogGap(Exception):
    """Entries of a log are missing: the one that came does not go on where the last one ended."""


class Choice:
    """Takes entries of a log and gives events. Knows nothing of who is told."""

    __slots__ = (
        "_attempt",
        "_decoder",
        "_held_ids",
        "_held_logprobs",
        "_index",
        "_num_sent_chars",
        "_num_sent_tokens",
        "_request_id",
        "_scanner",
        "_texts",
        "is_finished",
        "num_tokens",
    )

    def __init__(
        self,
        request_id: RequestId,
        index: int,
        decoder: TextDecoder,
        scanner: StopScanner | None,
        texts: LogprobTexts,
        *,
        attempt: int = 1,
    ) -> None:
        self._request_id = request_id
        self._attempt = attempt
        self._index = index
        self._decoder = decoder
        self._scanner = scanner
        self._texts = texts
        self._held_ids = int32s()
        self._held_logprobs: list[TokenLogprobs] = []
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self.num_tokens = 0
        """Entries of the log taken so far; with a stop string, up to the token that completed it."""
        self.is_finished = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._scanner is not None and self._scanner.is_found

    def take(self, entry: ChoiceTokens) -> ChoiceText | None:
        """What the entry adds. What is known already, or comes after a stop string or the end, is passed over.

        Raises LogGap, and changes nothing, if entries before this one are missing.
        """
        if self.is_finished:
            return None
        text = "" if self.is_stopped else self._decode_new(entry)
        if entry.finish_reason is not None:
            return self._finish(text, entry.finish_reason)
        return self._event(text, None) if text or len(self._held_ids) >= _MAX_HELD_TOKENS else None

    def close(self) -> ChoiceText | None:
        """What is left when the request ends before this choice had its last entry, if anything is."""
        if self.is_finished:
            return None
        event = self._finish("", FinishReason.STOP if self.is_stopped else None)
        return event if event.text or event.token_ids or event.finish_reason else None

    def _decode_new(self, entry: ChoiceTokens) -> str:
        num_known = self.num_tokens - entry.offset
        if num_known < 0:
            raise LogGap
        token_ids, logprobs = entry.token_ids, entry.logprobs
        if num_known:
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        text, num_read = self._decode(token_ids)
        self.num_tokens += num_read
        self._held_ids.extend(token_ids[:num_read] if num_read < len(token_ids) else token_ids)
        self._held_logprobs += [logprob for logprob in logprobs[:num_read] if logprob is not None]
        return text

    def _decode(self, token_ids: Int32Array) -> tuple[str, int]:
        """The new text, and how many tokens it took: with stop strings, only up to the one that completed one."""
        if self._scanner is None:
            return self._decoder.push(token_ids), len(token_ids)
        texts = []
        for num_read, token_id in enumerate(token_ids, start=1):
            texts.append(self._scanner.feed(self._decoder.push((token_id,))))
            if self._scanner.is_found:
                return "".join(texts), num_read
        return "".join(texts), len(token_ids)

    def _finish(self, text: str, reason: FinishReason | None) -> ChoiceText:
        self.is_finished = True
        if not self.is_stopped:
            rest = self._decoder.finish()
            if self._scanner is None:
                text += rest
            else:
                text += self._scanner.feed(rest)
                text += self._scanner.finish()
        return self._event(text, FinishReason.STOP if self.is_stopped else reason)

    def _event(self, text: str, reason: FinishReason | None) -> ChoiceText:
        token_ids, self._held_ids = self._held_ids, int32s()
        logprobs: tuple[TextLogprobs, ...] = ()
        if self._held_logprobs:
            logprobs = tuple(map(self._texts.of, token_ids[-len(self._held_logprobs) :], self._held_logprobs))
            self._held_logprobs = []
        event = ChoiceText(
            self._request_id,
            self._index,
            self._num_sent_tokens,
            token_ids,
            self._num_sent_chars,
            text,
            reason,
            logprobs,
            self._attempt,
        )
        self._num_sent_tokens += len(token_ids)
        self._num_sent_chars += len(text)
        return event
