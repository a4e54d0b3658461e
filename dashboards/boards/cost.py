"""Dashboard Cost: cost of GPUs, by team, and per token.

Invariant: everything here is what a sidecar attributed, by look and by request, at the prices in its configuration.
Over all rows, with __idle__, __aborted__ and __unattributed__ among them, it sums to the whole; who had which part of a
batch is an estimate of share, and the panels say so."""

from __future__ import annotations

from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Precondition, Query, Shape, shown_unit
from exporters.catalogue import attributed, promql, sidecar, vllm
from exporters.catalogue.metric import Metric, Unit

_RANGE = "$__range"
_TEAM, _MONEY = ("team",), ("currency",)
_WHOLE = queries.where(attributed.PENDING)  # clusters and models, of any team
_ALLOCATION, _USAGE = 'basis="allocation"', 'basis="usage"'
_ACTIVE = ('state="active"',)
_ABORTED = ('method="aborted"',)
_TOKENS = ('type!="cached"',)
_PER_1K = "suffix: /1K tok"
_GPU_COUNT = "suffix: GPUs"

_SPLIT = "Who had which part is an estimate of share; the sum is exact."
_NOBODY = (
    "__idle__: nothing ran. __aborted__: broken-off work that no record claims. __unattributed__: work that no log"
    " shows, or time that nobody knows of."
)
_GPUS = Precondition(
    "gpu", "GPU", f"group({promql.last_samples(attributed.ALLOCATED, _RANGE, _WHOLE)})",
    "No sidecar sees a GPU with an engine in this range: start it on the GPU host, with engines in its configuration.",
)  # fmt: skip
_PRICES = Precondition(
    "price",
    "price",
    f"group({promql.last_samples(attributed.COST, _RANGE, _WHOLE)})",
    "No price is set for a GPU in sight, so nothing here is money: put prices into the sidecar's configuration;"
    " docs/guides/cost.md says how.",
)
_NO_API = "No price of an API is set. Put api under prices in the sidecar's configuration to compare."


def _by_team(basis: str) -> tuple[Query, Query]:
    by, where = (*_TEAM, *_MONEY), queries.where(attributed.COST, basis)
    each = Query(f"3600 * {promql.per_second(attributed.COST, RATE, by, where)}", queries.legend(by), "suffix: /h")
    return queries.ranked(each, promql.growth(attributed.COST, _RANGE, by, where), by, keep=_MONEY)


def _in_range(metric: Metric, called: str, *only: str) -> Query:
    return queries.growth(metric, _RANGE, _MONEY, called, only)


def _team_tokens() -> str:
    """Return the tokens of finished requests, prompts and answers; those from the cache are part of prompts."""
    return promql.per_second(sidecar.TOKENS, RATE, _TEAM, queries.where(sidecar.TOKENS, *_TOKENS))


def _per_1k(metric: Metric, called: str, *only: str) -> tuple[Query, Query]:
    spent = promql.per_second(metric, RATE, (*_TEAM, *_MONEY), queries.where(metric, *only))
    by = (*_TEAM, *_MONEY)
    each = Query(promql.per(f"1000 * {spent}", _team_tokens(), on=_TEAM), queries.legend(by, called), _PER_1K)
    return queries.ranked(
        each, promql.growth(metric, _RANGE, by, queries.where(metric, *only)), by, rest="max", keep=_MONEY
    )


def _cost_of_all() -> Query:
    """Return the cost of all GPUs per 1,000 tokens of all engines, as VLLMCostOverBudget computes it."""
    spent = promql.per_second(attributed.COST, RATE, ("cluster", *_MONEY), (*_WHOLE, _ALLOCATION))
    tokens = " + ".join(
        promql.per_second(made, RATE, ("cluster",), _WHOLE) for made in (vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS)
    )
    return Query(promql.per(f"1000 * {spent}", f"({tokens})", on=("cluster",)), queries.legend(_MONEY, "cost"), _PER_1K)


def _cards(by: tuple[str, ...], metric: Metric, called: str = "") -> Query:
    """Seconds of a GPU in each second, which is a number of GPUs."""
    return Query(queries.rate(metric, by).expr, queries.legend(by, called), _GPU_COUNT)


