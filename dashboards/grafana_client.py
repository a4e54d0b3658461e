"""HTTP client of a Grafana: address, authorization, one request at a time, error messages.

No redirect is followed and no write is ever tried twice."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

TOKEN_VARIABLE = "GRAFANA_TOKEN"  # noqa: S105 the name of the variable
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 32 << 20
_WHERE_TOKENS = "Administration > Users and access > Service accounts"


class GrafanaTrouble(ValueError):
    """Grafana cannot be used as it was asked to; the message says where, and the way out."""


def address(url: str) -> str:
    """Return the address of Grafana, without a slash at the end. Raises GrafanaTrouble for what is no address, or holds
    a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise GrafanaTrouble(f"{url.rpartition('@')[2]!r} is no address; write it like http://127.0.0.1:3000")
    if "@" in parts.netloc:
        raise GrafanaTrouble(
            "a password in the address can be read by everyone on this machine; put user:password into a file for"
            " --user-file"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def authorization(
    token_file: Path | None, user_file: Path | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The header's value, from the file that was named, else from the environment. Raises GrafanaTrouble without
    showing what it read."""
    if token_file and user_file:
        raise GrafanaTrouble("name either --token-file or --user-file")
    if user_file:
        pair = user_file.read_text(encoding="utf-8").strip("\r\n")
        if ":" not in pair or "\n" in pair:
            raise GrafanaTrouble(f"{user_file} holds no line user:password")
        return "Basic " + base64.b64encode(pair.encode()).decode()
    token = token_file.read_text(encoding="utf-8").strip() if token_file else environ.get(TOKEN_VARIABLE, "").strip()
    if token_file and not token:
        raise GrafanaTrouble(f"{token_file} is empty; a token comes from {_WHERE_TOKENS}")
    if not re.fullmatch(r"[!-~]*", token):
        raise GrafanaTrouble(f"{token_file or TOKEN_VARIABLE} holds more than one word; it must hold the token alone")
    return f"Bearer {token}" if token else None


@dataclass(frozen=True, slots=True)
class GrafanaAnswer:
    """body is None where the answer was no JSON."""

    status: int
    body: Any

    @property
    def says(self) -> str:
        """Grafana's own words, if it had any."""
        message = self.body.get("message") if isinstance(self.body, dict) else None
        return str(message)[:300] if message else ""

    @property
    def data(self) -> dict[str, Any]:
        return self.body if isinstance(self.body, dict) else {}


class _Stay(urllib.request.HTTPRedirectHandler):
    """Report redirects and do not follow them: a write would arrive as a read, and the token at another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class GrafanaClient:
    """One Grafana. Raises GrafanaTrouble whenever what answers is not a Grafana that accepts us."""

    def __init__(self, url: str, authorization: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = address(url)
        self._headers = {"Accept": "application/json"} | ({"Authorization": authorization} if authorization else {})
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_Stay)

    def ask(self, method: str, path: str, body: Any = None, **query: str) -> GrafanaAnswer:
        """One request, and what came back as long as Grafana itself said it: also 403, 404, 409, 412."""
        url = self.url + path + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 address() lets http and https pass
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                status, raw, location = response.status, response.read(MAX_ANSWER_BYTES), ""
        except urllib.error.HTTPError as error:
            with error:
                status, raw, location = error.code, error.read(MAX_ANSWER_BYTES), error.headers.get("Location") or ""
        except urllib.error.URLError as error:
            raise GrafanaTrouble(self._unreached(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise GrafanaTrouble(self._unreached(error)) from error
        return self._answer(method, path, status, raw, location)

    def _answer(self, method: str, path: str, status: int, raw: bytes, location: str) -> GrafanaAnswer:
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if 300 <= status < 400:
            raise GrafanaTrouble(self._redirected(path, location))
        if status == 401:
            raise GrafanaTrouble(self._not_known())
        if status == 400 and b"HTTPS server" in raw:
            raise GrafanaTrouble(f"{self.url} speaks TLS: write https://")
        if status >= 500 and body is None:
            raise GrafanaTrouble(
                f"{self.url} answers {status} to {method} {path}: Grafana, or the proxy before it, is not in order; try"
                " again later"
            )
        return GrafanaAnswer(status, body)

    def _not_known(self) -> str:
        if "Authorization" in self._headers:
            return (
                f"{self.url} does not accept this token or password: it may have expired; make a new one under"
                f" {_WHERE_TOKENS}"
            )
        return (
            f"{self.url} wants to know who asks: set {TOKEN_VARIABLE}, or name a --token-file; a token comes from"
            f" {_WHERE_TOKENS}"
        )

    def _redirected(self, path: str, location: str) -> str:
        to = urlsplit(location)
        if to.path.rstrip("/").endswith("/login"):
            return self._not_known()
        if to.netloc and to.path.endswith(path):
            return (
                f"{self.url} sends us elsewhere; name that address: --grafana"
                f" {to.scheme}://{to.netloc}{to.path.removesuffix(path)}"
            )
        seen = f"{to.scheme}://{to.netloc}{to.path}" if to.netloc else to.path
        return (
            f"{self.url} sends {path} to {seen}: name the address at which Grafana itself answers, with its path if it"
            " has one"
        )

    def _unreached(self, why: object) -> str:
        if isinstance(why, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.url} cannot be trusted: {why.verify_message}; "
                "for an authority of your own set SSL_CERT_FILE to its certificate"
            )
        if isinstance(why, ssl.SSLError):
            return (
                f"{self.url} does not speak TLS ({why.reason or 'no handshake'}); if it serves plain HTTP write http://"
            )
        if isinstance(why, TimeoutError):
            return f"{self.url} did not answer within {self._timeout_s:g} s; is it up, and may this machine reach it?"
        reason = why.strerror if isinstance(why, OSError) and why.strerror else why
        return f"{self.url} cannot be reached: {reason}; is the address right, and is Grafana up?"


def refused(answer: GrafanaAnswer, doing: str, permission: str) -> GrafanaTrouble:
    """Return why Grafana refused, with the way out where there is one."""
    said = f" ({answer.says})" if answer.says else ""
    if answer.status == 403:
        return GrafanaTrouble(
            f"not allowed {doing}{said}: give the service account the permission {permission}; the role Editor has it"
        )
    if answer.body is None:
        return GrafanaTrouble(
            f"Grafana answered {answer.status} without JSON when asked {doing}: most likely a proxy before it"
        )
    return GrafanaTrouble(f"Grafana answered {answer.status} when asked {doing}{said}")
