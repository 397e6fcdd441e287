"""Models from object stores, with moto's server in the place of S3."""

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.models.fetch.bucket import fetch_bucket
from shared.models.fetch.connect import connect_bucket
from shared.models.fetch.patience import Patience
from shared.models.fetch.result import FetchedFile, FetchedFolder
from shared.models.progress import Silent
from shared.models.sources import BucketSource


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """The address of an S3 server without buckets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts objects into the bucket `models`; the usual variables lead to it."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3  # type: ignore[import-untyped]

    client = boto3.client("s3", endpoint_url=s3_url, region_name="us-east-1")
    client.create_bucket(Bucket="models")
    yield lambda key, body: client.put_object(Bucket="models", Key=key, Body=body)
    for item in client.list_objects_v2(Bucket="models").get("Contents", ()):
        client.delete_object(Bucket="models", Key=item["Key"])
    client.delete_bucket(Bucket="models")
    client.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a fetch puts its files."""
    path = tmp_path / "downloads"
    path.mkdir()
    return path


def test_a_model_folder_is_fetched(bucket: Any, folder: Path, patience: Patience, sharded_folder: Path) -> None:
    for path in sharded_folder.iterdir():
        bucket(f"a/m/{path.name}", path.read_bytes())
    bucket("a/m/pytorch_model.bin", b"pickle")
    bucket("a/m/sub/config.json", b"not at the top")
    bucket("a/m2/config.json", b"another model with the same beginning")
    fetched = fetch_bucket(BucketSource("s3://models/a/m"), folder, Silent(), patience)
    assert fetched == FetchedFolder(folder, is_ours=True)
    for path in sharded_folder.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert not (folder / "pytorch_model.bin").exists()


@pytest.mark.parametrize("key", ["x.gguf", "deep/er/x.gguf"])
def test_a_gguf_file_is_fetched_and_checked(bucket: Any, folder: Path, patience: Patience, key: str) -> None:
    bucket(key, b"gguf")
    digest = hashlib.sha256(b"gguf").hexdigest()
    fetched = fetch_bucket(BucketSource(f"s3://models/{key}", digest), folder, Silent(), patience)
    assert isinstance(fetched, FetchedFile)
    assert fetched.path.read_bytes() == b"gguf"
    with pytest.raises(ModelError, match="checksum is wrong"):
        fetch_bucket(BucketSource(f"s3://models/{key}", "0" * 64), folder, Silent(), patience)


def test_the_only_gguf_file_under_a_prefix_is_taken(bucket: Any, folder: Path, patience: Patience) -> None:
    bucket("m/x.gguf", b"gguf")
    fetched = fetch_bucket(BucketSource("s3://models/m"), folder, Silent(), patience)
    assert isinstance(fetched, FetchedFile)


def test_a_fetch_is_resumed(bucket: Any, folder: Path, patience: Patience) -> None:
    bucket("x.gguf", b"0123456789")
    source = BucketSource("s3://models/x.gguf")
    fetch_bucket(source, folder, Silent(), patience)
    (folder / "x.gguf").unlink()
    (folder / "x.gguf.part").write_bytes(b"abcde")  # told apart from what the bucket holds
    fetch_bucket(source, folder, Silent(), patience)
    assert (folder / "x.gguf").read_bytes() == b"abcde56789"
    (folder / "x.gguf").unlink()
    (folder / "x.gguf.part").write_bytes(b"abcde")
    bucket("x.gguf", b"9876543210")
    fetch_bucket(source, folder, Silent(), patience)
    assert (folder / "x.gguf").read_bytes() == b"9876543210"


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("s3://elsewhere/m", "there is no such bucket: s3://elsewhere/m"),
        ("s3://models/m", "there is nothing at s3://models/m"),
        ("s3://models/x.gguf", r"s3://models/x\.gguf does not exist \(404\)"),
    ],
)
def test_what_is_not_there_is_named(folder: Path, patience: Patience, url: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        fetch_bucket(BucketSource(url), folder, Silent(), patience)


def test_a_refusal_says_which_variables_to_set(
    bucket: Any, folder: Path, patience: Patience, file_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", file_server.url)
    file_server.statuses["models"].append(403)
    with pytest.raises(ModelError, match=r"s3://models/m: access denied \(403\); set AWS_ACCESS_KEY_ID"):
        fetch_bucket(BucketSource("s3://models/m"), folder, Silent(), patience)


def test_the_other_object_stores_are_opened_by_the_same_kind_of_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    assert type(connect_bucket("gs://models/m")).__name__ == "GCSStore"
    assert type(connect_bucket("az://models/m")).__name__ == "AzureStore"
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ModelError, match=r"az://models/m cannot be opened: .*AZURE_STORAGE_ACCOUNT_NAME"):
        connect_bucket("az://models/m")


def test_a_checksum_cannot_pin_a_prefix(folder: Path, patience: Patience) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        fetch_bucket(BucketSource("s3://models/m", "0" * 64), folder, Silent(), patience)
