"""What both generation endpoints take: the common fields of a body, their limits, and what they mean to the mesh."""

from typing import Any, Final

import msgspec

from services.gateway.drafts import AnswerOptions, Draft, Endpoint
from services.gateway.priorities import BEST_PRIORITY, WORST_PRIORITY
from services.gateway.validation import MAX_INT32, check_length, check_range
from shared.errors import InvalidRequest, UnsupportedField
from shared.messages import Prompt, TextOptions
from shared.sampling import MAX_LOGPROBS, SamplingParams

MAX_CHOICES: Final = 16
_MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000
_MAX_STOP_STRINGS: Final = 16
_MAX_STOP_CHARS: Final = 1024
"""In all stop strings of a request: the detokenizer keeps a table with a row for each."""
_MAX_STOP_TOKENS: Final = 128
_MAX_BIASED_TOKENS: Final = 1024
_INT64: Final = 2**63

Unsupported = dict[str, tuple[Any, ...]]

UNSUPPORTED: Final[Unsupported] = {
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "user": (),
}
"""Fields of OpenAI's that Shoal does not support, with the values at which they ask for nothing. Null always does."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat completions and completions share; None is the default of each."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    # Beyond OpenAI's; `best_of` is its own for completions.
    best_of: int | None = None
    priority: int | None = None
    timeout_ms: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    resumable: bool | None = None


def to_draft(
    body: GenerationBody,
    endpoint: Endpoint,
    *,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    num_logprobs: int | None,
) -> Draft:
    """What the common fields of `body` ask for. Raises InvalidRequest that names the first field out of range."""
    _check_ranges(body)
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens ({max_tokens}).", param="min_tokens")
    num_choices, num_generated = _choices(body)
    return Draft(
        model=body.model,
        prompts=prompts,
        sampling=_sampling(body, 0 if num_logprobs is None and num_generated > num_choices else num_logprobs),
        has_seed=body.seed is not None,
        text=TextOptions(stop=_stop(body.stop), skip_special_tokens=_or(body.skip_special_tokens, True)),
        num_choices=num_generated,
        max_tokens=max_tokens,
        ignore_eos=_or(body.ignore_eos, False),
        priority=body.priority,
        timeout_ms=body.timeout_ms,
        answer=AnswerOptions(
            endpoint=endpoint,
            num_choices=num_choices,
            has_logprobs=num_logprobs is not None,
            is_stream=_or(body.stream, False),
            includes_usage=_includes_usage(body),
            is_resumable=_is_resumable(body),
        ),
    )


def check_logprobs(count: int | None, param: str) -> None:
    """Raises InvalidRequest unless `count` alternatives can be reported."""
    check_range(count, param, 0, MAX_LOGPROBS)


def _check_ranges(body: GenerationBody) -> None:
    check_range(body.max_tokens, "max_tokens", 1, MAX_INT32)
    check_range(body.min_tokens, "min_tokens", 0, MAX_INT32)
    check_range(body.n, "n", 1, MAX_CHOICES)
    check_range(body.best_of, "best_of", 1, MAX_CHOICES)
    check_range(body.priority, "priority", BEST_PRIORITY, WORST_PRIORITY)
    check_range(body.timeout_ms, "timeout_ms", 1, _MAX_TIMEOUT_MS)
    check_range(body.temperature, "temperature", 0, 2)
    check_range(body.top_p, "top_p", 0, 1, excludes_low=True)
    check_range(body.min_p, "min_p", 0, 1)
    check_range(body.top_k, "top_k", -1, MAX_INT32)
    check_range(body.presence_penalty, "presence_penalty", -2, 2)
    check_range(body.frequency_penalty, "frequency_penalty", -2, 2)
    check_range(body.repetition_penalty, "repetition_penalty", 0, 100, excludes_low=True)
    check_range(body.seed, "seed", -_INT64, _INT64 - 1)


def _choices(body: GenerationBody) -> tuple[int, int]:
    """How many choices a prompt gets, and how many are generated for these to be the best of."""
    num_choices = _or(body.n, 1)
    num_generated = _or(body.best_of, num_choices)
    if num_generated < num_choices:
        raise InvalidRequest(f"best_of must be at least n ({num_choices}), not {num_generated}.", param="best_of")
    if num_generated > num_choices and body.stream:
        raise InvalidRequest(f"best_of must not be greater than n ({num_choices}) in a stream.", param="best_of")
    return num_choices, num_generated


def _sampling(body: GenerationBody, num_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        seed=_or(body.seed, 0) % _INT64,  # what is negative wraps around
        temperature=_or(body.temperature, 1.0),
        top_k=max(_or(body.top_k, 0), 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}),
        min_tokens=_or(body.min_tokens, 0),
        end_token_ids=_stop_token_ids(body.stop_token_ids or []),
        num_logprobs=num_logprobs,
    )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > _MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop must have at most {_MAX_STOP_STRINGS} strings, not {len(strings)}.", param="stop")
    for number, string in enumerate(strings):
        if not string:
            place = "stop" if isinstance(stop, str) else f"stop[{number}]"
            raise InvalidRequest(f"{place} must not be empty.", param=place)
    if (num_chars := sum(map(len, strings))) > _MAX_STOP_CHARS:
        raise InvalidRequest(
            f"stop must have at most {_MAX_STOP_CHARS} characters in all, not {num_chars}.", param="stop"
        )
    return tuple(strings)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    if len(biases) > _MAX_BIASED_TOKENS:
        raise InvalidRequest(
            f"logit_bias must have at most {_MAX_BIASED_TOKENS} tokens, not {len(biases)}.", param="logit_bias"
        )
    by_token = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key and int(key) <= MAX_INT32):
            raise InvalidRequest('The keys of logit_bias must be token ids, such as "50256".', param="logit_bias")
        check_range(bias, f"logit_bias.{key}", -100, 100)
        by_token[int(key)] = bias
    return by_token


def _stop_token_ids(token_ids: list[int]) -> tuple[int, ...]:
    if token_ids:
        check_length(token_ids, "stop_token_ids", _MAX_STOP_TOKENS)
    for number, token_id in enumerate(token_ids):
        check_range(token_id, f"stop_token_ids[{number}]", 0, MAX_INT32)
    return tuple(token_ids)


def _includes_usage(body: GenerationBody) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true.", param="stream_options")
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise UnsupportedField(f"{param} is not supported.", param=param)
    return bool(options.include_usage)


def _is_resumable(body: GenerationBody) -> bool:
    if body.resumable and not body.stream:
        raise InvalidRequest("resumable is only allowed with stream: true.", param="resumable")
    return bool(body.resumable)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
