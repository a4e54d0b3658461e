"""Lint of alerts and recording rules, beyond promtool.

Invariant: rules are checked by their content and the catalogue, never by the code that made them, so that a
deployment's own rules can be checked as well. Inhibition is checked by routing.py, construction by rules.py. EXCEPTIONS
lists faults that are intended, with the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import permutations
from typing import TypeVar

from alerts.labels import TARGET_POD
from alerts.rules import Alert, Recording, Severity
from exporters.catalogue import promql_ast, promql_lint
from exporters.catalogue.promql_ast import BadExpression
from exporters.catalogue.promql_lint import METRICS
from exporters.text import parse_window

SCRAPE_S = 15  # as in stack/deploy
SCRAPES = 4  # in a window at least, so that one lost scrape leaves a rate
GROUP_RULES = 20
GROUP_LETTERS = 40
CRITICAL = 10  # critical alerts at most; the tenth is a decode engine that receives no KV cache

_Rule = TypeVar("_Rule", Alert, Recording)
_PICKS = ("topk", "bottomk", "limitk", "limit_ratio")

_LABEL = re.compile(r"\$labels\.(\w+)")
_OPTIONAL = re.compile(r"\{\{-?\s*(?:with|if)\s+\$labels\.(\w+)\s*-?\}\}.*?\{\{-?\s*end\s*-?\}\}", re.DOTALL)
_VALUE = re.compile(r"\{\{[^}]*\$value[^}]*\}\}")
_READABLE = re.compile(r"\|\s*(humanize\w*|printf)\b|\{\{-?\s*(humanize\w*|printf)\b")
_WINDOW_IN_NAME = re.compile(r"(\d+[smhdw])$")


@dataclass(frozen=True, slots=True)
class AllowedRuleFault:
    """Intended fault: rule, name of the alert or recorded series, and why. Raises ValueError without a reason."""

    rule: str
    name: str
    why: str

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError(f"{self.rule} of {self.name} is allowed without a reason")


EXCEPTIONS: tuple[AllowedRuleFault, ...] = ()


def faults(
    alerts: Iterable[Alert], recordings: Iterable[Recording] = (), allowed: Sequence[AllowedRuleFault] = EXCEPTIONS
) -> Iterator[str]:
    """Yield one sentence for each fault that is not allowed, beginning with the name of the alert or series.

    An unused exception is a fault as well. recordings: all that are loaded beside the alerts."""
    faulty = list(_check(RuleSet(tuple(alerts), tuple(recordings))))
    excused, needed = {(one.rule, one.name) for one in allowed}, {(rule, name) for rule, name, _ in faulty}
    yield from (f"{name}: {message} [{rule}]" for rule, name, message in faulty if (rule, name) not in excused)
    for rule, name in sorted(excused - needed):
        yield f"{name}: nothing breaks {rule} there any more; remove the exception [unused-exception]"


def crowded(groups: Mapping[str, Sequence[object]]) -> Iterator[str]:
    """Yield faults of groups with too many rules or too long a name: rules of a group are evaluated one by one."""
    for name, rules in groups.items():
        if len(rules) > GROUP_RULES:
            yield f"group {name}: {len(rules)} rules; at most {GROUP_RULES}, or the last of them are evaluated late"
        if len(name) > GROUP_LETTERS:
            yield f"group {name}: the name is longer than {GROUP_LETTERS} letters"


@dataclass(frozen=True, eq=False)
class RuleSet:
    """Rules that are checked together, and the labels of their series."""

    alerts: tuple[Alert, ...]
    recordings: tuple[Recording, ...]

    @cached_property
    def recorded(self) -> Mapping[str, str]:
        return {recording.record: recording.expr for recording in self.recordings}

    @cached_property
    def _known(self) -> dict[str, Set[str]]:
        of_scrape = {sample: {*metric.labels, *TARGET_POD} for sample, metric in METRICS.items()}
        return {
            sample: labels | {"le"} if sample.endswith("_bucket") else labels for sample, labels in of_scrape.items()
        }

    def labels_of(self, sample: str) -> Set[str]:
        """Return the labels of a series: its own and those of the scrape, or those that its recording rule keeps."""
        if sample not in self._known:
            self._known[sample] = set()  # unknown, or it reads itself
            if sample in self.recorded:
                self._known[sample] = promql_ast.labels(self.recorded[sample], self.labels_of)
        return self._known[sample]


_Messages = Iterator[str]
_Faults = Iterator[tuple[str, str, str]]  # rule, name, message


def _check(rules: RuleSet) -> _Faults:
    for alert in rules.alerts:
        yield from _check_rule(alert.name, alert.expr, rules, alert, ALERT_RULES)
    for recording in rules.recordings:
        yield from _check_rule(recording.record, recording.expr, rules, recording, RECORDING_RULES)
    for rule, of_all in SET_RULES.items():
        yield from ((rule, name, message) for name, message in of_all(rules))


def _check_rule(
    name: str, expr: str, rules: RuleSet, one: _Rule, more: Mapping[str, Callable[[_Rule, RuleSet], _Messages]]
) -> _Faults:
    try:
        promql_ast.parse(expr)
    except BadExpression as error:
        yield "promql", name, str(error)
        return
    for rule, of_expression in EXPRESSION_RULES.items():
        yield from ((rule, name, message) for message in of_expression(expr, rules))
    for rule, of_one in more.items():
        yield from ((rule, name, message) for message in of_one(one, rules))


# ---- any expression


def _series(expr: str, rules: RuleSet) -> _Messages:
    for name in sorted({read.name for read in promql_ast.reads(expr)} - METRICS.keys() - rules.recorded.keys()):
        yield f"{name or 'a selector without a name'} is neither in the catalogue nor recorded by these rules"


def _shared(rule: promql_lint.Rule, expr: str, rules: RuleSet) -> _Messages:
    yield from rule(expr, rules.labels_of)


def _picked(expr: str, rules: RuleSet) -> _Messages:
    for read in promql_ast.reads(expr):
        if done := set(read.above) & set(_PICKS):
            yield (
                f"{min(done)} of {read.name}: its members change from one evaluation to the next, and the hold of"
                " the alert starts again"
            )


def _windows(expr: str, rules: RuleSet) -> _Messages:
    for window_s in promql_ast.windows_s(expr):
        if window_s < SCRAPES * SCRAPE_S:
            yield f"a window of {window_s:g} s holds fewer than {SCRAPES} scrapes"


def _labels(expr: str, rules: RuleSet) -> Set[str]:
    return promql_ast.labels(expr, rules.labels_of)


EXPRESSION_RULES: dict[str, Callable[[str, RuleSet], _Messages]] = {
    "series": _series,
    **{name: partial(_shared, rule) for name, rule in promql_lint.RULES.items()},
    "picked": _picked,
    "windows": _windows,
}


# ---- alerts


def _condition(alert: Alert, rules: RuleSet) -> _Messages:
    for branch in promql_ast.unconditional(alert.expr):
        yield f"it fires as long as there is data: {branch} compares nothing"


def _durations(alert: Alert, rules: RuleSet) -> _Messages:
    """A hold shorter than a few scrapes has no effect. 0s is allowed, but not on absence: one lost scrape looks the
    same."""
    for what, duration in (("hold", alert.hold), ("keep_firing", alert.keep_firing)):
        if duration and 0 < parse_window(duration) < SCRAPES * SCRAPE_S:
            yield f"{what} {duration} is shorter than {SCRAPES} scrapes; write 0s or more"
    absent = any(step.startswith("absent") for read in promql_ast.reads(alert.expr) for step in read.above)
    if absent and parse_window(alert.hold) < SCRAPES * SCRAPE_S:
        yield f"one lost scrape looks like absence; hold it for {SCRAPES} of them"


def _label_names(alert: Alert, rules: RuleSet) -> _Messages:
    """A label that the summary or description names must be on every result, or stand in {{ with $labels.x }}."""
    available = set(_labels(alert.expr, rules))
    anywhere = available | {label for read in promql_ast.reads(alert.expr) for label in rules.labels_of(read.name)}
    for what, text in (("summary", alert.summary), ("description", alert.description)):
        required = set(_LABEL.findall(_OPTIONAL.sub("", text)))
        for label in sorted(required - available):
            yield f"the {what} names {label}, which not every result has; use {{{{ with $labels.{label} }}}}"
        for label in sorted(set(_LABEL.findall(text)) - required - anywhere):
            yield f"the {what} names {label}, which no result has"


def _description(alert: Alert, rules: RuleSet) -> _Messages:
    if _labels(alert.expr, rules) and not _LABEL.search(alert.description):
        yield "the description names no label, so nobody knows which subject it is about"
    if not alert.description.endswith("."):
        yield "the description does not end with a full stop"


def _value(alert: Alert, rules: RuleSet) -> _Messages:
    for shown in _VALUE.findall(alert.description):
        if not _READABLE.search(shown):
            yield f"{shown} shows 0.10000000000000001; use humanize, humanizePercentage, humanizeDuration or printf"


def _static(alert: Alert, rules: RuleSet) -> _Messages:
    """Alertmanager identifies alerts by labels; a value in one makes a new alert at every evaluation."""
    for label, value in alert.labels.items():
        if "{{" in value:
            yield f"the label {label} holds a template"


def _summary(alert: Alert, rules: RuleSet) -> _Messages:
    if _labels(alert.expr, rules) and not _LABEL.search(alert.summary):
        yield "the summary names no label, so nobody knows which subject it is about"
    if "$value" in alert.summary:
        yield "the summary holds $value; put the value into the description"
    if alert.summary.endswith("."):
        yield "the summary ends with a full stop; it is a title: subject, symptom, labels"


def _owner(alert: Alert, rules: RuleSet) -> _Messages:
    if not alert.owner.strip():
        yield "it has no owner"


def _muted(alert: Alert, rules: RuleSet) -> _Messages:
    for source in alert.muted_by:
        if source == alert.name or source not in {other.name for other in rules.alerts}:
            yield f"muted by {source}, {'which is itself' if source == alert.name else 'which does not exist'}"


ALERT_RULES: dict[str, Callable[[Alert, RuleSet], _Messages]] = {
    "condition": _condition,
    "durations": _durations,
    "label-names": _label_names,
    "description": _description,
    "value": _value,
    "static-labels": _static,
    "summary": _summary,
    "owner": _owner,
    "muted": _muted,
}


# ---- recordings


def _level(recording: Recording, rules: RuleSet) -> _Messages:
    """The name is level:metric:operations, where the level is the labels of the result."""
    level, labels = recording.record.split(":")[0], sorted(_labels(recording.expr, rules))
    if level not in {"_".join(order) for order in permutations(labels)}:
        yield f"its level is {level}, and the labels of the result are {', '.join(labels) or 'none'}"


def _window_named(recording: Recording, rules: RuleSet) -> _Messages:
    """The name of a series that is recorded over a window ends in that window."""
    named = _WINDOW_IN_NAME.search(recording.record)
    over = {round(window_s) for window_s in promql_ast.windows_s(recording.expr)}
    if over and (named is None or parse_window(named[1]) not in over):
        yield f"it is over {' and '.join(f'{window_s} s' for window_s in sorted(over))}, which its name does not say"


def _static_recorded(recording: Recording, rules: RuleSet) -> _Messages:
    for label, value in recording.labels.items():
        if "{{" in value:
            yield f"the label {label} holds a template"


RECORDING_RULES: dict[str, Callable[[Recording, RuleSet], _Messages]] = {
    "level": _level,
    "window-named": _window_named,
    "static-labels": _static_recorded,
}


# ---- all together


def _duplicates(rules: RuleSet) -> Iterator[tuple[str, str]]:
    names = Counter([*(alert.name for alert in rules.alerts), *(recording.record for recording in rules.recordings)])
    yield from ((name, f"{count} rules have this name") for name, count in names.items() if count > 1)


def _critical(rules: RuleSet) -> Iterator[tuple[str, str]]:
    critical = [alert.name for alert in rules.alerts if alert.severity is Severity.CRITICAL]
    yield from ((name, f"{len(critical)} alerts are critical; at most {CRITICAL}") for name in critical[CRITICAL:])


SET_RULES: dict[str, Callable[[RuleSet], Iterator[tuple[str, str]]]] = {"names": _duplicates, "critical": _critical}
RULES = ("promql", *EXPRESSION_RULES, *ALERT_RULES, *RECORDING_RULES, *SET_RULES)
