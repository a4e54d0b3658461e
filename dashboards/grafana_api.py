"""The two APIs through which Grafana reads and saves dashboards.

The older one (/api/dashboards/db) is served from 10.4 to 13, the newer (/apis/dashboard.grafana.app) from 12.
Sources: Grafana's HTTP API pages of 10.4 to 13.2, pkg/api/dashboard.go, pkg/registry/apis/dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from dashboards.grafana_client import GrafanaAnswer, GrafanaClient, GrafanaTrouble, refused
from dashboards.publish_plan import Existing

GROUP = "/apis/dashboard.grafana.app"
NEWER = ("v1", "v1beta1")  # Grafana 13, Grafana 12; alpha versions may change from one day to the next


class GrafanaApi(Protocol):
    name: str

    def read(self, uid: str) -> Existing | None: ...

    def write(self, board: Mapping[str, Any], existing: Existing | None, folder: str, message: str) -> None: ...


class Older:
    """/api/dashboards: by uid to read, db to write. Always with a folder: without one Grafana moves a board to the
    root."""

    name = "api/dashboards"

    def __init__(self, grafana: GrafanaClient) -> None:
        self._grafana = grafana

    def read(self, uid: str) -> Existing | None:
        answer = self._grafana.ask("GET", f"/api/dashboards/uid/{uid}")
        if answer.status == 404 and answer.body is not None:
            return None
        if answer.status != 200 or "dashboard" not in answer.data:
            raise refused(answer, f"to read the board {uid}", "dashboards:read")
        meta = answer.data.get("meta") or {}
        file = meta.get("provisionedExternalId")
        managed = (
            f"Grafana reads it from a provisioned file{f' ({file})' if file else ''}" if meta.get("provisioned") else ""
        )
        return Existing(answer.data["dashboard"], meta.get("folderUid") or "", managed)

    def write(self, board: Mapping[str, Any], existing: Existing | None, folder: str, message: str) -> None:
        """Write with the version that was read, never with `overwrite`.

        A change saved in between is kept. Up to 11.2 that flag could also replace another dashboard of the same
        title."""
        version = {"version": existing.board.get("version", 0)} if existing else {}
        body = {
            "dashboard": {**board, "id": None, **version},
            "folderUid": folder,
            "message": message,
            "overwrite": False,
        }
        answer = self._grafana.ask("POST", "/api/dashboards/db", body)
        if answer.status == 412:
            raise GrafanaTrouble(_precondition(answer, board))
        if answer.status != 200:
            raise refused(answer, "to save it", "dashboards:write" if existing else "dashboards:create")


def _precondition(answer: GrafanaAnswer, board: Mapping[str, Any]) -> str:
    match answer.data.get("status"):
        case "version-mismatch":
            return "somebody saved it in Grafana just now: look at it there, or with --dry-run, then push again"
        case "name-exists":
            return (
                f"another board here is called {board['title']!r} or has its uid: rename or move that one, or push to"
                " another --folder"
            )
        case "plugin-dashboard":
            return f"it belongs to a plugin of Grafana ({answer.says}): uninstall the plugin's board first"
        case other:
            return f"Grafana does not save it ({other or answer.status}): {answer.says or 'it does not say why'}"


class Newer:
    """/apis/dashboard.grafana.app: metadata as Kubernetes has it, the classic JSON as spec.

    What was read goes back as it was (resourceVersion, generation, annotations of others), or the server takes it for a
    conflict.
    fieldValidation: without Warn a field that this release's schema does not know yet would refuse the whole board."""

    def __init__(self, grafana: GrafanaClient, version: str, namespace: str) -> None:
        self._grafana = grafana
        self._version = f"{GROUP.removeprefix('/apis/')}/{version}"
        self._path = f"{GROUP}/{version}/namespaces/{quote(namespace)}/dashboards"
        self._namespace = namespace
        self.name = self._version

    def read(self, uid: str) -> Existing | None:
        answer = self._grafana.ask("GET", f"{self._path}/{uid}")
        if answer.status == 404 and answer.body is not None:
            return None
        if answer.status != 200 or "spec" not in answer.data:
            raise refused(answer, f"to read the board {uid}", "dashboards:read")
        metadata = answer.data.get("metadata") or {}
        notes = metadata.get("annotations") or {}
        return Existing(
            {"uid": uid, **answer.data["spec"]}, notes.get("grafana.app/folder", ""), _manager(notes), metadata
        )

    def write(self, board: Mapping[str, Any], existing: Existing | None, folder: str, message: str) -> None:
        kept = dict(existing.metadata) if existing else {"name": board["uid"], "namespace": self._namespace}
        kept.pop("managedFields", None)
        notes = {**(kept.get("annotations") or {}), "grafana.app/message": message} | (
            {"grafana.app/folder": folder} if folder else {}
        )
        spec = {key: value for key, value in board.items() if key not in ("id", "uid", "version")}
        body = {
            "apiVersion": self._version,
            "kind": "Dashboard",
            "metadata": {**kept, "annotations": notes},
            "spec": spec,
        }
        path = f"{self._path}/{board['uid']}" if existing else self._path
        answer = self._grafana.ask("PUT" if existing else "POST", path, body, fieldValidation="Warn")
        if answer.status in (409, 412):
            raise GrafanaTrouble(_precondition(GrafanaAnswer(412, {"status": "version-mismatch"}), board))
        if answer.status not in (200, 201):
            raise refused(answer, "to save it", "dashboards:write" if existing else "dashboards:create")


