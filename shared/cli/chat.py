"""`shoal chat`: a conversation with a model in the terminal, or one answer for a pipe."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import click

from shared.cli.conversation import HELP, Command, Conversation, Say, join_lines, read_input
from shared.cli.mesh.find import find_mesh, home_folder
from shared.cli.stream_client import Answer, AnswerFailed, Gateway, ask, list_models, normalized_url
from shared.errors import OperatorError

_DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_FAILED = 1


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--url", help="Of a gateway.  [default: the mesh that runs here, else http://127.0.0.1:8000]")
@click.option("--model", help="Needed only if the mesh has several.")
@click.option("--system", default="", help="The system prompt.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.")
@click.option("--max-tokens", type=click.IntRange(1), help="The most tokens of one answer.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="The gateway's key for you.  [env: OPENAI_API_KEY]")
@click.option("--stats", is_flag=True, help="Show speed and time to first token after each answer.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="The --home that `shoal up` was given.")
def command(
    prompt: tuple[str, ...],
    url: str | None,
    model: str | None,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    api_key: str | None,
    *,
    stats: bool,
    home: Path | None,
) -> None:
    """Talk to a model in the terminal.

    With a PROMPT, or with text from a pipe, prints one answer and exits.
    """
    gateway = Gateway(normalized_url(url) if url else _url_of_mesh(home), api_key)
    options: dict[str, float | int | None] = {"temperature": temperature, "max_tokens": max_tokens}
    conversation = Conversation(
        model=_choose_model(gateway, model),
        system=system,
        options={name: value for name, value in options.items() if value is not None},
    )
    chat = _Chat(gateway, conversation, shows_stats=stats)
    text = "\n\n".join(filter(None, [" ".join(prompt), "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")]))
    if text:
        sys.exit(chat.answer_once(text))
    if not sys.stdin.isatty():
        raise OperatorError("there is nothing to answer: the pipe was empty")
    chat.talk()


def _url_of_mesh(home: Path | None) -> str:
    mesh = find_mesh(home_folder(home, os.environ), None)
    return mesh.address if mesh else _DEFAULT_URL


def _choose_model(gateway: Gateway, wanted: str | None) -> str:
    """The model to talk to. Raises OperatorError that lists what there is."""
    models = asyncio.run(list_models(gateway))
    if not models:
        raise OperatorError(f"the mesh at {gateway.url} has no model yet; is it still starting?")
    names = ", ".join(models)
    if wanted is None and len(models) > 1:
        raise OperatorError(f"the mesh at {gateway.url} has several models; choose with --model from {names}")
    if wanted is not None and wanted not in models:
        raise OperatorError(f"the mesh at {gateway.url} has no model {wanted!r}; it has {names}")
    return wanted or models[0]


class _Chat:
    """The conversation and the terminal."""

    def __init__(self, gateway: Gateway, conversation: Conversation, *, shows_stats: bool) -> None:
        self._gateway = gateway
        self._conversation = conversation
        self._shows_stats = shows_stats

    def answer_once(self, text: str) -> int:
        """Print the answer to `text`; the exit status."""
        try:
            answer = asyncio.run(self._answer(text))
        except AnswerFailed as error:
            click.echo(f"shoal: {error}", err=True)
            return EXIT_FAILED
        return 130 if answer.was_cancelled else 0

    def talk(self) -> None:
        """Take turns until the person leaves."""
        with contextlib.suppress(ImportError):  # not everywhere
            import readline  # noqa: F401  # gives `input` editing and history
        click.echo(f"{self._conversation.model} at {self._gateway.url}. /help lists what else you can say.")
        while True:
            try:
                asked = read_input(_read())
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                continue
            match asked:
                case Say():
                    self._say(asked.text)
                case Command(name="exit" | "quit"):
                    return
                case Command():
                    click.secho(self._obey(asked), dim=True)
                case None:
                    pass

    def _say(self, text: str) -> None:
        try:
            answer = asyncio.run(self._answer(text))
        except (AnswerFailed, OperatorError) as error:
            click.secho(f"{error}", fg="red")
            return
        self._conversation.add(text, answer.text)
        if answer.was_cancelled:
            click.secho("(stopped)", dim=True)

    def _obey(self, command: Command) -> str:
        """Do it; what to say about it."""
        match command.name:
            case "help":
                return HELP
            case "clear":
                self._conversation.clear()
                return "The conversation is forgotten."
            case "system":
                self._conversation.system = command.argument
                return "The system prompt is set." if command.argument else "There is no system prompt now."
            case "stats":
                self._shows_stats = not self._shows_stats
                return f"Speed is {'shown' if self._shows_stats else 'hidden'}."
            case _:
                return f"There is no /{command.name}; /help lists what there is."

    async def _answer(self, text: str) -> Answer:
        """Print the answer as it comes. The first Ctrl-C stops it, the second leaves it behind."""
        cancel, loop = asyncio.Event(), asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_interrupt() -> None:
            if cancel.is_set():
                task.cancel()
            cancel.set()

        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        try:
            answer = await ask(self._gateway, self._conversation.body(text), on_text=_show, cancel=cancel)
        except asyncio.CancelledError:
            return Answer(was_cancelled=True)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            click.echo()
        if self._shows_stats:
            click.secho(describe_speed(answer), dim=True, err=True)
        return answer


def describe_speed(answer: Answer) -> str:
    """Tokens, speed and time to first token, in a line."""
    words = [f"{answer.num_tokens} tokens"]
    if answer.tokens_per_s is not None:
        words.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.first_text_s is not None:
        words.append(f"first after {answer.first_text_s:.2f} s")
    if answer.usage:
        num_cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        words.append(f"{num_cached} of {answer.usage['prompt_tokens']} prompt tokens from cache")
    return " · ".join(words)


def printable(text: str) -> str:
    """Text that cannot command a terminal: control characters other than tab and line end are replaced."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) >= 0xA0 else "\N{REPLACEMENT CHARACTER}" for c in text)


def _show(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _read() -> str:
    lines = [input("› ")]
    while lines[-1].endswith("\\"):
        lines.append(input("… "))
    return join_lines(lines)
