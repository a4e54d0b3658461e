"""What protects a listener: Prometheus' own web configuration file, read again when it, or a file that it names, is
another.

Laws: no password, hash or token stands in any message. A file with a mistake changes nothing: what was in force stays,
and that is told once; only its certificates are still taken when they are renewed. A file that was cut off opens
nothing: TLS, logins and certificates of clients are switched off only by a new start. A token is different: a token
file that is gone or empty lets nobody in, for that is how one takes a token back."""

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

BCRYPT_BYTES = 72  # of a password; what comes after them bcrypt does not look at, and newer versions refuse
LOGINS_WAITING = 32  # bcrypt is slow by intent, and only one at a time is checked
LOGINS_OF_ONE = 8  # address, of those: who floods from one leaves places to the others
LOGINS_KNOWN = 256

_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
# checked in place of the hash of a user who does not exist, so that both take the same time
_NOBODY = "$2b${}$" + "." * 53

log = logging.getLogger("vllm_watch.listener")

Stamp = tuple[int, int, int, int] | None


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paths are relative to the file that this stands in. Certificates that are asked for and not checked, which Go
    knows, are not offered."""

    cert_file: str
    key_file: str
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: str | None = None
    min_version: Literal["TLS12", "TLS13"] = "TLS12"

    def __post_init__(self) -> None:
        if self.client_ca_file and self.client_auth_type == "NoClientCert":
            raise ValueError(
                "client_ca_file checks nobody while client_auth_type is not set; set RequireAndVerifyClientCert"
            )
        if not self.client_ca_file and self.client_auth_type != "NoClientCert":
            raise ValueError(
                f"client_auth_type {self.client_auth_type} needs client_ca_file, which says whose certificates are"
                " accepted"
            )


class WebConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file. bearer_token_files: one word each; Prometheus' own listener does not know them."""

    tls_server_config: Tls | None = None
    basic_auth_users: Mapping[str, str] = {}
    bearer_token_files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for user, hashed in self.basic_auth_users.items():
            if not user or ":" in user:
                raise ValueError("basic_auth_users: a user's name has at least one letter and no colon")
            if not _HASH.fullmatch(hashed):
                raise ValueError(
                    f"basic_auth_users.{user} is no bcrypt hash; `htpasswd -nBC 10 {user}` makes one, and a password"
                    " itself has no place here"
                )

    @property
    def logins(self) -> bool:
        """Whether anybody has to say who they are, beyond a certificate."""
        return bool(self.basic_auth_users or self.bearer_token_files)

    @property
    def clients_checked(self) -> bool:
        """Whether nobody gets in without a certificate."""
        return (
            self.tls_server_config is not None
            and self.tls_server_config.client_auth_type == "RequireAndVerifyClientCert"
        )


class TooMany(Exception):
    """So many unknown logins wait to be checked that another one may not."""


@dataclass(frozen=True, slots=True)
class _Active:
    """What is in force: the file as it was read, and what was made of the files that it names."""

    config: WebConfig
    tls: ssl.SSLContext | None = None


