"""Growth within five minutes, recorded for each model, and its sums over long windows.

An hour's quantile over every engine's buckets, or a day's ratio, costs a Prometheus more than all other rules together;
the sums of what was recorded cost next to nothing. Ratios divide such sums late: an average of ratios would weigh an
idle night like a busy noon, and the ratio of an idle five minutes is NaN, which poisons every average that it is in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alerts.labels import ENGINE, JOB, MODEL, TARGET_POD, by
from alerts.rules import Recording
from alerts.settings import Settings
from exporters.catalogue import promql, sidecar, vllm
from exporters.catalogue.metric import Metric
from exporters.catalogue.prometheus import PROCESS_START, UP
from exporters.text import parse_window

INTERVAL, SELDOM = "1m", "5m"  # how often growth and hours are recorded: who reads days of it pays for every sample
# counts go in steps of a minute, of five over more than an hour, and from LONG on are of hours
OVER, STEP, HOURLY, LONG = "5m", "1m", "1h", "1d"
# in one piece: sums of five minutes miss what was counted while nobody looked, and log and engines are looked at apart
BOOKS = "30m"
HUNG_UP = ('outcome="client_abort"',)

FINISHED, HITS, LOOKUPS = (
    f"cluster_model_name:{what}:increase"
    for what in ("vllm_request_success", "vllm_prefix_cache_hits", "vllm_prefix_cache_queries")
)
BY_REASON = "cluster_model_name_finished_reason:vllm_request_success:increase"
REQUESTS = "cluster_model_name_outcome:vllm_watch_requests:increase"
FINISHED_IN_ALL, LOGGED_IN_ALL = (
    f"cluster:vllm_request_success:increase{BOOKS}",
    f"cluster_outcome:vllm_watch_requests:increase{BOOKS}",
)
# scrape jobs that had a target; a day of `up` itself costs twenty times as much to read
JOBS = "cluster_namespace_job:up:group"
AGE = "cluster_namespace_job_instance_pod:process_age_seconds:min"
QUEUED = "cluster_namespace_job_instance_model_name:vllm_queue_time_seconds:p95_5m"
TTFT, INTER_TOKEN = (
    f"cluster_model_name_le:{what}_bucket:increase"
    for what in ("vllm_ttft_seconds", "vllm_inter_token_latency_seconds")
)
_COUNTED: dict[str, Metric] = {HITS: vllm.PREFIX_CACHE_HITS, LOOKUPS: vllm.PREFIX_CACHE_QUERIES}
_BUCKETS: dict[str, Metric] = {TTFT: vllm.TIME_TO_FIRST_TOKEN, INTER_TOKEN: vllm.INTER_TOKEN_LATENCY}


_P95 = {
    TTFT: "cluster_model_name:vllm_ttft_seconds:p95_",
    INTER_TOKEN: "cluster_model_name:vllm_inter_token_latency_seconds:p95_",
}
_COMPARED = ("30m", "1h")


def recordings(s: Settings) -> Iterator[Recording]:
    window = s.window(OVER)
    yield Recording(JOBS, f"group {by(JOB)} ({promql.series(UP, (s.ours,))})")
    yield Recording(AGE, promql.age(PROCESS_START, TARGET_POD, (s.engine,)))
    yield Recording(QUEUED, promql.bounded_quantile(0.95, vllm.REQUEST_QUEUE_TIME, window, ENGINE))
    yield from (
        Recording(what + OVER, promql.shared_buckets(metric, window, MODEL)) for what, metric in _BUCKETS.items()
    )
    yield from (Recording(what + OVER, promql.growth(metric, window, MODEL)) for what, metric in _COUNTED.items())
    yield Recording(BY_REASON + OVER, promql.growth(vllm.REQUEST_SUCCESS, window, (*MODEL, "finished_reason")))
    yield Recording(FINISHED + OVER, f"sum {by(MODEL)} ({BY_REASON}{OVER})")
    yield Recording(REQUESTS + OVER, promql.growth(sidecar.REQUESTS, window, (*MODEL, "outcome")))
    yield from (
        Recording(p95 + over, quantile(0.95, what, over, s)) for what, p95 in _P95.items() for over in _COMPARED
    )
    yield Recording(FINISHED_IN_ALL, promql.growth(vllm.REQUEST_SUCCESS, s.window(BOOKS), ("cluster",)))
    yield Recording(LOGGED_IN_ALL, promql.growth(sidecar.REQUESTS, s.window(BOOKS), ("cluster", "outcome")))


def hours(s: Settings, more: Iterable[str] = ()) -> Iterator[Recording]:
    """The same within an hour, for windows of days; of `more` too."""
    yield from (
        Recording(what + HOURLY, counted(what, HOURLY, s)) for what in (FINISHED, HITS, LOOKUPS, REQUESTS, *more)
    )


def lost_jobs(s: Settings, which: str) -> str:
    """Return scrape jobs that had a target within the last day and have none now: service discovery lost them, so `up`
    is absent and not 0."""
    return f"last_over_time({JOBS}{{{which}}}[{s.window('1d')}]) unless group {by(JOB)} ({promql.series(UP, (which,))})"


def counted(what: str, window: str, s: Settings, offset: str = "", where: tuple[str, ...] = ()) -> str:
    """How many within a window, by the labels that are recorded.

    What happened in five minutes, added up at every step; an event is in as many of them as steps go into five minutes.
    What was not recorded is nothing; a mean would take it for more of the same."""
    if parse_window(window) >= parse_window(LONG):
        return f"{_all(what, window, s, where, offset)} / {parse_window(HOURLY) // parse_window(SELDOM)}"
    if window == OVER:
        return _all(what, window, s, where, offset)
    step = STEP if parse_window(window) <= parse_window(HOURLY) else OVER
    times = parse_window(OVER) // parse_window(step)
    summed = f"sum_over_time({what}{OVER}{_matching(where)}[{s.window(window)}:{s.window(step)}]{_before(offset, s)})"
    return f"{summed} / {times}" if times > 1 else summed


def share(part: str, whole: str, window: str, s: Settings, where: tuple[str, ...] = ()) -> str:
    """How much of one count the other is within a window, 0 to 1; nothing while the whole is nothing. where: which of
    the part."""
    return promql.per(
        f"sum {by(MODEL)} ({_all(part, window, s, where)})" if where else _all(part, window, s), _all(whole, window, s)
    )


def requests(s: Settings, where: tuple[str, ...] = (), window: str = OVER) -> str:
    """How many requests the log has, by cluster and model. Over more than five minutes a measure to be divided by
    another of the same window."""
    return f"sum {by(MODEL)} ({_all(REQUESTS, window, s, where)})"


def quantile(q: float, what: str, window: str, s: Settings, offset: str = "") -> str:
    """A quantile over a window; nothing while nothing happened."""
    return f"histogram_quantile({q}, {_all(what, window, s, offset=offset)}) >= 0"


def p95(what: str, window: str, s: Settings, offset: str = "") -> str:
    """A p95 to be compared with its own past: one that is recorded."""
    if window not in _COMPARED:
        raise ValueError(f"no p95 over {window} is recorded, only over {' and '.join(_COMPARED)}")
    return f"{_P95[what]}{window}{_before(offset, s)}"


def observed(what: str, where: str = 'le="+Inf"') -> str:
    """How many observations of a histogram within five minutes, up to the bound that `where` names, by cluster and
    model."""
    return f"sum {by(MODEL)} ({what}{OVER}{{{where}}})"


def _all(what: str, window: str, s: Settings, where: tuple[str, ...] = (), offset: str = "") -> str:
    """Everything recorded within a window: every event as often as it was recorded, so this is no count. Made to be
    divided by another, or by itself as a quantile does; costs a fourth of a count's steps."""
    over = "" if window == OVER else f"[{s.window(window)}]"
    each = HOURLY if parse_window(window) >= parse_window(LONG) else OVER
    selected = f"{what}{each}{_matching(where)}{over}{_before(offset, s)}"
    return f"sum_over_time({selected})" if over else selected


def _matching(where: tuple[str, ...]) -> str:
    return f"{{{', '.join(where)}}}" if where else ""


def _before(offset: str, s: Settings) -> str:
    return f" offset {s.window(offset)}" if offset else ""
