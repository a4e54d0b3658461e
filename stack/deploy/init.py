"""First start of the compose stack: Grafana's password, one key per team, teams.yaml with the keys' hashes.

Invariant: what exists is never replaced, so that a second `docker compose up`, a restart or an edit by the operator
keeps every key. The compose service `init` runs this module; `docker compose run --rm cli secrets` prints
what there is."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from exporters.text import write_atomically
from stack.config import BadConfig
from stack.gateway import teams
from stack.gateway.isolation import SECRET_FILE
from stack.gateway.policy import BANDS

FOLDER = Path("/var/lib/vllm-watch/secrets")
STORE = Path("/var/lib/vllm-watch/store")  # of compose.replicas.yml: the password of the store of leases
# Where the sidecar's file depends on the environment: what it is made from, and the result.
SIDECAR_TEMPLATE = Path("/etc/vllm-watch/sidecar.yaml")
SIDECAR = Path("/var/lib/vllm-watch/state/sidecar.yaml")
TEAMS = tuple(BANDS)  # one for each band
_KEYS = "keys"
OPERATOR_PASSWORD = Path("/etc/vllm-watch/tls/password")  # what compose.secure.yml gives the service cli
_PASSWORD = "grafana_admin_password"  # noqa: S105  a file name
_TEAMS_HEAD = (
    "# Made once by the init service, yours to edit since. Keys stand here as hashes; `vllm-watch gateway key TEAM`"
    " makes one.\n"
)


@dataclass(frozen=True, slots=True)
class Secrets:
    """Credentials. keys: by team, for the header `Authorization: Bearer KEY`; operator_password: where every
    listener wants a login."""

    grafana_password: str
    keys: dict[str, str]
    operator_password: str | None = None


def make(folder: Path, random: Callable[[int], str] = secrets.token_urlsafe) -> Secrets:
    """The secrets in `folder`, made where they are missing."""
    make_password(folder, random)
    make_keys(folder, {team: team for team in TEAMS}, random=random)
    once(folder / SECRET_FILE, lambda: random(32))  # the gateway sees this folder read-only
    return read(folder)


def make_password(folder: Path, random: Callable[[int], str] = secrets.token_urlsafe) -> None:
    """Grafana runs as another user of our group: its password alone is readable by the group, all else by us only."""
    once(folder / _PASSWORD, lambda: random(24), mode=0o640)


def make_store_password(folder: Path, random: Callable[[int], str] = secrets.token_urlsafe) -> None:
    """A password for the store, which gateways and the store read."""
    once(folder / "password", lambda: random(32))


def make_keys(
    folder: Path,
    bands: Mapping[str, str],
    upstreams: Mapping[str, object] | None = None,
    random: Callable[[int], str] = secrets.token_urlsafe,
) -> None:
    """A key for each team, and teams.yaml with their bands and, where they are given, its engines."""
    keys = folder / _KEYS
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    for team in bands:
        once(keys / team, partial(_new_key, team, random))
    made = {team: (keys / team).read_text().strip() for team in bands}
    once(folder / "teams.yaml", lambda: teams_yaml(made, bands, upstreams))


def _new_key(team: str, random: Callable[[int], str]) -> str:
    return teams.make_key(team, random)[0]


def teams_yaml(keys: Mapping[str, str], bands: Mapping[str, str], upstreams: Mapping[str, object] | None = None) -> str:
    """The gateway's file for these keys."""
    terms = {team: teams.first_terms(bands[team], [teams.hashed(key)]) for team, key in keys.items()}
    return _TEAMS_HEAD + yaml.safe_dump(
        {"teams": terms} | ({"upstreams": upstreams} if upstreams else {}), sort_keys=False
    )


def once(path: Path, text: Callable[[], str], mode: int = 0o600) -> None:
    """Writes a file that is not there yet, and never over one that is."""
    if not path.exists():
        write_atomically(path, text(), mode)


def read(folder: Path, operator_password: Path = OPERATOR_PASSWORD) -> Secrets:
    """Return the secrets that exist: keys in `folder`, or of teams that have a volume of their own in `teams` beside
    it; no keys where there is no gateway (compose.watch.yml). Raises BadConfig."""
    try:
        own = sorted(folder.parent.glob(f"teams/*/{_KEYS}/[!.]*"))
        made = [folder / _KEYS / team for team in TEAMS] if (folder / _KEYS).exists() else []
        keys = {path.name: path.read_text().strip() for path in own or made}
        operators = operator_password.read_text().strip() if operator_password.exists() else None
        return Secrets((folder / _PASSWORD).read_text().strip(), keys, operators)
    except OSError as error:
        raise BadConfig(f"{error.filename}: {error.strerror}; `docker compose up` makes the secrets") from error


def main(folder: Path = FOLDER, store: Path | None = None) -> int:
    try:
        make(folder)
        if store is not None:
            make_store_password(store)
    except (OSError, BadConfig) as error:
        logging.getLogger("vllm_watch.init").error("the secrets could not be made: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(store=STORE if "store" in sys.argv[1:] else None))
