"""A bench as a page, Markdown, CSV and JSON: what stands in them, whoever wrote the names, and how the page looks in a
real Chromium."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from playwright.sync_api import expect

from exporters.accounting.prices import ApiPrice, GpuPrice, Prices
from exporters.events.log import TimeWindow, TuningEvent
from exporters.requests.record import RequestRecord, timestamp
from stack import templates
from stack.bench import result
from stack.bench.measurements import Slo, figures
from stack.bench.result import BadBench, Bench, BenchEngine, BenchVariant, Run, Start, request_id
from stack.board import pages
from stack.gateway.policy import Policy, Team
from stack.tuning import charts, derived, report, report_blocks, report_data, report_sections
from stack.tuning.comparison import Comparison
from stack.tuning.derived import Material
from stack.tuning.lab_rows import CRITERIA, lab_rows
from stack.tuning.run_comparison import compare_runs
from tests.support.wait import eventually

expect.set_options(timeout=60_000)  # ends a hanging test only

T0 = 1_790_000_000.0
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>|`*_[x](javascript:alert(3))"
PRICES = Prices(gpu_hour=3.0, gpus=(GpuPrice("H200", 3.6),), api=(ApiPrice("tiny", 0.001, 0.004, 0.0005),))


def made(
    variants=("off", "on"),
    runs=6,
    requests=20,
    workloads=(("shared-prefix", "c8"),),
    kinds=(None,),
    failing=0.0,
    cut=False,
    name=str,
) -> tuple[Bench, list[RequestRecord]]:
    """A bench with fast second variants, by a fixed seed. name: what becomes of every text that somebody else wrote."""
    rng, at_s, number, told, records = random.Random(7), T0, 0, [], []
    order = [variant for i in range(runs) for variant in (variants if i % 2 == 0 else variants[::-1])]
    for workload, point in workloads:
        for variant in order:
            number, began, luck, mine = number + 1, at_s, rng.gauss(1, 0.03), []
            fast = 0.5 if variant != variants[0] else 1.0
            for n in range(requests):
                at_s += 0.25
                common = {
                    "request_id": request_id("b1", number, n),
                    "ts": timestamp(at_s),
                    "model": "tiny",
                    "route": "/v1/chat/completions",
                    "team": kinds[n % len(kinds)],
                    "variant": name(variant),
                    "e2e_ms": 900.0 * luck,
                }
                if rng.random() < failing:
                    mine.append(RequestRecord(**common, outcome="timeout", reason="timeout"))
                else:
                    more = {
                        "prompt_tokens": 2000,
                        "cached_tokens": 1500,
                        "completion_tokens": 64,
                        "finish_reason": "length",
                    }
                    ttft_ms = 200 * fast * luck * rng.lognormvariate(0, 0.3)
                    mine.append(RequestRecord(**common, **more, outcome="ok", ttft_ms=ttft_ms, tpot_ms=20 * luck))
            at_s += 2
            found = figures(mine, at_s - began, Slo(ttft_ms=400)) | {
                "hit_ratio": 0.0 if variant == variants[0] else 0.8
            }
            ok = sum(record.outcome == "ok" for record in mine)
            last = cut and number == len(order) * len(workloads)
            told.append(Run(
                number=number, variant=name(variant), workload=name(workload), point=name(point), started_s=began,
                ended_s=at_s, seed=number, asked=requests,
                ok=ok, failed={"timeout": requests - ok} if ok < requests else {}, figures=found,
                cut=name("stopped") if last else None,
            ))  # fmt: skip
            records += mine
    bench = Bench(
        id="b1", title=name("Prefix caching"), tool="vllm-watch 0.1", started_s=T0, ended_s=at_s, runs=tuple(told),
        workload_hash="abc",
        variants=tuple(
            BenchVariant(
                name=name(variant), what=name("prefix caching"),
                engine=BenchEngine(
                    url=f"http://me:pass@h{i}:8000", model="tiny", version=name("0.20.1"),
                    cache={"enable_prefix_caching": str(i > 0), "block_size": "16"},
                    arguments=(
                        "serve", "--max-model-len", "4096", "--api-key", "sk-1", "sk-2", f"--hf-token=hf-{i}", "--seed",
                        str(i), "--name", name("x"),
                    ),
                ),
                starts=(Start("cold", 90.0), Start("warm", 40.0), Start("warm", 44.0)),
            )
            for i, variant in enumerate(variants)
        ),
        workloads=tuple({"name": name(w), "about": name("a prefix"), "expected_hit": [0.7, 0.95]}
            for w in dict(workloads)),
        order="interleaved" if len(variants) > 1 else "single", slo={"ttft_ms": 400.0}, hardware=name("1 x H200"),
        caveats=(name("a caveat"),),
        cut=name("stopped") if cut else None,
    )  # fmt: skip
    return bench, records


def compared(bench: Bench) -> list[Comparison]:
    first, *others = [variant.name for variant in bench.variants]
    return [
        compare_runs(
            [run for run in group.runs if run.variant == first], [run for run in group.runs if run.variant == other]
        )
        for group in derived.groups(bench)
        for other in others
    ]


def material(bench, records=(), **more) -> Material:
    return Material(
        bench=bench, records=records, comparisons=compared(bench) if len(bench.variants) > 1 else (), **more
    )


@pytest.fixture(scope="module")
def two() -> Material:
    return material(*made(), prices=PRICES, gpus=1, gpu_name="NVIDIA H200")


class Read(HTMLParser):
    """What a browser would see: elements that are open at the end, texts of cells, and every element's name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.names: list[str] = []
        self.sections: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "section":
            self.sections.append(dict(attrs)["id"])

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        elif not {"script", "style"} & set(self.open):
            self.text += data

    def row(self, *begins: str) -> list[str]:
        return next(row for row in self.rows if tuple(row[: len(begins)]) == begins)


