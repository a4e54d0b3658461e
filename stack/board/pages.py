"""HTML of the built-in server: dashboards (drawn by JavaScript) and runbook pages.

The only module that uses markdown-it."""

from __future__ import annotations

import hashlib
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
from runbooks.lookup import Live, LiveQuery, label_text, panel_url, unseen_text
from stack import templates
from stack.board.charts import plotly_js
from stack.templates import Markup

SCRIPTS = ("units.js", "draw.js", "board.js")
STYLE = "board.css"
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


def board_page(board: Dashboard, boards: Sequence[Dashboard], runbooks: bool = True, requests: bool = False) -> str:
    """A board without figures; the page asks for them. runbooks, requests: link to their lists."""
    content = {
        "boards": [_named(one) for one in boards],
        "shown": [described(board, boards)],
        "snapshot": None,
        "runbooks": runbooks,
        "requests": requests,
    }
    return _render(
        "dashboard.html",
        title=board.title,
        style=_address(STYLE),
        data=_data(content),
        plotly=_address("plotly.min.js"),
        scripts=[_address(name) for name in SCRIPTS],
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
    return _render(
        "standing_alone.html",
        policy=policy,
        title=title,
        style=Markup(style),
        data=_data(content),
        body=Markup(body),
        scripts=[Markup(script) for script in scripts],
    )


def reading_page(template: str, **values: Any) -> str:
    """Return a page of text from a template that extends reading.html."""
    return _render(template, style=_address(STYLE), **values)


def _render(template: str, **values: Any) -> str:
    return templates.html("stack.board").get_template(template).render(**values)


def described(board: Dashboard, boards: Sequence[Dashboard]) -> dict[str, Any]:
    """Return what the page needs to know about a dashboard, without its queries."""
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


def _data(content: object) -> Markup:
    """JSON inside HTML: `<` is escaped, so that no label can end the element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return Markup(text)


# --- runbooks

_markdown = MarkdownIt("commonmark", {"html": False}).enable("table")


_GROUPS = {
    "critical": "Pages: someone gets up",
    "warning": "Tickets: someone looks at it in working hours",
    "info": "For information: notifies nobody",
    "": "Of no one alert",
}


_PAGE_LINK = re.compile(r"^([\w-]+)\.md(?=#|$)")


def requests_url(labels: Mapping[str, str]) -> str:
    """Return the address of the requests that an alert's labels name, of the last hour."""
    named = {"model": "model_name", "team": "team"}
    found = {name: labels[label] for name, label in named.items() if labels.get(label)}
    return f"/requests?{urlencode({**found, 'from': 'now-1h'})}"


def runbook_page(
    page: runbook_pages.RunbookPage, labels: Mapping[str, str], live: Live | None, requests: bool = False
) -> str:
    """Return a runbook page as HTML. requests: link to those of the alert.

    page: filled with `labels`, those of an alert. live: the results of its queries, which then stand below them; None
    where they were not evaluated."""
    html = _rendered(page.readable(), live.answers if live else {}, urlencode(sorted(labels.items())))
    heading, end, body = html.partition("</h1>")
    first, heading_after, rest = body.partition('<h2 id="meaning">') if page.first else ("", "", body)
    return _render(
        "runbook.html",
        title=page.name,
        style=_address(STYLE),
        heading=Markup(heading + end),
        about=_about(page),
        labels=sorted(labels.items()),
        query=urlencode(sorted(labels.items())),
        live=live and _now(page, live, urlencode(sorted(labels.items()))),
        requests_url=requests_url(labels) if requests else "",
        evaluate_url=f"/runbooks/{page.name}?{urlencode({'live': '1', **labels})}",
        first=Markup(first),
        body=Markup(heading_after + rest),
    )


def _now(page: runbook_pages.RunbookPage, live: Live, query: str) -> dict[str, Any]:
    """Return what the box at the top shows: the value that fired, and the rows of the diagnosis that hold."""
    if live.error:
        return {"error": live.error}
    rule = live.answers[live.rule] if live.rule else None
    rows = [row for row in page.rows if row.condition and live.answers[row.condition].holds]
    return {
        "error": "",
        "unseen": unseen_text(live),
        "at": live.at,
        "prometheus": live.prometheus,
        "rule": rule
        and {
            "state": "could not be evaluated" if rule.error else "holds" if rule.holds else "does not hold now",
            "threshold": live.threshold,
            "result": Markup(_result(rule)),
        },
        "rows": [{name: _inline(getattr(row, name), query) for name in ("what", "cause", "go_to")} for row in rows],
        "has_rows": bool(page.rows),
    }


def _inline(markdown: str, query: str) -> Markup:
    (inline,) = _markdown.parseInline(markdown)
    return Markup(_with_page_links([inline], query))


def _result(answer: LiveQuery) -> str:
    """Return the result of one query: a row for each series."""
    rows = [f"{value:>10}  {label_text(labels)}" for labels, value in answer.rows]
    rows += [f"and {answer.found - len(answer.rows)} more"] * (answer.found > len(answer.rows))
    return _render("result.html", error=answer.error, text="\n".join(rows) or "no data")


def runbook_index(shown: Sequence[runbook_pages.RunbookPage]) -> str:
    about = "One page for each alert: what it means, and what to do."
    return _listing("Runbooks", "Runbooks", about, shown)


def runbook_missing(asked: str, shown: Sequence[runbook_pages.RunbookPage]) -> str:
    return _listing("No such page", f"No page is called {asked[:80]}", "The pages are:", shown)


def _listing(title: str, heading: str, about: str, shown: Sequence[runbook_pages.RunbookPage]) -> str:
    groups = [
        {
            "title": group,
            "pages": [
                {"name": page.name, "title": page.title, "gist": Markup(_markdown.renderInline(page.gist))}
                for page in shown
                if (page.severity if page.severity in _GROUPS else "") == severity
            ],
        }
        for severity, group in _GROUPS.items()
    ]
    return _render("runbooks.html", title=title, style=_address(STYLE), heading=heading, about=about, groups=groups)


def _about(page: runbook_pages.RunbookPage) -> list[dict[str, Any]]:
    """Return severity, panel and related pages; what a page does not state is left out."""
    known = runbook_pages.names()
    parts: tuple[tuple[str, Any], ...] = (
        ("severity", page.severity if page.severity in runbook_pages.SEVERITIES else ""),
        ("panel", panel_url(page, "")),
        ("related", [name for name in page.related if name in known]),
    )
    return [{"kind": kind, "value": value} for kind, value in parts if value]


def _rendered(markdown: str, results: Mapping[str, LiveQuery], query: str = "") -> str:
    """Return HTML with anchors at headings and mitigations, links, and below each query its result, if there is one.

    query: labels of the alert as the query of a URL, which links to other pages keep."""
    tokens = _markdown.parse(markdown)
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", page_check.slug(following.content))
    _number_mitigations(tokens)
    with_results = list[Token]()
    for token in tokens:
        with_results.append(token)
        if token.type == "fence" and (answer := results.get(token.content.strip())):
            # a token of raw HTML, which only this code can make: the parser has HTML switched off
            with_results.append(Token("html_block", "", 0, content=_result(answer)))
    return _with_page_links(with_results, query)


def _number_mitigations(tokens: Sequence[Token]) -> None:
    """Give each step of the section Mitigation an anchor."""
    heading = ""
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            heading = following.content
        elif token.type == "list_item_open" and token.level == 1 and heading == "Mitigation":
            token.attrSet("id", f"mitigation-{token.info}")


def _linked_mitigations(text: Token) -> list[Token]:
    """Return the tokens of a text in which each "Mitigation 2" leads to that step."""
    found, end = list[Token](), 0
    for match in runbook_pages.MITIGATION.finditer(text.content):
        number = match[1].split(",")[0].split()[0]
        found += [
            Token("text", "", 0, content=text.content[end : match.start()]),
            Token("link_open", "a", 1, attrs={"href": f"#mitigation-{number}"}),
            Token("text", "", 0, content=match[0]),
            Token("link_close", "a", -1),
        ]
        end = match.end()
    return [*found, Token("text", "", 0, content=text.content[end:])]


def _with_page_links(tokens: Sequence[Token], query: str) -> str:
    labels = f"?{query}" if query else ""
    for token in tokens:
        within, children = 0, list[Token]()
        for child in token.children or ():
            within += child.nesting if child.type.startswith("link_") else 0
            children += _linked_mitigations(child) if child.type == "text" and not within else [child]
        token.children = children if token.children else token.children
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet(
                    "href", _PAGE_LINK.sub(lambda found: f"/runbooks/{found[1]}{labels}", str(child.attrGet("href")))
                )
    return str(_markdown.renderer.render(tokens, _markdown.options, {}))