class ListenerAuth:
    """Of one listener, by its web configuration file; without one there is none. Raises BadConfig for a file that
    cannot be used at the start.

    setting: what leads to the file, for messages. tls_only: for a listener whose clients have keys of their own in the
    same header."""

    def __init__(self, path: Path | None, setting: str = "web_config", *, tls_only: bool = False) -> None:
        self.path = path
        self.tls_only = tls_only
        self._setting = setting
        self._seen: dict[Path, Stamp] = {}  # each file that the last reading looked at, as it was before that
        self._force = _Active(WebConfig()) if path is None else self._read(path)
        self._told = ""
        self._tokens: dict[Path, tuple[Stamp, bytes | None]] = {}
        self._known: dict[bytes, None] = {}
        # so that what is remembered of a login is of no use outside of this process
        self._key = secrets.token_bytes(32)
        self._turn = asyncio.Lock()
        # logins that are being checked or wait for it, by the address they come from
        self._waiting: Counter[str] = Counter()
        self._checks: set[asyncio.Task[bool]] = set()  # the same, so that none is forgotten when its client is gone
        list(self._tokens_now())  # tells of token files that cannot be read
        # as Prometheus allows; but it may have been cut off
        if path is not None and self._force.tls is None and not self._force.config.logins:
            log.warning("%s: %s asks for neither TLS nor a login, so this listener is open", setting, path)

    def context(self) -> ssl.SSLContext | None:
        """For the next connection, by the files as they are now."""
        return self._now().tls

    @property
    def logins(self) -> bool:
        """Whether anybody has to say who they are, by the files as they are now."""
        return self._now().config.logins

    async def authenticate(self, authorization: str, peer: str = "") -> bool:
        """Whether this Authorization header, which came from the address `peer`, is a user's or holds one of the
        tokens. Raises TooMany."""
        settings = self._now().config
        scheme, _, given = authorization.partition(" ")
        match scheme.lower():
            case "basic":
                return await self._login(settings.basic_auth_users, given.strip(), peer)
            case "bearer":
                mine = self._digest(given.strip().encode("utf-8", "surrogateescape"))
                # all of them, whichever fits
                return 0 < sum(hmac.compare_digest(mine, self._digest(token)) for token in self._tokens_now())
            case _:
                return False

    def challenges(self) -> list[str]:
        """The values of WWW-Authenticate."""
        settings = self._force.config
        named = (("Basic", settings.basic_auth_users), ("Bearer", settings.bearer_token_files))
        return [f'{scheme} realm="vllm-watch"' for scheme, there in named if there]

    # ---- the files

    def _now(self) -> _Active:
        if self.path is not None and any(stamp(path) != was for path, was in self._seen.items()):
            self._look_again(self.path)
        return self._force

    def _look_again(self, path: Path) -> None:
        former, before, settings = self._force.config, self._seen, None
        try:
            settings = self._settings(path, former)
            self._force = self._made(path, settings)
        except BadConfig as error:
            kept = former.tls_server_config
            tried = settings is not None and settings.tls_server_config == kept  # then its certificates are the mistake
            also = "" if kept is None or tried else self._renewed(path, kept, before)
            self._tell(f"{self._setting}: {error}; what was in force before stays{also}")
        else:
            self._told = ""
            log.info("%s: %s was read again", self._setting, path)

    def _read(self, path: Path) -> _Active:
        """Raises BadConfig."""
        try:
            return self._made(path, self._settings(path))
        except BadConfig as error:
            raise BadConfig(f"{self._setting}: {error}") from None

    def _settings(self, path: Path, former: WebConfig | None = None) -> WebConfig:
        """Notes the state of the file before it opens it: what is written while it reads is read the next time. Raises
        BadConfig."""
        self._seen = {path: stamp(path)}
        told = config.load(path, WebConfig)
        if self.tls_only and told.logins:
            raise BadConfig(
                f"{path}: basic_auth_users and bearer_token_files have no place here: clients bring keys of their own"
            )
        if former is not None:
            _expect_no_less(path, former, told)
        return told

    def _made(self, path: Path, told: WebConfig) -> _Active:
        """The same for the files that it names. Raises BadConfig."""
        if (tls := told.tls_server_config) is None:
            return _Active(told)
        self._seen |= {file: stamp(file) for file in _files(path, tls)}
        return _Active(told, _context(path, tls))

    def _renewed(self, path: Path, kept: Tls, before: Mapping[Path, Stamp]) -> str:
        """The certificates of what was in force, where they are others than `before`: who renews them does not wait
        until somebody mends the file. What is to be told of them."""
        now = {file: stamp(file) for file in _files(path, kept)}
        self._seen = now | self._seen  # what was noted first counts
        if all(before.get(file) == was for file, was in now.items()):
            return ""
        try:
            self._force = _Active(self._force.config, _context(path, kept))
        except BadConfig as error:
            return f", and so do its certificates: {error}"
        log.info("%s: %s: its renewed certificates are used", self._setting, path)
        return ""

    def _tokens_now(self) -> Iterator[bytes]:
        for name in self._force.config.bearer_token_files if self.path else ():
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
            self._tell(
                f"{self._setting}: bearer_token_files: {path} cannot be read, so it lets nobody in: {why(error)}"
            )
            return None
        if len(token.split()) == 1:
            return token
        self._tell(f"{self._setting}: bearer_token_files: {path} does not hold one word, so it lets nobody in")
        return None

    def _tell(self, what: str) -> None:
        if what != self._told:
            log.error("%s", what)
        self._told = what

    # ---- logins

    async def _login(self, users: Mapping[str, str], given: str, peer: str) -> bool:
        try:
            name, colon, password = base64.b64decode(given, validate=True).partition(b":")
            user = name.decode()
        except (binascii.Error, ValueError):
            return False
        if not colon or not users:
            return False
        hashed = users.get(user) or _NOBODY.format(max(one[4:6] for one in users.values()))
        mark = self._digest(hashed.encode() + password)  # a hash has always the same length
        if mark in self._known:
            return True
        if self._waiting.total() >= LOGINS_WAITING or self._waiting[peer] >= LOGINS_OF_ONE:
            raise TooMany
        self._waiting[peer] += 1
        check = asyncio.create_task(self._check(mark, password, hashed, user in users, peer))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        # who hangs up stops waiting, and the hash goes on: turn and place are free when it is done, not before
        return await asyncio.shield(check)

    async def _check(self, mark: bytes, password: bytes, hashed: str, there: bool, peer: str) -> bool:
        try:
            async with self._turn:
                right = mark in self._known or (await _matches_apart(password, hashed) and there)
        finally:
            self._waiting -= Counter((peer,))  # which forgets it at 0
        if right:
            if len(self._known) >= LOGINS_KNOWN:
                self._known.clear()
            self._known[mark] = None
        return right

    def _digest(self, what: bytes) -> bytes:
        return hmac.digest(self._key, what, "sha256")


