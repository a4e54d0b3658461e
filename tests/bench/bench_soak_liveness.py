"""`make bench-soak ARGS=--liveness`: a real engine that never hangs, under all that could be mistaken for it.

Whole lab under mixed load at a low rate: a long load, a gateway that gets no CPU time, a Prometheus that is stopped,
prefills of 100,000 tokens, sleep and pause, and restarts in a row. Nobody may ever call the engine hung. How long it
was suspect or out of rotation is for information."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from exporters.catalogue import exposition_parser, gateway, sidecar
from exporters.catalogue.exposition_parser import BadExposition
from exporters.engine.liveness import EngineState
from exporters.net.prometheus import PrometheusError
from stack.drill.faults import stopped
from stack.drill.lab import DrillLab, until
from stack.drill.traffic import meanwhile
from stack.lab.plan import MODEL, LabConfig
from tests.bench.bench_soak_judge import Check
from tests.bench.bench_soak_load import COMPLETIONS, Load

EVERY_S = 0.5  # a state lasts a second at least
PROMPT_TOKENS = 100_000
CONTEXT = 131_072
PREFILLS, NAPS = 3, 3
NAP_S, GAP_S, STARVED_S = 15.0, 60.0, 120.0
WITHIN_S = 900.0
OBSERVERS = {"gateway": ("gateway-metrics", gateway.ENGINE_STATE), "sidecar": ("sidecar", sidecar.ENGINE_STATE)}
ARGUMENTS = ("--max-model-len", str(CONTEXT), "--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT}))
_BUSY = "import sys, time\nends = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < ends: pass"


def of_liveness(config: LabConfig) -> LabConfig:
    """A lab whose gateway has the default probes, and whose engine takes prompts of 100,000 tokens.

    The engine is in development mode, without which nobody can put it to sleep."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    more = {**config.more, "gateway.yaml": {**config.more.get("gateway.yaml", {}), "liveness": {}}}
    return replace(config, args={**config.args, "vllm": ARGUMENTS}, more=more)


