"""`make screenshots`: pictures of every dashboard and a runbook page at 1440 and 400 px, over a replayed hour of 20
teams, three models, six engines.

Real Prometheus, real page, Chromium; twice, with GPUs and prices and without either. Says which page is wider than the
window. --docs takes the pictures of docs/images instead, small enough for a repository; the last of them is the report
of an experiment on a real vLLM, which takes a minute or two."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from dashboards.registry import BOARDS
from stack.lab import install
from tests.bench.bench_dashboards import ROOT
from tests.support.bench_server import until_ready
from tests.support.panel_fixtures import HOUR_S
from tests.support.ports import free_port
from tests.support.replayed_hour import ReplayedHour
from tests.support.screens import END_S, dashboard, whole

WIDTHS = (1440, 400)
RUNBOOK = "VLLMTTFTHigh"
OF_DOCS = (("overview", 1440, 900), ("teams", 1440, 900), ("teams", 400, 900))
# Pictures of a terminal: name, columns, lines, arguments of vllm-watch. PROMETHEUS is replaced by its address.
TERMINALS = (
    (
        "runbook-live",
        120,
        44,
        ("runbook", RUNBOOK, "--live", "--prometheus", "PROMETHEUS", "--label", "model_name=model-0"),
    ),
    ("cost", 156, 40, ("cost", "--prometheus", "PROMETHEUS", "--since", "1h", "--by", "team")),
)
EXPERIMENT = """\
workload: shared-prefix
requests: 12
scale: 0.25
together: true
arms:
  off: {lab: [--no-enable-prefix-caching]}
  on: {lab: [--enable-prefix-caching]}
