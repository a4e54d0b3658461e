"""The live page: what it asks, what it draws, whom it answers. Pure parts first, then a real Prometheus, then a real
Chromium."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from aiohttp import web
from multidict import MultiDict
from playwright.sync_api import Error, expect

from alerts.panel_ref import PanelRef, board_uid
from dashboards import annotations
from dashboards import queries as query_builders
from dashboards.interpolate import ALL, Range
from dashboards.model import Dashboard, DashboardRow, Query, Shape, Variable, shown_unit
from dashboards.registry import BOARDS
from exporters.catalogue import vllm
from exporters.catalogue.metric import Unit
from exporters.net import prometheus as prometheus_client
from exporters.net.prometheus import Prometheus, PrometheusError, QueryResult, QuerySeries, address
from exporters.requests.phases import phases_of
from exporters.requests.record import timestamp, to_line
from exporters.text import write_atomically
from runbooks import diagnosis
from runbooks import page as runbook_page
from stack.board import charts, marks, options, pages, server, snapshot, view
from stack.board.request_pages import RequestPages
from stack.request_source import RequestSourceOptions
from tests.support import served_board
from tests.support.request_dataset import made_requests
from tests.support.served_board import HOSTILE, NOW, SHAPES, Served, command, get, number, panel
from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
board, prometheus = served_board.board, served_board.prometheus  # fixtures
expect.set_options(timeout=60_000)  # ends a hanging test only

LINES = panel("lines", Query("x", "{{model_name}}", "s"))
OVER = Range(1000, 1060, points=4, scrape_s=15)


def series(values, **labels):
    return QuerySeries(metric=labels, values=[(at, str(value)) for at, value in values])


def now(value, **labels):
    return QuerySeries(metric=labels, value=(1060, str(value)))


# --- what an address asks for


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", 5000),
        ("now-5m", 4700),
        ("now-2h", -2200),
        ("1700000000000", 1_700_000_000),
        ("2026-01-01T00:00:00Z", 1_767_225_600),
        ("2026-01-01T01:00:00+01:00", 1_767_225_600),
        ("2026-01-01 00:00", 1_767_225_600),
    ],
)
def test_times_are_written_as_grafana_writes_them(text, expected):
    assert expected == view.moment(text, 5000)


@pytest.mark.parametrize("text", ["", "yesterday", "now+1h", "now-1y", "now-h", "<script>", "12"])
def test_a_time_that_cannot_be_read_is_one_sentence(text):
    with pytest.raises(view.BadView, match=rf"^{re.escape(repr(text))} .*now-1h"):
        view.moment(text, 5000)


def test_a_range_runs_forward_and_not_for_ever():
    with pytest.raises(view.BadView, match=r"from=now to=now-1h: .*at least 10 s"):
        view.span("now", "now-1h", NOW)
    with pytest.raises(view.BadView, match="at most 90 days"):
        view.span("now-91d", "now", NOW)


def test_ends_lie_on_steps():
    """The same minute, asked for seven seconds later, gives the same steps."""
    first, second = (view.PanelView(at - 3600, at, {}).over(15) for at in (NOW + 1, NOW + 8))
    assert (first.start_s, first.end_s, first.step_s) == (second.start_s, second.end_s, second.step_s)
    assert 0 == first.start_s % first.step_s


def test_choices_come_from_the_address_if_they_exist():
    """Choices come from the address and only those that the board has."""
    board = Dashboard(
        "b",
        "B",
        "?",
        (DashboardRow("", (panel("x", query_builders.rate(vllm.PROMPT_TOKENS)),)),),
        extra=(
            Variable("window", "Window", "custom", options=("5m", "1h"), default="5m"),
            Variable("price", "Price", "text", default="2.5"),
        ),
    )
    parsed = view.parse(
        MultiDict([("var-model_name", "a"), ("var-model_name", "b"), ("var-other", "x"), ("var-window", "1h")]),
        board,
        NOW,
    )
    assert ["a", "b"] == parsed.choices["model_name"]
    assert ([ALL], "1h", "2.5") == (parsed.choices["instance"], parsed.choices["window"], parsed.choices["price"])
    assert "other" not in parsed.choices
    assert [ALL] == view.parse(MultiDict({"var-model_name": "All"}), board, NOW).choices["model_name"]
    for name, value in (("var-window", "2h"), ("var-price", "1) or vector(1"), ("var-model_name", "x" * 400)):
        with pytest.raises(view.BadView, match=name):
            view.parse(MultiDict({name: value}), board, NOW)


PRICED = Dashboard(
    "priced",
    "Priced",
    "?",
    (DashboardRow("", (panel("cost", Query("sum(vllm_watch_requests_total) * $price", "cost")),)),),
    extra=(
        Variable("window", "Window", "custom", options=("5m", "1h"), default="5m"),
        Variable("price", "Price", "text", default="2.50"),
    ),
)


@pytest.mark.parametrize(
    "price", ["up", "1h", "a.b", "1x", "\u0663", "2,5", "-1", "1e3", ".5", "2.", "1" * 10, "1.2.3", "inf", "2.5\n"]
)
def test_price_is_a_decimal_number(price):
    """A price is a decimal number because a word would be a metric."""
    with pytest.raises(view.BadView, match=r"var-price: .*no number.* 2\.50$"):
        view.parse(MultiDict({"var-price": price}), PRICED, NOW)
    assert "3.125" == view.parse(MultiDict({"var-price": "3.125"}), PRICED, NOW).choices["price"]


def test_wrong_choice_falls_back_with_a_sentence():
    """So that the page can show its pickers, where the mistake is fixed."""
    looked = view.lenient(MultiDict({"var-price": "up", "var-window": "2h"}), PRICED, NOW)
    assert {"price": "2.50", "window": "5m"} == {name: looked.choices[name] for name in ("price", "window")}
    assert re.fullmatch(r"var-price: 'up' .* 2\.50", looked.wrong["price"])
    assert re.fullmatch(r"var-window: '2h' .* 5m, 1h", looked.wrong["window"])
    with pytest.raises(view.BadView, match="is no time"):
        view.lenient(MultiDict({"from": "soon"}), PRICED, NOW)


# --- what is drawn


@pytest.mark.parametrize(
    ("pattern", "labels", "expected"),
    [
        ("{{a}} {{b}}", {"a": "1"}, "1"),
        ("waiting {{ a }}", {"a": "1"}, "waiting 1"),
        ("{{a}}", {"__name__": "x", "c": "2"}, "c=2"),
        ("{{a}}", {}, "all"),
        ("all", {"a": "1"}, "all"),
    ],
)
def test_a_series_is_called_by_its_legend(pattern, labels, expected):
    assert expected == charts.legend(pattern, labels)


def test_a_line_has_a_hole_where_there_is_no_figure():
    drawn = charts.draw(
        LINES, [QueryResult([series([(1000, 1), (1015, "NaN"), (1045, 3), (1060, "+Inf")], model_name="m")])], OVER
    )
    assert [{"name": "m", "unit": "s", "values": [1.0, None, None, 3.0, None]}] == drawn["series"]
    assert (1_000_000, 15_000, "") == (drawn["start"], drawn["step"], drawn["empty"])


def test_a_quantile_and_its_bounds_are_one_line():
    """Below the first bound, between 0.3 and 0.5 s, above the last finite bound."""
    answer = QueryResult([
        series([(1000, 0.3)], model_name="m", bound="<"), series([(1015, 0.4)], model_name="m"),
        series([(1015, 0.3)], model_name="m", bound="at least"), series([(1015, 0.5)], model_name="m", bound="at most"),
        series([(1030, 7680)], model_name="m", bound=">"),
    ])  # fmt: skip
    (one,) = charts.draw(LINES, [answer], OVER)["series"]
    assert ("m", [0.3, 0.4, 7680.0, None, None]) == (one["name"], one["values"])
    assert ["<", None, ">", None, None] == one["marks"]
    assert ([None, 0.3, None, None, None], [None, 0.5, None, None, None]) == (one["low"], one["high"])
    number = charts.draw(
        panel("n", Query("a", "{{model_name}}", "s"), shape=Shape.NUMBER),
        [QueryResult([now(0.3, model_name="m", bound="<")])],
        OVER,
    )
    assert [("m", 0.3, ["<"])] == [(one["name"], one["value"], one["marks"]) for one in number["series"]]


def test_empty_panel_and_error_texts():
    """Nothing is said in the panel's own words and an error in those of Prometheus."""
    assert LINES.when_empty == charts.draw(LINES, [QueryResult()], OVER)["empty"]
    assert LINES.when_empty == charts.draw(LINES, [QueryResult([series([(1000, "NaN")])])], OVER)["empty"]
    failed = charts.draw(LINES, [QueryResult(error="too many samples")], OVER)
    assert ("", ["too many samples"]) == (failed["empty"], failed["errors"])


