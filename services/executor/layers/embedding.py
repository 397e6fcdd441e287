"""The table of token embeddings."""

from typing import Final, Self

from torch import Tensor

from services.executor.kernels.embedding import embedding
from services.executor.weights import Weights


class Embedding:
    """Looks up token ids."""

    def __init__(self, table: Tensor) -> None:
        self.table: Final = table
        """[vocabulary, hidden] float32."""

    @classmethod
    def load(cls, weights: Weights, name: str, vocab_size: int, hidden_size: int) -> Self:
        """Of the module `name`."""
        return cls(weights.load({f"{name}.weight": (vocab_size, hidden_size)}))

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T, hidden]."""
        return embedding(token_ids, self.table)
