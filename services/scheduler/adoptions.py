"""Requests whose clients come back at another gateway: found for it, pointed to it, and the former one told.

Whoever has a request is asked first, and adopted from only if its client still waits then. An adoption names the
attempt that was found: one that comes late, when another gateway has adopted the request, changes nothing.
"""

import logging
from collections.abc import Callable

from msgspec.structs import replace

from services.scheduler.deadlines import Deadlines
from services.scheduler.delivery import Delivery
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.releases import Releases
from services.scheduler.streams import AnyStream, Stream, adopt
from shared.ids import InstanceId, RequestId
from shared.log import about
from shared.messages import AdoptRequest, FindRequest, Message, Presence, RequestAdopted, RequestFound, RequestMoved

log = logging.getLogger(__name__)

Answers = list[tuple[InstanceId, Message]]
"""Messages, each with its receiver."""


class Adoptions:
    """Which gateway follows which request."""

    def __init__(
        self,
        scheduler_id: InstanceId,
        delivery: Delivery,
        deadlines: Deadlines,
        releases: Releases,
        detokenizers: Callable[[], list[Presence]],
        metrics: SchedulerMetrics,
    ) -> None:
        """`detokenizers` are those that take work."""
        self._scheduler_id = scheduler_id
        self._delivery = delivery
        self._deadlines = deadlines
        self._releases = releases
        self._detokenizers = detokenizers
        self._metrics = metrics

    def find(self, message: FindRequest) -> Answers:
        """A gateway looks for a request: nothing for one that is not its client's."""
        stream = self._owned(message.request_id, message.owner)
        return [] if stream is None else [self._found(stream, message)]

    def adopt(self, message: AdoptRequest, now: float) -> Answers:
        """A gateway takes a request over, unless another one has in the meantime."""
        stream = self._owned(message.request_id, message.owner)
        if stream is None:
            return []
        if stream.attempt != message.attempt:
            return [self._found(stream, message)]
        log.info(
            "request adopted",
            extra=about(message.request_id, stream.submission.trace) | {"gateway": message.gateway_id},
        )
        former_id = stream.opened.gateway_id
        adopt(stream, message.gateway_id, message.next_attempt)
        if isinstance(stream, Stream):
            self._releases.adopted(stream, now)
        self._metrics.replayed.add(1, "adoption")
        self._delivery.replay(stream, self._detokenizers(), now)
        return [(message.gateway_id, self._adopted(stream, message.query_id, now)), *self.correct(stream, former_id)]

    def correct(self, stream: AnyStream, gateway_id: InstanceId) -> Answers:
        """What to tell a gateway that knows only of an earlier attempt; nothing, if the later one is its own too."""
        if stream.opened.gateway_id == gateway_id:
            return []
        return [(gateway_id, RequestMoved(stream.request_id, self._scheduler_id, stream.attempt))]

    def _owned(self, request_id: RequestId, owner: str) -> AnyStream | None:
        """A request that a client with this key may come back for."""
        stream = self._delivery.find(request_id)
        return stream if stream is not None and stream.submission.client and stream.submission.owner == owner else None

    def _found(self, stream: AnyStream, question: FindRequest | AdoptRequest) -> tuple[InstanceId, Message]:
        found = RequestFound(question.query_id, stream.request_id, self._scheduler_id, stream.attempt)
        return question.gateway_id, found

    def _adopted(self, stream: AnyStream, query_id: str, now: float) -> RequestAdopted:
        seconds_left = self._deadlines.left(stream.request_id, now)
        return RequestAdopted(
            query_id=query_id,
            scheduler_id=self._scheduler_id,
            submission=replace(
                stream.submission,
                gateway_id=stream.opened.gateway_id,
                attempt=stream.attempt,
                timeout_ms=None if seconds_left is None else max(1, round(seconds_left * 1000)),
                past=stream.past(now) if isinstance(stream, Stream) else None,
                resumed=(),
            ),
            num_output_tokens=stream.num_tokens(),
            has_ended=stream.closed is not None,
        )
