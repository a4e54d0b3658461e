"""Controller of a canary: reads the request log, decides, and changes the share or advises to.

Invariant: an act is state -> teams.yaml -> reload -> event -> state, each idempotent; see state.py. Somebody else's
change of the canary in teams.yaml ends the run, and nothing more is changed."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from exporters.events.log import MAX_TEXT, NewEvent
from exporters.requests.duplicates import RecentRequests
from exporters.requests.log_reader import LogReader
from exporters.requests.record import PROBE_TEAM, FieldMap, RequestRecord, ended_at
from exporters.requests.store import LogTotals
from exporters.requests.tail import Tail
from exporters.text import printable
from stack.canary import report
from stack.canary.decision import ENDS, CanaryDecision, CanaryStage, decide
from stack.canary.state import CanaryState, CanaryStep, write_state
from stack.canary.teams_file import TeamsFile, read_teams, write_share
from stack.config import BadConfig
from stack.tuning.annotate import EventLog
from stack.tuning.comparison import percent_text
from stack.tuning.samples import RequestSample, sample_of

LATE_S = 2.0  # after its end, the log of a minute is complete
LINES_BYTES = 8 << 20  # read at once
READ_S = 2.0  # of one look, so that guards are asked while a long log is read
END_WITHIN_S = 60.0  # after which a run is over although its event or report cannot be written
INTERRUPTED = "interrupted"
REFUSED = frozenset(("bad_request", "engine_busy"))  # by an engine: mistakes of clients reach both sides alike

# Sentences of reasons to stop the canary at once. An outside that cannot be asked gives none.
Guard = Callable[[], list[str]]

log = logging.getLogger("vllm_watch.canary")


@dataclass(frozen=True, slots=True)
class Outside:
    """Sources and effects of the controller. clock: unix seconds. steady: a monotonic clock. reload: makes the gateways
    read teams.yaml; None for a controller that only advises. Raises OSError."""

    teams: Path
    logs: tuple[Path, ...]
    state: Path
    report: Path
    events: EventLog
    clock: Callable[[], float]
    steady: Callable[[], float]
    reload: Callable[[], None] | None = None
    guards: Sequence[Guard] = ()


def new_state(file: TeamsFile, now_s: float) -> CanaryState:
    """Return the state of a canary that starts now."""
    return CanaryState(
        str(file.path), file.canary.variant, uuid.uuid4().hex[:8], now_s, now_s, file.canary.share, file.canary,
        file.mark,
    )  # fmt: skip


@dataclass(slots=True)
class CanaryController:
    """One run. `look` is called once a second until it returns True: the run is over."""

    outside: Outside
    state: CanaryState
    _readers: list[LogReader] = field(default_factory=list)
    _names: dict[str | None, str | None] = field(default_factory=dict)
    _read: list[RequestSample] = field(default_factory=list)  # while not all is read
    _said: set[str] = field(default_factory=set)  # at this look
    _said_before: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        window = RecentRequests()
        self._readers = [
            LogReader(Tail(path, since=self.state.positions.get(str(path))), FieldMap(), LogTotals(), window, log)
            for path in self.outside.logs
        ]

    def look(self) -> bool:
        """Read, decide and act once. Errors that may pass are logged and tried again at the next look."""
        self._said_before, self._said = self._said, set()
        try:
            if self.state.done is None:
                self._look()
            return self.state.done is not None and self._closed()
        except (BadConfig, OSError, ValueError) as error:
            self._complain(str(error))
            return False

    def _look(self) -> None:
        state, outside = self.state, self.outside
        exposed = max(state.share, state.pending.share if state.pending else 0.0)
        guards = [sentence for guard in outside.guards for sentence in guard()] if exposed else []
        if state.pending is not None:
            self._finish(self._stopped(state.pending, guards))
        elif not state.steps:
            self._start()
        self._record()
        file, now_s = read_teams(outside.teams), outside.clock()
        if state.done is not None or self._changed_by_others(file, now_s):
            return
        policy, settled_s = state.policy, state.since_s + state.policy.settle_s
        closed, complete = False, self._read_logs(file)
        if complete:
            state.evidence.add(sorted(self._read, key=lambda sample: sample.ended_s), policy, settled_s)
            self._read.clear()
            state.positions = {reader.path: reader.tail.positions() for reader in self._readers}
            closed = state.evidence.close(policy, settled_s, now_s - LATE_S)
        elif not guards:
            return
        stage = CanaryStage(state.share, state.since_s, state.started_s)
        decision = decide(policy, state.evidence, guards, stage, now_s)
        if decision.action != "hold" and self._is_new(decision):
            self._act(decision, now_s)
            self._record()
        elif closed:
            self._save()

    def _stopped(self, step: CanaryStep, guards: Sequence[str]) -> CanaryStep:
        """Return what to do in place of a pending act: where a guard says stop, the share becomes 0."""
        if not guards or step.action not in ("start", "raise"):
            return step
        share = read_teams(self.outside.teams).canary.share
        if share in (step.was, step.share):
            why = printable("; ".join(guards))
            step = CanaryStep(step.number, self.outside.clock(), "roll_back", share, 0.0, why, step.acted)
            self.state.pending = step
            self._save()
        return step

    def _closed(self) -> bool:
        """Record what is left of a run that is over, and return whether nothing is."""
        state = self.state
        self._record()
        if not state.closed:
            try:
                report.write(self.outside.report, state)
                state.closed = True
                self._save()
            except OSError as error:
                self._complain(f"the report cannot be written: {error}")
        if state.closed and state.recorded == len(state.steps):
            return True
        return self.outside.clock() - state.steps[-1].at_s > END_WITHIN_S

    def _start(self) -> None:
        """Begin the run at the first step, or at the share that the canary has."""
        policy, share = self.state.policy, self.state.share
        started = CanaryDecision("start", share or policy.steps[0], f"compared by {policy.block_s:g} s")
        self._act(started, self.state.started_s)

    def _changed_by_others(self, file: TeamsFile, now_s: float) -> bool:
        """End the run if somebody changed the canary; where this only advises, another share is the operator's act."""
        state, share = self.state, file.canary.share
        if file.mark == state.mark and share == state.share:
            return False
        if file.mark != state.mark or self.outside.reload is not None:
            what = "the canary or the upstreams" if file.mark != state.mark else f"canary.share ({share:g})"
            why = f"{file.path}: somebody else changed {what}; this canary ends and changes nothing more"
            state.pending = CanaryStep(len(state.steps), now_s, INTERRUPTED, state.share, share, why)
            self._save()
            self._finish(state.pending)
            return True
        step = CanaryStep(len(state.steps), now_s, "set", state.share, share, "by the operator")
        state.evidence.at_another_share()
        state.steps, state.share, state.since_s, state.advised = [*state.steps, step], share, now_s, ""
        self._save()
        return False

    def _read_logs(self, file: TeamsFile) -> bool:
        """Read requests that started after the canary, for at most READ_S; return whether that was all."""
        until_s, complete = self.outside.steady() + READ_S, True
        for reader in self._readers:
            more = True
            while more and self.outside.steady() < until_s:
                try:
                    records, more = reader.poll(self.outside.steady(), LINES_BYTES)
                except OSError as error:  # the other logs are still read
                    self._complain(f"{reader.path} cannot be read: {error.strerror or error}")
                    break
                reader.window.added.clear()
                for record in records:
                    ended_s = ended_at(record)
                    if ended_s is not None and ended_s >= self.state.started_s and record.team != PROBE_TEAM:
                        self._read += samples_of(record, ended_s, file, self._names)
            else:
                complete = complete and not more
        return complete

    def _complain(self, sentence: str) -> None:
        """Log a sentence, unless it was said at the last look."""
        self._said.add(sentence)
        if sentence not in self._said_before:
            log.error("%s; trying again", sentence)

    def _is_new(self, decision: CanaryDecision) -> bool:
        """Return False for an advice that was given already."""
        advice = f"{decision.action} {decision.share:g}"
        return self.outside.reload is not None or advice != self.state.advised

    def _act(self, decision: CanaryDecision, now_s: float) -> None:
        state, acted = self.state, self.outside.reload is not None
        why = printable(decision.why)
        state.pending = CanaryStep(
            len(state.steps), now_s, decision.action, state.share, decision.share, why, acted
        )  # fmt: skip
        self._save()
        self._finish(state.pending)

    def _finish(self, step: CanaryStep) -> None:
        """Do the pending act, or what is left of it. What follows, its event, stops no other act if it fails."""
        state, outside = self.state, self.outside
        moved = step.acted and step.share != step.was
        if moved and outside.reload is None:  # started again without --act
            step, moved = msgspec.structs.replace(step, acted=False), False
        if moved:
            file = read_teams(outside.teams)
            if file.canary.share == step.was and file.mark == state.mark:
                write_share(file, step.share)
            elif file.canary.share != step.share:
                state.pending = None
                self._changed_by_others(file, step.at_s)
                return
            if outside.reload is not None:
                outside.reload()
        log.warning("%s", worded(step))
        state.steps = [*state.steps, step]
        if step.action in (*ENDS, INTERRUPTED):
            state.done = step.action
        if moved:
            state.evidence.at_another_share()
            state.share, state.since_s = step.share, outside.clock()
        state.advised = f"{step.action} {step.share:g}"
        state.pending = None
        self._save()

    def _record(self) -> None:
        """Record acts as tuning events; one with its id is recorded once. Failures are tried again."""
        state, variant = self.state, re.sub(r"[^\w.-]", "_", self.state.variant)[:32]
        for step in state.steps[state.recorded :]:
            moved = step.acted and step.share != step.was
            event = NewEvent(
                what=worded(step, state.variant)[:MAX_TEXT],
                kind="change" if moved else "note",
                id=f"canary-{state.run}-{step.number}",
                at_s=step.at_s,
                who="vllm-watch canary",
                diff={"canary.share": (f"{step.was:g}", f"{step.share:g}")} if moved else {},
                tags=("canary", f"canary={variant}", f"step={step.action}"),
            )
            try:
                self.outside.events.record(event)
            except (OSError, ValueError) as error:
                self._complain(str(error))
                return
            state.recorded = step.number + 1
            self._save()

    def _save(self) -> None:
        write_state(self.outside.state, self.state)


