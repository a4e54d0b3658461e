"""Rows of failed and rejected requests: hung engines, errors, limits, wrong requests."""

from __future__ import annotations

from alerts.engine import FROZEN_FOR, frozen
from exporters.catalogue import gateway, promql, sidecar, vllm
from stack.doctor.matrix.expressions import WAITING
from stack.doctor.matrix.symptom import Proof, Symptom

FAILURES: tuple[Symptom, ...] = (
    Symptom(
        name="frozen-engine",
        area="API",
        symptom="Requests run or wait, no token is made, and the engine's page answers.",
        cause=(
            "The core of the engine stands still: a kernel or a collective that does not return, a worker that is gone,"
            " an engine that somebody put to sleep. Rarely one prefill that is longer than the time looked at."
        ),
        asks=(
            *(
                promql.current(metric, ("address", "state", "evidence"), ('state=~"suspect|hung|draining|scaling"',))
                for metric in (gateway.ENGINE_STATE, sidecar.ENGINE_STATE)
            ),
            frozen(FROZEN_FOR, promql.EACH),
        ),
        lever="Take the engine out of the balancer, so that nothing new meets it, and keep its stacks and its log.",
        second=(
            "Restart it, once those are kept and only if its state is hung: suspect, draining and scaling end by"
            " themselves, and kv_fetch means that a prefill engine is the one to look at."
        ),
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
            "A release, model or option that does not fit, a GPU or a worker that fails, or a limit of time that is"
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
)
REFUSALS: tuple[Symptom, ...] = (
    Symptom(
        name="rejections",
        area="API",
        symptom="The engine refuses requests by its own limit; many of them look like HTTP 200.",
        cause=(
            "More requests or prompt tokens are sent to one engine than `--max-num-queued-reqs` or"
            " `--max-num-queued-tokens` lets in."
        ),
        asks=(promql.growth(vllm.ADMISSION_REJECTIONS, by=("model_name", "reason")), WAITING),
        lever=(
            "Let the queue stand in the gateway: `slots` of its capacity at what the engines run at once, so that their"
            " limit is never met."
        ),
        second=(
            "`--max-num-queued-reqs` higher, by as many as users will wait for, only while the cache has room; then"
            " another engine."
        ),
        risk="A longer queue is a longer wait: behind a full engine nobody gains by being admitted.",
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
            "Fix the client: `error.code` in the answer, and the reason in the request log, say what is wrong and"
            " whose it is."
        ),
        second="Where longer prompts are meant, `--max-model-len` up to what the model was trained for.",
        risk="A longer request takes more of the same cache, so fewer fit beside it.",
        proof=Proof("refusals", "falls", "ttft_ms", "client fixed"),
        pages=("VLLMGatewayRejecting", "VLLMErrorRatioHigh"),
    ),
)
