"""Native histograms: buckets, the protobuf page, and what a real Prometheus computes from it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate, product
from pathlib import Path
from random import Random

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporters import scrape
from exporters.catalogue import gateway, promql, sidecar
from exporters.exposition import CONTENT_TYPE, OPENMETRICS_TYPE, Distribution, exemplar
from exporters.native_histogram import ZERO_THRESHOLD_S, BucketCounts, NativeHistogram, observed_ms
from exporters.protobuf_exposition import CONTENT_TYPE as PROTOBUF_TYPE
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.checkpoint import Checkpoint
from exporters.requests.counter_rows import read_row, row_samples
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord
from exporters.requests.store import CounterStore
from exporters.scrape import Format
from stack.gateway.metrics import GatewayMetrics
from tests.support import protobuf_page
from tests.support.failing_disk import FailingDisk
from tests.support.wait import eventually

TIMES_MS = st.one_of(st.just(0.0), st.floats(0, 1e12, exclude_max=True), st.floats(1e-3, 1e5))
ACCEPT = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6"


@given(st.lists(TIMES_MS))
def test_observations_lie_in_the_buckets_of_exact_arithmetic(values):
    observed = Counter(exact_index(value) for value in values)
    native = native_of(values)
    assert observed.pop(None, 0) == native.zero_count
    assert observed == dict(zip(indices(native), native.counts, strict=True))


def exact_index(value_ms: float) -> int | None:
    """Return the smallest i with value <= 1000 x 2^(i / 32), in integers: value^32 <= 1000^32 x 2^i. None: at most the
    zero threshold."""
    top, bottom = value_ms.as_integer_ratio()
    if top << 20 <= 1000 * bottom:
        return None
    power, unit = top**32, (1000 * bottom) ** 32
    index = power.bit_length() - unit.bit_length() - 1
    while power > unit << index if index >= 0 else power << -index > unit:
        index += 1
    return index


BOUNDS = st.integers(-600, 950).map(lambda i: 1000 * 2 ** (i / 32))


@given(BOUNDS, st.integers(-3, 3))
def test_floats_beside_a_bound_are_told_apart(bound_ms, steps):
    for _ in range(abs(steps)):
        bound_ms = math.nextafter(bound_ms, math.copysign(math.inf, steps))
    assert [exact_index(bound_ms)] == indices(native_of([bound_ms]))


@pytest.mark.parametrize("doublings", range(-19, 30))
def test_a_value_on_a_bound_is_in_the_bucket_below_it(doublings):
    """Powers of two in seconds, such as 125 ms, are the only bounds that a float can hold."""
    assert [32 * doublings] == indices(native_of([1000 * 2.0**doublings]))
    assert [32 * doublings + 1] == indices(native_of([math.nextafter(1000 * 2.0**doublings, math.inf)]))


def test_shortest_and_longest_time_have_a_bucket():
    """The shortest and the longest time that a log may hold have a bucket."""
    just_above, longest = math.nextafter(1000 * ZERO_THRESHOLD_S, 1), math.nextafter(1e12, 0)
    assert [-32 * 20 + 1, exact_index(longest)] == indices(native_of([just_above, longest]))
    assert 1 == native_of([1000 * ZERO_THRESHOLD_S]).zero_count


def native_of(*batches: Iterable[float]) -> NativeHistogram:
    buckets = BucketCounts()
    for values in batches:
        buckets.add(observed_ms((values,)))
        buckets.snapshot()
    return buckets.snapshot()


def indices(native: NativeHistogram) -> list[int]:
    """Return the index of each bucket."""
    found, end = [], 0
    for offset, length in zip(native.spans[::2], native.spans[1::2], strict=True):
        end += offset + length
        found += range(end - length, end)
    return found


@given(st.lists(st.lists(TIMES_MS, max_size=30), max_size=4))
def test_a_snapshot_holds_all_that_was_observed_before_it(batches):
    assert native_of([value for batch in batches for value in batch]) == native_of(*batches)


@given(st.lists(st.lists(TIMES_MS, max_size=9), min_size=8, max_size=8), st.integers(0, 7))
def test_histograms_that_are_counted_together_stay_apart(columns, forgotten):
    buckets = BucketCounts()
    buckets.add(observed_ms(columns))
    buckets.forget(forgotten)
    for at, values in enumerate(columns):
        assert (0 if at == forgotten else len(values)) == buckets.total(at)
        assert native_of([] if at == forgotten else values) == buckets.snapshot(at)


def page_of(*samples) -> dict:
    body, content_type = scrape.answer(samples, ACCEPT)
    assert PROTOBUF_TYPE == content_type
    return protobuf_page.families(body)


LABELS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.text(st.characters(codec="utf-8")), max_size=4
)


@given(st.lists(TIMES_MS, max_size=200), LABELS, st.floats(0, 1e15), st.integers(0, 1 << 60))
def test_the_library_reads_what_we_write(values, labels, gauge, counter):
    native = native_of(values)
    counts = [sum(v / 1000 <= 0.1 for v in values), sum(v / 1000 > 0.1 for v in values)]
    traces = (None, exemplar("a" * 32, 0.25, 1700000000.125))
    found = page_of(
        (sidecar.TTFT, labels, Distribution((0.1,), counts, sum(values) / 1000, traces, native)),
        (sidecar.LOG_LINES, {}, counter),
        (sidecar.LOG_LAG, labels, gauge),
    )
    assert float(counter) == found[sidecar.LOG_LINES.name].metric[0].counter.value
    assert gauge == found[sidecar.LOG_LAG.name].metric[0].gauge.value
    assert (4, 0, 1) == tuple(found[metric.name].type for metric in (sidecar.TTFT, sidecar.LOG_LINES, sidecar.LOG_LAG))
    row = found[sidecar.TTFT.name].metric[0]
    assert labels == {label.name: label.value for label in row.label}
    assert (
        len(values)
        == row.histogram.sample_count
        == row.histogram.zero_count + sum(protobuf_page.buckets(row.histogram).values())
    )
    assert sum(values) / 1000 == row.histogram.sample_sum
    assert list(accumulate(counts)) == [bucket.cumulative_count for bucket in row.histogram.bucket]
    assert [0.1, math.inf] == [bucket.upper_bound for bucket in row.histogram.bucket]
    assert dict(zip(indices(native), native.counts, strict=True)) == protobuf_page.buckets(row.histogram)
    carried = row.histogram.bucket[1].exemplar
    assert ("a" * 32, 0.25, 1700000000, 125_000_000) == (
        carried.label[0].value,
        carried.value,
        carried.timestamp.seconds,
        carried.timestamp.nanos,
    )


@pytest.mark.parametrize(
    ("at_s", "seconds", "nanos"), [(-1.5, -2, 500_000_000), (0.0, 0, 0), (253402300799.25, 253402300799, 250_000_000)]
)
def test_an_exemplar_keeps_its_time(at_s, seconds, nanos):
    found = page_of((sidecar.TTFT, {}, Distribution((), [1], 0.1, (exemplar("a" * 32, 0.1, at_s),))))
    at = found[sidecar.TTFT.name].metric[0].histogram.bucket[0].exemplar.timestamp
    assert (seconds, nanos) == (at.seconds, at.nanos)


def test_an_empty_histogram_is_native():
    """Without a span Prometheus takes it for a classic one."""
    found = page_of((sidecar.TTFT, {}, Distribution((0.1,), [0, 0], 0.0, (), native_of())))
    spans = found[sidecar.TTFT.name].metric[0].histogram.positive_span
    assert [(0, 0)] == [(span.offset, span.length) for span in spans]


HARD_NAMES = ["", '"', "\\", "\\n", "\n", "a\r\nb", "{}", "%s", "\u2028", "\ud7ff", "\U0010ffff"]
NAMES = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(HARD_NAMES)
TRACES = st.none() | st.integers(1, (1 << 128) - 1).map("{:032x}".format) | st.just("not a trace")
RECORDS = st.builds(
    RequestRecord,
    request_id=st.uuids().map(str), model=NAMES | st.none(), team=NAMES | st.none(), trace_id=TRACES,
    outcome=st.sampled_from(["ok", "ok", "rejected", "client_abort", None]), reason=NAMES | st.none(),
    finish_reason=st.none() | NAMES,
    ts=st.sampled_from([None, "1969-12-31T23:59:58.5Z", "2026-11-22T09:00:00.250Z", "9999-12-31T23:59:59Z"]),
    prompt_tokens=st.none() | st.integers(0, 1 << 40), est_prompt_tokens=st.none() | st.integers(0, 1 << 40),
    **{f"{name}_ms": st.none() | TIMES_MS for name in ("ttft", "tpot", "e2e", "queue", "engine_queue", "engine_ttft")},
)  # fmt: skip


def ledger(found: Iterable[RequestRecord] = ()) -> CounterStore:
    books = CounterStore(RequestCounters(BoundedNames(), BoundedNames()))
    books.count(list(found))
    books.commit({})
    return books


def page(of: CounterStore, accept: str = ACCEPT) -> bytes:
    """Return the rows, which are shown once they are safe; how full the tables are is shown at once."""
    return scrape.answer((), accept, of.blocks)[0]


def text_samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the values of a text page by name and labels, as protobuf_page.samples does."""
    found = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        labels = sample.labels | ({"le": str(float(sample.labels["le"]))} if "le" in sample.labels else {})
        found[sample.name, frozenset(labels.items())] = sample.value
    return found


