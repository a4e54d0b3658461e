"""The built-in dashboards, served from this process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import urllib.error
import urllib.request
from urllib.parse import urlencode

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from alerts import thresholds
from alerts.panel_ref import PanelRef, board_uid
from dashboards import queries as query_builders
from dashboards.model import Dashboard, DashboardRow, Panel, Query, Shape
from dashboards.registry import BOARDS
from exporters.catalogue import sidecar, vllm
from exporters.net.prometheus import Prometheus, address
from stack.board import server
from stack.cli import main
from tests.support.ports import free_port
from tests.support.wait import eventually

NOW = 1_767_229_200  # where the backfilled hour ends


HOSTILE = '<img src=x onerror=alert(1)>"} or vector(7) #'


def panel(slug, *queries, **changes):
    given = {"title": slug.title(), "means": "It is so.", "good": "Zero.", "act": "Look.", "height": 7, "width": 8}
    return Panel(slug, queries=queries, **given | changes)


def hour() -> str:
    """OpenMetrics text: two engines, one of them with a hostile model name; a histogram, a request log, an alert, a
    restart."""
    rows = []
    for step in range(241):
        at = NOW - 3600 + step * 15
        for instance, model, running in (("10.0.0.1:8000", "llama", 3), ("10.0.0.2:8000", HOSTILE, 7)):
            labels = (
                f'job="vllm",instance="{instance}",model_name="{model.replace(chr(34), chr(92) + chr(34))}",engine="0"'
            )
            rows.append((f"vllm:num_requests_running{{{labels}}}", running, at))
            rows.append((f"vllm:kv_cache_usage_perc{{{labels}}}", 0.9 + running / 100, at))
            rows.append((f"vllm:prompt_tokens_total{{{labels}}}", step * 150 * running, at))
            buckets = (("0.1", 1), ("2.5", 3), ("+Inf", 4))
            rows += [
                (f'vllm:time_to_first_token_seconds_bucket{{{labels},le="{le}"}}', step * each, at)
                for le, each in buckets
            ]
            rows.append((f"vllm:time_to_first_token_seconds_count{{{labels}}}", step * 4, at))
        rows.append(
            (
                'vllm_watch_requests_total{job="sidecar",instance="s",model_name="llama",team="demo",outcome="ok"}',
                step,
                at,
            )
        )
        rows.append(
            (
                'process_start_time_seconds{job="vllm",instance="10.0.0.1:8000"}',
                NOW - 3600 if step < 120 else NOW - 1500,
                at,
            )
        )
        if 100 <= step <= 140:
            rows.append(
                (
                    'ALERTS{alertname="VLLMEngineDown",alertstate="firing",severity="critical",instance="10.0.0.1:8000"}',
                    1,
                    at,
                )
            )
    # All samples of a series stand together.
    return (
        "".join(
            f"{name} {value} {at}\n"
            for name, value, at in sorted(rows, key=lambda row: (row[0].split("{")[0], row[0], row[2]))
        )
        + "# EOF\n"
    )


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def prometheus(part, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "page").write_text(hour())
    command = [
        part("promtool").path,
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        "--quiet",
        folder / "page",
        folder / "data",
    ]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("global: {scrape_interval: 15s}\n")
    url = f"http://127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                part("prometheus").path,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address={url.removeprefix('http://')}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        eventually(lambda: get(f"{url}/-/ready")[0] == 200, what="Prometheus")
        yield url
    finally:
        process.terminate()
        process.wait(60)


SHAPES = Dashboard("shapes", "vLLM / Shapes", "Is every shape drawn?", (
    DashboardRow("", (
        panel("running", query_builders.now(vllm.NUM_REQUESTS_RUNNING), threshold=thresholds.TTFT_P95),
        panel("tokens", query_builders.rate(vllm.PROMPT_TOKENS), shape=Shape.STACK),
        panel("ttft", query_builders.heat(vllm.TIME_TO_FIRST_TOKEN), shape=Shape.HEATMAP),
        panel("log", query_builders.rate(sidecar.REQUESTS, by=("team",)), shape=Shape.NUMBER),
        panel("engines", Query(query_builders.now(vllm.NUM_REQUESTS_RUNNING).expr, "running"),
            Query("up", "up", "bool_on_off"), shape=Shape.TABLE),
        panel("broken", Query("sum(rate(x[)", "x")),
        panel("ttft-p95", query_builders.p95(vllm.TIME_TO_FIRST_TOKEN)),
        panel("ttft-p20", query_builders.quantile(0.2, vllm.TIME_TO_FIRST_TOKEN)),
        panel("ttft-p70", query_builders.quantile(0.7, vllm.TIME_TO_FIRST_TOKEN)),
        panel("gauge-rate", Query("rate(vllm:num_requests_running[5m])", "x")),
        panel("nothing", Query("absent_series", "x"), optional="Start the engine with --thing to fill this."),
    )),
    DashboardRow("Later", (panel("folded", query_builders.now(vllm.NUM_REQUESTS_RUNNING)),), collapsed=True),
))  # fmt: skip


def number(slug: str, board: str = "shapes") -> int:
    return PanelRef(board, slug).panel_id


class Served:
    """The application in a thread of its own, its clock stopped at NOW."""

    def __init__(self, prometheus_url: str, boards=(*BOARDS, SHAPES), requests=None, **options) -> None:
        self.asked: list[str] = []
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        async def main() -> None:
            self._stop = asyncio.Event()
            async with Prometheus(address(prometheus_url)) as client:
                desk = server.DashboardServer(client, boards, requests=requests)
                app = server.application(desk, now=lambda: NOW, **options)

                @web.middleware
                async def note(request, handler):
                    self.asked.append(request.path)
                    return await handler(request)

                app.middlewares.insert(0, note)
                runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                started.set()
                await self._stop.wait()
                await runner.cleanup()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(main(),))
        self._thread.start()
        assert started.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()

    def panel(self, slug: str, board: str = "shapes", **parameters: str):
        status, text = get(
            f"{self.url}/api/panel/{board_uid(board)}/{number(slug, board)}?{urlencode(parameters, doseq=True)}"
        )
        assert 200 == status, text
        return json.loads(text)


@pytest.fixture(scope="module")
def board(prometheus):
    served = Served(prometheus)
    yield served
    served.stop()


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["board", *arguments])
