"""What all parts of a recording have in common: packed like a message, as an array behind a tag."""

import msgspec


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The base of everything in a recording."""
