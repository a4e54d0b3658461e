"""Mean time that requests hold a slot, from ended and running ones. Pure: every call brings the time.

The memory fades with time and not with each request: a burst of short requests within a second says little about the
long ones of the last minute. Requests that run already longer than the mean are evidence too, so a team cannot keep its
estimate low by what ends early."""

from __future__ import annotations

from dataclasses import dataclass

# after so many seconds a request counts half; long enough for some answers of any length, short enough to follow an
# engine's load
MEMORY_S = 60.0
PRIOR_REQUESTS = 1.0  # how much the mean over all teams counts beside a team's own requests


@dataclass(slots=True)
class HoldTime:
    """Running mean of one team, or of all. weight: how many requests it stands for at `at`. began: the sum of the times
    at which the running requests began. expected_s: the latest estimate."""

    mean_s: float = 0.0
    weight: float = 0.0
    at: float = 0.0
    began: float = 0.0
    expected_s: float = 0.0

    def learn(self, held_s: float, overall: HoldTime, now: float) -> None:
        """Take in a request that has ended, here and in the mean over all teams."""
        self.weight = self.weight / (1.0 + (now - self.at) / MEMORY_S) + 1.0
        self.mean_s += (held_s - self.mean_s) / self.weight
        self.expected_s = self.mean_s
        overall.weight = overall.weight / (1.0 + (now - overall.at) / MEMORY_S) + 1.0
        overall.mean_s += (held_s - overall.mean_s) / overall.weight
        self.at = overall.at = now

    def estimate(self, running: int, overall: HoldTime, now: float) -> float:
        """Return the expected seconds of one more request, from its own mean with the overall mean as prior; 0 while
        nothing has ended. running: how many requests of the team run."""
        if not overall.weight:
            return 0.0
        own = self.weight / (1.0 + (now - self.at) / MEMORY_S)
        known = own + PRIOR_REQUESTS
        mean_s = overall.mean_s + (self.mean_s - overall.mean_s) * own / known
        if running and (age_s := now - self.began / running) > mean_s:
            mean_s += (age_s - mean_s) * running / (running + known)
        self.expected_s = mean_s
        return mean_s
