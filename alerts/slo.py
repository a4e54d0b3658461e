"""Service level objectives: recording rules, burn-rate windows and alerts.

factor = share of the budget x period / long window. A pair of windows fires when both burn faster than factor x (1 -
objective); the short one ends the alert soon after the fault ends. Source: Google, The Site Reliability Workbook,
chapter 5 (multiwindow, multi-burn-rate alerts); the shares for seven days are those of Sloth's table. Bad and all
events are recorded as growth and divided after summing (recorded.py)."""

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

# Long window, short window, share of the budget that may be used within the long one, by period. The first two pairs
# are critical.
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
_FIRST_STEP = {
    "ttft": (
        "Compare its engines, and queue time with prefill time: one slow engine is the cause itself, all of them mean"
        " load."
    ),
    "inter_token": (
        "Compare its engines, and how many requests share a step: one slow engine is the cause itself, all of them mean"
        " load."
    ),
    None: "Check the failure reason in the request log, then whether every engine answers.",
}
_COUNTED = ('outcome!~"rejected|client_abort"',)
# Words that mark the fallback of success, in its alerts.
_COARSE = " For a model without a request log: share of HTTP 5xx, which is coarse (failed streams have status 200)."
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
    """Service level objective: a share (0 to 1) of good events.

    Either `latency` with `within_s` (seconds, a bucket bound), or `success: true`. Raises ValueError for any other
    combination, and for a name or a share that cannot be used."""

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
    """Content of a file of objectives; see slo.yaml. Raises ValueError if two share a name, or there is none."""

    objectives: tuple[Objective, ...]
    period: Literal["7d", "30d"] = "7d"
    at_least: int = 50

    def __post_init__(self) -> None:
        names = [objective.slug for objective in self.objectives]
        if len(set(names)) != len(names) or not names:
            raise ValueError("objectives: at least one is needed, and names must differ")
        if self.at_least < 1:
            raise ValueError("at_least must be 1 or more: 0 requests have no ratio")


def default_objectives() -> Objectives:
    return msgspec.convert(yaml.safe_load(SHIPPED_FILE.read_text(encoding="utf-8")), Objectives)


def factor(period: str, long: str, share: Decimal) -> Decimal:
    """Return the burn rate (1 uses the budget up in the period) at which `share` of it is used in the long window."""
    return (share * parse_window(period) / parse_window(long)).normalize()


def recordings(file: Objectives, s: Settings) -> Iterator[Recording]:
    """Return the rules that record bad and all events of each objective, by model."""
    for objective in file.objectives:
        for which, expr in zip(("bad", "all"), _events(objective, s), strict=True):
            yield Recording(_what(objective, which) + recorded.OVER, expr, _meaning(objective, which))


def _meaning(objective: Objective, which: str) -> str:
    late, counted = _LATENCIES[objective.latency]
    if which == "all":
        return f"{counted} that the promise is about"
    return late if objective.within_s is None else f"{late} than {objective.within_s:g} s"


def recorded_names(file: Objectives) -> Iterator[str]:
    """Return the names of the recorded series of the objectives, without their window."""
    return (_what(objective, which) for objective in file.objectives for which in ("bad", "all"))


def alerts(file: Objectives, s: Settings) -> tuple[Alert, ...]:
    """Return two alerts for each objective: a critical one for a fast burn, a warning for a slow one."""
    return tuple(alert for objective in file.objectives for alert in _alerts(objective, file, s))


