"""Watch of a canary's engines: a new version, or another configuration, starts a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from exporters.catalogue.exposition_parser import BadExposition
from exporters.engine.client import scrape_engine
from exporters.engine.view import EngineView, History, parse
from stack.canary.state import EngineVersion

STARTS = ("version", "config")

log = logging.getLogger("vllm_watch.canary")


def look(known: Mapping[str, EngineVersion], urls: Iterable[str]) -> tuple[dict[str, EngineVersion], list[str]]:
    """Return what the engines are now, and their changes since `known` as sentences. One that does not answer is as it
    was."""
    found, changed = dict(known), []
    for url in urls:
        try:
            text, version = asyncio.run(scrape_engine(url))
            view = parse(text, version)
        except (OSError, BadExposition) as error:
            log.info("%s", error)
            continue
        before = known.get(url)
        history = History(url, EngineView(before.version, None, {}, before.caches) if before else None)
        changed += [event.what for event in history.observe(view, 0.0) if event.kind in STARTS]
        found[url] = EngineVersion(version or (before.version if before else None), view.caches)
    return found, changed
