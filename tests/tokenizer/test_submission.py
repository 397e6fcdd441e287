"""What a scheduler gets: limits that fit the model, end tokens, and the context that the text of an output needs."""

from typing import Any

import msgspec
import pytest

from services.tokenizer.encoding import PromptEncoder
from services.tokenizer.submission import submission
from shared.errors import InvalidRequest, PromptTooLong
from shared.ids import InstanceId, RequestId
from shared.messages import (
    ChatMessage,
    ChatPrompt,
    RequestPast,
    ResumedChoice,
    SubmitRequest,
    SubmitTokens,
    TextOptions,
    TextPrompt,
    TokenPrompt,
    int32s,
)
from shared.sampling import SamplingParams
from tests.tokenizer.conftest import Model, ModelOf


def request(**changes: Any) -> SubmitRequest:
    """A request with ten tokens of prompt for a model with a context of 512."""
    plain = SubmitRequest(
        request_id=RequestId("req-1"),
        gateway_id=InstanceId("gateway-1"),
        scheduler_id=InstanceId("scheduler-1"),
        model="m",
        tenant="t",
        prompt=TokenPrompt(int32s(range(10))),
        sampling=SamplingParams(seed=7, temperature=0.5),
        text=TextOptions(stop=("x",), skip_special_tokens=False),
        num_choices=3,
        max_tokens=20,
        priority=-7,
        timeout_ms=1500,
        attempt=2,
        resumed=(ResumedChoice(int32s([5])),),
        owner="0a1b",
        client=b"chat",
        past=RequestPast(1.5),
    )
    return msgspec.structs.replace(plain, **changes)


def test_everything_else_is_passed_on(encoder: PromptEncoder) -> None:
    assert submission(request(), encoder) == SubmitTokens(
        request_id=RequestId("req-1"),
        gateway_id=InstanceId("gateway-1"),
        model="m",
        tenant="t",
        prompt_token_ids=int32s(range(10)),
        sampling=SamplingParams(seed=7, temperature=0.5, end_token_ids=(2,)),
        text=TextOptions(stop=("x",), skip_special_tokens=False),
        num_choices=3,
        max_tokens=20,
        priority=-7,
        timeout_ms=1500,
        attempt=2,
        resumed=(ResumedChoice(int32s([5])),),
        owner="0a1b",
        client=b"chat",
        past=RequestPast(1.5),
    )


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(10, 502), (511, 1), (1, 511)])
def test_what_fits_exactly_is_taken(encoder: PromptEncoder, num_tokens: int, max_tokens: int) -> None:
    prompt = TokenPrompt(int32s([5] * num_tokens))
    assert submission(request(prompt=prompt, max_tokens=max_tokens), encoder).max_tokens == max_tokens


@pytest.mark.parametrize("num_tokens", [1, 10, 511])
def test_without_max_tokens_the_scheduler_decides_how_much_fits(encoder: PromptEncoder, num_tokens: int) -> None:
    prompt = TokenPrompt(int32s([5] * num_tokens))
    assert submission(request(prompt=prompt, max_tokens=None), encoder).max_tokens is None


@pytest.mark.parametrize("num_tokens", [512, 513, 5000])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    encoder: PromptEncoder, num_tokens: int, max_tokens: int | None
) -> None:
    prompt = TokenPrompt(int32s([5] * num_tokens))
    with pytest.raises(PromptTooLong, match=rf"\b{num_tokens} tokens.*\b512\b") as refused:
        submission(request(prompt=prompt, max_tokens=max_tokens), encoder)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert refused.value.param == "prompt"


def test_a_conversation_that_fills_the_context_is_refused_as_messages(encoder: PromptEncoder) -> None:
    with pytest.raises(PromptTooLong) as refused:
        submission(request(prompt=ChatPrompt((ChatMessage("user", "cat " * 600),))), encoder)
    assert refused.value.param == "messages"


def test_output_that_does_not_fit_beside_the_prompt_is_refused_with_the_numbers(encoder: PromptEncoder) -> None:
    with pytest.raises(PromptTooLong, match=r"\b10 tokens.*\b503\b.*\b512\b.*\b502\b") as refused:
        submission(request(max_tokens=503), encoder)
    assert refused.value.param == "max_tokens"


def test_the_models_end_tokens_come_beside_the_clients(model_of: ModelOf) -> None:
    sampling = SamplingParams(seed=7, end_token_ids=(9, 4))
    assert submission(request(sampling=sampling), model_of("llama3").encoder).sampling.end_token_ids == (9, 4, 1)


def test_a_client_that_ignores_the_models_end_tokens_keeps_its_own(encoder: PromptEncoder) -> None:
    sampling = SamplingParams(seed=7, end_token_ids=(9,))
    assert submission(request(sampling=sampling, ignore_eos=True), encoder).sampling.end_token_ids == (9,)
    assert submission(request(ignore_eos=True), encoder).sampling.end_token_ids == ()


@pytest.mark.parametrize("token_id", [-1, None, 1 << 40])
def test_tokens_outside_the_vocabulary_are_refused_by_field(encoder: PromptEncoder, token_id: int | None) -> None:
    token_id = encoder.vocab_size if token_id is None else token_id
    for sampling, param in (
        (SamplingParams(seed=7, logit_bias={3: 1.0, token_id: 1.0}), "logit_bias"),
        (SamplingParams(seed=7, end_token_ids=(3, token_id)), "stop_token_ids"),
    ):
        with pytest.raises(InvalidRequest, match=str(token_id)) as refused:
            submission(request(sampling=sampling), encoder)
        assert (refused.value.status, refused.value.param) == (400, param)


def test_a_completion_knows_the_end_of_its_prompt_where_decoding_depends_on_it(model_of: ModelOf) -> None:
    llama2 = model_of("llama2")
    prompt = TokenPrompt(int32s(range(20, 40)))
    assert submission(request(prompt=prompt), llama2.encoder).text.context_token_ids == int32s(range(32, 40))
    text = submission(request(prompt=TextPrompt("cat")), llama2.encoder)
    assert text.text.context_token_ids == text.prompt_token_ids
    assert text.text.stop == ("x",)


def test_an_answer_in_a_conversation_and_a_byte_level_model_need_no_context(model_of: ModelOf, chatml: Model) -> None:
    conversation = ChatPrompt((ChatMessage("user", "cat"),))
    claimed = TextOptions(context_token_ids=int32s([1]))
    assert not submission(request(prompt=conversation, text=claimed), model_of("llama2").encoder).text.context_token_ids
    assert not submission(request(text=claimed), chatml.encoder).text.context_token_ids
