"""`/tokenize` and `/detokenize`: the question that a tokenizer gets, and its answer."""

import asyncio
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.ids import Service
from shared.messages import (
    CallFailed,
    ChatPrompt,
    DetokenizeTokens,
    ErrorInfo,
    PromptTokenized,
    TextPrompt,
    TokenizePrompt,
    TokensDetokenized,
    int32s,
)
from tests.gateway.fake_mesh import MODEL
from tests.gateway.harness import Harness, running_gateway


async def ask(harness: Harness, path: str, **body: Any) -> tuple[int, Any]:
    async with harness.post(path, {"model": MODEL} | body) as response:
        return response.status, await response.json()


def tokenized(question: TokenizePrompt | DetokenizeTokens) -> PromptTokenized:
    return PromptTokenized(question.call_id, int32s([1, 2, 3]), 2048)


async def test_tokenize_a_prompt(harness: Harness) -> None:
    asking = asyncio.create_task(ask(harness, "/tokenize", prompt="Once"))
    question = await harness.fake.next_question()
    assert isinstance(question, TokenizePrompt)
    assert question.prompt == TextPrompt("Once")
    assert question.model == MODEL
    await harness.fake.send_to(question.gateway_id, tokenized(question))
    assert await asking == (200, {"tokens": [1, 2, 3], "count": 3, "max_model_len": 2048})


async def test_tokenize_messages(harness: Harness) -> None:
    asking = asyncio.create_task(
        ask(harness, "/tokenize", messages=[{"role": "user", "content": "Hi"}], parse_special_tokens=True)
    )
    question = await harness.fake.next_question()
    assert isinstance(question, TokenizePrompt)
    assert isinstance(question.prompt, ChatPrompt)
    assert question.prompt.messages[0].content == "Hi"
    assert question.prompt.parse_special_tokens
    await harness.fake.send_to(question.gateway_id, tokenized(question))
    assert (await asking)[0] == 200


async def test_special_tokens_in_a_prompt_can_be_left_as_text(harness: Harness) -> None:
    asking = asyncio.create_task(ask(harness, "/tokenize", prompt="<s>", parse_special_tokens=False))
    question = await harness.fake.next_question()
    assert isinstance(question, TokenizePrompt)
    assert question.prompt == TextPrompt("<s>", parse_special_tokens=False)
    await harness.fake.send_to(question.gateway_id, tokenized(question))
    await asking


async def test_detokenize(harness: Harness) -> None:
    asking = asyncio.create_task(ask(harness, "/detokenize", tokens=[5, 6]))
    question = await harness.fake.next_question()
    assert isinstance(question, DetokenizeTokens)
    assert question.token_ids == int32s([5, 6])
    await harness.fake.send_to(question.gateway_id, TokensDetokenized(question.call_id, "Once"))
    assert await asking == (200, {"prompt": "Once"})


async def test_tokenizers_refusal_is_the_answer(harness: Harness) -> None:
    asking = asyncio.create_task(ask(harness, "/tokenize", prompt="x"))
    question = await harness.fake.next_question()
    error = ErrorInfo.of(InvalidRequest("Bad.", param="prompt"))
    await harness.fake.send_to(question.gateway_id, CallFailed(question.call_id, error))
    status, answer = await asking
    assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, "Bad.", "prompt")


async def test_question_without_an_answer_is_repeated_then_fails(harness: Harness) -> None:
    asking = asyncio.create_task(ask(harness, "/tokenize", prompt="x"))
    first = await harness.fake.next_question()
    await harness.advance(2.0)
    assert await harness.fake.next_question() == first
    await harness.advance(8.0)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert len(harness.mesh.calls) == 0


async def test_second_answer_and_answer_of_the_wrong_kind_are_ignored(harness: Harness) -> None:
    asking = asyncio.create_task(ask(harness, "/tokenize", prompt="x"))
    question = await harness.fake.next_question()
    await harness.fake.send_to(question.gateway_id, TokensDetokenized(question.call_id, "odd"))
    await harness.settle()
    assert not asking.done()
    for _ in range(2):
        await harness.fake.send_to(question.gateway_id, tokenized(question))
    assert (await asking)[0] == 200
    await harness.fake.send_to(question.gateway_id, CallFailed(question.call_id, ErrorInfo(500, "a", "b", "c")))
    await harness.settle()
    assert len(harness.mesh.calls) == 0


async def test_client_that_leaves_takes_its_question_along(harness: Harness) -> None:
    asking = asyncio.create_task(ask(harness, "/tokenize", prompt="x"))
    await harness.fake.next_question()
    asking.cancel()
    await harness.until(lambda: len(harness.mesh.calls) == 0)


async def test_only_a_tokenizer_is_needed(harness: Harness) -> None:
    harness.fake.silent = {Service.EXECUTOR, Service.SCHEDULER, Service.DETOKENIZER}
    await harness.advance(2.0)
    asking = asyncio.create_task(ask(harness, "/tokenize", prompt="x"))
    question = await harness.fake.next_question()
    await harness.fake.send_to(question.gateway_id, tokenized(question))
    assert (await asking)[0] == 200
    harness.fake.silent = {Service.TOKENIZER}
    await harness.advance(2.0)
    assert (await ask(harness, "/tokenize", prompt="x"))[0] == 503


async def test_too_many_questions_are_a_429() -> None:
    async with running_gateway(max_open_requests=1) as harness:
        asking = asyncio.create_task(ask(harness, "/tokenize", prompt="x"))
        question = await harness.fake.next_question()
        assert (await ask(harness, "/tokenize", prompt="x"))[0] == 429
        await harness.fake.send_to(question.gateway_id, tokenized(question))
        assert (await asking)[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
    ],
)
async def test_bad_body_is_a_400_that_names_the_field(
    harness: Harness, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = await ask(harness, path, **body)
    assert (status, answer["error"]["param"]) == (400, param)
