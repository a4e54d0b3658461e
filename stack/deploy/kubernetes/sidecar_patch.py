"""Our sidecar beside a gateway of somebody else's: components for kustomize that bring it into that Deployment's pods.

The sidecar's state lies on the volume of the log, so both are there or both are gone: a log without the state would be
counted once more. One replica and Recreate, as with our own gateway: each sidecar would count the same engines, and a
second one on the same state is refused, so that with two pods at once the new one would never be ready and their
rollout never end."""

from __future__ import annotations

from collections.abc import Iterator

from stack.deploy.kubernetes import policies, running
from stack.deploy.kubernetes.objects import METRICS_SERVICE, SIDECAR, Object, service
from stack.deploy.kubernetes.options import KubernetesOptions, OwnGateway

COMPONENT, POLICY = "components/sidecar", "components/sidecar-policy"
# Not in the base: pods that run already get the label that it lets in by their rollout, and would be shut out of the
# engines until then.
CLOSED = "components/closed-engines"
FOLDERS = (COMPONENT, POLICY, CLOSED)
_OURS = "vllm-watch-"  # before the names of what comes into a pod that has its own
# what is on the volume of the log
_ON_THEIRS: dict[str, Object] = {running.LOGS: {"readOnly": True}, running.STATE: {"subPath": "vllm-watch"}}


def metrics_service() -> Object:
    return service(METRICS_SERVICE, SIDECAR, ("sidecar",))


def components(wanted: KubernetesOptions, own: OwnGateway) -> Iterator[tuple[str, Object | list[Object]]]:
    """Name and content of each file."""
    kind = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    target = {"kind": "Deployment", "name": own.deployment}
    yield f"{COMPONENT}/kustomization.yaml", {
        **kind,
        # By a target, because a patch without one meets only a Deployment whose file names no namespace.
        "patches": [{"path": name, "target": target} for name in ("deployment.yaml", "container.yaml")],
        # A target that is not there is no mistake to kustomize; the source of a replacement is.
        "replacements": [{
            "source": {**target, "fieldPath": "metadata.name"},
            "targets": [{
                "select": {"kind": "Service", "name": METRICS_SERVICE},
                "fieldPaths": ["metadata.annotations.vllm-watch/sidecar-in"], "options": {"create": True},
            }],
        }],
    }  # fmt: skip
    yield (
        f"{COMPONENT}/deployment.yaml",
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": own.deployment},
            "spec": {
                # None takes theirs out, which Recreate may not have beside it
                "strategy": {"type": "Recreate", "rollingUpdate": None},
                "template": {"metadata": {"labels": SIDECAR, "annotations": running.digest(wanted)}},
            },
        },
    )
    # Added at the end: a merged container would come first, and be the one that `kubectl logs` shows.
    added = [("containers", _container(wanted, own)), *(("volumes", volume) for volume in _volumes(wanted))]
    yield (
        f"{COMPONENT}/container.yaml",
        [{"op": "add", "path": f"/spec/template/spec/{where}/-", "value": value} for where, value in added],
    )
    closing = {POLICY: policies.of_own_gateway(wanted)} | (
        {} if wanted.open_engines else {CLOSED: policies.of_engines(wanted)}
    )
    for folder, policy in closing.items():
        yield f"{folder}/kustomization.yaml", {**kind, "resources": ["policy.yaml"]}
        yield f"{folder}/policy.yaml", {**policy, "metadata": {**policy["metadata"], "namespace": wanted.namespace}}


def _container(wanted: KubernetesOptions, own: OwnGateway) -> Object:
    container = running.sidecar_container(f"{_OURS}sidecar", wanted)
    mounts = [
        {"name": own.volume, "mountPath": path, **_ON_THEIRS[path]}
        if (path := mount["mountPath"]) in _ON_THEIRS
        else _renamed(mount)
        for mount in container["volumeMounts"]
    ]
    return container | {"volumeMounts": mounts, "securityContext": {**running.AS_USER, **container["securityContext"]}}


def _volumes(wanted: KubernetesOptions) -> Iterator[Object]:
    """Secrets are readable to all here: without an fsGroup, which is not ours to set, they would be root's alone. Only
    our container has them."""
    yield from map(_renamed, (*running.volumes(), *running.secret_volumes(wanted, 0o444)))


def _renamed(named: Object) -> Object:
    return {**named, "name": _OURS + named["name"]}
