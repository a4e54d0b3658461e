"""One Metric per series: name, meaning, kind, aggregation, and the vLLM releases that expose it.

Invariant: metric names are typed in this package only. Panels, rules, alerts, checks and docs read these values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")
_FIELD = "DCGM_FI_"  # dcgm-exporter calls a family after its DCGM field, whatever the kind


class Kind(StrEnum):
    """Metric type. It decides which PromQL functions are valid."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"  # a count and a sum without quantiles: gives a mean, no percentile
    INFO = "info"  # a gauge that is always 1 and carries its values as labels


class Unit(StrEnum):
    """Base unit of a series. Dashboards convert it for display."""

    SECONDS = "seconds"
    BYTES = "bytes"
    JOULES = "joules"
    WATTS = "watts"
    CELSIUS = "celsius"
    HERTZ = "hertz"
    RATIO = "ratio"  # 0 to 1, also where vLLM's name ends in _perc
    TOKENS = "tokens"
    REQUESTS = "requests"
    BLOCKS = "blocks"
    ITEMS = "items"
    COUNT = "count"  # anything else that is counted
    TIMESTAMP = "unix seconds"
    FLAG = "flag"  # 1 or 0
    CURRENCY = "currency"  # whichever the operator's prices are in
    NONE = "none"


class Across(StrEnum):
    """Aggregation over engines. Cache usage of 40 % on two engines does not make 80 %."""

    SUM = "sum"
    MEAN = "avg"
    MAX = "max"
    MIN = "min"


class EngineRole(StrEnum):
    """Role of an engine in disaggregated serving, as its target's label `role` says; an engine without one does both.

    One request is a request of both engines of a pair, and its prompt is a prompt of both."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> EngineRole:
        return EngineRole.DECODE if self is EngineRole.PREFILL else EngineRole.PREFILL


class Provenance(StrEnum):
    """Evidence that a series exists as described."""

    SEEN = "seen"  # in a scrape captured from a running vLLM, or in our own
    SOURCE = "source"  # read in vLLM's source or release notes, not run


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric family as exposed: counters with `_total` (except DCGM's), histograms without `_bucket`.

    since: first vLLM release that has it; until: first release without it; None: unknown, or still exposed. needs:
    the flag or feature that exposes it; empty: exposed by default. formerly: older names of the same quantity;
    queries on this metric also match them. native: also exposed as a native histogram (one series without `le`) to a
    Prometheus that negotiates it. pair: the role whose engines count a request of a prefill/decode pair; a sum over
    engines leaves the other role out. None: both count, each its own part.

    Raises ValueError for an invalid name or release."""

    name: str
    kind: Kind
    unit: Unit
    meaning: str
    labels: tuple[str, ...] = ("engine", "model_name")
    across: Across = Across.SUM
    since: str | None = None
    until: str | None = None
    formerly: tuple[str, ...] = ()
    native: bool = False
    pair: EngineRole | None = None
    needs: str = ""
    evidence: Provenance = Provenance.SEEN
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a valid Prometheus metric name")
        if self.kind is Kind.COUNTER and not self.name.endswith("_total") and not self.name.startswith(_FIELD):
            raise ValueError(f"{self.name}: a counter is exposed with _total")
        for release in filter(None, (self.since, self.until)):
            if not _RELEASE.fullmatch(release):
                raise ValueError(f"{self.name}: {release!r} is not a release; use a form like 0.20 or 0.10.2")

    @property
    def names(self) -> tuple[str, ...]:
        """Current name first, then the older ones."""
        return (self.name, *self.formerly)

    @property
    def samples(self) -> tuple[str, ...]:
        """Sample names that a scrape holds for this family, older names included."""
        parts = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum"), Kind.SUMMARY: ("_count", "_sum")}.get(self.kind, ("",))
        parts += ("",) if self.native else ()
        return tuple(name + part for name in self.names for part in parts)

    def lives_in(self, release: str) -> bool:
        """Return True if a vLLM release has this family under its current name; unknown bounds count as yes."""
        return (self.since is None or key(self.since) <= key(release)) and (
            self.until is None or key(release) < key(self.until)
        )


def key(release: str) -> tuple[int, ...]:
    """Return a release as sortable numbers: '0.10.2' sorts after '0.9'.

    Suffixes such as '+cpu' or '.post2' are ignored."""
    match = re.match(r"\d+(?:\.\d+)*", release)
    if not match:
        raise ValueError(f"{release!r} is not a release; use a form like 0.20 or 0.10.2")
    numbers = [int(part) for part in match[0].split(".")]
    return (*numbers, *[0] * (3 - len(numbers)))
