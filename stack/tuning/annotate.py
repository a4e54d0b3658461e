"""Stores of tuning events: the file itself, or the sidecar that owns it.

Both take a NewEvent and return the recorded one; an error is one sentence with the id under which to repeat the event,
which records it once."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from exporters.events import log
from exporters.events.log import NewEvent, TuningEvent
from exporters.net.bounded_read import read_bounded
from exporters.text import printable

TIMEOUT_S = 10.0


class Unwritten(ValueError):
    """Events could not be read or written; the message has cause and remedy."""


@dataclass(frozen=True, slots=True)
class OnRecord:
    """Recorded event; written: by this call."""

    event: TuningEvent
    written: bool


class EventLog(Protocol):
    def record(self, new: NewEvent) -> OnRecord: ...

    def close(self, event_id: str, end_s: float | None = None) -> OnRecord: ...

    def since(self, since_s: float) -> list[TuningEvent]: ...


@dataclass(frozen=True, slots=True)
class FileLog:
    """Event file, used under its lock. All three raise OSError; `record` and `close` also ValueError."""

    path: Path
    clock: Callable[[], float] = time.time

    def record(self, new: NewEvent) -> OnRecord:
        return OnRecord(*log.record(self.path, new.event(self.clock())))

    def close(self, event_id: str, end_s: float | None = None) -> OnRecord:
        now_s = self.clock()
        return OnRecord(*log.close(self.path, event_id, now_s if end_s is None else log.checked_time(end_s, now_s)))

    def since(self, since_s: float) -> list[TuningEvent]:
        return log.since(log.read(self.path)[0], since_s)


class SidecarLog:
    """Remote sidecar, whose events need its token. All three raise Unwritten, also for what the sidecar
    rejects."""

    def __init__(self, url: str, token: str, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError(
                f"{url.rpartition('@')[2]!r} is no address of a sidecar; write it like http://127.0.0.1:9401"
            )
        self.url = url.rstrip("/").removesuffix("/metrics")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    def record(self, new: NewEvent) -> OnRecord:
        return self._on_record(
            "/events", {name: value for name, value in msgspec.to_builtins(new).items() if value is not None}
        )

    def close(self, event_id: str, end_s: float | None = None) -> OnRecord:
        return self._on_record(f"/events/{quote(event_id, safe='')}/close", {} if end_s is None else {"end_s": end_s})

    def since(self, since_s: float) -> list[TuningEvent]:
        return msgspec.convert(self._ask("GET", f"/events?since={since_s:.3f}").get("events"), list[TuningEvent])

    def _on_record(self, path: str, body: Mapping[str, Any]) -> OnRecord:
        return msgspec.convert(self._ask("POST", path, body), OnRecord)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            status, answer = asyncio.run(self._exchange(method, path, body))
        except TimeoutError:
            raise Unwritten(
                f"{self.url} did not answer within {self._timeout.total:g} s; is it up, and may this machine reach it?"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unwritten(
                f"{self.url} cannot be reached: {error}; is the address right, and is the sidecar up?"
            ) from error
        try:
            content = msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            content = None
        if not isinstance(content, dict):
            raise Unwritten(
                f"{self.url}{path.partition('?')[0]} answers {status} without JSON; is it a sidecar of this release?"
            )
        if status not in (200, 201):
            raise Unwritten(f"{self.url} answers {status}: {content.get('error', 'it does not say why')}")
        return content

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """Redirects are not followed: the token would arrive at another host."""
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=self._timeout) as session,
            session.request(method, f"{self.url}{path}", json=body, allow_redirects=False) as response,
        ):
            return response.status, await read_bounded(response)


def token(path: Path) -> str:
    """Read the token in a file. Raises OSError and ValueError."""
    word = path.read_text(encoding="utf-8", errors="replace").strip()
    if not word or not word.isascii() or not word.isprintable() or " " in word:
        raise ValueError(f"{path} holds no token: one word is expected")
    return word


def running_labs(cache: Path) -> Iterator[Path]:
    """Yield the folders below the cache in which a lab runs, holding their lock."""
    for lock in sorted(cache.glob("lab*/lock")):
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield lock.parent


def differences(texts: tuple[str, ...]) -> dict[str, tuple[str | None, str | None]]:
    """Parse option changes such as `max-num-seqs=16->32`; nothing before or after the arrow: not set. Raises
    ValueError."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for text in texts:
        option, equals, change = text.partition("=")
        old, arrow, new = change.partition("->")
        if not (option.strip() and equals and arrow):
            raise ValueError(
                f"{text!r} is no change of an option; write it like max-num-seqs=16->32, and quote it for the shell"
            )
        found[option.strip()] = (old.strip() or None, new.strip() or None)
    return found


def line(event: TuningEvent) -> str:
    """Format an event as one line. Unprintable characters are escaped."""
    parts = [_time(event.at_s), f"{event.kind:7}", event.id, event.what]
    parts += [f"[{option}: {old or 'not set'} -> {new or 'not set'}]" for option, (old, new) in event.diff.items()]
    parts += [f"#{tag}" for tag in event.tags]
    if event.who:
        parts.append(f"by {event.who}")
    if event.open:
        parts.append("(open)")
    elif event.end_s is not None:
        parts.append(f"(until {_time(event.end_s)})")
    return printable("  ".join(parts))


def _time(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return f"{at_s:g}"
