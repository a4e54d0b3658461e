"""Expositions of the sidecar after a replay of a captured engine and a request log, and from an earlier checkpoint."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from exporters.gpu.source import GpuSource
from exporters.scrape import Format
from exporters.sidecar import Sidecar
from exporters.sidecar_config import SidecarConfig
from tests.support import protobuf_page
from tests.support.sidecar_scene import GOLDEN, FakeEngine, values
from tests.support.wait import until

FORMATS = {"text.prom": Format.TEXT, "protobuf.txt": Format.PROTOBUF}
NO_NVML = ("sh", "-c", """while read _; do echo '{"error": "no_driver", "why": "none here"}'; done""")
SMI = ("sh", "-c", f"cat {GOLDEN}/nvidia-smi/h200.csv", "nvidia-smi")  # a captured report, whatever this machine has
SIDECAR = {
    "requests_log": ["requests.jsonl"], "events": "events.jsonl", "state": "sidecar.state",
    "prices": {"gpu_hour": 2.0, "currency": "EUR"},
    "teams": {"configured": ["chat", "batch"]}, "golden": ["golden-result.json"],
    "engine_interval_s": 0.1, "gpu_interval_s": 1.0, "patience_s": 0.1,
}  # fmt: skip


def readable(page: bytes, form: Format) -> str:
    """Return an exposition as text; of protobuf, the type and metrics of each family, native buckets by index."""
    if form is not Format.PROTOBUF:
        return page.decode()
    lines = []
    for name, family in protobuf_page.families(page).items():
        lines.append(f"# {name}: type {family.type}")
        for metric in family.metric:
            labels = ",".join(f'{label.name}="{label.value}"' for label in metric.label)
            lines.append(
                f"{name}{{{labels}}} {_protobuf_value(metric)}" if labels else f"{name} {_protobuf_value(metric)}"
            )
    return "\n".join(lines) + "\n"


def _protobuf_value(metric: Any) -> str:
    if not metric.HasField("histogram"):
        return f"{metric.counter.value if metric.HasField('counter') else metric.gauge.value}"
    value = metric.histogram
    return f"count {value.sample_count} sum {value.sample_sum} zero {value.zero_count} {protobuf_page.buckets(value)}"


def sidecar(work: Path) -> dict[str, str]:
    """Return what the sidecar exposes after a replay: a captured engine that goes on, a request log, events, prices."""
    del work
    return asyncio.run(_replayed(FORMATS))


def checkpoint(work: Path) -> dict[str, str]:
    """Return what the sidecar exposes that goes on from the checkpoint of an earlier release, with further requests."""
    shutil.copy(work / "checkpoint/sidecar.state", work / "sidecar.state")
    with (work / "requests.jsonl").open("ab") as log:
        log.write((work / "checkpoint/later.jsonl").read_bytes())
    (text,) = asyncio.run(_replayed({"text.prom": Format.TEXT})).values()
    return {"samples.prom": "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))}


async def _replayed(formats: Mapping[str, Format]) -> dict[str, str]:
    engine = FakeEngine()
    engine.text = (GOLDEN / "0.32.0-before.prom").read_text()
    # Not from a file: its paths would become absolute, and the checkpoint that is committed holds them.
    settings = msgspec.convert(SIDECAR | {"engines": [{"name": "e1", "url": await engine.start()}]}, SidecarConfig)
    with patch("exporters.sidecar.GpuSource", functools.partial(GpuSource, nvml=NO_NVML, smi=SMI)):
        running = Sidecar(settings, "9.9")
        await running.start()
        try:
            await until(
                lambda: _values(running, "vllm_watch_source_up") == {1.0}, "a sidecar that has read all its sources"
            )
            engine.text = (GOLDEN / "0.32.0-after-probe.prom").read_text()
            event = 'vllm_watch_tuning_events_total{kind="restart"} 1'
            await until(lambda: event in running.page(), "the event of the restart")
            await until(
                lambda: 1.0 in _values(running, "vllm_watch_engine_restarts_total"), "the restart of the engine"
            )
            return {name: readable(running.answer(form.value)[0], form) for name, form in formats.items()}
        finally:
            await running.stop()
            await engine.runner.cleanup()


def _values(running: Sidecar, name: str) -> set[float]:
    return {value for key, value in values(running.page()).items() if key[0] == name}
