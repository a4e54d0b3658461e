"""Parser of nvidia-smi's CSV (`--query-gpu`). Pure.

It has no MIG instances: NVML reports those."""

from __future__ import annotations

import re
from collections.abc import Sequence

from exporters.gpu.readings import GpuReading, GpuUnavailable, plausible


class BadReport(ValueError):
    """A line of nvidia-smi that is no row; the message names the line."""


_TEXT = {"uuid": "uuid", "name": "name", "driver_version": "driver_version", "pci.bus_id": "pci_bus_id"}
_MIB = 2.0**20

# nvidia-smi's field -> ours, the unit it prints when asked to, and its size in base units. Fields that a driver does
# not know are left out after it has said so (see GpuSource); the names are those of driver 550 and later.
_COLUMNS: dict[str, tuple[str, str, float]] = {
    "utilization.gpu": ("utilization_ratio", "%", 0.01),
    "utilization.memory": ("memory_busy_ratio", "%", 0.01),
    "memory.used": ("memory_used_bytes", "MiB", _MIB),
    "memory.free": ("memory_free_bytes", "MiB", _MIB),
    "memory.total": ("memory_total_bytes", "MiB", _MIB),
    "memory.reserved": ("memory_reserved_bytes", "MiB", _MIB),
    "power.draw": ("power_watts", "W", 1.0),
    "enforced.power.limit": ("power_limit_watts", "W", 1.0),
    "temperature.gpu": ("temperature_celsius", "C", 1.0),
    "temperature.memory": ("memory_temperature_celsius", "C", 1.0),
    "clocks.current.sm": ("sm_clock_hertz", "MHz", 1e6),
    "clocks.current.memory": ("mem_clock_hertz", "MHz", 1e6),
    "clocks_event_reasons_counters.sw_power_cap": ("throttle_sw_power_cap_seconds", "us", 1e-6),
    "clocks_event_reasons_counters.sw_thermal_slowdown": ("throttle_sw_thermal_slowdown_seconds", "us", 1e-6),
    "clocks_event_reasons_counters.sync_boost": ("throttle_sync_boost_seconds", "us", 1e-6),
    "clocks_event_reasons_counters.hw_thermal_slowdown": ("throttle_hw_thermal_slowdown_seconds", "us", 1e-6),
    "clocks_event_reasons_counters.hw_power_brake_slowdown": ("throttle_hw_power_brake_seconds", "us", 1e-6),
    "ecc.errors.corrected.aggregate.total": ("ecc_corrected", "", 1.0),
    "ecc.errors.uncorrected.aggregate.total": ("ecc_uncorrected", "", 1.0),
    "remapped_rows.correctable": ("remapped_corrected", "", 1.0),
    "remapped_rows.uncorrectable": ("remapped_uncorrected", "", 1.0),
}
_EVENT_REASONS = "clocks_event_reasons.active"
FIELDS: tuple[str, ...] = (*_TEXT, "index", "mig.mode.current", *_COLUMNS, _EVENT_REASONS)

_ABSENT_WORDS = {
    "": "not_available",
    "n/a": "not_available",
    "not supported": "not_supported",
    "insufficient permissions": "permission",
    "unknown error": "unknown_error",
    "gpu is lost": "lost",
    "gpu requires reset": "lost",
    "requested functionality has been deprecated": "deprecated",
}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(|%|MiB|W|C|MHz|us)")
_NOT_A_FIELD = re.compile(r'Field "([^"]{1,100})" is not a valid field to query')
_LOST_CARD = re.compile(
    r"Unable to determine the device handle for gpu ?[0-9]*:? *(?P<bus>[0-9a-f]+:[0-9a-f]+:[0-9a-f.]+): .*", re.I
)


def parse_csv(text: str, asked: Sequence[str] = FIELDS) -> list[GpuReading]:
    """Rows of `nvidia-smi --query-gpu=<asked> --format=csv,noheader,nounits`, one reading each.

    A cell is read by the type of its column and nothing else, so a name such as "NVIDIA H200" never becomes a number.
    Raises BadReport, naming the line, for a line with another number of columns or without any identity."""
    return [_row(number, line, asked) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _row(number: int, line: str, asked: Sequence[str]) -> GpuReading:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(asked):
        raise BadReport(
            f"nvidia-smi line {number} has {len(cells)} columns, {len(asked)} were asked for: {line.strip()[:120]!r}"
        )
    row = dict(zip(asked, cells, strict=True))
    text = {ours: cell for theirs, ours in _TEXT.items() if (cell := row.get(theirs, "")) and _why_absent(cell) is None}
    if not (uuid := text.pop("uuid", None) or text.get("pci_bus_id")):
        raise BadReport(f"nvidia-smi line {number} names neither uuid nor bus: {line.strip()[:120]!r}")
    index = row.get("index", "")
    values: dict[str, float] = {}
    absent: dict[str, str] = {}
    for theirs, (ours, unit, size) in _COLUMNS.items():
        value = _value(row[theirs], unit) if theirs in row else "not_known"
        if isinstance(value, str):
            absent[ours] = value
        else:
            values[ours] = value * size
    reasons = row.get(_EVENT_REASONS, "")
    bits = int(reasons, 16) if re.fullmatch("0x[0-9a-fA-F]{1,16}", reasons) else None
    if bits is None:
        absent["event_reasons"] = (_why_absent(reasons) or "implausible") if _EVENT_REASONS in row else "not_known"
    mig = {"Enabled": True, "Disabled": False}.get(row.get("mig.mode.current", ""))
    number_or_none = int(index) if re.fullmatch("[0-9]{1,6}", index) else None
    return plausible(
        GpuReading(uuid=uuid, index=number_or_none, mig=mig, event_reasons=bits, absent=absent, **text, **values)  # type: ignore[arg-type]
    )


def _value(cell: str, unit: str) -> float | str:
    """The number in a cell, in the printed unit, or the reason why there is none."""
    if found := _NUMBER.fullmatch(cell):
        return float(found[1]) if found[2] in ("", unit) else "implausible"
    return _why_absent(cell) or "implausible"


def _why_absent(cell: str) -> str | None:
    return _ABSENT_WORDS.get(cell.strip("[] ").lower())


def readings_of(code: int, out: str, err: str, asked: Sequence[str]) -> list[GpuReading]:
    """Interpret one run of nvidia-smi by its exit code (see its manual, RETURN VALUE). Raises GpuUnavailable."""
    lines = out.split("\n")
    lost = [
        GpuReading(uuid="", pci_bus_id=found["bus"], absent={"gpu": "lost"})
        for line in lines
        if (found := _LOST_CARD.match(line.strip()))
    ]
    rows = "\n".join(line for line in lines if not _LOST_CARD.match(line.strip()))
    said = f"nvidia-smi ended with code {code}: {((out + err).strip() or 'it said nothing')[:200]}"
    if "No devices were found" in out + err or code == 15 or (lost and not rows.strip()):
        raise GpuUnavailable("lost", said)
    if code and not lost:
        raise GpuUnavailable(
            {4: "permission", 9: "no_driver", 12: "no_driver", 18: "no_driver"}.get(code, "exit"), said
        )
    try:
        return parse_csv(rows, asked) + lost
    except BadReport as error:
        raise GpuUnavailable("parse", str(error)) from error


def refused_fields(report: str, requested: Sequence[str]) -> set[str]:
    """Return the requested fields that this driver does not know, as nvidia-smi names them in its refusal."""
    return set(_NOT_A_FIELD.findall(report)) & set(requested)
