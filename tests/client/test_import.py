"""The client library alone: what it needs of a Python installation."""

import subprocess
import sys

_CODE = """
import sys

MISSING = ("msgspec", "nats", "torch", "numpy", "tokenizers", "jinja2", "click", "rich", "psutil", "shared", "services")
MISSING += ("opentelemetry",)
for name in MISSING:
    sys.modules[name] = None  # importing it raises ImportError
import shoal
shoal.Client("http://127.0.0.1:8000").stream(model="m", prompt="Once")
"""


def test_it_needs_nothing_of_the_mesh() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
