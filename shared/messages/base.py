"""What all messages have in common: frozen, packed as an array behind a tag, integers in one block of memory.

A message class names its tag. Commands are imperatives (`RunStep`), facts are in the past tense (`StepCompleted`).
Inside one major version fields are only ever added at the end, with a default.
"""

from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    Int32Array: TypeAlias = array[int]
else:  # `array` takes a parameter at run time only from Python 3.12 on
    Int32Array = array


def int32s(numbers: Iterable[int] = ()) -> Int32Array:
    """The numbers as a packed int32 array. Raises OverflowError for one that does not fit."""
    return array("i", numbers)


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the model's context."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base of everything that travels between services."""
