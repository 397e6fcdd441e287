"""How pods start, are judged and leave, and how many there are: probes, drains, updates, scaling."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import health
from shared.config import MeshConfig
from tests.kubernetes.manifests import (
    BUILDS,
    ROOT,
    SERVICES,
    build,
    containers,
    environ,
    main_container,
    of_kind,
    pod_template,
    pods,
)

builds = pytest.mark.parametrize("name", BUILDS)
_LEAVE_S = 3.0
"""What a service may take after its drain to close its connections; `shoal up` gives it as much."""


@builds
def test_only_a_stuck_process_is_restarted(name: str) -> None:
    """A broker that is away, a model that loads, and a mesh that lacks something must kill nobody."""
    for service in SERVICES:
        container = main_container(pods(build(name))[service])
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"] == ["python", "-S", "-m", "shared.health", "--alive"]
            assert "httpGet" not in container[probe]
        assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 60
    assert "SHOAL_HEALTH_FILE=/tmp/healthy" in (ROOT / "Dockerfile").read_text()


@builds
def test_ready_is_what_can_do_its_work(name: str) -> None:
    for service in SERVICES:
        container = main_container(pods(build(name))[service])
        ready = container["readinessProbe"]
        if service == "gateway":
            assert ready["httpGet"] == {"path": "/readyz", "port": "http"}
        else:
            assert ready["exec"]["command"] == ["python", "-S", "-m", "shared.health"]


def test_the_questions_of_the_probes_are_answered_as_kubernetes_reads_them(tmp_path: Path) -> None:
    gateway = main_container(pods(build("base"))["gateway"])
    file = tmp_path / "healthy"
    health.touch(health.alive_file(file))
    assert _exit_status(gateway["livenessProbe"]["exec"]["command"], file) == 0
    os.utime(health.alive_file(file), (1.0, 1.0))
    assert _exit_status(gateway["livenessProbe"]["exec"]["command"], file) != 0


def _exit_status(command: list[str], file: Path) -> int:
    environ = {"PATH": os.environ["PATH"], "SHOAL_HEALTH_FILE": str(file)}
    return subprocess.run(
        [sys.executable, *command[1:]], env=environ, cwd=ROOT, capture_output=True, check=False
    ).returncode


@builds
def test_a_pod_has_the_time_that_its_drain_takes(name: str) -> None:
    objects = build(name)
    for service in SERVICES:
        template = pods(objects)[service]
        container = main_container(template)
        told = environ(objects, container)
        drain_s = float(told.get("SHOAL_DRAIN_DEADLINE_S", MeshConfig().drain_deadline_s))
        pause_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert template["spec"]["terminationGracePeriodSeconds"] >= pause_s + drain_s + _LEAVE_S + 2


@builds
def test_a_gateway_stays_until_everybody_knows_that_it_leaves(name: str) -> None:
    gateway = main_container(pods(build(name))["gateway"])
    assert gateway["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5


@builds
def test_an_update_takes_no_service_away_and_needs_no_room_for_another_executor(name: str) -> None:
    for service, deployment in of_kind(build(name), "Deployment").items():
        rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        wanted = {"maxSurge": 0, "maxUnavailable": 1} if service == "executor" else {"maxSurge": 1, "maxUnavailable": 0}
        assert rolling == wanted


@builds
def test_an_executor_starts_as_many_threads_as_it_may_use_cores(name: str) -> None:
    executor = main_container(pods(build(name))["executor"])
    told = {variable["name"]: variable for variable in executor["env"]}
    for variable in ("SHOAL_EXECUTOR_THREADS", "OMP_NUM_THREADS"):
        assert told[variable]["valueFrom"]["resourceFieldRef"] == {"containerName": "shoal", "resource": "limits.cpu"}
    assert executor["resources"]["limits"]["cpu"].isdigit()  # whole cores, or it would be rounded up
    assert executor["resources"]["requests"] == executor["resources"]["limits"]


def test_services_that_need_the_model_wait_for_it(tmp_path: Path) -> None:
    for service in ("tokenizer", "executor", "detokenizer"):
        (first, _) = containers(pods(build("base"))[service])
        assert first["image"] == main_container(pods(build("base"))[service])["image"]  # one image to fetch
        _, option, code = first["command"]
        command = [sys.executable, option, code]
        told = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SHOAL_HOME": str(tmp_path), "SHOAL_MODEL": "a/b"}
        with subprocess.Popen(command, env=told) as waiting:
            try:
                time.sleep(0.5)
                assert waiting.poll() is None
                (tmp_path / "models/a--b").mkdir(parents=True)
                assert waiting.wait(30) == 0
            finally:
                waiting.kill()
        (tmp_path / "models/a--b").rmdir()


def test_the_model_is_pulled_by_the_command_line_that_there_is() -> None:
    objects = build("base")
    (container,) = containers(pods(objects)["pull-model"])
    told = environ(objects, container)
    words = [told[word[2:-1]] if word.startswith("$(") else word for word in container["args"]]
    assert words == ["pull", told["MODEL_SOURCE"], "--name", told["SHOAL_MODEL"]]
    assert 'ENTRYPOINT ["python", "-m", "shared.cli"]' in (ROOT / "Dockerfile").read_text()


def test_each_service_is_scaled_once_and_by_nobody_else() -> None:
    objects = build("everything")
    scalers = [item for item in objects if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert sorted(item["spec"]["scaleTargetRef"]["name"] for item in scalers) == sorted(SERVICES)
    assert all("replicas" not in item["spec"] for item in of_kind(objects, "Deployment").values())


def test_the_next_pod_leaves_when_the_last_one_has_gone() -> None:
    objects = build("everything")
    deployments = of_kind(objects, "Deployment")
    for item in objects:
        if item["kind"] not in ("HorizontalPodAutoscaler", "ScaledObject"):
            continue
        spec = item["spec"]
        behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (policy,) = behavior["scaleDown"]["policies"]
        grace_s = pod_template(deployments[item["metadata"]["name"]])["spec"]["terminationGracePeriodSeconds"]
        assert policy["type"] == "Pods"
        assert policy["value"] == 1
        assert policy["periodSeconds"] > grace_s
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300


def test_the_small_overlay_is_one_of_each_on_one_node() -> None:
    objects = build("small")
    assert {item["spec"]["replicas"] for item in of_kind(objects, "Deployment").values()} == {1}
    assert of_kind(objects, "PersistentVolumeClaim")["models"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    cores = [_cores(each["resources"]["requests"]["cpu"]) for pod in pods(objects).values() for each in containers(pod)]
    assert sum(cores) <= 3.5  # of 4, with the broker


def test_the_gpu_overlay_gives_each_executor_a_device() -> None:
    spec = pods(build("gpu"))["executor"]["spec"]
    resources = main_container({"spec": spec})["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    others = [pod for maker, pod in pods(build("gpu")).items() if maker != "executor"]
    assert all("nvidia.com/gpu" not in each["resources"]["limits"] for pod in others for each in containers(pod))


def _cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
