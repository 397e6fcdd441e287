"""Reading weights: single files and shards, number formats, raw blocks, and errors that name everything at once."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from services.executor.config import ExecutorConfig
from services.executor.factory import load
from services.executor.weights import Weights
from shared.errors import ModelError
from tests.executor.conftest import SMALL, TinyFolder
from tests.executor.driver import Driver
from tests.tiny_models import make_tiny_model


def save(path: Path, tensors: dict[str, torch.Tensor], blocks: dict[str, Any] | None = None) -> None:
    metadata = {"format": "pt"} | ({"shoal.gguf": json.dumps(blocks)} if blocks else {})
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def copy_of(folder: Path, target: Path) -> Path:
    """The same model, its weights left out."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def greedy(folder: Path, settings: ExecutorConfig = SMALL) -> list[int]:
    return Driver(load(folder, "tiny", settings)).generate([5, 6, 7, 8], 20)


def problems(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, "tiny", SMALL)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_floats_of_any_width_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(5, 3).to(dtype)
    save(tmp_path / "model.safetensors", {"w": values})
    with Weights(tmp_path) as weights:
        found = weights.load({"w": (5, 3)})
    assert found.dtype is torch.float32
    assert torch.equal(found, values.float())


def test_parts_are_stacked_in_the_order_asked_for(tmp_path: Path) -> None:
    parts = {"b": torch.randn(2, 3), "a": torch.randn(4, 3)}
    save(tmp_path / "model.safetensors", parts)
    with Weights(tmp_path) as weights:
        assert weights.num_bytes == (2 + 4) * 3 * 4
        assert torch.equal(weights.load({"b": (2, 3), "a": (4, 3)}), torch.cat((parts["b"], parts["a"])))


def test_what_is_loaded_outlives_the_file(tmp_path: Path) -> None:
    """Nothing of the mapped file stays behind: truncating one that is still mapped would kill the process."""
    values = torch.randn(1000, 100)
    save(tmp_path / "model.safetensors", {"w": values})
    with Weights(tmp_path) as weights:
        found = weights.load({"w": (1000, 100)})
    mapped = Path("/proc/self/maps").read_text()
    assert "model.safetensors" not in mapped
    assert torch.equal(found, values)


