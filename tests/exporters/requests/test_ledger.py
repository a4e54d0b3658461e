"""The books: each request once, and only what is safe is shown."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporters import exposition
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.checkpoint import Checkpoint
from exporters.requests.counter_rows import read_row
from exporters.requests.counters import RequestCounters
from exporters.requests.duplicates import RecentRequests
from exporters.requests.record import RequestRecord
from exporters.requests.store import CounterStore, LogTotals, Snapshot, StateProvider
from exporters.scrape import Format
from tests.support.failing_disk import FailingDisk


def record(number: int, **about) -> RequestRecord:
    return RequestRecord(
        request_id=f"r{number}",
        **{"team": "t", "model": "m", "outcome": "ok", "prompt_tokens": 1, "ttft_ms": 5.0, **about},
    )


def ledger(checkpoint: Checkpoint | None = None, window: int = 1000) -> CounterStore:
    return CounterStore(RequestCounters(BoundedNames(), BoundedNames(("m",))), RecentRequests(window), checkpoint)


def opened(path: Path, disk: FailingDisk | None = None) -> CounterStore:
    """A ledger that goes on from this file."""
    checkpoint = Checkpoint(path, disk)
    books = ledger(checkpoint)
    books.restore(checkpoint.open())
    return books


def shown(books: CounterStore, richer: bool = False) -> dict[tuple[str, ...], float]:
    text = exposition.page(
        (
            exposition.block((*books.samples(), *books.health())),
            *books.blocks(Format.OPENMETRICS if richer else Format.TEXT),
        )
    )
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value for s in found}


GOOD = ("vllm_watch_requests_total", "model_name=m", "outcome=ok", "team=t")
SAME = ("vllm_watch_log_duplicate_lines_total",)
UP = ("vllm_watch_checkpoint_up",)


# --- each request once


def count_new(books: CounterStore, records: list[RequestRecord]) -> int:
    """Count as a log reader does; return how many were new."""
    fresh = books.window.fresh(records)
    books.count(fresh)
    books.tallies.lines += len(fresh)
    return len(fresh)


def test_repeated_request_is_counted_once():
    """A request that comes again is not counted again in one batch or in two."""
    books = ledger()
    assert (2, 1) == (count_new(books, [record(1), record(2), record(1)]), count_new(books, [record(2), record(3)]))
    books.commit({})
    assert 3 == shown(books)[GOOD]


def test_two_requests_of_one_id_are_two_where_their_spans_differ():
    """A client may send the id of its first try with its second one too; both were work."""
    books = ledger()
    assert 2 == count_new(books, [record(1, span_id="a"), record(1, span_id="b")])
    assert 0 == count_new(books, [record(1, span_id="b")])


@given(st.lists(st.integers(0, 30), max_size=120), st.integers(2, 12), st.integers(1, 9))
def test_window_keeps_half_and_never_exceeds_its_limit(numbers, limit, step):
    """The window knows the last half of its limit for sure and holds no more than its limit."""
    window, lately = RecentRequests(limit), []
    for at in range(0, len(numbers), step):
        batch = [record(number) for number in numbers[at : at + step]]
        for fresh in window.fresh(batch):
            assert fresh.request_id not in lately[-(limit // 2) :]
            lately.append(fresh.request_id)
        assert len(window) <= limit + step


@given(st.lists(st.integers(1, 25), max_size=12), st.integers(2, 40))
def test_window_stored_without_order_is_the_same(batches, limit):
    """A window that was stored without its order is the same window."""
    window, at = RecentRequests(limit), 0
    for size in batches:
        window.fresh([record(number) for number in range(at, at + size)])
        at += size
    again = RecentRequests(limit)
    again.restore([*sorted(window.older), *sorted(window.newer)])
    assert (window.older, window.newer) == (again.older, again.newer)


def test_long_ids_take_little_room():
    """An id of any length takes little room and is known again."""
    window = RecentRequests(100)
    long = [RequestRecord(request_id="x" * 900_000 + tail) for tail in "ab"]
    assert long == window.fresh(long)
    assert [] == window.fresh(long)
    assert max(map(len, window.newer)) < 100


OUTCOMES = st.sampled_from(["ok", "rejected", None])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), OUTCOMES, st.none() | st.integers(0, 9), st.none() | st.floats(0, 1e4))),
    st.randoms(use_true_random=False),
    st.integers(1, 7),
)
def test_order_and_batches_change_no_count(rows, shuffle, step):
    records = [
        record(i, team=team, outcome=outcome, prompt_tokens=tokens, e2e_ms=e2e)
        for i, (team, outcome, tokens, e2e) in enumerate(rows)
    ]
    one, other = ledger(), ledger()
    one.count(records)
    shuffle.shuffle(records)
    for at in range(0, len(records), step):
        other.count(records[at : at + step])
    one.commit({})
    other.commit({})
    assert shown(one) == {name: pytest.approx(value, rel=1e-12) for name, value in shown(other).items()}


# --- only what is safe


def test_a_count_is_shown_when_it_is_safe_and_not_before(tmp_path):
    books = opened(tmp_path / "state")
    books.count([record(1)])
    assert GOOD not in shown(books)
    write = books.begin({})
    books.count([record(2)])
    write()
    assert GOOD not in shown(books), "written, but nobody said so yet"
    books.succeeded()
    assert 1 == shown(books)[GOOD]
    books.commit({})
    assert 2 == shown(books)[GOOD]


def test_unwritable_state_holds_the_page_then_advances(tmp_path):
    """While it cannot be written the page keeps what was safe and then advances once."""
    disk = FailingDisk()
    books = opened(tmp_path / "state", disk)
    books.count([record(1)])
    books.commit({})
    disk.fails = {"sync"}
    for number in (2, 3, 4):
        books.count([record(number)])
        with pytest.raises(OSError, match="No space"):
            books.commit({})
        assert (1, 0) == (shown(books)[GOOD], shown(books)[UP])
    disk.fails = set()
    books.commit({})
    assert (4, 1) == (shown(books)[GOOD], shown(books)[UP])
    assert 4 == shown(opened_after_death(books, tmp_path / "state"))[GOOD]


def opened_after_death(books: CounterStore, path: Path) -> CounterStore:
    books._checkpoint.close()
    return opened(path)


def test_nothing_new_writes_nothing(tmp_path):
    books = opened(tmp_path / "state")
    books.commit({})
    size = (tmp_path / "state").stat().st_size
    assert books.begin({}) is None
    books.count([record(1)])
    books.commit({})
    assert (tmp_path / "state").stat().st_size > size


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["count", "commit", "die", "full", "again"]), max_size=30), st.integers(0, 1000))
def test_any_fault_loses_or_doubles_no_request(tmp_path_factory, steps, seed):
    """A pure model beside it: what was read after the last commit that succeeded is read again; what the page showed
    never falls."""
    path, rng, disk = tmp_path_factory.mktemp("books") / "state", random.Random(seed), FailingDisk()
    books, committed, read, highest = opened(path, disk), 0, 0, 0.0
    for step in steps:
        match step:
            case "count":
                more = rng.randrange(1, 5)
                count_new(books, [record(number) for number in range(read, read + more)])
                read += more
            case "again":  # the same lines come once more
                count_new(books, [record(number) for number in range(max(0, read - 3), read)])
            case "commit":
                try:
                    books.commit({})
                    committed = read
                except OSError:
                    pass
            case "full":
                disk.fails = set() if disk.fails else {rng.choice(["write", "sync", "rename"])}
            case "die":
                books._checkpoint.close()
                disk.fails = set()
                books = opened(path, disk)
                read = int(books.committed_lines)
                assert committed <= read, "what was safe is there; what failed only in its last step may be too"
                committed = read
        now = shown(books).get(GOOD, 0.0)
        assert highest <= now <= read
        highest = now
    disk.fails = set()
    books.commit({})
    assert read == shown(books).get(GOOD, 0.0)
    books._checkpoint.close()


def test_restart_keeps_series_and_window(tmp_path):
    """A restart goes on with every series and knows what it counted."""
    books = opened(tmp_path / "state")
    books.traffic.teams._limit = 2
    for number, team in enumerate(("a", "b", "c", "a")):
        count_new(
            books,
            [
                record(
                    number,
                    team=team,
                    outcome="rejected" if team == "b" else "ok",
                    reason="queue_full",
                    cache_hit=True,
                    e2e_ms=7.0,
                )
            ],
        )
    books.tallies.bad["json"] = 3
    books.commit({})
    before = shown(books)
    after = opened_after_death(books, tmp_path / "state")
    ours = {name: value for name, value in shown(after).items() if not name[0].startswith("vllm_watch_checkpoint")}
    assert ours == {name: value for name, value in before.items() if not name[0].startswith("vllm_watch_checkpoint")}
    after.traffic.teams._limit = 2
    assert 0 == count_new(after, [record(0, team="a")])
    assert 1 == count_new(after, [record(9, team="c")])
    after.commit({})
    assert 2 == shown(after)["vllm_watch_requests_total", "model_name=m", "outcome=ok", "team=__other__"]


def test_other_bounds_restart_histograms_only():
    """Histograms of other bounds begin anew and the page stands."""
    books = ledger()
    count_new(books, [record(1)])
    books.commit({})
    (stored,) = books._shown.rows.values()
    row = read_row(stored)
    for counts in (tuple([*each, 0] for each in row.counts), row.counts[:2]):
        other = msgspec.structs.replace(row, counts=counts, sums_ms=row.sums_ms[: len(counts)])
        (native,) = books._shown.native.values()
        frame = Snapshot(
            [msgspec.msgpack.encode(other)], [b"r1"], LogTotals(lines=1), {}, {}, complete=True, native=[native.counts]
        )
        after = ledger()
        after.restore([msgspec.msgpack.encode(frame)])
        assert 1 == shown(after)[GOOD]
        after.count([record(2)])
        after.commit({})
        assert (2, 2 if len(counts) == 2 else 1) == (
            shown(after)[GOOD],
            shown(after)["vllm_watch_ttft_seconds_count", "model_name=m", "team=t"],
        )


def test_write_that_never_began_loses_no_request(tmp_path):
    """Such as where no thread can be started: the file is as it was, and what comes next must still hold everything."""
    books = opened(tmp_path / "state")
    books.commit({})
    count_new(books, [record(1)])
    assert books.begin({}) is not None
    books.failed()
    books.commit({})
    assert 0 == count_new(opened_after_death(books, tmp_path / "state"), [record(1)])


def test_where_a_log_stood_is_known_as_long_as_nobody_reads_it(tmp_path):
    from exporters.requests.positions import start_position

    books = opened(tmp_path / "state")
    books.commit({"a": (start_position("a", (1, 2)),), "b": ()})
    after = opened_after_death(books, tmp_path / "state")
    after.commit({"b": (start_position("b", (1, 3)),)})
    again = opened_after_death(after, tmp_path / "state")
    assert {"a": (start_position("a", (1, 2)),), "b": (start_position("b", (1, 3)),)} == again.positions


def test_where_a_log_stood_stays_known_while_it_cannot_be_opened(tmp_path):
    """Else a restart would take its rotated files as read: 10,000 random histories found it."""
    from exporters.requests.positions import start_position

    books = opened(tmp_path / "state")
    books.commit({"a": (start_position("a", (1, 2)),)})
    books.count([record(1)])
    books.commit({})  # nothing is known of it just now
    books._checkpoint.close()
    assert {"a": (start_position("a", (1, 2)),)} == opened(tmp_path / "state").positions


def test_unchanged_account_writes_nothing(tmp_path):
    """An account that was revised and stayed the same writes nothing."""
    revision = [1]
    books = opened(tmp_path / "state")
    books.keep([StateProvider("gpu", lambda: revision[0], lambda: b"same", list)])
    books.commit({})
    revision[0] = 2
    assert books.begin({}) is None


def test_unrevised_account_is_not_encoded_again(tmp_path):
    encoded = []
    books = opened(tmp_path / "state")
    books.accounts.append(StateProvider("gpu", lambda: 1, lambda: encoded.append(1) or b"state", list))
    books.commit({})
    books.commit({})
    assert [1] == encoded


def test_an_account_is_as_old_as_the_counts_beside_it(tmp_path):
    """Reconciliation and attribution are stored and shown with the counts that they were made from."""
    from exporters.catalogue import sidecar

    value = [1]
    books = opened(tmp_path / "state")
    books.accounts.append(
        StateProvider(
            "gpu", lambda: value[0], lambda: bytes(value), lambda: [(sidecar.LOG_BYTES_BEHIND, {"path": "x"}, value[0])]
        )
    )
    books.commit({})
    value[0] = 2
    assert 1 == shown(books)["vllm_watch_log_unread_bytes", "path=x"]
    books.commit({})
    assert 2 == shown(books)["vllm_watch_log_unread_bytes", "path=x"]
    books._checkpoint.close()
    checkpoint = Checkpoint(tmp_path / "state")
    assert {"gpu": b"\x02"} == ledger(checkpoint).restore(checkpoint.open())
    checkpoint.close()


def test_restored_account_shows_before_first_commit(tmp_path):
    """On a disk that is full at the start there may be none for hours."""
    from exporters.catalogue import sidecar

    books = ledger()
    books.keep([StateProvider("gpu", lambda: 1, lambda: b"x", lambda: [(sidecar.LOG_BYTES_BEHIND, {"path": "x"}, 7)])])
    assert 7 == shown(books)["vllm_watch_log_unread_bytes", "path=x"]


def test_ids_of_our_gateway_are_remembered():
    """They are kept as numbers, all of a batch at once."""
    batch = [record(0), record(1)]
    ours = [msgspec.structs.replace(r, request_id=f"{n:032x}", span_id=f"{n:016x}") for n, r in enumerate(batch, 7)]
    window = RecentRequests()
    assert (ours, [], ours[:0]) == (window.fresh(ours), window.fresh(ours), window.fresh(ours[:1]))
    assert 2 == len(window)


def test_window_of_two_requests_forgets():
    window = RecentRequests(2)
    assert [1, 1, 0, 1] == [len(window.fresh([record(number)])) for number in (0, 1, 1, 0)]


def test_commits_are_counted(tmp_path):
    books = opened(tmp_path / "state")
    for number in (1, 2):
        books.count([record(number)])
        books.commit({})
    assert 2 == books.commits


def test_unchanged_rows_are_not_serialised_again(tmp_path):
    books = opened(tmp_path / "state")
    books.count([record(1)])
    books.commit({})
    first, second = list(books.blocks(Format.TEXT)), list(books.blocks(Format.TEXT))
    assert first
    assert all(one is other for one, other in zip(first, second, strict=True))
