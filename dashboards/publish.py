"""Boards into a Grafana that is there already: as files, or through its API.

Deciding is pure (`plan`, `differences`, `interval_s`); `Client` is the one thing that talks. Nothing is written that is
equal, that a file provisions, or that is not ours; a board never leaves its folder; no write is ever tried twice.

The older API (/api/dashboards/db) is served from 10.4 to 13, the newer (/apis/dashboard.grafana.app) from 12. The newer
one brings classic JSON to its own schemaVersion as it stores it and drops nulls and defaults on the way: `differences`
reads both sides without them.
Sources: Grafana's HTTP API pages of 10.4 to 13.2, pkg/api/dashboard.go, pkg/registry/apis/dashboard,
apps/dashboard/pkg/migration."""

from __future__ import annotations

import base64
import hashlib
import html
import http.client
import json
import os
import re
import ssl
import statistics
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

from alerts.registry import ALERTS
from dashboards.grafana_json import TAG
from exporters.catalogue import promql, sidecar, vllm
from exporters.events.log import TuningEvent
from exporters.text import parse_duration

FOLDER_UID = "vllm-watch"
FOLDER = "vLLM"
TOKEN_VARIABLE = "GRAFANA_TOKEN"  # noqa: S105 the name of the variable
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 32 << 20
GROUP = "/apis/dashboard.grafana.app"
NEWER = ("v1", "v1beta1")  # Grafana 13, Grafana 12; alpha versions may change from one day to the next
ASSUMED_INTERVAL_S = 15.0  # what Grafana takes a data source without timeInterval to scrape at
_MARK = "# Printed by vllm-watch dashboards export"
_WHERE_TOKENS = "Administration > Users and access > Service accounts"


class GrafanaTrouble(ValueError):
    """Grafana cannot be used as it was asked to; the message says where, and the way out."""


# ---- files


def provider(path: str) -> str:
    """Grafana's provider file for boards that it finds below `path`, as Grafana sees it."""
    return f"""{_MARK} --for provisioning. Belongs into Grafana's provisioning/dashboards/.
apiVersion: 1
providers:
  - name: vllm-watch
    type: file
    folder: {FOLDER}
    folderUid: {FOLDER_UID}
    disableDeletion: true
    allowUiUpdates: false
    updateIntervalSeconds: 30
    options:
      path: {json.dumps(path)}
      foldersFromFilesStructure: false
"""


def foreign(path: Path) -> str:
    """Why an exported file is not ours; empty when it is."""
    try:
        text = path.read_text(encoding="utf-8")
        ours = text.startswith(_MARK) if path.suffix == ".yaml" else _tagged(json.loads(text))
    except (ValueError, OSError):
        ours = False
    return "" if ours else "did not come from here"


def _tagged(board: Any) -> bool:
    return isinstance(board, dict) and isinstance(board.get("tags"), list) and TAG in board["tags"]


# ---- deciding


@dataclass(frozen=True, slots=True)
class Existing:
    """A board as Grafana holds it. folder is '' at the root; managed says who alone may change it, '' for nobody."""

    board: Mapping[str, Any]
    folder: str = ""
    managed: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of the newer API: what it wants back


@dataclass(frozen=True, slots=True)
class Difference:
    """One field: of the panel called `where`, or of the board where that is ''. None is absent."""

    where: str
    path: str
    was: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update would do: titles of panels, and fields."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[Difference, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True, slots=True)
class Create:
    pass


@dataclass(frozen=True, slots=True)
class Update:
    changes: Changes


@dataclass(frozen=True, slots=True)
class Skip:
    pass


@dataclass(frozen=True, slots=True)
class Refuse:
    why: str


Plan = Create | Update | Skip | Refuse


