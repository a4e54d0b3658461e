"""Comparison of live traffic: before and after an event, or two variants that were served at the same time.

Invariant: nobody interleaved live traffic, so the most it can say is `consistent with`; only variants that got the
same traffic at the same time are controlled.

Method. A stratum's level in ten minutes is the mean of its minutes' means (of logarithms for ratios, where an outlier
weighs little; not medians: that of few requests is another than that of many, and a canary of a tenth of the traffic
was called a change of the queue in 6 of 15 trials without one). The unit is the block of ten minutes. Around an event a
block is taken relative to the same hours of up to four weeks (or days) before, and the effect is how much further from
them it is after the event than right before it: a day that is slow as a whole is no effect. Where the log is too short
for that, a straight line through the hours on both sides stands in for the course of the day. Of two variants it is
b - a in the same block.

Neighbouring blocks are alike, and a bootstrap that draws them as if they were not is wrong: where minutes correlate at
0.8 it calls 13 % of unchanged traffic a change, at 0.9 22 %. So the standard error is widened by the correlation of
neighbours (first order, corrected for its bias), and interval and p come from a studentised block bootstrap
(`exporters.statistics`). `simulate` in tests/stack/tuning/test_live_compare.py measures how often this is wrong."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from exporters.requests.record import RequestRecord, timestamp
from exporters.statistics import SeriesDesign, SeriesEstimate, bootstrap, mean_series, step_series
from stack.tuning import live_checks
from stack.tuning.comparison import (
    ALPHA,
    MARGIN,
    NO_VERDICT,
    SHARE,
    BadComparison,
    ComparedMetric,
    Comparison,
    Finding,
    corrected,
    margin_text,
    unreadable_answers,
    verdict_of,
)
from stack.tuning.samples import RequestSample, SampleLog, Span, collect_samples
from stack.tuning.series import (
    BLOCK_S,
    LEAST_REQUESTS,
    LIVE_METRICS,
    MINUTE_S,
    BlockPosition,
    LiveMetric,
    Placed,
    SamplesByBlock,
    SeriesByBlock,
    mean_log,
    prompt_tokens,
    series_by_block,
)

HOUR_S, DAY_S, WEEK_S = 3600.0, 86_400.0, 604_800.0
WINDOW_S = 4 * HOUR_S  # on each side of an event
SETTLE_S = 60.0  # on each side of an event: caches fill, connections move
# On each side: with 12 the noise's own correlation is known too badly, and 7 % of unchanged traffic is called a change.
LEAST_BLOCKS = 18
MOST_STRAIGHT_S = 4 * HOUR_S  # without the same hours before: a day's course is no straight line for longer
BASELINES = 4  # weeks, or days
RESAMPLES = 1000
LIVE = "live traffic"
TOO_LITTLE = "too little traffic to say"


def spans_around(event_at_s: float, window_s: float = WINDOW_S, settle_s: float = SETTLE_S) -> tuple[Span, ...]:
    """Return the times of which `around_event` can use records: the event's, and the same hour of days and weeks
    before."""
    reach = window_s + settle_s
    centres = (event_at_s - shift for shift in (0.0, *_shifts(WEEK_S, reach), *_shifts(DAY_S, reach)))
    return tuple((centre - reach, centre + reach + HOUR_S) for centre in centres)  # by end, and requests last


def _shifts(period_s: float, reach_s: float) -> list[float]:
    """Return how much earlier the baselines are: whole periods, so that none overlaps the hours around the event."""
    first = math.ceil(2 * reach_s / period_s)
    return [period_s * (first + k) for k in range(BASELINES)]


# sides of a position
TODAY_BEFORE, TODAY_AFTER, USUAL_BEFORE, USUAL_AFTER = (
    (usual, late) for usual in (False, True) for late in (False, True)
)


# ---- around an event ------------------------------------------------------------------------------------------------


def around_event(
    records: SampleLog | Iterable[RequestRecord],
    event_at_s: float,
    window_s: float = WINDOW_S,
    *,
    settle_s: float = SETTLE_S,
    other_events_s: Sequence[float] = (),
    metrics: Sequence[LiveMetric] = LIVE_METRICS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare the traffic after an event with that before it.

    other_events_s: what else happened, which would be taken for the effect. Raises BadComparison."""
    spans = spans_around(event_at_s, window_s, settle_s)
    log = records if isinstance(records, SampleLog) else collect_samples(records, spans)
    _expect_both_sides(log, event_at_s)
    shifts, period = _baselines(log, event_at_s, window_s + settle_s)
    if not shifts:
        window_s = min(window_s, MOST_STRAIGHT_S)
    marks = [event_at_s - shift for shift in (0.0, *shifts)]
    blocks = round(window_s / BLOCK_S)
    placed, dropped = _around(log, marks, blocks, settle_s)
    if not {TODAY_BEFORE, TODAY_AFTER} <= placed.sides:
        sides = f"on both sides of {timestamp(event_at_s)}; it holds {_reach(log)}"
        raise BadComparison(f"the log has no whole {BLOCK_S / 60:.0f} minutes of traffic {sides}")
    load = _load_after(placed)
    checks = (
        live_checks.baseline(len(shifts), period),
        live_checks.other_events(other_events_s, event_at_s, marks, window_s + settle_s),
        *live_checks.mix(
            [sample for position, sample in placed.requests if _is_before(position, bool(shifts))],
            [sample for position, sample in placed.requests if position.side == TODAY_AFTER],
            ("before", "after"),
        ),
        live_checks.compared(placed),
        live_checks.load(load, "after the event, for what was to be expected"),
    )
    caveats = [
        "live traffic: nothing was interleaved, so whatever else changed at that time is in the difference",
        *live_checks.left_out(log),
        *(
            [f"{dropped:,} requests in flight across the event, or within {settle_s:g} s of it, are left out"]
            if dropped
            else []
        ),
    ]
    findings = _findings(placed, partial(_step_of, line=not shifts), load, metrics, resamples, seed)
    findings += _unreadable(placed, (TODAY_BEFORE, TODAY_AFTER))
    caveats += [check.what for check in checks if not check.ok]
    point = f"{timestamp(event_at_s)}, {window_s / HOUR_S:.3g} h on each side"
    return Comparison("before", "after", LIVE, point, findings, checks, False, tuple(dict.fromkeys(caveats)))


