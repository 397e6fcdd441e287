"""Small models' text sides, written as a store would have them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "the cat sat on the mat and the dog sat on the log\n\n",
    "system user assistant tool You are a helpful assistant. Hello, world! 0123456789",
    "привет мир, как дела? 你好，世界。 👩‍👩‍👧 naïve café",
    "def f(x):\n    return x  # <|im_start|> [INST] <s> {}",
) * 4

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
LLAMA2 = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{% elif message.role == 'assistant' %}{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}"
    "{% else %}{{ message.content + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)


def write_model(
    folder: Path,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """A model folder with this tokenizer and `tokenizer_config.json`; `config` changes `config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(shape | (config or {})))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def byte_level(special: list[str], *, vocab_size: int = 600) -> Tokenizer:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3, Qwen and SmolLM have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        show_progress=False, vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=special
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentence_piece(special: list[str], *, legacy: bool = False) -> Tokenizer:
    """A BPE tokenizer with byte fallback, as Llama 2 and Mistral have; `legacy` has a normalizer put the first `▁`."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained.train_from_iterator(
        [text.replace("\n", " ") for text in CORPUS], trainers.BpeTrainer(show_progress=False, vocab_size=300)
    )
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: n for n, token in enumerate(dict.fromkeys(tokens))},
            merges=[(left, right) for left, right in model["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ["<unk>", *special]])
    return tokenizer


def put_first(tokenizer: Tokenizer, bos: str) -> None:
    """Have the library put this token before every text."""
    bos_id = tokenizer.token_to_id(bos)
    assert bos_id is not None
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])


def _chatml(folder: Path) -> Path:
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    settings = {"chat_template": CHATML, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return write_model(folder, tokenizer, settings, config={"eos_token_id": 2, "bos_token_id": 1})


def _llama3(folder: Path) -> Path:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(special)
    put_first(tokenizer, "<|begin_of_text|>")
    settings = {
        "chat_template": LLAMA3,
        "bos_token": {"content": "<|begin_of_text|>", "special": True},
        "eos_token": "<|end_of_text|>",
    }
    return write_model(folder, tokenizer, settings, config={"eos_token_id": 1}, generation={"eos_token_id": [1, 4]})


def _llama2(folder: Path, *, legacy: bool = False) -> Path:
    tokenizer = sentence_piece(["<s>", "</s>"], legacy=legacy)
    put_first(tokenizer, "<s>")
    settings = {"chat_template": LLAMA2, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return write_model(folder, tokenizer, settings, config={"eos_token_id": 2})


def _llama2_legacy(folder: Path) -> Path:
    return _llama2(folder, legacy=True)


def _deepseek(folder: Path) -> Path:
    """Role markers that are not marked special, and other added tokens that ordinary text has."""
    tokenizer = byte_level(["<s>", "</s>"])
    texts = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "\n\n", "<tool>"]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    put_first(tokenizer, "<s>")
    settings = {"chat_template": DEEPSEEK, "bos_token": "<s>", "eos_token": "</s>"}
    return write_model(folder, tokenizer, settings, config={"eos_token_id": 1})


MODELS: dict[str, Callable[[Path], Path]] = {
    "chatml": _chatml,
    "llama3": _llama3,
    "llama2": _llama2,
    "llama2 legacy": _llama2_legacy,
    "deepseek": _deepseek,
}
