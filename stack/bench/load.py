"""Load generator: sends prepared requests at the pace of a workload, and measures each answer as its client would.

Invariant: every request that was begun leaves exactly one record, also where it failed; there are no retries.
Times are taken where bytes arrive, on one monotonic clock. TTFT ends with the first token that has content; TPOT is
(e2e - TTFT) / (tokens - 1), with tokens as the engine counted them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from exporters.requests.record import Outcome, RequestRecord, timestamp
from stack.bench.workload_plan import PlannedRequest
from stack.gateway.answers import FAILED
from stack.gateway.reply import Reply, decode
from stack.gateway.sse import Scanner
from stack.gateway.upstream_client import BrokenConnection, Unreachable, UpstreamClient

CONNECT_S = 10.0
ANSWER_BYTES = 8 << 20  # more of an answer that is no stream is not read
SAID_CHARS = 300
_BUSY = (429, 503)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Address of the engine. url: scheme, host and port. key: an API key, sent as a bearer token."""

    url: str
    model: str
    key: str | None = None
    timeout_s: float = 300.0

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        given = (("Content-Type", "application/json"), ("Accept", "text/event-stream"))
        return (*given, ("Authorization", f"Bearer {self.key}")) if self.key else given


@dataclass(frozen=True, slots=True)
class Prepared:
    """Request as bytes, built before the run so that this is not measured. prompt_tokens: as counted."""

    ask: PlannedRequest
    request_id: str
    route: str
    body: bytes
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Request that ended. text: of the answer, with keep_text."""

    ask: PlannedRequest
    record: RequestRecord
    text: str | None = None


class LoadRun:
    """Requests of one run. done: those that have ended, in that order. said: first error message, by reason.

    late_s: largest delay of a request of an open loop after its due time, which is caused by this machine."""

    def __init__(
        self,
        target: BenchTarget,
        *,
        variant: str | None = None,
        keep_text: bool = False,
        on_done: Callable[[Done], None] = lambda _: None,
    ) -> None:
        self.done: list[Done] = []
        self.said: dict[str, str] = {}
        self.under_way = 0
        self.late_s = 0.0
        self._target = target
        self._variant = variant
        self._keep_text = keep_text
        self._on_done = on_done
        self._client = UpstreamClient(CONNECT_S)

    async def send(self, asks: Sequence[Prepared], at_once: int | None) -> None:
        """Send all requests. Closed loop: in their order, each as soon as fewer than `at_once` are under way. Open loop
        (None): each at its `due_s`, however many are under way, which is what makes a queue visible. An ask that comes
        `after` another waits for that one's end in both."""
        ended = {ask.ask.number: asyncio.Event() for ask in asks}
        places = asyncio.Semaphore(at_once) if at_once else None
        began = time.perf_counter()

        async def one(ask: Prepared) -> None:
            try:
                if (due_s := ask.ask.due_s) is not None:
                    await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
                    self.late_s = max(self.late_s, time.perf_counter() - began - due_s)
                if ask.ask.after is not None and ask.ask.after in ended:
                    await ended[ask.ask.after].wait()
                if places is None:
                    await self._one(ask)
                else:
                    async with places:
                        await self._one(ask)
            finally:
                ended[ask.ask.number].set()

        try:
            async with asyncio.TaskGroup() as group:
                for ask in asks:
                    group.create_task(one(ask))
        finally:
            self._client.close()

    async def _one(self, asked: Prepared) -> None:
        scanner, text = Scanner(asked.route), bytearray()
        began = time.perf_counter()
        status: int | None = None
        outcome: Outcome = "ok"
        reason: str | None = None
        reply = scanner.reply
        self.under_way += 1

        def take(data: bytes) -> bool:
            scanner.feed(data, time.perf_counter())
            if self._keep_text:
                text.extend(data)
            return True

        try:
            async with asyncio.timeout(self._target.timeout_s):
                headers = (*self._target.headers, ("X-Request-Id", asked.request_id))
                answer = await self._client.send(self._target.url, "POST", asked.route, headers, asked.body)
                try:
                    status = answer.status
                    if status == 200 and answer.content_type == "text/event-stream":
                        while await answer.pump(take):
                            pass
                        scanner.close(time.perf_counter())
                    else:
                        reply = Reply(asked.route)
                        data = await answer.read(ANSWER_BYTES)
                        reply.read(status, answer.content_type, data, len(data))
                        if (body := decode(data)) is not None:
                            self.said.setdefault(f"http_{status}", _message(body.error))
                finally:
                    answer.close()
            outcome, reason = _classify(status, scanner, reply)
        except TimeoutError:
            outcome, reason = "timeout", "timeout"
        except Unreachable as error:
            outcome, reason = ("timeout", "connect_timeout") if error.late else ("upstream_error", "connect_failed")
            self.said.setdefault(reason, str(error))
        except BrokenConnection:
            outcome, reason = "upstream_error", "connection_lost"
        except asyncio.CancelledError:
            outcome, reason = "client_abort", "stopped"
            raise
        finally:
            self.under_way -= 1
            record = self._record(asked, scanner, reply, status, outcome, reason, began, time.perf_counter())
            done = Done(asked.ask, record, _text(bytes(text)) if self._keep_text else None)
            self.done.append(done)
            self._on_done(done)

    def _record(
        self,
        asked: Prepared,
        scanner: Scanner,
        reply: Reply,
        status: int | None,
        outcome: Outcome,
        reason: str | None,
        began: float,
        ended: float,
    ) -> RequestRecord:
        ttft_s = None if scanner.first_token is None else scanner.first_token - began
        tokens = reply.completion_tokens
        tpot_ms, token_s = None, scanner.token_s(tokens)
        if outcome == "ok" and ttft_s is not None and tokens is not None and token_s is not None:
            tpot_ms = _ms(token_s if scanner.hides(tokens) else (ended - began - ttft_s) / (tokens - 1))
        return RequestRecord(
            request_id=asked.request_id,
            ts=timestamp(time.time()),
            team=asked.ask.kind,
            model=self._target.model,
            route=asked.route,
            upstream=self._target.url[:128],
            variant=self._variant,
            engine_version=reply.engine_version,
            stream=True,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            completion_tokens=tokens,
            cache_hit=None if reply.cached_tokens is None else reply.cached_tokens > 0,
            ttft_ms=None if ttft_s is None else _ms(ttft_s),
            tpot_ms=tpot_ms,
            e2e_ms=_ms(ended - began),
            engine_queue_ms=reply.engine_queue_ms,
            engine_ttft_ms=reply.engine_ttft_ms,
            status=status,
            finish_reason=reply.finish_reason,
            outcome=outcome,
            reason=reason,
            est_prompt_tokens=asked.prompt_tokens,
        )


