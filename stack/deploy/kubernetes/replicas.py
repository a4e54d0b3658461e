"""Several gateways: base/gateway.yaml as a StatefulSet (base/replicas.yaml), the Valkey that leases limits to them
(base/store.yaml), and their autoscaler.

A StatefulSet, because each gateway has a volume for its log and its sidecar's counts, and a name that stays: a gateway
that comes back continues its log, and its lease is free as soon as the former one has expired."""

from __future__ import annotations

import hashlib
import importlib.resources
from copy import deepcopy
from typing import Any

from exporters.catalogue import gateway
from stack.deploy.kubernetes.objects import GATEWAY, OMIT, PORTS, REPLICAS_SERVICE, Object, given, load, load_one
from stack.deploy.kubernetes.replica_options import ReplicaOptions

METRIC = "vllm_watch_gateway_streams"  # of the autoscaler, as prometheus-adapter serves it
# A pod leaves its Services and gets SIGTERM at the same time: until every proxy has heard of it, new requests come.
LEAVE_S = 5
_CALM_S = 300  # a gateway is removed when fewer were enough for so long
_PERIOD_S = 60
# Sidecar and shipper end after the gateway, when they have read the last lines: no other one reads this volume after a
# scale-down.
_AFTER_GATEWAY = (
    f"while python -c 'import socket; socket.create_connection((\"127.0.0.1\", {PORTS['gateway-metrics']}), 1)'"
    " 2>/dev/null; do sleep 1; done; sleep 3"
)


def settings(store: Any) -> Object:
    """Return what gateway.yaml has more. The list of gateways is that of their headless Service, so that it follows
    every change of their number."""
    return {
        "timeouts": {"accept_grace_s": LEAVE_S},
        "sharing": given({"replicas_dns": REPLICAS_SERVICE, "store": store}),
    }


def sidecar_settings(scheme: Any, http_config: Any) -> Object:
    """Return what sidecar.yaml has more: engines count the requests of all gateways, so the first sidecar compares them
    with the logs of all."""
    peers = given({"url": scheme, "http_config": http_config})
    return {"central": "hostname", "peers": [peers]}


def peers_url(scheme: str) -> str:
    """Return the address of all sidecars: their headless Service has one for each."""
    return f"{scheme}://{REPLICAS_SERVICE}:{PORTS['sidecar']}"


def replicated(objects: list[Object], count: Any) -> list[Object]:
    """Return the objects of base/gateway.yaml for several gateways. count: OMIT where an autoscaler has it, or each
    apply would undo its work."""
    deployment, clients, metrics, claim = deepcopy(objects)
    template = deployment["spec"]["template"]
    pod = template["spec"]
    pod["terminationGracePeriodSeconds"] += LEAVE_S
    pod["topologySpreadConstraints"] = spread()
    pod["volumes"] = [each for each in pod["volumes"] if "persistentVolumeClaim" not in each]
    containers = {each["name"]: each for each in pod["containers"]}
    for name in containers.keys() & {"sidecar", "ship"}:
        containers[name]["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", _AFTER_GATEWAY]}}}
    # It listens when the others have seen it in the list, after 15 s and a name's time in caches.
    probe = containers["gateway"]["readinessProbe"]
    containers["gateway"]["startupProbe"] = {**probe, "failureThreshold": 24}
    del clients["spec"]["publishNotReadyAddresses"]  # there is another one to ask
    claims = [{"metadata": {"name": "state"}, "spec": claim["spec"]}]
    several, addresses, budget = load("replicas.yaml", REPLICAS=count, TEMPLATE=template, CLAIMS=claims)
    return [several, clients, metrics, addresses, budget]


def spread() -> list[Object]:
    """Return constraints that spread gateways over nodes and zones where there are any."""
    return [
        {
            "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": GATEWAY}},
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]  # fmt: skip


def added(options: ReplicaOptions) -> list[Object]:
    """Return the store and the autoscaler, where they are wanted."""
    store = valkey(options.valkey_image, options.store_secret) if options.valkey else []
    scaler = [autoscaler(options.count, options.most, str(options.streams))] if options.most is not None else []
    return [*store, *scaler]


def valkey(image: Any, secret: Any) -> list[Object]:
    """Return the Deployment and the Service of the store."""
    script = importlib.resources.files("stack.deploy").joinpath("valkey.sh").read_text(encoding="utf-8")
    digest = hashlib.sha256(script.encode()).hexdigest()[:16]
    return load("store.yaml", VALKEY_IMAGE=image, STORE_SECRET=secret, SCRIPT=script, SCRIPT_DIGEST=digest)


def autoscaler(least: Any, most: Any, streams: Any) -> Object:
    """Return a HorizontalPodAutoscaler that keeps `streams` running requests for each gateway. A gateway starts within
    seconds, so one is added each minute; removing one cuts what still runs after its drain, so that takes longer."""
    one_pod = {"type": "Pods", "value": 1, "periodSeconds": _PERIOD_S}
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [one_pod]},
        "scaleDown": {"stabilizationWindowSeconds": _CALM_S, "policies": [one_pod]},
    }
    words = {"NAME": GATEWAY, "NAMESPACE": OMIT, "KIND": "StatefulSet", "LEAST": least, "MOST": most}
    return load_one("autoscaling/hpa.yaml", METRIC=METRIC, VALUE=streams, BEHAVIOR=behavior, **words)


def adapter_rule(namespace: str) -> Object:
    """Return values of the Helm chart prometheus-adapter that serve the metric of the autoscaler: running requests of
    all gateways, which the controller divides by their number."""
    return load_one(
        "autoscaling/prometheus-adapter.yaml",
        METRIC=METRIC,
        SERIES=f'{gateway.RUNNING.name}{{namespace="{namespace}"}}',
        QUERY="sum(<<.Series>>{<<.LabelMatchers>>})",
    )
