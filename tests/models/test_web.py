"""Models from web servers."""

import hashlib
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shared.cli.mesh.ports import free_port
from shared.errors import ModelError
from shared.models.fetch.patience import Patience
from shared.models.fetch.result import FetchedFile, FetchedFolder
from shared.models.fetch.web import fetch_web
from shared.models.progress import Silent
from shared.models.sources import WebSource
from shared.models.weights import INDEX
from tests.models.conftest import Pauses
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


@pytest.fixture(scope="module")
def tls_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A web server whose certificate nobody has signed."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    request += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(request, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.handle_error = lambda *_arguments: None  # type: ignore[method-assign]  # clients leave in the handshake
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_an_untrusted_certificate_is_named_and_not_tried_again(
    tls_url: str, folder: Path, patience: Patience, pauses: Pauses
) -> None:
    with pytest.raises(ModelError, match=r"x\.gguf cannot be fetched: its certificate is not trusted"):
        fetch_web(WebSource(f"{tls_url}/x.gguf"), folder, Silent(), patience)
    assert pauses.seconds == []


def test_a_server_without_https_is_named_and_not_tried_again(
    file_server: FileServer, folder: Path, patience: Patience, pauses: Pauses
) -> None:
    url = file_server.url.replace("http:", "https:")
    with pytest.raises(ModelError, match="does not speak HTTPS"):
        fetch_web(WebSource(f"{url}/x.gguf"), folder, Silent(), patience)
    assert pauses.seconds == []


def test_words_in_an_address_are_no_cause(folder: Path, patience: Patience, pauses: Pauses) -> None:
    url = f"http://127.0.0.1:{free_port()}/certificate-InvalidMessage.gguf"
    with pytest.raises(ModelError, match="nothing answers there"):
        fetch_web(WebSource(url), folder, Silent(), patience)
    assert len(pauses.seconds) == patience.max_failures


def test_every_pause_is_told_with_its_reason(folder: Path, patience: Patience, pauses: Pauses) -> None:
    url, said = f"http://127.0.0.1:{free_port()}/x.gguf", list[str]()
    with pytest.raises(ModelError):
        fetch_web(WebSource(url), folder, Silent(), replace(patience, say=said.append))
    reason = f"{url} cannot be fetched: nothing answers there (connection refused)"
    assert said == [f"{reason}; trying again in {pause_s:g} s" for pause_s in (0.5, 1, 2)]
    assert pauses.seconds == [0.5, 1, 2]
