"""Models from web servers."""

import hashlib
import json
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models.fetch.patience import Patience
from shared.models.fetch.result import FetchedFile, FetchedFolder
from shared.models.fetch.web import fetch_web
from shared.models.progress import Silent
from shared.models.sources import WebSource
from shared.models.weights import INDEX
from tests.models.file_server import FileServer
from tests.models.test_archive import make_tar


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a fetch puts its files."""
    path = tmp_path / "downloads"
    path.mkdir()
    return path


def serve(server: FileServer, folder: Path, prefix: str = "models/m/") -> None:
    """Put a folder's files on the server."""
    server.files |= {prefix + path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_gguf_file_is_fetched(file_server: FileServer, folder: Path, patience: Patience, gguf_file: Path) -> None:
    file_server.files["models/x.gguf"] = gguf_file.read_bytes()
    fetched = fetch_web(WebSource(f"{file_server.url}/models/x.gguf"), folder, Silent(), patience)
    assert isinstance(fetched, FetchedFile)
    assert fetched.path.read_bytes() == gguf_file.read_bytes()


def test_the_query_goes_with_the_request_and_stays_out_of_files_and_messages(
    file_server: FileServer, folder: Path, patience: Patience
) -> None:
    file_server.files["models/a b.gguf"] = b"gguf"
    url = f"{file_server.url}/models/a%20b.gguf?X-Signature=s%2Fecret&d=1"
    fetched = fetch_web(WebSource(url), folder, Silent(), patience)
    assert fetched.path.name == "a b.gguf"
    assert {request.query for request in file_server.requests} == {"X-Signature=s/ecret&d=1"}
    assert not any(b"ecret" in path.read_bytes() for path in folder.iterdir())
    with pytest.raises(ModelError) as error:
        fetch_web(WebSource(url.replace("a%20b", "c")), folder, Silent(), patience)
    assert "ecret" not in str(error.value)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_is_fetched_file_by_file(
    file_server: FileServer, folder: Path, patience: Patience, model_folder: Path, slash: str
) -> None:
    serve(file_server, model_folder)
    fetched = fetch_web(WebSource(f"{file_server.url}/models/m{slash}"), folder, Silent(), patience)
    assert fetched == FetchedFolder(folder, is_ours=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (model_folder / name).read_bytes()
    assert not any("//" in request.path for request in file_server.requests)


def test_a_folder_in_shards_is_fetched_by_its_index(
    file_server: FileServer, folder: Path, patience: Patience, sharded_folder: Path
) -> None:
    serve(file_server, sharded_folder)
    fetch_web(WebSource(f"{file_server.url}/models/m"), folder, Silent(), patience)
    for path in sharded_folder.glob("*.safetensors*"):
        assert (folder / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin"])
def test_an_index_cannot_name_files_elsewhere(
    file_server: FileServer, folder: Path, patience: Patience, sharded_folder: Path, name: str
) -> None:
    serve(file_server, sharded_folder)
    file_server.files[f"models/m/{INDEX}"] = json.dumps({"weight_map": {"model.norm.weight": name}}).encode()
    with pytest.raises(ModelError, match="is not a file of the model's folder"):
        fetch_web(WebSource(f"{file_server.url}/models/m"), folder, Silent(), patience)


def test_an_unsupported_architecture_is_refused_before_the_weights_are_fetched(
    file_server: FileServer, folder: Path, patience: Patience, model_folder: Path
) -> None:
    serve(file_server, model_folder)
    file_server.files["models/m/config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    with pytest.raises(ModelError, match="architecture MambaForCausalLM is not supported"):
        fetch_web(WebSource(f"{file_server.url}/models/m"), folder, Silent(), patience)
    assert file_server.ranges("models/m/model.safetensors") == []


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_address_that_is_no_model_says_what_is_missing(
    file_server: FileServer, folder: Path, patience: Patience, model_folder: Path, missing: str
) -> None:
    serve(file_server, model_folder)
    del file_server.files[f"models/m/{missing}"]
    with pytest.raises(ModelError, match=f"is not a model's folder: {missing} does not exist there"):
        fetch_web(WebSource(f"{file_server.url}/models/m"), folder, Silent(), patience)


def test_an_archive_is_fetched_checked_and_unpacked(
    file_server: FileServer, folder: Path, patience: Patience, model_folder: Path, tmp_path: Path
) -> None:
    archive = make_tar(tmp_path / "m.tar.gz", {f"m/{path.name}": path.read_bytes() for path in model_folder.iterdir()})
    file_server.files["m.tar.gz"] = content = archive.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    fetched = fetch_web(WebSource(f"{file_server.url}/m.tar.gz", digest), folder, Silent(), patience)
    assert isinstance(fetched, FetchedFolder)
    assert (fetched.path / "config.json").read_bytes() == (model_folder / "config.json").read_bytes()
    with pytest.raises(ModelError, match="checksum is wrong"):
        fetch_web(WebSource(f"{file_server.url}/m.tar.gz", "0" * 64), folder, Silent(), patience)


def test_a_checksum_cannot_pin_a_folder(folder: Path, patience: Patience) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        fetch_web(WebSource("http://127.0.0.1:1/m", "0" * 64), folder, Silent(), patience)


def test_a_lack_of_room_is_noticed_before_the_fetch(
    file_server: FileServer, folder: Path, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_server.files["x.gguf"] = bytes(1000)
    needed = []

    def note(folder: Path, needed_bytes: int, what: str) -> None:
        needed.append(needed_bytes)
        raise ModelError("no room")

    monkeypatch.setattr("shared.models.fetch.batch.require_space", note)
    with pytest.raises(ModelError, match="no room"):
        fetch_web(WebSource(f"{file_server.url}/x.gguf"), folder, Silent(), patience)
    assert needed == [2000]  # the file, and the model that it becomes
    assert file_server.ranges("x.gguf") == []
