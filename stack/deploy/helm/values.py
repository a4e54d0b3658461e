"""Values of the Helm chart: default, schema and help of each, printed as values.yaml and values.schema.json."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from alerts import routing
from alerts.printer import as_yaml
from exporters.catalogue.metric import EngineRole
from stack.deploy.fleet import budget
from stack.deploy.kubernetes import running
from stack.deploy.kubernetes.options import KubernetesOptions
from stack.deploy.kubernetes.ship_options import VOLUME

_HEADER = "# Printed by `vllm-watch render` from stack/deploy/helm. Change the source, print again, commit both.\n"
_USUAL = KubernetesOptions(image="vllm-watch", without=("rules", "boards"))
_SEVERAL = _USUAL.gateways


@dataclass(frozen=True)
class Value:
    """One value: path in values.yaml, default, JSON schema of what it may be, and a sentence about it."""

    path: str
    default: Any
    schema: dict[str, Any]
    help: str


def _text(pattern: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "string", **({"pattern": pattern} if pattern else {}), **more}


_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_OURS = {"not": {"enum": ["app.kubernetes.io/name", "app.kubernetes.io/part-of"]}}
_MAPPING: dict[str, Any] = {"type": "object"}
_LIST: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
_SWITCH = {"type": "boolean"}
_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
_URL = r"""^(https?://[^\s"'{}]+)?$"""
_SIZE = r"^[1-9][0-9]*(Mi|Gi|Ti|M|G|T)$"
_SELECTOR = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"matchLabels": _LABELS, "matchExpressions": _LIST},
}
_PORT = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": 65535},
        _text("^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", maxLength=15) | {"not": {"pattern": "^[-0-9]+$"}},
    ]
}
_ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "url"],
    "properties": {
        "name": _text("^.+$", description="Name of the engine in series of gateway and sidecar."),
        "url": _text(r"^https?://[^\s/@]+$", description="Address of the engine, without a path."),
        "role": {"enum": [*map(str, EngineRole)], "description": "Role of the engine in disaggregated serving."},
        "gpu_count": {"type": "integer", "minimum": 1, "description": "GPUs of the engine, for cost."},
    },
}
_SET = [*running.sidecar_settings(None, None, None)]  # keys of sidecar.yaml that the chart has

