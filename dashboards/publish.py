"""Publishing of dashboards: as files, or through the API of an existing Grafana.

Nothing is written that is equal, that a file provisions, or that is not ours; a dashboard never leaves its folder; no
write is ever tried twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dashboards.data_sources import choose, data_sources, look
from dashboards.grafana_api import GrafanaApi, detect
from dashboards.grafana_client import GrafanaClient, GrafanaTrouble
from dashboards.grafana_folders import FOLDER, FOLDER_UID, Folder, find_folder, make_folder
from dashboards.publish_plan import Changes, Create, Existing, Plan, Refuse, Skip, Update, plan, tagged, with_datasource

MARK = "Printed by vllm-watch dashboards export"


# ---- files


def provider(path: str) -> str:
    """Grafana's provider file for boards that it finds below `path`, as Grafana sees it."""
    return f"""# {MARK} --format provisioning. Belongs into Grafana's provisioning/dashboards/.
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
    """Return why an exported file is not ours; empty when it is."""
    try:
        text = path.read_text(encoding="utf-8")
        ours = tagged(json.loads(text)) if path.suffix == ".json" else MARK in text.partition("\n")[0]
    except (ValueError, OSError):
        ours = False
    return "" if ours else "did not come from here"


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
    changes: Changes = field(default_factory=Changes)
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
    """Return the dashboards in Grafana, and those that may not be read. Raises GrafanaTrouble when not one of them can
    be."""
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


def as_lines(report: PushReport) -> Iterator[str]:
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
