"""Diagnosis of alerts on GPUs."""

from __future__ import annotations

from exporters.catalogue import dcgm, gpu, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_INSTANCE, DCGM_UUID, ENGINE, INSTANCE, UUID, DiagnosisRow, at, eq, no

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMGPUMissing": (
        DiagnosisRow(
            "one card is called lost, the others are read",
            f"{promql.worst(gpu.ABSENT, ('instance', 'uuid'), (eq('reason', 'lost'), INSTANCE))} > 0",
            "it fell off the bus: power, slot, or a fault of the card (XID 79)",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "readings fail with `hang` or `lost`",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "15m",
                    ("instance", "reason"),
                    (eq("kind", "gpu"), eq("reason", "hang|lost"), INSTANCE),
                )
                + " > 0"
            ),
            "the driver waits for a card or for its firmware (XID 119, 120)",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "readings fail with `no_driver` or `permission`",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "15m",
                    ("instance", "reason"),
                    (eq("kind", "gpu"), eq("reason", "no_driver|permission"), INSTANCE),
                )
                + " > 0"
            ),
            "the container lost the devices, or the driver was upgraded or unloaded below it",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the sidecar was started again within the hour",
            f"max by (instance) (changes({at(sidecar.SIDECAR_START, INSTANCE)}[1h])) > 0",
            "it was started with fewer cards than before",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "readings succeed, and the card is simply not among them",
            f"({promql.current(sidecar.SOURCE_UP, BY_INSTANCE, (eq('kind', 'gpu'), INSTANCE))} == 1) "
            f"unless on (instance) ({promql.worst(gpu.ABSENT, BY_INSTANCE, (eq('reason', 'lost'), INSTANCE))} > 0)",
            "someone took it away: another number of cards, a MIG change, an exchange",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "an engine is down as well",
            f"max by (instance) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 0)",
            "it lost the card",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMGPUHot": (
        DiagnosisRow(
            "clocks fall already",
            "max by (uuid) (rate("
            f"{at(gpu.THROTTLE, eq('reason', 'sw_thermal_slowdown|hw_thermal_slowdown'), UUID)}[10m])) > 0.1",
            "the slowdown temperature is reached",
            "[VLLMGPUThrottled](VLLMGPUThrottled.md)",
        ),
        DiagnosisRow(
            "this card is 10 degrees or more above the coolest of its host",
            f"{promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), UUID))} > 10 + scalar(min("
            f"{promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), INSTANCE))}))",
            "blocked air, a failing fan or heat sink, or it alone has work",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "all cards of the host are hot",
            f"min by (instance) ({at(gpu.TEMPERATURE, eq('sensor', 'gpu'), INSTANCE)}) > 80",
            "the room, the air inlet or the host's fans",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "memory is 10 degrees hotter than the chip",
            f"{promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'memory'), UUID))} > on (uuid) "
            f"{promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), UUID))} + 10",
            "long decode with large batches, or worn thermal pads",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "it drew its full power for a quarter of an hour",
            f"avg_over_time(({promql.worst(gpu.POWER, ('uuid',), (UUID,))} / ("
            f"{promql.worst(gpu.POWER_LIMIT, ('uuid',), (UUID,))} > 0))[15m:1m]) > 0.95",
            "steady prefill: more heat than this host's air carries away",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "only dcgm-exporter shows it",
            f"{promql.current(dcgm.GPU_TEMP.metric, ('UUID',), (DCGM_UUID,))} "
            f"unless on (UUID) label_replace({at(gpu.INFO)}, "
            '"UUID", "$1", "uuid", "(.+)")',
            "the same causes; the rows above have no figures for it",
            "Mitigation 1",
        ),
    ),
    "VLLMGPUThrottled": (
        DiagnosisRow(
            "a thermal reason, the chip is hot",
            "max by (uuid) (rate("
            f"{at(gpu.THROTTLE, eq('reason', 'sw_thermal_slowdown|hw_thermal_slowdown'), UUID)}[10m])) > 0.1 "
            f"and on (uuid) {promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), UUID))} >= 75",
            "cooling of this card or of the host",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "`hw_power_brake`",
            f"max by (uuid) (rate({at(gpu.THROTTLE, eq('reason', 'hw_power_brake'), UUID)}[10m])) > 0",
            "a power supply failed or is overloaded, or the rack caps its power",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "a thermal reason while the chip is cool",
            "max by (uuid) (rate("
            f"{at(gpu.THROTTLE, eq('reason', 'sw_thermal_slowdown|hw_thermal_slowdown'), UUID)}[10m])) > 0.1 "
            f"and on (uuid) {promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), UUID))} < 75",
            "the memory or the voltage regulators are hot, or the sensor lies",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "more than one card of the host",
            "count by (instance) (max by (instance, uuid) (rate("
            f"{at(gpu.THROTTLE, no('reason', 'sw_power_cap|sync_boost'), INSTANCE)}[10m])) > 0.1) > 1",
            "the room, the inlet, or the power of the rack",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "dcgm-exporter shows heat, and no sidecar sees the card",
            f"max by (UUID) (rate({at(dcgm.THERMAL_VIOLATION.metric, DCGM_UUID)}[10m])) * 1e-9 > 0.1",
            "cooling",
            "Mitigation 1",
        ),
    ),
    "VLLMGPUXid": (
        DiagnosisRow(
            "13, 31, 43 or 45",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '13|31|43|45'), UUID))} > 0 "
            f"or max by (UUID) (({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 13) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 31) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 43) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 45))",
            "the engine's own kernels, or a process that was killed; a card only if it repeats on this one alone",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "48, 63, 64, 94 or 95",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '48|63|64|94|95'), UUID))} > 0 "
            f"or max by (UUID) (({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 48) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 63) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 64) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 94) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 95))",
            "memory of the card",
            "[VLLMGPUECCErrors](VLLMGPUECCErrors.md)",
        ),
        DiagnosisRow(
            "74",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '74'), UUID))} > 0 "
            f"or max by (UUID) ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 74)",
            "an NVLink, its cable or bridge, or the card at its other end",
            "[VLLMGPUNVLinkErrors](VLLMGPUNVLinkErrors.md)",
        ),
        DiagnosisRow(
            "79",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '79'), UUID))} > 0 "
            f"or max by (UUID) ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 79)",
            "the bus: power, slot, heat, or the card",
            "[VLLMGPUMissing](VLLMGPUMissing.md)",
        ),
        DiagnosisRow(
            "119 or 120",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '119|120'), UUID))} > 0 "
            f"or max by (UUID) (({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 119) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 120))",
            "the card's firmware or the driver",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "an engine is gone, whatever the code",
            f"max by (instance) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 0)",
            "its process had work on the card",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMGPUECCErrors": (
        DiagnosisRow(
            "uncorrected errors grow",
            f"max by (uuid) (increase({at(gpu.ECC_ERRORS, eq('kind', 'uncorrected'), UUID)}[1h])) > 0 "
            f"or label_replace(max by (UUID) (increase({at(dcgm.ECC_UNCORRECTED.metric, DCGM_UUID)}[1h])) > 0, "
            '"uuid", "$1", "UUID", "(.+)")',
            "a failing memory cell; one is within expectation, and is replaced at the next reset",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "a replacement failed",
            f"{promql.current(dcgm.REMAP_FAILURE.metric, ('UUID',), (DCGM_UUID,))} > 0",
            "no spare row left in that bank",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "rows replaced after uncorrected errors grew within the week",
            f"max by (uuid) (delta({at(gpu.REMAPPED_ROWS, eq('kind', 'uncorrected'), UUID)}[7d])) > 0",
            "the card wears out",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "an engine is down",
            f"max by (instance) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 0)",
            "it read the bad word",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
        DiagnosisRow(
            "the last XID is 95",
            f"max by (UUID) ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 95)",
            "the error was not contained",
            "Mitigation 2, at once",
        ),
    ),
    "VLLMGPUNVLinkErrors": (
        DiagnosisRow(
            "the link was trained again",
            f"{promql.growth(gpu.NVLINK_ERRORS, '15m', ('uuid',), (eq('kind', 'recovery'), UUID))} > 0 "
            f"or max by (UUID) (increase({at(dcgm.NVLINK_RECOVERY.metric, DCGM_UUID)}[15m])) > 0",
            "a marginal link: seat, bridge, cable, or the card",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "damaged packets, link not trained again",
            f"{promql.growth(gpu.NVLINK_ERRORS, '15m', ('uuid',), (no('kind', 'recovery'), UUID))} > 0 "
            "unless on (uuid) "
            f"{promql.growth(gpu.NVLINK_ERRORS, '15m', ('uuid',), (eq('kind', 'recovery'), UUID))} > 0 "
            f"or max by (UUID) (increase({at(dcgm.NVLINK_CRC.metric, DCGM_UUID)}[15m])) > 0 "
            f"unless on (UUID) max by (UUID) (increase({at(dcgm.NVLINK_RECOVERY.metric, DCGM_UUID)}[15m])) > 0",
            "noise on one link, or heat",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "more than one card of the host",
            f"count by (instance) ({promql.growth(gpu.NVLINK_ERRORS, '15m', ('instance', 'uuid'), (INSTANCE,))} > "
            "0) > 1 or count by (instance) (max by (instance, UUID) (increase("
            f"{at(dcgm.NVLINK_CRC.metric, INSTANCE)}[15m])) > 0) > 1",
            "what they share: the other end of the link, the bridge, an NVSwitch",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "an XID 74",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '74'), UUID))} > 0 "
            f"or max by (UUID) ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 74)",
            "the link failed for good",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "engines run requests and give no tokens",
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, ENGINE)} > 0 "
            f"unless {promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE)} > 0",
            "a collective hangs",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
    ),
    "VLLMGPUMemoryNearlyFull": (
        DiagnosisRow(
            "it grew by more than 256 MiB within the hour",
            f"max by (uuid) (delta({at(gpu.MEMORY_USED, UUID)}[1h])) > 268435456",
            "a second process, or a leak in the engine",
            "Mitigation 1, else 3",
        ),
        DiagnosisRow(
            "it stood still for an hour",
            f"abs(max by (uuid) (delta({at(gpu.MEMORY_USED, UUID)}[1h]))) <= 268435456",
            "the engine was started with too large a share",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "an engine started within the hour",
            f"time() - {promql.current(prometheus.PROCESS_START, BY_INSTANCE, (eq('job', 'vllm.*'),))} < 3600",
            "its share and its graphs together are more than the card can spare",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the KV cache is full as well",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE)}) > 0.9",
            "two different shortages; more room for the cache is not to be had on this card",
            "[VLLMKVCacheNearlyFull](VLLMKVCacheNearlyFull.md)",
        ),
        DiagnosisRow(
            "engines restart again and again",
            f"max by (instance) (changes({at(prometheus.PROCESS_START, eq('job', 'vllm.*'))}[1h])) > 1",
            "it ran out of memory already",
            "[VLLMRestartLoop](VLLMRestartLoop.md)",
        ),
        DiagnosisRow(
            "only dcgm-exporter shows the card",
            f"{promql.worst(dcgm.FB_FREE.metric, ('UUID',), (DCGM_UUID,))} "
            f"unless on (UUID) label_replace({at(gpu.INFO)}, "
            '"UUID", "$1", "uuid", "(.+)")',
            "the same causes; the rows above have no figures for it",
            "Mitigation 1",
        ),
    ),
}
