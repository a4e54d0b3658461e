"""Exported Kubernetes files: base/, overlays/example/, components/ for another gateway.

Invariants: a secret is never written, only its name; without an option that says so, nothing is written that runs or
restricts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from alerts import export as alerts
from alerts import managed_files
from alerts.managed_files import marked
from alerts.printer import as_yaml
from stack.deploy.kubernetes import monitoring, notifications, policies, replicas, running, sidecar_patch
from stack.deploy.kubernetes.objects import (
    BOARD_SERVICE,
    CLIENTS,
    GATEWAY,
    GATEWAY_SERVICE,
    METRICS_SERVICE,
    OMIT,
    PORTS,
    Object,
    load,
    load_one,
)
from stack.deploy.kubernetes.options import KubernetesOptions

BASE, EXAMPLE, SCALING = "base", "overlays/example", "autoscaling"
_COMMAND = "vllm-watch kubernetes export"
_OPEN_ENGINES = "kubectl -n {} delete networkpolicy vllm-watch-engines"


def files(wanted: KubernetesOptions) -> dict[str, str]:
    """Name and text of every file."""
    objects = {f"{name}.yaml": each for name, each in _objects(wanted)}
    base = load_one("kustomization.yaml", NAMESPACE=wanted.namespace, FILES=sorted(objects))
    example, other_engine = _example(wanted)
    found = {f"{BASE}/{name}": _text(each) for name, each in objects.items()}
    found[f"{BASE}/kustomization.yaml"] = as_yaml(base)
    found[f"{EXAMPLE}/kustomization.yaml"] = as_yaml(example)
    if wanted.with_sidecar:
        found[f"{EXAMPLE}/config.yaml"] = as_yaml(other_engine)
    if wanted.gateways.most is not None:
        found[f"{SCALING}/prometheus-adapter.yaml"] = as_yaml(replicas.adapter_rule(wanted.namespace))
    if wanted.own_gateway:
        found |= {name: as_yaml(each) for name, each in sidecar_patch.components(wanted, wanted.own_gateway)}
    return {name: marked(text, _COMMAND) for name, text in sorted(found.items())}


def _objects(wanted: KubernetesOptions) -> Iterator[tuple[str, Iterable[Object]]]:
    """Return the objects of each file of the base; the numbers put them into the order in which one reads them."""
    if wanted.runs_pods:
        yield "10-config", [running.config(wanted)]
    if wanted.gateway:
        yield "20-gateway", running.gateway(wanted)
    elif wanted.sidecar_alone:
        yield "20-sidecar", running.sidecar(wanted)
    elif wanted.with_sidecar:
        yield "20-sidecar", [running.metrics_service()]
    if wanted.board:
        yield "30-board", running.board(wanted)
    if closing := list(policies.policies(wanted)):
        yield "40-network", closing
    yield "50-monitors", monitoring.monitors(wanted)
    if "rules" not in wanted.without:
        yield from ((f"60-rules-{name}", [each]) for name, each in monitoring.rules(wanted))
    if "boards" not in wanted.without:
        yield from ((f"70-board-{slug}", [each]) for slug, each in monitoring.boards(wanted))
    if wanted.routes:
        yield "80-routes", [notifications.alertmanager_config(wanted)]


def _text(objects: Iterable[Object]) -> str:
    return "---\n".join(as_yaml(each) for each in objects)


def _example(wanted: KubernetesOptions) -> list[Object]:
    """Return the example overlay, and the patch that gives its configuration another engine."""
    namespace = f"{wanted.namespace[:50].rstrip('-')}-example"
    return load(
        "example.yaml",
        NAMESPACE=namespace,
        IMAGE_NAME=wanted.image_name,
        PATCHES=[{"path": "config.yaml"}] if wanted.with_sidecar else OMIT,
        TEXTS=running.config_text(replace(wanted, engines=("http://another-vllm:8000",), namespace=namespace)),
    )


def write(folder: Path, wanted: KubernetesOptions, force: bool = False) -> tuple[dict[Path, bool], list[Path]]:
    """Export; whether each file changed, and files of an earlier export that this one does not hold.

    Raises NotOurs before anything is written, and OSError."""
    printed = files(wanted)
    written = managed_files.write(folder, printed, managed_files.changed_since, force)
    older = []
    for part in (BASE, EXAMPLE, SCALING, *sidecar_patch.FOLDERS):
        names = [Path(name).name for name in printed if name.startswith(f"{part}/")]
        older += managed_files.left_over(folder / part, names, managed_files.changed_since, "*.yaml")
    return written, older


def warnings(wanted: KubernetesOptions) -> Iterator[str]:
    """Return what an export changes for those who use the engines today, and options that may not fit the cluster."""
    yield from effects(wanted)
    if "rules" not in wanted.without:
        yield from alerts.without_page(wanted.rules.objectives)
    if not wanted.operator_labels:
        yield (
            "no --label: the Prometheus of kube-prometheus-stack reads rules and monitors with release=NAME of its"
            " chart alone"
        )
    if (
        far := [url for url in wanted.engines if _elsewhere(url, wanted.namespace)]
        if wanted.gateway or wanted.sidecar_alone
        else []
    ):
        yield (
            f"{', '.join(far)}: not in namespace {wanted.namespace}; gateway and sidecar may ask no others; give"
            " 40-network.yaml an egress rule"
        )
    if wanted.board and _elsewhere(wanted.prometheus_url, wanted.monitoring):
        yield (
            f"{wanted.prometheus}: not in namespace {wanted.monitoring}; the board may ask no other; give"
            " 40-network.yaml an egress rule"
        )
    if wanted.with_sidecar and any(url.startswith("https:") for url in wanted.engines):
        yield (
            "engines with https: name their authority in 50-monitors.yaml (tlsConfig), gateway.yaml (upstream_ca_file),"
            " sidecar.yaml (http_config)"
        )


def effects(wanted: KubernetesOptions) -> Iterator[str]:
    """Return what the options beyond the default change for existing clients of the engines, one sentence each."""
    if wanted.gateway:
        yield (
            "--gateway: clients change nothing until you give them the address"
            f" {GATEWAY_SERVICE}.{wanted.namespace}.svc and a key; until then their requests are in no log"
        )
    if wanted.gateways.several:
        yield (
            "--replicas: a Deployment of an earlier export stays beside the StatefulSet, and would admit requests of"
            f" its own; delete it first: kubectl -n {wanted.namespace} delete deployment vllm-watch-gateway"
            " --ignore-not-found"
        )
    if wanted.shipping.dataset:
        yield (
            "--ship: one more container in the gateway's pod reads the request log and keeps every request, without"
            " texts, until you delete it (docs/guides/dataset.md); clients change nothing"
        )
    if wanted.sidecar_alone:
        yield "--sidecar: one more pod reads /metrics of each engine every 5 s; clients change nothing"
    if own := wanted.own_gateway:
        yield (
            f"--own-gateway: the rollout of {own.deployment} becomes Recreate, so applying it is a gap for its clients,"
            " and while the sidecar fails the pod is not ready"
        )
    if wanted.board:
        yield (
            "--board: one more pod queries Prometheus and shows metrics to namespaces with the label"
            " vllm-watch-clients=true; clients change nothing"
        )
    if wanted.restrict_engines:
        undo = "" if wanted.own_gateway else f" (undo: {_OPEN_ENGINES.format(wanted.namespace)})"
        yield (
            "--restrict-engines: clients that ask the engines directly are cut off, in a network that enforces"
            f" policies; only the gateway, Prometheus and the engines reach them{undo}"
        )
    if wanted.routes:
        yield from notifications.warnings(wanted)


def _elsewhere(url: str, namespace: str) -> bool:
    """Return whether a host is surely outside of the namespace. NAME, POD.SERVICE and NAME.NAMESPACE look alike, and
    are not."""
    words = (urlsplit(url).hostname or "").split(".")
    if "svc" in words[1:]:
        return words[words.index("svc", 1) - 1] != namespace
    return len(words) > 2


def next_steps(folder: Path, wanted: KubernetesOptions) -> Iterator[str]:
    """Return the next steps with exported files, one command or sentence each."""
    where = f"kubectl -n {wanted.namespace}"
    if wanted.runs_pods:
        yield f"build the image and push it where the cluster finds it: {wanted.image} (another name: --image)"
    yield from _secrets(wanted, where)
    if wanted.gateway or wanted.board:
        label = ",".join(f"{key}={value}" for key, value in CLIENTS.items())
        yield f"kubectl label namespace WHOSE {label}    # whose pods may ask the gateway and open the board"
    if own := wanted.own_gateway:
        component = folder / sidecar_patch.COMPONENT
        yield (
            f"write an overlay: resources {folder / BASE} and your {own.deployment}, components {component}"
            " (docs/guides/kubernetes.md)"
        )
        # an apply does not clear what the API server filled in
        recreate = '{"spec": {"strategy": {"type": "Recreate", "rollingUpdate": null}}}'
        yield (
            f"{where} patch deployment {own.deployment} --type merge --patch '{recreate}'    # once, if it runs already"
        )
    apply = f"kubectl apply --server-side -k {'that overlay' if wanted.own_gateway else folder / BASE}"
    yield f"{apply}    # or copy {folder / EXAMPLE} and change the copy"
    if wanted.own_gateway and wanted.restrict_engines:
        yield (
            f"when its pods are new: {folder / sidecar_patch.CLOSED} among its components blocks all other clients"
            " the engines"
        )
    if wanted.board:
        yield (
            f"{where} port-forward service/{BOARD_SERVICE} {PORTS['board']}    # the boards and runbooks, at"
            f" http://127.0.0.1:{PORTS['board']}"
        )


def _store_steps(wanted: KubernetesOptions, where: str) -> Iterator[str]:
    several = wanted.gateways
    if several.valkey:
        yield (
            f"openssl rand -hex 32 | {where} create secret generic {several.store_secret}"
            " --from-file=password=/dev/stdin    # the store's password; gateways read it again when it is refused"
        )
    elif several.store_secret:
        tls = ", and ca.crt," if several.store.startswith(("rediss:", "valkeys:")) else ""
        yield f"the secret {several.store_secret} must hold password{tls} of {several.store}"
    if several.most is not None:
        yield (
            f"add {SCALING}/prometheus-adapter.yaml to the values of the Helm chart prometheus-adapter: it serves the"
            f" metric {replicas.METRIC} of the autoscaler"
        )


def _secrets(wanted: KubernetesOptions, where: str) -> Iterator[str]:
    """Return the steps that create secrets. where: kubectl with the namespace."""
    if wanted.gateway:
        yield (
            "vllm-watch gateway key TEAM    # a key and its hash for each team; write teams.yaml with the hashes, then"
            " gateway check teams.yaml"
        )
        if text := running.upstreams(wanted):
            yield f"with several engines teams.yaml names them:\n{text.rstrip()}"
        yield (
            "openssl rand -hex 32 > gateway.secret    # keeps teams apart in an engine's cache and stored responses;"
            " the same for every replica"
        )
        yield f"{where} create secret generic {wanted.teams_secret} --from-file=teams.yaml --from-file=gateway.secret"
    yield from _store_steps(wanted, where)
    if wanted.with_sidecar and wanted.tls_secret:
        yield (
            f"the secret {wanted.tls_secret} must hold tls.crt, tls.key and ca.crt, for a server called"
            f" {METRICS_SERVICE}"
        )
    if wanted.with_sidecar and wanted.login_secret:
        yield (
            f"openssl rand -hex 24 | {where} create secret generic {wanted.login_secret} --from-file=token=/dev/stdin  "
            "  # Prometheus' login"
        )
    if secret := wanted.shipping.secret:
        yield (
            f"{where} create secret generic {secret} --from-file=credentials    # of {wanted.shipping.dataset}, in the"
            " format of ~/.aws/credentials"
        )
    if wanted.shipping.dataset:
        query = "vllm-watch requests --ship-config /etc/vllm-watch/config/ship.yaml"
        workload = "statefulset" if wanted.gateways.several else "deployment"
        yield f"{where} exec {workload}/{GATEWAY} -c ship -- {query}    # requests of the last day"
    if wanted.routes and (keys := notifications.secret_keys(wanted)):
        files_of = " ".join(f"--from-file={key}" for key in keys)
        what = notifications.secret_content(wanted)
        yield f"{where} create secret generic {wanted.routes_secret} {files_of}    # each holds {what}"
