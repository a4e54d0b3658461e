"""Asks a Prometheus. The one place that talks to it; at most four questions at a time, whoever looks at how many pages."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp
import msgspec
import yaml

from dashboards.interpolate import Range

AT_ONCE = 4
TIMEOUT_S = 30.0
LARGEST_ANSWER = 64 << 20
DEFAULT_SCRAPE_S = 15.0
_UNIT_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Refused(Exception):
    """Prometheus, or its absence, in one sentence."""


class Series(msgspec.Struct, frozen=True):
    """One series of an answer: values of a range query, the value of an instant one; times in unix seconds, figures as text."""

    metric: dict[str, str] = msgspec.field(default_factory=dict)
    values: list[tuple[float, str]] = msgspec.field(default_factory=list)
    value: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one query came back with: its series, or why not."""

    series: Sequence[Series] = ()
    error: str = ""


class _Data(msgspec.Struct, rename="camel"):
    result: msgspec.Raw = msgspec.Raw(b"[]")
    result_type: str = ""


class _Reply(msgspec.Struct):
    status: str = "error"
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """Where Prometheus is, and how to be let in. shown: without credentials."""

    url: str
    shown: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def address(url: str, token: str = "") -> Address:
    """From what a person types: http://user:password@host:9090/prefix. Raises ValueError for what is no address."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError("the port of --prometheus is no number") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url.rsplit('@', 1)[-1]} is no address of a Prometheus; write it like http://127.0.0.1:9090")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    plain = urlunsplit((parts.scheme, f"{host}:{port}" if port else host, parts.path.rstrip("/"), "", ""))
    if token and parts.username is not None:
        raise ValueError("a token and a user in the address are two ways in; give one")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}
    return Address(plain, plain, headers)


class Prometheus:
    """A Prometheus, or what speaks its language. Use it as an async context."""

    def __init__(self, where: Address, scrape_s: float | None = None) -> None:
        self.where = where
        self._scrape_s = scrape_s
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, connect=5)
        self._session = aiohttp.ClientSession(headers=self.where.headers, timeout=timeout)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session:
            await self._session.close()

    async def over_time(self, expr: str, over: Range) -> Answer:
        """A range query; a refusal is an answer too."""
        form = {"query": expr, "start": f"{over.start_s:.3f}", "end": f"{over.end_s:.3f}", "step": f"{over.step_s:.3f}"}
        return await self._answer("query_range", form)

    async def as_of(self, expr: str, at_s: float) -> Answer:
        return await self._answer("query", {"query": expr, "time": f"{at_s:.3f}"})

    async def label_values(self, label: str, selector: str, start_s: float, end_s: float) -> list[str]:
        """Raises Refused."""
        query = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}"} | ({"match[]": selector} if selector else {})
        data = await self._ask("GET", f"label/{label}/values", query)
        try:
            return msgspec.json.decode(data, type=list[str])
        except msgspec.MsgspecError as error:
            raise Refused(f"{self.where.shown} does not answer like a Prometheus ({error})") from None

    async def scrape_s(self) -> float:
        """The scrape interval: as given, else as Prometheus' configuration says it, else 15 s for now. Raises Refused when nobody answers."""
        if self._scrape_s is None:
            try:
                told: Any = yaml.safe_load(msgspec.json.decode(await self._ask("GET", "status/config", {}), type=dict[str, str])["yaml"])
                self._scrape_s = seconds(told["global"]["scrape_interval"])
            except (msgspec.MsgspecError, yaml.YAMLError, LookupError, TypeError, ValueError):
                self._scrape_s = DEFAULT_SCRAPE_S
            except Unanswered:
                raise
            except Refused:  # Thanos and others have no such page, or not for us
                self._scrape_s = DEFAULT_SCRAPE_S
        return self._scrape_s

    async def _answer(self, path: str, form: Mapping[str, str]) -> Answer:
        try:
            data = msgspec.json.decode(await self._ask("POST", path, form), type=_Data)
            return Answer(_series(data))
        except Refused as error:
            return Answer(error=str(error))
        except msgspec.MsgspecError as error:
            return Answer(error=f"{self.where.shown} does not answer like a Prometheus ({error})")

    async def _ask(self, method: str, path: str, form: Mapping[str, str]) -> msgspec.Raw:
        """The `data` of an answer. Raises Refused with the words of Prometheus, or with what came instead of them."""
        if self._session is None:
            raise RuntimeError("a Prometheus is used as an async context")
        url = f"{self.where.url}/api/v1/{path}"
        given: Any = {"data": form} if method == "POST" else {"params": form}
        try:
            async with self._turn, self._session.request(method, url, allow_redirects=False, **given) as response:
                body = await _body(response)
                status = response.status
        except TimeoutError:
            raise Unanswered(f"Prometheus at {self.where.shown} took longer than {TIMEOUT_S:.0f} s; choose a shorter range") from None
        except aiohttp.ClientError as error:
            raise Unanswered(f"Prometheus at {self.where.shown} does not answer ({_plain(error)}); is it up, and --prometheus right?") from None
        try:
            reply = msgspec.json.decode(body, type=_Reply)
        except msgspec.MsgspecError:
            hint = "; it wants a login: user in the address, or --token-file" if status in (401, 403) else "; is this its address?"
            raise Refused(f"{self.where.shown} answers HTTP {status} and not like a Prometheus{hint}") from None
        if reply.status != "success":
            raise Refused(reply.error or f"{self.where.shown} answers HTTP {status}")
        return reply.data


class Unanswered(Refused):
    """Nobody is there, or not in time."""


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 20):
        body += chunk
        if len(body) > LARGEST_ANSWER:
            raise Refused(f"the answer is larger than {LARGEST_ANSWER >> 20} MiB; choose a shorter range or fewer series")
    return bytes(body)


def _series(data: _Data) -> list[Series]:
    if data.result_type == "scalar":
        return [Series(value=msgspec.json.decode(data.result, type=tuple[float, str]))]
    return msgspec.json.decode(data.result, type=list[Series])


def _plain(error: Exception) -> str:
    """Without the address, which the sentence around it has already."""
    return getattr(error, "strerror", None) or type(error).__name__


def seconds(text: str) -> float:
    """A duration as Prometheus writes it: 15s, 1m30s. Raises ValueError."""
    if not re.fullmatch(r"(\d+(ms|[smhd]))+", text):
        raise ValueError(f"{text!r} is no duration")
    return sum(int(number) * _UNIT_S[unit] for number, unit in re.findall(r"(\d+)(ms|[smhd])", text))
