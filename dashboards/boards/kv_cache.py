"""Dashboard KV cache: free blocks, preemptions, prefix reuse."""

from __future__ import annotations

from alerts import thresholds
from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import promql, sidecar, vllm
from exporters.catalogue.metric import Metric, Unit

_CONFIGURED = (
    "instance",
    "engine",
    "num_gpu_blocks",
    "block_size",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
)
_KV_METRICS = "Sampling of blocks is off: start vLLM (0.13 or later) with --kv-cache-metrics."
OFFLOAD = "Offloading is off: start vLLM (0.24 or later) with --kv-transfer-config and the OffloadingConnector."
_TIERED = (
    "CPU offloading is off or this vLLM is older than 0.24: start it with --kv-transfer-config and the"
    " OffloadingConnector."
)
_LATER = (
    "Offloading is off or this vLLM does not show it: start 0.25 or later with --kv-transfer-config and the"
    " OffloadingConnector."
)
_BY_SOURCE = "vLLM says where prompt tokens came from since 0.16: upgrade to see it."


def _in_use(there: Metric) -> Query:
    """The mean share in use times what there is; exact while the engines of a model are of one size."""
    used = promql.current(vllm.KV_CACHE_USAGE, where=queries.where(vllm.KV_CACHE_USAGE))
    return Query(f"{used} * {_all(there)}", queries.legend(promql.BY, "in use"), shown_unit(there.unit))


def _all(there: Metric) -> str:
    return promql.once(there, where=queries.where(there))


def _there(there: Metric, called: str) -> Query:
    return Query(_all(there), queries.legend(promql.BY, called), shown_unit(there.unit))


def _mean_requests_that_fit() -> Query:
    """Capacity over the mean length of prompt and reply together."""
    prompt, reply = (
        queries.mean(metric).expr for metric in (vllm.REQUEST_PROMPT_TOKENS, vllm.REQUEST_GENERATION_TOKENS)
    )
    return Query(
        promql.per(_all(sidecar.KV_CAPACITY), f"({prompt} + {reply})"),
        queries.legend(promql.BY, "would fit"),
        shown_unit(Unit.REQUESTS),
    )


def _preemptions_per_request() -> Query:
    preempted, finished = (
        promql.per_second(m, RATE, where=queries.where(m)) for m in (vllm.NUM_PREEMPTIONS, vllm.REQUEST_SUCCESS)
    )
    return Query(promql.per(preempted, finished), queries.legend(promql.BY, "mean"), shown_unit(Unit.COUNT))


def _configuration() -> Query:
    """Use beside the labels of the configuration. The engine's use is the side that must be unique, so a changed
    configuration is no error."""
    engine = ("job", "instance", "engine")
    configured = (
        f"max by (job, {', '.join(_CONFIGURED)})"
        f" ({promql.series(vllm.CACHE_CONFIG_INFO, queries.where(vllm.CACHE_CONFIG_INFO))})"
    )
    used = promql.worst(vllm.KV_CACHE_USAGE, engine, queries.where(vllm.KV_CACHE_USAGE))
    return Query(f"{configured} * on ({', '.join(engine)}) group_left () {used}", "in use", shown_unit(Unit.RATIO))


def _state(only: str) -> Query:
    return queries.worst(vllm.ENGINE_SLEEP_STATE, (*promql.EACH, "sleep_state"), only=(f"sleep_state{only}",))


