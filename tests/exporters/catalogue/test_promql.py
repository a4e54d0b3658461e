"""Questions render as they should, and wrong ones do not render at all."""

from __future__ import annotations

import math
import re
import subprocess

import pytest
import yaml

from dashboards.boards import overview
from dashboards.interpolate import ALL, Range, fill
from exporters.catalogue import exposition_parser, promql, promql_ast, sidecar, vllm
from exporters.catalogue.metric import Across, EngineRole, Kind, Metric, Unit, key
from exporters.catalogue.promql import InvalidQuery
from tests.support import engine_pair


@pytest.fixture
def answered(part, tmp_path):
    """series -> values, one a minute, and what is asked: (expression, at, {labels: value}). On the real promtool."""

    def check(series, *asked):
        file = tmp_path / "test.yaml"
        tests = [
            {
                "expr": expr,
                "eval_time": at,
                "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
            }
            for expr, at, expected in asked
        ]
        rows = [{"series": name, "values": values} for name, values in series.items()]
        file.write_text(
            yaml.safe_dump({"tests": [{"interval": "1m", "input_series": rows, "promql_expr_test": tests}]})
        )
        done = subprocess.run(
            [part("promtool").path, "test", "rules", file], capture_output=True, text=True, check=False
        )
        assert 0 == done.returncode, done.stdout + done.stderr

    return check


def test_the_older_name_stands_inside_the_aggregation():
    """A fleet of old and new engines is counted whole only when the fallback is below the sum."""
    assert (
        'sum by (model_name) (rate(vllm:prefix_cache_hits_total{role!="decode"}[5m]) or'
        ' rate(vllm:gpu_prefix_cache_hits_total{role!="decode"}[5m]))' == promql.per_second(vllm.PREFIX_CACHE_HITS)
    )


@pytest.mark.prometheus
def test_mixed_old_and_new_names_count_once(answered):
    """On the real promtool: an engine with new names, one with old names, and one of 0.10 that shows both for the same
    thing."""
    new, old = "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"
    rows = [(new, "a", 1), (old, "b", 2), (new, "c", 4), (old, "c", 4)]
    series = {f'{name}{{model_name="m",engine="0",instance="{at}"}}': f"0+{60 * step}x20" for name, at, step in rows}
    answered(series, (promql.per_second(vllm.PREFIX_CACHE_HITS), "10m", {'{model_name="m"}': 7}))


def test_a_ratio_gauge_is_averaged_and_never_summed():
    """Two engines at 40 % are not one at 80 %."""
    assert promql.current(vllm.KV_CACHE_USAGE).startswith("avg by (model_name) (")
    assert promql.worst(vllm.KV_CACHE_USAGE).startswith("max by (model_name) (")


def test_what_several_series_tell_of_one_thing_is_counted_once():
    """Each instance of a divided GPU repeats the energy of the whole GPU."""
    assert "max by (model_name) (rate(vllm:prompt_tokens_total[5m]))" == promql.repeated(vllm.PROMPT_TOKENS)
    assert "max(increase(vllm:prompt_tokens_total[1h]))" == promql.repeated(
        vllm.PROMPT_TOKENS, "1h", (), per_second=False
    )


def test_who_was_there_is_told_by_any_series_old_names_included():
    """A counter too: that it stood somewhere says that its target was there."""
    assert "last_over_time(vllm_watch_sidecar_info[1d])" == promql.last_samples(sidecar.SIDECAR_INFO, "1d")
    total = f"{vllm.TIME_TO_FIRST_TOKEN.name}_sum"
    assert (total, f"last_over_time({total}[1h])") == (
        promql.stored(vllm.TIME_TO_FIRST_TOKEN),
        promql.last_samples(vllm.TIME_TO_FIRST_TOKEN, "1h"),
    )
    assert (
        'last_over_time(vllm:prefix_cache_hits_total{job="a"}[1h]) or'
        ' last_over_time(vllm:gpu_prefix_cache_hits_total{job="a"}[1h])'
        == promql.last_samples(vllm.PREFIX_CACHE_HITS, "1h", ('job="a"',))
    )


