"""Workers of one gateway: processes that share its address (SO_REUSEPORT), and their supervisor.

Invariant: each worker is a replica with a log, a metrics port and a share of every limit of its own, so the shares of
all workers of all replicas add up to the limits. A worker that dies takes only its own connections with it: the kernel
gives new ones to the others."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from exporters.net.addresses import split_address
from stack.config import BadConfig, load
from stack.gateway.config import GatewayConfig, rooted
from stack.gateway.runtime_policy import load_terms
from stack.gateway.serve import run
from stack.gateway.sharing import Sharing, numbered_share

RESTART_S, RESTART_AT_MOST_S = 0.2, 30.0  # pause before a restart: the first, doubled up to the longest
STEADY_S = 60.0  # a worker that ran for so long starts again after the first pause
_SIGNALS = (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

_log = logging.getLogger("gateway.workers")


def worker_config(config: GatewayConfig, index: int, count: int, hostname: str) -> GatewayConfig:
    """Return the configuration of one worker. Raises BadConfig for what workers cannot share.

    The log is NAME-INDEX.SUFFIX, the metrics port the configured one plus the index. Worker i of n on replica k of r is
    replica k * n + i of r * n; with a store its name is NAME/INDEX."""
    sharing = config.sharing or Sharing(replicas=1, index=0)
    try:
        share = numbered_share(sharing, hostname)
    except ValueError as error:
        raise BadConfig(str(error)) from error
    if share is None:
        raise BadConfig(
            "sharing: --workers needs a fixed number of replicas; set sharing.replicas, or run one worker for each"
            " gateway and more gateways"
        )
    log = Path(config.requests_log)
    host, port = split_address(config.metrics_listen)
    return msgspec.structs.replace(
        config,
        requests_log=str(log.with_name(f"{log.stem}-{index}{log.suffix}")),
        metrics_listen=f"{f'[{host}]' if ':' in host else host}:{port + index if port else 0}",
        sharing=msgspec.structs.replace(
            sharing,
            replicas=share.replicas * count,
            index=None if share.index is None else share.index * count + index,
            name=f"{sharing.name or hostname}/{index}" if sharing.store else None,
        ),
    )


def supervise(path: Path, count: int) -> int:
    """Run the workers of a configuration file until SIGTERM or SIGINT; the exit code."""
    try:
        config = rooted(load(path, GatewayConfig), path.resolve().parent)
        hostname = socket.gethostname()
        configs = [worker_config(config, index, count, hostname) for index in range(count)]
        load_terms(configs[0])  # a mistake is reported once, and the secret is made once
        with _reserved(config.listen) as listen:
            return _Supervisor([msgspec.structs.replace(each, listen=listen) for each in configs]).run()
    except BadConfig as error:
        _log.error("%s", error)
        return 1


@contextlib.contextmanager
def _reserved(address: str) -> Iterator[str]:
    """Hold an address without listening, with its port resolved. Raises BadConfig where another program has it.

    Without this a second gateway of the same user would share the port unnoticed."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as alone, socket.socket(family, socket.SOCK_STREAM) as held:
        try:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))
            port = alone.getsockname()[1]
            alone.close()
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # also just after a gateway without workers
                held.setsockopt(socket.SOL_SOCKET, option, 1)
            held.bind((host, port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # a second gateway is still refused
        except OSError as error:
            raise BadConfig(
                f"listen: {address} cannot be used: {error.strerror}; stop the program that has it, or choose another"
                " with listen"
            ) from error
        yield f"{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(slots=True)
class _Worker:
    """One worker. pid None: not running. start_s: monotonic time of its last or next start."""

    index: int
    config: GatewayConfig
    pid: int | None = None
    start_s: float = 0.0
    pause_s: float = RESTART_S


@dataclass(slots=True)
class _Supervisor:
    """Starts workers, starts those again that died, and passes signals on."""

    configs: list[GatewayConfig]
    workers: list[_Worker] = field(default_factory=list)
    stopping: bool = False
    code: int = 0

    def run(self) -> int:
        """Run until every worker has ended after a signal, or because none can start."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self.workers = [_Worker(index, config) for index, config in enumerate(self.configs)]
        for worker in self.workers:
            self._start(worker)
        _log.info("%d workers on %s, metrics on %s", len(self.workers), self.configs[0].listen,
                  ", ".join(each.metrics_listen for each in self.configs))  # fmt: skip
        while any(worker.pid is not None for worker in self.workers) or not self.stopping:
            self._handle(signal.sigtimedwait(_SIGNALS, self._wait_s()))
        return self.code

    def _wait_s(self) -> float:
        """Return the time until the next worker is due."""
        due = [worker.start_s for worker in self.workers if worker.pid is None]
        return max(0.0, min(due) - time.monotonic()) if due and not self.stopping else 3600.0

    def _handle(self, received: signal.struct_siginfo | None) -> None:
        match received.si_signo if received else None:
            case signal.SIGINT | signal.SIGTERM:
                self._stop()
            case signal.SIGHUP:
                self._send(signal.SIGHUP)
        for worker in self.workers:
            self._reap(worker)
        for worker in self.workers:
            if worker.pid is None and not self.stopping and time.monotonic() >= worker.start_s:
                self._start(worker)

    def _stop(self) -> None:
        self.stopping = True
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for worker in self.workers:
            if worker.pid is not None:
                os.kill(worker.pid, number)

    def _start(self, worker: _Worker) -> None:
        worker.start_s = time.monotonic()
        supervisor = os.getpid()
        worker.pid = os.fork()
        if worker.pid == 0:
            _work(worker, supervisor)

    def _reap(self, worker: _Worker) -> None:
        """Plan the restart of a worker that has ended. A mistake that stops the first start ends the gateway."""
        if worker.pid is None:
            return
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            return
        code, now = os.waitstatus_to_exitcode(status), time.monotonic()
        lived_s, worker.pid = now - worker.start_s, None
        if self.stopping:
            self.code = self.code or int(code not in (0, -signal.SIGTERM))
            return
        cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if code == os.EX_CONFIG and worker.pause_s == RESTART_S:
            _log.error("worker %d cannot start (its log names the cause); the gateway ends", worker.index)
            self.code = 1
            self._stop()
            return
        if lived_s >= STEADY_S:
            worker.pause_s = RESTART_S
        _log.error("worker %d (pid %d) ended by %s after %.0f s; the next one starts in %g s",
                   worker.index, pid, cause, lived_s, worker.pause_s)  # fmt: skip
        worker.start_s = now + worker.pause_s
        worker.pause_s = min(RESTART_AT_MOST_S, 2 * worker.pause_s)


def _work(worker: _Worker, supervisor: int) -> NoReturn:
    """Be a worker: serve, and end the process. It drains when its supervisor is gone, too."""
    code = os.EX_SOFTWARE
    try:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(
                logging.Formatter(f"%(asctime)s %(levelname)s %(name)s worker-{worker.index}: %(message)s")
            )
        if os.getppid() == supervisor:
            code = os.EX_CONFIG if run(worker.config, shared_port=True) else os.EX_OK
    except BaseException:
        _log.exception("worker %d failed", worker.index)
    finally:
        os._exit(code)
