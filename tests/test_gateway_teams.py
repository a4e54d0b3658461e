"""Teams, keys, and the words for mistakes in the gateway's two files."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from stack.config import BadConfig, parse
from stack.gateway import GatewayConfig, make_key, run
from stack.gateway.ids import request_id, trace
from stack.gateway.teams import TeamsFile, hashed, teams_of


def made(text: str, anonymous: str | None = None):
    return teams_of(parse(text, TeamsFile, "teams.yaml"), "teams.yaml", anonymous)


def test_a_made_key_belongs_to_its_team():
    key, entry = make_key("demo")
    assert key.startswith("vw-demo-")
    assert hashed(key) == entry
    assert key != make_key("demo")[0]
    teams = made(f'teams: {{demo: {{keys: ["{entry}"]}}}}')
    assert ("demo", None, None) == (teams.of(key), teams.of(key + "x"), teams.of(None))


def test_a_team_may_have_an_old_and_a_new_key():
    teams = made(f'teams: {{demo: {{keys: ["{hashed("a")}", "{hashed("b")}"]}}, other: {{}}}}')
    assert ("demo", "demo", None) == (teams.of("a"), teams.of("b"), teams.of("other"))


def test_a_wrong_key_is_never_anonymous():
    teams = made("teams: {lab: {}}", anonymous="lab")
    assert ("lab", None, None) == (teams.of(None), teams.of("EMPTY"), teams.of(""))


@pytest.mark.parametrize(
    ("text", "anonymous", "words"),
    [
        ("teams: {demo: {keys: [vw-demo-secret]}}", None, "teams.yaml: teams.demo.keys[0] is no hash of a key"),
        ("teams: {Demo Team: {}}", None, "'Demo Team' is no team name"),
        ("teams: {__unknown__: {}}", None, "is no team name"),
        (f"teams: {{a: {{keys: ['{hashed('x')}']}}, b: {{keys: ['{hashed('x')}']}}}}", None, "teams.b.keys[0] is also a key of team a"),
        ("teams: {a: {}}", "b", "anonymous_team: b is not among the teams of teams.yaml"),
        ("teams: {a: {kes: []}}", None, "did you mean keys?"),
        ("teems: {}", None, "did you mean teams?"),
    ],
)
def test_mistakes_in_teams_name_the_place(text: str, anonymous: str | None, words: str):
    with pytest.raises(BadConfig) as caught:
        made(text, anonymous)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "upstream is missing"),
        ("upstream: localhost", "'localhost' is no engine's address"),
        ("upstream: http://h:1/v1", "is no engine's address"),
        ("{upstream: 'http://h:1', listen: ':8000'}", "':8000' is no address"),
        ("{upstream: 'http://h:1', limits: {body_byte: 1}}", "limits.body_byte is unknown; did you mean body_bytes?"),
        ("{upstream: 'http://h:1', timeouts: {drain_s: 0}}", "more than 0"),
    ],
)
def test_mistakes_in_the_configuration_name_the_place(text: str, words: str):
    with pytest.raises(BadConfig) as caught:
        parse(text, GatewayConfig, "gateway.yaml")
    assert words in str(caught.value)


def test_a_missing_teams_file_is_one_sentence_and_exit_code_1(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "gateway.yaml").write_text("upstream: http://127.0.0.1:9\nlisten: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\n")
    with caplog.at_level(logging.ERROR):
        assert 1 == run(tmp_path / "gateway.yaml")
    assert [f"{tmp_path}/teams.yaml cannot be read: No such file or directory"] == [record.getMessage() for record in caplog.records]


def test_the_process_serves_reopens_its_log_and_stops_on_sigterm(tmp_path: Path, free_port: Callable[[], int]):
    """Paths are taken from the configuration file's folder; no engine is needed to start."""
    listen, port = f"127.0.0.1:{free_port()}", free_port()
    (tmp_path / "teams.yaml").write_text("teams: {demo: {}}")
    (tmp_path / "gateway.yaml").write_text(f"upstream: http://127.0.0.1:{port}\nlisten: {listen}\nmetrics_listen: 127.0.0.1:{free_port()}\n")
    code = "import sys, pathlib; from stack.gateway import run; sys.exit(run(pathlib.Path(sys.argv[1])))"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "gateway.yaml")], cwd=Path(__file__).parent.parent)
    try:
        wait_for(lambda: urllib.request.urlopen(f"http://{listen}/-/healthy", timeout=1).read() == b"ok\n")
        log = tmp_path / "requests.jsonl"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://{listen}/v1/chat/completions", data=b"{}", timeout=5)
        wait_for(lambda: log.read_bytes().count(b"no_key") == 1)
        log.rename(tmp_path / "old")
        os.kill(process.pid, signal.SIGHUP)
        wait_for(log.exists)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(10)
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_ids_that_could_break_a_log_or_a_header_are_replaced():
    def fake_hex(size: int) -> str:
        return "f" * 2 * size

    assert "a-1/b" == request_id("a-1/b", fake_hex)
    for bad in (None, "", "a b", "é", "x" * 129, "a\tb", "a\n"):
        assert "f" * 32 == request_id(bad, fake_hex)


@pytest.mark.parametrize(
    ("sent", "continued"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", True),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes-later", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("", False),
        (None, False),
    ],
)
def test_a_trace_is_continued_only_from_a_valid_parent(sent: str | None, continued: bool):
    span = trace(sent, lambda size: "a" * 2 * size)
    assert (continued, "a" * 16) == (span.continued, span.span_id)
    assert span.trace_id == ("0af7651916cd43dd8448eb211c80319c" if continued else "a" * 32)
    assert span.flags == (sent.split("-")[3] if continued and sent else "01")
