"""PromQL analysis: the series an expression reads, its operations, and whether an exposition can satisfy it.

Invariant: this is the only module that imports promql_parser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import lru_cache

import promql_parser as ql

from exporters.catalogue.exposition_parser import Exposition

# How dashboards hold PromQL: $name, ${name}, ${name:format}, [[name]]; they may stand anywhere, also inside strings,
# which are left alone.
_VARIABLE = r"(?:\$\{\w+(?::\w+)?\}|\$\w+\b|\[\[\w+\]\])"
_STRING = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
UNKNOWN_NAME = "__variable__"  # stands for a metric name, or a part of one, that a variable holds

# The position of a variable determines its value. Rules apply in this order.
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
    """Text that is not PromQL, even after dashboard variables were replaced."""


# dashboards repeat the same few hundred expressions; parsed ones are never modified
@lru_cache(4096)
def parse(text: str) -> ql.Expr:
    """Parse PromQL, also with Grafana variables, which are replaced by values of the right type.

    Raises BadExpression."""
    plain = text
    for pattern, value in _PLACES:
        plain = _outside_strings(pattern, value, plain)
    plain = _GROUPING.sub(lambda clause: re.sub(_VARIABLE, "model_name", clause[0]), plain)
    first_error = None
    for value in ("1", UNKNOWN_NAME):  # remaining variables hold a number, such as a quantile, or a metric name
        try:
            return ql.parse(_outside_strings(_VARIABLE, value, plain))
        except ValueError as error:
            first_error = first_error or error
    raise BadExpression(f"not PromQL: {first_error}: {text}")


def pretty(text: str) -> str:
    """Format an expression over several lines. Raises BadExpression."""
    return str(parse(text).prettify())


def _outside_strings(pattern: str, value: str, text: str) -> str:
    return re.sub(rf"({_STRING})|{pattern}", lambda found: found[1] or value, text)


def selectors(text: str) -> list[Selector]:
    """Return every series selector of an expression, in order. Raises BadExpression."""
    return [_selector(node) for node in _nodes(parse(text)) if isinstance(node, ql.VectorSelector)]


def has_matcher(text: str, label: str, value: str) -> bool:
    """Return True if every selector of an expression has the matcher label="value". Raises BadExpression."""
    return all((label, "=", value) in matchers for _, matchers in selectors(text))


@lru_cache(4096)
def names(text: str) -> frozenset[str]:
    """Return the sample names that an expression reads, except names in variables. Raises BadExpression."""
    return frozenset(name for name, _ in selectors(text) if name and UNKNOWN_NAME not in name)


def answers(text: str, exposition: Exposition, expected: Callable[[str], bool]) -> bool:
    """Return True if an expression can return a value on a target with this exposition.

    expected(name) is True if a sample name belongs in this exposition; series of other components count as present.
    `or` needs one side, every other operator both, and `absent` matches what is missing. Raises BadExpression."""

    def alive(node: ql.Expr) -> bool:
        match node:
            case ql.VectorSelector():
                name, matchers = _selector(node)
                return UNKNOWN_NAME in name or not expected(name) or _matches(exposition, name, matchers)
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


def _matches(exposition: Exposition, name: str, matchers: list[tuple[str, str, str]]) -> bool:
    rows = exposition.of(name)
    exposed_labels = {label for labels, _ in rows for label in labels}
    # job, instance and the like come from the scrape; values of variables are unknown
    known = [m for m in matchers if m[0] in exposed_labels and not re.search(_VARIABLE, m[2])]
    return any(all(_holds(labels.get(label, ""), op, value) for label, op, value in known) for labels, _ in rows)


def _holds(have: str, op: str, value: str) -> bool:
    if op in ("=", "!="):
        return (have == value) is (op == "=")
    try:
        return (re.fullmatch(value, have) is not None) is (op == "=~")
    except re.error:  # RE2 has a few forms that Python lacks: assume a match
        return True


# Operations on a series, and the labels of a result. Two results match only with equal labels, so both are derived
# bottom-up: `of` gives the labels of a sample name, the rest follows from PromQL's rules.

LabelsOf = Callable[[str], Set[str]]
_RANGE = r"(?<!\[)\[\s*([^\[\]:]+?)\s*(?=[:\]])"  # x[5m], x[$__rate_interval], x[1h:]; not [[name]]
_PRESENCE = ("and", "unless")  # the right side only filters the left one
_COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")
_PICKS = ("topk", "bottomk", "limitk", "limit_ratio")  # aggregations that return series unchanged
# aggregations with a positive result for positive input
_STAY_POSITIVE = ("sum", "min", "max", "avg", "group", *_PICKS)


@dataclass(frozen=True, slots=True)
class SelectorUse:
    """One selector of an expression and the operations on it.

    above: innermost first: functions, aggregations and operators, a comparison that gives 0 or 1 as `> bool`, and
    `presence` where only existence counts. window: as written, else empty."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    above: tuple[str, ...]
    window: str = ""


