"""A canary with its gateway files and log, on a clock of its own."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from exporters.events import log as events
from stack.canary.controller import CanaryController, Guard, Outside, new_state
from stack.canary.state import read_state
from stack.canary.teams_file import read_teams
from stack.tuning.annotate import FileLog

TEAMS = """\
# the teams
teams:
  chat: {{}}   # nobody yet
upstreams:
  old: {{url: "http://127.0.0.1:1"}}
  new: {{url: "http://127.0.0.1:2", variant: canary}}
canary:
  share: {share}      # written by vllm-watch canary
  steps: [0.05, 0.2, 0.5]
  block_requests: 5
  settle_s: 60
  step_s: 600
  decide_s: {decide_s}
  limit_s: 20000
"""

START_S = 1_700_000_040.0  # the beginning of a minute


@dataclass
class Scene:
    """A folder with teams.yaml and a log, and a clock. slower: the canary's first tokens, as a ratio."""

    folder: Path
    slower: float = 1.0
    acts: bool = True
    guards: tuple[Guard, ...] = ()
    now_s: float = START_S
    reloads: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    on_reload: Callable[[], None] = lambda: None

    @property
    def teams(self) -> Path:
        return self.folder / "teams.yaml"

    def reload(self) -> None:
        self.reloads += 1
        self.on_reload()

    def controller(self) -> CanaryController:
        outside = Outside(
            self.teams, (self.folder / "requests.jsonl",), self.folder / "state.json", self.folder / "report.html",
            FileLog(self.folder / "events.jsonl", lambda: self.now_s), lambda: self.now_s, lambda: self.now_s,
            self.reload if self.acts else None, self.guards,
        )  # fmt: skip
        state = read_state(outside.state, self.teams, "canary")
        return CanaryController(outside, state or new_state(read_teams(self.teams), self.now_s))

    def minute(self) -> None:
        """Write a minute of requests, by the share of the file, and let it pass."""
        share = float(self.teams.read_text().split("share: ")[1].split()[0])
        lines = []
        for number in range(60):
            variant = "canary" if number < math.ceil(60 * share) else "stable"
            at = datetime.fromtimestamp(self.now_s + 0.5 + 0.99 * number, UTC).isoformat(timespec="milliseconds")
            ttft_ms = 100 * (self.slower if variant == "canary" else 1) * math.exp(self.rng.gauss(0, 0.1))
            lines.append(
                {"request_id": f"{self.now_s}-{number}", "ts": at, "variant": variant, "ttft_ms": ttft_ms,
                 "outcome": "ok", "status": 200, "e2e_ms": 200.0}
            )  # fmt: skip
        with (self.folder / "requests.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.now_s += 60

    def run(self, minutes: int = 300) -> CanaryController:
        controller = self.controller()
        while not controller.look() and minutes:
            minutes -= 1
            self.minute()
            self.now_s += 3  # the log of a minute is complete
            controller.look()
            self.now_s -= 3
        return controller

    def happened(self) -> list[tuple[str, str]]:
        """Steps and what changed, of the events."""
        found = events.read(self.folder / "events.jsonl")[0]
        steps = [next(tag.removeprefix("step=") for tag in event.tags if tag.startswith("step=")) for event in found]
        return [
            (step, "->".join(map(str, event.diff.get("canary.share", ()))))
            for step, event in zip(steps, found, strict=True)
        ]
