"""Configuration of the connection to an OpenTelemetry collector."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec


class OtlpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Collector address, spans to send, and the switch for GenAI metrics.

    endpoint: such as http://otelcol:4318, or http://otelcol:4317 with protocol grpc; https where the collector has a
    certificate.
    headers_file: one `name: value` per line, such as an API key; read at start. ca_file: authority that signed the
    collector's certificate; read at start. sample: share of traces to send, 0 to 1; failed requests, and those whose
    first token or end took that long, are always sent.
    metrics: also send GenAI metrics."""

    endpoint: str
    protocol: Literal["http", "grpc"] = "http"
    headers_file: str | None = None
    ca_file: str | None = None
    compression: Literal["none", "gzip"] = "none"
    sample: float = 1.0
    slow_ttft_s: float = 2.5
    slow_e2e_s: float = 60.0
    metrics: bool = False

    def __post_init__(self) -> None:
        if mistake := _endpoint_mistake(self.endpoint, self.protocol):
            raise ValueError(f"endpoint {mistake}")
        if self.ca_file and not self.endpoint.startswith("https://"):
            raise ValueError("ca_file is of no use without TLS; write the endpoint with https://")
        if not 0 <= self.sample <= 1:
            raise ValueError(f"sample is a share of traces from 0 to 1, not {self.sample:g}")
        if not (self.slow_ttft_s > 0 and self.slow_e2e_s > 0):
            raise ValueError("slow_ttft_s and slow_e2e_s are more than 0 seconds")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of headers_file. Raises ValueError where the file cannot be used."""
        return read_headers(Path(self.headers_file)) if self.headers_file else {}


def _endpoint_mistake(endpoint: str, protocol: str) -> str | None:
    """Return the mistake in a collector address, None if valid. It does not quote a password."""
    if "@" in endpoint:
        return f"{endpoint.rpartition('@')[2]!r} has a user or a password before it; a key belongs into headers_file"
    example = "http://127.0.0.1:4317" if protocol == "grpc" else "http://127.0.0.1:4318"
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError:
        return f"{endpoint!r} has no port from 0 to 65535"
    if (
        url.scheme not in ("http", "https")
        or not url.hostname
        or url.query
        or url.fragment
        or not re.fullmatch("[!-~]+", endpoint)
    ):
        return f"{endpoint!r} is no collector address; write it like {example}"
    if port is None and url.scheme == "http":
        return f"{endpoint!r} names no port; write it like {example}"
    if protocol == "grpc" and url.path not in ("", "/"):
        return f"{endpoint!r} has a path, which gRPC does not know; write it like {example}"
    return None


def read_headers(path: Path) -> dict[str, str]:
    """Return lower-case header names and values from a file of `name: value` lines.

    Raises ValueError without quoting a value: most are keys."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
        raise ValueError(f"otlp.headers_file: {path} cannot be read: {cause}") from error
    headers = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (header := re.fullmatch(r"([A-Za-z0-9_.-]+):[ \t]*([ -~]*[!-~])[ \t]*", line)):
            raise ValueError(
                f"otlp.headers_file: {path}, line {number}: this is no header; write one `name: value` a line"
            )
        headers[header[1].lower()] = header[2]
    return headers
