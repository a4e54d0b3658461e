"""Output of `vllm-watch runbook`: page of an alert, firing alerts, live results of a page's queries.

Invariant: a page is shown also when Prometheus and Alertmanager are down. An error stands in place of the answer."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from alerts import registry
from alerts.panel_ref import board_uid
from alerts.rules import Links
from alerts.settings import DEFAULTS, Settings
from exporters.catalogue import EVERYTHING, bounds, promql, vllm
from exporters.catalogue.metric import Kind
from exporters.catalogue.prometheus import UP
from exporters.net.alertmanager import Firing
from exporters.net.prometheus import Address, Prometheus, QueryResult
from exporters.text import printable
from runbooks import search
from runbooks.diagnosis.row import DiagnosisRow
from runbooks.page import SEVERITIES, RunbookPage, placeholders

ALERTMANAGER = "http://127.0.0.1:9093"
MOST_ROWS = 8  # of one answer
EACH_S, ALL_S = 8.0, 20.0  # for one query, and for all of a page
_TO_PAGE = re.compile(r"\[([^\[\]]+)\]\(([\w-]+)\.md(?:#[\w-]*)?\)")

Labels = Mapping[str, str]


def links_of(alert: Firing | None, base: str | None) -> Links:
    """Return the addresses of pages and panels: at the given base, else where the alert itself says, else on this
    machine."""
    annotations = alert.annotations if alert else {}
    page = printable(annotations.get("runbook_url", "")).partition("?")[0]
    panel = printable(annotations.get("dashboard_url", ""))
    own = page.removesuffix(f"/{alert.name}") if alert else ""
    boards, found, _ = panel.partition(f"/d/{board_uid('')}")
    return Links(base or (own if own != page else Links().runbooks), boards if found else Links().dashboards)


# ---- which page is meant


@dataclass(frozen=True, slots=True)
class PageChoice:
    """A page and the labels for it; or no page, and what is printed instead.

    message: a remark about the page, or the list. rows: the list as JSON. status: the exit status."""

    page: RunbookPage | None
    labels: Labels = field(default_factory=dict)
    message: str = ""
    rows: Any = ()
    status: int = 0
    links: Links = field(default_factory=Links)


def choose(
    query: str,
    alerts: Sequence[Firing] | None,
    labels: Labels,
    pages: Sequence[RunbookPage],
    base: str | None = None,
    single: bool = False,
    with_constant: bool = True,
) -> PageChoice:
    """Choose the page that a query, alerts, or both mean.

    alerts: None unless requested. base: the URL of the pages. single: whether a list of alerts is an error.
    with_constant: whether an alert that always fires is chosen when it is the only one; else it is listed."""
    found = search.find(query, pages) if query else None
    if found and len(found.pages) != 1:
        return _no_single_page(query, found.pages, pages)
    page = found.pages[0] if found else None
    remark = f"no page is called {query!r}; the nearest is {page.name}" if found and page and not found.by_name else ""
    if alerts is not None:
        return _page_of_alerts(alerts, page, remark, labels, pages, base, single, with_constant or single)
    links = links_of(None, base)
    if page:
        return PageChoice(page, labels, remark, links=links)
    rows = [
        {"page": each.name, "severity": each.severity, "meaning": each.gist, "url": links.runbook(each.name)}
        for each in pages
    ]
    return PageChoice(None, labels, index(pages), rows)


def _page_of_alerts(
    alerts: Sequence[Firing],
    page: RunbookPage | None,
    remark: str,
    labels: Labels,
    pages: Sequence[RunbookPage],
    base: str | None,
    single: bool,
    with_constant: bool,
) -> PageChoice:
    """Choose the page of the one alert that matches the labels, and the page if one was named; else list the alerts."""
    by_name = {each.name: each for each in pages}
    matching = [alert for alert in alerts if (page is None or alert.name == page.name) and _fits(alert, labels)]
    matching.sort(key=lambda alert: (_urgency(by_name.get(alert.name)), alert.starts_at))
    if not matching:
        narrowed = " with these labels" if labels else ""
        if page:
            return PageChoice(page, labels, f"{page.name} does not fire{narrowed}", links=links_of(None, base))
        return PageChoice(None, labels, f"no alert fires{narrowed}", [], 1)
    first = matching[0]  # one whose page asks for nothing, such as the watchdog, is last and only listed
    calling = [alert for alert in matching if page or with_constant or _calls(by_name.get(alert.name))]
    if len(calling) == 1 and first.name in by_name:
        return PageChoice(by_name[first.name], first.labels | dict(labels), remark, links=links_of(first, base))
    lines = [_alert_as_text(alert, by_name.get(alert.name)) for alert in matching]
    ambiguous = page is not None or single
    if ambiguous:
        lines.append(f"{len(matching)} alerts: name one, or narrow them with --label")
    rows = [_alert_as_json(alert, by_name.get(alert.name), links_of(alert, base)) for alert in matching]
    return PageChoice(None, labels, "\n".join(lines), rows, 2 if ambiguous else 0)


def heading(page: RunbookPage, beginning: str) -> str:
    """The heading that begins so, in any case. Raises ValueError, with those that there are."""
    asked = beginning.strip().lower()
    found = [section.heading for section in page.sections if section.heading.lower().startswith(asked)]
    if len(found) != 1:
        raise ValueError(
            f"--section {beginning!r} should begin one of {', '.join(section.heading for section in page.sections)}"
        )
    return found[0]


def _no_single_page(query: str, found: Sequence[RunbookPage], pages: Sequence[RunbookPage]) -> PageChoice:
    """List the pages that a query matches, or the nearest names where it matches none."""
    if found:
        lines = [f"{query!r} may mean one of these:", *(f"  {page.name}  {page.gist}" for page in found)]
        return PageChoice(None, message="\n".join(lines), rows={"several": [page.name for page in found]}, status=2)
    near = search.nearest(query, pages)
    hint = f"the nearest names are {', '.join(near)}" if near else "vllm-watch runbook --list has them all"
    return PageChoice(None, message=f"no page has {query!r}; {hint}", rows={"nearest": near}, status=1)


def _fits(alert: Firing, labels: Labels) -> bool:
    """Return whether the alert does not contradict these labels."""
    return all(alert.labels.get(name, value) == value for name, value in labels.items())


def _calls(page: RunbookPage | None) -> bool:
    """Return False for an alert that always fires."""
    return page is None or page.severity != "none"


def _urgency(page: RunbookPage | None) -> tuple[int, str]:
    """Return the sort key that puts paging alerts first."""
    if page is None:
        return len(SEVERITIES) + 1, ""
    return (SEVERITIES.index(page.severity) if page.severity in SEVERITIES else len(SEVERITIES)), page.name


# ---- what Prometheus says


@dataclass(frozen=True, slots=True)
class LiveQuery:
    """One query and its answer. rows: labels and value of the highest of `found` series; error: why it could not be
    asked."""

    rows: tuple[tuple[Labels, str], ...] = ()
    found: int = 0
    error: str = ""

    @property
    def holds(self) -> bool | None:
        return None if self.error else self.found > 0


@dataclass(frozen=True, slots=True)
class Live:
    """Results of the queries of a page. at: in UTC; threshold: '' where the alert has none; error: where no query was
    answered, and all for one reason. unseen: labels of the alert of which Prometheus has no series at all, so that an
    empty result means nothing."""

    at: str
    prometheus: str
    threshold: str = ""
    rule: str = ""
    answers: Mapping[str, LiveQuery] = field(default_factory=dict)
    unseen: str = ""

    @property
    def error(self) -> str:
        errors = {asked.error for asked in self.answers.values()}
        return errors.pop() if len(errors) == 1 else ""


async def ask(page: RunbookPage, labels: Labels, where: Address, now_s: float, settings: Settings = DEFAULTS) -> Live:
    """Connect to a Prometheus and evaluate a page. Never fails."""
    async with Prometheus(where, timeout_s=EACH_S) as prometheus:
        return await evaluate(page, labels, prometheus, now_s, settings, ALL_S)


async def evaluate(
    page: RunbookPage,
    labels: Labels,
    prometheus: Prometheus,
    now_s: float,
    settings: Settings = DEFAULTS,
    within_s: float = ALL_S,
) -> Live:
    """Run the rule of the page's alert, the queries of its first steps and the conditions of its diagnosis.

    page: filled with `labels`. Of the rule's result, series with other values of these labels are left out. A query
    that fails or takes longer than `within_s` carries its error. Never fails."""
    alert = next((one for one in registry.alerts(settings) if one.name == page.name), None)
    rule = alert.expr if alert else ""
    threshold = f"{alert.threshold.shown} ({alert.threshold})" if alert and alert.threshold else ""
    exprs = [one for one in (rule, *queries(page)) if one]
    subjects = {f"{name}={labels[name]}": expr for name, expr in _subjects(labels)}
    results = await _results(dict.fromkeys([*exprs, *subjects.values()]), prometheus, now_s, within_s)
    unseen = [label for label, expr in subjects.items() if not results[expr].error and not results[expr].series]
    answers = {
        expr: _asked(result, "_seconds_bucket" in expr, labels if expr == rule else {})
        for expr, result in results.items()
        if expr in exprs
    }
    at = f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Live(at, prometheus.where.shown, threshold, rule, answers, printable(", ".join(unseen)))


def _subjects(labels: Labels) -> Iterator[tuple[str, str]]:
    """Yield queries that return a series if Prometheus scrapes the subject of an alert, by the label that names it."""
    for name, series in (("instance", UP.name), ("model_name", vllm.NUM_REQUESTS_RUNNING.name)):
        if labels.get(name):
            yield name, f"{series}{{{name}={json.dumps(labels[name])}}}"


def queries(page: RunbookPage) -> list[str]:
    """Return the queries of the first five minutes, then of the diagnosis; each one once."""
    first = [block.text for step in page.steps for block in step.blocks if block.language == "promql"]
    return list(dict.fromkeys([*first, *(row.condition for row in page.rows if row.condition)]))


async def _results(
    exprs: Iterable[str], prometheus: Prometheus, now_s: float, within_s: float
) -> dict[str, QueryResult]:
    tasks = {expr: asyncio.create_task(prometheus.as_of(_with_bounds(expr), now_s)) for expr in exprs}
    if tasks:
        _, late = await asyncio.wait(tasks.values(), timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    return {
        expr: QueryResult(error=f"no answer within {within_s:.0f} s") if task.cancelled() else task.result()
        for expr, task in tasks.items()
    }


_QUANTILE = re.compile(
    r"histogram_quantile\((?P<q>0?\.\d+), sum by \((?P<by>[\w, ]*)\) "
    r"\(rate\((?P<name>[\w:]+)_bucket(?:\{(?P<where>[^}]*)\})?\[(?P<window>\w+)\](?: offset (?P<offset>\w+))?\)\)\)"
)
_COMPARED = re.compile(r"[<>=*/]|\b(?:and|unless)\b")
_BY_NAME = {name: metric for metric in EVERYTHING if metric.kind is Kind.HISTOGRAM for name in metric.names}


def _with_bounds(expr: str) -> str:
    """A query of a page as panels ask it: a quantile beyond its buckets is a bound. Pages keep the short form, for
    people.

    What compares or divides quantiles stays as it is, since a bound is no value to calculate with."""
    rest = re.sub(r'"[^"]*"', "", _QUANTILE.sub("", expr))
    return expr if _COMPARED.search(rest) else _QUANTILE.sub(_bounded, expr)


def _bounded(found: re.Match[str]) -> str:
    metric = _BY_NAME.get(found["name"])
    if metric is None:
        return found[0]
    by = [label for label in found["by"].replace(" ", "").split(",") if label not in ("", "le")]
    where = (found["where"],) if found["where"] else ()
    return f"({promql.bounded_quantile(float(found['q']), metric, found['window'], by, where, found['offset'] or '')})"


def _asked(answer: QueryResult, in_seconds: bool, only: Labels) -> LiveQuery:
    """Return values and labels, highest first. only: series that contradict these labels are left out."""
    try:
        values = [
            (series.metric, float(series.value[1]))
            for series in answer.series
            if series.value and all(series.metric.get(name, value) == value for name, value in only.items())
        ]
    except ValueError as error:
        return LiveQuery(error=f"what came back is no figure ({printable(str(error))})")
    values.sort(key=lambda row: (math.isnan(row[1]), -row[1], sorted(row[0].items())))
    rows = tuple(
        (
            {name: own for name, own in labels.items() if name != promql.BOUND},
            _told(labels.get(promql.BOUND), value, in_seconds),
        )
        for labels, value in values[:MOST_ROWS]
    )
    return LiveQuery(rows, len(values), printable(answer.error))


def _told(beyond: str | None, value: float, in_seconds: bool) -> str:
    """A value, or the bound that it lies beyond."""
    if beyond and in_seconds:
        return bounds.format_bound(beyond, value)
    return f"{beyond or ''} {value:.6g}".strip()


# ---- as it is shown


def as_text(page: RunbookPage, labels: Labels, live: Live | None, section: str = "", links: Links | None = None) -> str:
    """Markdown that is read as it stands. page: filled already; section: its heading, for this part alone."""
    rest = page.readable(section).removeprefix(f"# {page.title}\n").strip()
    parts = (
        f"# {page.title or page.name}",
        _head(page, labels, links or Links()),
        f"## Now\n\n{_now(page, live)}" if live else "",
        rest,
    )
    return _TO_PAGE.sub(
        lambda found: found[2] if found[1] == found[2] else f"{found[1]} ({found[2]})",
        "\n\n".join(filter(None, parts)) + "\n",
    )


def _head(page: RunbookPage, labels: Labels, links: Links) -> str:
    panel = panel_url(page, links.dashboards)
    facts = {
        "severity": page.severity,
        "panel": panel,
        "related": ", ".join(page.related),
        "reviewed": str(page.about.get("reviewed", "")),
        "labels": ", ".join(
            f"`{_cited(name)}={_cited(value)}`" for name, value in sorted(labels.items()) if name != "alertname"
        ),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)


def _cited(text: str) -> str:
    return printable(text).replace("`", "'")


def panel_url(page: RunbookPage, base: str | None) -> str:
    """Return the address of the panel that shows the page's quantity; '' for a page without an alert, or no base."""
    return page.alert.panel.url(base) if page.alert and base is not None else ""


