"""Who may talk to whom, decided from the NetworkPolicies as a cluster decides it."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.kubernetes.manifests import SERVICES, Object, build, containers, matches, of_kind, pods

_BROKER = {
    "app.kubernetes.io/name": "nats",
    "app.kubernetes.io/instance": "nats",
    "app.kubernetes.io/component": "nats",
}
"""The labels of the pods that NATS's chart makes, for a release of the name `nats`."""


@dataclass(frozen=True)
class Pod:
    """An end of a connection."""

    labels: Mapping[str, str]
    namespace: str = "shoal"
    ports: tuple[tuple[str, int], ...] = ()


def _pod(name: str) -> Pod:
    if name == "broker":
        return Pod(_BROKER)
    template = pods(build("everything"))[name]
    ports = [(port["name"], port["containerPort"]) for each in containers(template) for port in each.get("ports", ())]
    return Pod(template["metadata"]["labels"], ports=tuple(ports))


_CLIENT = Pod({}, "default")
_PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, "observability")
_COLLECTOR = Pod({"app.kubernetes.io/name": "otel-collector"}, "observability")
_NAMES = Pod({"k8s-app": "kube-dns"}, "kube-system")


def _may(source: Pod, target: Pod, port: int, name: str = "everything", protocol: str = "TCP") -> bool:
    """Whether a connection is let out at its one end and in at the other."""
    policies = [item["spec"] for item in of_kind(build(name), "NetworkPolicy").values()]
    ways = (("Egress", "egress", "to", source, target), ("Ingress", "ingress", "from", target, source))
    return all(_lets(policies, *way, (port, protocol), target) for way in ways)


def _lets(
    policies: list[Object], kind: str, rules: str, side: str, own: Pod, other: Pod, way: tuple[int, str], target: Pod
) -> bool:
    if own.namespace != "shoal":
        return True
    applied = [each for each in policies if kind in each["policyTypes"] and matches(each["podSelector"], own.labels)]
    return not applied or any(
        (side not in rule or any(_is(peer, other) for peer in rule[side]))
        and ("ports" not in rule or any(_is_port(port, way, target) for port in rule["ports"]))
        for each in applied
        for rule in each.get(rules, ())
    )


def _is(peer: Object, pod: Pod) -> bool:
    namespaces = peer.get("namespaceSelector")
    is_place = (
        pod.namespace == "shoal"
        if namespaces is None
        else matches(namespaces, {"kubernetes.io/metadata.name": pod.namespace})
    )
    return is_place and matches(peer.get("podSelector", {}), pod.labels)


def _is_port(rule: Object, way: tuple[int, str], target: Pod) -> bool:
    number = dict(target.ports).get(rule["port"]) if isinstance(rule["port"], str) else rule["port"]
    return (number, rule["protocol"]) == way


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_reaches_the_broker_names_and_the_collector(service: str) -> None:
    pod = _pod(service)
    assert _may(pod, _pod("broker"), 4222)
    assert _may(pod, _NAMES, 53, protocol="UDP")
    assert _may(pod, _COLLECTOR, 4318)
    assert _may(_PROMETHEUS, pod, 9464)


def test_the_brokers_servers_find_each_other() -> None:
    assert _may(_pod("broker"), _pod("broker"), 6222)
    assert _may(_pod("broker"), _NAMES, 53, protocol="UDP")


def test_clients_reach_gateways_and_nothing_else() -> None:
    assert _may(_CLIENT, _pod("gateway"), 8000)
    assert not _may(_CLIENT, _pod("gateway"), 9464)
    assert not _may(_CLIENT, _pod("broker"), 4222)
    assert not _may(_CLIENT, _pod("broker"), 8222)
    for service in SERVICES:
        assert not _may(_CLIENT, _pod(service), 9464)


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_reaches_another_one_or_the_world(service: str) -> None:
    for other in SERVICES:
        assert not _may(_pod(service), _pod(other), 8000)
        assert not _may(_pod(service), _pod(other), 9464)
    assert not _may(_pod(service), Pod({}, "the internet"), 443)
    assert not _may(_pod(service), _pod("broker"), 6222)


def test_only_the_pull_reaches_the_world() -> None:
    assert _may(_pod("pull-model"), Pod({}, "the internet"), 443)
    assert not _may(_pod("pull-model"), _pod("broker"), 4222)


def test_without_the_components_nobody_reads_metrics_or_takes_traces() -> None:
    assert not _may(_PROMETHEUS, _pod("executor"), 9464, name="base")
    assert not _may(_pod("executor"), _COLLECTOR, 4318, name="base")
