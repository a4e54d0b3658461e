"""Dashboard of one team: its requests, latency, tokens, GPU time and cost, and nothing of other teams.

Invariant: every query has the matcher team="NAME" at every series (`Dashboard` checks it), so no share of a total, rank
or sum shows what others use. There are no variables, runbooks or links to other dashboards."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import attributed, gateway, promql, sidecar
from exporters.catalogue.metric import Unit
from exporters.requests.bounded_names import MAX_NAME

_MODEL, _MONEY = ("model_name",), ("currency",)
_RANGE = "$__range"
_REFUSED = ('outcome="rejected"',)
_COUNTED, _CACHED, _PROMPT = ('type!="cached"',), ('type="cached"',), ('type="prompt"',)
_ALLOCATION, _USAGE = ('basis="allocation"',), ('basis="usage"',)
_PER_HOUR, _PER_1K, _GPU_COUNT = "suffix: /h", "suffix: /1K tok", "suffix: GPUs"
_LONGEST_IN_SLUG = 20  # a uid has at most 40 characters

_STREAMS = "Empty while no request streams; a request with stream set to true gives it a value."
_GPUS = "Empty while the GPU time of this team is not measured; ask the operator of the service."
_PRICES = "Empty while no price is set; ask the operator of the service."
_SPLIT = "One batch has requests of several teams, so the part of each is an estimate."


def slug(team: str) -> str:
    """Return the slug of a team's dashboard: its name, or a hash of a name that is long or has other characters."""
    plain = len(team) <= _LONGEST_IN_SLUG and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", team)
    return f"team-{team if plain else hashlib.sha256(team.encode()).hexdigest()[:16]}"


def _cost(basis: tuple[str, ...], called: str) -> Query:
    spent = promql.per_second(attributed.COST, RATE, _MONEY, queries.where(attributed.COST, *basis))
    return Query(f"3600 * {spent}", queries.legend(_MONEY, called), _PER_HOUR)


def _per_1k() -> Query:
    spent = promql.per_second(attributed.COST, RATE, (*_MODEL, *_MONEY), queries.where(attributed.COST, *_USAGE))
    tokens = promql.per_second(sidecar.TOKENS, RATE, _MODEL, queries.where(sidecar.TOKENS, *_COUNTED))
    legend = queries.legend((*_MODEL, *_MONEY))
    return Query(promql.per(f"1000 * {spent}", tokens, on=_MODEL), legend, _PER_1K)


def _queue_share() -> Query:
    waited, took = (queries.amount(metric, _MODEL).expr for metric in (sidecar.QUEUE, sidecar.E2E))
    return Query(f"clamp_max({promql.per(waited, took)}, 1)", queries.legend(_MODEL), shown_unit(Unit.RATIO))


def _cached() -> Query:
    cached, prompt = (queries.rate(sidecar.TOKENS, _MODEL, only=only).expr for only in (_CACHED, _PROMPT))
    return Query(f"clamp_max({promql.per(cached, prompt)}, 1)", queries.legend(_MODEL), shown_unit(Unit.RATIO))


_TOP = (
    Panel(
        "requests-in-range",
        "Requests in this range",
        "Requests of this team that ended in the time shown, by outcome.",
        "Nearly all ok.",
        "Rejections and errors are split by reason below.",
        (queries.growth(sidecar.REQUESTS, _RANGE, ("outcome",)),),
        Shape.NUMBER,
        height=5,
    ),
    Panel(
        "tokens-in-range",
        "Tokens in this range",
        "Tokens of this team in the time shown, as the engine counted them. Prompt tokens from the cache are included.",
        "What the team expects.",
        "More than expected: longer prompts or answers; see tokens per second below.",
        (queries.growth(sidecar.TOKENS, _RANGE, ("type",), only=_COUNTED),),
        Shape.NUMBER,
        height=5,
    ),
    Panel(
        "cost-in-range",
        "Cost of this range",
        f"Cost of the GPU time of this team in the time shown. {_SPLIT}",
        "What the team expects to pay.",
        "More than expected: see cost per 1K tokens below.",
        (
            queries.growth(attributed.COST, _RANGE, _MONEY, "allocation", _ALLOCATION),
            queries.growth(attributed.COST, _RANGE, _MONEY, "usage", _USAGE),
        ),
        Shape.NUMBER,
        height=5,
        optional=_PRICES,
    ),
    Panel(
        "requests",
        "Requests by outcome",
        "Requests that ended per second. client_abort is a client that disconnected before the end.",
        "Nearly all ok.",
        "rejected and the errors are split by reason below.",
        (queries.rate(sidecar.REQUESTS, ("outcome",)),),
        Shape.STACK,
    ),
    Panel(
        "ttft-p95",
        "Time to first token, p95",
        "From accepted to the first content token, streams only: one request in twenty waits longer.",
        "Steady.",
        "Compare with the queue time below: longer prompts, or a service under load.",
        (queries.p95(sidecar.TTFT),),
        optional=_STREAMS,
    ),
    Panel(
        "failed",
        "Errors and rejections, share of requests",
        "Share of requests that failed (upstream error or timeout), and that were rejected.",
        "Zero.",
        "See the reasons below.",
        (
            queries.share(sidecar.REQUESTS, sidecar.REQUESTS, (), "errors", part_only=sidecar.FAILED),
            queries.share(sidecar.REQUESTS, sidecar.REQUESTS, (), "rejections", part_only=_REFUSED),
        ),
        full_scale=False,
    ),
)

