"""The series of the reconciliation: what the engines finished against what the request logs hold, per model, to the
last token.

Law: logged + missing_in_log - extra_in_log + open = engine, for each kind, at every moment. Kinds: requests, prompt and
completion (tokens)."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_KINDS = "Kinds: requests, and the tokens of their prompt and completion."
_BOTH = "`requests_log` and `engines` in the sidecar's configuration"
_EACH = ("kind", "model_name")

LOGGED = Metric(
    "vllm_watch_reconcile_logged_total",
    Kind.COUNTER,
    Unit.COUNT,
    "What the request logs hold of finished work, counted as an engine counts it (each of n, each prompt), since the"
    " first look at the engine.",
    labels=_EACH,
    needs=_BOTH,
    notes=(_KINDS,),
)
ENGINE = Metric(
    "vllm_watch_reconcile_engine_total", Kind.COUNTER, Unit.COUNT,
    "What the engines of a model finished since the first look at them, restarts bridged.", labels=_EACH, needs=_BOTH,
    notes=(_KINDS, "All three step when a request finishes, as a log line does; hang-ups and refusals are in neither."),
)  # fmt: skip
MISSING_IN_LOG = Metric(
    "vllm_watch_missing_in_log_total",
    Kind.COUNTER,
    Unit.COUNT,
    "What an engine finished and no log shows, once that is sure. Causes: no_usage (tokens of records without usage),"
    " unknown (traffic beside the gateway, lost lines).",
    labels=("cause", *_EACH),
    needs=_BOTH,
    notes=(_KINDS,),
)
EXTRA_IN_LOG = Metric(
    "vllm_watch_extra_in_log_total",
    Kind.COUNTER,
    Unit.COUNT,
    "What the logs show and no engine has counted, once that is sure. Causes: restart (finished after the last look at"
    " an engine that then restarted), start (finished before the first look, logged after it), unknown (lines written"
    " twice).",
    labels=("cause", *_EACH),
    needs=_BOTH,
    notes=(_KINDS,),
)
OPEN = Metric(
    "vllm_watch_reconcile_open",
    Kind.GAUGE,
    Unit.COUNT,
    "Engine less log, as far as nobody can tell yet what is on its way and what is missing.",
    labels=_EACH,
    needs=_BOTH,
    notes=(
        _KINDS,
        "Above 0: finished and not logged yet. Below 0 for long while all engines answer: soon extra in the log.",
    ),
)
SETTLED = Metric(
    "vllm_watch_reconcile_settled_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "The newest look at the engines that has been compared with all that the logs could still say about it; absent"
    " until the first time.",
    labels=("model_name",),
    across=Across.MIN,
    needs=_BOTH,
)
NO_USAGE = Metric(
    "vllm_watch_reconcile_no_usage_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Finished requests in the logs without usage since the first look: their tokens are not known, and are booked as"
    " missing in the log with cause no_usage.",
    labels=("model_name",),
    needs=_BOTH,
)
UNFINISHED = Metric(
    "vllm_watch_engine_unfinished_tokens",
    Kind.GAUGE,
    Unit.TOKENS,
    "Tokens worked on and not part of a finished request, by type (prompt, completion): in flight, or aborted since the"
    " engine was last idle.",
    labels=("model_name", "type"),
)
ABORTED = Metric(
    "vllm_watch_aborted_tokens_total", Kind.COUNTER, Unit.TOKENS,
    "Tokens worked on for requests that were aborted, by type (prompt, completion); told when the engine is next idle.",
    labels=("model_name", "type"),
    notes=("vLLM's per-request series never show them, its token totals do.",),
)  # fmt: skip

RECONCILED = (LOGGED, ENGINE, MISSING_IN_LOG, EXTRA_IN_LOG, OPEN, SETTLED, NO_USAGE, UNFINISHED, ABORTED)
