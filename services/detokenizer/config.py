"""The settings of a detokenizer."""

from dataclasses import dataclass
from typing import ClassVar

from shared.config import Config, setting


@dataclass(frozen=True, slots=True)
class DetokenizerConfig(Config):
    """`SHOAL_DETOKENIZER_*`."""

    prefix: ClassVar[str] = "SHOAL_DETOKENIZER_"

    max_open_choices: int = setting(
        4096, "choices that can be decoded at once; a request beyond them fails", minimum=1, maximum=1_000_000
    )
    max_silence_s: float = setting(
        15.0,
        "a request of which nothing is heard for so long is forgotten until something is: then all of it is sent again",
        minimum=1,
    )
