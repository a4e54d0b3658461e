"""`vllm-watch alerts derive`: numbers from what was recorded, each with its reason, and none where the evidence is
thin."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alerts import derive, derived_text, slo, thresholds
from alerts.derive import HEADROOM, MISSED, BenchLoad, LatencyTarget, LatencyTargets, knee, on_bound, onset
from alerts.recorded_use import LEAST_STEPS, RecordedUse
from alerts.settings import DEFAULTS, Overrides, Settings
from exporters.catalogue import bounds, vllm
from stack import cli, config
from stack.bench.load_curve import load_curves
from stack.bench.result import Bench, BenchEngine, BenchVariant, Run, write

# more than queue_time_p95
PATIENT = LatencyTargets(LatencyTarget(10.0, "the worksheet"), LatencyTarget(0.1, "the objectives"))
AIMS = LatencyTargets(LatencyTarget(2.5, "the objectives"), LatencyTarget(0.1, "the objectives"))
ENGINE = ("", "", "vllm", "vllm-0:8000", "chat")
CORE, MODEL = (*ENGINE, "0"), ("", "chat")
TTFT, INTER_TOKEN = thresholds.TTFT_P95.name, thresholds.INTER_TOKEN_P95.name


def load(at: float, throughput: float, ttft_s: float, tpot_s: float | None = 0.02) -> BenchLoad:
    return BenchLoad(at, f"c{at:g}", throughput, ttft_s, tpot_s)


def course(*values: float) -> dict[float, float]:
    return {60.0 * step: value for step, value in enumerate(values)}


def asked(**more: Any) -> RecordedUse:
    known = {"bounds": {TTFT: bounds.TTFT_S, INTER_TOKEN: bounds.INTER_TOKEN_S}}
    return RecordedUse("http://prometheus:9090", 0.0, 86_400.0, 60.0, **(known | more))


def derived(
    found: RecordedUse,
    settings: Settings = DEFAULTS,
    aims: LatencyTargets = AIMS,
    bench: Mapping[str, Sequence[BenchLoad]] | None = None,
) -> dict[str, Any]:
    return {each.before.name: each for each in derive.derive(found, settings, aims, bench)}


# ---- the knee

SATURATES = [
    load(1, 10, 0.1),
    load(2, 20, 0.1),
    load(4, 38, 0.12),
    load(8, 70, 0.2),
    load(16, 75, 0.9),
    load(32, 74, 2.2),
]


def test_the_knee_is_where_throughput_stops_and_waiting_begins():
    assert SATURATES[3] == knee(SATURATES)
    assert SATURATES[3] == knee(reversed(SATURATES)), "the order of the file says nothing"


def test_a_real_engine_of_four_places_is_full_with_four():
    """vLLM 0.32 with --max-num-seqs 4, two runs of each load: runs differ by a tenth, and so do 4 and 8 at once; who
    waits is told by TTFT."""
    seen = (
        (1, 73.7, 0.044),
        (2, 127.1, 0.073),
        (4, 187.6, 0.139),
        (8, 210.7, 0.671),
        (16, 195.2, 1.613),
        (32, 176.4, 3.809),
    )
    found = knee([load(*each) for each in seen])
    assert isinstance(found, BenchLoad)
    assert 4 == found.at


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "0 loads.* 4$"),
        (SATURATES[2:5], "3 loads.* 4$"),
        (SATURATES[:4], r"highest load \(c8\)"),
        ([load(8, 70, 0.5), *SATURATES[4:], load(64, 73, 5.0)], r"lowest load \(c8\)"),
        ([replace(each, ttft_s=0.1) for each in SATURATES], r"at c8 .*TTFT"),
    ],
)
def test_a_bench_without_a_knee_says_why(points, reason):
    why = knee(points)
    assert isinstance(why, str)
    assert re.search(reason, why)


@st.composite
def benches(draw: Any) -> tuple[float, list[BenchLoad]]:
    """Closed loops whose throughput grows with their load up to a bound, and where it is reached; each figure off by 3
    % at most."""
    full_at = draw(st.floats(3, 40))
    noise = st.floats(0.97, 1.03)
    points = []
    for at in (1, 2, 4, 8, 16, 32, 64, 128):
        waits = 0.1 * max(1.0, at / full_at)
        points.append(load(at, 50 * min(at, full_at) / full_at * draw(noise), waits * draw(noise)))
    return full_at, points


@given(benches(), st.floats(0.01, 1000), st.randoms())
def test_noise_moves_the_knee_by_one_load(made, times, rng):
    """Noise moves the knee by one load at most and units not at all."""
    full_at, points = made
    found = knee(points)
    assert isinstance(found, BenchLoad)
    assert 0.74 * full_at <= found.at <= 2 * full_at, "the first load at which it is full, or nearly"
    assert found.throughput >= 0.8 * max(point.throughput for point in points)
    shuffled = rng.sample(points, len(points))
    assert found.at == knee([replace(each, throughput=each.throughput * times) for each in shuffled]).at  # type: ignore[union-attr]


@given(st.lists(st.floats(0.98, 1.02), min_size=5, max_size=5))
def test_an_engine_that_was_never_full_has_no_knee(noise):
    assert isinstance(knee([load(2**n, 2**n * off, 0.1) for n, off in enumerate(noise)]), str)


# ---- the onset


@settings(max_examples=40)
@given(st.floats(0.6, 0.8), st.lists(st.floats(0, 1), min_size=60, max_size=120), st.data())
def test_preemptions_begin_despite_a_late_scrape(begins, usages, data):
    """Steps whose cache was full between two scrapes look emptier than they were; as few as one in twenty change
    nothing."""
    steps = [(usage, usage >= begins) for usage in usages]
    full = sum(was for _, was in steps)
    assume(full >= 20)
    missed = data.draw(st.lists(st.floats(0.1, 0.5), max_size=math.floor(MISSED * full)))
    found = onset([*steps, *((low, True) for low in missed)])
    assert found is not None
    assert (
        begins
        <= found.usage
        <= sorted(usage for usage in usages if usage >= begins)[math.floor(MISSED * (full + len(missed)))]
    )
    assert found == onset([*steps, *((low, True) for low in missed), *((usage, False) for usage in usages)]), (
        "what is well says nothing of it"
    )


def test_two_steps_with_preemptions_are_a_burst():
    assert onset([(0.9, True), (0.95, True), (0.99, False)]) is None


# ---- bounds


@given(st.floats(0.001, 3000), st.sampled_from([bounds.TTFT_S, bounds.INTER_TOKEN_S, ()]))
def test_a_number_goes_to_a_bound_that_is_near_and_else_stays(value, of):
    found, exact = on_bound(value, of)
    assert exact == (found in of) or found == float(f"{value:.2g}")
    if exact:
        assert 1 / 1.2501 <= found / value <= 1.2501
    else:
        assert found == pytest.approx(value, rel=0.06)


# ---- each number


def test_queue_is_bound_by_service_within_time():
    """Four a second while anybody waits, and half of that at other times, which is no measure: twenty within five
    seconds."""
    found = asked(
        queued={ENGINE: course(*[3.0] * 20, *[0.0] * 20)}, drained={ENGINE: course(*[4.05] * 20, *[2.0] * 20)}
    )
    got = derived(found, aims=PATIENT)["queue_length"]
    assert 20 == got.value
    assert "finished 4.05 a second" in got.why
    assert "looser than 10 requests" in got.why
    own = Settings(Overrides(thresholds={"queue_time_p95": 2.0}))
    assert 8 == derived(found, own)["queue_length"].value


def test_derived_queue_is_never_above_the_default():
    """A queue is never longer than the default where who waits has missed the target."""
    found = asked(queued={ENGINE: course(*[3.0] * 20)}, drained={ENGINE: course(*[4.05] * 20)})
    got = derived(found)["queue_length"]
    assert got.value is None
    assert "drains 20." in got.why
    assert "2.5 s (the objectives)" in got.why
    assert (
        5
        == derived(replace(found, drained={ENGINE: course(*[1.0] * 200)}, queued={ENGINE: course(*[3.0] * 200)}))[
            "queue_length"
        ].value
    )


def test_a_short_queue_is_a_queue_and_tells_too_little():
    """Two steps in which 24 and more waited are no reason to say that no queue lasted."""
    found = asked(queued={ENGINE: course(*[0.0] * 38, 24.0, 29.0)}, drained={ENGINE: course(*[6.6] * 40)})
    got = derived(found, aims=PATIENT)["queue_length"]
    assert (None, ["2", "12"]) == (got.value, re.findall(r"\d+", got.why))
    assert "A queue lasted" in got.why


def test_young_prometheus_names_the_fitting_window():
    """Twelve minutes of a week are three steps."""
    week = 7 * 86_400.0
    drained = {ENGINE: {week - 700.0 + 300.0 * step: 6.0 for step in range(3)}}
    young = RecordedUse("http://prometheus:9090", 0.0, week, 300.0, drained=drained)
    got = derived(young)["queue_length"]
    assert ["3", "12", "12 min", "5 min"] == re.findall(r"\d+(?: min)?", got.why.partition("--window")[0])
    assert "--window 12m " in got.why
    few = derived(asked(drained={ENGINE: course(*[0.01] * 40)}))["queue_length"]
    assert few.why.endswith("fewer than 100.")


def test_an_engine_that_drains_less_than_one_request_says_so():
    """0.15 a second within five seconds is 0.75 of a request."""
    found = asked(queued={ENGINE: course(*[3.0] * 40)}, drained={ENGINE: course(*[0.15] * 40)})
    got = derived(found)["queue_length"]
    assert 1 == got.value
    assert "not even one" in got.why


def test_the_slowest_engine_decides_for_all():
    other = (*ENGINE[:3], "vllm-1:8000", "chat")
    waits = course(*[3.0] * 20)
    found = asked(
        queued={ENGINE: waits, other: waits}, drained={ENGINE: course(*[4.0] * 20), other: course(*[1.0] * 20)}
    )
    got = derived(found)["queue_length"]
    assert 5 == got.value
    assert "chat on vllm-1:8000" in got.why


def test_engine_without_a_queue_is_a_floor():
    """An engine that never had a queue is a floor and never stricter than the default."""
    quick, slow = (
        asked(queued={ENGINE: course(*[0.0] * 40)}, drained={ENGINE: course(*[rate] * 40)}) for rate in (6.0, 0.5)
    )
    assert 30 == derived(quick, aims=PATIENT)["queue_length"].value
    assert derived(slow)["queue_length"].value is None
    assert "no measure" in derived(slow)["queue_length"].why


def test_the_cache_alerts_before_preemptions_begin():
    usage = [0.5, 0.7, 0.8, 0.9] * 10 + [0.93, 0.95, 0.97] * 10
    preempted = [0.0] * 40 + [2.0] * 30
    got = derived(asked(usage={CORE: course(*usage)}, preempted={CORE: course(*preempted)}))["kv_cache_usage"]
    assert pytest.approx(0.93 - HEADROOM) == got.value
    assert {"onset": 0.93, "steps_with_preemptions": 30.0} == got.evidence
    assert "30 steps of 1 min, from 93% " in got.why


def test_a_forecast_is_never_above_the_finding():
    full = asked(usage={CORE: course(*[1.0] * 40)}, preempted={CORE: course(*[1.0] * 40)})
    assert 0.95 == derived(full)["kv_cache_usage"].value == thresholds.KV_CACHE_FULL.value


def test_high_use_without_preemptions_is_no_reason():
    """Without preemptions what was reached often is no reason to tell anyone."""
    usage = [0.4] * 40 + [0.93] * LEAST_STEPS + [0.99]
    got = derived(asked(usage={CORE: course(*usage)}))["kv_cache_usage"]
    assert 0.93 == got.value
    assert "looser than 90 %" in got.why


BENCH = {"short-short (at once)": SATURATES}


def test_the_first_token_is_late_beyond_the_knee():
    got = derived(asked(), bench=BENCH)
    assert (0.25, 0.025) == (got[TTFT].value, got[INTER_TOKEN].value)
    assert "c8 of short-short (at once)" in got[TTFT].why
    assert {"knee_load": 8.0, "knee_s": 0.2} == got[TTFT].evidence


def test_live_traffic_that_needs_longer_is_not_told_of_all_day():
    """Its prompts are longer than the bench's: 24 steps of 25 keep to 0.8 s."""
    live = {TTFT: {MODEL: course(*[0.8] * 96, *[4.0] * 4)}}
    busy, idle = ({TTFT: {MODEL: course(*[count] * 100)}} for count in (50.0, 3.0))
    assert 0.75 == derived(asked(p95=live, observed=busy), bench=BENCH)[TTFT].value
    assert 0.25 == derived(asked(p95=live, observed=idle), bench=BENCH)[TTFT].value, "a handful of requests has no p95"