def test_matchers_reach_every_alternative():
    expr = promql.per_second(vllm.PREFIX_CACHE_HITS, where=('job="a"',))
    assert 2 == expr.count('{job="a", ')


@pytest.mark.parametrize(
    "ask",
    [
        lambda: promql.per_second(vllm.NUM_REQUESTS_RUNNING),
        lambda: promql.growth(vllm.TIME_TO_FIRST_TOKEN),
        lambda: promql.repeated(vllm.NUM_REQUESTS_RUNNING),
        lambda: promql.quantile(0.95, vllm.PROMPT_TOKENS),
        lambda: promql.quantile(95, vllm.TIME_TO_FIRST_TOKEN),
        lambda: promql.current(vllm.PROMPT_TOKENS),
        lambda: promql.mean(vllm.KV_CACHE_USAGE),
        lambda: promql.share(vllm.PROMPT_TOKENS, vllm.REQUEST_SUCCESS),
        lambda: promql.total(vllm.KV_CACHE_USAGE),
        lambda: promql.resets(vllm.KV_CACHE_USAGE),
        lambda: promql.series(vllm.PROMPT_TOKENS),
    ],
)
def test_a_wrong_question_fails_when_rendered(ask):
    with pytest.raises(InvalidQuery):
        ask()


def test_share_is_absent_when_idle_and_zero_without_part():
    """The denominator is filtered, so idle gives no NaN; a part that has no series yet counts as 0."""
    expr = promql.share(vllm.REQUEST_SUCCESS, vllm.REQUEST_SUCCESS, part_where=('finished_reason="error"',))
    assert expr.endswith(" > 0)")
    assert " * 0)" in expr


def test_quotient_may_split_more_than_its_divisor():
    """Acceptance by position: many series above, one per model below."""
    assert "a / (b > 0)" == promql.per("a", "b")
    assert "a / on (model_name) group_left () (b > 0)" == promql.per("a", "b", ("model_name",))


@pytest.mark.prometheus
def test_share_below_the_first_bound(answered):
    """On the real promtool: 3 of 4 samples lie in the first bucket; while nothing happens there is no answer at all."""
    counts = {"0.3": 3, "0.5": 3, "+Inf": 4}
    name = vllm.REQUEST_QUEUE_TIME.name
    series = {
        f'{name}_bucket{{model_name="m",le="{le}"}}': f"0+{count}x10 {10 * count}x20" for le, count in counts.items()
    }
    expr = promql.unresolved(vllm.REQUEST_QUEUE_TIME)
    answered(series, (expr, "10m", {'{model_name="m"}': 0.75}), (expr, "30m", {}))


@pytest.mark.prometheus
def test_an_engine_that_two_sidecars_read_has_its_capacity_once(answered):
    """Told twice of both ranks of a, once of b; the a of another namespace is another engine."""
    told = [
        ("x", "prod", "a", 0),
        ("y", "prod", "a", 0),
        ("x", "prod", "a", 1),
        ("y", "prod", "a", 1),
        ("x", "prod", "b", 0),
        ("z", "test", "a", 0),
    ]
    name = sidecar.KV_CAPACITY.name
    series = {
        f'{name}{{instance="{by}",namespace="{space}",upstream="{engine}",engine="{rank}",model_name="m"}}': "100x20"
        for by, space, engine, rank in told
    }
    answered(
        series,
        (promql.once(sidecar.KV_CAPACITY), "10m", {'{model_name="m"}': 400}),
        (
            promql.once(sidecar.KV_CAPACITY, ("upstream",), ('namespace="prod"',)),
            "10m",
            {'{upstream="a"}': 200, '{upstream="b"}': 100},
        ),
        (promql.once(sidecar.KV_CAPACITY, ()), "10m", {"{}": 400}),
    )