def _by_team_only(each: Query, metric: Metric, only: tuple[str, ...] = ()) -> tuple[Query, Query]:
    return queries.ranked(each, promql.growth(metric, _RANGE, _TEAM, queries.where(metric, *only)))


def _difference() -> tuple[Query, Query]:
    """The furthest apart, on either side; of the others the highest."""
    far = promql.average(attributed.SHARE_DIFFERENCE, _RANGE, _TEAM, queries.where(attributed.SHARE_DIFFERENCE))
    return queries.ranked(queries.now(attributed.SHARE_DIFFERENCE, _TEAM), f"abs({far})", rest="max")


_TOP = (
    Panel(
        "spent",
        "Cost of this range",
        "What the GPUs cost in the time shown, for the teams chosen above: allocation is all the time that they were"
        " there, usage the time in which they are known to have worked. With all teams chosen, idle time is in the"
        " first.",
        "Near each other: GPUs that are paid for work.",
        "Far apart: GPUs stand idle. Give some back, or bring more work to them.",
        (_in_range(attributed.COST, "allocation", _ALLOCATION), _in_range(attributed.COST, "usage", _USAGE)),
        Shape.NUMBER,
        height=5,
        requires=_PRICES,
    ),
    Panel(
        "api-cost",
        "Cost of the same tokens at API prices",
        "What the logged tokens of this range would have cost at the API prices in the sidecar's configuration.",
        "Above what the GPUs cost.",
        "Below: these tokens are cheaper elsewhere, as far as price alone goes; see how much of the time the GPUs work"
        " before you decide.",
        (_in_range(attributed.API_COST, ""),),
        Shape.NUMBER,
        height=5,
        requires=_PRICES,
        optional=_NO_API,
    ),
    Panel(
        "at-work",
        "Busy share of GPU time",
        "Part of this range in which the engine of a GPU had requests running. The rest is idle, or time in which the"
        " engine did not answer.",
        "High, but for the hours without load.",
        "Low: more engines than the load needs, or one that gets no traffic. See GPUs by model below.",
        (
            Query(
                promql.share(attributed.BUSY, attributed.ALLOCATED, _RANGE, (), where=_WHOLE),
                "at work",
                shown_unit(Unit.RATIO),
            ),
        ),
        Shape.NUMBER,
        height=5,
        requires=_GPUS,
    ),
    Panel(
        "cost",
        "Cost per hour by team, all GPU time",
        f"What all the time of the GPUs costs, by whose it was. {_NOBODY} {_SPLIT}",
        "Mostly teams.",
        "Much of __idle__: see how much of the time they work. Much of __unattributed__: somebody passes by the"
        " gateway, see the dashboard Monitoring health.",
        _by_team(_ALLOCATION),
        Shape.STACK,
        ranked=True,
        height=10,
        detail="teams",
        requires=_PRICES,
    ),
    Panel(
        "usage",
        "Cost per hour by team, busy time only",
        f"What the time costs in which the GPUs are known to have worked, by whose work it was. {_SPLIT}",
        "What the teams expect to pay for what they asked.",
        "One team far above what it was: longer prompts or answers, or no hits in the prefix cache; see its tokens.",
        _by_team(_USAGE),
        Shape.STACK,
        ranked=True,
        height=10,
        detail="teams",
        requires=_PRICES,
    ),
    Panel(
        "gpus",
        "GPUs by team",
        f"Whole GPUs, by whose time it was; a MIG instance counts as its compute slices of 7. {_NOBODY} {_SPLIT}",
        "The sum is the GPUs that are there; most of it has a team.",
        "__aborted__ grows: work is broken off that no stream with content shows, such as replies without a stream"
        " whose clients left.",
        _by_team_only(_cards(_TEAM, attributed.TEAM_SECONDS), attributed.TEAM_SECONDS),
        Shape.STACK,
        ranked=True,
        height=10,
        detail="gpu",
        requires=_GPUS,
    ),
    Panel(
        "aborted",
        "GPUs by team, aborted requests only",
        "Part of the GPUs that went into requests which broke off: the client left, time ran out or the engine"
        " failed. It is in the team's part already, by the tokens of the record, which are estimates where no usage"
        f" came. {_SPLIT}",
        "Next to nothing.",
        "A team reads streams and leaves before their end: ask it to set max_tokens instead. Or an engine fails: see"
        " the board Overview.",
        _by_team_only(
            Query(queries.rate(attributed.TEAM_SECONDS, _TEAM, only=_ABORTED).expr, queries.legend(_TEAM), _GPU_COUNT),
            attributed.TEAM_SECONDS,
            _ABORTED,
        ),
        Shape.STACK,
        ranked=True,
        height=10,
        detail="teams",
        requires=_GPUS,
    ),
    Panel(
        "estimated-tokens",
        "Estimated tokens by team",
        "Tokens of requests whose usage never came: prompts from their bytes, output from the content events that were"
        " seen. They are in no panel of exact tokens, and in the cost at an API's price.",
        "Next to nothing beside the tokens that engines reported.",
        "Many clients of that team leave before the end of their streams.",
        queries.ranked_rate(sidecar.ESTIMATED_TOKENS, ("team", "type")),
        detail="teams",
        ranked=True,
        height=10,
        optional="Shown once a stream broke off before its usage event. Break one off to see it.",
    ),
)

