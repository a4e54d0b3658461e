"""Latency by LoRA adapter and by API route, of requests that ended well. Pure.

Both are families of their own with a few buckets: a label on the histograms of a team would multiply their series.
Invariant: a pair of a model and an adapter or route that has series keeps them; beyond the limit all are counted as
`__other__`. Requests without an adapter are not counted by adapter, so without LoRA that family does not exist."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from exporters.catalogue import bounds, sidecar
from exporters.catalogue.metric import Metric
from exporters.exposition import Distribution, Sample
from exporters.requests.bounded_names import MAX_NAME, OTHER, UNKNOWN_MODEL, BoundedNames
from exporters.requests.record import RequestRecord
from exporters.requests.store import StateProvider

PAIRS = 40  # of a model and an adapter, or of a model and a route, with series of their own
NAME = "grouped_latency"
_GOOD = ("ok", None)
_BETWEEN = "\0"


class _Observed(msgspec.Struct, array_like=True):
    """Observations of one pair. The sum is in milliseconds."""

    counts: list[int]
    sum_ms: float = 0.0


def _part(name: str) -> str:
    return name[:MAX_NAME].replace(_BETWEEN, "?")


@dataclass(slots=True)
class _Table:
    """One family. label: the record's field of the same name."""

    metric: Metric
    label: str
    bounds_s: tuple[float, ...]
    names: BoundedNames = field(default_factory=lambda: BoundedNames((), PAIRS))
    rows: dict[str, _Observed] = field(default_factory=dict)

    def add(self, model: str | None, name: str, values_ms: Sequence[float]) -> None:
        """Count values of one model and one value of the label."""
        key = self.names.fold(_BETWEEN.join(map(_part, (name, model or UNKNOWN_MODEL))))
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = _Observed([0] * (len(self.bounds_s) + 1))
        for value_ms in values_ms:
            row.counts[bisect_left(self.bounds_s, value_ms / 1000)] += 1
        row.sum_ms += sum(values_ms)

    def restore(self, rows: dict[str, _Observed]) -> None:
        """Continue from stored rows. A row with other bounds starts anew."""
        for key, row in rows.items():
            self.names.seat(key)
            if len(row.counts) == len(self.bounds_s) + 1:
                self.rows[key] = row

    def samples(self) -> Iterator[Sample]:
        for key, row in self.rows.items():
            name, _, model = key.partition(_BETWEEN)
            labels = {self.label: name, "model_name": model or OTHER}
            yield self.metric, labels, Distribution(self.bounds_s, tuple(row.counts), row.sum_ms / 1000)


class GroupedLatency:
    """Time to first token by adapter, and request duration by route. stored: the last state of `provider`."""

    def __init__(self, stored: bytes | None = None) -> None:
        """Raises msgspec.MsgspecError for a state of another release."""
        self._adapters = _Table(sidecar.ADAPTER_TTFT, "adapter", bounds.GROUPED_TTFT_S)
        self._routes = _Table(sidecar.ROUTE_E2E, "route", bounds.GROUPED_REQUEST_S)
        self._tables = (self._adapters, self._routes)
        self._revision = 0
        if stored is not None:
            rows = msgspec.msgpack.decode(stored, type=list[dict[str, _Observed]])
            for table, known in zip(self._tables, rows, strict=False):
                table.restore(known)

    def add_all(self, records: Iterable[RequestRecord]) -> None:
        """Count records. Those of one model and name are counted together: a log may have grown for a night."""
        adapters, routes = (defaultdict[tuple[str | None, str], list[float]](list) for _ in self._tables)
        for r in records:
            if r.outcome in _GOOD:
                if r.route and r.e2e_ms is not None:
                    routes[r.model, r.route].append(r.e2e_ms)
                if r.adapter and r.ttft_ms is not None:
                    adapters[r.model, r.adapter].append(r.ttft_ms)
        for table, groups in ((self._adapters, adapters), (self._routes, routes)):
            for (model, name), values_ms in groups.items():
                table.add(model, name, values_ms)
        self._revision += bool(adapters or routes)

    def provider(self) -> StateProvider:
        """Return the state and the series that are committed together with the log's counters."""
        return StateProvider(NAME, lambda: self._revision, self._state, self.samples)

    def samples(self) -> Sequence[Sample]:
        return tuple(sample for table in self._tables for sample in table.samples())

    def _state(self) -> bytes:
        return msgspec.msgpack.encode([table.rows for table in self._tables])
