"""Autoscaling of engines: a recorded saturation of one model, and a ScaledObject or HorizontalPodAutoscaler on it.

Invariant: the query returns exactly one series while the model is scraped, and none otherwise; none is an error to the
autoscaler, never zero. Saturation is a sum in replicas' worth, so the controller divides it by the replicas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from alerts import managed_files, thresholds
from alerts.managed_files import marked
from alerts.printer import as_yaml
from alerts.rules import Recording
from alerts.settings import Settings
from exporters.catalogue import gateway, promql, vllm
from exporters.text import format_duration, parse_window
from stack.capacity.plan import Plan, replicas_for, steady_rate
from stack.capacity.replay import ScalingPolicy
from stack.deploy.kubernetes.objects import Object, add_labels, load_one
from stack.deploy.kubernetes.options import Pairs, pairs
from stack.option import Opt

RECORD = "cluster_namespace_model_name:vllm_saturation:avg3m"
LOAD = "cluster_namespace_model_name:vllm_held_requests:avg3m"
HELD = "cluster_namespace_job_instance_model_name:vllm_held_requests:avg3m"
FULL = "cluster_namespace_job_instance_model_name:vllm_saturation:avg3m"
WINDOW = "3m"  # of the means: single scrapes of a queue differ by tens of percent
LEAST_CALM_S = 300  # the controller's own default for fewer replicas
LONGEST_PERIOD_S = 1800  # that the API admits
_MODEL = ("cluster", "namespace", "model_name")
_PLACE = ("cluster", "namespace")
_ENGINE = ("cluster", "namespace", "job", "instance", "model_name")
_COMMAND = "vllm-watch kubernetes autoscale"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_FOLDER = "autoscaling"


def _read_cold_start(text: str) -> int:
    """Return the seconds of a cold start. Raises ValueError."""
    seconds = parse_window(text)
    if not 0 < seconds <= LONGEST_PERIOD_S:
        raise ValueError(
            f"{text} should be from 1s to 30m, the longest period of an autoscaler; make engines start faster, such as"
            " with weights on a local disk"
        )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleOptions:
    """Options of the export; what is None follows from the capacity worksheet or the thresholds. Raises ValueError."""

    deployment: Annotated[str, Opt(metavar="NAME", help="Deployment of the engines.")]
    kind: Annotated[str, Opt(choices=("Deployment", "StatefulSet"), help="Kind of that object.")] = "Deployment"
    namespace: Annotated[str, Opt(metavar="NAME", help="Namespace of the engines.")] = "vllm"
    cluster: Annotated[str, Opt(metavar="NAME", help="Label `cluster`, if Prometheus has several clusters.")] = ""
    prometheus: Annotated[str, Opt(metavar="URL", help="URL of Prometheus for KEDA.")] = (
        "http://prometheus-operated.monitoring.svc:9090"
    )
    operator_labels: Annotated[
        Pairs,
        Opt(name="--label", metavar="KEY=VALUE", help="Label by which the Prometheus Operator selects rules.",
            convert=partial(pairs, option="--label")),
    ] = ()  # fmt: skip
    target: Annotated[
        float | None,
        msgspec.Meta(gt=0, le=1),
        Opt(metavar="SHARE", help="Saturation of a replica to keep, 0 to 1.  [default: the plan's]"),
    ] = None
    least: Annotated[
        int | None,
        msgspec.Meta(ge=1),
        Opt(name="--min", metavar="N", help="Fewest replicas.  [default: those of the log's quietest hour, else 1]"),
    ] = None
    most: Annotated[
        int | None, msgspec.Meta(ge=1), Opt(name="--max", metavar="N", help="Most replicas.  [default: the plan's]")
    ] = None
    cold_start_s: Annotated[
        int | None,
        Opt(
            name="--cold-start",
            metavar="TIME",
            read=_read_cold_start,
            help="Measured time from a new pod to its first request.  [default: threshold start_time]",
        ),
    ] = None

    def __post_init__(self) -> None:
        for option, name in (("--deployment", self.deployment), ("--namespace", self.namespace)):
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{option} {name!r} is no name in Kubernetes; write lower-case letters, digits and '-', like vllm"
                )
        url = urlsplit(self.prometheus)
        if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc:
            raise ValueError(
                "--prometheus should be a web address without a password, such as http://prometheus.monitoring.svc:9090"
            )


@dataclass(frozen=True, slots=True)
class ScalingValue:
    """A value of the objects, and its reason."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Everything that the objects hold. values: the derived ones with their reasons; warnings: for the operator."""

    options: AutoscaleOptions
    model: str
    policy: ScalingPolicy
    values: tuple[ScalingValue, ...]
    warnings: tuple[str, ...]


