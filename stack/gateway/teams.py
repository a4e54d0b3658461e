"""Who a request belongs to: teams.yaml, keys, and the look-up from one to the other.

Law: the file holds SHA-256 hashes of keys, never keys; a key is shown once, when it is made. Keys carry 192 random bits, so a plain hash is
enough, and a look-up by hash takes the same time for a key that is nearly right as for one that is not."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stack.config import BadConfig, load

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class Team(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """keys: hashes as `make_key` gives them; several let one be replaced while the other still works."""

    keys: list[str] = []


class TeamsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """teams.yaml: `teams: {demo: {keys: ["sha256:..."]}}`."""

    teams: dict[str, Team] = {}


def make_key(team: str, random: Callable[[int], str] = secrets.token_urlsafe) -> tuple[str, str]:
    """A new key for a team, and the hash that goes into teams.yaml. Raises BadConfig for a name that cannot be a team."""
    _check_name(team, "the team")
    key = f"vw-{team}-{random(24)}"
    return key, hashed(key)


def hashed(key: str) -> str:
    """How a key stands in teams.yaml."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Teams:
    """The loaded file. anonymous: the team of requests without a key, or None when they are refused."""

    by_hash: Mapping[str, str]
    names: frozenset[str]
    anonymous: str | None = None

    def of(self, key: str | None) -> str | None:
        """The team of a key, of no key at all when that is allowed, or None. A wrong key is never anonymous."""
        return self.anonymous if key is None else self.by_hash.get(hashed(key))


def load_teams(path: Path, anonymous: str | None = None) -> Teams:
    """teams.yaml, checked. Raises BadConfig that names the place."""
    return teams_of(load(path, TeamsFile), str(path), anonymous)


def teams_of(file: TeamsFile, place: str, anonymous: str | None = None) -> Teams:
    """The look-up for a file's content. Raises BadConfig for bad names, for keys instead of hashes and for a key of two teams."""
    by_hash: dict[str, str] = {}
    for name, team in file.teams.items():
        _check_name(name, f"{place}: teams.{name}")
        for index, entry in enumerate(team.keys):
            where = f"{place}: teams.{name}.keys[{index}]"
            if not _HASH.fullmatch(entry):  # the entry itself is not shown: it may be a key
                raise BadConfig(f"{where} is no hash of a key; `vllm-watch gateway key {name}` makes a key and its sha256:... entry")
            if (other := by_hash.setdefault(entry, name)) != name:
                raise BadConfig(f"{where} is also a key of team {other}; give each team its own")
    if anonymous is not None and anonymous not in file.teams:
        raise BadConfig(f"anonymous_team: {anonymous} is not among the teams of {place}; add it there or use null")
    return Teams(by_hash, frozenset(file.teams), anonymous)


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadConfig(f"{what}: {name[:60]!r} is no team name; use 1 to 40 of a-z 0-9 _ - and begin with a letter or digit")
