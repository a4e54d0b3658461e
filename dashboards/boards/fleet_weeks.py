"""Dashboard Fleet (weeks): places, models and teams over weeks.

Invariant: it reads what our rules record (alerts/fleet.py, alerts/recorded.py) and nothing else, and no series of one
engine: made for a long-term store that several Prometheus write to, and that may keep nothing else. It is the one board
that needs our rules; Fleet asks the same of raw series. Counts are growth within five minutes, recorded every minute:
divided by one another or by their seconds they may be read at any of them."""

from __future__ import annotations

from collections.abc import Sequence

from alerts import fleet, recorded, thresholds
from alerts.fleet import PLACED
from alerts.labels import MODEL, TEAM, by
from alerts.recorded import HOURLY, OVER
from alerts.settings import DEFAULTS
from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import promql, sidecar
from exporters.catalogue.metric import Unit
from exporters.text import parse_window

_RATIO, _SECONDS, _COUNT = (shown_unit(unit) for unit in (Unit.RATIO, Unit.SECONDS, Unit.COUNT))
_PER_HOUR = parse_window(HOURLY) // parse_window(recorded.SELDOM)  # how often an event is in what is recorded of hours


def _at(record: str, labels: Sequence[str], *more: str) -> str:
    """A recorded series, narrowed by what it bears."""
    matchers = ", ".join((*(f'{label}=~"${label}"' for label in labels if label != "currency"), *more))
    return f"{record}{{{matchers}}}"


def _shown(record: str, unit: str, called: str = "") -> Query:
    """Return the recorded value by cluster, namespace and model."""
    return Query(_at(record, PLACED), queries.legend(PLACED, called), unit)


def _over(what: str, labels: Sequence[str], *more: str) -> str:
    """Return the count within each step, each event as often as it was recorded: to be divided by another."""
    return f"sum_over_time({_at(what + OVER, labels, *more)}[{RATE}])"


def _share(part: str, whole: str, labels: Sequence[str], where: Sequence[str] = ()) -> Query:
    """One count in another, 0 to 1; a part that never happened is 0 of the whole, and of nothing there is no part."""
    below = f"sum {by(tuple(labels))} ({_over(whole, labels)})"
    above = f"sum {by(tuple(labels))} ({_over(part, labels, *where)})"
    return Query(promql.per(f"({above} or {below} * 0)", below), queries.legend(labels), _RATIO)


def _p95(buckets: str) -> Query:
    summed = f"sum {by((*MODEL, 'le'))} ({_over(buckets, MODEL)})"
    every, infinite = _at(buckets + OVER, MODEL), _at(buckets + OVER, MODEL, 'le="+Inf"')
    group = f"group {by((*MODEL, 'le'))}"
    observed = f"sum {by(MODEL)} (sum_over_time({infinite}[{RATE}]))"
    bounds = promql.Ladder(f"{group} ({every})", f"{group} ({infinite})")
    expr = promql.bounded(f"histogram_quantile(0.95, {summed})", bounds, MODEL, observed)
    return Query(expr, queries.legend((*MODEL, promql.BOUND)), _SECONDS)


def _per_second(what: str, unit: Unit, *more: str) -> Query:
    counted = f"sum {by(TEAM)} ({_at(what + OVER, TEAM, *more)})"
    return Query(f"{counted} / {DEFAULTS.seconds(OVER)}", queries.legend(TEAM), shown_unit(unit, per_second=True))


def _in_range(what: str, called: str, unit: str, labels: Sequence[str] = TEAM, *more: str) -> Query:
    """Return the amount within the shown range, from what is recorded of hours, so that a month is quick to add up."""
    summed = f"sum {by(tuple(labels))} (sum_over_time({_at(what + HOURLY, TEAM, *more)}[$__range]))"
    return Query(f"{summed} / {_PER_HOUR}", called, unit)


_THROUGHPUT = 'type=~"prompt|completion"'
_NO_COST = (
    "No cost in this range: set prices in the configuration of a sidecar, and let this store have what our rules record"
    " of it."
)

