"""`shoal bench load URL`: the same load on any OpenAI-compatible server, so that servers can be compared."""

import asyncio
from urllib.parse import urlsplit

import click

from shared.cli.bench.load import Load, run
from shared.cli.bench.tables import print_reports


def parse_concurrencies(value: str | list[int]) -> list[int]:
    """`1,8,32` as numbers. Raises BadParameter for anything else."""
    if isinstance(value, list):  # a default that was read already
        return value
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter("must be whole numbers with commas, such as 1,8,32") from None
    if min(numbers) < 1:
        raise click.BadParameter("must be at least 1 each")
    return numbers


concurrency_option = click.option(
    "--concurrency",
    default="1,8,32",
    show_default=True,
    metavar="N,…",
    type=parse_concurrencies,
    help="Streams at once.",
)


def base_url(text: str) -> str:
    """The address of a server as people write it, without the `/v1` that may end it. Raises BadParameter."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address:
        raise click.BadParameter(f"{text!r} is not the address of a server, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


@click.command("load")
@click.argument("url")
@click.option("--model", required=True, help="The model's name on that server.")
@concurrency_option
@click.option("--requests", default=4, show_default=True, type=click.IntRange(1), help="Requests for each stream.")
@click.option("--words", default=200, show_default=True, type=click.IntRange(1), help="Length of prompts.")
@click.option("--shared-words", default=0, show_default=True, type=click.IntRange(0), help="Of these, the same in all.")
@click.option("--output-tokens", default=128, show_default=True, type=click.IntRange(1), help="Length of answers.")
@click.option("--api-key", default="none", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object a line instead of a table.")
def load_command(
    url: str,
    model: str,
    concurrency: list[int],
    requests: int,
    words: int,
    shared_words: int,
    output_tokens: int,
    api_key: str,
    as_json: bool,
) -> None:
    """Stream completions from the OpenAI-compatible server at URL and print what the clients saw.

    URL is such as http://127.0.0.1:8000, with or without /v1. The server must know `ignore_eos`, as vLLM, SGLang and
    llama.cpp do, so that all answers have the same length.
    """
    if shared_words > words:
        raise click.BadParameter(f"--shared-words {shared_words} is more than --words {words}")
    server = base_url(url)
    reports = []
    for number in concurrency:
        load = Load(words, shared_words, output_tokens, seed=number)
        click.echo(f"{number * requests} requests, {number} at once …", err=True)
        coming = run(server, model, load, concurrency=number, num_requests=number * requests, key=api_key)
        reports.append(asyncio.run(coming))
    print_reports(f"{model} at {url}: {words} words in, {output_tokens} tokens out", reports, as_json=as_json)
