"""The matrix products of a step: how large they are, how many bytes they read, and what torch needs for the same ones.

Owns no measurement of the executor's own products; `steps` takes those out of whole steps.
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from services.executor.formats import WeightFormat
from services.executor.kernels.grouped_linear import PANEL, record_bytes
from services.executor.kernels.quantize import GROUP
from services.executor.kernels.row_linear import blocks_of
from services.executor.kernels.row_quantize import MIDDLE_BLOCK
from services.executor.quantization.groups import STORED_BITS
from shared.models.config import ModelConfig

ENOUGH_S: Final = 0.5
_NUM_TRIES: Final = 4


class Product(NamedTuple):
    """One weight of a step, and the names in the files of what it is made of."""

    rows: int
    columns: int
    parts: tuple[str, ...]
    in_blocks: bool = False
    """Whether its inputs are silu(gate) · up."""


def products_of(config: ModelConfig) -> tuple[list[Product], Product]:
    """Those of all layers in their order, which every token takes, and the head, which tokens with logits take."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, middle = config.hidden_size, config.intermediate_size
    layers = []
    for number in range(config.num_layers):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        layers += [
            Product(heads + 2 * kv_heads, hidden, tuple(f"{attention}.{name}_proj.weight" for name in "qkv")),
            Product(hidden, heads, (f"{attention}.o_proj.weight",)),
            Product(2 * middle, hidden, tuple(f"{mlp}.{name}_proj.weight" for name in ("gate", "up"))),
            Product(hidden, middle, (f"{mlp}.down_proj.weight",), in_blocks=True),
        ]
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return layers, Product(config.vocab_size, hidden, (head,))


def weight_bytes(folder: Path, config: ModelConfig, weights: WeightFormat) -> int:
    """Bytes of packed weights that all products of a step read. A weight has 4 bits if all its parts have."""
    layers, head = products_of(config)
    if weights == "int8":
        return sum(_row_bytes(product) for product in (*layers, head))
    stored = _stored_bits(folder)
    others = 4 if weights == "int4" else 8
    return sum(
        -(-product.rows // PANEL)
        * (product.columns // GROUP)
        * record_bytes(4 if all(stored.get(part, others) == 4 for part in product.parts) else 8)
        for product in (*layers, head)
    )


def _row_bytes(product: Product) -> int:
    blocks = blocks_of(product.columns, MIDDLE_BLOCK if product.in_blocks else 0)
    return -(-product.rows // PANEL) * blocks.panel_bytes


class TorchProducts:
    """`torch._int_mm` (int8 · int8 → int32) over the products of a step, each weight in memory of its own."""

    def __init__(self, config: ModelConfig) -> None:
        layers, head = products_of(config)
        self._layers = [_some_weight(product) for product in layers]
        self._head = _some_weight(head)

    def seconds(self, num_tokens: int, num_logits: int) -> float:
        """The best of several tries, with weights as [rows, columns] and as [columns, rows].

        What takes longer than ENOUGH_S is cut short, and the part of the work that was done stands for the whole.
        """
        best = float("inf")
        inputs, outputs = _Made(torch.int8), _Made(torch.int32)
        for is_turned in (False, True):
            products = [
                (inputs[count, weight.shape[1]], _turned(weight, is_turned), outputs[count, len(weight)])
                for weight, count in (*((weight, num_tokens) for weight in self._layers), (self._head, num_logits))
            ]
            for _ in range(_NUM_TRIES):
                best = min(best, _seconds_of(products))
                if best > ENOUGH_S:
                    break
        return best


def _seconds_of(products: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    sizes = [len(x) * weight.numel() for x, weight, _ in products]
    started, done = time.perf_counter(), 0
    for (x, weight, out), size in zip(products, sizes, strict=True):
        torch._int_mm(x, weight, out=out)
        done += size
        if time.perf_counter() - started > ENOUGH_S:
            break
    return (time.perf_counter() - started) * sum(sizes) / done


class _Made(dict[tuple[int, int], Tensor]):
    """Matrices by shape, made when they are asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __missing__(self, shape: tuple[int, int]) -> Tensor:
        self[shape] = torch.ones(shape, dtype=self._dtype)
        return self[shape]


def _some_weight(product: Product) -> Tensor:
    """A weight of bytes; which ones does not matter."""
    return torch.ones(product.rows, product.columns, dtype=torch.int8)


def _turned(weight: Tensor, is_turned: bool) -> Tensor:
    """[columns, rows], with either of them close together in memory."""
    return weight.view(weight.shape[::-1]) if is_turned else weight.t()


def _stored_bits(folder: Path) -> Mapping[str, int]:
    """The bits of the weights that lie in the files as groups already."""
    return {
        name: STORED_BITS[entry["type"]]
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in _blocks(path)
        if entry["type"] in STORED_BITS
    }


def _blocks(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    with safe_open(path, framework="pt") as file:
        yield from json.loads((file.metadata() or {}).get("shoal.gguf", "{}")).items()
