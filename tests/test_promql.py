"""Questions render as they should, and wrong ones do not render at all."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from exporters.catalogue import expression, page, promql, vllm
from exporters.catalogue.metric import Across, Kind, Metric, Unit, key
from exporters.catalogue.promql import WrongQuestion


def test_the_older_name_stands_inside_the_aggregation():
    """A fleet of old and new engines is counted whole only when the fallback is below the sum."""
    assert (
        "sum by (model_name) (rate(vllm:prefix_cache_hits_total[5m]) or rate(vllm:gpu_prefix_cache_hits_total[5m]))"
        == promql.per_second(vllm.PREFIX_CACHE_HITS)
    )


@pytest.mark.prometheus
def test_a_fleet_that_mixes_old_and_new_names_is_counted_whole_and_once(part, tmp_path):
    """On the real promtool: an engine with new names, one with old names, and one of 0.10 that shows both for the same thing."""
    new, old = "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"
    rows = [(new, "a", 1), (old, "b", 2), (new, "c", 4), (old, "c", 4)]
    series = [{"series": f'{name}{{model_name="m",engine="0",instance="{at}"}}', "values": f"0+{60 * step}x20"} for name, at, step in rows]
    asked = {"expr": promql.per_second(vllm.PREFIX_CACHE_HITS), "eval_time": "10m", "exp_samples": [{"labels": '{model_name="m"}', "value": 7}]}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]}))
    done = subprocess.run([part("promtool").path, "test", "rules", file], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_a_ratio_gauge_is_averaged_and_never_summed():
    """Two engines at 40 % are not one at 80 %."""
    assert promql.current(vllm.KV_CACHE_USAGE).startswith("avg by (model_name) (")
    assert promql.worst(vllm.KV_CACHE_USAGE).startswith("max by (model_name) (")


def test_matchers_reach_every_alternative():
    expr = promql.per_second(vllm.PREFIX_CACHE_HITS, where=('job="a"',))
    assert 2 == expr.count('{job="a"}')


@pytest.mark.parametrize(
    "ask",
    [
        lambda: promql.per_second(vllm.NUM_REQUESTS_RUNNING),
        lambda: promql.growth(vllm.TIME_TO_FIRST_TOKEN),
        lambda: promql.quantile(0.95, vllm.PROMPT_TOKENS),
        lambda: promql.quantile(95, vllm.TIME_TO_FIRST_TOKEN),
        lambda: promql.current(vllm.PROMPT_TOKENS),
        lambda: promql.mean(vllm.KV_CACHE_USAGE),
        lambda: promql.share(vllm.PROMPT_TOKENS, vllm.REQUEST_SUCCESS),
        lambda: promql.series(vllm.PROMPT_TOKENS),
    ],
)
def test_a_wrong_question_fails_when_rendered(ask):
    with pytest.raises(WrongQuestion):
        ask()


def test_a_share_is_absent_when_idle_and_zero_when_nothing_of_the_part_happened():
    """The denominator is filtered, so idle gives no NaN; a part that has no series yet counts as 0."""
    expr = promql.share(vllm.REQUEST_SUCCESS, vllm.REQUEST_SUCCESS, part_where=('finished_reason="error"',))
    assert expr.endswith(" > 0)")
    assert " * 0)" in expr


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
        ("avg_over_time(x[$__range:$__interval])", {"x"}),
    ],
)
def test_series_names_are_read_from_promql_as_grafana_holds_it(text, names):
    assert names == expression.names(text)


def test_what_is_no_promql_says_so():
    with pytest.raises(expression.BadExpression, match="not PromQL"):
        expression.names("sum(rate(x[5m])")


PAGE = page.parse('# TYPE vllm:a gauge\nvllm:a{reason="x",engine="0"} 1\n# TYPE vllm:b_total counter\nvllm:b_total 0\n')


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
def test_an_expression_is_judged_by_what_the_page_could_ever_answer(expr, expected):
    assert expected is expression.answers(expr, PAGE, lambda name: name.startswith("vllm:"))


def test_releases_sort_by_number():
    assert key("0.9.2") < key("0.10.2.post2") < key("0.32.0+cpu")


@pytest.mark.parametrize("bad", [{"name": "9x"}, {"name": "vllm:x"}, {"since": "new"}])
def test_a_metric_that_cannot_be_is_refused(bad):
    good = {"name": "vllm:x_total", "kind": Kind.COUNTER, "unit": Unit.COUNT, "meaning": "m", "across": Across.SUM}
    with pytest.raises(ValueError, match=r"is no|exposed with _total"):
        Metric(**{**good, **bad})
