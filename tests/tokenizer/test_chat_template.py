"""Templates find what they are written for, and cannot do more than make text, nor too much of it."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.chat_template import ChatTemplate
from shared.errors import InvalidRequest, ModelError

PATH = Path("model/tokenizer_config.json")
HI = [{"role": "user", "content": "hi"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, str]] | None = None, **arguments: Any) -> str:
    """The text of a conversation."""
    template = ChatTemplate(source, TOKENS, path=PATH, now=lambda: datetime(2031, 5, 17, 12, 0))
    return template.render(HI if messages is None else messages, arguments)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("{{ bos_token }}x{{ eos_token }}", "<s>x</s>", id="special tokens"),
        pytest.param("{{ pad_token is defined }} {{ tools is none }}", "False False", id="what is not there"),
        pytest.param("{% if add_generation_prompt %}yes{% endif %}", "yes", id="an answer is to begin"),
        pytest.param("a\n  {% if true %}\n b\n  {% endif %}\nc", "a\n b\nc", id="white space around blocks"),
        pytest.param(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01", id="break"
        ),
        pytest.param(
            "{% for i in [1,2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "2", id="continue"
        ),
        pytest.param("{{ {'é': '<b>'} | tojson }}", '{"é": "<b>"}', id="JSON is not written for HTML"),
        pytest.param("{{ [1] | tojson(indent=2) }}", "[\n  1\n]", id="indented JSON"),
        pytest.param(
            "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}', id="keys"
        ),
        pytest.param("{{ strftime_now('%d %b %Y') }}", "17 May 2031", id="today"),
        pytest.param("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!", id="generation tags"),
        pytest.param(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
            id="namespaces",
        ),
        pytest.param("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f(1) }}", "[a][1]", id="macros and ~"),
        pytest.param(
            "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ loop.first }}{% endfor %}",
            "0True1True",
            id="loop variables",
        ),
        pytest.param("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}", "a1", id="items"),
        pytest.param("{% for x in nothing %}{% else %}none{% endfor %}", "none", id="a loop over nothing"),
        pytest.param(
            "{% for x in [3, 4] if x > 3 recursive %}{{ x }}{{ loop.previtem is defined }}{% endfor %}",
            "4False",
            id="filtered loops",
        ),
        pytest.param("{{ messages | map(attribute='content') | join(',') }}", "hi", id="Jinja's own filters"),
        pytest.param("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1", id="and tests"),
        pytest.param(
            "{{ '%s-%d' % ('a', 3) }} {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ 7 // 2 }}", "a-3 1024 abab 3", id="operators"
        ),
        pytest.param("{{ ' a '.strip() + messages[0]['content'][::-1] | upper }}", "aIH", id="methods and slices"),
        pytest.param("{{ dict(a=1) }}", "{'a': 1}", id="dict"),
    ],
)
def test_templates_find_what_they_are_written_for(source: str, expected: str) -> None:
    assert render(source) == expected


def test_arguments_are_variables() -> None:
    source = "{{ enable_thinking }} {{ documents[0].title }} {{ add_generation_prompt }}"
    text = render(source, enable_thinking=False, documents=[{"title": "T"}], add_generation_prompt=False)
    assert text == "False T False"


@pytest.mark.parametrize("name", ["messages", "bos_token", "eos_token"])
def test_arguments_cannot_replace_what_is_the_models_own(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        ChatTemplate("x", TOKENS, path=PATH).render(HI, {name: "y"})
    assert refused.value.param == "chat_template_kwargs"


def test_a_template_may_refuse_a_conversation_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", id="classes"),
        pytest.param("{{ messages.append(1) }}", id="changing messages"),
        pytest.param("{{ messages[0].update({'role': 'x'}) }}", id="changing a message"),
        pytest.param("{{ namespace.__init__.__globals__ }}", id="globals"),
        pytest.param("{{ cycler.__init__.__globals__.os.popen('id').read() }}", id="the system"),
        pytest.param("{{ ('{0.__class__}' | format(1)).x.y }}", id="the format filter"),
        pytest.param("{% include '/etc/passwd' %}", id="files"),
        pytest.param("{% import 'os' as os %}", id="imports"),
        pytest.param("{{ lipsum.__globals__ }}", id="lipsum"),
        pytest.param("{{ messages[0].content + 1 }}", id="wrong types"),
        pytest.param("{{ messages[0].missing.deeper }}", id="what is not there"),
        pytest.param("{% for x in 5 %}{% endfor %}", id="loops over numbers"),
        pytest.param("{{ 1 / 0 }}", id="arithmetic"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", id="endless recursion"),
    ],
)
def test_a_template_that_fails_or_reaches_out_fails_that_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template fails") as refused:
        render(source)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ '{0.__class__.__init__}'.format(1) }}", "{{ x._y }}"])
def test_what_a_template_may_not_see_is_empty(source: str) -> None:
    assert render(source, x={}) == ""


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", id="loops"),
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}", id="output"
        ),
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", id="calls"
        ),
        pytest.param("{% for i in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}", id="output in pieces"),
        pytest.param("{{ 'a' * 10000000000 }}", id="repeated text"),
        pytest.param("{{ ([1] * 10000000000) | length }}", id="repeated lists"),
        pytest.param("{{ 10 ** 10000000 }}", id="powers"),
        pytest.param(
            "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
            id="products",
        ),
        pytest.param(
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            id="doubling with ~",
        ),
        pytest.param(
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            id="doubling with +",
        ),
        pytest.param(
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', 'aa') %}"
            "{% endfor %}",
            id="doubling with methods",
        ),
        pytest.param("{{ 'a' | center(9999999) }}", id="filters"),
        pytest.param("{% for i in range(99999) %}{{ 'a'.center(4000000) | length }}{% endfor %}", id="large pieces"),
    ],
)
def test_a_template_that_runs_away_fails_that_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="too much work") as refused:
        render(source)
    assert refused.value.param == "messages"


def test_long_conversations_are_no_runaways() -> None:
    source = "{% for m in messages %}{{ '[' + m.role.strip() ~ ']' + m.content | trim }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 100}] * 5000
    assert render(source, messages) == ("[user]" + "x" * 100) * 5000


def test_the_budget_is_each_renderings_own() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}done", {}, path=PATH)
    assert [template.render(HI, {}) for _ in range(12)] == ["done"] * 12


def test_rendering_changes_nothing_of_the_clients() -> None:
    messages = [{"role": "user", "content": "hi"}]
    render("{% set m = messages[0] %}{% set messages = [] %}{{ m.content }}", messages)
    assert messages == HI


def test_the_reason_of_a_failure_is_short() -> None:
    with pytest.raises(InvalidRequest) as refused:
        render("{{ raise_exception(messages[0].content * 1000) }}")
    assert len(refused.value.message) < 600


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{% for x in y %}", "{{ x | nosuchfilter }}"])
def test_what_is_no_template_is_the_operators_fault(source: str) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: the chat template cannot be compiled"):
        ChatTemplate(source, {}, path=PATH)


def test_a_template_is_asked_what_it_writes_and_does_not_look_for() -> None:
    source = (
        "<|a|>{{ '<|b|>' }}{% if '<|c|>' in messages[0].content %}<|c|>{% endif %}{{ x.split('<|d|>') }}<|d|>"
        "{{ x | replace('<|e|>', '') }}<|e|>{{ x.startswith(prefix='<|f|>') }}<|f|>{# <|g|> #}"
    )
    candidates = [f"<|{letter}|>" for letter in "abcdefgh"]
    assert ChatTemplate(source, {}, path=PATH).writes(candidates) == {"<|a|>", "<|b|>"}


@pytest.mark.parametrize(
    ("source", "knows"), [("{{ m.role }}", False), ("{% if m.role == 'developer' %}{% endif %}", True)]
)
def test_a_template_is_asked_whether_it_knows_developers(source: str, knows: bool) -> None:
    assert ChatTemplate(source, {}, path=PATH).knows_developers is knows
