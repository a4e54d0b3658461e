"""Captured pages of a real prefill and decode engine, as EngineViews and as series of promtool.

Each request of the first eight is a request of both engines: 4000 prompt tokens, 32 output tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exporters.catalogue import exposition_parser
from exporters.catalogue.exposition_parser import Exposition
from exporters.catalogue.metric import EngineRole
from exporters.requests.record import RequestRecord

PAGES = Path(__file__).parents[1] / "golden" / "prefill-decode"
REQUESTS, PROMPT, COMPLETION = 8, 4000, 32
STEPS = ("before", "after", "after-faults")


def text(role: EngineRole, step: str) -> str:
    return (PAGES / f"{role}-{step}.prom").read_text()


def page(role: EngineRole, step: str) -> Exposition:
    return exposition_parser.parse(text(role, step))


def record(number: int) -> RequestRecord:
    """Return the line of one of the joint requests."""
    return RequestRecord(
        request_id=f"joint-{number}",
        team="chat",
        model="tiny",
        outcome="ok",
        prompt_tokens=PROMPT,
        completion_tokens=COMPLETION,
    )


def series(*names: str, first: str = "before", last: str = "after", with_role: bool = True) -> dict[str, str]:
    """Return samples of these names of both engines in promtool's notation, one sample a minute: five minutes of the
    first page, then the last page for 15 minutes."""
    return {name: values for role in EngineRole for name, values in _of(role, names, first, last, with_role)}


def _of(role: EngineRole, names: tuple[str, ...], first: str, last: str, with_role: bool) -> Iterator[tuple[str, str]]:
    before, after = page(role, first), page(role, last)
    target = {"job": "vllm", "instance": f"{role}:8000"} | ({"role": str(role)} if with_role else {})
    for name in names:
        then = {tuple(sorted(labels.items())): value for labels, value in before.of(name)}
        for labels, value in after.of(name):
            start = then.get(tuple(sorted(labels.items())), 0.0)
            shown = ",".join(f'{label}="{word}"' for label, word in (dict(labels) | target).items())
            yield f"{name}{{{shown}}}", f"{start:.12g}x5 {value:.12g}x15"
