"""The store that the processes of these tests serve from."""

from pathlib import Path

from shared.models.store import ModelStore
from tests.chaos.workload import MODEL
from tests.tiny_models import make_tiny_model


def make_home(folder: Path) -> Path:
    """A store in `folder` with one tiny model."""
    store = ModelStore(folder)
    staging = make_tiny_model(store.partial(MODEL))
    with store.lock(MODEL):
        store.add(MODEL, staging, source="a test")
    return store.home
