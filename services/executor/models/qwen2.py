"""Qwen2 and Qwen2.5: Llama with a bias on the q, k and v projections."""

from services.executor.models.llama import Llama


class Qwen2(Llama):
    """Adds nothing of its own: where biases are is part of `ModelConfig`, and `load_config` sets it for this family."""