def reads(text: str) -> list[SelectorUse]:
    """Return every selector of an expression with the operations on it, in order. Raises BadExpression."""
    written: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        written.append(found[2])
        return f"[{len(written)}ms"

    numbered = re.sub(rf"({_STRING})|{_RANGE}", number, text)

    def visit(node: ql.Expr, above: tuple[str, ...], window: str) -> Iterator[SelectorUse]:
        if isinstance(node, ql.VectorSelector):
            name, matchers = _selector(node)
            yield SelectorUse(name, tuple(matchers), above, window)
        if isinstance(node, ql.MatrixSelector):
            window = written[round(node.range.total_seconds() * 1000) - 1]
        for done, below in _below(node):
            yield from visit(below, (done, *above) if done else above, window)

    return [SelectorUse(r.name, r.matchers, r.above, r.window) for r in visit(parse(numbered), (), "")]


def labels(text: str, of: LabelsOf) -> Set[str]:
    """Return the labels that the result can have. Raises BadExpression."""
    return _labels(parse(text), of)


def some_labels(text: str, of: LabelsOf) -> Set[str]:
    """Return the labels that at least one branch of `or` can have: a legend omits labels that a series lacks.

    Raises BadExpression."""
    return set().union(*(_labels(branch, of) for branch in _alternatives(parse(text))))


def lost_labels(text: str, of: LabelsOf) -> list[str]:
    """Yield one sentence for each use of a label that was dropped or never existed. Raises BadExpression.

    Covers grouping by such a label, a quantile of buckets without `le`, and two sides that never match because their
    labels differ."""
    return [sentence for node in _nodes(parse(text)) for sentence in _lost(node, of)]


def unguarded(text: str) -> list[str]:
    """Yield the divisors that may be 0, which gives NaN or Inf. `> 0` around one omits the result instead.

    Raises BadExpression."""
    divisions = [node for node in _nodes(parse(text)) if isinstance(node, ql.BinaryExpr) and str(node.op) in ("/", "%")]
    return [str(node.rhs) for node in divisions if not _never_zero(node.rhs)]


def made_up(text: str) -> list[str]:
    """Yield the right sides of `or` that read no series, such as vector(0): they show a value without data.

    Raises BadExpression."""
    alternatives = [
        node.rhs for node in _nodes(parse(text)) if isinstance(node, ql.BinaryExpr) and str(node.op) == "or"
    ]
    return [str(side) for side in alternatives if not any(isinstance(node, ql.VectorSelector) for node in _nodes(side))]


def quantiles(text: str) -> list[float]:
    """Return the quantiles computed from histograms, 0 to 1, except those in variables. Raises BadExpression."""
    calls = [
        node for node in _nodes(parse(text)) if isinstance(node, ql.Call) and node.func.name == "histogram_quantile"
    ]
    known = [node.args[0].val for node in calls if isinstance(node.args[0], ql.NumberLiteral)]
    # a variable was read as 1; 0 and 1 give bucket bounds
    return [q for q in known if 1e-9 < q < 1]


def unconditional(text: str) -> list[str]:
    """Yield the branches of `or` that return a value whenever there is data, without comparison or `unless`.

    `>= 0` around a quantile only removes NaN: it is no condition. Raises BadExpression."""
    return [str(branch) for branch in _branches(parse(text)) if not _conditional(branch)]


