"""HTML: the shell of a board, whose JavaScript draws the rest, and the runbook pages. The one door to markdown-it."""

from __future__ import annotations

import hashlib
import html
import importlib.resources
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from urllib.parse import urlencode

from markdown_it import MarkdownIt
from markdown_it.token import Token

from alerts.panel_ref import PanelRef, board_uid
from dashboards import annotations as noted
from dashboards import variables
from dashboards.model import Dashboard, Panel
from runbooks import page as runbook_pages
from runbooks import page_check
from runbooks.lookup import Live, LiveQuery, label_text, panel_url
from stack.board.charts import plotly_js

SCRIPTS = ("units.js", "draw.js", "board.js")
STYLE = "board.css"
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M1 10h3l2-6 3 9"
    " 2-5h4' fill='none' stroke='%234c8dff' stroke-width='2' stroke-linejoin='round'/%3E%3C/svg%3E"
)
_HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
    ' content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="dark light">\n<link'
    f' rel="icon" href="{_ICON}">\n'
)
# Plotly makes style elements and attributes as it draws; scripts are ours alone.
_POLICY = (
    "default-src 'none'; {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'"
)
LIVE_POLICY = _POLICY.format(scripts="script-src 'self'") + "; frame-ancestors 'none'"


@cache
def static(name: str) -> bytes:
    """A file that pages load. Raises KeyError for any other name."""
    if name == "plotly.min.js":
        return plotly_js()
    if name not in (*SCRIPTS, STYLE):
        raise KeyError(name)
    return importlib.resources.files("stack.board").joinpath("static", name).read_bytes()


@cache
def _address(name: str) -> str:
    """Its content is part of a file's address, so that browsers may keep it for ever."""
    return f"/static/{name}?v={hashlib.sha256(static(name)).hexdigest()[:12]}"


def board_page(board: Dashboard, boards: Sequence[Dashboard]) -> str:
    """A board without figures; the page asks for them."""
    content = {"boards": [_named(one) for one in boards], "shown": [described(board, boards)], "snapshot": None}
    scripts = "".join(f'<script src="{_address(name)}" defer></script>\n' for name in SCRIPTS)
    return (
        f'{_HEAD}<title>{html.escape(board.title)}</title>\n<link rel="stylesheet"'
        f' href="{_address(STYLE)}">\n{_data(content)}<script src="{_address("plotly.min.js")}" id="plotly"'
        f" async></script>\n{scripts}</head>\n<body><noscript>This page draws with JavaScript. Without it, ask"
        " Prometheus itself.</noscript></body>\n</html>\n"
    )


def snapshot_page(shown: Sequence[Dashboard], boards: Sequence[Dashboard], snapshot: dict[str, Any]) -> str:
    """One file that needs nobody: style, scripts and figures inside; it may run just these scripts and load nothing."""
    content = {
        "boards": [_named(one) for one in shown],
        "shown": [described(board, boards) for board in shown],
        "snapshot": snapshot,
    }
    scripts = [static(name).decode() for name in ("plotly.min.js", *SCRIPTS)]
    return standing_alone(f"{shown[0].title}: snapshot", static(STYLE).decode(), scripts, content)


def standing_alone(title: str, style: str, scripts: Sequence[str], content: object, body: str = "") -> str:
    """A page that may run just these scripts and load nothing. content: what they find in the element `data`. body:
    HTML, escaped already."""
    if any("</script" in script.lower() for script in scripts):
        raise ValueError("a script holds the end of a script and cannot be put into a page")
    allowed = " ".join(f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = (
        _POLICY.format(scripts=f"script-src {allowed}")
        .replace("'self' ", "")
        .replace("connect-src 'self'", "connect-src 'none'")
    )
    inline = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        f'{_HEAD}<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{html.escape(title)}</title>\n'
        f"<style>{style}</style>\n{_data(content)}</head>\n<body>\n{body}{inline}</body>\n</html>\n"
    )


