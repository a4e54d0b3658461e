"""GenAI metrics of request records: names, units, attributes, bounds, and sums that are those of the sidecar's own
counters."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import defaultdict

import msgspec
import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from prometheus_client.parser import text_string_to_metric_families

from exporters.requests.bounded_names import OTHER, BoundedNames
from exporters.requests.record import RequestRecord, timestamp, to_line
from exporters.sidecar import Sidecar
from exporters.sidecar_config import SidecarConfig
from exporters.tracing import collector as collector_module
from exporters.tracing.collector import Attempt
from exporters.tracing.config import OtlpConfig
from exporters.tracing.genai_metrics import GenAiMetrics
from tests.support.real_collector import http_server, plain_json
from tests.support.wait import eventually, until

ENDED_S = 1778578201.5
FULL = RequestRecord(
    request_id="a", ts="2026-05-12T09:30:01.500Z", team="search", model="qwen", route="/v1/chat/completions",
    stream=True, prompt_tokens=100, completion_tokens=20, ttft_ms=120.0, tpot_ms=8.0, e2e_ms=1250.0, status=200,
    finish_reason="stop", outcome="ok",
)  # fmt: skip
CONFIG = OtlpConfig(endpoint="http://127.0.0.1:1", metrics=True)
DURATION, TTFT = "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token"
TPOT, TOKENS = "gen_ai.server.time_per_output_token", "gen_ai.client.token.usage"
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "qwen"}
ANSWERED = {**CHAT, "gen_ai.response.model": "qwen"}
# Bounds as the conventions advise them, docs/gen-ai/gen-ai-metrics.md.
BOUNDS = {
    DURATION: (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    TTFT: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    TPOT: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    TOKENS: (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864),
}


def record(**changes: object) -> RequestRecord:
    return msgspec.structs.replace(FULL, **changes)


class Kept(MetricExporter):
    """Stands for the SDK's exporter: keeps what it is given."""

    data: MetricsData | None = None

    def export(self, metrics_data, timeout_millis=0, **_):
        self.data = metrics_data
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self, timeout_millis=0, **_):
        pass


def told(*records: RequestRecord, models: BoundedNames | None = None, since_s: float = 0.0) -> dict[str, list]:
    """Data points by metric, after these records."""
    exporter = Kept()
    metrics = GenAiMetrics(CONFIG, "9", since_s, models or BoundedNames(("qwen",), 50), lambda *_: exporter)
    metrics.start()
    metrics.add_all(records)
    metrics.stop()
    found = (
        [m for r in exporter.data.resource_metrics for s in r.scope_metrics for m in s.metrics] if exporter.data else []
    )
    return {metric.name: list(metric.data.data_points) for metric in found}


def attributes(points: list) -> list[dict]:
    return [dict(point.attributes) for point in points]


def test_a_record_is_told_under_the_names_of_the_conventions():
    points = told(FULL)
    assert BOUNDS == {name: points[name][0].explicit_bounds for name in points}
    sums = {
        (name, point.attributes.get("gen_ai.token.type")): point.sum for name, many in points.items() for point in many
    }
    assert {
        (DURATION, None): 1.25,
        (TTFT, None): 0.12,
        (TPOT, None): 0.008,
        (TOKENS, "input"): 100,
        (TOKENS, "output"): 20,
    } == sums
    for name in (DURATION, TTFT, TPOT):
        assert [ANSWERED] == attributes(points[name])
    assert [{**ANSWERED, "gen_ai.token.type": kind} for kind in ("input", "output")] == attributes(points[TOKENS])


def test_what_a_record_does_not_say_is_not_recorded():
    assert {} == told(RequestRecord(request_id="a"))
    only = told(RequestRecord(request_id="a", e2e_ms=5.0))
    assert {DURATION: [{"gen_ai.operation.name": "request", "gen_ai.provider.name": "vllm"}]} == {
        name: attributes(p) for name, p in only.items()
    }


