"""For every alert the series that make it fire, written as promtool reads them, and what it then says.

A case stands just past its threshold; `below` stands just at it or just before it, and must stay silent for ever.
Labels are those that a scrape of the real thing brings. Here are no numbers of the alerts themselves: what a threshold
is stands in alerts/, what it means in minutes, here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from exporters.text import parse_window

Series = Mapping[str, str]  # series -> values in promtool's notation, one an interval, from 0 on


@dataclass(frozen=True, slots=True)
class Case:
    """How one alert fires: silent at every evaluation up to and including silent_at, and firing, with these labels and
    these words, at fires_at.

    shows: which of several ways. below: the series under which it must never fire; None for what always does. still_at:
    when it still says the same; over_at: when it is silent again by itself. gone_within: how long it may go on once
    every series has ended; None for an alert that tells just that. interval: from sample to sample; every: from
    evaluation to evaluation, the same where it is empty. promtool evaluates every group as often; what counts over days
    is right at 5m alone, as often as hours are recorded."""

    alert: str
    series: Series
    silent_at: str
    fires_at: str
    labels: Mapping[str, str]
    description: str
    below: Series | None
    shows: str = ""
    still_at: str | None = None
    over_at: str | None = None
    gone_within: str | None = "0s"
    interval: str = "1m"
    every: str = ""

    def __str__(self) -> str:
        return f"{self.alert} {self.shows}".strip()


@dataclass(frozen=True, slots=True)
class Quiet:
    """Series under which an alert says nothing, at any evaluation from `since` to `until`, although something like its
    trouble is there."""

    alert: str
    shows: str
    series: Series
    until: str
    since: str = "0s"
    interval: str = "1m"
    every: str = ""

    def __str__(self) -> str:
        return f"{self.alert} {self.shows}"


def samples(case: Case) -> Iterator[tuple[str, dict[str, str], list[tuple[int, float]]]]:
    """Every series of a case as (name, labels, [(second, value), ...]). What is missing or stale has no sample."""
    step_s = parse_window(case.interval)
    for series, values in case.series.items():
        name, labels = parsed(series)
        yield (
            name,
            labels,
            [(at * step_s, float(value)) for at, value in enumerate(expanded(values)) if value not in ("_", "stale")],
        )


def parsed(series: str) -> tuple[str, dict[str, str]]:
    """name{label="value"} -> name and labels."""
    name, _, labels = series.partition("{")
    return name, dict(re.findall(r'(\w+)="([^"]*)"', labels))


_TERM = re.compile(r"(?P<first>-?[\d.e]+)(?:(?P<sign>[+-])(?P<step>[\d.e]+))?(?:x(?P<more>\d+))?")


def expanded(values: str) -> list[str]:
    """`1+2x3 5x1 _x2 stale` -> 1 3 5 7 5 5 _ _ stale. Raises ValueError for what is not of this notation."""
    found: list[str] = []
    for word in values.split():
        if word in ("_", "stale"):
            found.append(word)
        elif re.fullmatch(r"_x\d+", word):
            found += ["_"] * int(word[2:])
        elif term := _TERM.fullmatch(word):
            value, step = float(term["first"]), float(f"{term['sign'] or '+'}{term['step'] or 0}")
            for _ in range(int(term["more"] or 0) + 1):
                found.append(f"{value:.17g}")
                value += step  # added up, as promtool does
        else:
            raise ValueError(f"{word!r} is none of a, axn, a+bxn, _, _xn and stale")
    return found


# ---- who is scraped

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
ENGINE = {"job": "vllm", "instance": A}
MODEL = {**ENGINE, "model_name": "chat"}
SIDECAR = {"job": "sidecar", "instance": "10.0.0.7:9401"}
_CHECKED = {"address": A, "model_name": "chat"}
SHIP = {"job": "ship", "instance": "10.0.0.7:9403"}
GATEWAY = {"job": "gateway", "instance": "10.0.0.5:8010"}
ALERTMANAGER = {"job": "alertmanager", "instance": "10.0.0.6:9093"}
PROMETHEUS = {"job": "prometheus", "instance": "10.0.0.4:9090"}
CARD = {**SIDECAR, "uuid": "GPU-1a"}
DCGM = {"job": "dcgm", "instance": "10.0.0.9:9400", "UUID": "GPU-2f"}
THEIR_CARD = {**DCGM, "uuid": "GPU-2f"}
_LOG = "/var/log/vllm/requests.jsonl"
_UNWRITABLE = (
    "The gateway 10.0.0.5:8010 failed to write request records within 5 min: they wait in memory, and"
    " are lost when there are too many. Or it ended within the last hour without writing the records of"
    " accepted requests. Check free space, inodes and permissions on the disk of the request log."
)
_NOT_SHARING = (
    "The gateway 10.0.0.5:8010 has had no lease from its Valkey or Redis for 1 min and admits within a fixed share of"
    " every limit, so slots may stay unused. Or gateways have different policies. Read the line `no lease from` or"
    " `policies differ` in its log."
)
_LOGIN_PAGE = {"route": "/v1/chat/completions", "reason": "content_type"}
_LARGE = {**_LOGIN_PAGE, "reason": "size"}
_STATE = "/var/lib/vllm-watch/state/sidecar.state"
_H100 = "NVIDIA H100 80GB HBM3"


def _written(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def up(job: str = "vllm", instance: str = A) -> str:
    return _written("up", {"job": job, "instance": instance})


def process_start(instance: str = A) -> str:
    return _written("process_start_time_seconds", {"job": "vllm", "instance": instance})


def engine(name: str, /, instance: str = A, rank: str = "0", **labels: str) -> str:
    """A series of an engine; rank is what vLLM calls `engine`, one of several behind one address."""
    return _written(
        f"vllm:{name}", {"job": "vllm", "instance": instance, "engine": rank, "model_name": "chat", **labels}
    )


def log(name: str, /, **labels: str) -> str:
    """A series that the sidecar counts from the request log."""
    return _written(f"vllm_watch_{name}", {**SIDECAR, "model_name": "chat", "team": "search", **labels})


def sidecar(name: str, /, **labels: str) -> str:
    return _written(f"vllm_watch_{name}", {**SIDECAR, **labels})


def golden(name: str, /, **labels: str) -> str:
    return _written(f"vllm_watch_golden_{name}", {**SIDECAR, **_CHECKED, **labels})


def gateway(name: str, /, **labels: str) -> str:
    return _written(f"vllm_watch_gateway_{name}", {**GATEWAY, **labels})


def card(name: str, /, **labels: str) -> str:
    return _written(f"vllm_watch_gpu_{name}", {**CARD, **labels})


def card_info(uuid: str = "GPU-1a") -> str:
    return card(
        "info", uuid=uuid, driver_version="570.86.15", index="0", mig="off", name=_H100, pci_bus_id="00000000:1B:00.0"
    )


def throttled(**seconds_of: str) -> Series:
    return {card("throttle_seconds_total", reason=reason): values for reason, values in seconds_of.items()}


def links(**errors_of: str) -> Series:
    return {card("nvlink_errors_total", kind=kind): values for kind, values in errors_of.items()}


def dcgm(field: str, /, **labels: str) -> str:
    about = {"gpu": "1", "device": "nvidia1", "modelName": _H100, "hostname": "gpu-2", "pci_bus_id": "00000000:2B:00.0"}
    return _written(f"DCGM_FI_DEV_{field}", {**DCGM, **about, **labels})


def prometheus(name: str, /, **labels: str) -> str:
    return _written(f"prometheus_{name}", {**PROMETHEUS, **labels})


# ---- what happens


def grows(*phases: tuple[int, float], base: float = 0) -> str:
    """A counter from `base` on: (intervals, by so much in each), one phase after the other."""
    words, last = [f"{base:.17g}"], base
    for intervals, step in phases:
        words.append(f"{last + step:.17g}+{step:.17g}x{intervals - 1}")
        # a sum in another order could be a little less, and a counter that falls was restarted
        for _ in range(intervals):
            last += step
    return " ".join(words)


def histogram(name: str, bound: str, above: str, within: str, total: str) -> Series:
    """An engine's observations: so many up to `bound`, all of them up to `above`."""
    return {
        engine(f"{name}_bucket", le=bound): within,
        engine(f"{name}_bucket", le=above): total,
        engine(f"{name}_bucket", le="+Inf"): total,
    }


def bucket_bounds(name: str, *bounds: str, instance: str = A) -> Series:
    """An engine's histogram in which nothing happens."""
    return {engine(f"{name}_bucket", instance=instance, le=bound): "0x60" for bound in (*bounds, "+Inf")}


def clients_of_pair(within: str, total: str) -> Series:
    """The clients' times to first token of a model that has a prefill engine: so many within 2.5 s."""
    return {
        engine("num_requests_running", B, role="prefill"): "0x4000",
        log("ttft_seconds_bucket", le="2.5"): within,
        log("ttft_seconds_bucket", le="5.0"): total,
        log("ttft_seconds_bucket", le="+Inf"): total,
    }


def pair(name: str, /, role: str, **labels: str) -> str:
    """A series of the prefill engine (B) or the decode engine (A) of a pair."""
    return engine(name, B if role == "prefill" else A, role=role, **labels)


def finished(**grown: str) -> Series:
    """What an engine finished, by reason."""
    return {engine("request_success_total", finished_reason=reason): values for reason, values in grown.items()}


def responses(instance: str = A, **grown: str) -> Series:
    """HTTP responses of an engine's API server by status class (s5xx is status 5xx), and the series that names its
    model."""
    about = {"job": "vllm", "instance": instance, "handler": "/v1/chat/completions", "method": "POST"}
    return {
        **{_written("http_requests_total", {**about, "status": name[1:]}): values for name, values in grown.items()},
        engine("num_requests_running", instance): "0x1600",
    }


def refused_by_engine(values: str) -> Series:
    """The one series of vLLM that does not say which engine of a process it is of."""
    return {_written("vllm:admission_rejections_total", {**MODEL, "reason": "max_num_queued_reqs"}): values}


def read_log(lag: str, lines: str, unread: str) -> Series:
    """How the sidecar gets on with a request log."""
    return {
        sidecar("log_lag_seconds", path=_LOG): lag,
        sidecar("log_lines_total"): lines,
        sidecar("log_unread_bytes", path=_LOG): unread,
    }


def in_cluster(cluster: str, of: Series) -> Series:
    """The same from a Prometheus that calls itself something."""
    return {series.replace("{", f'{{cluster="{cluster}", ', 1): values for series, values in of.items()}


def outcomes(**grown: str) -> Series:
    """What ended in the request log, by outcome."""
    return {log("requests_total", outcome=outcome): values for outcome, values in grown.items()}


def books(missing_in_log: str, extra_in_log: str, engine: str, log: str) -> Series:
    """What a sidecar that compares the log with the engines has booked for a model, in requests."""
    of = {"kind": "requests", "model_name": "chat"}
    return {
        sidecar("missing_in_log_total", cause="unknown", **of): missing_in_log,
        sidecar("extra_in_log_total", cause="unknown", **of): extra_in_log,
        sidecar("reconcile_engine_total", **of): engine,
        sidecar("reconcile_logged_total", **of): log,
        sidecar("reconcile_settled_timestamp_seconds", model_name="chat"): "0+60x100",
    }


def cost(teams: str, idle: str) -> Series:
    """What a sidecar attributed: all the time, and busy time only."""
    of = {"currency": "EUR", "model_name": "chat"}
    return {
        sidecar("cost_total", basis="allocation", team="search", **of): teams,
        sidecar("cost_total", basis="allocation", team="__idle__", **of): idle,
        sidecar("cost_total", basis="usage", team="search", **of): teams,
    }


