"""Dashboard Teams: use, rejections, errors and cost of each team.

Invariant: cost and energy here are estimates by token weight at a price that one types in, and say so. What a team is
billed
stands on Cost: there a sidecar attributed it, by look and by request, and the sum is exact.

weight of a team = prompt tokens - cached tokens + completion tokens, each per second
share of a team  = its weight / the weight of all teams and models in the chosen clusters
cost, power      = share x what all GPUs there cost, or draw: nothing says which GPUs a team's requests ran on
While nobody sends anything there is no share, and nothing is shown; while anybody does, the shares of all teams add up
to 1, so idle time is borne by those who were active. A token of a small model weighs as much as one of a large model,
and a token read as much as one written.

Each panel by team shows the teams that matter most for its question in the shown range, and all others as one line."""

from __future__ import annotations

from alerts import thresholds
from dashboards import queries
from dashboards.boards.gpu import GPUS, PRESENT, WATTS
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, Variable, shown_unit
from exporters.catalogue import gateway, gpu, promql, sidecar, vllm
from exporters.catalogue.metric import Unit

_TEAM = ("team",)
_WHO = ("model_name", "team")
_ALL = queries.where(gpu.INFO)  # the cluster: the GPUs' own matcher, so that shares and GPUs are of the same place
_CHOSEN = queries.where(sidecar.TOKENS)
_REFUSED = ('outcome="rejected"',)
_THROUGHPUT = ('type=~"prompt|completion"',)
_CACHED = ('type="cached"',)
_PROMPT = ('type="prompt"',)
_COMPLETION = ('type="completion"',)
_TALL = 10  # room for the legend
_PRICE = Variable("gpu_hour_price", "Price of a GPU hour", kind="text", default="2.50")
_RATIO = shown_unit(Unit.RATIO)


def _tokens(only: tuple[str, ...]) -> str:
    return promql.per_second(sidecar.TOKENS, RATE, _TEAM, (*_CHOSEN, *only))


def _weight(where: tuple[str, ...]) -> str:
    """Tokens per second that had to be computed, by model and team; two counters read at once may differ by a little,
    so never below 0."""
    every, cached = (promql.per_second(sidecar.TOKENS, RATE, _WHO, (*where, *only)) for only in (_THROUGHPUT, _CACHED))
    return f"clamp_min({every} - ({cached} or {every} * 0), 0)"


_SHARE = f"sum by (team) ({_weight(_CHOSEN)}) / on () group_left () (sum({_weight(_ALL)}) > 0)"
_RANK = promql.growth(sidecar.TOKENS, queries.RANGE, _TEAM, (*_CHOSEN, *_THROUGHPUT))
_COST_PER_HOUR = f"{_SHARE} * on () group_left () {GPUS} * ${{{_PRICE.name}}}"
_TEAM_WATTS = f"{_SHARE} * on () group_left () {WATTS}"
_TOKENS = _tokens(_THROUGHPUT)
_KILOTOKENS_PER_HOUR = f"{_TOKENS} * 3.6"  # 3600 seconds, 1000 tokens

# Other programs have a series of this name too: only those targets count that are engines, and serve the chosen models.
_ROUTES = promql.per_second(
    vllm.HTTP_REQUESTS, RATE, ("cluster", "job", "instance", "handler", "status"), (*_ALL, 'status!="2xx"')
)
_ENGINES = promql.series(vllm.NUM_REQUESTS_RUNNING, (*_ALL, 'model_name=~"$model_name"'))
_ROUTE_ERRORS = f"sum by (handler, status) ({_ROUTES} and on (cluster, job, instance) {_ENGINES})"

_HOW = (
    "An estimate: all GPUs seen, shared by tokens without those from the cache; idle time is borne by the teams that"
    " were active."
)
_EIGHT = f"The {queries.SHOWN} teams with most of it in the shown range have lines of their own."
_SLOWEST = (
    f"The {queries.SHOWN} teams with the highest mean in the shown range have lines of their own; of the others the"
    " highest p95 is shown."
)
_PER_HOUR, _PER_1K = "suffix: /h", "suffix: /1K tok"

