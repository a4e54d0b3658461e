"""The wheel of this checkout, installed into an environment of its own, which has the dependencies of the running one
and nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, without downloads."""
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    return next(folder.glob("vllm_watch-*.whl"))


def foreign_wheel(folder: Path, packages: tuple[str, ...]) -> Path:
    """Build the wheel of another distribution whose packages have these names and fail when they are imported."""
    info = "foreign-1.0.dist-info"
    files = {f"{name}/__init__.py": f'raise ImportError("the foreign {name} was imported")\n' for name in packages}
    files |= {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    path = folder / "foreign-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            packed.writestr(name, text)
    return path


@dataclass(frozen=True)
class InstalledApp:
    """An environment that has the wheel. folder: its root."""

    folder: Path

    @property
    def command(self) -> Path:
        return self.folder / "bin/vllm-watch"

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def site(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def environment(self) -> dict[str, str]:
        """Variables of a shell in which nothing was set for us."""
        return {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder)}

    def run(
        self, *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder; its output as text."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.environment() | dict(env or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


def install(folder: Path, *wheels: Path) -> InstalledApp:
    """Install wheels one after the other into a new environment. The index is not asked."""
    venv.create(folder, with_pip=False, symlinks=True)
    app = InstalledApp(folder)
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (app.site / "beside.pth").write_text("\n".join(beside) + "\n")
    for wheel in wheels:
        _pip("--python", app.python, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    return app


def uninstall(app: InstalledApp, name: str) -> None:
    _pip("--python", app.python, "uninstall", "--yes", name)


def _pip(*words: str | Path) -> None:
    # without PYTHONPATH, through which pip would find the checkout's own metadata and install nothing
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
