"""PromQL queries over catalogue metrics.

Invariant: each query accepts only the metric kinds it is valid for, so an invalid query fails when rendered, not as an
empty panel.

A renamed family is queried by both names inside the aggregation, so that a fleet of mixed releases is counted in
full: `sum(rate(new[5m]) or rate(old[5m]))`, not `sum(rate(new)) or sum(rate(old))`, which drops the older half.

A query over several engines counts a request of a prefill/decode pair once: see once_per_pair."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from exporters.catalogue.metric import Across, EngineRole, Kind, Metric, Unit

WINDOW = "5m"
BY = ("model_name",)
EACH = ("model_name", "instance", "engine")  # one line per engine
# label of a bound instead of a quantile: it lies below ("<") or above (">"); beside one: it is "at least" or "at most"
# so much
BOUND = "bound"
ROLE = "role"  # label of a target: prefill or decode; absent for an engine that does both
WITH_ROLE = f'{ROLE}!=""'  # matcher for the engines of prefill/decode pairs
_PER_ENGINE = {"instance", ROLE}  # labels that keep the engines of a pair apart
_NARROWED = (
    'instance="',
    'instance=~"{{',
    f"{ROLE}=",
    f"{ROLE}!",
)  # matchers that choose the engine or the role already


_INFINITE = 'le="+Inf"'
_PLACE = ("cluster", "namespace")
_TARGET = ("job", "instance")

Matchers = Sequence[str]
_PLAIN = re.compile(r"[\w .:@/+,-]")


class InvalidQuery(TypeError):
    """Query that is not valid for this kind of metric."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Bounds of classic buckets, as expressions.

    every: a positive count at each bound, including +Inf. infinite: the bucket +Inf only."""

    every: str
    infinite: str

    @property
    def first(self) -> str:
        """Return the first bound.

        With the same count at each bound all observations are in the first bucket, and its largest value is that
        bound."""
        return f"histogram_quantile(1, {self.every})"

    @property
    def last(self) -> str:
        """Return the last finite bound: any quantile above it has this value."""
        return f"histogram_quantile(1, {self.infinite} or ({self.every}) * 0)"


def equals(label: str, value: str) -> str:
    """Return the matcher label="value", with every special character as its code.

    The matcher has no quote, dollar sign or bracket of the value, so neither PromQL nor Grafana's variables can read
    a part of it as anything else."""
    coded = (character if _PLAIN.fullmatch(character) else f"\\U{ord(character):08x}" for character in value)
    return f'{label}="{"".join(coded)}"'


def of_role(role: EngineRole) -> str:
    """Return the matcher for the engines of one role."""
    return equals(ROLE, role)


def not_of_role(role: EngineRole) -> str:
    """Return the matcher for all engines but those of one role; engines without a role match."""
    return f'{ROLE}!="{role}"'


def once_per_pair(metric: Metric, by: Sequence[str], where: Matchers) -> Matchers:
    """Return the matchers of a query over several engines that count each request of a prefill/decode pair once.

    Without the label `role` they select everything, as before. Unchanged for a query by engine or by role."""
    if metric.pair is None or _PER_ENGINE & set(by) or any(matcher.startswith(_NARROWED) for matcher in where):
        return where
    return (*where, not_of_role(metric.pair.other))


def per_second(
    metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = ""
) -> str:
    """Return the per-second increase of a counter."""
    _expect(metric, Kind.COUNTER)
    where = once_per_pair(metric, by, where)
    return _sum(_each(metric, where, f"rate({{}}{_span(window, offset)})"), by)


def growth(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """Return the increase of a counter within the window."""
    _expect(metric, Kind.COUNTER)
    where = once_per_pair(metric, by, where)
    return _sum(_each(metric, where, f"increase({{}}{_span(window, offset)})"), by)


def total(metric: Metric, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the current value of a counter. Valid only for counters that are persisted over restarts."""
    _expect(metric, Kind.COUNTER)
    return _sum(_each(metric, where, "{}"), by)


