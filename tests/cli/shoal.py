"""The `shoal` command as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

COMMAND = (sys.executable, "-c", "from shared.cli.main import main; main()")


def environ(home: Path, **settings: str) -> dict[str, str]:
    """This environment without anybody's own settings, with a home folder of the test's."""
    own = {n: v for n, v in os.environ.items() if not n.startswith("SHOAL_") and n not in ("OPENAI_API_KEY", "COLUMNS")}
    return own | {"SHOAL_HOME": str(home)} | settings


def shoal(
    *arguments: str, env: Mapping[str, str], stdin: str | bytes | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    with subprocess.Popen(
        [*COMMAND, *arguments],
        env=env,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            out, err = process.communicate(stdin.encode() if isinstance(stdin, str) else stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())
