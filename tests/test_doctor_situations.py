"""The doctor on recorded situations of a real vLLM: each says in situation.yaml what must be found. tests/record_situations.py made them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts.settings import Overlay, Settings
from exporters.catalogue import page
from stack.doctor.diagnose import Diagnosis, diagnose
from stack.doctor.evidence import evidence, records_of
from stack.doctor.matrix import ROWS
from stack.doctor.series import Pages, between

FOLDERS = sorted(folder for folder in (Path(__file__).parent / "situations").iterdir() if folder.is_dir())
LABELS = {row.finding for row in ROWS} | {"none", "abstain"}
# Nobody waits for these over a limit; whoever does has a serious finding.
NEVER_ALONE = ("unique-prompts", "cache-off", "speculative-decoding", "deferred-requests", "wrong-requests")
each_situation = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def about(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "situation.yaml").read_text())


def two(folder: Path, who: str, name: str = "") -> Pages:
    return Pages(who, *(page.parse(gzip.decompress((folder / f"{name}{when}.prom.gz").read_bytes()).decode()) for when in ("before", "after")))


def found(folder: Path) -> Diagnosis:
    said = about(folder)
    sources = [two(folder, "engine")]
    if (folder / "gateway-before.prom.gz").exists():
        sources.append(two(folder, "gateway", "gateway-"))
    log = folder / "requests.jsonl.gz"
    (one,) = evidence(between(sources, said["seconds"], folder.name), records_of([log]) if log.exists() else None)
    return diagnose(one, Settings(Overlay(thresholds=said["thresholds"])))


def test_there_are_situations_of_every_kind_that_a_cpu_can_show():
    labels = {about(folder)["label"] for folder in FOLDERS}
    assert set() == {
        "queue-bound", "prefill-bound", "decode-bound", "kv-bound", "cache-off", "unique-prompts", "head-of-line", "rejections", "hang-ups",
        "frozen-engine", "none", "abstain",
    } - labels  # fmt: skip
    assert set() == labels - LABELS


@each_situation
def test_the_doctor_finds_what_was_made(folder):
    label, diagnosis = about(folder)["label"], found(folder)
    if label in ("none", "abstain"):
        assert () == diagnosis.findings
        assert (label == "abstain") == (diagnosis.state == "thin")
    else:
        assert label == diagnosis.findings[0].name
        assert diagnosis.findings[0].serious or label in NEVER_ALONE


@each_situation
def test_the_doctor_finds_nothing_that_is_not_so(folder):
    assert set() == {finding.name for finding in found(folder).findings} - {about(folder)["label"], *about(folder)["also"]}


@each_situation
def test_what_is_found_rests_on_figures_and_on_at_least_one_that_is_out_of_bounds_or_alone_enough(folder):
    for finding in found(folder).findings:
        assert finding.facts
        assert 0 < finding.confidence <= 1
