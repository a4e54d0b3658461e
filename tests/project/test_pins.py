"""requirements/*.txt: what is installed is what pyproject.toml asks for, whole, by version and by hash; and what is
known against it is told."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

from tools import audit, pins

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = {name: (pins.FOLDER / f"{name}.txt").read_text() for name in pins.SETS}
PINS = {name: {pin.name: pin for pin in pins.read(text, name)} for name, text in TEXT.items()}
each_set = pytest.mark.parametrize("name", pins.SETS)
# The systems that the pins are for; a marker is asked with these.
SYSTEMS = [
    {
        "python_version": f"3.{minor}",
        "python_full_version": f"3.{minor}.1",
        "sys_platform": "linux",
        "platform_machine": machine,
        "extra": "",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for minor in (11, 12, 13)
    for machine in ("x86_64", "aarch64")
]


@each_set
def test_dependencies_are_pinned_to_allowed_versions(name):
    """Every line of pyproject is pinned to a version that it allows."""
    for requirement in map(Requirement, pins.wanted(PROJECT, pins.SETS[name])):
        pin = PINS[name].get(pins.normal(requirement.name))
        assert pin, f"requirements/{name}.txt lacks {requirement.name}: run `make pins`"
        assert requirement.specifier.contains(pin.version), (
            f"{pin.name} {pin.version} is not {requirement}: run `make pins`"
        )


@pytest.mark.parametrize("name", ["run", "dev", "build"])
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: f"{s['python_version']} {s['platform_machine']}")
def test_the_pins_are_complete(name, system):
    """Whatever a pinned package needs on that system is pinned for it too, in a version that it allows; as the
    installed metadata tell."""
    here = {
        pin.name: pin.version
        for pin in pins.read(TEXT[name], name)  # one package may have several versions, each with a marker
        if not pin.marker or Marker(pin.marker).evaluate(system)
    }
    missing = [
        f"{owner} needs {requirement}"
        for owner in here
        for requirement in map(Requirement, needed(owner))
        if (requirement.marker is None or requirement.marker.evaluate(system))
        and not requirement.specifier.contains(Version(here.get(pins.normal(requirement.name), "0")), prereleases=True)
    ]
    assert [] == missing


def needed(name: str) -> list[str]:
    """What the installed distribution requires; nothing for one that only other systems have."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def test_what_runs_the_tests_is_what_runs_the_command():
    """dev.txt is installed over run.txt: the same versions, or the tests would prove another program."""
    assert {name: pin.version for name, pin in PINS["run"].items()}.items() <= {
        name: pin.version for name, pin in PINS["dev"].items()
    }.items()
    assert {name: pin.version for name, pin in PINS["build"].items()}.items() <= {
        name: pin.version for name, pin in PINS["dev"].items()
    }.items()


@each_set
def test_a_file_of_pins_holds_no_address_and_no_path(name):
    text = re.sub(r"^# Printed by.*$", "", TEXT[name], count=1, flags=re.MULTILINE)
    assert [] == re.findall(r"https?:|file:|--find-links|--index|-f |@ |/(?:tmp|root|home|opt|work)\b", text)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("--index-url https://example.org/simple", "line 1: '--index-url"),
        ("aiohttp>=3", "line 1: 'aiohttp>=3' "),
        ("aiohttp==3.14.5", "line 1: 'aiohttp==3.14.5' "),
        ("aiohttp==3.14.5 \\\nclick==8 \\\n    --hash=sha256:" + "0" * 64, "run.txt: aiohttp "),
        ("aiohttp @ file:///tmp/aiohttp.whl", "line 1: 'aiohttp @ file:///tmp/aiohttp.whl' "),
    ],
)
def test_anything_else_in_a_file_of_pins_is_refused_by_its_line(line, place):
    with pytest.raises(pins.BadPins, match=re.escape(place)):
        pins.read(line, "run.txt")


