"""OpenTelemetry Collector with core components, built from Debian's Go packages.

The sources and the compiler take about 2 GB while building and are removed afterwards; the program is 30 MB."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from stack.lab.install.cache import GIB, InstalledPart, PartMissing, ask_version, require_space, stamp
from stack.lab.install.debian import AptArchive, upstream
from stack.lab.install.runner import InstallTask

LIBRARY = "golang-opentelemetry-collector-dev"
SUITES = ("sid", "forky")  # the library is newest in sid, and not in trixie
RECIPE = "collector core, 1"
_NEED = 3 * GIB
_MAIN = Path(__file__).parent.parent / "otelcol" / "main.go"
# Tests and their data are half of what the packages hold. (The collector's own testdata is a package that it imports.)
_UNWANTED = ("*/github.com/*/testdata", "*_test.go", "./usr/share/doc", "./usr/share/man")


def needed(simulation: str) -> list[str]:
    """Reads `apt-get -s install`: the Go sources and the compiler, as name=version; what else they drag in is not
    used."""
    rows = re.findall(r"^Inst (\S+) \((\S+) ", simulation, re.MULTILINE)
    return [
        f"{name}={version}" for name, version in rows if re.fullmatch(r"golang-\S+-dev|golang-[\d.]+-(go|src)", name)
    ]


def build(work: InstallTask) -> InstalledPart:
    """Downloads, unpacks, builds, asks it its version, and clears up. Raises PartMissing."""
    require_space(work.cache, _NEED, "building it")
    archive = AptArchive.here(work.cache)
    place = work.cache / "otelcol-build"
    shutil.rmtree(place, ignore_errors=True)
    try:
        version = _sources(work, archive, place)
        program = _compiled(work, place, version)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if not ask_version(program, ("--version",)):
        raise PartMissing(f"what was built does not start; the build is described in {work.log}.")
    return stamp(work.cache, InstalledPart("otelcol", program, version, "built from Debian's Go packages"), RECIPE)


def _sources(work: InstallTask, archive: AptArchive, place: Path) -> str:
    """Fetches and unpacks the library, all it needs and the compiler; returns the library's Debian version."""
    debs = place / "debs"
    debs.mkdir(parents=True)
    # Held while downloading only: others may unpack programs while we compile.
    with work.alone("apt") as holding:
        archive.refresh(holding)
        offer = archive.offered(holding, LIBRARY, SUITES)[0]
        wanted = ["-t", offer.suite, "--no-install-recommends", "-s", "install", LIBRARY, "golang-go"]
        packages = needed(holding.run(archive.apt("apt-get", *wanted), "finding the collector's sources"))
        work.say(f"downloading {len(packages)} packages of collector {offer.version} sources, 1 of 3")
        holding.run(
            archive.apt("apt-get", "-q", "download", *packages), "downloading the collector's sources", cwd=debs
        )
    work.say("unpacking them, 2 of 3")
    (place / "root").mkdir()
    exclude = " ".join(f"--exclude='{pattern}'" for pattern in _UNWANTED)
    each = (
        'set -eu; for deb in "$1"/*.deb; do echo "${deb##*/}"; dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$2"'
        f' {exclude}; rm "$deb"; done'
    )
    work.run(["sh", "-c", each, "unpack", debs, place / "root"], "unpacking the collector's sources")
    return offer.version


def _compiled(work: InstallTask, place: Path, version: str) -> Path:
    """Compiles into the cache; the program appears there whole."""
    root = place / "root"
    goroot = max(
        (root / "usr/lib").glob("go-1.*"),
        key=lambda folder: [int(part) for part in folder.name.removeprefix("go-").split(".")],
    )
    package = place / "own/src/otelcol"
    package.mkdir(parents=True)
    shutil.copy(_MAIN, package)
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
    work.say(f"compiling the collector {upstream(version)}, 3 of 3")
    built = place / "otelcol"
    flags = f"-s -w -X main.version={version}"
    work.run(
        [goroot / "bin/go", "build", "-v", "-trimpath", "-ldflags", flags, "-o", built, "otelcol"],
        "compiling the collector",
        env,
    )
    final = work.cache / "bin" / "otelcol"
    final.parent.mkdir(parents=True, exist_ok=True)
    return built.replace(final)
