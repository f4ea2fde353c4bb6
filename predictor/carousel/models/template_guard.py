"""A Jinja sandbox that bounds what a template may do, not only what it may touch.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from attributes and functions, but lets
it loop for hours and build gigabytes in a line. Here every loop, call, filter and operator is charged to a budget,
results are weighed before they are made where they may be much larger than what they are made of, and no value may
weigh more than ``MAX_WEIGHT``. Real templates spend some dozens of units per message.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_WEIGHT = 1 << 24
"""Of a value: characters of text, elements of a list with all that is in them."""

MAX_WORK = 1_000_000
"""Units of a rendering: one per step of a loop, call or operator, and one per 256 of a value's weight. Some seconds."""

MAX_SOURCE = 1 << 20
_MAX_BITS = 4096  # of a number
_WEIGHT_PER_UNIT = 256
# Filters that make text of any size from an argument, and that no chat template needs.
_REMOVED_FILTERS = ("center", "urlize", "xmlattr", "filesizeformat", "pprint", "random", "wordwrap", "slice", "groupby")
_CONTEXTS = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)  # what filters are handed before values
_REMOVED_GLOBALS = ("lipsum", "cycler")
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
# A width or precision of thousands, or one that is itself an argument.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)")


class TemplateLimit(jinja2.TemplateError):
    """The template does more than any chat template needs to."""


class Meter:
    """What one rendering has spent. Weights of containers are remembered: values may share their parts."""

    def __init__(self) -> None:
        self.work = 0.0
        self._known: dict[int, tuple[object, int]] = {}

    def spend(self, units: float) -> None:
        self.work += units
        if self.work > MAX_WORK:
            raise TemplateLimit("the template loops too long")

    def bound(self, weight: int) -> None:
        """Refuse a value of this weight, before it is made."""
        if weight > MAX_WEIGHT:
            raise TemplateLimit("the template makes a value that is too large")
        self.spend(weight / _WEIGHT_PER_UNIT)

    def weigh(self, value: object, depth: int = 0) -> int:
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 4
        if isinstance(value, Mapping):
            parts: list[Any] = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = list(value)
        else:
            return 1
        known = self._known.get(id(value))
        if known is not None and known[0] is value and len(parts) <= known[1]:
            return known[1]
        if depth > 100:
            raise TemplateLimit("the template nests its values too deep")
        self.spend(len(parts) / 8)
        weight = 1 + len(parts) + sum(self.weigh(part, depth + 1) for part in parts)
        self._known[id(value)] = (value, weight)  # held, so that no other value gets its id
        return weight

    def checked(self, value: Any) -> Any:
        self.bound(self.weigh(value))
        return value


