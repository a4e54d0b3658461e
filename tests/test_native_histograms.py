"""Native histograms: buckets, the protobuf page, and what a real Prometheus computes from it."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from random import Random

import msgspec
import protobuf_page
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporters import scrape
from exporters.catalogue import gateway, ours
from exporters.exposition import CONTENT_TYPE, OPENMETRICS_TYPE, Distribution, exemplar
from exporters.native_histogram import SCHEMA, ZERO_THRESHOLD_S, ExponentialBuckets
from exporters.protobuf_exposition import CONTENT_TYPE as PROTOBUF_TYPE
from exporters.request_log import RequestRecord
from exporters.scrape import Format
from exporters.traffic import BoundedNames, Traffic
from stack.gateway.metrics import GatewayMetrics

TIMES_MS = st.one_of(st.just(0.0), st.floats(0, 1e12, exclude_max=True), st.floats(1e-3, 1e5))
ACCEPT = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6"


@given(st.lists(TIMES_MS))
def test_each_observation_is_in_the_bucket_whose_bounds_hold_it(values):
    buckets = ExponentialBuckets()
    buckets.observe_ms(values)
    native = buckets.snapshot()
    indices = native.indices
    assert len(values) == native.zero_count + sum(native.counts)
    assert sum(v / 1000 <= ZERO_THRESHOLD_S for v in values) == native.zero_count
    for index, count in zip(indices, native.counts, strict=True):
        low, high = 2 ** ((index - 1) / 2**SCHEMA), 2 ** (index / 2**SCHEMA)
        assert sum(low * (1 + 1e-12) < v / 1000 <= high * (1 - 1e-12) for v in values if v / 1000 > ZERO_THRESHOLD_S) <= count
        assert count <= sum(low * (1 - 1e-12) <= v / 1000 <= high * (1 + 1e-12) for v in values)


@given(st.lists(TIMES_MS), st.lists(TIMES_MS))
def test_counting_goes_on_from_a_snapshot(before, after):
    whole, first = ExponentialBuckets(), ExponentialBuckets()
    whole.observe_ms([*before, *after])
    first.observe_ms(before)
    second = ExponentialBuckets(first.snapshot())
    second.observe_ms(after)
    assert whole.snapshot() == second.snapshot()


@given(st.lists(st.lists(TIMES_MS, max_size=30), max_size=4))
def test_a_snapshot_holds_all_that_was_observed_before_it(batches):
    buckets, seen = ExponentialBuckets(), []
    for batch in batches:
        buckets.observe_ms(batch)
        seen += batch
        fresh = ExponentialBuckets()
        fresh.observe_ms(seen)
        assert fresh.snapshot() == buckets.snapshot()


def page_of(*samples) -> dict:
    body, content_type = scrape.answer(samples, ACCEPT)
    assert PROTOBUF_TYPE == content_type
    return protobuf_page.families(body)


LABELS = st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.text(st.characters(codec="utf-8")), max_size=4)


@given(st.lists(TIMES_MS, max_size=200), LABELS, st.floats(0, 1e15), st.integers(0, 1 << 60))
def test_the_library_reads_what_we_write(values, labels, gauge, counter):
    buckets = ExponentialBuckets()
    buckets.observe_ms(values)
    counts = [sum(v / 1000 <= 0.1 for v in values), sum(v / 1000 > 0.1 for v in values)]
    traces = (None, exemplar("a" * 32, 0.25, 1700000000.125))
    found = page_of(
        (ours.TTFT, labels, Distribution((0.1,), counts, sum(values) / 1000, traces, buckets.snapshot())),
        (ours.LOG_LINES, {}, counter),
        (ours.LOG_LAG, labels, gauge),
    )
    assert float(counter) == found[ours.LOG_LINES.name].metric[0].counter.value
    assert gauge == found[ours.LOG_LAG.name].metric[0].gauge.value
    assert (4, 0, 1) == tuple(found[metric.name].type for metric in (ours.TTFT, ours.LOG_LINES, ours.LOG_LAG))
    row = found[ours.TTFT.name].metric[0]
    assert labels == {label.name: label.value for label in row.label}
    assert len(values) == row.histogram.sample_count == row.histogram.zero_count + sum(protobuf_page.buckets(row.histogram).values())
    assert sum(values) / 1000 == row.histogram.sample_sum
    assert list(accumulate(counts)) == [bucket.cumulative_count for bucket in row.histogram.bucket]
    assert [0.1, math.inf] == [bucket.upper_bound for bucket in row.histogram.bucket]
    native = buckets.snapshot()
    assert dict(zip(native.indices, native.counts, strict=True)) == protobuf_page.buckets(row.histogram)
    carried = row.histogram.bucket[1].exemplar
    assert ("a" * 32, 0.25, 1700000000, 125_000_000) == (carried.label[0].value, carried.value, carried.timestamp.seconds, carried.timestamp.nanos)


def test_an_empty_histogram_is_native():
    """Without a span Prometheus takes it for a classic one."""
    found = page_of((ours.TTFT, {}, Distribution((0.1,), [0, 0], 0.0, (), ExponentialBuckets().snapshot())))
    spans = found[ours.TTFT.name].metric[0].histogram.positive_span
    assert [(0, 0)] == [(span.offset, span.length) for span in spans]


def records(times_ms) -> list[RequestRecord]:
    return [
        RequestRecord(request_id=str(n), model="m", team="t", outcome="ok", ttft_ms=t, e2e_ms=2 * t, queue_ms=0.0)
        for n, t in enumerate(times_ms)
    ]


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=80))
def test_the_protobuf_page_counts_what_the_text_page_counts(times_ms):
    traffic = Traffic(BoundedNames(), BoundedNames())
    traffic.add_all(records(times_ms))
    found = page_of(*traffic.samples())
    for metric, labels, value in traffic.samples():
        row = next(m for m in found[metric.name].metric if {label.name: label.value for label in m.label} == labels)
        if isinstance(value, Distribution):
            assert sum(value.counts) == row.histogram.sample_count == row.histogram.zero_count + sum(protobuf_page.buckets(row.histogram).values())
            assert value.sum == row.histogram.sample_sum
        else:
            assert value == (row.counter.value if row.HasField("counter") else row.gauge.value)


def test_a_state_without_native_buckets_begins_the_histograms_anew():
    """Otherwise the native buckets would hold fewer observations than their count, and Prometheus would refuse the page."""
    traffic = Traffic(BoundedNames(), BoundedNames())
    traffic.add_all(records([1.0, 2.0]))
    (stored,) = traffic.changed().values()
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(stored)[:-1])
    later = Traffic(BoundedNames(), BoundedNames())
    later.restore(old)
    later.add_all(records([3.0]))
    found = page_of(*later.samples())
    histogram = found[ours.TTFT.name].metric[0].histogram
    assert (1, {math.ceil(math.log2(0.003) * 32): 1}) == (histogram.sample_count, protobuf_page.buckets(histogram))
    assert 3 == next(m.counter.value for m in found[ours.REQUESTS.name].metric if "ok" in {label.value for label in m.label})


def test_a_stored_row_is_shown_as_it_was():
    traffic = Traffic(BoundedNames(), BoundedNames())
    traffic.add_all(records([0.0, 1.0, 250.0]))
    (stored,) = traffic.changed().values()
    again = Traffic(BoundedNames(), BoundedNames())
    again.restore(stored)
    assert page_of(*traffic.samples()).keys() == page_of(*again.samples()).keys()
    assert [s for s in traffic.samples() if s[0] is ours.TTFT] == [s for s in again.samples() if s[0] is ours.TTFT]


PROMETHEUS = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,"
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


def test_the_scraper_decides_on_the_format():
    for accept, expected in (
        (PROMETHEUS, Format.PROTOBUF),
        (PROMETHEUS.partition(",")[2], Format.OPENMETRICS),
        ("text/plain;version=0.0.4;q=0.3,*/*;q=0.1", Format.TEXT),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", Format.TEXT),
        ("application/openmetrics-text;q=0", Format.TEXT),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=text", Format.TEXT),
        ("application/vnd.google.protobuf", Format.TEXT),
        ("", Format.TEXT),
        ("text/html;q=nonsense,;;,=", Format.TEXT),
    ):
        assert expected is scrape.negotiate(accept), accept
    assert {PROTOBUF_TYPE, OPENMETRICS_TYPE, CONTENT_TYPE} == {each.value for each in Format}


def test_the_gateway_offers_protobuf_with_the_values_of_its_text_page():
    metrics = GatewayMetrics()
    metrics.began("t")
    metrics.ended("t", "ok", 200, None)
    for lag_s in (0.0, 0.0004, 0.2):
        metrics._lag.observe(lag_s)
    body, content_type = metrics.answer(PROMETHEUS)
    found = protobuf_page.families(body)
    assert PROTOBUF_TYPE == content_type
    text, content_type = metrics.answer("text/plain")
    assert content_type.startswith("text/plain")
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if family.type == "histogram" or family.name.startswith("process_") or sample.name.endswith("_created"):
                continue
            row = next(m for m in found[sample.name].metric if {label.name: label.value for label in m.label} == sample.labels)
            assert sample.value == (row.counter.value if family.type == "counter" else row.gauge.value)
    lag = found[gateway.LOOP_LAG.name].metric[0].histogram
    assert (3, 1, 2) == (lag.sample_count, lag.zero_count, sum(protobuf_page.buckets(lag).values()))
    assert {"3.0"} == {line.split()[-1] for line in text.decode().splitlines() if line.startswith(f"{gateway.LOOP_LAG.name}_count")}
    assert "process_resident_memory_bytes" in found


class Target:
    """A /metrics endpoint of this process, which answers as the sidecar does."""

    def __init__(self, port: int) -> None:
        self.traffic = Traffic(BoundedNames(), BoundedNames())
        self.formats: set[str] = set()
        self.scrapes = 0
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = scrape.answer(target.traffic.samples(), self.headers["Accept"])
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                target.formats.add(content_type)
                target.scrapes += 1

            def log_message(self, *_) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def scraped(part, tmp_path, free_port):
    """A target, and a query of the real Prometheus that scrapes it each second."""
    target, port = Target(free_port()), free_port()
    job = {"job_name": "j", "always_scrape_classic_histograms": True, "static_configs": [{"targets": [f"127.0.0.1:{target.server.server_port}"]}]}
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]}))
    command = [str(part("prometheus").path), f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/tsdb",
               f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=native-histograms,exemplar-storage"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ask(path: str, **parameters: str) -> list:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=5) as got:
                data = json.load(got)["data"]
        except OSError:
            return []
        return data["result"] if isinstance(data, dict) else data

    yield target, ask
    process.terminate()
    process.wait(20)
    target.server.shutdown()
    target.server.server_close()


def observed(rng: Random, count: int) -> list[RequestRecord]:
    return [
        RequestRecord(request_id=str(n), model="m", team="t", outcome="ok", ttft_ms=rng.lognormvariate(4.6, 1.0), queue_ms=0.0,
                      ts="2026-11-22T09:00:00.250Z", trace_id=f"{n:032x}")
        for n in range(count)
    ]  # fmt: skip


@pytest.mark.prometheus
def test_a_real_prometheus_computes_quantiles_within_two_percent(scraped, eventually):
    """Also: zeros stay zeros, exemplars arrive, classic buckets agree in count and sum, and a restart is a counter reset."""
    target, ask = scraped
    rng = Random(7)
    target.traffic.add_all(observed(rng, 1))  # the series must be there before it grows
    eventually(lambda: ask("query", query=f"{ours.TTFT.name}_count"), 20, "the first scrape")
    batches = [observed(rng, 2000) for _ in range(3)]

    def scraped_again() -> None:
        now = target.scrapes
        eventually(lambda: target.scrapes >= now + 2, 10, "two more scrapes")

    scraped_again()
    for batch in batches[:2]:
        target.traffic.add_all(batch)
        scraped_again()
    target.traffic = Traffic(BoundedNames(), BoundedNames())  # a restart without state
    target.traffic.add_all(batches[2])
    scraped_again()
    times = sorted(record.ttft_ms / 1000 for batch in batches for record in batch)

    def value(query: str) -> float:
        (found,) = ask("query", query=query)
        return float(found["value"][1])

    for q in (0.5, 0.95, 0.99):
        truth = times[math.ceil(q * len(times)) - 1]
        assert truth == pytest.approx(value(f"histogram_quantile({q}, sum(rate({ours.TTFT.name}[1m])))"), rel=0.02), q
    assert value(f"histogram_quantile(0.95, sum(rate({ours.QUEUE.name}[1m])))") < 1e-6
    assert 2000 == value(f"histogram_count({ours.TTFT.name})") == value(f"{ours.TTFT.name}_count")
    assert value(f"histogram_sum({ours.TTFT.name})") == value(f"{ours.TTFT.name}_sum")
    assert 1 == value(f"resets({ours.TTFT.name}[1m])") == value(f"resets({ours.TTFT.name}_count[1m])")
    assert {PROTOBUF_TYPE} == target.formats
    found = ask("query_exemplars", query=ours.TTFT.name, start="1767225600", end="1798761600")
    assert found
    assert all(exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"])
