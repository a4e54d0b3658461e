"""Findings from evidence, the one to act on first. Pure.

Invariant: where the evidence is too thin, the result is what is missing and how to get it. Quality is never assessed:
no series measures it.

Findings come in the order of the matrix, causes before their effects, serious ones before all others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alerts.settings import Settings
from exporters.catalogue.metric import Unit
from stack.doctor import prompt_work
from stack.doctor.checks import found_in
from stack.doctor.checks.case import LEAST_REQUESTS, LEAST_SECONDS, Case, CheckResult, Fact, State, sent_by, state_of
from stack.doctor.checks.decode import pace_of
from stack.doctor.checks.failures import LEAST_STILL_S, seconds_still
from stack.doctor.checks.queue import check_queue, queue_leads, waited
from stack.doctor.evidence import EngineSnapshot, ModelEvidence, Spread
from stack.doctor.matrix.symptom import AREAS, Area, Symptom
from stack.doctor.symptoms import ROWS

_ROW = {row.name: row for row in ROWS}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """Finding. engine: where one stands out. serious: act now. old, new: numbers of its lever, as far as known."""

    row: Symptom
    model: str
    serious: bool
    confidence: float
    facts: tuple[Fact, ...]
    engine: str = ""
    old: float | None = None
    new: float | None = None

    @property
    def name(self) -> str:
        return self.row.finding

    def filled(self, text: str) -> str:
        """Fill the numbers into a command or file of the row; unknown ones stay OLD and NEW."""
        for name, number in (("OLD", self.old), ("NEW", self.new)):
            text = text if number is None else text.replace(name, f"{number:.0f}")
        return text


@dataclass(frozen=True, slots=True)
class Unsure:
    """Area without a result. how: to get what is missing."""

    area: Area
    why: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Diagnosis of one model. shares: of the time of its requests, as far as known. requests: number behind the values.

    seen: main value of each area. still_s: seconds up to the end in which an engine may have stood still, too few to be
    certain; 0 for none."""

    model: str
    state: State
    requests: float
    seconds: float
    findings: tuple[DoctorFinding, ...]
    unsure: tuple[Unsure, ...]
    shares: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[Area, Fact] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    still_s: float = 0.0


def diagnose(evidence: ModelEvidence, settings: Settings | None = None) -> Diagnosis:
    """Diagnose one model."""
    settings = settings or Settings()
    whole = Case(evidence.whole, settings.at, evidence.clients, evidence.gateway, one=not evidence.engines)
    state = _state(evidence)
    found = {_ROW[one.name].finding: (one, "") for one in found_in(whole, state)}
    for engine, figures in evidence.engines.items():
        for one in found_in(Case(figures, settings.at), state_of(figures)):
            found.setdefault(_ROW[one.name].finding, (one, engine))
    if uneven := _uneven(evidence, settings):
        found[_ROW[uneven[0].name].finding] = uneven
    still_s = max(map(_doubtful_s, (whole, *(Case(figures, settings.at) for figures in evidence.engines.values()))))
    unsure: dict[Area, Unsure] = {}
    for one_of_area in (*_maybe_still(still_s), *_unsure(evidence, whole, state)):
        unsure.setdefault(one_of_area.area, one_of_area)
    findings = sorted((_finding(one, evidence, where, settings) for one, where in found.values()), key=_urgency)
    return Diagnosis(
        model=evidence.model, state=state, requests=evidence.whole.requests, seconds=evidence.whole.seconds,
        findings=tuple(findings),
        unsure=tuple(one for one in unsure.values() if one.area not in {finding.row.area for finding in findings}),
        shares=evidence.whole.shares, seen=_seen(evidence.whole),
        notes=(*evidence.notes, *_notes(evidence.whole, findings)), still_s=still_s,
    )  # fmt: skip


def ranked(diagnoses: Iterable[Diagnosis]) -> list[DoctorFinding]:
    """Sort the findings of all models; the first one's lever is the one to pull."""
    return sorted((finding for diagnosis in diagnoses for finding in diagnosis.findings), key=_urgency)


def _urgency(finding: DoctorFinding) -> tuple[bool, int, float]:
    return not finding.serious, ROWS.index(finding.row), -finding.confidence


