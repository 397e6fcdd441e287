"""What is read from safetensors headers, and what is found wrong with them."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.errors import ModelError
from shared.models.config import load_config
from shared.models.weights import GGUF_KEY, INDEX, check_weights, expected_weights, read_weights
from tests.tiny_models import FAMILIES, make_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_weights_that_transformers_writes_are_the_expected_ones(tmp_path: Path, family: str, is_tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", family, tie_word_embeddings=is_tied)
    weights, config = read_weights(folder), load_config(folder)
    check_weights(weights, config)
    assert {name: weight.shape for name, weight in weights.items()} == dict(expected_weights(config))
    assert {weight.kind for weight in weights.values()} == {"F32"}


def test_biases_are_expected_where_the_configuration_says(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True)
    check_weights(read_weights(folder), load_config(folder))
    assert "model.layers.0.self_attn.o_proj.bias" in dict(expected_weights(load_config(folder)))


def test_shards_are_read_as_one(sharded_folder: Path) -> None:
    weights = read_weights(sharded_folder)
    assert len({weight.file for weight in weights.values()}) > 1
    check_weights(weights, load_config(sharded_folder))


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(model_folder, tmp_path / "model")


def _rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


_EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda header: header[_EMBEDDING].update(dtype="F8_E4M3"), "type F8_E4M3, which is not supported"),
        (lambda header: header[_EMBEDDING].update(dtype="F16"), "does not fit its shape"),
        (lambda header: header[_EMBEDDING].update(shape=[384, 65]), "does not fit its shape"),
        (lambda header: header[_EMBEDDING].update(shape=[384, -64]), "malformed"),
        (lambda header: header[_EMBEDDING].update(shape="ab"), "malformed"),
        (lambda header: header[_EMBEDDING].pop("data_offsets"), "malformed"),
        (lambda header: header.update(x=7), "malformed"),
        (lambda header: header.update(__metadata__={GGUF_KEY: "7"}), "metadata is malformed"),
        (
            lambda header: header.update(
                __metadata__={GGUF_KEY: json.dumps({_EMBEDDING: {"type": "Q4_1", "shape": [384, 64]}})}
            ),
            "which is no weight's",
        ),
    ],
)
def test_a_wrong_header_is_refused(folder: Path, change: Callable[[dict[str, Any]], object], complaint: str) -> None:
    _rewrite(folder / "model.safetensors", change)
    with pytest.raises(ModelError, match=complaint):
        read_weights(folder)


@pytest.mark.parametrize("length", [0, 4, 8, 100, -1])
def test_a_file_that_is_cut_short_is_refused(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match="cut short"):
        read_weights(folder)


def test_a_file_with_something_behind_the_weights_is_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="longer than its header says"):
        read_weights(folder)


def test_what_is_no_safetensors_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"this is not a header" + b"...")
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_weights(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        read_weights(tmp_path)


def test_a_weight_in_two_files_is_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    with pytest.raises(ModelError, match="so does"):
        read_weights(folder)


def test_the_index_must_agree_with_the_files(tmp_path: Path, sharded_folder: Path) -> None:
    folder = shutil.copytree(sharded_folder, tmp_path / "model")
    index = json.loads((folder / INDEX).read_bytes())
    index["weight_map"]["model.norm.weight"] = "model-99999-of-00001.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is not in"):
        read_weights(folder)
    (folder / INDEX).write_text("[]")
    with pytest.raises(ModelError, match="not an index"):
        read_weights(folder)


def test_missing_superfluous_and_misshapen_weights_are_named(folder: Path) -> None:
    weights, config = read_weights(folder), load_config(folder)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        check_weights(weights, config)
    with pytest.raises(ModelError, match=r"has the shape \[32\].*should be \[64\]"):
        check_weights(weights | {"model.norm.weight": dataclasses.replace(norm, shape=(32,))}, config)
    with pytest.raises(ModelError, match=r"vision\.weight, which a llama model does not have"):
        check_weights(weights | {"model.norm.weight": norm, "vision.weight": norm}, config)


def test_what_old_exports_keep_besides_is_harmless(folder: Path) -> None:
    weights, config = read_weights(folder), load_config(folder)
    extra = {
        "lm_head.weight": weights[_EMBEDDING],
        "model.layers.0.self_attn.rotary_emb.inv_freq": weights["model.norm.weight"],
    }
    check_weights(weights | extra, config)


def test_raw_blocks_have_the_shape_and_type_of_the_matrix(tmp_path: Path) -> None:
    blocks = {"w": {"type": "Q4_1", "shape": [3, 64]}}
    save_file({"w": np.zeros((3, 40), np.uint8)}, tmp_path / "x.safetensors", {GGUF_KEY: json.dumps(blocks)})
    weight = read_weights(tmp_path)["w"]
    assert (weight.kind, weight.shape, weight.num_parameters) == ("Q4_1", (3, 64), 192)


def test_bytes_that_nobody_declares_as_blocks_are_no_weight(tmp_path: Path) -> None:
    save_file({"w": np.zeros((3, 40), np.uint8)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match="which is no weight's"):
        read_weights(tmp_path)
