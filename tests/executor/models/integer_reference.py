"""The integer models' arithmetic written down plainly: every place where numbers become bytes, and float64 between."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.executor.kernels.cached_attention import Kind
from services.executor.kernels.grouped_linear import Bits
from services.executor.kernels.quantize import dequantize_naive, quantize_naive
from services.executor.kernels.row_quantize import MIDDLE_BLOCK, dequantize_rows_naive, quantize_rows_naive
from services.executor.layers.rotary import rotary_table
from services.executor.quantization.groups import numbers
from services.executor.quantization.rotation import Rotation
from services.executor.weights import Weights
from shared.models.config import load_config


class GroupReference:
    """Weights in groups. One sequence from its first token to its last, nothing cached."""

    def __init__(self, folder: Path, bits: Bits | None, cache: Kind) -> None:
        self.config = load_config(folder)
        self._weights = Weights(folder)
        self._bits = bits
        self._cache = cache
        self._table = rotary_table(self.config.rope, self.config.head_dim, 512)

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, vocabulary]."""
        config = self.config
        x = self._embedding()[torch.tensor(token_ids)]
        for number in range(config.num_layers):
            prefix = f"model.layers.{number}"
            x = x + self._attention(f"{prefix}.self_attn", self._norm(f"{prefix}.input_layernorm", x))
            x = x + self._feed_forward(f"{prefix}.mlp", self._norm(f"{prefix}.post_attention_layernorm", x))
        return self._head(self._norm("model.norm", x))

    def _embedding(self) -> Tensor:
        return self._matrix("model.embed_tokens.weight", self.config.vocab_size, self.config.hidden_size)

    def _head(self, x: Tensor) -> Tensor:
        if self.config.tie_word_embeddings:
            return _as_bytes(x) @ self._embedding().T
        return _as_bytes(x) @ self._matrix("lm_head.weight", self.config.vocab_size, self.config.hidden_size).T

    def _attention(self, prefix: str, x: Tensor) -> Tensor:
        config, head_dim = self.config, self.config.head_dim
        q, k, v = (
            self._linear(f"{prefix}.{name}_proj", x, heads * head_dim, bias=config.attention_bias).view(
                len(x), heads, head_dim
            )
            for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
        )
        if config.family == "qwen3":
            q, k = self._norm(f"{prefix}.q_norm", q), self._norm(f"{prefix}.k_norm", k)
        q, k = self._rotated(q), self._rotated(k)
        steps = torch.ones(v.shape[:2])
        if self._cache == "int8":
            q, k, steps = _heads_as_bytes(_spread(q)), _heads_as_bytes(_spread(k)), v.abs().amax(-1) / 127
            v = _heads_as_bytes(v)
        group = config.num_heads // config.num_kv_heads
        k, v, steps = (x.repeat_interleave(group, dim=1) for x in (k, v, steps))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        weights = _weights_in_16_bits(scores, steps.T) if self._cache == "int8" else scores.softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return self._linear(f"{prefix}.o_proj", out, config.hidden_size, bias=config.output_bias)

    def _feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        config = self.config
        gate, up = (
            self._linear(f"{prefix}.{name}_proj", x, config.intermediate_size, bias=config.mlp_bias)
            for name in ("gate", "up")
        )
        middle = torch.nn.functional.silu(gate) * up
        return self._linear(f"{prefix}.down_proj", middle, config.hidden_size, bias=config.mlp_bias)

    def _linear(self, name: str, x: Tensor, rows: int, *, bias: bool) -> Tensor:
        out = _as_bytes(x) @ self._matrix(f"{name}.weight", rows, x.shape[1]).T
        return out + self._weights.load({f"{name}.bias": (rows,)}).double() if bias else out

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return torch.from_numpy(numbers(self._weights.load_groups({name: (rows, columns)}, self._bits))).double()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights.load({f"{name}.weight": (x.shape[-1],)}).double()
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = (table[: len(x)].double().unsqueeze(1) for table in (self._table.cos, self._table.sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RowReference(GroupReference):
    """Weights with a scale a row, hidden states rotated."""

    def __init__(self, folder: Path, cache: Kind) -> None:
        super().__init__(folder, None, cache)
        self._rotation = Rotation(self.config.hidden_size)

    def _embedding(self) -> Tensor:
        rows = self._weight("model.embed_tokens.weight", self.config.vocab_size, self.config.hidden_size)
        return _in_bytes(self._rotation.rows(rows.numpy()))

    def _head(self, x: Tensor) -> Tensor:
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return self._read(x, self._weight(name, self.config.vocab_size, x.shape[1]), "model.norm.weight")

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if name.endswith(("q_norm", "k_norm")):
            return super()._norm(name, x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def _linear(self, name: str, x: Tensor, rows: int, *, bias: bool) -> Tensor:
        weight = self._weight(f"{name}.weight", rows, x.shape[1])
        added = self._weights.load({f"{name}.bias": (rows,)}) if bias else torch.zeros(rows)
        if name.endswith(("o_proj", "down_proj")):
            block = MIDDLE_BLOCK if name.endswith("down_proj") else 0
            of_hidden = self._rotation(added.numpy()[:, np.newaxis])[:, 0]
            return _rows_as_bytes(x, block) @ _in_bytes(self._rotation(weight.numpy())).T + torch.from_numpy(of_hidden)
        layer = name.rsplit(".", 2)[0]
        norm = "input_layernorm" if "self_attn" in name else "post_attention_layernorm"
        return self._read(x, weight, f"{layer}.{norm}.weight") + added

    def _read(self, x: Tensor, weight: Tensor, norm: str) -> Tensor:
        factors = self._weights.load({norm: (weight.shape[1],)})
        return _rows_as_bytes(x) @ _in_bytes(self._rotation.rows((weight * factors).numpy())).T

    def _weight(self, name: str, rows: int, columns: int) -> Tensor:
        return self._weights.load({name: (rows, columns)})


def _in_bytes(rows: npt.NDArray[np.float32]) -> Tensor:
    weight = torch.from_numpy(rows)
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (torch.round(weight / scales) * scales).double()


def _rows_as_bytes(x: Tensor, block: int = 0) -> Tensor:
    return dequantize_rows_naive(*quantize_rows_naive(x.float(), block), block).double()


def _as_bytes(x: Tensor) -> Tensor:
    return dequantize_naive(*quantize_naive(x.float())).double()


def _weights_in_16_bits(scores: Tensor, steps: Tensor) -> Tensor:
    """Softmax, each tile of 64 weights rounded once it was multiplied by its values' steps [heads, keys]."""
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = []
    for of_tile, step in zip(torch.split(weights, 64, -1), torch.split(steps.unsqueeze(1), 64, -1), strict=True):
        units = (of_tile * step).amax(-1, keepdim=True).clamp(min=1e-300) / 32767
        rounded.append(torch.round(of_tile * step / units) * units / step)
    return torch.cat(rounded, dim=-1) / weights.sum(-1, keepdim=True)


def _spread(x: Tensor) -> Tensor:
    """Each head's numbers, in blocks of the largest power of 2 in how many there are, by a Hadamard matrix."""
    matrix, size = torch.ones(1, 1, dtype=x.dtype), x.shape[-1] & -x.shape[-1]
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    blocks: Tensor = x.reshape(*x.shape[:-1], -1, size) @ matrix * size**-0.5
    return blocks.reshape(x.shape)


def _heads_as_bytes(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / step) * step
