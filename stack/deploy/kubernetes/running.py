"""Deployments: gateway with sidecar (base/gateway.yaml), the sidecar alone, board (base/board.yaml), and their
configuration. Every container is unprivileged and may write only to its own volumes.

The sidecar stands in the gateway's pod because the request log is a file there, not for the engine's sake: engines are
read over HTTP. GPUs are not: NVML sees those of its own node only, so here the sidecar's `gpu` is off and dcgm-exporter
fills the GPU dashboard."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urlsplit

import msgspec

from alerts import export
from alerts.printer import as_yaml
from exporters.dataset.objects import S3Access
from stack.deploy.kubernetes import replicas
from stack.deploy.kubernetes.objects import (
    BOARD_SERVICE,
    METRICS_SERVICE,
    OMIT,
    PORTS,
    SIDECAR,
    SIDECAR_NAME,
    Object,
    given,
    load,
    load_one,
)
from stack.deploy.kubernetes.options import KubernetesOptions
from stack.deploy.kubernetes.ship_options import VOLUME
from stack.gateway.config import Timeouts
from stack.gateway.lease_client import LeaseStore

_ETC, _VAR = "/etc/vllm-watch", "/var/lib/vllm-watch"
LOGS, STATE = f"{_VAR}/log", f"{_VAR}/state"
LOG = f"{LOGS}/requests.jsonl"
PROTECTION = ("tls", "login")  # volumes of the secrets that an operator may name
# Authentication of a listener that Prometheus scrapes: web.yml and what is in it; docs/guides/hardening.md.
WEB = f"{_ETC}/config/web.yml"
TLS = {"cert_file": f"{_ETC}/tls/tls.crt", "key_file": f"{_ETC}/tls/tls.key"}
LOGIN = [f"{_ETC}/login/token"]
# How the first sidecar of several asks the others.
PEERS = f"{_ETC}/config/peers.yml"
PEERS_TLS = {"ca_file": f"{_ETC}/tls/ca.crt", "server_name": METRICS_SERVICE}
PEERS_LOGIN = {"credentials_file": LOGIN[0]}
# Names of the shipper: of several gateways each has a name that stays; of one the name of its pod changes.
SHIP_WRITERS = {False: "gateway-0", True: "hostname"}
DATASET = f"{STATE}/dataset"
SHIP_SEAL_BYTES, SHIP_SPOOL_BYTES = 16 << 20, 128 << 20
_EVERYWHERE = "0.0.0.0"  # noqa: S104  in a pod; NetworkPolicies say who reaches it
# the gateway has 10 s of its own to write the last records, after running requests had their time
GRACE_S = int(Timeouts().drain_s) + 10


def config_text(wanted: KubernetesOptions) -> dict[str, str]:
    """The files of the containers, by name. Secrets are never among them."""
    texts = {"thresholds.yml": export.numbers(wanted.rules.settings)}
    if not wanted.with_sidecar:
        return texts
    web = WEB if wanted.secrets else OMIT
    logs = OMIT if wanted.sidecar_alone else [_log(wanted)]
    engines = [{"name": name, "url": url} for name, url in wanted.engine_names.items()]
    texts["sidecar.yaml"] = as_yaml(sidecar_settings(logs, engines, web) | _of_sidecars(wanted))
    if wanted.secrets and wanted.gateways.several:
        texts["peers.yml"] = as_yaml(
            given({"tls_config": PEERS_TLS if wanted.tls_secret else OMIT,
                   "authorization": PEERS_LOGIN if wanted.login_secret else OMIT})
        )  # fmt: skip
    if wanted.secrets:
        texts["web.yml"] = as_yaml(
            given({"tls_server_config": TLS if wanted.tls_secret else OMIT,
                   "bearer_token_files": LOGIN if wanted.login_secret else OMIT})
        )  # fmt: skip
    if wanted.gateway:
        one = next(iter(wanted.engine_names.values())) if len(wanted.engines) == 1 else OMIT
        texts["gateway.yaml"] = as_yaml(gateway_settings(one, web) | _of_several(wanted))
    if wanted.shipping.dataset:
        texts["ship.yaml"] = as_yaml(
            ship_settings(
                DATASET if wanted.shipping.dataset == VOLUME else wanted.shipping.dataset,
                wanted.cluster or wanted.namespace,
                SHIP_WRITERS[wanted.gateways.several],
                _store_access(wanted.shipping.access()) if wanted.shipping.in_store else OMIT,
                web,
            )
        )
    return texts


def _of_sidecars(wanted: KubernetesOptions) -> Object:
    if not wanted.gateways.several:
        return {}
    scheme = "https" if wanted.tls_secret else "http"
    return replicas.sidecar_settings(replicas.peers_url(scheme), PEERS if wanted.secrets else OMIT)


def _of_several(wanted: KubernetesOptions) -> Object:
    if not wanted.gateways.several:
        return {}
    store = wanted.gateways.lease_store(wanted.namespace)
    usual = LeaseStore(url="redis://localhost")
    said = {} if store is None else msgspec.structs.asdict(store)
    return replicas.settings({name: value for name, value in said.items() if value != getattr(usual, name)} or OMIT)


def sidecar_settings(requests_log: Any, engines: Any, web: Any) -> Object:
    """Return the content of sidecar.yaml."""
    return given({
        "listen": f"{_EVERYWHERE}:{PORTS['sidecar']}",
        "requests_log": requests_log,
        "engines": engines,
        "gpu": "off",
        "state": f"{STATE}/sidecar.state",
        "events": f"{STATE}/events.jsonl",
        "web_config": web,
    })  # fmt: skip


def gateway_settings(upstream: Any, web: Any) -> Object:
    """Return the content of gateway.yaml. upstream: the one engine; of several teams.yaml has the addresses."""
    return given({
        "upstream": upstream,
        "listen": f"{_EVERYWHERE}:{PORTS['http']}",
        "metrics_listen": f"{_EVERYWHERE}:{PORTS['gateway-metrics']}",
        "requests_log": LOG,
        "teams": f"{_ETC}/teams/teams.yaml",
        "engine_pages": False,  # Prometheus reads the engines themselves; teams need not see each other's figures
        "metrics_web_config": web,
    })  # fmt: skip


def _store_access(access: S3Access) -> Object:
    named = {"endpoint": access.endpoint, "region": access.region, "credentials_file": access.credentials_file}
    return {name: value for name, value in named.items() if value is not None}


def ship_settings(dataset: Any, cluster: Any, writer: Any, s3: Any, web: Any) -> Object:
    """Return the content of ship.yaml. Segments are small, because they share a volume with the log."""
    return given({
        "dataset": dataset,
        "cluster": cluster,
        "writer": writer,
        "requests_log": [LOG],
        "state": f"{STATE}/ship",
        "s3": s3,
        "listen": f"{_EVERYWHERE}:{PORTS['ship']}",
        "seal_bytes": SHIP_SEAL_BYTES,
        "spool_bytes": SHIP_SPOOL_BYTES,
        "web_config": web,
    })  # fmt: skip


def _log(wanted: KubernetesOptions) -> str:
    return f"{LOGS}/{wanted.own_gateway.log}" if wanted.own_gateway else LOG


def upstreams(wanted: KubernetesOptions) -> str:
    """Return what teams.yaml must contain for several engines; empty where the gateway's own file names the one."""
    if len(wanted.engines) == 1:
        return ""
    return as_yaml({"upstreams": {name: {"url": url} for name, url in wanted.engine_names.items()}})


