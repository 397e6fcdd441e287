"""Prompts for tests, and what is found in their tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.tokenizer.encoding import PromptEncoder, load_encoder
from shared.messages import ChatMessage, ChatPrompt
from tests.tokenizer.conftest import Model
from tests.tokenizer.model_folders import byte_level, write_model


def chat(*contents: str, role: str = "user", parse_special_tokens: bool = False, **arguments: Any) -> ChatPrompt:
    """A conversation whose messages all have one role."""
    messages = tuple(ChatMessage(role, content) for content in contents)
    return ChatPrompt(messages, arguments, parse_special_tokens)


def controls_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The control tokens among these, in order."""
    added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    return [added[token_id] for token_id in token_ids if token_id in added]


def controls(model: Model, token_ids: Sequence[int]) -> list[str]:
    """The control tokens among these, in order."""
    return controls_of(model.tokenizer, token_ids)


def templated(tmp_path: Path, template: str, **more: Any) -> PromptEncoder:
    """The encoder of a model like `chatml` with another template and other settings."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    write_model(tmp_path, tokenizer, {"chat_template": template, "eos_token": "<|im_end|>", **more})
    return load_encoder(tmp_path)
