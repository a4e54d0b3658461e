"""Observed use of engines over weeks, from a Prometheus, for derived thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from alerts import thresholds
from alerts.labels import ENGINE, MODEL
from alerts.settings import Settings
from exporters.catalogue import promql, vllm
from exporters.catalogue.metric import Metric
from exporters.net.prometheus import Address, Prometheus, PrometheusError

LEAST_STEPS = 12  # of the window in which what counts was seen: an hour of a week
_STEPS = 2000  # of the window, each a minute or longer


class NoEvidence(ValueError):
    """A Prometheus that says nothing about engines; one sentence with the way out."""


CORE = (*ENGINE, "engine")  # each data-parallel rank has a cache of its own
Subject = tuple[str, ...]  # the labels that name an engine, one of its cores, or a model
Course = Mapping[float, float]  # time -> value


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """Recorded use, by engine, core or model, and by step. usage: the highest of each step; drained: requests finished
    per second in it; queued: the shortest queue of each step. p95, observed, bounds: of TTFT and inter-token
    latency."""

    source: str
    from_s: float
    to_s: float
    step_s: float
    usage: Mapping[Subject, Course] = field(default_factory=dict)
    preempted: Mapping[Subject, Course] = field(default_factory=dict)
    queued: Mapping[Subject, Course] = field(default_factory=dict)
    drained: Mapping[Subject, Course] = field(default_factory=dict)
    p95: Mapping[str, Mapping[Subject, Course]] = field(default_factory=dict)
    observed: Mapping[str, Mapping[Subject, Course]] = field(default_factory=dict)
    bounds: Mapping[str, Sequence[float]] = field(default_factory=dict)


LATENCIES: Mapping[str, Metric] = {
    thresholds.TTFT_P95.name: vllm.TIME_TO_FIRST_TOKEN,
    thresholds.INTER_TOKEN_P95.name: vllm.INTER_TOKEN_LATENCY,
}


@dataclass(frozen=True, slots=True)
class _Steps:
    """The range of a query in unix seconds, and the step between its points."""

    start_s: float
    end_s: float
    step_s: float


async def ask(
    where: Address, settings: Settings, window_s: float, now_s: float, model: str | None = None
) -> RecordedUse:
    """Read what a Prometheus recorded of the engines of these settings. Raises NoEvidence with a sentence."""
    if model is not None and not re.fullmatch(r'[^"\\\n]+', model):
        raise NoEvidence(f"{model!r} is no model's name")
    if window_s < LEAST_STEPS * 60:
        raise NoEvidence(
            f"a window of {window_s:g} s holds fewer than {LEAST_STEPS} steps of a minute: look back further with"
            " --window"
        )
    matchers = (settings.engine, *((f'model_name="{model}"',) if model else ()))
    async with Prometheus(where) as prometheus:
        try:
            scrape_s = await prometheus.scrape_s()
            over = _Steps(
                now_s - window_s, now_s, max(math.ceil(window_s / max(1, min(_STEPS, int(window_s / 60)))), scrape_s)
            )
            span = f"{round(max(over.step_s + scrape_s, 4 * scrape_s))}s"
            await _someone(prometheus, matchers, window_s, now_s, settings, model)

            async def course(question: str, by: Subject) -> dict[Subject, Course]:
                answer = await prometheus.over_time(question, over)
                if answer.error:
                    raise NoEvidence(answer.error)
                return {tuple(one.metric.get(label, "") for label in by): _known(one.values) for one in answer.series}

            return RecordedUse(
                where.shown, over.start_s, over.end_s, over.step_s,
                usage=await course(promql.highest(vllm.KV_CACHE_USAGE, span, CORE, matchers), CORE),
                preempted=await course(promql.growth(vllm.NUM_PREEMPTIONS, span, CORE, matchers), CORE),
                queued=await course(promql.lowest(vllm.NUM_REQUESTS_WAITING, span, ENGINE, matchers), ENGINE),
                drained=await course(promql.per_second(vllm.REQUEST_SUCCESS, span, ENGINE, matchers), ENGINE),
                p95={name: await course(promql.quantile(0.95, metric, span, MODEL, matchers), MODEL) for name,
                    metric in LATENCIES.items()},
                observed={name: await course(promql.observation_count(metric, span, MODEL, matchers), MODEL) for name,
                    metric in LATENCIES.items()},
                bounds={name: await _bounds(prometheus, metric, matchers, over) for name, metric in LATENCIES.items()},
            )  # fmt: skip
        except PrometheusError as error:
            raise NoEvidence(str(error)) from error


def _known(values: Iterable[tuple[float, str]]) -> dict[float, float]:
    return {at: value for at, text in values if math.isfinite(value := float(text))}


async def _someone(
    prometheus: Prometheus,
    matchers: Sequence[str],
    window_s: float,
    now_s: float,
    settings: Settings,
    model: str | None,
) -> None:
    question = promql.last_samples(vllm.NUM_REQUESTS_RUNNING, f"{round(window_s)}s", matchers)
    answer = await prometheus.as_of(question, now_s)
    if answer.error:
        raise NoEvidence(answer.error)
    if not answer.series:
        named = f" for model {model}" if model else ""
        raise NoEvidence(
            f"{prometheus.where.shown} recorded no engine{named} in this time, of jobs that match"
            f" {settings.overlay.engine_job}: are vLLM servers scraped, and under such a name? (engine_job in a file"
            " for --thresholds sets another)"
        )


async def _bounds(prometheus: Prometheus, metric: Metric, matchers: Sequence[str], over: _Steps) -> list[float]:
    for name in metric.names:
        texts = await prometheus.label_values("le", f"{name}_bucket{{{', '.join(matchers)}}}", over.start_s, over.end_s)
        if bounds := sorted({bound for text in texts if math.isfinite(bound := float(text))}):
            return bounds
    return []
