"""Requests as HTML: the list with its filters, and one request as a time line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exporters.text import printable
from stack import templates
from stack.board import pages

if TYPE_CHECKING:
    from exporters.dataset.request_story import RequestStory

_SHOWN = (
    "ts", "team", "model", "upstream", "variant", "attempt", "outcome", "reason", "prompt_tokens", "cached_tokens",
    "completion_tokens", "finish_reason", "trace_id",
)  # fmt: skip


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
