"""Faults of runbook pages: headings, front matter, steps, links."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from runbooks.page import (
    FOLDER,
    HEADINGS,
    KEYS,
    LINK,
    MITIGATION,
    PLACEHOLDER,
    REGIONS,
    RunbookPage,
    pages,
    printed_region,
    walk,
)

REVIEWED_DAYS = 365


def faults(alerts: Iterable[str], folder: Path = FOLDER) -> Iterator[str]:
    """Return where pages and alerts do not match one to one, and what pages lack."""
    book = {page.name: page for page in pages(folder)}
    have, wanted = {name for name, page in book.items() if page.is_alert}, set(alerts)
    yield from (f"{name} has no page" for name in sorted(wanted - have))
    yield from (f"{name}.md belongs to no alert" for name in sorted(have - wanted))
    for name, page in book.items():
        if name in wanted or not page.is_alert:
            faults = [*_general_faults(page, book), *(_alert_faults(page, wanted) if page.is_alert else ())]
            yield from (f"{name}.md {fault}" for fault in faults)


def warnings(today: datetime.date, folder: Path = FOLDER) -> Iterator[str]:
    """Return warnings, which fail nothing."""
    for page in pages(folder):
        reviewed = page.about.get("reviewed")
        if type(reviewed) is datetime.date and (today - reviewed).days > REVIEWED_DAYS:
            yield f"{page.name}.md was last reviewed on {reviewed}"


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _general_faults(page: RunbookPage, book: Mapping[str, RunbookPage]) -> Iterator[str]:
    if not page.title:
        yield "has no title"
    if found := re.search(r"\b(TODO|TBD)\b", page.text):
        yield f"holds a {found[0]}"
    for target in dict.fromkeys(_targets(page.text)):
        file, _, anchor = target.partition("#")
        leads_to = book.get(file.removesuffix(".md")) if file else page
        if leads_to is None or not (file.endswith(".md") or not file):
            yield f"links to {target}, which is no page"
        elif anchor and anchor not in _anchors(leads_to.text):
            yield f"links to {target}, where no heading is called so"


def _alert_faults(page: RunbookPage, alerts: set[str]) -> Iterator[str]:
    if page.wrong:
        yield page.wrong
    elif missing := [key for key in KEYS if key not in page.about]:
        yield f"says nothing of {', '.join(missing)} in its front matter"
    elif more := [str(key) for key in page.about if key not in KEYS]:
        yield f"says {', '.join(more)} in its front matter, which holds only {' and '.join(KEYS)}"
    else:
        yield from _front_faults(page, alerts)
    if page.title != page.name:
        yield "does not open with its name"
    found = tuple(section.heading for section in page.sections)
    if found != HEADINGS:
        yield f"has the headings {', '.join(found)} instead of {', '.join(HEADINGS)}"
        return
    for region, heading in REGIONS.items():
        if not printed_region(region).search(page.text):
            yield f"has no place for what is printed: <!-- printed: {region} -->, <!-- end --> under {heading}"
    if not 1 <= len(page.first) <= 3 or "promql" in page.section("Do this first"):
        yield "needs one to three numbered steps under Do this first, without PromQL"
    yield from _action_faults(page)


def _front_faults(page: RunbookPage, alerts: set[str]) -> Iterator[str]:
    if not isinstance(page.about["related"], list):
        yield "has no list as related"
    yield from (f"is related to {name}, which is no alert" for name in page.related if name not in alerts)
    if type(page.about["reviewed"]) is not datetime.date:
        yield f"was reviewed on {page.about['reviewed']!r}, which is no date such as 2026-03-01"


def _action_faults(page: RunbookPage) -> Iterator[str]:
    """Steps and rows lead somewhere, and can be filled."""
    for heading, steps in (("First five minutes", page.steps), ("Mitigation", page.mitigations)):
        if [step.number for step in steps] != list(range(1, len(steps) + 1)) or not steps:
            yield f"does not number its steps from 1 under {heading}"
    if not page.rows:
        yield "has no row under Diagnosis"
    for row in page.rows:
        if not row.condition:
            yield f"has no condition for {row.what!r}"
        steps_named = [
            int(number) for numbers in MITIGATION.findall(row.go_to) for number in re.findall(r"\d+", numbers)
        ]
        if not steps_named and not LINK.search(row.go_to):
            yield f"leads from {row.what!r} neither to Mitigation N nor to a page"
        yield from (
            f"leads from {row.what!r} to Mitigation {number}, which it has not"
            for number in steps_named if number not in {step.number for step in page.mitigations}
        )  # fmt: skip
    queries = [block.text for step in page.steps for block in step.blocks if block.language == "promql"] + [
        row.condition for row in page.rows
    ]
    for query in queries:
        for found in PLACEHOLDER.finditer(query):
            if not found[1] or not found[3]:
                yield f"""has {{{{{found[2]}}}}} in PromQL other than as =~"{{{{{found[2]}}}}}": {query}"""


def _targets(text: str) -> Iterator[str]:
    """Return the targets of a page's links, those to other sites left out."""
    for line, language in walk(text):
        if language is None:
            yield from (found[2] for found in LINK.finditer(re.sub(r"`[^`]*`", "", line)) if "://" not in found[2])


def _anchors(text: str) -> set[str]:
    return {
        slug(line.lstrip("#").strip()) for line, language in walk(text) if language is None and re.match(r"#+ ", line)
    }
