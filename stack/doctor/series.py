"""Series of engines and gateways over a time, from two scrapes of each, or from a Prometheus, with the same result.

Invariant: values are computed in evidence.py, from this alone, so that they mean the same for scrapes and for
Prometheus. Series have the names of the catalogue, whatever a release called them, and the label `instance`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from alerts.engine import FROZEN_FOR, frozen
from exporters.catalogue import gateway, promql, sidecar, vllm
from exporters.catalogue.exposition_parser import Exposition, Labels
from exporters.catalogue.metric import Kind, Metric
from exporters.engine import view
from exporters.engine.liveness import EngineState
from exporters.net.prometheus import Prometheus, PrometheusError
from exporters.text import format_duration, parse_window

COUNTERS = (
    vllm.REQUEST_SUCCESS, vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS, vllm.PREFIX_CACHE_QUERIES, vllm.PREFIX_CACHE_HITS,
    vllm.NUM_PREEMPTIONS,
    vllm.ADMISSION_REJECTIONS, vllm.SPEC_DECODE_NUM_DRAFTS, vllm.SPEC_DECODE_NUM_DRAFT_TOKENS,
    vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS,
    vllm.HTTP_REQUESTS, gateway.REQUESTS, gateway.REJECTED, sidecar.REQUESTS, sidecar.REASONS,
)  # fmt: skip
HISTOGRAMS = (
    vllm.TIME_TO_FIRST_TOKEN, vllm.INTER_TOKEN_LATENCY, vllm.E2E_REQUEST_LATENCY, vllm.REQUEST_QUEUE_TIME,
    vllm.REQUEST_PREFILL_TIME,
    vllm.REQUEST_DECODE_TIME, vllm.REQUEST_TIME_PER_OUTPUT_TOKEN, vllm.REQUEST_PROMPT_TOKENS,
    vllm.REQUEST_GENERATION_TOKENS,
    vllm.ITERATION_TOKENS, gateway.LOOP_LAG, sidecar.TTFT, sidecar.TPOT, sidecar.QUEUE,
)  # fmt: skip
GAUGES = (
    vllm.NUM_REQUESTS_RUNNING,
    vllm.NUM_REQUESTS_WAITING,
    vllm.NUM_REQUESTS_WAITING_BY_REASON,
    vllm.KV_CACHE_USAGE,
    gateway.WAITING,
    gateway.RUNNING,
    gateway.SLOTS,
    gateway.SLOTS_LIMIT,
    gateway.UPSTREAM_UP,
    gateway.LEASE_LOST,
    gateway.LEASE_REPLICAS,
)
PROGRESS = (
    vllm.PROMPT_TOKENS,
    vllm.GENERATION_TOKENS,
    vllm.PREFIX_CACHE_QUERIES,
    vllm.REQUEST_SUCCESS,
    vllm.NUM_PREEMPTIONS,
    vllm.KV_CACHE_USAGE,
    vllm.NUM_REQUESTS_RUNNING,
    vllm.NUM_REQUESTS_WAITING,
)
INFOS = (gateway.POLICY_INFO,)
STATES = (gateway.ENGINE_STATE, sidecar.ENGINE_STATE)  # the gateway has more evidence
LOOKED_AT = tuple(dict.fromkeys((*GAUGES, *PROGRESS)))  # read at each look between the first and the last page
# 0 where the engine works, or has nothing to do
STILL = f"{vllm.NUM_REQUESTS_RUNNING.name}, seconds without progress at the end"
STILL_WINDOWS = (FROZEN_FOR, "1m", "30s")  # in which a Prometheus is asked for an engine without progress
QUEUE_RISE = f"{vllm.NUM_REQUESTS_WAITING.name}, more at the end than at the beginning"
# what runs at those looks at which somebody waits beside it
CROWDED = f"{vllm.NUM_REQUESTS_RUNNING.name}, while others wait"
SUBQUERIES = 120  # moments of a window that a question about two gauges at once looks at
ALL_OF_IT = 0.9  # a Prometheus that recorded so much of the window recorded it


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesWindow:
    """Series over a time. grown: increase of counters and histograms, by sample name. lowest, mean, highest: of gauges,
    over the scrapes of that time.

    looks: how many moments CROWDED rests on, by instance, where that is known. configured: labels of their
    cache_config_info. silent: seconds since the last answer of instances that stopped answering within the time.
    restarted: instances whose process began anew; of two pages their growth counts from there. roles: of instances in
    disaggregated serving, which only the labels of a Prometheus tell.
    lost: gateways that did not answer, with the reason. states: state and evidence of engines at the end,
    by instance, as far as a gateway or a sidecar shows them.
    source: where it came from, for people. scraped: how often, where that is known."""

    seconds: float
    source: str
    grown: Exposition
    lowest: Exposition
    mean: Exposition
    highest: Exposition
    configured: Sequence[Labels] = ()
    restarted: tuple[str, ...] = ()
    scraped: int | None = None
    looks: Mapping[str, int] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def engine_states(shown: Iterable[Labels]) -> dict[str, tuple[str, str]]:
    """Return state and evidence by address. Of several observers one that calls the engine hung, else the first."""
    found: dict[str, tuple[str, str]] = {}
    for labels in shown:
        address, state = labels.get("address", ""), (labels.get("state", ""), labels.get("evidence", ""))
        if address not in found or (state[0] == EngineState.HUNG != found[address][0]):
            found[address] = state
    return found


_INTO = ("grown", "lowest", "mean", "highest")


# ---- from pages


@dataclass(frozen=True, slots=True)
class Pages:
    """Two pages of one engine or gateway. instance: what it is called; host:port as a rule. inside: looks between the
    two, for their gauges.

    at_s: when those were taken, in seconds after the first page; evenly spread where that is not known. silent_s:
    seconds since `after`, where no later page was answered."""

    instance: str
    before: Exposition
    after: Exposition
    inside: Sequence[Exposition] = ()
    at_s: Sequence[float] = ()
    silent_s: float = 0.0

    def checked(self) -> Pages:
        """Return the pages if they can be two scrapes of one process. Raises ValueError for the same one twice, or the
        later one first."""
        at = vllm.PROCESS_CPU.name  # an API server that shows a page spends time on it
        if self.before.samples == self.after.samples and self.before.total(at):
            raise ValueError(f"both pages of {self.instance} are the same one; take them some seconds apart")
        began, begins = (page.total(vllm.PROCESS_START_TIME.name) for page in (self.before, self.after))
        spent, spends = (page.total(at) for page in (self.before, self.after))
        if began and begins and (begins < began or (begins == began and spent and spends and spends < spent)):
            raise ValueError(
                f"the page before is later than {self.instance}; give them the other way round, and of one engine"
            )
        return self

    @property
    def looks(self) -> Sequence[Exposition]:
        return (self.before, *self.inside, self.after)

    def times(self, seconds: float) -> Sequence[float]:
        """Return when each of the looks was taken, in seconds after the first page."""
        last_s, count = seconds - self.silent_s, len(self.inside) + 1
        return (0.0, *(self.at_s or [last_s * (number + 1) / count for number in range(len(self.inside))]), last_s)

    def of_gateway(self) -> Pages:
        """Return the pages if they are a gateway's. Raises ValueError."""
        if not any(metric.name in self.after for metric in (gateway.SLOTS, gateway.RUNNING, gateway.REQUESTS)):
            raise ValueError(
                f"{self.instance} shows no series of the gateway; its metrics are at metrics_listen (127.0.0.1:8010"
                " where nothing else is set)"
            )
        return self

    @property
    def restarted(self) -> bool:
        return view.restarted(view.view(self.before), view.view(self.after))