def _finding(one: CheckResult, evidence: ModelEvidence, engine: str, settings: Settings) -> DoctorFinding:
    if not engine:
        engine = _outlier(one.name, evidence, settings)
    return DoctorFinding(
        row=_ROW[one.name],
        model=evidence.model,
        serious=one.serious,
        confidence=one.confidence,
        facts=one.facts,
        engine=engine,
        old=one.old,
        new=one.new,
    )


def _outlier(name: str, evidence: ModelEvidence, settings: Settings) -> str:
    """Return the only engine of several that has the finding of the model; '' where several have it, or none."""

    def has(figures: EngineSnapshot) -> bool:
        return any(one.name == name for one in found_in(Case(figures, settings.at), state_of(figures)))

    having = [engine for engine, figures in evidence.engines.items() if has(figures)]
    return having[0] if len(having) == 1 else ""


def _uneven(evidence: ModelEvidence, settings: Settings) -> tuple[CheckResult, str] | None:
    """Find requests that wait at one engine while another of the model runs less than half as many and has none
    waiting: capacity is not what is missing."""
    full, free = list[tuple[str, CheckResult, float]](), list[float]()
    for engine, figures in evidence.engines.items():
        running, waiting = figures.running, figures.waiting
        if running is None or waiting is None:
            continue
        if waiting.highest <= 0:
            free.append(running.mean)
        elif found := check_queue(Case(figures, settings.at)):
            full.append((engine, found, running.mean))
    if not full or not free or min(free) >= min(running for _, _, running in full) / 2:
        return None
    engine, queue, there = full[0]
    facts = (*queue.facts, Fact("running there, mean", there), Fact("running where none waits, mean", min(free)))
    return replace(queue, name="queue-uneven", facts=facts, old=None, new=None), engine if len(full) == 1 else ""


def _state(evidence: ModelEvidence) -> State:
    asked = (evidence.clients.requests if evidence.clients else 0.0) + sent_by(evidence.gateway)
    return "thin" if (state := state_of(evidence.whole)) == "idle" and asked else state


# ---- areas without a result


_QUALITY = Unsure(
    "quality", "no series knows whether an answer is good", "replay a prompt whose answer you know: runbooks/quality.md"
)


def _unsure(evidence: ModelEvidence, case: Case, state: State) -> Iterator[Unsure]:
    """Yield at most one for each area; for an idle engine, API and quality."""
    figures = evidence.whole
    if state == "thin":
        yield from (Unsure(area, _too_thin(figures), _more(figures)) for area in ("queue", "prefill", "decode"))
    elif state == "busy":
        yield from _not_shown(figures)
        yield from _over_already(case)
    if state != "idle":
        if evidence.clients is None or evidence.clients.tpot is None:
            if evidence.logged:
                yield Unsure("streaming", "the log has no streamed answer of this time", "--log with one that has")
            else:
                yield Unsure(
                    "streaming",
                    "no data from clients",
                    "--log with the request log, or a Prometheus that has the sidecar's series",
                )
        if figures.tokens and figures.still_s is None and figures.running and figures.running.lowest > 0:
            yield Unsure(
                "API",
                "two scrapes do not show whether tokens were made up to the second one",
                "a URL with --for, or --prometheus",
            )
        elif evidence.clients is None and not figures.http:
            yield Unsure(
                "API",
                "neither data from clients nor the engine's HTTP answers are known",
                "--log, or --gateway with its metrics page",
            )
    elif evidence.gateway is None and not evidence.logged:
        yield Unsure(
            "API",
            "whether somebody asks and waits before the engine is not on its page",
            "--gateway with its metrics page, or --log",
        )
    yield _QUALITY


def _notes(figures: EngineSnapshot, findings: Sequence[DoctorFinding]) -> Iterator[str]:
    """Yield caveats about a finding."""
    if {"unique-prompts", "prefill-bound"} & {finding.name for finding in findings[:1]} and prompt_work.step_matters(
        figures
    ):
        yield (
            "the size of a step is unknown while few are answered beside long prompts; where the engine's log has"
            " max_num_batched_tokens below 2048, raise that first"
        )


def _doubtful_s(case: Case) -> float:
    """Return the seconds without a token or an answer up to the end, where they are too many for an ordinary pause and
    too few for a finding."""
    still_s, silent_s = seconds_still(case) or 0.0, case.figures.silent_s or 0.0
    least_s = LEAST_SECONDS if case.figures.tokens else 0.0
    return max((each for each in (still_s, silent_s) if least_s <= each < LEAST_STILL_S), default=0.0)