_DOWN = (
    "No engine of job vllm has answered Prometheus for 1 min: users get connection errors, or only the"
    " network between Prometheus and the engines is down. Check /health of an engine: if it answers, only"
    " Prometheus cannot reach it; if not, read the end of its log."
)
_UNREACHABLE = (
    "10.0.0.1:8000 of job vllm has not answered Prometheus for 2 min, although it did within the last"
    " hour or has had more time than a start takes. Its requests are lost, and the other engines of the"
    " job carry its load. Check whether the process runs, and read the end of its log."
)
_MODEL_DOWN = (
    "No engine of job vllm that served chat within the last day has answered for 1 min: requests for this model fail,"
    " also while other models of the job are served. Read the end of the log of its engines; until one answers, send"
    " its requests to another model (Mitigation 3)."
)
# beside the model of a case: another of the same job, which is up all the time
_TWO_MODELS = {up(instance=B): "1x70", engine("num_requests_running", instance=B, model_name="embed"): "0x70"}
_ENGINES = (
    Case(
        "VLLMEngineDown",
        {up(): "1x3 0x60", up(instance=B): "1x3 0x60"},
        silent_at="4m",
        fires_at="5m",
        labels={"job": "vllm"},
        description=_DOWN,
        below={up(): "1x3 0x60", up(instance=B): "1x60"},
    ),
    Case(
        "VLLMEngineDown",
        shows="that never was up",
        series={up(): "_x3 0x90", up(instance=B): "_x3 0x90"},
        silent_at="13m",
        fires_at="14m",
        labels={"job": "vllm"},
        description=_DOWN,
        below={up(): "_x3 0x90", up(instance=B): "_x3 0x10 1x60"},
        still_at="80m",
    ),
    Case(
        "VLLMModelDown",
        {**_TWO_MODELS, up(): "1x9 0x60", engine("num_requests_running"): "0x4 stale"},
        silent_at="10m",
        fires_at="11m",
        labels={"job": "vllm", "model_name": "chat"},
        description=_MODEL_DOWN,
        below={
            **_TWO_MODELS,
            up(): "1x9 0x60",
            engine("num_requests_running"): "0x4 stale",
            up(instance="10.0.0.3:8000"): "1x69",
            engine("num_requests_running", instance="10.0.0.3:8000"): "0x69",
        },
    ),
    Case(
        "VLLMModelDown",
        shows="of which the pod was replaced by one that does not start",
        series={
            **_TWO_MODELS,
            up(): "1x4 stale",
            engine("num_requests_running"): "0x4 stale",
            up(instance="10.0.0.3:8000"): "_x5 0x60",
            engine("num_requests_running", instance="10.0.0.3:8000"): "_x65 0",
        },
        silent_at="15m",
        fires_at="16m",
        labels={"job": "vllm", "model_name": "chat"},
        description=_MODEL_DOWN,
        below={
            **_TWO_MODELS,
            up(): "1x4 stale",
            engine("num_requests_running"): "0x4 stale",
            up(instance="10.0.0.3:8000"): "_x5 0x9 1x50",
            engine("num_requests_running", instance="10.0.0.3:8000"): "_x15 0x50",
        },
    ),
    Case(
        "VLLMEngineUnreachable",
        {up(): "1x3 0x90", up(instance=B): "1x90"},
        silent_at="5m",
        fires_at="6m",
        labels=ENGINE,
        description=_UNREACHABLE,
        below={up(): "1x3 0x1 1x60", up(instance=B): "1x60"},
        still_at="65m",  # it is told on when the hour in which it was up is over
    ),
    Case(
        "VLLMEngineUnreachable",
        shows="while Prometheus was away",
        series={up(): "1x3 _x20 0x60", up(instance=B): "1x3 _x20 1x60"},
        silent_at="25m",
        fires_at="26m",
        labels=ENGINE,
        description=_UNREACHABLE,
        below={up(): "1x3 _x20 0x1 1x60", up(instance=B): "1x3 _x20 1x60"},
    ),
    Case(
        "VLLMEngineUnreachable",
        shows="that never was up",
        series={up(): "_x3 0x90", up(instance=B): "1x90"},
        silent_at="14m",
        fires_at="15m",
        labels=ENGINE,
        description=_UNREACHABLE,
        below={up(): "_x3 0x11 1x60", up(instance=B): "1x60"},
        still_at="80m",
    ),
    Case(
        "VLLMEngineUnreachable",
        shows="that never was up, as it was before Prometheus was away",
        series={up(): "0x4 _x12 0x60", up(instance=B): "1x4 _x12 1x60"},
        silent_at="18m",
        fires_at="19m",
        labels=ENGINE,
        description=_UNREACHABLE,
        below={up(): "0x4 _x12 0x1 1x60", up(instance=B): "1x4 _x12 1x60"},
    ),
    Case(
        "VLLMEngineGone",
        {up(): "1x3 stale", up(instance=B): "1x3 stale"},
        silent_at="18m",
        fires_at="19m",
        labels={"job": "vllm"},
        description=(
            "Job vllm had engines within the last day; service discovery has found none for 15 min, so no other"
            " alert about them can fire. Check whether the engines still serve. If they were removed on"
            " purpose, silence this alert: it ends after a day."
        ),
        below={up(): "1x3 stale", up(instance=B): "1x60"},
        still_at="1442m",
        over_at="1443m",
        gone_within=None,
    ),
    Case(
        "VLLMMetricsAbsent",
        {up(): "1x60", engine("num_requests_running"): "0x3 stale"},
        silent_at="8m",
        fires_at="9m",
        labels=ENGINE,
        description=(
            "10.0.0.1:8000 of job vllm has answered its scrape for 5 min without any vllm: series: its panels"
            " are empty, and no other alert about it can fire. Check that the scrape address is the engine's"
            " own port and that vLLM runs without --disable-log-stats."
        ),
        below={up(): "1x60", engine("num_requests_running"): "0x3 _x4 0x60"},
    ),
    Case(
        "VLLMEngineFrozen",
        {
            engine("num_requests_running"): "4x60",
            engine("num_requests_waiting"): "2x60",
            engine("generation_tokens_total"): "0+900x10 9000x50",
            engine("prompt_tokens_total"): "0+5000x10 50000x50",
        },
        silent_at="12m",
        fires_at="13m",
        labels=MODEL,
        description=(
            "chat on 10.0.0.1:8000 makes no progress: for 30 s by the gateway, 45 s by the sidecar or 4 min by its"
            " own metrics, which last showed 6 running requests. Its /health may still return 200, so balancers"
            " keep sending to it. Save the stacks of its processes with py-spy (First five minutes, step 5), then"
            " restart this engine."
        ),
        below={
            engine("num_requests_running"): "4x60",
            engine("num_requests_waiting"): "2x60",
            engine("generation_tokens_total"): "0+900x10 9000x50",
            engine("prompt_tokens_total"): "0+5000x10 50000+1x49",
        },
    ),
    Case(
        "VLLMEngineFrozen",
        shows="while one request runs and another is fetched",
        series={
            engine("num_requests_running"): "1x60",
            engine("num_requests_waiting"): "1x60",
            engine("num_requests_kv_fetch_by_stage", stage="in_progress"): "1x60",
            engine("generation_tokens_total"): "0+900x10 9000x50",
            engine("prompt_tokens_total"): "0+5000x10 50000x50",
        },
        silent_at="12m",
        fires_at="13m",
        labels=MODEL,
        description=(
            "chat on 10.0.0.1:8000 makes no progress: for 30 s by the gateway, 45 s by the sidecar or 4 min by its"
            " own metrics, which last showed 2 running requests. Its /health may still return 200, so balancers"
            " keep sending to it. Save the stacks of its processes with py-spy (First five minutes, step 5), then"
            " restart this engine."
        ),
        below={
            engine("num_requests_running"): "1x60",
            engine("num_requests_kv_fetch_by_stage", stage="in_progress"): "1x60",
            engine("generation_tokens_total"): "0+900x60",
            engine("prompt_tokens_total"): "0+5000x60",
        },
    ),
    Case(
        "VLLMEngineFrozen",
        shows="by the gateway, while its own gauges read 0",
        series={
            engine("num_requests_running"): "0x60",
            engine("num_requests_waiting"): "0x60",
            gateway("engine_state", upstream="a", address=A, state="healthy", evidence="output"): "1x9 stale",
            gateway("engine_state", upstream="a", address=A, state="hung", evidence="output_stopped"): "_x10 1x50",
        },
        silent_at="9m",
        fires_at="10m",
        labels=MODEL,
        description=(
            "chat on 10.0.0.1:8000 makes no progress: for 30 s by the gateway, 45 s by the sidecar or 4 min by its"
            " own metrics, which last showed 0 running requests. Its /health may still return 200, so balancers"
            " keep sending to it. Save the stacks of its processes with py-spy (First five minutes, step 5), then"
            " restart this engine."
        ),
        below={
            engine("num_requests_running"): "0x60",
            engine("num_requests_waiting"): "0x60",
            gateway("engine_state", upstream="a", address=A, state="suspect", evidence="output_stopped"): "1x60",
        },
    ),
    Case(
        "VLLMEngineFrozen",
        shows="by the sidecar",
        series={
            engine("num_requests_running"): "3x60",
            engine("generation_tokens_total"): "0+500x60",
            sidecar("engine_state", upstream="a", address=A, state="hung", evidence="steps_stopped"): "_x10 1x50",
        },
        silent_at="9m",
        fires_at="11m",
        labels=MODEL,
        description=(
            "chat on 10.0.0.1:8000 makes no progress: for 30 s by the gateway, 45 s by the sidecar or 4 min by its"
            " own metrics, which last showed 3 running requests. Its /health may still return 200, so balancers"
            " keep sending to it. Save the stacks of its processes with py-spy (First five minutes, step 5), then"
            " restart this engine."
        ),
        below={
            engine("num_requests_running"): "3x60",
            sidecar("engine_state", upstream="a", address=A, state="slow", evidence="steps_stopped"): "1x60",
        },
    ),
    Case(
        "VLLMRestartLoop",
        shows="by its start time",
        series={process_start(): "30x9 600x9 1200x9 1800x90"},
        silent_at="29m",
        fires_at="30m",
        labels=ENGINE,
        description=(
            "10.0.0.1:8000 of job vllm has restarted 3 times within the last hour; each restart loses its"
            " requests and its prefix cache. Read the last error in the log of the previous process: it names"
            " the cause, such as lack of memory or a failed worker."
        ),
        below={process_start(): "30x9 600x9 1800x90"},
        over_at="79m",
        gone_within="50m",
    ),
    Case(
        "VLLMRestartLoop",
        shows="by its counters",
        series={
            engine("generation_tokens_total"): "0+100x9 0+100x9 0+100x9 0+100x90",
            engine("generation_tokens_total", rank="1"): "0+80x29 0+80x90",
        },
        silent_at="29m",
        fires_at="30m",
        labels=ENGINE,
        description=(
            "10.0.0.1:8000 of job vllm has restarted 3 times within the last hour; each restart loses its"
            " requests and its prefix cache. Read the last error in the log of the previous process: it names"
            " the cause, such as lack of memory or a failed worker."
        ),
        below={
            engine("generation_tokens_total"): "0+100x9 0+100x9 0+100x90",
            engine("generation_tokens_total", rank="1"): "0+80x29 0+80x90",
        },
        over_at="79m",
        gone_within="50m",
    ),
    Case(
        "VLLMSlowStart",
        {up(): "0x10 1x80", process_start(): "_x11 0x80"},
        silent_at="10m",
        fires_at="11m",
        labels=ENGINE,
        description=(
            "10.0.0.1:8000 of job vllm first answered 11m 0s after its process started, within the last hour:"
            " too late to replace a failed engine. Compare the load, compile and graph-capture times in its log"
            " with those of an earlier start."
        ),
        below={up(): "0x9 1x80", process_start(): "_x10 0x80"},
        still_at="59m",
        over_at="60m",
    ),
    Case(
        "VLLMQueueGrowing",
        {engine("num_requests_waiting"): "11.5+1.1x40 0x20"},
        silent_at="13m",
        fires_at="14m",
        labels=MODEL,
        description=(
            "At least 17 requests have waited for chat on 10.0.0.1:8000 for 10 min, and the queue grows: more"
            " arrive than it finishes. Check whether other engines of the model have room, and send new"
            " requests there; if none has, pause batch work."
        ),
        below={engine("num_requests_waiting"): "11.5+0.9x60"},
        over_at="47m",
        gone_within="10m",
    ),
    Case(
        "VLLMRequestsDeferred",
        {
            engine("num_requests_waiting_by_reason", reason="deferred"): "0x3 2x60",
            engine("num_requests_waiting_by_reason", reason="capacity"): "0x63",
        },
        silent_at="22m",
        fires_at="23m",
        labels=MODEL,
        description=(
            "At least 2 requests for chat on 10.0.0.1:8000 have waited for 10 min for an adapter slot, a"
            " grammar or a KV-cache transfer, not for free blocks. Check whether more LoRA adapters are in use"
            " than --max-loras admits at once (First five minutes, step 3)."
        ),
        below={
            engine("num_requests_waiting_by_reason", reason="deferred"): "0x3 2x17 0 2x17 0 2x17 0x20",
            engine("num_requests_waiting_by_reason", reason="capacity"): "9x80",
        },
        gone_within="10m",
    ),
    Case(
        "VLLMGoldenDiffers",
        {
            golden("verdict", verdict="same", cause="noise"): "1x3 stale",
            golden("verdict", verdict="wrong", cause="numeric"): "_x4 1x40",
        },
        silent_at="4m",
        fires_at="5m",
        labels={**SIDECAR, **_CHECKED, "verdict": "wrong", "cause": "numeric"},
        description=(
            "chat on 10.0.0.1:8000 has been wrong (cause: numeric) for 1 min by its last golden check: it does not"
            " compute what was recorded, and answers may be wrong. Take the engine out of the load balancer unless it"
            " was changed on purpose, then run vllm-watch golden check again (First five minutes, step 2)."
        ),
        below={golden("verdict", verdict="same", cause="noise"): "1x43"},
    ),
    Case(
        "VLLMGoldenStale",
        {
            golden("check_timestamp_seconds"): "0x60",
            golden("check_interval_seconds"): "600x60",
            sidecar("source_up", kind="golden", source="/var/lib/vllm-watch/golden.json"): "1x60",
        },
        silent_at="35m",
        fires_at="36m",
        labels={**SIDECAR, **_CHECKED},
        description=(
            "For 5 min more than 3 intervals have passed since the last complete golden check of chat on"
            " 10.0.0.1:8000, 36m 0s: damage would not be noticed. Check that vllm-watch golden check runs and reaches"
            " the engine, and read the error that it prints (First five minutes, step 2)."
        ),
        below={golden("check_timestamp_seconds"): "0x29 1740x30", golden("check_interval_seconds"): "600x60"},
    ),
)


