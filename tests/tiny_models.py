"""Small random models in Hugging Face's format, whole enough to be served: weights, tokenizer and chat template.

Deterministic: the same arguments give the same bytes. Weights are scaled so that greedy output wanders about the
vocabulary instead of repeating itself, which makes wrong tokens visible.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES: Final = ("llama", "qwen2", "qwen3")
VOCAB_SIZE: Final = 384
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CORPUS: Final = (
    "The river runs past the mill and under the bridge, and the miller counts the sacks that the river has ground.",
    "A small model that speaks no language well still has to spell every word that it says, letter by letter.",
    "Grüße aus Köln: vier Schiffe, drei Brücken, zwei Türme — und ein Fluss.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
)
_SHAPE: Final = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def make_tiny_model(
    folder: Path, family: str = "llama", *, seed: int = 0, max_shard_size: str = "5GB", **config: Any
) -> Path:
    """Write a model of one of FAMILIES to `folder`, which is returned. `config` overrides fields of its config.json."""
    make_tiny_tokenizer(folder)
    model = make_tiny_network(family, seed=seed, **config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_tiny_network(family: str = "llama", *, seed: int = 0, **config: Any) -> Any:
    """The transformers model alone, in float32 and ready to run."""
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    model = model_class(config_class(**_SHAPE | config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter.shape, generator))
    return model


def make_tiny_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with the chat template, in the files that models come with."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, START_OF_TURN, END_OF_TURN)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "unk_token": None,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return noise / math.sqrt(shape[-1]) * 4
    return noise / math.sqrt(shape[-1]) * 2.5
