"""Command of the operator that saves evidence of a hung engine before somebody restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from stack.gateway.engine_liveness import EngineLiveness

RUNS_S = 120.0  # then it is killed

_log = logging.getLogger("gateway.watch")


def report(name: str, url: str, engine: EngineLiveness) -> bytes:
    """Return what is known of a hung engine, as one JSON object: no prompt, no key."""
    liveness, steps = engine.liveness, engine.steps
    return msgspec.json.encode({
        "upstream": name,
        "url": url,
        "state": liveness.state,
        "evidence": liveness.cause,
        "quiet_s": round(liveness.quiet_s(), 1),
        "running": None if steps is None else steps.running,
        "waiting": None if steps is None else steps.waiting,
        "requests": sorted(attempt.request_id for attempt in engine.attempts),
    })  # fmt: skip


async def run_hook(command: Sequence[str], text: bytes) -> None:
    """Run the command with `text` on its standard input. A failure is logged and changes nothing."""
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    except OSError as error:
        _log.error("liveness.on_hung: %s cannot be started: %s", command[0], error.strerror or error)
        return
    try:
        async with asyncio.timeout(RUNS_S):
            await process.communicate(text)
    except TimeoutError:
        _log.error("liveness.on_hung: %s was killed after %g s", command[0], RUNS_S)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        _log.error("liveness.on_hung: %s ended with %d", command[0], process.returncode)