def test_no_latency_is_looser_than_its_target():
    slow = {"long (at once)": [replace(each, ttft_s=40 * each.ttft_s, tpot_s=0.3) for each in SATURATES]}
    got = derived(asked(), bench=slow)
    assert (2.5, None, 0.1) == (got[TTFT].threshold.value, got[TTFT].value, got[INTER_TOKEN].threshold.value), (
        "2.5 s as before is nothing new"
    )
    assert {"knee_load": 8.0, "knee_s": 8.0} == got[TTFT].evidence
    assert got[TTFT].why.startswith("2.5 s (the objectives) ")
    assert "c8 of long (at once)" in got[TTFT].why
    assert "breaks the target" in got[TTFT].why
    own = derived(asked(), aims=derive.targets(slo.default_objectives(), 0.8), bench=None)
    assert 0.75 == own[TTFT].value, "a target of 0.8 s is missed long before 2.5 s are, bench or none"
    assert "The target is 0.8 s (the worksheet)" in own[TTFT].why
    half = derived(asked(), aims=derive.targets(slo.default_objectives(), 0.8), bench=slow)
    assert "0.1 s (the objectives) " in half[INTER_TOKEN].why, "the worksheet says nothing of it"
    live = asked(p95={TTFT: {MODEL: course(*[51.9] * 13)}}, observed={TTFT: {MODEL: course(*[50.0] * 13)}})
    kept = derived(live, bench=BENCH)[TTFT]
    assert {"knee_load": 8.0, "knee_s": 0.2, "live_s": pytest.approx(51.9)} == kept.evidence
    assert "51.9 s only (in 95 % of 13 busy steps)" in kept.why
    assert not re.search("breaks the target|that counts", kept.why)


