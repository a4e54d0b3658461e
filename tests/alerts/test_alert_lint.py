"""Every rule of the linter finds an alert or a recording that breaks just that rule, and what is shipped breaks
none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from alerts import lint, printer, registry
from alerts.lint import RULES, AllowedRuleFault
from alerts.panel_ref import PanelRef
from alerts.registry import ALERTS, RECORDINGS
from alerts.rules import Alert, Recording, Severity
from alerts.settings import Overrides, Settings
from exporters.catalogue import gpu, promql, promql_ast, vllm

WAITING, TOKENS, FIRST_TOKEN, HITS = (
    metric.samples[0]
    for metric in (vllm.NUM_REQUESTS_WAITING, vllm.GENERATION_TOKENS, vllm.TIME_TO_FIRST_TOKEN, vllm.PREFIX_CACHE_HITS)
)
GOOD = Alert(
    "VLLMThing",
    Severity.WARNING,
    f"sum by (job, instance) ({WAITING}) > 5",
    hold="5m",
    keep_firing="5m",
    summary="Queue long: {{ $labels.instance }}",
    description="{{ $value | humanize }} wait on {{ $labels.instance }}.",
    panel=PanelRef("overview", "x"),
)
BUSY = {"summary": "Busy: {{ $labels.model_name }}", "description": "{{ $labels.model_name }} is busy."}
RECORD = Recording("model_name:vllm_tokens:rate5m", f"sum by (model_name) (rate({TOKENS}[5m]))", "tokens a second")


def by_engine(inner):
    return f"sum by (job, instance) ({inner})"


def alert(**changes):
    return (replace(GOOD, **changes),), ()


def forced(**changes):
    """An alert that its own constructor would refuse, as it might come from somewhere else."""
    broken = replace(GOOD)
    for name, value in changes.items():
        object.__setattr__(broken, name, value)
    return (broken,), ()


def recorded(record, expr, labels=()):
    return (), (Recording(record, expr, "tokens", dict(labels)),)


def told(rules, allowed=()):
    """The rules that are broken."""
    return [sentence.rsplit("[", 1)[1].rstrip("]") for sentence in lint.faults(*rules, allowed)]  # type: ignore[call-arg]


def test_the_shipped_rules_break_none():
    assert [] == list(lint.faults(ALERTS, RECORDINGS))


def test_own_jobs_and_thresholds_break_no_rule():
    """Those with a deployment's own jobs and thresholds break none either."""
    settings = Settings(
        Overrides(thresholds={"kv_cache_usage": 0.8}, engine_job="prod/.+|llm", gateway_job="gw", sidecar_job="watch")
    )
    assert [] == list(lint.faults(registry.alerts(settings), registry.recordings(settings)))


def test_no_shipped_group_is_crowded():
    groups = {
        group["name"]: group["rules"] for _, text in printer.rule_files() for group in yaml.safe_load(text)["groups"]
    }
    assert [] == list(lint.crowded(groups))


def test_large_or_long_named_group_is_reported():
    """A group of too many rules or with too long a name is told."""
    (large,) = lint.crowded({"a": [0] * 21, "b": [0] * 20})
    assert large.startswith("group a: 21 rules; at most 20")
    (long,) = lint.crowded({"a" * 41: []})
    assert f"{'a' * 41}: " in long
    assert "longer than 40 letters" in long


def test_the_small_rules_are_right():
    assert [] == told(((GOOD,), (RECORD,)))


