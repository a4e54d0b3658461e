"""The doctor on recorded situations of a real vLLM: each says in situation.yaml what must be found.
tests/bench/record_situations.py made them."""

from __future__ import annotations

import asyncio
import functools
import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts.settings import Overrides, Settings
from exporters.catalogue import exposition_parser, promql_ast
from exporters.catalogue.exposition_parser import Exposition
from exporters.net.prometheus import Prometheus, address
from stack.doctor.collect import evidence, records_of
from stack.doctor.diagnose import Diagnosis, areas, diagnose, serious, undecided
from stack.doctor.series import Pages, between, over
from stack.doctor.symptoms import ROWS
from tests.support.doctor_pages import scraped

FOLDERS = sorted(folder for folder in (Path(__file__).parents[2] / "situations").iterdir() if folder.is_dir())
LABELS = {row.finding for row in ROWS} | {"none", "abstain", "undecided"}
# Nobody waits for these over a limit; whoever does has a serious finding.
NEVER_ALONE = ("unique-prompts", "cache-off", "speculative-decoding", "deferred-requests", "wrong-requests")
each_situation = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@functools.cache
def about(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "situation.yaml").read_text())


def read(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def two(folder: Path, who: str, name: str = "") -> Pages:
    return Pages(
        who, *(exposition_parser.parse(read(folder / f"{name}{when}.prom.gz")) for when in ("before", "after"))
    )


def all_looks(folder: Path, who: str) -> Pages:
    """Return the two pages of the engine with the looks between them, where those were recorded."""
    pages, path = two(folder, who), folder / "looks.prom.gz"
    if not path.exists():
        return pages
    looks = [each.partition(" s\n") for each in read(path).split("# look at ")[1:]]
    inside, at_s = [exposition_parser.parse(text) for _, _, text in looks], [float(at) for at, _, _ in looks]
    return replace(pages, inside=inside, at_s=at_s, silent_s=about(folder).get("silent_s", 0.0))


@functools.cache
def found(folder: Path) -> Diagnosis:
    said = about(folder)
    sources = [all_looks(folder, "engine")]
    if (folder / "gateway-before.prom.gz").exists():
        sources.append(two(folder, "gateway", "gateway-"))
    log = folder / "requests.jsonl.gz"
    (one,) = evidence(between(sources, said["seconds"], folder.name), records_of([log]) if log.exists() else None)
    return diagnose(one, Settings(Overrides(thresholds=said["thresholds"])))


def test_there_are_situations_of_every_kind_that_a_cpu_can_show():
    labels = {about(folder)["label"] for folder in FOLDERS}
    assert set() == {
        "queue-bound", "prefill-bound", "decode-bound", "kv-bound", "cache-off", "unique-prompts", "head-of-line",
        "rejections", "client-disconnects",
        "frozen-engine", "none", "abstain",
    } - labels  # fmt: skip
    assert set() == labels - LABELS


@each_situation
def test_the_doctor_finds_what_was_made(folder):
    label, diagnosis = about(folder)["label"], found(folder)
    if label in ("none", "abstain"):
        assert () == diagnosis.findings
        assert (label == "abstain") == (diagnosis.state == "thin")
    elif label == "undecided":
        assert (True, False) == (undecided([diagnosis]), serious(diagnosis.findings))
        assert "fine" not in {areas(diagnosis)[area] for area in ("queue", "prefill", "decode", "API")}
    else:
        assert label == diagnosis.findings[0].name
        assert label in NEVER_ALONE or about(folder).get("serious", True) == diagnosis.findings[0].serious


@each_situation
def test_the_doctor_finds_nothing_that_is_not_so(folder):
    assert set() == {finding.name for finding in found(folder).findings} - {
        about(folder)["label"],
        *about(folder)["also"],
    }


@each_situation
def test_findings_rest_on_values_out_of_bounds(folder):
    """What is found rests on values and on at least one that is out of bounds or alone enough."""
    for finding in found(folder).findings:
        assert finding.facts
        assert 0 < finding.confidence <= 1


# ---- the same, and more of it


def times(its: Pages, factor: float) -> Pages:
    """As if everything that is counted had happened so many times as often."""
    counts = tuple(
        name
        for name, kind in its.after.kinds.items()
        if kind in ("counter", "histogram") and not name.startswith("process_")
    )

    def scaled(later: Exposition) -> Exposition:
        rows = {}
        for name, now in later.samples.items():
            was = {tuple(sorted(labels.items())): value for labels, value in its.before.of(name)}
            then = [was.get(tuple(sorted(labels.items())), 0.0) for labels, _ in now]
            grown = [
                (labels, start + factor * (value - start)) for (labels, value), start in zip(now, then, strict=True)
            ]
            rows[name] = grown if name.startswith(counts) else now
        return Exposition(rows, later.kinds)

    return replace(its, after=scaled(its.after), inside=[scaled(look) for look in its.inside])


@each_situation
def test_more_of_the_same_is_the_same_finding_and_no_less_sure(folder):
    """What is found hangs on no recorded number, such as how many requests there were."""
    said, its = about(folder), all_looks(folder, "engine")
    if its.restarted or said["label"] == "abstain":
        return
    settings = Settings(Overrides(thresholds=said["thresholds"]))
    seen = [
        diagnose(evidence(between([times(its, factor)], said["seconds"], ""))[0], settings).findings[:1]
        for factor in (1, 2, 10)
    ]
    assert 1 == len({tuple(one.row.name for one in its) for its in seen})
    assert sorted(sure := [round(one.confidence, 6) for its in seen for one in its]) == sure


# ---- the same from a Prometheus


def renamed(given: Exposition, model: str) -> Exposition:
    return Exposition(
        {n: [({**labels, "model_name": model}, v) for labels, v in rows] for n, rows in given.samples.items()},
        given.kinds,
    )


@pytest.mark.prometheus
def test_prometheus_gives_the_same_first_finding(past, tmp_path):
    """All situations in one Prometheus, each a model of its own: with what engines alone tell, and at the thresholds of
    each."""
    ends_s, seconds, lines, wanted = 1_750_000_000, 30, list[str](), {}
    for folder in FOLDERS:
        said, its = about(folder), two(folder, folder.name)
        if its.restarted:
            continue
        settings = Settings(Overrides(thresholds=said["thresholds"]))
        (alone,) = evidence(between([its], seconds, folder.name))
        wanted[folder.name] = settings, diagnose(alone, settings)
        text = scraped(renamed(its.before, folder.name), renamed(its.after, folder.name), seconds, ends_s)
        lines += [
            line.replace('instance="engine:8000"', f'instance="{folder.name}"')
            for line in text.splitlines()
            if line != "# EOF"
        ]
    (file := tmp_path / "all.om").write_text("\n".join([*lines, "# EOF", ""]))

    async def asked(where: str) -> tuple[dict[str, Any], dict[str, set[str]]]:
        async with Prometheus(address(where)) as prometheus:
            models = {one.model: one for one in evidence(await over(prometheus, seconds + 1, ends_s))}
            asks = {
                ask
                for _, diagnosis in wanted.values()
                for finding in diagnosis.findings[:1]
                for ask in finding.row.asks
            }
            answers = {ask: await prometheus.as_of(ask, ends_s) for ask in asks}
            return models, {
                ask: {series.metric.get("model_name", "") for series in answer.series}
                for ask, answer in answers.items()
            }

    models, shown = asyncio.run(asked(past(file)))
    assert wanted.keys() == models.keys()
    assert 12 < sum(bool(diagnosis.findings) for _, diagnosis in wanted.values())
    for name, (settings, diagnosis) in wanted.items():
        recorded = diagnose(models[name], settings)
        assert [one.name for one in diagnosis.findings[:1]] == [one.name for one in recorded.findings[:1]], name
        for ask in [ask for one in diagnosis.findings[:1] for ask in one.row.asks]:
            if (
                "model_name" in ask
                and all(each.startswith("vllm:") for each in promql_ast.names(ask))
                and "frozen" not in diagnosis.findings[0].name
            ):
                assert name in shown[ask], ask