def test_highest_of_many_series_are_shown():
    """Of very many series the highest are shown and that is said."""
    drawn = charts.draw(LINES, [QueryResult([series([(1000, n)], model_name=f"m{n}") for n in range(100)])], OVER)
    assert ["m60", "m61"] == [one["name"] for one in drawn["series"]][:2]
    assert "the highest 40 of 100 series" in drawn["note"]


def test_table_joins_by_labels_and_sorts_worst_first():
    """A table joins its queries by labels and puts the worst on top."""
    board = panel("t", Query("a", "waiting", "short"), Query("b", "p95 {{x}}", "s"), shape=Shape.TABLE)
    answers = [
        QueryResult([now(1, team="a"), now(5, team="b"), now("NaN", team="d")]),
        QueryResult([now(0.2, team="b"), now(0.1, team="c")]),
    ]
    drawn = charts.draw(board, answers, OVER)
    assert [{"label": "team"}, {"name": "waiting", "unit": "short"}, {"name": "p95", "unit": "s"}] == drawn["columns"]
    assert [["b", 5.0, 0.2], ["a", 1.0, None], ["c", None, 0.1]] == drawn["rows"]


def test_figures_are_sorted_as_people_count():
    answer = QueryResult([now(1, i="vllm-10"), now(2, i="vllm-2"), now("NaN", i="x")])
    drawn = charts.draw(panel("n", Query("a", "{{i}}"), shape=Shape.NUMBER), [answer], OVER)
    assert [("vllm-2", 2.0), ("vllm-10", 1.0)] == [(one["name"], one["value"]) for one in drawn["series"]]


def test_a_heatmap_shows_what_lies_between_two_bounds():
    """Bounds are sorted as numbers; a bucket that lies a little below its neighbour, as estimates may, is nothing and
    not less."""
    buckets = (("+Inf", 9, 4), ("10", 9, 4), ("0.5", 2, 3), ("2.5", 9, 2.9), ("0.1", 0, 0))
    answer = QueryResult([series([(1000, first), (1015, second)], le=le) for le, first, second in buckets])
    drawn = charts.draw(panel("h", Query("a", "{{le}}", "s"), shape=Shape.HEATMAP), [answer], OVER)
    assert [0.1, 0.5, 2.5, 10.0, None] == drawn["bounds"]
    assert [[0, 0], [2, 3], [7, 0], [0, 1.0], [0, 0]] == [row[:2] for row in drawn["cells"]]
    assert [None] * 3 == drawn["cells"][1][2:]


def test_bucket_missing_for_a_while_counts_once():
    """Engines of two releases have different bounds; where one is absent, the next shows what lies above the last that
    is there."""
    buckets = (("0.1", 10, "NaN"), ("0.25", "NaN", 4), ("0.5", 20, 6), ("+Inf", 20, "NaN"))
    answer = QueryResult([series([(1000, first), (1015, second)], le=le) for le, first, second in buckets])
    drawn = charts.draw(panel("h", Query("a", "{{le}}", "s"), shape=Shape.HEATMAP), [answer], OVER)
    assert [[10, None], [None, 4], [10, 2], [0, None]] == [row[:2] for row in drawn["cells"]]


def mark(**changes):
    return annotations.Annotation(**{"name": "A", "expr": "x", "title": "{{kind}}", "colour": "red"} | changes)  # type: ignore[attr-defined]


def test_samples_one_step_apart_are_one_region():
    answer = QueryResult([series([(1000, 1), (1015, 1), (1045, 1), (1060, 0)], kind="k")])
    assert [(1_000_000, 1_015_000, "k"), (1_045_000, 1_045_000, "k")] == [
        (m["from"], m["to"], m["title"]) for m in marks.marks(mark(), answer, OVER)["marks"]
    ]


@pytest.mark.parametrize(("step_s", "days"), [(60, 1 / 24), (60, 7), (707, 90)])
def test_annotations_use_one_minute_steps(step_s, days):
    """Annotations are asked by the minute so that a short alert is there in a long range."""
    over = view.PanelView(NOW - days * 86400, NOW, {}, points=300).over_marks()
    assert step_s == over.step_s
    assert over.seconds / over.step_s <= 11_000


def test_long_region_survives_rounded_milliseconds():
    """A region of a long range is not torn by rounded milliseconds."""
    over = Range(0, 40_000, points=100, scrape_s=706.9096)
    times = [round(k * 706.910, 3) for k in range(5)]
    (region,) = marks.marks(mark(), QueryResult([series([(at, 1) for at in times], kind="k")]), over)["marks"]
    assert (0, 2_827_640) == (region["from"], region["to"])


def test_time_value_is_one_line():
    """A value that is a time is one line however often it was scraped."""
    answer = QueryResult([series([(1000, 1_030_000), (1015, 1_030_000), (1030, 900_000)], kind="flip")])
    assert [{"from": 1_030_000, "to": 1_030_000, "title": "flip"}] == marks.marks(mark(at_value=True), answer, OVER)[
        "marks"
    ]


def test_a_variable_is_narrowed_by_those_before_it_and_escaped():
    looked = view.PanelView(NOW - 60, NOW, {"job": ['a"b.c'], "instance": [ALL]})
    asked = options.question(
        Variable("instance", "Engine", query='label_values(up{job=~"$job"}, instance)'), looked, OVER
    )
    assert ("instance", r'up{job=~"a\"b\\.c"}') == (asked.label, asked.series)
    assert options.LabelQuery("job", "") == options.question(
        Variable("job", "Job", query="label_values(job)"), looked, OVER
    )
    with pytest.raises(ValueError, match="only label_values"):
        options.question(Variable("x", "X", query="query_result(up)"), looked, OVER)


def test_what_is_chosen_stays_on_offer():
    """An engine that is gone must not vanish from the choice that still names it."""
    offered = options.offered(Variable("instance", "Engine"), ["b", ""], {"instance": ["gone"]})
    assert (["b", "gone"], ["gone"]) == (offered["options"], offered["chosen"])


def test_chosen_values_survive_the_cut():
    """Of very many values those that are chosen stay and the cut is told."""
    values = [f"v{n:04}" for n in range(1500)]
    offered = options.offered(Variable("instance", "Engine"), values, {"instance": ["v1400", "zz"]})
    assert (["v1400", "zz", "v0000"], 1000) == (offered["options"][:3], len(offered["options"]))
    assert "1000 of 1501 values" in offered["note"]
    assert "" == options.offered(Variable("instance", "Engine"), values[:1000], {"instance": [ALL]})["note"]


