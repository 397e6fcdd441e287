"""The spans of the latest requests, in memory, for whoever asks. Bounded in requests and in spans; keeps nothing open.

Owns what is kept and what gives way. Does not own what a span says, nor how it is asked for (`answering`).
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from shared.ids import RequestId, client_request_id
from shared.messages import Span

MAX_SPANS_OF_A_REQUEST: Final = 256
_MEAN_SPANS_OF_A_REQUEST: Final = 32
"""So many for each request that may be kept, all together; where requests have more, fewer are kept."""


@dataclass(slots=True)
class Kept:
    """What is known of one client request."""

    owner: str | None = None
    spans: list[Span] = field(default_factory=list)
    num_left_out: int = 0
    """Spans that came after there were too many."""


class SpanStore:
    """The latest `max_requests` client requests; none at all if that is 0."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests: Final = max_requests
        self._max_spans = _MEAN_SPANS_OF_A_REQUEST * max_requests
        self._kept: OrderedDict[RequestId, Kept] = OrderedDict()
        self._num_spans = 0

    @property
    def num_requests(self) -> int:
        """How many are kept at this moment."""
        return len(self._kept)

    @property
    def num_spans(self) -> int:
        """Their spans, all together."""
        return self._num_spans

    def add(self, span: Span, owner: str | None = None) -> None:
        """Keep one more span; the requests that nothing was heard of for longest give way. `owner` is whose request it
        is, if that is known here."""
        if not self.max_requests:
            return
        key = client_request_id(span.request_id)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = Kept()
        else:
            self._kept.move_to_end(key)
        if owner is not None:
            kept.owner = owner
        if len(kept.spans) >= MAX_SPANS_OF_A_REQUEST:
            kept.num_left_out += 1
            return
        kept.spans.append(span)
        self._num_spans += 1
        while len(self._kept) > self.max_requests or (self._num_spans > self._max_spans and len(self._kept) > 1):
            _, oldest = self._kept.popitem(last=False)
            self._num_spans -= len(oldest.spans)

    def find(self, request_id: RequestId) -> Kept | None:
        """What is kept of a client request; None if nothing is."""
        return self._kept.get(request_id)
