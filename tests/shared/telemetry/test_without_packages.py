"""Services trace without OpenTelemetry: its packages are imported only where spans are exported."""

import subprocess
import sys

_NOT_THERE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("opentelemetry", "google"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Absent())
"""
_RUN = """
from shared.actor import Identity
from shared.config import MeshConfig
from shared.ids import InstanceId, Service
from shared.telemetry.settings import tracing_of
from tests.shared.telemetry.spans import request_id, span_of

identity = Identity(Service.GATEWAY, InstanceId("gateway-1"), "gateway-1")
tracing = tracing_of(identity, MeshConfig(), {environ})
tracing.record(span_of(1))
assert tracing.store.find(request_id(1)) is not None
import sys
print(tracing.exporter is not None, "opentelemetry" in sys.modules)
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_without_an_endpoint_the_packages_are_not_imported() -> None:
    assert _run(_RUN.format(environ="{}")).stdout == "False False\n"


def test_with_an_endpoint_they_are() -> None:
    environ = "{'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:9'}"
    assert _run(_RUN.format(environ=environ)).stdout == "True True\n"


def test_where_they_are_not_installed_spans_are_kept_and_the_log_says_why_they_are_not_exported() -> None:
    environ = "{'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:9'}"
    done = _run(_NOT_THERE + _RUN.format(environ=environ))
    assert done.stdout == "False False\n"
    assert "OpenTelemetry is not installed" in done.stderr
