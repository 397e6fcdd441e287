"""The detokenizer's process: its settings, what it says without a model, and that it can do without the library."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.detokenizer.__main__ import build
from services.detokenizer.config import DetokenizerConfig
from shared.actor import Identity
from shared.clock import FakeClock
from shared.config import MeshConfig, load
from shared.errors import ConfigError, ModelError
from shared.ids import InstanceId, Service
from shared.process import Parts
from shared.transport.nats import NatsTransport


def parts(home: Path) -> Parts[DetokenizerConfig]:
    """What the process would be given."""
    return Parts(
        Identity(Service.DETOKENIZER, InstanceId("detokenizer-1"), "d"),
        NatsTransport("nats://127.0.0.1:1", name="d"),
        FakeClock(),
        MeshConfig(home=home, model="smollm2-135m"),
        DetokenizerConfig(),
    )


async def test_a_store_without_the_model_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        await build(parts(tmp_path))


@pytest.mark.model
async def test_the_default_model_is_served(default_model: Path) -> None:
    service = await build(parts(default_model.parent.parent))
    assert service.models() == ("smollm2-135m",)


def test_settings_are_read_and_checked() -> None:
    assert load(DetokenizerConfig, {}) == DetokenizerConfig(4096, 15.0)
    with pytest.raises(ConfigError, match="SHOAL_DETOKENIZER_MAX_OPEN_CHOICES"):
        load(DetokenizerConfig, {"SHOAL_DETOKENIZER_MAX_OPEN_CHOICES": "0"})


def test_the_settings_can_be_listed() -> None:
    command = [sys.executable, "-m", "services.detokenizer", "--settings"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "SHOAL_DETOKENIZER_MAX_OPEN_CHOICES" in listed.stdout


def test_the_library_is_loaded_only_for_models_that_need_it() -> None:
    program = "import sys, services.detokenizer.__main__; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
