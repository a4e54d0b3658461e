"""Series of the sidecar: joined metrics, and the health of each of its sources."""

from __future__ import annotations

from exporters.catalogue.attributed import ATTRIBUTED
from exporters.catalogue.golden import GOLDEN
from exporters.catalogue.metric import Across, Kind, Metric, Unit
from exporters.catalogue.reconciled import RECONCILED

# Requests, from the log. Labels: the served model and the team, bounded.
_WHO = ("model_name", "team")
REQUESTS = Metric(
    "vllm_watch_requests_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Finished requests by outcome: ok, client_abort, rejected, upstream_error, timeout; unknown if the log has none.",
    labels=("model_name", "outcome", "team"),
    notes=("Includes client disconnects; vLLM's request_success_total does not.",),
)
FAILED = ('outcome=~"upstream_error|timeout"',)  # rejections are policy, and client disconnects are not server failures
REASONS = Metric(
    "vllm_watch_request_reasons_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests that did not end with ok, by the record's reason: at most 40 reasons, further ones count as __other__.",
    labels=("model_name", "outcome", "reason", "team"),
)
FINISHES = Metric(
    "vllm_watch_request_finishes_total", Kind.COUNTER, Unit.REQUESTS,
    "Requests by finish reason: stop, length, abort, error, rejected, other.",
    labels=("finish_reason", "model_name", "team"),
)  # fmt: skip
UNREADABLE = Metric(
    "vllm_watch_requests_unreadable_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests whose answer the gateway could not read, by the record's `unreadable`: redirect, content_type, encoding,"
    " json, shape, empty (failed), usage, size (token counts unknown), other.",
    labels=("model_name", "reason", "team"),
    notes=("vllm_watch_gateway_unreadable_total counts attempts; this counts requests.",),
)
TOKENS = Metric(
    "vllm_watch_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Tokens from the engine's usage, by type: prompt, cached (part of prompt), completion.",
    labels=("model_name", "team", "type"),
    notes=(
        (
            "Only requests with usage. A client disconnect before the last chunk leaves none: see"
            " vllm_watch_estimated_tokens_total."
        ),
    ),
)
ESTIMATED_TOKENS = Metric(
    "vllm_watch_estimated_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Estimated tokens of requests without usage, such as aborted streams and unreadable answers, by type: prompt,"
    " completion.",
    labels=("model_name", "team", "type"),
    notes=(
        (
            "Estimated by the gateway: prompt from its bytes, completion from the content. Not in"
            " vllm_watch_tokens_total."
        ),
    ),
)
TTFT = Metric(
    "vllm_watch_ttft_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Client TTFT: gateway queue, engine queue and prefill. Streams only.",
    labels=_WHO,
    native=True,
)
TPOT = Metric(
    "vllm_watch_tpot_seconds", Kind.HISTOGRAM, Unit.SECONDS,
    "TPOT: mean time per output token after the first, one value per streamed request.", labels=_WHO, native=True,
)  # fmt: skip
E2E = Metric(
    "vllm_watch_e2e_seconds", Kind.HISTOGRAM, Unit.SECONDS,
    "Request duration from acceptance to end, measured by the gateway.", labels=_WHO, native=True,
)  # fmt: skip
QUEUE = Metric(
    "vllm_watch_queue_seconds", Kind.HISTOGRAM, Unit.SECONDS,
    "Time a request waited in the gateway before it was forwarded.", labels=_WHO, native=True,
)  # fmt: skip
ENGINE_QUEUE = Metric(
    "vllm_watch_engine_queue_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time a request waited in the engine, as the engine reported it in the response.",
    labels=_WHO,
    native=True,
    needs="--enable-per-request-metrics",
)
CACHE_LOOKUPS = Metric(
    "vllm_watch_cache_lookups_total", Kind.COUNTER, Unit.REQUESTS,
    "Requests by prefix cache result (hit, miss), where the record has one.",
    labels=("model_name", "result", "team"), needs="--enable-prompt-tokens-details",
)  # fmt: skip
TTFT_OVERHEAD = Metric(
    "vllm_watch_ttft_overhead_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "TTFT overhead outside the engine, per request: client TTFT minus the engine's queue and prefill time.",
    labels=_WHO,
    native=True,
    needs="--enable-per-request-metrics",
    notes=("Computed per request, not as a difference of quantiles.",),
)
TTFT_NEGATIVE = Metric(
    "vllm_watch_ttft_overhead_negative_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests with a client TTFT below the engine's queue and prefill time: clocks or definitions differ.",
    labels=_WHO,
    needs="--enable-per-request-metrics",
)
REQUEST_TRAFFIC = (
    REQUESTS, REASONS, FINISHES, UNREADABLE, TOKENS, ESTIMATED_TOKENS, TTFT, TPOT, E2E, QUEUE, ENGINE_QUEUE,
    CACHE_LOOKUPS, TTFT_OVERHEAD, TTFT_NEGATIVE,
)  # fmt: skip

