"""Diagnosis of alerts on GPUs."""

from __future__ import annotations

from exporters.catalogue import dcgm, gpu, prometheus, promql, sidecar, vllm
from runbooks.diagnosis.row import BY_INSTANCE, DCGM_UUID, ENGINE, INSTANCE, UUID, DiagnosisRow, at, eq, no

ROWS: dict[str, tuple[DiagnosisRow, ...]] = {
    "VLLMGPUMissing": (
        DiagnosisRow(
            "one GPU is reported as lost, the others are read",
            f"{promql.worst(gpu.ABSENT, ('instance', 'uuid'), (eq('reason', 'lost'), INSTANCE))} > 0",
            "the GPU fell off the bus: power, slot, or a fault of the GPU (XID 79)",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "GPU readings fail with `hang` or `lost`",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "15m",
                    ("instance", "reason"),
                    (eq("kind", "gpu"), eq("reason", "hang|lost"), INSTANCE),
                )
                + " > 0"
            ),
            "the driver waits for a GPU or for its firmware (XID 119, 120)",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "GPU readings fail with `no_driver` or `permission`",
            (
                promql.growth(
                    sidecar.SOURCE_ERRORS,
                    "15m",
                    ("instance", "reason"),
                    (eq("kind", "gpu"), eq("reason", "no_driver|permission"), INSTANCE),
                )
                + " > 0"
            ),
            "the container lost the devices, or the driver was upgraded or unloaded on the host",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the sidecar restarted within the hour",
            f"max by (instance) (changes({at(sidecar.SIDECAR_START, INSTANCE)}[1h])) > 0",
            "the sidecar was started with fewer GPUs than before",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "GPU readings succeed, and no GPU is reported as lost",
            f"({promql.current(sidecar.SOURCE_UP, BY_INSTANCE, (eq('kind', 'gpu'), INSTANCE))} == 1) "
            f"unless on (instance) ({promql.worst(gpu.ABSENT, BY_INSTANCE, (eq('reason', 'lost'), INSTANCE))} > 0)",
            "somebody removed the GPU: another number of GPUs, a MIG change, a replacement",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "an engine is down as well",
            f"max by (instance) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 0)",
            "the engine lost the GPU",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMGPUHot": (
        DiagnosisRow(
            "the GPU throttles already",
            "max by (uuid) (rate("
            f"{at(gpu.THROTTLE, eq('reason', 'sw_thermal_slowdown|hw_thermal_slowdown'), UUID)}[10m])) > 0.1",
            "the slowdown temperature is reached",
            "[VLLMGPUThrottled](VLLMGPUThrottled.md)",
        ),
        DiagnosisRow(
            "this GPU is 10 degrees or more above the coolest of its host",
            f"{promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), UUID))} > 10 + scalar(min("
            f"{promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), INSTANCE))}))",
            "blocked air, a failing fan or heat sink, or only this GPU has work",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "all GPUs of the host are hot",
            f"min by (instance) ({at(gpu.TEMPERATURE, eq('sensor', 'gpu'), INSTANCE)}) > 80",
            "the room, the air inlet, or the host's fans",
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
            "the GPU drew its full power for 15 minutes",
            f"avg_over_time(({promql.worst(gpu.POWER, ('uuid',), (UUID,))} / ("
            f"{promql.worst(gpu.POWER_LIMIT, ('uuid',), (UUID,))} > 0))[15m:1m]) > 0.95",
            "steady prefill: more heat than the host's airflow removes",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "only dcgm-exporter reports this GPU",
            f"{promql.current(dcgm.GPU_TEMP.metric, ('UUID',), (DCGM_UUID,))} "
            f"unless on (UUID) label_replace({at(gpu.INFO)}, "
            '"UUID", "$1", "uuid", "(.+)")',
            "the same causes; the rows above have no values for it",
            "Mitigation 1",
        ),
    ),
    "VLLMGPUThrottled": (
        DiagnosisRow(
            "a thermal reason, and the chip is at 75 °C or more",
            "max by (uuid) (rate("
            f"{at(gpu.THROTTLE, eq('reason', 'sw_thermal_slowdown|hw_thermal_slowdown'), UUID)}[10m])) > 0.1 "
            f"and on (uuid) {promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), UUID))} >= 75",
            "cooling of this GPU or of the host",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "the reason `hw_power_brake`",
            f"max by (uuid) (rate({at(gpu.THROTTLE, eq('reason', 'hw_power_brake'), UUID)}[10m])) > 0",
            "a power supply failed or is overloaded, or the rack caps its power",
            "Mitigation 4",
        ),
        DiagnosisRow(
            "a thermal reason, and the chip is below 75 °C",
            "max by (uuid) (rate("
            f"{at(gpu.THROTTLE, eq('reason', 'sw_thermal_slowdown|hw_thermal_slowdown'), UUID)}[10m])) > 0.1 "
            f"and on (uuid) {promql.current(gpu.TEMPERATURE, ('uuid',), (eq('sensor', 'gpu'), UUID))} < 75",
            "the memory or the voltage regulators are hot, or the sensor is wrong",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "more than one GPU of the host throttles",
            "count by (instance) (max by (instance, uuid) (rate("
            f"{at(gpu.THROTTLE, no('reason', 'sw_power_cap|sync_boost'), INSTANCE)}[10m])) > 0.1) > 1",
            "the room, the air inlet, or the power of the rack",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "dcgm-exporter reports thermal throttling, and no sidecar reads the GPU",
            f"max by (UUID) (rate({at(dcgm.THERMAL_VIOLATION.metric, DCGM_UUID)}[10m])) * 1e-9 > 0.1",
            "cooling",
            "Mitigation 1",
        ),
    ),
    "VLLMGPUXid": (
        DiagnosisRow(
            "XID 13, 31, 43 or 45",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '13|31|43|45'), UUID))} > 0 "
            f"or max by (UUID) (({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 13) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 31) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 43) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 45))",
            "the engine's kernels, or a killed process; the GPU only if it repeats on this GPU alone",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "XID 48, 63, 64, 94 or 95",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '48|63|64|94|95'), UUID))} > 0 "
            f"or max by (UUID) (({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 48) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 63) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 64) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 94) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 95))",
            "memory of the GPU",
            "[VLLMGPUECCErrors](VLLMGPUECCErrors.md)",
        ),
        DiagnosisRow(
            "XID 74",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '74'), UUID))} > 0 "
            f"or max by (UUID) ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 74)",
            "an NVLink, its cable or bridge, or the GPU at its other end",
            "[VLLMGPUNVLinkErrors](VLLMGPUNVLinkErrors.md)",
        ),
        DiagnosisRow(
            "XID 79",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '79'), UUID))} > 0 "
            f"or max by (UUID) ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 79)",
            "the bus: power, slot, heat, or the GPU",
            "[VLLMGPUMissing](VLLMGPUMissing.md)",
        ),
        DiagnosisRow(
            "XID 119 or 120",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '119|120'), UUID))} > 0 "
            f"or max by (UUID) (({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 119) "
            f"or ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 120))",
            "the GPU's firmware or the driver",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "an engine is down, whatever the XID",
            f"max by (instance) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 0)",
            "its process used the GPU",
            "[VLLMEngineDown](VLLMEngineDown.md)",
        ),
    ),
    "VLLMGPUECCErrors": (
        DiagnosisRow(
            "uncorrected errors grow",
            f"max by (uuid) (increase({at(gpu.ECC_ERRORS, eq('kind', 'uncorrected'), UUID)}[1h])) > 0 "
            f"or label_replace(max by (UUID) (increase({at(dcgm.ECC_UNCORRECTED.metric, DCGM_UUID)}[1h])) > 0, "
            '"uuid", "$1", "UUID", "(.+)")',
            "a failing memory cell; a single one is expected, and its row is replaced at the next reset",
            "Mitigation 1, then 2",
        ),
        DiagnosisRow(
            "the replacement of a row failed",
            f"{promql.current(dcgm.REMAP_FAILURE.metric, ('UUID',), (DCGM_UUID,))} > 0",
            "no spare row is left in that bank",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "rows replaced after uncorrected errors grew within the week",
            f"max by (uuid) (delta({at(gpu.REMAPPED_ROWS, eq('kind', 'uncorrected'), UUID)}[7d])) > 0",
            "the GPU wears out",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "an engine is down",
            f"max by (instance) ({at(prometheus.UP, eq('job', 'vllm.*'))} == 0)",
            "the engine read the faulty memory",
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
            "the link was retrained",
            f"{promql.growth(gpu.NVLINK_ERRORS, '15m', ('uuid',), (eq('kind', 'recovery'), UUID))} > 0 "
            f"or max by (UUID) (increase({at(dcgm.NVLINK_RECOVERY.metric, DCGM_UUID)}[15m])) > 0",
            "a marginal link: seat, bridge, cable, or the GPU",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "damaged packets, and the link was not retrained",
            f"{promql.growth(gpu.NVLINK_ERRORS, '15m', ('uuid',), (no('kind', 'recovery'), UUID))} > 0 "
            "unless on (uuid) "
            f"{promql.growth(gpu.NVLINK_ERRORS, '15m', ('uuid',), (eq('kind', 'recovery'), UUID))} > 0 "
            f"or max by (UUID) (increase({at(dcgm.NVLINK_CRC.metric, DCGM_UUID)}[15m])) > 0 "
            f"unless on (UUID) max by (UUID) (increase({at(dcgm.NVLINK_RECOVERY.metric, DCGM_UUID)}[15m])) > 0",
            "noise on one link, or heat",
            "Mitigation 1",
        ),
        DiagnosisRow(
            "more than one GPU of the host has link errors",
            f"count by (instance) ({promql.growth(gpu.NVLINK_ERRORS, '15m', ('instance', 'uuid'), (INSTANCE,))} > "
            "0) > 1 or count by (instance) (max by (instance, UUID) (increase("
            f"{at(dcgm.NVLINK_CRC.metric, INSTANCE)}[15m])) > 0) > 1",
            "a shared part: the other end of the link, the bridge, an NVSwitch",
            "Mitigation 3",
        ),
        DiagnosisRow(
            "XID 74",
            f"{promql.growth(gpu.XID_ERRORS, '1h', ('uuid',), (eq('xid', '74'), UUID))} > 0 "
            f"or max by (UUID) ({at(dcgm.XID_ERRORS.metric, DCGM_UUID)} == 74)",
            "the link failed permanently",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "engines run requests and generate no tokens",
            f"{promql.current(vllm.NUM_REQUESTS_RUNNING, ENGINE)} > 0 "
            f"unless {promql.per_second(vllm.GENERATION_TOKENS, '5m', ENGINE)} > 0",
            "a collective operation hangs",
            "[VLLMEngineFrozen](VLLMEngineFrozen.md)",
        ),
    ),
    "VLLMGPUMemoryNearlyFull": (
        DiagnosisRow(
            "memory use grew by more than 256 MiB within the hour",
            f"max by (uuid) (delta({at(gpu.MEMORY_USED, UUID)}[1h])) > 268435456",
            "a second process, or a leak in the engine",
            "Mitigation 1, else 3",
        ),
        DiagnosisRow(
            "memory use changed by at most 256 MiB within the hour",
            f"abs(max by (uuid) (delta({at(gpu.MEMORY_USED, UUID)}[1h]))) <= 268435456",
            "the engine was started with too large a share",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "an engine started within the hour",
            f"time() - {promql.current(prometheus.PROCESS_START, BY_INSTANCE, (eq('job', 'vllm.*'),))} < 3600",
            "its share and its CUDA graphs together need more than the GPU can spare",
            "Mitigation 2",
        ),
        DiagnosisRow(
            "the KV cache is full as well",
            f"max by (instance, model_name) ({at(vllm.KV_CACHE_USAGE)}) > 0.9",
            "two different shortages; this GPU has no more memory for the KV cache",
            "[VLLMKVCacheNearlyFull](VLLMKVCacheNearlyFull.md)",
        ),
        DiagnosisRow(
            "an engine restarted more than once within the hour",
            f"max by (instance) (changes({at(prometheus.PROCESS_START, eq('job', 'vllm.*'))}[1h])) > 1",
            "the engine ran out of memory already",
            "[VLLMRestartLoop](VLLMRestartLoop.md)",
        ),
        DiagnosisRow(
            "only dcgm-exporter reports the GPU",
            f"{promql.worst(dcgm.FB_FREE.metric, ('UUID',), (DCGM_UUID,))} "
            f"unless on (UUID) label_replace({at(gpu.INFO)}, "
            '"UUID", "$1", "uuid", "(.+)")',
            "the same causes; the rows above have no values for it",
            "Mitigation 1",
        ),
    ),
}
