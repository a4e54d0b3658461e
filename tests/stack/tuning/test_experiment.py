"""Experiments: mistakes in their files, what engines say of themselves, and `tune` with engines that stand and engines
that it starts itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from exporters.events import log
from stack import config
from stack.bench import result, workload, workload_file
from stack.bench.result import Bench, BenchEngine
from stack.bench.run import schedule
from stack.bench.workload import WorkloadFile
from stack.cli import main
from stack.cli.bench import chosen
from stack.config import BadConfig
from stack.tuning import experiment, turns
from stack.tuning.comparison import Comparison
from stack.tuning.experiment import differences, read_settings
from tests.support.fake_engine import FakeEngine
from tests.support.wait import eventually

AS_WRITTEN = (
    "--seed",
    "18",
)  # draws off, on, on, off of two rounds; of any number of rounds the first variant comes first
SMALL = (
    "workloads:\n  - {name: small, input_tokens: 20, output_tokens: 2, concurrency: [4], requests: 8, warm_up: 1, runs:"
    " 2}\n"
)
DEV = {"model_config": {"model": "m"}, "cache_config": {"enable_prefix_caching": True}, "instance_id": "a"}


def written(folder: Path, text: str, workload: str = SMALL) -> Path:
    (folder / "small.yaml").write_text(workload)
    (folder / "experiment.yaml").write_text(text)
    return folder / "experiment.yaml"


def told_by(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", *arguments])


def last_line(found: Result) -> str:
    return found.output.splitlines()[-1]


def opened(text: str) -> WorkloadFile:
    return workload_file.understood(config.source(text, "w.yaml"))


# --- the file


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("arms:\n  a: {url: http://x}\n", "workload is missing"),
        ("workload: small.yaml\nrums: 3\narms: {}\n", r"line 2: rums .* runs\?"),
        ("workload: small.yaml\narms:\n  a: {url: http://x}\n", "line 2: arms: .* one; .* two "),
        ("workload: small.yaml\narms:\n  a: {url: http://x}\n  b: {}\n", r"line 4: arms\.b: nothing .* url, command "),
        (
            "workload: small.yaml\narms:\n  a: {url: http://x}\n  b: {url: http://y, lab: []}\n",
            r"line 4: arms\.b: url and lab ",
        ),
        (
            "workload: small.yaml\narms:\n  a: {url: http://x}\n  b:\n    command: vllm serve m\n",
            r"line 5: arms\.b\.command: .* no \{port\}",
        ),
        (
            'workload: small.yaml\narms:\n  a: {url: http://x}\n  b: {command: "vllm \'m {port}"}\n',
            r"line 4: arms\.b\.command: .*: no closing quotation",
        ),
        (
            "workload: small.yaml\narms:\n  a: {url: http://x}\n  b: {url: 'x:1'}\n",
            r"line 4: arms\.b\.url: 'x:1' .* http://127\.0\.0\.1:8000",
        ),
        (
            "workload: small.yaml\narms:\n  a: {url: http://x}\n  b: {url: http://y, env: {A: b}}\n",
            r"line 4: arms\.b\.env: .*\benvironment",
        ),
        (
            "workload: small.yaml\narms:\n  a: {url: http://x}\n  b/c: {url: http://y}\n",
            r"line 4: arms\.b/c: 'b/c' is no name",
        ),
        ("workload: small.yaml\narms:\n  a: {url: http://x}\n  1: {url: http://y}\n", "arms: YAML .* `int`; .* quotes"),
        ("workload: small.yaml\narms:\n  a: {url: http://x}\n  b: {urk: http://y}\n", r"line 4: arms\.b\.urk .* url\?"),
        (
            "workload: small.yaml\nruns: 0\narms:\n  a: {url: http://x}\n  b: {url: http://y}\n",
            "line 2: runs: 0 .* 1 or more",
        ),
        (
            "workload: small.yaml\nrequests: -1\narms:\n  a: {url: http://x}\n  b: {url: http://y}\n",
            "line 2: requests: -1 .* 1 or more",
        ),
        (
            "workload: small.yaml\nalso: [ttft.p95]\narms:\n  a: {url: http://x}\n  b: {url: http://y}\n",
            r"line 2: also\[0\]: ttft\.p95 is no figure",
        ),
        ("workload: small.yaml\norder: random\narms: {}\n", "line 2: order: .*'random'"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path, text, pattern):
    path = written(tmp_path, text)
    with pytest.raises(BadConfig) as told:
        experiment.load(path)
    assert str(path) in str(told.value)
    assert re.search(pattern, str(told.value))
    assert "\n" not in str(told.value)


def test_workload_is_looked_up_beside_the_file_only(tmp_path, monkeypatch):
    """A workload is looked for beside the file and nowhere else."""
    path = written(tmp_path, "arms:\n  a: {url: http://x}\n  b: {url: http://y}\nworkload: smal.yaml\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "smal.yaml").write_text(SMALL)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(
        BadConfig, match=r"experiment\.yaml, line 4: workload: \S+/smal\.yaml .*\bsmal\.yaml .*; .*\bshort-short\b"
    ):
        experiment.load(path)


def test_a_folder_beside_does_not_hide_a_shipped_workload(tmp_path):
    (tmp_path / "short-short").mkdir()
    its, suite = experiment.load(
        written(tmp_path, "workload: short-short\narms:\n  off: {url: http://x}\n  on: {url: http://y}\n")
    )
    assert (["off", "on"], "short-short") == (list(its.variants), suite.workloads[0].name)


# --- what engines say of themselves


@given(st.dictionaries(st.sampled_from(["a.b", "c", "x.port", "instance_id"]), st.sampled_from(["1", "2"])))
def test_configuration_ignores_what_each_start_changes(settings):
    """A configuration does not differ from itself nor by what every start changes."""
    assert {} == differences(settings, settings)
    assert {} == differences(
        settings, settings | {"x.port": "9", "instance_id": "9", "cache_config.num_gpu_blocks": "9"}
    )
    assert {"new": (None, "9")} == differences(settings, settings | {"new": "9"})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            None,
            {
                "cache_config.enable_prefix_caching": "True",
                "cache_config.kv_cache_memory_bytes": "8",
                "version": "0.32.0",
            },
        ),
        (
            DEV,
            {
                "cache_config.enable_prefix_caching": "True",
                "cache_config.kv_cache_memory_bytes": "8",
                "version": "0.32.0",
                "model_config.model": "m",
                "instance_id": "a",
            },
        ),
    ],
)
def test_development_mode_tells_more_than_the_page(settings, told):
    """An engine tells all in its development mode and else what its page says."""
    engine = FakeEngine()
    engine.settings = settings
    cache = {"enable_prefix_caching": "True", "kv_cache_memory_bytes": "8"}
    with standing(engine) as (url,):
        assert told == asyncio.run(
            read_settings(url, BenchEngine(url=url, model="tiny", version="0.32.0", cache=cache))
        )


# --- what is chosen of a workload's file

SEVERAL = """
workloads:
  - {name: one, input_tokens: 20, output_tokens: 2, concurrency: [2, 4], runs: 2}
  - {name: two, input_tokens: 20, output_tokens: 2, concurrency: 8, runs: 3}
  - {name: talk, input_tokens: 20, output_tokens: 2, turns: 3, turn_tokens: 5, concurrency: 4, runs: 1}
