"""The lab's seven pass rows, each checked against what a bench, logs and prices show.

Invariant: nothing passes without evidence; what was not checked is not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from exporters.requests.record import RequestRecord, ended_at
from stack.bench.result import Bench
from stack.gateway.policy import Policy
from stack.tuning.derived import Material, by_reason, costs, stability, starts, written

State = Literal["pass", "fail", "not measured"]
FEWEST, MOST_FAILED = 100, 2
WITHIN_S = 60.0
_CHAT = "/chat/completions"


@dataclass(frozen=True, slots=True)
class LabRow:
    """criterion: what passes. evidence: what was seen, or what would have to be."""

    item: str
    criterion: str
    state: State
    evidence: str


CRITERIA = {
    "Model loading": "cold start and warm restart times are recorded",
    "API compatibility": "an OpenAI client completes a chat call",
    "Stability": f"at most {MOST_FAILED} timeouts or failures in {FEWEST} requests",
    "Cost": "the cost of GPU hours is compared with that of an API",
    "Observability": "request id, model, tokens and latency are logged",
    "Security": "access from outside and to files is separated",
    "Admission control": "each team has a queue or limit of its own, and refusals are logged",
}

RowResult = tuple[State, str]


def lab_rows(
    material: Material,
    *,
    log: Sequence[RequestRecord] = (),
    policy: Policy | None = None,
    stated: Mapping[str, tuple[bool, str]] | None = None,
) -> list[LabRow]:
    """Check a bench against the criteria of the lab.

    log: of a gateway. policy: its teams file. stated: evidence by other means, as item -> (whether it passes, the
    evidence); it counts where nothing was measured. Raises ValueError for an unknown item or missing evidence."""
    stated = stated or {}
    if unknown := next((item for item in stated if item not in CRITERIA), None):
        raise ValueError(f"the lab has no row {unknown!r}; there are {', '.join(CRITERIA)}")
    if bare := next((item for item, (_, evidence) in stated.items() if not evidence.strip()), None):
        raise ValueError(f"{bare}: what is stated needs evidence; say what was seen")
    checks: dict[str, Callable[[], RowResult]] = {
        "Model loading": lambda: _loading(material.bench),
        "API compatibility": lambda: _compatible([*material.records, *log]),
        "Stability": lambda: _stable(material.bench),
        "Cost": lambda: _cost(material),
        "Observability": lambda: _observable([*material.records, *log]),
        "Security": lambda: (
            "not measured",
            "a bench cannot see it; show who may reach the engine's port, and which folders it may read",
        ),
        "Admission control": lambda: _admission(log, policy),
    }
    rows = []
    for item, criterion in CRITERIA.items():
        state, evidence = checks[item]()
        if state == "not measured" and item in stated:
            holds, said = stated[item]
            state, evidence = ("pass" if holds else "fail"), f"stated: {said}"
        rows.append(LabRow(item, criterion, state, evidence))
    return rows


def _loading(bench: Bench) -> RowResult:
    evidence = [
        f"{variant.name} {kind} " + ", ".join(written(s, "s") for s in seconds)
        for variant in bench.variants
        for kind, seconds in starts(variant).items()
    ]
    have = {kind for variant in bench.variants for kind in starts(variant)}
    if not have:
        return "not measured", "no start was timed; a bench that starts the engines itself records both"
    if missing := {"cold", "warm"} - have:
        return "fail", f"{'; '.join(evidence)}; no {missing.pop()} start is recorded"
    return "pass", "; ".join(evidence)


def _compatible(records: Sequence[RequestRecord]) -> RowResult:
    calls = [record for record in records if (record.route or "").endswith(_CHAT)]
    good = [
        record
        for record in calls
        if record.outcome == "ok" and record.finish_reason in ("stop", "length", "tool_calls")
    ]
    if not calls:
        return "not measured", "no chat call is among the requests"
    evidence = (
        f"{len(good):,} of {len(calls):,} calls of {calls[0].route} ended with a finish_reason as the OpenAI protocol"
        " has it"
    )
    return ("pass" if good else "fail"), evidence


def _stable(bench: Bench) -> RowResult:
    ended, failed = stability(bench.runs)
    evidence = f"{failed.total():,} of {ended:,} requests failed" + (f" ({by_reason(failed)})" if failed else "")
    if ended < FEWEST:
        return "not measured", f"{evidence}; it takes at least {FEWEST} requests"
    for name in (variant.name for variant in bench.variants if len(bench.variants) > 1):
        mine, lost = stability(run for run in bench.runs if run.variant == name)
        if mine >= FEWEST and too_many(lost.total(), mine):
            return "fail", f"{evidence}; of {name} alone {lost.total():,} of {mine:,}"
    return ("fail" if too_many(failed.total(), ended) else "pass"), evidence


def too_many(failed: int, ended: int) -> bool:
    """Return True if more requests failed than the lab allows."""
    return failed * FEWEST > MOST_FAILED * ended


def _cost(material: Material) -> RowResult:
    if material.prices is None:
        return "not measured", "no prices were given"
    if not material.gpus:
        return "not measured", "the number of GPUs was not given"
    found = costs(material)
    compared = [cost for cost in found if cost.api_output is not None]
    if not compared:
        return "not measured", "the prices name no API price of this model" if found else "no throughput was measured"
    first, money = compared[0], material.prices.currency
    return (
        "pass",
        (
            f"{len(compared)} rows compare both; {first.variant}, {first.workload} at {first.point}:"
            f" {written(first.own, money)} per 1K output tokens, the API's {written(first.api_output, money)}"
        ),
    )


def _observable(records: Sequence[RequestRecord]) -> RowResult:
    if not records:
        return "not measured", "there are no request records"
    needed: dict[str, Callable[[RequestRecord], bool]] = {
        "request_id": lambda r: bool(r.request_id),
        "model": lambda r: bool(r.model),
        "tokens": lambda r: r.outcome != "ok" or (r.prompt_tokens is not None and r.completion_tokens is not None),
        "latency": lambda r: r.outcome == "rejected" or r.e2e_ms is not None or r.ttft_ms is not None,
    }
    lacking = {name: count for name, has in needed.items() if (count := sum(not has(record) for record in records))}
    if lacking:
        return "fail", ", ".join(
            f"{count:,} of {len(records):,} records lack {name}" for name, count in lacking.items()
        )
    return "pass", f"{len(records):,} of {len(records):,} records have {', '.join(needed)}"


def _admission(log: Sequence[RequestRecord], policy: Policy | None) -> RowResult:
    refused = [record for record in log if record.outcome == "rejected"]
    bare = sum(record.reason is None or (record.team is None and record.status not in (401, 413)) for record in refused)
    if bare:
        return "fail", f"{bare:,} of {len(refused):,} refusals are logged without team or reason"
    if not refused:
        return "not measured", "no refusal is in a gateway's log; give the log of one that had to refuse"
    evidence = (
        f"{len(refused):,} refusals are logged with their reason"
        f" ({', '.join(sorted({r.reason or '' for r in refused}))})"
    )
    if policy and len(policy.teams) > 1:
        limited = sum(team.max_running is not None or team.max_in_flight is not None for team in policy.teams.values())
        return (
            "pass",
            f"{evidence}; each of {len(policy.teams)} teams has a queue of its own, {limited} of them a limit as well",
        )
    if pair := _isolated(log):
        return "pass", f"{evidence}; {pair[1]} was answered while {pair[0]} was held to its own limit"
    return (
        "not measured",
        f"{evidence}; that a team is held apart from others needs the teams file, or the log of two teams at once",
    )


def _isolated(log: Sequence[RequestRecord]) -> tuple[str, str] | None:
    """A team that was refused for a limit of its own, and another that was answered within the same minute."""
    answered: dict[int, set[str]] = {}
    for record in log:
        if record.outcome == "ok" and record.team and (at_s := ended_at(record)) is not None:
            answered.setdefault(int(at_s // WITHIN_S), set()).add(record.team)
    for record in log:
        if record.reason == "team_limit" and record.team and (at_s := ended_at(record)) is not None:
            others = answered.get(int(at_s // WITHIN_S), set()) - {record.team}
            if others:
                return record.team, min(others)
    return None
