"""Lab of the drills: a real engine with its monitoring, and access to Prometheus and Alertmanager.

Every drill begins with a Prometheus that has forgotten all, so that no earlier one is in its windows, and with every
process running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp

from alerts.settings import Overrides, Settings
from exporters.catalogue import exposition_parser
from exporters.engine.client import EngineClient
from exporters.net.alertmanager import Firing, firing_alerts
from exporters.net.prometheus import PrometheusError
from exporters.text import write_atomically
from stack.lab import headlines, plan, up
from stack.lab.page import serve
from stack.lab.plan import Beat, LabConfig
from stack.lab.supervisor import LabError, Supervisor

PROCESSES = ("vllm", "gateway", "sidecar", "alertmanager", "prometheus")  # the board and the collector have no alert
# It may be made to forget; and what is scraped no more is gone after 20 seconds as it is after 5 minutes elsewhere.
PROMETHEUS = ("--web.enable-admin-api", "--query.lookback-delta=20s")
BEAT = Beat(scrape_s=2, evaluate_s=1, resend_s=2)  # a scrape of a busy vLLM took up to 0.9 s
# The only numbers that differ from the defaults besides durations, with what they stand for.
OVERRIDES = {
    "start_time": 90.0  # a tiny model starts within 25 to 60 s; ten minutes of nothing would prove no more
}
MORE: Mapping[str, Mapping[str, Any]] = {
    # a frozen engine is a timeout soon
    "gateway.yaml": {"timeouts": {"drain_s": 5, "prefill_s": 4, "decode_s": 4, "total_s": 6}},
    "sidecar.yaml": {
        "engine_interval_s": 2,
        "gpu_interval_s": 1,
        "prices": {"gpu_hour": 3.6, "budget_per_1k_tokens": 0.1},
    },
}
GPUS: tuple[Mapping[str, Any], ...] = tuple(
    {
        "uuid": f"GPU-00000000-0000-4000-8000-00000000000{index}", "index": index, "name": "Stand-in GPU",
        "driver_version": "580.0",
        "pci.bus_id": f"00000000:0{index + 1}:00.0", "mig.mode.current": "Disabled", "utilization.gpu": 40,
        "memory.used": 60000,
        "memory.free": 20000, "memory.total": 80000, "power.draw": 300, "temperature.gpu": 55, "temperature.memory": 60,
        "clocks_event_reasons_counters.hw_thermal_slowdown": 0, "ecc.errors.corrected.aggregate.total": 0,
        "ecc.errors.uncorrected.aggregate.total": 0,
    }
    for index in range(2)
)  # fmt: skip


class DrillEngine(StrEnum):
    """Options of the engine of a drill."""

    USUAL = "as in the lab"
    ONE_SLOT = "one slot"
    SMALL_CACHE = "small cache"
    SHORT_QUEUE = "short queue"
    GUESSING = "speculative"
    FAILING = "failing tool parser"


ARGUMENTS: Mapping[DrillEngine, tuple[str, ...]] = {
    DrillEngine.USUAL: (),
    DrillEngine.ONE_SLOT: ("--max-num-seqs", "1"),
    DrillEngine.SMALL_CACHE: ("--num-gpu-blocks-override", "24", "--max-model-len", "512"),
    DrillEngine.SHORT_QUEUE: ("--max-num-seqs", "2", "--max-num-queued-reqs", "4"),
    DrillEngine.GUESSING: (
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}),
    ),
    DrillEngine.FAILING: ("--enable-auto-tool-choice", "--tool-call-parser", "failing"),
}
# Plugin of vLLM, loaded by the engine alone: vLLM answers a chat with tools by HTTP 500, and all else as usual.
PARSER_FILE = "failing_tool_parser.py"
FAILING_PARSER = """\
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("failing")
class FailingToolParser(ToolParser):
    def adjust_request(self, request):
        raise RuntimeError("drill: this tool parser fails")
"""


def arguments(engine: DrillEngine, folder: Path) -> tuple[str, ...]:
    """Return the options of an engine. folder: the lab's, with the plugin."""
    plugin = ("--tool-parser-plugin", str(folder / PARSER_FILE)) if engine is DrillEngine.FAILING else ()
    return (*ARGUMENTS[engine], *plugin)


