"""GPU seconds of each team and model, hour by hour, from overlapping requests."""

from __future__ import annotations

import math
import random
from array import array
from collections import defaultdict
from collections.abc import Iterable

from exporters.accounting.gpu_use import Who

HOUR_S = 3600.0


def sweep(requests: Iterable[tuple[float, float, Who]], window: tuple[float, float]) -> dict[Who, float]:
    """Return seconds by team of (start_s, end_s, team): each instant is split evenly over the running requests.

    The result sums to the time with any running request. Computed with a clock that runs 1/n as fast while n run:
    each request gets the difference between its ends."""
    from_s, to_s = window
    inside = [
        (max(start, from_s) - from_s, min(end, to_s) - from_s, team)
        for start, end, team in requests
        if max(start, from_s) < min(end, to_s)
    ]
    moments = sorted(
        [(start, number) for number, (start, _, _) in enumerate(inside)]
        + [(end, ~number) for number, (_, end, _) in enumerate(inside)]
    )
    began = [0.0] * len(inside)
    by_team: dict[Who, float] = {}
    clock = last_s = 0.0
    running = 0
    for at_s, number in moments:
        if running:
            clock += (at_s - last_s) / running
        last_s = at_s
        if number >= 0:
            began[number] = clock
            running += 1
        else:
            team = inside[~number][2]
            by_team[team] = by_team.get(team, 0.0) + clock - began[~number]
            running -= 1
    return by_team


class Hour:
    """Requests that ran in one hour (unix seconds / 3600); beyond `limit` a uniform sample.

    names: their (model_name, team). The next one to keep is drawn ahead, so that most cost nothing (Li's algorithm
    L)."""

    def __init__(self, hour: int, names: list[tuple[str, str]], limit: int, rng: random.Random) -> None:
        self.hour = hour
        self.count = 0
        self._names, self._limit, self._rng = names, limit, rng
        self._starts, self._ends, self._who = array("d"), array("d"), array("H")
        self._next, self._highest = limit + 1, 1.0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start_s: float, end_s: float, who: int) -> None:
        self.count += 1
        if self.count <= self._limit:
            self._starts.append(start_s)
            self._ends.append(end_s)
            self._who.append(who)
            if self.count == self._limit:
                self._skip()
        elif self.count == self._next:
            place = self._rng.randrange(self._limit)
            self._starts[place], self._ends[place], self._who[place] = start_s, end_s, who
            self._skip()

    def _skip(self) -> None:
        """Draw the next one to keep."""
        # 1 would stop sampling
        self._highest = min(self._highest * (1 - self._rng.random()) ** (1 / self._limit), 1 - 1e-12)
        self._next = self.count + 1 + int(math.log(1 - self._rng.random()) / math.log1p(-self._highest))

    def seconds(self) -> dict[str, dict[str, float]]:
        """Return busy seconds by model and team, by `sweep`.

        Computed minute by minute, so that a thread never blocks others for long."""
        minutes: defaultdict[tuple[int, str], list[tuple[float, float, str]]] = defaultdict(list)
        began_s, ended_s = self.hour * HOUR_S, (self.hour + 1) * HOUR_S
        for start, end, who in zip(self._starts, self._ends, self._who, strict=True):
            model_name, team = self._names[who]
            for minute in range(int(max(start, began_s) // 60), int(min(end, ended_s - 1) // 60) + 1):
                minutes[minute, model_name].append((start, end, team))
        found: dict[str, dict[str, float]] = {}
        for (minute, model_name), requests in minutes.items():
            mine = found.setdefault(model_name, {})
            for team, seconds in sweep(requests, (minute * 60, minute * 60 + 60)).items():
                mine[team] = mine.get(team, 0.0) + seconds
        return found


class Hours:
    """Collector of finished requests until an hour is over and `late_s` has passed for late ones."""

    def __init__(self, limit: int = 300_000, late_s: float = 600.0, rng: random.Random | None = None) -> None:
        self._limit, self._late_s = limit, late_s
        self._rng = rng or random.Random()  # noqa: S311 - a fair sample, no secret
        self._names: list[tuple[str, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._open: dict[int, Hour] = {}
        self._closed = -1

    def add(self, start_s: float, end_s: float, model_name: str, team: str, now_s: float) -> None:
        """Add a request. Lines of past or future hours are skipped: there is no live value to compare."""
        last, now = int(end_s // HOUR_S), int(now_s // HOUR_S)
        if not now - 1 <= last <= now:
            return
        if (who := self._numbers.get((model_name, team))) is None:
            who = self._numbers[model_name, team] = len(self._names)
            self._names.append((model_name, team))
        for hour in (last,) if start_s >= last * HOUR_S else (last - 1, last):
            if hour > self._closed:
                if (found := self._open.get(hour)) is None:
                    found = self._open[hour] = Hour(hour, self._names, self._limit, self._rng)
                found.add(start_s, end_s, who)

    def close_hour(self, now_s: float) -> Hour | None:
        """Remove and return the oldest complete hour; compute its seconds in a thread."""
        due = [hour for hour in self._open if (hour + 1) * HOUR_S + self._late_s <= now_s]
        if not due:
            return None
        self._closed = max(self._closed, min(due))
        return self._open.pop(min(due))
