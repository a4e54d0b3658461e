"""Packages of npm: Grafana's dashboard types, and the TypeScript compiler that checks JSON against them.

Nothing of them is run but the compiler; install scripts are refused. npm asks the registry that this machine is
configured with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from stack.lab.install.cache import GIB, InstalledPart, require_space, stamp
from stack.lab.install.runner import InstallTask

# The oldest and the newest Grafana that our boards are made for, and between them the last of each major release.
SCHEMAS = ("10.4.19", "11.6.16", "12.4.11", "13.2.3")
TYPESCRIPT = "5.9.3"
RECIPE = f"typescript {TYPESCRIPT}, @grafana/schema {', '.join(SCHEMAS)}, 1"
_QUIET = (
    "--ignore-scripts",
    "--no-audit",
    "--no-fund",
    "--no-package-lock",
    "--no-update-notifier",
    "--loglevel=error",
)


def manifest() -> str:
    """Return the package.json for npm: each release of the schema under a name of its own."""
    schemas = {_name(version): f"npm:@grafana/schema@{version}" for version in SCHEMAS}
    return json.dumps({"private": True, "dependencies": {"typescript": TYPESCRIPT, **schemas}}, indent=1)


def _name(version: str) -> str:
    return f"grafana-schema-{version}"


def install(work: InstallTask) -> InstalledPart:
    """Raises PartMissing."""
    final = fetched(work, manifest(), f"{len(SCHEMAS)} releases of Grafana's schema, and TypeScript", _all_apart)
    return stamp(
        work.cache,
        InstalledPart("grafana-schema", final, ", ".join(SCHEMAS), f"npm, with TypeScript {TYPESCRIPT}"),
        RECIPE,
    )


def fetched(work: InstallTask, wanted: str, what: str, arrange: Callable[[Path], None] = lambda folder: None) -> Path:
    """Fetches the packages that `wanted`, a package.json, asks for into a folder that is there whole, and arranged, or
    not at all. Raises PartMissing."""
    require_space(work.cache, GIB / 4)
    final = work.cache / "npm" / f"{work.name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    partial = final.with_name(final.name + ".partial")
    for folder in (partial, final):
        shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "package.json").write_text(wanted)
    work.say(f"downloading {what}")
    # npm's own cache lies in the home folder, which may not be writable.
    work.run(
        ["npm", "install", *_QUIET],
        "installing npm packages",
        os.environ | {"npm_config_cache": str(partial / "cache")},
        cwd=partial,
    )
    shutil.rmtree(partial / "cache", ignore_errors=True)
    arrange(partial)
    partial.rename(final)
    return final


def _all_apart(folder: Path) -> None:
    for version in SCHEMAS:
        set_apart(folder, version)


def set_apart(folder: Path, version: str) -> None:
    """Gives a release a node_modules of its own: its files import each other as @grafana/schema, and would else find
    nothing, silently."""
    there = modules(folder, version) / "@grafana"
    there.mkdir(parents=True)
    (folder / "node_modules" / _name(version)).rename(there / "schema")


def modules(folder: Path, version: str) -> Path:
    """The node_modules in which that release is @grafana/schema."""
    return folder / version / "node_modules"