_LATENCY = (
    Case(
        "VLLMQueueTimeHigh",
        histogram("request_queue_time_seconds", "5.0", "10.0", within="0+94.6x40", total="0+100x40"),
        silent_at="5m",
        fires_at="6m",
        labels=MODEL,
        description=(
            "The p95 queue time of chat on 10.0.0.1:8000 is 5.37s over 5 min: one request in twenty waits that"
            " long or longer before it is scheduled. Check if requests wait now: if none does, the burst is over; if"
            " they do, ask the team that sends most to pause its batch work."
        ),
        below=histogram("request_queue_time_seconds", "5.0", "10.0", within="0+95.4x40", total="0+100x40"),
        gone_within="10m",
    ),
    Case(
        "VLLMTTFTHigh",
        histogram("time_to_first_token_seconds", "2.5", "5.0", within="0+94.6x40", total="0+100x40"),
        silent_at="5m",
        fires_at="6m",
        labels={"model_name": "chat"},
        description=(
            "The p95 time to first token of chat is 2.685s over 10 min: one request in twenty waits that long"
            " or longer. Check how much of it is queue time (First five minutes, step 3): a queue needs capacity, a"
            " long"
            " prefill needs shorter prompts or a warm prefix cache."
        ),
        below=histogram("time_to_first_token_seconds", "2.5", "5.0", within="0+95.4x40", total="0+100x40"),
        gone_within="20m",
    ),
    Case(
        "VLLMInterTokenLatencyHigh",
        histogram("inter_token_latency_seconds", "0.1", "0.15", within="0+94.6x40", total="0+100x40"),
        silent_at="5m",
        fires_at="6m",
        labels={"model_name": "chat"},
        description=(
            "The p95 time between tokens of chat is 103.7ms over 10 min, slower than people read. Compare"
            " running requests and KV-cache usage with an hour ago: a larger batch or longer contexts slow"
            " every step."
        ),
        below=histogram("inter_token_latency_seconds", "0.1", "0.15", within="0+95.4x40", total="0+100x40"),
        gone_within="20m",
    ),
    Case(
        "VLLMInterTokenLatencyHigh",
        shows="under its older name",
        series=histogram("time_per_output_token_seconds", "0.1", "0.15", within="0+94.6x40", total="0+100x40"),
        silent_at="5m",
        fires_at="6m",
        labels={"model_name": "chat"},
        description=(
            "The p95 time between tokens of chat is 103.7ms over 10 min, slower than people read. Compare"
            " running requests and KV-cache usage with an hour ago: a larger batch or longer contexts slow"
            " every step."
        ),
        below=histogram("time_per_output_token_seconds", "0.1", "0.15", within="0+95.4x40", total="0+100x40"),
        gone_within="20m",
    ),
    # Before, 96 of 100 lay within 1 s: a p95 of 0.99 s. 94.4 of 100 are a p95 of 1.161 s, 17 % worse; 94.6 are 1.111 s,
    # 12 % worse.
    Case(
        "VLLMLatencyWorseThanLastWeek",
        shows="in the first token",
        series={
            **histogram(
                "time_to_first_token_seconds",
                "1.0",
                "2.5",
                within="0+9.6x60 _x4979 576+9.44x100",
                total="0+10x60 _x4979 600+10x100",
            ),
            **finished(stop="0+10x60 _x4979 600+10x100"),
        },
        silent_at="10140m",
        fires_at="10150m",
        labels={"model_name": "chat", "figure": "time to first token"},
        description=(
            "The p95 time to first token of chat is 1.161s over the last hour, more than 15 % above the same"
            " hour of last week. Compare request rate and prompt lengths of the two hours before looking for a"
            " cause in the engine."
        ),
        below={
            **histogram(
                "time_to_first_token_seconds",
                "1.0",
                "2.5",
                within="0+9.6x60 _x4979 576+9.46x100",
                total="0+10x60 _x4979 600+10x100",
            ),
            **finished(stop="0+10x60 _x4979 600+10x100"),
        },
        over_at="10250m",
        gone_within="1h",
        interval="2m",
        every="10m",
    ),
    Case(
        "VLLMLatencyWorseThanLastWeek",
        shows="between tokens",
        series={
            **histogram(
                "inter_token_latency_seconds",
                "0.1",
                "0.15",
                within="0+96x60 _x4979 5760+65x100",
                total="0+100x60 _x4979 6000+100x100",
            ),
            **finished(stop="0+10x60 _x4979 600+10x100"),
        },
        silent_at="10140m",
        fires_at="10150m",
        labels={"model_name": "chat", "figure": "time between tokens"},
        description=(
            "The p95 time between tokens of chat is 142.9ms over the last hour, more than 15 % above the same"
            " hour of last week. Compare request rate and prompt lengths of the two hours before looking for a"
            " cause in the engine."
        ),
        below={
            **histogram(
                "inter_token_latency_seconds",
                "0.1",
                "0.15",
                within="0+96x60 _x4979 5760+65x100",
                total="0+100x60 _x4979 6000+100x100",
            ),
            **finished(stop="0+3x60 _x4979 180+3x100"),
        },
        over_at="10250m",
        gone_within="1h",
        interval="2m",
        every="10m",
    ),
    *(
        Case(
            "VLLMMixedHistogramBounds",
            shows=f"of {family}",
            series={
                **bucket_bounds(name, "0.3", "0.5"),
                **bucket_bounds(name, "0.3", "0.4", "0.45", "0.5", instance=B),
            },
            silent_at="29m",
            fires_at="30m",
            labels={"model_name": "chat", "family": family},
            description=(
                f"Engines of chat have differed in 2 bucket bounds of {family} for 30 min: percentiles are estimated"
                " from the bounds that all of them share. Start all engines of the model with the same"
                " --custom-histogram-buckets."
            ),
            below={**bucket_bounds(name, "0.3", "0.5"), **bucket_bounds(name, "0.3", "0.5", instance=B)},
        )
        for family, name in (
            ("time_to_first_token", "time_to_first_token_seconds"),
            ("inter_token_latency", "inter_token_latency_seconds"),
            ("request_latency", "e2e_request_latency_seconds"),
        )
    ),
    Case(
        "VLLMLatencyWorseSinceTuning",
        shows="in the first token",
        series={
            **histogram(
                "time_to_first_token_seconds", "1.0", "2.5", within=grows((60, 9.6), (90, 9.44)), total="0+10x150"
            ),
            **finished(stop="0+10x150"),
            sidecar("tuning_event_timestamp_seconds", kind="change"): "_x60 3600x90",
        },
        silent_at="89m",
        fires_at="90m",
        labels={"model_name": "chat", "figure": "time to first token"},
        description=(
            "The p95 time to first token of chat is 1.141s over the last half hour, more than 15 % above the"
            " half hour before the last change. Roll the change back if every engine has it, and try it on a"
            " canary first."
        ),
        below={
            **histogram(
                "time_to_first_token_seconds", "1.0", "2.5", within=grows((60, 9.6), (90, 9.46)), total="0+10x150"
            ),
            **finished(stop="0+10x150"),
            sidecar("tuning_event_timestamp_seconds", kind="change"): "_x60 3600x90",
        },
        over_at="121m",
    ),
    Case(
        "VLLMLatencyWorseSinceTuning",
        shows="between tokens",
        series={
            **histogram(
                "inter_token_latency_seconds", "0.1", "0.15", within=grows((60, 960), (90, 650)), total="0+1000x150"
            ),
            **finished(stop="0+10x150"),
            sidecar("tuning_event_timestamp_seconds", kind="version"): "_x60 3600x90",
        },
        silent_at="89m",
        fires_at="90m",
        labels={"model_name": "chat", "figure": "time between tokens"},
        description=(
            "The p95 time between tokens of chat is 142.5ms over the last half hour, more than 15 % above the"
            " half hour before the last change. Roll the change back if every engine has it, and try it on a"
            " canary first."
        ),
        below={
            **histogram(
                "inter_token_latency_seconds", "0.1", "0.15", within=grows((60, 960), (90, 650)), total="0+1000x150"
            ),
            **finished(stop="0+10x150"),
            sidecar("tuning_event_timestamp_seconds", kind="note"): "_x60 3600x90",
        },
        over_at="121m",
    ),
)

_CACHE = (
    Case(
        "VLLMKVCacheNearlyFull",
        {engine("kv_cache_usage_perc"): "0.9x5 0.91x30", engine("kv_cache_usage_perc", instance=B): "0.5x35"},
        silent_at="10m",
        fires_at="11m",
        labels=MODEL,
        description=(
            "chat on 10.0.0.1:8000 uses 91% of its KV-cache blocks, above 90 % for 5 min; when no block is"
            " free, vLLM preempts requests. Check whether requests wait or are preempted: if so, pause batch"
            " work; if not, look again in 10 min."
        ),
        below={engine("kv_cache_usage_perc"): "0.9x35", engine("kv_cache_usage_perc", instance=B): "0.9x35"},
        gone_within="3m",
    ),
    Case(
        "VLLMKVCacheNearlyFull",
        shows="under its older name",
        series={engine("gpu_cache_usage_perc"): "0.9x5 0.91x30"},
        silent_at="10m",
        fires_at="11m",
        labels=MODEL,
        description=(
            "chat on 10.0.0.1:8000 uses 91% of its KV-cache blocks, above 90 % for 5 min; when no block is"
            " free, vLLM preempts requests. Check whether requests wait or are preempted: if so, pause batch"
            " work; if not, look again in 10 min."
        ),
        below={engine("gpu_cache_usage_perc"): "0.9x35"},
        gone_within="3m",
    ),
    Case(
        "VLLMPreemptionsSustained",
        {engine("num_preemptions_total"): "0+6.6x60"},
        silent_at="14m",
        fires_at="15m",
        labels=MODEL,
        description=(
            "0.11 requests per second for chat on 10.0.0.1:8000 have lost their KV-cache blocks for 10 min and"
            " are computed again. Check the preemptions per finished request (First five minutes, step 1): above 0.5"
            " pause"
            " batch work, or move load to another engine."
        ),
        below={engine("num_preemptions_total"): "0+5.94x60"},
        gone_within="10m",
    ),
    Case(
        "VLLMKVCacheThrashing",
        {engine("kv_cache_usage_perc"): "0.95x5 0.96x30", engine("num_preemptions_total"): "0+1x35"},
        silent_at="10m",
        fires_at="11m",
        labels=MODEL,
        description=(
            "chat on 10.0.0.1:8000 uses 96% of its KV-cache blocks and has preempted running requests for 5"
            " min: work is computed twice. Take load off this engine: ask the team that sends most to pause,"
            " batch work first."
        ),
        below={engine("kv_cache_usage_perc"): "0.95x35", engine("num_preemptions_total"): "0+1x35"},
        gone_within="6m",
    ),
    # Eight hours at 60 %, then a prompt template that shares little: a little less than half of the day's ratio.
    Case(
        "VLLMCacheHitsCollapsed",
        {
            engine("prefix_cache_queries_total"): grows((240, 2000), (60, 2000)),
            engine("prefix_cache_hits_total"): grows((240, 1200), (60, 560)),
            **finished(stop=grows((300, 8))),
        },
        silent_at="515m",
        fires_at="520m",
        labels={"model_name": "chat"},
        description=(
            "28% of the prompt tokens of chat came from the prefix cache over 30 min, less than 50 % of the"
            " ratio over the last day; the rest is computed again. Check whether an engine restarted or joined"
            " (First five minutes, step 2), then whether a prompt template or the routing changed."
        ),
        below={
            engine("prefix_cache_queries_total"): grows((240, 2000), (60, 2000)),
            engine("prefix_cache_hits_total"): grows((240, 1200), (60, 620)),
            **finished(stop=grows((300, 8))),
        },
        gone_within="30m",
        interval="2m",
        every="5m",
    ),
    Case(
        "VLLMAcceptanceLow",
        {
            engine("spec_decode_num_draft_tokens_total"): "0+1000x60",
            engine("spec_decode_num_accepted_tokens_total"): "0+390x60",
        },
        silent_at="10m",
        fires_at="11m",
        labels={"model_name": "chat"},
        description=(
            "39% of the tokens drafted for chat were accepted over 30 min: drafting and verifying cost about"
            " what they save. Check the acceptance by position and the batch size (First five minutes, steps 1 and 3)"
            " before turning speculation off."
        ),
        below={
            engine("spec_decode_num_draft_tokens_total"): "0+1000x60",
            engine("spec_decode_num_accepted_tokens_total"): "0+410x60",
        },
        gone_within="30m",
    ),
)

