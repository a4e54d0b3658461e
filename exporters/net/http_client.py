"""HTTP client configuration in Prometheus' http_config format, as for promtool's and amtool's --http.config.file.

Invariants: secrets are in separate files, and no message repeats one. Files are checked before each request and
reread when changed, so that a new password or certificate applies at once."""

from __future__ import annotations

import base64
import os
import ssl
from pathlib import Path
from typing import Any

import msgspec

from exporters import config
from exporters.config import BadConfig
from exporters.net.listener_auth import Stamp, describe_tls_error, no_password, stamp


class Authorization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Authorization header. credentials_file: a token, sent after `type`."""

    type: str = "Bearer"
    credentials_file: str = ""
    credentials: Any = None

    def __post_init__(self) -> None:
        if self.credentials is not None:
            raise ValueError(
                "credentials have no place in this file; put them into a separate file and its path into"
                " credentials_file"
            )
        if not self.credentials_file:
            raise ValueError("credentials_file is missing")
        if self.type.lower() == "basic" or not self.type.isalnum():
            raise ValueError("type must be Bearer; for a user and password use basic_auth")


class BasicAuth(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """User name, and the file with the password on one line."""

    username: str
    password_file: str = ""
    password: Any = None

    def __post_init__(self) -> None:
        if self.password is not None:
            raise ValueError(
                "a password has no place in this file; put it into a separate file and its path into password_file"
            )
        if not self.password_file:
            raise ValueError("password_file is missing")
        if not self.username or ":" in self.username:
            raise ValueError("username must not be empty or contain a colon")


class TlsClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS settings; verification cannot be disabled.

    ca_file: CA of the server's certificate, if the system does not have it. server_name: name in that certificate,
    if it differs from the URL."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    min_version: str = "TLS12"

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file must both be set")
        if self.min_version not in ("TLS12", "TLS13"):
            raise ValueError(f"min_version must be TLS12 or TLS13, not {self.min_version}")


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of the file. Paths are relative to its folder."""

    authorization: Authorization | None = None
    basic_auth: BasicAuth | None = None
    tls_config: TlsClient | None = None

    def __post_init__(self) -> None:
        if self.authorization and self.basic_auth:
            raise ValueError("authorization and basic_auth exclude each other: a request has one header for them")


class HttpClientConfig:
    """Request options from an http_config file, kept current. Raises BadConfig for a mistake, at start and at use."""

    def __init__(self, path: Path, setting: str = "--http-config") -> None:
        self.path = path
        self._setting = setting
        # stamps of the files, taken before reading; empty after a mistake, so that the next request reads again
        self._stamps: dict[Path, Stamp] = {}
        self._options: dict[str, Any] = {}
        self.current_options()

    def current_options(self) -> dict[str, Any]:
        """Return current arguments for an aiohttp request: headers, ssl and server_hostname."""
        if not self._stamps or any(stamp(path) != was for path, was in self._stamps.items()):
            stamps = {self.path: stamp(self.path)}
            try:
                settings = config.load(self.path, HttpConfig)
                stamps |= {path: stamp(path) for name in _names(settings) for path in [self.path.parent / name]}
                self._options, self._stamps = self._request_options(settings), stamps
            except BadConfig as error:
                self._stamps = {}
                raise BadConfig(f"{self._setting}: {error}") from None
        return self._options

    def _request_options(self, settings: HttpConfig) -> dict[str, Any]:
        tls, options = settings.tls_config, dict[str, Any]()
        if header := self._header(settings):
            options["headers"] = {"Authorization": header}
        if tls is not None:
            folder = self.path.parent
            pair = (folder / tls.cert_file, folder / tls.key_file) if tls.cert_file and tls.key_file else None
            options["ssl"] = client_ssl_context(
                folder / tls.ca_file if tls.ca_file else None, f"{self.path}: tls_config", pair
            )
            if tls.min_version == "TLS13":
                options["ssl"].minimum_version = ssl.TLSVersion.TLSv1_3
            if tls.server_name:
                options["server_hostname"] = tls.server_name
        return options

    def _header(self, settings: HttpConfig) -> str:
        if settings.authorization:
            return (
                f"{settings.authorization.type}"
                f" {self._secret('authorization.credentials_file', settings.authorization.credentials_file)}"
            )
        if settings.basic_auth:
            password = self._secret("basic_auth.password_file", settings.basic_auth.password_file)
            login = f"{settings.basic_auth.username}:{password}"
            return f"Basic {base64.b64encode(login.encode()).decode()}"
        return ""

    def _secret(self, field: str, name: str) -> str:
        path = self.path.parent / name
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            settings = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else describe_tls_error(error)
            raise BadConfig(f"{self.path}: {field}: {path} cannot be read: {settings}") from None
        if not secret or not secret.isprintable():
            raise BadConfig(f"{self.path}: {field}: {path} holds no secret; write it on one line")
        if field.startswith("authorization") and not secret.isascii():
            raise BadConfig(f"{self.path}: {field}: {path} holds letters that no header can carry")
        return secret


def request_options(http_config: HttpClientConfig | None) -> dict[str, Any]:
    """Return current request options, empty without a configuration."""
    return {} if http_config is None else http_config.current_options()


def _names(settings: HttpConfig) -> list[str]:
    tls = settings.tls_config
    file_names = [tls.ca_file, tls.cert_file, tls.key_file] if tls else []
    file_names += [settings.authorization.credentials_file] if settings.authorization else []
    file_names += [settings.basic_auth.password_file] if settings.basic_auth else []
    return [name for name in file_names if name]


def client_ssl_context(ca_file: Path | None, setting: str, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """Return a client TLS context for this CA or the system's, with a client certificate if given. Raises BadConfig."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise BadConfig(f"{setting}: ca_file: {ca_file} cannot be used: {describe_tls_error(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if pair:
        try:
            context.load_cert_chain(*pair, password=no_password)
        except (OSError, ValueError) as error:
            raise BadConfig(f"{setting}: {pair[0]} and {pair[1]} cannot be used: {describe_tls_error(error)}") from None
    return context


def describe_error(error: BaseException) -> str:
    """Return why an aiohttp request failed, without its URL, which the caller's message has; empty if unknown."""
    for cause in (getattr(error, "certificate_error", None), getattr(error, "os_error", None), error):
        if isinstance(cause, ssl.SSLError):
            return describe_tls_error(cause)
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno)  # asyncio's message repeats the address
    return getattr(error, "strerror", None) or ""
