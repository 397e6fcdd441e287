"""Where each request's tokens go: its detokenizer, its gateway, and what is collected for them until it is sent.

One message a detokenizer and step, unless it would be larger than the broker carries. A detokenizer that is lost is
replaced: the whole log so far goes to another one, and the gateway drops what it has already. Whoever missed something
is told all of it again, in the same way. What has ended is kept for that (`retention`).
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile

from msgspec.structs import replace

from services.scheduler.outbox import Outbox
from services.scheduler.retention import Retention
from services.scheduler.streams import AnyStream, EndedStream, Stream
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceTokens, DecodeTokens, Presence, RequestClosed


class Delivery:
    """The streams of all requests, open and ended, and the messages being collected."""

    def __init__(self, scheduler_id: InstanceId, retention: Retention) -> None:
        self._scheduler_id = scheduler_id
        self._retention = retention
        self._streams: dict[RequestId, Stream] = {}
        self._num_streams: dict[InstanceId, int] = defaultdict(int)
        self._outboxes: dict[InstanceId, Outbox] = defaultdict(Outbox)
        self._untold: dict[RequestId, float] = {}
        """When each stream ended of whose end no detokenizer could be told, oldest first."""

    @property
    def is_empty(self) -> bool:
        """Whether every stream has ended, and its end is on its way or given up."""
        return not self._streams

    def get(self, request_id: RequestId) -> Stream | None:
        """The stream of a request that is open, or whose end could not be told yet."""
        return self._streams.get(request_id)

    def find(self, request_id: RequestId) -> AnyStream | None:
        """The stream of a request, open or ended."""
        return self._streams.get(request_id) or self._retention.get(request_id)

    @property
    def num_streams(self) -> int:
        """Those that are open, or whose end could not be told yet."""
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        """The same, as they are at this moment."""
        return iter(tuple(self._streams.values()))

    def open(self, stream: Stream, detokenizers: list[Presence]) -> None:
        """Start a stream, with the output that it has already; `detokenizers` are those that could serve it."""
        self._retention.discard(stream.request_id)
        self._streams[stream.request_id] = stream
        self._assign(stream, detokenizers)
        self._say_all(stream)

    def append(self, tokens: ChoiceTokens) -> None:
        """Deliver an entry of an open request's log."""
        detokenizer_id = self._streams[tokens.request_id].detokenizer_id
        if detokenizer_id is not None:
            self._outboxes[detokenizer_id].tokens.append(tokens)

    def close(self, closed: RequestClosed, now: float) -> None:
        """End a stream, after all its tokens. It stays until there is a detokenizer to tell of it."""
        stream = self._streams[closed.request_id]
        stream.closed = closed
        if stream.detokenizer_id is None:
            self._untold[closed.request_id] = now
        else:
            self._outboxes[stream.detokenizer_id].closed.append(closed)
            self._retain(stream, closed, now)

    def drop(self, stream: Stream, now: float) -> None:
        """Wait no longer for a detokenizer to tell of a stream's end: nobody is there who would hear it."""
        assert stream.closed is not None
        del self._untold[stream.request_id]
        self._retain(stream, stream.closed, now)

    def drop_untold(self, before: float, now: float) -> None:
        """Do so with the streams that ended before some time: their gateways have given up."""
        for request_id in list(takewhile(lambda each: self._untold[each] < before, self._untold)):
            self.drop(self._streams[request_id], now)

    def forget(self, stream: AnyStream) -> None:
        """A later attempt takes the place of this one: nothing is said of it any more."""
        self._retention.discard(stream.request_id)
        if self._streams.pop(stream.request_id, None) is not None:
            self._untold.pop(stream.request_id, None)
            if stream.detokenizer_id is not None:
                self._num_streams[stream.detokenizer_id] -= 1
        if stream.detokenizer_id is not None:
            self._outboxes[stream.detokenizer_id].discard(stream.request_id)

    def move(self, lost: InstanceId, detokenizers: list[Presence], now: float) -> None:
        """A detokenizer is lost: give its streams to others, each with its whole log."""
        self._outboxes.pop(lost, None)
        self._num_streams.pop(lost, None)
        for stream in self._streams.values():
            if stream.detokenizer_id == lost:
                stream.detokenizer_id = None
        self.settle(detokenizers, now)

    def settle(self, detokenizers: list[Presence], now: float) -> None:
        """Give the streams that have no detokenizer one, now that some are there."""
        for stream in [stream for stream in self._streams.values() if stream.detokenizer_id is None]:
            self._assign(stream, detokenizers)
            if stream.detokenizer_id is None:
                continue
            stream.opened = replace(stream.opened, replay=stream.opened.replay + 1)
            self._say_all(stream)
            if stream.closed is not None:
                self.drop(stream, now)

    def replay(self, stream: AnyStream, detokenizers: list[Presence], now: float) -> None:
        """Say all of a stream again, from its first token, to the gateway that follows it."""
        stream.replayed_at = now
        stream.opened = replace(stream.opened, replay=stream.opened.replay + 1)
        able = [beat.instance_id for beat in detokenizers if stream.opened.model in beat.models]
        if isinstance(stream, EndedStream) and stream.detokenizer_id not in able:
            stream.detokenizer_id = self._least_busy(able)
        self._say_all_again(stream)

    def repeat_log(self, stream: AnyStream) -> None:
        """Send a detokenizer the whole log of a stream that it has, because it missed some of it."""
        self._say_all_again(stream)

    def flush(self, *, max_message_bytes: int) -> Iterator[tuple[InstanceId, DecodeTokens]]:
        """Everything collected: one message a detokenizer, or as many as it takes to keep each within the limit."""
        outboxes, self._outboxes = self._outboxes, defaultdict(Outbox)
        for detokenizer_id, outbox in outboxes.items():
            for opened, tokens, closed in outbox.split(max_message_bytes):
                yield detokenizer_id, DecodeTokens(self._scheduler_id, opened, tokens, closed)

    def _retain(self, stream: Stream, closed: RequestClosed, now: float) -> None:
        del self._streams[stream.request_id]
        if stream.detokenizer_id is not None:
            self._num_streams[stream.detokenizer_id] -= 1
        self._retention.add(stream.ended(closed, now))

    def _assign(self, stream: Stream, detokenizers: list[Presence]) -> None:
        able = [beat.instance_id for beat in detokenizers if stream.opened.model in beat.models]
        stream.detokenizer_id = self._least_busy(able)
        if stream.detokenizer_id is not None:
            self._num_streams[stream.detokenizer_id] += 1

    def _least_busy(self, able: list[InstanceId]) -> InstanceId | None:
        return min(able, key=lambda instance_id: (self._num_streams[instance_id], instance_id), default=None)

    def _say_all_again(self, stream: AnyStream) -> None:
        if stream.detokenizer_id is not None:
            self._outboxes[stream.detokenizer_id].discard(stream.request_id)
            self._say_all(stream)

    def _say_all(self, stream: AnyStream) -> None:
        if stream.detokenizer_id is not None:
            self._outboxes[stream.detokenizer_id].add_all(stream.opened, stream.log(), stream.closed)
