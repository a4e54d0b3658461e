"""Objectives -> recorded series and burn-rate alerts: how fast the error budget goes, told over a short and a long
window at once.

factor = share of the budget x period / long window. A pair fires when both windows burn faster than factor x (1 -
objective); the short one makes it stop soon after the trouble does. Source: Google, The Site Reliability Workbook,
chapter 5 (multiwindow, multi-burn-rate alerts); the shares for seven days are those of Sloth's table. Bad and all are
recorded as growth and divided late (recorded.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from alerts import recorded
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Recording, Severity
from alerts.settings import Settings
from alerts.thresholds import Threshold
from exporters.catalogue import promql, sidecar
from exporters.catalogue.metric import Unit
from exporters.text import parse_window

SHIPPED_FILE = Path(__file__).with_name("slo.yaml")

# Long window, short window, share of the budget that may go within the long one, by period. The first two wake someone.
WINDOWS: dict[str, tuple[tuple[str, str, Decimal], ...]] = {
    "7d": (
        ("1h", "5m", Decimal("0.08")),
        ("6h", "30m", Decimal("0.125")),
        ("1d", "2h", Decimal("0.2")),
        ("3d", "6h", Decimal("0.42")),
    ),
    "30d": (
        ("1h", "5m", Decimal("0.02")),
        ("6h", "30m", Decimal("0.05")),
        ("1d", "2h", Decimal("0.1")),
        ("3d", "6h", Decimal("0.1")),
    ),
}
_HISTOGRAMS = {"ttft": recorded.TTFT, "inter_token": recorded.INTER_TOKEN}
# What is bad, and what is counted, by latency; None is success.
_LATENCIES = {
    "ttft": ("first tokens later", "first tokens"), "inter_token": ("gaps between tokens longer", "gaps"),
    None: ("requests that ended in an error or a timeout", "requests"),
}  # fmt: skip
_PANELS = {
    "ttft": PanelRef("overview", "ttft-p95"), "inter_token": PanelRef("overview", "inter-token-latency"),
    None: PanelRef("overview", "error-ratio"),
}  # fmt: skip


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One promise: a share (0 to 1) of good events. Either `latency` with `within_s` (seconds, a bucket bound), or
    `success: true`.

    Raises ValueError for what promises nothing."""

    name: str
    objective: float
    why: str
    source: str
    latency: Literal["ttft", "inter_token"] | None = None
    within_s: float | None = None
    success: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z][A-Za-z]{1,20}", self.name):
            raise ValueError(
                f"name {self.name!r} becomes a part of the alert's: two or more letters, the first a capital, such as"
                " TTFT"
            )
        if not 0.5 <= self.objective < 1:
            raise ValueError(f"{self.name}: objective {self.objective:g} should be a share below 1, such as 0.99")
        if bool(self.latency) == self.success:
            raise ValueError(f"{self.name}: an objective has either latency or success: true")
        if bool(self.latency) != (self.within_s is not None) or (self.within_s is not None and self.within_s <= 0):
            raise ValueError(f"{self.name}: latency goes with within_s, in seconds")

    @property
    def slug(self) -> str:
        """TTFT -> ttft, InterToken -> inter_token."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()


class Objectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of objectives; see slo.yaml. Raises ValueError where two share a name."""

    objectives: tuple[Objective, ...]
    period: Literal["7d", "30d"] = "7d"
    at_least: int = 50

    def __post_init__(self) -> None:
        names = [objective.slug for objective in self.objectives]
        if len(set(names)) != len(names) or not names:
            raise ValueError("objectives need at least one, and different names")
        if self.at_least < 1:
            raise ValueError("at_least is 1 or more: a ratio of nothing is no ratio")


def shipped() -> Objectives:
    return msgspec.convert(yaml.safe_load(SHIPPED_FILE.read_text(encoding="utf-8")), Objectives)


def factor(period: str, long: str, share: Decimal) -> Decimal:
    """How many times faster than allowed the budget goes when `share` of it goes within the long window; exact."""
    return (share * parse_window(period) / parse_window(long)).normalize()


def recordings(file: Objectives, s: Settings) -> Iterator[Recording]:
    """Bad and all events, for each objective and model."""
    for objective in file.objectives:
        for which, expr in zip(("bad", "all"), _events(objective, s), strict=True):
            yield Recording(_what(objective, which) + recorded.OVER, expr, _meaning(objective, which))


def _meaning(objective: Objective, which: str) -> str:
    late, counted = _LATENCIES[objective.latency]
    if which == "all":
        return f"{counted} that the promise is about"
    return late if objective.within_s is None else f"{late} than {objective.within_s:g} s"


