"""Launcher of vllm-watch: the one name that an installation adds to an environment.

The application's packages have plain names (`stack`, `alerts`), which other distributions use, too. A wheel holds them
in the private folder `_app` beside this file; a checkout, in the folder above it. The launcher puts that folder first
on `sys.path` of its own process; it sets no environment variable, so other programs never see these packages."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
APPLICATION = _HERE / "_app" if (_HERE / "_app").is_dir() else _HERE.parent


def use_application() -> None:
    """Put the application's folder first on `sys.path`."""
    folder = str(APPLICATION)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]


def module_command(name: str) -> tuple[str, ...]:
    """Return the command that runs a module of the application in a process of its own.

    It needs no PYTHONPATH and imports nothing from the folder that it is started in (-P)."""
    return (sys.executable, "-P", str(_HERE / "module.py"), name)


def main() -> None:
    """Run the command line.

    Whatever a command started must end with it, also after SIGTERM. The handlers come before the imports, which take
    0.4 s: the first process of a container ignores a SIGTERM without a handler, would serve on, and be killed with its
    requests. A shell that starts a command in the background makes it ignore SIGINT: hence the first handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    use_application()
    importlib.import_module("stack.cli").main(prog_name="vllm-watch")