def derive(
    options: AutoscaleOptions,
    model: str,
    seqs: int | None,
    plan: Plan | None,
    quietest_per_s: float | None,
    settings: Settings,
) -> Autoscaling:
    """Return the values of the objects. seqs: --max-num-seqs, if given; quietest_per_s: requests a second in the
    quietest hour of a log.

    Raises ValueError where an option is missing that neither plan nor log can replace."""
    slots, why_slots = _slots(seqs, plan)
    target, why_target = _target(options, plan, slots, settings)
    least, why_least = _least(options, plan, quietest_per_s)
    most, why_most = _most(options, plan, slots, target)
    if least > most:
        raise ValueError(f"the minimum {least} is more than the maximum {most}; change --min or --max")
    cold_s, why_cold = _cold_start(options, settings)
    calm_s = max(LEAST_CALM_S, cold_s)
    policy = ScalingPolicy(slots, target, least, most, cold_s, calm_s, parse_window(WINDOW))
    values = (
        ScalingValue("slots", str(slots), why_slots),
        ScalingValue("target", f"{target:g}", why_target),
        ScalingValue("minimum", str(least), why_least),
        ScalingValue("maximum", str(most), why_most),
        ScalingValue("scale-up period", format_duration(cold_s), why_cold),
        ScalingValue(
            "scale-down window", format_duration(calm_s),
            "A replica that was removed too early costs a cold start; at least 5m, the default of Kubernetes.",
        ),
    )  # fmt: skip
    return Autoscaling(options, model, policy, values, tuple(_warnings(options, plan, policy)))


def _slots(seqs: int | None, plan: Plan | None) -> tuple[int, str]:
    if seqs:
        return seqs, "--max-num-seqs, as given."
    found = next((flag for flag in plan.flags if flag.option == "--max-num-seqs"), None) if plan else None
    if found is None or found.value is None:
        raise ValueError("--max-num-seqs is missing: give it as the engines have it, or --model, --gpu and --traffic")
    return int(found.value), f"--max-num-seqs of the plan: {found.why}."


def _target(options: AutoscaleOptions, plan: Plan | None, slots: int, settings: Settings) -> tuple[float, str]:
    """Return the lowest of three: headroom for random arrivals, what binds in the plan, and the threshold of the
    cache."""
    if options.target:
        return options.target, "As given."
    cache = settings.at(thresholds.KV_CACHE_USAGE)
    found = [
        (
            steady_rate(1.0, 1.0, slots) / slots,
            f"With more, random arrivals need over {slots} slots in 5 % of the time.",
        ),
        (cache.value, f"Threshold kv_cache_usage, {cache.shown}."),
    ]
    if plan and plan.binds and plan.traffic and plan.traffic.time_s:
        limit = plan.binds
        found.append((
            limit.rate_per_s * plan.traffic.time_s / slots,
            f"{limit.name} allows one replica {limit.rate_per_s:.3g} requests a second of {plan.traffic.time_s:.3g} s.",
        ))  # fmt: skip
    value, why = min(found)
    return max(0.01, math.floor(value * 100) / 100), why


