"""How an answer looks, packed by one gateway and unpacked by another, perhaps of another version."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.chat import chat_draft
from services.gateway.completions import completion_draft
from services.gateway.drafts import Endpoint
from services.gateway.presentation import Presentation
from shared.errors import Unavailable
from shared.ids import RequestId
from tests.gateway.harness import CHAT, COMPLETION

presentations = st.builds(
    Presentation,
    version=st.just(1),
    endpoint=st.sampled_from(Endpoint),
    model=st.text(st.characters(codec="utf-8"), max_size=20),
    created=st.integers(0, 2**40),
    num_prompts=st.integers(1, 128),
    num_choices=st.integers(1, 16),
    has_logprobs=st.booleans(),
    includes_usage=st.booleans(),
    wants_token_ids=st.booleans(),
    name=st.text(st.characters(codec="utf-8"), max_size=20),
)


@given(presentations)
def test_what_is_packed_is_unpacked(presentation: Presentation) -> None:
    assert Presentation.unpack(presentation.pack()) == presentation


def test_it_says_what_the_body_asked_for() -> None:
    draft = chat_draft(CHAT | {"n": 2, "logprobs": True, "stream": True, "stream_options": {"include_usage": True}})
    presentation = Presentation.of(draft, name="a", wants_token_ids=True)
    assert (presentation.endpoint, presentation.model, presentation.name) == (Endpoint.CHAT, CHAT["model"], "a")
    assert (presentation.num_prompts, presentation.num_choices, presentation.total_choices) == (1, 2, 2)
    assert presentation.has_logprobs
    assert presentation.includes_usage
    assert presentation.wants_token_ids


def test_requests_of_several_prompts_are_found_from_the_first() -> None:
    presentation = Presentation.of(completion_draft(COMPLETION | {"prompt": ["x", "y", "z"]}))
    assert presentation.request_ids(RequestId("req-1")) == ["req-1", "req-1-1", "req-1-2"]


def test_fields_that_a_newer_version_added_are_passed_over() -> None:
    presentation = Presentation.of(completion_draft(COMPLETION))
    fields = msgpack.unpackb(presentation.pack())
    assert Presentation.unpack(msgpack.packb([*fields, "something new"])) == presentation


@pytest.mark.parametrize("change", [lambda fields: [2, *fields[1:]], lambda fields: fields[:4], lambda _: "nonsense"])
def test_what_this_version_cannot_tell_is_left_to_another_gateway(change: object) -> None:
    fields = msgpack.unpackb(Presentation.of(completion_draft(COMPLETION)).pack())
    assert callable(change)
    with pytest.raises(Unavailable) as caught:
        Presentation.unpack(msgpack.packb(change(fields)))
    assert caught.value.retry_after_s