# --- whom it answers, and what pages are made of


@pytest.mark.parametrize(
    ("host", "admitted"),
    [
        ("127.0.0.1:9402", True),
        ("localhost:19402", True),
        ("[::1]:9402", True),
        ("127.8.8.8", True),
        ("LOCALHOST", True),
        ("board.lan:9402", True),
        ("10.0.0.5:9402", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:9402", False),
        ("10.0.0.6", False),
        ("", False),
        ("[::1", False),
        (":9402", False),
        ("[::1].evil.example", False),
        ("[::1].evil.example:9402", False),
        ("::1", False),
        ("[evil.example]", False),
        ("localhost:9402:1", False),
        ("localhost:x", False),
    ],
)
def test_only_our_own_names_are_answered(host, admitted):
    """A foreign page whose name was made to lead here still sends that name."""
    assert admitted == server.admitted(host, "10.0.0.5", ("board.lan",))


def test_credentials_never_leave_the_address():
    where = address("https://prom.example:9090/prefix/", login="me:se@cret")
    assert ("https://prom.example:9090/prefix", "Basic bWU6c2VAY3JldA==") == (
        where.shown,
        where.headers["Authorization"],
    )
    assert "cret" not in repr(where)
    for wrong in ("prom:9090", "http://", "http://[::1", "http://prom:port", "ftp://prom"):
        with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9090$"):
            address(wrong)


@pytest.mark.parametrize(
    "url", [f"{url}secret@prom" for url in ("http://me:", "http://me:12/3", "http://me:a?", "http://me:#", "me:")]
)
def test_login_in_the_address_is_refused(url):
    """Command lines are read by everyone on a machine; with a slash in the password its second half is a path, and `me`
    a host."""
    with pytest.raises(ValueError, match=r"user:password .*--user-file") as told:
        address(url)
    assert "secret" not in str(told.value)


def test_a_token_is_one_line_of_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("abc\n")
    assert "Bearer abc" == prometheus_client.address_from("http://prom", file).headers["Authorization"]
    file.write_text("a\nb")
    with pytest.raises(ValueError, match="holds no token"):
        prometheus_client.address_from("http://prom", file)


def test_a_login_is_one_line_of_a_file(tmp_path):
    file = tmp_path / "login"
    file.write_text("me:a@b/c: d\r\n")
    assert (
        "Basic bWU6YUBiL2M6IGQ="
        == prometheus_client.address_from("http://prom", user_file=file).headers["Authorization"]
    )
    for wrong in (b"secret", b"me:secret\nx: y", b"me:secret\xff", b""):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"/login .*user:password$") as told:
            prometheus_client.address_from("http://prom", user_file=file)
        assert "secret" not in str(told.value)
    with pytest.raises(ValueError, match="only one of --token-file, --user-file"):
        prometheus_client.address_from("http://prom", file, file)


def test_page_has_no_query_and_escapes_foreign_text():
    """The page knows no query and foreign text cannot end its data."""
    hostile = Dashboard(
        "b",
        "</script><script>x",
        "Is it?",
        (DashboardRow("", (panel("x", query_builders.rate(vllm.PROMPT_TOKENS), title=HOSTILE),)),),
    )
    page = pages.board_page(hostile, (hostile,))
    assert "rate(" not in page
    assert "vllm:" not in page
    assert 0 == page.count("<img")
    assert len(server.pages.SCRIPTS) + 2 == page.count("</script>")


def test_raw_html_in_a_runbook_stays_text():
    text = "# VLLMX\n\n<script>alert(1)</script> [a](javascript:alert(1))\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    page = pages.runbook_page(runbook_page.parse("VLLMX", text), {}, None)
    assert "<script" not in page
    assert 'href="javascript' not in page
    assert "<td>1</td>" in page


def test_pages_load_these_files_and_no_others():
    assert pages.static("plotly.min.js").startswith(b"/**\n* plotly.js v4.")
    for name in ("../serve.py", "serve.py", "", "plotly.min.js/"):
        with pytest.raises(KeyError):
            pages.static(name)


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.slug)
def test_every_shipped_board_is_described_whole(board):
    told = pages.described(board, BOARDS)
    assert len(board.panels) == sum(len(row["panels"]) for row in told["rows"])
    assert {p["detail"] for row in told["rows"] for p in row["panels"]} <= {"", *(board_uid(b.slug) for b in BOARDS)}


# --- on a real Prometheus with an hour that was written before


