"""From a client's request to what a scheduler needs for it: tokens, limits, end tokens. Pure; sends nothing."""

from typing import Final

import msgspec

from services.tokenizer.encoding import PromptEncoder, param_of
from shared.errors import PromptTooLong
from shared.messages import ChatPrompt, Int32Array, SubmitRequest, SubmitTokens, TextOptions, int32s
from shared.sampling import SamplingParams

_NUM_CONTEXT_TOKENS: Final = 8


def submission(request: SubmitRequest, encoder: PromptEncoder) -> SubmitTokens:
    """What goes to the scheduler. Raises InvalidRequest or PromptTooLong that name the field at fault."""
    token_ids = encoder.encode(request.prompt)
    _check_room(request, len(token_ids), encoder.max_model_len)
    return SubmitTokens(
        request_id=request.request_id,
        gateway_id=request.gateway_id,
        model=request.model,
        tenant=request.tenant,
        prompt_token_ids=token_ids,
        sampling=_sampling(request, encoder),
        text=_text(request, encoder, token_ids),
        num_choices=request.num_choices,
        max_tokens=request.max_tokens,
        priority=request.priority,
        timeout_ms=request.timeout_ms,
        attempt=request.attempt,
        resumed=request.resumed,
        owner=request.owner,
        client=request.client,
        past=request.past,
        trace=request.trace,
    )


def _check_room(request: SubmitRequest, num_prompt_tokens: int, max_model_len: int) -> None:
    """Raises PromptTooLong unless the model's context takes the prompt and what is asked for."""
    if num_prompt_tokens >= max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens, but this model's context has room for {max_model_len}, "
            "of which at least one is for the output",
            param=param_of(request.prompt),
        )
    room = max_model_len - num_prompt_tokens
    if request.max_tokens is not None and request.max_tokens > room:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {request.max_tokens}, but this model's "
            f"context has room for {max_model_len}: ask for {room} at most",
            param="max_tokens",
        )


def _sampling(request: SubmitRequest, encoder: PromptEncoder) -> SamplingParams:
    """With the model's own end tokens beside the client's."""
    sampling = request.sampling
    encoder.check_token_ids(list(sampling.logit_bias), param="logit_bias")
    encoder.check_token_ids(sampling.end_token_ids, param="stop_token_ids")
    if request.ignore_eos:
        return sampling
    end_token_ids = tuple(dict.fromkeys(sampling.end_token_ids + encoder.end_token_ids))
    return msgspec.structs.replace(sampling, end_token_ids=end_token_ids)


def _text(request: SubmitRequest, encoder: PromptEncoder, token_ids: Int32Array) -> TextOptions:
    """A completion goes on where its prompt ends; an answer in a conversation begins by itself."""
    if isinstance(request.prompt, ChatPrompt) or not encoder.decoder_is_positional:
        return msgspec.structs.replace(request.text, context_token_ids=int32s())
    return msgspec.structs.replace(request.text, context_token_ids=token_ids[-_NUM_CONTEXT_TOKENS:])