"""
LARGEST_OF_DOCS = 150_000
TERMINAL_PAGE = """<!doctype html><meta charset="utf-8"><style>body {{ background: #ffffff; margin: 16px; }}
pre {{ font: 13px/1.35 "DejaVu Sans Mono", monospace; margin: 0; }}</style><pre>{code}</pre>"""
BROWSER = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("screenshots"))
    parser.add_argument("--docs", action="store_true", help="the pictures of docs/images")
    parser.add_argument("--only", default="", help="slugs of dashboards, with commas between")
    parser.add_argument("--bare", action="store_true", help="only the hour without GPUs and prices")
    asked = parser.parse_args()
    hours = {"full": ReplayedHour(), "bare": ReplayedHour(gpu=False, prices=False)}
    if asked.docs:
        with tempfile.TemporaryDirectory(prefix="screens-") as folder, browser() as chromium:
            _of_terminals(chromium, hours["full"], Path(folder))
    chosen = [name for name in hours if (not asked.bare or name == "bare") and (not asked.docs or name == "full")]
    for name in chosen:
        with (
            tempfile.TemporaryDirectory(prefix="screens-") as folder,
            served(hours[name], Path(folder)) as url,
            browser() as chromium,
        ):
            if asked.docs:
                _of_docs(chromium, url)
                _of_runbook(chromium, url)
                _of_report(chromium, Path(folder))
            else:
                _all(chromium, url, asked.out / name, [slug for slug in asked.only.split(",") if slug])


def _all(chromium: Any, url: str, out: Path, only: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        for board in (board for board in BOARDS if not only or board.slug in only):
            page = opened(chromium, dashboard(url, board.slug), width)
            page.evaluate("document.querySelectorAll('details.row').forEach(row => { row.open = true })")
            whole(page)
            _taken(page, out / f"{board.slug}-{width}.png", width)
        page = opened(chromium, f"{url}/runbooks/{RUNBOOK}", width)
        _taken(page, out / f"runbook-{width}.png", width)


def _taken(page: Any, path: Path, width: int) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.screenshot(path=path, full_page=True)
    page.context.close()
    print(f"{path}{f': {wide} px wide, the window {width}' if wide > width else ''}", flush=True)


def _of_docs(chromium: Any, url: str) -> None:
    for slug, width, height in OF_DOCS:
        _kept(opened(chromium, dashboard(url, slug), width, height), f"{slug}-{width}")


def _of_runbook(chromium: Any, url: str) -> None:
    """The page that an alert's link opens: filled with its labels, without the results of its queries."""
    for width in WIDTHS:
        link = f"{url}/runbooks/{RUNBOOK}?" + urllib.parse.urlencode({"model_name": "model-0"})
        _kept(opened(chromium, link, width), f"runbook-{width}")


def _of_terminals(chromium: Any, hour: ReplayedHour, folder: Path) -> None:
    """Commands that read the last hour, so the hour ends now."""
    with stored(hour, folder, int(time.time()) // 60 * 60) as prometheus:
        for name, columns, lines, arguments in TERMINALS:
            words = [prometheus if word == "PROMETHEUS" else word for word in arguments]
            env = os.environ | {"COLUMNS": str(columns), "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "stack.cli", *words]
            printed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
            shown = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
            shown.print(Text(f"$ vllm-watch {' '.join(arguments)}".replace("PROMETHEUS", "http://127.0.0.1:9090")))
            shown.print(
                Text.from_ansi("\n".join(printed.replace(prometheus, "http://127.0.0.1:9090").splitlines()[:lines]))
            )
            html = shown.export_html(inline_styles=True, code_format=TERMINAL_PAGE)
            (folder / f"{name}.html").write_text(html)
            page = chromium.new_context(viewport={"width": columns * 8 + 40, "height": 300}).new_page()
            page.goto((folder / f"{name}.html").as_uri())
            _kept(page, name, full=True)


def _of_report(chromium: Any, folder: Path) -> None:
    """The report of the experiment of the tuning quick start."""
    if not install.find("engine"):
        raise SystemExit("the engine is missing: make cli ARGS='lab install engine model'")
    (folder / "prefix-caching.yaml").write_text(EXPERIMENT)
    run = [sys.executable, "-m", "stack.cli"]
    for words in (["tune", "prefix-caching.yaml", "--out", "result"], ["report", "result", "-o", "report.html"]):
        env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "140"}
        subprocess.run([*run, *words], cwd=folder, env=env, check=True)
    page = chromium.new_context(viewport={"width": 1200, "height": 900}).new_page()
    page.goto((folder / "report.html").as_uri())
    page.wait_for_timeout(500)
    _kept(page, "tuning-report")


def _kept(page: Any, name: str, full: bool = False) -> None:
    """Write a page's picture to docs/images. Raises SystemExit when it is too large for the repository."""
    path = ROOT / f"docs/images/{name}.png"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(indexed(page.screenshot(full_page=full)))
    page.context.close()
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size:,} bytes")
    if size > LARGEST_OF_DOCS:
        raise SystemExit(f"{path} is larger than {LARGEST_OF_DOCS:,} bytes; take a lower one")


def indexed(png: bytes) -> bytes:
    """Return a screenshot with the 256 colours that it has most of, at a third of its size. Source: PNG specification,
    sections 9, 11 and 12."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    pixel, at, packed = {2: 3, 6: 4}[kind], 8, b""
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        packed += png[at + 8 : at + 8 + size] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    rows = list(_unfiltered(zlib.decompress(packed), width * pixel, pixel))
    colours = [[row[i : i + 3] for i in range(0, len(row), pixel)] for row in rows]
    counted = Counter(colour for row in colours for colour in row)
    palette = [colour for colour, _ in counted.most_common(256)]
    nearest = {colour: i for i, colour in enumerate(palette)}
    for colour in counted.keys() - nearest.keys():
        nearest[colour] = min(
            range(len(palette)), key=lambda i: sum((a - b) ** 2 for a, b in zip(palette[i], colour, strict=True))
        )
    body = b"".join(b"\0" + bytes(map(nearest.__getitem__, row)) for row in colours)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"PLTE", b"".join(palette)), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b""))
    return png[:8] + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def _unfiltered(data: bytes, length: int, pixel: int) -> Iterator[bytes]:
    above = bytearray(length)
    for at in range(0, len(data), length + 1):
        how, row = data[at], bytearray(data[at + 1 : at + 1 + length])
        for i in range(length) if how else ():
            left, up, corner = (row[i - pixel] if i >= pixel else 0), above[i], (above[i - pixel] if i >= pixel else 0)
            guess = left + up - corner
            paeth = min((left, up, corner), key=lambda one: abs(guess - one)) if how == 4 else 0
            row[i] = (row[i] + (0, left, up, (left + up) // 2, paeth)[how]) & 255
        yield bytes(row)
        above = row


def opened(chromium: Any, url: str, width: int, height: int = 900) -> Any:
    """A page whose clock stands at the end of the hour, with all that is on the screen drawn."""
    page = chromium.new_context(viewport={"width": width, "height": height}, timezone_id="UTC").new_page()
    page.clock.set_fixed_time(END_S)
    page.goto(url)
    page.wait_for_load_state("networkidle")
    return page


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    found = install.find("chromium")
    if not found:
        raise SystemExit("chromium is missing: make cli ARGS='lab install --every'")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found.path, args=list(BROWSER))
        yield chromium
        chromium.close()


@contextlib.contextmanager
def served(hour: ReplayedHour, folder: Path) -> Iterator[str]:
    """The dashboards over a Prometheus that holds the hour."""
    with stored(hour, folder, END_S) as url:
        listen = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "stack.cli", "board", "--prometheus", url, "--listen", listen]
        with _running(command, f"http://{listen}", "/-/healthy", folder):
            yield f"http://{listen}"


@contextlib.contextmanager
def stored(hour: ReplayedHour, folder: Path, end_s: int) -> Iterator[str]:
    """A Prometheus that holds the hour that ends then, and what our rules record of it."""
    tool, program = install.find("promtool"), install.find("prometheus")
    if not (tool and program):
        raise SystemExit("prometheus or promtool is missing: make cli ARGS='lab install prometheus promtool'")
    data, text = folder / "data", folder / "hour.om"
    with text.open("w") as file:
        file.writelines(hour.text(end_s))
    subprocess.run(
        [tool.path, "tsdb", "create-blocks-from", "openmetrics", "--quiet", text, data],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    text.unlink()
    (folder / "prometheus.yml").write_text("global: {scrape_interval: 15s}\n")
    with _prometheus(program.path, folder) as url:
        span = [
            f"--start={end_s - HOUR_S}",
            f"--end={end_s}",
            "--eval-interval=60s",
            f"--url={url}",
            f"--output-dir={data}",
        ]
        rules = ROOT / "alerts/prometheus/recording.yaml"
        subprocess.run(
            [tool.path, "tsdb", "create-blocks-from", "rules", *span, rules], check=True, capture_output=True
        )
    with _prometheus(program.path, folder) as url:
        yield url


@contextlib.contextmanager
def _prometheus(program: Path, folder: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        str(program),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=error",
    ]
    with _running(command, url, "/-/ready", folder):
        yield url


@contextlib.contextmanager
def _running(command: list[str], url: str, ready: str, folder: Path) -> Iterator[None]:
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until_ready(url, ready)
        yield
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    main()
