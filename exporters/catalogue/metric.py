"""One Metric per series: what it is called, what it means, how it may be combined, and in which vLLM releases it
exists.

Law: nobody types a metric name outside this folder. Panels, rules, alerts, checks and docs read these values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")
_FIELD = "DCGM_FI_"  # dcgm-exporter calls a family after its DCGM field, whatever the kind


class Kind(StrEnum):
    """How a series behaves in time; it decides which questions make sense."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"  # a count and a sum, no quantiles: a mean can be asked of it, a percentile cannot
    INFO = "info"  # a gauge that is always 1 and speaks through its labels


class Unit(StrEnum):
    """Base units only. The board turns them into what people read."""

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
    """How series of several engines become one figure. Summing two engines' cache use of 40 % does not make 80 %."""

    SUM = "sum"
    MEAN = "avg"
    MAX = "max"
    MIN = "min"


class Provenance(StrEnum):
    """How we know that a series exists as described."""

    SEEN = "seen"  # on a page captured from a running vLLM, or on our own
    SOURCE = "source"  # read in vLLM's source or release notes, never run by us


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric family, as a scrape shows it: counters with `_total` (but for DCGM's), histograms without `_bucket`.

    since: first vLLM release that has it; until: first release that no longer has it; None: not known, or still there.
    needs: the flag or feature without which a running engine does not show it; empty: shown by default.
    formerly: older names of the same quantity; a question about this metric also finds them.
    native: whether a histogram is exposed as a native one too, for a Prometheus that asks for it: one series without
    `le`. Raises ValueError for a name or release that cannot be."""

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
    needs: str = ""
    evidence: Provenance = Provenance.SEEN
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no Prometheus metric name")
        if self.kind is Kind.COUNTER and not self.name.endswith("_total") and not self.name.startswith(_FIELD):
            raise ValueError(f"{self.name}: a counter is exposed with _total")
        for release in filter(None, (self.since, self.until)):
            if not _RELEASE.fullmatch(release):
                raise ValueError(f"{self.name}: {release!r} is no release; write it like 0.20 or 0.10.2")

    @property
    def names(self) -> tuple[str, ...]:
        """This name first, then the older ones."""
        return (self.name, *self.formerly)

    @property
    def samples(self) -> tuple[str, ...]:
        """The sample names that a scrape holds for this family, older names included."""
        parts = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum"), Kind.SUMMARY: ("_count", "_sum")}.get(self.kind, ("",))
        parts += ("",) if self.native else ()
        return tuple(name + part for name in self.names for part in parts)

    def lives_in(self, release: str) -> bool:
        """Whether a release of vLLM has this family under its present name; unknown bounds count as yes."""
        return (self.since is None or key(self.since) <= key(release)) and (
            self.until is None or key(release) < key(self.until)
        )


def key(release: str) -> tuple[int, ...]:
    """A release as numbers that sort: '0.10.2' after '0.9'. Suffixes such as '+cpu' or '.post2' are ignored."""
    found = re.match(r"\d+(?:\.\d+)*", release)
    if not found:
        raise ValueError(f"{release!r} is no release; write it like 0.20 or 0.10.2")
    numbers = [int(part) for part in found[0].split(".")]
    return (*numbers, *[0] * (3 - len(numbers)))
