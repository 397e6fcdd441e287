"""`shoal bench`: the load and its arithmetic against a scripted server, and its command line."""

import asyncio
import importlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from shared.cli.bench import command
from shared.cli.bench.load import Load, percentile, run
from shared.cli.bench.load_command import base_url
from shared.cli.bench.private_mesh import PrivateMesh
from shared.errors import OperatorError
from tests.cli.shoal import environ, shoal

NUM_TOKENS = 4


class Server:
    """Streams four tokens a request, or answers `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.refusal = "no such model"
        self.num_refused = 1_000_000
        self.bodies: list[dict[str, object]] = []
        self.num_open = self.most_open = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200 and len(self.bodies) <= self.num_refused:
            return web.Response(status=self.status, text=self.refusal)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(NUM_TOKENS):
            await asyncio.sleep(0.002)
            await self.send(answer, {"choices": [{"text": f" {number}"}], "usage": None})
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": NUM_TOKENS,
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        await self.send(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        self.num_open -= 1
        return answer

    async def send(self, answer: web.StreamResponse, chunk: object) -> None:
        await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    yield server
    await runner.cleanup()


async def test_a_load_keeps_so_many_streams_open_and_counts_their_tokens(server: Server) -> None:
    report = await run(server.url, "m", Load(num_words=7, num_output_tokens=4), concurrency=3, num_requests=9)
    assert (report.num_requests, report.num_failed, report.output_tokens) == (9, 0, 9 * NUM_TOKENS)
    assert server.most_open == 3
    assert report.cached_share == 0.5
    assert 2 <= report.ttft_p50_ms <= report.ttft_p99_ms < 1000
    assert report.output_tokens_per_s == pytest.approx(report.output_tokens / report.seconds)
    assert all(body["max_tokens"] == 4 and body["ignore_eos"] and body["model"] == "m" for body in server.bodies)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("no such model", ": no such model"),
        ('{"error": {"message": "There is no model m.", "code": 1}}', ": There is no model m."),
        ('{"error": "not today"}', ": not today"),
        ("<!DOCTYPE html>\n<p>not for people", ""),
    ],
)
async def test_a_server_that_refuses_everything_is_told_of_in_its_own_words(
    server: Server, refusal: str, said: str
) -> None:
    server.status, server.refusal = 404, refusal
    with pytest.raises(OperatorError) as caught:
        await run(server.url, "m", Load(), concurrency=1, num_requests=2)
    what = f"none of 2 requests to {server.url} succeeded: the server answered with status 404 (Not Found)"
    assert str(caught.value) == what + said


async def test_a_server_that_is_not_there_is_told_of() -> None:
    with pytest.raises(
        OperatorError, match=r"none of 1 request to http://127\.0\.0\.1:9 succeeded: nothing answers there"
    ):
        await run("http://127.0.0.1:9", "m", Load(), concurrency=1, num_requests=1)


async def test_a_load_of_which_a_part_fails_says_why(server: Server) -> None:
    server.status, server.num_refused = 503, 1
    arguments = ["load", server.url, "--model", "m", "--concurrency", "2", "--requests", "2"]
    result = await asyncio.to_thread(CliRunner().invoke, command, arguments)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1] == (
        "1 failed at 2 at once, the first: the server answered with status 503 (Service Unavailable): no such model"
    )


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://host:1", "http://host:1"),
        ("host:1/", "http://host:1"),
        ("https://host/v1", "https://host"),
        ("https://host/openai/v1/", "https://host/openai"),
    ],
)
def test_an_address_may_be_typed_in_several_ways(typed: str, url: str) -> None:
    assert base_url(typed) == url


@pytest.mark.parametrize("typed", ["", "ftp://host", "http://", "http://host:x", "http://[::1"])
def test_what_is_no_address_is_refused(typed: str) -> None:
    result = CliRunner().invoke(command, ["load", typed, "--model", "m"])
    assert result.exit_code == 2
    assert "is not the address of a server" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["mesh"]])
async def test_without_a_subcommand_a_mesh_and_two_services_alone_are_measured_and_progress_is_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    @contextmanager
    def mesh(_model: str) -> Iterator[PrivateMesh]:
        yield PrivateMesh(server.url, os.getpid(), 1.25)

    def run_service(command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        modules.append(command[2])
        return subprocess.CompletedProcess(command, 0)

    modules: list[str] = []
    module = importlib.import_module("shared.cli.bench.mesh_command")  # the package has a command of the same name
    monkeypatch.setattr(module, "private_mesh", mesh)
    monkeypatch.setattr(subprocess, "run", run_service)
    result = await asyncio.to_thread(CliRunner().invoke, command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert modules == ([] if arguments else ["services.scheduler.bench", "services.executor.bench"])
    assert result.stderr.splitlines() == [
        "Starting a mesh for smollm2-135m …",
        "It is ready after 1.2 s; warming up …",
        *(f"{2 * number} requests, {number} at once …" for number in (1, 8, 32)),
    ]
    assert "What a token costs" in result.stdout


@pytest.mark.parametrize("service", ["scheduler", "executor"])
def test_the_help_of_a_services_benchmark_is_its_own(service: str, tmp_path: Path) -> None:
    result = shoal("bench", service, "--help", env=environ(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: shoal bench {service} ")


def test_the_executors_benchmark_without_its_model_ends_with_a_sentence(tmp_path: Path) -> None:
    result = shoal("bench", "executor", "--model", "nothing", env=environ(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("shoal: no model named nothing is in the store")


def test_prompts_share_just_what_they_should() -> None:
    prompts = [prompt.split() for prompt in Load(num_words=20, num_shared_words=15).prompts(5)]
    assert all(len(prompt) == 20 for prompt in prompts)
    assert len({tuple(prompt[:15]) for prompt in prompts}) == 1
    assert len({tuple(prompt[15:]) for prompt in prompts}) == 5
    assert Load(seed=1).prompts(1) != Load(seed=2).prompts(1)
    assert Load(seed=1).prompts(2) == Load(seed=1).prompts(2)


def test_percentiles() -> None:
    values = [float(number) for number in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values[:1], 0.99)) == (50.0, 99.0, 0.0)
    assert percentile([], 0.5) == 0.0


async def test_the_command_prints_a_row_for_each_concurrency(server: Server) -> None:
    arguments = ["load", server.url, "--model", "m", "--concurrency", "1,2", "--requests", "2", "--output-tokens", "4"]
    table = await asyncio.to_thread(CliRunner().invoke, command, arguments)
    assert table.exit_code == 0, table.output
    assert [line.split()[0] for line in table.stdout.splitlines()[2:]] == ["1", "2"]
    assert table.stderr.splitlines() == ["2 requests, 1 at once …", "4 requests, 2 at once …"]
    rows = await asyncio.to_thread(CliRunner().invoke, command, [*arguments, "--json"])
    assert [json.loads(line)["num_requests"] for line in rows.stdout.splitlines()] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--concurrency", "1,x"], "must be whole numbers"),
        (["--concurrency", "0"], "at least 1"),
        (["--shared-words", "300"], "--shared-words 300 is more than --words 200"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(command, ["load", "http://127.0.0.1:9", "--model", "m", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output
