"""Tries compose.yaml for real: `python -m tests.compose.trial [--build] [--max-scale N]`.

Brings a mesh up, streams through the published port, fetches another model, scales each service, restarts every
container under load, kills one of each service while a stream runs, and takes everything down. Prints what it saw and
ends with status 0, or says what was not as it should be. The images must be there (`docker compose build`) unless
`--build` is given.
"""

import argparse
import asyncio
import http.client
import json
import os
import re
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import shoal
from shared.cli.mesh.ports import free_port
from shared.presence import BEAT_INTERVAL_S
from tests.compose.docker import ROOT, Project, TrialFailed, fresh_passwords, wait_until, why_not
from tests.compose.load import Load
from tests.tiny_models import make_tiny_model

SERVICES = ("gateway", "tokenizer", "scheduler", "executor", "detokenizer")
MODEL = os.environ.get("SHOAL_MODEL", "smollm2-135m")
TAG = os.environ.get("SHOAL_TAG", "latest")
SMALL = ("gateway", "tokenizer", "scheduler", "detokenizer")
MAX_ADDED_MB = 100
"""On Python's slim image of some 130 MB, that is well under 250 MB altogether."""
READY_S = 420.0
"""A first start fetches the model and compiles the kernels."""
PROMPT = [{"role": "user", "content": "Tell me a long story about a shoal of herrings."}]