def config(wanted: KubernetesOptions) -> Object:
    return load_one("config.yaml", TEXTS=config_text(wanted))


def config_digest(wanted: KubernetesOptions) -> str:
    """Return a digest that differs when the configuration that pods mount does; it stands in their annotations."""
    return hashlib.sha256(as_yaml(config_text(wanted)).encode()).hexdigest()[:16]


def gateway(wanted: KubernetesOptions) -> list[Object]:
    """Return the pod of gateway and sidecar, its Services, and the volume of the log and of the sidecar's counts; of
    several gateways also what they share."""
    objects, several = _gateway(wanted), wanted.gateways
    if not several.several:
        return objects
    count = several.count if several.most is None else OMIT
    return [*replicas.replicated(objects, count), *replicas.added(several)]


def _gateway(wanted: KubernetesOptions) -> list[Object]:
    objects = load(
        "gateway.yaml",
        IMAGE=wanted.image,
        CONFIG_DIGEST=config_digest(wanted),
        GRACE_S=GRACE_S,
        SCHEME="HTTPS" if wanted.tls_secret else OMIT,
        TEAMS_SECRET=wanted.teams_secret,
        TLS_SECRET=wanted.tls_secret,
        LOGIN_SECRET=wanted.login_secret,
        STORE_SECRET=wanted.gateways.store_secret,
        SHIP_SECRET=wanted.shipping.secret,
        STORAGE_CLASS=wanted.storage_class or OMIT,
        STATE_SIZE=wanted.state_size,
    )
    others = {"store": wanted.gateways.store_secret, "ship": wanted.shipping.secret}
    named = {*wanted.secrets, *(name for name, secret in others.items() if secret)}
    pod = objects[0]["spec"]["template"]["spec"]
    _leave_out(pod, {*PROTECTION, *others} - named)
    if not wanted.shipping.dataset:
        for parts in (pod, *(each["spec"] for each in objects if each["kind"] == "Service")):
            for kind in parts.keys() & {"containers", "ports"}:
                parts[kind] = [each for each in parts[kind] if each["name"] != "ship"]
    return objects


