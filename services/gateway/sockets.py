"""The WebSockets of one gateway: how one is opened, and what concerns them all. One connection is in `websocket`."""

from typing import Final

from aiohttp import web

from services.gateway.attachments import Attachments
from services.gateway.channels import Channels
from services.gateway.config import GatewayConfig
from services.gateway.connections import SlowReaderWatch
from services.gateway.failures import RequestFailed
from services.gateway.frames import JSON, MSGPACK, Encoding, GoingAway
from services.gateway.keys import KEY_PROTOCOL_PREFIX, Keys
from services.gateway.mesh import Mesh
from services.gateway.span_attributes import parent_in
from services.gateway.websocket import POLICY_VIOLATION, SERVICE_RESTART, SocketConnection
from services.gateway.wire import Wire
from shared.errors import InvalidRequest, RequestError
from shared.ids import new_request_id
from shared.messages import ErrorInfo

_SPAN: Final = "GET /v1/stream"
"""What the span of a connection that is refused is called."""
_ENCODINGS: Final = {encoding.subprotocol: encoding for encoding in (JSON, MSGPACK)}


class Sockets:
    """The WebSockets of one gateway."""

    def __init__(
        self, mesh: Mesh, attachments: Attachments, config: GatewayConfig, *, keys: Keys, watch: SlowReaderWatch
    ) -> None:
        self._mesh = mesh
        self._attachments = attachments
        self._config = config
        self._keys = keys
        self._watch = watch
        self._connections: set[SocketConnection] = set()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._connections)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one connection until it ends. Raises RequestFailed instead of opening it."""
        parent = parent_in(request.headers)
        try:
            caller = self._keys.caller(request.headers)
            self._mesh.check_open()
            encoding = _encoding(request.headers.get("Sec-WebSocket-Protocol", ""))
            wire = await Wire.open(request, encoding, self._config)
        except RequestError as error:
            request_id, info = new_request_id(), ErrorInfo.of(error)
            self._mesh.num_refused[error.code] += 1
            self._mesh.spans.begin(request_id, _SPAN, parent)
            self._mesh.spans.refused(request_id, info, None)
            raise RequestFailed(info, request_id) from error
        connection = SocketConnection(
            wire,
            lambda on_news: Channels(
                caller,
                self._mesh,
                self._attachments,
                max_requests=self._config.max_requests_per_socket,
                on_news=on_news,
                parent=parent,
            ),
        )
        self._connections.add(connection)
        self._watch.say_goodbye_with(
            request.protocol, lambda: connection.close(POLICY_VIOLATION, "the client reads too slowly")
        )
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)
            self._watch.forget(request.protocol)
        return wire.response

    def say_going_away(self, deadline_s: float) -> None:
        """Tell every peer that this gateway drains."""
        for connection in self._connections:
            connection.reply(GoingAway(round(deadline_s * 1000)))

    async def close_all(self) -> None:
        """End every connection, after what there is to say on it."""
        for connection in list(self._connections):
            await connection.flush()
            connection.close(SERVICE_RESTART, "the gateway is shutting down")


def _encoding(offered: str) -> Encoding:
    protocols = [protocol.strip() for protocol in offered.split(",") if protocol.strip()]
    if not protocols:
        return JSON
    for protocol in protocols:
        if protocol in _ENCODINGS:
            return _ENCODINGS[protocol]
    also = " beside the key" if any(protocol.startswith(KEY_PROTOCOL_PREFIX) for protocol in protocols) else ""
    raise InvalidRequest(f"Offer one of the subprotocols {', '.join(_ENCODINGS)}{also}.")