_TOKEN = (
    Panel(
        "cost-per-1k",
        "Cost per 1K tokens, all GPUs",
        "What all the time of the GPUs costs, over all tokens of the engines, prompts and answers; beside it the"
        " budget, where one is set.",
        "Below the budget.",
        "Few tokens for many GPUs: see how much of the time they work. See the runbook of VLLMCostOverBudget.",
        (
            _cost_of_all(),
            Query(
                promql.current(sidecar.COST_BUDGET, _MONEY, queries.where(sidecar.COST_BUDGET)),
                queries.legend(_MONEY, "budget"),
                _PER_1K,
            ),
        ),
        requires=_PRICES,
    ),
    Panel(
        "cost-per-1k-team",
        "Cost per 1K tokens by team, busy time only",
        "Cost of a team's work over its tokens, prompts and answers; beside it what an API would take for the same."
        f" {_SPLIT}",
        "Steady for the same kind of requests, and below the API's.",
        "Dearer than others: long answers to short prompts, or prompts that never hit the cache.",
        (*_per_1k(attributed.COST, "", _USAGE), *_per_1k(attributed.API_COST, "API")),
        detail="teams",
        ranked=True,
        height=10,
        requires=_PRICES,
    ),
    Panel(
        "joules-per-token",
        "Joules per token by team",
        "Energy of a team's work over its tokens. What a GPU draws when nothing runs is not in it, but __idle__'s."
        f" {_SPLIT}",
        "Low and steady; larger batches lower it.",
        "It rises when the GPUs work for few requests at once.",
        queries.ranked_ratio(
            promql.per_second(attributed.TEAM_ENERGY, RATE, _TEAM, queries.where(attributed.TEAM_ENERGY, *_ACTIVE)),
            _team_tokens(),
            promql.growth(attributed.TEAM_ENERGY, _RANGE, _TEAM, queries.where(attributed.TEAM_ENERGY, *_ACTIVE)),
            "suffix: J/tok",
        ),
        ranked=True,
        height=10,
        detail="gpu",
        requires=_GPUS,
    ),
    Panel(
        "watts",
        "Power by team",
        f"Watts of the GPUs, by whose work drew them. {_NOBODY} {_SPLIT}",
        "In line with the teams' part of the GPUs.",
        "Much of __idle__: GPUs that stand idle draw power all the same.",
        _by_team_only(queries.rate(attributed.TEAM_ENERGY, _TEAM), attributed.TEAM_ENERGY),
        Shape.STACK,
        ranked=True,
        height=10,
        detail="gpu",
        requires=_GPUS,
    ),
    Panel(
        "watts-by-state",
        "Power by state",
        "Watts of the GPUs: active is what work drew, idle what the GPUs draw in any case, unknown the time in which"
        " an engine did not answer.",
        "Mostly active while requests are served.",
        "idle near active: too few requests for these GPUs.",
        (queries.rate(attributed.TEAM_ENERGY, ("state",)),),
        Shape.STACK,
        detail="gpu",
        requires=_GPUS,
    ),
    Panel(
        "cards-by-model",
        "GPUs by model: allocated and busy",
        "Whole GPUs that were there for a model, and those of them whose engine had requests running. __none__ are"
        " GPUs that no engine claims.",
        "At work near there, under load.",
        "One model far apart: it has more GPUs than its load needs. __none__: name these GPUs under an engine, or"
        " give them back.",
        (_cards(("model_name",), attributed.ALLOCATED, "there"), _cards(("model_name",), attributed.BUSY, "at work")),
        detail="fleet",
        requires=_GPUS,
    ),
)

