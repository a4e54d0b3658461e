"""A Docker engine of its own for one test run, and images made here under the names that docker-compose.yml asks for.

The engine lives in namespaces of its own (mounts, network, processes): its bridges, firewall rules and forwarding never
exist on this machine, no port of this machine is taken, it cannot reach a registry, and when its first process ends
everything in it ends too."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from stack.lab.install.debian import debian_source
from tests.support.wait import eventually

CLONE_NEWNET = 0x40000000
FAR_HOST = "203.0.113.2"  # an address for documentation, so nobody's
# Python for our image, wget for the probes, libnuma for vLLM's CPU build.
DEBIAN_PACKAGES = ("python3", "python3-venv", "busybox-static", "libnuma1")


class PrivateDocker:
    """Programs: paths of dockerd, docker and compose. `folder` takes images, volumes and logs; `stop` empties it."""

    def __init__(self, dockerd: Path, docker: Path, compose: Path, folder: Path) -> None:
        self.docker, self.compose, self.folder = docker, compose, folder
        self.control_group = f"/vllm-watch-test-{os.getpid()}"
        self.environment = {
            "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
            "HOME": str(folder),
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_CONFIG": str(folder / "config"),
        }
        (folder / "config" / "cli-plugins").mkdir(parents=True)
        (folder / "config" / "cli-plugins" / "docker-compose").symlink_to(compose)
        # /run is hidden so that a containerd of this machine is not found and used. The far host is the whole internet
        # there is.
        start = (
            "set -e; mount -t tmpfs none /run; ip link set lo up; ip netns add far; ip link add out type veth peer"
            " name in netns far; ip address add 203.0.113.1/24 dev out; ip link set out up; ip route add default via"
            f" 203.0.113.2; ip -n far address add 203.0.113.2/24 dev in; ip -n far link set in up; exec {dockerd}"
            f" --data-root={folder}/data --exec-root={folder}/exec --pidfile={folder}/dockerd.pid"
            f" --host=unix://{folder}/docker.sock --bridge=none --host-gateway-ip=203.0.113.1"
            f" --cgroup-parent={self.control_group}"
        )
        with (folder / "dockerd.log").open("w") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", start],
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        eventually(self._answers, "an answer of dockerd")
        self._inside = concurrent.futures.ThreadPoolExecutor(
            1, initializer=_enter_network_of, initargs=(self.first_process,)
        )

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"dockerd did not start: {(self.folder / 'dockerd.log').read_text()[-2000:]}")
        return self._call([self.docker, "version"]).returncode == 0

    @property
    def first_process(self) -> int:
        """dockerd, as this machine numbers it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def stop(self) -> None:
        """Ends dockerd and with it every process and mount of its namespaces; only its log is left."""
        # --kill-child: dockerd goes too, and as the first process of its namespace it takes all others along
        self.process.kill()
        self.process.wait(10)
        self._inside.shutdown()
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        # a killed engine's memory takes the kernel a while
        eventually(self._without_control_groups, f"the end of all processes of {self.control_group}")

    def _without_control_groups(self) -> bool:
        """Removes this engine's control groups; False while a process is left in one."""
        for top in Path("/sys/fs/cgroup").glob(f"**{self.control_group}"):
            for group in (*sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True), top):
                try:
                    group.rmdir()
                except OSError:
                    return False
        return True

    def _call(
        self, command: Sequence[str | Path], timeout_s: float = 120, **more: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            command,
            **{
                "env": self.environment,
                "capture_output": True,
                "text": True,
                "timeout": timeout_s,
                "check": False,
                **more,
            },
        )

    def run(self, *arguments: str, timeout_s: float = 120, **more: object) -> str:
        """`docker ARGUMENTS`; its output. Raises AssertionError with what it said."""
        done = self._call([self.docker, *arguments], timeout_s, **more)
        assert done.returncode == 0, f"docker {' '.join(arguments)[:300]}: {done.stderr[-3000:]}"
        return done.stdout

    def up_project(self, files: Sequence[Path], variables: Mapping[str, str], project: Path) -> Project:
        return Project(self, files, variables, project)

    def get(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: object = None,
        timeout_s: float = 30,
        authority: str | None = None,
    ) -> tuple[int, str]:
        """Status and text of an answer, asked for from where this machine's user would be: the engine's host network.

        authority: the only one that is believed, as PEM text. Raises OSError when nobody answers, or not as asked."""
        return self._inside.submit(_get, url, dict(headers or {}), body, timeout_s, authority).result()

    def typed(
        self, line: str, variables: Mapping[str, str], folder: Path, timeout_s: float = 150
    ) -> subprocess.CompletedProcess[str]:
        """A line of shell as this machine's user would type it in a folder, with `docker` on the path, on the engine's
        host network."""
        path = f"{self.docker.parent}:{self.environment['PATH']}"
        return self._inside.submit(
            self._call, ["bash", "-c", line], timeout_s, env={**self.environment, **variables, "PATH": path}, cwd=folder
        ).result()  # fmt: skip

    def relay(self, port: int, host: str, its_port: int) -> None:
        """Have a port of the engine's host network lead to one of this machine, which nobody there can reach."""
        server = self._inside.submit(socket.create_server, ("", port)).result()
        threading.Thread(target=_relay, args=(server, (host, its_port)), daemon=True).start()

    def adopt(
        self, image: str, base: str, *, inside: str = "true", mounts: Sequence[str] = (), changes: Sequence[str] = ()
    ) -> None:
        """Makes `image` from `base`: runs a shell line in it, then sets what a Dockerfile would (ENTRYPOINT, USER, ENV,
        WORKDIR)."""
        name = "making-" + hashlib.sha256(image.encode()).hexdigest()[:12]
        volumes = [part for mount in mounts for part in ("--volume", f"{mount}:ro")]
        self.run(
            "run",
            "--name",
            name,
            "--network",
            "none",
            "--user",
            "0",
            "--entrypoint",
            "sh",
            *volumes,
            base,
            "-ec",
            inside,
        )
        self.run("commit", *[part for change in changes for part in ("--change", change)], name, image)
        self.run("rm", name)


