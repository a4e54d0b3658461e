"""What runs: the gateway with its sidecar in one pod, and the board. Every container is unprivileged and may write only
to its own volumes.

The sidecar stands in the gateway's pod because the request log is a file there, not for the engine's sake: engines are
read over HTTP. GPUs are
not: NVML sees those of its own node only, so here the sidecar's `gpu` is off and dcgm-exporter fills the GPU board."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from alerts import export
from alerts.printer import as_yaml
from stack.deploy.kubernetes.objects import (
    BOARD,
    BOARD_SERVICE,
    CONFIG,
    GATEWAY,
    GATEWAY_SERVICE,
    METRICS_SERVICE,
    PART_OF,
    PORTS,
    Object,
    config_map,
    label_of,
    made,
    service,
)
from stack.deploy.kubernetes.options import KubernetesOptions
from stack.gateway.config import Timeouts

USER = 10001  # of the image
AS_USER = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}}
_ETC, _VAR = "/etc/vllm-watch", "/var/lib/vllm-watch"
LOGS, STATE = f"{_VAR}/log", f"{_VAR}/state"
EVENTS = f"{STATE}/events.jsonl"
LOG = f"{LOGS}/requests.jsonl"
_TMP = "/tmp"  # noqa: S108  the container's own
_EVERYWHERE = {"config": f"{_ETC}/config", "tmp": _TMP}
ROTATE_BYTES = 256 << 20  # the log, and as much again for the one before it; wanted.LEAST_STATE_BYTES has room for both
# The log is a folder of the volume that holds the state: the sidecar ends with the gateway, and the next one reads
# there what came after it ended.
_FOLDERS: dict[str, Object] = {"log": {"name": "state", "subPath": "log"}}
_ENDS_AFTER_S = 10  # the gateway's own time to write the last records, after running requests had theirs

# Nobody else rotates it. SIGTERM must reach the shell, which as the first process ignores what it does not trap. A
# rename is all that is needed: the gateway opens the file anew at the next line and the sidecar follows
# (docs/internals/faults.md).
ROTATE = """\
trap 'exit 0' TERM
while :; do
  sleep "$EVERY_S" & wait $!
  if [ "$(stat -c %s "$LOG" 2>/dev/null || echo 0)" -gt "$BYTES" ]; then mv "$LOG" "$LOG.1"; fi
done
"""


def config_text(wanted: KubernetesOptions) -> dict[str, str]:
    """The files of the containers, by name. Secrets are never among them."""
    texts = {"thresholds.yml": export.numbers(wanted.rules.settings)}
    if not wanted.with_sidecar:
        return texts
    web = {"web_config": f"{_ETC}/config/web.yml"} if wanted.secrets else {}
    everywhere = "0.0.0.0"  # noqa: S104  in a pod; NetworkPolicies say who reaches it
    sidecar = {
        "listen": f"{everywhere}:{PORTS['sidecar']}",
        "requests_log": [f"{LOGS}/{wanted.own_gateway.log}" if wanted.own_gateway else LOG],
        "engines": [{"name": name, "url": url} for name, url in wanted.engine_names.items()],
        "gpu": "off",
        "state": f"{STATE}/sidecar.state",
        "events": EVENTS,
        **web,
    }
    texts["sidecar.yaml"] = as_yaml(sidecar)
    if wanted.secrets:
        texts["web.yml"] = as_yaml(_web(wanted))
    if wanted.with_gateway:
        gateway = {
            "listen": f"{everywhere}:{PORTS['http']}",
            "metrics_listen": f"{everywhere}:{PORTS['gateway-metrics']}",
            "requests_log": LOG,
            "teams": f"{_ETC}/teams/teams.yaml",
            "engine_pages": False,  # Prometheus reads the engines themselves; teams need not see each other's figures
            **{f"metrics_{key}": value for key, value in web.items()},
        }
        one = {"upstream": next(iter(wanted.engine_names.values()))} if len(wanted.engines) == 1 else {}
        texts["gateway.yaml"] = as_yaml({**one, **gateway})
    return texts


def _web(wanted: KubernetesOptions) -> Object:
    """What a listener asks of Prometheus; docs/guides/hardening.md."""
    tls = (
        {"tls_server_config": {"cert_file": f"{_ETC}/tls/tls.crt", "key_file": f"{_ETC}/tls/tls.key"}}
        if wanted.tls_secret
        else {}
    )
    return {**tls, **({"bearer_token_files": [f"{_ETC}/login/token"]} if wanted.login_secret else {})}


def upstreams(wanted: KubernetesOptions) -> str:
    """What teams.yaml must say where there are several engines; empty where the gateway's own file names the one."""
    if len(wanted.engines) == 1:
        return ""
    return as_yaml({"upstreams": {name: {"url": url} for name, url in wanted.engine_names.items()}})


