"""What is watched and told: rules and monitors for the Prometheus Operator, boards for Grafana's sidecar.

Labels come from relabelling alone. The operator names a job after its monitor; our rules look for `vllm`, `gateway` and
`sidecar`, so each monitor says its job. `instance` stays the address of the pod: runbook pages put it into commands.
Source of what the operator makes of these: its pkg/prometheus/promcfg.go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from alerts import printer
from dashboards import grafana_folders, grafana_json
from dashboards.registry import boards as boards_of
from stack.deploy.fleet import budget, files
from stack.deploy.kubernetes.objects import METRICS_SERVICE, Object, config_map, label_of, made
from stack.deploy.kubernetes.options import KubernetesOptions

MONITORING = "monitoring.coreos.com/v1"
# etcd takes 1.5 MiB and the API server's limits are near it; a rule file beyond this is written as several objects
LARGEST_BYTES = 900_000


def rules(wanted: KubernetesOptions) -> Iterator[tuple[str, Object]]:
    """Each rule file as an object, or as several; with the name of its file."""
    own = wanted.rules
    for name, text in printer.rule_files(own.links, own.settings, own.objectives, header=""):
        stem = name.removesuffix(".yaml")
        parts = list(_split(yaml.safe_load(text)["groups"], LARGEST_BYTES))
        for number, groups in enumerate(parts, 1):
            part = f"{stem}-{number}" if len(parts) > 1 else stem
            yield (
                part,
                made(
                    MONITORING,
                    "PrometheusRule",
                    f"vllm-watch-{part}",
                    dict(wanted.operator_labels),
                    spec={"groups": groups},
                ),
            )


def _split(groups: list[Any], limit: int) -> Iterator[list[Any]]:
    """Groups in order, in portions below a limit of bytes; a group is never cut."""
    portion: list[Any] = []
    held = 0
    for group in groups:
        size = len(printer.as_yaml([group]).encode())
        if portion and held + size > limit:
            yield portion
            portion, held = [], 0
        portion.append(group)
        held += size
    yield portion


def monitors(wanted: KubernetesOptions) -> Iterator[Object]:
    """Engines by their pods, since one Service hides its replicas from each other; ours by their Service."""
    by_number = wanted.engine_port.isdecimal()
    port = {"portNumber": int(wanted.engine_port)} if by_number else {"port": wanted.engine_port}
    scheme = {"scheme": "https"} if wanted.engines_speak_tls else {}
    # by any board, rule or command of ours
    unread = {"sourceLabels": ["__name__"], "action": "drop", "regex": files.CREATED}
    yield _monitor(
        "PodMonitor",
        "vllm-watch-engines",
        wanted,
        "vllm",
        {
            "selector": {"matchLabels": dict(wanted.engine_selector)},
            # A re-exporter built on prometheus_client 0.23 or later answers Prometheus 2 with vllm_ in place of vllm:
            # unless asked for plain text.
            "scrapeProtocols": ["PrometheusText0.0.4"],
            "podMetricsEndpoints": [
                {
                    **port,
                    **scheme,
                    **_endpoint(wanted, wanted.jobs.engine, _by_label(wanted)),
                    "metricRelabelings": [unread],
                }
            ],
        },
    )
    ours = (
        (wanted.with_gateway, "gateway", "gateway-metrics", wanted.jobs.gateway),
        (wanted.with_sidecar, "sidecar", "sidecar", wanted.jobs.sidecar),
    )
    for kind, port_name, job in (row for runs, *row in ours if runs):
        spec = {
            "selector": {"matchLabels": label_of(METRICS_SERVICE)},
            "endpoints": [{"port": port_name, **_protected(wanted), **_endpoint(wanted, job)}],
            # The operator leaves the second out below Prometheus 3.8, where the feature native-histograms decides.
            # Alerts on the bounds of objectives read the classic ones.
            "scrapeClassicHistograms": True,
            "scrapeNativeHistograms": True,
        }
        yield _monitor("ServiceMonitor", f"vllm-watch-{kind}", wanted, kind, spec)


def _monitor(kind: str, name: str, wanted: KubernetesOptions, page: str, spec: Object) -> Object:
    most = budget.SAMPLE_LIMIT[page] if wanted.sample_limit is None else wanted.sample_limit
    limit = {"sampleLimit": most} if most else {}
    return made(MONITORING, kind, name, dict(wanted.operator_labels), spec={**spec, **limit})


def _endpoint(wanted: KubernetesOptions, job: str, more: Iterable[Object] = ()) -> Object:
    return {"path": "/metrics", "interval": wanted.interval, "relabelings": [*_labels(wanted, job), *more]}


def _labels(wanted: KubernetesOptions, job: str) -> Iterator[Object]:
    # podTargetLabels of the Prometheus object may call a label of the target (team) as one that its page has: that
    # would become exported_team.
    yield {"action": "labeldrop", "regex": files.OF_PAGES}
    yield {"targetLabel": "job", "replacement": job}
    yield {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
    if wanted.cluster:
        yield {"targetLabel": "cluster", "replacement": wanted.cluster}


def _by_label(wanted: KubernetesOptions) -> Iterator[Object]:
    """A job for each value of a label of the engines' pods: an alert on a job of which nobody answers is then one on a
    model. Pods without it keep the usual job."""
    if wanted.job_label:
        label = re.sub(r"[^A-Za-z0-9_]", "_", wanted.job_label)  # as Prometheus' discovery writes the key
        yield {
            "sourceLabels": [f"__meta_kubernetes_pod_label_{label}"], "regex": "(.+)",
            "targetLabel": "job", "replacement": f"{wanted.jobs.engine}-$1",
        }  # fmt: skip


def _protected(wanted: KubernetesOptions) -> Object:
    """How Prometheus asks what web.yml protects."""
    ca = {"secret": {"name": wanted.tls_secret, "key": "ca.crt"}}
    tls = {"scheme": "https", "tlsConfig": {"ca": ca, "serverName": METRICS_SERVICE}} if wanted.tls_secret else {}
    token = {"type": "Bearer", "credentials": {"name": wanted.login_secret, "key": "token"}}
    return {**tls, **({"authorization": token} if wanted.login_secret else {})}


def boards(wanted: KubernetesOptions) -> Iterator[tuple[str, Object]]:
    """Each board as Grafana's sidecar takes it, with its slug. They are read-only there: the objects are their
    source."""
    for board in boards_of(wanted.profile, wanted.rules.settings):
        text = grafana_json.to_json(board, wanted.profile, links=wanted.rules.links, editable=False, compact=True)
        labels, folder = {"grafana_dashboard": "1"}, {"grafana_folder": grafana_folders.FOLDER}
        yield (
            board.slug,
            config_map(f"vllm-watch-board-{board.slug}", {f"vllm-watch-{board.slug}.json": text}, labels, folder),
        )
