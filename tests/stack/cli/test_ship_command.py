"""The file of `vllm-watch ship`, and mistakes in it and in options."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from exporters.dataset.objects import S3Access
from exporters.dataset.ship_config import ShipConfig
from stack import config
from stack.cli.ship import ship
from stack.root import ROOT

SAMPLE = ROOT / "stack/deploy/ship.yaml"


def test_the_sample_file_names_every_option_with_its_default():
    settings = config.ship(SAMPLE)
    text = SAMPLE.read_text()
    for struct, left_out in ((ShipConfig, set()), (S3Access, {"profile", "virtual_hosted", "timeout_s", "retry_s"})):
        assert set() == {name for name in struct.__struct_fields__ if name not in text} - left_out
    defaults = {field.name: field.default for field in msgspec.structs.fields(ShipConfig)}
    written = yaml.safe_load(text)
    assert {name: defaults[name] for name in written if defaults[name] is not msgspec.NODEFAULT} == {
        name: value for name, value in written.items() if defaults[name] is not msgspec.NODEFAULT
    }
    assert settings.state == str(SAMPLE.parent / "ship-state"), "paths are taken from the folder of the file"


def test_a_writer_may_have_the_name_of_its_machine(tmp_path: Path):
    file = tmp_path / "ship.yaml"
    file.write_text(SAMPLE.read_text().replace("writer: gateway-0", "writer: hostname"))
    assert socket.gethostname() == config.ship(file).writer


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("writter: a", r"line \d+: writter .*mean writer\?"),
        ("s3: {endpoint: 'http://store.example.org'}", r"line \d+: s3: .*'http://store\.example\.org' .*https://"),
        ("seal_s: 0", r"line \d+: seal_s .*than 0"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, line: str, facts: str):
    file = tmp_path / "ship.yaml"
    name = line.partition(":")[0]
    kept = [one for one in SAMPLE.read_text().splitlines() if not one.startswith(f"{name}:")]
    file.write_text("\n".join([*kept, line]) + "\n")
    done = CliRunner().invoke(ship, ["run", "--config", str(file)])
    assert 2 == done.exit_code
    assert re.search(rf"{file}, {facts}", done.output), done.output


@pytest.mark.parametrize(
    ("options", "facts"),
    [(["--day", "yesterday"], "--day 'yesterday' .*2026-11-25"), ([], "--prometheus URL, .*`prometheus`")],
)
def test_mistakes_in_options_are_named(options: list[str], facts: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_WATCH_PROMETHEUS_URL", raising=False)
    done = CliRunner().invoke(ship, ["verify", "--config", str(SAMPLE), *options])
    assert 2 == done.exit_code
    assert re.search(facts, done.output), done.output


def test_without_its_libraries_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "exporters.dataset.parquet", raising=False)
    done = CliRunner().invoke(ship, ["verify", "--config", str(SAMPLE)])
    assert 2 == done.exit_code
    assert "pip install 'vllm-watch[data]'" in done.output
