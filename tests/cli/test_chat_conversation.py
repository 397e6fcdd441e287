"""The turns of a conversation, and what a typed line means."""

import pytest

from shared.cli.conversation import Command, Conversation, Say, join_lines, read_input


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("", None),
        ("  \n ", None),
        ("hello", Say("hello")),
        (" hello ", Say(" hello ")),
        ("/clear", Command("clear")),
        ("/system  You are terse. ", Command("system", "You are terse.")),
        ("/system Be\nterse.", Command("system", "Be\nterse.")),
        ("/clear\nhello", Command("clear", "hello")),
        ("/", Command("")),
        ("//etc/passwd", Say("/etc/passwd")),
        (" /etc", Say(" /etc")),
    ],
)
def test_a_typed_line_is_for_the_model_or_for_us(line: str, meaning: object) -> None:
    assert read_input(line) == meaning


@pytest.mark.parametrize(
    ("lines", "text"),
    [(["a"], "a"), (["a\\", "b"], "a\nb"), (["a\\", "\\", "c"], "a\n\nc"), (["a\\b"], "a\\b")],
)
def test_a_backslash_at_the_end_goes_on_with_the_next_line(lines: list[str], text: str) -> None:
    assert join_lines(lines) == text


def test_each_request_carries_the_turns_before_it() -> None:
    conversation = Conversation("tiny", system="Be terse.", options={"temperature": 0.0})
    conversation.add("1+1?", "2")
    assert conversation.body("2+2?") == {
        "model": "tiny",
        "temperature": 0.0,
        "messages": [
            {"role": "system", "content": "Be terse."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2+2?"},
        ],
    }


def test_asking_changes_nothing() -> None:
    conversation = Conversation("tiny")
    assert conversation.body("hi") == conversation.body("hi")
    assert conversation.turns == []


def test_a_turn_without_an_answer_is_as_if_it_had_not_been() -> None:
    conversation = Conversation("tiny")
    conversation.add("hi", "")
    assert conversation.turns == []


def test_clearing_keeps_the_system_prompt() -> None:
    conversation = Conversation("tiny", system="Be terse.")
    conversation.add("hi", "hello")
    conversation.clear()
    assert conversation.body("hi")["messages"] == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "hi"},
    ]
