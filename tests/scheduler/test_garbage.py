"""Python's garbage collector in a scheduler's process."""

import subprocess
import sys

_MEASURE = """
import gc
from services.scheduler.bench import SteadyDecode
from services.scheduler.garbage import collect_rarely
collect_rarely()
steady = SteadyDecode(256)
before = sum(generation["collections"] for generation in gc.get_stats())
for _ in range(200):
    steady.step()
print(sum(generation["collections"] for generation in gc.get_stats()) - before)
"""


def test_steps_cause_hardly_any_collections() -> None:
    """Two hundred steps caused one; with Python's own thresholds 33."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 5
