"""The series that vllm-watch adds: what the sidecar joins, and how well each of its sources is doing."""

from __future__ import annotations

from exporters.catalogue.attributed import ATTRIBUTED
from exporters.catalogue.metric import Across, Kind, Metric, Unit
from exporters.catalogue.reconciled import RECONCILED

# Requests, from the log. Labels: the served model and the team, bounded.
_WHO = ("model_name", "team")
REQUESTS = Metric(
    "vllm_watch_requests_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests that ended, by outcome: ok, client_abort, rejected, upstream_error, timeout; unknown where the log does"
    " not say.",
    labels=("model_name", "outcome", "team"),
    notes=("Client hang-ups are counted here; vLLM's own request_success never shows them.",),
)
FAILED = ('outcome=~"upstream_error|timeout"',)  # a refusal is policy, and a client that hung up is no failure of ours
REASONS = Metric(
    "vllm_watch_request_reasons_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests that did not end well, by the reason in the record; at most 40 different reasons, the rest is counted as"
    " __other__.",
    labels=("model_name", "outcome", "reason", "team"),
)
FINISHES = Metric(
    "vllm_watch_request_finishes_total", Kind.COUNTER, Unit.REQUESTS,
    "Requests by finish reason: stop, length, abort, error, rejected, other.",
    labels=("finish_reason", "model_name", "team"),
)  # fmt: skip
TOKENS = Metric(
    "vllm_watch_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Tokens by kind: prompt, cached (part of prompt), completion; from the engine's usage.",
    labels=("model_name", "team", "type"),
    notes=(
        (
            "Only requests whose usage arrived; a hang-up before the last chunk leaves none: see"
            " vllm_watch_estimated_tokens_total."
        ),
    ),
)
ESTIMATED_TOKENS = Metric(
    "vllm_watch_estimated_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Estimated tokens of requests whose usage never came, such as streams that the client left, by type: prompt,"
    " completion.",
    labels=("model_name", "team", "type"),
    notes=(
        (
            "By the gateway: the prompt from its bytes, the output from the content events seen. Never part of"
            " vllm_watch_tokens_total."
        ),
    ),
)
TTFT = Metric(
    "vllm_watch_ttft_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time to first token as the client saw it: gateway queue, engine queue and prefill together. Streams only.",
    labels=_WHO,
    native=True,
)
TPOT = Metric(
    "vllm_watch_tpot_seconds", Kind.HISTOGRAM, Unit.SECONDS,
    "Mean time per output token after the first, one value per streamed request.", labels=_WHO, native=True,
)  # fmt: skip
E2E = Metric(
    "vllm_watch_e2e_seconds", Kind.HISTOGRAM, Unit.SECONDS,
    "Time from accepted to ended, as the gateway saw it.", labels=_WHO, native=True,
)  # fmt: skip
QUEUE = Metric(
    "vllm_watch_queue_seconds", Kind.HISTOGRAM, Unit.SECONDS,
    "Time a request waited in the gateway before it was sent to an engine.", labels=_WHO, native=True,
)  # fmt: skip
ENGINE_QUEUE = Metric(
    "vllm_watch_engine_queue_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time a request waited in the engine, as the engine told the client.",
    labels=_WHO,
    native=True,
    needs="--enable-per-request-metrics",
)
CACHE_LOOKUPS = Metric(
    "vllm_watch_cache_lookups_total", Kind.COUNTER, Unit.REQUESTS,
    "Requests whose record says whether the prefix cache helped, by result: hit, miss.",
    labels=("model_name", "result", "team"), needs="--enable-prompt-tokens-details",
)  # fmt: skip
TTFT_OVERHEAD = Metric(
    "vllm_watch_ttft_overhead_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "What the way to the engine and back adds to the time to first token: the client's figure less what the request"
    " took in the engine, its queue and from there to the first token, request by request.",
    labels=_WHO,
    native=True,
    needs="--enable-per-request-metrics",
    notes=("Never a difference of two quantiles: each request is joined with what the engine said of it.",),
)
TTFT_NEGATIVE = Metric(
    "vllm_watch_ttft_overhead_negative_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests whose time to first token was shorter at the client than in the engine: their clocks or definitions"
    " differ.",
    labels=_WHO,
    needs="--enable-per-request-metrics",
)
REQUEST_TRAFFIC = (
    REQUESTS, REASONS, FINISHES, TOKENS, ESTIMATED_TOKENS, TTFT, TPOT, E2E, QUEUE, ENGINE_QUEUE, CACHE_LOOKUPS,
    TTFT_OVERHEAD, TTFT_NEGATIVE,
)  # fmt: skip

