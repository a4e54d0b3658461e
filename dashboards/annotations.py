"""Annotations over every panel: tuning events, engine starts, firing alerts. Each from one source, so that none shows
twice.

The sidecar also records a restart as an event; restarts are left out of the events here, because the engine's own start
time shows them everywhere, with or without a sidecar. Copies that are pushed to Grafana as annotations of its own are
not queried."""

from __future__ import annotations

from dataclasses import dataclass

from dashboards.model import Dashboard
from exporters.catalogue import promql, promql_ast, sidecar, vllm
from exporters.catalogue.producers import Component, needed
from exporters.catalogue.prometheus import ALERTS, PROCESS_START

MIXED_BOUNDS = "VLLMMixedHistogramBounds"
SETTLED_AFTER_S = 600  # where events are drawn as regions: ten minutes of warming caches that a comparison leaves out


@dataclass(frozen=True, slots=True)
class Annotation:
    """Marks over time. at_value: the sample's value (milliseconds) is the time; else every stretch of samples is a
    region.

    title holds labels in double braces, as legends do."""

    name: str
    expr: str
    title: str
    colour: str
    at_value: bool = False

    @property
    def needs(self) -> frozenset[Component]:
        return needed(promql_ast.names(self.expr))


def of(board: Dashboard) -> tuple[Annotation, ...]:
    """The annotations of a board. Events and starts are narrowed by its variables as far as they can be; alerts of ours
    always show, whatever is chosen, because their labels are those of what they watch. What several sidecars read from
    one file is drawn once."""
    cluster, *rest = (
        f'{label}=~"${label}"' if board.uses(label) else "" for label in ("cluster", "namespace", "job", "instance")
    )
    engine = tuple(filter(None, (cluster, *rest)))
    events = promql.worst(sidecar.EVENT_TIME, ("kind",), tuple(filter(None, ('kind!="restart"', cluster))))
    running = promql.series(vllm.NUM_REQUESTS_RUNNING, engine)
    starts = f"{promql.series(PROCESS_START, engine)} and on (cluster, job, instance) {running}"
    urgent = promql.series(ALERTS, ('alertstate="firing"', 'alertname=~"VLLM.*"', 'severity=~"critical|warning"'))
    # percentiles are drawn otherwise meanwhile
    mixed = promql.series(ALERTS, ('alertstate="firing"', f'alertname="{MIXED_BOUNDS}"'))
    if board.team:  # events, starts and most alerts concern engines, which teams share
        own = promql.series(ALERTS, ('alertstate="firing"', 'alertname=~"VLLM.*"', promql.equals("team", board.team)))
        return (Annotation("Firing alerts", f"max by (alertname, severity) ({own})", "{{alertname}}", "red"),)
    firing = f"max by (alertname, severity, model_name, instance) ({urgent} or {mixed})"
    alerts = Annotation("Firing alerts", firing, "{{alertname}} {{instance}}", "red")
    if board.recorded:  # alerts are written by rules, as all that it reads; events and starts are not
        return (alerts,)
    return (
        Annotation("Tuning events", f"time() - {events} < {SETTLED_AFTER_S}", "{{kind}}: settling", "purple")
        if board.regions
        else Annotation("Tuning events", f"{events} * 1000", "{{kind}}", "purple", at_value=True),
        Annotation("Engine starts", f"({starts}) * 1000", "{{instance}} started", "orange", at_value=True),
        alerts,
    )


def only(annotations: tuple[Annotation, ...], components: frozenset[Component]) -> tuple[Annotation, ...]:
    return tuple(annotation for annotation in annotations if annotation.needs <= components)
