"""Listener TLS and auth from Prometheus' web configuration file, reread when it or a file that it names changes.

Invariants: no message contains a password, hash or token. An invalid file changes nothing: the active settings stay,
which is logged once; only their certificates are still renewed. A truncated file never disables protection: TLS,
auth and client certificates are switched off only by a restart. Tokens differ: a missing or empty token file rejects
everyone, because that is how a token is revoked."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import re
import secrets
import ssl
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from exporters import config
from exporters.config import BadConfig

BCRYPT_BYTES = 72  # of a password; bcrypt ignores further ones, and newer versions reject them
LOGINS_WAITING = 32  # bcrypt is slow by design; one check runs at a time
LOGINS_OF_ONE = 8  # limit per address, so that a flood from one leaves room for others
LOGINS_KNOWN = 256

_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
# checked for unknown users, so that both cases take the same time
_NOBODY = "$2b${}$" + "." * 53

log = logging.getLogger("vllm_watch.listener")

Stamp = tuple[int, int, int, int] | None


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS settings.

    Paths are relative to the file. Unverified client certificates, which Go supports, are not offered."""

    cert_file: str
    key_file: str
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: str | None = None
    min_version: Literal["TLS12", "TLS13"] = "TLS12"

    def __post_init__(self) -> None:
        if self.client_ca_file and self.client_auth_type == "NoClientCert":
            raise ValueError("client_ca_file has no effect without client_auth_type; set RequireAndVerifyClientCert")
        if not self.client_ca_file and self.client_auth_type != "NoClientCert":
            raise ValueError(
                f"client_auth_type {self.client_auth_type} needs client_ca_file, the CA of accepted certificates"
            )


class WebConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of the file. bearer_token_files: one word each; not supported by Prometheus' own listener."""

    tls_server_config: Tls | None = None
    basic_auth_users: Mapping[str, str] = {}
    bearer_token_files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for user, hashed in self.basic_auth_users.items():
            if not user or ":" in user:
                raise ValueError("basic_auth_users: a user name must not be empty or contain a colon")
            if not _HASH.fullmatch(hashed):
                raise ValueError(
                    f"basic_auth_users.{user} is no bcrypt hash; `htpasswd -nBC 10 {user}` makes one, and a password"
                    " itself has no place here"
                )

    @property
    def logins(self) -> bool:
        """Return True if credentials are required in addition to a certificate."""
        return bool(self.basic_auth_users or self.bearer_token_files)

    @property
    def clients_checked(self) -> bool:
        """Return True if a client certificate is required."""
        return (
            self.tls_server_config is not None
            and self.tls_server_config.client_auth_type == "RequireAndVerifyClientCert"
        )


class TooMany(Exception):
    """Limit of waiting password checks reached."""


@dataclass(frozen=True, slots=True)
class _Active:
    """Active settings: the parsed file, and the TLS context of the files that it names."""

    config: WebConfig
    tls: ssl.SSLContext | None = None