def read_page(told: Material, lab=()) -> Read:
    # five megabytes that say nothing here
    page = Read(report.page(told, lab).replace(pages.static("plotly.min.js").decode(), ""))
    assert [] == page.open
    return page


def section(told: Material, title: str) -> list[report_blocks.Table]:
    return [
        block
        for one in report_sections.sections(told)
        if one.title == title
        for block in one.blocks
        if isinstance(block, report_blocks.Table)
    ]


# --- what the page says


def test_comparison_stands_first_with_interval_and_reason(two):
    """The verdict stands first with its interval in words and with the reason."""
    page = read_page(two)
    assert "verdict" == page.sections[0]
    assert ["metric", "off", "on", "change (95 % interval)", "verdict", "why"] == page.rows[0]
    _, a, b, change, verdict, why = page.row("TTFT p50")
    assert "▲ better" == verdict
    assert re.fullmatch(r"-\d+(\.\d)? % \(-\d+\.\d % to -\d+\.\d %\)", change)
    assert a.endswith(" ms")
    assert b.endswith(" ms")
    assert why


def test_uncontrolled_verdicts_say_so(two):
    sequential = [dataclasses.replace(one, controlled=False) for one in two.comparisons]
    page = read_page(Material(bench=two.bench, comparisons=sequential))
    assert "better (uncontrolled)" in page.row("TTFT p50")[4]
    assert "Not controlled: " in page.text


def test_many_comparisons_begin_with_one_table_and_are_folded():
    bench, records = made(workloads=(("a", "c1"), ("a", "c8"), ("b", "c1"), ("c", "c1")), runs=6)
    page = read_page(material(bench, records))
    assert ["comparison", "workload", "load", "TTFT p50"] == page.rows[0][:4]
    assert page.rows[1][3].startswith("▲ -")
    assert 4 <= page.names.count("details")


def test_one_variant_has_figures_and_no_verdict():
    page = read_page(material(*made(variants=("base",), runs=3)))
    assert re.search(r"No verdict: .*\bone variant\.", page.text)
    assert re.fullmatch(r"\d+ ms \(\d+ to \d+ ms\)", page.row("TTFT p50")[1])


def test_a_bench_without_runs_is_a_page_too():
    bench = Bench(
        id="b",
        title="",
        tool="t",
        started_s=T0,
        ended_s=T0,
        variants=(),
        runs=(),
        workloads=(),
        workload_hash="",
        cut="no answer",
    )
    page = read_page(Material(bench=bench))
    assert ": no answer. " in page.text
    assert "pictures" not in page.sections
    assert "b1" not in report.markdown(Material(bench=bench))


def test_a_cut_run_is_kept_marked_and_left_out_of_medians():
    bench, records = made(cut=True)
    page = read_page(material(bench, records))
    assert ": stopped. " in page.text
    assert any(cell.startswith("6, 1 ") and cell.endswith(" left out") for cell in page.row("runs"))
    assert "cut: stopped" == page.row("12")[-1]
    only = derived.RunGroup(
        "w",
        "p",
        (Run(number=1, variant="a", workload="w", point="p", started_s=0, ended_s=1, seed=1, asked=9, ok=5, cut="x"),),
    )
    assert 1 == len(only.counted("a")), "a variant that has no other keeps it"


