"""The entry of `shoal`: what it calls itself, and what it says when an extra is not installed."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shoal import environ


@pytest.mark.parametrize(
    ("library", "arguments", "extra"),
    [
        ("click", ["status"], "cli"),
        ("rich", ["status", "--once"], "cli"),
        ("aiohttp", ["chat"], "cli"),
        ("psutil", ["up"], "cli"),
        ("obstore", ["pull", "http://127.0.0.1:1/x.gguf"], "store"),
        ("huggingface_hub", ["pull", "org/name"], "store"),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, library: str, arguments: list[str], extra: str
) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from shared.cli.command import run; run()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True, check=False)
    sentence = f"shoal: this command needs {library}, which is not installed: pip install 'shoal[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


def test_a_module_of_our_own_that_is_missing_is_a_bug(tmp_path: Path) -> None:
    code = "import sys; sys.modules['shared.cli.main'] = None; from shared.cli.command import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_it_is_shoal_also_where_it_is_run_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shared.cli", "--version"]
    done = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"shoal, version {importlib.metadata.version('shoal')}\n")
