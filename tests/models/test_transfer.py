"""One remote file to one local file, with everything that can go wrong on the way."""

import asyncio
import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models.fetch.connect import connect_web
from shared.models.fetch.patience import Patience
from shared.models.fetch.remote import Checksum, RemoteFile, look_up
from shared.models.fetch.transfer import download
from tests.models.conftest import Pauses
from tests.models.file_server import FileServer

CONTENT = random.Random(7).randbytes(3_000_000)
BREAK = 1_300_000
"""Where connections break: more than the chunks that are written at once, and no multiple of them."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the file shall be."""
    return tmp_path / "x.bin"


@pytest.fixture
def remote(file_server: FileServer) -> Callable[..., RemoteFile]:
    """Makes the remote file; the server has CONTENT at x.bin."""
    file_server.files["x.bin"] = CONTENT

    def make(path: str = "x.bin", *, sha256: str | None = None, is_immutable: bool = False) -> RemoteFile:
        return RemoteFile(
            store=connect_web(file_server.url),
            path=path,
            url=f"{file_server.url}/{path}",
            access_hint="ask for access",
            checksum=Checksum("sha256", sha256) if sha256 else None,
            is_immutable=is_immutable,
        )

    return make


def fetch(remote: RemoteFile, target: Path, patience: Patience) -> list[int]:
    """What the progress was told."""
    reached: list[int] = []
    asyncio.run(download(remote, target, patience=patience, meter=reached.append))
    return reached


def interrupted(remote: RemoteFile, target: Path, server: FileServer) -> int:
    """Fetch until the connection breaks for good, as an earlier process did. How much had arrived."""
    server.breaks["x.bin"].append(BREAK)
    with pytest.raises(ModelError, match="broke off"):
        fetch(remote, target, Patience(max_failures=0))
    arrived = target.with_name("x.bin.part").stat().st_size
    assert 0 < arrived <= BREAK
    assert not target.exists()
    server.requests.clear()
    return arrived


def left(target: Path) -> set[str]:
    """The names in the folder."""
    return {path.name for path in target.parent.iterdir()}


def test_a_file_arrives_whole_and_progress_is_told(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience
) -> None:
    reached = fetch(remote(), target, patience)
    assert target.read_bytes() == CONTENT
    assert reached == sorted(reached)
    assert reached[-1] == len(CONTENT)
    assert left(target) == {"x.bin", "x.bin.state"}


