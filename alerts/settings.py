"""Settings of a deployment's alerts: thresholds, names of scrape jobs, and the pace of time in a drill.

Invariant: every alert is a function of these settings, and the default rules are that function at the defaults. So a
rule file with a team's own thresholds, the runbooks that explain it and the drills that test it always agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from alerts import thresholds
from alerts.thresholds import Threshold
from exporters.text import format_duration, parse_window


class Overrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of thresholds.yml.

    thresholds: name -> value in base units, see `vllm-watch alerts list`. Jobs are regular expressions that match
    complete job names. Raises ValueError for an unknown threshold, a value out of range or a malformed expression."""

    thresholds: Mapping[str, float] = {}
    engine_job: str = "vllm.*"
    gateway_job: str = "gateway"
    sidecar_job: str = "sidecar"

    def __post_init__(self) -> None:
        for name, value in self.thresholds.items():
            thresholds.named(name).at(value)
        for job in (self.engine_job, self.gateway_job, self.sidecar_job):
            try:
                re.compile(job)
            except re.error as error:
                raise ValueError(f"job {job!r} is not a regular expression: {error}") from error
            if not job or '"' in job or "\\" in job:
                raise ValueError(
                    f"job {job!r} must be a regular expression without quotes and backslashes, such as vllm.*"
                )


@dataclass(frozen=True, slots=True)
class Settings:
    """Overrides of the defaults, and the pace of drills: pace 15 shortens 5 minutes to 20 seconds."""

    overlay: Overrides = field(default_factory=Overrides)
    pace: int = 1

    def at(self, threshold: Threshold) -> Threshold:
        """Return a threshold with this deployment's value."""
        own = self.overlay.thresholds.get(threshold.name)
        return threshold if own is None else threshold.at(own)

    def window(self, duration: str) -> str:
        """Return a duration such as 5m at this pace. Raises ValueError for text that is not a duration."""
        return duration if self.pace == 1 else format_duration(self.seconds(duration))

    def seconds(self, duration: str) -> int:
        return round(parse_window(duration) / self.pace)

    @property
    def engine(self) -> str:
        """Return the matcher for scrape jobs of engines."""
        return f'job=~"{self.overlay.engine_job}"'

    @property
    def gateway(self) -> str:
        return f'job=~"{self.overlay.gateway_job}"'

    @property
    def sidecar(self) -> str:
        return f'job=~"{self.overlay.sidecar_job}"'

    @property
    def ours(self) -> str:
        """Return the matcher for scrape jobs of engines, gateways and sidecars."""
        return f'job=~"{self.overlay.engine_job}|{self.overlay.gateway_job}|{self.overlay.sidecar_job}"'

    def paced(self, pace: int) -> Settings:
        return replace(self, pace=pace)


DEFAULTS = Settings()
