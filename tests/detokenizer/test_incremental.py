"""Whatever the tokens and however they arrive, the deltas make the text that the library decodes at once."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer.byte_level import ByteLevelDecoding
from services.detokenizer.decoding import load_decoding
from services.detokenizer.incremental import Decoding, decoder_after, without_shared_start
from services.detokenizer.pieces import MAX_HELD_BYTES, PieceDecoding
from services.detokenizer.window import WindowDecoding
from shared.errors import ModelError, RequestError
from tests.detokenizer.vocabularies import KINDS, Case

CaseOf = Callable[[str], Case]

CLASSES = {
    "byte level": ByteLevelDecoding,
    "llama": PieceDecoding,
    "gemma": PieceDecoding,
    "metaspace": PieceDecoding,
    "metaspace without prefix": PieceDecoding,
    "word piece": WindowDecoding,
    "word level": WindowDecoding,
    "word suffix": WindowDecoding,
}


def deltas(
    decoding: Decoding, groups: Sequence[Sequence[int]], *, skip: bool = False, context: Sequence[int] = ()
) -> list[str]:
    """What each group of tokens adds, and the rest."""
    decoder = decoder_after(decoding, context, skip_special_tokens=skip)
    return [*(decoder.push(group) for group in groups), decoder.finish()]


def cut(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """The tokens in groups of these sizes, then one by one."""
    groups = []
    for size in sizes:
        groups.append(token_ids[:size])
        token_ids = token_ids[size:]
    return groups + [[token_id] for token_id in token_ids]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tokenizer_gets_the_decoder_made_for_it(case_of: CaseOf, kind: str) -> None:
    assert type(case_of(kind).decoding) is CLASSES[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_deltas_of_random_tokens_make_the_text_decoded_at_once(case_of: CaseOf, kind: str, data: st.DataObject) -> None:
    case = case_of(kind)
    token_ids = data.draw(st.lists(st.integers(0, case.num_tokens - 1), max_size=50))
    skip = data.draw(st.booleans())
    groups = cut(token_ids, data.draw(st.lists(st.integers(0, 7), max_size=10)))
    expected = case.tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(deltas(case.decoding, groups, skip=skip)) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_after_a_context_the_text_is_that_of_both_less_that_of_the_context(
    case_of: CaseOf, kind: str, data: st.DataObject
) -> None:
    case = case_of(kind)
    tokens = st.integers(0, case.num_tokens - 1)
    context = data.draw(st.lists(tokens, min_size=1, max_size=8))
    token_ids = data.draw(st.lists(tokens, max_size=40))
    skip = data.draw(st.booleans())
    whole = case.tokenizer.decode(context + token_ids, skip_special_tokens=skip)
    before = case.tokenizer.decode(context, skip_special_tokens=skip)
    text = "".join(deltas(case.decoding, cut(token_ids, []), skip=skip, context=context))
    assert text == without_shared_start(whole, before)


@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), max_size=20))
def test_any_text_comes_back_whole_from_byte_level_tokens(case_of: CaseOf, text: str, sizes: list[int]) -> None:
    case = case_of("byte level")
    encoder = case.tokenizer.encode(text, add_special_tokens=False)
    pieces = deltas(case.decoding, cut(encoder.ids, sizes))
    assert "".join(pieces) == case.tokenizer.decode(encoder.ids, skip_special_tokens=False)
    if "�" not in text and "é" not in text:  # the vocabulary has an added é, which the library takes for a byte
        assert "".join(pieces) == text
        assert all("�" not in piece for piece in pieces)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦", "👍🏽 ok", "🏳️‍🌈", "नमस्ते", "กำลังทดสอบ", "한국어", "a\u0301", "\U0010fffd"])
def test_no_delta_ends_inside_a_character(case_of: CaseOf, text: str) -> None:
    for kind in ("byte level", "llama", "gemma"):
        case = case_of(kind)
        if kind == "byte level":
            token_ids = case.tokenizer.encode(text, add_special_tokens=False).ids
        else:
            token_ids = [case.id_of(f"<0x{byte:02X}>") for byte in text.encode()]
        pieces = deltas(case.decoding, [[token_id] for token_id in token_ids])
        assert "".join(pieces) == text
        assert all("�" not in piece for piece in pieces)


def test_every_short_sequence_of_bytes_decodes_as_the_library_does(case_of: CaseOf) -> None:
    case = case_of("byte level")
    edges = (0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF)
    token_of = {case.decoding.token_bytes(token_id): token_id for token_id in range(case.num_tokens)}
    for length in (1, 2, 3, 4):
        for data in itertools.product(edges, repeat=length):
            token_ids = [token_of[bytes([byte])] for byte in data]
            text = "".join(deltas(case.decoding, [[token_id] for token_id in token_ids]))
            assert text == case.tokenizer.decode(token_ids, skip_special_tokens=False), data


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        pytest.param("byte level", "Ģ", id="invalid bytes"),
        pytest.param("byte level", "Ġthe", id="byte level words"),
        pytest.param("llama", "<0x80>", id="invalid byte tokens"),
        pytest.param("gemma", "<0x41>", id="valid byte tokens"),
        pytest.param("llama", "▁cat", id="pieces"),
        pytest.param("word piece", "cat", id="window"),
        pytest.param("word level", "�", id="window that ends in U+FFFD"),
    ],
)
def test_however_long_the_output_little_is_held_back_and_a_token_costs_the_same(
    case_of: CaseOf, kind: str, token: str
) -> None:
    case = case_of(kind)
    decoder = case.decoding.new_decoder(skip_special_tokens=False)

    def seconds_for(num_tokens: int) -> float:
        started = time.thread_time()
        num_given = sum(len(decoder.push((case.id_of(token),))) for _ in range(num_tokens))
        assert num_given >= num_tokens - MAX_HELD_BYTES
        return time.thread_time() - started

    first = min(seconds_for(500) for _ in range(4))
    seconds_for(8000)
    last = min(seconds_for(500) for _ in range(4))
    assert last < 4 * first + 0.01  # without a bound it would be five times as much, and more and more


def test_a_short_ill_formed_run_of_byte_tokens_is_replaced_byte_by_byte(case_of: CaseOf) -> None:
    case = case_of("llama")
    token_ids = [case.id_of(token) for token in ("<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "a")]
    assert deltas(case.decoding, [[token_id] for token_id in token_ids]) == ["", "", "", "", "����a", ""]


def test_a_long_run_of_byte_tokens_streams_and_keeps_the_characters_it_spelt(case_of: CaseOf) -> None:
    case = case_of("llama")
    token_ids = [case.id_of(f"<0x{byte:02X}>") for byte in ("語" * 40).encode()] + [case.id_of("<0xFF>")]
    pieces = deltas(case.decoding, [[token_id] for token_id in token_ids])
    assert "".join(pieces) == "語" * 40 + "�"
    assert not any(pieces[:MAX_HELD_BYTES])
    at_once = MAX_HELD_BYTES // 3
    assert [piece for piece in pieces if piece] == ["語" * at_once, *(["語"] * (40 - at_once)), "�"]
    one_group = deltas(case.decoding, [token_ids])
    assert "".join(one_group) == "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_tokens_have_no_text(case_of: CaseOf, kind: str) -> None:
    case = case_of(kind)
    token_ids = [case.id_of("</s>"), case.num_tokens + 7, -1, case.id_of("</s>")]
    known = [token_id for token_id in token_ids if 0 <= token_id < case.num_tokens]
    assert "".join(deltas(case.decoding, [token_ids])) == case.tokenizer.decode(known, skip_special_tokens=False)
    assert case.decoding.token_bytes(case.num_tokens + 7) == b""


def test_a_library_that_panics_fails_the_request_and_not_the_process(case_of: CaseOf) -> None:
    case = case_of("broken")
    decoder = case.decoding.new_decoder(skip_special_tokens=False)
    with pytest.raises(RequestError, match="cannot be decoded"):
        decoder.push([case.id_of("▁")])


def test_text_that_only_seems_unfinished_is_not_held_back_for_ever(case_of: CaseOf) -> None:
    case = case_of("word level")
    decoder = case.decoding.new_decoder(skip_special_tokens=False)
    pieces = [decoder.push([case.id_of("�")]) for _ in range(1000)]
    assert "".join(pieces).count("�") >= 1000 - 32
    assert "".join(pieces) + decoder.finish() == case.tokenizer.decode([case.id_of("�")] * 1000)


def test_two_decoders_of_one_model_have_nothing_in_common_but_the_vocabulary(case_of: CaseOf) -> None:
    case = case_of("llama")
    the, end = case.id_of("▁the"), case.id_of("</s>")
    hiding = case.decoding.new_decoder(skip_special_tokens=True)
    showing = case.decoding.new_decoder(skip_special_tokens=False)
    assert [hiding.push([end]), showing.push([end]), hiding.push([the]), showing.push([the])] == [
        "",
        "</s>",
        "the",
        " the",
    ]


def test_the_bytes_of_a_token_are_its_own(case_of: CaseOf) -> None:
    byte_level, llama = case_of("byte level"), case_of("llama")
    assert byte_level.decoding.token_bytes(byte_level.id_of("â")) == b"\xe2"
    assert byte_level.decoding.token_bytes(byte_level.id_of("Ġthe")) == b" the"
    assert byte_level.decoding.token_bytes(byte_level.id_of("two words")) == b"two words"
    assert llama.decoding.token_bytes(llama.id_of("<0xE2>")) == b"\xe2"
    assert llama.decoding.token_bytes(llama.id_of("▁the")) == b" the"
    assert llama.decoding.token_bytes(llama.id_of("好")) == "好".encode()


@pytest.mark.parametrize("content", [None, b"\xff", b"[]", b'{"model": {}}', b'{"model": {"vocab": {"a": "b"}}}'])
def test_a_folder_without_a_readable_tokenizer_is_the_operators_fault(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_decoding(tmp_path)


@pytest.mark.model
@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=80), numbers=st.lists(st.integers(0, 49_151), max_size=20))
def test_the_default_model_decodes_as_the_library_does(default_model: Path, text: str, numbers: list[int]) -> None:
    tokenizer, decoding = _default(default_model)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids + numbers
    pieces = deltas(decoding, [[token_id] for token_id in token_ids])
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=False)


@functools.cache
def _default(folder: Path) -> tuple[Tokenizer, Decoding]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")), load_decoding(folder)
