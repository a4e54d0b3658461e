"""Whose the GPU time, the energy and the cost were: series that add up to what the cards were there for, used and cost.

Law: over all teams, with __idle__, __aborted__ and __unattributed__ among them, and what is pending, a series sums to
the whole."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_PRICED = "`prices` in the sidecar's configuration"
_CARD = ("model_name", "uuid")
_ESTIMATE = "Requests in one batch cannot be told apart on the card: the split is an estimate of share, exact in sum."

ALLOCATED = Metric(
    "vllm_watch_gpu_allocated_seconds_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Time a card was there for a model, in seconds of a whole card: a MIG instance counts as its compute slices of 7.",
    labels=_CARD,
    notes=("model_name is __none__ for a card that no engine claims.",),
)
BUSY = Metric(
    "vllm_watch_gpu_busy_seconds_total", Kind.COUNTER, Unit.SECONDS,
    "Part of the allocated time in which the engine had requests running, in seconds of a whole card.", labels=_CARD,
    notes=("From the engine, so it holds under MIG too. Time in which the engine did not answer is not in it.",),
)  # fmt: skip
TEAM_SECONDS = Metric(
    "vllm_watch_gpu_seconds_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Seconds of a whole card by team, and by method: tokens (busy time shared by work that ended), aborted (by requests"
    " of the team that broke off), measured (idle), unknown.",
    labels=("method", "model_name", "team"),
    notes=(
        (
            "__idle__: nothing ran. __aborted__: work that was broken off and that no record claims. __unattributed__:"
            " work that no log shows."
        ),
        "aborted is by the tokens of the record, which the gateway estimates where no usage came.",
        _ESTIMATE,
    ),
)
PENDING = Metric(
    "vllm_watch_gpu_pending_seconds", Kind.GAUGE, Unit.SECONDS,
    "Busy time that no team has yet: that of requests still running.", labels=("model_name",),
)  # fmt: skip
TEAM_ENERGY = Metric(
    "vllm_watch_energy_joules_total",
    Kind.COUNTER,
    Unit.JOULES,
    "Energy of the cards by team, state (active, idle, unknown) and method: counter, integrated (power over time),"
    " mig_activity, mig_fraction.",
    labels=("method", "model_name", "state", "team"),
    notes=("What a card draws when nothing runs is idle also while something does, and is __idle__'s.", _ESTIMATE),
)
IDLE_WATTS = Metric(
    "vllm_watch_gpu_idle_watts",
    Kind.GAUGE,
    Unit.WATTS,
    "Mean power of a card over the last 30 s or more in which its engine neither ran nor queued anything.",
    labels=("uuid",),
    notes=("Absent until it was measured, and for MIG instances: their neighbours' work is in what the card draws.",),
)
COST = Metric(
    "vllm_watch_cost_total",
    Kind.COUNTER,
    Unit.CURRENCY,
    "Cost of the cards by team, at the price of the moment. Basis allocation: all the time they were there; usage: busy"
    " time only.",
    labels=("basis", "currency", "model_name", "team"),
    needs=_PRICED,
    notes=(_ESTIMATE,),
)
API_COST = Metric(
    "vllm_watch_api_cost_total",
    Kind.COUNTER,
    Unit.CURRENCY,
    "What the logged tokens would have cost at the API prices in `prices`, "
    "estimated ones of requests that broke off included.",
    labels=("currency", "model_name", "team"),
    needs="`api` under `prices` in the sidecar's configuration",
)
DECODE_WEIGHT = Metric(
    "vllm_watch_decode_weight",
    Kind.GAUGE,
    Unit.NONE,
    "How much a generated token weighs beside a computed prompt token, by method: engine (its prefill and decode times)"
    " or default.",
    labels=("method", "model_name"),
    across=Across.MEAN,
)
SHARE_DIFFERENCE = Metric(
    "vllm_watch_share_difference_ratio", Kind.GAUGE, Unit.RATIO,
    "Last full hour: a team's share of busy time by requests running at each moment, less its share by tokens.",
    labels=("model_name", "team"), across=Across.MEAN,
    notes=("Far from 0 means that the two ways to share disagree: long waits on few tokens, or the reverse.",),
)  # fmt: skip

ATTRIBUTED: tuple[Metric, ...] = (
    ALLOCATED, BUSY, TEAM_SECONDS, PENDING, TEAM_ENERGY, IDLE_WATTS, COST, API_COST, DECODE_WEIGHT, SHARE_DIFFERENCE,
)  # fmt: skip
