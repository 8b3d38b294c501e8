"""The Jinja environment of chat templates: a sandbox whose every evaluation ends.

Names and options are Hugging Face's. Loops, macros and calls look at the clock, and an operation
that would make a text, list or number too large is refused before it starts. What a hostile
template can still do is spend its time; templates come with the model, never from a client.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from xylite.text.written import Written, format_written, joined, written

MAX_RENDERED_CHARS = 32 * 2**20
MAX_BUILT_CHARS = 8 * MAX_RENDERED_CHARS  # all intermediate texts together
MAX_LIST = 10**6
MAX_WIDTH = 10**4  # of padding, indentation, a number's digits, ...

_PERCENT = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%(]*)")  # flags, width, precision

# Filters whose numbers are widths or counts, and filters that print what they are given.
_WIDE = frozenset(("batch", "center", "indent", "round", "slice", "truncate", "wordwrap"))
_PRINTING = frozenset(
    ("capitalize", "center", "e", "escape", "forceescape", "indent", "lower", "pprint", "safe")
    + ("striptags", "title", "trim", "truncate", "upper", "urlencode", "wordcount", "wordwrap")
)


class Refused(jinja2.TemplateError):
    """The template does more than it may."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still use. CPU time of its thread: a busy machine is no fault."""

    deadline: float = float("inf")
    chars: int = MAX_BUILT_CHARS

    def tick(self) -> None:
        if time.thread_time() > self.deadline:
            raise Refused("the chat template takes too long for these messages")

    def spend(self, chars: int) -> None:
        self.chars -= chars
        if chars > MAX_RENDERED_CHARS or self.chars < 0:
            raise Refused(f"the chat template makes more than {MAX_RENDERED_CHARS} characters")
        self.tick()


