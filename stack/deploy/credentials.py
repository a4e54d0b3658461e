"""Credentials of compose.secure.yml: certificate, password and permitted clients of each service.

A folder is a volume of its own, mounted where that service reads it and nowhere else; its files can be opened by that
service's user only.
    ca.crt              the private authority, by which a service knows the others
    tls.crt, tls.key    the service's certificate, for its name, localhost and what VLLM_WATCH_HOSTNAME names
    password, http.yml  what the service says of itself when it asks another one: its name and its password
    web.yml             who may ask it, as bcrypt hashes;  clients.yml: the gateway's listener for teams, which bring
    keys of their own
Invariants: a password and a file of names are made once and never replaced; so is a certificate of another authority. A
certificate of ours is made anew when it has 60 days left or lacks a name or its key. The authority's key lies in a
volume that no running service has. The compose service `credentials` runs this module as root, because it gives files
to the users of others."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import bcrypt
import yaml

from exporters.text import write_atomically
from stack.config import BadConfig
from stack.deploy import certificates
from stack.deploy.init import once

FOLDER = Path("/credentials")
AUTHORITY, PUBLIC = "authority", "public"
_HEAD = "# Made once by the service credentials, yours to edit since. What may stand here: docs/guides/hardening.md\n"
_NAME = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:-]*")
_log = logging.getLogger("vllm_watch.credentials")


@dataclass(frozen=True, slots=True)
class Service:
    """owner: user and group that its image runs as. asked_by: who may ask its listener; empty where the program has a
    login of its own or none."""

    owner: tuple[int, int]
    asked_by: tuple[str, ...] = ()
    listens: bool = True


_OURS, _NOBODY = (10001, 0), (65534, 65534)
OPERATOR = "operator"  # a person, and the service cli
SERVICES = {
    "alertmanager": Service(_NOBODY, ("alertmanager", "prometheus", OPERATOR)),
    "board": Service(_OURS, (OPERATOR,)),
    "gateway": Service(_OURS, ("prometheus", OPERATOR)),
    "grafana": Service((472, 0)),
    OPERATOR: Service(_OURS, listens=False),
    "otelcol": Service((10001, 10001)),
    "prometheus": Service(_NOBODY, ("prometheus", "grafana", "board", OPERATOR)),
    "sidecar": Service(_OURS, ("prometheus", OPERATOR)),
}
USERS = frozenset(user for service in SERVICES.values() for user in service.asked_by)


def kind(folder: str) -> str:
    """The service that a folder is for; gateways of teams (gateway-team-a) are gateways. Raises BadConfig."""
    found = folder.split("-team-")[0]
    if found not in SERVICES:
        raise BadConfig(f"{folder} is no service that gets credentials; known are {', '.join(SERVICES)}")
    return found


def further_names(environment: Mapping[str, str]) -> list[str]:
    """Return the names by which clients reach this host, besides localhost: VLLM_WATCH_HOSTNAME, and the address the
    ports are bound to. Raises BadConfig."""
    said = {
        variable: environment.get(variable, "").strip().strip("[]")
        for variable in ("VLLM_WATCH_HOSTNAME", "VLLM_WATCH_BIND")
    }
    for variable, name in said.items():
        if name and not _NAME.fullmatch(name):
            raise BadConfig(
                f"{variable}: {name!r} is not one name or address; give it the one by which clients call this host"
            )
    return sorted({name for name in said.values() if name} - {"0.0.0.0", "::", "localhost", "127.0.0.1", "::1"})  # noqa: S104


def make(
    root: Path,
    now: datetime,
    names: list[str],
    random: Callable[[int], str] = secrets.token_urlsafe,
    chown: Callable[[Path, int, int], None] = os.chown,
) -> None:
    """Everything that is missing in the folders that are there. Raises BadConfig."""
    signer = _authority(root / AUTHORITY, now)
    folders = {
        path.name: path for path in sorted(root.iterdir()) if path.is_dir() and path.name not in (AUTHORITY, PUBLIC)
    }
    for name, folder in folders.items():
        _identity(folder, SERVICES[kind(name)], [name, "localhost", "127.0.0.1", "::1", *names], signer, now)
        if kind(name) in USERS:
            once(folder / "password", lambda: random(24))
            once(folder / "http.yml", partial(_asks, kind(name)))
    known = {
        kind(name): (folder / "password").read_text().strip()
        for name, folder in folders.items()
        if (folder / "password").exists()
    }
    for name, folder in folders.items():
        _doors(folder, kind(name), known)
        _give(folder, SERVICES[kind(name)].owner, chown)
    if (root / PUBLIC).is_dir():
        _anew(root / PUBLIC / "ca.crt", signer.certificate, mode=0o444)


def _authority(folder: Path, now: datetime) -> certificates.Pair:
    """Return the existing one, or a new one. Raises BadConfig when it expires soon: its users must get the new one,
    which nobody does by accident."""
    folder.chmod(0o700)
    certificate, key = folder / "ca.crt", folder / "ca.key"
    if not certificate.exists():
        made = certificates.authority(now)
        write_atomically(key, made.key, 0o400)
        write_atomically(certificate, made.certificate, 0o444)
    found = certificates.Pair(certificate.read_text(), key.read_text())
    left = certificates.days_left(found.certificate, now)
    if left < certificates.RENEW_DAYS:
        raise BadConfig(
            f"{certificate}: the authority expires in {left:.0f} days; take the stack down, remove the volume"
            " tls-authority (docker volume rm vllm-watch_tls-authority), start again, and give the new ca.crt to"
            " clients outside"
        )
    return found


def _identity(folder: Path, service: Service, names: list[str], signer: certificates.Pair, now: datetime) -> None:
    """Write the identity of a service and the authority that it trusts. An operator's own authority or certificate
    stays."""
    _anew(folder / "ca.crt", signer.certificate)
    if not service.listens or not _wanted(folder, names, signer, now):
        return
    made = certificates.leaf(signer, names, now)
    write_atomically(folder / "tls.key", made.key, 0o400)
    write_atomically(folder / "tls.crt", made.certificate, 0o444)
    _log.info("%s: a certificate for %s, good for %d days", folder.name, ", ".join(names), certificates.LEAF_DAYS)


def _anew(path: Path, certificate: str, mode: int = 0o400) -> None:
    """The authority's certificate, over an earlier one of ours and over no other."""
    if not path.exists() or (certificates.is_ours(path.read_text()) and path.read_text() != certificate):
        write_atomically(path, certificate, mode)


