"""Thresholds of alerts, each with its reason and source. Alert, red line on the panel and runbook read the same value.

A deployment may override any of them by name (alerts/settings.py)."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace

from exporters.catalogue.metric import Unit


@dataclass(frozen=True, slots=True)
class Threshold:
    """Threshold of an alert. value: in base units of `unit`; why: reason for this value; source: its origin. Raises
    ValueError without reason and source, and for a value out of range."""

    name: str
    value: float
    unit: Unit
    why: str
    source: str

    def __post_init__(self) -> None:
        if not self.why or not self.source:
            raise ValueError(f"a threshold of {self.value} needs its reason and its source")
        if not math.isfinite(self.value) or self.value < 0 or (self.unit is Unit.RATIO and self.value > 1):
            raise ValueError(
                f"{self.name}: {self.value:g} is not a threshold in {self.unit}"
                + " (0 to 1)" * (self.unit is Unit.RATIO)
            )

    def __str__(self) -> str:
        return f"{self.value:.12g}"

    @property
    def shown(self) -> str:
        """Return the value with its unit: 90 %, 2.5 s, 85 °C."""
        match self.unit:
            case Unit.RATIO:
                return f"{self.value * 100:g} %"
            case Unit.SECONDS:
                return f"{self.value:g} s"
            case Unit.CELSIUS:
                return f"{self.value:g} °C"
            case Unit.COUNT | Unit.NONE:
                return f"{self.value:g}"
            case unit:
                return f"{self.value:g} {unit}"

    def at(self, value: float) -> Threshold:
        """Return the threshold with a deployment's own value. Raises ValueError for a value out of range."""
        if value == self.value:
            return self
        return replace(self, value=value, why=f"Set for this deployment. The default is {self.shown}: {self.why}")


