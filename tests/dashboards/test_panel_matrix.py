"""Every panel of every board, tried on a real Prometheus: board x panel x target x range x scrape interval x fixture.

One server holds all fixtures, each in an hour of its own, far enough apart that no query of one sees another. A test is
one target; it runs on everything and its failure names each fixture, range and scrape interval that failed, with the
query as it was sent and what came back."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest

from alerts.panel_ref import PanelRef
from dashboards import annotations, grafana_json, queries, variables
from dashboards.annotations import Annotation
from dashboards.interpolate import ALL, Range, Values, fill
from dashboards.model import ABSENT, RATE, Dashboard, DashboardRow, Panel, Query, Shape, Variable, shown_unit
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, promql, promql_ast, sidecar, vllm
from exporters.catalogue.metric import Unit
from exporters.catalogue.producers import Component
from tests.support import panel_fixtures as fixtures
from tests.support.panel_fixtures import HOUR_S, NEW, STRANGER, Scene
from tests.support.ports import free_port
from tests.support.wait import eventually

pytestmark = pytest.mark.prometheus

EPOCH_S = 1_750_032_000  # the first fixture's hour; a whole number of the two hours that a block spans
APART_S = 9 * 86400  # a day's range whose queries look back for a week still sees nothing of the neighbour
RANGES_S = {"5m": 300, "1h": 3600, "24h": 86400}
SCRAPES_S = (15, 30)
TWICE = "busy"  # the fixture that is scraped at both intervals
MOST_SERIES = 100
POINTS = 60  # of a narrow panel: five times as many show nothing else, and take most of the time
IN_FLIGHT = 4
WEEK_S = 7 * 86400
# a quantile or mean may differ by so much from what the fixture put in; a mistake of milliseconds is a factor of 1000
ROOM = 50
BETWEEN = 1e-6  # how far a ratio may stand outside 0 to 1: floating point, no more

_RATIO, _SECONDS, _FLAG, _AGO = (shown_unit(unit) for unit in (Unit.RATIO, Unit.SECONDS, Unit.FLAG, Unit.TIMESTAMP))
_BRACES = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_PLACE = {"cluster", "namespace"}
# They do not stand in the same namespace as the engines in every cluster, so that choosing one may take them away.
_ELSEWHERE = {Component.DCGM, Component.PROMETHEUS, Component.ALERTMANAGER, Component.COLLECTOR}


# What is asked, and what came back


@dataclass(frozen=True, slots=True)
class Slot:
    """One fixture scraped at one interval: its own hour. back_s: not the hour itself but what was before it, from so
    long ago on."""

    scene: Scene
    scrape_s: int
    began_s: int
    back_s: int = 0

    @property
    def end_s(self) -> int:
        return self.began_s + HOUR_S

    def over(self, range_s: int) -> Range:
        return Range(self.end_s - range_s, self.end_s, POINTS, self.scrape_s)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One series of an answer, summed up. broken: the first value that is no finite number."""

    labels: Mapping[str, str]
    low: float
    high: float
    points: int
    broken: str = ""

    def __str__(self) -> str:
        return (
            f"{dict(self.labels)}: {self.points} points from {self.low:g} to"
            f" {self.high:g}{f', {self.broken} among them' if self.broken else ''}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What Prometheus said. error: '' when it answered."""

    series: tuple[Drawn, ...] = ()
    error: str = ""
    took_s: float = 0.0

    @property
    def filled(self) -> bool:
        return any(series.points for series in self.series)


@dataclass(frozen=True, slots=True)
class Asked:
    """One query as it is sent, and where it comes from: fixture, range, scrape interval, choice of variables."""

    slot: Slot
    range_name: str
    choice: str
    sent: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.slot.scene.name} {self.range_name} scraped every {self.slot.scrape_s}s, {self.choice}"


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []
    value: tuple[float, str] | None = None


class _Data(msgspec.Struct):
    result: list[_Series]


