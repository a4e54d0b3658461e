"""Configuration of the sidecar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from exporters.accounting.gpu_use import assumed_gpu
from exporters.accounting.prices import Prices
from exporters.catalogue.metric import EngineRole
from exporters.net.addresses import split_address
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import FieldMap, Scalar
from exporters.requests.tail import check_rotated
from exporters.tracing.config import OtlpConfig

OPEN_PATHS = ("/-/healthy", "/-/ready")  # for probes: no auth, no other content


class EngineTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM server. url: scheme, host and port, without /metrics.

    http_config: TLS and auth for the engine in Prometheus' format; see docs/guides/hardening.md. gpus: UUIDs of its
    GPUs or MIG instances, as in `nvidia-smi -L`; a single engine without it has all GPUs of the host. gpu_count: number
    of its GPUs where the sidecar cannot see them, as on Kubernetes; gpu_name: their name, for the price.

    role: prefill or decode in disaggregated serving, where both engines of a pair serve each request; Prometheus'
    target needs the same as its label `role`."""

    name: str
    url: str
    gpus: tuple[str, ...] = ()
    http_config: str | None = None
    gpu_count: int = 0
    gpu_name: str | None = None
    role: EngineRole | None = None

    def __post_init__(self) -> None:
        if self.gpu_count < 0 or (self.gpu_count and self.gpus) or "/" in (self.gpu_name or ""):
            raise ValueError(
                f"engine {self.name!r}: name its GPUs in gpus, or their number in gpu_count (1 or more) with gpu_name"
                " (no slash), not both"
            )
        if not self.url.startswith(("http://", "https://")) or self.url.rstrip("/").endswith("/metrics"):
            raise ValueError(f"url {self.url!r} should be like http://127.0.0.1:8000, without /metrics")

    @property
    def claimed_gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of its GPUs; assumed ones where only their number is configured."""
        return self.gpus or tuple(assumed_gpu(self.name, self.gpu_name, number) for number in range(self.gpu_count))


class PeerTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sidecars that read the logs of other gateways. url: scheme, host and port; every address that the host name
    resolves to is one sidecar. http_config: TLS and auth, in Prometheus' format."""

    url: str
    http_config: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or self.url.count("/") > 2:
            raise ValueError(f"peers: url {self.url!r} should be like http://gateway-1:9401")


class TeamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Teams that always have their own series, and the limit of teams; further ones are counted as __other__."""

    configured: tuple[str, ...] = ()
    limit: int = 50


class SidecarConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sources, intervals and listener of the sidecar. Times in seconds."""

    listen: str = "127.0.0.1:9401"
    web_config: str | None = None  # TLS and auth of this listener, in Prometheus' web.yml format
    requests_log: tuple[str, ...] = ()
    # log -> pattern of its rotated files under other names or in another folder, relative to its own
    rotated: Mapping[str, str] = {}
    field_names: Mapping[str, str] = {}  # foreign name -> ours, for logs of other gateways; see record.FieldMap
    field_values: Mapping[str, Mapping[str, Scalar]] = {}  # our field -> foreign word -> ours
    engines: tuple[EngineTarget, ...] = ()
    # with several gateways: the sidecars of the others. Only the sidecar that has `engines` names them
    peers: tuple[PeerTarget, ...] = ()
    # one file for all sidecars: the one whose host name ends in 0 has engines, peers and GPUs; the others only a log
    central: Literal["hostname"] | None = None
    teams: TeamSettings = TeamSettings()
    models_limit: int = 50
    # fine: classic buckets 9 % wide, for stores without native histograms
    histogram_ladder: Literal["coarse", "fine"] = "coarse"
    gpu: Literal["auto", "off"] = "auto"
    # upstreams in the log that are not these engines, such as a paid API
    elsewhere: tuple[str, ...] = ()
    # model name in the log -> model_name of the engine's series, if the engine does not report it
    aliases: Mapping[str, str] = {}
    # maximum delay of a log line after the engine finished; increase it for long requests
    patience_s: float = 30.0
    prices: Prices | str | None = None  # a path names a prices.yaml
    otlp: OtlpConfig | None = None  # None: no spans and no GenAI metrics
    # state file; without it counting starts at the beginning of the logs
    state: str | None = None
    remember: int = 200_000  # requests remembered to detect repeated lines
    # result files of `vllm-watch golden check --result`
    golden: tuple[str, ...] = ()
    events: str | None = None
    # file with one word; without it /events is disabled
    events_token_file: str | None = None
    engine_interval_s: float = 5.0
    gpu_interval_s: float = 1.0
    timeout_s: float = 4.0

    def __post_init__(self) -> None:
        split_address(self.listen)
        if len({e.name for e in self.engines}) != len(self.engines):
            raise ValueError("engine names must be unique")
        _ = self.fields
        check_rotated(self.requests_log, self.rotated)
        uuids = [uuid for target in self.engines for uuid in target.gpus]
        if twice := next((uuid for uuid in uuids if uuids.count(uuid) > 1), None):
            raise ValueError(f"gpus: {twice} is listed twice; a GPU or MIG instance has one engine")
        for name, listed in (
            ("requests_log", self.requests_log),
            ("engines", tuple(e.url.rstrip("/") for e in self.engines)),
            ("golden", self.golden),
        ):
            if len(set(listed)) != len(listed):
                raise ValueError(f"{name} lists an entry twice; it would be counted twice")
        if len({peer.url for peer in self.peers}) != len(self.peers):
            raise ValueError("peers lists an entry twice")
        if self.peers and not (self.engines and self.state):
            raise ValueError("peers needs engines and state: they belong to the one sidecar that has the engines")
        if self.events_token_file and not self.events:
            raise ValueError("events_token_file needs events, the events file")
        if self.remember < 1000:
            raise ValueError("remember must be at least 1000 requests; the default is 200000")
        if min(self.engine_interval_s, self.gpu_interval_s, self.timeout_s, self.patience_s) <= 0:
            raise ValueError("intervals and timeouts must be greater than 0 seconds")

    def on(self, hostname: str) -> SidecarConfig:
        """Return the configuration of the sidecar on this host: with `central`, of one that has engines or of one that
        reads a log only. Raises ValueError for a host name without a number at its end."""
        if self.central is None:
            return self
        ordinal = re.search(r"(\d+)$", hostname)
        if ordinal is None:
            raise ValueError(f"central: the host name {hostname!r} does not end in a number; leave central out")
        return self if int(ordinal[1]) == 0 else msgspec.structs.replace(self, engines=(), peers=(), gpu="off")

    @property
    def fields(self) -> FieldMap:
        return FieldMap(self.field_names, self.field_values)


def counting(config: SidecarConfig) -> RequestCounters:
    """Return empty request counters for this configuration."""
    return RequestCounters(
        BoundedNames(config.teams.configured, config.teams.limit),
        BoundedNames((), config.models_limit),
        config.elsewhere,
    )