def asked(method: str, url: str, path: str) -> tuple[int, http.client.HTTPMessage]:
    """Status and headers, redirects not followed."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers


@pytest.mark.prometheus
class TestOnPrometheus:
    def test_every_shape_gets_the_figures_that_were_written(self, board):
        running = board.panel("running")
        assert {"llama": 3.0, HOSTILE: 7.0} == {one["name"]: one["values"][-1] for one in running["series"]}
        assert (15_000, NOW * 1000) == (running["step"], running["end"])
        assert pytest.approx([30, 70]) == sorted(one["values"][-2] for one in board.panel("tokens")["series"])
        heat = board.panel("ttft")
        assert [0.1, 2.5, None] == heat["bounds"]
        assert [8.0, 16.0, 8.0] == [pytest.approx(row[-2]) for row in heat["cells"]], (
            "60 s of rate window are four steps of two engines"
        )
        assert [("demo", pytest.approx(1 / 15))] == [
            (one["name"], one["value"]) for one in board.panel("log")["series"]
        ]
        assert [[HOSTILE, 7.0, None], ["llama", 3.0, None]] == board.panel("engines")["rows"]

    def test_what_prometheus_objects_to_is_shown_in_its_words(self, board):
        assert "parse error" in board.panel("broken")["errors"][0]
        (nothing,) = (one for one in SHAPES.panels if one.slug == "nothing")
        assert nothing.optional == nothing.when_empty == board.panel("nothing")["empty"]

    def test_a_choice_narrows_and_a_hostile_one_is_only_a_name(self, board):
        """The name that ends a string and adds a query finds the one series that is called so, and nothing else."""
        for model in ("llama", HOSTILE):
            drawn = board.panel("running", **{"var-model_name": model})
            assert ([model], []) == ([one["name"] for one in drawn["series"]], drawn["errors"])
        for wrong in ('x"} or vector(1) #', ".*", "llama|x", "\\", "\n", "$instance"):
            drawn = board.panel("running", **{"var-model_name": wrong})
            assert ([], []) == (drawn["series"], drawn["errors"]), wrong

    def test_a_query_from_the_browser_is_never_asked(self, board):
        plain = board.panel("running")
        assert plain == board.panel(
            "running", query="vector(1)", expr="vector(1)", **{"var-__rate_interval": "1s", "var-x": "up"}
        )

    def test_choices_are_offered_in_their_chain(self, board):
        url = f"{board.url}/api/variables/{board_uid('shapes')}"
        offered = {v["name"]: v["options"] for v in json.loads(get(url)[1])["variables"]}
        assert {"10.0.0.1:8000", "10.0.0.2:8000"} == set(offered["instance"])
        narrowed = {
            v["name"]: v["options"] for v in json.loads(get(f"{url}?var-instance=10.0.0.1:8000")[1])["variables"]
        }
        assert (["llama"], ["demo"]) == (narrowed["model_name"], narrowed["team"])

    def test_annotations_are_restart_and_alert_time(self, board):
        """Annotations are the restart and the time the alert fired."""
        found = {
            one["name"]: one["marks"]
            for one in json.loads(get(f"{board.url}/api/annotations/{board_uid('shapes')}")[1])
        }
        starts = [m["from"] // 1000 for m in found["Engine starts"]]
        assert [NOW - 3600, NOW - 1500] == starts
        (firing,) = found["Firing alerts"]
        assert NOW - 3600 + 100 * 15 == firing["from"] // 1000
        assert firing["title"] == "VLLMEngineDown 10.0.0.1:8000"
        assert NOW - 3600 + 140 * 15 <= firing["to"] // 1000 <= NOW - 3600 + 140 * 15 + 300, (
            "an hour's samples are looked back for at most 5 minutes"
        )

    @pytest.mark.parametrize(
        ("path", "status", "words"),
        [("/d/vllm-watch-nothing", 404, "/d/vllm-watch-shapes "),
         ("/api/panel/vllm-watch-shapes/7", 404, "has no panel 7"), ("/api/panel/vllm-watch-shapes/../../x", 404, ""),
         (f"/api/panel/vllm-watch-shapes/{number('running')}?from=soon", 400, "'soon' is no"),
         (f"/api/panel/vllm-watch-shapes/{number('running')}?from=now-400d", 400, "at most 90 days"),
         (f"/api/panel/vllm-watch-shapes/{number('running')}?points=1e9", 400, "is no number"),
         ("/static/serve.py", 404, "no such file"),
         ("/runbooks/VLLMNothing", 404, "VLLMEngineDown"), ("/runbooks/..%2fbook.py", 404, "VLLMEngineDown"),
         ("/runbooks/<script>", 404, "&lt;script&gt;"), ("/runbooks/VLLMEngineDown.md", 200, "# VLLMEngineDown"),
         ("/runbooks", 200, "VLLMEngineDown"),
         ("/runbooks/VLLMEngineDown", 200, ">First five minutes</h2>"), ("/-/healthy", 200, "healthy")],
    )  # fmt: skip
    def test_answers_to_right_and_wrong_addresses(self, board, path, status, words):
        got, text = get(board.url + quote(path, safe="/?=&%."))
        assert status == got, text
        assert words in text
        assert "<script>" not in text

    def test_strict_policy_and_get_only(self, board):
        """Every answer carries a strict policy and only get is served."""
        for path in ("/", "/d/vllm-watch-overview", "/runbooks/", "/static/board.js", "/nowhere"):
            _, headers = asked("GET", board.url, path)
            assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
            assert "nosniff" == headers["X-Content-Type-Options"]
        assert [405, 405, 405] == [
            asked(method, board.url, "/d/vllm-watch-overview")[0] for method in ("POST", "PUT", "DELETE")
        ]

    def test_a_foreign_host_gets_one_sentence_and_no_figure(self, board):
        path = f"/api/panel/{board_uid('shapes')}/{number('running')}"
        status, text = get(board.url + path, Host="evil.example:9402")
        assert (421, True) == (status, "--allow-host" in text)
        assert "series" not in text

    def test_a_page_of_somebody_else_cannot_set_off_queries(self, board):
        path = f"/api/panel/{board_uid('shapes')}/{number('running')}"
        assert [403, 200, 200] == [
            get(board.url + path, **{"Sec-Fetch-Site": site})[0] for site in ("cross-site", "same-origin", "none")
        ]
        assert 200 == get(f"{board.url}/d/{board_uid('shapes')}", **{"Sec-Fetch-Site": "cross-site"})[0], (
            "a link to a board may stand anywhere"
        )

    def test_wrong_choice_is_reported_without_a_query(self, prometheus):
        """A wrong choice is told beside its picker and asks no query."""
        served = Served(prometheus, (PRICED,))
        try:
            status, text = get(f"{served.url}/api/variables/{board_uid('priced')}?var-price=up")
            told = {one["name"]: one for one in json.loads(text)["variables"]}
            assert (200, "2.50") == (status, told["price"]["chosen"])
            assert re.fullmatch(r"var-price: 'up' .* 2\.50", told["price"]["error"])
            assert "" == told["window"]["error"]
            status, text = get(f"{served.url}/api/panel/{board_uid('priced')}/{number('cost', 'priced')}?var-price=up")
            assert (400, f"{told['price']['error']}\n") == (status, text)
        finally:
            served.stop()


class FakePrometheus:
    """A stand-in that notes what arrives and how much of it at once; a real one cannot be made to answer late, or
    wrongly.

    instead: answers, each given once, before the right ones."""

    def __init__(self, *instead: web.Response) -> None:
        self.at_once = self.most = 0
        self.instead = list(instead)
        self.paths: list[str] = []
        self.authorization: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        self.authorization.add(request.headers.get("Authorization", ""))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await self.until_due(request.path)
        self.at_once -= 1
        self.paths.append(request.path)
        if self.instead:
            return self.instead.pop(0)
        if request.path.endswith("status/config"):
            return web.json_response({"status": "success", "data": {"yaml": "global:\n  scrape_interval: 30s\n"}})
        return web.json_response({"status": "success", "data": {"resultType": "matrix", "result": []}})

    async def until_due(self, path: str) -> None:
        """Answer at once."""


class GatheringPrometheus(FakePrometheus):
    """Answers queries once four are there, after turns of the loop in which a fifth would arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.four = asyncio.Event()

    async def until_due(self, path: str) -> None:
        if path.endswith("status/config"):
            return
        if self.at_once >= 4:
            self.four.set()
        await asyncio.wait_for(self.four.wait(), 60)
        for _ in range(100):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def answering(fake: FakePrometheus):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_at_most_four_queries_at_once():
    """At most four questions at once and the scrape interval is asked for once."""
    fake = GatheringPrometheus()
    async with answering(fake) as url, Prometheus(address(f"{url}/prefix", login="me:pass")) as client:
        assert [30] * 6 == await asyncio.gather(*(client.scrape_s() for _ in range(6)))
        await asyncio.gather(*(client.over_time("up", OVER) for _ in range(20)))
    assert 4 == fake.most
    assert 1 == fake.paths.count("/prefix/api/v1/status/config")
    assert {"Basic bWU6cGFzcw=="} == fake.authorization


@pytest.mark.parametrize(("status", "hint"), [(503, "starting"), (502, "starting"), (200, "its address")])
async def test_starting_prometheus_is_asked_again(status, hint):
    """A Prometheus that is starting is asked again for its scrape interval."""
    now_s = [0.0]
    fake = FakePrometheus(web.Response(status=status, text="Service Unavailable"))
    async with answering(fake) as url, Prometheus(address(url), clock=lambda: now_s[0]) as client:
        for _ in range(2):
            with pytest.raises(PrometheusError, match=f"HTTP {status}.*{hint}"):
                await client.scrape_s()
        assert 1 == len(fake.paths), "within two seconds the same is said again without asking"
        now_s[0] = 2
        assert 30 == await client.scrape_s()


@pytest.mark.parametrize(
    ("status", "later"), [(404, 15), (403, 15), (401, 15), (405, 15), (501, 15), (429, 30), (400, 30)]
)
async def test_hidden_configuration_means_fifteen_seconds(status, later):
    """For good where the answer will not change, else for now."""
    fake = FakePrometheus(web.Response(status=status, text="no"))
    async with answering(fake) as url, Prometheus(address(url)) as client:
        assert [15, later] == [await client.scrape_s() for _ in range(2)]


