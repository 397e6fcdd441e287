"""The store that the processes of these tests serve from."""

from pathlib import Path

from shared.models.store import ModelStore
from tests.chaos.workload import MODEL
from tests.tiny_models import make_tiny_model

SOURCE = "tests/tiny"
"""Where the store says that it is from: who asks for it from there fetches nothing."""


def make_home(folder: Path) -> Path:
    """A store in `folder` with one tiny model."""
    store = ModelStore(folder)
    staging = make_tiny_model(store.partial(MODEL))
    with store.lock(MODEL):
        store.add(MODEL, staging, source=SOURCE)
    return store.home
