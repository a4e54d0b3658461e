"""A log and an engine that are joined, as the tests of the accounting read them."""

from __future__ import annotations

from collections import defaultdict

from exporters.accounting.fleet_log import FleetLog
from exporters.accounting.join import Joiner
from exporters.accounting.prices import Prices
from exporters.engine.view import EngineCore, EngineTotals, EngineView
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord

NOON = 1_790_000_000.0


PRICES = Prices(gpu_hour=3.6, currency="EUR")  # a second costs 0.001


def view(
    requests: int = 0,
    prompt: int = 0,
    completion: int = 0,
    running: int = 0,
    model: str = "m",
    inference_s: float = 0.0,
) -> EngineView:
    totals = EngineTotals(requests, prompt, completion, prompt, completion, inference_s=inference_s)
    return EngineView("0.32.0", NOON - 100, {}, (), cores={(model, "0"): EngineCore(totals, running, 0)})


class Books:
    """Accounts with the traffic that they compare with, and a clock."""

    def __init__(
        self,
        gpus: dict[str, tuple[str, ...]] | None = None,
        prices: Prices | None = PRICES,
        stored=None,
        traffic: RequestCounters | None = None,
        roles=None,
    ):
        self.traffic = traffic or RequestCounters(BoundedNames(), BoundedNames())
        self.accounts = Joiner(
            FleetLog(self.traffic), {"e": ()} if gpus is None else gpus, {}, prices, 30.0, stored or {}, roles
        )
        self.now = NOON

    def log(self, **teams: tuple[int, int]) -> None:
        """A good request of each team, with these tokens of prompt and completion."""
        for team, (prompt, completion) in teams.items():
            self.traffic.add(
                RequestRecord(
                    request_id=team,
                    team=team,
                    model="m",
                    outcome="ok",
                    prompt_tokens=prompt,
                    completion_tokens=completion,
                )
            )

    def look(self, seen: EngineView, upstream: str = "e", after_s: float = 5.0, clock_s: float | None = None) -> None:
        self.now += after_s
        clock_s = self.now if clock_s is None else clock_s
        self.accounts.settle(self.now - 0.1, clock_s - 0.1, at_end=True)
        self.accounts.on_scrape(upstream, seen, self.now, clock_s, self.now, clock_s, self.traffic.finished())
        self.accounts.settle(self.now + 0.1, clock_s + 0.1, at_end=True)

    def figures(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for account in self.accounts.state_providers():
            for metric, its, value in account.samples():
                if metric.name == f"vllm_watch_{name}":
                    found[tuple(its[label] for label in labels)] += value
        return dict(found)
