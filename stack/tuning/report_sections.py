"""Sections of a report, gathered from a bench and its comparisons. report.py writes them as HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
import yaml

from exporters.events.log import TuningEvent
from exporters.statistics import median_or_none
from stack.bench.result import Bench
from stack.tuning.comparison import SHARE, Comparison, metric_of, table_rows, verdict_counts
from stack.tuning.derived import (
    ABSENT,
    Material,
    RunGroup,
    by_reason,
    costs,
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
from stack.tuning.load_limit import curve_blocks
from stack.tuning.report_blocks import Block, Cell, Code, Listed, Pictures, ReportSection, Row, Table, Text

FOLDED_LINES = 150  # of a resolved workload; a replayed log may have very many
MOST_OPEN = 3  # comparisons; of more, the one table at a glance says which to open
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
        "within the SLO",
        "p95 of each limited latency at most its limit, at most 5 % of the requests failed, and all lower loads too",
    ),
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


def sections(material: Material, lab: Sequence[LabRow] = ()) -> list[ReportSection]:
    """All that there is to say; what has nothing to say is left out."""
    made = [
        ReportSection("Verdict", tuple(_verdicts(material)), shown=True),
        ReportSection("Lab", _lab(lab), shown=True),
        ReportSection("Latency against throughput", tuple(curve_blocks(material.bench)), shown=True),
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
    """The lines under the title."""
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
            f"Prompt and answer lengths were scaled by {plain(material.bench.scale)}, so figures are not those of the"
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
    titles = list(
        dict.fromkeys(found.metric.title for one in comparisons for found in one.findings if found.has_verdict)
    )
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
            folded=(f"{len(shown)} more figures of {one.b} against {one.a}, {one.workload}, {one.point}: no verdict"),
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
    """From where to where, in brackets; nothing where that is one place."""
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
    """Its time; of a region the end as well."""
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
            rows.append(
                (variant.name, name, written(median_or_none(seconds), "s"), ", ".join(plain(s) for s in seconds))
            )
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
    """Checks that found something stand open, the others are folded; then what was remarked, and by which runs."""
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
    facts = [
        ("what", [variant.what or ABSENT for variant in bench.variants]),
        ("address", [variant.engine.url for variant in bench.variants]),
        ("model", [variant.engine.model for variant in bench.variants]),
        ("engine version", [variant.engine.version or ABSENT for variant in bench.variants]),
        ("context", [written(variant.engine.max_model_len, "tokens") for variant in bench.variants]),
        (
            "started",
            [
                ABSENT if variant.engine.started_s is None else _clock(variant.engine.started_s)
                for variant in bench.variants
            ],
        ),
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
