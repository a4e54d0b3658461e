"""What engines and those who watch them show within one hour: the ground on which every panel is tried.

Invariant: made from the catalogue (what exists, of what kind, in what unit) and from the captured pages (labels and
bounds as vLLM writes them), never from a board, else a board would prove itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path

from alerts import fleet as fleet_rules
from alerts import recorded
from alerts.registry import ALERTS as ALERT_RULES
from exporters.accounting.gpu_use import ABORTED, IDLE, UNATTRIBUTED
from exporters.accounting.reconciled import EXTRA_CAUSES, KINDS, MISSING_CAUSES
from exporters.catalogue import (
    EVERYTHING,
    attributed,
    bounds,
    dcgm,
    exposition_parser,
    gateway,
    golden,
    gpu,
    prometheus,
    promql,
    reconciled,
    self_monitoring,
    ship,
    sidecar,
    vllm,
)
from exporters.catalogue.exposition_parser import Exposition
from exporters.catalogue.metric import Across, EngineRole, Kind, Metric, Unit
from exporters.catalogue.producers import Component, shown_by
from exporters.engine.liveness import Cause, EngineState
from exporters.gpu.series import XIDS
from exporters.net.listener import REASONS as REASONS_TO_TURN_AWAY
from exporters.requests.record import UNREADABLE
from stack.gateway.reasons import REASONS

GOLDEN = Path(__file__).parents[1] / "golden"
HOUR_S = 3600
RESTART_AT = 0.95  # of the hour: late enough for the last five minutes to see it
RUNNING_FOR_H = 200  # before the hour: what a board compares with, up to a week ago, lies within it
OLD, NEW = "0.10.0", "0.32.0"  # 0.10.0 had the old names only; the pages are of 0.10.2, which shows both
NEWEST = "0.33.0"  # without a captured page
TEAMS = ("search", "support")
# seen by the sidecar and by DCGM
CARDS = ("GPU-6f1d1f3e-41a7-4c1b-8f0e-2b9d3c5e7a10", "GPU-9b02c4d1-7e35-4a66-b1c8-5d0f6e8a2c31")
# by DCGM alone; the last under MIG
OTHER_CARD, SPLIT_CARD = "GPU-c3a91e57-0b6d-4f28-9d4e-7f1a2b3c4d52", "GPU-e87d2b60-5c14-4e9f-a3b7-1c2d3e4f5a63"
BY_SAMPLE = {sample: metric for metric in EVERYTHING for sample in metric.samples}

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """One series over the hour: it starts at a value and grows evenly by `grows`. restarts: near the end it begins
    again at `after`.

    clock: values are unix seconds, written relative to the start of the hour."""

    name: str
    labels: Labels
    start: float
    grows: float = 0.0
    restarts: bool = False
    after: float = 0.0
    clock: bool = False

    def values(self, shares: Iterable[float], began_s: float) -> Iterator[float]:
        """What it stands at; shares: of the hour, below 0 before it."""
        zero = began_s if self.clock else 0.0
        for share in shares:
            if self.restarts and share >= RESTART_AT:
                yield zero + self.after + self.grows * (share - RESTART_AT)
            else:
                yield zero + self.start + self.grows * share


@dataclass(frozen=True, slots=True)
class Scene:
    """One fixture. whole: everything that exists is here, so every panel must show something. rests: nothing moves.

    alike: all engines show the same, so that choosing one of them takes nothing away but the others."""

    name: str
    lines: tuple[Line, ...]
    whole: bool = False
    rests: bool = False
    alike: bool = True
    engine_labels: Mapping[str, frozenset[str]] = field(default_factory=dict)
    teams: frozenset[str] = frozenset()

    def page(self, lively: bool = False) -> Exposition:
        """What an expression can be answered from: gauges, and of counters those that moved. lively: gauges at 0 left
        out too."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for line in filter(_belongs, self.lines):
            if line.grows or (not _counts(line.name) and not (lively and line.start == 0 and not line.clock)):
                samples.setdefault(line.name, []).append((line.labels, line.start + line.grows))
        return Exposition(samples)

    def gauges(self) -> Exposition:
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for line in filter(_belongs, self.lines):
            if not _counts(line.name):
                samples.setdefault(line.name, []).append((line.labels, line.start))
        return Exposition(samples)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(line.name for line in self.lines)

    def text(self, began_s: int, every_s: int, back_s: int = 0) -> Iterator[str]:
        """The hour as OpenMetrics text, one scrape every so many seconds; back_s: what was before it, from so long ago
        on, for an hour at most."""
        ends = HOUR_S if not back_s else min(HOUR_S - back_s, -every_s)
        seconds = range(-back_s, ends + 1, every_s)
        shares, times = [at / HOUR_S for at in seconds], [f" {began_s + at}\n" for at in seconds]
        for line in self.lines:
            inner = ",".join(f'{k}="{_escaped(v)}"' for k, v in line.labels.items())
            head = f"{line.name}{{{inner}}} "
            if not line.grows and not line.restarts:
                value = f"{line.start + (began_s if line.clock else 0):.12g}"
                yield "".join([f"{head}{value}{t}" for t in times])
            else:
                yield "".join([f"{head}{v:.12g}{t}" for v, t in zip(line.values(shares, began_s), times, strict=True)])
        yield "# EOF\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _counts(sample: str) -> bool:
    """Whether a sample only ever grows. Names that the catalogue does not hold are told by their suffix."""
    metric = BY_SAMPLE.get(sample)
    if metric is None:
        return sample.endswith(("_total", "_bucket", "_count", "_sum"))
    return metric.kind in (Kind.COUNTER, Kind.HISTOGRAM, Kind.SUMMARY)


def _belongs(line: Line) -> bool:
    """Families of Python's client are shown by everyone; what an engine shows of them decides what can be asked of
    engines."""
    return line.name not in _OF_EVERY_PROCESS or line.labels.get("job") == "vllm"


_OF_EVERY_PROCESS = {metric.name for metric in vllm.BESIDE}


