"""Who may speak to whom. Only a cluster whose network enforces NetworkPolicies heeds them; without, they say nothing
and do nothing.

What watches is closed by default and opened where it is needed. An engine is closed to all but the gateway, Prometheus
and the other engines: one model over several pods talks among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stack.deploy.kubernetes.objects import BOARD, CLIENTS, GATEWAY, PART_OF, PORTS, SIDECAR, Object, label_of, made
from stack.deploy.kubernetes.options import KubernetesOptions

_NAMED = "kubernetes.io/metadata.name"  # which every namespace has
# Of whoever answers names: which pods or address that is differs by cluster (kube-dns, or NodeLocal DNSCache as pods of
# another label, at a link-local address of the installer's choice, or at that of kube-dns' own Service), and one that
# were missing here
# would leave ours without names.
_DNS = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}


def policies(wanted: KubernetesOptions) -> Iterator[Object]:
    yield _policy("vllm-watch-closed", dict(PART_OF), [], [])
    asks = [{"namespaceSelector": {"matchLabels": CLIENTS}}]
    to_prometheus = {"to": [_prometheus(wanted)], "ports": [_port(wanted.prometheus_port)]}
    yield _policy(BOARD, label_of(BOARD), [{"from": asks, "ports": [_port(PORTS["board"])]}], [_DNS, to_prometheus])
    if not wanted.with_gateway:
        return
    asked_by = [{"from": asks, "ports": [_port(PORTS["http"])]}, _scraped(wanted, "gateway-metrics", "sidecar")]
    yield _policy(
        GATEWAY, label_of(GATEWAY), asked_by, [_DNS, {"to": [_engines(wanted)], "ports": [_engine_port(wanted)]}]
    )
    if not wanted.open_engines:
        yield of_engines(wanted)


def of_engines(wanted: KubernetesOptions) -> Object:
    """Closes the engines to all but the gateway, ours or not, Prometheus, and each other."""
    gateway = {"podSelector": {"matchLabels": label_of(GATEWAY) if wanted.with_gateway else dict(SIDECAR)}}
    asked = {"from": [gateway, _prometheus(wanted)], "ports": [_engine_port(wanted)]}
    return _policy("vllm-watch-engines", dict(wanted.engine_selector), [asked, {"from": [_engines(wanted)]}])


def of_own_gateway(wanted: KubernetesOptions) -> Object:
    """For pods of a gateway that a policy of somebody's closes already; to others it would be the first one, and shut
    their clients out."""
    return _policy("vllm-watch-sidecar", dict(SIDECAR), [_scraped(wanted, "sidecar")])


def _engines(wanted: KubernetesOptions) -> Object:
    return {"podSelector": {"matchLabels": dict(wanted.engine_selector)}}


def _engine_port(wanted: KubernetesOptions) -> Object:
    return _port(int(wanted.engine_port) if wanted.engine_port.isdecimal() else wanted.engine_port)


def _scraped(wanted: KubernetesOptions, *ports: str) -> Object:
    return {"from": [_prometheus(wanted)], "ports": [_port(PORTS[port]) for port in ports]}


def _prometheus(wanted: KubernetesOptions) -> Object:
    """The operator's Prometheus, by the label that it gives to its pods."""
    return {
        "namespaceSelector": {"matchLabels": {_NAMED: wanted.monitoring}},
        "podSelector": {"matchLabels": label_of("prometheus")},
    }


def _port(port: int | str) -> Object:
    return {"protocol": "TCP", "port": port}


def _policy(name: str, pods: dict[str, str], into: list[Any], out: list[Any] | None = None) -> Object:
    """out: None leaves what the pods ask of others as it is."""
    spec: Object = {
        "podSelector": {"matchLabels": pods},
        "policyTypes": ["Ingress"] if out is None else ["Ingress", "Egress"],
        "ingress": into,
    }
    return made("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec if out is None else {**spec, "egress": out})
