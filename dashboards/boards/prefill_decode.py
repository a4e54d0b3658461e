"""Dashboard Prefill/decode: disaggregated serving, where a prefill engine computes the prompt and a decode engine
generates the output.

The label `role` of a target distinguishes the two. No engine knows the whole time to first token: it is the sum of five
means, three of the prefill engine and two of the decode engine. Quantiles of two engines do not add."""

from __future__ import annotations

from alerts import thresholds
from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import promql, sidecar, vllm
from exporters.catalogue.metric import EngineRole, Metric, Unit

_PREFILL, _DECODE = ((promql.of_role(role),) for role in EngineRole)
_BY_ROLE = ("model_name", promql.ROLE)
_SECONDS = shown_unit(Unit.SECONDS)
_PAIRS = (
    'No engine has role="prefill" or role="decode": set the role of each engine as a label of its target;'
    " docs/guides/prefill-decode.md says how. Engines that do both need none."
)
_CONNECTOR = (
    "No KV cache moves between engines: start vLLM with --kv-transfer-config and the NixlConnector, or from 0.33 on the"
    " MooncakeConnector."
)
_FETCHES = "No engine loads KV cache through a connector, or its vLLM is older than 0.32."
_TRANSFER = (vllm.NIXL_XFER_TIME, vllm.MOONCAKE_XFER_TIME)  # seen by the decode engine, by the prefill engine


def _mean(metric: Metric, role: tuple[str, ...]) -> str:
    return promql.mean(metric, RATE, where=queries.where(metric, *role))


def _transfer() -> str:
    """Return the mean time of a transfer, by whichever connector moves."""
    return " or ".join(f"({_mean(metric, ())})" for metric in _TRANSFER)


def _parts() -> dict[str, str]:
    """Return the five parts of the time to first token, in their order.

    The decode engine's queue time contains the transfer, so that is subtracted. Transfers without a time, as of
    connectors without metrics, stay in the decode queue."""
    queued = _mean(vllm.REQUEST_QUEUE_TIME, _DECODE)
    return {
        "prefill queue": _mean(vllm.REQUEST_QUEUE_TIME, _PREFILL),
        "prefill": _mean(vllm.REQUEST_PREFILL_TIME, _PREFILL),
        "KV transfer": _transfer(),
        "decode queue": f"clamp_min(({queued}) - ({_transfer()}), 0) or {queued}",
        "first token": _mean(vllm.REQUEST_PREFILL_TIME, _DECODE),
    }


def _sum() -> Query:
    """Return the sum of the parts; a transfer without a time of its own is in the decode queue."""
    parts = _parts()
    rest = [f"({part})" for name, part in parts.items() if name != "KV transfer"]
    moved = f"(({parts['KV transfer']}) or {rest[0]} * 0)"
    return Query(" + ".join((*rest, moved)), queries.legend(promql.BY, "sum of the parts, mean"), _SECONDS)


def _in_use(role: EngineRole) -> str:
    """Return the share of a role's capacity in use, 0 to 1.

    A prefill engine is busy while a prompt is computed: prefill seconds per second and engine, at most 1. A decode
    engine is full when its KV cache is."""
    if role is EngineRole.DECODE:
        return promql.current(vllm.KV_CACHE_USAGE, where=queries.where(vllm.KV_CACHE_USAGE, *_DECODE))
    at = queries.where(vllm.NUM_REQUESTS_RUNNING, *_PREFILL)
    engines = f"count by (model_name) ({promql.series(vllm.NUM_REQUESTS_RUNNING, at)})"
    busy = promql.amount(vllm.REQUEST_PREFILL_TIME, RATE, where=queries.where(vllm.REQUEST_PREFILL_TIME, *_PREFILL))
    return f"clamp_max({busy} / {engines}, 1)"


def _failures(*named: tuple[Metric, str]) -> tuple[Query, ...]:
    return tuple(queries.growth(metric, by=promql.EACH, called=called) for metric, called in named)


