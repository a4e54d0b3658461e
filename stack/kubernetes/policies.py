"""Who may speak to whom. Only a cluster whose network enforces NetworkPolicies heeds them; without, they say nothing and do nothing.

What watches is closed by default and opened where it is needed. An engine is closed to all but the gateway, Prometheus and the other engines:
one model over several pods talks among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stack.kubernetes.objects import BOARD, CLIENTS, GATEWAY, PART_OF, PORTS, SIDECAR, Object, label_of, made
from stack.kubernetes.wanted import Wanted

_NAMED = "kubernetes.io/metadata.name"  # which every namespace has
_DNS = [
    {"namespaceSelector": {"matchLabels": {_NAMED: "kube-system"}}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}},
    {"ipBlock": {"cidr": "169.254.20.10/32"}},  # NodeLocal DNSCache, where there is one
]


def policies(wanted: Wanted) -> Iterator[Object]:
    yield _policy("vllm-watch-closed", dict(PART_OF), [], [])
    asks = [{"namespaceSelector": {"matchLabels": CLIENTS}}]
    dns = {"to": _DNS, "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    prometheus = [_prometheus(wanted)]
    to_prometheus = {"to": prometheus, "ports": [_port(wanted.prometheus_port)]}
    yield _policy(BOARD, label_of(BOARD), [{"from": asks, "ports": [_port(PORTS["board"])]}], [dns, to_prometheus])
    if not wanted.with_sidecar:
        return
    engines = {"podSelector": {"matchLabels": dict(wanted.engine_selector)}}
    port = _port(int(wanted.engine_port) if wanted.engine_port.isdecimal() else wanted.engine_port)
    if wanted.with_gateway:
        asked_by = [{"from": asks, "ports": [_port(PORTS["http"])]}, _scraped(wanted, "gateway-metrics", "sidecar")]
        yield _policy(GATEWAY, label_of(GATEWAY), asked_by, [dns, {"to": [engines], "ports": [port]}])
    if wanted.open_engines:
        return
    asked = {"from": [{"podSelector": {"matchLabels": dict(gateway_pods(wanted))}}, *prometheus], "ports": [port]}
    yield _policy("vllm-watch-engines", dict(wanted.engine_selector), [asked, {"from": [engines]}])


def gateway_pods(wanted: Wanted) -> Mapping[str, str]:
    """What selects the pods of the gateway, ours or not; the sidecar is in them."""
    return label_of(GATEWAY) if wanted.with_gateway else SIDECAR


def of_own_gateway(wanted: Wanted) -> Object:
    """For pods of a gateway that a policy of somebody's closes already; to others it would be the first one, and shut their clients out."""
    return _policy("vllm-watch-sidecar", dict(SIDECAR), [_scraped(wanted, "sidecar")])


def _scraped(wanted: Wanted, *ports: str) -> Object:
    return {"from": [_prometheus(wanted)], "ports": [_port(PORTS[port]) for port in ports]}


def _prometheus(wanted: Wanted) -> Object:
    """The operator's Prometheus, by the label that it gives to its pods."""
    return {"namespaceSelector": {"matchLabels": {_NAMED: wanted.monitoring}}, "podSelector": {"matchLabels": label_of("prometheus")}}


def _port(port: int | str) -> Object:
    return {"protocol": "TCP", "port": port}


def _policy(name: str, pods: dict[str, str], into: list[Any], out: list[Any] | None = None) -> Object:
    """out: None leaves what the pods ask of others as it is."""
    spec: Object = {"podSelector": {"matchLabels": pods}, "policyTypes": ["Ingress"] if out is None else ["Ingress", "Egress"], "ingress": into}
    return made("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec if out is None else {**spec, "egress": out})
