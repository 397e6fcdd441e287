"""The tokenizer's process: its settings, and what it says without a model."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.tokenizer.__main__ import build
from services.tokenizer.config import TokenizerConfig
from shared.actor import Identity
from shared.clock import FakeClock
from shared.config import MeshConfig, load
from shared.errors import ConfigError, ModelError
from shared.ids import InstanceId, Service
from shared.process import Parts
from shared.transport.nats import NatsTransport


def parts(home: Path) -> Parts[TokenizerConfig]:
    """What the process would be given."""
    return Parts(
        Identity(Service.TOKENIZER, InstanceId("tokenizer-1"), "t"),
        NatsTransport("nats://127.0.0.1:1", name="t"),
        FakeClock(),
        MeshConfig(home=home, model="smollm2-135m"),
        TokenizerConfig(),
    )


async def test_a_store_without_the_model_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        await build(parts(tmp_path))


@pytest.mark.model
async def test_the_default_model_is_served(default_model: Path) -> None:
    service = await build(parts(default_model.parent.parent))
    assert service.models() == ("smollm2-135m",)
    assert service.status().max_model_len == 8192


def test_settings_are_read_and_checked() -> None:
    assert load(TokenizerConfig, {}) == TokenizerConfig(None, 4096, 32)
    assert load(TokenizerConfig, {"SHOAL_TOKENIZER_MAX_MODEL_LEN": "100"}).max_model_len == 100
    with pytest.raises(ConfigError, match="SHOAL_TOKENIZER_MAX_WAITING_PROMPTS"):
        load(TokenizerConfig, {"SHOAL_TOKENIZER_MAX_WAITING_PROMPTS": "0"})


def test_the_settings_can_be_listed() -> None:
    command = [sys.executable, "-m", "services.tokenizer", "--settings"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "SHOAL_TOKENIZER_INLINE_CHARS" in listed.stdout
