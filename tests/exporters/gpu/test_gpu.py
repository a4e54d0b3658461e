"""GPU sampling: what nvidia-smi prints and NVML answers, and what a driver that hangs may cost. Real GPUs are not
needed: a fake libnvidia-ml and a fake nvidia-smi stand in for what cannot be had."""

# ruff: noqa: ASYNC220  a test may wait for a file

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters import sidecar
from exporters.catalogue import gpu as catalogue
from exporters.gpu import series
from exporters.gpu.nvidia_smi import FIELDS, BadReport, parse_csv, refused_fields
from exporters.gpu.readings import _NUMBERS, REASONS, GpuReading, GpuUnavailable, Integral, MigReading
from exporters.gpu.series import families
from exporters.gpu.source import GpuSource
from exporters.sidecar import Sidecar
from exporters.sidecar_config import SidecarConfig
from exporters.sidecar_listener import application
from tests.support import memory
from tests.support.mig_instances import H200 as H200_INSTANCES
from tests.support.wait import eventually, until

HERE = Path(__file__).parents[2]
GOLDEN = HERE / "golden" / "nvidia-smi"
H200 = (GOLDEN / "h200.csv").read_text()


# --- nvidia-smi's rows


def test_units_become_base_units():
    """MiB, percent, MHz and microseconds stay outside."""
    busy, idle = parse_csv(H200)
    assert ("NVIDIA H200", "580.65.06", "00000000:83:00.0", 0, False) == (
        busy.name,
        busy.driver_version,
        busy.pci_bus_id,
        busy.index,
        busy.mig,
    )
    assert (0.87, 0.42, 120034 * 2**20, 614 * 2**20) == (
        busy.utilization_ratio, busy.memory_busy_ratio, busy.memory_used_bytes, busy.memory_reserved_bytes
    )  # fmt: skip
    assert (412.35, 61.0, 70.0, 1.98e9, 3.201e9) == (
        busy.power_watts,
        busy.temperature_celsius,
        busy.memory_temperature_celsius,
        busy.sm_clock_hertz,
        busy.mem_clock_hertz,
    )
    assert (74.0, 1.5, 4) == (
        busy.throttle_sw_power_cap_seconds,
        busy.throttle_hw_power_brake_seconds,
        busy.event_reasons,
    )
    assert (0.0, {}) == (idle.utilization_ratio, idle.absent)


def test_a_divided_card_has_no_utilization_rather_than_zero():
    """Under MIG the driver measures no utilisation for the whole GPU; 0 would read as idle."""
    [card] = parse_csv((GOLDEN / "h200-mig.csv").read_text())
    assert (True, None, None, None) == (
        card.mig,
        card.utilization_ratio,
        card.memory_busy_ratio,
        card.remapped_corrected,
    )
    assert 78.28 == card.power_watts
    assert "not_available" == card.absent["utilization_ratio"]


def test_each_gap_says_why():
    """What a GPU cannot do, what it is not allowed to say, and what failed are different news."""
    [old] = parse_csv((GOLDEN / "rtx-2080-super.csv").read_text())
    [sick] = parse_csv((GOLDEN / "unhealthy.csv").read_text())
    assert (None, "not_available", "not_supported") == (
        old.mig,
        old.absent["ecc_corrected"],
        old.absent["throttle_sync_boost_seconds"],
    )
    assert {
        "power_watts": "unknown_error",
        "temperature_celsius": "unknown_error",
        "ecc_corrected": "permission",
        "ecc_uncorrected": "permission",
        "throttle_hw_power_brake_seconds": "deprecated",
        "event_reasons": "unknown_error",
    } == sick.absent


def test_cards_of_other_makes_are_read_as_well():
    """An idle H100 of eight under an older driver; an L40S has no sensor in its memory and cannot be divided, which is
    no fault."""
    [idle] = parse_csv((GOLDEN / "h100-idle.csv").read_text())
    [busy] = parse_csv((GOLDEN / "l40s.csv").read_text())
    assert (3, 0.0, 69.94, 1, {}) == (
        idle.index,
        idle.utilization_ratio,
        idle.power_watts,
        idle.event_reasons,
        idle.absent,
    )
    assert (None, 0x24, {"memory_temperature_celsius": "not_available"}) == (busy.mig, busy.event_reasons, busy.absent)


def test_a_captured_h100_has_every_field():
    [idle] = parse_csv((GOLDEN / "h100-80gb-idle.csv").read_text())
    [busy] = parse_csv((GOLDEN / "h100-80gb-busy.csv").read_text())
    assert ({}, {}, "NVIDIA H100 80GB HBM3", "580.159.04") == (idle.absent, busy.absent, busy.name, busy.driver_version)
    assert (0.0, 71.84, 345e6, 1) == (idle.utilization_ratio, idle.power_watts, idle.sm_clock_hertz, idle.event_reasons)
    assert (1.0, 0.31, 697.0, 700.0, pytest.approx(13.779634), series.THROTTLES["sw_power_cap"]) == (
        busy.utilization_ratio,
        busy.memory_busy_ratio,
        busy.power_watts,
        busy.power_limit_watts,
        busy.throttle_sw_power_cap_seconds,
        busy.event_reasons,
    )
    for gpu in (idle, busy):
        memory_parts = (gpu.memory_used_bytes, gpu.memory_free_bytes, gpu.memory_reserved_bytes)
        assert abs(sum(memory_parts) - gpu.memory_total_bytes) <= 2 * 2**20  # each is rounded to MiB


