"""Configuration files of commands, with the files that they include."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from exporters.config import BadConfig, YamlFile, explain, load, meant, parse, read, read_text, source

if TYPE_CHECKING:
    from exporters.dataset.ship_config import ShipConfig
    from exporters.sidecar_config import SidecarConfig

__all__ = [
    "BadConfig",
    "YamlFile",
    "explain",
    "load",
    "meant",
    "parse",
    "read",
    "read_text",
    "ship",
    "sidecar",
    "source",
]


def sidecar(path: Path) -> SidecarConfig:
    """The sidecar's file, and its prices where they are in a file of their own. Every path in it is taken from the
    folder that it stands in, and
    absolute: where a log was read up to is kept under its path, which must not depend on how this one was written.
    Raises BadConfig."""
    from exporters.accounting.prices import Prices

    # with all of the sidecar: the gateway, which reads files too, does without
    from exporters.sidecar_config import SidecarConfig

    settings, folder = load(path, SidecarConfig), path.parent
    rooted: SidecarConfig = msgspec.structs.replace(
        _rooted(settings, folder, "web_config", "state", "events", "events_token_file"),
        requests_log=tuple(os.path.abspath(folder / log) for log in settings.requests_log),
        rotated={os.path.abspath(folder / log): pattern for log, pattern in settings.rotated.items()},
        golden=tuple(os.path.abspath(folder / file) for file in settings.golden),
        engines=tuple(_rooted(engine, folder, "http_config") for engine in settings.engines),
        peers=tuple(_rooted(peer, folder, "http_config") for peer in settings.peers),
        otlp=settings.otlp and _rooted(settings.otlp, folder, "ca_file", "headers_file"),
        prices=load(folder / settings.prices, Prices) if isinstance(settings.prices, str) else settings.prices,
    )
    return rooted


def ship(path: Path) -> ShipConfig:
    """The file of `ship`, with every path in it absolute and taken from its folder. Raises BadConfig."""
    from exporters.dataset.ship_config import ShipConfig

    settings, folder = load(path, ShipConfig), path.parent
    if not settings.dataset.startswith("s3://"):
        settings = _rooted(settings, folder, "dataset")
    if settings.writer == "hostname":
        settings = msgspec.structs.replace(settings, writer=socket.gethostname())
    rooted: ShipConfig = msgspec.structs.replace(
        _rooted(settings, folder, "state", "web_config", "http_config"),
        requests_log=tuple(os.path.abspath(folder / log) for log in settings.requests_log),
        rotated={os.path.abspath(folder / log): pattern for log, pattern in settings.rotated.items()},
        s3=_rooted(settings.s3, folder, "credentials_file", "ca_file"),
    )
    return rooted


def _rooted(struct: Any, folder: Path, *fields: str) -> Any:
    """Return the struct with the paths in these fields relative to `folder`, where there are any."""
    named = {field: getattr(struct, field) for field in fields}
    return msgspec.structs.replace(
        struct, **{field: os.path.abspath(folder / path) for field, path in named.items() if path}
    )