@given(st.lists(RECORDS, max_size=40))
def test_the_protobuf_page_holds_the_values_of_the_text_page(found):
    """To the last unit, whatever names, times and traces a log holds; read by the protobuf library and by
    prometheus_client."""
    books = ledger(found)
    assert text_samples(page(books, "").decode()) == protobuf_page.samples(page(books))


@given(st.floats(), st.floats(allow_nan=False), st.lists(st.integers(0, 1 << 62), min_size=2, max_size=2))
def test_values_without_a_finite_number(gauge, total_s, counts):
    """Values without a finite number are those of the text page."""
    shown = [(sidecar.LOG_LAG, {}, gauge), (sidecar.TTFT, {}, Distribution((0.1,), counts, total_s))]
    text, binary = (
        text_samples(scrape.answer(shown, "")[0].decode()),
        protobuf_page.samples(scrape.answer(shown, ACCEPT)[0]),
    )
    assert {name: repr(float(value)) for name, value in text.items()} == {
        name: repr(float(value)) for name, value in binary.items()
    }


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["count", "commit", "full", "die"]), st.lists(RECORDS, max_size=6)), max_size=20)
)
def test_restarts_and_failed_commits_leave_both_forms_equal(tmp_path_factory, steps):
    """What was safe is on both pages after each restart, and what failed with the disk comes with the commit after
    it."""
    path, disk = tmp_path_factory.mktemp("books") / "state", FailingDisk()
    books = opened(path, disk)
    for step, found in steps:
        before = page(books)
        match step:
            case "count":
                books.count(found)
                assert before == page(books), "counted, and not safe"
            case "commit":
                with suppress(OSError):
                    books.commit({})
            case "full":
                disk.fails = set() if disk.fails else {"write"}
            case "die":
                books._checkpoint.close()
                disk.fails = set()
                books = opened(path, disk)
                assert protobuf_page.samples(before) == protobuf_page.samples(page(books))
                assert natives(before) == natives(page(books))
        assert text_samples(page(books, "").decode()) == protobuf_page.samples(page(books))
    books._checkpoint.close()