_REFUSED = {"outcome": "rejected", "reason": "body_too_large"}
_TRAFFIC = (
    Case(
        "VLLMErrorRatioHigh",
        outcomes(ok="0+9946x40", timeout="0+27x40", upstream_error="0+27x40", rejected="0x40", client_abort="0x40"),
        silent_at="5m",
        fires_at="6m",
        labels={"model_name": "chat"},
        description=(
            "0.54% of the requests for chat ended in an error or a timeout over 5 min. Check the failure reason"
            " and the team in the request log (First five minutes, step 1), then whether every engine answers."
        ),
        below=outcomes(
            ok="0+9954x40", timeout="0+23x40", upstream_error="0+23x40", rejected="0x40", client_abort="0x40"
        ),
        gone_within="10m",
    ),
    Case(
        "VLLMHTTPErrorRatioHigh",
        responses(s2xx="0+9946x40", s4xx="0+500x40", s5xx="0+54x40"),
        silent_at="5m",
        fires_at="6m",
        labels=MODEL,
        description=(
            "10.0.0.1:8000 answered 0.54% of the requests for chat with HTTP 5xx over 5 min. Coarse, as the model has"
            " no request log: rejected and failed streams have status 200. Read the newest errors in the engine's log"
            " (First five minutes, step 1); if only this engine fails, take it out of the load balancer."
        ),
        below=responses(s2xx="0+9954x40", s4xx="0+500x40", s5xx="0+46x40"),
        gone_within="10m",
    ),
    Case(
        "VLLMEngineRejecting",
        refused_by_engine("0x5 2.2+2.2x40"),
        silent_at="11m",
        fires_at="12m",
        labels=MODEL,
        description=(
            "10.0.0.1:8000 has rejected 11 requests for chat within 5 min by its own queue limit; a rejected"
            " stream still has HTTP status 200. Check whether other engines of the model have room, and ask the"
            " largest sender to pause batch work."
        ),
        below=refused_by_engine("0x5 1.8+1.8x40"),
        gone_within="10m",
    ),
    Case(
        "VLLMGatewayRejecting",
        {log("request_reasons_total", **_REFUSED): "0+11x40", **outcomes(ok="0+89x40", rejected="0+11x40")},
        silent_at="5m",
        fires_at="6m",
        labels={"team": "search"},
        description=(
            "The gateway rejected 11% of the requests of team search over 5 min. Check the reason (First five"
            " minutes, step"
            " 1): it distinguishes a limit that is too low from a client that does not back off or sends a"
            " wrong key."
        ),
        below={log("request_reasons_total", **_REFUSED): "0+9x40", **outcomes(ok="0+91x40", rejected="0+9x40")},
        gone_within="10m",
    ),
    Case(
        "VLLMClientHangupsRising",
        shows="by the request log",
        series=outcomes(ok=grows((120, 96), (40, 88)), client_abort=grows((120, 4), (40, 12))),
        silent_at="128m",
        fires_at="129m",
        labels={"model_name": "chat"},
        description=(
            "12% of the clients of chat closed the connection over 5 min before their response was complete."
            " Check after how many seconds they left (First five minutes, step 1): one age for all is a client timeout,"
            " many ages are people who stopped waiting."
        ),
        below=outcomes(ok=grows((120, 96), (40, 91)), client_abort=grows((120, 4), (40, 9))),
        gone_within="10m",
    ),
    Case(
        "VLLMClientHangupsRising",
        shows="without a request log",
        series={
            engine("time_to_first_token_seconds_bucket", le="+Inf"): "0+100x40",
            engine("e2e_request_latency_seconds_count"): "0+88x40",
            engine("num_requests_running"): "4x40",
        },
        silent_at="7m",
        fires_at="8m",
        labels={"model_name": "chat"},
        description=(
            "11.2% of the clients of chat closed the connection over 5 min before their response was complete."
            " Check after how many seconds they left (First five minutes, step 1): one age for all is a client timeout,"
            " many ages are people who stopped waiting."
        ),
        below={
            engine("time_to_first_token_seconds_bucket", le="+Inf"): "0+100x40",
            engine("e2e_request_latency_seconds_count"): "0+88x40",
            engine("num_requests_running"): "12x40",
        },
        gone_within="10m",
    ),
    Case(
        "VLLMAnswersCutOff",
        finished(stop="0+69x60", length="0+31x60"),
        silent_at="15m",
        fires_at="16m",
        labels={"model_name": "chat"},
        description=(
            "31% of the outputs of chat were cut off by max_tokens or the context length over 30 min. Find the"
            " team they belong to (First five minutes, step 1), and compare its max_tokens with the length of its"
            " outputs."
        ),
        below=finished(stop="0+71x60", length="0+29x60"),
        gone_within="35m",
    ),
    # Of 50 requests a minute one is in no log: 2 %. Within half an hour that is more than 1 % of them after 16 minutes.
    Case(
        "VLLMEngineExceedsLog",
        shows="to the last request",
        series=books(
            missing_in_log=grows((40, 0), (60, 1)),
            extra_in_log=grows((100, 0)),
            engine=grows((100, 50)),
            log=grows((40, 50), (60, 49)),
        ),
        silent_at="70m",
        fires_at="71m",
        labels={"model_name": "chat"},
        description=(
            "The engines finished 30 more requests for chat within 30 min than the request log contains:"
            " clients bypass the gateway, or records are lost. Check which model and cause the sidecar reports"
            " (First five minutes, step 1)."
        ),
        below={
            **books(
                missing_in_log=grows((40, 0), (60, 0.48)),
                extra_in_log=grows((100, 0)),
                engine=grows((100, 50)),
                log=grows((100, 50)),
            ),
            **finished(stop=grows((100, 20))),
            **outcomes(ok=grows((100, 9))),
        },
        gone_within="30m",
    ),
    Case(
        "VLLMEngineExceedsLog",
        shows="where no sidecar compares",
        series={
            **finished(stop=grows((100, 20))),
            **outcomes(ok=grows((40, 19.6), (60, 15.6)), client_abort=grows((100, 0.4)), rejected=grows((100, 9))),
        },
        silent_at="62m",
        fires_at="63m",
        labels={},
        description=(
            "The engines finished 95.17 more requests within 30 min than the request log contains: clients"
            " bypass the gateway, or records are lost. Check which model and cause the sidecar reports (First five"
            " minutes,"
            " step 1)."
        ),
        below={
            **finished(stop=grows((100, 20))),
            **outcomes(ok=grows((40, 19.6), (60, 18.65)), client_abort=grows((100, 0.4)), rejected=grows((100, 0))),
        },
        gone_within="35m",
    ),
    Case(
        "VLLMLogExceedsEngine",
        shows="to the last request",
        series=books(
            missing_in_log=grows((100, 0)),
            extra_in_log=grows((40, 0), (60, 1)),
            engine=grows((40, 50), (60, 49)),
            log=grows((100, 50)),
        ),
        silent_at="70m",
        fires_at="71m",
        labels={"model_name": "chat"},
        description=(
            "The request log contains 30 more successful requests for chat within 30 min than the engines"
            " finished: an engine is not scraped, or records were written twice. Compare the engines that the"
            " gateway uses with those that Prometheus scrapes."
        ),
        below={
            **books(
                missing_in_log=grows((100, 0)),
                extra_in_log=grows((40, 0), (60, 0.48)),
                engine=grows((100, 50)),
                log=grows((100, 50)),
            ),
            **finished(stop=grows((100, 9))),
            **outcomes(ok=grows((100, 20))),
        },
        gone_within="30m",
    ),
    Case(
        "VLLMLogExceedsEngine",
        shows="where no sidecar compares",
        series={
            **finished(stop=grows((40, 20), (60, 16))),
            **outcomes(ok=grows((100, 20)), client_abort=grows((100, 9))),
        },
        silent_at="62m",
        fires_at="63m",
        labels={},
        description=(
            "The request log contains 95.17 more successful requests within 30 min than the engines finished:"
            " an engine is not scraped, or records were written twice. Compare the engines that the gateway"
            " uses with those that Prometheus scrapes."
        ),
        below={
            **finished(stop=grows((40, 20), (60, 19.05))),
            **outcomes(ok=grows((100, 20)), client_abort=grows((100, 9))),
        },
        gone_within="35m",
    ),
    Case(
        "VLLMRequestLogLagging",
        shows="records come late",
        series=read_log(lag="0.1x3 61x40", lines="0+50x43", unread="0x43"),
        silent_at="8m",
        fires_at="9m",
        labels={**SIDECAR, "path": _LOG},
        description=(
            "For 5 min, 10.0.0.7:9401 has counted the records of /var/log/vllm/requests.jsonl more than 60 s"
            " late or left part of the file unread: metrics per team are as late. Check whether the lag still"
            " grows (First five minutes, step 1); if it shrinks, wait until the sidecar has caught up."
        ),
        below=read_log(lag="0.1x3 60x40", lines="0+50x43", unread="0x43"),
    ),
    Case(
        "VLLMRequestLogLagging",
        shows="more is written than read",
        series=read_log(lag="2x43", lines="0+50x43", unread="0x3 1048577x40"),
        silent_at="12m",
        fires_at="13m",
        labels={**SIDECAR, "path": _LOG},
        description=(
            "For 5 min, 10.0.0.7:9401 has counted the records of /var/log/vllm/requests.jsonl more than 60 s"
            " late or left part of the file unread: metrics per team are as late. Check whether the lag still"
            " grows (First five minutes, step 1); if it shrinks, wait until the sidecar has caught up."
        ),
        below=read_log(lag="2x43", lines="0+50x43", unread="0x3 1048576x40"),
        gone_within="5m",
    ),
    Case(
        "VLLMRequestLogUnwritable",
        shows="while records wait",
        series={gateway("log_errors_total"): "0x3 1x40", gateway("log_lost_total"): "0x43"},
        silent_at="4m",
        fires_at="5m",
        labels=GATEWAY,
        description=_UNWRITABLE,
        below={gateway("log_errors_total"): "3x43", gateway("log_lost_total"): "9x43"},
        over_at="9m",
        gone_within="5m",
    ),
    Case(
        "VLLMRequestLogUnwritable",
        shows="when records are lost",
        series={gateway("log_errors_total"): "3x43", gateway("log_lost_total"): "0x3 5x40"},
        silent_at="4m",
        fires_at="5m",
        labels=GATEWAY,
        description=_UNWRITABLE,
        below={gateway("log_errors_total"): "3x43", gateway("log_lost_total"): "5x43"},
        over_at="9m",
        gone_within="5m",
    ),
    Case(
        "VLLMRequestLogUnwritable",
        shows="when a run before died with records in memory",
        series={
            gateway("log_lost_before_requests", state="waiting"): "_x3 57x40",
            gateway("log_lost_before_requests", state="in_flight"): "_x3 0x40",
        },
        silent_at="3m",
        fires_at="4m",
        labels=GATEWAY,
        description=_UNWRITABLE,
        below={
            gateway("log_lost_before_requests", state="waiting"): "0x43",
            gateway("log_lost_before_requests", state="in_flight"): "0x43",
        },
        gone_within="5m",
    ),
    Case(
        "VLLMResponsesUnreadable",
        {gateway("unreadable_total", **_LOGIN_PAGE): "0x3 1+1x40", gateway("unreadable_total", **_LARGE): "0x3 1+1x40"},
        silent_at="8m",
        fires_at="9m",
        labels={**GATEWAY, **_LOGIN_PAGE},
        description=(
            "The gateway 10.0.0.5:8010 could not read 5 responses of engines to /v1/chat/completions within 5 min"
            " (reason: content_type), and it has gone on for 5 min. Their requests failed, or their token counts are"
            " unknown. Find the engine in the request log (Do this first, step 2), then ask it directly (step 3)."
        ),
        below={gateway("unreadable_total", **_LOGIN_PAGE): "0x3 9x40", gateway("unreadable_total", **_LARGE): "0+1x43"},
        gone_within="10m",
    ),
    Case(
        "VLLMGatewayNotSharing",
        shows="while the store is lost",
        series={gateway("lease_lost"): "0x3 1x40", gateway("lease_policies"): "1x43"},
        silent_at="4m",
        fires_at="5m",
        labels=GATEWAY,
        description=_NOT_SHARING,
        below={gateway("lease_lost"): "0x43", gateway("lease_policies"): "1x43"},
        gone_within="5m",
    ),
    Case(
        "VLLMGatewayNotSharing",
        shows="while policies differ",
        series={gateway("lease_lost"): "0x43", gateway("lease_policies"): "1x3 2x40"},
        silent_at="4m",
        fires_at="5m",
        labels=GATEWAY,
        description=_NOT_SHARING,
        below={gateway("lease_lost"): "0x43", gateway("lease_policies"): "1x43"},
        gone_within="5m",
    ),
    # 20 EUR an hour are 0.005556 EUR a second: at 2500 tokens a second 0.002222 EUR for a thousand of them, at 2800
    # 0.001984 EUR.
    Case(
        "VLLMCostOverBudget",
        shows="as attributed",
        series={
            **cost(teams="0+0.2x130", idle="0+0.1333333x130"),
            sidecar("gpu_cost_per_hour", currency="EUR"): "10x130",
            sidecar("cost_budget_per_1k_tokens", currency="EUR"): "0.002x130",
            engine("prompt_tokens_total"): "0+120000x130",
            engine("generation_tokens_total"): "0+30000x130",
        },
        silent_at="60m",
        fires_at="61m",
        labels={"currency": "EUR"},
        description=(
            "1,000 tokens have cost 0.00222 EUR over the last hour, idle GPUs included, which is more than the"
            " configured budget. Check how much of the cost is idle time (team __idle__; First five minutes, step 1)"
            " before"
            " changing anything: it falls with more load or fewer GPUs."
        ),
        below={
            **cost(teams="0+0.2x130", idle="0+0.09x130"),
            sidecar("gpu_cost_per_hour", currency="EUR"): "20x130",
            sidecar("cost_budget_per_1k_tokens", currency="EUR"): "0.002x130",
            engine("prompt_tokens_total"): "0+120000x130",
            engine("generation_tokens_total"): "0+30000x130",
        },
    ),
    Case(
        "VLLMCostOverBudget",
        shows="where nothing is attributed",
        series={
            sidecar("gpu_cost_per_hour", currency="EUR"): "20x130",
            sidecar("cost_budget_per_1k_tokens", currency="EUR"): "0.002x130",
            engine("prompt_tokens_total"): "0+120000x130",
            engine("generation_tokens_total"): "0+30000x130",
        },
        silent_at="60m",
        fires_at="61m",
        labels={"currency": "EUR"},
        description=(
            "1,000 tokens have cost 0.00222 EUR over the last hour, idle GPUs included, which is more than the"
            " configured budget. Check how much of the cost is idle time (team __idle__; First five minutes, step 1)"
            " before"
            " changing anything: it falls with more load or fewer GPUs."
        ),
        below={
            sidecar("gpu_cost_per_hour", currency="EUR"): "20x130",
            sidecar("cost_budget_per_1k_tokens", currency="EUR"): "0.002x130",
            engine("prompt_tokens_total"): "0+138000x130",
            engine("generation_tokens_total"): "0+30000x130",
        },
    ),
)