# a bucket carries the trace of the last request in it, as an exemplar
TRACED = (TTFT, TPOT, E2E, QUEUE, ENGINE_QUEUE, TTFT_OVERHEAD)

# The log itself.
LOG_LINES = Metric(
    "vllm_watch_log_lines_total", Kind.COUNTER, Unit.COUNT, "Lines read from the request logs and counted.", labels=()
)
LOG_BAD_LINES = Metric(
    "vllm_watch_log_bad_lines_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Lines that were no request record, by reason: json, type, range, size, long, torn (a writer died in the middle of"
    " it). The sidecar's own log says what is wrong, never the line.",
    labels=("reason",),
)
LOG_UNTIMED = Metric(
    "vllm_watch_log_untimed_lines_total", Kind.COUNTER, Unit.COUNT,
    "Lines without a time of their own; the time they were read is used instead.", labels=(),
)  # fmt: skip
LOG_LAG = Metric(
    "vllm_watch_log_lag_seconds", Kind.GAUGE, Unit.SECONDS,
    "How long after its request ended the newest record was counted.", labels=("path",), across=Across.MAX,
)  # fmt: skip
LOG_BYTES_BEHIND = Metric(
    "vllm_watch_log_unread_bytes",
    Kind.GAUGE,
    Unit.BYTES,
    "Bytes written to a request log and not read yet.",
    labels=("path",),
)
LOG_ROTATIONS = Metric(
    "vllm_watch_log_rotations_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Times a request log was replaced or cut under the reader.",
    labels=("path",),
)
TEAMS = Metric("vllm_watch_teams", Kind.GAUGE, Unit.COUNT, "Teams with series of their own.", labels=())
TEAMS_OVERFLOW = Metric(
    "vllm_watch_teams_overflow_total", Kind.COUNTER, Unit.REQUESTS,
    "Requests counted under __other__ because their team came after the table was full.", labels=(),
)  # fmt: skip
MODELS_OVERFLOW = Metric(
    "vllm_watch_models_overflow_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests counted under model __other__ because their model came after the table was full, or was never served with"
    " success.",
    labels=(),
)
LOG_DUPLICATES = Metric(
    "vllm_watch_log_duplicate_lines_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Lines whose request was counted before, as when a log is shipped twice; told by request_id and span_id.",
    labels=(),
)
LOG_AHEAD = Metric(
    "vllm_watch_log_ahead_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Readings whose newest record ended more than a second in the future, by our clock: the lag is then shown as 0.",
    labels=(),
)
LOG_FAULTS = Metric(
    "vllm_watch_log_file_faults_total",
    Kind.COUNTER,
    Unit.COUNT,
    "What happened to a request log, by reason: long (a line beyond 1 MiB, left out), nul (NUL bytes, left out), torn"
    " (a last line without its end), cut (cut with lines unread and no copy found), gone (not there any more at a"
    " start), reread (changed before the place where reading stood; lines may come again, and are known by their ids),"
    " packed (a compressed file that is damaged, ends early or has a format that is not read; its lines that were not"
    " read yet are lost), unreadable (a rotated file).",
    labels=("path", "reason"),
)
CHECKPOINT_UP = Metric(
    "vllm_watch_checkpoint_up",
    Kind.GAUGE,
    Unit.FLAG,
    "1 when what the page shows of the log is safe on disk; 0 while it cannot be written: the page then keeps what was"
    " written last.",
    labels=(),
    across=Across.MIN,
    needs=(_STATE := "`state` in the sidecar's configuration"),
)
CHECKPOINT_BYTES = Metric(
    "vllm_watch_checkpoint_bytes", Kind.GAUGE, Unit.BYTES, "Size of the file of state.", labels=(), needs=_STATE
)
CHECKPOINT_COMMITS = Metric(
    "vllm_watch_checkpoint_commits_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Times the state was written to disk.",
    labels=(),
    needs=_STATE,
)
REQUEST_LOG = (
    LOG_LINES, LOG_BAD_LINES, LOG_DUPLICATES, LOG_UNTIMED, LOG_AHEAD, LOG_FAULTS, LOG_LAG, LOG_BYTES_BEHIND,
    LOG_ROTATIONS,
    TEAMS, TEAMS_OVERFLOW, MODELS_OVERFLOW, CHECKPOINT_UP, CHECKPOINT_BYTES, CHECKPOINT_COMMITS,
)  # fmt: skip

