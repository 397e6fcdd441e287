"""From a GGUF vocabulary to tokenizer.json."""

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.errors import ModelError
from shared.models.gguf_import.reader import read_gguf
from shared.models.gguf_import.tokenizer import build_settings, build_tokenizer
from shared.models.gguf_import.vocabulary import TokenKind, Vocabulary, read_vocabulary
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, START_OF_TURN

_TEXTS = (
    "",
    "Hello, world!",
    "  two  spaces and a\ttab\n\n",
    "Grüße 漢字 🤷🏽‍♀️ é",
    "I'll pay 1234 $ (or 5,6)",
    f"{START_OF_TURN}user\nhi{END_OF_TURN}\n",
    "<|im_sta rt|>",
)


def vocabulary_of(folder: Path, **metadata: Any) -> Vocabulary:
    """The vocabulary of a tiny GGUF file; `metadata` without the prefix tokenizer.ggml."""
    entries = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return read_vocabulary(read_gguf(write_tiny_gguf(folder / "x.gguf", metadata=entries)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The vocabulary of the tests' tiny models."""
    return vocabulary_of(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def original(model_folder: Path) -> Tokenizer:
    """The tokenizer that the vocabulary was taken from."""
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@given(text=st.text(max_size=60))
@example(text=f"a{END_OF_TURN} b")
def test_byte_level_tokens_are_those_of_the_original(byte_level: Vocabulary, original: Tokenizer, text: str) -> None:
    tokenizer = build_tokenizer(byte_level)
    assert tokenizer.encode(text).ids == original.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken", "gpt-4o"])
@pytest.mark.parametrize("text", _TEXTS)
def test_byte_level_tokens_are_those_of_transformers(tmp_path: Path, pre: str, text: str) -> None:
    from transformers import AutoTokenizer

    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"tokenizer.ggml.pre": pre})
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    tokenizer = build_tokenizer(read_vocabulary(read_gguf(path)))
    assert tokenizer.encode(text).ids == theirs(text)["input_ids"]


def test_control_tokens_are_special_and_keep_their_ids(byte_level: Vocabulary) -> None:
    tokenizer = build_tokenizer(byte_level)
    text = f"{START_OF_TURN}a{END_OF_TURN}"
    ids = tokenizer.encode(text).ids
    assert [ids[0], ids[-1]] == [byte_level.tokens.index(START_OF_TURN), byte_level.tokens.index(END_OF_TURN)]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == len(byte_level.tokens)


def test_user_defined_tokens_are_matched_whole_and_not_skipped(byte_level: Vocabulary) -> None:
    tokens = [*byte_level.tokens, "<think>", "日本"]
    kinds = [*byte_level.kinds, TokenKind.USER_DEFINED, TokenKind.USER_DEFINED]
    tokenizer = build_tokenizer(replace(byte_level, tokens=tokens, kinds=kinds))
    ids = tokenizer.encode("a<think>日本b").ids
    assert ids[1:3] == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids) == "a<think>日本b"


def test_text_that_spells_a_control_token_can_be_encoded_as_text(byte_level: Vocabulary) -> None:
    tokenizer = build_tokenizer(byte_level)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(f"{START_OF_TURN}</s>").ids
    assert not set(ids) & set(byte_level.ids_of(TokenKind.CONTROL))
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{START_OF_TURN}</s>"


