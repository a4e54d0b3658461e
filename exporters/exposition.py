"""The page that Prometheus scrapes, in the text format 0.0.4, from plain values.

client_python stays the reference that this page is compared with in the tests; it is not on the path of a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporters.catalogue.metric import Kind, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Distribution:
    """Counts per bucket for fixed upper bounds in seconds, and the sum of what was observed."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


Sample = tuple[Metric, Mapping[str, str], float | Distribution]


def render(samples: Iterable[Sample]) -> str:
    """The page. Families stand together in the order in which they first come."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample[0].name, []).append(sample)
    return "".join(line for rows in families.values() for line in _family(rows))


def _family(rows: list[Sample]) -> Iterable[str]:
    metric = rows[0][0]
    kind = Kind.GAUGE if metric.kind is Kind.INFO else metric.kind
    yield f"# HELP {metric.name} {_escaped_help(metric.meaning)}\n# TYPE {metric.name} {kind}\n"
    for _, labels, value in rows:
        text = ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
        if isinstance(value, Distribution):
            yield from _histogram(metric.name, text, value)
        else:
            yield f"{metric.name}{{{text}}} {_number(value)}\n" if text else f"{metric.name} {_number(value)}\n"


def _histogram(name: str, labels: str, distribution: Distribution) -> Iterable[str]:
    prefix = f"{labels}," if labels else ""
    running = 0
    for bound, count in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        running += count
        yield f'{name}_bucket{{{prefix}le="{_number(bound)}"}} {running}\n'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_count{braces} {running}\n{name}_sum{braces} {_number(distribution.sum)}\n"


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
