"""Reconciliation of the request log with the engine, per token. Pure.

Invariant: logged + missing_in_log - extra_in_log + open = engine, for each kind, at every moment; recorded
missing_in_log and extra_in_log are certain.

A scrape and a log cannot be read at the same instant, so each scrape has two states of the log. With gap =
missing_in_log - extra_in_log, E the engines' finished work at the scrape, and L(t) the log's counts at t: E - L(later)
<= gap <= E - L(scrape request).

Upper bound: what was logged at the scrape request had finished before, so it is in E or in no engine. Lower bound: what
had finished at the scrape has its line `later`, so the excess of E over L is in no log. Two values of later are used:

far: a line comes at most `patience` after the engine finished (twice the 99th percentile of e2e, 30 s to an hour:
clients may be slow, but not slower). Holds for each request, and is exact after that long without lines. Under load it
gives little.

near: a line comes on average within a quarter of `delay` (1 s, or more if lines are known to be late). Holds for many:
it is used over at least 30 s and 100 lines, with the smallest difference. So delayed lines never count as missing.

If both bounds meet, the gap is known exactly, and suspicions of restarts, start-up and missing usage are settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from exporters.accounting.reconciled import (
    KINDS,
    NOTHING,
    CoreSnapshot,
    ReconciledEngine,
    ReconciledModel,
    ReconciliationState,
    TokenPair,
)
from exporters.catalogue import reconciled
from exporters.engine.view import EngineTotals, EngineView
from exporters.exposition import Sample
from exporters.requests.work import FinishedRequest

PATIENCE_AT_LEAST_S, PATIENCE_AT_MOST_S = 30.0, 3600.0
DELAY_AT_LEAST_S = 1.0  # typical delay until a request's line is written and read
DELAY_PER_LATENESS = 4.0
NEAR_AT_LEAST_S = 30.0
NEAR_AT_LEAST_LINES = 100
NEAR_LOOKS = 500
LOOKS_APART_S = 1.0  # scrapes of one model's engines this close are one comparison
NAMES_EVERY_S = 60.0
NAMES_TRIES = 10  # failed name requests before the engine is used without names


@dataclass(slots=True)
class _Look:
    """Scrapes of all engines of a model, to compare with the log as it completes.

    complete: every engine responded. at_s: unix seconds, exposed. clock_s: monotonic, for waiting."""

    at_s: float
    clock_s: float
    engine: FinishedRequest
    logged_at_request: FinishedRequest
    complete: bool
    suspecting: set[str]


@dataclass(slots=True)
class _Watch:
    """Scrapes of a model under comparison. Not stored: after a restart new ones come."""

    patience_s: float = PATIENCE_AT_LEAST_S
    delay_s: float = DELAY_AT_LEAST_S
    changed: bool = False
    new: deque[_Look] = field(default_factory=deque)  # for the near comparison
    open: deque[_Look] = field(default_factory=deque)  # for the far one
    # time, E - L, lines of L
    near: deque[tuple[float, FinishedRequest, int]] = field(default_factory=lambda: deque(maxlen=NEAR_LOOKS))
    last: _Look | None = None


@dataclass(slots=True)
class _Naming:
    """Time of an engine's last name request, and the unknown log names for which it was the answer."""

    at_s: float = float("-inf")  # monotonic
    about: frozenset[str] = frozenset()
    failures: int = 0