@pytest.mark.parametrize(
    ("found", "bench", "name", "why"),
    [
        ({}, None, "queue_length", "few requests: in 0 steps"),
        (
            {"drained": {ENGINE: course(*[4.0] * (LEAST_STEPS - 1))}},
            None,
            "queue_length",
            f"few requests: in {LEAST_STEPS - 1} steps",
        ),
        ({}, None, "kv_cache_usage", "in use in 0 steps"),
        ({"usage": {CORE: course(*[0.5] * 99)}}, None, "kv_cache_usage", "seldom fuller than 90 % (at most 50%)"),
        (
            {"usage": {CORE: course(*[0.5] * 99)}, "preempted": {CORE: course(1.0, 1.0)}},
            None,
            "kv_cache_usage",
            f"in 2 steps only; {derive.LEAST_PREEMPTED} would",
        ),
        (
            {"usage": {CORE: course(*[0.2] * 99)}, "preempted": {CORE: course(*[1.0] * 99)}},
            None,
            "kv_cache_usage",
            "look for priorities",
        ),
        ({}, None, TTFT, "No bench"),
        ({}, {}, TTFT, "no knee (no run"),
        ({}, {"short (at once)": SATURATES[:4]}, TTFT, "no knee (short (at once): throughput"),
        (
            {},
            {"short (at once)": [replace(each, tpot_s=None) for each in SATURATES]},
            INTER_TOKEN,
            "times between tokens",
        ),
    ],
)
def test_thin_evidence_keeps_the_default(found, bench, name, why):
    """Thin evidence keeps what is the default and says what was lacking."""
    got = derived(asked(**found), bench=bench)[name]
    assert got.value is None
    assert thresholds.named(name) == got.threshold
    assert why in got.why


