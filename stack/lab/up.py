"""`vllm-watch lab up`: install, start, feed, show, stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import platform
import re
import signal
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from exporters.engine.client import EngineClient
from exporters.text import write_atomically
from stack.gateway import teams
from stack.lab import headlines, install, page, plan, supervisor, workload
from stack.lab.plan import LabConfig
from stack.lab.supervisor import LabError, Supervisor

NEEDED = ("prometheus", "alertmanager", "engine", "model")
NEEDED_BY_SEVERAL = ("valkey", "haproxy")  # gateways
SHORTEST_S = 15.0
_BEAT_S = 2.0
_READY_WITHIN_S = 120.0  # in a timed run
_TELL_EVERY_S = 10.0  # where there is no terminal to redraw


@dataclass(frozen=True, slots=True)
class Glance:
    """Result of one check of the lab. ended: processes; down: these, and what does not answer. None: Prometheus, or
    Alertmanager, does not answer."""

    down: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    scraped: Mapping[str, bool] | None = None
    values: Mapping[str, headlines.HeadlineValue | None] = field(default_factory=dict)
    alerts: list[str] | None = None


@dataclass(slots=True)
class LabTotals:
    """Totals of the lab since it was ready: enough to assess a timed run. late_s: how long a scrape or an answer may be
    missing before its target counts as down."""

    late_s: float = 0.0
    _since: dict[str, float] = field(default_factory=dict)
    down: dict[str, None] = field(default_factory=dict)
    values: dict[str, headlines.HeadlineValue] = field(default_factory=dict)
    alerts: list[str] | None = None

    def add(self, glance: Glance, now: float) -> None:
        self._since = {name: self._since.get(name, now) for name in glance.down}
        late = [name for name, since in self._since.items() if now - since >= self.late_s]
        self.down |= dict.fromkeys((*glance.ended, *late))
        self.values |= {name: value for name, value in glance.values.items() if value is not None}
        self.alerts = glance.alerts or self.alerts

    def faults(self, traffic: bool = True) -> Iterator[str]:
        """Yield the reasons why a timed run failed. Without traffic of the lab, headlines may have no value."""
        yield from (f"{name} was down" for name in self.down)
        if traffic:
            yield from (f"{h.name} never had a value" for h in headlines.HEADLINES if h.name not in self.values)
        if not self.alerts:
            yield "no alert reached Alertmanager, not even the watchdog that always fires"


def up(
    engine_url: str | None,
    for_s: float | None,
    port_offset: int,
    console: Console,
    traffic: bool = True,
    gateways: int = 1,
) -> int:
    """Run the lab until it is interrupted, or for `for_s` seconds of readiness. Return the exit status: 0 if all went
    well, else 1. traffic: the lab sends requests of its own."""
    try:
        refuse_platform()
        if for_s is not None and for_s < SHORTEST_S:
            raise LabError(f"--for {for_s:.0f}s is too short: rates need some scrapes; take {SHORTEST_S:.0f}s or more")
        if engine_url and not re.fullmatch(r"https?://[^/\s]+/?", engine_url):
            raise LabError(f"--engine {engine_url} is no server's address; write it like http://127.0.0.1:8000")
        folder = install.cache_dir() / ("lab" if not port_offset else f"lab-{port_offset}")
        with locked(folder):
            config = configured(folder, engine_url, port_offset, console, gateways)
            return asyncio.run(_up(config, for_s, console, traffic))
    except (LabError, install.PartMissing) as error:
        console.print(f"[red]lab:[/red] {error}", soft_wrap=True, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("lab: stopped before it was up; nothing was left running")
        return 130


def refuse_platform(system: str = platform.system()) -> None:
    """Raises LabError where the lab cannot run, with what does work there."""
    if system != "Linux":
        raise LabError(
            f"the lab needs Linux ({system} found): use a Debian container or virtual machine; "
            "metrics, render, sidecar and gateway commands work here"
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One lab per folder. Raises LabError when another holds it, or when there is no place to write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise LabError(
            f"{folder} cannot be written: {error.strerror}; set VLLM_WATCH_CACHE to a folder that can"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError("another lab runs already; stop it, or start this one with --port-offset 1000") from None
        yield


def configured(
    folder: Path, engine_url: str | None, port_offset: int, console: Console, gateways: int = 1
) -> LabConfig:
    began = time.monotonic()
    names = (NEEDED[:2] if engine_url else NEEDED) + (NEEDED_BY_SEVERAL if gateways > 1 else ())

    def report(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.0f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    def config() -> LabConfig:
        """With the parts that are there; those that are not yet have no path."""
        found = {name: part for name in (*names, "otelcol") if (part := install.find(name))}
        programs = dict.fromkeys(names, Path()) | {name: part.path for name, part in found.items()}
        version = found["engine"].version if "engine" in found else ""
        return LabConfig(
            folder, programs, engine_url.rstrip("/") if engine_url else None, port_offset, engine_version=version,
            gateways=gateways,
        )  # fmt: skip

    def free() -> LabConfig:
        supervisor.refuse_taken_ports(found := config(), plan.processes(found))
        return found

    free()  # reported before minutes of installing, in which another process may take one
    install.install(names, report)
    return free()


async def _up(config: LabConfig, for_s: float | None, console: Console, traffic: bool) -> int:
    """Start, show, stop: whatever happens on the way, nothing that was started here stays."""
    keys = prepare(config)
    lab = Supervisor(config.folder)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    runner = None
    try:
        async with aiohttp.ClientSession() as session:
            model = await _served_model(session, config.engine) if config.engine_url else plan.MODEL
            try:
                runner = await page.serve(lab, config.port("lab"))
            except OSError as error:
                raise LabError(f"port {config.port('lab')} cannot be used: {error.strerror}") from error
            if not await _until(_start(lab, list(plan.processes(config)), console), stopping):
                return 130
            load = workload.LabWorkload(config.url("gateway"), keys, model) if traffic else None
            sending = [asyncio.create_task(load.run())] if load else []
            try:
                return await _show(config, lab, load, stopping, for_s, console)
            finally:
                for task in sending:
                    task.cancel()
                await asyncio.gather(*sending, return_exceptions=True)
    finally:
        console.print("stopping what was started here", highlight=False)
        if runner:
            await runner.cleanup()
        await lab.stop()


def prepare(config: LabConfig) -> dict[str, str]:
    """Write the configuration and, once, one key for each team. The keys. Raises LabError when the disk does not take
    them."""
    try:
        (config.folder / "rules").mkdir(exist_ok=True)
        for name, text in plan.files(config):
            (config.folder / name).write_text(text)
        for log in (each.log for each in config.replicas):
            if log.exists():  # each lab counts its own requests; the last one's stay beside it
                log.replace(log.with_suffix(".jsonl.1"))
            log.touch()
        store, table = config.folder / "keys.json", config.folder / "teams.yaml"
        keys: dict[str, str] = json.loads(store.read_text()) if store.exists() and table.exists() else {}
        if set(keys) != set(config.teams):
            made = {team: teams.make_key(team) for team in config.teams}
            keys = {team: key for team, (key, _) in made.items()}
            write_atomically(store, json.dumps(keys, indent=1), 0o600)
            # each on a line of its own, as YAML reads it
            terms = (f"  {team}: {json.dumps(teams.first_terms(team, [key]))}\n" for team, (_, key) in made.items())
            write_atomically(table, "teams:\n" + "".join(terms), 0o600)
    except OSError as error:
        raise LabError(
            f"{config.folder} cannot be written: {error.strerror}; set VLLM_WATCH_CACHE to a folder with room"
        ) from error
    return keys


async def _served_model(session: aiohttp.ClientSession, engine: str) -> str:
    """The first model that a running engine serves. Raises LabError when it is no vLLM that we can reach."""
    try:
        return (await EngineClient(session, engine, timeout_s=5).models())[0].id
    except aiohttp.ClientResponseError as error:
        raise LabError(
            f"{engine}/v1/models answers {error.status} {error.message}; the lab sends no key, and needs one that wants"
            " none"
        ) from error
    except (aiohttp.ClientError, TimeoutError, ValueError, IndexError) as error:
        raise LabError(
            f"{engine}/v1/models does not answer like a vLLM server ({type(error).__name__}); is --engine right?"
        ) from error


async def _start(lab: Supervisor, processes: list[plan.Process], console: Console) -> None:
    """All but the last at once, then the last; until every process answers."""
    began = time.monotonic()
    with console.status("starting") as status:
        for together in (processes[:-1], processes[-1:]):
            for process in together:
                await lab.start(process)
            for process in together:
                doing = f"waiting for {process.name}" + (
                    ", which loads for half a minute or more" if process.name == "vllm" else ""
                )
                status.update(doing)
                if not console.is_terminal and process.within_s > 60:
                    console.print(f"         {doing}")
                await lab.wait_healthy(process.name)
                console.print(
                    f"[dim]{time.monotonic() - began:5.0f} s[/dim]  {process.name} answers at {process.address}",
                    highlight=False,
                )


async def _until(work: Coroutine[None, None, None], stopping: asyncio.Event) -> bool:
    """Run a coroutine unless a stop comes first; whether it ran to its end."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # what went wrong in it goes on from here
        return task.done()
    finally:
        for one in (task, stop):
            one.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


