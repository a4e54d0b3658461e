"""Series of golden-prompt checks, which the sidecar reads from the result file of `vllm-watch golden check`."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_RUN = "`golden` in the sidecar's configuration, and `vllm-watch golden check --result`"
_EACH = ("address", "model_name")

GOLDEN_VERDICT = Metric(
    "vllm_watch_golden_verdict",
    Kind.GAUGE,
    Unit.FLAG,
    "1 for the verdict of an engine's last golden check, and its cause: same (none, noise), different (release,"
    " configuration), wrong (tokenizer, template, not_finite, repetition, dtype, model, numeric, decode).",
    labels=(*_EACH, "verdict", "cause"),
    across=Across.MAX,
    needs=_RUN,
)
GOLDEN_DIFFERENCE = Metric(
    "vllm_watch_golden_max_difference_nats",
    Kind.GAUGE,
    Unit.NONE,
    "Largest absolute difference of a prompt token's log-probability from the baseline in the last check, in nats;"
    " absent where nothing could be compared.",
    labels=_EACH,
    across=Across.MAX,
    needs=_RUN,
)
GOLDEN_CHECKED = Metric(
    "vllm_watch_golden_check_timestamp_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Time of the last complete golden check of an engine; its age is the time since.",
    labels=_EACH,
    across=Across.MIN,
    needs=_RUN,
)
GOLDEN_INTERVAL = Metric(
    "vllm_watch_golden_check_interval_seconds",
    Kind.GAUGE,
    Unit.SECONDS,
    "Interval of scheduled golden checks of an engine; absent for checks on demand.",
    labels=_EACH,
    across=Across.MAX,
    needs=_RUN,
)
GOLDEN_TOKENS = Metric(
    "vllm_watch_golden_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt and completion tokens that golden checks of an engine used.",
    labels=_EACH,
    needs=_RUN,
)

GOLDEN: tuple[Metric, ...] = (GOLDEN_VERDICT, GOLDEN_DIFFERENCE, GOLDEN_CHECKED, GOLDEN_INTERVAL, GOLDEN_TOKENS)
