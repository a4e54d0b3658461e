"""Series and samples of a fleet: what Prometheus stores, and sample_limit of a scrape.

Invariant: nothing is counted twice. What a team, a model, a GPU or an upstream costs is computed from the catalogue
(labels, kinds, bounds) and from the vocabularies of the code that fills the labels; what vLLM shows is counted on pages
that were captured. What a sidecar and a gateway have for themselves is typed in, as a round number above what
tests/stack/deploy/test_budget.py counts on their pages. ADAPTER alone rests on no page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from exporters.accounting.reconciled import EXTRA_CAUSES, KINDS, MISSING_CAUSES
from exporters.catalogue import attributed, bounds, gateway, gpu, reconciled, sidecar
from exporters.catalogue.metric import Kind, Metric
from exporters.fine_ladder import bounds_of
from exporters.gpu.series import XIDS
from exporters.requests.counters import FINISH_REASONS, REASONS_LIMIT
from exporters.requests.grouped_latency import PAIRS
from exporters.requests.record import UNREADABLE, Outcome

OUTCOMES = len(get_args(Outcome))
STATUSES = 4  # 2xx, 4xx, 5xx and none
# series that Prometheus makes itself for each target: three of them with --enable-feature=extra-scrape-metrics, as we
# start it
MADE_BY_SCRAPE = 8
# sample_limit over what a page is expected to hold at most: growth is seen (VLLMScrapeNearLimit) before it costs a page
ROOM = 2.0

# Ours: how many values a label takes beside those that a subject brings along (a model, a team, a GPU, an engine).
_VALUES: dict[Metric, int] = {
    sidecar.REQUESTS: OUTCOMES + 1,  # and unknown
    sidecar.REASONS: REASONS_LIMIT + OUTCOMES - 1,
    # and __other__ of each outcome but ok; a reason has one outcome, as in our own vocabulary
    sidecar.FINISHES: len(FINISH_REASONS) + 1,  # and other
    sidecar.UNREADABLE: len(UNREADABLE) + 1,  # and other
    sidecar.TOKENS: 3, sidecar.ESTIMATED_TOKENS: 2, sidecar.CACHE_LOOKUPS: 2,
    attributed.TEAM_SECONDS: 2, attributed.TEAM_ENERGY: 1, attributed.COST: 2, attributed.API_COST: 1,
    reconciled.LOGGED: len(KINDS), reconciled.ENGINE: len(KINDS), reconciled.OPEN: len(KINDS),
    reconciled.MISSING_IN_LOG: len(KINDS) * len(MISSING_CAUSES),
    reconciled.EXTRA_IN_LOG: len(KINDS) * len(EXTRA_CAUSES),
    reconciled.UNFINISHED: 2, reconciled.ABORTED: 2,
    gpu.TEMPERATURE: 2, gpu.THROTTLE: 5, gpu.THROTTLED_NOW: 6, gpu.ECC_ERRORS: 2, gpu.REMAPPED_ROWS: 2,
    gpu.XID_ERRORS: len(XIDS) + 1,
    gpu.NVLINK_ERRORS: 4, gpu.NVLINK_BYTES: 2, gpu.ABSENT: 8, gpu.MIG_ACTIVITY: 5,
    gateway.REQUESTS: OUTCOMES * STATUSES, gateway.REJECTED: 22, gateway.ATTEMPTS: REASONS_LIMIT, gateway.RELOADS: 2,
    gateway.UNREADABLE: 24 * len(UNREADABLE),  # recorded routes, with room for some
}  # fmt: skip
_BOUNDS: dict[Metric, tuple[float, ...]] = {
    sidecar.TTFT: bounds.TTFT_S,
    sidecar.TPOT: bounds.OUR_TPOT_S,
    sidecar.TTFT_OVERHEAD: bounds.TTFT_S,
    gateway.LOOP_LAG: gateway.LOOP_LAG_BOUNDS_S,
    sidecar.ADAPTER_TTFT: bounds.GROUPED_TTFT_S,
    sidecar.ROUTE_E2E: bounds.GROUPED_REQUEST_S,
    **dict.fromkeys((sidecar.E2E, sidecar.QUEUE, sidecar.ENGINE_QUEUE), bounds.OUR_REQUEST_S),
}
SOURCE_ERRORS = 8  # reasons for which a source may fail to be read


def series(metric: Metric) -> int:
    """Return the most series that one family has for one subject; of a histogram every bound, +Inf, sum and count, and
    the native one."""
    each = classic_series(metric) + metric.native if metric.kind is Kind.HISTOGRAM else 1
    return each * _VALUES.get(metric, 1)


def classic_series(metric: Metric) -> int:
    """Return the series of a histogram that are absent where Prometheus stores only native ones: every bound, +Inf, sum
    and count."""
    return len(_BOUNDS[metric]) + 3


def _all(metrics: Iterable[Metric], *having: str) -> int:
    """Return the series of the families that have all of these labels."""
    return sum(series(metric) for metric in metrics if set(having) <= set(metric.labels))


_OF_TEAMS = [metric for metric in (*sidecar.REQUEST_TRAFFIC, *attributed.ATTRIBUTED) if "team" in metric.labels]
_OF_MODELS = [
    metric for metric in (*reconciled.RECONCILED, *attributed.ATTRIBUTED)
    if "model_name" in metric.labels and not {"team", "uuid"} & set(metric.labels)
]  # fmt: skip
_OF_SOURCES = (sidecar.SOURCE_UP, sidecar.SOURCE_LAST_SUCCESS, sidecar.SOURCE_AGE, sidecar.SOURCE_DURATION)

SIDECAR_TEAM_AND_MODEL = _all(_OF_TEAMS)
SIDECAR_TEAM_AND_MODEL_NATIVE = SIDECAR_TEAM_AND_MODEL - sum(
    classic_series(metric) for metric in _OF_TEAMS if metric.native
)
# What the fine ladder adds for a team and a model.
SIDECAR_FINE_LADDER = sum(len(bounds_of(metric, bounds)) - len(bounds) for metric, bounds in _BOUNDS.items())
SIDECAR_MODEL = _all(_OF_MODELS) + 3 + 4  # what is idle, aborted and nobody's: seconds, energy, cost
SIDECAR_ENGINE = _all(sidecar.ENGINES) + len(_OF_SOURCES) + SOURCE_ERRORS
SIDECAR_GPU = _all(gpu.GPU, "uuid") - _all(gpu.MIG) + _all(attributed.ATTRIBUTED, "uuid")
SIDECAR_INSTANCE = _all(gpu.MIG)  # of a GPU under MIG, beside what the GPU has
SIDECAR_GROUPED = _all(sidecar.GROUPED) * (PAIRS + 1)  # by route and by adapter, and __other__ of each
SIDECAR_FIXED = 150  # two logs, the state, spans, events and their sources: a test counts less on a real page
GATEWAY_TEAM = _all(
    (
        gateway.REQUESTS,
        gateway.INFLIGHT,
        gateway.RUNNING,
        gateway.SLOTS_HELD,
        gateway.WAITING,
        gateway.WAIT_ESTIMATE,
        gateway.REJECTED,
    )
)
GATEWAY_UPSTREAM = _all((gateway.UPSTREAM_UP, gateway.ENGINE_STATE, gateway.UPSTREAM_INFLIGHT, gateway.ATTEMPTS))
# itself, its log, its loop, admission: a test counts less on a real page
GATEWAY_FIXED = 60 + series(gateway.UNREADABLE)
CREATED = 2  # prometheus_client also exposes when each counter was created: at most twice as many samples


@dataclass(frozen=True, slots=True)
class EnginePage:
    """Samples of one scrape of vLLM with one model: in all, and those that each data-parallel rank has for
    itself."""

    samples: int
    of_a_rank: int


# Counted on the fullest captured page of each release, after requests of every kind: chat, completions, refusals,
# preemptions.
ENGINE: Mapping[str, EnginePage] = {
    "0.10": EnginePage(403, 300),
    "0.20": EnginePage(534, 414),
    "0.32": EnginePage(559, 435),
}
NEWEST = "0.32"
# Histograms of each family of --custom-histogram-buckets, and what the recommended ladder adds to them for each rank.
HISTOGRAMS: Mapping[str, int] = {"time_to_first_token": 1, "inter_token_latency": 2, "request_latency": 5}
_DEFAULT = {
    "time_to_first_token": bounds.TTFT_S,
    "inter_token_latency": bounds.INTER_TOKEN_S,
    "request_latency": bounds.REQUEST_S,
}
LADDER = sum(
    count * (len(bounds.ENGINE_LADDER[family]) - len(_DEFAULT[family])) for family, count in HISTOGRAMS.items()
)
# an allowance: adapters add no label to vLLM's families, but every combination that ran together is a series, for ever
ADAPTER = 4


@dataclass(frozen=True, slots=True)
class Fleet:
    """Size of a fleet. models, teams: those that one sidecar sees. Raises ValueError for less
    than one engine."""

    engines: int
    models: int = 1
    teams: int = 50
    ranks: int = 1
    gateways: int = 1
    sidecars: int = 1
    gpus: int = 0
    adapters: int = 0
    release: str = NEWEST

    def __post_init__(self) -> None:
        if (
            min(self.engines, self.ranks, self.models) < 1
            or min(self.teams, self.gateways, self.sidecars, self.gpus, self.adapters) < 0
        ):
            raise ValueError(
                "a fleet has one engine, rank and model or more, and nothing of which there is less than none"
            )
        if self.release not in ENGINE:
            raise ValueError(f"{self.release!r} is no release whose page was counted; there are {', '.join(ENGINE)}")


def engine_page(ranks: int = 1, adapters: int = 0, release: str = NEWEST, ladder: bool = False) -> int:
    """Samples of one engine's page: a + b x ranks, and what adapters and the recommended ladder add."""
    page = ENGINE[release]
    return page.samples + page.of_a_rank * (ranks - 1) + ADAPTER * adapters + (LADDER * ranks if ladder else 0)


