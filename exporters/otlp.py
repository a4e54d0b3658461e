"""Sends the spans of requests over OTLP. The one place that knows OpenTelemetry.

Law: `add` never waits and never raises. A thread of its own encodes and sends; what the bounded queue cannot hold meanwhile is dropped, oldest
first, and counted. A record makes one span, or is counted under the reason why it makes none."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from exporters.catalogue import ours
from exporters.exposition import Sample
from exporters.http_config import trusting
from exporters.request_log import RequestRecord, ended_at
from exporters.spans import Span, attributes, failure, span_of

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue
    from opentelemetry.proto.trace.v1 import trace_pb2

QUEUED_AT_MOST = 8192
BATCH = 256
YIELD_EVERY = 16
LINGER_S = 0.5  # how long a span waits for others to travel with
TIMEOUT_S = 5.0
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # the last one goes on
LAST_WORDS_S = 2.0  # at the end, for what is still queued

SERVICE = "vllm-watch-gateway"  # whose request it was; the sidecar only tells of it
WAITED_FOR = ("timeout", "unavailable")  # why the collector could not be had, while spans wait for it
DROPPED = ("defect", "queue_full", "refused", *WAITED_FOR)
LEFT_OUT = ("history", "incomplete", "sampled")

log = logging.getLogger("vllm_watch.otlp")


class Otlp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where spans go, and which.

    endpoint: the collector, such as http://otelcol:4318, or http://otelcol:4317 with protocol grpc; https where it has a certificate.
    headers_file: one `name: value` a line, such as a key; read at start. sample: the share of traces that is sent, 0 to 1. Failed requests and
    those whose first token or end came that late are always sent. ca_file: who signed the collector's certificate; read at start."""

    endpoint: str
    protocol: Literal["http", "grpc"] = "http"
    headers_file: str | None = None
    ca_file: str | None = None
    sample: float = 1.0
    slow_ttft_s: float = 2.5
    slow_e2e_s: float = 60.0

    def __post_init__(self) -> None:
        if wrong := _mistake(self.endpoint, self.protocol):
            raise ValueError(f"endpoint {wrong}")
        if self.ca_file and not self.endpoint.startswith("https://"):
            raise ValueError("ca_file is of no use without TLS; write the endpoint with https://")
        if not 0 <= self.sample <= 1:
            raise ValueError(f"sample is a share of traces from 0 to 1, not {self.sample:g}")
        if not (self.slow_ttft_s > 0 and self.slow_e2e_s > 0):
            raise ValueError("slow_ttft_s and slow_e2e_s are more than 0 seconds")


def _mistake(endpoint: str, protocol: str) -> str | None:
    """What is wrong with the address of a collector; None when nothing is. A password in it is not repeated."""
    if "@" in endpoint:
        return f"{endpoint.rpartition('@')[2]!r} has a user or a password before it; a key belongs into headers_file"
    example = "http://127.0.0.1:4317" if protocol == "grpc" else "http://127.0.0.1:4318"
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError:
        return f"{endpoint!r} has no port from 0 to 65535"
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or not re.fullmatch("[!-~]+", endpoint):
        return f"{endpoint!r} is no collector's address; write it like {example}"
    if port is None and url.scheme == "http":
        return f"{endpoint!r} names no port; write it like {example}"
    if protocol == "grpc" and url.path not in ("", "/"):
        return f"{endpoint!r} has a path, which gRPC does not know; write it like {example}"
    return None


def read_headers(path: Path) -> dict[str, str]:
    """Lower-case names and values from a file of `name: value` lines. Raises ValueError, which never quotes a value: most are keys."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
        raise ValueError(f"otlp.headers_file: {path} cannot be read: {why}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (header := re.fullmatch(r"([A-Za-z0-9_.-]+):[ \t]*([ -~]*[!-~])[ \t]*", line)):
            raise ValueError(f"otlp.headers_file: {path}, line {number}: this is no header; write one `name: value` a line")
        found[header[1].lower()] = header[2]
    return found


# --- which are sent --------------------------------------------------------------------------------------------------------------


def kept(request: Span, rules: Otlp) -> bool:
    """Whether this span is sent: never when the client said that its trace is not kept, for it would have no parent. Of those that neither failed
    nor were slow, a share of traces by the rule of the SDKs' TraceIdRatioBased sampler, which the engine can be given too: both keep the same."""
    record = request.record
    if record.sampled is False:
        return False
    if failure(record) is not None or (record.ttft_ms or 0) >= rules.slow_ttft_s * 1000 or (record.e2e_ms or 0) >= rules.slow_e2e_s * 1000:
        return True
    return int.from_bytes(request.trace_id[8:]) < round(rules.sample * 2**64)