@dataclass(slots=True)
class StateWatch:
    """States that gateway and sidecar show, in seconds by (phase, observer, state, evidence). out_s: out of rotation,
    by phase. lasted_s: of each phase."""

    lab: DrillLab
    phase: str = ""
    seen_s: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    out_s: Counter[str] = field(default_factory=Counter)
    lasted_s: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        began, self.phase = time.monotonic(), phase
        self.lab.tell(phase)
        try:
            yield
        finally:
            self.lasted_s[phase], self.phase = time.monotonic() - began, ""
            self.lab.tell(f"{phase}: {self.told(phase)}")

    def told(self, phase: str) -> str:
        """Return the states of a phase, for people."""
        mine = sorted((*key[1:], seconds) for key, seconds in self.seen_s.items() if key[0] == phase)
        states = ", ".join(f"{who} {state} ({why}) {seconds:.0f} s" for who, state, why, seconds in mine)
        return f"{states}; out of rotation {self.out_s[phase]:.0f} of {self.lasted_s[phase]:.0f} s"

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            now = time.monotonic()
            took_s, before = now - before, now
            if self.phase:
                for observer in OBSERVERS:
                    await self._look(observer, took_s)
                if not await self._ready():
                    self.out_s[self.phase] += took_s

    async def _look(self, observer: str, took_s: float) -> None:
        where, metric = OBSERVERS[observer]
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, BadExposition):
            async with self.lab.session.get(f"{self.lab.url(where)}/metrics") as response:
                lines = [line for line in (await response.text()).splitlines() if line.startswith(metric.name)]
                for labels, _ in exposition_parser.parse("\n".join([*lines, ""])).of(metric.name):
                    self.seen_s[self.phase, observer, labels["state"], labels["evidence"]] += took_s

    async def _ready(self) -> bool:
        """Return False where the gateway says that it sends the engine nothing."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self.lab.session.get(f"{self.lab.url('gateway-metrics')}/-/engine-ready") as response:
                return response.status != 503
        return True


# ---- phases


async def _starved(lab: DrillLab) -> None:
    """The gateway is stopped for some seconds again and again, beside as many busy loops as there are cores."""
    rng, ends = random.Random(1), time.monotonic() + STARVED_S
    loops = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", _BUSY, str(STARVED_S))
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        while time.monotonic() < ends:
            with stopped(lab.pid("gateway")):
                await asyncio.sleep(rng.uniform(0.3, 8.0))
            await asyncio.sleep(rng.uniform(0.3, 6.0))
    finally:
        for loop in loops:
            with contextlib.suppress(ProcessLookupError):
                loop.kill()
            await loop.wait()


async def _unscraped(lab: DrillLab) -> None:
    with stopped(lab.pid("prometheus")):
        await asyncio.sleep(GAP_S)
    await asyncio.sleep(2 * lab.config.beat.scrape_s)


async def _prefills(lab: DrillLab) -> None:
    for number in range(PREFILLS):
        began = time.monotonic()
        status = await _completion(lab, [(token * 7 + number) % 2000 + 3 for token in range(PROMPT_TOKENS)])
        lab.tell(f"a prompt of {PROMPT_TOKENS:,} tokens: {status} after {time.monotonic() - began:.1f} s")


async def _completion(lab: DrillLab, prompt: Sequence[int]) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    headers = {"Authorization": f"Bearer {lab.keys['demo']}"}
    url = lab.url("gateway") + COMPLETIONS
    async with lab.session.post(url, json=body, headers=headers, timeout=timeout) as response:
        await response.read()
        return response.status


async def _naps(lab: DrillLab) -> None:
    """Sleep and wake, pause and resume. On a CPU a sleep frees no memory; the scheduler stands still as elsewhere."""
    for begin, end in (("/sleep?level=1", "/wake_up"), ("/pause?mode=keep", "/resume")):
        for _ in range(NAPS):
            for path, then_s in ((begin, NAP_S), (end, 5.0)):
                async with lab.session.post(lab.url("vllm") + path) as response:
                    response.raise_for_status()
                await asyncio.sleep(then_s)
            if not await until(lambda: _served(lab), WITHIN_S, 1.0):
                raise AssertionError(f"the engine serves nothing after {end}")


async def _served(lab: DrillLab) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        return await _completion(lab, [5, 6, 7]) == 200
    return False


def _restarted(times: int) -> Callable[[DrillLab], Awaitable[None]]:
    """Return a phase of restarts in a row, by SIGTERM and by SIGKILL in turns, each until a request is served."""

    async def restart(lab: DrillLab) -> None:
        log = lab.config.folder / "logs" / "vllm.log"
        for number in range(times):
            if number % 2 == 0:
                os.kill(lab.pid("vllm"), signal.SIGTERM)
                await asyncio.sleep(1.0)
            await lab.end("vllm")
            log.rename(log.with_name(f"vllm.{number}.log"))
            began = time.monotonic()
            await lab.launch("vllm")
            if not await until(lambda: _served(lab), WITHIN_S, 0.5):
                raise AssertionError(f"the engine serves nothing after restart {number + 1}")
            lab.tell(f"restart {number + 1} of {times}: served after {time.monotonic() - began:.0f} s")

    return restart


# ---- the whole of it


async def measure(lab: DrillLab, load: Load, for_s: float, restarts: int) -> StateWatch:
    """Run all phases one after the other under the load. for_s: of the one that has nothing else."""
    phases: Mapping[str, Callable[[DrillLab], Awaitable[None]]] = {
        "starved gateway": _starved,
        "Prometheus stopped": _unscraped,
        "long prefills": _prefills,
        "sleep and pause": _naps,
        "mixed load": lambda _: asyncio.sleep(for_s),
        "restarts": _restarted(restarts),
    }
    watch = StateWatch(lab)
    async with meanwhile(watch.run()), _sending(load):
        for phase, run in phases.items():
            with watch.during(phase):
                await run(lab)
    return watch


@contextlib.asynccontextmanager
async def _sending(load: Load) -> AsyncIterator[None]:
    sending = asyncio.create_task(load.run())
    try:
        yield
        load.stopping = True
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def verdict(watch: StateWatch, log: str) -> list[Check]:
    """log: the gateway's."""
    try:
        alert = await watch.lab.query('max_over_time(ALERTS{alertname="VLLMEngineFrozen"}[3h])')
    except PrometheusError as error:
        return [*judged(watch, log), Check("VLLMEngineFrozen", str(error), "an answer of Prometheus", False)]
    fired = Check("VLLMEngineFrozen", "fired" if alert else "silent", "silent", not alert)
    return [*judged(watch, log), fired]


def judged(watch: StateWatch, log: str) -> Iterable[Check]:
    for phase in watch.lasted_s:
        states = {state for its, _, state, _ in watch.seen_s if its == phase}
        yield Check(phase, watch.told(phase), "never hung", bool(states) and EngineState.HUNG not in states)
    lines = log.count(" is hung: ")
    yield Check("lines of the gateway about a hung engine", str(lines), "0", not lines)
