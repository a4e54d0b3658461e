"""Writer of a data set: puts committed segments into the store and into their manifests.

Invariant: each step may be repeated after a crash or an unclear answer of the store, and then changes nothing. A
second writer of the same name is found by the claim or the manifest, and the one that finds it stops."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from exporters.dataset import layout
from exporters.dataset.layout import BadDataset, LogSegment, Manifest, Replaced, WriterClaim, digest_of
from exporters.dataset.objects import ObjectStore, StoreConflict, StoreError
from exporters.dataset.ship_state import PendingSegment, ShipState
from exporters.requests.record import timestamp

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
        self._session = secrets.token_hex(8)
        self._version: str | None = None  # of the claim
        self._claim: WriterClaim | None = None

    def claim(self) -> None:
        """Claim the writer's name for this process. Raises WriterConflict, StoreError, BadDataset."""
        key = layout.claim_key(self.cluster, self.writer)
        name = f"{self.store.name}: writer {self.writer} of cluster {self.cluster}"
        found = self.store.get(key)
        claim = layout.read_claim(found[0], key) if found else None
        if claim and claim.owner != self._state.last.owner:
            raise WriterConflict(
                f"{name} belongs to another state, of {claim.host} since {claim.since}; give this process its own"
                " `writer`, or its former `state`"
            )
        if claim and claim.commit > self._state.last.number:
            raise WriterConflict(
                f"{name} stored commit {claim.commit}, and this state ends at {self._state.last.number}: it is an old"
                " copy, whose lines would repeat; use the newest state, or another `writer`"
            )
        made = WriterClaim(
            cluster=self.cluster,
            writer=self.writer,
            owner=self._state.last.owner,
            session=self._session,
            commit=claim.commit if claim else 0,
            host=socket.gethostname(),
            since=timestamp(self._clock()),
        )
        self._version = self._replace(key, layout.encode(made), found[1] if found else None)
        self._claim = made

    def upload(self) -> list[Manifest]:
        """Store all committed segments and list them in their manifests; return those.

        Raises StoreError, to be called again, and WriterConflict. OSError if the state cannot be written."""
        pending = self._state.last.pending
        if not pending:
            return []
        self._advance_claim(pending[-1].commit)
        for one in pending:
            self._put(one)
        by_day: dict[str, list[PendingSegment]] = {}
        for one in pending:
            by_day.setdefault(one.segment.day, []).append(one)
        changed = [self._list(day, of_day) for day, of_day in sorted(by_day.items())]
        self._state.stored(pending)
        self.clean_spool()
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
        found = self.store.get(key)
        before = (
            layout.read_manifest(found[0], key)
            if found
            else Manifest(day=day, cluster=self.cluster, writer=self.writer)
        )
        after = change(before)
        if after != before:
            self._replace(key, layout.encode(after), found[1] if found else None)
        return after

    def _advance_claim(self, commit: int) -> None:
        """Note in the claim that manifests may hold a commit. Another process that claimed the name makes it fail."""
        if self._claim is None:
            self.claim()
        if self._claim and self._claim.commit < commit:
            made = msgspec.structs.replace(self._claim, commit=commit)
            self._version = self._replace(
                layout.claim_key(self.cluster, self.writer), layout.encode(made), self._version
            )
            self._claim = made

    def _put(self, one: PendingSegment) -> None:
        data = self._file(one.segment).read_bytes()
        if digest_of(data) != one.segment.sha256:
            raise BadDataset(f"{self._file(one.segment)} is damaged: its content differs from its hash")
        self.store.put(one.segment.key, data)
        if one.replaces:  # what it replaces will be deleted
            stored = self.store.get(one.segment.key)
            if stored is None or digest_of(stored[0]) != one.segment.sha256:
                raise StoreError(f"{self.store.name}: {one.segment.key} is not what was stored")

    def _list(self, day: str, pending: Sequence[PendingSegment]) -> Manifest:
        def add(before: Manifest) -> Manifest:
            there = {segment.key for segment in before.segments}
            for one in pending:
                if one.commit <= before.sequence and one.segment.key not in there:
                    raise WriterConflict(
                        f"{self.store.name}: the manifest of {day} has commit {before.sequence} of another process that"
                        f" writes as {self.writer} of cluster {self.cluster}; give each its own `writer`"
                    )
            new = [one for one in pending if one.commit > before.sequence]
            gone = {key for one in new for key in one.replaces}
            if missing := gone - there:
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

    def _replace(self, key: str, data: bytes, version: str | None) -> str:
        """Store an object in place of a version. An earlier attempt that seemed to fail may have stored it."""
        try:
            return self.store.put_if(key, data, version)
        except StoreConflict as error:
            found = self.store.get(key)
            if found and found[0] == data:
                return found[1]
            raise WriterConflict(
                f"{error}: another process writes as {self.writer} of cluster {self.cluster}; give each its own"
                " `writer`"
            ) from error

    def _file(self, segment: LogSegment) -> Path:
        return self._spool / f"{segment.sha256}.parquet"
