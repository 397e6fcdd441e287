"""Greedy output of the whole mesh equals transformers', token for token, however the requests are scheduled."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from services.executor.config import ExecutorConfig
from services.executor.weights import Weights
from services.scheduler.config import SchedulerConfig
from tests.integration.in_process import FewBlocks, Streamed, in_process_mesh, load_runner
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = pytest.mark.timeout(600)
"""1,280 tokens one at a time, in float32: minutes where several tests share two slow cores."""

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "1, 2, 3, 4, 5,",
    "La révolution française a commencé en",
    "Der schnelle braune Fuchs springt über",
    "中国的首都是",
    "🙂🙃🙂🙃",
    "import numpy as np\n\nx = np.",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "A list of fruits:\n- apple\n- banana\n-",
    "SELECT name, age FROM users WHERE",
    "The mitochondria is the powerhouse of the cell because",
    "Q: What is 12 times 12?\nA:",
    "To be, or not to be, that is the question:",
    '{"name": "Alice", "age": 30, "city":',
    "Dear Sir or Madam,\n\nI am writing to",
    "The following is a conversation between a doctor and a patient.\nDoctor:",
    "x",
]


@pytest.fixture(scope="module", params=[pytest.param("default", marks=pytest.mark.model), *FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Case":
    """The default model, and a tiny random one of each family."""
    if request.param == "default":
        settings = ExecutorConfig(dtype="float32", max_slots=16, max_model_len=1024)
        return Case(request.getfixturevalue("default_model"), settings)
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param)
    return Case(folder, ExecutorConfig(dtype="float32", max_slots=16, max_model_len=1024, threads=1, kv_cache_mb=64))


class Case:
    """One model, what transformers makes of the prompts, and runners with much and with little memory."""

    def __init__(self, folder: Path, settings: ExecutorConfig) -> None:
        self.folder = folder
        self.settings = settings
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
        self.expected = generate(folder, self.prompts)
        self.runner = load_runner(folder, settings)

    def bodies(self, **more: Any) -> list[dict[str, Any]]:
        return [
            {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}
            for prompt in self.prompts
        ]

    def check(self, streamed: list[Streamed]) -> None:
        found = [stream.token_ids[0] for stream in streamed]
        differing = [PROMPTS[i] for i in range(len(PROMPTS)) if found[i] != self.expected[i]]
        assert not differing
        assert all(len(tokens) == NUM_TOKENS for tokens in found)


def generate(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers in float32, all prompts in one batch, padded on the left."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with Weights(folder) as weights, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.load({name: tuple(parameter.shape)}))
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generation = transformers.GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    model.generation_config = generation  # the model's own would end at its end tokens
    out = model.generate(ids, attention_mask=mask)
    return [row[longest:].tolist() for row in out]


async def test_alone(model: Case) -> None:
    async with in_process_mesh(model.folder, model.runner) as mesh:
        model.check([(await mesh.stream_all([body]))[0] for body in model.bodies()])


async def test_in_a_full_batch(model: Case) -> None:
    async with in_process_mesh(model.folder, model.runner) as mesh:
        model.check(await mesh.stream_all(model.bodies()))
        assert mesh.scheduler.status().num_preemptions == 0


async def test_one_step_at_a_time(model: Case) -> None:
    async with in_process_mesh(model.folder, model.runner, scheduler=SchedulerConfig(pipeline_depth=1)) as mesh:
        model.check(await mesh.stream_all(model.bodies()))


async def test_in_chunks_of_seven_tokens(model: Case) -> None:
    async with in_process_mesh(model.folder, model.runner, scheduler=SchedulerConfig(max_chunk_tokens=7)) as mesh:
        model.check(await mesh.stream_all(model.bodies()))


async def test_after_a_prefix_hit(model: Case) -> None:
    """Each prompt again with its own answer's beginning cached, so that the hit ends inside the output."""
    async with in_process_mesh(model.folder, model.runner) as mesh:
        model.check(await mesh.stream_all(model.bodies()))
        halves = [
            {**body, "prompt": [*body["prompt"], *tokens[:40]], "max_tokens": NUM_TOKENS - 40}
            for body, tokens in zip(model.bodies(), model.expected, strict=True)
        ]
        streamed = await mesh.stream_all(halves)
        for stream, tokens in zip(streamed, model.expected, strict=True):
            assert stream.token_ids[0] == tokens[40:]
            assert stream.end is not None
            assert stream.end["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


async def test_with_so_few_blocks_that_choices_are_preempted(model: Case) -> None:
    async with in_process_mesh(model.folder, FewBlocks(model.runner, 40)) as mesh:
        model.check(await mesh.stream_all(model.bodies()))
        assert mesh.scheduler.status().num_preemptions > 0
