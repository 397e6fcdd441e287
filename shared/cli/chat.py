"""`shoal chat`: a conversation with a model in the terminal, or one answer for a pipe."""

import asyncio
import contextlib
import shutil
import signal
import sys
from pathlib import Path

import click

from shared.cli.conversation import HELP, Command, Conversation, Say, read_input
from shared.cli.mesh.gateway_url import find_gateway_url
from shared.cli.stream_client import Answer, AnswerFailed, Gateway, ask, list_models, normalized_url
from shared.cli.terminal import Prompt, check_is_text, printable, read_pipe, unechoed
from shared.cli.word_wrap import WordWrap
from shared.errors import OperatorError

_TEMPERATURE = 0.7
"""Small models lose the thread at 1, the default of the API."""
EXIT_FAILED = 1


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--url", help="Of a gateway.")
@click.option("--port", type=click.IntRange(1, 65_535), help="The gateway on this port of this machine.")
@click.option("--model", help="Needed only if the mesh has several.")
@click.option("--system", default="", help="The system prompt.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=_TEMPERATURE,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="The most tokens of one answer.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="The gateway's key for you.  [env: OPENAI_API_KEY]")
@click.option("--stats", is_flag=True, help="Show speed and time to first token after each answer.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="The --home that `shoal up` was given.")
def command(
    prompt: tuple[str, ...],
    url: str | None,
    port: int | None,
    model: str | None,
    system: str,
    temperature: float,
    max_tokens: int | None,
    api_key: str | None,
    *,
    stats: bool,
    home: Path | None,
) -> None:
    """Talk to a model in the terminal.

    With a PROMPT, or with text from a pipe, prints one answer and exits. Without --url or --port, asks the mesh on
    SHOAL_NATS_URL, else the only one of `shoal up` on this machine.
    """
    if url is not None and port is not None:
        raise click.UsageError("--url and --port exclude each other")
    text = "\n\n".join(filter(None, [" ".join(prompt), "" if sys.stdin.isatty() else read_pipe()]))
    check_is_text(text, "the prompt")
    check_is_text(system, "the system prompt")
    gateway = Gateway(normalized_url(url) if url else find_gateway_url(home, port), api_key)
    options: dict[str, float | int] = {"temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    conversation = Conversation(model=_choose_model(gateway, model), system=system, options=options)
    chat = _Chat(gateway, conversation, shows_stats=stats)
    if text:
        sys.exit(chat.answer_once(text))
    if not sys.stdin.isatty():
        raise OperatorError("there is nothing to answer: the pipe was empty")
    chat.talk()


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
        if why := self._why_cut_off(answer):
            click.echo(f"shoal: the answer is cut off: {why}", err=True)
        return 130 if answer.was_cancelled else 0

    def talk(self) -> None:
        """Take turns until the person leaves."""
        prompt = Prompt()
        click.echo(f"{self._conversation.model} at {self._gateway.url}. /help lists what else you can say.")
        while True:
            try:
                text = prompt.read()
                check_is_text(text, "that")
                asked = read_input(text)
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                with contextlib.suppress(KeyboardInterrupt):  # who holds the key down means no more by it
                    click.echo()
                continue
            except (UnicodeDecodeError, OperatorError):
                click.secho("That is not UTF-8 text.", fg="red")
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
        except AnswerFailed as error:
            advice = "; /clear shortens the conversation" if error.is_too_long and self._conversation.turns else ""
            click.secho(f"{error}{advice}", fg="red")
            return
        except OperatorError as error:
            click.secho(f"{error}", fg="red")
            return
        self._conversation.add(text, answer.text)
        if answer.was_cancelled:
            click.secho("(stopped)", dim=True)
        elif why := self._why_cut_off(answer):
            click.secho(f"(cut off: {why})", dim=True)

    def _why_cut_off(self, answer: Answer) -> str | None:
        """Why the model could not finish; None if it could."""
        if answer.finish_reason != "length":
            return None
        wanted = self._conversation.options.get("max_tokens")
        if wanted is not None and answer.num_tokens >= wanted:
            return f"--max-tokens allows {wanted}"
        return "the model's context has no room for more"

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
        with unechoed():
            return await self._print_answer(text, _Screen() if sys.stdout.isatty() else _Paper())

    async def _print_answer(self, text: str, paper: "_Paper") -> Answer:
        cancel, loop = asyncio.Event(), asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_interrupt() -> None:
            if cancel.is_set():
                task.cancel()
            cancel.set()

        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        try:
            answer = await ask(self._gateway, self._conversation.body(text), on_text=paper.show, cancel=cancel)
        except asyncio.CancelledError:
            return Answer(was_cancelled=True)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            paper.finish()
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
        words.append(f"{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens from cache")
    return " · ".join(words)


class _Paper:
    """Gets the text as it is, and an end of line after it."""

    def __init__(self) -> None:
        self._is_empty = True

    def show(self, text: str) -> None:
        self._is_empty = False
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self) -> None:
        if not self._is_empty:
            self.show("\n")


class _Screen(_Paper):
    """Gets the text without what would command a terminal, in lines that end between words."""

    def __init__(self) -> None:
        super().__init__()
        self._wrap = WordWrap(shutil.get_terminal_size().columns)

    def show(self, text: str) -> None:
        super().show(self._wrap.add(printable(text)))

    def finish(self) -> None:
        if rest := self._wrap.finish():
            super().show(rest)
        super().finish()
