"""Tiny GGUF files, written the way llama.cpp's converter does it: with the gguf package, and from the same networks
as the tests' models in Hugging Face's format, so that the import can be compared with the original."""

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from tokenizers import Tokenizer

from tests.tiny_models import CHAT_TEMPLATE, END_OF_TURN, START_OF_TURN, make_tiny_network, make_tiny_tokenizer

_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    family: str = "llama",
    *,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    **config: Any,
) -> Path:
    """Write a model to `path`, which is returned; matrices in `kind`, vectors in F32.

    `metadata` and `tensors` add entries in GGUF's names, or remove them if None. `config` goes to `make_tiny_network`.
    """
    network = make_tiny_network(family, **config)
    writer = gguf.GGUFWriter(path, family)
    for key, value in (_metadata(network.config, family) | _vocabulary(path.parent) | (metadata or {})).items():
        _add(writer, key, value)
    arrays: dict[str, np.ndarray | None] = {}
    for name, parameter in network.state_dict().items():
        if name == "lm_head.weight" and network.config.tie_word_embeddings:
            continue
        array = parameter.numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = interleave_halves(array, network.config.head_dim)
        arrays[gguf_name(name)] = array
    for name, changed in (arrays | (tensors or {})).items():
        if changed is not None:
            _add_tensor(writer, name, changed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key rows of the architecture `llama`."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    """llama.cpp's name for a weight."""
    name, _, part = name.rpartition(".")
    if name.startswith("model.layers."):
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_NAMES[rest]}.{part}"
    return f"{_NAMES[name]}.{part}"


def _metadata(config: Any, family: str) -> dict[str, Any]:
    return {
        "general.name": "tiny",
        "general.license": "cc0-1.0",
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": config.hidden_size // config.num_attention_heads,
        f"{family}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{family}.rope.freq_base": 10_000.0,
    }


def _vocabulary(folder: Path) -> dict[str, Any]:
    make_tiny_tokenizer(folder / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = sorted(ids, key=lambda token: ids[token])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": ids[START_OF_TURN],
        "tokenizer.ggml.eos_token_id": ids[END_OF_TURN],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _add_tensor(writer: Any, name: str, array: np.ndarray, kind: str) -> None:
    if array.ndim == 1 or kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
    elif kind == "F16":
        writer.add_tensor(name, array.astype(np.float16))
    else:
        quantization = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, blocks_of(name, array, kind), raw_dtype=quantization)


def blocks_of(name: str, rows: np.ndarray, kind: str) -> np.ndarray:
    """The rows in blocks, uint8 [rows, bytes]; arbitrary ones, but always the same, if gguf cannot make such blocks."""
    quantization = gguf.GGMLQuantizationType[kind]
    try:
        return np.asarray(gguf.quantize(np.ascontiguousarray(rows), quantization)).view(np.uint8)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(rows.shape, quantization)
        generator = np.random.default_rng(list(name.encode()))
        blocks: np.ndarray = generator.integers(0, 256, shape, np.uint8)
        return blocks
