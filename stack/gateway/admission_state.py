"""State of admission: requests, teams and bands, as `Admission` keeps them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from stack.gateway.hold_time import HoldTime
from stack.gateway.policy import Band, Team


class TicketState(Enum):
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request. prompt, output: expected tokens. deadline: until when it may wait. slots: how many it would
    like to hold; held: how many it holds, or is expected to hold while it waits. logprobs: of each prompt token and of
    each output token; charged: what it has cost so far.

    granted is called when its turn has come, from within whatever call made room; before that call returns, it runs.
    displaced is called instead, with the refusal to answer with, if it gives way to a request of a team within its
    share, or if it is tentative and the store leases no more of max_in_flight; it is gone then. tentative: it waits for
    the store's answer about max_in_flight; claimed: the latest request to the store counts it."""

    team: TeamState
    prompt: int
    output: int
    asked: float
    deadline: float
    granted: Callable[[], None]
    displaced: Callable[[Refusal], None]
    slots: int = 1
    logprobs: tuple[int, int] = (0, 0)
    held: int = 1
    charged: int = 0
    state: TicketState = TicketState.WAITING
    began: float = 0.0
    restarts: int = 0  # of its team's counter, when it was charged
    tentative: bool = False
    claimed: bool = False
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.prompt + self.output

    @property
    def band(self) -> str:
        return self.team.band.name


@dataclass(frozen=True, slots=True)
class Refusal:
    """reason: of the vocabulary of reasons.py. retry_after_s: when it is worth another try, from 1 to 120 s."""

    reason: str
    retry_after_s: float


@dataclass(slots=True)
class BandState:
    """One band. running, waiting: slots that its requests hold, and that those which wait would hold. wide: waiting
    requests of more than one slot."""

    name: str
    band: Band
    running: int = 0
    waiting: int = 0
    wide: int = 0
    floor: int = 0  # slots that it gets before higher bands get more, at this gateway
    most: int = 1  # of the present slots that it may hold
    level: float = 0.0  # the counter of whom it was the turn last; beyond that of its rank where a floor gave it more


@dataclass(slots=True)
class TeamState:
    """One team. running, waiting_slots: slots, as of its band; requests: how many hold them. widest: slots that one
    request may hold."""

    name: str
    team: Team
    band: BandState
    served: float = 0.0
    restarts: int = 0  # how often that counter has started anew
    charged: int = 0  # tokens since the start, without what peers served and without weight
    running: int = 0
    requests: int = 0
    waiting_slots: int = 0
    widest: int = 1
    most: int | None = None  # slots that it may hold; None without a limit
    max_in_flight: int | None = None  # beyond it a request is refused at once
    leased: int | None = None  # of max_in_flight, while a store leases it: what is beyond it is tentative
    tentative: int = 0
    refused: int = 0  # for a full queue, since the latest request to the store
    refused_tokens: int = 0
    waiting_tokens: int = 0
    hold: HoldTime = field(default_factory=HoldTime)
    # leaves from the middle cost no more than from the front
    queue: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)

    @property
    def in_flight(self) -> int:
        return self.requests + len(self.queue)

    @property
    def need(self) -> int:
        """Return the slots that its next request will hold."""
        return min(next(iter(self.queue)).slots, self.widest) if self.band.wide and self.queue else 1

    @property
    def may_run(self) -> bool:
        """Return whether its own limits have room for its next request."""
        fits = (most := self.most) is None or self.running + self.need <= most
        return fits and (self.leased is None or self.requests < self.leased)

    def may_go(self, below_floor: bool, passed: Collection[str]) -> bool:
        """Return whether it may run its next request, if its band and its own limit have room for one slot. passed:
        bands that may not."""
        band = self.band
        if not band.wide:
            return self.leased is None or self.requests < self.leased
        return self.may_run and band.name not in passed and (not below_floor or band.running + self.need <= band.floor)


@dataclass(frozen=True, slots=True)
class Standing:
    """One team as it stands: requests that run and wait, the slots that they hold, the band, and how long a further one
    would wait, in seconds."""

    team: str
    band: str
    running: int
    slots: int
    waiting: int
    wait_s: float
