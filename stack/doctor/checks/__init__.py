"""Checks: one for each finding, over the values of one model or one engine. Pure.

A latency is a finding when it is over its threshold (alerts/thresholds.py, or a deployment's own); the shares of queue,
prefill and decode and other values attribute it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stack.doctor.checks.case import Case, CheckResult, State
from stack.doctor.checks.decode import check_decode, check_drafts, check_interference
from stack.doctor.checks.failures import (
    check_client_errors,
    check_deferred,
    check_errors,
    check_frozen,
    check_rejections,
    check_silent,
)
from stack.doctor.checks.gateway import (
    check_adapter,
    check_disconnects,
    check_gateway_queue,
    check_gateway_rejections,
    check_one_team,
    check_streaming,
)
from stack.doctor.checks.prefill import (
    check_api_server,
    check_computed_anew,
    check_head_of_line,
    check_prefill,
    check_reuse,
    check_small_steps,
)
from stack.doctor.checks.queue import check_kv_full, check_preempted, check_queue


def found_in(case: Case, state: State) -> Iterator[CheckResult]:
    """Run each check once, those of latencies only with enough evidence, and yield the findings."""
    if state == "idle":
        return
    for check in (*OF_STATES, *(OF_LATENCIES if state == "busy" else ())):
        if found := check(case):
            yield found


Check = Callable[[Case], CheckResult | None]
OF_STATES: tuple[Check, ...] = (
    check_silent,
    check_frozen,
    check_errors,
    check_preempted,
    check_rejections,
    check_gateway_rejections,
    check_client_errors,
    check_deferred,
    check_kv_full,
    check_queue,
    check_computed_anew,
)
OF_LATENCIES: tuple[Check, ...] = (
    check_head_of_line,
    check_api_server,
    check_small_steps,
    check_prefill,
    check_reuse,
    check_gateway_queue,
    check_interference,
    check_decode,
    check_drafts,
    check_streaming,
    check_disconnects,
    check_adapter,
    check_one_team,
)
