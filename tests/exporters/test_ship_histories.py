"""Random histories of a request log and the process that ships it, against a plain model: writing, rotation, cuts, a
dying disk, a store that is absent at first, fails before or after it stored, conflicts without a second writer, lists
late or answers nothing, clocks that jump, merging, and a SIGKILL at every call of disk and store. Each record is in the
data set once.

VLLM_WATCH_HISTORIES=10000 python -m pytest tests/exporters/test_ship_histories.py    for more of them"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from exporters.dataset import catalog, layout, parquet, ship, upkeep
from exporters.dataset.layout import LogSegment, total
from exporters.dataset.objects import FolderStore, StoreConflict, StoreError
from exporters.dataset.ship import Shipper
from exporters.dataset.ship_config import ShipConfig
from exporters.requests import log_reader as log_reader_module
from exporters.requests import positions as positions_module
from exporters.requests import tail as tail_module
from exporters.requests.checkpoint import Checkpoint
from exporters.requests.record import RequestRecord
from tests.support.log_histories import SMALL, Histories, Killed

HISTORIES = int(os.environ.get("VLLM_WATCH_HISTORIES", "8"))
FAULTS = ("fail", "fail after", "conflict", "conflict after", "kill", "kill after")


class FaultyStore(FolderStore):
    """A folder whose next calls fail or end the process, before or after they were done.

    plans: call -> (what happens, after how many calls). late: listings do not show the newest keys. absent: nothing
    answers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plans: dict[str, tuple[str, int]] = {}
        self.late = self.absent = False

    def _act(self, call: str, do: Callable[[], object]) -> object:
        if self.absent:
            raise StoreError("nothing answers")
        what, after = self.plans.pop(call, ("", 0))
        if after:
            self.plans[call] = what, after - 1
            what = ""
        found = do() if not what or what.endswith("after") else None
        if what.startswith("kill"):
            raise Killed
        if what:
            raise (StoreConflict if what.startswith("conflict") else StoreError)(f"{call} failed")
        return found

    def get(self, key: str) -> tuple[bytes, str] | None:
        return self._act("get", lambda: super(FaultyStore, self).get(key))  # type: ignore[return-value]

    def put(self, key: str, data: bytes) -> None:
        self._act("put", lambda: super(FaultyStore, self).put(key, data))

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        plans, self.plans = self.plans, {}  # the put inside is not a call of the writer
        try:
            fault = {"put_if": plans.pop("put_if")} if "put_if" in plans else {}
            once = FolderStore(self.folder)
            self.plans = fault
            return self._act("put_if", lambda: once.put_if(key, data, version))  # type: ignore[return-value]
        finally:
            self.plans = plans | self.plans

    def delete(self, key: str) -> None:
        self._act("delete", lambda: super(FaultyStore, self).delete(key))

    def keys(self, prefix: str) -> Iterator[str]:
        found = list(super().keys(prefix))
        yield from found[:-1] if self.late else found


