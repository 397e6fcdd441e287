"""An HTTP client that follows one resumable event stream, and comes back for the rest of it when it breaks."""

import asyncio
import json
import time
from typing import Any

import aiohttp

from tests.chaos.endpoints import CONNECTION_ERRORS, PAUSE_S, RESUME_WITHIN_S, SILENCE_S, TRY_AGAIN_CODES, Turns, places
from tests.chaos.history import Connected, Ending, Logprob, Piece
from tests.chaos.progress import Progress, Record
from tests.chaos.websocket_client import chat_logprob
from tests.chaos.workload import StreamSpec

_ID_HEADER = "X-Request-Id"


class HttpClient:
    """One stream."""

    def __init__(
        self, session: aiohttp.ClientSession, turns: Turns, spec: StreamSpec, record: Record, progress: Progress
    ) -> None:
        self._session = session
        self._turns = turns
        self._spec = spec
        self._record = record
        self._progress = progress
        self._finish_reasons: dict[int, str] = {}
        self._usage: tuple[int, int] | None = None
        self._was_sent = False
        self._why = ""
        self._trouble_since: float | None = None

    async def run(self) -> None:
        """Follow the stream to its end."""
        while not self._record.is_over:
            url = self._turns.next()
            try:
                await self._connect(url)
            except CONNECTION_ERRORS as error:
                self._why = f"{type(error).__name__}: {error}"
                await asyncio.sleep(PAUSE_S)

    async def _connect(self, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        if self._record.request_ids:
            chars, tokens = places(self._spec, self._record)
            self._record.num_resumed += 1
            query = {"offset": ",".join(map(str, chars)), "token_offset": ",".join(map(str, tokens))}
            path = f"{url}/v1/requests/{self._record.request_ids[-1]}/stream"
            answering = self._session.get(path, params=query, timeout=timeout)
        else:
            path = f"{url}/v1/{'chat/completions' if self._spec.is_chat else 'completions'}"
            patient = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S)  # nothing is said before the first step
            answering = self._session.post(path, json=self._spec.body, timeout=patient)
            if not self._was_sent:
                self._progress.sent()
            self._was_sent = True
        async with answering as answer:
            self._progress.saw(self._record, Connected(url, self._why))
            if answer.status == 200:
                self._trouble_since = None
                self._progress.accepted(self._record, answer.headers[_ID_HEADER])
                await self._follow(answer)
            else:
                await self._refused(await answer.json())

    async def _refused(self, body: dict[str, Any]) -> None:
        error = body["error"]
        now = time.monotonic()
        self._trouble_since = self._trouble_since or now
        if error["code"] in TRY_AGAIN_CODES and now - self._trouble_since < RESUME_WITHIN_S:
            self._why = f"{error['code']}: {error['message']}"
            await asyncio.sleep(PAUSE_S)
            return
        self._end("failed", f"{error['code']}: {error['message']}")

    async def _follow(self, answer: aiohttp.ClientResponse) -> None:
        error = ""
        async for line in _lines(answer):
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                self._end("failed" if error else "completed", error)
                return
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                error = f"{event['error']['code']}: {event['error']['message']}"
            else:
                self._take(event)
        raise ConnectionError("the stream ended without an end")

    def _take(self, chunk: dict[str, Any]) -> None:
        if usage := chunk.get("usage"):
            self._usage = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk["choices"]:
            if reason := choice.get("finish_reason"):
                self._finish_reasons[choice["index"]] = reason
            text = choice["delta"].get("content") or "" if self._spec.is_chat else choice["text"]
            logprobs = _logprobs(choice.get("logprobs"))
            if text or logprobs:
                self._progress.saw(self._record, Piece(choice["index"], text, logprobs=logprobs))

    def _end(self, kind: str, error: str) -> None:
        reasons = tuple(self._finish_reasons.get(index) for index in range(self._spec.num_choices))
        usage = self._usage if kind == "completed" else None
        self._progress.saw(self._record, Ending(kind, reasons if kind == "completed" else (), usage, error))


async def _lines(answer: aiohttp.ClientResponse) -> Any:
    """Lines as they come. Raises TimeoutError after a silence: a gateway that lives sends comments."""
    while True:
        async with asyncio.timeout(SILENCE_S):
            line = await answer.content.readline()
        if not line:
            return
        yield line.rstrip(b"\r\n")


def _logprobs(logprobs: dict[str, Any] | None) -> tuple[Logprob, ...]:
    """Those of a chunk, in the shape of either endpoint."""
    if not logprobs:
        return ()
    if "content" in logprobs:
        return tuple(chat_logprob(position) for position in logprobs["content"])
    positions = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return tuple((token, value, tuple((top or {}).items())) for token, value, top in positions)
