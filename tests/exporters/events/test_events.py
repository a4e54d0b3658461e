"""What was changed, told once and kept: the file, the sidecar's door to it, the copies in Grafana, and the two
commands. Grafana is FakeGrafana."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alerts import latency
from alerts.settings import DEFAULTS
from dashboards import annotation_copies, annotations, grafana_client
from dashboards.registry import boards
from exporters.catalogue import sidecar as sidecar_series
from exporters.engine import view
from exporters.events import http, log
from exporters.events.log import Conflict, NewEvent, TuningEvent, UnknownEvent
from exporters.sidecar import Sidecar
from exporters.sidecar_config import SidecarConfig
from stack import config
from stack.cli import main
from stack.cli.events import FILE_VARIABLE
from stack.tuning import annotate
from tests.support.fake_grafana import EDITOR, VIEWER, FakeGrafana
from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
TOKEN = "correct-horse-battery"
NOW_S = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _ground(monkeypatch, tmp_path):
    """No lab of this machine, no Grafana of this environment; proxies would not find our loopback."""
    monkeypatch.setenv("VLLM_WATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    for name in (FILE_VARIABLE, grafana_client.TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "events.jsonl"


def change(what: str = "w", at_s: float = 1.0, **more: Any) -> TuningEvent:
    return TuningEvent(**{"at_s": at_s, "kind": "change", "what": what} | more)


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line, each of which is whole."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the file


def test_region_opens_and_closes_by_id(path):
    """A region is opened and closed by lines of one id and the newest holds."""
    opened, written = log.record(path, change("canary", 10.0, id="c", open=True))
    assert (True, None) == (written, opened.end_s)
    ended, closed = log.close(path, "c", 25.5)
    assert (True, False, 25.5) == (closed, ended.open, ended.end_s)
    assert (ended, False) == log.close(path, "c", 99.0)
    assert ([ended], 0) == log.read(path)
    assert [True, False] == [line["open"] for line in lines(path)]


def test_repeated_id_is_written_once(path):
    """The same id twice is written once and another event under it is refused."""
    first = change(id="a")
    assert (first, True) == log.record(path, first)
    assert (first, False) == log.record(path, change(at_s=7.0, id="a"))
    with pytest.raises(Conflict, match=r"^a .*: change, 'w'"):
        log.record(path, change("something else", id="a"))
    assert 1 == len(lines(path))


def test_what_cannot_be_closed_is_refused(path):
    log.record(path, change(id="point"))
    log.record(path, change(at_s=50.0, id="late", open=True))
    with pytest.raises(UnknownEvent, match=r"'none'.*`vllm-watch events`"):
        log.close(path, "none", 2.0)
    with pytest.raises(Conflict, match="point in time"):
        log.close(path, "point", 2.0)
    with pytest.raises(ValueError, match=r"50\.000 .* 50\.000"):
        log.close(path, "late", 50.0)
    assert 2 == len(lines(path))


OLD = r"""{"at_s":1.0,"kind":"change","what":"before regions","id":"0123456789ab","diff":{"x":["1",null]},"before":{"start_s":0,"end_s":1}}
{"at_s": 2, "kind": "note", "what": "by hand, control \u0007 characters, no id"}
{"at_s": 3, "kind": "note", "what": "of a later release", "id": "n", "colour": "red"}
"""  # noqa: E501


def test_old_and_hand_written_lines_stay_readable(path):
    """Lines of other releases and of hands stay readable and keep their id."""
    path.write_text(OLD)
    found, bad = log.read(path)
    assert (["0123456789ab", found[1].id, "n"], 0) == ([event.id for event in found], bad)
    assert (found, 0) == log.read(path), "a line without an id is the same event at each reading"
    assert r"\u0007" in annotate.line(found[1])
    assert "\x07" not in annotate.line(found[1])


def test_what_happened_ended_or_is_open_since_a_time(path):
    told = [
        change(at_s=9.0, id="d"),
        change(at_s=1.0, id="a"),
        change(at_s=2.0, end_s=8.0, id="b"),
        change(at_s=3.0, open=True, id="c"),
    ]
    assert ["b", "c", "d"] == [event.id for event in log.since(told, 5.0)]


def test_region_counts_once_and_ends_after_it_began():
    """A region counts once and its end is newer than its beginning."""
    told = [change(at_s=2.0, end_s=8.0), change(at_s=3.0), change(at_s=1.0, kind="note", open=True)]
    shown = [(metric, labels["kind"], value) for metric, labels, value in log.samples(told)]
    assert [
        (sidecar_series.EVENT_TIME, "change", 8.0),
        (sidecar_series.EVENTS, "change", 2),
        (sidecar_series.EVENT_TIME, "note", 1.0),
        (sidecar_series.EVENTS, "note", 1),
    ] == shown


Act = tuple[str, str, float]
ACTS = st.lists(
    st.tuples(st.sampled_from(["point", "open", "close", "again"]), st.sampled_from("abcd"), st.floats(1, 100)),
    max_size=20,
)


@given(acts=ACTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_event_sequences_match_a_dictionary(acts, path, monkeypatch):
    """Any sequence of open close and annotate leaves what a dictionary would hold."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    path.unlink(missing_ok=True)
    expected: dict[str, TuningEvent] = {}
    for act, name, at_s in acts:
        there = expected.get(name)
        if act == "close":
            if there and there.open and at_s > there.at_s:
                expected[name] = msgspec.structs.replace(there, open=False, end_s=at_s)
            try:
                changed = log.close(path, name, at_s)[1]
            except ValueError:
                changed = False
            assert (expected.get(name) != there) == changed
        else:
            event = change(name, at_s, id=name, open=act == "open")
            assert log.record(path, event) == (expected.setdefault(name, event), there is None)
    assert (list(expected.values()), 0) == log.read(path)
    closings = sum(event.end_s is not None for event in expected.values())
    assert len(expected) + closings == (len(lines(path)) if path.exists() else 0)


