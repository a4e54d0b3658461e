"""The page that Prometheus scrapes, from plain values: in the text format 0.0.4, or in OpenMetrics 1.0, which alone can carry exemplars.

client_python stays the reference that both are compared with in the tests; it is not on the path of a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from exporters.catalogue.metric import Kind, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"


class Exemplar(NamedTuple):
    """One observation that can be looked up: its trace, its value in the histogram's unit, and when it was (unix seconds, or not known)."""

    trace_id: str
    value: float
    at_s: float | None


@dataclass(slots=True)
class Distribution:
    """Counts per bucket for fixed upper bounds in seconds, the sum of what was observed, and the last traced observation of each bucket."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, trace_id: str | None = None, at_s: float | None = None) -> None:
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id, value, at_s)


Sample = tuple[Metric, Mapping[str, str], float | Distribution]


def answer(samples: Iterable[Sample], accept: str) -> tuple[str, str]:
    """The page and its content type, in the richer format where the Accept header of the scrape names it."""
    richer = OPENMETRICS in accept
    return render(samples, openmetrics=richer), OPENMETRICS_TYPE if richer else CONTENT_TYPE


def render(samples: Iterable[Sample], openmetrics: bool = False) -> str:
    """The page. Families stand together in the order in which they first come."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample[0].name, []).append(sample)
    page = "".join(line for rows in families.values() for line in _family(rows, openmetrics))
    return f"{page}# EOF\n" if openmetrics else page


def _family(rows: list[Sample], openmetrics: bool) -> Iterable[str]:
    metric = rows[0][0]
    kind = Kind.GAUGE if metric.kind is Kind.INFO else metric.kind
    family = metric.name.removesuffix("_total") if openmetrics and kind is Kind.COUNTER else metric.name
    yield f"# HELP {family} {_escaped(metric.meaning) if openmetrics else _escaped_help(metric.meaning)}\n# TYPE {family} {kind}\n"
    for _, labels, value in rows:
        text = ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
        if isinstance(value, Distribution):
            yield from _histogram(metric.name, text, value, openmetrics)
        else:
            yield f"{metric.name}{{{text}}} {_number(value)}\n" if text else f"{metric.name} {_number(value)}\n"


def _histogram(name: str, labels: str, distribution: Distribution, openmetrics: bool) -> Iterable[str]:
    prefix = f"{labels}," if labels else ""
    running = 0
    for bucket, (bound, count) in enumerate(zip((*distribution.bounds, float("inf")), distribution.counts, strict=True)):
        running += count
        exemplar = _exemplar(distribution.exemplars.get(bucket)) if openmetrics else ""
        yield f'{name}_bucket{{{prefix}le="{_number(bound)}"}} {running}{exemplar}\n'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_count{braces} {running}\n{name}_sum{braces} {_number(distribution.sum)}\n"


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    at = "" if exemplar.at_s is None else f" {exemplar.at_s:.3f}"
    return f' # {{trace_id="{_escaped(exemplar.trace_id)}"}} {_number(exemplar.value)}{at}'


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
