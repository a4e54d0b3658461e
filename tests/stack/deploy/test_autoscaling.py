"""`vllm-watch kubernetes autoscale`: objects that KEDA and Kubernetes declare, a query with exactly one series, and
values that agree with the capacity worksheet."""

from __future__ import annotations

import copy
import http.server
import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from alerts.export import AlertOptions
from alerts.settings import DEFAULTS, Overrides, Settings
from stack import cli
from stack.capacity.command import CapacityOptions
from stack.capacity.plan import steady_rate
from stack.capacity.worksheet import Worksheet
from stack.deploy.kubernetes import autoscaling, objects, scaling_study
from stack.deploy.kubernetes.autoscaling import LONGEST_PERIOD_S, AutoscaleOptions, Autoscaling
from tests.support import published_types, simulated_day
from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "tests/golden/configs/Llama-3.1-8B-Instruct.json"
PAGE = ROOT / "tests/golden/0.32.0-preempt-under-load.prom"
USUAL = AutoscaleOptions(deployment="vllm", least=2, most=6, cold_start_s=240)
MUCH = AutoscaleOptions(
    deployment="vllm-qwen", kind="StatefulSet", namespace="llm", cluster="east", least=1, most=1, cold_start_s=1800,
    prometheus="https://thanos.example.org/prometheus", operator_labels=(("release", "kps"),), target=0.5,
)  # fmt: skip
SHEET = Worksheet(
    name="chat", p50_prompt_tokens=1500, p95_prompt_tokens=4000, p50_output_tokens=300, p95_output_tokens=700,
    requests_per_second=8.0, ttft_p95=0.5, itl_p95=0.025, max_model_len=8192,
)  # fmt: skip
PLANNED = CapacityOptions(model=CONFIG, gpus=("H200",), values=SHEET, measured_per_s=4.0)


def scaling(
    options: AutoscaleOptions = USUAL, model: str = "chat", seqs: int = 64, settings: Settings = DEFAULTS
) -> Autoscaling:
    return autoscaling.derive(options, model, seqs, None, None, settings)


def made(found: Autoscaling) -> dict[str, dict[str, Any]]:
    """The files as objects, by name."""
    return {name: yaml.safe_load(text) for name, text in autoscaling.files(found).items()}


EACH = pytest.mark.parametrize(
    "found", [scaling(), scaling(MUCH, "meta-llama/Llama-3.1-8B-Instruct")], ids=["usual", "much"]
)

# ---- objects


def test_objects_match_the_published_types(part, tmp_path):
    both, node = [made(scaling()), made(scaling(MUCH, "meta-llama/Llama-3.1-8B-Instruct"))], part("node").path
    for name, package, folder in (
        ("keda", "@kubernetes-models/keda", part("keda-schema").path),
        ("rule", "@kubernetes-models/prometheus-operator", part("operator-schema").path),
    ):
        found = [files[f"{name}.yaml"] for files in both]
        assert [] == published_types.mistakes(found, package, folder, node, tmp_path / name)
    for files in both:
        kubernetes_validate.validate(files["hpa.yaml"], "1.37.0", strict=True)


def test_what_keda_would_refuse_does_not_pass(part, tmp_path):
    """Wrong values are the validators' to find, an unknown field the types'."""
    wrong = []
    for path, value in (
        ("spec.fallback.behavior", "keepReplicas"),
        ("spec.maxReplicaCount", "6"),
        ("spec.triggers.0.metricType", 3),
        ("spec.coolDownPeriod", 300),
    ):
        wrong.append(copy.deepcopy(made(scaling())["keda.yaml"]))
        *parents, last = path.split(".")
        place: Any = wrong[-1]
        for key in parents:
            place = place[int(key) if key.isdecimal() else key]
        place[last] = value
    folder, node = part("keda-schema").path, part("node").path
    told = published_types.mistakes(wrong, "@kubernetes-models/keda", folder, node, tmp_path / "types")
    for field in ("/spec/fallback/behavior", "/spec/maxReplicaCount", "/spec/triggers/0/metricType", "coolDownPeriod"):
        assert any(field in each for each in told), field


