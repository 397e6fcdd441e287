"""The HTTP server: routes, bodies, errors as JSON, and the questions about the gateway itself.

Owns sockets and status codes. What an endpoint means is with `generation`, `tokenization`, `models` and `sockets`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.attachments import Attachments
from services.gateway.chat import chat_draft
from services.gateway.completions import completion_draft
from services.gateway.config import GatewayConfig
from services.gateway.connections import SlowReaderWatch
from services.gateway.drafts import Draft, Endpoint
from services.gateway.failures import RequestFailed, encode_error, error_headers
from services.gateway.generation import Generation
from services.gateway.keys import Caller, Keys
from services.gateway.mesh import Mesh
from services.gateway.models import list_models, one_model, readiness
from services.gateway.resumption import counts_in, find
from services.gateway.sockets import Sockets
from services.gateway.span_attributes import parent_in
from services.gateway.sse import REQUEST_ID_HEADER
from services.gateway.tokenization import detokenize, tokenize
from services.gateway.traces import Traces, wants_steps
from services.gateway.validation import decode_json
from shared.errors import InvalidRequest, NotFound, RequestError, TooLarge
from shared.ids import new_request_id
from shared.messages import ErrorInfo
from shared.telemetry.metrics import MetricsPage

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_IDLE_CONNECTION_S = 75.0
_BACKLOG = 1024
"""Connections that may wait to be taken when many clients come at once."""
_CLOSE_TIMEOUT_S = 2.0
"""How long answers that are being written may take when the server stops."""


class HttpServer:
    """The front door of one gateway."""

    def __init__(self, mesh: Mesh, config: GatewayConfig) -> None:
        self.address = ""
        self.metrics_page: MetricsPage | None = None
        """What `/metrics` shows, once there is something."""
        self.num_answering = 0
        """Requests whose answer is not complete, WebSockets aside."""
        self._mesh = mesh
        self._config = config
        self._keys = Keys(config.api_keys)
        self._traces = Traces(mesh)
        self._watch = SlowReaderWatch(mesh.clock, config.write_timeout_s)
        attachments = Attachments(mesh)
        self._generation = Generation(mesh, attachments, config)
        self._sockets = Sockets(mesh, attachments, config, keys=self._keys, watch=self._watch)
        self._runner: web.AppRunner | None = None

    @property
    def num_connections(self) -> int:
        """Open connections of clients."""
        return len(self._runner.server.connections) if self._runner is not None and self._runner.server else 0

    @property
    def num_sockets(self) -> int:
        """Of these, WebSockets."""
        return len(self._sockets)

    @property
    def num_cut_off(self) -> int:
        """Connections closed because the client did not read."""
        return self._watch.num_cut_off

    async def start(self) -> None:
        """Listen. Raises OSError if the address is taken."""
        await self._traces.start()
        self._runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,  # a client that leaves is noticed at once, whatever its handler waits for
            access_log=None,
            keepalive_timeout=_IDLE_CONNECTION_S,
            shutdown_timeout=_CLOSE_TIMEOUT_S,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._config.host, self._config.port, backlog=_BACKLOG).start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._mesh.spans.address = host, port
        self._mesh.on_tick.add(self._check_connections)
        log.info("listening", extra={"address": self.address})

    def say_going_away(self, deadline_s: float) -> None:
        """Tell the clients that can be told that this gateway drains."""
        self._sockets.say_going_away(deadline_s)

    async def stop(self) -> None:
        """Close every connection, after what is being written; at once those of streams that go on elsewhere."""
        self._mesh.on_tick.discard(self._check_connections)
        await self._sockets.close_all()
        self._generation.break_off()
        if self._runner is not None:
            await self._runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[self._count, self._errors_as_json]
        )
        application.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/v1/chat/completions", self._chat_completions),
                web.post("/v1/completions", self._completions),
                web.get("/v1/requests/{request_id}/stream", self._resume, allow_head=False),
                web.get("/v1/requests/{request_id}/trace", self._trace, allow_head=False),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/v1/stream", self._sockets.handle, allow_head=False),
            ]
        )
        return application

    def _check_connections(self) -> None:
        if self._runner is not None and self._runner.server is not None:
            self._watch.check(self._runner.server.connections)

    # Endpoints.

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def _readyz(self, _request: web.Request) -> web.Response:
        report = readiness(self._mesh)
        return _json(report, status=200 if report.is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        """For operators: where clients need keys, it is not for clients."""
        is_shown = not self._config.api_keys if self._config.metrics == "auto" else self._config.metrics == "on"
        if not is_shown or self.metrics_page is None:
            raise web.HTTPNotFound
        body, content_type = await self.metrics_page.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _models(self, request: web.Request) -> web.Response:
        self._keys.caller(request.headers)
        return _json(list_models(self._mesh))

    async def _model(self, request: web.Request) -> web.Response:
        self._keys.caller(request.headers)
        return _json(one_model(self._mesh, request.match_info["model"]))

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Endpoint.CHAT, chat_draft)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Endpoint.COMPLETION, completion_draft)

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        caller = self._keys.caller(request.headers)
        chars, tokens = counts_in(request.query)
        resumption = await find(self._mesh, request.match_info["request_id"], caller.owner, chars=chars, tokens=tokens)
        return await self._generation.resume(request, resumption)

    async def _trace(self, request: web.Request) -> web.Response:
        caller = self._keys.caller(request.headers)
        with_steps = wants_steps(request.query)
        return _json(await self._traces.look_up(request.match_info["request_id"], caller.owner, with_steps=with_steps))

    async def _tokenize(self, request: web.Request) -> web.Response:
        _, body = await self._read(request)
        return _json(await tokenize(self._mesh, body))

    async def _detokenize(self, request: web.Request) -> web.Response:
        _, body = await self._read(request)
        return _json(await detokenize(self._mesh, body))

    async def _generate(
        self, request: web.Request, endpoint: Endpoint, draft_of: Callable[[dict[str, Any]], Draft]
    ) -> web.StreamResponse:
        request_id, owner = new_request_id(), None
        self._mesh.spans.begin(request_id, endpoint.operation, parent_in(request.headers))
        refusal: ErrorInfo | None = None
        try:
            caller = self._keys.caller(request.headers)
            owner = caller.owner
            draft = draft_of(await self._body(request))
            return await self._generation.create(request, draft, caller, request_id)
        except RequestError as error:
            self._mesh.num_refused[error.code] += 1
            self._mesh.turned_away(endpoint.operation, error.code, request_id)
            refusal = ErrorInfo.of(error)
            raise RequestFailed(refusal, request_id) from error
        except Exception:
            refusal = ErrorInfo.of(RequestError("Internal error."))
            raise
        finally:
            self._mesh.spans.refused(request_id, refusal, owner)  # unless it was admitted

    async def _read(self, request: web.Request) -> tuple[Caller, dict[str, Any]]:
        """Whose request this is and the object in its body: the key is checked before anything is read."""
        caller = self._keys.caller(request.headers)
        return caller, await self._body(request)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        self._mesh.check_open()
        if request.content_type != "application/json":
            raise InvalidRequest("Send the body with the header Content-Type: application/json.")
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                data = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError as error:
            raise InvalidRequest("The body could not be read: it ended early, or is not encoded as it says.") from error
        except TimeoutError:
            raise InvalidRequest("The body did not arrive in time.") from None
        return decode_json(data)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body must have at most {self._config.max_body_bytes} bytes.")

    # Middleware.

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_socket = request.path == "/v1/stream"
        self.num_answering += not is_socket
        status, began = "", time.perf_counter()
        try:
            response = await handler(request)
            status = str(response.status)
            return response
        finally:
            self.num_answering -= not is_socket
            if not is_socket:
                duration_s = time.perf_counter() - began
                self._mesh.metrics.answered(request.method, _route(request), status, duration_s)

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except RequestError as error:
            self._mesh.num_refused[error.code] += 1
            response = _failure(ErrorInfo.of(error))
        except RequestFailed as failure:
            response = _failure(failure.error, {REQUEST_ID_HEADER: failure.request_id} if failure.request_id else {})
        except web.HTTPException as error:
            response = _failure(
                _of_http(error), {name: value for name, value in error.headers.items() if name == "Allow"}
            )
        except ConnectionError:
            raise  # the client is gone: there is nobody to answer
        except Exception:
            log.exception("a bug failed a request", extra={"path": request.path})
            response = _failure(ErrorInfo.of(RequestError("Internal error.")))
        if not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, new_request_id())
        return response


def _route(request: web.Request) -> str:
    """The path as it is routed, in which what clients choose is a name in braces; empty for what leads nowhere."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def _of_http(error: web.HTTPException) -> ErrorInfo:
    """What the server's own refusals (no such path, no such method) look like."""
    if error.status == 404:
        return ErrorInfo.of(NotFound("There is nothing at this path."))
    return ErrorInfo(error.status, "invalid_request_error", "invalid_request", f"{error.reason}.")


def _failure(error: ErrorInfo, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=encode_error(error),
        status=error.status,
        headers=error_headers(error) | (headers or {}),
        content_type="application/json",
    )


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
