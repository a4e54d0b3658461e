"""An hour of 20 teams, three models and six engines as OpenMetrics text, for pictures of the dashboards and tests of
what they show.

Requests are drawn at random from a fixed seed and counted by the sidecar's own code (Traffic, gpu.families) and
exposition; the engines' latency families follow from the same requests. Everything else that engines and their watchers
show comes from panel_fixtures."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from exporters import exposition
from exporters.accounting.gpu_use import IDLE
from exporters.catalogue import attributed, bounds, dcgm, gateway, sidecar, vllm
from exporters.catalogue import gpu as gpu_families
from exporters.catalogue.metric import Kind, Metric, Unit
from exporters.catalogue.producers import Component, shown_by
from exporters.exposition import Distribution, Sample
from exporters.gpu import series as gpu
from exporters.gpu.readings import GpuReading
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord
from exporters.source_status import SourceStatus
from tests.support.panel_fixtures import BY_SAMPLE, HOUR_S, Line, fleet

TEAMS = (
    "search", "support", "coding", "analytics", "translation", "marketing", "legal", "finance", "sales", "recruiting",
    "logistics", "research",
    "security", "platform", "mobile", "payments", "compliance", "procurement", "quality-assurance",
    "data-science-platform-experiments",
)  # fmt: skip
MODELS = ("model-0", "model-1", "model-2")  # as panel_fixtures.fleet calls them
ENGINES = 6
LOG = "/var/lib/containers/storage/volumes/vllm-watch-gateway-logs/_data/requests.jsonl"
PRICE_PER_HOUR, WATTS, IDLE_WATTS = 2.5, 620.0, 90.0
BURST = (0.55, 0.7)  # of the hour: search sends four times as much, and is refused above its limit

_TIMES = (
    (vllm.TIME_TO_FIRST_TOKEN, bounds.TTFT_S), (vllm.INTER_TOKEN_LATENCY, bounds.INTER_TOKEN_S),
    (vllm.REQUEST_TIME_PER_OUTPUT_TOKEN, bounds.INTER_TOKEN_S), (vllm.E2E_REQUEST_LATENCY, bounds.REQUEST_S),
    (vllm.REQUEST_QUEUE_TIME, bounds.REQUEST_S), (vllm.REQUEST_PREFILL_TIME, bounds.REQUEST_S),
    (vllm.REQUEST_DECODE_TIME, bounds.REQUEST_S), (vllm.REQUEST_INFERENCE_TIME, bounds.REQUEST_S),
)  # fmt: skip
_COUNTS = (vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS, vllm.PREFIX_CACHE_QUERIES, vllm.PREFIX_CACHE_HITS)
_GAUGES = (
    vllm.NUM_REQUESTS_RUNNING,
    vllm.NUM_REQUESTS_WAITING,
    vllm.NUM_REQUESTS_WAITING_BY_REASON,
    vllm.KV_CACHE_USAGE,
)
_MONEY = (attributed.COST, attributed.API_COST, sidecar.COST_BUDGET, sidecar.GPU_COST)
_SIMULATED = {
    *(metric for metric, _ in _TIMES), *_COUNTS, *_GAUGES, vllm.REQUEST_SUCCESS, *attributed.ATTRIBUTED,
    *gpu_families.GPU, *dcgm.DCGM, gateway.REQUESTS, gateway.INFLIGHT, gateway.RUNNING, gateway.WAITING,
    gateway.SLOTS_HELD, gateway.WAIT_ESTIMATE, gateway.SLOTS, gateway.SLOTS_LIMIT, gateway.REJECTED, gateway.ATTEMPTS,
    sidecar.REQUESTS,
    sidecar.REASONS, sidecar.FINISHES, sidecar.TOKENS, sidecar.ESTIMATED_TOKENS, sidecar.TTFT, sidecar.TPOT,
    sidecar.E2E, sidecar.QUEUE,
    sidecar.ENGINE_QUEUE, sidecar.CACHE_LOOKUPS, sidecar.TTFT_OVERHEAD, sidecar.TTFT_NEGATIVE, sidecar.TEAMS,
    sidecar.TEAMS_OVERFLOW,
    sidecar.MODELS_OVERFLOW, sidecar.SOURCE_UP, sidecar.SOURCE_LAST_SUCCESS, sidecar.SOURCE_AGE,
    sidecar.SOURCE_DURATION,
    sidecar.SOURCE_ERRORS,
}  # fmt: skip
_SIMULATED_SAMPLES = {sample for metric in _SIMULATED for sample in metric.samples}
_SILENT = {sample for metric in _MONEY for sample in metric.samples}
_STILL = (  # counters of faults, which a service that is well does not raise
    sidecar.LOG_BAD_LINES,
    sidecar.LOG_FAULTS,
    sidecar.LOG_DUPLICATES,
    sidecar.LOG_AHEAD,
    sidecar.LOG_UNTIMED,
    sidecar.SPANS_DROPPED,
    sidecar.LISTENER_REJECTED,
    gateway.LISTENER_REJECTED,
    gateway.LOG_ERRORS,
    gateway.LOG_LOST,
    gateway.UNREADABLE,
    vllm.CORRUPTED_REQUESTS,
    vllm.ADMISSION_REJECTIONS,
)


@dataclass(slots=True)
class _Tally:
    """Counters and histograms by family and labels."""

    counts: dict[tuple[Metric, tuple[tuple[str, str], ...]], float] = field(default_factory=lambda: defaultdict(float))
    times: dict[tuple[Metric, tuple[tuple[str, str], ...]], tuple[tuple[float, ...], list[int], list[float]]] = field(
        default_factory=dict
    )

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        self.counts[metric, tuple(labels.items())] += amount

    def observe(self, metric: Metric, limits: tuple[float, ...], value: float, times: int = 1, **labels: str) -> None:
        _, counts, total = self.times.setdefault(
            (metric, tuple(labels.items())), (limits, [0] * (len(limits) + 1), [0.0])
        )
        counts[bisect_left(limits, value)] += times
        total[0] += value * times

    def samples(self) -> Iterator[Sample]:
        yield from ((metric, dict(labels), value) for (metric, labels), value in self.counts.items())
        for (metric, labels), (limits, counts, total) in self.times.items():
            yield metric, dict(labels), Distribution(limits, counts, total[0])


@dataclass
class ReplayedHour:
    """The hour. gpu, prices: whether the host has GPUs, and the sidecar prices. per_second: requests that all teams
    send."""

    gpu: bool = True
    prices: bool = True
    every_s: int = 15
    per_second: float = 6.0
    seed: int = 7

    def text(self, end_s: int) -> Iterator[str]:
        """OpenMetrics text of the hour that ends at that time."""
        began_s = end_s - HOUR_S
        series: dict[str, list[str]] = {}
        for at_s, job, samples in self._simulated(began_s):
            for line in exposition.render(samples).splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    series.setdefault(_labelled(name, job), []).append(f"{value} {at_s}")
        for line in self._others():
            labels = ",".join(f'{name}="{value}"' for name, value in line.labels.items())  # type: ignore[attr-defined]
            key = f"{line.name}{{{labels}}}"  # type: ignore[attr-defined]
            series[key] = [f"{value:.12g} {at}" for at, value in self._values(line, began_s)]
        # samples of a name and of a series stand together
        for key in sorted(series, key=lambda key: (key.partition("{")[0], key)):
            yield "".join(f"{key} {point}\n" for point in series[key])
        yield "# EOF\n"

    # What is not simulated: from the fixtures of the panels' tests

    def _others(self) -> Iterator[Line]:
        for line in fleet(ENGINES, len(MODELS)).lines:
            metric = BY_SAMPLE.get(line.name)
            recorded = ":" in line.name and metric is None
            if line.name in _SIMULATED_SAMPLES or line.name == "ALERTS" or recorded or line.labels.get("job") == "dcgm":
                continue
            if line.name in _SILENT and not (self.gpu and self.prices):
                continue
            labels = {**line.labels, "path": LOG} if "path" in line.labels else line.labels
            grows = 0.0 if metric in _STILL else line.grows
            yield Line(line.name, labels, line.start, grows, line.restarts, line.after, line.clock)
        yield Line("ALERTS", {"alertname": "VLLMWatchdog", "alertstate": "firing", "severity": "none"}, 1.0)

    def _values(self, line: Line, began_s: int) -> Iterator[tuple[int, float]]:
        """Values of a line whose growth, and whose level where it is load, follow the hour's ups and downs."""
        metric = BY_SAMPLE.get(line.name)
        gauge = metric is not None and metric.kind is Kind.GAUGE
        loaded = gauge and shown_by(metric) is Component.ENGINE and metric.unit in (Unit.REQUESTS, Unit.RATIO)
        zero = began_s if line.clock else 0.0
        for at in range(0, HOUR_S + 1, self.every_s):
            share = at / HOUR_S
            grown = share - 0.03 * math.sin(6 * math.pi * share)
            yield began_s + at, zero + line.start * (_load(share) if loaded else 1.0) + line.grows * grown

    # Requests, and what follows from them

    def _simulated(self, began_s: int) -> Iterator[tuple[int, str, Iterable[Sample]]]:
        rng = random.Random(self.seed)
        traffic, engines, gate, cards = (
            RequestCounters(BoundedNames(TEAMS), BoundedNames(MODELS)),
            _Tally(),
            _Tally(),
            _Tally(),
        )
        busy = dict.fromkeys(range(ENGINES), 0.0)
        sources = [SourceStatus("engine", f"vllm-{e}", up=True) for e in range(ENGINES)] + [
            SourceStatus("log", LOG, up=True),
            SourceStatus("gpu", "gpu", up=self.gpu),
        ]
        for team in TEAMS:  # from the start, so that the first request is a rise
            for model in MODELS:
                traffic.add(RequestRecord(request_id="0", team=team, model=model, outcome="ok", finish_reason="stop"))
        for at in range(0, HOUR_S + 1, self.every_s):
            load = defaultdict(float)
            for record, engine, queue_s in self._requests(rng, at / HOUR_S, at):
                traffic.add(record)
                self._follow(record, engine, queue_s, engines, gate, cards, rng)
                load[engine] += (record.e2e_ms or 0) / 1000 / self.every_s
            for source in sources:
                self._look(source, began_s + at)
            yield (
                began_s + at,
                "sidecar",
                [*traffic.samples(), *(sample for source in sources for sample in source.samples(began_s + at))],
            )
            yield began_s + at, "vllm", [*engines.samples(), *_engine_gauges(load, rng)]
            yield began_s + at, "gateway", [*gate.samples(), *_gateway_gauges(load, at / HOUR_S)]
            if self.gpu:
                for e in range(ENGINES):
                    busy[e] += min(1.0, load[e] / 4) * self.every_s
                self._idle(cards, busy, load)
                readings = [_reading(e, min(1.0, load[e] / 4), busy[e], rng) for e in range(ENGINES)]
                yield began_s + at, "sidecar", [*cards.samples(), *gpu.families(readings)]

    def _look(self, source: SourceStatus, now_s: float) -> None:
        source.tried = True
        if source.up:
            source.last_success_s, source.duration_s = now_s - 1.5, 0.004
        else:
            source.errors["no_driver"] += 1

    def _requests(self, rng: random.Random, share: float, at_s: int) -> Iterator[tuple[RequestRecord, int, float]]:
        """The requests that end within a step, each with its engine and its time in the engine's queue."""
        weights = [1 / (i + 1) ** 0.8 for i in range(len(TEAMS))]
        for i, team in enumerate(TEAMS):
            burst = 4.0 if not i and BURST[0] < share < BURST[1] else 1.0
            mean = self.per_second * self.every_s * weights[i] / sum(weights) * _load(share, i) * burst
            for n in range(_poisson(rng, mean)):
                model = (i + (rng.random() < 0.3)) % len(MODELS)
                engine = model + len(MODELS) * rng.randrange(ENGINES // len(MODELS))
                yield self._request(
                    rng,
                    f"{at_s}-{i}-{n}",
                    team,
                    model,
                    engine,
                    refused=burst > 1 and rng.random() < 0.35,
                    slow=1 + i % 4 / 3,
                )
        # a client with a key of nobody, and one that asks for a model that is not there
        for n in range(_poisson(rng, self.every_s / 20)):
            yield (
                RequestRecord(
                    request_id=f"{at_s}-k{n}",
                    outcome="rejected",
                    reason="unknown_key",
                    status=401,
                    finish_reason="rejected",
                ),
                -1,
                0.0,
            )
        for n in range(_poisson(rng, self.every_s / 40)):
            asked: dict[str, Any] = {
                "team": "mobile",
                "model": "gpt-4",
                "outcome": "rejected",
                "reason": "bad_request",
                "status": 404,
            }
            yield RequestRecord(request_id=f"{at_s}-m{n}", **asked), -1, 0.0

    def _request(
        self, rng: random.Random, name: str, team: str, model: int, engine: int, refused: bool, slow: float
    ) -> tuple[RequestRecord, int, float]:
        who: dict[str, Any] = {
            "request_id": name,
            "team": team,
            "model": MODELS[model],
            "route": "/v1/chat/completions",
            "stream": True,
        }
        if refused:
            return (
                RequestRecord(**who, outcome="rejected", reason="team_limit", status=429, finish_reason="rejected"),
                -1,
                0.0,
            )
        prompt, completion = round(rng.lognormvariate(6.2, 0.8)), max(2, round(rng.lognormvariate(5.0, 0.6)))
        cached = round(prompt * rng.betavariate(2, 3) / 16) * 16
        queue_s = rng.expovariate(1 / 0.02) + (rng.expovariate(1.2) if rng.random() < 0.1 else 0.0)
        prefill_s = (0.03 + (prompt - cached) * 8e-5 * (1 + model)) * slow
        tpot_s = rng.lognormvariate(math.log(0.018 * (1 + 0.6 * model)), 0.2)
        e2e_s = queue_s + prefill_s + tpot_s * (completion - 1)
        fate = rng.random()
        bad = (
            {"outcome": "upstream_error", "reason": "upstream_reset"}
            if fate < 0.002
            else {"outcome": "timeout", "reason": "prefill_timeout"}
        )
        ends: dict[str, Any] = (
            {"outcome": "client_abort", "reason": "client_hangup"}
            if 0.003 < fate < 0.012
            else {**bad, "finish_reason": "error"}
        )
        if fate >= 0.012:
            ends = {"outcome": "ok", "finish_reason": "length" if rng.random() < 0.08 else "stop"}
        record = RequestRecord(
            **who, **ends, upstream=f"vllm-{engine}", prompt_tokens=prompt, cached_tokens=cached,
            completion_tokens=completion, cache_hit=cached > 0,
            queue_ms=rng.expovariate(1) * 2 if rng.random() < 0.2 else 0.0, ttft_ms=(queue_s + prefill_s) * 1000 + 3,
            tpot_ms=tpot_s * 1000,
            e2e_ms=e2e_s * 1000 + 3, engine_queue_ms=queue_s * 1000, engine_ttft_ms=prefill_s * 1000, status=200,
        )  # fmt: skip
        return record, engine, queue_s

    def _follow(
        self,
        r: RequestRecord,
        engine: int,
        queue_s: float,
        engines: _Tally,
        gate: _Tally,
        cards: _Tally,
        rng: random.Random,
    ) -> None:
        """Count a request where engine, gateway and GPU count it."""
        team, status = r.team or "__unknown__", f"{(r.status or 200) // 100}xx"
        gate.add(gateway.REQUESTS, team=team, outcome=r.outcome or "", status=status)
        if r.outcome == "rejected":
            gate.add(gateway.REJECTED, team=team, reason=r.reason or "")
        if (
            engine < 0
            or r.prompt_tokens is None
            or r.completion_tokens is None
            or r.tpot_ms is None
            or r.cached_tokens is None
        ):
            return
        who = {"instance": f"vllm-{engine}:8000", "engine": "0", "model_name": r.model or ""}
        gate.add(
            gateway.ATTEMPTS,
            upstream=f"vllm-{engine}",
            variant="stable",
            result="ok" if r.outcome == "ok" else r.reason or "",
        )
        for metric, amount in zip(
            _COUNTS, (r.prompt_tokens, r.completion_tokens, r.prompt_tokens, r.cached_tokens), strict=True
        ):
            engines.add(metric, amount, **who)
        engines.add(
            vllm.REQUEST_SUCCESS,
            **who,
            finished_reason={"client_abort": "abort"}.get(r.outcome or "", r.finish_reason or "stop"),
        )
        prefill_s, tpot_s, decode_s = (
            (r.engine_ttft_ms or 0) / 1000,
            r.tpot_ms / 1000,
            r.tpot_ms / 1000 * (r.completion_tokens - 1),
        )
        figures = (
            queue_s + prefill_s,
            tpot_s,
            tpot_s,
            queue_s + prefill_s + decode_s,
            queue_s,
            prefill_s,
            decode_s,
            prefill_s + decode_s,
        )
        for (metric, limits), value in zip(_TIMES, figures, strict=True):
            engines.observe(
                metric, limits, value, r.completion_tokens - 1 if metric is vllm.INTER_TOKEN_LATENCY else 1, **who
            )
        if self.gpu:
            seconds = (r.prompt_tokens - r.cached_tokens + 4 * r.completion_tokens) * 4e-4
            cards.add(attributed.TEAM_SECONDS, seconds, team=team, model_name=r.model or "", method="tokens")
            cards.add(
                attributed.TEAM_ENERGY,
                seconds * (WATTS - IDLE_WATTS),
                team=team,
                model_name=r.model or "",
                state="active",
                method="counter",
            )
            if self.prices:
                for basis in ("allocation", "usage"):
                    cost = seconds * PRICE_PER_HOUR / 3600
                    cards.add(attributed.COST, cost, team=team, model_name=r.model or "", basis=basis, currency="USD")
                api = (r.prompt_tokens * 0.15 + r.completion_tokens * 0.6) / 1e6
                cards.add(attributed.API_COST, api, team=team, model_name=r.model or "", currency="USD")

    def _idle(self, cards: _Tally, busy: Mapping[int, float], load: Mapping[int, float]) -> None:
        for e in range(ENGINES):
            model = MODELS[e % len(MODELS)]
            share = min(1.0, load[e] / 4)
            cards.add(attributed.ALLOCATED, self.every_s, model_name=model, uuid=_uuid(e))
            cards.counts[attributed.BUSY, (("model_name", model), ("uuid", _uuid(e)))] = busy[e]
            cards.counts[attributed.IDLE_WATTS, (("uuid", _uuid(e)),)] = IDLE_WATTS + e
            cards.counts[attributed.PENDING, (("model_name", model),)] = 3 * share
            cards.counts[attributed.DECODE_WEIGHT, (("model_name", model), ("method", "engine"))] = 4.0 + e % len(
                MODELS
            )
            cards.add(
                attributed.TEAM_SECONDS, (1 - share) * self.every_s, team=IDLE, model_name=model, method="measured"
            )
            cards.add(
                attributed.TEAM_ENERGY,
                IDLE_WATTS * self.every_s,
                team=IDLE,
                model_name=model,
                state="idle",
                method="counter",
            )
            if self.prices:
                cost = (1 - share) * self.every_s * PRICE_PER_HOUR / 3600
                cards.add(attributed.COST, cost, team=IDLE, model_name=model, basis="allocation", currency="USD")


def _labelled(name: str, job: str) -> str:
    """A sample's name and labels as Prometheus keeps them after a scrape."""
    where = f'job="{job}"' if job == "vllm" else f'job="{job}",instance="{job}:9401"'
    head, _, labels = name.partition("{")
    return f"{head}{{{where}{',' if labels else ''}{labels or '}'}"


def _load(share: float, which: int = 0) -> float:
    return 1 + 0.35 * math.sin(2 * math.pi * (share * (1 + which % 3) + which / 7))


def _poisson(rng: random.Random, mean: float) -> int:
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def _engine_gauges(load: Mapping[int, float], rng: random.Random) -> Iterator[Sample]:
    for e in range(ENGINES):
        who = {"instance": f"vllm-{e}:8000", "engine": "0", "model_name": MODELS[e % len(MODELS)]}
        yield vllm.NUM_REQUESTS_RUNNING, who, float(round(load[e]))
        waiting = float(max(0, round(load[e] - 4 + rng.gauss(0, 0.5))))
        yield vllm.NUM_REQUESTS_WAITING, who, waiting
        yield vllm.NUM_REQUESTS_WAITING_BY_REASON, {**who, "reason": "capacity"}, waiting
        yield vllm.NUM_REQUESTS_WAITING_BY_REASON, {**who, "reason": "deferred"}, 0.0
        yield vllm.KV_CACHE_USAGE, who, min(0.97, 0.3 + load[e] * 0.05)


def _gateway_gauges(load: Mapping[int, float], share: float) -> Iterator[Sample]:
    running = sum(load[e] for e in range(ENGINES))
    weights = [_load(share, i) / (i + 1) ** 0.8 for i in range(len(TEAMS))]
    for i, team in enumerate(TEAMS):
        who = {"team": team, "band": ("interactive", "standard", "batch")[i % 3]}
        mine = running * weights[i] / sum(weights)
        waiting = round(mine * 0.6) if not i and BURST[0] < share < BURST[1] else 0
        yield gateway.RUNNING, who, float(round(mine))
        yield gateway.SLOTS_HELD, who, float(round(mine))
        yield gateway.WAITING, who, float(waiting)
        yield gateway.WAIT_ESTIMATE, who, 0.4 * waiting
        yield gateway.INFLIGHT, {"team": team}, float(round(mine) + waiting)
    yield gateway.SLOTS, {}, 48.0
    yield gateway.SLOTS_LIMIT, {}, 64.0


def _uuid(e: int) -> str:
    return f"GPU-{e:x}a91e57c-0b6d-4f28-9d4e-7f1a2b3c4d5{e:x}"


def _reading(e: int, share: float, busy_s: float, rng: random.Random) -> GpuReading:
    watts = IDLE_WATTS + (WATTS - IDLE_WATTS) * share + rng.gauss(0, 6)
    return GpuReading(
        uuid=_uuid(e), index=e, name="NVIDIA H100 80GB HBM3", driver_version="570.86.15",
        pci_bus_id=f"00000000:{e + 1:02X}:00.0", mig=False,
        utilization_ratio=min(1.0, max(0.0, share + rng.gauss(0, 0.03))), memory_busy_ratio=min(1.0, share * 0.7),
        memory_used_bytes=73e9 + e * 2e8,
        memory_free_bytes=6.5e9 - e * 2e8, memory_total_bytes=80.5e9, memory_reserved_bytes=1e9, power_watts=watts,
        power_limit_watts=700.0,
        energy_joules=1e9 + busy_s * WATTS, temperature_celsius=round(42 + 26 * share + e),
        memory_temperature_celsius=round(50 + 28 * share + e),
        sm_clock_hertz=1.98e9 if share else 3.45e8, mem_clock_hertz=2.619e9,
        throttle_sw_power_cap_seconds=busy_s * 0.02,
        throttle_sw_thermal_slowdown_seconds=0.0, throttle_hw_thermal_slowdown_seconds=0.0,
        throttle_hw_power_brake_seconds=0.0,
        throttle_sync_boost_seconds=0.0, ecc_corrected=float(e), ecc_uncorrected=0.0, remapped_corrected=0.0,
        remapped_uncorrected=0.0,
        nvlink_received=busy_s * 4e9, nvlink_transmitted=busy_s * 4e9, nvlink_crc_flit_errors=0.0,
        nvlink_crc_data_errors=0.0,
        nvlink_replay_errors=0.0, nvlink_recovery_errors=0.0, event_reasons=0, xids={}, energy_method="counter",
    )  # fmt: skip
