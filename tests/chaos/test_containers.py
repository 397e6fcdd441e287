"""The mesh in containers as chaos uses it, with a `docker` that only writes down what it is told."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from shared.ids import Service
from tests.chaos import containers, faults
from tests.chaos.containers import ContainerInstance, ContainerMesh, instance_name
from tests.chaos.fake_docker import FakeDocker
from tests.chaos.faults import Blow, strike, strike_all
from tests.chaos.mesh import NUM_EACH, SETTINGS
from tests.compose.docker import ROOT, Container, TrialFailed


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """The command `docker`, as long as the test goes on."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return FakeDocker(folder)


@pytest.fixture
def mesh(docker: FakeDocker, tmp_path: Path) -> Iterator[ContainerMesh]:
    """A mesh that has started; what was called for that is forgotten."""
    (tmp_path / "home/models").mkdir(parents=True)
    mesh = ContainerMesh(tmp_path, tmp_path / "home")
    mesh.start()
    docker.forget_calls()
    yield mesh
    mesh.stop()


class Heard:
    """Beats in which one instance is the busiest."""

    def __init__(self, busiest: str | None) -> None:
        self._busiest = busiest

    def busiest(self, service: Service) -> str | None:
        return self._busiest


def executor(mesh: ContainerMesh) -> ContainerInstance:
    """One to strike."""
    return mesh.of(Service.EXECUTOR)[0]


def test_two_of_each_service_come_up_behind_one_front(docker: FakeDocker, tmp_path: Path) -> None:
    mesh = ContainerMesh(tmp_path, tmp_path)
    mesh.start()
    (up,) = docker.calls
    assert all(f"--scale {service}={NUM_EACH}" in up for service in Service)
    assert f"--file {ROOT / 'compose.yaml'} --file {tmp_path}" in up
    assert len(mesh.urls) == 1
    assert {service: len(mesh.of(service)) for service in Service} == dict.fromkeys(Service, NUM_EACH)


def test_containers_get_the_settings_of_chaos_and_tests_a_port_of_the_broker(tmp_path: Path) -> None:
    mesh = ContainerMesh(tmp_path, tmp_path)
    (file,) = tmp_path.glob("*.json")
    services = json.loads(file.read_text())["services"]
    assert all(services[service]["environment"] == SETTINGS for service in Service)
    port = mesh.nats_url.rpartition(":")[2]
    assert services["nats"]["ports"] == [f"127.0.0.1:{port}:4222"]
    assert mesh.nats_url.startswith("nats://operator:")


