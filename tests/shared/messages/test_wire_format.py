"""The bytes of messages: as checked in, and readable by any msgpack library."""

from pathlib import Path

import msgspec
import pytest

from shared.codec import Decoder, encode
from tests.shared.messages.examples import EXAMPLES, example_of, message_classes, name_of
from tests.shared.messages.plain import plain, unpack


def _golden() -> dict[str, bytes]:
    text = Path(__file__).with_name("golden.txt").read_text()
    blocks = (block.split() for block in text.split("\n\n")[1:])
    return {name: bytes.fromhex("".join(lines)) for name, *lines in blocks}


GOLDEN = _golden()


def test_every_message_class_has_one_example_and_one_golden_line() -> None:
    classes = list(message_classes())
    assert len(classes) > 40
    assert [type(example_of(kind)) for kind in classes] == classes
    assert set(GOLDEN) == {kind.__name__ for kind in classes}


def test_examples_set_every_field_to_something_else_than_its_default() -> None:
    """Else two fields could change places and the golden bytes would not show it."""
    told_apart_by_neighbours = {("ErrorInfo", "param"), ("Presence", "is_leaving")}
    for example in EXAMPLES:
        for field in msgspec.structs.fields(example):
            is_default = field.default is not msgspec.NODEFAULT and getattr(example, field.name) == field.default
            assert not is_default or (name_of(example), field.name) in told_apart_by_neighbours, field.name


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_bytes_are_as_checked_in(example: msgspec.Struct) -> None:
    assert encode(example).hex() == GOLDEN[name_of(example)].hex()


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_checked_in_bytes_decode_to_the_message(example: msgspec.Struct) -> None:
    assert Decoder(type(example)).decode(GOLDEN[name_of(example)]) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_checked_in_bytes_are_plain_msgpack_arrays(example: msgspec.Struct) -> None:
    assert unpack(GOLDEN[name_of(example)]) == plain(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_messages_are_frozen(example: msgspec.Struct) -> None:
    with pytest.raises(AttributeError):
        setattr(example, example.__struct_fields__[0], None)
