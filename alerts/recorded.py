"""Growth within five minutes, recorded for each model, and its sums over long windows.

An hour's quantile over every engine's buckets, or a day's ratio, costs a Prometheus more than all other rules together;
the sums of what was recorded cost next to nothing. Ratios divide such sums late: an average of ratios would weigh an
idle night like a busy noon, and the ratio of an idle five minutes is NaN, which poisons every average that it is in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alerts.labels import ENGINE, JOB, MODEL, TARGET, by
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
AGE = "cluster_namespace_job_instance:process_age_seconds:min"
QUEUED = "cluster_namespace_job_instance_model_name:vllm_queue_time_seconds:p95_5m"
TTFT, INTER_TOKEN = (
    f"cluster_model_name_le:{what}_bucket:increase"
    for what in ("vllm_ttft_seconds", "vllm_inter_token_latency_seconds")
)
_COUNTED: dict[str, tuple[Metric, str]] = {
    HITS: (vllm.PREFIX_CACHE_HITS, "prompt tokens found in the prefix cache"),
    LOOKUPS: (vllm.PREFIX_CACHE_QUERIES, "prompt tokens looked up in the prefix cache"),
}
_BUCKETS: dict[str, tuple[Metric, str]] = {
    TTFT: (vllm.TIME_TO_FIRST_TOKEN, "times to first token, by bucket, that were added"),
    INTER_TOKEN: (vllm.INTER_TOKEN_LATENCY, "times between tokens, by bucket, that were added"),
}
TTFT_P95, INTER_TOKEN_P95 = "p95 of the time to first token", "p95 of the time between tokens"
GENERATED, PROMPTED = "generated tokens a second", "prompt tokens a second"
FINISHED_REQUESTS, LOGGED_REQUESTS = "requests that engines finished", "requests that the log shows as ended"
_P95 = {
    TTFT: ("cluster_model_name:vllm_ttft_seconds:p95_", TTFT_P95),
    INTER_TOKEN: ("cluster_model_name:vllm_inter_token_latency_seconds:p95_", INTER_TOKEN_P95),
}
_COMPARED = ("30m", "1h")


def recordings(s: Settings) -> Iterator[Recording]:
    window = s.window(OVER)
    yield Recording(
        JOBS,
        f"group {by(JOB)} ({promql.series(UP, (s.ours,))})",
        "1 for each scrape job that has an engine, a gateway or a sidecar, up or not",
    )
    yield Recording(AGE, promql.age(PROCESS_START, TARGET, (s.engine,)), "how long an engine's process has run")
    yield Recording(
        QUEUED,
        promql.bounded_quantile(0.95, vllm.REQUEST_QUEUE_TIME, window, ENGINE),
        "p95 of the time in the engine's queue, by engine",
    )
    for what, (metric, meaning) in _BUCKETS.items():
        yield Recording(what + OVER, promql.shared_buckets(metric, window, MODEL), meaning)
    for what, (metric, meaning) in _COUNTED.items():
        yield Recording(what + OVER, promql.growth(metric, window, MODEL), meaning)
    by_reason = promql.growth(vllm.REQUEST_SUCCESS, window, (*MODEL, "finished_reason"))
    yield Recording(BY_REASON + OVER, by_reason, f"{FINISHED_REQUESTS}, by reason")
    yield Recording(FINISHED + OVER, f"sum {by(MODEL)} ({BY_REASON}{OVER})", FINISHED_REQUESTS)
    yield Recording(REQUESTS + OVER, promql.growth(sidecar.REQUESTS, window, (*MODEL, "outcome")), LOGGED_REQUESTS)
    for what, (name, meaning) in _P95.items():
        yield from (Recording(name + over, quantile(0.95, what, over, s), meaning) for over in _COMPARED)
    in_all = s.window(BOOKS)
    yield Recording(FINISHED_IN_ALL, promql.growth(vllm.REQUEST_SUCCESS, in_all, ("cluster",)), FINISHED_REQUESTS)
    yield Recording(LOGGED_IN_ALL, promql.growth(sidecar.REQUESTS, in_all, ("cluster", "outcome")), LOGGED_REQUESTS)


def hours(s: Settings, within_minutes: Iterable[Recording], more: Iterable[str] = ()) -> Iterator[Recording]:
    """Yield what was counted within an hour, for windows of days; of `more` too. within_minutes: where each of them is
    recorded over five minutes."""
    meanings = {recording.record: recording.meaning for recording in within_minutes}
    for what in (FINISHED, HITS, LOOKUPS, REQUESTS, *more):
        yield Recording(what + HOURLY, counted(what, HOURLY, s), meanings[what + OVER])


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
    return f"{_P95[what][0]}{window}{_before(offset, s)}"


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
