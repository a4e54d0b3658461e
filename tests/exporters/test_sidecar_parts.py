"""Traffic, events, engine and page: each on plain values."""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from exporters import exposition, scrape
from exporters.catalogue import bounds, exposition_parser, sidecar, vllm
from exporters.engine import view as engine_view
from exporters.events import log
from exporters.exposition import Distribution
from exporters.native_histogram import BucketCounts
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counter_rows import read_row, row_samples
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord, parse_line
from exporters.requests.work import Work

GOLDEN = Path(__file__).parents[1] / "golden"


# --- traffic


def samples_of(traffic: RequestCounters) -> dict[tuple[str, ...], float]:
    return {(m.name, *(f"{k}={v}" for k, v in sorted(labels.items()))): value for m, labels, value in traffic.samples()}


def test_the_lab_format_is_counted_under_the_unknown_team():
    """The short line of the course: no time, no team."""
    line = b'{"request_id":"r","model":"m","prompt_tokens":1842,"completion_tokens":419,"ttft_ms":820,"tpot_ms":34,"cache_hit":true}'  # noqa: E501
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    traffic.add(parse_line(line))
    found = samples_of(traffic)
    assert 1842 == found["vllm_watch_tokens_total", "model_name=m", "team=__unknown__", "type=prompt"]
    assert 1 == found["vllm_watch_cache_lookups_total", "model_name=m", "result=hit", "team=__unknown__"]
    assert ("vllm_watch_tokens_total", "model_name=m", "team=__unknown__", "type=cached") not in found
    ttft = next(v for m, _, v in traffic.samples() if m is sidecar.TTFT)
    assert 1 == sum(ttft.counts)
    assert math.isclose(0.82, ttft.sum)


def test_who_comes_late_is_folded_and_no_counter_ever_falls():
    teams = BoundedNames(("demo",), limit=2)
    traffic = RequestCounters(teams, BoundedNames())
    for team in ("a", "b", "c", "demo", "a", "b"):
        traffic.add(RequestRecord(request_id="r", team=team, model="m", outcome="ok"))
    found = samples_of(traffic)
    count = {
        team: found.get(("vllm_watch_requests_total", "model_name=m", "outcome=ok", f"team={team}"))
        for team in ("a", "b", "demo", "__other__")
    }
    assert {"a": 2, "b": None, "demo": 1, "__other__": 3} == count
    assert 3 == found[("vllm_watch_teams_overflow_total",)]


def test_refused_request_takes_no_model_seat():
    """A client may name any model; and rate() sees a rise only from a sample that was there before."""
    traffic = RequestCounters(BoundedNames(), BoundedNames((), limit=1))
    traffic.add(RequestRecord(request_id="r", team="t", model="nonsense", outcome="rejected", reason="bad_request"))
    traffic.add(RequestRecord(request_id="r", team="t", model="m", outcome="ok"))
    found = samples_of(traffic)
    assert 1 == found["vllm_watch_requests_total", "model_name=__other__", "outcome=rejected", "team=t"]
    assert 0 == found["vllm_watch_requests_total", "model_name=m", "outcome=upstream_error", "team=t"]


def test_model_served_in_a_batch_has_its_own_row():
    """Then a record's row is known by the table of models after its batch, as GenAI metrics take it from there."""
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    ends = (("timeout", 1), ("ok", 2), ("timeout", 3))
    traffic.add_all([RequestRecord(request_id=f"r{n}", team="t", model="m", outcome=outcome) for outcome, n in ends])
    assert 2 == samples_of(traffic)["vllm_watch_requests_total", "model_name=m", "outcome=timeout", "team=t"]


def test_a_reserved_name_cannot_be_claimed():
    assert "__other__" == BoundedNames().fold("__idle__")
    assert "__unknown__" == BoundedNames((), 0).fold("__unknown__")


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "e"])))
def test_membership_is_sticky(names):
    table, first = BoundedNames((), 2), {}
    for name in names:
        assert first.setdefault(name, table.fold(name)) == table.fold(name) or first[name] == "__other__"


