"""Runs one detokenizer: `python -m services.detokenizer`."""

from services.detokenizer.config import DetokenizerConfig
from services.detokenizer.decoding import load_decoding
from services.detokenizer.service import DetokenizerService
from shared.ids import Service
from shared.models.store import ModelStore
from shared.process import Parts, run


async def build(parts: Parts[DetokenizerConfig]) -> DetokenizerService:
    """The service for the mesh's model. Raises ModelError if the store does not have it."""
    mesh = parts.mesh
    return DetokenizerService(
        parts.identity,
        parts.transport,
        parts.clock,
        model=mesh.model,
        decoding=load_decoding(ModelStore(mesh.home).folder(mesh.model)),
        max_open_choices=parts.config.max_open_choices,
        max_silence_s=parts.config.max_silence_s,
        tracing=parts.tracing,
    )


if __name__ == "__main__":
    run(Service.DETOKENIZER, DetokenizerConfig, build)
