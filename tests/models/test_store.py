"""The store: complete models or none."""

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
import pytest

from shared.errors import ModelError
from shared.models.manifest import FILE_NAME, read_manifest
from shared.models.store import ModelStore


@pytest.fixture
def stage(store: ModelStore, model_folder: Path) -> Callable[..., Path]:
    """Makes a finished folder, ready to be added."""

    def make(name: str = "m", number: int = 0) -> Path:
        staging = store.partial(name) / "model"
        shutil.copytree(model_folder, staging)
        (staging / "generation_config.json").write_text(f'{{"eos_token_id": {number}}}')
        return staging

    return make


def test_an_added_model_is_found_with_its_manifest(store: ModelStore, stage: Callable[..., Path]) -> None:
    staging = stage("org/m")
    with store.lock("org/m"):
        added = store.add("org/m", staging, source="here", license_name="mit")
    assert not staging.exists()
    folder = store.folder("org/m")
    assert folder == store.home / "models" / "org--m"
    found = store.manifest("org/m")
    assert found == added == read_manifest(folder)
    assert (found.name, found.source, found.license, found.family) == ("org/m", "here", "mit", "llama")
    assert found.quantization == {"F32": found.num_parameters}
    assert found.main_type == "F32"
    assert {file.path for file in found.files} == {path.name for path in folder.iterdir()} - {FILE_NAME}
    assert found.size_bytes == sum(path.stat().st_size for path in folder.iterdir() if path.name != FILE_NAME)
    assert found.pulled_at.utcoffset() is not None


def test_the_home_folder_may_start_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ModelStore(Path("~/.shoal")).home == tmp_path / ".shoal"


def test_looking_creates_nothing(store: ModelStore) -> None:
    assert not store.list()
    assert not store.has("m")
    with pytest.raises(ModelError):
        store.folder("m")
    assert not store.home.exists()


def test_an_absent_model_is_named_with_the_way_to_get_it(store: ModelStore, stage: Callable[..., Path]) -> None:
    where = rf"is in the store {store.home}/models"
    with pytest.raises(
        ModelError, match=rf"no model named org/m {where} \(it is empty\); get it with `shoal pull org/m`"
    ):
        store.folder("org/m")
    store.add("other", stage("other"), source="x")
    with pytest.raises(ModelError, match=rf"{where} \(it has other\); get it with `shoal pull smollm2-135m`"):
        store.folder("smollm2-135m")


def test_a_name_that_nothing_can_be_pulled_by_is_not_offered_for_it(store: ModelStore) -> None:
    with pytest.raises(ModelError, match=r"no model named nope .*; `shoal pull SOURCE` gets others$"):
        store.folder("nope")


def test_a_name_cannot_lead_out_of_the_store(store: ModelStore) -> None:
    for look in (store.folder, store.has, store.verify, store.remove, store.partial):
        with pytest.raises(ModelError, match="cannot name a model"):
            look("../../etc")


def test_a_folder_that_is_no_model_is_not_added(store: ModelStore, stage: Callable[..., Path]) -> None:
    staging = stage()
    path = staging / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cut short"):
        store.add("m", staging, source="x")
    assert not store.has("m")


def test_a_missing_or_shrunk_file_is_noticed_at_once(store: ModelStore, stage: Callable[..., Path]) -> None:
    store.add("m", stage(), source="/there")
    path = store.folder("m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model m is damaged: .*bytes instead of.* --force /there --name m"):
        store.folder("m")
    path.unlink()
    with pytest.raises(ModelError, match="is missing"):
        store.folder("m")
    assert store.has("m")


def test_a_folder_without_a_manifest_is_no_model(store: ModelStore, model_folder: Path) -> None:
    shutil.copytree(model_folder, store.home / "models" / "m")
    with pytest.raises(ModelError, match=r"shoal\.json is missing"):
        store.folder("m")
    assert not store.list()


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 1}', "\xff"])
def test_a_broken_manifest_is_reported(store: ModelStore, stage: Callable[..., Path], text: str) -> None:
    store.add("m", stage(), source="x")
    (store.folder("m") / FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match="not a model's manifest"):
        store.folder("m")
    assert not store.list()


def test_a_manifest_of_a_newer_format_is_not_guessed_at(store: ModelStore, stage: Callable[..., Path]) -> None:
    store.add("m", stage(), source="x")
    (store.folder("m") / FILE_NAME).write_text('{"format_version": 2, "all": "else differs"}')
    with pytest.raises(ModelError, match="newer Shoal"):
        store.folder("m")


def test_verify_notices_a_changed_byte(store: ModelStore, stage: Callable[..., Path]) -> None:
    store.add("m", stage(), source="x")
    store.verify("m")
    path = store.folder("m") / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    store.folder("m")  # the cheap check cannot see it
    with pytest.raises(ModelError, match=r"content of model\.safetensors has changed"):
        store.verify("m")


def test_models_are_listed_by_name(store: ModelStore, stage: Callable[..., Path]) -> None:
    for name in ("b", "org/a", "A"):
        store.add(name, stage(name), source="x")
    (store.home / "models" / "stray.txt").write_text("not a folder")
    assert [manifest.name for manifest in store.list()] == ["A", "b", "org/a"]


