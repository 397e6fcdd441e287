"""Logits of a model on a processor with fewer instructions: `python -m … INSTRUCTION FOLDER WEIGHTS OUT`."""

import sys
from dataclasses import replace
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

HIDDEN = {"avx-vnni": ("avx512", "amx"), "avx2": ("avx512", "amx", "avxvnni")}
"""Beginnings of the names of what such a processor lacks."""


def hide(instruction: str) -> None:
    """Before any kernel is imported: have Numba and the kernels see less of this processor."""
    features = llvm.get_host_cpu_features()
    for name in features:
        if name.startswith(HIDDEN[instruction]):
            features[name] = False
    llvm.get_host_cpu_features = lambda: features


if __name__ == "__main__":
    _, instruction, folder, weights, out = sys.argv
    hide(instruction)

    from services.executor.factory import load_model
    from services.executor.kernels.vectors import dot_instruction
    from tests.executor.conftest import INTEGER
    from tests.executor.models.test_integer import LONG, logits

    assert dot_instruction() == instruction
    np.save(out, logits(load_model(Path(folder), "tiny", replace(INTEGER, dtype=weights)), LONG).numpy())
