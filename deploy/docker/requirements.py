"""Prints what the named extras of pyproject.toml need, with what everything needs, one requirement a line.

So images are installed from the same lists as everything else. Owns no list of its own.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of the project and of `extras`. Raises KeyError for an extra that it does not have."""
    project = tomllib.loads(pyproject.read_text())["project"]
    needed = list(project["dependencies"])
    for extra in extras:
        needed += project["optional-dependencies"][extra]
    return needed


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