def test_what_was_not_measured_is_a_dash_and_never_0():
    bench, _ = made(runs=1)
    first, second = bench.runs
    bench = result.msgspec.structs.replace(bench, runs=(first, result.msgspec.structs.replace(second, figures={})))
    table = section(Material(bench=bench), "Figures of each variant")[0]
    assert derived.ABSENT == next(row for row in table.rows if row[0] == "TTFT p50")[2]
    assert {} == json.loads(report_data.as_json(Material(bench=bench)))["bench"]["runs"][1]["figures"]


def test_secrets_are_in_no_form(two):
    forms = (report.page(two), report.markdown(two), report_data.as_csv(two.bench), report_data.as_json(two))
    for text in forms:
        assert not re.search(r"sk-\d|hf-\d|me:pass", text)
    assert "http://h0:8000" in forms[1]
    assert ["--api-key", "(hidden) (hidden)", "(hidden) (hidden)"] == read_page(two).row("--api-key")


def test_variant_differences_stand_out(two):
    """Differences between variants stand out and what is alike is folded."""
    facts, differing, alike = section(two, "Variants")
    assert [("--seed", "0", "1"), ("cache: enable_prefix_caching", "False", "True")] == [
        (row[0], *(cell.text for cell in row[1:])) for row in differing.rows
    ]
    assert {"differs"} == {cell.mark for row in differing.rows for cell in row[1:]}
    assert ("cache: block_size", "16", "16") in alike.rows
    assert alike.folded
    assert "what" == facts.rows[0][0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(("serve", "m", "--a", "1", "--b=2", "--c", "--d"), {"--a": "1", "--b": "2", "--c": "set", "--d": "set"}),
     (("--names", "x", "y"), {"--names": "x y"}), ((), {})],
)  # fmt: skip
def test_options_are_read_as_they_were_written(arguments, expected):
    assert expected == derived.flags(arguments)


def test_the_hit_ratio_stands_beside_what_was_expected(two):
    off, on = section(two, "Cache hits against expectation")[0].rows
    assert ("0 %", "70 to 95 %", True) == (off[3], off[4], off[5].text.endswith(" off"))
    assert ("80 %", "within the band") == (on[3], on[5].text)
    dots = next(one for one in charts.drawn(two)["groups"][0]["dots"] if one["title"] == "cache hits")
    assert [70, 95] == dots["band"]


def test_gpu_hour_is_compared_with_the_api(two):
    """3.6 an hour is 0.001 a second; an API bills 500 new and 1,500 cached prompt tokens for every 64 of output."""
    cost = derived.costs(two)[0]
    speed = cost.tokens_per_second
    assert 1 / speed == pytest.approx(cost.own)
    assert (0.5 * 0.001 + 1.5 * 0.0005) / 64 * 1000 + 0.004 == pytest.approx(cost.api_whole)
    assert 0.004 == cost.api_output
    assert 1 / cost.api_whole == pytest.approx(cost.even_at)


@pytest.mark.parametrize("missing", [{"prices": None}, {"gpus": None}, {"prices": Prices(gpu_hour=1.0), "gpus": 1}])
def test_without_prices_cards_or_an_api_nothing_is_made_up(two, missing):
    told = Material(bench=two.bench, records=two.records, **{"prices": PRICES, "gpus": 1} | missing)
    found = derived.costs(told)
    assert all(cost.api_output is None and cost.times is None for cost in found)
    assert bool(found) is bool(told.prices and told.gpus)


def test_starts_and_failures_are_told_by_kind_and_reason():
    told = material(*made(failing=0.2))
    assert ("off", "cold start", "90 s", "90") == section(told, "Starts")[0].rows[0]
    assert ("off", "warm restart", "42 s", "40, 44") == section(told, "Starts")[0].rows[1]
    failed = section(told, "Stability")[0].rows[0]
    assert "worse" == failed[3].mark
    assert failed[4].endswith(" timeout")


def test_checks_that_found_something_stand_open(two):
    one = compare_runs(
        [run for run in two.bench.runs if run.variant == "off"][:2],
        [run for run in two.bench.runs if run.variant == "on"],
    )
    wrong, fine = section(Material(bench=two.bench, comparisons=[one]), "Checks and caveats")
    assert {"warn"} == {row[2].mark for row in wrong.rows}
    assert fine.folded


def test_a_scaled_workload_says_so(two):
    bench = result.msgspec.structs.replace(two.bench, scale=0.25)
    assert 2 == read_page(Material(bench=bench)).text.count("scaled by 0.25"), "a fact, and a warning at the verdict"
    assert "scaled by" not in read_page(two).text


def test_the_definitions_are_pinned(two):
    page = read_page(two)
    assert "(end to end - TTFT) / (output tokens - 1)" in page.row("TPOT")[1]
    assert "token with content" in page.row("TTFT")[1]
    assert "not the request: " in page.text


