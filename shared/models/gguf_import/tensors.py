"""From a GGUF file's tensors to one safetensors file, tensor by tensor, quantized blocks untouched.

llama.cpp names tensors its own way, and for the architecture `llama` it orders the rows of the query and key
projections for another layout of rotary embeddings. Both are undone here. A quantized tensor's blocks lie within its
rows, so moving rows leaves them whole.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.models.gguf_import.architecture import ROPE_FACTORS
from shared.models.gguf_import.reader import GGUFFile, Tensor
from shared.models.weights import GGUF_KEY, ITEM_BYTES

_WHOLE_MODEL: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE: Final = re.compile(r"(\w+)\.(weight|bias)")
_FLOATS: Final = ("F32", "F16", "BF16")
_WRITE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class _Output:
    name: str
    tensor: Tensor
    row_order: npt.NDArray[np.intp] | None

    @property
    def dtype(self) -> str:
        return self.tensor.kind if self.tensor.kind in _FLOATS else "U8"

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape if self.dtype != "U8" else self.tensor.data.shape)


def write_weights(file: GGUFFile, config: dict[str, Any], target: Path) -> None:
    """Write every weight to `target`, holding one tensor in memory at most.

    Raises ModelError for a tensor that the family does not have, or of a type that cannot be read back.
    """
    outputs = [_output(file, tensor, config) for tensor in file.tensors.values() if tensor.name != ROPE_FACTORS]
    outputs.sort(key=lambda output: -ITEM_BYTES[output.dtype])  # the widest items first, so that each is aligned
    header = _header(outputs)
    with target.open("wb") as sink:
        sink.write(len(header).to_bytes(8, "little") + header)
        for output in outputs:
            for chunk in _chunks(output):
                sink.write(chunk.data)


def _output(file: GGUFFile, tensor: Tensor, config: dict[str, Any]) -> _Output:
    if tensor.kind not in _FLOATS and (len(tensor.shape) != 2 or not _is_readable(tensor.kind)):
        raise ModelError(f"{file.path}: {tensor.name} is of the type {tensor.kind}, which is not supported")
    return _Output(_name(file, tensor.name), tensor, _row_order(tensor, config))


@cache
def _is_readable(kind: str) -> bool:
    """Whether the gguf package, which the executor uses, turns blocks of this type into numbers."""
    quantization = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True


def _name(file: GGUFFile, name: str) -> str:
    if (match := _IN_LAYER.fullmatch(name)) and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    if (match := _OUTSIDE.fullmatch(name)) and match[1] in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[match[1]]}.{match[2]}"
    raise ModelError(f"{file.path} holds the tensor {name}, which the supported architectures do not have")


def _row_order(tensor: Tensor, config: dict[str, Any]) -> npt.NDArray[np.intp] | None:
    """Which row goes where, if the rows are in llama.cpp's order.

    It interleaves the two halves of each head, so that rotary pairs are neighbours: rows [head, half, pair] became
    [head, pair, half].
    """
    match = _IN_LAYER.fullmatch(tensor.name)
    if config["model_type"] != "llama" or match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    head_dim = config["head_dim"]
    num_rows = tensor.shape[0]
    if num_rows % head_dim:
        raise ModelError(f"{tensor.name} has {num_rows} rows, not a multiple of the head's {head_dim}")
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _header(outputs: list[_Output]) -> bytes:
    blocks = {
        output.name: {"type": output.tensor.kind, "shape": list(output.tensor.shape)}
        for output in outputs
        if output.dtype == "U8"
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt", GGUF_KEY: json.dumps(blocks)}}
    end = 0
    for output in outputs:
        start, end = end, end + output.tensor.data.size
        header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _chunks(output: _Output) -> Iterator[npt.NDArray[np.uint8]]:
    """The tensor's bytes in order, some tens of megabytes at a time."""
    data = output.tensor.data
    if len(output.tensor.shape) == 1:  # a vector is one row of the file; its items are what is ordered
        data = data.reshape(output.tensor.shape[0], -1)
    step = max(1, _WRITE_BYTES // data.shape[1])
    for start in range(0, len(data), step):
        stop = start + step
        chunk = data[start:stop] if output.row_order is None else data[output.row_order[start:stop]]
        yield np.ascontiguousarray(chunk)
