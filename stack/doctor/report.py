"""Diagnosis as text and JSON.

Invariant: one lever is the first, that of the first finding over all models; the levers of all others come after it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exporters.catalogue import bounds
from exporters.catalogue.metric import Unit
from exporters.text import printable
from stack.doctor import advice as workload_advice
from stack.doctor import diagnose, symptoms
from stack.doctor.checks.case import Fact
from stack.doctor.diagnose import Diagnosis, DoctorFinding
from stack.doctor.matrix.symptom import ANYWHERE, EvidenceSource
from stack.tuning.derived import plain

LEAST_S = 0.001  # smaller values are shown as less than this
_STATES = {"idle": "idle: its page shows no request", "thin": "too little to go by", "busy": "busy"}


# ---- diagnosis


def as_json(diagnoses: Sequence[Diagnosis], source: str, asked: EvidenceSource = ANYWHERE) -> dict[str, Any]:
    """Return the diagnoses in base units; serious and undecided decide the exit status."""
    found = diagnose.ranked(diagnoses)
    return {
        "source": source,
        "serious": diagnose.serious(found),
        "undecided": diagnose.undecided(diagnoses),
        "first_step": _lever(found[0], asked) if found else None,
        "findings": [_finding_as_json(finding, first=at == 0) for at, finding in enumerate(found)],
        "models": [
            {
                "model": one.model,
                "state": one.state,
                "requests": one.requests,
                "seconds": one.seconds,
                "shares": dict(one.shares),
                "areas": dict(diagnose.areas(one)),
                "notes": list(one.notes),
                "unsure": [{"area": each.area, "why": each.why, "how": each.how} for each in one.unsure],
            }
            for one in diagnoses
        ],
    }


def _lever(finding: DoctorFinding, asked: EvidenceSource) -> dict[str, Any]:
    row = finding.row
    proof = row.proof
    return {
        "model": finding.model, "engine": finding.engine, "finding": finding.name, "pull": row.lever,
        "worked_when": proof.criterion if proof else "", "commands": list(_commands(finding, asked)),
        "experiment": finding.filled(proof.experiment.file()) if proof and proof.experiment else None,
    }  # fmt: skip


def _commands(finding: DoctorFinding, asked: EvidenceSource) -> Iterator[str]:
    if finding.row.proof:
        yield from map(finding.filled, finding.row.proof.commands(finding.row.name, asked))


def _finding_as_json(finding: DoctorFinding, first: bool) -> dict[str, Any]:
    row = finding.row
    return {
        "finding": finding.name, "row": row.name, "model": finding.model, "engine": finding.engine, "area": row.area,
        "serious": finding.serious,
        "confidence": round(finding.confidence, 3), "symptom": row.symptom, "cause": row.cause,
        "evidence": [
            {
                "what": fact.what, "value": fact.value, "unit": str(fact.unit),
                "limit": fact.limit.value if fact.limit else None, "threshold": fact.limit.name if fact.limit else None,
                "between": [bound if math.isfinite(bound) else None for bound in fact.between] if fact.between
                    else None,
            }
            for fact in finding.facts
        ],
        "queries": list(row.asks), "lever" if first else "after_that": row.lever, "second_step": row.second,
        "risk": row.risk,
        "worked_when": row.proof.criterion if row.proof else "", "dated": row.dated, "pages": list(row.pages),
    }  # fmt: skip


def as_text(diagnoses: Sequence[Diagnosis], source: str, asked: EvidenceSource = ANYWHERE) -> str:
    """Format the findings, then areas that are fine, those without a result, and the evidence."""
    found = diagnose.ranked(diagnoses)
    several = len(diagnoses) > 1
    lines = [f"{source}: " + (_count(found) if found else "no finding"), ""]
    for number, finding in enumerate(found, 1):
        lines += [*_finding(number, finding, several, asked), ""]
    for one in diagnoses:
        lines += [*_about(one), ""]
    return "\n".join(map(printable, lines)).rstrip() + "\n"  # names of models are foreign text


def folded(text: str, width: int) -> str:
    """Wrap text for a terminal of this width: sentences continue below their start; values, commands and files are not
    wrapped. 0: unchanged."""
    return "".join(_folded(line, width) for line in text.splitlines(keepends=True)) if width else text


def _folded(line: str, width: int) -> str:
    if len(line) <= width or line.startswith(" " * 5):
        return line
    label = re.match(r" {3}[a-z?]+(?: [a-z]+)* {2,}", line)
    below = " " * (len(label[0]) if label else 3 if line.startswith(" ") else 0)
    head, rest = (label[0], line[len(label[0]) :]) if label else (below, line.strip())
    return (
        textwrap.fill(
            rest.strip(),
            width,
            initial_indent=head,
            subsequent_indent=below,
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def _count(found: Sequence[DoctorFinding]) -> str:
    serious = sum(finding.serious for finding in found)
    return f"{len(found)} finding{'s' * (len(found) > 1)}, " + (f"{serious} serious" if serious else "none serious")


def _finding(number: int, finding: DoctorFinding, several: bool, asked: EvidenceSource) -> Iterator[str]:
    row = finding.row
    where = " ".join([f"of {finding.model}"] * several + [f"at {finding.engine}"] * bool(finding.engine))
    loud = "serious" if finding.serious else "not serious"
    yield (
        f"{number}. {finding.name}{f' {where}' if where else ''} ({row.area}; {loud}; confidence"
        f" {finding.confidence:.2f})"
    )
    yield f"   {row.symptom} {row.cause}"
    yield from (f"     {_fact(fact)}" for fact in finding.facts)
    yield f"   {'first step ' if number == 1 else 'after that '}  {row.lever}"
    if number == 1:
        yield from _first(finding, asked)
    yield f"   pages        {', '.join(row.pages)} (vllm-watch runbook NAME)"


def _first(finding: DoctorFinding, asked: EvidenceSource) -> Iterator[str]:
    row = finding.row
    yield f"   if not that  {row.second}"
    yield f"   risk         {row.risk}"
    yield from (f"   dated        {text}" for text in [row.dated] if text)
    if row.proof:
        yield f"   it worked    when {row.proof.criterion}"
        yield from (f"     {command}" for command in _commands(finding, asked))
        if row.proof.experiment:
            yield f"   {row.name}.yaml, with your own model and numbers:"
            yield from (f"     {line}" for line in finding.filled(row.proof.experiment.file()).splitlines())


def _about(one: Diagnosis) -> Iterator[str]:
    yield f"{one.model}: {_STATES[one.state]}; {one.requests:.0f} requests in {plain(one.seconds)} s"
    if one.shares:
        yield "   time of a request: " + ", ".join(f"{area} {share * 100:.0f} %" for area, share in one.shares.items())
    fine = [
        f"{area} ({_fact(one.seen[area])})" if area in one.seen else area
        for area, word in diagnose.areas(one).items()
        if word == "fine"
    ]
    if one.state == "busy" and fine:
        yield f"   fine: {', '.join(fine)}"
    areas: dict[tuple[str, str], list[str]] = {}
    for each in one.unsure:
        areas.setdefault((each.why, each.how), []).append(each.area)
    yield from (f"   not said of {', '.join(named)}: {why}; {how}" for (why, how), named in areas.items())
    yield from (f"   note: {note}" for note in one.notes)


def _fact(fact: Fact) -> str:
    if fact.unit is Unit.FLAG:
        return f"{fact.what}: {'on' if fact.value else 'off'}"
    side = ("under" if fact.least else "over") if fact.over else "within"
    limit = f"; {side} {fact.limit.name}, {fact.limit.shown}" if fact.limit else ""
    if fact.unit is Unit.RATIO:
        return f"{plain(100 * fact.value)} % {fact.what}{limit}"
    # growth by Prometheus is no whole number
    shown = plain(round(fact.value) if fact.unit is Unit.REQUESTS else fact.value)
    if fact.unit is Unit.SECONDS and 0 < fact.value < LEAST_S:
        shown = f"under {LEAST_S:g}"
    if fact.between:
        low, high = fact.between
        if low == 0 or high == math.inf:
            return (
                f"{fact.what}: {bounds.format_bound('<', high) if low == 0 else bounds.format_bound('>', low)}{limit}"
            )
        shown = f"{plain(low)} to {plain(high)}"
    unit = {Unit.SECONDS: "s", Unit.REQUESTS: "", Unit.COUNT: "", Unit.NONE: ""}.get(fact.unit, str(fact.unit))
    return f"{fact.what}: {f'{shown} {unit}'.strip()}{limit}"


# ---- advice before there is traffic


def workload_as_json(words: str) -> dict[str, Any]:
    """Return the advice for a workload. Raises ValueError for unknown words."""
    advice, scenarios = workload_advice.meant(words)
    return {
        "asked": words,
        "workloads": [
            {
                "name": one.name, "workload": one.title, "bottleneck": one.bottleneck, "first_step": one.lever,
                "second_step": one.second,
                "measure": list(one.measure), "benches": list(one.benches), "row": one.row, "scenario": one.scenario,
                "dated": one.dated,
            }
            for one in advice
        ],
        "scenarios": [
            {
                "scenario": one.title, "same": one.same, "changes": one.changes, "expected_hit": list(one.expected_hit),
                "ttft_impact": one.impact,
                "bench": one.bench.name, "row": one.row, "first_step": symptoms.row(one.row).lever,
            }
            for one in scenarios
        ],
    }  # fmt: skip


def workload_as_text(advice: Mapping[str, Any]) -> str:
    """Format the result of `workload_as_json`."""
    lines = []
    for one in advice["workloads"]:
        lines += [
            f"{one['workload']} ({one['name']})",
            f"   bottleneck   {one['bottleneck']}",
            f"   first step   {one['first_step']}",
            f"   after that   {one['second_step']}",
            f"   measure      {', '.join(one['measure'])}",
            *_run(one["benches"]),
            *[f"   dated        {one['dated']}"] * bool(one["dated"]),
            "",
        ]
    for one in advice["scenarios"]:
        low, high = (f"{100 * share:.0f}" for share in one["expected_hit"])
        lines += [
            f"{one['scenario']}",
            f"   same         {one['same']}; {one['changes']} changes",
            (
                f"   expect       {low} to {high} % of the prompt tokens from the prefix cache; effect on the first"
                f" token: {one['ttft_impact']}"
            ),
            *[f"   first step   {one['first_step']}"]
            * (one["scenario"] not in {each["scenario"] for each in advice["workloads"]}),
            *_run([one["bench"]]),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _run(benches: Sequence[str]) -> Iterator[str]:
    yield from (f"   measured by  vllm-watch bench run {bench} --engine http://127.0.0.1:8000" for bench in benches)


def goal_as_json(name: str) -> dict[str, Any]:
    """Return the advice for a goal. Raises ValueError for an unknown one."""
    one = workload_advice.goal(name)
    return {"goal": one.name, "title": one.title, "first_step": one.lever, "second_step": one.second, "row": one.row}


def goal_as_text(advice: Mapping[str, Any]) -> str:
    """Format the result of `goal_as_json`."""
    how = f"vllm-watch runbook tuning; the row is {advice['row']}"
    return (
        f"{advice['title']}\n   first step   {advice['first_step']}\n"
        f"   after that   {advice['second_step']}\n   worked?      {how}\n"
    )