# --- pictures


def test_distributions_runs_and_requests_are_drawn(two):
    drawn = charts.drawn(two)
    (group,) = drawn["groups"]
    assert ["TTFT", "TPOT", "end to end"] == [one["title"] for one in group["spread"]]
    curve = group["spread"][0]["curves"][0]
    assert 120 == curve["count"]
    assert len(drawn["shares"]) == len(curve["at"])
    assert sorted(curve["at"]) == curve["at"]
    assert list(range(1, 13)) == [dot["run"] for dot in group["dots"][0]["dots"]]
    assert 240 == sum(len(points["at"]) for points in drawn["time"]["points"])
    assert "" == drawn["time"]["note"]


def test_classes_of_requests_are_groups_of_their_own():
    told = material(*made(kinds=("short", "long")))
    assert ["shared-prefix, c8", "shared-prefix, c8: long requests", "shared-prefix, c8: short requests"] == [
        group["title"] for group in charts.drawn(told)["groups"]
    ]
    long = charts.drawn(told)["groups"][1]
    assert 60 == long["spread"][0]["curves"][0]["count"]
    assert "TTFT p50" == long["dots"][0]["title"]


def test_twenty_thousand_requests_are_thinned_and_counted():
    told = material(*made(requests=1700, failing=0.05))
    time = charts.drawn(told)["time"]
    shown, whole = re.match(r"([\d,]+) of ([\d,]+) answers .*\b7 ", time["note"]).groups()
    assert shown == f"{sum(len(points['at']) for points in time['points']):,}"
    assert whole == f"{sum(run.ok for run in told.bench.runs):,}"
    failed = sum(run.asked - run.ok for run in told.bench.runs)
    assert re.search(rf"\b[\d,]+ of {failed:,} failed requests", time["note"])
    slowest = max(record.ttft_ms for record in told.records if record.ttft_ms)
    assert float(f"{slowest:.5g}") == max(max(points["value"]) for points in time["points"])
    assert len(report.page(told)) < 6e6


def test_events_are_regions_points_and_rows(two):
    events = (
        TuningEvent(
            id="a",
            at_s=T0 + 9,
            kind="change",
            what="caching on",
            diff={"--x": (None, "1")},
            before=TimeWindow(T0, T0 + 8),
        ),
        TuningEvent(id="b", at_s=T0 + 20, kind="note", what="a region", open=True),
        TuningEvent(id="b", at_s=T0 + 20, end_s=T0 + 25, kind="note", what="a region"),
        TuningEvent(id="c", at_s=T0 - 9999, kind="note", what="long before"),
    )
    told = Material(bench=two.bench, events=events)
    first, second = charts.drawn(told)["time"]["events"]
    assert ("E1", [[T0 * 1000, (T0 + 8) * 1000]], None) == (first["name"], first["windows"], first["end"])
    assert (T0 + 25) * 1000 == second["end"]
    rows = section(told, "Over time")[0].rows
    assert "--x: not set → 1" == rows[0][4]
    assert 2 == len(rows)


# --- latency against throughput


def loads(slo: dict[str, float] | None = None, **more: Any) -> Material:
    """A bench of three loads; its times are those of `made`, about 200 ms to the first token and half with `on`."""
    bench, records = made(runs=1, workloads=tuple(("short", point) for point in ("c1", "c4", "c16")), **more)
    return Material(
        bench=result.msgspec.structs.replace(bench, slo={"ttft_ms": 400.0} if slo is None else slo), records=records
    )


def texts(told: Material, title: str = "Latency against throughput") -> list[str]:
    return [
        block.text
        for one in report_sections.sections(told)
        if one.title == title
        for block in one.blocks
        if isinstance(block, report_blocks.Text)
    ]


def with_p95(told: Material, **of_load: float) -> Material:
    """With other p95s of the time to the first token."""
    runs = [
        result.msgspec.structs.replace(run, figures={**run.figures, "ttft_ms.p95": of_load[run.point]})
        for run in told.bench.runs
    ]
    return Material(bench=result.msgspec.structs.replace(told.bench, runs=tuple(runs)))


