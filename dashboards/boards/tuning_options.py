"""Dashboard Tuning options: evidence for each engine option that can be changed. One row for each, with what shows
whether it works; first the effects they are pulled for."""

from __future__ import annotations

from alerts import thresholds
from dashboards import queries
from dashboards.boards.kv_cache import OFFLOAD
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import promql, sidecar, vllm
from exporters.catalogue.metric import Metric, Unit

_SPECULATIVE = "Speculative decoding is off: start vLLM with --speculative-config."
_TOOLS = "No tool call was parsed: start vLLM (0.24 or later) with --enable-auto-tool-choice and --tool-call-parser."
_LORA = "LoRA is off: start vLLM with --enable-lora."
_MFU = "Estimates are off: start vLLM (0.17 or later) with --enable-mfu-metrics."
_DIFFUSION = "No diffusion language model runs: serve one with vLLM 0.24 or later."
_MOONCAKE = (
    "No Mooncake store is used: start vLLM (0.23 or later) with --kv-transfer-config and the MooncakeStoreConnector."
)
_HF3FS = "No 3FS is used: start vLLM (0.23 or later) with --kv-transfer-config and the HF3FSKVConnector."


def _speed(metric: Metric, by: tuple[str, ...] = promql.BY) -> str:
    return promql.per_second(metric, RATE, by, queries.where(metric))


def _split(part: Metric, label: str, whole: Metric, called: str = "", by: tuple[str, ...] = promql.BY) -> Query:
    """Return the share of each value of a label, 0 to 1; absent while the whole stands still."""
    expr = promql.per(_speed(part, (*by, label)), _speed(whole, by), by)
    return Query(expr, queries.legend((label, *by), called), shown_unit(Unit.RATIO))


def _per_draft() -> Query:
    """The model adds one token of its own to those it accepts."""
    accepted = promql.per(_speed(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS), _speed(vllm.SPEC_DECODE_NUM_DRAFTS))
    return Query(f"1 + {accepted}", queries.legend(promql.BY), shown_unit(Unit.TOKENS))


def _per_byte() -> Query:
    moved = f"({_speed(vllm.ESTIMATED_READ_BYTES_PER_GPU)} + {_speed(vllm.ESTIMATED_WRITE_BYTES_PER_GPU)})"
    return Query(
        promql.per(_speed(vllm.ESTIMATED_FLOPS_PER_GPU), moved), queries.legend(promql.BY), shown_unit(Unit.NONE)
    )


def _estimate(metric: Metric, called: str = "") -> Query:
    """Per GPU already, so one line for each engine; it stands at 0 while the estimate is off, which is no figure."""
    return Query(
        f"{_speed(metric, promql.EACH)} > 0",
        queries.legend(promql.EACH, called),
        shown_unit(metric.unit, per_second=True),
    )


def _adapters() -> Query:
    """The newest combination of each engine, older ones stay on the page. Several API servers add their times up: an
    age is never below 0."""
    labels = ("instance", "running_lora_adapters", "waiting_lora_adapters", "max_lora")
    newest = (
        "topk by (instance) (1,"
        f" {promql.worst(vllm.LORA_REQUESTS_INFO, labels, queries.where(vllm.LORA_REQUESTS_INFO))})"
    )
    return Query(f"clamp_min(time() - {newest}, 0)", "last reported", shown_unit(Unit.SECONDS))


def _deferred() -> Query:
    return queries.now(vllm.NUM_REQUESTS_WAITING_BY_REASON, called="deferred", only=('reason="deferred"',))


