"""The client library against a real mesh with two gateways: whatever breaks, it gives what an undisturbed run gives."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import shoal
from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from services.gateway.config import GatewayConfig
from shared.ids import Service
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.cutting_proxy import CuttingProxy
from tests.integration.cast import MODEL, Cast, cast
from tests.integration.in_process import load_runner

KEYS = ("acme:one", "acme:two")
TEXT = "The river runs past the mill and under the bridge, and the miller counts the sacks. "
COMMON: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "token_ids": True}
BODIES: list[dict[str, Any]] = [
    COMMON | {"prompt": TEXT, "temperature": 0},
    COMMON | {"prompt": TEXT, "seed": 1, "n": 2, "temperature": 1.4},
    COMMON | {"prompt": [TEXT, TEXT + "And"], "seed": 2, "n": 2, "logprobs": 2},
    COMMON | {"messages": [{"role": "user", "content": "Who?"}], "seed": 3, "logprobs": True, "top_logprobs": 1},
    COMMON | {"messages": [{"role": "user", "content": "Why?"}], "seed": 4, "temperature": 2.0},
]


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, ExecutorConfig(max_slots=16, threads=1, kv_cache_mb=32))


@pytest.fixture
async def mesh(folder: Path, runner: ModelRunner) -> AsyncIterator[Cast]:
    broker = MemoryBroker()
    async with cast(
        folder,
        [runner],
        lambda _name: MemoryTransport(broker),
        # Until this is over, a gateway that has just begun does not say that a request is unknown.
        gateway=GatewayConfig(port=0, api_keys=KEYS, failover_timeout_s=2.0),
        detokenizer=1,
        tokenizer=1,
    ) as mesh:
        yield mesh
        await mesh.until_nothing_is_left()


def urls(mesh: Cast) -> list[str]:
    return [mesh.url(number) for number in range(2)]


async def read(client: shoal.Client, body: dict[str, Any]) -> shoal.Result:
    """The result of a stream whose deltas, put together, are the same."""
    stream = client.stream(model=MODEL, **body)
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[shoal.TokenLogprob]] = {}
    async for delta in stream:
        assert delta.offset == len(texts.get(delta.index, ""))
        texts[delta.index] = texts.get(delta.index, "") + delta.text
        token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        logprobs.setdefault(delta.index, []).extend(delta.logprobs)
    assert stream.result is not None
    for choice in stream.result.choices:
        assert choice.text == texts[choice.index]
        assert choice.token_ids == tuple(token_ids[choice.index])
        assert choice.logprobs == tuple(logprobs[choice.index])
    return stream.result


async def undisturbed(mesh: Cast) -> list[shoal.Result]:
    async with shoal.Client(mesh.url(), api_key="one") as client:
        return list(await asyncio.gather(*(read(client, body) for body in BODIES)))


def assert_same(results: list[shoal.Result], expected: list[shoal.Result]) -> None:
    for one, other in zip(results, expected, strict=True):
        assert one.choices == other.choices
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (
            other.usage.prompt_tokens,
            other.usage.completion_tokens,
        )


@pytest.mark.parametrize("seed", range(3))
async def test_connections_that_break_again_and_again_change_nothing(mesh: Cast, seed: int) -> None:
    expected = await undisturbed(mesh)
    draw = random.Random(seed)

    def num_bytes() -> int:
        """Often too few to be accepted, seldom enough for all, now and then enough for the largest frame."""
        return 200 + round(draw.expovariate(1 / 15_000))

    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(CuttingProxy(url, num_bytes)) for url in urls(mesh)]
        client = await stack.enter_async_context(
            shoal.Client([proxy.address for proxy in proxies], api_key="one", patience_s=20)
        )
        assert_same(list(await asyncio.gather(*(read(client, body) for body in BODIES))), expected)
        assert sum(proxy.num_cuts for proxy in proxies) > 10
        assert all(proxy.num_connections > 3 for proxy in proxies), "both gateways had their part"


@pytest.mark.parametrize("how", ["kill", "leave"])
async def test_gateway_that_ends_hands_its_streams_to_the_other(mesh: Cast, how: str) -> None:
    expected = await undisturbed(mesh)
    async with shoal.Client(urls(mesh), api_key="one") as client:
        reading = [asyncio.create_task(read(client, body)) for body in BODIES]
        gateway = mesh.of(Service.GATEWAY)[0]
        await mesh.until(lambda: gateway.status.num_open_requests >= len(BODIES))
        await (gateway.kill() if how == "kill" else gateway.leave(deadline_s=0.0))
        assert_same(list(await asyncio.gather(*reading)), expected)


async def test_reader_that_stops_for_a_while_gets_all_of_it(mesh: Cast) -> None:
    async with shoal.Client(urls(mesh), api_key="one") as client:
        body = BODIES[0] | {"max_tokens": 300}
        expected = await read(client, body)
        stream = client.stream(model=MODEL, **body)
        texts = []
        async for delta in stream:
            texts.append(delta.text)
            if len(texts) == 3:
                await mesh.until(lambda: not any(one.status.num_open_requests for one in mesh.of(Service.GATEWAY)))
        assert "".join(texts) == expected.text


async def test_stream_is_resumed_by_another_program_and_after_its_end(mesh: Cast) -> None:
    async with shoal.Client(mesh.url(0), api_key="one") as first, shoal.Client(mesh.url(1), api_key="one") as second:
        stream = first.stream(model=MODEL, **BODIES[0] | {"max_tokens": 300})
        deltas, text = aiter(stream), ""
        while len(text) < 20:
            text += (await anext(deltas)).text
        assert stream.request_id is not None
        rest = second.resume(stream.request_id, offset=len(text))
        text += "".join([delta.text async for delta in rest])
        assert rest.result is not None
        with pytest.raises(shoal.ResumedElsewhere):
            _ = [delta async for delta in deltas]
        again = second.resume(stream.request_id)
        assert "".join([delta.text async for delta in again]) == text
        expected = await read(second, BODIES[0] | {"max_tokens": 300})
        assert text == expected.text


async def test_only_its_own_key_resumes_a_request(mesh: Cast) -> None:
    async with shoal.Client(mesh.url(0), api_key="one") as client, shoal.Client(mesh.url(1), api_key="two") as other:
        result = await read(client, BODIES[0])
        with pytest.raises(shoal.NotFound):
            _ = [delta async for delta in other.resume(result.request_id)]


async def test_event_stream_that_broke_goes_on_at_the_other_gateway(mesh: Cast) -> None:
    headers = {"Authorization": "Bearer one"}
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    async with (
        CuttingProxy(mesh.url(0), lambda: 6000) as proxy,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        text, is_done = "", False
        url = f"{proxy.address}/v1/completions"
        async with session.post(url, json=body | {"stream": True, "resumable": True}) as response:
            request_id = response.headers["X-Request-Id"]
            with suppress(aiohttp.ClientError):
                while not is_done:
                    line = await response.content.readline()
                    is_done = line == b"data: [DONE]\n"
                    text += text_in(line)
        assert text
        assert not is_done
        async with session.get(f"{mesh.url(1)}/v1/requests/{request_id}/stream", params={"offset": len(text)}) as rest:
            assert rest.status == 200
            async for line in rest.content:
                is_done = is_done or line == b"data: [DONE]\n"
                text += text_in(line)
        assert is_done
        async with session.post(f"{mesh.url(1)}/v1/completions", json=body) as whole:
            assert text == (await whole.json())["choices"][0]["text"]


def text_in(line: bytes) -> str:
    """The text of a chunk of a completion; none in the last line, which may have been cut."""
    if not line.startswith(b"data: {") or not line.endswith(b"\n"):
        return ""
    return "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