def _least(options: AutoscaleOptions, plan: Plan | None, quietest_per_s: float | None) -> tuple[int, str]:
    if options.least:
        return options.least, "As given."
    if plan and plan.binds and quietest_per_s is not None:
        needed = replicas_for(quietest_per_s, plan.binds.rate_per_s)
        return needed, f"The quietest hour of the log has {quietest_per_s:.3g} requests a second."
    return 1, "No log shows a quiet hour; an engine that is not there cannot be woken by its own metrics."


def _most(options: AutoscaleOptions, plan: Plan | None, slots: int, target: float) -> tuple[int, str]:
    if options.most:
        return options.most, "As given."
    if plan is None or plan.replicas is None or plan.traffic is None or plan.traffic.in_flight is None:
        raise ValueError(
            "--max is missing: give it, or a worksheet with rate, lengths, ttft_p95 and itl_p95 (--traffic, --rate)"
        )
    held = plan.traffic.in_flight
    needed = max(plan.replicas, replicas_for(held, slots * target))
    return needed, f"{plan.traffic.arrivals_per_s:.3g} requests a second are {held:.3g} at once."


def _cold_start(options: AutoscaleOptions, settings: Settings) -> tuple[int, str]:
    if options.cold_start_s:
        return options.cold_start_s, "Cold start, as given: until then the last new replica changes nothing."
    usual = settings.at(thresholds.START_TIME)
    return min(round(usual.value), LONGEST_PERIOD_S), f"Threshold start_time, {usual.shown}, in place of a cold start."


def _warnings(options: AutoscaleOptions, plan: Plan | None, policy: ScalingPolicy) -> Iterator[str]:
    yield f"start the engines with --max-num-seqs {policy.slots}; with another value the saturation is wrong"
    if not options.cold_start_s:
        yield "no --cold-start: measure it and export again (docs/guides/autoscaling.md)"
    if plan and not plan.measured and not options.most:
        yield "the maximum rests on bounds of the GPU's speed; give --measured-rate, or --max"
    if not options.operator_labels:
        yield "no --label: the Prometheus of kube-prometheus-stack reads only rules with release=NAME of its chart"


# ---- the recorded series


def recordings(scaling: Autoscaling) -> tuple[Recording, ...]:
    """Return the rules for the saturation of one model, each reading those before it. Means over three minutes.

    Of an engine: requests that run and wait, per slot; or the share of its KV cache with the queue at the same size, if
    that is more. The gateway's queue has no model, so each model of the namespace gets the part that it has of the
    requests in engines."""
    namespace, model = _eq("namespace", scaling.options.namespace), _eq("model_name", scaling.model)
    slots = scaling.policy.slots
    running, waiting, cache = (
        promql.average(metric, WINDOW, _ENGINE, (namespace, model))
        for metric in (vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING, vllm.KV_CACHE_USAGE)
    )
    all_held = " + ".join(
        promql.average(metric, WINDOW, _PLACE, (namespace,))
        for metric in (vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING)
    )
    held, full, load = (f"{name}{{{namespace}, {model}}}" for name in (HELD, FULL, LOAD))
    part = f"{load} / on ({', '.join(_PLACE)}) group_left () (({all_held}) > 0)"
    queue = promql.average(gateway.WAITING, WINDOW, _PLACE, (namespace,))
    before = f"{part} * on ({', '.join(_PLACE)}) group_left () {queue} / {slots}"
    by_model = f"sum by ({', '.join(_MODEL)})"
    return (
        Recording(HELD, f"{running} + {waiting}", "requests that run and wait in an engine"),
        Recording(
            FULL,
            f"{cache} * {held} / ({running} > 0) > {held} / {slots} or {held} / {slots}",
            "saturation of an engine: 1 is full",
        ),
        Recording(LOAD, f"{by_model} ({held})", "requests that run and wait in all engines of the model"),
        Recording(
            RECORD,
            f"{by_model} ({full}) + ({before} or {by_model} ({full}) * 0)",
            "load of a model in replicas' worth: 1 is one replica that is full",
        ),
    )


