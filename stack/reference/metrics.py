"""docs/reference/metrics.md: the catalogue by topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from exporters.catalogue import (
    BESIDE,
    EVERYTHING,
    NEVER_EXISTED,
    RETIRED,
    VLLM,
    attributed,
    dcgm,
    gateway,
    golden,
    gpu,
    prometheus,
    reconciled,
    ship,
    sidecar,
    vllm,
)
from exporters.catalogue import self_monitoring as monitoring_series
from exporters.catalogue.metric import Across, Metric, Provenance
from stack.reference import use
from stack.reference.markdown import PRINTED, listed, table, to

BOARDS_PAGE, ALERTS_PAGE = "../../dashboards/COVERAGE.md", "alerts.md"
_SHOWN = 6  # panels that are named; of more, the rest is counted


@dataclass(frozen=True, slots=True)
class Topic:
    """A heading, what stands below it, and the metrics in order."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


# vLLM's families in the order of the catalogue's file; a topic begins with this one and ends where the next begins.
_BEGINS: tuple[tuple[Metric, str, str], ...] = (
    (vllm.NUM_REQUESTS_RUNNING, "Scheduler", "Who runs, who waits, who is refused."),
    (vllm.KV_CACHE_USAGE, "KV cache", "How full it is, and how well what was computed is used again."),
    (vllm.PROMPT_TOKENS, "Tokens", "What was worked on."),
    (vllm.TIME_TO_FIRST_TOKEN, "Latency", "How long the parts of a request take."),
    (vllm.REQUEST_SUCCESS, "Requests", "How they ended, and what they asked for."),
    (
        vllm.SPEC_DECODE_NUM_DRAFTS,
        "Speculative decoding and diffusion",
        "Present only where such decoding is configured.",
    ),
    (
        vllm.NIXL_XFER_TIME,
        "Connectors",
        "KV cache moved between engines or tiers. We ran none of them: all from source.",
    ),
    (vllm.WEBSOCKET_CONNECTIONS_ACTIVE, "HTTP", "What the API server says of its own connections."),
)
_OURS: tuple[Topic, ...] = (
    Topic(
        "Sidecar: requests, from the log",
        "Labels: the served model and the team, both bounded.",
        sidecar.REQUEST_TRAFFIC,
    ),
    Topic(
        "Sidecar: latency by adapter and by route",
        "From the log, with few buckets: not one series for each team.",
        sidecar.GROUPED,
    ),
    Topic("Sidecar: the log itself", "How the reading of it goes.", sidecar.REQUEST_LOG),
    Topic("Sidecar: engines", "What vLLM says in labels only, and what its restarts hide.", sidecar.ENGINES),
    Topic(
        "Sidecar: the log against the engine",
        "Defined in [joined-metrics.md](joined-metrics.md).",
        reconciled.RECONCILED,
    ),
    Topic(
        "Sidecar: whose the time, the energy and the cost were",
        "Defined in [joined-metrics.md](joined-metrics.md).",
        attributed.ATTRIBUTED,
    ),
    Topic("Sidecar: golden prompts", "Last check of each engine against its baseline.", golden.GOLDEN),
    Topic("Sidecar: prices", "What the operator said a GPU costs.", sidecar.COSTS),
    Topic("Sidecar: tuning events", "What changed, and when.", sidecar.TUNING),
    Topic("Sidecar: spans", "Of requests, over OTLP.", sidecar.SPANS),
    Topic("Sidecar: its sources and itself", "Whether the figures above can be trusted.", sidecar.SOURCES),
    Topic("Data set", "What `vllm-watch ship` put into it, and whether its totals agree.", ship.SHIP),
    Topic("GPUs", "From NVML or nvidia-smi, by the sidecar. What a GPU does not measure is absent, never 0.", gpu.GPU),
    Topic("Gateway", "On the gateway's metrics port.", gateway.GATEWAY),
    Topic("Lab", "Of the embedded lab only.", sidecar.LAB),
)
_OTHERS: tuple[Topic, ...] = (
    Topic(
        "dcgm-exporter",
        "Where there is no sidecar on the GPU host. Never run by us: names and units are from its source.",
        dcgm.DCGM,
    ),
    Topic(
        "Prometheus, Alertmanager and collector of their own",
        "Only what a board or an alert reads.",
        (*monitoring_series.PROMETHEUS_SERVER, *monitoring_series.ALERTMANAGER, *monitoring_series.COLLECTOR),
    ),
    Topic(
        "What Prometheus makes of every target",
        "And of our rules. process_start_time_seconds of other targets too.",
        prometheus.PROMETHEUS,
    ),
)


def topics() -> tuple[Topic, ...]:
    """Every family of the catalogue, in exactly one topic."""
    starts = [VLLM.index(metric) for metric, _, _ in _BEGINS]
    cuts = zip(_BEGINS, starts, [*starts[1:], len(VLLM)], strict=True)
    theirs = (Topic(f"vLLM: {title}", about, VLLM[start:end]) for (_, title, about), start, end in cuts)
    beside = Topic(
        "vLLM: beside its own",
        "Unprefixed families on the same page: the API server's HTTP and process figures.",
        _living(BESIDE),
    )
    retired = Topic(
        "vLLM: retired", "Old names, so that a question reaches back and a dead query can be explained.", RETIRED
    )
    return _once((*theirs, beside, retired, *_OURS, *_OTHERS))