class Trial:
    """One mesh in containers, and what is tried with it."""

    def __init__(self, project: Project, port: int) -> None:
        self.project = project
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._expected = ""
        self._longest_silence_s = 0.0

    def up(self, num_each: int) -> None:
        """Start, or change the number of each service, and wait until a request would be served."""
        self._scale(num_each)
        wanted = dict.fromkeys(SERVICES, num_each) | {"front": 1, "nats": 1}
        took_s = wait_until(lambda: self.project.healthy() == wanted, f"healthy are {wanted}", timeout_s=READY_S)
        say(f"{num_each} of each service healthy, {took_s:.0f} s after `up` returned")

    def chat(self) -> None:
        """An event stream of OpenAI's kind through the published port."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        body = {"model": MODEL, "messages": PROMPT, "stream": True, "max_tokens": 32, "temperature": 0}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        arrivals = [(time.monotonic(), line) for line in response if line.startswith(b"data: ")]
        connection.close()
        check(response.status == 200, f"the chat was answered with {response.status}")
        check(arrivals[-1][1].strip() == b"data: [DONE]", f"the stream ended with {arrivals[-1][1]!r}")
        check(len(arrivals) > 10, f"the stream had {len(arrivals)} events only")
        spread_s = arrivals[-1][0] - arrivals[0][0]
        check(spread_s > 0.02, "all events came at once: the front holds streams back")
        say(f"a streamed chat: {len(arrivals)} events over {spread_s:.2f} s")

    async def stream(self, disturb: Callable[[], None] | None = None) -> str:
        """A long text on a WebSocket; after some of it, `disturb` is called, in a thread."""
        text, disturbance = "", None
        last_heard, self._longest_silence_s = time.monotonic(), 0.0
        async with shoal.Client(self.url) as client:
            stream = client.stream(model=MODEL, messages=PROMPT, max_tokens=200, min_tokens=200, temperature=0)
            async for delta in stream:
                text += delta.text
                now = time.monotonic()
                last_heard, self._longest_silence_s = now, max(self._longest_silence_s, now - last_heard)
                if disturb is not None and disturbance is None and len(text) > 40:
                    disturbance = asyncio.create_task(asyncio.to_thread(disturb))
            if disturbance is not None:
                await disturbance
        return text

    def streams_whole(self) -> None:
        """What every later stream has to equal."""
        self._expected = asyncio.run(self.stream())
        check(len(self._expected) > 200, f"the text is short: {self._expected!r}")

    def survives(self, service: str) -> None:
        """Kill one container of a service under a stream: the text stays the same, and the container comes back."""
        before, begun = self._num_restarts(service), time.monotonic()
        text = asyncio.run(self.stream(lambda: self._crash(service)))
        took_s, silence_s = time.monotonic() - begun, self._longest_silence_s
        check(text == self._expected, f"killing a {service} changed the text:\n{text}\ninstead of\n{self._expected}")
        wanted = len(self.project.containers(service))
        wait_until(lambda: self._num_restarts(service) > before, f"a {service} is started again")
        back_s = wait_until(
            lambda: self.project.healthy()[service] == wanted, f"{service} is whole again", timeout_s=READY_S
        )
        wait_until(self._is_ready, "ready again")
        say(
            f"{service} killed, of {wanted}: the stream was whole after {took_s:.1f} s, silent for {silence_s:.1f} s "
            f"at most; healthy {back_s:.1f} s later"
        )

    def restarts_without_a_break(self) -> None:
        """Tell every container of the services to stop, and start it again, one after the other: no request fails."""
        load, begun = Load(self._port, MODEL), time.monotonic()
        whole = self.project.healthy()
        with load.running():
            for service in SERVICES:
                for container in self.project.containers(service):
                    load.happening = container.name
                    self.project.docker("restart", container.id)
                    wait_until(lambda: self.project.healthy() == whole, f"{service} is whole again", timeout_s=READY_S)
                    time.sleep(BEAT_INTERVAL_S)  # a gateway that is new as well hears of the others within a beat
        check(not load.failures, "a restart failed requests:\n" + "\n".join(load.failures[:12]))
        say(
            f"every container restarted in turn, in {time.monotonic() - begun:.0f} s: {load.num_answered} requests "
            f"meanwhile, none of which failed; the longest took {load.longest_s:.1f} s"
        )

    def shrinks(self) -> None:
        """Go back to one of each service under a stream: those that leave drain, and the text stays the same."""
        begun = time.monotonic()
        text = asyncio.run(self.stream(lambda: self._scale(1)))
        check(text == self._expected, f"scaling down changed the text:\n{text}\ninstead of\n{self._expected}")
        left = Counter(container.service for container in self.project.containers() if container.is_running)
        check(all(left[service] == 1 for service in SERVICES), f"after scaling to one of each there are {left}")
        wait_until(self._is_ready, "ready with one of each")
        say(f"scaled down to 1 of each: the stream was whole after {time.monotonic() - begun:.1f} s")

    def is_confined(self) -> None:
        """No container runs as root, can write to its root, or has a capability."""
        for container in self.project.containers():
            if not container.is_running:
                continue
            status = self.project.docker("exec", container.name, "sh", "-c", "id -u; grep CapEff /proc/self/status")
            user, capabilities = status.split("\n")[:2]
            check(user != "0", f"{container.name} runs as root")
            check(int(capabilities.split()[1], 16) == 0, f"{container.name} has capabilities: {capabilities}")
            write = "touch /written 2>/dev/null || touch /app/written 2>/dev/null && echo written || echo refused"
            check(
                self.project.docker("exec", container.name, "sh", "-c", write).strip() == "refused",
                f"{container.name} can write to its root",
            )
        say("no container is root, has a capability, or can write to its root")

    def says_no_more_than_it_may(self) -> None:
        """After all that, and a pin, the broker has refused nobody anything: the permissions are wide enough."""
        pin = ("pin", "support", "--system", "Be brief and kind. " * 20)
        self.project.compose("run", "--rm", "--no-deps", "shoal", *pin)
        wait_until(self._is_pinned, "an executor holds the pin")
        records = self.project.compose("run", "--rm", "--no-deps", "shoal", "usage", "--json").splitlines()
        check(len(records) > 0, "the broker has no record of usage")
        refused = [line for line in self.project.logs("nats").splitlines() if "Violation" in line]
        check(not refused, "the broker refused:\n" + "\n".join(refused[:10]))
        say(f"the broker refused nobody anything, and has {len(records)} records of usage")

    def images_are_small(self) -> None:
        """What those without torch add to Python's own image."""
        base_mb = self._size_mb(os.environ.get("PYTHON_IMAGE", "python:3.11-slim-bookworm"))
        added_mb = {name: self._size_mb(f"shoal-{name}:{TAG}") - base_mb for name in (*SERVICES, "operator")}
        large = {name: size for name, size in added_mb.items() if name in SMALL and size > MAX_ADDED_MB}
        check(not large, f"more than {MAX_ADDED_MB} MB: {large}")
        say(f"images are Python's ({base_mb} MB) and: " + ", ".join(f"{name} {mb} MB" for name, mb in added_mb.items()))
        for name in SERVICES:
            say(f"layers of {name}: " + ", ".join(self._layers(f"shoal-{name}:{TAG}")))

    def _layers(self, image: str) -> list[str]:
        """What of the Dockerfile added how much to an image, where it was more than a few files."""
        history = self.project.docker("history", "--no-trunc", "--human=false", "--format", "{{json .}}", image)
        layers = [json.loads(line) for line in history.splitlines()]
        of_files = [layer for layer in layers if re.search(" /(opt/shoal|app/)", layer["CreatedBy"])]
        return [
            f"{re.sub('.* ', '', layer['CreatedBy'].partition(' #')[0])} {int(layer['Size']) / 1e6:.1f} MB"
            for layer in reversed(of_files)
            if int(layer["Size"]) > 50_000
        ]

    def says_it_is_alive(self) -> None:
        """The question of Kubernetes' liveness probes is answered too."""
        for name in SERVICES:
            self.project.compose("exec", "-T", name, "python", "-S", "-m", "shared.health", "--alive")
        say("every service says that it is alive")

    def is_right_with_every_profile(self) -> None:
        """Compose takes the file with each profile. It starts none: that takes other people's images, or devices."""
        for profile in ("observability", "gpu", "tools"):
            self.project.compose("--profile", profile, "config", "--quiet")
        say("compose.yaml is right with every profile")

    def fetches_a_model(self) -> None:
        """`docker compose run --rm model pull SOURCE` puts one more model into the store."""
        with tempfile.TemporaryDirectory() as folder:
            make_tiny_model(Path(folder, "tiny"))
            for path in Path(folder).rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            mount = ("--volume", f"{folder}/tiny:/from/tiny:ro")
            self.project.compose("run", "--rm", "--no-deps", *mount, "model", "pull", "/from/tiny", "--name", "tiny")
        names = self.project.compose("run", "--rm", "--no-deps", "shoal", "models", "--json")
        check({"tiny", MODEL} <= {model["name"] for model in json.loads(names)}, f"the store has {names}")
        self.project.compose("run", "--rm", "--no-deps", "shoal", "models", "--remove", "tiny")
        say("another model was fetched into the store, and removed")

    def shows_metrics(self) -> None:
        """Every container answers on the port of metrics, and says of which version it is; clients see none of it."""
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        said = self.project.compose("run", "--rm", "--no-deps", "shoal", "--version")
        check(said.split()[-1] == version, f"`shoal --version` in a container says {said!r}")
        check(self._status_of("/metrics") == 404, f"clients get {self._status_of('/metrics')} for /metrics")
        ask = (
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics', timeout=10).read().decode())"
        )
        for name in SERVICES:
            page = self.project.compose("exec", "-T", name, "python", "-c", ask)
            (of_whom,) = [line for line in page.splitlines() if line.startswith("target_info{")]
            check(f'service_version="{version}"' in of_whom, f"{name} does not know its version: {of_whom}")
            check(f'service_name="shoal-{name}"' in of_whom, f"{name} shows another one's metrics: {of_whom}")
        say(f"every service shows its metrics, of version {version}")

    def _size_mb(self, image: str) -> int:
        return int(self.project.docker("image", "inspect", "--format", "{{.Size}}", image)) // 10**6

    def _scale(self, num_each: int) -> None:
        scale = [word for service in SERVICES for word in ("--scale", f"{service}={num_each}")]
        self.project.compose("up", "--detach", "--no-build", "--no-recreate", *scale, timeout_s=READY_S)

    def _crash(self, service: str) -> None:
        containers = [container for container in self.project.containers(service) if container.is_running]
        self.project.crash(containers[0])

    def _is_pinned(self) -> bool:
        status = self.project.compose("run", "--rm", "--no-deps", "shoal", "status", "--once", "--json")
        blocks = [executor["blocks"] for executor in json.loads(status)["executors"]]
        return bool(blocks) and all(each is not None and each["num_pinned_blocks"] > 0 for each in blocks)

    def _num_restarts(self, service: str) -> int:
        return sum(self.project.num_restarts(container) for container in self.project.containers(service))

    def _is_ready(self) -> bool:
        try:
            return self._status_of("/readyz") == 200
        except (OSError, http.client.HTTPException):
            return False

    def _status_of(self, path: str) -> int:
        """What the front answers. Raises OSError or HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()


def check(is_so: bool, otherwise: str) -> None:
    """Raises TrialFailed that says what is the case instead."""
    if not is_so:
        raise TrialFailed(otherwise)


def say(text: str) -> None:
    """One line of the report."""
    print(f"compose: {text}", flush=True)


def try_everything(trial: Trial, max_scale: int) -> None:
    """The whole trial, on a mesh that is not up yet."""
    trial.images_are_small()
    trial.is_right_with_every_profile()
    trial.up(1)
    trial.chat()
    trial.is_confined()
    trial.says_it_is_alive()
    trial.shows_metrics()
    trial.fetches_a_model()
    trial.streams_whole()
    for service in SERVICES:  # the only one: what runs waits for it to come back
        trial.survives(service)
    for num_each in range(2, max_scale + 1):
        trial.up(num_each)
        trial.chat()
    trial.restarts_without_a_break()
    for service in (*SERVICES, "nats", "front"):
        trial.survives(service)
    trial.shrinks()
    trial.says_no_more_than_it_may()


def main() -> int:
    """Try it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="build the images first")
    parser.add_argument("--max-scale", type=int, default=2, help="how many of each service in the end")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        say(f"NOT TRIED: {reason}")
        return 1
    port = free_port()
    environ = dict(os.environ) | fresh_passwords()
    environ["SHOAL_PUBLISH"] = f"127.0.0.1:{port}"
    project = Project(f"shoal-trial-{os.getpid()}", environ)
    try:
        if options.build:
            project.compose("build", timeout_s=3600.0)
        try_everything(Trial(project, port), options.max_scale)
    except TrialFailed as error:
        say(f"FAILED: {error}")
        for name in (*SERVICES, "front", "nats", "model"):
            print(f"--- {name}\n{chr(10).join(project.logs(name).splitlines()[-15:])}", flush=True)
        return 1
    finally:
        project.compose("down", "--volumes", "--timeout", "10", timeout_s=120.0)
    say("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