def query(scaling: Autoscaling) -> str:
    """Return the query of the autoscaler: one series, or none."""
    return f"sum({RECORD}{{{', '.join(_where(scaling))}}})"


def _where(scaling: Autoscaling) -> Iterator[str]:
    if scaling.options.cluster:
        yield _eq("cluster", scaling.options.cluster)
    yield _eq("namespace", scaling.options.namespace)
    yield _eq("model_name", scaling.model)


def _eq(label: str, value: str) -> str:
    return f"{label}={json.dumps(value, ensure_ascii=False)}"


# ---- objects


def files(scaling: Autoscaling) -> dict[str, str]:
    """Return name and text of every file."""
    options, policy = scaling.options, scaling.policy
    name = f"{options.deployment}-saturation"
    group = {"name": name, "interval": "30s", "rules": [each.as_rule() for each in recordings(scaling)]}
    words = {
        "NAME": options.deployment, "NAMESPACE": options.namespace, "KIND": options.kind,
        "LEAST": policy.least, "MOST": policy.most, "BEHAVIOR": _behavior(policy),
    }  # fmt: skip
    metric = "vllm_saturation_" + re.sub(r"[^a-z0-9]", "_", options.deployment)
    selected = ",".join(each for each in _where(scaling) if not each.startswith("namespace="))
    made = {
        "rule.yaml": add_labels(load_one("rule.yaml", NAME=name, GROUPS=[group]), options.operator_labels),
        "keda.yaml": _scaling(
            "keda.yaml", PROMETHEUS=options.prometheus, QUERY=query(scaling), THRESHOLD=f"{policy.target:g}", **words
        ),
        "hpa.yaml": _scaling("hpa.yaml", METRIC=metric, VALUE=f"{round(policy.target * 1000)}m", **words),
        "prometheus-adapter.yaml": _scaling(
            "prometheus-adapter.yaml",
            METRIC=metric,
            SERIES=f"{RECORD}{{{', '.join(_where(scaling))}}}",
            QUERY=f"sum(<<.Series>>{{<<.LabelMatchers>>,{selected}}})",
        ),
    }
    made["rule.yaml"]["metadata"]["namespace"] = options.namespace
    return {file: marked(as_yaml(each), _COMMAND) for file, each in made.items()}


def _scaling(name: str, **words: object) -> Object:
    return load_one(f"{_FOLDER}/{name}", **words)


def _behavior(policy: ScalingPolicy) -> Object:
    def one_pod(period_s: float) -> Object:
        return {"type": "Pods", "value": 1, "periodSeconds": round(period_s)}

    return {
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [one_pod(policy.cold_start_s)]},
        "scaleDown": {
            "stabilizationWindowSeconds": round(policy.calm_s), "policies": [one_pod(policy.smoothed_s)],
        },
    }  # fmt: skip


def write(folder: Path, scaling: Autoscaling, force: bool = False) -> dict[Path, bool]:
    """Write the files; whether each changed. Raises NotOurs before anything is written, and OSError."""
    return managed_files.write(folder, files(scaling), managed_files.changed_since, force)


def next_steps(folder: Path, scaling: Autoscaling) -> Iterator[str]:
    """Return the next steps with the files, one command or sentence each."""
    where = f"kubectl -n {scaling.options.namespace}"
    yield f"kubectl apply -f {folder / 'rule.yaml'}    # then ask Prometheus: {query(scaling)}"
    yield f"with KEDA: kubectl apply -f {folder / 'keda.yaml'}"
    yield (
        f"without KEDA: prometheus-adapter with the Helm values {folder / 'prometheus-adapter.yaml'}, then kubectl"
        f" apply -f {folder / 'hpa.yaml'}; never both, since KEDA makes an autoscaler of its own"
    )
    yield f"{where} get hpa    # TARGETS shows the saturation of a replica beside {scaling.policy.target:g}"
