"""A case of alert_cases.py in the middle of everything else that a deployment shows (panel_fixtures.py), each in a time
of its own on one real
Prometheus: the ground on which a runbook page is tried at the moment at which its alert fires.

Invariant: what a case shows it shows alone, since an engine that is well beside it would make its ratios better; who is
down shows nothing."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from alerts.registry import ALERTS, RECORDINGS
from alerts.rules import Recording
from exporters.catalogue import EVERYTHING, prometheus, promql_ast, vllm
from exporters.catalogue.metric import Unit
from exporters.text import parse_window
from runbooks import page as runbook_page
from runbooks.page import RunbookPage
from stack.lab import install
from tests.support import alert_cases as cases
from tests.support import panel_fixtures as fixtures
from tests.support.alert_cases import Case
from tests.support.panel_fixtures import HOUR_S, Line
from tests.support.ports import free_port
from tests.support.wait import eventually

EPOCH_S = 1_750_032_000
APART_S = 40 * 86400  # further than any query looks back
EVERY_S = 60
SHORT_S = 75 * 60  # before the alert fires the scene is scraped every EVERY_S; what lies further back every SPARSE_S
SPARSE_S = 300
# how long Prometheus shows a series that ended without a word; a file of samples cannot say that it ended, so it ends
# earlier
LOOKBACK_S = 300
PAST_S = 7200  # before a case began all was as in the scene: what is compared with yesterday finds it

ALERT = {alert.name: alert for alert in ALERTS}
_UNIT = {sample: metric.unit for metric in EVERYTHING for sample in metric.samples}
Sampled = tuple[str, Mapping[str, str], list[tuple[int, float]]]  # name, labels, (second, value)

# Where the scene must differ from an ordinary hour, so that what the alert tells is true in it: case -> (instance,
# series that it does not show).
NOT_SHOWN: dict[str, tuple[str, str]] = {
    "VLLMMetricsAbsent": (cases.A, r"vllm:.*"),
    "VLLMRestartLoop by its counters": (cases.A, r"process_.*"),
    **dict.fromkeys(
        (f"{alert} where no sidecar compares" for alert in ("VLLMEngineExceedsLog", "VLLMLogExceedsEngine")),
        (cases.SIDECAR["instance"], r"vllm_watch_(reconcile|missing_in_log|extra_in_log)_.*"),
    ),
    "VLLMCostOverBudget where nothing is attributed": (cases.SIDECAR["instance"], r"vllm_watch_cost_total"),
    "VLLMHTTPErrorRatioHigh": (cases.SIDECAR["instance"], r"vllm_watch_(requests|reconcile)_.*"),
    "VLLMClientHangupsRising without a request log": (
        cases.SIDECAR["instance"],
        r"vllm_watch_(requests|tokens|log|ttft|tpot|e2e)_.*",
    ),
}

# What else is so where a page tells causes apart by things that its alert does not ask for: case -> series as in
# alert_cases.py.
SITUATIONS: dict[str, cases.Series] = {
    "VLLMCacheHitsCollapsed": {  # a team changed its template
        cases.log("tokens_total", type="prompt"): cases.grows((240, 2000), (60, 2000)),
        cases.log("tokens_total", type="cached"): cases.grows((240, 1200), (60, 200)),
    },
    "VLLMGatewayRejecting": {cases.log("request_reasons_total", outcome="rejected", reason="unknown_key"): "0+11x40"},
    "VLLMEngineRejecting": {cases.engine("kv_cache_usage_perc"): "0.95x40"},
    "VLLMHTTPErrorRatioHigh": cases.refused_by_engine("0x40"),
    "VLLMLogExceedsEngine where no sidecar compares": {
        cases.gateway("upstream_up", upstream="elsewhere", address="10.0.9.9:8000"): "1x90"
    },
    **{
        f"VLLMCostOverBudget {shows}": {cases.card("utilization_ratio"): "0x130"}
        for shows in ("as attributed", "where nothing is attributed")
    },
    # one write failed, the next did not
    "VLLMRequestLogUnwritable while records wait": {cases.gateway("log_waiting_requests"): "0x40"},
}


# ---- what is asked when


@dataclass(frozen=True)
class Slot:
    """One case in its own time. began_s: its second 0; at_s: when its alert fires."""

    case: Case
    began_s: int

    @property
    def at_s(self) -> int:
        return self.began_s + sum(parse_window(part) for part in re.findall(r"\d+[smhdw]", self.case.fires_at))

    @cached_property
    def page(self) -> RunbookPage:
        """The page of its alert, filled with the labels that the alert fires with."""
        alert = ALERT[self.case.alert]
        labels = {**self.case.labels, "alertname": alert.name, "severity": str(alert.severity), "owner": alert.owner}
        return runbook_page.parse(alert.name, runbook_page.text(alert.name) or "").filled(labels)

    @cached_property
    def texts(self) -> list[str]:
        """Everything that is asked of it."""
        return [*steps_asked(self.page), *(row.condition for row in self.page.rows), ALERT[self.case.alert].expr]

    @cached_property
    def recordings(self) -> list[Recording]:
        """Those that are asked for, and those that they are made of."""
        found: list[Recording] = []
        texts = self.texts
        while texts:
            names = {name for text in texts for name in promql_ast.names(text)} - {
                recording.record for recording in found
            }
            more = [recording for recording in RECORDINGS if recording.record in names]
            found, texts = found + more, [recording.expr for recording in more]
        return found


def slots() -> list[Slot]:
    return [Slot(case, EPOCH_S + i * APART_S) for i, case in enumerate(cases.CASES)]


def steps_asked(page: RunbookPage) -> list[str]:
    """The queries of the first five minutes."""
    return [block.text for step in page.steps for block in step.blocks if block.language == "promql"]


# ---- what is shown


@cache
def whole_scene() -> tuple[Line, ...]:
    """Everything that exists, under the addresses and names that the cases use. What rules record of a case is asked,
    not taken from here."""
    known = {
        "vllm-0:8000": cases.A, "vllm-1:8000": cases.B, "qwen3-8b": cases.MODEL["model_name"],
        "sidecar:9401": cases.SIDECAR["instance"], "gateway:8010": cases.GATEWAY["instance"],
        "ship:9403": cases.SHIP["instance"], "prometheus:9090": cases.PROMETHEUS["instance"],
        "dcgm:9400": cases.DCGM["instance"], fixtures.CARDS[0]: cases.CARD["uuid"],
        fixtures.OTHER_CARD: cases.DCGM["UUID"],
        fixtures.WORDS["path"][0]: _of_a_case("path"),
    }  # fmt: skip
    sources = {
        "vllm-0": _of_a_case("source", "VLLMSidecarSourceFailing"),
        "nvml": "gpu",
        "requests.jsonl": _of_a_case("path"),
    }
    busy = next(scene for scene in fixtures.scenes() if scene.name == "busy")
    recorded = {recording.record for recording in RECORDINGS}
    lines = (
        replace(line, labels={k: (sources if k == "source" else known).get(v, v) for k, v in line.labels.items()})
        for line in busy.lines if line.name not in recorded
    )  # fmt: skip
    return tuple(replace(line, start=0, grows=HOUR_S, clock=True) if line.name in _IS_NOW else line for line in lines)


def _of_a_case(label: str, alert: str = "") -> str:
    """A value that the cases give a label."""
    return next(case.labels[label] for case in cases.CASES if label in case.labels and alert in ("", case.alert))


def laid_over(slot: Slot, names: frozenset[str]) -> Iterator[Sampled]:
    """The scene and the case, as far as series have these names. A case's own come last: a file holds the samples of a
    series in order."""
    own = list(cases.samples(replace(slot.case, series={**slot.case.series, **SITUATIONS.get(str(slot.case), {})})))
    told = {new for name, _, _ in own for new in (name, *_NEWER.get(name, ()))}
    ended, times, hour_began = dict(_ended(slot, own)), _times(slot), slot.at_s - HOUR_S
    for line in whole_scene():
        if line.name not in names or _not_shown(slot, line):
            continue
        until = (
            slot.at_s
            if line.name in _SCRAPED
            else ended.get((line.labels.get("job"), line.labels.get("instance")), slot.at_s)
        )
        if line.name in told and (line.name not in _OF_EVERY_TARGET or any(_same(line, sampled) for sampled in own)):
            until = slot.began_s - PAST_S
        kept = [at for at in times if at <= until]
        yield (
            line.name,
            line.labels,
            list(zip(kept, line.values([(at - hour_began) / HOUR_S for at in kept], hour_began), strict=True)),
        )
    yield from (_moved(slot, sampled) for sampled in own)


_SCRAPED = {metric.name for metric in prometheus.SCRAPE}
_OF_EVERY_TARGET = _SCRAPED | {metric.name for metric in vllm.BESIDE}
_IS_NOW = {vllm.LORA_REQUESTS_INFO.name}  # its value is the time of the page


def _newer() -> Iterator[tuple[str, list[str]]]:
    """Sample names under their older name, each with the newer ones: an engine shows the one or the other."""
    for metric in (*vllm.VLLM, *vllm.RETIRED):
        for old in metric.formerly:
            for sample in metric.samples:
                if sample.startswith(old):
                    yield sample, [sample.replace(old, metric.name)]


_NEWER = dict(_newer())


def _same(line: Line, sampled: Sampled) -> bool:
    name, labels, _ = sampled
    return line.name == name and all(labels[label] == value for label, value in line.labels.items() if label in labels)


def _not_shown(slot: Slot, line: Line) -> bool:
    instance, pattern = NOT_SHOWN.get(str(slot.case), ("", ""))
    return line.labels.get("instance") == instance and re.fullmatch(pattern, line.name) is not None


def _moved(slot: Slot, sampled: Sampled) -> Sampled:
    """A series of the case in the slot's time: until the alert fires, and earlier where it ended before."""
    name, labels, values = sampled
    zero = slot.began_s if _UNIT.get(name) is Unit.TIMESTAMP else 0  # promtool's clock starts at 0
    shown = [(slot.began_s + s, zero + value) for s, value in values if slot.began_s + s <= slot.at_s]
    has_ended = bool(shown) and slot.at_s - LOOKBACK_S <= shown[-1][0] < slot.at_s - 2 * parse_window(
        slot.case.interval
    )
    return name, labels, [(at - has_ended * (LOOKBACK_S + 1), value) for at, value in shown]


