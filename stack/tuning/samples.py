"""Samples of a request log for comparisons of live traffic: what is kept of each record, within bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from exporters.requests.read import ReadReport, RecordReader, read_records
from exporters.requests.record import PROBE_TEAM, FieldMap, RequestRecord, ended_at

MOST_REQUESTS = 500_000  # kept in memory, about 350 bytes each


class RequestSample(NamedTuple):
    """The part of a record that a comparison needs.

    started_s: its end less its e2e_ms; its end where that is not said."""

    started_s: float
    ended_s: float
    model: str | None
    team: str | None
    variant: str | None
    upstream: str | None
    outcome: str | None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_ms: float | None = None
    engine_queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    unreadable: bool = False


@dataclass(slots=True)
class SampleLog:
    """Records in memory. untimed: records without ts; report: lines left out; outside: records of other times.
    first_s, last_s: of the whole log.

    share: of the records that are kept, drawn at random: 1 until there are too many."""

    samples: list[RequestSample] = field(default_factory=list)
    untimed: int = 0
    report: ReadReport = field(default_factory=ReadReport)
    outside: int = 0
    first_s: float = math.inf
    last_s: float = -math.inf
    share: float = 1.0


Span = tuple[float, float]


def collect_samples(
    records: Iterable[RequestRecord],
    spans: Sequence[Span] = (),
    *,
    most: int = MOST_REQUESTS,
    log: SampleLog | None = None,
    seed: int = 0,
) -> SampleLog:
    """Return the records that ended within one of the spans (without spans all), added to `log`.

    Beyond `most` every second one is dropped, by lot."""
    log, rng = log or SampleLog(), Random(seed)  # noqa: S311 (nothing secret)
    names: dict[str | None, str | None] = {}
    for record in records:
        ended_s = ended_at(record)
        if ended_s is None:
            log.untimed += 1
            continue
        log.first_s, log.last_s = min(log.first_s, ended_s), max(log.last_s, ended_s)
        if spans and not any(start <= ended_s < end for start, end in spans):
            log.outside += 1
        elif log.share == 1.0 or rng.random() < log.share:
            log.samples.append(sample_of(record, ended_s, names))
            if len(log.samples) > most:
                log.samples = [each for each in log.samples if rng.random() < 0.5]
                log.share /= 2
    return log


def sample_of(record: RequestRecord, ended_s: float, names: dict[str | None, str | None]) -> RequestSample:
    """Return the sample of a record. names: texts of earlier records."""
    model, team, variant, upstream, outcome = (  # one text for each name, however many records have it
        names.setdefault(name, name)
        for name in (record.model, record.team, record.variant, record.upstream, record.outcome)
    )
    return RequestSample(
        ended_s - (record.e2e_ms or 0.0) / 1000, ended_s, model, team, variant, upstream, outcome,
        record.prompt_tokens, record.cached_tokens, record.completion_tokens,
        record.queue_ms, record.engine_queue_ms, record.ttft_ms, record.tpot_ms, record.e2e_ms,
        record.unreadable is not None,
    )  # fmt: skip


def read_samples(
    paths: Iterable[Path],
    spans: Sequence[Span] = (),
    fields: FieldMap | None = None,
    most: int = MOST_REQUESTS,
    read: RecordReader | None = None,
) -> SampleLog:
    """Return the samples of request logs; lines left out are reported. read: source instead of the files.

    Raises OSError, and what `read` raises."""
    log = SampleLog()
    records = read(log.report) if read else read_records(paths, log.report, fields)
    return collect_samples((one for one in records if one.team != PROBE_TEAM), spans, most=most, log=log)
