"""Packed weights kept on disk: found again, made again when they no longer fit, never half there."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from services.executor.factory import load_model
from services.executor.packed import Array, PackedWeights
from shared.errors import ModelError
from tests.executor.conftest import INTEGER, TinyFolder
from tests.executor.models.test_integer import LONG, logits
from tests.tiny_models import make_tiny_model

NEVER_FITS = 1 << 60


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> PackedWeights:
    return PackedWeights(model, "stored", tmp_path / "cache")


def arrays(start: int = 0) -> Callable[[], Iterator[tuple[str, Array]]]:
    def make() -> Iterator[tuple[str, Array]]:
        yield "embedding", np.arange(start, start + 120, dtype=np.uint8).reshape(2, 3, 20)
        yield "layers.0.qkv.bias", np.arange(start, start + 7, dtype=np.float32)

    return make


def folders(model: Path) -> list[Path]:
    """What is kept, or being written, beside a model."""
    return sorted(path for path in (model / "packed").iterdir() if path.is_dir())


def assert_are(found: dict[str, Array] | object, start: int = 0) -> None:
    expected = dict(arrays(start)())
    assert isinstance(found, dict)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
        assert found[name].ctypes.data % 64 == 0, "kernels read whole cache lines"


def assert_nothing_is_left(model: Path, tmp_path: Path) -> None:
    left = [path for place in (model, tmp_path / "cache") for path in place.rglob("packed/**/*") if path.is_file()]
    assert {path.name for path in left} <= {"lock"}


def test_what_was_kept_is_found_and_mapped(kept: PackedWeights, model: Path) -> None:
    assert kept.find() is None
    assert_are(kept.keep(arrays(), 1000))
    found = kept.find()
    assert_are(found)
    assert found is not None
    assert all(isinstance(array, np.memmap) for array in found.values())
    assert len(folders(model)) == 1


def test_whoever_may_read_the_place_may_read_what_is_kept(kept: PackedWeights, model: Path) -> None:
    """A store may be written by one user and read by containers that run as another."""
    (model / "packed").mkdir(mode=0o755)
    kept.keep(arrays(), 1000)
    (folder,) = folders(model)
    assert folder.stat().st_mode & 0o777 == (model / "packed").stat().st_mode & 0o777
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())


def test_a_second_start_does_not_read_the_weights_and_computes_the_same_bits(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("qwen3", tie_word_embeddings=False)
    first = logits(load_model(folder, "tiny", INTEGER), LONG)
    weights = folder / "model.safetensors"
    facts, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(bytes(len(content)))
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    try:
        assert torch.equal(logits(load_model(folder, "tiny", INTEGER), LONG), first)
    finally:
        weights.write_bytes(content)


def test_executors_that_start_at_once_all_have_the_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    with ThreadPoolExecutor(3) as threads:
        loaded = list(threads.map(lambda _: load_model(folder, "tiny", INTEGER), range(3)))
    first, *others = [logits(each, LONG) for each in loaded]
    assert all(torch.equal(other, first) for other in others)
    assert len(folders(folder)) == 1


def test_other_weights_are_packed_anew(kept: PackedWeights, model: Path, tmp_path: Path) -> None:
    kept.keep(arrays(), 1000)
    (model / "model.safetensors").write_bytes(b"other weights")
    again = PackedWeights(model, "stored", tmp_path / "cache")
    assert again.find() is None
    assert_are(again.keep(arrays(100), 1000), 100)
    assert len(folders(model)) == 2, "executors of the other version may still start"


def test_what_nobody_started_with_for_a_day_is_removed(kept: PackedWeights, model: Path, tmp_path: Path) -> None:
    kept.keep(arrays(), 1000)
    (old,) = folders(model)
    os.utime(old, (0, 0))
    kept.find()
    assert old.stat().st_mtime > 0, "it was used just now"
    os.utime(old, (0, 0))
    (model / "model.safetensors").write_bytes(b"other weights")
    PackedWeights(model, "stored", tmp_path / "cache").keep(arrays(), 1000)
    assert old not in folders(model)
    assert len(folders(model)) == 1


def test_another_configuration_is_another_model(kept: PackedWeights, model: Path, tmp_path: Path) -> None:
    kept.keep(arrays(), 1000)
    (model / "config.json").write_text('{"tie_word_embeddings": false}')
    assert PackedWeights(model, "stored", tmp_path / "cache").find() is None


def test_formats_are_kept_beside_each_other(kept: PackedWeights, model: Path, tmp_path: Path) -> None:
    kept.keep(arrays(), 1000)
    other = PackedWeights(model, "int8", tmp_path / "cache")
    assert other.find() is None
    other.keep(arrays(50), 1000)
    assert_are(kept.find())
    assert_are(other.find(), 50)


@pytest.mark.parametrize("damaged", ["arrays.bin", "index.json"])
@pytest.mark.parametrize("size", [0, 40, 140, None])
def test_a_damaged_folder_is_made_again(kept: PackedWeights, model: Path, damaged: str, size: int | None) -> None:
    kept.keep(arrays(), 1000)
    file = next((model / "packed").glob(f"*/{damaged}"))
    if size is None:
        file.unlink()
    else:
        assert file.stat().st_size > size or damaged == "index.json"
        os.truncate(file, min(size, file.stat().st_size - 1))
    assert kept.find() is None
    assert_are(kept.keep(arrays(), 1000))
    assert_are(kept.find())


def test_what_this_process_cannot_open_is_left_to_others(
    kept: PackedWeights, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    kept.keep(arrays(), 1000)
    with monkeypatch.context() as patched:
        patched.setattr(np, "memmap", fail)
        assert kept.find() is None
    assert_are(kept.find())


def test_nothing_is_kept_of_weights_that_turn_out_to_be_wrong(kept: PackedWeights, model: Path) -> None:
    def make() -> Iterator[tuple[str, Array]]:
        yield from arrays()()
        raise ModelError("model.norm.weight is missing")

    with pytest.raises(ModelError, match="is missing"):
        kept.keep(make, 1000)
    assert folders(model) == []
    assert kept.find() is None


def test_a_model_folder_that_cannot_be_written_leaves_them_in_the_cache(
    kept: PackedWeights, model: Path, tmp_path: Path
) -> None:
    (model / "packed").write_bytes(b"not a folder")
    kept.keep(arrays(), 1000)
    assert_are(kept.find())
    assert len(list((tmp_path / "cache" / "packed").glob("tiny-*/stored-*"))) == 1


def test_models_in_one_cache_do_not_remove_each_other(tmp_path: Path) -> None:
    both = []
    for home in ("a", "b"):
        folder = tmp_path / home / "tiny"
        folder.mkdir(parents=True)
        (folder / "packed").write_bytes(b"not a folder")
        both.append(PackedWeights(folder, "stored", tmp_path / "cache"))
        both[-1].keep(arrays(len(both)), 1000)
    for number, kept in enumerate(both, 1):
        assert_are(kept.find(), number)


def test_without_room_on_any_disk_they_are_in_memory(kept: PackedWeights, model: Path, tmp_path: Path) -> None:
    found = kept.keep(arrays(), NEVER_FITS)
    assert_are(found)
    assert not any(isinstance(array, np.memmap) for array in found.values())
    assert_nothing_is_left(model, tmp_path)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(
    kept: PackedWeights, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert_are(kept.keep(arrays(), 1000))
    assert_nothing_is_left(model, tmp_path)


def test_of_executors_that_start_at_once_one_packs(kept: PackedWeights, model: Path, tmp_path: Path) -> None:
    others: list[Future[object]] = []

    def make() -> Iterator[tuple[str, Array]]:
        assert not others, "somebody packs already"
        others.extend(threads.submit(another.keep, make, 1000) for another in (kept, elsewhere))
        yield from arrays()()

    elsewhere = PackedWeights(model, "stored", tmp_path / "cache")
    with ThreadPoolExecutor(2) as threads:
        assert_are(kept.keep(make, 1000))
        for other in others:
            assert_are(other.result(10))
    assert len(folders(model)) == 1


def test_what_a_dead_process_left_is_removed(kept: PackedWeights, model: Path) -> None:
    left = model / "packed" / "making-left"
    left.mkdir(parents=True)
    (left / "arrays.bin").write_bytes(b"half")
    kept.keep(arrays(), 1000)
    assert not left.exists()