class Project:
    """One compose project on the private engine."""

    def __init__(
        self, docker: PrivateDocker, files: Sequence[Path], variables: Mapping[str, str], project: Path
    ) -> None:
        self.docker, self.project = docker, project
        self.files = [part for file in files for part in ("--file", str(file))]
        self.variables = {**docker.environment, **variables}

    def __call__(self, *arguments: str, timeout_s: float = 150) -> str:
        """`docker compose ARGUMENTS`; its output. Raises AssertionError with what it said and the containers' last
        words."""
        done = self._compose(*arguments, timeout_s=timeout_s)
        if done.returncode:
            state = self._compose("ps", "--all", "--format", "table {{.Service}} {{.Status}}").stdout
            words = self._compose("logs", "--no-color", "--tail", "8").stdout
            raise AssertionError(
                f"compose {' '.join(arguments)}: {done.stdout[-500:]}{done.stderr[-1500:]}\n{state}\n{words[-12000:]}"
            )
        return done.stdout

    def _compose(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return self.docker._call(
            [self.docker.compose, *self.files, *arguments], timeout_s, env=self.variables, cwd=self.project
        )


def _enter_network_of(process: int) -> None:
    """Moves the calling thread, and only it, into the network of a process."""
    with Path(f"/proc/{process}/ns/net").open() as handle:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _relay(server: socket.socket, target: tuple[str, int]) -> None:
    while True:
        client = server.accept()[0]
        try:
            there = socket.create_connection(target)
        except OSError:
            client.close()
            continue
        for source, sink in ((client, there), (there, client)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def _get(url: str, headers: dict[str, str], body: object, timeout_s: float, authority: str | None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers = {"Content-Type": "application/json", **headers}
    try:
        context = ssl.create_default_context(cadata=authority) if authority else None
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=timeout_s, context=context
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def debian_root(mmdebstrap: Path, cache: Path) -> Path:
    """A small Debian 12 with Python as a tar file, made once from the mirror that this machine is configured with."""
    tar = cache / "compose-test" / f"bookworm-{'-'.join(DEBIAN_PACKAGES)}.tar"
    if tar.exists():
        return tar
    source = debian_source()
    assert source, "no Debian mirror is configured under /etc/apt"
    tar.parent.mkdir(parents=True, exist_ok=True)
    partial = tar.with_suffix(".partial.tar")
    command = [
        mmdebstrap,
        "--variant=minbase",
        f"--include={','.join(DEBIAN_PACKAGES)}",
        "bookworm",
        partial,
        f"deb {source.uri} bookworm main",
    ]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, f"mmdebstrap: {made.stderr[-2000:]}"
    partial.rename(tar)
    return tar


def wheelhouse(cache: Path, requirements: Path) -> Path:
    """Wheels of everything that the image installs, downloaded once per set of pins, for CPython 3.11."""
    pins = [requirements / "run.txt", requirements / "build.txt"]
    folder = (
        cache
        / "compose-test"
        / f"wheels-{hashlib.sha256(b''.join(path.read_bytes() for path in pins)).hexdigest()[:12]}"
    )
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--only-binary=:all:",
            "--python-version=3.11",
            "--dest",
            partial,
        ]
        command += ["--require-hashes", *(word for path in pins for word in ("-r", path))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"pip download: {done.stderr[-2000:]}"
        partial.rename(folder)
    return folder
