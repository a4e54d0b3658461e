"""Objectives -> recorded series and burn-rate alerts: how fast the error budget goes, told over a short and a long window at once.

factor = share of the budget x period / long window. A pair fires when both windows burn faster than factor x (1 - objective); the short one
makes it stop soon after the trouble does. Source: Google, The Site Reliability Workbook, chapter 5 (multiwindow, multi-burn-rate alerts);
the shares for seven days are those of Sloth's table.

Good and all are recorded as growth over five minutes and divided late, as sums over each window: an average of ratios would weigh an idle
night like a busy noon, and the ratio of an idle five minutes is NaN, which poisons every average that it is in."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Recording, Severity
from alerts.settings import Settings, seconds
from alerts.subjects import MODEL
from alerts.thresholds import Threshold
from exporters.catalogue import ours, promql, vllm
from exporters.catalogue.metric import Unit

SHIPPED_FILE = Path(__file__).with_name("slo.yaml")
RECORDED_OVER = "5m"

# Long window, short window, share of the budget that may go within the long one, by period. The first two wake someone.
WINDOWS: dict[str, tuple[tuple[str, str, Decimal], ...]] = {
    "7d": (("1h", "5m", Decimal("0.08")), ("6h", "30m", Decimal("0.125")), ("1d", "2h", Decimal("0.2")), ("3d", "6h", Decimal("0.42"))),
    "30d": (("1h", "5m", Decimal("0.02")), ("6h", "30m", Decimal("0.05")), ("1d", "2h", Decimal("0.1")), ("3d", "6h", Decimal("0.1"))),
}
_HISTOGRAMS = {"ttft": vllm.TIME_TO_FIRST_TOKEN, "inter_token": vllm.INTER_TOKEN_LATENCY}
_PANELS = {
    "ttft": PanelRef("overview", "ttft-p95"), "inter_token": PanelRef("overview", "inter-token-latency"),
    None: PanelRef("overview", "error-ratio"),
}  # fmt: skip


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One promise: a share (0 to 1) of good events. Either `latency` with `within_s` (seconds, a bucket bound), or `success: true`.

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
            raise ValueError(f"name {self.name!r} becomes a part of the alert's: two or more letters, the first a capital, such as TTFT")
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
    return (share * seconds(period) / seconds(long)).normalize()


def recordings(file: Objectives, s: Settings) -> tuple[Recording, ...]:
    """Bad and all events within five minutes, for each objective and model."""
    window = s.window(RECORDED_OVER)
    return tuple(
        Recording(_recorded(objective, what), expr)
        for objective in file.objectives
        for what, expr in zip(("bad", "all"), _events(objective, window), strict=True)
    )


def alerts(file: Objectives, s: Settings) -> tuple[Alert, ...]:
    """Two for each objective: the fast burn wakes someone, the slow one is a ticket."""
    return tuple(alert for objective in file.objectives for alert in _alerts(objective, file, s))


def _alerts(objective: Objective, file: Objectives, s: Settings) -> tuple[Alert, Alert]:
    promise = f"{Decimal(str(objective.objective)) * 100:f}".rstrip("0").rstrip(".")
    threshold = Threshold(
        f"{objective.slug}_objective", objective.objective, Unit.RATIO, f"{objective.why} " + _burns(file.period), objective.source
    )  # fmt: skip
    pairs = [_pair(objective, file, s, *window) for window in WINDOWS[file.period]]
    burn, drain = f"VLLM{objective.name}BudgetBurn", f"VLLM{objective.name}BudgetDrain"
    panel = _PANELS[objective.latency]
    promised = f"{promise} % within {objective.within_s:g} s" if objective.within_s else f"{promise} % without an error"
    return (
        Alert(
            burn, Severity.CRITICAL, " or ".join(pairs[:2]), hold="2m",
            summary=f"The error budget for {_called(objective)} is burning fast.",
            description=f"{{{{ $value | humanizePercentage }}}} of what {{{{ $labels.model_name }}}} did was worse than promised ({promised}); "
            f"at this pace the budget of {file.period} is gone within hours.",
            panel=panel, threshold=threshold, drawn=False,
        ),
        Alert(
            drain, Severity.WARNING, " or ".join(pairs[2:]), hold="15m",
            summary=f"The error budget for {_called(objective)} runs out before its period ends.",
            description=f"{{{{ $value | humanizePercentage }}}} of what {{{{ $labels.model_name }}}} did was worse than promised ({promised}), "
            f"for long enough to use up the budget of {file.period}.",
            panel=panel, threshold=threshold, drawn=False, muted_by=(burn,),
        ),
    )  # fmt: skip


def _pair(objective: Objective, file: Objectives, s: Settings, long: str, short: str, share: Decimal) -> str:
    """Both windows burn, and the long one holds enough to judge by. The value is the long window's share of bad events."""
    budget = factor(file.period, long, share) * (1 - Decimal(str(objective.objective)))
    bad = f"{_share(objective, s, long)} > {budget.normalize():f} and {_share(objective, s, short)} > {budget.normalize():f}"
    times = seconds(RECORDED_OVER) // seconds(_step(long))  # that each event is in the sum
    return f"({bad} and {_sum(objective, 'all', s, long)} >= {file.at_least * times})"


def _share(objective: Objective, s: Settings, window: str) -> str:
    return f"{_sum(objective, 'bad', s, window)} / ({_sum(objective, 'all', s, window)} > 0)"


def _step(window: str) -> str:
    """How often the recorded five minutes are added up: every minute for a short window, so that a page does not wait for the next five."""
    return "1m" if seconds(window) <= seconds("6h") else RECORDED_OVER


def _sum(objective: Objective, what: str, s: Settings, window: str) -> str:
    """What was recorded, added up over a window. Where steps overlap each event counts several times, in both halves of a ratio alike."""
    recorded = _recorded(objective, what)
    return recorded if window == RECORDED_OVER else f"sum_over_time({recorded}[{s.window(window)}:{s.window(_step(window))}])"


def _events(objective: Objective, window: str) -> tuple[str, str]:
    """Bad and all events within the window. Latency counts observations, success the requests that are no refusal and no hang-up."""
    if objective.latency is None:
        served = ('outcome!~"rejected|client_abort"',)
        everything = promql.growth(ours.REQUESTS, window, MODEL, served)
        return f"({promql.growth(ours.REQUESTS, window, MODEL, ours.FAILED)} or {everything} * 0)", everything
    metric = _HISTOGRAMS[objective.latency]
    everything = promql.observed(metric, window, MODEL)
    return f"{everything} - {promql.within(metric, objective.within_s or 0, window, MODEL)}", everything


def _recorded(objective: Objective, what: str) -> str:
    return f"cluster_model_name:vllm_slo_{objective.slug}_{what}:increase{RECORDED_OVER}"


def _called(objective: Objective) -> str:
    return {"ttft": "the time to the first token", "inter_token": "the time between tokens", None: "success"}[objective.latency]


def _burns(period: str) -> str:
    """What the windows mean, for the page."""
    told = (f"{factor(period, long, share):f} times as fast as allowed over {long} and {short}" for long, short, share in WINDOWS[period])
    return f"Told when the budget of {period} goes {', '.join(told)}; the first two of these wake someone."
