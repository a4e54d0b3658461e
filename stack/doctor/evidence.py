"""What a diagnosis rests on: figures of a model, of each of its engines, and of what its clients saw. Pure.

Invariant: what was not measured is None or empty, never 0. Seconds, tokens and requests; ratios are 0 to 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporters.statistics import quantile

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution: of a histogram's growth (buckets: bound and how many up to it), or of values that are known one
    by one."""

    count: float
    total: float
    buckets: tuple[tuple[float, float], ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        known = tuple(values)
        return cls(len(known), sum(known), values=known) if known else None

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def mean_of_time(self) -> float:
        """Return the mean weighted by length: of the value that a moment falls into. Each bucket stands at its
        middle."""
        if self.values:
            weighted = [(value, 1.0) for value in self.values]
        else:
            bounds = [0.0, *(bound for bound, _ in self.buckets)]
            counts = [
                upto - under
                for (_, upto), under in zip(self.buckets, [0.0, *(upto for _, upto in self.buckets)], strict=False)
            ]
            weighted = [
                (low if high == INFINITY else (low + high) / 2, count)
                for low, high, count in zip(bounds[:-1], bounds[1:], counts, strict=True)
            ]
        whole = sum(value * count for value, count in weighted)
        return sum(value * value * count for value, count in weighted) / whole if whole else self.mean

    @property
    def most(self) -> float:
        """The largest, or the bound that it is below."""
        return max(self.values) if self.values else self._read(100)

    def at(self, percent: int) -> float:
        """A percentile, read from buckets as PromQL does. Below the first bound nothing is known but the mean, which
        then stands in for it."""
        if self.values:
            return quantile(self.values, percent / 100)
        return min(self._read(percent), self.mean) if self.within_first(percent) else self._read(percent)

    def at_most(self, percent: int) -> float:
        """The percentile, or the first bound where it lies below that."""
        return self.buckets[0][0] if self.within_first(percent) else self.at(percent)

    def within_first(self, percent: int) -> bool:
        """Whether it lies in the first bucket, where a percentile is a guess."""
        return bool(self.buckets) and self.buckets[0][1] >= percent / 100 * self.buckets[-1][1]

    def above(self, limit: float) -> float:
        """Share of what is larger than a limit, 0 to 1; of buckets as if each were filled evenly."""
        if self.values:
            return sum(value > limit for value in self.values) / len(self.values)
        low, under, everything = 0.0, 0.0, self.buckets[-1][1]
        for bound, upto in self.buckets:
            if limit <= bound:
                part = 0.0 if bound == INFINITY else (limit - low) / (bound - low)
                return 1 - (under + part * (upto - under)) / everything
            low, under = bound, upto
        return 0.0

    def around(self, percent: int) -> tuple[float, float] | None:
        """The bounds of the bucket that holds a percentile, where the upper one is twice the lower or more; the figure
        itself is then a guess.

        In the first bucket the lower one is 0, above the last finite bound the upper one infinity."""
        rank, low = percent / 100 * self.buckets[-1][1] if self.buckets else INFINITY, 0.0
        for bound, upto in self.buckets:
            if upto >= rank:
                return (low, bound) if 2 * low <= bound else None
            low = bound
        return None

    def _read(self, percent: int) -> float:
        rank, low, under = percent / 100 * self.buckets[-1][1], 0.0, 0.0
        for bound, upto in self.buckets:
            if upto >= rank:
                return low if bound == INFINITY else min(bound, low + (bound - low) * (rank - under) / (upto - under))
            low, under = bound, upto
        return low


@dataclass(frozen=True, slots=True)
class Gauge:
    """At the scrapes of the time: the least, the mean and the most. looks: at how many, where that is known."""

    lowest: float
    mean: float
    highest: float
    looks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Of a model or of one engine. begun: requests that got a first token; ended: with a last one; finished: by how.
    lengths in tokens.

    between_tokens: of every gap; per_token: of every request, its mean. crowded: what runs while others wait.
    caching: whether prefix caching is on. http: answers of the API by class of their status. still_s: seconds without
    progress up to the end, although there was work; 0 where work goes on or there is none. silent_s: seconds since the
    last page that was answered. queue_rise: how many more wait at the end than at the beginning. steps: those of the
    engine that gave at least one token."""

    seconds: float
    begun: float | None = None
    ended: float | None = None
    finished: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    lookups: float | None = None
    hits: float | None = None
    preemptions: float | None = None
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    rejections: Mapping[str, float] = field(default_factory=dict)
    http: Mapping[str, float] = field(default_factory=dict)
    ttft: Spread | None = None
    between_tokens: Spread | None = None
    per_token: Spread | None = None
    e2e: Spread | None = None
    queue: Spread | None = None
    prefill: Spread | None = None
    decode: Spread | None = None
    prompt_length: Spread | None = None
    answer_length: Spread | None = None
    running: Gauge | None = None
    waiting: Gauge | None = None
    crowded: Gauge | None = None
    deferred: Gauge | None = None
    kv: Gauge | None = None
    caching: bool | None = None
    still_s: float | None = None
    silent_s: float | None = None
    queue_rise: float | None = None
    steps: float | None = None

    @property
    def requests(self) -> float:
        """How many the figures of requests rest on."""
        return max(self.begun or 0.0, self.ended or 0.0)

    @property
    def work(self) -> float:
        """Everything that shows that somebody asked for something."""
        gauges = sum(gauge.highest for gauge in (self.running, self.waiting) if gauge)
        return gauges + self.requests + sum(self.finished.values()) + sum(self.rejections.values()) + self.tokens

    @property
    def tokens(self) -> float:
        return (self.prompt_tokens or 0.0) + (self.generation_tokens or 0.0)

    @property
    def hit_ratio(self) -> float | None:
        return self.hits / self.lookups if self.lookups and self.hits is not None else None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def shares(self) -> Mapping[str, float]:
        """How the time of the requests that ended is divided between queue, prefill and decode; empty where one of them
        is not known."""
        parts = {"queue": self.queue, "prefill": self.prefill, "decode": self.decode}
        known = {name: spread.total for name, spread in parts.items() if spread}
        whole = sum(known.values())
        return {name: total / whole for name, total in known.items()} if len(known) == len(parts) and whole > 0 else {}

    @property
    def hangups(self) -> tuple[float, float] | None:
        """(sure, likely) how many clients left: requests that began and neither ended nor run. vLLM counts no client
        disconnect as such, so this is told
        from its two histograms: sure takes all that run for requests that began meanwhile, likely only as many as came
        and went at most. Where requests are preempted, some that began wait again."""
        if self.begun is None or self.ended is None or self.running is None:
            return None
        held = [self.running, *([self.waiting] if self.preemptions and self.waiting else [])]
        most, least = sum(gauge.highest for gauge in held), sum(gauge.lowest for gauge in held)
        return self.begun - self.ended - most, self.begun - self.ended - (most - least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """What those who asked saw. outcomes, reasons, teams: how many requests; refused: of each team. Times of answers
    that ended well. source: who tells it."""

    source: str
    outcomes: Mapping[str, float]
    reasons: Mapping[str, float] = field(default_factory=dict)
    teams: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, float] = field(default_factory=dict)
    ttft: Spread | None = None
    tpot: Spread | None = None
    queue: Spread | None = None

    @property
    def requests(self) -> float:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayEvidence:
    """What the gateway itself shows. teams: requests in each, that wait or run, at most. lag: of its event loop. only:
    whether all that it runs is at the engines that were looked at."""

    waiting: Gauge | None = None
    running: Gauge | None = None
    slots: Gauge | None = None
    slots_limit: Gauge | None = None
    teams: Mapping[str, float] = field(default_factory=dict)
    lag: Spread | None = None
    only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvidence:
    """All that is known of one model. logged: whether a request log was given. notes: what to bear in mind when it is
    read."""

    model: str
    source: str
    whole: EngineSnapshot
    engines: Mapping[str, EngineSnapshot]
    clients: Clients | None = None
    gateway: GatewayEvidence | None = None
    logged: bool = False
    notes: tuple[str, ...] = ()