async def _show(
    config: LabConfig,
    lab: Supervisor,
    load: workload.LabWorkload | None,
    stopping: asyncio.Event,
    for_s: float | None,
    console: Console,
) -> int:
    """The status table, every two seconds, until a stop or the end of a timed run."""
    seen, ready_at, began, told_at = LabTotals(2.0 * config.beat.scrape_s), None, time.monotonic(), 0.0
    found = Glance()  # nothing yet, should the stop come first
    live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while not stopping.is_set():
            found = await _glance(config, lab)
            if ready_at is None and not found.down and found.scraped:
                ready_at = time.monotonic()
                _say_ready(config, console)
            if ready_at is not None:
                seen.add(found, time.monotonic())
            view = Group(_table(lab, found.scraped), _figures(found.values, found.alerts, load))
            if live:
                live.update(view, refresh=True)
            elif ready_at is not None and time.monotonic() - told_at >= _TELL_EVERY_S:
                told_at = time.monotonic()
                console.print(_line(found.down, found.values, found.alerts), highlight=False, soft_wrap=True)
            if for_s is not None and _long_enough(for_s, began, ready_at, found.down):
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _BEAT_S)
    if not live:
        console.print(_table(lab, found.scraped), _figures(found.values, found.alerts, load))
    if for_s is None:
        return 0
    return 130 if stopping.is_set() else _judged(seen, for_s, console, load is not None)


