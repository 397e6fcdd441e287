"""The requests of one WebSocket: begun or resumed, cancelled, and left when the connection ends.

Owns the client's names for them. What is written, read and refused as nonsense is with the connection (`websocket`),
what one request says with its `channel`.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.gateway.attachments import Attachments
from services.gateway.channel import Channel, draft_of, failed, operation_in
from services.gateway.frames import CancelOpenRequest, CreateRequest, ResumeRequest, ServerMessage
from services.gateway.keys import Caller
from services.gateway.mesh import Mesh
from services.gateway.presentation import Presentation
from services.gateway.resumption import find
from services.gateway.streams import Reader
from shared.errors import InvalidRequest, NotFound, Overloaded, RequestError
from shared.ids import RequestId, new_request_id
from shared.log import about
from shared.messages import ErrorInfo, TraceContext
from shared.telemetry import w3c

log = logging.getLogger(__name__)


class DuplicateId(InvalidRequest):
    """A request has the name of another one that is open."""

    code = "duplicate_id"

    def __init__(self, name: str) -> None:
        super().__init__(f"A request with the id {name[:100]!r} is open.", param="id")


@dataclass(slots=True, eq=False)
class _Search:
    """A request that is being looked for in the mesh."""

    message: ResumeRequest
    is_cancelled: bool = False


class Channels:
    """What one connection has open."""

    def __init__(
        self,
        caller: Caller,
        mesh: Mesh,
        attachments: Attachments,
        *,
        max_requests: int,
        on_news: Callable[[], None],
        parent: TraceContext | None = None,
    ) -> None:
        """`on_news` is called whenever `take` may have something. Requests that do not say to which trace they belong
        belong to that of `parent`."""
        self._caller = caller
        self._mesh = mesh
        self._attachments = attachments
        self._max_requests = max_requests
        self._on_news = on_news
        self._parent = parent
        self._channels: dict[str, Channel] = {}
        self._searches: dict[_Search, asyncio.Task[None]] = {}
        self._ready: dict[Channel, None] = {}
        self._refusals: list[ServerMessage] = []
        self._may_come_back: bool | None = None
        """Whether the client may, once the connection has ended."""

    @property
    def num_refusals(self) -> int:
        """Terminal messages of requests that never began here, which nobody has taken."""
        return len(self._refusals)

    # What the client asks for.

    async def create(self, message: CreateRequest) -> None:
        """Begin a request. Raises DuplicateId; any other refusal is the request's terminal message."""
        if message.id in self._channels:
            self._mesh.turned_away(operation_in(message), DuplicateId.code)
            raise DuplicateId(message.id)
        request_id, operation = new_request_id(), operation_in(message)
        self._mesh.spans.begin(request_id, operation, self._parent_of(message))
        refusal = RequestError("Internal error.")
        try:
            self._check_room()
            draft = draft_of(message)
            presentation = Presentation.of(draft, name=message.id, wants_token_ids=message.token_ids)
            is_resumable = draft.answer.is_resumable
            client = presentation.pack() if is_resumable else b""
            streams = self._mesh.admit(draft, self._caller, request_id=request_id, client=client)
        except RequestError as error:
            refusal = error
            self._mesh.turned_away(operation, error.code, request_id)
            self._refuse(error, name=message.id, request_id=request_id)
            return
        finally:
            self._mesh.spans.refused(request_id, ErrorInfo.of(refusal), self._caller.owner)  # unless it was admitted
        self._open(
            Channel(
                presentation,
                partial(Reader, streams),
                self._attachments,
                self._has_news,
                is_resumable=is_resumable,
                is_new=True,
            )
        )
        await self._mesh.submit(streams)

    def resume(self, message: ResumeRequest) -> None:
        """Look for a request in the mesh and go on with it; does not wait for that."""
        try:
            self._check_room()
        except RequestError as error:
            self._refuse(error, name=message.id, request_id=message.request_id)
            return
        search = _Search(message)
        self._searches[search] = asyncio.create_task(self._search(search))

    async def cancel(self, message: CancelOpenRequest) -> None:
        """Stop a request. Raises NotFound if no such one is open on this connection."""
        for channel in self._channels.values():
            if message.id == channel.name or message.request_id == channel.request_id:
                await channel.cancel()
                return
        for search in self._searches:
            if message.request_id == search.message.request_id or (message.id and message.id == search.message.id):
                search.is_cancelled = True
                return
        raise NotFound(
            "No such request is open on this connection.", param="request_id" if message.id is None else "id"
        )

    # What the connection does.

    def take(self) -> list[ServerMessage]:
        """All that is new."""
        messages, self._refusals = self._refusals, []
        for channel in self._ready:
            messages += channel.take()
        return messages

    async def forget_ended(self) -> None:
        """Let go of the requests whose terminal messages were taken; their names are free at once."""
        ready, self._ready = self._ready, {}
        ended = [channel for channel in ready if channel.is_over]
        for channel in ended:
            if self._channels.get(channel.name) is channel:  # the name may be another request's by now
                del self._channels[channel.name]
        for channel in ended:
            await channel.finish()

    async def leave(self, *, may_come_back: bool) -> None:
        """The connection has ended; what the first call says of it counts."""
        if self._may_come_back is None:
            self._may_come_back = may_come_back
        for search, task in self._searches.items():
            if not search.is_cancelled:  # what its client never heard of stays where it is
                task.cancel()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            if not channel.is_over:
                self._mesh.num_disconnects += 1
            await channel.leave(may_come_back=self._may_come_back)

    def _parent_of(self, message: CreateRequest) -> TraceContext | None:
        if message.traceparent is None:
            return self._parent
        return w3c.parse([message.traceparent], [message.tracestate] if message.tracestate else [])

    def _check_room(self) -> None:
        if len(self._channels) + len(self._searches) >= self._max_requests:
            raise Overloaded("Too many requests are open on this connection.", retry_after_s=1.0)

    async def _search(self, search: _Search) -> None:
        message = search.message
        try:
            await self._resume(search)
        except RequestError as error:
            self._refuse(error, name=message.id, request_id=message.request_id)
        except Exception:
            fields = about(message.request_id, self._mesh.spans.context_of(RequestId(message.request_id)))
            log.exception("a bug failed a request", extra=fields)
            self._refuse(RequestError("Internal error."), name=message.id, request_id=message.request_id)
        finally:
            del self._searches[search]

    async def _resume(self, search: _Search) -> None:
        message = search.message
        resumption = await find(
            self._mesh, message.request_id, self._caller.owner, chars=message.offset, tokens=message.token_offset
        )
        name = message.id or resumption.presentation.name or message.request_id
        namesake = self._channels.get(name)
        if namesake is not None and namesake.request_id != message.request_id:
            raise DuplicateId(name)
        channel = Channel(resumption.presentation.named(name), resumption.read, self._attachments, self._has_news)
        if self._may_come_back is not None:
            await channel.leave(may_come_back=self._may_come_back and not search.is_cancelled)
            return
        self._open(channel)
        if search.is_cancelled:
            await channel.cancel()

    def _open(self, channel: Channel) -> None:
        self._channels[channel.name] = channel
        self._has_news(channel)

    def _has_news(self, channel: Channel) -> None:
        self._ready[channel] = None
        self._on_news()

    def _refuse(self, error: RequestError, *, name: str | None, request_id: str | None = None) -> None:
        self._mesh.num_refused[error.code] += 1
        self._refusals.append(failed(error, name=name, request_id=request_id))
        self._on_news()
