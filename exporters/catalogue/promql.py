"""The questions one may ask of a Metric, as PromQL.

Each question accepts only the kinds it is true of, so a wrong query fails when rendered, not as an empty panel.
Where a family was renamed the older name stands beside the new one inside the aggregation, so that a fleet that mixes
releases
is counted whole: `sum(rate(new[5m]) or rate(old[5m]))`, never `sum(rate(new)) or sum(rate(old))`, which drops the older
half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporters.catalogue.metric import Across, Kind, Metric, Unit

WINDOW = "5m"
BY = ("model_name",)
EACH = ("model_name", "instance", "engine")  # one line for each engine
# label of a bound instead of a quantile: it lies below ("<") or above (">"); beside one: it is "at least" or "at most"
# so much
BOUND = "bound"


_INFINITE = 'le="+Inf"'
_PLACE = ("cluster", "namespace")
_TARGET = ("job", "instance")

Matchers = Sequence[str]


class WrongQuestion(TypeError):
    """A question that this kind of metric cannot answer."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The bounds of classic buckets, as expressions. every: a positive count at each bound, +Inf too. infinite: the
    bucket +Inf alone."""

    every: str
    infinite: str

    @property
    def first(self) -> str:
        """The first bound: with the same count up to each bound all is in the first bucket, and its largest value is
        that bound."""
        return f"histogram_quantile(1, {self.every})"

    @property
    def last(self) -> str:
        """The last finite bound, which is any quantile of what lies above it."""
        return f"histogram_quantile(1, {self.infinite} or ({self.every}) * 0)"


def per_second(
    metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = ""
) -> str:
    """How fast a counter grows, in units per second."""
    _expect(metric, Kind.COUNTER)
    return _sum(_each(metric, where, f"rate({{}}{_span(window, offset)})"), by)


def growth(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """By how much a counter grew within the window."""
    _expect(metric, Kind.COUNTER)
    return _sum(_each(metric, where, f"increase({{}}{_span(window, offset)})"), by)


def total(metric: Metric, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Where a counter stands: only for one that is read back from a file, and so does not start again with its
    process."""
    _expect(metric, Kind.COUNTER)
    return _sum(_each(metric, where, "{}"), by)


def repeated(
    metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), per_second: bool = True
) -> str:
    """Speed, or growth within the window, of a counter that several series tell of one and the same thing: the highest,
    for a sum would count it once for each of them."""
    _expect(metric, Kind.COUNTER)
    inner = _each(metric, where, f"{'rate' if per_second else 'increase'}({{}}{_span(window)})")
    return f"max by ({', '.join(by)}) ({inner})" if by else f"max({inner})"


