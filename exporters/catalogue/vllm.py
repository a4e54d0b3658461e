"""vLLM metric families by release: every `vllm:` family, and the unprefixed ones exposed with them.

Invariant: names, kinds and labels are those of scrapes captured from running engines (tests/golden). Families in no
scrape are marked SOURCE; their first release was inferred from merge dates and may be off by one minor release.

Labels are those of the V1 engine with the Python frontend; the Rust frontend exposes fewer families. `_created`
twins of counters and histograms (process start times) are left out."""

from exporters.catalogue.metric import Across, EngineRole, Kind, Metric, Provenance, Unit

# Notes shared by several families.
_FROM_0_3_S = "The default bounds start at 0.3 s: quantiles of faster requests are only known to be below it."
_BOUNDS_MOVE = (
    "Bounds are configurable (--custom-histogram-buckets) and differ by release: read them from the scrape, do not"
    " hard-code them."
)
_FINISHED_ONLY = "One sample per finished request: client disconnects and rejected requests leave none."
_RATIO_MEAN = "A share of one engine's cache: take the mean or maximum over engines, not the sum."
NOT_RUST = "Not exposed by the Rust frontend."
_HIT_HISTORY = (
    (
        "Preempted tokens were counted as hits again until autumn 2025 (#25787), and allocation retries twice (#43736,"
        " #39566)."
    ),
    (
        "Fixed in July and August 2026: double count when a KV connector defers (#48860), loss on steps without output"
        " (#48668)."
    ),
    (
        "Zero hits can simply mean that the shared prefix is shorter than one block; some hybrid models have blocks of"
        " 784 tokens (#54607)."
    ),
)
_RETRIES = (
    "Retries are counted too under preemption: on 0.20.2, 88827 queried tokens for 11296 prompt tokens; on 0.32.0 the"
    " two are equal. The ratio stays valid, the absolute value does not: prompt_tokens_cached_total has it."
)
_HIDDEN = (
    "Hidden one release before removal, unless --show-hidden-metrics-for-version names the previous minor release."
)
_NO_SWAP = "The V1 engine does not swap: it preempts and recomputes."

# Scheduler: running, waiting and rejected requests
NUM_REQUESTS_RUNNING = Metric(
    "vllm:num_requests_running",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests in the current execution batch. At max_num_seqs, the configuration and not the hardware is the limit.",
    since="0.2.3",
    notes=("With several API server processes it was seen at 0 for seconds while clients waited.",),
)
NUM_REQUESTS_WAITING = Metric(
    "vllm:num_requests_waiting",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests accepted by the engine and not yet scheduled.",
    since="0.2.3",
    notes=(
        "Since 0.20 it includes deferred requests, so it equals the sum of num_requests_waiting_by_reason.",
        "With several API server processes it was seen at 0 for seconds while clients waited.",
    ),
)
NUM_REQUESTS_WAITING_BY_REASON = Metric(
    "vllm:num_requests_waiting_by_reason",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Waiting requests by reason: capacity (no room), deferred (LoRA limits or KV transfer).",
    labels=("engine", "model_name", "reason"),
    since="0.20",
    notes=("Only capacity means that the engine is full.",),
)
NUM_PREEMPTIONS = Metric(
    "vllm:num_preemptions_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Preemptions: a running request lost its KV blocks because the cache was over-committed, and is recomputed.",
    since="0.4.3",
    notes=(
        (
            "One request can be preempted many times: 62 preemptions were seen among 92 requests on a deliberately"
            " small cache."
        ),
    ),
)
REQUEST_NUM_PREEMPTIONS = Metric(
    "vllm:request_num_preemptions",
    Kind.HISTOGRAM,
    Unit.COUNT,
    "Preemptions per finished request; separates a few unlucky requests from a thrashing engine.",
    since="0.30",
    notes=(_FINISHED_ONLY, "A histogram: there is no request_num_preemptions_total."),
)
ADMISSION_REJECTIONS = Metric(
    "vllm:admission_rejections_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests rejected by --max-num-queued-reqs or --max-num-queued-tokens, by limit.",
    labels=("model_name", "reason"),
    since="0.30",
    notes=(
        "No engine label: the limit sits in the API server.",
        "--max-num-queued-reqs counts running plus waiting requests, despite its name.",
        "A rejected stream may return HTTP 200 and one error event: 19 of 28 rejections did, 9 were an HTTP 503.",
        "Always exposed, also without a limit; the first release (0.30) is inferred, seen on 0.32.",
    ),
)
ENGINE_SLEEP_STATE = Metric(
    "vllm:engine_sleep_state",
    Kind.GAUGE,
    Unit.FLAG,
    "Sleep state of the engine: awake, weights offloaded, or everything discarded.",
    labels=("engine", "model_name", "sleep_state"),
    across=Across.MAX,
    since="0.11.1",
    notes=("Three series, one of which is 1; select a sleep_state before combining engines.", NOT_RUST),
)
ITERATION_TOKENS = Metric(
    "vllm:iteration_tokens_total",
    Kind.HISTOGRAM,
    Unit.TOKENS,
    "Tokens processed in one engine step, prefill and decode together: the batch size.",
    since="0.6.4",
    notes=(
        "A histogram despite its name; the rate of its _count is engine steps per second, not tokens per second.",
        (
            "Its bounds followed the CUDA graph sizes until 0.8.5; tokens received from a KV connector are left out"
            " since #43346 (2026)."
        ),
        (
            "Cached prompt tokens are in it on 0.20.2 and not on 0.32.0 (measured), so batches of the two are not"
            " comparable."
        ),
        "Exposed by the Rust frontend since September 2026 (#56990).",
    ),
)