"""


@pytest.mark.parametrize(
    ("only", "loads"),
    [
        ((), ["one c2", "one c4", "two c8", "talk c4"]),
        (("two",), ["two c8"]),
        (("c4",), ["one c4", "talk c4"]),
        (("one", "talk", "c4"), ["one c4", "talk c4"]),
    ],
)
def test_only_what_is_named_is_run(only, loads):
    suite, points = chosen(opened(SEVERAL), only, None, None, None)
    assert loads == [f"{each.name} {point.label}" for each in suite.workloads for point in points(each)]


@pytest.mark.parametrize(
    ("only", "requests", "pattern"),
    [
        (("two", "c4"), None, "--only two --only c4 .*: two "),
        (("c9",), None, "--only c9 .* c2, c4, c8, one, talk, two$"),
        ((), 4, r" 4 requests .* workloads\[2\]\.requests: 4 .* turns \(3\); 6 "),
    ],
)
def test_what_leaves_nothing_to_run_is_refused(only, requests, pattern):
    with pytest.raises(ValueError, match=pattern):
        chosen(opened(SEVERAL), only, None, None, requests)


@pytest.mark.parametrize(
    ("runs", "counts"), [(None, {"one": 4, "two": 3, "talk": 1}), (2, {"one": 4, "two": 2, "talk": 2})]
)
def test_each_workload_has_its_own_number_of_runs(runs, counts):
    steps = schedule(opened(SEVERAL).workloads, workload.points, [["a"]] * 9, runs, True)
    assert counts == {name: sum(step.workload.name == name for step in steps) for name in counts}


# --- engines that stand


@contextlib.contextmanager
def standing(*engines: FakeEngine) -> Iterator[list[str]]:
    """Fake engines in a thread of their own, for commands that have a loop of their own."""
    loop, ready, urls = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for engine in engines:
                server = await stack.enter_async_context(TestServer(engine.app(), handler_cancellation=True))
                urls.append(str(server.make_url("/")).rstrip("/"))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield urls
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def two_variants(urls: list[str], more: str = "") -> str:
    return f"workload: small.yaml\n{more}arms:\n  off: {{url: '{urls[0]}'}}\n  on: {{url: '{urls[1]}'}}\n"


def test_two_standing_engines_take_turns_and_are_compared(tmp_path):
    slow, fast = FakeEngine(), FakeEngine()
    slow.first_s, slow.caching = 0.25, "False"
    with standing(slow, fast) as urls:
        told = told_by(
            str(written(tmp_path, two_variants(urls, "runs: 6\nalso: [ttft_ms.p95]\n"))),
            "--out",
            str(tmp_path / "o"),
            "--json",
        )
    assert 0 == told.exit_code, told.output
    assert re.search(r"off -> on, .*: cache_config\.enable_prefix_caching False -> True", told.stderr)
    assert "small c4: 6 runs of 8 requests x 2 variants" in told.stderr
    bench = result.read(tmp_path / "o")
    ran = [run.variant for run in bench.runs]
    assert [{"off", "on"}] * 6 == [set(ran[at : at + 2]) for at in range(0, 12, 2)], "one run of each in every round"
    assert ran == [
        variant for round_ in turns.draw(6, ["off", "on"], random.Random(f"{bench.seed} order")) for variant in round_
    ], "the seed repeats it"
    assert ["off", "on", "on", "off"] * 3 != ran
    assert ("interleaved", None, ["off", "on"]) == (
        bench.order,
        bench.cut,
        [variant.name for variant in bench.variants],
    )
    (judgement,) = msgspec.json.decode((tmp_path / "o" / "verdicts.json").read_bytes(), type=list[Comparison])
    assert json.loads(told.stdout)["judgements"] == json.loads(msgspec.json.encode([judgement]))
    verdicts = {finding.metric.figure: finding.verdict for finding in judgement.findings if finding.has_verdict}
    assert ("better", "better", "equivalent") == (
        verdicts["ttft_ms.p50"],
        verdicts["hit_ratio"],
        verdicts["error_ratio"],
    )
    assert "ttft_ms.p95" in verdicts
    assert judgement.controlled
    assert all(check.ok for check in judgement.checks if check.name in ("order", "period"))
    report = CliRunner().invoke(main, ["report", str(tmp_path / "o")])
    assert 0 == report.exit_code, report.output
    assert "TTFT" in (tmp_path / "o" / "report.html").read_text()


def test_runs_are_excluded_by_hand_and_the_comparison_says_so(tmp_path):
    slow, fast = FakeEngine(), FakeEngine()
    slow.first_s, slow.caching = 0.25, "False"
    with standing(slow, fast) as urls:
        told = told_by(str(written(tmp_path, two_variants(urls, "runs: 6\n"))), "--out", str(tmp_path / "o"))
    assert 0 == told.exit_code, told.output
    compared = CliRunner().invoke(main, ["compare", str(tmp_path / "o"), "--exclude-run", "7", "--json"])
    (judgement,) = json.loads(compared.stdout)["judgements"]
    variant = result.read(tmp_path / "o").runs[6].variant
    assert any(re.fullmatch(f"excluded .*: run 7 of {variant}", caveat) for caveat in judgement["caveats"])
    assert (
        "better" == next(each for each in judgement["findings"] if each["metric"]["figure"] == "ttft_ms.p50")["verdict"]
    )
    unknown = CliRunner().invoke(main, ["compare", str(tmp_path / "o"), "--exclude-run", "13"])
    assert 2 == unknown.exit_code, unknown.output
    assert re.search(r"--exclude-run 13: .* 1, 2, 3, .* 12$", last_line(unknown))
    two = CliRunner().invoke(main, ["compare", str(tmp_path / "o"), str(tmp_path), "--exclude-run", "1"])
    assert 2 == two.exit_code, two.output
    assert re.search("--exclude-run .* one bench", last_line(two))


def test_an_experiment_is_an_event_with_its_verdict(tmp_path):
    off, on = FakeEngine(), FakeEngine()
    off.first_s, off.caching = 0.25, "False"
    with standing(off, on) as urls:
        place = ("--events", str(tmp_path / "events.jsonl"))
        told = told_by(
            str(written(tmp_path, two_variants(urls, "runs: 6\ntitle: caching\n"))),
            "--out",
            str(tmp_path / "o"),
            *place,
        )
    assert 0 == told.exit_code, told.output
    bench = result.read(tmp_path / "o")
    (event,), bad = log.read(tmp_path / "events.jsonl")
    assert (0, bench.id, (bench.id,), "note") == (bad, event.id, bench.events, event.kind)
    assert re.match(r"experiment caching; on .* off \(small c4\): ", event.what)
    assert (("tuning", "better"), ("False", "True")) == (event.tags, event.diff["enable_prefix_caching"])
    assert event.at_s <= bench.runs[0].started_s < bench.runs[-1].ended_s <= (event.end_s or 0)


def test_alias_counts_under_the_series_name(tmp_path):
    """An alias is counted under the name of the engine's series."""
    engine = FakeEngine()
    engine.aliases = ("friendly",)
    with standing(engine) as (url,):
        arguments = [
            "bench",
            "run",
            str(opened_file(tmp_path)),
            "--engine",
            url,
            "--model",
            "friendly",
            "--out",
            str(tmp_path / "o"),
            "--runs",
            "1",
        ]
        told = CliRunner().invoke(main, arguments)
    assert 0 == told.exit_code, told.output
    bench = result.read(tmp_path / "o")
    assert ("friendly", "tiny") == (bench.variants[0].engine.model, bench.variants[0].engine.series)
    assert bench.runs[0].figures["prompt_tokens"] > 0