def _ended(slot: Slot, own: Iterable[Sampled]) -> Iterator[tuple[tuple[str | None, str | None], int]]:
    """Targets that do not answer when the alert fires, and since when nothing of them is shown."""
    for name, labels, values in own:
        before = [(s, value) for s, value in values if s <= slot.at_s - slot.began_s]
        if name != prometheus.UP.name or not before:
            continue
        if before[-1][1] != 1 or before[-1][0] < slot.at_s - slot.began_s - 2 * parse_window(slot.case.interval):
            last_s = slot.began_s + max((s for s, value in before if value == 1), default=-SHORT_S)
            yield (labels["job"], labels["instance"]), min(last_s, slot.at_s - LOOKBACK_S - 1)


def _times(slot: Slot) -> list[int]:
    """When the scene is scraped: as far back as the page looks, and there only where it looks."""
    found = [match for text in slot.texts for match in _LOOKS.findall(text)]
    looks = [(parse_window(back or "0s"), parse_window(window or "5m")) for window, back in found if window or back]
    looked = [(slot.at_s - back - window - 2 * SPARSE_S, slot.at_s - back) for back, window in looks]
    near = range(slot.at_s - SHORT_S, slot.at_s + 1, EVERY_S)
    first = min((begin for begin, _ in looked), default=near.start)
    far = range(near.start - SPARSE_S * ((near.start - first) // SPARSE_S), near.start, SPARSE_S)
    return [*(at for at in far if any(begin <= at <= end for begin, end in looked)), *near]


_LOOKS = re.compile(r"(?:\[(\d+[smhdw])(?::\w*)?\])?(?:\s+offset\s+(\d+[smhdw]))?")


# ---- the server


@dataclass(frozen=True, slots=True)
class Asker:
    """A Prometheus that holds all slots."""

    port: int

    def __call__(self, query: str, at_s: int) -> list[dict[str, str]]:
        """The labels of what comes back; a number without labels counts as one series. NaN is nothing that anyone can
        read."""
        data = self._get("query", query=query, time=at_s)
        if data["resultType"] == "scalar":
            return [{}]
        return [series["metric"] for series in data["result"] if series["value"][1] != "NaN"]

    def recorded(self, slot: Slot, level: int) -> Iterator[str]:
        """What recording rules of this depth would have written, as OpenMetrics: each minute up to when the alert
        fires, less often over days."""
        step_s = EVERY_S * (1 + (slot.at_s - slot.began_s) // 86400)
        start_s = slot.at_s - (slot.at_s - slot.began_s) // step_s * step_s
        for recording in (r for r in slot.recordings if depth(r.record) == level):
            for series in self._get("query_range", query=recording.expr, start=start_s, end=slot.at_s, step=step_s)[
                "result"
            ]:
                labels = {k: v for k, v in series["metric"].items() if k != "__name__"} | dict(recording.labels)
                yield _text(recording.record, labels, series["values"])

    def _get(self, path: str, **parameters: object) -> dict[str, Any]:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(parameters)}", timeout=30) as reply:
                found: dict[str, Any] = json.load(reply)["data"]
                return found
        except HTTPError as error:
            raise AssertionError(f"{json.load(error)['error']}: {parameters['query']}") from None


@cache
def depth(name: str) -> int:
    """0 for a raw series, 1 for what is recorded of such, and so on."""
    of = [recording.expr for recording in RECORDINGS if recording.record == name]
    return max((1 + max(map(depth, promql_ast.names(expr)), default=0) for expr in of), default=0)


@contextmanager
def served(part: Callable[[str], install.InstalledPart], folder: Path) -> Iterator[Asker]:
    """All slots on one server. Recorded series are computed by it from the raw ones, level by level; it reads new
    blocks when it starts."""
    every = slots()
    write(part, folder, (text for slot in every for text in text_of(slot)))
    for level in range(1, 1 + max((depth(r.record) for slot in every for r in slot.recordings), default=0)):
        with _server(part, folder) as asker:
            recorded = [text for slot in every for text in asker.recorded(slot, level)]
        write(part, folder, recorded)
    with _server(part, folder) as asker:
        yield asker


def text_of(slot: Slot) -> Iterator[str]:
    """Everything raw that the page and the alert need, as OpenMetrics."""
    names = frozenset(
        name for text in (*slot.texts, *(r.expr for r in slot.recordings)) for name in promql_ast.names(text)
    )
    yield from (_text(*sampled) for sampled in laid_over(slot, names))


def _text(name: str, labels: Mapping[str, str], values: Sequence[tuple[float, object]]) -> str:
    inner = ",".join(
        '{}="{}"'.format(k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for k, v in labels.items()
    )
    return "".join([f"{name}{{{inner}}} {value} {at}\n" for at, value in values])


def write(part: Callable[[str], install.InstalledPart], folder: Path, texts: Iterable[str]) -> None:
    """One block for years: promtool reads the file once for each block, and there would be one every two hours."""
    page = folder / "cases.om"
    with page.open("w") as file:
        file.writelines(texts)
        file.write("# EOF\n")
    command = [
        part("promtool").path,
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        "--quiet",
        "--max-block-duration=39366h",
        page,
        folder / "data",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


@contextmanager
def _server(part: Callable[[str], install.InstalledPart], folder: Path) -> Iterator[Asker]:
    (folder / "prometheus.yml").write_text("{}\n")
    port = free_port()
    with (folder / "prometheus.log").open("a") as log:
        server = subprocess.Popen(
            [part("prometheus").path, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             "--storage.tsdb.retention.time=100y", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            eventually(
                lambda: b"Ready" in urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5).read(),
                what="a ready Prometheus",
            )
            yield Asker(port)
        finally:
            server.terminate()
            server.wait(60)
