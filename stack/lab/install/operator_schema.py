"""Schemas of the Prometheus Operator's objects, from its CRDs.

Packages of npm, in a folder of the cache; nothing of them but the validators and the compiler is run."""

from __future__ import annotations

import json
from pathlib import Path

from stack.lab.install import npm
from stack.lab.install.cache import InstalledPart, stamp
from stack.lab.install.runner import InstallTask

VERSION = "6.0.0"
# What it needs, each at the release that was tested with it: a range would bring another one tomorrow.
NEEDED = {
    "@kubernetes-models/apimachinery": "3.0.2",
    "@kubernetes-models/base": "6.0.1",
    "@kubernetes-models/validate": "5.0.2",
    "kubernetes-models": "5.1.0",
}
RECIPE = f"typescript {npm.TYPESCRIPT}, @kubernetes-models/prometheus-operator {VERSION}, 1"


def manifest() -> str:
    """Return the package.json for npm."""
    packages = {"typescript": npm.TYPESCRIPT, "@kubernetes-models/prometheus-operator": VERSION, **NEEDED}
    return json.dumps({"private": True, "type": "module", "dependencies": packages}, indent=1)


def install(work: InstallTask) -> InstalledPart:
    """Raises PartMissing."""
    final = npm.fetched(work, manifest(), "the Prometheus Operator's schemas, and TypeScript")
    return stamp(
        work.cache, InstalledPart("operator-schema", final, VERSION, f"npm, with TypeScript {npm.TYPESCRIPT}"), RECIPE
    )


def schemas(folder: Path) -> Path:
    """The folder with a validator, an ES module, for each kind of the API group monitoring.coreos.com."""
    return folder / "node_modules/@kubernetes-models/prometheus-operator/_schemas"
