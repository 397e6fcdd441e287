"""Logits and greedy tokens against Hugging Face's own implementation of each family."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.executor.batch import ForwardBatch
from services.executor.kv_cache import KVCache
from tests.executor.conftest import MakeDriver, TinyFolder
from tests.tiny_models import VOCAB_SIZE

ROPE_KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "yarn with its own sharpness": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, own output matrix": ("llama", {"tie_word_embeddings": False}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, every head its own keys": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head for all": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, 9 heads on 3 as in SmolLM2": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    ),
    **{f"llama, {kind} rope": ("llama", {"rope_parameters": rope}) for kind, rope in ROPE_KINDS.items()},
    "qwen2": ("qwen2", {}),
    "qwen2, own output matrix": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3, wide heads, own output matrix": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
}

# Both compute in float32 but add up in other orders; the logits' standard deviation is about 4.
TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 2e-4}


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0].tolist()
    return tokens[len(prompt) :]


class LogitsKept:
    """A model that keeps the last logits it gave."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits = torch.empty(0)

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        self.logits = self.model(batch, kv_cache).clone()
        return self.logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    variant: str, tiny_folder: TinyFolder, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config = VARIANTS[variant]
    model = reference(tiny_folder(family, **config))
    driver = make_driver(family, **config)
    kept = LogitsKept(driver.runner._model)
    monkeypatch.setattr(driver.runner, "_model", kept)
    prompt = random.Random(variant).choices(range(VOCAB_SIZE), k=50)

    seat = driver.seat(prompt)
    driver.step({seat: len(prompt)})
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(kept.logits[0], expected, **TOLERANCE)

    driver.run([seat], 60)  # 110 positions: beyond the 64 and 32 from which the stretched kinds were stretched
    assert seat.output == greedy(model, prompt, 60)
    with torch.no_grad():
        expected = model(torch.tensor([seat.tokens[:-1]])).logits[0, -1]
    torch.testing.assert_close(kept.logits[0], expected, **TOLERANCE)


def test_greedy_output_of_tiny_models_does_not_repeat_itself(make_driver: MakeDriver) -> None:
    """Else the comparisons of tokens would say little."""
    for family in ("llama", "qwen2", "qwen3"):
        output = make_driver(family).generate([1, 2, 3], 60)
        assert len(set(output)) > 30, family


def test_default_rope_and_stretched_ones_differ(make_driver: MakeDriver) -> None:
    """Else the comparisons of kinds would say nothing."""
    prompt = list(range(100, 140))
    outputs = [tuple(make_driver("llama").generate(prompt, 20))]
    outputs += [tuple(make_driver("llama", rope_parameters=rope).generate(prompt, 20)) for rope in ROPE_KINDS.values()]
    assert len(set(outputs)) == len(outputs)
