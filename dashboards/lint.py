"""What is wrong with a board, judged from the JSON that Grafana would get: the rules of grafana/dashboard-linter and of
mixtool, for every kind of panel (theirs pass over heatmaps and bar gauges), and those that only the catalogue can know.

Law: rules read the printed text's own tree and the catalogue, never the model it came from, so that they also judge a
board of someone else. What a shipped board may break stands in EXCEPTIONS with its reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import combinations, pairwise
from typing import Any

from alerts.registry import RECORDINGS
from dashboards import queries as query_builders
from dashboards.model import COLUMNS
from exporters.catalogue import EVERYTHING, promql_ast, promql_lint, sidecar
from exporters.catalogue.metric import Across, Kind, Metric, Unit
from exporters.catalogue.producers import Component, needed
from exporters.catalogue.promql import BOUND
from exporters.catalogue.promql_ast import BadExpression, SelectorUse
from exporters.catalogue.promql_lint import GROWTH, METRICS
from exporters.text import parse_duration

TAG = "vllm-watch"
SCHEMA_VERSION = 39  # loads in Grafana 10.4 to 13
REFRESH_AT_LEAST_S = 30
VISIBLE_PANELS = 20
UID_LETTERS = 40
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

# Boards that vLLM and production-stack ship. An import with one of these uids replaces theirs; some of theirs replace
# each other. Sources: vllm-project/vllm examples/{observability,online_serving,production_monitoring},
# vllm-project/production-stack helm/dashboards, observability and tutorials/terraform, as of August 2026.
TAKEN_UIDS = {
    "b281712d-8bff-41ef-9f3f-71ad43c05e9b": (
        "vllm prometheus_grafana/grafana.json, production-stack vllm-model-metrics-dashboard.json"
    ),
    "performance-statistics": "vllm dashboards/grafana/performance_statistics.json",
    "query-statistics4": "vllm dashboards/grafana/query_statistics.json",
    "vllm-overview": "vllm dashboards/grafana/vllm_overview.json",
    "vllm-instances": "vllm dashboards/grafana/vllm_instances.json",
    "vllm-kv-cache": "vllm dashboards/grafana/vllm_kv_cache.json",
    "vllm-status": "vllm dashboards/grafana/vllm_service_status.json",
    "vllm-spec-decode": "vllm dashboards/grafana/vllm_speculative_decoding.json",
    "vllm-fleet-qwen3-235b": "vllm prometheus_grafana/k8s-monitoring/grafana-dashboard.json",
    "750918234": "production-stack helm/dashboards/vllm-dashboard.json",
    "deftu32yowqv4e": "production-stack helm/dashboards/lmcache-dashboard.json",
}

# Grafana's names, as far as our series call for them (packages/grafana-data/src/valueFormats/categories.ts), and its
# custom forms.
UNITS = frozenset({
    "none", "short", "percentunit", "s", "ms", "dateTimeAsIso", "dateTimeFromNow", "bytes", "Bps", "joule", "watt",
    "kwatth", "celsius", "hertz",
    "rothz", "reqps", "ops", "cps", "cpm", "bool", "bool_on_off", "bool_yes_no", "currencyUSD", "currencyEUR",
})  # fmt: skip
CUSTOM_UNITS = ("suffix:", "prefix:", "currency:", "si:", "time:")

PANEL_TYPES = frozenset({
    "row", "timeseries", "stat", "table", "heatmap", "gauge", "bargauge", "barchart", "histogram", "piechart",
    "state-timeline",
    "status-history", "text",
})  # fmt: skip
REPLACED_TYPES = {
    "graph": "timeseries",
    "singlestat": "stat",
    "table-old": "table",
    "grafana-piechart-panel": "piechart",
}
SILENT_TYPES = ("row", "text")
LEGACY_KEYS = {
    "dashboard": {"rows", "hideControls", "sharedCrosshair", "style", "gnetId", "__inputs", "__elements", "__requires",
        "iteration"},
    "panel": {"span", "minSpan", "height", "editable", "error", "renderer", "nullPointMode", "xaxis", "yaxes", "xAxis",
        "yAxis", "lines", "fill",
              "linewidth", "seriesOverrides", "valueName", "sparkline", "styles", "columns", "cards", "dataFormat",
              "isNew", "grid", "alert",
              "aliasColors", "bars", "steppedLine", "tooltip", "legend", "heatmap", "color", "highlightCards",
              "hideZeroBuckets", "fontSize",
              "mappings", "sort", "scroll", "showHeader", "transform"},
    "target": {"intervalFactor", "step", "metric", "target", "query", "textEditor"},
    "timepicker": {"time_options"},
    "variable": {"useTags", "tagsQuery", "tagValuesQuery", "tags", "allFormat", "multiFormat", "refresh_on_load"},
}  # fmt: skip

_HUES = ("green", "yellow", "red", "blue", "orange", "purple")
_COLOURS = {shade + hue for hue in _HUES for shade in ("", "dark-", "semi-dark-", "light-", "super-light-")} | {
    "text",
    "transparent",
}
_COLOUR_CODE = re.compile(r"#[0-9a-fA-F]{3,8}|rgba?\([\d., ]+\)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:[:.][^}]*)?\}|([A-Za-z_]\w*))|\[\[(\w+)\]\]")
_LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_LABEL_VALUES = re.compile(r"label_values\(\s*(?P<source>.+?)\s*,\s*(?P<label>\w+)\s*\)", re.DOTALL)
_BARE_LABEL_VALUES = re.compile(r"label_values\(\s*\w+\s*\)")
_PERCENTILE = re.compile(r"\bp(\d{1,2}(?:\.\d+)?)\b")
_BOARD_LINK = re.compile(r"^/d/([\w-]+)")

_RECORDED = {recording.record for recording in RECORDINGS}
# labels of the scrape; only job and instance are always there
_TARGET = frozenset({"cluster", "namespace", "job", "instance", "pod"})
_EVERY_LABEL = frozenset(label for metric in EVERYTHING for label in metric.labels) | _TARGET | {"le"}
_ADDED_UP = ("sum", "sum_over_time")
_NO_LONGER_ITSELF = (
    "*",
    "/",
    "%",
    "^",
    "count",
    "count_over_time",
    "group",
    "presence",
    "changes",
    "absent",
    "timestamp",
)


@dataclass(frozen=True, slots=True)
class LintFinding:
    """What is wrong, and where: board uid, panel title, query letter."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class AllowedFinding:
    """A finding that is meant. place may hold `*`. Raises ValueError when it gives no reason."""

    rule: str
    place: str
    why: str

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError(f"{self.rule} at {self.place} is allowed without a reason")

    def covers(self, finding: LintFinding) -> bool:
        return self.rule == finding.rule and fnmatchcase(finding.place, self.place)


