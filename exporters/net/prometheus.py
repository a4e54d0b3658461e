"""Client of a Prometheus or an API-compatible server. At most four concurrent queries, for any number of viewers."""

from __future__ import annotations

import asyncio
import math
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec
import yaml

from exporters.config import BadConfig
from exporters.net.bounded_read import ResponseTooLarge, read_bounded
from exporters.net.http_client import HttpClientConfig, describe_error, request_options
from exporters.text import parse_duration

AT_ONCE = 4
TIMEOUT_S = 30.0
CONNECT_S = 5.0
DOWN_S = 2.0  # pause after a connection failure, so that a dozen panels do not wait for the same timeout in turn
LARGEST_ANSWER = 12 << 20  # a larger response blocks the decoder noticeably for others
DEFAULT_SCRAPE_S = 15.0
_TOO_LARGE = 413
_NO_SUCH_PAGE = (401, 403, 404, 405, 501, _TOO_LARGE)  # Thanos and others do not expose their configuration


T = TypeVar("T")


class PrometheusError(Exception):
    """Failed request, described in one sentence. status: HTTP status; 0 without a response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class TimeRange(Protocol):
    """Range of a query: unix seconds, and the step between points."""

    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...


class QuerySeries(msgspec.Struct, frozen=True):
    """One series of a result: values of a range query, or the value of an instant one.

    Times in unix seconds, values as text."""

    metric: dict[str, str] = msgspec.field(default_factory=dict)
    values: list[tuple[float, str]] = msgspec.field(default_factory=list)
    value: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Result of one query: series or an error. notes: warnings and infos of Prometheus."""

    series: Sequence[QuerySeries] = ()
    error: str = ""
    notes: tuple[str, ...] = ()


class Target(msgspec.Struct):
    """Scrape target. health: up, down or unknown."""

    labels: dict[str, str]
    health: str


class _Targets(msgspec.Struct, rename="camel"):
    active_targets: list[Target]


class PendingAlert(msgspec.Struct):
    """Alert of a rule. state: pending or firing."""

    labels: dict[str, str]
    state: str


class _Alerts(msgspec.Struct):
    alerts: list[PendingAlert]


class _Data(msgspec.Struct, rename="camel"):
    result: msgspec.Raw = msgspec.Raw(b"[]")
    result_type: str = ""


class _Reply(msgspec.Struct):
    status: str = "error"
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    warnings: list[str] = []
    infos: list[str] = []


@dataclass(frozen=True, slots=True)
class Address:
    """URL and credentials of a Prometheus. shown: URL without credentials."""

    url: str
    shown: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    http_config: HttpClientConfig | None = field(default=None, repr=False)