BOARD = Dashboard(
    slug="fleet-weeks",
    title="vLLM / Fleet (weeks)",
    question="How do clusters, models and teams develop over weeks?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "engines",
                    "Engines, by cluster, namespace and model",
                    "How many engines of a model answered their scrape.",
                    "As many as you meant to run, at every hour.",
                    "A step down that nobody planned: ask that cluster's own Prometheus, on its board Fleet, which one"
                    " went.",
                    (_shown(fleet.ENGINES, _COUNT),),
                    detail="fleet",
                ),
                Panel(
                    "ttft-p95",
                    "Time to first token, p95, by cluster and model",
                    "From a request's arrival at an engine to its first token, over all engines of a model in a"
                    " cluster.",
                    "Under the dashed line, and no higher than last week at the same hour.",
                    "One cluster above the others: compare its running requests and its fullest cache below.",
                    (_p95(recorded.TTFT),),
                    threshold=thresholds.TTFT_P95,
                    detail="latency",
                ),
                Panel(
                    "failed",
                    "Error ratio by cluster and model",
                    "Share of requests in the log that ended in an upstream error or a timeout; refusals are policy and"
                    " not counted.",
                    "Zero, and at most the line.",
                    "Open the Overview of that cluster at that hour.",
                    (_share(recorded.REQUESTS, recorded.REQUESTS, MODEL, sidecar.FAILED),),
                    threshold=thresholds.ERROR_RATIO,
                    full_scale=False,
                    detail="overview",
                ),
            ),
        ),
        DashboardRow(
            "Load",
            (
                Panel(
                    "running",
                    "Requests running and waiting, by cluster, namespace and model",
                    "Requests in the batches of all engines of a model, and those that are accepted and not scheduled"
                    " yet.",
                    "Waiting near zero for most of the time.",
                    "Waiting that comes back every day at the same hour is demand above what is there: add engines for"
                    " that hour.",
                    (_shown(fleet.RUNNING, _COUNT, "running"), _shown(fleet.WAITING, _COUNT, "waiting")),
                    detail="kv-cache",
                ),
                Panel(
                    "kv-cache",
                    "KV cache use, fullest engine, by cluster, namespace and model",
                    "Share of KV-cache blocks in use on the fullest engine of a model.",
                    "Under the line.",
                    "Near it for weeks: longer contexts or more users than the engines were sized for.",
                    (_shown(fleet.FULLEST, _RATIO),),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="kv-cache",
                ),
                Panel(
                    "queue",
                    "Queue time, p95, worst engine, by cluster, namespace and model",
                    "Waiting in an engine until first scheduled, on the engine where it was longest. vLLM's first bound"
                    " is 0.3 s.",
                    "Near zero.",
                    "Long on the worst engine while time to first token of the model is well: one engine gets more than"
                    " its part.",
                    (Query(_at(fleet.LONGEST_QUEUE, PLACED), queries.legend((*PLACED, promql.BOUND)), _SECONDS),),
                    threshold=thresholds.QUEUE_TIME_P95,
                    detail="fleet",
                ),
                Panel(
                    "tokens",
                    "Tokens by cluster, namespace and model",
                    "Prompt tokens taken in and tokens generated per second, all engines of a model together.",
                    "Follows demand.",
                    "Less than a week ago at as many running requests means slower steps: see inter-token latency.",
                    (
                        _shown(fleet.GENERATED, shown_unit(Unit.TOKENS, per_second=True), "generated"),
                        _shown(fleet.PROMPTED, shown_unit(Unit.TOKENS, per_second=True), "prompt"),
                    ),
                    detail="latency",
                ),
                Panel(
                    "inter-token-latency",
                    "Inter-token latency, p95, by cluster and model",
                    "Gap between two outputs of a running request, over all engines of a model in a cluster.",
                    "Steady.",
                    "A step that stays after an upgrade or a change of settings is its price: the board Tuning has the"
                    " day.",
                    (_p95(recorded.INTER_TOKEN),),
                    threshold=thresholds.INTER_TOKEN_P95,
                    detail="latency",
                ),
                Panel(
                    "cache-hits",
                    "Prefix cache hit ratio, by cluster and model",
                    "Share of looked-up prompt tokens that were found in the prefix cache.",
                    "Level from week to week.",
                    "A fall that stays is a changed template, or routing that no longer keeps a conversation on one"
                    " engine.",
                    (_share(recorded.HITS, recorded.LOOKUPS, MODEL),),
                    detail="kv-cache",
                ),
                Panel(
                    "preemptions",
                    "Preemptions, by cluster, namespace and model",
                    "Running requests per second that lost their blocks and are computed again.",
                    "Zero.",
                    "Regular ones mean that the cache is promised twice every day: see the fullest engine.",
                    (_shown(fleet.PREEMPTED, shown_unit(Unit.COUNT, per_second=True)),),
                    threshold=thresholds.PREEMPTIONS,
                    detail="kv-cache",
                ),
            ),
        ),
        DashboardRow(
            "Teams",
            (
                Panel(
                    "team-requests",
                    "Requests by team",
                    "Requests that ended per second, whatever their outcome, by cluster and team.",
                    "The teams you know, at their usual pace.",
                    "A team that doubles from month to month is one to plan with.",
                    (_per_second(fleet.TEAM_REQUESTS, Unit.REQUESTS),),
                    Shape.STACK,
                    detail="teams",
                ),
                Panel(
                    "team-failed",
                    "Error ratio by team",
                    "Share of a team's requests that ended in an upstream error or a timeout.",
                    "Zero, and at most the line.",
                    "One team in one cluster: see its failures by reason on the board Teams there.",
                    (_share(fleet.TEAM_REQUESTS, fleet.TEAM_REQUESTS, TEAM, sidecar.FAILED),),
                    threshold=thresholds.ERROR_RATIO,
                    full_scale=False,
                    detail="teams",
                ),
                Panel(
                    "team-ttft",
                    "Client time to first token, p95, by team",
                    "From accepted to the first content token sent on, streams only, queues of gateway and engine"
                    " included.",
                    "Alike for teams of one priority.",
                    "One team above the others sends longer prompts or waits in the gateway.",
                    (Query(_at(fleet.TEAM_TTFT, TEAM), queries.legend((*TEAM, promql.BOUND)), _SECONDS),),
                    detail="teams",
                    optional="Empty while nobody streams; a request with stream set to true gives it a value.",
                ),
                Panel(
                    "team-tokens",
                    "Tokens by team",
                    "Prompt and completion tokens per second, by cluster and team.",
                    "In line with what the teams were given.",
                    "Growth without more requests is longer prompts or answers.",
                    (_per_second(fleet.TEAM_TOKENS, Unit.TOKENS, _THROUGHPUT),),
                    Shape.STACK,
                    detail="teams",
                ),
                Panel(
                    "team-totals",
                    "Teams in this range",
                    "Requests and tokens (prompt and completion) of each team within the shown range, the largest"
                    " first. Counted from full hours, so a range of less than a day is only near the truth.",
                    "The teams you know.",
                    "The board Teams has the day, the board Cost what is billed.",
                    (
                        _in_range(fleet.TEAM_TOKENS, "Tokens", _COUNT, TEAM, _THROUGHPUT),
                        _in_range(fleet.TEAM_REQUESTS, "Requests", _COUNT),
                    ),
                    Shape.TABLE,
                    detail="teams",
                    width=12,
                ),
                Panel(
                    "team-cost",
                    "Cost by team in this range",
                    "What the GPUs cost within the shown range by team, idle time included under __idle__, in the"
                    " currency of the sidecars' prices.",
                    "What the teams expect to pay.",
                    "The dashboard Cost shows idle and busy time, and what a thousand tokens cost.",
                    (_in_range(fleet.TEAM_COST, "Cost", _COUNT, (*TEAM, "currency"), 'basis="allocation"'),),
                    Shape.TABLE,
                    detail="cost",
                    width=12,
                    optional=_NO_COST,
                ),
            ),
        ),
    ),
    recorded=True,
)
