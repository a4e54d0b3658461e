"""Values of one reading of the GPUs, in base units, and the check that they are possible.

Invariant: missing values are None, with their reason in `absent`; they are never reported as 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar, get_args

Reason = Literal["no_driver", "hang", "lost", "permission", "parse", "exit"]
REASONS: tuple[str, ...] = get_args(Reason)


class GpuUnavailable(Exception):
    """No reading could be had. `reason` is one of REASONS: few enough to be a label."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason if reason in REASONS else "exit"
        self.why = why


@dataclass(frozen=True, slots=True)
class MigReading:
    """One GPU instance of a GPU under MIG; uuid is the GPU's. The shares are over the time since the reading
    before."""

    uuid: str
    gpu_instance: int
    mig_uuid: str | None = None
    profile: str | None = None
    memory_used_bytes: float | None = None
    memory_free_bytes: float | None = None
    memory_total_bytes: float | None = None
    memory_reserved_bytes: float | None = None
    graphics_ratio: float | None = None
    sm_ratio: float | None = None
    occupancy_ratio: float | None = None
    tensor_ratio: float | None = None
    memory_ratio: float | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment, in base units. None: the GPU, its driver or its mode does not tell; `absent` says why,
    by field.

    energy_joules: since the driver was loaded (energy_method "counter") or since we started ("integrated").
    throttle_*_seconds, nvlink_*: since the driver was loaded; the hw_ ones by NVML since we started. ecc_*: over the
    GPU's life.
    nvlink_received, nvlink_transmitted: bytes. event_reasons: the driver's bits (see THROTTLES). xids: XID -> how
    often, since we started; None where nobody listens. absent["gpu"]: nothing of this GPU could be read;
    absent["instances"]: its MIG instances could not."""

    uuid: str
    index: int | None = None
    name: str | None = None
    driver_version: str | None = None
    pci_bus_id: str | None = None
    mig: bool | None = None
    utilization_ratio: float | None = None
    memory_busy_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_free_bytes: float | None = None
    memory_total_bytes: float | None = None
    memory_reserved_bytes: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    mem_clock_hertz: float | None = None
    throttle_sw_power_cap_seconds: float | None = None
    throttle_sw_thermal_slowdown_seconds: float | None = None
    throttle_sync_boost_seconds: float | None = None
    throttle_hw_thermal_slowdown_seconds: float | None = None
    throttle_hw_power_brake_seconds: float | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    remapped_corrected: float | None = None
    remapped_uncorrected: float | None = None
    nvlink_received: float | None = None
    nvlink_transmitted: float | None = None
    nvlink_crc_flit_errors: float | None = None
    nvlink_crc_data_errors: float | None = None
    nvlink_replay_errors: float | None = None
    nvlink_recovery_errors: float | None = None
    event_reasons: int | None = None
    xids: Mapping[int, int] | None = None
    instances: tuple[MigReading, ...] = ()
    energy_method: Literal["counter", "integrated"] | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


_NUMBERS = {kind: tuple(f.name for f in fields(kind) if f.type == "float | None") for kind in (GpuReading, MigReading)}

# The largest value that can be meant, by unit. Drivers say "unknown" with all bits set (2**32-1, 2**64-1), in any of
# the raw units.
_MOST = {
    "ratio": 1.0, "bytes": 2.0**50, "watts": 1e5, "joules": 1e15, "celsius": 1000.0, "hertz": 1e11, "seconds": 1e10,
    "corrected": 4e9, "uncorrected": 4e9, "errors": 1e15, "received": 1e19, "transmitted": 1e19,
}  # fmt: skip

AnyReading = TypeVar("AnyReading", GpuReading, MigReading)


def plausible(reading: AnyReading) -> AnyReading:
    """Return the reading without impossible numbers: a negative or impossible value becomes absent["..."] =
    "implausible"."""
    wrong = [
        n
        for n in _NUMBERS[type(reading)]
        if (v := getattr(reading, n)) is not None and not 0 <= v <= _MOST[n.rpartition("_")[2]]
    ]
    if not wrong:
        return reading
    return replace(reading, absent={**reading.absent, **dict.fromkeys(wrong, "implausible")}, **dict.fromkeys(wrong))  # type: ignore[arg-type]


class Integral:
    """Joules from watts, or seconds from yes (1) and no (0), by trapezoids, for GPUs that do not count them. It never
    falls.

    A gap longer than max_gap_s counts nothing: nobody knows what the GPU did meanwhile. Nor does a clock that went
    back."""

    def __init__(self, max_gap_s: float = 30.0) -> None:
        self.total = 0.0
        self._max_gap_s = max_gap_s
        self._last: tuple[float, float] | None = None  # when, how much

    def add(self, level: float, at_s: float) -> float:
        """The total up to this reading."""
        if self._last and 0 <= (gap_s := at_s - self._last[0]) <= self._max_gap_s:
            self.total += gap_s * (self._last[1] + level) / 2
        self._last = (at_s, level)
        return self.total
