"""Recording rules: growth within 5 min by model, and expressions for sums of it over long windows.

An hour's quantile over the buckets of every engine, or a day's ratio, costs Prometheus more than all other rules
together; sums of recorded growth cost little. Ratios are divided after summing: an average of ratios would weigh an
idle night like a busy noon, and the ratio of 5 idle minutes is NaN, which makes every average over it NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alerts.labels import ENGINE, ENGINE_POD, JOB, MODEL, TARGET_POD, by, on
from alerts.rules import Recording
from alerts.settings import Settings
from exporters.catalogue import promql, reconciled, sidecar, vllm
from exporters.catalogue.metric import EngineRole, Metric
from exporters.catalogue.prometheus import PROCESS_START, UP
from exporters.text import parse_window

INTERVAL, SELDOM = "1m", "5m"  # of recording growth, and hours; a query over days pays for every sample
# counts use steps of 1 min, of 5 min over more than an hour, and hourly growth from LONG on
OVER, STEP, HOURLY, LONG = "5m", "1m", "1h", "1d"
# not summed from 5 min: that misses growth during an outage of Prometheus, and log and engines are scraped separately
RECONCILE_OVER = "30m"
DISCONNECTED = ('outcome="client_abort"',)

FINISHED, HITS, LOOKUPS = (
    f"cluster_model_name:{what}:increase"
    for what in ("vllm_request_success", "vllm_prefix_cache_hits", "vllm_prefix_cache_queries")
)
BY_REASON = "cluster_model_name_finished_reason:vllm_request_success:increase"
REQUESTS = "cluster_model_name_outcome:vllm_watch_requests:increase"
# by engine, from vLLM's HTTP status alone; absent for a model with a request log, which counts what a status hides
HTTP_FAILED, HTTP_ENDED = (
    f"cluster_namespace_job_instance_pod_model_name:vllm_http_{what}:increase" for what in ("failed", "ended")
)
FINISHED_TOTAL, LOGGED_TOTAL = (
    f"cluster:vllm_request_success:increase{RECONCILE_OVER}",
    f"cluster_outcome:vllm_watch_requests:increase{RECONCILE_OVER}",
)
# scrape jobs with a target; reading a day of `up` itself costs twenty times as much
JOBS = "cluster_namespace_job:up:group"
# models of each engine while it answers; a query over a day needs to know what an engine served that is gone
SERVED = "cluster_namespace_job_instance_model_name:vllm_num_requests_running:group"
AGE = "cluster_namespace_job_instance_pod:process_age_seconds:min"
QUEUED = "cluster_namespace_job_instance_model_name:vllm_queue_time_seconds:p95_5m"
TTFT, INTER_TOKEN = (
    f"cluster_model_name_le:{what}_bucket:increase"
    for what in ("vllm_ttft_seconds", "vllm_inter_token_latency_seconds")
)
_COUNTED: dict[str, tuple[Metric, str]] = {
    HITS: (vllm.PREFIX_CACHE_HITS, "prompt tokens found in the prefix cache"),
    LOOKUPS: (vllm.PREFIX_CACHE_QUERIES, "prompt tokens looked up in the prefix cache"),
}
_FIRST_TOKENS = "times to first token, by bucket, that were added"
_GAPS = "times between tokens, by bucket, that were added"
TTFT_P95, INTER_TOKEN_P95 = "p95 of the time to first token", "p95 of the time between tokens"
GENERATED, PROMPTED = "generated tokens a second", "prompt tokens a second"
FINISHED_REQUESTS, LOGGED_REQUESTS = "requests that engines finished", "requests that the log shows as ended"
HTTP_REQUESTS_ENDED = "requests that ended with HTTP status 2xx or 5xx, by engine, of models without a request log"
_P95 = {
    TTFT: ("cluster_model_name:vllm_ttft_seconds:p95_", TTFT_P95),
    INTER_TOKEN: ("cluster_model_name:vllm_inter_token_latency_seconds:p95_", INTER_TOKEN_P95),
}
_COMPARED = ("30m", "1h")
_NOT_DECODE = promql.not_of_role(EngineRole.DECODE)


def recordings(s: Settings) -> Iterator[Recording]:
    """Return the rules that alerts and longer windows rest on."""
    window = s.window(OVER)
    yield Recording(
        JOBS,
        f"group {by(JOB)} ({promql.series(UP, (s.ours,))})",
        "1 for each scrape job that has an engine, a gateway or a sidecar, up or not",
    )
    yield Recording(
        SERVED,
        f"group {by(ENGINE)} ({promql.series(vllm.NUM_REQUESTS_RUNNING, (s.engine,))})",
        "1 for each model of each engine that answers",
    )
    yield Recording(AGE, promql.age(PROCESS_START, TARGET_POD, (s.engine,)), "how long an engine's process has run")
    yield Recording(
        QUEUED,
        promql.bounded_quantile(0.95, vllm.REQUEST_QUEUE_TIME, window, ENGINE, (_NOT_DECODE,)),
        "p95 of the time in the engine's queue, by engine; without decode engines, where it contains the KV transfer",
    )
    yield Recording(TTFT + OVER, _first_tokens(window), _FIRST_TOKENS)
    yield Recording(INTER_TOKEN + OVER, promql.shared_buckets(vllm.INTER_TOKEN_LATENCY, window, MODEL), _GAPS)
    for what, (metric, meaning) in _COUNTED.items():
        yield Recording(what + OVER, promql.growth(metric, window, MODEL), meaning)
    by_reason = promql.growth(vllm.REQUEST_SUCCESS, window, (*MODEL, "finished_reason"))
    yield Recording(BY_REASON + OVER, by_reason, f"{FINISHED_REQUESTS}, by reason")
    yield Recording(FINISHED + OVER, f"sum {by(MODEL)} ({BY_REASON}{OVER})", FINISHED_REQUESTS)
    yield Recording(REQUESTS + OVER, promql.growth(sidecar.REQUESTS, window, (*MODEL, "outcome")), LOGGED_REQUESTS)
    yield from _by_status(s)
    for what, (name, meaning) in _P95.items():
        yield from (Recording(name + over, quantile(0.95, what, over, s), meaning) for over in _COMPARED)
    in_all = s.window(RECONCILE_OVER)
    yield Recording(FINISHED_TOTAL, promql.growth(vllm.REQUEST_SUCCESS, in_all, ("cluster",)), FINISHED_REQUESTS)
    yield Recording(LOGGED_TOTAL, promql.growth(sidecar.REQUESTS, in_all, ("cluster", "outcome")), LOGGED_REQUESTS)


def _first_tokens(window: str) -> str:
    """Return times to first token by bucket: of the engines, or of the clients for a model with prefill engines.

    No engine of a pair knows its whole time to first token, so only the request log does. Without a log it is that of
    the decode engines, which lacks the prefill."""
    engines, clients = (
        promql.shared_buckets(metric, window, MODEL) for metric in (vllm.TIME_TO_FIRST_TOKEN, sidecar.TTFT)
    )
    prefill = promql.series(vllm.NUM_REQUESTS_RUNNING, (promql.of_role(EngineRole.PREFILL),))
    of_pairs = f"({clients} and {on(MODEL)} {prefill})"
    return f"{of_pairs} or {engines} unless {on(MODEL)} {of_pairs}"


def _by_status(s: Settings) -> Iterator[Recording]:
    """Return the rules that count HTTP responses of engines whose model has no request log.

    A log is there if it has requests of the model, or if a sidecar reconciles the model's engines with it: the log of a
    model with an alias has another name. Rejections by the engine's own limit are subtracted; some of them have status
    200, so the difference is limited to 0."""

    def answered(where: tuple[str, ...]) -> str:
        grown = promql.growth(vllm.HTTP_REQUESTS, s.window(OVER), TARGET_POD, (*vllm.HTTP_INFERENCE, *where))
        return promql.with_labels_of(grown, vllm.NUM_REQUESTS_RUNNING, ENGINE_POD, TARGET_POD)

    logged = f"unless {on(MODEL)} {requests(s)} unless {on(MODEL)} {promql.series(reconciled.SETTLED)}"
    yield Recording(HTTP_ENDED + OVER, f"{answered(vllm.HTTP_ENDED)} {logged}", HTTP_REQUESTS_ENDED)
    failed, ended = answered(vllm.HTTP_FAILED), HTTP_ENDED + OVER
    rejected = promql.growth(vllm.ADMISSION_REJECTIONS, s.window(OVER), ENGINE_POD)
    yield Recording(
        HTTP_FAILED + OVER,
        f"(clamp_min({failed} - ({rejected} or {failed} * 0), 0) or {ended} * 0) and {ended}",
        "those with HTTP status 5xx, less rejections by the engine's own limit",
    )


def hours(s: Settings, within_minutes: Iterable[Recording], more: Iterable[str] = ()) -> Iterator[Recording]:
    """Return growth within an hour, for windows of days: of the counts by model, and of the names in `more`.

    within_minutes: recordings over five minutes, from which the meanings are taken."""
    meanings = {recording.record: recording.meaning for recording in within_minutes}
    for what in (FINISHED, HITS, LOOKUPS, REQUESTS, *more):
        yield Recording(what + HOURLY, counted(what, HOURLY, s), meanings[what + OVER])


def lost_jobs(s: Settings, which: str) -> str:
    """Return the scrape jobs that had a target within the last day and have none now: service discovery lost them, so
    `up` is absent and not 0. which: a matcher on the job."""
    return f"last_over_time({JOBS}{{{which}}}[{s.window('1d')}]) unless group {by(JOB)} ({promql.series(UP, (which,))})"


def counted(what: str, window: str, s: Settings, offset: str = "", where: tuple[str, ...] = ()) -> str:
    """Return how many events happened within a window, by the labels of the recorded series.

    Growth within 5 min is summed at every step, and divided by the steps in 5 min, because each event is in as many of
    them. What was not recorded counts as 0; a mean would extrapolate it.
    what: a recorded name without its window. window, offset: durations such as 30m. where: matchers."""
    if parse_window(window) >= parse_window(LONG):
        return f"{_all(what, window, s, where, offset)} / {parse_window(HOURLY) // parse_window(SELDOM)}"
    if window == OVER:
        return _all(what, window, s, where, offset)
    step = STEP if parse_window(window) <= parse_window(HOURLY) else OVER
    times = parse_window(OVER) // parse_window(step)
    summed = f"sum_over_time({what}{OVER}{_matching(where)}[{s.window(window)}:{s.window(step)}]{_before(offset, s)})"
    return f"{summed} / {times}" if times > 1 else summed


def share(part: str, total: str, window: str, s: Settings, where: tuple[str, ...] = ()) -> str:
    """Return the share (0 to 1) of one count in another within a window; absent while the total is 0.

    where: matchers on `part` alone."""
    return promql.per(
        f"sum {by(MODEL)} ({_all(part, window, s, where)})" if where else _all(part, window, s), _all(total, window, s)
    )


def requests(s: Settings, where: tuple[str, ...] = (), window: str = OVER) -> str:
    """Return the requests in the log, by cluster and model. Over more than 5 min events count several times: divide
    the result by another of the same window."""
    return f"sum {by(MODEL)} ({_all(REQUESTS, window, s, where)})"


def by_status(what: str) -> str:
    """Return HTTP responses within 5 min, by cluster and model; absent for a model with a request log."""
    return f"sum {by(MODEL)} ({what}{OVER})"


def quantile(q: float, what: str, window: str, s: Settings, offset: str = "") -> str:
    """Return a quantile over a window; absent while nothing was observed."""
    return f"histogram_quantile({q}, {_all(what, window, s, offset=offset)}) >= 0"


def p95(what: str, window: str, s: Settings, offset: str = "") -> str:
    """Return a recorded p95, for comparison with its own past. Raises ValueError for a window without a recording."""
    if window not in _COMPARED:
        raise ValueError(f"no p95 over {window} is recorded, only over {' and '.join(_COMPARED)}")
    return f"{_P95[what][0]}{window}{_before(offset, s)}"


def observed(what: str, where: str = 'le="+Inf"') -> str:
    """Return the observations of a histogram within 5 min up to the bound that `where` selects, by cluster and
    model."""
    return f"sum {by(MODEL)} ({what}{OVER}{{{where}}})"


def _all(what: str, window: str, s: Settings, where: tuple[str, ...] = (), offset: str = "") -> str:
    """Return the sum of all samples recorded within a window. Each event is in several samples, so this is no count:
    divide it by another sum, or take a quantile. It costs a fourth of the steps of a count."""
    over = "" if window == OVER else f"[{s.window(window)}]"
    each = HOURLY if parse_window(window) >= parse_window(LONG) else OVER
    selected = f"{what}{each}{_matching(where)}{over}{_before(offset, s)}"
    return f"sum_over_time({selected})" if over else selected


def _matching(where: tuple[str, ...]) -> str:
    return f"{{{', '.join(where)}}}" if where else ""


def _before(offset: str, s: Settings) -> str:
    return f" offset {s.window(offset)}" if offset else ""