def _expect_times(log: SampleLog) -> None:
    if log.first_s > log.last_s:
        untimed = f": its {log.untimed:,} records have no ts" if log.untimed else ""
        raise BadComparison(f"the log holds no request with a time{untimed}")


def _expect_both_sides(log: SampleLog, event_at_s: float) -> None:
    _expect_times(log)
    if not log.first_s < event_at_s < log.last_s:
        raise BadComparison(
            f"the event at {timestamp(event_at_s)} has no traffic on both sides; the log holds {_reach(log)}"
        )


def _reach(log: SampleLog) -> str:
    return f"{timestamp(log.first_s)} to {timestamp(log.last_s)}"


def _baselines(log: SampleLog, event_at_s: float, reach_s: float) -> tuple[list[float], str]:
    """Return the weeks before, else days, else none, that the log holds wholly and in which there was traffic."""
    for period_s, name in ((WEEK_S, "week"), (DAY_S, "day")):
        shifts = [
            shift for shift in _shifts(period_s, reach_s) if event_at_s - shift - reach_s >= log.first_s - BLOCK_S
        ]
        busy = [0] * len(shifts)
        for sample in log.samples:
            for i, shift in enumerate(shifts):
                busy[i] += abs(sample.started_s - event_at_s + shift) <= reach_s
        if found := [shift for shift, requests in zip(shifts, busy, strict=True) if requests >= LEAST_REQUESTS]:
            return found, name
    return [], ""


