"""The settings of a tokenizer."""

from dataclasses import dataclass
from typing import ClassVar

from shared.config import Config, setting


@dataclass(frozen=True, slots=True)
class TokenizerConfig(Config):
    """`SHOAL_TOKENIZER_*`."""

    prefix: ClassVar[str] = "SHOAL_TOKENIZER_"

    max_model_len: int | None = setting(
        None, "tokens of prompt and output of one choice, if executors take fewer than the model could", minimum=1
    )
    inline_chars: int = setting(
        4096, "prompts up to so many characters are encoded at once, longer ones in a thread", minimum=0
    )
    max_waiting_prompts: int = setting(
        32, "long prompts that may wait for the thread; more are refused", minimum=1, maximum=100_000
    )