_GPU = (
    Case(
        "VLLMGPUMissing",
        shows="one GPU of several",
        series={
            up("sidecar", SIDECAR["instance"]): "1x70",
            card_info(): "1x3 stale",
            card_info("GPU-1b"): "1x70",
            sidecar("source_up", kind="gpu", source="gpu"): "1x70",
        },
        silent_at="5m",
        fires_at="6m",
        labels=CARD,
        description=(
            "The sidecar 10.0.0.7:9401 has had no readings of a GPU (GPU-1a) for 2 min, although it had before:"
            " the GPU fell off the bus, or the driver does not answer. Run nvidia-smi -L on the host, and check"
            " whether the engine on it still answers."
        ),
        below={
            up("sidecar", SIDECAR["instance"]): "1x3 0x70",
            card_info(): "1x3 stale",
            card_info("GPU-1b"): "1x3 stale",
            sidecar("source_up", kind="gpu", source="gpu"): "1x3 stale",
        },
        still_at="62m",
        over_at="64m",
    ),
    Case(
        "VLLMGPUMissing",
        shows="all of them",
        series={
            sidecar("source_up", kind="gpu", source="gpu"): "1x3 0x40",
            sidecar("source_last_success_timestamp_seconds", kind="gpu", source="gpu"): "0+60x3 180x40",
        },
        silent_at="5m",
        fires_at="6m",
        labels={**SIDECAR, "source": "gpu"},
        description=(
            "The sidecar 10.0.0.7:9401 has had no readings of a GPU for 2 min, although it had before: the GPU"
            " fell off the bus, or the driver does not answer. Run nvidia-smi -L on the host, and check whether"
            " the engine on it still answers."
        ),
        below={
            sidecar("source_up", kind="gpu", source="gpu"): "1x3 0x1 1x40",
            sidecar("source_last_success_timestamp_seconds", kind="gpu", source="gpu"): "0+60x3 180x1 360+60x40",
        },
    ),
    Case(
        "VLLMGPUMissing",
        shows="one that the driver still names",
        series={card_info(): "1x40", card("absent_values", reason="lost"): "_x3 1x40"},
        silent_at="4m",
        fires_at="5m",
        labels=CARD,
        description=(
            "The sidecar 10.0.0.7:9401 has had no readings of a GPU (GPU-1a) for 2 min, although it had before:"
            " the GPU fell off the bus, or the driver does not answer. Run nvidia-smi -L on the host, and check"
            " whether the engine on it still answers."
        ),
        below={card_info(): "1x40", card("absent_values", reason="not_supported"): "2x43"},
    ),
    Case(
        "VLLMGPUHot",
        shows="by the sidecar",
        series={
            card_info(): "1x40",
            card("temperature_celsius", sensor="gpu"): "85x3 86x40",
            card("temperature_celsius", sensor="memory"): "95x43",
        },
        silent_at="8m",
        fires_at="9m",
        labels=CARD,
        description=(
            "GPU-1a on 10.0.0.7:9401 is at 86 °C, above 85 °C for 5 min; a few degrees more and it"
            " throttles. Compare it with the other GPUs of the host: if all are hot it is the cooling, if one"
            " is hot it is this GPU."
        ),
        below={
            card_info(): "1x40",
            card("temperature_celsius", sensor="gpu"): "85x43",
            card("temperature_celsius", sensor="memory"): "95x43",
        },
        gone_within="6m",
    ),
    Case(
        "VLLMGPUHot",
        shows="by dcgm-exporter",
        series={card_info(): "1x40", dcgm("GPU_TEMP"): "85x3 86x40"},
        silent_at="8m",
        fires_at="9m",
        labels=THEIR_CARD,
        description=(
            "GPU-2f on 10.0.0.9:9400 is at 86 °C, above 85 °C for 5 min; a few degrees more and it"
            " throttles. Compare it with the other GPUs of the host: if all are hot it is the cooling, if one"
            " is hot it is this GPU."
        ),
        below={card_info("GPU-2f"): "1x40", dcgm("GPU_TEMP"): "95x40"},
        gone_within="6m",
    ),
    Case(
        "VLLMGPUThrottled",
        shows="by the sidecar",
        series={
            card_info(): "1x40",
            **throttled(sw_thermal_slowdown="0+3.3x40", hw_power_brake="0+3.3x40", sw_power_cap="0+60x40"),
        },
        silent_at="14m",
        fires_at="15m",
        labels=CARD,
        description=(
            "GPU-1a on 10.0.0.7:9401 ran at reduced clocks for 11% of the last 10 min because of heat or a"
            " power brake. Check the reason (First five minutes, step 1): thermal is the cooling, hw_power_brake is the"
            " power supply or the rack."
        ),
        below={
            card_info(): "1x40",
            **throttled(sw_thermal_slowdown="0+5.4x40", hw_power_brake="0x40", sw_power_cap="0+60x40"),
        },
        gone_within="15m",
    ),
    Case(
        "VLLMGPUThrottled",
        shows="by dcgm-exporter",
        series={dcgm("THERMAL_VIOLATION"): "0+6.6e9x40"},
        silent_at="14m",
        fires_at="15m",
        labels=THEIR_CARD,
        description=(
            "GPU-2f on 10.0.0.9:9400 ran at reduced clocks for 11% of the last 10 min because of heat or a"
            " power brake. Check the reason (First five minutes, step 1): thermal is the cooling, hw_power_brake is the"
            " power supply or the rack."
        ),
        below={dcgm("THERMAL_VIOLATION"): "0+5.4e9x40"},
        gone_within="15m",
    ),
    Case(
        "VLLMGPUXid",
        shows="by the sidecar",
        series={card("xid_errors_total", xid="79"): "0x3 1x90", card("xid_errors_total", xid="31"): "2x93"},
        silent_at="3m",
        fires_at="4m",
        labels={**CARD, "xid": "79"},
        description=(
            "The driver reported XID 79 for GPU-1a on 10.0.0.7:9401 within the last hour; requests on it"
            " may be lost. Read the first XID in the kernel log (First five minutes, step 2), and check whether the"
            " engine"
            " on this GPU still makes tokens."
        ),
        below={card("xid_errors_total", xid="79"): "0x93", card("xid_errors_total", xid="31"): "2x93"},
        still_at="62m",
        over_at="64m",
        gone_within="1h",
    ),
    Case(
        "VLLMGPUXid",
        shows="by dcgm-exporter",
        series={dcgm("XID_ERRORS"): "0x3 79x90"},
        silent_at="3m",
        fires_at="4m",
        labels=THEIR_CARD,
        description=(
            "The driver reported XID 79 for GPU-2f on 10.0.0.9:9400 within the last hour; requests on it"
            " may be lost. Read the first XID in the kernel log (First five minutes, step 2), and check whether the"
            " engine"
            " on this GPU still makes tokens."
        ),
        below={dcgm("XID_ERRORS"): "0x93"},
        still_at="62m",
        over_at="64m",
    ),
    Case(
        "VLLMGPUECCErrors",
        shows="by the sidecar",
        series={
            card("ecc_errors_total", kind="uncorrected"): "2x3 3x90",
            card("ecc_errors_total", kind="corrected"): "0+5x93",
        },
        silent_at="3m",
        fires_at="4m",
        labels=CARD,
        description=(
            "GPU-1a on 10.0.0.7:9401 had uncorrected memory errors within the last hour, or has no spare"
            " rows left. Check whether the engine on it still answers, and how many rows were remapped (First five"
            " minutes,"
            " steps 2 and 3)."
        ),
        below={
            card("ecc_errors_total", kind="uncorrected"): "2x93",
            card("ecc_errors_total", kind="corrected"): "0+5x93",
        },
        still_at="62m",
        over_at="64m",
        gone_within="1h",
    ),
    Case(
        "VLLMGPUECCErrors",
        shows="by dcgm-exporter",
        series={dcgm("ECC_DBE_AGG_TOTAL"): "2x3 3x90", dcgm("ROW_REMAP_FAILURE"): "0x93"},
        silent_at="3m",
        fires_at="4m",
        labels=THEIR_CARD,
        description=(
            "GPU-2f on 10.0.0.9:9400 had uncorrected memory errors within the last hour, or has no spare"
            " rows left. Check whether the engine on it still answers, and how many rows were remapped (First five"
            " minutes,"
            " steps 2 and 3)."
        ),
        below={dcgm("ECC_DBE_AGG_TOTAL"): "2x93", dcgm("ROW_REMAP_FAILURE"): "0x93"},
        still_at="62m",
        over_at="64m",
        gone_within="1h",
    ),
    Case(
        "VLLMGPUECCErrors",
        shows="no spare rows left",
        series={dcgm("ECC_DBE_AGG_TOTAL"): "2x40", dcgm("ROW_REMAP_FAILURE"): "0x3 1x40"},
        silent_at="3m",
        fires_at="4m",
        labels=THEIR_CARD,
        description=(
            "GPU-2f on 10.0.0.9:9400 had uncorrected memory errors within the last hour, or has no spare"
            " rows left. Check whether the engine on it still answers, and how many rows were remapped (First five"
            " minutes,"
            " steps 2 and 3)."
        ),
        below={dcgm("ECC_DBE_AGG_TOTAL"): "2x40", dcgm("ROW_REMAP_FAILURE"): "0x40"},
    ),
    Case(
        "VLLMGPUNVLinkErrors",
        shows="packets damaged, by the sidecar",
        series=links(crc_flit="0x9 0+0.5x60", replay="0x9 0+0.3x60", recovery="1x69"),
        silent_at="22m",
        fires_at="23m",
        labels=CARD,
        description=(
            "The NVLinks of GPU-1a on 10.0.0.7:9401 counted 10.4 errors within 15 min; every collective of"
            " a tensor-parallel engine waits for a failing link. Check which link it is with nvidia-smi nvlink"
            " -e (First five minutes, step 3), and whether the inter-token latency rose."
        ),
        below=links(crc_flit="0x9 0+0.4x60", replay="0x9 0+0.2x60", recovery="1x69"),
        gone_within="30m",
    ),
    Case(
        "VLLMGPUNVLinkErrors",
        shows="a link trained again, by the sidecar",
        series=links(crc_flit="7x79", recovery="4x19 5x60"),
        silent_at="19m",
        fires_at="20m",
        labels=CARD,
        description=(
            "The NVLinks of GPU-1a on 10.0.0.7:9401 counted 1.071 errors within 15 min; every collective of"
            " a tensor-parallel engine waits for a failing link. Check which link it is with nvidia-smi nvlink"
            " -e (First five minutes, step 3), and whether the inter-token latency rose."
        ),
        below=links(crc_flit="7x79", recovery="4x79"),
        over_at="50m",
        gone_within="30m",
    ),
    Case(
        "VLLMGPUNVLinkErrors",
        shows="packets damaged",
        series={
            dcgm("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"): "0x9 0+0.5x60",
            dcgm("NVLINK_REPLAY_ERROR_COUNT_TOTAL"): "0x9 0+0.3x60",
        },
        silent_at="22m",
        fires_at="23m",
        labels=THEIR_CARD,
        description=(
            "The NVLinks of GPU-2f on 10.0.0.9:9400 counted 10.4 errors within 15 min; every collective of"
            " a tensor-parallel engine waits for a failing link. Check which link it is with nvidia-smi nvlink"
            " -e (First five minutes, step 3), and whether the inter-token latency rose."
        ),
        below={
            dcgm("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"): "0x9 0+0.4x60",
            dcgm("NVLINK_REPLAY_ERROR_COUNT_TOTAL"): "0x9 0+0.2x60",
        },
        gone_within="30m",
    ),
    Case(
        "VLLMGPUNVLinkErrors",
        shows="a link trained again",
        series={dcgm("NVLINK_RECOVERY_ERROR_COUNT_TOTAL"): "4x19 5x60"},
        silent_at="19m",
        fires_at="20m",
        labels=THEIR_CARD,
        description=(
            "The NVLinks of GPU-2f on 10.0.0.9:9400 counted 1.071 errors within 15 min; every collective of"
            " a tensor-parallel engine waits for a failing link. Check which link it is with nvidia-smi nvlink"
            " -e (First five minutes, step 3), and whether the inter-token latency rose."
        ),
        below={dcgm("NVLINK_RECOVERY_ERROR_COUNT_TOTAL"): "4x79"},
        over_at="50m",
        gone_within="30m",
    ),
    Case(
        "VLLMGPUMemoryNearlyFull",
        shows="by the sidecar",
        series={
            card_info(): "1x40",
            card("memory_used_bytes"): "78e9x3 79.2e9x40",
            card("memory_total_bytes"): "80e9x43",
        },
        silent_at="8m",
        fires_at="9m",
        labels=CARD,
        description=(
            "GPU-1a on 10.0.0.7:9401 uses 99% of its memory, above 98 % for 5 min; the next allocation may"
            " end the engine. Find the processes on this GPU with nvidia-smi (First five minutes, step 3): a second"
            " process"
            " is the most frequent cause."
        ),
        below={card_info(): "1x40", card("memory_used_bytes"): "78.4e9x43", card("memory_total_bytes"): "80e9x43"},
    ),
    Case(
        "VLLMGPUMemoryNearlyFull",
        shows="by dcgm-exporter",
        series={dcgm("FB_USED"): "78000x3 79200x40", dcgm("FB_FREE"): "2000x3 800x40"},
        silent_at="8m",
        fires_at="9m",
        labels=THEIR_CARD,
        description=(
            "GPU-2f on 10.0.0.9:9400 uses 99% of its memory, above 98 % for 5 min; the next allocation may"
            " end the engine. Find the processes on this GPU with nvidia-smi (First five minutes, step 3): a second"
            " process"
            " is the most frequent cause."
        ),
        below={dcgm("FB_USED"): "78400x43", dcgm("FB_FREE"): "1600x43"},
    ),
)

_GROUP = "/etc/vllm-watch/rules/page.yaml;vllm-critical-slo"
_ALERTMANAGER = "http://10.0.0.6:9093/api/v2/alerts"


def _failed(integration: str, reason: str) -> str:
    return _written(
        "alertmanager_notifications_failed_total", {**ALERTMANAGER, "integration": integration, "reason": reason}
    )


