"""Reports of a bench: one HTML file that needs no network, Markdown for a pull request, CSV and JSON.

Invariant: every format says the same, because all are printed from the same sections; foreign text is always
escaped."""

from __future__ import annotations

import csv
import html
import importlib.resources
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from exporters.events.log import TuningEvent
from exporters.requests.record import BadLine
from exporters.statistics import median_or_none
from exporters.text import markdown_table, write_atomically
from stack.bench import result
from stack.bench.result import Bench, Run
from stack.board import pages
from stack.tuning import charts
from stack.tuning.comparison import SHARE, Comparison, metric_of, table_rows, verdict_counts
from stack.tuning.derived import (
    ABSENT,
    Material,
    RunGroup,
    by_reason,
    costs,
    finite,
    groups,
    hits,
    plain,
    rank,
    refused,
    settings,
    stability,
    starts,
    written,
)
from stack.tuning.lab_rows import LabRow, too_many

FOLDED_LINES = 150  # of a resolved workload; a replayed log may have very many
MOST_OPEN = 3  # comparisons; of more, the one table at a glance says which to open
COMMENT_CHARACTERS = 60_000  # a comment on a pull request may have 65,536
_SIGN = {
    "better": "▲",
    "worse": "▼",
    "equivalent": "=",
    "inconclusive": "?",
    "pass": "✓",
    "fail": "✗",
    "not measured": "~",
}

DEFINITIONS = (
    ("TTFT", "from sending a request to its first token with content"),
    ("TPOT", "(end to end - TTFT) / (output tokens - 1), of each request that has two output tokens or more"),
    ("p50, p95, p99", "over the answered requests of one run, linear between the two nearest"),
    ("goodput", "answers per second that met every limit of the slo"),
    (
        "cache hits",
        "by the engine's own count: prompt tokens found in its prefix cache over those looked up, in this run alone",
    ),
    ("queue time", "by the engine's own count: waiting per request, in this run alone"),
    (
        "memory peak",
        (
            "weights + profiled peak + most of the KV cache in use x its size; what the driver shows is reserved, and"
            " stands apart"
        ),
    ),
)
STATISTICS = (
    "The unit is the run, not the request: a figure's logarithm (of shares and counts the plain figure) is fitted by"
    " least squares on the variant and, where runs were interleaved, on a smooth drift over their order, which is so"
    " taken out; the order of the variants is drawn at random in each round, so that no periodic disturbance can follow"
    " it; the effect has Student's 95 % interval. Better or worse needs p below 5 % after Holm's correction over the"
    " compared metrics, equivalent an interval inside what does not matter (5 % unless said), and either at least 6"
    " runs of each variant; everything else is inconclusive."
)


# --- content of all formats


@dataclass(frozen=True, slots=True)
class Cell:
    """Table cell. mark: style: a verdict, pass, fail, differs, or none."""

    text: str
    mark: str = ""


