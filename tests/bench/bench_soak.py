"""`make bench-soak`: the whole lab under mixed load for an hour while things go wrong, and whether anything leaks or is
lost. See docs/internals/soak.md.

Real vLLM (in one process, which leaves the other core to the rest), gateway, sidecar, board, Prometheus, Alertmanager,
and the collector where there is one. It ends by itself, prints what it found, and exits 1 when a line of the verdict
fails. Nothing is judged by how fast it was: a busy machine makes it slower, not wrong."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from alerts.panel_ref import PanelRef
from dashboards.registry import BOARDS
from exporters.catalogue import exposition_parser, gateway, reconciled, sidecar, vllm
from exporters.catalogue.exposition_parser import BadExposition, Exposition
from exporters.requests.record import RequestRecord, parse_block
from exporters.text import parse_duration
from stack.drill import lab as drill_lab
from stack.drill.lab import DrillLab, descendants, until
from stack.drill.run import stop_on_signal
from stack.drill.traffic import meanwhile
from stack.lab import headlines, install, plan, up
from stack.lab.plan import LabConfig
from stack.lab.supervisor import LabError, last_words
from tests.bench import bench_soak_judge as judge
from tests.bench.bench_soak_faults import LIMITED_TO, Scene, limited, schedule
from tests.bench.bench_soak_judge import BOUNDS, Check, Flat
from tests.bench.bench_soak_liveness import measure, of_liveness, verdict
from tests.bench.bench_soak_load import Load
from tests.support import memory

OURS = ("gateway", "sidecar", "board")
OF_THE_KERNEL = ("memory, MiB", "descriptors", "threads")
# the board has no figures of its own
TASKS = {"gateway": ("gateway-metrics", gateway.TASKS), "sidecar": ("sidecar", sidecar.TASKS)}
SHORTEST_S = 120.0
SETTLED_WITHIN_S, STARTED_WITHIN_S = 900.0, 900.0
TRACEBACK = "Traceback (most recent call last)"
# What was asked for here may keep these firing when all is over: they look back far. Alert -> why.
_STOOD_STILL = "the engine was stopped again and again, and the machine may be busy: speed is not judged here"
EXPECTED: dict[str, str] = {
    "VLLMWatchdog": "it always fires",
    "VLLMRequestLogUnwritable": "the log could not be written for some seconds, and it looks back five minutes",
    "VLLMClientHangupsRising": "one client in seven hangs up",
    "VLLMGatewayRejecting": "keys that nobody has, and crowds",
    "VLLMAnswersCutOff": "answers of 8 to 64 tokens, and a random model seldom ends by itself",
    **dict.fromkeys(
        (
            "VLLMTTFTBudgetBurn",
            "VLLMTTFTBudgetSlowBurn",
            "VLLMInterTokenBudgetBurn",
            "VLLMInterTokenBudgetSlowBurn",
            "VLLMTTFTHigh",
            "VLLMInterTokenLatencyHigh",
            "VLLMQueueTimeHigh",
        ),
        _STOOD_STILL,
    ),
}


@dataclass(frozen=True, slots=True)
class Life:
    """One process from its start to its end: (second, figures) each time it was looked at. A figure may be missing from
    a look."""

    pid: int
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def lasted_s(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]

    def flat(self, figure: str) -> Flat | None:
        return judge.flat([(at, found[figure]) for at, found in self.samples if figure in found], BOUNDS[figure])


def figures(pid: int) -> dict[str, float]:
    """Memory, descriptors and threads of a process, those of its children included. Raises OSError when it is gone.

    Memory is what it took itself, in RAM or swapped out. RSS beside it has pages of files too, which the kernel takes
    and gives back as it likes."""
    found = dict.fromkeys((*OF_THE_KERNEL, "RSS, MiB"), 0.0)
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(OSError) if one != pid else contextlib.nullcontext():
            found["RSS, MiB"] += memory.mib(one, memory.RESIDENT)
            found["memory, MiB"] += memory.mib(one)
            found["threads"] += len(os.listdir(f"/proc/{one}/task"))
            found["descriptors"] += len(os.listdir(f"/proc/{one}/fd"))
    return found


@dataclass(slots=True)
class Soak:
    """One soak. lives: by process, each life it had."""

    lab: DrillLab
    for_s: float
    rng: random.Random
    load: Load
    began: float = field(default_factory=time.monotonic)
    lives: dict[str, list[Life]] = field(default_factory=dict)
    done: list[tuple[float, str, float]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began

    # ---- while it lasts

    async def watch(self, every_s: float) -> None:
        """Look at every process, until cancelled."""
        while True:
            for name, running in list(self.lab.supervisor.running.items()):  # others start and end meanwhile
                with contextlib.suppress(OSError):
                    self._saw(name, running.process.pid, figures(running.process.pid) | await self._tasks(name))
            await asyncio.sleep(every_s)

    async def _tasks(self, name: str) -> dict[str, float]:
        """Of its event loop, where it tells: nothing of who has no figures, or does not answer now."""
        if name in TASKS:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, BadExposition):
                where, metric = TASKS[name]
                shown = (await self.page(where)).total(metric.name)
                return {} if shown is None else {"tasks": shown}
        return {}

    def _saw(self, name: str, pid: int, found: dict[str, float]) -> None:
        lives = self.lives.setdefault(name, [])
        if not lives or lives[-1].pid != pid:
            lives.append(Life(pid))
        lives[-1].samples.append((self.now_s, found))

    async def read_boards(self) -> None:
        """Somebody who looks from panel to panel, until cancelled.

        At so much of the past as there is when judging begins: what grows with how much there is to draw is no leak."""
        base, past = self.lab.url("board"), {"from": f"now-{judge.warm_up_s(self.for_s):.0f}s"}
        refs = [PanelRef(board.slug, panel.slug) for board in BOARDS for panel in board.panels]
        paths = [f"/api/panel/{ref.uid}/{ref.panel_id}" for ref in refs] + sorted({f"/d/{ref.uid}" for ref in refs})
        paths += ["/runbooks", "/runbooks/VLLMEngineDown"]
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.lab.session.get(base + self.rng.choice(paths), params=past) as response:
                    await response.read()
                    if response.status >= 500 and response.status != 502:  # 502: Prometheus is away
                        self.trouble.append(f"the board answered {response.status} to {response.url.path}")
            await asyncio.sleep(1.0)

    async def hurt(self, every_s: float) -> None:
        """All that the schedule holds, one after the other."""
        things = Scene(self.lab, self.load, self.rng, self._archive, answers)
        for at, fault in schedule(self.for_s, every_s, self.rng):
            await asyncio.sleep(max(0.0, at - self.now_s))
            began = self.now_s
            try:
                await fault(things)
            except OSError as error:
                self.trouble.append(f"{fault.__name__}: {error}")
            self.done.append((began, fault.__name__, self.now_s - began))
            self.lab.tell(f"{fault.__name__.replace('_', ' ')}; {len(self.load.sent)} requests sent")
        await asyncio.sleep(max(0.0, self.for_s - self.now_s))

    def _archive(self, name: str) -> None:
        """The next process of that name writes its log anew."""
        log = self.lab.config.folder / "logs" / f"{name}.log"
        log.rename(log.with_name(f"{name}.{len(self.lives.get(name, ()))}.{len(self.done)}.log"))

    # ---- when it is over

    async def page(self, name: str) -> Exposition:
        async with self.lab.session.get(f"{self.lab.url(name)}/metrics") as response:
            return exposition_parser.parse(await response.text())

    async def settled(self) -> bool:
        """Until the sidecar has counted every line, and has compared a look that was made from now on with all that the
        log could say about it.

        The lines are read anew each time: the last one may come after the answer that it is about."""
        since = time.time()

        async def sure() -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                shown = await self.page("sidecar")
                compared = (shown.total(reconciled.SETTLED.name) or 0) > since and not any(
                    shown.total(reconciled.OPEN.name, kind=kind) for kind in judge.KINDS
                )
                return compared and shown.total(sidecar.LOG_LINES.name) == len(self.records()[0])
            return False

        return bool(await until(sure, SETTLED_WITHIN_S, 1.0))

    def records(self) -> tuple[list[RequestRecord], int]:
        """Every line of the log and of what was rotated away, and how many lines are none."""
        log = self.lab.config.requests_log
        found, bad = parse_block(b"".join(path.read_bytes() for path in sorted(log.parent.glob(f"{log.name}*"))))
        return found, len(bad)

    async def verdict(self) -> list[Check]:
        settled = await self.settled()
        records, bad = self.records()
        shown, gate, engine = [await self.page(name) for name in ("sidecar", "gateway-metrics", "vllm")]
        return [
            *self._leaks(),
            *self._lines(records, bad),
            Check(
                "sidecar has compared everything",
                "yes" if settled else "no",
                f"within {SETTLED_WITHIN_S:.0f} s",
                settled,
            ),
            *_counted(judge.in_the_log(records), shown, gate),
            *judge.reconciled(shown, sum(record.outcome == "client_abort" for record in records)),
            judge.equal(
                "engine's requests in the sidecar",
                shown.total(reconciled.ENGINE.name, kind="requests") or 0,
                engine.total(vllm.REQUEST_SUCCESS.name) or 0,
                "on the engine's own page",
            ),
            *await self._well(),
        ]

    def _leaks(self) -> Iterable[Check]:
        for name in OURS:
            life = max(self.lives[name], key=lambda one: one.lasted_s)
            for figure in BOUNDS if name in TASKS else OF_THE_KERNEL:
                found = life.flat(figure)
                if found is None:
                    missing = figure not in OF_THE_KERNEL and life.flat(OF_THE_KERNEL[0]) is not None
                    yield Check(
                        f"{name}: {figure}", "never shown" if missing else "too short to judge", "", not missing
                    )
                    continue
                told = f"{found.median:.1f}, {found.per_hour:+.2f} an hour, last third {found.later:+.2f}"
                yield Check(
                    f"{name}: {figure}", told, f"growth {found.allowed:.1f} in {life.lasted_s / 60:.0f} min", found.well
                )

    def _lines(self, records: Sequence[RequestRecord], bad: int) -> Iterable[Check]:
        books = judge.accounts(self.load.sent, records)
        for what, ids in (("requests without a line", books.lost), ("requests with several", books.twice)):
            told = (
                ", ".join(f"{one} ({self.load.sent.get(one, 'not ours')})" for one in ids[:5])
                or f"none of {books.sent:,}"
            )
            yield Check(what, f"{len(ids)}: {told}" if ids else told, "none", not ids)
        yield Check("lines that are no record", str(bad), "0", bad == 0)
        yield Check("lines of garbage", str(books.strange), "no id of ours; for information", True)

    async def _well(self) -> Iterable[Check]:
        firing = await until(lambda: headlines.firing(self.lab.url("alertmanager")), 60)
        await self.lab.supervisor.look()
        down = [name for name, running in self.lab.supervisor.running.items() if not running.healthy]
        found = {
            path.name: path.read_text(errors="replace").count(TRACEBACK)
            for path in sorted((self.lab.config.folder / "logs").glob("*.log"))
        }
        mine = {name: count for name, count in found.items() if count and name.split(".")[0] in OURS}
        others = {name: count for name, count in found.items() if count and name.split(".")[0] not in OURS}
        return [
            judge.left_firing(firing or ["Alertmanager does not answer"], EXPECTED),
            Check("processes that do not answer", ", ".join(down) or "none", "none", not down),
            Check("tracebacks of ours", _told(mine), "none", not mine),
            Check("tracebacks of others", _told(others), "for information", True),
            Check("other trouble", "; ".join(self.trouble[:5]) or "none", "none", not self.trouble),
        ]


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"


def _counted(log: Mapping[str, int], shown: Exposition, gate: Exposition) -> Iterable[Check]:
    """log: what it holds."""
    yield judge.equal(
        "requests in the sidecar", shown.total(sidecar.REQUESTS.name) or 0, log["requests"], "the lines of the log"
    )
    for kind in ("prompt", "completion"):
        yield judge.equal(
            f"{kind} tokens in the sidecar",
            shown.total(sidecar.TOKENS.name, type=kind) or 0,
            log[kind],
            "those of the log",
        )
    yield judge.equal(
        "requests in the gateway's counters",
        gate.total(gateway.REQUESTS.name) or 0,
        log["requests"],
        "the lines of the log",
    )
    for metric in (gateway.LOG_LOST, gateway.LOG_WAITING, gateway.INFLIGHT, gateway.RUNNING, gateway.WAITING):
        yield judge.equal(
            f"gateway: {metric.name.removeprefix('vllm_watch_gateway_')}",
            gate.total(metric.name) or 0,
            0,
            "when nobody asks any more",
        )
    for metric in (sidecar.LOG_BAD_LINES, sidecar.LOG_DUPLICATES):
        yield judge.equal(
            f"sidecar: {metric.name.removeprefix('vllm_watch_')}",
            shown.total(metric.name) or 0,
            0,
            "as no line is bad or comes twice",
        )


# ---- the whole of it


@contextlib.asynccontextmanager
async def running(config: LabConfig, tell: Any) -> AsyncIterator[DrillLab]:
    """The lab as `make lab` starts it, with a team that may have little under way."""
    async with drill_lab.running(config, tell) as lab:
        limited(config.folder / "teams.yaml", LIMITED_TO)
        every = [process.name for process in plan.processes(config)]  # Prometheus last, as in the lab
        for together in (every[:-1], every[-1:]):
            for name in together:
                await lab.launch(name)
            for name in together:
                await answers(lab, name)
        tell("every process answers")
        yield lab


async def answers(lab: DrillLab, name: str) -> None:
    """Until a process answers, also on a machine that is busy with other things. Raises LabError."""
    if not await until(lambda: _healthy(lab, name), STARTED_WITHIN_S):
        await lab.answers(name)  # which says why it did not


async def _healthy(lab: DrillLab, name: str) -> bool:
    await lab.supervisor.look()
    running = lab.supervisor.running[name]
    if running.exited is not None:
        raise LabError(f"{name} {running.state}; its last words: {last_words(running.log)}")
    return running.healthy


async def soak(config: LabConfig, for_s: float, seed: int, console: Console) -> tuple[Soak, list[Check]]:
    began = time.monotonic()
    stop_on_signal()
    rng = random.Random(seed)
    async with running(
        config,
        lambda text: console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False, soft_wrap=True),
    ) as lab:
        load = Load(lab.url("gateway"), lab.keys, random.Random(seed + 1))
        found = Soak(lab, for_s, rng, load)
        if not await until(lambda: _first_look(found), 60):
            raise LabError("the sidecar has not looked at the engine within a minute")
        async with meanwhile(found.watch(max(2.0, for_s / 720)), found.read_boards()):
            found.began = time.monotonic()
            sending = asyncio.create_task(load.run())
            try:
                await _both(found.hurt(min(30.0, max(8.0, for_s / 40))), sending)
                quiet_s = min(330.0, max(30.0, for_s / 10))
                lab.tell(f"all faults are over; {quiet_s:.0f} s of load in peace")
                await asyncio.sleep(quiet_s)
                load.stopping = True
                await sending
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        lab.tell(f"{len(load.sent)} requests are over; waiting until log and engine are compared")
        return found, await found.verdict()


async def liveness(config: LabConfig, for_s: float, restarts: int, seed: int, console: Console) -> list[Check]:
    """Watch the state of a healthy engine. for_s: of the mixed load alone."""
    began = time.monotonic()
    stop_on_signal()
    async with running(
        of_liveness(config),
        lambda text: console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False, soft_wrap=True),
    ) as lab:
        load = Load(lab.url("gateway"), lab.keys, random.Random(seed), pace_s=2.0)
        watch = await measure(lab, load, for_s, restarts)
        return await verdict(watch, (config.folder / "logs" / "gateway.log").read_text(errors="replace"))


async def _first_look(found: Soak) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        return bool((await found.page("sidecar")).total(sidecar.SOURCE_UP.name, kind="engine"))
    return False


async def _both(work: Coroutine[Any, Any, None], sending: asyncio.Task[None]) -> None:
    """The work, unless the load ends before it: that would be a defect of the load, and is raised."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task, sending), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            sending.result()
            raise AssertionError("the load ended by itself")
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def table(checks: Sequence[Check]) -> str:
    rows = (
        f"| {check.what} | {check.found} | {check.allowed} | {'ok' if check.well else '**FAILED**'} |"
        for check in checks
    )
    return "\n".join(("\n| | found | allowed | |\n|---|---|---|---|", *rows))