# ---- a bench


def bench_of(points: Sequence[BenchLoad], variants: Sequence[str] = ("chat",), **more: Any) -> Bench:
    engine = BenchEngine(url="http://vllm-0:8000", model="chat")
    runs = [
        Run(
            number=number, variant=variant, workload="short", point=each.label, started_s=0.0, ended_s=1.0, seed=1,
            asked=20, ok=20,
            figures={"ttft_ms.p95": each.ttft_s * 1000 * off, "tpot_ms.p95": 20.0 * off,
                "tokens_per_second": each.throughput * off}, **more,
        )
        for number, (variant, each, off) in enumerate(
            (variant, each, off) for variant in variants for each in points for off in (0.9, 1.0, 1.3))
    ]  # fmt: skip
    return Bench(
        id="b",
        title="t",
        tool="x",
        started_s=0.0,
        ended_s=1.0,
        variants=tuple(BenchVariant(name=variant, engine=engine) for variant in variants),
        runs=tuple(runs),
        workloads=(),
        workload_hash="h",
    )


def test_load_is_the_median_of_its_runs():
    """A load is the median of its runs and one that broke off is none."""
    assert {"short (at once)": [pytest.approx(each.throughput) for each in SATURATES]} == {
        name: [each.throughput for each in found] for name, found in load_curves(bench_of(SATURATES)).items()
    }
    assert {} == load_curves(bench_of(SATURATES, cut="the engine died"))
    rates = load_curves(bench_of([replace(each, label=f"r{each.at / 2:g}") for each in SATURATES]))
    assert [0.5, 1, 2, 4, 8, 16] == [each.at for each in rates["short (per second)"]]


