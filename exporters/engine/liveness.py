"""State machine of an engine's liveness. Pure: evidence and times come in.

Three independent sides prove progress: values of /metrics that move with the engine's steps, output that the observer's
own requests receive, and a one-token probe. Invariants: one sign of progress from any side is enough, a silence counts
only while there is work, and an observer that was late itself has seen no silence. Every state has one cause, which
the metric shows as its label."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


class EngineState(StrEnum):
    """State of an engine. Only `hung` asks for a restart."""

    HEALTHY = "healthy"  # has work and makes progress
    IDLE = "idle"  # has no work
    SLOW = "slow"  # progress has paused, or some requests get none; still in rotation
    SUSPECT = "suspect"  # no progress for longer than usual, or back and not yet proven
    HUNG = "hung"  # no progress for longer than any planned work takes
    LOADING = "loading"  # accepts no connection: starting, or gone
    DRAINING = "draining"  # asleep or paused on purpose
    SCALING = "scaling"  # elastic expert parallelism answers 503, also on retired ranks


class Cause(StrEnum):
    """Evidence for a state; a bounded label."""

    UNREAD = "unread"  # nothing is known yet
    STEPS = "steps"  # values of /metrics moved
    OUTPUT = "output"  # own requests received output
    PROBE = "probe"  # the probe was answered
    WORK = "work"  # work has just arrived
    NO_WORK = "no_work"
    STEPS_STOPPED = "steps_stopped"  # /metrics shows work, and no value moves
    OUTPUT_STOPPED = "output_stopped"  # /metrics shows no work, but own requests receive nothing
    REQUESTS_LOST = "requests_lost"  # the engine works, but knows fewer requests than it was sent
    BUSY = "busy"  # silent, but for no longer than what it was sent may keep it busy
    KV_FETCH = "kv_fetch"  # all its requests wait for the KV cache of another engine
    PROBE_SILENT = "probe_silent"  # an idle engine does not answer the probe
    API_SILENT = "api_silent"  # connections are accepted and not answered
    RECOVERING = "recovering"  # progress again, not yet proven
    OBSERVER_LATE = "observer_late"  # the observer was late itself; its silence counts for nothing
    REFUSED = "refused"
    ASLEEP = "asleep"
    PAUSED = "paused"
    ELASTIC_EP = "elastic_ep"
    RETIRED_RANK = "retired_rank"


class Endpoint(StrEnum):
    """Result of the latest scrape."""

    UNREAD = "unread"  # none has ended yet, or it shows no values of vLLM
    READ = "read"
    SILENT = "silent"  # accepted, and no answer in time
    REFUSED = "refused"
    SCALING = "scaling"  # 503, and /is_scaling_elastic_ep says so
    RETIRED = "retired"  # 503, and /is_scaling_elastic_ep says that nothing scales


@dataclass(frozen=True, slots=True)
class StepValues:
    """Part of /metrics that a step moves. counters: in any form that can be compared. running, waiting: requests.
    fetching: those of the waiting ones that another engine keeps waiting, for their KV cache. produced: any token since
    the engine started. asleep: sleep mode."""

    counters: tuple[bytes, ...]
    running: float = 0.0
    waiting: float = 0.0
    fetching: float = 0.0
    produced: bool = True
    asleep: bool = False

    def fetches_for(self, requests: int) -> bool:
        """Return whether all work waits for another engine. requests: that the engine was sent; one that it does not
        show is none of those that wait."""
        return self.running == 0 and 0 < self.waiting <= self.fetching and requests <= self.waiting


@dataclass(frozen=True, slots=True)
class Evidence:
    """One look at an engine. Times are on the observer's monotonic clock.

    steps, steps_at: of the latest readable scrape, and its time. requests: own requests there. outputs: pieces of
    output that own requests have received so far. silent_s: longest time for which one of them has received none.
    prefill_tokens: the longest prompt among those without a first token. busy_s: time for which what it was sent may
    keep its API server from answering anybody. probes: whether the engine can be probed.
    probe_since: when the open probe was sent. probe_answers: answered so far. paused: the engine says so. planned: the
    observer knows of work that blocks the engine, such as loading an adapter. late: a timer of the observer was late
    since the latest look."""

    at: float
    endpoint: Endpoint = Endpoint.READ
    steps: StepValues | None = None
    steps_at: float = math.inf
    requests: int = 0
    outputs: int = 0
    silent_s: float = 0.0
    prefill_tokens: int = 0
    busy_s: float = 0.0
    probes: bool = False
    probe_since: float | None = None
    probe_answers: int = 0
    paused: bool = False
    planned: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Times in seconds without progress.

    slow_s, suspect_s, out_s, hung_s: until the state of that name, and until the engine leaves rotation. unprobed_s: in
    place of hung_s where no probe confirms it. idle_out_s: until an idle engine with a silent probe leaves rotation.
    planned_s: in place of hung_s before the first token of a process and during planned work, because compilation and
    loading take minutes; also the most that busy_s adds to any of these. probe_s, probe_hung_s: how long a probe must
    be open to confirm `out` and `hung`. idle_probe_s: interval of the probes of an idle engine. gap_s: two looks
    further apart than this are no watch. proofs: looks with progress until an engine is back. prefill_tokens_per_s:
    slowest prefill, which extends hung_s: one step of it shows no sign until it ends. lost_s: until a request unknown
    to the engine counts as lost."""

    slow_s: float = 3.0
    suspect_s: float = 5.0
    out_s: float = 10.0
    hung_s: float = 30.0
    unprobed_s: float = 45.0
    idle_out_s: float = 5.0
    planned_s: float = 600.0
    probe_s: float = 4.0
    probe_hung_s: float = 15.0
    idle_probe_s: float = 7.0
    gap_s: float = 3.0
    proofs: int = 2
    prefill_tokens_per_s: float = 1000.0
    lost_s: float = 60.0