def test_qwen_composes_characters_first(byte_level: Vocabulary) -> None:
    tokenizer = build_tokenizer(replace(byte_level, pre_tokenizer="qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids
    without = build_tokenizer(replace(byte_level, pre_tokenizer="deepseek-r1-qwen"))
    assert without.encode("e\u0301").ids != without.encode("é").ids


def test_llama_3_takes_whole_tokens_without_merges(byte_level: Vocabulary) -> None:
    tokens = [*byte_level.tokens, "zqz"]
    vocabulary = replace(byte_level, tokens=tokens, kinds=[*byte_level.kinds, TokenKind.NORMAL])
    assert build_tokenizer(replace(vocabulary, pre_tokenizer="llama-bpe", adds_bos=False)).encode("zqz").ids == [
        len(tokens) - 1
    ]
    assert len(build_tokenizer(vocabulary).encode("zqz").ids) == 3


# BOS and EOS


@pytest.mark.parametrize(
    ("pre", "says", "adds"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("qwen2", None, False),
    ],
)
def test_exactly_one_bos_where_the_model_wants_one(
    byte_level: Vocabulary, pre: str, says: bool | None, adds: bool
) -> None:
    vocabulary = replace(byte_level, pre_tokenizer=pre, adds_bos=says)
    ids = build_tokenizer(vocabulary).encode("hello").ids
    assert ids.count(vocabulary.bos_id or 0) == (1 if adds else 0)
    assert (ids[0] == vocabulary.bos_id) is adds
    assert build_settings(vocabulary, 1)["add_bos_token"] is adds


def test_bos_is_left_out_where_it_is_not_asked_for(byte_level: Vocabulary) -> None:
    vocabulary = replace(byte_level, adds_bos=True)
    assert vocabulary.bos_id not in build_tokenizer(vocabulary).encode("hello", add_special_tokens=False).ids


def test_eos_is_added_if_the_file_says_so(byte_level: Vocabulary) -> None:
    vocabulary = replace(byte_level, adds_bos=True, adds_eos=True)
    ids = build_tokenizer(vocabulary).encode("hello").ids
    assert [ids[0], ids[-1]] == [vocabulary.bos_id, vocabulary.eos_id]


def test_without_a_bos_token_none_is_added(byte_level: Vocabulary) -> None:
    vocabulary = replace(byte_level, bos_id=None, adds_bos=True)
    assert build_tokenizer(vocabulary).encode("a").ids == build_tokenizer(byte_level).encode("a").ids


# SentencePiece

_PIECES = [
    "▁",
    "a",
    "b",
    "c",
    "ab",
    "▁a",
    "▁ab",
    "bc",
    "abc",
    "▁abc",
    "aa",
    "cc",
    "▁▁",
    "ca",
    "</",
    "s",
    ">",
    "/",
    "<",
    "s>",
]


def sentence_piece(**changes: Any) -> Vocabulary:
    """A small vocabulary whose pieces have scores in no order of length."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    kinds = [TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.CONTROL, *[TokenKind.BYTE] * 256]
    scores = [0.0] * 259 + [-float((7 * i) % len(_PIECES)) for i in range(len(_PIECES))]
    vocabulary = Vocabulary(
        model="llama",
        pre_tokenizer="default",
        tokens=tokens,
        kinds=[*kinds, *[TokenKind.NORMAL] * len(_PIECES)],
        scores=scores,
        merges=None,
        bos_id=1,
        eos_id=2,
        unknown_id=0,
        padding_id=None,
        adds_bos=None,
        adds_eos=False,
        adds_space_prefix=True,
        chat_template=None,
        end_token_ids=(2,),
    )
    return replace(vocabulary, **changes)


def naive_sentence_piece(vocabulary: Vocabulary, text: str) -> list[int]:
    """SentencePiece's own algorithm: join the two neighbours that give the best piece, the leftmost if equal."""
    assert vocabulary.scores is not None
    scores = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, strict=True)
        if kind == TokenKind.NORMAL
    }
    prefix = " " if vocabulary.adds_space_prefix and text else ""
    parts = list((prefix + text).replace(" ", "▁"))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        if part in scores:
            ids.append(vocabulary.tokens.index(part))
        else:
            ids += [3 + byte for byte in part.encode()]
    return ids


@cache
def built(has_prefix: bool) -> Tokenizer:
    """Both kinds, built once."""
    return build_tokenizer(sentence_piece(adds_space_prefix=has_prefix))


