"""Copies of tuning events in Grafana, as annotations of the organisation."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dashboards.grafana_client import GrafanaAnswer, GrafanaClient, GrafanaTrouble, refused
from exporters.events.log import TuningEvent

MOST_ANNOTATIONS = 5000  # looked through at once; without a limit Grafana gives a hundred
# of all tags of an annotation together, as Grafana counts them; annotations.tags_length can change it
MAX_TAG_BYTES = 500


@dataclass(frozen=True, slots=True)
class Copies:
    """Ids of events: whose annotation was made, whose times were set right, and whom Grafana refuses, with its
    reason."""

    made: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


def copy_events(grafana: GrafanaClient, events: Iterable[TuningEvent]) -> Copies:
    """Bring events into Grafana as annotations of the organisation. One that is found by the tag of its id is not made
    again; restarts are left out, as on the boards. Nothing is kept of what was sent: what the log has and Grafana lacks
    is what is to send, also after Grafana was away.

    Raises GrafanaTrouble where no further one can be sent.
    Source: Grafana's HTTP API page on annotations; pkg/services/annotations/annotationsimpl/xorm_store.go for tags and
    limits."""
    wanted = [event for event in events if event.kind != "restart"]
    if not wanted:
        return Copies()
    span = {"from": str(min(_ms(e.at_s) for e in wanted) - 1), "to": str(max(_ms(e.latest_s) for e in wanted) + 1)}
    there = _annotations(grafana, "tuning", **span)
    made: list[str] = []
    changed: list[str] = []
    unfit: list[tuple[str, str]] = []
    for event in wanted:
        tag = f"event:{event.id}"
        found = [one for one in there if tag in (one.get("tags") or ())] or _annotations(grafana, tag)
        times = {"time": _ms(event.at_s), "timeEnd": _ms(event.latest_s)}
        if not found:
            answer = grafana.ask("POST", "/api/annotations", {**times, "tags": _tags(event, tag), "text": _text(event)})
            doing, done = "to make an annotation", made
        elif any(found[0].get(name) != at for name, at in times.items()):
            answer = grafana.ask("PATCH", f"/api/annotations/{found[0]['id']}", times)
            doing, done = "to change an annotation", changed
        else:
            continue
        if answer.status in (401, 403) or answer.body is None:
            raise _not_annotated(answer, doing)
        if answer.status != 200:
            unfit.append((event.id, str(_not_annotated(answer, doing))))
            continue
        done.append(event.id)
        # another process copied it at the same time: the first one stays
        if not found and len(twice := _annotations(grafana, tag)) > 1:
            mine = answer.data.get("id")
            if mine != min(one["id"] for one in twice):
                grafana.ask("DELETE", f"/api/annotations/{mine}")
    return Copies(tuple(made), tuple(changed), tuple(unfit))


def _not_annotated(answer: GrafanaAnswer, doing: str) -> GrafanaTrouble:
    return refused(answer, doing, "annotations:create and annotations:write on annotations:type:organization")


def _annotations(grafana: GrafanaClient, tag: str, **span: str) -> list[dict[str, Any]]:
    answer = grafana.ask("GET", "/api/annotations", tags=tag, type="annotation", limit=str(MOST_ANNOTATIONS), **span)
    if answer.status != 200 or not isinstance(answer.body, list):
        raise refused(answer, "to list annotations", "annotations:read on annotations:type:organization")
    return [one for one in answer.body if isinstance(one, dict) and "id" in one and tag in (one.get("tags") or ())]


def _ms(at_s: float) -> int:
    return round(at_s * 1000)


def _tags(event: TuningEvent, tag: str) -> list[str]:
    """Ours always, those of the event as far as they fit."""
    tags = ["tuning", tag, event.kind]
    for one in event.tags:
        if 2 + sum(len(each.encode()) + 3 for each in (*tags, one)) <= MAX_TAG_BYTES:
            tags.append(one)
    return tags


def _text(event: TuningEvent) -> str:
    """Grafana shows it as HTML."""
    diff = [
        f"{option}: {'not set' if old is None else old} → {'not set' if new is None else new}"
        for option, (old, new) in event.diff.items()
    ]
    who = [f"({event.who})"] if event.who else []
    return html.escape("\n".join((" ".join((event.what, *who)), *diff)), quote=False)