@pytest.mark.parametrize(
    ("ended", "error"),
    [
        ({"outcome": "upstream_error", "reason": "engine_error"}, "engine_error"),
        ({"outcome": "timeout", "reason": None}, "_OTHER"),
        ({"outcome": "rejected", "reason": "team_limit"}, "team_limit"),
        ({"outcome": "client_abort", "reason": "client_hangup"}, None),
        ({"outcome": None, "status": 500}, "_OTHER"),
    ],
)
def test_an_error_is_an_attribute_of_the_duration_alone(ended, error):
    points = told(record(**ended))
    (duration,), (ttft,) = attributes(points[DURATION]), attributes(points[TTFT])
    assert error == duration.get("error.type")
    assert "error.type" not in ttft
    if ended["outcome"]:
        assert CHAT == ttft, "no model answered to the end"


def test_an_adapter_is_what_answers():
    (point,) = attributes(told(record(adapter="sql"))[DURATION])
    assert {**CHAT, "gen_ai.response.model": "sql"} == point


def test_names_that_a_client_makes_up_make_no_series():
    """A model without a row in the counters is counted with the others, as it is there."""
    many = [
        record(model=f"m{n}", route=f"/v1/x{n}", adapter=f"a{n}", outcome="ok" if n % 2 else "timeout", reason=f"r{n}")
        for n in range(1000)
    ]
    points = told(*many, record())
    assert {"qwen", OTHER} == {one["gen_ai.request.model"] for one in attributes(points[DURATION])}
    assert 21 == len({one["gen_ai.operation.name"] for one in attributes(points[DURATION])}), "20 and those beyond"
    assert 40 == len({one["error.type"] for one in attributes(points[DURATION]) if "error.type" in one}), (
        "39 and _OTHER"
    )
    assert 52 == len({one.get("gen_ai.response.model") for one in attributes(points[DURATION])} - {None}), (
        "50, those beyond, and qwen"
    )
    assert 1001 == sum(point.count for point in points[DURATION])


def test_a_team_is_no_attribute_and_history_is_left_out():
    points = told(record(team="a"), record(team="b"), record(ts="2026-05-12T09:30:01.499Z"), since_s=ENDED_S)
    assert [2] == [point.count for point in points[DURATION]]


def test_metrics_are_off_unless_they_are_switched_on():
    assert Sidecar(SidecarConfig(otlp=OtlpConfig(endpoint="http://127.0.0.1:1"))).genai_metrics is None
    assert Sidecar(SidecarConfig(otlp=CONFIG)).genai_metrics is not None


def test_hanging_collector_delays_neither_records_nor_end(monkeypatch, caplog):
    """A collector that does not answer holds up neither records nor the end."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setattr("exporters.tracing.genai_metrics.SHUTDOWN_FLUSH_S", 0.1)
    monkeypatch.setattr(collector_module, "EXPORT_TIMEOUT_S", 0.3)
    release = threading.Event()
    answered: list[int] = []
    with http_server(lambda _: (release.wait(60), answered.append(1), (200, {}, b""))[2]) as (address, got):
        metrics = GenAiMetrics(OtlpConfig(endpoint=address, metrics=True), "9", 0, BoundedNames())
        metrics.start()
        metrics.add_all([FULL])
        with caplog.at_level(logging.INFO):
            eventually(lambda: len(got) >= 3)
            metrics.add_all([FULL] * 1000)
        metrics.stop()
        assert [] == answered
        release.set()
    [line] = [one.getMessage() for one in caplog.records if one.name == "vllm_watch.otlp"]
    assert re.fullmatch(rf"{address} .* metrics \(timeout\); .* 0\.3 s", line)


def test_a_collector_that_comes_back_has_lost_nothing(monkeypatch):
    """Sums are cumulative: what one export could not deliver is in the next."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    attempts: list[Attempt] = []
    answers = iter([400, 400])
    with http_server(lambda _: (next(answers, 200), {}, b"")) as (address, got):
        metrics = GenAiMetrics(OtlpConfig(endpoint=address, metrics=True), "9", 0, BoundedNames())
        metrics._collector.observe, observe = attempts.append, metrics._collector.observe
        metrics._exporter._client._transport._session._observe = lambda one: (attempts.append(one), observe(one))  # type: ignore[attr-defined]
        metrics.start()
        metrics.add_all([FULL])
        eventually(lambda: len(got) >= 4)
        metrics.stop()
    assert ["refused", "refused", None] == [one.reason for one in attempts[:3]]