class ListenerAuth:
    """TLS and auth of one listener by its web configuration file; none without a file.

    Raises BadConfig for an unusable file at start. setting: option that names the file, for messages. tls_only: for
    a listener whose clients send their own keys in the same header."""

    def __init__(self, path: Path | None, setting: str = "web_config", *, tls_only: bool = False) -> None:
        self.path = path
        self.tls_only = tls_only
        self._setting = setting
        self._stamps: dict[Path, Stamp] = {}  # stamps of the files, taken before reading
        self._active = _Active(WebConfig()) if path is None else self._read(path)
        self._last_error = ""
        self._tokens: dict[Path, tuple[Stamp, bytes | None]] = {}
        self._known: dict[bytes, None] = {}
        # makes stored digests useless outside this process
        self._key = secrets.token_bytes(32)
        self._turn = asyncio.Lock()
        # running and waiting password checks, by client address
        self._waiting: Counter[str] = Counter()
        self._checks: set[asyncio.Task[bool]] = set()  # keeps a reference when the client is gone
        list(self._tokens_now())  # logs unreadable token files
        # valid for Prometheus, but the file may be truncated
        if path is not None and self._active.tls is None and not self._active.config.logins:
            log.warning("%s: %s sets neither TLS nor users nor tokens, so this listener is unprotected", setting, path)

    def context(self) -> ssl.SSLContext | None:
        """Return the current TLS context for the next connection."""
        return self._now().tls

    @property
    def logins(self) -> bool:
        """Return True if the current files require credentials."""
        return self._now().config.logins

    async def authenticate(self, authorization: str, peer: str = "") -> bool:
        """Return True if this Authorization header, from the address `peer`, matches a user or a token.

        Raises TooMany."""
        settings = self._now().config
        scheme, _, given = authorization.partition(" ")
        match scheme.lower():
            case "basic":
                return await self._login(settings.basic_auth_users, given.strip(), peer)
            case "bearer":
                mine = self._digest(given.strip().encode("utf-8", "surrogateescape"))
                # compares all tokens, for constant time
                return 0 < sum(hmac.compare_digest(mine, self._digest(token)) for token in self._tokens_now())
            case _:
                return False

    def challenges(self) -> list[str]:
        """Return the values of WWW-Authenticate."""
        settings = self._active.config
        named = (("Basic", settings.basic_auth_users), ("Bearer", settings.bearer_token_files))
        return [f'{scheme} realm="vllm-watch"' for scheme, there in named if there]

    # ---- files

    def _now(self) -> _Active:
        if self.path is not None and any(stamp(path) != was for path, was in self._stamps.items()):
            self._reload(self.path)
        return self._active

    def _reload(self, path: Path) -> None:
        former, before, settings = self._active.config, self._stamps, None
        try:
            settings = self._settings(path, former)
            self._active = self._activate(path, settings)
        except BadConfig as error:
            kept = former.tls_server_config
            same_tls = settings is not None and settings.tls_server_config == kept  # then its certificates are invalid
            also = "" if kept is None or same_tls else self._renew_certificates(path, kept, before)
            self._log_once(f"{self._setting}: {error}; the previous settings stay active{also}")
        else:
            self._last_error = ""
            log.info("%s: %s reloaded", self._setting, path)

    def _read(self, path: Path) -> _Active:
        """Read the file and the files that it names. Raises BadConfig."""
        try:
            return self._activate(path, self._settings(path))
        except BadConfig as error:
            raise BadConfig(f"{self._setting}: {error}") from None

    def _settings(self, path: Path, former: WebConfig | None = None) -> WebConfig:
        """Parse the file. Raises BadConfig.

        Takes the stamp before opening it, so that a concurrent write is read the next time."""
        self._stamps = {path: stamp(path)}
        settings = config.load(path, WebConfig)
        if self.tls_only and settings.logins:
            raise BadConfig(
                f"{path}: basic_auth_users and bearer_token_files are not supported here: clients send their own keys"
            )
        if former is not None:
            _expect_no_less(path, former, settings)
        return settings

    def _activate(self, path: Path, settings: WebConfig) -> _Active:
        """Build the active settings from the parsed file. Raises BadConfig."""
        if (tls := settings.tls_server_config) is None:
            return _Active(settings)
        self._stamps |= {file: stamp(file) for file in _files(path, tls)}
        return _Active(settings, _context(path, tls))

    def _renew_certificates(self, path: Path, kept: Tls, before: Mapping[Path, Stamp]) -> str:
        """Reload the active certificates if they changed since `before`, while the file is invalid.

        Certificate renewal does not wait for a fix of the file. Return an addition to the error message."""
        now = {file: stamp(file) for file in _files(path, kept)}
        self._stamps = now | self._stamps  # the first stamp is kept
        if all(before.get(file) == was for file, was in now.items()):
            return ""
        try:
            self._active = _Active(self._active.config, _context(path, kept))
        except BadConfig as error:
            return f", as do its certificates: {error}"
        log.info("%s: %s: renewed certificates loaded", self._setting, path)
        return ""

    def _tokens_now(self) -> Iterator[bytes]:
        for name in self._active.config.bearer_token_files if self.path else ():
            path = (self.path or Path()).parent / name
            now, (former, token) = stamp(path), self._tokens.get(path, (None, None))
            if path not in self._tokens or now != former:
                self._tokens[path] = now, (token := self._token(path))
            if token:
                yield token

    def _token(self, path: Path) -> bytes | None:
        try:
            token = path.read_bytes().strip()
        except (OSError, ValueError) as error:
            self._log_once(
                f"{self._setting}: bearer_token_files: {path} cannot be read, so its token is rejected:"
                f" {describe_tls_error(error)}"
            )
            return None
        if len(token.split()) == 1:
            return token
        self._log_once(f"{self._setting}: bearer_token_files: {path} does not hold one word, so no token is accepted")
        return None

    def _log_once(self, what: str) -> None:
        if what != self._last_error:
            log.error("%s", what)
        self._last_error = what

    # ---- credentials

    async def _login(self, users: Mapping[str, str], given: str, peer: str) -> bool:
        try:
            name, colon, password = base64.b64decode(given, validate=True).partition(b":")
            user = name.decode()
        except (binascii.Error, ValueError):
            return False
        if not colon or not users:
            return False
        hashed = users.get(user) or _NOBODY.format(max(one[4:6] for one in users.values()))
        mark = self._digest(hashed.encode() + password)  # hashes have a fixed length
        if mark in self._known:
            return True
        if self._waiting.total() >= LOGINS_WAITING or self._waiting[peer] >= LOGINS_OF_ONE:
            raise TooMany
        self._waiting[peer] += 1
        check = asyncio.create_task(self._check(mark, password, hashed, user in users, peer))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        # a disconnected client stops waiting, but its check continues: lock and place are released when it is done
        return await asyncio.shield(check)

    async def _check(self, mark: bytes, password: bytes, hashed: str, there: bool, peer: str) -> bool:
        try:
            async with self._turn:
                right = mark in self._known or (await _matches_apart(password, hashed) and there)
        finally:
            self._waiting -= Counter((peer,))  # removes it at 0
        if right:
            if len(self._known) >= LOGINS_KNOWN:
                self._known.clear()
            self._known[mark] = None
        return right

    def _digest(self, what: bytes) -> bytes:
        return hmac.digest(self._key, what, "sha256")


