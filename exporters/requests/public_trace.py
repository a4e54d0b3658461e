"""Public request traces as request records: Azure LLM inference and BurstGPT (CSV), Mooncake (JSONL).

Invariant: a row that is no request is counted and named by its line; memory is bounded by one block of lines and by the
distinct hash ids. A trace has arrivals and no durations, so `ts` is the arrival and `e2e_ms` is 0.
Sources: the README files of Azure/AzurePublicDataset, HPMLL/BurstGPT and kvcache-ai/Mooncake (FAST25-release)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from exporters.requests.duplicates import RecentRequests
from exporters.requests.read import ReadReport, read_blocks, read_records
from exporters.requests.record import BadLine, RequestRecord, timestamp, unix_seconds

BLOCK_TOKENS = 512  # of a hash id
_HEADER = re.compile(r"[\w .-]+(,[\w .-]+)+")


class TracedRequest(RequestRecord, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Request of a trace. hash_ids: one for each block of its prompt; an id stands for all tokens up to its end."""

    hash_ids: tuple[int, ...] | None = None


class TraceFormat(NamedTuple):
    """Columns of a format. seconds: of a value of the column `arrival`."""

    name: str
    seconds: Callable[[Any], float | None]
    arrival: str
    prompt: str
    output: str


_FORMATS = (
    TraceFormat("Azure LLM inference", unix_seconds, "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    TraceFormat("BurstGPT", float, "Timestamp", "Request tokens", "Response tokens"),
    TraceFormat("Mooncake", lambda ms: ms / 1000, "timestamp", "input_length", "output_length"),
)


def read_requests(paths: Iterable[Path], report: ReadReport) -> Iterator[RequestRecord]:
    """Yield the records of request logs, as `read_records` does, and of traces.

    Raises OSError, and ValueError for a file without any record that has the columns of no known trace."""
    window = RecentRequests()
    for path in paths:
        yield from _read(path, report, window)


def _read(path: Path, report: ReadReport, window: RecentRequests) -> Iterator[RequestRecord]:
    first = next((row for _, row in _rows(path, ReadReport())), {})
    for trace in _FORMATS:
        if first.keys() >= set(trace[2:]):
            yield from _requests(trace, _rows(path, report), report, path)
            return
    before = report.records + report.repeats
    yield from read_records([path], report, window=window)
    if first and "request_id" not in first and before == report.records + report.repeats:
        known = "; ".join(f"{trace.name} ({', '.join(trace[2:])})" for trace in _FORMATS)
        raise ValueError(
            f"{path}: no line is a request record, and its columns ({', '.join(first)[:200]}) are those of no known"
            f" trace; rename them to those of one: {known}"
        )


def _requests(
    trace: TraceFormat, rows: Iterable[tuple[int, dict[str, Any]]], report: ReadReport, path: Path
) -> Iterator[TracedRequest]:
    """Yield the requests of a trace. cached_tokens: of the leading blocks that an earlier request had, as in a prefix
    cache without limit; as in vLLM, the last token of a prompt is never cached."""
    cached = set[int]()
    for number, row in rows:
        if row.get(trace.arrival) == trace.arrival:  # the header
            continue
        try:
            request = _request(trace, f"{number}", row)
        except (LookupError, TypeError, ValueError, OverflowError, OSError):
            error = BadLine("type", f"{', '.join(trace[2:])} should be a time and two numbers")
            report.add(error, partial("{}:{}".format, path, number))
            continue
        report.records += 1
        if (ids := request.hash_ids) is not None:
            hit_tokens = BLOCK_TOKENS * sum(1 for _ in takewhile(cached.__contains__, ids))
            cached.update(ids)
            most = max(0, (request.prompt_tokens or 0) - 1)
            request = msgspec.structs.replace(request, cached_tokens=min(hit_tokens, most))
        yield request


def _request(trace: TraceFormat, name: str, row: dict[str, Any]) -> TracedRequest:
    fields = {
        "request_id": name,
        "ts": timestamp(trace.seconds(row[trace.arrival])),  # type: ignore[arg-type]  # None is a TypeError
        "model": row.get("Model"),
        "prompt_tokens": row[trace.prompt],
        "completion_tokens": row[trace.output],
        "e2e_ms": 0.0,
        "outcome": "ok",
        "hash_ids": row.get("hash_ids"),
    }
    return msgspec.convert(fields, TracedRequest, strict=False)


def _rows(path: Path, report: ReadReport) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each line; no values where it is neither JSON nor below a header."""
    header: list[str] = []
    for first, block in read_blocks(path, report):
        for number, line in enumerate(block.split(b"\n"), first):
            text = line.decode("utf-8-sig", "replace").strip()
            cells = text.split(",")
            header = header or (cells if _HEADER.fullmatch(text) else [])
            if text:
                yield number, _values(text) if text[0] == "{" else dict(zip(header, cells, strict=False))


def _values(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
