"""Reading PromQL: which series an expression needs, what is done to them, and whether a given page could ever answer
it.

The one promql_parser door."""

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


# boards ask the same of the same few hundred texts again and again; nobody changes a parsed expression
@lru_cache(4096)
def parse(text: str) -> ql.Expr:
    """PromQL, or PromQL as Grafana holds it: variables are replaced by values of the right shape. Raises
    BadExpression."""
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


def pretty(text: str) -> str:
    """The same over several lines, for people. Raises BadExpression."""
    return str(parse(text).prettify())


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


@lru_cache(4096)
def names(text: str) -> frozenset[str]:
    """The sample names that an expression reads, as far as no variable holds them. Raises BadExpression."""
    return frozenset(name for name, _ in selectors(text) if name and UNKNOWN_NAME not in name)


def answers(text: str, page: Exposition, judge: Callable[[str], bool]) -> bool:
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


def _matches(page: Exposition, name: str, matchers: list[tuple[str, str, str]]) -> bool:
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


# What is done to a series, and what an answer's labels are. Two answers are combined only when their labels are the
# same, so both are worked out from below: `of` gives the labels of a sample name, the rest follows from PromQL's own
# rules.

LabelsOf = Callable[[str], Set[str]]
_RANGE = r"(?<!\[)\[\s*([^\[\]:]+?)\s*(?=[:\]])"  # x[5m], x[$__rate_interval], x[1h:]; not [[name]]
_PRESENCE = ("and", "unless")  # the right side says only whether the left one counts
_COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")
_PICKS = ("topk", "bottomk", "limitk", "limit_ratio")  # aggregations that let series through as they are
# aggregations whose answer is above 0 when all below is
_STAY_POSITIVE = ("sum", "min", "max", "avg", "group", *_PICKS)


@dataclass(frozen=True, slots=True)
class SelectorUse:
    """One selector of an expression. above: what is done to it, from the inside out: functions, aggregations and
    operators, a comparison that gives 0 or 1 as `> bool`, and `presence` where only its being there counts. window: as
    written, else empty."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    above: tuple[str, ...]
    window: str = ""


def reads(text: str) -> list[SelectorUse]:
    """Every selector of an expression with what is done to it, in order. Raises BadExpression."""
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
    """The labels that an answer can bear. Raises BadExpression."""
    return _labels(parse(text), of)


def some_labels(text: str, of: LabelsOf) -> Set[str]:
    """Return the labels that at least one branch of `or` can bear: a legend leaves out those that a series lacks.
    Raises BadExpression."""
    return set().union(*(_labels(branch, of) for branch in _alternatives(parse(text))))


def lost_labels(text: str, of: LabelsOf) -> list[str]:
    """Where an expression relies on a label that is not there any more, or never was, one sentence each. Raises
    BadExpression.

    Grouping by such a label, a quantile of buckets without `le`, and two sides that never match because their labels
    differ."""
    return [sentence for node in _nodes(parse(text)) for sentence in _lost(node, of)]


def unguarded(text: str) -> list[str]:
    """The divisors that may be 0, which gives NaN or Inf; `> 0` around one makes the answer absent instead. Raises
    BadExpression."""
    divisions = [node for node in _nodes(parse(text)) if isinstance(node, ql.BinaryExpr) and str(node.op) in ("/", "%")]
    return [str(node.rhs) for node in divisions if not _never_zero(node.rhs)]


def made_up(text: str) -> list[str]:
    """The right sides of `or` that read no series, such as vector(0): they show a value where there is none. Raises
    BadExpression."""
    alternatives = [
        node.rhs for node in _nodes(parse(text)) if isinstance(node, ql.BinaryExpr) and str(node.op) == "or"
    ]
    return [str(side) for side in alternatives if not any(isinstance(node, ql.VectorSelector) for node in _nodes(side))]


def quantiles(text: str) -> list[float]:
    """The quantiles that are asked of histograms, 0 to 1, as far as no variable holds them. Raises BadExpression."""
    calls = [
        node for node in _nodes(parse(text)) if isinstance(node, ql.Call) and node.func.name == "histogram_quantile"
    ]
    asked = [node.args[0].val for node in calls if isinstance(node.args[0], ql.NumberLiteral)]
    # a variable was read as 1; the least and the largest value are bounds of buckets
    return [q for q in asked if 1e-9 < q < 1]


def unconditional(text: str) -> list[str]:
    """The branches of `or` that answer whenever there is data: nothing is compared in them, and nothing taken away.
    Raises BadExpression.

    `>= 0` around a quantile lets every number pass and only NaN not: it is no condition."""
    return [str(branch) for branch in _branches(parse(text)) if not _conditional(branch)]


def windows_s(text: str) -> list[float]:
    """Every range that is looked back over, of subqueries too, in seconds. Raises BadExpression."""
    ranges = (node.range for node in _nodes(parse(text)) if isinstance(node, ql.MatrixSelector | ql.SubqueryExpr))
    return [over.total_seconds() for over in ranges if over]


def _alternatives(node: ql.Expr) -> Iterator[ql.Expr]:
    """Yield the branches of `or` that reach the answer, also through what only filters them."""
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
    """Whether an answer depends on more than there being data."""
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
    """What a node is made of, each with what the node does to it."""
    match node:
        case ql.Call():
            yield from ((node.func.name, arg) for arg in node.args)
        case ql.AggregateExpr():
            yield str(node.op), node.expr
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
        asked = (_selector(below)[1] for below in _nodes(node) if isinstance(below, ql.VectorSelector))
        return {label for matchers in asked for label, op, _ in matchers if op == "="}
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
            yield from (f"{node.op} by ({label}): nothing below has that label" for label in sorted(gone))
        case ql.Call() if (
            node.func.name == "histogram_quantile" and _classic(node.args[1]) and "le" not in _labels(node.args[1], of)
        ):
            yield "histogram_quantile: le was lost below it"
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
