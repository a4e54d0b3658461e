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

from exporters.events.log import MAX_TEXT, NewEvent
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
INTERRUPTED = "interrupted"

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
    _said: str = ""

    def __post_init__(self) -> None:
        self._readers = [
            LogReader(Tail(path, since=self.state.positions.get(str(path))), FieldMap(), LogTotals(), log)
            for path in self.outside.logs
        ]

    def look(self) -> bool:
        """Read, decide and act once. Errors that may pass are logged and tried again at the next look."""
        try:
            return self._look()
        except (BadConfig, OSError, ValueError) as error:
            self._complain(str(error))
            return False

    def _look(self) -> bool:
        state, outside = self.state, self.outside
        if state.pending is not None:
            self._finish(state.pending)
        if state.done is not None:
            return True
        if not state.steps:
            self._start()
        file, now_s = read_teams(outside.teams), outside.clock()
        if self._changed_by_others(file, now_s):
            return True
        policy, settled_s = state.policy, state.since_s + state.policy.settle_s
        state.evidence.add(self._samples(), policy, settled_s)
        closed = state.evidence.close(policy, settled_s, now_s - LATE_S)
        guards = [sentence for guard in outside.guards for sentence in guard()] if state.share else []
        stage = CanaryStage(state.share, state.since_s, state.started_s)
        decision = decide(policy, state.evidence, guards, stage, now_s)
        if decision.action != "hold" and self._is_new(decision):
            self._act(decision, now_s)
        elif closed:
            self._save()
        return state.done is not None

    def _start(self) -> None:
        """Begin the run at the first step, or at the share that the canary has."""
        policy, share = self.state.policy, self.state.share
        wanted = share or (policy.steps[0] if self.outside.reload else 0.0)
        self._act(CanaryDecision("start", wanted, f"compared by {policy.block_s:g} s"), self.state.started_s)

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
        state.steps, state.share, state.since_s = [*state.steps, step], share, now_s
        self._save()
        return False

    def _samples(self) -> list[RequestSample]:
        """Return the requests since the last look that started after the canary, in the order of their ends."""
        found = []
        for reader in self._readers:
            for record in self._records(reader):
                ended_s = ended_at(record)
                if ended_s is not None and ended_s >= self.state.started_s and record.team != PROBE_TEAM:
                    found.append(sample_of(record, ended_s, self._names))
        self.state.positions = {reader.path: reader.tail.positions() for reader in self._readers}
        return sorted(found, key=lambda sample: sample.ended_s)

    def _records(self, reader: LogReader) -> Iterator[RequestRecord]:
        """Yield what is new in one log. One that cannot be read does not lose what others had."""
        more = True
        while more:
            try:
                records, more = reader.poll(self.outside.steady(), LINES_BYTES)
            except OSError as error:
                self._complain(f"{reader.path} cannot be read: {error.strerror or error}")
                return
            yield from records

    def _complain(self, sentence: str) -> None:
        """Log a sentence once, until another one follows."""
        if sentence != self._said:
            self._said = sentence
            log.error("%s; trying again", sentence)

    def _is_new(self, decision: CanaryDecision) -> bool:
        """Return False for an advice that was given already."""
        advice = f"{decision.action} {decision.share:g}"
        return self.outside.reload is not None or advice != self.state.advised

    def _act(self, decision: CanaryDecision, now_s: float) -> None:
        state = self.state
        state.pending = CanaryStep(
            len(state.steps), now_s, decision.action, state.share, decision.share, printable(decision.why)
        )
        self._save()
        self._finish(state.pending)

    def _finish(self, step: CanaryStep) -> None:
        """Do the pending act, or what is left of it."""
        state, outside = self.state, self.outside
        acts = outside.reload is not None and step.action != INTERRUPTED
        if acts and step.share != step.was:
            file = read_teams(outside.teams)
            if file.canary.share == step.was and file.mark == state.mark:
                write_share(file, step.share)
            elif file.canary.share != step.share:
                state.pending = None
                self._changed_by_others(file, step.at_s)
                return
            if outside.reload is not None:
                outside.reload()
        self._record(step, acts)
        log.warning("%s", worded(step, acts))
        state.steps = [*state.steps, step]
        if step.action in (*ENDS, INTERRUPTED):
            report.write(outside.report, state)
            state.done = step.action
        if acts and step.share != step.was:
            state.evidence.at_another_share()
            state.share, state.since_s = step.share, outside.clock()
        state.advised = f"{step.action} {step.share:g}"
        state.pending = None
        self._save()

    def _record(self, step: CanaryStep, acts: bool) -> None:
        """Record the act as a tuning event; one with its id is recorded once."""
        moved = acts and step.share != step.was
        variant = re.sub(r"[^\w.-]", "_", self.state.variant)[:32]
        self.outside.events.record(
            NewEvent(
                what=worded(step, acts, self.state.variant)[:MAX_TEXT],
                kind="change" if moved else "note",
                id=f"canary-{self.state.run}-{step.number}",
                at_s=step.at_s,
                who="vllm-watch canary",
                diff={"canary.share": (f"{step.was:g}", f"{step.share:g}")} if moved else {},
                tags=("canary", f"canary={variant}", f"step={step.action}"),
            )
        )

    def _save(self) -> None:
        write_state(self.outside.state, self.state)


_ACTS = {
    "start": "starts", "raise": "share raised", "roll_back": "rolled back", "promote": "is good",
    "undecided": "is undecided", INTERRUPTED: "ended", "set": "share set",
}  # fmt: skip
_ADVICE = {"raise": "advice: raise the share", "roll_back": "advice: roll back"}


def worded(step: CanaryStep, acts: bool, variant: str = "canary") -> str:
    """Return an act as one sentence, without a full stop."""
    act = _ACTS[step.action] if acts else _ADVICE.get(step.action, _ACTS[step.action])
    share = percent_text(step.share)
    if step.share != step.was:
        share = f"{percent_text(step.was)} to {share}"
    return printable(f"{variant} {act} ({share}): {step.why}")