def gateway_pod(wanted: KubernetesOptions) -> Object:
    """Return the spec of the gateway's pod."""
    pod: Object = gateway(wanted)[0]["spec"]["template"]["spec"]
    return pod


def sidecar(wanted: KubernetesOptions) -> list[Object]:
    """Return the pod of a sidecar without a request log, its Service and the volume of its state."""
    return sidecar_of(gateway(wanted))


def sidecar_of(objects: list[Object]) -> list[Object]:
    """Return the sidecar of the gateway's objects, alone."""
    deployment, claim = (each for each in objects if each["kind"] in ("Deployment", "PersistentVolumeClaim"))
    template = deployment["spec"]["template"]
    pod = template["spec"]
    pod["containers"] = [each for each in pod["containers"] if each["name"] == "sidecar"]
    [container] = pod["containers"]
    container["volumeMounts"] = [each for each in container["volumeMounts"] if each["mountPath"] != LOGS]
    _leave_out(pod, {each["name"] for each in pod["volumes"]} - {each["name"] for each in container["volumeMounts"]})
    for volume in pod["volumes"]:
        if claimed := volume.get("persistentVolumeClaim"):
            claimed["claimName"] = f"{SIDECAR_NAME}-state"
    template["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = "sidecar"
    labels = {**template["metadata"]["labels"], "app.kubernetes.io/name": SIDECAR_NAME}
    template["metadata"]["labels"] = {**labels, **SIDECAR}
    deployment["spec"]["selector"]["matchLabels"] = {"app.kubernetes.io/name": SIDECAR_NAME}
    deployment["metadata"] = {"name": SIDECAR_NAME, "labels": labels}
    claim["metadata"] = {
        "name": f"{SIDECAR_NAME}-state",
        "labels": {**claim["metadata"]["labels"], "app.kubernetes.io/name": f"{SIDECAR_NAME}-state"},
    }
    return [deployment, metrics_service(), claim]


def _leave_out(pod: Object, volumes: set[str]) -> None:
    """Remove volumes from a pod, and from the containers that mount them."""
    pod["volumes"] = [each for each in pod["volumes"] if each["name"] not in volumes]
    for container in pod["containers"]:
        container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] not in volumes]


def metrics_service() -> Object:
    """Return the Service of a sidecar in the pods of somebody else's gateway, or in a pod of its own."""
    return load_one("sidecar.yaml")


def board(wanted: KubernetesOptions) -> list[Object]:
    """Return the dashboards without Grafana, and the pages that alerts link to."""
    host = urlsplit(wanted.links.runbooks).hostname or ""
    return load(
        "board.yaml",
        IMAGE=wanted.image,
        CONFIG_DIGEST=config_digest(wanted),
        ARGUMENTS=board_arguments(wanted.prometheus_url, [] if host.startswith("127.") else [host]),
    )


def board_arguments(prometheus: Any, hosts: list[Any]) -> list[Any]:
    """Return the arguments of the board's container. hosts: names under which it answers, besides those of its
    Service."""
    names = [BOARD_SERVICE, *(f"{BOARD_SERVICE}.$(NAMESPACE){end}" for end in ("", ".svc", ".svc.cluster.local"))]
    allowed = [word for name in (*names, *hosts) for word in ("--allow-host", name)]
    listen = ["--listen", f"{_EVERYWHERE}:{PORTS['board']}", "--thresholds", f"{_ETC}/config/thresholds.yml"]
    return ["board", "--prometheus", prometheus, *listen, *allowed]
