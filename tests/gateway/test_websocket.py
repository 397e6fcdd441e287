"""Requests on WebSockets, in both encodings: created, followed, cancelled, many at once."""

from typing import Any

import msgpack
import pytest

from shared.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from shared.messages import ErrorInfo, FinishReason, Outcome
from tests.gateway.fake_mesh import MODEL, logprobs_of
from tests.gateway.harness import CHAT, COMPLETION, Harness, running_gateway
from tests.gateway.peers import Peer, connected

# One request.


async def test_request_from_creation_to_completion(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await request.say("Hel")
    assert await peer.receive() == {
        "type": "request.delta",
        "request_id": request.request_id,
        "index": 0,
        "offset": 0,
        "text": "Hel",
    }
    await request.say("lo")
    delta = await peer.receive()
    assert (delta["offset"], delta["text"]) == (3, "lo")
    await request.finish()
    assert await peer.receive() == {
        "type": "request.completed",
        "id": "a",
        "request_id": request.request_id,
        "choices": [{"index": 0, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "timing": {"queue_s": 0.01, "first_token_s": 0.02, "total_s": 0.03},
    }
    await harness.nothing_is_left()


async def test_token_ids_and_logprobs_come_when_asked_for(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness, body=CHAT | {"logprobs": True, "top_logprobs": 1}, token_ids=True)
    await request.say("Hi", num_tokens=2, logprobs=[logprobs_of("H", -0.5, [("h", -1.0)]), logprobs_of("i")])
    delta = await peer.receive()
    assert delta["token_ids"] == [0, 1]
    assert [position["token"] for position in delta["logprobs"]] == ["H", "i"]
    assert delta["logprobs"][0]["bytes"] == [72]
    assert delta["logprobs"][0]["top_logprobs"] == [{"token": "h", "logprob": -1.0, "bytes": [104]}]
    await request.say("", num_tokens=1, finish_reason=FinishReason.STOP, logprobs=[logprobs_of("<end>")])
    delta = await peer.receive()
    assert (delta["text"], delta["token_ids"]) == ("", [2]), "the log of tokens is complete"
    await request.finish()
    assert (await peer.receive())["type"] == "request.completed"


async def test_many_tokens_at_once_come_in_several_deltas(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness, token_ids=True)
    await request.say("Hello", num_tokens=600)
    deltas = [await peer.receive() for _ in range(3)]
    assert [(delta["offset"], delta["text"], delta["token_offset"]) for delta in deltas] == [
        (0, "Hello", 0),
        (5, "", 256),
        (5, "", 512),
    ]
    assert [token for delta in deltas for token in delta["token_ids"]] == list(range(600))
    await request.finish()
    assert (await peer.receive())["type"] == "request.completed"


async def test_end_without_text_is_no_delta_of_its_own(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await request.say("", num_tokens=1, finish_reason=FinishReason.LENGTH)
    await request.finish()
    completed = await peer.receive()
    assert (completed["type"], completed["choices"][0]["finish_reason"]) == ("request.completed", "length")


async def test_late_end_of_a_failed_request_leaves_its_names_next_owner_alone(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": COMPLETION | {"prompt": ["x", "y"]}})
    first, second = await harness.fake.next_request(), await harness.fake.next_request()
    await first.refuse(ErrorInfo.of(InvalidRequest("No.")))
    assert (await peer.receive())["type"] == "request.failed"
    assert await harness.fake.next_cancellation() == second.request_id
    owner = await peer.create(harness, "a")
    await second.close(Outcome.CANCELLED)
    await harness.settle()
    await peer.send({"type": "request.cancel", "id": "a"})
    assert await harness.fake.next_cancellation() == owner.request_id


@pytest.mark.parametrize("num_chars", [1, 100, 1000, 65_300, 65_536, 200_000])
async def test_text_of_every_length_arrives_in_a_frame(harness: Harness, peer: Peer, num_chars: int) -> None:
    request = await peer.create(harness)
    await request.say("x" * num_chars)
    assert len((await peer.receive())["text"]) == num_chars


async def test_completions_with_several_prompts_and_choices_are_one_request(harness: Harness, peer: Peer) -> None:
    await peer.send(
        {"type": "request.create", "id": "a", "body": COMPLETION | {"prompt": ["x", "y"], "n": 2, "stream": True}}
    )
    first, second = await harness.fake.next_request(), await harness.fake.next_request()
    await first.accept()
    await second.accept()
    assert (await peer.receive())["request_id"] == first.request_id
    await second.say("s", index=1)
    delta = await peer.receive()
    assert (delta["request_id"], delta["index"], delta["text"]) == (first.request_id, 3, "s")
    await first.finish()
    await second.finish()
    completed = await peer.receive()
    assert [choice["index"] for choice in completed["choices"]] == [0, 1, 2, 3]
    assert completed["usage"]["prompt_tokens"] == 6


async def test_failure_is_terminal(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await request.close(Outcome.FAILED, ErrorInfo(503, "service_unavailable_error", "unavailable", "Gone.", None, 1.5))
    assert await peer.receive() == {
        "type": "request.failed",
        "id": "a",
        "request_id": request.request_id,
        "error": {"type": "service_unavailable_error", "code": "unavailable", "message": "Gone.", "param": None},
        "retry_after_s": 1.5,
    }
    await request.finish()
    await peer.send({"type": "ping"})
    assert await peer.receive() == {"type": "pong"}, "nothing follows the terminal message"


@pytest.mark.parametrize(
    ("kind", "seconds", "expected"),
    [(Overloaded, 2.5, 2.5), (Unavailable, None, 1.0), (Overloaded, None, 1.0), (InvalidRequest, None, None)],
)
async def test_refusal_says_when_to_try_again(
    harness: Harness, peer: Peer, kind: type[RequestError], seconds: float | None, expected: float | None
) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": CHAT})
    request = await harness.fake.next_request()
    await request.refuse(ErrorInfo.of(kind("Later.", retry_after_s=seconds)))
    if kind is Unavailable:  # somebody else might take it in a moment
        await harness.advance(6.0)
    failed = await peer.receive()
    assert (failed["type"], failed["error"]["message"]) == ("request.failed", "Later.")
    assert failed.get("retry_after_s") == expected


async def test_refusal_by_the_mesh_fails_without_an_acceptance(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": CHAT})
    request = await harness.fake.next_request()
    await request.refuse(ErrorInfo.of(InvalidRequest("Too long.", param="messages")))
    failed = await peer.receive()
    assert (failed["type"], failed["id"], failed["error"]["param"]) == ("request.failed", "a", "messages")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (CHAT | {"temperature": 9}, "temperature", "invalid_value"),
        (CHAT | {"nonsense": 1}, "nonsense", "unsupported_field"),
        (CHAT | {"model": "other"}, "model", "model_not_found"),
        (CHAT | {"stream": False}, "stream", "invalid_value"),
        (CHAT | {"prompt": "x"}, "prompt", "invalid_value"),
        ({"model": MODEL}, "messages", "invalid_value"),
        (COMPLETION | {"echo": True}, "echo", "unsupported_field"),
    ],
)
async def test_refused_body_fails_by_the_clients_name_for_it(
    harness: Harness, peer: Peer, body: Any, param: str, code: str
) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": body})
    failed = await peer.receive()
    assert (failed["type"], failed["id"]) == ("request.failed", "a")
    assert failed["request_id"].startswith("req-"), "what its trace is found by"
    assert (failed["error"]["param"], failed["error"]["code"]) == (param, code)
    await peer.create(harness, "a")


async def test_infinity_in_msgpack_is_refused_by_name(harness: Harness) -> None:
    async with connected(harness, "shoal.v1.msgpack") as peer:
        for value in (float("nan"), float("inf")):
            await peer.send({"type": "request.create", "id": "a", "body": CHAT | {"temperature": value}})
            assert (await peer.receive())["error"]["param"] == "temperature"


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1)])
async def test_what_only_msgpack_can_say_is_refused(harness: Harness, value: Any) -> None:
    async with connected(harness, "shoal.v1.msgpack") as peer:
        body = CHAT | {"chat_template_kwargs": {"a": value}}
        await peer.send({"type": "request.create", "id": "a", "body": body})
        assert (await peer.receive())["error"]["param"] == "chat_template_kwargs.a"


# Cancelling.


@pytest.mark.parametrize("by", ["request_id", "id"])
async def test_cancel_is_answered_by_the_terminal_message(harness: Harness, peer: Peer, by: str) -> None:
    request = await peer.create(harness)
    await request.say("x")
    await peer.receive()
    name = {"request_id": request.request_id, "id": "a"}[by]
    for _ in range(2):
        await peer.send({"type": "request.cancel", by: name})
    assert await harness.fake.next_cancellation() == request.request_id
    await request.close(Outcome.CANCELLED)
    await request.close(Outcome.CANCELLED)
    cancelled = await peer.receive()
    assert (cancelled["type"], cancelled["id"], cancelled["request_id"]) == (
        "request.cancelled",
        "a",
        request.request_id,
    )
    assert cancelled["usage"]["completion_tokens"] == 1
    await harness.settle()
    assert harness.fake.cancellations.empty(), "the second one did nothing"


async def test_cancel_before_the_acceptance(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": CHAT})
    request = await harness.fake.next_request()
    await peer.send({"type": "request.cancel", "id": "a"})
    assert await harness.fake.next_cancellation() == request.request_id
    await request.close(Outcome.CANCELLED)
    assert (await peer.receive())["type"] == "request.cancelled"


async def test_cancel_that_nobody_confirms_ends_by_itself(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await peer.send({"type": "request.cancel", "request_id": request.request_id})
    await harness.fake.next_cancellation()
    await harness.advance(5.5)
    cancelled = await peer.receive()
    assert (cancelled["type"], cancelled["usage"]) == ("request.cancelled", None)


async def test_finish_may_win_against_a_cancel(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await peer.send({"type": "request.cancel", "request_id": request.request_id})
    await harness.fake.next_cancellation()
    await request.say("all of it")
    await request.finish()
    assert (await peer.receive())["text"] == "all of it"
    assert (await peer.receive())["type"] == "request.completed"
    await peer.send({"type": "request.cancel", "request_id": request.request_id})
    assert (await peer.receive())["error"]["code"] == "not_found"


async def test_closing_cancels_everything(harness: Harness) -> None:
    async with connected(harness) as peer:
        requests = [await peer.create(harness, str(number)) for number in range(5)]
    cancelled = {await harness.fake.next_cancellation() for _ in requests}
    assert cancelled == {request.request_id for request in requests}
    for request in requests:
        await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    assert harness.mesh.num_disconnects == 5
    await harness.until(lambda: harness.gateway.server.num_connections == 0)


# Many requests.


async def test_many_requests_on_one_socket_do_not_mix(harness: Harness, peer: Peer) -> None:
    requests = {str(number): await peer.create(harness, str(number)) for number in range(20)}
    for step in range(5):
        for name, request in requests.items():
            await request.say(f"{name}.{step} ")
    for request in requests.values():
        await request.finish()
    texts = {request.request_id: "" for request in requests.values()}
    completed: list[str] = []
    while len(completed) < len(requests):
        message = await peer.receive()
        if message["type"] == "request.delta":
            assert message["request_id"] not in completed
            assert message["offset"] == len(texts[message["request_id"]])
            texts[message["request_id"]] += message["text"]
        else:
            completed.append(message["request_id"])
    for name, request in requests.items():
        assert texts[request.request_id] == "".join(f"{name}.{step} " for step in range(5))


async def test_name_can_be_used_again_but_not_twice_at_once(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await peer.send({"type": "request.create", "id": "a", "body": CHAT})
    error = await peer.receive()
    assert (error["type"], error["id"], error["error"]["code"]) == ("error", "a", "duplicate_id")
    await request.finish()
    assert (await peer.receive())["type"] == "request.completed"
    await peer.create(harness)


async def test_flood_of_requests_is_refused_by_a_limit_of_the_socket() -> None:
    async with (
        running_gateway(max_requests_per_socket=2) as harness,
        connected(harness) as peer,
        connected(harness) as other,
    ):
        requests = [await peer.create(harness, name) for name in "ab"]
        await peer.send({"type": "request.create", "id": "c", "body": CHAT})
        failed = await peer.receive()
        assert (failed["type"], failed["id"], failed["error"]["code"]) == ("request.failed", "c", "queue_full")
        assert failed["retry_after_s"] == 1.0
        await other.create(harness)
        await requests[0].finish()
        await peer.receive()
        await peer.create(harness, "c")
