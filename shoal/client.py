"""The client of a mesh: its addresses, its key, and what can be asked of it."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import aiohttp

from shoal import trace_context
from shoal.connection import Connection
from shoal.gateways import Gateways
from shoal.received import Received
from shoal.results import Result
from shoal.stream import NAME, Patience, Stream

Messages = Sequence[Mapping[str, Any]]
"""A conversation, as OpenAI's chat completions take it."""
Prompt = str | Sequence[Any]
"""Text, texts, token ids, or several of these, as OpenAI's completions take it."""


class Client:
    """Asks one mesh, through any of its gateways. An async context manager: leaving it cancels what is open.

    A stream that loses its connection, or whose gateway dies, goes on by itself at the next gateway from the character
    that it had.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        api_key: str | None = None,
        model: str | None = None,
        patience_s: float = 60.0,
        num_retries: int = 2,
        connect_timeout_s: float = 5.0,
        heartbeat_s: float = 1.0,
    ) -> None:
        """`addresses` are those of gateways of one mesh, such as `http://127.0.0.1:8000`.

        `model` is asked where a request names none. `patience_s`: for so long without a gateway a stream looks for one
        before it raises Disconnected. `num_retries`: so often a request that is refused for the moment is asked again,
        when the mesh says. `heartbeat_s`: a gateway that is silent for so long is asked whether it lives, and left
        if it does not answer. Raises ValueError for what is no address.
        """
        self._gateways = Gateways(addresses)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._patience = Patience(patience_s, num_retries)
        self._connect_timeout_s = connect_timeout_s
        self._heartbeat_s = heartbeat_s
        self._http: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._streams: WeakSet[Stream] = WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is open and close every connection. Nothing can be asked afterwards."""
        self._is_closed = True
        for stream in list(self._streams):
            await stream.cancel()
        if self._http is not None:
            await self._http.close()
            self._http = None

    def stream(
        self,
        *,
        messages: Messages | None = None,
        prompt: Prompt | None = None,
        model: str | None = None,
        token_ids: bool = False,
        **options: Any,
    ) -> Stream:
        """The answer to a conversation (`messages`) or the continuation of a `prompt`, as it comes.

        `token_ids`: whether deltas carry tokens. `options` are any further fields of the body that OpenAI's endpoint or
        Shoal's takes, such as `max_tokens` or `seed`. Nothing is sent before the stream is iterated over. If a span of
        OpenTelemetry is current at this call, the request belongs to it. Raises ValueError unless exactly one of
        `messages` and `prompt` is given, and without a model.
        """
        if (messages is None) == (prompt is None):
            raise ValueError("Give either messages or prompt.")
        name = model or self._model
        if name is None:
            raise ValueError("Give a model, here or to the client.")
        what = {"messages": list(messages)} if messages is not None else {"prompt": prompt}
        body = {"model": name, **what, **options}
        create = {"type": "request.create", "id": NAME, "body": body, "token_ids": token_ids}
        return self._open(create=create | trace_context.current(), received=Received())

    async def generate(
        self,
        *,
        messages: Messages | None = None,
        prompt: Prompt | None = None,
        model: str | None = None,
        token_ids: bool = False,
        **options: Any,
    ) -> Result:
        """As `stream`, in one piece. Raises what iterating over a stream does."""
        stream = self.stream(messages=messages, prompt=prompt, model=model, token_ids=token_ids, **options)
        return await self._whole(stream)

    def resume(self, request_id: str, *, offset: int = 0, token_offset: int = 0) -> Stream:
        """Go on with a request that was begun by somebody else, or before this program was started again.

        `offset` is how many characters of its first choice are there already, `token_offset` how many tokens. The
        deltas and the result have what comes after them.
        """
        return self._open(request_id=request_id, received=Received(offset, token_offset))

    async def _whole(self, stream: Stream) -> Result:
        async with stream:
            async for _ in stream:
                pass
            if stream.result is None:
                raise RuntimeError("The client was closed.")
            return stream.result

    def _open(self, **what: Any) -> Stream:
        connect = partial(self._connect, trace_context.current())
        stream = Stream(connect, self._gateways, self._patience, **what)
        self._streams.add(stream)
        return stream

    async def _connect(self, headers: Mapping[str, str], address: str) -> Connection:
        if self._is_closed:
            raise RuntimeError("The client is closed.")
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        return await Connection.open(
            self._http, address, headers, timeout_s=self._connect_timeout_s, heartbeat_s=self._heartbeat_s
        )