def _manager(notes: Mapping[str, str]) -> str:
    kind = notes.get("grafana.app/managedBy", "")
    if not kind or notes.get("grafana.app/managerAllowsEdits") == "true":
        return ""
    source = notes.get("grafana.app/sourcePath") or notes.get("grafana.app/managerId", "")
    what = {"classic-file-provisioning": "a provisioned file", "repo": "a repository"}.get(kind, kind)
    return f"Grafana has it from {what}{f' ({source})' if source else ''}"


@dataclass(frozen=True, slots=True)
class Server:
    """version is '' where the server hides it."""

    version: str
    api: GrafanaApi


def detect(grafana: GrafanaClient, prefer: str = "auto") -> Server:
    """Which Grafana this is, and the API to use: the newer one where the server offers a stable version of it. Raises
    GrafanaTrouble."""
    health = grafana.ask("GET", "/api/health")
    if "database" not in health.data:
        seen = f"{health.status} and no JSON" if health.body is None else f"{health.status}"
        raise GrafanaTrouble(
            f"{grafana.url} is no Grafana: /api/health answers {seen}; check host and port, and add the path if Grafana"
            " is served below one"
        )
    if health.status != 200 or health.data["database"] != "ok":
        raise GrafanaTrouble(
            f"Grafana at {grafana.url} says that its database is {health.data['database']}; its log says more"
        )
    version = str(health.data.get("version", ""))
    offered = _offered(grafana) if prefer != "older" else []
    chosen = next((name for name in NEWER if name in offered), None)
    if chosen is None and prefer == "newer":
        raise GrafanaTrouble(
            f"Grafana {version} at {grafana.url} has no stable {GROUP}; leave --api out, or ask for the older one"
        )
    return Server(version, Newer(grafana, chosen, _namespace(grafana)) if chosen else Older(grafana))


def _offered(grafana: GrafanaClient) -> list[str]:
    answer = grafana.ask("GET", GROUP)
    versions = answer.data.get("versions") if answer.status == 200 else None
    return (
        [str(one.get("version", "")) for one in versions if isinstance(one, dict)] if isinstance(versions, list) else []
    )


def _namespace(grafana: GrafanaClient) -> str:
    """Return the namespace of our organisation: default, org-N, or stacks-N on Grafana Cloud."""
    namespace = grafana.ask("GET", "/api/frontend/settings").data.get("namespace")
    if isinstance(namespace, str) and namespace:
        return namespace
    number = grafana.ask("GET", "/api/org").data.get("id", 1)
    return "default" if number == 1 else f"org-{number}"
