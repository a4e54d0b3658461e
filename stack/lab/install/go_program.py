"""Programs built from Debian's Go packages: an OpenTelemetry Collector with core components, and a renderer of charts.

The sources and the compiler of the collector take about 2 GB while building and are removed afterwards; the program is
30 MB."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from stack.lab.install.cache import GIB, InstalledPart, PartMissing, ask_version, require_space, stamp
from stack.lab.install.debian import AptArchive, upstream
from stack.lab.install.runner import InstallTask

SUITES = ("sid", "forky")  # the collector's library is newest in sid, and not in trixie
_NEED = 3 * GIB
# Tests and their data are half of what the packages hold. (The collector's own testdata is a package that it imports.)
_UNWANTED = ("*/github.com/*/testdata", "*_test.go", "./usr/share/doc", "./usr/share/man")


@dataclass(frozen=True)
class GoProgram:
    """One program: its name, its source folder below stack/lab, and the Debian packages with the libraries that it
    imports. The version of the first is the program's."""

    name: str
    folder: str
    libraries: tuple[str, ...]
    recipe: str

    @property
    def source(self) -> Path:
        return Path(__file__).parent.parent / self.folder / "main.go"


COLLECTOR = GoProgram("otelcol", "otelcol", ("golang-opentelemetry-collector-dev",), "collector core, 1")
CHART_RENDERER = GoProgram(
    "chart-renderer",
    "chart_renderer",
    ("golang-github-masterminds-sprig-dev", "golang-k8s-sigs-yaml-dev"),
    "chart renderer, 1",
)


def needed(simulation: str) -> list[str]:
    """Reads `apt-get -s install`: the Go sources and the compiler, as name=version; what else they drag in is not
    used."""
    rows = re.findall(r"^Inst (\S+) \((\S+) ", simulation, re.MULTILINE)
    return [
        f"{name}={version}" for name, version in rows if re.fullmatch(r"golang-\S+-dev|golang-[\d.]+-(go|src)", name)
    ]


def build(work: InstallTask, program: GoProgram) -> InstalledPart:
    """Downloads, unpacks, builds, asks it its version, and clears up. Raises PartMissing."""
    require_space(work.cache, _NEED, "building it")
    archive = AptArchive.here(work.cache)
    place = work.cache / f"{program.name}-build"
    shutil.rmtree(place, ignore_errors=True)
    try:
        version = _sources(work, program, archive, place)
        built = _compiled(work, program, place, version)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if not ask_version(built, ("--version",)):
        raise PartMissing(f"what was built does not start; the build is described in {work.log}.")
    part = InstalledPart(program.name, built, version, "built from Debian's Go packages")
    return stamp(work.cache, part, program.recipe)


def _sources(work: InstallTask, program: GoProgram, archive: AptArchive, place: Path) -> str:
    """Fetches and unpacks the libraries, all they need and the compiler; returns the first one's Debian version."""
    debs = place / "debs"
    debs.mkdir(parents=True)
    # Held while downloading only: others may unpack programs while we compile.
    with work.alone("apt") as holding:
        archive.refresh(holding)
        offer = archive.offered(holding, program.libraries[0], SUITES)[0]
        wanted = ["-t", offer.suite, "--no-install-recommends", "-s", "install", *program.libraries, "golang-go"]
        packages = needed(holding.run(archive.apt("apt-get", *wanted), f"finding the sources of {program.name}"))
        work.say(f"downloading {len(packages)} packages of sources ({offer.package} {offer.version}), 1 of 3")
        holding.run(
            archive.apt("apt-get", "-q", "download", *packages), f"downloading the sources of {program.name}", cwd=debs
        )
    work.say("unpacking them, 2 of 3")
    (place / "root").mkdir()
    exclude = " ".join(f"--exclude='{pattern}'" for pattern in _UNWANTED)
    each = (
        'set -eu; for deb in "$1"/*.deb; do echo "${deb##*/}"; dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$2"'
        f' {exclude}; rm "$deb"; done'
    )
    work.run(["sh", "-c", each, "unpack", debs, place / "root"], f"unpacking the sources of {program.name}")
    return offer.version


def _compiled(work: InstallTask, program: GoProgram, place: Path, version: str) -> Path:
    """Compiles into the cache; the program appears there whole."""
    root = place / "root"
    goroot = max(
        (root / "usr/lib").glob("go-1.*"),
        key=lambda folder: [int(part) for part in folder.name.removeprefix("go-").split(".")],
    )
    package = place / "own/src" / program.name
    package.mkdir(parents=True)
    shutil.copy(program.source, package)
    env = os.environ | {
        "GOROOT": str(goroot),
        "GOPATH": f"{place / 'own'}:{root / 'usr/share/gocode'}",
        "GOCACHE": str(place / "gocache"),
        "GOTMPDIR": str(place),
        "GO111MODULE": "off",  # Debian's packages are a GOPATH; nothing else is consulted
        "GOPROXY": "off",
        "GOTOOLCHAIN": "local",
        "GOTELEMETRY": "off",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
    }
    work.say(f"compiling it ({upstream(version)}), 3 of 3")
    built = place / program.name
    flags = f"-s -w -X main.version={version}"
    work.run(
        [goroot / "bin/go", "build", "-v", "-trimpath", "-ldflags", flags, "-o", built, program.name],
        f"compiling {program.name}",
        env,
    )
    final = work.cache / "bin" / program.name
    final.parent.mkdir(parents=True, exist_ok=True)
    return built.replace(final)
