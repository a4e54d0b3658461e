"""`make bench-data`, first part: what it costs to ship request logs, beside DuckDB on the same lines without any check.

One process on one core each: lines a second of processor time and of the clock, bytes a row, and memory. The floor is
DuckDB's JSON -> Parquet with the types given, sorted, without validation, deduplication, positions or manifests."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporters.dataset import catalog, parquet
from exporters.dataset.columns import OF_RECORD
from exporters.dataset.layout import total
from exporters.dataset.objects import FolderStore
from exporters.dataset.ship import Shipper
from exporters.dataset.ship_config import ShipConfig
from exporters.requests.record import RequestRecord, timestamp, to_line
from tests.bench.bench_sidecar_lines import Lines, record
from tests.support import memory

START_S = 1_795_608_000.0  # noon of a day
ROTATED = 300_000  # lines, some 180 MB
LEAST_LINES_PER_S, MOST_BYTES_PER_ROW, MOST_MB = 150_000, 90, 400


@dataclass(frozen=True)
class DataSizes:
    """lines: made one by one, for speed and size. many: repeated with other ids, for memory. rounds: of each reader."""

    lines: int = 400_000
    many: int = 3_000_000
    rounds: int = 3


QUICK = DataSizes(20_000, 60_000, 1)


def make_log(path: Path, count: int) -> int:
    """Write a log of distinct lines; return its bytes."""
    rng = random.Random(27)
    with path.open("wb") as log:
        for number in range(count):
            one = record(rng, rng.randrange(20), rng.randrange(2))
            stamped = {"request_id": f"{rng.getrandbits(128):032x}", "ts": timestamp(START_S + number / 1000)}
            log.write(to_line(RequestRecord(**{name: getattr(one, name) for name in one.__struct_fields__} | stamped)))
    return path.stat().st_size


def ship(log: Path, folder: Path, more: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Ship a log in this process; return the requests and bytes of the data set, and the memory over time.

    more: adds lines to the log when all are read; False ends it."""
    shipper = Shipper(
        ShipConfig(
            dataset=str(folder / "dataset"),
            cluster="bench",
            writer="gw-0",
            requests_log=(str(log),),
            state=str(folder / "state"),
            compact_bytes=0,
        )
    )
    shipper.claim()
    held, committed = [], 0
    while shipper.step() or more():
        if shipper.state.last.number > committed:
            committed = shipper.state.last.number
            held.append(memory.mib())
    shipper.step(last=True)
    assert not shipper.store_error, shipper.store_error
    assert not shipper.disk_error, shipper.disk_error
    shipper.close()
    found = catalog.segments(FolderStore(folder / "dataset"), 0, START_S * 2)
    sums = total(segment.sums for segment in found)
    held.append(memory.mib())
    return {
        "requests": sums.requests,
        "bytes": sum(segment.size for segment in found),
        "early_mb": max(held[: max(1, len(held) // 3)]),
        "late_mb": max(held[-max(1, len(held) // 3) :]),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def ship_many(log: Path, folder: Path, count: int) -> dict[str, float]:
    """Ship lines that are made while they are shipped, with a rotation every ROTATED lines and one rotated file.

    The speed includes making them, in this process as well."""
    made, lines = itertools.count(), Lines(20, 2)

    def more() -> bool:
        number = next(made)
        if number and number * lines.count % ROTATED == 0:
            log.replace(log.with_suffix(".jsonl.1"))
        if number >= count // lines.count:
            return False
        with log.open("ab") as file:
            file.write(lines.text(number, START_S + number))
        return True

    log.touch()
    return ship(log, folder, more)


def floor(log: Path, folder: Path) -> dict[str, float]:
    """The same lines by DuckDB alone."""
    types = ", ".join(f"{column.name}: '{column.type}'" for column in OF_RECORD)
    made = folder / "floor.parquet"
    with parquet.connect(1024, spill=folder) as db:
        ((rows,),) = db.execute(
            f"COPY (SELECT * FROM read_json('{log}', format = 'newline_delimited', columns = {{{types}}})"  # noqa: S608
            f" ORDER BY team, model) TO '{made}' (FORMAT parquet, COMPRESSION zstd)"
        ).fetchall()
    return {"requests": rows, "bytes": made.stat().st_size, "early_mb": 0, "late_mb": memory.mib()}


def measured(what: str, log: Path, count: int = 0) -> dict[str, float]:
    """Run one of `ship`, `floor` and `many` in a process of its own, on one core."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", what, str(log), folder, str(count)]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
        if done.returncode:
            raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime - found.pop("start_cpu_s")
    return found | {
        "lines_per_cpu_s": found["requests"] / cpu_s,
        "lines_per_s": found["requests"] / (wall_s - found.pop("start_s")),
        "bytes_per_row": found["bytes"] / found["requests"],
    }


def child(what: str, log: Path, folder: Path, count: int) -> None:
    """What a measured process does; the time until here, for imports, is not counted."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    usage = resource.getrusage(resource.RUSAGE_SELF)
    started = {"start_cpu_s": usage.ru_utime + usage.ru_stime}
    began_s = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    started["start_s"] = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    found = ship_many(log, folder, count) if what == "many" else (ship if what == "ship" else floor)(log, folder)
    sys.stdout.write(json.dumps(found | started))


def run(sizes: DataSizes) -> dict[str, Any]:
    found: dict[str, Any] = {"ship": [], "floor": []}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        found["line_bytes"] = make_log(log, sizes.lines) / sizes.lines
        for _ in range(sizes.rounds):
            for what in ("ship", "floor"):
                found[what].append(measured(what, log))
        found["many"] = measured("many", Path(folder) / "many.jsonl", sizes.many)
    return found


def report_lines(sizes: DataSizes, found: dict[str, Any]) -> list[str]:
    def best(what: str, name: str) -> float:
        return max(float(one[name]) for one in found[what])

    many = found["many"]
    ours, floors = best("ship", "lines_per_cpu_s"), best("floor", "lines_per_cpu_s")
    aim = f"aim: {LEAST_LINES_PER_S:,} lines/s, at most {MOST_BYTES_PER_ROW} B"
    return [
        f"{sizes.lines:,} lines of {found['line_bytes']:.0f} B, best of {sizes.rounds}, one core, processor time:",
        f"  ship:  {ours:,.0f} lines/s, {best('ship', 'bytes_per_row'):.1f} B a row   ({aim})",
        f"  floor: {floors:,.0f} lines/s, {best('floor', 'bytes_per_row'):.1f} B a row   (DuckDB, nothing checked)",
        f"  by the clock: {best('ship', 'lines_per_s'):,.0f} and {best('floor', 'lines_per_s'):,.0f} lines/s",
        f"  ship reaches {ours / floors:.0%} of the floor",
        f"{many['requests']:,.0f}: {many['early_mb']:.0f}, later {many['late_mb']:.0f}, peak {many['peak_mb']:.0f} MB",
        f"  (memory over these many lines; at most {MOST_MB} MB, flat)",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, as the tests run it")
    parser.add_argument("--many", type=int, help="lines for the memory")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()  # those of the second part
    if options.child:
        what, log, folder, count = options.child
        child(what, Path(log), Path(folder), int(count))
        return
    sizes = QUICK if options.quick else DataSizes(many=options.many or DataSizes.many)
    found = run(sizes)
    sys.stdout.write("\n".join(report_lines(sizes, found)) + "\n")


if __name__ == "__main__":
    main()