def opened_file(folder: Path) -> Path:
    written(folder, "")
    return folder / "small.yaml"


def test_sequential_runs_are_uncontrolled(tmp_path):
    off, on = FakeEngine(), FakeEngine()
    off.caching = "False"
    with standing(off, on) as urls:
        path = written(tmp_path, two_variants(urls, "order: sequential\n"))
        told = told_by(str(path), "--out", str(tmp_path / "o"), "--json")
    assert 0 == told.exit_code, told.output
    assert ["off", "off", "on", "on"] == [run.variant for run in result.read(tmp_path / "o").runs], (
        "as many runs as the workload says"
    )
    (judgement,) = json.loads(told.stdout)["judgements"]
    assert not judgement["controlled"]
    assert any(caveat.startswith("uncontrolled: sequential: ") for caveat in judgement["caveats"])


@pytest.mark.parametrize(
    ("settings", "same", "refused"),
    [((DEV, DEV | {"instance_id": "b"}), False, True), ((DEV, DEV), True, False), ((None, None), False, False)],
)
def test_variants_that_should_differ_and_do_not_are_refused(tmp_path, settings, same, refused):
    engines = FakeEngine(), FakeEngine()
    for engine, said in zip(engines, settings, strict=True):
        engine.settings = said
    with standing(*engines) as urls:
        told = told_by(
            str(written(tmp_path, two_variants(urls, f"runs: 1\nsame: {str(same).lower()}\n"))),
            "--out",
            str(tmp_path / "o"),
        )
    if refused:
        assert 2 == told.exit_code, told.output
        assert re.search("off and on .*nothing to compare; .*`same: true`", last_line(told))
        assert not (tmp_path / "o" / result.BENCH).exists()
    else:
        assert (0, not same) == (told.exit_code, "not verified" in told.output), told.output