EXCEPTIONS: tuple[AllowedFinding, ...] = (
    AllowedFinding(
        "query-buckets",
        "vllm-watch-latency/Share below the first bound/*",
        "asks for the lowest and the highest bucket: min and max over le",
    ),
    AllowedFinding(
        "query-labels",
        "vllm-watch-kv-cache/Engines and their caches/A",
        "every field of vLLM's CacheConfig is a label, more with each release",
    ),
    AllowedFinding(
        "query-labels", "*p95, by team/B", "beyond its buckets a percentile carries the label bound, and else not"
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-overview/Unknown key or model/A",
        "they belong to no model and mostly to no team that could be chosen",
    ),
    AllowedFinding(
        "query-matchers", "vllm-watch-cost/Price/A", "whether prices are set does not depend on which team is chosen"
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-teams/* by team (estimate)/?",
        "a team's share is one of the work of all teams and models, chosen or not",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-teams/Engine's errors by route and status/A",
        "the board is about teams: none chooses a job or an address",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-cost/Cost per 1K tokens, all cards/A",
        "all that the cards cost, over all tokens: no part of either alone",
    ),
    AllowedFinding(
        "query-matchers", "vllm-watch-fleet/Balance: */A", "the whole is that of all engines of a model, chosen or not"
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-gpu/Tokens per joule/A",
        "the watts are those of all cards of a cluster, so the tokens are as well",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-monitoring-health/S*, by target/A",
        "which targets are engines does not depend on which of them are chosen",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-monitoring-health/Targets up, by job/A",
        "which targets are engines does not depend on which of them are chosen",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-monitoring-health/Requests ended well: log and engine/?",
        "two sides, each narrowed only by what the other has too",
    ),
    AllowedFinding(
        "query-rate-interval",
        "vllm-watch-fleet/Engines up and frozen/A",
        "asks what its alert asks, over the alert's window",
    ),
    AllowedFinding(
        "query-rate-interval",
        "vllm-watch-fleet/Engines, fullest first/I",
        "asks what its alert asks, over the alert's window",
    ),
    AllowedFinding(
        "query-rate-interval",
        "vllm-watch-fleet/Up and frozen, by */A",
        "asks what its alert asks, over the alert's window",
    ),
    AllowedFinding(
        "panel-percentile",
        "vllm-watch-fleet-weeks/*, p95, *",
        "where it is recorded, the quantile was taken by the rule",
    ),
    AllowedFinding(
        "query-series",
        "vllm-watch-fleet-weeks/*",
        "asks a store that keeps what our rules record and nothing else; Fleet asks raw series",
    ),
    AllowedFinding(
        "template-label-values", "vllm-watch-fleet-weeks/variable *", "the same: no engine's own series is there"
    ),
    AllowedFinding(
        "query-raw-counter",
        "vllm-watch-tuning/Last event of each kind/B",
        "kept in a file, it never restarts: how many are on record",
    ),
)


