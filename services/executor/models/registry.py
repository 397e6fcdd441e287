"""Which class is which family."""

from typing import Any, Final, Protocol

from torch import Tensor

from services.executor.attention.protocol import Attention
from services.executor.batch import ForwardBatch
from services.executor.models.llama import Llama
from services.executor.models.qwen2 import Qwen2
from services.executor.models.qwen3 import Qwen3
from services.executor.weights import Weights
from shared.models.config import ModelConfig

_FAMILIES: Final = {"llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3}


class Model(Protocol):
    """A model with its weights: a function of the batch, and of a cache of its own kind that it reads and writes."""

    def __call__(self, batch: ForwardBatch, kv_cache: Any) -> Tensor:
        """Logits [S, vocabulary] float32 of the batch's `logits_rows`; all tokens' keys and values are stored."""
        ...


def build_model(config: ModelConfig, weights: Weights, attention: Attention) -> Model:
    """The model of `config` with weights from `weights`, whose `finish` tells whether they were all there."""
    return _FAMILIES[config.family](config, weights, attention)