def test_a_captured_refusal_names_the_field():
    said = (GOLDEN / "unknown-field.txt").read_text()
    unknown = "clocks_event_reasons_counters.nonsense"
    assert {unknown} == refused_fields(said, ("uuid", unknown, "name"))


@pytest.mark.parametrize(
    ("cell", "value", "why"),
    [
        ("87", 0.87, None),
        ("87 %", 0.87, None),
        ("87 MiB", None, "implausible"),
        ("101", None, "implausible"),
        ("-1", None, "implausible"),
        ("4294967295", None, "implausible"),
        ("NVIDIA H200", None, "implausible"),
        ("nan", None, "implausible"),
        ("1_0", None, "implausible"),
        ("٣", None, "implausible"),
        ("", None, "not_available"),
        ("[GPU is lost]", None, "lost"),
        ("[n/a]", None, "not_available"),
    ],
)
def test_a_cell_is_a_number_of_its_own_unit_or_nothing(cell: str, value: float | None, why: str | None):
    """Guessing a number out of text is how a peer came to export a GPU's name as 200."""
    [reading] = parse_csv(f"GPU-1, {cell}", ("uuid", "utilization.gpu"))
    assert (value, why) == (reading.utilization_ratio, reading.absent.get("utilization_ratio"))


def test_fields_that_were_not_asked_for_are_not_known():
    """An old driver refuses new fields; that is a gap with a reason too."""
    [reading] = parse_csv("GPU-1, 50", ("uuid", "utilization.gpu"))
    assert "not_known" == reading.absent["memory_reserved_bytes"]


def test_a_line_that_is_no_row_is_named():
    """The message carries the line, since nobody can rerun the moment."""
    with pytest.raises(BadReport, match=r"line 3 has 1 columns, 28 .*: 'Segmentation fault'"):
        parse_csv(H200 + "Segmentation fault\n")
    with pytest.raises(BadReport, match=r"line 1 .*uuid .*bus: '\[N/A\], 3'"):
        parse_csv("[N/A], 3", ("uuid", "index"))


CELL = st.one_of(
    st.text(st.characters(exclude_characters=",\n"), max_size=12),
    st.sampled_from(
        [
            "[N/A]",
            "N/A",
            "[Not Supported]",
            "[Unknown Error]",
            "0",
            "100",
            "1e5",
            "inf",
            "0x1F",
            "18446744073709551615",
            "7 MiB",
        ]
    ),
    st.floats().map(str),
    st.integers().map(str),
)


@settings(max_examples=150)
@given(st.lists(CELL, min_size=len(FIELDS), max_size=len(FIELDS)))
def test_whatever_is_printed_becomes_plausible_numbers_or_gaps(cells: list[str]):
    """No input crashes, no number is negative, and every number that is missing says why."""
    try:
        readings = parse_csv(", ".join(cells))
    except BadReport:
        return
    for reading in readings:
        for name in _NUMBERS[GpuReading]:
            value = getattr(reading, name)
            assert value is None or 0 <= value < float("inf")
            assert (value is None) == (name in reading.absent or name == "energy_joules" or name.startswith("nvlink_"))
        assert (reading.event_reasons is None) == ("event_reasons" in reading.absent)


@settings(max_examples=150)
@given(st.text())
def test_any_text_is_rows_or_a_bad_report(text: str):
    """Nothing else may come out of the parser."""
    with contextlib.suppress(BadReport):
        assert all(reading.uuid for reading in parse_csv(text))


# --- energy, and time held down


def test_energy_is_the_area_under_power():
    """100 W rising to 300 W over 2 s is 400 J."""
    integral = Integral()
    assert [0.0, 400.0, 700.0] == [integral.add(100, 10), integral.add(300, 12), integral.add(300, 13)]


def test_a_gap_counts_nothing():
    """Nobody knows what the GPU drew while nobody looked; nor when the clock went back."""
    integral = Integral(max_gap_s=5)
    assert [0.0, 0.0, 100.0, 100.0] == [
        integral.add(100, 0),
        integral.add(100, 6),
        integral.add(100, 7),
        integral.add(100, 3),
    ]


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(-50, 50)), max_size=50))
def test_integrated_energy_never_falls(steps: list[tuple[float, float]]):
    """It is a counter."""
    integral, now, before = Integral(), 0.0, 0.0
    for watts, step_s in steps:
        now += step_s
        assert before <= (before := integral.add(watts, now))


# --- samples


