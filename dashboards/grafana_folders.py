"""The folder in Grafana into which dashboards are pushed."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from dashboards.grafana_client import GrafanaClient, GrafanaTrouble, refused

FOLDER_UID = "vllm-watch"
FOLDER = "vLLM"


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
