"""Sidecar in the pods of another gateway: kustomize components (base/component.yaml).

The sidecar's state lies on the volume of the log, so both are there or both are gone: a log without the state would be
counted once more. One replica and Recreate, as with our own gateway: each sidecar would count the same engines, and a
second one on the same state is refused, so that with two pods at once the new one would never be ready and their
rollout never end."""

from __future__ import annotations

from collections.abc import Iterator

from stack.deploy.kubernetes import policies, running
from stack.deploy.kubernetes.objects import Object, load
from stack.deploy.kubernetes.options import KubernetesOptions, OwnGateway

COMPONENT, POLICY = "components/sidecar", "components/sidecar-policy"
# Not in the base: pods that run already get the label that it lets in by their rollout, and would be shut out of the
# engines until then.
CLOSED = "components/closed-engines"
FOLDERS = (COMPONENT, POLICY, CLOSED)
_OURS = "vllm-watch-"  # before the names of what comes into a pod that has its own
# mounts of the volume that holds the log
_ON_THEIRS: dict[str, Object] = {running.LOGS: {"readOnly": True}, running.STATE: {"subPath": "vllm-watch"}}


def components(wanted: KubernetesOptions, own: OwnGateway) -> Iterator[tuple[str, Object | list[Object]]]:
    """Yield name and content of each file."""
    component, deployment, of_policy = load(
        "component.yaml", DEPLOYMENT=own.deployment, CONFIG_DIGEST=running.config_digest(wanted)
    )
    yield f"{COMPONENT}/kustomization.yaml", component
    yield f"{COMPONENT}/deployment.yaml", deployment
    pod = running.gateway_pod(wanted)
    # Added at the end: a merged container would come first, and be the one that `kubectl logs` shows.
    added = [("containers", _container(pod, own)), *(("volumes", volume) for volume in _volumes(pod))]
    yield (
        f"{COMPONENT}/container.yaml",
        [{"op": "add", "path": f"/spec/template/spec/{where}/-", "value": value} for where, value in added],
    )
    closing = {POLICY: policies.of_own_gateway(wanted)} | (
        {CLOSED: policies.of_engines(wanted)} if wanted.restrict_engines else {}
    )
    for folder, policy in closing.items():
        yield f"{folder}/kustomization.yaml", of_policy
        yield f"{folder}/policy.yaml", {**policy, "metadata": {**policy["metadata"], "namespace": wanted.namespace}}


def _container(pod: Object, own: OwnGateway) -> Object:
    """The sidecar of our gateway's pod, as a container of theirs: the volume of the log is theirs, and so is the
    fsGroup."""
    [container] = [each for each in pod["containers"] if each["name"] == "sidecar"]
    mounts = [
        {"name": own.volume, "mountPath": path, **_ON_THEIRS[path]}
        if (path := mount["mountPath"]) in _ON_THEIRS
        else _renamed(mount)
        for mount in container["volumeMounts"]
    ]
    as_user = {key: value for key, value in pod["securityContext"].items() if not key.startswith("fsGroup")}
    security = {**as_user, **container["securityContext"]}
    return {**_renamed(container), "volumeMounts": mounts, "securityContext": security}


def _volumes(pod: Object) -> Iterator[Object]:
    """Secrets are readable to all here: without an fsGroup, which is not ours to set, they would be root's alone. Only
    our container has them."""
    for volume in pod["volumes"]:
        if volume["name"] in ("config", "tmp"):
            yield _renamed(volume)
        elif volume["name"] in running.PROTECTION:
            yield {**_renamed(volume), "secret": {**volume["secret"], "defaultMode": 0o444}}


def _renamed(named: Object) -> Object:
    return {**named, "name": _OURS + named["name"]}
