"""The gateway's configuration file."""

from __future__ import annotations

import math
import ssl
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from exporters.engine.liveness import DEFAULT_LIMITS, LivenessLimits
from exporters.net.addresses import split_address
from exporters.net.http_client import client_ssl_context
from exporters.net.listener_auth import ListenerAuth
from stack.config import BadConfig
from stack.gateway.body_budget import PARTS
from stack.gateway.cors import Cors
from stack.gateway.request_headers import header_mistake
from stack.gateway.routes import RECORDED, plain
from stack.gateway.sharing import Sharing


class GatewayLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """body_bytes: larger requests get 413. bodies_bytes: of all requests above 16 KiB that come, wait, or may still be
    sent to another engine (over
    TLS: until one answers); where there are several teams half as much of one, and beyond that 503. Null: four times
    body_bytes; what is held takes up to three times the memory. log_bytes: records kept in memory while the log cannot
    be written."""

    body_bytes: int = 32 << 20
    bodies_bytes: int | None = None
    log_bytes: int = 8 << 20

    @property
    def all_bodies_bytes(self) -> int:
        return self.bodies_bytes or 4 * self.body_bytes


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All in seconds.

    body_s: the client sends its body. connect_s: the engine accepts the connection. prefill_s: request sent -> first
    content token of a stream. decode_s: between content tokens. total_s: a reply without stream. accept_grace_s: after
    SIGTERM new requests are still served, while /-/ready is 503, so that a load balancer sends no more of them.
    drain_s: running requests may end after that."""

    body_s: float = 60.0
    connect_s: float = 5.0
    prefill_s: float = 600.0
    decode_s: float = 120.0
    total_s: float = 1800.0
    accept_grace_s: float = 0.0
    drain_s: float = 30.0


class LivenessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Detection of engines that hang. All times in seconds.

    probe: whether it sends an engine completions of one token, when the engine is silent or idle; without them only
    requests and /metrics show a hang. idle_probe_s: interval of those while an engine has no work; null for none.
    out_s: without progress, an engine leaves rotation after it. hung_s: and counts as hung after it. on_hung: a command
    and its arguments, run once when an engine becomes hung, with what is known of it as JSON on standard input."""

    probe: bool = True
    idle_probe_s: float | None = DEFAULT_LIMITS.idle_probe_s
    out_s: float = DEFAULT_LIMITS.out_s
    hung_s: float = DEFAULT_LIMITS.hung_s
    on_hung: list[str] = []

    def __post_init__(self) -> None:
        if not 2 <= self.out_s <= self.hung_s:
            raise ValueError(f"liveness: out_s should be from 2 to hung_s, not {self.out_s:g}")
        if self.idle_probe_s is not None and self.idle_probe_s < 1:
            raise ValueError(f"liveness.idle_probe_s should be at least 1, not {self.idle_probe_s:g}")

    def limits(self, gap_s: float) -> LivenessLimits:
        """Return the limits for looks that are late beyond `gap_s`."""
        idle_s = math.inf if self.idle_probe_s is None else self.idle_probe_s
        usual = DEFAULT_LIMITS
        return replace(
            usual,
            slow_s=min(usual.slow_s, self.out_s / 4),
            suspect_s=min(usual.suspect_s, self.out_s / 2),
            out_s=self.out_s,
            hung_s=self.hung_s,
            probe_s=min(usual.probe_s, self.out_s / 4),
            probe_hung_s=min(usual.probe_hung_s, self.hung_s / 2),
            idle_out_s=min(usual.idle_out_s, self.out_s),
            idle_probe_s=idle_s,
            gap_s=gap_s,
        )


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paths are relative to the folder of the configuration file. upstream: the engine's URL, without /v1; not needed
    where teams.yaml has upstreams of its own, which stand in place of it.

    upstream_key_file: holds the engine's own API key, when it wants one; clients' keys are never sent on.
    upstream_ca_file: the authority that signed the engines' certificates, where it is none of those that the system
    trusts.
    web_config: TLS of the listener for clients, in the form of Prometheus' web.yml. metrics_web_config: TLS and logins
    of that for figures.
    engine_pages: whether /metrics and /health of the engine are passed on, without a key; no where teams must not see
    each other's figures.
    secret_file: keys what separates teams in an engine (cache salts, ids of stored responses); replicas that serve the
    same teams need the same. Made where it is missing; null for gateway.secret beside teams.yaml. Not read where there
    is one team.
    also_pass: further routes under /v1 that take POST and leave no record, such as /v1/load_lora_adapter; open to every
    team.
    pass_headers: headers of clients that engines get beside those that vLLM and the clients of its APIs know.
    cors: web pages of other origins that may use the gateway from a browser; without it none may.
    sharing: replicas that serve the same teams.yaml; null for one gateway alone.
    liveness: detection of engines that hang."""

    upstream: str | None = None
    listen: str = "127.0.0.1:8000"
    metrics_listen: str = "127.0.0.1:8010"
    upstream_key_file: str | None = None
    upstream_ca_file: str | None = None
    web_config: str | None = None
    metrics_web_config: str | None = None
    requests_log: str = "requests.jsonl"
    teams: str = "teams.yaml"
    anonymous_team: str | None = None
    secret_file: str | None = None
    engine_pages: bool = True
    also_pass: list[str] = []
    pass_headers: list[str] = []
    cors: Cors | None = None
    sharing: Sharing | None = None
    limits: GatewayLimits = GatewayLimits()
    timeouts: Timeouts = Timeouts()
    liveness: LivenessConfig = LivenessConfig()

    def __post_init__(self) -> None:
        """Refuses values that cannot work; msgspec names the place."""
        if self.upstream is not None and (wrong := url_mistake(self.upstream)):
            raise ValueError(f"upstream {wrong}")
        for text in (self.listen, self.metrics_listen):
            split_address(text)
        for part in ("limits", "timeouts"):
            for name, value in msgspec.structs.asdict(getattr(self, part)).items():
                if value is not None and not (value > 0 or (value == 0 and name == "accept_grace_s")):
                    least = "0 or more" if name == "accept_grace_s" else "more than 0"
                    raise ValueError(f"{part}.{name} should be {least}, not {value:g}")
        if self.limits.all_bodies_bytes < PARTS * self.limits.body_bytes:
            raise ValueError(
                f"limits.bodies_bytes should be at least {PARTS} times limits.body_bytes, or no team could send so"
                " large a body"
            )
        for route in self.also_pass:
            if not plain(route) or route in RECORDED:
                raise ValueError(
                    f"also_pass: {route!r} is no route beside the recorded ones; write it like /v1/load_lora_adapter"
                )
        for wrong in filter(None, map(header_mistake, self.pass_headers)):
            raise ValueError(f"pass_headers: {wrong}")


_PATHS = (
    "requests_log",
    "teams",
    "upstream_key_file",
    "upstream_ca_file",
    "web_config",
    "metrics_web_config",
    "secret_file",
)


def url_mistake(text: str) -> str | None:
    """Return what is wrong with the address of an engine, without /v1; None if nothing is. A password in it is not
    repeated."""
    if "@" in text:
        return f"{text.rpartition('@')[2]!r} has a user or a password before it; a key belongs into a file of its own"
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        return f"{text!r} has no port from 0 to 65535"
    if (
        url.scheme not in ("http", "https")
        or not url.hostname
        or url.path not in ("", "/")
        or url.query
        or url.fragment
    ):
        return f"{text!r} is no engine's address; write it like http://127.0.0.1:8001"
    return None


def no_engine(teams: str) -> str:
    """The sentence for two files of which neither names an engine."""
    return (
        f"upstream: neither this file nor {teams} names an engine; add `upstream: http://HOST:PORT` here or `upstreams`"
        " there"
    )


def rooted(config: GatewayConfig, folder: Path) -> GatewayConfig:
    """Return the configuration with every path absolute, relative to `folder`."""
    named = {name: getattr(config, name) for name in _PATHS}
    sharing = config.sharing
    if sharing is not None and sharing.replicas_file is not None:
        sharing = msgspec.structs.replace(sharing, replicas_file=str(folder / sharing.replicas_file))
    if sharing is not None and sharing.store is not None:
        store = sharing.store
        paths = {name: getattr(store, name) for name in ("password_file", "ca_file")}
        store = msgspec.structs.replace(store, **{name: str(folder / path) for name, path in paths.items() if path})
        sharing = msgspec.structs.replace(sharing, store=store)
    return msgspec.structs.replace(
        config, sharing=sharing, **{name: str(folder / path) for name, path in named.items() if path is not None}
    )


def protection(path: str | None, setting: str, *, tls_only: bool = False) -> ListenerAuth:
    """Return the protection of the listener that a setting names. Raises BadConfig."""
    return ListenerAuth(None if path is None else Path(path), setting, tls_only=tls_only)


def upstream_key(config: GatewayConfig) -> str | None:
    """The engine's key from its file. Raises BadConfig."""
    return None if config.upstream_key_file is None else read_key(Path(config.upstream_key_file), "upstream_key_file")


def upstream_tls(config: GatewayConfig) -> ssl.SSLContext | None:
    """Return the TLS settings for engines with https; None for those of the system. Raises BadConfig."""
    return (
        None
        if config.upstream_ca_file is None
        else client_ssl_context(Path(config.upstream_ca_file), "upstream_ca_file")
    )


def read_key(path: Path, setting: str) -> str:
    """A service's key from its file; `setting` names the one that leads to it. Raises BadConfig."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
        raise BadConfig(f"{setting}: {path} cannot be read: {why}") from error
    if not key or not key.isprintable():
        raise BadConfig(f"{setting}: {path} holds no key; write it on one line")
    return key
