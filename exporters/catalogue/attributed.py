"""GPU time, energy and cost by team: series that sum to the allocated, used and paid totals.

Invariant: over all teams, including __idle__, __aborted__ and __unattributed__, and the pending part, a series sums
to the total."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_PRICED = "`prices` in the sidecar's configuration"
_GPU = ("model_name", "uuid")
_ESTIMATE = "Requests of one batch cannot be separated on the GPU: the split is estimated, the sum is exact."

ALLOCATED = Metric(
    "vllm_watch_gpu_allocated_seconds_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "GPU time allocated to a model, in seconds of a full GPU; a MIG instance counts as its compute slices of 7.",
    labels=_GPU,
    notes=("model_name is __none__ for a GPU that no engine claims.",),
)
BUSY = Metric(
    "vllm_watch_gpu_busy_seconds_total", Kind.COUNTER, Unit.SECONDS,
    "Allocated GPU time during which the engine had running requests, in seconds of a full GPU.", labels=_GPU,
    notes=("Measured at the engine, so also valid under MIG. Excludes time in which the engine did not respond.",),
)  # fmt: skip
TEAM_SECONDS = Metric(
    "vllm_watch_gpu_seconds_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Full-GPU seconds by team and method: tokens (busy time split by completed work), aborted (the team's aborted"
    " requests), measured (idle), unknown.",
    labels=("method", "model_name", "team"),
    notes=(
        (
            "__idle__: no running requests. __aborted__: aborted work without a record. __unattributed__: work in no"
            " request log."
        ),
        "aborted uses the record's tokens, estimated by the gateway if there is no usage.",
        _ESTIMATE,
    ),
)
PENDING = Metric(
    "vllm_watch_gpu_pending_seconds", Kind.GAUGE, Unit.SECONDS,
    "GPU busy time not yet attributed to a team: requests still running.", labels=("model_name",),
)  # fmt: skip
TEAM_ENERGY = Metric(
    "vllm_watch_energy_joules_total",
    Kind.COUNTER,
    Unit.JOULES,
    "GPU energy by team, state (active, idle, unknown) and method: counter, integrated (power over time),"
    " mig_activity, mig_fraction.",
    labels=("method", "model_name", "state", "team"),
    notes=("Idle draw counts as idle and belongs to __idle__, also while requests run.", _ESTIMATE),
)
IDLE_WATTS = Metric(
    "vllm_watch_gpu_idle_watts",
    Kind.GAUGE,
    Unit.WATTS,
    "Mean GPU power over the last idle period of at least 30 s: engine without running or queued requests.",
    labels=("uuid",),
    notes=("Absent until measured, and for MIG instances: the GPU's power includes neighbouring instances.",),
)
COST = Metric(
    "vllm_watch_cost_total",
    Kind.COUNTER,
    Unit.CURRENCY,
    "GPU cost by team at the current price. Basis allocation: all allocated time; usage: busy time only.",
    labels=("basis", "currency", "model_name", "team"),
    needs=_PRICED,
    notes=(_ESTIMATE,),
)
API_COST = Metric(
    "vllm_watch_api_cost_total",
    Kind.COUNTER,
    Unit.CURRENCY,
    "Equivalent cost of the logged tokens at the API prices in `prices`, including estimated tokens of aborted"
    " requests.",
    labels=("currency", "model_name", "team"),
    needs="`api` under `prices` in the sidecar's configuration",
)
DECODE_WEIGHT = Metric(
    "vllm_watch_decode_weight",
    Kind.GAUGE,
    Unit.NONE,
    "Weight of a generated token relative to a computed prompt token, by method: engine (measured prefill and decode"
    " times) or default.",
    labels=("method", "model_name"),
    across=Across.MEAN,
)
SHARE_DIFFERENCE = Metric(
    "vllm_watch_share_difference_ratio", Kind.GAUGE, Unit.RATIO,
    "Cost split over the last full hour: share of busy time by running requests minus share by tokens, per team.",
    labels=("model_name", "team"), across=Across.MEAN,
    notes=("Far from 0: the two methods disagree, for example long waits with few tokens.",),
)  # fmt: skip

ATTRIBUTED: tuple[Metric, ...] = (
    ALLOCATED, BUSY, TEAM_SECONDS, PENDING, TEAM_ENERGY, IDLE_WATTS, COST, API_COST, DECODE_WEIGHT, SHARE_DIFFERENCE,
)  # fmt: skip
