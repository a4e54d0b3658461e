"""Pairs of engine expositions for the tests of the doctor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from exporters.catalogue import exposition_parser
from exporters.catalogue.exposition_parser import Exposition

GOLDEN = Path(__file__).parents[1] / "golden"


PAIRS = {  # of one running engine each
    "0.10.2": ("0.10.2-load-under-load", "0.10.2-load-after-load"),
    "0.20.2": ("0.20.2-preempt-under-load", "0.20.2-after"),
    "0.32.0": ("0.32.0-preempt-after-load", "0.32.0-reject-after-load"),
}


def golden(name: str) -> Exposition:
    return exposition_parser.parse((GOLDEN / f"{name}.prom").read_text())


def pair(release: str) -> tuple[Exposition, Exposition]:
    first, second = PAIRS[release]
    return golden(first), golden(second)


def scraped(before: Exposition, after: Exposition, seconds: int, ends_s: int) -> str:
    """Both pages as scrapes every ten seconds: what counts grows evenly, what is a gauge changes at the last one."""
    counts = tuple(name for name, kind in after.kinds.items() if kind in ("counter", "histogram"))
    lines = []
    for name, rows in after.samples.items():
        was = {tuple(sorted(labels.items())): value for labels, value in before.of(name)}
        for labels, now in rows:
            inner = ",".join(
                f'{key}="{value}"' for key, value in {**labels, "instance": "engine:8000", "job": "vllm"}.items()
            )
            then = was.get(tuple(sorted(labels.items())), 0.0)
            for at in range(0, seconds + 1, 10):
                share = at / seconds if name.startswith(counts) else float(at == seconds)
                lines.append(f"{name}{{{inner}}} {then + share * (now - then):.12g} {ends_s - seconds + at}")
    return "\n".join([*lines, "# EOF", ""])


def without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Give the command's looks a clock that its waits move: they happen at their exact times, and at once."""
    now_s, turn = [1_750_000_000.0], asyncio.sleep

    async def move(seconds: float) -> None:
        now_s[0] += seconds
        await turn(0)

    patch.setattr("stack.cli.doctor.time", SimpleNamespace(time=lambda: now_s[0]))
    patch.setattr("stack.cli.doctor.asyncio.sleep", move)