def lint(boards: Iterable[Mapping[str, Any]], allowed: Sequence[AllowedFinding] = EXCEPTIONS) -> list[LintFinding]:
    """What is wrong with these boards and not allowed; an exception that nothing needs any more is a finding as
    well."""
    found = list(findings(boards))
    unused = [one for one in allowed if not any(one.covers(finding) for finding in found)]
    kept = [finding for finding in found if not any(one.covers(finding) for one in allowed)]
    return kept + [
        LintFinding("unused-exception", one.place, f"no board breaks {one.rule} there any more: remove the exception")
        for one in unused
    ]


def findings(boards: Iterable[Mapping[str, Any]]) -> Iterator[LintFinding]:
    """Everything that breaks a rule, allowed or not; boards are Grafana dashboards as json.loads gives them."""
    read = [_Board(board) for board in boards]
    for board in read:
        for rule, of_board in BOARD_RULES.items():
            yield from (LintFinding(rule, place, message) for place, message in of_board(board))
        for panel in board.panels:
            for rule, of_panel in PANEL_RULES.items():
                yield from (LintFinding(rule, panel.place, message) for message in of_panel(panel))
        for query in board.queries:
            for rule, of_query in QUERY_RULES.items():
                yield from (LintFinding(rule, query.place, message) for message in of_query(query))
    for rule, of_all in SHELF_RULES.items():
        yield from (LintFinding(rule, place, message) for place, message in of_all(read))


# ---- the printed tree, read once


@dataclass(frozen=True, eq=False)
class _Query:
    """One piece of PromQL: a panel's target, or an annotation (panel is None)."""

    place: str
    text: str
    legend: str
    raw: Mapping[str, Any]
    board: _Board
    panel: _Panel | None = None

    @cached_property
    def reads(self) -> list[SelectorUse]:
        """Its selectors; none when it does not parse, which one rule tells."""
        try:
            return promql_ast.reads(self.text)
        except BadExpression:
            return []

    @property
    def series(self) -> Iterator[tuple[SelectorUse, Metric]]:
        """Its selectors of series that the catalogue knows; another rule tells of the rest."""
        return ((read, METRICS[read.name]) for read in self.reads if read.name in METRICS)


@dataclass(frozen=True, eq=False)
class _Panel:
    board: _Board
    raw: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.raw.get("type", ""))

    @property
    def place(self) -> str:
        return f"{self.board.uid}/{self.raw.get('title') or self.raw.get('id')}"

    @property
    def asks(self) -> bool:
        return self.kind not in SILENT_TYPES

    @property
    def targets(self) -> Sequence[Mapping[str, Any]]:
        return self.raw.get("targets") or ()

    @cached_property
    def queries(self) -> tuple[_Query, ...]:
        return tuple(
            _Query(
                f"{self.place}/{target.get('refId', '?')}",
                target.get("expr", ""),
                target.get("legendFormat", ""),
                target,
                self.board,
                self,
            )
            for target in self.targets
        )

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.raw.get("fieldConfig", {}).get("defaults", {})  # type: ignore[no-any-return]

    def configured(self, name: str) -> Iterator[Any]:
        """A field option's values: the default, and what overrides set."""
        if name in self.defaults:
            yield self.defaults[name]
        for override in self.raw.get("fieldConfig", {}).get("overrides", ()):
            yield from (given["value"] for given in override["properties"] if given["id"] == name)

    @property
    def links(self) -> Iterator[Mapping[str, Any]]:
        yield from self.raw.get("links", ())
        for links in self.configured("links"):
            yield from links