class Reconciler:
    """Comparison of engines with the logs, per model.

    aliases: name in the log -> model_name of the engine's series; overrides the engines' names. upstreams:
    configured engines; extra lines are recorded only after each has responded. Call `look` for each scrape,
    `on_failure` for each failed one, and `settle` with every new state of the log. Scrapes count after the log was
    first read to its end."""

    def __init__(
        self,
        aliases: Mapping[str, str] | None = None,
        state: ReconciliationState | None = None,
        upstreams: Iterable[str] = (),
        patience_s: float = PATIENCE_AT_LEAST_S,
    ) -> None:
        self.aliases = aliases or {}
        self._patience_s = patience_s
        self._kept = state or ReconciliationState()
        configured = set(upstreams) or set(self._kept.upstreams)
        self._silent = configured
        self._read_s: float | None = None  # monotonic
        self._watches = {name: _Watch() for name in self._kept.models}
        self._naming: dict[str, _Naming] = {}
        for name in set(self._kept.upstreams) - configured:
            self._lost(self._kept.upstreams.pop(name))

    def look(
        self,
        upstream: str,
        view: EngineView,
        asked_s: float,
        logged: Mapping[str, FinishedRequest],
        e2e_p99_s: float | None = None,
        late_s: float | None = None,
        *,
        asked_clock_s: float | None = None,
    ) -> None:
        """Process a scrape. logged: the log's counts at its request, by name in the log.

        asked_s, asked_clock_s: request time in unix seconds and monotonic; None: one clock for both. late_s: mean
        delay of a line after the engine finished, if known."""
        self._take(logged, newest=False)
        clock_s = asked_s if asked_clock_s is None else asked_clock_s
        if self._read_s is None or self._read_s > clock_s:
            return
        self._silent.discard(upstream)
        kept = self._kept.upstreams.get(upstream)
        is_restarted = kept is not None and _is_restarted(kept, view)
        same = None if is_restarted else kept  # last state of the same process
        new_models = self._add_models(view, asked_s, logged)
        self._place()
        if kept is not None and is_restarted:
            self._lost(kept)
            self._naming.pop(upstream, None)
        if view.started_s is not None:
            began_s = view.started_s
        elif kept is not None and is_restarted:
            began_s = kept.looked_s
        else:
            began_s = float("-inf")
        # A series missing once in the same process has not restarted.
        cores = {} if same is None else {name: dict(ranks) for name, ranks in same.cores.items()}
        for (name, rank), core in view.cores.items():
            model = self._kept.models[name]
            before = None if same is None else same.cores.get(name, {}).get(rank)
            if before is None:
                counts_all = name not in new_models and (same is not None or began_s >= model.first_s)
                before = self._first_snapshot(name, core.totals, counts_all)
            grown = core.totals.since(before.totals)
            model.engine = model.engine.plus(
                FinishedRequest(grown.requests, grown.request_prompt_tokens, grown.request_completion_tokens)
            )
            has_work = core.running or core.waiting
            idle = same is not None and not has_work and before.totals == core.totals
            cores.setdefault(name, {})[rank] = _after(model, before, core.totals, idle)
        names = set(cores)
        if kept is not None:
            names |= kept.cores.keys()
        for name in names:
            self._adapt_patience(self._watches[name], e2e_p99_s or 0.0, late_s or 0.0)
        self._kept.upstreams[upstream] = ReconciledEngine(
            looked_s=asked_s,
            started_s=view.started_s,
            cores=cores,
            logged_at_request={name: self._logged_at(name, logged) for name in cores},
            names=kept.names if kept else {},
        )

    def _add_models(self, view: EngineView, asked_s: float, logged: Mapping[str, FinishedRequest]) -> set[str]:
        """Start the reconciliation of the scrape's new models, and return their names."""
        new = {name for name, _ in view.cores} - self._kept.models.keys()
        for name in new:
            self._kept.models[name] = ReconciledModel(first_s=asked_s, skip=dict(logged))
            self._watches[name] = _Watch()
        return new

    def _first_snapshot(self, name: str, totals: EngineTotals, counts_all: bool) -> CoreSnapshot:
        """Return the assumed counts of a core before its first scrape.

        counts_all: everything counted so far is reconciled."""
        if counts_all:
            return CoreSnapshot(EngineTotals())
        self._suspect(name, "start", NOTHING)
        return CoreSnapshot(totals, aborted_from=_unfinished(totals))

    def _adapt_patience(self, watch: _Watch, e2e_p99_s: float, late_s: float) -> None:
        """Adapt the waiting times to the duration of requests and the delay of the log."""
        watch.changed = True
        watch.patience_s = min(PATIENCE_AT_MOST_S, max(self._patience_s, 2 * e2e_p99_s))
        watch.delay_s = min(watch.patience_s, max(DELAY_AT_LEAST_S, DELAY_PER_LATENESS * late_s))

    def on_failure(self, upstream: str) -> None:
        """Process a failed scrape: until the next success no extra line of the engine's models is certain."""
        self._silent.add(upstream)

    def names_due(self, upstream: str, clock_s: float) -> bool:
        """Return True if an engine's names should be requested.

        At first, after a restart, for a new log name, and once a minute."""
        if upstream not in self._kept.upstreams:
            return False
        naming = self._naming.get(upstream, _Naming())
        if 0 < naming.failures < NAMES_TRIES or self._unplaced() - naming.about:
            return True
        return clock_s - naming.at_s >= NAMES_EVERY_S

    def record_names(self, upstream: str, names: Mapping[str, str] | None, clock_s: float) -> None:
        """Record the engine's names for its model (`engine.names`); None: not reported, which may be temporary."""
        kept, naming = self._kept.upstreams.get(upstream), self._naming.setdefault(upstream, _Naming())
        naming.at_s = clock_s
        naming.failures = 0 if names is not None else naming.failures + 1
        if kept and names is not None:
            kept.names = dict(names)
            self._place()
        if names is not None or naming.failures >= NAMES_TRIES:
            naming.about = frozenset(self._unplaced())

    def settle(
        self,
        now_s: float,
        logged: Mapping[str, FinishedRequest],
        at_end: bool,
        clock_s: float | None = None,
        logs_clock_s: float | None = None,
    ) -> None:
        """Process the newest log state and record what became certain. at_end: it was just read to its end.

        clock_s: monotonic clock for waiting, so that a clock set back stalls nothing; None: now_s is used.
        logs_clock_s: time of the log state on that clock, where it is not new; while it stands still, nothing becomes
        certain."""
        clock_s = now_s if clock_s is None else clock_s
        logs_clock_s = clock_s if logs_clock_s is None else logs_clock_s
        self._take(logged, newest=True)
        if at_end and self._read_s is None:
            self._read_s = clock_s
        for name, watch in self._watches.items():
            model = self._kept.models[name]
            if watch.changed and (watch.last is None or clock_s - watch.last.clock_s >= LOOKS_APART_S):
                self._compare(name, model, watch, now_s, clock_s)
            if at_end:
                self._settle(name, model, watch, logs_clock_s)

    def samples(self) -> Iterator[Sample]:
        for name, model in self._kept.models.items():
            who = {"model_name": name}
            booked = model.booked()
            for at, kind in enumerate(KINDS):
                labels = {"kind": kind, **who}
                yield reconciled.LOGGED, labels, model.logged[at]
                yield reconciled.ENGINE, labels, model.engine[at]
                yield reconciled.OPEN, labels, model.engine[at] - model.logged[at] - booked[at]
                yield from (
                    (reconciled.MISSING_IN_LOG, {"cause": cause, **labels}, amounts[at])
                    for cause, amounts in model.missing_in_log.items()
                )
                yield from (
                    (reconciled.EXTRA_IN_LOG, {"cause": cause, **labels}, amounts[at])
                    for cause, amounts in model.extra_in_log.items()
                )
            if model.settled_s is not None:
                yield reconciled.SETTLED, who, model.settled_s
            yield reconciled.NO_USAGE, who, model.logged.missing
            for kind, aborted, unfinished in zip(TokenPair._fields, model.aborted, self.unfinished(name), strict=True):
                yield reconciled.ABORTED, {**who, "type": kind}, aborted
                yield reconciled.UNFINISHED, {**who, "type": kind}, unfinished

    def state(self) -> ReconciliationState:
        """Return the state that outlives the process. Encode it before the next call: it is not a copy."""
        return self._kept

    def aborted(self, model: str) -> TokenPair:
        """Return tokens of aborted requests."""
        return self._kept.models[model].aborted if model in self._kept.models else TokenPair()

    def missing_in_log(self, model: str) -> TokenPair:
        """Return tokens finished by engines that no log has, or has without token counts."""
        if model not in self._kept.models:
            return TokenPair()
        causes = self._kept.models[model].missing_in_log.values()
        return TokenPair(sum(amounts[1] for amounts in causes), sum(amounts[2] for amounts in causes))

    def unfinished(self, model: str) -> TokenPair:
        """Return tokens in flight, or aborted since the engine was last idle."""
        seen = [seen for upstream in self._kept.upstreams.values() for seen in upstream.cores.get(model, {}).values()]
        above = [_above(_unfinished(each.totals), each.idle_from) for each in seen]
        return TokenPair(sum(each.prompt for each in above), sum(each.completion for each in above))

    def _take(self, logged: Mapping[str, FinishedRequest], newest: bool) -> None:
        """Count the log's increase. An outdated state is skipped; a newest one with lower counts restarted."""
        seen = self._kept.seen
        for name, now in logged.items():
            before = seen.get(name, NOTHING)
            if now == before:
                continue
            if now > before:
                seen[name] = now
                if model := self._kept.placed.get(name):
                    self._kept.models[model].logged = self._kept.models[model].logged.plus(now.minus(before))
            elif newest:
                seen[name] = now
        self._place()

    def _unplaced(self) -> set[str]:
        return self._kept.seen.keys() - self._kept.placed.keys()

    def _place(self) -> None:
        """Assign log names that became known to their model, with all counts since its first scrape."""
        for name in self._unplaced():
            model = self._kept.models.get(self._model_of(name))
            if model is not None:
                self._kept.placed[name] = self._model_of(name)
                model.logged = model.logged.plus(self._kept.seen[name].minus(model.skip.pop(name, NOTHING)))

    def _model_of(self, name: str) -> str:
        reported_names = (
            upstream.names[name] for _, upstream in sorted(self._kept.upstreams.items()) if name in upstream.names
        )
        return self.aliases.get(name) or next(reported_names, name)

    def _logged_at(self, model: str, logged: Mapping[str, FinishedRequest]) -> FinishedRequest:
        """Return the log's counts of a model at an earlier state, on the scale of its counter."""
        found = self._kept.models[model].logged
        for name, placed_model in self._kept.placed.items():
            if placed_model == model:
                found = found.minus(self._kept.seen[name].minus(logged.get(name, NOTHING)))
        return found

    def _lost(self, upstream: ReconciledEngine) -> None:
        """Suspect extra lines after an engine restart: work after its last scrape is in no count."""
        for name, logged_at_request in upstream.logged_at_request.items():
            self._suspect(name, "restart", logged_at_request)

    def _suspect(self, name: str, cause: str, since: FinishedRequest) -> None:
        """Suspect later lines to be extra, until a future scrape is settled."""
        suspecting = self._kept.models[name].suspecting
        suspecting[cause] = FinishedRequest._make(map(min, since, suspecting.get(cause, since)))
        for look in self._watches[name].open:
            look.suspecting.discard(cause)

    def _whole(self, model: str) -> bool:
        upstreams = self._kept.upstreams
        return not any(name not in upstreams or model in upstreams[name].cores for name in self._silent)

    def _held(self, model: str) -> bool:
        """Return True if unassigned log names may belong to this model."""
        skip = self._kept.models[model].skip
        open_names = {
            name for name in self._unplaced() if self._kept.seen[name].requests > skip.get(name, NOTHING).requests
        }
        engine_names = [
            name
            for name, upstream in self._kept.upstreams.items()
            if model in upstream.cores and name not in self._silent
        ]
        return any(open_names - self._naming.get(name, _Naming()).about for name in engine_names)

    def _compare(self, name: str, model: ReconciledModel, watch: _Watch, now_s: float, clock_s: float) -> None:
        """Start a comparison, and record extra lines confirmed by two consecutive scrapes."""
        logged_at_request = [
            upstream.logged_at_request[name]
            for upstream in self._kept.upstreams.values()
            if name in upstream.logged_at_request
        ]
        oldest = (
            FinishedRequest._make(map(min, zip(*logged_at_request, strict=True))) if logged_at_request else model.logged
        )
        look = _Look(now_s, clock_s, model.engine, oldest, self._whole(name), set(model.suspecting))
        before, watch.last, watch.changed = watch.last, look, False
        watch.new.append(look)
        watch.open.append(look)
        if before is None or not before.complete or not look.complete or model.suspecting:
            return
        at_most = zip(
            before.engine.minus(before.logged_at_request), look.engine.minus(look.logged_at_request), strict=True
        )
        for kind, (gap, booked) in enumerate(zip(islice(map(max, at_most), len(KINDS)), model.booked(), strict=True)):
            if gap < booked:
                model.book_extra_in_log(kind, booked - gap)

    def _settle(self, name: str, model: ReconciledModel, watch: _Watch, clock_s: float) -> None:
        held = (watch.new or watch.open) and self._held(name)
        while watch.new and clock_s >= watch.new[0].clock_s + watch.delay_s:
            look = watch.new.popleft()
            watch.near.append((look.clock_s, look.engine.minus(model.logged), model.logged.requests))
            if not held:
                self._settle_near(model, watch)
        while watch.open and clock_s >= watch.open[0].clock_s + watch.patience_s + DELAY_AT_LEAST_S:
            look = watch.open.popleft()
            if not held:
                self._settle_far(model, look)

    def _settle_near(self, model: ReconciledModel, watch: _Watch) -> None:
        """Under load: record the engine's minimum excess over the log over many scrapes."""
        near = watch.near
        clock_s, _, lines = near[-1]
        while len(near) > 2 and clock_s - near[1][0] >= NEAR_AT_LEAST_S and lines - near[1][2] >= NEAR_AT_LEAST_LINES:
            near.popleft()
        if clock_s - near[0][0] < NEAR_AT_LEAST_S or lines - near[0][2] < NEAR_AT_LEAST_LINES:
            return
        booked = model.booked()
        least = [min(beyond[kind] for _, beyond, _ in near) - booked[kind] for kind in range(len(KINDS))]
        for kind, amount in enumerate(least):
            if amount > 0 and (least[0] > 0 or model.logged.missing > model.settled_missing):
                model.book_missing_in_log(kind, amount)

    def _settle_far(self, model: ReconciledModel, look: _Look) -> None:
        """After the full patience: no line of work finished at the scrape can come any more."""
        for cause in look.suspecting:
            if (since := model.suspecting.pop(cause, None)) is not None:
                model.suspected[cause] = model.suspected.get(cause, NOTHING).plus(model.logged.minus(since))
        exact = look.complete and not model.suspecting and look.logged_at_request == model.logged
        for kind, (gap, booked) in enumerate(
            zip(look.engine.minus(model.logged)[: len(KINDS)], model.booked(), strict=True)
        ):
            if gap > booked:
                model.book_missing_in_log(kind, gap - booked)
            elif exact and gap < booked:
                model.book_extra_in_log(kind, booked - gap)
        if exact:
            model.settle_exactly()
        if look.complete:
            model.settled_s = look.at_s


