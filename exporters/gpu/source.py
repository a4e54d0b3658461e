"""What the GPUs are doing: NVML through a child process that can be killed, nvidia-smi where NVML is not there.

Law: absent is absent, never 0. A driver that hangs costs one deadline: the child is killed and the loop goes on, even
when the kernel does not let the child die (state D); as long as such a child is left, no second one is started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar, get_args

import msgspec

from exporters.catalogue import gpu as catalogue
from exporters.catalogue.metric import Metric

log = logging.getLogger(__name__)

Reason = Literal["no_driver", "hang", "lost", "permission", "parse", "exit"]
REASONS: tuple[str, ...] = get_args(Reason)

# -P: nothing is imported from the folder it is started in
NVML_COMMAND = (sys.executable, "-P", "-m", "exporters.gpu.nvml_child")
SMI_COMMAND = ("nvidia-smi",)

_MOST_OUTPUT_BYTES = 1 << 20
_MOST_BACKOFF_S = 30.0
_LETTING_GO_S = 0.2  # how long a killed child is waited for; one in state D stays longer


class GpuUnavailable(Exception):
    """No reading could be had. `reason` is one of REASONS: few enough to be a label."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason if reason in REASONS else "exit"
        self.why = why


class BadReport(ValueError):
    """nvidia-smi printed a line that is no row; the message names the line."""


@dataclass(frozen=True, slots=True)
class MigReading:
    """One GPU instance of a card under MIG; uuid is the card's. The shares are over the time since the reading
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
    """One card at one moment, in base units. None: the card, its driver or its mode does not tell; `absent` says why,
    by field.

    energy_joules: since the driver was loaded (energy_method "counter") or since we started ("integrated").
    throttle_*_seconds, nvlink_*: since the driver was loaded; the hw_ ones by NVML since we started. ecc_*: over the
    card's life.
    nvlink_received, nvlink_transmitted: bytes. event_reasons: the driver's bits (see THROTTLES). xids: XID -> how
    often, since we started; None where nobody listens. absent["gpu"]: nothing of this card could be read;
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
    """The same reading without numbers that cannot be: a negative or impossible value becomes absent["..."] =
    "implausible"."""
    wrong = [
        n
        for n in _NUMBERS[type(reading)]
        if (v := getattr(reading, n)) is not None and not 0 <= v <= _MOST[n.rpartition("_")[2]]
    ]
    if not wrong:
        return reading
    return replace(reading, absent={**reading.absent, **dict.fromkeys(wrong, "implausible")}, **dict.fromkeys(wrong))  # type: ignore[arg-type]


# --- nvidia-smi: pure

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


_PART_COLUMNS = {
    "used": "memory_used_bytes",
    "free": "memory_free_bytes",
    "total": "memory_total_bytes",
    "reserved": "memory_reserved_bytes",
}


_LISTED = re.compile(
    r"(?P<card>GPU) \d+: .*\(UUID: (?P<uuid>\S+)\)|\s+MIG (?:\d+c\.)?(?P<profile>\S+)\s+Device\s+(?P<index>\d+):"
    r" \(UUID: (?P<mig>\S+)\)"
)


