"""The GPU's own series: what the driver says about each card, keyed by uuid.

Law: base units, and absent is absent: what a card or driver does not measure has no sample, never a 0. Names and versions are on the
info series only; join them with `* on (uuid) group_left (name)`. MIG instances, XID errors and NVLink will be families of their own."""

from __future__ import annotations

from exporters.catalogue.metric import Across, Kind, Metric, Unit

_CARD = ("uuid",)
_NO_MIG = ("Absent while MIG is on: the driver does not measure a divided card as a whole; busy time then comes from the engine.",)

INFO = Metric(
    "vllm_watch_gpu_info", Kind.INFO, Unit.NONE, "One card, by name, driver, bus and MIG mode (on, off, or unknown).",
    labels=("driver_version", "index", "mig", "name", "pci_bus_id", "uuid"), across=Across.MAX,
)  # fmt: skip
UTILIZATION = Metric(
    "vllm_watch_gpu_utilization_ratio", Kind.GAUGE, Unit.RATIO, "Share of the last sampling period in which a kernel ran.",
    labels=_CARD, across=Across.MEAN,
    notes=("One small kernel keeps it at 1: it says busy, not how full.", *_NO_MIG),
)  # fmt: skip
MEMORY_BUSY = Metric(
    "vllm_watch_gpu_memory_busy_ratio", Kind.GAUGE, Unit.RATIO,
    "Share of the last sampling period in which device memory was read or written.", labels=_CARD, across=Across.MEAN, notes=_NO_MIG,
)  # fmt: skip
MEMORY_USED = Metric("vllm_watch_gpu_memory_used_bytes", Kind.GAUGE, Unit.BYTES, "Device memory in use.", labels=_CARD)
MEMORY_FREE = Metric("vllm_watch_gpu_memory_free_bytes", Kind.GAUGE, Unit.BYTES, "Device memory that is free.", labels=_CARD)
MEMORY_TOTAL = Metric("vllm_watch_gpu_memory_total_bytes", Kind.GAUGE, Unit.BYTES, "Device memory that the card has.", labels=_CARD)
MEMORY_RESERVED = Metric(
    "vllm_watch_gpu_memory_reserved_bytes", Kind.GAUGE, Unit.BYTES, "Device memory that driver and firmware keep for themselves.",
    labels=_CARD,
)  # fmt: skip
POWER = Metric(
    "vllm_watch_gpu_power_watts", Kind.GAUGE, Unit.WATTS, "Power the whole board draws.", labels=_CARD,
    notes=("Averaged by the driver over one second from Ampere on (but not on the GA100), instantaneous on older cards.",),
)  # fmt: skip
POWER_LIMIT = Metric("vllm_watch_gpu_power_limit_watts", Kind.GAUGE, Unit.WATTS, "The power limit in force.", labels=_CARD)
ENERGY = Metric(
    "vllm_watch_gpu_energy_joules_total", Kind.COUNTER, Unit.JOULES,
    "Energy used, by method: counter (the driver's, since it was loaded) or integrated (power over time, since we started).",
    labels=("method", "uuid"),
)  # fmt: skip
TEMPERATURE = Metric(
    "vllm_watch_gpu_temperature_celsius", Kind.GAUGE, Unit.CELSIUS, "Temperature by sensor: gpu, memory.",
    labels=("sensor", "uuid"), across=Across.MAX,
)  # fmt: skip
SM_CLOCK = Metric("vllm_watch_gpu_sm_clock_hertz", Kind.GAUGE, Unit.HERTZ, "Clock of the SMs now.", labels=_CARD, across=Across.MIN)
MEM_CLOCK = Metric("vllm_watch_gpu_mem_clock_hertz", Kind.GAUGE, Unit.HERTZ, "Clock of device memory now.", labels=_CARD, across=Across.MIN)
THROTTLE = Metric(
    "vllm_watch_gpu_throttle_seconds_total", Kind.COUNTER, Unit.SECONDS,
    "Time the clocks were held down, by reason: sw_power_cap, sw_thermal_slowdown, sync_boost, hw_thermal_slowdown, hw_power_brake.",
    labels=("reason", "uuid"),
    notes=("The two hw_ reasons come only from nvidia-smi for now: NVML renumbered those fields between drivers.",
           "A card at its power limit is working as set; the thermal reasons and the power brake are what to act on."),
)  # fmt: skip
ECC_ERRORS = Metric(
    "vllm_watch_gpu_ecc_errors_total", Kind.COUNTER, Unit.COUNT, "Memory errors over the card's life, by kind: corrected, uncorrected.",
    labels=("kind", "uuid"), notes=("Absent while ECC is off or on cards without it.",),
)  # fmt: skip
REMAPPED_ROWS = Metric(
    "vllm_watch_gpu_remapped_rows", Kind.GAUGE, Unit.COUNT,
    "Memory rows replaced by spare ones, by the kind of error that caused it: corrected, uncorrected.",
    labels=("kind", "uuid"), notes=("Ampere and later; absent while MIG is on.",),
)  # fmt: skip
ABSENT = Metric(
    "vllm_watch_gpu_absent_values", Kind.GAUGE, Unit.COUNT,
    "Values that could not be had at the last reading, by reason: not_available, not_supported, not_known, deprecated, permission, "
    "unknown_error, implausible, lost.",
    labels=("reason", "uuid"),
    notes=("lost: the card fell off the bus and the others went on. unknown_error on a card that was fine is a failure, not a gap.",),
)  # fmt: skip

GPU: tuple[Metric, ...] = (
    INFO, UTILIZATION, MEMORY_BUSY, MEMORY_USED, MEMORY_FREE, MEMORY_TOTAL, MEMORY_RESERVED, POWER, POWER_LIMIT, ENERGY, TEMPERATURE,
    SM_CLOCK, MEM_CLOCK, THROTTLE, ECC_ERRORS, REMAPPED_ROWS, ABSENT,
)  # fmt: skip