def _maybe_still(still_s: float) -> Iterator[Unsure]:
    """Yield all areas that an engine which stands still would change."""
    why = (
        f"no token or no answer came in the last {still_s:.3g} s although requests run: a long prefill, or an engine"
        " that stands still"
    )
    areas_in_doubt: tuple[Area, ...] = ("queue", "prefill", "decode", "API")
    yield from (Unsure(area, why, f"look for {2 * LEAST_STILL_S:g} s (--for)") for area in areas_in_doubt if still_s)


def _over_already(case: Case) -> Iterator[Unsure]:
    """Yield the queue as unsure where requests that ended had waited, and none waits now."""
    queue, waiting = case.figures.queue, case.figures.waiting
    if (
        queue is None
        or waiting is None
        or case.figures.crowded
        or not queue_leads(case)
        or not any(fact.over for fact in waited(case))
    ):
        return
    why = (
        f"requests that ended had waited, {queue.mean:.3g} s on average, and nobody waits at any look: a crowd that is"
        " gone"
    )
    yield Unsure("queue", why, "look while it is there (--for), or ask a Prometheus about that time")


def _seen(figures: EngineSnapshot) -> Mapping[Area, Fact]:
    """Return the main value of each area."""
    shown: tuple[tuple[Area, str, Spread | None], ...] = (
        ("queue", "queue time p95", figures.queue), ("prefill", "prefill p95", figures.prefill),
        ("decode", "time per token p95", pace_of(figures)),
    )  # fmt: skip
    return {
        area: Fact(what, spread.at(95), Unit.SECONDS, between=spread.around(95))
        for area, what, spread in shown
        if spread
    }


def _too_thin(figures: EngineSnapshot) -> str:
    if figures.seconds < LEAST_SECONDS:
        return f"{figures.seconds:.3g} s are too short a time"
    return f"{figures.requests:.0f} requests in {figures.seconds:.0f} s are too few; {LEAST_REQUESTS} are the least"


def _more(figures: EngineSnapshot) -> str:
    """Return advice to get enough evidence, at the present rate."""
    if figures.requests < 1:
        return "look again while requests end (--for, --window)"
    seconds = 1.2 * max(figures.seconds * LEAST_REQUESTS / figures.requests, 2 * LEAST_SECONDS)
    return f"look for {math.ceil(seconds)} s or longer (--for, --window)"


_NEEDS: dict[Area, tuple[tuple[str, str], ...]] = {
    "queue": (("queue", "request_queue_time_seconds"), ("kv", "kv_cache_usage_perc")),
    "prefill": (("prefill", "request_prefill_time_seconds"), ("ttft", "time_to_first_token_seconds")),
    "decode": (("between_tokens", "inter_token_latency_seconds"),),
}


def _not_shown(figures: EngineSnapshot) -> Iterator[Unsure]:
    """Yield areas with a missing series: nothing was counted in it, or the engine does not have it."""
    for area, needs in _NEEDS.items():
        missing = {name: series for name, series in needs if getattr(figures, name) is None}
        if (
            missing.keys() == {"between_tokens"}
            and figures.generation_tokens is not None
            and figures.generation_tokens <= figures.requests
        ):
            yield Unsure(
                area, "no answer has a second token", "nothing, where embeddings, scores or single labels are asked for"
            )
        elif missing.keys() & {"queue", "prefill"} and figures.ended == 0:
            yield Unsure(
                area,
                "no request ended, and the engine reports this for ended ones",
                "look for longer than an answer takes (--for, --window)",
            )
        elif missing:
            why = f"the engine shows no {' and no '.join(missing.values())}"
            yield Unsure(area, why, "`vllm-watch metrics check URL` says why; some frontends show less")


def areas(diagnosis: Diagnosis) -> Mapping[Area, str]:
    """Return finding, unsure or fine for each area."""
    found = {finding.row.area for finding in diagnosis.findings}
    unsure = {one.area for one in diagnosis.unsure}
    return {area: "finding" if area in found else "unsure" if area in unsure else "fine" for area in AREAS}


def serious(findings: Sequence[DoctorFinding]) -> bool:
    return any(finding.serious for finding in findings)


def undecided(diagnoses: Iterable[Diagnosis]) -> bool:
    """Return True if an engine may stand still that was not observed for long enough."""
    return any(one.still_s > 0 for one in diagnoses)