DEFAULT_LIMITS = LivenessLimits()
_PLANNED = {
    Endpoint.REFUSED: (EngineState.LOADING, Cause.REFUSED),
    Endpoint.SCALING: (EngineState.SCALING, Cause.ELASTIC_EP),
    Endpoint.RETIRED: (EngineState.SCALING, Cause.RETIRED_RANK),
}
_STEADY = frozenset((EngineState.HEALTHY, EngineState.IDLE, EngineState.SLOW))


@dataclass(frozen=True, slots=True)
class Liveness:
    """Liveness of one engine. Begins with `Liveness.unknown`, goes on with `after`.

    since: begin of the state. at: latest look. quiet_since: since when there has been work without progress. moved_at:
    latest progress. proofs: looks with progress since it left rotation. out: not in rotation for lack of progress.
    counted: the values of the latest look, against which progress shows."""

    state: EngineState
    cause: Cause
    since: float
    at: float
    quiet_since: float
    moved_at: float
    proofs: int = 0
    out: bool = False
    counted: tuple[StepValues | None, int, int] = (None, 0, 0)

    @classmethod
    def unknown(cls, at: float) -> Liveness:
        return cls(EngineState.IDLE, Cause.UNREAD, at, at, at, at)

    @property
    def in_rotation(self) -> bool:
        """Return whether the engine should get requests. One that refuses connections is a matter of
        connecting."""
        return not self.out and self.state not in (EngineState.DRAINING, EngineState.SCALING)

    @property
    def live(self) -> bool:
        """Return False only for an engine that a restart would help."""
        return self.state is not EngineState.HUNG

    def quiet_s(self) -> float:
        """Return the seconds of work without progress."""
        return self.at - self.quiet_since

    def wants_probe(self, now: float, last_probe: float, limits: LivenessLimits = DEFAULT_LIMITS) -> bool:
        """Return whether a probe would settle something: the other sides are silent, or the engine has to prove itself.

        last_probe: when the last one was sent."""
        if self.state is EngineState.IDLE or self.cause is Cause.KV_FETCH:
            return now - max(last_probe, self.moved_at) >= limits.idle_probe_s
        return self.out or self.state is EngineState.SUSPECT

    def after(self, look: Evidence, limits: LivenessLimits = DEFAULT_LIMITS) -> Liveness:
        """Return the liveness in view of one more look."""
        late = look.late or look.at - self.at > limits.gap_s
        moved = self._moved(look)
        steps = look.steps or self.counted[0]
        seen = replace(self, at=look.at, counted=(steps, look.outputs, look.probe_answers))
        if moved is not None:
            return seen._progress(moved, look, steps, limits)
        if (planned := _PLANNED.get(look.endpoint)) is not None:
            return seen._planned(*planned)
        if late:
            # the time since the latest look counts for nothing; a silence that was watched before it does
            return replace(seen, cause=Cause.OBSERVER_LATE, quiet_since=self.quiet_since + look.at - self.at)
        # A probe that was open during the sleep is answered before the next scrape.
        asleep = steps is not None and steps.asleep and look.steps_at > self.moved_at
        if look.endpoint is not Endpoint.SILENT and (look.paused or asleep):
            return seen._planned(EngineState.DRAINING, Cause.PAUSED if look.paused else Cause.ASLEEP)
        return seen._silence(look, steps, limits)

    def _moved(self, look: Evidence) -> Cause | None:
        """Return the side that has made progress since the latest look."""
        steps, outputs, answers = self.counted
        if look.outputs > outputs:
            return Cause.OUTPUT
        if look.probe_answers > answers:
            return Cause.PROBE
        fresh = look.endpoint is Endpoint.READ and look.steps is not None and not look.steps.asleep
        return Cause.STEPS if fresh and steps is not None and look.steps != steps else None

    def _progress(self, cause: Cause, look: Evidence, steps: StepValues | None, limits: LivenessLimits) -> Liveness:
        kept, proofs = replace(self, quiet_since=look.at, moved_at=look.at), self.proofs + 1
        if self.out and look.probes and proofs < limits.proofs:
            return replace(kept, proofs=proofs)._become(EngineState.SUSPECT, Cause.RECOVERING)
        lost = look.silent_s >= limits.lost_s and steps is not None and look.requests > steps.running + steps.waiting
        back = replace(kept, proofs=0, out=False)
        if lost:
            return back._become(EngineState.SLOW, Cause.REQUESTS_LOST)
        idle = look.requests == 0 and (steps is None or steps.running + steps.waiting == 0)
        return back._become(*((EngineState.IDLE, Cause.NO_WORK) if idle else (EngineState.HEALTHY, cause)))

    def _planned(self, state: EngineState, cause: Cause) -> Liveness:
        return replace(self, quiet_since=self.at, proofs=0, out=False)._become(state, cause)

    def _silence(self, look: Evidence, steps: StepValues | None, limits: LivenessLimits) -> Liveness:
        cause = self._silent_side(look, steps, limits)
        if cause is Cause.NO_WORK:  # nothing to be late with
            idle = replace(self, quiet_since=look.at)
            return idle if self.out else idle._become(EngineState.IDLE, cause)
        if cause is Cause.KV_FETCH:
            return self if self.out else self._become(EngineState.SLOW, cause)
        silent = self.quiet_s()
        quiet = silent - min(look.busy_s, limits.planned_s)  # beyond the work that it was sent
        if self._confirms(look, limits.probe_hung_s) and quiet >= self._hung_after(look, steps, limits):
            return replace(self, out=True, proofs=0)._become(EngineState.HUNG, cause)
        out_s = limits.idle_out_s if cause is Cause.PROBE_SILENT else limits.out_s
        if quiet >= out_s and self._confirms(look, limits.probe_s):
            hung = self.state is EngineState.HUNG
            return replace(self, out=True, proofs=0)._become(EngineState.HUNG if hung else EngineState.SUSPECT, cause)
        if self.out:
            return self
        if quiet >= limits.suspect_s:
            return self._become(EngineState.SUSPECT, cause)
        if silent >= limits.slow_s:
            return self._become(EngineState.SLOW, cause if quiet >= limits.slow_s else Cause.BUSY)
        return self if self.state in _STEADY - {EngineState.IDLE} else self._become(EngineState.HEALTHY, Cause.WORK)

    @staticmethod
    def _silent_side(look: Evidence, steps: StepValues | None, limits: LivenessLimits) -> Cause:
        """Return the side whose silence counts. None does for NO_WORK and KV_FETCH."""
        # Without a probe, waiting alone proves nothing: a decode engine waits for the KV of another engine.
        work = 0.0 if steps is None else steps.running + (steps.waiting if look.probes else 0.0)
        if look.endpoint is Endpoint.SILENT:
            return Cause.API_SILENT
        if steps is not None and steps.fetches_for(look.requests):
            probed = look.probe_since is not None and look.at - look.probe_since >= limits.idle_out_s
            return Cause.PROBE_SILENT if probed else Cause.KV_FETCH
        if work > 0:
            return Cause.STEPS_STOPPED
        if look.requests > 0:
            return Cause.OUTPUT_STOPPED
        return Cause.NO_WORK if look.probe_since is None else Cause.PROBE_SILENT

    @staticmethod
    def _confirms(look: Evidence, probe_s: float) -> bool:
        """Return whether a probe confirms the silence; none is needed where nothing is answered at all."""
        if look.endpoint is Endpoint.SILENT or not look.probes:
            return True
        return look.probe_since is not None and look.at - look.probe_since >= probe_s

    @staticmethod
    def _hung_after(look: Evidence, steps: StepValues | None, limits: LivenessLimits) -> float:
        if look.planned or (steps is not None and not steps.produced and look.endpoint is not Endpoint.SILENT):
            return limits.planned_s
        silent = look.endpoint is Endpoint.SILENT
        hung_s = limits.hung_s if look.probes or silent else limits.unprobed_s
        return hung_s + look.prefill_tokens / limits.prefill_tokens_per_s

    def _become(self, state: EngineState, cause: Cause) -> Liveness:
        return replace(self, state=state, cause=cause, since=self.since if state is self.state else self.at)