def test_our_bounds_hold_every_bound_of_vllms():
    """Read from a real page: quantiles of both sides can be laid beside each other."""
    found = exposition_parser.parse((GOLDEN / "0.32.0-before.prom").read_text())

    def on_page(metric):
        return {float(labels["le"]) for labels, _ in found.of(f"{metric.name}_bucket")} - {math.inf}

    assert on_page(vllm.TIME_TO_FIRST_TOKEN) == set(bounds.TTFT_S)
    assert on_page(vllm.INTER_TOKEN_LATENCY) == set(bounds.INTER_TOKEN_S) <= set(bounds.OUR_TPOT_S)
    assert on_page(vllm.E2E_REQUEST_LATENCY) == set(bounds.REQUEST_S) <= set(bounds.OUR_REQUEST_S)


# --- page

label_text = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)


@given(st.dictionaries(label_text, st.floats(min_value=0), max_size=4), st.lists(st.floats(0, 100), max_size=8))
def test_the_page_says_the_same_as_client_pythons(values, observed):
    """client_python is the reference: same samples after sorting, whatever the labels hold."""
    bounds_s = (0.1, 1.0, 10.0)
    places = Counter(bisect_left(bounds_s, value) for value in observed)
    distribution = Distribution(bounds_s, [places[at] for at in range(4)], sum(observed))
    rows = [(sidecar.TEAMS, {}, 3.0), (sidecar.LOG_BYTES_BEHIND, {}, 0.0)]
    rows += [(sidecar.LOG_BAD_LINES, {"reason": name}, value) for name, value in values.items()]
    rows.append((sidecar.TTFT, {"model_name": "m", "team": "t"}, distribution))

    class Reference:
        def collect(self):
            yield GaugeMetricFamily(sidecar.TEAMS.name, "h", value=3)
            yield GaugeMetricFamily(sidecar.LOG_BYTES_BEHIND.name, "h", value=0)
            counter = CounterMetricFamily(sidecar.LOG_BAD_LINES.name, "h", labels=["reason"])
            for name, value in values.items():
                counter.add_metric([name], value)
            yield counter
            running, buckets = 0, []
            for bound, count in zip(("0.1", "1.0", "10.0", "+Inf"), distribution.counts, strict=True):
                running += count
                buckets.append((bound, running))
            histogram = HistogramMetricFamily(sidecar.TTFT.name, "h", labels=["model_name", "team"])
            histogram.add_metric(["m", "t"], buckets, sum_value=distribution.sum)
            yield histogram

    registry = CollectorRegistry()
    registry.register(Reference())
    assert sorted_samples(generate_latest(registry).decode()) == sorted_samples(exposition.render(rows))
    assert sorted_samples(generate_latest(registry).decode()) == sorted_samples(
        exposition.render(rows, openmetrics=True), openmetrics_parser
    )


def sorted_samples(text, parse=text_string_to_metric_families):
    found = [s for family in parse(text) for s in family.samples]
    return sorted((s.name, sorted(s.labels.items()), s.value) for s in found)


def test_bucket_exemplar_is_the_last_trace():
    """Exemplars exist in OpenMetrics only; a scraper that does not ask for it gets the plain page."""
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    for number, ttft_ms in ((1, 30.0), (2, 31.0), (3, 4000.0)):
        traffic.add(
            RequestRecord(
                request_id="r",
                ts="2026-01-01T00:00:00.250Z",
                model="m",
                team="t",
                outcome="ok",
                ttft_ms=ttft_ms,
                trace_id=f"{number:032x}",
            )
        )
    for nonsense in ("not a trace", "\0" * 32):  # Prometheus would refuse the whole page for the second one
        traffic.add(RequestRecord(request_id="r", model="m", team="t", outcome="ok", ttft_ms=31.0, trace_id=nonsense))
    body, content_type = scrape.answer(
        traffic.samples(), "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"
    )
    text = body.decode()
    assert "application/openmetrics-text; version=1.0.0; charset=utf-8" == content_type
    carried = {
        s.labels["le"]: s.exemplar
        for family in openmetrics_parser(text)
        for s in family.samples
        if s.exemplar and "ttft" in s.name
    }
    assert {"0.04": f"{2:032x}", "5.0": f"{3:032x}"} == {
        le: exemplar.labels["trace_id"] for le, exemplar in carried.items()
    }
    assert (4.0, 1767225600.25) == (carried["5.0"].value, float(carried["5.0"].timestamp))
    plain, content_type = scrape.answer(traffic.samples(), "text/plain;version=0.0.4")
    assert exposition.CONTENT_TYPE == content_type
    assert b"trace_id" not in plain