def test_one_more_talkative_engine_is_no_difference(tmp_path):
    """One engine that says more than the other is no difference."""
    one, other = FakeEngine(), FakeEngine()
    one.settings = DEV
    with standing(one, other) as urls:
        told = told_by(str(written(tmp_path, two_variants(urls, "runs: 1\n"))), "--out", str(tmp_path / "o"))
    assert re.search("off and on .*not verified", told.output)
    assert "off -> on" not in told.output


@pytest.mark.parametrize("slash", ["", "/"])
def test_one_engine_twice_is_refused_unless_it_is_meant(tmp_path, slash):
    with standing(FakeEngine()) as (url,):
        path = written(tmp_path, two_variants([url, url + slash], "runs: 1\n"))
        told = told_by(str(path), "--out", str(tmp_path / "o"))
        assert 2 == told.exit_code, told.output
        assert re.search(rf"off and on .*same engine \({url}/?\); `same: true`", last_line(told))
        path.write_text(f"same: true\n{path.read_text()}")
        assert 0 == told_by(str(path), "--out", str(tmp_path / "o")).exit_code


def test_a_prompt_fits_into_the_shortest_context_of_all_variants(tmp_path):
    long, short = FakeEngine(), FakeEngine()
    short.context = 16
    with standing(long, short) as urls:
        told = told_by(str(written(tmp_path, two_variants(urls))), "--out", str(tmp_path / "o"))
    assert 2 == told.exit_code
    assert re.search(" context of 16; --scale ", last_line(told))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (two_variants(["http://127.0.0.1:9", "http://127.0.0.1:9/x"]), "no server .* http://127.0.0.1:9/x/v1/models "),
        (
            two_variants(["http://u:word@127.0.0.1:9", "http://u:word@127.0.0.1:9"]),
            " http://127.0.0.1:9 .* login, .*--api-key",
        ),
    ],
)
def test_no_engine_is_one_sentence_without_the_login(tmp_path, text, pattern):
    told = told_by(str(written(tmp_path, text)), "--out", str(tmp_path / "o"), *AS_WRITTEN)
    assert 2 == told.exit_code, told.output
    assert re.search(pattern, last_line(told))
    assert "word" not in told.output


