"""The dashboard of one team, in Grafana's JSON and on the board: nothing of another team leaves it.

A real Prometheus holds an hour of three teams and of hostile names. All series with the label team are written, from
the catalogue, so that a query that forgets its matcher would show them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from yarl import URL

from alerts.panel_ref import board_uid
from dashboards import annotations as marked
from dashboards import grafana_json, variables
from dashboards.boards import team as team_board
from dashboards.interpolate import Range, fill
from dashboards.lint import lint
from dashboards.model import Dashboard, DashboardRow, Panel, Query
from dashboards.registry import BOARDS, boards
from exporters.catalogue import EVERYTHING, promql, promql_ast, sidecar
from exporters.catalogue.metric import Kind, Metric
from exporters.net.prometheus import Prometheus, QueryResult, TimeRange, address
from stack.board import server, snapshot
from stack.cli import main
from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
NOW = 1_780_000_000
STEP_S, STEPS = 30, 120
OWN, OTHERS = "search", ("support-desk", "data-science")
# Names that a missing escape would turn into a matcher of others; each is a team of its own.
HOSTILE = (
    ".*", "search|support-desk", "[[team]]", "$team", "${team:raw}",
    'x"} or vllm_watch_requests_total{team="support-desk',
    "back\\slash", "Search", "search ", "a'b", "{{team}}", "tëam", "%2e%2a", "<b>team</b>",
)  # fmt: skip
OUTCOMES = {"ok": 1.0, "rejected": 0.25, "upstream_error": 0.125}
VALUES = {"outcome": "ok", "type": "prompt", "basis": "usage", "state": "active", "currency": "EUR", "band": "default"}


def model(team: str) -> str:
    """A model that only one team uses; its name is another sign of it."""
    return f"model-of-{team}"


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"")


def requests_per_step(team: str) -> int:
    return 3 + 2 * (OWN, *OTHERS, *HOSTILE).index(team)


def series(metric: Metric, team: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Sample name, labels and growth per step of a metric."""
    own = {label: VALUES.get(label, f"{label}-of-{team}") for label in metric.labels} | {"team": team}
    if "model_name" in own:
        own["model_name"] = model(team)
    amount = float(requests_per_step(team))
    if metric is sidecar.REQUESTS or metric is sidecar.REASONS:
        for outcome, share in OUTCOMES.items():
            yield metric.name, own | {"outcome": outcome}, amount * share
    elif metric is sidecar.TOKENS:
        for kind, share in (("prompt", 100.0), ("completion", 10.0), ("cached", 50.0)):
            yield metric.name, own | {"type": kind}, amount * share
    elif metric.kind is Kind.HISTOGRAM:
        for bound, share in (("0.1", 0.5), ("1.0", 1.0), ("+Inf", 1.0)):
            yield f"{metric.name}_bucket", own | {"le": bound}, amount * share
        yield f"{metric.name}_sum", own, amount * 0.2
        yield f"{metric.name}_count", own, amount
    else:
        yield metric.name, own, amount


def hour() -> str:
    """OpenMetrics text; samples of a series stand together."""
    lines: dict[str, list[str]] = {}
    for metric in (one for one in EVERYTHING if "team" in one.labels):
        for team in (OWN, *OTHERS, *HOSTILE):
            for name, labels, growth in series(metric, team):
                written = ",".join(f'{key}="{escaped(value)}"' for key, value in sorted(labels.items()))
                rows = (
                    f"{name}{{{written}}} {growth if metric.kind is Kind.GAUGE else growth * step} "
                    f"{NOW - (STEPS - step) * STEP_S}\n"
                    for step in range(STEPS + 1)
                )
                lines.setdefault(name, []).extend(rows)
    for team in (OWN, *OTHERS):
        alert = (
            f'ALERTS{{alertname="VLLMGatewayRejecting",alertstate="firing",severity="warning",team="{team}",'
            f'instance="instance-of-{team}"}} 1'
        )
        lines.setdefault("ALERTS", []).extend(f"{alert} {NOW - at}\n" for at in range(1200, 600, -30))
    return "".join("".join(lines[name]) for name in sorted(lines)) + "# EOF\n"


class RecordingPrometheus(Prometheus):
    """The real client, with the text of every query."""

    asked: list[str]

    async def over_time(self, expr: str, over: TimeRange) -> QueryResult:
        self.asked.append(expr)
        return await super().over_time(expr, over)

    async def as_of(self, expr: str, at_s: float | None = None) -> QueryResult:
        self.asked.append(expr)
        return await super().as_of(expr, at_s)

    async def label_values(self, label: str, selector: str, start_s: float, end_s: float) -> list[str]:
        raise AssertionError(f"label_values({selector}, {label}) would return names of other teams")


