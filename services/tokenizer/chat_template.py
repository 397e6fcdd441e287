"""A model's chat template: messages in, the text of the prompt out.

Owns what templates of Hugging Face models expect of whoever renders them. Does not own how the text is encoded, nor
which parts of it may become control tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from services.tokenizer.sandbox import MAX_CHARS, Sandbox, TooMuchWork, budget
from shared.errors import InvalidRequest, ModelError

_RESERVED: Final = frozenset({"messages"})
_MAX_REASON_CHARS: Final = 500
TEMPLATE_ARGUMENTS: Final = "chat_template_kwargs"
"""What clients call the arguments of a template."""


class _Refusal(TemplateError):
    """The template itself objects to the conversation."""


class ChatTemplate:
    """A compiled template with the special tokens of its model."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        path: Path,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises ModelError that names `path`, where the template stands, if it is no template.

        `special_tokens` are variables such as `bos_token`. `now` is the local time that a template may ask for.
        """
        sandbox = Sandbox(
            filters={"tojson": _to_json},
            functions={"raise_exception": _raise_exception, "strftime_now": lambda pattern: now().strftime(pattern)},
        )
        self._special_tokens = dict(special_tokens)
        try:
            with budget():
                self._tree = sandbox.parse(source)
                self._template = sandbox.from_string(source)
        except (TemplateSyntaxError, TooMuchWork, RecursionError) as error:
            raise ModelError(f"{path}: the chat template cannot be compiled: {error}") from error
        self.knows_developers = any("developer" in text for text in self._texts())

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        """The prompt of a conversation, up to where the assistant's next turn begins.

        The next turn begins after any message, the assistant's own included, as in OpenAI's API; `arguments` may set
        `add_generation_prompt` to false. Raises InvalidRequest for arguments that are the template's own, for a
        conversation that the template refuses or fails on, and for one that takes too much work.
        """
        if taken := (_RESERVED | self._special_tokens.keys()) & arguments.keys():
            raise InvalidRequest(f"the template argument {min(taken)} is not for clients", param=TEMPLATE_ARGUMENTS)
        variables = {"add_generation_prompt": True, **self._special_tokens, **arguments, "messages": messages}
        try:
            with budget():
                return self._text(variables)
        except _Refusal as error:
            raise InvalidRequest(
                f"the chat template refuses the messages: {_short(error)}", param="messages"
            ) from error
        except TooMuchWork as error:
            raise InvalidRequest(f"the chat template takes too much work: {error}", param="messages") from error
        except Exception as error:  # a template is a program of somebody else's
            reason = f"{type(error).__name__}: {_short(error)}"
            raise InvalidRequest(f"the chat template fails on the messages: {reason}", param="messages") from error

    def writes(self, candidates: Iterable[str]) -> frozenset[str]:
        """Those of the candidates that are in the template's own text, and that it does not look for in messages."""
        looked_for = "\0".join(self._looked_for())
        written = "\0".join(self._texts())
        return frozenset(text for text in candidates if text in written and text not in looked_for)

    def _text(self, variables: dict[str, Any]) -> str:
        pieces = []
        num_chars = 0
        for piece in self._template.generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise TooMuchWork(f"a text of more than {MAX_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _texts(self) -> list[str]:
        """Everything that the template can write of itself: its plain text and its string constants."""
        constants = _strings(self._tree.find_all(nodes.Const))
        return [data.data for data in self._tree.find_all(nodes.TemplateData)] + constants

    def _looked_for(self) -> list[str]:
        """The constants that are compared with something, or given to a call, a filter or a test."""
        inspecting = self._tree.find_all((nodes.Call, nodes.Compare, nodes.Filter, nodes.Test))
        return [text for node in inspecting for text in _strings(_operands(node))]


def _operands(node: nodes.Node) -> Iterable[nodes.Node]:
    if isinstance(node, nodes.Compare):
        return [node.expr, *(operand.expr for operand in node.ops)]
    if isinstance(node, nodes.Call | nodes.Filter | nodes.Test):
        return [*node.args, *(keyword.value for keyword in node.kwargs)]
    return []


def _strings(found: Iterable[nodes.Node]) -> list[str]:
    return [node.value for node in found if isinstance(node, nodes.Const) and isinstance(node.value, str)]


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}…"


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, where Jinja's own filter would write it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