# Families of their own with few buckets: a further label on those above would multiply the series of every team.
_FOLDED = "At most 40 pairs have series of their own, further ones count as __other__."
ADAPTER_TTFT = Metric(
    "vllm_watch_adapter_ttft_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Client TTFT of successful requests for a LoRA adapter, by adapter; none without adapters.",
    labels=("adapter", "model_name"),
    notes=(_FOLDED,),
)
ROUTE_E2E = Metric(
    "vllm_watch_route_e2e_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Duration of successful requests from acceptance to end, by API route.",
    labels=("model_name", "route"),
    notes=(_FOLDED,),
)
GROUPED = (ADAPTER_TTFT, ROUTE_E2E)

# each bucket has the trace of its last request as exemplar
TRACED = (TTFT, TPOT, E2E, QUEUE, ENGINE_QUEUE, TTFT_OVERHEAD)

# The log itself.
LOG_LINES = Metric(
    "vllm_watch_log_lines_total", Kind.COUNTER, Unit.COUNT, "Request log lines read and counted.", labels=()
)
LOG_BAD_LINES = Metric(
    "vllm_watch_log_bad_lines_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Lines that are not a valid request record, by reason: json, type, range, size, long, torn (incomplete last"
    " line). The sidecar's log names the error, not the line.",
    labels=("reason",),
)
LOG_UNTIMED = Metric(
    "vllm_watch_log_untimed_lines_total", Kind.COUNTER, Unit.COUNT,
    "Lines without a timestamp; their read time is used.", labels=(),
)  # fmt: skip
LOG_LAG = Metric(
    "vllm_watch_log_lag_seconds", Kind.GAUGE, Unit.SECONDS,
    "Delay from the end of a request to its count, for the newest record.", labels=("path",), across=Across.MAX,
)  # fmt: skip
LOG_BYTES_BEHIND = Metric(
    "vllm_watch_log_unread_bytes", Kind.GAUGE, Unit.BYTES, "Bytes of the request log not yet read.", labels=("path",)
)
LOG_ROTATIONS = Metric(
    "vllm_watch_log_rotations_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Rotations and truncations of a request log.",
    labels=("path",),
)
TEAMS = Metric(
    "vllm_watch_teams", Kind.GAUGE, Unit.COUNT, "Teams with their own series.", labels=(), across=Across.MAX,
    notes=("Several sidecars have mostly the same teams.",),
)  # fmt: skip
TEAMS_OVERFLOW = Metric(
    "vllm_watch_teams_overflow_total", Kind.COUNTER, Unit.REQUESTS,
    "Requests counted as team __other__ because the team limit was reached.", labels=(),
)  # fmt: skip
MODELS_OVERFLOW = Metric(
    "vllm_watch_models_overflow_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests counted as model __other__ because the model limit was reached or the model never served a request.",
    labels=(),
)
LOG_DUPLICATES = Metric(
    "vllm_watch_log_duplicate_lines_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Lines of requests already counted, such as a log delivered twice; matched by request_id and span_id. If most lines"
    " of a log are, the log has no id of its own for each request.",
    labels=("path",),
)
LOG_AHEAD = Metric(
    "vllm_watch_log_ahead_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Reads in which the newest record ended more than 1 s in the future; the lag is then reported as 0.",
    labels=(),
)
LOG_FAULTS = Metric(
    "vllm_watch_log_file_faults_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Damage and gaps of a request log, by reason: long (line over 1 MiB, skipped), nul (NUL bytes, skipped), torn"
    " (incomplete last line), cut (truncated with unread lines and no copy), gone (missing at start), reread (changed"
    " before the read position; repeated lines are matched by id), packed (compressed file damaged, incomplete or of"
    " an unsupported format; unread lines are lost), unreadable (rotated file).",
    labels=("path", "reason"),
)
CHECKPOINT_UP = Metric(
    "vllm_watch_checkpoint_up",
    Kind.GAUGE,
    Unit.FLAG,
    "1 when the exposed log counters are saved to disk; 0 while the state cannot be written: the last saved values"
    " are exposed then.",
    labels=(),
    across=Across.MIN,
    needs=(_STATE := "`state` in the sidecar's configuration"),
)
CHECKPOINT_BYTES = Metric(
    "vllm_watch_checkpoint_bytes", Kind.GAUGE, Unit.BYTES, "Size of the state file.", labels=(), needs=_STATE
)
CHECKPOINT_COMMITS = Metric(
    "vllm_watch_checkpoint_commits_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Writes of the state file.",
    labels=(),
    needs=_STATE,
)
REQUEST_LOG = (
    LOG_LINES, LOG_BAD_LINES, LOG_DUPLICATES, LOG_UNTIMED, LOG_AHEAD, LOG_FAULTS, LOG_LAG, LOG_BYTES_BEHIND,
    LOG_ROTATIONS,
    TEAMS, TEAMS_OVERFLOW, MODELS_OVERFLOW, CHECKPOINT_UP, CHECKPOINT_BYTES, CHECKPOINT_COMMITS,
)  # fmt: skip