def test_estimated_tokens_are_counted_apart():
    """Nothing of an estimate is in the exact tokens, in what is compared with the engine, or in what went to an engine
    that nobody watches."""
    traffic = RequestCounters(BoundedNames(), BoundedNames(), elsewhere=("api",))
    # A model has series of its own once an engine served it.
    traffic.add(
        RequestRecord(
            request_id="o", model="m", team="t", outcome="ok", prompt_tokens=8, completion_tokens=4, est_prompt_tokens=6
        )
    )
    left = {"request_id": "r", "model": "m", "team": "t", "outcome": "client_abort", "finish_reason": "abort"}
    for more in (
        {"est_prompt_tokens": 40, "content_events": 7, "est_completion_tokens": 9, "n": 2},
        {"prompt_tokens": 50, "completion_tokens": 5},  # an engine that tells usage with every event
        {"est_prompt_tokens": 1000},  # no content was seen: nobody knows of any work
        {"est_prompt_tokens": 40, "est_completion_tokens": 9, "upstream": "api"},
        # finished behind the client's back, usage unseen
        {"est_prompt_tokens": 3, "est_completion_tokens": 2, "finish_reason": "stop"},
    ):
        traffic.add(RequestRecord(**{**left, **more}))
    shown = {(metric, labels["type"]): value for metric, labels, value in traffic.samples() if "type" in labels}
    assert (58, 9) == (shown[sidecar.TOKENS, "prompt"], shown[sidecar.TOKENS, "completion"])
    assert (83, 20) == (shown[sidecar.ESTIMATED_TOKENS, "prompt"], shown[sidecar.ESTIMATED_TOKENS, "completion"])
    assert {("m", "t"): Work(2 * 40 + 50 + 3, 0, 9 + 5 + 2)} == traffic.abandoned()
    assert (8, 4, 1) == (
        traffic.finished()["m"].prompt_tokens,
        traffic.finished()["m"].completion_tokens,
        traffic.finished()["m"].missing,
    )
    again = RequestCounters(BoundedNames(), BoundedNames())
    ((stored, observed),) = traffic.changed().values()
    native = BucketCounts()
    native.add(observed)
    again.restore(stored, native)
    assert traffic.abandoned() == again.abandoned()
    assert list(row_samples(read_row(stored))) == [sample for sample in again.samples() if "team" in sample[1]]


# --- engine


def test_what_vllm_says_in_labels_becomes_numbers():
    view = engine_view.parse((GOLDEN / "0.32.0-preempt-under-load.prom").read_text(), "0.32.0")
    (cache,) = view.caches
    assert (24, 32, "tiny") == (cache.blocks, cache.block_size_tokens, cache.model_name)
    assert 24 * 32 == cache.capacity_tokens


def test_newer_start_time_is_a_restart():
    """A newer start time is a restart and a changed option a change."""
    history = engine_view.History("e")
    before = engine_view.parse((GOLDEN / "0.32.0-before.prom").read_text(), "0.32.0")
    after = engine_view.parse((GOLDEN / "0.32.0-preempt-after-load.prom").read_text(), "0.32.0")
    assert [] == history.observe(before, 0)
    assert [] == history.observe(before, 1)
    kinds = [event.kind for event in history.observe(after, 2)]
    assert ["restart", "config"] == kinds
    assert (1, 1) == (history.restarts, history.changes)