BOARD = Dashboard(
    slug="kv-cache",
    title="vLLM / KV cache",
    question="Is the KV cache large enough, and is computed prefix reused?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "kv-usage",
                    "KV cache use, fullest engine",
                    "Share of KV-cache blocks held by running requests, on the fullest engine of a model. It counts"
                    " blocks, not tokens: half-empty ones made 67 % where tokens filled 37 %. Blocks that are kept only"
                    " for reuse count as free.",
                    "Under 90 %; high use without preemptions is memory well spent.",
                    "Full while requests wait: preemption is close, see preemptions on the right. Shorten contexts,"
                    " lower max_num_seqs, give the cache more memory or add a replica.",
                    (queries.worst(vllm.KV_CACHE_USAGE),),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="tuning-options",
                ),
                Panel(
                    "hit-ratio",
                    "Prefix cache hit ratio",
                    "Share of looked-up prompt tokens whose keys and values were still in the cache; absent while"
                    " nothing is asked. Older releases, 0.20 among them, look up again on every retry, so under"
                    " preemption trust the share of cached prompt tokens further down.",
                    "What your prompts share: 70 to 95 % for agents that resend one long prompt, 30 to 60 % for a"
                    " shared system prompt, under 15 % where each prompt brings new documents.",
                    "After a fall look for a timestamp or a name early in the prompt, a changed template, or routing"
                    " that spreads one conversation; then see hit ratio by engine.",
                    (queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES),),
                    detail="tuning-options",
                ),
                Panel(
                    "preemptions",
                    "Preemptions per second",
                    "How often a running request lost its blocks because the cache was promised twice; vLLM computes it"
                    " again, prompt and reply so far, unless its blocks are still cached.",
                    "Zero.",
                    "Lower max_num_seqs or cap max_tokens, or enlarge the cache: more gpu_memory_utilization (lowering"
                    " it makes this worse), an FP8 cache after a check of quality, a replica.",
                    (queries.rate(vllm.NUM_PREEMPTIONS),),
                    threshold=thresholds.PREEMPTIONS,
                    detail="tuning-options",
                ),
            ),
        ),
        DashboardRow(
            "Capacity",
            (
                Panel(
                    "usage-by-engine",
                    "KV cache use by engine",
                    "Share of blocks held by running requests, engine by engine.",
                    "The engines of a model run close together.",
                    "One far above the others gets the long requests: look at how they are routed before you add"
                    " memory.",
                    (queries.worst(vllm.KV_CACHE_USAGE, promql.EACH),),
                    threshold=thresholds.KV_CACHE_USAGE,
                    detail="fleet",
                    width=6,
                ),
                Panel(
                    "tokens-in-use",
                    "Tokens: in use and capacity",
                    "Capacity of all engines of a model, and the part in use: mean share times capacity, exact while"
                    " the engines are of one size. The choice of a namespace or an engine narrows the share alone.",
                    "In use stays a tenth below capacity.",
                    "Close together: the next long prompt preempts somebody; compare with requests that fit, on the"
                    " right.",
                    (_in_use(sidecar.KV_CAPACITY), _there(sidecar.KV_CAPACITY, "capacity")),
                    width=6,
                ),
                Panel(
                    "blocks-in-use",
                    "Blocks: in use and total",
                    "The same in blocks, vLLM's unit of allocation: a request takes whole blocks, so its last one is"
                    " half empty on average.",
                    "In use stays a tenth below what is there.",
                    "Fewer blocks after a restart mean less memory was left: compare gpu_memory_utilization,"
                    " max_num_seqs and the model's size.",
                    (_in_use(sidecar.KV_BLOCKS), _there(sidecar.KV_BLOCKS, "there")),
                    detail="tuning",
                    width=6,
                ),
                Panel(
                    "requests-that-fit",
                    "Requests running, and the most that fit",
                    "Capacity over the mean length of prompt and reply of what just finished, beside the requests"
                    " running. Careful: replies are counted as if all were complete, shared prefixes as if nobody"
                    " shared; the choice of a namespace or an engine leaves capacity whole.",
                    "Running stays below what would fit.",
                    "Running near it: the KV cache limits you. Far below it with requests waiting: max_num_seqs does.",
                    (_mean_requests_that_fit(), queries.now(vllm.NUM_REQUESTS_RUNNING, called="running")),
                    detail="tuning-options",
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Preemption and waiting",
            (
                Panel(
                    "preemptions-per-request",
                    "Preemptions per finished request, mean and p99",
                    "Preemptions over finished requests, and p99 of how often one finished request was preempted (vLLM"
                    " 0.30 and later). The first bound is 1, so a p99 below 1 means hardly anybody.",
                    "Zero.",
                    "A low mean with a high p99 is one unlucky long request; a mean above 0.5 is an engine that"
                    " thrashes: lower max_num_seqs.",
                    (_preemptions_per_request(), queries.quantile(0.99, vllm.REQUEST_NUM_PREEMPTIONS, called="p99")),
                ),
                Panel(
                    "waiting",
                    "Requests waiting, by reason",
                    "capacity waits for blocks or a place in the batch; deferred is held back by LoRA limits or a KV"
                    " transfer.",
                    "Zero, or gone within seconds.",
                    "Capacity with a full cache: memory. Capacity with room in the cache: max_num_seqs. Deferred: see"
                    " the Tuning options dashboard.",
                    (queries.now(vllm.NUM_REQUESTS_WAITING_BY_REASON, by=("model_name", "reason")),),
                    Shape.STACK,
                    detail="tuning-options",
                    optional="vLLM reports reasons since 0.20; for older engines the Overview shows all that wait.",
                ),
                Panel(
                    "computed-per-request",
                    "Prompt tokens computed per request, p50 p95",
                    "Prompt tokens that a finished request had computed, cached ones left out; p95 of prompt length"
                    " stands beside it.",
                    "Far below prompt length where prompts share a prefix.",
                    "Equal to prompt length: nothing is reused. See hit ratio by engine, then what the prompts begin"
                    " with.",
                    (
                        queries.quantile(0.5, vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS, called="p50"),
                        queries.quantile(0.95, vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS, called="p95"),
                        queries.p95(vllm.REQUEST_PROMPT_TOKENS, called="prompt p95"),
                    ),
                    detail="latency",
                ),
            ),
        ),
        DashboardRow(
            "Prefix cache",
            (
                Panel(
                    "hit-ratio-by-cache",
                    "Hit ratio by cache",
                    "prefix: the engine's own cache, in tokens. external: a KV connector's, asked only for what prefix"
                    " missed, in tokens. multi-modal: images, audio and the like, in items. A cache that nobody asks"
                    " has no line.",
                    "Each level; only those you use.",
                    "A low external ratio on a large store means that keys do not match: compare model, block size and"
                    " hashing of the engines.",
                    (
                        queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, called="prefix"),
                        queries.share(
                            vllm.EXTERNAL_PREFIX_CACHE_HITS, vllm.EXTERNAL_PREFIX_CACHE_QUERIES, called="external"
                        ),
                        queries.share(vllm.MM_CACHE_HITS, vllm.MM_CACHE_QUERIES, called="multi-modal"),
                    ),
                    width=6,
                ),
                Panel(
                    "hit-ratio-by-engine",
                    "Prefix cache hit ratio by engine",
                    "Each engine has a cache of its own: what one has computed does not help the next.",
                    "The engines of a model run close together.",
                    "All lower than with a single engine: route by prefix or by conversation instead of round robin.",
                    (queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, promql.EACH),),
                    detail="fleet",
                    width=6,
                ),
                Panel(
                    "prompt-tokens-by-source",
                    "Prompt tokens by source",
                    "Prompt tokens per second by where their keys and values came from. local_compute is the prefill"
                    " work really done; the parts add up to prompt throughput, so nothing here is to be added to it.",
                    "local_compute is a small part where prompts share prefixes.",
                    "local_compute grows while the sum stays: reuse was lost. The sum grows: prompts are longer or"
                    " more.",
                    (queries.rate(vllm.PROMPT_TOKENS_BY_SOURCE, by=("source",)),),
                    Shape.STACK,
                    detail="latency",
                    width=6,
                    optional=_BY_SOURCE,
                ),
                Panel(
                    "cached-by-tier",
                    "Cached prompt tokens by tier",
                    "Prompt tokens per second that needed no computing, by what supplied them: the GPU's memory"
                    " (device), the host's, a disk, another engine (p2p), or a store without a name.",
                    "device is by far the most: every other tier must first be copied.",
                    "Much from slower tiers: compare time to first token with and without them, and consider a larger"
                    " cache on the GPU.",
                    (queries.rate(vllm.PROMPT_TOKENS_CACHED_BY_SOURCE, by=("source",)),),
                    Shape.STACK,
                    detail="tuning-options",
                    width=6,
                    optional="vLLM reports tiers since 0.30: upgrade to see them.",
                ),
                Panel(
                    "cached-share",
                    "Prompt tokens cached, share",
                    "Share of prompt tokens that were not computed here, whatever supplied them: all sources but"
                    " local_compute. Unlike the hit ratio it counts each prompt once, preempted or not. Engines before"
                    " 0.16 are in neither part.",
                    "Level for level traffic.",
                    "Below the hit ratio: the lookups are counted twice by this release, so trust this line.",
                    (
                        queries.share(
                            vllm.PROMPT_TOKENS_BY_SOURCE,
                            vllm.PROMPT_TOKENS_BY_SOURCE,
                            part_only=('source!="local_compute"',),
                        ),
                    ),
                    detail="tuning-options",
                    optional=_BY_SOURCE,
                ),
                Panel(
                    "cached-and-computed",
                    "Prompt tokens: cached and computed",
                    "Prompt tokens per second that needed no computing, beside all prompt tokens taken in, of engines"
                    " that tell both; between the lines lies the prefill work done.",
                    "The lines run close together where prompts share prefixes.",
                    "A gap that widens costs time to first token: see prefill time on the Latency board.",
                    (
                        queries.rate(vllm.PROMPT_TOKENS_CACHED, called="cached"),
                        queries.rate(vllm.PROMPT_TOKENS_BY_SOURCE, called="all"),
                    ),
                    detail="latency",
                    optional=_BY_SOURCE,
                ),
                Panel(
                    "cache-lookups",
                    "Requests with cache hits at the client, share",
                    "Share of requests whose answer said that prompt tokens came from the cache, from the request log;"
                    " one block is enough to count. Choosing a team narrows this panel alone.",
                    "Close to 100 % where all prompts start alike.",
                    "High here and a low hit ratio: only a short beginning is shared. Look at what follows it in the"
                    " prompt.",
                    (queries.share(sidecar.CACHE_LOOKUPS, sidecar.CACHE_LOOKUPS, part_only=('result="hit"',)),),
                    detail="teams",
                    optional=(
                        "No answer says what was cached: start vLLM with --enable-prompt-tokens-details, behind the"
                        " gateway and with the sidecar."
                    ),
                ),
            ),
        ),
        DashboardRow(
            "Engines",
            (
                Panel(
                    "configuration",
                    "Engines and their caches",
                    "Each engine's cache as it was configured, and the share in use now. Capacity in tokens and the"
                    " number of requests of full length that fit are reported since vLLM 0.24.",
                    "Engines of one model have the same number of blocks.",
                    "Fewer blocks on one engine: something else holds memory on its GPU. No prefix caching: start it"
                    " with --enable-prefix-caching.",
                    (_configuration(),),
                    Shape.TABLE,
                    detail="fleet",
                    width=18,
                    height=6,
                ),
                Panel(
                    "block-size",
                    "Block size",
                    "Tokens that one block holds. Only whole blocks are reused: a shared prefix shorter than one block"
                    " never hits.",
                    "16 to 128 tokens; some hybrid models have 784.",
                    "Larger than your shared prefix: that is why nothing hits. See --block-size.",
                    (queries.now(sidecar.KV_BLOCK_SIZE),),
                    Shape.NUMBER,
                    width=6,
                    height=6,
                ),
            ),
        ),
        DashboardRow(
            "Block lifetime (needs --kv-cache-metrics)",
            (
                Panel(
                    "block-lifetime",
                    "Block lifetime, p50 p95",
                    "From allocation to eviction, of sampled blocks: 1 % unless --kv-cache-metrics-sample says"
                    " otherwise. p95 of the time between two uses stands beside it.",
                    "Blocks live longer than the time between two uses.",
                    "Shorter than that: the cache forgets what would be asked for again. Enlarge it, offload to CPU"
                    " memory, or route by prefix.",
                    (
                        queries.quantile(0.5, vllm.KV_BLOCK_LIFETIME, called="life p50"),
                        queries.quantile(0.95, vllm.KV_BLOCK_LIFETIME, called="life p95"),
                        queries.p95(vllm.KV_BLOCK_REUSE_GAP, called="between uses p95"),
                    ),
                    optional=_KV_METRICS,
                ),
                Panel(
                    "block-idle",
                    "Idle before eviction, p50 p95",
                    "Time between the last use of a sampled block and its eviction.",
                    "Long: what is evicted is what nobody asks for.",
                    "Short: blocks are thrown out while warm. Compare with the time between uses.",
                    (
                        queries.quantile(0.5, vllm.KV_BLOCK_IDLE_BEFORE_EVICT, called="p50"),
                        queries.quantile(0.95, vllm.KV_BLOCK_IDLE_BEFORE_EVICT, called="p95"),
                    ),
                    optional=_KV_METRICS,
                ),
                Panel(
                    "block-evictions",
                    "Sampled evictions per second",
                    "Evictions among sampled blocks; divide by the sampled share for all of them.",
                    "None while the working set fits.",
                    "Steady evictions with a falling hit ratio: the working set is larger than the cache.",
                    (queries.events(vllm.KV_BLOCK_LIFETIME),),
                    optional=_KV_METRICS,
                ),
                Panel(
                    "block-lifetime-heatmap",
                    "Block lifetime, distribution",
                    "How many sampled blocks were evicted after which time, all selected models together; the last"
                    " bound is half an hour.",
                    "Most live for minutes.",
                    "A band in the first seconds is churn: compare with preemptions.",
                    (queries.heat(vllm.KV_BLOCK_LIFETIME),),
                    Shape.HEATMAP,
                    optional=_KV_METRICS,
                    width=12,
                ),
                Panel(
                    "block-reuse-heatmap",
                    "Time between two uses, distribution",
                    "How long sampled blocks waited for their next use. Only the latest uses of a block are kept, so it"
                    " leans towards short gaps.",
                    "Shorter than blocks live.",
                    "A band beyond the life of a block is reuse that is lost: the cache, or a tier below it, would have"
                    " to hold blocks that long.",
                    (queries.heat(vllm.KV_BLOCK_REUSE_GAP),),
                    Shape.HEATMAP,
                    optional=_KV_METRICS,
                    width=12,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "CPU and tiered offloading",
            (
                Panel(
                    "offload-bytes",
                    "Offload traffic",
                    "Bytes of KV cache per second, stored away from the GPU and loaded back.",
                    "Loads are worth the stores: a good part of what is stored comes back.",
                    "Stores without loads are work for nothing: raise the reuse threshold, or switch offloading off.",
                    (
                        queries.rate(vllm.KV_OFFLOAD_LOAD_BYTES, called="load"),
                        queries.rate(vllm.KV_OFFLOAD_STORE_BYTES, called="store"),
                    ),
                    optional=OFFLOAD,
                ),
                Panel(
                    "offload-under-way",
                    "Transfers in flight",
                    "Seconds of transfer per second, which is how many ran at once on average; transfers overlap, so it"
                    " may exceed 1.",
                    "Below 1.",
                    "Rising loads hold up first tokens: compare with time to first token, and with the bandwidth"
                    " between CPU and GPU.",
                    tuple(
                        Query(
                            promql.per_second(metric, RATE, where=queries.where(metric)),
                            queries.legend(promql.BY, called),
                            shown_unit(Unit.COUNT),
                        )
                        for metric, called in (
                            (vllm.KV_OFFLOAD_LOAD_TIME, "load"),
                            (vllm.KV_OFFLOAD_STORE_TIME, "store"),
                        )
                    ),
                    detail="latency",
                    optional=OFFLOAD,
                ),
                Panel(
                    "offload-size",
                    "Size of a transfer, p95",
                    "Bytes of one load and of one store; one in twenty is larger.",
                    "Megabytes: small transfers waste the bus.",
                    "Small transfers: enlarge the offloaded block.",
                    (
                        queries.p95(vllm.KV_OFFLOAD_LOAD_SIZE, called="load"),
                        queries.p95(vllm.KV_OFFLOAD_STORE_SIZE, called="store"),
                    ),
                    optional=OFFLOAD,
                ),
                Panel(
                    "offload-pinned",
                    "CPU cache pinned by transfers, fullest engine",
                    "Share of the CPU cache that transfers under way hold: pinned and not filled, so a full and quiet"
                    " cache reads 0.",
                    "Well below 1.",
                    "Near 1 stores find no room: enlarge the CPU cache; see failures beside it.",
                    (
                        queries.worst(vllm.KV_OFFLOAD_CPU_CACHE_USAGE, called="all"),
                        queries.worst(vllm.KV_OFFLOAD_CPU_CACHE_WRITE_USAGE, called="stores"),
                        queries.worst(vllm.KV_OFFLOAD_CPU_CACHE_READ_USAGE, called="loads"),
                    ),
                    optional=_TIERED,
                ),
                Panel(
                    "offload-not-stored",
                    "Stores skipped and failed",
                    "skipped: blocks not reused often enough, which is policy (reuse threshold of 2 or more). failed:"
                    " no room in the offload cache.",
                    "No failures; skipped as you configured it.",
                    "Failures cost later hits, not requests: enlarge the CPU cache, or raise the reuse threshold.",
                    (
                        queries.rate(vllm.KV_OFFLOAD_STORES_SKIPPED, called="skipped"),
                        queries.rate(vllm.KV_OFFLOAD_ALLOCATION_FAILURE, called="failed"),
                    ),
                    optional=_TIERED,
                ),
                Panel(
                    "offload-allocation",
                    "CPU blocks requested by one store, p95",
                    "Size of one store in blocks of the CPU cache; one of them may hold several GPU blocks.",
                    "Far below the size of the CPU cache.",
                    "Close to it, one long prompt fills the tier: enlarge it.",
                    (queries.p95(vllm.KV_OFFLOAD_CPU_ALLOCATION_SIZE),),
                    optional=_LATER,
                ),
                Panel(
                    "offload-lookup",
                    "Lookup in the offload cache, p95",
                    "blocking: time that one lookup held up the scheduler, and so every request of the engine."
                    " deferred: time one request waited for its lookup, part of its first token.",
                    "Blocking under a millisecond.",
                    "Blocking lookups show as gaps between tokens: see inter-token latency p99 on the Tuning options"
                    " dashboard.",
                    (
                        queries.p95(vllm.KV_OFFLOAD_LOOKUP_SYNC_DELAY, called="blocking"),
                        queries.p95(vllm.KV_OFFLOAD_LOOKUP_ASYNC_DELAY, called="deferred"),
                    ),
                    detail="tuning-options",
                    optional=_LATER,
                ),
                Panel(
                    "tiering-lookup",
                    "Lookup in lower tiers, p95",
                    "The same for the tiers below the CPU cache, such as a disk or a network store.",
                    "Deferred far below the prefill it saves.",
                    "A lookup slower than the prefill it saves is a loss: drop the tier, or put it on faster storage.",
                    (
                        queries.p95(vllm.KV_OFFLOAD_TIERING_LOOKUP_SYNC_DELAY, called="blocking"),
                        queries.p95(vllm.KV_OFFLOAD_TIERING_LOOKUP_ASYNC_DELAY, called="deferred"),
                    ),
                    optional=_LATER,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Sleep",
            (
                Panel(
                    "awake",
                    "Awake",
                    "yes while the engine is awake. An engine that sleeps answers scrapes and serves nobody.",
                    "yes, unless you put it to sleep.",
                    "Wake it up, or take it out of the gateway's list; the Fleet board shows all engines.",
                    (_state('="awake"'),),
                    Shape.NUMBER,
                    detail="fleet",
                    height=5,
                    optional="vLLM reports whether it sleeps since 0.11.1: upgrade to see it.",
                ),
                Panel(
                    "asleep",
                    "Sleep level",
                    "weights_offloaded: the weights are in CPU memory and the KV cache is gone. discard_all: the"
                    " weights are gone too. Both read 0 while the engine is awake.",
                    "Both 0 on an engine that should serve.",
                    "After waking up the prefix cache is empty: expect a low hit ratio for a while.",
                    (_state('!="awake"'),),
                    detail="fleet",
                    height=5,
                    width=16,
                    optional="vLLM reports whether it sleeps since 0.11.1: upgrade to see it.",
                ),
            ),
            collapsed=True,
        ),
    ),
)
