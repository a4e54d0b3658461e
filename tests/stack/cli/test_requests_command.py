"""`vllm-watch requests` as a user types it."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from exporters.requests.record import to_line, unix_seconds
from stack.cli import main
from stack.root import ROOT
from tests.support.request_dataset import made_requests, make_dataset

RECORDS = made_requests(400)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    path.write_bytes(b"".join(map(to_line, RECORDS)))
    return str(path)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["requests", *words])


def test_slowest(log: str):
    found = json.loads(run("--log", log, "--slowest", "ttft", "--team", "chat", "--limit", "3", "--json").stdout)
    known = sorted((r.ttft_ms for r in RECORDS if r.team == "chat" and r.ttft_ms is not None), reverse=True)
    assert known[:3] == [row["ttft_ms"] for row in found["rows"]]
    assert {"chat"} == {row["team"] for row in found["rows"]}


def test_groups_and_percentiles(log: str):
    rows = list(csv.DictReader(run("--log", log, "--group-by", "team,outcome", "--csv").stdout.splitlines()))
    assert len(RECORDS) == sum(int(row["requests"]) for row in rows)
    rows = list(csv.DictReader(run("--log", log, "--percentiles", "--group-by", "model", "--csv").stdout.splitlines()))
    assert {"ttft", "tpot", "e2e", "queue"} == {row["time"] for row in rows}
    times = sorted(r.e2e_ms for r in RECORDS if r.e2e_ms is not None and r.model == "large")
    (large,) = (row for row in rows if row["model"] == "large" and row["time"] == "e2e")
    assert (len(times), times[-1]) == (int(large["count"]), float(large["max_ms"]))


def test_show_as_table_json_and_html(log: str, tmp_path: Path):
    one = next(r for r in RECORDS if r.ttft_ms and r.e2e_ms and r.engine_queue_ms)
    found = json.loads(run("--log", log, "show", one.request_id, "--json").stdout)
    assert one.e2e_ms == pytest.approx(sum(phase["length_ms"] for phase in found["phases"]), abs=0.01)
    assert 1 == pytest.approx(sum(part["share"] for part in found["blame"]), abs=0.01)
    text = run("--log", log, "show", one.request_id).stdout
    assert f"request {one.request_id}" in text
    assert "engine queue" in text
    page = tmp_path / "page.html"
    assert 0 == run("--log", log, "show", one.request_id, "--html", str(page)).exit_code
    assert one.request_id in page.read_text()
    assert "<script>" not in page.read_text()


def test_times_are_utc_wherever_the_machine_is(log: str):
    """A process of its own, because the time zone is read at its start."""
    one = next(r for r in RECORDS if r.ts and r.e2e_ms)
    words = [sys.executable, "-m", "stack.cli", "requests", "--log", log, "show", one.request_id, "--json"]
    found = subprocess.run(
        words, env={**os.environ, "TZ": "America/New_York"}, cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert unix_seconds(str(one.ts)) == unix_seconds(json.loads(found.stdout)["record"]["ts"])


def test_sql(log: str):
    found = run("--log", log, "sql", "SELECT sum(requests) AS all_requests FROM traffic", "--csv")
    assert f"all_requests\n{len(RECORDS)}\n" == found.stdout
    assert {"requests", "traffic"} <= set(re.findall(r"^(\w+): ", run("sql", "--views").stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--team", "chatt"), r"team 'chatt' .*mean chat\?"),
        (("--outcome", "reject"), r"outcome 'reject'; .*mean rejected\?"),
        (("--slowest", "tfft"), r"time 'tfft'; .*mean ttft\?"),
        (("--group-by", "tema"), r"field 'tema'; .*mean team\?"),
        (("--from", "now", "--to", "now-1h"), "range ends before"),
        (("show", "nobody"), "'nobody' .*--since"),
        (("sql", "COPY requests TO 'x'"), "one SELECT .*`vllm-watch requests sql --views`"),
        (("show", "r1-1", "--trace-url", "http://x"), "--trace-url .*{trace_id}"),
        (("--ship-config", "ship.yaml"), "--ship-config .*--data and --log"),
        (("--data", "data"), "--data and --log .*twice; .*--ship-config"),
        (("dashboard", "--database", "a; DROP TABLE b"), "--database 'a; DROP .*vllm_watch"),
        (("dashboard", "--database", "1a"), "--database '1a' .*vllm_watch"),
    ],
)
def test_mistakes(log: str, words: tuple[str, ...], facts: str):
    found = run("--log", log, *words)
    assert 2 == found.exit_code
    assert re.search(facts, found.stderr), found.stderr


def test_data_set_of_the_last_day_by_default(tmp_path: Path):
    """Old requests are outside; a time range finds them."""
    make_dataset(tmp_path, RECORDS)
    assert [] == json.loads(run("--data", str(tmp_path), "--json").stdout)["rows"]
    found = json.loads(run("--data", str(tmp_path), "--from", "2025-11-24", "--group-by", "cluster", "--json").stdout)
    assert [("test", len(RECORDS))] == [(row["cluster"], row["requests"]) for row in found["rows"]]


def test_a_damaged_segment_is_named_left_out_and_counted(tmp_path: Path):
    segments = make_dataset(tmp_path, RECORDS)
    victim = max(segments, key=lambda one: one.sums.requests)
    path = tmp_path / victim.key
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    words = ("--data", str(tmp_path), "--from", "2025-11-24", "--group-by", "cluster")
    done = run(*words, "--json")
    found = json.loads(done.stdout)
    assert [("test", len(RECORDS) - victim.sums.requests)] == [
        (row["cluster"], row["requests"]) for row in found["rows"]
    ]
    damaged, counted = found["notes"]
    assert re.search(rf"{re.escape(victim.key)} .*\bhash$", damaged)
    assert counted.startswith(f"1 of {len(segments)} segments")
    text = " ".join(run(*words).output.split())
    assert damaged in text
    assert counted in text


def test_writers_of_one_data_set_are_counted_together(tmp_path: Path):
    """Two gateways with a log each, written by the real command; a writer's name that is taken is refused."""
    for number in range(2):
        folder = tmp_path / f"gateway-{number}"
        folder.mkdir()
        (folder / "requests.jsonl").write_bytes(b"".join(map(to_line, RECORDS[number::2])))
        settings = {"dataset": str(tmp_path / "data"), "cluster": "c", "writer": f"gateway-{number}", "state": "state"}
        (folder / "ship.yaml").write_text(yaml.safe_dump(settings | {"requests_log": ["requests.jsonl"]}))
        done = CliRunner().invoke(main, ["ship", "run", "--once", "--config", str(folder / "ship.yaml")])
        assert 0 == done.exit_code, done.output
    words = ("--data", str(tmp_path / "data"), "--from", "2025-11-24")
    found = json.loads(
        run(*words, "sql", "SELECT writer, count(*) AS n FROM requests GROUP BY 1 ORDER BY 1", "--json").stdout
    )
    assert [("gateway-0", 200), ("gateway-1", 200)] == [(row["writer"], row["n"]) for row in found["rows"]]
    (folder / "ship.yaml").write_text(yaml.safe_dump(settings | {"requests_log": ["requests.jsonl"], "state": "other"}))
    done = CliRunner().invoke(main, ["ship", "run", "--once", "--config", str(folder / "ship.yaml")])
    assert 2 == done.exit_code
    assert "gateway-1" in done.output
    assert len(RECORDS) == json.loads(run(*words, "--group-by", "cluster", "--json").stdout)["rows"][0]["requests"]


def test_statements_for_other_engines():
    for engine in ("clickhouse", "trino", "athena"):
        found = run("ddl", engine, "s3://bucket/logs")
        assert 0 == found.exit_code, found.output
        assert "REPLACE VIEW" in found.stdout
    assert "did you mean" in run("sink", "kafak").stderr
    for sink in ("clickhouse", "kafka", "nats", "loki"):
        assert "request_id" in run("sink", sink).stdout


def test_missing_libraries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = run("--log", "x")
    assert 2 == found.exit_code
    assert "pip install 'vllm-watch[data]'" in found.stderr
