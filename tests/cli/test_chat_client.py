"""One answer over the WebSocket: text exactly once, cancellation, and errors in plain words."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import shoal
from shared.cli.mesh.ports import free_port
from shared.cli.stream_client import Answer, AnswerFailed, Gateway, ask, list_models, normalized_url
from shared.errors import OperatorError
from tests.cli.gateway import FakeGateway, completed, delta, failed, running
from tests.client.fake_gateway import Conversation, accepted
from tests.client.fake_gateway import FakeGateway as ScriptedGateway
from tests.shared.transport.receiver import PATIENCE_S

CONSUMED = shoal.Usage(10, 3, 4)
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with running(FakeGateway()) as gateway:
        yield gateway


async def _ask(
    gateway: FakeGateway, *, cancel: asyncio.Event | None = None, key: str | None = None
) -> tuple[Answer, list[str]]:
    pieces: list[str] = []
    asking = ask(Gateway(gateway.url, key), BODY, on_text=pieces.append, cancel=cancel or asyncio.Event())
    return await asyncio.wait_for(asking, PATIENCE_S), pieces


async def test_text_comes_piece_by_piece_and_whole(gateway: FakeGateway) -> None:
    answer, pieces = await _ask(gateway)
    assert pieces == ["Hello", " you"]
    assert answer.text == "Hello you"
    assert (answer.finish_reason, answer.usage, answer.was_cancelled) == ("stop", CONSUMED, False)
    assert gateway.bodies == [BODY]


async def test_a_piece_that_comes_again_is_shown_once(gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "Hello"), delta(0, "Hello"), delta(3, "lo you"), delta(9, ""), completed()]
    answer, pieces = await _ask(gateway)
    assert (answer.text, pieces) == ("Hello you", ["Hello", " you"])


async def test_characters_outside_the_basic_plane_count_as_one(gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "🐟"), delta(1, "🐠"), completed()]
    assert (await _ask(gateway))[0].text == "🐟🐠"


async def test_a_missing_piece_is_noticed(gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "Hello"), delta(6, "you"), completed()]
    with pytest.raises(OperatorError, match=r"a 'request\.delta' that makes no sense"):
        await _ask(gateway)


async def test_cancelling_ends_the_answer_and_keeps_what_came(gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "Hello")]
    gateway.waits_for_cancel = True
    cancel, pieces = asyncio.Event(), list[str]()

    def on_text(text: str) -> None:
        pieces.append(text)
        cancel.set()

    answer = await asyncio.wait_for(ask(Gateway(gateway.url), BODY, on_text=on_text, cancel=cancel), PATIENCE_S)
    assert (answer.text, answer.was_cancelled, answer.usage) == ("Hello", True, CONSUMED)
    assert gateway.received[-1] == {"type": "request.cancel", "id": "stream"}


async def test_a_cancellation_that_nobody_confirms_ends_all_the_same(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.cli.stream_client._CANCEL_TIMEOUT_S", 0.05)
    gateway.script = [delta(0, "Hello")]
    cancel = asyncio.Event()
    asking = ask(Gateway(gateway.url), BODY, on_text=lambda _text: cancel.set(), cancel=cancel)
    answer = await asyncio.wait_for(asking, PATIENCE_S)
    assert (answer.text, answer.was_cancelled, answer.usage) == ("Hello", True, None)


async def test_an_answer_that_is_not_wanted_any_more_is_not_begun(gateway: FakeGateway) -> None:
    cancel = asyncio.Event()
    cancel.set()
    answer, pieces = await _ask(gateway, cancel=cancel)
    assert (answer.was_cancelled, pieces) == (True, [])


async def test_a_failure_is_told_in_the_meshs_words(gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "Hel"), failed("The executor is gone.")]
    with pytest.raises(AnswerFailed, match=r"^The executor is gone$"):
        await _ask(gateway)


async def test_a_conversation_that_is_too_long_can_be_told_from_other_failures(gateway: FakeGateway) -> None:
    gateway.script = [failed("9000 tokens are too many.", "context_length_exceeded")]
    with pytest.raises(AnswerFailed, match=r"^9000 tokens are too many$") as caught:
        await _ask(gateway)
    assert caught.value.is_too_long
    gateway.script = [failed("The queue is full.")]
    with pytest.raises(AnswerFailed) as caught:
        await _ask(gateway)
    assert not caught.value.is_too_long


async def test_a_text_that_no_frame_takes_is_too_large(gateway: FakeGateway) -> None:
    gateway.script, gateway.hangs_up, gateway.close_code = [], True, 1009
    with pytest.raises(AnswerFailed, match="larger than the gateway takes"):
        await _ask(gateway)


async def test_an_answer_goes_on_where_it_was_when_its_gateway_is_back() -> None:
    async def die(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"))
        peer.cut()

    async def come_back(peer: Conversation) -> None:
        message = await peer.receive()
        assert (message["type"], message["request_id"], message["offset"]) == ("request.resume", "req-1", [3])
        await peer.send(accepted(), delta(3, "lo"), completed())
        await peer.closed()

    pieces: list[str] = []
    async with ScriptedGateway(die, come_back) as gateway:
        asking = ask(Gateway(gateway.address), BODY, on_text=pieces.append, cancel=asyncio.Event())
        answer = await asyncio.wait_for(asking, PATIENCE_S)
    assert (answer.text, pieces, answer.finish_reason) == ("Hello", ["Hel", "lo"], "stop")


async def test_a_text_that_the_gateway_does_not_read_to_its_end_is_too_large(gateway: FakeGateway) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a" * (32 << 20)}]}
    with pytest.raises(AnswerFailed, match="may be larger than they take") as caught:
        await ask(Gateway(gateway.url), body, on_text=print, cancel=asyncio.Event())
    assert caught.value.is_too_long


async def test_a_gateway_that_takes_nothing_at_the_moment_is_tried_again_and_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.cli.stream_client._PATIENCE_S", 0.3)
    async with ScriptedGateway(status=503) as gateway:
        with pytest.raises(OperatorError, match="takes no requests at this moment; try again soon"):
            await ask(Gateway(gateway.address), BODY, on_text=print, cancel=asyncio.Event())
        assert gateway.num_connections > 1


async def test_an_event_from_the_future_is_passed_over(gateway: FakeGateway) -> None:
    gateway.script = [
        {"type": "going_away", "deadline_ms": 1},
        {"type": "new"},
        delta(0, "Hi"),
        completed(),
    ]
    assert (await _ask(gateway))[0].text == "Hi"


async def test_without_the_right_key_one_is_asked_for(gateway: FakeGateway) -> None:
    gateway.key = "right"
    with pytest.raises(OperatorError, match="wants a key; give the right one with --api-key"):
        await _ask(gateway)
    with pytest.raises(OperatorError, match="does not know the key"):
        await _ask(gateway, key="wrong")
    with pytest.raises(OperatorError, match="wants a key"):
        await list_models(Gateway(gateway.url))
    assert (await _ask(gateway, key="right"))[0].text == "Hello you"


async def test_nothing_at_the_address_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.cli.stream_client._PATIENCE_S", 0.3)
    gateway = FakeGateway()
    gateway.url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(OperatorError, match=r"nothing answers at http://127\.0\.0\.1:\d+; start it with `shoal up`"):
        await _ask(gateway)
    with pytest.raises(OperatorError, match="nothing answers at"):
        await list_models(Gateway(gateway.url))


async def test_something_else_at_the_address_is_said(gateway: FakeGateway) -> None:
    with pytest.raises(OperatorError, match="is not a Shoal gateway"):
        await list_models(Gateway(gateway.url + "/elsewhere"))


async def test_models_are_listed(gateway: FakeGateway) -> None:
    gateway.models = ["a", "b"]
    assert await list_models(Gateway(gateway.url)) == ["a", "b"]


def test_speed_is_counted_between_the_first_and_the_last_text() -> None:
    usage = shoal.Usage(1, 11, 0)
    assert Answer(usage=usage, first_text_s=1.0, last_text_s=3.0).tokens_per_s == 5.0
    assert Answer(usage=shoal.Usage(1, 1, 0), first_text_s=1.0, last_text_s=1.0).tokens_per_s is None
    assert Answer(usage=usage).tokens_per_s is None
    assert Answer().num_tokens == 0


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:1/", "http://host:1"),
        ("https://host/v1", "https://host"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_may_be_typed_in_several_ways(typed: str, url: str) -> None:
    assert normalized_url(typed) == url


@pytest.mark.parametrize("typed", ["", "ftp://host", "http://", "http://host/other"])
def test_what_is_no_address_is_refused(typed: str) -> None:
    with pytest.raises(OperatorError, match="is not the address of a gateway"):
        normalized_url(typed)
