"""What the series of engines and gateways did within a time: from two pages of each, or asked of a Prometheus. Both give the same.

Law: a figure is worked out in evidence.py, from this alone, so that it cannot mean one thing in pages and another in Prometheus. Series stand under
the names of the catalogue, whatever a release called them, and have the label `instance` beside their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from alerts.settings import written
from exporters import engine
from exporters.catalogue import gateway, ours, promql, vllm
from exporters.catalogue.metric import Kind, Metric
from exporters.catalogue.page import Labels, Page
from stack.prometheus import Prometheus, Refused

COUNTERS = (
    vllm.REQUEST_SUCCESS, vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS, vllm.PREFIX_CACHE_QUERIES, vllm.PREFIX_CACHE_HITS, vllm.NUM_PREEMPTIONS,
    vllm.ADMISSION_REJECTIONS, vllm.SPEC_DECODE_NUM_DRAFTS, vllm.SPEC_DECODE_NUM_DRAFT_TOKENS, vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS,
    vllm.HTTP_REQUESTS, gateway.REQUESTS, gateway.REJECTED, ours.REQUESTS, ours.REASONS,
)  # fmt: skip
HISTOGRAMS = (
    vllm.TIME_TO_FIRST_TOKEN, vllm.INTER_TOKEN_LATENCY, vllm.E2E_REQUEST_LATENCY, vllm.REQUEST_QUEUE_TIME, vllm.REQUEST_PREFILL_TIME,
    vllm.REQUEST_DECODE_TIME, vllm.REQUEST_TIME_PER_OUTPUT_TOKEN, vllm.REQUEST_PROMPT_TOKENS, vllm.REQUEST_GENERATION_TOKENS,
    gateway.LOOP_LAG, ours.TTFT, ours.TPOT, ours.QUEUE,
)  # fmt: skip
GAUGES = (
    vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING, vllm.NUM_REQUESTS_WAITING_BY_REASON, vllm.KV_CACHE_USAGE, gateway.WAITING, gateway.RUNNING,
    gateway.SLOTS, gateway.SLOTS_LIMIT,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """grown: by how much counters and histograms grew, by sample name. lowest, mean, highest: of gauges, at the scrapes of that time.

    configured: what engines say of their caches. restarted: instances whose process began anew; of two pages their growth counts from there.
    source: where it came from, for people. scraped: how often, where that is known."""

    seconds: float
    source: str
    grown: Page
    lowest: Page
    mean: Page
    highest: Page
    configured: Sequence[Labels] = ()
    restarted: tuple[str, ...] = ()
    scraped: int | None = None


_INTO = ("grown", "lowest", "mean", "highest")


# ---- from pages


@dataclass(frozen=True, slots=True)
class Pages:
    """Two pages of one engine or gateway. instance: what it is called; host:port as a rule."""

    instance: str
    before: Page
    after: Page

    def checked(self) -> Pages:
        """These, if they can be two looks at one process. Raises ValueError for the same page twice, or the later one first."""
        at = vllm.PROCESS_CPU.name  # an API server that shows a page spends time on it
        if self.before.samples == self.after.samples and self.before.total(at):
            raise ValueError(f"both pages of {self.instance} are the same one; take them some seconds apart")
        began, begins = (page.total(vllm.PROCESS_START_TIME.name) for page in (self.before, self.after))
        spent, spends = (page.total(at) for page in (self.before, self.after))
        if began and begins and (begins < began or (begins == began and spent and spends and spends < spent)):
            raise ValueError(f"the page before is later than {self.instance}; give them the other way round, and of one engine")
        return self

    @property
    def restarted(self) -> bool:
        return engine.restarted(*(engine.parse("", reader=lambda _, page=page: page) for page in (self.before, self.after)))  # type: ignore[misc]


def between(sources: Sequence[Pages], seconds: float, source: str) -> Series:
    """What happened between two pages of each source."""
    grown, gauges = _Samples(), (_Samples(), _Samples(), _Samples())
    for pages in sources:
        before = Page() if pages.restarted else pages.before
        for metric in (*COUNTERS, *HISTOGRAMS):
            for part in _parts(metric):
                then = _by_labels(before, metric, part)
                for labels, now in _by_labels(pages.after, metric, part).items():
                    fell = now < (was := then.get(labels, 0.0))  # one series that began anew, such as that of an adapter
                    grown.add(metric.name + part, pages.instance, labels, now if fell else now - was)
        for metric in GAUGES:
            then, after = _by_labels(pages.before, metric), _by_labels(pages.after, metric)
            for labels, now in after.items():
                was = then.get(labels, now)
                for into, value in zip(gauges, (min(was, now), (was + now) / 2, max(was, now)), strict=True):
                    into.add(metric.name, pages.instance, labels, value)
    lowest, mean, highest = (each.page() for each in gauges)
    return Series(
        seconds=seconds, source=source, grown=grown.page(), lowest=lowest, mean=mean, highest=highest,
        configured=[{**labels, "instance": each.instance} for each in sources for labels, _ in each.after.of(vllm.CACHE_CONFIG_INFO.name)],
        restarted=tuple(each.instance for each in sources if each.restarted), scraped=2,
    )  # fmt: skip


class _Samples:
    """A page in the making."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Labels, float]]] = {}

    def add(self, name: str, instance: str, labels: Iterable[tuple[str, str]], value: float) -> None:
        self._found.setdefault(name, []).append(({**dict(labels), "instance": instance}, value))

    def page(self) -> Page:
        return Page(self._found)


