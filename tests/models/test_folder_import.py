"""A folder in Hugging Face's layout into the common format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models.folder_import import import_folder
from tests.tiny_models import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN


@pytest.fixture
def source(tmp_path: Path, model_folder: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(model_folder, tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The empty folder to fill."""
    path = tmp_path / "target"
    path.mkdir()
    return path


def settings_of(folder: Path) -> dict[str, object]:
    """The tokenizer's settings."""
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    assert isinstance(settings, dict)
    return settings


def test_what_a_model_needs_is_taken_and_nothing_else(source: Path, target: Path) -> None:
    for name in ("modeling_evil.py", "pytorch_model.bin", "training_args.bin"):
        (source / name).write_bytes(b"evil")
    (source / "nested").mkdir()
    import_folder(source, target, may_move=False)
    assert {path.name for path in target.iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    }
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_weights_are_shared_and_small_files_copied(source: Path, target: Path) -> None:
    import_folder(source, target, may_move=False)
    assert (target / "model.safetensors").samefile(source / "model.safetensors")
    assert not (target / "config.json").samefile(source / "config.json")
    before = (source / "tokenizer_config.json").read_bytes()
    (target / "tokenizer_config.json").write_text("{}")
    assert (source / "tokenizer_config.json").read_bytes() == before


@pytest.mark.parametrize("may_move", [True, False])
def test_weights_are_moved_or_copied_where_links_cannot_be_made(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, may_move: bool
) -> None:
    content = (source / "model.safetensors").read_bytes()

    def refuse(_source: Path, _target: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    import_folder(source, target, may_move=may_move)
    assert (target / "model.safetensors").read_bytes() == content
    assert (source / "model.safetensors").exists() is not may_move


def test_links_as_in_hugging_faces_cache_are_followed(source: Path, target: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in source.iterdir():
        (snapshot / path.name).symlink_to(path)
    import_folder(snapshot, target, may_move=False)
    assert not any(path.is_symlink() for path in target.iterdir())
    assert (target / "model.safetensors").samefile(source / "model.safetensors")


def test_a_chat_template_in_a_file_of_its_own_is_put_where_services_look(source: Path, target: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ 'Grüße' }}", encoding="utf-8")
    import_folder(source, target, may_move=False)
    assert settings_of(target)["chat_template"] == "{{ 'Grüße' }}"


def test_settings_stay_as_they_are_otherwise(source: Path, target: Path) -> None:
    import_folder(source, target, may_move=False)
    assert settings_of(target) == settings_of(source)
    assert settings_of(target)["chat_template"] == CHAT_TEMPLATE


def test_missing_settings_are_made_from_the_configuration(source: Path, target: Path) -> None:
    (source / "tokenizer_config.json").unlink()
    import_folder(source, target, may_move=False)
    assert settings_of(target) == {"bos_token": END_OF_TEXT, "eos_token": END_OF_TURN}


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0"),
        ("---\nlicense: mit # comment\n---\n", "mit"),
        ("# license: none\n", None),
        ("---\nlanguage: en\n---\nlicense: x\n", None),
        ("---\nlicense:\n- mit\n---\n", None),
    ],
)
def test_the_licence_is_read_from_the_model_card(source: Path, target: Path, readme: str, expected: str | None) -> None:
    (source / "README.md").write_text(readme)
    assert import_folder(source, target, may_move=False) == expected


def _edit_config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_edit_config(architectures=["MambaForCausalLM"]), "architecture MambaForCausalLM is not supported"),
        (_edit_config(quantization_config={"quant_method": "gptq"}), "quantized by 'gptq' are not supported"),
        (_edit_config(quantization_config={"bits": 4}), "quantized by 'unknown' are not supported"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"tokenizer\.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "holds a list, not an object"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("x"), "is not JSON"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "only as pickles"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(
    source: Path, target: Path, change: Callable[[Path], object], complaint: str
) -> None:
    change(source)
    with pytest.raises(ModelError, match=complaint):
        import_folder(source, target, may_move=False)
