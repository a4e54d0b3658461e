"""Health of the sidecar's sources: successes, failures and their reasons."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp

from exporters.catalogue import exposition_parser
from exporters.catalogue import sidecar as sidecar_series
from exporters.exposition import Sample
from exporters.gpu import readings as gpu

log = logging.getLogger("vllm_watch.sidecar")


@dataclass(slots=True)
class SourceStatus:
    """Health of one source. Times are unix seconds."""

    kind: str
    name: str
    up: bool = False
    tried: bool = False
    last_success_s: float | None = None
    duration_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Run one read. Failures are counted by reason, logged once when the source goes down, and never propagate."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:  # must survive every failure of a source
            self.errors[reason(error)] += 1
            if self.up or not self.tried:
                log.warning(
                    "%s is down: %s", " ".join(dict.fromkeys((self.kind, self.name))), error or type(error).__name__
                )
            self.up = False
        else:
            if self.tried and not self.up:
                log.info("%s %s is back", self.kind, self.name)
            self.up, self.last_success_s = True, time.time()
        finally:
            self.tried = True
            self.duration_s = time.perf_counter() - began

    def samples(self, now_s: float) -> Iterator[Sample]:
        labels = {"kind": self.kind, "source": self.name}
        yield sidecar_series.SOURCE_UP, labels, float(self.up)
        yield sidecar_series.SOURCE_DURATION, labels, self.duration_s
        if self.last_success_s is not None:
            yield sidecar_series.SOURCE_LAST_SUCCESS, labels, self.last_success_s
            yield sidecar_series.SOURCE_AGE, labels, max(0.0, now_s - self.last_success_s)
        known = sorted({*REASONS[self.kind], *self.errors})
        yield from ((sidecar_series.SOURCE_ERRORS, {**labels, "reason": why}, self.errors[why]) for why in known)


# Failure reasons by kind of source. All are exposed at 0 from the start: rates need a sample before the first failure.
REASONS: Mapping[str, tuple[str, ...]] = {
    "accounts": ("other",),
    "checkpoint": ("os", "other", "permission"),
    "log": ("os", "other", "permission"),
    "engine": ("bad_page", "http_4xx", "http_5xx", "other", "timeout", "unreachable"),
    "peer": ("http_4xx", "http_5xx", "os", "other", "timeout", "unreachable"),
    "gpu": (*gpu.REASONS, "other"),
    "events": ("os", "other", "permission", "timeout"),
    "golden": ("os", "other", "permission"),
}


def reason(error: BaseException) -> str:
    """Return a failure as one of a few words for a label."""
    gpu_reason = getattr(error, "reason", None)
    match error:
        case gpu.GpuUnavailable() if isinstance(gpu_reason, str):
            return gpu_reason
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientResponseError():
            return f"http_{error.status // 100}xx"
        case aiohttp.ClientConnectionError() | ConnectionError():
            return "unreachable"
        case exposition_parser.BadExposition():
            return "bad_page"
        case PermissionError():
            return "permission"
        case OSError():
            return "os"
        case _:
            return "other"
