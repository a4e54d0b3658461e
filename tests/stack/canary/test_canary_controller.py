"""The controller of a canary on a log and a clock of the test: acts, advice, other people's changes, and kill -9."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporters.events import log as events
from exporters.requests.record import RequestRecord, parse_line
from stack.canary.controller import samples_of
from stack.canary.state import held_state, read_state
from stack.canary.teams_file import read_teams, write_share
from stack.config import BadConfig
from stack.tuning.annotate import FileLog, Unwritten
from tests.support.canary_scene import START_S, TEAMS, Scene

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of minutes, and no power failure
    (tmp_path / "teams.yaml").write_text(TEAMS.format(share="0", decide_s="6000"))
    (tmp_path / "requests.jsonl").touch()
    return Scene(tmp_path)


def test_an_equal_canary_is_raised_and_good(scene: Scene):
    controller = scene.run()
    assert "promote" == controller.state.done
    expected = [("start", "0->0.05"), ("raise", "0.05->0.2"), ("raise", "0.2->0.5"), ("promote", "")]
    assert expected == scene.happened()
    assert 3 == scene.reloads
    assert TEAMS.format(share="0.5", decide_s="6000") == scene.teams.read_text()
    page = (scene.folder / "report.html").read_text()
    assert 1 == page.count("<td>promote</td>"), "each step has one row"
    for text in ('class="said better"', "TTFT", "equivalent", "raise"):
        assert text in page
    assert scene.controller().look()  # started once more, it is over
    assert expected == scene.happened()


def test_a_slower_canary_is_rolled_back(scene: Scene):
    scene.slower = 2.0
    assert "roll_back" == scene.run().state.done
    assert [("start", "0->0.05"), ("roll_back", "0.05->0")] == scene.happened()
    assert TEAMS.format(share="0", decide_s="6000") == scene.teams.read_text()
    assert "TTFT" in events.read(scene.folder / "events.jsonl")[0][-1].what


def test_without_a_verdict_it_is_undecided_at_the_end(scene: Scene):
    scene.teams.write_text(TEAMS.format(share="0", decide_s="19999").replace("limit_s: 20000", "limit_s: 1200"))
    assert "undecided" == scene.run(30).state.done
    assert ("undecided", "0.05->0") == scene.happened()[-1]


def test_a_guard_acts_at_once(scene: Scene):
    reasons: list[str] = []
    scene.guards = (lambda: reasons,)
    controller = scene.run(5)
    assert controller.state.done is None
    reasons.append("new: hung (steps_stopped)")
    assert controller.look()
    assert ("roll_back", "0.05->0") == scene.happened()[-1]
    assert "hung (steps_stopped)" in controller.state.steps[-1].why


def test_advice_is_given_once_and_changes_nothing(scene: Scene):
    scene.acts, before = False, TEAMS.format(share="0.05", decide_s="18000")
    scene.teams.write_text(before)
    controller = scene.run(150)
    assert [("start", ""), ("raise", "")] == scene.happened()
    assert re.search(r"advice: .*\(5 % to 20 %\)", events.read(scene.folder / "events.jsonl")[0][-1].what)
    scene.teams.write_text(before.replace("share: 0.05", "share: 0.2"))  # as advised
    controller.look()
    assert ("set", 0.05, 0.2) == (
        controller.state.steps[-1].action,
        controller.state.steps[-1].was,
        controller.state.share,
    )
    scene.slower = 3.0
    assert "roll_back" == scene.run(60).state.done
    assert "share: 0.2 " in scene.teams.read_text()
    assert 0 == scene.reloads


@pytest.mark.parametrize(
    ("was", "now", "changed_part"),
    [
        ("share: 0.05 ", "share: 0.9 ", "canary.share (0.9)"),
        ("http://127.0.0.1:2", "http://127.0.0.1:3", "upstreams"),
        ("step_s: 600", "step_s: 1", "upstreams"),
    ],
)
def test_somebody_elses_change_ends_the_run(scene: Scene, was: str, now: str, changed_part: str):
    controller = scene.run(5)
    changed = scene.teams.read_text().replace(was, now)
    scene.teams.write_text(changed)
    assert controller.look()
    assert ("interrupted", changed) == (controller.state.done, scene.teams.read_text())
    assert changed_part in controller.state.steps[-1].why
    assert ("interrupted", "") == scene.happened()[-1]


def test_other_changes_of_the_file_are_kept(scene: Scene):
    scene.teams.write_text(TEAMS.format(share="0", decide_s="2400"))
    controller = scene.run(5)
    scene.teams.write_text(scene.teams.read_text().replace("  chat:", "  batch: {}\n  chat:"))
    assert not controller.look()
    assert "promote" == scene.run().state.done
    assert "  batch: {}\n  chat: {}   # nobody yet\n" in scene.teams.read_text()


def test_a_file_that_cannot_be_read_waits(scene: Scene, caplog: pytest.LogCaptureFixture):
    scene.teams.write_text(TEAMS.format(share="0", decide_s="2400"))
    controller = scene.run(5)
    text = scene.teams.read_text()
    scene.teams.write_text("teams: [")
    for _ in range(3):
        assert not controller.look()
    assert 1 == sum("invalid YAML" in record.message for record in caplog.records)
    scene.teams.write_text(text)
    assert "promote" == scene.run().state.done


def test_a_failed_reload_is_tried_again(scene: Scene):
    def fail() -> None:
        if scene.reloads < 3:
            raise OSError("--reload failed")

    scene.on_reload = fail
    scene.teams.write_text(TEAMS.format(share="0", decide_s="2400"))
    assert "promote" == scene.run().state.done
    assert 5 == scene.reloads
    assert [("start", "0->0.05"), ("raise", "0.05->0.2")] == scene.happened()[:2]


def test_a_state_of_another_canary_is_refused(scene: Scene):
    scene.run(2)
    with pytest.raises(BadConfig, match=r"'canary' .*teams\.yaml; .*--state"):
        read_state(scene.folder / "state.json", scene.teams, "blue")
    (scene.folder / "state.json").write_text("{")
    with pytest.raises(BadConfig, match=r"no state .*--state"):
        read_state(scene.folder / "state.json", scene.teams, "canary")


def test_a_failed_event_or_report_stops_no_guard(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """The share counts, so the canary is watched; what failed is tried again, and the run ends in a minute without."""
    reasons: list[str] = []
    scene.guards = (lambda: reasons,)
    record = FileLog.record

    def fail(*_: object) -> None:
        raise Unwritten("http://127.0.0.1:1 cannot be reached")

    monkeypatch.setattr(FileLog, "record", fail)
    controller = scene.controller()
    for _ in range(3):
        assert not controller.look()
    assert (1, 0.05) == (scene.reloads, read_teams(scene.teams).canary.share)
    reasons.append("new: hung (steps_stopped)")
    assert not controller.look(), "its events are not recorded yet"
    assert (2, 0.0, "roll_back") == (scene.reloads, read_teams(scene.teams).canary.share, controller.state.done)
    monkeypatch.setattr(FileLog, "record", record)
    assert scene.controller().look()
    assert [("start", "0->0.05"), ("roll_back", "0.05->0")] == scene.happened()


def test_a_run_ends_without_a_report(scene: Scene):
    scene.guards = (lambda: ["new: hung"],)
    (scene.folder / "report.html").mkdir()
    controller = scene.controller()
    assert not controller.look()
    assert not controller.look()
    assert "roll_back" == controller.state.done
    scene.now_s += 61
    assert controller.look()
    assert 2 == len(scene.happened()) == len(controller.state.steps)


def test_a_guard_stops_a_step_whose_reload_fails(scene: Scene):
    """One gateway has read the share, and the other does not answer."""
    reasons: list[str] = []
    scene.guards = (lambda: reasons,)

    def fail() -> None:
        if read_teams(scene.teams).canary.share:
            raise OSError("--reload failed")

    scene.on_reload = fail
    controller = scene.controller()
    for _ in range(2):
        assert not controller.look()
    assert 0.05 == read_teams(scene.teams).canary.share
    reasons.append("new: hung (steps_stopped)")
    assert controller.look()
    assert 0.0 == read_teams(scene.teams).canary.share
    assert [("roll_back", "0.05->0")] == scene.happened()


def test_the_first_share_is_advised(scene: Scene):
    scene.acts = False
    controller = scene.run(3)
    assert [("start", "")] == scene.happened()
    what = events.read(scene.folder / "events.jsonl")[0][0].what
    assert re.match(r"canary advice: .*\(0 % to 5 %\): .*60 s$", what), what
    assert 0.0 == controller.state.share == read_teams(scene.teams).canary.share


def test_the_owner_of_the_file_and_a_link_stay(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """A mounted secret is a link, and becomes another file at each change."""
    real = scene.folder / "data" / "teams.yaml"
    real.parent.mkdir()
    scene.teams.rename(real)
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 65534, 65533)
    owner = real.stat()
    scene.teams.symlink_to(real)
    scene.run(2)
    assert scene.teams.is_symlink()
    assert "share: 0.05 " in real.read_text()
    now = real.stat()
    assert (owner.st_uid, owner.st_gid, owner.st_mode) == (now.st_uid, now.st_gid, now.st_mode)


@pytest.mark.parametrize("share", [0.0, 1.0, 0.05, 1 / 3, 0.3333333, 0.00005, 1e-9])
def test_a_share_is_read_back_as_it_was_written(scene: Scene, share: float):
    write_share(read_teams(scene.teams), share)
    assert share == read_teams(scene.teams).canary.share


MODELS = """models:
  large: {upstreams: [old, new]}
  small: {upstreams: [old]}
