"""Bounded queue of request spans, and the thread that exports them.

Invariant: `add` never waits and never raises. What the queue cannot hold while the thread exports is dropped, oldest
first, and counted. A record makes one span, or is counted under the reason why it makes none."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from exporters.catalogue import sidecar
from exporters.exposition import Sample
from exporters.requests.record import RequestRecord, ended_at
from exporters.tracing.collector import RETRIED, SERVICE, SHUTDOWN_FLUSH_S, Attempt, CollectorState, Observe
from exporters.tracing.config import OtlpConfig
from exporters.tracing.spans import Span, failure, span_of
from exporters.tracing.transport import span_exporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

QUEUE_LIMIT = 8192
BATCH = 128
YIELD_EVERY = 16
LINGER_S = 0.5  # maximum wait of a span for its batch
RETRY_S = 5.0  # between two export calls while the collector does not accept spans; within a call the SDK retries

DROPPED = ("defect", "queue_full", "refused", *RETRIED)
LEFT_OUT = ("history", "incomplete", "sampled")

log = logging.getLogger("vllm_watch.otlp")


def kept(request: Span, rules: OtlpConfig) -> bool:
    """Return whether to send this span. Never when the client said that its trace is not kept, since the span would
    have no parent.

    Of requests that neither failed nor were slow, a share of traces is sent by the rule of the SDKs'
    TraceIdRatioBased sampler, which the engine can be given too: both keep the same traces."""
    record = request.record
    if record.sampled is False:
        return False
    if (
        failure(record) is not None
        or (record.ttft_ms or 0) >= rules.slow_ttft_s * 1000
        or (record.e2e_ms or 0) >= rules.slow_e2e_s * 1000
    ):
        return True
    return int.from_bytes(request.trace_id[8:]) < round(rules.sample * 2**64)


class SpanQueue:
    """Queue that sends spans of records. Call `start` and `stop` once each; `samples` reports the outcomes."""

    def __init__(
        self,
        config: OtlpConfig,
        version: str,
        since_s: float,
        make_exporter: Callable[[OtlpConfig, str, Observe], SpanExporter] = span_exporter,
    ) -> None:
        """since_s: unix seconds. A record that ended before has its span already: after a restart the whole log is
        read and counted again, but a span that is sent twice stands twice in the trace store. Raises as
        `collector.connection`."""
        from exporters.tracing.sdk_spans import SpanFactory

        self._config = config
        self._since_s = since_s
        self._exporter = make_exporter(config, version, self._observe)
        self._factory = SpanFactory(SERVICE, version)
        self._queue: deque[Span] = deque()
        self._in_flight = 0
        self._collector = CollectorState(
            config.endpoint, "spans", f"up to {QUEUE_LIMIT} wait, then the oldest are dropped"
        )
        self._attempt: Attempt | None = None
        self._stopping, self._full = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        # Each key has one writer: the thread counts what it sent, what was refused, and its defects; `add` counts the
        # rest.
        self.sent = 0
        self.dropped = dict.fromkeys(DROPPED, 0)
        self.left_out = dict.fromkeys(LEFT_OUT, 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued if that is quick; wait at most SHUTDOWN_FLUSH_S."""
        self._stopping.set()
        self._full.set()
        self._thread.join(SHUTDOWN_FLUSH_S)
        self._exporter.shutdown()
        if self.waiting:
            log.warning("%d spans were not sent", self.waiting)

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._in_flight

    def add(self, record: RequestRecord) -> None:
        """Queue the span of a counted record, or count why it has none. Costs a few microseconds, whatever the
        collector does."""
        if (ended := ended_at(record)) is not None and ended < self._since_s:  # first: a backlog may be all history
            self.left_out["history"] += 1
        elif (request := span_of(record)) is None:
            self.left_out["incomplete"] += 1
        elif not kept(request, self._config):
            self.left_out["sampled"] += 1
        else:
            if len(self._queue) >= QUEUE_LIMIT:  # more than one batch, so there is one to drop
                self._queue.popleft()
                reason = self._collector.reason
                self.dropped[reason if reason in RETRIED else "queue_full"] += 1
            self._queue.append(request)
            if len(self._queue) == BATCH:
                self._full.set()

    def samples(self) -> Iterator[Sample]:
        yield sidecar.SPANS_SENT, {}, self.sent
        yield from ((sidecar.SPANS_DROPPED, {"reason": reason}, count) for reason, count in self.dropped.items())
        yield from ((sidecar.SPANS_LEFT_OUT, {"reason": reason}, count) for reason, count in self.left_out.items())
        yield sidecar.SPANS_WAITING, {}, self.waiting

    # Below: runs in the thread.

    def _observe(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._collector.observe(attempt)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if len(self._queue) < BATCH:
                self._full.wait(LINGER_S)  # a flood fills the queue in that time
            self._full.clear()
            self._export_batch()
        until = time.monotonic() + SHUTDOWN_FLUSH_S
        while self._queue and self._collector.reason not in RETRIED and time.monotonic() < until:
            self._export_batch()

    def _export_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        if not batch:
            return
        self._in_flight = len(batch)
        try:
            refused = self._deliver(batch)
        except Exception:  # the thread must outlive every defect
            log.exception("%d spans lost because of a bug", len(batch))
            self.dropped["defect"] += len(batch)
        else:
            if refused is None:
                return
            self.sent += len(batch) - refused
            self.dropped["refused"] += refused
        self._in_flight = 0

    def _deliver(self, batch: Sequence[Span]) -> int | None:
        """Export until the collector has answered. Return how many spans it refused for good, None when stopped
        before that.

        Meanwhile the queue fills and, when it is full, drops its oldest."""
        spans = []
        for at, request in enumerate(batch):
            if at % YIELD_EVERY == 0:
                time.sleep(0)  # yields the interpreter to a waiting scrape
            spans.append(self._factory.make(request))
        while True:
            self._attempt = None
            self._exporter.export(spans)
            if (attempt := self._attempt) is None:
                raise RuntimeError("the exporter made no request")
            if attempt.reason not in RETRIED:
                return len(batch) if attempt.reason == "refused" else min(attempt.rejected, len(batch))
            if self._stopping.wait(max(RETRY_S, attempt.retry_after_s)):
                return None
