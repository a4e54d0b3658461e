"""One request: its phases, their causes, and what else ran on its engine meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exporters.dataset.query import RequestData
from exporters.requests.phases import Blame, Phase, blame, phases_of, span_of
from exporters.requests.record import UNKNOWN_TEAM, RequestRecord, timestamp

NEIGHBOURS_AT_MOST = 5000  # of a busy engine in a long request; the story then says so
_ENDED_LATER_S = 3600.0  # a neighbour that ran at the same time may have ended this much later


@dataclass(frozen=True, slots=True)
class RequestStory:
    """Everything that is shown of a request. others: requests of its engine that ran meanwhile. same_id: number of
    records with this id, of which the newest is shown."""

    record: RequestRecord
    phases: list[Phase]
    blames: list[Blame]
    others: list[RequestRecord]
    same_id: int = 1
    teams: Counter[str] = field(default_factory=Counter)

    @property
    def engine(self) -> str:
        return self.record.upstream or self.record.model or "unknown"

    def as_json(self, names: bool = True) -> dict[str, Any]:
        """Return it for --json. names: False leaves out the ids and teams of others."""
        shown = {
            "record": {k: v for k, v in msgspec.to_builtins(self.record).items() if v is not None},
            "phases": [
                {"name": p.name, "start_ms": round(p.start_ms, 3), "length_ms": round(p.length_ms, 3)}
                for p in self.phases
            ],
            "blame": [{"phase": b.phase, "share": round(b.share, 4), "cause": b.cause} for b in self.blames],
            "engine": self.engine,
            "others": len(self.others),
            "records_with_this_id": self.same_id,
        }
        if names:
            shown["others_by_team"] = dict(self.teams.most_common())
        return shown


def find_story(data: RequestData, request_id: str, team: str | None = None) -> RequestStory | None:
    """Return the story of the newest record with an id; None if there is none. team: only a request of this team."""
    where, parameters = "request_id = ?", [request_id]
    if team is not None:
        where, parameters = f"{where} AND team_label = ?", [*parameters, team]
    found = list(data.records(where, parameters, order="ts"))
    if not found:
        return None
    return story(found[-1], _others(data, found[-1]), len(found))


def story(record: RequestRecord, others: Sequence[RequestRecord], same_id: int = 1) -> RequestStory:
    """Return the story of a record among others of its engine."""
    teams = Counter(other.team or UNKNOWN_TEAM for other in others)
    return RequestStory(record, phases_of(record, others), blame(record, others), list(others), same_id, teams)


def _others(data: RequestData, record: RequestRecord) -> list[RequestRecord]:
    """Return the requests that overlap a record in time on its engine, or of its model if the engine is unknown."""
    if (span := span_of(record)) is None:
        return []
    column, value = ("upstream", record.upstream) if record.upstream else ("model", record.model)
    where = (
        f"{column} IS NOT DISTINCT FROM ? AND ts >= CAST(? AS TIMESTAMPTZ) AND ts < CAST(? AS TIMESTAMPTZ)"
        " AND started_at <= CAST(? AS TIMESTAMPTZ) AND NOT (request_id = ? AND span_id IS NOT DISTINCT FROM ?)"
    )
    start, end = span
    parameters = [
        value,
        timestamp(start),
        timestamp(end + _ENDED_LATER_S),
        timestamp(end),
        record.request_id,
        record.span_id,
    ]
    # the nearest in time first, so that the limit drops the ones that matter least
    order = f"abs(epoch(ts) - {end:.3f})"
    return list(data.records(where, parameters, order, NEIGHBOURS_AT_MOST))