_GATEWAY_GONE = (
    "Job gateway had a gateway within the last day; service discovery has found none for 3 min: its pod"
    " may be evicted or pending, and no other alert about it can fire. Check whether it still answers"
    " clients. If it was removed on purpose, silence this alert: it ends after a day."
)
_WATCHERS = (
    Case(
        "VLLMGatewayDown",
        {up("gateway", GATEWAY["instance"]): "1x3 0x40"},
        silent_at="4m",
        fires_at="5m",
        labels={"job": "gateway"},
        description=(
            "No gateway of job gateway has answered Prometheus for 1 min: its clients are not served, even if"
            " the engines are healthy. Check whether requests still pass (First five minutes, step 1): if they do,"
            " only its"
            " metrics port cannot be reached."
        ),
        below={up("gateway", GATEWAY["instance"]): "1x3 0x40", up("gateway", "10.0.0.55:8010"): "1x43"},
    ),
    Case(
        "VLLMGatewayReplicaDown",
        {
            up("gateway", GATEWAY["instance"]): "1x3 0x40",
            up("gateway", "10.0.0.55:8010"): "1x43",
            gateway("lease_replicas"): "2x3 1x40",
            gateway("slots"): "8x43",
            gateway("running_requests", team="chat", band="demo"): "8x43",
        },
        silent_at="8m",
        fires_at="9m",
        labels={"job": "gateway", "instance": GATEWAY["instance"]},
        description=(
            "The gateway 10.0.0.5:8010 has not answered Prometheus for 5 min, and others of job gateway do: clients are"
            " served with less reserve. With fixed shares, its part of every limit is unused. Check whether it still"
            " answers clients (First five minutes, step 1), then read the end of its log and start it again."
        ),
        below={up("gateway", GATEWAY["instance"]): "1x3 0x40"},
    ),
    Case(
        "VLLMGatewayGone",
        {up("gateway", GATEWAY["instance"]): "1x3 stale"},
        silent_at="6m",
        fires_at="7m",
        labels={"job": "gateway"},
        description=_GATEWAY_GONE,
        below={up("gateway", GATEWAY["instance"]): "1x3 stale", up("gateway", "10.0.0.55:8010"): "1x60"},
        still_at="1442m",
        over_at="1443m",
        gone_within=None,
    ),
    Case(
        "VLLMGatewayGone",
        shows="after it was down, and it comes back",
        series={up("gateway", GATEWAY["instance"]): "1x3 0x9 stale _x20 1x20"},
        silent_at="16m",
        fires_at="17m",
        labels={"job": "gateway"},
        description=_GATEWAY_GONE,
        below={up("gateway", GATEWAY["instance"]): "1x3 0x9 stale _x1 1x40"},
        still_at="34m",
        over_at="35m",
        gone_within=None,
    ),
    Case(
        "VLLMSidecarGone",
        {up("sidecar", SIDECAR["instance"]): "1x3 stale"},
        silent_at="18m",
        fires_at="19m",
        labels={"job": "sidecar"},
        description=(
            "Job sidecar had a sidecar within the last day; service discovery has found none for 15 min:"
            " metrics per team, of the request log and of the GPUs are missing, and no other alert about it can"
            " fire. Serving goes on. Check whether it runs. If it was removed on purpose, silence this alert:"
            " it ends after a day."
        ),
        below={up("sidecar", SIDECAR["instance"]): "1x3 stale", up("sidecar", "10.0.0.77:9401"): "1x60"},
        still_at="1442m",
        over_at="1443m",
        gone_within=None,
    ),
    Case(
        "VLLMSidecarDown",
        {up("sidecar", SIDECAR["instance"]): "1x3 0x40"},
        silent_at="5m",
        fires_at="6m",
        labels=SIDECAR,
        description=(
            "The sidecar 10.0.0.7:9401 has not answered Prometheus for 2 min: metrics per team, of the request"
            " log and of the GPUs are stale. Serving goes on. Check whether its process runs, read the end of"
            " its log, and start it again."
        ),
        below={up("sidecar", SIDECAR["instance"]): "1x3 0x1 1x40"},
    ),
    Case(
        "VLLMSidecarSourceFailing",
        {sidecar("source_up", kind="engine", source="vllm-1"): "1x3 0x40"},
        silent_at="8m",
        fires_at="9m",
        labels={**SIDECAR, "kind": "engine", "source": "vllm-1"},
        description=(
            "The sidecar 10.0.0.7:9401 has failed to read its engine vllm-1 for 5 min: the metrics from it are"
            " stale. Check the reason (First five minutes, step 1), and read what the sidecar logged when the"
            " failure began"
            " (step 3)."
        ),
        below={
            sidecar("source_up", kind="gpu", source="gpu"): "1x3 0x40",
            sidecar("source_up", kind="checkpoint", source=_STATE): "1x3 0x40",
            sidecar("source_up", kind="engine", source="vllm-1"): "1x3 0x4 1x40",
        },
    ),
    Case(
        "VLLMCheckpointFailing",
        {sidecar("checkpoint_up"): "1x3 0x40"},
        silent_at="5m",
        fires_at="6m",
        labels=SIDECAR,
        description=(
            "The sidecar 10.0.0.7:9401 has failed to write its checkpoint for 2 min; metrics of the request log"
            " do not change until it can. Check free space and permissions where its state is kept, and read"
            " the error in its log (First five minutes, step 3)."
        ),
        below={sidecar("checkpoint_up"): "1x3 0x1 1x40"},
    ),
    Case(
        "VLLMShipFailing",
        {
            _written("vllm_watch_ship_up", {**SHIP, "kind": "store"}): "1x3 0x40",
            _written("vllm_watch_ship_up", {**SHIP, "kind": "disk"}): "1x43",
            _written("vllm_watch_ship_waiting_bytes", SHIP): "5000x43",
        },
        silent_at="13m",
        fires_at="14m",
        labels={**SHIP, "kind": "store"},
        description=(
            "The shipper 10.0.0.7:9403 has failed to write to its store for 10 min: the data set lacks new requests."
            " Nothing is lost while the request logs exist. Read the error in its log (First five minutes,"
            " step 2), and keep rotated logs until it writes again."
        ),
        below={_written("vllm_watch_ship_up", {**SHIP, "kind": "store"}): "1x3 0x9 1x30"},
    ),
    Case(
        "VLLMDatasetDiffers",
        {
            _written("vllm_watch_ship_unexplained", {**SHIP, "kind": "prompt", "model_name": "chat"}): "0x3 120x40",
            _written("vllm_watch_ship_waiting_bytes", SHIP): "5000x43",
            _written("vllm_watch_ship_unread_bytes", {**SHIP, "path": "/var/log/requests.jsonl"}): "0x43",
        },
        silent_at="18m",
        fires_at="19m",
        labels={**SHIP, "kind": "prompt", "model_name": "chat"},
        description=(
            "On the last complete day, segments, sidecar and engines differ by 120 prompt of chat without a known"
            " cause, reports 10.0.0.7:9403. Requests are not affected; reports from the data set may be wrong. Run"
            " vllm-watch ship verify for the sums (First five minutes, step 2)."
        ),
        below={_written("vllm_watch_ship_unexplained", {**SHIP, "kind": "prompt", "model_name": "chat"}): "0x43"},
    ),
    Case(
        "VLLMCanaryRolledBack",
        {sidecar("canary_step_timestamp_seconds", variant="canary", step="roll_back"): "_x3 180x40"},
        silent_at="3m",
        fires_at="4m",
        labels={"variant": "canary"},
        description=(
            "vllm-watch canary stopped variant canary within the last day (1m 0s ago), or advises to: it was worse than"
            " the other engines, failed, or hung. Read the reason in its newest event (First five minutes, step 1), and"
            " check that its share is 0."
        ),
        below={sidecar("canary_step_timestamp_seconds", variant="canary", step="promote"): "_x3 180x40"},
    ),
    Case(
        "VLLMCanaryUndecided",
        {sidecar("canary_step_timestamp_seconds", variant="canary", step="undecided"): "_x3 180x40"},
        silent_at="3m",
        fires_at="4m",
        labels={"variant": "canary"},
        description=(
            "vllm-watch canary ended without a verdict on variant canary within the last day, or has not acted within"
            " the last week (last act: 1m 0s ago): too little traffic, teams.yaml changed meanwhile, or the command no"
            " longer runs. Read the newest event (First five minutes, step 1), and decide on the share by hand."
        ),
        below={sidecar("canary_step_timestamp_seconds", variant="canary", step="raise"): "_x3 180x40"},
    ),
    Case(
        "VLLMSpansDropped",
        {
            sidecar("spans_dropped_total", reason="refused"): "0x3 1+1x40",
            sidecar("spans_dropped_total", reason="timeout"): "3x43",
        },
        silent_at="13m",
        fires_at="14m",
        labels={**SIDECAR, "reason": "refused"},
        description=(
            "The sidecar 10.0.0.7:9401 dropped 5 spans within 5 min (reason: refused), and has dropped some for"
            " 10 min: traces of these requests lack the gateway's span. Check that the collector answers at the"
            " configured OTLP endpoint (First five minutes, step 3)."
        ),
        below={
            sidecar("spans_dropped_total", reason="refused"): "0x3 900x40",
            sidecar("spans_dropped_total", reason="timeout"): "3x43",
        },
        gone_within="5m",
    ),
    Case(
        "VLLMRuleFailing",
        {prometheus("rule_evaluation_failures_total", rule_group=_GROUP): "0x3 1+1x40"},
        silent_at="8m",
        fires_at="9m",
        labels={**PROMETHEUS, "rule_group": _GROUP},
        description=(
            "5 evaluations of the group /etc/vllm-watch/rules/page.yaml;vllm-critical-slo have failed on"
            " Prometheus 10.0.0.4:9090 within 5 min: its alerts cannot fire. Read the error of the failing rule"
            " at /rules of this Prometheus (First five minutes, step 2)."
        ),
        below={prometheus("rule_evaluation_failures_total", rule_group=_GROUP): "0x3 1x40"},
        gone_within="5m",
    ),
    Case(
        "VLLMScrapeNearLimit",
        shows="as Prometheus tells",
        series={
            _written("scrape_samples_post_metric_relabeling", ENGINE): "1600x3 1601x40",
            _written("scrape_sample_limit", ENGINE): "2000x43",
        },
        silent_at="13m",
        fires_at="14m",
        labels=ENGINE,
        description=(
            "10.0.0.1:8000 of job vllm has exposed more than 80 % of the samples that sample_limit allows for"
            " 10 min; above it Prometheus discards the whole scrape. If 10.0.0.1:8000 is Prometheus itself,"
            " scrapes are already discarded. Compare the samples with a day ago (First five minutes, step 2), then"
            " raise"
            " sample_limit."
        ),
        below={
            _written("scrape_samples_post_metric_relabeling", ENGINE): "1600x43",
            _written("scrape_sample_limit", ENGINE): "2000x43",
        },
    ),
    Case(
        "VLLMScrapeNearLimit",
        shows="pages are thrown away",
        series={prometheus("target_scrapes_exceeded_sample_limit_total"): "0x3 1+1x40"},
        silent_at="13m",
        fires_at="14m",
        labels=PROMETHEUS,
        description=(
            "10.0.0.4:9090 of job prometheus has exposed more than 80 % of the samples that sample_limit allows"
            " for 10 min; above it Prometheus discards the whole scrape. If 10.0.0.4:9090 is Prometheus itself,"
            " scrapes are already discarded. Compare the samples with a day ago (First five minutes, step 2), then"
            " raise"
            " sample_limit."
        ),
        below={prometheus("target_scrapes_exceeded_sample_limit_total"): "0x3 1x40"},
        gone_within="5m",
    ),
    Case(
        "VLLMTeamLabelOverflow",
        {sidecar("teams_overflow_total"): "0x3 1+1x40"},
        silent_at="13m",
        fires_at="14m",
        labels=SIDECAR,
        description=(
            "The sidecar 10.0.0.7:9401 counted 5 requests of teams beyond its limit within 5 min: dashboards"
            " and cost reports show them as team __other__. Check which teams have series of their own (First five"
            " minutes,"
            " step 3), then raise teams.limit in the sidecar's configuration."
        ),
        below={sidecar("teams_overflow_total"): "0x3 900x40"},
        gone_within="5m",
    ),
    Case(
        "VLLMAlertmanagerUnreachable",
        shows="none is known",
        series={prometheus("notifications_alertmanagers_discovered"): "1x3 0x40"},
        silent_at="5m",
        fires_at="6m",
        labels=PROMETHEUS,
        description=(
            "Prometheus 10.0.0.4:9090 has failed to send its alerts to Alertmanager for 2 min: they fire, but"
            " nobody is notified. Check that Alertmanager runs and answers on the host of Prometheus; watch the"
            " firing alerts by hand until it does."
        ),
        below={prometheus("notifications_alertmanagers_discovered"): "1x3 0x1 1x40"},
    ),
    Case(
        "VLLMAlertmanagerUnreachable",
        shows="none takes them",
        series={
            prometheus("notifications_alertmanagers_discovered"): "1x40",
            prometheus("notifications_errors_total", alertmanager=_ALERTMANAGER): "0x3 1+1x40",
        },
        silent_at="5m",
        fires_at="6m",
        labels={**PROMETHEUS, "alertmanager": _ALERTMANAGER},
        description=(
            "Prometheus 10.0.0.4:9090 has failed to send its alerts to Alertmanager for 2 min: they fire, but"
            " nobody is notified. Check that Alertmanager runs and answers on the host of Prometheus; watch the"
            " firing alerts by hand until it does."
        ),
        below={
            prometheus("notifications_alertmanagers_discovered"): "1x40",
            prometheus("notifications_errors_total", alertmanager=_ALERTMANAGER): "12x40",
        },
        gone_within="5m",
    ),
    Case(
        "VLLMNotificationsFailing",
        {_failed("slack", "serverError"): "0x3 1+1x40"},
        silent_at="4m",
        fires_at="5m",
        labels={**ALERTMANAGER, "integration": "slack"},
        description=(
            "Alertmanager 10.0.0.6:9093 failed to deliver 2 notifications by slack within 10 min: alerts fire,"
            " but nobody is notified of them. Read the receiver's error in the Alertmanager log (First five minutes,"
            " step"
            " 3), and watch the firing alerts by hand until it is fixed."
        ),
        below={_failed("slack", "serverError"): "7x43", _failed("slack", "contextCanceled"): "0x3 1+1x40"},
        gone_within="10m",
    ),
    Case(
        "VLLMWatchdog",
        {},
        silent_at="",
        fires_at="0m",
        labels={},
        description=(
            "This alert always fires. If it no longer arrives, Prometheus, Alertmanager or the path to its"
            " receiver is broken. Check that Prometheus runs and shows it as firing (First five minutes, step 1),"
            " then that"
            " Alertmanager has it."
        ),
        below=None,
        gone_within=None,
    ),
)


# ---- objectives


def promised(objective: str, *phases: tuple[int, float, float]) -> Series:
    """What an objective counts, one phase after the other: (intervals, events in each, share of bad ones)."""
    every, good, bad = (
        grows(*((intervals, rate * part(share)) for intervals, rate, share in phases), base=1e6)
        for part in (lambda share: 1, lambda share: 1 - share, lambda share: share)
    )
    if objective == "Success":
        return outcomes(ok=good, timeout=bad, rejected=every)
    if objective == "Success by status":
        return responses(s2xx=good, s4xx=every, s5xx=bad)
    name, bound, above = {
        "TTFT": ("time_to_first_token", "2.5", "5.0"),
        "InterToken": ("inter_token_latency", "0.1", "0.15"),
    }[objective]
    return {**histogram(f"{name}_seconds", bound, above, within=good, total=every), **finished(stop=every)}


