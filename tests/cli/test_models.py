"""`shoal models` as it is typed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shared.cli.models import command, table
from shared.errors import ModelError
from shared.models.pull import pull
from shared.models.store import ModelStore
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import make_tiny_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SHOAL_HOME, empty."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def store(home: Path, tmp_path: Path) -> ModelStore:
    """The store at SHOAL_HOME with two models."""
    store = ModelStore(home)
    pull(store, str(write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q8_0")), name="org/tiny")
    pull(store, str(make_tiny_model(tmp_path / "other", "qwen3")))
    return store


def run(*arguments: str) -> Result:
    """The outcome of `shoal models` with these arguments."""
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_an_empty_store_says_how_to_begin(home: Path) -> None:
    result = run()
    assert result.exit_code == 0
    assert "`shoal pull smollm2-135m` fetches a small one" in result.stdout
    assert json.loads(run("--json").stdout) == []


def test_each_model_is_one_line(store: ModelStore, tmp_path: Path) -> None:
    lines = run().stdout.splitlines()
    assert lines[0].split() == ["name", "family", "parameters", "stored", "as", "size", "pulled", "source"]
    assert [line.split()[:2] for line in lines[1:]] == [["org/tiny", "llama"], ["other", "qwen3"]]
    assert "Q8_0" in lines[1]
    assert "F32" in lines[2]
    assert str(tmp_path / "tiny.gguf") in lines[1]
    assert len({line.index(word) for line, word in zip(lines, ("family", "llama", "qwen3"), strict=True)}) == 1


def test_a_narrow_terminal_gets_source_and_date_below_each_model() -> None:
    models = [
        ("org/tiny", "llama", "1.2M", "Q8_0", "1.3 MB", "2026-11-30 13:37", "https://host/a/long/address/tiny.gguf"),
        ("other", "qwen3", "12k", "F32", "48 kB", "2026-11-30 13:38", "/folder"),
    ]
    wide = table(models, None)
    assert [line.split()[0] for line in wide] == ["name", "org/tiny", "other"]
    assert table(models, max(map(len, wide))) == wide
    assert table(models, 60) == [
        "name      family  parameters  stored as  size",
        "org/tiny  llama   1.2M        Q8_0       1.3 MB",
        "  https://host/a/long/address/tiny.gguf, 2026-11-30 13:37",
        "other     qwen3   12k         F32        48 kB",
        "  /folder, 2026-11-30 13:38",
    ]


def test_a_model_whose_manifest_is_broken_is_listed_as_such(store: ModelStore) -> None:
    (store.folder("other") / "shoal.json").write_text("{")
    lines = run().stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "org/tiny", "unreadable:"]
    assert lines[-1].startswith("unreadable: other: ")
    assert lines[-1].endswith("; `shoal models --remove other` deletes it")
    run("--remove", "other")
    assert "unreadable" not in run().stdout


def test_a_file_in_place_of_the_store_is_a_sentence(home: Path) -> None:
    home.write_text("a file")
    for arguments in ([], ["--json"], ["--verify", "m"], ["--remove", "m"]):
        with pytest.raises(ModelError, match=f"{home} is no folder"):
            run(*arguments)


def test_json_holds_the_manifests(store: ModelStore) -> None:
    models = json.loads(run("--json").stdout)
    assert [model["name"] for model in models] == ["org/tiny", "other"]
    assert models[0]["license"] == "cc0-1.0"
    assert {file["path"] for file in models[0]["files"]} >= {"config.json", "model.safetensors"}


def test_verify_tells_sound_from_damaged(store: ModelStore) -> None:
    assert run("--verify", "org/tiny").stdout.startswith("org/tiny is intact: 5 files, ")
    path = store.folder("org/tiny") / "config.json"
    path.write_bytes(path.read_bytes().replace(b"silu", b"gelu"))
    with pytest.raises(ModelError, match=r"content of config\.json has changed"):
        run("--verify", "org/tiny")


def test_remove_deletes_one_model(store: ModelStore) -> None:
    assert run("--remove", "org/tiny").stdout == "org/tiny is removed\n"
    assert [manifest.name for manifest in store.list()] == ["other"]
    with pytest.raises(ModelError, match="no model named org/tiny"):
        run("--remove", "org/tiny")


def test_an_unfinished_pull_is_mentioned(store: ModelStore) -> None:
    assert "unfinished:" not in run().stdout
    folder = store.partial("org/big") / "downloads"
    folder.mkdir(parents=True)
    (folder / "x.gguf.part").write_bytes(bytes(1500))
    assert "unfinished: org/big (1.5 kB so far)" in run().stdout
    run("--remove", "org/big")
    assert "unfinished:" not in run().stdout


def test_one_thing_at_a_time() -> None:
    result = run("--verify", "a", "--remove", "b")
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr
