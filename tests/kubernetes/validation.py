"""Whether a cluster would take an object: the schemas of Kubernetes' own API, and of what others add to it.

Owns the choice of schemas. Those of others are written from their documentation, with the fields that are used here and
no others: a field that is not among them is an error, as it is for Kubernetes' own.
"""

import json
from pathlib import Path

import jsonschema
import kubernetes_validate

from tests.kubernetes.manifests import Object, name_of

OLDEST, NEWEST = "1.30", "1.37"
"""The versions of Kubernetes that docs/kubernetes.md promises, as far as there are schemas."""

_OF_OTHERS = Path(__file__).parent / "schemas"
_OWN_GROUPS = ("apps/", "batch/", "autoscaling/", "policy/", "networking.k8s.io/", "v1")


def complaint(item: Object, version: str) -> str | None:
    """What a cluster of this version would not take about an object, or None if it takes it."""
    if not item["apiVersion"].startswith(_OWN_GROUPS):
        return _complaint_of_others(item)
    try:
        kubernetes_validate.validate(dict(item), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{name_of(item)}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    return None


def _complaint_of_others(item: Object) -> str | None:
    file = _OF_OTHERS / f"{item['kind'].lower()}.json"
    schema = json.loads(file.read_text()) if file.exists() else {"not": {}, "description": f"there is no {file.name}"}
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(item))
    return None if error is None else f"{name_of(item)}: {error.json_path}: {error.message}"
