"""GPU use and engine work of a model between two scrapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from exporters.requests.work import Work

IDLE = "__idle__"
ABORTED = "__aborted__"
UNATTRIBUTED = "__unattributed__"


NOBODY = (IDLE, ABORTED, UNATTRIBUTED)

DEFAULT_DECODE_WEIGHT = 4.0  # ratio of API prices for output and input, used without a measurement
DECODE_WEIGHTS = (0.25, 256.0)  # limits of plausible values
EVIDENCE_TOKENS = 100.0
EVIDENCE_S = 0.001
EVIDENCE_HALF_LIFE_S = 600.0
MIG_SLICES = 7
# source: NVIDIA's MIG user guide, and `nvidia-smi mig -lgip` of such a GPU
_FOUR_SLICES = re.compile(r"\bA30\b|RTX PRO [56]000")

_ASSUMED = "assumed"  # first word of the UUID of a GPU that is configured by number, not seen

Who = TypeVar("Who")

EnergyMethod = Literal["counter", "integrated", "mig_activity", "mig_fraction"]


NOTHING = Work()


@dataclass(frozen=True, slots=True)
class GpuShare:
    """GPU, or MIG instance, that an engine runs on.

    fraction: 1, or for a MIG instance `mig_fraction(profile, name)`. joules: used between two scrapes; None if not
    measured. method: source of the joules; those of an instance come from `split_energy`."""

    uuid: str
    name: str | None = None
    fraction: float = 1.0
    profile: str | None = None
    joules: float | None = None
    method: EnergyMethod = "counter"


def assumed_gpu(engine: str, name: str | None, number: int) -> str:
    """Return the UUID of a GPU of which only the engine and the name are known."""
    return f"{_ASSUMED}/{name or ''}/{engine}/{number}"


def assumed_name(uuid: str) -> str | None:
    """Return the name in such a UUID; None for a real one."""
    kind, _, rest = uuid.partition("/")
    return rest.partition("/")[0] or None if kind == _ASSUMED else None


@dataclass(frozen=True, slots=True)
class UsageSample:
    """Work of one engine between two scrapes, and the log's current state for its model. Unix seconds.

    The first scrape has from_s = to_s. After a gap or without a response, running_before or running_after is None. All
    ranks of an engine are one sample. Increases by the engine's counters (per series, then summed; a restart counts
    from 0):

    inference_s, decode_s, prefill_s: sums over finished requests. decode_s is request_decode_time_seconds; the sum over
    request_time_per_output_token_seconds is one mean per request, short by the length of the answer. produced: all
    prompt, cached and generated tokens.

    Cumulative over all engines of the model: logged: by team. abandoned: by team, of aborted requests, with
    estimates where usage is missing. aborted, missing_in_log: from the reconciliation."""

    upstream: str
    model_name: str
    from_s: float
    to_s: float
    running_before: float | None
    running_after: float | None
    waiting: float = 0.0
    inference_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    produced: Work = NOTHING
    logged: Mapping[str, Work] = field(default_factory=dict)
    abandoned: Mapping[str, Work] = field(default_factory=dict)
    aborted: Work = NOTHING
    missing_in_log: Work = NOTHING
    gpus: tuple[GpuShare, ...] = ()

    @property
    def length_s(self) -> float:
        return max(0.0, self.to_s - self.from_s)

    @property
    def busy_s(self) -> float | None:
        """Return the time with running requests; None if unknown.

        Running at both scrapes: all of it. At neither: the time requests took, at most all of it. At one: half of
        it, because start or end is unknown."""
        if self.running_before is None or self.running_after is None:
            return None
        if self.running_before and self.running_after:
            return self.length_s
        if self.running_before or self.running_after:
            return self.length_s / 2
        return min(self.length_s, max(0.0, self.inference_s))

    @property
    def quiet(self) -> bool:
        return self.busy_s == 0 and not (self.running_before or self.running_after or self.waiting)


def mig_fraction(profile: str, gpu_name: str | None = None) -> float:
    """Return the fraction of a GPU of a MIG profile such as 3g.40gb: its compute slices of 7, or of 4 on some GPUs.

    Raises ValueError."""
    if not (match := re.match(r"(?:\d+c\.)?([1-7])g\.", profile)):
        raise ValueError(f"{profile!r} is no MIG profile; write it like 1g.10gb")
    return min(1.0, int(match[1]) / (4 if gpu_name and _FOUR_SLICES.search(gpu_name) else MIG_SLICES))


def split_energy(
    joules: float, parts: Mapping[str, tuple[float, float | None]]
) -> dict[str, tuple[float, EnergyMethod]]:
    """Split a GPU's energy over its MIG instances: joules and method by uuid. parts: fraction, and activity (0 to 1).

    By fraction x activity if every instance reports activity and one was active; else by fraction. Energy outside
    instances is split with them."""
    weights = {uuid: fraction * activity for uuid, (fraction, activity) in parts.items() if activity is not None}
    by_activity = len(weights) == len(parts) and sum(weights.values()) > 0
    if not by_activity:
        weights = {uuid: fraction for uuid, (fraction, _) in parts.items()}
    total = sum(weights.values())
    return {
        uuid: (joules * weight / total, "mig_activity" if by_activity else "mig_fraction")
        for uuid, weight in weights.items()
    }


class Pool(msgspec.Struct):
    """Usage without a team yet: seconds of a full GPU, joules by method, cost by currency."""

    seconds: float = 0.0
    joules: dict[str, float] = {}
    cost: dict[str, float] = {}

    def add(
        self, seconds: float = 0.0, joules: Mapping[str, float] | None = None, cost: Mapping[str, float] | None = None
    ) -> None:
        self.seconds += seconds
        for mine, more in ((self.joules, joules), (self.cost, cost)):
            for name, amount in (more or {}).items():
                mine[name] = mine.get(name, 0.0) + amount

    def times(self, share: float) -> Pool:
        return Pool(
            self.seconds * share,
            {m: j * share for m, j in self.joules.items()},
            {c: p * share for c, p in self.cost.items()},
        )

    def take(self, share: float) -> Pool:
        """Remove and return a share (0 to 1) of the pool."""
        taken = self.times(share)
        self.seconds -= taken.seconds
        self.joules = {m: j - taken.joules[m] for m, j in self.joules.items()}
        self.cost = {c: p - taken.cost[c] for c, p in self.cost.items()}
        return taken


class PhaseTimes(msgspec.Struct):
    """Decaying average of the request time per token of each kind; no decay while idle.

    This is time as a request waits, not GPU work: a batch waits together."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    generated: float = 0.0
    computed: float = 0.0

    def learn(self, look: UsageSample) -> None:
        if look.produced == NOTHING:
            return
        fade = 0.5 ** (look.length_s / EVIDENCE_HALF_LIFE_S)
        self.decode_s = self.decode_s * fade + look.decode_s
        self.prefill_s = self.prefill_s * fade + look.prefill_s
        self.generated = self.generated * fade + look.produced.completion_tokens
        self.computed = self.computed * fade + look.produced.computed_tokens

    @property
    def decode_weight(self) -> float | None:
        """Return the time of a generated token relative to a computed prompt token; None without enough data."""
        if min(self.generated, self.computed) < EVIDENCE_TOKENS or min(self.prefill_s, self.decode_s) < EVIDENCE_S:
            return None
        low, high = DECODE_WEIGHTS
        return min(high, max(low, self.decode_s / self.generated / (self.prefill_s / self.computed)))
