"""A folder in Hugging Face's layout into a model folder of the store.

Owns which files are taken and what is made uniform: `tokenizer_config.json` is always there, and always holds the chat
template. Weights are hard-linked where possible, so that no second copy is made.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from shared.errors import ModelError
from shared.models.config import load_config
from shared.models.fetch.disk import explain_full_disk, require_space
from shared.models.fetch.selection import select


def import_folder(source: Path, folder: Path, *, may_move: bool) -> str | None:
    """Fill the empty `folder` with the model in `source`. The name of its licence, if the folder says it.

    `may_move`: `source` is not needed any more, and lies on the same file system. Raises ModelError if the model
    cannot be served.
    """
    selection = select([entry.name for entry in source.iterdir()], str(source))
    load_config(source)
    _refuse_quantized(source / "config.json")
    with explain_full_disk(folder):
        for name in selection.files:
            _take(source / name, folder / name, may_move=may_move)
        _complete_settings(folder)
    readme = folder / "README.md"
    return _license(readme.read_text(encoding="utf-8", errors="replace")) if readme.exists() else None


def _take(source: Path, target: Path, *, may_move: bool) -> None:
    """Share the content of weights, which nobody changes in place; copy what people edit."""
    real = source.resolve()  # Hugging Face's cache holds links
    if not target.name.endswith(".safetensors"):
        shutil.copyfile(real, target)
        return
    try:
        os.link(real, target)
    except OSError:  # another file system, or one without links
        if may_move:
            real.rename(target)
            return
        require_space(target.parent, real.stat().st_size, source.name)
        shutil.copyfile(real, target)


def _refuse_quantized(path: Path) -> None:
    settings = json.loads(path.read_bytes()).get("quantization_config")
    if settings:
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
        raise ModelError(
            f"{path}: weights quantized by {method!r} are not supported; take the unquantized model or a GGUF file"
        )


def _complete_settings(folder: Path) -> None:
    """Make sure that the tokenizer can be loaded, and that its settings hold what services look for."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain exceptions
        raise ModelError(f"{folder.name}: tokenizer.json cannot be read: {error}") from error
    path = folder / "tokenizer_config.json"
    settings = _read_object(path) if path.exists() else {}
    config = load_config(folder)
    template = folder / "chat_template.jinja"
    if template.exists():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    if "bos_token" not in settings and config.bos_token_id is not None:
        settings["bos_token"] = tokenizer.id_to_token(config.bos_token_id)
    if "eos_token" not in settings and config.end_token_ids:
        settings["eos_token"] = tokenizer.id_to_token(config.end_token_ids[0])
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} holds a {type(content).__name__}, not an object")
    return content


def _license(readme: str) -> str | None:
    """From the front matter of a model card."""
    match = re.match(r"---\n(?P<matter>.*?)\n---", readme, re.DOTALL)
    line = re.search(r"^license:[ \t]*(\S+)", match["matter"], re.MULTILINE) if match else None
    return line[1] if line else None
