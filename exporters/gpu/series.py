"""Prometheus samples of GPU readings. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from exporters.catalogue import gpu as catalogue
from exporters.catalogue.metric import Metric
from exporters.gpu.readings import GpuReading, MigReading

Sample = tuple[Metric, dict[str, str], float]  # metric, labels, value

SAMPLES: tuple[tuple[Metric, dict[str, str], str], ...] = (
    (catalogue.UTILIZATION, {}, "utilization_ratio"),
    (catalogue.MEMORY_BUSY, {}, "memory_busy_ratio"),
    (catalogue.MEMORY_USED, {}, "memory_used_bytes"),
    (catalogue.MEMORY_FREE, {}, "memory_free_bytes"),
    (catalogue.MEMORY_TOTAL, {}, "memory_total_bytes"),
    (catalogue.MEMORY_RESERVED, {}, "memory_reserved_bytes"),
    (catalogue.POWER, {}, "power_watts"),
    (catalogue.POWER_LIMIT, {}, "power_limit_watts"),
    (catalogue.TEMPERATURE, {"sensor": "gpu"}, "temperature_celsius"),
    (catalogue.TEMPERATURE, {"sensor": "memory"}, "memory_temperature_celsius"),
    (catalogue.SM_CLOCK, {}, "sm_clock_hertz"),
    (catalogue.MEM_CLOCK, {}, "mem_clock_hertz"),
    (catalogue.THROTTLE, {"reason": "sw_power_cap"}, "throttle_sw_power_cap_seconds"),
    (catalogue.THROTTLE, {"reason": "sw_thermal_slowdown"}, "throttle_sw_thermal_slowdown_seconds"),
    (catalogue.THROTTLE, {"reason": "sync_boost"}, "throttle_sync_boost_seconds"),
    (catalogue.THROTTLE, {"reason": "hw_thermal_slowdown"}, "throttle_hw_thermal_slowdown_seconds"),
    (catalogue.THROTTLE, {"reason": "hw_power_brake"}, "throttle_hw_power_brake_seconds"),
    (catalogue.ECC_ERRORS, {"kind": "corrected"}, "ecc_corrected"),
    (catalogue.ECC_ERRORS, {"kind": "uncorrected"}, "ecc_uncorrected"),
    (catalogue.REMAPPED_ROWS, {"kind": "corrected"}, "remapped_corrected"),
    (catalogue.REMAPPED_ROWS, {"kind": "uncorrected"}, "remapped_uncorrected"),
    (catalogue.NVLINK_ERRORS, {"kind": "crc_flit"}, "nvlink_crc_flit_errors"),
    (catalogue.NVLINK_ERRORS, {"kind": "crc_data"}, "nvlink_crc_data_errors"),
    (catalogue.NVLINK_ERRORS, {"kind": "replay"}, "nvlink_replay_errors"),
    (catalogue.NVLINK_ERRORS, {"kind": "recovery"}, "nvlink_recovery_errors"),
    (catalogue.NVLINK_BYTES, {"direction": "received"}, "nvlink_received"),
    (catalogue.NVLINK_BYTES, {"direction": "transmitted"}, "nvlink_transmitted"),
)
_PART_SAMPLES: tuple[tuple[Metric, dict[str, str], str], ...] = (
    (catalogue.MIG_MEMORY_USED, {}, "memory_used_bytes"),
    (catalogue.MIG_MEMORY_FREE, {}, "memory_free_bytes"),
    (catalogue.MIG_MEMORY_TOTAL, {}, "memory_total_bytes"),
    (catalogue.MIG_MEMORY_RESERVED, {}, "memory_reserved_bytes"),
    (catalogue.MIG_ACTIVITY, {"kind": "graphics"}, "graphics_ratio"),
    (catalogue.MIG_ACTIVITY, {"kind": "sm"}, "sm_ratio"),
    (catalogue.MIG_ACTIVITY, {"kind": "occupancy"}, "occupancy_ratio"),
    (catalogue.MIG_ACTIVITY, {"kind": "tensor"}, "tensor_ratio"),
    (catalogue.MIG_ACTIVITY, {"kind": "memory"}, "memory_ratio"),
)

# nvmlClocksEventReason*. Idle, and clocks that the operator set, are bits as well, but hold nothing down.
THROTTLES: Mapping[str, int] = {
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
}

# XIDs that mean lost work or a GPU to look at (NVIDIA, "XID errors"): page faults, stopped or killed channels, memory
# errors and what was done about them, NVLink, the bus, the GPU's own firmware. Each has a series from the start:
# growth needs a sample
# before the first one.
XIDS: tuple[int, ...] = (13, 31, 43, 45, 48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 154)


def families(readings: Sequence[GpuReading]) -> Iterator[Sample]:
    """One tuple per sample. Samples of one metric follow each other, as an exposition page wants them."""
    for reading in readings:
        yield catalogue.INFO, _info(reading), 1.0
    for metric, labels, name in SAMPLES:
        for reading in readings:
            if (value := getattr(reading, name)) is not None:
                yield metric, {"uuid": reading.uuid, **labels}, value
    for family in (_energy, _throttled_now, _xid_errors, _absences):
        for reading in readings:
            yield from family(reading)
    yield from _part_samples([part for reading in readings for part in reading.instances])


def _energy(reading: GpuReading) -> Iterator[Sample]:
    if reading.energy_joules is not None:
        yield (
            catalogue.ENERGY,
            {"uuid": reading.uuid, "method": reading.energy_method or "counter"},
            reading.energy_joules,
        )


def _throttled_now(reading: GpuReading) -> Iterator[Sample]:
    if reading.event_reasons is not None:
        for reason, bit in THROTTLES.items():
            yield (
                catalogue.THROTTLED_NOW,
                {"uuid": reading.uuid, "reason": reason},
                float(bool(reading.event_reasons & bit)),
            )


def _xid_errors(reading: GpuReading) -> Iterator[Sample]:
    if reading.xids is not None:
        for xid in XIDS:
            yield catalogue.XID_ERRORS, {"uuid": reading.uuid, "xid": str(xid)}, float(reading.xids.get(xid, 0))
        yield (
            catalogue.XID_ERRORS,
            {"uuid": reading.uuid, "xid": "other"},
            float(sum(n for xid, n in reading.xids.items() if xid not in XIDS)),
        )


def _absences(reading: GpuReading) -> Iterator[Sample]:
    """Count the absent fields of a GPU and its parts, by reason."""
    why = Counter(reading.absent.values())
    for part in reading.instances:
        why.update(part.absent.values())
    for reason, count in sorted(why.items()):
        yield catalogue.ABSENT, {"uuid": reading.uuid, "reason": reason}, float(count)


def _part_samples(parts: Sequence[MigReading]) -> Iterator[Sample]:
    labels = [{"uuid": part.uuid, "gpu_instance": str(part.gpu_instance)} for part in parts]
    for part, own in zip(parts, labels, strict=True):
        yield catalogue.MIG_INFO, {**own, "mig_uuid": part.mig_uuid or "", "profile": part.profile or ""}, 1.0
    for metric, more, name in _PART_SAMPLES:
        for part, own in zip(parts, labels, strict=True):
            if (value := getattr(part, name)) is not None:
                yield metric, {**own, **more}, value


def _info(reading: GpuReading) -> dict[str, str]:
    return {
        "uuid": reading.uuid,
        "index": "" if reading.index is None else str(reading.index),
        "name": reading.name or "",
        "driver_version": reading.driver_version or "",
        "pci_bus_id": reading.pci_bus_id or "",
        "mig": {True: "on", False: "off", None: "unknown"}[reading.mig],
    }
