"""Dashboard Tuning: effect of the last change. Figures over time with the changes drawn in, and two windows side by
side.

Invariant: the dashboard shows values and gives no verdict. Two pictures differ by chance too, and more so
when the requests differed."""

from __future__ import annotations

from collections.abc import Callable

from alerts import thresholds
from alerts.thresholds import Threshold
from dashboards import queries
from dashboards.boards.latency import TWO_SIDES
from dashboards.model import Dashboard, DashboardRow, Panel, Query, Shape, Variable, shown_unit
from exporters.catalogue import promql, sidecar, vllm
from exporters.catalogue.metric import Unit

_AGO = ("5m", "15m", "30m", "1h", "3h", "6h", "12h", "1d", "2d", "7d")
_NOW = "1s"  # Prometheus 2 reads no offset of 0s
_BEFORE, _AFTER = "$before", "$after"
_RANGE = "$__range"
_PLACE = queries.where(sidecar.ENGINE_INFO)
_CONFIG = ("upstream", "version", "cache_dtype", "enable_prefix_caching")

Asked = Callable[[str], tuple[Query, ...]]  # the queries of a figure, that long ago


def _ttft(offset: str = "") -> tuple[Query, ...]:
    return (queries.p95(vllm.TIME_TO_FIRST_TOKEN, offset=offset),)


def _pace(offset: str = "") -> tuple[Query, ...]:
    return (queries.p95(vllm.INTER_TOKEN_LATENCY, offset=offset),)


def _waited(offset: str = "") -> tuple[Query, ...]:
    return (queries.mean(vllm.REQUEST_QUEUE_TIME, offset=offset),)


def _generated(offset: str = "") -> tuple[Query, ...]:
    return (queries.rate(vllm.GENERATION_TOKENS, offset=offset),)


def _hits(offset: str = "") -> tuple[Query, ...]:
    return (queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, offset=offset),)


def _errors(offset: str = "") -> tuple[Query, ...]:
    return (
        queries.share(sidecar.REQUESTS, sidecar.REQUESTS, called="log", part_only=sidecar.FAILED, offset=offset),
        queries.share(
            vllm.REQUEST_SUCCESS,
            vllm.REQUEST_SUCCESS,
            called="engine",
            part_only=('finished_reason="error"',),
            offset=offset,
        ),
    )


def _memory(offset: str = "") -> tuple[Query, ...]:
    return (queries.worst(vllm.KV_CACHE_USAGE, offset=offset),)


def _pair(
    slug: str,
    figure: str,
    good: str,
    act: str,
    asked: Asked,
    threshold: Threshold | None = None,
    detail: str = "",
    full_scale: bool = True,
    also: str = "",
) -> tuple[Panel, Panel]:
    """Yield the same value twice, side by side. Marks stand at their own time, not moved with the curve. also: what
    else the figure means."""

    def half(when: str, offset: str) -> Panel:
        return Panel(
            f"{slug}-{when}",
            f"{figure}: {when}",
            f"{figure}, drawn later by what is chosen as {when.capitalize()}. The two axes may differ in scale; marks"
            f" are not moved with the curve. {also}".rstrip(),
            good,
            act,
            asked(offset),
            threshold=threshold,
            detail=detail,
            width=6,
            height=6,
            full_scale=full_scale,
        )

    return half("before", _BEFORE), half("after", _AFTER)


def _mix(slug: str, title: str, means: str, asked: Callable[[str, str], Query]) -> Panel:
    """Both windows in one picture: what matters is whether the two lines lie on each other."""
    return Panel(
        slug,
        title,
        f"{means} Both windows in one picture, before and after.",
        "Both lines at the same height.",
        "Where they differ, the load changed with the setting: compare under the same workload, or look at another pair"
        " of windows.",
        (asked("before", _BEFORE), asked("after", _AFTER)),
        detail="latency",
        height=6,
    )


def _engine(by_upstream: str, called: str, unit: Unit) -> Query:
    """A figure of an engine, with the labels of its configuration."""
    known = f"max by ({', '.join(_CONFIG)}) ({promql.series(sidecar.ENGINE_INFO, _PLACE)})"
    return Query(f"{known} * on (upstream) group_left () {by_upstream}", called, shown_unit(unit))