def _alerts(objective: Objective, file: Objectives, s: Settings) -> tuple[Alert, Alert]:
    threshold = Threshold(
        f"{objective.slug}_objective",
        objective.objective,
        Unit.RATIO,
        f"{objective.why} " + _burn_rates(file.period),
        objective.source,
    )
    pairs = [_pair(objective, file, s, *window) for window in WINDOWS[file.period]]
    fast, slow = f"VLLM{objective.name}BudgetBurn", f"VLLM{objective.name}BudgetSlowBurn"
    panel, coarse = _PANELS[objective.latency], _COARSE if objective.success else ""
    one, two, three, four = (window[0] for window in WINDOWS[file.period])
    return (
        Alert(
            fast,
            Severity.CRITICAL,
            " or ".join(pairs[:2]),
            hold="2m",
            summary=f"{objective.name} SLO burning fast: {{{{ $labels.model_name }}}}",
            description=(
                f"{_bad(objective)} over {one} or {two}: at this rate the error budget of {file.period} is used up"
                f" within {_days_left(file.period)} days or less. {_FIRST_STEP[objective.latency]}{coarse}"
            ),
            panel=panel,
            threshold=threshold,
            drawn=False,
        ),
        Alert(
            slow,
            Severity.WARNING,
            " or ".join(pairs[2:]),
            hold="15m",
            summary=f"{objective.name} SLO burning slowly: {{{{ $labels.model_name }}}}",
            description=(
                f"{_bad(objective)} over {three} or {four}: this uses up about the whole error budget of"
                f" {file.period}. Check whether it continues in the last hour and at which hours it happened, then"
                f" look for a load pattern or a change.{coarse}"
            ),
            panel=panel,
            threshold=threshold,
            drawn=False,
            muted_by=(fast,),
        ),
    )


def _pair(objective: Objective, file: Objectives, s: Settings, long: str, short: str, share: Decimal) -> str:
    """Return the condition of one pair of windows: both burn, and the long one has enough requests, because one
    response has hundreds of gaps between tokens. The value is the share of bad events in the long window."""
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
    """Return expressions for bad and all events within 5 min. Latency counts observations; success counts requests
    except rejections and client disconnects.

    A model without a request log counts by HTTP status, which is coarse: a stream that is rejected or fails after its
    start has status 200.

    Both are absent if an engine of the model lacks the bound of the objective: then the objective is not evaluated."""
    if objective.latency is None:
        logged, failed = recorded.requests(s, _COUNTED), recorded.requests(s, sidecar.FAILED)
        by_status = [recorded.by_status(what) for what in (recorded.HTTP_FAILED, recorded.HTTP_ENDED)]
        return f"({failed} or {logged} * 0 or {by_status[0]})", f"{logged} or {by_status[1]}"
    buckets = _HISTOGRAMS[objective.latency]
    everything, within = recorded.observed(buckets), recorded.observed(buckets, promql.le(objective.within_s or 0))
    return f"{everything} - {within}", f"{everything} and {within}"


def _what(objective: Objective, which: str) -> str:
    return f"cluster_model_name:vllm_slo_{objective.slug}_{which}:increase"


def _bad(objective: Objective) -> str:
    """Return the template of an alert's first clause: the share of bad events, what they are, and how many may be."""
    allowed = f"{(1 - Decimal(str(objective.objective))) * 100:f}".rstrip("0").rstrip(".")
    late = f"took longer than {objective.within_s or 0:g} s"
    events, fault = {
        "ttft": ("first tokens", late), "inter_token": ("gaps between tokens", late),
        None: ("requests", "failed or timed out"),
    }[objective.latency]  # fmt: skip
    return (
        f"{{{{ $value | humanizePercentage }}}} of the {events} of {{{{ $labels.model_name }}}} {fault}"
        f" (allowed: {allowed} %)"
    )


def _days_left(period: str) -> str:
    """Return the days until the budget of a period is used up, at the slower of the two critical burn rates."""
    slower = min(factor(period, long, share) for long, _, share in WINDOWS[period][:2])
    return f"{parse_window(period) / 86400 / float(slower):.0f}"


def _burn_rates(period: str) -> str:
    """Return the burn rates of the alerts in words, for the runbook."""
    rates = (
        f"{factor(period, long, share):f} times as fast as allowed over {long} and {short}"
        for long, short, share in WINDOWS[period]
    )
    return f"Alerts when the budget of {period} burns {', '.join(rates)}; the first two of these are critical."