# What labels hold. Where a page shows a family, its own label sets are used instead.
WORDS: dict[str, tuple[str, ...]] = {
    "UUID": CARDS, "GPU_I_ID": ("",), "GPU_I_PROFILE": ("",), "device": ("nvidia0",), "gpu": ("0",),
    "hostname": ("gpu-host-1",),
    "modelName": ("NVIDIA H100 80GB HBM3",), "alertmanager": ("http://alertmanager:9093/api/v2/alerts",),
    "alertname": ("",),
    "adapter": ("sql", "chat"), "alertstate": ("",), "band": ("demo", "experimental"),
    "basis": ("allocation", "usage"), "cause": ("unknown",), "cache_dtype": ("auto",), "currency": ("USD",),
    "data_type": ("traces",), "driver_version": ("570.86.15",), "enable_prefix_caching": ("True",), "err_code": ("31",),
    "err_msg": ("GPU memory page fault",), "evidence": (str(Cause.STEPS),), "exporter": ("otlp/traces",),
    "finish_reason": ("stop", "length", "abort", "error", "rejected"),
    "finished_reason": ("stop", "length", "abort", "error", "repetition"),
    "generation": ("0", "1", "2"), "handler": ("/v1/chat/completions",), "implementation": ("CPython",),
    "index": ("0",), "instance": ("",),
    "integration": ("webhook",), "job": ("",), "kind": ("change", "restart", "version", "config", "note"),
    "major": ("3",), "max_lora": ("4",),
    "method": ("POST",), "mig": ("off",), "minor": ("12",), "mode": ("streaming", "non_streaming"),
    "name": ("NVIDIA H100 80GB HBM3",),
    "operation": ("get", "put"), "outcome": ("ok", "rejected", "client_abort", "upstream_error", "timeout"),
    "patchlevel": ("3",), "policy": ("0123456789abcdef",),
    "path": ("/var/log/vllm-watch/requests.jsonl",), "pci_bus_id": ("00000000:1B:00.0",),
    "position": ("0", "1", "2", "3"),
    "process": ("vllm", "gateway", "sidecar", "prometheus"), "reason": ("other",), "receiver": ("otlp",),
    "request_type": ("chat",), "route": ("/v1/chat/completions", "/v1/embeddings"),
    "result": ("hit", "miss"), "rule_group": ("/etc/prometheus/rules/page.yaml;vllm-page",),
    "running_lora_adapters": ("sql,chat",), "sensor": ("gpu", "memory"), "severity": ("",), "sleep_state": ("awake",),
    "source": ("local_compute",), "stage": ("waiting_to_start", "in_progress", "completed_waiting"),
    "state": ("active", "suppressed"), "status": ("ok", "error"), "team": TEAMS,
    "transfer_type": ("CPU_to_GPU", "GPU_to_CPU"),
    "step": ("raise", "roll_back"), "transport": ("grpc", "http"), "type": ("float",), "uuid": CARDS,
    "variant": ("stable", "canary"), "verdict": ("same",),
    "version": ("0.1.0",),
    "waiting_lora_adapters": ("",), "direction": ("received", "transmitted"), "gpu_instance": ("1", "2"),
    "mig_uuid": ("MIG-5f1e",),
    "listener": ("clients", "figures"), "profile": ("3g.40gb",), "tier": ("cpu",), "xid": ("79", "other"),
}  # fmt: skip
_SIDECAR_SOURCES = tuple(
    {"kind": kind, "source": source}
    for kind, source in (
        ("engine", "vllm-0"),
        ("gpu", "nvml"),
        ("log", "requests.jsonl"),
        ("checkpoint", "sidecar.state"),
        ("golden", "golden.json"),
    )
)
_BANDED = tuple({"team": team, "band": band} for team, band in zip(TEAMS, WORDS["band"], strict=True))
_THROTTLES = ("sw_power_cap", "sw_thermal_slowdown", "sync_boost", "hw_thermal_slowdown", "hw_power_brake")

