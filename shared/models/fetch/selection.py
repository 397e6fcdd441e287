"""Which files of a listing make up a model: the same rules for a repository, a bucket, an archive and a folder."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shared.errors import ModelError
from shared.models.weights import INDEX

REQUIRED: Final = ("config.json", "tokenizer.json")
OPTIONAL: Final = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "README.md",
)
WHOLE: Final = "model.safetensors"
_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to take: either one GGUF file, or those of a model folder, the small ones first."""

    files: tuple[str, ...]
    is_gguf: bool


def select(names: Iterable[str], where: str) -> Selection:
    """What to take of the files `names`, which lie side by side. Raises ModelError if they are not a model."""
    present = set(names)
    ggufs = sorted(name for name in present if name.endswith(".gguf"))
    if "config.json" not in present or (ggufs and not _weights(present)):
        return Selection((_only_gguf(ggufs, where),), is_gguf=True)
    weights = _weights(present)
    if not weights:
        raise ModelError(_why_no_weights(present, where))
    if "tokenizer.json" not in present:
        raise ModelError(
            f"{where} has no tokenizer.json; load its tokenizer once with transformers and save_pretrained() to get one"
        )
    small = [name for name in (*REQUIRED, *OPTIONAL) if name in present]
    return Selection((*small, *weights), is_gguf=False)


def _weights(present: set[str]) -> list[str]:
    if WHOLE in present:
        return [WHOLE]
    shards = sorted(name for name in present if _SHARD.fullmatch(name))
    return [INDEX, *shards] if shards and INDEX in present else []


def _only_gguf(ggufs: list[str], where: str) -> str:
    if not ggufs:
        raise ModelError(f"{where} is not a model: it has neither a config.json nor a GGUF file")
    if len(ggufs) > 1:
        raise ModelError(f"{where} has several GGUF files, name one of them: {', '.join(ggufs)}")
    return ggufs[0]


def _why_no_weights(present: set[str], where: str) -> str:
    pickles = sorted(name for name in present if name.endswith(_PICKLES))
    if pickles:
        return (
            f"{where} has its weights only as pickles ({', '.join(pickles[:3])}), which can run any code when they "
            f"are opened; Shoal takes safetensors and GGUF only"
        )
    if INDEX in present:
        return f"{where} has an index of weights but none of the files"
    return f"{where} has no weights: no {WHOLE}, no model-00001-of-….safetensors with their index, and no GGUF file"
