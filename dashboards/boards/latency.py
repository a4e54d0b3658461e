"""Dashboard Latency: stages of a request and their time."""

from __future__ import annotations

from alerts import thresholds
from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import promql, sidecar, vllm
from exporters.catalogue.metric import Metric, Unit

_API = ("instance",)  # the API server's own series know no model
_TARGET = ("job", "instance")


_QS = (0.5, 0.95, 0.99)  # half, one in twenty and one in a hundred


def _spread(metric: Metric) -> tuple[Query, ...]:
    return tuple(queries.quantile(q, metric, called=f"p{100 * q:.0f}") for q in _QS)


def _of_engines(answer: str) -> str:
    """Other programs show series of HTTP under the same names: those of vLLM servers, and of the chosen models."""
    return promql.on_targets_of(answer, vllm.NUM_REQUESTS_RUNNING, queries.where(vllm.NUM_REQUESTS_RUNNING))


def _http_spread(metric: Metric) -> tuple[Query, ...]:
    unit = shown_unit(metric.unit)
    return tuple(
        Query(
            _of_engines(f"({promql.bounded_quantile(q, metric, RATE, _TARGET, queries.where(metric))})"),
            queries.legend((*_API, promql.BOUND), f"p{100 * q:.0f}"),
            unit,
        )
        for q in _QS
    )


def _http_mean(metric: Metric, by: tuple[str, ...]) -> Query:
    total, count = (
        f"sum by ({', '.join(by)}) ({_of_engines(question(metric, RATE, (*_TARGET, *by), queries.where(metric)))})"
        for question in (promql.amount, promql.events)
    )
    return Query(promql.per(total, count), queries.legend(by), shown_unit(metric.unit))


def _rest() -> Query:
    """Return the part of the mean latency outside the engine core. All three have one sample per finished request, so
    their means add up."""
    whole, queue, inference = (
        queries.mean(metric, by=()).expr
        for metric in (vllm.E2E_REQUEST_LATENCY, vllm.REQUEST_QUEUE_TIME, vllm.REQUEST_INFERENCE_TIME)
    )
    return Query(f"clamp_min({whole} - {queue} - {inference}, 0)", "front end", shown_unit(Unit.SECONDS))


def _apart(metric: Metric, called: str) -> Query:
    """A p95 by engine, of models whose engines differ in their bounds."""
    matchers, by = queries.where(metric), ("model_name", "instance")
    mixed = promql.mixed_bounds(metric, where=matchers)
    expr = f"({promql.bounded_quantile(queries.RESOLVED, metric, RATE, by, matchers)}) and on (model_name) {mixed}"
    return Query(expr, queries.legend((*by, promql.BOUND), called), shown_unit(metric.unit))


def _guessed(metric: Metric, called: str) -> Query:
    return Query(
        promql.unresolved(metric, RATE, where=queries.where(metric)),
        queries.legend(promql.BY, called),
        shown_unit(Unit.RATIO),
    )


TWO_SIDES = "Choosing an engine narrows the engine's line alone, choosing a team the other alone."
_LENGTHS = "The bounds end at max_model_len, so those of unlike models do not fit together: choose one model."