def settings(pace: int) -> Settings:
    return Settings(Overrides(thresholds=OVERRIDES), pace)


def drilled(config: LabConfig) -> LabConfig:
    """A lab's configuration as drills need it: quicker, with stand-in GPUs, without board and collector."""
    driver = config.folder / "driver"
    paths = {"PATH": f"{driver}{os.pathsep}{os.environ.get('PATH', '')}", "LD_LIBRARY_PATH": str(driver)}
    programs = {name: path for name, path in config.programs.items() if name != "otelcol"}
    return replace(
        config, programs=programs, beat=BEAT, args={"prometheus": PROMETHEUS}, env={"sidecar": paths}, more=MORE
    )


class DrillLab:
    """One running lab. `tell` gets a line of progress now and then."""

    def __init__(
        self, config: LabConfig, session: aiohttp.ClientSession, keys: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self.config = config
        self.session = session
        self.keys = keys
        self.tell = tell
        self.engine: DrillEngine | None = None
        self.broken_at = 0.0
        self._supervisor = Supervisor(config.folder)

    def url(self, name: str) -> str:
        return self.config.url(name)

    def breaks_now(self) -> None:
        """Mark the end of preparation: from now on the time until the alert counts."""
        self.broken_at = time.monotonic()

    # Processes

    def pid(self, name: str) -> int:
        return self._supervisor.running[name].process.pid

    def core(self) -> int:
        """The engine's core: the child of our vLLM that schedules; the API server is its parent. Raises LookupError."""
        for child in descendants(self.pid("vllm")):
            if "EngineCore" in _command(child):
                return child
        raise LookupError("this vLLM has no EngineCore process")

    async def end(self, name: str) -> None:
        """SIGKILL, as a crash."""
        await self._supervisor.end(name)

    async def start(self, name: str) -> None:
        """Start a process and wait until it answers. Raises LabError."""
        await self._supervisor.start(self._spec(name))
        await self._supervisor.wait_healthy(name)

    async def launch(self, name: str) -> None:
        """Start a process without waiting for it."""
        await self._supervisor.start(self._spec(name))

    async def answers(self, name: str) -> None:
        await self._supervisor.wait_healthy(name)

    def _spec(self, name: str) -> plan.Process:
        return next(process for process in plan.processes(self.config) if process.name == name)

    async def repair(self) -> None:
        """Start again whatever does not run or answer, those at once, and wait for them."""
        await self._supervisor.look()
        for name in PROCESSES:
            running = self._supervisor.running.get(name)
            if running and running.exited is not None:
                await self.end(name)
            if name not in self._supervisor.running:
                await self.launch(name)
        for name in PROCESSES:
            await self.answers(name)

    async def with_engine(self, engine: DrillEngine) -> None:
        """Have this engine running, and no other."""
        if engine is self.engine:
            return
        self.engine = None
        if "vllm" in self._supervisor.running:
            await self.end("vllm")
        self.tell(f"starting the engine ({engine}), half a minute or more")
        self.config = replace(
            self.config, args={"prometheus": PROMETHEUS, "vllm": arguments(engine, self.config.folder)}
        )
        await self.start("vllm")
        self.engine = engine

    async def begin_anew(self, pace: int) -> None:
        """All fixed, and a Prometheus that has forgotten everything, with its rules at this pace; until it has seen
        every target again."""
        self.config = replace(self.config, settings=settings(pace))
        for name, text in plan.rules(self.config):
            (self.config.folder / name).write_text(text)
        await self.repair()
        self.reload_prometheus()
        if not await until(self._forgotten, 30):
            raise LabError("Prometheus does not delete its series")
        if not await until(self._all_seen, 30):
            raise LabError(f"not every target came up: {await headlines.targets(self.url('prometheus'))}")

    async def _forgotten(self) -> bool:
        async with headlines.prometheus_client(self.url("prometheus")) as prometheus:
            return await prometheus.delete_series('{__name__=~".+"}')

    async def _all_seen(self) -> bool:
        return bool(
            await self.query(f"min(up) * (count(up) == bool {sum(map(len, plan.targets(self.config).values()))})")
        )

    def reload_prometheus(self) -> None:
        """Have it read its files again, which then must be there."""
        os.kill(self.pid("prometheus"), signal.SIGHUP)

    async def stop(self) -> None:
        await self._supervisor.stop()

    @property
    def supervisor(self) -> Supervisor:
        return self._supervisor

    # The GPUs

    def write_gpus(self, **of_the_second: Any) -> None:
        """Set what the GPUs report from now on: healthy, except for the given values of the second one."""
        first, second = GPUS
        write_atomically(self.config.folder / "driver" / "gpus.json", json.dumps([first, {**second, **of_the_second}]))

    # What is seen

    async def query(self, expr: str) -> float | None:
        async with headlines.prometheus_client(self.url("prometheus")) as prometheus:
            return await prometheus.value(expr)

    async def arrived(self, alert: str) -> Firing | None:
        """The alert as Alertmanager holds it; None while it does not, or does not answer."""
        return next(iter(await self._held(alert) or ()), None)

    async def state(self, alert: str) -> str:
        """firing, pending or inactive at Prometheus; unknown when that does not answer."""
        async with headlines.prometheus_client(self.url("prometheus")) as prometheus:
            try:
                states = {found.state for found in await prometheus.alerts() if found.labels["alertname"] == alert}
            except PrometheusError:
                return "unknown"
        return "firing" if "firing" in states else "pending" if states else "inactive"

    async def gone(self, alert: str) -> bool:
        """Neither at Prometheus nor at Alertmanager, and both answer."""
        return await self._held(alert) == [] and await self.state(alert) == "inactive"

    async def _held(self, alert: str) -> list[Firing] | None:
        try:
            return await firing_alerts(self.url("alertmanager"), name=alert, timeout_s=headlines.TIMEOUT_S)
        except (OSError, ValueError):
            return None

    async def at_the_engine(self, metric: str) -> float:
        """A figure from the engine's own page, now; 0 where it has none."""
        text = await EngineClient(self.session, self.url("vllm"), timeout_s=5).metrics()
        return exposition_parser.parse(text.decode()).total(metric) or 0.0


@contextlib.asynccontextmanager
async def running(config: LabConfig, tell: Callable[[str], None]) -> AsyncIterator[DrillLab]:
    """A lab whose engine is not started yet. Leaving the block stops all of it."""
    for name in ("prometheus", "alertmanager"):
        shutil.rmtree(config.folder / name, ignore_errors=True)
    config.folder.mkdir(parents=True, exist_ok=True)
    config.events.unlink(missing_ok=True)
    install_driver(config.folder / "driver")
    (config.folder / PARSER_FILE).write_text(FAILING_PARSER)
    keys = up.prepare(config)
    served = None
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        lab = DrillLab(config, session, keys, tell)
        lab.write_gpus()
        try:
            served = await serve(lab.supervisor, config.port("lab"))
            yield lab
        finally:
            if served:
                await served.cleanup()
            await lab.stop()


def install_driver(folder: Path) -> None:
    """A folder that comes first where the sidecar looks for programs and libraries: in it a stand-in nvidia-smi, and a
    libnvidia-ml that is none, so that the GPUs of this machine, should it have any, are not asked."""
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("fake_nvidia_smi").read_text().split("\n", 1)[1]
    program = folder / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(0o755)
    (folder / "libnvidia-ml.so.1").write_text("no library: drills have stand-in GPUs\n")


async def until(condition: Callable[[], Any], within_s: float, every_s: float = 0.25) -> Any:
    """Wait until the coroutine function returns something true, and return it; None when it was not within the time."""
    deadline = time.monotonic() + within_s
    while True:
        if answer := await condition():
            return answer
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(every_s)


def descendants(pid: int) -> Iterator[int]:
    """Children of a process, their children, and so on. Linux."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents.setdefault(int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(
                int(entry.name)
            )
    todo = list(parents.get(pid, ()))
    while todo:
        child = todo.pop()
        todo += parents.get(child, ())
        yield child


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
