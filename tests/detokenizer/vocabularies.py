"""Small tokenizers of the kinds that models have, each in a model folder of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.detokenizer.decoding import load_decoding
from services.detokenizer.incremental import Decoding

CORPUS = (
    "the cat sat on the mat and the dog sat on the log",
    "привет мир, как дела",
    "你好，世界。今天天气很好",
    "👩‍👩‍👧‍👦 a family, 👍🏽 a thumb, 🏳️‍🌈 a flag",
    "def f(x):\n    return x  # naïve café",
)
SPECIAL = ("<s>", "</s>", "<|im_end|>")


@dataclass(frozen=True)
class Case:
    """A tokenizer as the library has it, and as the detokenizer reads it from its file."""

    tokenizer: Tokenizer
    decoding: Decoding
    folder: Path

    @property
    def num_tokens(self) -> int:
        """Ids from 0 on; there is no gap."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def id_of(self, token: str) -> int:
        """The id of a token that exists."""
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None, token
        return token_id


def build(kind: str, folder: Path) -> Case:
    """The tokenizer of this kind, stored in `folder`."""
    tokenizer = _broken() if kind == "broken" else KINDS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Case(tokenizer, load_decoding(folder), folder)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        show_progress=False, vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIAL)
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words"), AddedToken("é")])
    return tokenizer


def _pieces(decoder: Any) -> Tokenizer:
    """SentencePiece's way: a token for every byte, and pieces of the corpus."""
    pieces = ["▁", "▁the", "▁cat", "▁a", "the", "cat", "a", "b", ".", "é", "你", "好", "👍", "▁▁▁", "x▁y"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model = models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken(" lead")])
    tokenizer.decoder = decoder
    return tokenizer


def _llama() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _pieces(decoders.Sequence(steps))


def _gemma() -> Tokenizer:
    return _pieces(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def _metaspace() -> Tokenizer:
    return _pieces(decoders.Metaspace())


def _metaspace_plain() -> Tokenizer:
    return _pieces(decoders.Metaspace(prepend_scheme="never"))


def _word_piece() -> Tokenizer:
    tokens = ["[UNK]", *SPECIAL, "the", "cat", "##s", "##ing", ".", "sing", "do", "n't", "é", "你"]
    tokenizer = Tokenizer(models.WordPiece(vocab={token: n for n, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _word_level() -> Tokenizer:
    """No decoder at all: the library puts spaces between tokens."""
    tokens = ["[UNK]", *SPECIAL, "the", "cat", "é", "你", "�"]
    tokenizer = Tokenizer(models.WordLevel(vocab={token: n for n, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _word_suffix() -> Tokenizer:
    """A decoder whose last characters depend on whether anything follows."""
    tokens = ["[UNK]", *SPECIAL, "the</w>", "ca", "t</w>", "é", "你</w>", "</w>"]
    model = models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[], end_of_word_suffix="</w>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def _broken() -> Tokenizer:
    """A decoder that makes the library panic over a single space."""
    return _pieces(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "llama": _llama,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "metaspace without prefix": _metaspace_plain,
    "word piece": _word_piece,
    "word level": _word_level,
    "word suffix": _word_suffix,
}
