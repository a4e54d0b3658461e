"""Writer of a data set: puts committed segments into the store and into their manifests.

Invariant: each step may be repeated after a crash or an unclear answer of the store, and then changes nothing. A
second writer of the same name is found by the claim or the manifest, and the one that finds it stops."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from exporters.dataset import layout
from exporters.dataset.layout import OTHER_MODELS, BadDataset, LogSegment, Manifest, Replaced, WriterClaim, digest_of
from exporters.dataset.objects import ObjectStore, StoreConflict, StoreError, StoreRefusesKey
from exporters.dataset.ship_state import PendingSegment, ShipState
from exporters.requests.record import timestamp

PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)  # between attempts to change an object

log = logging.getLogger("vllm_watch.ship")


class WriterConflict(BadDataset):
    """Another process, or another state file, writes under this name."""


class DatasetWriter:
    """Store of one writer. clock: unix seconds. grace_s: until replaced segments are deleted."""

    def __init__(
        self,
        store: ObjectStore,
        state: ShipState,
        spool: Path,
        cluster: str,
        writer: str,
        clock: Callable[[], float],
        grace_s: float,
    ) -> None:
        self.store, self.cluster, self.writer = store, cluster, writer
        self._state, self._spool, self._clock, self._grace_s = state, spool, clock, grace_s
        self._session, self._since = secrets.token_hex(8), timestamp(clock())
        self._claim_key = layout.claim_key(cluster, writer)
        self.claimed = False

    def claim(self, commit: int = 0) -> None:
        """Claim the writer's name for this process, and note in the claim that manifests may hold a commit.

        Raises WriterConflict, StoreError, BadDataset."""
        made = WriterClaim(
            cluster=self.cluster,
            writer=self.writer,
            owner=self._state.last.owner,
            session=self._session,
            commit=commit,
            host=socket.gethostname(),
            since=self._since,
        )

        def take(stored: bytes | None) -> bytes:
            claim = self._check_claim(stored)
            return layout.encode(msgspec.structs.replace(made, commit=max(commit, claim.commit if claim else 0)))

        self._change(self._claim_key, take)
        self.claimed = True

    def upload(self) -> list[Manifest]:
        """Store all committed segments and list them in their manifests; return those.

        Raises StoreError, to be called again, and WriterConflict. OSError if the state cannot be written."""
        pending = self._state.last.pending
        if not pending:
            return []
        self.claim(pending[-1].commit)
        for one in pending:
            self._put(one)
        pending = self._state.last.pending  # some have another key now
        by_day: dict[str, list[PendingSegment]] = {}
        for one in pending:
            by_day.setdefault(one.segment.day, []).append(one)
        changed = [self._list(day, of_day) for day, of_day in sorted(by_day.items())]
        self._state.stored(pending)
        for one in pending:  # other files may be of segments whose commit is tried again
            self._file(one.segment).unlink(missing_ok=True)
        return changed

    def clean_spool(self) -> None:
        """Delete segment files that no commit waits for."""
        kept = {self._file(one.segment).name for one in self._state.last.pending}
        for path in self._spool.glob("*.parquet"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def update(self, day: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Replace the manifest of a day; return the one that is stored now. Raises StoreError, BadDataset."""
        key = layout.manifest_key(day, self.cluster, self.writer)
        after = empty = Manifest(day=day, cluster=self.cluster, writer=self.writer)

        def changed(stored: bytes | None) -> bytes | None:
            nonlocal after
            before = empty if stored is None else layout.read_manifest(stored, key)
            after = change(before)
            return stored if after == before else layout.encode(after)

        self._change(key, changed)
        return after

    def _check_claim(self, stored: bytes | None) -> WriterClaim | None:
        """Return the stored claim. Raises WriterConflict if it is of another process, and BadDataset.

        Until this process has claimed the name, a claim of the same state is of the process before it."""
        if stored is None:
            return None
        claim = layout.read_claim(stored, self._claim_key)
        store, name = self.store.name, f"{self.writer} of cluster {self.cluster}"
        of = f"of {claim.host} since {claim.since}"
        if claim.owner != self._state.last.owner:
            raise WriterConflict(
                f"{store}: writer {name} belongs to another state, {of}; give this process its own `writer`, or its"
                " former `state`"
            )
        if self.claimed and claim.session != self._session:
            raise WriterConflict(f"{store}: another process {of} writes as {name}; give each its own `writer`")
        if claim.session != self._session and claim.commit > self._state.opened:
            raise WriterConflict(
                f"{store}: writer {name} stored commit {claim.commit}, {of}, and this state began at"
                f" {self._state.opened}: it is an old copy, whose lines would repeat; use the newest state, or"
                " another `writer`"
            )
        return claim

    def _verify_claim(self) -> None:
        """Read the claim again. Raises WriterConflict, which names the other process, StoreError, BadDataset."""
        found = self.store.get(self._claim_key)
        self._check_claim(found and found[0])

    def _put(self, one: PendingSegment) -> None:
        data = self._file(one.segment).read_bytes()
        if digest_of(data) != one.segment.sha256:
            raise BadDataset(f"{self._file(one.segment)} is damaged: its content differs from its hash")
        try:
            self.store.put(one.segment.key, data)
        except StoreRefusesKey as error:
            one = self._moved(one, error)
            self.store.put(one.segment.key, data)
        if one.replaces:  # what it replaces will be deleted
            stored = self.store.get(one.segment.key)
            if stored is None or digest_of(stored[0]) != one.segment.sha256:
                raise StoreError(f"{self.store.name}: {one.segment.key} is not what was stored")

    def _moved(self, one: PendingSegment, error: StoreRefusesKey) -> PendingSegment:
        """Move a segment whose key the store refuses to the partition of other models. Raises `error` if it is there.

        No manifest lists it: all committed segments are stored before the first is listed."""
        before = one.segment
        if before.model == OTHER_MODELS:
            raise error
        key = layout.segment_key(before.day, before.cluster, OTHER_MODELS, before.sha256)
        log.warning("%s; the segment goes to %s", error, key)
        return self._state.move(one, msgspec.structs.replace(before, key=key, model=OTHER_MODELS))

    def _list(self, day: str, pending: Sequence[PendingSegment]) -> Manifest:
        def add(before: Manifest) -> Manifest:
            there = {segment.key for segment in before.segments}
            for one in pending:
                if one.commit <= before.sequence and one.segment.key not in there:
                    self._verify_claim()
                    raise WriterConflict(
                        f"{self.store.name}: the manifest of {day} has commit {before.sequence} of another process that"
                        f" writes as {self.writer} of cluster {self.cluster}; give each its own `writer`"
                    )
            new = [one for one in pending if one.commit > before.sequence]
            gone = {key for one in new for key in one.replaces}
            if (missing := gone - there) and before.sequence:  # 0: the manifest was deleted, by whomever
                self._verify_claim()
                raise WriterConflict(f"{self.store.name}: the manifest of {day} lacks {min(missing)}, to be merged")
            return msgspec.structs.replace(
                before,
                sequence=max(before.sequence, *(one.commit for one in pending)),
                segments=(*(s for s in before.segments if s.key not in gone), *(one.segment for one in new)),
                replaced=(*before.replaced, *self.replaced(sorted(gone))),
            )

        return self.update(day, add)

    def replaced(self, keys: Iterable[str]) -> list[Replaced]:
        """Return entries for segments that are to be deleted after the grace period."""
        return [Replaced(key, self._clock() + self._grace_s) for key in keys]

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace an object by a change of what is stored. Raises StoreError, BadDataset, WriterConflict.

        A conflict is no proof of a second writer: the store may refuse two requests at once, the object may be deleted,
        or an earlier request of this process that seemed to fail is applied late. So the object is read and changed
        again; the claim shows a second writer."""
        for pause_s in (*PAUSES_S, None):
            found = self.store.get(key)
            stored, version = found or (None, None)
            wanted = change(stored)
            if wanted is None or wanted == stored:
                return
            try:
                self.store.put_if(key, wanted, version)
                return
            except StoreConflict:
                if pause_s is None:
                    raise
            self._verify_claim()
            time.sleep(pause_s)

    def _file(self, segment: LogSegment) -> Path:
        return self._spool / f"{segment.sha256}.parquet"
