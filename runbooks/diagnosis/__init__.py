"""Diagnosis rows of every alert: condition in PromQL, likely cause, mitigation.

`render` prints the rows into the pages."""

from __future__ import annotations

from runbooks.diagnosis import (
    cache,
    engine,
    golden,
    gpu,
    latency,
    prometheus_stack,
    request_log,
    self_monitoring,
    slo,
    traffic,
    transfers,
)
from runbooks.diagnosis.row import DiagnosisRow

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    **engine.ROWS,
    **golden.ROWS,
    **slo.ROWS,
    **latency.ROWS,
    **cache.ROWS,
    **traffic.ROWS,
    **transfers.ROWS,
    **request_log.ROWS,
    **gpu.ROWS,
    **self_monitoring.ROWS,
    **prometheus_stack.ROWS,
}
