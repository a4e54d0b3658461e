"""Diagnosis of alerts on KV transfers between prefill and decode engines."""

from __future__ import annotations

from exporters.catalogue import gateway, prometheus, promql, sidecar, vllm
from exporters.catalogue.metric import EngineRole
from runbooks.diagnosis.row import ENGINE, HERE, MODEL, DiagnosisRow, at, eq

_PREFILL, _DECODE = (promql.of_role(role) for role in EngineRole)
_FAILED = (vllm.NIXL_NUM_FAILED_TRANSFERS, vllm.MOONCAKE_NUM_FAILED_TRANSFERS, vllm.MOONCAKE_NUM_FAILED_RECVS)
_FAILING = " or ".join(f"{promql.growth(metric, '10m', ENGINE, HERE)} > 0" for metric in _FAILED)
_MOVED = " or ".join(
    f"{promql.observation_count(metric, '10m', ENGINE, HERE)} > 0"
    for metric in (vllm.NIXL_XFER_TIME, vllm.MOONCAKE_XFER_TIME)
)
_SIZES = (vllm.NIXL_BYTES_TRANSFERRED, vllm.MOONCAKE_BYTES_TRANSFERRED)


def _bytes(offset: str = "") -> str:
    return " or ".join(f"({promql.mean(metric, '10m', ENGINE, HERE, offset)})" for metric in _SIZES)


_HUNG = " or ".join(
    f"max by (address) ({at(metric, eq('state', 'hung'))})" for metric in (gateway.ENGINE_STATE, sidecar.ENGINE_STATE)
)


def _down(role: str) -> str:
    return f"max by (job, instance) ({at(prometheus.UP, role)}) == 0"


ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMKVTransferStuck": (
        DiagnosisRow(
            "a prefill engine of the model holds KV blocks and has run no step for 2 min",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE, _PREFILL, MODEL)}) > 0 unless on (instance,"
            f" model_name) {promql.observation_count(vllm.ITERATION_TOKENS, '2m', ENGINE, (_PREFILL, MODEL))} > 0",
            "that prefill engine is stuck; it holds the blocks that this engine waits for",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a gateway or a sidecar sees a prefill engine hung",
            f'label_replace(({_HUNG}) == 1, "instance", "$1", "address", "(.+)") and on (instance)'
            f" {at(prometheus.UP, _PREFILL)}",
            "its core stands still; a probe of the gateway finds it also while it has no request",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "a prefill engine does not answer its scrape",
            _down(_PREFILL),
            "it is down or restarts; its blocks are lost",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md), then Mitigation 2",
        ),
        DiagnosisRow(
            "transfers of this engine failed within 10 min",
            _FAILING,
            "the link or the peer, not a stuck engine",
            "[VLLMKVTransfersFailing](VLLMKVTransfersFailing.md)",
        ),
    ),
    "VLLMKVTransfersFailing": (
        DiagnosisRow(
            "a prefill engine restarted within 30 min",
            f"changes({at(prometheus.PROCESS_START, _PREFILL)}[30m]) > 0",
            "transfers from the former process failed; those of the new one work",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "other transfers of this engine succeeded within 10 min",
            f"({_FAILING}) and on (instance, model_name) ({_MOVED})",
            "one of several peers, or a link that drops",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "no transfer of this engine succeeded within 10 min",
            f"({_FAILING}) unless on (instance, model_name) ({_MOVED})",
            "no connection between the two, or versions, block sizes or layouts that differ",
            "Mitigation 3",
        ),
    ),
    "VLLMKVTransferSlow": (
        DiagnosisRow(
            "transfers carry over 30 % more bytes than an hour ago",
            f"({_bytes()}) > 1.3 * ({_bytes('1h')})",
            "longer prompts: more KV cache moves for each request",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "transfers carry no more bytes than an hour ago, or there were none then",
            f"({_bytes()}) unless on (instance, model_name) ({_bytes()}) > 1.3 * ({_bytes('1h')})",
            "a slower link or another transport, such as TCP in place of RDMA",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "more than five requests of this engine are in a transfer at once",
            f"{promql.lowest(vllm.NUM_REQUESTS_KV_FETCH_BY_STAGE, '5m', ENGINE, (eq('stage', 'in_progress'), *HERE))}"
            " > 5",
            "transfers share the link and wait for each other",
            "Mitigation 3",
        ),
    ),
    "VLLMKVBlocksExpired": (
        DiagnosisRow(
            "no decode engine of a job answers its scrape",
            f"max by (job) ({at(prometheus.UP, _DECODE)}) == 0",
            "nobody can fetch the blocks",
            "[VLLMEngineUnreachable](VLLMEngineUnreachable.md)",
        ),
        DiagnosisRow(
            "requests wait on the decode engines of the model all the time",
            f"{promql.lowest(vllm.NUM_REQUESTS_WAITING, '5m', ('model_name',), (_DECODE, MODEL))} > 0",
            "decode engines are full and fetch later than the lease allows",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "prefill engines finished over 10 % more requests than decode engines",
            f"{promql.growth(vllm.REQUEST_SUCCESS, '10m', where=(_PREFILL, MODEL))} > 1.1 *"
            f" ({promql.growth(vllm.REQUEST_SUCCESS, '10m', where=(_DECODE, MODEL))})",
            "the router or the client gave up between prefill and decode",
            "Mitigation 2",
        ),
    ),
}
