"""Requests as HTML: the list with its filters, and one request as a time line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from aiohttp import web
from multidict import MultiMapping

from exporters.text import printable
from stack import templates
from stack.board import pages
from stack.board.view import BadView, span
from stack.request_source import RequestSourceOptions

if TYPE_CHECKING:
    from exporters.dataset.request_story import RequestStory

_SHOWN = (
    "ts", "team", "model", "upstream", "variant", "attempt", "outcome", "reason", "unreadable", "prompt_tokens",
    "cached_tokens", "completion_tokens", "finish_reason", "trace_id",
)  # fmt: skip


SPANS = {"15 min": "now-15m", "1 h": "now-1h", "6 h": "now-6h", "24 h": "now-24h"}
ORDERS = {"newest": "", "slowest TTFT": "ttft", "slowest TPOT": "tpot", "slowest queue": "queue", "slowest": "e2e"}
ROWS = 100
_FILTERED = ("team", "model", "engine", "outcome", "reason")  # columns whose values are links that set a filter


@dataclass(frozen=True, slots=True)
class RequestPages:
    """Pages of requests. source: data set and logs. team: the only team that is shown; None: all.

    Invariant: a caller names values of filters, never SQL; with a team, no value of a caller shows another team."""

    source: RequestSourceOptions
    team: str | None
    now: Callable[[], float]
    trace_url: str | None = None
    _busy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def listing(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(self._listing, request)

    async def show(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(self._show, request)

    async def _answer(self, make: Callable[[MultiMapping[str], str], str], request: web.Request) -> web.StreamResponse:
        """One query at a time: each may take all the memory that queries have."""
        async with self._busy:
            text = await asyncio.to_thread(make, request.query, request.match_info.get("id", ""))
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    def _span(self, query: MultiMapping[str]) -> tuple[float, float]:
        return span(query.get("from", "now-1h"), query.get("to", "now"), self.now())

    def _listing(self, query: MultiMapping[str], _: str) -> str:
        from exporters.dataset import request_query

        chosen = {name: query.getall(name, []) for name in request_query.FIELDS if name in query}
        slowest, error, notes = query.get("slowest", ""), "", list[str]()
        found = request_query.RequestTable([], [])
        try:
            only = request_query.RequestFilter({name: tuple(values)[:20] for name, values in chosen.items()})
            if self.team is not None:
                only = replace(only, values={**only.values, "team": (self.team,)})
            with self.source.open(*self._span(query)) as data:
                found = request_query.listed(data, only, slowest or None, ROWS)
                if not found.rows and self.team is None:  # the nearest name may be that of another team
                    error = only.unknown(data) or ""
                # a note may name files; a team sees that something is missing
                notes = data.notes if self.team is None else ["totals are incomplete"] * bool(data.damaged)
        except (ValueError, OSError) as mistake:
            error = (
                str(mistake) if self.team is None or isinstance(mistake, BadView) else "the request cannot be answered"
            )
        pairs = [(name, value) for name, value in query.items() if name in ("from", "to", "slowest", *chosen)]
        return pages.reading_page(
            "requests.html",
            story="",
            back="",
            spans=[_link(text, pairs, "from", at, drop=("to",)) for text, at in SPANS.items()],
            orders=[_link(text, pairs, "slowest", value) for text, value in ORDERS.items()],
            filters=[
                {"text": f"{name}={value}", "href": _address([pair for pair in pairs if pair != (name, value)])}
                for name, values in chosen.items()
                for value in values
                if name != "team" or self.team is None
            ],
            error=error,
            head=found.head,
            rows=[
                [_cell(name, value, pairs) for name, value in zip(found.head, row, strict=True)] for row in found.rows
            ],
            notes=notes,
        )

    def _show(self, query: MultiMapping[str], request_id: str) -> str:
        from exporters.dataset.request_story import find_story

        body = ""
        try:
            with self.source.open(*self._span(query)) as data:
                found = find_story(data, request_id, self.team)
        except (ValueError, OSError):
            found = None
        if found is None:
            raise web.HTTPNotFound(text="There is no such request in this time.\n")
        trace_id = found.record.trace_id
        link = self.trace_url.replace("{trace_id}", trace_id) if self.trace_url and trace_id else None
        body = _story(found, link, names=self.team is None)
        back = _address([(name, value) for name, value in query.items() if name in ("from", "to")])
        empty: dict[str, Any] = {
            "spans": (),
            "orders": (),
            "filters": (),
            "error": "",
            "head": (),
            "rows": (),
            "notes": (),
        }
        return pages.reading_page("requests.html", story=templates.Markup(body), back=back, **empty)


def _address(pairs: Sequence[tuple[str, str]]) -> str:
    return f"/requests?{urlencode([pair for pair in pairs if pair[1]])}"


def _link(
    text: str, pairs: Sequence[tuple[str, str]], name: str, value: str, drop: Sequence[str] = ()
) -> dict[str, Any]:
    others = [pair for pair in pairs if pair[0] != name and pair[0] not in drop]
    return {"text": text, "href": _address([*others, (name, value)]), "chosen": (name, value) in pairs}


def _cell(name: str, value: Any, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    text = "" if value is None else f"{value:,.1f}" if isinstance(value, float) else printable(str(value))
    href = ""
    if name == "request_id":
        times = [pair for pair in pairs if pair[0] in ("from", "to")]
        href = f"/requests/{quote(str(value), safe='')}?{urlencode(times)}"
    elif name in _FILTERED and value is not None:
        href = _address([*(pair for pair in pairs if pair[0] != name), (name, str(value))])
    return {"text": text, "href": href, "number": isinstance(value, int | float)}


def story_file(story: RequestStory, link: str | None) -> str:
    """Return one HTML file that loads nothing."""
    title = f"Request {story.record.request_id}"
    return pages.standing_alone(title, pages.static(pages.STYLE).decode(), (), {}, _story(story, link, names=True))


def _story(story: RequestStory, link: str | None, *, names: bool) -> str:
    """Return the body. names: with the teams of others, which a team's own view leaves out."""
    record, total = story.record, story.record.e2e_ms or 0.0
    phases = [
        {
            "name": phase.name.replace("_", " "),
            "meaning": phase.meaning,
            "length": f"{phase.length_ms:,.1f}",
            "share": f"{phase.length_ms / total:.0%}",
            "left": f"{100 * phase.start_ms / total:.3f}",
            "width": f"{max(0.3, 100 * phase.length_ms / total):.3f}",
            "line": number,
        }
        for number, phase in enumerate(story.phases)
    ]
    teams = ", ".join(f"{count} of {team}" for team, count in story.teams.most_common(8)) if names else ""
    return (
        templates.html("stack.board")
        .get_template("request.html")
        .render(
            request_id=printable(record.request_id),
            fields=[(name, value) for name in _SHOWN if (value := getattr(record, name)) is not None],
            total=f"{total:,.1f}",
            phases=phases,
            blames=[str(one) for one in story.blames if one.share >= 0.05],
            others=len(story.others),
            teams=teams,
            engine=story.engine,
            link=link if link and link.startswith(("http://", "https://")) else None,
        )
    )