# KV cache: usage and reuse
KV_CACHE_USAGE = Metric(
    "vllm:kv_cache_usage_perc",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of KV cache blocks in use, 0 to 1; near 1 with a queue means that preemption is close.",
    across=Across.MEAN,
    since="0.9.2",
    formerly=("vllm:gpu_cache_usage_perc",),
    notes=(
        _RATIO_MEAN,
        "A ratio although the name ends in _perc.",
        "Counts blocks and not tokens: half-empty blocks gave 66.7 % where tokens filled 36.5 % (#57336).",
    ),
)
CACHE_CONFIG_INFO = Metric(
    "vllm:cache_config_info",
    Kind.INFO,
    Unit.NONE,
    "The KV cache as configured: block size, number of blocks, cache data type, prefix caching.",
    labels=("engine",),
    across=Across.MAX,
    since="0.3.3",
    notes=(
        "Every CacheConfig field is a label beside engine: 20 in 0.10.2, 25 in 0.20.2, 36 in 0.32.0.",
        "No model_name: join on engine and instance.",
        "In all three: block_size, num_gpu_blocks, cache_dtype, enable_prefix_caching, gpu_memory_utilization.",
        (
            "kv_cache_size_tokens and kv_cache_max_concurrency are labels since 0.24 (#42206). PromQL cannot turn a"
            " label into a number."
        ),
        "num_gpu_blocks was 'None' in early V1 releases (#15755).",
        NOT_RUST,
    ),
)
PREFIX_CACHE_QUERIES = Metric(
    "vllm:prefix_cache_queries_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens looked up in the prefix cache; the denominator of the hit ratio.",
    since="0.9.2",
    formerly=("vllm:gpu_prefix_cache_queries_total",),
    pair=EngineRole.PREFILL,
    notes=(_RETRIES, "Tokens since 0.9; the older name counted blocks up to 0.8.x (#18003).", *_HIT_HISTORY),
)
PREFIX_CACHE_HITS = Metric(
    "vllm:prefix_cache_hits_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens found in the prefix cache, so not computed again.",
    since="0.9.2",
    formerly=("vllm:gpu_prefix_cache_hits_total",),
    pair=EngineRole.PREFILL,
    notes=(_RETRIES, "Tokens since 0.9; the older name counted blocks up to 0.8.x (#18003).", *_HIT_HISTORY),
)
EXTERNAL_PREFIX_CACHE_QUERIES = Metric(
    "vllm:external_prefix_cache_queries_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens looked up in a cache outside the engine, through a KV connector.",
    since="0.11.1",
    pair=EngineRole.DECODE,
    notes=("Exposed without a connector too, and stays 0.",),
)
EXTERNAL_PREFIX_CACHE_HITS = Metric(
    "vllm:external_prefix_cache_hits_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens that a KV connector supplied from a cache outside the engine.",
    since="0.11.1",
    pair=EngineRole.DECODE,
    notes=("Exposed without a connector too, and stays 0.", _HIT_HISTORY[0]),
)
MM_CACHE_QUERIES = Metric(
    "vllm:mm_cache_queries_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Images, audio clips and other inputs looked up in the multi-modal cache.",
    since="0.11.1",
    notes=("Items and not tokens: never add it to the prefix cache counters.", NOT_RUST),
)
MM_CACHE_HITS = Metric(
    "vllm:mm_cache_hits_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Images, audio clips and other inputs found in the multi-modal cache, so not preprocessed again.",
    since="0.11.1",
    notes=("Items and not tokens: never add it to the prefix cache counters.", NOT_RUST),
)
KV_BLOCK_LIFETIME = Metric(
    "vllm:kv_block_lifetime_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time from the allocation of a KV block to its eviction; short lives mean that the cache is too small for the"
    " traffic.",
    since="0.13",
    needs="--kv-cache-metrics",
    notes=(
        "Sampled: 1 % of blocks unless --kv-cache-metrics-sample says otherwise, so _count is no number of evictions.",
    ),
)
KV_BLOCK_IDLE_BEFORE_EVICT = Metric(
    "vllm:kv_block_idle_before_evict_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time between the last use of a KV block and its eviction; long times mean that the cache holds unused blocks.",
    since="0.13",
    needs="--kv-cache-metrics",
    notes=("Sampled like kv_block_lifetime_seconds.",),
)
KV_BLOCK_REUSE_GAP = Metric(
    "vllm:kv_block_reuse_gap_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time between two uses of the same KV block: how long the cache must hold a block for reuse to pay.",
    since="0.13",
    needs="--kv-cache-metrics",
    notes=(
        (
            "Sampled like kv_block_lifetime_seconds; only the latest accesses of a block are kept, so it is biased"
            " towards short gaps."
        ),
    ),
)

# Tokens: work done
PROMPT_TOKENS = Metric(
    "vllm:prompt_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens of requests whose prefill is done, cached ones included.",
    since="0.3.1",
    pair=EngineRole.DECODE,
    notes=(
        "A prompt of a prefill/decode pair counts in both engines; on the decode engine as external_kv_transfer.",
        (
            "Equals the sum of prompt_tokens_by_source_total in every captured scrape: never add"
            " prompt_tokens_cached_total to it."
        ),
        "Counted at prefill, while request_prompt_tokens counts at the finish: 13826 against 13663 in one run.",
    ),
)
GENERATION_TOKENS = Metric(
    "vllm:generation_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Tokens generated, including those of requests that were aborted later.",
    since="0.3.1",
    pair=EngineRole.DECODE,
    notes=("Counts what the engine made, not what a client received.",),
)
PROMPT_TOKENS_BY_SOURCE = Metric(
    "vllm:prompt_tokens_by_source_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens by where they came from: computed here, found in the local cache, or received through a KV"
    " connector.",
    labels=("engine", "model_name", "source"),
    since="0.16",
    pair=EngineRole.DECODE,
    notes=("source=local_compute is the prefill work that was really done.",),
)
PROMPT_TOKENS_CACHED = Metric(
    "vllm:prompt_tokens_cached_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens that needed no computing, from the local cache or a connector.",
    since="0.16",
    pair=EngineRole.PREFILL,
    notes=("The real series closest to the cache_hit_tokens_total of many guides, which no release has.",),
)
PROMPT_TOKENS_CACHED_BY_SOURCE = Metric(
    "vllm:prompt_tokens_cached_by_source_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Cached prompt tokens by the tier that supplied them: device, host, disk, p2p or an unnamed external store.",
    labels=("engine", "model_name", "source"),
    since="0.30",
    pair=EngineRole.PREFILL,
    notes=(
        "Counted at admission; sums to prefix_cache_hits_total plus external_prefix_cache_hits_total.",
        "The first release (0.30) is inferred, seen on 0.32.",
    ),
)
ESTIMATED_FLOPS_PER_GPU = Metric(
    "vllm:estimated_flops_per_gpu_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Estimated floating point operations per GPU; divided by the peak rate: model FLOPs utilisation (MFU).",
    across=Across.MEAN,
    since="0.17",
    notes=(
        "Exposed by default and stays 0 without --enable-mfu-metrics (measured on 0.32).",
        "Already per GPU: average over engines.",
        "Unusable for DeepSeek-style MLA models before 0.24 (#39457).",
    ),
)
ESTIMATED_READ_BYTES_PER_GPU = Metric(
    "vllm:estimated_read_bytes_per_gpu_total",
    Kind.COUNTER,
    Unit.BYTES,
    "Estimated bytes read from GPU memory per GPU.",
    across=Across.MEAN,
    since="0.17",
    notes=ESTIMATED_FLOPS_PER_GPU.notes,
)
ESTIMATED_WRITE_BYTES_PER_GPU = Metric(
    "vllm:estimated_write_bytes_per_gpu_total",
    Kind.COUNTER,
    Unit.BYTES,
    "Estimated bytes written to GPU memory per GPU.",
    across=Across.MEAN,
    since="0.17",
    notes=ESTIMATED_FLOPS_PER_GPU.notes,
)

