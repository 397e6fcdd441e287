"""Chat completions over HTTP, as they look on the wire and through OpenAI's own client."""

import asyncio
import json
from typing import Any

from shared.messages import ChatPrompt, FinishReason
from tests.gateway.fake_mesh import MODEL, logprobs_of
from tests.gateway.harness import CHAT, Harness, events_of, next_event


async def test_whole_answer_has_openais_shape(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.complete("Hel", "lo")
    status, answer = await asking
    assert status == 200
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "chatcmpl-" + request.request_id.removeprefix("req-"),
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_stream_begins_with_the_role_and_ends_with_done(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.complete("Hel", "lo")
    events = await events_of(response)
    assert response.status == 200
    assert response.content_type == "text/event-stream"
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    middle = choices[1:-1]
    assert "".join(choice["delta"]["content"] for choice in middle) == "Hello"
    assert all(choice["delta"]["content"] and choice["finish_reason"] is None for choice in middle)


async def test_each_piece_is_a_chunk_and_the_end_adds_no_empty_one(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.accept()
    choices = []
    for text in ("", "Hel", "lo"):
        if text:
            await request.say(text)
        choices.append(json.loads(await next_event(response))["choices"][0])
    await request.finish()
    choices += [json.loads(event)["choices"][0] for event in (await events_of(response))[:-1]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]


async def test_tokens_without_text_make_no_chunk(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.accept()
    await next_event(response)
    await request.say("", num_tokens=40)
    await harness.settle()
    await request.say("a")
    assert json.loads(await next_event(response))["choices"][0]["delta"] == {"content": "a"}
    await request.finish()
    await events_of(response)


async def test_usage_comes_as_a_last_chunk_when_asked_for(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"stream_options": {"include_usage": True}})
    await request.complete("a")
    *chunks, usage, done = await events_of(response)
    assert done == "[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    last = json.loads(usage)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 1
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_each_choice_of_n_has_its_own_role_text_and_reason(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"n": 2})
    assert request.message.num_choices == 2
    await request.say("one", index=0)
    await request.say("two", index=1, finish_reason=FinishReason.LENGTH)
    await request.say("!", index=0, finish_reason=FinishReason.STOP)
    await request.finish()
    events = [json.loads(event) for event in (await events_of(response))[:-1]]
    texts, reasons, roles = {0: "", 1: ""}, {}, []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if "role" in choice["delta"]:
            roles.append(choice["index"])
        if choice["finish_reason"]:
            assert choice["index"] not in reasons
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "one!", 1: "two"}
    assert reasons == {0: "stop", 1: "length"}
    assert roles == [0, 1]


async def test_logprobs_of_a_whole_answer(harness: Harness) -> None:
    asking, request = await harness.start_chat(logprobs=True, top_logprobs=2)
    assert request.message.sampling.num_logprobs == 2
    await request.accept()
    await request.say("é", logprobs=[logprobs_of("é", -0.25, [("é", -0.25), ("e", float("-inf"))])])
    await request.finish()
    _, answer = await asking
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.25,
                "bytes": [195, 169],
                "top_logprobs": [
                    {"token": "é", "logprob": -0.25, "bytes": [195, 169]},
                    {"token": "e", "logprob": -9999.0, "bytes": [101]},
                ],
            }
        ],
        "refusal": None,
    }


async def test_logprobs_of_a_stream_are_complete_even_for_tokens_without_text(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"logprobs": True})
    await request.say("", logprobs=[logprobs_of("a")])
    await request.say("ab", logprobs=[logprobs_of("b")])
    await request.say("", logprobs=[logprobs_of("<end>")], finish_reason=FinishReason.STOP)
    await request.finish()
    events = [json.loads(event) for event in (await events_of(response))[:-1]]
    choices = [event["choices"][0] for event in events]
    assert all(choice["delta"].get("content") != "" for choice in choices[1:])
    positions = [position for choice in choices if choice["logprobs"] for position in choice["logprobs"]["content"]]
    assert [position["token"] for position in positions] == ["a", "b", "<end>"]


async def test_every_field_reaches_the_mesh(harness: Harness) -> None:
    fields: dict[str, Any] = {
        "messages": [
            {"role": "developer", "content": "Be brief.", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]},
            {"role": "assistant", "content": "Yes", "refusal": None, "tool_calls": None},
        ],
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "n": 3,
        "stop": ["a", "b"],
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {"5": -100, "0": 1.5},
        "logprobs": True,
        "seed": -1,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [9, 10],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "parse_special_tokens": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    asking, request = await harness.start_chat(**fields)
    message = request.message
    assert message.model == MODEL
    assert message.tenant == "default"
    assert message.scheduler_id == harness.fake.scheduler_id
    prompt = message.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(turn.role, turn.content, turn.name) for turn in prompt.messages] == [
        ("system", "Be brief.", "boss"),
        ("user", "One. Two.", None),
        ("assistant", "Yes", None),
    ]
    assert prompt.template_arguments == {"enable_thinking": False}
    assert prompt.parse_special_tokens
    assert message.max_tokens == 7
    assert message.num_choices == 3
    assert message.ignore_eos
    assert message.text.stop == ("a", "b")
    assert not message.text.skip_special_tokens
    sampling = message.sampling
    assert sampling.seed == 2**63 - 1
    assert sampling.temperature == 0
    assert sampling.top_k == 0
    assert sampling.top_p == 0.5
    assert sampling.min_p == 0.1
    assert sampling.presence_penalty == -2
    assert sampling.frequency_penalty == 2
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == {5: -100, 0: 1.5}
    assert sampling.min_tokens == 2
    assert sampling.end_token_ids == (9, 10)
    assert sampling.num_logprobs == 0
    await request.complete()
    await asking


async def test_defaults_are_openais(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    message = request.message
    assert message.max_tokens is None
    assert message.num_choices == 1
    assert (message.sampling.temperature, message.sampling.top_p, message.sampling.top_k) == (1.0, 1.0, 0)
    assert message.sampling.num_logprobs is None
    assert not message.ignore_eos
    assert message.text.skip_special_tokens
    assert isinstance(message.prompt, ChatPrompt)
    assert not message.prompt.parse_special_tokens
    await request.complete()
    await asking


async def test_two_requests_without_seeds_have_different_ones(harness: Harness) -> None:
    first, one = await harness.start_chat()
    second, two = await harness.start_chat()
    assert one.message.sampling.seed != two.message.sampling.seed
    assert one.request_id != two.request_id
    for request in (one, two):
        await request.complete()
    await first
    await second


async def test_neutral_values_of_unsupported_fields_are_taken(harness: Harness) -> None:
    asking, request = await harness.start_chat(
        tools=None,
        functions=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        service_tier="auto",
        user=None,
        metadata={},
        stream_options=None,
        max_tokens=None,
        stop=None,
        logit_bias=None,
    )
    await request.complete("x")
    assert (await asking)[0] == 200


async def test_request_id_is_in_a_header(harness: Harness) -> None:
    for is_stream in (False, True):
        asking = asyncio.create_task(
            harness.http.post(harness.url + "/v1/chat/completions", json=CHAT | {"stream": is_stream})
        )
        request = await harness.fake.next_request()
        await request.complete("x")
        async with await asking as response:
            assert response.headers["X-Request-Id"] == request.request_id
