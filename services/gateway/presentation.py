"""How the answer to one client request looks: what any gateway has to know to tell it, or to tell it again.

It travels with the request through the mesh, which never looks inside, and comes back to the gateway at which the
client resumes. Owns that format. Does not own what is told (`streams`), nor from where (`resumption`).
"""

import time
from typing import Final

import msgspec

from services.gateway.drafts import Draft, Endpoint
from shared.codec import Decoder, encode
from shared.errors import MessageError, Unavailable
from shared.ids import RequestId, sibling_ids
from shared.messages import Message

_VERSION: Final = 1
"""Counts changes after which an older gateway would tell an answer wrongly. New fields at the end are none."""


class Presentation(Message, frozen=True):
    """What the shape of an answer depends on, beside the output itself."""

    version: int
    endpoint: Endpoint
    model: str
    created: int
    """When the client asked, in seconds since 1970."""
    num_prompts: int
    num_choices: int
    """For each prompt."""
    has_logprobs: bool
    includes_usage: bool
    """Whether an event stream ends with what the request consumed."""
    wants_token_ids: bool = False
    """Whether messages on a WebSocket carry tokens."""
    name: str = ""
    """The client's own name for the request; over HTTP it has none."""

    @staticmethod
    def of(draft: Draft, *, name: str = "", wants_token_ids: bool = False) -> "Presentation":
        """How the answer to a new request looks."""
        return Presentation(
            version=_VERSION,
            endpoint=draft.answer.endpoint,
            model=draft.model,
            created=int(time.time()),
            num_prompts=len(draft.prompts),
            num_choices=draft.answer.num_choices,
            has_logprobs=draft.answer.has_logprobs,
            includes_usage=draft.answer.includes_usage,
            wants_token_ids=wants_token_ids,
            name=name,
        )

    @staticmethod
    def unpack(data: bytes) -> "Presentation":
        """The presentation in what a gateway, perhaps another version of it, has packed.

        Raises Unavailable if this version cannot tell such an answer: another gateway may.
        """
        try:
            presentation: Presentation = _decoder.decode(data)
        except MessageError as error:
            raise _unknown() from error
        if presentation.version > _VERSION:
            raise _unknown()
        return presentation

    def pack(self) -> bytes:
        """As bytes, which take the place of `client` in a submission."""
        return encode(self)

    def request_ids(self, first: RequestId) -> list[RequestId]:
        """The requests to the mesh that make up this answer."""
        return sibling_ids(first, self.num_prompts)

    @property
    def total_choices(self) -> int:
        """Of all prompts."""
        return self.num_prompts * self.num_choices

    def named(self, name: str) -> "Presentation":
        """The same under another name of the client's."""
        return msgspec.structs.replace(self, name=name)


_decoder: Final = Decoder[Presentation](Presentation)


def _unknown() -> Unavailable:
    return Unavailable("This gateway does not know how to continue the request; try another one.", retry_after_s=1.0)