# Engine facts that vLLM exposes only as labels, as numbers, and counters that survive restarts.
ENGINE_INFO = Metric(
    "vllm_watch_engine_info",
    Kind.INFO,
    Unit.NONE,
    "Engine of an upstream: version, cache dtype, prefix caching.",
    labels=("cache_dtype", "enable_prefix_caching", "upstream", "version"),
    across=Across.MAX,
)
KV_BLOCKS = Metric(
    "vllm_watch_kv_blocks",
    Kind.GAUGE,
    Unit.BLOCKS,
    "KV-cache blocks of the engine.",
    labels=("engine", "model_name", "upstream"),
)
KV_BLOCK_SIZE = Metric(
    "vllm_watch_kv_block_size_tokens", Kind.GAUGE, Unit.TOKENS, "Tokens per KV-cache block.",
    labels=("engine", "model_name", "upstream"), across=Across.MAX,
)  # fmt: skip
KV_CAPACITY = Metric(
    "vllm_watch_kv_capacity_tokens", Kind.GAUGE, Unit.TOKENS, "KV-cache capacity of the engine in tokens.",
    labels=("engine", "model_name", "upstream"),
    notes=("The engine's kv_cache_size_tokens (0.24 and later), else blocks x block size.",),
)  # fmt: skip
ENGINE_RESTARTS = Metric(
    "vllm_watch_engine_restarts_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Engine restarts detected by the sidecar: a newer process start time, or a counter reset.",
    labels=("upstream",),
)
ENGINE_CHANGES = Metric(
    "vllm_watch_engine_config_changes_total", Kind.COUNTER, Unit.COUNT,
    "Changes of the engine's version or cache configuration between two scrapes.", labels=("upstream",),
)  # fmt: skip
ENGINE_UNKNOWN_FAMILIES = Metric(
    "vllm_watch_engine_unknown_families",
    Kind.GAUGE,
    Unit.COUNT,
    "vllm: families that the engine exposes and this release of vllm-watch does not know.",
    labels=("upstream",),
    across=Across.MAX,
)
ENGINE_STATE = Metric(
    "vllm_watch_engine_state",
    Kind.GAUGE,
    Unit.FLAG,
    "1 for the current state of an engine by its /metrics alone, and the evidence for it: healthy, idle, slow,"
    " suspect, hung, loading, draining, scaling.",
    labels=("upstream", "address", "state", "evidence"),
    across=Across.MAX,
    notes=(
        (
            "The sidecar sends no probe: an engine that hangs while idle, or with a running gauge of 0, is seen by the"
            " gateway only."
        ),
        "address is host:port, like Prometheus' instance label; upstream is the engine's name in the configuration.",
    ),
)
ENGINES = (
    ENGINE_INFO, KV_BLOCKS, KV_BLOCK_SIZE, KV_CAPACITY, ENGINE_RESTARTS, ENGINE_CHANGES, ENGINE_UNKNOWN_FAMILIES,
    ENGINE_STATE,
)  # fmt: skip

