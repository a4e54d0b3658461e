"""Isolation of teams that share engines: salts of the prefix cache, ids of stored responses.

Invariant: both are HMACs under a secret of the gateway, so a team can neither compute nor choose what belongs to
another team, and replicas with the same secret agree without sharing any state. Nothing here logs the secret or
anything made from it."""

from __future__ import annotations

import functools
import hmac
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stack.config import BadConfig
from stack.gateway.policy import Policy, Team

SECRET_FILE = "gateway.secret"  # noqa: S105  the name of a file
LEAST_BYTES = 16  # of a secret
LONGEST_SALT = 128  # of vLLM, in characters
_REFUSED = re.compile(r"[@/\\\0]")  # in a salt, by vLLM
_STORED = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{32})")
_THIS_PROCESS = secrets.token_bytes(32)

_log = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class Isolation:
    """Keys of a gateway's teams. secret: empty where one team is alone. domains: cache domain of each team; empty where
    all teams share one.
    salts: of each team, for a request without a salt of its own."""

    secret: bytes = b""
    domains: Mapping[str, bytes] = field(default_factory=dict)
    salts: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute the salts of requests without one of their own, which are nearly all."""
        self.salts.update((team, self._tag(b"cache", domain, b"").hex()) for team, domain in self.domains.items())

    def salt(self, team: str, own: str | None) -> str | None:
        """Return the cache_salt for a request that has a salt of its own or None; None where none is needed.

        64 hex digits: vLLM takes at most 128 characters, and none of @ / \\ NUL. A salt that vLLM refuses gets a
        refused one too; older engines, which take it, still keep teams apart."""
        if own is None:
            return self.salts.get(team)
        domain = self.domains.get(team)
        if domain is None:
            return None
        salt, refused = self._tag(b"cache", domain, own.encode("utf-8", "surrogatepass")).hex(), _REFUSED.search(own)
        return salt + own[len(salt) :] if len(own) > LONGEST_SALT else salt + (refused[0] if refused else "")

    def response_id(self, team: str, random_hex: str) -> str | None:
        """Return a new id for a stored response of a team, made of 32 random hex digits; None where one team is
        alone."""
        return f"resp_{random_hex}{self._owner(team, random_hex)}" if self.secret else None

    def owns(self, team: str, response_id: str) -> bool:
        """Return whether the id of a stored response carries the tag of this team."""
        if not self.secret:
            return True
        parts = _STORED.fullmatch(response_id)
        return parts is not None and hmac.compare_digest(parts[2], self._owner(team, parts[1]))

    def _owner(self, team: str, random_hex: str) -> str:
        return self._tag(b"response", team.encode(), random_hex.encode())[:16].hex()

    def _tag(self, purpose: bytes, name: bytes, rest: bytes) -> bytes:
        """Purpose and name hold no NUL, so that no two triples are one message."""
        return hmac.digest(self.secret, b"\0".join((purpose, name, rest)), "sha256")


def isolation_of(policy: Policy, secret_file: Path) -> Isolation:
    """Return the keys for a policy; with one team alone there is nothing to isolate and no secret is read. Raises
    BadConfig."""
    if len(policy.teams) < 2:
        return Isolation()
    domains = {name: _domain(name, team) for name, team in policy.teams.items()}
    return Isolation(read_secret(secret_file), domains if len(set(domains.values())) > 1 else {})


def _domain(name: str, team: Team) -> bytes:
    """Cache domain of a team. A team and a domain of the same name differ."""
    return f"team:{name}".encode() if team.cache_domain is None else f"domain:{team.cache_domain}".encode()


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, made where it is missing; where it cannot be made, one that lives as long as this
    process.

    Raises BadConfig for a file that is there and holds no secret: replicas would disagree unnoticed."""
    try:
        if not path.exists():
            _make(path)
    except FileExistsError:
        pass  # another replica was quicker
    except OSError as error:
        _tell_once(str(path), error.strerror or str(error))
        return _THIS_PROCESS
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise BadConfig(f"secret_file: {path} cannot be read: {error.strerror}") from error
    if len(secret) < LEAST_BYTES:
        raise BadConfig(
            f"secret_file: {path} holds fewer than {LEAST_BYTES} bytes; write 32 random ones, or remove it to have it"
            " made"
        )
    return secret


def _make(path: Path) -> None:
    """Write a new secret with mode 0600, whole or not at all, and never over one that another process has made. Raises
    OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file:  # its mode is 0600
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
        os.link(file.name, path)


@functools.cache
def _tell_once(path: str, why: str) -> None:
    _log.warning(
        "secret_file: %s cannot be made (%s); cache salts and ids of stored responses hold until this gateway ends, and"
        " other replicas have others",
        path,
        why,
    )
