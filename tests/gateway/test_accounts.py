"""What the log tells of a request at its end, and what only where the operator asks for it."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.accounts import Account
from shared.errors import InvalidRequest
from shared.ids import RequestId
from shared.messages import ErrorInfo, Outcome, Usage
from shared.telemetry.tracing import Tracing
from tests.gateway.following import HEADERS, TRACE_ID
from tests.gateway.harness import CHAT, COMPLETION, Harness, running_gateway
from tests.gateway.peers import connected

SECRET = "the launch code is 0000"


def make_account(**fields: Any) -> Account:
    account = Account(
        request_id=RequestId("req-1"),
        operation="chat",
        model="m",
        tenant="default",
        ending="completed",
        code="",
        attempt=1,
        duration_s=2.0,
        first_token_s=0.5,
        per_token_s=0.1,
        usage=Usage(3, 2, (4, 5)),
    )
    return replace(account, **fields)


def events(caplog: pytest.LogCaptureFixture, sentence: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.message == sentence]


async def test_access_event_tells_who_how_much_and_how_long(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        response, request = await harness.open_stream(CHAT)
        harness.clock.advance(0.25)
        await request.say("a")
        await harness.settle()
        harness.clock.advance(0.5)
        await request.finish()
        await response.text()
    (event,) = events(caplog, "request ended")
    expected = {
        "request_id": request.request_id,
        "tenant": "default",
        "model": "test/model-1",
        "operation": "chat",
        "ending": "completed",
        "code": None,
        "attempt": 1,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
        "num_output_tokens": 1,
        "ttft_ms": 250.0,
        "total_ms": 750.0,
    }
    assert {name: event[name] for name in expected} == expected
    assert request.message.trace is not None
    assert event["trace_id"] == request.message.trace.trace_id.hex()


async def test_without_traces_events_have_no_id_of_one(caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway(tracing=Tracing()) as harness:
        with caplog.at_level(logging.INFO):
            async with harness.post("/v1/chat/completions", CHAT | {"temperature": 9}, headers=HEADERS):
                pass
            response, request = await harness.open_stream(CHAT)
            await request.finish()
            await response.text()
    for sentence in ("request refused", "request ended"):
        (event,) = events(caplog, sentence)
        assert "trace_id" not in event


async def test_each_request_has_one_access_event(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        asking, request = await harness.start_chat()
        await request.refuse(ErrorInfo.of(InvalidRequest("Too long.")))
        await request.refuse(ErrorInfo.of(InvalidRequest("Too long.")))
        await asking
        asking, request = await harness.start_chat()
        await request.accept()
        await request.close(Outcome.FAILED)
        await request.close(Outcome.FAILED)
        await asking
    refused, failed = events(caplog, "request ended")
    assert (refused["ending"], refused["code"], refused["num_output_tokens"]) == ("refused", "invalid_value", None)
    assert (failed["ending"], failed["code"], failed["ttft_ms"]) == ("failed", "internal_error", None)


async def test_each_refusal_has_one_access_event_with_the_id_that_its_client_got(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with harness.post("/v1/chat/completions", CHAT | {"temperature": 9}, headers=HEADERS) as response:
            request_id = response.headers["X-Request-Id"]
        async with harness.post("/v1/completions", COMPLETION | {"model": "other"}), connected(harness) as peer:
            await peer.send({"type": "request.create", "id": "a", "body": CHAT | {"temperature": 9}})
            frame = await peer.receive()
    refused = events(caplog, "request refused")
    assert refused[0]["trace_id"] == TRACE_ID
    assert len({event["trace_id"] for event in refused}) == 3, "each has one"
    refusals = [(event["request_id"], event["operation"], event["code"]) for event in refused]
    assert refusals[0] == (request_id, "chat", "invalid_value")
    assert refusals[1][1:] == ("text_completion", "model_not_found")
    assert refusals[2] == (frame["request_id"], "chat", "invalid_value")
    assert len(refusals) == 3


async def say_secrets(harness: Harness) -> None:
    """Requests whose prompts and outputs are nobody's business, and which end in every way."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/completions", COMPLETION | {"prompt": SECRET}),
    ]
    for path, body in bodies:
        for outcome in Outcome:
            response, request = await harness.open_stream(body, path)
            await request.say(SECRET)
            await (request.finish() if outcome is Outcome.COMPLETED else request.close(outcome))
            await response.text()
        async with harness.post(path, body | {"temperature": 9}):
            pass
        async with harness.post(path, body | {SECRET: 1}):
            pass


async def test_prompts_and_outputs_are_never_logged(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await say_secrets(harness)
    assert len(events(caplog, "request ended")) == 6
    assert SECRET not in json.dumps([vars(record) for record in caplog.records], default=str)


async def test_operator_may_have_prompts_and_outputs_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway(logs_content=True) as harness:
        with caplog.at_level(logging.INFO):
            await say_secrets(harness)
            response, request = await harness.open_stream(COMPLETION | {"prompt": [1, 2, 3], "n": 2}, "/v1/completions")
            await request.say("x", index=1)
            await request.finish()
            await response.text()
    told = events(caplog, "content of a request")
    assert [event["request_id"] for event in told] == [event["request_id"] for event in events(caplog, "request ended")]
    assert all(event["levelno"] == logging.INFO for event in told)
    assert [event["output"] for event in told] == [[SECRET]] * 6 + [["", "x"]]
    assert [event["prompt"] for event in told] == [
        *[[{"role": "user", "content": SECRET}]] * 3,
        *[SECRET] * 3,
        [1, 2, 3],
    ]
