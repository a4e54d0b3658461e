"""Client of a Prometheus, or of what speaks its API. At most four questions at a time, whoever looks at how many
pages."""

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
DOWN_S = 2.0  # for so long nobody is asked again: a dozen panels must not wait for the same silence one after the other
LARGEST_ANSWER = 12 << 20  # a larger one takes the decoder so long that other pages notice
DEFAULT_SCRAPE_S = 15.0
_TOO_LARGE = 413
_NO_SUCH_PAGE = (401, 403, 404, 405, 501, _TOO_LARGE)  # Thanos and others do not show their configuration, or not to us


T = TypeVar("T")


class PrometheusError(Exception):
    """Prometheus, or its absence, in one sentence. status: of HTTP; 0 where there was none."""

    def __init__(self, told: str, status: int = 0) -> None:
        super().__init__(told)
        self.status = status


class TimeRange(Protocol):
    """The range of a query: unix seconds, and the step between points."""

    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...


class QuerySeries(msgspec.Struct, frozen=True):
    """One series of an answer: values of a range query, the value of an instant one; times in unix seconds, figures as
    text."""

    metric: dict[str, str] = msgspec.field(default_factory=dict)
    values: list[tuple[float, str]] = msgspec.field(default_factory=list)
    value: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What one query came back with: its series, or why not. notes: what Prometheus warns of or informs about beside
    its answer."""

    series: Sequence[QuerySeries] = ()
    error: str = ""
    notes: tuple[str, ...] = ()


class Target(msgspec.Struct):
    """What Prometheus scrapes. health: up, down or unknown."""

    labels: dict[str, str]
    health: str


class _Targets(msgspec.Struct, rename="camel"):
    active_targets: list[Target]


class PendingAlert(msgspec.Struct):
    """An alert of a rule. state: pending or firing."""

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
    """Where Prometheus is, and how to be let in. shown: without credentials."""

    url: str
    shown: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    way: HttpClientConfig | None = field(default=None, repr=False)


def address(url: str, token: str = "", login: str = "") -> Address:
    """From what a person types: http://host:9090/prefix. login: user:password. Raises ValueError for what is no
    address, or holds a login."""
    if "@" in url:  # anywhere: with a slash in the password it stands in what is read as the path
        raise ValueError(
            "a password in the address can be read by everyone on this machine; put user:password into a file for"
            " --user-file (and write %40 for an @ that belongs to the path)"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(
            "--prometheus is no address, or its port no number; write it like http://127.0.0.1:9090"
        ) from None
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
    """From the options of a command. Raises ValueError, BadConfig or OSError, without showing what a file holds."""
    if sum(one is not None for one in (token_file, user_file, http_config)) > 1:
        raise ValueError("name either --token-file or --user-file, or --http-config, which says the same and more")
    if http_config:
        return replace(address(url), way=HttpClientConfig(http_config))
    token = token_file.read_text(encoding="utf-8", errors="replace").strip() if token_file else ""
    if token_file and (not token or not token.isprintable() or not token.isascii()):
        raise ValueError(f"{token_file} holds no token: one line of text is expected")
    login = user_file.read_text(encoding="utf-8", errors="replace").strip("\r\n") if user_file else ""
    if user_file and (":" not in login or not login.isprintable() or "\ufffd" in login):
        raise ValueError(f"{user_file} holds no line user:password")
    return address(url, token, login)


class Prometheus:
    """A Prometheus, or what speaks its language. Use it as an async context. timeout_s: how long one answer may
    take."""

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
        self._first = asyncio.Lock()  # whoever comes first asks for the scrape interval, and for all
        self._down: tuple[float, str] | None = None  # until when, and what is said meanwhile
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
        """A range query; a refusal is an answer too."""
        form = {"query": expr, "start": f"{over.start_s:.3f}", "end": f"{over.end_s:.3f}", "step": f"{over.step_s:.3f}"}
        return await self._answer("query_range", form)

    async def as_of(self, expr: str, at_s: float | None = None) -> QueryResult:
        """An instant query, of now where no time is given."""
        return await self._answer("query", {"query": expr} | ({} if at_s is None else {"time": f"{at_s:.3f}"}))

    async def value(self, expr: str) -> float | None:
        """Return the first value of an instant query; None for an empty answer, NaN, infinity or a refusal."""
        first = next(iter((await self.as_of(expr)).series), QuerySeries())
        value = float(first.value[1]) if first.value else math.nan
        return value if math.isfinite(value) else None

    async def label_values(self, label: str, selector: str, start_s: float, end_s: float) -> list[str]:
        """Raises Refused."""
        query = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}"} | ({"match[]": selector} if selector else {})
        return await self._decoded(f"label/{label}/values", query, list[str])

    async def targets(self) -> list[Target]:
        """Return the active targets. Raises Refused."""
        return (await self._decoded("targets", {"state": "active"}, _Targets)).active_targets

    async def alerts(self) -> list[PendingAlert]:
        """Return the alerts that are pending or firing. Raises Refused."""
        return (await self._decoded("alerts", {}, _Alerts)).alerts

    async def delete_series(self, selector: str) -> bool:
        """Delete series; False where the admin API is off. Raises Refused."""
        return (await self._exchange("POST", "admin/tsdb/delete_series", {"match[]": selector}))[0] == 204

    async def _decoded(self, path: str, query: Mapping[str, str], kind: type[T]) -> T:
        data = (await self._ask("GET", path, query)).data
        try:
            return await asyncio.to_thread(msgspec.json.decode, data, type=kind)
        except msgspec.MsgspecError as error:
            raise PrometheusError(f"{self.where.shown} does not answer like a Prometheus ({error})") from None

    async def scrape_s(self) -> float:
        """The scrape interval: as given, else as Prometheus' configuration says it, else 15 s where it shows none.

        Raises Refused when nobody answers, or not yet; the next one who wants to know asks again."""
        async with self._first:
            if self._scrape_s is None:
                try:
                    reply = await self._ask("GET", "status/config", {})
                    self._scrape_s = await asyncio.to_thread(_interval_s, reply.data)
                except PrometheusError as error:
                    if error.status in _NO_SUCH_PAGE:
                        self._scrape_s = DEFAULT_SCRAPE_S
                    # too many questions, or a server with words of its own for no such page: for now
                    elif 400 <= error.status < 500:
                        return DEFAULT_SCRAPE_S
                    else:
                        self._remember(str(error))
                        raise
            return self._scrape_s

    def _remember(self, told: str) -> None:
        if not self._down or self._clock() >= self._down[0]:  # a failure that is told again lasts no longer for that
            self._down = (self._clock() + DOWN_S, told)

    async def _answer(self, path: str, form: Mapping[str, str]) -> QueryResult:
        try:
            reply = await self._ask("POST", path, form)
            return QueryResult(await asyncio.to_thread(_series, reply.data), notes=(*reply.warnings, *reply.infos))
        except PrometheusError as error:
            return QueryResult(error=str(error))
        except msgspec.MsgspecError as error:
            return QueryResult(error=f"{self.where.shown} does not answer like a Prometheus ({error})")

    async def _ask(self, method: str, path: str, form: Mapping[str, str]) -> _Reply:
        """An answer that succeeded. Raises Refused with the words of Prometheus, or with what came instead of them."""
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
        """Status and body of whatever answers there. Raises Refused where nothing does, or not whole."""
        if self._session is None:
            raise RuntimeError("a Prometheus is used as an async context")
        url = f"{self.where.url}/api/v1/{path}"
        given: Any = {"data": form} if method == "POST" else {"params": form}
        try:
            async with self._turn:
                if self._down and self._clock() < self._down[0]:
                    raise PrometheusError(self._down[1])
                async with self._session.request(
                    method, url, allow_redirects=False, **given, **request_options(self.where.way)
                ) as response:
                    return response.status, await read_bounded(response, LARGEST_ANSWER)
        except BadConfig as error:
            raise PrometheusError(str(error)) from None
        except aiohttp.ClientConnectionError as error:  # before TimeoutError: a connection that takes too long is both
            told = (
                f"Prometheus at {self.where.shown} does not answer ({_plain(error)}); is it up, and --prometheus right?"
            )
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                self._remember(told)
            raise PrometheusError(told) from None
        except TimeoutError:
            raise PrometheusError(
                f"Prometheus at {self.where.shown} took longer than {self._timeout_s:.0f} s; choose a shorter range"
            ) from None
        except ResponseTooLarge:
            told = f"the answer is larger than {LARGEST_ANSWER >> 20} MiB; choose a shorter range or fewer series"
            raise PrometheusError(told, _TOO_LARGE) from None
        except aiohttp.ClientError as error:
            raise PrometheusError(f"Prometheus at {self.where.shown} broke off its answer ({_plain(error)})") from None


def _series(reply: msgspec.Raw) -> list[QuerySeries]:
    data = msgspec.json.decode(reply, type=_Data)
    if data.result_type == "scalar":
        return [QuerySeries(value=msgspec.json.decode(data.result, type=tuple[float, str]))]
    return msgspec.json.decode(data.result, type=list[QuerySeries])


def _plain(error: Exception) -> str:
    """Without the address, which the sentence around it has already."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_S:.0f} s"
    return describe_error(error) or type(error).__name__


def _hint(status: int, body: bytes) -> str:
    if status in (401, 403):
        return "; it wants a login: --http-config, --user-file or --token-file"
    if b"HTTP request to an HTTPS server" in body:  # the words of Go's server
        return "; it speaks TLS: write https://"
    return "; is this its address?"


def _interval_s(config: msgspec.Raw) -> float:
    """Of a configuration that holds none, or not as Prometheus writes it: the default."""
    try:
        told: Any = yaml.safe_load(msgspec.json.decode(config, type=dict[str, str])["yaml"])
        return parse_duration(told["global"]["scrape_interval"])
    except (msgspec.MsgspecError, yaml.YAMLError, LookupError, TypeError, ValueError):
        return DEFAULT_SCRAPE_S
