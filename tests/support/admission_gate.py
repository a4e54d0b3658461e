"""Admission on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from stack.gateway.admission import Admission
from stack.gateway.admission_state import Refusal, Ticket
from stack.gateway.policy import Band, Capacity, Policy, Team

BANDS = {"high": Band(rank=0, max_wait_s=10.0), "usual": Band(rank=1), "low": Band(rank=2, ceiling=0.5, floor=1)}


USUAL = {"a": Team(band="usual"), "b": Team(band="usual"), "vip": Team(band="high"), "batch": Team(band="low")}


def policy(teams: Mapping[str, Team] = USUAL, bands: Mapping[str, Band] = BANDS, **capacity: int) -> Policy:
    return Policy(teams=teams, bands=bands, capacity=Capacity(**capacity))


def ignore(refusal: Refusal) -> None:
    """For requests whose displacement a test does not look at."""


class Gate:
    """An admission, the tickets it gave out by name, and the order in which it let them go. A name is the team's, and
    more after a dot."""

    def __init__(self, its: Policy) -> None:
        self.admission = Admission(its)
        self.tickets: dict[str, Ticket] = {}
        self.gone: list[str] = []
        self.displaced: dict[str, Refusal] = {}
        self.now = 0.0

    def ask(self, name: str, prompt: int = 1, output: int = 0, **more: Any) -> Ticket | Refusal:
        given, displaced = partial(self.gone.append, name), partial(self.displaced.__setitem__, name)
        asked = self.admission.ask(name.split(".")[0], prompt, output, self.now, given, displaced, **more)
        if isinstance(asked, Ticket):
            self.tickets[name] = asked
        return asked

    def lets(self, *names: str, **size: Any) -> None:
        for name in names:
            assert isinstance(self.ask(name, **size), Ticket), name

    def end(self, name: str, after: float = 1.0, **real: int) -> list[str]:
        """The request is over; those that go instead."""
        before = len(self.gone)
        self.now += after
        self.admission.leave(self.tickets[name], self.now, **real)
        return self.gone[before:]

    def order(self) -> list[str]:
        """Each running request ends, one after the other in the order in which they went; the whole order."""
        for name in self.gone:  # grows meanwhile
            self.end(name)
        return self.gone

    def counts(self) -> tuple[int, int, int, int]:
        return self.admission.running, self.admission.waiting, self.admission.tokens, self.admission.waiting_tokens


def gate(its: Mapping[str, Team] = USUAL, bands: Mapping[str, Band] = BANDS, **capacity: int) -> Gate:
    return Gate(policy(its, bands, **capacity))