def parse_list(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """UUID and profile of each MIG device in what `nvidia-smi -L` prints, by the UUID of its card and its number there.

    A compute instance such as 1c.3g.71gb has the profile of its GPU instance, as by NVML."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    card = ""
    for line in filter(None, map(_LISTED.match, text.split("\n"))):
        if line["card"]:
            card = line["uuid"]
        else:
            found[card, line["index"]] = line["mig"], line["profile"]
    return found


def parse_mig(text: str, listing: str = "") -> list[MigReading]:
    """The GPU instances in what `nvidia-smi -q -x` prints, whichever the version of its DTD: this part has been the
    same in all.

    It tells neither UUID nor profile; `nvidia-smi -L`, the listing, does. Compute instances of one GPU instance share
    its memory and repeat it; the first one is taken. Raises BadReport."""
    if "<!ENTITY" in text:
        raise BadReport("nvidia-smi -q -x declares entities, which it never does")
    try:
        root = ElementTree.fromstring(text)  # noqa: S314  without entities, and of bounded size
    except (ElementTree.ParseError, UnicodeEncodeError) as error:
        raise BadReport(f"nvidia-smi -q -x printed no XML: {error}") from error
    named = parse_list(listing)
    found: dict[tuple[str, int], MigReading] = {}
    for card in root.iterfind("gpu"):
        for part in card.iterfind("mig_devices/mig_device"):
            reading = _part(card.findtext("uuid", "").strip() or card.get("id", ""), part, named)
            found.setdefault((reading.uuid, reading.gpu_instance), reading)
    return list(found.values())


def _part(uuid: str, part: ElementTree.Element, named: Mapping[tuple[str, str], tuple[str, str]]) -> MigReading:
    number = part.findtext("gpu_instance_id", "").strip()
    if not uuid or not re.fullmatch("[0-9]{1,6}", number):
        raise BadReport(f"nvidia-smi -q -x shows a MIG device without card or instance: {uuid!r}, {number[:20]!r}")
    told = {
        ours: _value(part.findtext(f"fb_memory_usage/{theirs}", "").strip(), "MiB")
        for theirs, ours in _PART_COLUMNS.items()
    }
    values = {name: value * _MIB for name, value in told.items() if isinstance(value, float)}
    absent = {name: why for name, why in told.items() if isinstance(why, str)}
    mig_uuid, profile = named.get((uuid, part.findtext("index", "").strip()), (None, None))
    return plausible(MigReading(uuid, int(number), mig_uuid, profile, absent=absent, **values))


def _value(cell: str, unit: str) -> float | str:
    """The number in a cell, in the printed unit, or the reason why there is none."""
    if found := _NUMBER.fullmatch(cell):
        return float(found[1]) if found[2] in ("", unit) else "implausible"
    return _why_absent(cell) or "implausible"


def _why_absent(cell: str) -> str | None:
    return _ABSENT_WORDS.get(cell.strip("[] ").lower())


# --- what nobody counts: pure


class Integral:
    """Joules from watts, or seconds from yes (1) and no (0), by trapezoids, for cards that do not count them. It never
    falls.

    A gap longer than max_gap_s counts nothing: nobody knows what the card did meanwhile. Nor does a clock that went
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


# --- samples: pure

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

# XIDs that mean lost work or a card to look at (NVIDIA, "XID errors"): page faults, stopped or killed channels, memory
# errors and what was done about them, NVLink, the bus, the card's own firmware. Each has a series from the start:
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
    """How many fields of a card and its parts are absent, by why."""
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


# --- the edge: processes


class _Answer(msgspec.Struct, frozen=True):
    """What the NVML child says; see exporters/gpu/nvml_child.py."""

    gpus: list[GpuReading] = []  # msgspec copies it
    xids: dict[str, list[int]] = {}
    error: str | None = None
    why: str = ""


_answers = msgspec.json.Decoder(_Answer)


class _Program:
    """A started program in a process group of its own. Its pipes are ours, so they can be let go even while someone
    holds the far end."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        out: asyncio.StreamReader,
        err: asyncio.StreamReader,
        held: Sequence[asyncio.BaseTransport],
    ):
        self.process, self.out, self.err, self._held = process, out, err, held

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str] | None, stdin: int) -> _Program:
        """Raises OSError when there is no such program."""
        readers: list[asyncio.StreamReader] = []
        held: list[asyncio.BaseTransport] = []
        far: list[int] = []
        try:
            for _ in range(2):
                ours, theirs = os.pipe()
                far.append(theirs)
                reader = asyncio.StreamReader(limit=_MOST_OUTPUT_BYTES)
                held.append(await _connect(reader, ours))
                readers.append(reader)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=far[0], stderr=far[1], env=env, start_new_session=True
            )  # fmt: skip
        except BaseException:
            for transport in held:
                transport.close()
            raise
        finally:
            for end in far:
                os.close(end)
        return cls(process, readers[0], readers[1], held)

    def kill(self) -> None:
        """SIGKILL to the whole group, then let the pipes go. Does not wait."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.release_body()

    def release_body(self) -> None:
        for transport in self._held:
            transport.close()
        if self.process.stdin:
            self.process.stdin.close()


async def _connect(reader: asyncio.StreamReader, fd: int) -> asyncio.BaseTransport:
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return transport


async def _whole(reader: asyncio.StreamReader) -> str:
    text = bytearray()
    while chunk := await reader.read(1 << 16):
        text += chunk
        if len(text) > _MOST_OUTPUT_BYTES:
            raise GpuUnavailable("parse", f"nvidia-smi printed more than {_MOST_OUTPUT_BYTES} bytes: this is no report")
    return text.decode(errors="replace")


class GpuSource:
    """Readings of all cards, from whichever of NVML and nvidia-smi answers.

    nvml, smi: the commands to run. env: their environment, ours by default. clock: seconds that never go back.
    backoff_s: pause after a first failure, doubled each time up to 30 s; reads in between fail at once, with the same
    reason.
    reprobe_s: how often a missing driver, or NVML behind a working nvidia-smi, is looked for again.
    energy_gap_s: see Integral; keep it above the time between two reads."""

    def __init__(
        self,
        nvml: Sequence[str] = NVML_COMMAND,
        smi: Sequence[str] = SMI_COMMAND,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        backoff_s: float = 1.0,
        reprobe_s: float = 30.0,
        energy_gap_s: float = 30.0,
    ) -> None:
        self.method: Literal["nvml", "nvidia-smi"] | None = None
        self._nvml, self._smi, self._env, self._clock = nvml, smi, env, clock
        self._backoff_s, self._reprobe_s, self._energy_gap_s = backoff_s, reprobe_s, energy_gap_s
        self._busy = asyncio.Lock()
        self._child: _Program | None = None
        self._dying: list[_Program] = []
        self._no_nvml_before = self._nothing_before = 0.0
        self._failures = 0
        self._last: GpuUnavailable | None = None
        self._unknown_fields: set[str] = set()
        self._known: dict[str, GpuReading] = {}
        self._integrals: dict[tuple[str, str], Integral] = {}
        self._xids: dict[str, Counter[int]] = {}

    async def __aenter__(self) -> GpuSource:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop what runs; a child that the kernel holds is left to it."""
        self._drop_child()
        await self._reap()

    async def read(self, deadline_s: float = 2.0) -> list[GpuReading]:
        """One reading per card. Raises GpuUnavailable, at the latest a moment after the deadline.

        The first read after a start also loads the driver, which takes seconds where no process holds it open: give it
        longer."""
        await self._refuse_while_waiting()
        try:
            async with asyncio.timeout(deadline_s), self._busy:
                readings = await self._sample()
        except TimeoutError:
            await self._reap()
            raise self._failed(
                GpuUnavailable("hang", f"the GPU driver did not answer within {deadline_s:g} s")
            ) from None
        except GpuUnavailable as error:
            await self._reap()
            raise self._failed(error) from error.__cause__
        self._failures, self._last = 0, None
        return self._finished(readings)

    async def _refuse_while_waiting(self) -> None:
        await self._reap()
        if self._dying:
            pid = self._dying[0].process.pid
            raise GpuUnavailable(
                "hang", f"the killed process {pid} is still held by the GPU driver; no new one is started until it ends"
            )
        if self._last and (wait_s := self._nothing_before - self._clock()) > 0:
            raise GpuUnavailable(self._last.reason, f"{self._last.why}; next try in {wait_s:.0f} s")

    def _failed(self, error: GpuUnavailable) -> GpuUnavailable:
        """Note a failure and when to try again."""
        self._failures += 1
        backoff_s = min(self._backoff_s * 2 ** min(self._failures - 1, 10), _MOST_BACKOFF_S)
        self._nothing_before = self._clock() + (self._reprobe_s if error.reason == "no_driver" else backoff_s)
        self._last = error
        return error

    def _finished(self, readings: Iterable[GpuReading]) -> list[GpuReading]:
        """Name lost cards after what was known of them, integrate what nobody counts, and let a uuid appear once."""
        now = self._clock()
        found: dict[str, GpuReading] = {}
        for raw in readings:
            reading = plausible(self._recalled(raw) if "gpu" in raw.absent else raw)
            if reading.uuid not in found:
                parts = tuple(map(plausible, reading.instances))
                counted = self._with_held(self._with_energy(reading, now), now)
                heard = self._xids.get(reading.uuid)
                found[reading.uuid] = replace(counted, instances=parts, xids=None if heard is None else dict(heard))
        self._known |= {uuid: reading for uuid, reading in found.items() if "gpu" not in reading.absent}
        return list(found.values())

    def _recalled(self, lost: GpuReading) -> GpuReading:
        """A lost card has only an index or a bus id left; its name is in our memory."""
        bus = (lost.pci_bus_id or "-").lower()[-10:]
        for known in self._known.values():
            if (lost.index is not None and known.index == lost.index) or (known.pci_bus_id or "").lower().endswith(bus):
                return GpuReading(
                    known.uuid,
                    known.index,
                    known.name,
                    known.driver_version,
                    known.pci_bus_id,
                    known.mig,
                    absent=lost.absent,
                )
        return replace(lost, uuid=lost.pci_bus_id or f"index:{lost.index}")

    def _with_energy(self, reading: GpuReading, now: float) -> GpuReading:
        if reading.energy_joules is not None:
            return replace(reading, energy_method="counter")
        if reading.power_watts is None:
            return reading
        joules = self._integral(reading.uuid, "energy_joules").add(reading.power_watts, now)
        absent = {name: why for name, why in reading.absent.items() if name != "energy_joules"}
        return replace(reading, energy_joules=joules, energy_method="integrated", absent=absent)

    def _with_held(self, reading: GpuReading, now: float) -> GpuReading:
        """The two hw_ slowdowns, where the driver says only whether they hold now."""
        if reading.event_reasons is None:
            return reading
        for reason in ("hw_thermal_slowdown", "hw_power_brake"):
            name = f"throttle_{reason}_seconds"
            if getattr(reading, name) is None:
                held_s = self._integral(reading.uuid, name).add(
                    float(bool(reading.event_reasons & THROTTLES[reason])), now
                )
                absent = {n: why for n, why in reading.absent.items() if n != name}
                reading = replace(reading, absent=absent, **{name: held_s})  # type: ignore[arg-type]
        return reading

    def _integral(self, uuid: str, name: str) -> Integral:
        return self._integrals.setdefault((uuid, name), Integral(self._energy_gap_s))

    async def _sample(self) -> list[GpuReading]:
        if self._child is None and self._clock() < self._no_nvml_before:
            return await self._read_smi()
        try:
            return await self._read_nvml()
        except GpuUnavailable as no_nvml:
            if no_nvml.reason != "no_driver":
                raise
            self._no_nvml_before = self._clock() + self._reprobe_s
            try:
                return await self._read_smi()
            except GpuUnavailable as no_smi:
                if no_smi.reason != "no_driver":
                    raise
                raise GpuUnavailable(
                    "no_driver", f"{no_nvml.why}; {no_smi.why}; without an NVIDIA driver there are no GPU series"
                ) from None

    # NVML, by the child

    async def _read_nvml(self) -> list[GpuReading]:
        try:
            line = await self._ask_child()
            if not line:
                raise GpuUnavailable("exit", await self._obituary())
            answer = _answers.decode(line)
        except msgspec.DecodeError as error:
            self._drop_child()
            raise GpuUnavailable("parse", f"the NVML process answered what is no reading: {error}") from error
        except BaseException:  # a deadline or a cancellation above all: half an answer must not meet the next question
            self._drop_child()
            raise
        if answer.error:
            self._drop_child()
            raise GpuUnavailable(answer.error, answer.why)
        self._hear(answer.xids)
        if not answer.gpus or all("gpu" in reading.absent for reading in answer.gpus):
            raise GpuUnavailable(
                "lost", f"NVML answers, but none of its {len(answer.gpus)} cards can be read; see 'dmesg | grep -i xid'"
            )
        self.method = "nvml"
        return answer.gpus

    def _hear(self, xids: Mapping[str, Sequence[int]]) -> None:
        for uuid, heard in xids.items():
            self._xids.setdefault(uuid, Counter()).update(heard)
            if heard:
                log.warning("GPU %s: the driver reports XID %s", uuid, ", ".join(map(str, heard)))

    async def _ask_child(self) -> bytes:
        """One question, one line; empty when the child ended. The child is started when there is none."""
        try:
            if self._child is None:
                self._child = await _Program.start(self._nvml, self._env, asyncio.subprocess.PIPE)
            stdin = self._child.process.stdin
            assert stdin is not None  # noqa: S101  # it was started with a pipe
            stdin.write(b"read\n")
            await stdin.drain()
            return await self._child.out.readline()
        except ConnectionError:
            return b""
        except OSError as error:
            raise GpuUnavailable("exit", f"the NVML process cannot be started: {error}") from error
        except ValueError as error:
            raise GpuUnavailable("parse", f"the NVML process answered without an end: {error}") from error

    async def _obituary(self) -> str:
        if self._child is None:
            return "the NVML process ended"
        said = (await _whole(self._child.err)).strip().split("\n")[-1]
        return f"the NVML process ended with code {await self._child.process.wait()}: {said[:200] or 'it said nothing'}"

    # nvidia-smi

    async def _read_smi(self) -> list[GpuReading]:
        """Ask for all fields; a driver that does not know one refuses them all and names it, so ask again without
        it."""
        for _ in FIELDS:
            asked = [name for name in FIELDS if name not in self._unknown_fields]
            code, out, err = await self._run_smi(f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits")
            refused = set(_NOT_A_FIELD.findall(out + err)) & set(asked)
            if not refused:
                break
            log.info("nvidia-smi does not know %s; going on without", ", ".join(sorted(refused)))
            self._unknown_fields |= refused
        readings = _understood(code, out, err, asked)
        self.method = "nvidia-smi"
        return await self._with_instances(readings) if any(reading.mig for reading in readings) else readings

    async def _with_instances(self, readings: Sequence[GpuReading]) -> list[GpuReading]:
        """Divided cards with their parts, of which only the long report and the list tell. What they fail to tell costs
        nothing else."""
        code, out, err = await self._run_smi("-q", "-x")
        _, listing, _ = await self._run_smi("-L")
        try:
            if code:
                raise BadReport(f"nvidia-smi -q -x ended with code {code}: {(out + err).strip()[:200]}")
            parts = parse_mig(out, listing)
        except BadReport as error:
            log.debug("%s", error)  # each second; what counts is that it is absent
            return [replace(r, absent={**r.absent, "instances": "unknown_error"}) if r.mig else r for r in readings]
        return [replace(r, instances=tuple(part for part in parts if part.uuid == r.uuid)) for r in readings]

    async def _run_smi(self, *arguments: str) -> tuple[int, str, str]:
        try:
            program = await _Program.start((*self._smi, *arguments), self._env, asyncio.subprocess.DEVNULL)
        except PermissionError as error:
            raise GpuUnavailable("permission", f"{self._smi[0]} may not be run: {error}") from error
        except OSError as error:
            raise GpuUnavailable("no_driver", f"{self._smi[0]} cannot be run: {error.strerror or error}") from error
        try:
            out, err = await asyncio.gather(_whole(program.out), _whole(program.err))
            code = await program.process.wait()
        except BaseException:
            self._end(program)
            raise
        program.release_body()
        return code, out, err

    # ends

    def _drop_child(self) -> None:
        if self._child:
            self._end(self._child)
            self._child = None

    def _end(self, program: _Program) -> None:
        program.kill()
        self._dying.append(program)

    async def _reap(self) -> None:
        """Wait a moment for what was killed."""
        ends = [asyncio.ensure_future(program.process.wait()) for program in self._dying]
        if ends:
            _, held = await asyncio.wait(ends, timeout=_LETTING_GO_S)
            for end in held:
                end.cancel()
        self._dying = [program for program in self._dying if program.process.returncode is None]


def _understood(code: int, out: str, err: str, asked: Sequence[str]) -> list[GpuReading]:
    """What one run of nvidia-smi means, by its exit code (see its manual, RETURN VALUE). Raises GpuUnavailable."""
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