def _is_restarted(kept: ReconciledEngine, view: EngineView) -> bool:
    """Return True if the process changed since the last scrape: a newer start, or a decreased counter."""
    if kept.started_s is not None and view.started_s is not None and view.started_s > kept.started_s + 1:
        return True
    return any(
        core.totals.fell(seen.totals)
        for (name, rank), core in view.cores.items()
        if (seen := kept.cores.get(name, {}).get(rank))
    )


def _unfinished(totals: EngineTotals) -> TokenPair:
    return TokenPair(
        totals.prompt_tokens - totals.request_prompt_tokens, totals.completion_tokens - totals.request_completion_tokens
    )


def _above(level: TokenPair, ground: TokenPair) -> TokenPair:
    return TokenPair(max(0, level.prompt - ground.prompt), max(0, level.completion - ground.completion))


def _after(model: ReconciledModel, before: CoreSnapshot, totals: EngineTotals, idle: bool) -> CoreSnapshot:
    """Return the core after a scrape. In an idle core nothing is in flight: its unfinished work was aborted."""
    if not idle:
        return CoreSnapshot(totals, before.idle_from, before.aborted_from)
    level = _unfinished(totals)
    more = _above(level, before.aborted_from)
    model.aborted = TokenPair(model.aborted.prompt + more.prompt, model.aborted.completion + more.completion)
    return CoreSnapshot(totals, level, level)
