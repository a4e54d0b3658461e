"""The GPU's own series: what the driver says about each card, keyed by uuid.

Law: base units, and absent is absent: what a card or driver does not measure has no sample, never a 0. Names and
versions are on the info series only; join them with `* on (uuid) group_left (name)`. MIG instances have families of
their own, keyed by card and instance."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_CARD = ("uuid",)
_NO_MIG = (
    (
        "Absent while MIG is on: the driver does not measure a divided card as a whole; busy time then comes from the"
        " engine."
    ),
)

INFO = Metric(
    "vllm_watch_gpu_info", Kind.INFO, Unit.NONE, "One card, by name, driver, bus and MIG mode (on, off, or unknown).",
    labels=("driver_version", "index", "mig", "name", "pci_bus_id", "uuid"), across=Across.MAX,
)  # fmt: skip
UTILIZATION = Metric(
    "vllm_watch_gpu_utilization_ratio",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the last sampling period in which a kernel ran.",
    labels=_CARD,
    across=Across.MEAN,
    notes=("One small kernel keeps it at 1: it says busy, not how full.", *_NO_MIG),
)
MEMORY_BUSY = Metric(
    "vllm_watch_gpu_memory_busy_ratio",
    Kind.GAUGE,
    Unit.RATIO,
    "Share of the last sampling period in which device memory was read or written.",
    labels=_CARD,
    across=Across.MEAN,
    notes=_NO_MIG,
)
MEMORY_USED = Metric("vllm_watch_gpu_memory_used_bytes", Kind.GAUGE, Unit.BYTES, "Device memory in use.", labels=_CARD)
MEMORY_FREE = Metric(
    "vllm_watch_gpu_memory_free_bytes", Kind.GAUGE, Unit.BYTES, "Device memory that is free.", labels=_CARD
)
MEMORY_TOTAL = Metric(
    "vllm_watch_gpu_memory_total_bytes", Kind.GAUGE, Unit.BYTES, "Device memory that the card has.", labels=_CARD
)
MEMORY_RESERVED = Metric(
    "vllm_watch_gpu_memory_reserved_bytes",
    Kind.GAUGE,
    Unit.BYTES,
    "Device memory that driver and firmware keep for themselves.",
    labels=_CARD,
)
POWER = Metric(
    "vllm_watch_gpu_power_watts",
    Kind.GAUGE,
    Unit.WATTS,
    "Power the whole board draws.",
    labels=_CARD,
    notes=(
        "Averaged by the driver over one second from Ampere on (but not on the GA100), instantaneous on older cards.",
    ),
)
POWER_LIMIT = Metric(
    "vllm_watch_gpu_power_limit_watts", Kind.GAUGE, Unit.WATTS, "The power limit in force.", labels=_CARD
)
ENERGY = Metric(
    "vllm_watch_gpu_energy_joules_total",
    Kind.COUNTER,
    Unit.JOULES,
    "Energy used, by method: counter (the driver's, since it was loaded) or integrated (power over time, since we"
    " started).",
    labels=("method", "uuid"),
)
TEMPERATURE = Metric(
    "vllm_watch_gpu_temperature_celsius", Kind.GAUGE, Unit.CELSIUS, "Temperature by sensor: gpu, memory.",
    labels=("sensor", "uuid"), across=Across.MAX,
)  # fmt: skip
SM_CLOCK = Metric(
    "vllm_watch_gpu_sm_clock_hertz", Kind.GAUGE, Unit.HERTZ, "Clock of the SMs now.", labels=_CARD, across=Across.MIN
)
MEM_CLOCK = Metric(
    "vllm_watch_gpu_mem_clock_hertz",
    Kind.GAUGE,
    Unit.HERTZ,
    "Clock of device memory now.",
    labels=_CARD,
    across=Across.MIN,
)
THROTTLE = Metric(
    "vllm_watch_gpu_throttle_seconds_total",
    Kind.COUNTER,
    Unit.SECONDS,
    "Time the clocks were held down, by reason: sw_power_cap, sw_thermal_slowdown, sync_boost, hw_thermal_slowdown,"
    " hw_power_brake.",
    labels=("reason", "uuid"),
    notes=(
        (
            "The two hw_ reasons come from NVML as the time between readings that say they hold, since we started: it"
            " renumbered their fields."
        ),
        "A card at its power limit is working as set; the thermal reasons and the power brake are what to act on.",
    ),
)
THROTTLED_NOW = Metric(
    "vllm_watch_gpu_throttle_active",
    Kind.GAUGE,
    Unit.FLAG,
    "1 while the clocks are held down, by reason: sw_power_cap, hw_slowdown, sync_boost, sw_thermal_slowdown,"
    " hw_thermal_slowdown, hw_power_brake.",
    labels=("reason", "uuid"),
    across=Across.MAX,
    notes=("hw_slowdown is any of the two other hw_ reasons, or an external signal.",),
)
ECC_ERRORS = Metric(
    "vllm_watch_gpu_ecc_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Memory errors over the card's life, by kind: corrected, uncorrected.",
    labels=("kind", "uuid"),
    notes=("Absent while ECC is off or on cards without it.",),
)
REMAPPED_ROWS = Metric(
    "vllm_watch_gpu_remapped_rows", Kind.GAUGE, Unit.COUNT,
    "Memory rows replaced by spare ones, by the kind of error that caused it: corrected, uncorrected.",
    labels=("kind", "uuid"), notes=("Ampere and later; absent while MIG is on.",),
)  # fmt: skip
XID_ERRORS = Metric(
    "vllm_watch_gpu_xid_errors_total",
    Kind.COUNTER,
    Unit.COUNT,
    "Errors that the driver reported (XID), by number, since we started; those that NVIDIA ties to lost work by their"
    " own, the rest as other.",
    labels=("uuid", "xid"),
    notes=(
        (
            "From NVML only. What is reported while the reading process is replaced is missed: the kernel log has all"
            " of them."
        ),
    ),
)
NVLINK_ERRORS = Metric(
    "vllm_watch_gpu_nvlink_errors_total", Kind.COUNTER, Unit.COUNT,
    "Errors on the NVLinks of a card since its driver was loaded, by kind: crc_flit, crc_data, replay, recovery.",
    labels=("kind", "uuid"), notes=("From NVML only; up to Hopper, as later cards count by link and otherwise.",),
)  # fmt: skip
NVLINK_BYTES = Metric(
    "vllm_watch_gpu_nvlink_bytes_total", Kind.COUNTER, Unit.BYTES,
    "Payload over all NVLinks of a card since its driver was loaded, by direction: received, transmitted.",
    labels=("direction", "uuid"), notes=("From NVML only.",),
)  # fmt: skip
ABSENT = Metric(
    "vllm_watch_gpu_absent_values",
    Kind.GAUGE,
    Unit.COUNT,
    "Values that could not be had at the last reading, by reason: not_available, not_supported, not_known, deprecated,"
    " permission, unknown_error, implausible, lost, needs_nvml.",
    labels=("reason", "uuid"),
    notes=(
        (
            "lost: the card fell off the bus and the others went on. unknown_error on a card that was fine is a"
            " failure, not a gap."
        ),
    ),
)

# Parts of a card under MIG: GPU instances. Compute instances share the memory of theirs and are not counted apart.

_PART = ("gpu_instance", "uuid")
MIG_INFO = Metric(
    "vllm_watch_mig_info",
    Kind.INFO,
    Unit.NONE,
    "One GPU instance of a card under MIG, by profile and by the uuid that CUDA_VISIBLE_DEVICES takes.",
    labels=("gpu_instance", "mig_uuid", "profile", "uuid"),
    across=Across.MAX,
    notes=(
        "uuid is the card's. Where nothing tells profile or mig_uuid (NVML), they are empty.",
        "Where an instance is split further, mig_uuid is that of its first compute instance.",
    ),
)
MIG_MEMORY_USED = Metric(
    "vllm_watch_mig_memory_used_bytes", Kind.GAUGE, Unit.BYTES, "Memory in use on a GPU instance.", labels=_PART
)
MIG_MEMORY_FREE = Metric(
    "vllm_watch_mig_memory_free_bytes", Kind.GAUGE, Unit.BYTES, "Memory that is free on a GPU instance.", labels=_PART
)
MIG_MEMORY_TOTAL = Metric(
    "vllm_watch_mig_memory_total_bytes", Kind.GAUGE, Unit.BYTES, "Memory that a GPU instance has.", labels=_PART
)
MIG_MEMORY_RESERVED = Metric(
    "vllm_watch_mig_memory_reserved_bytes",
    Kind.GAUGE,
    Unit.BYTES,
    "Memory of a GPU instance that driver and firmware keep.",
    labels=_PART,
)
MIG_ACTIVITY = Metric(
    "vllm_watch_mig_activity_ratio",
    Kind.GAUGE,
    Unit.RATIO,
    "Activity of a GPU instance between the last two readings, by kind: graphics (any work), sm, occupancy, tensor,"
    " memory.",
    labels=("gpu_instance", "kind", "uuid"),
    across=Across.MEAN,
    notes=("From NVML on Hopper and later; on Ampere only dcgm-exporter measures it (PROF_GR_ENGINE_ACTIVE).",),
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
