"""How we ask others: Prometheus' own http_config file, the one that promtool and amtool take with --http.config.file.

Laws: secrets are in files of their own, and no message repeats one. The files are looked at before each request, and
read again when one of them is
another: a password or certificate that was replaced holds at once."""

from __future__ import annotations

import base64
import os
import ssl
from pathlib import Path
from typing import Any

import msgspec

from exporters import config
from exporters.config import BadConfig
from exporters.net.listener_auth import Stamp, no_password, stamp, why


class Authorization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """credentials_file: a token, after `type` in the header."""

    type: str = "Bearer"
    credentials_file: str = ""
    credentials: Any = None

    def __post_init__(self) -> None:
        if self.credentials is not None:
            raise ValueError(
                "credentials have no place in this file; put them into one of their own, and its path into"
                " credentials_file"
            )
        if not self.credentials_file:
            raise ValueError("credentials_file is missing")
        if self.type.lower() == "basic" or not self.type.isalnum():
            raise ValueError("type is none that is known here; it is Bearer, and a login with a password is basic_auth")


class BasicAuth(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A user, and the file with the password on one line."""

    username: str
    password_file: str = ""
    password: Any = None

    def __post_init__(self) -> None:
        if self.password is not None:
            raise ValueError(
                "a password has no place in this file; put it into one of its own, and its path into password_file"
            )
        if not self.password_file:
            raise ValueError("password_file is missing")
        if not self.username or ":" in self.username:
            raise ValueError("username has at least one letter and no colon")


class TlsClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """ca_file: who signed the server's certificate, where the system does not know it. server_name: what that
    certificate is made out to, where the address names something else. There is no way not to check it."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    min_version: str = "TLS12"

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together")
        if self.min_version not in ("TLS12", "TLS13"):
            raise ValueError(f"min_version is TLS12 or TLS13, not {self.min_version}")


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file. Paths are relative to where it stands."""

    authorization: Authorization | None = None
    basic_auth: BasicAuth | None = None
    tls_config: TlsClient | None = None

    def __post_init__(self) -> None:
        if self.authorization and self.basic_auth:
            raise ValueError("authorization and basic_auth exclude each other: a request has one header for them")


class HttpClientConfig:
    """How somebody is asked, by an http_config file. Raises BadConfig for a mistake, when it is made and when it is
    used."""

    def __init__(self, path: Path, setting: str = "--http-config") -> None:
        self.path = path
        self._setting = setting
        # each file that was read, as it was before that; none after a mistake, so that the next one looks again
        self._seen: dict[Path, Stamp] = {}
        self._asked: dict[str, Any] = {}
        self.now()

    def now(self) -> dict[str, Any]:
        """Arguments of a request of aiohttp: headers, ssl and server_hostname, by the files as they are now."""
        if not self._seen or any(stamp(path) != was for path, was in self._seen.items()):
            seen = {self.path: stamp(self.path)}
            try:
                told = config.load(self.path, HttpConfig)
                seen |= {path: stamp(path) for name in _names(told) for path in [self.path.parent / name]}
                self._asked, self._seen = self._made(told), seen
            except BadConfig as error:
                self._seen = {}
                raise BadConfig(f"{self._setting}: {error}") from None
        return self._asked

    def _made(self, told: HttpConfig) -> dict[str, Any]:
        tls, asked = told.tls_config, dict[str, Any]()
        if header := self._header(told):
            asked["headers"] = {"Authorization": header}
        if tls is not None:
            folder = self.path.parent
            pair = (folder / tls.cert_file, folder / tls.key_file) if tls.cert_file and tls.key_file else None
            asked["ssl"] = client_ssl_context(
                folder / tls.ca_file if tls.ca_file else None, f"{self.path}: tls_config", pair
            )
            if tls.min_version == "TLS13":
                asked["ssl"].minimum_version = ssl.TLSVersion.TLSv1_3
            if tls.server_name:
                asked["server_hostname"] = tls.server_name
        return asked

    def _header(self, told: HttpConfig) -> str:
        if told.authorization:
            return (
                f"{told.authorization.type}"
                f" {self._secret('authorization.credentials_file', told.authorization.credentials_file)}"
            )
        if told.basic_auth:
            login = (
                f"{told.basic_auth.username}:{self._secret('basic_auth.password_file', told.basic_auth.password_file)}"
            )
            return f"Basic {base64.b64encode(login.encode()).decode()}"
        return ""

    def _secret(self, field: str, name: str) -> str:
        path = self.path.parent / name
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            told = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else why(error)
            raise BadConfig(f"{self.path}: {field}: {path} cannot be read: {told}") from None
        if not secret or not secret.isprintable():
            raise BadConfig(f"{self.path}: {field}: {path} holds no secret; write it on one line")
        if field.startswith("authorization") and not secret.isascii():
            raise BadConfig(f"{self.path}: {field}: {path} holds letters that no header can carry")
        return secret


def request_options(way: HttpClientConfig | None) -> dict[str, Any]:
    """The same for those who may have no such file."""
    return {} if way is None else way.now()


def _names(told: HttpConfig) -> list[str]:
    tls = told.tls_config
    named = [tls.ca_file, tls.cert_file, tls.key_file] if tls else []
    named += [told.authorization.credentials_file] if told.authorization else []
    named += [told.basic_auth.password_file] if told.basic_auth else []
    return [name for name in named if name]


def client_ssl_context(ca_file: Path | None, setting: str, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """A client's TLS: this authority, or those that the system trusts; with a certificate of its own where one is asked
    for. Raises BadConfig."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise BadConfig(f"{setting}: ca_file: {ca_file} cannot be used: {why(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if pair:
        try:
            context.load_cert_chain(*pair, password=no_password)
        except (OSError, ValueError) as error:
            raise BadConfig(f"{setting}: {pair[0]} and {pair[1]} cannot be used: {why(error)}") from None
    return context


def describe_error(error: BaseException) -> str:
    """Why a request of aiohttp's client got no answer, without its address, which the sentence around it has; empty
    where nothing is known."""
    for cause in (getattr(error, "certificate_error", None), getattr(error, "os_error", None), error):
        if isinstance(cause, ssl.SSLError):
            return why(cause)
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno)  # asyncio's own words repeat the address
    return getattr(error, "strerror", None) or ""