def test_make_installs_nothing_without_a_hash():
    """Every pip of the Makefile and of the image is told so."""
    for file in ("Makefile", "Dockerfile"):
        text = (ROOT / file).read_text().replace("\\\n", " ")
        installs = re.findall(r"[^;&\n]*-r requirements/[^;&\n]*", text)
        assert installs
        assert all("--require-hashes" in line or "$(HASHED)" in line or "$(PIP)" in line for line in installs)
    assert "--require-hashes" in re.search(r"^HASHED := .*$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]


def test_every_licence_may_stand_beside_ours():
    told = audit.licences(list(PINS["run"].values()))
    assert len(told) > 25
    assert [] == [one for one in told if not one.fine]


@pytest.mark.parametrize(
    ("said", "fine"),
    [
        ("MIT", True),
        ("", False),
        ("GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("Apache-2.0 AND (MIT OR GPL-2.0-only)", False),
        ("Apache Software License; MIT License", True),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
    ],
)
def test_licence_needs_one_good_alternative(said, fine):
    """A licence is fine when all of it is or one of its alternatives."""
    assert fine is audit.Licence("x", said).fine


def fake_pip_audit(folder: Path, report: object, status: int = 0) -> str:
    """Stands for pip-audit, whose service cannot be asked in a test."""
    program = folder / "pip-audit"
    program.write_text(
        f"#!/bin/sh\ncat <<'END'\n{report if isinstance(report, str) else json.dumps(report)}\nEND\nexit {status}\n"
    )
    program.chmod(0o755)
    return str(program)


FINE = {"name": "aiohttp", "version": "3.14.5", "vulns": []}
KNOWN = {"name": "aiohttp", "version": "3.14.5", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.14.6"]}]}
UNASKED = {"name": "aiohttp", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("rows", "status", "fact"),
    [
        ([FINE], 0, "none known"),
        ([FINE, KNOWN], 1, r"aiohttp 3\.14\.5: PYSEC-1, fixed in 3\.14\.6"),
        ([FINE, UNASKED], 2, "not audited.* 1 packages.*aiohttp$"),
    ],
)
def test_audit_fails_on_an_unknown_package(rows, status, fact, tmp_path):
    """An audit passes only when the service knew every package."""
    got, told = audit.vulnerabilities(fake_pip_audit(tmp_path, {"dependencies": rows}), Path("run.txt"))
    assert status == got
    assert re.search(fact, told)


def test_an_audit_that_could_not_ask_says_so_and_fails(tmp_path):
    got, told = audit.vulnerabilities(fake_pip_audit(tmp_path, "", 1), Path("run.txt"))
    assert (2, True) == (got, told.endswith("last words: nothing"))
    got, told = audit.vulnerabilities("/nowhere/pip-audit", Path("run.txt"))
    assert (2, True) == (got, "is missing" in told)


@contextlib.contextmanager
def fake_osv(known: dict[str, dict[str, object]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Stands for an advisory service that speaks OSV, which cannot be reached in a test: its address, and the versions
    that it was asked for.

    known: package -> what it says against every version of it."""
    asked: dict[str, str] = {}

    class Osv(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = query["package"]["name"]
            asked[name] = query["version"]
            body = json.dumps({"vulns": [known[name]]} if name in known else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Of no use here."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Osv) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/query", asked
        finally:
            server.shutdown()
            thread.join()


def make_audit(osv_url: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--silent", "--no-print-directory", "audit", f"ARGS=--osv-url {osv_url}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_make_audit_asks_for_every_pin_and_tells_what_is_known():
    """The target as it is typed, with the real pip-audit."""
    here = {pin.name: pin.version for pin in PINS["run"].values() if not pin.marker or Marker(pin.marker).evaluate()}
    with fake_osv({}) as (url, asked):
        done = make_audit(url)
    assert (0, "vulnerabilities: none known") == (done.returncode, done.stdout.splitlines()[-1]), (
        done.stdout + done.stderr
    )
    assert here == asked
    advisory = {
        "id": "PYSEC-2099-1",
        "affected": [
            {
                "package": {"name": "aiohttp", "ecosystem": "PyPI"},
                "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
            }
        ],
    }
    with fake_osv({"aiohttp": advisory}) as (url, _):
        done = make_audit(url)
    assert f"vulnerabilities: aiohttp {here['aiohttp']}: PYSEC-2099-1, fixed in 99.0" == done.stdout.splitlines()[-1]
    assert "Error 1" in done.stderr
    done = make_audit(url)  # nobody is there any more
    told = done.stdout.splitlines()[-1]
    assert told.startswith("vulnerabilities: not audited")
    assert (True, True) == ("refused" in told, "Error 2" in done.stderr)