def described(board: Dashboard, boards: Sequence[Dashboard]) -> dict[str, Any]:
    """What the page needs to know about a board; no query is among it."""
    uids = {one.slug: _named(one)["uid"] for one in boards}
    rows = [
        {"title": row.title, "collapsed": row.collapsed, "panels": [_panel(board, panel, uids) for panel in row.panels]}
        for row in board.rows
    ]
    return {
        **_named(board),
        "question": board.question,
        "rows": rows,
        "variables": [
            {
                "name": v.name,
                "label": v.label,
                "kind": v.kind,
                "options": v.options,
                "default": v.default or (v.options or ("",))[0],
            }
            for v in variables.of(board)
        ],
        "annotations": [{"name": a.name, "colour": a.colour} for a in noted.of(board)],
    }


def _panel(board: Dashboard, panel: Panel, uids: dict[str, str]) -> dict[str, Any]:
    threshold = panel.threshold
    return {
        "id": panel_id(board, panel), "title": panel.title, "means": panel.means, "good": panel.good, "act": panel.act,
        "shape": str(panel.shape), "unit": panel.unit, "width": panel.width, "height": panel.height,
        "fullScale": panel.full_scale,
        "threshold": {"value": threshold.value, "why": threshold.why} if threshold else None, "limit": panel.limit,
        "ranked": panel.ranked, "detail": uids.get(panel.detail, ""),
        "alerts": [name for name in panel.alerts(board.slug) if name in runbook_pages.names()],
    }  # fmt: skip


def panel_id(board: Dashboard, panel: Panel) -> int:
    return PanelRef(board.slug, panel.slug).panel_id


def _named(board: Dashboard) -> dict[str, str]:
    return {"uid": board_uid(board.slug), "slug": board.slug, "title": board.title.removeprefix("vLLM / ")}


