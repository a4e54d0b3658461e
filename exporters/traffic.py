"""Request records -> counters and histograms per team and model. Pure: no clock, no file.

Law: a counter never falls. A team or model that once had series of its own keeps them; who comes after the table is full is counted
together as `__other__`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import get_args

from exporters.catalogue import bounds, ours
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution, Sample
from exporters.request_log import UNKNOWN_TEAM, Outcome, RequestRecord, ended_at

OTHER = "__other__"
UNKNOWN_MODEL = "__unknown__"
FINISH_REASONS = frozenset({"stop", "length", "abort", "error", "rejected", "tool_calls", "repetition"})
OUTCOMES: tuple[str, ...] = get_args(Outcome)
REASONS_LIMIT = 40  # a gateway's vocabulary is fixed and small; a log that is not must not make series without end
TRACE_ID_CHARS = 32  # W3C trace context; what else a log may call a trace leads nowhere
_MAX_NAME = 120


class BoundedNames:
    """At most `limit` names get series of their own: configured ones first, then the first seen. Membership is sticky."""

    def __init__(self, configured: Iterable[str] = (), limit: int = 50) -> None:
        self._members = dict.fromkeys(configured)
        self._limit = max(limit, len(self._members))
        self.folded = 0  # how many times a name had to be counted as __other__

    def __len__(self) -> int:
        return len(self._members)

    def fold(self, name: str, may_claim: bool = True) -> str:
        """The name to count under. may_claim: whether a new name may take a seat of its own."""
        if name in self._members:
            return name
        if name.startswith("__"):  # reserved names are always there and cannot be claimed
            return name if name in (UNKNOWN_TEAM, UNKNOWN_MODEL) else OTHER
        if may_claim and len(self._members) < self._limit:
            self._members[name] = None
            return name
        self.folded += 1
        return OTHER


class Traffic:
    """All that is counted from request logs."""

    def __init__(self, teams: BoundedNames, models: BoundedNames) -> None:
        self.teams = teams
        self.models = models
        self._reasons = BoundedNames((), REASONS_LIMIT)
        self._seen: set[tuple[str, str]] = set()
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._distributions: dict[tuple[str, str, str], Distribution] = {}
        self._metrics: dict[str, Metric] = {metric.name: metric for metric in ours.REQUEST_TRAFFIC}

    def add(self, record: RequestRecord) -> None:
        """Count one record. What it does not say is not counted, never taken for 0."""
        outcome = record.outcome or "unknown"
        # A client can ask for any model name; only one that an engine served gets series of its own.
        model = self.models.fold((record.model or UNKNOWN_MODEL)[:_MAX_NAME], may_claim=outcome in ("ok", "unknown"))
        team = self.teams.fold((record.team or UNKNOWN_TEAM)[:_MAX_NAME])
        who = {"model_name": model, "team": team}
        if (model, team) not in self._seen:  # a series that is born at its first failure hides that failure from rate()
            self._seen.add((model, team))
            for each in OUTCOMES:
                self._count(ours.REQUESTS, 0, **who, outcome=each)
        self._count(ours.REQUESTS, 1, **who, outcome=outcome)
        if outcome not in ("ok", "unknown"):
            self._count(ours.REASONS, 1, **who, outcome=outcome, reason=self._reasons.fold((record.reason or "unknown")[:_MAX_NAME]))
        if record.finish_reason is not None:
            self._count(ours.FINISHES, 1, **who, finish_reason=record.finish_reason if record.finish_reason in FINISH_REASONS else "other")
        for kind, tokens in (("prompt", record.prompt_tokens), ("cached", record.cached_tokens), ("completion", record.completion_tokens)):
            if tokens is not None:
                self._count(ours.TOKENS, tokens, **who, type=kind)
        if record.cache_hit is not None:
            self._count(ours.CACHE_LOOKUPS, 1, **who, result="hit" if record.cache_hit else "miss")
        trace_id = record.trace_id if record.trace_id and len(record.trace_id) == TRACE_ID_CHARS else None
        for metric, milliseconds, limits in (
            (ours.TTFT, record.ttft_ms, bounds.TTFT_S),
            (ours.TPOT, record.tpot_ms, bounds.OUR_TPOT_S),
            (ours.E2E, record.e2e_ms, bounds.OUR_REQUEST_S),
            (ours.QUEUE, record.queue_ms, bounds.OUR_REQUEST_S),
            (ours.ENGINE_QUEUE, record.engine_queue_ms, bounds.OUR_REQUEST_S),
        ):
            if milliseconds is not None:
                self._distribution(metric, model, team, limits).observe(milliseconds / 1000, trace_id, ended_at(record))

    def samples(self) -> Iterator[Sample]:
        for (name, labels), value in self._counts.items():
            yield self._metrics[name], dict(labels), value
        for (name, model, team), distribution in self._distributions.items():
            yield self._metrics[name], {"model_name": model, "team": team}, distribution
        yield ours.TEAMS, {}, len(self.teams)
        yield ours.TEAMS_FOLDED, {}, self.teams.folded
        yield ours.MODELS_FOLDED, {}, self.models.folded

    def _count(self, metric: Metric, amount: int, **labels: str) -> None:
        self._counts[metric.name, tuple(sorted(labels.items()))] += amount

    def _distribution(self, metric: Metric, model: str, team: str, limits: tuple[float, ...]) -> Distribution:
        at = (metric.name, model, team)
        found = self._distributions.get(at)
        if found is None:
            found = self._distributions[at] = Distribution(limits)
        return found
