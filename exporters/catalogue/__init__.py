"""Catalogue of every series that vllm-watch knows, and PromQL checks.

Invariant: metric names are typed in this package only."""

from exporters.catalogue.dcgm import DCGM
from exporters.catalogue.gateway import GATEWAY
from exporters.catalogue.gpu import GPU
from exporters.catalogue.metric import Metric
from exporters.catalogue.prometheus import PROMETHEUS
from exporters.catalogue.self_monitoring import ALERTMANAGER, COLLECTOR, PROMETHEUS_SERVER
from exporters.catalogue.ship import SHIP
from exporters.catalogue.sidecar import LAB, SIDECAR
from exporters.catalogue.vllm import BESIDE, NEVER_EXISTED, RETIRED, VLLM

OURS: tuple[Metric, ...] = (*SIDECAR, *GPU, *GATEWAY, *SHIP, *LAB)
OTHERS: tuple[Metric, ...] = (*DCGM, *PROMETHEUS_SERVER, *ALERTMANAGER, *COLLECTOR, *PROMETHEUS)
EVERYTHING: tuple[Metric, ...] = (*VLLM, *RETIRED, *BESIDE, *OURS, *OTHERS)

__all__ = ["BESIDE", "EVERYTHING", "NEVER_EXISTED", "OTHERS", "OURS", "RETIRED", "VLLM", "Metric"]