def config(wanted: KubernetesOptions) -> Object:
    return config_map(CONFIG, config_text(wanted))


def gateway(wanted: KubernetesOptions) -> Iterator[Object]:
    """The pod of gateway and sidecar, its Services, and the volume of the log and of what the sidecar has counted."""
    yield _deployment(
        GATEWAY,
        wanted,
        list(_gateway_containers(wanted)),
        list(_gateway_volumes(wanted)),
        # Slots are counted in the gateway, and a log has one writer: two at once, even for the time of a rollout, would
        # promise each slot twice.
        strategy={"type": "Recreate"},
        ends_after_s=int(Timeouts().drain_s) + _ENDS_AFTER_S,
    )
    yield service(GATEWAY_SERVICE, label_of(GATEWAY), ("http",))
    yield service(METRICS_SERVICE, label_of(GATEWAY), ("gateway-metrics", "sidecar"))
    claim: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": wanted.state_size}}}
    if wanted.storage_class:
        claim["storageClassName"] = wanted.storage_class
    yield made("v1", "PersistentVolumeClaim", f"{GATEWAY}-state", spec=claim)


def board(wanted: KubernetesOptions) -> Iterator[Object]:
    """The boards without Grafana, and the pages that alerts link to."""
    names = [
        BOARD_SERVICE,
        *(f"{BOARD_SERVICE}.$(NAMESPACE){end}" for end in ("", ".svc", ".svc.cluster.local")),
        urlsplit(wanted.rules.links.runbooks).hostname,
    ]
    allowed = [word for name in names if name and not name.startswith("127.") for word in ("--allow-host", name)]
    arguments = ["board", "--prometheus", wanted.prometheus_url, "--listen", f"0.0.0.0:{PORTS['board']}"]
    numbers = ["--thresholds", f"{_ETC}/config/thresholds.yml"]
    container = _container("board", wanted, [*arguments, *numbers, *allowed], ["board"], _EVERYWHERE)
    container["env"] = [{"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}]
    # It answers only under its own names, and the kubelet asks by the pod's address.
    asked = {
        "httpGet": {"path": "/-/healthy", "port": "board", "httpHeaders": [{"name": "Host", "value": "localhost"}]}
    }
    container |= {
        "livenessProbe": _patient(asked),
        "readinessProbe": {**asked, "periodSeconds": 10, "timeoutSeconds": 5},
    }
    yield _deployment(
        BOARD, wanted, [container], list(volumes()), strategy={"type": "RollingUpdate"}, ends_after_s=_ENDS_AFTER_S
    )
    yield service(BOARD_SERVICE, label_of(BOARD), ("board",))


def digest(wanted: KubernetesOptions) -> dict[str, str]:
    """The annotation of pods that is another when what they mount as configuration is; not called as one that charts
    use."""
    return {"checksum/vllm-watch-config": hashlib.sha256(as_yaml(config_text(wanted)).encode()).hexdigest()[:16]}


# ---- pods


def _deployment(
    name: str,
    wanted: KubernetesOptions,
    containers: list[Object],
    volumes: list[Object],
    strategy: Object,
    ends_after_s: int,
) -> Object:
    """One pod. A change of what is mounted as configuration makes a new one, by the digest in its annotations."""
    return made("apps/v1", "Deployment", name, spec={
        "replicas": 1,
        "revisionHistoryLimit": 3,
        "strategy": strategy,
        "selector": {"matchLabels": label_of(name)},
        "template": {
            "metadata": {
                "labels": {**label_of(name), **PART_OF},
                "annotations": {"kubectl.kubernetes.io/default-container": containers[0]["name"], **digest(wanted)},
            },
            "spec": {
                "automountServiceAccountToken": False,  # nothing here asks the API
                "enableServiceLinks": False,  # a Service could else set variables that begin with VLLM_WATCH_
                "terminationGracePeriodSeconds": ends_after_s,
                "securityContext": {**AS_USER, "fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
                "containers": containers,
                "volumes": volumes,
            },
        },
    })  # fmt: skip


def _container(
    name: str, wanted: KubernetesOptions, arguments: list[str], ports: list[str], mounts: Mapping[str, str]
) -> Object:
    """mounts: where each volume is seen; what lies below /etc is read-only. No limit of CPU: held back for a moment,
    each token would be late."""
    return {
        "name": name,
        "image": wanted.image,
        "args": arguments,
        "ports": [{"name": port, "containerPort": PORTS[port]} for port in ports],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {
                "name": volume,
                "mountPath": path,
                **_FOLDERS.get(volume, {}),
                **({"readOnly": True} if path.startswith(_ETC) else {}),
            }
            for volume, path in mounts.items()
        ],
    }


def _gateway_containers(wanted: KubernetesOptions) -> Iterator[Object]:
    mounts = {**_EVERYWHERE, "log": LOGS, **_secret_folders(wanted)}
    front = _container(
        "gateway", wanted, ["gateway", "run", "--config", f"{_ETC}/config/gateway.yaml"], ["http", "gateway-metrics"],
        {**mounts, "teams": f"{_ETC}/teams"},
    )  # fmt: skip
    # Bodies wait in it whole: 128 MiB of them as shipped (limits.bodies_bytes), measured at up to three times that in
    # memory.
    front["resources"]["limits"] = {"memory": "1Gi"}
    healthy = _healthy("gateway-metrics", wanted)
    yield front | {
        "livenessProbe": _patient(healthy),
        "readinessProbe": {**healthy, "periodSeconds": 5, "timeoutSeconds": 5},
    }

    yield sidecar_container("sidecar", wanted)

    rotation = _container("rotate", wanted, [ROTATE], [], {"log": LOGS, "tmp": _TMP})
    del rotation["ports"]
    rotation["env"] = [
        {"name": name, "value": value}
        for name, value in (("LOG", LOG), ("BYTES", str(ROTATE_BYTES)), ("EVERY_S", "10"))
    ]
    yield rotation | {
        "command": ["sh", "-c"],
        "resources": {"requests": {"cpu": "5m", "memory": "8Mi"}, "limits": {"memory": "32Mi"}},
    }


def sidecar_container(name: str, wanted: KubernetesOptions) -> Object:
    """Not asked whether it is ready: that would count for the whole pod, and watching must not take the gateway
    away."""
    mounts = {**_EVERYWHERE, "log": LOGS, "state": STATE, **_secret_folders(wanted)}
    container = _container(
        name, wanted, ["sidecar", "run", "--config", f"{_ETC}/config/sidecar.yaml"], ["sidecar"], mounts
    )
    return container | {
        "env": [{"name": "VLLM_WATCH_EVENTS", "value": EVENTS}],
        "livenessProbe": _patient(_healthy("sidecar", wanted)),
    }


def _healthy(port: str, wanted: KubernetesOptions) -> Object:
    return {"httpGet": {"path": "/-/healthy", "port": port, **({"scheme": "HTTPS"} if wanted.tls_secret else {})}}


def _patient(probe: Object) -> Object:
    """Restarted only after half a minute without an answer; a start has as long."""
    return {**probe, "initialDelaySeconds": 10, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3}


def volumes() -> Iterator[Object]:
    """What every pod of ours has."""
    yield {"name": "config", "configMap": {"name": CONFIG}}
    yield {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}


def _secret_folders(wanted: KubernetesOptions) -> dict[str, str]:
    return {name: f"{_ETC}/{name}" for name in wanted.secrets}


def secret_volumes(wanted: KubernetesOptions, mode: int = 0o440) -> Iterator[Object]:
    for name, secret in wanted.secrets.items():
        yield {"name": name, "secret": {"secretName": secret, "defaultMode": mode}}


def _gateway_volumes(wanted: KubernetesOptions) -> Iterator[Object]:
    yield from volumes()
    yield {"name": "teams", "secret": {"secretName": wanted.teams_secret, "defaultMode": 0o440}}
    yield from secret_volumes(wanted)
    yield {"name": "state", "persistentVolumeClaim": {"claimName": f"{GATEWAY}-state"}}