# Latency by part of a request
TIME_TO_FIRST_TOKEN = Metric(
    "vllm:time_to_first_token_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "TTFT: time from the request's arrival at the API server to its first token, queueing and prefill included.",
    since="0.3.1",
    pair=EngineRole.DECODE,
    notes=(
        "In a prefill/decode pair each engine has its own part; quantiles of the two do not add.",
        (
            "Requests that never reach a first token leave no sample, so a stalled engine looks healthy here: check"
            " running and waiting too."
        ),
        (
            "A client disconnect leaves a sample here and none in e2e_request_latency_seconds: only the two _count"
            " series differ."
        ),
        "Default bounds run from 1 ms to 2560 s with none at 2 s; those above 40 s came with 0.8.5 (#15202).",
        "Measured from arrival; the per-request metrics in a response body measure theirs from scheduling.",
        _BOUNDS_MOVE,
    ),
)
INTER_TOKEN_LATENCY = Metric(
    "vllm:inter_token_latency_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "ITL: time between two outputs of the engine for the same request; streaming smoothness for the client.",
    since="0.10.2",
    formerly=("vllm:time_per_output_token_seconds",),
    pair=EngineRole.DECODE,
    notes=(
        (
            "One sample per engine output and not per token: with speculative decoding one sample covers several tokens"
            " (#52853)."
        ),
        "Long replies have more weight than short ones, because each token adds a sample.",
        "The first default bound is 10 ms, so faster decoding cannot be resolved.",
        _BOUNDS_MOVE,
    ),
)
REQUEST_TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:request_time_per_output_token_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "TPOT: a request's mean time per output token after the first; one sample per request.",
    since="0.11",
    pair=EngineRole.DECODE,
    notes=(
        "Observes 0 for replies of one token, which pulls quantiles down.",
        "Not a successor of time_per_output_token_seconds, which had one sample per output.",
        _FINISHED_ONLY,
        _BOUNDS_MOVE,
    ),
)
E2E_REQUEST_LATENCY = Metric(
    "vllm:e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time from arrival to the last token of a finished request.",
    since="0.3.1",
    pair=EngineRole.DECODE,
    notes=(
        "Grows with the length of the reply: compare like with like.",
        _FINISHED_ONLY,
        _FROM_0_3_S,
        "Bounds above 60 s came with 0.8.5 (#15202).",
        _BOUNDS_MOVE,
    ),
)
REQUEST_QUEUE_TIME = Metric(
    "vllm:request_queue_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time a request waited in the engine before it was first scheduled.",
    since="0.6.4",
    pair=EngineRole.PREFILL,
    notes=(
        "On a decode engine it contains the KV transfer: it is no queue there.",
        "Ends at the first scheduling: waiting again after a preemption is not in it.",
        _FINISHED_ONLY,
        _FROM_0_3_S,
        _BOUNDS_MOVE,
    ),
)
REQUEST_INFERENCE_TIME = Metric(
    "vllm:request_inference_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time from first scheduling to the last token: prefill plus decode.",
    since="0.6.4",
    pair=EngineRole.DECODE,
    notes=("Waiting after a preemption is in it.", _FINISHED_ONLY, _FROM_0_3_S, _BOUNDS_MOVE),
)
REQUEST_PREFILL_TIME = Metric(
    "vllm:request_prefill_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time from first scheduling to the first token.",
    since="0.6.4",
    pair=EngineRole.PREFILL,
    notes=(
        (
            "Most prefills are shorter than the first bound: a p95 read from buckets was three times too high at 80 to"
            " 95 ms."
        ),
        _FINISHED_ONLY,
        _FROM_0_3_S,
        _BOUNDS_MOVE,
    ),
)
REQUEST_DECODE_TIME = Metric(
    "vllm:request_decode_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time from the first to the last token.",
    since="0.6.4",
    pair=EngineRole.DECODE,
    notes=("Grows with the length of the reply.", _FINISHED_ONLY, _FROM_0_3_S, _BOUNDS_MOVE),
)

# Requests: finish reasons and parameters
REQUEST_SUCCESS = Metric(
    "vllm:request_success_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests that ended in the engine, by finished_reason: stop, length, abort, error or repetition.",
    labels=("engine", "finished_reason", "model_name"),
    since="0.4.2",
    pair=EngineRole.DECODE,
    notes=(
        "A request of a prefill/decode pair ends in both engines: on the prefill engine after one token.",
        "The name misleads: aborts and errors are counted in it, so select finished_reason.",
        "Client disconnects are not counted at all: 15 of 15 left abort at 0 on 0.10.2, 0.20.2 and 0.32.0.",
        "Requests rejected with a 4xx or 5xx before the engine are not counted; see http_requests_total.",
        "error appeared late in 2025, repetition by 0.19; 0.10.2 has stop, length and abort only.",
    ),
)
CORRUPTED_REQUESTS = Metric(
    "vllm:corrupted_requests_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests whose logits held NaN: the model or the hardware is computing nonsense.",
    since="0.12",
    needs="VLLM_COMPUTE_NANS_IN_LOGITS=1",
    evidence=Provenance.SOURCE,
    notes=("Absent does not mean 0: without the variable it is not measured.", NOT_RUST),
)
REQUEST_PROMPT_TOKENS = Metric(
    "vllm:request_prompt_tokens",
    Kind.HISTOGRAM,
    Unit.TOKENS,
    "Prompt length of finished requests.",
    since="0.4.2",
    pair=EngineRole.DECODE,
    notes=(
        "Bounds go 1, 2, 5 up to max_model_len (to 131072 in the Rust frontend), so they differ by deployment.",
        _FINISHED_ONLY,
    ),
)
REQUEST_GENERATION_TOKENS = Metric(
    "vllm:request_generation_tokens",
    Kind.HISTOGRAM,
    Unit.TOKENS,
    "Reply length of finished requests.",
    since="0.4.2",
    pair=EngineRole.DECODE,
    notes=(
        "Bounds go 1, 2, 5 up to max_model_len (to 131072 in the Rust frontend), so they differ by deployment.",
        _FINISHED_ONLY,
    ),
)
REQUEST_MAX_NUM_GENERATION_TOKENS = Metric(
    "vllm:request_max_num_generation_tokens",
    Kind.HISTOGRAM,
    Unit.TOKENS,
    "Longest reply among the n replies of one request.",
    since="0.6.4",
    pair=EngineRole.DECODE,
    notes=("Generated tokens, not the requested limit: see request_params_max_tokens.", _FINISHED_ONLY),
)
REQUEST_PARAMS_MAX_TOKENS = Metric(
    "vllm:request_params_max_tokens",
    Kind.HISTOGRAM,
    Unit.TOKENS,
    "Value of max_tokens in finished requests: an upper bound of their cache demand.",
    since="0.6.4",
    pair=EngineRole.DECODE,
    notes=(_FINISHED_ONLY,),
)
REQUEST_PARAMS_N = Metric(
    "vllm:request_params_n",
    Kind.HISTOGRAM,
    Unit.COUNT,
    "Number of replies (n) requested by finished requests.",
    since="0.4.2",
    pair=EngineRole.DECODE,
    notes=(_FINISHED_ONLY,),
)
REQUEST_PREFILL_KV_COMPUTED_TOKENS = Metric(
    "vllm:request_prefill_kv_computed_tokens",
    Kind.HISTOGRAM,
    Unit.TOKENS,
    "Computed prompt tokens of a finished request, without cached ones.",
    since="0.13",
    pair=EngineRole.PREFILL,
    notes=(
        "On a decode engine it counts the tokens that NIXL transferred, although nothing was computed (0.32).",
        _FINISHED_ONLY,
    ),
)
LORA_REQUESTS_INFO = Metric(
    "vllm:lora_requests_info",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Running and waiting LoRA adapters, as comma-separated labels; the value is the time of the last report.",
    labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    across=Across.MAX,
    since="0.6.4",
    needs="--enable-lora",
    notes=(
        (
            "Neither engine nor model_name; every combination of adapters is a series of its own and old ones stay: the"
            " newest value counts."
        ),
        (
            "It is set to the current time whenever the engine reports, also when nothing changed: it gives no age of"
            " a change."
        ),
        (
            "With several API server processes the timestamps are added up (3.59e9 was seen), so the value means"
            " nothing there."
        ),
    ),
)
TOOL_CALL_PARSER_INVOCATIONS = Metric(
    "vllm:tool_call_parser_invocations_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Runs of the tool-call parser, by whether they found a call.",
    labels=("mode", "model_name", "outcome", "request_type"),
    since="0.24",
    needs="--tool-call-parser",
    evidence=Provenance.SOURCE,
    notes=(
        "Streaming counts once per delta and non-streaming once per reply: do not mix the modes.",
        "An error inside the parser is counted as no_tool_call.",
        "No engine label.",
        NOT_RUST,
    ),
)

