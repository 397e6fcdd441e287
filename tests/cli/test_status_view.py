"""A mesh as its beats show it: who is there, whether it serves, how fast; and the same in words."""

import io
import json

import msgspec
import pytest
from rich.console import Console

from shared.cli.mesh.render import headline, render
from shared.cli.mesh.view import MeshView, Snapshot, encode_json
from shared.clock import FakeClock
from shared.ids import InstanceId, Service
from shared.messages import (
    DetokenizerStatus,
    ExecutorStatus,
    ExecutorView,
    GatewayStatus,
    Presence,
    SchedulerStatus,
    Status,
    TokenizerStatus,
)

EXECUTOR_ID, SCHEDULER_ID = InstanceId("executor-e1"), InstanceId("scheduler-s1")


def _statuses() -> dict[Service, Status]:
    view = ExecutorView(EXECUTOR_ID, "tiny", 3, 2, 400, 300, 50, 20, 7, 12.4)
    return {
        Service.GATEWAY: GatewayStatus("http://127.0.0.1:8000", 5, 2, 70),
        Service.TOKENIZER: TokenizerStatus(8192, 70, 900),
        Service.SCHEDULER: SchedulerStatus((view,), 2, 3, 1000, 250, 500, 4),
        Service.EXECUTOR: ExecutorStatus(SCHEDULER_ID, 1, "cpu", 10, 1500, 1.0, 40, 30),
        Service.DETOKENIZER: DetokenizerStatus(3, 500),
    }


def _beat(
    service: Service,
    status: Status | None = None,
    *,
    number: int = 1,
    num_dropped: int = 0,
    is_draining: bool = False,
    is_leaving: bool = False,
) -> Presence:
    return Presence(
        service,
        InstanceId(f"{service}-{service[0]}{number}"),
        f"{service}-{number}",
        () if service is Service.GATEWAY else ("tiny",),
        status or _statuses()[service],
        num_dropped,
        is_draining,
        is_leaving,
    )


class _World:
    def __init__(self) -> None:
        self.clock = FakeClock(start=50.0)
        self.view = MeshView(self.clock)

    def beat_all(self, *, without: Service | None = None) -> None:
        for service in Service:
            if service is not without:
                self.view.observe(_beat(service))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.clock.advance(0.25)
            self.view.tick()

    def states(self) -> dict[str, str]:
        return {row.name: row.state for row in self.view.snapshot().instances}


@pytest.fixture
def world() -> _World:
    return _World()


def _shown(snapshot: Snapshot, width: int = 260) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render(snapshot, width))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_an_empty_mesh_cannot_serve(world: _World) -> None:
    snapshot = world.view.snapshot()
    assert not snapshot.can_serve
    assert snapshot.instances == ()
    assert "Nobody is there" in headline(snapshot).plain


def test_a_whole_mesh_can_serve(world: _World) -> None:
    world.beat_all()
    snapshot = world.view.snapshot()
    assert snapshot.can_serve
    assert snapshot.missing == {"tiny": ()}
    assert headline(snapshot).plain == "Serves tiny."
    assert [row.service for row in snapshot.instances] == list(Service)


@pytest.mark.parametrize("service", Service)
def test_a_mesh_that_lacks_a_service_cannot_serve_and_says_which(world: _World, service: Service) -> None:
    world.beat_all(without=service)
    snapshot = world.view.snapshot()
    assert not snapshot.can_serve
    assert snapshot.missing == {"tiny": (service,)}
    assert headline(snapshot).plain == f"Cannot serve tiny: there is no {service} that takes work."


@pytest.mark.parametrize("service", Service)
def test_a_service_that_drains_is_there_but_takes_no_work(world: _World, service: Service) -> None:
    world.beat_all(without=service)
    world.view.observe(_beat(service, is_draining=True))
    assert not world.view.snapshot().can_serve
    assert world.states()[f"{service}-1"] == "draining"


def test_silence_is_loss_that_is_shown_for_a_while(world: _World) -> None:
    world.beat_all()
    for _ in range(8):
        world.beat_all(without=Service.EXECUTOR)
        world.pass_time(0.5)
    assert world.states()["executor-1"] == "lost"
    assert world.states()["scheduler-1"] == "up"
    assert not world.view.snapshot().can_serve
    world.pass_time(40)
    assert "executor-1" not in world.states()


def test_who_is_said_to_have_died_is_lost_at_once(world: _World) -> None:
    world.beat_all()
    world.view.observe(msgspec.structs.replace(_beat(Service.EXECUTOR), is_leaving=True, has_died=True))
    assert world.states()["executor-1"] == "lost"


def test_who_comes_back_is_no_longer_lost(world: _World) -> None:
    world.beat_all()
    world.pass_time(5)
    assert set(world.states().values()) == {"lost"}
    world.beat_all()
    assert set(world.states().values()) == {"up"}


def test_who_leaves_is_gone_at_once(world: _World) -> None:
    world.beat_all()
    world.view.observe(_beat(Service.EXECUTOR, is_leaving=True))
    assert "executor-1" not in world.states()


def test_the_age_is_that_of_the_last_beat(world: _World) -> None:
    world.beat_all()
    world.pass_time(0.75)
    world.view.observe(_beat(Service.GATEWAY))
    ages = {row.name: row.age_s for row in world.view.snapshot().instances}
    assert (ages["gateway-1"], ages["executor-1"]) == (0.0, 0.75)


def test_queues_blocks_and_cache_are_those_of_the_scheduler(world: _World) -> None:
    world.beat_all()
    snapshot = world.view.snapshot()
    (queue,), (executor,) = snapshot.queues, snapshot.executors
    assert (queue.num_waiting, queue.num_running, queue.num_preemptions, queue.cache_hit_share) == (2, 3, 4, 0.25)
    assert executor.blocks is not None
    assert (executor.blocks.num_blocks, executor.blocks.num_free_blocks, executor.blocks.num_cached_blocks) == (
        400,
        300,
        50,
    )
    assert (executor.device, executor.held_by) == ("cpu", "scheduler-1")


