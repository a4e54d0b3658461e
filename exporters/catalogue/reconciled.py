"""Reconciliation series: finished work in the engines compared with the request logs, per model and token.

Invariant: logged + missing_in_log - extra_in_log + open = engine, for each kind, at every moment. Kinds: requests,
prompt and completion (tokens)."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_KINDS = "Kinds: requests, and their prompt and completion tokens."
_BOTH = "`requests_log` and `engines` in the sidecar's configuration"
_EACH = ("kind", "model_name")

LOGGED = Metric(
    "vllm_watch_reconcile_logged_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Finished work in the request logs since the first engine scrape, counted as an engine counts it (each of n, each"
    " prompt).",
    labels=_EACH,
    needs=_BOTH,
    notes=(_KINDS,),
)
ENGINE = Metric(
    "vllm_watch_reconcile_engine_total", Kind.COUNTER, Unit.COUNT,
    "Finished work of the model's engines since their first scrape, continued over restarts.",
    labels=_EACH, needs=_BOTH,
    notes=(
        _KINDS,
        "All three increase when a request finishes, like the log; client disconnects and rejections are in neither.",
    ),
)  # fmt: skip
MISSING_IN_LOG = Metric(
    "vllm_watch_missing_in_log_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Work finished by an engine and missing in the logs, once certain. Causes: no_usage (tokens of records without"
    " usage), unreadable (requests that failed because the gateway could not read the answer), unknown (traffic that"
    " bypasses the gateway, such as golden checks without a probe log; lost lines).",
    labels=("cause", *_EACH),
    needs=_BOTH,
    notes=(_KINDS,),
)
EXTRA_IN_LOG = Metric(
    "vllm_watch_extra_in_log_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Work in the logs that no engine counted, once certain. Causes: restart (finished after the last scrape before an"
    " engine restart), start (finished before the first scrape, logged after it), unknown (duplicate lines).",
    labels=("cause", *_EACH),
    needs=_BOTH,
    notes=(_KINDS,),
)
OPEN = Metric(
    "vllm_watch_reconcile_open",
    Kind.GAUGE,
    Unit.COUNT,
    "Engine minus log, not yet classified as in flight or missing.",
    labels=_EACH,
    needs=_BOTH,
    notes=(
        _KINDS,
        "Above 0: finished, not logged yet. Below 0 for long while all engines respond: will become extra in the log.",
    ),
)
SETTLED = Metric(
    "vllm_watch_reconcile_settled_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Time of the newest engine scrape that is fully reconciled with the logs; absent until the first one.",
    labels=("model_name",),
    across=Across.MIN,
    needs=_BOTH,
)
NO_USAGE = Metric(
    "vllm_watch_reconcile_no_usage_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Finished requests without usage in the logs since the first scrape; their tokens count as missing in the log"
    " with cause no_usage.",
    labels=("model_name",),
    needs=_BOTH,
)
UNFINISHED = Metric(
    "vllm_watch_engine_unfinished_tokens",
    Kind.GAUGE,
    Unit.TOKENS,
    "Processed tokens of unfinished requests, by type (prompt, completion): in flight, or aborted since the engine"
    " was last idle.",
    labels=("model_name", "type"),
)
ABORTED = Metric(
    "vllm_watch_aborted_tokens_total", Kind.COUNTER, Unit.TOKENS,
    "Processed tokens of aborted requests, by type (prompt, completion); updated when the engine is next idle.",
    labels=("model_name", "type"),
    notes=("Not in vLLM's per-request series, but in its token totals.",),
)  # fmt: skip

RECONCILED = (LOGGED, ENGINE, MISSING_IN_LOG, EXTRA_IN_LOG, OPEN, SETTLED, NO_USAGE, UNFINISHED, ABORTED)
