"""`shoal trace` as a process: what it draws, what it prints for programs, and what it says when there is nothing."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from shared import subjects
from shared.actor import Identity
from shared.cli.mesh.ports import free_port
from shared.cli.trace_picture import picture_of
from shared.codec import encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import Attributes, Presence, SchedulerStatus, Span, SpansFound, StepTaken, TraceContext
from shared.telemetry import names
from shared.telemetry.answering import Answering
from shared.telemetry.asking import Answers
from shared.telemetry.store import SpanStore
from shared.telemetry.timeline import Timeline, timeline_of
from shared.telemetry.tracing import Tracing
from shared.transport.nats import NatsTransport
from tests.cli.beating import run_while_beating
from tests.cli.shoal import environ, shoal
from tests.conftest import NatsServer

REQUEST = RequestId("req-00112233445566778899aabbccddeeff")
TOP = TraceContext(bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736"), b"", True)
BELOW = TraceContext(TOP.trace_id, bytes(range(8)), True)
MS = 1_000_000
ZERO = 1_700_000_000_000 * MS


def _span(name: str, start_ms: float, end_ms: float | None, **attributes: Any) -> Span:
    said: Attributes = {key.replace("__", "."): value for key, value in attributes.items()}
    end_ns = 0 if end_ms is None else ZERO + round(end_ms * MS)
    return Span(REQUEST, name, b"", BELOW, ZERO + round(start_ms * MS), end_ns, said)


def _root(end_ms: float | None = 1234, **attributes: Any) -> Span:
    span = _span("chat tiny", 0, end_ms, gen_ai__operation__name="chat", **attributes)
    return msgspec.structs.replace(span, context=TOP)


def _found(service: str, *spans: Span, **fields: Any) -> SpansFound:
    return SpansFound("q", InstanceId(f"{service}-0a"), f"{service}-1", spans=spans, **fields)


def _timeline(*found: SpansFound, silent: tuple[InstanceId, ...] = (), with_steps: bool = False) -> Timeline:
    timeline = timeline_of(REQUEST, Answers(found, silent), with_steps=with_steps)
    assert timeline is not None
    return timeline


def _served(*, with_steps: bool = False) -> Timeline:
    gateway = _found(
        "gateway",
        _root(
            shoal__outcome="completed",
            gen_ai__usage__input_tokens=213,
            gen_ai__usage__cache_read__input_tokens=192,
            gen_ai__usage__output_tokens=40,
            gen_ai__response__time_to_first_chunk=0.0512,
        ),
    )
    scheduler = _found(
        "scheduler",
        _span("queue", 2, 12.5, shoal__prompt__tokens=213),
        _span(
            *("prefill", 13, 51),
            shoal__executor__id="executor-0a",
            shoal__prefill__start=192,
            shoal__prefill__tokens=21,
        ),
        _span(
            *("decode", 51, 1230),
            shoal__executor__id="executor-0a",
            shoal__decode__tokens=40,
            shoal__decode__steps=30,
            shoal__decode__drafts=15,
            shoal__decode__drafts_right=10,
        ),
    )
    executor = _found(
        "executor",
        steps=(StepTaken(7, ZERO + 13 * MS, 38 * MS, 1, 21), StepTaken(8, ZERO + 52 * MS, 5 * MS, 2, 9, 7, 2)),
    )
    detokenizer = _found("detokenizer", _span("detokenize", 12.5, 1233, shoal__detokenize__tokens=40))
    tokenizer = _found("tokenizer", _span("tokenize", 0.5, 1.75, shoal__prompt__tokens=213))
    return _timeline(gateway, tokenizer, scheduler, executor, detokenizer, with_steps=with_steps)


def _drawn(timeline: Timeline, width: int = 120) -> list[str]:
    """The picture's lines, as on a terminal without colours."""
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(picture_of(timeline, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_picture_has_a_line_for_each_phase() -> None:
    lines = _drawn(_served(), 80)
    assert lines == [
        "chat tiny completed after 1,234 ms",
        "213 tokens in, 192 of them cached; 40 out; first text after 51.2 ms",
        "req-00112233445566778899aabbccddeeff  trace 4bf92f3577b34da6a3ce929d0e0e4736",
        "2023-11-14T22:13:20.000+00:00",
        "",
        "     at      took  what                                            where",
        "0.00 ms  1,234 ms  chat tiny                                       gateway-1",
        "0.50 ms   1.25 ms    tokenize, 213 tokens                          tokenizer-1",
        "2.00 ms   10.5 ms    queue, 213 tokens                             scheduler-1",
        "12.5 ms  1,220 ms    detokenize, 40 tokens                         detokenizer-1",
        "13.0 ms   38.0 ms    prefill, 21 tokens from 192                   executor-1",
        "51.0 ms  1,179 ms    decode, 40 tokens in 30 steps, 10 of 15       executor-1",
        "                   guesses right",
        "",
        "2 steps on executor-1: 43.0 ms in all, median 21.5 ms, longest 38.0 ms; between",
        "them 1.00 ms, longest 1.00 ms",
    ]


def test_where_there_is_room_bars_show_when_each_phase_was() -> None:
    spans = [_span("queue", 0, 50), _span("prefill", 25, None, shoal__prefill__tokens=1), _span("decode", 50, 100)]
    spans[2].attributes.update({names.DECODE_TOKENS: 2, names.DECODE_STEPS: 2})
    lines = _drawn(_timeline(_found("scheduler", *spans, _span("preempted", 99.999, 100))), 95)
    assert lines[-5:] == [
        "      at     took  what                           where        0 to 100.0 ms",
        " 0.00 ms  50.0 ms    queue                        scheduler-1  ███████████▌",
        " 25.0 ms        …    prefill, 1 token             scheduler-1       ██████████████████",
        " 50.0 ms  50.0 ms    decode, 2 tokens in 2 steps  scheduler-1             ████████████",
        "100.0 ms  0.00 ms    preempted                    scheduler-1                        █",
    ]


def test_steps_are_a_table_of_their_own() -> None:
    lines = _drawn(_served(with_steps=True))
    assert lines[-3:] == [
        "step       at     took  rows  tokens  guesses  right",
        "   7  13.0 ms  38.0 ms     1      21        0      0",
        "   8  52.0 ms  5.00 ms     2       9        7      2",
    ]


def test_a_request_that_goes_on_says_so() -> None:
    lines = _drawn(_timeline(_found("gateway", _root(None)), _found("scheduler", _span("queue", 2, None))))
    assert lines[0] == "chat tiny goes on"
    assert "queue" in lines[-1]


def test_what_went_wrong_is_said_where_it_did() -> None:
    root = _root(20, shoal__outcome="failed", error__type="deadline_exceeded")
    migration = _span("migration", 3, 9, shoal__reason="executor_lost", shoal__attempt=1)
    decode = _span(
        *("decode", 1, 20),
        shoal__executor__id="executor-dead",
        shoal__decode__tokens=1,
        shoal__decode__steps=1,
        error__type="deadline_exceeded",
    )
    resubmission = _span("resubmission", 4, 5, shoal__reason="scheduler_lost", shoal__attempt=2)
    text = "\n".join(
        _drawn(
            _timeline(
                _found("gateway", root, resubmission),
                _found("scheduler", migration, decode, num_left_out=3),
                silent=(InstanceId("tokenizer-frozen"),),
            )
        )
    )
    for words in (
        "chat tiny failed after 20.0 ms: deadline_exceeded",
        "migration: executor_lost",
        "resubmission (attempt 2): scheduler_lost",
        "decode, 1 token in 1 step: deadline_exceeded",
        "tokenizer-frozen did not answer in time: what it knows is missing",
        "executor-dead is gone: what it knew is missing",
        "3 spans and steps were too many to be kept",
    ):
        assert words in text


def test_a_request_of_which_only_a_part_is_known_is_drawn_too() -> None:
    lines = _drawn(
        _timeline(_found("executor", steps=(StepTaken(1, ZERO, MS, 1, 1),)), _found("scheduler", _span("queue", 0, 1)))
    )
    assert lines[0] == "queue ended after 1.00 ms"


# The command.


class _Gateway:
    """Answers with one timeline, for one key if it has one."""

    def __init__(self) -> None:
        self.url = ""
        self.key: str | None = None
        self.body = msgspec.json.encode(_served(with_steps=True))
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if request.match_info["request_id"] != REQUEST:
            return web.Response(status=404)
        return web.Response(body=self.body, content_type="application/json")


@pytest.fixture
async def gateway() -> AsyncIterator[_Gateway]:
    gateway, application = _Gateway(), web.Application()
    application.add_routes([web.get("/v1/requests/{request_id}/trace", gateway.answer)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield gateway
    await runner.cleanup()


async def _run(home: Path, *arguments: str, **settings: str) -> CompletedProcess[str]:
    return await asyncio.to_thread(shoal, "trace", *arguments, env=environ(home, **settings))


async def test_the_command_draws_what_the_gateway_knows(gateway: _Gateway, tmp_path: Path) -> None:
    done = await _run(tmp_path, REQUEST, "--url", gateway.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("chat tiny completed after 1,234 ms\n")
    assert "\x1b" not in done.stdout
    assert gateway.asked == [f"/v1/requests/{REQUEST}/trace?steps=false"]
    await _run(tmp_path, REQUEST, "--url", gateway.url, "--steps")
    assert gateway.asked[1] == f"/v1/requests/{REQUEST}/trace?steps=true"


async def test_json_is_what_the_gateway_said(gateway: _Gateway, tmp_path: Path) -> None:
    done = await _run(tmp_path, REQUEST, "--url", gateway.url, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(gateway.body)


async def test_a_request_that_nobody_knows_is_status_one(gateway: _Gateway, tmp_path: Path) -> None:
    done = await _run(tmp_path, "req-?/x", "--url", gateway.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "shoal: nothing is known of req-?/x, or not any more\n"
    assert gateway.asked == ["/v1/requests/req-%3F%2Fx/trace?steps=false"]


async def test_the_key_is_sent_and_a_wrong_one_is_a_sentence(gateway: _Gateway, tmp_path: Path) -> None:
    gateway.key = "right"
    assert (await _run(tmp_path, REQUEST, "--url", gateway.url, "--api-key", "right")).returncode == 0
    assert (await _run(tmp_path, REQUEST, "--url", gateway.url, OPENAI_API_KEY="right")).returncode == 0
    done = await _run(tmp_path, REQUEST, "--url", gateway.url, "--api-key", "wrong")
    assert done.returncode == 2
    assert "does not know the key" in done.stderr


async def test_what_is_no_gateway_of_shoal_is_a_sentence(gateway: _Gateway, tmp_path: Path) -> None:
    gateway.body = b'{"spans": 7}'
    done = await _run(tmp_path, REQUEST, "--url", gateway.url)
    assert done.returncode == 2
    assert "is not a Shoal gateway of this version" in done.stderr


async def test_nobody_there_is_a_sentence(tmp_path: Path) -> None:
    done = await _run(tmp_path, REQUEST, "--port", str(free_port()))
    assert done.returncode == 2
    assert "nothing answers at" in done.stderr


async def test_only_one_place_to_ask_can_be_named(tmp_path: Path) -> None:
    done = await _run(tmp_path, REQUEST, "--port", "8000", "--nats-url", "nats://127.0.0.1:4222")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr


async def test_a_mesh_can_be_asked_without_a_gateway(private_nats_server: NatsServer, tmp_path: Path) -> None:
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    identity = Identity(Service.SCHEDULER, InstanceId("scheduler-0a"), "scheduler-1")
    tracing = Tracing(SpanStore(10))
    tracing.record(_span("queue", 0, 7), "somebody else")
    await Answering(identity, transport, tracing).start()
    beat = Presence(identity.service, identity.instance_id, identity.name, ("tiny",), SchedulerStatus())

    async def run(*arguments: str) -> CompletedProcess[str]:
        command, env = ("trace", *arguments, "--nats-url", private_nats_server.url), environ(tmp_path)
        return await run_while_beating(
            lambda: transport.publish(subjects.presence(identity.service), encode(beat)),
            lambda: shoal(*command, env=env),
        )

    done = await run(REQUEST, "--json")
    assert done.returncode == 0, done.stderr
    timeline = json.loads(done.stdout)
    assert [span["name"] for span in timeline["spans"]] == ["queue"]
    assert timeline["instances"] == {"answered": ["scheduler-0a"], "silent": [], "gone": []}
    assert (await run("req-unknown")).returncode == 1
    await transport.close()