def test_absent_values_have_no_sample():
    """One GPU, one value, one gap: three samples."""
    reading = GpuReading("GPU-1", index=3, name="H200", power_watts=70.0, absent={"utilization_ratio": "not_available"})
    assert [
        (
            catalogue.INFO,
            {"uuid": "GPU-1", "index": "3", "name": "H200", "driver_version": "", "pci_bus_id": "", "mig": "unknown"},
            1.0,
        ),
        (catalogue.POWER, {"uuid": "GPU-1"}, 70.0),
        (catalogue.ABSENT, {"uuid": "GPU-1", "reason": "not_available"}, 1.0),
    ] == list(families([reading]))


def test_samples_carry_the_catalogued_labels_and_stay_together():
    """An exposition page needs a family in one piece, each sample once."""
    [divided] = parse_csv((GOLDEN / "h200-mig.csv").read_text())
    divided = replace(divided, instances=H200_INSTANCES, xids={31: 2, 999: 1, 998: 1})
    samples = list(families([*parse_csv(H200), divided]))
    order = [metric.name for metric, _, _ in samples]
    assert len(set(order)) == sum(1 for i, name in enumerate(order) if i == 0 or order[i - 1] != name)
    assert len(samples) == len({(m.name, *sorted(labels.items())) for m, labels, _ in samples})
    for metric, labels, _ in samples:
        assert sorted(metric.labels) == sorted(labels)
        assert metric in catalogue.GPU


def test_every_gpu_metric_can_be_sampled():
    """A metric in the catalogue that nothing fills would be a dead panel."""
    [card, _] = parse_csv(H200)
    numbers = dict.fromkeys(_NUMBERS[MigReading], 0.5)
    full = replace(
        card, energy_joules=1.0, absent={"x": "lost"}, xids={}, instances=(MigReading("u", 2, **numbers),),
        **{name: 1.0 for name in _NUMBERS[GpuReading] if name.startswith("nvlink_")},
    )  # fmt: skip
    assert set(catalogue.GPU) == {metric for metric, _, _ in families([full])}


def test_errors_of_the_driver_have_a_series_before_the_first_one():
    """Growth needs a sample before: what is known to matter starts at 0, and whatever else comes is never unseen."""
    card = GpuReading("GPU-1", xids={79: 1, 999: 2})
    counted = {labels["xid"]: value for metric, labels, value in families([card]) if metric is catalogue.XID_ERRORS}
    assert ({*map(str, series.XIDS), "other"}, 1.0, 0.0, 2.0) == (
        set(counted),
        counted["79"],
        counted["48"],
        counted["other"],
    )


def test_reasons_in_force_are_the_bits_of_the_driver():
    """Idle (1) and clocks that someone set (2) hold nothing down."""
    card = GpuReading("GPU-1", event_reasons=0x1 | 0x2 | 0x8 | 0x40)
    now = {labels["reason"]: value for metric, labels, value in families([card]) if metric is catalogue.THROTTLED_NOW}
    assert {"hw_slowdown", "hw_thermal_slowdown"} == {reason for reason, value in now.items() if value}
    assert series.THROTTLES.keys() == now.keys()


# --- NVML through its child


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """The environment in which libnvidia-ml.so.1 is the fake one, in a mode."""
    if not (gcc := shutil.which("gcc")):
        pytest.fail(
            "gcc is not installed; the fake NVML library of these tests is compiled with it (apt-get install gcc"
            " libc6-dev)"
        )

    def build(name: str, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        subprocess.run(
            [
                gcc,
                "-shared",
                "-fPIC",
                "-w",
                *flags,
                "-o",
                folder / "libnvidia-ml.so.1",
                HERE / "support/fake_nvml" / "nv.c",
            ],
            check=True,
        )
        return folder

    whole, part = build("nvml"), build("nvml-part", "-DMISSING")

    def environment(mode: str, missing: bool = False) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "LD_LIBRARY_PATH": str(part if missing else whole),
            "FAKE_NVML": mode,
        }

    return environment


@pytest.fixture
async def source() -> AsyncIterator[Callable[..., GpuSource]]:
    """GpuSources without pauses and without patience, closed at the end."""
    made: list[GpuSource] = []

    def make(**options: object) -> GpuSource:
        made.append(
            GpuSource(
                **{"smi": ("/nonexistent/smi",), "backoff_s": 0.0, "reprobe_s": 0.0, "kill_after_s": 0.0, **options}
            )
        )  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        await one.close()