# Label sets that belong together, by family; the weights of their shares follow the order.
SETS: dict[Metric, tuple[Labels, ...]] = {
    self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED: tuple(
        {"integration": "webhook", "reason": reason}
        for reason in ("clientError", "serverError", "contextDeadlineExceeded", "contextCanceled", "other")
    ),
    sidecar.REASONS: tuple({"outcome": r.outcome, "reason": name} for name, r in REASONS.items()),
    sidecar.TOKENS: tuple({"type": kind} for kind in ("prompt", "completion", "cached")),
    sidecar.ESTIMATED_TOKENS: tuple({"type": kind} for kind in ("prompt", "completion")),
    sidecar.LISTENER_REJECTED: tuple({"reason": why} for why in REASONS_TO_TURN_AWAY),
    gateway.LISTENER_REJECTED: tuple({"listener": who, "reason": why} for who in WORDS["listener"]
        for why in REASONS_TO_TURN_AWAY),
    sidecar.LOG_BAD_LINES: tuple({"reason": why} for why in ("json", "type", "range", "size", "long")),
    sidecar.LOG_FAULTS: tuple({"reason": why}
        for why in ("long", "nul", "torn", "cut", "gone", "reread", "packed", "unreadable")),
    sidecar.SPANS_DROPPED: tuple({"reason": why}
        for why in ("refused", "timeout", "unavailable", "queue_full", "defect")),
    sidecar.SPANS_LEFT_OUT: tuple({"reason": why} for why in ("sampled", "history", "incomplete")),
    sidecar.SOURCE_UP: _SIDECAR_SOURCES, sidecar.SOURCE_LAST_SUCCESS: _SIDECAR_SOURCES,
    sidecar.SOURCE_AGE: _SIDECAR_SOURCES,
    sidecar.SOURCE_DURATION: _SIDECAR_SOURCES,
    sidecar.SOURCE_ERRORS: tuple({**source, "reason": "timeout"} for source in _SIDECAR_SOURCES),
    sidecar.CANARY_TIME: tuple(
        {"variant": f"canary-{step}", "step": step} for step in ("raise", "roll_back", "undecided", "interrupted")
    ),
    ship.SHIP_UP: tuple({"kind": kind} for kind in ("store", "disk")),
    ship.SHIPPED_TOKENS: tuple({"type": kind} for kind in ("prompt", "completion", "cached")),
    ship.SHIP_UNEXPLAINED: tuple({"kind": kind} for kind in ("requests", "prompt", "cached", "completion")),
    ship.SHIP_BAD_LINES: tuple({"reason": why} for why in ("json", "type", "range", "size", "long")),
    gateway.REQUESTS: tuple(
        {"outcome": outcome, "status": status}
        for outcome, status in (
            ("ok", "2xx"), ("rejected", "4xx"), ("client_abort", "none"), ("upstream_error", "5xx"),
            ("upstream_error", "2xx"), ("timeout", "5xx")
        )
    ),
    gateway.REJECTED: tuple({"reason": name} for name, r in REASONS.items() if r.outcome == "rejected"),
    gateway.ATTEMPTS: tuple({"result": name}
        for name in ("ok", "client_hangup", "engine_busy", "prefill_timeout", "upstream_reset", "engine_error")),
    gateway.UNREADABLE: tuple({"reason": why} for why in UNREADABLE),
    gateway.RELOADS: tuple({"result": name} for name in ("ok", "failed")),
    golden.GOLDEN_VERDICT: tuple(
        {"verdict": verdict, "cause": cause}
        for verdict, cause in (("same", "noise"), ("wrong", "numeric"), ("wrong", "template"), ("wrong", "not_finite"))
    ),
    **dict.fromkeys((gateway.ENGINE_STATE, sidecar.ENGINE_STATE), ({"state": str(EngineState.HEALTHY)},)),
    **dict.fromkeys((gateway.RUNNING, gateway.SLOTS_HELD, gateway.WAITING, gateway.WAIT_ESTIMATE), _BANDED),
    gpu.INFO: tuple({"uuid": card, "index": str(i), "pci_bus_id": f"00000000:{i + 1}B:00.0"} for i,
        card in enumerate(CARDS)),
    gpu.ENERGY: tuple({"uuid": card, "method": "counter"} for card in CARDS),
    gpu.THROTTLE: tuple({"uuid": card, "reason": why} for card in CARDS for why in _THROTTLES),
    gpu.ECC_ERRORS: tuple({"uuid": card, "kind": kind} for card in CARDS for kind in ("corrected", "uncorrected")),
    gpu.REMAPPED_ROWS: tuple({"uuid": card, "kind": kind} for card in CARDS for kind in ("corrected", "uncorrected")),
    gpu.ABSENT: tuple({"uuid": card, "reason": why} for card in CARDS
        for why in ("not_supported", "unknown_error", "lost")),
    gpu.THROTTLED_NOW: tuple({"uuid": card, "reason": why} for card in CARDS for why in ("hw_slowdown", *_THROTTLES)),
    gpu.NVLINK_ERRORS: tuple({"uuid": card, "kind": kind} for card in CARDS
        for kind in ("crc_flit", "crc_data", "replay", "recovery")),
    **dict.fromkeys((reconciled.LOGGED, reconciled.ENGINE, reconciled.OPEN), tuple({"kind": kind} for kind in KINDS)),
    reconciled.MISSING_IN_LOG: tuple({"kind": kind, "cause": cause} for kind in KINDS for cause in MISSING_CAUSES),
    reconciled.EXTRA_IN_LOG: tuple({"kind": kind, "cause": cause} for kind in KINDS for cause in EXTRA_CAUSES),
    **dict.fromkeys((reconciled.ABORTED, reconciled.UNFINISHED),
        tuple({"type": kind} for kind in ("prompt", "completion"))),
    gpu.XID_ERRORS: tuple({"uuid": card, "xid": xid} for card in CARDS for xid in (*map(str, XIDS), "other")),
    gpu.MIG_ACTIVITY: tuple({"uuid": CARDS[0], "gpu_instance": "1", "kind": kind}
        for kind in ("graphics", "sm", "occupancy", "tensor", "memory")),
}  # fmt: skip
_OF_WORK = (*TEAMS, ABORTED, UNATTRIBUTED)
SETS |= {
    **dict.fromkeys((attributed.ALLOCATED, attributed.BUSY, attributed.IDLE_WATTS),
        tuple({"uuid": card} for card in CARDS)),
    attributed.TEAM_SECONDS: (
        *({"team": team, "method": "tokens"} for team in _OF_WORK),
        *({"team": team, "method": "aborted"} for team in TEAMS),
        {"team": IDLE, "method": "measured"}, {"team": UNATTRIBUTED, "method": "unknown"},
    ),
    attributed.TEAM_ENERGY: tuple(
        {"team": team, "state": state, "method": "counter"}
        for team, state in (*((team, "active") for team in _OF_WORK), (IDLE, "idle"), (UNATTRIBUTED, "unknown"))
    ),
    attributed.COST: (
        *({"team": team, "basis": "allocation"} for team in (*_OF_WORK, IDLE)),
        *({"team": team, "basis": "usage"} for team in _OF_WORK),
    ),
    attributed.DECODE_WEIGHT: ({"method": "engine"},),
}  # fmt: skip
_WHOLE_CARDS = tuple(
    {"UUID": card, "gpu": str(i), "device": f"nvidia{i}"} for i, card in enumerate((*CARDS, OTHER_CARD))
)
_INSTANCES = tuple(
    {"UUID": SPLIT_CARD, "gpu": "3", "device": "nvidia3", "GPU_I_ID": i, "GPU_I_PROFILE": "3g.40gb"} for i in ("1", "2")
)
_NOT_UNDER_MIG = (dcgm.GPU_UTIL.metric, dcgm.MEM_COPY_UTIL.metric)
SETS |= {metric: (*_WHOLE_CARDS, *(() if metric in _NOT_UNDER_MIG else _INSTANCES)) for metric in dcgm.DCGM}
SETS[dcgm.XID_ERRORS.metric] = tuple(
    {**card, "err_code": "31", "err_msg": "GPU memory page fault"} for card in _WHOLE_CARDS
)
# dcgm-exporter counts in units of its own
RAW: dict[Metric, float] = {entry.metric: entry.raw.value for entry in dcgm.FIELDS}