KV_CACHE_USAGE = Threshold(
    "kv_cache_usage",
    0.9,
    Unit.RATIO,
    "With less than a tenth of the blocks free, a handful of longer answers is enough to make the engine preempt and"
    " compute requests again.",
    "Tuning tables of the serving course (free blocks under 10 % for 5 minutes); the published rule sets agree on 0.9.",
)
KV_CACHE_FULL = Threshold(
    "kv_cache_full",
    0.95,
    Unit.RATIO,
    "Together with preemptions this is no forecast any more: blocks are taken from running requests. Either sign alone"
    " is common and harmless.",
    "The one compound rule found in published sets (cache above 0.95 and preemptions above 0).",
)
PREEMPTIONS = Threshold(
    "preemptions_per_second",
    0.1,
    Unit.COUNT,
    "Six a minute for ten minutes are sixty requests computed twice; a single burst of preemptions is how vLLM is meant"
    " to work.",
    "Judgement; published sets use 1 to 5 per second, at which the queue has long been growing.",
)
QUEUE_TIME_P95 = Threshold(
    "queue_time_p95",
    5.0,
    Unit.SECONDS,
    "A chat user gives up on the first token after a few seconds; five seconds in the queue leave no time for"
    " prefill. It lies on a bound of vLLM's histogram, so the estimate is exact there.",
    "vLLM's request-time bounds (2.5, 5, 10 s); support-chat target of p95 under 2 s to the first token.",
)
QUEUE_LENGTH = Threshold(
    "queue_length",
    10.0,
    Unit.REQUESTS,
    "A queue that did not go below ten for ten minutes and grew by as many meanwhile does not drain by itself; shorter"
    " ones come and go with every burst.",
    "Judgement, to be replaced by what this deployment drains in its own time limit (Little's law); published sets copy"
    " 5 to 100.",
)
RESTARTS = Threshold(
    "restarts",
    3.0,
    Unit.COUNT,
    "One restart is a deployment and two are a deployment that was repeated; three within an hour mean that it will not"
    " stay up by itself.",
    "Judgement; Kubernetes backs off after about as many.",
)
START_TIME = Threshold(
    "start_time",
    600.0,
    Unit.SECONDS,
    "An engine that takes longer than ten minutes to answer comes too late for the load that it was started for;"
    " loading weights from a local disk and capturing graphs takes two to five.",
    "Judgement; cold start and warm restart are to be recorded for every deployment (pass table of the serving"
    " course).",
)
TTFT_P95 = Threshold(
    "ttft_p95",
    2.5,
    Unit.SECONDS,
    "Beyond it a chat feels stuck. The course asks for 2 s, which is no bound of vLLM's histogram; 2.5 s is the next"
    " one and so is read exactly.",
    "Support-chat target (p95 under 2 s), vLLM's time-to-first-token bounds.",
)
INTER_TOKEN_P95 = Threshold(
    "inter_token_p95",
    0.1,
    Unit.SECONDS,
    "Ten tokens a second are about as fast as people read; slower ones are watched as they arrive. It is a bound of"
    " vLLM's histogram.",
    "Reading speed of some 250 words a minute with room for code; vLLM's inter-token bounds (0.075, 0.1, 0.15 s).",
)
WORSE_BY = Threshold(
    "worse_by",
    0.15,
    Unit.RATIO,
    "Less than that is the noise of a p95 read from buckets; more, on like traffic, is what the practice of canaries"
    " calls a reason to go back.",
    "Serving course: roll back when p95 rises by more than 15 % at the peak hour.",
)
COMPARED_AT_LEAST = Threshold(
    "compared_at_least", 100.0, Unit.REQUESTS,
    "The p95 of fewer than a hundred requests rests on less than five of them.",
    "Arithmetic: five samples above the quantile in each of the two windows.",
)  # fmt: skip
CACHE_HITS_LEFT = Threshold(
    "cache_hits_left",
    0.5,
    Unit.RATIO,
    "The ratio of a healthy deployment drifts with its traffic; half of its own daily level is a changed prompt"
    " template, a lost affinity or a restart, and prefill costs twice.",
    "Judgement on the course's hit bands (shared prompt 30 to 60 %, same codebase 80 to 99 %): bands differ, so only"
    " its own past is a measure.",
)
CACHE_HITS_BEFORE = Threshold(
    "cache_hits_before", 0.2, Unit.RATIO,
    "Where hits were below a fifth nothing was gained from the cache, so nothing is lost when they fall.",
    "Serving course: retrieval with new chunks each time hits 0 to 15 %.",
)  # fmt: skip
ACCEPTANCE = Threshold(
    "acceptance", 0.4, Unit.RATIO,
    "When more than half of the drafted tokens are thrown away, drafting and verifying cost about what they save.",
    "Judgement; the gain depends on how many tokens are drafted at once, so compare TPOT with and without.",
)  # fmt: skip
CUT_OFF = Threshold(
    "cut_off", 0.3, Unit.RATIO,
    "A few answers always run into their limit; when a third do, the limit and not the model decides what users read.",
    "Judgement; serving course: too small an output cap truncates useful answers.",
)  # fmt: skip
ERROR_RATIO = Threshold(
    "error_ratio",
    0.005,
    Unit.RATIO,
    "The service allows at most one failed request in two hundred; above it some user's work fails every few minutes.",
    "Pass table of the serving course: error ratio at most 0.5 %.",
)
ERRORS_AT_LEAST = Threshold(
    "errors_at_least",
    5.0,
    Unit.REQUESTS,
    "One failure of ten requests in a quiet hour is 10 % and needs no action; five in five minutes are a pattern.",
    "Low-traffic guard as in burn-rate practice; the smallest count that one client's single retry loop of three does"
    " not reach.",
)
ENGINE_REFUSALS = Threshold(
    "engine_refusals",
    10.0,
    Unit.REQUESTS,
    "The engine's own limit is the last resort and users should not reach it; ten rejections in five minutes are"
    " more than one client's retries.",
    "Judgement; of 28 rejections measured on vLLM 0.32 only 9 were an HTTP 503, so the status alone hides two thirds.",
)
REFUSAL_RATIO = Threshold(
    "refusal_ratio",
    0.1,
    Unit.RATIO,
    "Rejecting is policy; a team that loses every tenth request has outgrown its limit, or its client"
    " does not back off.",
    "Judgement; about 6 % of offered load was found hidden behind rejections in one published deployment.",
)
HANGUP_RATIO = Threshold(
    "hangup_ratio",
    0.1,
    Unit.RATIO,
    "People close a tab in a few requests of a hundred; one in ten, and twice as many as usual, means that clients stop"
    " waiting.",
    "Judgement on chat traffic. vLLM's own abort counter stayed at 0 for all of 15 client disconnects in 0.10, 0.20"
    " and 0.32 (measured).",
)
LOG_DIFFERS = Threshold(
    "log_differs",
    0.05,
    Unit.RATIO,
    "In half an hour log and engines differ by the requests in flight at its two ends; a twentieth of the requests is"
    " more than that, and metrics per team are wrong by as much.",
    "Reconciliation: offered = finished + aborted + rejected + failed.",
)
LOG_DIFFERS_AT_LEAST = Threshold(
    "log_differs_at_least", 10.0, Unit.REQUESTS,
    "A few manual requests, sent directly to the engine, do not distort the cost of a team.",
    "Low-traffic guard.",
)  # fmt: skip
BOOKS_DIFFER = Threshold(
    "books_differ",
    0.01,
    Unit.RATIO,
    "The sidecar counts missing and extra requests exactly, so this is no matter of precision: at a hundredth the cost"
    " of a team is wrong by more than rounding.",
    "The reconciliation of log and engines is exact to the token; requests that are still open are not counted.",
)
BOOKS_DIFFER_AT_LEAST = Threshold(
    "books_differ_at_least", 3.0, Unit.REQUESTS,
    "One or two manual requests, sent directly to the engine, do not mean that clients bypass the gateway.",
    "Low-traffic guard.",
)  # fmt: skip
LOG_LAG = Threshold(
    "log_lag",
    60.0,
    Unit.SECONDS,
    "A record is written when its request ends and read within a second; a minute later metrics per team describe"
    " another time than the engine's.",
    "The sidecar looks for new lines ten times a second (measured lag in the lab: under 1 s).",
)
LOG_UNREAD = Threshold(
    "log_unread",
    1048576.0,
    Unit.BYTES,
    "A reader that keeps up has nothing left to read after a second; one with a mebibyte (some 2,000 records) left at"
    " every scrape for five minutes does not keep up.",
    "A record is at most 600 bytes.",
)
GPU_TEMPERATURE = Threshold(
    "gpu_temperature",
    85.0,
    Unit.CELSIUS,
    "Data-centre GPUs throttle a few degrees above; at 85 there is still time to act.",
    "NVIDIA's slowdown temperatures for A100, H100 and H200 lie between 85 and 95 degrees, by model: nvidia-smi -q -d"
    " TEMPERATURE.",
)
THROTTLED = Threshold(
    "throttled", 0.1, Unit.RATIO,
    "A tenth of the time at lower clocks shows in the inter-token latency of every request on that GPU.",
    "Judgement. Only heat and the power brake count; a GPU at its own power limit works as configured.",
)  # fmt: skip
GPU_MEMORY = Threshold(
    "gpu_memory",
    0.98,
    Unit.RATIO,
    "vLLM takes its share once, at the start; what comes on top is graphs, a second process or a leak, and the next"
    " allocation above it fails.",
    "--gpu-memory-utilization is 0.9 to 0.95 in practice; the driver and CUDA need the rest.",
)
NVLINK_ERRORS = Threshold(
    "nvlink_errors",
    10.0,
    Unit.COUNT,
    "Links repeat a damaged packet without anyone noticing now and then; ten in a quarter of an hour are a link that"
    " fails, and every collective of a tensor-parallel engine waits for it.",
    "Judgement; NVIDIA counts these as recoverable, so one alone is no fault.",
)
SCRAPE_NEAR_LIMIT = Threshold(
    "scrape_near_limit",
    0.8,
    Unit.RATIO,
    "A new release, an adapter or a rank adds tens to hundreds of series at once, and a scrape above its limit is"
    " discarded: a fifth of the limit is room for one such step.",
    "Our fleet configuration sets sample_limit to twice the budget (stack/deploy/fleet/budget.py), so a scrape at this"
    " line is far above it.",
)

