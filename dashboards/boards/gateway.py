"""Dashboard Gateway: admission, queue, rejections, upstreams.

Invariant: the gateway's own figures, as it counts them now. What became of requests, and whose they were, stands on
Teams and comes from the request log. Several gateways are added up; of their estimates the highest is shown."""

from __future__ import annotations

from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import gateway, promql, sidecar, vllm
from exporters.catalogue.metric import Unit

_WHO = ("team", "band")
_UPSTREAM = ("upstream", "variant")
_REFUSED_FOR_LOAD = (
    "team_limit, queue_full, est_wait and queue_ttl are refusals for load: later the same request may pass."
)
# A refusal of the engine is policy, a wrong request is the client's mistake, a disconnected client left by itself,
# and the gateway cuts requests by its own limits.
FAILED_TRY = 'result!~"ok|engine_busy|bad_request|(client|gateway)_.*"'


def _of_all_tries() -> Query:
    """The part of each variant in all tries."""
    tries = queries.rate(gateway.ATTEMPTS, ("variant",))
    return Query(f"{tries.expr} / on () group_left () (sum({tries.expr}) > 0)", tries.legend, shown_unit(Unit.RATIO))


# On the Monitoring health dashboard too: figures are wrong where records are lost, and timings where the loop is late.
LOG = Panel(
    "gateway-log",
    "Gateway: request log problems",
    "Failed attempts to write the request log, records given up for good, records that wait in memory, and requests of"
    " a run that ended within the last hour without recording them.",
    "Zero everywhere.",
    "Free the disk of the log or fix its permissions: waiting records are written when it works again, lost ones"
    " never.",
    (
        queries.growth(gateway.LOG_ERRORS, by=(), called="failed writes"),
        queries.growth(gateway.LOG_LOST, by=(), called="lost"),
        queries.now(gateway.LOG_WAITING, (), "waiting"),
        queries.now(gateway.LOG_LOST_BEFORE, (), "lost in a crash within the hour"),
    ),
    detail="teams",
)
LOOP_LAG = Panel(
    "gateway-loop-lag",
    "Gateway: event loop lag, p95",
    "How much later than asked the gateway's event loop woke up; every request waits at least that long, unseen by its"
    " timings.",
    "Under 10 ms.",
    "The gateway has no processor time left: start another one, or take other work off its machine.",
    (queries.p95(gateway.LOOP_LAG, ("instance",)),),
    detail="latency",
)

_TOP = (
    Panel(
        "slots",
        "Slots: in use, current limit, maximum",
        "Slots that requests hold at the engines, one for each text (with a team chosen, that team's), how many there"
        " are now, and how many while the engines have room: capacity.slots in teams.yaml.",
        "Slots now at the most, and those in use below them.",
        "Fewer now than at most: an engine has too much to hold, and the gateway holds back; see what waits in the"
        " engines. All in use while requests wait: the service is full. Free ones while requests wait: a team's"
        " max_running, its band's ceiling, or capacity.tokens.",
        (
            queries.now(gateway.SLOTS_HELD, (), "in use"),
            queries.now(gateway.SLOTS, (), "now"),
            queries.now(gateway.SLOTS_LIMIT, (), "at most"),
        ),
        detail="kv-cache",
    ),
    Panel(
        "running",
        "Requests running, by team and band",
        "Requests that were admitted and that an engine works on. While teams of one rank wait they get tokens by their"
        " weights, which need not be slots.",
        "The bands that come first have what they need; experimental stays under its ceiling.",
        "One team holds nearly all while others wait: its requests are long, or its weight is too high. max_running"
        " holds it down.",
        queries.ranked_now(gateway.RUNNING, _WHO),
        Shape.STACK,
        detail="teams",
        ranked=True,
        height=10,
    ),
    Panel(
        "waiting",
        "Requests waiting, by team and band",
        "Requests that were accepted and wait in the gateway for a slot. Here bands and weights have a say; in an"
        " engine's own queue they have not.",
        "None for long; under overload those of the last bands, and of who sends most.",
        "The first band waits: it has more requests than there are slots. One team waits beside free slots: see its"
        " max_running.",
        queries.ranked_now(gateway.WAITING, _WHO),
        Shape.STACK,
        detail="teams",
        ranked=True,
        height=10,
    ),
    Panel(
        "wait-estimate",
        "Estimated wait, by team and band",
        "How long one more request of a team would wait now: who goes before it, and how long a slot is held on the"
        " average. Retry-After is computed from it; above its band's max_wait_s a request is refused at once as"
        " est_wait. Zero until the first request has ended.",
        "Near zero, and far below max_wait_s of the band.",
        "High for one team: it has reached its own limit. High for all: more capacity, shorter outputs, or fewer"
        " requests.",
        queries.ranked(
            queries.worst(gateway.WAIT_ESTIMATE, _WHO),
            promql.average(gateway.WAIT_ESTIMATE, queries.RANGE, _WHO, queries.where(gateway.WAIT_ESTIMATE)),
            _WHO,
            rest="max",
        ),
        ranked=True,
        height=10,
    ),
    Panel(
        "waited",
        "Gateway queue time, p95, by team",
        "How long requests waited that have ended since, from the request log: one in twenty waited longer. Those that"
        " were refused at once are not in it.",
        "As the estimate said when they came.",
        "Far above the estimate: higher bands sent more meanwhile, or slots were lowered. The first band above a few"
        " seconds: see slots.",
        queries.ranked_p95(sidecar.QUEUE),
        detail="latency",
        ranked=True,
        height=10,
    ),
    Panel(
        "refused",
        "Rejections by reason",
        f"Requests per second that were refused, here or by an engine. {_REFUSED_FOR_LOAD}",
        "None; under overload team_limit and est_wait of those who send most.",
        "The runbook of VLLMGatewayRejecting has a way out for each reason. engine_busy means that the gateway lets"
        " more through than the engine's own limit takes: lower capacity.slots.",
        (queries.rate(gateway.REJECTED, ("reason",)),),
        Shape.STACK,
        detail="teams",
        optional="Empty while nobody was refused; a request with a wrong key would show here.",
    ),
)

