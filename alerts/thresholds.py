"""Numbers at which someone is told, each with its reason and source. The alert, the red line on the panel and the page read the same value."""

from __future__ import annotations

from dataclasses import dataclass

from exporters.catalogue.metric import Unit


@dataclass(frozen=True, slots=True)
class Threshold:
    """value in base units; why: what makes this number and no other; source: where it comes from. Raises ValueError when they are empty."""

    value: float
    unit: Unit
    why: str
    source: str

    def __post_init__(self) -> None:
        if not self.why or not self.source:
            raise ValueError(f"a threshold of {self.value} needs its reason and its source")

    def __str__(self) -> str:
        return f"{self.value:g}"


KV_CACHE_USAGE = Threshold(
    0.9, Unit.RATIO,
    "With less than a tenth of the blocks free, a handful of longer answers is enough to make the engine preempt and compute requests again.",
    "Tuning tables of the serving course (free blocks under 10 % for 5 minutes); the published rule sets agree on 0.9.",
)  # fmt: skip
QUEUE_TIME_P95 = Threshold(
    5.0, Unit.SECONDS,
    "A chat user gives up on a first word after a few seconds; five of them spent waiting for a slot leave nothing for prefill. "
    "It lies on a bound of vLLM's histogram, so the estimate is exact there.",
    "vLLM's request-time bounds (2.5, 5, 10 s); support-chat target of p95 under 2 s to the first token.",
)  # fmt: skip
ERROR_RATIO = Threshold(
    0.005, Unit.RATIO,
    "One failed request in two hundred is what the service promises at most; above it someone's work breaks every few minutes.",
    "Pass table of the serving course: error ratio at most 0.5 %.",
)  # fmt: skip
ERRORS_AT_LEAST = Threshold(
    5.0, Unit.REQUESTS,
    "Of ten requests in a quiet hour one that fails is 10 %, and nobody needs to look; five in five minutes are a pattern.",
    "Low-traffic guard as in burn-rate practice; the smallest count that one client's single retry loop of three does not reach.",
)  # fmt: skip
TTFT_P95 = Threshold(
    2.5, Unit.SECONDS,
    "Beyond it a chat feels stuck. The course asks for 2 s, which is no bound of vLLM's histogram; 2.5 s is the next one and so is read exactly.",
    "Support-chat target (p95 under 2 s), vLLM's time-to-first-token bounds.",
)  # fmt: skip
