"""Many requests of every kind through the whole mesh, on a tiny model: nothing lost, nothing left, nothing mixed up."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from shared.messages import Outcome
from tests.integration.in_process import MODEL, FewBlocks, InProcessMesh, in_process_mesh, load_runner

TEXT = "The river runs past the mill and under the bridge, and the miller counts the sacks. "


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, ExecutorConfig(max_slots=16, threads=1, kv_cache_mb=64))


@pytest.fixture
async def mesh(folder: Path, runner: ModelRunner) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh(folder, runner) as mesh:
        yield mesh
        await mesh.until_idle()
        check_nothing_is_held(mesh)


def check_nothing_is_held(mesh: InProcessMesh) -> None:
    (executor,) = mesh.scheduler.status().executors
    assert executor.num_free_blocks == executor.num_blocks
    assert mesh.scheduler.status().num_running == mesh.scheduler.status().num_waiting == 0
    assert mesh.gateway.status().num_open_requests == 0
    assert mesh.detokenizer.status().num_open_choices == 0


async def test_64_streams_with_random_lengths_and_disconnects_leave_nothing_behind(mesh: InProcessMesh) -> None:
    draw = random.Random(5)
    outcomes: list[str] = []

    async def one(number: int) -> None:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": TEXT * draw.randint(1, 12) + str(number),
            "max_tokens": draw.randint(1, 120),
            "n": draw.choice([1, 1, 1, 3]),
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        leaves_after = draw.choice([None, None, 0, 1, draw.randint(2, 40)])
        delay_s = draw.random() / 2
        await asyncio.sleep(delay_s)
        async with mesh.session.post(f"{mesh.url}/v1/completions", json=body) as answer:
            num_events, usage, is_done = 0, None, False
            while not is_done:
                if num_events == leaves_after:
                    outcomes.append("left")
                    answer.close()
                    return
                line = await answer.content.readline()
                assert line, "the stream ended without [DONE]"
                if line.startswith(b"data: "):
                    num_events += 1
                    is_done = line == b"data: [DONE]\n"
                    usage = usage if is_done else json.loads(line[6:]).get("usage") or usage
            assert usage is not None
            assert usage["completion_tokens"] == body["max_tokens"] * body["n"]
            outcomes.append("finished")

    await asyncio.gather(*(one(number) for number in range(64)))
    assert len(outcomes) == 64
    assert outcomes.count("left") > 10
    assert outcomes.count("finished") > 10
    await mesh.until_idle()
    ended = mesh.gateway.mesh.requests.num_ended
    assert sum(ended.values()) == 64, "each request has exactly one end"
    assert ended[Outcome.COMPLETED] >= outcomes.count("finished")


async def test_a_prompt_with_a_known_beginning_computes_only_the_rest(mesh: InProcessMesh, runner: ModelRunner) -> None:
    shared = [5 + number % 300 for number in range(1000)]
    first = await mesh.complete(prompt=[*shared, 7, 8, 9], max_tokens=1)
    computed = mesh.executor.status().num_tokens
    second = await mesh.complete(prompt=[*shared, 10, 11, 12], max_tokens=1)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 1000 // runner.capacity.block_size * runner.capacity.block_size
    assert mesh.executor.status().num_tokens - computed == 1003 - cached


async def test_a_seed_gives_the_same_output_alone_in_any_company_and_after_preemption(
    folder: Path, runner: ModelRunner
) -> None:
    bodies = [
        {"prompt": TEXT + str(number), "max_tokens": 60, "seed": number, "temperature": 1.2, "ignore_eos": True}
        for number in range(24)
    ]
    bodies[3] |= {"top_k": 20, "top_p": 0.9}
    bodies[4] |= {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    bodies[5] |= {"min_p": 0.05, "n": 3}
    async with in_process_mesh(folder, runner) as mesh:
        alone = [(await mesh.stream_all([body]))[0].token_ids for body in bodies]
        together = [stream.token_ids for stream in await mesh.stream_all(bodies[::-1])][::-1]
    async with in_process_mesh(folder, FewBlocks(runner, 24)) as mesh:
        preempted = [stream.token_ids for stream in await mesh.stream_all(bodies)]
        assert mesh.scheduler.status().num_preemptions > 0
    assert alone == together
    assert alone == preempted
    assert len({tuple(tokens) for tokens in alone[5].values()}) == 3, "choices draw from different streams of noise"


async def test_requests_without_a_seed_never_share_their_noise(mesh: InProcessMesh) -> None:
    streamed = await mesh.stream_all([{"prompt": TEXT, "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}] * 12)
    assert len({tuple(stream.token_ids[0]) for stream in streamed}) == 12


async def test_the_same_greedy_request_twice_gives_the_same_tokens(mesh: InProcessMesh) -> None:
    body = {"prompt": TEXT * 3, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    first, second = (await mesh.stream_all([body]))[0], (await mesh.stream_all([body]))[0]
    assert first.token_ids == second.token_ids
    assert second.end is not None
    assert second.end["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_text_is_what_all_tokens_spell_whatever_they_are(mesh: InProcessMesh, folder: Path) -> None:
    """A hot random model spells broken UTF-8 of every kind."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bodies = [
        {
            "prompt": TEXT,
            "max_tokens": 80,
            "temperature": 2.0,
            "seed": seed,
            "ignore_eos": True,
            "skip_special_tokens": skip,
        }
        for seed in range(20)
        for skip in (True, False)
    ]
    for body, stream in zip(bodies, await mesh.stream_all(bodies), strict=True):
        whole = tokenizer.decode(stream.token_ids[0], skip_special_tokens=bool(body["skip_special_tokens"]))
        assert stream.text[0] == whole