_ROOM = (
    Panel(
        "tokens",
        "Tokens in flight",
        "Prompt and expected output of all requests that have a slot, in tokens. What a request of a team will put out"
        " is learnt from its earlier ones; what it may put out at most bounds it.",
        "Under capacity.tokens where that is set, and under what the KV caches of all engines hold.",
        "Near capacity.tokens with slots left: requests are long, and wait for tokens instead of slots. Nothing is"
        " wrong, but see their lengths.",
        (queries.now(gateway.TOKENS, (), "in flight"),),
        detail="kv-cache",
    ),
    Panel(
        "engine-queue",
        "Waiting in the engines, fullest engine",
        "Requests that the gateway let through and that an engine has not scheduled yet.",
        "At most capacity.waiting (default 5): a few, so that a free place is taken at once.",
        "Far more, with all slots open: lower capacity.slots to about --max-num-seqs, or see in the gateway's log"
        " whether it can read the engine's figures. Far more, with slots lowered: requests reach the engine past the"
        " gateway.",
        (queries.worst(vllm.NUM_REQUESTS_WAITING, ("instance",)),),
        detail="overview",
    ),
    Panel(
        "refused-by-team",
        "Rejections by team and reason",
        "The same refusals as above, by whose they were; __unknown__ are requests without a valid key.",
        "None for teams that keep to their limits.",
        "team_limit: the team's max_in_flight. The reasons that name model, prompt, output or context: what it asks for"
        " is not in its terms, and asking again does not help, except after prompt_over_limit, which lasts a minute.",
        queries.ranked_rate(gateway.REJECTED, ("team", "reason")),
        detail="teams",
        ranked=True,
        height=10,
        optional="Empty while nobody was refused; a request with a wrong key would show here.",
    ),
)

_UPSTREAMS = (
    Panel(
        "upstreams-up",
        "Healthy upstreams",
        "Whether the gateway takes an upstream for well: an engine by its health page and by whether it takes"
        " connections, others by requests.",
        "yes for every upstream.",
        "It gets no requests while another one serves the model. Up for Prometheus and not here is the network between"
        " the two, or a wrong address in the gateway's settings.",
        (queries.now(gateway.UPSTREAM_UP, ("upstream",)),),
        detail="fleet",
    ),
    Panel(
        "engine-states",
        "Engine states, with evidence",
        "State of each engine by the gateway, and the evidence: /metrics, its own requests, a probe.",
        "healthy or idle. scaling and draining are planned: the engine gets no requests meanwhile.",
        "suspect: out of rotation or about to leave it. hung: no progress for 30 s; follow VLLMEngineFrozen before you"
        " restart it, because a restart loses the stacks.",
        (queries.now(gateway.ENGINE_STATE, ("upstream", "state", "evidence")),),
        Shape.STACK,
        detail="fleet",
    ),
    Panel(
        "upstream-inflight",
        "In flight, by upstream",
        "Requests that an upstream has been sent and has not wholly answered.",
        "By the weights of the upstreams, as far as their answers are of one length.",
        "One rises while the others do not: it is slow, or stands still. Its own board says whether it makes tokens:"
        " see Fleet.",
        (queries.now(gateway.UPSTREAM_INFLIGHT, _UPSTREAM),),
        Shape.STACK,
        detail="fleet",
    ),
    Panel(
        "tries",
        "Attempts by result",
        "Tries per second at an upstream that ended, by result: ok, or the reason why not. A request that fell back"
        " counts at each upstream that it was sent to.",
        "Nearly all ok.",
        "client_hangup: people, or timeouts of theirs, that give up. engine_busy and bad_request: the engine did not"
        " take it. The rest has failed.",
        (queries.rate(gateway.ATTEMPTS, ("result",)),),
        Shape.STACK,
        detail="teams",
    ),
    Panel(
        "failed-tries",
        "Failed attempts by upstream and result",
        "Tries per second at an upstream that ended in an error or a timeout. Where the model has fallbacks, the client"
        " may have got its answer all the same: the record of such a request names them as tried.",
        "None.",
        "upstream_down: the engine is gone. Timeouts: it is slow or stands still. upstream_auth: its key file."
        " engine_error: its log.",
        (queries.rate(gateway.ATTEMPTS, (*_UPSTREAM, "result"), only=(FAILED_TRY,)),),
        detail="overview",
        optional="Empty while no try failed; stop an engine behind the gateway to see what it would show.",
    ),
    Panel(
        "unreadable",
        "Unreadable responses by route and reason",
        "Responses of upstreams that the gateway could not read. With usage and size the client got its answer and the"
        " token counts in the record are estimates; with the other reasons the attempt failed.",
        "Zero everywhere.",
        "redirect, content_type: the address leads to something other than an engine. encoding: a proxy compresses."
        " json, shape, empty: another program or release answers. See the runbook of VLLMResponsesUnreadable.",
        (queries.growth(gateway.UNREADABLE, by=("route", "reason")),),
        detail="overview",
        optional="Empty until the gateway has had a request; send one to see its route here.",
    ),
)

