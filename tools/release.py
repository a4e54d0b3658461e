"""Makes a release: wheel, source, image context, bundle and their checksums, the same bytes whoever makes them from the
same commit.

    python -m tools.release [--out dist] [--force]

The source archive is the whole tracked tree, so that whoever unpacks it can run `make test`; the wheel is built from
what the archive holds, and the bundle is printed by the wheel's own code. Times are those of the commit (or
SOURCE_DATE_EPOCH), owners and modes are fixed, names are sorted."""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST = 4102444800  # the year 2100: a zip holds seven years more, and later is a slip
NOT_SOURCE = ("dist", "build", "artifacts")
# What the bundle holds: folder in it, the command that prints it, and what it is for.
PRINTED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("boards/full", ("dashboards", "export"), "every board, for Grafana's import dialog or a provisioned folder"),
    (
        "boards/engine",
        ("dashboards", "export", "--profile", "engine"),
        "the boards that vLLM's own series fill, without anything else of ours",
    ),
    (
        "rules",
        ("alerts", "export"),
        "rules for Prometheus: `rule_files: [rules/*.yaml]`; each `.yml` is routes, objectives or numbers",
    ),
    (
        "kubernetes",
        ("kubernetes", "export"),
        "gateway with sidecar, board, monitors and rules for the Prometheus Operator, in the default names",
    ),
)
COPIED: tuple[tuple[str, str, str], ...] = (
    ("runbooks", "runbooks/*.md", "a page for each alert, and for tuning"),
    (
        "alertmanager",
        "stack/deploy/alertmanager/*.yml",
        "Alertmanager's configuration for nobody, a webhook, Slack, PagerDuty and mail",
    ),
)
_README = """# vllm-watch {version}: what an existing Prometheus, Alertmanager and Grafana import

Printed by `make release`. `boards/engine` needs vLLM alone. What the other boards and the rules ask of our gateway and
sidecar is empty without these; `kubernetes/` starts them from the image that you build. Take one of the two folders of
boards: their uids are the same. With other addresses, thresholds or receivers: install the wheel and print your own.

| folder | what it is | printed by |
|---|---|---|
{rows}

How far each is proven stands in the README of the source, under "What was tested with what". Apache-2.0.
"""


class NotReady(ValueError):
    """Why there can be no release of this tree; one sentence."""


def version(root: Path) -> str:
    found: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return found


def sources(root: Path) -> list[Path]:
    """Every file of the source, below the root: what git tracks or would, or in an unpacked archive everything that is
    there."""
    if (root / ".git").exists():
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        found = [Path(name) for name in listed if name and (root / name).is_file()]
    else:
        ignored = [line.rstrip("/") for line in (root / ".gitignore").read_text().splitlines() if line]
        below = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
        found = [
            path for path in below if not any(fnmatch.fnmatch(part, name) for part in path.parts for name in ignored)
        ]
    return sorted(path for path in found if path.parts[0] not in NOT_SOURCE and path.name != "PKG-INFO")


def why_not(root: Path) -> list[str]:
    """What stands against a release of this tree; each is one sentence."""
    told = []
    if (root / ".git").exists() and (changed := _git(root, "status", "--porcelain").splitlines()):
        told.append(f"{len(changed)} files differ from the commit, such as {changed[0][3:]}: commit them first")
    section = rf"^## \[{re.escape(version(root))}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(section, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        told.append(
            f"CHANGELOG.md has no section `## [{version(root)}] - YYYY-MM-DD`: head what is under Unreleased with the"
            " version and the date"
        )
    return told


def epoch(root: Path) -> int:
    """The second that every file is dated: SOURCE_DATE_EPOCH, else the commit's, else 1980, the first that a zip can
    hold. Raises NotReady."""
    if told := os.environ.get("SOURCE_DATE_EPOCH"):
        if not told.isdecimal() or int(told) >= LAST:
            raise NotReady(f"SOURCE_DATE_EPOCH is {told!r}: give whole seconds since 1970, before the year 2100")
        return int(told)
    return int(_git(root, "log", "-1", "--format=%ct")) if (root / ".git").exists() else 315532800


def build(root: Path, out: Path, when: int) -> list[Path]:
    """Writes a release of the tree into `out`, an empty folder; the files it made. when: unix seconds. Raises NotReady
    where a step fails."""
    name = f"vllm_watch-{version(root)}"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / name
        _copy(root, sources(root), tree)
        listed = sources(tree)
        wheel = _wheel(tree, out, when)
        site = Path(folder) / "site"
        zipfile.ZipFile(wheel).extractall(site)  # noqa: S202 our own, made a moment ago
        info = (site / f"{name}.dist-info" / "METADATA").read_bytes()
        files = {f"{name}/{path.as_posix()}": (root / path).read_bytes() for path in listed}
        made = [
            wheel,
            _tar(out / f"{name}.tar.gz", files | {f"{name}/PKG-INFO": info}, when, _programs(root, listed, f"{name}/")),
        ]
        context = {path.as_posix(): (root / path).read_bytes() for path in _image_context(root, listed)}
        made.append(_tar(out / f"vllm-watch-image-{version(root)}.tar.gz", context, when, _programs(root, listed, "")))
        top = f"vllm-watch-bundle-{version(root)}"
        bundle = {
            f"{top}/{path}": content for path, content in _bundle(site, Path(folder) / "bundle", version(root)).items()
        }
        made.append(_tar(out / f"{top}.tar.gz", bundle, when, frozenset()))
    sums = out / "SHA256SUMS"
    sums.write_text("".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made)))
    return [*made, sums]


