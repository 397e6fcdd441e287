"""msgpack in and out."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import Decoder, encode
from shared.errors import MessageError
from shared.messages import ChatPrompt, TokenPrompt, TokensDetokenized, int32s


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_integer_arrays_come_back_as_they_were(numbers: list[int]) -> None:
    decoded = Decoder[TokenPrompt](TokenPrompt).decode(encode(TokenPrompt(int32s(numbers))))
    assert list(decoded.token_ids) == numbers


def test_a_thousand_tokens_cost_four_bytes_each() -> None:
    assert len(encode(TokenPrompt(int32s(range(1000))))) == len(encode(TokenPrompt(int32s(range(300))))) + 4 * 700


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_a_number_that_does_not_fit_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        int32s([number])


def test_decoded_arrays_are_independent_of_the_payload() -> None:
    payload = encode(TokenPrompt(int32s([1, 2])))
    decoder: Decoder[TokenPrompt] = Decoder(TokenPrompt)
    first, second = decoder.decode(payload), decoder.decode(payload)
    first.token_ids.append(3)
    assert list(second.token_ids) == [1, 2]


def _nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "message",
    [
        TokensDetokenized("call-1", "half of a pair: \ud800"),
        TokensDetokenized("call-1", 2**64),  # type: ignore[arg-type]  # the point of the test
        TokensDetokenized("call-1", object()),  # type: ignore[arg-type]
        TokenPrompt(array("d", [1.0])),  # type: ignore[arg-type]
        ChatPrompt((), _nested(100_000)),
    ],
    ids=["lone surrogate", "huge integer", "object", "array of floats", "deep nesting"],
)
def test_what_cannot_travel_is_a_message_error(message: msgspec.Struct) -> None:
    with pytest.raises(MessageError):
        encode(message)
