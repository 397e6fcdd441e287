"""Completions over HTTP: prompts of every kind, several at once, and their shapes."""

import asyncio
import json
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.messages import (
    ErrorInfo,
    FinishReason,
    Outcome,
    TextAlternative,
    TextLogprobs,
    TextPrompt,
    TokenPrompt,
    int32s,
)
from tests.gateway.fake_mesh import MODEL, FakeRequest, logprobs_of
from tests.gateway.harness import COMPLETION, Harness, events_of, next_event

PATH = "/v1/completions"


async def ask(harness: Harness, **fields: Any) -> tuple[int, Any]:
    async with harness.post(PATH, COMPLETION | fields) as response:
        return response.status, await response.json()


async def start(
    harness: Harness, num_prompts: int = 1, **fields: Any
) -> tuple[asyncio.Task[tuple[int, Any]], list[FakeRequest]]:
    asking = asyncio.create_task(ask(harness, **fields))
    return asking, [await harness.fake.next_request() for _ in range(num_prompts)]


async def test_whole_answer_has_openais_shape(harness: Harness) -> None:
    asking, (request,) = await start(harness)
    await request.complete(" upon", " a")
    status, answer = await asking
    assert status == 200
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "cmpl-" + request.request_id.removeprefix("req-"),
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": " upon a", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_stream_has_text_until_the_finish_reason(harness: Harness) -> None:
    response, request = await harness.open_stream(COMPLETION | {"stream_options": {"include_usage": True}}, PATH)
    await request.complete(" upon", " a")
    *events, usage, done = await events_of(response)
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == " upon a"
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert all(choice["text"] for choice in choices[:-1])
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["total_tokens"] == 5


async def test_the_finish_reason_is_null_until_the_last_chunk(harness: Harness) -> None:
    response, request = await harness.open_stream(COMPLETION, PATH)
    await request.accept()
    choices = []
    for text in (" upon", " a"):
        await request.say(text)
        choices.append(json.loads(await next_event(response))["choices"][0])
    await request.say(" time", finish_reason=FinishReason.LENGTH)
    await request.close(Outcome.COMPLETED)
    choices += [json.loads(event)["choices"][0] for event in (await events_of(response))[:-1]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "".join(choice["text"] for choice in choices) == " upon a time"
    assert all(choice["text"] for choice in choices[:-1])


async def test_prompts_of_one_request_without_a_seed_draw_from_different_noise(harness: Harness) -> None:
    asking, requests = await start(harness, 3, prompt=["a", "b", "c"])
    assert len({request.message.sampling.seed for request in requests}) == 3
    for request in requests:
        await request.complete()
    await asking


async def test_max_tokens_is_sixteen_unless_given(harness: Harness) -> None:
    for given, expected in ((None, 16), (1, 1), (500, 500)):
        asking, (request,) = await start(harness, max_tokens=given)
        assert request.message.max_tokens == expected
        await request.complete()
        await asking


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        ("", [TextPrompt("")]),
        ("a\x00b", [TextPrompt("a\x00b")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2, 3], [TokenPrompt(int32s([1, 2, 3]))]),
        ([[1], [2, 3]], [TokenPrompt(int32s([1])), TokenPrompt(int32s([2, 3]))]),
    ],
)
async def test_prompts_of_every_kind_reach_the_mesh(harness: Harness, prompt: Any, expected: list[Any]) -> None:
    asking, requests = await start(harness, len(expected), prompt=prompt)
    assert [request.message.prompt for request in requests] == expected
    for request in requests:
        await request.complete()
    assert (await asking)[0] == 200


async def test_special_tokens_in_a_prompt_are_parsed_unless_told_otherwise(harness: Harness) -> None:
    for given, expected in ((None, True), (True, True), (False, False)):
        asking, (request,) = await start(harness, parse_special_tokens=given)
        assert isinstance(request.message.prompt, TextPrompt)
        assert request.message.prompt.parse_special_tokens is expected
        await request.complete()
        await asking


