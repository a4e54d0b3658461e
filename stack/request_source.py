"""Options that name where requests are read from: a data set, request logs, or both."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stack import config
from stack.option import Opt

if TYPE_CHECKING:
    from exporters.accounting.cost_from_log import CostSource
    from exporters.dataset.query import RequestData, RequestSource
    from exporters.requests.read import ReadReport, RecordReader
    from exporters.requests.record import RequestRecord


def require_libraries() -> None:
    """Raise BadDataset if the extra `data` is not installed."""
    from exporters.dataset.catalog import NEEDS_EXTRA
    from exporters.dataset.layout import BadDataset

    if importlib.util.find_spec("duckdb") is None:
        raise BadDataset(f"DuckDB is missing; {NEEDS_EXTRA}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSourceOptions:
    """Data set and logs. ship_config: of the shipper on this machine: data set, access to it, logs and positions."""

    data: Annotated[str | None, Opt(metavar="LOCATION", help="Data set of `ship`: folder or s3://bucket/prefix.")] = (
        None
    )
    logs: Annotated[
        tuple[Path, ...], Opt(name="--log", file=True, help="Request log, with its rotated files; repeatable.")
    ] = ()
    ship_config: Annotated[
        Path | None, Opt(file=True, help="The shipper's YAML: its data set, and lines in no segment yet.")
    ] = None

    def __post_init__(self) -> None:
        if self.ship_config and (self.data or self.logs):
            raise ValueError("--ship-config names data set and logs; omit --data and --log")
        if self.data and self.logs:
            raise ValueError("--data and --log would count lines twice; name the shipper's file, --ship-config")

    @property
    def any(self) -> bool:
        return bool(self.data or self.logs or self.ship_config)

    @property
    def has_data(self) -> bool:
        return bool(self.data or self.ship_config)

    def source(self) -> RequestSource:
        """Return what is meant. Raises BadConfig, ValueError, and BadDataset if the libraries are missing."""
        require_libraries()
        from exporters.dataset.commit_reader import read_shipped
        from exporters.dataset.query import RequestSource

        if self.ship_config is None:
            return RequestSource(location=self.data, logs=self.logs)
        shipper = config.ship(self.ship_config)
        return RequestSource(
            location=shipper.dataset,
            logs=tuple(map(Path, shipper.requests_log)),
            committed=lambda: read_shipped(Path(shipper.state), shipper.remember),
            fields=shipper.fields,
            rotated=shipper.rotated,
            s3=shipper.s3,
            cluster=shipper.cluster,
        )

    def open(self, since_s: float | None, until_s: float | None) -> AbstractContextManager[RequestData]:
        """Open the requests of a time range. Raises what `source` and `open_requests` raise."""
        source = self.source()
        from exporters.dataset.query import open_requests

        return open_requests(source, since_s, until_s)


LATER_S = 86_400.0  # a request that ran in a period may have ended this much later


@contextmanager
def open_whole(location: str, since_s: float | None, until_s: float | None) -> Iterator[RequestData]:
    """Open the requests of a data set that ran in a period, for totals.

    Raises what `open_requests` raises, BadDataset if the libraries are missing, and ValueError for a damaged segment:
    totals without it would be wrong."""
    later_s = None if until_s is None else until_s + LATER_S
    with RequestSourceOptions(data=location).open(since_s, later_s) as data:
        if data.damaged:
            raise ValueError(f"{data.damaged[0]}; `vllm-watch requests` answers without it")
        yield data


def data_reader(
    location: str, since_s: float | None = None, until_s: float | None = None, order: str = "started_at"
) -> RecordReader:
    """Return a reader of a data set for the commands that read request logs; of requests that ran in a period.

    The reader raises what `open_whole` raises."""

    def read(_: ReadReport) -> Iterator[RequestRecord]:
        with open_whole(location, since_s, until_s) as data:
            yield from data.records(order=order)

    return read


def data_cost(location: str, since_s: float | None = None, until_s: float | None = None) -> CostSource:
    """Return a data set as a source of `cost`; of requests that ran in a period.

    It raises what `open_whole` raises."""
    from exporters.accounting.cost_from_data import CostData

    return CostData(location, lambda: open_whole(location, since_s, until_s))
