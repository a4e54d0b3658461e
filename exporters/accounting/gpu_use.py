"""What a model used of its GPUs between two looks, and what its engine did meanwhile."""

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

DEFAULT_DECODE_WEIGHT = 4.0  # what API prices of output and input differ by, for want of anything measured
DECODE_WEIGHTS = (0.25, 256.0)  # beyond these, the evidence is wrong
EVIDENCE_TOKENS = 100.0
EVIDENCE_S = 0.001
EVIDENCE_HALF_LIFE_S = 600.0
MIG_SLICES = 7
# source: NVIDIA's MIG user guide, and `nvidia-smi mig -lgip` of such a card
_FOUR_SLICES = re.compile(r"\bA30\b|RTX PRO [56]000")

Who = TypeVar("Who")

EnergyMethod = Literal["counter", "integrated", "mig_activity", "mig_fraction"]


NOTHING = Work()


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A card, or the part of one, that an engine runs on.

    fraction: 1, or for a MIG instance `mig_fraction(profile, name)`. joules: used between the two looks; None where
    nobody measures.
    method: how the joules were had; those of an instance come from `split_energy`."""

    uuid: str
    name: str | None = None
    fraction: float = 1.0
    profile: str | None = None
    joules: float | None = None
    method: EnergyMethod = "counter"


@dataclass(frozen=True, slots=True)
class UsageSample:
    """What one engine did between two looks at it, and what the log says of its model by now. Unix seconds.

    The first look at an engine has from_s = to_s. One that follows a gap, or finds the engine silent, has
    running_before or running_after None. All ranks of an engine are one look. Growth between the looks, by the engine's
    counters (each series on its own, then summed; a restart counts from 0):
    inference_s, decode_s, prefill_s: its sums over finished requests. decode_s is request_decode_time_seconds; the sum
    over request_time_per_output_token_seconds is one mean per request, short by the length of the answer.
    produced: all prompt, cached and generated tokens.
    Cumulative, whoever served the model: logged: by team. abandoned: by team, of requests that broke off, with
    estimates where no usage came.
    aborted, missing_in_log: from the comparison of log and engine."""

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
    cards: tuple[GpuShare, ...] = ()

    @property
    def length_s(self) -> float:
        return max(0.0, self.to_s - self.from_s)

    @property
    def busy_s(self) -> float | None:
        """For how long requests ran. None: nobody knows.

        Running at both looks: all the time. At neither: requests came and went, for as long as they took, at most all
        the time.
        At one: half of it, for want of knowing when the first began or the last ended."""
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


def mig_fraction(profile: str, card: str | None = None) -> float:
    """The part of a card that a MIG profile such as 3g.40gb is: its compute slices of 7, or of the 4 of some cards.
    Raises ValueError."""
    if not (found := re.match(r"(?:\d+c\.)?([1-7])g\.", profile)):
        raise ValueError(f"{profile!r} is no MIG profile; write it like 1g.10gb")
    return min(1.0, int(found[1]) / (4 if card and _FOUR_SLICES.search(card) else MIG_SLICES))


def split_energy(
    joules: float, parts: Mapping[str, tuple[float, float | None]]
) -> dict[str, tuple[float, EnergyMethod]]:
    """A card's energy over its MIG instances, as joules and method by uuid. parts: fraction, and activity (0 to 1, or
    not known).

    By fraction x activity where every instance tells it and one worked; else by fraction. What belongs to no instance
    goes with them."""
    weights = {uuid: fraction * activity for uuid, (fraction, activity) in parts.items() if activity is not None}
    by_activity = len(weights) == len(parts) and sum(weights.values()) > 0
    if not by_activity:
        weights = {uuid: fraction for uuid, (fraction, _) in parts.items()}
    whole = sum(weights.values())
    return {
        uuid: (joules * weight / whole, "mig_activity" if by_activity else "mig_fraction")
        for uuid, weight in weights.items()
    }


class Pool(msgspec.Struct):
    """What was used and has no team yet: seconds of a whole card, joules by method, cost by currency."""

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
        """This share of it (0 to 1), which is then no longer in it."""
        taken = self.times(share)
        self.seconds -= taken.seconds
        self.joules = {m: j - taken.joules[m] for m, j in self.joules.items()}
        self.cost = {c: p - taken.cost[c] for c, p in self.cost.items()}
        return taken


class PhaseTimes(msgspec.Struct):
    """What a token of each kind took of its request's time; the past fades as new tokens come, and rest keeps it.

    It is time as a request waits, not as the card works: a batch waits together."""

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
        """A generated token's time over a computed prompt token's. None: not enough was seen."""
        if min(self.generated, self.computed) < EVIDENCE_TOKENS or min(self.prefill_s, self.decode_s) < EVIDENCE_S:
            return None
        low, high = DECODE_WEIGHTS
        return min(high, max(low, self.decode_s / self.generated / (self.prefill_s / self.computed)))
