"""A folder's text side is found in every place where models keep it."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.model_files import read_model_files
from shared.errors import ModelError


def write(folder: Path, name: str, value: Any) -> None:
    """Write a JSON file."""
    (folder / name).write_text(json.dumps(value))


def test_a_folder_with_nothing_but_a_tokenizer_is_fine(tmp_path: Path) -> None:
    files = read_model_files(tmp_path)
    assert (files.chat_template, files.special_tokens, files.adds_bos, files.names_end_tokens) == (
        None,
        {},
        None,
        False,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("template", "template"),
        ("", None),
        (None, None),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
    ],
)
def test_the_template_is_text_or_the_default_of_several(tmp_path: Path, value: Any, expected: str | None) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    files = read_model_files(tmp_path)
    assert files.chat_template == expected
    assert files.chat_template_path == tmp_path / "tokenizer_config.json"


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("né\n")
    files = read_model_files(tmp_path)
    assert (files.chat_template, files.chat_template_path) == ("né\n", tmp_path / "chat_template.jinja")


def test_special_tokens_are_text_or_objects_with_their_content(tmp_path: Path) -> None:
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<old>", "pad_token": {"content": "<pad>"}})
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "unk_token": None,
        "add_bos_token": True,
        "x": "y",
    }
    write(tmp_path, "tokenizer_config.json", settings)
    files = read_model_files(tmp_path)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert files.adds_bos is True


@pytest.mark.parametrize(("value", "expected"), [({"eos_token_id": [1, 2]}, True), ({"eos_token_id": None}, False)])
def test_a_generation_config_may_name_the_end_tokens(tmp_path: Path, value: dict[str, Any], expected: bool) -> None:
    write(tmp_path, "generation_config.json", value)
    assert read_model_files(tmp_path).names_end_tokens is expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}'),
        ("tokenizer_config.json", b'{"add_bos_token": "yes"}'),
        ("generation_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        read_model_files(tmp_path)