def test_concurrent_processes_keep_lines_whole(path):
    """Each of three opens and closes the same thirty regions, and writes thirty points of its own."""
    code = """
import sys
from pathlib import Path
from exporters.events import log as events
path, me = Path(sys.argv[1]), sys.argv[2]
events.LOCK_WITHIN_S = 60  # beside writers that lock again at once
for n in range(30):
    region = events.TuningEvent(at_s=1.0, kind="change", what="w" * 3000, id=f"r{n}", open=True)
    events.record(path, region)
    events.close(path, f"r{n}", 2.0)
    events.append(path, events.TuningEvent(at_s=1.0, kind="note", what=me, id=f"{me}{n}"))
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), me], cwd=ROOT) for me in "xyz"]
    assert [0, 0, 0] == [writer.wait(60) for writer in writers]
    found, bad = log.read(path)
    assert 0 == bad
    assert {f"r{n}" for n in range(30)} | {f"{me}{n}" for n in range(30) for me in "xyz"} == {
        event.id for event in found
    }
    assert 30 * (2 + 3) == len(lines(path)), "an open and a close of each region, by whoever came first"
    assert all(event.end_s == 2.0 for event in found if event.id.startswith("r"))


def test_full_disk_leaves_nothing_and_retry_writes_once(path):
    """The real thing: the kernel refuses to let the file grow, in the middle of a line."""
    log.append(path, change("first"))
    before = path.read_bytes()
    code = """
import resource, sys
from pathlib import Path
from exporters.events import log as events
path = Path(sys.argv[1])
limit = path.stat().st_size + 50
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    events.record(path, events.TuningEvent(at_s=1.0, kind="change", what="second", id="s"))
except OSError as error:
    print(error.strerror)
