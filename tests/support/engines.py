"""Real vLLM engines for tests: the CPU build with the lab's tiny random model, each on one core. Test files share those
that they do not hurt.

    @pytest.fixture(scope="module")
    def engine(real_engines: Engines) -> Engine:
        return real_engines.shared().up()

An engine is forked from a process that has imported vLLM (tests/support/preloaded_vllm.py) and answers after 2 s; with
an environment of its own it starts as on a shell and takes 17 s of CPU. Ask for `shared()`, which runs already as a
rule: all who ask with the same arguments get the same engine. It lives until others need its memory, and others have
used it, so its counters are not zero and its cache is not empty: take a page before (`shown`), count from there, and
let nothing of yours run on when you are done. Who will end an engine takes the shared one for good (`taken`), or one
that nobody else ever had (`own`). Several that are begun before the first is waited for (`up`) start side by side."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from exporters.catalogue import exposition_parser, gateway, vllm
from exporters.catalogue.metric import Metric
from stack.drill.lab import descendants
from stack.lab import plan, supervisor
from tests.support import wait
from tests.support.wait import eventually

CONTEXT = 32768  # the model's
RUST = "VLLM_USE_RUST_FRONTEND"
NOT_IN_RUST = ("--enable-per-request-metrics",)  # the frontend of 0.32 refuses to start with it
KEPT = 1  # engines that wait for another file; each has 2.3 GB, two processes run tests, and 12 GiB is the limit
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")  # costs nothing where no tool is called


def engine_states(metrics_url: str) -> dict[str, tuple[str, str]]:
    """State and evidence of each upstream of a gateway."""
    name = gateway.ENGINE_STATE.name
    lines = [line for line in get(f"{metrics_url}/metrics").splitlines() if line.startswith(name)]
    shown = exposition_parser.parse("\n".join([*lines, ""])).of(name)
    return {labels["upstream"]: (labels["state"], labels["evidence"]) for labels, _ in shown}


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@dataclass
class Engine:
    """A real vLLM. last: what its page said when it was killed, None while it lives."""

    spec: plan.Process
    log: Path
    process: subprocess.Popen[bytes] | ForkedProcess
    core: int
    last: exposition_parser.Exposition | None = None
    answered: bool = False

    def up(self) -> Engine:
        """Itself, once it answers, with all its threads on one core: where each process of a vLLM has a core of
        its own, they wait for each other by giving it away and taking it again, and others got none of it for up to a
        minute (Linux 6.18). What remains is for the clients."""
        if not self.answered:
            eventually(self.ready, "the start of an engine", within_s=2 * self.spec.within_s, every_s=0.1)
            self.keeps_to(self.core)
            self.answered = True
        return self

    def ready(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"the engine ended: {supervisor.last_words(self.log)}")
        return get(self.spec.health) == ""

    def shown(self) -> exposition_parser.Exposition:
        """Its page, or what that was when it was killed."""
        return self.last or exposition_parser.parse(get(self.spec.address + "/metrics"))

    def figure(self, metric: Metric, part: str = "") -> float:
        """A figure of its page, all labels together. part: of a histogram, its sum or count."""
        found = self.shown().total(metric.name + part)
        assert found is not None, metric.name + part
        return found

    @property
    def abandoned(self) -> float:
        """Texts that began and were broken off: all that the engine counts of them is their first token and that their
        end is missing."""
        return self.figure(vllm.TIME_TO_FIRST_TOKEN, "_count") - self.figure(vllm.E2E_REQUEST_LATENCY, "_count")

    @property
    def running(self) -> float:
        return self.figure(vllm.NUM_REQUESTS_RUNNING)

    @property
    def waiting(self) -> float:
        return self.figure(vllm.NUM_REQUESTS_WAITING)

    def part(self, name: str) -> int:
        """The process of its EngineCore, or of its Worker."""
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if f"VLLM::{name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError(f"the engine has no {name}")

    def kill(self) -> None:
        """SIGKILL to all its processes, as a crash; what it has counted is kept. Once."""
        if self.last is None:
            self.last = self.shown()
            self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Signal all its processes and return when they are gone; those that stay 30 s are killed."""
        if self.process.returncode is not None:
            return  # its number may be somebody else's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        try:
            eventually(self._gone, "the end of an engine", within_s=30)
        except AssertionError:
            os.killpg(self.process.pid, signal.SIGKILL)
            eventually(self._gone, "the end of a killed engine")

    def _gone(self) -> bool:
        self.process.poll()
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def keeps_to(self, core: int) -> None:
        """All its threads run there."""
        for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(task.parts[2])) == self.process.pid:
                    os.sched_setaffinity(int(task.name), {core})


