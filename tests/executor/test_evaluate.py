"""What formats cost: windows and measures against transformers' own losses, and the process around them."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.executor.batch import ForwardBatch
from services.executor.config import ExecutorConfig
from services.executor.evaluate.__main__ import Lines, evaluate
from services.executor.evaluate.scoring import CHUNK, Format, compare, sum_up, sum_up_all, windows
from services.executor.factory import LoadedModel, load_model
from services.executor.kernels.cached_attention import Kind
from services.executor.kv_cache import Cache
from shared.errors import ConfigError, ModelError
from shared.evaluation import Evaluation, EvaluationOrder, TokenizedText
from tests.executor.conftest import TinyFolder
from tests.tiny_models import VOCAB_SIZE, make_tiny_network

CONTEXT = 160
SETTINGS = ExecutorConfig(
    dtype="float32",
    kv_cache_mb=4,
    block_size=16,
    max_slots=CHUNK,
    max_step_tokens=CHUNK,
    max_model_len=CONTEXT,
    threads=1,
)
TOLERANCE = 1e-4
"""Of a mean of float32 logits' losses near 13 that were added up in another order."""
THREADS = {"SHOAL_EXECUTOR_THREADS": "1"}
TEXTS = sorted((Path(__file__).parents[1] / "texts").glob("*.txt"))
MAX_RISE_NATS = 0.008
"""Of the default model's mean loss. A simulation in torch gave 0.002 to 0.006 for rotations of the same kind; the
standard error over these texts is 0.003."""
MAX_KL_NATS = 0.011
"""Of the default model's distributions, the cache in integers too. The simulation gave 0.008 to 0.009."""


