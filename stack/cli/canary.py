"""`vllm-watch canary`: options, and the loop around the controller."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import click

from stack.canary import watch
from stack.canary.controller import CanaryController, Guard, Outside, new_state
from stack.canary.guards import BURN_EVERY_S, GOLDEN_EVERY_S, BackgroundGuard, BudgetQuery, GoldenQuery, RotationGuard
from stack.canary.state import CanaryState, held_state, read_state, write_state
from stack.canary.teams_file import TeamsFile, read_teams
from stack.cli.common import UsageMistake, log_to_stderr, mistakes_as_errors
from stack.cli.events import EventLogOptions, log_of
from stack.cli.options import PROMETHEUS_URL
from stack.cli.struct_options import options_of
from stack.gateway.config import read_key
from stack.option import Opt

LOOK_S = 1.0
WATCH_S = 15.0
RELOAD_WITHIN_S = 60.0
WATCHING = "watching"  # of a state before its first run


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """Options of `vllm-watch canary`."""

    logs: Annotated[tuple[Path, ...], Opt(name="--log", file=True, help="Request log of a gateway; repeatable.")] = ()
    act: Annotated[bool, Opt(help="Change canary.share in TEAMS; otherwise only advise.")] = False
    reload: Annotated[
        str | None, Opt(metavar="COMMAND", help="With --act: makes the gateways read TEAMS, such as 'kill -HUP 4711'.")
    ] = None
    gateways: Annotated[
        tuple[str, ...],
        Opt(
            name="--gateway",
            metavar="URL",
            help="Metrics address of a gateway, which reports hung engines; repeatable.",
        ),
    ] = ()
    prometheus: Annotated[
        str | None,
        Opt(metavar="URL", envvar=PROMETHEUS_URL, help="Prometheus whose alerts report a burning error budget."),
    ] = None
    golden: Annotated[
        Path | None,
        Opt(file=True, metavar="FILE", help="Baseline of golden prompts; a canary that is wrong is rolled back."),
    ] = None
    probe_log: Annotated[
        Path | None,
        Opt(file=True, metavar="FILE", help="With --golden: append a record of each request, for the sidecar."),
    ] = None
    watch: Annotated[bool, Opt(help="Wait for a new version or configuration of the canary, each time.")] = False
    state: Annotated[
        Path | None, Opt(file=True, help="State of the run.  [default: canary-state.json beside TEAMS]")
    ] = None
    report: Annotated[
        Path | None, Opt(file=True, help="Report page at the end.  [default: canary-report.html beside TEAMS]")
    ] = None
    events: EventLogOptions = field(default_factory=EventLogOptions)

    def __post_init__(self) -> None:
        if not self.logs:
            raise ValueError("name the request log with --log; it is requests_log in gateway.yaml")
        if missing := next((path for path in self.logs if not path.exists()), None):
            raise ValueError(f"{missing} does not exist; --log is requests_log in gateway.yaml")
        if self.act != (self.reload is not None):
            raise ValueError("--act and --reload COMMAND go together: a share counts when the gateways have read it")
        if self.probe_log and not self.golden:
            raise ValueError("--probe-log goes with --golden, whose requests it records")
        for url in self.gateways:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                shown = url.rpartition("@")[2]
                raise ValueError(f"--gateway {shown!r} is no address; write it like http://127.0.0.1:8010")


@click.command("canary")
@click.argument("teams", type=click.Path(path_type=Path, dir_okay=False))
@options_of(CanaryOptions, "asked")
def canary_command(teams: Path, asked: CanaryOptions) -> None:
    """Compare a canary with other engines; raise or stop it.

    TEAMS is teams.yaml with `canary`: the variant, its share and the steps; see docs/guides/canary.md. Runs until the
    canary is better, worse, equivalent or out of time, and continues after a restart. Each act is a tuning event.
    Without --act it only advises.

    Exit 0 when the canary is good, 3 when it was rolled back, 4 when it is undecided or was interrupted.

    \b
    Example:  vllm-watch canary teams.yaml --log requests.jsonl --gateway http://127.0.0.1:8010 --events events.jsonl
    """
    log_to_stderr()
    with mistakes_as_errors():
        teams = teams.absolute()  # not where a link leads to: a mounted secret becomes another file
        place = asked.state or teams.with_name("canary-state.json")
        page = asked.report or teams.with_name("canary-report.html")
        if not os.access(page.parent, os.W_OK):
            raise UsageMistake(f"{page} cannot be written; name another file with --report")
        file = read_teams(teams)
        _outside(asked, file, place, page)  # mistakes in options, before anything is written
        with held_state(place):
            state = read_state(place, teams, file.canary.variant)
            while True:
                if asked.watch and (state is None or state.done is not None):
                    state = _until_changed(place, teams, state)
                elif state is None or state.done == WATCHING:
                    state = new_state(file, time.time())
                controller = CanaryController(_outside(asked, read_teams(teams), place, page), state)
                while not controller.look():
                    time.sleep(LOOK_S)
                if not asked.watch:
                    break
    click.echo(f"{state.steps[-1].action.replace('_', ' ')}: {state.steps[-1].why}; see {page}")
    if state.done is not None and state.done != "promote":
        raise SystemExit(3 if state.done == "roll_back" else 4)


def _outside(asked: CanaryOptions, file: TeamsFile, place: Path, page: Path) -> Outside:
    return Outside(
        teams=file.path, logs=asked.logs, state=place, report=page,
        events=log_of(asked.events), clock=time.time, steady=time.monotonic,
        reload=_reloader(asked.reload), guards=tuple(_guards(asked, file)),
    )  # fmt: skip


def _reloader(command: str | None) -> Callable[[], None] | None:
    if command is None:
        return None
    words = shlex.split(command)

    def reload() -> None:
        try:
            subprocess.run(words, check=True, timeout=RELOAD_WITHIN_S, stdin=subprocess.DEVNULL)
        except (subprocess.SubprocessError, OSError) as error:
            raise OSError(f"--reload {command!r} failed: {error}") from error

    return reload


def _guards(asked: CanaryOptions, file: TeamsFile) -> Iterator[Guard]:
    if asked.gateways:
        yield RotationGuard(asked.gateways, tuple(file.engines))
    if asked.prometheus:
        from exporters.net.prometheus import address

        yield BackgroundGuard(BudgetQuery(address(asked.prometheus), file.models), BURN_EVERY_S, time.monotonic)
    if asked.golden:
        from stack.golden.baseline import load

        query = GoldenQuery(load(asked.golden), _access(file), asked.probe_log)
        yield BackgroundGuard(query, GOLDEN_EVERY_S, time.monotonic)


def _access(file: TeamsFile) -> dict[str, tuple[str, str | None]]:
    """Return URL and key of the canary's engines, by name."""
    paths = {name: file.policy.upstreams[name].key_file for name in file.engines}
    keys = {name: read_key(Path(path), f"upstreams.{name}.key_file") for name, path in paths.items() if path}
    return {name: (url, keys.get(name)) for name, url in file.engines.items()}


def _until_changed(place: Path, teams: Path, state: CanaryState | None) -> CanaryState:
    """Return the state of a new run, once an engine of the canary has another version or configuration."""
    if state is None:
        state = new_state(read_teams(teams), time.time())
        state.done = WATCHING
    while True:
        engines, changed = watch.look(state.engines, read_teams(teams).engines.values())
        if engines != state.engines:
            state.engines = engines
            if not changed:
                write_state(place, state)
        if changed:
            started = new_state(read_teams(teams), time.time())
            started.engines = engines
            write_state(place, started)
            return started
        time.sleep(WATCH_S)