def stored(metric: Metric, where: Matchers = ()) -> str:
    """Return each series of a counter, or of a histogram's sum, as stored, for a reader that computes its increase."""
    _expect(metric, Kind.COUNTER, Kind.HISTOGRAM)
    return _each(metric, where, "{}", _sum_of(metric))


def repeated(
    metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), per_second: bool = True
) -> str:
    """Return the rate (or the increase within the window) of a counter that several targets expose for one thing.

    Takes the maximum, because a sum would count it once per target."""
    _expect(metric, Kind.COUNTER)
    inner = _each(metric, where, f"{'rate' if per_second else 'increase'}({{}}{_span(window)})")
    return f"max by ({', '.join(by)}) ({inner})" if by else f"max({inner})"


def current(metric: Metric, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """Return the current value of a gauge, aggregated over engines by its `across`."""
    return _gauge(metric, metric.across, by, where, offset)


def worst(metric: Metric, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """Return the maximum over engines. For a ratio, a mean would hide the affected engine."""
    return _gauge(metric, Across.MAX, by, where, offset)


def once(metric: Metric, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return a gauge that several targets may expose for one thing, such as two sidecars on one engine, counted once.

    A thing is identified by the metric's own labels within a cluster and namespace; scrape labels identify the
    target. The maximum is used if they disagree."""
    values = _gauge(metric, Across.MAX, tuple(dict.fromkeys((*_PLACE, *by, *metric.labels))), where, "")
    return f"{metric.across} by ({', '.join(by)}) ({values})" if by else f"{metric.across}({values})"


def lowest(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the minimum of a gauge within the window, aggregated like its current value; > 0 means at every scrape."""
    return _over_time("min", metric, window, by, where)


def average(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the mean of a gauge within the window, aggregated over engines like its current value."""
    return _over_time("avg", metric, window, by, where)


def highest(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the maximum of a gauge at any scrape within the window, aggregated over engines like its current value.

    The maxima of the engines may be at different times."""
    return _over_time("max", metric, window, by, where)


def rise(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the change of a gauge over the window; below 0 if it fell."""
    _expect(metric, Kind.GAUGE)
    return f"{metric.across} by ({', '.join(by)}) ({_each(metric, where, f'delta({{}}[{window}])')})"


def age(metric: Metric, by: Sequence[str] = _TARGET, where: Matchers = ()) -> str:
    """Return the age of a process in seconds at its last scrape, from its start time.

    For a process that started within the last hour, the minimum over that hour is the time from its start to its
    first response."""
    if metric.unit is not Unit.TIMESTAMP:
        raise InvalidQuery(f"{metric.name} has unit {metric.unit}; an age needs a start time")
    return f"min by ({', '.join(by)}) ({_each(metric, where, 'timestamp({0}) - {0}')})"


def changes(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return how often a gauge changed within the window; for a start time, the number of restarts."""
    _expect(metric, Kind.GAUGE)
    return _sum(_each(metric, where, f"changes({{}}{_span(window)})"), by)


def resets(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return how often a counter reset within the window: the restarts of its process, if it had counted anything.

    The maximum, not the sum, because all counters of a process reset together."""
    _expect(metric, Kind.COUNTER)
    inner = _each(metric, where, f"resets({{}}{_span(window)})")
    return f"{Across.MAX} by ({', '.join(by)}) ({inner})" if by else f"{Across.MAX}({inner})"


def quantile(
    q: float, metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = ""
) -> str:
    """Estimate a quantile of a histogram, from native buckets where Prometheus stores them, else from classic ones.

    A classic estimate is no finer than its bucket: see bounded_quantile. No value while nothing was observed: `>= 0`
    passes every value except NaN, which idle buckets would give."""
    native, classic = _quantiles(q, metric, window, by, where, offset)
    return f"({native} or {classic}) >= 0" if native else f"{classic} >= 0"


def bounded_quantile(
    q: float,
    metric: Metric,
    window: str = WINDOW,
    by: Sequence[str] = BY,
    where: Matchers = (),
    offset: str = "",
    resolution: bool = False,
) -> str:
    """Estimate a quantile, limited to what the buckets resolve: see bounded. Native histograms have no such limits.

    No value while nothing was observed. resolution: also return the bounds of the classic bucket that holds the
    value, which is all that is certain, with the labels bound="at least" and bound="at most"."""
    native, classic = _quantiles(q, metric, window, by, where, offset)
    observed, bounds = events(metric, window, by, where, offset), ladder(metric, by, where, offset)
    around = _around(q, _classic(metric, window, by, where, offset), observed, bounds, by) if resolution else ""
    shown = bounded(classic, bounds, by, observed, around)
    return f"{native} >= 0 or ({shown}) unless on ({', '.join(by)}) {native}" if native else shown


def resolved_quantile(
    q: float, metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = ""
) -> str:
    """Estimate a quantile; no value below the first or above the last finite bound of classic buckets."""
    native, classic = _quantiles(q, metric, window, by, where, offset)
    bounds = ladder(metric, by, where, offset)
    inside = f"({classic} > {bounds.first} < {bounds.last})"
    return f"{native} >= 0 or {inside}" if native else inside


def bounded(quantile: str, bounds: Ladder, by: Sequence[str], observed: str, around: str = "") -> str:
    """Return a quantile if it lies within the finite bounds, else the bound that it lies beyond.

    Below the first bound the result is that bound with the label bound="<", above the last finite one that bound
    with bound=">". by: labels of the quantile. observed: number of observations, by the same labels. around:
    expression shown with a quantile within the bounds."""
    same = f"on ({', '.join(by)})"
    inside = f"{quantile} > {bounds.first}"
    above = _labelled(f"{quantile} >= {bounds.last}", ">")
    below = _labelled(f"{bounds.first} >= 0 and {same} {observed} > 0", "<")
    return f"{above} or {same} {f'({inside} or {around})' if around else inside} or {same} {below}"


def _around(q: float, classic: str, observed: str, bounds: Ladder, by: Sequence[str]) -> str:
    """Return the bounds of the bucket that holds a quantile, except the first bucket and that above the last bound.

    They are the smallest and the largest value of a histogram with 1 in the buckets that reach the quantile and 0 in
    those below."""
    reached = f"({classic}) >= bool on ({', '.join(by)}) group_left () {q} * ({observed} > 0)"
    least = _labelled(f"histogram_quantile(1e-12, {reached}) > 1e-9", "at least")
    most = _labelled(f"histogram_quantile(1, {reached}) > {bounds.first}", "at most")
    return f"{least} or {most}"


def ladder(metric: Metric, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> Ladder:
    """Return the bounds that all series of a group have.

    Series with different bounds, such as engines started with custom ones, can only be summed at shared bounds: at
    any other the sum lacks some series and its quantile would be wrong."""
    where = once_per_pair(metric, by, where)
    standing, infinite = _standing(metric, where, offset), _standing(metric, (*where, _INFINITE), offset)
    bounds = ", ".join((*by, "le"))
    last = f"group by ({bounds}) ({infinite})"
    if _one_process(by):
        return Ladder(f"group by ({bounds}) ({standing})", last)
    return Ladder(
        f"count by ({bounds}) ({standing}) == on ({', '.join(by)}) group_left () {_aggregated('count', infinite, by)}",
        last,
    )


def mixed_bounds(metric: Metric, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the number of bounds that only some series of a group have; no value if all have the same."""
    where = once_per_pair(metric, by, where)
    standing, infinite = _standing(metric, where, ""), _standing(metric, (*where, _INFINITE), "")
    each = f"count by ({', '.join((*by, 'le'))}) ({standing})"
    return (
        f"count by ({', '.join(by)}) ({each} < on ({', '.join(by)}) group_left () count by ({', '.join(by)})"
        f" ({infinite}))"
    )


def _one_process(by: Sequence[str]) -> bool:
    """Return True if each group is one process, which has one set of bounds."""
    return "instance" in by


def _labelled(expr: str, bound: str) -> str:
    return f'label_replace({expr}, "{BOUND}", "{bound}", "", "")'


def _standing(metric: Metric, where: Matchers, offset: str) -> str:
    """Return current values of classic buckets."""
    return _each(metric, where, "{}" + (f" offset {offset}" if offset else ""), "_bucket")


def _classic(metric: Metric, window: str, by: Sequence[str], where: Matchers, offset: str) -> str:
    """Return rates of classic buckets, at the bounds that all series of a group have."""
    where = once_per_pair(metric, by, where)
    summed = _sum(_rates(metric, "_bucket", window, where, offset), (*by, "le"))
    return summed if _one_process(by) else f"{summed} and {ladder(metric, by, where, offset).every}"


def _quantiles(
    q: float, metric: Metric, window: str, by: Sequence[str], where: Matchers, offset: str
) -> tuple[str, str]:
    """Return a quantile of native buckets (empty for a metric without) and of classic ones; NaN without data."""
    _expect(metric, Kind.HISTOGRAM)
    if not 0 < q < 1:
        raise InvalidQuery(f"{metric.name}: quantile must be between 0 and 1, not {q}")
    where = once_per_pair(metric, by, where)
    native = f"histogram_quantile({q}, {_sum(_rates(metric, '', window, where, offset), by)})" if metric.native else ""
    return native, f"histogram_quantile({q}, {_classic(metric, window, by, where, offset)})"


def buckets(metric: Metric, window: str = WINDOW, by: Sequence[str] = (), where: Matchers = ()) -> str:
    """Return the increase of each bucket within the window, cumulative over `le`: the distribution, for a heatmap."""
    _expect(metric, Kind.HISTOGRAM)
    where = once_per_pair(metric, by, where)
    return _sum(_each(metric, where, f"increase({{}}{_span(window)})", "_bucket"), (*by, "le"))


def shared_buckets(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the increase of each bucket at the bounds that all series of a group have, as one histogram."""
    return f"{buckets(metric, window, by, where)} and {ladder(metric, by, where).every}"


def observation_count(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the number of observations of a histogram within the window."""
    _expect(metric, Kind.HISTOGRAM)
    where = once_per_pair(metric, by, where)
    return _sum(_each(metric, where, f"increase({{}}{_span(window)})", "_count"), by)


def le(bound: float) -> str:
    """Return the matcher for one bucket. The bound must be one of the histogram's; 5 and 5.0 both match."""
    return f'le="{bound:.12g}"' if bound % 1 else f'le=~"{bound:.12g}(\\\\.0)?"'


def unresolved(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Return the share of observations below a histogram's first bound, 0 to 1, where quantiles are guesses.

    Buckets are cumulative, so the minimum is the first one and the maximum holds all; no bound is hard-coded because
    deployments differ."""
    within = f"by ({', '.join(by)}) " if by else ""
    counted = shared_buckets(metric, window, by, where)
    return per(f"min {within}({counted})", f"max {within}({counted})")


def mean(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """Return sum over count of a histogram or summary; no value (rather than NaN) without events."""
    _expect(metric, Kind.HISTOGRAM, Kind.SUMMARY)
    where = once_per_pair(metric, by, where)
    total, count = (_sum(_rates(metric, part, window, where, offset), by) for part in ("_sum", "_count"))
    return f"{total} / ({count} > 0)"


def events(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """Return the observations per second of a histogram or summary."""
    _expect(metric, Kind.HISTOGRAM, Kind.SUMMARY)
    where = once_per_pair(metric, by, where)
    return _sum(_rates(metric, "_count", window, where, offset), by)


def amount(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """Return the per-second increase of a histogram's sum.

    For seconds this is the number of requests in that state at once (Little's law)."""
    _expect(metric, Kind.HISTOGRAM, Kind.SUMMARY)
    where = once_per_pair(metric, by, where)
    return _sum(_rates(metric, "_sum", window, where, offset), by)


def share(
    part: Metric,
    whole: Metric,
    window: str = WINDOW,
    by: Sequence[str] = BY,
    part_where: Matchers = (),
    where: Matchers = (),
    offset: str = "",
) -> str:
    """Return the increase of one counter divided by that of another, 0 to 1; no value while the whole is idle.

    `where` applies to both, `part_where` to the numerator only; a part without series counts as 0 of the whole.
    Raises InvalidQuery if the units differ."""
    if part.unit is not whole.unit:
        raise InvalidQuery(f"{part.name} is in {part.unit} and {whole.name} in {whole.unit}: a share needs equal units")
    numerator = per_second(part, window, by, (*where, *part_where), offset)
    denominator = per_second(whole, window, by, where, offset)
    if part_where:
        numerator = f"({numerator} or {denominator} * 0)"
    return f"{numerator} / ({denominator} > 0)"


def per(above: str, below: str, on: Sequence[str] = ()) -> str:
    """Return a quotient of two expressions, such as tokens per joule; no value while the divisor is 0.

    Both have the same labels; if the dividend is split further, `on` names the labels of the divisor."""
    match = f" on ({', '.join(on)}) group_left ()" if on else ""
    return f"{above} /{match} ({below} > 0)"


def on_targets_of(expr: str, metric: Metric, where: Matchers = ()) -> str:
    """Restrict an expression to targets that also expose another series.

    Names such as http_requests_total exist in many programs; the other series identifies the program. The expression
    must keep job and instance."""
    return f"{expr} and on ({', '.join(_TARGET)}) ({series(metric, where)})"


def with_labels_of(expr: str, metric: Metric, by: Sequence[str], on: Sequence[str], where: Matchers = ()) -> str:
    """Return an expression by target with labels of another series of the same target, such as its model.

    on: labels of the expression, which name a target. by: these and the added labels. A target with several values of
    an added label has the result once for each. Targets without the other series, such as other programs with metrics
    of this name, have none."""
    return f"{expr} * on ({', '.join(on)}) group_right () group by ({', '.join(by)}) ({series(metric, where)})"


def series(metric: Metric, where: Matchers = ()) -> str:
    """Return the bare selector, older names included, for info series and for `absent`."""
    _expect(metric, Kind.GAUGE, Kind.INFO)
    return _each(metric, where, "{}")


def last_samples(metric: Metric, window: str, where: Matchers = (), offset: str = "") -> str:
    """Return the last sample of each series within the window, including series that are gone; of a histogram its sum.

    Put it in parentheses on the right of `and on`."""
    return _each(metric, where, f"last_over_time({{}}{_span(window, offset)})", _sum_of(metric))


def _gauge(metric: Metric, across: Across, by: Sequence[str], where: Matchers, offset: str) -> str:
    _expect(metric, Kind.GAUGE)
    inner = _each(metric, where, "{}" + (f" offset {offset}" if offset else ""))
    return f"{across} by ({', '.join(by)}) ({inner})" if by else f"{across}({inner})"


def _over_time(function: str, metric: Metric, window: str, by: Sequence[str], where: Matchers) -> str:
    _expect(metric, Kind.GAUGE)
    return f"{metric.across} by ({', '.join(by)}) ({_each(metric, where, f'{function}_over_time({{}}[{window}])')})"


def _rates(metric: Metric, part: str, window: str, where: Matchers, offset: str) -> str:
    return _each(metric, where, f"rate({{}}{_span(window, offset)})", part)


def _span(window: str, offset: str = "") -> str:
    return f"[{window}]" + (f" offset {offset}" if offset else "")


def _each(metric: Metric, where: Matchers, form: str, suffix: str = "") -> str:
    matchers = f"{{{', '.join(where)}}}" if where else ""
    return " or ".join(form.format(f"{name}{suffix}{matchers}") for name in metric.names)


def _sum_of(metric: Metric) -> str:
    return "_sum" if metric.kind is Kind.HISTOGRAM else ""


def _sum(inner: str, by: Sequence[str]) -> str:
    return _aggregated("sum", inner, by)


def _aggregated(how: str, inner: str, by: Sequence[str]) -> str:
    return f"{how} by ({', '.join(by)}) ({inner})" if by else f"{how}({inner})"


def _expect(metric: Metric, *kinds: Kind) -> None:
    if metric.kind not in kinds:
        wanted = " or ".join(kinds)
        raise InvalidQuery(f"{metric.name} is a {metric.kind}; this query needs a {wanted}")
