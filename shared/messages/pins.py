"""Pinned prefixes: kept by the broker in a bucket, read by every scheduler, changed by whoever runs the mesh."""

from shared.messages.base import Int32Array, Message

PINS_BUCKET = "shoal_pins"


class PinnedPrefix(Message, frozen=True):
    """What the bucket keeps under a pin's name: tokens whose blocks stay in the prefix cache."""

    model: str
    tenant: str
    token_ids: Int32Array


class PinsChanged(Message, frozen=True, tag="pins_changed"):
    """To all schedulers: read the bucket again. If it is lost, they do so a little later by themselves."""

    name: str
    """The pin that was put or deleted."""
