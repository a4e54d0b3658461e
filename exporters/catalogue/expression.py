"""Reading PromQL: which series an expression needs, and whether a given page could ever answer it. The one promql_parser door."""

from __future__ import annotations

import re
from collections.abc import Callable

import promql_parser as ql

from exporters.catalogue.page import Page

# How dashboards hold PromQL: $name, ${name}, ${name:format}, [[name]]; they may stand anywhere, also inside strings, which are left alone.
_VARIABLE = r"(?:\$\{\w+(?::\w+)?\}|\$\w+|\[\[\w+\]\])"
_STRING = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
UNKNOWN_NAME = "__variable__"  # stands for a metric name, or a part of one, that a variable holds

# Where a variable stands tells what it holds. Each rule is tried on what the ones before it left.
_PLACES: tuple[tuple[str, str], ...] = (
    (rf"(?<=\[)\s*{_VARIABLE}(?=\s*[:\]])", "5m"),  # x[$window], x[$window:]
    (rf"(?<=:)\s*{_VARIABLE}\s*(?=\])", "5m"),  # x[1h:$step]
    (rf"\boffset\s+-?\s*{_VARIABLE}", "offset 5m"),
    (rf"(?<=\{{)\s*{_VARIABLE}\s*,?\s*(?=[\w}}])", ""),  # x{$filters}
    (rf"{_VARIABLE}(?=\s*\(|\s+(?:by|without)\b)", "sum"),  # $aggregation(x), $aggregation by (model_name) (x)
    (rf"(?<=[\w:]){_VARIABLE}|{_VARIABLE}(?=[\w:])", UNKNOWN_NAME),  # vllm:${metric}_total
)

Selector = tuple[str, list[tuple[str, str, str]]]  # metric name, (label, op, value)


class BadExpression(ValueError):
    """Text that is no PromQL, also after dashboard variables were filled in."""


def parse(text: str) -> ql.Expr:
    """PromQL, or PromQL as Grafana holds it: variables are replaced by values of the right shape. Raises BadExpression."""
    plain = text
    for pattern, value in _PLACES:
        plain = _outside_strings(pattern, value, plain)
    plain = _GROUPING.sub(lambda clause: re.sub(_VARIABLE, "model_name", clause[0]), plain)
    told = None
    for value in ("1", UNKNOWN_NAME):  # what is left holds a number, such as a quantile, or a whole metric name
        try:
            return ql.parse(_outside_strings(_VARIABLE, value, plain))
        except ValueError as error:
            told = told or error
    raise BadExpression(f"not PromQL: {told}: {text}")


def _outside_strings(pattern: str, value: str, text: str) -> str:
    return re.sub(rf"({_STRING})|{pattern}", lambda found: found[1] or value, text)


def selectors(text: str) -> list[Selector]:
    """Every series selector of an expression, in order. Raises BadExpression."""
    found: list[Selector] = []

    def visit(node: ql.Expr) -> bool:
        if isinstance(node, ql.VectorSelector):
            found.append(_selector(node))
        return True

    ql.walk(parse(text), visit)
    return found


def names(text: str) -> set[str]:
    """The sample names that an expression reads, as far as no variable holds them. Raises BadExpression."""
    return {name for name, _ in selectors(text) if name and UNKNOWN_NAME not in name}


def answers(text: str, page: Page, judge: Callable[[str], bool]) -> bool:
    """Whether the expression can ever return something on a target whose page this is.

    judge(name) says whether a sample name belongs on this page at all; series of other components count as there.
    `or` needs one side, every other operator both, and `absent` asks for what is missing. Raises BadExpression."""

    def alive(node: ql.Expr) -> bool:
        match node:
            case ql.VectorSelector():
                name, matchers = _selector(node)
                return UNKNOWN_NAME in name or not judge(name) or _matches(page, name, matchers)
            case ql.MatrixSelector():
                return alive(node.vector_selector)
            case ql.BinaryExpr():
                op = str(node.op)
                if op == "or":
                    return alive(node.lhs) or alive(node.rhs)
                return alive(node.lhs) and (op == "unless" or alive(node.rhs))
            case ql.Call():
                return node.func.name.startswith("absent") or all(alive(arg) for arg in node.args)
            case ql.AggregateExpr() | ql.ParenExpr() | ql.UnaryExpr() | ql.SubqueryExpr():
                return alive(node.expr)
            case _:
                return True

    return alive(parse(text))


_OPERATORS = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}


def _selector(node: ql.VectorSelector) -> Selector:
    matchers = [(m.name, _OPERATORS[str(m.op).split(".")[-1]], m.value) for m in node.matchers.matchers]
    name = node.name or next((value for label, op, value in matchers if (label, op) == ("__name__", "=")), "")
    return name, [m for m in matchers if m[0] != "__name__"]


def _matches(page: Page, name: str, matchers: list[tuple[str, str, str]]) -> bool:
    rows = page.of(name)
    on_page = {label for labels, _ in rows for label in labels}
    # job, instance and the like come from the scrape; what a variable holds is not known here
    asked = [m for m in matchers if m[0] in on_page and not re.search(_VARIABLE, m[2])]
    return any(all(_holds(labels.get(label, ""), op, value) for label, op, value in asked) for labels, _ in rows)


def _holds(have: str, op: str, value: str) -> bool:
    if op in ("=", "!="):
        return (have == value) is (op == "=")
    try:
        return (re.fullmatch(value, have) is not None) is (op == "=~")
    except re.error:  # Prometheus reads RE2, which knows a few forms that Python does not: not ours to judge
        return True
