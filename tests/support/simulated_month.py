"""A month of five teams, sampled every five minutes, with what each team used in each step.

November 2025: clocks change in New York on the 2nd; prices change on the 15th at noon there; a team joins on the 10th;
the sidecar loses its counters on the 20th."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from exporters.accounting.gpu_use import ABORTED, IDLE, UNATTRIBUTED
from exporters.catalogue import attributed
from exporters.catalogue import sidecar as sidecar_series
from exporters.catalogue.metric import Metric

STEP_S = 300
GPUS = 2
START_S = datetime(2025, 10, 30, tzinfo=UTC).timestamp()
END_S = datetime(2025, 12, 2, 6, tzinfo=UTC).timestamp()
CHANGE_S = datetime(2025, 11, 15, 12, tzinfo=ZoneInfo("America/New_York")).timestamp()
JOINS_S = datetime(2025, 11, 10, 9, tzinfo=UTC).timestamp()
RESET_S = datetime(2025, 11, 20, 3, 20, tzinfo=UTC).timestamp()
OLD, NEW = 2.0, 3.5
PRICES = f"""\
currency: EUR
gpu_hour: {OLD}
timezone: America/New_York
changes:
  - {{valid_from: "2025-11-15T12:00", gpu_hour: {NEW}}}
"""
TEAMS = ("search", "chat", "code", "late", "tiny")
_WEIGHTS = {"search": 5.0, "chat": 3.0, "code": 1.0, "late": 2.0, "tiny": 1e-5}

_Series = tuple[Metric, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class SimulatedMonth:
    """used: GPU seconds by step start and team; aborted: the part of aborted requests."""

    used: dict[float, dict[str, float]] = field(default_factory=dict)
    aborted: dict[float, dict[str, float]] = field(default_factory=dict)
    lines: dict[_Series, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def page(self) -> str:
        return "\n".join([*self._text(), "# EOF\n"])

    def _text(self) -> Iterator[str]:
        last = None
        for (metric, labels), samples in sorted(self.lines.items(), key=lambda item: item[0][0].name):
            if metric is not last:
                yield f"# TYPE {metric.name.removesuffix('_total')} counter"
                last = metric
            named = ",".join(f'{name}="{value}"' for name, value in labels)
            yield from (f"{metric.name}{{{named}}} {value!r} {at:.0f}" for at, value in samples)

    def expected_cost(self, from_s: float, to_s: float) -> dict[str, float]:
        """Return the cost of each team between two moments that lie on steps."""
        found: dict[str, float] = defaultdict(float)
        for at_s, by_team in self.used.items():
            if from_s <= at_s < to_s:
                for team, seconds in by_team.items():
                    found[team] += seconds / 3600 * (OLD if at_s < CHANGE_S else NEW)
        return found

    def expected_aborted(self, from_s: float, to_s: float, team: str) -> float:
        """Return the hours of a team's aborted requests."""
        return sum(by_team[team] for at_s, by_team in self.aborted.items() if from_s <= at_s < to_s) / 3600


def simulate(seed: int = 7) -> SimulatedMonth:
    """Return the month; a step belongs to the time after its start, and is seen at its end."""
    rng, found = random.Random(seed), SimulatedMonth()
    counts: dict[_Series, float] = {}
    at_s = START_S
    while at_s < END_S:
        if at_s == RESET_S:
            counts = dict.fromkeys(counts, 0.0)
        grown, used, aborted = _step(rng, at_s)
        found.used[at_s], found.aborted[at_s] = used, aborted
        for key, amount in grown.items():
            counts[key] = counts.get(key, 0.0) + amount
        at_s += STEP_S
        for key, value in counts.items():
            found.lines[key].append((at_s, value))
    return found


def _step(rng: random.Random, at_s: float) -> tuple[dict[_Series, float], dict[str, float], dict[str, float]]:
    present = [team for team in TEAMS if team != "late" or at_s >= JOINS_S]
    total = float(GPUS * STEP_S)
    busy = total * (rng.random() if 6 <= at_s / 3600 % 24 < 20 else rng.random() * 0.1)
    unknown = total * 0.01
    weights = {team: _WEIGHTS[team] * rng.random() for team in present} | {ABORTED: 0.1 * rng.random()}
    share = {
        team: (busy - unknown if busy > unknown else 0.0) * w / sum(weights.values()) for team, w in weights.items()
    }
    grown: dict[_Series, float] = {}
    aborted = dict.fromkeys(TEAMS, 0.0) | {ABORTED: share[ABORTED]}
    for team, seconds in share.items():
        if team != ABORTED:
            aborted[team] = seconds * 0.125
            grown[_series(attributed.TEAM_SECONDS, method="aborted", team=team)] = aborted[team]
        grown[_series(attributed.TEAM_SECONDS, method="tokens", team=team)] = seconds - (
            0.0 if team == ABORTED else aborted[team]
        )
        if team != ABORTED:
            grown[_series(sidecar_series.TOKENS, team=team, type="prompt")] = float(round(seconds * 1000))
    idle = total - unknown - sum(share.values())
    grown[_series(attributed.TEAM_SECONDS, method="measured", team=IDLE)] = idle
    grown[_series(attributed.TEAM_SECONDS, method="unknown", team=UNATTRIBUTED)] = unknown
    for number in range(GPUS):
        grown[_series(attributed.ALLOCATED, uuid=f"GPU-{number}")] = total / GPUS
    return grown, share | {IDLE: idle, UNATTRIBUTED: unknown}, aborted


def _series(metric: Metric, **labels: str) -> _Series:
    place = {"cluster": "eu", "instance": "sidecar:9401", "job": "sidecar", "model_name": "chat"}
    return metric, tuple(sorted((place | labels).items()))
