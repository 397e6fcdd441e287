"""Models from Hugging Face, with a server of our own in its place."""

from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models.fetch.hub import HubAccess, fetch_hub
from shared.models.fetch.patience import Patience
from shared.models.fetch.result import FetchedFile, FetchedFolder
from shared.models.progress import Silent
from shared.models.sources import HubSource
from tests.models.fake_hub import COMMIT, FakeHub
from tests.models.file_server import FileServer

_REPOSITORY = "org/tiny"


@pytest.fixture
def hub(file_server: FileServer) -> FakeHub:
    """A hub without repositories."""
    return FakeHub(file_server)


@pytest.fixture
def access(hub: FakeHub) -> HubAccess:
    """With a token."""
    return HubAccess(endpoint=hub.endpoint, token="hf_secret")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a fetch puts its files."""
    path = tmp_path / "downloads"
    path.mkdir()
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """A folder's content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_repository_is_fetched_at_one_commit(
    hub: FakeHub,
    access: HubAccess,
    folder: Path,
    patience: Patience,
    file_server: FileServer,
    sharded_folder: Path,
) -> None:
    files = files_of(sharded_folder)
    hub.add(_REPOSITORY, {**files, "pytorch_model.bin": b"pickle", "onnx/x.gguf": b""}, license_name="apache-2.0")
    fetched = fetch_hub(HubSource(_REPOSITORY), folder, Silent(), patience, access)
    assert fetched == FetchedFolder(folder, is_ours=True, license_name="apache-2.0")
    for name, content in files.items():
        if name.endswith((".json", ".safetensors")):
            assert (folder / name).read_bytes() == content
    assert not (folder / "pytorch_model.bin").exists()
    downloads = [request for request in file_server.requests if not request.path.startswith("api/")]
    assert all(COMMIT in request.path for request in downloads)
    assert {request.authorization for request in downloads} == {"Bearer hf_secret"}


def test_the_token_is_not_shown_to_the_server_that_keeps_the_bytes(
    hub: FakeHub, access: HubAccess, folder: Path, patience: Patience, file_server: FileServer
) -> None:
    hub.add(_REPOSITORY, {"x.gguf": b"gguf"})
    file_server.files["cdn/x.gguf"] = b"gguf"
    elsewhere = hub.endpoint.replace("127.0.0.1", "localhost")
    file_server.redirects[hub.path(_REPOSITORY, "x.gguf")] = f"{elsewhere}/cdn/x.gguf?signature=1"
    fetch_hub(HubSource(_REPOSITORY), folder, Silent(), patience, access)
    assert (folder / "x.gguf").read_bytes() == b"gguf"
    assert [request.authorization for request in file_server.requests if request.path == "cdn/x.gguf"] == [None]


def test_one_gguf_file_of_many_is_fetched_by_name(
    hub: FakeHub, access: HubAccess, folder: Path, patience: Patience
) -> None:
    hub.add(_REPOSITORY, {"a.gguf": b"a", "deep/b c.gguf": b"b"})
    fetched = fetch_hub(HubSource(_REPOSITORY, None, "deep/b c.gguf"), folder, Silent(), patience, access)
    assert fetched == FetchedFile(folder / "b c.gguf")
    assert fetched.path.read_bytes() == b"b"
    hub.add(_REPOSITORY, {"a.gguf": b"a", "d.gguf": b"d"})
    with pytest.raises(ModelError, match=r"several GGUF files, name one of them: a\.gguf, d\.gguf"):
        fetch_hub(HubSource(_REPOSITORY), folder, Silent(), patience, access)
    with pytest.raises(ModelError, match=r"has no file c\.gguf \(GGUF files in it: a\.gguf, d\.gguf\)"):
        fetch_hub(HubSource(_REPOSITORY, None, "c.gguf"), folder, Silent(), patience, access)


