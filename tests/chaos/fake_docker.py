"""A `docker` command without Docker: it writes down what it is told, and answers as if containers were there.

`FakeDocker` puts it into a folder for PATH, and lets a test look and say what happens by itself. Run as a program it is
the command. It knows the few words that `containers` uses, and refuses the others.
"""

import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ALWAYS = ("front", "nats", "model")


class FakeDocker:
    """The command, from a test's side."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for PATH."""
        self._state = folder / "state.json"
        self._state.write_text(json.dumps({"containers": {}, "calls": []}))
        command = folder / "docker"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {self._state} "$@"\n')
        command.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """All commands so far, without those that only ask."""
        asks = ("inspect", "ps", "logs")
        with opened(self._state) as state:
            return [call for call in state["calls"] if not any(word in call.split() for word in asks)]

    def ids(self, *services: str) -> list[str]:
        """The containers of these services."""
        with opened(self._state) as state:
            return [each for each, container in state["containers"].items() if container["service"] in services]

    def forget_calls(self) -> None:
        """From now on, only what follows."""
        with opened(self._state) as state:
            state["calls"].clear()

    def change(self, container_id: str, **what: Any) -> None:
        """Something happened to a container: fields as in `_new`."""
        with opened(self._state) as state:
            state["containers"][container_id] |= what


@contextmanager
def opened(path: Path) -> Iterator[dict[str, Any]]:
    """The state, for one process at a time; what it is at the end is kept."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = json.load(file)
        yield state
        file.seek(0)
        file.truncate()
        json.dump(state, file)


def _new(service: str, number: int) -> dict[str, Any]:
    return {
        "service": service,
        "number": number,
        "status": "exited" if service == "model" else "running",
        "health": "" if service == "model" else "healthy",
        "exit_status": 0,
        "exit_status_when_stopped": 0,
        "num_restarts": 0,
        "num_escapes": 0,
        "last_words": "all is well",
    }


class _Refused(Exception):
    pass


def _compose(state: dict[str, Any], words: list[str]) -> str:
    if "up" in words:
        scale = dict(word.split("=") for word in words if "=" in word)
        numbers = {service: int(number) for service, number in scale.items()} | dict.fromkeys(_ALWAYS, 1)
        for service, number in numbers.items():
            for each in range(1, number + 1):
                container_id = hashlib.sha256(f"{service}-{each}".encode()).hexdigest()
                state["containers"][container_id] = _new(service, each)
        return ""
    if "ps" in words:
        return "\n".join(json.dumps(_row(*item)) for item in state["containers"].items())
    if "logs" in words:
        return "all that was logged"
    if "down" in words:
        state["containers"].clear()
        return ""
    raise _Refused(f"unknown: {words}")


def _row(container_id: str, container: dict[str, Any]) -> dict[str, str]:
    return {
        "ID": container_id,
        "Name": f"shoal-{container['service']}-{container['number']}",
        "Service": container["service"],
        "State": container["status"],
        "Health": container["health"],
    }


def _inspected(container_id: str, container: dict[str, Any]) -> dict[str, Any]:
    status, health = container["status"], {"Status": container["health"]}
    return {
        "Id": container_id,
        "RestartCount": container["num_restarts"],
        "State": {"Status": status, "ExitCode": container["exit_status"], "Health": health},
    }


def _become(container: dict[str, Any], before: str, after: str, **more: Any) -> None:
    if container["status"] != before:
        raise _Refused(f"the container is not {before}")
    container.update(status=after, **more)


def _pause(container: dict[str, Any]) -> None:
    if container["num_escapes"]:
        container["num_escapes"] -= 1
        raise _Refused("unable to freeze")
    _become(container, "running", "paused")


def _docker(state: dict[str, Any], verb: str, words: list[str]) -> str:
    if verb == "inspect":
        return json.dumps([_inspected(each, state["containers"][each]) for each in words])
    container = state["containers"][words[-1]]
    verbs: dict[str, Callable[[], None]] = {
        "kill": lambda: _become(container, "running", "exited", exit_status=137),
        "stop": lambda: _become(container, "running", "exited", exit_status=container["exit_status_when_stopped"]),
        "start": lambda: _become(container, "exited", "running", num_restarts=0),
        "pause": lambda: _pause(container),
        "unpause": lambda: _become(container, "paused", "running"),
        "logs": lambda: print(container["last_words"], file=sys.stderr),
    }
    if verb not in verbs:
        raise _Refused(f"unknown: {verb}")
    verbs[verb]()
    return ""


def main(path: str, *words: str) -> int:
    """Be the command; its exit status."""
    with opened(Path(path)) as state:
        state["calls"].append(" ".join(words))
        try:
            verb, *rest = words
            answer = _compose(state, rest) if verb == "compose" else _docker(state, verb, rest)
        except _Refused as error:
            print(error, file=sys.stderr)
            return 1
    print(answer, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