def _copy(root: Path, paths: Iterable[Path], tree: Path) -> None:
    """With fixed modes, which a wheel keeps."""
    for path in paths:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, tree / path)
        (tree / path).chmod(0o755 if os.access(root / path, os.X_OK) else 0o644)


def _wheel(tree: Path, out: Path, when: int) -> Path:
    """Built with the setuptools that is installed here; nothing is fetched."""
    code = (
        "import os, sys; os.umask(0o022); from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    )
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(when), "PYTHONDONTWRITEBYTECODE": "1"}
    copy = tree.with_name("build")  # setuptools leaves its workings there
    shutil.copytree(tree, copy)
    done = subprocess.run(
        [sys.executable, "-c", code, out.resolve()], cwd=copy, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotReady(f"the wheel could not be built; setuptools says: {' '.join(done.stderr.split())[-500:]}")
    return out / done.stdout.split()[-1]


def _image_context(root: Path, listed: Iterable[Path]) -> list[Path]:
    """What the Dockerfile copies: what .dockerignore lets in, and the two files themselves."""
    let_in = [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    kept = (*let_in, "Dockerfile", ".dockerignore")
    return [
        path for path in listed if any(path.as_posix() == one or path.as_posix().startswith(f"{one}/") for one in kept)
    ]


def _bundle(site: Path, folder: Path, release: str) -> dict[str, bytes]:
    """Path and content of each file of the bundle, printed by the code below `site`."""
    # the four share what the first has compiled
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": ""}
    for name, command, _ in PRINTED:
        to_do = [sys.executable, "-m", "stack.cli", *command, "--out", str(folder / name)]
        done = subprocess.run(to_do, cwd=site, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotReady(
                f"`vllm-watch {' '.join(command)}` failed: {' '.join((done.stderr or done.stdout).split())[-400:]}"
            )
    for name, pattern, _ in COPIED:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for path in sorted(site.glob(pattern)):
            shutil.copyfile(path, folder / name / path.name)
    rows = [f"| `{name}/` | {what} | `vllm-watch {' '.join(command)}` |" for name, command, what in PRINTED]
    rows += [f"| `{name}/` | {what} | copied |" for name, _, what in COPIED]
    (folder / "README.md").write_text(_README.format(version=release, rows="\n".join(rows)))
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _programs(root: Path, listed: Iterable[Path], prefix: str) -> frozenset[str]:
    return frozenset(f"{prefix}{path.as_posix()}" for path in listed if os.access(root / path, os.X_OK))


def _tar(path: Path, files: dict[str, bytes], when: int, programs: frozenset[str]) -> Path:
    """A packed archive that says nothing of who made it, where or when."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=when, filename="") as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(files[name]), when, 0o755 if name in programs else 0o644
            tar.addfile(entry, io.BytesIO(files[name]))
    path.write_bytes(packed.getvalue())
    return path


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit 0: made; 2: there can be no release of this tree, and why."""
    asked = argparse.ArgumentParser(prog="python -m tools.release", description="Make a release of this tree.")
    asked.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="where to; what is there is replaced (default: dist)"
    )
    asked.add_argument(
        "--force", action="store_true", help="also where something stands against it: to try, not to publish"
    )
    options = asked.parse_args(arguments)
    reasons = why_not(ROOT)
    if options.out.exists() and not options.out.is_dir():
        sys.stderr.write(f"release: {options.out} is a file; name a folder with --out\n")
        return 2
    if options.out.exists() and any(options.out.iterdir()) and not (options.out / "SHA256SUMS").is_file():
        sys.stderr.write(f"release: {options.out} holds other things than a release; name another folder with --out\n")
        return 2
    for reason in reasons:
        sys.stderr.write(f"release: {reason}\n")
    if reasons and not options.force:
        sys.stderr.write("release: nothing was made; --force makes it all the same\n")
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = build(ROOT, Path(folder) / "dist", epoch(ROOT))
            shutil.rmtree(options.out, ignore_errors=True)
            shutil.copytree(made[0].parent, options.out)
    except (NotReady, OSError) as error:
        sys.stderr.write(f"release: {error}\n")
        return 2
    for path in sorted(options.out.iterdir()):
        sys.stdout.write(f"{path.stat().st_size:>10,}  {path.name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