def _burns(
    objective: str,
    budget: float,
    bad: str,
    first_step: str,
    shares: tuple[str, str, str, str],
    more: str = "",
    counted: str = "",
) -> tuple[Case, ...]:
    """Each pair of windows alone, at 1.1 times its factor, and below at 0.9 times: good traffic within the other pairs'
    windows keeps them quiet.
    bad, first_step, shares, more: what each case then says. counted: the source of the events, of several."""
    source = counted or objective

    def an_hour(factor: float) -> Series:
        return promised(source, (10, 10_000, 0), (65, 0, 0), (60, 100, factor * budget), (30, 100, 0))

    def six_hours(factor: float) -> Series:
        return promised(source, (60, 100, factor * budget), (60, 100, 0))

    def a_day(factor: float) -> Series:
        return promised(source, (5, 20_000, 0), (730, 0, 0), (30, 200, factor * budget), (30, 200, 0))

    def three_days(factor: float) -> Series:
        return promised(source, (120, 100, factor * budget), (360, 100, 0))

    def burn(share: str) -> str:
        return (
            f"{share} of the {bad} over 1h or 6h: at this rate the error budget of 7d is used up within 2 days or"
            f" less. {first_step}{more}"
        )

    def drain(share: str) -> str:
        return (
            f"{share} of the {bad} over 1d or 3d: this uses up about the whole error budget of 7d. Check whether it"
            " continues in the last hour and at which hours it happened, then look for a load pattern or a change."
            f"{more}"
        )

    about = {"model_name": "chat"}
    return (
        Case(f"VLLM{objective}BudgetBurn", an_hour(13.44 * 1.1), "78m", "79m", about, burn(shares[0]),
            below=an_hour(13.44 * 0.9),
             shows="within an hour", still_at="135m", over_at="136m", gone_within="5m"),
        Case(f"VLLM{objective}BudgetBurn", six_hours(3.5 * 1.1), "6m", "7m", about, burn(shares[1]),
            below=six_hours(3.5 * 0.9),
             shows="within six hours", over_at="65m", gone_within="35m"),
        Case(f"VLLM{objective}BudgetSlowBurn", a_day(1.4 * 1.1), "1520m", "1525m", about, drain(shares[2]),
            below=a_day(1.4 * 0.9),
             shows="within a day", over_at="1540m", gone_within="190m", interval="2m", every="5m"),
        Case(f"VLLM{objective}BudgetSlowBurn", three_days(0.98 * 1.1), "20m", "25m", about, drain(shares[3]),
            below=three_days(0.98 * 0.9),
             shows="within three days", over_at="135m", gone_within="370m", every="5m"),
    )  # fmt: skip


_SUCCESS = (
    "Success",
    0.005,
    "requests of chat failed or timed out (allowed: 0.5 %)",
    "Check the failure reason in the request log, then whether every engine answers.",
    ("7.392%", "1.925%", "0.77%", "0.539%"),
    " For a model without a request log: share of HTTP 5xx, which is coarse (failed streams have status 200).",
)
_OBJECTIVES = (
    *_burns(
        "TTFT",
        0.01,
        "first tokens of chat took longer than 2.5 s (allowed: 1 %)",
        "Compare its engines, and queue time with prefill time: one slow engine is the cause itself, all of them mean"
        " load.",
        ("14.78%", "3.85%", "1.54%", "1.078%"),
    ),
    *_burns(
        "InterToken",
        0.01,
        "gaps between tokens of chat took longer than 0.1 s (allowed: 1 %)",
        "Compare its engines, and how many requests share a step: one slow engine is the cause itself, all of them mean"
        " load.",
        ("14.78%", "3.85%", "1.54%", "1.078%"),
    ),
    *_burns(*_SUCCESS),
)


_FETCHING = pair("num_requests_kv_fetch_by_stage", "decode", stage="in_progress")
_RECEIVED = pair("prompt_tokens_by_source_total", "decode", source="external_kv_transfer")
_FETCHED = ("nixl_num_failed_transfers_total", "mooncake_num_failed_transfers_total", "mooncake_num_failed_recvs_total")


def _transfers(connector: str, role: str, slow: str, total: str, size: str = "0+32000000x60") -> Series:
    """KV transfers: so many of them took more than a second."""
    bucket, moved = f"{connector}_xfer_time_seconds_bucket", f"{connector}_bytes_transferred"
    return {
        pair(bucket, role, le="1.0"): slow,
        pair(bucket, role, le="5.0"): total,
        pair(bucket, role, le="+Inf"): total,
        pair(f"{connector}_xfer_time_seconds_count", role): total,
        pair(f"{moved}_sum", role): size,
        pair(f"{moved}_count", role): total,
    }


_TRANSFERS = (
    Case(
        "VLLMKVTransferStuck",
        {
            _FETCHING: "0x10 2x30",
            _RECEIVED: "0+4000x10 40000x30",
            pair("kv_cache_usage_perc", "prefill"): "0.4x40",
            pair("iteration_tokens_total_count", "prefill"): "0+50x10 500x30",
        },
        silent_at="11m",
        fires_at="12m",
        labels={"job": "vllm", "instance": A, "model_name": "chat"},
        description=(
            "2 or more requests for chat on 10.0.0.1:8000 have waited for their KV cache for 2 min and none has"
            " arrived. Their clients wait, while this engine serves others. Find the prefill engine that makes no"
            " progress (First five minutes, step 2): it holds the blocks and is the likely cause. Do not restart this"
            " engine first."
        ),
        below={_FETCHING: "0x10 2x30", _RECEIVED: "0+4000x40"},
        gone_within="3m",
    ),
    *(
        Case(
            "VLLMKVTransfersFailing",
            shows=f"by {name}",
            series={pair(name, "decode"): "0x5 0+1x3 3x30"},
            silent_at="8m",
            fires_at="9m",
            labels={"job": "vllm", "instance": A, "model_name": "chat"},
            description=(
                "3 KV transfers of chat on 10.0.0.1:8000 failed over 10 min: each costs a second prefill or the"
                " request. Read the log of this engine for the peer's address, then check whether that engine runs and"
                " is reachable."
            ),
            below={pair(name, "decode"): "0x5 0+1x2 2x30"},
            gone_within="20m",
        )
        for name in _FETCHED
    ),
    *(
        Case(
            "VLLMKVTransferSlow",
            shows=f"by {connector}",
            series=_transfers(connector, role, "0+9.4x60", "0+10x60"),
            silent_at="5m",
            fires_at="6m",
            labels={"job": "vllm", "instance": B if role == "prefill" else A, "model_name": "chat"},
            description=(
                f"The p95 time of a KV transfer of chat on {B if role == 'prefill' else A} is 1.667s over 10 min; the"
                " client waits for it before the first token. Compare the bandwidth with what the link carries: near"
                " it the link is full, far below it look at the transport that NIXL chose."
            ),
            below=_transfers(connector, role, "0+9.6x60", "0+10x60"),
            gone_within="20m",
        )
        for connector, role in (("nixl", "decode"), ("mooncake", "prefill"))
    ),
    *(
        Case(
            "VLLMKVBlocksExpired",
            shows=f"by {connector}",
            series={
                pair(f"{connector}_num_kv_expired_reqs_total", "prefill"): "0x5 0+1x3 3x30",
                pair("num_requests_waiting", "decode"): "6x40",
            },
            silent_at="8m",
            fires_at="9m",
            labels={"job": "vllm", "instance": B, "model_name": "chat"},
            description=(
                "3 finished prefills of chat on 10.0.0.2:8000 were never fetched over 10 min: their blocks were"
                " held until the lease ended, and the prompts are computed again. Check whether decode engines wait or"
                " are down, and whether the router drops requests between its two calls."
            ),
            below={pair(f"{connector}_num_kv_expired_reqs_total", "prefill"): "0x5 0+1x2 2x30"},
            gone_within="20m",
        )
        for connector in ("nixl", "mooncake")
    ),
)

CASES: tuple[Case, ...] = (*_ENGINES, *_OBJECTIVES, *_LATENCY, *_TRANSFERS, *_CACHE, *_TRAFFIC, *_GPU, *_WATCHERS)

# Cases for the rules alone. Most deployments have no label `cluster`; where there is one, it is in the words. And each
# long window of an objective is as long as it should be: so much that is bad, after as much that was good, burns too
# fast only when
# nearly all of it is filled.
MORE: tuple[Case, ...] = (
    Case(
        "VLLMTTFTHigh",
        shows="of a prefill/decode pair whose engines are both quick",
        series={
            **histogram("time_to_first_token_seconds", "2.5", "5.0", within="0+100x40", total="0+100x40"),
            **clients_of_pair("0+94.6x40", "0+100x40"),
        },
        silent_at="5m",
        fires_at="6m",
        labels={"model_name": "chat"},
        description=(
            "The p95 time to first token of chat is 2.685s over 10 min: one request in twenty waits that long"
            " or longer. Check how much of it is queue time (First five minutes, step 3): a queue needs capacity, a"
            " long prefill needs shorter prompts or a warm prefix cache."
        ),
        below={
            **histogram("time_to_first_token_seconds", "2.5", "5.0", within="0+90x40", total="0+100x40"),
            **clients_of_pair("0+95.4x40", "0+100x40"),
        },
        gone_within="20m",
    ),
    *(replace(case, shows=f"{case.shows} by HTTP status") for case in _burns(*_SUCCESS, counted="Success by status")),
    Case(
        "VLLMTTFTBudgetBurn",
        shows="over the whole of an hour",
        series=promised("TTFT", (10, 20_000, 0), (60, 100, 0), (65, 100, 13.44 * 1.1 * 0.01)),
        silent_at="128m",
        fires_at="129m",
        labels={"model_name": "chat"},
        description=(
            "14.17% of the first tokens of chat took longer than 2.5 s (allowed: 1 %) over 1h or 6h: at this"
            " rate the error budget of 7d is used up within 2 days or less. Compare its engines, and queue time"
            " with prefill time: one slow engine is the cause itself, all of them mean load."
        ),
        below=promised("TTFT", (10, 20_000, 0), (60, 100, 0), (65, 100, 13.44 * 0.9 * 0.01)),
    ),
    Case(
        "VLLMTTFTBudgetBurn",
        shows="over the whole of six hours",
        series=promised("TTFT", (180, 200, 0), (180, 200, 3.5 * 1.1 * 0.01)),
        silent_at="690m",
        fires_at="695m",
        labels={"model_name": "chat"},
        description=(
            "3.583% of the first tokens of chat took longer than 2.5 s (allowed: 1 %) over 1h or 6h: at this"
            " rate the error budget of 7d is used up within 2 days or less. Compare its engines, and queue time"
            " with prefill time: one slow engine is the cause itself, all of them mean load."
        ),
        below=promised("TTFT", (180, 200, 0), (180, 200, 3.5 * 0.9 * 0.01)),
        interval="2m",
        every="5m",
    ),
    Case(
        "VLLMTTFTBudgetSlowBurn",
        shows="over the whole of a day",
        series=promised("TTFT", (5, 200_000, 0), (715, 0, 0), (720, 200, 0), (720, 200, 1.4 * 1.1 * 0.01)),
        silent_at="4235m",
        fires_at="4240m",
        labels={"model_name": "chat"},
        description=(
            "1.421% of the first tokens of chat took longer than 2.5 s (allowed: 1 %) over 1d or 3d: this uses"
            " up about the whole error budget of 7d. Check whether it continues in the last hour and at which"
            " hours it happened, then look for a load pattern or a change."
        ),
        below=promised("TTFT", (5, 200_000, 0), (715, 0, 0), (720, 200, 0), (720, 200, 1.4 * 0.9 * 0.01)),
        interval="2m",
        every="5m",
    ),
    Case(
        "VLLMEngineExceedsLog",
        shows="in a named cluster",
        series=in_cluster(
            "eu-1",
            {
                **finished(stop=grows((100, 20))),
                **outcomes(ok=grows((40, 19.6), (60, 15.6)), client_abort=grows((100, 0.4)), rejected=grows((100, 9))),
            },
        ),
        silent_at="62m",
        fires_at="63m",
        labels={"cluster": "eu-1"},
        description=(
            "The engines of eu-1 finished 95.17 more requests within 30 min than the request log contains:"
            " clients bypass the gateway, or records are lost. Check which model and cause the sidecar reports"
            " (First five minutes, step 1)."
        ),
        below={
            **in_cluster("eu-1", finished(stop=grows((100, 20)))),
            **in_cluster("eu-2", outcomes(ok=grows((100, 9)))),
        },
        gone_within="35m",
    ),
)

# ---- what is no reason to tell anyone

_NEW, _STARTED = "_x20 0x2 1x60", "_x20 0x62"  # a model that was not there before, and gets one request
_A_SLOW_FIRST = {
    "TTFT": {
        **histogram("time_to_first_token_seconds", "2.5", "5.0", within=_STARTED, total=_NEW),
        **finished(stop=_NEW),
    },
    "InterToken": {
        **histogram("inter_token_latency_seconds", "0.1", "0.15", within=_STARTED, total="_x20 0x2 300x60"),
        **finished(stop=_NEW),
    },
    "Success": outcomes(ok=_STARTED, timeout=_NEW),
}
_RESTARTED = "1000000+100x30 0+100x60"
_GOOD_ACROSS_A_RESTART = {
    "TTFT": {
        **histogram("time_to_first_token_seconds", "2.5", "5.0", within=_RESTARTED, total=_RESTARTED),
        **finished(stop=_RESTARTED),
    },
    "InterToken": {
        **histogram("inter_token_latency_seconds", "0.1", "0.15", within=_RESTARTED, total=_RESTARTED),
        **finished(stop=_RESTARTED),
    },
    "Success": outcomes(ok=_RESTARTED, timeout="0x91"),
}

