"""FakeGrafana: a fake, because no Grafana can be had where these tests run. It does what Grafana's pages and source say
of 10.4, 12 and 13.

What it takes from there, and the tests lean on:
- older API: a save without folderUid lands at the root; another version than the stored one, or a uid that is taken, is
  a 412 unless
  overwrite; a provisioned board is a 400; reading adds id and version (pkg/api/dashboard.go,
  pkg/services/dashboards/errors.go).
- newer API: a save that does not bring back resourceVersion and generation is a conflict; uid, id and version leave the
  spec; the spec is
  brought to schemaVersion 42, loses nulls and empty defaults, gains others, and its panels are sorted
  (pkg/registry/apis/dashboard/mutate.go, apps/dashboard/pkg/migration/frontend_defaults.go).
- annotations are found by tags, all of which they must have, within from and to where both are given, the newest
  hundred without a limit; a point
  ends when it begins; what a PATCH does not name stays; tags of more than 500 bytes are a 400
  (pkg/api/annotations.go, pkg/services/annotations/annotationsimpl/xorm_store.go).
- a provisioned board of the newer API is annotated grafana.app/managedBy.
It knows no permission but two tokens, and no panel: that a board looks right is not what it can show."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

EDITOR = "glsa_editor0123"
VIEWER = "glsa_viewer0123"
LOGIN = "admin:correct horse"
VERSIONS: dict[str, tuple[str, ...]] = {
    "10.4.0": (),
    "11.6.0": ("v0alpha1",),
    "12.4.1": ("v1beta1", "v0alpha1", "v2alpha1", "v2beta1"),
    "13.2.0": ("v2", "v1", "v1beta1", "v0alpha1"),
}


@dataclass
class Stored:
    spec: dict[str, Any]
    folder: str = ""
    version: int = 1
    provisioned: str = ""
    notes: dict[str, str] = field(default_factory=dict)


class FakeGrafana:
    """Serves on loopback from a thread of its own. writes: every request that changed something or tried to, as
    (method, path)."""

    def __init__(
        self,
        version: str = "10.4.0",
        namespace: str = "default",
        scraped_every_s: int = 15,
        time_interval: str | None = "15s",
    ) -> None:
        self.version, self.offered, self.namespace = version, VERSIONS[version], namespace
        self.organisation = 1
        self.tells_namespace = True
        self.boards: dict[str, Stored] = {}
        self.folders: dict[str, str] = {}
        self.annotations: dict[int, dict[str, Any]] = {}
        self.numbered = 0
        self.sources: list[dict[str, Any]] = [source("prom", "Prometheus", time_interval, default=True)]
        self.scraped_every_s = scraped_every_s
        self.alerts: list[str] = []
        self.has_engine = self.has_sidecar = self.proxied = True
        self.prometheus = ""  # a real one to pass questions on to
        self.hidden: set[str] = set()  # boards that this account may not read
        self.writes: list[tuple[str, str]] = []
        self.bodies: list[Any] = []
        self.seen: list[str] = []
        self.before_write = lambda: None
        self.url = ""

    def __enter__(self) -> FakeGrafana:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(middlewares=[self._gate], client_max_size=32 << 20)
        app.router.add_get("/api/health", self._health)
        app.router.add_get("/api/frontend/settings", self._settings)
        app.router.add_get("/api/org", self._org)
        app.router.add_get("/api/datasources", self._datasources)
        app.router.add_get("/api/datasources/proxy/uid/{uid}/api/v1/{what:.*}", self._prometheus)
        app.router.add_get("/api/folders", self._list_folders)
        app.router.add_get("/api/folders/{uid}", self._folder)
        app.router.add_post("/api/folders", self._make_folder)
        app.router.add_get("/api/dashboards/uid/{uid}", self._older_read)
        app.router.add_post("/api/dashboards/db", self._older_write)
        app.router.add_get("/apis/dashboard.grafana.app", self._group)
        app.router.add_get("/api/annotations", self._list_annotations)
        app.router.add_post("/api/annotations", self._make_annotation)
        app.router.add_patch("/api/annotations/{id}", self._change_annotation)
        app.router.add_delete("/api/annotations/{id}", self._drop_annotation)
        newer = "/apis/dashboard.grafana.app/{api}/namespaces/{ns}/dashboards"
        app.router.add_post(newer, self._newer_write)
        app.router.add_get(newer + "/{uid}", self._newer_read)
        app.router.add_put(newer + "/{uid}", self._newer_write)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.path}")
        who = request.headers.get("Authorization", "")
        known = who in (f"Bearer {EDITOR}", f"Bearer {VIEWER}", f"Basic {base64.b64encode(LOGIN.encode()).decode()}")
        if request.path not in ("/api/health", "/api/frontend/settings") and not known:
            return says(401, "Invalid API key" if who else "Unauthorized")
        if request.method != "GET":
            self.writes.append((request.method, request.path))
            self.bodies.append(await request.json() if request.can_read_body else None)
            if who == f"Bearer {VIEWER}":
                return says(403, "You'll need additional permissions to perform this action.")
            self.before_write()
        elif who == f"Bearer {VIEWER}" and request.path == "/api/datasources":
            return says(
                403, "You'll need additional permissions to perform this action. Permissions needed: datasources:read"
            )
        if request.method == "GET" and request.path.rsplit("/", 1)[-1] in self.hidden:
            return says(
                403, "You'll need additional permissions to perform this action. Permissions needed: dashboards:read"
            )
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"commit": "fake", "database": "ok", "version": self.version})

    async def _settings(self, _: web.Request) -> web.Response:
        found = {one["name"]: {key: one[key] for key in ("uid", "type", "jsonData")} for one in self.sources}
        default = next((one["name"] for one in self.sources if one["isDefault"]), "")
        namespace = {"namespace": self.namespace} if self.tells_namespace else {}
        return web.json_response({**namespace, "datasources": found, "defaultDatasource": default})

    async def _datasources(self, _: web.Request) -> web.Response:
        return web.json_response(self.sources)

    async def _prometheus(self, request: web.Request) -> web.Response:
        if not self.proxied:
            return says(
                403, "You'll need additional permissions to perform this action. Permissions needed: datasources:query"
            )
        if self.prometheus:
            url = f"{self.prometheus}/api/v1/{request.match_info['what']}"
            async with aiohttp.ClientSession() as session, session.get(url, params=request.query) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
        if request.match_info["what"] == "rules":
            rules = [{"type": "alerting", "name": name} for name in self.alerts]
            return web.json_response({"status": "success", "data": {"groups": [{"name": "g", "rules": rules}]}})
        query = request.query["query"]
        result: list[Any] = []
        if "sidecar" in query:
            result = [{"metric": {}, "value": [0, "1"]}] if self.has_sidecar else []
        elif query.endswith("[10m]") and self.has_engine:
            samples = [[1_700_000_000.123 + at, "0"] for at in range(0, 600, self.scraped_every_s)]
            result = [{"metric": {"instance": f"{n}"}, "values": samples} for n in range(2)]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    async def _org(self, _: web.Request) -> web.Response:
        return web.json_response({"id": self.organisation, "name": "Main Org."})

    async def _list_folders(self, _: web.Request) -> web.Response:
        return web.json_response([{"uid": uid, "title": title} for uid, title in self.folders.items()])

    async def _folder(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        return (
            web.json_response({"uid": uid, "title": self.folders[uid]})
            if uid in self.folders
            else says(404, "folder not found")
        )

    async def _make_folder(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["uid"] in self.folders:
            return says(412, "a folder/dashboard with the same uid already exists")
        self.folders[body["uid"]] = body["title"]
        return web.json_response(body)

    # annotations

    async def _list_annotations(self, request: web.Request) -> web.Response:
        tags, limit = set(request.query.getall("tags", [])), int(request.query.get("limit", 100))
        start, end = int(request.query.get("from", 0)), int(request.query.get("to", 0))
        found = [
            {"id": number, "dashboardId": 0, **one}
            for number, one in self.annotations.items()
            if tags <= set(one["tags"])
        ]
        if start and end:
            found = [one for one in found if one["time"] <= end and one["timeEnd"] >= start]
        return web.json_response(sorted(found, key=lambda one: (-one["timeEnd"], -one["time"]))[:limit])

    async def _make_annotation(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body.get("text"):
            return says(400, "Failed to save annotation")
        if 1 + sum(len(tag.encode()) + 3 for tag in body["tags"]) > 500:
            return says(400, "tags length exceeds the maximum allowed")
        self.numbered += 1
        self.annotations[self.numbered] = {**body, "timeEnd": body.get("timeEnd") or body["time"]}
        return web.json_response({"message": "Annotation added", "id": self.numbered})

    async def _change_annotation(self, request: web.Request) -> web.Response:
        number = int(request.match_info["id"])
        if number not in self.annotations:
            return says(500, "Could not find annotation to update")
        self.annotations[number] |= await request.json()
        return web.json_response({"message": "Annotation patched"})

    async def _drop_annotation(self, request: web.Request) -> web.Response:
        self.annotations.pop(int(request.match_info["id"]), None)
        return web.json_response({"message": "Annotation deleted"})

    # the older API

    async def _older_read(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        found = self.boards.get(uid)
        if found is None:
            return says(404, "Dashboard not found")
        meta = {"folderUid": found.folder, "version": found.version, "provisioned": bool(found.provisioned)}
        meta["provisionedExternalId"] = found.provisioned
        return web.json_response(
            {"meta": meta, "dashboard": {**found.spec, "uid": uid, "id": 7, "version": found.version}}
        )

    async def _older_write(self, request: web.Request) -> web.Response:
        body = await request.json()
        board, folder = body["dashboard"], body.get("folderUid", "")
        found = self.boards.get(board["uid"])
        if folder and folder not in self.folders:
            return says(400, "folder not found")
        if found and found.provisioned:
            return says(400, "Cannot save provisioned dashboard")
        if found and not body["overwrite"] and board.get("version") != found.version:
            return says(412, "The dashboard has been changed by someone else", status="version-mismatch")
        same = [
            u
            for u, other in self.boards.items()
            if u != board["uid"] and other.folder == folder and other.spec["title"] == board["title"]
        ]
        if same and not body["overwrite"]:
            return says(412, "A dashboard with the same name in the folder already exists", status="name-exists")
        spec = {key: value for key, value in board.items() if key not in ("id", "uid", "version")}
        self.boards[board["uid"]] = Stored(
            spec, folder, (found.version if found else 0) + 1, "", {"grafana.app/message": body["message"]}
        )
        return web.json_response(
            {"uid": board["uid"], "status": "success", "url": f"/d/{board['uid']}/x", "version": 1}
        )

    # the newer API

    async def _group(self, _: web.Request) -> web.Response:
        if not self.offered:
            raise web.HTTPNotFound(text="404 page not found")
        versions = [{"groupVersion": f"dashboard.grafana.app/{name}", "version": name} for name in self.offered]
        return web.json_response(
            {"kind": "APIGroup", "name": "dashboard.grafana.app", "versions": versions, "preferredVersion": versions[0]}
        )

    async def _newer_read(self, request: web.Request) -> web.Response:
        self._check(request)
        uid = request.match_info["uid"]
        found = self.boards.get(uid)
        return (
            web.json_response(self._resource(uid, found))
            if found
            else status(404, f'dashboards.dashboard.grafana.app "{uid}" not found')
        )

    async def _newer_write(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await request.json()
        metadata, notes = body["metadata"], body["metadata"].get("annotations", {})
        uid, folder = metadata["name"], notes.get("grafana.app/folder", "")
        found = self.boards.get(uid)
        if request.method == "POST" and found:
            return status(409, f'dashboards.dashboard.grafana.app "{uid}" already exists')
        if request.method == "PUT" and not found:
            return status(404, "not found")
        if found and (
            metadata.get("resourceVersion") != str(1000 + found.version) or metadata.get("generation") != found.version
        ):
            return status(
                409, "the object has been modified; please apply your changes to the latest version and try again"
            )
        if found and found.provisioned:
            return status(403, "managed by classic-file-provisioning")
        if folder and folder not in self.folders:
            return status(404, f'folders.folder.grafana.app "{folder}" not found')
        notes = {key: value for key, value in notes.items() if key != "grafana.app/folder"}
        self.boards[uid] = Stored(migrated(body["spec"]), folder, (found.version if found else 0) + 1, "", notes)
        return web.json_response(self._resource(uid, self.boards[uid]), status=200 if found else 201)

    def _check(self, request: web.Request) -> None:
        if request.match_info["api"] not in self.offered or request.match_info["ns"] != self.namespace:
            raise web.HTTPForbidden(
                text=json.dumps({"kind": "Status", "message": "unknown version or namespace"}),
                content_type="application/json",
            )

    def _resource(self, uid: str, found: Stored) -> dict[str, Any]:
        notes = {**found.notes, "grafana.app/createdBy": "service-account:x"} | (
            {"grafana.app/folder": found.folder} if found.folder else {}
        )
        if found.provisioned:
            notes |= {"grafana.app/managedBy": "classic-file-provisioning", "grafana.app/sourcePath": found.provisioned}
        metadata = {
            "name": uid,
            "namespace": self.namespace,
            "uid": "opaque",
            "resourceVersion": str(1000 + found.version),
        }
        metadata |= {"generation": found.version, "annotations": notes, "managedFields": [{"manager": "fake"}]}
        return {"kind": "Dashboard", "metadata": metadata, "spec": copy.deepcopy(found.spec), "status": {}}


def source(
    uid: str, name: str, interval: str | None, default: bool = False, kind: str = "prometheus"
) -> dict[str, Any]:
    """A data source as Grafana lists it."""
    return {
        "uid": uid,
        "name": name,
        "type": kind,
        "isDefault": default,
        "jsonData": {"timeInterval": interval} if interval else {},
    }


def says(code: int, message: str, **more: str) -> web.Response:
    return web.json_response({"message": message, **more}, status=code)


def status(code: int, message: str) -> web.Response:
    """An error of the newer API."""
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


def migrated(spec: dict[str, Any]) -> dict[str, Any]:
    """What a spec has become when it is read again."""
    clean: dict[str, Any] = _without_nothing(spec)
    clean["panels"] = sorted(clean["panels"], key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    for key in ("id", "uid", "version"):
        clean.pop(key, None)
    clean.setdefault("timepicker", {}).pop("time_options", None)  # schemaVersion 41
    return {**clean, "schemaVersion": 42, "preload": False}


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_nothing(inner)
            for key, inner in value.items()
            if inner is not None and inner != [] and inner is not False
        }
    return [_without_nothing(inner) for inner in value] if isinstance(value, list) else value
