"""The gateway's configuration file."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from stack.config import BadConfig


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """body_bytes: larger requests get 413. log_bytes: records kept in memory while the log cannot be written."""

    body_bytes: int = 32 << 20
    log_bytes: int = 8 << 20


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All in seconds.

    body_s: the client sends its body. connect_s: the engine accepts the connection. prefill_s: request sent -> first content token of a
    stream. decode_s: between content tokens. total_s: a reply without stream. drain_s: running requests may end after SIGTERM."""

    body_s: float = 60.0
    connect_s: float = 5.0
    prefill_s: float = 600.0
    decode_s: float = 120.0
    total_s: float = 1800.0
    drain_s: float = 30.0


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paths are relative to the folder of the configuration file. upstream: the engine's URL, without /v1.

    upstream_key_file: holds the engine's own API key, when it wants one; clients' keys are never sent on."""

    upstream: str
    listen: str = "127.0.0.1:8000"
    metrics_listen: str = "127.0.0.1:8010"
    upstream_key_file: str | None = None
    requests_log: str = "requests.jsonl"
    teams: str = "teams.yaml"
    anonymous_team: str | None = None
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        """Refuses values that cannot work; msgspec names the place."""
        url = urlsplit(self.upstream)
        try:
            _ = url.port
        except ValueError as error:
            raise ValueError(f"upstream {self.upstream!r} has no port from 0 to 65535") from error
        if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/") or url.query or url.username:
            raise ValueError(f"upstream {self.upstream!r} is no engine's address; write it like http://127.0.0.1:8001")
        for text in (self.listen, self.metrics_listen):
            address(text)
        if min(self.limits.body_bytes, self.limits.log_bytes) < 1 or min(msgspec.structs.astuple(self.timeouts)) <= 0:
            raise ValueError("limits and timeouts are more than 0")


def address(text: str) -> tuple[str, int]:
    """host and port of 'host:port' or '[::1]:port'; port 0 picks a free one. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address to listen on; write it like 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def rooted(config: GatewayConfig, folder: Path) -> GatewayConfig:
    """The same with every path absolute, taken from `folder`."""
    key = config.upstream_key_file
    return msgspec.structs.replace(
        config,
        requests_log=str(folder / config.requests_log),
        teams=str(folder / config.teams),
        upstream_key_file=None if key is None else str(folder / key),
    )


def upstream_key(config: GatewayConfig) -> str | None:
    """The engine's key from its file. Raises BadConfig."""
    if config.upstream_key_file is None:
        return None
    try:
        key = Path(config.upstream_key_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"upstream_key_file: {config.upstream_key_file} cannot be read: {error}") from error
    if not key or not key.isprintable():
        raise BadConfig(f"upstream_key_file: {config.upstream_key_file} holds no key; write it on one line")
    return key
