"""The tuning matrix: which symptom has which cause, what shows it, which one lever to pull first, and how to know that
it worked. The only one: the doctor, its page runbooks/tuning.md and the answers of `--goal` are made of it.

Laws, held by tests/stack/doctor/test_doctor_matrix.py: a lever names at most one option of the engine; disaggregated
prefill is never the first; whatever is pulled has a risk and a figure that must move; quality has no lever. Rows stand
in the order in which causes explain each other."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from alerts.engine import FROZEN_FOR, frozen
from exporters.catalogue import gateway, promql, sidecar, vllm
from exporters.catalogue.metric import Metric
from stack.tuning.series import LIVE_METRICS

Area = Literal["queue", "prefill", "decode", "streaming", "API", "quality"]
AREAS: tuple[Area, ...] = get_args(Area)
Moves = Literal["falls", "rises"]
# what `vllm-watch compare` finds in a request log; the doctor counts the rest
LIVE = frozenset(live.metric.figure for live in LIVE_METRICS)


@dataclass(frozen=True, slots=True)
class Arms:
    """An experiment that pulls the lever: a shipped workload, and what the engine is started with before and after."""

    workload: str
    before: str
    after: str

    def file(self) -> str:
        """What `vllm-watch tune` reads."""
        command = "vllm serve MODEL --port {port}"
        before, after = (f"{command} {options}".strip() for options in (self.before, self.after))
        return f"""workload: {self.workload}
arms:
  before:
    command: {before}  # as it is now, not as it should be
  after:
    command: {after}
