"""Comparison of an exposition with the catalogue, dashboards and rules."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exporters.catalogue import promql_ast
from exporters.catalogue.exposition_parser import Exposition
from exporters.catalogue.metric import Metric, key

ENGINE = "vllm:"
ESCAPED = "vllm_"
OURS = "vllm_watch_"
OUR_DASHBOARDS = "vllm-watch-"  # prefix of our dashboard uids
ESCAPED_ADVICE = (
    "names were escaped by a re-exporter for Prometheus 2: scrape it with `scrape_protocols: [PrometheusText0.0.4]`,"
    " or restore the names with metric_relabel_configs (source_labels: [__name__], regex: vllm_(.+), target_label:"
    " __name__, replacement: vllm:$1)"
)


@dataclass(frozen=True, slots=True)
class QueryRef:
    """Query of a panel or rule. `optional`: the reason why it may be empty on a healthy engine, else ''."""

    place: str
    expr: str
    optional: str = ""


@dataclass(frozen=True, slots=True)
class DeadQuery:
    """Query that cannot return a value on this exposition, and the names it misses."""

    use: QueryRef
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnknownMetric:
    """Metric name that never existed, and its replacement or ''.

    name None: the query is invalid, for the reason in `instead`."""

    use: QueryRef
    name: str | None
    instead: str


@dataclass(frozen=True, slots=True)
class CompatReport:
    """Comparison of an exposition with the catalogue.

    `releases`: the vLLM releases that match it: oldest one, and the first one excluded."""

    releases: tuple[str, str | None]
    known: tuple[Metric, ...]
    unknown: tuple[str, ...]
    absent: tuple[Metric, ...]
    renamed: tuple[tuple[str, str], ...]
    escaped: tuple[str, ...]
    beside: tuple[str, ...]
    broken: tuple[DeadQuery, ...]

    @property
    def is_ours(self) -> bool:
        """True if the exposition holds any series of vLLM or vllm-watch."""
        return bool(self.known or self.unknown or self.escaped)

    @property
    def fails(self) -> bool:
        return not self.is_ours or bool(self.unknown or self.escaped or any(not b.use.optional for b in self.broken))

    def as_json(self) -> dict[str, Any]:
        return {
            "releases": {"from": self.releases[0], "before": self.releases[1]},
            "known": [m.name for m in self.known],
            "unknown": list(self.unknown),
            "absent": [{"name": m.name, "needs": m.needs} for m in self.absent],
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "escaped": list(self.escaped),
            "beside": list(self.beside),
            "broken": [
                {"place": b.use.place, "expr": b.use.expr, "optional": b.use.optional, "missing": list(b.missing)}
                for b in self.broken
            ],
            "fails": self.fails,
        }


def check(
    exposition: Exposition, catalogue: Iterable[Metric], uses: Iterable[QueryRef] = (), release: str | None = None
) -> CompatReport:
    """Compare an exposition with the catalogue, and every query with the exposition.

    release: the engine's version if known; otherwise the exposed families narrow it down. Only engine series are
    compared on an engine; series of other components are not expected. Queries that cannot be parsed are skipped:
    unknown_metrics reports them."""
    by_name = {metric.name: metric for metric in catalogue}
    families = set(exposition.families())
    escaped = tuple(sorted(_escaped(exposition, by_name)))
    known = tuple(by_name[f] for f in sorted(families) if f in by_name and f.startswith((ENGINE, OURS)))
    unknown = tuple(sorted(f for f in families if f.startswith((ENGINE, OURS)) and f not in by_name))
    releases = (release, None) if release else plausible(known)
    newer = {old: metric.name for metric in by_name.values() for old in metric.formerly}
    is_engine = any(f.startswith(ENGINE) for f in families) or bool(escaped)
    expected = (
        [m for m in by_name.values() if m.name.startswith(ENGINE) and m.lives_in(releases[0])] if is_engine else []
    )
    return CompatReport(
        releases=releases,
        known=known,
        unknown=unknown,
        absent=tuple(m for m in expected if m.name not in families),
        renamed=tuple((f, newer[f]) for f in sorted(families) if f in newer and newer[f] not in families),
        escaped=escaped,
        beside=tuple(sorted(f for f in families if not f.startswith((ENGINE, OURS)) and f not in escaped)),
        broken=tuple(_broken(exposition, uses)) if is_engine else (),
    )


def plausible(known: Iterable[Metric]) -> tuple[str, str | None]:
    """Return the vLLM releases that could expose all these families: newest `since` to oldest `until`."""
    engine_metrics = [m for m in known if m.name.startswith(ENGINE)]
    since = max((m.since for m in engine_metrics if m.since), key=key, default="0.0")
    until = min((m.until for m in engine_metrics if m.until), key=key, default=None)
    return since, until


def uses_of_dashboard(text: str, name: str) -> Iterator[QueryRef]:
    """Yield every Prometheus query of a Grafana dashboard: panels, rows of either kind, variables, annotations.

    Our own panels may be empty: they explain it themselves (noValue). Raises ValueError if the file is not a
    dashboard."""
    try:
        dashboard = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}, line {error.lineno}: invalid JSON: {error.msg}") from error
    dashboard = dashboard.get("dashboard", dashboard) if isinstance(dashboard, dict) else dashboard
    if not isinstance(dashboard, dict) or not isinstance(dashboard.get("panels", dashboard.get("rows")), list):
        raise ValueError(f"{name} is not a Grafana dashboard: no list of panels")
    is_ours = str(dashboard.get("uid", "")).startswith(OUR_DASHBOARDS)
    for panel in _panels([*(dashboard.get("panels") or ()), *(dashboard.get("rows") or ())]):
        for target in _dicts(panel.get("targets")):
            if _asks_prometheus(target, panel):
                place = f"{name}: {panel.get('title') or panel.get('id') or 'panel'} / {target.get('refId', '?')}"
                yield from _use(place, target.get("expr"), _when_empty(panel) if is_ours else "")
    for variable in _dicts((dashboard.get("templating") or {}).get("list")):
        query = variable.get("query")
        query = query.get("query") if isinstance(query, dict) else query
        if variable.get("type") == "query" and isinstance(query, str) and _asks_prometheus(variable):
            found = re.fullmatch(r"\s*(?:label_values\((.+),[^,]*\)|query_result\((.+)\))\s*", query, re.DOTALL)
            yield from _use(f"{name}: variable {variable.get('name')}", found and (found[1] or found[2]))
    for annotation in _dicts((dashboard.get("annotations") or {}).get("list")):
        if _asks_prometheus(annotation):
            yield from _use(f"{name}: annotation {annotation.get('name')}", annotation.get("expr"))


def unknown_metrics(
    uses: Iterable[QueryRef], catalogue: Iterable[Metric], never: Mapping[str, str]
) -> Iterator[UnknownMetric]:
    """Yield metric names in queries that no release ever had, and queries that cannot be parsed."""
    samples = {sample for metric in catalogue for sample in metric.samples}
    samples |= {metric.name.removesuffix("_total") + "_created" for metric in catalogue}
    for use in uses:
        try:
            names = sorted(promql_ast.names(use.expr))
        except promql_ast.BadExpression as error:
            yield UnknownMetric(use, None, str(error))
            continue
        for name in names:
            if name.startswith((ENGINE, OURS)) and name not in samples:
                near = difflib.get_close_matches(name, samples, n=1, cutoff=0.85)
                guess = f"{name}_total" if f"{name}_total" in samples else near[0] if near else ""
                yield UnknownMetric(use, name, never.get(name, guess))


def successor(sample: str, catalogue: Iterable[Metric]) -> str | None:
    """Return the current name of a renamed sample, suffix kept; None if it was not renamed."""
    for metric in catalogue:
        for old in metric.formerly:
            if sample.startswith(old) and sample[len(old) :] in ("", "_bucket", "_count", "_sum"):
                return metric.name + sample[len(old) :]
    return None


def _use(place: str, expr: object, optional: str = "") -> Iterator[QueryRef]:
    if isinstance(expr, str) and expr.strip():
        yield QueryRef(place, expr, optional)


def _when_empty(panel: Mapping[str, Any]) -> str:
    found = panel.get("fieldConfig")
    defaults = found.get("defaults") if isinstance(found, dict) else None
    return str(defaults.get("noValue") or "") if isinstance(defaults, dict) else ""


def _panels(panels: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for panel in _dicts(panels):
        yield panel
        yield from _panels(panel.get("panels") or ())


def _dicts(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _asks_prometheus(*owners: dict[str, Any]) -> bool:
    """Return True if the nearest data source with a type is Prometheus, or none has a type."""
    types = (owner["datasource"].get("type") for owner in owners if isinstance(owner.get("datasource"), dict))
    return next((kind for kind in types if kind), "prometheus") == "prometheus"


def _escaped(exposition: Exposition, by_name: Mapping[str, Metric]) -> Iterator[str]:
    """Yield families whose colon became an underscore: metadata lines or the catalogue have the name with a colon."""
    samples = {
        ENGINE + n.removeprefix(ESCAPED): rows
        for n, rows in exposition.samples.items()
        if n.startswith(ESCAPED) and not n.startswith(OURS)
    }
    families = Exposition(samples, exposition.kinds).families()
    return (
        ESCAPED + f.removeprefix(ENGINE)
        for f in families
        if f in by_name or f in exposition.kinds or f.removesuffix("_total") in exposition.kinds
    )


def _broken(exposition: Exposition, uses: Iterable[QueryRef]) -> Iterator[DeadQuery]:
    for use in uses:
        try:
            answers = promql_ast.answers(use.expr, exposition, lambda name: name.startswith(ENGINE))
        except promql_ast.BadExpression:
            continue
        if not answers:
            missing = (n for n in promql_ast.names(use.expr) if n.startswith(ENGINE) and n not in exposition)
            yield DeadQuery(use, tuple(sorted(missing)))
