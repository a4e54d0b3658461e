"""Configuration of `vllm-watch ship`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from exporters.dataset.layout import check_name
from exporters.dataset.objects import S3Access
from exporters.requests.record import FieldMap, Scalar
from exporters.requests.tail import check_rotated

LEAST_SEAL_BYTES = 1 << 20


class ShipConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Logs to ship, the data set, and sizes and times of its segments.

    dataset: a folder, or s3://bucket/prefix. cluster: name of this cluster in the data set. writer: name of this
    process in it; two processes need two names. `hostname` stands for the name of this machine or pod.
    state: folder for positions, remembered requests and segments that are not stored yet. Times in seconds."""

    dataset: str
    cluster: str
    writer: str
    requests_log: tuple[str, ...]
    state: str
    s3: S3Access = S3Access()
    listen: str = "127.0.0.1:9403"
    web_config: str | None = None  # TLS and auth of this listener, in Prometheus' web.yml format
    rotated: Mapping[str, str] = {}  # as in the sidecar's configuration: log -> pattern of its rotated files
    prometheus: str | None = None  # URL; with it every complete day is compared with sidecar and engines
    http_config: str | None = None  # TLS and auth for it, in Prometheus' http_config format
    field_names: Mapping[str, str] = {}  # as in the sidecar's configuration, for logs of other gateways
    field_values: Mapping[str, Mapping[str, Scalar]] = {}
    seal_bytes: int = 64 << 20  # of lines in memory, about an eighth of that as Parquet
    seal_s: float = 300.0  # age of the oldest line
    spool_bytes: int = 4 << 30  # segments kept while the store fails; then reading waits
    compact_bytes: int = 64 << 20  # of a merged segment, which is held in memory twice; 0: never merge
    grace_s: float = 3600.0  # until replaced segments are deleted; a query that began before still reads them
    retain_days: int | None = None  # days after which segments are deleted; None: never
    remember: int = 200_000  # requests remembered to detect repeated lines

    def __post_init__(self) -> None:
        check_name("cluster", self.cluster)
        check_name("writer", self.writer)
        _ = self.fields
        check_rotated(self.requests_log, self.rotated)
        if not self.requests_log or len(set(self.requests_log)) != len(self.requests_log):
            raise ValueError("requests_log needs one entry for each log, at least one, none twice")
        if self.seal_bytes < LEAST_SEAL_BYTES or self.spool_bytes < 2 * self.seal_bytes:
            raise ValueError("seal_bytes must be at least 1 MiB, and spool_bytes at least twice seal_bytes")
        if self.seal_s <= 0 or self.grace_s < 0 or self.compact_bytes < 0:
            raise ValueError("seal_s must be greater than 0; grace_s and compact_bytes must not be negative")
        if self.retain_days is not None and self.retain_days < 1:
            raise ValueError("retain_days must be at least 1")
        if self.remember < 1000:
            raise ValueError("remember must be at least 1000 requests; the default is 200000")

    @property
    def fields(self) -> FieldMap:
        return FieldMap(self.field_names, self.field_values)
