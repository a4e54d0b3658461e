"""Recording rules for the dashboard Fleet (weeks).

Invariant: no label here grows with the number of engines. Two hundred engines of ten models in four places are ten to
forty series of a kind, so a year of them can be read; the single engine is found in the Prometheus that scraped it,
within its retention. A worst value is recorded as a maximum over engines, a count as growth within 5 min that can be
added up (recorded.counted)."""

from __future__ import annotations

from collections.abc import Iterator

from alerts import recorded
from alerts.labels import ENGINE, PLACE, TEAM, by
from alerts.recorded import HOURLY, OVER
from alerts.rules import Recording
from alerts.settings import Settings
from exporters.catalogue import attributed, promql, sidecar, vllm

PLACED = (*PLACE, "model_name")
_ENGINES_OF = "cluster_namespace_model_name"
ENGINES = f"{_ENGINES_OF}:vllm_engines:count"
RUNNING, WAITING = f"{_ENGINES_OF}:vllm_requests_running:sum", f"{_ENGINES_OF}:vllm_requests_waiting:sum"
FULLEST = f"{_ENGINES_OF}:vllm_kv_cache_usage:max"
LONGEST_QUEUE = f"{_ENGINES_OF}:vllm_queue_time_seconds:max_p95_5m"
GENERATED, PROMPTED, PREEMPTED = (
    f"{_ENGINES_OF}:vllm_{what}:rate5m" for what in ("generation_tokens", "prompt_tokens", "preemptions")
)
TEAM_TTFT = f"cluster_team:{sidecar.TTFT.name}:p95_5m"

# Names of counts without their window: growth within 5 min, and within an hour for windows of days.
TEAM_REQUESTS = "cluster_team_outcome:vllm_watch_requests:increase"
TEAM_TOKENS = "cluster_team_type:vllm_watch_tokens:increase"
TEAM_COST = "cluster_team_basis_currency:vllm_watch_cost:increase"
COUNTED = (TEAM_REQUESTS, TEAM_TOKENS, TEAM_COST)

# Series that the dashboard reads: these, and the counts by model of alerts/recorded.py.
KEPT = (
    ENGINES, RUNNING, WAITING, FULLEST, LONGEST_QUEUE, GENERATED, PROMPTED, PREEMPTED, TEAM_TTFT,
    *(what + window for what in COUNTED for window in (OVER, HOURLY)),
    *(what + OVER for what in (recorded.TTFT, recorded.INTER_TOKEN, recorded.REQUESTS, recorded.HITS,
        recorded.LOOKUPS)),
)  # fmt: skip


def recordings(s: Settings) -> Iterator[Recording]:
    """Return the rules of the fleet: all from raw series, except the longest queue, which is recorded by engine."""
    window = s.window(OVER)
    yield Recording(
        ENGINES,
        f"count {by(PLACED)} (group {by(ENGINE)} ({promql.series(vllm.NUM_REQUESTS_RUNNING)}))",
        "engines that answered",
    )
    yield Recording(
        RUNNING, promql.current(vllm.NUM_REQUESTS_RUNNING, PLACED), "requests running on all engines of a model"
    )
    yield Recording(
        WAITING,
        promql.current(vllm.NUM_REQUESTS_WAITING, PLACED),
        "requests that all engines of a model have accepted and not scheduled",
    )
    yield Recording(
        FULLEST,
        promql.worst(vllm.KV_CACHE_USAGE, PLACED),
        "share of KV-cache blocks in use on the fullest engine of a model",
    )
    yield Recording(
        LONGEST_QUEUE,
        f"max without (job, instance) ({recorded.QUEUED})",
        "p95 of the time in the queue, on the engine of a model where it is longest",
    )
    yield Recording(GENERATED, promql.per_second(vllm.GENERATION_TOKENS, window, PLACED), recorded.GENERATED)
    yield Recording(PROMPTED, promql.per_second(vllm.PROMPT_TOKENS, window, PLACED), recorded.PROMPTED)
    yield Recording(PREEMPTED, promql.per_second(vllm.NUM_PREEMPTIONS, window, PLACED), "preemptions a second")
    yield Recording(
        TEAM_TTFT,
        promql.bounded_quantile(0.95, sidecar.TTFT, window, TEAM),
        "p95 of a team's time to first token, at the client",
    )
    yield Recording(
        TEAM_REQUESTS + OVER, promql.growth(sidecar.REQUESTS, window, (*TEAM, "outcome")), recorded.LOGGED_REQUESTS
    )
    yield Recording(
        TEAM_TOKENS + OVER,
        promql.growth(sidecar.TOKENS, window, (*TEAM, "type")),
        "a team's tokens in the log, by type",
    )
    yield Recording(
        TEAM_COST + OVER,
        promql.growth(attributed.COST, window, (*TEAM, "basis", "currency")),
        "what the GPUs cost for a team, by basis",
    )