def test_dying_engine_leaves_a_marked_bench(tmp_path):
    """An engine that dies leaves verdicts and a bench that is marked."""
    off, on = FakeEngine(), FakeEngine()
    off.caching = "False"
    on.behave = lambda number: "die" if number == 30 else "ok"
    with standing(off, on) as urls:
        told = told_by(str(written(tmp_path, two_variants(urls, "runs: 6\n"))), "--out", str(tmp_path / "o"))
    assert 1 == told.exit_code, told.output
    bench = result.read(tmp_path / "o")
    assert bench.cut is not None
    assert f"NOT WHOLE: {bench.cut}" in told.output
    assert (tmp_path / "o" / "verdicts.json").exists()
    for command in (["report"], ["compare"]):
        again = CliRunner().invoke(main, [*command, str(tmp_path / "o")])
        assert 0 == again.exit_code, again.output


WARM = """
workloads:
  - {name: w, input_tokens: 40, output_tokens: 2, shared_prefix_tokens: 30, prefix_groups: 30, cache: warm, concurrency: [2, 8], runs: 1, warm_up: 1}
"""  # noqa: E501


def test_all_that_is_shared_is_warm_before_each_load(tmp_path):
    """The first load has 20 requests and so 20 of the 30 prefixes, the second has all."""
    engine = FakeEngine()
    (tmp_path / "w.yaml").write_text(WARM)
    with standing(engine) as (url,):
        told = CliRunner().invoke(
            main, ["bench", "run", str(tmp_path / "w.yaml"), "--engine", url, "--out", str(tmp_path / "o")]
        )
    assert 0 == told.exit_code, told.output
    prefixes = [tuple(body["prompt"][:30]) for body in engine.bodies]
    first, second = result.read(tmp_path / "o").runs
    begun = len(prefixes) - second.asked
    assert (20, 32, 30) == (first.asked, second.asked, len(set(prefixes[begun:])))
    assert set(prefixes[begun:]) <= set(prefixes[:begun])
    assert 40.0 * 32 == second.figures["prompt_tokens"], "what warmed the cache is no part of the run"


