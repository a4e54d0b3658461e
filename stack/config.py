"""Configuration files as frozen objects, as `exporters/config.py` reads them, and the one file that is read with what it names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from exporters.config import BadConfig, Source, explain, load, meant, parse, read, source

if TYPE_CHECKING:
    from exporters.sidecar import SidecarConfig

__all__ = ["BadConfig", "Source", "explain", "load", "meant", "parse", "read", "sidecar", "source"]


def sidecar(path: Path) -> SidecarConfig:
    """The sidecar's file, and its prices where they are in a file of their own. Files of prices and of secrets are found from where it stands.

    Raises BadConfig."""
    from exporters.prices import Prices
    from exporters.sidecar import SidecarConfig  # with all of the sidecar: the gateway, which reads files too, does without

    settings, folder = load(path, SidecarConfig), path.parent
    engines = tuple(_rooted(engine, "http_config", folder) for engine in settings.engines)
    spans = _rooted(_rooted(settings.otlp, "ca_file", folder), "headers_file", folder)
    settings = msgspec.structs.replace(_rooted(settings, "web_config", folder), engines=engines, otlp=spans)
    priced = {"prices": load(folder / settings.prices, Prices)} if isinstance(settings.prices, str) else {}
    rooted: SidecarConfig = msgspec.structs.replace(settings, **priced)
    return rooted


def _rooted(struct: Any, field: str, folder: Path) -> Any:
    """The same with the path in this field taken from `folder`, where there is one."""
    path = getattr(struct, field, None)
    return struct if path is None else msgspec.structs.replace(struct, **{field: str(folder / path)})