def opened(path: Path, disk: FailingDisk | None = None) -> CounterStore:
    checkpoint = Checkpoint(path, disk)
    frames = checkpoint.open()
    books = CounterStore(RequestCounters(BoundedNames(), BoundedNames()), checkpoint=checkpoint)
    books.restore(frames)
    return books


def natives(binary: bytes) -> dict[tuple[str, str], tuple[int, dict[int, int]]]:
    return {
        (name, str(metric.label)): (metric.histogram.zero_count, protobuf_page.buckets(metric.histogram))
        for name, family in protobuf_page.families(binary).items()
        for metric in family.metric
        if metric.HasField("histogram")
    }


def records(times_ms) -> list[RequestRecord]:
    return [
        RequestRecord(request_id=f"r{n}", model="m", team="t", outcome="ok", ttft_ms=t, e2e_ms=2 * t, queue_ms=0.0)
        for n, t in enumerate(times_ms)
    ]


def test_old_state_restarts_the_histograms(tmp_path):
    """Otherwise the native buckets would hold fewer observations than their count, and Prometheus would refuse the
    page.

    The file was written by the release before: three requests in two commits."""
    path = Path(shutil.copy(Path(__file__).parents[1] / "states/before-native-histograms", tmp_path / "state"))
    books = opened(path)
    assert {} == natives(page(books))
    books.count(records([3.0]))
    books.commit({})
    for _ in range(2):
        found = protobuf_page.families(page(books))
        histogram = found[sidecar.TTFT.name].metric[0].histogram
        assert (1, {exact_index(3.0): 1}) == (histogram.sample_count, protobuf_page.buckets(histogram))
        assert 4 == next(
            m.counter.value for m in found[sidecar.REQUESTS.name].metric if "ok" in {label.value for label in m.label}
        )
        books._checkpoint.close()
        books = opened(path)
    books._checkpoint.close()


