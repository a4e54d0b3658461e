"""`vllm-watch canary`: mistakes as one sentence, its guards, and the watch of engines."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from exporters.config import with_scalar
from exporters.net.prometheus import address
from exporters.requests.record import PROBE_TEAM
from stack import cli
from stack.canary import watch
from stack.canary.controller import new_state
from stack.canary.guards import BackgroundGuard, BudgetQuery, GoldenQuery, RotationGuard
from stack.canary.state import EngineVersion, write_state
from stack.canary.teams_file import read_teams
from stack.config import BadConfig
from stack.golden.prompts import PromptSet, TextPrompt
from stack.golden.record import RecordPlan, record
from tests.support.canary_scene import TEAMS
from tests.support.scoring_engine import ScoringEngine

ROOT = Path(__file__).parents[3]
GOOD = TEAMS.format(share="0", decide_s="6000")


@contextmanager
def answering(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """A server whose answer to a GET is `answer(path)`; its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def run(folder: Path, *options: str) -> Result:
    teams, events = folder / "teams.yaml", folder / "events.jsonl"
    return CliRunner().invoke(cli.main, ["canary", str(teams), "--events", str(events), *options])


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (GOOD.replace("share: 0 ", "share: 1.2 "), r"teams\.yaml, line 8: canary\.share: 1\.2 .*0 to 1"),
        (GOOD.replace("share: 0 ", "variant: canery\n  share: 0 "), r"canary\.variant: 'canery' .*mean canary\?"),
        (GOOD.replace("steps: [0.05, 0.2, 0.5]", "steps: [0.5, 0.2]"), r"canary: steps .*\[0\.05, 0\.2, 0\.5\]"),
        (GOOD.partition("canary:\n")[0], r"teams\.yaml: canary .*`canary: {variant: NAME, share: 0}`"),
        ("teams: [", r"teams\.yaml.*invalid YAML"),
        (None, r"teams\.yaml .*No such file"),
    ],
)
def test_a_mistake_in_teams_is_one_sentence(tmp_path: Path, text: str | None, facts: str):
    if text is not None:
        (tmp_path / "teams.yaml").write_text(text)
    (tmp_path / "requests.jsonl").touch()
    result = run(tmp_path, "--log", str(tmp_path / "requests.jsonl"))
    assert 2 == result.exit_code
    assert re.search(facts, result.stderr), result.stderr
    assert 1 == result.stderr.count("Error: ")
    assert {"teams.yaml", "requests.jsonl"} >= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ((), r"--log; .*requests_log .*gateway\.yaml"),
        (("--log", "no.jsonl"), r"no\.jsonl .*--log .*requests_log .*gateway\.yaml"),
        (("--log", "teams.yaml", "--act"), "--act .*--reload COMMAND"),
        (("--log", "teams.yaml", "--gateway", "http://u:secret@h:1"), "--gateway 'h:1' .*http://127.0.0.1"),
        (("--log", "teams.yaml", "--report", "no/page.html"), r"no/page\.html .*--report"),
        (("--log", "teams.yaml", "--state", "no/state.json"), r"no/state\.json .*No such file.*--state"),
    ],
)
def test_a_mistake_in_options_is_one_sentence(tmp_path: Path, monkeypatch, options: tuple[str, ...], facts: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "teams.yaml").write_text(GOOD)
    result = run(tmp_path, *options)
    assert 2 == result.exit_code
    assert re.search(facts, result.stderr), result.stderr
    assert ["teams.yaml"] == [path.name for path in tmp_path.iterdir()]


def test_a_state_of_another_canary_stops_the_command(tmp_path: Path):
    (tmp_path / "teams.yaml").write_text(GOOD)
    (tmp_path / "canary-state.json").write_text("[]")
    result = run(tmp_path, "--log", str(tmp_path / "teams.yaml"))
    assert 2 == result.exit_code
    assert re.search(r"canary-state\.json .*no state .*--state", result.stderr), result.stderr
    assert GOOD == (tmp_path / "teams.yaml").read_text()


def test_help_ends_with_an_example(tmp_path: Path):
    text = CliRunner().invoke(cli.main, ["canary", "--help"]).stdout
    assert "vllm-watch canary teams.yaml --log requests.jsonl" in text.rpartition("Example:")[2]