def between(
    sources: Sequence[Pages], seconds: float, source: str, lost: Mapping[str, str] | None = None
) -> SeriesWindow:
    """Return the change between two scrapes of each source. lost: gateways that did not answer, with the reason."""
    grown, gauges, crowded = _Samples(), (_Samples(), _Samples(), _Samples()), dict[str, int]()
    for pages in sources:
        before = Exposition() if pages.restarted else pages.before
        for metric in (*COUNTERS, *HISTOGRAMS):
            for part in _parts(metric):
                then = _by_labels(before, metric, part)
                for labels, now in _by_labels(pages.after, metric, part).items():
                    # one series that began anew, such as that of an adapter
                    fell = now < (was := then.get(labels, 0.0))
                    grown.add(metric.name + part, pages.instance, labels, now if fell else now - was)
        for metric in (*GAUGES, *INFOS):
            seen = [_by_labels(page, metric) for page in pages.looks]
            for labels in seen[-1]:
                _add(gauges, metric.name, pages.instance, labels, [look[labels] for look in seen if labels in look])
        for name, labels, values in _derived(pages, seconds):
            _add(gauges, name, pages.instance, labels, values)
            if name == CROWDED:
                crowded[pages.instance] = max(crowded.get(pages.instance, 0), len(values))
    lowest, mean, highest = (each.page() for each in gauges)
    return SeriesWindow(
        seconds=seconds, source=source, grown=grown.page(), lowest=lowest, mean=mean, highest=highest,
        configured=[{**labels, "instance": each.instance} for each in sources for labels,
            _ in each.after.of(vllm.CACHE_CONFIG_INFO.name)],
        restarted=tuple(each.instance for each in sources if each.restarted),
        scraped=max((len(each.looks) for each in sources), default=0),
        looks=crowded, silent={each.instance: each.silent_s for each in sources if each.silent_s}, lost=lost or {},
        states=engine_states(
            labels for metric in STATES for each in sources for labels, value in each.after.of(metric.name) if value
        ),
    )  # fmt: skip