@pytest.fixture(scope="module")
def prometheus(past: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    page = tmp_path_factory.mktemp("teams") / "page"
    page.write_text(hour())
    return past(page)


def names_of_others(team: str) -> re.Pattern[str]:
    """Names of other teams, as text or in an address; words that contain the team's own name do not count."""
    others = [one for one in (*OTHERS, *HOSTILE) if one != team and len(one) > 3 and one.strip().lower() != "search"]
    spelled = {form for one in others for form in (one, quote(one), json.dumps(one)[1:-1])}
    return re.compile("|".join(re.escape(form) for form in sorted(spelled, key=len, reverse=True)))


LEAK = names_of_others(OWN)
UID = board_uid(team_board.slug(OWN))
TRICKS = (
    "", "?var-team=.*", "?var-team=support-desk", "?var-team=%2e%2a&var-team=data-science", "?var-team=Support-Desk",
    "?var-team=%24__all&var-model_name=.*", "?team=support-desk", "?var-team[]=support-desk", "?VAR-TEAM=support-desk",
    '?var-team=x"}%20or%20vllm_watch_requests_total{team="support-desk', "?query=vllm_watch_requests_total",
    "?from=now-90d&to=now", "?points=2000&var-cluster=.*&live=1",
)  # fmt: skip
# What the board of all teams serves, other spellings of it, and Prometheus' own API.
CLOSED = (
    "/d/vllm-watch-teams", "/d/vllm-watch-team-support-desk", "/D/vllm-watch-teams", "/d/vllm-watch-%74eams",
    f"/d/{UID}/../vllm-watch-teams", f"/d/{UID}%2f..%2fvllm-watch-teams", "/runbooks", "/runbooks/", "//runbooks/",
    "/runbooks/VLLMGatewayRejecting?live=1&team=support-desk", "/%72unbooks/VLLMGatewayRejecting?live=1&team=.*",
    "/runbooks/VLLMGatewayRejecting.md", "/api/annotations/vllm-watch-overview", "/api/variables/vllm-watch-teams",
    "/api/variables/vllm-watch-team-support-desk", f"/api/panel/{UID}/../vllm-watch-teams/1",
    "/api/panel/vllm-watch-teams/1",
    f"/api/panel/{UID}/0", f"/api/panel/{UID}/1%20or%201", "/api/v1/query?query=up", "/api/v1/label/team/values",
    "/api/v1/series?match[]=up", "/federate?match[]=up", "/metrics", "/static/../server.py", "/requests.jsonl",
    "/events",
)  # fmt: skip


class TeamBoard:
    """The application of `board --team`, on a real Prometheus, with its clock stopped."""

    def __init__(self, url: str, team: str) -> None:
        self.url, (self.dashboard,) = url, boards(team=team)

    async def __aenter__(self) -> TeamBoard:
        self.prometheus = RecordingPrometheus(address(self.url))
        self.prometheus.asked = []
        await self.prometheus.__aenter__()
        self.app = server.application(server.DashboardServer(self.prometheus, (self.dashboard,)), now=lambda: NOW)
        self.client: TestClient[web.Request, web.Application] = TestClient(TestServer(self.app))
        await self.client.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.prometheus.__aexit__(None, None, None)

    async def get(self, path: str) -> tuple[int, str]:
        url = URL(f"{str(self.client.make_url('/')).rstrip('/')}{path}", encoded=True)  # as it is written
        async with self.client.session.get(url) as response:
            headers = "\n".join(f"{name}: {value}" for name, value in response.headers.items())
            return response.status, f"{headers}\n\n{(await response.read()).decode()}"

    async def figures(self, panel: str) -> dict[str, float]:
        """The last value of each line of a panel, by its legend."""
        number = server.pages.PanelRef(self.dashboard.slug, panel).panel_id
        status, text = await self.get(f"/api/panel/{board_uid(self.dashboard.slug)}/{number}?from=now-30m")
        assert 200 == status, text
        found = json.loads(text.split("\n\n", 1)[1])["series"]
        return {one["name"]: one.get("value", (one.get("values") or [None])[-1]) for one in found}


def paths(board: Dashboard) -> list[str]:
    """Every address that the board has."""
    uid = board_uid(board.slug)
    panels = [f"/api/panel/{uid}/{server.pages.panel_id(board, panel)}" for panel in board.panels]
    return ["/", f"/d/{uid}", f"/d/{uid}/title", f"/api/annotations/{uid}", f"/api/variables/{uid}", *panels]


@pytest.mark.prometheus
async def test_no_answer_names_another_team(prometheus: str) -> None:
    """Every route with every trick: its status, headers and body, and the queries that it causes."""
    async with TeamBoard(prometheus, OWN) as board:
        answers = {path + trick: await board.get(path + trick) for path in paths(board.dashboard) for trick in TRICKS}
        asked = board.prometheus.asked
    assert {} == {path: found[0] for path, (_, text) in answers.items() if (found := LEAK.search(text))}
    assert {200} == {status for status, _ in answers.values()}
    assert len(asked) > len(TRICKS) * len(board.dashboard.panels)
    assert all(promql_ast.has_matcher(expr, "team", OWN) for expr in asked)
    drawn = "".join(text for path, (_, text) in answers.items() if path.startswith("/api/panel/"))
    assert f"model-of-{OWN}" in drawn, "the team's own numbers are there"


@pytest.mark.prometheus
async def test_routes_are_those_that_the_test_asks(prometheus: str) -> None:
    async with TeamBoard(prometheus, OWN) as board:
        patterns = {resource.canonical for resource in board.app.router.resources()}
    api = {f"/api/{kind}/{{uid}}" for kind in ("annotations", "variables")} | {"/api/panel/{uid}/{panel}"}
    assert {"/", "/d/{uid}", "/d/{uid}/{title}", "/static/{name}", "/-/healthy"} | api == patterns


@pytest.mark.prometheus
@pytest.mark.parametrize("path", CLOSED)
async def test_everything_else_is_closed(prometheus: str, path: str) -> None:
    """Without a query. An error repeats at most what the address itself said."""
    async with TeamBoard(prometheus, OWN) as board:
        status, text = await board.get(path)
        assert 404 == status, text
        assert [] == board.prometheus.asked
        assert "model-of-" not in text
        assert {one for one in OTHERS if one in text} <= {one for one in OTHERS if one in path}


@pytest.mark.prometheus
async def test_other_methods_are_rejected(prometheus: str) -> None:
    async with TeamBoard(prometheus, OWN) as board:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with board.client.request(method, f"/api/variables/{UID}", data={"var-team": ".*"}) as response:
                assert 405 == response.status


@pytest.mark.prometheus
@pytest.mark.parametrize("team", [OWN, *OTHERS, *HOSTILE])
async def test_figures_are_those_of_the_team(prometheus: str, team: str) -> None:
    """Also for a name that is a pattern, a variable or a part of a query: each has figures of its own."""
    grown = requests_per_step(team) * 1800 / STEP_S
    async with TeamBoard(prometheus, team) as board:
        counted = await board.figures("requests-in-range")
        latency = await board.figures("e2e-p95")
        power = await board.figures("watts")
        _, marks = await board.get(f"/api/annotations/{board_uid(board.dashboard.slug)}")
    assert {outcome: pytest.approx(grown * share, rel=0.03) for outcome, share in OUTCOMES.items()} == counted
    name = " ".join(model(team).split())  # as a legend shows it
    assert [name] == list(power)
    assert latency
    assert all(line.startswith(name) for line in latency)
    assert [pytest.approx(requests_per_step(team) / STEP_S)] == list(power.values())
    assert (team in (OWN, *OTHERS)) == ("VLLMGatewayRejecting" in marks)
    assert "instance-of" not in marks


@pytest.mark.prometheus
async def test_unknown_team_is_empty(prometheus: str) -> None:
    async with TeamBoard(prometheus, "nobody-of-this-name") as board:
        text = "".join([(await board.get(path))[1] for path in paths(board.dashboard)])
    assert "model-of-" not in text
    assert not LEAK.search(text)


@pytest.mark.prometheus
async def test_snapshot_names_no_other_team(prometheus: str) -> None:
    page = await snapshot.take(address(prometheus), boards(team=OWN), 30.0, "now-30m", "now", NOW)
    data = page.split('id="data">')[1].split("</script>")[0]
    assert model(OWN) in data
    assert not LEAK.search(data)


@pytest.mark.prometheus
def test_command_serves_the_team_only(prometheus: str, free_port: Callable[[], int]) -> None:
    import urllib.error
    import urllib.request

    url = f"127.0.0.1:{free_port()}"
    command = ["board", "--prometheus", prometheus, "--listen", url, "--team", OWN]
    served = subprocess.Popen([sys.executable, "-m", "stack.cli", *command], cwd=ROOT)

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{url}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    try:
        eventually(lambda: get("/-/healthy")[0] == 200, what="the board")
        status, page = get("/")
        assert (200, True) == (status, f"Team {OWN}" in page)
        assert '"runbooks":false' in page
        assert [404, 404] == [get(path)[0] for path in ("/runbooks/", "/d/vllm-watch-teams")]
    finally:
        served.terminate()
        served.wait(60)


# --- files for Grafana, and what all of it is made of


@pytest.mark.parametrize("team", [OWN, *HOSTILE])
def test_exported_dashboard_is_pinned(team: str) -> None:
    """Every query, one variable (the data source), no link, and nothing that Grafana would replace in a name."""
    (board,) = boards(team=team)
    made = json.loads(grafana_json.to_json(board))
    queries = [target["expr"] for panel in panels_of(made) for target in panel["targets"]]
    marks = [one["expr"] for one in made["annotations"]["list"] if "expr" in one]
    assert queries
    assert len(marks) == 1
    assert all(promql_ast.has_matcher(expr, "team", team) for expr in (*queries, *marks))
    assert ["datasource"] == [variable["name"] for variable in made["templating"]["list"]]
    assert [] == [*made["links"], *(link for panel in panels_of(made) for link in panel.get("links") or ())]
    replaced = {found for expr in (*queries, *marks) for found in re.findall(r"\$\{?\w+|\[\[\w+", expr)}
    assert replaced <= {"$__rate_interval", "$__range"}


def panels_of(made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in made["panels"]:
        yield from (one for one in (panel, *panel.get("panels", ())) if one.get("targets"))


def test_own_linter_has_no_complaint() -> None:
    """Except that no choice narrows its queries."""
    (board,) = boards(team=OWN)
    assert {"query-matchers"} == {found.rule for found in lint([json.loads(grafana_json.to_json(board))], ())}


@pytest.mark.parametrize("team", ["", "__other__", "__idle__", "x" * 121, "a\nb", "\x00"])
def test_name_that_no_team_has_is_refused(team: str) -> None:
    """An empty name, as of a variable that is not set, must not mean all teams."""
    with pytest.raises(ValueError, match=r"a team: .* 1 to 120 "):
        boards(team=team)


def test_query_of_all_teams_is_refused() -> None:
    panel = Panel("x", "X", "M.", "G.", "A.", (Query(f'sum({sidecar.REQUESTS.name}{{team=~"search"}})'),))
    with pytest.raises(ValueError, match=r"dashboard x: .*restricted"):
        Dashboard("x", "X", "Q?", (DashboardRow("", (panel,)),), team=OWN)


@pytest.mark.parametrize("team", [OWN, *HOSTILE])
def test_matcher_has_the_value_and_survives_interpolation(team: str) -> None:
    matcher = promql.equals("team", team)
    assert [("x", [("team", "=", team)])] == promql_ast.selectors(f"x{{{matcher}}}")
    assert matcher == fill(matcher, {}, Range(0, 60))


def test_teams_have_dashboards_of_their_own() -> None:
    """With uids that Grafana accepts, and none that a dashboard of all teams has."""
    uids = {board_uid(team_board.slug(team)) for team in (OWN, *OTHERS, *HOSTILE)}
    assert len((OWN, *OTHERS, *HOSTILE)) == len(uids)
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in uids)
    assert not uids & {board_uid(board.slug) for board in BOARDS}


def test_no_choice_and_one_kind_of_mark() -> None:
    (board,) = boards(team=OWN)
    assert () == variables.of(board)
    assert ["Firing alerts"] == [one.name for one in marked.of(board)]


def test_export_writes_one_file(tmp_path: Path) -> None:
    out = tmp_path / "boards"
    (tmp_path / "boards").mkdir()
    (out / "team-other.json").write_text('{"tags": ["vllm-watch"]}')
    command = ["dashboards", "export", "--out", str(out), "--team", OWN]
    for expected in ("written", "unchanged"):
        done = CliRunner().invoke(main, command)
        assert 0 == done.exit_code, done.output
        assert f"{expected}: {out}/team-{OWN}.json\n" == done.stdout, "files of other teams are not its business"