class _Transformer(NodeTransformer):
    """Puts a charge into every loop, and around what makes values without a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(_call("meter_tick")), *node.body]
        if node.test is not None:
            node.test = nodes.And(_call("meter_tick"), node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("meter_concat", *node.nodes)

    def _value(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _call("meter_value", node)

    visit_List = visit_Dict = visit_Tuple = _value

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A slice copies, and goes past the environment."""
        self.generic_visit(node)
        return _call("meter_value", node) if isinstance(node.arg, nodes.Slice) and node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call("meter_value", node.expr)
        return node


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Renders with :meth:`run`, in several threads at once if need be: each thread has a meter of its own."""

    intercepted_binops = frozenset({"*", "**", "%", "+", "//", "/", "-"})
    code_generator_class = CodeGenerator

    def __init__(self, **options: Any) -> None:
        self._meters = threading.local()
        super().__init__(finalize=self.meter_shown, **options)
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        for name in _REMOVED_GLOBALS:
            self.globals.pop(name, None)

    @property
    def meter(self) -> Meter:
        """This thread's; compiling, which computes with constants, has one too."""
        if not hasattr(self._meters, "current"):
            self._meters.current = Meter()
        return cast(Meter, self._meters.current)

    def guard_filters(self) -> None:
        """Charge every filter there is; to be called once all are there."""
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded_filter(name, function)

    def _guarded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name == "join":  # what it is to join must be known before
                args = tuple(list(item) if hasattr(item, "__next__") else item for item in args)
            self._charge_filter(name, [item for item in args if not isinstance(item, _CONTEXTS)], kwargs)
            result = function(*args, **kwargs)
            return result if hasattr(result, "__next__") else self.meter.checked(result)

        return guarded

    def _charge_filter(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.meter.spend(1)
        weight = sum(self.meter.weigh(item) for item in [*args, *kwargs.values()])
        self.meter.bound(weight)
        numbers = [item for item in [*args[1:], *kwargs.values()] if isinstance(item, (int, float))]
        most = {"indent": 1000, "batch": 10_000, "tojson": 16, "round": 100}.get(name)
        if most is not None and any(abs(item) > most for item in numbers):
            raise TemplateLimit(f"the filter {name} is given more than {most}")
        if name == "sum" and not all(isinstance(item, (int, float, str)) for item in [*args[1:], *kwargs.values()]):
            raise TemplateLimit("the filter sum adds numbers")
        if name == "indent":
            lines = str(args[0]).count("\n") + 1
            self.meter.bound(
                weight + lines * (4 + sum(len(item) if isinstance(item, str) else 10_000 for item in args[1:]))
            )
        elif name == "replace" and len(args) > 2:
            self.meter.bound(_replaced(str(args[0]), str(args[1]), str(args[2])))
        elif name == "join" and args and hasattr(args[0], "__len__"):
            separator = str(args[1]) if len(args) > 1 else ""
            self.meter.bound(weight + len(args[0]) * len(separator))
        elif name == "format":
            _check_format(str(args[0]))
        elif name == "tojson":
            self.meter.bound(weight * 8)

    # ---- what compiled templates call

    def meter_tick(self) -> bool:
        self.meter.spend(1)
        return True

    def meter_value(self, value: Any) -> Any:
        return self.meter.checked(value)

    def meter_shown(self, value: Any) -> Any:
        """Of everything that is written out; a list is written with all that is in it."""
        self.meter.bound(self.meter.weigh(value))
        return value

    def meter_concat(self, *parts: Any) -> str:
        self.meter.bound(sum(self.meter.weigh(part) for part in parts))
        return "".join(str(part) for part in parts)

    def call_binop(self, context: Any, operator_: str, left: Any, right: Any) -> Any:
        meter = self.meter
        weights = meter.weigh(left), meter.weigh(right)
        if operator_ == "*":
            count, sized = (right, left) if isinstance(right, int) else (left, right)
            many = isinstance(count, int) and not isinstance(sized, (int, float))
            meter.bound(meter.weigh(sized) * max(0, count) if many else sum(weights))
        elif operator_ == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
                raise TemplateLimit("the template makes a number that is too large")
        elif operator_ == "%" and isinstance(left, str):
            _check_format(left)
            meter.bound(sum(weights) * 4)
        else:
            meter.bound(sum(weights))
        result = _OPERATORS[operator_](left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise TemplateLimit("the template makes a number that is too large")
        return meter.checked(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` and ``format_map``, which the sandbox replaces by its own."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(str(value.__self__))
        return wrapped

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter, name, owner = self.meter, getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        meter.spend(1)
        if owner is not self:
            meter.bound(sum(meter.weigh(item) for item in [*args, *kwargs.values()]))
        if isinstance(owner, str):
            self._charge_method(owner, name, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return result if owner is self or isinstance(result, range) else meter.checked(result)

    def _charge_method(self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.meter.spend(len(text) / _WEIGHT_PER_UNIT)
        if name in _PADDING:
            sizes = [item for item in [*args, *kwargs.values()] if isinstance(item, int)]
            self.meter.bound(max([8, *sizes]) * (1 + (text.count("\t") if name == "expandtabs" else 0)))
        elif name == "replace" and len(args) > 1:
            self.meter.bound(_replaced(text, str(args[0]), str(args[1])))
        elif name == "join" and args:
            items = args[0] if isinstance(args[0], (str, list, tuple, dict)) else ()
            self.meter.bound(len(text) * len(items) + sum(self.meter.weigh(item) for item in items))
        elif name in ("translate", "encode"):
            raise TemplateLimit(f"str.{name} is not for templates")

    # ---- compiling and rendering

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        return super()._generate(_Transformer().visit(source), name, filename, defer_init)

    def run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The template's text.

        Raises:
            TemplateLimit: it does too much.
            jinja2.TemplateError: it fails, or refuses.
        """
        self._meters.current = meter = Meter()
        pieces, size = [], 0
        for piece in template.root_render_func(template.new_context(variables)):
            size += len(piece)
            if size > MAX_WEIGHT:
                raise TemplateLimit("the template writes too much")
            meter.spend(0.01)
            pieces.append(piece)
        return "".join(pieces)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "*": operator.mul,
    "**": operator.pow,
    "%": operator.mod,
    "+": operator.add,
    "-": operator.sub,
    "/": operator.truediv,
    "//": operator.floordiv,
}


def _replaced(text: str, old: str, new: str) -> int:
    """Characters of ``text.replace(old, new)``, at most."""
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimit("the template formats with a width that is too large")


def compile_guarded(environment: GuardedEnvironment, source: str) -> jinja2.Template:
    """Compile ``source``.

    Raises:
        jinja2.TemplateError: it is no template, or too long to be one.
    """
    if len(source) > MAX_SOURCE:
        raise TemplateLimit(f"the template has {len(source)} characters, at most {MAX_SOURCE} make sense")
    return environment.from_string(source)