def test_every_word_of_the_files_is_filled_in():
    for path in sorted((ROOT / "stack/deploy/kubernetes/base/autoscaling").glob("*.yaml")):
        words = set(re.findall(r"\$([A-Z]+)", path.read_text()))
        with pytest.raises(KeyError):
            objects.load_one(f"autoscaling/{path.name}", **dict.fromkeys(sorted(words)[1:]))
    assert not re.search(r"\$[A-Z]", "".join(autoscaling.files(scaling(MUCH)).values()))


def test_empty_result_is_an_error_and_keeps_the_replicas():
    spec = made(scaling())["keda.yaml"]["spec"]
    (trigger,) = spec["triggers"]
    assert ("false", "AverageValue") == (trigger["metadata"]["ignoreNullValues"], trigger["metricType"])
    assert {"failureThreshold": 3, "replicas": 2, "behavior": "currentReplicasIfHigher"} == spec["fallback"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values())


@EACH
def test_both_objects_scale_alike(found):
    keda, hpa = (made(found)[f"{name}.yaml"]["spec"] for name in ("keda", "hpa"))
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    behavior = keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == hpa["behavior"]
    for direction in behavior.values():
        assert [("Pods", 1)] == [(policy["type"], policy["value"]) for policy in direction["policies"]]
    assert found.policy.cold_start_s == behavior["scaleUp"]["policies"][0]["periodSeconds"] <= LONGEST_PERIOD_S
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= max(300, found.policy.cold_start_s)
    target = hpa["metrics"][0]["external"]["target"]
    threshold = keda["triggers"][0]["metadata"]["threshold"]
    assert ("AverageValue", float(threshold)) == (target["type"], int(target["averageValue"].removesuffix("m")) / 1000)


def test_adapter_and_autoscaler_name_the_same_metric_and_series():
    found = scaling(MUCH, "qwen")
    files = made(found)
    (rule,) = files["prometheus-adapter.yaml"]["rules"]["external"]
    assert files["hpa.yaml"]["spec"]["metrics"][0]["external"]["metric"]["name"] == rule["name"]["as"]
    filled = rule["metricsQuery"].replace("<<.Series>>", autoscaling.RECORD)
    asked = filled.replace("<<.LabelMatchers>>", 'namespace="llm"')  # what the adapter puts there
    assert set(re.findall(r'\w+="[^"]*"', asked)) == set(re.findall(r'\w+="[^"]*"', autoscaling.query(found)))
    assert files["rule.yaml"]["spec"]["groups"][0]["rules"][-1]["record"] in rule["seriesQuery"]


# ---- values


def test_target_leaves_headroom_for_random_arrivals():
    assert pytest.approx(steady_rate(1.0, 1.0, 64) / 64, abs=0.01) == scaling().policy.target
    few, many = (scaling(seqs=seqs).policy.target for seqs in (4, 500))
    assert few < 0.5 < 0.9 == many  # kv_cache_usage


def test_target_is_never_above_the_derived_cache_threshold():
    own = Settings(Overrides(thresholds={"kv_cache_usage": 0.72}))
    assert 0.72 == scaling(seqs=500, settings=own).policy.target


def test_values_follow_from_the_worksheet():
    """8 requests a second of 9 s are 72 at once. A replica that was measured at 4 a second takes 3.2, or 28 at once."""
    options = AutoscaleOptions(deployment="vllm", cold_start_s=240)
    policy = scaling_study.study(options, PLANNED, AlertOptions()).scaling.policy
    assert (28, 1, 4) == (policy.slots, policy.least, policy.most)
    assert policy.most == policy.wanted(72 / policy.slots, policy.most)


def test_cold_start_that_was_not_measured_is_the_threshold():
    found = scaling(replace(USUAL, cold_start_s=None))
    assert 600 == found.policy.cold_start_s
    assert any("--cold-start" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max", "6"], "--max-num-seqs is missing"),
        (["--max-num-seqs", "64"], "--max is missing"),
        (["--max-num-seqs", "64", "--max", "2", "--min", "3"], "change --min or --max"),
        (["--max-num-seqs", "64", "--max", "6", "--cold-start", "40m"], "the longest period"),
        (["--max-num-seqs", "64", "--max", "6", "--prometheus", "prometheus"], "--prometheus should be"),
        (["--max-num-seqs", "64", "--max", "6", "--namespace", "A"], "--namespace 'A'"),
        (["--model", str(CONFIG), "--gpu", "H200", "--gpu", "H100", "--rate", "8"], "lengths"),
        (["--model", str(CONFIG), "--gpu", "H200", "--gpu", "H100"], "--gpu: "),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, tmp_path):
    done = command(tmp_path / "out", *arguments)
    assert (2, 1) == (done.exit_code, len(done.stderr.strip().splitlines()[-1:]))
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_model_must_be_named(tmp_path):
    arguments = ["--out", str(tmp_path), "--deployment", "vllm", "--max-num-seqs", "8", "--max", "2"]
    done = CliRunner().invoke(cli.main, ["kubernetes", "autoscale", *arguments])
    assert "--served-model-name is missing" in done.stderr


