"""NetworkPolicies: base/network.yaml with the options applied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stack.deploy.kubernetes.objects import GATEWAY, OMIT, SIDECAR, STORE_NAME, Object, load
from stack.deploy.kubernetes.options import KubernetesOptions
from stack.gateway.lease_client import DEFAULT_PORT

STORE_PEERS = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": STORE_NAME}}}]  # pods of our Valkey


def to_store(port: Any) -> Object:
    """Return the rule for requests to an object store, which may be anywhere."""
    return {"ports": [{"protocol": "TCP", "port": port}]}


def policies(wanted: KubernetesOptions) -> Iterator[Object]:
    """Yield the policies of the base."""
    named = _named(wanted)
    parts = (
        ("vllm-watch-board", wanted.board),
        ("vllm-watch-gateway", wanted.gateway),
        ("vllm-watch-sidecar-alone", wanted.sidecar_alone),
        ("vllm-watch-gateway-peers", wanted.gateways.several),
        ("vllm-watch-store", wanted.gateways.valkey),
        ("vllm-watch-gateway-store", wanted.gateways.has_store),
        ("vllm-watch-gateway-ship", bool(wanted.shipping.dataset)),
    )
    if any(runs for _, runs in parts):
        yield named["vllm-watch-closed"]
    yield from (named[name] for name, runs in parts if runs)
    if wanted.restrict_engines and wanted.gateway:
        yield named["vllm-watch-engines"]


def of_engines(wanted: KubernetesOptions) -> Object:
    """Return the policy that closes the engines to all but the gateway, Prometheus, and each other."""
    return _named(wanted)["vllm-watch-engines"]


def of_own_gateway(wanted: KubernetesOptions) -> Object:
    """Return the policy that lets Prometheus scrape our sidecar in the pods of somebody else's gateway."""
    return _named(wanted)["vllm-watch-sidecar"]


def _named(wanted: KubernetesOptions) -> dict[str, Object]:
    store = wanted.gateways.lease_store(wanted.namespace)
    objects = load(
        "network.yaml",
        STORE_PEERS=STORE_PEERS if wanted.gateways.valkey else OMIT,
        STORE_PORT=DEFAULT_PORT if store is None else store.address[1],
        SHIP_EGRESS=[to_store(wanted.shipping.port)] if wanted.shipping.in_store else OMIT,
        MONITORING=wanted.monitoring,
        PROMETHEUS_PORT=wanted.prometheus_port,
        ENGINE_PODS=wanted.engine_pods,
        ENGINE_PORT=int(wanted.engine_port) if wanted.engine_port.isdecimal() else wanted.engine_port,
        GATEWAY_PODS={"app.kubernetes.io/name": GATEWAY} if wanted.gateway else dict(SIDECAR),
    )
    return {each["metadata"]["name"]: each for each in objects}
