"""The installed wheel, without a checkout: complete, beside packages of the same names, and able to start its
children."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import installed
from tests.support.installed import InstalledApp
from tools import release
from tools.import_graph import PACKAGES

ROOT = Path(__file__).parents[2]
NOTHING = "http://127.0.0.1:9"  # the discard port: nobody answers


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    return installed.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def app(wheel: Path, tmp_path_factory) -> InstalledApp:
    """The wheel, and after it another distribution with packages of our names."""
    folder = tmp_path_factory.mktemp("app")
    return installed.install(folder / "env", wheel, installed.foreign_wheel(folder, PACKAGES))


def test_the_wheel_adds_one_name(wheel: Path):
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"vllm_watch", f"vllm_watch-{release.version(ROOT)}.dist-info"} == top


def test_the_wheel_is_complete(wheel: Path):
    """Everything tracked below our packages is in it: generated files, pages, deployment files."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = [path.as_posix() for path in release.sources(ROOT) if path.parts[0] in (*PACKAGES, "vllm_watch")]
    assert len(tracked) > 300
    places = {path if path.startswith("vllm_watch/") else f"vllm_watch/_app/{path}" for path in tracked}
    assert set() == places - inside


def test_foreign_packages_are_really_there(app: InstalledApp, tmp_path: Path):
    """Without the launcher the environment has the foreign packages; else the tests below would show nothing."""
    for name in PACKAGES:
        done = app.run(app.python, "-c", f"import {name}", cwd=tmp_path)
        assert f"the foreign {name} was imported" in done.stderr


def test_installed_files_are_the_generated_ones(app: InstalledApp, tmp_path: Path):
    done = app.run(app.command, "render", "--check", cwd=tmp_path)
    assert (0, "") == (done.returncode, done.stderr)
    assert re.fullmatch(rf".* {re.escape(str(app.site))}/vllm_watch/_app .*up to date\n", done.stdout)


# command, its exit status, and what it prints or writes
COMMANDS = [
    (("--version",), 0, f"vllm-watch, version {release.version(ROOT)}"),
    (("alerts", "export", "--out", "o"), 0, "o/page.yaml"),
    (("kubernetes", "export", "--out", "o", "--board"), 0, "o/base/kustomization.yaml"),
    (("runbook", "VLLMTTFTHigh"), 0, "# VLLMTTFTHigh"),
    (("doctor", "--before", "before.prom", "--after", "after.prom", "--seconds", "30"), 0, "tiny"),
    (("doctor", NOTHING, "--for", "1s"), 2, NOTHING),
    (("cost", "--log", "requests.jsonl"), 0, "search"),
    (("capacity", "--model", "config.json", "--gpu", "H200"), 0, "H200"),
    (("bench", "list"), 0, "rag"),
    (("lab", "install", "--help"), 0, "--every"),
]


@pytest.mark.parametrize(
    ("words", "status", "shown"), COMMANDS, ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else ""
)
def test_commands_run_beside_foreign_packages(words, status, shown, app: InstalledApp, tmp_path: Path):
    for name, source in (("before", "0.32.0-before"), ("after", "0.32.0-after-probe")):
        (tmp_path / f"{name}.prom").write_text((ROOT / f"tests/golden/{source}.prom").read_text())
    (tmp_path / "requests.jsonl").write_text(request_line())
    (tmp_path / "config.json").write_text((ROOT / "tests/golden/configs/Llama-3.1-8B-Instruct.json").read_text())
    done = app.run(app.command, *words, cwd=tmp_path)
    assert status == done.returncode, done.stdout + done.stderr
    assert shown in done.stdout + done.stderr
    assert shown.startswith("o/") is False or (tmp_path / shown).is_file()


def request_line() -> str:
    fields = {"ts": "2026-10-01T12:00:00.000Z", "request_id": "1", "team": "search", "priority": "interactive"}
    fields |= {"model": "tiny", "upstream": "http://127.0.0.1:8001", "status": 200, "outcome": "ok"}
    fields |= {"prompt_tokens": 10, "completion_tokens": 5, "e2e_ms": 100.0, "queue_ms": 0.0}
    return json.dumps(fields) + "\n"


def test_the_module_runs_like_the_command(app: InstalledApp, tmp_path: Path):
    run = (app.python, "-I", "-m", "vllm_watch")
    assert f"version {release.version(ROOT)}" in app.run(*run, "--version", cwd=tmp_path).stdout


