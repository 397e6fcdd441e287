"""How text is cut before the merges: one entry for each value of `tokenizer.ggml.pre` that is supported.

GGUF files name llama.cpp's rules, which imitate those of the original tokenizers; here are the originals, as the
models' own `tokenizer.json` files have them, wherever the two differ.
List of names: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a byte-level vocabulary does to text before its merges."""

    pre_tokenizer: PreTokenizer
    normalizes_nfc: bool = False
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole is taken without looking at the merges."""
    adds_bos: bool = False
    """Whether a text begins with the BOS token if the file does not say."""


_TO_BYTES: Final = ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2_WORDS: Final = ByteLevel(add_prefix_space=False, use_regex=True)
_SINGLE_DIGITS: Final = Digits(individual_digits=True)

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_SEED_CODER: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWER_WORD: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORD: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_REST_WITH_SLASH: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT_4O: Final = rf"{_LOWER_WORD}{_CONTRACTIONS}?|{_UPPER_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK_LETTERS: Final = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77
    1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE
    1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124
    2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3
    A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A
    10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
"""The cased letters that DeepSeek's first vocabulary knows, as code points: not a class that a regex has a name for."""


def _characters(ranges: str) -> str:
    """Code points and ranges of them in hexadecimal, as what stands inside a regex's brackets."""
    ends = (part.split("-") for part in ranges.split())
    return "".join("-".join(f"\\x{{{end}}}" for end in pair) for pair in ends)


_HAN_HANGUL: Final = f"[{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_HAN_KANA: Final = f"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_DEEPSEEK_WORD: Final = rf"\s?[{_characters(_DEEPSEEK_LETTERS)}]+"
_DEEPSEEK_SIGNS: Final = rf"\s?[{_characters('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+"
_DEEPSEEK_V3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut(*patterns: str, then: tuple[PreTokenizer, ...] = (_TO_BYTES,)) -> PreTokenizer:
    """Cut at every match of each pattern in turn; what lies between matches stays together."""
    return Sequence([*(Split(Regex(pattern), "isolated") for pattern in patterns), *then])


_LLAMA3_RULES: Final = TextRules(_cut(_LLAMA3), ignores_merges=True, adds_bos=True)
_DIGIT_RULES: Final = TextRules(Sequence([_SINGLE_DIGITS, _GPT2_WORDS]))
_GPT2_RULES: Final = TextRules(_GPT2_WORDS)
_GPT_4O_RULES: Final = TextRules(_cut(_GPT_4O))
_QWEN_WITHOUT_NFC: Final = TextRules(_cut(_QWEN2))

RULES: Final[Mapping[str, TextRules]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0"), _LLAMA3_RULES),
    **dict.fromkeys(("smaug-bpe", "dbrx"), TextRules(_cut(_LLAMA3))),
    "qwen2": TextRules(_cut(_QWEN2), normalizes_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "kormo"), _QWEN_WITHOUT_NFC),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGIT_RULES),
    "command-r": TextRules(Sequence([_SINGLE_DIGITS, _GPT2_WORDS]), normalizes_nfc=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "mellum"), _GPT2_RULES),
    "tekken": TextRules(_cut(_TEKKEN), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT_4O_RULES),
    "seed-coder": TextRules(_cut(_SEED_CODER)),
    "deepseek-llm": TextRules(
        _cut(
            r"[\r\n]",
            _DEEPSEEK_WORD,
            _DEEPSEEK_SIGNS,
            r"\s+$",
            _HAN_HANGUL,
            then=(_SINGLE_DIGITS, _TO_BYTES),
        )
    ),
    "deepseek-coder": TextRules(
        _cut(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, then=(_SINGLE_DIGITS, _TO_BYTES))
    ),
    "deepseek-v3": TextRules(_cut(r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK_V3)),
    "falcon": TextRules(
        Sequence(
            [
                Punctuation("contiguous"),
                _GPT2_WORDS,
                Digits(individual_digits=False),
                Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        )
    ),
    "default": TextRules(_cut(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""By the value of `tokenizer.ggml.pre`."""
