"""Our sidecar beside a gateway of somebody else's: components for kustomize that bring it into that Deployment's pods.

The sidecar's state lies on the volume of the log, so both are there or both are gone: a log without the state would be counted once more. One
replica, as with our own gateway: with several, each sidecar would count the same engines."""

from __future__ import annotations

from collections.abc import Iterator

from stack.kubernetes import policies, running
from stack.kubernetes.objects import METRICS_SERVICE, SIDECAR, Object, service
from stack.kubernetes.wanted import OwnGateway, Wanted

COMPONENT, POLICY = "components/sidecar", "components/sidecar-policy"
_OURS = "vllm-watch-"  # before the names of what comes into a pod that has its own
_ON_THEIRS: dict[str, Object] = {"log": {"readOnly": True}, "state": {"subPath": "vllm-watch"}}  # mounts that are on the volume of the log


def metrics_service() -> Object:
    return service(METRICS_SERVICE, SIDECAR, ("sidecar",))


def components(wanted: Wanted, own: OwnGateway) -> Iterator[tuple[str, Object | list[Object]]]:
    """Name and content of each file."""
    kind = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    target = {"kind": "Deployment", "name": own.deployment}
    yield f"{COMPONENT}/kustomization.yaml", {
        **kind,
        # By a target, because a patch without one meets only a Deployment whose file names no namespace.
        "patches": [{"path": name, "target": target} for name in ("labels.yaml", "container.yaml")],
        # A target that is not there is no mistake to kustomize; the source of a replacement is.
        "replacements": [{
            "source": {**target, "fieldPath": "metadata.name"},
            "targets": [{
                "select": {"kind": "Service", "name": METRICS_SERVICE},
                "fieldPaths": ["metadata.annotations.vllm-watch/sidecar-in"], "options": {"create": True},
            }],
        }],
    }  # fmt: skip
    yield f"{COMPONENT}/labels.yaml", {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": own.deployment},
        "spec": {"template": {"metadata": {"labels": SIDECAR, "annotations": running.digest(wanted)}}},
    }  # fmt: skip
    # Added at the end: a merged container would come first, and be the one that `kubectl logs` shows.
    added = [("containers", _container(wanted, own)), *(("volumes", volume) for volume in _volumes(wanted))]
    yield f"{COMPONENT}/container.yaml", [{"op": "add", "path": f"/spec/template/spec/{where}/-", "value": value} for where, value in added]
    yield f"{POLICY}/kustomization.yaml", {**kind, "resources": ["policy.yaml"]}
    policy = policies.of_own_gateway(wanted)
    yield f"{POLICY}/policy.yaml", {**policy, "metadata": {**policy["metadata"], "namespace": wanted.namespace}}


def _container(wanted: Wanted, own: OwnGateway) -> Object:
    container = running.sidecar_container(f"{_OURS}sidecar", wanted)
    mounts = [
        {**mount, "name": own.volume, **_ON_THEIRS[mount["name"]]} if mount["name"] in _ON_THEIRS else _renamed(mount)
        for mount in container["volumeMounts"]
    ]
    return container | {"volumeMounts": mounts, "securityContext": {**running.AS_USER, **container["securityContext"]}}


def _volumes(wanted: Wanted) -> Iterator[Object]:
    """Secrets are readable to all here: without an fsGroup, which is not ours to set, they would be root's alone. Only our container has them."""
    yield from map(_renamed, (*running.volumes(), *running.secret_volumes(wanted, 0o444)))


def _renamed(named: Object) -> Object:
    return {**named, "name": _OURS + named["name"]}
