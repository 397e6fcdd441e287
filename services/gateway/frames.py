"""What travels on a WebSocket: the messages of both sides, in JSON text frames or msgpack binary frames.

Also puts a payload into a frame, so that everything new on a socket goes out in one write.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import WSMsgType

from services.gateway.answers import ContentLogprob, UsageBody
from services.gateway.failures import ErrorBody
from services.gateway.validation import plain_error
from shared.errors import InvalidRequest
from shared.messages import FinishReason, Timing

_Unset = msgspec.UnsetType


# From the client.


class CreateRequest(msgspec.Struct, tag_field="type", tag="request.create", forbid_unknown_fields=True):
    """Start a request; `id` is the client's name for it while it is open."""

    id: str
    body: dict[str, Any]
    """Of `POST /v1/chat/completions` if it has `messages`, of `POST /v1/completions` if it has `prompt`."""
    token_ids: bool = False
    """Whether deltas carry the tokens that the text is made of."""
    traceparent: str | None = None
    """Where in a trace of the client's it belongs, as in the HTTP header; without it, what the connection's said."""
    tracestate: str | None = None


class CancelOpenRequest(msgspec.Struct, tag_field="type", tag="request.cancel", forbid_unknown_fields=True):
    """Stop a request, named by either of its ids; answered by its terminal event."""

    request_id: str | None = None
    id: str | None = None


class ResumeRequest(msgspec.Struct, tag_field="type", tag="request.resume", forbid_unknown_fields=True):
    """Go on with a request of a connection that broke, perhaps at another gateway; answered as `request.create`."""

    request_id: str
    offset: int | list[int] = 0
    """How many characters the client has: of the first choice, or of each choice."""
    token_offset: int | list[int] = 0
    """The same in tokens, for deltas that carry tokens or log-probabilities."""
    id: str | None = None
    """The client's name for it on this connection; by default the one that it had when it was created."""


class Ping(msgspec.Struct, tag_field="type", tag="ping", forbid_unknown_fields=True):
    """Answered by a pong."""


ClientMessage = CreateRequest | CancelOpenRequest | ResumeRequest | Ping


# From the server.


class Accepted(msgspec.Struct, tag_field="type", tag="request.accepted"):
    """The mesh has taken the request."""

    id: str
    request_id: str


class TextDelta(msgspec.Struct, tag_field="type", tag="request.delta"):
    """Text from character `offset` of choice `index`."""

    request_id: str
    index: int
    offset: int
    text: str
    token_offset: int | _Unset = msgspec.UNSET
    """Of the tokens that follow, if any were asked for."""
    token_ids: Sequence[int] | _Unset = msgspec.UNSET
    logprobs: list[ContentLogprob] | _Unset = msgspec.UNSET


class FinishedChoice(msgspec.Struct):
    """Why one choice ended."""

    index: int
    finish_reason: FinishReason | None


class TimingBody(msgspec.Struct):
    """Where the time went, in seconds since the request reached a scheduler, whichever went on with it since."""

    queue_s: float
    first_token_s: float
    total_s: float

    @staticmethod
    def of(timing: Timing) -> "TimingBody":
        """The timing as a client sees it."""
        return TimingBody(timing.queue_s, timing.first_token_s, timing.total_s)


class Completed(msgspec.Struct, tag_field="type", tag="request.completed"):
    """Terminal: everything was said."""

    id: str
    request_id: str
    choices: list[FinishedChoice]
    usage: UsageBody
    timing: TimingBody


class Failed(msgspec.Struct, tag_field="type", tag="request.failed"):
    """Terminal: refused, or failed, then with `usage` after some output. Without `request_id` if it was never begun."""

    error: ErrorBody
    id: str | _Unset = msgspec.UNSET
    request_id: str | _Unset = msgspec.UNSET
    retry_after_s: float | _Unset = msgspec.UNSET
    usage: UsageBody | _Unset = msgspec.UNSET


class Cancelled(msgspec.Struct, tag_field="type", tag="request.cancelled"):
    """Terminal: the client wanted no more. `usage` is null if nothing is known of it."""

    id: str
    request_id: str
    usage: UsageBody | None


class GoingAway(msgspec.Struct, tag_field="type", tag="going_away"):
    """This gateway drains: what runs may finish until the deadline, then the connection is closed with 1012 and what
    is left can be resumed elsewhere; new requests go elsewhere at once."""

    deadline_ms: int


class Pong(msgspec.Struct, tag_field="type", tag="pong"):
    """The answer to a ping."""


class ProtocolError(msgspec.Struct, tag_field="type", tag="error"):
    """A message could not be understood, or asks for something impossible; the connection goes on."""

    error: ErrorBody
    id: str | _Unset = msgspec.UNSET


ServerMessage = Accepted | TextDelta | Completed | Failed | Cancelled | GoingAway | Pong | ProtocolError


@dataclass(frozen=True, slots=True)
class Encoding:
    """One of the two ways in which messages become frames."""

    subprotocol: str
    frame_kind: WSMsgType
    encode: Callable[[ServerMessage], bytes]
    decoder: "msgspec.json.Decoder[ClientMessage] | msgspec.msgpack.Decoder[ClientMessage]"

    def frame(self, message: ServerMessage) -> bytes:
        """A message as a whole frame."""
        return frame(self.frame_kind, self.encode(message))

    def decode(self, data: str | bytes) -> ClientMessage:
        """The client's message in a frame's payload. Raises InvalidRequest that says what is wrong with it."""
        try:
            return self.decoder.decode(data)  # type: ignore[arg-type]  # text for JSON, bytes for msgpack
        except msgspec.ValidationError as error:
            if "`$.type`" in str(error):
                raise InvalidRequest(f"type must be one of {', '.join(_TYPES)}.", param="type") from None
            raise plain_error(str(error)) from None
        except RecursionError:
            raise InvalidRequest("The message is nested too deeply.") from None
        except (msgspec.DecodeError, UnicodeError) as error:
            raise InvalidRequest(f"The message cannot be read: {error}.") from None


_TYPES: Final = ("request.create", "request.cancel", "request.resume", "ping")

JSON: Final = Encoding(
    "shoal.v1.json", WSMsgType.TEXT, msgspec.json.Encoder().encode, msgspec.json.Decoder(ClientMessage)
)
MSGPACK: Final = Encoding(
    "shoal.v1.msgpack", WSMsgType.BINARY, msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ClientMessage)
)


def close_frame(code: int, reason: str) -> bytes:
    """The frame that ends a connection."""
    return frame(WSMsgType.CLOSE, struct.pack("!H", code) + reason.encode()[:123])


def frame(kind: WSMsgType, payload: bytes) -> bytes:
    """A whole, unmasked frame, as servers send them (RFC 6455, section 5.2)."""
    first, length = 0x80 | kind, len(payload)
    if length < 126:
        return struct.pack("!BB", first, length) + payload
    if length < 1 << 16:
        return struct.pack("!BBH", first, 126, length) + payload
    return struct.pack("!BBQ", first, 127, length) + payload