# Speculative decoding and diffusion: present only when such decoding is configured
SPEC_DECODE_NUM_DRAFTS = Metric(
    "vllm:spec_decode_num_drafts_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Drafts proposed; 1 + accepted tokens / drafts is the mean number of tokens per step.",
    since="0.8.5",
    needs="--speculative-config",
    notes=("Replaced by the diffusion_ counters on diffusion models.",),
)
SPEC_DECODE_NUM_DRAFT_TOKENS = Metric(
    "vllm:spec_decode_num_draft_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Tokens proposed by the drafter; accepted / proposed is the acceptance ratio.",
    since="0.8.5",
    needs="--speculative-config",
    notes=("The V0 engine had the name from 0.5.3; since means the V1 engine.",),
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS = Metric(
    "vllm:spec_decode_num_accepted_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Drafted tokens that the model accepted.",
    since="0.8.5",
    needs="--speculative-config",
    notes=("The V0 engine had the name from 0.5.3; since means the V1 engine.",),
)
SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Accepted tokens by position in the draft: where drafting further stops paying.",
    labels=("engine", "model_name", "position"),
    since="0.8.5",
    needs="--speculative-config",
    notes=("Divide by spec_decode_num_drafts_total for the acceptance at a position.",),
)
DIFFUSION_NUM_DENOISING_STEPS = Metric(
    "vllm:diffusion_num_denoising_steps_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Denoising steps run by a diffusion language model.",
    since="0.24",
    needs="a diffusion language model",
    evidence=Provenance.SOURCE,
    notes=("Takes the place of spec_decode_num_drafts_total on such models.",),
)
DIFFUSION_NUM_CANVAS_POSITIONS = Metric(
    "vllm:diffusion_num_canvas_positions_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Canvas positions evaluated by a diffusion language model.",
    since="0.24",
    needs="a diffusion language model",
    evidence=Provenance.SOURCE,
    notes=("Takes the place of spec_decode_num_draft_tokens_total on such models.",),
)
DIFFUSION_NUM_COMMITTED_TOKENS = Metric(
    "vllm:diffusion_num_committed_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Tokens that a diffusion language model made final.",
    since="0.24",
    needs="a diffusion language model",
    evidence=Provenance.SOURCE,
    notes=("Takes the place of spec_decode_num_accepted_tokens_total on such models.",),
)

