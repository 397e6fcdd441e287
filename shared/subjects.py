"""Every NATS subject, as a function. The major version of the protocol is part of each."""

from shared.ids import InstanceId, Service

ROOT = "shoal.v1"

PRESENCE = f"{ROOT}.presence.*"
"""Beats of all instances."""


def presence(service: Service) -> str:
    """Beats of one kind of service."""
    return f"{ROOT}.presence.{service}"


def tokenize(model: str) -> str:
    """Work for any tokenizer of `model` (subscribed as a queue group)."""
    return f"{ROOT}.tokenize.{_as_token(model)}"


def inbox(instance_id: InstanceId) -> str:
    """Messages for one instance; its id starts with its service's name."""
    service, _, unique = instance_id.partition("-")
    return f"{ROOT}.{service}.{_as_token(unique)}.inbox"


def _as_token(name: str) -> str:
    """`name` as one subject token: NATS forbids dots, wildcards and white space inside a token."""
    return "".join(
        c if (c.isascii() and c.isalnum()) or c in "-_" else "".join(f"%{b:02X}" for b in c.encode()) for c in name
    )