_LATENCY = (
    Panel(
        "tpot-p95",
        "Time per output token, p95",
        "Mean time per token after the first, of one streamed request: one request in twenty is slower.",
        "Steady.",
        "Slower: longer contexts, or a service under load.",
        (queries.p95(sidecar.TPOT),),
        optional=_STREAMS,
    ),
    Panel(
        "e2e-p95",
        "End-to-end latency, p95",
        "From accepted to ended: one request in twenty takes longer. It grows with the length of the answers.",
        "Steady for the same kind of requests.",
        "Neither first token nor time per token is slower: the answers are longer.",
        (queries.p95(sidecar.E2E),),
    ),
    Panel(
        "queue-share",
        "Queue time, share of request time",
        "Part of the request time in which requests waited in the gateway.",
        "Near zero.",
        "High: this team is at its limit, or the service is full.",
        (_queue_share(),),
        full_scale=False,
    ),
    Panel(
        "in-flight",
        "Requests in flight",
        "Requests that the gateway accepted and that have not ended: waiting and running.",
        "Below the limit of the team.",
        "At the limit: further requests wait or are rejected.",
        (queries.now(gateway.RUNNING, (), "running"), queries.now(gateway.WAITING, (), "waiting")),
        Shape.STACK,
        optional="Empty while the gateway has no request of this team.",
    ),
    Panel(
        "rejections",
        "Rejections by reason",
        "Requests per second that the gateway or an engine did not admit.",
        "None.",
        "team_limit, and reasons that name model, prompt or output: the limits of this team. Others: a full service.",
        (queries.rate(sidecar.REASONS, ("reason",), only=_REFUSED),),
        optional="Empty while no request was rejected.",
    ),
    Panel(
        "errors",
        "Errors by reason",
        "Requests per second that ended in an upstream error or a timeout.",
        "None.",
        "Report the reason and the time to the operator of the service.",
        (queries.rate(sidecar.REASONS, ("reason",), only=sidecar.FAILED),),
        optional="Empty while no request failed.",
    ),
)

_USE = (
    Panel(
        "tokens",
        "Tokens per second",
        "Tokens per second as the engine counted them. Cached ones are part of the prompt tokens.",
        "Steady for the same load.",
        "Prompts that grow while answers do not are a changed template or a growing chat history.",
        (queries.rate(sidecar.TOKENS, ("type",)),),
    ),
    Panel(
        "cached",
        "Cached prompt tokens, share",
        "Share of the prompt tokens that came from the prefix cache.",
        "High for chats and shared templates.",
        "A sudden fall: a template changed at its start.",
        (_cached(),),
        optional="Empty while the engine does not report cached tokens.",
    ),
    Panel(
        "finishes",
        "Finish reasons",
        "Requests per second by finish reason. length is an answer that was cut off at max_tokens or the context.",
        "Mostly stop.",
        "Many length: raise max_tokens, or ask for shorter answers.",
        (queries.rate(sidecar.FINISHES, ("finish_reason",)),),
        Shape.STACK,
    ),
    Panel(
        "gpus",
        "GPUs",
        f"GPU time of this team in each second, as a number of whole GPUs. {_SPLIT}",
        "In line with the requests.",
        "More for as many requests: longer answers, or fewer cache hits.",
        (Query(queries.rate(attributed.TEAM_SECONDS, _MODEL).expr, queries.legend(_MODEL), _GPU_COUNT),),
        Shape.STACK,
        optional=_GPUS,
    ),
    Panel(
        "watts",
        "Power",
        f"Watts of the GPUs that the work of this team drew. {_SPLIT}",
        "In line with the GPUs of this team.",
        "Higher for as many tokens: the engine works with small batches.",
        (queries.rate(attributed.TEAM_ENERGY, _MODEL),),
        Shape.STACK,
        optional=_GPUS,
    ),
    Panel(
        "cost",
        "Cost per hour",
        "Cost of the GPU time of this team. usage is the busy time; allocation includes idle time where the prices"
        f" spread it. {_SPLIT}",
        "What the team expects to pay.",
        "Higher for as many requests: see cost per 1K tokens.",
        (_cost(_ALLOCATION, "allocation"), _cost(_USAGE, "usage")),
        optional=_PRICES,
    ),
    Panel(
        "cost-per-1k",
        "Cost per 1K tokens, busy time only",
        f"Cost of the busy time over the tokens of this team, prompts and answers. {_SPLIT}",
        "Steady for the same kind of requests.",
        "Higher: long answers to short prompts, or prompts that never hit the cache.",
        (_per_1k(),),
        optional=_PRICES,
    ),
)

_ROWS = (("", _TOP), ("Latency, limits and errors", _LATENCY), ("Tokens, GPU time and cost", _USE))


def dashboard(team: str) -> Dashboard:
    """Return the dashboard of one team. Raises ValueError for a name that no team can have."""
    if not team or team.startswith("__") or len(team) > MAX_NAME or not team.isprintable():
        raise ValueError(
            f"{team[:40]!r} cannot be a team: a name has 1 to {MAX_NAME} printable characters and does not begin"
            " with __ (such rows belong to several teams or to none)"
        )
    rows = tuple(
        DashboardRow(title, tuple(replace(panel, queries=_of_team(panel, team)) for panel in panels))
        for title, panels in _ROWS
    )
    question = "How is this team served, and what does it use?"
    return Dashboard(slug(team), f"vLLM / Team {team}", question, rows, team=team)


def _of_team(panel: Panel, team: str) -> tuple[Query, ...]:
    return tuple(queries.of_team(query, team) for query in panel.queries)