# How much happens in a second, so that parts stay parts of their wholes; other counters by their unit.
PER_SECOND: dict[Metric, float] = {
    vllm.PROMPT_TOKENS: 800, vllm.PROMPT_TOKENS_BY_SOURCE: 800, vllm.PROMPT_TOKENS_CACHED: 400,
    vllm.PROMPT_TOKENS_CACHED_BY_SOURCE: 400,
    vllm.PREFIX_CACHE_QUERIES: 800, vllm.PREFIX_CACHE_HITS: 320, vllm.GPU_PREFIX_CACHE_QUERIES: 800,
    vllm.GPU_PREFIX_CACHE_HITS: 320,
    vllm.EXTERNAL_PREFIX_CACHE_QUERIES: 480, vllm.EXTERNAL_PREFIX_CACHE_HITS: 80, vllm.MM_CACHE_QUERIES: 2,
    vllm.MM_CACHE_HITS: 1,
    vllm.GENERATION_TOKENS: 300, vllm.ITERATION_TOKENS: 30, vllm.NUM_PREEMPTIONS: 0.05, vllm.ADMISSION_REJECTIONS: 0.1,
    vllm.ESTIMATED_FLOPS_PER_GPU: 2e14, vllm.ESTIMATED_READ_BYTES_PER_GPU: 1e12,
    vllm.ESTIMATED_WRITE_BYTES_PER_GPU: 1e11,
    vllm.TIME_TO_FIRST_TOKEN: 2.1, vllm.INTER_TOKEN_LATENCY: 290, vllm.TIME_PER_OUTPUT_TOKEN: 290,
    vllm.CORRUPTED_REQUESTS: 0.001,
    vllm.SPEC_DECODE_NUM_DRAFTS: 100, vllm.SPEC_DECODE_NUM_DRAFT_TOKENS: 400, vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS: 180,
    vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS: 180, vllm.DIFFUSION_NUM_CANVAS_POSITIONS: 900,
    vllm.DIFFUSION_NUM_COMMITTED_TOKENS: 300,
    dcgm.ENERGY.metric: 500, dcgm.POWER_VIOLATION.metric: 0.1, dcgm.THERMAL_VIOLATION.metric: 0.05,
    vllm.MOONCAKE_STORE_OPERATION_KEYS: 20, vllm.MOONCAKE_STORE_OPERATION_FAILED_KEYS: 0.2, vllm.PROCESS_CPU: 0.3,
    sidecar.TOKENS: 1900, sidecar.ESTIMATED_TOKENS: 20,
    sidecar.LOG_LINES: 4, sidecar.LOG_BAD_LINES: 0.01, sidecar.LOG_UNTIMED: 0.01, sidecar.TEAMS_OVERFLOW: 0.01,
    sidecar.MODELS_OVERFLOW: 0.01,
    sidecar.LOG_ROTATIONS: 0.001, sidecar.ENGINE_RESTARTS: 0.001, sidecar.ENGINE_CHANGES: 0.001,
    sidecar.CACHE_LOOKUPS: 2, sidecar.TTFT: 2.1, sidecar.ADAPTER_TTFT: 0.6,
    sidecar.TTFT_OVERHEAD: 2.1, sidecar.TTFT_NEGATIVE: 0.01,
    attributed.ALLOCATED: 1, attributed.BUSY: 0.6, attributed.TEAM_SECONDS: 2, attributed.TEAM_ENERGY: 1000,
    attributed.COST: 0.002,
    attributed.API_COST: 0.003, reconciled.ENGINE: 1100, reconciled.LOGGED: 1090, reconciled.MISSING_IN_LOG: 11,
    reconciled.EXTRA_IN_LOG: 1,
    gpu.ENERGY: 1000, gpu.THROTTLE: 0.2, gpu.ECC_ERRORS: 0.001,
}  # fmt: skip
_BY_UNIT = {
    Unit.REQUESTS: 2.0,
    Unit.TOKENS: 500.0,
    Unit.SECONDS: 0.02,
    Unit.BYTES: 1e6,
    Unit.JOULES: 300.0,
    Unit.ITEMS: 5.0,
    Unit.COUNT: 0.05,
}

# Where a gauge stands; other gauges by their unit. Those of an idle engine stand at 0.
LEVEL: dict[Metric, float] = {
    gpu.MEMORY_TOTAL: 80e9,
    gpu.MEMORY_USED: 60e9,
    gpu.MEMORY_FREE: 19e9,
    gpu.MEMORY_RESERVED: 1e9,
    gpu.POWER: 500,
    gpu.POWER_LIMIT: 700,
    dcgm.FB_USED.metric: 60e9,
    dcgm.FB_FREE.metric: 19e9,
    dcgm.FB_RESERVED.metric: 1e9,
    dcgm.XID_ERRORS.metric: 31,
    gpu.MEM_CLOCK: 2.6e9,
    self_monitoring.RULE_GROUP_INTERVAL: 15,
    self_monitoring.ALERTMANAGERS: 1,
    self_monitoring.EXPORT_QUEUE: 20,
    self_monitoring.EXPORT_QUEUE_CAPACITY: 1000,
    self_monitoring.ALERTMANAGER_ALERTS: 3,
    self_monitoring.HEAD_SERIES: 60000,
    vllm.NUM_REQUESTS_RUNNING: 12,
    vllm.PROCESS_MAX_FDS: 20000,
    sidecar.KV_BLOCKS: 40000,
    sidecar.KV_BLOCK_SIZE: 16,
    sidecar.KV_CAPACITY: 640000,
    sidecar.TEAMS: 2,
    gpu.ABSENT: 1,
    prometheus.SCRAPE_SAMPLES: 900,
    prometheus.SCRAPE_SAMPLES_KEPT: 900,
    prometheus.SAMPLE_LIMIT: 2000,
    ship.SHIP_UNEXPLAINED: 0,
    gateway.RUNNING: 24,
    gateway.SLOTS_HELD: 24,
    gateway.WAITING: 6,
    gateway.WAIT_ESTIMATE: 4,
    gateway.SLOTS: 24,
    gateway.SLOTS_LIMIT: 32,
    gateway.TOKENS: 60000,
    gateway.UPSTREAM_INFLIGHT: 12,
}
_LEVEL_BY_UNIT = {
    Unit.SECONDS: 0.05,
    Unit.BYTES: 1e8,
    Unit.WATTS: 400.0,
    Unit.CELSIUS: 60.0,
    Unit.HERTZ: 1.7e9,
    Unit.RATIO: 0.6,
    Unit.FLAG: 1.0,
    Unit.REQUESTS: 3.0,
}
LONG_AGO_S = -7200.0  # processes started, and things were read with success, before the hour

