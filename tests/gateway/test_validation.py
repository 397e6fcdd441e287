"""Every rule for bodies: what is refused, with which status, which param and which sentence."""

import json
from typing import Any

import pytest

from services.gateway.chat import chat_draft
from services.gateway.completions import completion_draft
from services.gateway.validation import decode_json
from shared.errors import InvalidRequest
from tests.gateway.harness import CHAT, COMPLETION, Harness

INVALID, UNSUPPORTED = "invalid_value", "unsupported_field"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


COMMON: list[tuple[dict[str, Any], str, str, str]] = [
    ({"model": 1}, "model", INVALID, "model must be a string, not a whole number."),
    ({"model": None}, "model", INVALID, "model must be a string, not null."),
    ({"max_tokens": 0}, "max_tokens", INVALID, "max_tokens must be at least 1 and at most 2147483647, not 0."),
    ({"max_tokens": -5}, "max_tokens", INVALID, "at least 1"),
    ({"max_tokens": 2**31}, "max_tokens", INVALID, "at most 2147483647"),
    ({"max_tokens": 10**30}, "max_tokens", INVALID, "at most 2147483647"),
    ({"max_tokens": True}, "max_tokens", INVALID, "max_tokens must be a whole number, not true or false."),
    ({"max_tokens": 1.5}, "max_tokens", INVALID, "max_tokens must be a whole number, not a number with a fraction"),
    ({"max_tokens": "5"}, "max_tokens", INVALID, "max_tokens must be a whole number, not a string."),
    ({"temperature": -0.1}, "temperature", INVALID, "temperature must be at least 0 and at most 2, not -0.1."),
    ({"temperature": 2.1}, "temperature", INVALID, "at most 2"),
    ({"temperature": "hot"}, "temperature", INVALID, "temperature must be a number, not a string."),
    ({"temperature": False}, "temperature", INVALID, "must be a number, not true or false."),
    ({"top_p": 0}, "top_p", INVALID, "top_p must be greater than 0 and at most 1, not 0."),
    ({"top_p": 1.01}, "top_p", INVALID, "at most 1"),
    ({"min_p": -1}, "min_p", INVALID, "at least 0"),
    ({"min_p": 1.5}, "min_p", INVALID, "at most 1"),
    ({"top_k": -2}, "top_k", INVALID, "at least -1"),
    ({"n": 0}, "n", INVALID, "n must be at least 1 and at most 16, not 0."),
    ({"n": 17}, "n", INVALID, "at most 16"),
    ({"n": True}, "n", INVALID, "n must be a whole number"),
    ({"best_of": 0}, "best_of", INVALID, "best_of must be at least 1 and at most 16, not 0."),
    ({"best_of": 17}, "best_of", INVALID, "at most 16"),
    ({"best_of": True}, "best_of", INVALID, "best_of must be a whole number"),
    ({"best_of": 2, "n": 3}, "best_of", INVALID, "best_of must be at least n (3), not 2."),
    ({"best_of": 2, "stream": True}, "best_of", INVALID, "best_of must not be greater than n (1) in a stream."),
    ({"priority": -101}, "priority", INVALID, "priority must be at least -100 and at most 100, not -101."),
    ({"priority": 101}, "priority", INVALID, "at most 100"),
    ({"priority": 1.0}, "priority", INVALID, "priority must be a whole number"),
    ({"priority": "high"}, "priority", INVALID, "priority must be a whole number, not a string."),
    ({"priority": True}, "priority", INVALID, "priority must be a whole number, not true or false."),
    ({"timeout_ms": 0}, "timeout_ms", INVALID, "timeout_ms must be at least 1 and at most 86400000, not 0."),
    ({"timeout_ms": -1}, "timeout_ms", INVALID, "at least 1"),
    ({"timeout_ms": 86_400_001}, "timeout_ms", INVALID, "at most 86400000"),
    ({"timeout_ms": 0.5}, "timeout_ms", INVALID, "timeout_ms must be a whole number"),
    ({"timeout_ms": "1s"}, "timeout_ms", INVALID, "timeout_ms must be a whole number, not a string."),
    ({"stream": 1}, "stream", INVALID, "stream must be true or false, not a whole number."),
    ({"stream_options": {"include_usage": True}}, "stream_options", INVALID, "only allowed with stream: true"),
    (
        {"stream": True, "stream_options": []},
        "stream_options",
        INVALID,
        "stream_options must be an object, not an array.",
    ),
    (
        {"stream": True, "stream_options": {"x": 1}},
        "stream_options.x",
        UNSUPPORTED,
        "stream_options.x is an unknown field.",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        UNSUPPORTED,
        "not supported",
    ),
    ({"stop": ""}, "stop", INVALID, "stop must not be empty."),
    ({"stop": ["a", ""]}, "stop[1]", INVALID, "stop[1] must not be empty."),
    ({"stop": ["a"] * 17}, "stop", INVALID, "stop must have at most 16 strings, not 17."),
    ({"stop": ["a" * 1000, "b" * 25]}, "stop", INVALID, "stop must have at most 1024 characters in all, not 1025."),
    ({"stop": 5}, "stop", INVALID, "stop must be a string or an array, not a whole number."),
    ({"stop": [5]}, "stop[0]", INVALID, "stop[0] must be a string"),
    ({"presence_penalty": 2.5}, "presence_penalty", INVALID, "at least -2 and at most 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", INVALID, "at least -2 and at most 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", INVALID, "greater than 0"),
    ({"logit_bias": {"x": 1}}, "logit_bias", INVALID, "token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", INVALID, "token ids"),
    ({"logit_bias": {"01": 1}}, "logit_bias", INVALID, "token ids"),
    ({"logit_bias": {"²": 1}}, "logit_bias", INVALID, "token ids"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias", INVALID, "token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", INVALID, "token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", INVALID, "at most 100"),
    ({"logit_bias": {"5": "a"}}, "logit_bias", INVALID, "must be a number"),
    ({"logit_bias": [1]}, "logit_bias", INVALID, "must be an object, not an array"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", INVALID, "at most 1024 tokens"),
    ({"seed": 2**63}, "seed", INVALID, "seed must be at least -9223372036854775808"),
    ({"seed": -(2**63) - 1}, "seed", INVALID, "at most 9223372036854775807"),
    ({"seed": 1.0}, "seed", INVALID, "whole number"),
    ({"min_tokens": -1}, "min_tokens", INVALID, "at least 0"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", INVALID, "min_tokens must be at most max_tokens (10)."),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", INVALID, "at least 0"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", INVALID, "at most 128 elements"),
    ({"stop_token_ids": "a"}, "stop_token_ids", INVALID, "must be an array"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", INVALID, "must be a whole number"),
    ({"ignore_eos": 1}, "ignore_eos", INVALID, "true or false"),
    ({"skip_special_tokens": "yes"}, "skip_special_tokens", INVALID, "true or false"),
    ({"parse_special_tokens": 0}, "parse_special_tokens", INVALID, "true or false"),
    ({"temprature": 1}, "temprature", UNSUPPORTED, "temprature is an unknown field."),
    ({"": 1}, "", UNSUPPORTED, "unknown field"),
    ({"x" * 5000: 1}, "x" * 100 + "…", UNSUPPORTED, "unknown field"),
    ({"user": "me"}, "user", UNSUPPORTED, "user is not supported."),
    ({"metadata": {"a": "b"}}, "metadata", UNSUPPORTED, "not supported"),
    ({"store": True}, "store", UNSUPPORTED, "not supported"),
    ({"store": 0}, "store", UNSUPPORTED, "not supported"),
    ({"service_tier": "flex"}, "service_tier", UNSUPPORTED, "not supported"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str, str, str]] = [
    ({"messages": []}, "messages", INVALID, "messages must not be empty."),
    ({"messages": "hi"}, "messages", INVALID, "messages must be an array, not a string."),
    ({"messages": ["hi"]}, "messages[0]", INVALID, "messages[0] must be an object, not a string."),
    ({"messages": [{}]}, "messages[0].role", INVALID, "messages[0].role is missing."),
    ({"messages": [{"role": "user"}]}, "messages[0].content", INVALID, "must be a string or an array of text parts"),
    ({"messages": user(None)}, "messages[0].content", INVALID, "must be a string or an array of text parts"),
    ({"messages": user([])}, "messages[0].content", INVALID, "must be a string or an array of text parts"),
    ({"messages": user(5)}, "messages[0].content", INVALID, "messages[0].content must be a string or an array, not"),
    ({"messages": user(["a"])}, "messages[0].content[0]", INVALID, "must be an object"),
    ({"messages": user([{}])}, "messages[0].content[0].type", INVALID, 'must be "text"'),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", INVALID, "must be a string"),
    ({"messages": user([{"type": "text", "text": 1}])}, "messages[0].content[0].text", INVALID, "must be a string"),
    (
        {"messages": user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])},
        "messages[0].content[1].type",
        UNSUPPORTED,
        'only parts of type "text" are supported',
    ),
    (
        {"messages": user([{"type": "text", "text": "a", "cache": 1}])},
        "messages[0].content[0].cache",
        UNSUPPORTED,
        "unknown field",
    ),
    (
        {"messages": [*user("a"), {"role": "tool", "content": "x", "tool_call_id": "1"}]},
        "messages[1].role",
        UNSUPPORTED,
        "messages of a tool are not supported",
    ),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages[0].role",
        INVALID,
        "system, developer, user, assistant",
    ),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", UNSUPPORTED, "unknown field"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name", INVALID, "must be a string"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        UNSUPPORTED,
        "not supported",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", INVALID, "at least 1"),
    ({"max_tokens": 0, "max_completion_tokens": 5}, "max_completion_tokens", INVALID, "must not differ"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", INVALID, "must not differ"),
    ({"logprobs": 1}, "logprobs", INVALID, "true or false"),
    ({"top_logprobs": 2}, "top_logprobs", INVALID, "only allowed with logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID, "at least 0 and at most 20, not 21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", INVALID, "at least 0"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", INVALID, "must be an object"),
    ({"chat_template_kwargs": {"a": [0] * 1024}}, "chat_template_kwargs", INVALID, "at most 1024 values"),
    ({"chat_template_kwargs": {"a": [[[0]] * 600]}}, "chat_template_kwargs", INVALID, "at most 1024 values"),
    ({"chat_template_kwargs": {"a": 2**63}}, "chat_template_kwargs.a", INVALID, "out of range"),
    (
        {"chat_template_kwargs": {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}},
        "chat_template_kwargs.a" + "[0]" * 15,
        INVALID,
        "nested too deeply",
    ),
    ({"tools": [{"type": "function"}]}, "tools", UNSUPPORTED, "tools is not supported."),
    ({"tool_choice": "auto"}, "tool_choice", UNSUPPORTED, "not supported"),
    ({"functions": [{}]}, "functions", UNSUPPORTED, "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED, "not supported"),
    ({"audio": {}}, "audio", UNSUPPORTED, "not supported"),
    ({"modalities": ["audio"]}, "modalities", UNSUPPORTED, "not supported"),
    ({"prediction": {}}, "prediction", UNSUPPORTED, "not supported"),
    ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED, "not supported"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", UNSUPPORTED, "not supported"),
    ({"web_search_options": {}}, "web_search_options", UNSUPPORTED, "not supported"),
    ({"verbosity": "low"}, "verbosity", UNSUPPORTED, "not supported"),
    ({"prompt": "x"}, "prompt", UNSUPPORTED, "unknown field"),
]

COMPLETION_ONLY: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt": None}, "prompt", INVALID, "prompt must be a string or an array, not null."),
    ({"prompt": 5}, "prompt", INVALID, "prompt must be a string or an array"),
    ({"prompt": []}, "prompt", INVALID, "prompt must not be empty."),
    ({"prompt": [[]]}, "prompt[0]", INVALID, "prompt[0] must not be empty."),
    ({"prompt": [{}]}, "prompt", INVALID, "an array of token ids"),
    ({"prompt": [True]}, "prompt", INVALID, "an array of token ids"),
    ({"prompt": [1.5]}, "prompt", INVALID, "an array of token ids"),
    ({"prompt": ["a", 1]}, "prompt[1]", INVALID, "prompt[1] differs"),
    ({"prompt": [1, "a"]}, "prompt[1]", INVALID, "prompt[1] must be a token id."),
    ({"prompt": [[1], "a"]}, "prompt[1]", INVALID, "prompt[1] differs"),
    ({"prompt": [[1], [2, None]]}, "prompt[1][1]", INVALID, "prompt[1][1] must be a token id."),
    ({"prompt": [-1]}, "prompt[0]", INVALID, "prompt[0] must be at least 0"),
    ({"prompt": [2**31]}, "prompt[0]", INVALID, "at most 2147483647"),
    ({"prompt": ["a"] * 129}, "prompt", INVALID, "at most 128 elements, not 129"),
    ({"logprobs": 21}, "logprobs", INVALID, "at most 20"),
    ({"logprobs": True}, "logprobs", INVALID, "must be a whole number, not true or false"),
    ({"echo": True}, "echo", UNSUPPORTED, "echo is not supported."),
    ({"suffix": "x"}, "suffix", UNSUPPORTED, "not supported"),
    ({"messages": []}, "messages", UNSUPPORTED, "unknown field"),
    ({"max_completion_tokens": 1}, "max_completion_tokens", UNSUPPORTED, "unknown field"),
    ({"chat_template_kwargs": {}}, "chat_template_kwargs", UNSUPPORTED, "unknown field"),
    ({"tools": []}, "tools", UNSUPPORTED, "unknown field"),
]


def _name(value: Any) -> str:
    return json.dumps(value)[:60] if isinstance(value, dict) else ""


@pytest.mark.parametrize(("fields", "param", "code", "sentence"), COMMON + CHAT_ONLY, ids=_name)
def test_chat_body_is_refused(fields: dict[str, Any], param: str, code: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_draft(CHAT | fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert sentence in caught.value.message
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize(("fields", "param", "code", "sentence"), COMMON + COMPLETION_ONLY, ids=_name)
def test_completion_body_is_refused(fields: dict[str, Any], param: str, code: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion_draft(COMPLETION | fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert sentence in caught.value.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_what_is_no_number_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_draft(CHAT | {field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["model", "messages"])
def test_missing_field_is_named(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is missing") as caught:
        chat_draft({name: value for name, value in CHAT.items() if name != field})
    assert caught.value.param == field


@pytest.mark.parametrize(("field", "value"), [("best_of", 1), ("best_of", None), ("echo", False), ("suffix", None)])
def test_neutral_values_are_taken(field: str, value: Any) -> None:
    assert completion_draft(COMPLETION | {field: value}).num_choices == 1


def test_best_of_that_equals_n_asks_for_nothing() -> None:
    for stream in (False, True):
        body = {"n": 3, "stream": stream}
        assert completion_draft(COMPLETION | body | {"best_of": 3}) == completion_draft(COMPLETION | body)


def test_priority_and_timeout_may_be_null() -> None:
    for given in ({}, {"priority": None, "timeout_ms": None}):
        draft = chat_draft(CHAT | given)
        assert (draft.priority, draft.timeout_ms) == (None, None)


@pytest.mark.parametrize(
    ("given", "expected"), [(0, 0), (5, 5), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)]
)
def test_every_64_bit_seed_becomes_one_that_sampling_takes(given: int, expected: int) -> None:
    draft = chat_draft(CHAT | {"seed": given})
    assert draft.has_seed
    assert draft.sampling.seed == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "it is empty"),
        (b"{", "it ends too early"),
        (b"nope", "invalid character"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"null", "must be a JSON object, not null"),
        (b"3", "must be a JSON object, not a number"),
        (b"true", "must be a JSON object, not true or false"),
        (b'"a"', "must be a JSON object, not a string"),
        (b'{"a": NaN}', "invalid character"),
        (b'{"a": Infinity}', "invalid character"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": 1} x', "trailing characters"),
        (b"{'a': 1}", "keys must be strings"),
        (b'{"a": "\xff"}', "UTF-8"),
        (rb'{"a": "\ud800"}', "surrogate pair"),
        (rb'{"a": "\ud800 and more"}', "surrogate pair"),
        (rb'{"a": "\udc00"}', "surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(text: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_json(text)
    assert sentence in caught.value.message


async def test_a_refusal_has_openais_shape(harness: Harness) -> None:
    assert await harness.chat(temperature=9) == (
        400,
        {
            "error": {
                "message": "temperature must be at least 0 and at most 2, not 9.",
                "type": "invalid_request_error",
                "param": "temperature",
                "code": "invalid_value",
            }
        },
    )
    assert harness.fake.submissions.empty()


async def test_a_nul_byte_is_text_like_any_other(harness: Harness) -> None:
    asking, request = await harness.start_chat(messages=user("a\x00b"))
    prompt = request.message.prompt
    assert prompt.messages[0].content == "a\x00b"  # type: ignore[union-attr]
    await request.complete("\x00")
    _, answer = await asking
    assert answer["choices"][0]["message"]["content"] == "\x00"
