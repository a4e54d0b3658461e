"""Generator of requirements/*.txt: every dependency of pyproject.toml, pinned to one version with file hashes.

Invariant: versions are chosen here only; every installation (make, the image) uses these files with --require-hashes. A
file is valid for CPython 3.11 and later on every platform that its packages have wheels for; differences have markers.
It contains no index URL and no local path.

python -m tools.pins [--upgrade] [--check]"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHON = "3.11"  # oldest supported version
HEAD = "# Printed by `make pins` from pyproject.toml; not edited by hand. {what}\n"
_ENTRY = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)(?: ; (?P<marker>[^\\]+?))? \\")
_HASH = re.compile(r"    --hash=sha256:(?P<hash>[0-9a-f]{64})(?: \\)?")


class BadPins(ValueError):
    """Pins that are invalid or could not be made; one sentence."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One version of one distribution. marker: '' for everywhere; hashes: SHA-256 of each allowed file."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Set:
    """One pins file. extras: the optional dependencies that it includes; with_project: include the project's own."""

    extras: tuple[str, ...]
    with_project: bool
    what: str


SETS: Mapping[str, Set] = {
    "run": Set(("data",), True, "What the command needs, the data set included."),
    "dev": Set(("data", "dev"), True, "What the tests need, all of run.txt included."),
    "build": Set(("build",), False, "What makes a wheel of the checkout."),
    "upkeep": Set(("upkeep",), False, "What `make pins` and `make audit` run."),
}


def read(text: str, name: str) -> tuple[Pin, ...]:
    """Parse pins in file order.

    Raises BadPins at the first other line: a URL, a path, a loose version, no hash."""
    return tuple(
        _entries(
            [(at, line) for at, line in enumerate(text.splitlines(), 1) if line and not line.startswith("#")], name
        )
    )


def _entries(lines: Sequence[tuple[int, str]], name: str) -> Iterator[Pin]:
    head: re.Match[str] | None = None
    hashes: list[str] = []
    for at, line in lines:
        if found := _HASH.fullmatch(line):
            hashes.append(found["hash"])
            continue
        if head:
            yield _pin(head, hashes, name)
        head, hashes = _ENTRY.fullmatch(line), []
        if not head:
            raise BadPins(f"{name}, line {at}: {line.strip()[:60]!r} is no version with hashes; run `make pins`")
    if head:
        yield _pin(head, hashes, name)


def _pin(head: re.Match[str], hashes: Sequence[str], name: str) -> Pin:
    if not hashes:
        raise BadPins(f"{name}: {head['name']} has no hash; run `make pins`")
    return Pin(normal(head["name"]), head["version"], (head["marker"] or "").strip(), tuple(hashes))


def normal(name: str) -> str:
    """Return a distribution's normalised name, as in indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(project: Mapping[str, Any], one: Set) -> list[str]:
    """Return the requirements of pyproject.toml for a pins file. project: the table [project]."""
    own = project["dependencies"] if one.with_project else []
    return [*own, *(text for extra in one.extras for text in project["optional-dependencies"][extra])]


def printed(text: str, what: str) -> str:
    """Return uv's output with our header and without comments, which contain local command lines."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    made = HEAD.format(what=what) + "\n".join(lines) + "\n"
    read(made, "uv's output")
    return made


def compile_set(uv: str, name: str, project: Mapping[str, Any], upgrade: bool) -> str:
    """Return one file, regenerated; versions that still fit stay unless `upgrade`. Raises BadPins with uv's error."""
    one = SETS[name]
    command = [
        uv,
        "pip",
        "compile",
        "-",
        "--universal",
        "--python-version",
        PYTHON,
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
        "--quiet",
    ]
    # dev and run share one environment: their versions must agree.
    command += ["-c", str(FOLDER / "run.txt")] * (name == "dev")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"{name}.txt"
        if not upgrade and (FOLDER / made.name).is_file():
            shutil.copy(FOLDER / made.name, made)  # uv keeps versions of an existing output file
        requirements = "\n".join(wanted(project, one))
        done = subprocess.run(
            [*command, "--output-file", str(made)],
            input=requirements,
            capture_output=True,
            text=True,
            check=False,
            env=_clean(),
        )
        if done.returncode:
            raise BadPins(f"requirements/{name}.txt could not be made; uv says: {' '.join(done.stderr.split())[-600:]}")
        return printed(made.read_text(), one.what)


def _clean() -> dict[str, str]:
    """Return the environment without local wheels, whose hashes others cannot check.

    UV_DEFAULT_INDEX may name a mirror."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "VIRTUAL_ENV", "PYTHONPATH")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the generator. Exit 0: files are up to date (now); 1: --check found a difference; 2: generation failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.pins", description="Print requirements/*.txt from pyproject.toml."
    )
    parser.add_argument("--upgrade", action="store_true", help="upgrade all pins to the newest matching versions")
    parser.add_argument("--check", action="store_true", help="only check; exit 1 when a file is out of date")
    options = parser.parse_args(arguments)
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        return _said("uv is missing; `make pins` installs it", 2)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    changed = 0
    for name in SETS:
        path = FOLDER / f"{name}.txt"
        try:
            text = compile_set(uv, name, project, options.upgrade)
        except BadPins as error:
            return _said(str(error), 2)
        same = path.is_file() and path.read_text() == text
        changed += not same
        _said(
            f"{'up to date' if same else 'out of date' if options.check else 'printed'}: requirements/{name}.txt,"
            f" {len(read(text, name))} packages"
        )
        if not options.check:
            path.write_text(text)
    return 1 if options.check and changed else 0


def _said(text: str, status: int = 0) -> int:
    sys.stdout.write(text + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