def _wanted(folder: Path, names: list[str], signer: certificates.Pair, now: datetime) -> bool:
    """Return whether a certificate must be made: there is none, or one of ours that is old, of a former authority, or
    lacks a name or its key.

    Raises BadConfig for one of the operator's own that no program could use."""
    path, key = folder / "tls.crt", folder / "tls.key"
    if not path.exists():
        return True
    text = path.read_text()
    try:
        left = certificates.days_left(text, now)
    except ValueError as error:
        raise BadConfig(f"{path} is no certificate in PEM form: {error}; put one there or remove the file") from error
    if certificates.is_of(text, signer) or certificates.is_ours(text):
        fresh = certificates.is_of(text, signer) and left >= certificates.RENEW_DAYS
        return not (fresh and certificates.names_of(text) >= set(names) and _has_key(text, key))
    if not _has_key(text, key):
        raise BadConfig(
            f"{key} is not the key of your {path.name} beside it, or wants a password; put both there in"
            " PEM form, or remove both"
        )
    if left < certificates.RENEW_DAYS:
        _log.warning("%s: your own certificate expires in %.0f days; nobody here replaces it", path, left)
    return False


def _has_key(certificate: str, key: Path) -> bool:
    """Return whether the certificate's key is beside it and opens without a password."""
    try:
        return certificates.fits(certificate, key.read_text())
    except (FileNotFoundError, ValueError):
        return False


def _asks(user: str) -> str:
    """Prometheus' http_config, for promtool, amtool and our own --http-config."""
    return _HEAD + yaml.safe_dump(
        {"basic_auth": {"username": user, "password_file": "password"}, "tls_config": {"ca_file": "ca.crt"}}
    )


def _doors(folder: Path, service: str, passwords: Mapping[str, str]) -> None:
    """Prometheus' web configuration: who may ask this one. Raises BadConfig where a user has no password to check
    against."""
    tls = {"tls_server_config": {"cert_file": "tls.crt", "key_file": "tls.key", "min_version": "TLS12"}}
    if service == "gateway":
        once(folder / "clients.yml", lambda: _HEAD + yaml.safe_dump(tls))
    if asked_by := SERVICES[service].asked_by:
        if missing := sorted(set(asked_by) - set(passwords)):
            raise BadConfig(
                f"{folder} is asked by {missing[0]}, whose folder is not mounted beside it;"
                f" mount {folder.parent / missing[0]}"
            )
        once(
            folder / "web.yml",
            lambda: (
                _HEAD + yaml.safe_dump(tls | {"basic_auth_users": {user: hashed(passwords[user]) for user in asked_by}})
            ),
        )


def hashed(password: str) -> str:
    """bcrypt at 1,024 rounds, about 60 ms of a processor: the passwords are random, so that more would slow nobody down
    but the scrape."""
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(10)).decode()


def _give(folder: Path, owner: tuple[int, int], chown: Callable[[Path, int, int], None]) -> None:
    """To the service's user, and to nobody else. What is so already is not touched: a file with another time is read
    again."""
    for path in (*folder.iterdir(), folder):
        mode, found = 0o700 if path == folder else 0o400, path.stat()
        if stat.S_IMODE(found.st_mode) != mode:
            path.chmod(mode)
        if (found.st_uid, found.st_gid) != owner:
            chown(path, *owner)


def main(environment: Mapping[str, str], root: Path = FOLDER) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        make(root, datetime.now(UTC), further_names(environment))
    except (OSError, ValueError, BadConfig) as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
