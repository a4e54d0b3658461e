"""Readers' view of a data set: its location, its segments for a time range, and local copies of them.

A reader needs no listing to be complete, except of the claims of writers, which are made once: manifests are read by
key, so a store that lists late hides nothing. Only ranges of more than 100 days are listed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from hashlib import file_digest
from pathlib import Path

from exporters.dataset import layout
from exporters.dataset.layout import OTHER_MODELS, UNDATED, BadDataset, LogSegment, Manifest, WriterClaim, days_between
from exporters.dataset.objects import FolderStore, ObjectStore, S3Access
from exporters.text import write_atomically

LISTED_FROM_DAYS = 100
NEEDS_EXTRA = "install vllm-watch with its data set libraries: pip install 'vllm-watch[data]'"


def open_store(location: str, s3: S3Access | None = None) -> ObjectStore:
    """Return the store of a location: a folder, or s3://bucket/prefix.

    Raises BadConfig, and BadDataset if the client library is missing."""
    if not location.startswith("s3://"):
        return FolderStore(Path(location))
    try:
        from exporters.dataset.s3 import S3ObjectStore  # loads the client library
    except ImportError as error:
        raise BadDataset(f"{location} needs the package {error.name}; {NEEDS_EXTRA}") from error
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    return S3ObjectStore(bucket, prefix.strip("/"), s3 or S3Access())


def writers(store: ObjectStore, clusters: Collection[str] = ()) -> Iterator[WriterClaim]:
    """Yield the writers of a data set, in order of cluster and name. Raises StoreError, BadDataset."""
    for key in store.keys(f"{layout.WRITERS}/"):
        if key.endswith(".json") and (found := store.get(key)):
            claim = layout.read_claim(found[0], key)
            if not clusters or claim.cluster in clusters:
                yield claim


def manifest(store: ObjectStore, day: str, cluster: str, writer: str) -> Manifest:
    """Return the manifest of a day, cluster and writer; empty if there is none. Raises StoreError, BadDataset."""
    key = layout.manifest_key(day, cluster, writer)
    found = store.get(key)
    return layout.read_manifest(found[0], key) if found else Manifest(day=day, cluster=cluster, writer=writer)


def manifests(
    store: ObjectStore, since_s: float, until_s: float, clusters: Collection[str] = (), *, undated: bool = False
) -> Iterator[Manifest]:
    """Yield the manifests of all days that a time range touches, oldest first. Raises StoreError, BadDataset.

    undated: also those of records without a time."""
    known = list(writers(store, clusters))
    until_s = min(until_s, layout.LAST_S)
    if until_s - since_s > LISTED_FROM_DAYS * 86_400:
        # one listing instead of a read for each day; days are not listed late for long
        there = {key.split("/")[1].removeprefix("day=") for key in store.keys(f"{layout.MANIFESTS}/")}
        days = sorted(day for day in there if layout.day_of(since_s) <= day <= layout.day_of(until_s))
    else:
        days = days_between(since_s, until_s)
    for day in [*days, *([UNDATED] if undated else [])]:
        for claim in known:
            found = manifest(store, day, claim.cluster, claim.writer)
            if found.segments or found.sequence:
                yield found


def segments(
    store: ObjectStore,
    since_s: float,
    until_s: float,
    clusters: Collection[str] = (),
    models: Collection[str] = (),
    *,
    undated: bool = False,
) -> list[LogSegment]:
    """Return the segments that may hold records of [since, until), in unix seconds. Raises StoreError, BadDataset.

    clusters, models: empty means all. A segment of other models is included where models were too many for one
    partition each, so filter rows by the column `model`."""
    wanted = {layout.model_partition(model) for model in models} | {OTHER_MODELS} if models else None
    return [
        segment
        for one in manifests(store, since_s, until_s, clusters, undated=undated)
        for segment in one.segments
        if (wanted is None or segment.model in wanted)
        and (segment.min_ts is None or segment.min_ts < until_s)
        and (segment.max_ts is None or segment.max_ts >= since_s)
    ]


def local_copy(store: ObjectStore, segment: LogSegment, cache: Path) -> Path:
    """Return a local file of a segment, complete and of the right content.

    A folder's own file, or a copy in `cache`, the caller's private folder; a copy never expires, as keys are hashes of
    the content. Raises BadDataset for a missing or damaged segment, StoreError otherwise."""
    if isinstance(store, FolderStore):
        path = store.path(segment.key)
        try:
            with path.open("rb") as file:
                digest = file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise BadDataset(f"{store.name}: segment {segment.key} is missing") from None
        _check(store, segment, digest)
        return path
    path = cache / segment.key
    if path.is_file() and path.stat().st_size == segment.size:
        return path
    if (found := store.get(segment.key)) is None:
        raise BadDataset(f"{store.name}: segment {segment.key} is missing")
    _check(store, segment, layout.digest_of(found[0]))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, found[0], mode=0o600)
    return path


def _check(store: ObjectStore, segment: LogSegment, digest: str) -> None:
    if digest != segment.sha256:
        raise BadDataset(f"{store.name}: segment {segment.key} is damaged: its content differs from its hash")