def test_a_removed_model_is_gone(store: ModelStore, stage: Callable[..., Path]) -> None:
    store.add("m", stage(), source="x")
    store.remove("m")
    assert not store.has("m")
    assert not store.partial("m").exists()
    with pytest.raises(ModelError, match="no model named m"):
        store.remove("m")


def test_what_an_unfinished_pull_left_is_shown_and_can_be_removed(store: ModelStore) -> None:
    assert not store.unfinished()
    (store.partial("org/m") / "downloads").mkdir(parents=True)
    (store.partial("org/m") / "source").write_text("org/m")
    assert not store.unfinished()  # nothing that a pull could go on with
    (store.partial("org/m") / "downloads" / "x.part").write_bytes(b"12345")
    assert store.unfinished() == {"org/m": 5}
    store.remove("org/m")
    assert not store.unfinished()


def test_a_file_in_place_of_the_store_is_named(store: ModelStore) -> None:
    store.home.write_text("a file")
    for use in (store.list, lambda: store.folder("m"), lambda: store.remove("m")):
        with pytest.raises(ModelError, match=f"{store.home} is no folder; choose another place for models"):
            use()
    with pytest.raises(ModelError, match=f"{store.home}/locks cannot be used: Not a directory"), store.lock("m"):
        pass


def test_a_store_that_may_not_be_read_or_written_is_named_with_what_to_do(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    for method in ("is_dir", "mkdir"):
        monkeypatch.setattr(Path, method, refuse)
    advice = "; choose another folder for models with SHOAL_HOME"
    for use in (store.list, store.unfinished, lambda: store.has("m"), lambda: store.folder("m")):
        with pytest.raises(ModelError, match=f"{store.home}.* cannot be used: Permission denied{advice}"):
            use()
    with pytest.raises(ModelError, match=f"locks cannot be used: Permission denied{advice}"), store.lock("m"):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{", b'{"format_version": 1}'])
def test_a_model_whose_manifest_cannot_be_read_is_told_of(
    store: ModelStore, stage: Callable[..., Path], content: bytes
) -> None:
    store.add("m", stage(), source="x")
    (store.folder("m") / "shoal.json").write_bytes(content)
    assert not store.list()
    assert list(store.unreadable()) == ["m"]
    assert "shoal.json is not a model's manifest" in store.unreadable()["m"]
    with pytest.raises(ModelError, match=r"m is damaged: .* again with `shoal pull --force SOURCE --name m`"):
        store.folder("m")


def test_a_manifest_that_names_no_types_can_be_shown(store: ModelStore, stage: Callable[..., Path]) -> None:
    manifest = store.add("m", stage(), source="x")
    assert msgspec.structs.replace(manifest, quantization={}).main_type == "unknown"


def test_a_damaged_model_can_be_removed(store: ModelStore) -> None:
    (store.home / "models" / "m").mkdir(parents=True)
    store.remove("m")
    assert not store.has("m")


def test_adding_replaces_what_was_there(store: ModelStore, stage: Callable[..., Path]) -> None:
    store.add("m", stage(number=1), source="old")
    store.add("m", stage(number=2), source="new")
    assert store.manifest("m").source == "new"
    assert "2" in (store.folder("m") / "generation_config.json").read_text()
    assert not list(store.partial("m").iterdir())


def test_a_reader_keeps_the_model_that_it_opened(store: ModelStore, stage: Callable[..., Path]) -> None:
    store.add("m", stage(number=1), source="old")
    with (store.folder("m") / "generation_config.json").open() as file:
        store.add("m", stage(number=2), source="new")
        assert "1" in file.read()


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(
    store: ModelStore, stage: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("m", stage(number=1), source="old")
    staging = stage(number=2)
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self == staging:
            raise SystemExit
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(SystemExit), store.lock("m"):
        store.add("m", staging, source="new")
    assert not store.has("m")
    monkeypatch.undo()
    with store.lock("m"):
        assert store.manifest("m").source == "old"


def _hold(home: Path, has_it: Event, let_go: Event) -> None:
    with ModelStore(home).lock("m"):
        has_it.set()
        let_go.wait(30)


def test_only_one_process_holds_the_lock_of_a_model(store: ModelStore) -> None:
    context = multiprocessing.get_context("spawn")
    has_it, let_go = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(store.home, has_it, let_go))
    other.start()
    assert has_it.wait(30)
    with store.lock("another"):
        pass
    events = []

    def on_wait() -> None:
        events.append("waits")
        assert other.is_alive()
        let_go.set()

    with store.lock("m", on_wait):
        events.append("has it")
    other.join(30)
    assert events == ["waits", "has it"]
    assert other.exitcode == 0


def test_services_load_the_store_without_what_only_a_pull_needs() -> None:
    code = (
        "import sys, shared.models.store, shared.models.config;"
        "print([m for m in ('obstore', 'huggingface_hub', 'gguf', 'numpy', 'tokenizers', 'rich', 'torch') "
        "if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert result.stdout.strip() == "[]"