class Silent:
    """Counts what is done, and prints nothing."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.num_positions = 0

    def say(self, sentence: str) -> None:
        """Keep the sentence."""
        self.sentences.append(sentence)

    def advance(self, num_positions: int) -> None:
        """Count."""
        self.num_positions += num_positions


class Noisy:
    """A model whose logits are off by noise that depends on the position alone."""

    def __init__(self, loaded: LoadedModel, size: float) -> None:
        self._model = loaded.model
        self._noise = size * torch.randn(CONTEXT, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))

    def __call__(self, batch: ForwardBatch, kv_cache: Cache) -> Tensor:
        """Logits as of the true model, and noise."""
        return self._model(batch, kv_cache) + self._noise[batch.positions[batch.logits_rows]]


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        """It is."""
        return True


@pytest.fixture(scope="module")
def tiny(tiny_folder: TinyFolder) -> LoadedModel:
    return load_model(tiny_folder(), "tiny", SETTINGS)


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def float32(loaded: LoadedModel) -> Format:
    return Format("float32", "float32", "float32", loaded)


def noisy(loaded: LoadedModel, size: float = 0.5) -> Format:
    return Format("noisy", "noisy", "float32", loaded._replace(model=Noisy(loaded, size)))


def reference_nll(inputs: list[int], targets: list[int]) -> float:
    """The mean loss of one window in transformers."""
    with torch.no_grad():
        logits = make_tiny_network()(torch.tensor([inputs])).logits[0]
    return float(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(targets)))


def order(folder: Path, *dtypes: str, **fields: Any) -> EvaluationOrder:
    texts = (TokenizedText("a", tuple(random_tokens(80))), TokenizedText("b", tuple(random_tokens(30, seed=4))))
    defaults = {"kv_dtype": None, "context": 64, "bos_token_id": None, "texts": texts}
    return EvaluationOrder(model="tiny", folder=str(folder), dtypes=dtypes, **defaults | fields)


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12), st.sampled_from([None, 7]))
def test_every_token_is_predicted_once_by_a_window_no_longer_than_the_context(
    token_ids: list[int], context: int, bos_token_id: int | None
) -> None:
    cut = windows(token_ids, context=context, bos_token_id=bos_token_id)
    predicted = [token_id for window in cut for token_id in window.targets]
    assert predicted == (token_ids[1:] if bos_token_id is None else token_ids)
    assert all(1 <= len(window.targets) <= context for window in cut)
    first = token_ids[: len(predicted) : context]
    assert [window.first for window in cut] == (first if bos_token_id is None else [bos_token_id] * len(cut))


def test_the_loss_of_a_text_is_that_of_transformers(tiny: LoadedModel) -> None:
    """More than two chunks in one window."""
    tokens = random_tokens(2 * CHUNK + 18)
    cut = windows(tokens, context=CONTEXT, bos_token_id=None)
    score = sum_up("text", [float32(tiny)], compare(tiny, [float32(tiny)], cut, lambda _: None))
    assert score.num_tokens == len(tokens) - 1
    assert score.nll == pytest.approx(reference_nll(tokens[:-1], tokens[1:]), abs=TOLERANCE)
    assert score.perplexity == pytest.approx(torch.tensor(score.nll).exp().item(), rel=1e-6)


def test_windows_are_read_each_from_its_own_beginning(tiny: LoadedModel) -> None:
    tokens = random_tokens(25)
    cut = windows(tokens, context=10, bos_token_id=None)
    (found,) = compare(tiny, [float32(tiny)], cut, lambda _: None)
    for start, end in ((0, 10), (10, 20), (20, 24)):
        expected = reference_nll(tokens[start:end], tokens[start + 1 : end + 1])
        assert float(found.nll[start:end].mean()) == pytest.approx(expected, abs=TOLERANCE)


def test_windows_of_a_model_with_a_bos_token_begin_with_it(tiny: LoadedModel) -> None:
    tokens = random_tokens(15)
    (found,) = compare(tiny, [float32(tiny)], windows(tokens, context=10, bos_token_id=0), lambda _: None)
    for start, end in ((0, 10), (10, 15)):
        expected = reference_nll([0, *tokens[start : end - 1]], tokens[start:end])
        assert float(found.nll[start:end].mean()) == pytest.approx(expected, abs=TOLERANCE)


def test_a_format_that_changes_nothing_costs_exactly_nothing(tiny_folder: TinyFolder, tiny: LoadedModel) -> None:
    again = load_model(tiny_folder(), "tiny", SETTINGS)
    cut = windows(random_tokens(100), context=CONTEXT, bos_token_id=None)
    (score,) = sum_up("text", [float32(again)], compare(tiny, [float32(again)], cut, lambda _: None)).formats
    assert (score.delta_nll, score.delta_nll_error, score.mean_kl, score.top1_agreement) == (0, 0, 0, 1)


def test_the_measures_of_a_noisy_model_are_what_their_definitions_give(tiny: LoadedModel) -> None:
    tokens = random_tokens(100)
    formats = [noisy(tiny), noisy(tiny, 2.0)]
    found = compare(tiny, formats, windows(tokens, context=CONTEXT, bos_token_id=None), lambda _: None)
    total = sum_up("text", formats, found)
    with torch.no_grad():
        exact = make_tiny_network()(torch.tensor([tokens[:-1]])).logits[0].double()
    for score, size in zip(total.formats, (0.5, 2.0), strict=True):
        generator = torch.Generator().manual_seed(1)
        off = exact + size * torch.randn(CONTEXT, VOCAB_SIZE, generator=generator)[: len(exact)]
        p, q = exact.log_softmax(-1), off.log_softmax(-1)
        kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
        losses = [torch.nn.functional.nll_loss(each, torch.tensor(tokens[1:]), reduction="none") for each in (p, q)]
        assert score.mean_kl == pytest.approx(float(kl), abs=TOLERANCE)
        assert score.mean_kl > 0.01
        assert score.delta_nll == pytest.approx(float((losses[1] - losses[0]).mean()), abs=TOLERANCE)
        assert score.delta_nll == pytest.approx(score.nll - total.nll)
        assert score.delta_nll_error == pytest.approx(float((losses[1] - losses[0]).std()) / 99**0.5, rel=1e-3)
        same = float((exact.argmax(-1) == off.argmax(-1)).double().mean())
        assert score.top1_agreement == pytest.approx(same)
        assert 0 < same < 1


def test_the_total_is_over_all_tokens_so_long_texts_count_for_more(tiny: LoadedModel) -> None:
    formats = [noisy(tiny)]
    found = [
        compare(tiny, formats, windows(random_tokens(count), context=CONTEXT, bos_token_id=None), lambda _: None)
        for count in (11, 91)
    ]
    texts = [sum_up("text", formats, each) for each in found]
    total = sum_up_all(formats, found)
    assert [text.num_tokens for text in (*texts, total)] == [10, 90, 100]
    assert total.nll == pytest.approx((texts[0].nll + 9 * texts[1].nll) / 10)
    kls = [text.formats[0].mean_kl for text in (*texts, total)]
    assert kls[2] == pytest.approx((kls[0] + 9 * kls[1]) / 10)


def test_logits_that_are_not_numbers_are_told_with_the_format(tiny: LoadedModel) -> None:
    cut = windows(random_tokens(5), context=CONTEXT, bos_token_id=None)
    with pytest.raises(ModelError, match="the logits of tiny in noisy are not numbers"):
        compare(tiny, [noisy(tiny, float("nan"))], cut, lambda _: None)


def test_an_evaluation_has_each_format_on_each_text(tiny_folder: TinyFolder) -> None:
    progress = Silent()
    found = evaluate(order(tiny_folder(), "int8", "float32"), THREADS, progress)
    assert [text.text for text in (*found.texts, found.total)] == ["a", "b", "all texts"]
    assert [text.num_tokens for text in (*found.texts, found.total)] == [79, 29, 108]
    assert progress.num_positions == 108
    assert len(progress.sentences) == 3
    for text in (*found.texts, found.total):
        int8, same = text.formats
        assert (int8.dtype, int8.weights, int8.kv_cache) == ("int8", "int8", "int8")
        assert 0 < int8.mean_kl < 0.5  # the tiny model's logits are far apart, so that its rounding shows
        assert 0.7 < int8.top1_agreement <= 1
        assert (same.dtype, same.kv_cache, same.mean_kl, same.delta_nll) == ("float32", "float32", 0, 0)


def test_the_format_of_the_cache_can_be_named(tiny_folder: TinyFolder) -> None:
    coarse, fine = (
        evaluate(order(tiny_folder(), "int8", kv_dtype=kind), THREADS, Silent()).total.formats[0]
        for kind in ("int8", "float32")
    )
    assert (coarse.kv_cache, fine.kv_cache) == ("int8", "float32")
    assert coarse.nll != fine.nll


def test_without_a_format_it_is_the_environments(tiny_folder: TinyFolder) -> None:
    environ = THREADS | {"SHOAL_EXECUTOR_DTYPE": "float32", "SHOAL_EXECUTOR_MAX_MODEL_LEN": "8"}
    found = evaluate(order(tiny_folder()), environ, Silent())
    assert [score.dtype for score in found.total.formats] == ["float32"]


def test_what_cannot_be_is_said_before_anything_is_loaded(tiny_folder: TinyFolder) -> None:
    progress = Silent()
    with pytest.raises(ConfigError, match=r"DTYPE='int5': must be one of .*int8"):
        evaluate(order(tiny_folder(), "float32", "int5"), THREADS, progress)
    odd = tiny_folder(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8)
    with pytest.raises(ConfigError, match="hidden_size is 72"):
        evaluate(order(odd, "int8"), THREADS, progress)
    assert progress.sentences == []


def run(order: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "services.executor.evaluate"]
    return subprocess.run(command, input=order, capture_output=True, check=False)


def test_the_process_takes_an_order_and_gives_json(tiny_folder: TinyFolder) -> None:
    done = run(msgspec.json.encode(order(tiny_folder(), "float32")))
    assert done.returncode == 0, done.stderr.decode()
    assert msgspec.json.decode(done.stdout, type=Evaluation).total.formats[0].mean_kl == 0
    assert b"loading tiny: weights float32" in done.stderr


@pytest.mark.parametrize("is_order", [True, False], ids=["no model there", "no order"])
def test_an_order_that_cannot_be_carried_out_is_a_sentence_and_status_2(tmp_path: Path, is_order: bool) -> None:
    done = run(msgspec.json.encode(order(tmp_path, "float32")) if is_order else b"hello")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"shoal: ")
    assert done.stderr.count(b"\n") == 1


def test_progress_on_a_terminal_is_one_line_that_ends_with_all_tokens() -> None:
    stream = Terminal()
    progress = Lines(stream, 100)
    progress.advance(60)
    progress.advance(40)
    assert stream.getvalue() == "\r100 of 100 tokens\n"


@pytest.mark.model
@pytest.mark.timeout(600)  # compiles what is new, and computes 1,600 tokens in float32
@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_what_the_executor_chooses_costs_the_default_model_next_to_nothing(cache: Kind, default_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    texts = [TokenizedText(path.stem, tuple(tokenizer.encode(path.read_text()).ids)) for path in TEXTS]
    assert len(texts) == 4
    asked = EvaluationOrder(
        model="default",
        folder=str(default_model),
        dtypes=("auto",),
        kv_dtype=cache,
        context=1024,
        bos_token_id=None,
        texts=tuple(texts),
    )
    (score,) = evaluate(asked, {}, Silent()).total.formats
    assert score.delta_nll <= MAX_RISE_NATS
    assert score.mean_kl <= MAX_KL_NATS
    assert score.top1_agreement >= 0.92