def _expect_no_less(path: Path, former: WebConfig, told: WebConfig) -> None:
    """A file that was emptied or cut off, as on a full disk, is good YAML too. Raises BadConfig."""
    if (told.tls_server_config is None) != (former.tls_server_config is None):
        raise BadConfig(f"{path}: TLS is switched on and off only by a new start")
    if former.logins and not told.logins:
        raise BadConfig(f"{path}: it asks for no login any more, and logins are switched off only by a new start")
    if former.clients_checked and not told.clients_checked:
        raise BadConfig(
            f"{path}: it asks for no certificate of clients any more, and those are switched off only by a new start"
        )


async def _matches_apart(password: bytes, hashed: str) -> bool:
    """In a thread that ends with it: those of the event loop draw panels and write logs, and none is left to be closed
    with the listener."""
    thread = ThreadPoolExecutor(1, "login")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, _matches, password, hashed)
    finally:
        thread.shutdown(wait=False)


def _matches(password: bytes, hashed: str) -> bool:
    import bcrypt  # a process without users does without

    return len(password) <= BCRYPT_BYTES and bcrypt.checkpw(password, hashed.encode())


def stamp(path: Path) -> Stamp:
    """Tells one state of a file from another, also where it is a link that is turned to another file, as Kubernetes
    does."""
    try:
        it = path.stat()
    except (OSError, ValueError):  # the second for a name that cannot be one
        return None
    return it.st_mtime_ns, it.st_ctime_ns, it.st_size, it.st_ino


def _files(path: Path, tls: Tls) -> list[Path]:
    return [path.parent / name for name in (tls.cert_file, tls.key_file, tls.client_ca_file) if name]


def _context(path: Path, tls: Tls) -> ssl.SSLContext:
    """Raises BadConfig that names the file and the field."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}[tls.min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    cert, key = (
        _named(path, field, name) for field, name in (("cert_file", tls.cert_file), ("key_file", tls.key_file))
    )
    try:
        context.load_cert_chain(cert, key, password=no_password)
    except (OSError, ValueError) as error:  # SSLError is one
        raise BadConfig(f"{path}: tls_server_config: {cert} and {key} cannot be used: {why(error)}") from None
    if tls.client_ca_file:
        authority = _named(path, "client_ca_file", tls.client_ca_file)
        try:
            context.load_verify_locations(authority)
        except (OSError, ValueError) as error:
            raise BadConfig(
                f"{path}: tls_server_config.client_ca_file: {authority} cannot be used: {why(error)}"
            ) from None
        context.verify_mode = (
            ssl.CERT_REQUIRED if tls.client_auth_type == "RequireAndVerifyClientCert" else ssl.CERT_OPTIONAL
        )
    return context


def no_password() -> str:
    """In place of a question on the terminal. Raises ValueError."""
    raise ValueError("the key is encrypted, and nobody is there to type its password")


def _named(path: Path, field: str, name: str) -> Path:
    """A file that the configuration names, if it can be read; ssl's own errors do not say which one it was."""
    found = path.parent / name
    try:
        with found.open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path}: tls_server_config.{field}: {found} cannot be read: {why(error)}") from None
    return found


_REASONS = {
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no certificate in PEM",
    "NO_START_LINE": "it holds nothing in PEM",
    "PEM_LIB": "it is no PEM, or not a key",
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS; is it http and not https?",
    "RECORD_LAYER_FAILURE": "the other side does not speak TLS; is it http and not https?",
}


def why(error: Exception) -> str:
    """What TLS has to say, in words; never the content of a file."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "PEM_LIB"
        return _REASONS.get(reason, reason.lower().replace("_", " "))
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
