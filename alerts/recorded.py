"""Growth within five minutes, recorded for each model, and its sums over long windows.

An hour's quantile over every engine's buckets, or a day's ratio, costs a Prometheus more than all other rules together; the sums of what was
recorded cost next to nothing. Ratios divide such sums late: an average of ratios would weigh an idle night like a busy noon, and the ratio of
an idle five minutes is NaN, which poisons every average that it is in."""

from __future__ import annotations

from collections.abc import Iterator

from alerts.rules import Recording
from alerts.settings import Settings, seconds
from alerts.subjects import MODEL, by
from exporters.catalogue import ours, promql, vllm
from exporters.catalogue.metric import Metric

OVER, STEP, HOURLY, LONG = "5m", "1m", "1h", "1d"  # from LONG on, hours are added up instead of minutes
BOOKS = "30m"  # in one piece: sums of five minutes miss what was counted while nobody looked, and log and engines are looked at apart
HUNG_UP = ('outcome="client_abort"',)

FINISHED, HITS, LOOKUPS = (
    f"cluster_model_name:{what}:increase" for what in ("vllm_request_success", "vllm_prefix_cache_hits", "vllm_prefix_cache_queries")
)
REQUESTS = "cluster_model_name_outcome:vllm_watch_requests:increase"
FINISHED_IN_ALL, LOGGED_IN_ALL = f"cluster:vllm_request_success:increase{BOOKS}", f"cluster_outcome:vllm_watch_requests:increase{BOOKS}"
TTFT, INTER_TOKEN = (
    f"cluster_model_name_le:{what}_bucket:increase" for what in ("vllm_ttft_seconds", "vllm_inter_token_latency_seconds")
)  # fmt: skip
_COUNTED: dict[str, Metric] = {FINISHED: vllm.REQUEST_SUCCESS, HITS: vllm.PREFIX_CACHE_HITS, LOOKUPS: vllm.PREFIX_CACHE_QUERIES}
_BUCKETS: dict[str, Metric] = {TTFT: vllm.TIME_TO_FIRST_TOKEN, INTER_TOKEN: vllm.INTER_TOKEN_LATENCY}


def recordings(s: Settings) -> Iterator[Recording]:
    window = s.window(OVER)
    yield from (Recording(what + OVER, promql.buckets(metric, window, MODEL)) for what, metric in _BUCKETS.items())
    yield from (Recording(what + OVER, promql.growth(metric, window, MODEL)) for what, metric in _COUNTED.items())
    yield Recording(REQUESTS + OVER, promql.growth(ours.REQUESTS, window, (*MODEL, "outcome")))
    yield from (hourly(what, s) for what in (FINISHED, HITS, LOOKUPS, REQUESTS))
    yield Recording(FINISHED_IN_ALL, promql.growth(vllm.REQUEST_SUCCESS, s.window(BOOKS), ("cluster",)))
    yield Recording(LOGGED_IN_ALL, promql.growth(ours.REQUESTS, s.window(BOOKS), ("cluster", "outcome")))


def hourly(what: str, s: Settings) -> Recording:
    """The same within an hour, for sums over days."""
    return Recording(what + HOURLY, counted(what, HOURLY, s))


def counted(what: str, window: str, s: Settings, offset: str = "") -> str:
    """How many within a window, by cluster and model."""
    return _counted(what, window, s, offset=offset)


def requests(window: str, s: Settings, where: tuple[str, ...] = ()) -> str:
    """How many requests the log has, by cluster and model."""
    return f"sum {by(MODEL)} ({_counted(REQUESTS, window, s, where)})"


def quantile(q: float, what: str, window: str, s: Settings, offset: str = "") -> str:
    """A quantile over a window, in steps of five minutes; nothing while nothing happened."""
    return f"histogram_quantile({q}, sum_over_time({what}{OVER}[{s.window(window)}:{s.window(OVER)}]{_before(offset, s)})) >= 0"


def observed(what: str, where: str = 'le="+Inf"') -> str:
    """How many observations of a histogram within five minutes, up to the bound that `where` names, by cluster and model."""
    return f"sum {by(MODEL)} ({what}{OVER}{{{where}}})"


def _counted(what: str, window: str, s: Settings, where: tuple[str, ...] = (), offset: str = "") -> str:
    matchers = f"{{{', '.join(where)}}}" if where else ""
    if window == OVER:
        return f"{what}{OVER}{matchers}{_before(offset, s)}"
    if seconds(window) >= seconds(LONG):
        return f"sum_over_time({what}{HOURLY}{matchers}[{s.window(window)}:{s.window(HOURLY)}]{_before(offset, s)})"
    # What happened in five minutes, at every step; an event is in as many of them as steps go into five minutes. What was not recorded is nothing;
    # a mean would take it for more of the same.
    step = STEP if seconds(window) <= seconds(HOURLY) else OVER
    times = seconds(OVER) // seconds(step)
    summed = f"sum_over_time({what}{OVER}{matchers}[{s.window(window)}:{s.window(step)}]{_before(offset, s)})"
    return f"{summed} / {times}" if times > 1 else summed


def _before(offset: str, s: Settings) -> str:
    return f" offset {s.window(offset)}" if offset else ""