class ForkedProcess:
    """A process that another one started, with what `subprocess.Popen` has for one of ours; its status is not known."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._handle], [], [], 0)[0]:
            os.close(self._handle)
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        eventually(lambda: self.poll() is not None, f"the end of process {self.pid}", within_s=timeout or wait.LIMIT_S)
        return 0


class PreloadedVllm:
    """What forks engines that have imported vLLM already: tests/support/preloaded_vllm.py, for one environment."""

    _running: ClassVar[dict[tuple[str, ...], PreloadedVllm]] = {}

    def __init__(self, spec: plan.Process) -> None:
        python, env = Path(spec.argv[0]).parent / "python", environment(spec)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [python, Path(__file__).parent / "preloaded_vllm.py"], env=env, text=True, stderr=self._log,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=supervisor._die_with_parent,
        )  # fmt: skip
        self._read("ready")

    @classmethod
    def of(cls, spec: plan.Process) -> PreloadedVllm:
        """The one for this program and its environment; it lives until this process ends."""
        key = (str(spec.argv[0]), *sorted(f"{name}={value}" for name, value in spec.env.items()))
        if key not in cls._running:
            cls._running[key] = cls(spec)
        return cls._running[key]

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], cores: Collection[int], files: tuple[Path, Path, Path]
    ) -> ForkedProcess:
        """A process of vLLM's command or of a script, in a process group of its own. env: beside that of this one.
        files: standard input, output and errors, which exist."""
        asked = {"argv": argv, "env": dict(env), "core": sorted(cores), "files": [str(file) for file in files]}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return ForkedProcess(int(self._read()))

    def _read(self, expected: str = "") -> str:
        while line := self._process.stdout.readline():
            if line.strip().isdecimal() or line.strip() == expected:
                return line.strip()  # vLLM's import may print
        self._log.seek(0)
        raise AssertionError(f"vLLM could not be preloaded: {self._log.read()[-2000:]}")


def lab_engine(folder: Path, programs: Mapping[str, Path], port: int, *arguments: str) -> plan.Process:
    """The lab's own engine, at another port and with more arguments."""
    offset = port - plan.PORTS["vllm"]
    config = plan.LabConfig(folder, programs, port_offset=offset, args={"vllm": (*TOOLS, *arguments)})
    return next(process for process in plan.processes(config) if process.name == "vllm")


def environment(spec: plan.Process) -> dict[str, str]:
    """Few machines that run the lab have a C++ compiler, and nothing here may need one."""
    return {**os.environ, **spec.env, "CXX": "no-compiler"}


def started(
    folder: Path,
    programs: Mapping[str, Path],
    port: int,
    core: int,
    *arguments: str,
    more_env: Mapping[str, str] = {},
    home: int | None = None,
) -> Engine:
    """An engine as the lab starts its own, on this port, with one core until it answers and then with the core `home`.
    It may not answer yet. more_env: set after vLLM was imported, but for the Rust frontend, which starts the engine."""

    def alone() -> None:
        supervisor._die_with_parent()
        os.sched_setaffinity(0, {core})

    spec = lab_engine(folder, programs, port, *arguments)
    argv = [str(word) for word in spec.argv if RUST not in more_env or word not in NOT_IN_RUST]
    log = folder / f"vllm-{port}.log"
    if RUST in more_env:
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdout=output,
                stderr=output,
                env=environment(spec) | dict(more_env),
                start_new_session=True,
                preexec_fn=alone,
            )
    else:
        log.write_bytes(b"")
        process = PreloadedVllm.of(spec).fork(argv, more_env, {core}, (Path(os.devnull), log, log))
    return Engine(spec, log, process, core if home is None else home)


