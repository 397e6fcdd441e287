"""`shoal pin`: keep a system prompt in the prefix caches of a mesh."""

import asyncio
from pathlib import Path
from typing import TextIO

import click

from shared.cli.mesh.find import find_nats
from shared.cli.mesh.pins import MeshPins, check_pin_name
from shared.cli.mesh.watch import connected, listen
from shared.errors import OperatorError
from shared.ids import DEFAULT_TENANT
from shared.messages import PinnedPrefix, Presence, TokenizerStatus
from shared.models.units import counted
from shared.transport import Transport

_LISTEN_S = 1.2
"""Two beats."""
_TIMEOUT_S = 5.0


@click.command()
@click.argument("name", required=False)
@click.option("--system", help="The system prompt of the chats that shall start faster.")
@click.option("--file", "text_file", type=click.File(encoding="utf-8"), help="A file with it; - is stdin.")
@click.option("--raw", is_flag=True, help="The text is the beginning of completion prompts, not a system prompt.")
@click.option("--model", help="Needed only if the mesh has several.")
@click.option("--tenant", default=DEFAULT_TENANT, help="Whose requests find it, unless tenants share prefixes.")
@click.option("--port", type=click.IntRange(1, 65535), help="The mesh of `shoal up` on this port.")
@click.option("--nats-url", help="The mesh on this NATS server.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="The --home that it was started with.")
def command(
    name: str | None,
    system: str | None,
    text_file: TextIO | None,
    *,
    raw: bool,
    model: str | None,
    tenant: str,
    port: int | None,
    nats_url: str | None,
    home: Path | None,
) -> None:
    """Keep a system prompt in the prefix cache of every executor, under NAME; without NAME, list what is kept.

    A pin lasts until `shoal unpin NAME`, also when services or the whole mesh are started again. All pins together take
    at most half of an executor's cache; one for which there is no room waits until another is unpinned.
    """
    url = find_nats(nats_url, home, port)
    if name is None:
        if system is not None or text_file is not None:
            raise click.UsageError("a pin needs a NAME")
        asyncio.run(_list(url))
        return
    check_pin_name(name)
    if (system is None) == (text_file is None):
        raise click.UsageError("say what to pin, with either --system or --file")
    text = system if system is not None else _read(text_file)
    asyncio.run(_pin(url, name, text, model=model, tenant=tenant, is_raw=raw))


def _read(text_file: TextIO | None) -> str:
    assert text_file is not None
    try:
        return text_file.read()
    except UnicodeDecodeError as error:
        raise OperatorError(f"{text_file.name} is not UTF-8 text: {error.reason} at byte {error.start}") from error


async def _list(nats_url: str) -> None:
    async with connected(nats_url, timeout_s=_TIMEOUT_S) as transport:
        pins = await MeshPins(transport).all()
    for name, prefix in pins.items():
        whose = "" if prefix.tenant == DEFAULT_TENANT else f", for {prefix.tenant}"
        click.echo(f"{name}: {counted(len(prefix.token_ids), 'token')} of {prefix.model}{whose}")
    if not pins:
        click.echo("nothing is pinned", err=True)


async def _pin(nats_url: str, name: str, text: str, *, model: str | None, tenant: str, is_raw: bool) -> None:
    async with connected(nats_url, timeout_s=_TIMEOUT_S) as transport:
        model = _choose(await _models(transport), model)
        pins = MeshPins(transport)
        token_ids = await (pins.text_tokens if is_raw else pins.system_prompt_tokens)(model, text)
        if not token_ids:
            raise OperatorError("there is nothing to pin: the text has no tokens")
        await pins.put(name, PinnedPrefix(model, tenant, token_ids))
    click.echo(f"{name} is pinned: the first {counted(len(token_ids), 'token')} of such prompts to {model}")


async def _models(transport: Transport) -> list[str]:
    """The models that tokenizers name."""
    models: set[str] = set()

    def on_beat(beat: Presence) -> None:
        if isinstance(beat.status, TokenizerStatus):
            models.update(beat.models)

    await listen(transport, on_beat)
    await asyncio.sleep(_LISTEN_S)
    return sorted(models)


def _choose(models: list[str], wanted: str | None) -> str:
    if not models:
        raise OperatorError("no tokenizer beats on this NATS server; is the mesh still starting?")
    if wanted is None and len(models) > 1:
        raise OperatorError(f"the mesh has several models; choose with --model from {', '.join(models)}")
    if wanted is not None and wanted not in models:
        raise OperatorError(f"the mesh has no model {wanted!r}; it has {', '.join(models)}")
    return wanted or models[0]