async def test_an_answer_that_is_too_large_is_told_and_not_decoded(monkeypatch):
    monkeypatch.setattr(prometheus_client, "LARGEST_ANSWER", 1 << 20)
    fake = FakePrometheus(web.Response(text=" " * (2 << 20)))
    async with answering(fake) as url, Prometheus(address(url)) as client:
        assert "larger than 1 MiB" in (await client.over_time("up", OVER)).error
        fake.instead.append(web.Response(text=" " * (2 << 20)))
        assert [15, 15] == [await client.scrape_s() for _ in range(2)], (
            "a configuration of that size is not asked for again"
        )


async def test_slow_decoding_leaves_the_loop_free(monkeypatch):
    """Otherwise one large panel makes every other page wait, and the health check fail."""
    seen: list[int] = []

    def noting(original):
        def called(*given):
            seen.append(threading.get_ident())
            return original(*given)

        return called

    monkeypatch.setattr(prometheus_client, "_series", noting(prometheus_client._series))
    monkeypatch.setattr(prometheus_client, "_interval_s", noting(prometheus_client._interval_s))
    monkeypatch.setattr(charts, "draw", noting(charts.draw))
    async with answering(FakePrometheus()) as url, Prometheus(address(url)) as client:
        await server.DashboardServer(client, (SHAPES,)).panel(LINES, view.PanelView(NOW - 3600, NOW, {}))
    assert 3 == len(seen)
    assert threading.get_ident() not in seen


async def test_refused_connection_is_reported_once(monkeypatch):
    """A listener whose queue is full answers nothing at all, as a firewall does."""
    monkeypatch.setattr(prometheus_client, "CONNECT_S", 0.2)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with Prometheus(address(f"http://127.0.0.1:{full.getsockname()[1]}"), clock=lambda: 0) as client:
            told = {answer.error for answer in await asyncio.gather(*(client.as_of("up", NOW) for _ in range(12)))}
            assert 1 == len(told)
            assert "does not answer (no connection within" in told.copy().pop()
            full.close()  # another attempt would be refused at once, in other words
            assert told == {(await client.as_of("up", NOW)).error}


async def test_the_board_ends_also_while_prometheus_keeps_it_waiting():
    """A stopped container accepts connections and says nothing."""

    class Silent(FakePrometheus):
        arrived = asyncio.Event()

        async def answer(self, request: web.Request) -> web.Response:
            self.arrived.set()
            await asyncio.Event().wait()
            raise AssertionError

    stop, silent = asyncio.Event(), Silent()
    async with answering(silent) as url, asyncio.timeout(60):
        serving = asyncio.create_task(server.serve(address(url), "127.0.0.1:0", None, (), stop))
        await silent.arrived.wait()
        stop.set()
        await serving


def runbook_link(name: str, **labels: str) -> str:
    return f"/runbooks/{name}?{urlencode({'live': '1', **labels})}"


@pytest.mark.prometheus
class TestRunbookLinks:
    def test_page_shows_the_value_and_the_rows_that_hold(self, board):
        link = runbook_link("VLLMKVCacheNearlyFull", model_name=HOSTILE, instance="10.0.0.2:8000", job="vllm")
        status, text = get(f"{board.url}{link}")
        assert 200 == status
        now = text.split('<div class="now">')[1].split("</div>")[0]
        assert "expression holds." in now
        (first,) = re.findall(r'<pre class="result">(.*?)</pre>', now, re.DOTALL)
        assert first.split()[0] == "0.97", "the value that fired, of this engine alone"
        assert "10.0.0.1" not in first
        preempted, quiet = (row.what for row in diagnosis.ROWS["VLLMKVCacheNearlyFull"][:2])
        assert (True, False) == (quiet in now, preempted in now)
        assert HOSTILE not in text, "as HTML: a label is text"

    def test_without_labels_nothing_is_evaluated(self, board):
        _, text = get(f"{board.url}/runbooks/VLLMKVCacheNearlyFull")
        assert 'class="now"' not in text
        assert '<a href="/runbooks/VLLMKVCacheNearlyFull?live=1">' in text

    def test_names_that_are_no_labels_and_huge_values_are_ignored(self, board):
        link = runbook_link("VLLMKVCacheNearlyFull", **{"a-b": "x", "instance": "y" * 5000, "model_name": "llama"})
        _, text = get(f"{board.url}{link}")
        assert ": <code>model_name=llama</code> </p>" in text

    def test_a_label_cannot_leave_its_query(self, board):
        link = runbook_link("VLLMKVCacheNearlyFull", model_name='"} or vector(1) or x{y="`<b>')
        status, text = get(f"{board.url}{link}")
        assert 200 == status
        assert "parse error" not in text
        assert "<b>" not in text


def test_a_runbook_page_comes_without_prometheus_too():
    served = Served("http://127.0.0.1:9")
    try:
        status, text = get(f"{served.url}{runbook_link('VLLMKVCacheNearlyFull', instance='10.0.0.1:8000')}")
        assert 200 == status
        assert re.search(r"Not evaluated: .*http://127\.0\.0\.1:9 does not answer", text)
        assert "instance=~&quot;10\\\\.0\\\\.0\\\\.1:8000&quot;" in text
    finally:
        served.stop()


def test_a_named_mitigation_leads_to_its_step():
    for page in runbook_page.pages():
        html = pages.runbook_page(page, {}, None)
        named = set(re.findall(r'<a href="#(mitigation-\d+)"', html))
        assert named <= set(re.findall(r'<li id="(mitigation-\d+)"', html)), page.name
        assert named or "Mitigation " not in re.sub(r"<[^>]*>|Mitigation</h2>", "", html), page.name


def test_runbooks_work_without_prometheus():
    """Without Prometheus every panel says so and runbooks are there."""
    served = Served("http://127.0.0.1:9")
    try:
        (told,) = served.panel("running")["errors"]
        assert told.startswith("Prometheus at http://127.0.0.1:9 does not answer")
        assert 200 == get(f"{served.url}/runbooks/VLLMEngineDown")[0]
    finally:
        served.stop()


# --- the command


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--snapshot", "x.html", "--board", "nope"), "board nope; .*overview"),
        (("--board", "overview"), "--board belongs to --snapshot"),
        (("--snapshot", "/nonexistent/x.html"), "/nonexistent is no folder"),
        (
            ("--snapshot", "x.html", "--prometheus", "http://127.0.0.1:9"),
            "Prometheus at http://127.0.0.1:9 does not answer",
        ),
        (("--prometheus", "http://me:secret@127.0.0.1:9"), "user:password .*--user-file"),
        (("--prometheus", "http://me:12/3secret@127.0.0.1"), "user:password .*--user-file"),
        (("--user-file", "/nonexistent"), "/nonexistent: No such file"),
        (("--scrape-interval", "1x"), "'1x' is no duration"),
        (("--snapshot", "x.html", "--from", "soon"), "'soon' .*now-1h"),
        (("--prometheus", "127.0.0.1:9090"), "127.0.0.1:9090 .*http://127.0.0.1:9090"),
        (("--listen", "9402"), "write host:port"),
        (("--token-file", "/nonexistent"), "/nonexistent: No such file"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, pattern, tmp_path):
    done = command(*arguments)
    assert (2, True) == (done.exit_code, bool(re.search(pattern, done.output))), done.output
    assert "secret" not in done.output
    assert not Path("x.html").exists()


def test_a_taken_port_is_told_with_the_way_out():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = command("--listen", listen)
    assert 2 == done.exit_code
    assert re.search(f"{listen} is taken .*--listen$", done.output, re.MULTILINE)


