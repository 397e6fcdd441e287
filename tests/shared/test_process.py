"""From `__main__` to a running actor, in a process of its own: settings, logs, signals, exit status."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from shared import health, subjects, usage
from shared.cli.mesh import supervisor
from shared.cli.mesh.ports import free_port
from shared.codec import Decoder, encode
from shared.ids import InstanceId, Service, new_instance_id
from shared.messages import AttachExecutor, Presence
from shared.transport import nats
from shared.transport.nats import NatsTransport
from tests.conftest import NatsServer
from tests.shared.telemetry.scrape import fetch, scrape
from tests.shared.transport.receiver import LITTLE_S, PATIENCE_S, Receiver, settle

Spawn = Callable[..., Awaitable[Process]]
UNREACHABLE = "NATS cannot be reached; trying until it can"


@pytest.fixture
async def spawn(nats_url: str) -> AsyncIterator[Spawn]:
    """Starts the echo service with settings, and makes sure that it is gone at the end."""
    started: list[Process] = []

    async def spawn(*arguments: str, **settings: str) -> Process:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        environ |= {"SHOAL_NATS_URL": nats_url, "SHOAL_LOG_FORMAT": "json"} | settings
        command = [sys.executable, "-m", "tests.shared.echo_service", *arguments]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=environ)
        started.append(process)
        return process

    yield spawn
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _end(process: Process) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def _until(process: Process, event: str) -> list[str]:
    """Read the service's log until an event; returns the events so far."""
    assert process.stderr is not None
    events: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while event not in events:
            line = await process.stderr.readline()
            assert line, f"ended before {event!r}; it said {events}"
            events.append(json.loads(line)["event"])
    return events


@contextlib.asynccontextmanager
async def _peer(url: str) -> AsyncIterator[NatsTransport]:
    transport = NatsTransport(url, name="peer")
    await asyncio.wait_for(transport.connect(), PATIENCE_S)
    try:
        yield transport
    finally:
        await transport.close()


async def _instance(peer: NatsTransport, name: str) -> InstanceId:
    """The id of the service with this name, from its beat."""
    beats = Receiver()
    subscription = await peer.subscribe(subjects.presence(Service.DETOKENIZER), beats)
    decoder: Decoder[Presence] = Decoder(Presence)
    for count in range(1, 1000):
        beat = decoder.decode((await beats.wait_for(count))[-1])
        if beat.name == name:
            await subscription.unsubscribe()
            return beat.instance_id
    raise AssertionError(f"no beat of {name}")


async def test_a_supervisor_may_say_what_its_id_is(spawn: Spawn, nats_url: str) -> None:
    name, given = uuid.uuid4().hex, new_instance_id(Service.DETOKENIZER)
    await spawn(SHOAL_INSTANCE_NAME=name, SHOAL_INSTANCE_ID=given)
    async with _peer(nats_url) as peer:
        assert await _instance(peer, name) == given


async def test_an_instance_may_be_named_after_its_host(spawn: Spawn, nats_url: str) -> None:
    prefix = uuid.uuid4().hex
    await spawn(SHOAL_INSTANCE_NAME=f"{prefix}-{{hostname}}")
    async with _peer(nats_url) as peer:
        assert await _instance(peer, f"{prefix}-{socket.gethostname()}")


async def test_an_id_that_is_none_is_refused_in_one_sentence(spawn: Spawn) -> None:
    process = await spawn(SHOAL_INSTANCE_ID="gateway-0123abcd")
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 2
    assert process.stderr is not None
    assert b"SHOAL_INSTANCE_ID" in await process.stderr.read()


async def test_it_works_until_sigterm_and_exits_with_zero(spawn: Spawn, nats_url: str) -> None:
    name = uuid.uuid4().hex
    process = await spawn(SHOAL_INSTANCE_NAME=name, SHOAL_DETOKENIZER_ECHO_TO=f"echo.{name}")
    async with _peer(nats_url) as peer:
        instance_id, echoes, beats = await _instance(peer, name), Receiver(), Receiver()
        assert instance_id.startswith("detokenizer-")
        await peer.subscribe(f"echo.{name}", echoes)
        await peer.subscribe(subjects.presence(Service.DETOKENIZER), beats)
        await settle(peer)
        message = encode(AttachExecutor(InstanceId("scheduler-1")))
        await peer.publish(subjects.inbox(instance_id), message)
        assert await echoes.wait_for(1) == [message]
        process.send_signal(signal.SIGTERM)
        status, out, err = await _end(process)
        await settle(peer)
    assert (status, out) == (0, "")
    events = [json.loads(line) for line in err.splitlines()]
    said = [event["event"] for event in events if event["event"] != UNREACHABLE]  # a busy broker takes its time
    assert said == ["configured", "started", "draining", "stopped"]
    assert all(event["instance"] == name for event in events)
    assert events[0]["SHOAL_NATS_URL"] == nats_url
    last = [beat for beat in map(Decoder[Presence](Presence).decode, beats.payloads) if beat.name == name][-1]
    assert last.is_leaving