BOARD = Dashboard(
    slug="latency",
    title="vLLM / Latency",
    question="Where does the time of a request go?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "ttft-p95",
                    "Time to first token, p95",
                    "From arrival at the API server to the first token: front end, queue and prefill together. A"
                    " request that never gets a first token adds no sample, so a stalled engine looks quiet here.",
                    "Under the dashed line; for chat under 2 s, which lies between two of vLLM's bounds and so is read"
                    " less exactly than 2.5 s.",
                    "See by phase, on the right, whether the queue or the prefill grew: the queue asks for capacity or"
                    " admission limits, the prefill for shorter prompts or prefix caching.",
                    (queries.p95(vllm.TIME_TO_FIRST_TOKEN),),
                    threshold=thresholds.TTFT_P95,
                    detail="tuning-options",
                    width=6,
                ),
                Panel(
                    "itl-p95",
                    "Inter-token latency, p95",
                    "Gap between two outputs of a request, one sample per output: long replies weigh more, and with"
                    " speculative decoding one gap brings several tokens. Below 10 ms, vLLM's first bound, it says <"
                    " 10 ms.",
                    "Steady; 50 ms is twenty tokens a second, faster than anyone reads.",
                    "If it rises with requests running, the batch is too large for the GPU; if it rises with prompt"
                    " length, long prefills hold up the others: see chunked prefill on the Tuning options dashboard.",
                    (queries.p95(vllm.INTER_TOKEN_LATENCY),),
                    detail="tuning-options",
                    width=6,
                ),
                Panel(
                    "e2e-p95",
                    "End-to-end latency, p95",
                    "From arrival at the API server to the last token, finished requests only, without"
                    " cancelled or refused ones. It grows with the length of the reply; below vLLM's first bound of"
                    " 0.3 s it says < 300 ms.",
                    "Level as long as replies stay as long as they were.",
                    "Compare with reply length below before blaming the engine; then see which phase grew.",
                    (queries.p95(vllm.E2E_REQUEST_LATENCY),),
                    width=6,
                ),
                Panel(
                    "time-by-phase",
                    "Mean time of a request, by phase",
                    "Means over all selected models, which add up where percentiles would not. Front end is what the"
                    " engine core does not know: tokenising, detokenising and the way between processes.",
                    "Decode is the largest part by far, queue and front end are thin.",
                    "Queue: add capacity or admit less. Prefill: shorten prompts or reuse prefixes. Decode: see"
                    " inter-token latency and reply length. Front end: look at the CPU of the API server.",
                    (
                        queries.mean(vllm.REQUEST_QUEUE_TIME, by=(), called="queue"),
                        queries.mean(vllm.REQUEST_PREFILL_TIME, by=(), called="prefill"),
                        queries.mean(vllm.REQUEST_DECODE_TIME, by=(), called="decode"),
                        _rest(),
                    ),
                    Shape.STACK,
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Phases in the engine",
            (
                Panel(
                    "queue-time",
                    "Queue time, p50 p95 p99",
                    "From arrival in the engine to the first scheduling; waiting again after a preemption counts as"
                    " inference. Below 0.3 s, vLLM's first bound, a line says < 300 ms.",
                    "Near zero; the dashed line is meant for p95.",
                    "The engine is full: if the KV cache is too, shorten contexts or add memory; if not, raise"
                    " max_num_seqs, admit less or add a replica.",
                    _spread(vllm.REQUEST_QUEUE_TIME),
                    threshold=thresholds.QUEUE_TIME_P95,
                    detail="kv-cache",
                    width=6,
                ),
                Panel(
                    "prefill-time",
                    "Prefill time, p50 p95 p99",
                    "From the first scheduling to the first token. Most prefills are shorter than vLLM's first bound of"
                    " 0.3 s: a true 90 ms was read three times too high, and finer bounds need"
                    " --custom-histogram-buckets.",
                    "Follows prompt length; the mean by phase is exact where these lines are not.",
                    "Compare with prompt length and with computed tokens on the KV cache board: long prompts and lost"
                    " cache hits look the same here.",
                    _spread(vllm.REQUEST_PREFILL_TIME),
                    detail="kv-cache",
                    width=6,
                ),
                Panel(
                    "decode-time",
                    "Decode time, p50 p95 p99",
                    "From the first to the last token, so it is reply length times the pace of decoding. Below 0.3 s,"
                    " vLLM's first bound, a line says < 300 ms.",
                    "Moves with reply length and with nothing else.",
                    "If replies did not get longer, decoding got slower: see inter-token latency and preemptions.",
                    _spread(vllm.REQUEST_DECODE_TIME),
                    detail="tuning-options",
                    width=6,
                ),
                Panel(
                    "inference-time",
                    "Inference time, p50 p95 p99",
                    "Prefill and decode of one request together; waiting after a preemption is in it. Below 0.3 s,"
                    " vLLM's first bound, a line says < 300 ms.",
                    "Close to decode time.",
                    "Far above decode time, prefill is the larger half; rising without longer replies, look for"
                    " preemptions.",
                    _spread(vllm.REQUEST_INFERENCE_TIME),
                    detail="kv-cache",
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Distributions",
            (
                Panel(
                    "ttft-heatmap",
                    "Time to first token, distribution",
                    "How many first tokens came in each bucket, all selected models together.",
                    "One band that stays where it is.",
                    "Two bands are two kinds of requests, such as hits and misses of the prefix cache: choose one"
                    " model, then see the KV cache board.",
                    (queries.heat(vllm.TIME_TO_FIRST_TOKEN),),
                    Shape.HEATMAP,
                    detail="kv-cache",
                    width=6,
                ),
                Panel(
                    "itl-heatmap",
                    "Inter-token latency, distribution",
                    "How many outputs came in each bucket; the lowest bucket holds everything faster than 10 ms.",
                    "One band near the bottom.",
                    "A second, thin band far above is the sign of steps that carried somebody's long prefill: see"
                    " chunked prefill on the Tuning options dashboard.",
                    (queries.heat(vllm.INTER_TOKEN_LATENCY),),
                    Shape.HEATMAP,
                    detail="tuning-options",
                    width=6,
                ),
                Panel(
                    "e2e-heatmap",
                    "End-to-end latency, distribution",
                    "How many requests ended in each bucket; the lowest bucket holds everything faster than 0.3 s.",
                    "The shape of reply lengths, drawn out in time.",
                    "If its upper edge climbs and that of reply lengths does not, requests wait: see queue time.",
                    (queries.heat(vllm.E2E_REQUEST_LATENCY),),
                    Shape.HEATMAP,
                    width=6,
                ),
                Panel(
                    "queue-heatmap",
                    "Queue time, distribution",
                    "How long requests waited, in buckets; the lowest holds everything under 0.3 s.",
                    "All in the lowest bucket.",
                    "Anything above it waited: a few in bursts are a matter of admission, many all the time are a"
                    " matter of capacity.",
                    (queries.heat(vllm.REQUEST_QUEUE_TIME),),
                    Shape.HEATMAP,
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Client and engine compared",
            (
                Panel(
                    "client-ttft",
                    "Time to first token, client and engine, p95",
                    "The client's line holds the gateway's queue and the network too, and streams only. The gap"
                    " between the lines is not the p95 of what lies between: each line has its own slowest requests."
                    f" {TWO_SIDES}",
                    "The lines run close together.",
                    "If only the client's line rises, look in front of the engine: gateway queue, here on the right,"
                    " then the network.",
                    (
                        queries.p95(sidecar.TTFT, called="client"),
                        queries.p95(vllm.TIME_TO_FIRST_TOKEN, called="engine"),
                    ),
                    detail="teams",
                    width=6,
                ),
                Panel(
                    "client-tpot",
                    "Time per output token, client and engine, p95",
                    "One mean per request on either side. The engine counts 0 for a reply of one token, which pulls"
                    " its line down; below 10 ms it says < 10 ms. Not to be subtracted: the slowest twentieth of one"
                    f" line is not that of the other. {TWO_SIDES}",
                    "The lines run close together; the client's a little higher.",
                    "A client's line far above means tokens that wait on the way: a busy gateway, a slow reader, or a"
                    " busy API server.",
                    (
                        queries.p95(sidecar.TPOT, called="client"),
                        queries.p95(vllm.REQUEST_TIME_PER_OUTPUT_TOKEN, called="engine"),
                    ),
                    detail="teams",
                    width=6,
                    optional=(
                        "The engine shows this since vLLM 0.11; for the client's line run the gateway and the sidecar."
                    ),
                ),
                Panel(
                    "client-e2e",
                    "End-to-end latency, client and engine, p95",
                    "The client's line counts every request that ended, failed ones too; the engine's only those that"
                    " finished, so their difference is no latency of its own. Below 0.3 s the client's is the finer"
                    f" one. {TWO_SIDES}",
                    "The lines run close together.",
                    "If only the client's line rises, see gateway queue; if it falls below the engine's, requests are"
                    " refused or fail early: see the Teams board.",
                    (queries.p95(sidecar.E2E, called="client"), queries.p95(vllm.E2E_REQUEST_LATENCY, called="engine")),
                    detail="teams",
                    width=6,
                ),
                Panel(
                    "client-queue",
                    "Queue time, gateway and engine, p95",
                    "A request waits twice: in the gateway until it may go on, in the engine until it is scheduled. The"
                    " two p95 do not add up to a p95. The engine's answer per request needs"
                    " --enable-per-request-metrics.",
                    "Both near zero; under load the gateway waits, and the engine does not.",
                    "Wait in the engine while the gateway's is zero: lower the gateway's limit. Wait in the gateway"
                    " alone: add capacity.",
                    (
                        queries.p95(sidecar.QUEUE, called="gateway"),
                        queries.p95(vllm.REQUEST_QUEUE_TIME, called="engine"),
                        queries.p95(sidecar.ENGINE_QUEUE, called="engine, as reported to the client"),
                    ),
                    threshold=thresholds.QUEUE_TIME_P95,
                    detail="teams",
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Lengths and steps",
            (
                Panel(
                    "prompt-length",
                    "Prompt length, p50 p95 p99",
                    "Tokens in the prompts of finished requests. The bounds go 1, 2, 5, 10 and so on; between 1000 and"
                    " 2000 it is a straight line.",
                    "As your applications mean it to be.",
                    "A jump moves prefill time and time to first token: ask who changed a template, then see whether"
                    " the cache holds the new prefix.",
                    _spread(vllm.REQUEST_PROMPT_TOKENS),
                    detail="kv-cache",
                    width=6,
                ),
                Panel(
                    "reply-length",
                    "Reply length, p50 p95 p99",
                    "Tokens in each finished reply; a request that asks for n replies adds n samples here and in all of"
                    " the engine's latencies.",
                    "Well below the limit that clients ask for: see max_tokens further down.",
                    "Longer replies lengthen everything after the first token, and hold their KV blocks for as long:"
                    " cap max_tokens.",
                    _spread(vllm.REQUEST_GENERATION_TOKENS),
                    detail="tuning-options",
                    width=6,
                ),
                Panel(
                    "tokens-per-step",
                    "Tokens per step, mean",
                    "Tokens that one step of the engine works on, prefill and decode together: about one per running"
                    " request while everyone decodes, and far more when prompts come in. Not comparable between 0.20,"
                    " which counts cached prompt tokens, and 0.32.",
                    "Above the number of running requests, below max_num_batched_tokens.",
                    "At the limit for long, prefill crowds out decode: see chunked prefill on the Tuning options"
                    " dashboard.",
                    (queries.mean(vllm.ITERATION_TOKENS, by=promql.EACH),),
                    detail="tuning-options",
                    width=6,
                ),
                Panel(
                    "steps",
                    "Steps per second",
                    "How often the engine steps, one line per engine. While it is busy, one over this figure is the"
                    " length of a step and so the pace of decoding; an idle engine does not step.",
                    "Steady under load; each step serves all running requests.",
                    "Fewer steps at the same batch are slower steps: see tokens per step, then the GPU's clocks.",
                    (queries.events(vllm.ITERATION_TOKENS, promql.EACH),),
                    detail="gpu",
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Request parameters",
            (
                Panel(
                    "max-tokens",
                    "max_tokens requested and reply length, p95",
                    "The limit that finished requests carried beside what was really generated. vLLM promises no memory"
                    " for the limit; a gateway that admits by it does.",
                    "Asked and generated lie within a factor of two.",
                    "Far apart, admission by estimate turns work away for nothing; equal, replies are being cut: see"
                    " finish reasons on the Tuning options dashboard.",
                    (
                        queries.p95(vllm.REQUEST_PARAMS_MAX_TOKENS, called="asked"),
                        queries.p95(vllm.REQUEST_GENERATION_TOKENS, called="generated"),
                    ),
                    detail="tuning-options",
                ),
                Panel(
                    "longest-reply",
                    "Longest reply of a request, p50 p95 p99",
                    "The longest among the n replies of one request: generated, not asked for. The client waits for it,"
                    " however short the others are.",
                    "Equal to reply length where nobody asks for more than one reply.",
                    "Where it is above reply length, requests ask for several replies: see n beside it.",
                    _spread(vllm.REQUEST_MAX_NUM_GENERATION_TOKENS),
                ),
                Panel(
                    "replies-per-request",
                    "Replies requested per request, mean",
                    "The mean n. Each reply takes a place in the batch and KV blocks of its own beyond the shared"
                    " prompt.",
                    "1.",
                    "Above 1, multiply when you size max_num_seqs; find the client on the Teams board.",
                    (queries.mean(vllm.REQUEST_PARAMS_N),),
                    detail="teams",
                ),
                Panel(
                    "prompt-heatmap",
                    "Prompt length, distribution",
                    f"How many finished requests had prompts of each length. {_LENGTHS}",
                    "The bands of your applications, each where it belongs.",
                    "A new band is a new kind of traffic; if it is far longer than the rest, serve it from engines of"
                    " its own.",
                    (queries.heat(vllm.REQUEST_PROMPT_TOKENS),),
                    Shape.HEATMAP,
                    width=12,
                ),
                Panel(
                    "reply-heatmap",
                    "Reply length, distribution",
                    f"How many finished requests had replies of each length. {_LENGTHS}",
                    "Most replies end well below the highest bucket in use.",
                    "A band at a round number is a limit that cuts replies off: see finish reasons on the Tuning"
                    " options dashboard.",
                    (queries.heat(vllm.REQUEST_GENERATION_TOKENS),),
                    Shape.HEATMAP,
                    detail="tuning-options",
                    width=12,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Resolution and consistency",
            (
                Panel(
                    "below-first-bound",
                    "Share below the first bound",
                    "Share of samples in the lowest bucket of each histogram. Where it is above 95 %, all that is known"
                    " of the p95 is that it lies below the first bound: vLLM's default is 1 ms, 10 ms or 0.3 s.",
                    "Under 50 %, so that the median is measured as well; for queue time 100 % is good news, nobody"
                    " waits.",
                    "Read means instead, which are exact, or start vLLM with finer --custom-histogram-buckets.",
                    (
                        _guessed(vllm.TIME_TO_FIRST_TOKEN, "first token"),
                        _guessed(vllm.INTER_TOKEN_LATENCY, "inter-token"),
                        _guessed(vllm.E2E_REQUEST_LATENCY, "end to end"),
                        _guessed(vllm.REQUEST_QUEUE_TIME, "queue"),
                        _guessed(vllm.REQUEST_PREFILL_TIME, "prefill"),
                        _guessed(vllm.REQUEST_DECODE_TIME, "decode"),
                    ),
                ),
                Panel(
                    "mixed-bounds",
                    "Engines with different bounds, p95",
                    "Engines of one model can be summed only at the bounds that all of them have, which is what every"
                    " other panel does; by engine the p95 is as fine as its own bounds. Only models with such engines"
                    " are shown.",
                    "Nothing: all engines of a model have the same bounds.",
                    "Start all of them with the same --custom-histogram-buckets; the runbook shows which differ.",
                    (
                        _apart(vllm.TIME_TO_FIRST_TOKEN, "first token"),
                        _apart(vllm.INTER_TOKEN_LATENCY, "inter-token"),
                        _apart(vllm.E2E_REQUEST_LATENCY, "end to end"),
                    ),
                    optional=(
                        "All engines of each model have the same bucket bounds. Start one with other"
                        " --custom-histogram-buckets to see it here."
                    ),
                ),
                Panel(
                    "first-token-by-part",
                    "Time to first token by part, means",
                    "What a client's first token waits for. The parts come from different sets of requests: the"
                    " client's line from streams, the gateway's from all, the engine's from finished ones; with like"
                    " traffic the three parts nearly add up to the client's line.",
                    "The three parts together come close to the client's line.",
                    "A rest that stays is the network, the front end or a busy gateway: see its event loop on the"
                    " Monitoring health dashboard.",
                    (
                        queries.mean(sidecar.TTFT, by=(), called="client: first token"),
                        queries.mean(sidecar.QUEUE, by=(), called="gateway: queue"),
                        queries.mean(vllm.REQUEST_QUEUE_TIME, by=(), called="engine: queue"),
                        queries.mean(vllm.REQUEST_PREFILL_TIME, by=(), called="engine: prefill"),
                    ),
                    detail="monitoring-health",
                ),
                Panel(
                    "requests-by-phase",
                    "Concurrent requests by phase",
                    "Seconds spent in a phase per second, which is how many requests were in it on average (Little's"
                    " law). A request is counted when it ends, so in short windows a long one comes late and all at"
                    " once.",
                    "Decode is the largest part; queue is none.",
                    "Queue above zero for long: the engine is full. Prefill as large as decode: prompts are the load.",
                    (
                        queries.amount(vllm.REQUEST_QUEUE_TIME, (), "queue"),
                        queries.amount(vllm.REQUEST_PREFILL_TIME, (), "prefill"),
                        queries.amount(vllm.REQUEST_DECODE_TIME, (), "decode"),
                    ),
                    Shape.STACK,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "HTTP",
            (
                Panel(
                    "http-duration",
                    "HTTP duration, p50 p95 p99",
                    "Time to answer an HTTP request of any kind, by API server, model listings and refusals included;"
                    " health checks and scrapes are not. The bounds go from 10 ms to 60 s, so above a minute it reads"
                    " 60 s.",
                    "Close to end-to-end latency where most requests generate.",
                    "Far below it, many requests are answered without work: see status classes on the Teams board.",
                    _http_spread(vllm.HTTP_REQUEST_DURATION_HIGHR),
                    detail="teams",
                ),
                Panel(
                    "http-by-handler",
                    "HTTP duration by handler, mean",
                    "Mean time to answer, by route; the bounds of this histogram (0.1, 0.5 and 1 s) are too coarse for"
                    " percentiles.",
                    "Routes that generate take as long as their replies; all others a few milliseconds.",
                    "A slow route that does not generate means a busy API server: see its CPU on the Fleet board.",
                    (_http_mean(vllm.HTTP_REQUEST_DURATION, ("handler", "method")),),
                    detail="fleet",
                ),
                Panel(
                    "client-by-route",
                    "Request duration by route, p95, as clients see it",
                    "Successful requests by API route and model, from acceptance in the gateway to their end. There are"
                    " eight bounds, from 0.5 s to 4 min, so values between them are estimates.",
                    "Routes that generate take as long as their replies; embeddings and the like far less.",
                    "One route alone rises: see which team uses it, on the Teams board. All rise: see queue time.",
                    queries.ranked_coarse_p95(sidecar.ROUTE_E2E, ("model_name", "route")),
                    detail="teams",
                    width=24,
                    ranked=True,
                ),
                Panel(
                    "websockets",
                    "WebSocket connections",
                    "Open connections of realtime routes, by API server.",
                    "Follows the number of clients.",
                    "One that only grows is clients that do not close: look at how long connections last.",
                    (queries.now(vllm.WEBSOCKET_CONNECTIONS_ACTIVE, by=_API),),
                    width=4,
                    optional="No realtime route is served: serve a model that has one, on vLLM 0.18 or later.",
                ),
                Panel(
                    "websocket-duration",
                    "WebSocket duration, p95",
                    "How long closed connections had lasted; open ones leave no sample.",
                    "As long as a conversation takes.",
                    "Very short ones are clients that fail and come back: look at the API server's log.",
                    (queries.p95(vllm.WEBSOCKET_CONNECTION_DURATION, _API),),
                    width=4,
                    optional="No realtime route is served: serve a model that has one, on vLLM 0.18 or later.",
                ),
            ),
            collapsed=True,
        ),
    ),
)