# Connectors: KV cache moved between engines or tiers; of these only NIXL was run, none is in the Rust frontend
_NIXL = "KV connector NixlConnector"
_OFFLOAD = "KV connector OffloadingConnector"
_TIERED = "KV connector OffloadingConnector with CPU or tiered offloading"
_MOONCAKE = "KV connector MooncakeStoreConnector"
_MOONCAKE_PD = "KV connector MooncakeConnector"
_UMBP = "KV connector UMBPStoreConnector"
_UMBP_LABELS = ("engine", "model_name", "operation")
_HF3FS = "KV connector HF3FSKVConnector"
_OPERATION = ("engine", "model_name", "operation", "status")
NIXL_XFER_TIME = Metric(
    "vllm:nixl_xfer_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Duration of one KV transfer over NIXL.",
    since="0.11.1",
    needs=_NIXL,
    notes=("Failures are counted separately, in nixl_num_failed_transfers_total.",),
)
NIXL_POST_TIME = Metric(
    "vllm:nixl_post_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time to post one NIXL transfer, before any byte moves.",
    since="0.11.1",
    needs=_NIXL,
    notes=("The transfer itself is in nixl_xfer_time_seconds.",),
)
NIXL_BYTES_TRANSFERRED = Metric(
    "vllm:nixl_bytes_transferred",
    Kind.HISTOGRAM,
    Unit.BYTES,
    "Bytes moved by one NIXL transfer; the rate of its _sum is the bandwidth used.",
    since="0.11.1",
    needs=_NIXL,
    notes=("A histogram: there is no nixl_bytes_transferred_total.",),
)
NIXL_NUM_DESCRIPTORS = Metric(
    "vllm:nixl_num_descriptors",
    Kind.HISTOGRAM,
    Unit.ITEMS,
    "Memory descriptors in one NIXL transfer; many small ones cost bandwidth.",
    since="0.11.1",
    needs=_NIXL,
    notes=("A histogram although its name reads like a count.",),
)
NIXL_NUM_FAILED_TRANSFERS = Metric(
    "vllm:nixl_num_failed_transfers_total",
    Kind.COUNTER,
    Unit.COUNT,
    "KV transfers over NIXL that failed; each may cost a prefill or a request.",
    since="0.11.1",
    needs=_NIXL,
    notes=("Independent of failed notifications.",),
)
NIXL_NUM_FAILED_NOTIFICATIONS = Metric(
    "vllm:nixl_num_failed_notifications_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Failed completion notifications over NIXL: the peer keeps blocks that it could free.",
    since="0.11.1",
    needs=_NIXL,
    notes=("Independent of failed transfers.",),
)
NIXL_NUM_KV_EXPIRED_REQS = Metric(
    "vllm:nixl_num_kv_expired_reqs_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests whose KV blocks expired on the prefill engine before the decode engine fetched them.",
    since="0.15",
    needs=_NIXL,
    notes=("Counted on the prefill engine only.",),
)
NUM_REQUESTS_KV_FETCH_BY_STAGE = Metric(
    "vllm:num_requests_kv_fetch_by_stage",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests that load their KV cache through a connector: waiting_to_start, in_progress or completed_waiting.",
    labels=("engine", "model_name", "stage"),
    since="0.32",
    needs="a KV connector that loads, such as NixlConnector on a decode engine",
    notes=(
        "Absent on an engine that only produces. The first release (0.32) is inferred.",
        "in_progress stays up and no counter moves while the other engine is stuck (0.32, 20 s).",
    ),
)
KV_OFFLOAD_LOAD_BYTES = Metric(
    "vllm:kv_offload_load_bytes_total",
    Kind.COUNTER,
    Unit.BYTES,
    "Bytes of KV cache loaded back to the GPU.",
    since="0.24",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("Also counted in kv_offload_total_bytes_total: never add the two.",),
)
KV_OFFLOAD_STORE_BYTES = Metric(
    "vllm:kv_offload_store_bytes_total",
    Kind.COUNTER,
    Unit.BYTES,
    "Bytes of KV cache stored away from the GPU.",
    since="0.24",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("Also counted in kv_offload_total_bytes_total: never add the two.",),
)
KV_OFFLOAD_LOAD_TIME = Metric(
    "vllm:kv_offload_load_time_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Seconds spent loading KV cache back to the GPU; its rate is the number of loads under way.",
    since="0.24",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("A sum of overlapping transfers, so its rate may exceed 1.",),
)
KV_OFFLOAD_STORE_TIME = Metric(
    "vllm:kv_offload_store_time_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Seconds spent storing KV cache away from the GPU; its rate is the number of stores under way.",
    since="0.24",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("A sum of overlapping transfers, so its rate may exceed 1.",),
)
KV_OFFLOAD_LOAD_SIZE = Metric(
    "vllm:kv_offload_load_size",
    Kind.HISTOGRAM,
    Unit.BYTES,
    "Size of one load back to the GPU.",
    since="0.24",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("Its _sum equals kv_offload_load_bytes_total.",),
)
KV_OFFLOAD_STORE_SIZE = Metric(
    "vllm:kv_offload_store_size",
    Kind.HISTOGRAM,
    Unit.BYTES,
    "Size of one store away from the GPU.",
    since="0.24",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("Its _sum equals kv_offload_store_bytes_total.",),
)
KV_OFFLOAD_TOTAL_BYTES = Metric(
    "vllm:kv_offload_total_bytes_total",
    Kind.COUNTER,
    Unit.BYTES,
    "Bytes of KV cache moved to or from the GPU, by direction.",
    labels=("engine", "model_name", "transfer_type"),
    since="0.16",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=(
        (
            "Deprecated and still exposed with kv_offload_load_bytes_total and kv_offload_store_bytes_total: counting"
            " both doubles."
        ),
    ),
)
KV_OFFLOAD_TOTAL_TIME = Metric(
    "vllm:kv_offload_total_time_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Seconds spent moving KV cache to or from the GPU, by direction.",
    labels=("engine", "model_name", "transfer_type"),
    since="0.16",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=(
        (
            "Deprecated and still exposed with kv_offload_load_time_total and kv_offload_store_time_total: counting"
            " both doubles."
        ),
    ),
)
KV_OFFLOAD_SIZE = Metric(
    "vllm:kv_offload_size",
    Kind.HISTOGRAM,
    Unit.BYTES,
    "Size of one transfer to or from the GPU, by direction.",
    labels=("engine", "model_name", "transfer_type"),
    since="0.16",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("Deprecated and still exposed with kv_offload_load_size and kv_offload_store_size: counting both doubles.",),
)
KV_OFFLOAD_STORES_SKIPPED = Metric(
    "vllm:kv_offload_stores_skipped_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Stores skipped because the blocks had not been reused often enough.",
    since="0.24",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=("Grows only with a reuse threshold of 2 or more; it is policy, not a failure.",),
)
KV_OFFLOAD_ALLOCATION_FAILURE = Metric(
    "vllm:kv_offload_allocation_failure_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Stores that found no room in the offload cache.",
    since="0.25",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("A failed store loses a later hit, not a request.",),
)
KV_OFFLOAD_CPU_CACHE_USAGE = Metric(
    "vllm:kv_offload_cpu_cache_usage_perc",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the CPU cache pinned by transfers under way, 0 to 1.",
    across=Across.MEAN,
    since="0.24",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=("Pinned and not filled: a full, quiet cache reads 0.", _RATIO_MEAN),
)
KV_OFFLOAD_CPU_CACHE_WRITE_USAGE = Metric(
    "vllm:kv_offload_cpu_cache_write_usage_perc",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the CPU cache pinned by stores under way, 0 to 1.",
    across=Across.MEAN,
    since="0.25",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=(_RATIO_MEAN,),
)
KV_OFFLOAD_CPU_CACHE_READ_USAGE = Metric(
    "vllm:kv_offload_cpu_cache_read_usage_perc",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the CPU cache pinned by loads under way, 0 to 1.",
    across=Across.MEAN,
    since="0.25",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=(_RATIO_MEAN,),
)
KV_OFFLOAD_CPU_ALLOCATION_SIZE = Metric(
    "vllm:kv_offload_cpu_allocation_size",
    Kind.HISTOGRAM,
    Unit.BLOCKS,
    "CPU blocks requested by one store.",
    since="0.25",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=("CPU blocks (chunks) may hold several GPU blocks.",),
)
KV_OFFLOAD_LOOKUP_SYNC_DELAY = Metric(
    "vllm:kv_offload_lookup_sync_delay_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time that a lookup in the offload cache blocked the scheduler.",
    since="0.25",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("It delays every request of the engine.",),
)
KV_OFFLOAD_LOOKUP_ASYNC_DELAY = Metric(
    "vllm:kv_offload_lookup_async_delay_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time a request was deferred while its lookup in the offload cache was under way.",
    since="0.25",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("Part of the request's time to first token.",),
)
KV_OFFLOAD_TIERING_LOOKUP_SYNC_DELAY = Metric(
    "vllm:kv_offload_tiering_lookup_sync_delay_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time that lookups in the tiers below the CPU cache blocked the scheduler.",
    labels=("engine", "model_name", "tier"),
    since="0.25",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=("One of about 16 kv_offload_tiering_ families; the others change too often to be listed.",),
)
KV_OFFLOAD_TIERING_LOOKUP_ASYNC_DELAY = Metric(
    "vllm:kv_offload_tiering_lookup_async_delay_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time a request was deferred while its blocks were looked up in lower tiers.",
    labels=("engine", "model_name", "tier"),
    since="0.25",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=("Separates a slow disk or network store from a slow engine.",),
)
KV_OFFLOAD_TIERING_PROMOTION_LATENCY = Metric(
    "vllm:kv_offload_tiering_promotion_latency_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time from creating a promotion job from a lower tier to seeing its completion, failed jobs included.",
    labels=("engine", "model_name", "result", "tier"),
    since="0.33",
    needs=_TIERED,
    evidence=Provenance.SOURCE,
    notes=("Includes the wait in the queue of the tier.",),
)
KV_OFFLOAD_CONFIG_INFO = Metric(
    "vllm:kv_offload_config_info",
    Kind.GAUGE,
    Unit.NONE,
    "Configuration of the KV offload manager as labels; the value is always 1.",
    since="0.33",
    needs=_OFFLOAD,
    evidence=Provenance.SOURCE,
    notes=("The offloading spec declares further labels, so they differ by spec and tier.",),
)
MOONCAKE_XFER_TIME = Metric(
    "vllm:mooncake_xfer_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Duration of one KV transfer by MooncakeConnector.",
    since="0.33",
    needs=_MOONCAKE_PD,
    evidence=Provenance.SOURCE,
    notes=("Only the prefill engine pushes, so its page has the samples and that of the decode engine has none.",),
)
MOONCAKE_BYTES_TRANSFERRED = Metric(
    "vllm:mooncake_bytes_transferred",
    Kind.HISTOGRAM,
    Unit.BYTES,
    "Bytes moved by one Mooncake transfer; the rate of its _sum is the bandwidth used.",
    since="0.33",
    needs=_MOONCAKE_PD,
    evidence=Provenance.SOURCE,
    notes=("Only the prefill engine pushes, so its page has the samples and that of the decode engine has none.",),
)
MOONCAKE_NUM_DESCRIPTORS = Metric(
    "vllm:mooncake_num_descriptors",
    Kind.HISTOGRAM,
    Unit.ITEMS,
    "Memory descriptors in one Mooncake transfer; many small ones cost bandwidth.",
    since="0.33",
    needs=_MOONCAKE_PD,
    evidence=Provenance.SOURCE,
    notes=("Only the prefill engine pushes, so its page has the samples and that of the decode engine has none.",),
)
MOONCAKE_NUM_FAILED_TRANSFERS = Metric(
    "vllm:mooncake_num_failed_transfers_total",
    Kind.COUNTER,
    Unit.COUNT,
    "KV transfers by MooncakeConnector that failed on the prefill engine.",
    since="0.33",
    needs=_MOONCAKE_PD,
    evidence=Provenance.SOURCE,
    notes=("The decode engine counts what it did not receive in mooncake_num_failed_recvs_total.",),
)
MOONCAKE_NUM_FAILED_RECVS = Metric(
    "vllm:mooncake_num_failed_recvs_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Requests whose KV blocks the decode engine did not receive.",
    since="0.33",
    needs=_MOONCAKE_PD,
    evidence=Provenance.SOURCE,
    notes=("Counted on the decode engine, whatever the cause: refused, timed out or failed transfer.",),
)
MOONCAKE_NUM_KV_EXPIRED_REQS = Metric(
    "vllm:mooncake_num_kv_expired_reqs_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "Requests whose KV blocks expired on the prefill engine before they were transferred.",
    since="0.33",
    needs=_MOONCAKE_PD,
    evidence=Provenance.SOURCE,
    notes=("Counted on the prefill engine only.",),
)
UMBP_TRANSFER_SUBMITTED = Metric(
    "vllm:umbp_transfer_submitted_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Objects submitted to the UMBP store, by operation.",
    labels=_UMBP_LABELS,
    since="0.33",
    needs=_UMBP,
    evidence=Provenance.SOURCE,
    notes=("Submitted minus completed minus failed is in flight.",),
)
UMBP_TRANSFER_COMPLETED = Metric(
    "vllm:umbp_transfer_completed_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Objects that the UMBP store completed, by operation.",
    labels=_UMBP_LABELS,
    since="0.33",
    needs=_UMBP,
    evidence=Provenance.SOURCE,
    notes=("Counted when the engine polls the transfer, not when it ends.",),
)
UMBP_TRANSFER_FAILED = Metric(
    "vllm:umbp_transfer_failed_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Objects that the UMBP store failed to transfer, by operation.",
    labels=_UMBP_LABELS,
    since="0.33",
    needs=_UMBP,
    evidence=Provenance.SOURCE,
    notes=("A failed load costs a prefill.",),
)
UMBP_TRANSFER_BYTES = Metric(
    "vllm:umbp_transfer_bytes_total",
    Kind.COUNTER,
    Unit.BYTES,
    "Bytes in completed ranges of UMBP transfers, by operation.",
    labels=_UMBP_LABELS,
    since="0.33",
    needs=_UMBP,
    evidence=Provenance.SOURCE,
    notes=("Failed transfers have no bytes.",),
)
MOONCAKE_STORE_OPERATION_TIME = Metric(
    "vllm:mooncake_store_operation_time_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Duration of one call to the Mooncake store, by operation and status.",
    labels=_OPERATION,
    since="0.23",
    needs=_MOONCAKE,
    evidence=Provenance.SOURCE,
    notes=("Bounds end at 4 s.",),
)
MOONCAKE_STORE_OPERATION = Metric(
    "vllm:mooncake_store_operation_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Calls to the Mooncake store, by operation and status.",
    labels=_OPERATION,
    since="0.23",
    needs=_MOONCAKE,
    evidence=Provenance.SOURCE,
    notes=("Equals the _count of mooncake_store_operation_time_seconds.",),
)
MOONCAKE_STORE_OPERATION_KEYS = Metric(
    "vllm:mooncake_store_operation_keys_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Keys touched by calls to the Mooncake store.",
    labels=_OPERATION,
    since="0.23",
    needs=_MOONCAKE,
    evidence=Provenance.SOURCE,
    notes=("Failed keys are included.",),
)
MOONCAKE_STORE_OPERATION_BYTES = Metric(
    "vllm:mooncake_store_operation_bytes_total",
    Kind.COUNTER,
    Unit.BYTES,
    "Bytes moved by calls to the Mooncake store.",
    labels=_OPERATION,
    since="0.23",
    needs=_MOONCAKE,
    evidence=Provenance.SOURCE,
    notes=("Select the operation: loads and stores share the family.",),
)
MOONCAKE_STORE_OPERATION_FAILED_KEYS = Metric(
    "vllm:mooncake_store_operation_failed_keys_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Keys for which a call to the Mooncake store failed.",
    labels=_OPERATION,
    since="0.23",
    needs=_MOONCAKE,
    evidence=Provenance.SOURCE,
    notes=("A subset of mooncake_store_operation_keys_total.",),
)
HF3FS_SAVE_DURATION = Metric(
    "vllm:hf3fs_save_duration_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Duration of one successful save to 3FS.",
    since="0.23",
    needs=_HF3FS,
    evidence=Provenance.SOURCE,
    notes=("Failed saves leave no sample.",),
)
HF3FS_LOAD_DURATION = Metric(
    "vllm:hf3fs_load_duration_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Duration of one successful load from 3FS.",
    since="0.23",
    needs=_HF3FS,
    evidence=Provenance.SOURCE,
    notes=("Failed loads leave no sample.",),
)
HF3FS_NUM_FAILED_SAVE = Metric(
    "vllm:hf3fs_num_failed_save_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Saves to 3FS that failed.",
    since="0.23",
    needs=_HF3FS,
    evidence=Provenance.SOURCE,
    notes=("A failed save loses a later hit, not a request.",),
)
HF3FS_NUM_FAILED_LOAD = Metric(
    "vllm:hf3fs_num_failed_load_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Loads from 3FS that failed.",
    since="0.23",
    needs=_HF3FS,
    evidence=Provenance.SOURCE,
    notes=("The blocks must be computed again.",),
)

