"""What every question to a tokenizer is answered with, and to whom. Pure but for the stopwatch; sends nothing."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

import msgspec

from services.tokenizer.chat_template import TEMPLATE_ARGUMENTS
from services.tokenizer.encoding import PromptEncoder
from services.tokenizer.submission import submission
from shared.errors import InvalidRequest, ModelNotFound, RequestError
from shared.ids import InstanceId
from shared.messages import (
    CallFailed,
    ChatPrompt,
    DetokenizeTokens,
    ErrorInfo,
    Message,
    Prompt,
    PromptTokenized,
    RequestRefused,
    SubmitRequest,
    TextPrompt,
    TokenizePrompt,
    TokensDetokenized,
)

Question: TypeAlias = SubmitRequest | TokenizePrompt | DetokenizeTokens

_CHARS_PER_TOKEN = 4
_CHARS_PER_MESSAGE = 32
"""What it takes to render one, as so many characters to encode."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One message for one receiver."""

    question: Question
    receiver_id: InstanceId
    message: Message
    num_tokens: int = 0
    """Tokens that the prompt has."""
    duration_s: float = 0.0
    """How long it took to find."""


def answer(question: Question, encoder: PromptEncoder, model: str) -> Answer:
    """The answer to a question; what is wrong with the question becomes a refusal."""
    try:
        if question.model != model:
            raise ModelNotFound(f"this tokenizer serves {model}, not {question.model}", param="model")
        return _answer(question, encoder)
    except RequestError as error:
        return refusal(question, error)
    except RecursionError:  # of all that a question holds, only these have any depth
        return refusal(question, InvalidRequest("the arguments are nested too deeply", param=TEMPLATE_ARGUMENTS))


def timed_answer(question: Question, encoder: PromptEncoder, model: str) -> Answer:
    """The answer to a question, and how long it took."""
    began = time.perf_counter()
    given = answer(question, encoder, model)
    return dataclasses.replace(given, duration_s=time.perf_counter() - began)


def refusal(question: Question, error: RequestError) -> Answer:
    """The answer to a question that has none."""
    info = ErrorInfo.of(error)
    if isinstance(question, SubmitRequest):
        return Answer(question, question.gateway_id, RequestRefused(question.request_id, info, question.attempt))
    return Answer(question, question.gateway_id, CallFailed(question.call_id, info))


def num_chars(question: Question) -> int:
    """About how many characters it takes to answer a question."""
    if isinstance(question, DetokenizeTokens):
        return _CHARS_PER_TOKEN * len(question.token_ids)
    return _num_prompt_chars(question.prompt)


def _num_prompt_chars(prompt: Prompt) -> int:
    if isinstance(prompt, ChatPrompt):
        num_content_chars = sum(_CHARS_PER_MESSAGE + len(message.content) for message in prompt.messages)
        return num_content_chars + _num_bytes(prompt.template_arguments)
    return len(prompt.text) if isinstance(prompt, TextPrompt) else 0


def _num_bytes(arguments: dict[str, Any]) -> int:
    try:
        return len(msgspec.msgpack.encode(arguments))
    except RecursionError:
        return 0  # refused as soon as it is looked at


def _answer(question: Question, encoder: PromptEncoder) -> Answer:
    match question:
        case SubmitRequest():
            submitted = submission(question, encoder)
            return Answer(question, question.scheduler_id, submitted, len(submitted.prompt_token_ids))
        case TokenizePrompt():
            token_ids = encoder.encode(question.prompt)
            tokenized = PromptTokenized(question.call_id, token_ids, encoder.max_model_len)
            return Answer(question, question.gateway_id, tokenized, len(token_ids))
        case DetokenizeTokens():
            text = encoder.decode(question.token_ids)
            return Answer(question, question.gateway_id, TokensDetokenized(question.call_id, text))
        case _:
            assert_never(question)
