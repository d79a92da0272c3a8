"""The environment in which chat templates run: they are programs, and they come with models of
strangers.

On top of jinja2's sandbox (no attribute that leads out of the template, no change of an argument)
every rendering has a budget of work and every text in it a largest size, so that a template ends in
bounded time and memory whatever is in it. Each construct of which a template can run many (an
iteration, a call, a filter, a concatenation) pays from the budget, and looks at the clock, as some
that do not pay can be slow as well (comparisons of long lists); those that make large values out of
small ones are asked for the size before they make it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

__all__ = ["LimitedEnvironment", "TemplateLimitError"]

TEXT_MAX = 16 << 20  # characters: several times the context of any model
WORK_MAX = 1_000_000  # a second or two; a chat of a thousand messages takes about 20 000
SECONDS_MAX = 10.0  # more than all of that work takes on a slow machine
# Reading this number of characters or items costs about as much as a call.
_CHARACTERS_PER_WORK = 256
_ITEMS_PER_WORK = 16
_INT_BITS_MAX = 4096
_NUMBER_OF_SEVEN_DIGITS = re.compile(r"\d{7,}")


class TemplateLimitError(jinja2.exceptions.TemplateRuntimeError):
    """A template that asks for more than any chat needs."""


class _Budget:
    """What a rendering may still do."""

    def __init__(self) -> None:
        self._work = WORK_MAX
        self._deadline = time.monotonic() + SECONDS_MAX

    def pay(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise TemplateLimitError("the template works without end")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the template works for more than {SECONDS_MAX:g} seconds")


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar(
    "quire_template_budget", default=None
)


class _Code(jinja2.compiler.CodeGenerator):
    """Compiles loops and concatenations so that they pay."""

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        counted = jinja2.nodes.EnvironmentAttribute("counted", lineno=node.lineno)
        counted.environment = self.environment
        node.iter = jinja2.nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        node.iter.environment = self.environment
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.joined((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with limits. Filters that are added to it must be wrapped by :meth:`add_filter`."""

    code_generator_class = _Code
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_printed, **options)
        for name, filter in list(self.filters.items()):
            self.add_filter(name, filter)
        # It makes as much text as it is asked for, and no chat needs it.
        self.globals.pop("lipsum", None)

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        @functools.wraps(filter)  # also copies the marks of filters that take the context
        def limited(*args: Any, **kwargs: Any) -> Any:
            _check_arguments(name, _values(args, kwargs))
            return _paid(filter(*args, **kwargs))

        self.filters[name] = limited

    @contextlib.contextmanager
    def rendering(self) -> Iterator[None]:
        """A rendering: the work inside is counted."""
        token = _budget.set(_Budget())
        try:
            yield
        finally:
            _budget.reset(token)

    # ---- What compiled templates call

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop, each paid for."""
        for value in values:
            _pay(1)
            yield value

    def joined(self, parts: Iterable[Any]) -> str:
        parts = list(parts)
        _check_size(sum(map(_text_size, parts)))
        return str(_paid("".join(map(str, parts))))

    def call(
        self, context: jinja2.runtime.Context, callee: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        # jinja2 wraps the format methods of texts.
        method = getattr(callee, "__wrapped__", callee)
        owner = getattr(method, "__self__", None)
        of_text = (owner,) if isinstance(owner, (str, bytes)) else ()
        name = str(getattr(method, "__name__", ""))
        _check_arguments(name, (*of_text, *_values(args, kwargs)))
        return _paid(super().call(context, callee, *args, **kwargs))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        _check_operands(operator, left, right)
        return _paid(super().call_binop(context, operator, left, right))


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments, without what jinja2 itself hands over."""
    own = (jinja2.runtime.Context, jinja2.Environment, jinja2.nodes.EvalContext)
    return tuple(value for value in (*args, *kwargs.values()) if not isinstance(value, own))


def _pay(work: int) -> None:
    budget = _budget.get()
    if budget is not None:  # else it is a constant, computed while the template is compiled
        budget.pay(work)