_TOP = (
    Panel(
        "requests",
        "Requests by team",
        f"Requests that ended per second, whatever their outcome, by team. {_EIGHT}",
        "The teams you know, at their usual pace.",
        "A team that grows fast is the one to talk to before it is refused; __unknown__ are requests without a valid"
        " key.",
        queries.ranked_rate(sidecar.REQUESTS),
        Shape.STACK,
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "failed",
        "Error ratio by team",
        "Share of a team's requests that ended in an upstream error or a timeout. Refusals are policy and not counted"
        f" here. {_EIGHT} Requests with an unknown key or model are left out: see Overview.",
        "Zero, and at most the line.",
        "One team: look at its failures by reason and at what it sends. All teams: the engine or the way to it.",
        queries.ranked_share(sidecar.REQUESTS, sidecar.REQUESTS, sidecar.FAILED, queries.KNOWN),
        threshold=thresholds.ERROR_RATIO,
        detail="overview",
        full_scale=False,
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "refused",
        "Rejection ratio by team",
        "Share of a team's requests that were refused, by the gateway or by the engine. "
        f"{_EIGHT} Requests with an unknown key or model are left out: see Overview.",
        "Zero while there is room; under overload it hits those who send most.",
        "See the reasons below: a limit of the team is a matter of its terms in teams.yaml, a full service one of"
        " capacity.",
        queries.ranked_share(sidecar.REQUESTS, sidecar.REQUESTS, _REFUSED, queries.KNOWN),
        full_scale=False,
        detail="gateway",
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "ttft-p95",
        "Client time to first token, p95, by team",
        "From accepted to the first content token sent on, streams only: one request in twenty waits longer. Queues of"
        f" gateway and engine are in it. {_SLOWEST}",
        "Alike for teams of one priority, and what you promised them.",
        "One team above the others sends longer prompts or waits in the gateway: compare its queue share.",
        queries.ranked_p95(sidecar.TTFT),
        detail="latency",
        ranked=True,
        height=_TALL,
        optional="Empty while nobody streams; a request with stream set to true gives it a value.",
    ),
    Panel(
        "token-share",
        "Share of the work by team (estimate)",
        "A team's tokens over those of all teams, prompt and completion without those from the cache. Cost and energy"
        " below are shared by it. A token of a small model weighs as much as one of a large model.",
        "In line with what the teams were given.",
        "A team far above its part crowds out the others: give it a smaller weight, max_running or a lower band in"
        " teams.yaml, and send the gateway SIGHUP.",
        queries.ranked(Query(_SHARE, "{{team}}", _RATIO), _RANK),
        Shape.STACK,
        detail="gateway",
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "cost",
        "Cost per hour by team (estimate)",
        f"In the currency of the price of a GPU hour above. {_HOW} With all teams and models chosen it adds up to GPUs"
        " x price.",
        "What the teams expect to pay.",
        "Too high for what is asked: look at cost per 1K tokens. GPUs that serve nothing are in the sum: give them"
        " back.",
        queries.ranked(Query(_COST_PER_HOUR, "{{team}}", _PER_HOUR), _RANK),
        Shape.STACK,
        detail="cost",
        requires=PRESENT,
        ranked=True,
        height=_TALL,
    ),
)

_NO_DETAILS = "Empty while the engine does not report cached tokens; start vLLM with --enable-prompt-tokens-details."

_USE = (
    Panel(
        "tokens",
        "Prompt tokens by team",
        "Tokens per second as the engine counted them, those from the cache included. Only of requests whose usage"
        f" arrived. {_EIGHT}",
        "Steady proportions between the teams.",
        "Prompts that grow while completions do not are a changed template or a growing chat history; ask the team.",
        queries.ranked_rate(sidecar.TOKENS, only=_PROMPT),
        Shape.STACK,
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "tokens-generated",
        "Generated tokens by team",
        f"Tokens per second as the engine counted them. Only of requests whose usage arrived. {_EIGHT}",
        "Steady proportions between the teams.",
        "More of them at as many requests are longer replies: see finish reasons below, and the team's max_tokens.",
        queries.ranked_rate(sidecar.TOKENS, only=_COMPLETION),
        Shape.STACK,
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "in-flight",
        "Requests in flight by team",
        f"Requests that the gateway accepted and that have not ended: waiting and running. {_EIGHT}",
        "Below each team's max_in_flight.",
        "A team that stays at its limit is being held back; one that holds many slots for long sends long requests.",
        queries.ranked_now(gateway.INFLIGHT),
        Shape.STACK,
        detail="gateway",
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "cache",
        "Cached prompt tokens, share by team",
        f"Share of a team's prompt tokens that came from the prefix cache. The {queries.SHOWN} teams with most prompt"
        " tokens in the shown range have lines of their own.",
        "High for chats and shared templates; what is good depends on how much the prompts share.",
        "A sudden fall means that a template changed at its start, or that requests of one chat go to different"
        " engines.",
        queries.ranked_ratio(
            _tokens(_CACHED),
            _tokens(_PROMPT),
            promql.growth(sidecar.TOKENS, queries.RANGE, _TEAM, (*_CHOSEN, *_PROMPT)),
            _RATIO,
        ),
        detail="kv-cache",
        ranked=True,
        height=_TALL,
        optional=_NO_DETAILS,
    ),
)

