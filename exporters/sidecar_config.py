"""Configuration of the sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from exporters.accounting.prices import Prices
from exporters.net.listener import split_address
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import FieldMap, Scalar
from exporters.tracing.config import OtlpConfig


def counting(config: SidecarConfig) -> RequestCounters:
    """The counts of request records, empty, as this configuration wants them."""
    return RequestCounters(
        BoundedNames(config.teams.configured, config.teams.limit),
        BoundedNames((), config.models_limit),
        config.elsewhere,
    )


OPEN_PATHS = ("/-/healthy", "/-/ready")  # for probes, which have no login and learn nothing else


class EngineTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM server. url: scheme, host and port, without /metrics.

    http_config: how it is asked where it wants TLS of its own authority or a login, in Prometheus' form; see
    docs/hardening.md.
    gpus: UUIDs of its cards or MIG instances, as `nvidia-smi -L` shows them; a single engine has all cards of the host
    unless it says which."""

    name: str
    url: str
    gpus: tuple[str, ...] = ()
    http_config: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or self.url.rstrip("/").endswith("/metrics"):
            raise ValueError(f"url {self.url!r} should be like http://127.0.0.1:8000, without /metrics")


class TeamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Teams that always have series of their own, and how many in all; those beyond are counted as __other__."""

    configured: tuple[str, ...] = ()
    limit: int = 50


class SidecarConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to read, how often, where to serve. Times in seconds."""

    listen: str = "127.0.0.1:9401"
    web_config: str | None = None  # TLS and logins of this listener, in the form of Prometheus' web.yml
    requests_log: tuple[str, ...] = ()
    field_names: Mapping[str, str] = {}  # their name -> ours, for logs of other gateways; see request_log.Fields
    field_values: Mapping[str, Mapping[str, Scalar]] = {}  # our field -> their word -> ours
    engines: tuple[EngineTarget, ...] = ()
    teams: TeamSettings = TeamSettings()
    models_limit: int = 50
    # fine: classic buckets 9 % wide, for stores without native histograms
    histogram_ladder: Literal["coarse", "fine"] = "coarse"
    gpu: Literal["auto", "off"] = "auto"
    # upstreams in the log whose engines are none of these, such as an API that is paid for
    elsewhere: tuple[str, ...] = ()
    # model's name in the log -> model_name of the engine's series, where the engine cannot tell
    aliases: Mapping[str, str] = {}
    # how long the line of a request comes after the engine is done with it, at most; more where requests are long
    patience_s: float = 30.0
    prices: Prices | str | None = None  # a path leads to a prices.yaml
    otlp: OtlpConfig | None = None  # without it no spans and no GenAI metrics
    # a file; without it nothing outlives the process, and counting begins at the beginning of the logs
    state: str | None = None
    remember: int = 200_000  # requests that are known again when their line comes twice
    events: str | None = None
    # a file with one word; without it nobody else reads or writes events over HTTP
    events_token_file: str | None = None
    engine_interval_s: float = 5.0
    gpu_interval_s: float = 1.0
    timeout_s: float = 4.0

    def __post_init__(self) -> None:
        split_address(self.listen)
        if len({e.name for e in self.engines}) != len(self.engines):
            raise ValueError("engines need different names")
        _ = self.fields
        cards = [uuid for target in self.engines for uuid in target.gpus]
        if twice := next((uuid for uuid in cards if cards.count(uuid) > 1), None):
            raise ValueError(f"gpus: {twice} is listed twice; a card has one engine, a MIG instance too")
        for name, listed in (
            ("requests_log", self.requests_log),
            ("engines", tuple(e.url.rstrip("/") for e in self.engines)),
        ):
            if len(set(listed)) != len(listed):
                raise ValueError(f"{name} names one thing twice; it would be counted twice")
        if self.events_token_file and not self.events:
            raise ValueError("events_token_file belongs to events; name the file that they are kept in")
        if self.remember < 1000:
            raise ValueError("remember is at least 1000 requests; 200000 is what it is without")
        if min(self.engine_interval_s, self.gpu_interval_s, self.timeout_s, self.patience_s) <= 0:
            raise ValueError("intervals and timeouts are more than 0 seconds")

    @property
    def fields(self) -> FieldMap:
        return FieldMap(self.field_names, self.field_values)
