"""Identifiers: what names a request, an instance, a block, a slot. Owns how new ones are made."""

import re
import secrets
from enum import StrEnum
from typing import Final, NewType

RequestId = NewType("RequestId", str)
"""One client request, from admission to its terminal event. Unguessable: it is also what resumes a stream."""

InstanceId = NewType("InstanceId", str)
"""One life of one service process. A process that restarts is a new instance with a new id."""

BlockId = NewType("BlockId", int)
"""One block of KV cache on one executor, `0 <= id < num_blocks`."""

SlotId = NewType("SlotId", int)
"""One seat for a running choice on one executor, `0 <= id < max_slots`."""


DEFAULT_TENANT: Final = "default"
"""Whose requests they are where nobody needs a key."""


class Service(StrEnum):
    """The five kinds of process in a mesh."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    EXECUTOR = "executor"
    DETOKENIZER = "detokenizer"


SERVING: Final = (Service.TOKENIZER, Service.SCHEDULER, Service.EXECUTOR, Service.DETOKENIZER)
"""Of each of these a model needs one, beside a gateway, for a request to be served."""


def new_request_id() -> RequestId:
    """A fresh request id with 128 bits of randomness."""
    return RequestId(f"req-{secrets.token_hex(16)}")


def sibling_ids(first: RequestId, count: int) -> list[RequestId]:
    """The ids of the `count` requests to the mesh that one client request becomes, `first` and those derived from it.

    So `first` alone is enough to find all of them again.
    """
    return [first, *(RequestId(f"{first}-{number}") for number in range(1, count))]


def client_request_id(request_id: RequestId) -> RequestId:
    """The client request that a request to the mesh belongs to: the first of its `sibling_ids`."""
    end = request_id.find("-", len("req-"))
    return request_id if end < 0 else RequestId(request_id[:end])


def new_instance_id(service: Service) -> InstanceId:
    """A fresh instance id that starts with the service's name, such as `executor-1f0c9a7e`."""
    return InstanceId(f"{service}-{secrets.token_hex(4)}")


def is_instance_id(text: str, service: Service) -> bool:
    """Whether a text is such as `new_instance_id` makes for a service."""
    return re.fullmatch(rf"{service}-[0-9a-f]{{8}}", text) is not None


def new_seed() -> int:
    """A fresh sampling seed for a request whose client gave none, `0 <= seed < 2**63`."""
    return secrets.randbits(63)
