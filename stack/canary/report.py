"""Report page of a canary: its end, its metrics with intervals, and each step of its share."""

from __future__ import annotations

from pathlib import Path

from exporters.requests.record import timestamp
from exporters.text import write_atomically
from stack.canary.evidence import METRICS, assess
from stack.canary.state import CanaryState
from stack.tuning import report
from stack.tuning.comparison import Comparison, percent_text, table_rows
from stack.tuning.report_blocks import Cell, Listed, ReportSection, Table, Text

_MEANING = {
    "roll_back": "The canary was stopped: its share should be 0.",
    "promote": "The canary is better than the other engines, or equivalent to them.",
    "undecided": "The time is over without a verdict.",
    "interrupted": "Somebody else changed the canary in teams.yaml.",
}
METHOD = (
    f"alpha is {{policy.alpha:g}} for all {METRICS} metrics together; an interval holds whenever it is looked at.",
    "A block is {policy.block_s:g} s, or as many as hold {policy.block_requests} requests of both sides.",
    "The value of a block is the difference of mean logarithms; the correlation of neighbours widens the interval.",
    "Errors are compared by the canary's share of the requests, after division by their index of dispersion.",
    "At a small share the canary's engines may have less load than the others, or more: compare the steps.",
)
_MARKS = {"roll_back": "worse", "promote": "better", "undecided": "inconclusive", "interrupted": "inconclusive"}


def write(path: Path, state: CanaryState) -> None:
    """Write the page as a whole. Raises OSError."""
    write_atomically(path, page(state))


def page(state: CanaryState) -> str:
    """Return the page of a run: of one that goes on, as it stands."""
    last = state.steps[-1] if state.steps else None
    action = last.action if last else "start"
    evidence, policy = state.evidence, state.policy
    canary, others = evidence.requests
    lines = [
        f"{timestamp(state.started_s)} to {timestamp(last.at_s if last else state.started_s)}",
        f"{canary:,} requests of {state.variant}, {others:,} of the other engines, in {evidence.minutes:,} blocks",
        f"{evidence.left_out:,} blocks left out: warm-up, or without requests of one variant",
    ]
    verdict = Text(_MEANING.get(action, "The comparison goes on."), _MARKS.get(action, ""))
    sections = (
        ReportSection("Verdict", (verdict, Text(last.why if last else ""))),
        ReportSection("Metrics", (_metrics(state),)),
        ReportSection("Steps", (_steps(state),)),
        ReportSection("Method", (Listed(tuple(sentence.format(policy=policy) for sentence in METHOD)),)),
    )
    return report.page_of(f"Canary {state.variant}", lines, sections)


def _metrics(state: CanaryState) -> Table:
    found = tuple(each.finding for each in assess(state.evidence, state.policy))
    comparison = Comparison("others", state.variant, "live traffic", "", found, (), True, ())
    rows = tuple(
        (row.metric, row.a, row.b, row.change, row.interval, Cell(row.verdict, row.verdict), row.why)
        for row in table_rows(comparison)
    )
    return Table(("", "others", state.variant, "change", "interval at any time", "verdict", ""), rows)


def _steps(state: CanaryState) -> Table:
    rows = tuple(
        (
            timestamp(step.at_s),
            step.action.replace("_", " "),
            percent_text(step.was),
            percent_text(step.share),
            step.why,
        )
        for step in state.steps
    )
    return Table(("time", "act", "share before", "share after", "reason"), rows)
