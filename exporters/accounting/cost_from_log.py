"""Usage and cost from request logs: GPU time by running requests."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from exporters.accounting.billing_period import BillingPeriod, PriceSegment, segments
from exporters.accounting.busy_hours import HOUR_S, sweep
from exporters.accounting.cost import (
    NO_PRICES,
    SourceTotals,
    TeamUse,
    Uses,
    add_api_cost,
    add_price_versions,
    new_uses,
    part_of,
)
from exporters.accounting.gpu_use import IDLE
from exporters.accounting.prices import Prices
from exporters.requests.bounded_names import UNKNOWN_MODEL
from exporters.requests.read import ReadReport, read_records
from exporters.requests.record import UNKNOWN_TEAM, FieldMap, RequestRecord, ended_at, estimated_tokens


@dataclass(slots=True)
class SegmentUse:
    """Use in one price segment.

    busy: seconds by model, and by team with aborted flag; tokens: by team and model. first_s, last_s: first start and
    last end of its requests, in unix seconds."""

    busy: defaultdict[str, defaultdict[tuple[str, bool], float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    tokens: Uses = field(default_factory=new_uses)
    first_s: float = float("inf")
    last_s: float = float("-inf")


class CostSource(Protocol):
    """Requests that cost is computed from."""

    @property
    def name(self) -> str:
        """Return where they are, for messages."""

    def covered(self) -> tuple[float, float, ReadReport]:
        """Return the first start, the last end and what was left out; without a time the start is infinite.

        Raises ValueError, OSError."""

    def uses(self, segments: Sequence[PriceSegment]) -> tuple[list[SegmentUse], int, ReadReport]:
        """Return the use of each segment, the number of requests without a time, and what was left out.

        Raises ValueError, OSError."""


@dataclass(slots=True)
class CostLog(SegmentUse):
    """Cost data of the records of request logs. spans: start, end, and team with aborted flag, by model and hour."""

    spans: defaultdict[tuple[str, int], list[tuple[float, float, tuple[str, bool]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    untimed: int = 0

    def add(self, record: RequestRecord, from_s: float, to_s: float) -> None:
        """Add a record that ran within the period.

        Rejected requests used nothing; aborted ones count for their team."""
        end_s = ended_at(record)
        if record.outcome == "rejected":
            return
        if end_s is None or record.e2e_ms is None:
            self.untimed += 1
            return
        start_s = end_s - max(0.0, record.e2e_ms - (record.queue_ms or 0.0)) / 1000
        if end_s <= from_s or start_s > to_s:
            return
        team, model = record.team or UNKNOWN_TEAM, record.model or UNKNOWN_MODEL
        broke_off = record.outcome not in ("ok", None)
        for hour in range(int(max(start_s, from_s) // HOUR_S), int(min(end_s, to_s) // HOUR_S) + 1):
            self.spans[model, hour].append((start_s, end_s, (team, broke_off)))
        if end_s <= to_s:
            est_prompt, est_completion = estimated_tokens(record)
            self.tokens[team, model].add(
                TeamUse(
                    prompt_tokens=float(record.prompt_tokens or 0),
                    cached_tokens=float(record.cached_tokens or 0),
                    completion_tokens=float(record.completion_tokens or 0),
                    est_prompt_tokens=float(est_prompt or 0),
                    est_completion_tokens=float(est_completion or 0),
                    unreadable_requests=float(record.unreadable is not None),
                )
            )
        self.first_s, self.last_s = min(self.first_s, start_s), max(self.last_s, end_s)

    def settle(self, segment: PriceSegment) -> None:
        """Replace the spans by their busy seconds."""
        for model, hour in list(self.spans):
            window = max(hour * HOUR_S, segment.from_s), min((hour + 1) * HOUR_S, segment.to_s)
            for who, seconds in sweep(self.spans.pop((model, hour)), window).items():
                self.busy[model][who] += seconds


@dataclass(frozen=True, slots=True)
class LogFiles:
    """Request logs as a CostSource. fields: names of their fields. Raises ValueError if a file is listed twice."""

    paths: Sequence[Path]
    fields: FieldMap | None = None

    def __post_init__(self) -> None:
        if len({path.resolve() for path in self.paths}) != len(self.paths):
            raise ValueError("--log lists a file twice; it would be counted twice")

    @property
    def name(self) -> str:
        return ", ".join(map(str, self.paths))

    def covered(self) -> tuple[float, float, ReadReport]:
        log, report = CostLog(), ReadReport()
        for record in read_records(self.paths, report, self.fields):
            log.add(record, float("-inf"), float("inf"))
            log.spans.clear()
        return log.first_s, log.last_s, report

    def uses(self, segments: Sequence[PriceSegment]) -> tuple[list[SegmentUse], int, ReadReport]:
        logs, outside, report = [CostLog() for _ in segments], CostLog(), ReadReport()
        edges = [segment.from_s for segment in segments]
        for record in read_records(self.paths, report, self.fields):
            end_s = ended_at(record)
            if end_s is None or record.e2e_ms is None:
                outside.add(record, segments[0].from_s, segments[-1].to_s)
                continue
            start_s = end_s - max(0.0, record.e2e_ms) / 1000
            for number in range(max(0, bisect_right(edges, start_s) - 1), bisect_right(edges, end_s)):
                logs[number].add(record, segments[number].from_s, segments[number].to_s)
        for log, segment in zip(logs, segments, strict=True):
            log.settle(segment)
        return [*logs], outside.untimed, report


def from_log(
    source: CostSource | Sequence[Path],
    period: BillingPeriod | None = None,
    prices: Prices | None = None,
    gpus: Mapping[str, float] | None = None,
    cluster: str = "",
) -> SourceTotals:
    """Return totals by running requests. source: files are request logs.

    gpus: number per model, "" for others; one by default. A model of gpus without a request is idle for the whole
    period. Without a period it is that of the log, without idle, because the log does not cover allocated time.
    Raises ValueError, OSError."""
    source = LogFiles(source) if isinstance(source, Sequence) else source
    name, with_idle = source.name, period is not None
    if period is None:
        first_s, last_s, report = source.covered()
        if first_s > last_s:
            raise ValueError("; ".join((f"{name} holds no request with a time (ts and e2e_ms)", *report.notes)))
        period = BillingPeriod(first_s, max(last_s, first_s + 0.001))
    cut = segments(period, prices)
    logs, untimed, report = source.uses(cut)
    if not any(log.busy for log in logs):
        absent_text = f"{name} holds no request with a time (ts and e2e_ms) in this period; name one in which it has"
        raise ValueError("; ".join((absent_text, *report.notes)))
    found = SourceTotals(name, period, method="request-time", known={"estimates", "unreadable"})
    found.lines, found.bad_lines = report.records + report.total, report.total
    count = {"": 1.0, **(gpus or {})}
    models = {model for log in logs for model in log.busy}
    absent = count.keys() - models - {""}
    for segment, log in zip(cut, logs, strict=True):
        uses = found.parts[part_of(segment, cluster)]
        busy = _add_spans(uses, log, count)
        for key, tokens in log.tokens.items():
            uses[key].add(tokens)
        for model in models | absent if with_idle else ():
            idle_s = max(0.0, segment.to_s - segment.from_s - busy[model])
            uses[IDLE, model].seconds += idle_s * count.get(model, count[""])
        if segment.prices:
            _add_cost(found, uses, segment.prices)
    add_price_versions(found, cut)
    found.notes += _log_notes(untimed, report, count, with_idle, prices)
    if with_idle:
        first, last = min(log.first_s for log in logs), max(log.last_s for log in logs)
        found.notes.append(
            f"the log has requests from {period.show(round(max(first, period.from_s)))} to"
            f" {period.show(round(min(last, period.to_s)))}; the rest of the period counts as idle; name rotated files"
            " with further --log"
        )
    if absent:
        found.notes.append(
            f"--gpus names {', '.join(sorted(absent))}, which has no request in this period"
            f"{': its time is idle' if with_idle else ''}; check the spelling"
        )
    return found


def _add_spans(uses: Uses, log: SegmentUse, count: Mapping[str, float]) -> defaultdict[str, float]:
    """Add the busy time of a segment and return its seconds by model."""
    busy: defaultdict[str, float] = defaultdict(float)
    for model, teams in log.busy.items():
        for (team, broke_off), seconds in teams.items():
            gpu_seconds = seconds * count.get(model, count[""])
            uses[team, model].add(TeamUse(seconds=gpu_seconds, aborted_seconds=gpu_seconds * broke_off))
            busy[model] += seconds
    return busy


def _add_cost(found: SourceTotals, uses: Uses, prices: Prices) -> None:
    for (team, _), use in uses.items():
        use.cost_allocation = use.seconds / HOUR_S * prices.per_hour(None)
        use.cost_usage = 0.0 if team == IDLE else use.cost_allocation
        use.set_aborted_cost()
    found.currency = prices.currency
    found.known.add("cost")
    add_api_cost(found, uses, prices)


def _log_notes(
    untimed: int, report: ReadReport, count: Mapping[str, float], with_idle: bool, prices: Prices | None
) -> Iterator[str]:
    result = ", ".join(
        f"{gpus:g} for {model}" if model else f"{gpus:g} for each {'other ' * (len(count) > 1)}model"
        for model, gpus in count.items()
    )
    yield (
        f"GPUs are assumed, not measured (--gpus): {result}; all of a model's count as busy while any of its"
        " requests runs"
    )
    yield ("a request runs from leaving the gateway's queue to its end; an aborted one counts for its team")
    if not with_idle:
        yield "no idle time: the log does not cover allocated time; set --month, --from or --since"
    if not prices:
        yield NO_PRICES
    if prices and prices.gpus:
        yield "the log does not name the GPUs: each costs the default gpu_hour"
    if untimed:
        yield f"{untimed} requests without ts or e2e_ms are not included"
    yield from report.notes


def parse_gpus(given: Iterable[str]) -> dict[str, float]:
    """Parse --gpus: a number for each model, or MODEL=N. Raises ValueError."""
    found = {}
    for text in given:
        model, _, number = text.rpartition("=")
        try:
            found[model] = float(number)
        except ValueError:
            found[model] = 0.0
        if not 0 < found[model] < float("inf"):
            raise ValueError(f"--gpus {text!r} is no number of GPUs; write it like 4 or chat=4")
    return found
