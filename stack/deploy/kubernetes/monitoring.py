"""Rules and monitors for the Prometheus Operator, and dashboards for Grafana's sidecar.

Labels come from relabelling alone. The operator names a job after its monitor; our rules look for `vllm`, `gateway` and
`sidecar`, so each monitor says its job. `instance` stays the address of the pod: runbook pages put it into commands.
Source of what the operator makes of these: its pkg/prometheus/promcfg.go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from alerts import printer
from dashboards import grafana_folders, grafana_json
from dashboards.registry import boards as boards_of
from exporters.catalogue import promql
from exporters.catalogue.metric import EngineRole
from stack.deploy.fleet import budget, files
from stack.deploy.kubernetes.objects import METRICS_SERVICE, OMIT, Object, add_labels, load, load_one
from stack.deploy.kubernetes.options import KubernetesOptions

# etcd takes 1.5 MiB and the API server's limits are near it; a rule file beyond this is written as several objects
LARGEST_BYTES = 900_000
SHIP_JOB = "ship"  # no rule asks for it by its job


def rules(wanted: KubernetesOptions) -> Iterator[tuple[str, Object]]:
    """Each rule file as an object, or as several; with the name of its file."""
    own = wanted.rules
    for name, text in printer.rule_files(wanted.links, own.settings, own.objectives, header=""):
        stem = name.removesuffix(".yaml")
        parts = list(_split(yaml.safe_load(text)["groups"], LARGEST_BYTES))
        for number, groups in enumerate(parts, 1):
            part = f"{stem}-{number}" if len(parts) > 1 else stem
            made = load_one("rule.yaml", NAME=f"vllm-watch-{part}", GROUPS=groups)
            yield part, add_labels(made, wanted.operator_labels)


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


def monitors(wanted: KubernetesOptions) -> list[Object]:
    """Return the monitors of base/monitors.yaml whose targets the export or your gateway has."""
    by_number = wanted.engine_port.isdecimal()
    own = {"gateway": wanted.gateway, "sidecar": wanted.with_sidecar, "ship": bool(wanted.shipping.dataset)}
    objects = load(
        "monitors.yaml",
        ENGINE_PODS=wanted.engine_pods,
        ENGINE_PORT_NAME=OMIT if by_number else wanted.engine_port,
        ENGINE_PORT_NUMBER=int(wanted.engine_port) if by_number else OMIT,
        ENGINE_SCHEME="https" if wanted.engines_speak_tls else OMIT,
        UNREAD=files.CREATED,
        INTERVAL=wanted.interval,
        LABELS_ENGINE=[*_labels(wanted, wanted.jobs.engine), *_by_label(wanted), *_role(wanted)],
        LABELS_GATEWAY=_labels(wanted, wanted.jobs.gateway),
        LABELS_SIDECAR=_labels(wanted, wanted.jobs.sidecar),
        LABELS_SHIP=_labels(wanted, SHIP_JOB),
        SAMPLES_ENGINE=_sample_limit(wanted, "vllm"),
        SAMPLES_GATEWAY=_sample_limit(wanted, "gateway"),
        SAMPLES_SIDECAR=_sample_limit(wanted, "sidecar"),
        SCHEME="https" if wanted.tls_secret else OMIT,
        TLS=tls(wanted.tls_secret) if wanted.tls_secret else OMIT,
        LOGIN=login(wanted.login_secret) if wanted.login_secret else OMIT,
    )
    left_out = [f"vllm-watch-{name}" for name, runs in own.items() if not runs]
    return [add_labels(each, wanted.operator_labels) for each in objects if each["metadata"]["name"] not in left_out]


def _sample_limit(wanted: KubernetesOptions, page: str) -> Any:
    return (budget.SAMPLE_LIMIT[page] if wanted.sample_limit is None else wanted.sample_limit) or OMIT


def _labels(wanted: KubernetesOptions, job: str) -> list[Object]:
    return [*target_labels(job), *([cluster_label(wanted.cluster)] if wanted.cluster else [])]


def _by_label(wanted: KubernetesOptions) -> Iterator[Object]:
    if wanted.job_label:
        yield job_by_label(wanted.jobs.engine, _discovered(wanted.job_label))


def _role(wanted: KubernetesOptions) -> Iterator[Object]:
    if wanted.role_label:
        yield role_by_label(_discovered(wanted.role_label))


def _discovered(label: str) -> str:
    """Return the key of a label as Prometheus' discovery writes it."""
    return re.sub(r"[^A-Za-z0-9_]", "_", label)


def target_labels(job: str) -> list[Object]:
    """Return the relabelling of every target of a job."""
    return [
        # podTargetLabels of the Prometheus object may call a label of the target (team) as one that its page has: that
        # would become exported_team.
        {"action": "labeldrop", "regex": files.OF_PAGES},
        {"targetLabel": "job", "replacement": job},
        {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
    ]


def cluster_label(cluster: Any) -> Object:
    """Return the relabelling that names the cluster."""
    return {"targetLabel": "cluster", "replacement": cluster}


def job_by_label(job: str, label: str) -> Object:
    """Return a relabelling with a job for each value of a label of the engines' pods: an alert on a job of which nobody
    answers is then one on a model. Pods without it keep the usual job.

    label: the key as Prometheus' discovery writes it."""
    return {
        "sourceLabels": [f"__meta_kubernetes_pod_label_{label}"], "regex": "(.+)",
        "targetLabel": "job", "replacement": f"{job}-$1",
    }  # fmt: skip


def role_by_label(label: str) -> Object:
    """Return the relabelling that gives an engine its role in disaggregated serving. Pods with another value, such as
    both, have none.

    label: the key as Prometheus' discovery writes it."""
    return {
        "sourceLabels": [f"__meta_kubernetes_pod_label_{label}"], "regex": f"({'|'.join(EngineRole)})",
        "targetLabel": promql.ROLE,
    }  # fmt: skip


def tls(secret: Any) -> Object:
    """Return how Prometheus verifies a listener whose certificate web.yml names."""
    return {"ca": {"secret": {"name": secret, "key": "ca.crt"}}, "serverName": METRICS_SERVICE}


def login(secret: Any) -> Object:
    """Return the token that Prometheus sends to a listener that web.yml protects."""
    return {"type": "Bearer", "credentials": {"name": secret, "key": "token"}}


def boards(wanted: KubernetesOptions) -> Iterator[tuple[str, Object]]:
    """Yield each dashboard as Grafana's sidecar takes it, with its slug. They are read-only there: the objects are
    their source."""
    for board in boards_of(wanted.profile, wanted.rules.settings):
        text = grafana_json.to_json(board, wanted.profile, links=wanted.links, editable=False, compact=True)
        texts = {f"vllm-watch-{board.slug}.json": text}
        name = f"vllm-watch-board-{board.slug}"
        yield board.slug, load_one("dashboard.yaml", NAME=name, FOLDER=grafana_folders.FOLDER, TEXTS=texts)
