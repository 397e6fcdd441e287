"""msgpack in and out. Owns how a message becomes bytes; the messages themselves are in `shared.messages`.

A message is an array: its tag, then its fields in order. Integer arrays (token ids, block ids) are little-endian
int32 in one binary value, so that a thousand tokens cost one copy and no parsing. Nothing is ever pickled.
"""

import sys
from array import array
from typing import Any, Generic, TypeVar

import msgspec

from shared.errors import MessageError

T = TypeVar("T")

_INT32 = "i"
if array(_INT32).itemsize != 4 or sys.byteorder != "little":
    raise ImportError("Shoal needs a little-endian platform whose C int has 32 bits")


def _pack(value: object) -> bytes:
    if isinstance(value, array) and value.typecode == _INT32:
        return value.tobytes()
    raise MessageError(f"a {type(value).__name__} cannot travel in a message")


def _unpack(kind: type, value: Any) -> object:
    if kind is array and isinstance(value, bytes) and len(value) % 4 == 0:
        numbers = array(_INT32)
        numbers.frombytes(value)
        return numbers
    raise ValueError(f"expected packed int32 for {kind.__name__}, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message. Raises MessageError for a value that has none, such as half of a surrogate pair."""
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise MessageError(f"a {type(message).__name__} cannot travel: {error}") from error


class Decoder(Generic[T]):
    """Decodes one kind of message, or a union of kinds told apart by tag."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, dec_hook=_unpack)

    def decode(self, payload: bytes) -> T:
        """The message in `payload`. Raises MessageError for anything else; fields added at the end are passed over."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise MessageError(f"not a message of the expected kind: {error}") from error