def _data(content: object) -> str:
    """JSON inside HTML: `<` is escaped, so that no label can end the element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>\n'


# --- runbooks

_markdown = MarkdownIt("commonmark", {"html": False}).enable("table")


_GROUPS = {
    "critical": "Pages: someone gets up",
    "warning": "Tickets: someone looks at it in working hours",
    "info": "For information: told to no one",
    "": "Of no one alert",
}


def runbook_page(page: runbook_pages.RunbookPage, labels: Mapping[str, str], live: Live | None) -> str:
    """Return a runbook page as HTML.

    page: filled with `labels`, those of an alert. live: the results of its queries, which then stand below them; None
    where they were not evaluated."""
    about = f"{_about(page)}{_labels(labels)}{_now(page, live) if live else _not_evaluated(page, labels)}"
    shown = _rendered(page.readable(), live.answers if live else {}).replace("</h1>", f"</h1>{about}", 1)
    plain = f'<p><a href="/runbooks/{page.name}.md">This page as plain text</a></p>'
    return _reading(page.name, f"{_trail(page.name)}<article>{shown}</article>{plain}")


def _labels(labels: Mapping[str, str]) -> str:
    listed = "".join(f"<code>{html.escape(f'{name}={value}')}</code> " for name, value in sorted(labels.items()))
    return f'<p class="labels">Labels of the alert: {listed}</p>' if labels else ""


def _not_evaluated(page: runbook_pages.RunbookPage, labels: Mapping[str, str]) -> str:
    query = html.escape(urlencode({"live": "1", **labels}))
    return f'<p><a href="/runbooks/{page.name}?{query}">Evaluate the queries of this page now</a></p>'


def _now(page: runbook_pages.RunbookPage, live: Live) -> str:
    """Return the box at the top: the value that fired, and the rows of the diagnosis that hold."""
    asked = html.escape(f"Evaluated at {live.at} by {live.prometheus}.")
    if live.error:
        return f'<div class="now"><p class="wrong">Not evaluated: {html.escape(live.error)}</p></div>'
    parts = [f"<p>{asked}</p>"]
    if live.rule:
        rule = live.answers[live.rule]
        state = "could not be evaluated" if rule.error else "holds" if rule.holds else "does not hold now"
        threshold = f" Threshold: {live.threshold}." if live.threshold else ""
        parts.append(f"<p><strong>The alert's expression {state}.</strong>{html.escape(threshold)}</p>{_result(rule)}")
    matching = [row for row in page.rows if row.condition and live.answers[row.condition].holds]
    if matching:
        rows = "".join(
            f"<li>{_inline(row.what)}: {_inline(row.cause)}. Go to {_inline(row.go_to)}.</li>" for row in matching
        )
        parts.append(f"<p><strong>Diagnosis: what holds now</strong></p><ul>{rows}</ul>")
    elif page.rows:
        parts.append("<p>No row of the diagnosis holds now.</p>")
    return f'<div class="now">{"".join(parts)}</div>'


def _inline(markdown: str) -> str:
    (inline,) = _markdown.parseInline(markdown)
    return _with_page_links([inline])


def _result(answer: LiveQuery) -> str:
    """Return the result of one query: a row for each series."""
    if answer.error:
        return f'<p class="wrong">{html.escape(answer.error)}</p>'
    rows = [f"{value:>10}  {label_text(labels)}" for labels, value in answer.rows]
    rows += [f"and {answer.found - len(answer.rows)} more"] * (answer.found > len(answer.rows))
    return f'<pre class="result">{html.escape(chr(10).join(rows) or "no data")}</pre>'


def runbook_index(shown: Sequence[runbook_pages.RunbookPage]) -> str:
    about = "<h1>Runbooks</h1><p>One page for each alert: what it means, and what to do.</p>"
    return _reading(
        "Runbooks", f"{_trail()}<article>{about}{''.join(_group(severity, shown) for severity in _GROUPS)}</article>"
    )


def runbook_missing(asked: str, shown: Sequence[runbook_pages.RunbookPage]) -> str:
    about = f"<h1>No page is called {html.escape(asked[:80])}</h1><p>The pages are:</p>"
    return _reading(
        "No such page",
        f"{_trail()}<article>{about}{''.join(_group(severity, shown) for severity in _GROUPS)}</article>",
    )


def _group(severity: str, shown: Sequence[runbook_pages.RunbookPage]) -> str:
    chosen = [page for page in shown if (page.severity if page.severity in _GROUPS else "") == severity]
    listed = "".join(
        f"<li>{_to_page(page.name, page.title)} {_markdown.renderInline(page.gist)}</li>" for page in chosen
    )
    return f"<h2>{_GROUPS[severity]}</h2><ul>{listed}</ul>" if chosen else ""


def _about(page: runbook_pages.RunbookPage) -> str:
    """How urgent, the panel, and related pages; what a page does not say of itself is left out."""
    told = [f'<span class="severity {page.severity}">{page.severity}</span>'] * (
        page.severity in runbook_pages.SEVERITIES
    )
    if panel := panel_url(page, ""):
        told.append(f'<a href="{panel}">see the panel</a>')
    known = runbook_pages.names()
    if related := [_to_page(name) for name in page.related if name in known]:
        told.append(f"related: {', '.join(related)}")
    return f"<p>{' &middot; '.join(told)}</p>" if told else ""


def _to_page(name: str, title: str = "") -> str:
    return f'<a href="/runbooks/{name}">{html.escape(title or name)}</a>'


def _rendered(markdown: str, results: Mapping[str, LiveQuery]) -> str:
    """Return HTML with anchors at headings, links between pages, and below each query its result, if there is one."""
    tokens = _markdown.parse(markdown)
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", page_check.slug(following.content))
    with_results = list[Token]()
    for token in tokens:
        with_results.append(token)
        if token.type == "fence" and (answer := results.get(token.content.strip())):
            # a token of raw HTML, which only this code can make: the parser has HTML switched off
            with_results.append(Token("html_block", "", 0, content=_result(answer)))
    return _with_page_links(with_results)


def _with_page_links(tokens: Sequence[Token]) -> str:
    for token in tokens:
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("href", re.sub(r"^([\w-]+)\.md(?=#|$)", r"/runbooks/\1", str(child.attrGet("href"))))
    return str(_markdown.renderer.render(tokens, _markdown.options, {}))


def _trail(name: str = "") -> str:
    return (
        '<nav class="trail"><a href="/">Boards</a> / <a href="/runbooks/">Runbooks</a>'
        + (f" / {name}" if name else "")
        + "</nav>"
    )


def _reading(title: str, body: str) -> str:
    head = f'{_HEAD}<title>{html.escape(title)}</title>\n<link rel="stylesheet" href="{_address(STYLE)}">\n</head>\n'
    return f'{head}<body class="reading">{body}</body>\n</html>\n'