def test_a_run_over_is_over_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A guard's act needs no log: the command ends by itself, and once more says the same."""
    monkeypatch.chdir(tmp_path)
    Path("teams.yaml").write_text(GOOD.replace("limit_s: 20000", "limit_s: 1").replace("decide_s: 6000", "decide_s: 1"))
    Path("requests.jsonl").touch()
    command = ["canary", "teams.yaml", "--log", "requests.jsonl", "--events", "events.jsonl", "--act", "--reload",
        "touch reloaded"]  # fmt: skip
    done = [CliRunner().invoke(cli.main, command) for _ in range(2)]
    assert [4, 4] == [one.exit_code for one in done]
    assert done[0].stdout == done[1].stdout
    assert done[0].stdout.startswith("undecided: ")
    assert "enough requests;" in done[0].stdout
    assert done[0].stdout.endswith(f" {tmp_path / 'canary-report.html'}\n")
    assert 2 == len(Path("events.jsonl").read_text().splitlines())
    assert Path("reloaded").exists()


def test_a_command_that_only_watched_starts_without_watch(tmp_path: Path):
    """Interrupted while it waited, and started again without --watch."""
    (tmp_path / "teams.yaml").write_text(GOOD.replace("limit_s: 20000", "limit_s: 1"))
    (tmp_path / "requests.jsonl").touch()
    state = new_state(read_teams((tmp_path / "teams.yaml").resolve()), 1.0)
    state.done = "watching"
    write_state(tmp_path / "canary-state.json", state)
    result = run(tmp_path, "--log", str(tmp_path / "requests.jsonl"))
    assert 4 == result.exit_code
    assert result.stdout.startswith("undecided: ")


# ---- the share in the file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n  b: 1   # one\n  c: 2\n", "a:\n  b: 0.25   # one\n  c: 2\n"),
        ("a: {c: [1, 2], b: 0.05}  # x", "a: {c: [1, 2], b: 0.25}  # x"),
        ('{"a": {"b": "1"}}', '{"a": {"b": 0.25}}'),
        ("é: é\r\na:\r\n  b:   1\r\n", "é: é\r\na:\r\n  b:   0.25\r\n"),
    ],
)
def test_only_the_value_changes(text: str, expected: str):
    assert expected == with_scalar(text, "f", ("a", "b"), "0.25")


@pytest.mark.parametrize("text", ["a: {}", "a: {b: [1]}", "x: &x 1\na: {b: *x}", "a: [", ""])
def test_a_value_that_is_not_there_is_a_mistake(text: str):
    with pytest.raises(BadConfig, match=r"^f: a\.b .*`b: 0\.25`$"):
        with_scalar(text, "f", ("a", "b"), "0.25")


# ---- guards


def test_the_guard_of_the_rotation_asks_each_gateway(caplog: pytest.LogCaptureFixture):
    answers = {"new": (503, b"new: suspect (steps_stopped)\n"), "soon": (503, b"soon: loading (starting)\n")}

    def answer(path: str) -> tuple[int, bytes]:
        return answers.get(path.rpartition("=")[2], (200, b"ok"))

    with answering(answer) as (url, requests):
        guard = RotationGuard([url, "http://127.0.0.1:1"], ["new", "soon", "other"])
        for _ in range(2):
            (reason,) = guard()
            assert reason.endswith(" new: suspect (steps_stopped)")
        assert 6 == len(requests)
        assert 3 == caplog.text.count(" http://127.0.0.1:1 "), "once for each engine"
        answers["new"], answers["other"] = (200, b"ok"), (503, b"other: loading (refused)\n")
        (reason,) = guard()
        assert reason.endswith(" other: loading (refused)"), "it was ready before"
        answers["other"] = (404, b"name one engine")
        assert [] == guard()
    assert re.search(rf"{url} .*404 .*\bother\b.*--gateway", caplog.text)