@pytest.mark.prometheus
def test_only_targets_that_show_the_other_series_count(answered):
    """Any FastAPI service has http_requests_total."""
    asked, running = vllm.HTTP_REQUESTS.name, vllm.NUM_REQUESTS_RUNNING.name
    series = {
        f'{asked}{{job="vllm",instance="a:8000",status="2xx"}}': "0+60x20",
        f'{asked}{{job="shop",instance="b:80",status="2xx"}}': "0+600x20",
        f'{running}{{job="vllm",instance="a:8000",engine="0",model_name="m"}}': "0x20",
        f'{running}{{job="vllm",instance="a:8000",engine="1",model_name="m"}}': "0x20",
    }
    target = ("job", "instance")
    answer = promql.on_targets_of(promql.per_second(vllm.HTTP_REQUESTS, by=target), vllm.NUM_REQUESTS_RUNNING)
    answered(series, (answer, "10m", {'{job="vllm",instance="a:8000"}': 1}))
    with_model = promql.with_labels_of(
        promql.per_second(vllm.HTTP_REQUESTS, by=target), vllm.NUM_REQUESTS_RUNNING, (*target, "model_name"), target
    )
    answered(series, (with_model, "10m", {'{job="vllm",instance="a:8000",model_name="m"}': 1}))


@pytest.mark.prometheus
def test_removed_target_is_down_for_an_hour(answered):
    """On the Overview: a answers, b is tried in vain, c left service discovery at 20m; the shop is none of ours."""
    (panel,) = (panel for panel in overview.BOARD.panels if panel.slug == "engines-up")
    chosen = dict.fromkeys(("cluster", "namespace", "job", "instance", "model_name"), (ALL,))
    expr = fill(panel.queries[0].expr, chosen, Range(0, 3600))
    running = vllm.NUM_REQUESTS_RUNNING.name
    series = {
        'up{job="vllm",instance="a"}': "1x200",
        f'{running}{{job="vllm",instance="a",model_name="m"}}': "0x200",
        'up{job="vllm",instance="b"}': "1x20 0x180",
        f'{running}{{job="vllm",instance="b",model_name="m"}}': "0x20 stale",
        'up{job="vllm",instance="c"}': "1x20 stale",
        f'{running}{{job="vllm",instance="c",model_name="m"}}': "0x20 stale",
        'up{job="shop",instance="d"}': "1x200",
    }

    def up(job, instance, name="up"):
        return f'{name}{{job="{job}",instance="{instance}"}}'

    here = {up("vllm", "a"): 1, up("vllm", "b"): 0}
    answered(
        series,
        (expr, "10m", {up("vllm", "a"): 1, up("vllm", "b"): 1, up("vllm", "c"): 1}),
        (expr, "70m", {**here, up("vllm", "c", ""): 0}),
        (expr, "90m", here),
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sum(rate(vllm:a_total[$__rate_interval])) / sum(b)", {"vllm:a_total", "b"}),
        ('{__name__="vllm:a", x="y"}', {"vllm:a"}),
        ("histogram_quantile($q, sum by (le, $by) (rate(x_bucket[${window}])))", {"x_bucket"}),
        ("rate(x[5m] offset 1w)", {"x"}),
        ("rate(x[$window] offset $off)", {"x"}),
        ("$aggregation by ($by) (x{$filters})", {"x"}),
        ("sum($metric) + x", {"x"}),
        ("sum(vllm:${metric}_total) / y[[part]]_total", set()),
        ('x{model_name=~"[[model]]", job=~"$job"}', {"x"}),
        ("topk($n, x)", {"x"}),
        ("x * $price / $gpus", {"x"}),
        ("avg_over_time(x[$__range:$__interval])", {"x"}),
    ],
)
def test_series_names_are_read_from_promql_as_grafana_holds_it(text, names):
    assert names == promql_ast.names(text)


def test_what_is_no_promql_says_so():
    with pytest.raises(promql_ast.BadExpression, match="not PromQL"):
        promql_ast.names("sum(rate(x[5m])")


