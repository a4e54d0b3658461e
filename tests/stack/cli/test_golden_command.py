"""`vllm-watch golden`: options, exit statuses, the result file and the sidecar that reads it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from exporters.catalogue import exposition_parser, golden
from exporters.engine import golden_state
from exporters.engine.golden_state import GoldenVerdict, keep_result, read_states
from exporters.exposition import render
from exporters.sidecar import Sidecar
from stack import config
from stack.cli import golden as command
from tests.support.scoring_engine import ScoringEngine
from tests.support.wait import until


def invoked(engine: ScoringEngine, *arguments: str) -> Result:
    """Run the command beside a served engine; {url} stands for its address."""

    async def run() -> Result:
        async with engine.running() as url:
            given = [argument.format(url=url) for argument in arguments]
            return await asyncio.to_thread(CliRunner().invoke, command.golden, given)

    return asyncio.run(run())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.yaml"
    file.write_text("prompts:\n  - {name: one, text: the quick brown fox}\n  - {name: two, text: '3.14159 and 2.7'}\n")
    return file


@pytest.fixture
def baseline(tmp_path: Path, prompts: Path) -> Path:
    file = tmp_path / "tiny.golden.json"
    done = invoked(
        ScoringEngine(), "record", "{url}", "--baseline", str(file), "--prompts", str(prompts), "--runs", "12"
    )
    assert 0 == done.exit_code, done.output
    assert "tiny, 2 prompts with" in done.output
    assert "last bit" in done.output
    return file


def test_exit_status_is_the_verdict(baseline):
    same = invoked(ScoringEngine(), "check", "{url}", "--baseline", str(baseline))
    assert (0, True) == (same.exit_code, "tiny: same: all" in same.output), same.output
    wrong = invoked(ScoringEngine(template="[{}]"), "check", "{url}", "--baseline", str(baseline))
    assert (1, True) == (wrong.exit_code, "wrong (template)" in wrong.output), wrong.output
    down = ("check", "http://127.0.0.1:9", "{url}", "--baseline", str(baseline))
    for engine, status in ((ScoringEngine(), 2), (ScoringEngine(template="[{}]"), 1)):
        done = invoked(engine, *down)
        assert (status, 1) == (done.exit_code, done.stderr.count("Error: http://127.0.0.1:9/")), done.output
        assert "tiny: " in done.stdout, "the other engines are checked"
    told = invoked(ScoringEngine(), "check", "{url}", "--baseline", str(baseline), "--json")
    (row,) = json.loads(told.stdout)
    assert ("same", "none", 0.0, True) == (row["verdict"], row["cause"], row["max_abs"], row["tokens"] > 0)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["check", "{url}", "--baseline", "none.json"], r"none\.json.*golden record"),
        (["check", "--baseline", "x"], "name an engine"),
        (["check", "{url}", "--baseline", "{file}", "--every", "0s"], "--every.*at least 1s"),
        (
            ["check", "{url}", "--baseline", "{file}", "--every", "1h", "--tokens-per-hour", "10"],
            "[0-9]+ tokens, .*--tokens-per-hour 10;",
        ),
        (["check", "127.0.0.1:8000", "--baseline", "{file}"], "127.0.0.1:8000.*http://"),
        (["record", "{url}", "--baseline", "{file}"], "tiny.golden.json .*--replace"),
        (["record", "{url}", "--baseline", "new.json", "--model", "big"], "tiny, not big"),
        (["record", "{url}", "--baseline", "new.json", "--prompts", "{bad}"], "bad.yaml: promts .*mean prompts"),
        (["check", "{url}", "--baseline", "{file}", "--result", "{bad}"], "bad.yaml.*no result file"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(baseline, tmp_path, monkeypatch, arguments, facts):
    monkeypatch.delenv("VLLM_WATCH_ENGINE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("promts: []\n")
    files = {"file": str(baseline), "bad": str(tmp_path / "bad.yaml"), "url": "{url}"}
    done = invoked(ScoringEngine(), *(argument.format(**files) for argument in arguments))
    assert 2 == done.exit_code, done.output
    assert re.search(facts, " ".join(done.output.split())), done.output
    assert not (tmp_path / "new.json").exists()


def test_result_file_continues_over_checks(baseline, tmp_path):
    kept = tmp_path / "golden.json"
    once = ("check", "{url}", "--baseline", str(baseline), "--result", str(kept))
    invoked(ScoringEngine(), *once)
    (first,) = read_states(kept)
    wrong = invoked(ScoringEngine(nan="400"), *once)
    assert "wrong (not finite)" in wrong.output
    states = read_states(kept)
    assert {GoldenVerdict.SAME, GoldenVerdict.WRONG} == {state.result.verdict for state in states}, "two addresses"
    keep_result(kept, first.result, 3600.0)
    again = next(state for state in read_states(kept) if state.result.address == first.result.address)
    assert (2 * first.tokens_total, 3600.0) == (again.tokens_total, again.interval_s)
    keep_result(kept, first.result, None)
    again = next(state for state in read_states(kept) if state.result.address == first.result.address)
    assert 3600.0 == again.interval_s, "a check on demand leaves the schedule as it is"
    page = exposition_parser.parse(render(golden_state.samples(read_states(kept))))
    name = {"model_name": "tiny", "address": first.result.address}
    assert 1 == page.total(golden.GOLDEN_VERDICT.name, **name, verdict="same", cause="none")
    assert again.tokens_total == page.total(golden.GOLDEN_TOKENS.name, **name)
    assert 0 == page.total(golden.GOLDEN_DIFFERENCE.name, **name)
    assert 3600 == page.total(golden.GOLDEN_INTERVAL.name, **name)
    assert 2 == len(list(page.of(golden.GOLDEN_VERDICT.name)))
    assert 1 == len(list(page.of(golden.GOLDEN_DIFFERENCE.name))), "absent where nothing was compared"


async def test_checks_repeat_until_the_process_is_told_to_end(baseline, tmp_path):
    kept, root = tmp_path / "golden.json", Path(__file__).parents[3]
    async with ScoringEngine().running() as url:
        command = [sys.executable, "-m", "stack.cli", "golden", "check", url, "http://127.0.0.1:9", "--every", "1s"]
        command += ["--baseline", str(baseline), "--result", str(kept)]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stdout=-1, stderr=-1
        )
        try:
            await until(
                lambda: kept.exists() and read_states(kept)[0].tokens_total > read_states(kept)[0].result.tokens
            )
        finally:
            process.terminate()
            out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert 0 == process.returncode, errors
    assert out.count(b"tiny: same") >= 2
    assert b"http://127.0.0.1:9/v1/models does not answer" in errors, "the other engine is down"
    assert 1.0 == read_states(kept)[0].interval_s


async def test_sidecar_exposes_the_result_file(tmp_path):
    kept, file = tmp_path / "golden.json", tmp_path / "sidecar.yaml"
    file.write_text("golden: [golden.json]\ngpu: 'off'\n")
    sidecar = Sidecar(config.sidecar(file))
    await sidecar.start()
    try:
        await until(lambda: 'vllm_watch_source_up{kind="golden"' in sidecar.page())
        assert f'vllm_watch_source_up{{kind="golden",source="{kept}"}} 0' in sidecar.page(), "no file yet"
    finally:
        await sidecar.stop()
