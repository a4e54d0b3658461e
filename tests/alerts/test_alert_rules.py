"""Every alert on the real promtool: it fires just past its edge in value and in time, says what it should, and is
silent otherwise.

The cases stand in alert_cases.py. Many of them are asked in one run of promtool, because starting it costs more than
answering; each is a test of its own all the same. Rules are those that are printed; a test of one alert loads that
alert and the recorded series it rests on."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote_plus

import pytest
import yaml

from alerts import printer, slo, transfers
from alerts.registry import ALERTS, RECORDINGS, alerts
from alerts.rules import Alert, Severity
from alerts.settings import DEFAULTS, Overrides, Settings
from exporters.catalogue import EVERYTHING, exposition_parser, gateway, promql_ast, sidecar
from exporters.catalogue.metric import Kind, Metric
from exporters.text import parse_window
from runbooks import page as runbook_page
from tests.support.alert_cases import CASES, MORE, QUIET, B, Case, engine, expanded, parsed, samples

GOLDEN = Path(__file__).parents[1] / "golden"
METRICS: dict[str, Metric] = {sample: metric for metric in EVERYTHING for sample in metric.samples}
BY_NAME = {alert.name: alert for alert in ALERTS}
RECORDED = {recording.record: recording.expr for recording in RECORDINGS}
PRINTED = [group for _, text in printer.rule_files() for group in yaml.safe_load(text)["groups"]]
WATCHDOG = "VLLMWatchdog"
AFTERWARDS = 40  # evaluations that are watched after a target has gone


# ---- what is asked of promtool


Expected = Mapping[int, list[dict[str, object]]]


@dataclass(frozen=True)
class Asked:
    """Some alerts under some series: what promtool must find of each at each of these times, in seconds."""

    name: str
    series: Mapping[str, str]
    expected: Mapping[str, Expected]
    interval: str = "1m"
    every: str = "1m"


def questions() -> Iterator[Asked]:
    """Each case at both sides of its edge; the first of each alert also with idle and with vanished targets, for which
    its other cases have the same expression."""
    whole = {case.alert: case for case in reversed(CASES)}
    for case in (*CASES, *MORE):
        yield from list(of_case(case))[: None if whole[case.alert] is case else 2]
    for name, case in {case.alert: case for case in reversed(CASES)}.items():
        if "{{pod}}" in (runbook_page.text(name) or ""):
            yield next(
                of_case(replace(case, shows="in a pod", series=in_pod(case.series), labels={**case.labels, **POD}))
            )
    for quiet in QUIET:
        every = quiet.every or quiet.interval
        silent = silence(parse_window(quiet.since), parse_window(quiet.until), every)
        yield Asked(f"{quiet} is no reason", quiet.series, {quiet.alert: silent}, quiet.interval, every)
    silent = {alert.name: silence(0, 3600, "1m") for alert in ALERTS if alert.name != WATCHDOG}
    watchdog = {WATCHDOG: {3600: [firing(case) for case in CASES if case.alert == WATCHDOG]}}
    yield Asked("where there is nothing the watchdog fires alone", {}, silent | watchdog)
    everything = {series: value for case in CASES for series, value in idle(case, 3600).items()} | {
        engine("num_requests_running", B): "0x60"
    }
    yield Asked("where all is well the watchdog fires alone", everything, silent | watchdog)


POD = {"namespace": "serving", "pod": "llm-0"}


def in_pod(series: Mapping[str, str]) -> dict[str, str]:
    """The same series as the scrape of a pod labels them; the runbook's kubectl commands need these labels."""
    labels = ", ".join(f'{label}="{value}"' for label, value in POD.items())
    return {name.replace("{", f"{{{labels}, ", 1): values for name, values in series.items()}


