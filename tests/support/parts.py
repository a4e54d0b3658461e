"""Real components that only tests install, beside the parts of the lab (stack/lab/install).

vllm-rs: the Rust frontend of vLLM, a program inside vLLM's GPU wheel that needs no GPU itself; frontend and engine must
be of one release. prometheus-3.12, promtool-3.12: a build that is handed in, in the folder that the variable
VLLM_WATCH_PROMETHEUS_3_12 of the environment names. `python -m tests.support.parts` installs what can be installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path
from threading import Event

from stack.lab import install
from stack.lab.install.cache import (
    GIB,
    InstalledPart,
    PartMissing,
    ask_version,
    cache_dir,
    require_space,
    stamp,
    stamped,
)
from stack.lab.install.engine import VLLM
from stack.lab.install.runner import InstallTask

FRONTEND = "vllm-rs"
WHEEL_SHA256 = "5e2ecdc5b0baf72921c288486417ca82778456a448e4fe60b62ee43c0dfc8611"
MEMBER = "vllm/vllm-rs"
HANDED_IN = "VLLM_WATCH_PROMETHEUS_3_12"
_RELEASED = {"prometheus-3.12": "prometheus", "promtool-3.12": "promtool"}


def find(name: str) -> InstalledPart | None:
    """Return a part of the tests or of the lab, or None. Installs nothing."""
    if name == FRONTEND:
        return stamped(cache_dir(), FRONTEND, WHEEL_SHA256)
    if name not in _RELEASED:
        return install.find(name)
    program = Path(os.environ.get(HANDED_IN, "/nonexistent")) / _RELEASED[name]
    version = ask_version(program, ("--version",)) if program.exists() else ""
    return InstalledPart(name, program, version, "handed in") if version.startswith("3.12.") else None


def remedy(name: str) -> str:
    """Return what makes a missing part available."""
    if name in _RELEASED:
        return f"{HANDED_IN} must name a folder with Prometheus 3.12"
    return "'make test' installs it"


def install_frontend(work: InstallTask) -> InstalledPart:
    """Download the wheel, keep the one program. Raises PartMissing."""
    require_space(work.cache, GIB, "vLLM's Rust frontend")
    folder = work.cache / f"{FRONTEND}-{VLLM}"
    shutil.rmtree(folder, ignore_errors=True)
    work.say(f"downloading vLLM {VLLM} for its Rust frontend (326 MB)")
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--progress-bar"]
    command += ["off", "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"vllm=={VLLM}"]
    work.run(command, "downloading vLLM")
    wheel = next(folder.glob("*.whl"))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise PartMissing(f"the index has another vllm {VLLM} (sha256 {digest}) than the tests know; see {__file__}.")
    with zipfile.ZipFile(wheel) as archive:
        program = Path(archive.extract(MEMBER, folder))
    program.chmod(0o755)
    wheel.unlink()
    return stamp(work.cache, InstalledPart(FRONTEND, program, VLLM, "vLLM's GPU wheel"), WHEEL_SHA256)


def main() -> int:
    """Install the Rust frontend, unless it is there."""
    work = InstallTask(FRONTEND, cache_dir(), lambda text: print(text, flush=True), Event())  # noqa: T201
    try:
        with work.alone(FRONTEND) as alone:
            if not find(FRONTEND):
                install_frontend(alone)
    except PartMissing as missing:
        work.say(str(missing))
        return 1 if os.environ.get("CI") else 0  # elsewhere its tests are reported as not run
    return 0


if __name__ == "__main__":
    sys.exit(main())