# What vLLM says only in labels, as numbers, and what its restarts hide.
ENGINE_INFO = Metric(
    "vllm_watch_engine_info",
    Kind.INFO,
    Unit.NONE,
    "The engine behind a scrape: version, cache dtype, whether prefixes are cached.",
    labels=("cache_dtype", "enable_prefix_caching", "upstream", "version"),
    across=Across.MAX,
)
KV_BLOCKS = Metric(
    "vllm_watch_kv_blocks",
    Kind.GAUGE,
    Unit.BLOCKS,
    "KV-cache blocks of an engine.",
    labels=("engine", "model_name", "upstream"),
)
KV_BLOCK_SIZE = Metric(
    "vllm_watch_kv_block_size_tokens", Kind.GAUGE, Unit.TOKENS, "Tokens that one KV-cache block holds.",
    labels=("engine", "model_name", "upstream"), across=Across.MAX,
)  # fmt: skip
KV_CAPACITY = Metric(
    "vllm_watch_kv_capacity_tokens", Kind.GAUGE, Unit.TOKENS, "Tokens that an engine's KV cache holds.",
    labels=("engine", "model_name", "upstream"),
    notes=("The engine's own kv_cache_size_tokens where it says so (0.24 and later), else blocks x block size.",),
)  # fmt: skip
ENGINE_RESTARTS = Metric(
    "vllm_watch_engine_restarts_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Restarts of an engine seen by the sidecar: a newer process start time, or a counter that fell.",
    labels=("upstream",),
)
ENGINE_CHANGES = Metric(
    "vllm_watch_engine_config_changes_total", Kind.COUNTER, Unit.COUNT,
    "Changes of an engine's version or cache configuration between two scrapes.", labels=("upstream",),
)  # fmt: skip
ENGINE_UNKNOWN_FAMILIES = Metric(
    "vllm_watch_engine_unknown_families",
    Kind.GAUGE,
    Unit.COUNT,
    "vllm: families on the engine's page that this release of vllm-watch does not know.",
    labels=("upstream",),
    across=Across.MAX,
)
ENGINES = (ENGINE_INFO, KV_BLOCKS, KV_BLOCK_SIZE, KV_CAPACITY, ENGINE_RESTARTS, ENGINE_CHANGES, ENGINE_UNKNOWN_FAMILIES)

# What the cards cost, as far as the operator has said a price.
_PRICED = "`prices` in the sidecar's configuration"
GPU_COST = Metric(
    "vllm_watch_gpu_cost_per_hour",
    Kind.GAUGE,
    Unit.CURRENCY,
    "What the cards of this host cost an hour: cards seen x price of a GPU hour.",
    labels=("currency",),
    needs=_PRICED,
)
COST_BUDGET = Metric(
    "vllm_watch_cost_budget_per_1k_tokens",
    Kind.GAUGE,
    Unit.CURRENCY,
    "What a thousand tokens, of prompts and answers together, may cost.",
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
    "When the newest event of a kind happened.",
    labels=("kind",),
    across=Across.MAX,
)
EVENTS = Metric(
    "vllm_watch_tuning_events_total", Kind.COUNTER, Unit.COUNT, "Events on record, by kind.", labels=("kind",)
)
TUNING = (EVENT_TIME, EVENTS)