async def _glance(config: LabConfig, lab: Supervisor) -> Glance:
    await lab.look()
    scraped = await headlines.targets(config.url("prometheus"))
    values = await headlines.read(config.url("prometheus"))
    alerts = await headlines.firing(config.url("alertmanager"))
    ended = [name for name, running in lab.running.items() if running.exited is not None]
    return Glance(_down(config, lab, scraped), ended, scraped, values, alerts)


def _say_ready(config: LabConfig, console: Console) -> None:
    console.print("[green]ready:[/green] every process answers and every target is scraped", highlight=False)
    console.print(f"boards and runbooks: {config.url('board')}/", highlight=False)
    places = f"keys for {config.url('gateway')}: {config.folder / 'keys.json'}   logs: {config.folder / 'logs'}"
    console.print(places, highlight=False, soft_wrap=True)


def _long_enough(for_s: float, began: float, ready_at: float | None, down: list[str]) -> bool:
    """Return whether a timed run has been ready for its time. Raises LabError when it does not become ready."""
    if ready_at is not None:
        return time.monotonic() - ready_at >= for_s
    if time.monotonic() - began > _READY_WITHIN_S:
        raise LabError(
            f"not every target came up within {_READY_WITHIN_S:.0f} s:"
            f" {', '.join(down) or 'Prometheus does not answer'}"
        )
    return False


def _judged(seen: LabTotals, for_s: float, console: Console, traffic: bool) -> int:
    """Print the result of a timed run; return its exit status."""
    faults = list(seen.faults(traffic))
    measured = " and every headline measured" if traffic else "; no traffic was sent"
    console.print(
        "\n".join(f"lab: {fault}" for fault in faults) or f"lab: {for_s:.0f} s with every target up{measured}"
    )
    return 1 if faults else 0


def _down(config: LabConfig, lab: Supervisor, scraped: Mapping[str, bool] | None) -> list[str]:
    """Processes that do not answer and targets that are not scraped."""
    processes = [name for name, running in lab.running.items() if not running.healthy]
    jobs = [job for job in plan.targets(config) if not (scraped or {}).get(job, False)]
    return list(dict.fromkeys(processes + jobs))


def _table(lab: Supervisor, scraped: Mapping[str, bool] | None) -> Table:
    table = Table("process", "state", "scraped", "pid", "address", title="vllm-watch lab", title_justify="left")
    for name, running in lab.running.items():
        colour = "green" if running.healthy else "yellow" if running.exited is None else "red"
        is_scraped = scraped.get(plan.job_of(name)) if scraped else None
        state = {True: "[green]up[/green]", False: "[red]down[/red]", None: "?"}[is_scraped]
        state = "no target" if name in plan.UNSCRAPED else state
        table.add_row(
            name, f"[{colour}]{running.state}[/{colour}]", state, str(running.process.pid), running.spec.address
        )
    return table


def _figures(
    values: Mapping[str, headlines.HeadlineValue | None], alerts: list[str] | None, load: workload.LabWorkload | None
) -> Table:
    table = Table.grid(padding=(0, 2))
    for headline in headlines.HEADLINES:
        table.add_row(headline.name, f"[bold]{headline.show(values.get(headline.name))}[/bold]")
    table.add_row("alerts at Alertmanager", "does not answer" if alerts is None else ", ".join(alerts) or "none yet")
    sent = f"{load.sent} requests sent, {load.failed} not answered well" if load else "none sent; --traffic sends some"
    table.add_row("workload", f"{sent}   (Ctrl-C stops the lab)")
    return table


def _line(down: list[str], values: Mapping[str, headlines.HeadlineValue | None], alerts: list[str] | None) -> str:
    figures = "  ".join(f"{h.name} {h.show(values.get(h.name))}" for h in headlines.HEADLINES)
    return (
        f"{'down: ' + ', '.join(down) if down else 'all up'}  |  {figures}  |  alerts:"
        f" {', '.join(alerts or []) or 'none'}"
    )
