"""Where chat templates run: Jinja's sandbox, with a bound on the work and the memory that one rendering may take.

Templates come with models from anywhere, and what they loop over comes from clients. A budget of steps is spent by
every turn of a loop, every call, every filter and every text that is made, more for a long one. The bound is a count
and not a time, so a template that passes on an idle machine passes on a busy one.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 1_000_000
"""0.1 s of empty loops, 1 s of calls. A template takes some dozens of steps for each message."""
MAX_CHARS: Final = 4 << 20
"""Of any one text, the rendered one among them: about a million tokens."""
_CHARS_PER_STEP: Final = 1024
_STEPS_PER_CALL: Final = 10
_MAX_INTEGER_BITS: Final = 4096


class TooMuchWork(Exception):
    """A rendering that went beyond its budget."""


class _Budget:
    __slots__ = ("num_steps_left",)

    def __init__(self) -> None:
        self.num_steps_left = MAX_STEPS

    def spend(self, num_steps: int) -> None:
        self.num_steps_left -= num_steps
        if self.num_steps_left < 0:
            raise TooMuchWork(f"more than {MAX_STEPS} steps")

    def spend_on(self, value: Any, num_steps: int = 1) -> None:
        """Some steps, and what it costs to have made this value."""
        num_chars = len(value) if isinstance(value, str | list | tuple) else 0
        if num_chars > MAX_CHARS:
            raise TooMuchWork(f"a text of more than {MAX_CHARS} characters")
        if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
            raise TooMuchWork(f"a number of more than {_MAX_INTEGER_BITS} bits")
        self.spend(num_steps + num_chars // _CHARS_PER_STEP)


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def budget() -> Iterator[None]:
    """Compile or render one template here."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, bounded. Compile and render inside `budget()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]) -> None:
        """`filters` and `functions` come on top of Jinja's own."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.globals.pop("lipsum")
        self.globals.update(functions)
        self.filters = {name: _bounded(function) for name, function in {**self.filters, **filters}.items()}
        self.filters |= {_EACH: _each, _JOINED: _joined}

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method."""
        value = super().call(context, function, *args, **kwargs)
        _budget.get().spend_on(value, _STEPS_PER_CALL)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be much larger than its operands."""
        if operator == "*":
            _check_repetition(left, right)
        if operator == "**":
            _check_power(left, right)
        value = super().call_binop(context, operator, left, right)
        _budget.get().spend_on(value)
        return value

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(_Bounded().visit(source), name, filename, defer_init)


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it means nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EACH: Final = "each turn is counted"
_JOINED: Final = "joined text is counted"
"""Names that no template can write."""


class _Bounded(NodeTransformer):
    """Has the turns of loops and the text made by `~` counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  # named for the node's class
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _EACH, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


class _Each:
    """An iterable that spends a step for each item; as long as the original, for `loop.length`."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        spend = _budget.get().spend
        for item in self._items:
            spend(1)
            yield item

    def __len__(self) -> int:
        return len(self._items)


@pass_context  # and so never evaluated at compile time
def _each(_context: Context, items: Any) -> _Each:
    return _Each(items)


def _joined(values: list[Any]) -> str:
    text = "".join(map(str, values))
    _budget.get().spend_on(text)
    return text


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's marks of what else the filter is given
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        _budget.get().spend_on(value)
        return value

    return bounded


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_INTEGER_BITS:
        raise TooMuchWork(f"a number of more than {_MAX_INTEGER_BITS} bits")


def _check_repetition(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int) and len(sequence) * times > MAX_CHARS:
            raise TooMuchWork(f"a text of more than {MAX_CHARS} characters")