def test_an_interrupted_fetch_goes_on_in_the_file_where_it_was(
    hub: FakeHub,
    access: HubAccess,
    folder: Path,
    patience: Patience,
    file_server: FileServer,
    model_folder: Path,
) -> None:
    hub.add(_REPOSITORY, files_of(model_folder))
    weights = hub.path(_REPOSITORY, "model.safetensors")
    file_server.etags[weights] = None  # the commit and the checksum are enough
    size = len(file_server.files[weights])
    file_server.breaks[weights].append(size - 1000)
    with pytest.raises(ModelError, match="broke off"):
        fetch_hub(HubSource(_REPOSITORY), folder, Silent(), Patience(max_failures=0), access)
    arrived = (folder / "model.safetensors.part").stat().st_size
    file_server.requests.clear()
    fetch_hub(HubSource(_REPOSITORY), folder, Silent(), patience, access)
    assert arrived > 0
    assert file_server.ranges(weights) == [f"bytes={arrived}-"]
    assert file_server.ranges(hub.path(_REPOSITORY, "config.json")) == []
    assert (folder / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_content_that_is_not_what_the_hub_lists_is_refused(
    hub: FakeHub,
    access: HubAccess,
    folder: Path,
    patience: Patience,
    file_server: FileServer,
    model_folder: Path,
    name: str,
) -> None:
    hub.add(_REPOSITORY, files_of(model_folder))
    content = bytearray(file_server.files[hub.path(_REPOSITORY, name)])
    content[-3] ^= 1
    file_server.files[hub.path(_REPOSITORY, name)] = bytes(content)
    with pytest.raises(ModelError, match=rf"{name}: the checksum is wrong"):
        fetch_hub(HubSource(_REPOSITORY), folder, Silent(), patience, access)
    assert not (folder / name).exists()


@pytest.mark.parametrize("name", ["../../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf", "a\\evil.gguf"])
def test_a_listed_name_that_points_outside_is_refused(
    hub: FakeHub, access: HubAccess, folder: Path, patience: Patience, name: str
) -> None:
    hub.add(_REPOSITORY, {}, listed=name)
    with pytest.raises(ModelError, match="points outside"):
        fetch_hub(HubSource(_REPOSITORY, None, name), folder, Silent(), patience, access)


def test_pickles_are_refused(hub: FakeHub, access: HubAccess, folder: Path, patience: Patience) -> None:
    hub.add(_REPOSITORY, {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ModelError, match="only as pickles"):
        fetch_hub(HubSource(_REPOSITORY), folder, Silent(), patience, access)


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (401, "GatedRepo", "is gated: accept its terms on its page, then set HF_TOKEN"),
        (404, "RepoNotFound", r"org/tiny does not exist, or is private .* \(a folder on this machine is written \./"),
        (404, "RevisionNotFound", "has no revision v9"),
        (403, "", r"org/tiny cannot be read: .*403"),
        (500, "", r"org/tiny cannot be read: .*500"),
    ],
)
def test_a_refusal_says_what_to_do(
    hub: FakeHub, access: HubAccess, folder: Path, patience: Patience, status: int, code: str, complaint: str
) -> None:
    hub.refuse(_REPOSITORY, "v9", status, code)
    with pytest.raises(ModelError, match=complaint):
        fetch_hub(HubSource(_REPOSITORY, "v9"), folder, Silent(), patience, access)


def test_a_revision_is_asked_for(hub: FakeHub, access: HubAccess, folder: Path, patience: Patience) -> None:
    hub.add(_REPOSITORY, {"x.gguf": b"gguf"})
    fetch_hub(HubSource(_REPOSITORY, "main"), folder, Silent(), patience, access)
    with pytest.raises(ModelError, match="org/tiny"):
        fetch_hub(HubSource(_REPOSITORY, "v9"), folder, Silent(), patience, access)


def test_a_hub_that_cannot_be_reached_is_explained(folder: Path, patience: Patience) -> None:
    with pytest.raises(ModelError, match=r"the Hugging Face repository org/tiny cannot be reached"):
        fetch_hub(HubSource(_REPOSITORY), folder, Silent(), patience, HubAccess("http://127.0.0.1:1"))
