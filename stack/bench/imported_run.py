"""Parts that the readers of other benchmark tools share: a run from its records, TPOT by our definition, outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from exporters.requests.record import Outcome, RequestRecord
from stack.bench.measurements import figures
from stack.bench.result import Run
from stack.bench.workload import Slo

VARIANT = "imported"
ImportedRun = tuple[Run, list[RequestRecord]]
_LOST = (
    "ServerDisconnected",
    "ConnectionReset",
    "ClientConnector",
    "ClientPayloadError",
    "ClientOSError",
    # of httpx, which guidellm uses
    "ConnectError",
    "ReadError",
    "RemoteProtocolError",
)


def measured_run(
    number: int,
    workload: str,
    point: str,
    between_s: tuple[float, float],
    records: Sequence[RequestRecord],
    slo: Slo,
    caveats: tuple[str, ...],
) -> Run:
    """Return a run of which every request is known. between_s: its start and end in unix seconds."""
    started_s, ended_s = between_s
    failed = Counter(record.reason or "unknown" for record in records if record.outcome != "ok")
    return Run(
        number=number,
        variant=VARIANT,
        workload=workload,
        point=point,
        started_s=started_s,
        ended_s=ended_s,
        seed=0,
        asked=len(records),
        ok=len(records) - failed.total(),
        failed=dict(failed),
        figures=figures(records, ended_s - started_s, slo),
        caveats=caveats,
    )


def load_name(rate: float | None, at_once: int | None) -> str:
    """Return the name of a load, such as r2.5 or r2.5-c8; all-at-once where it has no limit."""
    parts = ([f"r{rate:.4g}"] if rate else []) + ([f"c{at_once}"] if at_once else [])
    return "-".join(parts) or "all-at-once"


def outcome_of(error: str | None) -> tuple[Outcome, str | None]:
    """Return outcome and reason of an error, which may be a traceback; its quotations are dropped."""
    if not error:
        return "ok", None
    if "Timeout" in error:
        return "timeout", "timeout"
    return "upstream_error", "connection_lost" if any(name in error for name in _LOST) else "failed"


def tpot_ms(ttft_ms: float | None, e2e_ms: float | None, tokens: int | None) -> float | None:
    """Return (e2e - TTFT) / (tokens - 1), the one definition that all imports use; None where no time is between."""
    if ttft_ms is None or e2e_ms is None or not tokens or tokens < 2 or e2e_ms <= ttft_ms:
        return None
    return round((e2e_ms - ttft_ms) / (tokens - 1), 3)


def milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
