"""Experiments: one workload, two or more configurations of an engine, runs in turns, and a comparison for every load.

Invariant: off really is off. The configuration that engines report is read back and compared; variants that should
differ and do not are rejected, and what cannot be checked is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from exporters.engine.client import EngineClient
from exporters.events.log import MAX_OPTIONS, MAX_TEXT, NewEvent
from stack.bench import workload_file
from stack.bench.engine_under_test import BadTarget, Subject, look
from stack.bench.load import BenchTarget
from stack.bench.measurements import Startup, startup
from stack.bench.result import HIDDEN, STORED, Bench, BenchEngine, Start, is_secret, masked
from stack.bench.workload import METRICS, WorkloadFile
from stack.config import BadConfig, meant, read
from stack.lab import install, plan
from stack.lab.supervisor import LabError, Supervisor
from stack.tuning.comparison import HEADLINE, Comparison, metric_of, verdict_counts
from stack.tuning.run_comparison import Setting, compare_runs

END_S = 15.0  # to let go of memory and shared segments
READY_S = 900.0  # a large model takes minutes to load
INFO_S = 60.0  # the first answer of /server_info looks over the whole machine
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")  # stands in the name of a log, and in every record
# What differs between two starts of the same configuration.
_INCIDENTAL = re.compile(
    r"instance_id$|port$|_ports$|_ip$|_path$|address$|compilation_time$|num_(g|c)pu_blocks$|kv_cache_(size_tokens|max_concurrency)$"
)


class VariantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One configuration, in one of three ways. url: an engine that stands. command: how to start one, with {port} where
    its port goes, such as "vllm serve MODEL --port {port} --enable-prefix-caching". lab: arguments for the lab's own
    small engine on the CPU."""

    url: str | None = None
    command: str | tuple[str, ...] | None = None
    lab: tuple[str, ...] | None = None
    env: dict[str, str] = {}
    what: str = ""

    @property
    def argv(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command or ()


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=STORED):
    """Experiment file. workload: a file, relative to this one, or an included workload. variants: the others are
    compared with the first.

    together: all engines run side by side, else one at a time, started anew for its turn. same: the variants are alike
    on purpose, to measure noise. also: metrics to compare besides the usual, such as short:ttft_ms.p95; the more are
    compared, the stronger must each be. runs, order: default to those of the workload; interleaved runs are drawn at
    random in each round, sequential ones are compared with a caveat. only, requests, scale, model: as of
    `bench run`."""

    workload: str
    variants: dict[str, VariantConfig]
    title: str = ""
    model: str | None = None
    only: tuple[str, ...] = ()
    runs: int | None = None
    requests: int | None = None
    scale: float | None = None
    order: Literal["interleaved", "sequential"] | None = None
    together: bool | None = None
    same: bool = False
    also: tuple[str, ...] = ()

    @property
    def side_by_side(self) -> bool:
        """Return `together` of the file; by default, True if no engine has to be started."""
        return all(variant.url for variant in self.variants.values()) if self.together is None else self.together


def load(path: Path) -> tuple[Experiment, WorkloadFile]:
    """Return the experiment and its workloads. Raises BadConfig."""
    source = read(path)
    experiment = source.into(Experiment)
    for sentence in mistakes(experiment):
        raise BadConfig(source.locate(sentence))
    beside, included = path.parent / experiment.workload, workload_file.included()
    if not beside.is_file() and experiment.workload not in included:
        raise BadConfig(
            source.locate(
                f"workload: {beside} is no file, and {experiment.workload} no included"
                f" workload{meant(experiment.workload, included)}"
            )
        )
    return experiment, workload_file.load(beside if beside.is_file() else experiment.workload)


def mistakes(experiment: Experiment) -> Iterator[str]:
    """Find mistakes that types do not exclude."""
    place = STORED["variants"]
    if len(experiment.variants) < 2:
        yield f"{place}: there {'is one' if experiment.variants else 'are none'}; a comparison needs two or more"
    for name, variant in experiment.variants.items():
        if not _NAME.fullmatch(name):
            yield (
                f"{place}.{name}: {name[:60]!r} is no name; use 1 to 60 of letters, digits, . _ - and begin with a"
                " letter or digit"
            )
        yield from _variant_mistakes(f"{place}.{name}", variant)
    for key in ("runs", "requests"):
        if (given := getattr(experiment, key)) is not None and given < 1:
            yield f"{key}: {given} should be 1 or more"
    for index, figure in enumerate(experiment.also):
        if (base := figure.rpartition(":")[2].partition(".")[0]) not in METRICS:
            yield (
                f"also[{index}]: {figure} is no figure, such as ttft_ms.p95 or, of a class,"
                f" short:ttft_ms.p95{meant(base, METRICS)}"
            )


