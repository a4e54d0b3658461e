"""A fleet's Prometheus: the printed configuration finds targets, holds pages to their limits, and writes to a real
long-term store, which then answers the boards as Prometheus does."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import HTTPBasicAuthHandler, HTTPPasswordMgrWithDefaultRealm, Request, build_opener

import pytest
import yaml
from click.testing import CliRunner

from alerts import fleet as recorded
from alerts import printer
from alerts.registry import RECORDINGS
from alerts.settings import DEFAULTS
from dashboards import variables
from dashboards.interpolate import ALL, Range, fill
from dashboards.model import Dashboard, Query
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, promql, promql_ast, vllm
from exporters.net.prometheus import Prometheus, address
from stack.cli import main
from stack.deploy.fleet import budget, files
from stack.lab import install
from stack.lab.install import cache
from tests.support import panel_fixtures as fixtures
from tests.support.panel_fixtures import HOUR_S, Line
from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / files.FOLDER
CONFIGS = sorted(FOLDER.glob("prometheus*.yml"))
PACE = 100  # five minutes of the rules are three seconds
BEFORE_S = 20  # what the first look at a page brings along: longer than the windows that are compared
PASSWORD = "a word"
ENGINES = ("vllm-0:8000", "vllm-1:8000", "captured:8000")  # the last comes later
NEAR, OVER = "near:8000", "over:8000"  # of pages too long and nearly so
NEAR_LIMIT = 'ALERTS{alertname="VLLMScrapeNearLimit", alertstate="firing"}'


def text(config: Path) -> dict:
    return yaml.safe_load(config.read_text())


def jobs(config: Path) -> dict[str, dict]:
    return {job["job_name"]: job for job in text(config)["scrape_configs"]}


# ---- what is printed


@pytest.mark.prometheus
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_promtool_takes_configurations_with_rules(part, config, tmp_path):
    """Promtool takes every configuration with the rules and the job by dns."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / "alerts/prometheus", tmp_path / "rules")
    shutil.copytree(tmp_path / "more", tmp_path / "jobs")
    for secret in re.findall(r"secrets/([\w-]+)", config.read_text()):
        (tmp_path / "secrets").mkdir(exist_ok=True)
        (tmp_path / "secrets" / secret).write_text(PASSWORD)
    done = subprocess.run(
        [part("promtool").path, "check", "config", tmp_path / config.name], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "5 rule files found" not in done.stdout
    assert "4 rule files found" in done.stdout


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_no_password_stands_in_a_configuration(config):
    for written in text(config).get("remote_write", ()):
        auth = written.get("basic_auth") or written["authorization"]
        assert {"username", "password_file"} == auth.keys() or {"type", "credentials_file"} == auth.keys()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_nothing_that_the_catalogue_holds_is_dropped_from_a_page(config):
    samples = {sample for metric in EVERYTHING for sample in metric.samples}
    for job in jobs(config).values():
        for rule in job.get("metric_relabel_configs", ()):
            assert "drop" == rule["action"]
            assert [] == [sample for sample in samples if re.fullmatch(rule["regex"], sample)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_target_label_does_not_replace_a_page_label(config):
    """Prometheus would call the page's own exported_team, and honor_labels would let a page say which target it is."""
    for name in ("vllm", "gateway", "sidecar"):
        job = jobs(config)[name]
        (rule,) = job["relabel_configs"]
        assert all(
            re.fullmatch(rule["regex"], label)
            for label in ("team", "model_name", "engine", "upstream", "type", "kind", "uuid", "le")
        )
        assert not any(
            re.fullmatch(rule["regex"], label)
            for label in ("cluster", "namespace", "pod", "__address__", "instance", "job")
        )
        assert "honor_labels" not in job


def test_a_store_is_sent_what_is_recorded_and_no_raw_series():
    for store in files.STORES:
        (written,) = text(FOLDER / f"prometheus-{store.name}.yml")["remote_write"]
        kept = written["write_relabel_configs"][0]["regex"]
        assert all(re.fullmatch(kept, recording.record) for recording in RECORDINGS)
        raw = {sample for metric in EVERYTHING for sample in metric.samples} - set(files.ALWAYS)
        assert set() == {name for name in raw if re.fullmatch(kept, name)}


def test_pair_is_distinct_in_each_store_not_in_alerts():
    """A pair is told apart as each store wants it and never in its alerts."""
    for store in files.STORES:
        config = text(FOLDER / f"prometheus-{store.name}.yml")
        assert store.replica in config["global"]["external_labels"]
        (rule,) = config["alerting"]["alert_relabel_configs"]
        assert re.fullmatch(rule["regex"], store.replica)
        assert not re.fullmatch(rule["regex"], "cluster")


def test_missing_release_differs_from_failed_start(tmp_path):
    """Debian's VictoriaMetrics says nothing to -version; only then does the package's release count."""
    for name, body in (("silent", "exit 0"), ("broken", "exit 1"), ("told", "echo 1.145.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert ["", "", "1.145.0"] == [
        cache.ask_version(tmp_path / name, ("-version",)) for name in ("silent", "broken", "told")
    ]
    assert [True, False, True] == [
        cache.starts(tmp_path / name, ("-version",)) for name in ("silent", "broken", "told")
    ]
    assert install.PROGRAMS["victoriametrics"].silent


def test_what_the_long_view_reads_is_what_the_rules_record():
    """Nothing is recorded for it that it does not read."""
    (board,) = (board for board in BOARDS if board.recorded)
    read = {name for panel in board.panels for query in panel.queries for name in promql_ast.names(query.expr)}
    names = {recording.record for recording in RECORDINGS}
    assert read <= set(recorded.KEPT) <= names
    assert set(recorded.KEPT) - read <= {what + recorded.OVER for what in recorded.COUNTED}


def borne(name: str) -> set[str]:
    """What a series can be grouped by: for one that is recorded, what its own rule leaves."""
    if ":" in name.removeprefix("vllm:"):
        return set(promql_ast.labels(next(r.expr for r in RECORDINGS if r.record == name), borne))
    return {
        *recorded.ENGINE,
        "le",
        *(label for metric in EVERYTHING if name in metric.samples for label in metric.labels),
    }


@pytest.mark.parametrize("recording", [r for r in RECORDINGS if r.record in recorded.KEPT], ids=lambda r: r.record)
def test_what_is_kept_for_long_has_no_label_of_one_engine(recording):
    labels = promql_ast.labels(recording.expr, borne)
    assert not {"instance", "job", "engine", "upstream", "uuid"} & set(labels)


# ---- a fleet that is watched, and a real store


@dataclass(frozen=True)
class World:
    """What ran: the addresses of Prometheus and of the store, and a moment that both know."""

    prometheus: str
    store: str
    at_s: float

    def ask(self, where: str, expr: str) -> dict[frozenset[tuple[str, str]], float]:
        """An answer by labels; cluster, which is added when it leaves, is left out, and so is what is no number."""
        found = {}
        for series in data(where, "query", query=expr, time=f"{self.at_s:.3f}")["result"]:
            value = float(series["value"][1])
            if not math.isnan(value):
                found[frozenset((k, v) for k, v in series["metric"].items() if k != "cluster")] = value
        return found


def data(where: str, path: str, **form: object) -> dict:
    passwords = HTTPPasswordMgrWithDefaultRealm()
    passwords.add_password(None, where, "inference", PASSWORD)
    opener = build_opener(HTTPBasicAuthHandler(passwords))
    with opener.open(Request(f"{where}/api/v1/{path}", urlencode(form, doseq=True).encode()), timeout=60) as reply:
        return json.load(reply)["data"]


class FakeTargets(ThreadingHTTPServer):
    """Engines, a sidecar and a gateway that show an hour of the fixtures, second by second, and a captured page that
    grows as it did."""

    daemon_threads = True

    def __init__(self) -> None:
        scenes = {scene.name: scene for scene in fixtures.scenes()}
        self.began_s = time.time()
        self.looked_at: dict[str, float] = {}
        self.pages: dict[str, list[Line]] = {}
        for line in scenes["busy"].lines:
            if line.labels.get("job") in ("vllm", "sidecar", "gateway") and line.name != "ALERTS":
                self.pages.setdefault(line.labels["instance"], []).append(line)
        self.pages["captured:8000"] = self.pages[OVER] = list(scenes["page-0.20.2-after"].lines)
        super().__init__(("127.0.0.1", 0), _Page)

    def page(self, instance: str) -> str:
        """Each value with its time, one for each second since the last look; the first look brings what was before, so
        that nobody waits for windows to fill. A page that is late under load bends no rate."""
        if instance == NEAR:
            return "".join(f'stranger{{n="{n}"}} 1\n' for n in range(9))
        now = math.floor(time.time())
        times = range(self.looked_at.get(instance, now - BEFORE_S) + 1, now + 1)
        self.looked_at[instance] = now
        shares = [(at - self.began_s) / HOUR_S for at in times]
        ends = [f" {at}000\n" for at in times]
        shown = filter(_of_a_page, self.pages[instance])
        return "".join(
            [
                f"{series} {value:.12g}{end}"
                for line in shown
                for series in [_series(line)]
                for value, end in zip(line.values(shares, self.began_s), ends, strict=True)
            ]
        )


def _of_a_page(line: Line) -> bool:
    return line.name != "up" and not line.name.startswith("scrape_")


def _series(line: Line) -> str:
    labels = ",".join(f'{k}="{fixtures._escaped(v)}"' for k, v in line.labels.items() if k not in ("job", "instance"))
    return f"{line.name}{{{labels}}}"


class _Page(BaseHTTPRequestHandler):
    server: FakeTargets

    def do_GET(self) -> None:  # as the library calls it
        body = self.server.page(self.path.strip("/")).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def of_targets(port: int, *instances: str) -> str:
    labels = {"team": "nobody", "type": "h100"}
    return yaml.safe_dump(
        [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": one, "__metrics_path__": f"/{one}"} | labels}
            for one in instances
        ]
    )


def shortened(store: str, port: int) -> Mapping[str, object]:
    """The printed configuration with other addresses, at a faster pace, that sends everything. Limits have room for
    what a first look brings."""
    config = text(FOLDER / "prometheus-victoriametrics.yml")
    config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["alerting"] = {}
    (written,) = config["remote_write"]
    written |= {"url": f"{store}/api/v1/write"}
    written["queue_config"]["batch_send_deadline"] = "500ms"
    keep, *others = written["write_relabel_configs"]
    assert "keep" == keep["action"]
    written["write_relabel_configs"] = others
    for job in config["scrape_configs"]:
        if job["job_name"] == "prometheus":
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        else:
            job |= {"sample_limit": BEFORE_S * job["sample_limit"], "body_size_limit": "200MB"}
    return config


def limited(name: str, samples: int, instance: str, port: int) -> Mapping[str, object]:
    (group,) = yaml.safe_load(of_targets(port, instance))
    return {"job_name": name, "sample_limit": samples, "static_configs": [group]}


@pytest.fixture(scope="module")
def found_by_name(part, tmp_path_factory) -> Iterator[subprocess.Popen[str] | None]:
    """A Prometheus that asks a name server for engines, in a network and with mounts of its own, so that resolv.conf
    may be another. It says what it found, while others are waited for; None where no such network can be made."""
    folder = tmp_path_factory.mktemp("names")
    apart = ["unshare", "--net", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",))]
    if (
        not shutil.which("unshare")
        or not shutil.which("ip")
        or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode
    ):
        yield None
        return
    shutil.copytree(FOLDER / "more", folder / "jobs")
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_config_files": ["jobs/*.yml"]})
    )
    srv, a = (sd["names"][0] for sd in text(folder / "jobs/engines-by-dns.yml")["scrape_configs"][0]["dns_sd_configs"])
    (folder / "names.json").write_text(json.dumps({"srv": srv, "a": a}))
    command = [*apart, sys.executable, Path(__file__).parents[2] / "support/names.py", part("prometheus").path, folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def world(part, free_port, tmp_path_factory, found_by_name) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fleet")
    targets = FakeTargets()
    threading.Thread(target=targets.serve_forever, args=(0.01,), daemon=True).start()
    store_port, port = free_port(), free_port()
    store, prometheus = f"http://127.0.0.1:{store_port}", f"http://127.0.0.1:{port}"
    config = shortened(store, port)
    (folder / "jobs").mkdir()
    (folder / "targets").mkdir()
    (folder / "secrets").mkdir()
    (folder / "rules").mkdir()
    (folder / "secrets/victoriametrics-password").write_text(PASSWORD)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    at = targets.server_address[1]
    limits = [limited("vllm-near", 10, NEAR, at), limited("vllm-over", 10, OVER, at)]
    (folder / "jobs/limits.yml").write_text(yaml.safe_dump({"scrape_configs": limits}))
    for name, rules in printer.rule_files(settings=DEFAULTS.paced(PACE)):
        (folder / "rules" / name).write_text(rules)
    (folder / "targets/engines-a.yml").write_text(of_targets(at, *ENGINES[:2]))
    (folder / "targets/sidecars-a.yml").write_text(of_targets(at, "sidecar:9401"))
    (folder / "targets/gateways-a.yml").write_text(of_targets(at, "gateway:8010"))
    commands = (
        [part("victoriametrics").path, f"-storageDataPath={folder}/store", f"-httpListenAddr=127.0.0.1:{store_port}",
            "-search.latencyOffset=0s",
         "-httpAuth.username=inference", f"-httpAuth.password={PASSWORD}", "-retentionPeriod=100y",
         "-memory.allowedBytes=256MB",
         "-search.disableCache", f"-maxLabelsPerTimeseries={files.LABELS}"],
        [part("prometheus").path, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=extra-scrape-metrics"],
    )  # fmt: skip
    running = []
    with (folder / "log").open("w") as log:
        try:
            running.extend(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) for command in commands)
            eventually(
                lambda: data(prometheus, "query", query="count(up == 1) >= 6")["result"], what="targets that are up"
            )
            late = folder / "targets/new.tmp"
            late.write_text(of_targets(at, "captured:8000"))
            late.rename(folder / "targets/engines-late.yml")
            found = 'up{job="vllm", instance="captured:8000"} == 1'
            eventually(lambda: data(prometheus, "query", query=found)["result"], what="the engine that came later")
            firing = f"count({NEAR_LIMIT}) == 3"
            eventually(lambda: data(prometheus, "query", query=firing)["result"], what="alerts about limits")
            (count,) = eventually(
                lambda: data(prometheus, "query", query=f'count(up{{job="vllm"}} == 1) == {len(ENGINES)}')["result"],
                what="every engine up",
            )
            at_s = float(count["value"][0])
            eventually(lambda: held(store) > at_s + 1, what="what happened until then in the store")
            yield World(prometheus, store, at_s)
        finally:
            for process in reversed(running):  # Prometheus first: it waits for a store that is gone
                process.terminate()
                process.wait(60)
            targets.shutdown()
            targets.server_close()


def held(store: str) -> float:
    """Up to when the store has every job."""
    return min(float(row["value"][1]) for row in data(store, "query", query="min by (job) (timestamp(up))")["result"])


live = pytest.mark.prometheus


@live
def test_engines_are_found_in_files_also_in_one_that_comes_later(world):
    up = {dict(labels)["instance"] for labels in world.ask(world.prometheus, 'up{job="vllm"} == 1')}
    assert set(ENGINES) == up


@live
def test_engines_are_found_by_the_names_that_a_name_server_knows(found_by_name):
    """SRV records bring each engine's port along, an A record none."""
    if found_by_name is None:
        pytest.skip("no network of its own can be made here: unshare, ip and the right to use them")
    told, wrong = found_by_name.communicate(timeout=90)
    assert 0 == found_by_name.returncode, wrong
    assert ["127.0.0.1:8000", "vllm-0.test:8001", "vllm-1.test:8002"] == json.loads(told)


@live
def test_page_keeps_its_team_label(world):
    """A page keeps its own team whatever its target is labelled."""
    assert {} == world.ask(world.prometheus, '{exported_team!=""} or {exported_type!=""}')
    assert {} == world.ask(world.prometheus, 'up{team!="", job!~"vllm-(near|over)"}')
    teams = world.ask(world.prometheus, "count by (team) (vllm_watch_gateway_requests_total)")
    assert set(fixtures.TEAMS) == {dict(labels)["team"] for labels in teams}


@live
def test_prometheus_makes_the_budgeted_series(world):
    """Started with its feature extra-scrape-metrics, as everywhere here."""
    made = world.ask(world.prometheus, 'count({__name__=~"up|scrape_.+", instance="vllm-0:8000"})')
    assert {frozenset(): budget.MADE_BY_SCRAPE} == made


@live
def test_page_near_its_limit_fires_and_above_is_dropped(world):
    """A page near its limit fires and one above it is thrown away whole."""
    firing = world.ask(world.prometheus, NEAR_LIMIT)
    assert {"vllm-near", "vllm-over", "prometheus"} == {dict(labels)["job"] for labels in firing}
    assert [0.0] == list(world.ask(world.prometheus, 'up{job="vllm-over"}').values())
    assert {} == world.ask(world.prometheus, '{__name__=~"vllm:.+", job="vllm-over"}')


@live
def test_everything_that_prometheus_has_arrives_at_the_store(world):
    """Raw, recorded and alerts, each series once, under the cluster's name and without the replica's."""
    asked = 'count by (__name__) ({__name__=~".+"})'
    here, there = world.ask(world.prometheus, asked), world.ask(world.store, asked)
    differ = {
        dict(labels)["__name__"]: (value, there.get(labels))
        for labels, value in here.items()
        if there.get(labels) != value
    }
    assert {} == {name: counts for name, counts in differ.items() if not name.startswith("prometheus_")}, (
        "only what is NaN may stay behind"
    )
    (row,) = data(world.store, "query", query="count by (cluster, replica) (up)", time=world.at_s)["result"]
    assert {"cluster": "prod-a"} == row["metric"]


@live
@pytest.mark.parametrize("record", recorded.KEPT)
def test_what_the_long_view_needs_is_recorded_and_arrives(world, record):
    assert world.ask(world.store, record)


@live
async def test_our_own_client_asks_the_store_as_it_asks_prometheus(world):
    """What board and doctor ask with: choices, now, over time, and the scrape interval, which the store does not
    tell."""
    async with Prometheus(address(world.store, login=f"inference:{PASSWORD}")) as asked:
        assert 15.0 == await asked.scrape_s()
        assert {"qwen3-8b", "tiny"} == set(
            await asked.label_values("model_name", vllm.NUM_REQUESTS_RUNNING.name, world.at_s - 20, world.at_s)
        )
        expr = promql.quantile(0.95, vllm.TIME_TO_FIRST_TOKEN, "10s")
        over = await asked.over_time(expr, Range(world.at_s - 10, world.at_s, scrape_s=1))
        assert ("", 2) == (over.error, len(over.series))
        assert len(over.series[0].values) >= 9
        assert 2 == len((await asked.as_of(expr, world.at_s)).series)


@live
def test_the_doctor_reads_the_store(world, tmp_path):
    (tmp_path / "user").write_text(f"inference:{PASSWORD}\n")
    arguments = ["doctor", "--prometheus", world.store, "--user-file", str(tmp_path / "user"), "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    assert ["qwen3-8b"] == [found["first_step"]["model"]], (
        "the fixture's engines are in trouble, and the captured one is not"
    )


AS_NEAR = 0.1  # of a figure: see docs/guides/fleet.md
COMPARED = [board for board in BOARDS if board.slug in ("overview", "fleet", "fleet-weeks")]
SHOWN = [(board, panel, query) for board in COMPARED for panel in board.panels for query in panel.queries]


def sent(board: Dashboard, query: Query, at_s: float) -> str:
    every = {
        v.name: [ALL] if v.kind == "query" else v.default or next(iter(v.options), "") for v in variables.of(board)
    }
    return fill(query.expr, every, Range(at_s - 20, at_s, points=20, scrape_s=3))


@live
@pytest.mark.parametrize(
    ("board", "panel", "query"),
    [pytest.param(b, p, q, id=f"{b.slug}/{p.slug}-{at}") for at, (b, p, q) in enumerate(SHOWN)],
)
def test_the_store_answers_a_panel_as_prometheus_does(world, board, panel, query):
    asked = sent(board, query, world.at_s)
    here, there = world.ask(world.prometheus, asked), world.ask(world.store, asked)
    assert here.keys() == there.keys(), asked
    if board.recorded:
        assert here, f"{asked} has no answer"
    for labels, value in here.items():
        if "changes(" in asked:  # MetricsQL takes the first sample of a series that is new in the window for a change
            assert there[labels] - value in range(len(ENGINES) + 1)
            continue
        assert value == pytest.approx(there[labels], rel=AS_NEAR, abs=1e-9), f"{dict(labels)}: {asked}"
