"""Print the import graph: cycles between files, upward imports, and which package imports which.

    python -m tools.import_graph [--write]

--write puts the drawing into docs/internals/architecture.md. Imports within functions and for types only count as
well."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Mapping, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("exporters", "alerts", "dashboards", "stack")  # each may import itself and the ones before it
PACKAGES = (*LAYERS, "runbooks")
NOT_OURS = ("stack/lab/tiny_model.py",)  # run by the engine's Python
PAGE = ROOT / "docs/internals/architecture.md"
_PLACE = re.compile(r"(<!-- printed: imports -->\n).*?(<!-- end -->)", re.DOTALL)

Graph = Mapping[str, Set[str]]


def allowed(package: str) -> set[str]:
    """Return the top-level packages that a top-level package may import."""
    if package == "runbooks":
        return {"exporters", "alerts", "runbooks"}
    below = set(LAYERS[: LAYERS.index(package) + 1])
    return below | {"runbooks"} if package == "stack" else below


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return dotted name and file of each module of ours."""
    paths = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    relative = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for name, path in relative.items()
        if name not in NOT_OURS
    }


def imports(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules of ours that each module imports. An `__init__` counts only where it is named."""
    found = {}
    for name, path in files.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        named = {node.module or "" for node in nodes} | {
            f"{node.module}.{alias.name}" for node in nodes for alias in node.names
        }
        found[name] = {to for to in named & files.keys() if to != name and not name.startswith(f"{to}.")}
    return found


def cycles(graph: Graph) -> list[tuple[str, ...]]:
    """Return the groups of nodes that reach each other, each sorted."""
    reach = reachable(graph)
    return sorted(
        {
            tuple(sorted(one for one in graph if one in reach[node] and node in reach[one]))
            for node in graph
            if node in reach[node]
        }
    )


def reachable(graph: Graph) -> dict[str, set[str]]:
    """Return the nodes that each node reaches, directly or indirectly."""
    reach = {node: set(graph[node]) for node in graph}
    for middle in graph:
        for found in reach.values():
            if middle in found:
                found |= reach[middle]
    return reach


def upward(graph: Graph) -> list[tuple[str, str]]:
    """Return imports that point against the order of the layers."""
    return [
        (name, to)
        for name, found in graph.items()
        for to in sorted(found)
        if to.split(".")[0] not in allowed(name.split(".")[0])
    ]


def packages(graph: Graph) -> dict[str, set[str]]:
    """Return the graph of packages: the first two names of a module that has three, else the first."""

    def package(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:2]) if (ROOT / "/".join(parts[:2])).is_dir() else parts[0]

    found: dict[str, set[str]] = {package(name): set() for name in graph}
    for name, named in graph.items():
        found[package(name)] |= {package(to) for to in named} - {package(name)}
    return found


def drawing(graph: Graph) -> str:
    """Return a Mermaid chart of the packages, with an arrow for each import between top-level packages."""
    inside = packages(graph)
    lines = ["flowchart TD"]
    for top in ("stack", "dashboards", "runbooks", "alerts", "exporters"):
        names = " ".join(sorted(name.removeprefix(f"{top}.") for name in inside if name.startswith(f"{top}.")))
        lines.append(f'    {top}["<b>{top}</b>{f"<br>{names}" if names else ""}"]')
    edges = {(name.split(".")[0], to.split(".")[0]) for name, found in inside.items() for to in found}
    lines += [f"    {name} --> {to}" for name, to in sorted(edges) if name != to]
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def written(page: str, graph: Graph) -> str:
    """Return the page with the drawing inserted."""
    return _PLACE.sub(lambda found: found[1] + drawing(graph) + found[2], page)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tools.import_graph", description="Print the import graph.")
    options.add_argument("--write", action="store_true", help="put the drawing into docs/internals/architecture.md")
    arguments = options.parse_args()
    graph = imports(modules())
    lines = [
        *(f"cycle: {' '.join(group)}" for group in cycles(graph)),
        *(f"upward: {name} -> {to}" for name, to in upward(graph)),
        *(
            f"{name} -> {' '.join(sorted(found)) or 'nothing of ours'}"
            for name, found in sorted(packages(graph).items())
        ),
        f"{len(graph)} files, {len(cycles(graph))} cycles, {len(upward(graph))} upward imports",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(), graph))


if __name__ == "__main__":
    main()
