"""Series that the gateway exposes about itself. Details per request are in the request log."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

LOOP_LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

REQUESTS = Metric(
    "vllm_watch_gateway_requests_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Finished requests, one per request log record, by team, outcome and status class sent to the client.",
    labels=("team", "outcome", "status"),
    notes=(
        "status is 2xx, 4xx, 5xx, or none if the client disconnected before the response.",
        "A rejected API key counts as team __unknown__.",
    ),
)
INFLIGHT = Metric(
    "vllm_watch_gateway_inflight_requests",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests accepted and not finished, by team.",
    labels=("team",),
)
LOG_ERRORS = Metric(
    "vllm_watch_gateway_log_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Failed writes of the request log, such as on a full disk; the records wait in memory.",
    labels=(),
)
LOG_LOST = Metric(
    "vllm_watch_gateway_log_lost_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Request records dropped because the log could not be written for too long.",
    labels=(),
)
LOG_LOST_BEFORE = Metric(
    "vllm_watch_gateway_log_lost_before_requests",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests of earlier gateway runs without a record, found at starts within the last hour, by state at the end of"
    " that run: waiting (record in memory) or in_flight.",
    labels=("state",),
    notes=(
        ("Read from the journal next to the request log. 0 one hour after the last such start, and without a journal."),
    ),
)
LOG_WAITING = Metric(
    "vllm_watch_gateway_log_waiting_requests",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Request records in memory that wait until the request log is writable.",
    labels=(),
)
UPSTREAM_UP = Metric(
    "vllm_watch_gateway_upstream_up",
    Kind.GAUGE,
    Unit.FLAG,
    "1 if the gateway considers an upstream healthy: an engine by /health and by accepted connections, another"
    " service by requests.",
    labels=("upstream", "address"),
    across=Across.MIN,
    notes=("address is host:port, like Prometheus' instance label; upstream is the name in teams.yaml.",),
)
ENGINE_STATE = Metric(
    "vllm_watch_gateway_engine_state",
    Kind.GAUGE,
    Unit.FLAG,
    "1 for the current state of an engine and the evidence for it: healthy, idle, slow, suspect, hung, loading,"
    " draining, scaling.",
    labels=("upstream", "address", "state", "evidence"),
    across=Across.MAX,
    notes=(
        (
            "Assessed once a second from /metrics, the gateway's own requests, and a one-token probe where both"
            " are silent. Only hung asks for a restart; an engine may leave rotation in state suspect."
        ),
        "address is host:port, like Prometheus' instance label; upstream is the name in teams.yaml.",
    ),
)
RUNNING = Metric(
    "vllm_watch_gateway_running_requests", Kind.GAUGE, Unit.REQUESTS,
    "Admitted requests that hold engine slots, by team and band.", labels=("team", "band"),
)  # fmt: skip
SLOTS_HELD = Metric(
    "vllm_watch_gateway_slots_held", Kind.GAUGE, Unit.REQUESTS,
    "Slots that running requests hold, by team and band: one for each text of a request.", labels=("team", "band"),
)  # fmt: skip
WAITING = Metric(
    "vllm_watch_gateway_waiting_requests", Kind.GAUGE, Unit.REQUESTS,
    "Requests queued for admission, by team and band.", labels=("team", "band"),
)  # fmt: skip
WAIT_ESTIMATE = Metric(
    "vllm_watch_gateway_wait_estimate_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "Estimated admission wait for the team's next request; basis of rejections and Retry-After.",
    labels=("team", "band"),
    across=Across.MAX,
    notes=("0 until the first request has ended, because the slot hold time is unknown.",),
)
SLOTS = Metric(
    "vllm_watch_gateway_slots",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Current number of slots at the engines; below slots_limit while an engine queues, preempts or has a full cache.",
    labels=(),
)
SLOTS_LIMIT = Metric(
    "vllm_watch_gateway_slots_limit", Kind.GAUGE, Unit.REQUESTS,
    "Configured number of slots at the engines (capacity.slots), or this gateway's share of it.",
    labels=(),
)  # fmt: skip
TOKENS = Metric(
    "vllm_watch_gateway_inflight_tokens", Kind.GAUGE, Unit.TOKENS,
    "Prompt and expected output tokens of the requests that hold a slot.", labels=(),
)  # fmt: skip
REJECTED = Metric(
    "vllm_watch_gateway_rejected_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests rejected by the gateway or an engine, by team and reason.",
    labels=("team", "reason"),
    notes=(
        (
            "A rejection is policy, not a failure; vllm_watch_gateway_requests_total counts the same requests as"
            " rejected."
        ),
    ),
)
UNREADABLE = Metric(
    "vllm_watch_gateway_unreadable_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Attempts at an upstream whose response could not be read, by route and reason: redirect (3xx), content_type (a"
    " media type that the route never has), encoding (a Content-Encoding that was not requested and cannot be decoded),"
    " json (not JSON), shape (JSON without the route's fields), empty (no body or no readable event), usage (impossible"
    " token counts), size (intact, but its token counts are beyond what the gateway reads).",
    labels=("route", "reason"),
    notes=(
        "With usage and size the request is served, and its token counts are unknown; otherwise the attempt fails.",
        "All reasons of a route start at 0 with its first request, so increase() includes the first occurrence.",
    ),
)
UPSTREAM_INFLIGHT = Metric(
    "vllm_watch_gateway_upstream_inflight_requests", Kind.GAUGE, Unit.REQUESTS,
    "Requests in flight at an upstream.", labels=("upstream", "variant"),
    notes=("upstream is the name in teams.yaml, or host:port if only gateway.yaml lists it.",),
)  # fmt: skip
ATTEMPTS = Metric(
    "vllm_watch_gateway_attempts_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Finished attempts at an upstream by result: ok, or the failure reason. A request with failover counts at each"
    " upstream.",
    labels=("upstream", "variant", "result"),
    notes=("A series starts at a result's first occurrence, so rate() sees it from the second one on.",),
)
RELOADS = Metric(
    "vllm_watch_gateway_reloads_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Reloads of teams.yaml by result: ok, or failed (the previous configuration stays active).",
    labels=("result",),
)
POLICY_INFO = Metric(
    "vllm_watch_gateway_policy_info",
    Kind.INFO,
    Unit.NONE,
    "Hash of the policy in force (teams, bands, capacity), the same for gateways that read the same teams.yaml.",
    labels=("policy",),
)
LEASE_LOST = Metric(
    "vllm_watch_gateway_lease_lost",
    Kind.GAUGE,
    Unit.FLAG,
    "1 while the store of the gateways leases nothing to this one and its fixed share holds; 0 while it leases"
    " every limit.",
    labels=(),
    notes=("Only with sharing.store in gateway.yaml.",),
)
LEASE_REPLICAS = Metric(
    "vllm_watch_gateway_lease_replicas",
    Kind.GAUGE,
    Unit.COUNT,
    "Gateways with a lease, this one included, by the latest answer of the store.",
    labels=(),
    across=Across.MAX,
    notes=("Only with sharing.store in gateway.yaml.",),
)
LEASE_POLICIES = Metric(
    "vllm_watch_gateway_lease_policies",
    Kind.GAUGE,
    Unit.COUNT,
    "Different policies (teams, bands, capacity) among the gateways with a lease; more than 1 means that one has not"
    " read the latest teams.yaml.",
    labels=(),
    across=Across.MAX,
    notes=("Only with sharing.store in gateway.yaml.",),
)
LISTENER_REJECTED = Metric(
    "vllm_watch_gateway_turned_away_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Requests and connections rejected by a gateway listener (clients, figures) before they were handled, by reason:"
    " login (missing or wrong credentials), logins_waiting (too many password checks queued), slow_head (request head"
    " timeout), handshake (TLS handshake failed or timed out), gave_way (idle connection closed to make room), full"
    " (connection limit), pipelined (too much pipelined data); rejected by the HTTP parser: head_too_large (431),"
    " bad_request_line, bad_framing (400).",
    labels=("listener", "reason"),
    notes=("Excludes wrong API keys of teams: see vllm_watch_gateway_rejected_total.",),
)
LOOP_LAG = Metric(
    "vllm_watch_gateway_event_loop_lag_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Event loop lag: delay of a timer beyond its set time. It adds to every request and is not in the request timings.",
    labels=(),
    native=True,
)
TASKS = Metric(
    "vllm_watch_gateway_tasks",
    Kind.GAUGE,
    Unit.COUNT,
    "Tasks of the gateway's event loop: a few per connection and request in flight, and about a dozen permanent ones.",
    labels=(),
)

GATEWAY = (
    REQUESTS, INFLIGHT, REJECTED, UNREADABLE, RUNNING, SLOTS_HELD, WAITING, WAIT_ESTIMATE, SLOTS, SLOTS_LIMIT, TOKENS,
    UPSTREAM_UP, ENGINE_STATE, UPSTREAM_INFLIGHT, ATTEMPTS, POLICY_INFO,
    RELOADS, LEASE_LOST, LEASE_REPLICAS, LEASE_POLICIES, LOG_ERRORS, LOG_LOST, LOG_LOST_BEFORE, LOG_WAITING,
    LISTENER_REJECTED, LOOP_LAG, TASKS,
)  # fmt: skip