_Labels = tuple[tuple[str, str], ...]


def _derived(pages: Pages, seconds: float) -> Iterator[tuple[str, _Labels, Sequence[float]]]:
    """Yield series derived from several gauges and scrapes: (sample name, labels, values)."""
    running, waiting = (
        [_by_labels(page, metric) for page in pages.looks]
        for metric in (vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING)
    )
    for labels in running[-1]:
        then_ran = [
            ran[labels]
            for ran, queue in zip(running, waiting, strict=True)
            if labels in ran and queue.get(labels, 0.0) > 0
        ]
        if then_ran:
            yield CROWDED, labels, then_ran
    for labels, still_s in _standstills(pages.looks, pages.times(seconds)):
        yield STILL, labels, [still_s]
    for labels, now in waiting[-1].items():
        yield QUEUE_RISE, labels, [now - waiting[0].get(labels, 0.0)]


def _standstills(looks: Sequence[Exposition], at_s: Sequence[float]) -> Iterator[tuple[_Labels, float]]:
    """Yield for each engine core the seconds up to the last look in which it had work and made no progress.

    A core that stands still keeps showing its last gauges. A long prefill moves the KV cache usage with each chunk. One
    that runs nothing and fetches KV cache waits for another engine. Of two pages that differ only an engine without
    work at the second is known not to stand still; cores of which nothing is known are left out."""
    states = [{metric: _of_cores(page, metric) for metric in PROGRESS} for page in looks]
    fetching = _of_cores(looks[-1], vllm.NUM_REQUESTS_KV_FETCH_BY_STAGE, ("stage", "in_progress"))
    for core, running in states[-1][vllm.NUM_REQUESTS_RUNNING].items():
        of_core = [tuple(state[metric].get(core) for metric in PROGRESS) for state in states]
        same = next((number for number, state in enumerate(reversed(of_core)) if state != of_core[-1]), len(of_core))
        waiting = 0.0 if fetching.get(core) else states[-1][vllm.NUM_REQUESTS_WAITING].get(core, 0.0)
        if running + waiting <= 0:
            yield core, 0.0
        elif same > 1 or len(looks) > 2:
            yield core, at_s[-1] - at_s[-same]


