"""Exposition of plain values in the Prometheus text format 0.0.4, or in OpenMetrics 1.0 with exemplars.

Tests compare both with client_python, which is not used for scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

from exporters.catalogue.metric import Kind, Metric
from exporters.native_histogram import NativeHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"


class Exemplar(NamedTuple):
    """Observation with a trace id.

    value: in the histogram's unit. at_s: unix seconds, None if unknown. text: the exemplar in OpenMetrics."""

    trace_id: str
    value: float
    at_s: float | None
    text: str


class Distribution(NamedTuple):
    """Histogram. bounds: upper bounds in seconds. counts: observations per bucket, one more than bounds.

    sum: of all observations. exemplars: one per bucket, or empty. native: the same observations in exponential
    buckets, see native_histogram; None: classic only."""

    bounds: tuple[float, ...]
    counts: Sequence[int]
    sum: float
    exemplars: Sequence[Exemplar | None] = ()
    native: NativeHistogram | None = None


Sample = tuple[Metric, Mapping[str, str], float | Distribution]
Block = Mapping[str, tuple[Metric, str]]  # by family: lines of some of its samples, without HELP and TYPE


def render(samples: Iterable[Sample], openmetrics: bool = False) -> str:
    """Return the exposition. Families are in the order of their first sample."""
    return page((block(samples, openmetrics),), openmetrics)


def block(samples: Iterable[Sample], openmetrics: bool = False) -> Block:
    """Serialise samples to lines for one or more expositions, so that unchanged ones are serialised once."""
    metrics: dict[str, Metric] = {}
    lines: dict[str, list[str]] = {}
    for metric, labels, value in samples:
        if (rows := lines.get(metric.name)) is None:
            metrics[metric.name] = metric
            rows = lines[metric.name] = []
        key = (metric.name, *labels.items())
        if isinstance(value, Distribution):
            rows.append(_histogram(key, value, openmetrics))
        else:
            rows.append(f"{_plain_prefix(key)}{_number(value)}\n")
    return {name: (metrics[name], "".join(rows)) for name, rows in lines.items()}


def exemplar(trace_id: str, value: float, at_s: float | None) -> Exemplar:
    """Return an exemplar with its OpenMetrics text, which is computed once."""
    at = "" if at_s is None else f" {at_s:.3f}"
    return Exemplar(trace_id, value, at_s, f' # {{trace_id="{_escaped(trace_id)}"}} {_number(value)}{at}')


def page(blocks: Iterable[Block], openmetrics: bool = False) -> str:
    """Return the exposition of several blocks."""
    families: dict[str, list[str]] = {}
    for each in blocks:
        for name, (metric, text) in each.items():
            if (parts := families.get(name)) is None:
                parts = families[name] = [head(metric, openmetrics)]
            parts.append(text)
    end = "# EOF\n" if openmetrics else ""
    return "".join(text for parts in families.values() for text in parts) + end


@lru_cache(maxsize=4096)
def head(metric: Metric, openmetrics: bool = False) -> str:
    """Return the HELP and TYPE lines of a family."""
    kind = Kind.GAUGE if metric.kind is Kind.INFO else metric.kind
    family = metric.name.removesuffix("_total") if openmetrics and kind is Kind.COUNTER else metric.name
    return (
        f"# HELP {family} {_escaped(metric.meaning) if openmetrics else _escaped_help(metric.meaning)}\n# TYPE {family}"
        f" {kind}\n"
    )


# Names, labels and bounds of a series never change; they are nine tenths of an exposition of 10,000 series.


@lru_cache(maxsize=1 << 14)
def _plain_prefix(key: tuple[Any, ...]) -> str:
    labels = _labels(key[1:])
    return f"{key[0]}{{{labels}}} " if labels else f"{key[0]} "


@lru_cache(maxsize=1 << 12)
def _places(key: tuple[Any, ...], bounds: tuple[float, ...], place: str) -> str:
    """Return all lines of a histogram, with `%` placeholders for its numbers."""
    name, labels = key[0], _labels(key[1:]).replace("%", "%%")
    before, alone = (f"{labels},", f"{{{labels}}}") if labels else ("", "")
    buckets = "".join(f'{name}_bucket{{{before}le="{_number(bound)}"}} {place}\n' for bound in (*bounds, float("inf")))
    return f"{buckets}{name}_count{alone} %s\n{name}_sum{alone} %s\n"


def _labels(items: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(items))


def _histogram(key: tuple[Any, ...], distribution: Distribution, openmetrics: bool) -> str:
    running = list(accumulate(distribution.counts))
    if openmetrics and distribution.exemplars:
        texts = ("" if one is None else one.text for one in distribution.exemplars)
        numbers: Iterable[Any] = chain.from_iterable(zip(running, texts, strict=True))
        places = _places(key, distribution.bounds, "%s%s")
    else:
        numbers, places = running, _places(key, distribution.bounds, "%s")
    return places % (*numbers, running[-1], _number(distribution.sum))


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
