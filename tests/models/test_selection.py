"""Which files of a listing make up a model."""

import pytest

from shared.errors import ModelError
from shared.models.fetch.selection import select
from shared.models.weights import INDEX

_BASE = ("config.json", "tokenizer.json")
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_what_a_model_needs_is_taken_and_the_rest_is_left() -> None:
    optional = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "README.md", "LICENSE")
    left = (
        "pytorch_model.bin",
        "tf_model.h5",
        "modeling_x.py",
        "consolidated.safetensors",
        "optimizer.pt",
        ".gitignore",
    )
    selection = select((*_BASE, *optional, *left, "model.safetensors"), "x")
    assert set(selection.files) == {*_BASE, *optional, "model.safetensors"}
    assert selection.files[0] == "config.json"
    assert selection.files[-1] == "model.safetensors"
    assert not selection.is_gguf


def test_shards_come_with_their_index() -> None:
    assert set(select((*_BASE, INDEX, *_SHARDS), "x").files) == {*_BASE, INDEX, *_SHARDS}


def test_one_file_is_preferred_to_shards() -> None:
    assert set(select((*_BASE, INDEX, *_SHARDS, "model.safetensors"), "x").files) == {*_BASE, "model.safetensors"}


def test_safetensors_are_preferred_to_gguf() -> None:
    assert not select((*_BASE, "model.safetensors", "x.gguf"), "x").is_gguf


@pytest.mark.parametrize("others", [(), ("config.json", "README.md"), _BASE])
def test_a_single_gguf_file_is_a_model(others: tuple[str, ...]) -> None:
    selection = select((*others, "x.gguf"), "x")
    assert selection.files == ("x.gguf",)
    assert selection.is_gguf


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ((), "x is not a model"),
        (("README.md",), "x is not a model"),
        (("a.gguf", "b.gguf"), r"several GGUF files, name one of them: a\.gguf, b\.gguf"),
        (("config.json", "model.safetensors"), "no tokenizer.json"),
        (_BASE, "has no weights"),
        ((*_BASE, *_SHARDS), "has no weights"),
        ((*_BASE, INDEX), "index of weights but none of the files"),
        ((*_BASE, "pytorch_model.bin"), r"only as pickles \(pytorch_model\.bin\)"),
        ((*_BASE, "consolidated.00.pth", "x.ckpt"), "only as pickles"),
    ],
)
def test_what_is_no_model_is_refused_in_words(names: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        select(names, "x")
