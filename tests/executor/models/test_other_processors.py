"""Executors on different processors compute the same: a request that moves from one to the other goes on as it was."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from services.executor.factory import load_model
from tests.executor.conftest import INTEGER, TinyFolder
from tests.executor.models.test_integer import LONG, logits

NEEDS = {"avx-vnni": "avxvnni", "avx2": "avx2"}


@pytest.mark.timeout(600)  # kernels may have to be compiled twice
@pytest.mark.parametrize("weights", ["int8", "stored"])
@pytest.mark.parametrize("instruction", [*NEEDS])
def test_a_processor_with_fewer_instructions_gets_the_same_bits(
    instruction: str, weights: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    if not llvm.get_host_cpu_features().get(NEEDS[instruction]):
        pytest.skip(f"this processor has no {instruction}")
    folder, out = tiny_folder("qwen3"), tmp_path / "logits.npy"
    arguments = [instruction, str(folder), weights, str(out)]
    subprocess.run([sys.executable, "-m", "tests.executor.models.other_processor", *arguments], check=True)
    expected = logits(load_model(folder, "tiny", replace(INTEGER, dtype=weights)), LONG).numpy()
    assert np.array_equal(np.load(out), expected)