BOARD = Dashboard(
    slug="prefill-decode",
    title="vLLM / Prefill/decode",
    question="Where does the first token of a prefill/decode pair wait, and which side is the limit?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "ttft-parts",
                    "Time to first token of a pair, by part",
                    "Means of the prefill engine (queue, prefill), of the transfer, and of the decode engine (queue,"
                    " first token). vLLM's queue time of a decode engine contains the transfer; here it is"
                    " subtracted. The router's own time is in no engine.",
                    "Prefill is the largest part; queues and transfer are small beside it.",
                    "Prefill queue: add prefill engines. Decode queue: add decode engines. Transfer: see its row.",
                    tuple(Query(expr, queries.legend(promql.BY, name), _SECONDS) for name, expr in _parts().items()),
                    Shape.STACK,
                    detail="latency",
                    optional=_PAIRS,
                    width=10,
                ),
                Panel(
                    "ttft-pair",
                    "Time to first token: pair and client",
                    "Sum of the parts beside what clients measured at the gateway, both means. A percentile over both"
                    " engines would describe neither, so percentiles are those of clients.",
                    "Close together.",
                    "Clients wait longer: the time is in the router, in the network, or in a queue before the engines.",
                    (
                        _sum(),
                        queries.mean(sidecar.TTFT, called="client, mean"),
                        queries.p95(sidecar.TTFT, called="client, p95"),
                    ),
                    threshold=thresholds.TTFT_P95,
                    detail="latency",
                    optional=_PAIRS,
                    width=8,
                ),
                Panel(
                    "capacity-ratio",
                    "Prefill to decode capacity in use, ratio",
                    "Share of the prefill engines' time in which a prompt is computed, over the share of the decode"
                    " engines' KV cache in use. An estimate: the two are limited by different things.",
                    "Near 1: both sides fill up together.",
                    "Above 2: prefill is the limit, move an engine to prefill. Below 0.5: decode is the limit.",
                    (
                        Query(
                            promql.per(_in_use(EngineRole.PREFILL), f"({_in_use(EngineRole.DECODE)})"),
                            queries.legend(promql.BY),
                            shown_unit(Unit.NONE),
                        ),
                    ),
                    optional=_PAIRS,
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "KV transfer",
            (
                Panel(
                    "transfer-time",
                    "Transfer time, p95",
                    "One KV transfer from post to done; post: handing it to NIXL, before any byte moves. Failed"
                    " transfers leave no sample. NIXL: seen by the decode engine; Mooncake: by the prefill engine.",
                    "Far less than the prefill that it saves.",
                    "Slow with high bandwidth: more or faster links. Slow with low bandwidth: many small descriptors.",
                    (
                        queries.p95(vllm.NIXL_XFER_TIME, called="NIXL"),
                        queries.p95(vllm.NIXL_POST_TIME, called="NIXL post"),
                        queries.p95(vllm.MOONCAKE_XFER_TIME, called="Mooncake"),
                    ),
                    threshold=thresholds.KV_TRANSFER_P95,
                    detail="latency",
                    optional=_CONNECTOR,
                ),
                Panel(
                    "transfer-bandwidth",
                    "Transfer bandwidth",
                    "Bytes of KV cache moved per second.",
                    "Below what the link carries.",
                    "At the link's limit, transfers queue: place the engines closer, or use an FP8 cache.",
                    (
                        queries.amount(vllm.NIXL_BYTES_TRANSFERRED, called="NIXL"),
                        queries.amount(vllm.MOONCAKE_BYTES_TRANSFERRED, called="Mooncake"),
                    ),
                    optional=_CONNECTOR,
                ),
                Panel(
                    "transfer-failures",
                    "Transfers failed, by engine",
                    "failed: a transfer failed. not received: the decode engine gave up a request's blocks. notice: the"
                    " prefill engine keeps blocks that it could free. expired: blocks of a finished prefill were"
                    " dropped before they were fetched.",
                    "Zero.",
                    "Expired: decode engines fetch too late, or the router dropped the request. Others: read both logs"
                    " and check the link.",
                    _failures(
                        (vllm.NIXL_NUM_FAILED_TRANSFERS, "failed"),
                        (vllm.NIXL_NUM_FAILED_NOTIFICATIONS, "notice"),
                        (vllm.NIXL_NUM_KV_EXPIRED_REQS, "expired"),
                        (vllm.MOONCAKE_NUM_FAILED_TRANSFERS, "failed"),
                        (vllm.MOONCAKE_NUM_FAILED_RECVS, "not received"),
                        (vllm.MOONCAKE_NUM_KV_EXPIRED_REQS, "expired"),
                    ),
                    bad_from=1.0,
                    optional=_CONNECTOR,
                ),
                Panel(
                    "fetch-stage",
                    "Requests in a transfer, by stage",
                    "Requests of decode engines whose KV cache is fetched: waiting_to_start, in_progress, or"
                    " completed_waiting for a place in the batch.",
                    "A few, for moments.",
                    "in_progress stands still: look at the prefill engine, not here. completed_waiting grows: the"
                    " decode engine is full.",
                    (queries.now(vllm.NUM_REQUESTS_KV_FETCH_BY_STAGE, ("stage", "model_name")),),
                    Shape.STACK,
                    detail="kv-cache",
                    optional=_FETCHES,
                ),
                Panel(
                    "transfer-size",
                    "Bytes per transfer, mean",
                    "KV cache of one prompt as it was moved.",
                    "Follows the prompt length: bytes per token times tokens.",
                    "Far above that: the two sides move padding; compare block sizes.",
                    (
                        queries.mean(vllm.NIXL_BYTES_TRANSFERRED, called="NIXL"),
                        queries.mean(vllm.MOONCAKE_BYTES_TRANSFERRED, called="Mooncake"),
                    ),
                    optional=_CONNECTOR,
                ),
                Panel(
                    "descriptors",
                    "Descriptors per transfer, mean",
                    "Memory pieces in one transfer; many small ones cost bandwidth.",
                    "Level for level prompt lengths.",
                    "Grows without longer prompts: compare block size and layout of the two sides.",
                    (
                        queries.mean(vllm.NIXL_NUM_DESCRIPTORS, called="NIXL"),
                        queries.mean(vllm.MOONCAKE_NUM_DESCRIPTORS, called="Mooncake"),
                    ),
                    optional=_CONNECTOR,
                ),
            ),
        ),
        DashboardRow(
            "Prefill and decode engines",
            (
                Panel(
                    "in-use",
                    "Capacity in use, by role",
                    "prefill: share of time in which a prompt is computed. decode: share of KV-cache blocks in use.",
                    "Both below 0.8.",
                    "The higher one is the limit: add engines of that role, or move one over.",
                    tuple(
                        Query(_in_use(role), queries.legend(promql.BY, str(role)), shown_unit(Unit.RATIO))
                        for role in EngineRole
                    ),
                    detail="kv-cache",
                    optional=_PAIRS,
                ),
                Panel(
                    "waiting-by-role",
                    "Requests running and waiting, by role",
                    "A waiting request of a decode engine may be in a transfer: compare requests in a transfer above.",
                    "None wait on prefill engines for long.",
                    "Waiting on prefill: prompts come faster than they are computed. On decode: it is full, or"
                    " transfers are slow.",
                    (
                        queries.now(vllm.NUM_REQUESTS_RUNNING, _BY_ROLE, "running", (promql.WITH_ROLE,)),
                        queries.now(vllm.NUM_REQUESTS_WAITING, _BY_ROLE, "waiting", (promql.WITH_ROLE,)),
                    ),
                    detail="fleet",
                    optional=_PAIRS,
                ),
                Panel(
                    "kv-by-role",
                    "KV cache in use, by role",
                    "Mean share of KV-cache blocks in use. A prefill engine holds the blocks of a finished prefill"
                    " until they are fetched or expire.",
                    "Prefill engines fall back to near 0 between bursts.",
                    "Prefill stays up without requests: blocks wait to be fetched. See expired in failed transfers.",
                    (queries.now(vllm.KV_CACHE_USAGE, _BY_ROLE, only=(promql.WITH_ROLE,)),),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="kv-cache",
                    optional=_PAIRS,
                ),
                Panel(
                    "external-hit-ratio",
                    "Prompt tokens received, share",
                    "Share of the prompt tokens that decode engines asked their connector for and got. The prefix cache"
                    " of a pair is that of its prefill engine: cached_tokens in a response is its hit.",
                    "Near 100 %: the prefill engine has done the work.",
                    "Low: decode engines compute prompts themselves. See failed and expired transfers.",
                    (queries.share(vllm.EXTERNAL_PREFIX_CACHE_HITS, vllm.EXTERNAL_PREFIX_CACHE_QUERIES),),
                    detail="kv-cache",
                    optional="No cache outside the engine is asked: start vLLM with --kv-transfer-config.",
                ),
                Panel(
                    "computed-on-decode",
                    "Prompt tokens computed on decode engines",
                    "Prompt tokens per second by source, decode engines only. request_prefill_kv_computed_tokens counts"
                    " transferred tokens there as computed, so it is not used.",
                    "external_kv_transfer leads; local_compute is near 0.",
                    "local_compute is prefill that was meant to happen elsewhere: see failed and expired transfers.",
                    (queries.rate(vllm.PROMPT_TOKENS_BY_SOURCE, ("source", "model_name"), only=_DECODE),),
                    Shape.STACK,
                    detail="kv-cache",
                    optional=_PAIRS,
                ),
                Panel(
                    "finished-by-role",
                    "Requests finished, by role and reason",
                    "Each request finishes on both engines: on a prefill engine after one token (length). Add the two"
                    " and it counts twice.",
                    "Both roles finish as many.",
                    "More on prefill: prefills that nobody fetched. error on either side: read its log.",
                    (queries.rate(vllm.REQUEST_SUCCESS, (promql.ROLE, "finished_reason"), only=(promql.WITH_ROLE,)),),
                    optional=_PAIRS,
                ),
            ),
        ),
    ),
)
