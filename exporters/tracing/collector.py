"""Connection to the collector, and the outcome of requests to it.

The exporters of the SDK return success or failure and log the rest. Here every request is reported as an `Attempt`, so
that losses are counted by reason and a collector that is away is logged once, not at every retry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exporters.net.http_client import client_ssl_context
from exporters.tracing.config import OtlpConfig

SERVICE = "vllm-watch-gateway"  # the service that handled the requests; the sidecar only reports them
EXPORT_TIMEOUT_S = 5.0  # for one export call, the SDK's own retries included
RETRIED = ("timeout", "unavailable")  # the collector may accept the same request later
MAX_RETRY_AFTER_S = 60.0
LEAST_SHARE = 0.02  # of that time; the failure of a request with less says nothing about the collector
SHUTDOWN_FLUSH_S = 2.0  # for what is still to be sent at the end
RESERVED_HEADERS = ("content-type", "content-encoding")  # set by the exporters

log = logging.getLogger("vllm_watch.otlp")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Outcome of one request. reason: None when the collector accepted it. rejected: items of an accepted request
    that it refused."""

    reason: Literal["timeout", "unavailable", "refused"] | None = None
    detail: str = ""
    rejected: int = 0
    retry_after_s: float = 0.0


Observe = Callable[[Attempt], None]


@dataclass(frozen=True, slots=True)
class Connection:
    """Parameters of both exporters. ca_file: None for the authorities that the system trusts."""

    endpoint: str
    ca_file: Path | None
    headers: Mapping[str, str]
    user_agent: str
    gzip: bool
    timeout_s: float

    @property
    def least_s(self) -> float:
        """Shortest timeout, in seconds, of a request whose failure is reported. The SDK waits before a retry and gives
        it the rest of the export's time, sometimes 0 s."""
        return LEAST_SHARE * self.timeout_s


def connection(config: OtlpConfig, version: str) -> Connection:
    """Return the connection to the configured collector. Raises ValueError for an unusable headers_file, BadConfig
    for an unusable ca_file."""
    ca_file = Path(config.ca_file) if config.ca_file else None
    if ca_file:
        client_ssl_context(ca_file, "otlp")
    headers = {name: value for name, value in config.headers.items() if name not in RESERVED_HEADERS}
    agent, endpoint = f"vllm-watch/{version}", config.endpoint.rstrip("/").removesuffix("/v1/traces")
    return Connection(endpoint, ca_file, headers, agent, config.compression == "gzip", EXPORT_TIMEOUT_S)


class CollectorState:
    """Last outcome of one signal. Logs once that the collector does not accept it, or refuses it, or accepts it
    again."""

    def __init__(self, endpoint: str, signal: str, consequence: str) -> None:
        """signal: spans or metrics. consequence: what happens to them while the collector does not accept them."""
        self._endpoint, self._signal, self._consequence = endpoint, signal, consequence
        self.reason: str | None = None

    def observe(self, attempt: Attempt) -> None:
        before, self.reason = self.reason, "refused" if attempt.rejected else attempt.reason
        if self.reason == before or {self.reason, before} == set(RETRIED):  # gRPC reports a silent collector as either
            return
        if self.reason is None:
            log.info("%s accepts %s again", self._endpoint, self._signal)
        elif self.reason == "refused":
            log.warning("%s refuses %s: %s", self._endpoint, self._signal, attempt.detail)
        else:
            log.warning(
                "%s does not accept %s (%s); %s: %s",
                self._endpoint,
                self._signal,
                self.reason,
                self._consequence,
                attempt.detail,
            )


def innermost(error: BaseException) -> BaseException:
    """Return the error at the bottom of a chain: HTTP libraries wrap that of the socket several times."""
    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = (getattr(error, "reason", None), *error.args, error.__cause__, error.__context__)
        error = next((one for one in inner if isinstance(one, BaseException)), error)
    return error