_VARIANTS = (
    Panel(
        "variant-share",
        "Share of attempts by variant",
        "What part of all tries each variant of the upstreams got: stable, or the canary.",
        "The weights in teams.yaml; under few requests it swings.",
        "A canary that gets nothing is down or takes no prompts of that size; one that gets all is alone: see whether"
        " the others are up.",
        (_of_all_tries(),),
        Shape.STACK,
    ),
    Panel(
        "variant-failed",
        "Failed attempts, share by variant",
        "Share of a variant's tries that ended in an error or a timeout, also where a fallback answered.",
        "Zero, and no more for the canary than for stable.",
        "Only the canary fails: take it out of teams.yaml, and send the gateway SIGHUP; the page on canaries says how."
        " All of them: see the engines.",
        (queries.share(gateway.ATTEMPTS, gateway.ATTEMPTS, ("variant",), part_only=(FAILED_TRY,)),),
        full_scale=False,
        detail="overview",
    ),
    Panel(
        "canary-steps",
        "Last act on a canary",
        "How long ago `vllm-watch canary` last started, raised, stopped or decided on the canary of each variant.",
        "promote, or a raise within the last days.",
        "roll_back: its share should be 0. undecided or interrupted: nobody decides on it now; see the runbook.",
        (
            Query(
                "time() -"
                f" {promql.current(sidecar.CANARY_TIME, ('variant', 'step'), queries.where(sidecar.CANARY_TIME))}",
                "Ago",
                shown_unit(Unit.SECONDS),
            ),
        ),
        Shape.TABLE,
        optional="Only with vllm-watch canary, whose events the sidecar reads.",
    ),
)

_ITSELF = (
    Panel(
        "ttft-overhead",
        "Gateway and network overhead on TTFT",
        "The client's time to first token less the engine's queue and its time from there to the first token, request"
        " by request: the wait for a slot here, the gateway's work, and the network. Unlike the gap between the p95 of"
        " either, this is a time that requests really waited.",
        "A few milliseconds while nobody waits here.",
        "As much as what waited in the gateway: requests are held back, see slots. More than that: see the loop lag"
        " beside this, then the network.",
        (queries.quantile(0.5, sidecar.TTFT_OVERHEAD, called="p50"), queries.p95(sidecar.TTFT_OVERHEAD, called="p95")),
        detail="latency",
        optional="Only where the engine reports its own times: start vLLM with --enable-per-request-metrics.",
    ),
    LOOP_LAG,
    LOG,
    Panel(
        "reloads",
        "Reloads of teams.yaml",
        "How often the gateway read teams.yaml again, on SIGHUP, and whether it could take it over.",
        "None failed.",
        "failed: the file has a mistake and the former terms stay in force; the gateway's log and vllm-watch gateway"
        " check name the place. It would not start with that file.",
        (queries.growth(gateway.RELOADS, RATE, ("result",)),),
    ),
    Panel(
        "leases",
        "Limits leased by the store",
        "Where several gateways share limits through a Valkey or Redis: gateways without a lease and with one, and how"
        " many different policies they have.",
        "None without a lease, and one policy.",
        "Without a lease: such a gateway admits within its fixed share; its log names the cause. Two policies: reload"
        " teams.yaml on every gateway.",
        (
            queries.now(gateway.LEASE_LOST, (), "without a lease"),
            queries.now(gateway.LEASE_REPLICAS, (), "with a lease"),
            queries.now(gateway.LEASE_POLICIES, (), "policies"),
        ),
        optional="Only with sharing.store in gateway.yaml.",
    ),
)

BOARD = Dashboard(
    slug="gateway",
    title="vLLM / Gateway",
    question="Which teams run, wait or are rejected, and why?",
    rows=(
        DashboardRow("", _TOP),
        DashboardRow("Capacity and rejections", _ROOM),
        DashboardRow("Upstreams", _UPSTREAMS),
        DashboardRow("Gateway process", _ITSELF),
        DashboardRow("Variants of upstreams", _VARIANTS, collapsed=True),
    ),
)