_FIXED = (
    Value("global", {}, _MAPPING, "Values of a parent chart; none of them is read here."),
    Value("engines.podSelector", {}, _SELECTOR,
          "Label selector of the engines' pods. Empty: matchLabels with app=vllm."),
    Value("engines.port", 8000, _PORT, "Number or name of the port that the engines' container declares."),
    Value("engines.endpoints", [{"name": name, "url": url} for name, url in _USUAL.engine_names.items()],
          {"type": "array", "minItems": 1, "items": _ENDPOINT},
          "Addresses of the engines for gateway and sidecar. A Service of several replicas is one engine to them."),
    Value("engines.jobLabel", "", _text(r"^([A-Za-z0-9][-A-Za-z0-9_./]*)?$"),
          "Label of the engines' pods whose value becomes part of their job."),
    Value("engines.roleLabel", _USUAL.role_label, _text(r"^([A-Za-z0-9][-A-Za-z0-9_./]*)?$"),
          "Label of the engines' pods with their role in disaggregated serving, prefill or decode."),
    Value("engines.restrict", False, _SWITCH,
          "NetworkPolicy for the engines: clients that do not use the gateway are blocked. Requires gateway.enabled."),
    Value("operatorLabels", {}, _LABELS | {"propertyNames": _OURS},
          "Labels by which the Prometheus Operator selects rules and monitors, such as release: kube-prometheus-stack."
          " Without them most Prometheus objects ignore this chart."),
    Value("commonLabels", {}, _LABELS | {"propertyNames": _OURS}, "Labels of every object; never in a selector."),
    Value("commonAnnotations", {}, _LABELS, "Annotations of every object."),
    Value("cluster", "", _text(r"^[-A-Za-z0-9_./]*$"),
          "Label `cluster` of every series, if one Prometheus scrapes several clusters."),
    Value("interval", _USUAL.interval, _text(r"^([1-9][0-9]*[smh])+$"),
          "Scrape interval. timeInterval of Grafana's data source must equal it."),
    *(
        Value(f"sampleLimits.{name}", budget.SAMPLE_LIMIT[job], {"type": "integer", "minimum": 0},
              f"Samples of one scrape of the {name} at most; 0: no limit.")
        for name, job in (("engine", "vllm"), ("gateway", "gateway"), ("sidecar", "sidecar"))
    ),
    Value("links.runbooks", "", _text(_URL),
          "Address of the runbooks, to which alerts link. Required unless board.enabled, which serves them."),
    Value("links.dashboards", "", _text(_URL),
          "Address of Grafana, to which alerts link. Required unless board.enabled, which serves dashboards."),
    Value("rules.enabled", True, _SWITCH, "PrometheusRules; once for each Prometheus."),
    Value("dashboards.enabled", True, _SWITCH,
          "Dashboards as ConfigMaps for Grafana's sidecar; once for each Grafana."),
    Value("dashboards.labels", {"grafana_dashboard": "1"}, _LABELS | {"propertyNames": _OURS},
          "Labels by which Grafana's sidecar selects."),
    Value("dashboards.annotations", {"grafana_folder": "vLLM"}, _LABELS,
          "Annotations of the dashboards, such as the folder in Grafana."),
    Value("gateway.enabled", False, _SWITCH, "Gateway with a sidecar in its pod."),
    Value("gateway.existingSecret", _USUAL.teams_secret, _text(_NAME), "Secret with teams.yaml and gateway.secret."),
    Value("gateway.replicas", 1, {"type": "integer", "minimum": 1},
          "Gateways, each with a sidecar and a volume. Limits are divided among them, or leased from a store."),
    Value("gateway.autoscaling.maxReplicas", 0, {"type": "integer", "minimum": 0},
          "HorizontalPodAutoscaler for up to so many gateways; 0: none. It needs prometheus-adapter."),
    Value("gateway.autoscaling.streams", _SEVERAL.streams, {"type": "integer", "minimum": 1},
          "Running requests per gateway that the autoscaler keeps."),
    Value("store.url", "", _text(r"^((redis|valkey)s?://[^\s/@?#]+(/[0-9]*)?)?$"),
          "Valkey or Redis that leases limits to several gateways, such as rediss://valkey.example.org:6379/0."),
    Value("store.user", "", _text(), "ACL user of that store."),
    Value("store.existingSecret", "", _text(_NAME), "Secret with password of the store, and with TLS also ca.crt."),
    Value("store.valkey.enabled", False, _SWITCH, "Valkey for the gateways, in place of store.url."),
    Value("store.valkey.image", _SEVERAL.valkey_image, _text("^.+$"), "Image of that Valkey."),
    Value("ship.dataset", "", _text(f"^({VOLUME}|s3://[^\\s/]+(/[^\\s]*)?)?$"),
          "Data set of requests that a shipper in the gateway's pod writes: s3://bucket/prefix, or volume for a folder"
          " of its volume. Empty: none. Requires gateway.enabled, and state.size of 2Gi or more."),
    Value("ship.endpoint", "", _text(r"^(https://[^\s\"'{}]+)?$"), "URL of that S3-compatible store. Empty: AWS."),
    Value("ship.region", _USUAL.shipping.region, _text("^[-A-Za-z0-9]+$"), "Region of that store."),
    Value("ship.existingSecret", "", _text(_NAME),
          "Secret with credentials of that store, in the format of ~/.aws/credentials."),
    Value("sidecar.enabled", False, _SWITCH, "Sidecar without a request log, if there is no gateway."),
    Value("sidecar.settings", {}, {"type": "object", "propertyNames": {"not": {"enum": _SET}}},
          "More settings of sidecar.yaml, such as otlp; none that the chart sets itself."),
    Value("board.enabled", False, _SWITCH, "Dashboards and runbooks without Grafana."),
    Value("alertmanagerConfig.receiver", "", {"enum": ["", *routing.RECEIVERS]},
          "AlertmanagerConfig with routes to receivers of this kind. The Alertmanager object needs"
          " alertmanagerConfigMatcherStrategy type None."),
    Value("alertmanagerConfig.existingSecret", _USUAL.routes_secret, _text(_NAME, minLength=1),
          "Secret with the keys that its receivers read."),
    Value("monitoring.namespace", _USUAL.monitoring, _text(_NAME, minLength=1), "Namespace of Prometheus."),
    Value("monitoring.prometheusUrl", "", _text(_URL),
          "Address of Prometheus for the board. Empty: prometheus-operated in that namespace."),
    Value("image.registry", "", _text(), "Registry of the image; empty: that of the repository's name."),
    Value("image.repository", "vllm-watch", _text("^.+$"), "Image of vllm-watch, for gateway, sidecar and board."),
    Value("image.tag", "", _text(), "Tag of the image. Empty: appVersion of the chart."),
    Value("image.digest", "", _text(r"^(sha256:[0-9a-f]{64})?$"), "Digest of the image, in place of the tag."),
    Value("image.pullPolicy", "", {"enum": ["", "Always", "IfNotPresent", "Never"]}, "Empty: that of Kubernetes."),
    Value("state.size", _USUAL.state_size, _text(_SIZE), "Volume for request log and state; at least 768Mi."),
    Value("state.storageClass", "", _text(_NAME), "Storage class of that volume. Empty: that of the cluster."),
    Value("tls.existingSecret", "", _text(_NAME),
          "Secret with tls.crt, tls.key and ca.crt of the server watch-metrics: metrics over TLS."),
    Value("login.existingSecret", "", _text(_NAME),
          "Secret with a token that scrapers of gateway and sidecar must send."),
    Value("pod.annotations", {}, _LABELS, "Annotations of the pods."),
    Value("pod.labels", {}, _LABELS | {"propertyNames": _OURS}, "Labels of the pods."),
    Value("pod.nodeSelector", {}, _LABELS, "Labels of the nodes for the pods."),
    Value("pod.tolerations", [], _LIST, "Tolerations of the pods."),
    Value("pod.affinity", {}, _MAPPING, "Affinity of the pods."),
    Value("pod.topologySpreadConstraints", [], _LIST, "Topology spread constraints of the pods."),
    Value("pod.priorityClassName", "", _text(), "Priority class of the pods."),
    Value("pod.serviceAccountName", "", _text(), "Service account of the pods. Empty: default. No token is mounted."),
    Value("pod.imagePullSecrets", [], _LIST, "Secrets of the registry, each as name: NAME."),
)  # fmt: skip