def test_shards_give_the_same_model_as_one_file(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    sharded = make_tiny_model(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert greedy(sharded) == greedy(tiny_folder())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_a_model_in_raw_blocks_is_the_model_of_its_numbers(kind: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    raw, plain, entries = {}, {}, {}
    for name, tensor in tensors_of(tiny_folder("qwen2")).items():
        raw[name] = plain[name] = tensor
        if tensor.dim() == 2:
            blocks = gguf.quants.quantize(tensor.numpy(), quantization)
            raw[name] = torch.from_numpy(blocks)
            plain[name] = torch.from_numpy(gguf.quants.dequantize(blocks, quantization))
            entries[name] = {"type": kind, "shape": list(tensor.shape)}
    in_blocks, in_floats = (copy_of(tiny_folder("qwen2"), tmp_path / name) for name in ("blocks", "floats"))
    save(in_blocks / "model.safetensors", raw, entries)
    save(in_floats / "model.safetensors", plain)
    assert greedy(in_blocks) == greedy(in_floats)
    assert greedy(in_blocks) != greedy(tiny_folder("qwen2"))  # four or five bits change something
    with Weights(in_blocks) as weights:
        for name, tensor in plain.items():
            assert torch.equal(weights.load({name: tuple(tensor.shape)}), tensor), name


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_256_are_read_beside_plain_weights(kind: str, tmp_path: Path) -> None:
    rows, columns = 6, 512
    quantization = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns // block_size * block_bytes), dtype=np.uint8)
    blocks.reshape(-1, block_bytes)[:, 1::2] &= 0x8F  # scales are half-precision numbers; keep them finite
    tensors = {"w": torch.from_numpy(blocks), "b": torch.randn(rows)}
    save(tmp_path / "model.safetensors", tensors, {"w": {"type": kind, "shape": [rows, columns]}})
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, quantization))
    with Weights(tmp_path) as weights:
        assert weights.num_bytes == (rows * columns + rows) * 4
        assert torch.equal(weights.load({"w": (rows, columns)}), expected)
        assert torch.equal(weights.load({"b": (rows,)}), tensors["b"])


# Errors.


def test_everything_that_is_wrong_is_named_at_once(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tensors = tensors_of(tiny_folder("qwen2"))
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.0.mlp.gate_proj.bias"] = torch.zeros(96)
    tensors["model.layers.7.input_layernorm.weight"] = torch.zeros(64)
    folder = copy_of(tiny_folder("qwen2"), tmp_path / "model")
    save(folder / "model.safetensors", tensors)
    message = problems(folder)
    for part in (
        str(folder),
        "model.norm.weight is missing",
        "model.layers.1.self_attn.k_proj.bias is missing",
        "model.layers.2.mlp.down_proj.weight has shape [3, 4], expected [64, 96]",
        "model.layers.0.mlp.gate_proj.bias is not part of this architecture",
        "model.layers.7.input_layernorm.weight is not part of this architecture",
    ):
        assert part in message
    assert message.count(";") == 4


def test_an_output_matrix_of_its_own_must_be_there(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copy_of(tiny_folder("llama", tie_word_embeddings=False), tmp_path / "model")
    save(folder / "model.safetensors", tensors_of(tiny_folder("llama")))
    assert "lm_head.weight is missing" in problems(folder)


def test_a_tied_output_matrix_may_be_written_twice_but_not_differently(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tensors = tensors_of(tiny_folder("llama"))
    folder = copy_of(tiny_folder("llama"), tmp_path / "model")
    save(folder / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert greedy(folder) == greedy(tiny_folder("llama"))
    save(folder / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    assert "lm_head.weight differs from the weight that it is tied to" in problems(folder)
    save(folder / "model.safetensors", tensors | {"lm_head.weight": torch.zeros(2, 2)})
    assert "lm_head.weight is not part of this architecture" in problems(folder)


def test_frequencies_that_old_files_carry_are_passed_over(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save(folder / "model.safetensors", tensors_of(tiny_folder("llama")) | extra)
    assert greedy(folder) == greedy(tiny_folder("llama"))


def test_a_folder_without_weights_is_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model")
    assert problems(folder) == f"{folder / 'model.safetensors'} is missing"
    (folder / "model.safetensors").write_bytes(b"not weights")
    assert f"{folder / 'model.safetensors'} is not a safetensors file" in problems(folder)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", max_shard_size="60KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert problems(folder) == f"{gone} is missing"


@pytest.mark.parametrize("index", [b"nonsense", b"{}", b"[]", b'{"weight_map": 3}'])
def test_an_index_that_is_none_is_named(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not an index"):
        Weights(tmp_path)


def test_a_weight_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.safetensors", {"w": torch.zeros(2)})
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="w is in another file too"):
        Weights(tmp_path)


def test_numbers_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.zeros(2, 2, dtype=torch.int8)})
    with pytest.raises(ModelError, match="w holds I8; supported are"):
        Weights(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"type": "Q4_1", "shape": [2, 64]}, r"w holds U8 \[2, 20\], but Q4_1 of 2 × 64 takes U8 \[2, 40\]"),
        ({"type": "Q4_1", "shape": [3, 32]}, "but Q4_1 of 3 × 32 takes"),
        ({"type": "Q4_1", "shape": [2, 33]}, "not whole Q4_1 blocks"),
        ({"type": "Q9", "shape": [2, 32]}, "Q9 is not a GGUF type"),
        ({"type": "Q4_1"}, "its entry in shoal.gguf is wrong"),
        ({"type": "Q4_1", "shape": [2]}, "its entry in shoal.gguf is wrong"),
        ([], "its entry in shoal.gguf is wrong"),
    ],
)
def test_block_entries_that_do_not_fit_are_named(entry: Any, message: str, tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.zeros(2, 20, dtype=torch.uint8)}, {"w": entry})
    with pytest.raises(ModelError, match=message):
        Weights(tmp_path)


@pytest.mark.parametrize("metadata", ["nonsense", "[]"])
def test_block_metadata_that_is_none_is_named(metadata: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors", {"shoal.gguf": metadata})
    with pytest.raises(ModelError, match=r"metadata shoal\.gguf is not"):
        Weights(tmp_path)


def test_a_block_type_that_cannot_be_read_is_named_with_the_rest(tmp_path: Path) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1]
    tensors = {"w": torch.zeros(1, block_bytes, dtype=torch.uint8)}
    save(tmp_path / "model.safetensors", tensors, {"w": {"type": "Q8_K", "shape": [1, 256]}})
    weights = Weights(tmp_path)
    weights.load({"w": (1, 256), "v": (1, 256)})
    with pytest.raises(ModelError, match=r"w: .*Q8_K.*v is missing"):
        weights.finish()