def command(out: Path, *arguments: str) -> Result:
    usual = ["--out", str(out), "--deployment", "vllm", "--served-model-name", "chat"]
    return CliRunner().invoke(cli.main, ["kubernetes", "autoscale", *usual, *arguments])


# ---- a recorded day


@pytest.fixture(scope="module")
def day(tmp_path_factory) -> Path:
    log: Path = tmp_path_factory.mktemp("day") / "requests.jsonl"
    with log.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in simulated_day.records())
    return log


def test_replayed_day(day, tmp_path):
    """Half of the replica hours of the maximum, and nearly all first tokens within the target."""
    arguments = ["--model", str(CONFIG), "--gpu", "L4", "--max-model-len", "8192", "--cold-start", "4m", "--json"]
    done = command(tmp_path / "out", "--log", str(day), *arguments)
    assert 0 == done.exit_code, done.output
    told = json.loads(done.stdout)
    policy, (scaled, most, least) = told["policy"], told["replay"]["rows"]
    assert ["1 to 4", "always 4", "always 1"] == [row["replicas"] for row in told["replay"]["rows"]]
    assert (16, 1, 4) == (policy["slots"], policy["least"], policy["most"])
    assert pytest.approx(96, rel=0.01) == most["hours"]
    assert pytest.approx(24, rel=0.01) == least["hours"]
    assert scaled["hours"] < 0.55 * most["hours"]
    assert scaled["within"] > 0.999 > 0.5 > least["within"]
    assert 2.5 == told["replay"]["within_s"]


# ---- queries, on promtool and on a real Prometheus


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {f"{name}{{{inner}}}": values}


def engine(
    running: float, waiting: float, cache: float, instance: str = "a:8000", model_name: str = "chat", **more: str
) -> dict[str, str]:
    labels = {"namespace": "vllm", "job": "vllm", "instance": instance, "model_name": model_name, "engine": "0", **more}
    return {
        **series("vllm:num_requests_running", f"{running}x20", **labels),
        **series("vllm:num_requests_waiting", f"{waiting}x20", **labels),
        **series("vllm:kv_cache_usage_perc", f"{cache}x20", **labels),
    }


def queued(*waiting: float, namespace: str = "vllm") -> dict[str, str]:
    """Requests that wait in the gateway, by team."""
    found: dict[str, str] = {}
    for number, value in enumerate(waiting):
        found |= series("vllm_watch_gateway_waiting_requests", f"{value}x20", namespace=namespace, team=f"t{number}")
    return found


def result(promtool: Path, folder: Path, found: Autoscaling, shown: Mapping[str, str], at: str = "10m") -> list[float]:
    """Return the values of all series of the query, as promtool's own Prometheus computes them from the rules."""
    rules = made(found)["rule.yaml"]["spec"]
    (folder / "rule.yaml").write_text(json.dumps(rules))
    wrong = {"expr": autoscaling.query(found), "eval_time": at, "exp_samples": [{"labels": "{none='1'}", "value": -1}]}
    test = {
        "rule_files": ["rule.yaml"], "evaluation_interval": "30s",
        "tests": [{"interval": "30s", "promql_expr_test": [wrong],
            "input_series": [{"series": name, "values": values} for name, values in shown.items()]}],
    }  # fmt: skip
    (folder / "test.yaml").write_text(json.dumps(test))
    done = subprocess.run(
        [promtool, "test", "rules", folder / "test.yaml"], capture_output=True, text=True, check=False
    )
    got = re.search(r"got:(.*)", done.stdout + done.stderr, re.DOTALL)
    assert got, done.stdout + done.stderr
    return [float(value) for value in re.findall(r"[\d.]+E[+-]\d+", got[1])]