_TROUBLE = (
    Panel(
        "outcomes",
        "Outcomes",
        "Requests that ended per second, by outcome, for the teams chosen above. client_abort is a client that hung up"
        " before the end.",
        "Nearly all ok.",
        "rejected and the failures are split by reason beside this; many client_abort are people, or timeouts of"
        " theirs, that give up waiting.",
        (queries.rate(sidecar.REQUESTS, by=("outcome",)),),
        Shape.STACK,
    ),
    Panel(
        "rejections",
        "Rejections by team and reason",
        "Requests per second that the gateway or an engine did not admit, with the reason.",
        "None, or only those that a team's own limit refuses.",
        "team_limit and the reasons that name model, prompt, output or context: the team's terms in teams.yaml."
        " queue_full, est_wait, queue_ttl: the service is full, or the team has reached its own max_running; more"
        " capacity, or less for others.",
        queries.ranked_rate(sidecar.REASONS, ("team", "reason"), _REFUSED),
        detail="gateway",
        ranked=True,
        height=_TALL,
        optional=(
            "Empty while nobody was refused; a request above a team's limit in the gateway's teams.yaml would show"
            " here."
        ),
    ),
    Panel(
        "failures",
        "Errors by team and reason",
        "Requests per second that ended in an upstream error or a timeout, with the reason in the request log.",
        "None.",
        "Timeouts: the engine is too slow for the limit that was set. Upstream errors: read the engine's log at that"
        " time.",
        queries.ranked_rate(sidecar.REASONS, ("team", "reason"), sidecar.FAILED),
        detail="overview",
        ranked=True,
        height=_TALL,
        optional="Empty while no request failed; stop an engine behind the gateway to see what it would show.",
    ),
    Panel(
        "route-errors",
        "Engine errors by route and status",
        "Answers of the engine other than 2xx, by route and class of status. A stream that fails after its start, or"
        " whose client hangs up, counts as 2xx there.",
        "No 5xx; few 4xx.",
        "5xx: the engine's log. 4xx: a client that sends what the engine does not take, such as a prompt beyond the"
        " context or an unknown model.",
        (Query(_ROUTE_ERRORS, "{{handler}} {{status}}", shown_unit(Unit.REQUESTS, per_second=True)),),
        optional=(
            "Empty while the engine answered every request with 2xx; a request for an unknown model gives it a 4xx."
        ),
    ),
)

_WAITING = (
    Panel(
        "tpot-p95",
        "Client time per output token, p95, by team",
        f"Mean time per token after the first, of one streamed request: one request in twenty is slower. {_SLOWEST}",
        "Alike for all teams that use one model.",
        "All teams slower: the batch is too large or requests are preempted. One team: its contexts are longer.",
        queries.ranked_p95(sidecar.TPOT),
        detail="latency",
        ranked=True,
        height=_TALL,
        optional="Empty while nobody streams; a request with stream set to true gives it a value.",
    ),
    Panel(
        "e2e-p95",
        "Client end-to-end latency, p95, by team",
        "From accepted to ended, as the gateway saw it: one request in twenty takes longer. It grows with the length"
        f" of the answers. {_SLOWEST}",
        "Steady for the same kind of requests.",
        "Compare with time to first token and time per token: what is in neither is longer answers.",
        queries.ranked_p95(sidecar.E2E),
        detail="latency",
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "queue-share",
        "Gateway queue time, share of request time by team",
        f"Seconds that a team's requests waited in the gateway over the seconds they took in all. {_EIGHT}",
        "Near zero.",
        "High for one team: it is at its limit, as set. High for all: the service is full; see the engine's own queue"
        " before you admit more.",
        queries.ranked_ratio(
            queries.amount(sidecar.QUEUE, _TEAM).expr,
            queries.amount(sidecar.E2E, _TEAM).expr,
            promql.amount(sidecar.QUEUE, queries.RANGE, _TEAM, queries.where(sidecar.QUEUE)),
            _RATIO,
        ),
        full_scale=False,
        detail="gateway",
        ranked=True,
        height=_TALL,
    ),
)