class _Generation(Extension):
    """`{% generation %}`: marks assistant text for training, and is only a scope here."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    @staticmethod
    def _block(caller: Callable[[], str]) -> str:
        return caller()


class _Code(CodeGenerator):
    """Python code of a template in which its own text is `Written`."""

    def _output_const_repr(self, group: Any) -> str:
        return f"environment.written({''.join(map(str, group))!r})"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if type(value) is str:
            self.write(f"environment.written({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.written({node.as_const(frame.eval_ctx)!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("environment.to_text(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.to_text(")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


class Sandbox(ImmutableSandboxedEnvironment):
    """Hugging Face's environment, with the limits above."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    written = staticmethod(written)

    def __init__(self, now: Callable[[], datetime]):
        def strftime_now(format: str) -> str:
            return now().strftime(format)

        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.in_thread = threading.local()  # its `budget` is what this thread's rendering has left
        self.concat = self._concat
        usual: dict[str, Callable[..., Any]] = dict(self.filters)
        names: dict[str, Any] = dict(self.globals)
        del usual["urlize"], names["lipsum"]  # no bound on what they make
        self.filters = {name: self._guarded(name, function) for name, function in usual.items()}
        self.filters |= {
            "tojson": self._tojson,
            "join": self._join,
            "format": self._format,
            "replace": self._replace,
            "string": self.to_text,
            "sum": self._sum,
        }
        self.globals = names | {
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        tree.set_environment(self)
        return tree

    def tick(self) -> None:
        self._left().tick()

    def _left(self) -> Budget:
        """The budget of this rendering; constants are folded at compile time without one."""
        return getattr(self.in_thread, "budget", None) or Budget()

    def _concat(self, parts: Any) -> str:
        parts = list(parts)
        self._left().spend(sum(map(len, parts)))
        return joined(parts)

    def to_text(self, value: Any) -> str:
        """str(value), refused if that is too long: lists may hold one thing many times."""
        if isinstance(value, str):
            return value
        self._measure(value)
        return str(value)

    def _measure(self, value: Any) -> None:
        budget = self._left()
        stack = [value]
        while stack:
            x = stack.pop()
            if isinstance(x, str):
                budget.spend(len(x))
            elif isinstance(x, Namespace):
                stack.append(object.__getattribute__(x, "_Namespace__attrs"))
            elif isinstance(x, Mapping):
                stack += (*x.keys(), *x.values())
            elif isinstance(x, list | tuple | set | frozenset):
                stack += x
            budget.spend(1)
            if len(stack) > MAX_LIST:
                raise Refused(f"the chat template prints more than {MAX_LIST} values")

    def _widths(self, *values: Any) -> None:
        """Refuse numbers that could be the width of something too large."""
        for x in values:
            if isinstance(x, int) and abs(x) > MAX_WIDTH:
                raise Refused(f"the chat template uses {x}; the limit here is {MAX_WIDTH}")

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that ends in time. jinja2 may pass its context first, then comes the value."""
        value_at = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # keeps jinja2's mark that the filter wants its context
        def guarded(*args: Any, **kwargs: Any) -> Any:
            value = args[value_at] if len(args) > value_at else None
            if isinstance(value, str):
                options = (*args[value_at + 1 :], *kwargs.values()) if name in _WIDE else ()
                self._widths(*options)
                widest = max((_width(x) for x in options), default=0)
                rows = len(value) if name == "wordwrap" else 1 + value.count("\n")
                self._left().spend(len(value) + widest * rows)
            elif name in _WIDE:
                self._widths(*args[value_at + 1 :], *kwargs.values())
            if name in _PRINTING:
                self._measure(value)
            self.tick()
            return function(*args, **kwargs)

        return guarded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = self._left()
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            # The bits of the result, about.
            bits = left.bit_length()
            self._widths(bits * right if operator == "**" else bits + right.bit_length())
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, Sized):
                    budget.spend(_weight(many) * max(times, 0))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.spend(_weight(left) + _weight(right))
        elif operator == "%" and isinstance(left, str | bytes):
            if isinstance(left, bytes):
                raise Refused("the chat template formats bytes")
            self._check_format(_PERCENT.findall(left), right)
        return super().call_binop(context, operator, left, right)

    def _check_format(self, specs: Iterable[str], values: Any) -> None:
        """Refuse formatting whose result is too long; a spec is what says a value's width."""
        widths: list[int] = []
        for spec in specs:
            if "*" in spec or "{" in spec:
                raise Refused("the chat template formats with a width given as an argument")
            widths += map(int, re.findall(r"\d+", spec))
        self._widths(*widths)
        self._left().spend(sum(widths))
        self._measure(values)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TypeError("format takes positional or named values, not both")
        template = self.to_text(value)
        self._check_format(_PERCENT.findall(template), (args, kwargs))
        return template % (kwargs or args)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        usual = super().wrap_str_format(value)
        if usual is None:
            return None
        template = value.__self__

        def guarded(*args: Any, **kwargs: Any) -> str:
            specs = [spec or "" for _, _, spec, _ in Formatter().parse(template)]
            self._check_format(specs, (args, kwargs))
            if isinstance(template, Written) and value.__name__ == "format":
                return format_written(SandboxedFormatter(self), template, args, kwargs)
            return str(usual(*args, **kwargs))

        return guarded

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        text = getattr(obj, "__self__", None)
        if isinstance(text, str | bytes):
            # jinja2 adds its loop's variables to every call's arguments.
            options = [*args, *(v for k, v in kwargs.items() if k[0] != "_")]
            name = obj.__name__
            if name == "replace" and isinstance(text, str) and len(options) in (2, 3):
                return self._replace(text, *options)
            if name == "join" and isinstance(text, str) and len(options) == 1:
                return self._joined(text, options[0])
            self._left().spend(len(text))
            if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                self._widths(*options)
                width = max(map(_width, options), default=8)
                self._left().spend(width * (len(text) if name == "expandtabs" else 1))
        return super().call(context, obj, *args, **kwargs)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = -1) -> str:
        text, old, new = self.to_text(value), self.to_text(old), self.to_text(new)
        self._left().spend(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _joined(self, separator: str, items: Any) -> str:
        parts = list(items)
        chars = sum(len(x) for x in parts if isinstance(x, str))
        self._left().spend(chars + len(separator) * len(parts))
        return separator.join(parts)

    def _join(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        separator = self.to_text(d)
        # Joining by a client's string would forget what the template wrote.
        parts = [self.to_text(x) for x in value]
        self._left().spend(sum(map(len, parts)) + len(separator) * len(parts))
        return joined([x for p in parts for x in (separator, p)][1:])

    def _sum(self, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise Refused("the chat template sums something other than numbers")
        if attribute is not None:
            iterable = map(make_attrgetter(self, attribute), iterable)
        return sum(iterable, start)

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as Hugging Face's templates expect it: no HTML escapes, letters as they are."""
        self._measure(x)
        if isinstance(indent, int) and not 0 <= indent <= 16:
            raise Refused(f"tojson(indent={indent}): the limit is 16")
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )


def _weight(value: Sized) -> int:
    """Size in characters; an entry of a list takes as much memory as 8."""
    return len(value) * (1 if isinstance(value, str | bytes) else 8)


def _width(option: Any) -> int:
    return option if isinstance(option, int) else len(option) if isinstance(option, str) else 0
