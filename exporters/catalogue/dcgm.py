"""The series of NVIDIA's dcgm-exporter that our boards read where a team runs it and no sidecar. Read in its source,
never run by us.

Law: a Metric here names its base unit, a Field adds the unit in which DCGM really counts. Boards hold Fields, and the
only way from a Field to a figure goes through `base`, so that nobody shows percent as a ratio or nanoseconds as
seconds.
Sources: NVIDIA/dcgm-exporter at d5e5f51 (May 2026): etc/default-counters.csv for names, kinds and units,
internal/pkg/rendermetrics for labels; NVIDIA/DCGM dcgmlib/dcgm_fields.h for the fields that the list does not name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from exporters.catalogue.metric import Across, Kind, Metric, Provenance, Unit

# GPU_I_ID and GPU_I_PROFILE only on MIG instances; on Kubernetes pod, namespace and container of the workload come on
# top.
_LABELS = ("GPU_I_ID", "GPU_I_PROFILE", "UUID", "device", "gpu", "hostname", "modelName", "pci_bus_id")
_COMMENTED = "a line in dcgm-exporter's counters file, where the default one has it commented out"
_UNLISTED = "a line in dcgm-exporter's counters file; the default one does not name it"
_WHOLE_CARD = "Under MIG each instance repeats the figure of the whole card: take the highest by UUID, never the sum."


class Raw(Enum):
    """The unit in which DCGM counts; the value is the factor to the base unit."""

    PERCENT = 0.01
    MIB = 1048576.0
    MHZ = 1e6
    MILLIJOULES = 1e-3
    NANOSECONDS = 1e-9
    BASE = 1.0

    @property
    def called(self) -> str:
        return {"PERCENT": "%", "MIB": "MiB", "MHZ": "MHz", "MILLIJOULES": "mJ", "NANOSECONDS": "ns"}.get(
            self.name, "the base unit"
        )


@dataclass(frozen=True, slots=True)
class Field:
    """A metric of dcgm-exporter and the unit in which it counts."""

    metric: Metric
    raw: Raw

    def base(self, expr: str) -> str:
        """What was asked of this metric, in base units: seconds, bytes, joules, hertz, ratios from 0 to 1."""
        return expr if self.raw is Raw.BASE else f"{expr} * {self.raw.value:.10g}"


def _field(
    name: str,
    kind: Kind,
    unit: Unit,
    raw: Raw,
    meaning: str,
    across: Across = Across.MAX,
    needs: str = "",
    notes: tuple[str, ...] = (_WHOLE_CARD,),
    labels: tuple[str, ...] = _LABELS,
) -> Field:
    counted = () if raw is Raw.BASE else (f"Counts in {raw.called}.",)
    told = (*counted, *notes)
    return Field(
        Metric(
            f"DCGM_FI_{name}", kind, unit, meaning, labels, across, needs=needs, evidence=Provenance.SOURCE, notes=told
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
    "Share of the time in which the compute engine was active; by instance under MIG.",
    Across.MEAN,
    notes=("Profiling field: data-centre cards from Volta on.",),
)
DRAM_ACTIVE = _field(
    "PROF_DRAM_ACTIVE",
    Kind.GAUGE,
    Unit.RATIO,
    Raw.BASE,
    "Share of the cycles in which the interface of device memory moved data.",
    Across.MEAN,
    notes=("Profiling field: data-centre cards from Volta on.",),
)
SM_CLOCK = _field("DEV_SM_CLOCK", Kind.GAUGE, Unit.HERTZ, Raw.MHZ, "Clock of the SMs now.", Across.MIN)
MEM_CLOCK = _field("DEV_MEM_CLOCK", Kind.GAUGE, Unit.HERTZ, Raw.MHZ, "Clock of device memory now.", Across.MIN)

# Memory: under MIG each instance has its own, which add up.
_OWN = ("Under MIG each instance shows its own memory; pods that share a card repeat the same series.",)
FB_USED = _field(
    "DEV_FB_USED",
    Kind.GAUGE,
    Unit.BYTES,
    Raw.MIB,
    "Device memory in use, without what is reserved.",
    Across.SUM,
    notes=_OWN,
)
FB_FREE = _field("DEV_FB_FREE", Kind.GAUGE, Unit.BYTES, Raw.MIB, "Device memory that is free.", Across.SUM, notes=_OWN)
FB_RESERVED = _field(
    "DEV_FB_RESERVED",
    Kind.GAUGE,
    Unit.BYTES,
    Raw.MIB,
    "Device memory that driver and firmware keep for themselves.",
    Across.SUM,
    notes=_OWN,
)

# Power and heat.
POWER_USAGE = _field("DEV_POWER_USAGE", Kind.GAUGE, Unit.WATTS, Raw.BASE, "Power the whole board draws.", Across.SUM)
POWER_LIMIT = _field(
    "DEV_POWER_MGMT_LIMIT", Kind.GAUGE, Unit.WATTS, Raw.BASE, "The power limit in force.", Across.SUM, needs=_UNLISTED
)
ENERGY = _field(
    "DEV_TOTAL_ENERGY_CONSUMPTION",
    Kind.COUNTER,
    Unit.JOULES,
    Raw.MILLIJOULES,
    "Energy used since the driver was loaded.",
    Across.SUM,
)
GPU_TEMP = _field("DEV_GPU_TEMP", Kind.GAUGE, Unit.CELSIUS, Raw.BASE, "Temperature of the GPU.")
MEMORY_TEMP = _field("DEV_MEMORY_TEMP", Kind.GAUGE, Unit.CELSIUS, Raw.BASE, "Temperature of device memory.")
_NANO = (
    _WHOLE_CARD,
    "NVIDIA's older lists say microseconds; the list was corrected to ns in November 2025 (dcgm-exporter #589).",
)
POWER_VIOLATION = _field(
    "DEV_POWER_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time the clocks were held down by the power limit.",
    needs=_COMMENTED,
    notes=_NANO,
)
THERMAL_VIOLATION = _field(
    "DEV_THERMAL_VIOLATION", Kind.COUNTER, Unit.SECONDS, Raw.NANOSECONDS, "Time the clocks were held down by heat.",
    needs=_COMMENTED, notes=_NANO,
)  # fmt: skip
SYNC_BOOST_VIOLATION = _field(
    "DEV_SYNC_BOOST_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time the clocks were held down to keep a group of cards in step.",
    needs=_COMMENTED,
    notes=_NANO,
)
BOARD_LIMIT_VIOLATION = _field(
    "DEV_BOARD_LIMIT_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time the clocks were held down by a limit of the board.",
    needs=_COMMENTED,
    notes=_NANO,
)
RELIABILITY_VIOLATION = _field(
    "DEV_RELIABILITY_VIOLATION",
    Kind.COUNTER,
    Unit.SECONDS,
    Raw.NANOSECONDS,
    "Time the clocks were held down by the reliability voltage limit.",
    needs=_COMMENTED,
    notes=_NANO,
)

# Errors.
XID_ERRORS = _field(
    "DEV_XID_ERRORS", Kind.GAUGE, Unit.NONE, Raw.BASE, "Number of the last XID error; 0 while there was none.",
    notes=("A code, not a count: an XID that comes twice looks like one.",), labels=(*_LABELS, "err_code", "err_msg"),
)  # fmt: skip
ECC_CORRECTED = _field(
    "DEV_ECC_SBE_AGG_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Single-bit memory errors, corrected, over the card's life.",
    needs=_COMMENTED,
)
ECC_UNCORRECTED = _field(
    "DEV_ECC_DBE_AGG_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Double-bit memory errors, not corrected, over the card's life.",
    needs=_COMMENTED,
)
_LEVEL = (
    _WHOLE_CARD,
    "dcgm-exporter's list calls it a counter; it is the number of rows remapped so far, and read as it stands.",
)
REMAPPED_CORRECTED = _field(
    "DEV_CORRECTABLE_REMAPPED_ROWS",
    Kind.GAUGE,
    Unit.COUNT,
    Raw.BASE,
    "Memory rows replaced by spare ones after corrected errors.",
    Across.SUM,
    notes=_LEVEL,
)
REMAPPED_UNCORRECTED = _field(
    "DEV_UNCORRECTABLE_REMAPPED_ROWS",
    Kind.GAUGE,
    Unit.COUNT,
    Raw.BASE,
    "Memory rows replaced by spare ones after uncorrected errors.",
    Across.SUM,
    notes=_LEVEL,
)
REMAP_FAILURE = _field(
    "DEV_ROW_REMAP_FAILURE", Kind.GAUGE, Unit.FLAG, Raw.BASE, "1 when a memory row could not be replaced."
)
_REPAIRED = ("The link repeats what was damaged, so nothing is lost but time.",)
NVLINK_CRC = _field(
    "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Damaged packets on the card's NVLinks.",
    Across.SUM,
    needs=_COMMENTED,
    notes=_REPAIRED,
)
NVLINK_REPLAY = _field(
    "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Packets that had to be sent again on the card's NVLinks.",
    Across.SUM,
    needs=_COMMENTED,
    notes=_REPAIRED,
)
NVLINK_RECOVERY = _field(
    "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    Kind.COUNTER,
    Unit.COUNT,
    Raw.BASE,
    "Times an NVLink had to be trained again.",
    Across.SUM,
    needs=_COMMENTED,
    notes=("Traffic of the card stands still meanwhile.",),
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