def _cost(value: Any) -> int:
    """The work of reading or making a value."""
    if isinstance(value, (str, bytes)):
        return len(value) // _CHARACTERS_PER_WORK
    return len(value) // _ITEMS_PER_WORK if isinstance(value, (list, tuple, dict)) else 0


def _check_size(size: int) -> None:
    if size > TEXT_MAX:
        raise TemplateLimitError(
            f"the template makes a value of {size} characters or items; the limit is {TEXT_MAX}"
        )


def _printed(value: Any) -> Any:
    """What stands in double braces, before it becomes text."""
    _pay(1)
    if not isinstance(value, str):
        _text_size(value)
    return value


def _paid(value: Any) -> Any:
    """A new value, after its size was checked and paid."""
    size = len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0
    _check_size(size)
    _pay(4 + _cost(value))
    return value


def _text_size(value: Any) -> int:
    """Characters of a value as text, at least, counted until they are too many. Containers may
    hold the same text many times, so their own length says little."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item
        size += 1
        _check_size(size + len(waiting))
        if size % 4 == 0:
            _pay(1)
    return size


# Filters and methods that make text of whatever they are given.
_PRINTERS = {"string", "tojson", "pprint", "join", "urlencode", "xmlattr", "upper", "lower"}
# Those that put something in between, before or instead of parts of a text.
_FILLERS = {"format", "format_map", "indent", "wordwrap", "expandtabs", "replace", "translate"}
# Those that take numbers as they are; elsewhere a number may be a width or a count.
_NUMERIC = {"tojson", "string", "int", "float", "abs", "round", "default", "d", "max", "min"}


def _check_arguments(name: str, values: tuple[Any, ...]) -> None:
    """Before a filter or a method runs: what it is given, the text that it belongs to first."""
    _pay(sum(map(_cost, values)))
    if name not in _NUMERIC:
        for value in values:
            if isinstance(value, (int, float)) and abs(value) > TEXT_MAX:
                raise TemplateLimitError(f"the template calls {name} with the number {value}")
    if name in _PRINTERS:
        sizes = [_text_size(value) for value in values]
        if name == "join":
            items = max((len(v) for v in values if isinstance(v, (list, tuple))), default=0)
            _check_size(sum(sizes) + items * sum(len(v) for v in values if isinstance(v, str)))
        elif name == "tojson":
            indents = [value for value in values[1:] if isinstance(value, int)]
            _check_size(sum(sizes) * (1 + max(indents, default=0)))
    elif name in _FILLERS and values:
        _check_filling(name, values[0], values[1:])


def _check_filling(name: str, text: Any, fillings: tuple[Any, ...]) -> None:
    """`text` with fillings at as many places as it can have."""
    if not isinstance(text, (str, bytes)):
        return
    source = text if isinstance(text, str) else text.decode("latin-1")
    if name in ("format", "format_map", "%"):
        places = source.count("{") + source.count("%")
        if _NUMBER_OF_SEVEN_DIGITS.search(source):
            raise TemplateLimitError("the template formats with a width of seven digits or more")
    elif name == "replace" and fillings and fillings[0] and isinstance(fillings[0], str):
        places = source.count(fillings[0])
    else:
        places = len(source) + 1
    widths = [filling for filling in fillings if isinstance(filling, int)]
    widest = max([8, *widths, *(_text_size(filling) for filling in fillings)])
    _check_size(len(source) + places * widest)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sized = (str, bytes, list, tuple)
    if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        _check_size(len(left) + len(right))
    elif operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, sized) and isinstance(count, int):
                _check_size(len(value) * max(count, 0))
    elif operator == "%":
        values = right if isinstance(right, tuple) else (right,)
        _check_filling("%", left, values)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else 0
        if max(bits, left.bit_length(), right.bit_length()) > _INT_BITS_MAX:
            raise TemplateLimitError("the template computes with numbers of thousands of digits")