_HOW = (
    Panel(
        "share-difference",
        "Cost split: token-based minus time-based",
        "A team's share of the busy time by requests running at each moment, less its share by tokens, for the last"
        " full hour.",
        "Within a few percent of zero.",
        "Far from it: believe the split by requests, which vllm-watch cost makes from the log, and doubt the live one"
        " for that team.",
        _difference(),
        full_scale=False,
        ranked=True,
        height=10,
        requires=_GPUS,
        optional="Shown after the first full hour with requests. Let the sidecar run, with GPUs in sight.",
    ),
    Panel(
        "seconds-by-method",
        "GPUs by how their time was attributed",
        "tokens: shared by work that ended. aborted: by a team's requests that broke off. measured: nothing ran."
        " unknown: the engine did not answer.",
        "No unknown.",
        "unknown is nobody's: see whether the engine answers the sidecar.",
        (_cards(("method",), attributed.TEAM_SECONDS),),
        Shape.STACK,
        requires=_GPUS,
    ),
    Panel(
        "energy-by-method",
        "Power by how it was measured",
        "counter: the GPU's own. integrated: power over time. mig_activity and mig_fraction: the GPU's, split over"
        " its instances.",
        "counter.",
        "integrated misses peaks between two readings; mig_fraction knows sizes only.",
        (queries.rate(attributed.TEAM_ENERGY, ("method",)),),
        Shape.STACK,
        requires=_GPUS,
    ),
    Panel(
        "decode-weight",
        "Weight of a generated token",
        "How much a generated token counts beside a computed prompt token, by model: from the engine's own prefill and"
        " decode times, or the default.",
        "Steady for a model and its load.",
        "default: the engine has not shown a hundred tokens of each yet, or does not tell these times.",
        (queries.now(attributed.DECODE_WEIGHT, ("model_name", "method")),),
        detail="latency",
        requires=_GPUS,
    ),
    Panel(
        "pending",
        "Busy time not yet attributed",
        "Seconds of a GPU that went into requests which still run. They are attributed when these end.",
        "As long as the requests that run.",
        "Growth without end: requests that never end, or whose log nobody reads.",
        (queries.now(attributed.PENDING, ("model_name",)),),
        detail="monitoring-health",
        requires=_GPUS,
    ),
    Panel(
        "idle-watts",
        "Power of idle GPUs",
        "What a GPU drew in the last half minute or more in which its engine neither ran nor queued anything.",
        "Alike on GPUs of one kind.",
        "One above its twins: something else runs on it.",
        (
            Query(
                f"label_replace({promql.worst(attributed.IDLE_WATTS, ('uuid',), queries.where(attributed.IDLE_WATTS))},"
                ' "gpu", "$1", "uuid", "(.{1,12}).*")',
                queries.legend(("gpu",)),
                shown_unit(Unit.WATTS),
            ),
        ),
        detail="gpu",
        requires=_GPUS,
        optional=(
            "Shown once a GPU was idle for half a minute; it is not measured under MIG. Let the engine rest for a"
            " moment."
        ),
    ),
)

BOARD = Dashboard(
    slug="cost",
    title="vLLM / Cost",
    question="What do the GPUs cost, by team and per token?",
    rows=(
        DashboardRow("", _TOP),
        DashboardRow("Tokens, energy, models", _TOKEN),
        DashboardRow("Attribution", _HOW, collapsed=True),
    ),
)
