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
    notes=(
        "status is 2xx, 4xx, 5xx, or none when the client left before it got one.",
        "A refused key counts for the team __unknown__.",
    ),
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
LOG_LOST_BEFORE = Metric(
    "vllm_watch_gateway_log_lost_before_requests",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests that earlier runs of the gateway accepted and left without a record, as found at its starts within the"
    " last hour, by state at the end of that run: waiting (the record waited in memory) or in_flight.",
    labels=("state",),
    notes=(
        (
            "From the journal beside the request log. 0 from an hour after the last such start on; 0 too where there"
            " was no journal."
        ),
    ),
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
    "Whether the gateway takes an upstream for well: an engine by its /health and by whether it takes connections,"
    " another service by requests.",
    labels=("upstream", "address"),
    across=Across.MIN,
    notes=("address is host:port, as Prometheus calls an instance; upstream is its name in teams.yaml.",),
)
RUNNING = Metric(
    "vllm_watch_gateway_running_requests", Kind.GAUGE, Unit.REQUESTS,
    "Requests that were admitted and have a slot at the engines, by team and band.", labels=("team", "band"),
)  # fmt: skip
WAITING = Metric(
    "vllm_watch_gateway_waiting_requests", Kind.GAUGE, Unit.REQUESTS,
    "Requests that wait in the gateway for admission, by team and band.", labels=("team", "band"),
)  # fmt: skip
WAIT_ESTIMATE = Metric(
    "vllm_watch_gateway_wait_estimate_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "How long one more request of the team would wait for admission, by the estimate that refusals and Retry-After"
    " rest on.",
    labels=("team", "band"),
    across=Across.MAX,
    notes=("0 until the first request has ended: nobody knows yet how long a slot is held.",),
)
SLOTS = Metric(
    "vllm_watch_gateway_slots",
    Kind.GAUGE,
    Unit.REQUESTS,
    "How many requests may be at the engines at once now; lower than the limit while an engine queues, preempts or has"
    " a full cache.",
    labels=(),
)
SLOTS_LIMIT = Metric(
    "vllm_watch_gateway_slots_limit", Kind.GAUGE, Unit.REQUESTS,
    "How many requests may be at the engines at once when they have room: capacity.slots.", labels=(),
)  # fmt: skip
TOKENS = Metric(
    "vllm_watch_gateway_inflight_tokens", Kind.GAUGE, Unit.TOKENS,
    "Prompt and expected output, in tokens, of the requests that have a slot.", labels=(),
)  # fmt: skip
REJECTED = Metric(
    "vllm_watch_gateway_rejected_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests that were refused, by us or by an engine, by team and reason.",
    labels=("team", "reason"),
    notes=(
        (
            "A refusal is a policy event, not a failure; the same requests are in vllm_watch_gateway_requests_total as"
            " rejected."
        ),
    ),
)
UPSTREAM_INFLIGHT = Metric(
    "vllm_watch_gateway_upstream_inflight_requests", Kind.GAUGE, Unit.REQUESTS,
    "Requests that an upstream has been sent and has not wholly answered.", labels=("upstream", "variant"),
    notes=("upstream is the name in teams.yaml, or host:port where only gateway.yaml names one.",),
)  # fmt: skip
ATTEMPTS = Metric(
    "vllm_watch_gateway_attempts_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Tries at an upstream that ended, by result: ok, or the reason why not. A request that fell back counts at each of"
    " them.",
    labels=("upstream", "variant", "result"),
    notes=("A result shows no rise before its second time: it has no series before its first.",),
)
RELOADS = Metric(
    "vllm_watch_gateway_reloads_total",
    Kind.COUNTER,
    Unit.COUNT,
    "How often teams.yaml was read again, by result: ok or failed, in which case the former terms stay in force.",
    labels=("result",),
)
TURNED_AWAY = Metric(
    "vllm_watch_gateway_turned_away_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Requests and connections that a listener of the gateway (clients, figures) turned away before anybody else looked"
    " at them, by reason: login (none that is known), logins_waiting (too many unknown ones wait to be checked),"
    " slow_head (a head that did not come in time), handshake (of TLS, failed or not in time), gave_way (cut to make"
    " room: idle, or without a request yet), full (no room), pipelined (more requests or bytes behind a running request"
    " than a connection may have); what the HTTP parser refused: head_too_large (431), bad_request_line, bad_framing"
    " (400).",
    labels=("listener", "reason"),
    notes=("A team's wrong key is no such login: see vllm_watch_gateway_rejected_total.",),
)
LOOP_LAG = Metric(
    "vllm_watch_gateway_event_loop_lag_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "How much later than asked the gateway's event loop woke up; every request waits at least that long, unseen by its"
    " timings.",
    labels=(),
    native=True,
)
TASKS = Metric(
    "vllm_watch_gateway_tasks",
    Kind.GAUGE,
    Unit.COUNT,
    "Tasks of the gateway's event loop: some for each connection and request under way, a dozen besides. Without"
    " traffic it comes back to those.",
    labels=(),
)

GATEWAY = (
    REQUESTS, INFLIGHT, REJECTED, RUNNING, WAITING, WAIT_ESTIMATE, SLOTS, SLOTS_LIMIT, TOKENS, UPSTREAM_UP,
    UPSTREAM_INFLIGHT, ATTEMPTS,
    RELOADS, LOG_ERRORS, LOG_LOST, LOG_LOST_BEFORE, LOG_WAITING, TURNED_AWAY, LOOP_LAG, TASKS,
)  # fmt: skip