async def test_backlog_delays_a_scrape_by_one_small_batch(tmp_path):
    """Each record costs the SDK some 34 us, so less is counted at once, and the loop is free in between."""
    log = tmp_path / "requests.jsonl"
    log.write_bytes(b"".join(to_line(record(request_id=f"r{n}", ts=timestamp(time.time() + 9))) for n in range(5000)))
    sidecar = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off", otlp=CONFIG))
    await sidecar.start()
    try:
        batches: list[int] = []
        add_all = sidecar.genai_metrics.add_all
        sidecar.genai_metrics.add_all = lambda records: (batches.append(len(records)), add_all(records))
        await until(lambda: sidecar.ledger.committed_lines == 5000)
    finally:
        await sidecar.stop()
    assert 5000 == sum(batches)
    assert max(batches) < 2000, "512 KiB of these lines: a first look reads twice"


# --- a real collector


def lines(now_s: float) -> list[RequestRecord]:
    """Several models, teams, routes and ends, beside one another."""
    base = record(ts=timestamp(now_s))
    found = []
    for n in range(200):
        change: dict[str, object] = {
            "request_id": f"r{n}",
            "model": ("qwen", "llama")[n % 2],
            "team": f"team-{n % 5}",
            "prompt_tokens": n,
        }
        change |= {"completion_tokens": 2 * n, "ttft_ms": 1.5 * n, "tpot_ms": n / 7, "e2e_ms": 10.0 * n}
        if n % 10 == 0:
            change |= {"outcome": "timeout", "reason": "decode_timeout", "finish_reason": "error"}
        if n % 10 == 1:
            change |= {
                "outcome": "rejected",
                "reason": "team_limit",
                "finish_reason": "rejected",
                "ttft_ms": None,
                "tpot_ms": None,
            }
            change |= {"prompt_tokens": None, "completion_tokens": None, "status": 429}
        if n % 10 == 2:
            change |= {
                "route": "/v1/embeddings",
                "stream": False,
                "ttft_ms": None,
                "tpot_ms": None,
                "completion_tokens": None,
            }
        found.append(msgspec.structs.replace(base, **change))
    return [
        *found,
        msgspec.structs.replace(
            base, request_id="x", model="made-up", outcome="rejected", reason="unknown_model", finish_reason=None
        ),
    ]


def counted(page: str) -> dict[tuple[str, str, str], float]:
    """The sidecar's own sums, by model: (what, model, sum or count or type of token)."""
    names = {"vllm_watch_e2e_seconds": DURATION, "vllm_watch_ttft_seconds": TTFT, "vllm_watch_tpot_seconds": TPOT}
    found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            model = sample.labels.get("model_name", "")
            if family.name in names and sample.name.endswith(("_sum", "_count")):
                found[names[family.name], model, sample.name.rpartition("_")[2]] += sample.value
            elif sample.name == "vllm_watch_tokens_total" and sample.labels["type"] != "cached":
                found[TOKENS, model, {"prompt": "input", "completion": "output"}[sample.labels["type"]]] += sample.value
    return dict(found)


