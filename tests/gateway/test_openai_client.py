"""OpenAI's own Python client, unchanged, against the gateway."""

import asyncio

import openai
import pytest

from shared.errors import Unavailable
from shared.messages import ErrorInfo, Outcome
from tests.gateway.fake_mesh import MODEL, logprobs_of
from tests.gateway.harness import Harness, running_gateway


async def test_chat(harness: Harness) -> None:
    async with harness.openai() as client:
        asking = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
        )
        await (await harness.fake.next_request()).complete("Hel", "lo")
        answer = await asking
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2
        assert answer._request_id is not None


async def test_an_answer_can_be_sent_back_as_history(harness: Harness) -> None:
    async with harness.openai() as client:
        asking = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
        )
        await (await harness.fake.next_request()).complete("Hello")
        message = (await asking).choices[0].message
        asking = asyncio.create_task(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "More"}],  # type: ignore[list-item]
            )
        )
        request = await harness.fake.next_request()
        await request.complete("x")
        assert (await asking).choices[0].message.content == "x"


async def test_chat_stream_with_usage_and_logprobs(harness: Harness) -> None:
    async with harness.openai() as client:
        opening = asyncio.create_task(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                logprobs=True,
                top_logprobs=1,
                stream_options={"include_usage": True},
            )
        )
        request = await harness.fake.next_request()
        await request.accept()
        await request.say("a", logprobs=[logprobs_of("a", -0.5, [("a", -0.5)])])
        await request.finish()
        chunks = [chunk async for chunk in await opening]
    assert chunks[0].choices[0].delta.role == "assistant"
    positions = [
        position
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for position in choice.logprobs.content or []
    ]
    assert [position.top_logprobs[0].token for position in positions] == ["a"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 4


async def test_completions(harness: Harness) -> None:
    async with harness.openai() as client:
        asking = asyncio.create_task(
            client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, max_tokens=3)
        )
        for _ in range(2):
            request = await harness.fake.next_request()
            await request.accept()
            await request.say("x", logprobs=[logprobs_of("x")])
            await request.finish()
        answer = await asking
    assert [choice.text for choice in answer.choices] == ["x", "x"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["x"]


async def test_models(harness: Harness) -> None:
    async with harness.openai() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        model = await client.models.retrieve(MODEL)
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "shoal")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_bad_request_has_param_and_code(harness: Harness) -> None:
    async with harness.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=9
            )
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    assert "at most 2" in caught.value.message


async def test_typed_errors_by_status(harness: Harness) -> None:
    async with harness.openai() as client:
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")
        asking = asyncio.create_task(client.completions.create(model=MODEL, prompt="a"))
        await (await harness.fake.next_request()).refuse(
            ErrorInfo(429, "rate_limit_error", "queue_full", "Full.", None, 2.5)
        )
        with pytest.raises(openai.RateLimitError) as caught:
            await asking
    assert caught.value.response.headers["Retry-After"] == "3"


async def test_wrong_key_is_an_authentication_error() -> None:
    async with running_gateway(api_keys=("acme:secret",)) as harness, harness.openai() as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        assert [model.id async for model in client.with_options(api_key="secret").models.list()] == [MODEL]


async def test_failure_in_mid_stream_is_raised(harness: Harness) -> None:
    async with harness.openai() as client:
        opening = asyncio.create_task(client.completions.create(model=MODEL, prompt="a", stream=True))
        request = await harness.fake.next_request()
        await request.accept()
        await request.say("x")
        stream = await opening
        await request.close(Outcome.FAILED, ErrorInfo.of(Unavailable("Gone.")))
        with pytest.raises(openai.APIError, match="Gone"):
            [chunk async for chunk in stream]


async def test_closing_a_stream_cancels_the_request(harness: Harness) -> None:
    async with harness.openai() as client:
        opening = asyncio.create_task(client.completions.create(model=MODEL, prompt="a", stream=True))
        request = await harness.fake.next_request()
        await request.accept()
        await request.say("x")
        stream = await opening
        async for chunk in stream:
            assert chunk.choices[0].text == "x"
            break
        await stream.close()
        assert await harness.fake.next_cancellation() == request.request_id
        await request.close(Outcome.CANCELLED)
        await harness.nothing_is_left()
