"""What a model folder's safetensors files hold, read from their headers alone.

Owns the check that the weights are those of the configuration, and their types and shapes for a summary. Does not
read a single weight.

A quantized tensor from a GGUF file is stored as its raw blocks: type U8, shape [rows, bytes per row]. The entry
`shoal.gguf` of the file's `__metadata__` is then a JSON object that gives the block type and the true shape:
`{"model.layers.0.mlp.up_proj.weight": {"type": "Q4_1", "shape": [1536, 576]}}`.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.errors import ModelError
from shared.models.config import ModelConfig

GGUF_KEY: Final = "shoal.gguf"
INDEX: Final = "model.safetensors.index.json"
ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
"""The safetensors types that may occur in a file at all; weights are F32, F16, BF16 or raw blocks in U8."""

_WEIGHT_TYPES: Final = ("F32", "F16", "BF16")
_MAX_HEADER_BYTES: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: its type (F32, F16, BF16, or a GGUF block type) and its shape as the model sees it."""

    file: Path
    kind: str
    shape: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def read_weights(folder: Path) -> dict[str, Weight]:
    """Every tensor of a model folder by name.

    Raises ModelError for a file that is malformed, cut short, or at odds with the index.
    """
    weights: dict[str, Weight] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, weight in _read_file(path).items():
            if name in weights:
                raise ModelError(f"{path} holds {name}, and so does {weights[name].file.name}")
            weights[name] = weight
    if not weights:
        raise ModelError(f"{folder} holds no weights in safetensors")
    _check_index(folder / INDEX, weights)
    return weights


def check_weights(weights: dict[str, Weight], config: ModelConfig) -> None:
    """Raises ModelError that names the first weight that is missing, superfluous, or of the wrong type or shape."""
    expected = dict(expected_weights(config))
    for name, shape in expected.items():
        weight = weights.get(name)
        if weight is None:
            raise ModelError(f"the weight {name} is missing")
        if weight.shape != shape:
            raise ModelError(
                f"{weight.file}: {name} has the shape {list(weight.shape)}; "
                f"by the configuration it should be {list(shape)}"
            )
    for name, weight in weights.items():
        if name not in expected and not _is_harmless(name, config):
            raise ModelError(f"{weight.file} holds {name}, which a {config.family} model does not have")


def expected_weights(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight that a model of this configuration has."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    projections = (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", config.intermediate_size, hidden, config.mlp_bias),
        ("mlp.up_proj", config.intermediate_size, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if config.family == "qwen3":
            yield prefix + "self_attn.q_norm.weight", (config.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (config.head_dim,)
        for name, rows, columns, has_bias in projections:
            yield f"{prefix}{name}.weight", (rows, columns)
            if has_bias:
                yield f"{prefix}{name}.bias", (rows,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Old exports keep what is computed from the configuration, or write the tied matrix a second time."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _read_file(path: Path) -> dict[str, Weight]:
    header, num_data_bytes = _read_header(path)
    raw = _raw_blocks(path, header.pop("__metadata__", None) or {})
    weights, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: _start(path, item)):
        kind, shape, start, stop = _entry(path, name, entry)
        if start != end or stop - start != ITEM_BYTES[kind] * math.prod(shape):
            raise ModelError(f"{path}: the place of {name} in the file does not fit its shape; the file is damaged")
        end = stop
        weights[name] = _weight(path, name, kind, shape, raw.get(name))
    if end != num_data_bytes:
        problem = "is cut short" if end > num_data_bytes else "is longer than its header says"
        raise ModelError(f"{path} {problem}: {end} bytes of weights expected, {num_data_bytes} found")
    return weights


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and the number of bytes that follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path} is not a safetensors file, or is cut short")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is no object")
    return header, size - 8 - length


def _start(path: Path, item: tuple[str, Any]) -> int:
    return _entry(path, *item)[2]


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path}: the header's entry for {name} is malformed") from None
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ModelError(f"{path}: the header's entry for {name} is malformed")
    if kind not in ITEM_BYTES:
        raise ModelError(
            f"{path}: {name} has the type {kind}, which is not supported; weights are {', '.join(_WEIGHT_TYPES)}, "
            f"or quantized and imported from a GGUF file"
        )
    return kind, shape, start, stop


def _raw_blocks(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        blocks = json.loads(metadata.get(GGUF_KEY, "{}"))
        return {name: (str(block["type"]), tuple(block["shape"])) for name, block in blocks.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{path}: the entry {GGUF_KEY} of its metadata is malformed") from None


def _weight(path: Path, name: str, kind: str, shape: tuple[int, ...], block: Any) -> Weight:
    if kind == "U8" and block is not None and len(shape) == len(block[1]) == 2 and shape[0] == block[1][0]:
        return Weight(path, *block)
    if kind not in _WEIGHT_TYPES or block is not None:
        raise ModelError(f"{path}: {name} has the type {kind} and the shape {list(shape)}, which is no weight's")
    return Weight(path, kind, shape)


def _check_index(path: Path, weights: dict[str, Weight]) -> None:
    if not path.exists():
        return
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        missing = [name for name, file in places.items() if name not in weights or weights[name].file.name != file]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is not an index of weights: {error}") from error
    if missing:
        raise ModelError(f"{path.parent}: {missing[0]} is not in {places[missing[0]]}, where the index has it")
