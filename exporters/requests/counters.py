"""Counters and histograms of request records, per team and model. Pure: no clock, no file.

Invariant: a counter never decreases. A team or model with its own series keeps it; beyond the limit all are counted
as `__other__`. Missing values are not counted, never taken as 0."""

from __future__ import annotations

import contextlib
import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import sub
from typing import Any, cast, get_args

from exporters.catalogue import bounds, sidecar
from exporters.exposition import Exemplar, Sample, exemplar
from exporters.native_histogram import BucketCounts, observed_ms
from exporters.requests.bounded_names import MAX_NAME, UNKNOWN_MODEL, BoundedNames
from exporters.requests.counter_rows import (
    E2E,
    ENGINE_QUEUE,
    FIGURES,
    MS,
    TTFT,
    CounterRow,
    read_row,
    row_encoder,
    row_samples,
)
from exporters.requests.record import UNKNOWN_TEAM, UNREADABLE, Outcome, RequestRecord, estimated_tokens, unix_seconds
from exporters.requests.work import FinishedRequest, Work

FINISH_REASONS = frozenset({"stop", "length", "abort", "error", "rejected", "tool_calls", "repetition"})
OUTCOMES: tuple[str, ...] = get_args(Outcome)
GOOD = ("ok", "unknown")
REASONS_LIMIT = 40  # a gateway has few fixed reasons; other logs must not create unbounded series
EXEMPLARS_OF = 16  # per batch and row, the newest records considered for exemplars
MANY = 20
# W3C trace context; other trace ids have no target and could break the exposition
_TRACE_ID = re.compile("[0-9a-fA-F]{32}")
_UNFINISHED = ("abort", "error", "rejected")  # finish reasons of a request that the engine did not count
# routes without generated tokens
_ASIDE = ("/models", "/tokenize", "/detokenize", "/load_lora_adapter", "/unload_lora_adapter", "/health", "/version")


# stored row, and the observations since it was last stored, see native_histogram
Change = tuple[bytes, bytes]