# HTTP: responses of the API server, rejected requests included
_WEBSOCKET = "a realtime (WebSocket) route"
WEBSOCKET_CONNECTIONS_ACTIVE = Metric(
    "vllm:websocket_connections_active",
    Kind.GAUGE,
    Unit.COUNT,
    "Open WebSocket connections.",
    labels=(),
    since="0.18",
    needs=_WEBSOCKET,
    evidence=Provenance.SOURCE,
    notes=("No labels, not even model_name.",),
)
WEBSOCKET_CONNECTIONS = Metric(
    "vllm:websocket_connections_total",
    Kind.COUNTER,
    Unit.COUNT,
    "WebSocket connections accepted so far.",
    labels=(),
    since="0.18",
    needs=_WEBSOCKET,
    evidence=Provenance.SOURCE,
    notes=("No labels, not even model_name.",),
)
WEBSOCKET_CONNECTION_DURATION = Metric(
    "vllm:websocket_connection_duration_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Duration of closed WebSocket connections.",
    labels=(),
    since="0.18",
    needs=_WEBSOCKET,
    evidence=Provenance.SOURCE,
    notes=("One sample per closed connection: open ones leave none.",),
)
_NO_MODEL = "One API server, all its models: no model_name and no engine."
_EXCLUDED = "Leaves out /metrics, /health, /load, /ping, /version and /server_info; an unknown path has handler 'none'."
_FROM_START = "Declared from the start, without samples until the first request."
HTTP_REQUESTS = Metric(
    "http_requests_total",
    Kind.COUNTER,
    Unit.REQUESTS,
    "HTTP requests by handler, method and status class: the only metric with 4xx and 5xx responses.",
    labels=("handler", "method", "status"),
    since="0.8.3",
    notes=(
        "status is a class such as 2xx, not a code.",
        "A stream that is rejected or fails after its start counts as 2xx; so does a client disconnect.",
        "Some 4xx responses were counted as 5xx until July 2026 (#44303).",
        _EXCLUDED,
        _FROM_START,
        _NO_MODEL,
    ),
)
# Matchers for inference requests, and for their status. A 4xx is the client's fault and counts neither as failed nor as
# ended, like a rejection in the request log. `5..` matches the class 5xx and single codes.
HTTP_INFERENCE = ('method="POST"', 'handler=~"/v1/.*"')
HTTP_FAILED, HTTP_ENDED = ('status=~"5.."',), ('status=~"2..|5.."',)
HTTP_REQUEST_DURATION = Metric(
    "http_request_duration_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "HTTP response time by handler; only coarse bounds (0.1, 0.5 and 1 s).",
    labels=("handler", "method"),
    since="0.8.3",
    notes=("For quantiles use the highr twin, which has no labels.", _EXCLUDED, _FROM_START, _NO_MODEL),
)
HTTP_REQUEST_DURATION_HIGHR = Metric(
    "http_request_duration_highr_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "HTTP response time over all handlers, with 21 bounds from 0.01 to 60 s.",
    labels=(),
    since="0.8.3",
    notes=(_EXCLUDED, _NO_MODEL),
)
HTTP_REQUEST_SIZE = Metric(
    "http_request_size_bytes",
    Kind.SUMMARY,
    Unit.BYTES,
    "Size of HTTP request bodies, by handler: a count and a sum.",
    labels=("handler",),
    since="0.8.3",
    notes=(_FROM_START, _NO_MODEL, NOT_RUST),
)
HTTP_RESPONSE_SIZE = Metric(
    "http_response_size_bytes",
    Kind.SUMMARY,
    Unit.BYTES,
    "Size of HTTP response bodies, by handler: a count and a sum.",
    labels=("handler",),
    since="0.8.3",
    notes=("A stream has no Content-Length and counts as 0 bytes.", _FROM_START, _NO_MODEL, NOT_RUST),
)