PAGE = exposition_parser.parse(
    '# TYPE vllm:a gauge\nvllm:a{reason="x",engine="0"} 1\n# TYPE vllm:b_total counter\nvllm:b_total 0\n'
)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("vllm:a", True),
        ("vllm:gone", False),
        ("vllm:gone or vllm:a", True),
        ("vllm:a and vllm:gone", False),
        ("vllm:a unless vllm:gone", True),
        ("sum(rate(vllm:b_total[5m])) / sum(rate(vllm:gone_total[5m]))", False),
        ('vllm:a{reason="y"}', False),
        ('vllm:a{reason=~"x|y", job="whatever"}', True),
        ('vllm:a{reason=~"$reason"}', True),
        ('vllm:a{reason=~"[[reason]]"}', True),
        ('vllm:a{reason=~"\\\\p{L}"}', True),
        ("vllm:${which}_total", True),
        ("absent(vllm:gone)", True),
        ("vllm_watch_of_another_component", True),
        ("max_over_time(vllm:a[1h:5m])", True),
    ],
)
def test_expression_is_tested_against_possible_answers(expr, expected):
    """An expression is judged by what the page could ever answer."""
    assert expected is promql_ast.answers(expr, PAGE, lambda name: name.startswith("vllm:"))


def test_counter_kept_in_a_file_is_read_as_is():
    """The first event on record is one event; a growth would need a sample before it and say 0."""
    assert "sum by (kind) (vllm_watch_tuning_events_total)" == promql.total(sidecar.EVENTS, ("kind",))


def test_restarted_process_counts_once():
    """A process that starts again counts once however many series it has."""
    assert "max by (instance) (resets(vllm:generation_tokens_total[1h]))" == promql.resets(
        vllm.GENERATION_TOKENS, "1h", ("instance",)
    )


def test_releases_sort_by_number():
    assert key("0.9.2") < key("0.10.2.post2") < key("0.32.0+cpu")


@pytest.mark.parametrize(
    ("bad", "values"),
    [
        ({"name": "9x"}, "'9x'"),
        ({"name": "vllm:x"}, "vllm:x: .*_total"),
        ({"since": "new"}, r"vllm:x_total: 'new' .*0\.20"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(bad, values):
    good = {"name": "vllm:x_total", "kind": Kind.COUNTER, "unit": Unit.COUNT, "meaning": "m", "across": Across.SUM}
    with pytest.raises(ValueError, match=values):
        Metric(**{**good, **bad})


# ---- what is done to a series, and what an answer's labels are


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("sum(rate(x[$__rate_interval]))", [("x", ("rate", "sum"), "$__rate_interval")]),
        ("max_over_time(sum(rate(x[5m]))[1h:$__interval])", [("x", ("rate", "sum", "max_over_time"), "5m")]),
        ("rate(x[ ${window} ] offset 1w)", [("x", ("rate",), "${window}")]),
        ("x > bool 1", [("x", ("> bool",), "")]),
        ("a and on (job) b", [("a", ("and",), ""), ("b", ("presence",), "")]),
        ("-(a) / b", [("a", ("/",), ""), ("b", ("/",), "")]),
        ('{__name__="a", x="[5m]"} or b', [("a", ("or",), ""), ("b", ("or",), "")]),
        ("topk(scalar(a), rate(b[1m]))", [("a", ("scalar", "topk"), ""), ("b", ("rate", "topk"), "1m")]),
        ("1 + time()", []),
    ],
)
def test_what_is_done_to_a_series_is_read_from_the_inside_out(expr, expected):
    assert expected == [(read.name, read.above, read.window) for read in promql_ast.reads(expr)]


LABELS = {"x": {"a", "b", "le"}, "x_bucket": {"a", "b", "le"}, "y": {"a", "b", "le"}, "info": {"a", "name"}}


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("x", {"a", "b", "le"}),
        ("rate(x[5m])", {"a", "b", "le"}),
        ("sum(x)", set()),
        ("sum by (a, c) (x)", {"a"}),
        ("sum without (le) (x)", {"a", "b"}),
        ("topk by (a) (3, x)", {"a", "b", "le"}),
        ('count_values by (a) ("v", x)', {"a", "v"}),
        ("histogram_quantile(0.9, x)", {"a", "b"}),
        ('label_replace(x, "c", "$1", "a", "(.*)")', {"a", "b", "c", "le"}),
        ('absent(x{a="1", b=~"2"})', {"a"}),
        ("x * on (a) y", {"a"}),
        ("x * ignoring (le) y", {"a", "b"}),
        ("x * on (a) group_left (name) info", {"a", "b", "le", "name"}),
        ("info * on (a) group_right () x", {"a", "b", "le"}),
        ("sum by (a) (x) or sum by (a, b) (x)", {"a"}),
        ("sum by (a) (x) and x", {"a"}),
        ("time() - x", {"a", "b", "le"}),
        ("scalar(x)", set()),
        ("2", set()),
    ],
)
def test_the_labels_of_an_answer_follow_from_those_below(expr, expected):
    assert expected == promql_ast.labels(expr, lambda name: LABELS[name])