def test_which_of_two_variants_is_deployed_has_to_be_said():
    two = bench_of(SATURATES, ("old", "new"))
    with pytest.raises(ValueError, match=r"old, new: .*--variant"):
        load_curves(two)
    with pytest.raises(ValueError, match=r"other; .*old, new$"):
        load_curves(two, "other")
    assert 6 == len(load_curves(two, "new")["short (at once)"])


# ---- the file

WHOLE = {
    "queued": {ENGINE: course(*[3.0] * 20)}, "drained": {ENGINE: course(*[4.0] * 20)},
    "usage": {CORE: course(*[0.97] * 40)},
    "preempted": {CORE: course(*[1.0] * 40)},
}  # fmt: skip


def test_file_holds_thresholds_with_reasons():
    """The file holds each number with its reason and keeps what was given."""
    settings = Settings(Overrides(thresholds={"log_lag": 30.0, "queue_length": 7.0}, engine_job="llm-.*"))
    found = derive.derive(asked(**WHOLE), settings, PATIENT)
    text = derived_text.overlay(asked(**WHOLE), settings, found)
    read = config.parse(text, Overrides, "thresholds.yml")
    assert {"queue_length": 20.0, "kv_cache_usage": 0.92, "log_lag": 30.0} == dict(read.thresholds)
    assert "llm-.*" == read.engine_job
    assert "  # 20 requests; before: 7 requests. " in text
    assert "# ttft_p95 stays at 2.5 s: " in text
    unwrapped = re.sub(r"\s*\n\s*# ", " ", text)
    assert not [each.why for each in found if each.why not in unwrapped]
    assert all(len(line) <= 125 for line in text.splitlines()), "a comment is read in an editor"
    told = derived_text.as_json(asked(**WHOLE), found)
    assert {"queue_length": 20.0, "kv_cache_usage": 0.92} == told["thresholds"]
    assert {each.before.name: each.why for each in found} == {row["name"]: row["why"] for row in told["numbers"]}