def plan(existing: Existing | None, wanted: Mapping[str, Any], force: bool = False) -> Plan:
    """What to do about one board. Force overwrites what is not ours, never what a file provisions: Grafana would not
    let us."""
    if existing is None:
        return Create()
    changes = differences(existing.board, wanted)
    if not changes:
        return Skip()
    if existing.managed:
        return Refuse(f"{existing.managed}, so no API can save it: change it there, or remove it there and push again")
    if not _tagged(existing.board) and not force:
        title = existing.board.get("title", "")
        return Refuse(
            f"{wanted['uid']} is a board called {title!r} without the tag {TAG}: it is not ours. Overwrite it with"
            " --force"
        )
    return Update(changes)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Field by field, panels by their id. Absent, null, false and empty are the same: Grafana drops and adds those as
    it likes."""
    before, after = _by_id(was), _by_id(now)
    changed = list(_walk("", "", _of_board(was), _of_board(now)))
    for key in sorted(before.keys() & after.keys(), key=list(after).index):
        changed += _walk(after[key].get("title", str(key)), "", before[key], after[key])
    return Changes(
        added=tuple(panel.get("title", str(key)) for key, panel in after.items() if key not in before),
        removed=tuple(panel.get("title", str(key)) for key, panel in before.items() if key not in after),
        changed=tuple(changed),
    )


# What Grafana counts, and what it raises by itself.
_SERVERS_OWN = frozenset({"id", "uid", "version", "schemaVersion", "iteration", "panels"})


def _of_board(board: Mapping[str, Any]) -> Any:
    own = {key: value for key, value in board.items() if key not in _SERVERS_OWN}
    if isinstance(own.get("timepicker"), Mapping):
        # dropped by schemaVersion 41
        own["timepicker"] = {key: value for key, value in own["timepicker"].items() if key != "time_options"}
    return _bare(own)


def _by_id(board: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """Panels by id, also those inside a collapsed row, which then say in which."""
    found: dict[Any, dict[str, Any]] = {}
    for panel in board.get("panels") or ():
        found[panel.get("id")] = _bare({key: value for key, value in panel.items() if key != "panels"})
        for inner in panel.get("panels") or ():
            found[inner.get("id")] = _bare({**inner, "in row": panel.get("title")})
    return found


def _bare(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: inner for key, inner in ((k, _bare(v)) for k, v in value.items()) if not _is_nothing(inner)}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _walk(where: str, path: str, was: Any, now: Any) -> Iterator[Difference]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from _walk(where, f"{path}.{key}" if path else key, was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (left, right) in enumerate(zip(was, now, strict=True)):
            yield from _walk(where, f"{path}[{index}]", left, right)
    elif was != now:
        yield Difference(where, path, was, now)


def with_datasource(board: Mapping[str, Any], name: str, uid: str) -> dict[str, Any]:
    """The board, opening with this data source chosen."""
    copy: dict[str, Any] = json.loads(json.dumps(board))
    for variable in copy["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["current"] = {"text": name, "value": uid, "selected": True}
    return copy


def interval_s(series: Iterable[Mapping[str, Any]]) -> float | None:
    """The scrape interval in seconds that samples of a range vector show: the median distance; None below two samples a
    series."""
    steps = []
    for one in series:
        times = [float(at) for at, _ in one.get("values", ())]
        steps += [later - earlier for earlier, later in pairwise(times)]
    return statistics.median(steps) if steps else None


def duration_s(text: str) -> float | None:
    """Seconds of a data source's interval, which may be written as a floor: >30s. None for what is no duration, such as
    a variable."""
    try:
        return parse_duration(text.strip().removeprefix(">"))
    except ValueError:
        return None


# ---- talking


def address(url: str) -> str:
    """Where Grafana is, without a slash at the end. Raises GrafanaTrouble for what is no address, or holds a
    password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise GrafanaTrouble(f"{url.rpartition('@')[2]!r} is no address; write it like http://127.0.0.1:3000")
    if "@" in parts.netloc:
        raise GrafanaTrouble(
            "a password in the address can be read by everyone on this machine; put user:password into a file for"
            " --user-file"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def authorization(
    token_file: Path | None, user_file: Path | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The header's value, from the file that was named, else from the environment. Raises GrafanaTrouble without
    showing what it read."""
    if token_file and user_file:
        raise GrafanaTrouble("name either --token-file or --user-file")
    if user_file:
        pair = user_file.read_text(encoding="utf-8").strip("\r\n")
        if ":" not in pair or "\n" in pair:
            raise GrafanaTrouble(f"{user_file} holds no line user:password")
        return "Basic " + base64.b64encode(pair.encode()).decode()
    token = token_file.read_text(encoding="utf-8").strip() if token_file else environ.get(TOKEN_VARIABLE, "").strip()
    if token_file and not token:
        raise GrafanaTrouble(f"{token_file} is empty; a token comes from {_WHERE_TOKENS}")
    if not re.fullmatch(r"[!-~]*", token):
        raise GrafanaTrouble(f"{token_file or TOKEN_VARIABLE} holds more than one word; it must hold the token alone")
    return f"Bearer {token}" if token else None


@dataclass(frozen=True, slots=True)
class GrafanaAnswer:
    """body is None where the answer was no JSON."""

    status: int
    body: Any

    @property
    def says(self) -> str:
        """Grafana's own words, if it had any."""
        told = self.body.get("message") if isinstance(self.body, dict) else None
        return str(told)[:300] if told else ""

    @property
    def data(self) -> dict[str, Any]:
        return self.body if isinstance(self.body, dict) else {}


class _Stay(urllib.request.HTTPRedirectHandler):
    """Redirects are told, not followed: a write would arrive as a read, and the token at another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class GrafanaClient:
    """One Grafana. Raises GrafanaTrouble whenever what answers is not a Grafana that accepts us."""

    def __init__(self, url: str, authorization: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = address(url)
        self._headers = {"Accept": "application/json"} | ({"Authorization": authorization} if authorization else {})
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_Stay)

    def ask(self, method: str, path: str, body: Any = None, **query: str) -> GrafanaAnswer:
        """One request, and what came back as long as Grafana itself said it: also 403, 404, 409, 412."""
        url = self.url + path + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 address() lets http and https pass
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                status, raw, location = response.status, response.read(MAX_ANSWER_BYTES), ""
        except urllib.error.HTTPError as error:
            with error:
                status, raw, location = error.code, error.read(MAX_ANSWER_BYTES), error.headers.get("Location") or ""
        except urllib.error.URLError as error:
            raise GrafanaTrouble(self._unreached(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise GrafanaTrouble(self._unreached(error)) from error
        return self._answer(method, path, status, raw, location)

    def _answer(self, method: str, path: str, status: int, raw: bytes, location: str) -> GrafanaAnswer:
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if 300 <= status < 400:
            raise GrafanaTrouble(self._redirected(path, location))
        if status == 401:
            raise GrafanaTrouble(self._not_known())
        if status == 400 and b"HTTPS server" in raw:
            raise GrafanaTrouble(f"{self.url} speaks TLS: write https://")
        if status >= 500 and body is None:
            raise GrafanaTrouble(
                f"{self.url} answers {status} to {method} {path}: Grafana, or the proxy before it, is not in order; try"
                " again later"
            )
        return GrafanaAnswer(status, body)

    def _not_known(self) -> str:
        if "Authorization" in self._headers:
            return (
                f"{self.url} does not accept this token or password: it may have expired; make a new one under"
                f" {_WHERE_TOKENS}"
            )
        return (
            f"{self.url} wants to know who asks: set {TOKEN_VARIABLE}, or name a --token-file; a token comes from"
            f" {_WHERE_TOKENS}"
        )

    def _redirected(self, path: str, location: str) -> str:
        to = urlsplit(location)
        if to.path.rstrip("/").endswith("/login"):
            return self._not_known()
        if to.netloc and to.path.endswith(path):
            return (
                f"{self.url} sends us elsewhere; name that address: --grafana"
                f" {to.scheme}://{to.netloc}{to.path.removesuffix(path)}"
            )
        seen = f"{to.scheme}://{to.netloc}{to.path}" if to.netloc else to.path
        return (
            f"{self.url} sends {path} to {seen}: name the address at which Grafana itself answers, with its path if it"
            " has one"
        )

    def _unreached(self, why: object) -> str:
        if isinstance(why, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.url} cannot be trusted: {why.verify_message}; "
                "for an authority of your own set SSL_CERT_FILE to its certificate"
            )
        if isinstance(why, ssl.SSLError):
            return (
                f"{self.url} does not speak TLS ({why.reason or 'no handshake'}); if it serves plain HTTP write http://"
            )
        if isinstance(why, TimeoutError):
            return f"{self.url} did not answer within {self._timeout_s:g} s; is it up, and may this machine reach it?"
        told = why.strerror if isinstance(why, OSError) and why.strerror else why
        return f"{self.url} cannot be reached: {told}; is the address right, and is Grafana up?"


def refused(answer: GrafanaAnswer, doing: str, permission: str) -> GrafanaTrouble:
    """Why Grafana did not do something, with the way out where there is one."""
    said = f" ({answer.says})" if answer.says else ""
    if answer.status == 403:
        return GrafanaTrouble(
            f"not allowed {doing}{said}: give the service account the permission {permission}; the role Editor has it"
        )
    if answer.body is None:
        return GrafanaTrouble(
            f"Grafana answered {answer.status} without JSON when asked {doing}: most likely a proxy before it"
        )
    return GrafanaTrouble(f"Grafana answered {answer.status} when asked {doing}{said}")


# ---- the two APIs


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
        """Naming the version that we saw, and never with `overwrite`: whoever saved in between is not undone, and up to
        11.2 that flag could also replace another board of the same title."""
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
    """Of our organisation: default, org-N, or stacks-N on Grafana Cloud."""
    told = grafana.ask("GET", "/api/frontend/settings").data.get("namespace")
    if isinstance(told, str) and told:
        return told
    number = grafana.ask("GET", "/api/org").data.get("id", 1)
    return "default" if number == 1 else f"org-{number}"


# ---- folder and data source


@dataclass(frozen=True, slots=True)
class Folder:
    uid: str
    title: str
    exists: bool


def find_folder(grafana: GrafanaClient, named: str) -> Folder:
    """The folder with this title or uid, or the one to make: the uid of ours is fixed, so that renaming it in Grafana
    does no harm.

    Other titles give a uid of their own, by a hash, because no two of them may ever meet in one folder."""
    uid = FOLDER_UID if named == FOLDER else f"{FOLDER_UID}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
    for candidate in dict.fromkeys((uid, *([named] if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", named) else ()))):
        answer = grafana.ask("GET", f"/api/folders/{candidate}")
        if answer.status == 200 and answer.data.get("uid"):
            return Folder(candidate, str(answer.data.get("title", named)), True)
        if answer.status not in (403, 404) or answer.body is None:
            raise refused(answer, f"to look for the folder {named}", "folders:read")
    listed = grafana.ask("GET", "/api/folders", limit="1000").body
    for one in listed if isinstance(listed, list) else ():
        if one.get("title") == named:
            return Folder(str(one["uid"]), named, True)
    return Folder(uid, named, False)


def make_folder(grafana: GrafanaClient, folder: Folder) -> None:
    answer = grafana.ask("POST", "/api/folders", {"uid": folder.uid, "title": folder.title})
    if answer.status in (409, 412):
        raise GrafanaTrouble(
            f"a folder {folder.title} ({folder.uid}) is there but not ours to see ({answer.says}): "
            "give the service account folders:read on it, or name another --folder"
        )
    if answer.status not in (200, 201):
        raise refused(answer, f"to make the folder {folder.title}", "folders:create")


@dataclass(frozen=True, slots=True)
class DataSource:
    """interval_s: what Grafana believes this Prometheus scrapes at; None where its setting cannot be read as a
    duration."""

    uid: str
    name: str
    interval_s: float | None
    default: bool = False


def data_sources(grafana: GrafanaClient) -> list[DataSource]:
    """Those of type Prometheus. An Editor may not list them, but the settings that every page loads name them too."""
    answer = grafana.ask("GET", "/api/datasources")
    found = answer.body if isinstance(answer.body, list) else None
    if found is None:
        settings = grafana.ask("GET", "/api/frontend/settings").data
        default = settings.get("defaultDatasource")
        found = [
            {"name": name, **one, "isDefault": name == default}
            for name, one in (settings.get("datasources") or {}).items()
        ]
    return [
        DataSource(
            str(one["uid"]),
            str(one.get("name", one["uid"])),
            _believed(one.get("jsonData") or {}),
            bool(one.get("isDefault")),
        )
        for one in found
        if isinstance(one, dict) and one.get("type") == "prometheus" and one.get("uid")
    ]


def _believed(settings: Mapping[str, Any]) -> float | None:
    told = str(settings.get("timeInterval") or "")
    return duration_s(told) if told else ASSUMED_INTERVAL_S


def choose(sources: Sequence[DataSource], named: str | None) -> DataSource | None:
    """The one with this uid or name; without a name the default, else the first. Raises GrafanaTrouble for a name that
    nobody has."""
    if named is None:
        return next((one for one in sources if one.default), sources[0] if sources else None)
    for one in sources:
        if named in (one.uid, one.name):
            return one
    there = ", ".join(one.name for one in sources) or "none that we may see"
    raise GrafanaTrouble(f"no Prometheus data source is called {named}; there are: {there}")


class _NotChecked(Exception):
    """Why a question about a data source has no answer."""


def look(grafana: GrafanaClient, source: DataSource | None, engine_only: bool = False) -> list[str]:
    """What would leave the boards empty although they were pushed, as sentences. Never raises for what it cannot find
    out."""
    if source is None:
        return [
            (
                "no Prometheus data source here, or none that we may see: the boards stay empty until one is added"
                " under Connections > Data sources"
            )
        ]
    questions = {
        "whether vLLM's series are there and timeInterval fits": _engines,
        "whether our rules are loaded": _rules,
    }
    if not engine_only:
        questions["whether the sidecar's series are there"] = _sidecar
    warnings: list[str] = []
    for whether, question in questions.items():
        try:
            warnings += filter(None, [question(grafana, source)])
        except _NotChecked as why:
            warnings.append(f"could not check {whether}: {why}")
    return warnings


def _engines(grafana: GrafanaClient, source: DataSource) -> str | None:
    series = (
        _prometheus(grafana, source, "query", query=f"{promql.series(vllm.NUM_REQUESTS_RUNNING)}[10m]").get("result")
        or []
    )
    if not series:
        return (
            f"{source.name} has no series of vLLM in the last ten minutes: the boards stay empty until it scrapes an"
            " engine's /metrics"
        )
    real_s = interval_s(series)
    if real_s is None or source.interval_s is None:
        raise _NotChecked("too few samples yet" if real_s is None else "its timeInterval is no duration")
    if abs(real_s - source.interval_s) <= 0.1 * real_s:
        return None
    harm = "panels are coarser than they could be, as $__rate_interval is longer than it must be"
    if source.interval_s < real_s:
        harm = "panels with rates can stay empty, as $__rate_interval need not hold two samples"
    real, believed = f"{real_s:.0f}s" if real_s >= 1 else f"{real_s:g}s", f"{source.interval_s:g}s"
    return (
        f"{source.name} takes vLLM to be scraped every {believed}, but it is every {real}: {harm}; set its timeInterval"
        f" to {real}"
    )


def _rules(grafana: GrafanaClient, source: DataSource) -> str | None:
    groups = _prometheus(grafana, source, "rules", type="alert").get("groups") or []
    loaded = {rule.get("name") for group in groups for rule in group.get("rules") or ()}
    missing = [alert.name for alert in ALERTS if alert.name not in loaded]
    if not missing:
        return None
    which = (
        f"none of our {len(ALERTS)} alerts"
        if len(missing) == len(ALERTS)
        else f"not all of our alerts (missing: {', '.join(missing)})"
    )
    return (
        f"{source.name} has {which}: name the files of alerts/prometheus in rule_files of prometheus.yml and reload it"
    )


def _sidecar(grafana: GrafanaClient, source: DataSource) -> str | None:
    if _prometheus(grafana, source, "query", query=f"count({promql.series(sidecar.SIDECAR_INFO)})").get("result"):
        return None
    return (
        f"{source.name} has no series of the sidecar: panels on requests, teams and GPUs stay empty; "
        "run vllm-watch sidecar and scrape it, or push what the engine alone can fill with --profile engine"
    )


def _prometheus(grafana: GrafanaClient, source: DataSource, endpoint: str, **query: str) -> dict[str, Any]:
    """data of an answer of Prometheus, asked through Grafana. Raises _NotChecked."""
    try:
        answer = grafana.ask(
            "GET", f"/api/datasources/proxy/uid/{quote(source.uid, safe='')}/api/v1/{endpoint}", **query
        )
    except GrafanaTrouble as error:
        raise _NotChecked(str(error)) from error
    data = answer.data.get("data")
    if answer.status == 403:
        raise _NotChecked("the service account lacks the permission datasources:query")
    if answer.status != 200 or answer.data.get("status") != "success" or not isinstance(data, dict):
        said = answer.data.get("error") or answer.says
        raise _NotChecked(f"{source.name} answers {answer.status} to {endpoint}{f' ({said})' if said else ''}")
    return data


# ---- push


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """One board. action: created, updated, unchanged, refused or failed. why: for the last two. elsewhere: the folder
    it stays in, if not ours."""

    uid: str
    title: str
    url: str
    action: str
    why: str = ""
    changes: Changes = Changes()
    elsewhere: str | None = None


@dataclass(frozen=True, slots=True)
class PushReport:
    """dry: nothing was written, and the actions are what would have been."""

    grafana: str
    version: str
    api: str
    folder: Folder
    data_source: str
    boards: tuple[PushOutcome, ...]
    warnings: tuple[str, ...]
    dry: bool

    @property
    def fails(self) -> bool:
        return any(outcome.action in ("refused", "failed") for outcome in self.boards)


def push(
    grafana: GrafanaClient,
    boards: Sequence[Mapping[str, Any]],
    *,
    folder: str = FOLDER,
    data_source: str | None = None,
    message: str = "vllm-watch",
    dry_run: bool = False,
    force: bool = False,
    engine_only: bool = False,
    api: str = "auto",
) -> PushReport:
    """Bring these boards into Grafana. Everything is read and decided before the first write; one board that fails
    stops no other.

    Raises GrafanaTrouble where nothing could be done at all."""
    server = detect(grafana, api)
    place = find_folder(grafana, folder)
    source = choose(data_sources(grafana), data_source)
    wanted = [with_datasource(board, source.name, source.uid) if source and data_source else board for board in boards]
    existing, unread = _read(server.api, [board["uid"] for board in wanted])
    plans = {uid: unread.get(uid) or plan(existing.get(uid), board, force) for board in wanted if (uid := board["uid"])}
    warnings = look(grafana, source, engine_only)
    if not dry_run and not place.exists and any(isinstance(one, Create) for one in plans.values()):
        make_folder(grafana, place)
    outcomes = []
    for board in wanted:
        seen, decided = existing.get(board["uid"]), plans[board["uid"]]
        outcome = _outcome(grafana.url, board, decided, seen, place)
        if not dry_run and isinstance(decided, Create | Update):
            try:
                server.api.write(board, seen, place.uid if seen is None else seen.folder, message)
            except GrafanaTrouble as error:
                outcome = replace(outcome, action="failed", why=str(error))
        outcomes.append(outcome)
    name = source.name if source else ""
    return PushReport(
        grafana.url, server.version, server.api.name, place, name, tuple(outcomes), tuple(warnings), dry_run
    )


def _read(api: GrafanaApi, uids: Sequence[str]) -> tuple[dict[str, Existing | None], dict[str, Refuse]]:
    """What is there, and the boards that may not be read. Raises GrafanaTrouble when not one of them can be."""
    existing: dict[str, Existing | None] = {}
    unread: dict[str, GrafanaTrouble] = {}
    for uid in uids:
        try:
            existing[uid] = api.read(uid)
        except GrafanaTrouble as error:
            unread[uid] = error
    if unread and not existing:
        raise next(iter(unread.values()))
    return existing, {uid: Refuse(str(error)) for uid, error in unread.items()}


def _outcome(
    url: str, board: Mapping[str, Any], decided: Plan, existing: Existing | None, place: Folder
) -> PushOutcome:
    elsewhere = (existing.folder or "the root") if existing and existing.folder != place.uid else None
    about = {"uid": board["uid"], "title": board["title"], "url": f"{url}/d/{board['uid']}", "elsewhere": elsewhere}
    match decided:
        case Create():
            return PushOutcome(action="created", **about)
        case Update(changes):
            return PushOutcome(action="updated", changes=changes, **about)
        case Skip():
            return PushOutcome(action="unchanged", **about)
        case Refuse(why):
            return PushOutcome(action="refused", why=why, **about)


def told(report: PushReport) -> Iterator[str]:
    """A report as lines for a person: boards, what changed in each, warnings last."""
    would = "would be " if report.dry else ""
    yield f"Grafana {report.version or '(hides its version)'} at {report.grafana}, through {report.api}"
    if not report.folder.exists and any(outcome.action == "created" for outcome in report.boards):
        yield f"folder    {report.folder.title} {would}created"
    for outcome in report.boards:
        kept = f" (stays in folder {outcome.elsewhere})" if outcome.elsewhere else ""
        action = f"{would}{outcome.action}" if outcome.action in ("created", "updated") else outcome.action
        yield f"{action:9} {outcome.title}{kept}: {outcome.why or outcome.url}"
        if report.dry:
            yield from _shown(outcome.changes)
    for warning in report.warnings:
        yield f"warning   {warning}"


def _shown(changes: Changes) -> Iterator[str]:
    yield from (f"          + panel {title}" for title in changes.added)
    yield from (f"          - panel {title}" for title in changes.removed)
    for one in changes.changed:
        where = f"panel {one.where}" if one.where else "board"
        yield f"          ~ {where}: {one.path}: {_short(one.was)} -> {_short(one.now)}"


def _short(value: Any, longest: int = 60) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


# ---- annotations


MOST_ANNOTATIONS = 5000  # looked through at once; without a limit Grafana gives a hundred
# of all tags of an annotation together, as Grafana counts them; annotations.tags_length can change it
MAX_TAG_BYTES = 500


@dataclass(frozen=True, slots=True)
class Copies:
    """Ids of events: whose annotation was made, whose times were set right, and whom Grafana refuses, with its
    reason."""

    made: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


def copy_events(grafana: GrafanaClient, events: Iterable[TuningEvent]) -> Copies:
    """Bring events into Grafana as annotations of the organisation. One that is found by the tag of its id is not made
    again; restarts are left out, as on the boards. Nothing is kept of what was sent: what the log has and Grafana lacks
    is what is to send, also after Grafana was away.

    Raises GrafanaTrouble where no further one can be sent.
    Source: Grafana's HTTP API page on annotations; pkg/services/annotations/annotationsimpl/xorm_store.go for tags and
    limits."""
    wanted = [event for event in events if event.kind != "restart"]
    if not wanted:
        return Copies()
    span = {"from": str(min(_ms(e.at_s) for e in wanted) - 1), "to": str(max(_ms(e.latest_s) for e in wanted) + 1)}
    there = _annotations(grafana, "tuning", **span)
    made: list[str] = []
    changed: list[str] = []
    unfit: list[tuple[str, str]] = []
    for event in wanted:
        tag = f"event:{event.id}"
        found = [one for one in there if tag in (one.get("tags") or ())] or _annotations(grafana, tag)
        times = {"time": _ms(event.at_s), "timeEnd": _ms(event.latest_s)}
        if not found:
            answer = grafana.ask("POST", "/api/annotations", {**times, "tags": _tags(event, tag), "text": _text(event)})
            doing, done = "to make an annotation", made
        elif any(found[0].get(name) != at for name, at in times.items()):
            answer = grafana.ask("PATCH", f"/api/annotations/{found[0]['id']}", times)
            doing, done = "to change an annotation", changed
        else:
            continue
        if answer.status in (401, 403) or answer.body is None:
            raise _not_annotated(answer, doing)
        if answer.status != 200:
            unfit.append((event.id, str(_not_annotated(answer, doing))))
            continue
        done.append(event.id)
        # another process copied it at the same time: the first one stays
        if not found and len(twice := _annotations(grafana, tag)) > 1:
            mine = answer.data.get("id")
            if mine != min(one["id"] for one in twice):
                grafana.ask("DELETE", f"/api/annotations/{mine}")
    return Copies(tuple(made), tuple(changed), tuple(unfit))


def _not_annotated(answer: GrafanaAnswer, doing: str) -> GrafanaTrouble:
    return refused(answer, doing, "annotations:create and annotations:write on annotations:type:organization")


def _annotations(grafana: GrafanaClient, tag: str, **span: str) -> list[dict[str, Any]]:
    answer = grafana.ask("GET", "/api/annotations", tags=tag, type="annotation", limit=str(MOST_ANNOTATIONS), **span)
    if answer.status != 200 or not isinstance(answer.body, list):
        raise refused(answer, "to list annotations", "annotations:read on annotations:type:organization")
    return [one for one in answer.body if isinstance(one, dict) and "id" in one and tag in (one.get("tags") or ())]


def _ms(at_s: float) -> int:
    return round(at_s * 1000)


def _tags(event: TuningEvent, tag: str) -> list[str]:
    """Ours always, those of the event as far as they fit."""
    tags = ["tuning", tag, event.kind]
    for one in event.tags:
        if 2 + sum(len(each.encode()) + 3 for each in (*tags, one)) <= MAX_TAG_BYTES:
            tags.append(one)
    return tags


def _text(event: TuningEvent) -> str:
    """Grafana shows it as HTML."""
    diff = [
        f"{option}: {'not set' if old is None else old} → {'not set' if new is None else new}"
        for option, (old, new) in event.diff.items()
    ]
    who = [f"({event.who})"] if event.who else []
    return html.escape("\n".join((" ".join((event.what, *who)), *diff)), quote=False)
