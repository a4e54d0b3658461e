"""`make bench-data`, second part: the real commands over a made data set, each beside a floor in the same run.

`requests` beside DuckDB and jq on raw JSON lines; `cost` beside one GROUP BY of DuckDB over the same columns; with
--views the documented views by DuckDB beside ClickHouse (chdb), whose rows are compared.

A month of 300 million requests: ARGS="--cost --days 30 --without-ids". 100 million by both engines:
ARGS="--rows 100000000 --views"."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exporters.dataset import columns, engine_sql, layout, views
from exporters.dataset.objects import FolderStore
from exporters.dataset.parquet import connect
from exporters.dataset.query import RequestSource, open_requests
from exporters.requests.record import timestamp
from tests.support import engine_rows

START_S = 1_764_028_800.0  # 2025-11-25T00:00:00Z
DAY_S = 86_400.0
TEAMS = 40
# of row i of a model's day, sorted by team and time as compacted segments are
MADE = {
    "ts": "to_timestamp({start} + (i % {of_team}) * {step} + i / {rows})",
    "cluster": "'bench'",
    "writer": "'w'",
    "request_id": "md5((i + {first})::VARCHAR)",
    "span_id": "md5((i + {first})::VARCHAR)[:16]",
    "team": "'team-' || lpad((i // {of_team})::VARCHAR, 2, '0')",
    "model": "'{model}'",
    "upstream": "'e' || (hash(i + 1) % 8)",
    "outcome": "CASE hash(i + 2) % 50 WHEN 0 THEN 'rejected' WHEN 1 THEN 'client_abort' ELSE 'ok' END",
    "prompt_tokens": "(hash(i + 3) % 4000)::BIGINT",
    "cached_tokens": "(hash(i + 3) % 400)::BIGINT",
    "completion_tokens": "(hash(i + 4) % 400)::BIGINT",
    "queue_ms": "(hash(i + 8) % 1000) / 10.0",
    "ttft_ms": "100 + (hash(i + 5) % 20000) / 10.0",
    "tpot_ms": "(hash(i + 6) % 500) / 10.0",
    "e2e_ms": "100 + (hash(i + 5) % 20000) / 10.0 + (hash(i + 7) % 100000) / 10.0",
}


def make(folder: Path, rows: int, days: int, ids: bool = True, models: int = 4) -> None:
    """Write `rows` a day, those of a model in one segment. ids: of requests and spans, half of the bytes."""
    store = FolderStore(folder)
    claim = layout.WriterClaim(
        cluster="bench", writer="w", owner="b", session="b", commit=0, host="b", since=timestamp(START_S)
    )
    store.put(layout.claim_key("bench", "w"), layout.encode(claim))
    made_columns = MADE if ids else {name: sql for name, sql in MADE.items() if not name.endswith("_id")}
    count = rows // models
    of_team = -(-count // TEAMS)
    with connect(3000, 2, folder / "spill") as db:
        for day in range(days):
            start_s = START_S + day * DAY_S
            name, made = layout.day_of(start_s), []
            for number in range(models):
                values = {
                    key: sql.format(
                        start=start_s, step=DAY_S * 0.9999 / of_team, of_team=of_team, rows=count, model=f"m{number}",
                        first=(day * models + number) * count,
                    )
                    for key, sql in made_columns.items()
                }  # fmt: skip
                listed = ", ".join(f"({values.get(c.name, 'NULL')})::{c.type} AS {c.name}" for c in columns.COLUMNS)
                target = folder / "made.parquet"
                db.execute(
                    f"COPY (SELECT {listed} FROM range({count}) t(i)) TO '{target}' (FORMAT parquet,"  # noqa: S608
                    " COMPRESSION zstd, COMPRESSION_LEVEL 1, ROW_GROUP_SIZE 61440)"
                )
                data = target.read_bytes()
                digest = layout.digest_of(data)
                key = layout.segment_key(name, "bench", f"m{number}", digest)
                store.path(key).parent.mkdir(parents=True, exist_ok=True)
                target.replace(store.path(key))
                made.append(
                    layout.LogSegment(
                        key=key, day=name, cluster="bench", model=f"m{number}", writer="w", schema=1, size=len(data),
                        sha256=digest, min_ts=start_s, max_ts=start_s + DAY_S, sums=layout.Sums(count),
                    )
                )  # fmt: skip
            manifest = layout.Manifest(day=name, cluster="bench", writer="w", sequence=1, segments=tuple(made))
            store.put(layout.manifest_key(name, "bench", "w"), layout.encode(manifest))


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of the real command, with the start of its process. peak_mb: its resident memory."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    output: str


def run_command(cache: Path, *words: str) -> CommandRun:
    command = [sys.executable, "-m", "stack.cli", *words]
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}: {text}")
    return CommandRun(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text)


def timed(what: str, cache: Path, *words: str, runs: int = 3) -> float:
    """Print the first run, which hashes the segments, and the best of the later ones; return the latter in seconds."""
    first, *later = [run_command(cache, *words) for _ in range(runs)]
    warm, peak_mb = min(later, key=lambda one: one.wall_s), max(one.peak_mb for one in (first, *later))
    print(
        f"{what:46} first {first.wall_s:6.2f} s ({first.cpu_s:.2f} of processors)   warm {warm.wall_s:6.2f} s"
        f" ({warm.cpu_s:.2f})   peak {peak_mb:.0f} MB",
        flush=True,
    )
    return warm.wall_s


def best_of(call: Callable[[], object], runs: int = 2) -> float:
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return min(took)


def measure_requests(folder: Path, cache: Path, rows: int, baseline_rows: int) -> None:
    """`requests` over one day, beside DuckDB and jq on raw JSON lines in proportion."""
    day = ("--from", layout.day_of(START_S), "--to", layout.day_of(START_S + DAY_S))
    asked = ("requests", "--data", str(folder), *day)
    slowest_s = timed("requests --slowest ttft", cache, *asked, "--slowest", "ttft")
    timed("requests --group-by team,model", cache, *asked, "--group-by", "team,model")
    timed("requests --percentiles --group-by team,model", cache, *asked, "--percentiles", "--group-by", "team,model")
    raw, share = folder / "raw.jsonl", rows / baseline_rows
    with connect(1024, 2, folder / "spill") as db:
        first = next(folder.glob("day=*/cluster=*/model=*/*.parquet"))
        db.execute(f"COPY (SELECT {', '.join(MADE)} FROM '{first}' LIMIT {baseline_rows}) TO '{raw}' (FORMAT json)")  # noqa: S608
        slow = f"SELECT request_id, ttft_ms FROM read_json('{raw}') ORDER BY ttft_ms DESC LIMIT 20"  # noqa: S608
        json_s = share * best_of(lambda: db.execute(slow).fetchall())
    print(f"  DuckDB on raw lines, in proportion: {json_s:.1f} s, {json_s / slowest_s:.0f} times the warm command")
    if jq := shutil.which("jq"):
        words = [jq, "-s", "-c", "sort_by(-.ttft_ms)[:20][] | .request_id", str(raw)]
        jq_s = share * best_of(lambda: subprocess.run(words, check=True, capture_output=True), 1)
        print(f"  jq on raw lines, in proportion: {jq_s:.0f} s, {jq_s / slowest_s:.0f} times")
    raw.unlink()


def measure_cost(folder: Path, cache: Path, days: int) -> None:
    """`cost` over all days, beside one GROUP BY over the columns that it reads."""
    until_s = START_S + days * DAY_S
    period = ("--from", layout.day_of(START_S), "--to", layout.day_of(until_s))
    cost_s = timed(f"cost --data, {days} days", cache, "cost", "--data", str(folder), *period, runs=2)
    source = RequestSource(location=str(folder), cache=cache / "vllm-watch" / "segments")

    def group() -> None:
        with open_requests(source, START_S, until_s) as data:
            data.select(
                "SELECT CAST(ts AS DATE), team, model, outcome, sum(prompt_tokens), sum(cached_tokens),"
                " sum(completion_tokens), sum(est_prompt_tokens), sum(est_completion_tokens),"
                " sum(e2e_ms), sum(queue_ms) FROM recorded GROUP BY ALL"
            )

    floor_s = best_of(group)
    print(f"  floor: {floor_s:.1f} s for one GROUP BY, which shares no time; cost takes {cost_s / floor_s:.1f} times")


def measure_views(folder: Path) -> None:
    """Each documented view by both engines; raises SystemExit if their rows differ."""
    from chdb.session import Session

    session = Session()
    for statement in engine_sql.clickhouse(str(folder)):
        session.query(statement)
    with open_requests(RequestSource(location=str(folder)), memory_mb=8000) as data:
        kinds = {str(row[0]): str(row[1]) for row in data.select("DESCRIBE requests")[1]}
        numbers = [name for name, kind in kinds.items() if kind in ("BIGINT", "INTEGER", "DOUBLE")]
        for view in views.VIEWS:
            # of the requests themselves the sum of each number
            named = ", ".join(f"sum({name}) AS sum_{name}" for name in numbers) if view.name == "requests" else "*"
            began = time.perf_counter()
            mine = engine_rows.of_duckdb(data, f"SELECT {named} FROM {view.name}")  # noqa: S608
            duckdb_s, began = time.perf_counter() - began, time.perf_counter()
            theirs = engine_rows.of_clickhouse(session, f"SELECT {named} FROM vllm_watch.{view.name}")  # noqa: S608
            chdb_s = time.perf_counter() - began
            print(
                f"view {view.name:9} {len(mine):6} rows   DuckDB {duckdb_s:6.2f} s   ClickHouse {chdb_s:6.2f} s",
                flush=True,
            )
            if found := engine_rows.difference(mine, theirs):
                raise SystemExit(f"view {view.name}: DuckDB and ClickHouse differ in {found}")
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, as the tests run it")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows a day")
    parser.add_argument("--days", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="data set to make, or to use again")
    parser.add_argument("--baseline-rows", type=int, default=300_000)
    parser.add_argument("--without-ids", action="store_true", help="rows without ids, which `cost` does not read")
    parser.add_argument("--cost", action="store_true", help="only `cost`")
    parser.add_argument("--views", action="store_true", help="only the views, by DuckDB and ClickHouse")
    given, _ = parser.parse_known_args()  # those of the first part
    rows, baseline = (20_000, 5000) if given.quick else (given.rows, given.baseline_rows)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as made:
        folder = given.folder or Path(made) / "dataset"
        if not (folder / layout.WRITERS).exists():
            folder.mkdir(parents=True, exist_ok=True)
            make(folder, rows, given.days, not given.without_ids)
        size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        print(f"{rows:,} rows a day, {given.days} days, {size >> 20} MB, {size / rows / given.days:.0f} B a row")
        if not given.views and not given.cost:
            measure_requests(folder, Path(made) / "cache", rows, baseline)
        if not given.views:
            measure_cost(folder, Path(made) / "cache", given.days)
        if given.views or given.quick:
            measure_views(folder)


if __name__ == "__main__":
    main()
