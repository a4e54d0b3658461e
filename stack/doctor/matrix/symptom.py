"""Row of the tuning matrix: its evidence, its lever, and the proof that the lever worked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stack.bench.result import STORED
from stack.tuning.series import LIVE_METRICS

Area = Literal["queue", "prefill", "decode", "streaming", "API", "quality"]
AREAS: tuple[Area, ...] = get_args(Area)
Moves = Literal["falls", "rises"]
# what `vllm-watch compare` finds in a request log; the doctor counts the rest
LIVE = frozenset(live.metric.figure for live in LIVE_METRICS)


@dataclass(frozen=True, slots=True)
class ExperimentTemplate:
    """Experiment that pulls the lever: an included workload, and options of the engine before and after."""

    workload: str
    before: str
    after: str

    def file(self) -> str:
        """Return the experiment file for `vllm-watch tune`."""
        command = "vllm serve MODEL --port {port}"
        before, after = (f"{command} {options}".strip() for options in (self.before, self.after))
        return f"""workload: {self.workload}
{STORED["variants"]}:
  before:
    command: {before}  # as it is now, not as it should be
  after:
    command: {after}
"""


@dataclass(frozen=True, slots=True)
class EvidenceSource:
    """Source of evidence. again: command to repeat the diagnosis. log: options that name the request log."""

    again: str = "vllm-watch doctor --prometheus http://127.0.0.1:9090 --window 1h"
    log: str = "--log requests.jsonl"


ANYWHERE = EvidenceSource()


@dataclass(frozen=True, slots=True)
class Proof:
    """Proof that a lever worked. figure: metric of benches and comparisons, or `client-disconnects`, `refusals` and
    `inter_token_p95`, which the doctor counts: a comparison has the mean gap of each request, which pauses hardly move.

    keeps: metric that must not become worse. change: the annotation; OLD and NEW stand for numbers that differ from
    engine to engine.
    experiment: shows it before it is rolled out, where one can."""

    figure: str
    moves: Moves
    keeps: str
    change: str
    diff: str = ""
    experiment: ExperimentTemplate | None = None

    @property
    def criterion(self) -> str:
        return f"the figure {self.figure} {self.moves}, and {self.keeps} is no worse"

    def commands(self, name: str, source: EvidenceSource = ANYWHERE) -> tuple[str, ...]:
        """Return the commands: an experiment before roll-out, where there is one; then the event, and hours later the
        comparison of traffic."""
        diff = f" --diff '{self.diff}'" if self.diff else ""
        seen = f"vllm-watch compare {source.log} --event {name} --events events.jsonl"
        return (
            *([f"vllm-watch tune {name}.yaml --out {name}"] if self.experiment else []),
            f'vllm-watch annotate "{self.change}"{diff} --id {name} --events events.jsonl',
            seen if self.figure in LIVE else source.again,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Symptom with its cause and lever. label: of the finding, which several rows may share where a cause has several
    levers. asks: PromQL that shows it. dated: outdated advice of older guides, and what holds now."""

    name: str
    area: Area
    symptom: str
    cause: str
    asks: tuple[str, ...]
    lever: str
    second: str
    risk: str
    proof: Proof | None
    pages: tuple[str, ...]
    label: str = ""
    dated: str = ""

    @property
    def finding(self) -> str:
        return self.label or self.name
