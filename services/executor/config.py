"""The executor's settings, `SHOAL_EXECUTOR_*`."""

from dataclasses import dataclass
from typing import ClassVar

from shared.config import Config, setting


@dataclass(frozen=True, slots=True)
class ExecutorConfig(Config):
    """How one executor computes and how much it holds."""

    prefix: ClassVar[str] = "SHOAL_EXECUTOR_"

    dtype: str = setting(
        "auto",
        "number format of weights and activations; auto: int8 where the processor multiplies bytes or has AVX2, else "
        "float32; "
        "stored: groups of 4 or 8 bits as they are in the file",
        choices=("auto", "int8", "int4", "stored", "bfloat16", "float32"),
    )
    keep_packed: bool = setting(
        True,
        "keep integer weights on disk as the kernels read them, beside the model: later starts map them into memory",
    )
    kv_dtype: str = setting(
        "auto",
        "number format of the KV cache; auto: int8 beside integer weights, else float32",
        choices=("auto", "int8", "float32"),
    )
    kv_cache_mb: int = setting(
        0,
        "memory for the KV cache in MiB; 0: a quarter of what is free beside the weights, at most 4096",
        minimum=0,
    )
    block_size: int = setting(16, "tokens of KV cache in a block", minimum=1, maximum=1024)
    max_slots: int = setting(64, "choices that run at once", minimum=1, maximum=4096)
    max_step_tokens: int = setting(512, "tokens that one step computes at most", minimum=1, maximum=65_536)
    max_draft_tokens: int = setting(
        11, "tokens that are guessed ahead of a choice's next one where that pays; 0: none", minimum=0, maximum=64
    )
    max_model_len: int = setting(0, "tokens of prompt and output that a choice can have; 0: the model's", minimum=0)
    threads: int = setting(0, "threads that compute; 0: one for each core this process may use", minimum=0)
    nice: int = setting(0, "how far the computing threads stand back behind other processes", minimum=0, maximum=19)
