"""Drills: every alert has one or a reason, the rules they run are the shipped ones but for time, and some of them on a
real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from alerts import printer, registry
from alerts.registry import ALERTS
from alerts.settings import Overrides, Settings
from exporters.gpu import nvidia_smi as gpu
from exporters.gpu.source import GpuSource
from exporters.net.alertmanager import Firing
from exporters.text import parse_window
from stack.drill import drills, faults, gpu_faults, lab, monitoring_faults, run
from stack.drill.drills import DRILLS, FAST, QUICK, QUICKER, WHY_NOT, Drill
from stack.lab import install, plan
from tests.support.at_test_pace import DRILL_PACE
from tests.support.own_cache import own_cache
from tests.support.ports import free_offset
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]


# --- the table


def test_alerts_and_drills_match():
    """Every alert has a drill or a reason and every drill an alert."""
    drilled = [drill.alert for drill in DRILLS]
    assert len(set(drilled)) == len(drilled)
    assert set() == set(drilled) & set(WHY_NOT)
    assert {alert.name for alert in ALERTS} == {*drilled, *WHY_NOT}
    assert all(WHY_NOT.values())


def test_most_alerts_are_drilled_and_fast_ones_share():
    """Most alerts are drilled and the fast ones share one engine."""
    assert len(DRILLS) >= 40
    assert len(FAST) >= 6
    assert {lab.DrillEngine.USUAL} == {drill.engine for drill in drills.chosen(["fast"])}


def test_an_alert_is_found_by_what_people_type():
    assert ["VLLMEngineDown"] == [drill.alert for drill in drills.chosen(["enginedown"])]
    assert ["VLLMGPUHot", "VLLMEngineDown"] == [drill.alert for drill in drills.chosen(["VLLMEngineDown", "GPUHot"])]
    assert DRILLS == drills.chosen(["all"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("VLLMEngineDwn", "did you mean VLLMEngineDown"),
        ("LatencyWorseThanLastWeek", "VLLMLatencyWorseThanLastWeek has no drill here: "),
        ("xyz", "see vllm-watch drill --list"),
    ],
)
def test_what_cannot_be_drilled_is_one_sentence(name, told):
    with pytest.raises(ValueError, match=told):
        drills.chosen([name])


# --- the rules


def rules(settings: Settings) -> dict[str, dict[str, str]]:
    """Alert or record -> its rule."""
    found = {}
    for _, text in printer.rule_files(settings=settings):
        for group in yaml.safe_load(text)["groups"]:
            found |= {rule.get("alert") or rule["record"]: rule for rule in group["rules"]}
    return found


def in_seconds(rule: dict[str, str], faster: int = 1) -> dict[str, str]:
    """The same with every duration as seconds, divided by `faster`: those that are written as one, and what an age is
    compared with, but for a multiple of a reported interval."""

    def divided(found: re.Match[str]) -> str:
        return f"{round(sum(parse_window(part) for part in re.findall(r'[0-9]+[smhdw]', found[0])) / faster)}s"

    times = {
        name: re.sub(r"\b(\d+[smhdw])+\b", divided, rule[name])
        for name in ("expr", "for", "keep_firing_for")
        if name in rule
    }
    expr = re.sub(r"\s", "", times["expr"])
    age = r"(time\(\)-(?:[^<>]|>0\))*[<>]=?)(\d+)(?![\d*])"
    expr = re.sub(age, lambda found: f"{found[1]}{round(int(found[2]) / faster)}", expr)
    return {**rule, **times, "expr": expr}


@pytest.mark.parametrize("pace", [QUICK, DRILL_PACE, QUICKER])
def test_the_rules_of_a_drill_are_the_shipped_ones_but_for_time(pace):
    shipped, overridden = rules(Settings()), rules(Settings(Overrides(thresholds=lab.OVERRIDES)))
    assert {name: in_seconds(rule, pace) for name, rule in overridden.items()} == {
        n: in_seconds(r) for n, r in rules(lab.settings(pace)).items()
    }
    differs = [name for name, rule in shipped.items() if rule != overridden[name]]
    assert [alert.name for alert in ALERTS if alert.threshold and alert.threshold.name in lab.OVERRIDES] == differs


@pytest.mark.prometheus
@pytest.mark.parametrize("pace", [QUICK, QUICKER])
def test_promtool_accepts_the_files_of_a_drill_lab(tmp_path, part, pace):
    config = replace(lab.drilled(plan.LabConfig(tmp_path, {"prometheus": Path("p")})), settings=lab.settings(pace))
    (tmp_path / "rules").mkdir()
    for name, text in plan.files(config):
        (tmp_path / name).write_text(text)
    subprocess.run(
        [part("promtool").path, "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True
    )


# --- the stand-in GPUs


def readings(folder: Path) -> tuple[int, str]:
    command = [folder / "nvidia-smi", f"--query-gpu={','.join(gpu.FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.fixture
def driver(tmp_path):
    """A drill lab's folder of stand-ins, and the lab that may change what they say; nothing runs."""
    lab.install_driver(tmp_path / "driver")
    standing = lab.DrillLab(plan.LabConfig(tmp_path, {}), None, {}, print)
    standing.write_gpus()
    return standing


