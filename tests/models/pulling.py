"""What the tests of `pull` share."""

import threading
from pathlib import Path

from shared.models.progress import Silent
from shared.models.store import ModelStore


class Listener(Silent):
    """Remembers the sentences, and can be waited for."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.has_heard = threading.Event()

    def say(self, sentence: str) -> None:
        """Remember it."""
        self.sentences.append(sentence)
        self.has_heard.set()


def files_of(folder: Path) -> dict[str, bytes]:
    """A folder's content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def long(gguf_file: Path) -> bytes:
    """The file with something behind it, which GGUF allows: long enough to be interrupted."""
    return gguf_file.read_bytes() + bytes(2_000_000)


def assert_nothing_is_left(store: ModelStore) -> None:
    """Of a finished pull only the model stays."""
    assert not any((store.home / "partial").iterdir())