def recorded_names(file: Objectives) -> Iterator[str]:
    """What is recorded for the objectives, without its window."""
    return (_what(objective, which) for objective in file.objectives for which in ("bad", "all"))


def alerts(file: Objectives, s: Settings) -> tuple[Alert, ...]:
    """Two for each objective: the fast burn wakes someone, the slow one is a ticket."""
    return tuple(alert for objective in file.objectives for alert in _alerts(objective, file, s))


def _alerts(objective: Objective, file: Objectives, s: Settings) -> tuple[Alert, Alert]:
    promise = f"{Decimal(str(objective.objective)) * 100:f}".rstrip("0").rstrip(".")
    threshold = Threshold(
        f"{objective.slug}_objective",
        objective.objective,
        Unit.RATIO,
        f"{objective.why} " + _burns(file.period),
        objective.source,
    )
    pairs = [_pair(objective, file, s, *window) for window in WINDOWS[file.period]]
    burn, drain = f"VLLM{objective.name}BudgetBurn", f"VLLM{objective.name}BudgetSlowBurn"
    panel = _PANELS[objective.latency]
    promised = f"{promise} % within {objective.within_s:g} s" if objective.within_s else f"{promise} % without an error"
    return (
        Alert(
            burn,
            Severity.CRITICAL,
            " or ".join(pairs[:2]),
            hold="2m",
            summary=f"The error budget for {_called(objective)} is burning fast.",
            description=(
                "{{ $value | humanizePercentage }} of what {{ $labels.model_name }} did was worse than"
                f" promised ({promised}); at this pace the budget of {file.period} is gone within {_gone(file.period)}"
                " days or less."
            ),
            panel=panel,
            threshold=threshold,
            drawn=False,
        ),
        Alert(
            drain,
            Severity.WARNING,
            " or ".join(pairs[2:]),
            hold="15m",
            summary=f"The error budget for {_called(objective)} drains.",
            description=(
                "{{ $value | humanizePercentage }} of what {{ $labels.model_name }} did was worse than"
                f" promised ({promised}), which uses up about the whole budget of {file.period}."
            ),
            panel=panel,
            threshold=threshold,
            drawn=False,
            muted_by=(burn,),
        ),
    )


def _pair(objective: Objective, file: Objectives, s: Settings, long: str, short: str, share: Decimal) -> str:
    """Both windows burn, and the long one holds enough requests to judge by: one answer has hundreds of gaps between
    tokens. The value is the long window's share of bad events."""
    budget = factor(file.period, long, share) * (1 - Decimal(str(objective.objective)))
    bad = (
        f"{_share(objective, s, long)} > {budget.normalize():f} and {_share(objective, s, short)} >"
        f" {budget.normalize():f}"
    )
    requests = recorded.FINISHED if objective.latency else _what(objective, "all")
    return f"({bad} and {recorded.counted(requests, long, s)} >= {file.at_least})"


def _share(objective: Objective, s: Settings, window: str) -> str:
    return recorded.share(_what(objective, "bad"), _what(objective, "all"), window, s)


def _events(objective: Objective, s: Settings) -> tuple[str, str]:
    """Bad and all events within five minutes. Latency counts observations, success the requests that are no refusal and
    no hang-up.

    Where an engine of the model lacks the bound of the objective there is neither: what is not measured is not
    judged."""
    if objective.latency is None:
        everything = recorded.requests(s, ('outcome!~"rejected|client_abort"',))
        return f"({recorded.requests(s, sidecar.FAILED)} or {everything} * 0)", everything
    buckets = _HISTOGRAMS[objective.latency]
    everything, within = recorded.observed(buckets), recorded.observed(buckets, promql.le(objective.within_s or 0))
    return f"{everything} - {within}", f"{everything} and {within}"


def _what(objective: Objective, which: str) -> str:
    return f"cluster_model_name:vllm_slo_{objective.slug}_{which}:increase"


def _gone(period: str) -> str:
    """After how many days the budget is gone, at the slower of the two paces that wake someone."""
    slower = min(factor(period, long, share) for long, _, share in WINDOWS[period][:2])
    return f"{parse_window(period) / 86400 / float(slower):.0f}"


def _called(objective: Objective) -> str:
    return {"ttft": "the time to the first token", "inter_token": "the time between tokens", None: "success"}[
        objective.latency
    ]


def _burns(period: str) -> str:
    """What the windows mean, for the page."""
    told = (
        f"{factor(period, long, share):f} times as fast as allowed over {long} and {short}"
        for long, short, share in WINDOWS[period]
    )
    return f"Told when the budget of {period} goes {', '.join(told)}; the first two of these wake someone."
