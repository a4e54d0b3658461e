"""Tuning matrix: symptoms with cause, queries, first step and success criterion. The doctor, runbooks/tuning.md and
`--goal` use it.

Invariants, held by tests/stack/doctor/test_doctor_matrix.py: a lever names at most one option of the engine;
disaggregated prefill is never the first; whatever is pulled has a risk and a figure that must move; quality has no
lever. Rows stand in the order in which causes explain each other."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from runbooks import diagnosis
from stack.doctor.matrix.clients import CLIENTS, QUALITY
from stack.doctor.matrix.decode import DECODE
from stack.doctor.matrix.failures import FAILURES, REFUSALS
from stack.doctor.matrix.prefill import PREFILL
from stack.doctor.matrix.queue import DEFERRED, KV_CACHE, QUEUES
from stack.doctor.matrix.symptom import AREAS, Area, Symptom

ROWS: tuple[Symptom, ...] = (*FAILURES, *KV_CACHE, *REFUSALS, *PREFILL, *QUEUES, *DECODE, *DEFERRED, *CLIENTS, *QUALITY)


def row(name: str) -> Symptom:
    """Return the row of this name. Raises ValueError, with the nearest name, for any other."""
    found = next((one for one in ROWS if one.name == name), None)
    if found is None:
        near = difflib.get_close_matches(name, [one.name for one in ROWS], n=1)
        raise ValueError(f"the tuning matrix has no row {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return found


# ---- the page


_OF_AREA: dict[Area, str] = {
    "queue": "Time before a request is first scheduled, and what makes it compute again.",
    "prefill": "Time from there to the first token: computing the prompt.",
    "decode": "Time from the first token to the last.",
    "streaming": "What lies between the engine that makes a token and the reader who gets it.",
    "API": "Requests that get no answer, or another than they asked for.",
    "quality": "Not measured by any metric here.",
}


def page() -> str:
    """Return runbooks/tuning.md."""
    return "\n".join((_HEAD, *(line for area in AREAS for line in _section(area)))).rstrip() + "\n"


_HEAD = (
    "# Tuning: which lever for which symptom\n\nFor when something is slow and nothing is broken. `vllm-watch doctor`"
    " reads a Prometheus or an engine, finds the rows that hold and says which lever comes first; this page has all of"
    " them.\n\nOne lever at a time. Pull it, write it down (`vllm-watch annotate`), let some hours of like traffic"
    " pass, look at the figure that must move and at the one that must not become worse, and only then go on. Two at"
    " once, and nobody knows which one it was.\n\nA restart loses every running request and the whole cache: one engine"
    " at a time, out of the balancer first, until it runs nothing.\n"
)


def _section(area: Area) -> Iterator[str]:
    title = area if area == "API" else area.capitalize()
    yield f"## {title}\n\n{_OF_AREA[area]}\n"
    for one in ROWS:
        if one.area == area:
            yield from _written(one)


def _written(one: Symptom) -> Iterator[str]:
    yield f"### {one.name}\n\n{one.symptom} {one.cause}\n"
    yield from (f"```promql\n{ask}\n```\n" for ask in one.asks)
    if one.proof is None:
        yield f"No lever: see {_linked(one.pages)}.\n"
        return
    yield (
        f"- **First lever:** {one.lever}\n- **After that:** {one.second}\n- **Risk:** {one.risk}\n- **It worked when:**"
        f" {one.proof.criterion}."
    )
    yield from (f"- **Dated:** {text}" for text in [one.dated] if text)
    yield from (
        f"- **Same question in a runbook:** {_linked([alert])}, where {row.what} ({row.cause})."
        for alert, rows in diagnosis.ROWS.items() for row in rows if row.finding == one.name
    )  # fmt: skip
    yield f"- **Pages:** {_linked(one.pages)}.\n"
    yield "```bash\n" + "\n".join(one.proof.commands(one.name)) + "\n```\n"
    if experiment := one.proof.experiment:
        yield f"`{one.name}.yaml`, with your own model and numbers:\n\n```yaml\n{experiment.file()}```\n"


def _linked(pages: Sequence[str]) -> str:
    return ", ".join(f"[{name}]({name}.md)" for name in pages)