def test_an_empty_file_arrives(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    file_server.files["x.bin"] = b""
    fetch(remote(), target, patience)
    assert target.read_bytes() == b""


def test_an_interrupted_fetch_goes_on_where_it_was(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    arrived = interrupted(remote(), target, file_server)
    reached = fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == [f"bytes={arrived}-"]
    assert reached[0] > arrived
    assert target.read_bytes() == CONTENT


def test_the_rest_is_asked_for_under_the_condition_that_nothing_changed(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    interrupted(remote(), target, file_server)
    fetch(remote(), target, patience)
    assert [request.if_match for request in file_server.requests] == [
        f'"{hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()}"'
    ]


@pytest.mark.parametrize("checks_if_match", [True, False])
def test_a_file_that_changed_meanwhile_is_fetched_from_the_start(
    remote: Callable[..., RemoteFile],
    target: Path,
    patience: Patience,
    file_server: FileServer,
    checks_if_match: bool,
) -> None:
    arrived = interrupted(remote(), target, file_server)
    file_server.files["x.bin"] = changed = CONTENT[::-1]
    file_server.checks_if_match = checks_if_match
    fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == [f"bytes={arrived}-", None]
    assert target.read_bytes() == changed


def test_a_weak_etag_is_compared_here_and_not_by_the_server(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    file_server.etags["x.bin"] = 'W/"1"'
    arrived = interrupted(remote(), target, file_server)
    fetch(remote(), target, patience)
    assert [(request.range, request.if_match) for request in file_server.requests] == [(f"bytes={arrived}-", None)]
    assert target.read_bytes() == CONTENT


def test_without_anything_to_tell_versions_apart_a_fetch_starts_over(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    file_server.etags["x.bin"] = None
    arrived = interrupted(remote(), target, file_server)
    fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == [f"bytes={arrived}-", None]
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("pin", ["checksum", "immutable"])
def test_a_pinned_content_is_resumed_without_etags(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer, pin: str
) -> None:
    file_server.etags["x.bin"] = None
    pinned = remote(sha256=hashlib.sha256(CONTENT).hexdigest() if pin == "checksum" else None, is_immutable=True)
    arrived = interrupted(pinned, target, file_server)
    fetch(pinned, target, patience)
    assert file_server.ranges("x.bin") == [f"bytes={arrived}-"]
    assert target.read_bytes() == CONTENT


def test_another_address_does_not_continue_what_is_there(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    interrupted(remote(), target, file_server)
    file_server.files["y.bin"] = CONTENT[::-1]
    fetch(remote("y.bin"), target, patience)
    assert file_server.ranges("y.bin") == [None]
    assert target.read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"url": 7}'])
def test_a_part_without_a_readable_state_is_thrown_away(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer, damage: bytes
) -> None:
    interrupted(remote(), target, file_server)
    target.with_name("x.bin.state").write_bytes(damage)
    fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == [None]
    assert target.read_bytes() == CONTENT


def test_breaks_are_ridden_out_within_one_fetch(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer, pauses: Pauses
) -> None:
    file_server.breaks["x.bin"].extend([600_000] * 4)  # more than the failures that are borne in a row
    fetch(remote(), target, patience)
    assert target.read_bytes() == CONTENT
    assert pauses.seconds == [0.5] * 4  # each time there was progress, so patience is fresh
    starts = [0 if asked is None else int(asked.removeprefix("bytes=")[:-1]) for asked in file_server.ranges("x.bin")]
    assert starts == sorted(set(starts))


def test_a_server_in_trouble_is_asked_again_after_longer_and_longer_pauses(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer, pauses: Pauses
) -> None:
    file_server.statuses["x.bin"].extend([503, 429, 500])
    fetch(remote(), target, patience)
    assert target.read_bytes() == CONTENT
    assert pauses.seconds == [0.5, 1.0, 2.0]


def test_patience_ends(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    file_server.statuses["x.bin"].extend([503] * 4)
    with pytest.raises(ModelError, match="answered with status 503"):
        fetch(remote(), target, patience)
    assert left(target) == set()


@pytest.mark.parametrize(
    ("status", "complaint"),
    [
        (404, r"x\.bin does not exist \(404\)"),
        (403, r"access denied \(403\); ask for access"),
        (401, r"access denied \(401\); ask for access"),
        (410, "answered with status 410"),
    ],
)
def test_a_final_answer_is_not_questioned(
    remote: Callable[..., RemoteFile],
    target: Path,
    patience: Patience,
    file_server: FileServer,
    pauses: Pauses,
    status: int,
    complaint: str,
) -> None:
    file_server.statuses["x.bin"].append(status)
    with pytest.raises(ModelError, match=complaint):
        fetch(remote(), target, patience)
    assert not pauses.seconds
    assert left(target) == set()


def test_a_server_that_is_not_there_is_explained(target: Path, patience: Patience) -> None:
    remote = RemoteFile(connect_web("http://127.0.0.1:1"), "x.bin", "http://127.0.0.1:1/x.bin", "")
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:1/x\.bin cannot be fetched: .*connection refused"):
        fetch(remote, target, patience)


def test_a_wrong_checksum_leaves_nothing(remote: Callable[..., RemoteFile], target: Path, patience: Patience) -> None:
    with pytest.raises(
        ModelError, match=rf"checksum is wrong: expected sha256 {'0' * 64}, got [0-9a-f]{{64}}; nothing"
    ):
        fetch(remote(sha256="0" * 64), target, patience)
    assert left(target) == set()


def test_a_damaged_part_is_found_out_by_the_checksum_and_fetched_again(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    pinned = remote(sha256=hashlib.sha256(CONTENT).hexdigest())
    arrived = interrupted(pinned, target, file_server)
    with target.with_name("x.bin.part").open("r+b") as file:
        file.write(b"damaged")
    fetch(pinned, target, patience)
    assert file_server.ranges("x.bin") == [f"bytes={arrived}-", None]
    assert target.read_bytes() == CONTENT


def test_git_blob_hashes_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"hello\n")
    digest = "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object of this content
    assert Checksum("git-blob", digest).of(path) == digest


def test_a_complete_file_is_not_fetched_again(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    fetch(remote(), target, patience)
    file_server.requests.clear()
    fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == []
    fetch(remote(is_immutable=True), target, patience)
    assert len(file_server.requests) == 1  # not even looked at


def test_a_file_that_was_complete_but_not_yet_named_is_looked_at_before_it_is_taken(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    fetch(remote(), target, patience)
    target.rename(target.with_name("x.bin.part"))
    file_server.requests.clear()
    fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == []
    target.rename(target.with_name("x.bin.part"))
    file_server.files["x.bin"] = CONTENT[::-1]
    fetch(remote(), target, patience)
    assert target.read_bytes() == CONTENT[::-1]


def test_a_complete_file_that_changed_since_is_fetched_again(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    fetch(remote(), target, patience)
    file_server.files["x.bin"] = CONTENT[::-1]
    fetch(remote(), target, patience)
    assert target.read_bytes() == CONTENT[::-1]


def test_a_server_without_ranges_is_used_from_the_start(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    file_server.has_ranges = False
    assert asyncio.run(look_up(remote(), patience)).size_bytes == len(CONTENT)
    arrived = interrupted(remote(), target, file_server)
    fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == [f"bytes={arrived}-", None]
    assert target.read_bytes() == CONTENT


def test_a_cancelled_fetch_can_be_resumed(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    async def cancel_in_the_middle() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(download(remote(), target, patience=patience, meter=lambda _: started.set()))
        await asyncio.wait_for(started.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_in_the_middle())
    assert not target.exists()
    arrived = target.with_name("x.bin.part").stat().st_size
    assert arrived > 0
    file_server.requests.clear()
    fetch(remote(), target, patience)
    assert file_server.ranges("x.bin") == [f"bytes={arrived}-"]
    assert target.read_bytes() == CONTENT


def test_a_full_disk_is_explained(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    interrupted(remote(), target, file_server)
    part = target.with_name("x.bin.part")
    part.unlink()
    part.symlink_to("/dev/full")
    with pytest.raises(ModelError, match=r"the disk of .* is full; make room"):
        fetch(remote(), target, patience)
    assert not target.exists()


def test_a_file_that_never_stays_the_same_is_given_up(
    remote: Callable[..., RemoteFile], target: Path, patience: Patience, file_server: FileServer
) -> None:
    class Restless(dict[str, str | None]):
        number = 0

        def get(self, key: str, default: str | None = None) -> str | None:  # type: ignore[override]
            self.number += 1
            return f'"{self.number}"'

    file_server.etags = Restless()
    file_server.breaks["x.bin"].extend([BREAK] * 20)
    with pytest.raises(ModelError, match="changed 5 times"):
        fetch(remote(), target, patience)
