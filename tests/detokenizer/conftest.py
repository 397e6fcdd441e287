"""One tokenizer of each kind for the whole run."""

from collections.abc import Callable

import pytest

from tests.detokenizer.bench import Bench
from tests.detokenizer.vocabularies import Case, build


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The tokenizer of a kind, built when it is first asked for."""
    cases: dict[str, Case] = {}

    def case(kind: str) -> Case:
        if kind not in cases:
            cases[kind] = build(kind, tmp_path_factory.mktemp("model"))
        return cases[kind]

    return case


@pytest.fixture
def bench(case_of: Callable[[str], Case]) -> Bench:
    """Open requests of a model whose tokenizer works on bytes."""
    return Bench(case_of("byte level"))
