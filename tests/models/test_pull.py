"""`pull`: from every kind of source to a model in the store, unless it is there already."""

from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.models.config import load_config
from shared.models.fetch.hub import HubAccess
from shared.models.fetch.patience import Patience
from shared.models.pull import Terms, pull
from shared.models.store import ModelStore
from tests.models.fake_hub import FakeHub
from tests.models.file_server import FileServer
from tests.models.pulling import Listener, assert_nothing_is_left, files_of
from tests.models.test_archive import make_zip
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import FAMILIES


def test_a_gguf_file_becomes_a_model(store: ModelStore, terms: Terms, gguf_file: Path) -> None:
    result = pull(store, str(gguf_file), terms=terms)
    assert not result.was_present
    assert result.manifest.name == "tiny-llama.Q8_0"
    assert result.manifest.source == str(gguf_file)
    assert result.manifest.main_type == "Q8_0"
    assert result.manifest.license == "cc0-1.0"
    assert load_config(store.folder("tiny-llama.Q8_0")).family == "llama"
    assert {file.path for file in result.manifest.files} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    }
    store.verify(result.manifest.name)
    assert_nothing_is_left(store)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1", "Q6_K"])
def test_every_family_is_imported_from_gguf(
    store: ModelStore, terms: Terms, tmp_path: Path, family: str, kind: str
) -> None:
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    source = write_tiny_gguf(tmp_path / "x.gguf", family, kind=kind, tie_word_embeddings=False, **shape)
    manifest = pull(store, str(source), terms=terms).manifest
    assert (manifest.family, manifest.main_type) == (family, kind)
    assert "F32" in manifest.quantization  # the norms


def test_a_folder_becomes_a_model_and_stays_as_it_was(store: ModelStore, terms: Terms, sharded_folder: Path) -> None:
    before = files_of(sharded_folder)
    result = pull(store, str(sharded_folder), name="org/q", terms=terms)
    assert result.manifest.family == "qwen3"
    assert result.folder == store.folder("org/q")
    assert files_of(sharded_folder) == before
    store.verify("org/q")


def test_a_hub_repository_becomes_a_model_named_after_it(
    store: ModelStore, patience: Patience, file_server: FileServer, model_folder: Path
) -> None:
    hub = FakeHub(file_server)
    hub.add("org/tiny", files_of(model_folder), license_name="mit")
    result = pull(store, "org/tiny", terms=Terms(patience=patience, hub=HubAccess(hub.endpoint)))
    assert (result.manifest.name, result.manifest.license) == ("org/tiny", "mit")
    assert_nothing_is_left(store)


def test_a_web_folder_an_archive_and_a_file_become_models(
    store: ModelStore,
    terms: Terms,
    file_server: FileServer,
    model_folder: Path,
    gguf_file: Path,
    tmp_path: Path,
) -> None:
    archive = make_zip(tmp_path / "z.zip", {f"x/{name}": content for name, content in files_of(model_folder).items()})
    file_server.files |= {f"web/{name}": content for name, content in files_of(model_folder).items()}
    file_server.files |= {"z.zip": archive.read_bytes(), "f.gguf": gguf_file.read_bytes()}
    names = [pull(store, f"{file_server.url}/{path}", terms=terms).manifest.name for path in ("web", "z.zip", "f.gguf")]
    assert names == ["web", "z", "f"]
    assert [manifest.name for manifest in store.list()] == ["f", "web", "z"]


@pytest.fixture
def pulled(store: ModelStore, terms: Terms, file_server: FileServer, gguf_file: Path) -> str:
    """A source that was pulled as the model `x`; the server has it no more."""
    file_server.files["x.gguf"] = gguf_file.read_bytes()
    source = f"{file_server.url}/x.gguf"
    pull(store, source, terms=terms)
    file_server.files.clear()
    file_server.requests.clear()
    return source


def test_a_model_that_is_there_is_left_alone_without_a_look_at_the_network(
    store: ModelStore, terms: Terms, file_server: FileServer, pulled: str
) -> None:
    result = pull(store, pulled, terms=terms)
    assert result.was_present
    assert not file_server.requests


def test_force_fetches_again(
    store: ModelStore, patience: Patience, file_server: FileServer, pulled: str, gguf_file: Path
) -> None:
    forced = Terms(patience=patience, is_forced=True)
    with pytest.raises(ModelError, match="does not exist"):
        pull(store, pulled, terms=forced)
    store.folder("x")  # the old one stays until the new one is complete
    file_server.files["x.gguf"] = gguf_file.read_bytes()
    result = pull(store, pulled, terms=forced)
    assert not result.was_present
    assert file_server.ranges("x.gguf")[-1] is None


def test_a_damaged_model_is_fetched_again(
    store: ModelStore, patience: Patience, file_server: FileServer, pulled: str, gguf_file: Path
) -> None:
    (store.folder("x") / "tokenizer.json").unlink()
    file_server.files["x.gguf"] = gguf_file.read_bytes()
    listener = Listener()
    assert not pull(store, pulled, terms=Terms(progress=listener, patience=patience)).was_present
    assert "is damaged" in listener.sentences[0]
    store.verify("x")


def test_a_name_is_not_taken_from_another_source_unasked(
    store: ModelStore, terms: Terms, patience: Patience, pulled: str, gguf_file: Path
) -> None:
    with pytest.raises(ModelError, match=rf"a model x already, from {pulled}; give this one another name"):
        pull(store, str(gguf_file), name="x", terms=terms)
    pull(store, str(gguf_file), name="y", terms=terms)
    pull(store, str(gguf_file), name="x", terms=Terms(patience=patience, is_forced=True))
    assert store.manifest("x").source == str(gguf_file)