def test_the_last_load_within_the_slo_is_named_and_ringed():
    told = with_p95(loads(variants=("base",)), c1=100.0, c4=390.0, c16=900.0)
    (sentence,) = texts(told)
    assert re.fullmatch(
        r"base, short \(at once\): .* c4 .* \d+ output tokens/s; c16 .* TTFT p95 900 ms, .* 400 ms\.", sentence
    )
    (group,) = charts.drawn(told)["curves"]
    ttft, tpot, _ = group["charts"]
    assert ("TTFT p95", 400.0, None) == (ttft["title"], ttft["slo"], tpot["slo"])
    (line,) = ttft["lines"]
    assert (["c1", "c4", "c16"], [100.0, 390.0, 900.0], [False, False, True], 1) == (
        line["load"],
        line["latency"],
        line["beyond"],
        line["last"],
    )
    page = read_page(told)
    assert "✓ within, the last" == page.row("short, c4")[-1]
    assert "✗ beyond" == page.row("short, c16")[-1]
    assert "latency-against-throughput" in page.sections
    assert "✗ beyond" in report.markdown(told)
    (curve,) = json.loads(report_data.as_json(told))["derived"]["curves"]
    assert ("c4", ["within", "within", "beyond"]) == (curve["last_within"], [each["slo"] for each in curve["points"]])


def test_a_limit_that_is_not_reached_or_never_kept_is_reported():
    told = loads(variants=("base",))
    (all_within,) = texts(with_p95(told, c1=1.0, c4=1.0, c16=1.0))
    assert re.search(" up to c16 .*not reached", all_within)
    (none,) = texts(with_p95(told, c1=401.0, c4=402.0, c16=403.0))
    assert re.search("no load .*; c1 .* TTFT p95 401 ms", none)
    first, again = texts(with_p95(told, c1=1.0, c4=401.0, c16=399.0))
    assert re.search(" c1 .*; c4 .* TTFT p95 401 ms", first)
    assert re.search(": c16 .* again ", again)


def test_without_an_slo_loads_are_drawn_only():
    told = loads({}, variants=("base",))
    (sentence,) = texts(told)
    assert re.match("No SLO .*--limit ttft_ms=500", sentence)
    (group,) = charts.drawn(told)["curves"]
    assert {None} == {chart["slo"] for chart in group["charts"]} | {
        line["last"] for line in group["charts"][0]["lines"]
    }


def test_one_load_without_an_slo_is_no_curve():
    bench, _ = made(runs=1, variants=("base",))
    told = Material(bench=result.msgspec.structs.replace(bench, slo={}))
    assert [] == charts.drawn(told)["curves"]
    assert [] == texts(told)


def test_variants_are_lines_of_one_chart():
    (group,) = charts.drawn(loads())["curves"]
    assert [0, 1] == [line["variant"] for line in group["charts"][0]["lines"]]


def test_an_slo_that_was_not_measured_is_said():
    (sentence,) = texts(loads({"e2e_ms": 1.0, "ttft_ms": 1e6}, variants=("base",)))
    assert re.search("no load .*; c1 .* end to end p95 ", sentence)
    told = loads({"tpot_ms": 100.0}, variants=("base",))
    runs = [
        result.msgspec.structs.replace(
            run, figures={name: value for name, value in run.figures.items() if not name.startswith("tpot")}
        )
        for run in told.bench.runs
    ]
    (sentence,) = texts(Material(bench=result.msgspec.structs.replace(told.bench, runs=tuple(runs))))
    assert sentence.endswith("TPOT p95 of c1 was not measured.")


def test_limits_of_the_command_replace_those_of_the_bench(tmp_path):
    result.write(tmp_path, loads(variants=("base",)).bench)
    assert {"e2e_ms": 7.0} == report.gather(tmp_path, Slo(e2e_ms=7.0)).bench.slo
    assert {"ttft_ms": 400.0} == report.gather(tmp_path).bench.slo


# --- whoever wrote the names


def hostile() -> Material:
    bench, records = made(name=lambda text: HOSTILE + text, cut=True, workloads=(("w", "c1"), ("v", "c1")))
    event = TuningEvent(at_s=T0 + 5, kind="note", what=HOSTILE, who=HOSTILE, diff={HOSTILE: (HOSTILE, None)})
    return material(bench, records, events=(event,))


def test_foreign_text_stays_text_in_the_page(two):
    lab = lab_rows(hostile(), stated={"Security": (True, HOSTILE)})
    page, plain = read_page(hostile(), lab), read_page(two)
    assert plain.names.count("script") == page.names.count("script")
    assert 0 == page.names.count("img")
    assert HOSTILE in page.text


def test_foreign_text_stays_text_in_markdown():
    text = report.markdown(hostile(), lab_rows(hostile()))
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert not re.search(r"<(script|img|a)\b", shown)
    assert "<table>" in shown


@given(st.text(max_size=40))
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_any_name_is_one_cell_of_markdown(name):
    macros: Any = templates.markdown("stack.tuning").get_template("report.md").module
    table = report_blocks.Table(("x", "y"), ((report_blocks.Cell(name, "better"), name),))
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(macros.content(table))
    assert 2 == shown.count("<td>")
    assert not re.search(r"<(?!/?(table|thead|tbody|tr|th|td|strong)\b)", shown)


