"""The whole conversion of a GGUF file into a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.errors import ModelError
from shared.models.config import load_config
from shared.models.gguf_import.architecture import llama3_factors
from shared.models.gguf_import.convert import convert_gguf
from shared.models.weights import check_weights, read_weights
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The empty folder to fill."""
    path = tmp_path / "model"
    path.mkdir()
    return path


def test_the_folder_holds_what_services_need(tmp_path: Path, folder: Path) -> None:
    license_name = convert_gguf(write_tiny_gguf(tmp_path / "x.gguf", kind="Q4_0"), folder)
    assert license_name == "cc0-1.0"
    config = load_config(folder)
    check_weights(read_weights(folder), config)
    assert config.end_token_ids == (2, 0)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == config.vocab_size == VOCAB_SIZE
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert settings["model_max_length"] == config.max_model_len


def test_llama_3s_rope_reaches_the_configuration(tmp_path: Path, folder: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factors = llama3_factors(scaling, 500_000.0, 16).astype("float32")
    metadata = {"llama.rope.freq_base": 500_000.0}
    convert_gguf(
        write_tiny_gguf(tmp_path / "x.gguf", metadata=metadata, tensors={"rope_freqs.weight": factors}), folder
    )
    rope = load_config(folder).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("llama3", 500_000.0, 8.0, 8192)
    check_weights(read_weights(folder), load_config(folder))


def test_a_file_without_licence_template_and_ends_is_still_a_model(tmp_path: Path, folder: Path) -> None:
    metadata: dict[str, Any] = {
        "general.license": None,
        "tokenizer.chat_template": None,
        "tokenizer.ggml.token_type": [1] * VOCAB_SIZE,
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.ggml.bos_token_id": None,
    }
    assert convert_gguf(write_tiny_gguf(tmp_path / "x.gguf", metadata=metadata), folder) is None
    assert load_config(folder).end_token_ids == ()
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_bytes())


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match=f"has {VOCAB_SIZE} tokens but embeddings for only {VOCAB_SIZE - 1}"):
        convert_gguf(write_tiny_gguf(tmp_path / "x.gguf", vocab_size=VOCAB_SIZE - 1), folder)


def test_a_lack_of_room_is_noticed_first(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf")
    asked = []

    def refuse(where: Path, needed_bytes: int, what: str) -> None:
        asked.append((where, needed_bytes))
        raise ModelError("no room")

    monkeypatch.setattr("shared.models.gguf_import.convert.require_space", refuse)
    with pytest.raises(ModelError, match="no room"):
        convert_gguf(path, folder)
    assert asked == [(folder, path.stat().st_size)]
    assert not list(folder.iterdir())
