"""Table of the programs that lab and tests need: where each is found or how it is installed.

`find` looks and installs nothing; `ensure` installs what is missing into the cache, a folder outside the checkout. Only
Chromium, Node and dockerd are installed on the system itself, and only when we are root: they need libraries and kernel
tools that do not unpack."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from stack.lab.install import alertmanager, debian, engine, go_program, keda_schema, npm, operator_schema, own_libraries
from stack.lab.install.cache import (
    GIB,
    InstalledPart,
    PartMissing,
    ask_version,
    cache_dir,
    release,
    remembered_version,
    require_space,
    stamp,
    stamped,
    starts,
)
from stack.lab.install.debian import AptArchive
from stack.lab.install.runner import InstallStopped, InstallTask

__all__ = ["PARTS", "InstalledPart", "PartMissing", "cache_dir", "find", "install"]

_PLUGINS = ("~/.docker/cli-plugins", "/usr/local/lib/docker/cli-plugins", "/usr/local/libexec/docker/cli-plugins")
_SYSTEM_PLUGINS = ("/usr/lib/docker/cli-plugins", "/usr/libexec/docker/cli-plugins")


@dataclass(frozen=True)
class Program:
    """One program: the names it goes by, the release from which it serves, and the Debian package that has it."""

    commands: tuple[str, ...]
    at_least: tuple[int, ...] = ()
    package: str = ""  # unpacked into the cache
    inside: str = ""  # where the program lies in that package
    asked: tuple[str, ...] = ("--version",)
    folders: tuple[str, ...] = ()  # where to look besides PATH
    company: tuple[str, ...] = ()  # programs it cannot run without
    system_packages: tuple[str, ...] = ()  # installed by the system's apt, as root
    prepare: Callable[[Path], Path] | None = None  # makes an unpacked folder run; the program to start
    silent: bool = False  # Debian built it without its release: the package's counts when it starts
    libraries: tuple[str, ...] = ()  # packages that it runs with, where this system's own are too old


PROGRAMS = {
    "prometheus": Program(("prometheus",), (2, 53), "prometheus", "usr/bin/prometheus"),
    "promtool": Program(("promtool",), (2, 53), "promtool", "usr/bin/promtool"),
    "alertmanager": Program(
        ("alertmanager", "prometheus-alertmanager"),
        (0, 27),
        "prometheus-alertmanager",
        prepare=alertmanager.make_runnable,
    ),
    "amtool": Program(("amtool",), (0, 27), "prometheus-alertmanager", "usr/bin/amtool"),
    "otelcol": Program(("otelcol", "otelcol-contrib")),
    "chromium": Program(
        ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
        system_packages=("chromium", "fonts-dejavu-core"),
    ),
    "dockerd": Program(
        ("dockerd",),
        (20, 10),
        folders=("/usr/local/sbin", "/usr/sbin", "/sbin"),
        company=("containerd", "runc", "iptables"),
        system_packages=("docker.io", "containerd", "runc", "iptables"),
    ),
    "docker": Program(("docker",), (20, 10), "docker-cli", "usr/bin/docker"),
    "compose": Program(
        ("docker-compose",),
        (2, 20),
        "docker-compose",
        "usr/libexec/docker/cli-plugins/docker-compose",
        ("version",),
        (*_PLUGINS, *_SYSTEM_PLUGINS),
    ),
    "buildx": Program(
        ("docker-buildx",),
        (0, 10),
        "docker-buildx",
        "usr/libexec/docker/cli-plugins/docker-buildx",
        ("version",),
        (*_PLUGINS, *_SYSTEM_PLUGINS),
    ),
    "cc": Program(("gcc",), system_packages=("gcc", "libc6-dev")),  # compiles the tests' stand-in for a GPU driver
    # For the compose test: a small Debian to build images on, and networks of its own.
    "mmdebstrap": Program(("mmdebstrap",), package="mmdebstrap", inside="usr/bin/mmdebstrap"),
    "iproute2": Program(("ip",), asked=("-V",), system_packages=("iproute2",)),
    # Checks the boards against Grafana's own types.
    "node": Program(("node", "nodejs"), (18,), company=("npm",), system_packages=("nodejs", "npm")),
    "grafana-schema": Program(()),
    # Checks Kubernetes manifests: kustomize, which it has inside, and what the Prometheus Operator and KEDA take.
    "kubectl": Program(("kubectl",), (1, 27), "kubectl", "usr/bin/kubectl", ("version", "--client")),
    "operator-schema": Program(()),
    "keda-schema": Program(()),
    # Renders the Helm chart; the tests compare it with Helm itself (helm-python-sdk).
    "chart-renderer": Program(()),
    # Evaluates the mixin.
    "jsonnet": Program(("jsonnet",), (0, 18), system_packages=("jsonnet",)),
    # Another reader of logs, for the fault table.
    "mtail": Program(("mtail",), package="mtail", inside="usr/bin/mtail"),
    # A long-term store that takes remote write, for the fleet's tests.
    "victoriametrics": Program(
        ("victoria-metrics", "victoria-metrics-prod"),
        (1, 100),
        "victoria-metrics",
        "usr/bin/victoria-metrics",
        ("-version",),
        silent=True,
    ),
    # Leases of several gateways; forky's build wants a newer C library than Debian 12 has.
    "valkey": Program(
        ("valkey-server",), (8,), "valkey-server", "usr/bin/valkey-server", libraries=own_libraries.OF_VALKEY
    ),
    "redis": Program(
        ("redis-server",), (6, 2), "redis-server", "usr/bin/redis-server", libraries=own_libraries.OF_REDIS
    ),
    # The load balancer before several gateways.
    "haproxy": Program(
        ("haproxy",), (2, 6), "haproxy", "usr/sbin/haproxy", ("-v",), libraries=own_libraries.OF_HAPROXY
    ),
    # A message bus that takes request lines.
    "nats": Program(("nats-server",), (2, 9), "nats-server", "usr/sbin/nats-server"),
    # Static, for images made from nothing; the one on PATH may be linked to this system's libraries.
    "busybox": Program((), (), "busybox-static", "usr/bin/busybox", ("--help",)),
}
BUILT = {program.name: program for program in (go_program.COLLECTOR, go_program.CHART_RENDERER)}
PARTS = (*PROGRAMS, "engine", "model")
_NEEDS = {"model": ("engine",), "grafana-schema": ("node",), "operator-schema": ("node",), "keda-schema": ("node",)}


def find(name: str) -> InstalledPart | None:
    """The part as it is on PATH or in the cache, or None. Installs nothing; asks a program its version once and
    remembers it."""
    cache = cache_dir()
    if name == "engine":
        part = stamped(cache, name, engine.RECIPE)
        return part if part and (part.path.parent / "python").exists() else None
    if name == "model":
        return stamped(cache, name, engine.model_recipe())
    return _on_path(cache, name, PROGRAMS[name]) or stamped(cache, name, _recipe(name))


def _on_path(cache: Path, name: str, program: Program) -> InstalledPart | None:
    where = os.pathsep.join(
        [os.environ.get("PATH", ""), *(str(Path(folder).expanduser()) for folder in program.folders)]
    )
    if not all(shutil.which(other, path=where) for other in program.company):
        return None
    for command in program.commands:
        if path := shutil.which(command, path=where):
            version = remembered_version(cache, Path(path), program.asked)
            if version and release(version) >= program.at_least:
                return InstalledPart(name, Path(path), version, "PATH")
    return None


def _recipe(name: str) -> str:
    if recipe := {
        **{program.name: program.recipe for program in BUILT.values()},
        "grafana-schema": npm.RECIPE,
        "operator-schema": operator_schema.RECIPE,
        "keda-schema": keda_schema.RECIPE,
    }.get(name):
        return recipe
    return PROGRAMS[name].package + (" prepared" if PROGRAMS[name].prepare else "")


def install(names: Iterable[str], report: Callable[[str], None]) -> dict[str, InstalledPart]:
    """Finds or installs the named parts; `report` gets one line per step, from two threads.

    What can be had is installed even when something else cannot. Raises PartMissing: one sentence for each part that
    could not be had."""
    wanted = list(dict.fromkeys(needed for name in names for needed in (*_NEEDS.get(name, ()), name)))
    if unknown := [name for name in wanted if name not in PARTS]:
        raise PartMissing(f"there is no part called {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    found = {name: part for name in wanted if (part := find(name))}
    missing = [name for name in wanted if name not in found]
    stop, failed = Event(), dict[str, PartMissing]()
    # pip waits on the network and apt's side on the processor: two lanes are as fast as more.
    lanes = ([name for name in missing if name not in PROGRAMS], [name for name in missing if name in PROGRAMS])
    with concurrent.futures.ThreadPoolExecutor(len(lanes)) as pool:
        running = [pool.submit(_drive, lane, found, failed, report, stop) for lane in lanes]
        try:
            for done in concurrent.futures.as_completed(running):
                done.result()
        except BaseException:
            stop.set()
            raise
    if failed:
        raise _told(failed)
    return {name: found[name] for name in wanted}


def _told(failed: Mapping[str, PartMissing]) -> PartMissing:
    """One sentence per cause, naming all that it kept away."""
    causes: dict[str, list[str]] = {}
    for name, error in failed.items():
        causes.setdefault(error.reason, []).append(name)
    lines = [
        f"{names[0]}: {failed[names[0]]}" if len(names) == 1 else f"{', '.join(names)}: {why.rstrip('.')}."
        for why, names in causes.items()
    ]
    return PartMissing("\n".join(lines), {name: f"{name}: {error}" for name, error in failed.items()})


def _drive(
    lane: Sequence[str],
    found: dict[str, InstalledPart],
    failed: dict[str, PartMissing],
    report: Callable[[str], None],
    stop: Event,
) -> None:
    """Makes one part after the other; one that cannot be had is reported at once and does not stop the next."""
    for name in lane:
        if broken := next((need for need in _NEEDS.get(name, ()) if need in failed), None):
            failed[name] = PartMissing(f"it is made with the {broken}, which is missing", reason=failed[broken].reason)
            continue
        try:
            found[name] = _made(InstallTask(name, cache_dir(), report, stop), found)
        except InstallStopped:
            return
        except (PartMissing, OSError) as error:
            failed[name] = error if isinstance(error, PartMissing) else PartMissing(f"{error}.")
            report(f"{name}: {failed[name]}")


def _made(work: InstallTask, found: dict[str, InstalledPart]) -> InstalledPart:
    """Makes one part while nobody else does; when somebody just did, takes theirs."""
    with work.alone(_lock(work.name)) as alone:
        if part := find(work.name):
            return part
        match work.name:
            case "engine":
                return engine.install(alone)
            case "model":
                return engine.make_model(alone, found["engine"])
            case "grafana-schema":
                return npm.install(alone)
            case "operator-schema":
                return operator_schema.install(alone)
            case "keda-schema":
                return keda_schema.install(alone)
            case name if name in BUILT:
                return go_program.build(alone, BUILT[name])
            case name:
                return _from_debian(alone, PROGRAMS[name])


def _lock(name: str) -> str:
    """apt keeps one state, so what uses it takes turns."""
    if name not in PROGRAMS or name in (*BUILT, "grafana-schema", "operator-schema", "keda-schema"):
        return name
    return "apt" if PROGRAMS[name].package else "system"


def _from_debian(work: InstallTask, program: Program) -> InstalledPart:
    if program.package:
        return _unpacked(work, program)
    debian.install(work, program.system_packages)
    part = _on_path(work.cache, work.name, program)
    if part is None:
        raise PartMissing(
            f"{' '.join(program.system_packages)} is installed but gives no {work.name} that runs: install it by hand."
        )
    return part


def _unpacked(work: InstallTask, program: Program) -> InstalledPart:
    """The newest one that starts on this system; an older suite is asked when the newest wants a newer C library."""
    require_space(work.cache, GIB)
    archive = AptArchive.here(work.cache)
    archive.refresh(work)
    for offer in archive.offered(work, program.package):
        folder = archive.unpacked(work, offer)
        path = program.prepare(folder) if program.prepare else folder / program.inside
        if program.libraries:
            beside = [
                archive.unpacked(work, archive.offered(work, name, (offer.suite, *archive.suites))[0])
                for name in program.libraries
            ]
            path = own_libraries.make_runnable(path, folder, beside)
        version = ask_version(path, program.asked) or (
            debian.upstream(offer.version) if program.silent and starts(path, program.asked) else ""
        )
        if version and release(version) >= program.at_least:
            return stamp(
                work.cache,
                InstalledPart(work.name, path, version, f"Debian {offer.suite}, unpacked"),
                _recipe(work.name),
            )
    raise PartMissing(
        f"no version in Debian {', '.join(debian.NEWEST_FIRST)} starts on this system: install it by hand and put it on"
        " PATH."
    )