async def test_sigint_drains_like_sigterm(spawn: Spawn) -> None:
    process = await spawn()
    await _until(process, "started")
    process.send_signal(signal.SIGINT)
    status, _, err = await _end(process)
    assert status == 0
    assert "Traceback" not in err


async def test_the_drain_deadline_ends_even_a_busy_service(spawn: Spawn) -> None:
    process = await spawn(SHOAL_DETOKENIZER_MODE="busy-for-ever", SHOAL_DRAIN_DEADLINE_S="0.5")
    await _until(process, "started")
    process.send_signal(signal.SIGTERM)
    await _until(process, "draining")
    status, _, _ = await _end(process)
    assert status == 0


async def test_bad_settings_are_one_plain_sentence_and_exit_status_two(spawn: Spawn) -> None:
    process = await spawn(SHOAL_LOG_LEVEL="loud", SHOAL_DETOKENIZER_MOED="work")
    status, out, err = await _end(process)
    assert (status, out) == (2, "")
    assert err == (
        "detokenizer: SHOAL_LOG_LEVEL='loud': must be one of debug, info, warning, error; "
        "SHOAL_DETOKENIZER_MOED is not a setting; did you mean SHOAL_DETOKENIZER_MODE?\n"
    )


async def test_an_address_that_is_none_is_the_operators_to_mend(spawn: Spawn) -> None:
    process = await spawn(SHOAL_NATS_URL="nats://me:hunter2@host:99999")
    status, _, err = await _end(process)
    assert status == 2
    assert err.startswith("detokenizer: SHOAL_NATS_URL='nats://(hidden)@host:99999': ")
    assert "hunter2" not in err


async def test_what_the_operator_must_mend_ends_with_its_sentence_and_status_two(spawn: Spawn) -> None:
    process = await spawn(SHOAL_DETOKENIZER_MODE="no-model")
    status, _, err = await _end(process)
    assert status == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1] == ("detokenizer: the model tiny is not in the store; fetch it with `shoal pull tiny`")


@pytest.mark.parametrize("mode", ["bug-in-build", "bug-in-handler"])
async def test_a_bug_is_logged_once_with_its_traceback_and_exits_with_one(
    spawn: Spawn, nats_url: str, mode: str
) -> None:
    name = uuid.uuid4().hex
    process = await spawn(SHOAL_DETOKENIZER_MODE=mode, SHOAL_INSTANCE_NAME=name)
    if mode == "bug-in-handler":
        async with _peer(nats_url) as peer:
            instance_id = await _instance(peer, name)
            await peer.publish(subjects.inbox(instance_id), encode(AttachExecutor(InstanceId("scheduler-1"))))
    status, _, err = await _end(process)
    assert status == 1
    failures = [event for event in map(json.loads, err.splitlines()) if event["level"] == "critical"]
    assert [failure["event"] for failure in failures] == ["a bug ends this process"]
    assert "ZeroDivisionError: a bug" in failures[0]["exception"]


async def test_it_waits_for_a_broker_that_comes_later(spawn: Spawn, private_nats_server: NatsServer) -> None:
    process = await spawn(SHOAL_NATS_URL=private_nats_server.url)
    events = await _until(process, UNREACHABLE)
    assert "started" not in events
    private_nats_server.start()
    await _until(process, "started")
    process.send_signal(signal.SIGTERM)
    assert (await _end(process))[0] == 0


async def test_it_survives_a_broker_that_restarts(spawn: Spawn, private_nats_server: NatsServer) -> None:
    private_nats_server.start()
    name = uuid.uuid4().hex
    process = await spawn(SHOAL_NATS_URL=private_nats_server.url, SHOAL_INSTANCE_NAME=name)
    await _until(process, "started")
    private_nats_server.stop()
    private_nats_server.start()
    await _until(process, "connected to NATS again")
    async with _peer(private_nats_server.url) as peer:
        await asyncio.wait_for(_instance(peer, name), PATIENCE_S)
    process.send_signal(signal.SIGTERM)
    assert (await _end(process))[0] == 0


async def test_a_drain_without_a_broker_ends_well(spawn: Spawn, private_nats_server: NatsServer) -> None:
    private_nats_server.start()
    process = await spawn(SHOAL_NATS_URL=private_nats_server.url)
    await _until(process, "started")
    private_nats_server.stop()
    await _until(process, "lost the connection to NATS")
    process.send_signal(signal.SIGTERM)
    assert (await _end(process))[0] == 0


async def test_a_drain_ends_in_time_although_the_broker_is_frozen(
    spawn: Spawn, private_nats_server: NatsServer
) -> None:
    private_nats_server.start()
    process = await spawn(SHOAL_NATS_URL=private_nats_server.url, SHOAL_DRAIN_DEADLINE_S="0.5")
    await _until(process, "started")
    private_nats_server.freeze()
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert (await _end(process))[0] == 0
    assert time.monotonic() - began < 0.5 + LITTLE_S