# GPU cost, if the operator configured prices.
_PRICED = "`prices` in the sidecar's configuration"
GPU_COST = Metric(
    "vllm_watch_gpu_cost_per_hour",
    Kind.GAUGE,
    Unit.CURRENCY,
    "GPU cost of this host per hour: visible GPUs x price per GPU hour.",
    labels=("currency",),
    needs=_PRICED,
)
COST_BUDGET = Metric(
    "vllm_watch_cost_budget_per_1k_tokens",
    Kind.GAUGE,
    Unit.CURRENCY,
    "Cost budget per 1,000 tokens, prompt and completion together.",
    labels=("currency",),
    across=Across.MIN,
    needs=_PRICED,
)
COSTS = (GPU_COST, COST_BUDGET)

# Tuning events.
EVENT_TIME = Metric(
    "vllm_watch_tuning_event_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Time of the newest tuning event, by kind.",
    labels=("kind",),
    across=Across.MAX,
)
EVENTS = Metric(
    "vllm_watch_tuning_events_total", Kind.COUNTER, Unit.COUNT, "Recorded tuning events, by kind.", labels=("kind",)
)
CANARY_TIME = Metric(
    "vllm_watch_canary_step_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Time of the newest act on a canary of `vllm-watch canary`, by variant and act: start, raise, roll_back, promote,"
    " undecided, interrupted.",
    labels=("variant", "step"),
    across=Across.MAX,
    notes=("Only the newest act of a variant has a series. From the tags canary=... and step=... of tuning events.",),
)
TUNING = (EVENT_TIME, EVENTS, CANARY_TIME)

# Spans, one for each record that can be one: sent + dropped + left out + waiting = records since the start.
_TRACING = "`otlp` in the sidecar's configuration"
SPANS_SENT = Metric(
    "vllm_watch_spans_sent_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Request spans accepted by the collector.",
    labels=(),
    needs=_TRACING,
)
SPANS_DROPPED = Metric(
    "vllm_watch_spans_dropped_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Request spans lost, by reason: queue_full (more than can be sent), timeout and unavailable (queue full while the"
    " collector did not respond or was unavailable), refused (rejected permanently by the collector), defect (bug in"
    " vllm-watch).",
    labels=("reason",),
    needs=_TRACING,
)
SPANS_LEFT_OUT = Metric(
    "vllm_watch_spans_left_out_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Records without a span, by reason: sampled (not in the sample), history (ended before the sidecar started),"
    " incomplete (no ids or timestamps, as in logs of other gateways).",
    labels=("reason",),
    needs=_TRACING,
)
SPANS_WAITING = Metric(
    "vllm_watch_spans_waiting", Kind.GAUGE, Unit.ITEMS, "Request spans queued or in flight.", labels=(), needs=_TRACING
)
SPANS = (SPANS_SENT, SPANS_DROPPED, SPANS_LEFT_OUT, SPANS_WAITING)

