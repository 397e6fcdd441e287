"""Which number formats an executor computes in. Owns what `auto` means, and what cannot be had."""

from typing import Literal, NamedTuple

from services.executor.config import ExecutorConfig
from services.executor.kernels.cached_attention import Kind
from services.executor.kernels.vectors import DotInstruction
from shared.errors import ConfigError
from shared.models.config import ModelConfig

WeightFormat = Literal["stored", "int4", "int8", "bfloat16", "float32"]
"""As stored: groups of 4 or 8 bits as they are in the file, everything else in groups of 8."""

_GROUP = 32
_LANES = 16


class Formats(NamedTuple):
    """A choice, and the reason for people."""

    weights: WeightFormat
    cache: Kind
    reason: str


def choose_formats(config: ExecutorConfig, model: ModelConfig, dot: DotInstruction) -> Formats:
    """What the settings ask for, on a processor with this instruction. Raises ConfigError for what the model can't."""
    obstacle = _obstacle(model, config.block_size)
    if config.dtype in ("stored", "int4", "int8") and obstacle:
        raise ConfigError(f"SHOAL_EXECUTOR_DTYPE={config.dtype} cannot be: {obstacle}")
    if config.dtype == "auto" and (obstacle or dot == "none"):
        return _in_floats(
            config, "float32", obstacle or "this processor has no instruction for integers that would be faster"
        )
    cache: Kind = "float32" if config.kv_dtype == "float32" else "int8"
    match config.dtype:
        case "stored" | "int4" | "int8" as weights:
            reason = "as configured" if dot != "none" else "as configured; slow without an instruction for it"
            return Formats(weights, cache, reason)
        case "auto":
            return Formats(
                "int8", cache, f"the processor multiplies {'16-bit integers' if dot == 'avx2' else 'bytes'} ({dot})"
            )
        case "bfloat16":
            return _in_floats(config, "bfloat16", "as configured")
        case _:
            return _in_floats(config, "float32", "as configured")


def _in_floats(config: ExecutorConfig, weights: WeightFormat, reason: str) -> Formats:
    if config.kv_dtype == "int8":
        raise ConfigError(f"SHOAL_EXECUTOR_KV_DTYPE=int8 goes with integer weights, and these are {weights}: {reason}")
    return Formats(weights, "float32", reason)


def _obstacle(model: ModelConfig, block_size: int) -> str | None:
    """What about a model, or the size of blocks, integer kernels cannot do."""
    for name, size in (
        ("hidden_size", model.hidden_size),
        ("intermediate_size", model.intermediate_size),
        ("num_attention_heads · head_dim", model.num_heads * model.head_dim),
    ):
        if size % _GROUP:
            return f"{name} is {size}, which is no multiple of {_GROUP}"
    if model.head_dim % _LANES:
        return f"head_dim is {model.head_dim}, which is no multiple of {_LANES}"
    if block_size % _LANES:
        return f"SHOAL_EXECUTOR_BLOCK_SIZE is {block_size}, which is no multiple of {_LANES}"
    return None