# What one observation of a histogram or summary is, at the median; else by its unit.
TYPICAL: dict[Metric, float] = {
    vllm.TIME_TO_FIRST_TOKEN: 0.3, vllm.INTER_TOKEN_LATENCY: 0.03, vllm.TIME_PER_OUTPUT_TOKEN: 0.03,
    vllm.REQUEST_TIME_PER_OUTPUT_TOKEN: 0.03,
    vllm.E2E_REQUEST_LATENCY: 6.3, vllm.REQUEST_INFERENCE_TIME: 5.5, vllm.REQUEST_DECODE_TIME: 5.2,
    vllm.REQUEST_PREFILL_TIME: 0.4,
    vllm.REQUEST_QUEUE_TIME: 0.5, vllm.KV_BLOCK_LIFETIME: 40.0, vllm.KV_BLOCK_IDLE_BEFORE_EVICT: 20.0,
    vllm.KV_BLOCK_REUSE_GAP: 5.0,
    vllm.REQUEST_PARAMS_N: 1.0, vllm.REQUEST_NUM_PREEMPTIONS: 0.5, vllm.REQUEST_PROMPT_TOKENS: 400.0,
    sidecar.TTFT: 0.35, sidecar.TPOT: 0.03, sidecar.E2E: 6.0, sidecar.QUEUE: 0.05, sidecar.ENGINE_QUEUE: 0.5,
    sidecar.TTFT_OVERHEAD: 0.05,
    gateway.LOOP_LAG: 0.002,
}  # fmt: skip
_TYPICAL_BY_UNIT = {
    Unit.SECONDS: 0.5,
    Unit.TOKENS: 150.0,
    Unit.BYTES: 5e6,
    Unit.COUNT: 2.0,
    Unit.ITEMS: 64.0,
    Unit.BLOCKS: 32.0,
}
_BOUNDS: dict[Metric, Sequence[float]] = {
    sidecar.TTFT: bounds.TTFT_S,
    sidecar.TPOT: bounds.OUR_TPOT_S,
    sidecar.E2E: bounds.OUR_REQUEST_S,
    sidecar.QUEUE: bounds.OUR_REQUEST_S,
    sidecar.ENGINE_QUEUE: bounds.OUR_REQUEST_S,
    sidecar.TTFT_OVERHEAD: bounds.TTFT_S,
    sidecar.ADAPTER_TTFT: bounds.GROUPED_TTFT_S,
    sidecar.ROUTE_E2E: bounds.GROUPED_REQUEST_S,
    gateway.LOOP_LAG: gateway.LOOP_LAG_BOUNDS_S,
}
_DECADES = (1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Engine:
    """One scraped vLLM. ranks: its engines under data parallelism. features: with everything that a flag or connector
    adds. role: of a prefill/decode pair."""

    name: str
    model: str = "qwen3-8b"
    release: str = NEW
    ranks: tuple[str, ...] = ("0",)
    features: bool = False
    restarts: bool = False
    up: bool = True
    role: EngineRole | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """How a scene is set: what every target carries, and how much goes on (1: a busy hour, 0: none)."""

    place: Labels = field(default_factory=dict)
    pace: float = 1.0
    bare: bool = False  # the collector leaves `_total` out, as it does unless told otherwise


ALL_WATCHERS = ("sidecar", "gateway", "ship", "lab", "dcgm", "prometheus", "alertmanager", "otelcol")


def scenes() -> tuple[Scene, ...]:
    """Every fixture, the captured pages included."""
    pair = tuple(Engine(f"vllm-{i}", features=True) for i in range(2))
    roles = tuple(Engine(f"vllm-{role}", release=NEWEST, features=True, role=role) for role in EngineRole)
    plain = tuple(Engine(f"vllm-{i}") for i in range(2))
    fleet = tuple(Engine(f"vllm-{m[:3]}{i}", m) for m in ("llama-70b", "qwen3-8b") for i in range(3))
    mixed = (Engine("vllm-0", release=OLD), Engine("vllm-1"))
    return (
        _scene("busy", pair, Setting(bare=True), whole=True),
        _scene("kubernetes", pair, Setting({"cluster": "prod-a", "namespace": "serving"}), whole=True),
        _scene("prefill-decode", roles, alike=False),
        _scene("idle", plain, Setting(pace=0.0), rests=True),
        _scene("two-models-three-replicas", fleet),
        _scene("restart", tuple(replace(e, restarts=True) for e in plain)),
        _scene("names-of-0.10", (Engine("vllm-0", release=OLD),)),
        _scene("0.10-beside-0.32", mixed, alike=False),
        _scene("data-parallel", (Engine("vllm-0", ranks=("0", "1", "2")),)),
        _scene("engine-only", plain, watchers_of=()),
        _scene("dcgm-and-no-sidecar", plain, watchers_of=("dcgm", "prometheus")),
        *(_captured(path) for path in sorted(GOLDEN.glob("*.prom"))),
    )


def beyond_the_buckets() -> dict[str, Scene]:
    """Fixtures in which every observation lies in the first bucket (<) or above the last finite bound (>), by that
    mark. Its engines are of the newest release, so that every histogram is there.

    What is recorded as a p95 bears the mark already, as our rules write it."""
    engines = tuple(Engine(f"vllm-{i}", release=NEWEST, features=True) for i in range(2))
    busy = _scene("busy", engines, Setting(bare=True), whole=True)
    return {mark: replace(busy, name=f"beyond {mark}", lines=tuple(_moved(busy, mark))) for mark in ("<", ">")}


def _moved(scene: Scene, mark: str) -> Iterator[Line]:
    def bare(line: Line) -> tuple[str, frozenset[tuple[str, str]]]:
        return line.name, frozenset((label, value) for label, value in line.labels.items() if label != "le")

    everything = {bare(line): line for line in scene.lines if line.labels.get("le") == "+Inf"}
    for line in scene.lines:
        if "le" in line.labels and mark == "<":
            yield replace(everything[bare(line)], labels=line.labels)
        elif "le" in line.labels and line.labels["le"] != "+Inf":
            yield replace(line, start=0.0, grows=0.0)
        elif re.search(r":(max_)?p95_", line.name):
            yield replace(line, labels={**line.labels, "bound": mark})
        else:
            yield line


def fleet(engines: int, models: int = 3) -> Scene:
    """A larger fleet with everything that watches it, for what is measured and not proven."""
    return _scene("fleet", tuple(Engine(f"vllm-{i}", f"model-{i % models}") for i in range(engines)), Setting())


def _scene(
    name: str,
    engines: Sequence[Engine],
    setting: Setting | None = None,
    *,
    whole: bool = False,
    rests: bool = False,
    alike: bool = True,
    watchers_of: Sequence[str] = ALL_WATCHERS,
) -> Scene:
    setting = setting or Setting()
    lines = [line for engine in engines for line in _engine(engine, setting)]
    lines += _watchers(engines, setting, watchers_of)
    teams = frozenset(TEAMS if "sidecar" in watchers_of else ())
    return Scene(name, tuple(lines), whole, rests, alike, _engine_labels(engines, setting), teams)


def _engine_labels(engines: Sequence[Engine], setting: Setting) -> dict[str, frozenset[str]]:
    place = {label: frozenset({value}) for label, value in setting.place.items()}
    return place | {
        "job": frozenset({"vllm"}),
        "instance": frozenset(f"{e.name}:8000" for e in engines),
        "model_name": frozenset(e.model for e in engines),
    }


# An engine: every family of its release, with the labels and bounds of a page where one shows it.


@cache
def _shown(name: str) -> Exposition:
    return exposition_parser.parse((GOLDEN / f"{name}.prom").read_text())


def _page_of(release: str) -> Exposition:
    return _shown("0.10.2-load-after-load" if release == OLD else "0.32.0-preempt-after-load")


def _engine(engine: Engine, setting: Setting) -> Iterator[Line]:
    target = {**setting.place, "job": "vllm", "instance": f"{engine.name}:8000"}
    target |= {promql.ROLE: str(engine.role)} if engine.role else {}
    yield from _scraped(target, up=engine.up)
    known = _page_of(engine.release)
    many = len(engine.ranks) > 1
    for metric in (*vllm.VLLM, *vllm.RETIRED, *vllm.BESIDE):
        if not metric.lives_in(engine.release) or (metric.needs and not engine.features):
            continue
        if many and metric.name.startswith(("process_", "python_")):  # absent under data parallelism
            continue
        ranks = engine.ranks if "engine" in metric.labels else ("",)
        for rank, (labels, weight) in product(ranks, list(_label_sets(metric, known))):
            own = {"engine": rank} if rank else {}
            own |= {"model_name": engine.model} if "model_name" in metric.labels else {}
            yield from _family(
                metric, {**target, **own, **labels}, weight, setting.pace, _bounds(metric, known), engine.restarts
            )


def _label_sets(metric: Metric, known: Exposition) -> Iterator[tuple[Labels, float]]:
    """The labels of a family beside engine and model_name, and what share of the whole each set has."""
    there = {
        tuple(sorted((k, v) for k, v in labels.items() if k not in ("engine", "model_name", "le")))
        for sample in metric.samples
        for labels, _ in known.of(sample)
    }
    sets = [dict(found) for found in sorted(there)] if there else list(_from_words(metric))
    yield from zip(sets, _weights(metric, sets), strict=True)


def _weights(metric: Metric, sets: Sequence[Labels]) -> list[float]:
    """Falling shares that add up to 1; only where the sets are parts of a sum, as GPUs are not."""
    if (metric.kind is Kind.GAUGE and metric.across is not Across.SUM) or any(
        "uuid" in labels or "UUID" in labels for labels in sets
    ):
        return [1.0] * len(sets)
    raw = [1 / (i + 1) for i in range(len(sets))]
    return [share / sum(raw) for share in raw]


# which engine, or who tells it: no words
OF_A_PLACE = frozenset(("engine", "model_name", "upstream", "address", "instance", "job"))


def _from_words(metric: Metric) -> Iterator[Labels]:
    given = SETS.get(metric, ({},))
    free = [label for label in metric.labels if label not in OF_A_PLACE and label not in given[0]]
    for start, values in product(given, product(*(WORDS.get(label, (f"some-{label}",)) for label in free))):
        yield {**dict(zip(free, values, strict=True)), **start}


def _bounds(metric: Metric, known: Exposition) -> Sequence[float]:
    shown = {float(labels["le"]) for labels, _ in known.of(f"{metric.name}_bucket")} - {math.inf}
    if shown:
        return sorted(shown)
    if metric in _BOUNDS:
        return _BOUNDS[metric]
    if metric.unit is Unit.SECONDS:
        return bounds.OUR_REQUEST_S
    return [step * 10**power for power in range(10 if metric.unit is Unit.BYTES else 5) for step in _DECADES]


def _family(
    metric: Metric,
    labels: Labels,
    weight: float,
    pace: float,
    buckets: Sequence[float],
    restarts: bool = False,
    name: str = "",
) -> Iterator[Line]:
    """The series of one family under one set of labels."""
    name = name or metric.name
    if metric.kind is Kind.INFO:
        yield Line(name, labels, 1.0)
    elif metric.kind is Kind.GAUGE:
        yield _gauge(metric, labels, weight, pace, restarts)
    else:
        observed = metric.kind in (Kind.HISTOGRAM, Kind.SUMMARY)
        rate = (
            PER_SECOND.get(metric, 2.0 if observed else _BY_UNIT.get(metric.unit, 1.0)) * weight / RAW.get(metric, 1.0)
        )
        typical = TYPICAL.get(metric, _TYPICAL_BY_UNIT.get(metric.unit, 1.0))

        def counter(sample: str, per_second: float, **more: str) -> Line:
            hour = per_second * HOUR_S
            return Line(sample, {**labels, **more}, RUNNING_FOR_H * hour, hour * pace, restarts)

        if metric.kind is Kind.COUNTER:
            yield counter(name, rate)
            return
        yield counter(f"{name}_count", rate)
        yield counter(f"{name}_sum", rate * typical * 1.2)
        if metric.kind is Kind.HISTOGRAM:
            for bound in buckets:
                share = 1 / (1 + (typical / bound) ** 3) if bound > 0 else 0.0
                yield counter(f"{name}_bucket", rate * share, le=repr(float(bound)))
            yield counter(f"{name}_bucket", rate, le="+Inf")


def _gauge(metric: Metric, labels: Labels, weight: float, pace: float, restarts: bool) -> Line:
    if metric.unit is Unit.TIMESTAMP:
        return Line(metric.name, labels, LONG_AGO_S, restarts=restarts, after=RESTART_AT * HOUR_S, clock=True)
    level = LEVEL.get(metric, _LEVEL_BY_UNIT.get(metric.unit, 8.0))
    if metric.unit is Unit.FLAG and "sleep_state" in labels:
        level = float(labels["sleep_state"] == "awake")
    elif metric.across is Across.SUM:
        level *= weight
    if not pace and shown_by(metric) is Component.ENGINE and metric.unit in (Unit.REQUESTS, Unit.RATIO):
        level = 0.0
    return Line(metric.name, labels, level / RAW.get(metric, 1.0))


def _scraped(target: Labels, *, up: bool = True) -> Iterator[Line]:
    """What Prometheus itself makes of every scrape."""
    for metric in prometheus.SCRAPE:
        level = float(up) if metric is prometheus.UP else LEVEL.get(metric, _LEVEL_BY_UNIT.get(metric.unit, 1.0))
        yield Line(metric.name, target, level)


# Who watches: sidecar, gateway, lab, GPU exporters, Prometheus and its own, our rules, and an exporter that has nothing
# to do with us.


def _watchers(engines: Sequence[Engine], setting: Setting, there: Sequence[str]) -> Iterator[Line]:
    groups: tuple[tuple[str, str, tuple[Metric, ...]], ...] = (
        ("sidecar", "sidecar:9401", (*sidecar.SIDECAR, *gpu.GPU)), ("gateway", "gateway:8010", gateway.GATEWAY),
        ("ship", "ship:9403", ship.SHIP), ("lab", "lab:9402", sidecar.LAB),
        ("dcgm", "dcgm:9400", dcgm.DCGM), ("prometheus", "prometheus:9090", self_monitoring.PROMETHEUS_SERVER),
        ("alertmanager", "alertmanager:9093", self_monitoring.ALERTMANAGER),
        ("otelcol", "otelcol:8888", self_monitoring.COLLECTOR),
    )  # fmt: skip
    empty = Exposition()
    for job, instance, metrics in (group for group in groups if group[0] in there):
        target = {**setting.place, "job": job, "instance": instance}
        yield from _scraped(target)
        yield from _family(prometheus.PROCESS_START, target, 1.0, setting.pace, ())
        for metric in metrics:
            for labels, weight in list(_label_sets(metric, empty)):
                for more in _per_engine(metric, engines):
                    line = {**target, **more, **labels}
                    if metric in (sidecar.EVENT_TIME, sidecar.CANARY_TIME):
                        yield _event(metric, line)
                    else:
                        name = metric.formerly[0] if setting.bare and metric.formerly else metric.name
                        yield from _family(metric, line, weight, setting.pace, _bounds(metric, empty), name=name)
    if "prometheus" in there:
        yield from _alerts(engines, setting)
        yield from _recorded(engines, setting, logged="sidecar" in there)
    yield from _stranger() if there else ()


def _per_engine(metric: Metric, engines: Sequence[Engine]) -> Iterator[Labels]:
    """The labels by which a watcher tells engines and models apart."""
    if "upstream" in metric.labels:
        for engine in engines:
            own = {"address": f"{engine.name}:8000"} if "address" in metric.labels else {}
            yield (
                {"upstream": engine.name}
                | own
                | ({"model_name": engine.model, "engine": "0"} if "model_name" in metric.labels else {})
            )
    elif "address" in metric.labels:
        yield from ({"address": f"{engine.name}:8000", "model_name": engine.model} for engine in engines)
    elif "model_name" in metric.labels:
        unknown = ["__unknown__"] if metric is sidecar.REASONS else []  # requests whose key nobody knows
        yield from ({"model_name": model} for model in (*sorted({engine.model for engine in engines}), *unknown))
    else:
        yield {}


def _event(metric: Metric, labels: Labels) -> Line:
    """A change near the end of the hour; the other kinds are older, and canaries of days ago raise no alert."""
    fresh = labels.get("kind") == "change"
    at_s = 36 * LONG_AGO_S if metric is sidecar.CANARY_TIME else LONG_AGO_S
    return Line(metric.name, labels, at_s, restarts=fresh, after=RESTART_AT * HOUR_S, clock=True)


def _alerts(engines: Sequence[Engine], setting: Setting) -> Iterator[Line]:
    """Each of our alerts, the last one still pending, and an alert of somebody else."""
    where = {**setting.place, "job": "vllm", "instance": f"{engines[0].name}:8000", "model_name": engines[0].model}
    for i, alert in enumerate(ALERT_RULES):
        state = "pending" if i == len(ALERT_RULES) - 2 else "firing"
        yield Line(
            "ALERTS",
            {
                **where,
                "alertname": alert.name,
                "alertstate": state,
                "severity": str(alert.severity),
                "owner": alert.owner,
            },
            1.0,
        )
    yield Line(
        "ALERTS",
        {"alertname": "KubePodCrashLooping", "alertstate": "firing", "severity": "warning", "namespace": "shop"},
        1.0,
    )


# By label of a recorded series; the others are those of the setting.
_RECORDED_LABELS: dict[str, tuple[str, ...]] = {
    "team": TEAMS,
    "outcome": WORDS["outcome"],
    "type": ("prompt", "completion", "cached"),
    "basis": WORDS["basis"],
    "currency": WORDS["currency"],
}
_RECORDED_BOUNDS = {recorded.TTFT: bounds.TTFT_S, recorded.INTER_TOKEN: bounds.INTER_TOKEN_S}


def _recorded(engines: Sequence[Engine], setting: Setting, logged: bool) -> Iterator[Line]:
    """What a long-term store is sent of our rules (alerts/fleet.py), standing at one value: what they make of raw
    series is test_fleet.py."""
    models = tuple(sorted({engine.model for engine in engines}))
    for record in (record for record in fleet_rules.KEPT if logged or "_watch_" not in record):
        level = record.partition(":")[0]
        free = {
            label: values
            for label, values in {"model_name": models, **_RECORDED_LABELS}.items()
            if re.search(rf"(^|_){label}(_|$)", level)
        }
        place = {label: value for label, value in setting.place.items() if label in level}
        limits = next((limits for what, limits in _RECORDED_BOUNDS.items() if record.startswith(what)), ())
        value = 0.6 if "_usage:" in record else 0.5 if ":p95" in record or ":max_p95" in record else 600.0
        for values in product(*free.values()):
            labels = {**place, **dict(zip(free, values, strict=True))}
            if not limits:
                yield Line(record, labels, value)
            for bound in (*limits, math.inf) if limits else ():
                yield Line(
                    record,
                    {**labels, "le": "+Inf" if bound == math.inf else repr(bound)},
                    value / (1 + (0.3 / bound) ** 3),
                )


STRANGER = "not-ours"


def _stranger() -> Iterator[Line]:
    """An exporter that uses the same labels; its values must not become choices of ours (a known defect of vLLM's own
    board)."""
    labels = dict.fromkeys(("cluster", "namespace", "job", "instance", "model_name", "team"), STRANGER)
    yield from _scraped(dict.fromkeys(("cluster", "namespace", "job", "instance"), STRANGER))
    yield Line("router_requests_total", labels, 100.0, 50.0)
    yield Line(
        prometheus.PROCESS_START.name,
        dict.fromkeys(("cluster", "namespace", "job", "instance"), STRANGER),
        LONG_AGO_S,
        clock=True,
    )


# A captured page, replayed: counters and buckets grow from zero to what the page shows, gauges stand.


def _captured(path: Path) -> Scene:
    shown = exposition_parser.parse(path.read_text())
    target = {"job": "vllm", "instance": "vllm-0:8000"}
    lines = [
        *_scraped(target),
        *(line for name in shown.samples if not name.endswith("_created") for line in _replayed(shown, name, target)),
    ]
    models = frozenset(
        labels["model_name"] for rows in shown.samples.values() for labels, _ in rows if "model_name" in labels
    )
    return Scene(
        f"page-{path.stem}", tuple(lines),
        engine_labels={"job": frozenset({"vllm"}), "instance": frozenset({"vllm-0:8000"}), "model_name": models},
    )  # fmt: skip


def _replayed(shown: Exposition, name: str, target: Labels) -> Iterator[Line]:
    metric = BY_SAMPLE.get(name)
    stem = re.sub(r"_(bucket|count|sum)$", "", name)
    grows = shown.kinds.get(name) == "counter" or shown.kinds.get(stem) in ("histogram", "summary")
    for labels, value in shown.of(name):
        own = {**target, **labels}
        if metric is not None and metric.unit is Unit.TIMESTAMP:
            yield Line(name, own, LONG_AGO_S, clock=True)
        else:
            yield Line(name, own, 0.0, value) if grows else Line(name, own, value)


# What a fixture put in, in seconds: what a panel shows can be held against it.


def seconds_put_in(scene: Scene, names: Iterable[str]) -> tuple[float, float] | None:
    """The smallest mean and the sum of the largest values of the families of seconds among these samples; None if there
    is none."""
    low, high = math.inf, 0.0
    families = {BY_SAMPLE[name] for name in names if name in BY_SAMPLE and BY_SAMPLE[name].unit is Unit.SECONDS}
    if any(metric.kind is Kind.COUNTER for metric in families):  # seconds that add up: their growth follows the window
        return None
    for metric in families:
        found = _range_of(scene, metric)
        if found is None:
            continue
        low, high = min(low, found[0]), high + found[1]
    return (low, high) if high else None


def _range_of(scene: Scene, metric: Metric) -> tuple[float, float] | None:
    rows = [line for line in scene.lines if line.name in metric.samples]
    if metric.kind is Kind.GAUGE:
        values = [line.start for line in rows]
        return (min(values), max(values)) if values else None
    count = sum(line.grows for line in rows if line.name.endswith("_count"))
    total = sum(line.grows for line in rows if line.name.endswith("_sum"))
    if not count:
        return None
    per_bound: dict[float, float] = {}
    for line in rows:
        if line.name.endswith("_bucket"):
            bound = float(line.labels["le"])
            per_bound[bound] = per_bound.get(bound, 0.0) + line.grows
    full = max(per_bound.values(), default=0.0)
    finite = [bound for bound in sorted(per_bound) if bound < math.inf]
    top = next(
        (bound for bound in finite if per_bound[bound] >= 0.9999 * full), finite[-1] if finite else total / count
    )
    return total / count, max(top, total / count)
