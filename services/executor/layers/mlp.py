"""The gated feed-forward block that all supported families have."""

from torch import Tensor

from services.executor.kernels.silu_mul import silu_mul
from services.executor.layers.linear import Linear
from services.executor.weights import Weights
from shared.models.config import ModelConfig


class GatedMLP:
    """`down(silu(gate(x)) · up(x))`, gate and up in one product."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._gate_up = Linear.load(
            weights, {f"{prefix}.gate_proj": size, f"{prefix}.up_proj": size}, hidden, bias=bias
        )
        self._down = Linear.load(weights, {f"{prefix}.down_proj": hidden}, size, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] from [T, hidden]."""
        return self._down(silu_mul(self._gate_up(x)))
