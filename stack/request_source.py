"""Options that name where requests are read from: a data set, request logs, or both."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stack.option import Opt

if TYPE_CHECKING:
    from exporters.dataset.query import RequestData

DATA_LOCATION = "VLLM_WATCH_DATA"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSourceOptions:
    """Data set and logs."""

    data: Annotated[
        str | None,
        Opt(metavar="LOCATION", envvar=DATA_LOCATION, help="Data set of `ship`: folder or s3://bucket/prefix."),
    ] = None
    logs: Annotated[
        tuple[Path, ...], Opt(name="--log", file=True, help="Request log, with its rotated files; repeatable.")
    ] = ()

    def open(self, since_s: float | None, until_s: float | None) -> AbstractContextManager[RequestData]:
        """Open the requests of a time range. Raises what `open_requests` raises."""
        from exporters.dataset.query import RequestSource, open_requests

        return open_requests(RequestSource(location=self.data, logs=self.logs), since_s, until_s)