CASES = [
    ("promql", alert(expr=f"sum by (job) ({WAITING} > 5")),
    ("series", forced(expr="vllm:num_requests_wating > 5", summary="Many wait", description="Many wait.")),
    ("series", forced(expr='{job="vllm"} > 5', summary="Many wait", description="Many wait.")),
    ("series", alert(expr=f"{by_engine(WAITING)} > 5 and on () job:somebody_elses:rate5m > 1")),
    ("rate-of-gauge", alert(expr=by_engine(f"rate({WAITING}[5m])") + " > 5")),
    ("rate-of-gauge", alert(expr=by_engine(f"resets({WAITING}[5m])") + " > 5")),
    ("raw-counter", alert(expr=by_engine(f"changes({TOKENS}[5m])") + " > 5")),
    ("raw-counter", alert(expr=by_engine(f"min_over_time({TOKENS}[5m])") + " > 5")),
    ("raw-counter", alert(expr=by_engine(TOKENS) + " > 5")),
    ("rate-of-gauge", alert(expr=f"rate({by_engine(f'rate({TOKENS}[5m])')}[1h:1m]) > 5")),
    ("raw-counter", recorded("model_name:vllm_tokens:p1", f"sum by (model_name) ({TOKENS})")),
    ("buckets", alert(expr=by_engine(f"rate({FIRST_TOKEN}[5m])") + " > 5")),
    ("labels", alert(expr=f"histogram_quantile(0.9, {by_engine(f'rate({FIRST_TOKEN}[5m])')}) > 5")),
    ("labels", alert(expr=f"sum by (job, instance, team) ({WAITING}) > 5")),
    ("labels", alert(expr=f"{by_engine(WAITING)} > sum by (job) ({WAITING})")),
    ("labels", alert(expr=f"{by_engine(WAITING)} > 5 and on (job, uuid) sum by (job) ({WAITING})")),
    ("division", alert(expr=f"{by_engine(WAITING)} / {by_engine(f'rate({TOKENS}[5m])')} > 5")),
    ("made-up", forced(expr=f"({by_engine(WAITING)} or vector(0)) > 5", summary="Many wait", description="Many wait.")),
    ("picked", alert(expr=f"topk(3, {WAITING}) > 5")),
    ("windows", alert(expr=by_engine(f"rate({TOKENS}[30s])") + " > 5")),
    ("windows", alert(expr=f"max_over_time({by_engine(WAITING)}[45s:15s]) > 5")),
    ("condition", alert(expr=by_engine(WAITING))),
    ("condition", alert(expr=f"{by_engine(WAITING)} > bool 5")),
    ("condition", alert(expr=f"{by_engine(WAITING)} > 5 or {by_engine(WAITING)}")),
    ("condition", alert(expr=f"{by_engine(WAITING)} and {by_engine(WAITING)}")),
    ("condition", alert(expr=f"histogram_quantile(0.9, sum by (job, instance, le) (rate({FIRST_TOKEN}[5m]))) >= 0")),
    ("durations", alert(hold="30s")),
    ("durations", alert(keep_firing="15s")),
    ("durations", alert(expr='absent(up{job="vllm", instance="a"})', hold="0s")),
    ("label-names", alert(description="{{ $labels.model_name }} waits on {{ $labels.instance }}.")),
    ("label-names", alert(expr=f"{by_engine(WAITING)} > 5 or sum by (job) ({WAITING}) > 50")),
    ("label-names", alert(description="{{ with $labels.uuid }}{{ . }}{{ end }} waits on {{ $labels.instance }}.")),
    ("description", forced(description="{{ $value | humanize }} wait.")),
    ("description", alert(description="{{ $labels.instance }} waits")),
    ("value", alert(description="{{ $value }} wait on {{ $labels.instance }}.")),
    ("static-labels", alert(owner="{{ $labels.team }}")),
    ("static-labels", recorded("model_name:vllm_tokens:rate5m", RECORD.expr, {"team": "{{ $value }}"}.items())),
    ("label-names", alert(summary="Queue long: {{ $labels.uuid }}")),
    ("summary", forced(summary="Queue long")),
    ("summary", alert(summary="Queue long: {{ $labels.instance }}.")),
    ("summary", alert(summary="Queue of {{ $value | humanize }}: {{ $labels.instance }}")),
    ("owner", alert(owner=" ")),
    ("muted", alert(muted_by=("VLLMGone",))),
    ("muted", alert(muted_by=("VLLMThing",))),
    ("level", recorded("job:vllm_tokens:rate5m", RECORD.expr)),
    ("level", recorded("model_name_le:vllm_tokens:rate5m", RECORD.expr)),
    ("window-named", recorded("model_name:vllm_tokens:rate1m", RECORD.expr)),
    ("window-named", recorded("model_name:vllm_tokens:rate", RECORD.expr)),
    ("names", ((GOOD, GOOD), ())),
    ("names", ((), (RECORD, RECORD))),
    ("critical",
        (tuple(replace(GOOD, name=f"VLLMThing{letter}", severity=Severity.CRITICAL) for letter in "ABCDEFGHIJK"), ())),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "rules"), CASES, ids=[f"{rule}-{at}" for at, (rule, _) in enumerate(CASES)])
def test_what_breaks_one_rule_is_told_by_that_rule_alone(rule, rules):
    assert {rule} == set(told(rules))


def test_every_rule_has_its_case():
    assert set(RULES) == {rule for rule, _ in CASES}