def _of_cores(page: Exposition, metric: Metric, *only: tuple[str, str]) -> dict[_Labels, float]:
    """Return the samples of a metric with these labels, summed by model and engine core."""
    found: dict[_Labels, float] = {}
    for labels, value in _by_labels(page, metric).items():
        if set(only) <= set(labels):
            core = tuple((name, word) for name, word in labels if name in vllm.NUM_REQUESTS_RUNNING.labels)
            found[core] = found.get(core, 0.0) + value
    return found


class _Samples:
    """Builder of an exposition."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Labels, float]]] = {}

    def add(self, name: str, instance: str, labels: Iterable[tuple[str, str]], value: float) -> None:
        self._found.setdefault(name, []).append(({**dict(labels), "instance": instance}, value))

    def page(self) -> Exposition:
        return Exposition(self._found)


def _add(
    gauges: Sequence[_Samples], name: str, instance: str, labels: Iterable[tuple[str, str]], seen: Sequence[float]
) -> None:
    for into, value in zip(gauges, (min(seen), sum(seen) / len(seen), max(seen)), strict=True):
        into.add(name, instance, labels, value)


def gauges_of(page: Exposition) -> Exposition:
    """Return the part that scrapes between two others need: gauges, and the counters that show progress."""
    return Exposition({name: page.of(name) for metric in LOOKED_AT for name in metric.names if name in page})


def _parts(metric: Metric) -> tuple[str, ...]:
    return ("_bucket", "_count", "_sum") if metric.kind is Kind.HISTOGRAM else ("",)


def _by_labels(page: Exposition, metric: Metric, part: str = "") -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples of a metric under its present name, else an older one; several API processes show parts of one
    total."""
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
    """Query, and the exposition (`into`) and sample name of its result. times: factor of its values."""

    into: str
    name: str
    expr: str
    times: float = 1.0


def questions(seconds: float, model: str | None = None) -> Iterator[Question]:
    """Yield all queries to a Prometheus. model: of this one alone, as far as series have its label."""
    window = format_duration(max(round(seconds), 1))
    of_model = (f"model_name={_quoted(model)}",) if model is not None else ()
    for metric in (*COUNTERS, *HISTOGRAMS, *GAUGES):
        # which says what models there are
        its = model is not None and "model_name" in metric.labels and metric is not vllm.NUM_REQUESTS_RUNNING
        where = of_model if its else ()
        by = tuple(dict.fromkeys(("instance", *metric.labels)))
        match metric.kind:
            case Kind.COUNTER:
                yield Question("grown", metric.name, promql.growth(metric, window, by, where))
            case Kind.HISTOGRAM:
                yield Question("grown", f"{metric.name}_bucket", promql.buckets(metric, window, by, where))
                yield Question("grown", f"{metric.name}_count", promql.observation_count(metric, window, by, where))
                yield Question("grown", f"{metric.name}_sum", promql.amount(metric, window, by, where), seconds)
            case _:
                for into, over_time in (
                    ("lowest", promql.lowest),
                    ("mean", promql.average),
                    ("highest", promql.highest),
                ):
                    yield Question(into, metric.name, over_time(metric, window, by, where))
    step = f"{max(round(seconds / SUBQUERIES), 5)}s"
    running, waiting = (
        f"({promql.series(metric)})" for metric in (vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING)
    )
    labels = ", ".join(("instance", *vllm.NUM_REQUESTS_RUNNING.labels))
    for into, over in (("lowest", "min"), ("mean", "avg"), ("highest", "max")):
        yield Question(
            into, CROWDED, f"sum by ({labels}) ({over}_over_time(({running} and {waiting} > 0)[{window}:{step}]))"
        )
    for into in ("lowest", "mean", "highest"):
        yield Question(into, STILL, _still_for(seconds, of_model))
        yield Question(into, QUEUE_RISE, promql.rise(vllm.NUM_REQUESTS_WAITING, window, promql.EACH, of_model))
    for metric in INFOS:
        yield Question("highest", metric.name, promql.series(metric))
    yield Question("began", "", f"min(min_over_time(timestamp({running})[{window}:{step}]))")
    yield Question("configured", "", promql.series(vllm.CACHE_CONFIG_INFO))
    with_role = promql.series(vllm.NUM_REQUESTS_RUNNING, (promql.WITH_ROLE,))
    yield Question("roles", "", f"group by (instance, {promql.ROLE}) ({with_role})")
    for metric in STATES:
        yield Question("highest", metric.name, f"{promql.current(metric, ('address', 'state', 'evidence'))} > 0")
    yield Question("restarted", "", f"{promql.resets(vllm.GENERATION_TOKENS, window, ('instance',))} > 0")