def samples_of(
    record: RequestRecord, ended_s: float, file: TeamsFile, names: dict[str | None, str | None]
) -> Iterator[RequestSample]:
    """Yield what a record says of the canary and of the others: for each upstream that failed before, an error, and one
    for the upstream that answered.

    Left out: models that only one side serves, and requests that reached no upstream. The time of a request that was
    tried before is that of several upstreams."""
    sample = sample_of(record, ended_s, names)
    if file.models is not None and sample.model not in file.models:
        return
    without_times = sample._replace(outcome="upstream_error", ttft_ms=None, tpot_ms=None, e2e_ms=None)
    for tried in (record.tried or "").split(","):
        if upstream := file.policy.upstreams.get(tried.partition(":")[0]):
            yield without_times._replace(variant=upstream.variant, unreadable=False)
    if sample.variant is None:
        return
    if record.reason in REFUSED:
        yield without_times
    elif record.tried:
        yield without_times._replace(outcome=sample.outcome)
    else:
        yield sample


_ACTS = {
    "start": "starts", "raise": "share raised", "roll_back": "rolled back", "promote": "is good",
    "undecided": "is undecided", INTERRUPTED: "ended", "set": "share set",
}  # fmt: skip
_ADVICE = {"start": "advice: set the share", "raise": "advice: raise the share", "roll_back": "advice: roll back"}


def worded(step: CanaryStep, variant: str = "canary") -> str:
    """Return an act as one sentence, without a full stop."""
    advice = {} if step.acted or step.share == step.was else _ADVICE
    act, share = advice.get(step.action, _ACTS[step.action]), percent_text(step.share)
    if step.share != step.was:
        share = f"{percent_text(step.was)} to {share}"
    return printable(f"{variant} {act} ({share}): {step.why}")