_BILL = (
    Panel(
        "cost-per-1k",
        "Cost per 1K tokens by team (estimate)",
        "Cost over all tokens of the team, prompt and completion, those from the cache included; in the currency of"
        f" the price. {_HOW} Teams differ here only by how much of their prompts came from the cache.",
        "Low and steady; it falls as the GPUs are used better.",
        "It rises when GPUs stand idle or the cache stops helping: see utilisation and cache hits.",
        queries.ranked_ratio(f"({_COST_PER_HOUR})", f"({_KILOTOKENS_PER_HOUR})", _RANK, _PER_1K),
        detail="cost",
        requires=PRESENT,
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "power",
        "Power by team (estimate)",
        f"Watts that all GPUs draw, shared by tokens. {_HOW}",
        "In line with the team's share of the work.",
        "It is the GPUs that draw it: see the GPU board for what they do with it.",
        queries.ranked(Query(_TEAM_WATTS, "{{team}}", shown_unit(Unit.WATTS)), _RANK),
        Shape.STACK,
        detail="cost",
        requires=PRESENT,
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "joules-per-token",
        "Joules per token by team (estimate)",
        f"Power over all tokens of the team, prompt and completion, those from the cache included. {_HOW}",
        "Low and steady; larger batches lower it.",
        "It rises when GPUs draw power for little work: fewer GPUs, or more work for each.",
        queries.ranked_ratio(f"({_TEAM_WATTS})", _TOKENS, _RANK, "suffix: J/tok"),
        detail="cost",
        requires=PRESENT,
        ranked=True,
        height=_TALL,
    ),
)

_MORE = (
    Panel(
        "finish-reasons",
        "Finish reasons by team",
        "Requests per second by why they ended: stop, length (the limit on tokens), abort, error, rejected.",
        "Mostly stop.",
        "Much length means answers that are cut off: the team's max_tokens is too small, or its prompts make the model"
        " ramble.",
        queries.ranked_rate(sidecar.FINISHES, ("team", "finish_reason")),
        ranked=True,
        height=_TALL,
    ),
    Panel(
        "cache-requests",
        "Requests with cache hits, share by team",
        f"Share of a team's requests for which some of the prompt came from the prefix cache. {_EIGHT}",
        "High for chats and shared templates.",
        "High here and low in tokens: only a short beginning is shared.",
        queries.ranked_share(sidecar.CACHE_LOOKUPS, sidecar.CACHE_LOOKUPS, ('result="hit"',)),
        detail="kv-cache",
        ranked=True,
        height=_TALL,
        optional=_NO_DETAILS,
    ),
    Panel(
        "gateway-answers",
        "Gateway responses other than 2xx",
        "Requests per second by team, outcome and class of status that the client got; none is a client that left"
        " before it got one.",
        "Few 4xx, no 5xx.",
        "4xx with rejected are refusals; 4xx of __unknown__ are wrong keys; 5xx are failures behind the gateway.",
        queries.ranked_rate(gateway.REQUESTS, ("team", "outcome", "status"), ('status!="2xx"',)),
        ranked=True,
        height=_TALL,
        optional="Empty while every client got a 2xx; a request with a wrong key gives it a 4xx.",
    ),
    Panel(
        "folded",
        "Requests of teams and models beyond the label limit",
        "Requests per second that were counted as __other__, because the sidecar's table of names was full or the model"
        " was never served.",
        "Zero.",
        "Teams: raise the limit in the sidecar's configuration, or name the teams there. Models: someone asks for"
        " models that do not exist.",
        (
            queries.rate(sidecar.TEAMS_OVERFLOW, by=(), called="teams"),
            queries.rate(sidecar.MODELS_OVERFLOW, by=(), called="models"),
        ),
    ),
    Panel(
        "known-teams",
        "Teams with own series",
        "How many teams the sidecar counts apart.",
        "The teams in the gateway's teams.yaml.",
        "Far more are names that come from elsewhere: see which log brings them.",
        (queries.now(sidecar.TEAMS, by=(), called="teams"),),
    ),
)

BOARD = Dashboard(
    slug="teams",
    title="vLLM / Teams",
    question="Which teams use the service, which are rejected or see errors, and what does it cost?",
    rows=(
        DashboardRow("", _TOP),
        DashboardRow("Usage", _USE),
        DashboardRow("Rejections and errors", _TROUBLE),
        DashboardRow("Latency and waiting", _WAITING),
        DashboardRow("Cost and energy (estimates; attributed values: dashboard Cost)", _BILL),
        DashboardRow("Details", _MORE, collapsed=True),
    ),
    extra=(_PRICE,),
)
