"""Rows of request counters, as stored in the checkpoint, and their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

import msgspec

from exporters.catalogue import bounds, sidecar
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution, Exemplar, Sample
from exporters.native_histogram import BucketCounts

# The histograms of a row, their bounds, and the same bounds in the log's milliseconds.
_TIMES: tuple[tuple[Metric, tuple[float, ...]], ...] = (
    (sidecar.TTFT, bounds.TTFT_S),
    (sidecar.TPOT, bounds.OUR_TPOT_S),
    (sidecar.E2E, bounds.OUR_REQUEST_S),
    (sidecar.QUEUE, bounds.OUR_REQUEST_S),
    (sidecar.ENGINE_QUEUE, bounds.OUR_REQUEST_S),
    (sidecar.TTFT_OVERHEAD, bounds.TTFT_S),
)
TTFT, E2E, ENGINE_QUEUE, _OVERHEAD = 0, 2, 4, len(_TIMES) - 1
FIGURES = attrgetter(
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "queue_ms",
    "engine_queue_ms",
    "engine_ttft_ms",
)
MS = tuple(tuple(bound * 1000 for bound in limits) for _, limits in _TIMES)


class CounterRow(msgspec.Struct, array_like=True, frozen=True):
    """Counters of one model and team, as stored. None: no record had a value. Sums of times in milliseconds."""

    model: str
    team: str
    outcomes: dict[str, int]
    reasons: dict[str, dict[str, int]]
    finishes: dict[str, int]
    tokens: tuple[int | None, int | None, int | None]
    lookups: tuple[int | None, int | None]
    finished: tuple[int, int, int, int, int]
    counts: tuple[list[int], ...]
    sums_ms: tuple[float, ...]
    overhead_negative: int
    estimated: tuple[int | None, int | None] = (None, None)
    abandoned: tuple[int, int] = (0, 0)
    unreadable: dict[str, int] = {}
    finished_unreadable: int = 0


row_encoder = msgspec.msgpack.Encoder()
_row_decoder = msgspec.msgpack.Decoder(CounterRow)


def read_row(stored: bytes) -> CounterRow:
    """Decode a stored row. Raises msgspec.MsgspecError."""
    return _row_decoder.decode(stored)


def row_samples(
    row: CounterRow, exemplars: Sequence[Sequence[Exemplar | None]] = (), native: BucketCounts | None = None
) -> Iterator[Sample]:
    """Yield the samples of one model and team."""
    who = {"model_name": row.model, "team": row.team}
    return chain(_count_samples(row, who), _time_samples(row, who, exemplars, native))


def _count_samples(row: CounterRow, who: Mapping[str, str]) -> Iterator[Sample]:
    for outcome, count in row.outcomes.items():
        yield sidecar.REQUESTS, {"model_name": row.model, "outcome": outcome, "team": row.team}, count
    for outcome, reasons in row.reasons.items():
        for reason, count in reasons.items():
            yield (
                sidecar.REASONS,
                {"model_name": row.model, "outcome": outcome, "reason": reason, "team": row.team},
                count,
            )
    for finish, count in row.finishes.items():
        yield sidecar.FINISHES, {"finish_reason": finish, **who}, count
    for reason, count in row.unreadable.items():
        yield sidecar.UNREADABLE, {**who, "reason": reason}, count
    exact = (
        (sidecar.TOKENS, kind, tokens)
        for kind, tokens in zip(("prompt", "cached", "completion"), row.tokens, strict=True)
    )
    estimated = (
        (sidecar.ESTIMATED_TOKENS, kind, tokens)
        for kind, tokens in zip(("prompt", "completion"), row.estimated, strict=True)
    )
    for metric, kind, tokens in chain(exact, estimated):
        if tokens is not None:
            yield metric, {**who, "type": kind}, tokens
    for result, lookups in zip(("hit", "miss"), row.lookups, strict=True):
        if lookups is not None:
            yield sidecar.CACHE_LOOKUPS, {"model_name": row.model, "result": result, "team": row.team}, lookups


def _time_samples(
    row: CounterRow, who: Mapping[str, str], exemplars: Sequence[Sequence[Exemplar | None]], native: BucketCounts | None
) -> Iterator[Sample]:
    for at, (metric, limits) in enumerate(_TIMES):
        if any(row.counts[at]):
            buckets = native.snapshot(at) if native else None
            yield (
                metric,
                who,
                Distribution(
                    limits, row.counts[at], row.sums_ms[at] / 1000, exemplars[at] if exemplars else (), buckets
                ),
            )
    if row.overhead_negative or any(row.counts[_OVERHEAD]):
        yield sidecar.TTFT_NEGATIVE, who, row.overhead_negative
