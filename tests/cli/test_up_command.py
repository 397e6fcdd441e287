"""`shoal up` as a person uses it."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import urllib.request
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from shared.cli.mesh.ports import free_port
from tests.cli.shoal import COMMAND, environ, shoal
from tests.shared.telemetry.scrape import scrape

START_TIMEOUT_S = 90.0
"""A mesh needs a few seconds; a machine that runs other tests beside needs more."""

Up = Callable[..., Awaitable[Process]]


def test_a_misspelt_setting_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = shoal("up", env=environ(tmp_path, SHOAL_MODLE="tiny"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "shoal: SHOAL_MODLE is not a setting; did you mean SHOAL_MODEL?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_scale_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = shoal("up", "--scale", "worker=2", env=environ(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shoal: --scale 'worker=2': say SERVICE=N")
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_said_with_who_holds_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = shoal("up", "--port", str(port), env=environ(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"shoal: port {port} is taken by process {os.getpid()} \(.+\); choose another with --port\n", done.stderr
    )


def test_a_model_that_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    done = shoal("up", "--port", "0", "--model", str(tmp_path / "nothing"), env=environ(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("shoal: ")
    assert str(tmp_path / "nothing") in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("model", ["no name!", "org/na me", "a/b/c", "x--y", "pypi:--index-url=x", "ftp://host/x"])
def test_a_model_that_can_neither_be_in_the_store_nor_be_pulled_is_a_sentence(tmp_path: Path, model: str) -> None:
    done = shoal("up", "--port", "0", "--model", model, env=environ(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"shoal: {model!r}")
    assert not (tmp_path / "models").exists()


class _Home:
    """A home folder with the default model in its store."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        (folder / "models").symlink_to(model.parent)
        self.port = free_port()

    def metrics(self) -> dict[str, str]:
        """Where Prometheus finds the metrics of each process, by its name."""
        groups = json.loads((self.folder / "run" / str(self.port) / "metrics.json").read_text())
        return {group["labels"]["name"]: f"http://{group['targets'][0]}" for group in groups}

    async def shoal(self, *arguments: str, **settings: str) -> tuple[int, str, str]:
        """One command to its end: exit status, standard output and standard error."""
        done = await asyncio.to_thread(shoal, *arguments, env=environ(self.folder, **settings))
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def home(tmp_path: Path, default_model: Path) -> _Home:
    return _Home(tmp_path, default_model)


@pytest.fixture
async def up(home: _Home) -> AsyncIterator[Up]:
    """Starts `shoal up` and makes sure that nothing of it is left."""
    started: list[Process] = []

    async def up(*arguments: str, **settings: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *("up", "--port", str(home.port)),
            *arguments,
            stdout=PIPE,
            stderr=STDOUT,
            env=environ(home.folder, **settings),
        )
        started.append(process)
        return process

    yield up
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _until(process: Process, text: str) -> str:
    """What the process printed up to the line with `text`."""
    assert process.stdout is not None
    printed = ""
    async with asyncio.timeout(START_TIMEOUT_S):
        while text not in printed:
            line = await process.stdout.readline()
            assert line, f"ended before {text!r}: {printed}"
            printed += line.decode()
    return printed


def _services(process: Process) -> dict[str, psutil.Process]:
    children = psutil.Process(process.pid).children()
    return {child.cmdline()[-1].rpartition(".")[2]: child for child in children if child.cmdline()[-2:-1] == ["-m"]}


def _complete(url: str, prompt: str) -> str:
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text


@pytest.mark.mesh
@pytest.mark.model
@pytest.mark.timeout(300)
async def test_a_mesh_serves_is_watched_heals_and_stops(up: Up, home: _Home) -> None:
    process, url = await up(), f"http://127.0.0.1:{home.port}"
    printed = await _until(process, "Ctrl-C stops it.")
    assert f"Shoal serves smollm2-135m at {url}" in printed
    assert f"curl -N {url}/v1/chat/completions" in printed
    answer = await asyncio.to_thread(_complete, url, "One, two, three,")
    assert answer.strip()

    status, out, err = await home.shoal("chat", "--temperature", "0", "--max-tokens", "8", "Hello!")
    assert status == 0
    assert err in ("", "shoal: the answer is cut off: --max-tokens allows 8\n")
    assert out.strip()
    port = str(home.port)
    assert (await home.shoal("chat", "--port", port, "--temperature", "0", "--max-tokens", "8", "Hello!"))[1] == out
    status, out, _ = await home.shoal("status", "--once", "--json")
    assert status == 0
    assert {row["name"] for row in json.loads(out)["instances"]} == {
        f"{service}-1" for service in ("gateway", "tokenizer", "scheduler", "executor", "detokenizer")
    }
    addresses = {row["name"]: row["metrics_address"] for row in json.loads(out)["instances"]}
    assert addresses == home.metrics()
    for address in addresses.values():
        assert (await scrape(address)).value("shoal_broker_connected") == 1
    page = await scrape(addresses["gateway-1"])
    assert page.total("shoal_gateway_requests_total", ending="completed") == 3
    status, _, err = await home.shoal("up", "--port", str(home.port))
    assert status == 2
    assert f"a mesh runs on port {home.port} already, started by process {process.pid}" in err

    services = _services(process)
    assert sorted(services) == ["detokenizer", "executor", "gateway", "scheduler", "tokenizer"]
    services["executor"].kill()
    await _until(process, "Serving again")
    assert await asyncio.to_thread(_complete, url, "One, two, three,") == answer
    page = await scrape(addresses["executor-1"])
    assert page.value("shoal_executor_held") == 1, "it is found where it was before"

    everybody = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    rest, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert rest.decode().endswith("Stopped.\n")
    assert not [child for child in everybody if child.is_running()]
    assert (await home.shoal("status", "--port", str(home.port)))[0] == 2


@pytest.mark.mesh
@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.timeout(300)
async def test_nothing_outlives_a_mesh_that_was_killed_and_the_next_one_starts(up: Up, home: _Home) -> None:
    process = await up()
    await _until(process, "up after")
    everybody = psutil.Process(process.pid).children()
    assert len(everybody) >= 5
    process.kill()
    await process.communicate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, everybody, timeout=20)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    await _until(await up(), "Shoal serves")


@pytest.mark.mesh
@pytest.mark.model
async def test_a_service_that_refuses_its_settings_stops_the_mesh_with_one_sentence(home: _Home) -> None:
    status, out, err = await home.shoal("up", "--port", str(home.port), SHOAL_EXECUTOR_MAX_SLOTS="0")
    assert status == 2
    assert err == "shoal: SHOAL_EXECUTOR_MAX_SLOTS='0': must be 1 to 4096\n"
    assert "starting it again" not in out


@pytest.mark.mesh
@pytest.mark.model
@pytest.mark.timeout(300)
async def test_for_machines_every_line_is_an_event(up: Up) -> None:
    process = await up("--log-format", "json", "--scale", "tokenizer=2")
    printed = await _until(process, "mesh is ready")
    process.send_signal(signal.SIGTERM)
    rest, _ = await asyncio.wait_for(process.communicate(), 60)
    events = [json.loads(line) for line in (printed + rest.decode()).splitlines()]
    instances = {event["instance"] for event in events}
    assert {"up", "tokenizer-1", "tokenizer-2", "executor-1"} <= instances
    assert events[-1]["event"] == "mesh stopped"
    assert process.returncode == 0