def test_board_serves_from_the_wheel(app: InstalledApp, tmp_path: Path, free_port: Callable[[], int]):
    """Templates, scripts and runbooks are found; Prometheus is not there and the page says so."""
    listen = f"127.0.0.1:{free_port()}"
    arguments = [app.command, "board", "--prometheus", NOTHING, "--listen", listen]
    with subprocess.Popen(arguments, cwd=tmp_path, env=app.environment(), stderr=subprocess.PIPE, text=True) as board:
        try:
            assert board.stderr is not None
            assert f"boards at http://{listen}/" in board.stderr.readline()
            assert "<html" in text_of(f"http://{listen}/")
            assert "VLLMTTFTHigh" in text_of(f"http://{listen}/runbooks")
        finally:
            board.terminate()


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        text: str = reply.read().decode()
        return text


CHILDREN = """
import asyncio, json, sys
import vllm_watch
vllm_watch.use_application()
from exporters.gpu.source import GpuSource
from exporters.gpu.readings import GpuUnavailable
from stack.gateway.large_bodies import HUGE_BYTES, LargeBodies

async def main():
    bodies = LargeBodies()
    body = json.dumps({"model": "tiny", "prompt": "a" * (HUGE_BYTES + 1)}).encode()
    await bodies.read("a", "/v1/completions", body)
    read_apart = bodies._process is not None
    bodies.close()
    try:
        async with GpuSource(smi=("/nonexistent/nvidia-smi",)) as gpus:
            await gpus.read(20)
            reason = "read"
    except GpuUnavailable as error:
        reason = error.reason
    print(json.dumps([read_apart, reason]))

asyncio.run(main())
"""


def test_children_start_from_the_wheel(app: InstalledApp, tmp_path: Path):
    """The processes for large bodies and for NVML need neither PYTHONPATH nor a folder."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    done = app.run(app.python, "-P", "-c", CHILDREN, cwd=tmp_path, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert [True, "no_driver"] == json.loads(done.stdout or "[]"), done.stderr


LAB = """
import json
import vllm_watch
vllm_watch.use_application()
from pathlib import Path
from stack.lab import plan
config = plan.LabConfig(Path("lab"), {name: Path("/x") for name in ("prometheus", "alertmanager")}, engine_url="http://127.0.0.1:9")
print(json.dumps({one.name: one.argv for one in plan.processes(config)}))
"""


def test_the_lab_starts_our_processes_by_the_launcher(app: InstalledApp, tmp_path: Path):
    done = app.run(app.python, "-P", "-c", LAB, cwd=tmp_path)
    assert "" == done.stderr
    ours = {name: argv for name, argv in json.loads(done.stdout).items() if argv[0] == str(app.python)}
    assert {"gateway", "sidecar", "board"} <= set(ours)
    for name, argv in ours.items():
        started = app.run(*argv[: argv.index(name)], name, "--help", cwd=tmp_path)
        assert started.stdout.startswith(f"Usage: vllm-watch {name}"), started.stderr


def test_removing_the_foreign_package_leaves_ours(wheel: Path, tmp_path: Path):
    """In either order of installation; pip removes files that two distributions own."""
    foreign = installed.foreign_wheel(tmp_path, PACKAGES)
    for place, order in (("first", (foreign, wheel)), ("last", (wheel, foreign))):
        app = installed.install(tmp_path / place, *order)
        installed.uninstall(app, "foreign")
        assert 0 == app.run(app.command, "alerts", "export", "--out", "o", cwd=tmp_path).returncode


def composed() -> list[tuple[str, list[str]]]:
    """File and words of every command of a compose file that runs a Python module."""
    paths = (ROOT / "docker-compose.yml", *sorted((ROOT / "stack/deploy").rglob("*.y*ml")))
    runs = re.compile(r"\[(?:CMD, )?python3?, -m, ([^\]]+)\]")
    return [(path.name, yaml.safe_load(f"[{words}]")) for path in paths for words in runs.findall(path.read_text())]


def test_compose_runs_modules_by_the_launcher(wheel: Path):
    inside = set(zipfile.ZipFile(wheel).namelist())
    runs = composed()
    assert len(runs) >= 8
    assert {"vllm_watch.module"} == {words[0] for _, words in runs}
    assert set() == {f"vllm_watch/_app/{words[1].replace('.', '/')}.py" for _, words in runs} - inside