def test_stand_in_cards_are_read_like_real_ones(driver):
    code, text = readings(driver.config.folder / "driver")
    first, second = gpu.parse_csv(text)
    assert (0, "Stand-in GPU", 55.0, 55.0) == (code, first.name, first.temperature_celsius, second.temperature_celsius)
    with gpu_faults._second_card(driver, **{"temperature.gpu": 91}):
        assert [55.0, 91.0] == [
            card.temperature_celsius for card in gpu.parse_csv(readings(driver.config.folder / "driver")[1])
        ]
    assert text == readings(driver.config.folder / "driver")[1]


async def test_a_stand_in_card_that_is_lost_keeps_its_name(driver):
    """Read as the drill lab's sidecar does: what this machine has of a driver is not found."""
    async with GpuSource(
        env={**os.environ, "PYTHONPATH": str(ROOT), **lab.drilled(driver.config).env["sidecar"]}
    ) as source:
        before = await source.read(20)
        driver.write_gpus(lost=True)
        after = await source.read(20)
    assert "nvidia-smi" == source.method
    assert [card.uuid for card in before] == [card.uuid for card in after]
    assert "lost" == after[1].absent["gpu"]


# --- faults are taken away


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_stopped_process_goes_on_whatever_happens():
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        with contextlib.suppress(KeyboardInterrupt), faults.stopped(sleeper.pid):
            eventually(lambda: state(sleeper.pid) == "T")
            raise KeyboardInterrupt
        eventually(lambda: state(sleeper.pid) == "S")
    finally:
        sleeper.kill()
        sleeper.wait()
    ended = subprocess.Popen(["sleep", "60"])
    with faults.stopped(ended.pid):
        ended.kill()
        ended.wait()  # and one that ended meanwhile is no error


