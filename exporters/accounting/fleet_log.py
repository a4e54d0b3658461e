"""Totals of the request logs of several gateways: the own log, and those that other sidecars read.

Engines count the requests of all gateways, so one sidecar reconciles and attributes for all of them: it alone has
`engines`, and the others, its peers, serve the totals of their logs. A sidecar that saw its own log only would report
the requests of every other gateway as missing.

Invariant: the totals of a log never decrease. A log is known by the id in its sidecar's state file, so a peer that
moves to another address is not counted twice, and a peer that is gone keeps its totals."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.store import StateProvider
from exporters.requests.work import FinishedRequest, Work


class TeamWork(msgspec.Struct, frozen=True, array_like=True):
    """Work of one team on one model."""

    model: str
    team: str
    finished: Work
    abandoned: Work


class SidecarTotals(msgspec.Struct, frozen=True):
    """Totals of one sidecar's logs since their first lines. at_end: the logs are read to their end."""

    log_id: str
    at_end: bool
    e2e_p99_s: float | None
    finished: dict[str, FinishedRequest]
    teams: tuple[TeamWork, ...]

    def includes(self, before: SidecarTotals) -> bool:
        """Return whether no count is lower. A peer that reads its log again is lower until it has caught up."""
        return all(
            then.requests <= self.finished.get(model, FinishedRequest()).requests
            for model, then in before.finished.items()
        )


class FleetLogState(msgspec.Struct):
    """State that outlives the process. log_id: of the own log; peers: last totals of the others, by id."""

    log_id: str
    peers: dict[str, SidecarTotals] = {}


class FleetLog:
    """Counts of all logs, in the form of `RequestCounters`. stored: the last state of `provider`."""

    def __init__(self, own: RequestCounters, stored: bytes | None = None) -> None:
        """Raises msgspec.MsgspecError for a state of another release."""
        self._own = own
        self._state = (
            FleetLogState(secrets.token_hex(8))
            if stored is None
            else msgspec.msgpack.decode(stored, type=FleetLogState)
        )
        self._revision = 0

    @property
    def teams(self) -> BoundedNames:
        """Teams with series of their own in the own log."""
        return self._own.teams

    def provider(self) -> StateProvider:
        return StateProvider("peers", lambda: self._revision, lambda: msgspec.msgpack.encode(self._state), tuple)

    def receive(self, totals: SidecarTotals) -> None:
        """Take the totals of a peer. The own ones, which an address for all sidecars returns too, are ignored."""
        before = self._state.peers.get(totals.log_id)
        if totals.log_id == self._state.log_id or totals == before:
            return
        if before is None or totals.includes(before):
            self._state.peers[totals.log_id] = totals
            self._revision += 1

    def own_totals(self, at_end: bool) -> SidecarTotals:
        """Return the totals of the own log, for the sidecar that has the engines."""
        finished, abandoned = self._own.work(), self._own.abandoned()
        return SidecarTotals(
            self._state.log_id,
            at_end,
            self._own.e2e_p99_s(),
            self._own.finished(),
            tuple(
                TeamWork(model, team, finished.get((model, team), Work()), abandoned.get((model, team), Work()))
                for model, team in finished.keys() | abandoned.keys()
            ),
        )

    def finished(self) -> dict[str, FinishedRequest]:
        """Return expected engine counts by model name in the log."""
        found = self._own.finished()
        for peer in self._state.peers.values():
            for model, more in peer.finished.items():
                found[model] = found.get(model, FinishedRequest()).plus(more)
        return found

    def work(self) -> dict[tuple[str, str], Work]:
        """Return tokens finished by engines, by model and team."""
        peers = self._state.peers.values()
        return _summed(self._own.work(), ((row, row.finished) for peer in peers for row in peer.teams))

    def abandoned(self) -> dict[tuple[str, str], Work]:
        """Return tokens of aborted requests by model and team."""
        peers = self._state.peers.values()
        return _summed(self._own.abandoned(), ((row, row.abandoned) for peer in peers for row in peer.teams))

    def e2e_p99_s(self) -> float | None:
        """Return the longest 99th percentile of request durations of any log; None without durations."""
        known = (self._own.e2e_p99_s(), *(peer.e2e_p99_s for peer in self._state.peers.values()))
        return max((value for value in known if value is not None), default=None)


def _summed(own: dict[tuple[str, str], Work], more: Iterable[tuple[TeamWork, Work]]) -> dict[tuple[str, str], Work]:
    for row, work in more:
        own[row.model, row.team] = own.get((row.model, row.team), Work()).plus(work)
    return own
