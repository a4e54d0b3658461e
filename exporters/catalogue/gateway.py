"""What the gateway says about itself on its metrics port. What it did for whom in detail stands in the request log."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

LOOP_LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

REQUESTS = Metric(
    "vllm_watch_gateway_requests_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests that ended, one per record in the request log, by team, outcome and class of the status the client got.",
    labels=("team", "outcome", "status"),
    notes=("status is 2xx, 4xx, 5xx, or none when the client left before it got one.", "A refused key counts for the team __unknown__."),
)
INFLIGHT = Metric(
    "vllm_watch_gateway_inflight_requests",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests that were accepted and have not ended, by team.",
    labels=("team",),
)
LOG_ERRORS = Metric(
    "vllm_watch_gateway_log_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Failed attempts to write the request log, such as on a full disk; the records wait in memory.",
    labels=(),
)
LOG_LOST = Metric(
    "vllm_watch_gateway_log_lost_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Request records that were dropped because the log could not be written for too long.",
    labels=(),
)
LOG_WAITING = Metric(
    "vllm_watch_gateway_log_waiting_requests",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Request records that wait in memory for the request log to be writable.",
    labels=(),
)
UPSTREAM_UP = Metric(
    "vllm_watch_gateway_upstream_up",
    Kind.GAUGE,
    Unit.FLAG,
    "Whether the engine's /health answered the gateway's last probe.",
    labels=("upstream",),
    across=Across.MIN,
)
LOOP_LAG = Metric(
    "vllm_watch_gateway_event_loop_lag_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "How much later than asked the gateway's event loop woke up; every request waits at least that long, unseen by its timings.",
    labels=(),
)

GATEWAY = (REQUESTS, INFLIGHT, LOG_ERRORS, LOG_LOST, LOG_WAITING, UPSTREAM_UP, LOOP_LAG)