def test_speed_needs_two_beats_and_is_the_growth_between_them(world: _World) -> None:
    world.beat_all()
    assert world.view.snapshot().queues[0].output_tokens_per_s is None
    world.pass_time(0.5)
    world.view.observe(_beat(Service.SCHEDULER, SchedulerStatus(num_output_tokens=530)))
    world.view.observe(_beat(Service.EXECUTOR, ExecutorStatus(SCHEDULER_ID, 1, "cpu", 20, 1600, 1.4)))
    snapshot = world.view.snapshot()
    assert snapshot.queues[0].output_tokens_per_s == pytest.approx(60)
    assert snapshot.executors[0].computed_tokens_per_s == pytest.approx(200)
    assert snapshot.executors[0].busy_share == pytest.approx(0.8)


def test_speed_is_that_of_the_last_three_seconds(world: _World) -> None:
    num_tokens = 0
    for second in range(20):
        num_tokens += 1000 if second < 10 else 10
        world.view.observe(_beat(Service.SCHEDULER, SchedulerStatus(num_output_tokens=num_tokens)))
        world.pass_time(1.0)
    assert world.view.snapshot().queues[0].output_tokens_per_s == pytest.approx(10)


def test_dropped_messages_are_summed_and_shown_where_they_were_dropped(world: _World) -> None:
    world.beat_all()
    world.view.observe(_beat(Service.EXECUTOR, num_dropped=3))
    world.view.observe(_beat(Service.GATEWAY, num_dropped=4))
    snapshot = world.view.snapshot()
    assert snapshot.num_dropped_messages == 7
    assert _shown(snapshot).count("messages dropped") == 2


def test_addresses_of_metrics_are_shown_if_there_are_any(world: _World) -> None:
    world.beat_all()
    assert "Metrics" not in _shown(world.view.snapshot())
    for service in (Service.EXECUTOR, Service.GATEWAY):
        address = f"http://127.0.0.1:{9000 + len(service)}"
        world.view.observe(msgspec.structs.replace(_beat(service), metrics_address=address))
    shown = " ".join(_shown(world.view.snapshot()).split())
    assert "Metrics: gateway-1 http://127.0.0.1:9007, executor-1 http://127.0.0.1:9008" in shown
    rows = json.loads(encode_json(world.view.snapshot()))["instances"]
    assert {row["name"]: row["metrics_address"] for row in rows}["gateway-1"] == "http://127.0.0.1:9007"


def test_two_instances_with_one_name_are_two_rows(world: _World) -> None:
    world.beat_all()
    other = Presence(Service.SCHEDULER, InstanceId("scheduler-zz"), "scheduler-1", (), SchedulerStatus(num_waiting=77))
    world.view.observe(other)
    snapshot = world.view.snapshot()
    assert [queue.num_waiting for queue in snapshot.queues] == [2, 77]
    assert "77 waiting" in _shown(snapshot)
    assert "2 waiting" in _shown(snapshot)


def test_all_numbers_are_shown(world: _World) -> None:
    world.beat_all()
    world.pass_time(0.5)
    world.beat_all()
    shown = _shown(world.view.snapshot())
    for words in (
        "Serves tiny.",
        "5 open, 70 so far, 2 connections · http://127.0.0.1:8000",
        "70 prompts, 900 tokens so far",
        "2 waiting, 3 running · 0 tokens/s out · 25% of prompt tokens from cache · 4 preemptions",
        "cpu · held by scheduler-1 · busy 0% · 0 tokens/s computed · 75% of guesses right · ",
        " · blocks 300 free of 400, 50 cached, 20 pinned · 7 blocks evicted, 12 s of work after they were used",
        "3 open choices, 500 tokens so far",
    ):
        assert words in shown


def test_an_executor_that_evicted_nothing_says_nothing_of_it(world: _World) -> None:
    view = ExecutorView(EXECUTOR_ID, "tiny", 0, 0, 400, 400, 50)
    world.beat_all()
    world.view.observe(_beat(Service.SCHEDULER, SchedulerStatus((view,))))
    shown = _shown(world.view.snapshot())
    assert "blocks 400 free of 400, 50 cached, 0 pinned" in shown
    assert "evicted" not in shown


def test_a_narrow_terminal_gets_what_is_done_below_the_names(world: _World) -> None:
    world.beat_all()
    lines = _shown(world.view.snapshot(), width=60).splitlines()
    assert all(len(line) <= 60 for line in lines)
    name = next(number for number, line in enumerate(lines) if line.startswith("detokenizer-1  up  tiny"))
    assert lines[name + 1].strip() == "3 open choices, 500 tokens so far"


def test_one_of_a_kind_is_no_plural(world: _World) -> None:
    world.beat_all()
    world.view.observe(_beat(Service.EXECUTOR, num_dropped=1))
    assert "1 message dropped" in _shown(world.view.snapshot())


def test_without_the_broker_the_picture_is_called_old(world: _World) -> None:
    world.beat_all()
    assert "NATS cannot be reached" in headline(world.view.snapshot(), is_connected=False).plain


def test_json_has_names_down_to_the_last_status(world: _World) -> None:
    world.beat_all()
    plain = json.loads(encode_json(world.view.snapshot()))
    assert plain["can_serve"] is True
    assert plain["missing"] == {"tiny": []}
    assert plain["instances"][0]["status"]["num_open_requests"] == 5
    assert plain["executors"][0]["blocks"]["num_blocks"] == 400