def table(resources: dict[str, Any], security: dict[str, Any]) -> list[Value]:
    """Return every value. resources: of each container; security: context of the pods."""
    what = "Security context of the pods, which meets the profile `restricted`. Set a key to null to leave it out."
    return [
        *_FIXED,
        Value("pod.securityContext", security, _MAPPING, what),
        *(
            Value(f"resources.{name}", each, _MAPPING, f"Resources of the container {name}.")
            for name, each in resources.items()
        ),
        Value("extraObjects", [], {"type": "array", "items": {"type": ["object", "string"]}},
              "More objects, as mappings or texts; templates in them are evaluated."),
    ]  # fmt: skip


def text(rows: Iterable[Value]) -> str:
    """Return values.yaml."""
    return _HEADER + "".join(f"{line}\n" for line in _lines(_nested((row.path, row) for row in rows), 0))


def _lines(level: dict[str, Any], indent: int) -> Iterator[str]:
    pad = " " * indent
    for key, each in level.items():
        if isinstance(each, dict):
            yield f"{pad}{key}:"
            yield from _lines(each, indent + 2)
            continue
        yield from textwrap.wrap(
            f"-- {each.help}", 118, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ", break_on_hyphens=False
        )
        yield from textwrap.indent(as_yaml({key: each.default}), pad).splitlines()


def schema(rows: Iterable[Value]) -> str:
    """Return values.schema.json."""
    # Helm 3 knows no later draft
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart vllm-watch"}
    made = _object(_nested((row.path, {"description": row.help, **row.schema}) for row in rows))
    return json.dumps({**draft, **made}, indent=1) + "\n"


def _object(level: dict[str, Any]) -> dict[str, Any]:
    properties = {key: each if "description" in each else _object(each) for key, each in level.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _nested(rows: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in rows:
        *parents, name = path.split(".")
        level = found
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = value
    return found


def chart(version: str) -> str:
    """Return Chart.yaml."""
    about = {
        "apiVersion": "v2",
        "name": "vllm-watch",
        "description": "Alerts and dashboards for vLLM, and on request its gateway, sidecar and board.",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.25.0-0",
        "keywords": ["vllm", "prometheus", "grafana", "llm", "monitoring"],
        "annotations": {"artifacthub.io/category": "monitoring-logging", "artifacthub.io/license": "Apache-2.0"},
    }
    return _HEADER + yaml.safe_dump(about, sort_keys=False)
