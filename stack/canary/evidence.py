"""Evidence on a canary, minute by minute: mean log-ratios of latencies in blocks, and errors as a coin.

Pure: requests and minutes come in, intervals go out; no clock and no file. Invariant: everything is a sum, so that the
state of a week is as small as that of an hour, and the same requests give the same evidence however often the
controller was started anew.

Method: docs/internals/sequential-test.md. A block is a minute, or as many as it takes until both variants have
`block_requests` in it: its value is the canary's mean logarithm less that of the others, which has no bias however
unequal the shares are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from exporters.statistics import LEAST_LOOKS, CountSpread, SequentialSeries, coin_evidence
from stack.gateway.policy import Canary
from stack.tuning.comparison import ComparedMetric, Finding, Verdict, margin_text, unreadable_answers, within_margin
from stack.tuning.samples import RequestSample
from stack.tuning.series import LIVE_METRICS

BATCH = 30  # blocks whose mean is one value where neighbours are too much alike
MOST_ALIKE = 0.8  # correlation of neighbouring blocks
ALIKE = 0.5  # scale of the mixture for intervals that should be narrow around 0
RECENT = 5  # minutes of the error guard
LEAST_ERRORS, LEAST_MINUTES = 5, 3
ASKED = 0.2  # of the canary's requests that must have a metric, or it is not waited for
METRICS = len(LIVE_METRICS[:3]) + 1  # that share alpha: three latencies, and errors

_TTFT, _TPOT, _E2E = LIVE_METRICS[:3]


def _unstreamed(sample: RequestSample) -> float | None:
    """Return the time of an answer without a stream, which has no other."""
    value: float | None = _E2E.of(sample) if sample.ttft_ms is None else None
    return value


VALUES: dict[str, tuple[ComparedMetric, Callable[[RequestSample], float | None]]] = {
    _TTFT.metric.figure: (_TTFT.metric, _TTFT.of),
    _TPOT.metric.figure: (_TPOT.metric, _TPOT.of),
    _E2E.metric.figure: (_E2E.metric, _unstreamed),
}
ERRORS = next(live.metric for live in LIVE_METRICS if live.metric.figure == "error_ratio")


class LogSums(msgspec.Struct):
    """Number and total of logarithms: of the canary, and of the others."""

    canary: int = 0
    canary_total: float = 0.0
    other: int = 0
    other_total: float = 0.0

    def add(self, more: LogSums) -> None:
        self.canary += more.canary
        self.canary_total += more.canary_total
        self.other += more.other
        self.other_total += more.other_total

    @property
    def ratio(self) -> float:
        """Return the mean logarithm of the canary less that of the others."""
        return self.canary_total / self.canary - self.other_total / self.other


class CanaryMinute(msgspec.Struct):
    """Requests that ended in one block_s. start_s: unix seconds. requests, errors: of the canary, and of the others;
    rejections and clients that left are neither. unreadable: answers that the gateway could not read."""

    start_s: float
    requests: tuple[int, int] = (0, 0)
    errors: tuple[int, int] = (0, 0)
    sums: dict[str, LogSums] = {}
    unreadable: tuple[int, int] = (0, 0)

    def add(self, sample: RequestSample, canary: bool) -> None:
        """Count a request."""
        if sample.outcome in ("rejected", "client_abort"):
            return
        failed = sample.outcome not in ("ok", None)
        of_canary, of_others = self.requests
        bad_canary, bad_others = self.errors
        self.requests = of_canary + canary, of_others + (not canary)
        self.errors = bad_canary + (failed and canary), bad_others + (failed and not canary)
        unread_canary, unread_others = self.unreadable
        self.unreadable = (
            unread_canary + (sample.unreadable and canary),
            unread_others + (sample.unreadable and not canary),
        )
        for figure, (_, value_of) in VALUES.items():
            if (value := value_of(sample)) is not None:
                sums, log = self.sums.setdefault(figure, LogSums()), math.log(max(value, 1e-3))
                sums.add(LogSums(1, log) if canary else LogSums(0, 0.0, 1, log))


class MetricEvidence(msgspec.Struct):
    """Blocks of one latency. all: its requests so far. open: the block that has too few yet. batches: means of 30
    blocks."""

    all: LogSums = msgspec.field(default_factory=LogSums)
    open: LogSums = msgspec.field(default_factory=LogSums)
    blocks: SequentialSeries = SequentialSeries()
    batches: SequentialSeries = SequentialSeries()
    batch: float = 0.0

    def add(self, sums: LogSums, least: int) -> None:
        """Add a minute; close the block if both variants have `least` requests in it."""
        self.all.add(sums)
        self.open.add(sums)
        if min(self.open.canary, self.open.other) < least:
            return
        ratio = self.open.ratio
        self.open, self.blocks, self.batch = LogSums(), self.blocks.plus(ratio), self.batch + ratio
        if self.blocks.n % BATCH == 0:
            self.batches, self.batch = self.batches.plus(self.batch / BATCH), 0.0

    @property
    def alike(self) -> bool:
        """Return whether neighbouring blocks are so much alike that batches are compared."""
        return self.blocks.n > 0 and self.blocks.correlation > MOST_ALIKE

    def interval(self, alpha: float, scale: float = 1.0) -> tuple[float, float] | None:
        return (self.batches if self.alike else self.blocks).interval(alpha, scale)


class ErrorEvidence(msgspec.Struct):
    """Errors as a coin: whether an error is the canary's, by its share of the requests.

    Errors come in bursts, so they are divided by their index of dispersion, the largest so far of either variant. past:
    logarithm of the evidence at earlier shares; the rest is of the present one."""

    spread: tuple[CountSpread, CountSpread] = (CountSpread(), CountSpread())
    dispersion: float = 1.0
    past: float = 0.0
    expected: float = 0.0
    seen: tuple[int, int] = (0, 0)
    requests: tuple[int, int] = (0, 0)
    errors: tuple[int, int] = (0, 0)

    def add(self, minute: CanaryMinute) -> None:
        self.requests = self.requests[0] + minute.requests[0], self.requests[1] + minute.requests[1]
        self.errors = self.errors[0] + minute.errors[0], self.errors[1] + minute.errors[1]

    def spreads(self, minute: CanaryMinute) -> None:
        """Note how errors come, warm-up included."""
        canary, others = self.spread
        self.spread = canary.plus(minute.errors[0]), others.plus(minute.errors[1])
        self.dispersion = max(self.dispersion, *(each.dispersion for each in self.spread))

    def at_another_share(self) -> None:
        """Begin a coin with another chance; the product of both is still evidence."""
        self.past += self._present()
        self.expected += sum(self.errors) * self._chance()
        self.seen, self.requests, self.errors = self.total, (0, 0), (0, 0)

    @property
    def total(self) -> tuple[int, int]:
        """Return all errors, of the canary and of the others."""
        return self.seen[0] + self.errors[0], self.seen[1] + self.errors[1]

    def log_evidence(self) -> float:
        """Return the logarithm of the evidence that the canary has more errors than its share; 0 if it has fewer, and
        until a few minutes have shown how errors come."""
        if self.spread[0].n < LEAST_LOOKS:
            return 0.0
        more = self.total[0] > self.expected + sum(self.errors) * self._chance()
        return max(self.past + self._present(), 0.0) if more else 0.0

    def _chance(self) -> float:
        return self.requests[0] / sum(self.requests) if all(self.requests) else 0.0

    def _present(self) -> float:
        chance = self._chance()
        if not chance:
            return 0.0
        return coin_evidence(self.errors[0] / self.dispersion, sum(self.errors) / self.dispersion, chance)


class CanaryEvidence(msgspec.Struct):
    """Everything that is known of a canary. share: number of the present share, from 1; metrics: at this one alone,
    because load, and so latency, change with it. minutes: compared; left_out: of warm-up, or with one variant only.

    recent: requests and errors of the last minutes, warm-up included, for the guard."""

    share: int = 1
    open: CanaryMinute | None = None
    minutes: int = 0
    left_out: int = 0
    requests: tuple[int, int] = (0, 0)
    metrics: dict[str, MetricEvidence] = {}
    errors: ErrorEvidence = msgspec.field(default_factory=ErrorEvidence)
    recent: list[CanaryMinute] = []
    unreadable: tuple[int, int] = (0, 0)

    def add(self, samples: Iterable[RequestSample], policy: Canary, settled_s: float) -> None:
        """Add requests in the order of their ends. settled_s: minutes that start earlier are warm-up."""
        for sample in samples:
            start_s = math.floor(sample.ended_s / policy.block_s) * policy.block_s
            if self.open is None or start_s > self.open.start_s:
                self.close(policy, settled_s)
                self.open = CanaryMinute(start_s)
            self.open.add(sample, sample.variant == policy.variant)

    def at_another_share(self) -> None:
        """Begin anew with the latencies; errors go on."""
        self.share += 1
        self.metrics = {}
        self.errors.at_another_share()

    def close(self, policy: Canary, settled_s: float, until_s: float = math.inf) -> bool:
        """Close the open minute if it ended by `until_s`; return whether it did."""
        minute = self.open
        if minute is None or minute.start_s + policy.block_s > until_s:
            return False
        self.open = None
        self.recent = [*self.recent, CanaryMinute(minute.start_s, minute.requests, minute.errors)][-RECENT:]
        self.errors.spreads(minute)
        if minute.start_s < settled_s or not all(minute.requests):
            self.left_out += 1
            return True
        self.minutes += 1
        self.requests = self.requests[0] + minute.requests[0], self.requests[1] + minute.requests[1]
        self.unreadable = self.unreadable[0] + minute.unreadable[0], self.unreadable[1] + minute.unreadable[1]
        for figure, sums in minute.sums.items():
            self.metrics.setdefault(figure, MetricEvidence()).add(sums, policy.block_requests)
        self.errors.add(minute)
        return True

    def failing(self, policy: Canary) -> str | None:
        """Return the guard's sentence if the canary fails far more than is allowed, and than the others do.

        In three of the last minutes, so that one burst is not enough; how bursty errors are, the others show."""
        (requests, others), (errors, other_errors) = (
            [sum(getattr(minute, what)[side] for minute in self.recent) for side in (0, 1)]
            for what in ("requests", "errors")
        )
        ratio, usual = errors / max(requests, 1), other_errors / max(others, 1)
        minutes = sum(minute.errors[0] > 0 for minute in self.recent)
        few = minutes < LEAST_MINUTES or errors / self.errors.spread[1].dispersion < LEAST_ERRORS
        if few or ratio <= max(policy.max_error_ratio, 2 * usual):
            return None
        return f"{errors} of {requests} requests failed ({ratio:.1%}; others: {usual:.1%})"


class MetricAssessment(NamedTuple):
    """A finding, and the worst change that its interval holds, as a ratio (None: unknown). required: the canary's
    requests have this metric, so that a verdict needs it."""

    finding: Finding
    worst: float | None = None
    required: bool = False


def assess(evidence: CanaryEvidence, policy: Canary) -> list[MetricAssessment]:
    """Return what may be said of each metric now, at whatever time it is asked.

    alpha is divided by the metrics, and for latencies by the shares at which they are compared."""
    alpha = policy.alpha / METRICS
    found = []
    for figure, (metric, _) in VALUES.items():
        if (measured := evidence.metrics.get(figure)) is not None:
            required = measured.all.canary >= ASKED * evidence.errors.requests[0]
            level = alpha / max(len(policy.steps), evidence.share)
            found.append(_latency(replace(metric, margin=policy.margin), measured, level)._replace(required=required))
    a, b = ((evidence.unreadable[side], evidence.requests[side]) for side in (1, 0))
    return [*found, *map(MetricAssessment, (_errors(evidence, alpha), *unreadable_answers(a, b)))]


def _latency(metric: ComparedMetric, evidence: MetricEvidence, alpha: float) -> MetricAssessment:
    count = evidence.blocks.n, evidence.blocks.n
    interval, narrow = evidence.interval(alpha), evidence.interval(alpha, ALIKE)
    if interval is None or narrow is None or interval[1] > 700:
        wait = f"neighbouring blocks are too much alike, so batches of {BATCH} are compared" if evidence.alike else ""
        return MetricAssessment(Finding(metric, why=wait or f"too few blocks: {count[0]}", runs=count))
    effect, (low, high) = math.exp(evidence.blocks.mean), map(math.exp, interval)
    a = math.exp(evidence.all.other_total / evidence.all.other)
    found = Finding(metric, a, a * effect, effect, low, high, why="not clear", runs=count)
    if within_margin(replace(found, low=_exp(narrow[0]), high=_exp(narrow[1]))):
        found = replace(found, verdict="equivalent", why=f"within {margin_text(metric)}")
    elif low > 1 or high < 1:
        verdict: Verdict = "worse" if low > 1 else "better"
        found = replace(found, verdict=verdict, why="the interval holds no equality")
    return MetricAssessment(found, _exp(narrow[1]))


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf


def _errors(evidence: CanaryEvidence, alpha: float) -> Finding:
    (canary, others), (bad_canary, bad_others) = evidence.requests, evidence.errors.total
    if not (canary and others):
        return Finding(ERRORS, why="too few requests")
    a, b = bad_others / others, bad_canary / canary
    said = f"{bad_canary} of {canary:,} requests failed, {bad_others} of {others:,} of the others"
    found = Finding(ERRORS, a, b, b - a, why=said, runs=(evidence.minutes, evidence.minutes))
    return replace(found, verdict="worse") if evidence.errors.log_evidence() >= -math.log(alpha) else found