def _once(every: Iterable[Topic]) -> tuple[Topic, ...]:
    """A family that an engine and other targets show stands where it is met first."""
    listed, found = set[str](), list[Topic]()
    for topic in every:
        found.append(replace(topic, metrics=tuple(metric for metric in topic.metrics if metric.name not in listed)))
        listed |= {metric.name for metric in topic.metrics}
    return tuple(found)


def _living(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    return tuple(metric for metric in metrics if metric.until is None)


def page() -> str:
    return "\n".join(_page())


def _page() -> Iterator[str]:
    every = topics()
    yield from ("# Metrics", "", PRINTED.format(source="`exporters/catalogue/`"), "")
    yield from _how_to_read()
    yield from table(("topic", "families"), ((to(topic.title), len(topic.metrics)) for topic in every))
    for topic in every:
        yield from (f"## {topic.title}", "", topic.about, "")
        yield from table(("family", "kind", "unit", "where it is used"), (_row(metric) for metric in topic.metrics))
        for metric in topic.metrics:
            yield from _entry(metric)
    yield from (
        "## Names that never existed",
        "",
        "Guides, boards and alerts ask for them; no release of vLLM had them.",
        "",
    )
    yield from table(("name", "ask instead"), ((f"`{name}`", instead) for name, instead in NEVER_EXISTED.items()))
    yield "Test status: [metrics (reference)](../internals/test-status.md#metrics-reference)."


def _how_to_read() -> Iterator[str]:
    yield from (
        (
            "Every series that vllm-watch reads or shows. Find one with `vllm-watch metrics list WORD`; compare a"
            " running engine with this page by"
        ),
        "`vllm-watch metrics check URL`.",
        "",
    )
    yield from listed(
        (
            (
                "**Kind** decides which questions make sense: a rate of a counter, a quantile of a histogram, a mean of"
                " a summary."
            ),
            "**Units** are base units. `ratio` is 0 to 1, also where vLLM's name ends in `_perc`.",
            "**Over engines**: how series of several engines become one figure.",
            (
                "**Evidence**: *seen* on a page captured from a running engine, or on our own; *source*: read in source"
                " or release notes, never run."
            ),
            (
                "**Used**: panels and alerts that read the series, also by an older name; alerts through recorded"
                " series too."
            ),
        )
    )


def _row(metric: Metric) -> tuple[str, str, str, str]:
    panels, alerts = len(use.panels(metric)), len(use.alerts(metric))
    used = ", ".join(
        f"{count} {what}{'s' * (count > 1)}" for count, what in ((panels, "panel"), (alerts, "alert")) if count
    )
    return to(metric.name), str(metric.kind), str(metric.unit), "" if metric.until else used or "by no panel or alert"


def _entry(metric: Metric) -> Iterator[str]:
    yield from (f"### {metric.name}", "", metric.meaning, "")
    yield from listed(_facts(metric))


def _facts(metric: Metric) -> Iterator[str]:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    across = {Across.SUM: "added up", Across.MEAN: "averaged", Across.MAX: "the highest", Across.MIN: "the lowest"}[
        metric.across
    ]
    yield f"{metric.kind}, {metric.unit}; labels: {labels}; over engines: {across}"
    if history := ", ".join(_history(metric)):
        yield history
    if metric.needs:
        yield f"Shown only with: {metric.needs}"
    yield from (f"Trap: {note}" for note in metric.notes)
    if not metric.until:
        yield from _used(metric)


def _history(metric: Metric) -> Iterator[str]:
    if metric.since:
        yield f"since vLLM {metric.since}"
    if metric.until:
        yield f"gone in {metric.until}"
    if metric.formerly:
        yield "formerly " + ", ".join(_former(name) for name in metric.formerly)
    if successor := next((one for one in EVERYTHING if metric.name in one.formerly), None):
        yield f"now {to(successor.name)}"
    yield f"evidence: {'seen' if metric.evidence is Provenance.SEEN else 'source'}"


def _former(name: str) -> str:
    return to(name) if any(name == metric.name for metric in EVERYTHING) else f"`{name}`"


def _used(metric: Metric) -> Iterator[str]:
    panels = [
        to(f"Panels of {board.title}", BOARDS_PAGE, f"{board.slug}/{panel.slug}") for board, panel in use.panels(metric)
    ]
    if panels:
        yield "Panels: " + _some(panels)
    if alerts := [to(alert.name, ALERTS_PAGE) for alert in use.alerts(metric)]:
        yield "Alerts: " + _some(alerts)


def _some(links: Sequence[str]) -> str:
    return ", ".join(links[:_SHOWN]) + (f" and {len(links) - _SHOWN} more" if len(links) > _SHOWN else "")
