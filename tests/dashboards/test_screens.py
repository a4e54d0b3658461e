"""Dashboards over an hour of 20 teams, three models and six engines, on a real Prometheus and in Chromium; with GPUs
and prices, and without."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request

import pytest

from alerts.panel_ref import PanelRef, board_uid
from dashboards import grafana_json
from dashboards import queries as query_builders
from dashboards.boards import cost, gateway, gpu, monitoring_health, overview, teams
from dashboards.interpolate import ALL, Range, fill
from dashboards.model import ABSENT, Panel, Query
from dashboards.registry import BOARDS
from dashboards.variables import CHAIN
from runbooks import page as runbook_page
from tests.support.replayed_hour import LOG, TEAMS, ReplayedHour
from tests.support.screens import END_S, dashboard, whole
from tests.support.served_board import Served, get

pytestmark = pytest.mark.prometheus
OVER = Range(END_S - 3600, END_S, points=30, scrape_s=60, least_s=120)
CHOSEN = {name: [ALL] for name in CHAIN} | {"gpu_hour_price": "2.50"}
RANKED = [
    (board, panel) for board in (teams.BOARD, cost.BOARD, gateway.BOARD) for panel in board.panels if panel.ranked
]


@pytest.fixture(scope="module")
def hours(past, tmp_path_factory):
    """Addresses of the Prometheus with GPUs and prices, and of the one without."""
    folder, found = tmp_path_factory.mktemp("hours"), {}
    for name, hour in (("full", ReplayedHour(every_s=60)), ("bare", ReplayedHour(gpu=False, prices=False, every_s=60))):
        with (folder / name).open("w") as file:
            file.writelines(hour.text(END_S))
        found[name] = past(folder / name)
    return found


@pytest.fixture(scope="module")
def boards(hours):
    served = {name: Served(url, BOARDS) for name, url in hours.items()}
    yield served
    for one in served.values():
        one.stop()


def asked(url: str, expr: str, instant: bool = False) -> list[dict]:
    span = {"time": END_S} if instant else {"start": OVER.start_s, "end": OVER.end_s, "step": OVER.step_s}
    query = urllib.parse.urlencode({"query": fill(expr, CHOSEN, OVER), **span})
    with urllib.request.urlopen(f"{url}/api/v1/query{'' if instant else '_range'}?{query}", timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def panel_of(board, slug: str) -> Panel:
    return next(panel for panel in board.panels if panel.slug == slug)


def sums(found: list[dict]) -> dict[float, float]:
    total: dict[float, float] = {}
    for series in found:
        for at, value in series["values"]:
            total[at] = total.get(at, 0.0) + float(value)
    return total


def ranked_queries(panel: Panel) -> list[tuple[Query, Query]]:
    return list(zip(panel.queries[::2], panel.queries[1::2], strict=True))


# --- many teams


@pytest.mark.parametrize(("board", "panel"), [pytest.param(b, p, id=f"{b.slug}-{p.slug}") for b, p in RANKED])
def test_at_most_eight_lines_and_others(hours, board, panel):
    """The same lines over the whole range: who is shown is decided once."""
    for top, others in ranked_queries(panel):
        shown, rest = asked(hours["full"], top.expr), asked(hours["full"], others.expr)
        named = {tuple(sorted((k, v) for k, v in series["metric"].items() if k != "bound")) for series in shown}
        assert len(named) <= query_builders.SHOWN, named
        assert len({series["metric"].get("bound", "") for series in rest}) == len(rest) <= 2


SPLIT = re.compile(r"\((?P<each>.*)\) and on \([^)]*\) topk\(.*", re.DOTALL)
ADDED_UP = [
    (board, panel, queries) for board, panel in RANKED for queries in ranked_queries(panel)
    if queries[1].expr.startswith("sum") and "/ (sum(" not in queries[1].expr and SPLIT.fullmatch(queries[0].expr)
]  # fmt: skip


@pytest.mark.parametrize(
    ("board", "panel", "queries"), [pytest.param(b, p, q, id=f"{b.slug}-{p.slug}") for b, p, q in ADDED_UP]
)
def test_shown_teams_and_others_add_up_to_all(hours, board, panel, queries):
    top, others = queries
    total = sums(asked(hours["full"], f"sum({SPLIT.fullmatch(top.expr)['each']})"))
    found = sums([*asked(hours["full"], top.expr), *asked(hours["full"], others.expr)])
    assert found == pytest.approx(total)


def test_the_panels_that_add_up_are_those_of_amounts():
    assert {
        ("teams", "requests"),
        ("teams", "tokens"),
        ("teams", "in-flight"),
        ("cost", "cost"),
        ("gateway", "running"),
    } <= {(board.slug, panel.slug) for board, panel, _ in ADDED_UP}


NEVER = {"estimated-tokens", "share-difference", "aborted"}  # nothing of theirs is in the hour


def test_others_are_there_wherever_more_than_eight_are(hours):
    empty = [(board.slug, panel.slug) for board, panel in RANKED for top, others in ranked_queries(panel)
             if panel.slug not in NEVER and len(asked(hours["full"], top.expr)) >= query_builders.SHOWN
             and not asked(hours["full"], others.expr)]  # fmt: skip
    assert [] == empty


def test_with_twenty_teams_eight_and_others_are_shown(hours):
    """Without the ranking all 20 would be."""
    panel = panel_of(teams.BOARD, "requests")
    ((top, others),) = ranked_queries(panel)
    assert query_builders.SHOWN == len(asked(hours["full"], top.expr))
    assert [{}] == [series["metric"] for series in asked(hours["full"], others.expr)]
    assert len(TEAMS) + 1 == len(asked(hours["full"], SPLIT.fullmatch(top.expr)["each"])), "__unknown__ is one of them"


def test_of_others_the_share_is_their_sum_over_their_sum(hours):
    ((top, others),) = ranked_queries(panel_of(teams.BOARD, "refused"))
    rejected, all_of = (
        f'sum(rate(vllm_watch_requests_total{{model_name!~"__unknown__|__other__"{only}}}[$__rate_interval]))'
        for only in (',outcome="rejected"', "")
    )
    weighted = (
        f"({top.expr}) * on (team) sum by (team)"
        f" (rate(vllm_watch_requests_total{{{query_builders.KNOWN[0]}}}[$__rate_interval]))"
    )
    shown = sums(asked(hours["full"], weighted))
    rest = sums(asked(hours["full"], others.expr))
    shares = sums(asked(hours["full"], f"({rejected})"))
    weight_of_rest = (
        f"{all_of} - sum(sum by (team) (rate(vllm_watch_requests_total{{{query_builders.KNOWN[0]}}}[$__rate_interval]))"
        f" and on (team) ({top.expr}))"
    )
    weights = sums(asked(hours["full"], weight_of_rest))
    assert {at: shown[at] + rest[at] * weights[at] for at in rest} == pytest.approx(
        {at: shares[at] for at in rest}, abs=1e-9
    )


@pytest.mark.parametrize(("scrape_s", "rate_s"), [(5, 125), (15, 135), (30, 150), (60, 240)])
def test_ranked_panel_rates_span_two_minutes(scrape_s, rate_s):
    """Rates of ranked panels span two minutes and four scrapes."""
    assert rate_s == Range(0, 3600, scrape_s=scrape_s, least_s=120).rate_s


def test_grafana_ranks_and_spans_the_same_way():
    printed = json.loads(grafana_json.to_json(teams.BOARD))["panels"]
    made = next(one for one in printed if one["title"] == "Requests by team")
    legend = made["options"]["legend"]
    assert ("120s", "table", "Mean", True) == (
        made["interval"],
        legend["displayMode"],
        legend["sortBy"],
        legend["sortDesc"],
    )
    assert "mean" in legend["calcs"]
    assert "interval" not in made["targets"][0], "a target's own interval would stand for the data source's"


# --- unknown keys and models


@pytest.mark.parametrize("slug", ["error-ratio", "rejection-ratio"])
def test_unknown_keys_and_models_are_in_no_ratio_of_overview(hours, slug):
    found = [series for query in panel_of(overview.BOARD, slug).queries for series in asked(hours["full"], query.expr)]
    assert {"model-0", "model-1", "model-2"} == {series["metric"]["model_name"] for series in found}
    assert max(float(value) for series in found for _, value in series["values"]) < 0.6


def test_unknown_keys_and_models_are_a_panel_of_their_own(hours):
    (query,) = panel_of(overview.BOARD, "unknown").queries
    assert {"unknown_key", "bad_request"} == {series["metric"]["reason"] for series in asked(hours["full"], query.expr)}


# --- what is not there


def test_a_host_without_a_gpu_is_not_present_and_not_a_fault(hours):
    (query,) = panel_of(monitoring_health.BOARD, "sources-up").queries
    for name, expected in (("full", 1.0), ("bare", ABSENT)):
        found = {
            series["metric"]["file"]: float(series["value"][1])
            for series in asked(hours[name], query.expr, instant=True)
        }
        assert (expected, 1.0) == (found["gpu"], found["vllm-0"])


@pytest.mark.parametrize(("reason", "read_before"), [("timeout", False), ("lost", False), ("no_driver", True)])
def test_a_gpu_that_fails_is_a_fault(past, tmp_path, reason, read_before):
    labels = 'job="sidecar",instance="s",kind="gpu",source="gpu"'
    lines = [f"vllm_watch_source_up{{{labels}}} 0 {END_S - 60 + at}\n" for at in (0, 60)]
    lines += [
        f'vllm_watch_source_errors_total{{{labels},reason="{reason}"}} {n} {END_S - 600 + 60 * n}\n' for n in range(11)
    ]
    if read_before:
        lines += [f"vllm_watch_source_last_success_timestamp_seconds{{{labels}}} {END_S - 900} {END_S}\n"]
    page = tmp_path / "page"
    page.write_text("".join(sorted(lines, key=lambda line: line.partition("{")[0])) + "# EOF\n")
    (query,) = panel_of(monitoring_health.BOARD, "sources-up").queries
    assert [0.0] == [float(series["value"][1]) for series in asked(past(page), query.expr, instant=True)]


def test_grafana_shows_what_is_not_present_in_the_colour_of_text():
    made = next(
        one
        for one in json.loads(grafana_json.to_json(monitoring_health.BOARD))["panels"]
        if one["title"] == "Sidecar sources up"
    )
    defaults = made["fieldConfig"]["defaults"]
    assert "not present" == defaults["mappings"][0]["options"]["-1"]["text"]
    assert {"color": "text", "value": None} == defaults["thresholds"]["steps"][0]


def test_long_paths_keep_their_end(hours):
    (query,) = panel_of(monitoring_health.BOARD, "log-lag").queries
    assert [".../_data/requests.jsonl"] == [series["metric"]["file"] for series in asked(hours["full"], query.expr)]
    assert "{{file}}" == query.legend
    assert len(LOG) > 40


@pytest.mark.parametrize(
    ("board", "missing"),
    [(gpu.BOARD, 1), (cost.BOARD, 2), (teams.BOARD, 1), (overview.BOARD, 0)],
    ids=lambda value: getattr(value, "slug", value),
)
def test_what_a_dashboard_lacks_is_said_once(boards, board, missing):
    span = f"from={(END_S - 3600) * 1000}&to={END_S * 1000}"
    told = {
        name: json.loads(get(f"{one.url}/api/variables/{board_uid(board.slug)}?{span}")[1])["missing"]
        for name, one in boards.items()
    }
    assert ([], missing) == (told["full"], len(told["bare"]))
    hidden = {number for one in told["bare"] for number in one["panels"]}
    assert hidden == {PanelRef(board.slug, panel.slug).panel_id for panel in board.panels if panel.requires}


@pytest.mark.parametrize("board", [board for board in BOARDS if board.preconditions], ids=lambda b: b.slug)
def test_in_grafana_it_is_said_once_at_the_top(board):
    printed = json.loads(grafana_json.to_json(board))["panels"]
    texts = [
        one["fieldConfig"]["defaults"]["noValue"]
        for top in printed
        for one in (top, *top.get("panels", ()))
        if one["type"] != "row"
    ]
    for at, one in enumerate(board.preconditions):
        assert 1 == texts.count(one.missing)
        assert one.missing == texts[at]
        assert 0 == printed[at]["gridPos"]["y"]


# --- in a real Chromium


@pytest.fixture
def tab(new_tab):
    def opened(url: str, width: int):
        page = new_tab(viewport={"width": width, "height": 900}, timezone_id="UTC").page
        page.goto(url)
        page.wait_for_load_state("networkidle")
        page.evaluate("document.querySelectorAll('details.row').forEach(row => { row.open = true })")
        whole(page)
        return page

    return opened


@pytest.mark.chromium
class TestInChromium:
    @pytest.mark.parametrize("slug", [board.slug for board in BOARDS])
    def test_phone_dashboards_do_not_scroll_sideways(self, boards, tab, slug):
        """No dashboard scrolls sideways on a phone and no title is cut."""
        page = tab(dashboard(boards["full"].url, slug), 400)
        assert 400 == page.evaluate("document.documentElement.scrollWidth")
        for wrong in (
            "h3')].filter(one => one.scrollWidth > one.clientWidth)",
            "header')].filter(one => one.getBoundingClientRect().right > 400)",
        ):
            assert [] == page.evaluate(f"[...document.querySelectorAll('.panel {wrong}.map(one => one.textContent)")

    def test_no_runbook_scrolls_sideways_on_a_phone(self, boards, new_tab):
        page, wide = new_tab(viewport={"width": 400, "height": 900}).page, []
        for name in ("", *runbook_page.names()):
            page.goto(f"{boards['full'].url}/runbooks/{name}")
            if page.evaluate("document.documentElement.scrollWidth") > 400:
                wide.append(name)
        assert [] == wide

    def test_filters_are_folded_on_a_phone_and_open_on_a_desk(self, boards, tab):
        page = tab(dashboard(boards["full"].url, "overview"), 400)
        assert not page.locator(".choices").is_visible()
        fold = page.get_by_role("button", name="Filters and time")
        assert "false" == fold.get_attribute("aria-expanded")
        fold.click()
        assert page.locator(".choices").is_visible()
        assert "true" == fold.get_attribute("aria-expanded")
        assert 400 == page.evaluate("document.documentElement.scrollWidth")
        wide = tab(dashboard(boards["full"].url, "overview"), 1440)
        assert wide.locator(".choices").is_visible()
        assert not wide.locator(".fold").is_visible()

    def test_the_legend_of_teams_is_a_table_sorted_by_the_mean(self, boards, tab):
        page = tab(dashboard(boards["full"].url, "teams"), 1440)
        legend = page.locator(f'section[data-id="{PanelRef("teams", "requests").panel_id}"] .legend.table')
        rows = legend.locator("button")
        assert query_builders.SHOWN + 1 == rows.count()
        means = [float(text.removesuffix(" req/s")) for text in legend.locator("em").all_inner_texts()]
        assert means == sorted(means, reverse=True)

    def test_a_missing_gpu_is_said_once_and_in_grey(self, boards, tab):
        page = tab(dashboard(boards["bare"].url, "cost"), 1440)
        assert [one.missing for one in cost.BOARD.preconditions] == page.locator(".notice").all_inner_texts()
        said = page.locator(".panel:not([hidden]) .empty").all_inner_texts()
        assert len(set(said)) == len(said)
        page = tab(dashboard(boards["bare"].url, "monitoring-health"), 1440)
        sources = page.locator(f'section[data-id="{PanelRef("monitoring-health", "sources-up").panel_id}"]')
        assert ["not present"] == sources.locator(".number.absent strong").all_inner_texts()
        assert 0 == sources.locator(".number.bad").count()
