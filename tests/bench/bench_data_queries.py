"""Speed and memory of queries over a made data set, beside DuckDB on raw JSON lines and jq.

PYTHONPATH=. python tests/bench/bench_data_queries.py --rows 10000000 --days 1 --folder made"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from exporters.dataset import columns, layout, request_query
from exporters.dataset.objects import FolderStore
from exporters.dataset.parquet import connect
from exporters.dataset.query import RequestSource, open_requests
from exporters.requests.read import BadLines
from exporters.requests.record import timestamp
from stack.request_source import data_reader

START_S = 1_764_028_800.0  # 2025-11-25T00:00:00Z
DAY_S = 86_400.0
MADE = {
    "ts": "to_timestamp({start} + i * {step})",
    "cluster": "'bench'",
    "writer": "'w'",
    "request_id": "md5(i::VARCHAR)",
    "span_id": "md5(i::VARCHAR)[:16]",
    "team": "'team-' || (hash(i) % 40)",
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


def make(folder: Path, rows: int, days: int, models: int = 4) -> None:
    """Write `rows` a day. A day is sorted by team and model, as compacted segments are."""
    store = FolderStore(folder)
    claim = layout.WriterClaim(
        cluster="bench", writer="w", owner="b", session="b", commit=0, host="b", since=timestamp(START_S)
    )
    store.put(layout.claim_key("bench", "w"), layout.encode(claim))
    with connect(3000, 2, folder / "spill") as db:
        for day in range(days):
            start_s = START_S + day * DAY_S
            name, made = layout.day_of(start_s), []
            for number in range(models):
                count = rows // models
                values = {
                    key: sql.format(start=start_s, step=DAY_S / count, model=f"m{number}") for key, sql in MADE.items()
                }
                listed = ", ".join(f"{values.get(c.name, 'NULL')}::{c.type} AS {c.name}" for c in columns.COLUMNS)
                target = folder / "made.parquet"
                db.execute(
                    f"COPY (SELECT {listed} FROM range({count * number}, {count * (number + 1)}) t(j),"  # noqa: S608
                    f" LATERAL (SELECT j - {count * number} AS i) ORDER BY team, ts) TO '{target}' (FORMAT parquet,"
                    " COMPRESSION zstd, ROW_GROUP_SIZE 61440)"
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


def timed(what: str, call: Callable[[], object], times: int = 3) -> float:
    """Print the first and the best of the later runs, and return the latter."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    best = min(took[1:] or took)
    print(f"{what:52} first {took[0]:7.2f} s   warm {best:7.2f} s   peak {peak} MB", flush=True)
    return best


def measure(folder: Path, rows: int, days: int, baseline_rows: int) -> None:
    source = RequestSource(location=str(folder))
    everyone = request_query.RequestFilter()

    def ask(answer: Callable[..., object], since_s: float, until_s: float, *given: object) -> Callable[[], object]:
        def run() -> object:
            with open_requests(source, since_s, until_s, memory_mb=1024, threads=2) as data:
                return answer(data, everyone, *given)

        return run

    one_day = START_S, START_S + DAY_S
    all_days = START_S, START_S + days * DAY_S
    print(f"{rows:,} rows a day, {days} days, {sum(p.stat().st_size for p in folder.rglob('*.parquet')) >> 20} MB")
    best = timed("requests --slowest ttft, one day", ask(request_query.listed, *one_day, "ttft"))
    timed("requests --percentiles --group-by team,model", ask(request_query.percentiles, *one_day, ["team", "model"]))
    month = ask(request_query.grouped, *all_days, ["team", "model"])
    timed("tokens by team and model, all days", month, times=1)
    reader = data_reader(str(folder), START_S, START_S + 600 - DAY_S)
    count = [0]

    def stream() -> None:
        count[0] = sum(1 for _ in reader(BadLines()))

    took = timed("records streamed in the order of starts", stream, times=1)
    print(f"  {count[0]:,} records, {count[0] / took:,.0f} a second")
    raw = folder / "raw.jsonl"
    with connect(1024, 2, folder / "spill") as db:
        listed = ", ".join(MADE)
        first = next(folder.glob("day=*/cluster=*/model=*/*.parquet"))
        db.execute(f"COPY (SELECT {listed} FROM '{first}' LIMIT {baseline_rows}) TO '{raw}' (FORMAT json)")  # noqa: S608
        slow = f"SELECT request_id, ttft_ms FROM read_json('{raw}') ORDER BY ttft_ms DESC LIMIT 20"  # noqa: S608
        json_s = timed(f"DuckDB on {baseline_rows:,} raw lines", lambda: db.execute(slow).fetchall())
    share = rows / baseline_rows
    print(f"  in proportion to {rows:,} lines: {json_s * share:.1f} s, {json_s * share / best:.0f} times")
    if jq := shutil.which("jq"):
        words = [jq, "-s", "-c", "sort_by(-.ttft_ms)[:20][] | .request_id", str(raw)]
        jq_s = timed(
            f"jq on {baseline_rows:,} raw lines", lambda: subprocess.run(words, check=True, capture_output=True), 1
        )
        print(f"  in proportion: {jq_s * share:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows a day")
    parser.add_argument("--days", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="data set to make, or to use again")
    parser.add_argument("--baseline-rows", type=int, default=300_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-data-") as made:
        folder = given.folder or Path(made)
        if not (folder / layout.WRITERS).exists():
            folder.mkdir(parents=True, exist_ok=True)
            make(folder, given.rows, given.days)
        measure(folder, given.rows, given.days, given.baseline_rows)


if __name__ == "__main__":
    main()
