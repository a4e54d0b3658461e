"""What a fleet shows, and one small server that shows it: a page for each engine, gateway and sidecar, whose counters
grow. A process of its own.

The ground is that of the panels' tests (panel_fixtures.py): every family of a vLLM 0.32 with the labels and bounds of a
captured page. Pages are made anew every few seconds and served as they are, so that a scrape costs the server next to
nothing."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from exporters.catalogue import gpu
from tests.support.panel_fixtures import CARDS, TEAMS, Line, fleet

FRESH_S = 5.0
# of GPUs that are well they stand still
FAULTS = frozenset(metric.name for metric in (gpu.XID_ERRORS, gpu.ECC_ERRORS, gpu.NVLINK_ERRORS))
SERVED = ("vllm", "gateway", "sidecar")
OF_RULES = ("ALERTS",)
OF_PROMETHEUS = ("up", "scrape_")  # it makes these itself of every scrape


@dataclass(frozen=True, slots=True)
class Size:
    """How large a fleet is."""

    engines: int
    teams: int
    models: int

    @property
    def told(self) -> str:
        return f"{self.engines} x {self.teams} x {self.models}"


def lines(size: Size) -> list[Line]:
    """Every series of the fleet: one team's for each of its teams, one GPU's for each engine."""
    there = [
        line
        for line in fleet(size.engines, size.models).lines
        if line.labels.get("job") in SERVED and line.name not in OF_RULES
    ]
    of_teams = [copy for line in there for copy in _copies(line, "team", TEAMS, size.teams)]
    of_cards = [copy for line in of_teams for copy in _copies(line, "uuid", CARDS, size.engines)]
    return [well(line) for line in of_cards]


def well(line: Line) -> Line:
    """The same of a GPU that is well: where each reports every error at once, each has its alerts, and the writing of
    their texts is timed."""
    return replace(line, grows=0.0) if line.name in FAULTS else line


def _copies(line: Line, label: str, known: tuple[str, ...], count: int) -> Iterator[Line]:
    """What bears the first of the names that the fixtures know, once for each of so many; what bears another one of
    them not at all."""
    name = line.labels.get(label)
    if name not in known:
        yield line
    elif name == known[0]:
        yield from (replace(line, labels={**line.labels, label: f"{label}-{number}"}) for number in range(count))


def text(line: Line, without: Iterable[str] = ()) -> str:
    inner = ",".join(f"{key}={json.dumps(value)}" for key, value in line.labels.items() if key not in without)
    return f"{line.name}{{{inner}}} "


def value(line: Line, zero_s: float, at_s: float) -> float:
    return next(line.values([(at_s - zero_s) / 3600], zero_s))


def targets(of: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """(job, instance) -> what it shows."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in of:
        if not line.name.startswith(OF_PROMETHEUS):
            found.setdefault((line.labels["job"], line.labels["instance"]), []).append(line)
    return found


class Pages:
    """The pages as of now, by path."""

    def __init__(self, size: Size, zero_s: float, now: Callable[[], float] = time.time) -> None:
        self._zero_s = zero_s
        self._now = now
        shown = targets(lines(size))
        self._heads = {
            f"/{job}/{instance}": [(text(line, ("job", "instance")), line) for line in of]
            for (job, instance), of in shown.items()
        }
        self.bodies: dict[str, bytes] = {}
        self.refresh()

    def refresh(self) -> None:
        for path, heads in self._heads.items():
            at = self._now()
            self.bodies[path] = "".join(
                [f"{head}{value(line, self._zero_s, at):.9g}\n" for head, line in heads]
            ).encode()

    def keep_fresh(self) -> None:
        while True:
            time.sleep(FRESH_S)
            self.refresh()


def serve(port: int, size: Size, zero_s: float) -> None:
    pages = Pages(size, zero_s)
    threading.Thread(target=pages.keep_fresh, daemon=True).start()

    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = pages.bodies.get(self.path, b"")
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Page).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Size(*map(int, sys.argv[2:5])), float(sys.argv[5]))