"""


@dataclass(frozen=True, slots=True)
class EvidenceSource:
    """What was asked, as commands that ask it again. log: options that name the request log."""

    again: str = "vllm-watch doctor --prometheus http://127.0.0.1:9090 --window 1h"
    log: str = "--log requests.jsonl"


ANYWHERE = EvidenceSource()


@dataclass(frozen=True, slots=True)
class Proof:
    """How to know that it worked. figure: as benches and comparisons call it, or `hang-ups`, `refusals` and
    `inter_token_p95`, which the
    doctor counts: a comparison has the mean gap of each request, which pauses hardly move.

    keeps: what must not become worse for it. change: the annotation; OLD and NEW stand for numbers that differ from
    engine to engine.
    arms: where an experiment can show it before it is rolled out."""

    figure: str
    moves: Moves
    keeps: str
    change: str
    diff: str = ""
    arms: Arms | None = None

    @property
    def told(self) -> str:
        return f"the figure {self.figure} {self.moves}, and {self.keeps} is no worse"

    def commands(self, name: str, source: EvidenceSource = ANYWHERE) -> tuple[str, ...]:
        """Before it is rolled out an experiment, where there is one; then the event, and some hours later what the
        traffic says."""
        diff = f" --diff '{self.diff}'" if self.diff else ""
        seen = f"vllm-watch compare {source.log} --event {name} --events events.jsonl"
        return (
            *([f"vllm-watch tune {name}.yaml --out {name}"] if self.arms else []),
            f'vllm-watch annotate "{self.change}"{diff} --id {name} --events events.jsonl',
            seen if self.figure in LIVE else source.again,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """name: of the row; label: of the finding, which several rows may share where a cause has several levers. asks:
    what shows it, as PromQL.

    dated: what older guides say otherwise, and what holds now."""

    name: str
    area: Area
    symptom: str
    cause: str
    asks: tuple[str, ...]
    lever: str
    second: str
    risk: str
    proof: Proof | None
    pages: tuple[str, ...]
    label: str = ""
    dated: str = ""

    @property
    def finding(self) -> str:
        return self.label or self.name


def _mean(metric: Metric) -> str:
    return promql.mean(metric)


def _p(percent: int, metric: Metric, window: str = promql.WINDOW) -> str:
    return promql.quantile(percent / 100, metric, window)


def _drafting(tokens: int) -> str:
    return f"""--speculative-config '{{"method":"ngram","num_speculative_tokens":{tokens}}}'"""


_WAITING, _RUNNING = (
    promql.lowest(vllm.NUM_REQUESTS_WAITING, by=promql.EACH),
    promql.average(vllm.NUM_REQUESTS_RUNNING, by=promql.EACH),
)
_KV = promql.worst(vllm.KV_CACHE_USAGE, promql.EACH)
_QUEUE, _PREFILL = _mean(vllm.REQUEST_QUEUE_TIME), _mean(vllm.REQUEST_PREFILL_TIME)
_TTFT, _GAPS = _p(95, vllm.TIME_TO_FIRST_TOKEN), _p(95, vllm.INTER_TOKEN_LATENCY)
_HITS = promql.share(vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES)
_PROMPTS = _mean(vllm.REQUEST_PROMPT_TOKENS)
_ACCEPTED = promql.share(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS, vllm.SPEC_DECODE_NUM_DRAFT_TOKENS)
_FAR_LONGER = f"{_p(99, vllm.REQUEST_PROMPT_TOKENS)} / ({_p(50, vllm.REQUEST_PROMPT_TOKENS)} > 0)"

ROWS: tuple[Symptom, ...] = (
    Symptom(
        name="frozen-engine",
        area="API",
        symptom="Requests run or wait, no token is made, and the engine's page answers.",
        cause=(
            "The core of the engine stands still: a kernel or a collective that does not return, a worker that is gone,"
            " an engine that somebody put to sleep. Rarely one prefill that is longer than the time looked at."
        ),
        asks=(frozen(FROZEN_FOR, promql.EACH),),
        lever="Take the engine out of the balancer, so that nothing new meets it, and keep its stacks and its log.",
        second="Restart it, once those are kept.",
        risk=(
            "A restart loses every request that it holds, and the cache; a prefill that was only long would have come"
            " back."
        ),
        proof=Proof("error_ratio", "falls", "ttft_ms", "frozen engine taken out"),
        pages=("VLLMEngineFrozen",),
    ),
    Symptom(
        name="frozen-api-server",
        label="frozen-engine",
        area="API",
        symptom="The engine answered and then stopped: even requests for its metrics get no answer in time.",
        cause=(
            "The API server stands still: its process is stopped, its host is out of CPU or memory, or a network path"
            " drops what comes back. The core behind it may still compute."
        ),
        asks=(f"up == 0 and on (instance) {promql.lowest(vllm.NUM_REQUESTS_RUNNING, by=('instance',))}",),
        lever="Take the engine out of the balancer, so that nothing new meets it, and keep its stacks and its log.",
        second="Restart it, once those are kept.",
        risk="A restart loses every request that it holds, and the cache.",
        proof=Proof("error_ratio", "falls", "ttft_ms", "engine without answer taken out"),
        pages=("VLLMEngineUnreachable", "VLLMEngineFrozen"),
    ),
    Symptom(
        name="errors",
        area="API",
        symptom="Requests end in an error or a timeout.",
        cause=(
            "A release, model or option that does not fit, a card or a worker that fails, or a limit of time that is"
            " shorter than the work."
        ),
        asks=(
            promql.share(sidecar.REQUESTS, sidecar.REQUESTS, part_where=sidecar.FAILED),
            promql.growth(vllm.REQUEST_SUCCESS, where=('finished_reason="error"',)),
        ),
        lever="Take back the last change (release, model or option) on one engine; the board Tuning shows when it was.",
        second="Where nothing was changed, take the engine that fails out of the balancer.",
        risk="The cache of that engine is cold afterwards; what runs on it is lost unless it is drained first.",
        proof=Proof("error_ratio", "falls", "ttft_ms", "last change taken back"),
        pages=("VLLMErrorRatioHigh", "rollback"),
    ),
    Symptom(
        name="kv-bound",
        area="queue",
        symptom="Running requests lose their KV blocks and are computed again; answers pause, the queue grows.",
        cause="More was admitted than the KV cache holds to the end: long contexts, long answers, or too many at once.",
        asks=(_KV, promql.per_second(vllm.NUM_PREEMPTIONS, by=promql.EACH), _WAITING),
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
            Arms("compliance-summaries", "--max-num-seqs OLD", "--max-num-seqs NEW"),
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
        asks=(_KV, _WAITING, _QUEUE),
        lever="Hold more: `--gpu-memory-utilization` a step up, where the card has memory left.",
        second="`--kv-cache-dtype fp8` after a check of quality; then another engine.",
        risk="Too high, and a burst runs out of memory for activations; a shorter `--max-model-len` adds no block.",
        proof=Proof(
            "queue_ms",
            "falls",
            "error_ratio",
            "gpu-memory-utilization OLD -> NEW",
            "gpu-memory-utilization=OLD->NEW",
            Arms("compliance-summaries", "--gpu-memory-utilization OLD", "--gpu-memory-utilization NEW"),
        ),
        pages=("VLLMKVCacheNearlyFull",),
    ),
    Symptom(
        name="rejections",
        area="API",
        symptom="The engine refuses requests by its own limit; many of them look like HTTP 200.",
        cause=(
            "More requests or prompt tokens are sent to one engine than `--max-num-queued-reqs` or"
            " `--max-num-queued-tokens` lets in."
        ),
        asks=(promql.growth(vllm.ADMISSION_REJECTIONS, by=("model_name", "reason")), _WAITING),
        lever=(
            "Let the queue stand in the gateway: `slots` of its capacity at what the engines run at once, so that their"
            " limit is never met."
        ),
        second=(
            "`--max-num-queued-reqs` higher, by as many as users will wait for, only while the cache has room; then"
            " another engine."
        ),
        risk="A longer queue is a longer wait: behind a full engine nobody gains by being let in.",
        proof=Proof("refusals", "falls", "ttft_ms", "the gateway queues for the engine"),
        pages=("VLLMEngineRejecting",),
        dated="The limit counts what runs as well as what waits, whatever its name says.",
    ),
    Symptom(
        name="rejections-by-gateway",
        label="rejections",
        area="API",
        symptom="The gateway refuses requests for load.",
        cause="Teams send more than the slots behind the gateway finish, or more than their own share.",
        asks=(
            promql.growth(sidecar.REASONS, by=("team", "reason"), where=('outcome="rejected"',)),
            promql.current(gateway.SLOTS, by=()),
        ),
        lever=(
            "Raise `slots` of the capacity in teams.yaml one step, only while no request waits in an engine and its"
            " cache has room."
        ),
        second="Give the refused team another `weight` or band, or add an engine.",
        risk=(
            "More slots than an engine runs at once only move the queue into the engine, where no team has a share of"
            " its own."
        ),
        proof=Proof("refusals", "falls", "ttft_ms", "slots OLD -> NEW", "slots=OLD->NEW"),
        pages=("VLLMGatewayRejecting",),
    ),
    Symptom(
        name="rejections-by-team-limit",
        label="rejections",
        area="API",
        symptom="The gateway refuses requests of a team that has as many under way as it may.",
        cause="Its client sends more at once than its terms allow, or does not wait before it sends again.",
        asks=(
            promql.growth(sidecar.REASONS, by=("team", "reason"), where=('reason="team_limit"',)),
            promql.current(gateway.INFLIGHT, by=("team",)),
        ),
        lever=(
            "Have its client send fewer at once and wait as long as Retry-After says: the terms work as they are meant."
        ),
        second=(
            "If the team should have more, a higher `max_in_flight` for it in teams.yaml; once all slots are taken,"
            " others pay for it."
        ),
        risk="None for the first; its work takes as long as its share allows.",
        proof=Proof("refusals", "falls", "queue_ms", "client sends NEW at once", "concurrency=OLD->NEW"),
        pages=("VLLMGatewayRejecting",),
    ),
    Symptom(
        name="wrong-requests",
        area="API",
        symptom="A good part of the requests is refused for what they say: 4xx.",
        cause="A client sends a wrong key, model, parameter, or more tokens than the context or its team's terms hold.",
        asks=(
            promql.growth(vllm.HTTP_REQUESTS, by=("handler", "status"), where=('status="4xx"', 'handler=~"/v1/.*"')),
            promql.growth(sidecar.REASONS, by=("team", "reason"), where=('outcome="rejected"',)),
        ),
        lever=(
            "Mend the client: `error.code` in the answer, and the reason in the request log, say what is wrong and"
            " whose it is."
        ),
        second="Where longer prompts are meant, `--max-model-len` up to what the model was trained for.",
        risk="A longer request takes more of the same cache, so fewer fit beside it.",
        proof=Proof("refusals", "falls", "ttft_ms", "client mended"),
        pages=("VLLMGatewayRejecting", "VLLMErrorRatioHigh"),
    ),
    Symptom(
        name="head-of-line-first",
        label="head-of-line",
        area="prefill",
        symptom=(
            "Most first tokens are early and a tail is many times later, while a few prompts are far longer than the"
            " rest."
        ),
        cause=(
            "A long prompt takes what is left of every step until it is computed; whoever comes meanwhile waits"
            " behind it."
        ),
        asks=(f"{_p(99, vllm.TIME_TO_FIRST_TOKEN)} / ({_p(50, vllm.TIME_TO_FIRST_TOKEN)} > 0)", _FAR_LONGER),
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
            Arms("head-of-line", "", "--long-prefill-token-threshold NEW"),
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
            "The prefill of a long prompt fills whole steps, and whoever is answered meanwhile gets one token a step."
        ),
        asks=(f"{_p(99, vllm.INTER_TOKEN_LATENCY)} / ({_p(50, vllm.INTER_TOKEN_LATENCY)} > 0)", _FAR_LONGER),
        lever="Smaller steps: `--max-num-batched-tokens` half of what it is, not below the number of sequences.",
        second=(
            "`--long-prefill-token-threshold`, which caps a long prompt's part of a step; then an engine of their own"
            " for long prompts, or disaggregated prefill (`--kv-transfer-config`), which is experimental."
        ),
        risk="The long prompts' own first tokens come later; steps that are too small cost throughput.",
        proof=Proof(
            "tpot_ms",
            "falls",
            "tokens_per_second",
            "max-num-batched-tokens OLD -> NEW",
            "max-num-batched-tokens=OLD->NEW",
            Arms("head-of-line", "--max-num-batched-tokens OLD", "--max-num-batched-tokens NEW"),
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
            _PREFILL,
            _PROMPTS,
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
            Arms("shared-prefix", "--no-enable-prefix-caching", "--enable-prefix-caching"),
        ),
        pages=("VLLMTTFTBudgetBurn", "VLLMCacheHitsCollapsed"),
        dated=(
            "Older guides have one switch the cache on; it is on by default now, so an engine without it was told so."
        ),
    ),
    Symptom(
        name="small-steps",
        area="prefill",
        symptom="Long prompts are computed in many small steps.",
        cause="`--max-num-batched-tokens` is low: each step has a fixed cost and reads all weights, for few tokens.",
        asks=(_TTFT, _PREFILL, _PROMPTS, _GAPS, promql.mean(vllm.ITERATION_TOKENS)),
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
            Arms("rag", "--max-num-batched-tokens OLD", "--max-num-batched-tokens NEW"),
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
        asks=(_HITS, _PREFILL, _PROMPTS),
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
        asks=(_TTFT, _PREFILL, _QUEUE, _PROMPTS),
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
        asks=(_mean(vllm.TIME_TO_FIRST_TOKEN), _QUEUE, _PREFILL, promql.per_second(vllm.PROCESS_CPU, by=("instance",))),
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
            Arms("short-short", "--renderer-num-workers 1", "--renderer-num-workers 4"),
        ),
        pages=("VLLMTTFTBudgetBurn",),
    ),
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
            _WAITING,
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
            "Whoever spreads the requests does not: clients that keep one connection, sessions that stick, weights, an"
            " address that is missing."
        ),
        asks=(_WAITING, _RUNNING, _QUEUE),
        lever="Mend the balancer: by requests under way (least connections), not by connection or in turn.",
        second="Where requests stick to an engine for its prefix cache, let those past it that would wait there.",
        risk="A conversation that moves is computed again from its beginning: look at the hit ratio.",
        proof=Proof("queue_ms", "falls", "hit_ratio", "balancer by requests under way"),
        pages=("VLLMQueueTimeHigh",),
    ),
    Symptom(
        name="queue-bound",
        area="queue",
        symptom="Requests wait for a place while the KV cache has room and as many run as may.",
        cause="The scheduler's number of sequences is the limit, not the card.",
        asks=(_QUEUE, _WAITING, _RUNNING, _KV),
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
            Arms("short-short", "--max-num-seqs OLD", "--max-num-seqs NEW"),
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
        asks=(_QUEUE, _WAITING, _RUNNING, _GAPS),
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
            " between two looks, tells."
        ),
        asks=(_QUEUE, _WAITING, _RUNNING, _KV),
        lever=(
            "Look longer before anything is changed: as many running at every look is a want of places, more at one"
            " than at another is not."
        ),
        second="Bound the queue until that is known: `slots` of the gateway's capacity.",
        risk="The queue stands a little longer.",
        proof=Proof("queue_ms", "falls", "tpot_ms", "what the longer look asked for"),
        pages=("VLLMQueueTimeHigh", "VLLMQueueGrowing"),
    ),
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
            _GAPS,
            promql.quantile(0.5, vllm.INTER_TOKEN_LATENCY),
            _mean(vllm.ITERATION_TOKENS),
            promql.per_second(vllm.PROMPT_TOKENS),
        ),
        lever=(
            "Smaller steps: `--max-num-batched-tokens` as many times smaller as the p95 of the gaps is over its limit,"
            " not below 512."
        ),
        second="Fewer prompt tokens: what prompts share first, so that the prefix cache has it. Then another engine.",
        risk=(
            "More steps hold prompts, so first tokens come later and throughput falls (a CPU, 2,048 to 512: p95 of the"
            " gaps 36 to 23 ms, 8 % fewer tokens). Half as large may be too little: where a prompt was one step it is"
            " two, and the p95 rises."
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
            " requests share it. Or the engine runs with `--enforce-eager`, or the card slows itself down for heat:"
            " rule out both first."
        ),
        asks=(_GAPS, promql.per_second(vllm.GENERATION_TOKENS), _RUNNING),
        lever="Several tokens a step: `--speculative-config` with n-gram drafts first, which need no second model.",
        second=(
            "Quantized weights (`--quantization`) or a smaller model after a check of quality; a card with more"
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
            Arms("coding-qa", "", _drafting(4)),
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
        asks=(promql.quantile(0.95, vllm.REQUEST_TIME_PER_OUTPUT_TOKEN), _RUNNING, _ACCEPTED),
        lever="Less to read in a step: quantized weights (`--quantization`) after a check of quality.",
        second="A smaller model, several cards (`--tensor-parallel-size`), or a card with more bandwidth.",
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
            Arms("coding-qa", "", "--quantization fp8"),
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
        asks=(_GAPS, _RUNNING, _mean(vllm.ITERATION_TOKENS)),
        lever="Fewer at once: `--max-num-seqs` a quarter lower.",
        second="Another engine, so that nobody waits for it; quantized weights after a check of quality.",
        risk="What does not run waits: first tokens become later unless an engine is added.",
        proof=Proof(
            "tpot_ms",
            "falls",
            "ttft_ms",
            "max-num-seqs OLD -> NEW",
            "max-num-seqs=OLD->NEW",
            Arms("coding-qa", "--max-num-seqs OLD", "--max-num-seqs NEW"),
        ),
        pages=("VLLMInterTokenBudgetBurn", "VLLMInterTokenLatencyHigh"),
    ),
    Symptom(
        name="speculative-decoding",
        area="decode",
        symptom="Speculative decoding is on, and most drafted tokens are thrown away.",
        cause=(
            "A draft that does not fit the traffic or the sampling, too many tokens drafted at once, or batches so"
            " large that the card has nothing to spare for drafts."
        ),
        asks=(
            _ACCEPTED,
            promql.per_second(vllm.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS, by=("model_name", "position")),
        ),
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
            Arms("coding-qa", _drafting(5), _drafting(2)),
        ),
        pages=("VLLMAcceptanceLow",),
        dated="There is no gauge of the acceptance any more: it is the quotient of two counters.",
    ),
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
        name="slow-streaming",
        area="streaming",
        symptom="Clients get tokens much slower than the engine makes them.",
        cause=(
            "The engine's API server has no CPU left, a proxy collects tokens before it sends them on, or readers stop"
            " reading."
        ),
        asks=(_p(95, sidecar.TPOT), _GAPS, promql.per_second(vllm.PROCESS_CPU, by=("instance",))),
        lever=(
            "Find who is late: one stream past every proxy (`curl -N` at the gateway, then at the engine), and have"
            " that one send tokens on as they come."
        ),
        second="Where that is the engine's API server: `--api-server-count` 2.",
        risk="With several API servers the process_ series vanish from the engine's page.",
        proof=Proof("tpot_ms", "falls", "error_ratio", "buffering off in the proxy"),
        pages=("incident-flow",),
    ),
    Symptom(
        name="slow-gateway",
        label="slow-streaming",
        area="streaming",
        symptom="Clients get tokens much slower than the engine makes them, and the gateway's event loop is late.",
        cause="The gateway shares its core with something else, or has more streams than one core carries.",
        asks=(_p(95, sidecar.TPOT), _GAPS, promql.quantile(0.95, gateway.LOOP_LAG, by=("instance",))),
        lever="Give the gateway a core of its own.",
        second="A second gateway behind the balancer, each with half of the slots and a log of its own.",
        risk="None for the first; two gateways do not know of each other's teams.",
        proof=Proof("tpot_ms", "falls", "error_ratio", "gateway on a core of its own"),
        pages=("incident-flow",),
    ),
    Symptom(
        name="hang-ups",
        area="API",
        symptom="Clients close the connection before their answer is complete.",
        cause="They wait longer than they or their timeout will: for the first token, or for the last one.",
        asks=(
            promql.share(sidecar.REQUESTS, sidecar.REQUESTS, part_where=('outcome="client_abort"',)),
            (
                f"{promql.observation_count(vllm.TIME_TO_FIRST_TOKEN)}"
                f" - {promql.observation_count(vllm.E2E_REQUEST_LATENCY)}"
            ),
        ),
        lever=(
            "Find the age at which they leave: where it is always the same it is a timeout, so raise that, or have that"
            " client stream."
        ),
        second="Where it is not: what is slow by the other findings, or shorter answers (`max_tokens`).",
        risk="Whoever waits longer holds a place for longer.",
        proof=Proof("hang-ups", "falls", "queue_ms", "timeout of the client OLD s -> NEW s", "timeout=OLD->NEW"),
        pages=("VLLMClientHangupsRising",),
        dated='vLLM\'s own counter stays at 0 for clients that leave, whatever its `finished_reason="abort"` promises.',
    ),
    Symptom(
        name="quality",
        area="quality",
        symptom="Somebody says that answers became worse.",
        cause="No series of vLLM knows whether an answer is good.",
        asks=(
            promql.share(
                vllm.REQUEST_SUCCESS, vllm.REQUEST_SUCCESS, "30m", part_where=('finished_reason=~"length|repetition"',)
            ),
        ),
        lever="",
        second="",
        risk="",
        proof=None,
        pages=("quality", "VLLMAnswersCutOff"),
    ),
)


def row(name: str) -> Symptom:
    """The row of this name. Raises ValueError, with the nearest name, for any other."""
    found = next((one for one in ROWS if one.name == name), None)
    if found is None:
        near = difflib.get_close_matches(name, [one.name for one in ROWS], n=1)
        raise ValueError(f"the tuning matrix has no row {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return found


# ---- the page


_OF_AREA: dict[Area, str] = {
    "queue": "Time before a request is first scheduled, and what makes it compute again.",
    "prefill": "Time from there to the first token: computing the prompt.",
    "decode": "Time from the first token to the last.",
    "streaming": "What lies between the engine that makes a token and the reader who gets it.",
    "API": "Requests that get no answer, or another than they asked for.",
    "quality": "What no figure here can tell.",
}


def page() -> str:
    """runbooks/tuning.md."""
    return "\n".join((_HEAD, *(line for area in AREAS for line in _section(area)))).rstrip() + "\n"


_HEAD = (
    "# Tuning: which lever for which symptom\n\nFor when something is slow and nothing is broken. `vllm-watch doctor`"
    " reads a Prometheus or an engine, finds the rows that hold and says which lever comes first; this page has all of"
    " them.\n\nOne lever at a time. Pull it, write it down (`vllm-watch annotate`), let some hours of like traffic"
    " pass, look at the figure that must move and at the one that must not become worse, and only then go on. Two at"
    " once, and nobody knows which one it was.\n\nA restart loses every running request and the whole cache: one engine"
    " at a time, out of the balancer first, until it runs nothing.\n"
)


def _section(area: Area) -> Iterator[str]:
    title = area if area == "API" else area.capitalize()
    yield f"## {title}\n\n{_OF_AREA[area]}\n"
    for one in ROWS:
        if one.area == area:
            yield from _written(one)


def _written(one: Symptom) -> Iterator[str]:
    yield f"### {one.name}\n\n{one.symptom} {one.cause}\n"
    yield from (f"```promql\n{ask}\n```\n" for ask in one.asks)
    if one.proof is None:
        yield f"No lever: see {_linked(one.pages)}.\n"
        return
    yield (
        f"- **First lever:** {one.lever}\n- **After that:** {one.second}\n- **Risk:** {one.risk}\n- **It worked when:**"
        f" {one.proof.told}."
    )
    yield from (f"- **Dated:** {text}" for text in [one.dated] if text)
    yield f"- **Pages:** {_linked(one.pages)}.\n"
    yield "```bash\n" + "\n".join(one.proof.commands(one.name)) + "\n```\n"
    if arms := one.proof.arms:
        yield f"`{one.name}.yaml`, with your own model and numbers:\n\n```yaml\n{arms.file()}```\n"


def _linked(pages: Sequence[str]) -> str:
    return ", ".join(f"[{name}]({name}.md)" for name in pages)