def test_command_starts_before_prometheus_and_ends(free_port, tmp_path):
    """Runbooks are wanted most when everything else is down."""
    url = f"127.0.0.1:{free_port()}"
    (tmp_path / "login").write_text("me:secret\n")
    login = ["--user-file", str(tmp_path / "login")]
    arguments = [
        sys.executable,
        "-m",
        "stack.cli",
        "board",
        "--prometheus",
        "http://127.0.0.1:9",
        *login,
        "--listen",
        url,
    ]
    process = subprocess.Popen(
        arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: get(f"http://{url}/runbooks/VLLMEngineDown")[0] == 200, what="the board")
    finally:
        process.terminate()
        _, told = process.communicate(timeout=60)
    assert 0 == process.returncode, told
    assert "Prometheus at http://127.0.0.1:9 does not answer" in told
    assert "secret" not in told
    assert "Traceback" not in told


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "x.html").mkdir()
    with pytest.raises(OSError, match=r"x\.html"):
        write_atomically(tmp_path / "x.html", "text")
    assert ["x.html"] == [path.name for path in tmp_path.iterdir()]


# --- in a real Chromium


@pytest.fixture
def tab(new_tab):
    return new_tab(viewport={"width": 1400, "height": 1200}, timezone_id="UTC")


def shown(page, slug: str, board: str = "shapes"):
    return page.locator(f'section.panel[data-id="{number(slug, board)}"]')


def address_of(board, **parameters: str) -> str:
    """The stopped hour: relative times would be the browser's."""
    given = {"from": str((NOW - 3600) * 1000), "to": str(NOW * 1000), "refresh": "off"} | parameters
    return f"{board.url}/d/{board_uid('shapes')}?{urlencode(given)}"


def change_answer(page, slug: str, change) -> None:
    """What the page gets for a panel, with changes that a recorded hour does not hold."""

    def handle(route) -> None:
        try:
            drawn = route.fetch().json()
        except Error:  # the page, or its end, gave this request up meanwhile; whoever still waits asks again
            return
        change(drawn)
        route.fulfill(json=drawn)

    page.route(f"**/api/panel/{board_uid('shapes')}/{number(slug)}?*", handle)


FIGURES = [
    (0.0123, "s", "12.3 ms"), (2.5, "s", "2.5 s"), (90, "s", "1.5 min"), (5400, "s", "1.5 h"), (0, "s", "0 s"),
    (2e-6, "s", "2 µs"),
    (0.9996, "s", "1 s"),
    (0.005, "percentunit", "0.5%"), (1, "percentunit", "100%"), (0.99954, "percentunit", "99.95%"),
    (0.999999, "percentunit", "99.99%"),
    (1536, "bytes", "1.5 KiB"), (8 * 2**30, "bytes", "8 GiB"), (512, "bytes", "512 B"), (2e6, "Bps", "2 MB/s"),
    (12.34, "reqps", "12.3 req/s"),
    (1234, "reqps", "1.23K req/s"), (3, "cps", "3/s"), (12345, "suffix: tok/s", "12,345 tok/s"),
    (0.25, "suffix: tok", "0.25 tok"),
    (350.4, "watt", "350 W"),
    (7.2e6, "joule", "7.2 MJ"), (71, "celsius", "71 °C"), (1.98e9, "hertz", "1.98 GHz"), (1, "bool_on_off", "yes"),
    (0, "bool_on_off", "no"),
    (1500, "short", "1.5K"), (None, "s", "\u2013"), (-0.5, "s", "-500 ms"), (3, "unit of tomorrow", "3"),
]  # fmt: skip


def test_page_knows_exactly_the_used_units():
    """What it does not know would be shown without its unit."""
    named = set(
        re.findall(
            r"^    (\w+): ",
            pages.static("units.js").decode().partition("NAMED = {")[2].partition("};")[0],
            re.MULTILINE,
        )
    )
    printed = {shown_unit(unit, per_second) for unit in Unit for per_second in (False, True)}
    used = {query.unit for board in BOARDS for panel in board.panels for query in panel.queries}
    assert named == {unit for unit in printed | used if not unit.startswith("suffix:")}