def _classify(status: int, scanner: Scanner, reply: Reply) -> tuple[Outcome, str | None]:
    """Return outcome and reason of a complete answer."""
    if status != 200:
        return ("rejected" if status in _BUSY else "upstream_error"), f"http_{status}"
    if reply.error_code is not None:
        return ("rejected" if reply.error_code in _BUSY else "upstream_error"), f"stream_error_{reply.error_code}"
    if reply.unreadable in FAILED:
        return "upstream_error", f"unreadable_{reply.unreadable}"
    if not scanner.done:
        return "upstream_error", "stream_cut"
    return "ok", None


def _message(error: object) -> str:
    """Return the engine's error message."""
    words = error.get("message") if isinstance(error, dict) else error
    return words[:SAID_CHARS] if isinstance(words, str) else ""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: Mapping[str, object] = {}


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_event = msgspec.json.Decoder(_Event)


def _text(stream: bytes) -> str:
    """Return the text of a stream, joined as a client would."""
    found = []
    for line in stream.splitlines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data.startswith(b"{"):
            try:
                choices = _event.decode(data).choices
            except msgspec.MsgspecError:
                continue
            for choice in choices[:1]:
                content = choice.text if choice.text is not None else choice.delta.get("content")
                found.append(content if isinstance(content, str) else "")
    return "".join(found)


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