def test_changed_bounds_restart_both_forms():
    """A histogram whose bounds changed begins anew in both forms."""
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    traffic.add_all(records([1.0, 250.0]))
    ((stored, observed),) = traffic.changed().values()
    row = read_row(stored)
    other = msgspec.structs.replace(row, counts=([*row.counts[0], 0], *row.counts[1:]))
    later, native = RequestCounters(BoundedNames(), BoundedNames()), BucketCounts()
    native.add(observed)
    restored = later.restore(msgspec.msgpack.encode(other), native)
    shown = {
        metric: value
        for metric, _, value in row_samples(read_row(restored), (), native)
        if isinstance(value, Distribution)
    }
    assert {sidecar.E2E, sidecar.QUEUE} == shown.keys()
    assert [0, 2, 2] == [native.total(0), sum(shown[sidecar.E2E].native.counts), shown[sidecar.QUEUE].native.zero_count]


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


PARTS = st.sampled_from(
    [*PROMETHEUS.replace(",", ";").split(";"), "q=nan", "q=inf", "q=-1", "q=1_0", "q=", "q", "=", "*/*", "\0", "\xff"]
)


@given(
    st.lists(st.lists(PARTS | st.text(max_size=5), max_size=5).map(";".join), max_size=5).map(",".join),
    st.integers(0, len(PROMETHEUS)),
)
def test_garbage_and_cut_off_headers_get_a_page(garbage, length):
    """Text, unless what is left asks for another format in full."""
    for accept in (garbage, PROMETHEUS[:length], PROMETHEUS[length:]):
        found = scrape.negotiate(accept)
        named = {
            Format.PROTOBUF: "encoding=delimited",
            Format.OPENMETRICS: "application/openmetrics-text",
            Format.TEXT: "",
        }[found]
        assert named in accept.lower()
    for q in ("nan", "inf", "-1", "2", "1e9"):
        assert Format.TEXT is scrape.negotiate(f"text/plain;q=0.1,application/openmetrics-text;q={q}")


def test_gateway_protobuf_equals_its_text_page():
    """The gateway offers protobuf with the values of its text page."""
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
            row = next(
                m for m in found[sample.name].metric if {label.name: label.value for label in m.label} == sample.labels
            )
            assert sample.value == (row.counter.value if family.type == "counter" else row.gauge.value)
    lag = found[gateway.LOOP_LAG.name].metric[0].histogram
    assert (3, 1, 2) == (lag.sample_count, lag.zero_count, sum(protobuf_page.buckets(lag).values()))
    assert {"3.0"} == {
        line.split()[-1] for line in text.decode().splitlines() if line.startswith(f"{gateway.LOOP_LAG.name}_count")
    }
    assert "process_resident_memory_bytes" in found


class Target:
    """A /metrics endpoint of this process, which answers as the sidecar does."""

    def __init__(self, port: int) -> None:
        self.ledger = ledger()
        self.formats: set[str] = set()
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = scrape.answer((), self.headers["Accept"], target.ledger.blocks)
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                target.formats.add(content_type)

            def log_message(self, *_) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def count(self, found: list[RequestRecord]) -> None:
        self.ledger.count(found)
        self.ledger.commit({})


@pytest.fixture
def scraped(part, tmp_path, free_port):
    """A target, and a query of the real Prometheus that scrapes it twice a second."""
    target, port = Target(free_port()), free_port()
    job = {
        "job_name": "j",
        "always_scrape_classic_histograms": True,
        "static_configs": [{"targets": [f"127.0.0.1:{target.server.server_port}"]}],
    }
    config = tmp_path / "prometheus.yml"
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": [job]})
    )
    command = [
        str(part("prometheus").path),
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=native-histograms,exemplar-storage",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ask(path: str, **parameters: str) -> list:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=60
            ) as got:
                data = json.load(got)["data"]
        except OSError:
            return []
        return data["result"] if isinstance(data, dict) else data

    yield target, ask
    process.terminate()
    process.wait(60)
    target.server.shutdown()
    target.server.server_close()


