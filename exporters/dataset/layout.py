"""Layout of a data set: object keys, segments, manifests and writer claims. Pure.

    day=2026-11-25/cluster=prod/model=chat/<first 40 digits of the SHA-256 of its bytes>.parquet
    manifests/day=2026-11-25/cluster=prod/<writer>.json
    writers/cluster=prod/<writer>.json

Invariant: a segment's key is a function of its partition and its bytes, so that writing it again changes nothing. A
segment belongs to the data set while its day's manifest lists it; one write of the manifest adds or replaces segments,
so that a reader of manifests never counts a row twice, also during compaction."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from urllib.parse import quote, unquote

import msgspec

from exporters.requests.bounded_names import UNKNOWN_MODEL

FORMAT = 1  # of manifests and claims
LAST_S = datetime.max.replace(tzinfo=UTC).timestamp() - 1  # a record may have any year up to 9999
UNDATED = "undated"  # partition of records without a time
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # Hive's name for null, which engines read as null
OTHER_MODELS = "__other__"  # partition of models beyond MODELS_AT_MOST in a segment, and of names that fit no key
MODELS_AT_MOST = 50  # partitions of one sealing; clients may send any model name
PARTITION_CHARS = 100  # of a model in a key: a name of a file has at most 255 bytes, on some file systems 143
MANIFESTS, WRITERS = "manifests", "writers"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SAFE = "-_. "  # characters of a model name that stay as they are in a key
_HASH_CHARS = 40


class BadDataset(ValueError):
    """Object of a data set that cannot be used; the message names it."""


class Sums(msgspec.Struct, frozen=True):
    """Totals of records: their number, and the tokens that engines reported for them."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, other: Sums) -> Sums:
        return Sums(*map(sum, zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)))

    def minus(self, other: Sums) -> Sums:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Sums(*(mine - its for mine, its in pairs))


def total(sums: Iterable[Sums]) -> Sums:
    """Return the sum of several totals."""
    result = Sums()
    for one in sums:
        result = result.plus(one)
    return result


class LogSegment(msgspec.Struct, frozen=True, kw_only=True):
    """Parquet file of a data set. model: its partition, decoded; see `model_partition`.

    min_ts, max_ts: unix seconds of its first and last record; None in the partition of undated records. writer: who
    wrote it. schema: version of its columns."""

    key: str
    day: str
    cluster: str
    model: str
    writer: str
    schema: int
    size: int
    sha256: str
    min_ts: float | None
    max_ts: float | None
    sums: Sums


class Replaced(msgspec.Struct, frozen=True):
    """Segment that compaction or retention took out of a manifest. It is deleted after `delete_after`, unix seconds."""

    key: str
    delete_after: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Segments of one day, cluster and writer.

    sequence: the writer's newest commit in it. A writer that finds a newer one, or its own without its segments, is
    not the only one."""

    format: int = FORMAT
    day: str
    cluster: str
    writer: str
    sequence: int = 0
    segments: tuple[LogSegment, ...] = ()
    replaced: tuple[Replaced, ...] = ()

    @property
    def sums(self) -> Sums:
        return total(segment.sums for segment in self.segments)


class WriterClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Right of one state file to write as `writer`. Readers learn from it which manifests may exist.

    owner: identity of the state file. session: process that holds it; the last one started. commit: newest commit of
    the state that may be in a manifest; an older state is a copy, whose lines would repeat."""

    format: int = FORMAT
    cluster: str
    writer: str
    owner: str
    session: str
    commit: int
    host: str
    since: str


_manifests = msgspec.json.Decoder(Manifest)
_claims = msgspec.json.Decoder(WriterClaim)
_encoder = msgspec.json.Encoder()


def check_name(what: str, name: str) -> str:
    """Return a cluster or writer name that is safe in keys. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} needs 1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or digit")
    return name


def day_of(unix_s: float | None) -> str:
    """Return the partition of a time: its day in UTC."""
    return UNDATED if unix_s is None else datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def days_between(since_s: float, until_s: float) -> list[str]:
    """Return the days in UTC that the time range [since, until) touches."""
    first = datetime.fromtimestamp(since_s, UTC).date()
    last = datetime.fromtimestamp(until_s, UTC).date()
    return [(first + timedelta(days=number)).isoformat() for number in range((last - first).days + 1)]


def is_day(text: str) -> bool:
    """Return True for a partition of a day, undated included."""
    try:
        return text == UNDATED or date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def model_partition(model: str | None) -> str:
    """Return the partition of a model as in keys: its name, percent-encoded; Hive's name for an unknown model.

    OTHER_MODELS for a name that is too long for a key, and for Hive's own."""
    if not model or model == UNKNOWN_MODEL:
        return NULL_PARTITION
    partition = quote(model, safe=_SAFE)
    return OTHER_MODELS if len(partition) > PARTITION_CHARS or partition == NULL_PARTITION else partition


def model_name(partition: str) -> str | None:
    """Return the model of a partition in a key; None for null."""
    return None if partition == NULL_PARTITION else unquote(partition)


def segment_key(day: str, cluster: str, model: str, digest: str) -> str:
    """Return the key of a segment. model: its partition as in keys. digest: SHA-256 of its bytes, in hexadecimal."""
    return f"day={day}/cluster={cluster}/model={model}/{digest[:_HASH_CHARS]}.parquet"


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def manifest_key(day: str, cluster: str, writer: str) -> str:
    return f"{MANIFESTS}/day={day}/cluster={cluster}/{writer}.json"


def claim_key(cluster: str, writer: str) -> str:
    return f"{WRITERS}/cluster={cluster}/{writer}.json"


def encode(what: Manifest | WriterClaim) -> bytes:
    """Encode a manifest or claim; equal values have equal bytes. One line, as other engines read JSON."""
    return _encoder.encode(what) + b"\n"


def read_manifest(data: bytes, key: str) -> Manifest:
    """Parse a manifest. Raises BadDataset."""
    try:
        manifest = _manifests.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadDataset(f"{key} is no manifest ({error})") from error
    if manifest.format > FORMAT:
        raise BadDataset(f"{key} has format {manifest.format}, and this release reads up to {FORMAT}; update it")
    return manifest


def read_claim(data: bytes, key: str) -> WriterClaim:
    """Parse a claim. Raises BadDataset."""
    try:
        return _claims.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadDataset(f"{key} is no claim of a writer ({error})") from error