def _variant_mistakes(place: str, variant: VariantConfig) -> Iterator[str]:
    ways = [way for way in ("url", "command", "lab") if getattr(variant, way) is not None]
    if len(ways) != 1:
        yield f"{place}: {' and '.join(ways) or 'nothing'} is given; say one of url, command or lab"
    if variant.command is not None:
        yield from _command_mistakes(f"{place}.command", variant)
    if variant.url is not None and variant.env:
        yield f"{place}.env: an engine that stands already has its environment; set it where the engine is started"
    if variant.url is not None and not variant.url.startswith(("http://", "https://")):
        yield f"{place}.url: {variant.url!r} should be like http://127.0.0.1:8000"


def _command_mistakes(place: str, variant: VariantConfig) -> Iterator[str]:
    try:
        words = variant.argv
    except ValueError as error:
        yield f"{place}: it is no command line: {str(error).lower()}"
    else:
        if not any("{port}" in word for word in words):
            yield f"{place}: it has no {{port}}, which is where the port to listen on is filled in"


@dataclass(slots=True)
class Engines:
    """Engines of an experiment: given, or started for their turn and stopped after it. Enter it as a context.

    say: receives progress messages. starts: of each variant, seconds until it answered."""

    experiment: Experiment
    folder: Path
    say: Callable[[str], None]
    key: str | None = None
    starts: dict[str, list[Start]] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)
    settings: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _supervisor: Supervisor = field(init=False)
    _ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._supervisor = Supervisor(self.folder)

    async def __aenter__(self) -> Engines:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._supervisor.stop()
        except BaseException:  # a second Ctrl-C: without grace
            for running in self._supervisor.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)
            raise

    async def subject(self, variant: str) -> Subject:
        """Return the engine of a variant, running and inspected. Raises BadTarget."""
        if found := self.subjects.get(variant):
            return found
        config = self.experiment.variants[variant]
        if config.url is None and not self.experiment.side_by_side:
            for other in [name for name in self.subjects if self.experiment.variants[name].url is None]:
                await self._end(other)
        try:
            started = await self._start(variant, config) if config.url is None else Startup()
        except (LabError, install.PartMissing) as error:
            raise BadTarget(str(error)) from error
        url = config.url or f"http://127.0.0.1:{self._ports[variant]}"
        engine, _ = await look(url, self.experiment.model, self.key)
        settings = await read_settings(url, engine)
        arguments = None if config.url else tuple(self._supervisor.running[variant].spec.argv)
        self.settings[variant] = settings
        found = self.subjects[variant] = Subject(
            variant,
            BenchTarget(engine.url, engine.model, self.key),
            msgspec.structs.replace(engine, arguments=arguments),
            config.what,
            started,
        )
        return found

    async def _end(self, variant: str) -> None:
        """Terminate an engine so that it releases its resources, then end what is left of its process group."""
        process = self._supervisor.running[variant].process
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            await asyncio.wait_for(process.wait(), END_S)
        await self._supervisor.end(variant)
        del self.subjects[variant]

    async def _start(self, variant: str, config: VariantConfig) -> Startup:
        # each time: meanwhile the one before may be that of a connection to another variant's engine
        self._ports[variant] = port = _free_port()
        spec = _process(variant, config, self.folder, port)
        shown = shlex.join(masked(spec.argv) if config.lab is None else ("lab", *config.lab))
        self.say(f"starting {variant}: {shown}")
        began = time.monotonic()
        await self._supervisor.start(spec)
        await self._supervisor.wait_healthy(variant)
        seconds = time.monotonic() - began
        before = self.starts.setdefault(variant, [])
        before.append(Start("warm" if before else "cold", round(seconds, 2)))
        self.say(f"{variant} answers after {seconds:.0f} s")
        return startup(self._supervisor.running[variant].log.read_text(errors="replace"))


