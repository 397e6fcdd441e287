"""What the tests of the model store share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.models.fetch.patience import Patience
from shared.models.pull import Terms
from shared.models.store import ModelStore
from tests.models.file_server import FileServer
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import make_tiny_model


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    """A web server without files."""
    server = FileServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """An empty store."""
    return ModelStore(tmp_path / "home")


class Pauses:
    """Takes the place of sleeping between attempts, and counts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """Note the pause and go on at once."""
        self.seconds.append(seconds)


@pytest.fixture
def pauses() -> Pauses:
    """The pauses that a test's transfers make."""
    return Pauses()


@pytest.fixture
def patience(pauses: Pauses) -> Patience:
    """Three failures in a row are borne, without waiting."""
    return Patience(max_failures=3, sleep=pauses.sleep)


@pytest.fixture
def terms(patience: Patience) -> Terms:
    """No printing, no waiting."""
    return Terms(patience=patience)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in Hugging Face's layout, in one file. Read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 3 in Hugging Face's layout, in several files with an index. Read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-qwen3", "qwen3", max_shard_size="100KB")


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a GGUF file, quantized to Q8_0. Read only."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny-llama.Q8_0.gguf", kind="Q8_0")