def test_what_a_process_does_after_its_drain_deadline_takes_less_than_shoal_up_leaves_it() -> None:
    assert usage.STOP_WITHIN_S + nats._CLOSE_WITHIN_S < supervisor._GRACE_S


async def test_a_signal_while_it_waits_for_a_frozen_broker_ends_it(
    spawn: Spawn, private_nats_server: NatsServer
) -> None:
    private_nats_server.start()
    private_nats_server.freeze()
    process = await spawn(SHOAL_NATS_URL=private_nats_server.url)
    await _until(process, UNREACHABLE)
    process.send_signal(signal.SIGTERM)
    assert (await _end(process))[0] == 0


async def test_a_signal_while_it_waits_for_the_broker_ends_it(spawn: Spawn) -> None:
    process = await spawn(SHOAL_NATS_URL=f"nats://127.0.0.1:{free_port()}")
    await _until(process, UNREACHABLE)
    process.send_signal(signal.SIGTERM)
    status, _, err = await _end(process)
    assert status == 0
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["stopped"]


async def test_a_signal_while_it_builds_ends_it(spawn: Spawn) -> None:
    process = await spawn(SHOAL_DETOKENIZER_MODE="build-for-ever")
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), PATIENCE_S) == b"building\n"
    process.send_signal(signal.SIGTERM)
    status, _, err = await _end(process)
    assert status == 0
    assert "Traceback" not in err


async def test_settings_can_be_listed(spawn: Spawn) -> None:
    status, out, err = await _end(await spawn("--settings", SHOAL_LOG_LEVEL="even when they are wrong"))
    assert (status, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines["SHOAL_MODEL"].endswith("name of the model in the store that this instance serves [smollm2-135m]")
    assert lines["SHOAL_LOG_LEVEL"].endswith("(debug, info, warning, error) [info]")
    assert lines["SHOAL_DETOKENIZER_ECHO_TO"].endswith("subject to repeat messages to [echo]")


async def test_a_service_touches_its_health_file_while_it_works_and_not_before(spawn: Spawn, tmp_path: Path) -> None:
    file = tmp_path / "healthy"
    process = await spawn(SHOAL_DETOKENIZER_MODE="build-for-ever", SHOAL_HEALTH_FILE=str(file))
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await process.stdout.readline() == b"building\n"
    await _until_touched_again(health.alive_file(file))  # it loads for as long as it likes, and is alive
    assert not file.exists()

    await spawn(SHOAL_HEALTH_FILE=str(file))
    await _until_touched(file)
    await asyncio.to_thread(file.unlink)
    await _until_touched(file)


async def test_without_a_connection_a_service_is_not_healthy(
    spawn: Spawn, tmp_path: Path, private_nats_server: NatsServer
) -> None:
    private_nats_server.start()
    file = tmp_path / "healthy"
    process = await spawn(SHOAL_HEALTH_FILE=str(file), SHOAL_NATS_URL=private_nats_server.url)
    await _until_touched(file)
    private_nats_server.stop()
    await _until(process, "lost the connection to NATS")
    await _until_touched_again(health.alive_file(file))  # so what it began to say before has been said
    file.unlink(missing_ok=True)
    for _ in range(3):
        await _until_touched_again(health.alive_file(file))  # without the broker too, so that nobody restarts it
    assert not file.exists()
    private_nats_server.start()
    await _until_touched(file)


async def test_a_service_that_waits_for_the_broker_from_its_start_is_alive(
    spawn: Spawn, tmp_path: Path, private_nats_server: NatsServer
) -> None:
    file = tmp_path / "healthy"
    await spawn(SHOAL_HEALTH_FILE=str(file), SHOAL_NATS_URL=private_nats_server.url)
    for _ in range(3):
        await _until_touched_again(health.alive_file(file))
    assert not file.exists()


async def _until_touched_again(file: Path) -> None:
    await _until_touched(file)
    await asyncio.to_thread(file.unlink)
    await _until_touched(file)


async def _until_touched(file: Path) -> None:
    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not file.exists():
            assert time.monotonic() < deadline, f"nobody touched {file}"
            time.sleep(0.05)

    await asyncio.to_thread(wait)


async def test_metrics_and_probes_have_a_port_of_their_own(spawn: Spawn) -> None:
    port = free_port()
    process = await spawn(SHOAL_METRICS_PORT=str(port))
    await _until(process, "showing metrics")
    page = await scrape(f"http://127.0.0.1:{port}")
    assert page.value("shoal_broker_connected") == 1
    assert (await fetch(f"http://127.0.0.1:{port}/readyz"))[0] == 200
    process.send_signal(signal.SIGTERM)
    assert (await _end(process))[0] == 0