def sidecar_page(teams: int, models: int, engines: int, gpus: int) -> int:
    """Samples of one sidecar's page at most, when every team used every model and met every outcome."""
    return (
        SIDECAR_FIXED
        + SIDECAR_GROUPED
        + SIDECAR_TEAM_AND_MODEL * teams * models
        + SIDECAR_MODEL * models
        + SIDECAR_ENGINE * engines
        + SIDECAR_GPU * gpus
    )


def gateway_page(teams: int, upstreams: int) -> int:
    """Return the samples of one gateway's page at most; two teams more are __unknown__ and __probe__."""
    return CREATED * (GATEWAY_FIXED + GATEWAY_TEAM * (teams + 2) + GATEWAY_UPSTREAM * upstreams)


def total(fleet: Fleet) -> Mapping[str, int]:
    """Series of a fleet by scrape job, what Prometheus makes for every target included; engines and GPUs spread evenly
    over sidecars."""
    each = max(1, fleet.sidecars)
    return {
        "engines": fleet.engines * (engine_page(fleet.ranks, fleet.adapters, fleet.release) + MADE_BY_SCRAPE),
        "sidecars": fleet.sidecars
        * (
            sidecar_page(fleet.teams, fleet.models, math.ceil(fleet.engines / each), math.ceil(fleet.gpus / each))
            + MADE_BY_SCRAPE
        ),
        "gateways": fleet.gateways * (gateway_page(fleet.teams, fleet.engines) + MADE_BY_SCRAPE),
    }


def limit(page: int) -> int:
    """sample_limit for pages of this size: with room, and round."""
    return math.ceil(page * ROOM / 500) * 500


# What one page of each scrape job is expected to hold at most; engines and GPUs are those of one sidecar.
PAGES: Mapping[str, int] = {
    "vllm": engine_page(ranks=8, ladder=True), "gateway": gateway_page(teams=50, upstreams=64),
    "sidecar": sidecar_page(teams=50, models=4, engines=8, gpus=8),
}  # fmt: skip
SAMPLE_LIMIT: Mapping[str, int] = {job: limit(page) for job, page in PAGES.items()}
