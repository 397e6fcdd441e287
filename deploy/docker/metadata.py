"""Tells an image's Python which version of Shoal it has: `metadata.py SITE_PACKAGES` writes there what installing the
project would, without its code, which images have in /app.

So `importlib.metadata.version("shoal")` says in a container what it says everywhere. Owns no version of its own.
"""

import sys
import tomllib
from pathlib import Path


def write(pyproject: Path, site_packages: Path) -> Path:
    """The folder that was made. Raises OSError."""
    project = tomllib.loads(pyproject.read_text())["project"]
    folder = site_packages / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        f"Summary: {project['description']}\n"
    )
    (folder / "INSTALLER").write_text("docker build\n")
    return folder


if __name__ == "__main__":
    write(Path("pyproject.toml"), Path(sys.argv[1]))