@pytest.mark.chromium
@pytest.mark.prometheus
class TestInChromium:
    def test_a_runbook_link_shows_the_value_that_fired(self, board, new_tab):
        link = runbook_link("VLLMKVCacheNearlyFull", model_name=HOSTILE, instance="10.0.0.2:8000", job="vllm")
        for width in (1440, 400):
            tab = new_tab(viewport={"width": width, "height": 900}).page
            tab.goto(f"{board.url}{link}")
            expect(tab.locator("pre.result").first).to_contain_text("0.97")
            assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            if folder := os.environ.get("VLLM_WATCH_PICTURES"):
                tab.screenshot(path=f"{folder}/runbook-link-{width}.png")

    def test_figures_are_written_as_people_read_them(self, board, tab):
        tab.page.goto(address_of(board, viewPanel=str(number("running"))))
        written = tab.page.evaluate(
            "rows => rows.map(([value, unit]) => units.format(value, unit))",
            [[value, unit] for value, unit, _ in FIGURES],
        )
        assert [expected for _, _, expected in FIGURES] == written
        assert "2 h ago" == tab.page.evaluate("units.format(Date.now() - 2.5 * 3600e3, 'dateTimeFromNow')")
        assert [0, 600, 1200, 1800] == tab.page.evaluate("units.ticks(0, 2000, 's', 4)")
        assert [0, 2**30, 2**31] == tab.page.evaluate("units.ticks(0, 2.2 * 2**30, 'bytes', 3)")

    def test_every_shape_is_drawn_and_hostile_names_are_only_text(self, board, tab):
        page = tab.page
        page.goto(address_of(board))
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)
        expect(shown(page, "running").locator(".legend")).to_contain_text(HOSTILE)
        expect(shown(page, "running").locator(".legend .limit")).to_have_text("limit 2.5 req")
        expect(shown(page, "tokens").locator("path.js-fill, .fills path").first).to_be_attached()
        expect(shown(page, "ttft").locator(".heatmaplayer image")).to_have_count(1)
        expect(shown(page, "log").locator("strong")).to_have_text("0.0667 req/s")
        expect(shown(page, "engines").locator("tbody tr").first).to_contain_text(HOSTILE)
        expect(shown(page, "broken").locator(".errors")).to_contain_text("parse error")
        expect(shown(page, "nothing").locator(".empty")).to_have_text("Start the engine with --thing to fill this.")
        expect(page.locator(".status")).to_have_text("1 panel failed")
        shown(page, "running").locator(".chart").hover(position={"x": 200, "y": 60})
        expect(page.locator(".tip")).to_contain_text(HOSTILE)
        assert 0 == page.locator('img[src="x"]').count()

    def test_out_of_range_quantile_shows_its_bound(self, board, tab):
        """A fifth of the requests took at most 0.1 s, the first bound; a quarter more than 2.5 s, the last finite
        one."""
        page = tab.page
        page.goto(address_of(board))
        for slug, told in (("ttft-p20", "< 100 ms"), ("ttft-p95", "> 2.5 s")):
            values = shown(page, slug).locator(".legend b")
            expect(values).to_have_text([told, told])
            shown(page, slug).locator(".chart").hover(position={"x": 200, "y": 60})
            expect(page.locator(".tip b")).to_have_text([told, told])
        expect(shown(page, "gauge-rate").locator(".note")).to_contain_text(
            "Prometheus says: PromQL info: metric might not be a counter"
        )

    def test_a_quantile_shows_the_bounds_of_its_bucket(self, board, tab):
        page = tab.page

        def with_bounds(drawn) -> None:
            for one in drawn["series"]:
                one |= {"low": [0.1] * len(one["values"]), "high": [2.5] * len(one["values"])}

        change_answer(page, "ttft-p70", with_bounds)
        page.goto(address_of(board, viewPanel=str(number("ttft-p70"))))
        expect(shown(page, "ttft-p70").locator(".legend b").first).to_contain_text("(100 ms to 2.5 s)")

    def test_a_folded_row_asks_nothing_until_it_is_opened(self, board, tab):
        page = tab.page
        folded = f"/api/panel/{board_uid('shapes')}/{number('folded')}"
        board.asked.clear()
        page.goto(address_of(board))
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)
        page.locator("details.row > summary").scroll_into_view_if_needed()
        assert folded not in board.asked
        page.locator("details.row > summary").click()
        expect(shown(page, "folded").locator("path.js-line")).to_have_count(2)
        assert 1 == board.asked.count(folded)

    def test_the_address_holds_the_whole_view(self, board, tab):
        """What a colleague gets by the link is what was on the screen."""
        page = tab.page
        page.goto(address_of(board))
        page.locator('details[data-name="model_name"] summary').click()
        page.locator('details[data-name="model_name"]').get_by_label("llama").check()
        expect(shown(page, "running").locator("path.js-line")).to_have_count(1)
        page.get_by_role("group", name="Annotations").get_by_label("Engine starts").uncheck()
        link = page.url
        assert "var-model_name=llama" in link
        assert "hide=Engine+starts" in link
        other = tab.context.new_page()
        other.goto(link)
        expect(shown(other, "running").locator("path.js-line")).to_have_count(1)
        expect(other.get_by_role("group", name="Annotations").get_by_label("Engine starts")).not_to_be_checked()
        page.go_back()
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)

    def test_the_link_of_an_alert_opens_its_panel_with_what_to_do(self, board, tab):
        ref = PanelRef("overview", "ttft-p95")
        tab.page.goto(f"{ref.url(board.url)}&from={(NOW - 3600) * 1000}&to={NOW * 1000}")
        expect(tab.page.locator("section.panel")).to_have_count(1)
        expect(tab.page.locator(".about")).to_contain_text("Look at queue time first")
        expect(tab.page.locator("path.js-line").first).to_be_attached()
        tab.page.get_by_text("all panels of this board").click()
        expect(tab.page.locator("section.panel").nth(3)).to_be_attached()

    def test_the_links_of_the_page_requests_lead_on(self, prometheus, tab, tmp_path):
        """From a panel to its requests, to one of them and back, and by every kind of filter and order."""
        records = made_requests(60, start_s=NOW - 1200, step_s=20.0)
        log = tmp_path / "requests.jsonl"
        log.write_bytes(b"".join(map(to_line, records)))
        found = RequestPages(
            RequestSourceOptions(logs=(log,)), None, lambda: NOW, "https://traces.example.org/{trace_id}"
        )
        served = Served(prometheus, requests=found)
        page, rows = tab.page, tab.page.locator("table.timeline tr:has(td)")
        try:
            page.goto(address_of(served))
            shown(page, "running").locator("details.info > summary").click()
            shown(page, "running").get_by_role("link", name="Requests of this time").click()
            expect(rows).to_have_count(60)
            page.get_by_role("link", name="15 min").click()
            expect(rows).to_have_count(sum(record.ts >= timestamp(NOW - 900) for record in records))
            page.get_by_role("link", name="1 h", exact=True).click()
            expect(rows).to_have_count(60)
            for name, value in (("team", "chat"), ("model", "large"), ("outcome", "ok")):
                page.get_by_role("cell", name=value, exact=True).first.get_by_role("link").click()
                expect(page.locator("article code", has_text=f"{name}={value}")).to_be_visible()
            left = [one for one in records if (one.team, one.model, one.outcome) == ("chat", "large", "ok")]
            expect(rows).to_have_count(len(left))
            page.get_by_role("link", name="slowest", exact=True).click()
            slowest = max(left, key=lambda one: one.e2e_ms or 0.0)
            page.locator("table.timeline td a").filter(has_text=re.compile(f"^{slowest.request_id}$")).click()
            expect(page.locator("h1")).to_have_text(f"Request {slowest.request_id}")
            widths = page.eval_on_selector_all("i.bar", "bars => bars.map((bar) => bar.getBoundingClientRect().width)")
            assert len(phases_of(slowest)) == len(widths)
            assert all(width > 0 for width in widths)
            page.get_by_role("link", name="Requests", exact=True).click()
            expect(rows).to_have_count(60)
            page.get_by_role("cell", name="chat", exact=True).first.get_by_role("link").click()
            expect(rows).to_have_count(sum(one.team == "chat" for one in records))
            while page.get_by_title("Remove this filter").count():
                page.get_by_title("Remove this filter").first.click()
            expect(rows).to_have_count(60)
            page.get_by_role("link", name="Dashboards").click()
            expect(page).to_have_url(re.compile(f"^{served.url}/"))
        finally:
            page.goto("about:blank")  # a board that still loads its panels complains of a server that stopped
            served.stop()

    def test_snapshot_opens_offline_and_draws(self, board, tab, prometheus, tmp_path):
        """A snapshot opens from the disk without a network and draws."""
        where = address(prometheus, login="me:secret")
        with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:  # Playwright's loop runs in this thread
            taking = snapshot.take(where, (SHAPES, BOARDS[0]), None, str((NOW - 3600) * 1000), str(NOW * 1000), NOW)
            page_text = elsewhere.submit(asyncio.run, taking).result()
        assert "secret" not in page_text
        file = tmp_path / "incident.html"
        write_atomically(file, page_text)
        tab.context.set_offline(True)
        asked: list[str] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        tab.page.goto(file.as_uri())
        expect(shown(tab.page, "running").locator("path.js-line")).to_have_count(2)
        told = f"Snapshot taken 2026-01-01 01:00 from {prometheus}, showing 2026-01-01 00:00 to 2026-01-01 01:00"
        expect(tab.page.locator(".taken")).to_contain_text(told)
        tab.page.get_by_role("link", name="Overview").click()
        expect(shown(tab.page, "ttft-p95", "overview").locator("path.js-line").first).to_be_attached()
        assert [file.as_uri()] == [url for url in asked if not url.startswith(("data:", "blob:"))]

    def test_a_refresh_draws_into_the_same_picture(self, board, tab):
        """What was drawn is changed, not thrown away: no flicker, and an open choice stays open."""
        page = tab.page
        page.goto(address_of(board))
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)
        page.evaluate("document.querySelector('.main-svg').dataset.kept = 'yes'")
        board.asked.clear()
        page.get_by_label("Refresh now").click()
        panel_path = f"/api/panel/{board_uid('shapes')}/{number('running')}"
        eventually(lambda: panel_path in board.asked, "a question of the panel")
        expect(page.locator(".busy")).to_have_count(0)
        assert 1 == page.locator('.main-svg[data-kept="yes"]').count()

    def test_a_query_slower_than_the_refresh_is_still_answered(self, board, tab):
        """Each refresh that took back what was still being asked left such a panel empty for ever, without a word."""
        page = tab.page
        page.clock.install(time=NOW)
        page.add_init_script("""const plain = window.fetch;
            window.fetch = async (url, options) => {
              if (String(url).includes("/api/panel/")) await new Promise((go, stop) => {
                setTimeout(go, 7000);
                options.signal.addEventListener("abort", () => stop(options.signal.reason));
              });
              return plain(url, options);
            };""")
        before = board.asked.count(f"/api/panel/{board_uid('shapes')}/{number('running')}")
        page.goto(f"{board.url}/d/{board_uid('shapes')}?refresh=5s&viewPanel={number('running')}")
        panel_path = f"/api/panel/{board_uid('shapes')}/{number('running')}"

        def asked_again() -> bool:
            page.clock.run_for(500)
            return board.asked.count(panel_path) >= before + 2

        eventually(asked_again, "two answered refreshes")
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)
        expect(page.locator(".status")).to_contain_text("updated 01:0")

    def test_hidden_tab_refreshes_when_shown(self, board, tab):
        """A tab that was hidden for longer than the refresh is due at once."""
        page = tab.page
        page.clock.install(time=NOW)
        page.goto(f"{board.url}/d/{board_uid('shapes')}?refresh=30s&viewPanel={number('running')}")
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true}); window.away ="
            " true"
        )
        page.clock.run_for(3600_000)
        board.asked.clear()
        page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
        page.clock.run_for(1)
        expect(page.locator(".status")).to_contain_text("updated 02:00")
        assert f"/api/panel/{board_uid('shapes')}/{number('running')}" in board.asked

    def test_a_hole_in_every_series_of_a_stack_is_no_zero(self, board, tab):
        page = tab.page

        def holed(drawn):
            for one in drawn["series"]:
                one["values"] = [None if 100 <= i < 140 else 40.0 for i in range(241)]
            drawn["series"][1]["values"][200:220] = [None] * 20

        change_answer(page, "tokens", holed)
        page.goto(address_of(board))
        tokens = shown(page, "tokens")
        expect(tokens.locator("path.js-line")).to_have_count(4)  # two lines, each in two pieces
        inside = """([chart, at]) => {
            const { _size: size, yaxis } = chart._fullLayout;
            const [, path] = chart.querySelectorAll(".fills path");
            return path.isPointInFill(new DOMPoint(size.w * at / 240, yaxis.c2p(60)));
        }"""
        chart = tokens.locator(".chart").element_handle()
        assert [True, False, True, False] == [page.evaluate(inside, [chart, at]) for at in (50, 120, 180, 210)]
        box = chart.bounding_box()
        page.mouse.move(box["x"] + 54 + (box["width"] - 64) * 50 / 240, box["y"] + 60)
        for words in ("llama40 tok/s", "together80 tok/s"):
            expect(page.locator(".tip")).to_contain_text(words)

    def test_a_refresh_takes_nothing_out_of_ones_hands(self, board, tab):
        """Focus, scroll positions and a pressed button survive; a box that says the same is not read out again."""
        page = tab.page
        # each answer another figure
        change_answer(page, "engines", lambda drawn: drawn["rows"][0].__setitem__(1, len(board.asked)))
        page.goto(address_of(board))
        expect(shown(page, "broken").locator(".errors p")).to_have_count(1)
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)
        expect(shown(page, "engines").locator("tbody tr")).to_have_count(2)
        page.add_style_tag(content=".scroll { height: 40px !important }")
        page.evaluate("document.querySelector('.scroll').scrollTop = 20")
        kept = [
            ".errors p",
            ".legend button",
            "tbody td",
            ".number strong",
            ".tabs a",
            ".marks label",
            ".choices summary",
        ]
        page.evaluate("all => all.forEach(one => { document.querySelector(one).kept = true })", kept)
        before = shown(page, "engines").locator("tbody tr").first.inner_text()
        with page.expect_response("**/api/annotations/*"), page.expect_response("**/api/variables/*"):
            page.get_by_label("Refresh now").click()
        expect(shown(page, "engines").locator("tbody tr").first).not_to_have_text(before)
        expect(page.locator(".busy")).to_have_count(0)
        assert [] == page.evaluate("all => all.filter(one => !document.querySelector(one).kept)", kept)
        assert 20 == page.evaluate("document.querySelector('.scroll').scrollTop")
        expect(page.get_by_label("Refresh now")).to_be_focused()
        page.get_by_role("button", name="15m").click()
        expect(page.get_by_role("button", name="15m")).to_be_focused()
        page.locator('details[data-name="model_name"] summary').click()
        page.locator('details[data-name="model_name"] input').first.focus()
        page.keyboard.press("Escape")
        expect(page.locator('details[data-name="model_name"] summary')).to_be_focused()

    def test_wrong_choice_can_be_corrected(self, board, tab):
        """A wrong choice in the address is told and can be corrected."""
        page = tab.page
        page.goto(f"{board.url}/d/{board_uid('teams')}?refresh=off&{urlencode({'var-gpu_hour_price': '5 + 3'})}")
        expect(page.locator(".status")).to_contain_text("var-gpu_hour_price: '5 + 3'")
        price = page.get_by_label("Price of a GPU hour")
        expect(price).to_have_value("5 + 3")
        price.fill("3")
        price.press("Enter")
        expect(page.locator(".status")).to_contain_text("updated")
        expect(page.locator(".errors:visible")).to_have_count(0)
        page.goto(f"{board.url}/d/{board_uid('tuning')}?refresh=off&var-before=4h")
        expect(page.locator(".status")).to_contain_text("choose one of 5m, 15m")
        page.get_by_label("Before: this long ago").select_option("3h")
        expect(page.locator(".status")).to_contain_text("updated")
        assert {"400"} == {re.sub(r"\D", "", complaint) for complaint in tab.complaints}
        tab.complaints.clear()

    def test_a_panel_that_failed_and_recovered_listens_once(self, board, tab):
        """Each recovery added another listener, so that every move of the pointer did its work again and again."""
        page = tab.page
        failing = [False]

        def fail(drawn):
            if failing[0]:
                drawn |= {"series": [], "errors": ["no"]}

        change_answer(page, "running", fail)
        page.add_init_script("""const add = EventTarget.prototype.addEventListener; window.heard = 0;
            EventTarget.prototype.addEventListener = function (name, ...rest) {
              if (name === "mousemove" && this.classList && this.classList.contains("chart")) window.heard += 1;
              return add.call(this, name, ...rest);
            };""")
        page.goto(address_of(board, viewPanel=str(number("running"))))
        for failing[0] in (False, True, False):
            page.get_by_label("Refresh now").click()
            expect(shown(page, "running").locator(".errors p")).to_have_count(int(failing[0]))
            expect(shown(page, "running").locator("path.js-line")).to_have_count(0 if failing[0] else 2)
        assert 1 == page.evaluate("window.heard")

    def test_time_does_not_run_back_where_clocks_do(self, board, chromium):
        """Berlin, 25 October 2026: the hour from 02:00 comes twice."""
        context = chromium.new_context(timezone_id="Europe/Berlin", viewport={"width": 1400, "height": 1200})
        page = context.new_page()
        back = 1_792_890_000_000

        def moved(drawn):
            drawn |= {"start": back - 1800_000, "end": back + 1800_000}

        change_answer(page, "running", moved)
        page.goto(address_of(board, viewPanel=str(number("running"))))
        expect(shown(page, "running").locator("path.js-line")).to_have_count(2)
        x = shown(page, "running").locator(".chart").evaluate("chart => chart.data[0].x")
        assert {15_000} == {later - earlier for earlier, later in pairwise(x)}
        context.close()

    def test_what_explains_a_panel_opens_within_the_window(self, board, tab):
        page = tab.page
        page.set_viewport_size({"width": 1000, "height": 900})
        page.goto(address_of(board))
        shown(page, "running").get_by_label("About Running").click()
        expect(shown(page, "running").locator(".popup")).to_have_attribute("style", re.compile("translate"))
        box = shown(page, "running").locator(".popup").bounding_box()
        assert 0 <= box["x"] <= 1000 - box["width"]