def _now(page: RunbookPage, live: Live) -> str:
    asked = f"Asked {live.prometheus} at {live.at}." + (
        f" The threshold is {live.threshold}." if live.threshold else ""
    )
    if not live.answers:
        return f"{asked} This page has no query."
    if live.error:
        return f"Nothing could be asked: {live.error}"
    lines = [f"{unseen_text(live)}\n"] if live.unseen else []
    if live.rule:
        rule = live.answers[live.rule]
        lines += [
            f"The rule's expression: {'not asked' if rule.error else 'holds' if rule.holds else 'does not hold'}",
            *_rows(rule),
            "",
        ]
    asked_for = [step for step in page.steps if any(block.language == "promql" for block in step.blocks)]
    lines += ["First five minutes:"] * bool(asked_for)
    for step in asked_for:
        blocks = [block for block in step.blocks if block.language == "promql"]
        lines += [f"{step.number}. {step.text}"] * bool(blocks)
        for block in blocks:
            lines += [f"   {' '.join(block.text.split())}"] * (len(blocks) > 1) + (
                _rows(live.answers[block.text]) or ["   nothing came back"]
            )
        lines += [""] * bool(blocks)
    for row in page.rows:
        if row.condition:
            answer = live.answers[row.condition]
            mark = {True: "HOLDS", False: "no", None: "not asked"}[answer.holds]
            lines += [
                f"{mark:9}  {row.what}" + (f": {row.cause}. Go to {row.go_to}." if answer.holds else ""),
                *_rows(_valued(row, answer)),
            ]
    return f"{asked}\n\n```text\n" + "\n".join(lines).strip() + "\n```"


