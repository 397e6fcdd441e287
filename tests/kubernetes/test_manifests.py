"""What every build of the manifests holds: a cluster takes it, its pods are confined, its parts fit together."""

import re
import tomllib
from collections.abc import Mapping

import pytest

from shared.ids import Service
from tests.kubernetes.manifests import (
    BUILDS,
    ROOT,
    SERVICES,
    Object,
    build,
    containers,
    main_container,
    matches,
    name_of,
    of_kind,
    pod_template,
    pods,
)
from tests.kubernetes.validation import NEWEST, OLDEST, complaint

builds = pytest.mark.parametrize("name", BUILDS)
_SECRETS = {"broker": {*map(str, Service), "operator"}, "clients": {"api-keys"}}
"""What secrets.sh makes; tests/kubernetes/test_secrets.py holds it to that."""
_OPTIONAL_SECRETS = {"model-access"}
"""What an operator may make."""


@builds
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_a_cluster_takes_every_object(name: str, version: str) -> None:
    assert [text for item in build(name) if (text := complaint(item, version))] == []


def test_a_field_that_does_not_exist_is_noticed() -> None:
    for kind, service, wrong in (("Deployment", "gateway", "replica"), ("ScaledObject", "executor", "minReplicas")):
        item = of_kind(build("everything"), kind)[service]
        assert complaint(item, NEWEST) is None
        assert complaint({**item, "spec": {**item["spec"], wrong: 2}}, NEWEST) is not None


@builds
def test_no_object_is_there_twice(name: str) -> None:
    names = [name_of(item) for item in build(name)]
    assert len(set(names)) == len(names)


@builds
def test_each_service_is_a_deployment_with_a_budget_and_an_account_without_a_token(name: str) -> None:
    objects = build(name)
    deployments = of_kind(objects, "Deployment")
    assert set(deployments) == set(SERVICES)
    budgets, accounts = of_kind(objects, "PodDisruptionBudget"), of_kind(objects, "ServiceAccount")
    for service, deployment in deployments.items():
        budget = budgets[service]["spec"]
        chosen = [each for each, item in deployments.items() if matches(budget["selector"], _labels(item))]
        assert chosen == [service]
        assert budget["maxUnavailable"] == 1  # one of one too, or a node could never be emptied
        assert pod_template(deployment)["spec"]["serviceAccountName"] == service
        assert accounts[service]["automountServiceAccountToken"] is False


@builds
def test_selectors_choose_the_pods_that_they_are_for(name: str) -> None:
    objects = build(name)
    labels = {each: template["metadata"]["labels"] for each, template in pods(objects).items()}
    for service, deployment in of_kind(objects, "Deployment").items():
        chosen = [each for each in labels if matches(deployment["spec"]["selector"], labels[each])]
        assert chosen == [service]
        for spread in pod_template(deployment)["spec"]["topologySpreadConstraints"]:
            assert [each for each in labels if matches(spread["labelSelector"], labels[each])] == [service]


@builds
def test_the_ways_in_lead_to_the_gateways_port(name: str) -> None:
    objects = build(name)
    service = of_kind(objects, "Service")["gateway"]["spec"]
    gateway = pods(objects)["gateway"]
    assert matches({"matchLabels": service["selector"]}, gateway["metadata"]["labels"])
    (port,) = service["ports"]
    assert _ports(main_container(gateway))[port["targetPort"]] == 8000
    assert "ENV SHOAL_GATEWAY_HOST=0.0.0.0\nEXPOSE 8000\n" in (ROOT / "Dockerfile").read_text()
    for ingress in of_kind(objects, "Ingress").values():
        backends = [path["backend"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
        assert backends == [{"service": {"name": "gateway", "port": {"name": port["name"]}}}]
    for route in of_kind(objects, "HTTPRoute").values():
        assert [rule["backendRefs"] for rule in route["spec"]["rules"]] == [[{"name": "gateway", "port": port["port"]}]]


@builds
def test_every_pod_is_confined(name: str) -> None:
    for template in pods(build(name)).values():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001  # the user of the Dockerfile
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    assert "useradd --uid 10001 --gid 10001" in (ROOT / "Dockerfile").read_text()


@builds
def test_every_container_says_what_it_needs_and_how_much_memory_it_may_take(name: str) -> None:
    for template in pods(build(name)).values():
        for container in containers(template):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


@builds
def test_images_are_those_of_the_dockerfile_at_the_projects_version(name: str) -> None:
    targets = set(re.findall(r"(?m)^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text()))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for template in pods(build(name)).values():
        for container in containers(template):
            image, _, tag = container["image"].partition(":")
            assert image.removeprefix("shoal-") in targets
            assert tag == version


@builds
def test_secrets_are_named_and_never_told(name: str) -> None:
    objects = build(name)
    assert not of_kind(objects, "Secret")
    for template in pods(objects).values():
        for container in containers(template):
            for variable in container.get("env", ()):
                if re.search(r"PASSWORD|KEY|TOKEN(?!IZER)", variable["name"]):
                    reference = variable["valueFrom"]["secretKeyRef"]
                    assert reference["key"] in _SECRETS[reference["name"]]
            for source in container.get("envFrom", ()):
                if "secretRef" in source:
                    assert source["secretRef"]["name"] in _OPTIONAL_SECRETS
                    assert source["secretRef"]["optional"] is True


@builds
def test_each_service_comes_to_the_broker_as_its_own_user(name: str) -> None:
    for service in SERVICES:
        variables = main_container(pods(build(name))[service])["env"]
        names = [variable["name"] for variable in variables]
        told = {variable["name"]: variable for variable in variables}
        assert told["NATS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "broker", "key": service}
        assert told["SHOAL_NATS_URL"]["value"] == f"nats://{service}:$(NATS_PASSWORD)@nats:4222"
        assert names.index("NATS_PASSWORD") < names.index("SHOAL_NATS_URL")  # else it is not put in


@builds
def test_every_mount_has_its_volume_and_only_the_pull_may_write_models(name: str) -> None:
    objects = build(name)
    for maker, template in pods(objects).items():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounted = [mount for container in containers(template) for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounted} == set(volumes)
        for mount in mounted:
            if mount["name"] == "models":
                assert mount.get("readOnly", False) == (maker != "pull-model")
                assert mount["mountPath"] == "/var/lib/shoal"  # SHOAL_HOME in the Dockerfile
                assert volumes["models"]["persistentVolumeClaim"]["claimName"] in of_kind(
                    objects, "PersistentVolumeClaim"
                )
    assert "SHOAL_HOME=/var/lib/shoal" in (ROOT / "Dockerfile").read_text()


@builds
def test_metrics_are_read_where_they_are_said(name: str) -> None:
    (port,) = re.findall(r"SHOAL_METRICS_PORT=(\d+)", (ROOT / "Dockerfile").read_text())
    assert "SHOAL_METRICS_HOST=0.0.0.0" in (ROOT / "Dockerfile").read_text()
    for service in SERVICES:
        template = pods(build(name))[service]
        assert _ports(main_container(template))["metrics"] == int(port)
        assert template["metadata"]["annotations"]["prometheus.io/port"] == port


def _labels(deployment: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = pod_template(deployment)["metadata"]["labels"]
    return labels


def _ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}
