"""The whole conversion of one GGUF file."""

import json
from pathlib import Path
from typing import Any

from shared.errors import ModelError
from shared.models.config import load_config
from shared.models.fetch.disk import explain_full_disk, require_space
from shared.models.gguf_import.architecture import build_config
from shared.models.gguf_import.reader import read_gguf
from shared.models.gguf_import.tensors import write_weights
from shared.models.gguf_import.tokenizer import build_settings, build_tokenizer
from shared.models.gguf_import.vocabulary import read_vocabulary


def convert_gguf(path: Path, folder: Path) -> str | None:
    """Fill the empty `folder` with the model in the GGUF file `path`. The name of its licence, if the file has it.

    Raises ModelError if the file is damaged, or holds something that cannot be served.
    """
    require_space(folder, path.stat().st_size, "the converted model")
    file = read_gguf(path)
    config = build_config(file)
    vocabulary = read_vocabulary(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise ModelError(
            f"{path} has {len(vocabulary.tokens)} tokens but embeddings for only {config['vocab_size']} of them"
        )
    with explain_full_disk(folder):
        _write_json(folder / "config.json", config)
        end_token_ids = vocabulary.end_token_ids
        _write_json(
            folder / "generation_config.json",
            {"bos_token_id": vocabulary.bos_id, "eos_token_id": list(end_token_ids)} if end_token_ids else {},
        )
        max_model_len = load_config(folder).max_model_len
        build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", build_settings(vocabulary, max_model_len))
        write_weights(file, config, folder / "model.safetensors")
    license_name = file.metadata.get("general.license")
    return license_name if isinstance(license_name, str) else None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    present = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(present, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
