"""Objects as Kubernetes reads them, and the words that tie them together: names, labels, ports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Object = dict[str, Any]

PART_OF = {"app.kubernetes.io/part-of": "vllm-watch"}
GATEWAY, BOARD, CONFIG = "vllm-watch-gateway", "vllm-watch-board", "vllm-watch-config"
# Not vllm-...: Kubernetes puts the address of each Service into the environment of the pods beside it, and vLLM
# complains of every VLLM_ that it does not know, or does not start (--fail-on-environ-validation). Source: its
# platforms/interface.py, validate_environ,
# 0.32.
GATEWAY_SERVICE, METRICS_SERVICE, BOARD_SERVICE = "watch-gateway", "watch-metrics", "watch-board"
SIDECAR = {"vllm-watch-sidecar": "true"}  # a label of pods of somebody else's that got our sidecar
CLIENTS = {"vllm-watch-clients": "true"}  # a label of namespaces: whose pods may ask the gateway and open the board

# Name and number of each port; listeners, probes, Services, monitors and policies all read them here.
PORTS = {"http": 8000, "gateway-metrics": 8010, "sidecar": 9401, "board": 9402}


def label_of(name: str) -> dict[str, str]:
    """What selects the pods, or the Service, of this name."""
    return {"app.kubernetes.io/name": name}


def made(
    api: str,
    kind: str,
    name: str,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **rest: Any,
) -> Object:
    """An object without a namespace: kustomize, or whoever applies it, says in which one it is."""
    metadata: Object = {"name": name, "labels": {**label_of(name), **PART_OF, **(labels or {})}}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}


def service(name: str, pods: Mapping[str, str], ports: Iterable[str]) -> Object:
    """A Service that sends to pods ready or not. There is one pod: when its sidecar is ill, taking the gateway away
    would help nobody, and a watcher that does not answer must show as a target that is down, not as one that is
    gone."""
    listed = [{"name": port, "port": PORTS[port], "targetPort": port} for port in ports]
    return made("v1", "Service", name, spec={"selector": dict(pods), "publishNotReadyAddresses": True, "ports": listed})


def config_map(
    name: str,
    data: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    return made("v1", "ConfigMap", name, labels, annotations, data=dict(data))
