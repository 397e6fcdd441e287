"""`shoal usage` as a process, against a broker with records that the test has written."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from shared import subjects
from shared.codec import encode
from shared.ids import InstanceId, RequestId
from shared.messages import USAGE_LEDGER, Outcome, Usage, UsageRecord
from shared.transport.nats import NatsTransport
from tests.cli.shoal import environ, shoal
from tests.conftest import NatsServer


def _record(
    number: int,
    *,
    day: str = "2021-05-06",
    tenant: str = "acme",
    model: str = "tiny",
    outcome: Outcome = Outcome.COMPLETED,
    error_code: str | None = None,
) -> UsageRecord:
    ended_at = datetime.fromisoformat(f"{day}T23:59:59.250").replace(tzinfo=UTC).timestamp()
    usage = Usage(1000, 400, (number, 2))
    who = InstanceId("gateway-1")
    return UsageRecord(RequestId(f"req-{number}"), tenant, model, outcome, usage, ended_at, who, error_code)


class _Mesh:
    def __init__(self, url: str, home: Path) -> None:
        self.transport = NatsTransport(url, name="test")
        self._url = url
        self._home = home

    async def keep(self, record: UsageRecord, record_id: str | None = None) -> None:
        ledger = self.transport.ledger(USAGE_LEDGER, subjects.USAGE)
        await ledger.append(record_id or record.request_id, encode(record))

    async def run(self, *arguments: str) -> CompletedProcess[str]:
        command = ("usage", *arguments, "--nats-url", self._url)
        return await asyncio.to_thread(shoal, *command, env=environ(self._home))


@pytest.fixture
async def mesh(private_nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[_Mesh]:
    private_nats_server.start()
    mesh = _Mesh(private_nats_server.url, tmp_path)
    await mesh.transport.connect()
    yield mesh
    await mesh.transport.close()


async def test_sums_are_by_day_tenant_and_model_with_a_total(mesh: _Mesh) -> None:
    await mesh.keep(_record(10))
    await mesh.keep(_record(20, outcome=Outcome.CANCELLED))
    await mesh.keep(_record(30, tenant="zoo"))
    await mesh.keep(_record(40, day="2021-05-05", model="huge"))
    done = await mesh.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "day         tenant  model  requests  completed  prompt  of which cached  output",
        "2021-05-05  acme    huge          1          1   1,000              400      42",
        "2021-05-06  acme    tiny          2          1   2,000              800      34",
        "2021-05-06  zoo     tiny          1          1   1,000              400      32",
        "all                               4          3   4,000            1,600     108",
    ]


async def test_records_are_listed_as_json_in_the_order_they_came(mesh: _Mesh) -> None:
    await mesh.keep(_record(20, outcome=Outcome.FAILED, error_code="stalled"))
    await mesh.keep(_record(10))
    done = await mesh.run("--json")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == {
        "request_id": "req-20",
        "tenant": "acme",
        "model": "tiny",
        "outcome": "failed",
        "error_code": "stalled",
        "num_prompt_tokens": 1000,
        "num_cached_tokens": 400,
        "num_output_tokens": 22,
        "num_choices": 2,
        "ended_at": "2021-05-06T23:59:59.250+00:00",
        "recorded_by": "gateway-1",
    }
    assert (second["request_id"], second["error_code"]) == ("req-10", None)


async def test_a_request_is_counted_once_even_if_the_broker_has_it_twice(mesh: _Mesh) -> None:
    await mesh.keep(_record(10))
    await mesh.keep(_record(10), record_id="as if the hour were over")
    assert len((await mesh.run("--json")).stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (("--tenant", "zoo"), [30]),
        (("--model", "huge"), [40]),
        (("--since", "2021-05-06"), [10, 30]),
        (("--until", "2021-05-06"), [40]),
        (("--since", "2021-05-06", "--until", "2021-05-07", "--tenant", "acme"), [10]),
        (("--since", "2021-05-07"), []),
    ],
)
async def test_what_is_not_asked_for_is_left_out(mesh: _Mesh, arguments: tuple[str, ...], numbers: list[int]) -> None:
    """All of them are kept today, whatever day they are of."""
    await mesh.keep(_record(10))
    await mesh.keep(_record(30, tenant="zoo"))
    await mesh.keep(_record(40, day="2021-05-05", model="huge"))
    done = await mesh.run("--json", *arguments)
    assert [json.loads(line)["num_output_tokens"] - 2 for line in done.stdout.splitlines()] == numbers


async def test_a_mesh_without_records_says_so(mesh: _Mesh) -> None:
    done = await mesh.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no usage is recorded\n")


async def test_a_broker_without_jetstream_is_the_operators_to_mend(
    private_nats_server: NatsServer, tmp_path: Path
) -> None:
    private_nats_server.has_jetstream = False
    private_nats_server.start()
    done = await asyncio.to_thread(shoal, "usage", "--nats-url", private_nats_server.url, env=environ(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: the usage records cannot be read: ")
    assert "JetStream" in done.stderr