BOARD = Dashboard(
    slug="tuning-options",
    title="vLLM / Tuning options",
    question="Which engine option is worth changing, and did the last change help?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "ttft-p95",
                    "Time to first token, p95",
                    "What prefix caching, chunked prefill, admission limits and separate prefill engines are pulled"
                    " for. A request that never gets a first token adds no sample.",
                    "Under the dashed line; for chat under 2 s.",
                    "Queue time high: batching and admission. Queue time low: shorten prompts, or see prefix caching.",
                    (queries.p95(vllm.TIME_TO_FIRST_TOKEN),),
                    threshold=thresholds.TTFT_P95,
                    detail="latency",
                ),
                Panel(
                    "itl-p95",
                    "Inter-token latency, p95",
                    "What speculative decoding, chunked prefill and smaller batches are pulled for. One gap may bring"
                    " several tokens under speculative decoding; below 10 ms, vLLM's first bound, it says < 10 ms.",
                    "Steady; 50 ms is twenty tokens a second, faster than anyone reads.",
                    "p99 far above p50: chunked prefill. All high: a smaller batch, speculative decoding, quantisation,"
                    " or a smaller model.",
                    (queries.p95(vllm.INTER_TOKEN_LATENCY),),
                    detail="latency",
                ),
                Panel(
                    "generation-throughput",
                    "Generation throughput",
                    "What batching is pulled for: tokens generated per second, all engines of a model together. On its"
                    " own it says nothing about what a user feels, and it falls with demand as well.",
                    "Rises with requests running.",
                    "Flat while requests running grow: the GPU is the limit and a larger batch only adds latency."
                    " Assess one change at a time, on the Tuning board.",
                    (queries.rate(vllm.GENERATION_TOKENS),),
                    detail="tuning",
                ),
            ),
        ),
        DashboardRow(
            "Prefix caching",
            (
                Panel(
                    "prefix-hit-ratio",
                    "Prefix cache hit ratio",
                    "Share of looked-up prompt tokens found in the cache. It saves prefill and nothing else: decoding a"
                    " long unique reply takes as long as before.",
                    "70 to 95 % for agents that resend one long prompt, 30 to 60 % for a shared system prompt, under 15"
                    " % where prompts bring new documents.",
                    "Near zero: prompts differ early, or share less than one block. Move what changes to the end of the"
                    " prompt; see the KV cache board.",
                    (queries.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES),),
                    detail="kv-cache",
                ),
                Panel(
                    "prefill-computed",
                    "Prompt tokens: all and computed, mean per request",
                    "Mean prompt of a finished request, and the part of it that had to be computed; between the lines"
                    " lies what the cache saved.",
                    "Computed is far below all.",
                    "Lines on top of each other: nothing is reused, so this lever does not help this traffic; look at"
                    " the other rows.",
                    (
                        queries.mean(vllm.REQUEST_PROMPT_TOKENS, called="all"),
                        queries.mean(vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS, called="computed"),
                    ),
                    detail="kv-cache",
                ),
                Panel(
                    "prefill-time",
                    "Prefill time, mean",
                    "Mean time from first scheduling to the first token: what a higher hit ratio should shorten. A"
                    " mean, because most prefills are shorter than the first bound of vLLM's histogram, 0.3 s.",
                    "Falls when the hit ratio rises.",
                    "It does not fall: prefills wait for each other. See tokens per step under chunked prefill.",
                    (queries.mean(vllm.REQUEST_PREFILL_TIME),),
                    detail="latency",
                ),
            ),
        ),
        DashboardRow(
            "Chunked prefill",
            (
                Panel(
                    "itl-p99-p50",
                    "Inter-token latency, p50 and p99",
                    "p50 is a step that only decodes; p99 is a step that also carried somebody's prompt. Their distance"
                    " is head-of-line blocking.",
                    "As a rule, p99 within five times p50.",
                    "p99 far above: lower max_num_batched_tokens, so that prompts come in smaller chunks. Too small a"
                    " chunk costs time to first token and throughput.",
                    (
                        queries.quantile(0.5, vllm.INTER_TOKEN_LATENCY, called="p50"),
                        queries.quantile(0.99, vllm.INTER_TOKEN_LATENCY, called="p99"),
                    ),
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "queue-time-p95",
                    "Queue time, p95",
                    "Waiting until first scheduled; short requests wait behind long prompts here. Below 0.3 s, vLLM's"
                    " first bound, it says < 300 ms.",
                    "Near zero.",
                    "High while the KV cache has room and p99 between tokens is high too: chunk prompts, or give long"
                    " ones engines of their own.",
                    (queries.p95(vllm.REQUEST_QUEUE_TIME),),
                    threshold=thresholds.QUEUE_TIME_P95,
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "prompt-length-p95",
                    "Prompt length, p50 and p95",
                    "Tokens in the prompts of finished requests. A p95 far above p50 is mixed traffic, the kind that"
                    " chunking is for.",
                    "Of one kind of traffic: p95 within a few times p50.",
                    "Longer prompts than max_num_batched_tokens take several steps; cap them at the gateway, or route"
                    " them apart.",
                    (
                        queries.quantile(0.5, vllm.REQUEST_PROMPT_TOKENS, called="p50"),
                        queries.p95(vllm.REQUEST_PROMPT_TOKENS, called="p95"),
                    ),
                    detail="latency",
                    width=6,
                ),
                Panel(
                    "tokens-per-step",
                    "Tokens per step, p50 and p95",
                    "Tokens in one step of the engine: p50 is mostly decoding, p95 are steps with prefill in them."
                    " max_num_batched_tokens caps it.",
                    "p95 below the cap.",
                    "p95 at the cap and p99 between tokens high: lower the cap. p95 at the cap, tokens smooth and first"
                    " tokens slow: raise it.",
                    (
                        queries.quantile(0.5, vllm.ITERATION_TOKENS, called="p50"),
                        queries.p95(vllm.ITERATION_TOKENS, called="p95"),
                    ),
                    detail="latency",
                    width=6,
                ),
            ),
        ),
        DashboardRow(
            "Batching and admission",
            (
                Panel(
                    "running-and-waiting",
                    "Requests running and waiting",
                    "Running ones share each step; waiting ones are accepted and not scheduled. max_num_seqs caps those"
                    " running on one engine.",
                    "Nobody waits for longer than a moment.",
                    "Running at max_num_seqs times the number of engines with room in the KV cache: raise it. Below"
                    " that with requests waiting: the KV cache is the limit.",
                    (
                        queries.now(vllm.NUM_REQUESTS_RUNNING, called="running"),
                        queries.now(vllm.NUM_REQUESTS_WAITING, called="waiting"),
                    ),
                    detail="kv-cache",
                    width=6,
                ),
                Panel(
                    "batch-fill",
                    "Tokens per step, mean",
                    "How full the batches are, prefill and decode together: more tokens per step is more work for one"
                    " reading of the weights.",
                    "Rises with requests running.",
                    "Low while requests wait: the scheduler holds them back. See waiting by reason on the KV cache"
                    " board.",
                    (queries.mean(vllm.ITERATION_TOKENS),),
                    detail="kv-cache",
                    width=6,
                ),
                Panel(
                    "preemptions",
                    "Preemptions per second",
                    "Running requests that lost their KV blocks and are computed again: the price of too large a"
                    " batch.",
                    "Zero.",
                    "Lower max_num_seqs, cap max_tokens, or enlarge the cache; the KV cache board says how much room"
                    " there is.",
                    (queries.rate(vllm.NUM_PREEMPTIONS),),
                    detail="kv-cache",
                    width=6,
                ),
                Panel(
                    "refused",
                    "Requests rejected by the engine",
                    "Refusals per second by --max-num-queued-reqs or --max-num-queued-tokens (vLLM 0.32). A refused"
                    " stream answers with status 200 and an error event, so HTTP statuses miss most of them. The"
                    " gateway's own refusals are on the Teams board.",
                    "Zero, or what you mean to refuse in a burst.",
                    "Refusing while the queue is short: the limit counts running requests too, so raise it above"
                    " max_num_seqs.",
                    (queries.rate(vllm.ADMISSION_REJECTIONS, ("model_name", "reason")),),
                    Shape.STACK,
                    detail="teams",
                    width=6,
                    optional="This vLLM does not count its refusals: 0.32 does.",
                ),
            ),
        ),
        DashboardRow(
            "Speculative decoding",
            (
                Panel(
                    "acceptance-ratio",
                    "Draft tokens accepted, share",
                    "Accepted tokens over drafted ones. What is drafted and refused was work for nothing.",
                    "As a rule above 60 % for a draft model; n-gram drafting lives with less, because its drafts cost"
                    " next to nothing.",
                    "Low: draft fewer tokens, take a better draft model, or switch it off; compare inter-token latency"
                    " on the Tuning board.",
                    (queries.share(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, vllm.SPEC_DECODE_NUM_DRAFT_TOKENS),),
                    detail="tuning",
                    optional=_SPECULATIVE,
                ),
                Panel(
                    "accepted-length",
                    "Tokens per draft, mean",
                    "1 + accepted tokens over drafts: what one pass of the large model yields to a request. 1 is no"
                    " gain.",
                    "2 or more; it is the most by which decoding can get faster, before the cost of drafting.",
                    "Near 1: the passes are not saved. With large batches the GPU has no time to spare for drafts:"
                    " switch it off under load.",
                    (_per_draft(),),
                    detail="tuning",
                    optional=_SPECULATIVE,
                ),
                Panel(
                    "acceptance-by-position",
                    "Acceptance by position in the draft",
                    "Share of drafts whose token at this position was accepted; positions count from 0 and each needs"
                    " the one before it.",
                    "Falls slowly with the position.",
                    "Where it drops below a third, drafting further does not pay: lower num_speculative_tokens to that"
                    " position.",
                    (
                        _split(
                            vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS,
                            "position",
                            vllm.SPEC_DECODE_NUM_DRAFTS,
                            "position",
                        ),
                    ),
                    detail="tuning",
                    optional=_SPECULATIVE,
                ),
            ),
        ),
        DashboardRow(
            "Structured outputs and tool calls",
            (
                Panel(
                    "finish-reasons",
                    "Finish reasons, shares",
                    "How replies ended inside the engine. length cuts a reply off, which breaks JSON in the middle;"
                    " clients that hang up are in none of them. vLLM counts no invalid JSON.",
                    "stop is nearly all; length is rare where replies are parsed.",
                    "length: raise max_tokens. error: read the engine's log. repetition: the model loops, look at"
                    " sampling and schema.",
                    (_split(vllm.REQUEST_SUCCESS, "finished_reason", vllm.REQUEST_SUCCESS),),
                    detail="teams",
                ),
                Panel(
                    "client-finish-reasons",
                    "Finish reasons at the client, shares",
                    "How replies ended as the gateway logged it: tool_calls is a call that the engine parsed, abort a"
                    " client that hung up, rejected a refusal. Choosing a team narrows this panel alone.",
                    "tool_calls is as frequent as your agents mean it to be.",
                    "tool_calls falls and stop rises: calls arrive as plain text, so compare chat template and"
                    " --tool-call-parser.",
                    (_split(sidecar.FINISHES, "finish_reason", sidecar.FINISHES),),
                    detail="teams",
                ),
                Panel(
                    "tool-parser",
                    "Tool-call parser outcomes, shares",
                    "Runs of the parser by outcome, within each mode: streams count once per piece of text, other"
                    " replies once, so the modes do not compare. An error inside the parser counts as no_tool_call.",
                    "Level; the value depends on how often your models should call.",
                    "no_tool_call grows in non-streaming mode: the model's format and --tool-call-parser do not fit, or"
                    " the schema is too strict for it.",
                    (
                        _split(
                            vllm.TOOL_CALL_PARSER_INVOCATIONS,
                            "outcome",
                            vllm.TOOL_CALL_PARSER_INVOCATIONS,
                            by=("model_name", "mode"),
                        ),
                    ),
                    detail="teams",
                    optional=_TOOLS,
                ),
            ),
        ),
        DashboardRow(
            "LoRA adapters",
            (
                Panel(
                    "lora-adapters",
                    "Adapters running and waiting, by engine",
                    "The newest set of adapters that each engine reports, how many it holds at once (max_lora), and how"
                    " long ago it last reported them. vLLM reports no traffic per adapter; with several API servers the"
                    " time means nothing.",
                    "Nothing under waiting.",
                    "Adapters wait: raise --max-loras if memory allows, or give busy adapters engines of their own.",
                    (_adapters(),),
                    Shape.TABLE,
                    width=16,
                    optional=_LORA,
                    lowest_first=True,
                ),
                Panel(
                    "lora-deferred",
                    "Requests deferred",
                    "Requests that wait although there is room: for a place among the loaded adapters, or for a KV"
                    " transfer.",
                    "Zero.",
                    "Above zero with idle room: too few adapters fit at once; with KV transfers, see the row below.",
                    (_deferred(),),
                    detail="kv-cache",
                    optional="vLLM reports why requests wait since 0.20: upgrade to see it.",
                ),
                Panel(
                    "lora-ttft",
                    "Time to first token by adapter, p95",
                    "Successful streams by LoRA adapter, as clients see it: the gateway's queue, the engine's queue and"
                    " prefill. Adapters of one model share its steps and its queue.",
                    "The lines of one model run close together.",
                    "One adapter is late while others are not: it is loaded and evicted in turns (raise --max-loras),"
                    " or its prompts are longer. `vllm-watch doctor --log` distinguishes the two (slow-adapter).",
                    queries.ranked_coarse_p95(sidecar.ADAPTER_TTFT, ("adapter", "model_name")),
                    detail="teams",
                    width=24,
                    ranked=True,
                    optional="No request named an adapter, or there is no request log: run gateway and sidecar.",
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "KV-cache offloading and stores",
            (
                Panel(
                    "offload-bytes",
                    "Offload traffic",
                    "Bytes of KV cache per second stored to CPU memory or below, and loaded back; more on the KV cache"
                    " board.",
                    "A good part of what is stored is loaded again.",
                    "Stores without loads: switch it off, or raise the reuse threshold.",
                    (
                        queries.rate(vllm.KV_OFFLOAD_LOAD_BYTES, called="load"),
                        queries.rate(vllm.KV_OFFLOAD_STORE_BYTES, called="store"),
                    ),
                    detail="kv-cache",
                    optional=OFFLOAD,
                ),
                Panel(
                    "mooncake-calls",
                    "Mooncake calls by operation and status",
                    "Calls to the store per second.",
                    "One status, that of success.",
                    "Another status: look at failed keys beside it, then at the store's own log.",
                    (queries.rate(vllm.MOONCAKE_STORE_OPERATION, ("operation", "status", "model_name")),),
                    Shape.STACK,
                    optional=_MOONCAKE,
                ),
                Panel(
                    "mooncake-time",
                    "Mooncake call, p95",
                    "Time of one call, by operation; the last bound is 4 s, so slower calls read 4 s.",
                    "Far below the prefill that a load saves.",
                    "Slow loads: see bytes per second beside it, then the network to the store.",
                    (queries.p95(vllm.MOONCAKE_STORE_OPERATION_TIME, ("operation", "model_name")),),
                    detail="latency",
                    optional=_MOONCAKE,
                ),
                Panel(
                    "mooncake-bytes",
                    "Mooncake traffic by operation",
                    "Bytes moved to and from the store per second.",
                    "Loads are worth the stores.",
                    "Stores without loads: the keys of the engines do not match, or nothing is asked for again.",
                    (queries.rate(vllm.MOONCAKE_STORE_OPERATION_BYTES, ("operation", "model_name")),),
                    optional=_MOONCAKE,
                ),
                Panel(
                    "mooncake-failed-keys",
                    "Mooncake keys failed, share",
                    "Share of the keys touched for which a call failed, by operation.",
                    "Zero.",
                    "On loads, the blocks are computed again; on stores, later hits are lost: look whether the store is"
                    " full or out of reach.",
                    (
                        queries.share(
                            vllm.MOONCAKE_STORE_OPERATION_FAILED_KEYS,
                            vllm.MOONCAKE_STORE_OPERATION_KEYS,
                            ("operation", "model_name"),
                        ),
                    ),
                    optional=_MOONCAKE,
                    full_scale=False,
                ),
                Panel(
                    "hf3fs-time",
                    "3FS save and load, p95",
                    "Time of one successful save or load; failed ones leave no sample.",
                    "A load takes far less than the prefill that it saves.",
                    "Slow loads: drop the tier, or look at the file system.",
                    (
                        queries.p95(vllm.HF3FS_SAVE_DURATION, called="save"),
                        queries.p95(vllm.HF3FS_LOAD_DURATION, called="load"),
                    ),
                    optional=_HF3FS,
                ),
                Panel(
                    "hf3fs-failures",
                    "3FS failures per second",
                    "Saves and loads that failed: a failed save loses a later hit, a failed load is computed again.",
                    "Zero.",
                    "Look at the file system: full, or out of reach.",
                    (
                        queries.rate(vllm.HF3FS_NUM_FAILED_SAVE, called="save"),
                        queries.rate(vllm.HF3FS_NUM_FAILED_LOAD, called="load"),
                    ),
                    optional=_HF3FS,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Arithmetic intensity (needs --enable-mfu-metrics)",
            (
                Panel(
                    "flops-per-byte",
                    "Operations per byte, estimated",
                    "Floating point operations over bytes read and written, from a formula of vLLM's and not from the"
                    " GPU. Not usable for MLA models before 0.24.",
                    "Near the ratio of the GPU's peaks, such as 200 for FP16 on an H200; decoding alone stays far"
                    " below it.",
                    "Far below: memory is the limit, so a larger batch or speculative decoding is nearly free. Above:"
                    " the arithmetic is the limit.",
                    (_per_byte(),),
                    detail="gpu",
                    optional=_MFU,
                ),
                Panel(
                    "flops",
                    "Operations per second and GPU, estimated",
                    "The same estimate per second, one line for each engine. Over the GPU's peak it is model FLOPs"
                    " utilisation (MFU).",
                    "As a rule 30 to 50 % of the peak in prefill, a few per cent while all decode.",
                    "Falls at the same batch: see the GPU's clocks.",
                    (_estimate(vllm.ESTIMATED_FLOPS_PER_GPU),),
                    detail="gpu",
                    optional=_MFU,
                ),
                Panel(
                    "bytes-moved",
                    "Bytes moved per second and GPU, estimated",
                    "Memory traffic by the same formula, one line for each engine.",
                    "Close to the memory's bandwidth while all decode: 4.8 TB/s on an H200.",
                    "Far below it with a small batch: the engine waits for its own front end; look at the CPU.",
                    (
                        _estimate(vllm.ESTIMATED_READ_BYTES_PER_GPU, "read"),
                        _estimate(vllm.ESTIMATED_WRITE_BYTES_PER_GPU, "write"),
                    ),
                    detail="gpu",
                    optional=_MFU,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Diffusion language models",
            (
                Panel(
                    "diffusion-committed",
                    "Canvas positions committed, share",
                    "Tokens made final over positions evaluated: what acceptance is to speculative decoding.",
                    "Level for one model and one setting.",
                    "Falls: more steps are spent on each token; compare the number of denoising steps.",
                    (queries.share(vllm.DIFFUSION_NUM_COMMITTED_TOKENS, vllm.DIFFUSION_NUM_CANVAS_POSITIONS),),
                    optional=_DIFFUSION,
                ),
                Panel(
                    "diffusion-steps",
                    "Denoising steps per second",
                    "Steps of a diffusion language model, all engines of a model together.",
                    "Follows demand.",
                    "Grows faster than tokens: quality settings changed, or the model got stuck.",
                    (queries.rate(vllm.DIFFUSION_NUM_DENOISING_STEPS),),
                    optional=_DIFFUSION,
                ),
            ),
            collapsed=True,
        ),
    ),
)