def unseen_text(live: Live) -> str:
    """Return the warning for an alert whose subject Prometheus does not know; '' where it does."""
    return live.unseen and (
        f"NO DATA: Prometheus has no series with {live.unseen}. Nothing below says that it is well. Check that this"
        " Prometheus scrapes it."
    )


def _valued(row: DiagnosisRow, asked: LiveQuery) -> LiveQuery:
    """Return the series for which a condition holds, and the value unless it is a quantile, which may be no more than a
    place within a bucket."""
    return (
        replace(asked, rows=tuple((labels, "") for labels, _ in asked.rows))
        if "histogram_quantile" in row.condition
        else asked
    )


def _rows(asked: LiveQuery) -> list[str]:
    if asked.error:
        return [f"   {asked.error}"]
    more = [f"   and {asked.found - len(asked.rows)} more"] * (asked.found > len(asked.rows))
    return [f"   {value:>10}  {label_text(labels)}" for labels, value in asked.rows] + more


def label_text(labels: Labels) -> str:
    """Return labels on one line, safe for a terminal."""
    return printable(", ".join(f"{name}={value}" for name, value in sorted(labels.items()))) or "in all"


def as_json(
    page: RunbookPage, labels: Labels, live: Live | None, section: str = "", links: Links | None = None
) -> dict[str, Any]:
    """Return the page and its results for programs."""
    links = links or Links()

    def answered(expr: str) -> dict[str, Any]:
        asked = live.answers.get(expr) if live else None
        return {"answer": asdict(asked)} if asked else {}

    return {
        "page": page.name, "title": page.title, "severity": page.severity, "related": page.related,
        "reviewed": str(page.about.get("reviewed", "")),
        "url": links.runbook(page.name), "panel_url": panel_url(page, links.dashboards), "labels": dict(labels),
        "sections": {one.heading: one.text for one in page.sections if section in ("", one.heading)},
        "steps": [
            {"number": step.number, "text": step.text,
                "commands": [asdict(block) | answered(block.text) for block in step.blocks]}
            for step in page.steps
        ],
        "diagnosis": [asdict(row) | ({"holds": live.answers[row.condition].holds} if live and row.condition
            else {}) | answered(row.condition)
                      for row in page.rows],
        "live": {"at": live.at, "prometheus": live.prometheus, "threshold": live.threshold, "error": live.error,
            "rule": live.rule, "unseen": live.unseen}
                | answered(live.rule) if live else None,
    }  # fmt: skip