@dataclass(frozen=True, eq=False)
class _Board:
    raw: Mapping[str, Any]

    @property
    def uid(self) -> str:
        return str(self.raw.get("uid", ""))

    @cached_property
    def panels(self) -> tuple[_Panel, ...]:
        """All panels, row headings and what is folded below them included."""
        flat = (panel for top in self.raw.get("panels", ()) for panel in (top, *top.get("panels", ())))
        return tuple(_Panel(self, panel) for panel in flat)

    @property
    def variables(self) -> Sequence[Mapping[str, Any]]:
        return self.raw.get("templating", {}).get("list", ())  # type: ignore[no-any-return]

    @property
    def annotations(self) -> Sequence[Mapping[str, Any]]:
        return self.raw.get("annotations", {}).get("list", ())  # type: ignore[no-any-return]

    @cached_property
    def marks(self) -> tuple[_Query, ...]:
        """Annotations that ask Prometheus."""
        asking = [a for a in self.annotations if "expr" in a]
        return tuple(
            _Query(f"{self.uid}/annotation {a.get('name')}", a["expr"], a.get("titleFormat", ""), a, self)
            for a in asking
        )

    @cached_property
    def queries(self) -> tuple[_Query, ...]:
        return (*(query for panel in self.panels for query in panel.queries), *self.marks)

    def at(self, *parts: object) -> str:
        return "/".join(map(str, (self.uid, *parts)))


Told = Iterator[str]
Placed = Iterator[tuple[str, str]]


def _named(text: str) -> set[str]:
    """The variables in a text, Grafana's own ones left out."""
    names = {found[1] or found[2] or found[3] for found in _VARIABLE.finditer(text)}
    return {name for name in names if not name.startswith("__")}


def _labels_of(sample: str) -> frozenset[str]:
    """What a series can be grouped by. An alert's labels are those of whatever it watches."""
    metric = METRICS.get(sample)
    if metric is None or Component.RULES in needed([sample]):
        return _EVERY_LABEL
    return frozenset(metric.labels) | _TARGET | ({"le"} if sample.endswith("_bucket") else set())


def _labels_of_buckets(sample: str) -> frozenset[str]:
    return frozenset({"le"}) if sample in METRICS and sample.endswith("_bucket") else frozenset()


# ---- boards


def _identity(board: _Board) -> Placed:
    if not board.raw.get("title"):
        yield board.uid, "the board has no title"
    if not re.fullmatch(rf"[\w-]{{1,{UID_LETTERS}}}", board.uid):
        yield board.uid, f"a uid has 1 to {UID_LETTERS} letters, digits, - or _"
    if owner := TAKEN_UIDS.get(board.uid):
        yield board.uid, f"this uid belongs to {owner}: importing one would replace the other"


def _tags(board: _Board) -> Placed:
    if TAG not in board.raw.get("tags", ()):
        yield board.uid, f"the tag {TAG} is missing: the link between our boards finds them by it"


def _schema_version(board: _Board) -> Placed:
    if board.raw.get("schemaVersion") != SCHEMA_VERSION:
        yield board.uid, f"schemaVersion is {board.raw.get('schemaVersion')}, not {SCHEMA_VERSION}"


def _editable(board: _Board) -> Placed:
    if board.raw.get("editable") is not True:
        yield board.uid, "people want to edit what they import"


def _refresh(board: _Board) -> Placed:
    every = board.raw.get("refresh")
    try:
        often = every not in ("", False) and parse_duration(str(every)) < REFRESH_AT_LEAST_S
    except ValueError:
        often = True
    if often:
        yield board.uid, f"refresh is {every!r}: never more often than every {REFRESH_AT_LEAST_S} s"


def _legacy_keys(board: _Board) -> Placed:
    places: list[tuple[str, str, Mapping[str, Any]]] = [("dashboard", board.uid, board.raw)]
    places += [("timepicker", board.at("timepicker"), board.raw.get("timepicker") or {})]
    places += [("panel", panel.place, panel.raw) for panel in board.panels]
    places += [("target", query.place, query.raw) for panel in board.panels for query in panel.queries]
    places += [("variable", board.at(f"variable {v.get('name')}"), v) for v in board.variables]
    for kind, place, raw in places:
        if old := LEGACY_KEYS[kind] & raw.keys():
            yield place, f"Grafana dropped {', '.join(sorted(old))}, or only the import dialogue reads it"


def _nulls(board: _Board) -> Placed:
    """A null is not the same as nothing: some releases take it for a setting. The base of thresholds and the id of an
    import are null."""
    for path in _null_paths(board.raw, ""):
        if path != ".id" and not re.search(r"\.steps\[0\]\.value$", path):
            yield board.uid, f"{path.removeprefix('.')} is null; leave it out"