def run_by_engine(engine: Path, script: str, asked: object, folder: Path) -> Any:
    """What a script of tests/support that imports vLLM prints as JSON, with a JSON value on its standard input."""
    files = tuple(folder / name for name in ("input.json", "output.json", "errors"))
    for file, text in zip(files, (json.dumps(asked), "", ""), strict=True):
        file.write_text(text)
    spec = lab_engine(folder, {"engine": engine, "model": folder}, plan.PORTS["vllm"])
    path = str(Path(__file__).with_name(script))
    PreloadedVllm.of(spec).fork([path], {}, os.sched_getaffinity(0), files).wait(300)
    output, errors = (file.read_text() for file in files[1:])
    assert output, errors[-2000:]
    return json.loads(output)


class Engines:
    """The engines of one process that runs tests. What it returns has been started and may not answer yet: begin all
    that you need, then have them `up`.

    At most KEPT engines that the running file has not asked for stay alive: a start ends those that nobody else gets,
    and then the one that was asked for longest ago."""

    def __init__(self, folder: Path, programs: Mapping[str, Path], free_port: Callable[[], int]) -> None:
        self._folder, self._programs, self._free_port = folder, programs, free_port
        self._shared: dict[tuple[str, ...], Engine] = {}
        self._users: dict[int, str] = {}  # by the engine's process, the file that asked for it last
        self._all: list[Engine] = []
        cores = sorted(os.sched_getaffinity(0))
        first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(cores)
        self._home = cores[first]  # what remains is for the clients, and for the engines of the other process
        self._cores = itertools.cycle(cores[first:] + cores[:first])  # two that start together share none

    def shared(self, *arguments: str, **more_env: str) -> Engine:
        """The one for all who ask for these arguments and this environment, with nothing in flight."""
        key = (*arguments, *(f"{name}={value}" for name, value in sorted(more_env.items())))
        found = self._shared.pop(key, None)
        if found is None or found.process.poll() is not None:
            found = self.own(*arguments, **more_env)
        elif found.answered:
            eventually(lambda: not found.running and not found.waiting, "an idle engine")
        self._shared[key] = found  # asked for last
        self._users[found.process.pid] = _user()
        return found

    def with_rust_frontend(self, program: Path) -> Engine:
        """The shared one whose HTTP server is vLLM's Rust frontend, with the program of the same release."""
        return self.shared(**{RUST: "1", "VLLM_RUST_FRONTEND_PATH": str(program)})

    def taken(self, *arguments: str) -> Engine:
        """The shared one, whose user will end it: the next to ask for the same gets another."""
        found = self.shared(*arguments)
        del self._shared[arguments]
        return found

    def own(self, *arguments: str, **more_env: str) -> Engine:
        """One that nobody else gets."""
        return self._start(self._free_port(), *arguments, **more_env)

    def again(self, engine: Engine, *arguments: str, **more_env: str) -> Engine:
        """Another at the same port, after that one has ended with all its processes: its core has the port as well."""
        eventually(engine._gone, "the end of the engine before")
        return self._start(int(engine.spec.address.rpartition(":")[2]), *arguments, **more_env)

    def _start(self, port: int, *arguments: str, **more_env: str) -> Engine:
        self._make_room()
        core, programs = next(self._cores), self._programs
        engine = started(self._folder, programs, port, core, *arguments, more_env=more_env, home=self._home)
        self._all.append(engine)
        self._users[engine.process.pid] = _user()
        return engine

    def _make_room(self) -> None:
        shared = list(self._shared.values())
        idle = [engine for engine in self._all if self._users[engine.process.pid] != _user()]
        for engine in (engine for engine in idle if engine not in shared):
            engine.end()
        kept = [engine for engine in shared if engine in idle]
        for engine in kept[: max(0, len(kept) - KEPT)]:
            engine.end()
        self._shared = {key: engine for key, engine in self._shared.items() if engine.process.returncode is None}
        self._all = [engine for engine in self._all if engine.process.returncode is None]

    def end(self) -> None:
        for engine in self._all:
            engine.end()


def _user() -> str:
    """The test file that runs."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
