"""Prompts become the tokens that the model was made for: one BOS, and control tokens only from the template."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.tokenizer.encoding import PromptEncoder, load_encoder
from shared.errors import InvalidRequest, ModelError, PromptTooLong
from shared.messages import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt, int32s
from tests.tokenizer.conftest import Model, ModelOf
from tests.tokenizer.model_folders import CHATML, MODELS, byte_level, put_first, write_model
from tests.tokenizer.prompts import chat, templated

# Against the library.

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello, world!"}],
    [{"role": "user", "content": "  two  spaces\n\n"}, {"role": "assistant", "content": "👩‍👩‍👧 ok"}],
    [
        {"role": "user", "content": "def f(x):\n\treturn {x: 1}"},
        {"role": "assistant", "content": "<b>naïve</b>"},
        {"role": "user", "content": "你好"},
    ],
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_conversation_has_the_tokens_that_transformers_gives_it(
    model_of: ModelOf, kind: str, conversation: list[dict[str, str]]
) -> None:
    from transformers import PreTrainedTokenizerFast

    model = model_of(kind)
    names = json.loads((model.folder / "tokenizer_config.json").read_text())
    bos, eos = (names.get(name) for name in ("bos_token", "eos_token"))
    reference = PreTrainedTokenizerFast(
        tokenizer_object=model.tokenizer, bos_token=bos["content"] if isinstance(bos, dict) else bos, eos_token=eos
    )
    reference.chat_template = names["chat_template"]
    expected = reference.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    prompt = ChatPrompt(tuple(ChatMessage(**message) for message in conversation))
    assert list(model.encoder.encode(prompt)) == expected


@pytest.mark.parametrize("kind", MODELS)
@settings(deadline=None, max_examples=50)
@given(text=st.text(min_size=1, max_size=40))
def test_a_raw_prompt_has_the_librarys_tokens(model_of: ModelOf, kind: str, text: str) -> None:
    model = model_of(kind)
    assert list(model.encoder.encode(TextPrompt(text))) == model.tokenizer.encode(text).ids


def test_token_ids_are_left_as_they_are(model_of: ModelOf) -> None:
    token_ids = int32s([5, 0, 0, 7])
    assert model_of("llama3").encoder.encode(TokenPrompt(token_ids)) == token_ids


# BOS.

WRITES_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WRITES_NONE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WRITES_TWO = "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [WRITES_BOS, WRITES_NONE, WRITES_TWO])
@pytest.mark.parametrize("adds_bos", [True, None])
def test_a_conversation_has_one_bos_whoever_writes_it(tmp_path: Path, template: str, adds_bos: bool | None) -> None:
    tokenizer = byte_level(["<s>", "</s>"])
    put_first(tokenizer, "<s>")
    names = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    write_model(tmp_path, tokenizer, names if adds_bos is None else names | {"add_bos_token": adds_bos})
    token_ids = load_encoder(tmp_path).encode(chat("cat"))
    assert list(token_ids) == tokenizer.encode("cat").ids
    assert token_ids.count(0) == 1


@pytest.mark.parametrize("text", ["cat", "<s>cat", "<s><s>cat"])
def test_a_raw_prompt_has_one_bos_whoever_writes_it(model_of: ModelOf, text: str) -> None:
    model = model_of("llama2")
    token_ids = list(model.encoder.encode(TextPrompt(text)))
    assert token_ids[:1] == [model.id_of("<s>")]
    assert token_ids.count(model.id_of("<s>")) == 1


def test_a_bos_inside_a_raw_prompt_stays(model_of: ModelOf) -> None:
    model = model_of("llama2")
    token_ids = list(model.encoder.encode(TextPrompt("cat<s>cat")))
    assert token_ids.count(model.id_of("<s>")) == 2


def test_a_model_without_bos_gets_none_and_keeps_what_its_template_writes(chatml: Model) -> None:
    token_ids = chatml.encoder.encode(chat("cat"))
    assert chatml.encoder.decode(token_ids).startswith("<|im_start|>user")
    assert list(chatml.encoder.encode(TextPrompt("cat"))) == chatml.encode("cat")


def test_settings_decide_against_the_tokenizer_whether_there_is_a_bos(tmp_path: Path) -> None:
    tokenizer = byte_level(["<s>", "</s>"])
    put_first(tokenizer, "<s>")
    write_model(tmp_path, tokenizer, {"bos_token": "<s>", "add_bos_token": False})
    assert 0 not in load_encoder(tmp_path).encode(TextPrompt("cat"))


def test_a_tokenizer_that_puts_its_end_token_after_a_text_has_no_bos(tmp_path: Path) -> None:
    tokenizer = byte_level(["<s>", "</s>"])
    put_first(tokenizer, "</s>")
    write_model(tmp_path, tokenizer, {"bos_token": "<s>", "eos_token": "</s>"})
    assert (
        list(load_encoder(tmp_path).encode(TextPrompt("cat"))) == tokenizer.encode("cat", add_special_tokens=False).ids
    )


def test_a_bos_that_is_wanted_and_named_nowhere_is_the_operators_fault(tmp_path: Path) -> None:
    write_model(tmp_path, byte_level(["</s>"]), {"add_bos_token": True, "bos_token": "<s>"})
    with pytest.raises(ModelError, match="add_bos_token"):
        load_encoder(tmp_path)


# Templates and roles.


@pytest.mark.parametrize(
    ("template", "role"), [(CHATML, "system"), (CHATML + "{# no #}{% if 'developer' %}{% endif %}", "developer")]
)
def test_a_developer_is_a_system_unless_the_template_knows_developers(tmp_path: Path, template: str, role: str) -> None:
    encoder = templated(tmp_path, template)
    assert encoder.decode(encoder.encode(chat("x", role="developer"))).startswith(f"<|im_start|>{role}\n")


def test_an_answer_is_begun_after_the_assistants_own_message_too(encoder: PromptEncoder) -> None:
    text = encoder.decode(encoder.encode(chat("Sure", role="assistant")))
    assert text == "<|im_start|>assistant\nSure<|im_end|>\n<|im_start|>assistant\n"


def test_template_arguments_may_leave_the_answer_unbegun(encoder: PromptEncoder) -> None:
    assert encoder.decode(encoder.encode(chat("x", add_generation_prompt=False))) == "<|im_start|>user\nx<|im_end|>\n"


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    write_model(tmp_path, byte_level(["</s>"]), {})
    encoder = load_encoder(tmp_path)
    assert encoder.encode(TextPrompt("x"))
    with pytest.raises(InvalidRequest, match="no chat template") as refused:
        encoder.encode(chat("x"))
    assert refused.value.param == "messages"


# Refusals.


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TextPrompt(""), "prompt"),
        (TokenPrompt(int32s()), "prompt"),
        (chat(""), "messages"),
        (TokenPrompt(int32s([1, -1])), "prompt"),
        (TokenPrompt(int32s([1, 1 << 20])), "prompt"),
    ],
)
def test_prompts_without_tokens_or_with_unknown_ones_are_refused(tmp_path: Path, prompt: Any, param: str) -> None:
    encoder = templated(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match=r"no tokens|not among") as refused:
        encoder.encode(prompt)
    assert refused.value.param == param


def test_an_empty_raw_prompt_is_a_bos_where_the_model_wants_one(model_of: ModelOf) -> None:
    model = model_of("llama3")
    assert list(model.encoder.encode(TextPrompt(""))) == [model.id_of("<|begin_of_text|>")]


def test_the_largest_token_of_the_vocabulary_is_in_it(encoder: PromptEncoder) -> None:
    assert encoder.encode(TokenPrompt(int32s([0, encoder.vocab_size - 1])))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_it_matters(tmp_path: Path) -> None:
    tokenizer = byte_level(["</s>"])
    tokenizer.add_special_tokens(["<image>"])
    write_model(tmp_path, tokenizer, {}, config={"vocab_size": tokenizer.get_vocab_size() - 1})
    encoder = load_encoder(tmp_path)
    assert encoder.encode(TextPrompt("cat"))
    with pytest.raises(InvalidRequest, match="not among"):
        encoder.encode(TextPrompt("cat <image>"))


def test_text_that_the_library_cannot_encode_is_the_requests_fault(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"cat": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    write_model(tmp_path, tokenizer, {})
    encoder = load_encoder(tmp_path)
    assert list(encoder.encode(TextPrompt("cat cat"))) == [0, 0]
    with pytest.raises(InvalidRequest, match="cannot be encoded") as refused:
        encoder.encode(TextPrompt("dog"))
    assert refused.value.param == "prompt"


def test_tokens_that_make_the_library_panic_are_the_requests_fault(tmp_path: Path) -> None:
    tokenizer = byte_level(["</s>"])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    write_model(tmp_path, tokenizer, {})
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        load_encoder(tmp_path).decode([tokenizer.encode(" ").ids[0]])


@pytest.mark.parametrize("parse_special_tokens", [True, False])
def test_a_prompt_far_beyond_the_context_is_counted_without_encoding_it_whole(
    chatml: Model, parse_special_tokens: bool
) -> None:
    text = "the cat sat on the mat. " * 20_000
    with pytest.raises(PromptTooLong, match="has room for 512") as refused:
        chatml.encoder.encode(TextPrompt(text, parse_special_tokens))
    num_tokens = int(refused.value.message.split()[3])
    assert num_tokens == pytest.approx(len(chatml.encode(text)), rel=0.001)
    assert refused.value.param == "prompt"
    with pytest.raises(PromptTooLong) as refused:
        chatml.encoder.encode(chat(text))
    assert refused.value.param == "messages"


def test_a_long_text_of_few_tokens_is_encoded_exactly(tmp_path: Path) -> None:
    tokenizer = byte_level(["</s>"])
    tokenizer.add_tokens([AddedToken("=" * 1000, normalized=False, special=False)])
    write_model(tmp_path, tokenizer, {})
    text = "=" * 200_000
    assert list(load_encoder(tmp_path).encode(TextPrompt(text))) == tokenizer.encode(text).ids


def test_several_threads_may_encode_at_once(model_of: ModelOf) -> None:
    encoder = model_of("llama3").encoder
    prompts = [chat(f"cat {n} <|eot_id|> dog") for n in range(40)]
    expected = [encoder.encode(prompt) for prompt in prompts]
    found: list[list[Any]] = [[] for _ in range(4)]

    def encode(results: list[Any]) -> None:
        results.extend(encoder.encode(prompt) for prompt in prompts)

    threads = [threading.Thread(target=encode, args=(results,)) for results in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


# What is found out when loading.


def test_end_tokens_are_those_of_the_generation_config(model_of: ModelOf) -> None:
    assert model_of("llama3").encoder.end_token_ids == (1, 4)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 0}, None, (0, 2)),
        ({"eos_token_id": [0, 2]}, {}, (0, 2)),
        ({}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 99_999}, None, (2,)),
    ],
)
def test_end_tokens(
    tmp_path: Path, config: Mapping[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    write_model(tmp_path, tokenizer, {"eos_token": "<|im_end|>"}, config=dict(config), generation=generation)
    assert load_encoder(tmp_path).end_token_ids == expected


@pytest.mark.parametrize(
    ("decoder", "is_positional"),
    [
        (decoders.ByteLevel(), False),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), False),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), True),
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.WordPiece(), True),
        (None, True),
    ],
)
def test_whether_the_first_token_of_an_output_needs_the_prompt(
    tmp_path: Path, decoder: Any, is_positional: bool
) -> None:
    tokenizer = byte_level(["</s>"])
    tokenizer.decoder = decoder
    write_model(tmp_path, tokenizer, {})
    assert load_encoder(tmp_path).decoder_is_positional is is_positional


def test_a_lower_limit_is_taken_and_a_higher_one_is_not(chatml: Model) -> None:
    assert load_encoder(chatml.folder).max_model_len == 512
    assert load_encoder(chatml.folder, max_model_len=100).max_model_len == 100
    assert load_encoder(chatml.folder, max_model_len=1000).max_model_len == 512


def test_the_tokenizers_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level(["</s>"])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    write_model(tmp_path, tokenizer, {})
    text = "zyxwvutsrqponmlk"
    for parse_special_tokens in (True, False):
        token_ids = load_encoder(tmp_path).encode(TextPrompt(text, parse_special_tokens))
        assert 3 < len(token_ids) < 50
        assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_a_folder_without_a_readable_tokenizer_is_the_operators_fault(tmp_path: Path, content: str | None) -> None:
    write_model(tmp_path, byte_level(["</s>"]), {})
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_encoder(tmp_path)


@pytest.mark.model
def test_the_default_model_has_a_chat_template_and_an_end_of_turn(default_model: Path) -> None:
    encoder = load_encoder(default_model)
    token_ids = encoder.encode(chat("hello <|im_end|>"))
    text = encoder.decode(token_ids)
    assert text.endswith("<|im_start|>user\nhello <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert list(token_ids).count(2) == 2
    assert 2 in encoder.end_token_ids
    assert not encoder.decoder_is_positional