def test_a_fence_in_a_workload_does_not_end_its_block(two):
    bench = result.msgspec.structs.replace(two.bench, workloads=({"name": "w", "about": "```\n# out\n````"},))
    shown = MarkdownIt("commonmark").render(report.markdown(Material(bench=bench)))
    assert "<h1>out" not in shown


def test_markdown_fits_a_comment():
    bench, records = made(workloads=tuple((f"w{n}", "c1") for n in range(40)), requests=3)
    text = report.markdown(material(bench, records))
    assert len(text) < 65_536
    assert re.search(r"^Left out, .*: Verdict, .*\bRuns\.", text, re.M)


FINITE = st.floats(-1e9, 1e9, allow_nan=False)
FIGURES = st.dictionaries(
    st.sampled_from(["ttft_ms.p50", "short:ttft_ms.p95", "hit_ratio", "qps", "unheard_of", "a:b:c.d"]),
    FINITE,
    max_size=4,
)
RUN = st.builds(
    lambda variant, point, figures, cut, ok, failed: Run(
        number=1, variant=variant, workload="w", point=point, started_s=T0, ended_s=T0 + 1, seed=0, asked=9, ok=ok,
        failed=failed, figures=figures, cut=cut
    ),
    st.sampled_from("abc"), st.sampled_from(["c1", "r2.5"]), FIGURES, st.none() | st.just("stopped"),
    st.integers(0, 200),
    st.dictionaries(st.sampled_from(["timeout", "http_429", "stopped", "odd"]), st.integers(0, 9)),
)  # fmt: skip