class ShipHistories(Histories):
    """The histories of the sidecar, with a shipper as the reader.

    committed: ids in segments of the last commit, which the data set must hold in the end."""

    @initialize(appends=st.booleans(), absent=st.booleans())
    def start(self, appends: bool, absent: bool) -> None:
        self.skew_s = 0.0
        super().start(appends)
        self.store.absent = absent

    def open_books(self) -> None:
        if not hasattr(self, "store"):
            self.store = FaultyStore(self.folder / "dataset")
        self.plain = FolderStore(self.store.folder)
        config = ShipConfig(
            dataset=str(self.store.folder),
            cluster="prod",
            writer="gw-0",
            requests_log=(str(self.log),),
            state=str(self.folder / "ship"),
            grace_s=0,
            compact_bytes=1 << 20,
        )
        self.checkpoint = Checkpoint(self.folder / "ship" / "positions")
        self.shipper = Shipper(
            config,
            self.store,
            clock=lambda: 1.8e9 + self.now + self.skew_s,
            ticks=lambda: self.now,
            checkpoint=self.checkpoint,
        )
        (reader,) = self.shipper.readers
        self.tail = reader.tail
        self.tail.disk, self.checkpoint._disk = self.log_disk, self.state_disk
        fresh = self.shipper.state.window.fresh

        def noted(records: list[RequestRecord]) -> list[RequestRecord]:
            found = fresh(records)
            new = [int(record.request_id[2:]) for record in found]
            assert len(new) == len({*new} - self.counted), "an id was read twice"
            self.counted.update(new)
            return found

        self.shipper.state.window.fresh = noted  # type: ignore[method-assign]

    @rule(step_s=st.sampled_from([0.05, 0.05, 1.5, 7.0]), budget=st.sampled_from([None, None, 1]))
    def poll(self, step_s: float, budget: int | None) -> None:
        self.now += step_s
        ship.BATCH_BYTES = budget or 4 << 20
        with contextlib.suppress(OSError):
            try:
                self.shipper._read(self.now)
                self.looked = not self.log_disk.blocked
            except Killed:
                self.reopen()

    @rule(meanwhile=st.booleans())
    def commit(self, meanwhile: bool = False) -> None:
        counted, looked = set(self.counted), self.looked
        try:
            self.shipper.seal()
        except OSError:
            return
        except Killed:
            self.reopen()
            return
        if self.shipper._sealed is None:
            self.committed = counted
            self.at_risk -= counted
            self.cut_unseen &= not looked

    @rule()
    def upload(self) -> None:
        with contextlib.suppress(OSError):
            try:
                for manifest in self.shipper.writer.upload():
                    self.shipper._upkeep.days.add(manifest.day)
            except Killed:
                self.reopen()

    @rule()
    def tidy(self) -> None:
        """Merge and delete, as after a minute."""
        with contextlib.suppress(OSError):
            try:
                self.shipper.writer.upload()
                self.shipper._upkeep.step()
            except Killed:
                self.reopen()

    @rule(
        call=st.sampled_from(["get", "put", "put_if", "delete"]),
        what=st.sampled_from(FAULTS),
        after=st.sampled_from([0, 0, 1, 2]),
        then=st.sampled_from(["", "upload", "tidy"]),
    )
    def break_store(self, call: str, what: str, after: int, then: str) -> None:
        self.store.plans[call] = what, after
        if then == "upload":
            self.upload()
        if then == "tidy":
            self.tidy()

    @rule()
    def bring_store(self) -> None:
        self.store.absent = False

    @rule(skew_s=st.sampled_from([-7200.0, -1.0, 3600.0, 100_000.0]))
    def step_clock(self, skew_s: float) -> None:
        self.skew_s = skew_s

    @rule(late=st.booleans())
    def list_late(self, late: bool) -> None:
        self.store.late = late

    def reopen(self) -> None:
        shown, read = self.committed, self.counted
        self.shipper.close()
        plans, self.store.plans = self.store.plans, {}
        self.open_books()
        self.store.plans = plans
        window = self.shipper.state.window
        kept = {int(name[2:]) for name in (*window.older, *window.newer)}
        assert shown <= kept <= read, "what was committed is kept, and nothing that was not read"
        self.may_be_lost |= self.at_risk - kept
        self.at_risk = set()
        self.committed, self.counted = kept, set(kept)

    @invariant()
    def the_page_shows_what_is_safe_and_never_falls(self) -> None:
        """A reader finds no record twice, none that is not committed, and none missing that is not pending."""
        if not hasattr(self, "shipper"):
            return
        listed = self.listed()
        self.check_sums(listed)
        pending = {one.segment.key for one in self.shipper.state.last.pending}
        if not pending and self.shipper._sealed is None:
            assert len(self.committed) == total(segment.sums for segment in listed).requests

    def listed(self) -> list[LogSegment]:
        keys = list(self.plain.keys(f"{layout.MANIFESTS}/"))
        return [
            segment
            for key in keys
            if (found := self.plain.get(key))
            for segment in layout.read_manifest(found[0], key).segments
        ]

    def check_sums(self, listed: list[LogSegment]) -> None:
        assert len(listed) == len({segment.key for segment in listed})
        assert total(segment.sums for segment in listed).requests <= len(self.committed)
        for segment in listed:
            assert self.plain.path(segment.key).is_file(), "a listed segment is stored"

    def heal_and_compare(self) -> None:
        self.state_disk.plans.clear()
        self.store.plans.clear()
        self.store.absent, self.skew_s = False, 200_000.0  # beyond what was to be deleted later
        self.commit()  # reading waits while sealed segments are not committed
        for _ in range(12):
            self.poll(3, None)
        self.commit()
        self.upload()
        for _ in range(30):
            self.now += 1
            if not self.shipper._upkeep.step():
                break
        missing = self.written - self.may_be_lost - self.committed
        assert (set(), set()) == (missing, self.committed - {*range(1, self.next_id)}), f"missing {missing}"
        found = self.rows()
        assert Counter(self.committed) == found, "each record is in the data set once"
        stored = {key for key in self.plain.keys("") if key.endswith(".parquet")}
        assert {segment.key for segment in self.listed()} == stored, "nothing is left over"
        assert [] == [*(self.folder / "ship" / "spool").glob("*.parquet")]
        before = set(self.committed)
        self.reopen()
        for _ in range(4):
            self.poll(3, None)
        self.commit()
        self.upload()
        assert before == self.committed, "a restart brings nothing new"
        assert found == self.rows()

    def rows(self) -> Counter[int]:
        self.store.late = False
        segments = catalog.segments(self.plain, 0, 4e9 - 1, undated=True)
        if not segments:
            return Counter()
        with parquet.connect() as db:
            paths = [str(catalog.local_copy(self.plain, segment, self.folder)) for segment in segments]
            rows = db.execute("SELECT request_id FROM read_parquet($paths)", {"paths": paths}).fetchall()
        return Counter(int(name[2:]) for (name,) in rows)

    def teardown(self) -> None:
        if not hasattr(self, "shipper"):
            return
        try:
            self.heal_and_compare()
        finally:
            self.shipper.close()
            os.close(self.writer)
            shutil.rmtree(self.folder)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(positions_module, name, value)
    monkeypatch.setattr(ship, "BATCH_BYTES", 4 << 20)
    monkeypatch.setattr(upkeep, "MERGE_FROM", 2)
    for module in (tail_module, log_reader_module):
        monkeypatch.setattr(module, "LOGGED_AT_MOST", 0)


@pytest.mark.usefixtures("small")
def test_random_histories_ship_each_record_once() -> None:
    run_state_machine_as_test(
        ShipHistories,
        settings=settings(
            max_examples=HISTORIES,
            stateful_step_count=40,
            deadline=None,
            derandomize="VLLM_WATCH_HISTORIES" not in os.environ,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
