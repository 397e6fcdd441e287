"""Who reads which resumable request at this gateway: one reader at a time, and the newest wins.

Owns that rule. What becomes of a request that nobody reads is the mesh's to know (`Mesh.detach`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from services.gateway.streams import Stream
from shared.errors import RequestError
from shared.ids import RequestId


class ResumedElsewhere(RequestError):
    """This connection no longer has the request: it was resumed on another one, where it goes on."""

    status, type, code = 409, "conflict_error", "resumed_elsewhere"


def resumed_elsewhere() -> ResumedElsewhere:
    """What the reader is told that a newer one takes the place of."""
    return ResumedElsewhere("The request was resumed on another connection.")


class Custody(Protocol):
    """What the mesh does about requests that get or lose their reader."""

    def attach(self, streams: Sequence[Stream]) -> None:
        """They have a reader."""
        ...

    async def cancel(self, streams: Sequence[Stream]) -> None:
        """Stop those that have not ended."""
        ...

    async def detach(self, streams: Sequence[Stream]) -> None:
        """Keep them for a while without a reader, then stop them."""
        ...


class Attachment:
    """One reader's hold on one client request, which may be several requests to the mesh.

    It is given up once, by `cancel` or `let_go`; whatever is called after that, or after a newer reader has taken its
    place, changes nothing.
    """

    def __init__(
        self, attachments: "Attachments", streams: Sequence[Stream], *, is_resumable: bool, on_loss: Callable[[], None]
    ) -> None:
        self.streams = streams
        self.is_lost = False
        """Whether a newer reader has taken its place."""
        self._attachments = attachments
        self._is_resumable = is_resumable
        self._on_loss = on_loss
        self._is_held = True

    @property
    def request_id(self) -> RequestId:
        """What the client calls the request by to resume it."""
        return self.streams[0].request_id

    async def cancel(self) -> None:
        """The client wants no more of it: stop what has not ended."""
        if self._release():
            await self._attachments.custody.cancel(self.streams)

    async def let_go(self) -> None:
        """The client may come back: keep what is resumable for a while, and stop what is not."""
        if not self._is_resumable:
            await self.cancel()
        elif self._release():
            await self._attachments.custody.detach(self.streams)

    def lose(self) -> None:
        """A newer reader takes its place."""
        self.is_lost = True
        self._is_held = False
        self._on_loss()

    def _release(self) -> bool:
        """Whether it was held until now."""
        was_held, self._is_held = self._is_held, False
        if was_held:
            self._attachments.forget(self)
        return was_held


class Attachments:
    """The readers of all client requests of this gateway."""

    def __init__(self, custody: Custody) -> None:
        self.custody = custody
        self._held: dict[RequestId, Attachment] = {}

    def __len__(self) -> int:
        return len(self._held)

    def attach(self, streams: Sequence[Stream], *, is_resumable: bool, on_loss: Callable[[], None]) -> Attachment:
        """Hold a request for a new reader. One that held it until now loses it, and its own `on_loss` is called."""
        attachment = Attachment(self, streams, is_resumable=is_resumable, on_loss=on_loss)
        older = self._held.get(attachment.request_id)
        self._held[attachment.request_id] = attachment
        self.custody.attach(streams)
        if older is not None:
            older.lose()
        return attachment

    def forget(self, attachment: Attachment) -> None:
        """Drop what is no longer held."""
        if self._held.get(attachment.request_id) is attachment:
            del self._held[attachment.request_id]
