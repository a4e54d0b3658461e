"""Coverage: the panels that show each vLLM series, and the reasons for those without a panel.

Printed to COVERAGE.md, so that a change of the boards shows there what it took away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dashboards.model import Dashboard, Panel
from exporters.catalogue import VLLM, promql_ast, vllm
from exporters.catalogue.metric import Metric
from exporters.catalogue.producers import Component
from exporters.text import markdown_table

# Families that no panel shows, and why. A test refuses a reason for a family that is shown.
_BY_DIRECTION = (
    "deprecated by vLLM; loads and stores are shown by the families that took its place, and both together would count"
    " twice"
)
_NEW_CONNECTOR = "new in vLLM 0.33, of which no engine with this connector was run; query it by its name"
NOT_SHOWN: Mapping[Metric, str] = {
    **dict.fromkeys(
        (
            vllm.KV_OFFLOAD_CONFIG_INFO,
            vllm.KV_OFFLOAD_TIERING_PROMOTION_LATENCY,
            vllm.UMBP_TRANSFER_SUBMITTED,
            vllm.UMBP_TRANSFER_COMPLETED,
            vllm.UMBP_TRANSFER_FAILED,
            vllm.UMBP_TRANSFER_BYTES,
        ),
        _NEW_CONNECTOR,
    ),
    vllm.CORRUPTED_REQUESTS: (
        "absent unless the engine is started with the option, which costs time; once it is, any growth is for an alert"
    ),
    vllm.KV_OFFLOAD_TOTAL_BYTES: _BY_DIRECTION,
    vllm.KV_OFFLOAD_TOTAL_TIME: _BY_DIRECTION,
    vllm.KV_OFFLOAD_SIZE: _BY_DIRECTION,
    vllm.WEBSOCKET_CONNECTIONS: "open connections and how long they last say more",
}

_PLAIN = (Component.ENGINE, Component.SCRAPE)  # what everyone has who watches a vLLM


def shown(boards: Iterable[Dashboard]) -> dict[Metric, tuple[str, ...]]:
    """vLLM's families and the panels (board/panel) whose queries read their values; only to be there is not to be
    shown."""
    read = [(f"{board.slug}/{panel.slug}", _samples(panel)) for board in boards for panel in board.panels]
    return {metric: tuple(place for place, samples in read if samples & set(metric.samples)) for metric in VLLM}


def _samples(panel: Panel) -> set[str]:
    return {
        read.name for query in panel.queries for read in promql_ast.reads(query.expr) if "presence" not in read.above
    }


def unexplained(boards: Iterable[Dashboard]) -> list[str]:
    """Families that are neither shown nor have a reason, and reasons that are not needed; empty when all is well."""
    places = shown(boards)
    silent = [
        f"{metric.name} is on no panel, and nothing says why"
        for metric, at in places.items()
        if not at and metric not in NOT_SHOWN
    ]
    return silent + [f"{metric.name} is on {places[metric][0]} after all" for metric in NOT_SHOWN if places[metric]]


def table(boards: Sequence[Dashboard]) -> str:
    """The whole page, as Markdown."""
    return "\n".join((*_page(boards), ""))


def _page(boards: Sequence[Dashboard]) -> Iterator[str]:
    places = shown(boards)
    default = {metric: at for metric, at in places.items() if not metric.needs}
    optional = {metric: at for metric, at in places.items() if metric.needs}
    yield from (
        "# What the boards show",
        "",
        "Printed by `vllm-watch render`; the source is `dashboards/coverage.py`.",
        "",
    )
    yield from _counts(boards)
    yield from ("", "## What a running vLLM shows by default", "")
    yield f"{sum(map(bool, default.values()))} of {len(default)} families are on a panel."
    yield from ("", *_families(default, with_needs=False))
    yield from ("", "## What it shows with a flag or a feature", "")
    yield f"{sum(map(bool, optional.values()))} of {len(optional)} families are on a panel."
    yield from ("", *_families(optional, with_needs=True))
    for board in boards:
        yield from ("", f"## Panels of {board.title}", "", *_panels(board))


def _counts(boards: Sequence[Dashboard]) -> Iterator[str]:
    yield from markdown_table(
        ("board", "its question", "panels", "queries", "panels that an engine alone fills"),
        (
            (
                board.slug,
                board.question,
                len(board.panels),
                sum(len(p.queries) for p in board.panels),
                sum(not _beyond(p) for p in board.panels),
            )
            for board in boards
        ),
    )
    panels = [panel for board in boards for panel in board.panels]
    queries = sum(len(panel.queries) for panel in panels)
    yield f"| **all {len(boards)}** | | {len(panels)} | {queries} | {sum(not _beyond(panel) for panel in panels)} |"


def _families(places: dict[Metric, tuple[str, ...]], with_needs: bool) -> Iterator[str]:
    head = ("family", "needs", "on") if with_needs else ("family", "on")
    for_each = ((m.name, m.needs, _where(m, at)) if with_needs else (m.name, _where(m, at)) for m, at in places.items())
    yield from markdown_table(head, ((f"`{name}`", *rest) for name, *rest in for_each))


def _where(metric: Metric, at: Sequence[str]) -> str:
    return ", ".join(at) or f"no panel: {NOT_SHOWN.get(metric, 'no reason given')}"


def _panels(board: Dashboard) -> Iterator[str]:
    rows = (
        (panel.slug, panel.title, panel.unit, ", ".join(_beyond(panel)) or "a vLLM engine") for panel in board.panels
    )
    yield from markdown_table(("panel", "title", "unit", "needs"), rows)


def _beyond(panel: Panel) -> list[str]:
    return sorted(component.value for component in panel.needs if component not in _PLAIN)