def _process(variant: str, config: VariantConfig, folder: Path, port: int) -> plan.Process:
    """Return the process of a variant. It exposes its configuration, which is safe because nobody else reaches its
    port."""
    env = {"VLLM_SERVER_DEV_MODE": "1", **config.env}
    if config.lab is not None:
        found = install.install(("engine", "model"), lambda _: None)
        programs, version = {name: part.path for name, part in found.items()}, found["engine"].version
        lab = plan.LabConfig(
            folder, programs, port_offset=port - plan.PORTS["vllm"], args={"vllm": config.lab}, engine_version=version
        )
        spec = next(process for process in plan.processes(lab) if process.name == "vllm")
        return plan.Process(variant, spec.argv, spec.address, spec.health, (), {**spec.env, **env}, READY_S)
    url = f"http://127.0.0.1:{port}"
    return plan.Process(
        variant,
        tuple(word.replace("{port}", str(port)) for word in config.argv),
        url,
        f"{url}/health",
        (),
        env,
        READY_S,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def read_settings(url: str, engine: BenchEngine) -> Mapping[str, str]:
    """Return the configuration that an engine reports, flat: all of it in development mode, else the labels of its
    /metrics endpoint."""
    cache = {f"cache_config.{name}": value for name, value in engine.cache.items()} | (
        {"version": engine.version} if engine.version else {}
    )
    async with aiohttp.ClientSession() as session:
        config = (await EngineClient(session, url, INFO_S).server_info()).get("vllm_config")
    return dict(_flat("", config)) | cache if isinstance(config, dict) else cache


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, str(value)


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return the settings in which two engines differ, except those that differ at every start."""
    names = sorted({*a, *b})
    return {
        name: (a.get(name), b.get(name))
        for name in names
        if a.get(name) != b.get(name) and not _INCIDENTAL.search(name)
    }


def caveats(experiment: Experiment, engines: Engines) -> Iterator[str]:
    """Report what could not be controlled. Raises BadConfig where variants that should differ report the same
    settings."""
    first, *others = experiment.variants
    for other in others:
        yield from _caveats_of_pair(experiment, engines, first, other)
    if not experiment.side_by_side:
        yield "each variant's engine was started anew for its turns, so this says nothing of a long-running one"
    elif not all(variant.url for variant in experiment.variants.values()):
        yield "all engines stood on this machine at once: they took turns, but shared its memory"


def _caveats_of_pair(experiment: Experiment, engines: Engines, first: str, other: str) -> Iterator[str]:
    a, b = experiment.variants[first], experiment.variants[other]
    complete = all("model_config.model" in engines.settings[name] for name in (first, other))
    changed = differences(engines.settings[first], engines.settings[other])
    if not complete:  # a setting that only one of them reports is no difference
        changed = {name: pair for name, pair in changed.items() if None not in pair}
    if changed:
        yield f"{first} -> {other}, as the engines report it: {_changes_text(changed)}"
    elif not experiment.same:
        if complete and a.env == b.env:
            raise BadConfig(
                f"{first} and {other} report the same configuration, so there is nothing to compare; change the"
                " configuration of one, or write `same: true` to compare equal variants"
            )
        yield (
            f"{first} and {other} report the same configuration; their environments differ, which an engine does not"
            " report"
            if complete
            else f"{first} and {other} report the same cache configuration and no other settings, so the difference"
            " between them is not verified"
        )
    if a.url and b.url and a.url.rstrip("/") == b.url.rstrip("/") and not experiment.same:
        raise BadConfig(f"variants {first} and {other} are the same engine ({a.url}); `same: true` if meant")


def _changes_text(changed: Mapping[str, tuple[str | None, str | None]], most: int = 6) -> str:
    """Return the first changes as `name old -> new`, secrets hidden, and the number of the rest."""
    shown = [
        f"{name} {HIDDEN}" if is_secret(name) else f"{name} {old} -> {new}"
        for name, (old, new) in list(changed.items())[:most]
    ]
    rest = f" and {len(changed) - most} more" if len(changed) > most else ""
    return ", ".join(shown) + rest


def compare(experiment: Experiment, bench: Bench) -> list[Comparison]:
    """Compare each other variant with the first, for every load that both have runs of."""
    first, *others = experiment.variants
    found = []
    for other in others:
        for name, point in dict.fromkeys((each.workload, each.point) for each in bench.runs):
            a, b = (
                [each for each in bench.runs if (each.variant, each.workload, each.point) == (variant, name, point)]
                for variant in (first, other)
            )
            if a and b:
                urls = {(experiment.variants[variant].url or variant).rstrip("/") for variant in (first, other)}
                setting = Setting(shared_engine=len(urls) == 1, repeated=repeats(bench, name))
                metrics = (*HEADLINE, *map(metric_of, experiment.also))
                found.append(compare_runs(a, b, setting=setting, metrics=metrics, names=(first, other)))
    return found


def repeats(bench: Bench, name: str) -> bool:
    """Return True if a workload's prompts, or what they share, were the same in all runs on purpose."""
    return any(
        each.get("seed") == "fixed" or each.get("cache") == "warm"
        for each in bench.workloads
        if each.get("name") == name
    )


def event(bench: Bench, comparisons: Sequence[Comparison]) -> NewEvent:
    """Return the experiment as a tuning event with its verdicts. A note: nothing in service was changed, so no alert
    uses it."""
    found = [f"{one.b} against {one.a} ({one.workload} {one.point}): " + _verdicts(one) for one in comparisons]
    verdicts = {finding.verdict for one in comparisons for finding in one.findings if finding.has_verdict} & {
        "better",
        "worse",
    }
    settings = [variant.engine.cache for variant in bench.variants[:2]]
    changed = differences(settings[0], settings[-1]) if settings else {}
    return NewEvent(
        what="; ".join([f"experiment {bench.title}", *found])[:MAX_TEXT],
        kind="note",
        id=bench.id,
        at_s=bench.started_s,
        end_s=bench.ended_s,
        diff=dict(list(changed.items())[:MAX_OPTIONS]),
        tags=("tuning", *sorted(verdicts)),
    )


def _verdicts(comparison: Comparison) -> str:
    return (
        ", ".join(f"{count} {verdict}" for verdict, count in verdict_counts(comparison).items() if count)
        or "nothing was compared"
    )
