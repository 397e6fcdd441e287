"""Where a step's time goes: what is measured, what it is compared with, and how it is printed."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.executor.batch import ForwardBatch
from services.executor.bench import products
from services.executor.bench.__main__ import main
from services.executor.bench.products import TorchProducts, products_of, weight_bytes
from services.executor.bench.reading import PIECE, MemoryReader
from services.executor.bench.report import Benchmark, Measured, as_json, as_lines
from services.executor.bench.steps import Parts, StepMeter, decode, median_step, prefill
from services.executor.factory import load_model
from services.executor.kernels.grouped_linear import record_bytes
from services.executor.kv_cache import Cache, RecordCache
from services.executor.models.integer import IntegerModel
from shared.models.config import load_config
from shared.models.store import ModelStore
from tests.executor.conftest import INTEGER, SMALL, TinyFolder
from tests.tiny_models import VOCAB_SIZE, make_tiny_model, make_tiny_network

FEW = ("--rows", "1", "9", "--contexts", "20", "40", "--chunks", "8", "--repeat", "3")
PARTS = ("products", "attention", "norms", "cache", "sampling", "python")


class Recorder:
    """A model that keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def __call__(self, batch: ForwardBatch, kv_cache: Cache) -> Tensor:
        """Logits of zeros."""
        self.batches.append(batch)
        return torch.zeros(len(batch.logits_rows), VOCAB_SIZE)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The settings of an executor of a store with one tiny model."""
    store = ModelStore(tmp_path_factory.mktemp("home"))
    staging = make_tiny_model(store.partial("tiny"))
    with store.lock("tiny"):
        store.add("tiny", staging, source="a test")
    return {"SHOAL_HOME": str(store.home), "SHOAL_MODEL": "tiny", "SHOAL_EXECUTOR_THREADS": "1"}


def measure(environ: Mapping[str, str], capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*FEW, "--json", *arguments], environ) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def recorded(folder: Path) -> tuple[Recorder, StepMeter]:
    model = Recorder()
    return model, StepMeter(load_model(folder, "tiny", SMALL)._replace(model=model))


def test_every_kind_of_step_is_measured_and_its_parts_make_up_the_whole(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure(environ, capsys, "--dtype", "int8")
    assert {name: found[name] for name in ("model", "weights", "kv_cache", "threads", "repeat")} == {
        "model": "tiny",
        "weights": "int8",
        "kv_cache": "int8",
        "threads": 1,
        "repeat": 3,
    }
    kinds = [(step["kind"], step["rows"], step["tokens"], step["context"]) for step in found["steps"]]
    assert kinds == [
        *(("decode", rows, rows, context) for context in (20, 40) for rows in (1, 9)),
        ("prefill", 1, 8, 8),
    ]
    for step in found["steps"]:
        assert tuple(step["shares"]) == PARTS
        assert all(share >= 0 for share in step["shares"].values())
        assert sum(step["shares"].values()) == pytest.approx(1, abs=1e-3)  # each is rounded to four places
        assert step["products_ms"] == pytest.approx(step["shares"]["products"] * step["step_ms"], rel=0.05, abs=1e-3)
        assert step["floor_ratio"] == pytest.approx(step["floor_ms"] / step["products_ms"], rel=0.1)
        assert ("int_mm_ms" in step) == ("int_mm_ratio" in step) == (step["tokens"] >= 8)


def test_a_format_whose_steps_cannot_be_taken_apart_has_whole_times_alone(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure(environ, capsys, "--dtype", "float32")
    assert (found["weights"], found["weight_bytes"], found["read_gb_per_s"]) == ("float32", None, None)
    assert [set(step) for step in found["steps"]] == [{"kind", "rows", "tokens", "context", "step_ms"}] * 5
    assert all(step["step_ms"] > 0 for step in found["steps"])


def test_settings_of_executors_hold_unless_the_command_line_says_otherwise(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    set_so = {**environ, "SHOAL_EXECUTOR_DTYPE": "int4", "SHOAL_MODEL": "another", "SHOAL_EXECUTOR_THREADS": "7"}
    found = measure(set_so, capsys, "--model", "tiny", "--threads", "1")
    assert (found["weights"], found["threads"]) == ("int4", 1)


def test_the_table_has_a_line_for_each_kind_and_fits_a_screen(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FEW, "--dtype", "int8"], environ) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == ["Loading tiny …", "Measuring 5 kinds of steps …"]
    lines = output.out.splitlines()
    assert lines[0] == "tiny: weights int8, KV cache int8, 1 thread; of 3 steps of each kind, the median"
    assert [line.split("  ")[0] for line in lines[4:9]] == [*["decode at 20"] * 2, *["decode at 40"] * 2, "prefill"]
    assert lines[-1].endswith("shoal bench mesh.")
    assert max(map(len, lines)) <= 120


def test_numbers_of_a_real_size_fit_a_screen_too() -> None:
    parts = Parts(products=2.5, attention=0.25, norms=0.25, cache=0.5, sampling=0.25, python=1.25)
    measured = Measured(decode(1024, 100_000), parts.whole, parts, floor=25.0, int_mm=30.0)
    benchmark = Benchmark("a-model", "stored", "float32", 128, 1000, 10**11, 5e9, [measured])
    lines = list(as_lines(benchmark))
    assert lines[1] == "A step's products read 100 GB of weights. Reading as much takes 20000.00 ms: 5.0 GB/s"
    assert " ".join(lines[4].split()) == (
        "decode at 100000 1024 5000.00 2500.00 10.00 12.00 50.0% 5.0% 5.0% 10.0% 5.0% 25.0%"
    )
    assert max(map(len, lines)) <= 120
    (step,) = as_json(benchmark)["steps"]
    assert (step["step_ms"], step["products_ms"], step["floor_ratio"], step["int_mm_ratio"]) == (5000, 2500, 10, 12)
    assert step["shares"] == dict(zip(PARTS, (0.5, 0.05, 0.05, 0.1, 0.05, 0.25), strict=True))


def test_of_several_steps_the_median_one_is_taken_with_its_own_parts() -> None:
    steps = [Parts(products, 0, 0, 0, 0, python) for products, python in ((3, 9), (8, 1), (1, 1), (2, 8))]
    assert median_step(steps) == steps[1]  # 9 of 2, 9, 10 and 12: the lower of the two in the middle
    assert median_step(steps[1:]) == steps[1]
    assert median_step(steps[:1]) == steps[0]


def test_steps_that_the_model_has_no_room_for_are_left_out_aloud(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    many = ("--rows", "1", "10000000", "--contexts", "20", "2045", "--chunks", "8", "2048", "--repeat", "3")
    assert main([*many, "--dtype", "int8", "--json"], environ) == 0
    output = capsys.readouterr()
    assert [(step["kind"], step["tokens"], step["context"]) for step in json.loads(output.out)["steps"]] == [
        ("decode", 1, 20),
        ("prefill", 8, 8),
    ]
    assert output.err.splitlines()[:3] == [
        "Left out: contexts of 2045; this model has room for 2048 tokens",
        "Left out: chunks of 2048; this model has room for 2048 tokens",
        "Left out: 10000000 rows; a sequence of 24 tokens takes 7.68 kB of KV cache",
    ]
    assert main(["--contexts", "2048", "--chunks", "5000"], environ) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "shoal: there is no room for any of these steps"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rows", "0"], "argument --rows: '0' is not a whole number of at least 1"),
        (["--contexts", "many"], "argument --contexts: 'many' is not a whole number of at least 1"),
        (["--chunks", "64", "1"], "argument --chunks: '1' is not a whole number of at least 2"),
        (["--repeat", "0"], "argument --repeat: '0' is not a whole number of at least 1"),
    ],
)
def test_numbers_that_cannot_be_are_named(
    arguments: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments, {})
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{complaint}\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--dtype", "int3"], "shoal: SHOAL_EXECUTOR_DTYPE='int3': must be one of auto, "),
        (["--threads", "-1"], "shoal: SHOAL_EXECUTOR_THREADS='-1': must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_named(
    arguments: Sequence[str], complaint: str, environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, environ) == 2
    assert capsys.readouterr().err.startswith(complaint)


def test_a_model_that_is_not_there_is_said_in_a_sentence(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "smollm2-135m"], environ) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("shoal: no model named smollm2-135m is in the store")


def test_decode_steps_go_on_where_the_last_one_ended(tiny_folder: TinyFolder) -> None:
    model, meter = recorded(tiny_folder())
    assert len(meter.whole_steps(decode(3, 40), repeat=2)) == 2
    assert [batch.context_lens.tolist() for batch in model.batches] == [[40] * 3, [41] * 3, [42] * 3]
    assert all(len(batch.token_ids) == len(batch.logits_rows) == 3 for batch in model.batches)
    places = {int(slot) for batch in model.batches for slot in batch.slot_mapping}
    assert len(places) == 9, "no two tokens share a place in the cache"


def test_prefill_steps_are_each_a_new_request(tiny_folder: TinyFolder) -> None:
    model, meter = recorded(tiny_folder())
    meter.whole_steps(prefill(17), repeat=2)
    assert [batch.positions.tolist() for batch in model.batches] == [list(range(17))] * 3
    assert [batch.logits_rows.tolist() for batch in model.batches] == [[16]] * 3


def test_the_cache_of_every_sequence_is_filled_with_what_was_computed(tiny_folder: TinyFolder) -> None:
    loaded = load_model(tiny_folder(), "tiny", INTEGER)
    StepMeter(loaded).fill_cache(3, 100)  # more tokens than one step takes, in seven blocks of 16
    assert isinstance(loaded.kv_cache, RecordCache)
    first = loaded.capacity.max_model_len // 16
    for layer in loaded.kv_cache.layers:
        blocks = layer.view(loaded.capacity.num_blocks, -1)
        assert blocks[:7].bool().any(1).all()
        for slot in (1, 2):
            assert torch.equal(blocks[slot * first : slot * first + 7], blocks[:7])


def test_products_are_all_matrices_of_the_network(tiny_folder: TinyFolder) -> None:
    layers, head = products_of(load_config(tiny_folder()))
    sizes = {name: tensor.shape for name, tensor in make_tiny_network().named_parameters() if tensor.dim() == 2}
    parts = [part for product in (*layers, head) for part in product.parts]
    assert sorted(parts) == sorted(sizes)
    for product in (*layers, head):
        assert product.rows == sum(sizes[name][0] for name in product.parts)
        assert {sizes[name][1] for name in product.parts} == {product.columns}
        assert product.in_blocks == ("mlp.down_proj" in product.parts[0])


@pytest.mark.parametrize("weight_format", ["int4", "stored"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_bytes_that_products_read_are_those_that_the_model_packed(
    tiny_folder: TinyFolder, weight_format: Any, is_tied: bool
) -> None:
    folder = tiny_folder(tie_word_embeddings=is_tied)
    loaded = load_model(folder, "tiny", replace(INTEGER, dtype=weight_format))
    assert isinstance(loaded.model, IntegerModel)
    config = loaded.config
    norms = (2 * config.num_layers + 1) * config.hidden_size * 4
    head = VOCAB_SIZE * config.hidden_size // 1024 * record_bytes(4 if weight_format == "int4" else 8)
    read = weight_bytes(folder, config, weight_format)
    assert sum(array.nbytes for array in loaded.model._arrays.values()) == read + norms + (0 if is_tied else head)


def test_weights_with_a_scale_a_row_are_read_in_all_their_bytes(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder()
    loaded = load_model(folder, "tiny", INTEGER)
    assert isinstance(loaded.model, IntegerModel)
    packed = {name: array.nbytes for name, array in loaded.model._arrays.items()}
    assert sum(packed.values()) - packed["embedding"] == weight_bytes(folder, loaded.config, "int8")


def test_weights_that_are_stored_in_four_bits_are_read_in_four_unless_a_part_is_not(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    config = load_config(tiny_folder())
    layers, head = products_of(config)
    kinds = {part: "Q4_1" for product in (*layers, head) for part in product.parts}
    kinds |= {"model.layers.0.self_attn.v_proj.weight": "Q8_0", "model.layers.1.mlp.down_proj.weight": "Q6_K"}
    blocks = {name: {"type": kind, "shape": [1, 1]} for name, kind in kinds.items()}
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"shoal.gguf": json.dumps(blocks)})
    wide = {layers[0], layers[7]}
    expected = sum(
        product.rows * product.columns // 1024 * record_bytes(8 if product in wide else 4)
        for product in (*layers, head)
    )
    assert weight_bytes(tmp_path, config, "stored") == expected
    assert weight_bytes(tmp_path, config, "int8") > expected


@pytest.mark.parametrize("num_threads", [1, 2])
def test_memory_is_read_to_its_end_by_all_threads(num_threads: int) -> None:
    """The reader itself checks that it met every number once."""
    reader = MemoryReader(37 * PIECE * 8 + 5, num_threads)
    assert reader.num_bytes == 37 * PIECE * 8
    with ThreadPoolExecutor(1) as thread:  # which may be tied to a core
        assert 0 < thread.submit(reader.seconds_per_byte).result() < 1e-3
    reader.close()


def test_torch_is_given_the_products_of_the_network(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(tiny_folder())
    asked: list[tuple[int, int, int]] = []
    true_product = torch._int_mm

    def count(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
        asked.append((len(x), *weight.shape))
        return true_product(x, weight, out=out)

    monkeypatch.setattr(torch, "_int_mm", count)
    monkeypatch.setattr(products, "ENOUGH_S", 60.0)
    assert 0 < TorchProducts(config).seconds(9, 2) < 60
    layers, head = products_of(config)
    expected = [*((9, product.columns, product.rows) for product in layers), (2, head.columns, head.rows)]
    assert asked[: len(expected)] == expected
    assert len(asked) % len(expected) == 0


def test_where_torch_takes_long_some_of_the_products_stand_for_all(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, now, per_product = load_config(tiny_folder()), 0.0, 0.7 * products.ENOUGH_S

    def take_long(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
        nonlocal now
        now += per_product
        return out

    monkeypatch.setattr(torch, "_int_mm", take_long)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    layers, head = products_of(config)
    sizes = [*(9 * product.rows * product.columns for product in layers), 2 * head.rows * head.columns]
    found = TorchProducts(config).seconds(9, 2)
    assert now == pytest.approx(4 * per_product)  # two products, with weights lying one way and the other
    assert found == pytest.approx(2 * per_product * sum(sizes) / sum(sizes[:2]))