KV_TRANSFERS_FAILED = Threshold(
    "kv_transfers_failed",
    3.0,
    Unit.COUNT,
    "One transfer fails with every restart of a peer; three on one engine within ten minutes are no single restart.",
    "Judgement; a healthy pair counted none in 15 transfers (vLLM 0.32, NIXL over TCP).",
)
KV_TRANSFER_P95 = Threshold(
    "kv_transfer_p95",
    1.0,
    Unit.SECONDS,
    "A transfer is part of the time to first token, of which a chat allows 2.5 s. It lies on a bound of NIXL's"
    " histogram, so the estimate is exact there.",
    "Bounds of vLLM's NIXL metrics (0.75, 1, 5 s); undisturbed transfers took 11 to 91 ms over loopback (vLLM 0.32).",
)
KV_TRANSFERS_COMPARED = Threshold(
    "kv_transfers_compared_at_least",
    10.0,
    Unit.COUNT,
    "With fewer than ten transfers in ten minutes one slow transfer is the p95.",
    "Judgement.",
)

ALL: tuple[Threshold, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Threshold))


def named(name: str) -> Threshold:
    """Return the threshold of this name. Raises ValueError, with the nearest name, for an unknown one."""
    threshold = next((each for each in ALL if each.name == name), None)
    if threshold is None:
        near = difflib.get_close_matches(name, [each.name for each in ALL], n=1)
        raise ValueError(f"thresholds.{name} is unknown" + (f"; did you mean thresholds.{near[0]}?" if near else ""))
    return threshold