def _parts(metric: Metric) -> tuple[str, ...]:
    return ("_bucket", "_count", "_sum") if metric.kind is Kind.HISTOGRAM else ("",)


def _by_labels(page: Page, metric: Metric, part: str = "") -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of a metric under its present name or, where the page has not that, an older one; several API processes show parts of one total."""
    name = next((name + part for name in metric.names if name + part in page), "")
    found: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in page.of(name):
        if value == value:  # not NaN
            key = tuple(sorted(labels.items()))
            found[key] = found.get(key, 0.0) + value
    return found


# ---- from Prometheus


@dataclass(frozen=True, slots=True)
class Question:
    """One query, and where its answer goes: into which of the pages, under which sample name. times: what its values are multiplied with."""

    into: str
    name: str
    expr: str
    times: float = 1.0


def questions(seconds: float, model: str | None = None) -> Iterator[Question]:
    """Everything that is asked of a Prometheus. model: of this one alone, as far as series say whose they are."""
    window = written(max(round(seconds), 1))
    for metric in (*COUNTERS, *HISTOGRAMS, *GAUGES):
        its = model is not None and "model_name" in metric.labels and metric is not vllm.NUM_REQUESTS_RUNNING  # which says what models there are
        where = (f"model_name={_quoted(model or '')}",) if its else ()
        by = tuple(dict.fromkeys(("instance", *metric.labels)))
        match metric.kind:
            case Kind.COUNTER:
                yield Question("grown", metric.name, promql.growth(metric, window, by, where))
            case Kind.HISTOGRAM:
                yield Question("grown", f"{metric.name}_bucket", promql.buckets(metric, window, by, where))
                yield Question("grown", f"{metric.name}_count", promql.observed(metric, window, by, where))
                yield Question("grown", f"{metric.name}_sum", promql.amount(metric, window, by, where), seconds)
            case _:
                for into, over_time in (("lowest", promql.lowest), ("mean", promql.average), ("highest", promql.highest)):
                    yield Question(into, metric.name, over_time(metric, window, by, where))
    yield Question("configured", "", promql.series(vllm.CACHE_CONFIG_INFO))
    yield Question("restarted", "", f"{promql.resets(vllm.GENERATION_TOKENS, window, ('instance',))} > 0")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


@dataclass(slots=True)
class _Told:
    pages: dict[str, _Samples] = field(default_factory=lambda: {into: _Samples() for into in _INTO})
    configured: list[Labels] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)


async def over(prometheus: Prometheus, seconds: float, at_s: float, model: str | None = None) -> Series:
    """What Prometheus recorded in the seconds before at_s. Raises Refused when it does not answer one of the questions."""
    asked = list(questions(seconds, model))
    answers = await asyncio.gather(*(prometheus.as_of(one.expr, at_s) for one in asked))
    told = _Told()
    for question, answer in zip(asked, answers, strict=True):
        if answer.error:
            raise Refused(answer.error)
        for series in answer.series:
            instance, value = series.metric.get("instance", ""), float(series.value[1]) if series.value else 0.0
            labels = [(name, word) for name, word in series.metric.items() if name not in ("__name__", "instance")]
            if question.into == "configured":
                told.configured.append(dict(labels) | {"instance": instance})
            elif question.into == "restarted":
                told.restarted.append(instance)
            elif value == value:
                told.pages[question.into].add(question.name, instance, labels, value * question.times)
    grown, lowest, mean, highest = (told.pages[into].page() for into in _INTO)
    return Series(
        seconds=seconds, source=f"{prometheus.where.shown}, the last {written(round(seconds))}", grown=grown, lowest=lowest, mean=mean,
        highest=highest, configured=told.configured, restarted=tuple(sorted(told.restarted)),
    )  # fmt: skip
