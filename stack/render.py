"""Generated files: path and text of each, for `render` and the tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from alerts import printer, routing, thresholds
from alerts.export import AlertOptions
from alerts.panel_ref import PanelRef
from alerts.registry import ALERTS, RECORDINGS, alerts
from alerts.rules import Alert, Links
from alerts.settings import DEFAULTS, Settings
from dashboards import coverage, mixin
from dashboards.grafana_json import to_json
from dashboards.registry import BOARDS
from exporters.catalogue import promql_ast
from exporters.compat.check import QueryRef
from runbooks import diagnosis
from runbooks import page as runbook_page
from stack.deploy import haproxy
from stack.deploy.fleet import files as fleet
from stack.deploy.helm import chart
from stack.doctor import symptoms
from stack.root import ROOT, version

# HAProxy of compose.replicas.yml
COMPOSE_GATEWAYS = haproxy.LoadBalancer(gateways=("gateway:8000", "gateway-1:8000"), listen="0.0.0.0:8000")
# folders that hold nothing else: what has no source there is removed
PRINTED_ONLY = ("alerts/prometheus", "dashboards/json", *(f"{chart.CHART}/{folder}" for folder in chart.PRINTED_ONLY))


def files() -> Iterator[tuple[Path, str]]:
    """Path below the root and text of each printed file."""
    for name, text in printer.rule_files():
        yield Path("alerts/prometheus") / name, text
    for name, text in routing.printed_files():
        yield Path("stack/deploy/alertmanager") / name, text
    for board in BOARDS:
        yield Path("dashboards/json") / f"{board.slug}.json", to_json(board)
    slugs = [board.slug for board in BOARDS]
    yield Path("dashboards/mixin.libsonnet"), mixin.text(slugs, "json", Links())
    yield Path("dashboards/rules.libsonnet"), mixin.rules(Links())
    yield Path("dashboards/COVERAGE.md"), coverage.table(BOARDS)
    for alert in ALERTS:
        if page := runbook_page.text(alert.name):
            yield Path("runbooks") / f"{alert.name}.md", runbook_page.stamped(page, facts(alert))
    yield Path("runbooks/tuning.md"), symptoms.page()
    yield from fleet.files()
    yield Path("stack/deploy/replicas/haproxy.cfg"), haproxy.configuration(COMPOSE_GATEWAYS)
    yield from ((chart.CHART / name, text) for name, text in chart.printed(AlertOptions(), version()))
    if (ROOT / "docs").is_dir():  # an installed package has none
        from stack import reference  # late: only printing needs the drills

        yield from reference.pages()


def page_text(name: str, settings: Settings = DEFAULTS) -> str | None:
    """A runbook page with the rule and the numbers of a deployment; None when there is none of this name."""
    text = runbook_page.text(name)
    return text and _stamped(name, text, settings)


def pages(settings: Settings = DEFAULTS) -> tuple[runbook_page.RunbookPage, ...]:
    """Every runbook page, in the book's order."""
    shown = runbook_page.pages()
    return (
        shown
        if settings == DEFAULTS
        else tuple(runbook_page.parse(page.name, _stamped(page.name, page.text, settings)) for page in shown)
    )


def _stamped(name: str, text: str, settings: Settings) -> str:
    alert = None if settings == DEFAULTS else next((one for one in alerts(settings) if one.name == name), None)
    return runbook_page.stamped(text, facts(alert)) if alert else text


def facts(alert: Alert) -> runbook_page.Facts:
    """Return the facts that a page states about its alert."""
    lines = ["This rule has no number in thresholds.yml."]
    if number := alert.threshold:
        lines = [f"{number.shown}. {number.why}", f"Source: {number.source}"]
        own = number.name in (known.name for known in thresholds.ALL)
        lines += [f"Another number for your deployment: `{number.name}` in thresholds.yml."] * own
    expr = promql_ast.pretty(alert.expr)
    rows = diagnosis.ROWS.get(alert.name, ())
    return runbook_page.Facts(expr, alert.hold, tuple(lines), rows)


def stale(root: Path = ROOT) -> list[Path]:
    """Printed files that differ from what their source prints now, are missing, or have no source any more."""
    return _stale(root, dict(files()))


def _stale(root: Path, printed: Mapping[Path, str]) -> list[Path]:
    wrong = [
        path
        for path, text in printed.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
    return wrong + [
        f.relative_to(root)
        for d in PRINTED_ONLY
        for f in sorted((root / d).glob("*"))
        if f.relative_to(root) not in printed
    ]


def write(root: Path = ROOT) -> list[Path]:
    """Print every file and remove those without a source; the paths that changed."""
    printed = dict(files())
    changed = _stale(root, printed)
    for path in changed:
        if path in printed:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(printed[path], encoding="utf-8")
        else:
            (root / path).unlink()
    return changed


def uses() -> Iterator[QueryRef]:
    """Every place of ours that reads series: panels, alerts, recordings. What may leave a panel empty leaves its alert
    silent."""
    empty = {PanelRef(board.slug, panel.slug): panel.optional for board in BOARDS for panel in board.panels}
    for board in BOARDS:
        for panel in board.panels:  # a panel is dead when none of its queries has an answer
            yield QueryRef(
                f"panel {board.slug}/{panel.slug}",
                " or ".join(f"({query.expr})" for query in panel.queries),
                panel.optional,
            )
    yield from (QueryRef(f"alert {alert.name}", alert.expr, empty[alert.panel]) for alert in ALERTS)
    yield from (QueryRef(f"recording {recording.record}", recording.expr) for recording in RECORDINGS)