def test_a_moved_file_comes_back_with_what_was_in_it(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("before\n")
    with contextlib.suppress(RuntimeError), faults.folder_instead_of(path):
        assert path.is_dir()
        raise RuntimeError
    assert "before\n" == path.read_text()
    assert [path] == list(tmp_path.iterdir())


def test_disk_full_for_one_process_is_freed_again(tmp_path):
    """A disk that is full for one process has room again whatever happens."""
    loop = 'trap "" XFSZ; while read file; do echo x > "$file"; echo; done'
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    writer = subprocess.Popen(["sh", "-c", loop], stdin=pipe, stdout=pipe, stderr=nowhere, text=True)

    def written(name):
        writer.stdin.write(f"{tmp_path / name}\n")
        writer.stdin.flush()
        writer.stdout.readline()
        return (tmp_path / name).read_text()

    try:
        with contextlib.suppress(RuntimeError), monitoring_faults.full_disk(writer.pid):
            assert "" == written("while-full")
            raise RuntimeError
        assert "x\n" == written("afterwards")
    finally:
        writer.kill()
        writer.communicate()


def test_the_children_of_a_process_are_found_and_nobody_elses():
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        found = eventually(lambda: list(lab.descendants(parent.pid)), "a child")
        assert 1 == len(found)
        assert os.getpid() not in found
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


# --- the loop, without processes


class FakeLab:
    """Stands for a lab whose alert fires while it is broken, or at other times, as the test says."""

    def __init__(self, before=False, broken=True, after=False):
        self.config = replace(lab.drilled(plan.LabConfig(Path("/nowhere"), {})), settings=lab.settings(QUICK))
        self.fires = {"before": before, "broken": broken, "after": after}
        self.now = "before"
        self.undone = False
        self.broken_at = 0.0

    def breaks_now(self):
        self.broken_at = time.monotonic()

    async def begin_anew(self, pace):
        self.pace = pace

    async def arrived(self, alert):
        url = "http://127.0.0.1:9402/runbooks/VLLMEngineDown"
        return Firing({"alertname": alert, "job": "vllm"}, {"runbook_url": url}) if self.fires[self.now] else None

    async def gone(self, alert):
        return not self.fires[self.now]

    async def state(self, alert):
        return "firing" if self.fires[self.now] else "inactive"

    async def query(self, expr):
        return None

    @contextlib.asynccontextmanager
    async def fault(self, _):
        self.now = "broken"
        try:
            yield
        finally:
            self.now, self.undone = "after", True


async def drilled(fake: FakeLab, **changes) -> run.DrillOutcome:
    drill = Drill("VLLMEngineDown", "what", fake.fault, fires_within_s=0.01, resolves_within_s=0.01, **changes)
    return await run._drilled(fake, drill)


async def test_firing_and_resolving_alert_succeeds():
    """An alert that fires and resolves is a success with its page and labels."""
    outcome = await drilled(FakeLab())
    assert ("", "VLLMEngineDown.md", "vllm") == (outcome.trouble, outcome.runbook, outcome.labels["job"])
    assert None not in (outcome.fired_s, outcome.resolved_s)


async def test_silent_alert_fails_and_the_fault_is_removed():
    """An alert that does not fire fails with what was seen and the fault is taken away."""
    fake = FakeLab(broken=False)
    outcome = await drilled(fake)
    expr = next(alert.expr for alert in registry.alerts(lab.settings(fake.pace)) if alert.name == "VLLMEngineDown")
    assert f"it did not fire within 0 s: inactive at Prometheus; now nothing comes of {expr}" == outcome.trouble
    assert (None, None, True) == (outcome.fired_s, outcome.resolved_s, fake.undone)


async def test_an_alert_that_does_not_resolve_fails():
    outcome = await drilled(FakeLab(after=True))
    assert outcome.trouble.startswith("it did not resolve within 0 s: firing at Prometheus")
    assert outcome.resolved_s is None


async def test_an_alert_that_fires_already_proves_nothing(monkeypatch):
    monkeypatch.setattr(run, "_QUIET_WITHIN_S", 0.01)
    fake = FakeLab(before=True)
    outcome = await drilled(fake)
    assert outcome.trouble.startswith("it fires already, before anything was done")
    assert not fake.undone


async def test_undelivered_alert_is_seen_at_prometheus():
    """An alert that cannot be told is seen at Prometheus and arrives later."""
    assert (
        "it fired at Prometheus and did not reach Alertmanager when that was back"
        == (await drilled(FakeLab(), seen_at_prometheus=True)).trouble
    )


async def test_watchdog_falls_silent_and_comes_again():
    """The alert that always fires must fall silent and come again."""
    assert "it did not come again" == (await drilled(FakeLab(before=True, broken=False), always=True)).trouble
    assert "" == (await drilled(FakeLab(before=True, broken=False, after=True), always=True)).trouble
    assert (
        "it went on although nothing sent it" == (await drilled(FakeLab(before=True, after=True), always=True)).trouble
    )


async def test_a_drill_that_is_interrupted_takes_its_fault_away():
    fake = FakeLab(broken=False)
    task = asyncio.create_task(run._drilled(fake, Drill("VLLMEngineDown", "what", fake.fault)))
    while fake.now != "broken":
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.undone


def test_drill_table_and_page_labels():
    """The table has every drill and the page begins with this alerts labels."""
    outcome = run.DrillOutcome(
        "VLLMEngineDown", "the engine is killed", "as in the lab", 9.2, 41.0, "VLLMEngineDown.md", "", {"job": "vllm"}
    )
    shown = run.table([outcome], plain=True)
    assert 1 == shown.row_count
    lines = list(run.first_lines(outcome))
    assert lines[0].startswith("VLLMEngineDown: ")
    assert "all of it: vllm-watch runbook VLLMEngineDown" == lines[-1]


# --- the command


def drill_command(*arguments):
    """With the times of tests (tests/support/at_test_pace.py)."""
    return [sys.executable, "-m", "tests.support.at_test_pace", "drill", *arguments]


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def drill(*arguments, cache=None, **options):
    env = environment(**({"VLLM_WATCH_CACHE": str(cache)} if cache else {}))
    return subprocess.run(
        drill_command(*arguments), capture_output=True, text=True, check=False, cwd=ROOT, env=env, **options
    )


def test_the_list_names_every_alert_once():
    listed = json.loads(drill("--list", "--json", timeout=60).stdout)
    assert sorted(alert.name for alert in ALERTS) == sorted(row["alert"] for row in listed)
    assert all(bool(row["drill"]) != bool(row["why_not"]) for row in listed)


def test_a_name_that_is_none_is_one_sentence():
    done = drill("EngineDwn", timeout=60)
    assert 2 == done.returncode
    assert "EngineDwn is no alert; did you mean VLLMEngineDown?" in done.stderr


def processes_below(folder: Path) -> list[str]:
    """Command lines of living processes that name a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command and state(int(entry.name)) != "Z":
                found.append(command)
    return found


def in_a_lab(test):
    """All that a drill's lab is made of."""
    return pytest.mark.engine(pytest.mark.prometheus(test))


@pytest.fixture(scope="module")
def cache(part, tmp_path_factory):
    for name in ("prometheus", "alertmanager", "engine", "model"):
        part(name)
    return own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def offset():
    return free_offset(plan.PORTS.values())


@in_a_lab
def test_six_alerts_fire_and_resolve_on_a_real_vllm(cache, offset):
    """One engine, six faults, one after the other; the rest is `make drills`."""
    done = drill("fast", "--json", "--port-offset", str(offset), cache=cache, timeout=600)
    report = json.loads(done.stdout or "{}")
    assert dict.fromkeys(FAST, "") == {row["alert"]: row["trouble"] for row in report["drills"]}, done.stderr
    assert (0, True) == (done.returncode, report["passed"])
    assert all(
        f"{row['alert']}.md" == row["runbook"] and row["fired_s"] > 0 and row["resolved_s"] > 0
        for row in report["drills"]
    )
    assert [] == processes_below(cache / f"drill-{offset}")


@in_a_lab
def test_ctrl_c_leaves_nothing_running(cache, offset):
    folder, listens = cache / f"drill-{offset}", f"--port {plan.PORTS['vllm'] + offset}"
    process = subprocess.Popen(
        drill_command("EngineDown", "--port-offset", str(offset)),
        stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(VLLM_WATCH_CACHE=str(cache)),
    )  # fmt: skip
    try:
        eventually(
            lambda: process.poll() is not None or listens in engines(), within_s=60, what="the engine being started"
        )
        assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert 130 == process.returncode
        assert "drill: stopped; nothing was left running" in said
        assert listens not in engines()
        assert [] == processes_below(folder)
    finally:
        process.kill()
        process.wait()


def engines() -> str:
    return " ".join(processes_below(install.find("model").path))