# an engine's times are bad, those of the pair's clients are not
_PAIR_IN_TIME = {**promised("TTFT", (200, 100, 0.5)), **clients_of_pair("0+100x200", "0+100x200")}
QUIET: tuple[Quiet, ...] = (
    Quiet("VLLMTTFTBudgetBurn", "a pair whose clients are served in time", _PAIR_IN_TIME, "190m"),
    Quiet("VLLMTTFTBudgetSlowBurn", "a pair whose clients are served in time", _PAIR_IN_TIME, "190m", every="5m"),
    *(
        Quiet(
            alert,
            "a pair whose clients are served as before",
            {
                **histogram(
                    "time_to_first_token_seconds", "1.0", "2.5", within=grows((60, 9.6), (90, 5)), total="0+10x150"
                ),
                **clients_of_pair("0+10x150", "0+10x150"),
                **finished(stop="0+10x150"),
                sidecar("tuning_event_timestamp_seconds", kind="change"): "_x60 3600x90",
            },
            "150m",
        )
        for alert in ("VLLMLatencyWorseSinceTuning", "VLLMLatencyWorseThanLastWeek")
    ),
    Quiet(
        "VLLMClientHangupsRising",
        "a pair with a request log",
        {**clients_of_pair("0+100x40", "0+100x40"), **outcomes(ok="0+100x40")},
        "40m",
    ),
    *(
        quiet
        for objective in ("TTFT", "InterToken", "Success")
        for burn in ("Burn", "SlowBurn")
        for quiet in (
            Quiet(f"VLLM{objective}Budget{burn}", "below the floor", promised(objective, (60, 0.75, 1), (60, 0, 0)),
                "2h",
                  every="5m" if burn == "SlowBurn" else ""),
            Quiet(f"VLLM{objective}Budget{burn}", "a slow first request", _A_SLOW_FIRST[objective], "75m"),
            Quiet(f"VLLM{objective}Budget{burn}", "good across a restart", _GOOD_ACROSS_A_RESTART[objective], "85m"),
        )
    ),
    Quiet("VLLMTTFTBudgetSlowBurn", "good two days before two bad hours",
        promised("TTFT", (5, 20_000, 0), (1795, 0, 0), (60, 200, 0.0138)), "3720m",
          interval="2m", every="5m"),
    Quiet("VLLMEngineFrozen", "a first request after idle hours",
          {engine("num_requests_running"): "0x20 1x2 0x14", engine("num_requests_waiting"): "0x38",
           engine("generation_tokens_total"): "500x38", engine("prompt_tokens_total"): "90x38"}, "36m"),
    Quiet("VLLMEngineFrozen", "one that has just come",
          {engine("num_requests_running"): "_x20 1x20", engine("num_requests_waiting"): "_x20 0x20",
           engine("generation_tokens_total"): "_x20 0x3 50+50x15", engine("prompt_tokens_total"): "_x20 0x20"}, "38m"),
    Quiet("VLLMEngineFrozen", "a request now and then that is over at once",
          {engine("num_requests_running"): "0x40", engine("num_requests_waiting"): "0x5 1 0 0 1 0 0 1 0 0 1 0x23",
           engine("generation_tokens_total"): "500x40", engine("prompt_tokens_total"): "90x40"}, "38m"),
    Quiet("VLLMEngineFrozen", "a decode engine that waits for its prefill engine",
          {pair("num_requests_running", "decode"): "2x5 0x33", pair("num_requests_waiting", "decode"): "0x5 1x33",
           pair("num_requests_kv_fetch_by_stage", "decode", stage="in_progress"): "0x5 1x33",
           pair("generation_tokens_total", "decode"): "0+90x5 500x33",
           pair("prompt_tokens_total", "decode"): "0+90x5 500x33"}, "36m"),
    Quiet("VLLMEngineUnreachable", "one that scales its expert parallelism",
        {up(): "1x10 0x60", up(instance=B): "1x70",
         gateway("engine_state", upstream="a", address=A, state="scaling", evidence="elastic_ep"): "_x10 1x60",
         sidecar("engine_state", upstream="b", address=B, state="scaling", evidence="elastic_ep"): "_x10 1x60"}, "70m"),
    Quiet("VLLMEngineDown", "the only one of a job that scales its expert parallelism",
        {up(): "1x10 0x60",
         gateway("engine_state", upstream="a", address=A, state="scaling", evidence="elastic_ep"): "_x10 1x60",
         sidecar("engine_state", upstream="b", address=B, state="scaling", evidence="elastic_ep"): "_x10 1x60"}, "70m"),
    Quiet("VLLMEngineUnreachable", "a new one that loads its model for eleven minutes",
        {up(): "_x3 0x10 1x60", up(instance=B): "1x70"}, "70m"),
    Quiet("VLLMEngineDown", "the first one of a job that loads its model for ten minutes", {up(): "_x3 0x10 1x60"},
        "70m"),
    Quiet("VLLMModelDown", "a model that was removed on purpose beside another",
          {**_TWO_MODELS, up(): "1x9 stale", engine("num_requests_running"): "0x9 stale"}, "60m"),
    Quiet("VLLMModelDown", "a model that another one replaces on the same engine",
          {**_TWO_MODELS, up(): "1x70", engine("num_requests_running"): "0x9 stale",
           engine("num_requests_running", model_name="next"): "_x10 0x50"}, "60m"),
    Quiet("VLLMGatewayGone", "where there is no gateway, and while the first one is pending", {up(): "1x60"}, "60m"),
    Quiet("VLLMGatewayGone", "a rollout that replaces the only pod within three minutes",
          {up("gateway", GATEWAY["instance"]): "1x9 stale", up("gateway", "10.0.0.55:8010"): "_x12 1x50"}, "60m"),
    Quiet("VLLMSlowStart", "nobody had asked before", {up(): "_x15 1x70", process_start(): "_x15 0x70"}, "80m"),
    Quiet("VLLMQueueGrowing", "a short queue", {engine("num_requests_waiting"): "2+1x8 10x30"}, "38m"),
    Quiet("VLLMQueueGrowing", "one that has just come and stays", {engine("num_requests_waiting"): "0+3x10 30x30"},
        "38m"),
    *(
        Quiet("VLLMLatencyWorseSinceTuning", f"too few {when}",
              {**histogram("time_to_first_token_seconds", "1.0", "2.5",
                  within=grows((60, before * 0.96), (90, after * 0.5)),
                           total=grows((60, before), (90, after))),
               **finished(stop=grows((60, before), (90, after))),
               sidecar("tuning_event_timestamp_seconds", kind="change"): "_x60 3600x90"}, "150m")
        for when, before, after in (("before", 3, 10), ("after", 10, 2))
    ),
    Quiet("VLLMKVCacheThrashing", "full, and nothing is taken from anyone",
          {engine("kv_cache_usage_perc"): "0.99x40", engine("num_preemptions_total"): "70x40"}, "40m"),
    Quiet("VLLMKVCacheThrashing", "full, after one burst",
          {engine("kv_cache_usage_perc"): "0.99x60", engine("num_preemptions_total"): "0x5 60x60"}, "58m"),
    Quiet("VLLMPreemptionsSustained", "one burst", {engine("num_preemptions_total"): "0x5 60x40"}, "40m"),
    Quiet("VLLMCacheHitsCollapsed", "where little was ever found",
          {engine("prefix_cache_queries_total"): grows((300, 2000)),
              engine("prefix_cache_hits_total"): grows((240, 390), (60, 0)),
           **finished(stop=grows((300, 8)))}, "600m", interval="2m", every="5m"),
    Quiet("VLLMErrorRatioHigh", "four in five minutes, again and again", outcomes(ok="0+1x60", timeout="0+0.8x60"),
        "60m"),
    Quiet("VLLMErrorRatioHigh", "refusals and client disconnects",
        outcomes(ok="0+50x40", rejected="0+40x40", client_abort="0+10x40", timeout="0x40"), "40m"),
    *(
        Quiet(alert, f"{shows} over HTTP", {**responses(s2xx="0+50x60", s5xx="0+50x60"), **log_of_it}, "60m")
        for alert in ("VLLMHTTPErrorRatioHigh", "VLLMSuccessBudgetBurn", "VLLMSuccessBudgetSlowBurn")
        for shows, log_of_it in (
            ("the request log has the model and knows better than", outcomes(ok="0+100x60")),
            ("the request log has only rejections and counts instead of", outcomes(rejected="0+100x60")),
            ("a sidecar reconciles the model with a log of another name, and so counts instead of",
             {log("requests_total", outcome="ok", model_name="alias"): "0+100x60",
              sidecar("reconcile_settled_timestamp_seconds", model_name="chat"): "0+60x60"}),
            ("rejections by its own limit are all that an engine answers", refused_by_engine("0+60x60")),
        )
    ),
    Quiet("VLLMHTTPErrorRatioHigh", "four in five minutes", responses(s2xx="0+1x60", s5xx="0+0.8x60"), "60m"),
    Quiet("VLLMHTTPErrorRatioHigh", "requests that clients got wrong", responses(s2xx="0x60", s4xx="0+50x60"), "60m"),
    Quiet("VLLMHTTPErrorRatioHigh", "errors of another program with metrics of this name",
          {series: values for series, values in responses(s2xx="0+50x60", s5xx="0+50x60").items()
           if series.startswith("http")}, "60m"),
    Quiet("VLLMGatewayRejecting", "refused by the engine",
          {log("request_reasons_total", outcome="rejected", reason="engine_busy"): "0+50x40",
              **outcomes(ok="0+50x40", rejected="0+50x40")}, "40m"),
    Quiet("VLLMGatewayRejecting", "four in five minutes, again and again",
          {log("request_reasons_total", **_REFUSED): "0+0.8x60", **outcomes(ok="0+1x60", rejected="0+0.8x60")}, "60m"),
    Quiet("VLLMClientHangupsRising", "as many as on any day",
        outcomes(ok=grows((160, 88)), client_abort=grows((160, 12))), "160m"),
    Quiet("VLLMClientHangupsRising", "as many as on the same day before",
          outcomes(ok=grows((180, 176), (120, 192), (30, 176)), client_abort=grows((180, 24), (120, 8), (30, 24))),
          "660m", interval="2m",
          every="5m"),
    Quiet("VLLMClientHangupsRising", "four in five minutes",
        outcomes(ok=grows((160, 1)), client_abort=grows((120, 0), (40, 0.8))), "160m"),
    Quiet("VLLMClientHangupsRising", "four in five minutes, by an engine",
          {engine("time_to_first_token_seconds_bucket", le="+Inf"): "0+0.8x40",
              engine("e2e_request_latency_seconds_count"): "0x40",
           engine("num_requests_running"): "0x40"}, "40m"),
    Quiet("VLLMClientHangupsRising", "requests that still run",
          {engine("time_to_first_token_seconds_bucket", le="+Inf"): "0+100x40",
              engine("e2e_request_latency_seconds_count"): "0x40",
           engine("num_requests_running"): "0+100x40"}, "40m"),
    Quiet("VLLMAnswersCutOff", "the one answer there was",
          finished(stop="0x60", length="0x5 1x55"), "60m"),
    Quiet("VLLMEngineExceedsLog", "two by hand, to the last request",
          books(missing_in_log="7x20 8x20 9x50", extra_in_log="7x90", engine="7x20 8x20 9x50", log="7x90"), "90m"),
    Quiet("VLLMLogExceedsEngine", "what a restart took with it",
          {**books(missing_in_log="7x90", extra_in_log="7x90", engine=grows((30, 50), (60, 50)), log="7+50x90"),
           sidecar("extra_in_log_total", cause="restart", kind="requests", model_name="chat"): "0x30 40x60",
           sidecar("extra_in_log_total", cause="start", kind="requests", model_name="chat"): "0x10 40x80"}, "90m"),
    Quiet("VLLMEngineExceedsLog", "where there is no log", finished(stop="0+20x90"), "90m"),
    Quiet("VLLMEngineExceedsLog", "a handful by hand",
          {**finished(stop="0x20 9x70"), **outcomes(ok="0x90")}, "90m"),
    Quiet("VLLMLogExceedsEngine", "across a restart of the engine",
          {**finished(stop="0+20x45 0+20x45"), **outcomes(ok="0+20x91")}, "90m"),
    Quiet("VLLMLogExceedsEngine", "a handful", {**finished(stop="0x90"), **outcomes(ok="0x20 9x70")}, "90m"),
    *(
        Quiet(alert, f"{who} was away and has counted on", {**finished(stop=engines), **outcomes(ok=log_of_it)}, "130m")
        for who, engines, log_of_it in (
            ("the sidecar", "0+20x140", "0+20x60 _x9 1400+20x70"),
            ("an engine's scrape", "0+20x60 _x9 1400+20x70", "0+20x140"),
        )
        for alert in ("VLLMEngineExceedsLog", "VLLMLogExceedsEngine")
    ),
    Quiet("VLLMRequestLogLagging", "nothing new is written",
          read_log(lag="61x40", lines="50x40", unread="0x40"), "40m"),
    Quiet("VLLMRequestLogLagging", "the last of it was late", read_log(lag="61x60", lines="0x2 50x57", unread="0x60"),
        "58m"),
    Quiet("VLLMGPUThrottled", "told by the sidecar",
        {card_info("GPU-2f"): "1x40", dcgm("THERMAL_VIOLATION"): "0+60e9x40"}, "40m"),
    Quiet("VLLMGPUMemoryNearlyFull", "told by the sidecar",
          {card_info("GPU-2f"): "1x40", dcgm("FB_USED"): "80000x40", dcgm("FB_FREE"): "1x40"}, "40m"),
    Quiet("VLLMGatewayReplicaDown", "a rolling restart that takes each of three gateways 4 min",
        {up("gateway", "10.0.0.5:8010"): "1x3 0x3 1x40", up("gateway", "10.0.0.6:8010"): "1x7 0x3 1x36",
            up("gateway", "10.0.0.7:8010"): "1x11 0x3 1x32"}, "47m"),
    Quiet("VLLMGatewayReplicaDown", "all gateways of a job, which is another alert, and another job's answers",
        {up("gateway", "10.0.0.5:8010"): "1x3 0x40", up("gateway", "10.0.0.6:8010"): "1x3 0x40",
            up("sidecar", "10.0.0.7:9401"): "1x43"}, "43m"),
    Quiet("VLLMGPUMissing", "a host that never had one", {sidecar("source_up", kind="gpu", source="gpu"): "0x40"},
        "40m"),
    Quiet("VLLMGPUXid", "an old one whose exporter was away", {dcgm("XID_ERRORS"): "79x80 _x10 79x100"}, "185m",
        since="60m"),
    Quiet("VLLMGPUThrottled", "at its power limit", {card_info(): "1x40", **throttled(sw_power_cap="0+60x40")}, "40m"),
)  # fmt: skip
