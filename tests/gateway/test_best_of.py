"""`best_of`: more choices are generated than returned, and the model's own favourites are what the client gets."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.ranking import returned_choices
from services.gateway.streams import Stream
from shared.ids import RequestId
from shared.messages import ChoiceText, FinishReason, int32s
from tests.gateway.fake_mesh import FakeRequest, logprobs_of
from tests.gateway.harness import CHAT, COMPLETION, Harness
from tests.gateway.peers import Peer

PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


async def say(request: FakeRequest, text: str, index: int, *logprobs: float) -> None:
    """A whole choice whose tokens have these log-probabilities."""
    positions = [logprobs_of(text, logprob) for logprob in logprobs]
    await request.say(text, index=index, num_tokens=len(logprobs), logprobs=positions)


async def start(
    harness: Harness, path: str, body: dict[str, Any], num_prompts: int = 1
) -> tuple[asyncio.Task[Any], list[FakeRequest]]:
    async def ask() -> Any:
        async with harness.post(path, body) as response:
            assert response.status == 200
            return await response.json()

    asking = asyncio.create_task(ask())
    requests = [await harness.fake.next_request() for _ in range(num_prompts)]
    for request in requests:
        await request.accept()
    return asking, requests


def texts_of(answer: Any) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_the_likeliest_choices_per_token_are_returned_best_first(
    harness: Harness, path: str, body: dict[str, Any]
) -> None:
    asking, (request,) = await start(harness, path, body | {"n": 2, "best_of": 4})
    assert request.message.num_choices == 4
    assert request.message.sampling.num_logprobs == 0, "asked for, to compare"
    await say(request, "worst", 0, -3.0)
    await say(request, "long but likely", 1, -0.5, -0.5, -0.5, -0.5)
    await say(request, "short", 2, -1.0)
    await say(request, "best", 3, -0.25, -0.25)
    await request.finish()
    answer = await asking
    assert texts_of(answer) == ["best", "long but likely"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None], "the client did not ask"
    assert answer["usage"]["completion_tokens"] == 8, "all that was generated"
    assert answer["usage"]["prompt_tokens"] == 3


async def test_one_choice_is_returned_unless_n_says_more(harness: Harness) -> None:
    asking, (request,) = await start(harness, "/v1/completions", COMPLETION | {"best_of": 2})
    await say(request, "a", 0, -1.0)
    await say(request, "b", 1, -0.5)
    await request.finish()
    assert texts_of(await asking) == ["b"]


async def test_each_prompt_has_its_own_best(harness: Harness) -> None:
    body = COMPLETION | {"prompt": ["p", "q"], "n": 2, "best_of": 3}
    asking, requests = await start(harness, "/v1/completions", body, 2)
    for request, name, order in zip(requests, "pq", ((-1.0, -2.0, -3.0), (-3.0, -1.0, -2.0)), strict=True):
        for index, logprob in enumerate(order):
            await say(request, f"{name}{index}", index, logprob)
        await request.finish()
    answer = await asking
    assert texts_of(answer) == ["p0", "p1", "q1", "q2"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 6


async def test_logprobs_that_the_client_wants_are_those_of_what_it_gets(harness: Harness) -> None:
    body = COMPLETION | {"best_of": 2, "logprobs": 3}
    asking, (request,) = await start(harness, "/v1/completions", body)
    assert request.message.sampling.num_logprobs == 3
    await say(request, "a", 0, -1.0)
    await say(request, "b", 1, -0.5)
    await request.finish()
    (choice,) = (await asking)["choices"]
    assert choice["logprobs"]["tokens"] == ["b"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]
    assert choice["logprobs"]["text_offset"] == [0]


async def test_without_best_of_no_logprobs_are_computed(harness: Harness) -> None:
    for fields in ({}, {"n": 2}, {"n": 2, "best_of": 2}):
        asking, (request,) = await start(harness, "/v1/completions", COMPLETION | fields)
        assert request.message.sampling.num_logprobs is None
        await request.finish()
        await asking


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
async def test_a_socket_always_streams_and_so_refuses(harness: Harness, peer: Peer, body: dict[str, Any]) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": body | {"best_of": 2}})
    failed = await peer.receive()
    assert (failed["type"], failed["error"]["param"]) == ("request.failed", "best_of")
    assert "in a stream" in failed["error"]["message"]


async def test_openais_client_may_ask_for_the_best(harness: Harness) -> None:
    async with harness.openai() as client:
        asking = asyncio.create_task(client.completions.create(model="test/model-1", prompt="a", n=1, best_of=3))
        request = await harness.fake.next_request()
        await request.accept()
        for index, logprob in enumerate((-2.0, -1.0, -3.0)):
            await say(request, str(index), index, logprob)
        await request.finish()
        answer = await asking
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "1")]
    assert json.loads(answer.model_dump_json())["choices"][0]["logprobs"] is None


def stream_of(choices: Sequence[Sequence[float]]) -> Stream:
    stream = Stream(RequestId("req-1"), len(choices))
    for index, logprobs in enumerate(choices):
        tokens = int32s(range(len(logprobs)))
        positions = tuple(logprobs_of("x", logprob) for logprob in logprobs)
        stream.append(
            ChoiceText(stream.request_id, index, 0, tokens, 0, str(index), FinishReason.STOP, positions),
        )
    return stream


LOGPROBS = st.lists(st.integers(-64, 0).map(lambda eighths: eighths / 8) | st.just(float("-inf")), max_size=4)


@given(st.lists(LOGPROBS, min_size=1, max_size=6), st.data())
def test_nothing_left_out_is_better_than_anything_returned(choices: list[list[float]], data: st.DataObject) -> None:
    def mean(index: int) -> float:
        return sum(choices[index]) / len(choices[index]) if choices[index] else float("-inf")

    num_returned = data.draw(st.integers(1, len(choices)))
    returned = [int(log.text) for log in returned_choices([stream_of(choices)], num_returned)]
    assert len(set(returned)) == num_returned
    left_out = [index for index in range(len(choices)) if index not in returned]
    if not left_out:
        assert returned == list(range(len(choices))), "with nothing to choose from, the order is the mesh's"
        return
    ranks = [(-mean(index), index) for index in returned]
    assert ranks == sorted(ranks), "best first, of equals the earlier"
    assert all(ranks[-1] < (-mean(index), index) for index in left_out)