@dataclass(slots=True)
class _Finished:
    """Expected engine counts of a row's requests: see Finished."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    missing: int = 0
    cached_tokens: int = 0
    unreadable: int = 0


class _Series:
    """Live counters of one row."""

    __slots__ = (
        "abandoned", "changed", "counts", "estimated", "exemplars", "finished", "finishes", "last", "lookups", "model",
        "negative",
        "observed", "outcomes", "reasons", "sums_ms", "team", "tokens", "unreadable",
    )  # fmt: skip

    def __init__(self, model: str, team: str) -> None:
        self.model, self.team, self.changed = model, team, False
        # a series created at its first failure hides it from rate()
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.reasons: dict[str, dict[str, int]] = {}
        self.finishes: dict[str, int] = {}
        self.unreadable: dict[str, int] = {}
        self.tokens: list[int | None] = [None, None, None]
        self.lookups: list[int | None] = [None, None]
        self.finished = _Finished()
        # prompt and completion tokens of requests without usage
        self.estimated: list[int | None] = [None, None]
        # prompt and completion tokens of work unfinished by the engine, or with an unknown end
        self.abandoned = [0, 0]
        self.counts = [[0] * (len(limits) + 1) for limits in MS]
        self.sums_ms = [0.0] * len(MS)
        self.negative = 0
        # per bucket: newest trace, its value and time
        self.last: list[dict[int, tuple[str, float, str | None]]] = [{} for _ in MS]
        # cached exemplars
        self.exemplars: list[list[Exemplar | None]] = [[None] * len(counts) for counts in self.counts]
        self.observed = array("H")  # since the row was stored; the store sums native buckets

    def add(self, texts: int, abandoned: int, alike: Sequence[RequestRecord]) -> None:
        """Add records column by column.

        texts: requested per prompt; 0: no comparison with an engine. abandoned: the same for aborted requests; 0:
        these ended normally, or no observed engine worked on them."""
        prompt, cached, completion, *measured, engine_ttft = zip(*map(FIGURES, alike), strict=True)
        sums = [_sum(tokens) for tokens in (prompt, cached, completion)]
        for at, tokens in enumerate(sums):
            if tokens is not None:
                self.tokens[at] = (self.tokens[at] or 0) + tokens
        missing = prompt.count(None)
        if texts:
            self.finished.missing += missing
            self.finished.prompt_tokens += texts * (sums[0] or 0)
            self.finished.cached_tokens += texts * (sums[1] or 0)
            known = completion if not missing else [c for p, c in zip(prompt, completion, strict=True) if p is not None]
            self.finished.completion_tokens += _sum(known) or 0
        if abandoned or missing or None in completion:
            self._estimate(alike, texts, abandoned)
        first = max(0, len(alike) - EXEMPLARS_OF)
        traced = [
            (at, r.trace_id, r.ts)
            for at, r in enumerate(alike[first:], first)
            if r.trace_id and _TRACE_ID.fullmatch(r.trace_id)
        ]
        times = (*measured, self.overheads(measured[TTFT], measured[ENGINE_QUEUE], engine_ttft))
        self.observed += observed_ms([self.observe(at, values, traced) for at, values in enumerate(times)])

    def _estimate(self, alike: Sequence[RequestRecord], texts: int, abandoned: int) -> None:
        """Count estimated tokens of records without usage, and those of aborted requests as work of the team.

        Each of several texts counts with its prompt. Finished requests with usage (texts) are already counted."""
        for r in alike:
            estimated = estimated_tokens(r)
            for at, tokens in enumerate(estimated):
                if tokens is not None:
                    self.estimated[at] = (self.estimated[at] or 0) + tokens
            if abandoned and not (texts and r.prompt_tokens is not None):
                self.abandoned[0] += abandoned * (r.prompt_tokens or estimated[0] or 0)
                self.abandoned[1] += r.completion_tokens or estimated[1] or 0

    def observe(
        self, at: int, times: Sequence[float | None], traced: Iterable[tuple[int, str, str | None]]
    ) -> Sequence[float]:
        """Observe one time of each record, None where missing; return the present ones.

        traced: records with a trace: index, trace id, and time."""
        values = cast("Sequence[float]", times)
        try:
            total = sum(values)  # raises on None, which is faster than a search
        except TypeError:
            if not (values := [value for value in times if value is not None]):
                return ()
            total = sum(values)
        self.sums_ms[at] += total
        limits, counts = MS[at], self.counts[at]
        if len(values) > MANY:  # sorted: one search per bound instead of one per value
            ordered, before = sorted(values), 0
            for bucket, limit in enumerate(limits):
                if (below := bisect_right(ordered, limit, before)) > before:
                    counts[bucket] += below - before
                    before = below
            counts[-1] += len(ordered) - before
        else:
            for bucket in map(bisect_left, repeat(limits), values):
                counts[bucket] += 1
        for which, trace, ts in traced:
            if (value := times[which]) is not None:
                self.last[at][bisect_left(limits, value)] = trace, value, ts
        return values

    def overheads(
        self, ttft: Sequence[float | None], queue: Sequence[float | None], engine: Sequence[float | None]
    ) -> Sequence[float | None]:
        """Return TTFT overhead outside the engine: TTFT minus the engine's queue and prefill time, per request.

        Negative values indicate different clocks or definitions and are only counted."""
        with contextlib.suppress(TypeError):  # some have none
            overs = list(map(sub, map(sub, ttft, queue), engine))
            if min(overs) >= 0:
                return overs
        overheads = [
            None if t is None or q is None or e is None else t - q - e
            for t, q, e in zip(ttft, queue, engine, strict=True)
        ]
        self.negative += sum(over is not None and over < 0 for over in overheads)
        return [over if over is not None and over >= 0 else None for over in overheads]


class RequestCounters:
    """All counters of request logs.

    elsewhere: upstreams that are not observed, such as a paid API. Their requests are traffic, but not part of
    `finished` and `work`, which are compared with engines and shared GPUs."""

    def __init__(self, teams: BoundedNames, models: BoundedNames, elsewhere: Collection[str] = ()) -> None:
        self.teams = teams
        self.models = models
        self._elsewhere = frozenset(elsewhere)
        self._reasons = BoundedNames((), REASONS_LIMIT)
        self._cells: dict[tuple[str, str], _Series] = {}
        # spelled as in records; only names with their own series, so it stays bounded
        self._by_name: dict[tuple[str | None, str | None], _Series] = {}
        self._changed: list[_Series] = []

    def add(self, record: RequestRecord) -> None:
        self.add_all((record,))

    def add_all(self, records: Sequence[RequestRecord]) -> None:
        """Count records. Those that differ only in values are counted together, column by column.

        A log may have grown for a night."""
        kinds: defaultdict[tuple[Any, ...], list[RequestRecord]] = defaultdict(list)
        for r in records:
            kinds[
                r.model,
                r.team,
                r.outcome,
                r.finish_reason,
                r.upstream,
                r.route,
                r.n,
                r.prompts,
                r.cache_hit,
                r.reason,
                r.unreadable,
            ].append(r)
        groups: dict[tuple[_Series, int, int], list[RequestRecord]] = {}
        # Served requests first: they claim the rows of their models, before failures in the same batch.
        for kind, alike in sorted(kinds.items(), key=lambda item: (item[0][2] or "unknown") not in GOOD):
            group = self._count(len(alike), *kind)
            if group in groups:
                groups[group] += alike
            else:
                groups[group] = alike
        for (cell, texts, abandoned), alike in groups.items():
            cell.add(texts, abandoned, alike)

    def _count(
        self,
        count: int,
        model: str | None,
        team: str | None,
        outcome: str | None,
        finish: str | None,
        upstream: str | None,
        route: str | None,
        texts: int | None,
        prompts: int | None,
        hit: bool | None,
        reason: str | None,
        unreadable: str | None,
    ) -> tuple[_Series, int, int]:
        """Count one kind. Return where its values belong.

        The row; the number of texts per prompt that a compared engine finished, or 0; and the number that such an
        engine may have worked on in vain, or 0."""
        outcome = outcome or "unknown"
        cell = self._by_name.get((model, team)) or self._cell(model, team, outcome, count)
        if not cell.changed:
            cell.changed = True
            self._changed.append(cell)
        cell.outcomes[outcome] = cell.outcomes.get(outcome, 0) + count
        if outcome not in GOOD:
            name = self._reasons.fold((reason or "unknown")[:MAX_NAME])
            reasons = cell.reasons.setdefault(outcome, {})
            reasons[name] = reasons.get(name, 0) + count
        if finish is not None:
            name = finish if finish in FINISH_REASONS else "other"
            cell.finishes[name] = cell.finishes.get(name, 0) + count
        if hit is not None:
            cell.lookups[not hit] = (cell.lookups[not hit] or 0) + count
        # After the last token a client disconnect leaves a request that the engine finished and counted.
        whole = finish not in _UNFINISHED and (outcome in GOOD or (outcome == "client_abort" and finish is not None))
        each = (texts or 1) if self._is_compared(upstream, route) else 0
        abandoned = 0 if outcome in GOOD or outcome == "rejected" else each
        if unreadable is not None:
            name = unreadable if unreadable in UNREADABLE else "other"
            cell.unreadable[name] = cell.unreadable.get(name, 0) + count
            if outcome == "upstream_error" and name != "redirect":
                cell.finished.unreadable += each * (prompts or 1) * count
        if not whole:
            return cell, 0, abandoned
        cell.finished.requests += each * (prompts or 1) * count
        return cell, each, abandoned

    def changed(self) -> dict[tuple[str, str], Change]:
        """Return rows changed since the last call, by model and team, as bytes; `read_row` decodes them."""
        rows = {
            (cell.model, cell.team): (row_encoder.encode(_row(cell)), cell.observed.tobytes()) for cell in self._changed
        }
        for cell in self._changed:
            cell.changed = False
            del cell.observed[:]
        self._changed.clear()
        return rows

    def restore(self, stored: bytes, native: BucketCounts) -> bytes:
        """Continue from a stored row and its native buckets; return the row as kept. Raises msgspec.MsgspecError.

        A histogram restarts in both forms if its bounds changed or the counts of the forms differ: a release without
        native buckets wrote it, and Prometheus rejects a histogram whose buckets do not sum to its count."""
        row = read_row(stored)
        cell = self._cells[row.model, row.team] = _Series(row.model, row.team)
        self.models.seat(row.model)
        self.teams.seat(row.team)
        for reasons in row.reasons.values():
            for reason in reasons:
                self._reasons.seat(reason)
        cell.outcomes |= row.outcomes
        cell.reasons, cell.finishes, cell.tokens, cell.lookups = (
            row.reasons,
            row.finishes,
            list(row.tokens),
            list(row.lookups),
        )
        cell.finished, cell.negative = _Finished(*row.finished, row.finished_unreadable), row.overhead_negative
        cell.unreadable = row.unreadable
        cell.estimated, cell.abandoned = list(row.estimated), list(row.abandoned)
        for at, fresh in enumerate(cell.counts):
            counts = row.counts[at] if at < len(row.counts) else []
            if len(counts) == len(fresh) and sum(counts) == native.total(at):
                cell.counts[at], cell.sums_ms[at] = counts, row.sums_ms[at]
            else:
                native.forget(at)
        return row_encoder.encode(_row(cell))

    def finished(self) -> dict[str, FinishedRequest]:
        """Return expected engine counts by model name in the log."""
        found: dict[str, FinishedRequest] = {}
        for (model, _), cell in self._cells.items():
            mine, before = cell.finished, found.get(model, FinishedRequest())
            found[model] = FinishedRequest(
                before.requests + mine.requests,
                before.prompt_tokens + mine.prompt_tokens,
                before.completion_tokens + mine.completion_tokens,
                before.missing + mine.missing,
                before.unreadable + mine.unreadable,
            )
        return found

    def work(self) -> dict[tuple[str, str], Work]:
        """Return tokens finished by engines, by model and team, counted as an engine counts them."""
        return {
            k: Work(c.finished.prompt_tokens, c.finished.cached_tokens, c.finished.completion_tokens)
            for k, c in self._cells.items()
        }

    def abandoned(self) -> dict[tuple[str, str], Work]:
        """Return tokens of aborted requests by model and team, with estimates where usage is missing."""
        return {k: Work(c.abandoned[0], 0, c.abandoned[1]) for k, c in self._cells.items()}

    def e2e_p99_s(self) -> float | None:
        """Return the bucket bound of the 99th percentile of all request durations; None without durations."""
        counts = [sum(column) for column in zip(*(cell.counts[E2E] for cell in self._cells.values()), strict=True)]
        enough = 0.99 * sum(counts)
        return next(
            (
                bound
                for bound, below in zip((*bounds.OUR_REQUEST_S, math.inf), accumulate(counts), strict=False)
                if 0 < enough <= below
            ),
            None,
        )

    def exemplars(self, model: str, team: str) -> Sequence[Sequence[Exemplar | None]]:
        """Return the newest traced observation of each bucket, for each histogram of a row.

        Texts are cached: most are the same at the next scrape."""
        cell = self._cells[model, team]
        for texts, last in zip(cell.exemplars, cell.last, strict=True):
            for bucket, (trace, value, ts) in last.items():
                texts[bucket] = exemplar(trace, value / 1000, None if ts is None else unix_seconds(ts))
            last.clear()
        return cell.exemplars

    def samples(self) -> Iterator[Sample]:
        """Yield current values, stored or not, without native buckets."""
        for key, cell in self._cells.items():
            yield from row_samples(_row(cell), self.exemplars(*key))
        yield from self.table()

    def table(self) -> Iterator[Sample]:
        """Yield the usage of the name tables."""
        yield sidecar.TEAMS, {}, len(self.teams)
        yield sidecar.TEAMS_OVERFLOW, {}, self.teams.folded
        yield sidecar.MODELS_OVERFLOW, {}, self.models.folded

    def _cell(self, model: str | None, team: str | None, outcome: str, count: int) -> _Series:
        # Clients may send any model name; only a served one gets its own series.
        folded = (
            self.models.fold((model or UNKNOWN_MODEL)[:MAX_NAME], may_claim=outcome in GOOD, times=count),
            self.teams.fold((team or UNKNOWN_TEAM)[:MAX_NAME], times=count),
        )
        cell = self._cells.get(folded)
        if cell is None:
            cell = self._cells[folded] = _Series(*folded)
        if folded == (model or UNKNOWN_MODEL, team or UNKNOWN_TEAM):
            self._by_name[model, team] = cell
        return cell

    def _is_compared(self, upstream: str | None, route: str | None) -> bool:
        """Return True if an observed engine counted this request."""
        return upstream not in self._elsewhere and not (route and route.endswith(_ASIDE))


def _row(cell: _Series) -> CounterRow:
    finished = cell.finished
    return CounterRow(
        model=cell.model,
        team=cell.team,
        outcomes=cell.outcomes,
        reasons=cell.reasons,
        finishes=cell.finishes,
        tokens=(cell.tokens[0], cell.tokens[1], cell.tokens[2]),
        lookups=(cell.lookups[0], cell.lookups[1]),
        finished=(
            finished.requests,
            finished.prompt_tokens,
            finished.completion_tokens,
            finished.missing,
            finished.cached_tokens,
        ),
        counts=tuple(cell.counts),
        sums_ms=tuple(cell.sums_ms),
        overhead_negative=cell.negative,
        estimated=(cell.estimated[0], cell.estimated[1]),
        abandoned=(cell.abandoned[0], cell.abandoned[1]),
        unreadable=cell.unreadable,
        finished_unreadable=finished.unreadable,
    )


def _sum(values: Sequence[Any]) -> Any:
    """Return the sum of known values; None if there are none."""
    try:
        return sum(values)
    except TypeError:
        known = [value for value in values if value is not None]
        return sum(known) if known else None
