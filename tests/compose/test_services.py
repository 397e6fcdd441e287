"""compose.yaml as a file: what each container may do, what it is told, and who can reach whom."""

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shared.config import MeshConfig, load
from shared.ids import Service
from tests.compose.docker import ROOT
from tests.kubernetes.settings import config_of

_COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: Final[dict[str, dict[str, Any]]] = _COMPOSE["services"]
WATCHERS: Final = ("collector", "jaeger", "prometheus", "grafana")
_OBSERVABILITY: Final = ROOT / "deploy/observability"

each = pytest.mark.parametrize("name", SERVICES)
each_watcher = pytest.mark.parametrize("name", WATCHERS)


def _yaml(path: str) -> Any:
    return yaml.safe_load((_OBSERVABILITY / path).read_text())


def _expand(text: str) -> str:
    """What Compose makes of a value where nothing is set but passwords."""
    text = re.sub(r"\$\{\w+_PASSWORD[^}]*\}", "5ecret", text)
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@each
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]


@each
def test_what_stays_may_take_so_much_memory_and_so_many_processes(name: str) -> None:
    if name not in ("model", "shoal"):  # these two end
        assert {"memory", "pids"} <= set(SERVICES[name]["deploy"]["resources"]["limits"])


@each
def test_an_image_is_one_of_ours_or_of_one_version(name: str) -> None:
    image, _, tag = SERVICES[name]["image"].partition(":")
    if image.startswith("shoal-"):
        assert tag == "${SHOAL_TAG:-latest}"
    else:
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)


@each
def test_what_is_published_is_for_this_machine_alone_until_somebody_says_otherwise(name: str) -> None:
    for port in SERVICES[name].get("ports", ()):
        assert _expand(port).startswith("127.0.0.1:")
        assert any(not (_COMPOSE["networks"][network] or {}).get("internal") for network in _networks(name))


@each
def test_whatever_is_mounted_from_here_is_here(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        source = _expand(volume).partition(":")[0]
        assert (ROOT / source).exists() if source.startswith("./") else source in _COMPOSE["volumes"]


@pytest.mark.parametrize("service", [*map(str, Service)])
def test_a_service_takes_all_that_it_is_told(service: str) -> None:
    told = {name: _expand(value) for name, value in SERVICES[service]["environment"].items()}
    for kind in (MeshConfig, config_of(service)):
        load(kind, told)


def test_profiles_add_to_a_mesh_that_is_whole_without_them() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert {name for name, added in profiles.items() if added == ["observability"]} == set(WATCHERS)
    assert {name for name, added in profiles.items() if added == ["gpu"]} == {"executor-gpu"}
    whole = {name for name, added in profiles.items() if not added}
    assert whole == {*map(str, Service), "front", "nats", "model"}
    for name in whole:
        assert set(SERVICES[name].get("depends_on", ())) <= whole


def test_an_executor_with_devices_is_an_executor_in_everything_else() -> None:
    plain, other = SERVICES["executor"], SERVICES["executor-gpu"]
    same = {"build", "environment", "volumes", "depends_on", "healthcheck", "stop_grace_period"}
    assert {key: other[key] for key in same} == {key: plain[key] for key in same}
    (device,) = other["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert other["deploy"]["resources"]["limits"] == plain["deploy"]["resources"]["limits"]


def test_nothing_is_sent_unless_somebody_says_where_to() -> None:
    for service in map(str, Service):
        assert _expand(SERVICES[service]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]) == ""
        assert _expand(SERVICES[service]["environment"]["OTEL_METRICS_EXPORTER"]) == "none"  # they are read instead


@pytest.mark.parametrize("service", [*map(str, Service)])
def test_prometheus_finds_every_instance(service: str) -> None:
    (scrape,) = [job for job in _yaml("prometheus/prometheus.yaml")["scrape_configs"] if "dns_sd_configs" in job]
    (found,) = scrape["dns_sd_configs"]
    assert service in found["names"]
    assert found["type"] == "A"
    assert f"SHOAL_METRICS_PORT={found['port']}" in (ROOT / "Dockerfile").read_text()
    assert {"source_labels": ["__meta_dns_name"], "target_label": "job"} in scrape["relabel_configs"]
    assert _share_a_network("prometheus", service)
    assert SERVICES["executor-gpu"]["networks"]["mesh"]["aliases"] == ["executor"]


def test_traces_find_their_way() -> None:
    collector = _yaml("collector/config.yaml")
    host, port = collector["exporters"]["otlp/jaeger"]["endpoint"].split(":")
    assert _yaml("jaeger/config.yaml")["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == f"0.0.0.0:{port}"
    assert _share_a_network("collector", host)
    (said,) = set(re.findall(r"OTEL_EXPORTER_OTLP_ENDPOINT=(\S+)", (ROOT / "docs/operating.md").read_text()))
    http_port = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].split(":")[1]
    assert said == f"http://collector:{http_port}"
    assert all(_share_a_network(str(service), "collector") for service in Service)


def test_prometheus_reads_what_the_collector_shows() -> None:
    collector = _yaml("collector/config.yaml")
    (scrape,) = [job for job in _yaml("prometheus/prometheus.yaml")["scrape_configs"] if "static_configs" in job]
    own = collector["service"]["telemetry"]["metrics"]["readers"][0]["pull"]["exporter"]["prometheus"]["port"]
    sent = collector["exporters"]["prometheus"]["endpoint"].split(":")[1]
    assert scrape["static_configs"] == [{"targets": [f"collector:{own}", f"collector:{sent}"]}]
    assert _share_a_network("prometheus", "collector")


@pytest.mark.parametrize("source", _yaml("grafana/provisioning/datasources/sources.yaml")["datasources"])
def test_grafana_reaches_its_sources(source: dict[str, Any]) -> None:
    host = re.fullmatch(r"http://(\w+):\d+", source["url"])
    assert host is not None
    assert _share_a_network("grafana", host[1])


@pytest.mark.parametrize("path", ["collector/config.yaml", "jaeger/config.yaml"])
def test_every_part_of_a_pipeline_is_configured_and_used(path: str) -> None:
    config = _yaml(path)
    pipelines = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert {part for pipeline in pipelines for part in pipeline[kind]} == set(config[kind])
    assert set(config["service"].get("extensions", ())) == set(config.get("extensions", ()))


@each_watcher
def test_the_configuration_that_a_command_names_is_the_one_that_is_mounted(name: str) -> None:
    words = " ".join(SERVICES[name].get("command", ()))
    named = re.findall(r"/etc/\S+\.yaml", words) + (_prometheus_rules() if name == "prometheus" else [])
    mounted = {volume.split(":")[1] for volume in SERVICES[name]["volumes"]}
    assert set(named) <= mounted
    assert named or name == "grafana"


def _prometheus_rules() -> list[str]:
    rules: list[str] = _yaml("prometheus/prometheus.yaml")["rule_files"]
    return rules


@each_watcher
def test_health_is_asked_where_there_is_something_that_could_ask(name: str) -> None:
    assert ("healthcheck" in SERVICES[name]) == (name != "collector")  # its image has no other program


def _networks(name: str) -> set[str]:
    return set(SERVICES[name]["networks"])


def _share_a_network(one: str, other: str) -> bool:
    return bool(_networks(one) & _networks(other))


def test_what_is_bound_to_a_folder_of_the_host_is_only_read() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert volume.endswith(":ro")
                assert Path(volume.split(":")[0]).parts[0] == "deploy"