async def test_stop_strings_end_one_request_and_leave_its_neighbours_alone(mesh: InProcessMesh) -> None:
    body = {"prompt": TEXT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    (free,) = await mesh.stream_all([body])
    text = free.text[0]
    stop = text[30:36]
    stopped, beside, far = await mesh.stream_all([{**body, "stop": [stop]}, body, {**body, "stop": ["\x00never"]}])
    assert stopped.text[0] == text[: text.index(stop)]
    assert beside.text == far.text == free.text
    assert stopped.end is not None
    assert stopped.end["choices"] == [{"index": 0, "finish_reason": "stop"}]
    num_tokens = stopped.end["usage"]["completion_tokens"]
    assert 0 < num_tokens < 60
    (again,) = await mesh.stream_all([{**body, "max_tokens": num_tokens}])
    assert stop in again.text[0], "usage counts the tokens up to the one that completed the stop string"
    (shorter,) = await mesh.stream_all([{**body, "max_tokens": num_tokens - 1}])
    assert stop not in shorter.text[0]


async def test_openais_client_chats_streams_and_cancels(mesh: InProcessMesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "seed": 4, "max_tokens": 30}
        whole = await client.chat.completions.create(**asked)
        pieces = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert text == whole.choices[0].message.content
        assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        stream = await client.chat.completions.create(
            **{**asked, "max_tokens": 1500}, extra_body={"ignore_eos": True}, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**asked, temperature=9)
        assert refused.value.param == "temperature"
    await mesh.until_idle()
    assert mesh.gateway.mesh.requests.num_ended[Outcome.CANCELLED] == 1


@pytest.mark.parametrize("wait_s", [0.0, 0.005, 0.02, 0.1])
async def test_a_disconnect_at_any_moment_frees_everything_soon(mesh: InProcessMesh, wait_s: float) -> None:
    """Queued, between chunks of the prompt, decoding: a few steps later nothing of it is left."""
    body = {"model": MODEL, "prompt": TEXT * 60, "max_tokens": 800, "ignore_eos": True}
    posts = [asyncio.create_task(mesh.session.post(f"{mesh.url}/v1/completions", json=body)) for _ in range(24)]
    await asyncio.sleep(wait_s)
    for post in posts:
        post.cancel()
        with suppress(asyncio.CancelledError):
            await post
    await mesh.until_idle()
    num_steps = mesh.executor.status().num_steps
    await asyncio.sleep(0.05)
    assert mesh.executor.status().num_steps == num_steps, "steps go on for nobody"
    check_nothing_is_held(mesh)