BOARD = Dashboard(
    slug="tuning",
    title="vLLM / Tuning",
    question="Did the last change help?",
    regions=True,
    extra=(
        Variable("before", "Before: this long ago", kind="custom", options=_AGO, default="1h"),
        Variable(
            "after", f"After: this long ago ({_NOW} means now)", kind="custom", options=(_NOW, *_AGO), default=_NOW
        ),
    ),
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "ttft-p95",
                    "Time to first token, p95",
                    "From a request's arrival at the engine to its first token; one request in twenty takes longer."
                    " Regions are tuning events while the engine settles: ten minutes of warming caches that say"
                    " nothing about the change.",
                    "Lower after the region than before it, and under the dashed line.",
                    "Choose two windows below, one on each side of the event and of the same length, and look at the"
                    " request mix before you believe a difference.",
                    _ttft(),
                    threshold=thresholds.TTFT_P95,
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "inter-token-latency",
                    "Inter-token latency, p95",
                    "Gap between two outputs of a running request. Below 10 ms the first bucket of vLLM's histogram"
                    " hides the true value.",
                    "No higher after the change than before it.",
                    "Throughput is often bought with it: a larger batch makes every step longer. Decide which of the"
                    " two your users feel.",
                    _pace(),
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "queue-time-mean",
                    "Queue time, mean",
                    "Waiting in the engine until first scheduled, on average. The mean is exact, while a percentile"
                    " below 0.3 s would be a guess.",
                    "Near zero, before and after.",
                    "When it fell, check that fewer requests were not the reason. When it rose, the change cost"
                    " capacity.",
                    _waited(),
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "generation-throughput",
                    "Generation throughput",
                    "Tokens generated per second, all engines of a model together.",
                    "Higher at the same or a lower latency, under a load that fills the engine.",
                    "On an engine that is not full it shows demand and not capacity: then compare latency instead.",
                    _generated(),
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "cache-hit-ratio",
                    "Prefix cache hit ratio",
                    "Share of looked-up prompt tokens found in the prefix cache. It starts empty after every restart.",
                    "Back at its old level when the region ends.",
                    "Lower for good: look for a changed template, block size or routing. Leave the warming minutes out"
                    " of any comparison.",
                    _hits(),
                    detail="kv-cache",
                ),
                Panel(
                    "error-ratio",
                    "Error ratio",
                    "Share of requests that ended in an error or timeout: as the request log knows it, and as the"
                    f" engine counts it. {TWO_SIDES}",
                    "Zero on both sides of the change.",
                    "A change that makes requests fail is undone first and understood afterwards; the Teams board has"
                    " the reasons.",
                    _errors(),
                    threshold=thresholds.ERROR_RATIO,
                    detail="teams",
                    full_scale=False,
                ),
                Panel(
                    "kv-cache-usage",
                    "KV cache use, fullest engine",
                    "Share of KV-cache blocks in use on the fullest engine of a model.",
                    "Under 90 %; a change that frees blocks shows here first.",
                    "Full while requests wait: preemption is close. See preemptions on the KV cache board; undo what"
                    " made contexts or the batch larger, or add memory.",
                    _memory(),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="kv-cache",
                ),
            ),
        ),
        DashboardRow(
            "Before and after: latency and throughput",
            (
                *_pair(
                    "ttft",
                    "Time to first token, p95",
                    "Lower on the right.",
                    "A difference counts only where the request mix below is the same; a p95 of few requests jumps by"
                    " itself.",
                    _ttft,
                    thresholds.TTFT_P95,
                    "latency",
                ),
                *_pair(
                    "pace",
                    "Inter-token latency, p95",
                    "No higher on the right.",
                    "When it rose, compare throughput: the batch may have grown.",
                    _pace,
                    detail="latency",
                ),
                *_pair(
                    "wait",
                    "Queue time, mean",
                    "Near zero on both sides.",
                    "When it rose under the same load, the change cost capacity.",
                    _waited,
                    detail="latency",
                ),
                *_pair(
                    "throughput",
                    "Generation throughput",
                    "Higher on the right, under the same load.",
                    "Look at requests per second below first: fewer requests make fewer tokens.",
                    _generated,
                    detail="latency",
                ),
            ),
        ),
        DashboardRow(
            "Load",
            (
                _mix(
                    "mix-prompts",
                    "Prompt length, p95",
                    "Prompt tokens of finished requests; one request in twenty has more.",
                    lambda name, offset: queries.p95(vllm.REQUEST_PROMPT_TOKENS, called=name, offset=offset),
                ),
                _mix(
                    "mix-outputs",
                    "Output length, p95",
                    "Generated tokens of finished requests; one request in twenty has more.",
                    lambda name, offset: queries.p95(vllm.REQUEST_GENERATION_TOKENS, called=name, offset=offset),
                ),
                _mix(
                    "mix-requests",
                    "Requests finished",
                    "Requests that ended in the engine per second.",
                    lambda name, offset: queries.rate(vllm.REQUEST_SUCCESS, called=name, offset=offset),
                ),
            ),
        ),
        DashboardRow(
            "Changes",
            (
                Panel(
                    "last-events",
                    "Last event of each kind",
                    "How long ago the newest event of each kind happened, and how many are on record. change and note"
                    " come from people; restart, version and config are seen by the sidecar.",
                    "The event you want to assess is the newest one, and nothing else happened since.",
                    "Two changes in one window cannot be separated: choose windows with one between them, or repeat"
                    " them one by one.",
                    (
                        Query(
                            "time() -"
                            f" {promql.current(sidecar.EVENT_TIME, ('kind',), queries.where(sidecar.EVENT_TIME))}",
                            "Ago",
                            shown_unit(Unit.SECONDS),
                        ),
                        Query(
                            promql.total(sidecar.EVENTS, ("kind",), queries.where(sidecar.EVENTS)),
                            "On record",
                            shown_unit(Unit.COUNT),
                        ),
                    ),
                    Shape.TABLE,
                    width=12,
                    height=7,
                    lowest_first=True,
                    optional=(
                        "No event is on record. The sidecar writes one for every restart, version or configuration"
                        " change that it sees while it runs; add your own as lines of the file that its setting events"
                        " names."
                    ),
                ),
                Panel(
                    "engine-config",
                    "Engine configuration",
                    "Version, cache data type and prefix caching of every engine that a sidecar reads, how many tokens"
                    " its KV cache holds, and how often its configuration changed or it started again in this range.",
                    "The version and the configuration that you meant to run, on every engine.",
                    "An engine that differs from the rest answers for part of every curve above: narrow the board down"
                    " to one engine.",
                    (
                        _engine(
                            promql.once(sidecar.KV_CAPACITY, ("upstream",), queries.where(sidecar.KV_CAPACITY)),
                            "KV cache tokens",
                            Unit.TOKENS,
                        ),
                        _engine(
                            promql.repeated(sidecar.ENGINE_CHANGES, _RANGE, ("upstream",), _PLACE, per_second=False),
                            "Changes in range",
                            Unit.COUNT,
                        ),
                        _engine(
                            promql.repeated(sidecar.ENGINE_RESTARTS, _RANGE, ("upstream",), _PLACE, per_second=False),
                            "Restarts in range",
                            Unit.COUNT,
                        ),
                    ),
                    Shape.TABLE,
                    detail="fleet",
                    width=12,
                    height=7,
                ),
            ),
        ),
        DashboardRow(
            "Before and after: cache, errors and memory",
            (
                *_pair(
                    "hits",
                    "Prefix cache hit ratio",
                    "The same on both sides, or higher on the right.",
                    "A window that begins at a restart holds the warming minutes: move it away from the region.",
                    _hits,
                    detail="kv-cache",
                ),
                *_pair(
                    "errors",
                    "Error ratio",
                    "Zero on both sides.",
                    "Open the Teams board at the time of the worse window: it has reasons and routes.",
                    _errors,
                    thresholds.ERROR_RATIO,
                    "teams",
                    full_scale=False,
                    also=TWO_SIDES,
                ),
                *_pair(
                    "memory",
                    "KV cache use, fullest engine",
                    "No higher on the right, unless more work is done with it.",
                    "Above the dashed line preemption is close; it begins when no block is free. See preemptions on the"
                    " KV cache board.",
                    _memory,
                    thresholds.KV_CACHE_USAGE,
                    "kv-cache",
                ),
            ),
            collapsed=True,
        ),
    ),
)