"""


def record(**values: object) -> RequestRecord:
    return parse_line(
        json.dumps({"request_id": "r", "model": "large", "ts": "2023-11-14T22:14:10Z", **values}).encode()
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"variant": "canary", "outcome": "ok", "ttft_ms": 5.0}, [("canary", "ok", 5.0)]),
        ({"variant": "stable", "outcome": "ok", "ttft_ms": 5.0, "model": "small"}, []),
        ({"outcome": "rejected", "reason": "body_timeout"}, []),
        (
            {"variant": "stable", "outcome": "ok", "ttft_ms": 900.0, "tried": "new:engine_error"},
            [("canary", "upstream_error", None), ("stable", "ok", None)],
        ),
        ({"variant": "canary", "outcome": "rejected", "reason": "bad_request"}, [("canary", "upstream_error", None)]),
        ({"variant": "canary", "outcome": "rejected", "reason": "queue_full"}, [("canary", "rejected", None)]),
    ],
)
def test_what_a_record_says_of_the_canary(scene: Scene, line: dict[str, object], expected: list[object]):
    """A model that the canary does not serve says nothing; the failure before a fallback is the canary's."""
    scene.teams.write_text(MODELS + scene.teams.read_text())
    found = samples_of(record(**line), 1.0, read_teams(scene.teams), {})
    assert expected == [(each.variant, each.outcome, each.ttft_ms) for each in found]