Row = tuple[Cell | str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Table of a report. caption: a sentence above it. folded: title where it is closed at first."""

    head: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    text: str
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Placeholder for charts of the page: `groups` or `time`."""

    what: str


Block = Table | Text | Listed | Code | Pictures


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Section of a report. shown: open in Markdown also."""

    title: str
    blocks: tuple[Block, ...]
    shown: bool = False


def sections(material: Material, lab: Sequence[LabRow] = ()) -> list[ReportSection]:
    """Return all sections that have content."""
    made = [
        ReportSection("Verdict", tuple(_verdicts(material)), shown=True),
        ReportSection("Lab", _lab(lab), shown=True),
        ReportSection("Pictures", (Pictures("groups"),) if material.bench.runs else ()),
        ReportSection("Over time", (Pictures("time"), *_events(material.happened)) if material.bench.runs else ()),
        ReportSection(
            "Figures of each variant",
            tuple(_figures(material.bench, folded=bool(material.comparisons))),
            shown=not material.comparisons,
        ),
        ReportSection("Cache hits against expectation", _hits(material.bench), shown=True),
        ReportSection("GPU hours against an API", tuple(_costs(material)), shown=True),
        ReportSection("Starts", _starts(material.bench)),
        ReportSection("Stability", _stability(material.bench)),
        ReportSection("Checks and caveats", tuple(_caveats(material)), shown=True),
        ReportSection("Variants", tuple(_variants(material.bench))),
        ReportSection("Workload", tuple(_workloads(material.bench))),
        ReportSection("Method", _method(material.bench)),
        ReportSection("Runs", _runs(material.bench)),
    ]
    return [section for section in made if section.blocks]


def summary(bench: Bench) -> list[str]:
    """Return the lines below the title."""
    took = f"{_clock(bench.started_s)} to {_clock(bench.ended_s)} UTC"
    runs = f"{len(bench.runs)} runs of {len(bench.variants)} {'variant' if len(bench.variants) == 1 else 'variants'}"
    order = {
        "single": "one after the other",
        "interleaved": "interleaved",
        "sequential": "one variant after the other",
    }[bench.order]
    ended, failed = stability(bench.runs)
    return [
        f"{took} · {runs}, {order} · {ended:,} requests, {failed.total():,} failed",
        " · ".join(
            part for part in (f"bench {bench.id}", bench.tool, bench.hardware and f"on {bench.hardware}") if part
        ),
    ]


def _verdicts(material: Material) -> Iterable[Block]:
    if material.bench.cut:
        yield Text(f"The bench broke off: {material.bench.cut}. What was measured until then is kept.", "worse")
    if material.bench.scale != 1:
        yield Text(
            f"Lengths were scaled by {plain(material.bench.scale)} to fit the engine, so figures are not those of the"
            " workload as it is written.",
            "warn",
        )
    if not material.comparisons:
        why = "there is one variant" if len(material.bench.variants) == 1 else "the variants were not compared"
        yield Text(f"No verdict: {why}. The figures stand below.")
    if len(material.comparisons) > 1:
        yield _at_a_glance(material.comparisons)
    for one in material.comparisons:
        yield from _verdict(one, folded=len(material.comparisons) > MOST_OPEN)


def _at_a_glance(comparisons: Sequence[Comparison]) -> Table:
    """Return a table with a row for each comparison and a column for each metric with a verdict."""
    with_verdict = (found for one in comparisons for found in one.findings if found.has_verdict)
    titles = list(dict.fromkeys(found.metric.title for found in with_verdict))
    rows = []
    for one in comparisons:
        changes = {
            found.metric.title: Cell(f"{_SIGN[found.verdict]} {row.change}", found.verdict)
            for found, row in zip(one.findings, table_rows(one), strict=True)
            if found.effect is not None
        }
        rows.append(
            (f"{one.b} against {one.a}", one.workload, one.point, *(changes.get(title, ABSENT) for title in titles))
        )
    signs = ", ".join(f"{_SIGN[verdict]} {verdict}" for verdict in ("better", "worse", "equivalent", "inconclusive"))
    return Table(("comparison", "workload", "load", *titles), tuple(rows), f"All at a glance: {signs}.")


def _verdict(one: Comparison, folded: bool) -> Iterable[Table]:
    """Yield the metrics with a verdict, and folded below them the others."""
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdict_counts(one).items() if count)
    caption = f"{one.b} against {one.a}: {one.workload}, {one.point}. {counted or 'Nothing was compared'}."
    if not one.controlled:
        caption += " Not controlled: the figures are at most consistent with these verdicts."
    head = ("metric", one.a, one.b, "change (95 % interval)")
    compared: list[Row] = []
    shown: list[tuple[str, ...]] = []
    for found, row in zip(one.findings, table_rows(one), strict=True):
        change = f"{row.change} ({row.interval})" if row.interval else row.change or ABSENT
        measured = (row.metric, row.a or ABSENT, row.b or ABSENT, change)
        if found.has_verdict:
            compared.append((*measured, Cell(f"{_SIGN[found.verdict]} {row.verdict}", found.verdict), row.why))
        else:
            shown.append(measured)
    if folded:
        compared += [(*measured, "no verdict", ABSENT) for measured in shown]
    yield Table((*head, "verdict", "why"), tuple(compared), "" if folded else caption, caption if folded else "")
    if shown and not folded:
        yield Table(
            head,
            tuple(shown),
            folded=f"{len(shown)} more figures of {one.b} against {one.a}, {one.workload}, {one.point}: no verdict",
        )


def _lab(rows: Sequence[LabRow]) -> tuple[Block, ...]:
    if not rows:
        return ()
    cells = tuple(
        (row.item, row.criterion, Cell(f"{_SIGN[row.state]} {row.state}", row.state), row.evidence) for row in rows
    )
    return (Table(("item", "passes when", "state", "evidence"), cells),)


def _figures(bench: Bench, folded: bool) -> Iterable[Table]:
    """Yield a table for each workload and load: median and range over the runs of each variant."""
    for group in groups(bench):
        names = sorted({figure for run in group.runs for figure in run.figures}, key=rank)
        rows = [
            (metric_of(name).title, *(_over_runs(group, variant.name, name) for variant in bench.variants))
            for name in names
        ]
        counts = [_counted(group, variant.name) for variant in bench.variants]
        if not names:
            rows = [("nothing was measured", *(ABSENT for _ in bench.variants))]
        head = ("median over the runs (least to most)", *(variant.name for variant in bench.variants))
        yield Table(
            head, (("runs", *counts), *rows), "" if folded else f"{group.title}.", group.title if folded else ""
        )


def _over_runs(group: RunGroup, variant: str, figure: str) -> str:
    values, unit = group.values(variant, figure), metric_of(figure).unit
    if not values:
        return ABSENT
    return written(median_or_none(values), unit) + _range(min(values), max(values), unit)


def _range(low: float | None, high: float | None, unit: str) -> str:
    """Return the range in brackets; nothing where both ends are the same."""
    if low is None or high is None or low == high:
        return ""
    return f" ({plain(low * 100 if unit == SHARE else low)} to {written(high, unit)})"


def _counted(group: RunGroup, variant: str) -> Cell | str:
    mine = [run for run in group.runs if run.variant == variant]
    cut = sum(run.cut is not None for run in mine)
    if not cut:
        return f"{len(mine)}"
    return Cell(f"{len(mine)}, {cut} of them cut" + (" and left out" if cut < len(mine) else ""), "warn")


def _events(events: Sequence[TuningEvent]) -> tuple[Table, ...]:
    if not events:
        return ()
    rows = tuple(
        (f"E{number}", _when(event), event.kind, event.what, _changed(event), event.who or ABSENT)
        for number, event in enumerate(events, 1)
    )
    return (Table(("event", "at (UTC)", "kind", "what", "changed", "who"), rows),)


def _when(event: TuningEvent) -> str:
    """Return the time of an event, with the end of a region."""
    ends = "" if event.end_s is None else f" to {_clock(event.end_s)}"
    return _clock(event.at_s) + (" until now" if event.open else ends)


def _changed(event: TuningEvent) -> str:
    """Return each changed option with its value before and after."""
    each = ((name, *("not set" if value is None else value for value in values)) for name, values in event.diff.items())
    return ", ".join(f"{name}: {old} → {new}" for name, old, new in each) or ABSENT


def _hits(bench: Bench) -> tuple[Table, ...]:
    rows = []
    for hit in hits(bench):
        low, high = hit.expected
        measured = written(hit.measured, SHARE) + _range(hit.low, hit.high, SHARE)
        mark = {"within the band": "better", "below the band": "warn", "above the band": "warn"}.get(hit.reading, "")
        rows.append(
            (
                hit.workload,
                hit.point,
                hit.variant,
                measured,
                f"{plain(low * 100)} to {plain(high * 100)} %",
                Cell(hit.reading, mark),
                hit.scenario or ABSENT,
            )
        )
    return (
        (Table(("workload", "load", "variant", "measured hit ratio", "expected", "reading", "as in"), tuple(rows)),)
        if rows
        else ()
    )


def _costs(material: Material) -> Iterable[Block]:
    found, prices = costs(material), material.prices
    if not found or prices is None or not material.gpus:
        return
    money = prices.currency
    rows = []
    for cost in found:
        times = ABSENT if cost.times is None else f"{plain(cost.times)} x"
        rows.append((
            cost.workload, cost.point, cost.variant, written(cost.tokens_per_second, "tokens/s"),
            *(written(price, money) for price in (cost.own, cost.api_output, cost.api_whole)), times,
            written(cost.even_at, "tokens/s"),
        ))  # fmt: skip
    head = (
        "workload",
        "load",
        "variant",
        "output",
        "own, 1K output tokens",
        "API, output alone",
        "API, prompts included",
        "own / API",
        "even at",
    )
    yield Table(head, tuple(rows))
    each = prices.per_hour(material.gpu_name)
    yield Text(
        f"Own: {plain(material.gpus)} x {material.gpu_name or 'GPU'} at {plain(each)} {money} an hour each, never idle"
        " at the measured output. Prompts included: the same prompts bought with the same output, with the cached"
        " tokens counted here; the last columns compare with that."
    )


def _starts(bench: Bench) -> tuple[Table, ...]:
    rows = []
    for variant in bench.variants:
        for kind, seconds in starts(variant).items():
            name = {"cold": "cold start", "warm": "warm restart"}[kind]
            median = written(median_or_none(seconds), "s")
            rows.append((variant.name, name, median, ", ".join(plain(s) for s in seconds)))
    return (Table(("variant", "kind", "median until it answered", "each, in seconds"), tuple(rows)),) if rows else ()


def _stability(bench: Bench) -> tuple[Block, ...]:
    if not bench.runs:
        return ()
    rows = []
    for variant in bench.variants:
        mine = [run for run in bench.runs if run.variant == variant.name]
        ended, failed = stability(mine)
        rejected = {
            reason: sum(run.failed.get(reason, 0) for run in mine)
            for run in mine
            for reason in run.failed
            if refused(reason)
        }
        share = written(failed.total() / ended if ended else None, SHARE)
        rows.append(
            (
                variant.name,
                f"{sum(run.asked for run in mine):,}",
                f"{sum(run.ok for run in mine):,}",
                Cell(
                    f"{failed.total():,} of {ended:,} ({share})",
                    "worse" if too_many(failed.total(), ended) else "warn" if failed else "",
                ),
                by_reason(failed) or ABSENT,
                by_reason(rejected) or ABSENT,
            )
        )
    return (
        Table(("variant", "asked", "answered", "failed", "by reason", "refused, which is no failure"), tuple(rows)),
    )


def _caveats(material: Material) -> Iterable[Block]:
    """Yield failed checks, the others folded, then the caveats with their runs."""
    found: dict[bool, list[Row]] = {False: [], True: []}
    for one in material.comparisons:
        where = f"{one.b} against {one.a}, {one.workload}, {one.point}"
        for check in one.checks:
            state = Cell("✓ fine", "better") if check.ok else Cell("! look", "warn")
            found[check.ok].append((where, check.name, state, check.what))
    head = ("comparison", "check", "state", "what was seen")
    if found[False]:
        yield Table(head, tuple(found[False]))
    if found[True]:
        yield Table(
            head, tuple(found[True]), folded=f"{len(found[True])} checks found nothing that spoils a comparison"
        )
    by_run: dict[str, list[str]] = {}
    for run in material.bench.runs:
        for said in (*run.caveats, *((f"cut: {run.cut}",) if run.cut else ())):
            by_run.setdefault(said, []).append(f"{run.number}")
    others = dict.fromkeys(
        said for said in (*material.bench.caveats, *(said for one in material.comparisons for said in one.caveats))
    )
    remarks = [
        *(said for said in others if said not in by_run),
        *(f"{said} (run {', '.join(runs)})" for said, runs in by_run.items()),
    ]
    if remarks:
        yield Listed(tuple(remarks))


def _variants(bench: Bench) -> Iterable[Block]:
    names = tuple(variant.name for variant in bench.variants)
    if not names:
        return
    started = [variant.engine.started_s for variant in bench.variants]
    facts = [
        ("what", [variant.what or ABSENT for variant in bench.variants]),
        ("address", [variant.engine.url for variant in bench.variants]),
        ("model", [variant.engine.model for variant in bench.variants]),
        ("engine version", [variant.engine.version or ABSENT for variant in bench.variants]),
        ("context", [written(variant.engine.max_model_len, "tokens") for variant in bench.variants]),
        ("started", [ABSENT if at_s is None else _clock(at_s) for at_s in started]),
    ]
    differ = ("what", "address", "started")  # these may, and it means nothing
    rows: list[Row] = []
    for name, values in facts:
        mark = "differs" if name not in differ and len(set(values)) > 1 else ""
        rows.append((name, *(Cell(value, mark) for value in values)))
    yield Table(("", *names), (*rows, ("hardware", *(bench.hardware or ABSENT for _ in names))))
    listed = settings(bench.variants)
    different: tuple[Row, ...] = tuple(
        (name, *(Cell(value, "differs") for value in values)) for name, values, differs in listed if differs
    )
    alike: tuple[Row, ...] = tuple((name, *values) for name, values, differs in listed if not differs)
    if different:
        yield Table(
            ("differs", *names),
            different,
            "What differs between the variants, in options and cache configuration as the engine says them.",
        )
    elif len(names) > 1:
        found = (
            "Options and cache configuration show no difference between the variants."
            if alike
            else "The engines reported no settings."
        )
        yield Text(found, "warn")
    if alike:
        title = "the same in all variants" if len(names) > 1 else "options and cache configuration"
        yield Table((title, *names), alike, folded=f"{len(alike)} settings: {title}")


def _workloads(bench: Bench) -> Iterable[Block]:
    facts = [f"order of the runs: {bench.order}", f"hash {bench.workload_hash}"]
    facts += [f"scaled by {plain(bench.scale)}"] if bench.scale != 1 else []
    facts += (
        ["slo: " + ", ".join(f"{name} at most {plain(value)}" for name, value in bench.slo.items())]
        if bench.slo
        else []
    )
    yield Text("; ".join(facts) + ".")
    for workload in bench.workloads:
        lines = yaml.safe_dump(
            msgspec.to_builtins(workload), sort_keys=False, allow_unicode=True, width=150
        ).splitlines()
        more = (
            [f"# and {len(lines) - FOLDED_LINES:,} more lines; they are in the JSON"]
            if len(lines) > FOLDED_LINES
            else []
        )
        yield Code("\n".join([*lines[:FOLDED_LINES], *more]), f"{workload.get('name', 'workload')} as it was run")


def _method(bench: Bench) -> tuple[Block, ...]:
    rows = tuple((name, what) for name, what in DEFINITIONS)
    return (
        Table(("name", "what it is here"), rows),
        Text(STATISTICS),
        Text(f"Measured with {bench.tool}, from the client's side."),
    )


def _runs(bench: Bench) -> tuple[Block, ...]:
    rows = []
    for run in bench.runs:
        lost = Cell(f"cut: {run.cut}", "warn") if run.cut else by_reason(run.failed) or ABSENT
        took, answered = written(run.ended_s - run.started_s, "s"), f"{run.ok:,} of {run.asked:,}"
        rows.append(
            (
                str(run.number),
                run.variant,
                run.workload,
                run.point,
                _clock(run.started_s),
                took,
                str(run.seed),
                answered,
                lost,
            )
        )
    head = ("run", "variant", "workload", "load", "began (UTC)", "took", "seed", "answered", "failed or cut")
    return (Table(head, tuple(rows), folded=f"{len(rows)} runs in their order"),) if rows else ()


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


# --- the page


def page(material: Material, lab: Sequence[LabRow] = ()) -> str:
    """Return one HTML file with its scripts and data inside; it loads nothing."""
    bench, parts = material.bench, sections(material, lab)
    links = "".join(f'<a href="#{_slug(section.title)}">{_e(section.title)}</a>' for section in parts)
    head = "".join(f"<p>{_e(line)}</p>" for line in summary(bench))
    body = "".join(
        f'<section id="{_slug(one.title)}"><h2>{_e(one.title)}</h2>{"".join(map(_block, one.blocks))}</section>'
        for one in parts
    )
    scripts = [pages.static("plotly.min.js").decode(), _static("report.js")]
    style = pages.static(pages.STYLE).decode() + _static("report.css")
    header = f"<header><h1>{_e(bench.title or bench.id)}</h1>{head}<nav>{links}</nav></header>"
    whole = f'<main class="report">{header}{body}</main>\n'
    return pages.standing_alone(bench.title or bench.id, style, scripts, charts.drawn(material), whole)


def _static(name: str) -> str:
    return importlib.resources.files("stack.tuning").joinpath("static", name).read_text(encoding="utf-8")


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _e(text: str) -> str:
    return html.escape(text)


def _block(block: Block) -> str:
    match block:
        case Table():
            return _html_table(block)
        case Text():
            return f'<p class="said {_mark(block.mark)}">{_e(block.text)}</p>'
        case Listed():
            return f"<ul>{''.join(f'<li>{_e(item)}</li>' for item in block.items)}</ul>"
        case Code():
            code = f"<pre>{_e(block.text)}</pre>"
            return f"<details><summary>{_e(block.folded)}</summary>{code}</details>" if block.folded else code
        case Pictures():
            return (
                f'<div class="pictures" data-what="{_e(block.what)}"><noscript>The pictures are drawn with'
                " JavaScript.</noscript></div>"
            )


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_e(name)}</th>' for name in table.head)
    rows = "".join(f"<tr>{''.join(_html_cell(cell) for cell in row)}</tr>" for row in table.rows)
    whole = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    caption = f"<h3>{_e(table.caption)}</h3>" if table.caption else ""
    return f"<details><summary>{_e(table.folded)}</summary>{whole}</details>" if table.folded else caption + whole


def _html_cell(cell: Cell | str) -> str:
    if isinstance(cell, Cell) and cell.mark:
        return f'<td><span class="mark {_mark(cell.mark)}">{_e(cell.text)}</span></td>'
    return f"<td>{_e(_text(cell))}</td>"


def _text(cell: Cell | str) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _mark(mark: str) -> str:
    return mark.replace(" ", "-")


# --- Markdown


def markdown(material: Material, lab: Sequence[LabRow] = ()) -> str:
    """Return the report as Markdown, short enough for a comment on a pull request: long parts are folded, the last ones
    left out where it would be too long."""
    bench = material.bench
    text = f"## {_md(bench.title or bench.id)}\n\n" + "\n\n".join(_md(line) for line in summary(bench)) + "\n"
    left_out = []
    for section in sections(material, lab):
        blocks = [made for block in section.blocks if (made := _md_block(block))]
        if not blocks:
            continue
        inside = "\n\n".join(blocks)
        made = (
            f"\n### {_md(section.title)}\n\n{inside}\n" if section.shown else f"\n{_md_folded(section.title, inside)}\n"
        )
        if len(text) + len(made) > COMMENT_CHARACTERS:
            left_out.append(section.title)
        else:
            text += made
    return text + (
        f"\nLeft out, because a comment has an end: {', '.join(left_out)}. The page has all.\n" if left_out else ""
    )


def _md_folded(title: str, inside: str) -> str:
    """Return a part that is closed at first. Its title is HTML, where Markdown's escapes have no effect."""
    return f"<details><summary>{_e(' '.join(title.split())).replace('@', _AT)}</summary>\n\n{inside}\n\n</details>"


_AT = "@\u200b"  # so that a name in a table notifies nobody
_SPECIAL = re.compile(r"([\\`*_\[\]<>~#$!&@])")


def _md(text: str) -> str:
    """Escape text for Markdown, on one line. A bar is special in tables only, which escape it."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("\\@", _AT)


def _md_block(block: Block) -> str:
    match block:
        case Table():
            lines = markdown_table(
                [_md(name) or " " for name in block.head], [[_md_cell(cell) for cell in row] for row in block.rows]
            )
            caption = f"**{_md(block.caption)}**\n\n" if block.caption else ""
            table = caption + "\n".join(lines)
            return _md_folded(block.folded, table) if block.folded else table
        case Text():
            return _md(block.text)
        case Listed():
            return "\n".join(f"- {_md(item)}" for item in block.items)
        case Code():
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", block.text)), 3)
            return _md_folded(block.folded, f"{fence}yaml\n{block.text}\n{fence}")
        case Pictures():
            return ""


def _md_cell(cell: Cell | str) -> str:
    text = _md(_text(cell))
    return f"**{text}**" if isinstance(cell, Cell) and cell.mark and text else text


# --- CSV and JSON

COLUMNS = (
    "bench",
    "run",
    result.STORED["variant"],
    "workload",
    "point",
    "started",
    "ended",
    "seed",
    "asked",
    "ok",
    "failed",
    "cut",
    "figure",
    "value",
    "unit",
)


def as_csv(bench: Bench) -> str:
    """Return CSV with a row for each run and metric, unrounded; a run without metrics has one row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in bench.runs:
        fixed: tuple[object, ...] = (
            bench.id,
            run.number,
            run.variant,
            run.workload,
            run.point,
            _stamp(run.started_s),
            _stamp(run.ended_s),
            run.seed,
        )
        fixed += (run.asked, run.ok, sum(run.failed.values()), run.cut or "")
        figures: Iterable[tuple[object, ...]] = (
            (name, run.figures[name], _unit(name)) for name in sorted(run.figures, key=rank)
        )
        for figure in figures if run.figures else (("", "", ""),):
            writer.writerow((*fixed, *figure))
    return text.getvalue()


def _unit(figure: str) -> str:
    unit = metric_of(figure).unit
    return "ratio" if unit == SHARE else unit


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_json(material: Material, lab: Sequence[LabRow] = ()) -> str:
    """Return the bench, its comparisons and the derived values."""
    content = {
        "bench": material.bench,
        "judgements": material.comparisons,
        "events": material.happened,
        "lab": lab,
        "derived": {
            "figures": [_derived(group, material.bench) for group in groups(material.bench)],
            "hits": [msgspec.to_builtins(hit) | {"reading": hit.reading} for hit in hits(material.bench)],
            "costs": [
                msgspec.to_builtins(cost) | {"times": cost.times, "even_at": cost.even_at} for cost in costs(material)
            ],
            "currency": material.prices.currency if material.prices else None,
            "starts": {variant.name: starts(variant) for variant in material.bench.variants},
            "stability": {
                variant.name: _counts(run for run in material.bench.runs if run.variant == variant.name)
                for variant in material.bench.variants
            },
            "differences": {name: values for name, values, differs in settings(material.bench.variants) if differs},
        },
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"


def _derived(group: RunGroup, bench: Bench) -> Mapping[str, Any]:
    names = sorted(
        {figure for run in group.runs for figure, value in run.figures.items() if finite(value) is not None}, key=rank
    )
    medians = {
        variant.name: {name: median_or_none(group.values(variant.name, name)) for name in names}
        for variant in bench.variants
    }
    return {"workload": group.workload, "point": group.point, "medians": medians}


def _counts(runs: Iterable[Run]) -> Mapping[str, Any]:
    ended, failed = stability(runs)
    return {"ended": ended, "failed": failed}


# --- at the edge


def gather(folder: Path, **given: Any) -> Material:
    """Read the material of a bench folder. given: the rest of Material. Raises BadBench."""
    bench = result.read(folder)
    place = folder if folder.is_dir() else folder.parent
    try:
        records = list(result.requests(place))
    except FileNotFoundError:
        records = []
    except (OSError, BadLine) as error:
        raise result.BadBench(f"{place / result.REQUESTS} cannot be read: {error}") from error
    return Material(bench=bench, records=records, **given)


def write(material: Material, out: Path, lab: Sequence[LabRow] = ()) -> list[Path]:
    """Write the page to `out`, and beside it .md, .csv and .json of the same name, each atomically. Raises OSError."""
    forms = {
        ".html": page(material, lab),
        ".md": markdown(material, lab),
        ".csv": as_csv(material.bench),
        ".json": as_json(material, lab),
    }
    stem = out.name.removesuffix(".html")
    paths = [out.with_name(stem + suffix) for suffix in forms]
    for path, text in zip(paths, forms.values(), strict=True):
        write_atomically(path, text)
    return paths
