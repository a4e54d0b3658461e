"""Programs that a bench starts on a core of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial

ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # a peer does not see our packages


@contextlib.contextmanager
def running(
    command: list[object], port: int, core: int | None = None, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A running program that listens on the port, on one core; ends it at the end. What it says is shown only if it
    does not start."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=ALONE | (env or {}),
            stdout=said,
            stderr=said,
            preexec_fn=partial(os.sched_setaffinity, 0, {core}) if core is not None else None,
        )
        try:
            until = time.monotonic() + 120
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise SystemExit(f"{command[0]} did not start: {said.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.02)
            yield process
        finally:
            process.terminate()
            process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
