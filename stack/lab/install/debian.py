"""Packages from Debian: unpacked into the cache, or installed by apt as root.

Invariant: the mirror is the one this machine is configured with."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.lab.install.cache import PartMissing
from stack.lab.install.runner import CommandFailed, InstallTask

NEWEST_FIRST = ("forky", "sid", "trixie")  # forky before sid: as new for what we take, and tested longer
LISTS_LAST_S = 24 * 3600.0
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SUITES = {"bookworm", "trixie", "forky", "duke", "sid", "oldstable", "stable", "testing", "unstable"}
_BY_HAND = "install it by hand and put it on PATH (Prometheus from 2.53, Alertmanager from 0.27)"


@dataclass(frozen=True)
class AptSource:
    """One apt source: a mirror, what it offers, and the key that signs it (empty: apt's trusted keys)."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""

    @property
    def is_debian(self) -> bool:
        """True for a mirror of Debian itself; many vendors use Debian's suite names, some even `main`."""
        named = re.search(r"/debian(/|\.list|$)", self.uri) or "debian-archive" in self.signed_by
        return bool(named) and "main" in self.components and not _SUITES.isdisjoint(self.suites)


def parse_sources(text: str) -> list[AptSource]:
    """Reads an apt source file in either format: deb822 stanzas or one line per source."""
    return [*_stanzas(text), *_one_liners(text)]


def _stanzas(text: str) -> Iterator[AptSource]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        fields = {
            key.lower(): value.split()
            for key, value in re.findall(r"^([A-Za-z-]+):((?:.*)(?:\n[ \t]+.*)*)", block, re.MULTILINE)
        }
        if "deb" not in fields.get("types", []) or fields.get("enabled", ["yes"])[0].lower() in (
            "no",
            "false",
            "off",
            "0",
        ):
            continue
        # A key may be written out in the file; we can name only a file of keys.
        signed_by = next((word for word in fields.get("signed-by", []) if word.startswith("/")), "")
        for uri in fields.get("uris", []):
            yield AptSource(uri, tuple(fields.get("suites", [])), tuple(fields.get("components", [])), signed_by)


def _one_liners(text: str) -> Iterator[AptSource]:
    for line in text.splitlines():
        if found := re.match(r"\s*deb\s+(?:\[(.*?)\]\s+)?(\S+)\s+(\S+)([^#]*)", line):
            options, uri, suite, components = found.groups()
            key = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
            yield AptSource(uri, (suite,), tuple(components.split()), key.group(1) if key else "")


def debian_source(etc_apt: Path = Path("/etc/apt")) -> AptSource | None:
    """The first mirror of Debian that this machine is configured with."""
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    texts = [
        file.read_text(errors="replace") for file in files if file.suffix in (".list", ".sources") and file.is_file()
    ]
    return next((source for text in texts for source in parse_sources(text) if source.is_debian), None)


@dataclass(frozen=True)
class Offer:
    """One package in one suite, as the archive lists it."""

    package: str
    version: str
    suite: str


def offers(madison: str, suites: Sequence[str] = NEWEST_FIRST) -> list[Offer]:
    """Reads `apt-cache madison`; best suite first, each version once."""
    found: dict[str, Offer] = {}
    rows = [[cell.strip() for cell in line.split("|")] for line in madison.splitlines() if line.count("|") == 2]
    listed = [Offer(package, version, _suite(where)) for package, version, where in rows]
    for offer in sorted(
        (offer for offer in listed if offer.suite in suites), key=lambda offer: suites.index(offer.suite)
    ):
        found.setdefault(offer.version, offer)
    return list(found.values())


def _suite(where: str) -> str:
    return next((word.split("/")[0] for word in where.split()[1:] if "/" in word), "")


def upstream(version: str) -> str:
    """The release that a Debian version packages: 2:3.5.3+ds1-6 is 3.5.3."""
    return re.split(r"[+~-]", version.split(":")[-1])[0]


@dataclass(frozen=True)
class AptArchive:
    """apt with a state of its own under the cache. Keeps the machine's proxy and certificate settings, drops its
    hooks."""

    folder: Path
    source: AptSource

    @staticmethod
    def here(cache: Path) -> AptArchive:
        """Raises PartMissing where there is no apt, or no Debian behind it."""
        if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
            raise PartMissing(f"this system has no apt, from which we would unpack it: {_BY_HAND}.")
        source = debian_source()
        if source is None:
            raise PartMissing(
                f"no Debian mirror is configured under /etc/apt, from which we would unpack it: {_BY_HAND}."
            )
        key = source.signed_by or _KEYRING
        if not Path(key).is_file():
            raise PartMissing(
                f"the Debian archive key {key} is not there: install the package debian-archive-keyring, or {_BY_HAND}."
            )
        return AptArchive(cache / "apt", source)

    @property
    def suites(self) -> tuple[str, ...]:
        """The newest, then this system's own: a library from there runs on its C library."""
        return (*NEWEST_FIRST, *(suite for suite in self.source.suites if suite in _SUITES - {*NEWEST_FIRST}))

    def apt(self, tool: str, *arguments: str) -> list[str | Path]:
        return [tool, "-c", self.folder / "apt.conf", *arguments]

    def refresh(self, work: InstallTask, again: bool = False) -> None:
        """Reads the package lists when ours are a day old, missing, or `again`."""
        updated = self.folder / "updated"
        sources = self._sources()
        if (
            not again
            and updated.exists()
            and updated.read_text() == sources
            and time.time() - updated.stat().st_mtime < LISTS_LAST_S
        ):
            return
        for name in ("state/lists/partial", "cache/archives/partial", "preferences.d"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        (self.folder / "debian.sources").write_text(sources)
        (self.folder / "apt.conf").write_text(self._configuration())
        updated.unlink(missing_ok=True)
        doing = "reading Debian's package lists"
        work.say(doing)
        try:
            # Without that mode apt takes an unreachable mirror for a success.
            work.run(self.apt("apt-get", "-q", "-o", "APT::Update::Error-Mode=any", "update"), doing, _plain())
        except CommandFailed:
            # One suite may be gone from the mirror while the others are good; then go on, and ask again next time.
            if not offers(work.run(self.apt("apt-cache", "madison", "bash"), doing)):
                raise
        else:
            updated.write_text(sources)

    def _sources(self) -> str:
        key = self.source.signed_by or _KEYRING
        return (
            f"Types: deb\nURIs: {self.source.uri}\nSuites: {' '.join(self.suites)}\nComponents: main\nSigned-By:"
            f" {key}\n"
        )

    def _configuration(self) -> str:
        at = self.folder
        return (
            "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n#clear DPkg::Post-Invoke;\n"
            f'Dir::State "{at}/state";\nDir::State::status "{at}/status";\nDir::Cache "{at}/cache";\n'
            f'Dir::Etc::sourcelist "{at}/debian.sources";\nDir::Etc::sourceparts "/dev/null";\n'
            f'Dir::Etc::preferences "/dev/null";\nDir::Etc::preferencesparts "{at}/preferences.d";\n'
            'Acquire::Languages "none";\nAcquire::Retries "2";\nAcquire::http::Timeout "30";\nAcquire::https::Timeout'
            ' "30";\n'
            'Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";\n'
            + ('APT::Sandbox::User "root";\n' if os.geteuid() == 0 else "")
        )

    def offered(self, work: InstallTask, package: str, suites: Sequence[str] = NEWEST_FIRST) -> list[Offer]:
        """Raises PartMissing when no suite has the package."""
        found = offers(work.run(self.apt("apt-cache", "madison", package), f"looking up {package}"), suites)
        if not found:
            raise PartMissing(f"{self.source.uri} offers no {package} in {', '.join(suites)}: {_BY_HAND}.")
        return found

    def unpacked(self, work: InstallTask, offer: Offer) -> Path:
        """Downloads and unpacks one package into a folder of its own, whole or not at all."""
        final = work.cache / "unpacked" / f"{offer.package}_{offer.version.replace(':', '%')}"
        if final.exists():
            return final
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "root").mkdir(parents=True)
        wanted = f"{offer.package}={offer.version}"
        work.say(f"downloading {offer.package} {offer.version} from Debian {offer.suite}")
        try:
            work.run(
                self.apt("apt-get", "-q", "download", wanted), f"downloading {offer.package}", _plain(), cwd=partial
            )
        except CommandFailed as failure:
            if "404" not in failure.output:
                raise
            self.refresh(work, again=True)  # superseded since our lists were read
            work.run(
                self.apt("apt-get", "-q", "download", wanted), f"downloading {offer.package}", _plain(), cwd=partial
            )
        for deb in partial.glob("*.deb"):
            work.run(["dpkg-deb", "-x", deb, partial / "root"], f"unpacking {offer.package}")
        (partial / "root").rename(final)
        shutil.rmtree(partial, ignore_errors=True)
        return final


def _plain() -> dict[str, str]:
    """The environment in which apt says what we know how to read."""
    return {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


def install(work: InstallTask, packages: Sequence[str]) -> None:
    """Installs packages on the system itself, as root only. Raises PartMissing."""
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if not shutil.which("apt-get"):
        raise PartMissing(f"it is not on PATH and this system has no apt: {_BY_HAND}.")
    if os.geteuid() != 0:
        raise PartMissing(f"it is not on PATH and installing it takes root: run `sudo {command}`.")
    work.say("reading the system's package lists")
    work.run(["apt-get", "-q", "update"], "reading the system's package lists", _plain())
    work.say(f"installing {' '.join(packages)} on this system")
    wait = ["-o", "DPkg::Lock::Timeout=120"]
    work.run(["apt-get", "-q", "-y", *wait, "install", "--no-install-recommends", *packages], "installing", _plain())