def _still_for(seconds: float, where: tuple[str, ...]) -> str:
    """Return a query for the seconds, up to now, in which an engine had work and made no token: the longest of a few
    windows, by the alert's rule."""
    shorter = [window for window in STILL_WINDOWS if parse_window(window) < seconds]
    windows = [format_duration(max(round(seconds), 1)), *shorter]
    work = " + ".join(
        promql.current(gauge, promql.EACH, where) for gauge in (vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING)
    )
    still = [f"({frozen(window, promql.EACH, where)}) * 0 + {parse_window(window):g}" for window in windows]
    return " or ".join([*still, f"({work}) * 0" if shorter else f"({work}) == 0"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


@dataclass(slots=True)
class _PrometheusData:
    pages: dict[str, _Samples] = field(default_factory=lambda: {into: _Samples() for into in _INTO})
    configured: list[Labels] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    began_s: float | None = None


async def over(prometheus: Prometheus, seconds: float, at_s: float, model: str | None = None) -> SeriesWindow:
    """Query what Prometheus recorded in the seconds before at_s. Raises PrometheusError when a query fails."""
    asked = list(questions(seconds, model))
    answers = await asyncio.gather(*(prometheus.as_of(one.expr, at_s) for one in asked))
    data = _PrometheusData()
    for question, answer in zip(asked, answers, strict=True):
        if answer.error:
            raise PrometheusError(answer.error)
        for series in answer.series:
            instance, value = series.metric.get("instance", ""), float(series.value[1]) if series.value else 0.0
            labels = [(name, word) for name, word in series.metric.items() if name not in ("__name__", "instance")]
            if question.into == "configured":
                data.configured.append(dict(labels) | {"instance": instance})
            elif question.into == "began":
                data.began_s = value
            elif question.into == "restarted":
                data.restarted.append(instance)
            elif question.into == "roles":
                data.roles[instance] = series.metric.get(promql.ROLE, "")
            elif value == value:
                data.pages[question.into].add(question.name, instance, labels, value * question.times)
    grown, lowest, mean, highest = (data.pages[into].page() for into in _INTO)
    source = f"{prometheus.where.shown}, the last {format_duration(round(seconds))}"
    recorded_s = seconds if data.began_s is None else at_s - data.began_s
    if 0 < recorded_s < ALL_OF_IT * seconds:
        source, seconds = f"{source}, of which it recorded {recorded_s:.0f} s", recorded_s
    return SeriesWindow(
        seconds=seconds,
        source=source,
        grown=grown,
        lowest=lowest,
        mean=mean,
        highest=highest,
        configured=data.configured,
        restarted=tuple(sorted(data.restarted)),
        roles=data.roles,
        states=engine_states(labels for metric in STATES for labels, _ in highest.of(metric.name)),
    )