async def test_choices_are_numbered_through_all_prompts_and_usage_is_summed(harness: Harness) -> None:
    asking, requests = await start(harness, 2, prompt=["a", "b"], n=2)
    for number, request in enumerate(requests):
        await request.accept()
        for index in range(2):
            await request.say(f"{number}{index}", index=index)
    for request in reversed(requests):
        await request.finish()
    status, answer = await asking
    assert status == 200
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "00"),
        (1, "01"),
        (2, "10"),
        (3, "11"),
    ]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 4,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_several_prompts_stream_side_by_side(harness: Harness) -> None:
    asking = asyncio.create_task(
        harness.http.post(harness.url + PATH, json=COMPLETION | {"prompt": ["a", "b"], "stream": True})
    )
    first, second = await harness.fake.next_request(), await harness.fake.next_request()
    await first.accept()
    await harness.settle()
    assert not asking.done(), "nothing is streamed before all of it is accepted"
    await second.accept()
    response = await asking
    await second.say("y")
    await first.say("x")
    await first.finish()
    await second.finish(FinishReason.LENGTH)
    events = [json.loads(event) for event in (await events_of(response))[:-1]]
    texts, reasons = {0: "", 1: ""}, {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "x", 1: "y"}
    assert reasons == {0: "stop", 1: "length"}


async def test_one_refused_prompt_fails_the_request_and_cancels_the_rest(harness: Harness) -> None:
    asking, (first, second, third) = await start(harness, 3, prompt=["a", "b", "c"])
    await first.accept()
    await second.refuse(ErrorInfo.of(InvalidRequest("Too odd.", param="prompt")))
    status, answer = await asking
    assert (status, answer["error"]["message"]) == (400, "Too odd.")
    assert {await harness.fake.next_cancellation(), await harness.fake.next_cancellation()} == {
        first.request_id,
        third.request_id,
    }
    await first.close(Outcome.CANCELLED)
    await third.close(Outcome.CANCELLED)
    await harness.nothing_is_left()


async def test_one_failed_prompt_ends_a_stream_and_cancels_the_rest(harness: Harness) -> None:
    asking = asyncio.create_task(
        harness.http.post(harness.url + PATH, json=COMPLETION | {"prompt": ["a", "b"], "stream": True})
    )
    first, second = await harness.fake.next_request(), await harness.fake.next_request()
    await first.accept()
    await second.accept()
    response = await asking
    await first.say("x")
    await second.close(Outcome.FAILED, ErrorInfo(500, "server_error", "internal_error", "Not a number."))
    events = await events_of(response)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "Not a number."
    assert await harness.fake.next_cancellation() == first.request_id


async def test_logprobs_are_columns_with_offsets_into_the_text(harness: Harness) -> None:
    asking, (request,) = await start(harness, logprobs=1)
    assert request.message.sampling.num_logprobs == 1
    euro = "€".encode()
    halves = [
        TextLogprobs(TextAlternative("�", -1.0, euro[:1]), (TextAlternative("�", -0.5, euro[1:2]),)),
        TextLogprobs(TextAlternative("�", -2.0, euro[1:])),
    ]
    await request.accept()
    await request.say("né", logprobs=[logprobs_of("né", -0.1, [("né", -0.1)])])
    await request.say("€", num_tokens=2, logprobs=halves)
    await request.say("!", logprobs=[logprobs_of("!", float("-inf"), [("?", -0.3)])])
    await request.finish()
    _, answer = await asking
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["né", "bytes:\\xe2", "bytes:\\x82\\xac", "!"],
        "token_logprobs": [-0.1, -1.0, -2.0, -9999.0],
        "top_logprobs": [
            {"né": -0.1},
            {"bytes:\\x82": -0.5, "bytes:\\xe2": -1.0},
            {"bytes:\\x82\\xac": -2.0},
            {"?": -0.3, "!": -9999.0},
        ],
        "text_offset": [0, 2, 2, 3],
    }


async def test_offsets_go_on_from_chunk_to_chunk(harness: Harness) -> None:
    response, request = await harness.open_stream(COMPLETION | {"logprobs": 0}, PATH)
    for token in ("ab", "c", "d"):
        await request.say(token, logprobs=[logprobs_of(token)])
        await harness.settle()
    await request.finish()
    choices = [json.loads(event)["choices"][0] for event in (await events_of(response))[:-1]]
    columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [token for column in columns for token in column["tokens"]] == ["ab", "c", "d"]
    assert [offset for column in columns for offset in column["text_offset"]] == [0, 2, 3]