# Process: the API server, not the engine or the GPU
_ONE_PROCESS = (
    "Absent with more than one API server process or data parallelism (--api-server-count, --data-parallel-size"
    " above 1)."
)
_API_ONLY = "The API server only: engine and workers are processes of their own."
PROCESS_CPU = Metric(
    "process_cpu_seconds_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "CPU time of the API server; near one core it delays every stream.",
    labels=(),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PROCESS_RESIDENT_MEMORY = Metric(
    "process_resident_memory_bytes",
    Kind.GAUGE,
    Unit.BYTES,
    "Resident memory of the API server.",
    labels=(),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PROCESS_VIRTUAL_MEMORY = Metric(
    "process_virtual_memory_bytes",
    Kind.GAUGE,
    Unit.BYTES,
    "Virtual memory of the API server; a poor measure of real use.",
    labels=(),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PROCESS_START_TIME = Metric(
    "process_start_time_seconds",
    Kind.GAUGE,
    Unit.TIMESTAMP,
    "Start time of the API server; a new value is a restart.",
    labels=(),
    across=Across.MAX,
    notes=(_ONE_PROCESS, "In that case detect restarts by counter resets."),
)
PROCESS_OPEN_FDS = Metric(
    "process_open_fds",
    Kind.GAUGE,
    Unit.COUNT,
    "Open file descriptors of the API server; each open stream takes one.",
    labels=(),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PROCESS_MAX_FDS = Metric(
    "process_max_fds",
    Kind.GAUGE,
    Unit.COUNT,
    "Limit of open file descriptors of the API server.",
    labels=(),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PYTHON_GC_COLLECTIONS = Metric(
    "python_gc_collections_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Garbage collections of the API server, by generation; each one of the oldest generation pauses every stream.",
    labels=("generation",),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PYTHON_GC_OBJECTS_COLLECTED = Metric(
    "python_gc_objects_collected_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Objects freed by garbage collection in the API server.",
    labels=("generation",),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PYTHON_GC_OBJECTS_UNCOLLECTABLE = Metric(
    "python_gc_objects_uncollectable_total",
    Kind.COUNTER,
    Unit.ITEMS,
    "Objects that garbage collection could not free: a leak.",
    labels=("generation",),
    notes=(_API_ONLY, _ONE_PROCESS),
)
PYTHON_INFO = Metric(
    "python_info",
    Kind.INFO,
    Unit.NONE,
    "Python version of the API server.",
    labels=("implementation", "major", "minor", "patchlevel", "version"),
    across=Across.MAX,
    notes=(_ONE_PROCESS,),
)

# Retired: old names, so that queries cover older releases and dead queries can be explained
_V0 = ("model_name",)
GPU_CACHE_USAGE = Metric(
    "vllm:gpu_cache_usage_perc",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of KV cache blocks in use, 0 to 1; now kv_cache_usage_perc.",
    across=Across.MEAN,
    since="0.2.3",
    until="0.12",
    notes=("Exposed with its successor from 0.9.2 on, so never add the two.", _HIDDEN, _RATIO_MEAN),
)
GPU_PREFIX_CACHE_QUERIES = Metric(
    "vllm:gpu_prefix_cache_queries_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens looked up in the prefix cache; now prefix_cache_queries_total.",
    since="0.7.3",
    until="0.12",
    notes=("Blocks up to 0.8.x, tokens since 0.9 (#18003).", _HIDDEN),
)
GPU_PREFIX_CACHE_HITS = Metric(
    "vllm:gpu_prefix_cache_hits_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Prompt tokens found in the prefix cache; now prefix_cache_hits_total.",
    since="0.7.3",
    until="0.12",
    notes=("Blocks up to 0.8.x, tokens since 0.9 (#18003).", _HIDDEN),
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:time_per_output_token_seconds",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time between two outputs of the engine for the same request; now inter_token_latency_seconds.",
    since="0.3.1",
    until="0.15",
    notes=("request_time_per_output_token_seconds is another quantity: one mean per request.", _HIDDEN),
)
PROMPT_TOKENS_RECOMPUTED = Metric(
    "vllm:prompt_tokens_recomputed_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Cached prompt tokens that were recomputed; no successor.",
    since="0.16",
    until="0.20",
    evidence=Provenance.SOURCE,
    notes=("Removed without deprecation (#38709).",),
)
NUM_REQUESTS_SWAPPED = Metric(
    "vllm:num_requests_swapped",
    Kind.GAUGE,
    Unit.REQUESTS,
    "Requests swapped out to CPU memory; no successor.",
    labels=_V0,
    since="0.2.3",
    until="0.9.1",
    evidence=Provenance.SOURCE,
    notes=(_NO_SWAP,),
)
CPU_CACHE_USAGE = Metric(
    "vllm:cpu_cache_usage_perc",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the CPU swap cache in use, 0 to 1; no successor.",
    labels=_V0,
    across=Across.MEAN,
    since="0.2.3",
    until="0.9.1",
    evidence=Provenance.SOURCE,
    notes=(_NO_SWAP, "kv_offload_cpu_cache_usage_perc is another quantity."),
)
GPU_PREFIX_CACHE_HIT_RATE = Metric(
    "vllm:gpu_prefix_cache_hit_rate",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of prefix cache lookups that hit; now the ratio of prefix_cache_hits_total and prefix_cache_queries_total.",
    labels=_V0,
    across=Across.MEAN,
    since="0.5.5",
    until="0.9.1",
    evidence=Provenance.SOURCE,
    notes=("A ready-made ratio hides how many lookups it stands for.",),
)
CPU_PREFIX_CACHE_HIT_RATE = Metric(
    "vllm:cpu_prefix_cache_hit_rate",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of lookups in the CPU swap cache that hit; no successor.",
    labels=_V0,
    across=Across.MEAN,
    since="0.5.5",
    until="0.9.1",
    evidence=Provenance.SOURCE,
    notes=(_NO_SWAP,),
)
TIME_IN_QUEUE_REQUESTS = Metric(
    "vllm:time_in_queue_requests",
    Kind.HISTOGRAM,
    Unit.SECONDS,
    "Time that requests waited before scheduling; now request_queue_time_seconds.",
    labels=_V0,
    since="0.6.4",
    until="0.9.1",
    evidence=Provenance.SOURCE,
    notes=("Existed with request_queue_time_seconds, which covers the same releases.",),
)
MODEL_FORWARD_TIME = Metric(
    "vllm:model_forward_time_milliseconds",
    Kind.HISTOGRAM,
    Unit.NONE,
    "Time of the model's forward pass, in milliseconds; no successor.",
    labels=_V0,
    since="0.6.4",
    until="0.9.1",
    evidence=Provenance.SOURCE,
    notes=("Milliseconds, unlike every other family.",),
)
MODEL_EXECUTE_TIME = Metric(
    "vllm:model_execute_time_milliseconds",
    Kind.HISTOGRAM,
    Unit.NONE,
    "Time to execute the model with sampling, in milliseconds; no successor.",
    labels=_V0,
    since="0.6.4",
    until="0.9.1",
    evidence=Provenance.SOURCE,
    notes=("Milliseconds, unlike every other family.",),
)
SPEC_DECODE_DRAFT_ACCEPTANCE_RATE = Metric(
    "vllm:spec_decode_draft_acceptance_rate",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of drafted tokens accepted; now the ratio of the accepted and draft token counters.",
    labels=_V0,
    across=Across.MEAN,
    since="0.5.3",
    until="0.10",
    needs="speculative decoding in the V0 engine",
    evidence=Provenance.SOURCE,
    notes=("Removed with the V0 engine (#21152).",),
)
SPEC_DECODE_EFFICIENCY = Metric(
    "vllm:spec_decode_efficiency",
    Kind.GAUGE,
    Unit.RATIO,
    "Tokens emitted against the most that drafting could have emitted; no successor.",
    labels=_V0,
    across=Across.MEAN,
    since="0.5.3",
    until="0.10",
    needs="speculative decoding in the V0 engine",
    evidence=Provenance.SOURCE,
    notes=("Removed with the V0 engine (#21152).",),
)
SPEC_DECODE_NUM_EMITTED_TOKENS = Metric(
    "vllm:spec_decode_num_emitted_tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Tokens emitted under speculative decoding; now accepted tokens plus drafts.",
    labels=_V0,
    since="0.5.3",
    until="0.10",
    needs="speculative decoding in the V0 engine",
    evidence=Provenance.SOURCE,
    notes=("Removed with the V0 engine (#21152).",),
)
AVG_PROMPT_THROUGHPUT = Metric(
    "vllm:avg_prompt_throughput_toks_per_s",
    Kind.GAUGE,
    Unit.NONE,
    "Prompt tokens per second as vLLM averaged them; now the rate of prompt_tokens_total.",
    labels=_V0,
    since="0.2.3",
    until="0.7",
    evidence=Provenance.SOURCE,
    notes=("Removed in 0.7.0 (#12383); alerts on it are still in circulation.",),
)
AVG_GENERATION_THROUGHPUT = Metric(
    "vllm:avg_generation_throughput_toks_per_s",
    Kind.GAUGE,
    Unit.NONE,
    "Generated tokens per second as vLLM averaged them; now the rate of generation_tokens_total.",
    labels=_V0,
    since="0.2.3",
    until="0.7",
    evidence=Provenance.SOURCE,
    notes=("Removed in 0.7.0 (#12383); alerts on it are still in circulation.",),
)
REQUEST_PARAMS_BEST_OF = Metric(
    "vllm:request_params_best_of",
    Kind.HISTOGRAM,
    Unit.COUNT,
    "Value of best_of in requests; no successor.",
    labels=_V0,
    since="0.4.2",
    until="0.6.3",
    evidence=Provenance.SOURCE,
    notes=("Removed with the parameter (#9261).",),
)
TOKENS = Metric(
    "vllm:tokens_total",
    Kind.COUNTER,
    Unit.TOKENS,
    "Meant to count prompt and generated tokens together; now the sum of prompt_tokens_total and"
    " generation_tokens_total.",
    labels=_V0,
    since="0.6.4",
    until="0.8",
    evidence=Provenance.SOURCE,
    notes=("Never filled: always 0 (#14134).",),
)

# Collected from the constants above, in file order, so that none can be forgotten.
_ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
RETIRED: tuple[Metric, ...] = tuple(metric for metric in _ALL if metric.until is not None)
VLLM: tuple[Metric, ...] = tuple(metric for metric in _ALL if metric.name.startswith("vllm:") and metric.until is None)
BESIDE: tuple[Metric, ...] = tuple(metric for metric in _ALL if not metric.name.startswith("vllm:"))

# Names that guides, dashboards and alerts use although no release had them, and the replacement.
NEVER_EXISTED: dict[str, str] = {
    "vllm:cache_hit_tokens_total": (
        "vllm:prefix_cache_hits_total over vllm:prefix_cache_queries_total, or vllm:prompt_tokens_cached_total"
    ),
    "vllm:prefix_cache_hit_tokens_total": "vllm:prefix_cache_hits_total, which counts tokens",
    "vllm:gpu_prefix_cache_hit_rate_perc": (
        "vllm:prefix_cache_hits_total over vllm:prefix_cache_queries_total, as rates"
    ),
    "vllm:request_failure_counter": (
        "vllm:request_success_total with finished_reason error, and http_requests_total with status 4xx or 5xx"
    ),
    "vllm:request_counter": "vllm:request_success_total summed over finished_reason, or http_requests_total",
    "vllm:num_total_requests": "vllm:request_success_total summed over finished_reason, or http_requests_total",
    "vllm:num_aborted_requests": (
        "the _count of vllm:time_to_first_token_seconds less that of vllm:e2e_request_latency_seconds;"
        " vllm:request_success_total with finished_reason abort misses client disconnects"
    ),
    "vllm:request_latency_seconds": "vllm:e2e_request_latency_seconds; the name belongs to a router in front of vLLM",
    "vllm:request_num_preemptions_total": "vllm:num_preemptions_total, or the histogram vllm:request_num_preemptions",
    "vllm:gpu_memory_usage_bytes": "a GPU exporter: vLLM exposes no GPU memory",
    "vllm:gpu_memory_total_bytes": "a GPU exporter: vLLM exposes no GPU memory",
}
