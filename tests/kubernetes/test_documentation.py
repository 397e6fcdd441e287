"""What docs/kubernetes.md shows is what works: its own overlay, its affinities, its table of folders and measures."""

import re
from typing import Any

import yaml

from tests.kubernetes.manifests import KUBERNETES, ROOT, build, containers, kustomize_text, of_kind, pods
from tests.kubernetes.validation import NEWEST, OLDEST, complaint

_PAGE = (ROOT / "docs/kubernetes.md").read_text()


def _yaml(beginning: str) -> dict[str, Any]:
    """The YAML block that begins so."""
    (block,) = (text for text in re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL) if text.startswith(beginning))
    loaded: dict[str, Any] = yaml.safe_load(block)
    return loaded


def test_the_overlay_that_it_shows_can_be_built() -> None:
    shown = _yaml("# mine/kustomization.yaml")
    paths = {key: [(ROOT / "mine" / path).resolve() for path in shown[key]] for key in ("resources", "components")}
    objects = kustomize_text(shown | paths)
    assert [text for item in objects if (text := complaint(item, NEWEST))] == []
    images = {each["image"] for pod in pods(objects).values() for each in containers(pod)}
    assert all(image.startswith("registry.example.com/shoal-") for image in images)
    (settings,) = of_kind(objects, "ConfigMap").values()
    assert settings["data"]["SHOAL_GATEWAY_QUEUE_TIMEOUT_S"] == "60"
    assert settings["data"]["SHOAL_MODEL"] == "smollm2-135m"


def test_the_affinities_that_it_shows_are_some() -> None:
    executor = of_kind(build("base"), "Deployment")["executor"]
    spec = executor["spec"]["template"]["spec"] | _yaml("affinity:")
    template = executor["spec"]["template"] | {"spec": spec}
    assert complaint({**executor, "spec": executor["spec"] | {"template": template}}, NEWEST) is None


def test_it_names_every_overlay_and_component() -> None:
    for kind in ("overlays", "components"):
        for folder in (KUBERNETES / kind).iterdir():
            assert f"`{kind}/{folder.name}`" in _PAGE


def test_it_promises_the_versions_that_are_checked() -> None:
    assert f"Kubernetes {OLDEST} or newer" in _PAGE
    assert f"Kubernetes {OLDEST} and {NEWEST}" in _PAGE
