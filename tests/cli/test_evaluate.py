"""`shoal evaluate` as it is typed."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shared.cli.evaluate import command, report
from shared.cli.evaluated_texts import TextReader
from shared.errors import ModelError, OperatorError
from shared.evaluation import Evaluation, FormatScore, TextScore
from shared.models.pull import pull
from shared.models.store import ModelStore
from tests.cli.shoal import environ, shoal
from tests.tiny_models import make_tiny_model

TEXT = "The river runs past the mill and under the bridge.\nGrüße aus Köln!\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one model, and two texts beside it."""
    home = tmp_path_factory.mktemp("home")
    pull(ModelStore(home), str(make_tiny_model(home / "source" / "tiny")), name="tiny")
    (home / "river.txt").write_text(TEXT)
    (home / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    (home / "empty.txt").write_text("")
    return home


@pytest.fixture
def in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store, as this process's own."""
    monkeypatch.setenv("SHOAL_HOME", str(home))
    monkeypatch.chdir(home)
    return home


def evaluate(home: Path, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return shoal("evaluate", *arguments, env=environ(home, SHOAL_EXECUTOR_THREADS="1"), stdin=stdin)


def invoke(*arguments: str) -> Result:
    """A call that fails before anything is computed."""
    return CliRunner().invoke(command, arguments)


def test_texts_are_compared_under_each_format_named(home: Path) -> None:
    result = evaluate(
        home,
        "tiny",
        "--dtype",
        "float32",
        "--text",
        str(home / "river.txt"),
        "--text",
        "-",
        "--context",
        "8",
        stdin=TEXT,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny, windows of 8 tokens"
    assert lines[2].split() == ["text", "tokens", "format", "NLL", "perplexity", "difference", "KL", "top-1"]
    names = [line.split("  ")[0] for line in lines[3:9:2]]
    assert names == [str(home / "river.txt"), "standard input", "all texts"]
    for line in lines[4:9:2]:
        assert line.split()[-5:] == ["+0.0000", "±", "0.0000", "0.00000", "100.00%"]
    assert "loading tiny: weights float32" in result.stderr


def test_json_has_every_figure(home: Path) -> None:
    result = evaluate(
        home, "tiny", "--dtype", "float32", "--text", str(home / "river.txt"), "--max-tokens", "11", "--json"
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert list(found) == ["model", "context", "texts", "total"]
    assert (found["model"], found["context"], found["total"]["num_tokens"]) == ("tiny", 1024, 10)
    assert list(found["total"]) == ["text", "num_tokens", "nll", "perplexity", "formats"]
    assert found["texts"][0]["text"] == str(home / "river.txt")
    (score,) = found["total"]["formats"]
    assert score == {
        "dtype": "float32",
        "weights": "float32",
        "kv_cache": "float32",
        "nll": found["total"]["nll"],
        "perplexity": found["total"]["perplexity"],
        "delta_nll": 0.0,
        "delta_nll_error": 0.0,
        "mean_kl": 0.0,
        "top1_agreement": 1.0,
    }


def test_a_format_that_does_not_exist_is_a_sentence_and_status_2(home: Path) -> None:
    result = evaluate(home, "tiny", "--dtype", "int5", "--text", str(home / "river.txt"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("shoal: SHOAL_EXECUTOR_DTYPE='int5': must be one of ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["other", "--text", "river.txt"], "no model named other is in the store"),
        (["tiny", "--text", "nothing.txt"], "nothing.txt cannot be read: No such file or directory"),
        (["tiny", "--text", "latin1.txt"], "latin1.txt is not UTF-8 text (byte 2 is none of it)"),
        (["tiny", "--text", "empty.txt"], "empty.txt is too short: nothing in it could be predicted"),
        (
            ["tiny", "--text", "river.txt", "--context", "4096"],
            "--context 4096 is more than this model has room for: 2048",
        ),
    ],
    ids=["no such model", "no such file", "not UTF-8", "empty", "too long a window"],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(in_home: Path, arguments: list[str], sentence: str) -> None:
    error = invoke(*arguments).exception
    assert isinstance(error, OperatorError)
    assert sentence in str(error)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tiny"], "name a text to compare on, with --text FILE"),
        (["tiny", "--text", "-", "--text", "-"], "standard input is one text"),
        (["tiny", "--text", "river.txt", "--context", "1"], "not in the range x>=2"),
        (["--text", "river.txt"], "Missing argument 'MODEL'"),
    ],
    ids=["no text", "standard input twice", "no window", "no model"],
)
def test_what_was_typed_wrong_is_explained_with_the_usage(arguments: list[str], sentence: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Usage:" in result.stderr


def reader(folder: Path, **settings: object) -> TextReader:
    """Of a tiny model whose tokenizer_config.json says so too."""
    path = make_tiny_model(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return TextReader(folder)


def test_tokens_are_the_texts_own_and_control_tokens_are_read_as_such(tmp_path: Path) -> None:
    texts = reader(tmp_path)
    (tmp_path / "text").write_bytes("\N{ZERO WIDTH NO-BREAK SPACE}<|im_start|>a\r\n<|im_end|>".encode())
    token_ids = texts.read(str(tmp_path / "text")).token_ids
    assert (token_ids[0], token_ids[-1]) == (1, 2)
    assert len(token_ids) == 5
    assert texts.read(str(tmp_path / "text"), max_tokens=3).token_ids == token_ids[:3]


@pytest.mark.parametrize(
    ("adds_bos", "bos", "expected"),
    [
        (False, "<|endoftext|>", None),
        (True, "<|endoftext|>", 0),
        (True, {"content": "<|im_start|>"}, 1),
        (None, None, None),
    ],
)
def test_the_bos_token_is_the_models(tmp_path: Path, adds_bos: bool | None, bos: object, expected: int | None) -> None:
    assert reader(tmp_path, add_bos_token=adds_bos, bos_token=bos).bos_token_id == expected


def test_after_a_bos_token_a_single_token_can_be_predicted(tmp_path: Path) -> None:
    texts = reader(tmp_path, add_bos_token=True)
    (tmp_path / "text").write_text("a")
    assert len(texts.read(str(tmp_path / "text")).token_ids) == 1


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    reader(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        TextReader(tmp_path)


def test_a_report_names_the_format_behind_what_was_asked_for() -> None:
    score = FormatScore(
        dtype="auto",
        weights="stored",
        kv_cache="int8",
        nll=2.5012,
        perplexity=12.197,
        delta_nll=0.0012,
        delta_nll_error=0.00031,
        mean_kl=0.004567,
        top1_agreement=0.98765,
    )
    text = TextScore(text="a.txt", num_tokens=411, nll=2.5, perplexity=12.182, formats=(score,))
    lines = report(Evaluation(model="m", context=1024, texts=(text,), total=text))
    assert lines[:6] == [
        "m, windows of 1024 tokens",
        "",
        "text   tokens  format                    NLL  perplexity  difference                 KL   top-1",
        "a.txt     411  float32                2.5000       12.18",
        "               auto: stored, KV int8  2.5012       12.20     +0.0012  ± 0.0003  0.00457  98.77%",
        "",
    ]
