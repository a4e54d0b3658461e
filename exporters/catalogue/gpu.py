"""GPU series of the driver, keyed by uuid.

Invariant: base units; values that a GPU or driver does not measure are omitted, never reported as 0. Names and
versions are on the info series only; join them with `* on (uuid) group_left (name)`. MIG instances have their own
families, keyed by GPU and instance."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_GPU = ("uuid",)
_NO_MIG = (
    (
        "Absent while MIG is on: the driver does not measure the GPU as a whole. GPU busy time then comes from the"
        " engine."
    ),
)

INFO = Metric(
    "vllm_watch_gpu_info", Kind.INFO, Unit.NONE, "GPU by name, driver, bus and MIG mode (on, off or unknown).",
    labels=("driver_version", "index", "mig", "name", "pci_bus_id", "uuid"), across=Across.MAX,
)  # fmt: skip
UTILIZATION = Metric(
    "vllm_watch_gpu_utilization_ratio",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the last sampling period in which a kernel ran.",
    labels=_GPU,
    across=Across.MEAN,
    notes=("One small kernel keeps it at 1: it measures busy time, not load.", *_NO_MIG),
)
MEMORY_BUSY = Metric(
    "vllm_watch_gpu_memory_busy_ratio",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the last sampling period in which device memory was read or written.",
    labels=_GPU,
    across=Across.MEAN,
    notes=_NO_MIG,
)
MEMORY_USED = Metric("vllm_watch_gpu_memory_used_bytes", Kind.GAUGE, Unit.BYTES, "Device memory in use.", labels=_GPU)
MEMORY_FREE = Metric("vllm_watch_gpu_memory_free_bytes", Kind.GAUGE, Unit.BYTES, "Free device memory.", labels=_GPU)
MEMORY_TOTAL = Metric("vllm_watch_gpu_memory_total_bytes", Kind.GAUGE, Unit.BYTES, "Total device memory.", labels=_GPU)
MEMORY_RESERVED = Metric(
    "vllm_watch_gpu_memory_reserved_bytes",
    Kind.GAUGE,
    Unit.BYTES,
    "Device memory reserved by driver and firmware.",
    labels=_GPU,
)
POWER = Metric(
    "vllm_watch_gpu_power_watts",
    Kind.GAUGE,
    Unit.WATTS,
    "Power draw of the whole board.",
    labels=_GPU,
    notes=("Averaged by the driver over one second from Ampere on (except the GA100), instantaneous on older GPUs.",),
)
POWER_LIMIT = Metric("vllm_watch_gpu_power_limit_watts", Kind.GAUGE, Unit.WATTS, "Enforced power limit.", labels=_GPU)
ENERGY = Metric(
    "vllm_watch_gpu_energy_joules_total",
    Kind.COUNTER,
    Unit.JOULES,
    "Energy consumption by method: counter (the driver's, since it was loaded) or integrated (power over time, since"
    " start).",
    labels=("method", "uuid"),
)
TEMPERATURE = Metric(
    "vllm_watch_gpu_temperature_celsius", Kind.GAUGE, Unit.CELSIUS, "Temperature by sensor: gpu, memory.",
    labels=("sensor", "uuid"), across=Across.MAX,
)  # fmt: skip
SM_CLOCK = Metric(
    "vllm_watch_gpu_sm_clock_hertz", Kind.GAUGE, Unit.HERTZ, "Current SM clock.", labels=_GPU, across=Across.MIN
)
MEM_CLOCK = Metric(
    "vllm_watch_gpu_mem_clock_hertz", Kind.GAUGE, Unit.HERTZ, "Current memory clock.", labels=_GPU, across=Across.MIN
)
THROTTLE = Metric(
    "vllm_watch_gpu_throttle_seconds_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Time with throttled clocks, by reason: sw_power_cap, sw_thermal_slowdown, sync_boost, hw_thermal_slowdown,"
    " hw_power_brake.",
    labels=("reason", "uuid"),
    notes=(
        (
            "The hw_ reasons are the time between NVML reads that report them, since start: NVML renumbered their"
            " fields."
        ),
        "Running at the power limit is normal; act on the thermal reasons and the power brake.",
    ),
)
THROTTLED_NOW = Metric(
    "vllm_watch_gpu_throttle_active",
    Kind.GAUGE,
    Unit.FLAG,
    "1 while the clocks are throttled, by reason: sw_power_cap, hw_slowdown, sync_boost, sw_thermal_slowdown,"
    " hw_thermal_slowdown, hw_power_brake.",
    labels=("reason", "uuid"),
    across=Across.MAX,
    notes=("hw_slowdown is either of the other hw_ reasons, or an external signal.",),
)
ECC_ERRORS = Metric(
    "vllm_watch_gpu_ecc_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Memory errors over the GPU's lifetime, by kind: corrected, uncorrected.",
    labels=("kind", "uuid"),
    notes=("Absent while ECC is off, and on GPUs without ECC.",),
)
REMAPPED_ROWS = Metric(
    "vllm_watch_gpu_remapped_rows", Kind.GAUGE, Unit.COUNT,
    "Remapped memory rows, by the kind of error that caused it: corrected, uncorrected.",
    labels=("kind", "uuid"), notes=("Ampere and later; absent while MIG is on.",),
)  # fmt: skip
XID_ERRORS = Metric(
    "vllm_watch_gpu_xid_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "XID errors reported by the driver since start, by number; those that NVIDIA links to lost work separately, the"
    " rest as other.",
    labels=("uuid", "xid"),
    notes=(("NVML only. Errors during a restart of the reader process are missed; the kernel log has all of them."),),
)
NVLINK_ERRORS = Metric(
    "vllm_watch_gpu_nvlink_errors_total", Kind.COUNTER, Unit.COUNT,
    "NVLink errors since the driver was loaded, by kind: crc_flit, crc_data, replay, recovery.",
    labels=("kind", "uuid"), notes=("NVML only, up to Hopper; later GPUs use other per-link counters.",),
)  # fmt: skip
NVLINK_BYTES = Metric(
    "vllm_watch_gpu_nvlink_bytes_total", Kind.COUNTER, Unit.BYTES,
    "NVLink payload over all links since the driver was loaded, by direction: received, transmitted.",
    labels=("direction", "uuid"), notes=("NVML only.",),
)  # fmt: skip
ABSENT = Metric(
    "vllm_watch_gpu_absent_values",
    Kind.GAUGE,
    Unit.COUNT,
    "Values not available at the last read, by reason: not_available, not_supported, not_known, deprecated,"
    " permission, unknown_error, implausible, lost, needs_nvml.",
    labels=("reason", "uuid"),
    notes=(
        (
            "lost: the GPU fell off the bus, the others continue. unknown_error on a GPU that worked before is a"
            " failure."
        ),
    ),
)

# MIG: GPU instances. Compute instances share their GPU instance's memory and are not counted separately.

_PART = ("gpu_instance", "uuid")
MIG_INFO = Metric(
    "vllm_watch_mig_info",
    Kind.INFO,
    Unit.NONE,
    "GPU instance under MIG, by profile and by the uuid for CUDA_VISIBLE_DEVICES.",
    labels=("gpu_instance", "mig_uuid", "profile", "uuid"),
    across=Across.MAX,
    notes=(
        "uuid is the GPU's. profile and mig_uuid are empty if NVML does not report them.",
        "If an instance is split further, mig_uuid is that of its first compute instance.",
    ),
)
MIG_MEMORY_USED = Metric(
    "vllm_watch_mig_memory_used_bytes", Kind.GAUGE, Unit.BYTES, "Memory in use on the GPU instance.", labels=_PART
)
MIG_MEMORY_FREE = Metric(
    "vllm_watch_mig_memory_free_bytes", Kind.GAUGE, Unit.BYTES, "Free memory of the GPU instance.", labels=_PART
)
MIG_MEMORY_TOTAL = Metric(
    "vllm_watch_mig_memory_total_bytes", Kind.GAUGE, Unit.BYTES, "Total memory of the GPU instance.", labels=_PART
)
MIG_MEMORY_RESERVED = Metric(
    "vllm_watch_mig_memory_reserved_bytes",
    Kind.GAUGE,
    Unit.BYTES,
    "Memory of the GPU instance reserved by driver and firmware.",
    labels=_PART,
)
MIG_ACTIVITY = Metric(
    "vllm_watch_mig_activity_ratio",
    Kind.GAUGE,
    Unit.RATIO,
    "Activity of the GPU instance between the last two reads, by kind: graphics (any work), sm, occupancy, tensor,"
    " memory.",
    labels=("gpu_instance", "kind", "uuid"),
    across=Across.MEAN,
    notes=("NVML on Hopper and later; on Ampere only dcgm-exporter measures it (PROF_GR_ENGINE_ACTIVE).",),
)

MIG: tuple[Metric, ...] = (
    MIG_INFO,
    MIG_MEMORY_USED,
    MIG_MEMORY_FREE,
    MIG_MEMORY_TOTAL,
    MIG_MEMORY_RESERVED,
    MIG_ACTIVITY,
)
GPU: tuple[Metric, ...] = (
    INFO, UTILIZATION, MEMORY_BUSY, MEMORY_USED, MEMORY_FREE, MEMORY_TOTAL, MEMORY_RESERVED, POWER, POWER_LIMIT, ENERGY,
    TEMPERATURE,
    SM_CLOCK, MEM_CLOCK, THROTTLE, THROTTLED_NOW, ECC_ERRORS, REMAPPED_ROWS, XID_ERRORS, NVLINK_ERRORS, NVLINK_BYTES,
    ABSENT, *MIG,
)  # fmt: skip
