"""Rows of late first tokens."""

from __future__ import annotations

from exporters.catalogue import promql, vllm
from stack.doctor.matrix.expressions import (
    FAR_LONGER,
    HITS,
    PREFILL_TIME,
    PROMPTS,
    QUEUE_TIME,
    TOKEN_GAPS,
    TTFT,
    percentile,
)
from stack.doctor.matrix.symptom import ExperimentTemplate, Proof, Symptom

PREFILL: tuple[Symptom, ...] = (
    Symptom(
        name="head-of-line-first",
        label="head-of-line",
        area="prefill",
        symptom=(
            "Most first tokens are early and a tail is many times later, while a few prompts are far longer than the"
            " rest."
        ),
        cause=(
            "A long prompt takes what is left of every step until it is computed; requests that come meanwhile wait"
            " behind it."
        ),
        asks=(
            f"{percentile(99, vllm.TIME_TO_FIRST_TOKEN)} / ({percentile(50, vllm.TIME_TO_FIRST_TOKEN)} > 0)",
            FAR_LONGER,
        ),
        lever="Cap a long prompt's part of a step: `--long-prefill-token-threshold` at a quarter of what a step holds.",
        second=(
            "An engine of their own for long prompts; then disaggregated prefill (`--kv-transfer-config`), which is"
            " experimental."
        ),
        risk="The long prompts' own first tokens come later; four of them at once fill the step again.",
        proof=Proof(
            "ttft_ms",
            "falls",
            "tokens_per_second",
            "long-prefill-token-threshold 0 -> NEW",
            "long-prefill-token-threshold=0->NEW",
            ExperimentTemplate("head-of-line", "", "--long-prefill-token-threshold NEW"),
        ),
        pages=("VLLMTTFTBudgetSlowBurn", "VLLMTTFTBudgetBurn"),
        dated=(
            "Chunked prefill is on by default in current vLLM, and by itself it does not help here: what runs is served"
            " first, so the next part of the long prompt goes before every prompt that waits. Smaller steps"
            " (`--max-num-batched-tokens`) do not change that."
        ),
    ),
    Symptom(
        name="head-of-line",
        area="prefill",
        symptom=(
            "Answers pause now and then for many times the usual gap, while a few prompts are far longer than the rest."
        ),
        cause=(
            "The prefill of a long prompt fills whole steps, and requests in decode meanwhile get one token a step."
        ),
        asks=(
            f"{percentile(99, vllm.INTER_TOKEN_LATENCY)} / ({percentile(50, vllm.INTER_TOKEN_LATENCY)} > 0)",
            FAR_LONGER,
        ),
        lever="Smaller steps: `--max-num-batched-tokens` half of what it is, not below the number of sequences.",
        second=(
            "`--long-prefill-token-threshold`, which caps a long prompt's part of a step; from vLLM 0.33 on"
            " `--prefill-schedule-interval 2`, which keeps every other step free of prompts; then an engine of their"
            " own for long prompts, or disaggregated prefill (`--kv-transfer-config`), which is experimental."
        ),
        risk="The long prompts' own first tokens come later; steps that are too small cost throughput.",
        proof=Proof(
            "tpot_ms",
            "falls",
            "tokens_per_second",
            "max-num-batched-tokens OLD -> NEW",
            "max-num-batched-tokens=OLD->NEW",
            ExperimentTemplate("head-of-line", "--max-num-batched-tokens OLD", "--max-num-batched-tokens NEW"),
        ),
        pages=("VLLMInterTokenBudgetBurn", "VLLMInterTokenLatencyHigh"),
        dated=(
            "Chunked prefill is on by default in current vLLM, so switching it on is no lever; where an engine runs"
            " with `--no-enable-chunked-prefill`, that goes first, because prompts are not cut at all there."
        ),
    ),
    Symptom(
        name="cache-off",
        area="prefill",
        symptom="First tokens cost a whole prefill each, and the prefix cache is switched off.",
        cause=(
            "It runs with `--no-enable-prefix-caching`, which is not the default, or with a model for which vLLM leaves"
            " it off: what prompts share is computed again for each."
        ),
        asks=(
            f"group by (instance, enable_prefix_caching) ({promql.series(vllm.CACHE_CONFIG_INFO)})",
            PREFILL_TIME,
            PROMPTS,
        ),
        lever="Switch it on: `--enable-prefix-caching`, the default of current vLLM.",
        second="Shorter prompts, or what they share at their beginning.",
        risk=(
            "Prompts that share nothing gain nothing; blocks that are kept for reuse are given up first, so nothing is"
            " lost either. Where vLLM left it off by itself (its log at the start says so) the model does not support"
            " it: leave it."
        ),
        proof=Proof(
            "ttft_ms",
            "falls",
            "tpot_ms",
            "prefix caching on",
            "enable-prefix-caching=off->on",
            ExperimentTemplate("shared-prefix", "--no-enable-prefix-caching", "--enable-prefix-caching"),
        ),
        pages=("VLLMTTFTBudgetBurn", "VLLMCacheHitsCollapsed"),
        dated=("Older guides have one switch the cache on; it is on by default now, so off means switched off."),
    ),
    Symptom(
        name="small-steps",
        area="prefill",
        symptom="Long prompts are computed in many small steps.",
        cause="`--max-num-batched-tokens` is low: each step has a fixed cost and reads all weights, for few tokens.",
        asks=(TTFT, PREFILL_TIME, PROMPTS, TOKEN_GAPS, promql.mean(vllm.ITERATION_TOKENS)),
        lever="Larger steps: `--max-num-batched-tokens` at 2048, or twice what it is.",
        second="What prompts share first, so that the prefix cache has it; fewer prompt tokens.",
        risk=(
            "Answers that run beside a long prompt get longer gaps between their tokens, as a step takes longer; more"
            " memory for activations."
        ),
        proof=Proof(
            "ttft_ms",
            "falls",
            "tpot_ms",
            "max-num-batched-tokens OLD -> NEW",
            "max-num-batched-tokens=OLD->NEW",
            ExperimentTemplate("rag", "--max-num-batched-tokens OLD", "--max-num-batched-tokens NEW"),
        ),
        pages=("VLLMTTFTBudgetBurn", "VLLMTTFTHigh"),
        dated=(
            "The page does not show the size of a step: it is worked out from gaps between tokens, and only while"
            " others are answered."
        ),
    ),
    Symptom(
        name="unique-prompts",
        area="prefill",
        symptom="The prefix cache is on and nearly nothing is found in it.",
        cause=(
            "Prompts differ from their first block on: a date, an id or a user's name at the beginning, new documents"
            " each time, or a round robin over engines that each hold another part. Or they are shorter than a block."
        ),
        asks=(HITS, PREFILL_TIME, PROMPTS),
        lever="Put what prompts share at their beginning, byte for byte, and what changes at their end.",
        second="Fewer or shorter documents in a prompt; in the balancer, a conversation stays on one engine.",
        risk=(
            "Another order of the prompt can change answers: check them ([quality](quality.md)). Where nothing is"
            " shared nothing can be gained, and the cache costs next to nothing: leave it on."
        ),
        proof=Proof("hit_ratio", "rises", "error_ratio", "what is shared stands first in the prompt"),
        pages=("VLLMCacheHitsCollapsed", "VLLMTTFTHigh"),
        dated=(
            "No release has a series called cache_hit_tokens; hits and lookups are two counters of tokens, and both end"
            " in `_total`."
        ),
    ),
    Symptom(
        name="prefill-bound",
        area="prefill",
        symptom="First tokens are late, most of that is prefill, and the cache does its part.",
        cause="Prompts are long for this engine: computing them takes longer than their users wait.",
        asks=(TTFT, PREFILL_TIME, QUEUE_TIME, PROMPTS),
        lever="Send fewer prompt tokens: fewer documents, a shorter history, a shorter list of tools.",
        second=(
            "`--max-num-batched-tokens` a step up, which lengthens the gaps between tokens; then more engines, or"
            " disaggregated prefill (`--kv-transfer-config`), which is experimental."
        ),
        risk="What was left out of a prompt may be what made the answer good: check answers ([quality](quality.md)).",
        proof=Proof("ttft_ms", "falls", "error_ratio", "documents in a prompt OLD -> NEW", "documents=OLD->NEW"),
        pages=("VLLMTTFTBudgetBurn", "VLLMTTFTHigh"),
        dated=(
            "Chunked prefill and prefix caching are on by default in current vLLM; neither shortens the computing of"
            " one long new prompt."
        ),
    ),
    Symptom(
        name="api-server-bound",
        area="API",
        symptom="First tokens are late, and queue and prefill together are less than half of that wait.",
        cause=(
            "The time goes before the engine's core sees the request: tokenizing, chat templates and images on an API"
            " server whose CPU is full."
        ),
        asks=(
            promql.mean(vllm.TIME_TO_FIRST_TOKEN),
            QUEUE_TIME,
            PREFILL_TIME,
            promql.per_second(vllm.PROCESS_CPU, by=("instance",)),
        ),
        lever="Look at the CPU of the engine's API server, and give it more of them: `--renderer-num-workers` 4.",
        second="`--api-server-count` 2, where one process is at a whole core.",
        risk=(
            "More workers take cores that the engine's own loop needs as well; with several API servers the process_"
            " series vanish from its page."
        ),
        proof=Proof(
            "ttft_ms",
            "falls",
            "tpot_ms",
            "renderer-num-workers 1 -> 4",
            "renderer-num-workers=1->4",
            ExperimentTemplate("short-short", "--renderer-num-workers 1", "--renderer-num-workers 4"),
        ),
        pages=("VLLMTTFTBudgetBurn",),
    ),
)