def address(url: str, token: str = "", login: str = "") -> Address:
    """Parse a user-supplied URL such as http://host:9090/prefix.

    login: user:password. Raises ValueError for an invalid URL, or one that contains credentials."""
    if "@" in url:  # anywhere: a slash in the password moves it into the path
        raise ValueError(
            "a password in the URL is visible to every user of this machine; put user:password into a file for"
            " --user-file (and write %40 for an @ in the path)"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("--prometheus is no valid URL or port; write it like http://127.0.0.1:9090") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is no address of a Prometheus; write it like http://127.0.0.1:9090")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    plain = urlunsplit((parts.scheme, f"{host}:{port}" if port else host, parts.path.rstrip("/"), "", ""))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if login:
        headers = {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}
    return Address(plain, plain, headers)


def address_from(
    url: str, token_file: Path | None = None, user_file: Path | None = None, http_config: Path | None = None
) -> Address:
    """Return the address from a command's options. Raises ValueError, BadConfig or OSError without file contents."""
    if sum(one is not None for one in (token_file, user_file, http_config)) > 1:
        raise ValueError("use only one of --token-file, --user-file and --http-config")
    if http_config:
        return replace(address(url), http_config=HttpClientConfig(http_config))
    token = token_file.read_text(encoding="utf-8", errors="replace").strip() if token_file else ""
    if token_file and (not token or not token.isprintable() or not token.isascii()):
        raise ValueError(f"{token_file} holds no token: one line of text is expected")
    login = user_file.read_text(encoding="utf-8", errors="replace").strip("\r\n") if user_file else ""
    if user_file and (":" not in login or not login.isprintable() or "\ufffd" in login):
        raise ValueError(f"{user_file} holds no line user:password")
    return address(url, token, login)


class Prometheus:
    """Client, used as an async context manager. timeout_s: limit of one response."""

    def __init__(
        self,
        where: Address,
        scrape_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.where = where
        self._timeout_s = timeout_s
        self._scrape_s = scrape_s
        self._clock = clock
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._first = asyncio.Lock()  # the first caller reads the scrape interval for all
        self._down: tuple[float, str] | None = None  # (end of the pause, error until then)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, connect=CONNECT_S)
        self._session = aiohttp.ClientSession(headers=self.where.headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session:
            await self._session.close()

    async def over_time(self, expr: str, over: TimeRange) -> QueryResult:
        """Run a range query; an error is returned in the result."""
        form = {"query": expr, "start": f"{over.start_s:.3f}", "end": f"{over.end_s:.3f}", "step": f"{over.step_s:.3f}"}
        return await self._answer("query_range", form)

    async def as_of(self, expr: str, at_s: float | None = None) -> QueryResult:
        """Run an instant query, at the current time by default."""
        return await self._answer("query", {"query": expr} | ({} if at_s is None else {"time": f"{at_s:.3f}"}))

    async def value(self, expr: str) -> float | None:
        """Return the first value of an instant query; None for an empty result, NaN, infinity or an error."""
        first = next(iter((await self.as_of(expr)).series), QuerySeries())
        value = float(first.value[1]) if first.value else math.nan
        return value if math.isfinite(value) else None

    async def label_values(self, label: str, selector: str, start_s: float, end_s: float) -> list[str]:
        """Return the values of a label. Raises PrometheusError."""
        query = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}"} | ({"match[]": selector} if selector else {})
        return await self._decoded(f"label/{label}/values", query, list[str])

    async def targets(self) -> list[Target]:
        """Return the active targets. Raises PrometheusError."""
        return (await self._decoded("targets", {"state": "active"}, _Targets)).active_targets

    async def alerts(self) -> list[PendingAlert]:
        """Return pending and firing alerts. Raises PrometheusError."""
        return (await self._decoded("alerts", {}, _Alerts)).alerts

    async def delete_series(self, selector: str) -> bool:
        """Delete series; return False if the admin API is off. Raises PrometheusError."""
        return (await self._exchange("POST", "admin/tsdb/delete_series", {"match[]": selector}))[0] == 204

    async def _decoded(self, path: str, query: Mapping[str, str], kind: type[T]) -> T:
        data = (await self._ask("GET", path, query)).data
        try:
            return await asyncio.to_thread(msgspec.json.decode, data, type=kind)
        except msgspec.MsgspecError as error:
            raise PrometheusError(f"{self.where.shown} does not answer like a Prometheus ({error})") from None

    async def scrape_s(self) -> float:
        """Return the scrape interval: as given, else from Prometheus' configuration, else 15 s.

        Raises PrometheusError if Prometheus does not respond; the next call tries again."""
        async with self._first:
            if self._scrape_s is None:
                try:
                    reply = await self._ask("GET", "status/config", {})
                    self._scrape_s = await asyncio.to_thread(_interval_s, reply.data)
                except PrometheusError as error:
                    if error.status in _NO_SUCH_PAGE:
                        self._scrape_s = DEFAULT_SCRAPE_S
                    # too many requests, or another server's form of 404: use the default for now
                    elif 400 <= error.status < 500:
                        return DEFAULT_SCRAPE_S
                    else:
                        self._remember(str(error))
                        raise
            return self._scrape_s

    def _remember(self, message: str) -> None:
        if not self._down or self._clock() >= self._down[0]:  # a repeated error does not extend the pause
            self._down = (self._clock() + DOWN_S, message)

    async def _answer(self, path: str, form: Mapping[str, str]) -> QueryResult:
        try:
            reply = await self._ask("POST", path, form)
            return QueryResult(await asyncio.to_thread(_series, reply.data), notes=(*reply.warnings, *reply.infos))
        except PrometheusError as error:
            return QueryResult(error=str(error))
        except msgspec.MsgspecError as error:
            return QueryResult(error=f"{self.where.shown} does not answer like a Prometheus ({error})")

    async def _ask(self, method: str, path: str, form: Mapping[str, str]) -> _Reply:
        """Return a successful response. Raises PrometheusError with the server's message or the HTTP status."""
        status, body = await self._exchange(method, path, form)
        try:
            reply = await asyncio.to_thread(msgspec.json.decode, body, type=_Reply)
        except msgspec.MsgspecError:
            if status >= 500:
                raise PrometheusError(
                    f"Prometheus at {self.where.shown} answers HTTP {status}: it is starting, or in trouble", status
                ) from None
            hint = _hint(status, body)
            raise PrometheusError(
                f"{self.where.shown} answers HTTP {status} and not like a Prometheus{hint}", status
            ) from None
        if reply.status != "success":
            raise PrometheusError(reply.error or f"{self.where.shown} answers HTTP {status}", status)
        return reply

    async def _exchange(self, method: str, path: str, form: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of a request. Raises PrometheusError for no response or an incomplete one."""
        if self._session is None:
            raise RuntimeError("use Prometheus as an async context manager")
        url = f"{self.where.url}/api/v1/{path}"
        given: Any = {"data": form} if method == "POST" else {"params": form}
        try:
            async with self._turn:
                if self._down and self._clock() < self._down[0]:
                    raise PrometheusError(self._down[1])
                async with self._session.request(
                    method, url, allow_redirects=False, **given, **request_options(self.where.http_config)
                ) as response:
                    return response.status, await read_bounded(response, LARGEST_ANSWER)
        except BadConfig as error:
            raise PrometheusError(str(error)) from None
        except aiohttp.ClientConnectionError as error:  # before TimeoutError: a connection timeout is both
            message = (
                f"Prometheus at {self.where.shown} does not answer ({_plain(error)}); is it up, and --prometheus right?"
            )
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                self._remember(message)
            raise PrometheusError(message) from None
        except TimeoutError:
            raise PrometheusError(
                f"Prometheus at {self.where.shown} took longer than {self._timeout_s:.0f} s; choose a shorter range"
            ) from None
        except ResponseTooLarge:
            message = f"the answer is larger than {LARGEST_ANSWER >> 20} MiB; choose a shorter range or fewer series"
            raise PrometheusError(message, _TOO_LARGE) from None
        except aiohttp.ClientError as error:
            raise PrometheusError(f"Prometheus at {self.where.shown} broke off its answer ({_plain(error)})") from None


def _series(reply: msgspec.Raw) -> list[QuerySeries]:
    data = msgspec.json.decode(reply, type=_Data)
    if data.result_type == "scalar":
        return [QuerySeries(value=msgspec.json.decode(data.result, type=tuple[float, str]))]
    return msgspec.json.decode(data.result, type=list[QuerySeries])


def _plain(error: Exception) -> str:
    """Describe an error without the URL, which the surrounding message has."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_S:.0f} s"
    return describe_error(error) or type(error).__name__


def _hint(status: int, body: bytes) -> str:
    if status in (401, 403):
        return "; credentials required: --http-config, --user-file or --token-file"
    if b"HTTP request to an HTTPS server" in body:  # message of Go's HTTP server
        return "; it speaks TLS: write https://"
    return "; is this its address?"


def _interval_s(config: msgspec.Raw) -> float:
    """Return the scrape interval of a configuration; the default if missing or invalid."""
    try:
        settings: Any = yaml.safe_load(msgspec.json.decode(config, type=dict[str, str])["yaml"])
        return parse_duration(settings["global"]["scrape_interval"])
    except (msgspec.MsgspecError, yaml.YAMLError, LookupError, TypeError, ValueError):
        return DEFAULT_SCRAPE_S