def report(found: Soak, checks: Sequence[Check]) -> str:
    ends = ", ".join(f"{kind} {end}: {count}" for (kind, end), count in sorted(found.load.ends.items()))
    times = {
        name: sum(1 for _, done, _ in found.done if done == name)
        for name in sorted({name for _, name, _ in found.done})
    }
    lines = [
        f"\n{found.for_s / 60:.0f} min, {len(found.load.sent):,} requests, {len(found.done)} faults",
        f"requests, by kind and end: {ends}",
        f"faults: {', '.join(f'{name} {count}' for name, count in times.items())}",
        table(checks),
        "\nFor information, in the longest life of each:\n",
        (
            "| process | memory, MiB: median, first to last | RSS, MiB | descriptors | threads | tasks"
            " |\n|---|---|---|---|---|---|"
        ),
        *(_life(name, max(lives, key=lambda one: one.lasted_s)) for name, lives in sorted(found.lives.items())),
    ]
    return "\n".join(lines)


def _life(name: str, life: Life) -> str:
    middle = {
        figure: statistics.median(seen[figure] for _, seen in life.samples) for figure in (*OF_THE_KERNEL, "RSS, MiB")
    }
    tasks = [seen["tasks"] for _, seen in life.samples if "tasks" in seen]
    told = f"{statistics.median(tasks):.0f}" if tasks else ""
    first, last = life.samples[0][1], life.samples[-1][1]
    memory = f"{middle['memory, MiB']:.0f}, {first['memory, MiB']:.0f} to {last['memory, MiB']:.0f}"
    return (
        f"| {name} | {memory} | {middle['RSS, MiB']:.0f} | {middle['descriptors']:.0f} | {middle['threads']:.0f} |"
        f" {told} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--for",
        dest="for_s",
        type=parse_duration,
        default=3600.0,
        metavar="TIME",
        help="how long things go wrong; shipped: 1h",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of the load")
    parser.add_argument(
        "--port-offset", type=int, default=3000, metavar="N", help="added to every port of the lab; shipped: 3000"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict and every sample there as well")
    parser.add_argument(
        "--liveness", action="store_true", help="judge instead that a healthy engine is never called hung"
    )
    parser.add_argument("--restarts", type=int, default=20, metavar="N", help="of --liveness; shipped: 20")
    options = parser.parse_args(arguments)
    if options.for_s < SHORTEST_S:
        parser.error(f"--for {options.for_s:.0f}s is too short to see a leak; take {SHORTEST_S:.0f}s or more")
    console = Console(stderr=True)
    folder = install.cache_dir() / f"soak-{options.port_offset}"
    try:
        up.refuse_platform()
        with up.locked(folder):
            _emptied(folder)
            config = up.configured(folder, None, options.port_offset, console)
            if options.liveness:
                checks = asyncio.run(liveness(config, options.for_s, options.restarts, options.seed, console))
                print(table(checks))
                return 0 if all(check.well for check in checks) else 1
            found, checks = asyncio.run(soak(config, options.for_s, options.seed, console))
    except (LabError, install.PartMissing) as error:
        console.print(f"[red]soak:[/red] {error}", soft_wrap=True, highlight=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("soak: stopped; nothing was left running")
        return 130
    print(report(found, checks))
    failed = [check for check in checks if not check.well]
    if options.json:
        lives = {name: [asdict(life) for life in those] for name, those in found.lives.items()}
        told = {
            "passed": not failed,
            "checks": [asdict(check) for check in checks],
            "faults": found.done,
            "lives": lives,
        }
        options.json.write_text(json.dumps(told, indent=1))
    told = "; ".join(check.what for check in failed) or "nothing leaked, nothing was lost"
    print(f"\nsoak: {told}   (logs: {folder / 'logs'})")
    return 1 if failed else 0


def _emptied(folder: Path) -> None:
    """What the last soak left behind is of no use to this one."""
    for path in folder.iterdir():
        if path.name == "lock":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    sys.exit(main())