def index(pages: Sequence[RunbookPage]) -> str:
    """One line for each page."""
    width = max(len(page.name) for page in pages)
    return "\n".join(
        f"{page.severity or '-':8}  {page.name:{width}}  {page.gist}" for page in sorted(pages, key=_urgency)
    )


def _alert_as_text(alert: Firing, page: RunbookPage | None) -> str:
    """An alert with the command that opens its page with its labels."""
    labels = {name: value for name, value in alert.labels.items() if name not in ("alertname", "severity", "owner")}
    since = f" since {printable(alert.starts_at)}" if alert.starts_at else ""
    severity = printable(alert.labels.get("severity", "-"))
    lines = [
        f"{severity:8}  {printable(alert.name) or 'without a name'}{since}{', muted' if alert.is_muted else ''}",
        f"          {label_text(labels)}",
    ]
    if page is None:
        return "\n".join([*lines, "          no page of this book"])
    wanted = [
        f"{name}={labels[name]}" for name in placeholders(page.text) if name in labels and labels[name].isprintable()
    ]
    command = " ".join(["vllm-watch runbook", page.name, *(f"--label {shlex.quote(one)}" for one in wanted)])
    return "\n".join([*lines, *[f"          {page.gist}"] * bool(page.gist), f"          {command}"])


def _alert_as_json(alert: Firing, page: RunbookPage | None, links: Links) -> dict[str, Any]:
    row = {"alert": alert.name, "since": alert.starts_at, "muted": alert.is_muted}
    return row | (
        as_json(page.filled(alert.labels), alert.labels, None, links=links)
        if page
        else {"page": None, "labels": alert.labels}
    )
