"""`vllm-watch drill`: run drills one after the other, and print the table of results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from alerts import registry
from exporters.net.alertmanager import Firing
from runbooks import page as runbook_page
from stack.drill import lab as drill_lab
from stack.drill.drills import DRILLS, WHY_NOT, Drill
from stack.drill.lab import DrillLab, until
from stack.drill.traffic import every, good, meanwhile
from stack.lab import install, up
from stack.lab.plan import LabConfig
from stack.lab.supervisor import LabError
from stack.terminal import output_width

_QUIET_WITHIN_S = 30.0  # what the drill before left at Alertmanager ends with its last message


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """Outcome of one drill. Seconds since the fault went in, and since it was taken away; None for what was not seen.

    trouble: why this is no success; empty for one. labels: the alert's, as it arrived."""

    alert: str
    what: str
    engine: str
    fired_s: float | None = None
    resolved_s: float | None = None
    runbook: str | None = None
    trouble: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def command(drills: tuple[Drill, ...], port_offset: int, as_json: bool) -> int:
    """Run drills and print what came of them; the exit status: 0 well, 1 not."""
    try:
        outcomes = run(drills, port_offset, Console(stderr=True))
    except (LabError, install.PartMissing) as error:
        Console(stderr=True).print(f"[red]drill:[/red] {error}", soft_wrap=True, highlight=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        Console(stderr=True).print("drill: stopped; nothing was left running")
        return 130
    failed = [outcome for outcome in outcomes if outcome.trouble]
    console = Console(width=output_width(160), soft_wrap=not sys.stdout.isatty(), highlight=False)
    if as_json:
        console.print_json(json.dumps({"passed": not failed, "drills": [asdict(outcome) for outcome in outcomes]}))
        return 1 if failed else 0
    console.print(table(outcomes, plain=not console.is_terminal))
    for outcome in failed:
        console.print(f"{outcome.alert}: {outcome.trouble}", markup=False)
    if len(outcomes) == 1:
        console.print("\n".join(first_lines(outcomes[0])), markup=False)
    return 1 if failed else 0


def run(drills: Iterable[Drill], port_offset: int, console: Console) -> list[DrillOutcome]:
    """Run drills, engine by engine; console gets what happens meanwhile. Raises LabError and PartMissing when there is
    no lab to run them in."""
    up.refuse_platform()
    folder = install.cache_dir() / f"drill-{port_offset}"
    with up.locked(folder):
        config = drill_lab.drilled(up.configured(folder, None, port_offset, console))
        return asyncio.run(
            _run(config, tuple(drills), lambda line: console.print(line, highlight=False, soft_wrap=True))
        )


async def _run(config: LabConfig, drills: tuple[Drill, ...], tell: Callable[[str], None]) -> list[DrillOutcome]:
    outcomes: list[DrillOutcome] = []
    began = time.monotonic()
    stop_on_signal()
    async with drill_lab.running(config, lambda line: tell(f"{time.monotonic() - began:5.0f} s  {line}")) as lab:
        # an engine takes half a minute to start
        for drill in sorted(drills, key=lambda drill: list(drill_lab.DrillEngine).index(drill.engine)):
            try:
                await lab.with_engine(drill.engine)
                lab.tell(f"{drill.alert}: {drill.what}")
                outcomes.append(await _drilled(lab, drill))
            except LabError as error:
                outcomes.append(DrillOutcome(drill.alert, drill.what, str(drill.engine), trouble=str(error)))
            lab.tell(_told(outcomes[-1]))
    return outcomes


def stop_on_signal() -> None:
    """Once; a second Ctrl-C must not cut short what takes the fault away. Also where a shell has started us with SIGINT
    ignored."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  # we are inside of one

    def stop() -> None:
        if not task.cancelling():
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def _drilled(lab: DrillLab, drill: Drill) -> DrillOutcome:
    """One drill from a Prometheus without memories on. Every wait has an end."""
    await lab.begin_anew(drill.pace)
    outcome = partial(DrillOutcome, drill.alert, drill.what, str(drill.engine))
    if drill.always:
        return await _silenced(lab, drill, outcome)
    if not await until(partial(lab.gone, drill.alert), _QUIET_WITHIN_S):
        return outcome(trouble=f"it fires already, before anything was done: {await _seen(lab, drill)}")
    async with meanwhile(every(0.4, partial(good, lab))) if drill.users else contextlib.nullcontext():
        trouble = ""
        lab.breaks_now()
        async with drill.fault(lab):
            alert = await until(partial(_fires, lab, drill), drill.fires_within_s)
            fired_s = time.monotonic() - lab.broken_at if alert else None
            if not alert:
                trouble = f"it did not fire within {drill.fires_within_s:.0f} s: {await _seen(lab, drill)}"
            ended = time.monotonic()
        if drill.seen_at_prometheus and alert:
            alert = await until(partial(lab.arrived, drill.alert), drill.fires_within_s)
            trouble = "" if alert else "it fired at Prometheus and did not reach Alertmanager when that was back"
        gone = await until(partial(lab.gone, drill.alert), drill.resolves_within_s)
        resolved_s = time.monotonic() - ended if gone and alert else None
        if not gone and not trouble:
            trouble = f"it did not resolve within {drill.resolves_within_s:.0f} s: {await _seen(lab, drill)}"
    return outcome(fired_s, resolved_s, *_arrived(alert, trouble))


async def _fires(lab: DrillLab, drill: Drill) -> Any:
    return await lab.state(drill.alert) == "firing" if drill.seen_at_prometheus else await lab.arrived(drill.alert)


async def _silenced(lab: DrillLab, drill: Drill, outcome: Callable[..., DrillOutcome]) -> DrillOutcome:
    """For the alert that always fires: it is there, it falls silent with what carries it, and it comes again."""

    async def silent() -> bool:
        return await lab.arrived(drill.alert) is None

    began = time.monotonic()
    alert = await until(partial(lab.arrived, drill.alert), drill.fires_within_s)
    fired_s = time.monotonic() - began
    if not alert:
        return outcome(trouble=f"it did not fire: {await _seen(lab, drill)}")
    ended = time.monotonic()
    async with drill.fault(lab):
        fell_silent = await until(silent, drill.resolves_within_s)
        resolved_s = time.monotonic() - ended if fell_silent else None
    back = await until(partial(lab.arrived, drill.alert), drill.fires_within_s)
    trouble = "it went on although nothing sent it" if not fell_silent else "" if back else "it did not come again"
    return outcome(fired_s, resolved_s, *_arrived(alert, trouble))


def _arrived(alert: Firing | None, trouble: str) -> tuple[str | None, str, Mapping[str, str]]:
    """The page that the link of the alert leads to, the trouble, and the alert's labels."""
    if not alert:
        return None, trouble, {}
    name = urlsplit(alert.annotations["runbook_url"]).path.rpartition("/")[2]
    if runbook_page.text(name) is None:
        return None, trouble or f"its runbook page {name} is not there", alert.labels
    return f"{name}.md", trouble, alert.labels


async def _seen(lab: DrillLab, drill: Drill) -> str:
    """Return the state of the alert in Prometheus, and the value of its expression now."""
    rule = next(alert for alert in registry.alerts(lab.config.settings) if alert.name == drill.alert)
    value = await lab.query(rule.expr)
    return (
        f"{await lab.state(drill.alert)} at Prometheus; now {'nothing' if value is None else f'{value:g}'} comes of"
        f" {rule.expr}"
    )


# ---- what is shown


def _told(outcome: DrillOutcome) -> str:
    if outcome.trouble:
        return f"{outcome.alert}: FAILED, {outcome.trouble}"
    return f"{outcome.alert}: fired after {_seconds(outcome.fired_s)}, resolved after {_seconds(outcome.resolved_s)}"


def _seconds(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.0f} s"


def table(outcomes: Iterable[DrillOutcome], plain: bool) -> Table:
    shown = Table(
        "alert",
        "fault",
        "fired after",
        "resolved after",
        "runbook",
        box=None if plain else Table().box,
        padding=(0, 2, 0, 0),
    )
    for outcome in outcomes:
        colour = "red" if outcome.trouble else "green"
        times = (_seconds(outcome.fired_s), _seconds(outcome.resolved_s))
        shown.add_row(f"[{colour}]{outcome.alert}[/{colour}]", outcome.what, *times, outcome.runbook or "none")
    return shown


def listed() -> list[dict[str, str]]:
    """Every alert with its drill, or why there is none."""
    rows = [{"alert": drill.alert, "engine": str(drill.engine), "drill": drill.what, "why_not": ""} for drill in DRILLS]
    return rows + [{"alert": alert, "engine": "", "drill": "", "why_not": why} for alert, why in WHY_NOT.items()]


def first_lines(outcome: DrillOutcome) -> Iterator[str]:
    """The beginning of the page that the alert leads to, with this alert's own labels in its commands."""
    if outcome.runbook is None:
        return
    name = outcome.runbook.removesuffix(".md")
    page = runbook_page.parse(name, runbook_page.text(name) or "").filled(outcome.labels)
    yield f"{page.title}: {page.gist}"
    for step in page.steps[:1]:
        yield f"{step.number}. {step.text}"
        yield from (f"     {line}" for block in step.blocks for line in block.text.splitlines())
    yield f"all of it: vllm-watch runbook {name}"
