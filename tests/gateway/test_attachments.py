"""One reader for each request: the newest wins, and whoever has lost it changes nothing any more."""

from collections.abc import Sequence

from services.gateway.attachments import Attachment, Attachments
from services.gateway.streams import Stream
from shared.ids import RequestId


class FakeCustody:
    """Writes down what is done with requests."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def attach(self, streams: Sequence[Stream]) -> None:
        self.events.append("attach")

    async def cancel(self, streams: Sequence[Stream]) -> None:
        self.events.append("cancel")

    async def detach(self, streams: Sequence[Stream]) -> None:
        self.events.append("detach")


class Desk:
    """Attachments with a fake custody, and one request."""

    def __init__(self) -> None:
        self.custody = FakeCustody()
        self.attachments = Attachments(self.custody)
        self.streams = [Stream(RequestId("req-1"), 1)]
        self.losses: list[str] = []

    def attach(self, name: str, *, is_resumable: bool = True) -> Attachment:
        return self.attachments.attach(
            self.streams, is_resumable=is_resumable, on_loss=lambda: self.losses.append(name)
        )


async def test_who_lets_go_leaves_it_to_be_resumed() -> None:
    desk = Desk()
    await desk.attach("one").let_go()
    assert desk.custody.events == ["attach", "detach"]
    assert len(desk.attachments) == 0


async def test_what_is_not_resumable_is_cancelled_instead() -> None:
    desk = Desk()
    await desk.attach("one", is_resumable=False).let_go()
    assert desk.custody.events == ["attach", "cancel"]


async def test_it_is_given_up_once() -> None:
    desk = Desk()
    attachment = desk.attach("one")
    await attachment.cancel()
    await attachment.let_go()
    await attachment.cancel()
    assert desk.custody.events == ["attach", "cancel"]


async def test_newer_reader_wins_and_the_older_one_changes_nothing_any_more() -> None:
    desk = Desk()
    older, newer = desk.attach("older"), desk.attach("newer")
    assert (older.is_lost, newer.is_lost, desk.losses) == (True, False, ["older"])
    await older.cancel()
    await older.let_go()
    assert desk.custody.events == ["attach", "attach"]
    assert len(desk.attachments) == 1
    await newer.let_go()
    assert desk.custody.events[-1] == "detach"
    assert desk.losses == ["older"]
