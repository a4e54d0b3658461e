"""Autoscaling from a capacity worksheet and request logs: values of the objects, and a replay of the logs with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alerts import derive, export
from exporters.requests.read import ReadReport, read_records
from stack.capacity import command, plan, replay
from stack.capacity.command import CapacityOptions, WeightsOnly
from stack.capacity.plan import Plan
from stack.capacity.replay import ReplayedRequest, ReplayResult, ScalingPolicy
from stack.deploy.kubernetes import autoscaling
from stack.deploy.kubernetes.autoscaling import AutoscaleOptions, Autoscaling

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One policy on the log. name: of the policy."""

    name: str
    result: ReplayResult


@dataclass(frozen=True, slots=True)
class ScalingStudy:
    """Values of the objects. rows: empty without a log; within_s: target of the time to the first token."""

    scaling: Autoscaling
    rows: tuple[ReplayRow, ...]
    within_s: float
    requests: int
    span_s: float
    notes: tuple[str, ...] = field(default=())


def study(options: AutoscaleOptions, asked: CapacityOptions, own: export.AlertOptions) -> ScalingStudy:
    """Return the values of the objects and, with logs, what they would have done.

    Raises ValueError, BadConfig and OSError, each with a sentence for the caller."""
    found = _plan(asked) if asked.model or asked.worksheet else None
    model = (found.name if found else None) or asked.values.name
    if model is None:
        raise ValueError("--served-model-name is missing: the model's name as vLLM's label model_name has it")
    requests, notes = _requests(asked, model, found)
    scaling = autoscaling.derive(
        options, model, asked.values.max_num_seqs, found, _quietest_per_s(requests), own.settings
    )
    objectives = export.objectives(own.slo or export.SHIPPED_OBJECTIVES)
    within_s = derive.targets(objectives, found.targets.ttft_p95_s if found else None).ttft.seconds
    rows = tuple(_rows(requests, scaling.policy, within_s)) if requests else ()
    span_s = requests[-1].arrived_s - requests[0].arrived_s if requests else 0.0
    return ScalingStudy(scaling, rows, within_s, len(requests), span_s, notes)


def _plan(asked: CapacityOptions) -> Plan:
    found = command.study(asked)
    if isinstance(found, WeightsOnly):
        raise ValueError(
            "--model is missing: autoscaling needs the model's config.json, or only --max-num-seqs, --min and --max"
        )
    for _, error in found.refused:
        raise error
    if len(found.plans) != 1:
        raise ValueError("--gpu: name the one GPU or slice of a replica")
    return found.plans[0]


def _requests(
    asked: CapacityOptions, model: str, found: Plan | None
) -> tuple[Sequence[ReplayedRequest], tuple[str, ...]]:
    """Return the requests of the logs, and notes on records that were left out."""
    if not asked.logs:
        return (), ()
    report = ReadReport()
    share = plan.cache_shares(found.shape, found.serving, found.cache) if found else None
    traffic = found.traffic if found else None
    times = ((traffic.ttft_s or 0.0), (traffic.tpot_s or 0.0)) if traffic else (0.0, 0.0)
    requests, others = replay.requests_of(read_records(asked.logs, report, probes=False), model, share, *times)
    if not requests:
        raise ValueError(f"--log: no request for {model} that ended well and has ts, prompt_tokens, completion_tokens")
    notes = []
    if others:
        notes.append(f"{others:,} records for {model} were rejected, failed or have no lengths; they are not replayed")
    notes += report.notes
    return requests, tuple(notes)


def _quietest_per_s(requests: Sequence[ReplayedRequest]) -> float | None:
    """Return the rate of the hour with the fewest requests; None for a log of less than an hour."""
    if not requests or (hours := int((requests[-1].arrived_s - requests[0].arrived_s) // _HOUR_S)) < 1:
        return None
    counts = [0] * hours
    for request in requests:
        if (hour := int((request.arrived_s - requests[0].arrived_s) // _HOUR_S)) < hours:
            counts[hour] += request.texts
    return min(counts) / _HOUR_S


def _rows(requests: Sequence[ReplayedRequest], policy: ScalingPolicy, within_s: float) -> Iterator[ReplayRow]:
    yield ReplayRow(f"{policy.least} to {policy.most}", replay.replay(requests, policy, within_s))
    for replicas in sorted({policy.least, policy.most}, reverse=True):
        yield ReplayRow(f"always {replicas}", replay.replay(requests, policy.fixed(replicas), within_s))
