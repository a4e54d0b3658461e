"""Dashboard Fleet: many engines side by side, worst first.

Invariant: one line or row for each engine and model; what a mean over engines would hide is what this board is for. An
engine
is a target: two clusters or jobs may have the same address. Where nobody adds the label cluster, nothing stands in its
place."""

from __future__ import annotations

from collections.abc import Sequence

from alerts import engine, thresholds
from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import gateway, promql, sidecar, vllm
from exporters.catalogue.metric import Unit
from exporters.catalogue.prometheus import PROCESS_START

_TARGET = ("cluster", "job", "instance")
_ON = ", ".join(_TARGET)
_BY = (*_TARGET, "model_name")
_RANK = (*_TARGET, "engine")
_RANGE = "$__range"
_HERE = queries.where(vllm.NUM_REQUESTS_RUNNING)
_ALL_OF_A_MODEL = tuple(matcher for matcher in _HERE if not matcher.startswith(("job", "instance")))
_COUNT = shown_unit(Unit.COUNT)


def _titled(title: str, query: Query) -> Query:
    """A column of a table."""
    return Query(query.expr, title, query.unit)


def _seen(by: Sequence[str]) -> str:
    """1 for every engine that was there at any time of the shown range, also when it does not answer now."""
    return f"group by ({', '.join(by)}) ({promql.last_samples(vllm.NUM_REQUESTS_RUNNING, _RANGE, _HERE)})"


def _frozen(by: tuple[str, ...] = _BY) -> str:
    """1 for an engine that had work all the time and made nothing of it, as VLLMEngineFrozen asks; 0 for every other
    one that answers."""
    here = promql.current(vllm.NUM_REQUESTS_RUNNING, by, _HERE)
    return f"(({engine.frozen(engine.FROZEN_FOR, by, _HERE)}) * 0 + 1 or {here} * 0)"


def _starts() -> str:
    """Return how often each engine's process started again within the range.

    By its start time; with several API server processes or data parallelism vLLM leaves that out, and then by counters
    that began at 0 again, which miss a start before the first token. A start time of no engine is left out."""
    by_time = promql.changes(PROCESS_START, _RANGE, _TARGET, queries.where(PROCESS_START))
    by_counter = promql.resets(vllm.GENERATION_TOKENS, _RANGE, _TARGET, queries.where(vllm.GENERATION_TOKENS))
    return f"({by_time} and on ({_ON}) {_seen(_TARGET)} or {by_counter})"


def _restarts() -> str:
    """Return the restarts for every engine and model, so that it fits into a table of them."""
    return f"{_seen(_BY)} * on ({_ON}) group_left () {_starts()}"


def _age() -> str:
    """Seconds since each engine's process started."""
    started = promql.series(PROCESS_START, queries.where(PROCESS_START))
    return f"max by ({_ON}) (time() - {started} and on ({_ON}) {promql.series(vllm.NUM_REQUESTS_RUNNING, _HERE)})"


def _asleep() -> str:
    """1 while an engine sleeps, in whatever depth."""
    return promql.worst(
        vllm.ENGINE_SLEEP_STATE, _TARGET, queries.where(vllm.ENGINE_SLEEP_STATE, 'sleep_state!="awake"')
    )


def _versions() -> Query:
    said = promql.series(sidecar.ENGINE_INFO, queries.where(sidecar.ENGINE_INFO))
    return Query(f"count by (upstream, version, cache_dtype, enable_prefix_caching) ({said})", "Said by", _COUNT)


def _of_its_model(part: str, whole: str) -> Query:
    """An engine's part in what all engines of its model do: the whole is that of all, also when one of them is
    chosen."""
    return Query(f"{part} / on (model_name) group_left () ({whole} > 0)", queries.legend(_BY), shown_unit(Unit.RATIO))


