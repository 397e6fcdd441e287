"""What the gateway says of models and of itself: OpenAI's model list, and whether a request would be served."""

import time

import msgspec

from services.gateway.mesh import Mesh
from shared.errors import ModelNotFound

_STARTED = int(time.time())


class ModelBody(msgspec.Struct):
    """OpenAI's model object, and the model's context length if it is known."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "shoal"


class ModelList(msgspec.Struct):
    """OpenAI's list of models."""

    data: list[ModelBody]
    object: str = "list"


class Readiness(msgspec.Struct):
    """Whether a request would be served, and if not, what is missing."""

    status: str
    """ready, not ready, or no model: no instance has named one lately."""
    is_broker_connected: bool
    is_draining: bool
    models: dict[str, dict[str, int]]
    """How many instances of each needed service take work for each model."""
    missing: dict[str, list[str]]
    """For each model, the services of which there is none."""

    @property
    def is_ready(self) -> bool:
        """Whether it is."""
        return self.status == "ready"


def list_models(mesh: Mesh) -> ModelList:
    """All models that any instance names."""
    return ModelList([_body(mesh, model) for model in mesh.admission.models()])


def one_model(mesh: Mesh, model: str) -> ModelBody:
    """One of them. Raises ModelNotFound."""
    if model not in mesh.admission.models():
        raise ModelNotFound(f"There is no model {model[:100]!r} here.", param="model")
    return _body(mesh, model)


def readiness(mesh: Mesh) -> Readiness:
    """Whether a request would be served now."""
    models = mesh.admission.known_models()
    missing = {model: [str(service) for service in mesh.admission.missing(model)] for model in models}
    is_connected = mesh.transport.is_connected
    is_ready = is_connected and not mesh.is_draining and any(not services for services in missing.values())
    return Readiness(
        status="ready" if is_ready else "not ready" if models else "no model",
        is_broker_connected=is_connected,
        is_draining=mesh.is_draining,
        models={model: {str(s): count for s, count in mesh.admission.num_available(model).items()} for model in models},
        missing={model: services for model, services in missing.items() if services},
    )


def _body(mesh: Mesh, model: str) -> ModelBody:
    return ModelBody(model, _STARTED, mesh.admission.max_model_len(model))