def current(metric: Metric, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """A gauge as it stands, its engines combined the one way that makes sense for it."""
    return _gauge(metric, metric.across, by, where, offset)


def worst(metric: Metric, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """The highest of the engines; for a ratio this is where the trouble is, which a mean would hide."""
    return _gauge(metric, Across.MAX, by, where, offset)


def once(metric: Metric, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """A gauge that several watchers may tell of one and the same thing, such as two sidecars that read one engine: each
    thing counts once.

    A thing is what the metric's own labels name, within a cluster and namespace; who tells it are the labels of the
    scrape. The highest is taken where they disagree."""
    told = _gauge(metric, Across.MAX, tuple(dict.fromkeys((*_PLACE, *by, *metric.labels))), where, "")
    return f"{metric.across} by ({', '.join(by)}) ({told})" if by else f"{metric.across}({told})"


def lowest(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """The least that a gauge was within the window, its engines combined like its present value: more than 0 means at
    every scrape."""
    return _over_time("min", metric, window, by, where)


def average(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """What a gauge was on average within the window, its engines combined like its present value."""
    return _over_time("avg", metric, window, by, where)


def highest(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """The most that a gauge was at any scrape within the window, its engines combined like its present value, whenever
    each had its most."""
    return _over_time("max", metric, window, by, where)


def rise(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """By how much a gauge is higher now than a window ago; below 0 where it fell."""
    _expect(metric, Kind.GAUGE)
    return f"{metric.across} by ({', '.join(by)}) ({_each(metric, where, f'delta({{}}[{window}])')})"


def age(metric: Metric, by: Sequence[str] = _TARGET, where: Matchers = ()) -> str:
    """How old a process was, in seconds, when it was last asked: the least of these within an hour is, for one that
    started within it, the time from its start to its first answer. Of a start time only."""
    if metric.unit is not Unit.TIMESTAMP:
        raise WrongQuestion(f"{metric.name} counts {metric.unit}; only a time of start tells an age")
    return f"min by ({', '.join(by)}) ({_each(metric, where, 'timestamp({0}) - {0}')})"


def changes(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """How often a gauge took another value within the window; for a start time, how often a process started again."""
    _expect(metric, Kind.GAUGE)
    return _sum(_each(metric, where, f"changes({{}}{_span(window)})"), by)


def resets(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """How often a counter began at 0 again within the window: how often its process did, as far as it had counted
    anything.

    The highest and not the sum, because the counters of a process all begin again together."""
    _expect(metric, Kind.COUNTER)
    inner = _each(metric, where, f"resets({{}}{_span(window)})")
    return f"{Across.MAX} by ({', '.join(by)}) ({inner})" if by else f"{Across.MAX}({inner})"


def quantile(
    q: float, metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = ""
) -> str:
    """Estimate a quantile of a histogram: from its native form where the Prometheus stores it, else from its classic
    buckets.

    A classic estimate is never finer than the bucket it falls in: see bounded_quantile.
    The answer is absent while nothing happened: `>= 0` lets every value pass but NaN, which idle buckets would give."""
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
    """Estimate a quantile, and never a value that the buckets do not show: see bounded. A native histogram has no such
    ends.

    Absent while nothing happened. resolution: of classic buckets also the bounds of the one that the value lies in,
    which is all that is certain: with the labels bound="at least" and bound="at most"."""
    native, classic = _quantiles(q, metric, window, by, where, offset)
    observed, bounds = events(metric, window, by, where, offset), ladder(metric, by, where, offset)
    around = _around(q, _classic(metric, window, by, where, offset), observed, bounds, by) if resolution else ""
    shown = bounded(classic, bounds, by, observed, around)
    return f"{native} >= 0 or ({shown}) unless on ({', '.join(by)}) {native}" if native else shown


def resolved_quantile(
    q: float, metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = ""
) -> str:
    """Estimate a quantile, absent where classic buckets only say that it lies below the first or above the last finite
    bound."""
    native, classic = _quantiles(q, metric, window, by, where, offset)
    bounds = ladder(metric, by, where, offset)
    inside = f"({classic} > {bounds.first} < {bounds.last})"
    return f"{native} >= 0 or {inside}" if native else inside


def bounded(quantile: str, bounds: Ladder, by: Sequence[str], observed: str, around: str = "") -> str:
    """Return a quantile where it lies between the bounds of its buckets, else the bound that it lies beyond.

    Below the first bound the answer is that bound with the label bound="<", above the last finite one that bound with
    bound=">".
    by: labels of the quantile. observed: how much was observed, by the same labels. around: what stands beside a
    quantile between the bounds."""
    same = f"on ({', '.join(by)})"
    inside = f"{quantile} > {bounds.first}"
    above = _labelled(f"{quantile} >= {bounds.last}", ">")
    below = _labelled(f"{bounds.first} >= 0 and {same} {observed} > 0", "<")
    return f"{above} or {same} {f'({inside} or {around})' if around else inside} or {same} {below}"


def _around(q: float, classic: str, observed: str, bounds: Ladder, by: Sequence[str]) -> str:
    """The bounds of the bucket that a quantile lies in, but for the first bucket and that above the last finite bound.

    Of a histogram that holds 1 in the buckets that reach the quantile and 0 in those below, they are the least and the
    largest value."""
    reached = f"({classic}) >= bool on ({', '.join(by)}) group_left () {q} * ({observed} > 0)"
    least = _labelled(f"histogram_quantile(1e-12, {reached}) > 1e-9", "at least")
    most = _labelled(f"histogram_quantile(1, {reached}) > {bounds.first}", "at most")
    return f"{least} or {most}"


def ladder(metric: Metric, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> Ladder:
    """Return the bounds that all series of a group have.

    Series with different bounds, such as engines of which one was started with bounds of its own, can only be summed at
    those that they share: at any other the sum lacks the rest, and a quantile of it would be invented."""
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
    """How many bounds of a histogram only some series of a group have; absent where all have the same."""
    standing, infinite = _standing(metric, where, ""), _standing(metric, (*where, _INFINITE), "")
    each = f"count by ({', '.join((*by, 'le'))}) ({standing})"
    return (
        f"count by ({', '.join(by)}) ({each} < on ({', '.join(by)}) group_left () count by ({', '.join(by)})"
        f" ({infinite}))"
    )


def _one_process(by: Sequence[str]) -> bool:
    """Whether each group is of one process, which has one set of bounds."""
    return "instance" in by


def _labelled(expr: str, bound: str) -> str:
    return f'label_replace({expr}, "{BOUND}", "{bound}", "", "")'


def _standing(metric: Metric, where: Matchers, offset: str) -> str:
    """Classic buckets as they stand."""
    return _each(metric, where, "{}" + (f" offset {offset}" if offset else ""), "_bucket")


def _classic(metric: Metric, window: str, by: Sequence[str], where: Matchers, offset: str) -> str:
    """Rates of classic buckets, at the bounds that all series of a group have."""
    summed = _sum(_rates(metric, "_bucket", window, where, offset), (*by, "le"))
    return summed if _one_process(by) else f"{summed} and {ladder(metric, by, where, offset).every}"


def _quantiles(
    q: float, metric: Metric, window: str, by: Sequence[str], where: Matchers, offset: str
) -> tuple[str, str]:
    """A quantile of native buckets, empty for a metric without, and of classic ones. NaN while nothing happened."""
    _expect(metric, Kind.HISTOGRAM)
    if not 0 < q < 1:
        raise WrongQuestion(f"{metric.name}: a quantile lies between 0 and 1, not at {q}")
    native = f"histogram_quantile({q}, {_sum(_rates(metric, '', window, where, offset), by)})" if metric.native else ""
    return native, f"histogram_quantile({q}, {_classic(metric, window, by, where, offset)})"


def buckets(metric: Metric, window: str = WINDOW, by: Sequence[str] = (), where: Matchers = ()) -> str:
    """What fell into each bucket within the window, cumulative over `le`: the whole distribution, for a heatmap."""
    _expect(metric, Kind.HISTOGRAM)
    return _sum(_each(metric, where, f"increase({{}}{_span(window)})", "_bucket"), (*by, "le"))


def shared_buckets(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """What fell into each bucket within the window, at the bounds that all series of a group have: to be read as one
    histogram."""
    return f"{buckets(metric, window, by, where)} and {ladder(metric, by, where).every}"


def observed(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """How many observations a histogram took within the window."""
    _expect(metric, Kind.HISTOGRAM)
    return _sum(_each(metric, where, f"increase({{}}{_span(window)})", "_count"), by)


def le(bound: float) -> str:
    """The matcher for one bucket. The bound must be one of the page: anything else has no series. Whole numbers are
    written 5 or 5.0."""
    return f'le="{bound:.12g}"' if bound % 1 else f'le=~"{bound:.12g}(\\\\.0)?"'


def unresolved(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Share of observations below the first bound of a histogram, 0 to 1: up to it a quantile is a guess between 0 and
    that bound.

    Buckets are cumulative, so the least of them is the first and the greatest holds all; no bound is written down,
    because deployments differ."""
    within = f"by ({', '.join(by)}) " if by else ""
    counted = shared_buckets(metric, window, by, where)
    return per(f"min {within}({counted})", f"max {within}({counted})")


def mean(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """Sum over count of a histogram or summary; nothing at all (rather than NaN) while no event happened."""
    _expect(metric, Kind.HISTOGRAM, Kind.SUMMARY)
    total, count = (_sum(_rates(metric, part, window, where, offset), by) for part in ("_sum", "_count"))
    return f"{total} / ({count} > 0)"


def events(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """How many observations a histogram or summary takes per second."""
    _expect(metric, Kind.HISTOGRAM, Kind.SUMMARY)
    return _sum(_rates(metric, "_count", window, where, offset), by)


def amount(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = (), offset: str = "") -> str:
    """How fast the sum of a histogram grows: of seconds per second this is how many were in that state at once
    (Little's law)."""
    _expect(metric, Kind.HISTOGRAM, Kind.SUMMARY)
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
    """Growth of one counter in growth of another, 0 to 1. Absent while the whole stands still: idle is not zero, nor
    NaN.

    `where` holds for both, `part_where` for the numerator alone; a part that never happened counts as 0 of the whole.
    Raises WrongQuestion when the units differ."""
    if part.unit is not whole.unit:
        raise WrongQuestion(
            f"{part.name} counts {part.unit} and {whole.name} counts {whole.unit}: their quotient is no share"
        )
    numerator = per_second(part, window, by, (*where, *part_where), offset)
    denominator = per_second(whole, window, by, where, offset)
    if part_where:
        numerator = f"({numerator} or {denominator} * 0)"
    return f"{numerator} / ({denominator} > 0)"


def per(above: str, below: str, on: Sequence[str] = ()) -> str:
    """One answer in units of another, such as tokens per joule; absent while the lower one stands still.

    Both keep the same labels; where the upper one is split further, `on` names those of the lower one."""
    match = f" on ({', '.join(on)}) group_left ()" if on else ""
    return f"{above} /{match} ({below} > 0)"


def on_targets_of(answer: str, metric: Metric, where: Matchers = ()) -> str:
    """An answer as far as its target shows another series too: names such as http_requests_total belong to many
    programs, and the other series tells which of them is meant. The answer must still have its job and instance."""
    return f"{answer} and on ({', '.join(_TARGET)}) ({series(metric, where)})"


def series(metric: Metric, where: Matchers = ()) -> str:
    """The bare selector, older names included; for info series and for `absent`."""
    _expect(metric, Kind.GAUGE, Kind.INFO)
    return _each(metric, where, "{}")


def seen(metric: Metric, window: str, where: Matchers = (), offset: str = "") -> str:
    """The last sample within the window of each series, also of those that are gone since: who was there. On the right
    of `and on`, in brackets."""
    _expect(metric, Kind.GAUGE, Kind.INFO, Kind.COUNTER)
    return _each(metric, where, f"last_over_time({{}}{_span(window, offset)})")


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


def _sum(inner: str, by: Sequence[str]) -> str:
    return _aggregated("sum", inner, by)


def _aggregated(how: str, inner: str, by: Sequence[str]) -> str:
    return f"{how} by ({', '.join(by)}) ({inner})" if by else f"{how}({inner})"


def _expect(metric: Metric, *kinds: Kind) -> None:
    if metric.kind not in kinds:
        wanted = " or ".join(kinds)
        raise WrongQuestion(f"{metric.name} is a {metric.kind}; this question needs a {wanted}")
