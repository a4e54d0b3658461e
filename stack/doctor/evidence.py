"""Evidence of a diagnosis: values of a model, of each of its engines, and of its clients. Pure.

Invariant: what was not measured is None or empty, never 0. Seconds, tokens and requests; ratios are 0 to 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporters.engine.liveness import Cause, EngineState
from exporters.statistics import quantile

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution: growth of a histogram (buckets: bound and cumulative count), or single values."""

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
        """Largest value, or the bound above it."""
        return max(self.values) if self.values else self._read(100)

    def at(self, percent: int) -> float:
        """Return a percentile, read from buckets as PromQL does. Below the first bound only the mean is known, which
        replaces it."""
        if self.values:
            return quantile(self.values, percent / 100)
        return min(self._read(percent), self.mean) if self.within_first(percent) else self._read(percent)

    def at_most(self, percent: int) -> float:
        """Return the percentile, or the first bound where it lies below that."""
        return self.buckets[0][0] if self.within_first(percent) else self.at(percent)

    def within_first(self, percent: int) -> bool:
        """Return True if a percentile lies in the first bucket, where it is a guess."""
        return bool(self.buckets) and self.buckets[0][1] >= percent / 100 * self.buckets[-1][1]

    def above(self, limit: float) -> float:
        """Return the share above a limit, 0 to 1, with values spread evenly within a bucket."""
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
        """Return the bounds of the bucket of a percentile, where the upper one is twice the lower or more; the
        percentile is then a guess.

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
    """Lowest, mean and highest value over the scrapes. looks: their number, where known."""

    lowest: float
    mean: float
    highest: float
    looks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Values of a model or of one engine. begun: requests with a first token; ended: with a last one; finished: by
    reason. Lengths in tokens.

    between_tokens: of every gap; per_token: of every request, its mean. crowded: running requests while others wait.
    caching: prefix caching is on. states: state and evidence at the end by engine, as the gateway or the sidecar shows
    them. http: answers of the API by class of their status. still_s: seconds without progress
    up to the end, although there was work; 0 where work goes on or there is none. silent_s: seconds since the last
    answered scrape. queue_rise: growth of the number of waiting requests. steps: those of the engine that gave at least
    one token."""

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
    states: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    still_s: float | None = None
    silent_s: float | None = None
    queue_rise: float | None = None
    steps: float | None = None

    @property
    def requests(self) -> float:
        """Number of requests behind the values."""
        return max(self.begun or 0.0, self.ended or 0.0)

    @property
    def work(self) -> float:
        """Sum of everything that shows that there were requests."""
        gauges = sum(gauge.highest for gauge in (self.running, self.waiting) if gauge)
        return gauges + self.requests + sum(self.finished.values()) + sum(self.rejections.values()) + self.tokens

    @property
    def tokens(self) -> float:
        return (self.prompt_tokens or 0.0) + (self.generation_tokens or 0.0)

    @property
    def hung(self) -> tuple[str, ...]:
        """Return the evidence for each engine in state hung."""
        return tuple(evidence for state, evidence in self.states.values() if state == EngineState.HUNG)

    @property
    def waits_on_purpose(self) -> bool:
        """Return True if every engine sleeps, is paused, scales, or waits for another one."""
        planned = (EngineState.DRAINING, EngineState.SCALING)
        return bool(self.states) and all(
            state in planned or evidence == Cause.KV_FETCH for state, evidence in self.states.values()
        )

    @property
    def hit_ratio(self) -> float | None:
        return self.hits / self.lookups if self.lookups and self.hits is not None else None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def shares(self) -> Mapping[str, float]:
        """Shares of queue, prefill and decode in the time of the requests that ended; empty where one of them is
        unknown."""
        parts = {"queue": self.queue, "prefill": self.prefill, "decode": self.decode}
        known = {name: spread.total for name, spread in parts.items() if spread}
        whole = sum(known.values())
        return {name: total / whole for name, total in known.items()} if len(known) == len(parts) and whole > 0 else {}

    @property
    def disconnects(self) -> tuple[float, float] | None:
        """Number of client disconnects (certain, likely): requests that began and neither ended nor run. vLLM does not
        count client disconnects, so this comes from its two histograms: `certain` takes all running requests for ones
        that began meanwhile, `likely` only as many as came and went at most. Where requests are preempted, some that
        began wait again."""
        if self.begun is None or self.ended is None or self.running is None:
            return None
        held = [self.running, *([self.waiting] if self.preemptions and self.waiting else [])]
        most, least = sum(gauge.highest for gauge in held), sum(gauge.lowest for gauge in held)
        return self.begun - self.ended - most, self.begun - self.ended - (most - least)


@dataclass(frozen=True, slots=True)
class AdapterEvidence:
    """Complete answers of one LoRA adapter, or of the base model. ttft: single values in seconds; prompt_tokens: their
    prompts."""

    ttft: Spread
    prompt_tokens: Spread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Evidence from clients. outcomes, reasons, teams: number of requests; refused: by team. Times are of complete
    answers. adapters: by name, None for the base model; known from a log only. source: for people."""

    source: str
    outcomes: Mapping[str, float]
    reasons: Mapping[str, float] = field(default_factory=dict)
    teams: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, float] = field(default_factory=dict)
    ttft: Spread | None = None
    tpot: Spread | None = None
    queue: Spread | None = None
    adapters: Mapping[str | None, AdapterEvidence] = field(default_factory=dict)

    @property
    def requests(self) -> float:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayEvidence:
    """Evidence from the gateway. teams: waiting and running requests of each, at most. lag: of its event loop. only:
    all that it runs is at these engines."""

    waiting: Gauge | None = None
    running: Gauge | None = None
    slots: Gauge | None = None
    slots_limit: Gauge | None = None
    teams: Mapping[str, float] = field(default_factory=dict)
    lag: Spread | None = None
    only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvidence:
    """Evidence of one model. logged: a request log was given. notes: caveats."""

    model: str
    source: str
    whole: EngineSnapshot
    engines: Mapping[str, EngineSnapshot]
    clients: Clients | None = None
    gateway: GatewayEvidence | None = None
    logged: bool = False
    notes: tuple[str, ...] = ()