def test_a_bench_that_was_killed_says_that_it_did_not_end(tmp_path):
    engine, seen = FakeEngine(), set()

    def looked(number: int) -> str:
        if number >= 10 and (tmp_path / "o" / result.BENCH).exists():  # the second run
            seen.add(result.read(tmp_path / "o").cut)
        return "ok"

    engine.behave = looked
    (tmp_path / "w.yaml").write_text(SMALL)
    with standing(engine) as (url,):
        assert (
            0
            == CliRunner()
            .invoke(main, ["bench", "run", str(tmp_path / "w.yaml"), "--engine", url, "--out", str(tmp_path / "o")])
            .exit_code
        )
    (cut,) = seen
    assert "its end" in cut
    assert result.read(tmp_path / "o").cut is None
    with (tmp_path / "o" / result.REQUESTS).open("ab") as file:
        file.write(b'{"request_id":"half of a li')
    assert 16 == len(list(result.requests(tmp_path / "o")))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("vllm serve m --api-key a b --port 1", "vllm serve m --api-key H H --port 1"),
        ("vllm serve m --api-key=a --hf-token b", "vllm serve m --api-key=H --hf-token H"),
        ("env HF_TOKEN=a VLLM_API_KEY=b vllm serve m", "env HF_TOKEN=H VLLM_API_KEY=H vllm serve m"),
        (
            "bash -c 'HF_TOKEN=a vllm serve m --api-key b --port 1'",
            "bash -c 'HF_TOKEN=H vllm serve m --api-key H --port 1'",
        ),
        ("vllm serve m --otlp-traces-endpoint http://u:word@h:1/x", "vllm serve m --otlp-traces-endpoint http://h:1/x"),
        (
            "vllm serve m --max-num-batched-tokens 2048 --enable-prefix-caching",
            "vllm serve m --max-num-batched-tokens 2048 --enable-prefix-caching",
        ),
    ],
)
def test_keys_tokens_and_logins_of_a_command_line_are_hidden(arguments, shown):
    assert shlex.split(shown) == [text.replace(result.HIDDEN, "H") for text in result.masked(shlex.split(arguments))]


class Late(FakeEngine):
    """Its page never counts an answer; or, where it restarts, says that the process began later once some were
    given."""

    restarts = False
    late_looks = 0  # at the page since ten requests were answered

    async def _metrics(self, request: web.Request) -> web.Response:
        self.late_looks += self.answered >= 10
        page = await super()._metrics(request)
        if self.restarts:
            return web.Response(
                text=(page.text or "").replace("_seconds 1000", f"_seconds {1000 + (self.answered > 4)}")
            )
        return web.Response(
            text=(page.text or "").replace(
                f'"length",model_name="tiny"}} {self.answered}', '"length",model_name="tiny"} 0'
            )
        )


def test_restarted_engine_has_no_counters_to_compare(tmp_path):
    """An engine that began anew meanwhile has no counters to compare."""
    engine = Late()
    engine.restarts = True
    (tmp_path / "w.yaml").write_text(SMALL)
    with standing(engine) as (url,):
        told = CliRunner().invoke(
            main, ["bench", "run", str(tmp_path / "w.yaml"), "--engine", url, "--out", str(tmp_path / "o")]
        )
    assert 1 == told.exit_code, told.output
    (only,) = result.read(tmp_path / "o").runs
    assert (8, f"{url} was restarted meanwhile") == (only.ok, only.cut)
    assert "ttft_ms.p50" in only.figures
    assert "hit_ratio" not in only.figures


