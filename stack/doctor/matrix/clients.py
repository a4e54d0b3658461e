"""Rows of what only clients observe: slow streams, disconnects, quality."""

from __future__ import annotations

from exporters.catalogue import gateway, promql, sidecar, vllm
from stack.doctor.matrix.expressions import TOKEN_GAPS, percentile
from stack.doctor.matrix.symptom import Proof, Symptom

CLIENTS: tuple[Symptom, ...] = (
    Symptom(
        name="slow-streaming",
        area="streaming",
        symptom="Clients get tokens much slower than the engine makes them.",
        cause=(
            "The engine's API server has no CPU left, a proxy collects tokens before it sends them on, or readers stop"
            " reading."
        ),
        asks=(percentile(95, sidecar.TPOT), TOKEN_GAPS, promql.per_second(vllm.PROCESS_CPU, by=("instance",))),
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
        asks=(percentile(95, sidecar.TPOT), TOKEN_GAPS, promql.quantile(0.95, gateway.LOOP_LAG, by=("instance",))),
        lever="Give the gateway a core of its own.",
        second="A second gateway behind a balancer; both share the limits (docs/guides/gateways.md).",
        risk="None for the first; with fixed shares a slot that one gateway does not need stays unused.",
        proof=Proof("tpot_ms", "falls", "error_ratio", "gateway on a core of its own"),
        pages=("incident-flow",),
    ),
    Symptom(
        name="client-disconnects",
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
        risk="Clients that wait longer hold a place for longer.",
        proof=Proof(
            "client-disconnects", "falls", "queue_ms", "timeout of the client OLD s -> NEW s", "timeout=OLD->NEW"
        ),
        pages=("VLLMClientHangupsRising",),
        dated='vLLM\'s own counter stays at 0 for clients that leave, whatever its `finished_reason="abort"` promises.',
    ),
)
QUALITY: tuple[Symptom, ...] = (
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
