"""What processes a mesh is made of."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shared.cli.mesh.plan import (
    MeshOptions,
    Program,
    StopOrder,
    in_order,
    parse_scale,
    service_names,
    service_programs,
)
from shared.config import MeshConfig, load
from shared.errors import OperatorError
from shared.ids import Service

HOME = Path("/home/me/.shoal")


def _options(**scale: int) -> MeshOptions:
    counts = dict.fromkeys(Service, 1) | {Service(name): count for name, count in scale.items()}
    return MeshOptions("127.0.0.1", 8000, "tiny", HOME, "nats://127.0.0.1:4000", counts)


def _program(name: str, options: MeshOptions, environ: dict[str, str] | None = None, num_cores: int = 8) -> Program:
    (program,) = (p for p in service_programs(options, environ or {}, num_cores) if p.name == name)
    return program


def test_a_mesh_has_one_of_each_service() -> None:
    names = sorted(program.name for program in service_programs(_options(), {}, 8))
    assert names == ["detokenizer-1", "executor-1", "gateway-1", "scheduler-1", "tokenizer-1"]


def test_a_scaled_service_has_numbered_instances() -> None:
    programs = service_programs(_options(executor=3, tokenizer=0), {}, 8)
    assert [program.name for program in programs if "executor" in program.name] == [
        "executor-1",
        "executor-2",
        "executor-3",
    ]
    assert not [program for program in programs if "tokenizer-" in program.name and "de" not in program.name]


def test_a_service_is_run_by_this_python_and_not_shadowed_by_the_folder_it_starts_in() -> None:
    assert _program("executor-1", _options()).command == (sys.executable, "-P", "-m", "services.executor")


def test_every_service_is_told_what_it_needs() -> None:
    for program in service_programs(_options(), {}, 8):
        assert program.environ["SHOAL_NATS_URL"] == "nats://127.0.0.1:4000"
        assert program.environ["SHOAL_HOME"] == str(HOME)
        assert program.environ["SHOAL_MODEL"] == "tiny"
        assert program.environ["SHOAL_INSTANCE_NAME"] == program.name
        assert program.environ["SHOAL_LOG_FORMAT"] == "json"


def test_the_mesh_settings_of_a_plan_are_settings() -> None:
    for program in service_programs(_options(gateway=2, executor=2), {}, 8):
        mesh = load(MeshConfig, program.environ)
        assert mesh.instance_name == program.name


def test_gateways_take_one_port_after_the_other() -> None:
    options = _options(gateway=2)
    assert list(options.ports) == [8000, 8001]
    assert _program("gateway-1", options).environ["SHOAL_GATEWAY_PORT"] == "8000"
    assert _program("gateway-2", options).environ["SHOAL_GATEWAY_PORT"] == "8001"
    assert _program("gateway-2", options).environ["SHOAL_GATEWAY_HOST"] == "127.0.0.1"
    assert "SHOAL_GATEWAY_PORT" not in _program("scheduler-1", options).environ


def test_every_process_shows_its_metrics_on_a_port_of_its_own() -> None:
    options = replace(_options(gateway=2), metrics_ports={"gateway-1": 9001, "gateway-2": 9002, "executor-1": 9003})
    asked = {"SHOAL_METRICS_PORT": "9000"}
    ports = {program.name: program.environ["SHOAL_METRICS_PORT"] for program in service_programs(options, asked, 8)}
    assert ports == {
        "gateway-1": "9001",
        "gateway-2": "9002",
        "executor-1": "9003",
        "scheduler-1": "0",
        "tokenizer-1": "0",
        "detokenizer-1": "0",
    }
    assert set(service_names(options.num_instances)) == set(ports)


def test_the_persons_own_variables_are_passed_on_but_options_win() -> None:
    environ = {
        "PATH": "/bin",
        "SHOAL_SCHEDULER_PIPELINE_DEPTH": "3",
        "SHOAL_MODEL": "other",
        "SHOAL_LOG_FORMAT": "pretty",
    }
    program = _program("scheduler-1", _options(), environ)
    assert program.environ["PATH"] == "/bin"
    assert program.environ["SHOAL_SCHEDULER_PIPELINE_DEPTH"] == "3"
    assert program.environ["SHOAL_MODEL"] == "tiny"
    assert program.environ["SHOAL_LOG_FORMAT"] == "json"
    assert environ["SHOAL_MODEL"] == "other"


@pytest.mark.parametrize(
    ("num_executors", "num_cores", "environ", "threads"),
    [
        (1, 8, {}, "8"),
        (2, 8, {}, "4"),
        (3, 8, {}, "2"),
        (4, 2, {}, "1"),
        (2, 8, {"SHOAL_EXECUTOR_THREADS": "6"}, "6"),
        (2, 8, {"SHOAL_EXECUTOR_THREADS": "0"}, "4"),
        (2, 8, {"SHOAL_EXECUTOR_THREADS": "many"}, "many"),
    ],
)
def test_executors_share_the_cores(num_executors: int, num_cores: int, environ: dict[str, str], threads: str) -> None:
    program = _program("executor-1", _options(executor=num_executors), environ, num_cores)
    assert program.environ["SHOAL_EXECUTOR_THREADS"] == threads


def test_only_executors_get_a_thread_limit_and_the_persons_own_wins() -> None:
    assert "OMP_NUM_THREADS" not in _program("tokenizer-1", _options()).environ
    assert _program("executor-1", _options()).environ["OMP_NUM_THREADS"] == "8"
    assert _program("executor-1", _options(), {"OMP_NUM_THREADS": "3"}).environ["OMP_NUM_THREADS"] == "3"


def test_the_client_side_stops_first_and_the_broker_last() -> None:
    programs = [Program("nats", (), {}, StopOrder.BROKER), *service_programs(_options(executor=2), {}, 8)]
    waves = [sorted(program.name for program in wave) for wave in in_order(programs)]
    assert waves == [
        ["gateway-1"],
        ["scheduler-1", "tokenizer-1"],
        ["detokenizer-1", "executor-1", "executor-2"],
        ["nats"],
    ]


def test_scale_is_read() -> None:
    assert parse_scale([]) == dict.fromkeys(Service, 1)
    assert parse_scale(["executor=2", " tokenizer=0"])[Service.EXECUTOR] == 2
    assert parse_scale(["executor=2", "executor=3"])[Service.EXECUTOR] == 3


@pytest.mark.parametrize(
    "text",
    [
        "executor",
        "executor=",
        "executor=-1",
        "executor=two",
        "worker=2",
        "=2",
        "executor=2=3",
        "gateway=0",
        "executor=65",
    ],
)
def test_a_wrong_scale_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(OperatorError, match="--scale"):
        parse_scale([text])