def observed(rng: Random, count: int) -> list[RequestRecord]:
    return [
        RequestRecord(
            request_id=f"{rng.getrandbits(64):x}",
            model="m",
            team="t",
            outcome="ok",
            ttft_ms=rng.lognormvariate(4.6, 1.0),
            queue_ms=0.0,
            ts="2026-11-22T09:00:00.250Z",
            trace_id=f"{n:032x}",
        )
        for n in range(count)
    ]


@pytest.mark.prometheus
def test_a_real_prometheus_computes_quantiles_within_two_percent(scraped):
    """Also: zeros stay zeros, exemplars arrive, classic buckets agree in count and sum, and a restart is a counter
    reset."""
    target, ask = scraped
    rng = Random(7)
    target.count(observed(rng, 1))  # the series must be there before it grows
    batches = [observed(rng, 2000) for _ in range(3)]

    def stored_at(count: int) -> str:
        """The time at which Prometheus had this many."""
        now = f"{sidecar.TTFT.name}_count == {count}"
        (found,) = eventually(lambda: ask("query", query=now), what=now)
        return str(found["value"][0])

    stored_at(1)
    for number, batch in enumerate(batches[:2], start=1):
        target.count(batch)
        stored_at(1 + 2000 * number)
    restarted = ledger()  # without state
    restarted.count(batches[2])
    restarted.commit({})
    target.ledger = restarted
    moment = stored_at(2000)
    times = sorted(record.ttft_ms / 1000 for batch in batches for record in batch)

    def value(query: str) -> float:
        (found,) = ask("query", query=query, time=moment)
        return float(found["value"][1])

    for q in (0.5, 0.95, 0.99):
        truth = times[math.ceil(q * len(times)) - 1]
        assert truth == pytest.approx(
            value(f"histogram_quantile({q}, sum(rate({sidecar.TTFT.name}[1m])))"), rel=0.02
        ), q
    assert value(f"histogram_quantile(0.95, sum(rate({sidecar.QUEUE.name}[1m])))") < 1e-6
    assert 2000 == value(f"histogram_count({sidecar.TTFT.name})") == value(f"{sidecar.TTFT.name}_count")
    assert value(f"histogram_sum({sidecar.TTFT.name})") == value(f"{sidecar.TTFT.name}_sum")
    assert 1 == value(f"resets({sidecar.TTFT.name}[1m])") == value(f"resets({sidecar.TTFT.name}_count[1m])")
    assert {PROTOBUF_TYPE} == target.formats
    found = ask("query_exemplars", query=sidecar.TTFT.name, start="1767225600", end="1798761600")
    assert found
    assert all(exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"])


@pytest.mark.prometheus
def test_real_prometheus_stores_each_value(scraped):
    """A real Prometheus stores each value of a page with any names."""
    target, ask = scraped
    rng = Random(8)

    def random_record() -> RequestRecord:
        team, model, reason = rng.choice(HARD_NAMES), rng.choice(HARD_NAMES[:4]), "".join(rng.choices(HARD_NAMES, k=2))
        times = {
            f"{name}_ms": rng.choice((0.0, 10 ** rng.uniform(-6, 11.9), 125.0))
            for name in ("ttft", "tpot", "e2e", "queue")
        }
        trace, ts = f"{rng.getrandbits(128) | 1:032x}", rng.choice(("1969-12-31T23:59:58.5Z", "2026-11-22T09:00:00Z"))
        return RequestRecord(
            request_id=f"{rng.getrandbits(64):x}",
            team=team,
            model=model,
            outcome=rng.choice(("ok", "rejected")),
            reason=reason,
            trace_id=trace,
            ts=ts,
            **times,
        )

    target.count([random_record() for _ in range(1000)])
    (up,) = eventually(
        lambda: ask("query", query=f'up{{job="j"}} == 1 and on() count({sidecar.TTFT.name}_count) > 20'),
        what="a scrape of all records",
    )
    moment = str(up["value"][0])
    expected = {
        # to Prometheus an empty label is none
        (name, frozenset((label, text) for label, text in labels if text)): value
        for (name, labels), value in text_samples(page(target.ledger, "").decode()).items()
    }
    stored = {}
    for row in ask("query", query='{__name__=~"vllm_watch_.+", job="j"}', time=moment):
        if "value" in row:  # the others are native histograms
            labels = {
                label: text for label, text in row["metric"].items() if label not in ("__name__", "job", "instance")
            }
            labels |= {"le": str(float(labels["le"]))} if "le" in labels else {}
            stored[row["metric"]["__name__"], frozenset(labels.items())] = float(row["value"][1])
    assert expected == stored
    assert {PROTOBUF_TYPE} == target.formats
    for metric in (sidecar.TTFT, sidecar.TPOT, sidecar.E2E, sidecar.QUEUE):
        assert [] == ask("query", query=f"histogram_count({metric.name}) != {metric.name}_count", time=moment)
        assert (
            len(ask("query", query=f"{metric.name}_count", time=moment))
            == len(ask("query", query=f"histogram_count({metric.name})", time=moment))
            > 20
        )


@pytest.fixture
def stores(part, tmp_path, free_port) -> Iterator[tuple[Target, Callable[[str, str], list]]]:
    """A target; and queries of a Prometheus that stores native histograms, and of VictoriaMetrics in three places.

    pulled: scrapes the target itself. written: is sent what that Prometheus has, as we print the configuration. native:
    also native ones."""
    target, ports = Target(free_port()), {name: free_port() for name in ("prometheus", "pulled", "written", "native")}
    scraped = {"job_name": "j", "static_configs": [{"targets": [f"127.0.0.1:{target.server.server_port}"]}]}
    written = [
        {
            "url": f"http://127.0.0.1:{ports[name]}/api/v1/write",
            "send_native_histograms": native,
            "queue_config": {"batch_send_deadline": "100ms"},
        }
        for name, native in (("written", False), ("native", True))
    ]
    pace = {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}}
    (tmp_path / "pulled.yml").write_text(yaml.safe_dump(pace | {"scrape_configs": [scraped]}))
    job = scraped | {"always_scrape_classic_histograms": True}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(pace | {"scrape_configs": [job], "remote_write": written}))
    commands = [
        [
            part("victoriametrics").path,
            f"-storageDataPath={tmp_path}/{name}",
            f"-httpListenAddr=127.0.0.1:{ports[name]}",
            "-memory.allowedBytes=64MB",
            "-search.latencyOffset=0s",
            "-search.disableCache",
            "-inmemoryDataFlushInterval=1s",
            *([f"-promscrape.config={tmp_path}/pulled.yml"] if name == "pulled" else []),
        ]
        for name in ("pulled", "written", "native")
    ]
    commands.append(
        [
            part("prometheus").path,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
            "--enable-feature=native-histograms",
        ]
    )
    processes = [
        subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for command in commands
    ]

    def ask(where: str, query: str) -> list:
        form = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[where]}/api/v1/query?{form}", timeout=60) as got:
            return json.load(got)["data"]["result"]

    yield target, ask
    for process in reversed(processes):
        process.terminate()
        process.wait(60)
    target.server.shutdown()
    target.server.server_close()


