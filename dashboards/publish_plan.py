"""Plan the action for one dashboard in Grafana: create, update, skip or refuse. Pure.

The newer API brings classic JSON to its own schemaVersion as it stores it and drops nulls and defaults on the way, so
`differences` reads both sides without them. Source: Grafana's apps/dashboard/pkg/migration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dashboards.grafana_json import TAG


def tagged(board: Any) -> bool:
    return isinstance(board, dict) and isinstance(board.get("tags"), list) and TAG in board["tags"]


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
    """Changes of an update: titles of panels, and fields."""

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
    """Return the action for one dashboard. Force overwrites what is not ours, never what a file provisions: Grafana
    would not let us."""
    if existing is None:
        return Create()
    changes = differences(existing.board, wanted)
    if not changes:
        return Skip()
    if existing.managed:
        return Refuse(f"{existing.managed}, so no API can save it: change it there, or remove it there and push again")
    if not tagged(existing.board) and not force:
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
