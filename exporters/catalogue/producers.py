"""Map from series to the component that exposes it, so that a panel can name the missing component."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from exporters.catalogue import dcgm, gateway, gpu, prometheus, self_monitoring, ship, sidecar, vllm
from exporters.catalogue.metric import Metric


class Component(Enum):
    """Component that must run and be scraped for a series to exist; the value is its name in messages."""

    ENGINE = "a vLLM engine"
    SIDECAR = "the sidecar (vllm-watch sidecar run)"
    GATEWAY = "the gateway (vllm-watch gateway run)"
    SHIP = "the shipper (vllm-watch ship run)"
    GPU = "the sidecar on the GPU host"
    DCGM = "NVIDIA's dcgm-exporter"
    LAB = "the embedded lab (make lab)"
    COLLECTOR = "an OpenTelemetry collector"
    PROMETHEUS = "a Prometheus that scrapes itself"
    ALERTMANAGER = "a scraped Alertmanager"
    RULES = "our rules (alerts/prometheus)"
    SCRAPE = "a Prometheus"  # made by every Prometheus for every target


GROUPS: tuple[tuple[Component, tuple[Metric, ...]], ...] = (
    (Component.ENGINE, (*vllm.VLLM, *vllm.RETIRED, *vllm.BESIDE, prometheus.PROCESS_START)),
    (Component.SIDECAR, sidecar.SIDECAR),
    (Component.GATEWAY, gateway.GATEWAY),
    (Component.SHIP, ship.SHIP),
    (Component.GPU, gpu.GPU),
    (Component.DCGM, dcgm.DCGM),
    (Component.LAB, sidecar.LAB),
    (Component.COLLECTOR, self_monitoring.COLLECTOR),
    (Component.PROMETHEUS, self_monitoring.PROMETHEUS_SERVER),
    (Component.ALERTMANAGER, self_monitoring.ALERTMANAGER),
    (Component.RULES, (prometheus.ALERTS,)),
    (Component.SCRAPE, prometheus.SCRAPE),
)
_BY_SAMPLE = {sample: component for component, metrics in GROUPS for metric in metrics for sample in metric.samples}
_BY_NAME = {metric.name: component for component, metrics in GROUPS for metric in metrics}


def shown_by(metric: Metric) -> Component:
    """Return the component that exposes a metric. Raises KeyError for a metric outside the catalogue."""
    return _BY_NAME[metric.name]


def needed(samples: Iterable[str]) -> frozenset[Component]:
    """Return the components required for these samples. Names outside the catalogue are recorded series."""
    return frozenset(_BY_SAMPLE.get(sample, Component.RULES) for sample in samples)
