"""`make bench-dashboards`: how long printing takes, what Overview costs a Prometheus with 24 h of 20 engines, and what
our own board takes there.

Real Prometheus, real page: the captured vLLM 0.32 page, once for each engine, scraped every 15 s, written as blocks of
two hours. Every panel's query over the last hour, as Grafana would send it; median of five rounds, one query after the
other and six at a time as a browser does. Then `vllm-watch board` is asked for panels of all boards over that hour, at
random, and its memory is told as it goes."""

from __future__ import annotations

import argparse
import concurrent.futures
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from alerts.panel_ref import PanelRef
from dashboards.boards import overview
from dashboards.interpolate import ALL, Range, fill
from dashboards.registry import BOARDS
from dashboards.variables import CHAIN
from exporters.catalogue import exposition_parser
from stack.lab import install
from tests.support import memory
from tests.support.bench_server import get, timed, until_ready, url_of
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
ENGINES, HOURS, SCRAPE_S, BLOCK_S, ROUNDS = 20, 24, 15, 7200, 5
PANELS = (500, 1_000, 2_000, 5_000, 10_000, 20_000)
CAPTURED = ROOT / "tests/golden/0.32.0-preempt-after-load.prom"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 h and 500 panels, to see that it works")
    quick = parser.parse_args().quick
    hours, panels = (2, PANELS[:1]) if quick else (HOURS, PANELS)
    print(f"render of every printed file: {_render_s():.2f} s in a fresh process (median of {ROUNDS})")
    end = int(time.time()) // BLOCK_S * BLOCK_S
    start = end - hours * 3600
    with tempfile.TemporaryDirectory(prefix="bench-dashboards-") as name:
        folder = Path(name)
        began = time.monotonic()
        rows = list(_rows())
        for at in range(start, end, BLOCK_S):
            _block(folder, rows, at, start)
            print(
                f"\r{(at - start) // BLOCK_S + 1} of {(end - start) // BLOCK_S} blocks",
                end="",
                file=sys.stderr,
                flush=True,
            )
        print(
            f"\n{ENGINES} engines, {len(rows) * ENGINES} series, {hours} h: written in"
            f" {time.monotonic() - began:.0f} s",
            file=sys.stderr,
        )
        _measure(folder, end, panels)


def _render_s() -> float:
    took = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "stack.cli", "render", "--check"], cwd=ROOT, check=True, capture_output=True
        )
        took.append(time.monotonic() - began)
    return statistics.median(took)


def _rows() -> Iterator[tuple[str, str, float, bool]]:
    """Sample name, labels as text, value at the end, and whether it grows."""
    captured = exposition_parser.parse(CAPTURED.read_text())
    for name, samples in captured.samples.items():
        grows = name.endswith(("_total", "_bucket", "_count", "_sum"))
        for labels, value in samples:
            yield name, ",".join(f'{k}="{v}"' for k, v in labels.items()), value, grows


def _block(folder: Path, rows: list[tuple[str, str, float, bool]], at: int, start: int) -> None:
    """Two hours of every engine, by the real promtool."""
    text = folder / "block.om"
    with text.open("w") as file:
        for name, labels, value, grows in rows:
            metric = name.removesuffix("_total") if name.endswith("_total") else name
            file.write(f"# TYPE {metric} unknown\n" if metric == name else f"# TYPE {metric} counter\n")
            for engine in range(ENGINES):
                head = f'{name}{{{labels}{"," if labels else ""}instance="10.0.0.{engine}:8000",job="vllm"}} '
                for t in range(at, at + BLOCK_S, SCRAPE_S):
                    now = (value + 1) * (t - start) / 3600 * (1 + engine / ENGINES) if grows else value
                    file.write(f"{head}{now:.6g} {t}\n")
        file.write("# EOF\n")
    tool = install.find("promtool")
    assert tool, "promtool is missing: make cli ARGS='lab install promtool prometheus'"
    subprocess.run(
        [tool.path, "tsdb", "create-blocks-from", "openmetrics", text, folder / "data"], check=True, capture_output=True
    )
    text.unlink()


def _measure(folder: Path, end: int, panels: Sequence[int]) -> None:
    program = install.find("prometheus")
    assert program
    config = folder / "prometheus.yml"
    config.write_text("global: {}\n")
    port = free_port()
    command = [
        program.path,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=10y",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    server = subprocess.Popen(command)
    try:
        base = f"http://127.0.0.1:{port}"
        until_ready(base)
        _report(base, Range(end - 3600, end, scrape_s=SCRAPE_S))
        _board(base, end, panels)
    finally:
        server.terminate()
        server.wait(10)


def _report(base: str, over: Range) -> None:
    values = {name: [ALL] for name in CHAIN}
    asked = [(panel.slug, url_of(base, fill(query.expr, values, over), over, panel.shape))
             for panel in overview.BOARD.panels for query in panel.queries]  # fmt: skip
    for _, url in asked:
        get(url)  # once to warm the page cache, as any dashboard in use has
    alone = {url: statistics.median(timed(url) for _ in range(ROUNDS)) for _, url in asked}
    for slug, url in asked:
        print(f"{alone[url] * 1000:7.1f} ms  {slug}")
    print(f"{sum(alone.values()) * 1000:7.1f} ms  all of Overview's {len(asked)} queries, one after the other")
    rounds = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(get, (url for _, url in asked)))
        rounds.append(time.monotonic() - began)
    print(f"{statistics.median(rounds) * 1000:7.1f} ms  the same, six at a time")


def _board(prometheus: str, end: int, panels: Sequence[int]) -> None:
    """Memory, once its heap has seen an answer of each size, follows how much there is to draw and not how often it was
    drawn."""
    port, rng = free_port(), random.Random(1)
    command = [sys.executable, "-m", "stack.cli", "board", "--prometheus", prometheus, "--listen", f"127.0.0.1:{port}"]
    span = urllib.parse.urlencode({"from": (end - 3600) * 1000, "to": end * 1000})
    urls = [f"http://127.0.0.1:{port}/api/panel/{ref.uid}/{ref.panel_id}?{span}"
            for ref in (PanelRef(board.slug, panel.slug) for board in BOARDS for panel in board.panels)]  # fmt: skip
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        until_ready(f"http://127.0.0.1:{port}", "/-/healthy")
        told = [f"{memory.mib(server.pid):.1f} MiB at first"]
        began = time.monotonic()
        for number in range(1, panels[-1] + 1):
            with urllib.request.urlopen(rng.choice(urls), timeout=60) as answer:
                answer.read()
            if number in panels:
                told.append(f"{memory.mib(server.pid):.1f} after {number:,} panels")
        print(f"our board: {', '.join(told)}; {(time.monotonic() - began) / panels[-1] * 1000:.0f} ms a panel")
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