def _around(log: SampleLog, marks: Sequence[float], blocks: int, settle_s: float) -> tuple[SamplesByBlock, int]:
    """Place requests by when they started, and count those too near to the event. Blocks held in part are left out."""
    placed, near = [], 0
    reach_s = settle_s + blocks * BLOCK_S
    bounds = [(mark, mark - reach_s, mark + reach_s) for mark in marks]
    for sample in log.samples:
        for series, (mark, start, end) in enumerate(bounds):
            if start < sample.started_s < end:
                after = sample.started_s - mark
                if abs(after) < settle_s or (after < 0 and sample.ended_s > mark):
                    near += series == 0
                    break
                past = abs(after) - settle_s
                block = int(past // BLOCK_S)
                edge = mark + math.copysign(settle_s + (block + 1) * BLOCK_S, after)
                if (edge + settle_s <= log.last_s) if after > 0 else (edge >= log.first_s - BLOCK_S / 10):
                    position = BlockPosition(
                        series, block if after > 0 else -1 - block, int(past // MINUTE_S), (series > 0, after > 0)
                    )
                    placed.append((position, sample))
                break
    return SamplesByBlock(placed), near


def _is_before(position: BlockPosition, same_hours: bool) -> bool:
    """Select the traffic that the one after the event is compared with: the same hours, or those right before."""
    return position.side == (USUAL_AFTER if same_hours else TODAY_BEFORE)


def _step_of(series: SeriesByBlock, line: bool) -> EffectSeries:
    relative = sorted(_relative(series).items())
    values = [value for _, value in relative]
    late = sum(block >= 0 for block, _ in relative)
    today = [series.at[0, block] for block, _ in relative]
    early = len(values) - late
    design = step_series(early, late, line) if min(early, late) >= LEAST_BLOCKS else None
    return EffectSeries(design, values, (today[:early], today[early:]))


def _relative(series: SeriesByBlock) -> dict[int, float]:
    """Return today's blocks, less the mean of the same blocks of the baselines where there are any."""
    baselines: dict[int, list[float]] = defaultdict(list)
    for (at, block), value in series.at.items():
        if at:
            baselines[block].append(value)
    today = {block: value for (at, block), value in series.at.items() if not at}
    if not baselines:
        return today
    return {block: value - fmean(baselines[block]) for block, value in today.items() if block in baselines}


def _load_after(placed: SamplesByBlock) -> float:
    """Return requests per block after the event, by those before it, and by the same of the baselines."""
    counts = Counter(position.side for position, _ in placed.requests)
    blocks = Counter(placed.side_of.values())
    rate = {side: count / blocks[side] for side, count in counts.items()}
    usual = rate[USUAL_AFTER] / rate[USUAL_BEFORE] if {USUAL_BEFORE, USUAL_AFTER} <= rate.keys() else 1.0
    return rate[TODAY_AFTER] / rate[TODAY_BEFORE] / usual


# ---- two variants ---------------------------------------------------------------------------------------------------


def between_variants(
    records: SampleLog | Iterable[RequestRecord],
    a: str,
    b: str,
    *,
    metrics: Sequence[LiveMetric] = LIVE_METRICS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare variant b with a over the blocks in which both were served. Raises BadComparison.

    Controlled where both got the same kind of traffic at the same time."""
    log = records if isinstance(records, SampleLog) else collect_samples(records)
    _expect_variants(log, a, b)
    names = {a: 0, b: 1}
    requests = [(_position(sample, names[sample.variant]), sample) for sample in log.samples if sample.variant in names]
    placed = SamplesByBlock(requests)
    variants = [[(position, sample) for position, sample in requests if position.series == series] for series in (0, 1)]
    load = _load_between(variants)
    routing = (
        live_checks.same_time(variants, (a, b)),
        live_checks.steady(variants, b),
        *live_checks.mix([sample for _, sample in variants[0]], [sample for _, sample in variants[1]], (a, b)),
        live_checks.compared(placed),
        live_checks.load(load, f"for each engine of {b}, by those of {a}"),
    )
    controlled = all(check.ok for check in routing)
    caveats = [
        *([] if controlled else [f"not controlled: {', '.join(check.name for check in routing if not check.ok)}"]),
        "whether requests were routed by lot, the log does not say: the checks only see what they sent",
        *live_checks.left_out(log),
        *(check.what for check in routing if not check.ok),
    ]
    first_s, last_s = (sample.started_s for _, sample in requests), (sample.ended_s for _, sample in requests)
    point = f"{timestamp(min(first_s))} to {timestamp(max(last_s))}"
    findings = _findings(placed, _difference_of, load or 1.0, metrics, resamples, seed) + _unreadable(placed, (0, 1))
    return Comparison(a, b, LIVE, point, findings, routing, controlled, tuple(dict.fromkeys(caveats)))


def _position(sample: RequestSample, variant: int) -> BlockPosition:
    return BlockPosition(variant, int(sample.started_s // BLOCK_S), int(sample.started_s // MINUTE_S), variant)


def _expect_variants(log: SampleLog, a: str, b: str) -> None:
    _expect_times(log)
    if a == b:
        raise BadComparison(f"{a!r} is compared with itself; name two variants")
    there = Counter(sample.variant for sample in log.samples if sample.variant is not None)
    if missing := [name for name in (a, b) if name not in there]:
        have = ", ".join(f"{name} ({count:,})" for name, count in there.most_common(10)) or "none that names a variant"
        raise BadComparison(f"no request of variant {' or '.join(missing)} is in the log; there are requests of {have}")


def _difference_of(series: SeriesByBlock) -> EffectSeries:
    both = sorted(block for at, block in series.at if not at and (1, block) in series.at)
    first, second = ([series.at[at, block] for block in both] for at in (0, 1))
    difference = [b - a for a, b in zip(first, second, strict=True)]
    return EffectSeries(mean_series(len(both)) if len(both) >= LEAST_BLOCKS else None, difference, (first, second))


def _load_between(variants: Sequence[Placed]) -> float | None:
    """Return requests for each engine of b, by those of a; None where the log does not name engines."""
    engines = [{sample.upstream for _, sample in variant} for variant in variants]
    if any(None in each for each in engines):
        return None
    if engines[0] == engines[1]:
        return 1.0
    first, second = (len(variant) / len(each) for variant, each in zip(variants, engines, strict=True))
    return second / first


# ---- findings -------------------------------------------------------------------------------------------------------


class EffectSeries(NamedTuple):
    """Series that an effect is estimated of, and the blocks of a and b as they were.

    design: None for too few blocks."""

    design: SeriesDesign | None
    values: list[float]
    levels: tuple[list[float], list[float]]


def _findings(
    placed: SamplesByBlock,
    effect_series: Callable[[SeriesByBlock], EffectSeries],
    load: float,
    metrics: Sequence[LiveMetric],
    resamples: int,
    seed: int,
) -> tuple[Finding, ...]:
    """Return the findings with their verdicts, after Holm's correction over what can get one."""
    measured = [_finding(metric, placed, effect_series, load, resamples, seed) for metric in metrics]
    findings, family = corrected([found for found, _ in measured], [metric.has_verdict for metric in metrics])
    return tuple(
        _decided(found, doubt, family) if found.p_holm is not None else found
        for found, (_, doubt) in zip(findings, measured, strict=True)
    )


def _unreadable(placed: SamplesByBlock, sides: Iterable[Hashable]) -> tuple[Finding, ...]:
    read = [[not sample.unreadable for position, sample in placed.requests if position.side == side] for side in sides]
    a, b = ((answers.count(False), len(answers)) for answers in read)
    return tuple(unreadable_answers(a, b))


def _finding(
    live: LiveMetric,
    placed: SamplesByBlock,
    effect_series: Callable[[SeriesByBlock], EffectSeries],
    load: float,
    resamples: int,
    seed: int,
) -> tuple[Finding, str | None]:
    """Return a finding without its verdict, and what else may explain it."""
    if (series := series_by_block(placed, live.of, live.stratum, live.level)) is None:
        return _nothing(live.metric, placed.says(live.of)), None
    design, values, (first, second) = effect_series(series)
    blocks = len(first), len(second)
    if design is None:
        return _nothing(live.metric, True, blocks), None
    counts, level = series.requests.values(), series.level
    least = math.sqrt(level * (1 - level) * sum(1 / count for count in counts)) if live.counted else 0.0
    found = bootstrap(design, values, resamples, seed, ALPHA, least)
    levels = tuple(level + value for value in first), tuple(level + value for value in second)
    longer = 0.0
    if live.work is not None and (lengths := series_by_block(placed, live.work, live.stratum, mean_log)) is not None:
        design, values, _ = effect_series(lengths)
        longer = design.fit(values).effect if design else 0.0
    return _measured(live, found, levels, blocks, min(counts)), _explained(live, found, load, longer)


def _nothing(metric: ComparedMetric, measured: bool, blocks: tuple[int, int] = (0, 0)) -> Finding:
    few = f"{TOO_LITTLE}: {min(blocks)} of {LEAST_BLOCKS} blocks of {BLOCK_S / 60:.0f} minutes that can be compared"
    return Finding(metric, why=few, runs=blocks) if measured else Finding(metric)


def _measured(
    live: LiveMetric,
    found: SeriesEstimate,
    values: tuple[tuple[float, ...], tuple[float, ...]],
    blocks: tuple[int, int],
    requests: int,
) -> Finding:
    """Return a finding in which b is what was seen, and a what would have been without the effect."""
    metric = live.metric
    reach = max(found.reach, 3 / requests) if live.counted else found.reach  # nothing in n requests: up to 3 in n, 95 %
    b = fmean(values[1])
    a, effect, low, high = b - found.effect, found.effect, found.effect - reach, found.effect + reach
    if metric.scale == "ratio":
        a, b, effect, low, high = map(math.exp, (a, b, effect, low, high))
        values = tuple(map(math.exp, values[0])), tuple(map(math.exp, values[1]))
    else:
        a = max(0.0, a)
        metric = replace(metric, margin=MARGIN * a) if metric.unit == "ms" else metric
    return Finding(metric, a, b, effect, low, high, found.p, why=NO_VERDICT, runs=blocks, values=values)


def _explained(live: LiveMetric, found: SeriesEstimate, load: float, longer: float) -> str | None:
    """Return what other than the change may have made the whole of an effect, or hidden one, as a sentence.

    longer: logarithm, within strata."""
    near = max(0.0, abs(found.effect) - found.reach)
    if (
        near
        and live.metric.unit == "ms"
        and (load > live_checks.MOST_LOAD if found.effect > 0 else load < 1 / live_checks.MOST_LOAD)
    ):
        return f"there were {load:.2g} times as many requests, which alone can do this"
    if abs(longer) > math.log1p(MARGIN) or (near and longer * found.effect > 0 and abs(longer) >= near):
        what = "prompts" if live.work is prompt_tokens else "prompts and answers"
        size = f"{abs(math.expm1(longer)) * 100:.2g} % {'longer' if longer > 0 else 'shorter'}"
        return f"{what} that were compared as alike became {size}, which may be all of it"
    return None


def _decided(found: Finding, doubt: str | None, family: int) -> Finding:
    metric, effect, low, high = found.metric, found.effect or 0.0, found.low or 0.0, found.high or 0.0
    interval = f"{_amount(metric, low)} to {_amount(metric, high)}"
    if doubt is not None:
        return replace(found, why=f"not clear: {interval}, but {doubt}")
    verdict = verdict_of(found)
    if verdict == "equivalent":
        why = f"consistent with no change: {interval} lies within {margin_text(metric)}"
    elif verdict != "inconclusive":
        size, p = f"{_amount(metric, effect)} ({interval})", found.p_holm or 0.0
        why = f"consistent with {verdict}: {size}, p {p:.2g} after Holm over {family} metrics"
    else:
        chance = f" (leaving out no change, which chance does among {family} metrics)"
        why = f"not clear: {interval} all fit{'' if found.holds_no_change else chance}"
    return replace(found, verdict=verdict, why=why)


def consistent(found: Finding) -> str:
    """Word a finding as live traffic may put it.

    Consistent with 12 % lower, no sign of a change beyond 5 %, too little traffic to say."""
    metric = found.metric
    if (
        found.verdict in ("better", "worse")
        and found.effect is not None
        and found.low is not None
        and found.high is not None
    ):
        interval = f"{_amount(metric, found.low)} to {_amount(metric, found.high)}"
        return f"consistent with {_amount(metric, found.effect)} ({interval})"
    if found.verdict == "equivalent":
        return f"no sign of a change beyond {margin_text(metric)}"
    return TOO_LITTLE if found.why.startswith(TOO_LITTLE) else found.why


def _amount(metric: ComparedMetric, effect: float) -> str:
    """Word a change: 12 % lower, 3.1 times, 2 points higher, 4 ms lower."""
    if metric.scale == "ratio" and effect >= 2:
        return f"{effect:.3g} times"
    size = (effect - 1) * 100 if metric.scale == "ratio" else effect * 100 if metric.unit == SHARE else effect
    unit = "%" if metric.scale == "ratio" else "points" if metric.unit == SHARE else metric.unit
    number = f"{abs(size):.1f}" if abs(size) < 99.95 else f"{abs(size):,.0f}"
    return f"{number.removesuffix('.0')} {unit} {'higher' if size >= 0 else 'lower'}"