# Spans, one for each record that can be one: sent + dropped + left out + waiting = records since the start.
_TRACING = "`otlp` in the sidecar's configuration"
SPANS_SENT = Metric(
    "vllm_watch_spans_sent_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Spans of requests that the collector took.",
    labels=(),
    needs=_TRACING,
)
SPANS_DROPPED = Metric(
    "vllm_watch_spans_dropped_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Spans of requests that were lost, by reason: queue_full (more than can be sent), timeout and unavailable (the"
    " queue was full while the collector did not answer, or could not take them), refused (by the collector, for good),"
    " defect (of ours).",
    labels=("reason",),
    needs=_TRACING,
)
SPANS_LEFT_OUT = Metric(
    "vllm_watch_spans_left_out_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Records that were to have no span, by reason: sampled (outside the share that is sent), history (ended before the"
    " sidecar started), incomplete (no ids or no times, as in logs of other gateways).",
    labels=("reason",),
    needs=_TRACING,
)
SPANS_WAITING = Metric(
    "vllm_watch_spans_waiting",
    Kind.GAUGE,
    Unit.ITEMS,
    "Spans of requests that wait to be sent or are on their way.",
    labels=(),
    needs=_TRACING,
)
SPANS = (SPANS_SENT, SPANS_DROPPED, SPANS_LEFT_OUT, SPANS_WAITING)

# How each source of the sidecar is doing.
SOURCE_UP = Metric(
    "vllm_watch_source_up",
    Kind.GAUGE,
    Unit.FLAG,
    "1 when the last reading of this source succeeded.",
    labels=("kind", "source"),
    across=Across.MIN,
)
SOURCE_LAST_SUCCESS = Metric(
    "vllm_watch_source_last_success_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "When this source was last read with success; absent until the first time.",
    labels=("kind", "source"),
    across=Across.MIN,
)
SOURCE_AGE = Metric(
    "vllm_watch_source_age_seconds", Kind.GAUGE, Unit.SECONDS, "Age of what the page says about this source.",
    labels=("kind", "source"), across=Across.MAX,
)  # fmt: skip
SOURCE_DURATION = Metric(
    "vllm_watch_source_duration_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "How long the last reading took.",
    labels=("kind", "source"),
    across=Across.MAX,
)
SOURCE_ERRORS = Metric(
    "vllm_watch_source_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Failed readings of a source, by reason.",
    labels=("kind", "reason", "source"),
)
SIDECAR_INFO = Metric(
    "vllm_watch_sidecar_info",
    Kind.INFO,
    Unit.NONE,
    "This sidecar's own release.",
    labels=("version",),
    across=Across.MAX,
)
SIDECAR_START = Metric(
    "vllm_watch_sidecar_start_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "When this sidecar started.",
    labels=(),
    across=Across.MAX,
)
TASKS = Metric(
    "vllm_watch_sidecar_tasks",
    Kind.GAUGE,
    Unit.COUNT,
    "Tasks of the sidecar's event loop: one for each source, some for its listener and for who asks at the moment. It"
    " does not grow with time.",
    labels=(),
    across=Across.MAX,
)
TURNED_AWAY = Metric(
    "vllm_watch_sidecar_turned_away_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Requests and connections that the sidecar's listener turned away before anybody else looked at them, by reason:"
    " login (none that is known), logins_waiting (too many unknown ones wait to be checked), slow_head (a head that did"
    " not come in time), handshake (of TLS, failed or not in time), gave_way (cut to make room: idle, or without a"
    " request yet), full (no room), pipelined (more requests or bytes behind a running request than a connection may"
    " have); what the HTTP parser refused: head_too_large (431), bad_request_line, bad_framing (400).",
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
    TURNED_AWAY,
)

# The embedded lab.
LAB_PROCESS_UP = Metric(
    "vllm_watch_lab_process_up",
    Kind.GAUGE,
    Unit.FLAG,
    "1 while this process of the lab runs and answers.",
    labels=("process",),
    across=Across.MIN,
)
LAB_PROCESS_RUNNING = Metric(
    "vllm_watch_lab_process_running",
    Kind.GAUGE,
    Unit.FLAG,
    "1 while this process of the lab is alive, whether or not it answers.",
    labels=("process",),
    across=Across.MIN,
)
LAB = (LAB_PROCESS_UP, LAB_PROCESS_RUNNING)

SIDECAR: tuple[Metric, ...] = (
    *REQUEST_TRAFFIC,
    *REQUEST_LOG,
    *ENGINES,
    *RECONCILED,
    *ATTRIBUTED,
    *COSTS,
    *TUNING,
    *SPANS,
    *SOURCES,
)
