"""Schemas of KEDA's objects, from its CRDs, as packages of npm like those of the Prometheus Operator."""

from __future__ import annotations

import json
from pathlib import Path

from stack.lab.install import npm, operator_schema
from stack.lab.install.cache import InstalledPart, stamp
from stack.lab.install.runner import InstallTask

VERSION = "2.0.0"  # named, because npm on Node 20 chooses 0.4.2, whose fallback has no behavior
RECIPE = f"typescript {npm.TYPESCRIPT}, @kubernetes-models/keda {VERSION}, 1"


def manifest() -> str:
    """Return the package.json for npm."""
    packages = {"typescript": npm.TYPESCRIPT, "@kubernetes-models/keda": VERSION, **operator_schema.NEEDED}
    return json.dumps({"private": True, "type": "module", "dependencies": packages}, indent=1)


def install(work: InstallTask) -> InstalledPart:
    """Raises PartMissing."""
    final = npm.fetched(work, manifest(), "KEDA's schemas, and TypeScript")
    return stamp(
        work.cache, InstalledPart("keda-schema", final, VERSION, f"npm, with TypeScript {npm.TYPESCRIPT}"), RECIPE
    )


def schemas(folder: Path) -> Path:
    """Return the folder with a validator, an ES module, for each kind of KEDA."""
    return folder / "node_modules/@kubernetes-models/keda/_schemas"
