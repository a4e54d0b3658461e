"""Runner of external installers: progress, log, cancellation, one sentence for a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from stack.lab.install.cache import PartMissing, locked

POLL_S = 0.1
REMIND_S = 5.0  # a longer silence looks like a hang
GRACE_S = 5.0

_UNREACHABLE = (
    r"name resolution|Temporary failure resolving|Could not resolve|Name or service not known|Network is unreachable|No"
    r" route to host"
    r"|[Cc]onnection refused|[Cc]onnection timed out|Failed to establish a new"
    r" connection|ConnectTimeoutError|ReadTimeoutError"
    r"|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|Could not connect to"
)
# In this order: a machine without network also "finds no matching distribution".
_REASONS = (
    (
        _UNREACHABLE,
        (
            "the package server cannot be reached: check the network or the proxy settings (http_proxy, https_proxy)"
            " and run it again"
        ),
    ),
    (
        r"No space left on device|don't have enough free space|Disk quota exceeded",
        "the disk is full: free some space, or set VLLM_WATCH_CACHE to a folder on a larger disk",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|[Cc]ertificate verification failed",
        (
            "the package server's TLS certificate is not trusted: point pip (PIP_CERT) or apt at your certificate"
            " authority"
        ),
    ),
    (
        r"NO_PUBKEY|public key is not available|signatures couldn't be verified|is not signed",
        "the Debian archive key is missing or too old: install or upgrade the package debian-archive-keyring",
    ),
    (r"Could not get lock|Unable to acquire the dpkg", "another apt or dpkg is running: wait for it and run it again"),
    (
        r"404 +Not Found|Hash Sum mismatch|unexpected size|Mirror sync in progress",
        "the mirror changed while we were reading it: run it again",
    ),
    (r"GLIBC(?:XX)?_[\d.]+' not found", "this system's C library is too old for it"),
)
_SIGNALS: dict[int, str] = {
    signal.SIGILL: " (this processor lacks an instruction that it uses)",
    signal.SIGKILL: " (where nobody did that by hand, memory ran out)",
}
_NO_SUCH_RELEASE = re.compile(r"No matching distribution found for (\S+)|Unable to locate package (\S+)")


def explain(output: str, code: int = 1) -> str:
    """Return why an installer failed, for the user; its own last lines when we do not recognise it. code: as subprocess
    has it."""
    for pattern, reason in _REASONS:
        if re.search(pattern, output):
            return reason
    if name := not_offered(output):
        return f"{name} is not offered there for this Python and machine"
    said = " | ".join(last_lines(output, 4))
    ended = f"it was ended by {signal.Signals(-code).name}{_SIGNALS.get(-code, '')}" if code < 0 else ""
    return (
        "; ".join(filter(None, (ended, said and f"its last words were: {said}")))
        or f"it said nothing and left with exit code {code}"
    )


def not_offered(output: str) -> str:
    """Return the package that a reachable package server does not have; empty when that is not what went wrong."""
    found = _NO_SUCH_RELEASE.search(output)
    if not found or any(re.search(pattern, output) for pattern, _ in _REASONS):
        return ""
    return found.group(1) or found.group(2)


def last_lines(output: str, count: int) -> list[str]:
    return [line.strip() for line in output.splitlines() if line.strip()][-count:]


class InstallStopped(Exception):
    """Someone else failed for good or pressed Ctrl-C; this work was ended early."""


class CommandFailed(PartMissing):
    """A command of a step failed. `output` is all it said."""

    def __init__(self, doing: str, reason: str, output: str, log: Path) -> None:
        super().__init__(f"{doing} failed: {reason}. All it said is in {log}.", reason=reason)
        self.output = output


@dataclass(frozen=True)
class InstallTask:
    """The making of one part: how to report, where to log, when to stop, which lock to hand on."""

    name: str
    cache: Path
    report: Callable[[str], None]
    stop: Event
    lock: int | None = None

    @property
    def log(self) -> Path:
        return self.cache / "logs" / f"{self.name}.log"

    def say(self, text: str) -> None:
        self.report(f"{self.name}: {text}")

    @contextmanager
    def alone(self, lock: str) -> Iterator[InstallTask]:
        """Waits its turn among processes, aloud; yields the same work, holding the lock. Raises Stopped."""
        said = float("-inf")

        def idle() -> None:
            nonlocal said
            if self.stop.is_set():
                raise InstallStopped(self.name)
            if time.monotonic() - said >= REMIND_S:
                said = time.monotonic()
                self.say("waiting for another install to finish")

        with locked(self.cache, lock, idle) as handle:
            yield replace(self, lock=handle)

    def run(
        self, argv: Sequence[str | Path], doing: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Runs one command to its end and returns what it said. Raises CommandFailed, or Stopped after ending it.

        The child leads its own process group, so that Ctrl-C reaches us alone and we end the whole group."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab+") as log:
            log.write(f"\n$ {' '.join(map(str, argv))}\n".encode())
            log.flush()
            start = log.tell()
            try:
                child = subprocess.Popen(
                    [str(word) for word in argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(env) if env is not None else None,
                    cwd=cwd,
                    start_new_session=True,
                    pass_fds=() if self.lock is None else (self.lock,),
                )
            except OSError as error:
                raise CommandFailed(doing, f"{argv[0]} does not start ({error.strerror})", "", self.log) from error
            code = self._watch(child, doing, start)
            output = self._said(start)
        if code != 0:
            raise CommandFailed(doing, explain(output, code), output, self.log)
        return output

    def _said(self, start: int) -> str:
        with self.log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def _watch(self, child: subprocess.Popen[bytes], doing: str, start: int) -> int:
        began = said = time.monotonic()
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(POLL_S)
                if self.stop.is_set():
                    raise InstallStopped(self.name)
                if time.monotonic() - said >= REMIND_S:
                    said = time.monotonic()
                    self.say(f"{doing}, {said - began:.0f} s{self._latest(start)}")
        finally:
            if child.poll() is None:
                _end(child)

    def _latest(self, start: int) -> str:
        news = [line for line in last_lines(self._said(start), 50) if not line.startswith("WARNING")]
        return f": {news[-1][:100]}" if news else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and what it started; politely first."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, how)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
            return