@given(st.lists(RUN, max_size=6), st.integers(0, 3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_any_bench_can_be_told(runs, variants):
    told = Material(
        bench=Bench(
            id="b",
            title="t",
            tool="t",
            started_s=T0,
            ended_s=T0 + 9,
            workloads=({"name": "w", "expected_hit": (0.1, 0.2)},),
            workload_hash="h",
            variants=tuple(
                BenchVariant(name=name, engine=BenchEngine(url="http://x", model="m")) for name in "abc"[:variants]
            ),
            runs=tuple(result.msgspec.structs.replace(run, number=n) for n, run in enumerate(runs)),
        ),
        prices=PRICES,
        gpus=2,
    )
    assert report_sections.sections(told)
    assert report.markdown(told)
    assert len(runs) == len({row["run"] for row in csv.DictReader(io.StringIO(report_data.as_csv(told.bench)))})
    assert json.loads(report_data.as_json(told))
    json.dumps(charts.drawn(told), allow_nan=False)
    assert 7 == len(lab_rows(told))


# --- CSV and JSON


def test_csv_gives_every_figure_back(two):
    rows = list(csv.DictReader(io.StringIO(report_data.as_csv(two.bench))))
    back = {(int(row["run"]), row["figure"]): float(row["value"]) for row in rows}
    assert {(run.number, name): value for run in two.bench.runs for name, value in run.figures.items()} == back
    assert "2026-09-21T14:13:20.000Z" == rows[0]["started"]
    assert {"off", "on"} == {row["arm"] for row in rows}
    assert {"ms"} == {row["unit"] for row in rows if row["figure"] == "ttft_ms.p50"}


def test_json_gives_the_bench_and_the_verdicts_back(two):
    told = json.loads(report_data.as_json(two))
    assert two.bench == result.msgspec.convert(told["bench"], Bench)
    assert "better" == told["judgements"][0]["findings"][0]["verdict"]
    assert ["off", "on"] == list(told["derived"]["figures"][0]["medians"])
    assert {"--seed": ["0", "1"], "cache: enable_prefix_caching": ["False", "True"]} == told["derived"]["differences"]


# --- at the edge


def test_four_files_are_written_from_a_folder(tmp_path):
    bench, records = made(runs=1)
    result.write(tmp_path, bench)
    result.add_requests(tmp_path, records)
    told = report.gather(tmp_path)
    assert len(records) == sum(map(len, told.of_run.values()))
    paths = report.write(told, tmp_path / "out.v2.html")
    assert ["out.v2.html", "out.v2.md", "out.v2.csv", "out.v2.json"] == [path.name for path in paths]
    assert {*paths} < {*tmp_path.iterdir()}
    assert paths[0].read_text().startswith("<!doctype html>")


def test_a_folder_without_requests_still_has_figures(tmp_path):
    result.write(tmp_path, made(runs=1)[0])
    assert {} == report.gather(tmp_path).of_run


def test_a_broken_folder_is_named(tmp_path):
    with pytest.raises(BadBench, match="holds no bench"):
        report.gather(tmp_path)
    result.write(tmp_path, made(runs=1)[0])
    (tmp_path / result.REQUESTS).write_text("nonsense\n")
    with pytest.raises(BadBench, match=r"/requests\.jsonl "):
        report.gather(tmp_path)


# --- the lab's rows


def states(told: Material, **more) -> dict[str, str]:
    return {row.item: row.state for row in lab_rows(told, **more)}


def evidence(told: Material, item: str, **more) -> str:
    return next(row.evidence for row in lab_rows(told, **more) if row.item == item)


def test_without_a_bench_nothing_passes():
    bench = Bench(
        id="b", title="", tool="t", started_s=T0, ended_s=T0, variants=(), runs=(), workloads=(), workload_hash=""
    )
    assert dict.fromkeys(CRITERIA, "not measured") == states(Material(bench=bench))


def test_shown_items_pass_and_others_are_not_measured(two):
    """What a bench and prices show passes and what they cannot show is not measured."""
    told = states(two)
    assert {"Security": "not measured", "Admission control": "not measured"} == {
        item: state for item, state in told.items() if state != "pass"
    }
    assert "off cold 90 s; off warm 40 s, 44 s" in evidence(two, "Model loading")


def test_one_start_alone_is_no_record_of_both(two):
    variant = result.msgspec.structs.replace(two.bench.variants[0], starts=(Start("cold", 90.0),))
    bench = result.msgspec.structs.replace(two.bench, variants=(variant,))
    assert "fail" == states(Material(bench=bench))["Model loading"]
    assert "no warm start" in evidence(Material(bench=bench), "Model loading")


def runs_of(*each: tuple[str, int, dict[str, int]]) -> Material:
    variants = tuple(
        BenchVariant(name=name, engine=BenchEngine(url="http://x", model="m"))
        for name in dict.fromkeys(name for name, _, _ in each)
    )
    runs = tuple(
        Run(
            number=n,
            variant=variant,
            workload="w",
            point="c1",
            started_s=T0,
            ended_s=T0 + 1,
            seed=0,
            asked=ok + sum(failed.values()),
            ok=ok,
            failed=failed,
        )
        for n, (variant, ok, failed) in enumerate(each)
    )
    return Material(
        bench=Bench(
            id="b",
            title="",
            tool="t",
            started_s=T0,
            ended_s=T0,
            variants=variants,
            runs=runs,
            workloads=(),
            workload_hash="",
        )
    )


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ((("a", 98, {"timeout": 2}),), "pass"),
        ((("a", 97, {"timeout": 2, "engine_error": 1}),), "fail"),
        ((("a", 99, {}),), "not measured"),
        ((("a", 90, {"timeout": 9}),), "not measured"),
        ((("a", 100, {"http_429": 50, "queue_full": 7, "stopped": 8}),), "pass"),
        ((("a", 60, {}), ("b", 60, {"timeout": 1})), "pass"),
        ((("a", 1000, {}), ("b", 190, {"timeout": 10})), "fail"),
    ],
)
def test_stability_is_two_failures_of_a_hundred(each, expected):
    """Refusals and what was stopped with the bench are no failures; a variant cannot hide behind another."""
    told = runs_of(*each)
    assert expected == states(told)["Stability"]
    assert (expected == "not measured") is ("at least 100 requests" in evidence(told, "Stability"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "pass"),
        ({"route": "/v1/completions"}, "not measured"),
        ({"outcome": "upstream_error", "finish_reason": None}, "fail"),
    ],
)
def test_a_chat_call_that_ended_well_shows_compatibility(two, change, expected):
    records = [result.msgspec.structs.replace(record, **change) for record in two.records]
    assert expected == states(Material(bench=two.bench, records=records))["API compatibility"]


@pytest.mark.parametrize(
    ("lacks", "told"), [("model", "model"), ("completion_tokens", "tokens"), ("request_id", "request_id")]
)
def test_a_record_that_lacks_something_fails_observability(two, lacks, told):
    records = [
        *two.records[1:],
        result.msgspec.structs.replace(two.records[0], **{lacks: "" if lacks == "request_id" else None}),
    ]
    assert "fail" == states(Material(bench=two.bench, records=records))["Observability"]
    assert f"1 of 240 records lack {told}" == evidence(Material(bench=two.bench, records=records), "Observability")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prices": None}, "no prices"),
        ({"gpus": None}, "number of GPUs"),
        ({"prices": Prices(gpu_hour=1.0)}, "no API price"),
    ],
)
def test_a_cost_without_both_sides_is_not_measured(two, given, why):
    told = Material(bench=two.bench, records=two.records, **{"prices": PRICES, "gpus": 1} | given)
    assert "not measured" == states(told)["Cost"]
    assert why in evidence(told, "Cost")