def _expect_no_less(path: Path, former: WebConfig, settings: WebConfig) -> None:
    """Raise BadConfig if a reload would remove protection: an emptied or truncated file is valid YAML too."""
    if (settings.tls_server_config is None) != (former.tls_server_config is None):
        raise BadConfig(f"{path}: TLS can be switched on or off only by a restart")
    if former.logins and not settings.logins:
        raise BadConfig(f"{path}: users and tokens are gone; auth can be switched off only by a restart")
    if former.clients_checked and not settings.clients_checked:
        raise BadConfig(f"{path}: client certificates are no longer required; that needs a restart")


async def _matches_apart(password: bytes, hashed: str) -> bool:
    """Check a password in a thread of its own.

    The event loop's threads render panels and write logs; an own thread needs no cleanup when the listener closes."""
    thread = ThreadPoolExecutor(1, "login")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, _matches, password, hashed)
    finally:
        thread.shutdown(wait=False)


def _matches(password: bytes, hashed: str) -> bool:
    import bcrypt  # imported only if there are users

    return len(password) <= BCRYPT_BYTES and bcrypt.checkpw(password, hashed.encode())


def stamp(path: Path) -> Stamp:
    """Return a value that identifies a file's state, also through a symlink that is switched, as Kubernetes does."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: invalid name
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _files(path: Path, tls: Tls) -> list[Path]:
    return [path.parent / name for name in (tls.cert_file, tls.key_file, tls.client_ca_file) if name]


def _context(path: Path, tls: Tls) -> ssl.SSLContext:
    """Return the TLS context. Raises BadConfig with file and field."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}[tls.min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    cert, key = (
        _readable_file(path, field, name) for field, name in (("cert_file", tls.cert_file), ("key_file", tls.key_file))
    )
    try:
        context.load_cert_chain(cert, key, password=no_password)
    except (OSError, ValueError) as error:  # includes SSLError
        raise BadConfig(
            f"{path}: tls_server_config: {cert} and {key} cannot be used: {describe_tls_error(error)}"
        ) from None
    if tls.client_ca_file:
        authority = _readable_file(path, "client_ca_file", tls.client_ca_file)
        try:
            context.load_verify_locations(authority)
        except (OSError, ValueError) as error:
            raise BadConfig(
                f"{path}: tls_server_config.client_ca_file: {authority} cannot be used: {describe_tls_error(error)}"
            ) from None
        context.verify_mode = (
            ssl.CERT_REQUIRED if tls.client_auth_type == "RequireAndVerifyClientCert" else ssl.CERT_OPTIONAL
        )
    return context


def no_password() -> str:
    """Raise ValueError instead of prompting on the terminal."""
    raise ValueError("the key is encrypted; encrypted keys are not supported")


def _readable_file(path: Path, field: str, name: str) -> Path:
    """Return the path of a configured file if it is readable; ssl's errors do not name the file."""
    file_path = path.parent / name
    try:
        with file_path.open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        raise BadConfig(
            f"{path}: tls_server_config.{field}: {file_path} cannot be read: {describe_tls_error(error)}"
        ) from None
    return file_path


_REASONS = {
    "KEY_VALUES_MISMATCH": "the key does not match the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no PEM certificate",
    "NO_START_LINE": "it holds no PEM data",
    "PEM_LIB": "it is no PEM file, or not a key",
    "WRONG_VERSION_NUMBER": "the server does not use TLS; use http instead of https?",
    "RECORD_LAYER_FAILURE": "the server does not use TLS; use http instead of https?",
}


def describe_tls_error(error: Exception) -> str:
    """Describe an ssl or file error, never with the content of a file."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "PEM_LIB"
        return _REASONS.get(reason, reason.lower().replace("_", " "))
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
