"""Going on with a request where its client left off: finding it, and telling only what the client does not have.

A resumed stream is read from its beginning and what the client has is cut off, so it does not matter whether the log
was here all the time or is only just being said again. Owns offsets. Does not own the logs (`streams`), nor who may
resume what (`Mesh.resume`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from services.gateway.presentation import Presentation
from services.gateway.streams import ChoiceLog, Delta, End, Reader, Stream
from services.gateway.validation import MAX_INT32, check_range
from shared.errors import InvalidRequest, UnsupportedField
from shared.ids import RequestId
from shared.messages import ErrorInfo, Outcome

_MAX_DIGITS: Final = 10

Count = int | Sequence[int]
"""As clients say it: of the first choice, or of each choice in order. What is not said is 0."""


class Resumed(Protocol):
    """One request to the mesh that was found again."""

    @property
    def stream(self) -> Stream:
        """Its log, which may still be on its way here."""
        ...

    @property
    def client(self) -> bytes:
        """What the gateway at which it began has packed of its presentation."""
        ...

    @property
    def num_tokens(self) -> Sequence[int]:
        """For each choice, how many tokens there are for certain, whether they have arrived here or not."""
        ...


class Finder(Protocol):
    """What knows of requests, here and elsewhere."""

    async def resume(self, request_id: RequestId, owner: str) -> Resumed:
        """Find one request to the mesh. Raises NotFound."""
        ...


@dataclass(frozen=True, slots=True)
class Offsets:
    """What a client has of each choice."""

    chars: tuple[int, ...]
    tokens: tuple[int, ...]

    @staticmethod
    def of(chars: Count, tokens: Count, num_choices: int) -> "Offsets":
        """The offsets of a request with so many choices. Raises InvalidRequest if there are more than these."""
        return Offsets(_padded(chars, "offset", num_choices), _padded(tokens, "token_offset", num_choices))


def check_count(count: Count, param: str) -> None:
    """Raises InvalidRequest for what is not a number of anything."""
    for number in [count] if isinstance(count, int) else count:
        check_range(number, param, 0, MAX_INT32)


def counts_in(query: Mapping[str, str]) -> tuple[Count, Count]:
    """`offset` and `token_offset` of a query, each a number, or one for each choice with commas between them.

    Raises InvalidRequest that names what is none, or is no parameter.
    """
    for name in query:
        if name not in ("offset", "token_offset"):
            raise UnsupportedField(f"{name[:100]} is an unknown parameter.", param=name[:100])
    return _count_in(query.get("offset", "0"), "offset"), _count_in(query.get("token_offset", "0"), "token_offset")


def _count_in(text: str, param: str) -> Count:
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS for number in numbers):
        raise InvalidRequest(f"{param} must be a whole number, or several with commas between them.", param=param)
    return [int(number) for number in numbers]


def _padded(count: Count, param: str, num_choices: int) -> tuple[int, ...]:
    given = [count] if isinstance(count, int) else count
    if len(given) > num_choices:
        raise InvalidRequest(f"{param} has {len(given)} numbers, and the request {num_choices} choices.", param=param)
    return (*given, *[0] * (num_choices - len(given)))


@dataclass(frozen=True, slots=True)
class Resumption:
    """A client request that was found again, and where to go on with it."""

    streams: Sequence[Stream]
    presentation: Presentation
    offsets: Offsets
    num_tokens: tuple[int, ...]

    def read(self, notify: Callable[[], None]) -> Reader:
        """A reader of what the client does not have."""
        return ResumedReader(self.streams, notify, self.offsets, self.num_tokens)


async def find(finder: Finder, request_id: str, owner: str, *, chars: Count, tokens: Count = 0) -> Resumption:
    """The client request `request_id` of `owner`. Raises NotFound, InvalidRequest for its offsets, or Unavailable."""
    check_count(chars, "offset")
    check_count(tokens, "token_offset")
    first = await finder.resume(RequestId(request_id), owner)
    presentation = Presentation.unpack(first.client)
    offsets = Offsets.of(chars, tokens, presentation.total_choices)
    others = [await finder.resume(one, owner) for one in presentation.request_ids(first.stream.request_id)[1:]]
    found = [first, *others]
    num_tokens = tuple(count for one in found for count in one.num_tokens)
    return Resumption([one.stream for one in found], presentation, offsets, num_tokens)


class ResumedReader(Reader):
    """A reader that begins where a client left off. It counts as accepted once the log has come so far."""

    def __init__(
        self, streams: Sequence[Stream], notify: Callable[[], None], offsets: Offsets, num_tokens: Sequence[int]
    ) -> None:
        super().__init__(streams, notify)
        self._offsets = offsets
        self._logs = [log for stream in streams for log in stream.choices]
        self._num_tokens = num_tokens
        self._has_caught_up = False

    @property
    def is_accepted(self) -> bool:
        """Whether the log has come so far that there is something to tell, if only how it failed."""
        return super().is_accepted and (self._catch_up() or super().failure is not None)

    @property
    def failure(self) -> End | None:
        """As of any reader; an offset beyond what there is fails it too."""
        failure = super().failure
        if failure is not None or self._catch_up():
            return failure
        for index, log in enumerate(self._logs):
            if self._is_beyond(index, log):
                return End(Outcome.FAILED, error=ErrorInfo.of(self._beyond(index, log)))
        return None

    @property
    def refusal(self) -> End | None:
        """That an offset is wrong. How the request itself failed is told after the rest of its text."""
        return None if self.is_accepted else self.failure

    def take(self) -> list[Delta]:
        """What is new and the client does not have; nothing before the log has come so far."""
        if not self.is_accepted:
            return []
        return [rest for delta in super().take() if (rest := self._rest(delta)) is not None]

    def _catch_up(self) -> bool:
        self._has_caught_up = self._has_caught_up or all(
            self._has_reached(index, log) for index, log in enumerate(self._logs)
        )
        return self._has_caught_up

    def _has_reached(self, index: int, log: ChoiceLog) -> bool:
        return log.num_chars >= self._offsets.chars[index] and len(log.token_ids) >= self._offsets.tokens[index]

    def _is_beyond(self, index: int, log: ChoiceLog) -> bool:
        """Whether a client says it has what was never said. A log that is still on its way says nothing about that."""
        is_complete = log.finish_reason is not None or len(log.token_ids) >= self._num_tokens[index]
        return is_complete and not self._has_reached(index, log)

    def _beyond(self, index: int, log: ChoiceLog) -> InvalidRequest:
        if log.num_chars < self._offsets.chars[index]:
            param, given, there = "offset", self._offsets.chars[index], f"{log.num_chars} characters"
        else:
            param, given, there = "token_offset", self._offsets.tokens[index], f"{len(log.token_ids)} tokens"
        return InvalidRequest(f"{param} is {given}, but choice {index} has {there}.", param=param)

    def _rest(self, delta: Delta) -> Delta | None:
        num_chars = min(max(self._offsets.chars[delta.index] - delta.offset, 0), len(delta.text))
        num_tokens = min(max(self._offsets.tokens[delta.index] - delta.token_offset, 0), len(delta.token_ids))
        if num_chars == num_tokens == 0:
            return delta
        rest = replace(
            delta,
            offset=delta.offset + num_chars,
            text=delta.text[num_chars:],
            token_offset=delta.token_offset + num_tokens,
            token_ids=delta.token_ids[num_tokens:],
            logprobs=delta.logprobs[num_tokens:],
        )
        return rest if rest.text or rest.token_ids or rest.finish_reason is not None else None
