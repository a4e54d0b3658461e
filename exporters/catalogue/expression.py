"""Reading PromQL: which series an expression needs, and whether a given page could ever answer it. The one promql_parser door."""

from __future__ import annotations

import re
from collections.abc import Callable

import promql_parser as ql

from exporters.catalogue.page import Page

_MACROS = re.compile(r"\$__(?:rate_interval|interval|range)(?:_s|_ms)?\b|\$\{__\w+\}|\[\[\w+\]\]")
_DURATION = re.compile(r"(?<=[\[:])\s*\$\{?\w+(?::\w+)?\}?|offset\s+\$\w+")
_VARIABLE = r"\$\{?\w+(?::\w+)?\}?"
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_OUTSIDE_STRINGS = re.compile(rf"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|{_VARIABLE}""")

Selector = tuple[str, list[tuple[str, str, str]]]  # metric name, (label, op, value)


class BadExpression(ValueError):
    """Text that is no PromQL, also after dashboard variables were filled in."""


def parse(text: str) -> ql.Expr:
    """PromQL, or PromQL as Grafana holds it: variables and macros are replaced by values of the right shape. Raises BadExpression."""
    plain = _DURATION.sub("5m", _MACROS.sub("5m", text))
    try:
        return ql.parse(plain)
    except ValueError:
        try:
            labelled = _GROUPING.sub(lambda clause: re.sub(_VARIABLE, "model_name", clause[0]), plain)
            return ql.parse(_OUTSIDE_STRINGS.sub(lambda found: found[1] or "1", labelled))
        except ValueError as error:
            raise BadExpression(f"not PromQL: {error}: {text}") from error


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
    """The sample names that an expression reads. Raises BadExpression."""
    return {name for name, _ in selectors(text) if name}


def answers(text: str, page: Page, judge: Callable[[str], bool]) -> bool:
    """Whether the expression can ever return something on a target whose page this is.

    judge(name) says whether a sample name belongs on this page at all; series of other components count as there.
    `or` needs one side, every other operator both, and `absent` asks for what is missing. Raises BadExpression."""

    def alive(node: ql.Expr) -> bool:
        match node:
            case ql.VectorSelector():
                name, matchers = _selector(node)
                return not judge(name) or _matches(page, name, matchers)
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


def _selector(node: ql.VectorSelector) -> Selector:
    matchers = [(m.name, {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}[str(m.op).split(".")[-1]], m.value)
                for m in node.matchers.matchers]  # fmt: skip
    name = node.name or next((value for label, op, value in matchers if (label, op) == ("__name__", "=")), "")
    return name, [m for m in matchers if m[0] != "__name__"]


def _matches(page: Page, name: str, matchers: list[tuple[str, str, str]]) -> bool:
    rows = page.of(name)
    on_page = {label for labels, _ in rows for label in labels}
    asked = [m for m in matchers if m[0] in on_page and "$" not in m[2]]  # job, instance and the like come from the scrape
    return any(all(_holds(labels.get(label, ""), op, value) for label, op, value in asked) for labels, _ in rows)


def _holds(have: str, op: str, value: str) -> bool:
    match op:
        case "=":
            return have == value
        case "!=":
            return have != value
        case "=~":
            return re.fullmatch(value, have) is not None
        case _:
            return re.fullmatch(value, have) is None
