"""Runs one tokenizer: `python -m services.tokenizer`."""

from services.tokenizer.config import TokenizerConfig
from services.tokenizer.encoding import load_encoder
from services.tokenizer.service import TokenizerService
from shared.ids import Service
from shared.models.store import ModelStore
from shared.process import Parts, run


async def build(parts: Parts[TokenizerConfig]) -> TokenizerService:
    """The service for the mesh's model. Raises ModelError if the store does not have it."""
    mesh, config = parts.mesh, parts.config
    return TokenizerService(
        parts.identity,
        parts.transport,
        parts.clock,
        model=mesh.model,
        encoder=load_encoder(ModelStore(mesh.home).folder(mesh.model), max_model_len=config.max_model_len),
        inline_chars=config.inline_chars,
        max_waiting_prompts=config.max_waiting_prompts,
        tracing=parts.tracing,
    )


if __name__ == "__main__":
    run(Service.TOKENIZER, TokenizerConfig, build)
