"""Routes that the HTTP servers of an installed vLLM declare, read from its source without importing it.

Run: `python -m tests.support.vllm_routes SITE_PACKAGES`; each line is `METHOD PATH FILE`. Sources are all modules of
vllm/entrypoints: a route that needs an option or a task is listed too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

METHODS = ("delete", "get", "head", "options", "patch", "post", "put", "websocket")
SEVERAL = ("add_api_route", "add_route", "api_route", "route")  # methods are an argument, GET without it
MOUNTS = ("Mount", "mount")  # the second column is a prefix
SOCKETS = ("add_api_websocket_route", "add_websocket_route")
# Made by libraries: FastAPI's defaults, and `expose()` of prometheus-fastapi-instrumentator
DEFAULTS = {
    "launchers/app.py": ("/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc"),
    "serve/instrumentator/metrics.py": ("/metrics",),
}


def declared(source: str) -> Iterator[tuple[str, str]]:
    """Yield method and path of each route that is declared with a literal path."""
    for call in ast.walk(ast.parse(source)):
        match call:
            case ast.Call(
                func=ast.Attribute(attr=name) | ast.Name(id=name), args=[ast.Constant(value=str(path)), *_]
            ) if path.startswith("/"):
                yield from ((method, path) for method in _methods(name, call.keywords))


def _methods(name: str, keywords: list[ast.keyword]) -> list[str]:
    if name in SEVERAL:
        given = [ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg == "methods"]
        return sorted(given[0]) if given else ["GET"]
    return [kind for kind, names in KINDS if name in names]


KINDS = [("MOUNT", MOUNTS), ("WEBSOCKET", SOCKETS), *((name.upper(), (name,)) for name in METHODS)]


def routes(site_packages: Path) -> list[str]:
    """Return the lines of an installed vLLM, sorted by path."""
    folder = site_packages / "vllm" / "entrypoints"
    found = {("GET", path, file) for file, paths in DEFAULTS.items() for path in paths}
    for file in folder.rglob("*.py"):
        found |= {(*route, str(file.relative_to(folder))) for route in declared(file.read_text())}
    return [" ".join(route) for route in sorted(found, key=lambda route: (route[1], route))]


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in routes(Path(sys.argv[1])))
