"""Counts of a row, one figure at a time."""

from __future__ import annotations

from exporters.native_histogram import BucketCounts
from exporters.requests.counters import REASONS_LIMIT, BoundedNames, CounterRow, RequestCounters, read_row
from exporters.requests.record import RequestRecord


def counters() -> RequestCounters:
    return RequestCounters(BoundedNames(), BoundedNames(("m",)))


def record(**about) -> RequestRecord:
    return RequestRecord(**{"request_id": "r", "team": "t", "model": "m", "outcome": "ok", **about})


def row(*records: RequestRecord) -> CounterRow:
    counted = counters()
    counted.add_all(records)
    ((stored, _),) = counted.changed().values()
    return read_row(stored)


def test_finish_reasons_are_counted_by_name():
    stop, odd = record(finish_reason="stop"), record(finish_reason="odd")
    assert {"stop": 2, "other": 1} == row(stop, odd, stop).finishes


def test_finished_work_has_its_cached_tokens():
    known = record(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
    assert (2, 20, 6, 0, 8) == row(known, known).finished


def test_only_known_usage_is_finished_work():
    """A record without prompt tokens is missing, and its completion tokens are left out as well."""
    known, unknown = record(prompt_tokens=10, completion_tokens=3), record(completion_tokens=100)
    assert (2, 10, 3, 1, 0) == row(known, unknown).finished


def test_unreadable_answers_are_counted_by_reason():
    """A failed one may be finished work of the engine, but a redirect is none; one with usage unknown is finished."""
    failed = {"outcome": "upstream_error", "reason": "engine_error"}
    known = record(unreadable="json", prompts=3, n=2, **failed)
    found = row(known, record(unreadable="redirect", **failed), record(unreadable="odd"), record(est_prompt_tokens=5,
        unreadable="usage"))  # fmt: skip
    assert {"json": 1, "redirect": 1, "other": 1, "usage": 1} == found.unreadable
    assert (6, 2, 2) == (found.finished_unreadable, found.finished[0], found.finished[3])
    assert (5, None) == found.estimated
    counted = counters()
    counted.add(known)
    ((stored, _),) = counted.changed().values()
    counted.restore(stored, BucketCounts())
    assert 6 == counted.finished()["m"].unreadable


def test_an_overhead_of_nothing_is_a_time():
    """Some of these records have no engine time, so that they are added up one by one."""
    even = record(ttft_ms=5.5, engine_queue_ms=2.0, engine_ttft_ms=3.0)
    found = row(even, record(ttft_ms=5.0), record(ttft_ms=4.0, engine_queue_ms=2.0, engine_ttft_ms=2.0))
    assert (2, 0) == (sum(found.counts[-1]), found.overhead_negative)
    assert 0.5 == found.sums_ms[-1]
    assert 1 == row(record(ttft_ms=1.0, engine_queue_ms=2.0, engine_ttft_ms=2.0)).overhead_negative


def test_stored_reasons_keep_their_seats():
    before, after = counters(), counters()
    before.add_all([record(outcome="error", reason=f"r{number}") for number in range(REASONS_LIMIT)])
    ((stored, _),) = before.changed().values()
    after.restore(stored, BucketCounts())
    after.add(record(outcome="error", reason="one more"))
    ((stored, _),) = after.changed().values()
    assert read_row(stored).reasons["error"].keys() == {*(f"r{n}" for n in range(REASONS_LIMIT)), "__other__"}