"""
    told = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "File too large\n" == told.stdout
    assert before == path.read_bytes()
    assert log.record(path, change("second", id="s"))[1]
    assert ["first", "second"] == [line["what"] for line in lines(path)]


def test_a_half_line_of_a_crash_is_closed_and_the_file_goes_on(path):
    path.write_bytes(b'{"at_s": 2, "ki')
    log.record(path, change(id="a"))
    assert (["a"], 1) == ([event.id for event in log.read(path)[0]], log.read(path)[1])


# ---- what may be told

UNFIT = {
    "text is empty": {"what": "  "},
    "501 characters": {"what": "x" * 501},
    "line break": {"what": "a\nb"},
    "non-printable": {"what": "\x1b[31mred"},
    "who contains": {"what": "w", "who": "a\tb"},
    "model has 101": {"what": "w", "model": "m" * 101},
    "an id has": {"what": "w", "id": "../x"},
    "is no valid tag": {"what": "w", "tags": ["two words"]},
    "'event:x' is no valid tag": {"what": "w", "tags": ["event:x"]},
    "at most 8 tags": {"what": "w", "tags": [f"t{n}" for n in range(9)]},
    "diff of 'x'": {"what": "w", "diff": {"x": ["a", "\x00"]}},
    "Invalid enum value": {"what": "w", "kind": "restart"},
    "unknown field `colour`": {"what": "w", "colour": "red"},
    "is in the future; record an event": {"what": "w", "at_s": NOW_S + 3600},
    "milliseconds": {"what": "w", "at_s": NOW_S * 1000},
    "is not a unix time": {"what": "w", "at_s": -1},
    "ends after its start": {"what": "w", "at_s": 20, "end_s": 10},
    "a region is open, or ends": {"what": "w", "at_s": 10, "end_s": 20, "open": True},
    "Expected `str`, got `int` - at `$.what`": {"what": 5},
}


@pytest.mark.parametrize("why", UNFIT)
def test_harmful_event_is_refused_with_the_reason(why):
    """An event that would harm a line or a board is refused with the reason."""
    with pytest.raises(ValueError, match=re.escape(why)):
        msgspec.convert(UNFIT[why], NewEvent).event(NOW_S)


def test_event_gets_default_time_and_id():
    """An event is told with little and gets the time and an id."""
    event = NewEvent(what=" Präfix-Cache an ", tags=("b", "a", "b", "équipe:eins")).event(NOW_S)
    assert ("Präfix-Cache an", NOW_S, "change", ("b", "a", "équipe:eins")) == (
        event.what,
        event.at_s,
        event.kind,
        event.tags,
    )
    assert event.id != NewEvent(what="w").event(NOW_S).id


# ---- over HTTP


@contextmanager
def served(path: Path | None, token_file: Path | None) -> Iterator[str]:
    """The door in a thread of its own, as the sidecar's application has it."""
    loop, ready, where = asyncio.new_event_loop(), threading.Event(), SimpleNamespace(url="")

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes(http.routes(path, token_file, lambda: NOW_S))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        where.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield where.url
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@pytest.fixture
def token_file(tmp_path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture
def door(path, token_file) -> Iterator[str]:
    with served(path, token_file) as url:
        yield url


def ask(url: str, body: object = None, token: str | None = TOKEN) -> tuple[int, dict[str, Any]]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_an_event_that_is_posted_twice_is_created_once(door, path):
    body = {
        "what": "prefix caching on",
        "id": "p",
        "diff": {"--enable-prefix-caching": [None, "true"]},
        "tags": ["rollout"],
        "who": "ada",
    }
    status, first = ask(f"{door}/events", body)
    assert (201, True, NOW_S) == (status, first["written"], first["event"]["at_s"])
    assert (200, first | {"written": False}) == ask(f"{door}/events", body)
    assert [first["event"]] == lines(path)


def test_a_region_is_opened_listed_and_closed(door):
    ask(f"{door}/events", {"what": "long ago", "at_s": 5})
    ask(f"{door}/events", {"what": "canary", "id": "c", "open": True, "at_s": 10})
    assert ["canary"] == [event["what"] for event in ask(f"{door}/events?since=1000")[1]["events"]]
    status, ended = ask(f"{door}/events/c/close", b"")
    assert (200, True, NOW_S) == (status, ended["written"], ended["event"]["end_s"])
    assert (200, ended | {"written": False}) == ask(f"{door}/events/c/close", {"end_s": 20})
    assert 2 == len(ask(f"{door}/events")[1]["events"])


def test_a_long_list_arrives_whole(door, path):
    path.write_bytes(b"".join(msgspec.json.encode(change("w" * 400, id=f"{n}")) + b"\n" for n in range(2000)))
    assert 2000 == len(annotate.SidecarLog(door, TOKEN).since(0.0))


REFUSED: dict[str, tuple[int, str, Any]] = {
    "truncated": (400, "/events", b"{"),
    "JSON is malformed": (400, "/events", b"{what"),
    "no UTF-8": (400, "/events", b'{"what": "\xff"}'),
    "unknown field `text`": (400, "/events", {"text": "w"}),
    "required field `what`": (400, "/events", {}),
    "text is empty": (400, "/events", {"what": ""}),
    "ends after its start": (400, "/events/open/close", {"end_s": 5}),
    "future": (400, "/events/open/close", {"end_s": NOW_S * 2}),
    "unknown field `at`": (400, "/events/open/close", {"at": 5}),
    "since=yesterday is no unix time": (400, "/events?since=yesterday", None),
    "no event with id": (404, "/events/none/close", {}),
    "point in time": (409, "/events/point/close", {}),
    "already used by another event": (409, "/events", {"what": "x", "id": "point"}),
    "at most 16384 bytes": (413, "/events", {"what": "x" * 20_000}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_mistake_is_answered_and_nothing_is_written(why, door, path):
    """A mistake is answered with a sentence and nothing is written."""
    log.record(path, change(id="point"))
    log.record(path, change(at_s=10.0, id="open", open=True))
    before = path.read_bytes()
    status, where, body = REFUSED[why]
    answered, told = ask(f"{door}{where}", body)
    assert status == answered
    assert why in told["error"]
    assert before == path.read_bytes()


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "münze"])
@pytest.mark.parametrize(("where", "body"), [("/events", {"what": "w"}), ("/events", None), ("/events/x/close", b"")])
def test_without_the_token_nobody_reads_or_writes(token, where, body, door, path):
    status, answer = ask(f"{door}{where}", body, token)
    assert (401, True) == (status, "`events_token_file`" in answer["error"])
    assert not path.exists()


@pytest.mark.parametrize("case", ["none", "empty", "missing"])
def test_where_no_token_is_set_the_door_is_shut_for_all(case, path, tmp_path):
    (tmp_path / "empty").touch()
    with served(path, None if case == "none" else tmp_path / case) as url:
        for token in (None, "", TOKEN):
            status, told = ask(f"{url}/events", {"what": "w"}, token)
            assert 403 == status
            assert "`events_token_file`" in told["error"]
    assert not path.exists()


def test_a_new_token_holds_at_once(door, token_file):
    token_file.write_text("another")
    assert 401 == ask(f"{door}/events")[0]
    assert 200 == ask(f"{door}/events", token="another")[0]


def test_a_locked_file_or_a_broken_disk_is_503_with_the_reason(door, path, monkeypatch):
    monkeypatch.setattr(log, "LOCK_WITHIN_S", 0.05)
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status, told = ask(f"{door}/events", {"what": "w"})
    assert (503, "nothing was written") == (status, told["error"].split(": ")[0].split(", ")[1])
    assert f"{path} is locked" in told["error"]
    path.unlink()
    path.mkdir()
    assert 503 == ask(f"{door}/events", {"what": "w"})[0]
    assert 503 == ask(f"{door}/events")[0]


def test_a_sidecar_without_a_file_of_events_says_so(token_file):
    with served(None, token_file) as url:
        status, answer = ask(f"{url}/events")
    assert (404, ["error"], True) == (status, list(answer), "`events`" in answer["error"])


def test_token_without_events_file_is_a_config_error():
    """A token without a file of events is a mistake of the configuration."""
    with pytest.raises(ValueError, match="events_token_file needs events"):
        SidecarConfig(events_token_file="t")


# ---- what the sidecar records by itself, and who shows it


async def test_what_a_sidecar_saw_last_is_written_when_it_stops(path):
    sidecar = Sidecar(SidecarConfig(gpu="off", events=str(path)))
    await sidecar.start()
    sidecar._unwritten.append(change("restarted", kind="restart"))
    await sidecar.stop()
    assert ["restarted"] == [line["what"] for line in lines(path)]


def test_replaced_engine_leaves_restart_version_and_config():
    """An engine that was replaced leaves a restart a version and a configuration."""
    page = (ROOT / "tests/golden/0.32.0-before.prom").read_text()
    before = view.parse(page, "0.31.0")
    after = view.parse(page.replace('cache_dtype="auto"', 'cache_dtype="fp8"'), "0.32.0")
    after = dataclasses.replace(after, started_s=(before.started_s or 0) + 600)
    history = view.History("e")
    assert [] == history.observe(before, NOW_S)
    told = {event.kind: event for event in history.observe(after, NOW_S)}
    assert (after.started_s, NOW_S, NOW_S) == tuple(told[kind].at_s for kind in ("restart", "version", "config"))
    assert {"version": ("0.31.0", "0.32.0")} == told["version"].diff
    assert {"cache_dtype": ("auto", "fp8")} == told["config"].diff
    assert [] == history.observe(after, NOW_S + 5)


@pytest.mark.parametrize("board", [board for board in boards() if not board.recorded], ids=lambda board: board.slug)
def test_annotation_shows_on_every_raw_series_board(board):
    """What is annotated shows on every board that has raw series."""
    (shown,) = [one for one in annotations.of(board) if sidecar_series.EVENT_TIME.name in one.expr]  # type: ignore[attr-defined]
    assert 'kind!="restart"' in shown.expr
    assert "change" not in shown.expr


def test_annotation_feeds_the_latency_change_alert():
    """What is annotated feeds the alert on latency since the last change."""
    (alert,) = [alert for alert in latency.alerts(DEFAULTS) if alert.name == "VLLMLatencyWorseSinceTuning"]
    assert f'{sidecar_series.EVENT_TIME.name}{{kind=~"change|version|config"}}' in alert.expr


# ---- Grafana


@pytest.fixture
def server() -> Iterator[FakeGrafana]:
    with FakeGrafana() as fake:
        yield fake


def client(fake: FakeGrafana, token: str = EDITOR) -> grafana_client.GrafanaClient:
    return grafana_client.GrafanaClient(fake.url, f"Bearer {token}")


def test_an_event_becomes_one_annotation_of_the_organisation(server):
    told = change(
        "<b>caching</b> on", 100.25, id="a", who="ada", tags=("rollout",), diff={"max-num-seqs": ("16", None)}
    )
    assert annotation_copies.Copies(made=("a",)) == annotation_copies.copy_events(client(server), [told])
    (one,) = server.annotations.values()
    assert {"time": 100250, "timeEnd": 100250, "tags": ["tuning", "event:a", "change", "rollout"]} == {
        k: v for k, v in one.items() if k != "text"
    }
    assert "&lt;b&gt;caching&lt;/b&gt; on (ada)\nmax-num-seqs: 16 → not set" == one["text"]
    assert annotation_copies.Copies() == annotation_copies.copy_events(client(server), [told])


def test_closed_region_gets_its_end_and_keeps_edits(server):
    """A region gets its end when it is closed and words changed in Grafana stay."""
    opened = change(at_s=100.0, id="a", open=True)
    annotation_copies.copy_events(client(server), [opened])
    server.annotations[1]["text"] = "edited by hand"
    ended = msgspec.structs.replace(opened, open=False, end_s=160.0)
    assert annotation_copies.Copies(changed=("a",)) == annotation_copies.copy_events(client(server), [ended])
    assert (100000, 160000, "edited by hand") == tuple(
        server.annotations[1][key] for key in ("time", "timeEnd", "text")
    )


def test_restarts_are_left_out_and_no_events_ask_nothing(server):
    assert annotation_copies.Copies() == annotation_copies.copy_events(client(server), [change(kind="restart")])
    assert [] == server.seen


def test_moved_copy_is_found_by_its_tag(server):
    """A copy that was moved far in Grafana is found by its tag."""
    annotation_copies.copy_events(client(server), [change(at_s=100.0, id="a")])
    server.annotations[1] |= {"time": 9, "timeEnd": 9}
    assert annotation_copies.Copies(changed=("a",)) == annotation_copies.copy_events(
        client(server), [change(at_s=100.0, id="a")]
    )
    assert 1 == len(server.annotations)


def test_two_that_copy_at_the_same_time_leave_one(server):
    """The other one's annotation arrives between our look and our write."""
    event = change(at_s=100.0, id="a")

    def other() -> None:
        server.before_write = lambda: None
        server.numbered += 1
        server.annotations[server.numbered] = {
            "time": 100000,
            "timeEnd": 100000,
            "tags": ["tuning", "event:a", "change"],
            "text": "w",
        }

    server.before_write = other
    annotation_copies.copy_events(client(server), [event])
    assert [1] == list(server.annotations)


def test_refused_annotation_holds_back_no_other(server):
    """One that Grafana refuses keeps no other back and tags that do not fit are left out."""
    long = change(at_s=2.0, id="t", tags=tuple(f"{n}{'ü' * 39}" for n in range(8)))
    told = [change("", 1.0, id="empty"), long, change(at_s=3.0, id="b")]
    grafana_says = annotation_copies.copy_events(
        client(server), [msgspec.structs.replace(told[0], who=None), *told[1:]]
    )
    assert (("t", "b"), "empty") == (grafana_says.made, grafana_says.refused[0][0])
    assert 3 < len(server.annotations[1]["tags"]) < 11


def test_missing_annotate_permission_is_named(server):
    """Who may not annotate is told which permission is missing."""
    with pytest.raises(grafana_client.GrafanaTrouble, match="annotations:create"):
        annotation_copies.copy_events(client(server, VIEWER), [change()])


# ---- the commands


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_annotate_prints_the_id_and_says_what_it_wrote(path):
    told = run(
        "annotate",
        "prefix caching on",
        "--tag",
        "rollout",
        "--diff",
        "--enable-prefix-caching=->true",
        "--who",
        "ada",
        "--events",
        path,
    )
    (line,) = lines(path)
    assert (0, f"{line['id']}\n") == (told.exit_code, told.stdout)
    assert "prefix caching on  [--enable-prefix-caching: not set -> true]  #rollout  by ada" in told.stderr
    assert ("ada", ["rollout"], {"--enable-prefix-caching": [None, "true"]}) == (
        line["who"],
        line["tags"],
        line["diff"],
    )
    assert abs(time.time() - line["at_s"]) < 60


def test_a_region_by_two_commands_and_a_third_changes_nothing(path):
    opened = run("annotate", "canary", "--open", "--at", "now-10m", "--events", path)
    closed = run("annotate", "--close", opened.stdout.strip(), "--events", path)
    again = run("annotate", "--close", opened.stdout.strip(), "--events", path)
    assert (0, 0, 0) == (opened.exit_code, closed.exit_code, again.exit_code)
    assert "closed already" in again.stderr
    (event,) = log.read(path)[0]
    assert 590 < event.end_s - event.at_s < 660
    assert 2 == len(lines(path))


def test_the_json_twins_tell_the_same(path):
    told = [
        json.loads(
            run(
                "annotate", "w", "--id", "a", "--from", "2026-01-01", "--to", "2026-01-02", "--json", "--events", path
            ).stdout
        )
        for _ in "12"
    ]
    assert [True, False] == [one["written"] for one in told]
    assert {"events": [told[0]["event"]], "copies": None} == json.loads(
        run("events", "--json", "--events", path).stdout
    )
    assert 86400 == told[0]["event"]["end_s"] - told[0]["event"]["at_s"]


def test_events_lists_the_newest_last_and_filters(path):
    for told in (
        change("later", 2_000.0),
        change("earlier", 1_000.0, end_s=1_060.0),
        change("now", time.time(), kind="note", open=True),
    ):
        log.append(path, told)
    shown = run("events", "--events", path).stdout.splitlines()
    assert ["1970-01-01T00:16:40Z", "1970-01-01T00:33:20Z"] == [line.split()[0] for line in shown[:2]]
    assert shown[0].endswith("earlier  (until 1970-01-01T00:17:40Z)")
    assert shown[2].endswith("now  (open)")
    assert 1 == len(run("events", "--since", "24h", "--events", path).stdout.splitlines())
    assert 2 == len(run("events", "--kind", "change", "--events", path).stdout.splitlines())
    none = run("events", "--events", path.with_name("none"))
    assert (0, "", "no events\n") == (none.exit_code, none.stdout, none.stderr)


MIXED = {
    "say what was changed": [],
    "nothing else of an event": ["--close", "x", "--tag", "t"],
    "leave out --at and --open": ["w", "--from", "now-2h", "--to", "now-1h", "--open"],
    "belong together": ["w", "--from", "now-2h"],
    "is no time": ["w", "--at", "teatime"],
    "is no change of an option": ["w", "--diff", "max-num-seqs=16"],
    "is no valid tag": ["w", "--tag", "two words"],
    "no event with id": ["--close", "nobody"],
    "belongs to --sidecar": ["w", "--sidecar-token-file", "t"],
    "either --events or --sidecar": ["w", "--sidecar", "http://x"],
    "belong to Grafana": ["w", "--token-file", "t"],
    "is no address; write it like": ["w", "--grafana", "grafana"],
}


@pytest.mark.parametrize("why", MIXED)
def test_a_mistake_is_one_sentence_and_nothing_is_written(why, path):
    told = run("annotate", *MIXED[why], "--events", path)
    assert 2 == told.exit_code
    assert why in told.stderr
    assert 1 >= told.stderr.count("Error")
    assert not lines(path) if path.exists() else True


def test_what_could_not_be_written_can_be_said_again(path, monkeypatch):
    monkeypatch.setattr(log, "LOCK_WITHIN_S", 0.05)
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = run("annotate", "w", "--events", path)
    assert 2 == told.exit_code
    assert re.search(rf"{path} is locked .*: --id \S+$", told.stderr)
    assert [] == lines(path)
    again = run("annotate", "w", "--id", told.stderr.split()[-1], "--events", path)
    assert (0, 1) == (again.exit_code, len(lines(path)))


def test_default_file_from_environment_or_running_lab(path, tmp_path, monkeypatch):
    """Without a file it is the environments or that of the lab that runs."""
    nowhere = run("annotate", "w")
    assert (2, True) == (nowhere.exit_code, "no lab runs" in nowhere.stderr)
    assert "--events" in nowhere.stderr
    lab = tmp_path / "cache" / "lab-1000"
    lab.mkdir(parents=True)
    (lab / "lock").touch()
    assert 2 == run("annotate", "w").exit_code, "a lab that has ended holds no lock"
    with (lab / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert 0 == run("annotate", "in the lab").exit_code
    assert ["in the lab"] == [line["what"] for line in lines(lab / "events.jsonl")]
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    assert 0 == run("annotate", "in compose").exit_code
    assert ["in compose"] == [line["what"] for line in lines(path)]


def test_the_examples_of_the_help_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("annotate", "events"):
        shown = run(command, "--help").stdout.split("Example:")[1].split("Options:")[0]
        for example in (line.strip() for line in shown.splitlines() if line.strip()):
            told = run(*shlex.split(example)[1:])
            assert 0 == told.exit_code, f"{example}: {told.stderr}"
    assert ["prefix caching on", "canary at 10 %"] == [event.what for event in log.read(tmp_path / "events.jsonl")[0]]


def test_absent_grafana_is_a_remark_and_copies_follow(path, tmp_path, server):
    """Grafana away is a remark and the copies are made when it is back."""
    token = tmp_path / "token"
    token.write_text(EDITOR)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        away = f"http://127.0.0.1:{gone.getsockname()[1]}"
    told = run("annotate", "first", "--grafana", away, "--token-file", token, "--events", path)
    assert (0, 1) == (told.exit_code, len(lines(path)))
    assert "not copied yet: " in told.stderr
    told = run("events", "--copy-to-grafana", away, "--token-file", token, "--events", path)
    assert (2, True) == (told.exit_code, "cannot be reached" in told.stderr)
    told = run(
        "annotate", "second", "--at", "2025-01-01", "--grafana", server.url, "--token-file", token, "--events", path
    )
    assert "annotations in Grafana: 2 made, 0 changed" in told.stderr, (
        "the one that waited, and this one although it is old"
    )
    told = run("events", "--copy-to-grafana", server.url, "--token-file", token, "--events", path, "--json")
    assert {"made": [], "changed": [], "refused": []} == json.loads(told.stdout)["copies"]
    assert ["first", "second"] == [one["text"].split(" (")[0] for one in server.annotations.values()]


# ---- through a sidecar


def test_a_real_sidecar_takes_an_event_and_shows_its_time(path, tmp_path, token_file, free_port):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {"listen": f"127.0.0.1:{port}", "gpu": "off", "events": str(path), "events_token_file": str(token_file)}
    (tmp_path / "sidecar.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "stack.cli", "sidecar", "run", "--config", str(tmp_path / "sidecar.yaml")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    there = ("--sidecar", url, "--sidecar-token-file", token_file)

    def page() -> str:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    try:
        eventually(lambda: "vllm_watch_sidecar_info" in page())
        told = run("annotate", "max-num-seqs doubled", "--id", "m", "--at", "1760000000000", *there)
        assert (0, "m\n") == (told.exit_code, told.stdout)
        assert "on record already" in run("annotate", "max-num-seqs doubled", "--id", "m", *there).stderr
        shown = re.compile(rf'^{sidecar_series.EVENT_TIME.name}{{kind="change"}} (\S+)$', re.MULTILINE)
        eventually(lambda: [1_760_000_000.0] == list(map(float, shown.findall(page()))))
        assert ["2025-10-09T08:53:20Z", "change", "m", "max-num-seqs"] == run("events", *there).stdout.split()[:4]
        assert ["m"] == [line["id"] for line in lines(path)]
        assert 2 == run("annotate", "--close", "m", *there).exit_code
    finally:
        process.terminate()
        process.wait(60)


def test_sidecar_error_is_reported_with_the_id(door, token_file, tmp_path):
    """A sidecar that is away or refuses is told with its sentence and the id."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        away = f"http://127.0.0.1:{gone.getsockname()[1]}"
    told = run("annotate", "w", "--id", "i", "--sidecar", away, "--sidecar-token-file", token_file)
    assert 2 == told.exit_code
    assert re.search(f"{away} .*: --id i$", told.stderr)
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    told = run("events", "--sidecar", door, "--sidecar-token-file", wrong)
    assert (2, True) == (told.exit_code, f"{door} answers 401: " in told.stderr)
    told = run("events", "--sidecar", door)
    assert (2, True) == (told.exit_code, "--sidecar wants --sidecar-token-file" in told.stderr)


# ---- compose


def test_in_compose_the_command_finds_the_sidecars_own_file():
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["sidecar"]
    kept = config.load(ROOT / "stack/deploy/sidecar.yaml", SidecarConfig).events
    assert kept == service["environment"][FILE_VARIABLE]
    assert any(
        str(kept).startswith(volume.split(":")[1]) and not volume.endswith(":ro") for volume in service["volumes"]
    )
