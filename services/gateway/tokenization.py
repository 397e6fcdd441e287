"""`/tokenize` and `/detokenize`: what a model's tokenizer makes of a prompt, and of tokens."""

from typing import Any

import msgspec

from services.gateway.mesh import Mesh
from services.gateway.prompts import token_ids
from services.gateway.templates import ChatTurn, chat_prompt
from services.gateway.validation import convert
from shared.errors import InvalidRequest
from shared.messages import (
    DetokenizeTokens,
    Prompt,
    PromptTokenized,
    TextPrompt,
    TokenizePrompt,
    TokensDetokenized,
)


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /tokenize`: a prompt or messages."""

    model: str
    prompt: str | None = None
    messages: list[ChatTurn] | None = None
    parse_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenized(msgspec.Struct):
    """The answer of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /detokenize`."""

    model: str
    tokens: list[Any]


class Detokenized(msgspec.Struct):
    """The answer of `/detokenize`."""

    prompt: str


async def tokenize(mesh: Mesh, raw: dict[str, Any]) -> Tokenized:
    """The tokens that an executor would get. Raises InvalidRequest, and what `Mesh.ask` raises."""
    body = convert(raw, TokenizeBody, unsupported={})
    prompt = _prompt(body)
    answer = await mesh.ask(
        body.model,
        PromptTokenized,
        lambda call_id, gateway_id: TokenizePrompt(call_id, gateway_id, body.model, prompt),
    )
    return Tokenized(answer.token_ids.tolist(), len(answer.token_ids), answer.max_model_len)


async def detokenize(mesh: Mesh, raw: dict[str, Any]) -> Detokenized:
    """The text that tokens spell. Raises InvalidRequest, and what `Mesh.ask` raises."""
    body = convert(raw, DetokenizeBody, unsupported={})
    tokens = token_ids(body.tokens, "tokens")
    answer = await mesh.ask(
        body.model,
        TokensDetokenized,
        lambda call_id, gateway_id: DetokenizeTokens(call_id, gateway_id, body.model, tokens),
    )
    return Detokenized(answer.text)


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        return chat_prompt(body.messages, body.chat_template_kwargs, body.parse_special_tokens)
    if body.chat_template_kwargs:
        raise InvalidRequest("chat_template_kwargs is only allowed with messages.", param="chat_template_kwargs")
    if body.parse_special_tokens is None:
        return TextPrompt(body.prompt or "")
    return TextPrompt(body.prompt or "", body.parse_special_tokens)
