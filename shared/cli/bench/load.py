"""A bounded load of streamed completions on an OpenAI-compatible server, and what its clients saw.

Prompts are random common words, so that no server can reuse one, except for the first `num_shared_words`.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from shared.errors import OperatorError
from shared.models.units import counted

_TIMEOUT_S: Final = 600
_MAX_SAID: Final = 300
"""Characters of what a server says about a refusal."""
_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason"
)
_WORDS: Final = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask for."""

    num_words: int = 200
    """Of each prompt; a common word is about one token."""
    num_shared_words: int = 0
    num_output_tokens: int = 128
    seed: int = 0

    def prompts(self, num_prompts: int) -> list[str]:
        """Prompts that differ from each other and from those of other seeds after the shared words."""
        shared = random.Random(1234).choices(_WORDS, k=self.num_shared_words)
        draw = random.Random(self.seed)
        rest = self.num_words - self.num_shared_words
        return [" ".join([*shared, *draw.choices(_WORDS, k=rest)]) for _ in range(num_prompts)]


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times are seconds since it was sent."""

    chunk_times: list[float] = field(default_factory=list)
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What all clients together saw at one concurrency. Times are milliseconds."""

    concurrency: int
    num_requests: int
    num_failed: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    """Time per output token after the first, of the median request."""
    itl_p99_ms: float
    """Time between two chunks."""
    cached_share: float
    """Of all prompt tokens, from the server's prefix cache."""
    first_failure: str | None = None
    """What went wrong first, if anything did."""


async def run(url: str, model: str, load: Load, *, concurrency: int, num_requests: int, key: str = "none") -> Report:
    """Send `num_requests` to the server at `url` (without `/v1`), `concurrency` at a time.

    Raises OperatorError if nothing answers there, or none of the requests succeeds.
    """
    prompts = iter(load.prompts(num_requests))
    streams: list[Stream] = []
    failures: list[str] = []
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:

        async def client(waiting: Iterator[str]) -> None:
            for prompt in waiting:
                try:
                    streams.append(await _stream(session, url, model, prompt, load.num_output_tokens))
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    failures.append(_explain(error))

        began = time.perf_counter()
        await asyncio.gather(*(client(prompts) for _ in range(concurrency)))
        seconds = time.perf_counter() - began
    if not streams:
        raise OperatorError(f"none of {counted(num_requests, 'request')} to {url} succeeded: {failures[0]}")
    return _report(streams, failures, concurrency=concurrency, seconds=seconds)


async def _stream(session: aiohttp.ClientSession, url: str, model: str, prompt: str, max_tokens: int) -> Stream:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = Stream()
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(_refusal(answer.status, await answer.text(errors="replace")))
        async for line in answer.content:
            if line.startswith(b"data: {"):
                _take(stream, json.loads(line[6:]), time.perf_counter() - began)
    stream.total_s = time.perf_counter() - began
    if not stream.chunk_times:
        raise ValueError("the stream had no text")
    return stream


def _take(stream: Stream, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        raise ValueError(f"the stream broke off: {_said(chunk['error'])}")
    choices, usage = chunk.get("choices"), chunk.get("usage")
    if choices and choices[0].get("text"):
        stream.chunk_times.append(now)
    if usage:
        stream.num_prompt_tokens = usage["prompt_tokens"]
        stream.num_output_tokens = usage["completion_tokens"]
        stream.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _refusal(status: int, body: str) -> str:
    """What a server answered instead of a stream: its own sentence, if it is one that a person can read."""
    what = f"status {status}"
    with contextlib.suppress(ValueError):
        what = f"status {status} ({HTTPStatus(status).phrase})"
    try:
        said = _said(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        said = "" if body.lstrip().startswith("<") else body  # a page is for browsers
    return f"the server answered with {what}{': ' if said.strip() else ''}{' '.join(said.split())[:_MAX_SAID]}"


def _said(error: Any) -> str:
    """The words of an error in OpenAI's shape, or in a simpler one."""
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


def _explain(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"nothing answers there ({error.strerror or error.os_error})"
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S} s"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "the server closed the connection in the middle of an answer"
    return str(error) or type(error).__name__


def _report(streams: Sequence[Stream], failures: Sequence[str], *, concurrency: int, seconds: float) -> Report:
    num_tokens = [stream.num_output_tokens or len(stream.chunk_times) for stream in streams]
    gaps = [b - a for stream in streams for a, b in zip(stream.chunk_times, stream.chunk_times[1:], strict=False)]
    firsts = [stream.chunk_times[0] for stream in streams]
    after_first = [
        (stream.total_s - stream.chunk_times[0]) / max(1, count - 1)
        for stream, count in zip(streams, num_tokens, strict=True)
    ]
    num_prompt_tokens = sum(stream.num_prompt_tokens for stream in streams)
    return Report(
        concurrency=concurrency,
        num_requests=len(streams),
        num_failed=len(failures),
        output_tokens=sum(num_tokens),
        seconds=seconds,
        output_tokens_per_s=sum(num_tokens) / seconds,
        ttft_p50_ms=percentile(firsts, 0.5) * 1e3,
        ttft_p99_ms=percentile(firsts, 0.99) * 1e3,
        tpot_p50_ms=percentile(after_first, 0.5) * 1e3,
        itl_p99_ms=percentile(gaps, 0.99) * 1e3,
        cached_share=sum(stream.num_cached_tokens for stream in streams) / max(1, num_prompt_tokens),
        first_failure=failures[0] if failures else None,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