def windows_s(text: str) -> list[float]:
    """Return every range of an expression in seconds, including subqueries. Raises BadExpression."""
    ranges = (node.range for node in _nodes(parse(text)) if isinstance(node, ql.MatrixSelector | ql.SubqueryExpr))
    return [over.total_seconds() for over in ranges if over]


def _alternatives(node: ql.Expr) -> Iterator[ql.Expr]:
    """Yield the branches of `or` that reach the result, also through filters."""
    if isinstance(node, ql.BinaryExpr) and str(node.op) in _PRESENCE:
        yield from _alternatives(node.lhs)
        return
    for branch in _branches(node):
        if branch is node:
            yield node
        else:
            yield from _alternatives(branch)


def _branches(node: ql.Expr) -> Iterator[ql.Expr]:
    match node:
        case ql.ParenExpr():
            yield from _branches(node.expr)
        case ql.BinaryExpr() if str(node.op) == "or":
            yield from _branches(node.lhs)
            yield from _branches(node.rhs)
        case _:
            yield node


def _conditional(node: ql.Expr) -> bool:
    """Return True if the result depends on more than the presence of data."""
    match node:
        case ql.Call() if node.func.name.startswith("absent"):
            return True
        case ql.BinaryExpr():
            op, either = str(node.op), _conditional(node.lhs) or _conditional(node.rhs)
            if op in _COMPARISONS:
                filters = not (node.modifier and node.modifier.return_bool)
                no_number = op == ">=" and isinstance(node.rhs, ql.NumberLiteral) and node.rhs.val == 0
                return (filters and not no_number) or either
            if op == "or":
                return _conditional(node.lhs) and _conditional(node.rhs)
            return op == "unless" or (op == "and" and either) or (_scalar(node.rhs) and _conditional(node.lhs))
        case ql.Call() | ql.AggregateExpr() | ql.ParenExpr() | ql.UnaryExpr() | ql.SubqueryExpr():
            return any(_conditional(below) for _, below in _below(node))
    return False


def _nodes(node: ql.Expr) -> Iterator[ql.Expr]:
    yield node
    for _, below in _below(node):
        yield from _nodes(below)


def _below(node: ql.Expr) -> Iterator[tuple[str, ql.Expr]]:
    """Yield the children of a node, each with the operation of the node."""
    match node:
        case ql.Call():
            yield from ((node.func.name, arg) for arg in node.args)
        case ql.AggregateExpr():
            yield from ((str(node.op), part) for part in (node.param, node.expr) if part is not None)
        case ql.BinaryExpr():
            op = f"{node.op} bool" if node.modifier and node.modifier.return_bool else str(node.op)
            yield op, node.lhs
            yield "presence" if op in _PRESENCE else op, node.rhs
        case ql.ParenExpr() | ql.UnaryExpr() | ql.SubqueryExpr():
            yield "", node.expr
        case ql.MatrixSelector():
            yield "", node.vector_selector


def _labels(node: ql.Expr, of: LabelsOf) -> Set[str]:
    match node:
        case ql.VectorSelector():
            return of(_selector(node)[0])
        case ql.AggregateExpr():
            return _grouped(node, _labels(node.expr, of))
        case ql.Call():
            return _returned(node, of)
        case ql.BinaryExpr():
            return _joined(node, _labels(node.lhs, of), _labels(node.rhs, of))
        case _:
            return {label for _, below in _below(node) for label in _labels(below, of)}


def _grouped(node: ql.AggregateExpr, below: Set[str]) -> Set[str]:
    if str(node.op) in _PICKS:
        return below
    by = set(node.modifier.labels) if node.modifier else set()
    kept = below - by if node.modifier and node.modifier.type == ql.AggModifierType.Without else below & by
    # count_values names a label of its own
    return kept | {node.param.val} if isinstance(node.param, ql.StringLiteral) else kept