def children() -> set[int]:
    """Our living children, and the dead ones that nobody has waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
        except OSError:
            continue
        parent = rest.rpartition(") ")[2].split()[1]
        if int(parent) == os.getpid():
            found.add(int(pid))
    return found


async def buried(source: GpuSource) -> bool:
    """Whether all children that were killed are gone; on a busy machine that may outlast what a read waits for them."""
    await source._reap()
    return not source._dying


async def failure(source: GpuSource, deadline_s: float = 60.0) -> GpuUnavailable:
    with pytest.raises(GpuUnavailable) as caught:
        await source.read(deadline_s)
    return caught.value


async def test_nvml_is_asked_first_and_by_one_child(fake_nvml, source):
    """Base units, the driver's own energy counter, and no new process per reading."""
    gpus = source(env=fake_nvml("ok"))
    first, other = await gpus.read(60)
    before = children()
    assert first == (await gpus.read(60))[0]
    assert before == children()
    assert ("nvml", "GPU-fake-0", "GPU-fake-1", "NVIDIA H200", "00000000:83:00.0", False) == (
        gpus.method, first.uuid, other.uuid, first.name, first.pci_bus_id, first.mig
    )  # fmt: skip
    assert (0.87, 2.0**30, 643825664, 412.345, 700.0, 61, 70) == (
        first.utilization_ratio,
        first.memory_used_bytes,
        first.memory_reserved_bytes,
        first.power_watts,
        first.power_limit_watts,
        first.temperature_celsius,
        first.memory_temperature_celsius,
    )
    assert (987654.321, "counter", 1.98e9, 3.201e9) == (
        first.energy_joules,
        first.energy_method,
        first.sm_clock_hertz,
        first.mem_clock_hertz,
    )
    assert (pytest.approx(74.0), pytest.approx(75.0)) == (
        first.throttle_sw_power_cap_seconds,
        first.throttle_sw_thermal_slowdown_seconds,
    )
    assert (5, None, "implausible") == (first.ecc_corrected, first.ecc_uncorrected, first.absent["ecc_uncorrected"])


async def test_what_nvml_does_not_support_is_absent(fake_nvml, source):
    """Only what an old GPU can say is left, and each gap has its reason."""
    [card, _] = await source(env=fake_nvml("not-supported")).read(10)
    assert (None, None, None, None, None) == (
        card.utilization_ratio, card.power_watts, card.energy_joules, card.memory_temperature_celsius, card.mig
    )  # fmt: skip
    assert (2.0**30, "not_supported", {"not_supported"}) == (
        card.memory_used_bytes,
        card.absent["memory_reserved_bytes"],
        set(card.absent.values()),
    )


async def test_a_missing_symbol_is_a_gap_and_energy_is_integrated(fake_nvml, source):
    """Drivers before Volta's energy counter still have power: 412.345 W over 2 s."""
    now = [100.0]
    gpus = source(env=fake_nvml("ok", missing=True), clock=lambda: now[0])
    first = (await gpus.read(10))[0]
    now[0] += 2
    second = (await gpus.read(10))[0]
    assert (0.0, pytest.approx(824.69), "integrated") == (
        first.energy_joules,
        second.energy_joules,
        second.energy_method,
    )
    assert ("not_known", None) == (second.absent["remapped_corrected"], second.absent.get("energy_joules"))


async def test_a_lost_card_keeps_its_name_and_does_not_take_the_others(fake_nvml, source):
    """One GPU off the bus is news about that GPU only."""
    gpus = source(env=fake_nvml("ok"))
    await gpus.read(10)
    gpus._drop_child()
    gpus._env = fake_nvml("lost")
    alive, lost = await gpus.read(10)
    assert (412.345, {"gpu": "lost"}, "GPU-fake-1", "NVIDIA H200", None) == (
        alive.power_watts,
        lost.absent,
        lost.uuid,
        lost.name,
        lost.power_watts,
    )
    assert 2 == len(await gpus.read(10))


async def test_links_are_counted_over_all_of_a_card(fake_nvml, source):
    """Bytes are KiB with the driver; the drained counters of errors have fixed places up to Hopper."""
    [card, _] = await source(env=fake_nvml("ok")).read(10)
    assert (139 * 1024, 138 * 1024) == (card.nvlink_received, card.nvlink_transmitted)
    assert (38, 45, 52, 59) == (
        card.nvlink_crc_flit_errors, card.nvlink_crc_data_errors, card.nvlink_replay_errors, card.nvlink_recovery_errors
    )  # fmt: skip


async def test_heat_is_timed_where_the_driver_only_says_that_it_holds(fake_nvml, source):
    """Two seconds between two readings that both say hw_thermal_slowdown are two seconds; the power brake stays at
    0."""
    now = [100.0]
    gpus = source(env=fake_nvml("held"), clock=lambda: now[0])
    await gpus.read(10)
    now[0] += 2
    card = (await gpus.read(10))[0]
    assert (0x4C, 2.0, 0.0) == (
        card.event_reasons,
        card.throttle_hw_thermal_slowdown_seconds,
        card.throttle_hw_power_brake_seconds,
    )
    assert not [name for name in card.absent if name.startswith("throttle_")]


async def test_driver_errors_count_once_and_outlive_the_child(fake_nvml, source, caplog):
    """Two XIDs 31 and one that nobody knows; the child that heard them is replaced, the counts stay."""
    gpus = source(env=fake_nvml("xids"))
    assert {31: 2, 999: 1} == (await gpus.read(10))[0].xids
    assert re.search("GPU-fake-0: .*XID 31, 31, 999", caplog.text)
    first, other = await gpus.read(10)
    assert ({31: 2, 999: 1}, {}) == (first.xids, other.xids)
    gpus._drop_child()
    assert {31: 4, 999: 2} == (await gpus.read(10))[0].xids