# Health of each source of the sidecar.
SOURCE_UP = Metric(
    "vllm_watch_source_up",
    Kind.GAUGE,
    Unit.FLAG,
    "1 if the last read of this source succeeded.",
    labels=("kind", "source"),
    across=Across.MIN,
)
SOURCE_LAST_SUCCESS = Metric(
    "vllm_watch_source_last_success_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Time of the last successful read of this source; absent until the first success.",
    labels=("kind", "source"),
    across=Across.MIN,
)
SOURCE_AGE = Metric(
    "vllm_watch_source_age_seconds", Kind.GAUGE, Unit.SECONDS, "Age of this source's exposed data.",
    labels=("kind", "source"), across=Across.MAX,
)  # fmt: skip
SOURCE_DURATION = Metric(
    "vllm_watch_source_duration_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "Duration of the last read of this source.",
    labels=("kind", "source"),
    across=Across.MAX,
)
SOURCE_ERRORS = Metric(
    "vllm_watch_source_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Failed reads of a source, by reason.",
    labels=("kind", "reason", "source"),
)
SIDECAR_INFO = Metric(
    "vllm_watch_sidecar_info", Kind.INFO, Unit.NONE, "Release of the sidecar.", labels=("version",), across=Across.MAX
)
SIDECAR_START = Metric(
    "vllm_watch_sidecar_start_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Start time of the sidecar.",
    labels=(),
    across=Across.MAX,
)
TASKS = Metric(
    "vllm_watch_sidecar_tasks",
    Kind.GAUGE,
    Unit.COUNT,
    "Tasks of the sidecar's event loop: one per source, some for its listener and current requests. Constant over"
    " time.",
    labels=(),
    across=Across.MAX,
)
LISTENER_REJECTED = Metric(
    "vllm_watch_sidecar_turned_away_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Requests and connections rejected by the sidecar's listener before they were handled, by reason: login (missing"
    " or wrong credentials), logins_waiting (too many password checks queued), slow_head (request head timeout),"
    " handshake (TLS handshake failed or timed out), gave_way (idle connection closed to make room), full (connection"
    " limit), pipelined (too much pipelined data); rejected by the HTTP parser: head_too_large (431),"
    " bad_request_line, bad_framing (400).",
    labels=("reason",),
)
SOURCES = (
    SOURCE_UP,
    SOURCE_LAST_SUCCESS,
    SOURCE_AGE,
    SOURCE_DURATION,
    SOURCE_ERRORS,
    SIDECAR_INFO,
    SIDECAR_START,
    TASKS,
    LISTENER_REJECTED,
)

# The embedded lab.
LAB_PROCESS_UP = Metric(
    "vllm_watch_lab_process_up",
    Kind.GAUGE,
    Unit.FLAG,
    "1 while this lab process runs and responds.",
    labels=("process",),
    across=Across.MIN,
)
LAB_PROCESS_RUNNING = Metric(
    "vllm_watch_lab_process_running",
    Kind.GAUGE,
    Unit.FLAG,
    "1 while this lab process is alive, responding or not.",
    labels=("process",),
    across=Across.MIN,
)
LAB = (LAB_PROCESS_UP, LAB_PROCESS_RUNNING)

SIDECAR: tuple[Metric, ...] = (
    *REQUEST_TRAFFIC,
    *GROUPED,
    *REQUEST_LOG,
    *ENGINES,
    *RECONCILED,
    *GOLDEN,
    *ATTRIBUTED,
    *COSTS,
    *TUNING,
    *SPANS,
    *SOURCES,
)