@pytest.mark.parametrize(
    ("expr", "values"),
    [
        ("sum by (team) (x)", r"sum by \(team\): .+"),
        ("histogram_quantile(0.9, sum by (a) (x_bucket))", "histogram_quantile: .+ le label"),
        ("sum by (a) (x) / on (a, b) sum by (a, b) (y)", r"/ on \(b\): .+"),
        ("sum by (a) (x) / sum by (a, b) (y)", "/: .+ one has b"),
        ("sum by (a) (x) unless sum by (b) (y)", "unless: .+ has a, b"),
    ],
)
def test_a_label_that_is_relied_on_and_gone_is_told(expr, values):
    [fault] = promql_ast.lost_labels(expr, lambda name: LABELS[name])
    assert re.fullmatch(values, fault)


@pytest.mark.parametrize(
    "expr",
    [
        "histogram_quantile(0.9, sum by (a) (x))",  # a native histogram
        "sum by (a) (x) / ignoring (b) sum by (a, b) (y)",
        "histogram_quantile(0.9, sum by (a, le) (x))",
        "sum by (a) (x) / 2 > 0",
        "sum by (a) (x) or sum(y)",
        "x * on (a) group_left (name) info",
    ],
)
def test_a_label_that_is_there_is_no_fault(expr):
    assert [] == promql_ast.lost_labels(expr, lambda name: LABELS[name])


@pytest.mark.parametrize(
    ("divisor", "guarded"),
    [
        ("y", False),
        ("sum(y)", False),
        ("0", False),
        ("(y >= 0)", False),
        ("(y > bool 0)", False),
        ("(y > -1)", False),
        ("(y or z)", False),
        ("(y > 0)", True),
        ("(y != 0)", True),
        ("(y >= 1)", True),
        ("3600", True),
        ("(y > 0) * 60", True),
        ("sum(y > 0)", True),
        ("count(y)", True),
        ("clamp_min(y, 1)", True),
        ("$price", True),
        ("((y > 0) and z)", True),
    ],
)
def test_a_divisor_is_guarded_when_it_cannot_be_zero(divisor, guarded):
    assert guarded is (promql_ast.unguarded(f"x / ({divisor})") == [])


def test_values_that_stand_in_for_what_is_absent_are_found():
    assert ["vector(0)"] == promql_ast.made_up("sum(x) or vector(0)")
    assert [] == promql_ast.made_up("sum(x) or sum(y) * 0")


def test_quantiles_are_read_unless_a_variable_holds_them():
    assert [0.95, 0.5] == promql_ast.quantiles(
        "histogram_quantile(0.95, x) / histogram_quantile(0.5, x) + histogram_quantile($q, x)"
    )


def histogram(name: str, counts: dict[str, int], **labels: str) -> dict[str, str]:
    """Classic buckets that grow evenly: so many observations a minute are at most each bound."""
    own = "".join(f',{label}="{value}"' for label, value in labels.items())
    rows = {f'{name}_bucket{{model_name="m"{own},le="{le}"}}': count for le, count in counts.items()}
    rows[f'{name}_count{{model_name="m"{own}}}'] = counts["+Inf"]
    return {series: f"0+{count}x10 {10 * count}x20" for series, count in rows.items()}


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"0.3": 100, "0.5": 100, "+Inf": 100}, {'{model_name="m", bound="<"}': 0.3}),  # 0.285 by interpolation
        ({"0.3": 0, "0.5": 100, "+Inf": 100}, {'{model_name="m"}': 0.49}),
        ({"0.3": 90, "0.5": 90, "+Inf": 100}, {'{model_name="m", bound=">"}': 0.5}),
    ],
)
def test_quantile_outside_the_bounds_is_a_bound(answered, counts, expected):
    name = vllm.REQUEST_QUEUE_TIME.name
    expr = promql.bounded_quantile(0.95, vllm.REQUEST_QUEUE_TIME)
    inside = {labels: value for labels, value in expected.items() if "bound" not in labels}
    resolved = promql.resolved_quantile(0.95, vllm.REQUEST_QUEUE_TIME)
    answered(histogram(name, counts), (expr, "10m", expected), (expr, "30m", {}), (resolved, "10m", inside))