def _null_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _null_paths(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _null_paths(inner, f"{path}[{at}]")
    elif value is None:
        yield path


def _size(board: _Board) -> Placed:
    # a strip says one thing
    tall = (top for top in board.raw.get("panels", ()) if (top.get("gridPos") or {}).get("h", COLUMNS) > 3)
    visible = sum(1 for top in tall if top.get("type") != "row")
    if visible > VISIBLE_PANELS:
        yield board.uid, f"{visible} panels are visible at once; at most {VISIBLE_PANELS}, the rest in collapsed rows"


def _panel_ids(board: _Board) -> Placed:
    ids = [panel.raw.get("id") for panel in board.panels]
    for panel in board.panels:
        number = panel.raw.get("id")
        if not isinstance(number, int) or number < 1:
            yield panel.place, "links lead to a panel by its id; it needs a positive one"
        elif ids.count(number) > 1:
            yield panel.place, f"another panel of this board also has the id {number}"


def _grid(board: _Board) -> Placed:
    groups = [list(board.raw.get("panels", ()))]
    for top in groups[0]:
        if top.get("type") == "row":
            groups.append(top.get("panels") or [])
            if groups[-1] and not top.get("collapsed"):
                yield board.at(top.get("title")), "the panels of an open row stand beside it, not in it"
    for group in groups:
        boxes = [(board.at(p.get("title")), p.get("gridPos") or {}) for p in group]
        for place, at in boxes:
            if (
                not {"x", "y", "w", "h"} <= at.keys()
                or min(at["x"], at["y"]) < 0
                or min(at["w"], at["h"]) < 1
                or at["x"] + at["w"] > COLUMNS
            ):
                yield place, f"gridPos {at} does not lie within {COLUMNS} columns"
        whole = [(place, at) for place, at in boxes if {"x", "y", "w", "h"} <= at.keys()]
        for (one, a), (other, b) in combinations(whole, 2):
            if (
                a["x"] < b["x"] + b["w"]
                and b["x"] < a["x"] + a["w"]
                and a["y"] < b["y"] + b["h"]
                and b["y"] < a["y"] + a["h"]
            ):
                yield one, f"it overlaps {other}"


def _template_datasource(board: _Board) -> Placed:
    first = board.variables[0] if board.variables else {}
    wanted = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    if wrong := sorted(key for key, value in wanted.items() if first.get(key) != value):
        yield (
            board.uid,
            f"the first variable is the data source: {', '.join(f'{key} {wanted[key]!r}' for key in wrong)}",
        )
    if (first.get("current") or {}).get("value"):
        yield board.uid, "the data source is chosen where the board is loaded; a saved one exists nowhere else"


def _template_choices(board: _Board) -> Placed:
    for variable in board.variables:
        place = board.at(f"variable {variable.get('name')}")
        if not variable.get("label"):
            yield place, "a variable has a label that people can read"
        if variable.get("type") != "query":
            continue
        if variable.get("datasource") != DATASOURCE:
            yield place, f"its values come from {DATASOURCE['uid']}"
        if variable.get("refresh") != 2:
            yield (
                place,
                "refresh must be 2, on a change of the time range: else a model that came later is never offered",
            )
        if not (variable.get("multi") and variable.get("includeAll") and variable.get("allValue") == ".*"):
            yield (
                place,
                "several values and All may be chosen, and All is `.*`, which also matches a label that is missing",
            )


def _template_label_values(board: _Board) -> Placed:
    """Values come from a series of ours, narrowed by the choices before; a bare label_values(label) offers other
    exporters' values."""
    before: set[str] = set()
    for variable in board.variables:
        name, asked = str(variable.get("name")), variable.get("query")
        if variable.get("type") == "query":
            text = asked.get("query", "") if isinstance(asked, Mapping) else str(asked)
            place = board.at(f"variable {name}")
            yield from ((place, message) for message in _label_values(name, text, before))
            if variable.get("definition") not in (None, text):
                yield place, "its definition, which Grafana shows, is not its query"
        before.add(name)


def _label_values(variable: str, text: str, before: set[str]) -> Told:
    found = _LABEL_VALUES.fullmatch(text.strip())
    if not found:
        bare = _BARE_LABEL_VALUES.fullmatch(text.strip())
        yield (
            "label_values(label) offers the values of every exporter; name a series"
            if bare
            else f"{text!r} is no label_values(series, label)"
        )
        return
    try:
        (read,) = promql_ast.reads(found["source"])
    except (BadExpression, ValueError):
        yield f"{found['source']!r} is no series"
        return
    metric = METRICS.get(read.name)
    if metric is None:
        yield f"{read.name} is not in the catalogue"
        return
    if found["label"] not in _labels_of(read.name):
        yield f"{read.name} has no label {found['label']}"
    narrowed = {(label, value.strip("${}")) for label, op, value in read.matchers if op == "=~"}
    for wanted in query_builders.where(metric):
        label = wanted.split("=~")[0]
        if label in before and label != variable and (label, label) not in narrowed:
            yield f"it is not narrowed by ${label}, which is chosen before it"
    for name in sorted(_named(text) - before):
        yield f"${name} is not chosen before it"


def _unused_variables(board: _Board) -> Placed:
    """A choice that changes nothing misleads; choices that only narrow others down are used by them."""
    asked = [query.text for query in board.queries] + [str(panel.raw.get("repeat", "")) for panel in board.panels]
    used = {name for text in asked for name in _named(text)} | {
        str(p.raw["repeat"]) for p in board.panels if p.raw.get("repeat")
    }
    used |= {"datasource"}
    for variable in reversed(board.variables):
        name = str(variable.get("name"))
        if name not in used:
            yield board.at(f"variable {name}"), "no query of the board reads it"
        else:
            asked_by = variable.get("query")
            used |= _named(asked_by.get("query", "") if isinstance(asked_by, Mapping) else str(asked_by))


def _board_links(board: _Board) -> Placed:
    for link in board.raw.get("links", ()):
        place = board.at(f"link {link.get('title')}")
        if not link.get("title"):
            yield place, "a link has a title"
        match link.get("type"):
            case "dashboards":
                if not link.get("tags"):
                    yield place, "a link to boards names the tag that they have"
                if not (link.get("keepTime") and link.get("includeVars")):
                    yield place, "it takes the time range and the choices along: keepTime, includeVars"
            case "link":
                yield from ((place, message) for message in _bad_url(str(link.get("url", "")), board))
            case other:
                yield place, f"Grafana knows links of type dashboards and link, not {other!r}"


def _annotations(board: _Board) -> Placed:
    names = Counter(a.get("name") for a in board.annotations)
    for name, count in names.items():
        if count > 1 or not name:
            yield board.at(f"annotation {name}"), "every annotation has a name of its own"
    first_read: dict[str, str] = {}
    for mark in board.marks:
        if mark.raw.get("datasource") != DATASOURCE:
            yield mark.place, f"it asks {DATASOURCE['uid']}"
        for read in mark.reads[:1]:
            if read.name in first_read:
                yield mark.place, f"{first_read[read.name]} already draws {read.name}: everything would show twice"
            first_read.setdefault(read.name, mark.place)
    copies = [a for a in board.annotations if a.get("type") == "tags" or (a.get("target") or {}).get("type") == "tags"]
    if copies and sidecar.EVENT_TIME.name in first_read:
        yield (
            board.at(f"annotation {copies[0].get('name')}"),
            "events that were pushed to Grafana are the same that Prometheus already tells",
        )


BOARD_RULES: dict[str, Callable[[_Board], Placed]] = {
    "board-identity": _identity,
    "board-tags": _tags,
    "board-schema-version": _schema_version,
    "board-editable": _editable,
    "board-refresh": _refresh,
    "board-size": _size,
    "board-links": _board_links,
    "legacy-keys": _legacy_keys,
    "json-nulls": _nulls,
    "panel-ids": _panel_ids,
    "panel-grid": _grid,
    "template-datasource": _template_datasource,
    "template-choices": _template_choices,
    "template-label-values": _template_label_values,
    "template-unused": _unused_variables,
    "annotations": _annotations,
}


# ---- panels


def _panel_type(panel: _Panel) -> Told:
    if panel.kind in REPLACED_TYPES:
        yield f"{panel.kind} was removed; {REPLACED_TYPES[panel.kind]} took its place"
    elif panel.kind not in PANEL_TYPES:
        yield f"{panel.kind!r} is no panel that every Grafana has"
    if panel.asks and not panel.raw.get("pluginVersion"):
        yield "without a pluginVersion Grafana takes it for its oldest form"


def _panel_text(panel: _Panel) -> Told:
    if not panel.raw.get("title"):
        yield "a panel has a title"
    if panel.asks and not panel.raw.get("description"):
        yield "a panel has a description"


def _panel_unit(panel: _Panel) -> Told:
    if panel.asks and not panel.defaults.get("unit"):
        yield "a figure has a unit"
    for unit in panel.configured("unit"):
        if unit not in UNITS and not str(unit).startswith(CUSTOM_UNITS):
            yield f"Grafana, or our list, does not know the unit {unit!r}"


def _panel_no_value(panel: _Panel) -> Told:
    if panel.asks and not panel.defaults.get("noValue"):
        yield "an empty panel says why it is empty: noValue"


def _panel_targets(panel: _Panel) -> Told:
    if panel.asks and not any(target.get("expr") for target in panel.targets):
        yield "it asks nothing"
    refs = Counter(target.get("refId") for target in panel.targets)
    if panel.asks and (None in refs or max(refs.values(), default=0) > 1):
        yield "every query of a panel has a letter of its own"


def _panel_datasource(panel: _Panel) -> Told:
    if panel.asks and panel.raw.get("datasource") != DATASOURCE:
        yield f"the panel's data source is {DATASOURCE}"
    for target in panel.targets:
        if target.get("datasource") != DATASOURCE:
            yield f"the data source of query {target.get('refId')} is {DATASOURCE}"


def _panel_format(panel: _Panel) -> Told:
    """A table of a range repeats each row for every step; a heatmap sorts buckets only in its own format."""
    for target in panel.targets:
        instant, form = bool(target.get("instant")), target.get("format", "time_series")
        if instant is bool(target.get("range", not instant)):
            yield f"query {target.get('refId')} is either instant or over the range"
        if panel.kind == "table" and not (instant and form == "table"):
            yield f"query {target.get('refId')} of a table is instant and in table format"
        if panel.kind == "heatmap" and (instant or form != "heatmap"):
            yield f"query {target.get('refId')} of a heatmap is over the range and in heatmap format"
        if panel.kind == "timeseries" and (instant or form != "time_series"):
            yield f"query {target.get('refId')} of a line is over the range and in time series format"


def _panel_thresholds(panel: _Panel) -> Told:
    for thresholds in panel.configured("thresholds"):
        steps = thresholds.get("steps") or []
        if not steps or steps[0].get("value", 0) is not None:
            yield "the first threshold step is the base: its value is null"
        edges = [step.get("value") for step in steps[1:]]
        if any(edge is None for edge in edges) or any(a >= b for a, b in pairwise(edges)):
            yield f"threshold steps rise, not {edges}"
        for step in steps:
            colour = str(step.get("color", ""))
            if colour not in _COLOURS and not _COLOUR_CODE.fullmatch(colour):
                yield f"Grafana does not know the colour {colour!r}"


def _panel_links(panel: _Panel) -> Told:
    for link in panel.links:
        if not link.get("title"):
            yield "a link has a title"
        yield from _bad_url(str(link.get("url", "")), panel.board)


def _bad_url(url: str, board: _Board) -> Told:
    plain = re.sub(r"\$\{[\w.:]+\}", "x", url)
    if not re.fullmatch(r"(https?://[^\s/]+|/)\S*", plain) or re.search(r"[${}]", plain):
        yield f"{url!r} is no address: http(s)://... or /d/uid"
    known = {str(variable.get("name")) for variable in board.variables}
    for name in sorted(_named(url) - known):
        yield f"the address {url!r} takes along ${name}, which the board does not have"


def _panel_percentile(panel: _Panel) -> Told:
    """A title that says p95 shows a p95, and a quantile is called by its name: in the title, or in the legends when
    there are several."""
    asked = {
        query: [f"{round(q * 100, 6):g}" for q in _safely(promql_ast.quantiles, query.text)] for query in panel.queries
    }
    distinct = {q for qs in asked.values() for q in qs}
    title = set(_PERCENTILE.findall(str(panel.raw.get("title", ""))))
    if panel.asks and title - distinct:
        yield f"the title says p{min(title - distinct)} and no query asks for it"
    for query, qs in asked.items():
        named = set(_PERCENTILE.findall(query.legend)) | (title if len(distinct) == 1 else set())
        for q in qs:
            if q not in named:
                yield f"query {query.raw.get('refId')} asks for p{q}; neither the title nor its legend says so"
        if qs and set(_PERCENTILE.findall(query.legend)) - set(qs):
            yield f"the legend of query {query.raw.get('refId')} names another percentile than p{qs[0]}"


def _safely(question: Callable[[str], list[Any]], text: str) -> list[Any]:
    try:
        return question(text)
    except BadExpression:
        return []


PANEL_RULES: dict[str, Callable[[_Panel], Told]] = {
    "panel-type": _panel_type,
    "panel-title-description": _panel_text,
    "panel-unit": _panel_unit,
    "panel-no-value": _panel_no_value,
    "panel-no-targets": _panel_targets,
    "panel-datasource": _panel_datasource,
    "panel-format": _panel_format,
    "panel-thresholds": _panel_thresholds,
    "panel-links": _panel_links,
    "panel-percentile": _panel_percentile,
}


# ---- queries


def _parses(query: _Query) -> Told:
    try:
        promql_ast.parse(query.text)
    except BadExpression as error:
        yield str(error)


def _known_series(query: _Query) -> Told:
    """A board shows what it says without any rule of ours being loaded."""
    for read in query.reads:
        if read.name in _RECORDED:
            yield f"{read.name} is recorded by our rules; a board works without them"
        elif read.name not in METRICS:
            yield f"{read.name or 'a selector without a name'} is not in the catalogue"


def _known_variables(query: _Query) -> Told:
    known = {str(variable.get("name")) for variable in query.board.variables}
    for name in sorted(_named(query.text) - known):
        yield f"the board has no variable ${name}"


def _matchers(query: _Query) -> Told:
    """dashboard-linter's target-job and target-instance: what a series can be narrowed by, each of its selectors is; by
    regular expression, since several values can be chosen. That the board has these variables is query-variables'
    business."""
    several = {str(v.get("name")) for v in query.board.variables if v.get("multi")}
    for read, metric in query.series:
        for label, op, value in read.matchers:
            if op in ("=", "!=") and _named(value) & several:
                yield f"{read.name}: {label} {op} {value} fails when two are chosen; write =~"
        have = {(label, value.strip("${}")) for label, op, value in read.matchers if op == "=~"}
        missing = [
            label
            for label in (wanted.split("=~")[0] for wanted in query_builders.where(metric))
            if (label, label) not in have
        ]
        if missing and query.panel:
            yield f"{read.name} is not narrowed by {', '.join('$' + label for label in missing)}"


def _rate_interval(query: _Query) -> Told:
    instant = bool(query.raw.get("instant"))
    allowed = ("$__rate_interval", "${__rate_interval}", *(("$__range", "${__range}") if instant else ()))
    for read in query.reads:
        # who is shown is decided once, over all that is shown
        if "topk" in read.above and read.window == query_builders.RANGE:
            continue
        if read.above and read.above[0] in GROWTH and read.window not in allowed:
            yield (
                f"{read.above[0]}({read.name}[{read.window}]): the window follows the zoom, {' or '.join(allowed[::2])}"
            )


def _shared(rule: promql_lint.Rule, query: _Query) -> Told:
    yield from _safely(lambda text: list(rule(text, _labels_of)), query.text)


def _rate_of_gauge(query: _Query) -> Told:
    """Of series that the catalogue knows; another rule tells of the rest."""
    if all(read.name in METRICS for read in query.reads):
        yield from _shared(promql_lint.RULES["rate-of-gauge"], query)


def _buckets(query: _Query) -> Told:
    """As for rules, and a panel that keeps buckets apart is a heatmap."""
    if query.panel is None or query.panel.kind != "heatmap":
        for name in _safely(lambda text: list(promql_lint.cumulative(text, _labels_of_buckets)), query.text):
            yield f"{name} is cumulative: it belongs into histogram_quantile or on a heatmap"


def _legend(query: _Query) -> Told:
    try:
        kept = promql_ast.some_labels(query.text, _labels_of)
    except BadExpression:
        return
    # which what is recorded may have
    for label in sorted(set(_LEGEND_LABEL.findall(query.legend)) - set(kept) - {BOUND}):
        yield f"the legend names {label}, which the answer does not have"


def _sums(query: _Query) -> Told:
    """Two engines whose cache is 40 % full are not one whose cache is 80 % full."""
    for read, metric in query.series:
        if metric.kind is not Kind.GAUGE or metric.across is Across.SUM or metric.unit is Unit.FLAG:
            continue
        for step in read.above:
            if step in _NO_LONGER_ITSELF or step.endswith(" bool"):
                break
            if step in _ADDED_UP:
                yield f"{read.name} is not added up: its engines combine by {metric.across}"


QUERY_RULES: dict[str, Callable[[_Query], Told]] = {
    "query-promql": _parses,
    "query-series": _known_series,
    "query-variables": _known_variables,
    "query-matchers": _matchers,
    "query-rate-interval": _rate_interval,
    **{f"query-{name}": partial(_shared, rule) for name, rule in promql_lint.RULES.items()},
    "query-rate-of-gauge": _rate_of_gauge,
    "query-buckets": _buckets,
    "query-legend": _legend,
    "query-sum": _sums,
}


# ---- all boards together


def _unlike(boards: Sequence[_Board]) -> Placed:
    for what in ("uid", "title"):
        for value, count in Counter(board.raw.get(what) for board in boards).items():
            if count > 1:
                yield str(value), f"{count} boards have this {what}"


def _links_lead_somewhere(boards: Sequence[_Board]) -> Placed:
    there = {board.uid for board in boards}
    for board in boards:
        links = [(panel.place, link) for panel in board.panels for link in panel.links] + [
            (board.uid, link) for link in board.raw.get("links", ())
        ]
        for place, link in links:
            found = _BOARD_LINK.match(str(link.get("url", "")))
            if found and found[1] not in there:
                yield place, f"no board of ours has the uid {found[1]}"


SHELF_RULES: dict[str, Callable[[Sequence[_Board]], Placed]] = {
    "boards-unlike": _unlike,
    "boards-links": _links_lead_somewhere,
}
RULES = (*BOARD_RULES, *PANEL_RULES, *QUERY_RULES, *SHELF_RULES)