def refused(team: str | None, at_s: float, reason: str | None = "team_limit") -> RequestRecord:
    return RequestRecord(request_id="r", ts=timestamp(at_s), team=team, outcome="rejected", reason=reason, status=429)


def answered(team: str, at_s: float) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        ts=timestamp(at_s),
        team=team,
        outcome="ok",
        model="m",
        prompt_tokens=1,
        completion_tokens=1,
        e2e_ms=1.0,
    )


POLICY = Policy(teams={"a": Team(max_running=2), "b": Team()})


@pytest.mark.parametrize(
    ("log", "policy", "expected"),
    [
        ((), None, "not measured"),
        ((), POLICY, "not measured"),
        ((refused("a", T0),), None, "not measured"),
        ((refused("a", T0),), POLICY, "pass"),
        ((refused("a", T0), answered("b", T0 + 1)), None, "pass"),
        ((refused("a", T0), answered("a", T0 + 1)), None, "not measured"),
        ((refused("a", T0), answered("b", T0 + 900)), None, "not measured"),
        ((refused("a", T0, None),), POLICY, "fail"),
        ((refused(None, T0),), POLICY, "fail"),
    ],
)
def test_admission_needs_a_logged_rejection(two, log, policy, expected):
    """Admission needs a logged refusal and teams that are held apart."""
    assert expected == states(two, log=log, policy=policy)["Admission control"]


def test_statements_count_only_without_measurement(two):
    """What is stated counts only where nothing was measured and needs evidence."""
    stated = {"Security": (True, "egress blocked"), "Stability": (False, "I saw it fall over")}
    told = states(two, stated=stated)
    assert ("pass", "pass") == (told["Security"], told["Stability"])
    assert "stated: egress blocked" == evidence(two, "Security", stated=stated)
    with pytest.raises(ValueError, match=r"^Security: .*evidence"):
        lab_rows(two, stated={"Security": (True, " ")})
    with pytest.raises(ValueError, match=r"'Safety'; .* Security"):
        lab_rows(two, stated={"Safety": (True, "x")})


# --- in a real Chromium


@pytest.fixture
def opened(new_tab, tmp_path):
    """Opens a report from the disk without a network."""
    page = new_tab(viewport={"width": 1400, "height": 1000}, offline=True, timezone_id="Europe/Berlin").page

    def show(told: Material):
        file = tmp_path / "report.html"
        report.write(told, file, lab_rows(told))
        page.goto(file.as_uri())
        return page

    return show


@pytest.mark.chromium
class TestInChromium:
    def test_the_page_shows_the_verdict_and_draws_at_every_width(self, opened):
        variants = ("base", "chunked-prefill-2048", "speculative")
        page = opened(
            material(
                *made(variants=variants, failing=0.01), events=(TuningEvent(at_s=T0, kind="note", what="x" * 300),)
            )
        )
        expect(page.locator("#verdict tbody tr", has_text="TTFT p50")).to_have_count(2)
        expect(page.locator("#verdict .mark.better").first).to_be_visible()
        expect(page.locator("#pictures .js-plotly-plot")).to_have_count(9)
        expect(page.locator("#pictures .small path.js-line")).to_have_count(9)
        expect(page.locator("#over-time .js-plotly-plot path.point").first).to_be_attached()
        fits = "document.documentElement.scrollWidth <= innerWidth"
        for width in (1400, 800, 390):
            page.set_viewport_size({"width": width, "height": 900})
            eventually(lambda: page.evaluate(fits), f"a resized page, drawn anew {width} px wide")

    def test_other_workloads_and_hostile_names(self, opened):
        """Another workload is one choice away and hostile names are only text."""
        page = opened(hostile())
        expect(page.locator("h1")).to_have_text(f"{HOSTILE}Prefix caching")
        page.get_by_label("workload and load").select_option(index=1)
        expect(page.locator("#pictures figcaption").first).to_have_text("TTFT")
        expect(page.locator("#over-time .js-plotly-plot")).to_have_count(1)
        page.locator("#pictures .small path.point").first.hover(force=True)
        expect(page.locator(".hoverlayer").filter(has_text="onerror")).to_have_count(1)
        assert 0 == page.locator("img").count()

    def test_a_bench_without_anything_opens(self, opened):
        bench = Bench(
            id="b",
            title="none",
            tool="t",
            started_s=T0,
            ended_s=T0,
            variants=(),
            runs=(),
            workloads=(),
            workload_hash="",
        )
        expect(opened(Material(bench=bench)).locator("h1")).to_have_text("none")