def test_a_new_version_is_told():
    history = engine_view.History("e")
    text = (GOLDEN / "0.20.2-before.prom").read_text()
    history.observe(engine_view.parse(text, "0.20.2"), 0)
    (event,) = history.observe(engine_view.parse(text, "0.32.0"), 1)
    assert ("version", {"version": ("0.20.2", "0.32.0")}) == (event.kind, event.diff)


def test_without_a_start_time_a_total_that_fell_is_a_restart():
    """With several API processes the page has no process_* at all."""
    high = engine_view.EngineView(None, None, {("x_total",): 5.0, ("x_total", "adapter"): 9.0}, ())
    low = engine_view.EngineView(None, None, {("x_total",): 1.0}, ())
    fewer = engine_view.EngineView(None, None, {("x_total",): 5.0}, ())
    assert engine_view.restarted(high, low)
    assert not engine_view.restarted(low, high)
    assert not engine_view.restarted(high, fewer), "a series that went away is no restart"


def test_version_missing_once_is_kept():
    """A version that is not told once is kept and ranks may come in any order."""
    history = engine_view.History("e")
    text = (GOLDEN / "0.32.0-before.prom").read_text()
    one = engine_view.parse(text, "0.32.0")
    a, b = (engine_view.CoreCache(e, "m", n, 16, None, {"num_gpu_blocks": str(n)}) for e, n in (("0", 10), ("1", 20)))
    history.observe(dataclasses.replace(one, caches=(a, b)), 0)
    assert [] == history.observe(dataclasses.replace(one, caches=(b, a), version=None), 1)
    assert "0.32.0" == history.last.version


# --- events


def test_events_are_appended_and_read_back(tmp_path):
    """Events are appended and read back and a half line harms no other."""
    path = tmp_path / "deep" / "events.jsonl"
    first = log.TuningEvent(
        at_s=1.0, kind="change", what="prefix caching on", diff={"--enable-prefix-caching": (None, "")}
    )
    log.append(path, first)
    with path.open("ab") as file:
        file.write(b'{"at_s": 2, "ki')
    second = log.TuningEvent(
        at_s=3.0, kind="note", what="canary", before=log.TimeWindow(0, 1), after=log.TimeWindow(2, 3)
    )
    log.append(path, second)
    assert ([first, second], 1) == log.read(path)
    assert ([], 0) == log.read(tmp_path / "none")
    newest = {labels["kind"]: value for m, labels, value in log.samples([first, second]) if m is sidecar.EVENT_TIME}
    assert {"change": 1.0, "note": 3.0} == newest


def test_many_writers_lose_no_event(tmp_path):
    import subprocess
    import sys

    path = tmp_path / "events.jsonl"
    write = "events.append(Path(sys.argv[1]), events.TuningEvent(at_s=i, kind='note', what='w'))"
    code = (
        "import sys; from pathlib import Path; from exporters.events import log as events\n"
        f"events.LOCK_WITHIN_S = 60\nfor i in range(40): {write}"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2]) for _ in range(3)
    ]
    assert [0, 0, 0] == [writer.wait(60) for writer in writers]
    found, bad = log.read(path)
    assert (120, 0) == (len(found), bad)


def test_locked_events_file_is_an_error_in_time(tmp_path, monkeypatch):
    """A locked events file is an error in time and never a wait without end."""
    import fcntl

    monkeypatch.setattr(log, "LOCK_WITHIN_S", 0.05)
    path = tmp_path / "events.jsonl"
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"{path} is locked"):
            log.append(path, log.TuningEvent(at_s=1.0, kind="note", what="w"))


def test_a_window_ends_after_it_starts():
    with pytest.raises(ValueError, match=r" 2 \.\. 2$"):
        log.TimeWindow(2, 2)


def test_every_line_of_events_is_plain_json(tmp_path):
    path = tmp_path / "events.jsonl"
    log.append(path, log.TuningEvent(at_s=1.0, kind="note", what="w"))
    assert "w" == json.loads(path.read_text())["what"]
