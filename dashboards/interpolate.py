"""Variable interpolation as Grafana does it, for the built-in server and the tests.

Sources: Grafana's packages/grafana-prometheus (datasource.ts, getRateIntervalScopedVariable,
prometheusSpecialRegexEscape) and packages/grafana-data (rangeutil.ts, roundInterval, calculateInterval)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL = "$__all"
MAX_POINTS = 11_000  # Prometheus refuses more steps in one query
_SPECIAL = re.compile(r"[$^*{}\[\]'+?.()|]")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_PLAIN = re.compile(r"[0-9]+(\.[0-9]+)?(ms|s|m|h|d|w)?")

# roundInterval: below this many milliseconds -> this interval in seconds.
_ROUND_MS = (
    (10, 0.001), (15, 0.01), (35, 0.02), (75, 0.05), (150, 0.1), (350, 0.2), (750, 0.5), (1500, 1), (3500, 2),
    (7500, 5), (12500, 10), (17500, 15),
    (25000, 20), (45000, 30), (90000, 60), (210000, 120), (450000, 300), (750000, 600), (1050000, 900), (1500000, 1200),
    (2700000, 1800),
    (5400000, 3600), (9000000, 7200), (16200000, 10800), (32400000, 21600), (86400000, 43200), (604800000, 86400),
    (1814400000, 604800),
    (3628800000, 2592000),
)  # fmt: skip

Values = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Range:
    """The time a panel shows: unix seconds; points: how many it has room for; scrape_s: the data source's interval
    (Grafana: timeInterval).

    least_s: the panel's own least interval, which lengthens the window of its rates and not its step."""

    start_s: float
    end_s: float
    points: int = 600
    scrape_s: float = 15.0
    least_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.start_s < self.end_s:
            raise ValueError("a time range ends after it starts")

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def step_s(self) -> float:
        """Grafana's $__interval: a round figure, never below the scrape interval."""
        return max(_rounded(self.seconds / self.points), self.scrape_s, self.seconds / MAX_POINTS)

    @property
    def rate_s(self) -> float:
        """Grafana's $__rate_interval: at least four scrapes, so that a rate always has the two samples it needs."""
        return max(max(self.step_s, self.least_s) + self.scrape_s, 4 * self.scrape_s)


def fill(expr: str, values: Values, over: Range) -> str:
    """The expression as it is sent: one value (a duration, a price) as it stands, a sequence of them as a regex that
    matches just these.

    What is chosen can never become a part of the query's own text. Raises KeyError for a variable that has no value,
    ValueError for a single value that is neither a number nor a duration: a bare word would be read as the name of a
    metric."""
    own = {
        "__interval": _duration(over.step_s),
        "__rate_interval": _duration(over.rate_s),
        "__range": _duration(over.seconds),
        "__range_s": f"{over.seconds:.0f}",
        "__range_ms": f"{over.seconds * 1000:.0f}",
        "__interval_ms": f"{over.step_s * 1000:.0f}",
    }

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name.isdigit():  # $1 of label_replace
            return found[0]
        return own[name] if name in own else _chosen(name, values[name])

    return _VARIABLE.sub(value, expr)


def _chosen(name: str, value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        if not _PLAIN.fullmatch(value):
            raise ValueError(f"{value!r} cannot be the value of {name}: a number, or a duration such as 5m")
        return value
    if ALL in value:
        return ".*"
    escaped = [_escaped(one) for one in value]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def _escaped(text: str) -> str:
    text = text.replace("\\", r"\\\\").replace('"', r"\"").replace("\n", r"\n")
    return _SPECIAL.sub(lambda found: rf"\\{found[0]}", text)


def _rounded(seconds: float) -> float:
    at = bisect_right([limit for limit, _ in _ROUND_MS], seconds * 1000)
    return float(_ROUND_MS[at][1]) if at < len(_ROUND_MS) else 31_536_000.0


def _duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds >= 1 and float(seconds).is_integer() else f"{max(1, round(seconds * 1000))}ms"
