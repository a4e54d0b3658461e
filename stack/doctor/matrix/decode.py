"""Rows of slow or pausing token generation."""

from __future__ import annotations

from exporters.catalogue import promql, vllm
from stack.doctor.matrix.expressions import ACCEPTED, RUNNING, TOKEN_GAPS
from stack.doctor.matrix.symptom import ExperimentTemplate, Proof, Symptom


def _drafting(tokens: int) -> str:
    return f"""--speculative-config '{{"method":"ngram","num_speculative_tokens":{tokens}}}'"""


DECODE: tuple[Symptom, ...] = (
    Symptom(
        name="prefill-interference",
        area="decode",
        symptom=(
            "Answers pause or come slowly, because the steps between their tokens compute the prompts of other"
            " requests."
        ),
        cause=(
            "A step gives each running answer one token and fills what is left of it with prompt tokens; the more of"
            " those, the longer the step."
        ),
        asks=(
            TOKEN_GAPS,
            promql.quantile(0.5, vllm.INTER_TOKEN_LATENCY),
            promql.mean(vllm.ITERATION_TOKENS),
            promql.per_second(vllm.PROMPT_TOKENS),
        ),
        lever=(
            "Smaller steps: `--max-num-batched-tokens` as many times smaller as the p95 of the gaps is over its limit,"
            " not below 512."
        ),
        second=(
            "Fewer prompt tokens: what prompts share first, so that the prefix cache has it. From vLLM 0.33 on,"
            " `--prefill-schedule-interval 2`: every other step computes no prompt. Then another engine."
        ),
        risk=(
            "More steps hold prompts, so first tokens come later and throughput falls (a CPU, 2,048 to 512: p95 of the"
            " gaps 36 to 23 ms, 8 % fewer tokens). Half as large may be too little: where a prompt was one step it is"
            " two, and the p95 rises. With an interval of N a prompt takes up to N times as many steps."
        ),
        proof=Proof(
            "inter_token_p95",
            "falls",
            "ttft_ms",
            "max-num-batched-tokens OLD -> NEW",
            "max-num-batched-tokens=OLD->NEW",
        ),
        pages=("VLLMInterTokenBudgetBurn", "VLLMInterTokenLatencyHigh"),
        dated=(
            "iteration_tokens_total counts a whole prompt in the step that gives its first token, so its buckets do not"
            " show the size of a step."
        ),
    ),
    Symptom(
        name="decode-bound",
        area="decode",
        symptom="Answers come slower than people read, with few of them at a time.",
        cause=(
            "Each step reads the whole model and the cache of everyone who runs: memory bandwidth is the limit, and few"
            " requests share it. Or the engine runs with `--enforce-eager`, or the GPU slows itself down for heat:"
            " rule out both first."
        ),
        asks=(TOKEN_GAPS, promql.per_second(vllm.GENERATION_TOKENS), RUNNING),
        lever="Several tokens a step: `--speculative-config` with n-gram drafts first, which need no second model.",
        second=(
            "Quantized weights (`--quantization`) or a smaller model after a check of quality; a GPU with more"
            " bandwidth."
        ),
        risk=(
            "Where few drafts are accepted, or many run at once, drafting costs more than it brings; the methods"
            " `ngram` and `suffix` switch asynchronous scheduling off (0.32)."
        ),
        proof=Proof(
            "tpot_ms",
            "falls",
            "tokens_per_second",
            "n-gram drafts on",
            "speculative-config=none->ngram",
            ExperimentTemplate("coding-qa", "", _drafting(4)),
        ),
        pages=("VLLMInterTokenBudgetBurn", "VLLMInterTokenLatencyHigh"),
        dated="The series is inter_token_latency_seconds; time_per_output_token_seconds is gone since 0.15.",
    ),
    Symptom(
        name="decode-drafted",
        label="decode-bound",
        area="decode",
        symptom="Answers come slower than people read, with few of them at a time, though tokens are drafted.",
        cause="The step itself is too long: it reads the whole model, however many tokens come of it.",
        asks=(promql.quantile(0.95, vllm.REQUEST_TIME_PER_OUTPUT_TOKEN), RUNNING, ACCEPTED),
        lever="Less to read in a step: quantized weights (`--quantization`) after a check of quality.",
        second="A smaller model, several GPUs (`--tensor-parallel-size`), or a GPU with more bandwidth.",
        risk=(
            "Answers may change with the weights ([quality](quality.md)); a draft that was made for the larger weights"
            " may be accepted less often."
        ),
        proof=Proof(
            "tpot_ms",
            "falls",
            "error_ratio",
            "weights in fp8",
            "quantization=none->fp8",
            ExperimentTemplate("coding-qa", "", "--quantization fp8"),
        ),
        pages=("VLLMInterTokenBudgetBurn", "VLLMInterTokenLatencyHigh"),
        dated=(
            "inter_token_latency_seconds has the time of a step, which brings several tokens when some are drafted; "
            "request_time_per_output_token_seconds has that of a token."
        ),
    ),
    Symptom(
        name="decode-at-batch",
        label="decode-bound",
        area="decode",
        symptom="Answers come slower than people read, with many of them at a time.",
        cause="So many run at once that a step takes longer than a reader's pause.",
        asks=(TOKEN_GAPS, RUNNING, promql.mean(vllm.ITERATION_TOKENS)),
        lever="Fewer at once: `--max-num-seqs` a quarter lower.",
        second="Another engine, so that nobody waits for it; quantized weights after a check of quality.",
        risk="What does not run waits: first tokens become later unless an engine is added.",
        proof=Proof(
            "tpot_ms",
            "falls",
            "ttft_ms",
            "max-num-seqs OLD -> NEW",
            "max-num-seqs=OLD->NEW",
            ExperimentTemplate("coding-qa", "--max-num-seqs OLD", "--max-num-seqs NEW"),
        ),
        pages=("VLLMInterTokenBudgetBurn", "VLLMInterTokenLatencyHigh"),
    ),
    Symptom(
        name="speculative-decoding",
        area="decode",
        symptom="Speculative decoding is on, and most drafted tokens are thrown away.",
        cause=(
            "A draft that does not fit the traffic or the sampling, too many tokens drafted at once, or batches so"
            " large that the GPU has nothing to spare for drafts."
        ),
        asks=(ACCEPTED, promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS, by=("model_name", "position"))),
        lever=(
            "Draft less: a smaller `num_speculative_tokens` in `--speculative-config`, down to the last position that"
            " is accepted in a third of the drafts."
        ),
        second="Another method (n-gram and suffix risk least; EAGLE or MTP where the model has one), or none.",
        risk=(
            "At a low rate drafts may still pay: three tokens a step are three, whatever was thrown away. Only the time"
            " per token decides."
        ),
        proof=Proof(
            "tpot_ms",
            "falls",
            "tokens_per_second",
            "num_speculative_tokens OLD -> NEW",
            "num_speculative_tokens=OLD->NEW",
            ExperimentTemplate("coding-qa", _drafting(5), _drafting(2)),
        ),
        pages=("VLLMAcceptanceLow",),
        dated="There is no gauge of the acceptance any more: it is the quotient of two counters.",
    ),
)
