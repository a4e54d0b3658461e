"""The questions one may ask of a Metric, as PromQL.

Each question accepts only the kinds it is true of, so a wrong query fails when rendered, not as an empty panel.
Where a family was renamed the older name stands beside the new one inside the aggregation, so that a fleet that mixes releases
is counted whole: `sum(rate(new[5m]) or rate(old[5m]))`, never `sum(rate(new)) or sum(rate(old))`, which drops the older half."""

from __future__ import annotations

from collections.abc import Sequence

from exporters.catalogue.metric import Across, Kind, Metric

WINDOW = "5m"
BY = ("model_name",)

Matchers = Sequence[str]


class WrongQuestion(TypeError):
    """A question that this kind of metric cannot answer."""


def per_second(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """How fast a counter grows, in units per second."""
    _expect(metric, Kind.COUNTER)
    return _sum(_each(metric, where, f"rate({{}}[{window}])"), by)


def growth(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """By how much a counter grew within the window."""
    _expect(metric, Kind.COUNTER)
    return _sum(_each(metric, where, f"increase({{}}[{window}])"), by)


def current(metric: Metric, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """A gauge as it stands, its engines combined the one way that makes sense for it."""
    _expect(metric, Kind.GAUGE)
    return f"{metric.across} by ({', '.join(by)}) ({_each(metric, where, '{}')})"


def worst(metric: Metric, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """The highest of the engines; for a ratio this is where the trouble is, which a mean would hide."""
    _expect(metric, Kind.GAUGE)
    return f"{Across.MAX} by ({', '.join(by)}) ({_each(metric, where, '{}')})"


def quantile(q: float, metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """An estimate from histogram buckets: never finer than the bucket it falls in, and the first bound is its floor."""
    _expect(metric, Kind.HISTOGRAM)
    if not 0 < q < 1:
        raise WrongQuestion(f"{metric.name}: a quantile lies between 0 and 1, not at {q}")
    buckets = _each(metric, where, f"rate({{}}[{window}])", "_bucket")
    return f"histogram_quantile({q}, {_sum(buckets, (*by, 'le'))})"


def mean(metric: Metric, window: str = WINDOW, by: Sequence[str] = BY, where: Matchers = ()) -> str:
    """Sum over count of a histogram; nothing at all (rather than NaN) while no event happened."""
    _expect(metric, Kind.HISTOGRAM)
    total = _sum(_each(metric, where, f"rate({{}}[{window}])", "_sum"), by)
    return f"{total} / ({_sum(_each(metric, where, f'rate({{}}[{window}])', '_count'), by)} > 0)"


def share(
    part: Metric, whole: Metric, window: str = WINDOW, by: Sequence[str] = BY, part_where: Matchers = (), where: Matchers = ()
) -> str:
    """Growth of one counter in growth of another, 0 to 1. Absent while the whole stands still: idle is not zero, nor NaN.

    `where` holds for both, `part_where` for the numerator alone; a part that never happened counts as 0 of the whole.
    Raises WrongQuestion when the units differ."""
    if part.unit is not whole.unit:
        raise WrongQuestion(f"{part.name} counts {part.unit} and {whole.name} counts {whole.unit}: their quotient is no share")
    numerator = per_second(part, window, by, (*where, *part_where))
    denominator = per_second(whole, window, by, where)
    if part_where:
        numerator = f"({numerator} or {denominator} * 0)"
    return f"{numerator} / ({denominator} > 0)"


def series(metric: Metric, where: Matchers = ()) -> str:
    """The bare selector, older names included; for info series and for `absent`."""
    _expect(metric, Kind.GAUGE, Kind.INFO)
    return _each(metric, where, "{}")


def _each(metric: Metric, where: Matchers, form: str, suffix: str = "") -> str:
    matchers = f"{{{', '.join(where)}}}" if where else ""
    return " or ".join(form.format(f"{name}{suffix}{matchers}") for name in metric.names)


def _sum(inner: str, by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) ({inner})" if by else f"sum({inner})"


def _expect(metric: Metric, *kinds: Kind) -> None:
    if metric.kind not in kinds:
        wanted = " or ".join(kinds)
        raise WrongQuestion(f"{metric.name} is a {metric.kind}; this question needs a {wanted}")