def test_where_nothing_can_be_derived_the_file_changes_nothing():
    text = derived_text.overlay(asked(), DEFAULTS, derive.derive(asked(), DEFAULTS, AIMS))
    assert Overrides() == config.parse(text, Overrides, "thresholds.yml")


# ---- from Prometheus

HOURS, SCRAPE_S = 3, 15
RATE = 4.1  # requests a second while there is a queue; times 5 s it is far from a whole number


def history(end_s: int) -> Iterator[str]:
    """One engine: an hour of little to do, an hour with a queue, an hour in which it preempts from 96 % on; a TTFT of
    0.6 s, of all in its bucket."""
    labels = 'instance="vllm-0:8000",job="vllm",model_name="chat",engine="0"'
    ticks = range(0, HOURS * 3600 + 1, SCRAPE_S)

    def series(name: str, kind: str, more: str, value: Any, declared: str = "") -> Iterator[str]:
        if declared:
            yield f"# TYPE {declared} {kind}"
        for tick in ticks:
            yield f"{name}{{{labels}{more}}} {value(tick)!r} {end_s - HOURS * 3600 + tick}"

    def finished(tick: int) -> float:
        return 1.0 * min(tick, 3600) + RATE * max(0, tick - 3600)

    def usage(tick: int) -> float:
        return 0.3 if tick < 3600 else 0.85 if tick < 7200 else 0.96 + 0.02 * (tick // 600 % 2)

    yield from series(vllm.NUM_REQUESTS_RUNNING.name, "gauge", "", lambda tick: 4.0, vllm.NUM_REQUESTS_RUNNING.name)
    yield from series(
        vllm.NUM_REQUESTS_WAITING.name,
        "gauge",
        "",
        lambda tick: 0.0 if tick < 3600 else 6.0,
        vllm.NUM_REQUESTS_WAITING.name,
    )
    yield from series(vllm.KV_CACHE_USAGE.name, "gauge", "", usage, vllm.KV_CACHE_USAGE.name)
    for metric, more, value in (
        (vllm.REQUEST_SUCCESS, ',finished_reason="stop"', finished),
        (vllm.NUM_PREEMPTIONS, "", lambda tick: 0.5 * max(0, tick - 7200)),
    ):
        yield from series(metric.name, "counter", more, value, metric.name.removesuffix("_total"))
    for metric, of, at in (
        (vllm.TIME_TO_FIRST_TOKEN, bounds.TTFT_S, 0.6),
        (vllm.INTER_TOKEN_LATENCY, bounds.INTER_TOKEN_S, 0.06),
    ):
        yield f"# TYPE {metric.name} histogram"
        for bound in (*of, math.inf):
            le = "+Inf" if bound == math.inf else repr(bound)
            yield from series(f"{metric.name}_bucket", "", f',le="{le}"', finished if bound >= at else lambda tick: 0.0)
        yield from series(f"{metric.name}_count", "", "", finished)
        yield from series(f"{metric.name}_sum", "", "", lambda tick: 0.5 * finished(tick))
    yield "# EOF\n"


@pytest.fixture(scope="module")
def recorded(past, tmp_path_factory) -> str:
    page = tmp_path_factory.mktemp("derive") / "page.om"
    page.write_text("\n".join(history(int(time.time()))))
    return str(past(page))


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, ["alerts", *map(str, words)], catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.prometheus
def test_what_was_recorded_becomes_a_file_that_an_export_takes(recorded, part, tmp_path):
    write(tmp_path, bench_of(SATURATES))
    out = tmp_path / "thresholds.yml"
    command = ("derive", "--prometheus", recorded, "--window", "3h", "--bench", tmp_path, "--out", out)
    status, text = run(*command)
    assert 0 == status, text
    assert "queue_length stays at 10 requests" in text
    assert "chat on vllm-0:8000 finished 4.1 a second" in text
    numbers = dict(config.load(out, Overrides).thresholds)
    assert {"kv_cache_usage": 0.91, TTFT: 0.75, INTER_TOKEN: 0.075} == numbers
    assert 0 == run("export", "--out", tmp_path / "rules", "--thresholds", out)[0]
    done = subprocess.run(
        [part("promtool").path, "check", "rules", *(tmp_path / "rules").glob("*.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "> 0.91" in " ".join((tmp_path / "rules" / "ticket.yaml").read_text().split())
    out.write_text(out.read_text() + "# mine\n")
    status, text = run(*command)
    assert (2, True) == (status, f"{out} was changed" in text)
    assert out.read_text().endswith("# mine\n")


@pytest.mark.prometheus
def test_a_program_reads_the_same(recorded, tmp_path):
    (tmp_path / "sheet.yaml").write_text("targets: {ttft_p95: 6s}\n")
    status, text = run(
        "derive", "--prometheus", recorded, "--window", "3h", "--worksheet", tmp_path / "sheet.yaml", "--json"
    )
    found = json.loads(text)
    assert 0 == status
    assert {"queue_length": 20.0, "kv_cache_usage": 0.91} == found["thresholds"]
    assert {"kv_cache_usage": True, "queue_length": True, INTER_TOKEN: False, TTFT: False} == {
        row["name"]: row["derived"] for row in found["numbers"]
    }
    assert (
        pytest.approx(RATE, rel=0.01)
        == next(row for row in found["numbers"] if row["name"] == "queue_length")["evidence"]["requests_per_second"]
    )


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--model", "other"), r"model other .*vllm\.\*:"),
        (("--model", 'a"b'), "'a\"b' "),
        (("--thresholds", "JOBS"), r"no engine .*llm-\.\*: .*engine_job"),
        (("--variant", "new"), "--variant belongs to --bench"),
        (("--bench", "NONE"), "holds no bench"),
        (("--worksheet", "BAD"), "BAD"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(recorded, tmp_path, words, fault):
    (tmp_path / "JOBS").write_text("engine_job: llm-.*\n")
    (tmp_path / "BAD").write_text("targets: {ttft_p95: soon}\n")
    status, text = run(
        "derive",
        "--prometheus",
        recorded,
        "--window",
        "3h",
        *(tmp_path / word if word.isupper() else word for word in words),
    )
    assert 2 == status
    assert re.search(fault, " ".join(text.split()))
    assert "Traceback" not in text


@pytest.mark.prometheus
def test_a_worksheet_says_what_is_promised(recorded, tmp_path):
    (tmp_path / "sheet.yaml").write_text("targets: {ttft_p95: 500ms}\n")
    status, text = run(
        "derive", "--prometheus", recorded, "--window", "3h", "--worksheet", tmp_path / "sheet.yaml", "--json"
    )
    assert 0 == status
    assert 0.5 == json.loads(text)["thresholds"][TTFT]


@pytest.mark.parametrize(("window", "shown"), [("0", "0 s"), ("5s", "5 s")])
def test_a_window_of_no_time_is_told(window, shown):
    status, text = run("derive", "--prometheus", "http://127.0.0.1:9", "--window", window)
    assert 2 == status
    assert re.search(rf"\b{shown} .* {LEAST_STEPS} steps .*--window", text)


def test_where_no_prometheus_answers_that_is_said():
    status, text = run("derive", "--prometheus", "http://127.0.0.1:9")
    assert (2, True) == (status, "does not answer" in text)


def test_the_help_ends_with_an_example():
    assert (
        run("derive", "--help")[1]
        .split("Options:")[0]
        .rstrip()
        .endswith("--prometheus http://127.0.0.1:9090 --out thresholds.yml")
    )