def _returned(node: ql.Call, of: LabelsOf) -> Set[str]:
    if node.func.name.startswith("absent"):
        known = (_selector(below)[1] for below in _nodes(node) if isinstance(below, ql.VectorSelector))
        return {label for matchers in known for label, op, _ in matchers if op == "="}
    below = {label for arg in node.args for label in _labels(arg, of)}
    match node.func.name:
        case "scalar":
            return set()
        case "label_replace" | "label_join":
            return below | {node.args[1].val}
        case "histogram_quantile" | "histogram_fraction":
            return below - {"le"}
    return below


def _joined(node: ql.BinaryExpr, left: Set[str], right: Set[str]) -> Set[str]:
    if _scalar(node.lhs) or _scalar(node.rhs):
        return left | right
    if str(node.op) in _PRESENCE:
        return left
    if str(node.op) == "or":
        return left & right
    matching, group = (
        (node.modifier.matching, set(node.modifier.group_labels or ())) if node.modifier else (None, set())
    )
    match str(node.modifier.card).split(".")[-1] if node.modifier else "OneToOne":
        case "ManyToOne":
            return left | group
        case "OneToMany":
            return right | group
    if matching is None:
        return left
    return left & set(matching.labels) if matching.type == ql.LabelModifierType.Include else left - set(matching.labels)


def _scalar(node: ql.Expr) -> bool:
    match node:
        case ql.NumberLiteral():
            return True
        case ql.Call():
            return node.func.name in ("scalar", "time", "pi")
        case ql.ParenExpr() | ql.UnaryExpr():
            return _scalar(node.expr)
        case ql.BinaryExpr():
            return _scalar(node.lhs) and _scalar(node.rhs)
    return False


def _lost(node: ql.Expr, of: LabelsOf) -> Iterator[str]:
    match node:
        case ql.AggregateExpr() if node.modifier and node.modifier.type == ql.AggModifierType.By:
            gone = set(node.modifier.labels) - _labels(node.expr, of)
            yield from (f"{node.op} by ({label}): no operand has that label" for label in sorted(gone))
        case ql.Call() if (
            node.func.name == "histogram_quantile" and _classic(node.args[1]) and "le" not in _labels(node.args[1], of)
        ):
            yield "histogram_quantile: its operand has no le label"
        case ql.BinaryExpr() if str(node.op) != "or" and not _scalar(node.lhs) and not _scalar(node.rhs):
            left, right = _labels(node.lhs, of), _labels(node.rhs, of)
            matching = node.modifier.matching if node.modifier else None
            if matching is not None and matching.type == ql.LabelModifierType.Include:
                gone = set(matching.labels) - (left & right)
                yield from (f"{node.op} on ({label}): not both sides have that label" for label in sorted(gone))
            else:
                ignored = set(matching.labels) if matching else set()
                if left - ignored != right - ignored:
                    differ = ", ".join(sorted((left ^ right) - ignored))
                    yield f"{node.op}: the two sides never match, only one has {differ}"


def _classic(node: ql.Expr) -> bool:
    """Return whether an expression reads classic buckets; a native histogram has no `le`."""
    return any(
        _selector(below)[0].endswith("_bucket") for below in _nodes(node) if isinstance(below, ql.VectorSelector)
    )


def _never_zero(node: ql.Expr) -> bool:
    match node:
        case ql.NumberLiteral():
            return bool(node.val != 0)
        case ql.ParenExpr() | ql.UnaryExpr() | ql.SubqueryExpr():
            return _never_zero(node.expr)
        case ql.AggregateExpr():
            return str(node.op) == "count" or (str(node.op) in _STAY_POSITIVE and _never_zero(node.expr))
        case ql.Call():
            return node.func.name == "clamp_min" and isinstance(node.args[1], ql.NumberLiteral) and node.args[1].val > 0
        case ql.BinaryExpr():
            op, edge = str(node.op), node.rhs.val if isinstance(node.rhs, ql.NumberLiteral) else None
            if op in _COMPARISONS:
                filters = not (node.modifier and node.modifier.return_bool)
                return (
                    filters
                    and edge is not None
                    and ((op == ">" and edge >= 0) or (op == ">=" and edge > 0) or (op == "!=" and edge == 0))
                )
            if op in ("and", "unless", "/"):
                return _never_zero(node.lhs)
            return op in ("*", "or") and _never_zero(node.lhs) and _never_zero(node.rhs)
    return False
