"""`make release`: the same bytes each time, complete, and what it holds works. Versions are told the same
everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import warnings
from pathlib import Path

import pytest
import yaml

from exporters.compat import check
from stack import render as rendering
from stack.lab.install import engine
from stack.reference.upgrades import releases
from tools import engine_releases, release
from tools.import_graph import PACKAGES

ROOT = Path(__file__).parents[2]
WHEN = 1_700_000_000
VERSION = release.version(ROOT)
NAME = f"vllm_watch-{VERSION}"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "dist"
    release.build(ROOT, folder, WHEN)
    return folder


@pytest.fixture(scope="module")
def unpacked(made: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(made / f"{NAME}.tar.gz", folder)
    return folder / NAME


def test_release_contents_and_checksums(made: Path):
    """A release holds a wheel the source an image context and a bundle and their sums."""
    expected = {
        f"{NAME}-py3-none-any.whl",
        f"{NAME}.tar.gz",
        f"vllm-watch-image-{VERSION}.tar.gz",
        f"vllm-watch-bundle-{VERSION}.tar.gz",
    }
    sums = dict(reversed(line.split("  ")) for line in (made / "SHA256SUMS").read_text().splitlines())
    assert expected == set(sums) == {path.name for path in made.iterdir()} - {"SHA256SUMS"}
    assert sums == {name: hashlib.sha256((made / name).read_bytes()).hexdigest() for name in sums}


def test_unpacked_source_makes_the_same_release(made: Path, unpacked: Path, tmp_path):
    """In another folder, without git, by someone with another umask: so the source is whole, and anyone can check what
    we publish."""
    before = os.umask(0o077)
    try:
        release.build(unpacked, tmp_path / "dist", WHEN)
    finally:
        os.umask(before)
    assert (made / "SHA256SUMS").read_text() == (tmp_path / "dist" / "SHA256SUMS").read_text()


def test_the_source_is_the_whole_tree(unpacked: Path):
    there = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    assert set(release.sources(ROOT)) | {Path("PKG-INFO")} == there
    assert {
        Path(name)
        for name in ("Makefile", ".ci/run", "tests/conftest.py", "requirements/run.txt", "docs/internals/release.md")
    } <= there


def test_an_archive_says_nothing_of_who_made_it(made: Path):
    for path in made.glob("*.tar.gz"):
        with tarfile.open(path) as tar:
            entries = tar.getmembers()
        assert {(WHEN, 0, 0, "", "")} == {(e.mtime, e.uid, e.gid, e.uname, e.gname) for e in entries}
        assert all(name.split("/")[0] not in ("", "..") for name in (e.name for e in entries))


def test_wheel_runs_beside_pinned_dependencies(made: Path, tmp_path):
    """The dependencies are those that are installed here; the index is not asked."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    shutil.unpack_archive(made / f"{NAME}-py3-none-any.whl", site, "zip")
    inside = site / "vllm_watch/_app"
    ours = [path for path in release.sources(ROOT) if path.parts[0] in PACKAGES]
    assert {"gateway.yaml", "report.html", "report.md", "overview.json", "page.yaml"} <= {path.name for path in ours}
    changed = [path for path in ours if (ROOT / path).read_bytes() != (inside / path).read_bytes()]
    assert [] == changed
    (site / "beside.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    run = [tmp_path / "env/bin/python", "-I", "-m", "vllm_watch"]
    assert (
        f"version {VERSION}" in subprocess.run([*run, "--version"], capture_output=True, text=True, check=True).stdout
    )


@pytest.fixture(scope="module")
def things(made: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("things")
    shutil.unpack_archive(made / f"vllm-watch-bundle-{VERSION}.tar.gz", folder)
    return folder / f"vllm-watch-bundle-{VERSION}"


def test_bundle_readme_names_every_folder(things: Path):
    """Every folder of the bundle is told in its readme and is not empty."""
    told = set(re.findall(r"^\| `([a-z/]+)/` \|", (things / "README.md").read_text(), re.MULTILINE))
    assert {name for name, *_ in (*release.PRINTED, *release.COPIED)} == told
    assert all(list((things / name).rglob("*.*")) for name in told)
    rules = {path.name for path in (things / "rules").iterdir() if "\ngroups:\n" in path.read_text()}
    assert rules == {path.name for path in (things / "rules").glob("*.yaml")}, "what the README says of rule_files"


def test_the_boards_of_the_bundle_ask_only_for_series_that_exist(things: Path):
    boards = sorted((things / "boards").rglob("*.json"))
    assert len(boards) > 15
    from exporters.catalogue import EVERYTHING, NEVER_EXISTED

    uses = [use for path in boards for use in check.uses_of_dashboard(path.read_text(), path.name)]
    assert [] == list(check.unknown_metrics(uses, EVERYTHING, NEVER_EXISTED))
    assert {
        json.loads(text)["uid"] for path, text in rendering.files() if path.parts[:2] == ("dashboards", "json")
    } <= {json.loads(path.read_text())["uid"] for path in (things / "boards/full").rglob("*.json")}


@pytest.mark.prometheus
def test_the_rules_of_the_bundle_pass_promtool(things: Path, part):
    rules = sorted(path for path in (things / "rules").rglob("*.y*ml") if "groups:" in path.read_text())
    assert rules
    done = subprocess.run(
        [part("promtool").path, "check", "rules", *rules], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_nothing_of_this_machine_is_in_the_bundle(things: Path):
    marks = (str(ROOT), str(Path.home()) + "/", "/tmp/")
    assert [] == [
        path.name for path in things.rglob("*") if path.is_file() and any(mark in path.read_text() for mark in marks)
    ]


def test_the_image_context_is_what_the_dockerfile_copies(made: Path):
    with tarfile.open(made / f"vllm-watch-image-{VERSION}.tar.gz") as tar:
        names = set(tar.getnames())
    needed = set(re.findall(r"-r (requirements/\S+)", (ROOT / "Dockerfile").read_text())) | {
        "Dockerfile",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    assert needed <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", ".git/"))]


@pytest.fixture
def small(tmp_path) -> Path:
    """A tree that git has, with a version and its section."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-01-02\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_clean_tree_with_its_section_in_the_changelog_is_ready(small: Path):
    assert [] == release.why_not(small)


def test_a_changed_tree_is_refused_with_the_file(small: Path):
    (small / "new.py").write_text("")
    (reason,) = release.why_not(small)
    assert re.search(r"\b1 files .*\bnew\.py:", reason)


def test_a_version_without_its_section_is_refused(small: Path):
    (small / "pyproject.toml").write_text('[project]\nversion = "1.2.4"\n')
    assert "CHANGELOG.md has no section `## [1.2.4] - YYYY-MM-DD`" in release.why_not(small)[1]


def test_a_section_without_its_date_is_refused(small: Path):
    (small / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3]\n")
    assert "CHANGELOG.md has no section" in release.why_not(small)[1]


def test_changelog_has_the_sections_in_order():
    """Below each version, newest first, `Added` to `Security`, each at most once and never empty."""
    known = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for version in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        assert re.match(r"\[(Unreleased|\d+\.\d+\.\d+)\]( - \d{4}-\d\d-\d\d)?\n", version)
        title, *sections = re.split(r"^### ", version, flags=re.MULTILINE)
        names = [section.splitlines()[0] for section in sections]
        assert [name for name in known if name in names] == names, title
        assert all(re.search(r"^- ", section, re.MULTILINE) for section in sections)


def test_a_folder_with_other_things_is_not_replaced(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years")
    assert 2 == release.main(["--out", str(tmp_path), "--force"])
    assert f"{tmp_path} holds other things" in capsys.readouterr().err
    assert "years" == (tmp_path / "thesis.tex").read_text()


@pytest.mark.parametrize(("told", "year"), [("tomorrow", None), ("-1", None), ("99999999999", None), (str(WHEN), WHEN)])
def test_impossible_archive_date_is_refused(told, year, tmp_path, capsys, monkeypatch):
    """A date that no archive can hold is refused in one sentence."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", told)
    if year:
        assert year == release.epoch(ROOT)
        return
    assert 2 == release.main(["--out", str(tmp_path / "dist"), "--force"])
    assert f"release: SOURCE_DATE_EPOCH is '{told}': give whole seconds" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, capsys):
    (tmp_path / "dist").write_text("years")
    assert 2 == release.main(["--out", str(tmp_path / "dist"), "--force"])
    assert f"{tmp_path / 'dist'} is a file" in capsys.readouterr().err


# What is named in several places, and must be named alike. Whoever moves a version moves it in all of them:
# docs/internals/release.md.
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
README = (ROOT / "README.md").read_text()
STATUS = (ROOT / "docs/internals/test-status.md").read_text()


def tag(service: str) -> str:
    return re.sub(r".*:-|\}$", "", COMPOSE[service]["image"]).rpartition(":")[2].removeprefix("v")


def test_one_vllm_version_everywhere():
    """VLLM is one version in compose lab golden pages and readme."""
    assert engine.VLLM == tag("vllm")
    files = [
        ROOT / "docker-compose.yml",
        *(ROOT / "stack/deploy").glob("compose.*.yml"),
        ROOT / "stack/deploy/preflight.sh",
    ]
    named = {file.name: set(re.findall(r"vllm/vllm-openai(?:-cpu)?:v([0-9.]+)", file.read_text())) for file in files}
    assert {engine.VLLM} == set().union(*named.values()), named
    assert f"| {engine.VLLM} | tested live (CPU build)" in STATUS
    assert ".".join(engine.VLLM.split(".")[:2]) in README
    assert list((ROOT / "tests/golden").glob(f"{engine.VLLM}-*.prom"))
    assert f"## vLLM {'.'.join(engine.VLLM.split('.')[:2])}" in (ROOT / "docs/reference/upgrades.md").read_text()


def test_releases_after_the_catalogued_one_are_found():
    """Whatever pip lists: patches of a known release are none, and 0.100 comes after 0.99."""
    listed = engine_releases.read("vllm (0.100.1)\nAvailable versions: 0.100.1, 0.99.0, 0.33.2, 0.33.0rc1, 0.32.0\n  X")
    assert ["0.100.1", "0.99.0", "0.33.2", "0.32.0"] == listed
    assert ["0.99", "0.100"] == engine_releases.newer(listed, "0.33")
    assert [] == engine_releases.newer([], "0.33") == engine_releases.newer(listed, "0.100")
    assert [] == engine_releases.read("ERROR: No matching distribution found for vllm\n")


def test_a_release_that_is_not_catalogued_is_reported(monkeypatch):
    """A new release is no fault of this checkout: what PyPI has is a warning, and so is no answer nothing."""
    monkeypatch.setattr(engine_releases, "published", lambda: ["999.0.0"])
    assert re.search(rf"\bvLLM 999\.0 .*\b{re.escape(releases()[0])}:", engine_releases.report())
    monkeypatch.undo()
    if sentence := engine_releases.report():
        warnings.warn(sentence, stacklevel=1)


def test_an_index_that_does_not_answer_is_no_release(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert "" == engine_releases.report()


def test_one_version_of_each_service_everywhere():
    """Prometheus Alertmanager and collector are one version in compose and readme."""
    assert f"Prometheus {tag('prometheus')}" in README
    assert f"Alertmanager {tag('alertmanager')}" in README
    assert f"Collector core {'.'.join(tag('otelcol').split('.')[:2])}" in README


@pytest.mark.collector
def test_test_collector_is_of_the_image_line(part):
    """The collector that the tests run is of the line of the image."""
    assert tag("otelcol").split(".")[:2] == part("otelcol").version.split(".")[:2]


def test_make_image_builds_the_image_that_compose_names():
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "image", "ARGS="], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f'docker build --tag "vllm-watch:{VERSION}"  .' == done.stdout.strip()


def test_our_version_is_one_in_pyproject_and_compose():
    assert {f"vllm-watch:{VERSION}"} == {service["image"] for service in COMPOSE.values() if "build" in service}
