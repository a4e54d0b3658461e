"""A Kubernetes API that has nothing: discovery of the kinds that exports use, and 404 for every object.

Enough for `kubectl apply --dry-run=client --validate=false`, which asks for kinds and for objects that exist."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

KINDS = {
    "v1": {"ConfigMap": "configmaps", "Service": "services", "PersistentVolumeClaim": "persistentvolumeclaims"},
    "apps/v1": {"Deployment": "deployments"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "monitoring.coreos.com/v1": {
        "PodMonitor": "podmonitors", "ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules",
    },
    "monitoring.coreos.com/v1alpha1": {"AlertmanagerConfig": "alertmanagerconfigs"},
}  # fmt: skip


def _discovery(path: str) -> dict[str, object] | None:
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups: dict[str, list[dict[str, str]]] = {}
        for known in KINDS:
            if "/" in known:
                group, version = known.split("/")
                groups.setdefault(group, []).append({"groupVersion": known, "version": version})
        return {
            "kind": "APIGroupList", "apiVersion": "v1",
            "groups": [
                {"name": name, "versions": versions, "preferredVersion": versions[0]}
                for name, versions in groups.items()
            ],
        }  # fmt: skip
    known = path.removeprefix("/apis/").removeprefix("/api/")
    if known in KINDS:
        resources = [
            {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "create", "patch"]}
            for kind, plural in KINDS[known].items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": known, "resources": resources}
    return None


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = _discovery(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(missing if found is None else found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[str]:
    """Yield the address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
