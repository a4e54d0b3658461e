"""Series of NVIDIA's dcgm-exporter, for hosts that run it instead of the sidecar. Read in its source, not run.

Invariant: a Metric here names its base unit; a Field adds the unit that DCGM uses. Dashboards hold Fields and convert
with `base`, so that no panel shows percent as a ratio or nanoseconds as seconds.

Sources: NVIDIA/dcgm-exporter at d5e5f51 (May 2026): etc/default-counters.csv for names, kinds and units,
internal/pkg/rendermetrics for labels; NVIDIA/DCGM dcgmlib/dcgm_fields.h for the fields that the list does not name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from exporters.catalogue.metric import Across, Kind, Metric, Provenance, Unit

# GPU_I_ID and GPU_I_PROFILE only on MIG instances; Kubernetes adds pod, namespace and container of the workload.
_LABELS = ("GPU_I_ID", "GPU_I_PROFILE", "UUID", "device", "gpu", "hostname", "modelName", "pci_bus_id")
_COMMENTED = "a line in dcgm-exporter's counters file (commented out in the default file)"
_UNLISTED = "a line in dcgm-exporter's counters file (not in the default file)"
_WHOLE_GPU = "Under MIG each instance repeats the value of the whole GPU: take the maximum by UUID, not the sum."


class Raw(Enum):
    """Unit that DCGM uses; the value is the factor to the base unit."""

    PERCENT = 0.01
    MIB = 1048576.0
    MHZ = 1e6
    MILLIJOULES = 1e-3
    NANOSECONDS = 1e-9
    BASE = 1.0

    @property
    def label(self) -> str:
        return {"PERCENT": "%", "MIB": "MiB", "MHZ": "MHz", "MILLIJOULES": "mJ", "NANOSECONDS": "ns"}.get(
            self.name, "the base unit"
        )


@dataclass(frozen=True, slots=True)
class Field:
    """Metric of dcgm-exporter and the unit that it uses."""

    metric: Metric
    raw: Raw

    def base(self, expr: str) -> str:
        """Convert an expression of this metric to base units: seconds, bytes, joules, hertz, ratios from 0 to 1."""
        return expr if self.raw is Raw.BASE else f"{expr} * {self.raw.value:.10g}"


def _field(
    name: str,
    kind: Kind,
    unit: Unit,
    raw: Raw,
    meaning: str,
    across: Across = Across.MAX,
    needs: str = "",
    notes: tuple[str, ...] = (_WHOLE_GPU,),
    labels: tuple[str, ...] = _LABELS,
) -> Field:
    raw_unit = () if raw is Raw.BASE else (f"Counts in {raw.label}.",)
    all_notes = (*raw_unit, *notes)
    return Field(
        Metric(
            f"DCGM_FI_{name}",
            kind,
            unit,
            meaning,
            labels,
            across,
            needs=needs,
            evidence=Provenance.SOURCE,
            notes=all_notes,
        ),
        raw,
    )


# Activity.
GPU_UTIL = _field(
    "DEV_GPU_UTIL",
    Kind.GAUGE,
    Unit.RATIO,
    Raw.PERCENT,
    "Share of the last sampling period in which a kernel ran.",
    Across.MEAN,
    notes=("Not measured while MIG is on.",),
)
MEM_COPY_UTIL = _field(
    "DEV_MEM_COPY_UTIL",
    Kind.GAUGE,
    Unit.RATIO,
    Raw.PERCENT,
    "Share of the last sampling period in which device memory was read or written.",
    Across.MEAN,
    notes=("Not measured while MIG is on.",),
)
ENGINE_ACTIVE = _field(
    "PROF_GR_ENGINE_ACTIVE",
    Kind.GAUGE,
    Unit.RATIO,
    Raw.BASE,
    "Share of time with an active compute engine; per instance under MIG.",
    Across.MEAN,
    notes=("Profiling field: data-centre GPUs from Volta on.",),
)
DRAM_ACTIVE = _field(
    "PROF_DRAM_ACTIVE",
    Kind.GAUGE,
    Unit.RATIO,
    Raw.BASE,
    "Share of cycles in which the device memory interface moved data.",
    Across.MEAN,
    notes=("Profiling field: data-centre GPUs from Volta on.",),
)
SM_CLOCK = _field("DEV_SM_CLOCK", Kind.GAUGE, Unit.HERTZ, Raw.MHZ, "Current SM clock.", Across.MIN)
MEM_CLOCK = _field("DEV_MEM_CLOCK", Kind.GAUGE, Unit.HERTZ, Raw.MHZ, "Current memory clock.", Across.MIN)

# Memory: per instance under MIG; instances add up.
_OWN = ("Per instance under MIG; pods that share a GPU repeat the same series.",)
FB_USED = _field(
    "DEV_FB_USED",
    Kind.GAUGE,
    Unit.BYTES,
    Raw.MIB,
    "Device memory in use, without reserved memory.",
    Across.SUM,
    notes=_OWN,
)
FB_FREE = _field("DEV_FB_FREE", Kind.GAUGE, Unit.BYTES, Raw.MIB, "Free device memory.", Across.SUM, notes=_OWN)
FB_RESERVED = _field(
    "DEV_FB_RESERVED",
    Kind.GAUGE,
    Unit.BYTES,
    Raw.MIB,
    "Device memory reserved by driver and firmware.",
    Across.SUM,
    notes=_OWN,
)

# Power and temperature.
POWER_USAGE = _field("DEV_POWER_USAGE", Kind.GAUGE, Unit.WATTS, Raw.BASE, "Power draw of the whole board.", Across.SUM)
POWER_LIMIT = _field(
    "DEV_POWER_MGMT_LIMIT", Kind.GAUGE, Unit.WATTS, Raw.BASE, "Enforced power limit.", Across.SUM, needs=_UNLISTED
)
ENERGY = _field(
    "DEV_TOTAL_ENERGY_CONSUMPTION",
    Kind.COUNTER,
    Unit.JOULES,
    Raw.MILLIJOULES,
    "Energy consumption since the driver was loaded.",
    Across.SUM,
)
GPU_TEMP = _field("DEV_GPU_TEMP", Kind.GAUGE, Unit.CELSIUS, Raw.BASE, "Temperature of the GPU.")
MEMORY_TEMP = _field("DEV_MEMORY_TEMP", Kind.GAUGE, Unit.CELSIUS, Raw.BASE, "Temperature of device memory.")
_NANO = (
    _WHOLE_GPU,
    "NVIDIA's older lists say microseconds; the list was corrected to ns in November 2025 (dcgm-exporter #589).",
)
POWER_VIOLATION = _field(
    "DEV_POWER_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time with clocks throttled by the power limit.",
    needs=_COMMENTED,
    notes=_NANO,
)
THERMAL_VIOLATION = _field(
    "DEV_THERMAL_VIOLATION", Kind.COUNTER, Unit.SECONDS, Raw.NANOSECONDS, "Time with clocks throttled by temperature.",
    needs=_COMMENTED, notes=_NANO,
)  # fmt: skip
SYNC_BOOST_VIOLATION = _field(
    "DEV_SYNC_BOOST_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time with clocks throttled to synchronise a group of GPUs.",
    needs=_COMMENTED,
    notes=_NANO,
)
BOARD_LIMIT_VIOLATION = _field(
    "DEV_BOARD_LIMIT_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time with clocks throttled by a board limit.",
    needs=_COMMENTED,
    notes=_NANO,
)
RELIABILITY_VIOLATION = _field(
    "DEV_RELIABILITY_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time with clocks throttled by the reliability voltage limit.",
    needs=_COMMENTED,
    notes=_NANO,
)

# Errors.
XID_ERRORS = _field(
    "DEV_XID_ERRORS", Kind.GAUGE, Unit.NONE, Raw.BASE, "Number of the last XID error; 0 if there was none.",
    notes=("A code, not a count: a repeated XID does not change it.",), labels=(*_LABELS, "err_code", "err_msg"),
)  # fmt: skip
ECC_CORRECTED = _field(
    "DEV_ECC_SBE_AGG_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Corrected single-bit memory errors over the GPU's lifetime.",
    needs=_COMMENTED,
)
ECC_UNCORRECTED = _field(
    "DEV_ECC_DBE_AGG_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Uncorrected double-bit memory errors over the GPU's lifetime.",
    needs=_COMMENTED,
)
_LEVEL = (
    _WHOLE_GPU,
    "dcgm-exporter's list calls it a counter; it is the number of rows remapped so far, so read the value itself.",
)
REMAPPED_CORRECTED = _field(
    "DEV_CORRECTABLE_REMAPPED_ROWS",
    Kind.GAUGE,
    Unit.COUNT,
    Raw.BASE,
    "Memory rows remapped after corrected errors.",
    Across.SUM,
    notes=_LEVEL,
)
REMAPPED_UNCORRECTED = _field(
    "DEV_UNCORRECTABLE_REMAPPED_ROWS",
    Kind.GAUGE,
    Unit.COUNT,
    Raw.BASE,
    "Memory rows remapped after uncorrected errors.",
    Across.SUM,
    notes=_LEVEL,
)
REMAP_FAILURE = _field(
    "DEV_ROW_REMAP_FAILURE", Kind.GAUGE, Unit.FLAG, Raw.BASE, "1 if a memory row could not be remapped."
)
_REPAIRED = ("The link retransmits damaged data: it costs time, no data.",)
NVLINK_CRC = _field(
    "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "CRC errors on the GPU's NVLinks.",
    Across.SUM,
    needs=_COMMENTED,
    notes=_REPAIRED,
)
NVLINK_REPLAY = _field(
    "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Retransmitted packets on the GPU's NVLinks.",
    Across.SUM,
    needs=_COMMENTED,
    notes=_REPAIRED,
)
NVLINK_RECOVERY = _field(
    "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "NVLink retrainings.",
    Across.SUM,
    needs=_COMMENTED,
    notes=("NVLink traffic of the GPU stops during a retraining.",),
)

FIELDS: tuple[Field, ...] = (
    GPU_UTIL, MEM_COPY_UTIL, ENGINE_ACTIVE, DRAM_ACTIVE, SM_CLOCK, MEM_CLOCK, FB_USED, FB_FREE, FB_RESERVED,
    POWER_USAGE, POWER_LIMIT, ENERGY,
    GPU_TEMP, MEMORY_TEMP, POWER_VIOLATION, THERMAL_VIOLATION, SYNC_BOOST_VIOLATION, BOARD_LIMIT_VIOLATION,
    RELIABILITY_VIOLATION, XID_ERRORS,
    ECC_CORRECTED, ECC_UNCORRECTED, REMAPPED_CORRECTED, REMAPPED_UNCORRECTED, REMAP_FAILURE, NVLINK_CRC, NVLINK_REPLAY,
    NVLINK_RECOVERY,
)  # fmt: skip
DCGM: tuple[Metric, ...] = tuple(field.metric for field in FIELDS)
