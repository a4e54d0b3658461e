"""`make bench-histograms`: what classic and native histograms of one sidecar cost a Prometheus.

The /metrics endpoint has 10 teams x 6 models, whose requests of 15 s come between any two scrapes; it is scraped every
two seconds. Each variant is a real Prometheus of its own; all of them scrape the same endpoint, and one more scrapes
nothing but itself.
Results: docs/internals/resource-use.md, "Native histograms"."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import yaml

from exporters import scrape
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.store import CounterStore
from stack.lab import install
from tests.bench.bench_fleet import number, process, query, size_of
from tests.bench.bench_sidecar_lines import record
from tests.support import memory
from tests.support.bench_server import until_ready
from tests.support.ports import free_port

TEAMS, MODELS = 10, 6
# an hour of scrapes every 15 s; requests between two of them, 2 a second for each team and model
SCRAPES, REQUESTS = 240, 1800
EVERY_S = 2
LATE = 0.1  # of the scrapes may take longer than that, on a machine with other work
NATIVE = ("--enable-feature=native-histograms",)


@dataclass(frozen=True)
class Variant:
    """How one Prometheus stores histograms. scraped: whether it scrapes the endpoint, or itself alone."""

    name: str
    flags: tuple[str, ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    scraped: bool = True


VARIANTS = (
    Variant("nothing but itself", scraped=False),
    Variant("classic"),
    Variant("classic and native", NATIVE, {"always_scrape_classic_histograms": True}),
    Variant("native", NATIVE),
)


class Endpoint(ThreadingHTTPServer):
    """A /metrics endpoint of this process with the pages of a sidecar. advance: requests that end between two
    scrapes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.ledger = CounterStore(RequestCounters(BoundedNames(), BoundedNames()))
        self.rng = Random(6)
        self.pages: dict[str, list[tuple[float, int]]] = {}  # by content type: CPU seconds and bytes of each
        self.lock = threading.Lock()

    def advance(self, requests: int) -> None:
        with self.lock:
            self.ledger.count([record(self.rng, at % TEAMS, at // TEAMS % MODELS) for at in range(requests)])
            self.ledger.commit({})

    def page(self, accept: str) -> tuple[bytes, str]:
        with self.lock:
            began = time.thread_time()
            body, content_type = scrape.answer(self.ledger.samples(), accept, self.ledger.blocks)
            self.pages.setdefault(content_type, []).append((time.thread_time() - began, len(body)))
        return body, content_type


class _Page(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:  # as the library calls it
        body, content_type = self.server.page(self.headers["Accept"])
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # Prometheus waited for EVERY_S
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def prometheus(variant: Variant, folder: Path, target: int) -> Iterator[tuple[int, str]]:
    """Start a Prometheus; yield its process id and address."""
    program, port = install.find("prometheus"), free_port()
    if program is None:
        raise SystemExit("Prometheus is missing: make cli ARGS='lab install prometheus'")
    folder.mkdir()
    jobs: list[dict[str, Any]] = [{"job_name": "prometheus", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
    if variant.scraped:
        jobs.append({"job_name": "sidecar", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}], **variant.job})
    config = {"global": {"scrape_interval": f"{EVERY_S}s", "scrape_timeout": f"{EVERY_S}s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [str(program.path), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address=127.0.0.1:{port}", "--log.level=error", *variant.flags]  # fmt: skip
    with process(command) as server:
        until_ready(f"http://127.0.0.1:{port}")
        yield server.pid, f"http://127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scrapes", type=int, default=SCRAPES, metavar="N", help="so many scrapes, not an hour of them"
    )
    options = parser.parse_args()
    endpoint = Endpoint()
    endpoint.advance(TEAMS * MODELS * 20)
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="bench-histograms-", dir="/var/tmp") as name, ExitStack() as stack:
        folders = {one.name: Path(name, str(at)) for at, one in enumerate(VARIANTS)}
        servers = {
            one.name: stack.enter_context(prometheus(one, folders[one.name], endpoint.server_port)) for one in VARIANTS
        }
        began = time.monotonic()
        for tick in range(1, options.scrapes + 1):
            endpoint.advance(REQUESTS)
            time.sleep(max(0.0, began + tick * EVERY_S - time.monotonic()))
        print("| stored | series | samples of a scrape | WAL, kB a scrape | RSS, MiB |\n|---|---:|---:|---:|---:|")
        for one in VARIANTS:
            print(
                f"| {one.name} | " + " | ".join(measured(*servers[one.name], folders[one.name], options.scrapes)) + " |"
            )
    for content_type, found in endpoint.pages.items():
        cpu_s = statistics.median(cpu_s for cpu_s, _ in found)
        print(f"{content_type.partition(';')[0]}: {found[-1][1] / 1000:,.0f} kB, {1000 * cpu_s:.1f} ms of CPU")


def measured(pid: int, base: str, folder: Path, scrapes: int) -> Iterator[str]:
    """Yield the figures of one Prometheus as the table has them."""
    if faults := query(
        base, f'count_over_time(up{{job="sidecar"}}[1h]) - sum_over_time(up{{job="sidecar"}}[1h]) > {LATE * scrapes}'
    ):
        raise SystemExit(f"more than {LATE:.0%} of the scrapes failed: {faults}")
    yield f"{number(base, 'prometheus_tsdb_head_series', direct=True):,.0f}"
    found = query(base, 'scrape_samples_scraped{job="sidecar"}')
    yield f"{float(found[0]['value'][1]):,.0f}" if found else ""
    yield f"{size_of(folder / 'data/wal') / 1000 / scrapes:,.0f}"
    yield f"{memory.mib(pid, memory.RESIDENT):.0f}"


if __name__ == "__main__":
    main()