def test_run_stopped_during_counter_reading_is_kept(tmp_path):
    """A run that is stopped while its counters are read is kept."""
    engine = Late()
    (tmp_path / "w.yaml").write_text(SMALL)
    with standing(engine) as (url,):
        bench = subprocess.Popen(
            [sys.executable, "-m", "stack.cli", "bench", "run", str(tmp_path / "w.yaml"), "--engine", url, "--out",
                str(tmp_path / "o")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        # one to tell how long it takes, one to warm up, all eight of the first run
        eventually(lambda: engine.late_looks, "counters that are read")
        bench.send_signal(signal.SIGINT)
        assert 1 == bench.wait(60)
    (only,) = result.read(tmp_path / "o").runs
    assert 8 == only.ok
    assert "counters were read" in (only.cut or "")
    assert 8 == len(list(result.requests(tmp_path / "o")))


SCORED = """
workloads:
  - name: w
    input_tokens: 400
    output_tokens: 3
    concurrency: 4
    requests: 4
    runs: 1
    endpoint: chat
    ignore_eos: false
    json: {schema: {type: object}, score: SCORE}
"""


@pytest.mark.parametrize(
    ("program", "score", "caveat"),
    [
        ("import sys; print(len(sys.stdin.read()))", 3.0, None),
        ("raise SystemExit('puzzled')", None, "no number: puzzled"),
    ],
)
def test_a_command_may_score_answers(tmp_path, program, score, caveat):
    (tmp_path / "w.yaml").write_text(SCORED.replace("SCORE", json.dumps([sys.executable, "-c", program])))
    with standing(FakeEngine()) as (url,):
        told = CliRunner().invoke(
            main, ["bench", "run", str(tmp_path / "w.yaml"), "--engine", url, "--out", str(tmp_path / "o")]
        )
    assert 0 == told.exit_code, told.output
    (only,) = result.read(tmp_path / "o").runs
    assert (1.0, score) == (only.figures["invalid_json_ratio"], only.figures.get("score.mean"))
    assert caveat is None or any(caveat in each for each in only.caveats)


# --- engines that are started

PROGRAM = f"""
import argparse, os, signal, subprocess, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
parser = argparse.ArgumentParser()
for name in ("--port", "--start-s", "--first-s"):
    parser.add_argument(name, type=float, default=0)
for name in ("--caching", "--die", "--api-key", "--pids"):
    parser.add_argument(name)
its = parser.parse_args()
child = subprocess.Popen(["sleep", "60"])
with open(its.pids, "a") as file:
    file.write(f"{{its.caching}} {{os.getpid()}} {{child.pid}}\\n")
time.sleep(its.start_s)
starts = sum(line.startswith(f"{{its.caching}} ") for line in open(its.pids))
if its.die and starts == int(its.die):
    print("loading")
    raise ValueError("no-such-model")
from aiohttp import web
from tests.support.fake_engine import FakeEngine
engine = FakeEngine()
engine.caching, engine.first_s, engine.settings = its.caching, its.first_s, {{"model_config": {{"model": "m"}}}}
app = engine.app()
async def health(_):
    return web.Response()
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=int(its.port), print=None)
"""


def started_variants(folder: Path, more: str = "", off: str = "", on: str = "") -> Path:
    (folder / "engine.py").write_text(PROGRAM)
    command = f"{sys.executable} {folder / 'engine.py'} --port {{port}} --pids {folder / 'pids'} --api-key secret"
    variants = "".join(
        f"  {name}: {{command: '{command} --caching {value}'}}\n"
        for name, value in (("off", f"False {off}"), ("on", f"True {on}"))
    )
    return written(folder, f"workload: small.yaml\n{more}arms:\n{variants}")


def starts(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "pids").read_text().splitlines()]


def alive(folder: Path) -> list[str]:
    """Processes that are still there of all that were started; what has ended and waits to be reaped is gone."""
    pids = [pid for line in (folder / "pids").read_text().splitlines() for pid in line.split()[1:]]
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_engines_are_started_for_their_turns_and_none_is_left(tmp_path):
    told = told_by(str(started_variants(tmp_path, "runs: 2\n")), "--out", str(tmp_path / "o"), *AS_WRITTEN)
    assert 0 == told.exit_code, told.output
    bench: Bench = result.read(tmp_path / "o")
    assert ["off", "on", "on", "off"] == [run.variant for run in bench.runs]
    assert ["True", "False", "True", "False"] == starts(tmp_path), "each once to be looked at, then as seldom as can be"
    assert {"off": ["cold", "warm"], "on": ["cold", "warm"]} == {
        variant.name: [start.kind for start in variant.starts] for variant in bench.variants
    }
    assert all(0 < start.seconds for variant in bench.variants for start in variant.starts)
    eventually(lambda: not alive(tmp_path), "the end of every process")
    assert any("started anew" in caveat for caveat in bench.caveats)
    assert 0.5 == bench.runs[1].figures["hit_ratio"]
    written_down = (tmp_path / "o" / result.BENCH).read_text()
    assert "--caching" in written_down
    assert f"--api-key '{result.HIDDEN}'" in told.output
    assert "secret" not in told.output + written_down


def test_together_all_engines_stand_at_once(tmp_path):
    told = told_by(
        str(started_variants(tmp_path, "runs: 2\ntogether: true\n")), "--out", str(tmp_path / "o"), *AS_WRITTEN
    )
    assert 0 == told.exit_code, told.output
    assert ["True", "False"] == starts(tmp_path)
    assert ["off", "on", "on", "off"] == [run.variant for run in result.read(tmp_path / "o").runs]
    eventually(lambda: not alive(tmp_path), "the end of every process")


def test_engine_dying_at_start_shows_its_last_lines(tmp_path):
    """An engine that dies while it starts is told by its last words."""
    told = told_by(str(started_variants(tmp_path, on="--die 1")), "--out", str(tmp_path / "o"), *AS_WRITTEN)
    assert 2 == told.exit_code, told.output
    assert re.search(r"\bon .* status 1\b.* ValueError: no-such-model \(.*\.log\)", last_line(told))
    assert not (tmp_path / "o" / result.BENCH).exists()
    eventually(lambda: not alive(tmp_path), "the end of every process")


def test_engine_not_coming_back_leaves_measurements(tmp_path):
    """An engine that does not come back leaves what was measured."""
    told = told_by(
        str(started_variants(tmp_path, "runs: 3\n", on="--die 2")), "--out", str(tmp_path / "o"), *AS_WRITTEN
    )
    assert 1 == told.exit_code, told.output
    bench = result.read(tmp_path / "o")
    assert ["off"] == [run.variant for run in bench.runs]
    assert "ValueError: no-such-model" in (bench.cut or "")
    assert f"NOT WHOLE: {bench.cut}" in told.output
    assert (tmp_path / "o" / "verdicts.json").exists()
    eventually(lambda: not alive(tmp_path), "the end of every process")


def test_a_program_that_is_not_there_is_one_sentence(tmp_path):
    path = written(
        tmp_path,
        "workload: small.yaml\narms:\n  a: {command: 'no-such-program {port}'}\n  b: {command: 'no-such-program {port}"
        " x'}\n",
    )
    told = told_by(str(path), "--out", str(tmp_path / "o"), *AS_WRITTEN)
    assert 2 == told.exit_code, told.output
    assert re.fullmatch(f"Error: b .*: no-such-program: {os.strerror(errno.ENOENT)}", last_line(told))


@pytest.mark.parametrize(
    ("moment", "variant", "again", "deaf"),
    [
        ("starting on", "--start-s 30", False, False),  # while an engine starts
        # while it is asked a first time; it would end its answer before itself
        ("off answers", "--first-s 30", True, False),
        ("run 1 of", "", False, False),  # between two runs, or while the next engine starts
        # a shell that puts it into the background leaves it deaf to SIGINT
        ("starting on", "--start-s 30", False, True),
    ],
)
def test_ctrl_c_at_any_time_leaves_no_process(tmp_path, moment, variant, again, deaf):
    path = started_variants(tmp_path, "runs: 3\n", off=variant, on=variant)
    tune = subprocess.Popen(
        [sys.executable, "-m", "stack.cli", "tune", str(path), "--out", str(tmp_path / "o"), *AS_WRITTEN],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[3],
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if deaf else None,
    )  # fmt: skip
    try:
        assert tune.stdout is not None
        for line in tune.stdout:
            if line.startswith(moment):
                break
        if moment.startswith("starting"):
            eventually(lambda: starts(tmp_path), "an engine that starts")
        tune.send_signal(signal.SIGTERM if deaf else signal.SIGINT)
        if again:
            eventually(lambda: not listening(tmp_path), "an engine that was told to end")
            tune.send_signal(signal.SIGINT)
        rest, _ = tune.communicate(timeout=60)
    finally:
        tune.kill()
        tune.wait()
    # the second may find a Python that is leaving and takes no more signals
    assert tune.returncode in (1, -signal.SIGINT if again else 1), rest
    assert "Traceback" not in rest
    eventually(lambda: not alive(tmp_path), "the end of every process")
    if moment.startswith("run"):
        bench = result.read(tmp_path / "o")
        assert 1 <= len(bench.runs)
        assert "stopped by hand" in (bench.cut or "")
        assert f"NOT WHOLE: {bench.cut}" in rest


def listening(folder: Path) -> bool:
    """Return whether the engine that was started last accepts connections."""
    pid = (folder / "pids").read_text().splitlines()[-1].split()[1]
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        with socket.create_connection(("127.0.0.1", int(words[words.index("--port") + 1])), 1):
            return True
    except (OSError, ValueError):
        return False


def test_the_examples_of_the_page_are_sound(tmp_path):
    """docs/guides/tuning.md: the indented blocks that begin with a file."""
    blocks = [
        textwrap.dedent(block)
        for block in re.findall(
            r"(?:^    .*\n)+", (Path(__file__).parents[3] / "docs/guides/tuning.md").read_text(), re.M
        )
    ]
    (its,) = [block for block in blocks if block.startswith("# prefix-caching.yaml")]
    (tmp_path / "prefix-caching.yaml").write_text(its)
    found, suite = experiment.load(tmp_path / "prefix-caching.yaml")
    assert (["off", "on"], ["shared-prefix"]) == (list(found.variants), [each.name for each in suite.workloads])
    short, *_ = [block for block in blocks if block.startswith("workloads:")]
    assert ["short-short"] == [each.name for each in opened(short).workloads]