def test_a_canary_without_a_shared_model_is_a_mistake(scene: Scene):
    scene.teams.write_text(MODELS.replace("[old, new]", "[new]") + scene.teams.read_text())
    with pytest.raises(BadConfig, match=r"teams\.yaml: .*'canary' .*`upstreams`"):
        read_teams(scene.teams)


def test_a_state_has_one_process(scene: Scene):
    state = scene.folder / "state.json"
    with (
        held_state(state),
        pytest.raises(BadConfig, match=r"state\.json .*`vllm-watch canary`.*--state"),
        held_state(state),
    ):
        pass
    with held_state(state):
        pass


def test_guards_are_asked_while_a_long_log_is_read(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """The clock moves at each question, so one look reads a part; nothing is decided on that, but a guard acts."""
    scene.run(2)
    for _ in range(3):
        scene.minute()
    controller = scene.controller()
    ticks = itertools.count(0.0, 1.5)
    controller.outside = dataclasses.replace(controller.outside, steady=lambda: next(ticks))
    monkeypatch.setattr("stack.canary.controller.LINES_BYTES", 2000)
    before = controller.state.evidence.minutes
    assert not controller.look()
    assert before == controller.state.evidence.minutes
    assert controller._read
    reasons = ["new: hung"]
    controller.outside = dataclasses.replace(controller.outside, guards=(lambda: reasons,))
    assert controller.look()
    assert "new: hung" == controller.state.steps[-1].why


# ---- kill -9

# Reads lines of folder, point, latency ratio and time; runs each scene in a fork of itself that kills itself in the
# middle, at the Nth of what it does to the world; prints its exit status.
DRIVER = """
import os, shlex, signal, sys
from pathlib import Path
from tests.support.canary_scene import Scene
from stack.canary import controller, teams_file
import exporters.events.log as events

def deadly(work):
    def run(*args, **kwargs):
        global left
        for _ in range(2):  # before it and after it
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if _ == 0:
                done = work(*args, **kwargs)
        return done
    return run

def act(folder, slower, now_s):
    scene = Scene(Path(folder), slower=float(slower), now_s=float(now_s))
    controller.write_state, controller.write_share = deadly(controller.write_state), deadly(controller.write_share)
    controller.report.write = deadly(controller.report.write)
    events.record = deadly(events.record)
    scene.on_reload = deadly(lambda: (scene.folder / "reloads").open("a").write(scene.teams.read_text().split("share: ")[1][:5] + chr(10)))
    made = scene.controller()
    made.look()
    made.look()

for line in sys.stdin:
    folder, point, slower, now_s = shlex.split(line)
    left = int(point)
    child = os.fork()
    if not child:
        try:
            act(folder, slower, now_s)
            os._exit(0)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""  # noqa: E501

Killed = Callable[[Path, int, float, float], int]


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    """Run a scene that is killed at a point; its exit status, negative for a signal."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    ) as driver:  # fmt: skip
        assert driver.stdin is not None
        assert driver.stdout is not None

        def run(folder: Path, at: int, slower: float, now_s: float) -> int:
            driver.stdin.write(f"{shlex.quote(str(folder))} {at} {slower} {now_s}\n")
            driver.stdin.flush()
            return int(driver.stdout.readline())

        yield run
        driver.stdin.close()
    assert 0 == driver.returncode


def kills(killed: Killed, folder: Path, slower: float, now_s: float) -> Iterator[None]:
    """Kill the controller at each point of one act in turn, each time from the same files, and then let it finish."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for at in itertools.count(1):
        for path in folder.iterdir():
            path.unlink()
        for name, content in before.items():
            (folder / name).write_bytes(content)
        if killed(folder, at, slower, now_s) != -signal.SIGKILL:
            assert at > 10, "as many points at least"
            return
        killed(folder, at + 1, slower, now_s)  # once more, from what that left
        assert 0 == killed(folder, 1000, slower, now_s)
        yield


def once(folder: Path) -> None:
    """Each event has one line."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["id"] for line in lines})


def test_kill_at_any_point_of_the_start_does_nothing_twice(killed: Killed, tmp_path: Path):
    (tmp_path / "teams.yaml").write_text(TEAMS.format(share="0", decide_s="6000"))
    (tmp_path / "requests.jsonl").touch()
    for _ in kills(killed, tmp_path, 1.0, START_S):
        assert [("start", "0->0.05")] == Scene(tmp_path).happened()
        once(tmp_path)
        assert "share: 0.05 " in (tmp_path / "teams.yaml").read_text()
        assert {"0.05 "} == set((tmp_path / "reloads").read_text().splitlines())


def test_kill_at_any_point_of_a_rollback_does_nothing_twice(killed: Killed, tmp_path: Path):
    (tmp_path / "teams.yaml").write_text(TEAMS.format(share="0", decide_s="6000"))
    (tmp_path / "requests.jsonl").touch()
    scene = Scene(tmp_path, slower=2.0)
    controller = scene.controller()
    while len(controller.state.steps) < 2:
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        controller.look()
        scene.minute()
        scene.now_s += 3
        written = (tmp_path / "requests.jsonl").read_bytes()
        controller.look()
        scene.now_s -= 3
    for path in tmp_path.iterdir():  # as it was before the roll-back
        path.unlink()
    for name, content in {**before, "requests.jsonl": written}.items():
        (tmp_path / name).write_bytes(content)
    for _ in kills(killed, tmp_path, 2.0, scene.now_s + 3):
        assert [("start", "0->0.05"), ("roll_back", "0.05->0")] == scene.happened()
        once(tmp_path)
        assert TEAMS.format(share="0", decide_s="6000") == scene.teams.read_text()
        assert {"0    "} == {line for line in (tmp_path / "reloads").read_text().splitlines() if line}
        assert (tmp_path / "report.html").exists()
