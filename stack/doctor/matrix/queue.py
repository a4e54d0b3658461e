"""Rows of waiting requests: KV blocks, slots of engine or gateway, adapters."""

from __future__ import annotations

from exporters.catalogue import gateway, promql, sidecar, vllm
from stack.doctor.matrix.expressions import KV_USAGE, QUEUE_TIME, RUNNING, TOKEN_GAPS, WAITING, percentile
from stack.doctor.matrix.symptom import ExperimentTemplate, Proof, Symptom

KV_CACHE: tuple[Symptom, ...] = (
    Symptom(
        name="kv-bound",
        area="queue",
        symptom="Running requests lose their KV blocks and are computed again; answers pause, the queue grows.",
        cause="More was admitted than the KV cache holds to the end: long contexts, long answers, or too many at once.",
        asks=(KV_USAGE, promql.per_second(vllm.NUM_PREEMPTIONS, by=promql.EACH), WAITING),
        lever="Promise less: `--max-num-seqs` a quarter below what runs when it preempts.",
        second="Hold more: `--kv-cache-dtype fp8` after a check of quality, or another engine.",
        risk=(
            "With fewer at once more requests wait; where that is worse than preemptions, the cache itself is too small"
            " for this load."
        ),
        proof=Proof(
            "preemptions",
            "falls",
            "tokens_per_second",
            "max-num-seqs OLD -> NEW",
            "max-num-seqs=OLD->NEW",
            ExperimentTemplate("compliance-summaries", "--max-num-seqs OLD", "--max-num-seqs NEW"),
        ),
        pages=("VLLMKVCacheThrashing", "VLLMPreemptionsSustained"),
        dated=(
            "Older guides speak of swapping: current engines have no swap, they compute again. `--max-model-len` caps a"
            " single request and adds no block. The counter is num_preemptions with `_total` behind it; queries without"
            " that show nothing."
        ),
    ),
    Symptom(
        name="kv-full",
        label="kv-bound",
        area="queue",
        symptom="Requests wait, the KV cache is full, and nothing is preempted.",
        cause=(
            "The engine admits only what fits, and what runs fills the cache: its size is the limit, not the"
            " scheduler's."
        ),
        asks=(KV_USAGE, WAITING, QUEUE_TIME),
        lever="Hold more: `--gpu-memory-utilization` a step up, where the GPU has memory left.",
        second="`--kv-cache-dtype fp8` after a check of quality; then another engine.",
        risk="Too high, and a burst runs out of memory for activations; a shorter `--max-model-len` adds no block.",
        proof=Proof(
            "queue_ms",
            "falls",
            "error_ratio",
            "gpu-memory-utilization OLD -> NEW",
            "gpu-memory-utilization=OLD->NEW",
            ExperimentTemplate("compliance-summaries", "--gpu-memory-utilization OLD", "--gpu-memory-utilization NEW"),
        ),
        pages=("VLLMKVCacheNearlyFull",),
    ),
)
QUEUES: tuple[Symptom, ...] = (
    Symptom(
        name="gateway-queue",
        area="queue",
        symptom="Requests wait in the gateway while the engines have room.",
        cause=(
            "The gateway lets fewer through than the engines can run: `slots`, its limit of tokens, or a team's own"
            " limit."
        ),
        asks=(
            promql.current(gateway.WAITING, by=("team",)),
            promql.current(gateway.SLOTS, by=()),
            promql.current(gateway.SLOTS_LIMIT, by=()),
            WAITING,
        ),
        lever=(
            "Raise `slots` of the capacity in teams.yaml one step, only while no request waits in an engine and its"
            " cache has room."
        ),
        second="The limit of the team that waits (`max_running`); then another engine.",
        risk="Too many slots move the queue into the engine, where no team has a share of its own.",
        proof=Proof("queue_ms", "falls", "tpot_ms", "slots OLD -> NEW", "slots=OLD->NEW"),
        pages=("VLLMGatewayRejecting",),
    ),
    Symptom(
        name="one-team",
        area="queue",
        symptom="One team has most of what runs and waits, while others wait or are refused.",
        cause="It sends more than its share, often a batch job without a limit of its own.",
        asks=(promql.current(gateway.INFLIGHT, by=("team",)), promql.growth(sidecar.TOKENS, by=("team",))),
        lever="Give that team a `max_running` in teams.yaml, and send the gateway SIGHUP; nothing that runs is cut.",
        second="A band or `weight` that says who goes first; then an engine of its own.",
        risk="Its work takes longer; without a word to it, it will send again.",
        proof=Proof("queue_ms", "falls", "error_ratio", "max_running for that team", "max_running=none->NEW"),
        pages=("VLLMQueueTimeHigh", "VLLMGatewayRejecting"),
    ),
    Symptom(
        name="queue-uneven",
        label="queue-bound",
        area="queue",
        symptom="Requests wait at one engine while another of the same model has room.",
        cause=(
            "Requests are not balanced: clients that keep one connection, sticky sessions, weights, or a missing"
            " address."
        ),
        asks=(WAITING, RUNNING, QUEUE_TIME),
        lever="Fix the balancer: by requests under way (least connections), not by connection or in turn.",
        second="Where requests stick to an engine for its prefix cache, let those past it that would wait there.",
        risk="A conversation that moves is computed again from its beginning: look at the hit ratio.",
        proof=Proof("queue_ms", "falls", "hit_ratio", "balancer by requests under way"),
        pages=("VLLMQueueTimeHigh",),
    ),
    Symptom(
        name="queue-bound",
        area="queue",
        symptom="Requests wait for a place while the KV cache has room and as many run as may.",
        cause="The scheduler's number of sequences is the limit, not the GPU.",
        asks=(QUEUE_TIME, WAITING, RUNNING, KV_USAGE),
        lever="More places: `--max-num-seqs` one step up, only while the cache has room.",
        second=(
            "Another engine; until it is there, `slots` of the gateway's capacity, so that the queue stands where teams"
            " have shares."
        ),
        risk="More at once make each step longer, and the cache fuller: past nine tenths of it come preemptions.",
        proof=Proof(
            "queue_ms",
            "falls",
            "tpot_ms",
            "max-num-seqs OLD -> NEW",
            "max-num-seqs=OLD->NEW",
            ExperimentTemplate("short-short", "--max-num-seqs OLD", "--max-num-seqs NEW"),
        ),
        pages=("VLLMQueueTimeHigh", "VLLMQueueGrowing"),
        dated=(
            "The default is no longer 256 everywhere: 1024 on H100, H200 and larger (0.32). An engine with so many"
            " places is rarely short of them."
        ),
    ),
    Symptom(
        name="queue-at-capacity",
        label="queue-bound",
        area="queue",
        symptom="Requests wait, and the engine already does what it can.",
        cause="More comes in than this engine computes: its steps are full before its places are.",
        asks=(QUEUE_TIME, WAITING, RUNNING, TOKEN_GAPS),
        lever="Add an engine behind the same balancer.",
        second=(
            "Bound the queue until it is there: `slots` of the gateway's capacity, or `--max-num-queued-reqs` where no"
            " gateway is."
        ),
        risk="Its cache is cold at first, and the old queue stays where it is.",
        proof=Proof("queue_ms", "falls", "tpot_ms", "one engine more", "engines=OLD->NEW"),
        pages=("VLLMQueueTimeHigh", "VLLMQueueGrowing"),
    ),
    Symptom(
        name="queue-unclear",
        label="queue-bound",
        area="queue",
        symptom="Requests wait, and the looks do not tell for what.",
        cause=(
            "Places or capacity: not known from so few moments at which somebody waits; a Prometheus, or a longer time"
            " between two looks, decides it."
        ),
        asks=(QUEUE_TIME, WAITING, RUNNING, KV_USAGE),
        lever=(
            "Look longer before anything is changed: as many running at every look is a want of places, more at one"
            " than at another is not."
        ),
        second="Bound the queue until that is known: `slots` of the gateway's capacity.",
        risk="The queue stands a little longer.",
        proof=Proof("queue_ms", "falls", "tpot_ms", "what the longer look asked for"),
        pages=("VLLMQueueTimeHigh", "VLLMQueueGrowing"),
    ),
)
DEFERRED: tuple[Symptom, ...] = (
    Symptom(
        name="deferred-requests",
        area="queue",
        symptom="Requests wait for something other than room.",
        cause=(
            "More LoRA adapters are asked for at once than there are slots, a grammar is compiled, or KV cache comes"
            " from elsewhere."
        ),
        asks=(promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, by=("model_name", "reason")),),
        lever="Send each adapter to one engine, so that fewer are asked for at once on each.",
        second=(
            "`--max-loras` higher; where no adapters are served, one schema that stays the same, or traffic past the KV"
            " connector."
        ),
        risk=(
            "An engine of few adapters has fewer to share its batches with; each slot of `--max-loras` takes memory"
            " from the cache."
        ),
        proof=Proof("queue_ms", "falls", "ttft_ms", "adapters split over engines"),
        pages=("VLLMRequestsDeferred",),
    ),
    Symptom(
        name="slow-adapter",
        area="queue",
        symptom="First tokens of one LoRA adapter are late, and those of all other requests are not.",
        cause=(
            "Its weights are loaded again and again: more adapters are in use at once than the engine holds, or they"
            " come from slow storage."
        ),
        asks=(
            promql.current(vllm.NUM_REQUESTS_WAITING_BY_REASON, by=("model_name", "reason")),
            percentile(95, sidecar.TTFT),
        ),
        lever="Hold as many adapters as are in use: `--max-loras` one step up.",
        second="That adapter on an engine of its own; `--max-cpu-loras` higher, so that its weights stay in memory.",
        risk="Each slot of `--max-loras` takes memory from the KV cache.",
        proof=Proof("ttft_ms", "falls", "tpot_ms", "max-loras OLD -> NEW", "max-loras=OLD->NEW"),
        pages=("VLLMRequestsDeferred",),
    ),
)