# --- from spans to bytes ---------------------------------------------------------------------------------------------------------

_FIELD_OF = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_STENCILS_LAST = 1000  # spans: a message keeps every string that it was ever given (protobuf's arena), until it goes itself


@dataclass(frozen=True, slots=True)
class _Stencil:
    """A message with one span and these attributes, filled in anew for every request."""

    message: trace_pb2.ScopeSpans
    span: trace_pb2.Span
    slots: tuple[AnyValue, ...]


class Encoder:
    """Spans -> the body of an export request, by OpenTelemetry's own messages. For one thread: they are filled in again and again, since making
    new ones takes nine times as long, and made anew now and then, since they never forget."""

    def __init__(self, version: str) -> None:
        from opentelemetry.proto.common.v1 import common_pb2
        from opentelemetry.proto.resource.v1 import resource_pb2
        from opentelemetry.proto.trace.v1 import trace_pb2

        self._common, self._trace = common_pb2, trace_pb2
        name = common_pb2.KeyValue(key="service.name", value=common_pb2.AnyValue(string_value=SERVICE))
        self._resource = trace_pb2.ResourceSpans(resource=resource_pb2.Resource(attributes=[name])).SerializeToString()
        self._scope = trace_pb2.ScopeSpans(scope=common_pb2.InstrumentationScope(name="vllm-watch", version=version)).SerializeToString()
        self._stencils: dict[tuple[str, ...], _Stencil] = {}
        self._filled = 0

    def body(self, spans: Sequence[Span]) -> bytes:
        """One after the other, messages of one kind are their union: the scope's name and each of its spans, the resource and its scope."""
        encoded = [self._scope]
        for at, request in enumerate(spans):
            if at % YIELD_EVERY == 0:
                time.sleep(0)  # a scrape that waits for the interpreter is served in between
            encoded.append(self._encoded(request))
        scope = b"".join(encoded)
        resource = self._resource + _field(self._trace.ResourceSpans.SCOPE_SPANS_FIELD_NUMBER, scope)
        return _field(self._trace.TracesData.RESOURCE_SPANS_FIELD_NUMBER, resource)  # an export request has the same layout

    def _encoded(self, request: Span) -> bytes:
        record, found = request.record, attributes(request.record)
        if self._filled >= _STENCILS_LAST:
            self._stencils, self._filled = {}, 0
        self._filled += 1
        stencil = self._stencils.get(names := tuple(found)) or self._stencil(names)
        span = stencil.span
        span.trace_id, span.span_id, span.parent_span_id = request.trace_id, request.span_id, request.parent_id or b""
        span.start_time_unix_nano, span.end_time_unix_nano = request.start_ns, request.end_ns
        span.name = f"{found['gen_ai.operation.name']} {record.model}" if record.model else str(found["gen_ai.operation.name"])
        span.status.code = self._trace.Status.STATUS_CODE_ERROR if "error.type" in found else self._trace.Status.STATUS_CODE_UNSET
        for slot, value in zip(stencil.slots, found.values(), strict=True):
            if isinstance(value, list):
                del slot.array_value.values[:]
                for item in value:
                    slot.array_value.values.add(string_value=item)
            else:
                setattr(slot, _FIELD_OF[type(value)], value)
        encoded: bytes = stencil.message.SerializeToString()
        return encoded

    def _stencil(self, names: tuple[str, ...]) -> _Stencil:
        span = self._trace.Span(kind=self._trace.Span.SPAN_KIND_SERVER, attributes=[self._common.KeyValue(key=name) for name in names])
        message = self._trace.ScopeSpans(spans=[span])
        made = _Stencil(message, message.spans[0], tuple(attribute.value for attribute in message.spans[0].attributes))
        self._stencils[names] = made
        return made


def _field(number: int, content: bytes) -> bytes:
    """A message as a field of another: number and kind, length, content. Source: protobuf's encoding, "Length-Delimited Records"."""
    head, size = bytearray((number << 3 | 2,)), len(content)
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + content


# --- the edge: sending -----------------------------------------------------------------------------------------------------------


