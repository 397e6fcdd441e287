"""How answers look: one shape for each of OpenAI's two ways of asking."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from services.gateway.chat import ChatShape
from services.gateway.completions import CompletionShape
from services.gateway.drafts import Endpoint
from services.gateway.presentation import Presentation
from services.gateway.streams import Delta, Stream


class Shape(Protocol):
    """How one endpoint puts what was said."""

    def opening(self) -> Sequence[msgspec.Struct]:
        """The chunks that begin a stream."""
        ...

    def chunks(self, delta: Delta) -> Sequence[msgspec.Struct]:
        """The chunks for what is new of one choice."""
        ...

    def usage(self, streams: Sequence[Stream]) -> msgspec.Struct:
        """The chunk that says what a stream consumed."""
        ...

    def whole(self, streams: Sequence[Stream]) -> msgspec.Struct:
        """The answer in one piece."""
        ...


def shape_of(presentation: Presentation, streams: Sequence[Stream]) -> Shape:
    """How the answer that `streams` make up looks; it is named after the first of them."""
    answer_id = presentation.endpoint.answer_id(streams[0].request_id)
    if presentation.endpoint is Endpoint.CHAT:
        return ChatShape(presentation, answer_id)
    return CompletionShape(presentation, answer_id, streams)