@pytest.mark.prometheus
def test_victoriametrics_answers_classic_quantiles(stores):
    """It asks for text. Of what Prometheus writes it keeps native histograms as buckets with the label vmrange, which
    our queries leave out."""
    target, ask = stores
    rng, name = Random(9), sidecar.TTFT.name
    target.count(observed(rng, 1))
    eventually(
        lambda: all(ask(where, f"{name}_count") for where in ("prometheus", "pulled", "written", "native")),
        what="a first scrape everywhere",
    )
    for count in (1, 2):
        target.count(observed(rng, 1000))
        now = f"{name}_count == {1 + 1000 * count}"
        eventually(
            lambda now=now: all(ask(where, now) for where in ("prometheus", "pulled", "written", "native")), what=now
        )
    assert {PROTOBUF_TYPE, CONTENT_TYPE} == target.formats
    assert ask("prometheus", f"histogram_count({name})")
    bounds = len(ask("pulled", f"{name}_bucket"))
    for where, native in (("pulled", False), ("written", False), ("native", True)):
        assert [] == ask(where, name)
        assert bounds == len(ask(where, f'{name}_bucket{{le!=""}}'))
        assert native == bool(ask(where, f'{name}_bucket{{vmrange!=""}}'))
    for q, build in product((0.5, 0.95, 0.99), (promql.quantile, promql.bounded_quantile, promql.resolved_quantile)):
        (classic,) = ask("prometheus", f"histogram_quantile({q}, sum by (model_name, le) (rate({name}_bucket[1m])))")
        for where in ("pulled", "written", "native"):
            (found,) = ask(where, build(q, sidecar.TTFT, "1m"))
            assert {"model_name": "m"} == found["metric"]
            assert float(classic["value"][1]) == pytest.approx(float(found["value"][1]), rel=0.1), (q, where)
