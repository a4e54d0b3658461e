"""Shared ground: real parts by name. In CI a missing part is a failure; elsewhere its tests are reported as not run, by
name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from stack.lab import install
from tests.support import parts
from tests.support.engines import Engines
from tests.support.file_times import (  # noqa: F401  # hooks
    parts_used,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
)
from tests.support.past_prometheus import past_prometheus
from tests.support.ports import free_port
from tests.support.real_collector import Arrived, RealCollector, http_server
from tests.support.wait import eventually

GOLDEN = Path(__file__).parent / "golden"
# How long an example takes tells of the machine's other guests, not of us. In CI the examples of a commit are always
# the same, so that a failure is that commit's; the search for new ones goes on wherever else the tests run.
# Of a terminal, which xdist hands to its workers: tables in a pipe have a width of their own.
os.environ.pop("COLUMNS", None)
hypothesis.settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("here")
_used: dict[str, str] = {}
_missing: dict[str, int] = {}


@pytest.fixture(scope="session")
def part() -> Callable[[str], install.InstalledPart]:
    """A real part of the stack, or the test does not run (outside CI), or fails (in CI)."""

    def get(name: str) -> install.InstalledPart:
        found = parts.find(name)
        if found is None:
            _missing[name] = _missing.get(name, 0) + 1
            message = f"{name} is not installed; {parts.remedy(name)}"
            pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
        _used[name] = f"{found.version} ({found.origin})"
        parts_used.add(name)
        return found

    return get


@pytest.fixture(scope="session")
def as_root() -> None:
    """For a Docker engine of one's own: without root a failure in CI, else the tests are reported as not run."""
    if os.geteuid() != 0:
        why = "a Docker engine needs root"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)


@pytest.fixture(scope="session", name="free_port")
def free_port_() -> Callable[[], int]:
    """Return a loopback port that is held until the session ends."""
    return free_port


def pytest_configure(config: pytest.Config) -> None:
    """Import this process's share of the test files first: in a new checkout each process would otherwise compile the
    assertions of all of them, at the same time."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    chosen = {path for argument in config.args for path in _test_files(Path(argument.partition("::")[0]).absolute())}
    chosen -= {Path(path).absolute() for path in config.getoption("ignore") or ()}
    for path in sorted(chosen)[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with contextlib.suppress(Exception):  # which the collection reports
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def _test_files(path: Path) -> Iterator[Path]:
    return path.rglob("test_*.py") if path.is_dir() else iter((path,))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that runs a share of the tests hands over what it has seen."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parts"] = _used, _missing


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    used, missing = getattr(node, "workeroutput", {}).get("parts", ({}, {}))
    _used.update(used)
    for name, count in missing.items():
        _missing[name] = _missing.get(name, 0) + count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("real parts")
    for name, version in sorted(_used.items()):
        terminalreporter.write_line(f"ran:     {name} {version}")
    for name, count in sorted(_missing.items()):
        terminalreporter.write_line(f"missing: {name}; {count} tests did not run")


@pytest.fixture(scope="session")
def real_engines(part, free_port, tmp_path_factory) -> Iterator[Engines]:
    """What starts real vLLMs; none runs before a test asks for it."""
    engines = Engines(
        tmp_path_factory.mktemp("engines"), {name: part(name).path for name in ("engine", "model")}, free_port
    )
    yield engines
    engines.end()


@pytest.fixture(scope="session")
def past(part, tmp_path_factory) -> Iterator[Callable[..., str]]:
    """A real Prometheus that holds the series of an OpenMetrics file; its address. One for all who bring the same.

    release: "-3.12" for the second Prometheus of the tests (tests/support/parts.py)."""
    addresses: dict[tuple[bytes, str], str] = {}
    with contextlib.ExitStack() as servers:

        def serve(page: Path, release: str = "") -> str:
            key = hashlib.sha256(page.read_bytes()).digest(), release
            if key not in addresses:
                folder = tmp_path_factory.mktemp("past")
                server = past_prometheus(lambda name: part(name).path, page, folder, free_port(), release)
                addresses[key] = servers.enter_context(server)
            return addresses[key]

        yield serve


@pytest.fixture(scope="session")
def browser_url(part, tmp_path_factory) -> Iterator[str]:
    """The address of one real Chromium for all files, which playwright connects to."""
    profile = tmp_path_factory.mktemp("chromium")
    command = [
        part("chromium").path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars", "--mute-audio",
        "--force-color-profile=srgb", "--disable-background-timer-throttling", "--disable-renderer-backgrounding",
        "--disable-backgrounding-occluded-windows", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        "--remote-debugging-port=0", "about:blank",
    ]  # fmt: skip
    with (profile / "output").open("w") as output:
        browser = subprocess.Popen(command, stdout=output, stderr=output)
    announced = profile / "DevToolsActivePort"
    try:
        yield eventually(
            lambda: announced.exists() and f"http://127.0.0.1:{int(announced.read_text().split()[0])}",
            "the port of Chromium",
        )
    finally:
        browser.terminate()
        browser.wait(60)


@pytest.fixture(scope="module")
def chromium(browser_url) -> Iterator[Any]:
    """A connection to the browser. Of one file: while playwright's loop runs, no test can have a loop of its own."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.connect_over_cdp(browser_url)
        yield browser
        browser.close()


@pytest.fixture
def new_tab(chromium) -> Iterator[Callable[..., SimpleNamespace]]:
    """Opens a tab; whatever the browser complains of in it fails the test, as does a dialog, which would be a script
    that somebody else wrote."""
    tabs: list[SimpleNamespace] = []

    def open_(**settings: Any) -> SimpleNamespace:
        context = chromium.new_context(**settings)
        context.set_default_timeout(120_000)
        page, complaints = context.new_page(), list[str]()
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        tabs.append(SimpleNamespace(page=page, context=context, complaints=complaints))
        return tabs[-1]

    yield open_
    for tab in tabs:
        tab.context.close()
        assert [] == tab.complaints


@pytest.fixture
def collector(part, tmp_path, free_port):
    with http_server(lambda _: (200, {"Content-Type": "application/json"}, b"{}")) as (store, requests):
        real = RealCollector(part("otelcol").path, tmp_path, store, free_port)
        real.arrived = Arrived(requests)  # type: ignore[attr-defined]
        real.start()
        yield real
        real.end()