@pytest.mark.prometheus
def test_native_histogram_has_no_first_bucket(answered):
    """The classic buckets of the same observations hold everything below their first bound."""
    classic = histogram(sidecar.QUEUE.name, {"0.3": 100, "+Inf": 100})
    native = {
        f'{sidecar.QUEUE.name}{{model_name="m"}}': (
            "{{schema:0 sum:0 count:0}}+{{schema:0 sum:1 count:100 offset:-4 buckets:[100]}}x10"
        )
    }
    low, high = 2**-5, 2**-4
    for expr in (
        promql.bounded_quantile(0.5, sidecar.QUEUE),
        promql.resolved_quantile(0.5, sidecar.QUEUE),
        promql.quantile(0.5, sidecar.QUEUE),
    ):
        answered(
            classic | native, (f"round({expr}, 1e-6)", "10m", {'{model_name="m"}': round(math.sqrt(low * high), 6)})
        )
    answered(classic, (promql.bounded_quantile(0.5, sidecar.QUEUE), "10m", {'{model_name="m", bound="<"}': 0.3}))


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"0.3": 0, "0.5": 100, "2.5": 100, "+Inf": 100}, {"": 0.49, "at least": 0.3, "at most": 0.5}),
        # the last finite bucket is one too
        ({"0.3": 0, "0.5": 90, "2.5": 100, "+Inf": 100}, {"": 1.5, "at least": 0.5, "at most": 2.5}),
        ({"0.3": 100, "0.5": 100, "+Inf": 100}, {"<": 0.3}),
        ({"0.3": 90, "0.5": 90, "+Inf": 100}, {">": 0.5}),
    ],
)
def test_quantile_stands_between_the_bounds_of_its_bucket(answered, counts, expected):
    """Beyond the buckets the bound is all that is known, and is told once."""
    expr = promql.bounded_quantile(0.95, vllm.REQUEST_QUEUE_TIME, resolution=True)
    labelled = {
        f'{{model_name="m"{f", bound={chr(34)}{bound}{chr(34)}" if bound else ""}}}': value
        for bound, value in expected.items()
    }
    answered(
        histogram(vllm.REQUEST_QUEUE_TIME.name, counts), (f"round({expr}, 0.001)", "10m", labelled), (expr, "30m", {})
    )


MIXED = {  # two engines of a model, one started with bounds of its own; the truths are 13.25 s and 0.5 s
    **histogram(
        "vllm:e2e_request_latency_seconds",
        {"0.3": 0, "0.5": 0, "10.0": 0, "15.0": 100, "7680.0": 100, "+Inf": 100},
        instance="a",
    ),
    **histogram("vllm:e2e_request_latency_seconds", {"0.1": 0, "0.5": 100, "1.0": 100, "+Inf": 100}, instance="b"),
}


@pytest.mark.prometheus
def test_different_bounds_sum_at_shared_bounds(answered):
    """The sum over all bounds had 100 of 200 at most 15 s and at most 7,680 s: a p95 of 7,680 s, which nobody
    waited."""
    e2e = vllm.E2E_REQUEST_LATENCY
    both, infinite = '{model_name="m", bound=">"}', '{model_name="m"}'
    first = {'{model_name="m", instance="a"}': 14.75, '{model_name="m", instance="b"}': 0.48}
    answered(
        MIXED,
        (
            "histogram_quantile(0.95, sum by (model_name, le) (rate(vllm:e2e_request_latency_seconds_bucket[5m])))",
            "10m",
            {infinite: 7680},
        ),
        (promql.bounded_quantile(0.95, e2e, resolution=True), "10m", {both: 0.5}),
        (promql.bounded_quantile(0.4, e2e), "10m", {'{model_name="m", bound="<"}': 0.5}),
        (promql.resolved_quantile(0.95, e2e), "10m", {}),
        (promql.unresolved(e2e), "10m", {'{model_name="m"}': 0.5}),
        (f"round({promql.bounded_quantile(0.95, e2e, by=('model_name', 'instance'))}, 0.001)", "10m", first),
        (promql.mixed_bounds(e2e), "10m", {'{model_name="m"}': 6}),
    )