class NotNow(Exception):
    """The collector could not be had; the same spans may be sent again. `reason` is timeout or unavailable."""

    def __init__(self, reason: Literal["timeout", "unavailable"], why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.reason = reason
        self.after_s = after_s


class Refused(Exception):
    """The collector does not want these spans and never will."""


class Send(Protocol):
    """Hands one request to the collector. Returns its answer; raises NotNow or Refused."""

    def __call__(self, body: bytes) -> bytes: ...


_LATER = (429, 502, 503, 504)  # the codes on which an OTLP client tries again; source: OTLP specification, "Retryable Response Codes"
_MOST_ANSWER_BYTES = 1 << 16
_LONGEST_WAIT_S = 60.0


def http_sender(endpoint: str, headers: dict[str, str], agent: str, timeout_s: float = TIMEOUT_S, ca_file: Path | None = None) -> Send:
    """OTLP over HTTP with protobuf bodies. A connection for each batch: none that was left idle can turn out to be dead."""
    url = urlsplit(endpoint)
    path = url.path.rstrip("/")
    path = path if path.endswith("/v1/traces") else f"{path}/v1/traces"
    secure = functools.partial(http.client.HTTPSConnection, context=trusting(ca_file, "otlp"))
    connect = secure if url.scheme == "https" else http.client.HTTPConnection
    headers = {"user-agent": agent, **headers, "content-type": "application/x-protobuf", "connection": "close"}

    def send(body: bytes) -> bytes:
        connection = connect(url.hostname or "", url.port, timeout=timeout_s)
        try:
            with contextlib.closing(connection):
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                content = answer.read(_MOST_ANSWER_BYTES)
        except TimeoutError as error:
            raise NotNow("timeout", f"no answer within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last of a host name that none can be
            hint = "; 4317 is usually the port for gRPC" if url.port == 4317 else ""
            raise NotNow("unavailable", f"{type(error).__name__}: {error}{hint}") from error
        if answer.status in _LATER:
            after = answer.getheader("Retry-After", "")
            raise NotNow("unavailable", f"it answers {answer.status}", min(float(after), _LONGEST_WAIT_S) if after.isdecimal() else 0.0)
        if answer.status != 200:
            raise Refused(f"it answers {answer.status} to {path}")
        return content if answer.getheader("Content-Type", "").startswith("application/x-protobuf") else b""

    return send


def grpc_sender(endpoint: str, headers: dict[str, str], agent: str, timeout_s: float = TIMEOUT_S, ca_file: Path | None = None) -> Send:
    """OTLP over gRPC; the library is loaded only for this."""
    import grpc

    url = urlsplit(endpoint)
    target = url.netloc if url.port is not None else f"{url.netloc}:443"
    # Left alone, a channel to a collector that was away for long waits two minutes before it looks again.
    waits = (("grpc.min_reconnect_backoff_ms", 1000), ("grpc.max_reconnect_backoff_ms", 5000))
    options = (*waits, ("grpc.enable_http_proxy", 0), ("grpc.primary_user_agent", agent))
    tls = url.scheme == "https"
    if ca_file:
        trusting(ca_file, "otlp")  # says what is wrong with it; gRPC would not
    roots = ca_file.read_bytes() if ca_file else None
    channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(roots), options) if tls else grpc.insecure_channel(target, options)
    export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
    # The codes on which an OTLP client tries again; source: OTLP specification, "OTLP/gRPC Response".
    later = {grpc.StatusCode[name] for name in ("ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED", "OUT_OF_RANGE", "UNAVAILABLE")}

    def send(body: bytes) -> bytes:
        try:
            answer: bytes = export(body, timeout=timeout_s, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NotNow("timeout", f"no answer within {timeout_s:g} s") from error
            why = f"it answers {code.name}: {error.details()}"
            raise (NotNow("unavailable", why) if code in later else Refused(why)) from error
        return answer

    return send


def sender(config: Otlp, version: str) -> Send:
    """How to reach the collector that is configured. Raises ValueError for a headers_file that cannot be used, BadConfig for such a ca_file."""
    headers = read_headers(Path(config.headers_file)) if config.headers_file else {}
    ca_file = Path(config.ca_file) if config.ca_file else None
    return (grpc_sender if config.protocol == "grpc" else http_sender)(config.endpoint, headers, f"vllm-watch/{version}", ca_file=ca_file)


class Spans:
    """Takes records, sends spans. `start` and `stop` once each; `samples` says what became of them."""

    def __init__(self, config: Otlp, version: str, since_s: float, send: Send | None = None) -> None:
        """since_s: unix seconds. What ended before has its span already: after a restart the whole log is read again, and counted again,
        but a span that is sent twice stands twice in the trace store."""
        self._config = config
        self._since_s = since_s
        self._send = send or sender(config, version)
        self._encoder = Encoder(version)
        self._queue: deque[Span] = deque()
        self._under_way = 0
        self._state: str | None = None  # a reason of DROPPED; None while all is well
        self._stopping, self._full = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        # Every key has one writer: the thread counts what it sent, what was refused, and its defects; `add` counts the rest.
        self.sent = 0
        self.dropped = dict.fromkeys(DROPPED, 0)
        self.left_out = dict.fromkeys(LEFT_OUT, 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Sends what is queued if that is quick; waits at most LAST_WORDS_S."""
        self._stopping.set()
        self._full.set()
        self._thread.join(LAST_WORDS_S)
        if self.waiting:
            log.warning("%d spans were not sent", self.waiting)

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._under_way

    def add(self, record: RequestRecord) -> None:
        """Queue the span of a record that was counted, or count why it has none. Costs a few microseconds, whatever the collector does."""
        if (ended := ended_at(record)) is not None and ended < self._since_s:  # first: a backlog may be all history
            self.left_out["history"] += 1
        elif (request := span_of(record)) is None:
            self.left_out["incomplete"] += 1
        elif not kept(request, self._config):
            self.left_out["sampled"] += 1
        else:
            if len(self._queue) >= QUEUED_AT_MOST:  # far more than the thread takes at once, so there is one to drop
                self._queue.popleft()
                self.dropped[self._state if self._state in WAITED_FOR else "queue_full"] += 1
            self._queue.append(request)
            if len(self._queue) == BATCH:
                self._full.set()

    def samples(self) -> Iterator[Sample]:
        yield ours.SPANS_SENT, {}, self.sent
        yield from ((ours.SPANS_DROPPED, {"reason": why}, count) for why, count in self.dropped.items())
        yield from ((ours.SPANS_LEFT_OUT, {"reason": why}, count) for why, count in self.left_out.items())
        yield ours.SPANS_WAITING, {}, self.waiting

    # From here on: in the thread.

    def _run(self) -> None:
        while not self._stopping.is_set():
            if len(self._queue) < BATCH:
                self._full.wait(LINGER_S)  # a flood fills the queue in that time
            self._full.clear()
            self._next_batch()
        until = time.monotonic() + LAST_WORDS_S
        while self._queue and self._state not in WAITED_FOR and time.monotonic() < until:
            self._next_batch()

    def _next_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        if not batch:
            return
        self._under_way = len(batch)
        try:
            refused = self._delivered(self._encoder.body(batch), len(batch))
        except Exception:  # the thread must outlive every mistake of ours
            log.exception("a defect; %d spans are lost", len(batch))
            self.dropped["defect"] += len(batch)
        else:
            if refused is None:
                return
            self.sent += len(batch) - refused
            self.dropped["refused"] += refused
        self._under_way = 0

    def _delivered(self, body: bytes, count: int) -> int | None:
        """Try until the collector has answered; how many it refused for good, None when we are stopped before that. Meanwhile the queue fills
        and, when it is full, drops its oldest."""
        for wait_s in itertools.chain(BACKOFF_S, itertools.repeat(BACKOFF_S[-1])):
            try:
                answer = self._send(body)
            except NotNow as error:
                self._tell(error.reason, f"cannot take spans, they wait: {error}")
                if self._stopping.wait(max(wait_s, error.after_s)):
                    return None
            except Refused as error:
                self._tell("refused", f"refuses spans: {error}")
                return count
            else:
                refused, why = _refused(answer)
                self._tell("refused" if refused else None, f"refuses spans: {why}" if refused else "takes spans again")
                return min(refused, count)
        raise AssertionError("the waits have no end")

    def _tell(self, state: str | None, what: str) -> None:
        """Log a change of how it goes, once."""
        if state != self._state:
            log.log(logging.INFO if state is None else logging.WARNING, "%s %s", self._config.endpoint, what)
        self._state = state


def _refused(answer: bytes) -> tuple[int, str]:
    """How many spans of a request the collector did not want, and why."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    partial = ExportTraceServiceResponse.FromString(answer).partial_success
    return max(0, partial.rejected_spans), partial.error_message[:200]