async def test_the_error_that_took_a_card_is_told_of_that_card(fake_nvml, source):
    """An XID 79 and the loss come together: the GPU has no value left but this one."""
    gpus = source(env=fake_nvml("ok"))
    assert {} == (await gpus.read(10))[1].xids
    gpus._drop_child()
    gpus._env = fake_nvml("lost")
    await gpus.read(10)
    _, lost = await gpus.read(10)
    assert ({"gpu": "lost"}, {}) == (lost.absent, lost.xids)


async def test_a_divided_card_shows_its_instances(fake_nvml, source):
    """Once each, though one has two compute instances; activity from the second reading on, and no wrong number in
    place of a gap."""
    gpus = source(env=fake_nvml("mig"))
    [card, whole] = await gpus.read(10)
    assert (True, None, [2, 9], ()) == (
        card.mig,
        card.utilization_ratio,
        [part.gpu_instance for part in card.instances],
        whole.instances,
    )
    [part, other] = card.instances
    assert ("GPU-fake-0", "MIG-fake-0", "3g.71gb", "1g.18gb", 2**30) == (
        part.uuid, part.mig_uuid, part.profile, other.profile, part.memory_used_bytes
    )  # fmt: skip
    assert (None, "not_available") == (part.sm_ratio, part.absent["sm_ratio"])
    [part, other] = (await gpus.read(10))[0].instances
    assert (1.0, 0.22, 0.52, 0.29) == (part.graphics_ratio, part.sm_ratio, part.tensor_ratio, other.sm_ratio)
    assert {"occupancy_ratio": "implausible", "memory_ratio": "not_supported"} == part.absent


async def test_an_older_divided_card_has_memory_and_no_activity(fake_nvml, source):
    """Ampere, whose activity only DCGM can read; and a driver that has no such call at all."""
    for environment, why in ((fake_nvml("mig-old"), "not_supported"), (fake_nvml("mig", missing=True), "not_known")):
        gpus = source(env=environment)
        await gpus.read(10)
        part = (await gpus.read(10))[0].instances[0]
        assert (2**30, None, why) == (part.memory_used_bytes, part.sm_ratio, part.absent["sm_ratio"])


async def test_a_hung_driver_costs_one_deadline(fake_nvml, source):
    """The child is killed and buried; the next read tries a new one."""
    gpus = source(env=fake_nvml("hang"))
    before = children()
    for _ in range(2):
        error = await failure(gpus, 1.0)
        assert ("hang", True) == (error.reason, "within 1 s" in str(error))
        assert gpus._child is None
        await until(lambda: buried(gpus), what="the end of the child")
        assert before == children()


async def test_a_driver_that_stalls_keeps_its_child_and_its_xid(fake_nvml, source):
    """An H100 answered nothing for seconds while it handled a page fault; a killed child would lose the XID."""
    gpus = source(env=fake_nvml("stall"), kill_after_s=30.0)
    assert "hang" == (await failure(gpus, 2.0)).reason
    child = gpus._child
    assert {31: 1} == (await gpus.read(10))[0].xids
    assert {31: 1} == (await gpus.read(10))[0].xids
    assert child is gpus._child is not None


async def test_an_old_request_ends_its_child(fake_nvml, source):
    now = [0.0]
    gpus = source(env=fake_nvml("hang"), clock=lambda: now[0], kill_after_s=8.0)
    before = children()
    await failure(gpus, 2.0)
    child = gpus._child
    now[0] = 7.9
    assert "hang" == (await failure(gpus, 0.3)).reason
    assert child is gpus._child is not None
    now[0] = 8.1
    assert "hang" == (await failure(gpus, 0.3)).reason
    assert gpus._child is None
    await until(lambda: buried(gpus), what="the end of the child")
    assert before == children()


async def test_hangs_in_a_row_leave_no_process_and_no_pipe(fake_nvml, source):
    """In the middle of nvmlInit too, where drivers are known to hang."""
    gpus = source(env=fake_nvml("hang-init"))
    await failure(gpus, 0.1)
    await until(lambda: buried(gpus))
    before, open_files = children(), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert "hang" == (await failure(gpus, 0.1)).reason
        await until(lambda: buried(gpus))
    assert before == children()
    await until(lambda: open_files >= len(os.listdir("/proc/self/fd")), what="the closing of the pipes")


async def test_the_loop_runs_on_while_the_driver_hangs(fake_nvml, source):
    """A page must be served meanwhile: no tick of the loop waits for the driver."""
    gpus = source(env=fake_nvml("hang"))
    asking = asyncio.create_task(failure(gpus, 60.0))
    await until(lambda: gpus._pending is not None, what="a request to the driver")
    for _ in range(100):
        await asyncio.sleep(0)
    assert not asking.done()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_child_that_cannot_be_killed_blocks_nobody(fake_nvml, source, monkeypatch):
    """State D: the kill is accepted and nothing dies. Reads answer at once, no second child is started, and later all
    is well again."""
    gpus = source(env=fake_nvml("hang"))
    real = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    await failure(gpus, 2.0)
    [stuck] = gpus._dying
    before = children()
    error = await failure(gpus, 60.0)  # it answers at once: it does not reach this deadline, which it would name
    assert ("hang", True) == (error.reason, str(stuck.process.pid) in str(error))
    assert before == children()
    monkeypatch.setattr(os, "killpg", real)
    stuck.kill()
    gpus._env = fake_nvml("ok")
    await stuck.process.wait()
    assert 2 == len(await gpus.read(10))