def of_case(case: Case) -> Iterator[Asked]:
    every = case.every or case.interval
    step_s, at_s = parse_window(every), parse_window(case.fires_at)

    def asked(name: str, series: Mapping[str, str], *expected: Expected) -> Asked:
        return Asked(
            f"{case} {name}",
            series,
            {case.alert: {at: what for each in expected for at, what in each.items()}},
            case.interval,
            every,
        )

    before = silence(0, parse_window(case.silent_at), every) if case.silent_at else {}
    then = {parse_window(at): [firing(case)] for at in (case.fires_at, case.still_at) if at}
    over = silence(parse_window(case.over_at), parse_window(case.over_at), every) if case.over_at else {}
    yield asked("fires just past its edge", case.series, before, then, over)
    if case.below is None:
        return
    yield asked("is silent just before its edge", case.below, silence(0, ends_s(case.below, case.interval), every))
    yield asked(
        "is silent while nothing happens", idle(case, at_s + 10 * step_s), silence(0, at_s + 10 * step_s, every)
    )
    if case.gone_within is not None:
        from_s = at_s + max(step_s, parse_window(case.gone_within))
        gone = {series: cut(values, at_s // parse_window(case.interval) + 1) for series, values in case.series.items()}
        yield asked(
            "is silent when its target is gone",
            gone,
            {at_s: [firing(case)]},
            silence(from_s, from_s + AFTERWARDS * step_s, every),
        )


def silence(from_s: int, to_s: int, every: str) -> Expected:
    return {at: [] for at in range(from_s, to_s + 1, parse_window(every))}


def firing(case: Case) -> dict[str, object]:
    """The alert as Alertmanager gets it: labels that routing and muting rest on, and every word that a person reads."""
    alert = BY_NAME[case.alert]
    return {
        "exp_labels": {**alert.labels, **case.labels},
        "exp_annotations": {
            "summary": summary(alert, case.labels),
            "description": case.description,
            "runbook_url": f"http://127.0.0.1:9402/runbooks/{case.alert}?live=1{query_of(case.labels)}",
            "dashboard_url": f"http://127.0.0.1:3000/d/vllm-watch-{alert.panel.board}?viewPanel={alert.panel.panel_id}",
        },
    }


def query_of(labels: Mapping[str, str]) -> str:
    """Labels as the template of a runbook link renders them."""
    return "".join(f"&{name}={quote_plus(value)}" for name, value in sorted(labels.items()))


def summary(alert: Alert, labels: Mapping[str, str]) -> str:
    """Return the summary of a firing alert: the template that Prometheus expands, filled from the labels."""
    optional = re.compile(r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}")
    text = optional.sub(lambda m: m[2].replace("{{ . }}", labels[m[1]]) if m[1] in labels else "", alert.summary)
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: labels[m[1]], text)


def ends_s(series: Mapping[str, str], interval: str) -> int:
    """When the first of the series ends that is not meant to: later ones would be read beside what is missing."""
    lengths = [len(expanded(values)) for values in series.values() if not values.endswith("stale")]
    return (min(lengths) - 1) * parse_window(interval)


def cut(values: str, at: int) -> str:
    """The same until its target goes."""
    return " ".join(expanded(values)[:at]) + " stale"


# gauges whose 0 is trouble
HEALTHY = (
    "up",
    "vllm_watch_source_up",
    "vllm_watch_checkpoint_up",
    "vllm_watch_ship_up",
    "prometheus_notifications_alertmanagers_discovered",
)


def idle(case: Case, until_s: int) -> dict[str, str]:
    """The same series while all is well and nobody asks for anything: counters stand still, gauges are 0. 0/0 is
    neither NaN nor an alert.

    Bounds are those of one engine: that others have the same is a part of all being well."""
    more = until_s // parse_window(case.interval)
    alike = (series for series in case.series if "_bucket{" not in series or parsed(series)[1].get("instance") != B)
    return {series: f"{resting(METRICS[parsed(series)[0]])}x{more}" for series in alike}


def resting(metric: Metric) -> int:
    if metric.kind in (Kind.COUNTER, Kind.HISTOGRAM):
        return 7
    return 1 if metric.kind is Kind.INFO or metric.name in HEALTHY else 0


ASKED = {asked.name: asked for asked in questions()}


# ---- what promtool says


@pytest.fixture(scope="module")
def said(part, tmp_path_factory) -> dict[str, str]:
    return answers(part("promtool").path, ASKED, tmp_path_factory.mktemp("promtool"))


def answers(promtool: Path, questions: Mapping[str, Asked], folder: Path) -> dict[str, str]:
    """Question -> what was wrong with the answer, or nothing. Two promtools at a time, each with few files: with all of
    them one process waits far longer than it works."""
    files = {str(written(asked, folder / f"{at}.yaml")): name for at, (name, asked) in enumerate(questions.items())}
    environment = os.environ | {"GOGC": "400"}  # half the processor time goes into collecting garbage of short tests

    def told(paths: Sequence[str]) -> dict[str, str]:
        command = [promtool, "test", "rules", *paths]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        text = done.stdout + done.stderr
        said = re.split(r"^  (?=SUCCESS$|FAILED:$)", text, flags=re.MULTILINE)[1:]
        assert len(paths) == len(said), text[-2000:]
        return {
            files[path]: "" if answer.startswith("SUCCESS") else answer
            for path, answer in zip(paths, said, strict=True)
        }

    with ThreadPoolExecutor(2) as pool:
        return {name: fault for found in pool.map(told, batched(list(files), 15)) for name, fault in found.items()}


def batched(items: Sequence[str], size: int) -> list[Sequence[str]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def written(asked: Asked, path: Path) -> Path:
    """A test file for promtool, and the rules that it loads. JSON is YAML, and thirty times as fast to write."""
    wanted = {*asked.expected, *(name for alert in asked.expected for name in rests_on(BY_NAME[alert].expr))}
    narrowed = ({**group, "rules": [rule for rule in group["rules"] if called(rule) in wanted]} for group in PRINTED)
    groups = [group for group in narrowed if group["rules"]]
    path.with_suffix(".rules").write_text(json.dumps({"groups": groups}))
    checks = [
        {"eval_time": f"{at}s", "alertname": alert, "exp_alerts": alerts}
        for alert, times in asked.expected.items()
        for at, alerts in times.items()
    ]
    rows = [{"series": series, "values": values} for series, values in asked.series.items()]
    test = {
        "rule_files": [str(path.with_suffix(".rules"))],
        "evaluation_interval": asked.every,
        "group_eval_order": [g["name"] for g in groups],
        "tests": [{"interval": asked.interval, "input_series": rows, "alert_rule_test": checks}],
    }
    path.write_text(json.dumps(test))
    return path


def called(rule: Mapping[str, str]) -> str:
    return rule.get("alert") or rule["record"]


def rests_on(expr: str) -> set[str]:
    """The recorded series that an expression reads, and those that they read in turn."""
    read = {name for name in promql_ast.names(expr) if name in RECORDED}
    return read.union(*(rests_on(RECORDED[name]) for name in read))


@pytest.mark.prometheus
@pytest.mark.parametrize("name", ASKED)
def test_on_promtool(name, said):
    assert "" == said[name]


@pytest.mark.prometheus
def test_prometheus_3_12_fires_every_alert_as_well(part, tmp_path):
    """One case of each: how rules are evaluated is Prometheus' own matter, whether it reads ours is not."""
    first = {case.alert: next(of_case(case)) for case in reversed(CASES)}
    found = answers(part("promtool-3.12").path, first, tmp_path)
    assert {alert.name for alert in ALERTS} == found.keys()
    assert {} == {name: fault for name, fault in found.items() if fault}


@pytest.mark.prometheus
@pytest.mark.parametrize("promtool", ["promtool", "promtool-3.12"])
@pytest.mark.parametrize("pace", [1, 15])
def test_promtool_accepts_every_rule_file(pace, promtool, part, tmp_path):
    """Also at the pace of a drill, where every window is a fifteenth."""
    paths = [tmp_path / name for name, _ in printer.rule_files()]
    for path, (_, text) in zip(paths, printer.rule_files(settings=Settings(pace=pace)), strict=True):
        path.write_text(text)
    command = [part(promtool).path, "check", "rules", "--lint=all", "--lint-fatal", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


# ---- the cases are whole


def test_every_alert_has_its_case():
    assert {alert.name for alert in ALERTS} == {case.alert for case in CASES}


def test_only_the_watchdog_has_severity_none():
    """kube-prometheus-stack mutes whatever is `info` while nothing worse fires; a service that expects the watchdog
    would call."""
    assert {WATCHDOG} == {alert.name for alert in ALERTS if alert.labels["severity"] == "none"}
    assert {str(severity) for severity in Severity} == {
        alert.labels["severity"] for alert in ALERTS if alert.name != WATCHDOG
    }


def test_what_always_fires_wakes_nobody():
    with pytest.raises(ValueError, match=f"^{WATCHDOG}: .* critical$"):
        replace(BY_NAME[WATCHDOG], severity=Severity.CRITICAL, description="{{ $value }}")


@pytest.mark.parametrize("name", ["VLLMEngineDown", "VLLMEngineUnreachable"])
@pytest.mark.parametrize(
    ("start_s", "seen", "offset"),
    [(5400.0, "90m", "90m"), (1200.0, "1h", "20m"), (90.5, "1h", "90s"), (0.0, "1h", "1s")],
)
def test_an_engine_may_load_for_as_long_as_the_deployment_says(name, start_s, seen, offset):
    """Before that nobody is told that it does not answer, and one that was up is told all the time. An offset is whole
    seconds, and not 0."""
    own = alerts(Settings(Overrides(thresholds={"start_time": start_s})))
    expr = next(alert.expr for alert in own if alert.name == name)
    assert f"[{seen}]) == 1 or " in expr
    assert f"[1h] offset {offset})" in expr
    assert {"up", gateway.ENGINE_STATE.name, sidecar.ENGINE_STATE.name} == promql_ast.names(expr)


def test_no_two_questions_have_one_name():
    """The second would be asked in place of the first."""
    assert len(ASKED) == len(list(questions()))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_metrics_of_alerts_stand_in_their_cases(alert):
    """Else a branch of it was never tried. Older names of a metric stand for it."""
    rules = [alert.expr, *(RECORDED[name] for name in rests_on(alert.expr))]
    read = {present(METRICS[name]) for rule in rules for name in promql_ast.names(rule) - RECORDED.keys()}
    shown = [*((case.alert, case.series) for case in (*CASES, *MORE)), *((each.alert, each.series) for each in QUIET)]
    tried = {present(METRICS[parsed(name)[0]]) for its, series in shown if its == alert.name for name in series}
    assert not read - tried


def present(metric: Metric) -> Metric:
    """The metric that took the place of this one, if any did."""
    return next((newer for newer in EVERYTHING if metric.name in newer.formerly), metric)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_bears_the_labels_of_a_real_scrape(case):
    for name, labels, values in samples(case):
        metric = METRICS[name]
        assert {"job", "instance"} <= labels.keys(), name
        assert labels.keys() - {"job", "instance", "le", "role"} <= set(metric.labels), name
        assert values == sorted(values)
        assert values


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("1x3", "1 1 1 1"),
        ("1+2x3 5", "1 3 5 7 5"),
        ("4-0.5x2", "4 3.5 3"),
        ("6e9x1 _ 0", "6000000000 6000000000 _ 0"),
        ("1 _x2 stale", "1 _ _ stale"),
    ],
)
def test_values_are_read_as_promtool_reads_them(values, expected):
    assert expected.split() == expanded(values)


def test_what_is_not_of_the_notation_is_told():
    with pytest.raises(ValueError, match="'1x' is none of"):
        expanded("1x")


# ---- on the pages of real engines

PAGES = {path.stem: exposition_parser.parse(path.read_text()) for path in sorted(GOLDEN.glob("*.prom"))}
RELEASES = sorted({name.split("-")[0] for name in PAGES})

# Alerts that an engine of a release can never raise. Nothing else may be dead on any of its pages.
_SPECULATION = "drafts are counted only with --speculative-config, and none of the captured engines ran with it"
_TRANSFERS = "transfers are counted by KV connectors, and none of the captured engines ran with one"
_REFUSES = "the engine's own queue limit came with 0.30: there is nothing that could refuse"
DEAD = {
    (
        "VLLMRequestsDeferred",
        "0.10.2",
    ): "waiting by reason came with 0.20; before that nobody can tell deferred from waiting",
    ("VLLMEngineRejecting", "0.10.2"): _REFUSES,
    ("VLLMEngineRejecting", "0.20.2"): _REFUSES,
    ("VLLMAcceptanceLow", "0.10.2"): _SPECULATION,
    ("VLLMAcceptanceLow", "0.20.2"): _SPECULATION,
    ("VLLMAcceptanceLow", "0.32.0"): _SPECULATION,
    **{(alert.name, release): _TRANSFERS for alert in transfers.alerts(DEFAULTS) for release in RELEASES},
}


def is_of_vllm(sample: str) -> bool:
    return sample.startswith("vllm:")


def whole(expr: str) -> list[str]:
    """An expression and the recordings that it rests on: all of them must have an answer."""
    return [expr, *(RECORDED[name] for name in sorted(rests_on(expr)))]


@pytest.mark.parametrize("name", PAGES)
def test_no_alert_is_dead_on_a_page_of_a_real_engine(name):
    release = name.split("-")[0]
    dead = {
        alert.name
        for alert in ALERTS
        for expr in whole(alert.expr)
        if not promql_ast.answers(expr, PAGES[name], is_of_vllm)
    }
    assert {alert for alert, of in DEAD if of == release} == dead


@pytest.mark.parametrize(("alert", "release"), DEAD, ids=" on ".join)
def test_dead_metrics_have_a_catalogue_reason(alert, release):
    """What is dead is dead for a reason that the catalogue knows."""
    read = {METRICS[name] for expr in whole(BY_NAME[alert].expr) for name in promql_ast.names(expr) if is_of_vllm(name)}
    assert any(not metric.lives_in(release) or metric.needs for metric in read)


@pytest.mark.parametrize("release", RELEASES)
def test_every_selector_finds_its_series(release):
    """Not only some branch of an expression: each of them, under the present or an older name, with the values it asks
    for."""
    pages = [PAGES[name] for name in PAGES if name.startswith(f"{release}-")]
    blind = {
        METRICS[read.name]
        for rule in (*ALERTS, *RECORDINGS)
        for read in promql_ast.reads(rule.expr)  # type: ignore[attr-defined]
        if is_of_vllm(read.name) and not any(promql_ast.answers(alike(read), one, is_of_vllm) for one in pages)
    }
    assert not {metric.name for metric in blind if metric.lives_in(release) and not metric.needs}


def alike(read: promql_ast.SelectorUse) -> str:
    """The selector under each name that its metric has had."""
    metric, where = (
        present(METRICS[read.name]),
        ", ".join(f"{label}{op}{json.dumps(value)}" for label, op, value in read.matchers),
    )
    part = next(read.name.removeprefix(name) for name in metric.names if read.name.startswith(name))
    return " or ".join(f"{name}{part}{{{where}}}" for name in metric.names)


@pytest.mark.parametrize("name", PAGES)
def test_a_latency_objective_lies_on_a_bound_that_the_page_has(name):
    """Anything else has no series, and the alert would never fire."""
    within = {"ttft": "vllm:time_to_first_token_seconds", "inter_token": "vllm:inter_token_latency_seconds"}
    for objective in slo.default_objectives().objectives:
        if objective.latency:
            bounds = {float(labels["le"]) for labels, _ in PAGES[name].of(f"{within[objective.latency]}_bucket")}
            assert objective.within_s in bounds