def test_the_guard_of_the_budget_reads_fast_burns_of_its_models():
    def alert(name: str, model: str, state: str = "firing") -> dict[str, object]:
        return {"labels": {"alertname": name, "model_name": model}, "state": state}

    alerts = [
        alert("VLLMTTFTBudgetBurn", "chat"), alert("VLLMTTFTBudgetSlowBurn", "chat"),
        alert("VLLMTTFTBudgetBurn", "other"), alert("VLLMSuccessBudgetBurn", "chat", "pending"),
    ]  # fmt: skip
    body = json.dumps({"status": "success", "data": {"alerts": alerts}}).encode()
    with answering(lambda _: (200, body)) as (url, _):
        (reason,) = asyncio.run(BudgetQuery(address(url), {"chat"})())
        assert re.fullmatch("VLLMTTFTBudgetBurn .*chat", reason)
        assert 2 == len(asyncio.run(BudgetQuery(address(url), None)()))
    assert [] == asyncio.run(BudgetQuery(address(url), None)()), "nobody answers"


def test_a_guard_in_the_background_delays_nothing():
    now, answers, asked, go = [0.0], [["worse"], []], threading.Event(), threading.Event()

    async def ask() -> list[str]:
        asked.set()
        await asyncio.to_thread(go.wait)
        return answers.pop(0)

    guard = BackgroundGuard(ask, 15.0, lambda: now[0])
    assert [] == guard()
    assert asked.wait(60)
    assert [] == guard(), "no answer yet, and no second question"
    go.set()
    guard.wait()
    assert ["worse"] == guard()
    assert 1 == len(answers)
    now[0] = 15.0
    guard()
    guard.wait()
    assert [] == guard(), "a reason that is over stops no later run"


@pytest.mark.parametrize(
    ("engine", "causes", "down"),
    [
        (ScoringEngine(key="k", version="0.33.0"), [], False),
        (ScoringEngine(key="k", nan="400"), ["not_finite"], False),
        (ScoringEngine(), [], True),
    ],
)
async def test_golden_prompts_stop_a_canary_that_is_wrong(
    tmp_path: Path, engine: ScoringEngine, causes: list[str], down: bool, caplog: pytest.LogCaptureFixture
):
    """Another release is none of the reasons; an engine that does not answer is left to the other guards."""
    prompts = PromptSet(prompts=(TextPrompt("one", "the quick brown fox"), TextPrompt("two", "3.14159 and 2.7")))
    async with ScoringEngine().running() as url:
        baseline = await record(url, RecordPlan(prompts=prompts, runs=12))
    async with engine.running() as url:
        address = "http://127.0.0.1:1" if down else url
        found = await GoldenQuery(baseline, {"new": (address, engine.key)}, tmp_path / "probes.jsonl")()
    assert causes == [re.sub(r"golden prompts: new .*\((\w+)\): .*", r"\1", reason) for reason in found]
    assert down == ("golden prompts: " in caplog.text and "127.0.0.1:1" in caplog.text)
    if not down:
        assert PROBE_TEAM in (tmp_path / "probes.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--golden", "none.json"), "none.json"),
        (("--golden", "teams.yaml"), "teams.yaml"),
        (("--probe-log", "p.jsonl"), "--probe-log goes with --golden"),
    ],
)
def test_a_mistake_about_golden_prompts_is_one_sentence(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "teams.yaml").write_text(GOOD)
    (tmp_path / "requests.jsonl").touch()
    result = run(tmp_path, "--log", "requests.jsonl", *options)
    assert (2, 1) == (result.exit_code, result.stderr.count("Error: ")), result.stderr
    assert words in result.stderr
    assert {"teams.yaml", "requests.jsonl"} == {path.name for path in tmp_path.iterdir()}


# ---- the watch


def test_a_new_version_or_configuration_starts_a_run(monkeypatch: pytest.MonkeyPatch):
    text, version = ['vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1\n'], ["0.32.0"]

    async def scrape(url: str) -> tuple[str, str | None]:
        if not text[0]:
            raise OSError(f"{url} does not answer")
        return text[0], version[0]

    monkeypatch.setattr(watch, "scrape_engine", scrape)
    known: dict[str, EngineVersion] = {}

    def look() -> list[str]:
        nonlocal known
        known, changed = watch.look(known, ["http://new"])
        return changed

    assert [] == look()
    assert [] == look()
    version[0] = "0.33.0"
    assert ["http://new went from vLLM 0.32.0 to 0.33.0"] == look()
    kept, text[0] = text[0], ""
    assert [] == look()  # it starts anew, and then has other blocks
    text[0] = kept.replace("16", "32")
    assert ["http://new changed block_size"] == look()
    assert [] == look()
