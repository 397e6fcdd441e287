"""From GGUF tensors to safetensors: names, the order of rows, blocks untouched."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from shared.errors import ModelError
from shared.models.gguf_import.architecture import build_config
from shared.models.gguf_import.reader import read_gguf
from shared.models.gguf_import.tensors import write_weights
from shared.models.weights import GGUF_KEY
from tests.models.tiny_gguf import blocks_of, gguf_name, write_tiny_gguf
from tests.tiny_models import FAMILIES, make_tiny_network

_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
"""Wide enough for blocks of 256."""
_READABLE = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
]


def imported(path: Path) -> Path:
    """The safetensors file that a GGUF file becomes."""
    file = read_gguf(path)
    target = path.with_suffix(".safetensors")
    write_weights(file, build_config(file), target)
    return target


def blocks_in(path: Path) -> dict[str, Any]:
    """What the file says of its raw tensors."""
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    blocks = json.loads(metadata[GGUF_KEY])
    assert isinstance(blocks, dict)
    return blocks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_float_weights_come_back_as_they_were_before_the_conversion_to_gguf(
    tmp_path: Path, family: str, is_tied: bool
) -> None:
    options: dict[str, Any] = {"tie_word_embeddings": is_tied} | (
        {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    )
    path = imported(write_tiny_gguf(tmp_path / "x.gguf", family, **options))
    state = make_tiny_network(family, **options).state_dict()
    if is_tied:
        del state["lm_head.weight"]
    weights = load_file(path)
    assert weights.keys() == state.keys()
    for name, parameter in state.items():
        np.testing.assert_array_equal(weights[name], parameter.numpy(), err_msg=name)
    assert blocks_in(path) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_transformers_reads_from_the_same_file(tmp_path: Path, family: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_tiny_gguf(tmp_path / "x.gguf", family, kind="Q8_0", tie_word_embeddings=False)
    network = make_tiny_network(family, tie_word_embeddings=False)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=network)["tensors"]
    weights, blocks = load_file(imported(path)), blocks_in(path.with_suffix(".safetensors"))
    assert weights.keys() == theirs.keys()
    for name, tensor in theirs.items():
        mine = weights[name]
        if name in blocks:
            mine = gguf.dequantize(mine, gguf.GGMLQuantizationType[blocks[name]["type"]])
        assert torch.equal(torch.from_numpy(np.array(mine)), tensor), name


@pytest.mark.parametrize("kind", _READABLE)
def test_blocks_of_every_type_stay_as_they_are_in_the_order_of_the_original_rows(tmp_path: Path, kind: str) -> None:
    weights = load_file(path := imported(write_tiny_gguf(tmp_path / "x.gguf", kind=kind, **_WIDE)))
    blocks = blocks_in(path)
    for name, parameter in make_tiny_network(**_WIDE).state_dict().items():
        if name == "lm_head.weight" or parameter.ndim == 1:
            continue
        assert blocks[name] == {"type": kind, "shape": list(parameter.shape)}
        rows = parameter.numpy()
        if ".q_proj." in name or ".k_proj." in name:
            order = np.arange(len(rows)).reshape(-1, 2, 32).swapaxes(1, 2).reshape(-1)  # as in tiny_gguf
            expected = np.empty_like(weights[name])
            expected[order] = blocks_of(gguf_name(name), rows[order], kind)
        else:
            expected = blocks_of(gguf_name(name), rows, kind)
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)


def test_half_precision_stays_half_precision(tmp_path: Path) -> None:
    weights = load_file(path := imported(write_tiny_gguf(tmp_path / "x.gguf", kind="F16")))
    for name, parameter in make_tiny_network().state_dict().items():
        if name != "lm_head.weight":
            expected = parameter.numpy() if parameter.ndim == 1 else parameter.half().numpy()
            assert weights[name].dtype == expected.dtype
            np.testing.assert_array_equal(weights[name], expected)
    assert blocks_in(path) == {}


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    path = imported(write_tiny_gguf(tmp_path / "x.gguf", kind="BF16"))
    with safe_open(path, "pt") as file:
        for name, parameter in make_tiny_network().state_dict().items():
            if name != "lm_head.weight" and parameter.ndim == 2:
                assert torch.equal(file.get_tensor(name), parameter.bfloat16())


def test_wide_items_come_first_so_that_every_tensor_is_aligned(tmp_path: Path) -> None:
    path = imported(write_tiny_gguf(tmp_path / "x.gguf", kind="Q8_0"))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    starts = {"F32": [], "U8": []}  # type: dict[str, list[int]]
    for name, entry in header.items():
        if name != "__metadata__":
            starts[entry["dtype"]].append(entry["data_offsets"][0])
    assert all(start % 4 == 0 for start in starts["F32"])
    assert max(starts["F32"]) < min(starts["U8"])


@pytest.mark.parametrize("kind", ["Q8_K", "Q8_1"])
def test_blocks_that_nobody_can_read_back_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match=rf"is of the type {kind}, which is not supported"):
        imported(write_tiny_gguf(tmp_path / "x.gguf", kind=kind, **_WIDE))


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_inp.weight", "v.patch_embd.weight", "blk.0.attn_q.scale", "cls.weight"]
)
def test_unknown_tensors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"holds the tensor {name}, which"):
        imported(write_tiny_gguf(tmp_path / "x.gguf", tensors={name: np.zeros((4, 64), np.float32)}))


def test_a_conversion_holds_one_tensor_in_memory_and_not_the_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", kind="Q8_0", **(_WIDE | {"num_hidden_layers": 8}))
    file = read_gguf(path)
    config = build_config(file)
    largest = max(tensor.data.size for tensor in file.tensors.values())
    tracemalloc.start()
    write_weights(file, config, path.with_suffix(".safetensors"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 15 * largest
    assert peak < 4 * largest  # one tensor, its reordered rows, and the header
