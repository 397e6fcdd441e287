"""One model of each kind for the whole run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.tokenizer.encoding import PromptEncoder, load_encoder
from tests.tokenizer.model_folders import MODELS


class Model:
    """A model folder, what the service makes of it, and the library's tokenizer for comparison."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.encoder = load_encoder(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def id_of(self, token: str) -> int:
        """The id of a token that exists."""
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None, token
        return token_id

    def encode(self, text: str) -> list[int]:
        """What the library makes of a text, control tokens included and nothing added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


ModelOf = Callable[[str], Model]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The model of a kind, written when it is first asked for."""
    found: dict[str, Model] = {}

    def model(kind: str) -> Model:
        if kind not in found:
            found[kind] = Model(MODELS[kind](tmp_path_factory.mktemp("model")))
        return found[kind]

    return model


@pytest.fixture
def chatml(model_of: ModelOf) -> Model:
    """A byte-level model without a BOS token."""
    return model_of("chatml")


@pytest.fixture
def encoder(chatml: Model) -> PromptEncoder:
    """The encoder of `chatml`."""
    return chatml.encoder