def test_everybody_may_read_the_store(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    (home / "models/weights").write_bytes(b"")
    (home / "models/weights").chmod(0o600)
    home.chmod(0o700)
    ContainerMesh(tmp_path, home)
    assert home.stat().st_mode & 0o777 == 0o755
    assert (home / "models/weights").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("service", Service)
def test_an_instance_is_called_what_compose_has_it_call_itself(service: Service) -> None:
    container = Container("0123456789abcdef", "shoal-1", service, is_running=True, is_healthy=True)
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    named_by_docker = services[service]["environment"]["SHOAL_INSTANCE_NAME"].replace("{hostname}", "0123456789ab")
    assert "hostname" not in services[service]
    assert instance_name(container) == named_by_docker


def test_what_is_killed_is_started_again_as_the_same_container(docker: FakeDocker, mesh: ContainerMesh) -> None:
    struck = executor(mesh)
    struck.kill()
    assert docker.calls == [f"kill {struck.id}", f"start {struck.id}"]
    assert mesh.died == []


def test_what_died_a_moment_before_it_was_killed_is_started_too(docker: FakeDocker, mesh: ContainerMesh) -> None:
    struck = executor(mesh)
    docker.change(struck.id, status="exited")
    struck.kill()
    assert docker.calls[-1] == f"start {struck.id}"


def test_what_is_told_to_stop_ends_by_itself_and_is_started_again(docker: FakeDocker, mesh: ContainerMesh) -> None:
    struck = executor(mesh)
    struck.terminate()
    assert docker.calls == [f"stop {struck.id}", f"start {struck.id}"]
    assert mesh.died == []


@pytest.mark.parametrize(("health", "status"), [("healthy", 137), ("healthy", 143), ("healthy", 1), ("starting", 1)])
def test_a_wrong_end_after_the_word_to_stop_is_told(
    docker: FakeDocker, mesh: ContainerMesh, health: str, status: int
) -> None:
    struck = executor(mesh)
    docker.change(struck.id, health=health, exit_status_when_stopped=status, last_words="I will not")
    struck.terminate()
    assert mesh.died == [f"{struck.name} told to stop, ended with status {status}: I will not"]


def test_what_has_not_started_yet_may_be_ended_by_the_signal_itself(docker: FakeDocker, mesh: ContainerMesh) -> None:
    docker.change(executor(mesh).id, health="starting", exit_status_when_stopped=143)
    executor(mesh).terminate()
    assert mesh.died == []


def test_what_is_frozen_goes_on_once(docker: FakeDocker, mesh: ContainerMesh) -> None:
    struck = executor(mesh)
    struck.freeze()
    struck.thaw()
    struck.thaw()
    assert docker.calls == [f"pause {struck.id}", f"unpause {struck.id}"]


@pytest.mark.parametrize("end", [ContainerInstance.kill, ContainerInstance.terminate])
def test_what_is_frozen_goes_on_before_it_is_ended(
    docker: FakeDocker, mesh: ContainerMesh, end: Callable[[ContainerInstance], None]
) -> None:
    struck = executor(mesh)
    struck.freeze()
    end(struck)
    struck.thaw()
    assert [call.split()[0] for call in docker.calls][:2] == ["pause", "unpause"]
    assert docker.calls[-1] == f"start {struck.id}"


def test_what_escapes_a_freeze_is_frozen_at_the_next_try(docker: FakeDocker, mesh: ContainerMesh) -> None:
    struck = executor(mesh)
    docker.change(struck.id, num_escapes=2)
    struck.freeze()
    assert docker.calls == [f"pause {struck.id}"] * 3


def test_a_blow_that_docker_refuses_is_no_blow(
    docker: FakeDocker, mesh: ContainerMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "_PAUSE_S", 0.1)
    docker.change(executor(mesh).id, status="exited")
    with pytest.raises(TrialFailed, match="stands still"):
        executor(mesh).freeze()


async def test_an_end_that_nobody_brought_about_is_told_once(docker: FakeDocker, mesh: ContainerMesh) -> None:
    struck = executor(mesh)
    docker.change(struck.id, num_restarts=1, last_words="out of luck")
    for _ in range(2):
        async with mesh.supervised():
            pass
    assert mesh.died == [f"{struck.name} ended by itself: out of luck"]


async def test_the_front_and_the_broker_may_not_die_either(docker: FakeDocker, mesh: ContainerMesh) -> None:
    for container_id in docker.ids("front", "nats"):
        docker.change(container_id, num_restarts=1)
    async with mesh.supervised():
        pass
    assert len(mesh.died) == 2


def test_ends_are_counted_anew_after_a_blow(docker: FakeDocker, mesh: ContainerMesh) -> None:
    struck = executor(mesh)
    docker.change(struck.id, num_restarts=1)
    struck.kill()
    docker.change(struck.id, num_restarts=1)
    struck.kill()
    assert len(mesh.died) == 2


def test_renewing_kills_all_but_the_broker_and_the_front(docker: FakeDocker, mesh: ContainerMesh) -> None:
    mesh.renew()
    killed = [call.split()[1] for call in docker.calls if call.startswith("kill")]
    assert sorted(killed) == sorted(instance.id for instance in mesh.instances)


async def test_the_broker_is_killed_and_started_again(docker: FakeDocker, mesh: ContainerMesh) -> None:
    await mesh.restart_broker(0.0)
    (broker,) = docker.ids("nats")
    assert docker.calls == [f"kill {broker}", f"start {broker}"]


async def test_the_broker_stands_still_and_goes_on(docker: FakeDocker, mesh: ContainerMesh) -> None:
    await mesh.freeze_broker(0.0)
    (broker,) = docker.ids("nats")
    assert docker.calls == [f"pause {broker}", f"unpause {broker}"]


async def test_a_blow_hits_the_busiest_by_the_name_in_its_beats(docker: FakeDocker, mesh: ContainerMesh) -> None:
    second = mesh.of(Service.GATEWAY)[1]
    assert await strike(mesh, Heard(second.name), Service.GATEWAY, Blow.KILL) == second.name
    assert docker.calls[0] == f"kill {second.id}"


async def test_a_blow_hits_anybody_if_nobody_is_heard(docker: FakeDocker, mesh: ContainerMesh) -> None:
    first = mesh.of(Service.GATEWAY)[0]
    assert await strike(mesh, Heard(None), Service.GATEWAY, Blow.TERMINATE) == first.name
    assert docker.calls[0] == f"stop {first.id}"


async def test_a_blow_may_hit_all_at_once(
    docker: FakeDocker, mesh: ContainerMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FROZEN_S", 0.0)
    await strike_all(mesh, Service.SCHEDULER, Blow.FREEZE)
    ids = {scheduler.id for scheduler in mesh.of(Service.SCHEDULER)}
    assert {call.split()[1] for call in docker.calls if call.startswith("pause")} == ids
    assert {call.split()[1] for call in docker.calls if call.startswith("unpause")} == ids


def test_in_the_end_nothing_is_left_but_what_was_logged(docker: FakeDocker, tmp_path: Path) -> None:
    mesh = ContainerMesh(tmp_path, tmp_path)
    mesh.start()
    executor(mesh).freeze()
    mesh.stop()
    assert docker.calls[-2].startswith("unpause")
    assert "down --volumes" in docker.calls[-1]
    assert (tmp_path / "containers.log").read_text().startswith("all that was logged")
