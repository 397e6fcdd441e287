"""The default model: its numbers against transformers', its memory, and what a person would ask it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.executor.config import ExecutorConfig
from services.executor.factory import load
from services.executor.model_runner import ModelRunner
from services.executor.weights import Weights
from tests.executor.driver import Driver

pytestmark = pytest.mark.model

SETTINGS = ExecutorConfig(dtype="float32", kv_cache_mb=256, max_model_len=512, threads=1)
PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
]
NUM_TOKENS = 24
MAX_RSS_BYTES = 1200 << 20

MEASURE = """
import sys
from pathlib import Path
from services.executor.config import ExecutorConfig
from services.executor.factory import load
load(Path(sys.argv[1]), "default", ExecutorConfig()).warm_up()
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


@pytest.fixture(scope="module")
def runner(default_model: Path) -> ModelRunner:
    return load(default_model, "default", SETTINGS)


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Any:
    """The model in transformers, with the same dequantized weights."""
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(default_model)).eval()
    with Weights(default_model) as weights, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.load({name: tuple(parameter.shape)}))
    return model


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def test_greedy_tokens_are_those_of_transformers(runner: ModelRunner, reference: Any, prompts: list[list[int]]) -> None:
    """All prompts in one batch here, each alone there."""
    runner.reset()
    driver = Driver(runner)
    seats = [driver.seat(prompt) for prompt in prompts]
    driver.run(seats, NUM_TOKENS, chunk=7)
    for seat, prompt in zip(seats, prompts, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([seat.tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert seat.output == logits.argmax(-1).tolist()


def test_it_knows_the_capital_of_france(runner: ModelRunner, prompts: list[list[int]], default_model: Path) -> None:
    from tokenizers import Tokenizer

    runner.reset()
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    assert "Paris" in tokenizer.decode(Driver(runner).generate(prompts[0], 12))


def test_memory_stays_below_what_small_machines_have(default_model: Path) -> None:
    """The most that the process ever has in memory, from its start until it could serve, beside the KV cache."""
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(default_model)], capture_output=True, text=True, check=True
    ).stdout
    assert int(output) < MAX_RSS_BYTES