@given(text=st.text(alphabet="abc </s>é漢\n", max_size=24), has_prefix=st.booleans())
def test_sentence_piece_tokens_are_those_of_its_own_algorithm(text: str, has_prefix: bool) -> None:
    vocabulary = sentence_piece(adds_space_prefix=has_prefix)
    tokenizer = built(has_prefix)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == naive_sentence_piece(vocabulary, text)
    assert not set(ids) & {0, 1, 2}  # no text is merged into a control token
    assert tokenizer.decode(ids) == text


def test_sentence_piece_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    vocabulary = sentence_piece()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in vocabulary.kinds],
        "tokenizer.ggml.scores": vocabulary.scores,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.add_bos_token": None,
    }
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata=metadata)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    tokenizer = build_tokenizer(read_vocabulary(read_gguf(path)))
    for text in ("a", "abc abc  ca", "aabbcc é", "ab\nc"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text


def test_sentence_piece_vocabularies_begin_texts_with_bos_by_default() -> None:
    assert build_tokenizer(sentence_piece()).encode("a").ids[0] == 1
    assert build_tokenizer(sentence_piece(adds_bos=False)).encode("a").ids[0] != 1


def test_control_tokens_in_a_text_are_found_and_the_rest_goes_on() -> None:
    vocabulary = sentence_piece()
    ids = build_tokenizer(vocabulary).encode("<s>ab</s>", add_special_tokens=False).ids
    assert [vocabulary.tokens[token_id] for token_id in ids] == ["<s>", "▁ab", "</s>"]


# What else a file says


def test_settings_are_what_services_look_for(byte_level: Vocabulary) -> None:
    assert build_settings(byte_level, 2048) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START_OF_TURN,
        "eos_token": END_OF_TURN,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }


def test_a_generation_ends_at_the_named_tokens_and_at_those_known_by_text(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path)
    ends = [vocabulary.tokens[token_id] for token_id in vocabulary.end_token_ids]
    assert ends == [END_OF_TURN, END_OF_TEXT]
    assert vocabulary_of(tmp_path, eot_token_id=70, eom_token_id=71, eos_token_id=None).end_token_ids[:2] == (70, 71)


def test_an_ordinary_token_that_looks_like_an_end_is_none(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path, token_type=[1] * 384)
    assert [vocabulary.tokens[token_id] for token_id in vocabulary.end_token_ids] == [END_OF_TURN]  # eos_token_id


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"tokens": None}, "no vocabulary"),
        ({"token_type": [1, 1]}, "not one type and score each"),
        ({"scores": [0.0]}, "not one type and score each"),
        ({"bos_token_id": 384}, "bos_token_id is 384, of 384 tokens"),
        ({"tokens": "text"}, "tokens is a str"),
        ({"add_bos_token": "yes"}, "add_bos_token is a str"),
        ({"remove_extra_whitespaces": True}, "rewrites characters or white space"),
        ({"precompiled_charsmap": [1, 2]}, "rewrites characters or white space"),
    ],
)
def test_a_contradictory_vocabulary_is_refused(tmp_path: Path, metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        vocabulary_of(tmp_path, **metadata)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "bert"}, "tokenizer 'bert' .* is not supported"),
        (
            {"pre_tokenizer": "newest"},
            r"'newest' in tokenizer\.ggml\.pre\) is not supported; supported are .*llama-bpe",
        ),
        ({"merges": None}, "no merges"),
        ({"merges": ["ab"]}, "'ab', which is no pair"),
        ({"merges": ["漢 字"]}, "merges do not fit its tokens"),
        ({"model": "llama"}, "no scores"),
    ],
)
def test_a_vocabulary_that_cannot_be_built_is_refused(
    byte_level: Vocabulary, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        build_tokenizer(replace(byte_level, **changes))


def test_the_tokenizer_survives_being_written(byte_level: Vocabulary, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(replace(byte_level, adds_bos=True))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in _TEXTS:
        assert again.encode(text).ids == tokenizer.encode(text).ids
    assert json.loads(again.to_str()) == json.loads(tokenizer.to_str())
