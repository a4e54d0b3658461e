"""docs/reference/alerts.md: alerts with threshold, panel, runbook and drill; recorded series."""

from __future__ import annotations

from collections.abc import Iterator

from alerts import thresholds
from alerts.printer import FILES
from alerts.registry import ALERTS, families, recorded_families
from alerts.rules import Alert, Recording, Severity
from exporters.catalogue import promql_ast
from stack.drill.drills import DRILLS, WHY_NOT
from stack.reference import use
from stack.reference.markdown import PRINTED, code, listed, table, to

_MOST_LINES = 10  # of an expression that is not folded away
_READER = {
    Severity.CRITICAL: "Somebody gets up.",
    Severity.WARNING: "Somebody finds it in the queue of the day.",
    Severity.INFO: "Nobody is notified; it is shown beside another alert.",
}
RECORDED_WHY = {
    "growth": "Growth within five minutes, which rules and longer windows rest on.",
    "slo": "What the objectives make of it: the share that was too slow or failed, by window.",
    "hours": "Growth within an hour, for windows of days.",
    "figures": "Figures that people ask for over long ranges. No rule reads them.",
    "fleet": (
        "By place and model, and by team: what the dashboard Fleet (weeks) reads of a long-term store. No rule reads"
        " them."
    ),
}
COLUMNS = ("alert", "symptom", "for", "threshold", "drill")
METRICS_PAGE, BOARDS_PAGE = "metrics.md", "../../dashboards/COVERAGE.md"


def page() -> str:
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield from ("# Alerts and recorded series", "", PRINTED.format(source="`alerts/*.py`"), "")
    yield from (
        (
            "Expressions, waiting times and numbers are the defaults. Beside the rules, `vllm-watch alerts"
            " export` writes the numbers to"
        ),
        (
            "`thresholds.yml` and the objectives to `objectives.yml`: change them there, and give them to it again by"
            " `--thresholds` and `--slo`."
        ),
        "What to do is on the page of the alert: [runbooks.md](runbooks.md).",
        "",
    )
    for severity, file in FILES.items():
        alerts = [alert for alert in ALERTS if alert.severity is severity]
        yield from (f"## {file}", "", f"Severity {severity}. {_READER[severity]}", "")
        yield from table(COLUMNS, map(_row, alerts))
        for alert in alerts:
            yield from _entry(alert)
    yield from (
        "## recording.yaml",
        "",
        "A name says by which labels, of what, and over how long: `model_name:vllm_ttft_seconds:p95_5m`.",
        "",
    )
    yield from (
        (
            "Panels never read these, so that a board works where nobody loaded the rules; the one board that does is"
            " Fleet (weeks)."
        ),
        "",
    )
    for family, recordings in recorded_families().items():
        yield from (f"### Recorded: {family}", "", RECORDED_WHY.get(family, ""), "")
        yield from table(("series", "what it holds", "made of", "read by"), map(_recording, recordings))
    yield "Test status: [alerts (reference)](../internals/test-status.md#alerts-reference)."


def _row(alert: Alert) -> tuple[str, str, str, str, str]:
    number = alert.threshold.shown if alert.threshold else ""
    return to(alert.name), alert.title, alert.hold, number, "yes" if drill(alert) else "none"


def drill(alert: Alert) -> str:
    """Return the fault that makes the alert fire; empty where there is no drill."""
    return next((drill.what for drill in DRILLS if drill.alert == alert.name), "")


def _entry(alert: Alert) -> Iterator[str]:
    family = next(name for name, alerts in families().items() if any(alert.name == one.name for one in alerts))
    yield from (
        f"### {alert.name}",
        "",
        f"{alert.title}. It holds for {alert.hold} before it fires. Family {family}, owner {alert.owner}.",
        "",
    )
    yield from code("promql", promql_ast.pretty(alert.expr), _MOST_LINES)
    yield from listed(_facts(alert))


def _facts(alert: Alert) -> Iterator[str]:
    if number := alert.threshold:
        own = f", `{number.name}` in thresholds.yml" if number in thresholds.ALL else ""
        yield f"Threshold: {number.shown}{own}. {number.why} Source: {number.source}"
    else:
        yield "Threshold: no number of its own in thresholds.yml."
    board = use.board_of(alert)
    yield (
        f"Panel: {to(f'Panels of {board.title}', BOARDS_PAGE, f'{board.title}, {use.panel_of(alert).title}')}"
        f" (`{board.slug}/{alert.panel.panel}`)"
    )
    yield f"Page: [{alert.name}](../../runbooks/{alert.name}.md)"
    why_not = WHY_NOT.get(alert.name, "nobody has made one")
    yield (
        f"Drill: {drill(alert)} (`vllm-watch drill {alert.name}`)"
        if drill(alert)
        else f"Drill: none, because {why_not}"
    )
    if read := use.metrics(alert.expr):
        yield "Reads: " + ", ".join(to(metric.name, METRICS_PAGE) for metric in read)
    if recorded := sorted(use.read(alert.expr).recorded):
        yield "Through: " + ", ".join(f"`{name}`" for name in recorded)
    if alert.muted_by:
        yield "Kept back while these fire for the same labels: " + ", ".join(to(name) for name in alert.muted_by)
    if alert.keep_firing:
        yield f"Goes on for {alert.keep_firing} after the condition has ended."


def _recording(recording: Recording) -> tuple[str, str, str, str]:
    below = use.recorded_in(recording.expr)
    made_of = [f"`{name}`" for name in below] or [
        to(metric.name, METRICS_PAGE) for metric in use.metrics(recording.expr)
    ]
    inputs = ", ".join(made_of[:2]) + (f" and {len(made_of) - 2} more" if len(made_of) > 2 else "")
    boards = [to(f"Panels of {board.title}", BOARDS_PAGE, board.title) for board in use.boards_with(recording.record)]
    readers = [*(to(name) for name in use.readers(recording.record)), *boards]
    return f"`{recording.record}`", recording.meaning, inputs, ", ".join(readers) or "people"
