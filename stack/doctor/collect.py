"""Evidence for the doctor, from two scrapes of engines, a Prometheus, or a request log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from exporters.catalogue import gateway, vllm
from exporters.catalogue import sidecar as sidecar_series
from exporters.catalogue.exposition_parser import Exposition, Labels
from exporters.catalogue.metric import Metric
from exporters.requests.read import ReadReport, read_records
from exporters.requests.record import UNKNOWN_TEAM, RequestRecord, ended_at
from stack.doctor.evidence import (
    AdapterEvidence,
    Clients,
    EngineSnapshot,
    GatewayEvidence,
    Gauge,
    ModelEvidence,
    Spread,
)
from stack.doctor.gateways import gateway_notes
from stack.doctor.series import CROWDED, QUEUE_RISE, STILL, SeriesWindow
from stack.tuning.derived import plain
from stack.tuning.samples import Span

LOG = "the request log"
FAR_OFF = 30.0  # times; bursts between two looks make ten


Place = tuple[str, str]  # instance, and the engine core behind it


def evidence(
    series: SeriesWindow, records: Sequence[RequestRecord] | None = None, model: str | None = None
) -> tuple[ModelEvidence, ...]:
    """Return evidence for each model of the engines. records: the request log of the same time. model: this one alone.
    Raises ValueError where no engine has that model, or any."""
    places: dict[str, set[Place]] = defaultdict(set)
    for labels, _ in series.highest.of(vllm.NUM_REQUESTS_RUNNING.name):
        places[labels.get("model_name", "")].add((labels["instance"], labels.get("engine", "")))
    asked = sorted(places) if model is None else [model] * (model in places)
    if not asked:
        shown = f"no engine in {series.source} shows " + (
            f"the model {model}" if model is not None else "vLLM's series"
        )
        shown += f", only {', '.join(sorted(places))}" * bool(places)
        raise ValueError(
            f"{shown}; `vllm-watch metrics check URL` looks at an engine's page, and --model names a model as that page"
            " does"
        )
    return tuple(
        _of_model(series, name, sorted(places[name]), _records_of(records, name, len(places)), len(places))
        for name in asked
    )


def _of_model(
    series: SeriesWindow, model: str, places: Sequence[Place], records: Sequence[RequestRecord] | None, models: int
) -> ModelEvidence:
    several = Counter(instance for instance, _ in places)
    named = {
        (f"{instance} engine {core}" if several[instance] > 1 else instance): (instance, core)
        for instance, core in places
    }
    notes = [
        f"{instance} started anew within this time: "
        + ("its figures count from then" if series.scraped else "its cache was cold after that")
        for instance in series.restarted
        if instance in several
    ]
    notes += ["the request log holds no record of this model and time"] * (records is not None and not records)
    notes += gateway_notes(series)
    whole, clients = _figures(series, model, places), _clients(series, model, records, models)
    notes += _wrong_time(whole) if series.scraped and not series.restarted else ()
    notes += _wrong_log(whole, clients)
    return ModelEvidence(
        model=model,
        source=series.source,
        whole=whole,
        engines={name: _figures(series, model, [place]) for name, place in named.items()} if len(named) > 1 else {},
        clients=clients,
        gateway=_gateway(series, models),
        logged=records is not None,
        notes=tuple(notes),
    )


def _wrong_time(figures: EngineSnapshot) -> Iterator[str]:
    """Yield a note where the time is implausible: total gaps between tokens / time is the number of concurrent requests
    (Little's law), which should be near the running ones."""
    gaps, running = figures.between_tokens, figures.running
    if gaps is None or running is None:
        return
    at_once = gaps.total / figures.seconds
    if at_once > FAR_OFF * max(running.highest, 1.0) or at_once * FAR_OFF < running.lowest:
        yield (
            f"are {figures.seconds:g} s right? By the gaps between tokens {plain(at_once)} requests were answered at"
            f" once, and {running.lowest:g} to {running.highest:g} ran"
        )


def _wrong_log(figures: EngineSnapshot, clients: Clients | None) -> Iterator[str]:
    """Yield a note where the log seems to be of another time: a saved exposition has no date."""
    if clients is None or clients.source != LOG or figures.ended is None:
        return
    logged = clients.outcomes.get("ok", 0.0) + clients.outcomes.get("unknown", 0.0)
    if max(logged, figures.ended) > 2 * min(logged, figures.ended) + 10:
        yield (
            f"is the log of the same time? It holds {logged:.0f} complete answers, and the engine ended"
            f" {figures.ended:.0f}"
        )


def _figures(series: SeriesWindow, model: str, places: Sequence[Place]) -> EngineSnapshot:
    """Return values summed over engine cores. Series without a core, such as rejections, are of the instance; series
    without a model, of all that it serves.

    Of a prefill/decode pair each request counts once (Metric.pair). The queue time of a decode engine contains the KV
    transfer, so it is unknown."""
    instances = {instance for instance, _ in places}

    def mine(labels: Labels) -> bool:
        if labels.get("model_name", model) != model or labels.get("instance") not in instances:
            return False
        return "engine" not in labels or (labels["instance"], labels["engine"]) in places

    counting = partial(_counting, series, instances, mine)

    def grown(metric: Metric, *by: str) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        counts = counting(metric)
        for labels, value in series.grown.of(metric.name):
            if counts(labels):
                key = tuple(labels.get(label, "") for label in by)
                found[key] = found.get(key, 0.0) + value
        return found

    def total(metric: Metric) -> float | None:
        return grown(metric).get(())

    def spread(metric: Metric) -> Spread | None:
        return _spread(series.grown, metric, counting(metric))

    def gauge(metric: Metric, across: Callable[[Iterable[float]], float] = sum, **where: str) -> Gauge | None:
        return _gauge(series, metric, lambda labels: mine(labels) and where.items() <= labels.items(), across)

    asked = {
        key: value for key, value in grown(vllm.HTTP_REQUESTS, "handler", "status").items() if key[0].startswith("/v1/")
    }
    return EngineSnapshot(
        seconds=series.seconds,
        begun=_count(series, vllm.TIME_TO_FIRST_TOKEN, counting(vllm.TIME_TO_FIRST_TOKEN)),
        ended=_count(series, vllm.E2E_REQUEST_LATENCY, counting(vllm.E2E_REQUEST_LATENCY)),
        finished={reason: value for (reason,), value in grown(vllm.REQUEST_SUCCESS, "finished_reason").items()},
        prompt_tokens=total(vllm.PROMPT_TOKENS),
        generation_tokens=total(vllm.GENERATION_TOKENS),
        lookups=total(vllm.PREFIX_CACHE_QUERIES),
        hits=total(vllm.PREFIX_CACHE_HITS),
        preemptions=total(vllm.NUM_PREEMPTIONS),
        drafts=total(vllm.SPEC_DECODE_NUM_DRAFTS),
        drafted=total(vllm.SPEC_DECODE_NUM_DRAFT_TOKENS),
        accepted=total(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS),
        rejections={reason: value for (reason,), value in grown(vllm.ADMISSION_REJECTIONS, "reason").items()},
        http=_summed(asked, 1),
        ttft=spread(vllm.TIME_TO_FIRST_TOKEN),
        between_tokens=spread(vllm.INTER_TOKEN_LATENCY),
        per_token=spread(vllm.REQUEST_TIME_PER_OUTPUT_TOKEN),
        e2e=spread(vllm.E2E_REQUEST_LATENCY),
        queue=spread(vllm.REQUEST_QUEUE_TIME),
        prefill=spread(vllm.REQUEST_PREFILL_TIME),
        decode=spread(vllm.REQUEST_DECODE_TIME),
        prompt_length=spread(vllm.REQUEST_PROMPT_TOKENS),
        answer_length=spread(vllm.REQUEST_GENERATION_TOKENS),
        running=gauge(vllm.NUM_REQUESTS_RUNNING),
        waiting=gauge(vllm.NUM_REQUESTS_WAITING),
        crowded=_crowded(series, mine, instances),
        deferred=gauge(vllm.NUM_REQUESTS_WAITING_BY_REASON, reason="deferred"),
        kv=gauge(vllm.KV_CACHE_USAGE, max),
        caching=_caching(series.configured, mine),
        states={each: series.states[each] for each in sorted(instances & series.states.keys())},
        still_s=_least(series, STILL, mine),
        silent_s=min(series.silent[each] for each in instances) if instances <= series.silent.keys() else None,
        queue_rise=None if (rise := _named(series, QUEUE_RISE, mine)) is None else rise.mean,
        steps=_count(series, vllm.ITERATION_TOKENS, mine),
    )


def _counting(
    series: SeriesWindow, instances: Iterable[str], mine: Callable[[Labels], bool], metric: Metric
) -> Callable[[Labels], bool]:
    """Select the series of the engines that count a request of a prefill/decode pair; all where only one role is
    there, except for a queue time that is none."""
    together = len({series.roles.get(instance) for instance in instances}) > 1
    if metric.pair is None or not (together or metric is vllm.REQUEST_QUEUE_TIME):
        return mine
    other = metric.pair.other
    return lambda labels: mine(labels) and series.roles.get(labels["instance"]) != other


def _least(series: SeriesWindow, name: str, mine: Callable[[Labels], bool]) -> float | None:
    """Return the smallest value of all engine cores; None unless each of them has one."""
    cores = sum(mine(labels) for labels, _ in series.highest.of(vllm.NUM_REQUESTS_RUNNING.name))
    found = [value for labels, value in series.lowest.of(name) if mine(labels)]
    return min(found) if found and len(found) == cores else None


def _count(series: SeriesWindow, metric: Metric, mine: Callable[[Labels], bool]) -> float | None:
    found = [value for labels, value in series.grown.of(f"{metric.name}_count") if mine(labels)]
    return sum(found) if found else None


def _spread(page: Exposition, metric: Metric, mine: Callable[[Labels], bool]) -> Spread | None:
    """Return the growth of a histogram; None where it did not grow."""
    counts: dict[float, float] = {}
    for labels, value in page.of(f"{metric.name}_bucket"):
        if mine(labels):
            bound = float(labels["le"])
            counts[bound] = counts.get(bound, 0.0) + value
    total = sum(value for labels, value in page.of(f"{metric.name}_sum") if mine(labels))
    buckets = tuple(sorted(counts.items()))
    return Spread(buckets[-1][1], total, buckets) if buckets and buckets[-1][1] > 0 else None


def _gauge(
    series: SeriesWindow,
    metric: Metric,
    mine: Callable[[Labels], bool],
    across: Callable[[Iterable[float]], float] = sum,
) -> Gauge | None:
    return _named(series, metric.name, mine, across)


def _named(
    series: SeriesWindow, name: str, mine: Callable[[Labels], bool], across: Callable[[Iterable[float]], float] = sum
) -> Gauge | None:
    found = [
        [value for labels, value in page.of(name) if mine(labels)]
        for page in (series.lowest, series.mean, series.highest)
    ]
    lowest, mean, highest = found
    return Gauge(across(lowest), across(mean), across(highest)) if all(found) else None


def _crowded(series: SeriesWindow, mine: Callable[[Labels], bool], instances: Iterable[str]) -> Gauge | None:
    found = _named(series, CROWDED, mine)
    return found and replace(
        found, looks=min((series.looks[each] for each in instances if each in series.looks), default=None)
    )


def _caching(configured: Sequence[Labels], mine: Callable[[Labels], bool]) -> bool | None:
    """Return False when prefix caching is off at one engine, where the others' hits do not help."""
    flags = [
        labels["enable_prefix_caching"] for labels in configured if "enable_prefix_caching" in labels and mine(labels)
    ]
    return all(word == "True" for word in flags) if flags else None


def records_of(
    paths: Iterable[Path], spans: Sequence[Span] = (), report: ReadReport | None = None
) -> list[RequestRecord]:
    """Return the records of request logs that ended within the spans; all without spans. report: receives what is left
    out. Raises OSError."""
    found: list[RequestRecord] = []
    for record in read_records(paths, report, probes=False):
        at_s = ended_at(record)
        if not spans or (at_s is not None and any(start <= at_s < end for start, end in spans)):
            found.append(record)
    return found


def _records_of(records: Sequence[RequestRecord] | None, model: str, models: int) -> Sequence[RequestRecord] | None:
    """Return the records of a model. Where only one is served, aliases and adapters count as that model."""
    return records if records is None or models == 1 else [record for record in records if record.model == model]


def _clients(series: SeriesWindow, model: str, records: Sequence[RequestRecord] | None, models: int) -> Clients | None:
    """Return evidence from clients: the log, else the sidecar's series, else the gateway's, which know no model."""
    if records:
        return _of_log(records)
    sidecar = dict(
        _by(
            series.grown, sidecar_series.REQUESTS, ("team", "outcome"), lambda labels: labels.get("model_name") == model
        )
    )
    if sidecar:
        of_model = _having(model_name=model)
        return Clients(
            source="the sidecar's series",
            outcomes=_summed(sidecar, 1),
            teams=_summed(sidecar, 0),
            reasons=_summed(dict(_by(series.grown, sidecar_series.REASONS, ("reason",), of_model)), 0),
            refused=_summed(
                dict(
                    _by(series.grown, sidecar_series.REASONS, ("team",), _having(model_name=model, outcome="rejected"))
                ),
                0,
            ),
            ttft=_spread(series.grown, sidecar_series.TTFT, of_model),
            tpot=_spread(series.grown, sidecar_series.TPOT, of_model),
            queue=_spread(series.grown, sidecar_series.QUEUE, of_model),
        )
    counted = dict(_by(series.grown, gateway.REQUESTS, ("team", "outcome"))) if models == 1 else {}
    if not counted:
        return None
    rejected = dict(_by(series.grown, gateway.REJECTED, ("team", "reason")))
    return Clients(
        source="the gateway's page",
        outcomes=_summed(counted, 1),
        teams=_summed(counted, 0),
        reasons=_summed(rejected, 1),
        refused=_summed(rejected, 0),
    )


def _of_log(records: Sequence[RequestRecord]) -> Clients:
    good = [record for record in records if record.outcome in ("ok", None)]

    def seconds(name: str) -> Spread | None:
        return Spread.of(value / 1000 for record in good if (value := getattr(record, name)) is not None)

    return Clients(
        source=LOG,
        outcomes=Counter(record.outcome or "unknown" for record in records),
        reasons=Counter(record.reason for record in records if record.reason),
        teams=Counter(record.team or UNKNOWN_TEAM for record in records),
        refused=Counter(record.team or UNKNOWN_TEAM for record in records if record.outcome == "rejected"),
        ttft=seconds("ttft_ms"),
        tpot=seconds("tpot_ms"),
        queue=seconds("queue_ms"),
        adapters=dict(_adapters(good)),
    )


def _adapters(records: Sequence[RequestRecord]) -> Iterator[tuple[str | None, AdapterEvidence]]:
    """Yield the times of each adapter, and of the base model."""
    found: defaultdict[str | None, list[RequestRecord]] = defaultdict(list)
    for record in records:
        found[record.adapter].append(record)
    for adapter, own in found.items():
        if ttft := Spread.of(record.ttft_ms / 1000 for record in own if record.ttft_ms is not None):
            prompts = Spread.of(record.prompt_tokens for record in own if record.prompt_tokens is not None)
            yield adapter, AdapterEvidence(ttft, prompts)


def _gateway(series: SeriesWindow, models: int) -> GatewayEvidence | None:
    def gauge(metric: Metric) -> Gauge | None:
        return _gauge(series, metric, lambda _: True)

    in_hand: defaultdict[str, float] = defaultdict(float)
    for metric in (gateway.WAITING, gateway.RUNNING):
        for labels, value in series.highest.of(metric.name):
            in_hand[labels.get("team", "")] += value
    shown = (gauge(gateway.WAITING), gauge(gateway.RUNNING), gauge(gateway.SLOTS), gauge(gateway.SLOTS_LIMIT))
    lag = _spread(series.grown, gateway.LOOP_LAG, lambda _: True)
    if lag is None and not any(shown):
        return None
    waiting, running, slots, limit = shown
    teams = {team: value for team, value in in_hand.items() if value > 0}
    upstreams = len({labels.get("address") for labels, _ in series.highest.of(gateway.UPSTREAM_UP.name)})
    only = models == 1 and upstreams <= len(
        {labels["instance"] for labels, _ in series.highest.of(vllm.NUM_REQUESTS_RUNNING.name)}
    )
    return GatewayEvidence(
        waiting=waiting, running=running, slots=slots, slots_limit=limit, teams=teams, lag=lag, only=only
    )


def _having(**labels: str) -> Callable[[Labels], bool]:
    return lambda its: labels.items() <= its.items()


def _by(
    page: Exposition, metric: Metric, names: Sequence[str], mine: Callable[[Labels], bool] = lambda _: True
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield growth by some labels; what did not grow is left out."""
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for labels, value in page.of(metric.name):
        if mine(labels) and value > 0:
            found[tuple(labels.get(name, "") for name in names)] += value
    yield from found.items()


def _summed(by: Mapping[tuple[str, ...], float], at: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in by.items():
        found[key[at]] = found.get(key[at], 0.0) + value
    return found