class _Reply(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""
    warnings: list[str] = []


_reply = msgspec.json.Decoder(_Reply)


def summed_up(body: bytes, took_s: float) -> Answer:
    """A reply of the query API without its points, of which there are too many to keep."""
    reply = _reply.decode(body)
    if reply.status != "success" or reply.data is None:
        return Answer(error=reply.error or "no data", took_s=took_s)
    drawn = tuple(
        _drawn(s.metric, [v for _, v in s.values] or ([s.value[1]] if s.value else [])) for s in reply.data.result
    )
    return Answer(drawn, "; ".join(reply.warnings), took_s)


def _drawn(labels: Mapping[str, str], texts: Sequence[str]) -> Drawn:
    values = list(map(float, texts))
    finite = [v for v in values if math.isfinite(v)]
    broken = next((text for text, v in zip(texts, values, strict=True) if not math.isfinite(v)), "")
    return Drawn(labels, min(finite, default=math.nan), max(finite, default=math.nan), len(finite), broken)


# What must be true of an answer


def faults(board: Dashboard, panel: Panel, query: Query, asked: Asked, answer: Answer) -> Iterator[str]:
    """Everything that is wrong with one answer; nothing when it is right."""
    if answer.error:
        yield f"Prometheus says: {answer.error}"
        return
    if not answer.filled and must_answer(panel, query, asked):
        yield "nothing came back"
    for series in answer.series:
        if series.broken:
            yield f"{series.broken} in {series}"
    if len(answer.series) > MOST_SERIES:
        yield f"{len(answer.series)} series, more than {MOST_SERIES}"
    yield from _legend_faults(panel.shape, query.legend, asked.slot.scene, answer)
    yield from _value_faults(query, panel.shape, asked, answer)


def must_answer(panel: Panel, query: Query, asked: Asked) -> bool:
    """Whether this fixture has what the query asks for.

    The whole fixtures fill everything that is not marked as optional and that does not step back for another source
    (`unless`); elsewhere it is told from the expression and the fixture's series: gauges answer always, counters and
    buckets once they moved. Ratios and quantiles of an idle engine are absent, and so is what one choice takes away
    from a fixture whose engines differ."""
    scene = asked.slot.scene
    if asked.choice != ALL and not _stays(scene, query):
        return False
    if re.search(rf'\b{promql.ROLE}(="|!="")', query.expr) and not _has_roles(scene.name):
        return False
    if re.search(r"\bunless\b", query.expr) or ("offset" in query.expr and not scene.whole):
        return False
    return (scene.whole and not panel.optional) or _answers(scene.name, query.expr)


@cache
def _has_roles(scene_name: str) -> bool:
    return any(promql.ROLE in line.labels for line in SCENES[scene_name].lines)


def _stays(scene: Scene, query: Query) -> bool:
    """Whether what the query needs is still there when the first value of each variable is chosen."""
    return scene.alike and not (scene.engine_labels.get("namespace") and query.needs & _ELSEWHERE)


@cache
def _answers(scene_name: str, expr: str) -> bool:
    scene = SCENES[scene_name]
    compared = re.findall(
        r"(?:[<>]=?|[=!]=)(?!~)\s*(?:bool\s+)?([^\s)]*)", re.sub(r'"(?:[^"\\]|\\.)*"|\{[^}]*\}', "", expr)
    )
    if any(value not in ("0",) for value in compared) or (scene.rests and compared):
        return False  # a threshold that may rightly let nothing pass
    shown = scene.gauges() if scene.rests else scene.page(lively=bool(compared))
    return promql_ast.answers(expr, shown, lambda name: True)


def _legend_faults(shape: Shape, legend: str, scene: Scene, answer: Answer) -> Iterator[str]:
    """Labels that a legend names exist in the result, and no two lines of a panel are called the same."""
    # only beyond the buckets
    wanted = set(_BRACES.findall(legend)) - (set() if scene.engine_labels.get("cluster") else _PLACE) - {promql.BOUND}
    for series in answer.series:
        if missing := wanted - set(series.labels):
            yield f"the legend names {sorted(missing)}, which is not in {series}"
            return
    called = [_called(legend, series.labels) for series in answer.series]
    if shape is not Shape.TABLE and legend and len(set(called)) < len(called):
        yield f"several lines are called alike: {sorted({name for name in called if called.count(name) > 1})}"


def _called(legend: str, labels: Mapping[str, str]) -> str:
    return _BRACES.sub(lambda found: labels.get(found[1], ""), legend)


def _value_faults(query: Query, shape: Shape, asked: Asked, answer: Answer) -> Iterator[str]:
    drawn = [series for series in answer.series if series.points]
    if shape is Shape.HEATMAP:  # counts; the unit is that of the bounds
        yield from (f"a negative count: {series}" for series in drawn if series.low < 0)
        return
    lowest, highest = _allowed(query, asked)
    for series in drawn:
        if series.low < lowest or series.high > highest:
            yield f"outside {lowest:g} to {highest:g} {query.unit}: {series}"
    if query.unit == _FLAG:
        yield from (
            f"a flag is 0, 1 or not present: {series}"
            for series in drawn
            if {series.low, series.high} - {0.0, 1.0, ABSENT}
        )
    if query.unit == _SECONDS and drawn and (put_in := _put_in_s(asked.slot.scene.name, query.expr)):
        most = max(series.high for series in drawn)
        if 0 < most < put_in[0] / ROOM:
            yield f"never above {most:g} s, where the fixture put in {put_in[0]:g} s on average"


def _allowed(query: Query, asked: Asked) -> tuple[float, float]:
    """The lowest and highest value that the unit, and for seconds what the fixture put in, leave room for."""
    if query.unit == _RATIO:
        return -BETWEEN, 1 + BETWEEN
    if query.unit == _AGO:  # Grafana wants milliseconds since 1970
        return (asked.slot.began_s - WEEK_S) * 1000, asked.slot.end_s * 1000
    if query.unit != _SECONDS:
        return -math.inf, math.inf
    put_in = _put_in_s(asked.slot.scene.name, query.expr)
    return 0.0, min(WEEK_S, 2 * put_in[1] + 1e-9) if put_in else WEEK_S


@cache
def _put_in_s(scene_name: str, expr: str) -> tuple[float, float] | None:
    """The smallest mean and the largest value behind an expression that only reads seconds; None where it mixes them
    with other things."""
    names = promql_ast.names(expr)
    if "time()" in expr or any(
        name not in fixtures.BY_SAMPLE or fixtures.BY_SAMPLE[name].unit is not Unit.SECONDS for name in names
    ):
        return None
    return fixtures.seconds_put_in(SCENES[scene_name], names)


# The server and the queries


@dataclass
class Coverage:
    """What one target showed over all fixtures."""

    filled_by: set[str] = field(default_factory=set)
    series: int = 0
    worst_s: float = 0.0
    optional: bool = False


class Matrix:
    """All fixtures in one Prometheus, and every answer that it gave so far."""

    def __init__(self, port: int, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.beyond: Mapping[str, Slot] = {}
        self.coverage: dict[str, Coverage] = {}
        self.asked = self.sent = 0
        self.seconds = dict.fromkeys(("fixtures", "server", "queries"), 0.0)
        self._port = port
        self._own = threading.local()
        self._answers: dict[tuple[object, ...], Answer] = {}
        self._texts: dict[tuple[object, ...], list[str]] = {}
        self._pool = ThreadPoolExecutor(IN_FLIGHT)

    def close(self) -> None:
        self._pool.shutdown()

    def get(self, path: str, **parameters: object) -> bytes:
        """One request; each thread keeps its connection."""
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._own.connection.request("GET", f"/api/v1/{path}?{urlencode(parameters, doseq=True)}")
        reply = self._own.connection.getresponse().read()
        assert isinstance(reply, bytes)
        return reply

    def answers(self, requests: Sequence[Asked]) -> list[Answer]:
        began = time.perf_counter()
        found = list(self._pool.map(self._answer, requests))
        self.seconds["queries"] += time.perf_counter() - began
        return found

    def _answer(self, asked: Asked) -> Answer:
        over = asked.slot.over(RANGES_S[asked.range_name])
        key = (asked.sent, over.end_s, asked.instant or (over.start_s, over.step_s))
        self.asked += 1
        if key not in self._answers:
            self.sent += 1
            began = time.perf_counter()
            if asked.instant:
                body = self.get("query", query=asked.sent, time=over.end_s)
            else:
                body = self.get("query_range", query=asked.sent, start=over.start_s, end=over.end_s, step=over.step_s)
            self._answers[key] = summed_up(body, time.perf_counter() - began)
        return self._answers[key]

    def values_of(self, variable: Variable, slot: Slot, chosen: Values) -> list[str]:
        """A variable's own query, as Grafana runs it: the label's values among the series that match within the
        range."""
        series, label = label_values(variable.query)
        over = slot.over(HOUR_S)
        key = (fill(series, chosen, over), label, slot.end_s)
        if key not in self._texts:
            reply = json.loads(
                self.get(
                    f"label/{label}/values",
                    **({"match[]": key[0]} if series else {}),
                    start=over.start_s,
                    end=over.end_s,
                )
            )
            assert reply["status"] == "success", reply
            self._texts[key] = sorted(reply["data"])
        return self._texts[key]

    def choices(self, board: Dashboard, slot: Slot) -> dict[str, dict[str, str | Sequence[str]]]:
        """All, and the first value of each variable that has one; the later variables are asked under the choice of the
        earlier."""
        every: dict[str, str | Sequence[str]] = {}
        first: dict[str, str | Sequence[str]] = {}
        for variable in variables.of(board):
            if variable.kind != "query":
                every[variable.name] = first[variable.name] = variable.default or next(iter(variable.options), "")
                continue
            found = self.values_of(variable, slot, first)
            every[variable.name] = [ALL]
            first[variable.name] = found[:1] or [ALL]
        return {ALL: every, "first of each": first}


def label_values(query: str) -> tuple[str, str]:
    """The series and the label of Grafana's label_values(series, label)."""
    found = re.fullmatch(r"label_values\((?:(.*),\s*)?(\w+)\)", query.strip(), re.DOTALL)
    assert found, f"a variable asks label_values(series, label), not {query}"
    return found[1] or "", found[2]


SCENES = {scene.name: scene for scene in fixtures.scenes()}
NAMES = {name: scene.names for name, scene in SCENES.items()}


def planned() -> list[Slot]:
    """The whole fixtures at the usual scrape interval, one of them at both, and the others at the longer: what an
    interval changes, the window of rates, is a matter of the query."""
    scraped = [
        (scene, scrape_s)
        for scene in SCENES.values()
        for scrape_s in (SCRAPES_S if scene.name == TWICE else SCRAPES_S[:1] if scene.whole else SCRAPES_S[1:])
    ]
    return [Slot(scene, scrape_s, EPOCH_S + i * APART_S) for i, (scene, scrape_s) in enumerate(scraped)]


def looked_back() -> tuple[list[int], frozenset[str]]:
    """How far back boards compare with, in seconds, and which series: there the whole fixtures need an hour that was
    much the same."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": WEEK_S}
    defaults = {v.name: v.default for board in BOARDS for v in board.extra if v.default}
    read = [
        query.expr for board in BOARDS for panel in board.panels for query in panel.queries if "offset" in query.expr
    ]
    texts = (re.sub(r"\$\{?(\w+)\}?", lambda found: defaults.get(found[1], found[0]), expr) for expr in read)
    backs = {int(n) * units[unit] for text in texts for n, unit in re.findall(r"offset\s+(\d+)([smhdw])", text)} - {0}
    near = max((back for back in backs if back <= HOUR_S), default=0)
    names = frozenset(name for expr in read for name in promql_ast.names(expr))
    return sorted({back for back in backs if back > HOUR_S} | ({near} if near else set())), names


def write_blocks(promtool: Path, folder: Path, slots: Iterable[Slot], compared: frozenset[str] = frozenset()) -> None:
    """Each slot's hour as a block. One call for each: promtool reads a file once for every block that it spans.

    compared: of what was before the hour only these series are written."""
    data = folder / "data"

    def write(slot: Slot) -> None:
        page = folder / f"{slot.began_s}-{slot.back_s}.om"
        with page.open("w") as file:
            scene = (
                replace(slot.scene, lines=tuple(line for line in slot.scene.lines if line.name in compared))
                if slot.back_s
                else slot.scene
            )
            file.writelines(scene.text(slot.began_s, slot.scrape_s, slot.back_s))
        command = [promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", page, data]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        page.unlink()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, slots))


@pytest.fixture(scope="session")
def matrix(part, tmp_path_factory, request) -> Iterator[Matrix]:
    prometheus, promtool = part("prometheus").path, part("promtool").path
    folder = tmp_path_factory.mktemp("matrix")
    slots = planned()
    began = time.perf_counter()
    backs, compared = looked_back()
    for_bounds = [
        Slot(scene, SCRAPES_S[-1], slots[-1].began_s + (i + 1) * APART_S)
        for i, scene in enumerate(fixtures.beyond_the_buckets().values())
    ]
    history = [replace(slot, back_s=back_s) for slot in slots if slot.scene.whole for back_s in backs]
    write_blocks(promtool, folder, (*slots, *for_bounds, *history), compared)
    wrote = time.perf_counter()
    (folder / "prometheus.yml").write_text("{}\n")
    with (folder / "prometheus.log").open("w") as log:
        port = free_port()
        server = subprocess.Popen(
            [
                prometheus,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                "--storage.tsdb.retention.time=100y",
                "--storage.tsdb.min-block-duration=2h",
                "--storage.tsdb.max-block-duration=2h",
                f"--web.listen-address=127.0.0.1:{port}",
                "--web.read-timeout=1h",  # also how long a connection may be idle
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        found = Matrix(port, slots)
        found.beyond = {slot.scene.name.split()[-1]: slot for slot in for_bounds}
        try:
            eventually(lambda: b"Ready" in _ready(port), what="a ready Prometheus")
            found.seconds |= {"fixtures": wrote - began, "server": time.perf_counter() - wrote}
            yield found
        finally:
            found.close()
            server.terminate()
            server.wait(60)
    where = Path(os.environ.get("VLLM_WATCH_ARTIFACTS") or folder)
    where.mkdir(parents=True, exist_ok=True)
    (where / "panels.md").write_text(table(found))
    request.config.pluginmanager.register(
        _Summary(f"{summary(found)}; table: {where / 'panels.md'}"), "panel-matrix-summary"
    )


def _ready(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/-/ready")
    return connection.getresponse().read()


@dataclass(frozen=True, slots=True)
class _Summary:
    """One line at the end of the run; pytest calls it by its name."""

    line: str

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("panels on a real Prometheus")
        terminalreporter.write_line(self.line)


def summary(matrix: Matrix) -> str:
    filled = sum(bool(row.filled_by) for row in matrix.coverage.values())
    spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in matrix.seconds.items())
    return (
        f"{filled} of {len(matrix.coverage)} targets filled; {matrix.asked} questions, {matrix.sent} sent to"
        f" {len(matrix.slots)} fixtures; {spent}"
    )


def table(matrix: Matrix) -> str:
    """The coverage as Markdown: which fixtures fill a target, how many series it shows at most, its slowest query."""
    rows = [
        f"| {name} | {', '.join(s for s in SCENES if s in row.filled_by) or '**none**'} | {row.series} |"
        f" {row.worst_s * 1000:.0f} | {'yes' if row.optional else ''} |"
        for name, row in sorted(matrix.coverage.items())
    ]
    head = "| board/panel/ref | filled by | series | slowest query, ms | may be empty |\n|---|---|---:|---:|---|\n"
    return f"# Panels on a real Prometheus\n\n{summary(matrix)}\n\n{head}" + "\n".join(rows) + "\n"


# The targets


@dataclass(frozen=True, slots=True)
class Target:
    board: Dashboard
    panel: Panel
    ref: str
    query: Query

    @property
    def id(self) -> str:
        return f"{self.board.slug}/{self.panel.slug}/{self.ref}"


def targets(boards: Iterable[Dashboard]) -> list[Target]:
    return [Target(b, p, chr(65 + i), query) for b in boards for p in b.panels for i, query in enumerate(p.queries)]


@cache
def printed(board: Dashboard) -> dict[tuple[int, str], Mapping[str, object]]:
    """The targets as Grafana reads them, by panel id and ref."""
    shown = json.loads(grafana_json.to_json(board))["panels"]
    every = [inner for panel in shown for inner in (panel, *panel.get("panels", ()))]
    return {(panel["id"], target["refId"]): target for panel in every for target in panel.get("targets", ())}


def grid(matrix: Matrix, board: Dashboard, expr: str, instant: bool) -> list[Asked]:
    """Everything under which one expression is asked: each range of each slot with All, and the first value of each
    variable over an hour.

    A fixture without a single one of its series is left out: nothing can come back. The whole ones are always asked."""
    found = []
    for slot in matrix.slots:
        if not _has_any(slot.scene.name, expr):
            continue
        choices = matrix.choices(board, slot)
        again = slot.scene.name == TWICE and slot.scrape_s != SCRAPES_S[0]
        for name, range_s in RANGES_S.items():
            if range_s != HOUR_S and not (slot.scene.whole or _has_roles(slot.scene.name)):
                continue  # what ranges change, fixtures that fill everything show; the others show what engines have
            if range_s == max(RANGES_S.values()) and again:
                continue  # over a day the step sets the window of rates, not the scrape interval
            found.append(Asked(slot, name, ALL, fill(expr, choices[ALL], slot.over(range_s)), instant))
        captured = slot.scene.name.startswith("page-")  # of one engine, which every choice keeps
        if not (again or captured) and any(value != [ALL] for value in choices["first of each"].values()):
            found.append(
                Asked(slot, "1h", "first of each", fill(expr, choices["first of each"], slot.over(HOUR_S)), instant)
            )
    return found


@cache
def _has_any(scene_name: str, expr: str) -> bool:
    # these answer from nothing
    if SCENES[scene_name].whole or re.search(r"\b(absent|absent_over_time|vector|scalar)\b", expr):
        return True
    try:
        return bool(promql_ast.names(expr) & NAMES[scene_name])
    except promql_ast.BadExpression:
        return True


def _filled_elsewhere(target: Target) -> bool:
    """Return whether another test has the fixture: more than ask.SHOWN teams (test_screens.py), different bounds
    (test_histogram_bounds.py)."""
    return target.query.legend.startswith(queries.OTHERS) or target.panel.slug == "mixed-bounds"


def told(matrix: Matrix, target: Target, instant: bool, row: Coverage | None = None) -> list[str]:
    """The faults of a target on every fixture, each with its query and what came back."""
    row = row or Coverage()
    found = []
    requests = grid(matrix, target.board, target.query.expr, instant)
    for asked, answer in zip(requests, matrix.answers(requests), strict=True):
        row.series, row.worst_s = max(row.series, len(answer.series)), max(row.worst_s, answer.took_s)
        if answer.filled:
            row.filled_by.add(asked.slot.scene.name)
        for fault in faults(target.board, target.panel, target.query, asked, answer):
            shown = "\n      ".join(map(str, answer.series[:3])) or "nothing"
            found.append(f"{asked}: {fault}\n    {asked.sent}\n    came back: {shown}")
    if not row.filled_by and not _filled_elsewhere(target):
        found.insert(0, f"no fixture fills it\n    {target.query.expr}")
    return found


def report(found: Sequence[str]) -> str:
    """The first faults in full, the rest by name."""
    return "\n\n" + "\n".join(found[:4]) + "".join(f"\nalso {fault.splitlines()[0]}" for fault in found[4:60])


@pytest.mark.parametrize("target", targets(BOARDS), ids=lambda t: t.id)
def test_panels_return_data_and_no_nonsense(matrix, target):
    """A panel returns data wherever there is some and never nonsense."""
    shown = printed(target.board)[PanelRef(target.board.slug, target.panel.slug).panel_id, target.ref]
    assert target.query.expr == shown["expr"]
    assert (target.panel.shape in (Shape.TABLE, Shape.NUMBER)) is bool(shown.get("instant")), (
        "what is shown as of now is asked as of now"
    )
    row = matrix.coverage.setdefault(target.id, Coverage(optional=bool(target.panel.optional)))
    found = told(matrix, target, bool(shown.get("instant")), row)
    assert not found, report(found)


def quantiles() -> list[Target]:
    """Everything that shows a quantile: asked of buckets, or recorded as one."""
    found = [target for target in targets(BOARDS) if re.search(r"histogram_quantile|:(max_)?p95_", target.query.expr)]
    # the others of more teams than a fixture has
    return [target for target in found if not target.query.legend.startswith(queries.OTHERS)]


@pytest.mark.parametrize("mark", ["<", ">"])
@pytest.mark.parametrize("target", quantiles(), ids=lambda t: t.id)
def test_out_of_range_quantile_bears_its_mark(matrix, target, mark):
    """On fixtures in which nothing lies between two finite bounds: a table leaves it out, everything else shows the
    bound and the mark."""
    slot = matrix.beyond[mark]
    sent = fill(target.query.expr, matrix.choices(target.board, slot)[ALL], slot.over(HOUR_S))
    instant = target.panel.shape in (Shape.TABLE, Shape.NUMBER)
    (answer,) = matrix.answers([Asked(slot, "1h", ALL, sent, instant)])
    assert not answer.error
    unmarked = [str(series) for series in answer.series if series.points and series.labels.get(promql.BOUND) != mark]
    assert not unmarked, f"{sent}\n{unmarked}"
    if target.panel.shape is Shape.TABLE or "offset" in target.query.expr or target.panel.slug == "mixed-bounds":
        return
    assert answer.filled, sent
    assert target.query.legend.endswith(f"{{{{{promql.BOUND}}}}}"), "the legend ends with the mark"


def test_stat_panel_of_a_quantile_shows_the_mark():
    """No board has one; whoever adds one gets it right."""
    quantile = queries.p95(vllm.TIME_TO_FIRST_TOKEN)
    board = Dashboard(
        "b", "B", "Q?", (DashboardRow("", (Panel("p", "P, p95", "M.", "G.", "A.", (quantile,), Shape.NUMBER),)),)
    )
    (shown,) = json.loads(grafana_json.to_json(board))["panels"]
    assert "value_and_name" == shown["options"]["textMode"]


@pytest.mark.parametrize(
    ("board", "variable"),
    [pytest.param(b, v, id=f"{b.slug}/variable/{v.name}") for b in BOARDS for v in variables.of(b)],
)
def test_variables_offer_what_engines_have(matrix, board, variable):
    """A label that others use too (job, model_name, ...) must not bring their values in; choosing one narrows the
    next."""
    if variable.kind != "query":
        assert variable.default or variable.options
        return
    series, label = label_values(variable.query)
    assert series, "label_values(label) alone asks every exporter"
    common = {v.name: [ALL] for v in variables.of(board) if v.kind == "query"}
    for slot in matrix.slots:
        scene = slot.scene
        found = set(matrix.values_of(variable, slot, common))
        assert STRANGER not in found, f"{scene.name}: {variable.query}"
        if variable.name in variables.CHAIN:
            if board.recorded and not scene.names & promql_ast.names(series):
                assert set() == found, "nobody recorded anything here"
                continue
            from_log = promql_ast.names(series) == {sidecar.REQUESTS.name}
            wanted = scene.teams if label == "team" else scene.engine_labels.get(label, frozenset())
            assert (wanted if scene.teams or not from_log else frozenset()) == found, f"{scene.name}: {variable.query}"
        elif scene.whole:
            assert found, f"{scene.name}: {variable.query}"
        first = matrix.choices(board, slot)["first of each"].get(variable.name)
        assert first is None or set(first) <= found | {ALL}


@pytest.mark.parametrize(
    ("board", "mark"),
    [pytest.param(b, a, id=f"{b.slug}/annotation/{a.name}") for b in BOARDS for a in annotations.of(b)],  # type: ignore[attr-defined]
)
def test_an_annotation_marks_what_happened_and_never_nonsense(matrix, board, mark):
    requests = grid(matrix, board, mark.expr, instant=False)
    found = []
    filled = set()
    for asked, answer in zip(requests, matrix.answers(requests), strict=True):
        filled |= {asked.slot.scene.name} if answer.filled else set()
        found += [f"{asked}: {fault}\n    {asked.sent}" for fault in _mark_faults(mark, asked, answer)]
    assert not found, report(found)
    assert {name for name, scene in SCENES.items() if scene.whole} <= filled, f"only {sorted(filled)} show it"


def _mark_faults(mark: Annotation, asked: Asked, answer: Answer) -> Iterator[str]:
    if answer.error:
        yield f"Prometheus says: {answer.error}"
        return
    if len(answer.series) > MOST_SERIES:
        yield f"{len(answer.series)} series, more than {MOST_SERIES}"
    for series in answer.series:
        if series.broken:
            yield f"{series.broken} in {series}"
        # not every alert is about one instance
        if missing := set(_BRACES.findall(mark.title)) - set(series.labels) - {"instance"}:
            yield f"the title names {sorted(missing)}, which is not in {series}"
        if (
            mark.at_value
            and not (asked.slot.began_s - WEEK_S) * 1000 <= series.low <= series.high <= asked.slot.end_s * 1000
        ):
            yield f"a mark at {series.high} is no time in milliseconds near the fixture's: {series}"
        if not mark.at_value and series.high > asked.slot.end_s:
            yield f"a region is drawn where samples are, not at {series}"


# The matrix itself: what it is there to catch, it catches


def planted(expr: str, unit: str = "short", legend: str = "", shape: Shape = Shape.LINES, optional: str = "") -> Target:
    """A panel of a board that nobody ships."""
    panel = Panel("planted", "Planted", "M.", "G.", "A.", (Query(expr, legend, unit),), shape, optional=optional)
    return Target(Dashboard("planted", "Planted", "Is it caught?", ()), panel, "A", panel.queries[0])


_GENERATED = promql.per_second(vllm.GENERATION_TOKENS, RATE)
_ITL_MEAN = promql.mean(vllm.INTER_TOKEN_LATENCY, RATE)


@pytest.mark.parametrize(
    ("target", "caught"),
    [
        pytest.param(
            planted(_GENERATED.replace("generation_tokens", "generated_tokens")), "no fixture", id="a renamed metric"
        ),
        pytest.param(
            planted(_GENERATED.replace("generation_tokens", "generated_tokens")),
            "busy 1h scraped every 30s, $__all: nothing",
            id="named",
        ),
        pytest.param(
            planted(_ITL_MEAN.replace(" > 0", "")),
            "idle 1h scraped every 30s, $__all: NaN in",
            id="a division without guard",
        ),
        pytest.param(
            planted(f"({_ITL_MEAN}) * 1000", _SECONDS),
            "busy 1h scraped every 15s, $__all: outside 0 to",
            id="milliseconds as seconds",
        ),
        pytest.param(planted(f"({_ITL_MEAN}) / 1000", _SECONDS), "never above", id="seconds divided once more"),
        pytest.param(planted(f"sum({vllm.KV_CACHE_USAGE.name})", _RATIO), "outside", id="a sum of ratios"),
        pytest.param(
            planted(_GENERATED, legend="{{instance}}"), "the legend names ['instance']", id="a legend without its label"
        ),
        pytest.param(
            planted(vllm.KV_CACHE_USAGE.name, legend="{{model_name}}"), "called alike: [", id="lines of one name"
        ),
        pytest.param(
            planted(f"{vllm.TIME_TO_FIRST_TOKEN.name}_bucket"),
            f"more than {MOST_SERIES}",
            id="a line for every bucket of every engine",
        ),
        pytest.param(planted("sum by (model_name) ("), "Prometheus says: ", id="no PromQL"),
        pytest.param(
            planted(sidecar.EVENT_TIME.name, _AGO), "outside", id="a time in seconds where Grafana reads milliseconds"
        ),
    ],
)
def test_the_matrix_catches(matrix, target, caught):
    assert any(caught in fault for fault in told(matrix, target, instant=False))


def test_what_is_sound_is_not_caught(matrix):
    assert [] == told(
        matrix, planted(_GENERATED, shown_unit(Unit.TOKENS, per_second=True), "{{model_name}}"), instant=False
    )
    assert [] == told(matrix, planted(_ITL_MEAN, _SECONDS, "{{model_name}}"), instant=True)


def test_every_label_of_the_catalogue_has_words_in_the_fixtures():
    """A label that the fixtures do not know would hold a made-up value that no board asks for."""
    known = fixtures.WORDS.keys() | fixtures.OF_A_PLACE
    unknown = {label: metric.name for metric in EVERYTHING for label in metric.labels if label not in known}
    assert {} == unknown


def test_parts_are_parts_in_the_fixtures():
    """What the fixtures put in makes sense, so that a ratio above 1 is the panel's fault."""
    page = SCENES["busy"].page()
    assert page.total(vllm.PREFIX_CACHE_HITS.name) < page.total(vllm.PREFIX_CACHE_QUERIES.name)
    by_source = page.total(vllm.PROMPT_TOKENS_BY_SOURCE.name)
    assert by_source == pytest.approx(page.total(vllm.PROMPT_TOKENS.name))


def test_the_busy_fixture_holds_every_family_that_exists():
    """Optional features included, up to the release of the captured pages; a family that is new in the catalogue is in
    the fixtures by itself."""
    assert [] == [
        metric.name for metric in EVERYTHING if metric.lives_in(NEW) and not NAMES["busy"] & set(metric.samples)
    ]