@pytest.mark.prometheus
def test_engines_without_a_common_bound_have_no_quantile(answered):
    """Engines without a common bound have no quantile together."""
    name = vllm.E2E_REQUEST_LATENCY.name
    apart = {
        **histogram(name, {"0.3": 100, "+Inf": 100}, instance="a"),
        **histogram(name, {"0.4": 100, "+Inf": 100}, instance="b"),
    }
    alike = {
        **histogram(name, {"0.3": 100, "+Inf": 100}, instance="a"),
        **histogram(name, {"0.3": 100, "+Inf": 100}, instance="b"),
    }
    asked = [
        promql.bounded_quantile(0.95, vllm.E2E_REQUEST_LATENCY, resolution=True),
        promql.quantile(0.95, vllm.E2E_REQUEST_LATENCY),
    ]
    answered(apart, *((expr, "10m", {}) for expr in asked))
    answered(
        alike,
        (promql.mixed_bounds(vllm.E2E_REQUEST_LATENCY), "10m", {}),
        (asked[0], "10m", {'{model_name="m", bound="<"}': 0.3}),
    )


# ---- prefill and decode on separate engines


def test_engine_of_a_pair_is_left_out_only_of_sums_over_engines():
    """By engine or by role nothing is left out, nor for a metric of which each engine has a part of its own."""
    assert 'sum by (model_name) (increase(vllm:request_success_total{role!="prefill"}[5m]))' == promql.growth(
        vllm.REQUEST_SUCCESS
    )
    assert 'role!="decode"' in promql.mean(vllm.REQUEST_QUEUE_TIME)
    for by in (promql.EACH, ("model_name", promql.ROLE)):
        assert "role!=" not in promql.growth(vllm.REQUEST_SUCCESS, by=by)
    of_one = (promql.of_role(EngineRole.PREFILL),)
    assert 'sum by (model_name) (increase(vllm:request_success_total{role="prefill"}[5m]))' == promql.growth(
        vllm.REQUEST_SUCCESS, where=of_one
    )
    assert "role" not in promql.per_second(vllm.NUM_PREEMPTIONS) + promql.growth(vllm.HTTP_REQUESTS)


@pytest.mark.prometheus
def test_a_request_of_a_pair_counts_once(answered):
    """On the real promtool with the pages of a real pair: all engines together have what the decode engine has, and
    twice that without the label `role`."""
    counters = (vllm.REQUEST_SUCCESS, vllm.PROMPT_TOKENS)
    of_decode = ('instance=~"decode.*"',)
    shares = [
        f"round({promql.growth(counter)} / {promql.growth(counter, where=of_decode)}, 0.01)" for counter in counters
    ]
    for with_role, times in ((True, 1), (False, 2)):
        series = engine_pair.series(*(counter.name for counter in counters), with_role=with_role)
        answered(series, *((share, "8m", {'{model_name="tiny"}': times}) for share in shares))


@pytest.mark.prometheus
def test_the_transfer_is_not_in_the_queue_time_of_a_pair(answered):
    """The decode engine's queue time holds the transfer; the pair's queue is that of the prefill engine."""
    name = vllm.REQUEST_QUEUE_TIME.name
    of_prefill, of_decode = (promql.mean(vllm.REQUEST_QUEUE_TIME, where=(promql.of_role(role),)) for role in EngineRole)
    answered(
        engine_pair.series(f"{name}_sum", f"{name}_count"),
        (f"({promql.mean(vllm.REQUEST_QUEUE_TIME)}) / ({of_prefill})", "8m", {'{model_name="tiny"}': 1}),
        (f"{of_decode} > bool 1000 * ({of_prefill})", "8m", {'{model_name="tiny"}': 1}),
    )
