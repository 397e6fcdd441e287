"""A web server for tests: files with ETags and ranges, a record of every request, and faults on demand."""

import asyncio
import contextlib
import hashlib
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Request:
    """One request as it arrived."""

    path: str
    query: str
    range: str | None
    if_match: str | None
    authorization: str | None


@dataclass
class FileServer:
    """Serves `files` (path without leading slash → content) on a port of its own, from a thread of its own."""

    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str | None] = field(default_factory=dict)
    """Overrides; None sends no ETag. By default a hash of the content."""
    requests: list[Request] = field(default_factory=list)
    statuses: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """Statuses with which the next requests for a path are answered instead."""
    fault_headers: dict[str, dict[str, str]] = field(default_factory=dict)
    """What those answers carry besides."""
    breaks: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """After how many bytes the next answers for a path break off."""
    holds: dict[str, int] = field(default_factory=dict)
    """After how many bytes the answers for a path stand still until the entry is gone and `release` is called."""
    redirects: dict[str, str] = field(default_factory=dict)
    has_ranges: bool = True
    checks_if_match: bool = True
    url: str = ""

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._stop = asyncio.Event()
        self._released = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def start(self) -> None:
        """Return when it takes connections."""
        self._thread.start()
        assert self._is_up.wait(10)

    def release(self) -> None:
        """Let all answers that stand still go on."""
        self.holds.clear()
        self._loop.call_soon_threadsafe(self._released.set)

    def stop(self) -> None:
        """Return when its thread has ended."""
        self.release()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    def ranges(self, path: str) -> list[str | None]:
        """The Range headers of the requests for a path, but for those that only look at the first byte."""
        return [request.range for request in self.requests if request.path == path and request.range != "bytes=0-0"]

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer, allow_head=False)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._is_up.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, headers = request.match_info["path"], request.headers
        byte_range, if_match = headers.get("Range"), headers.get("If-Match")
        self.requests.append(Request(path, request.query_string, byte_range, if_match, headers.get("Authorization")))
        if path in self.redirects:
            raise web.HTTPFound(self.redirects[path])
        if byte_range != "bytes=0-0" and self.statuses[path]:
            return web.Response(status=self.statuses[path].popleft(), headers=self.fault_headers.get(path))
        if path not in self.files:
            return web.Response(status=404)
        content = self.files[path]
        etag = self.etags.get(path, f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"')
        if self.checks_if_match and if_match is not None and if_match != etag:
            return web.Response(status=412)
        return await self._send(request, path, content, etag)

    async def _send(self, request: web.Request, path: str, content: bytes, etag: str | None) -> web.StreamResponse:
        start, stop, byte_range = 0, len(content), request.headers.get("Range")
        headers = {"ETag": etag} if etag is not None else {}
        if byte_range is not None and self.has_ranges:
            first, last = byte_range.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        breaks = self.breaks[path]
        length = breaks.popleft() if breaks and byte_range != "bytes=0-0" else stop - start
        response = web.StreamResponse(status=206 if "Content-Range" in headers else 200, headers=headers)
        response.content_length = stop - start
        with contextlib.suppress(ConnectionError):  # the client has seen enough
            await response.prepare(request)
            held = self.holds.get(path, length) if byte_range != "bytes=0-0" else length
            await response.write(content[start : start + held])
            if held < length:
                await self._released.wait()
                await response.write(content[start + held : start + length])
            if length < stop - start and request.transport is not None:
                request.transport.close()
        return response
