"""Every NATS subject, as a function. The major version of the protocol is part of each."""

from shared.ids import InstanceId, Service

ROOT = "shoal.v1"

PRESENCE = f"{ROOT}.presence.*"
"""Beats of all instances."""


PINS = f"{ROOT}.pins"
"""Told to all schedulers when pinned prefixes have changed."""


ADOPTIONS = f"{ROOT}.adoptions"
"""Asked of all schedulers: who has this request?"""


USAGE = f"{ROOT}.usage"
"""Records of what requests consumed; the broker keeps them."""


TRACES = f"{ROOT}.traces"
"""Asked of all instances: what do you know of this request?"""


def presence(service: Service) -> str:
    """Beats of one kind of service."""
    return f"{ROOT}.presence.{service}"


def tokenize(model: str) -> str:
    """Work for any tokenizer of `model` (subscribed as a queue group)."""
    return f"{ROOT}.tokenize.{_as_token(model)}"


def inbox(instance_id: InstanceId) -> str:
    """Messages for one instance; its id starts with its service's name."""
    service, _, unique = instance_id.partition("-")
    return f"{ROOT}.{_as_token(service)}.{_as_token(unique)}.inbox"


def trace_answers(instance_id: InstanceId) -> str:
    """What one instance is told when it has asked on `TRACES`. Not its inbox: executors may not write into those of
    gateways."""
    service, _, unique = instance_id.partition("-")
    return f"{TRACES}.{_as_token(service)}.{_as_token(unique)}"


def _as_token(name: str) -> str:
    """`name` as one subject token, different for each name: NATS forbids dots, wildcards, white space and nothing."""
    return "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else _escaped(c) for c in name) or "%"


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