BOARD = Dashboard(
    slug="fleet",
    title="vLLM / Fleet",
    question="Which engine is in the worst state?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "engines",
                    "Engines up and seen",
                    "up answered the last scrape; seen were there at some time of the shown range.",
                    "Both are equal, and as many as you meant to run.",
                    "Fewer up than seen: an engine went away. Open the runbook of the alert, or look for its row in the"
                    " table below.",
                    (
                        Query(
                            f"count(group by ({_ON}) ({promql.series(vllm.NUM_REQUESTS_RUNNING, _HERE)})) or"
                            f" count({_seen(_TARGET)}) * 0",
                            "up",
                            _COUNT,
                        ),
                        Query(f"count({_seen(_TARGET)})", "seen", _COUNT),
                    ),
                    Shape.NUMBER,
                    detail="monitoring-health",
                    height=4,
                ),
                Panel(
                    "engines-frozen",
                    "Engines hung",
                    "Engines that answer their scrape, had requests running or waiting for three minutes, and made no"
                    " token of prompt or answer in them.",
                    "Zero.",
                    "Find the engine in the table, take it out of routing, keep its log and a stack dump, and"
                    " restart it.",
                    (Query(f"sum({_frozen()})", "frozen", _COUNT),),
                    Shape.NUMBER,
                    detail="latency",
                    height=4,
                    bad_from=1,
                ),
                Panel(
                    "restarts",
                    "Restarts in this range",
                    "How often an engine's process started again within the shown range, all engines together: by its"
                    " start time, and where an engine hides that, by counters that began at 0 again.",
                    "Zero, or as often as you deployed.",
                    "See the table for which engine; its log ends with the reason, and out of memory is the usual one.",
                    (Query(f"sum{_starts()}", "restarts", _COUNT),),
                    Shape.NUMBER,
                    detail="tuning",
                    height=4,
                    bad_from=1,
                ),
                Panel(
                    "worst-first",
                    "Engines, fullest first",
                    "One row for each engine and model, as of now, fullest KV cache first; click a heading to sort by"
                    " another figure. frozen is 1 for an engine that has work and makes nothing of it. An empty cell"
                    " means that nothing of the kind happened lately.",
                    "Rows that look alike.",
                    "One row that stands out is a bad engine or uneven routing; all rows bad is load: see the Overview."
                    " A row without figures is an engine that is gone.",
                    (
                        _titled("KV use", queries.worst(vllm.KV_CACHE_USAGE, _BY)),
                        _titled("Waiting", queries.now(vllm.NUM_REQUESTS_WAITING, _BY)),
                        _titled("Running", queries.now(vllm.NUM_REQUESTS_RUNNING, _BY)),
                        _titled("Queue time p95", queries.resolved(0.95, vllm.REQUEST_QUEUE_TIME, _BY)),
                        _titled("TTFT p95", queries.resolved(0.95, vllm.TIME_TO_FIRST_TOKEN, _BY)),
                        _titled("Inter-token p95", queries.resolved(0.95, vllm.INTER_TOKEN_LATENCY, _BY)),
                        _titled("Generated", queries.rate(vllm.GENERATION_TOKENS, _BY)),
                        _titled("Preemptions", queries.rate(vllm.NUM_PREEMPTIONS, _BY)),
                        Query(_frozen(), "Frozen", _COUNT),
                        Query(_restarts(), "Restarts", _COUNT),
                    ),
                    Shape.TABLE,
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="kv-cache",
                    width=24,
                    height=9,
                ),
            ),
        ),
        DashboardRow(
            "Engines compared",
            (
                Panel(
                    "kv-cache-usage",
                    "KV cache use, by engine",
                    "Share of KV-cache blocks in use on each engine.",
                    "Engines of a model lie close together, under 90 %.",
                    "One far above the rest holds long contexts or gets too many requests: compare its share of the"
                    " work below.",
                    (queries.worst(vllm.KV_CACHE_USAGE, _BY),),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="kv-cache",
                ),
                Panel(
                    "waiting",
                    "Requests waiting, by engine",
                    "Requests that an engine has accepted and not yet scheduled.",
                    "Zero everywhere, for most of the time.",
                    "Waiting on one engine while another has room is routing; waiting on all is load.",
                    (queries.now(vllm.NUM_REQUESTS_WAITING, _BY),),
                    threshold=thresholds.QUEUE_LENGTH,
                    detail="latency",
                ),
                Panel(
                    "queue-time-p95",
                    "Queue time, p95, by engine",
                    "Waiting in the engine until first scheduled. vLLM's first bound is 0.3 s: below it the panel says"
                    " < 300 ms.",
                    "Near zero on every engine.",
                    "One engine above the line: send it less, or look for what blocks it. All of them: add a replica.",
                    (queries.p95(vllm.REQUEST_QUEUE_TIME, _BY),),
                    threshold=thresholds.QUEUE_TIME_P95,
                    detail="latency",
                ),
                Panel(
                    "ttft-p95",
                    "Time to first token, p95, by engine",
                    "From a request's arrival at an engine to its first token. A request that never gets one adds no"
                    " sample, so a frozen engine is quiet here.",
                    "Engines of a model lie close together.",
                    "If queue time is equal and this is not, prompts differ or the engine computes slowly: see its"
                    " GPU.",
                    (queries.p95(vllm.TIME_TO_FIRST_TOKEN, _BY),),
                    threshold=thresholds.TTFT_P95,
                    detail="latency",
                ),
                Panel(
                    "inter-token-latency",
                    "Inter-token latency, p95, by engine",
                    "Gap between two outputs of a running request on each engine.",
                    "Engines of a model on the same hardware lie close together.",
                    "One slower engine at an equal batch means hardware: clocks, temperature, a neighbour on the same"
                    " GPU.",
                    (queries.p95(vllm.INTER_TOKEN_LATENCY, _BY),),
                    detail="gpu",
                ),
                Panel(
                    "preemptions",
                    "Preemptions, by engine",
                    "Running requests per second that lost their blocks and are computed again.",
                    "Zero.",
                    "The cache of this engine was promised twice: shorten contexts, lower max_num_seqs, or give it more"
                    " memory.",
                    (queries.rate(vllm.NUM_PREEMPTIONS, _BY),),
                    threshold=thresholds.PREEMPTIONS,
                    detail="kv-cache",
                ),
                Panel(
                    "frozen",
                    "Engines hung, by engine",
                    "1 for an engine that had requests running or waiting in every scrape of three minutes and finished"
                    " no prefill and made no token in them.",
                    "0 for every engine, busy or idle.",
                    "Take it out of routing, keep its log and a stack dump, then restart it. A single prefill of more"
                    " than three minutes, with nothing beside it, looks the same: check the prompt length first.",
                    (Query(_frozen(), queries.legend(_BY), _COUNT),),
                    detail="latency",
                ),
                Panel(
                    "engine-states",
                    "Engine states, with evidence",
                    "State of each engine and the evidence for it. gateway: by /metrics, its own requests and a probe."
                    " sidecar: by /metrics alone.",
                    "healthy or idle. scaling and draining are planned; slow (kv_fetch) waits for a prefill engine.",
                    "hung: follow VLLMEngineFrozen, and save the stacks before a restart. suspect may end by itself.",
                    tuple(
                        queries.now(metric, ("address", "state", "evidence"), observer)
                        for metric, observer in ((gateway.ENGINE_STATE, "gateway"), (sidecar.ENGINE_STATE, "sidecar"))
                    ),
                    Shape.STACK,
                    detail="gateway",
                    optional=(
                        "Neither a gateway nor a sidecar watches the engines; the panel beside it has what /metrics"
                        " alone shows."
                    ),
                ),
                Panel(
                    "generation-throughput",
                    "Generation throughput, by engine",
                    "Tokens generated per second by each engine.",
                    "Engines of a model lie close together.",
                    "Less on one engine with as many requests running means slower steps there; with fewer, it gets"
                    " less work.",
                    (queries.rate(vllm.GENERATION_TOKENS, _BY),),
                    detail="latency",
                ),
                Panel(
                    "balance-running",
                    "Balance: share of running requests",
                    "Each engine's part in the requests that run for its model on all engines, chosen or not.",
                    "All engines of a model near the same share; with four of them a quarter each.",
                    "An engine without its share is slow to accept or left out by the router; one with more than its"
                    " share collects the long requests.",
                    (
                        _of_its_model(
                            promql.current(vllm.NUM_REQUESTS_RUNNING, _BY, _HERE),
                            promql.current(vllm.NUM_REQUESTS_RUNNING, where=_ALL_OF_A_MODEL),
                        ),
                    ),
                    detail="teams",
                ),
                Panel(
                    "balance-tokens",
                    "Balance: share of generated tokens",
                    "Each engine's part in the tokens that are generated for its model on all engines, chosen or not.",
                    "Close to its share of running requests.",
                    "Many requests and few tokens: this engine is slow. Few requests and few tokens: it is not given"
                    " work.",
                    (
                        _of_its_model(
                            promql.per_second(vllm.GENERATION_TOKENS, RATE, _BY, _HERE),
                            promql.per_second(vllm.GENERATION_TOKENS, RATE, where=_ALL_OF_A_MODEL),
                        ),
                    ),
                    detail="teams",
                ),
                Panel(
                    "cache-hit-ratio",
                    "Prefix cache hit ratio, by engine",
                    "Share of looked-up prompt tokens that each engine found in its own prefix cache.",
                    "Engines of a model lie close together, unless routing keeps a conversation on one engine on"
                    " purpose.",
                    "Low on all of them at many replicas: requests of one conversation land on different engines. Route"
                    " by prefix or by session.",
                    (queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, _BY),),
                    detail="kv-cache",
                ),
            ),
        ),
        DashboardRow(
            "Versions and settings",
            (
                Panel(
                    "up-since",
                    "Uptime and sleep state",
                    "Time since each engine's process started, and whether it sleeps: weights offloaded or thrown away"
                    " until it is woken.",
                    "Long, and equal where engines were deployed together. Asleep only where you sent it to sleep.",
                    "The shortest time is the engine that restarted last: its log has the reason. One that sleeps"
                    " answers its scrape and serves nobody.",
                    (Query(_age(), "Up for", shown_unit(Unit.SECONDS)), Query(_asleep(), "Asleep", _COUNT)),
                    Shape.TABLE,
                    detail="tuning",
                    width=12,
                    lowest_first=True,
                    optional=(
                        "No engine shows when it started or whether it sleeps: vLLM leaves the first out with several"
                        " API server processes, the second before 0.11.1. Start one API server process, or upgrade."
                    ),
                ),
                Panel(
                    "versions",
                    "Versions and cache settings",
                    "What each engine says about itself, read by the sidecar; the figure counts the sidecars that"
                    " say so.",
                    "One version and one set of cache settings for each model, except while you roll out.",
                    "Two versions side by side differ in speed and in series: finish the rollout, or read the figures"
                    " by engine.",
                    (_versions(),),
                    Shape.TABLE,
                    detail="tuning",
                    width=12,
                ),
            ),
        ),
        DashboardRow(
            "Data-parallel ranks",
            (
                Panel(
                    "rank-running",
                    "Requests running, by rank",
                    "An address with data parallelism holds several engines; the label engine is the rank. With one"
                    " rank this repeats the figures above.",
                    "All ranks of an engine near the same number.",
                    "One rank with more than the rest: the balancer inside vLLM counts requests and not tokens, so long"
                    " ones pile up.",
                    (queries.now(vllm.NUM_REQUESTS_RUNNING, _RANK),),
                    detail="latency",
                ),
                Panel(
                    "rank-waiting",
                    "Requests waiting, by rank",
                    "Requests that a rank has accepted and not yet scheduled.",
                    "Zero on every rank.",
                    "Waiting on one rank alone is imbalance; every step of a mixture-of-experts model waits for the"
                    " slowest rank.",
                    (queries.now(vllm.NUM_REQUESTS_WAITING, _RANK),),
                    detail="latency",
                ),
                Panel(
                    "rank-kv",
                    "KV cache use, by rank",
                    "Share of KV-cache blocks in use on each rank.",
                    "All ranks close together, under 90 %.",
                    "A full rank preempts while others have room: see running requests by rank.",
                    (queries.worst(vllm.KV_CACHE_USAGE, _RANK),),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="kv-cache",
                ),
                Panel(
                    "rank-tokens",
                    "Generation throughput, by rank",
                    "Tokens generated per second by each rank.",
                    "All ranks close together.",
                    "A rank far below the rest at an equal batch is slow hardware.",
                    (queries.rate(vllm.GENERATION_TOKENS, _RANK),),
                    detail="gpu",
                ),
                Panel(
                    "rank-preemptions",
                    "Preemptions, by rank",
                    "Running requests per second that lost their blocks on this rank and are computed again.",
                    "Zero.",
                    "See KV cache use by rank: the cache of this rank was promised twice.",
                    (queries.rate(vllm.NUM_PREEMPTIONS, _RANK),),
                    detail="kv-cache",
                ),
                Panel(
                    "rank-frozen",
                    "Engines hung, by rank",
                    "1 for a rank that had work for three minutes and made no token of prompt or answer. A rank can"
                    " hang while its address still answers.",
                    "0 for every rank.",
                    "All ranks of the address restart together: take the address out of routing first.",
                    (Query(_frozen(_RANK), queries.legend(_RANK), _COUNT),),
                    detail="latency",
                ),
            ),
            collapsed=True,
        ),
    ),
)
