"""Conversations: what a message of a chat may consist of, and the prompt that it becomes."""

from typing import Any, Final

import msgspec

from shared.errors import InvalidRequest, UnsupportedField
from shared.messages import ChatMessage, ChatPrompt

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles taken and what templates call them: OpenAI renamed the system's."""
_UNSUPPORTED_ROLES: Final = ("tool", "function")
_MAX_TEMPLATE_DEPTH: Final = 16
_MAX_TEMPLATE_VALUES: Final = 1024
"""Values in all template arguments together: each is looked at before the request goes on."""


class ChatTurn(msgspec.Struct, forbid_unknown_fields=True):
    """One message. What follows `name` only a client sends that repeats an answer, and then as null or empty."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: Any = None
    annotations: list[Any] | None = None
    function_call: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


def chat_prompt(turns: list[ChatTurn], arguments: dict[str, Any] | None, parses_special: bool | None) -> ChatPrompt:
    """The prompt of a conversation. Raises InvalidRequest that names the message and field at fault."""
    if not turns:
        raise InvalidRequest("messages must not be empty.", param="messages")
    if arguments:
        if _num_values(arguments, _MAX_TEMPLATE_VALUES) > _MAX_TEMPLATE_VALUES:
            message = f"chat_template_kwargs must have at most {_MAX_TEMPLATE_VALUES} values."
            raise InvalidRequest(message, param="chat_template_kwargs")
        _check_plain(arguments, "chat_template_kwargs", _MAX_TEMPLATE_DEPTH)
    return ChatPrompt(
        messages=tuple(_message(turn, f"messages[{number}]") for number, turn in enumerate(turns)),
        template_arguments=arguments or {},
        parse_special_tokens=bool(parses_special),
    )


def _message(turn: ChatTurn, place: str) -> ChatMessage:
    role = _ROLES.get(turn.role)
    if role is None:
        param = f"{place}.role"
        if turn.role in _UNSUPPORTED_ROLES:
            raise UnsupportedField(f"{param}: messages of a {turn.role} are not supported.", param=param)
        raise InvalidRequest(f"{param} must be one of {', '.join(_ROLES)}.", param=param)
    for field in ("refusal", "audio", "annotations", "function_call", "tool_calls", "tool_call_id"):
        if getattr(turn, field):
            raise UnsupportedField(f"{place}.{field} is not supported.", param=f"{place}.{field}")
    return ChatMessage(role, _text(turn.content, f"{place}.content"), turn.name)


def _text(content: str | list[Any] | None, place: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{place} must be a string or an array of text parts.", param=place)
    return "".join(_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{place} must be an object.", param=place)
    if part.get("type") != "text":
        if isinstance(part.get("type"), str):
            raise UnsupportedField(f'{place}.type: only parts of type "text" are supported.', param=f"{place}.type")
        raise InvalidRequest(f'{place}.type must be "text".', param=f"{place}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{place}.text must be a string.", param=f"{place}.text")
    for field in part:
        if field not in ("type", "text"):
            raise UnsupportedField(f"{place}.{field} is an unknown field.", param=f"{place}.{field}")
    return str(part["text"])


def _num_values(value: Any, limit: int) -> int:
    """How many values there are inside, or any number beyond `limit` if there are more."""
    num_values, to_count = 0, [value]
    while to_count and num_values <= limit:
        inside = to_count.pop()
        if isinstance(inside, dict | list):
            num_values += len(inside)
            if num_values <= limit:
                to_count += inside.values() if isinstance(inside, dict) else inside
    return num_values


def _check_plain(value: Any, place: str, depth: int) -> None:
    """Raises InvalidRequest unless `value` is what JSON can say, in numbers of 64 bits and at most `depth` deep."""
    if depth == 0:
        raise InvalidRequest(f"{place} is nested too deeply.", param=place)
    match value:
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InvalidRequest(f"The keys of {place} must be strings.", param=place)
                _check_plain(item, f"{place}.{key}", depth - 1)
        case list():
            for number, item in enumerate(value):
                _check_plain(item, f"{place}[{number}]", depth - 1)
        case int() if not -(2**63) <= value < 2**63:
            raise InvalidRequest(f"{place} is out of range.", param=place)
        case str() | int() | float() | None:
            pass
        case _:
            raise InvalidRequest(f"{place} must be a JSON value.", param=place)
