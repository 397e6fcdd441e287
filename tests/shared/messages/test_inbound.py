"""What each service listens to: its union decodes each of its members and refuses everything else."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import Decoder, encode
from shared.errors import MessageError
from shared.messages import (
    DetokenizerInbound,
    ExecutorInbound,
    GatewayInbound,
    Prompt,
    SchedulerInbound,
    Status,
    TokenizerInbound,
)
from tests.shared.messages.examples import EXAMPLES, example_of, message_classes
from tests.shared.messages.plain import pack, plain

INBOUND = {
    "gateway": GatewayInbound,
    "tokenizer": TokenizerInbound,
    "scheduler": SchedulerInbound,
    "executor": ExecutorInbound,
    "detokenizer": DetokenizerInbound,
}
DECODERS: dict[str, Decoder[Any]] = {name: Decoder(union) for name, union in INBOUND.items()}
TAGGED = [kind for kind in message_classes() if kind.__struct_config__.tag is not None]


@pytest.mark.parametrize("service", INBOUND)
def test_every_member_is_decoded(service: str) -> None:
    for kind in get_args(INBOUND[service]):
        assert DECODERS[service].decode(encode(example_of(kind))) == example_of(kind)


@pytest.mark.parametrize("service", INBOUND)
def test_every_other_message_is_refused(service: str) -> None:
    for example in EXAMPLES:
        if type(example) not in get_args(INBOUND[service]):
            with pytest.raises(MessageError):
                DECODERS[service].decode(encode(example))


def test_every_message_that_travels_by_itself_has_a_listener() -> None:
    heard = {kind for union in INBOUND.values() for kind in get_args(union)}
    parts = {*get_args(Status), *get_args(Prompt)}
    assert set(TAGGED) - parts == heard


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in TAGGED if kind not in get_args(Status)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("service", INBOUND)
def test_every_truncation_is_refused(service: str) -> None:
    for kind in get_args(INBOUND[service]):
        payload = encode(example_of(kind))
        for length in range(len(payload)):
            with pytest.raises(MessageError):
                DECODERS[service].decode(payload[:length])


@pytest.mark.parametrize("service", INBOUND)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"hello",
        b"{}",
        b"\x00",
        b"\xc1",
        b"\xc0",
        b"\x90",
        pack({"type": "run_step"}),
        pack(["no_such_message", 1]),
        pack([None]),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=lambda payload: payload[:12].hex() or "nothing",
)
def test_garbage_is_refused(service: str, payload: bytes) -> None:
    with pytest.raises(MessageError):
        DECODERS[service].decode(payload)


def test_something_after_the_message_is_refused() -> None:
    (kind, *_) = get_args(ExecutorInbound)
    with pytest.raises(MessageError):
        DECODERS["executor"].decode(encode(example_of(kind)) + b"\x00")


def test_huge_nesting_where_anything_may_stand_is_refused() -> None:
    start = pack(["tokenize_prompt", "call-1", "gateway-1", "tiny"])
    deep = b"\x95" + start[1:] + b"\x93\xa4chat\x90" + b"\x81\xa1a" * 100_000 + b"\x01"
    with pytest.raises(MessageError):
        DECODERS["tokenizer"].decode(deep)


def test_integer_arrays_that_are_not_packed_int32_are_refused() -> None:
    start = ["detokenize_tokens", "call-1", "gateway-1", "tiny"]
    assert DECODERS["tokenizer"].decode(pack([*start, b"\x01\x00\x00\x00"])).token_ids[0] == 1
    for wrong in (b"\x01\x00\x00", [1, 2], "abcd", None, 1):
        with pytest.raises(MessageError):
            DECODERS["tokenizer"].decode(pack([*start, wrong]))


def test_every_field_of_the_wrong_type_is_refused() -> None:
    impostor = {"neither": "a map where none may stand"}
    for service, union in INBOUND.items():
        for kind in get_args(union):
            fields = plain(example_of(kind))
            for position in range(1, len(fields)):
                payload = pack([*fields[:position], impostor, *fields[position + 1 :]])
                with pytest.raises(MessageError):
                    DECODERS[service].decode(payload)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=12,
)


def _decode_or_refuse(decoder: Decoder[Any], payload: bytes) -> msgspec.Struct | None:
    try:
        message = decoder.decode(payload)
    except MessageError:
        return None
    assert isinstance(message, msgspec.Struct)
    return message


@given(service=st.sampled_from(sorted(INBOUND)), payload=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(service: str, payload: bytes) -> None:
    _decode_or_refuse(DECODERS[service], payload)


@given(service=st.sampled_from(sorted(INBOUND)), tag=st.sampled_from(TAGGED), fields=st.lists(_ANYTHING, max_size=6))
def test_any_values_behind_a_known_tag_are_decoded_or_refused(
    service: str, tag: type[msgspec.Struct], fields: list[Any]
) -> None:
    _decode_or_refuse(DECODERS[service], pack([tag.__struct_config__.tag, *fields]))


@given(data=st.data(), service=st.sampled_from(sorted(INBOUND)))
def test_a_damaged_message_is_refused_or_can_be_sent_on(data: st.DataObject, service: str) -> None:
    payload = bytearray(encode(example_of(data.draw(st.sampled_from(get_args(INBOUND[service]))))))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    message = _decode_or_refuse(DECODERS[service], bytes(payload))
    if message is not None:
        encode(message)
