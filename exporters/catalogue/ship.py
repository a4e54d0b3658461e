"""Series of `vllm-watch ship`: what it put into the data set, what waits, and whether the totals agree."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_RUN = "`vllm-watch ship run`"
_CHECKED = "`prometheus` in the configuration of `vllm-watch ship run`"

SHIPPED_REQUESTS = Metric(
    "vllm_watch_ship_requests_total", Kind.COUNTER, Unit.REQUESTS,
    "Requests in committed segments, by model partition: rare models are `__other__`.", labels=("model_name",),
    needs=_RUN,
)  # fmt: skip
SHIPPED_TOKENS = Metric(
    "vllm_watch_ship_tokens_total", Kind.COUNTER, Unit.TOKENS,
    "Tokens of these requests as engines reported them; type: prompt, cached, completion.",
    labels=("model_name", "type"), needs=_RUN,
)  # fmt: skip
SHIP_UNSEALED = Metric(
    "vllm_watch_ship_unsealed_requests", Kind.GAUGE, Unit.REQUESTS,
    "Requests read and not yet in a segment; after a restart they are read again.", labels=(), needs=_RUN,
)  # fmt: skip
SHIP_WAITING = Metric(
    "vllm_watch_ship_waiting_bytes", Kind.GAUGE, Unit.BYTES,
    "Committed segments that the store or their manifest does not have yet.", labels=(), needs=_RUN,
)  # fmt: skip
SHIP_UNREAD = Metric(
    "vllm_watch_ship_unread_bytes", Kind.GAUGE, Unit.BYTES, "Bytes of the request log not yet read by the shipper.",
    labels=("path",), needs=_RUN,
)  # fmt: skip
SHIP_UP = Metric(
    "vllm_watch_ship_up", Kind.GAUGE, Unit.FLAG,
    "1 while the last write succeeded; kind: store (segments and manifests), disk (state and spool).",
    labels=("kind",), across=Across.MIN, needs=_RUN,
)  # fmt: skip
SHIP_BAD_LINES = Metric(
    "vllm_watch_ship_bad_lines_total", Kind.COUNTER, Unit.COUNT,
    "Lines that the shipper left out because they are no request record, by reason as for the sidecar.",
    labels=("reason",), needs=_RUN,
)  # fmt: skip
SHIP_DUPLICATES = Metric(
    "vllm_watch_ship_duplicate_lines_total", Kind.COUNTER, Unit.COUNT,
    "Lines that the shipper left out because their request is in a segment already, as for the sidecar.",
    labels=("path",), needs=_RUN,
)  # fmt: skip
SHIP_UNEXPLAINED = Metric(
    "vllm_watch_ship_unexplained", Kind.GAUGE, Unit.COUNT,
    "Largest difference between segments, sidecar and engines on the last complete day that no known cause explains.",
    labels=("kind", "model_name"), across=Across.MAX, needs=_CHECKED,
    notes=("kind: requests, prompt, cached and completion (tokens). `vllm-watch ship verify` shows the causes.",),
)  # fmt: skip
SHIP_VERIFIED = Metric(
    "vllm_watch_ship_verified_timestamp_seconds", Kind.GAUGE, Unit.TIMESTAMP,
    "Time of the last comparison of a complete day.", labels=(), across=Across.MIN, needs=_CHECKED,
)  # fmt: skip

SHIP: tuple[Metric, ...] = (
    SHIPPED_REQUESTS,
    SHIPPED_TOKENS,
    SHIP_UNSEALED,
    SHIP_WAITING,
    SHIP_UNREAD,
    SHIP_UP,
    SHIP_BAD_LINES,
    SHIP_DUPLICATES,
    SHIP_UNEXPLAINED,
    SHIP_VERIFIED,
)