@pytest.mark.parametrize(
    "changes",
    [
        {"expr": f"{by_engine(WAITING)} > 5 or {by_engine(f'rate({TOKENS}[5m])')} > 9"},
        {"expr": f"{by_engine(WAITING)} unless {by_engine(WAITING)} < 5"},
        {
            "expr": f'label_replace({by_engine(WAITING)} > 5, "engine", "$1", "instance", "(.+)")',
            "description": "{{ $labels.engine }} waits.",
        },
        {"expr": f"{by_engine(WAITING)} > 5 and on (job, instance) group by (job, instance) (up == 1)"},
        {"expr": promql.quantile(0.9, vllm.TIME_TO_FIRST_TOKEN, by=("instance",)) + " > 5"},
        {
            "expr": f"{by_engine(WAITING)} > 5 or sum by (job, instance, model_name) ({WAITING}) > 50",
            "description": "{{ with $labels.model_name }}{{ . }} on {{ end }}{{ $labels.instance }} waits.",
        },
        {"description": '{{ printf "%.2g" $value }} wait on {{ $labels.instance }}.'},
        {"description": '{{ $value | printf "%.2g" }} wait on {{ $labels.instance }}.'},
        {"hold": "0s", "keep_firing": None},
        {
            "expr": "vector(1) > 0",
            "summary": "Watchdog",
            "description": "This always fires.",
            "severity": Severity.INFO,
            "always": True,
        },
        {
            "expr": (
                f"group by (instance) ({promql.last_samples(gpu.INFO, '1h')}) unless group by (instance)"
                f" ({promql.series(gpu.INFO)})"
            )
        },
    ],
)
def test_what_is_meant_breaks_no_rule(changes):
    assert [] == told(alert(**changes))


def test_a_recorded_series_bears_what_its_recording_leaves():
    """Also through a second recording."""
    hourly = Recording("model_name:vllm_tokens:rate5m_max1h", f"max_over_time({RECORD.record}[1h])", "tokens")
    named = replace(GOOD, expr=f"{hourly.record} > 5", **BUSY)
    assert [] == told(((named,), (RECORD, hourly)))
    lost = replace(named, description="{{ $labels.instance }} is busy.")
    assert ["label-names"] == told(((lost,), (RECORD, hourly)))


def test_what_is_recorded_is_a_gauge():
    """Its falls are no restarts."""
    rates = replace(GOOD, expr=f"rate({RECORD.record}[1h]) > 5", **BUSY)
    assert ["rate-of-gauge"] == told(((rates,), (RECORD,)))


def test_a_recording_that_reads_itself_ends():
    itself = Recording("model_name:vllm_tokens:max", "max by (model_name) (model_name:vllm_tokens:max)", "tokens")
    assert "labels" in told(((), (itself,)))


def test_a_fault_names_the_rule_that_has_it_and_what_to_do():
    (sentence,) = lint.faults(*alert(expr=f"{by_engine(WAITING)} / {by_engine(WAITING)} > 5"))
    assert sentence.startswith("VLLMThing: divisor")
    assert sentence.endswith(" > 0) [division]")


# ---- exceptions


def test_an_exception_hides_its_fault_and_nothing_else():
    both = alert(hold="30s", owner=" ")
    assert ["owner"] == told(both, (AllowedRuleFault("durations", "VLLMThing", "a test"),))


def test_an_exception_that_nothing_needs_is_a_fault():
    assert ["unused-exception"] == told(((GOOD,), ()), (AllowedRuleFault("durations", "VLLMThing", "a test"),))


def test_an_exception_without_a_reason_cannot_be_made():
    with pytest.raises(ValueError, match="without a reason"):
        AllowedRuleFault("durations", "VLLMThing", " ")


def test_exceptions_name_rules_that_there_are():
    assert {one.rule for one in lint.EXCEPTIONS} <= set(RULES)


# ---- what the expressions are asked


@pytest.mark.parametrize(
    ("expr", "told"),
    [
        ("x > 5", []),
        ("x", ["x{}"]),
        ("x > bool 5", ["x{} > bool 5"]),
        ("a / (b > 0)", ["a{} / (b{} > 0)"]),
        ("a > 1 or b", ["b{}"]),
        ("(a or b) > 1", []),
        ("a unless b", []),
        ("a and b", ["a{} and  b{}"]),
        ("a and b > 1", []),
        ("absent(a)", []),
        ("count(a > 1)", []),
        ("(a > 1) * 100", []),
        ("histogram_quantile(0.9, a) >= 0", ["histogram_quantile(0.9, a{}) >= 0"]),
        ("histogram_quantile(0.9, a) >= 0 > 5", []),
    ],
)
def test_a_branch_that_compares_nothing_is_found(expr, told):
    assert told == promql_ast.unconditional(expr)


def test_windows_are_those_of_subqueries_too():
    assert [3600, 300] == promql_ast.windows_s("max_over_time(rate(a[5m])[1h:1m])")
    assert [] == promql_ast.windows_s("a offset 5m")