def exported(metrics: dict[str, dict]) -> dict[tuple[str, str, str], float]:
    """The same of what arrived behind the collector."""
    found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for name, metric in metrics.items():
        for point in metric["histogram"]["dataPoints"]:
            labels = plain_json(point["attributes"])
            model = str(labels.get("gen_ai.request.model", "__unknown__"))
            if name == TOKENS:
                found[name, model, str(labels["gen_ai.token.type"])] += point["sum"]
            else:
                found[name, model, "sum"] += point["sum"]
                found[name, model, "count"] += int(point["count"])
    return dict(found)


@pytest.mark.collector
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_real_collector_gets_the_sums_that_the_sidecar_counts(protocol, collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    log = tmp_path / "requests.jsonl"
    log.touch()
    endpoint = f"http://{getattr(collector, protocol)}"
    sidecar = Sidecar(
        SidecarConfig(
            requests_log=(str(log),), gpu="off", otlp=OtlpConfig(endpoint=endpoint, protocol=protocol, metrics=True)
        )
    )
    await sidecar.start()
    try:
        half = lines(time.time() + 1)
        log.write_bytes(b"".join(map(to_line, half[:100])))
        await until(lambda: DURATION in collector.arrived.metrics())
        with log.open("ab") as writer:
            writer.write(b"".join(map(to_line, half[100:])))
        await until(lambda: sidecar.ledger.committed_lines == len(half))
        mine = counted(sidecar.page())
        assert {"qwen", "llama", OTHER} == {model for _, model, _ in mine}
        await until(
            lambda: (
                len(half)
                == sum(
                    v for k, v in exported(collector.arrived.metrics()).items() if k[0] == DURATION and k[2] == "count"
                )
            )
        )
    finally:
        await sidecar.stop()
    metrics = collector.arrived.metrics()
    assert {DURATION: "s", TTFT: "s", TPOT: "s", TOKENS: "{token}"} == {
        name: metric["unit"] for name, metric in metrics.items()
    }
    assert {2} == {metric["histogram"]["aggregationTemporality"] for metric in metrics.values()}, "cumulative"
    assert mine == pytest.approx(exported(metrics), rel=1e-12)
    for name, bounds in BOUNDS.items():
        assert {bounds} == {tuple(point["explicitBounds"]) for point in metrics[name]["histogram"]["dataPoints"]}
    durations = [plain_json(point["attributes"]) for point in metrics[DURATION]["histogram"]["dataPoints"]]
    assert {"chat", "embeddings"} == {one["gen_ai.operation.name"] for one in durations}
    assert {None, "decode_timeout", "team_limit", "unknown_model"} == {one.get("error.type") for one in durations}
    assert {"qwen", "llama", OTHER} == {one["gen_ai.request.model"] for one in durations}
    keys = {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "error.type",
    }
    assert keys == {key for one in durations for key in one}
    (resource,) = {tuple(sorted(one.items())) for one in collector.arrived.metric_resources()}
    assert {"service.name": "vllm-watch-gateway", "telemetry.sdk.name": "opentelemetry"}.items() <= dict(
        resource
    ).items()


@pytest.mark.collector
async def test_restarted_collector_gets_what_it_missed(collector, tmp_path, monkeypatch):
    """A collector that is killed and comes back gets what it missed."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    log = tmp_path / "requests.jsonl"
    log.touch()
    config = OtlpConfig(endpoint=f"http://{collector.http}", metrics=True)
    sidecar = Sidecar(SidecarConfig(requests_log=(str(log),), gpu="off", otlp=config))
    await sidecar.start()
    try:
        written = lines(time.time() + 1)
        log.write_bytes(b"".join(map(to_line, written[:50])))
        await until(lambda: DURATION in collector.arrived.metrics())
        collector.end()
        with log.open("ab") as writer:
            writer.write(b"".join(map(to_line, written[50:])))
        await until(lambda: sidecar.genai_metrics._collector.reason == "unavailable")
        await until(lambda: len(written) == sidecar.ledger.committed_lines)
        collector.start()
        await until(lambda: counted(sidecar.page()) == pytest.approx(exported(collector.arrived.metrics()), rel=1e-12))
    finally:
        await sidecar.stop()
