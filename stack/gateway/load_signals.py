"""Concurrency limits and health of engines, derived from their metrics.

Pure: pages, samples and times come in. Invariant: figures only ever take away from capacity.slots, and only while they
are fresh. llm-d's flow control takes an old figure for a full engine; here it counts for nothing, since a missed scrape
says more of the scrape than of the engine and must not halve a healthy fleet. A pool without any figures is a pool with
static slots, and its queue is bounded all the same.

What waits inside an engine is what we sent beyond its --max-num-seqs or its cache. A few are worth having there, so
that a place in its batch is
taken as soon as it is free: that many is capacity.waiting. All others wait here, where bands and teams have a say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from exporters.catalogue import vllm
from exporters.engine.page_values import finders, numbers
from stack.gateway.policy import Capacity

# Additive increase, multiplicative decrease: many small steps up, few large ones down, so that the way out of trouble
# is the short one.
LOWER = 3, 4  # of what is in flight, with every bad sample: less than half is left after three
RAISE = 1, 20  # of capacity.slots and at least 1, with every calm sample: from none to all of them with twenty
SLOW_TO_GO = 2  # bad answers of an engine in a row: one may be a hiccup
# failed connections in a row to a service that nobody probes, and how long it is left alone
SLOW_TO_PAUSE, PAUSE_S = 3, 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one engine. at: when the answer came, on the gateway's clock. kv_usage: 0 to 1.

    waiting, kv_usage: of its worst data-parallel rank, each of which has a queue and a cache of its own. preempted: of
    all ranks since the engine started; None where the page does not say."""

    at: float
    waiting: float
    kv_usage: float
    preempted: float | None = None


def read(page: bytes, at: float) -> Sample | None:
    """An engine's /metrics page; None where it does not show the figures, or something that is no number in their
    place."""
    page = b"\n" + page
    try:
        waiting, kv_usage, preempted = numbers(page, *_WAITING), numbers(page, *_KV_USAGE), numbers(page, *_PREEMPTIONS)
    except ValueError:
        return None
    if not waiting or not kv_usage or not all(map(math.isfinite, (*waiting, *kv_usage, *preempted))):
        return None
    return Sample(at, max(waiting), max(kv_usage), sum(preempted) if preempted else None)


# Those that do not wait for room wait for an adapter or for KV from elsewhere; fewer slots would not help them.
_WAITING = finders(vllm.NUM_REQUESTS_WAITING_BY_REASON, r'\{(?>.*?reason="capacity").*\}') + finders(
    vllm.NUM_REQUESTS_WAITING
)
_KV_USAGE = finders(vllm.KV_CACHE_USAGE)
_PREEMPTIONS = finders(vllm.NUM_PREEMPTIONS)


def troubled(sample: Sample, before: Sample | None, capacity: Capacity) -> bool:
    """Return whether an engine has more than it can hold: it queues, its cache is full, or it threw out work that it
    had begun.

    before: its last sample, None where that is unknown or old; a total of preemptions says something only in
    comparison."""
    former = None if before is None else before.preempted
    rising = former is not None and sample.preempted is not None and sample.preempted > former
    return sample.waiting > capacity.waiting or sample.kv_usage > capacity.kv_usage or rising


@dataclass(frozen=True, slots=True)
class Slots:
    """Number of requests that may be at the engines at once. Begins with `Slots.full`, goes on with `after`.

    seen: the latest fresh sample of each engine. bad: those whose latest is bad. lowered, moved: when samples last
    lowered the slots, or moved them either way."""

    capacity: Capacity
    slots: int
    seen: Mapping[str, Sample] = field(default_factory=dict)
    bad: frozenset[str] = frozenset()
    lowered: float = -math.inf
    moved: float = -math.inf

    @classmethod
    def full(cls, capacity: Capacity) -> Slots:
        return cls(capacity, capacity.slots)

    def after(self, samples: Mapping[str, Sample], in_flight: int, now: float) -> Slots:
        """In view of the latest sample of each engine, with so many requests there now. A sample that was seen before
        changes nothing.

        The worst engine counts. Of several, only one that was seen since they were last lowered lowers them again, so
        that twenty engines that report in turn do so no faster than one; and likewise up."""
        fresh = {name: sample for name, sample in samples.items() if now - sample.at <= self.capacity.stale_s}
        if not fresh:
            return Slots.full(self.capacity)
        new = {name for name, sample in fresh.items() if name not in self.seen or sample.at > self.seen[name].at}
        worse = {name for name in new if troubled(fresh[name], self.seen.get(name), self.capacity)}
        bad = frozenset(worse | (self.bad & fresh.keys() - new))
        kept = replace(self, seen=fresh, bad=bad)
        at = max(sample.at for sample in fresh.values())
        if self._seen_since(self.lowered, worse) and (fewer := self._fewer(in_flight)) < self.slots:
            return replace(kept, slots=fewer, lowered=at, moved=at)
        if not bad and self._seen_since(self.moved, new) and (more := self._more()) > self.slots:
            return replace(kept, slots=more, moved=at)
        return kept

    def _seen_since(self, moment: float, names: set[str]) -> bool:
        """Return whether any of these had been seen at that moment or later; if there was no such moment, that is all
        of them."""
        return any((self.seen[name].at if name in self.seen else -math.inf) >= moment for name in names)

    def _fewer(self, in_flight: int) -> int:
        """From what is in flight and not from the limit: slots that nobody uses are not what troubles the engine."""
        times, of = LOWER
        return max(min(self.capacity.min_slots, self.capacity.slots), min(self.slots, in_flight) * times // of)

    def _more(self) -> int:
        times, of = RAISE
        return min(self.capacity.slots, self.slots + -(-self.capacity.slots * times // of))


@dataclass(frozen=True, slots=True)
class Health:
    """State of an upstream, healthy as long as nothing is known. So many failures in a row close it for pause_s.

    until: closed before that time, also without end, which means until it answers."""

    patience: int
    pause_s: float
    failures: int = 0
    until: float = -math.inf

    def open(self, now: float) -> bool:
        return now >= self.until

    def worked(self) -> Health:
        return self if not self.failures else replace(self, failures=0, until=-math.inf)

    def failed(self, now: float, *, for_sure: bool = False) -> Health:
        """for_sure: a failure that needs no second one, such as a connection that was refused."""
        failures = self.patience if for_sure else self.failures + 1
        return replace(self, failures=failures, until=now + self.pause_s if failures >= self.patience else self.until)


ENGINE = Health(SLOW_TO_GO, math.inf)  # is probed, so that its return is seen
# is not: after the pause the next request is the probe, and one more failure closes it again
API = Health(SLOW_TO_PAUSE, PAUSE_S)