async def test_a_cancelled_read_does_not_leave_its_answer_to_the_next(fake_nvml, source):
    """The answer to an abandoned question would be one reading late for ever."""
    gpus = source(env=fake_nvml("ok"))
    await gpus.read(10)
    child = gpus._child
    asking = asyncio.create_task(gpus.read(10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert 2 == len(await gpus.read(10))
    assert child is not gpus._child


async def test_failures_back_off_and_recover(fake_nvml, source):
    """While waiting, reads fail at once with the same reason and start nothing."""
    now = [0.0]
    gpus = source(env=fake_nvml("crash"), clock=lambda: now[0], backoff_s=4.0)
    error = await failure(gpus)
    assert ("exit", True) == (error.reason, "ended with code -6" in str(error))
    gpus._env = fake_nvml("ok")
    now[0] = 3.0
    assert (("exit", True), None) == (
        ((error := await failure(gpus)).reason, "next try in 1 s" in str(error)),
        gpus._child,
    )
    now[0] = 4.1
    assert 2 == len(await gpus.read(10))


async def test_a_child_that_talks_nonsense_is_replaced(source):
    """Half JSON, wrong types: parse, and a fresh child."""
    gpus = source(nvml=(sys.executable, "-c", 'input(); print(\'{"gpus": [{"uuid": 3}]}\', flush=True); input()'))
    assert "parse" == (await failure(gpus)).reason
    assert gpus._child is None


async def test_the_child_ends_with_its_parent(fake_nvml):
    """A killed sidecar leaves no process behind, even one that hangs in the driver."""
    code = (
        "import asyncio, sys; from exporters.gpu.source import GpuSource\n"
        "async def main():\n"
        "    source = GpuSource(); asking = asyncio.create_task(source.read(60))\n"
        "    while not source._child: await asyncio.sleep(0)\n"
        "    sys.stdout.write(f'{source._child.process.pid}\\n'); sys.stdout.flush(); await asking\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=fake_nvml("hang"), stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    # the child asks for this signal in its first lines; wait until it has come as far as the driver
    eventually(lambda: "libnvidia-ml" in Path(f"/proc/{child}/maps").read_text(), what="the child loading the driver")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(
        lambda: not Path(f"/proc/{child}").exists() or ") Z" in Path(f"/proc/{child}/stat").read_text(),
        what="the child's end",
    )


# --- nvidia-smi


@pytest.fixture
def fake_smi(tmp_path: Path) -> Callable[..., tuple[str]]:
    """A fake nvidia-smi that runs a few lines of shell."""

    def make(body: str) -> tuple[str]:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        return (str(script),)

    return make


NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


async def test_without_the_driver_library_nvidia_smi_is_asked(fake_nvml, fake_smi, source):
    """NVML names the missing driver, nvidia-smi answers; energy is integrated since it has no counter."""
    gpus = source(env=fake_nvml("driver-not-loaded"), smi=fake_smi(f"cat {GOLDEN}/h200.csv"))
    busy, _ = await gpus.read(10)
    assert ("nvidia-smi", 412.35, 0.0, "integrated") == (
        gpus.method,
        busy.power_watts,
        busy.energy_joules,
        busy.energy_method,
    )


async def test_nvml_is_looked_for_again(fake_nvml, fake_smi, source):
    """A driver installed later is found without a restart, though not at every reading."""
    now = [0.0]
    gpus = source(
        env=fake_nvml("driver-not-loaded"), smi=fake_smi(f"cat {GOLDEN}/h200.csv"), clock=lambda: now[0], reprobe_s=30.0
    )
    await gpus.read(10)
    gpus._env = fake_nvml("ok")
    now[0] = 29.0
    assert "nvidia-smi" == (await gpus.read(10), gpus.method)[1]
    now[0] = 31.0
    assert "nvml" == (await gpus.read(10), gpus.method)[1]


async def test_no_driver_at_all_is_said_with_both_causes(fake_nvml, fake_smi, source):
    """What was tried, and that nothing is wrong with a machine without a GPU."""
    gpus = source(env=fake_nvml("driver-not-loaded"), smi=fake_smi(f'echo "{NO_DRIVER}"; exit 9'), reprobe_s=30.0)
    error = await failure(gpus)
    assert "no_driver" == error.reason
    assert re.fullmatch(f"NVML: .* Not Loaded; nvidia-smi .*code 9: {NO_DRIVER}; .*no GPU series", str(error))
    assert ("no_driver", True) == ((error := await failure(gpus)).reason, "next try in 30 s" in str(error))


async def test_a_machine_without_any_nvidia_software(source):
    """No library, no program: the same reason."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "LD_LIBRARY_PATH": "/nonexistent"}
    error = await failure(source(env=environment))
    assert "no_driver" == error.reason
    assert re.search(rf"/nonexistent/smi .*\brun: {os.strerror(errno.ENOENT)}", str(error))


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        ("echo 'it smells of burning'", "parse", "line 1 has 1 columns, 28 "),
        ("head -c 3000000 /dev/zero", "parse", "more than 1048576 bytes"),
        ("head -c 300 /dev/urandom; exit 255", "exit", "code 255"),
        ("echo 'Insufficient Permissions'; exit 4", "permission", "code 4"),
        ("echo 'No devices were found'; exit 6", "lost", "No devices"),
        ("echo 'GPU is lost'; exit 15", "lost", "code 15"),
        ("kill -SEGV $$", "exit", "code -11"),
    ],
)
async def test_nvidia_smi_fails_by_name(fake_nvml, fake_smi, source, body: str, reason: str, words: str):
    """Each way to fail is one of the few reasons, with what was printed."""
    error = await failure(source(env=fake_nvml("driver-not-loaded"), smi=fake_smi(body)))
    assert (reason, True) == (error.reason, words in str(error))
    assert error.reason in REASONS


async def test_a_lost_card_between_the_rows(fake_nvml, fake_smi, source):
    """nvidia-smi prints a sentence in place of the row; the other GPU is still read."""
    sentence = (
        "Unable to determine the device handle for GPU1: 0000:84:00.0: GPU is lost.  Reboot the system to recover"
        " this GPU"
    )
    gpus = source(
        env=fake_nvml("driver-not-loaded"), smi=fake_smi(f'head -1 {GOLDEN}/h200.csv; echo "{sentence}"; exit 6')
    )
    alive, lost = await gpus.read(10)
    assert (412.35, "0000:84:00.0", {"gpu": "lost"}) == (alive.power_watts, lost.uuid, lost.absent)


async def test_a_card_that_is_listed_twice_is_one_card(fake_nvml, fake_smi, source):
    """Prometheus refuses a whole page for one series that stands on it twice."""
    gpus = source(env=fake_nvml("driver-not-loaded"), smi=fake_smi(f"cat {GOLDEN}/h200-mig.csv {GOLDEN}/h200-mig.csv"))
    assert 1 == len(await gpus.read(10))


async def test_fields_an_old_driver_refuses_are_left_out(fake_nvml, fake_smi, source, tmp_path):
    """It refuses the whole query and names one field; the fields are then remembered, so that each is refused once."""
    log = tmp_path / "calls"
    body = f"""echo "$1" >> {log}
for old in clocks_event_reasons_counters.sw_power_cap remapped_rows.correctable; do
  case "$1" in *"$old"*) echo "Field \\"$old\\" is not a valid field to query."; exit 2;; esac
done
echo "$1" | sed 's/--query-gpu=//; s/uuid,/GPU-1,/; s/utilization.gpu/37/'"""
    gpus = source(env=fake_nvml("driver-not-loaded"), smi=fake_smi(body), reprobe_s=1000.0)
    [card] = await gpus.read(10)
    assert (0.37, "not_known", "not_known") == (
        card.utilization_ratio, card.absent["throttle_sw_power_cap_seconds"], card.absent["remapped_corrected"]
    )  # fmt: skip
    await gpus.read(10)
    assert 4 == len(log.read_text().splitlines())


async def test_instances_need_nvml(fake_nvml, fake_smi, source):
    """nvidia-smi is asked once, for its rows."""
    gpus = source(env=fake_nvml("driver-not-loaded"), smi=fake_smi(f"cat {GOLDEN}/h200-mig.csv"))
    [card] = await gpus.read(60)
    assert (78.28, (), "needs_nvml") == (card.power_watts, card.instances, card.absent["instances"])


@pytest.mark.parametrize(("said", "code"), [("driver-lost.txt", 9), ("version-mismatch.txt", 18)])
async def test_a_driver_that_went_away_is_no_driver(fake_nvml, fake_smi, source, said: str, code: int):
    """Its own sentence is passed on."""
    error = await failure(source(env=fake_nvml("driver-not-loaded"), smi=fake_smi(f"cat {GOLDEN}/{said}; exit {code}")))
    assert ("no_driver", True) == (error.reason, (GOLDEN / said).read_text().split("\n")[0] in str(error))


@pytest.mark.parametrize("body", ["sleep 1000", "sleep 1000 & echo started", "trap '' TERM INT; while :; do :; done"])
async def test_a_hung_nvidia_smi_is_killed_with_all_it_started(fake_nvml, fake_smi, source, body: str):
    """Also when it ended and only a child of it holds the pipe."""
    gpus = source(env=fake_nvml("ok"), smi=fake_smi(f"echo $$ > $0.pid; {body}"))
    gpus._no_nvml_before = float("inf")
    pid = Path(gpus._smi[0] + ".pid")
    asking = asyncio.create_task(failure(gpus, 3.0))
    group = int(await until(lambda: pid.read_text().strip(), what="the start of nvidia-smi"))
    assert "hang" == (await asking).reason
    eventually(lambda: not members(group), what="the end of the process group")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def members(group: int) -> list[str]:
    """Processes of a group that are not merely waiting for init to bury them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(stat.parent.name)
    return found


async def test_a_pipe_that_an_escaped_process_holds_is_let_go(fake_nvml, fake_smi, source):
    """What left the process group cannot be killed with it, and may keep the far end for ever; our end is closed."""
    before = len(os.listdir("/proc/self/fd"))
    gpus = source(env=fake_nvml("ok"), smi=fake_smi("setsid sleep 60 & echo $! > $0.pid; exit 0"))
    gpus._no_nvml_before = float("inf")
    try:
        assert "hang" == (await failure(gpus, 3.0)).reason
        await until(lambda: before == len(os.listdir("/proc/self/fd")), what="the closing of our end")
    finally:
        escaped = int(await until(lambda: Path(gpus._smi[0] + ".pid").read_text().strip()))
        os.kill(escaped, signal.SIGKILL)
    eventually(lambda: not running(escaped), what="the end of the escaped process")


# --- the endpoint while the driver hangs


class Endpoint:
    """A sidecar that serves, and the scrapes of it: what it says of the GPU."""

    def __init__(self, sidecar: Sidecar, url: str, session: ClientSession) -> None:
        self.sidecar, self.url, self.session = sidecar, url, session

    async def up(self) -> bool:
        async with self.session.get(self.url) as answer:
            assert 200 == answer.status
            text = await answer.text()
        [line] = [line for line in text.split("\n") if line.startswith('vllm_watch_source_up{kind="gpu"')]
        return float(line.rpartition(" ")[2]) == 1

    @property
    def hangs(self) -> int:
        return self.sidecar.sources[0].errors["hang"]

    async def until(self, up: bool) -> None:
        """Return once the page says so."""

        async def says() -> bool:
            return await self.up() is up

        await until(says, what=f"a page with up={up}")


@contextlib.asynccontextmanager
async def served(reader: GpuSource, monkeypatch: pytest.MonkeyPatch, **settings: float) -> AsyncIterator[Endpoint]:
    monkeypatch.setattr(sidecar, "GpuSource", lambda **_: reader)
    serving = Sidecar(SidecarConfig(**settings))  # type: ignore[arg-type]
    async with TestServer(application(serving)) as server, ClientSession() as session:
        yield Endpoint(serving, str(server.make_url("/metrics")), session)


async def test_hang_shows_at_its_first_deadline(fake_nvml, source, monkeypatch, tmp_path):
    """Three hangs of a driver that was well."""
    behaviour, before = tmp_path / "nvml", children()
    behaviour.write_text("ok")
    reader = source(env=fake_nvml(str(behaviour)), backoff_s=0.1)
    async with served(reader, monkeypatch, gpu_interval_s=0.1, timeout_s=2.0) as page:
        for _ in range(3):
            await page.until(up=True)
            behaviour.write_text("hang")
            hangs = page.hangs
            await until(lambda hangs=hangs: page.hangs > hangs, what="the first deadline")
            assert not await page.up()
            behaviour.write_text("ok")
        await page.until(up=True)
    await until(lambda: before == children(), what="the end of all children")


async def test_a_page_is_served_while_the_driver_hangs(fake_nvml, source, monkeypatch):
    reader = source(env=fake_nvml("hang"))
    monkeypatch.setattr(sidecar, "FIRST_GPU_READING_S", 60.0)
    async with served(reader, monkeypatch) as page:
        await until(lambda: reader._pending is not None, what="a request to the driver")
        asked = reader._pending
        for _ in range(3):
            assert not await page.up()
        assert asked is reader._pending
        assert not asked.done()


async def test_hundreds_of_hangs_leave_nothing_behind(source, monkeypatch):
    """With a program that never answers and a deadline of ten milliseconds: no process, no pipe, no thread, no
    memory."""
    monkeypatch.setattr(sidecar, "FIRST_GPU_READING_S", 0.01)
    before, open_files = children(), len(os.listdir("/proc/self/fd"))
    async with served(source(nvml=("sleep", "1000")), monkeypatch, gpu_interval_s=0.001, timeout_s=0.02) as page:

        async def hung(times: int) -> bool:
            assert not await page.up()
            return page.hangs >= times

        await until(lambda: hung(100))  # buffers and caches have found their size
        held = memory.mib()
        await until(lambda: hung(400))
        assert 2 > memory.mib() - held
        assert {"hang": page.hangs} == +page.sidecar.sources[0].errors
        assert len(children()) <= len(before) + 1
    await until(lambda: before == children(), what="the end of all children")
    await until(lambda: open_files >= len(os.listdir("/proc/self/fd")), what="the closing of the pipes")


async def test_a_slow_beat_is_no_gap_in_the_energy(source, monkeypatch):
    """Read once a minute, a GPU without a counter would otherwise never have used a joule."""
    reader, asked = source(nvml=("sleep", "1000")), {}
    monkeypatch.setattr(sidecar, "GpuSource", lambda **options: asked.update(options) or reader)
    async with TestServer(application(Sidecar(SidecarConfig(gpu_interval_s=60)))):
        assert 60 < asked["energy_gap_s"]
