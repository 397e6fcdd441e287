"""Messages as a reader without our classes sees them, through the `msgpack` package."""

from array import array
from enum import Enum
from typing import Any

import msgpack
import msgspec


def pack(value: Any) -> bytes:
    """Plain values as msgpack."""
    payload: bytes = msgpack.packb(value)
    return payload


def unpack(payload: bytes) -> Any:
    """msgpack as plain values."""
    return msgpack.unpackb(payload, strict_map_key=False)


def plain(value: Any) -> Any:
    """A message as arrays of a tag and the fields, with integer arrays as bytes."""
    if isinstance(value, msgspec.Struct):
        tag = [value.__struct_config__.tag] if value.__struct_config__.tag is not None else []
        return tag + [plain(getattr(value, field)) for field in value.__struct_fields__]
    if isinstance(value, array):
        return b"".join(number.to_bytes(4, "little", signed=True) for number in value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