CASES: dict[str, tuple[dict[str, str], list[float]]] = {
    "slots of two engines": ({**engine(32, 0, 0.1), **engine(16, 48, 0.1, "b:8000")}, [0.5 + 1.0]),
    "a full cache counts more than free slots": (engine(16, 16, 0.9), [1.8]),
    "an engine without requests": (engine(0, 0, 0.0), [0.0]),
    "an engine without running requests": (engine(0, 8, 0.3), [0.125]),
    "the gateway's queue of all teams": ({**engine(32, 0, 0.1), **queued(20, 12)}, [0.5 + 0.5]),
    "the queue is divided as the requests in engines": (
        {**engine(24, 0, 0.1), **engine(8, 0, 0.1, "b:8000", "other"), **queued(32)}, [0.375 + 0.375],
    ),
    "another namespace is not counted": (
        {**engine(32, 0, 0.1), **engine(64, 0, 0.1, namespace="else"), **queued(32, namespace="else")}, [0.5],
    ),
    "engines of a data-parallel group": (
        {**engine(16, 0, 0.1), **engine(16, 0, 0.3, engine="1")}, [0.5],
    ),
    "no engine": ({}, []),
    "another model alone": (engine(9, 0, 0.1, model_name="other"), []),
    "only the gateway": (queued(32), []),
}  # fmt: skip


@pytest.mark.prometheus
@pytest.mark.parametrize(("shown", "expected"), CASES.values(), ids=CASES)
def test_query_has_one_series_or_none(shown, expected, part, tmp_path):
    assert pytest.approx(expected) == result(part("promtool").path, tmp_path, scaling(), shown)


@pytest.mark.prometheus
def test_cluster_selects_one_of_several(part, tmp_path):
    shown = {**engine(32, 0, 0.1, cluster="east"), **engine(64, 0, 0.1, cluster="west")}
    east = scaling(replace(USUAL, cluster="east"))
    assert [0.5] == result(part("promtool").path, tmp_path, east, shown)


@pytest.mark.prometheus
def test_query_is_empty_after_the_last_engine_is_gone(part, tmp_path):
    shown = {name: values.replace("x20", "x4 stale") for name, values in engine(32, 0, 0.1).items()}
    assert [0.5] == result(part("promtool").path, tmp_path, scaling(), shown, "3m")
    assert [] == result(part("promtool").path, tmp_path, scaling(), shown, "9m")


@contextmanager
def page_server(page: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.prometheus
def test_real_prometheus_answers_as_keda_asks(part, free_port, tmp_path):
    """Two scrapes of a captured page under load: KEDA's request has exactly one number."""
    page = PAGE.read_bytes()
    (model,) = set(re.findall(rb'vllm:num_requests_running{[^}]*model_name="([^"]+)"', page))
    counts = re.findall(rb"^vllm:num_requests_(?:running|waiting){[^}]*} (\S+)", page, re.MULTILINE)
    (cache,) = re.findall(rb"^vllm:kv_cache_usage_perc{[^}]*} (\S+)", page, re.MULTILINE)
    running, waiting = map(float, counts)
    found = scaling(model=model.decode())
    files = made(found)
    rules, query = files["rule.yaml"]["spec"], files["keda.yaml"]["spec"]["triggers"][0]["metadata"]["query"]
    rules["groups"][0]["interval"] = "200ms"
    (tmp_path / "rule.yaml").write_text(json.dumps(rules))
    with page_server(page) as one, page_server(page) as other:
        jobs = [{"job_name": "vllm", "static_configs": [{"targets": [one, other], "labels": {"namespace": "vllm"}}]}]
        settings = {"global": {"scrape_interval": "200ms"}, "rule_files": ["rule.yaml"], "scrape_configs": jobs}
        (tmp_path / "prometheus.yml").write_text(json.dumps(settings))
        port = free_port()
        command = [part("prometheus").path, f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
        with (tmp_path / "prometheus.log").open("w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

        def asked() -> list[float]:
            words = urllib.parse.urlencode({"query": query})
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}", timeout=60) as reply:
                return [float(row["value"][1]) for row in json.load(reply)["data"]["result"]]

        held = running + waiting
        expected = 2 * max(held / 64, float(cache) * held / running)
        try:
            eventually(lambda: asked() == [pytest.approx(expected)], what=f"one series of {expected}")
        finally:
            server.terminate()
            server.wait(60)
