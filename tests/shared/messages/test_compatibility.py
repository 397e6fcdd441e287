"""Inside one major version fields come only at the end, with a default: old and new processes then share a mesh."""

from typing import Any

import msgspec
import pytest

from shared.codec import Decoder, encode
from shared.messages import AdoptRequest, CancelRequest, Message, RequestMoved
from tests.shared.messages.examples import EXAMPLES, GATEWAY, REQUEST, SCHEDULER, name_of
from tests.shared.messages.plain import pack, plain

BEFORE: tuple[tuple[str, Message], ...] = (
    ("94ae63616e63656c5f72657175657374a67265712d3030a9676174657761792d3102", CancelRequest(REQUEST, GATEWAY, 2)),
    ("93ad726571756573745f6d6f766564a67265712d3030ab7363686564756c65722d31", RequestMoved(REQUEST, SCHEDULER)),
    (
        "95ad61646f70745f72657175657374a761646f70742d31a67265712d3030a430613162a9676174657761792d31",
        AdoptRequest("adopt-1", REQUEST, "0a1b", GATEWAY),
    ),
)
"""Bytes of messages from before they gained their last fields, and what they mean."""


@pytest.mark.parametrize(("payload", "message"), BEFORE, ids=[name_of(message) for _, message in BEFORE])
def test_bytes_from_before_an_addition_mean_what_they_meant(payload: str, message: Message) -> None:
    assert Decoder(type(message)).decode(bytes.fromhex(payload)) == message


def _newer_version_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__, [("added", int, 7)], bases=(kind,), frozen=True, array_like=True, tag=config.tag
    )


def _with_additions(value: Any) -> Any:
    """The plain form of a value whose every struct, at every depth, has gained one field."""
    if isinstance(value, msgspec.Struct):
        tag = [value.__struct_config__.tag] if value.__struct_config__.tag is not None else []
        return [*tag, *(_with_additions(getattr(value, field)) for field in value.__struct_fields__), ["added"]]
    return [_with_additions(item) for item in value] if isinstance(value, tuple) else plain(value)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_newer_reader_fills_in_the_field_that_an_older_writer_lacks(example: msgspec.Struct) -> None:
    newer = _newer_version_of(type(example))
    decoded = Decoder[Any](newer).decode(encode(example))
    assert decoded.added == 7
    assert plain(decoded)[:-1] == plain(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_older_reader_passes_over_the_field_that_a_newer_writer_added(example: msgspec.Struct) -> None:
    newer = _newer_version_of(type(example))
    values = {field: getattr(example, field) for field in example.__struct_fields__}
    assert Decoder(type(example)).decode(encode(newer(**values, added=9))) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_older_reader_passes_over_additions_at_every_depth(example: msgspec.Struct) -> None:
    payload = pack(_with_additions(example))
    assert Decoder(type(example)).decode(payload) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_fields_with_a_default_may_be_left_off_the_end(example: msgspec.Struct) -> None:
    required = [f.name for f in msgspec.structs.fields(example) if f.required]
    tag = [example.__struct_config__.tag] if example.__struct_config__.tag is not None else []
    payload = pack(tag + [plain(getattr(example, name)) for name in required])
    decoded = Decoder[msgspec.Struct](type(example)).decode(payload)
    assert decoded == type(example)(**{name: getattr(example, name) for name in required})


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_fields_with_a_default_come_last(example: msgspec.Struct) -> None:
    needs_a_value = [field.required for field in msgspec.structs.fields(example)]
    assert needs_a_value == sorted(needs_a_value, reverse=True)
