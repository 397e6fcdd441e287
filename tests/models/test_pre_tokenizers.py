"""How text is cut before the merges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteLevel

from shared.models.gguf_import.pre_tokenizers import RULES


def pieces(rule: str, text: str) -> list[str]:
    """The pieces of a text, in plain characters again."""
    decoder = ByteLevel()
    return [decoder.decode([piece]) for piece, _ in RULES[rule].pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("gpt-2", "I'll  pay 1234$, ok?\n", ["I", "'ll", " ", " pay", " 1234", "$,", " ok", "?", "\n"]),
        ("gpt-2", "DON'T", ["DON", "'", "T"]),
        ("smollm", "a  12b", ["a", "  ", "1", "2", "b"]),
        ("starcoder", "x = 42;", ["x", " =", " ", "4", "2", ";"]),
        ("refact", "v10", ["v", "1", "0"]),
        ("command-r", "v10", ["v", "1", "0"]),
        ("llama-bpe", "12345 DON'T\n\n x", ["123", "45", " DON", "'T", "\n\n", " x"]),
        ("llama-bpe", "a, b.c(d)", ["a", ",", " b", ".c", "(d", ")"]),
        ("llama3", "  indented", [" ", " indented"]),
        ("smaug-bpe", "12345", ["123", "45"]),
        ("qwen2", "12345 DON'T\n\n x", ["1", "2", "3", "4", "5", " DON", "'T", "\n\n", " x"]),
        ("deepseek-r1-qwen", "x=10", ["x", "=", "1", "0"]),
        ("tekken", "HelloWorld's 12/", ["Hello", "World", "'s", " ", "1", "2", "/"]),
        ("gpt-4o", "HelloWorld's 1234/", ["Hello", "World's", " ", "123", "4", "/"]),
        ("seed-coder", "a+\n\nb12", ["a", "+", "\n\n", "b", "1", "2"]),
        ("deepseek-llm", "Hi, 漢字 12\n", ["Hi", ",", " ", "漢字", " ", "1", "2", "\n"]),
        ("deepseek-llm", "Ünïcode ſ", ["Ü", "n", "ï", "code", " ſ"]),  # its signs go from ':' to '~', letters too
        (
            "deepseek-coder",
            "def f(x):\n  漢字 12",
            ["def", " f", "(", "x", "):", "\n", " ", " ", "漢字", " ", "1", "2"],
        ),
        ("deepseek-v3", "1234漢字かな x_y $HOME", ["123", "4", "漢字かな", " x", "_y", " $", "HOME"]),
        ("falcon", "it's 12345, ok", ["it", "'", "s", " ", "123", "45", ",", " ok"]),
        ("default", "it's 12345, ok", ["it", "'", "s", " ", "123", "45", ",", " ok"]),
    ],
)
def test_text_is_cut_as_the_original_tokenizer_does(rule: str, text: str, expected: list[str]) -> None:
    assert pieces(rule, text) == expected


@given(rule=st.sampled_from(sorted(RULES)), text=st.text(max_size=40))
def test_no_byte_is_lost(rule: str, text: str) -> None:
    decoder = ByteLevel()
    cut = [piece for piece, _ in RULES[rule].pre_tokenizer.pre_tokenize_str(text)]
    assert decoder.decode(cut) == text


@given(text=st.text(alphabet=" \n\tabcAB'.,12é漢", max_size=40))
def test_digits_that_stand_alone_agree_between_the_two_ways_to_say_it(text: str) -> None:
    """Qwen's and Llama 3's rules differ in nothing but the length of numbers."""
    without_digits = "".join(c for c in text if not c.isdigit())
    assert pieces("qwen2", without_digits) == pieces("llama-bpe", without_digits)
