"""Made requests with every kind of end, and a data set of them as `ship` lays it out."""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from exporters.dataset import layout
from exporters.dataset.objects import FolderStore
from exporters.dataset.parquet import SegmentMaker
from exporters.dataset.segment_buffer import SegmentBuffer
from exporters.requests.record import RequestRecord, ended_at, timestamp

START_S = 1_764_000_000.0  # 2025-11-24T16:00:00Z
REASONS = {
    "client_abort": ("client_hangup", "client_stalled"),
    "rejected": ("queue_full", "limit"),
    "upstream_error": ("connect", None),
    "timeout": ("ttft_timeout",),
}


def made_requests(count: int, seed: int = 1, start_s: float = START_S, step_s: float = 0.5) -> list[RequestRecord]:
    """Return requests that ended one after the other: finished, aborted, rejected, retried, with and without usage."""
    rng = random.Random(seed)
    return [_made(rng, f"r{seed}-{number}", start_s + number * step_s) for number in range(count)]


def _made(rng: random.Random, request_id: str, ended_s: float) -> RequestRecord:
    outcome = rng.choice(("ok", "ok", "ok", "ok", "client_abort", "rejected", "upstream_error", "timeout", None))
    e2e, streamed = round(rng.uniform(1, 5000), 3), rng.random() < 0.7
    usage = outcome in ("ok", None) or rng.random() < 0.3
    return RequestRecord(
        request_id=request_id,
        ts=timestamp(ended_s),
        span_id=f"{rng.getrandbits(64):016x}",
        team=rng.choice((None, "chat", "batch", "search")),
        model=rng.choice(("large", "small", None)),
        upstream=rng.choice(("e1", "e2", None)),
        variant=rng.choice((None, "a", "b")),
        route=rng.choice((None, "/v1/chat/completions", "/v1/models")),
        attempt=rng.choice((None, 1, 2)),
        tried=rng.choice((None, None, None, "e3:connect")),
        stream=streamed,
        n=rng.choice((None, None, 2)),
        prompts=rng.choice((None, None, 3)),
        outcome=outcome,
        reason=rng.choice(REASONS[outcome]) if outcome in REASONS else None,
        finish_reason=rng.choice((None, "stop", "length", "abort", "error")),
        queue_ms=rng.choice((None, 0.0, 5.5, 200.0)),
        e2e_ms=rng.choice((None, e2e, e2e, e2e)),
        ttft_ms=round(rng.uniform(0, e2e), 3) if streamed else None,
        tpot_ms=rng.choice((None, 10.0, 33.3)) if streamed else None,
        engine_queue_ms=rng.choice((None, 5.0, 500.0)),
        engine_ttft_ms=rng.choice((None, 50.0)),
        prompt_tokens=(prompt := rng.choice((0, 100, 3000, None))) if usage else None,
        cached_tokens=rng.choice((None, 0, 16)) if usage and prompt else None,
        completion_tokens=rng.choice((1, 40, 500)) if usage and rng.random() < 0.9 else None,
        est_prompt_tokens=90,
        est_completion_tokens=rng.choice((None, 7)),
        client_wait_ms=rng.choice((None, 0.0, 0.3 * e2e)),
        unreadable=rng.choice((None, None, "json", "usage")),
    )


def make_dataset(
    folder: Path, records: Sequence[RequestRecord], cluster: str = "test", writer: str = "w", parts: int = 2
) -> list[layout.LogSegment]:
    """Add records to a data set, as `parts` segments for each day and model; return the segments."""
    store = FolderStore(folder)
    claim = layout.WriterClaim(
        cluster=cluster, writer=writer, owner="test", session="test", commit=0, host="test", since=timestamp(START_S)
    )
    store.put(layout.claim_key(cluster, writer), layout.encode(claim))
    groups = defaultdict[tuple[str, str | None, int], list[RequestRecord]](list)
    for number, record in enumerate(records):
        groups[layout.day_of(ended_at(record)), record.model, number * parts // len(records)].append(record)
    days = defaultdict[str, list[layout.LogSegment]](list)
    for (day, _, _), rows in groups.items():
        days[day].append(_segment(store, cluster, writer, rows))
    for day, added in days.items():
        key = layout.manifest_key(day, cluster, writer)
        found = store.get(key)
        before = layout.read_manifest(found[0], key).segments if found else ()
        made = layout.Manifest(day=day, cluster=cluster, writer=writer, sequence=1, segments=(*before, *added))
        store.put(key, layout.encode(made))
    return [segment for added in days.values() for segment in added]


def _segment(store: FolderStore, cluster: str, writer: str, rows: Sequence[RequestRecord]) -> layout.LogSegment:
    with tempfile.TemporaryDirectory() as folder:
        buffer = SegmentBuffer()
        buffer.add(rows)
        (made,) = SegmentMaker(Path(folder), cluster, writer).seal(buffer)
        store.put(made.segment.key, made.path.read_bytes())
    return made.segment
