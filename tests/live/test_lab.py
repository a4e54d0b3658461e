"""The lab end to end on real parts: vLLM on the CPU, Prometheus, Alertmanager, gateway, sidecar. One run, looked at
from many sides, which scrapes and looks each second (tests/support/at_test_pace.py)."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from alerts.panel_ref import PanelRef, board_uid
from dashboards import variables
from dashboards.interpolate import ALL, Range, fill
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, exposition_parser
from exporters.compat import check
from exporters.requests.record import parse_line
from exporters.sidecar_config import SidecarConfig
from stack import config, render
from stack.gateway import GatewayConfig
from stack.lab import headlines, install, plan, supervisor, up, workload
from tests.support.own_cache import own_cache
from tests.support.ports import free_offset
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]


def lab_config(tmp_path, **changes):
    programs = {name: Path(f"/opt/{name}") for name in ("engine", "model", "prometheus", "alertmanager", "otelcol")}
    return plan.LabConfig(tmp_path, programs, **changes)


# --- the plan, without processes


def test_every_configuration_file_is_accepted_by_who_reads_it(tmp_path):
    texts = dict(plan.files(lab_config(tmp_path)))
    config.parse(texts["sidecar.yaml"], SidecarConfig, "sidecar.yaml")
    config.parse(texts["gateway.yaml"], GatewayConfig, "gateway.yaml")
    jobs = [job["job_name"] for job in yaml.safe_load(texts["prometheus.yml"])["scrape_configs"]]
    assert {"vllm", "gateway", "sidecar", "lab", "prometheus", "alertmanager", "otelcol"} == set(jobs)


def test_each_of_several_gateways_has_a_log_and_a_sidecar(tmp_path):
    several = lab_config(tmp_path, gateways=3)
    several = dataclasses.replace(several, programs={**several.programs, "valkey": Path("v"), "haproxy": Path("h")})
    texts = dict(plan.files(several))
    gateways = [config.parse(texts[f"gateway-{n}.yaml"], GatewayConfig, "gateway.yaml") for n in range(3)]
    sidecars = [
        config.parse(texts[name], SidecarConfig, name) for name in ("sidecar.yaml", "sidecar-1.yaml", "sidecar-2.yaml")
    ]
    assert [(gateway.requests_log,) for gateway in gateways] == [sidecar.requests_log for sidecar in sidecars]
    assert [1, 0, 0] == [len(sidecar.engines) for sidecar in sidecars]
    assert [f"http://{sidecar.listen}" for sidecar in sidecars[1:]] == [peer.url for peer in sidecars[0].peers]
    assert all(gateway.listen in texts["haproxy.cfg"] for gateway in gateways)
    assert [3, 3] == [len(plan.targets(several)[job]) for job in ("gateway", "sidecar")]
    ports = [port for process in plan.processes(several) for port in process.ports]
    assert len(ports) == len({several.port(port) for port in ports})
    assert {"gateway", "sidecar", "lab"} == {plan.job_of(name) for name in ("gateway-2", "sidecar", "sidecar-1", "lab")}


@pytest.mark.prometheus
def test_promtool_and_amtool_accept_the_labs_files(tmp_path, part):
    (tmp_path / "rules").mkdir()
    for name, text in plan.files(lab_config(tmp_path)):
        (tmp_path / name).write_text(text)
    subprocess.run(
        [part("promtool").path, "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True
    )
    subprocess.run(
        [part("amtool").path, "check-config", tmp_path / "alertmanager.yml"], check=True, capture_output=True
    )


@pytest.mark.collector
def test_the_collector_accepts_its_file(tmp_path, part):
    file = tmp_path / "otelcol.yaml"
    file.write_text(dict(plan.files(lab_config(tmp_path)))["otelcol.yaml"])
    subprocess.run([part("otelcol").path, "validate", "--config", file], check=True, capture_output=True)


def test_a_running_engine_is_watched_and_none_is_started(tmp_path):
    watched = lab_config(tmp_path, engine_url="https://gpu-1:8443")
    assert "vllm" not in [process.name for process in plan.processes(watched)]
    scrape = yaml.safe_load(dict(plan.files(watched))["prometheus.yml"])["scrape_configs"][0]
    assert ("https", ["gpu-1:8443"]) == (scrape["scheme"], scrape["static_configs"][0]["targets"])


def test_no_two_listeners_share_a_port(tmp_path):
    ports = [port for process in plan.processes(lab_config(tmp_path)) for port in process.ports]
    assert len(set(ports)) == len(ports)
    assert len(set(plan.PORTS.values())) == len(plan.PORTS)


def test_the_workload_has_every_shape_and_stays_small():
    load = workload.LabWorkload("http://x", {"demo": "k"}, "tiny", random.Random(1))
    shapes = [load.shape() for _ in range(200)]
    assert {"/v1/chat/completions", "/v1/completions"} == {route for route, _ in shapes}
    assert {True, None} == {body.get("stream") for _, body in shapes}
    assert all(16 <= body["max_tokens"] <= 96 for _, body in shapes)


def test_timed_run_fails_for_what_is_missing():
    """A timed run fails for a target a headline or the missing watchdog."""
    seen = up.LabTotals()
    assert len(headlines.HEADLINES) + 1 == len(list(seen.faults()))
    seen.values = dict.fromkeys((h.name for h in headlines.HEADLINES), 0.0)
    seen.alerts = ["VLLMWatchdog"]
    assert [] == list(seen.faults())
    seen.down["sidecar"] = None
    assert ["sidecar was down"] == list(seen.faults())
    seen.values = {}
    assert ["sidecar was down"] == list(seen.faults(traffic=False)), "an idle engine has no headline"


def test_a_late_scrape_is_no_target_that_is_down():
    seen = up.LabTotals(late_s=2.0)
    for now, glance in enumerate((up.Glance(["vllm"]), up.Glance(["vllm"]), up.Glance(), up.Glance(["vllm"]))):
        seen.add(glance, now)
    assert {} == seen.down
    seen.add(up.Glance(["vllm", "sidecar"], ended=["sidecar"]), 5.0)
    assert {"vllm", "sidecar"} == set(seen.down)


def test_elsewhere_than_on_linux_it_says_what_works():
    with pytest.raises(supervisor.LabError, match=r"Darwin found.*work here"):
        up.refuse_platform("Darwin")


# --- mistakes, each one sentence


def lab_command(offset: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.at_test_pace", "lab", "up", "--port-offset", str(offset), *arguments]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_WATCH_CACHE": str(cache)}


def run_lab(cache, offset, *arguments):
    return subprocess.run(
        lab_command(offset, *arguments),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=ROOT,
        env=environment(cache),
    )


def told(done) -> str:
    assert "Traceback" not in done.stdout + done.stderr
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def offset():
    """Of labs that run one after the other, beside the lab that is looked at."""
    return free_offset(plan.PORTS.values())


@pytest.fixture
def taken_port(offset):
    """Something listens at the port that a lab at this offset has for Prometheus."""
    port = plan.PORTS["prometheus"] + offset
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield port, lambda: (taken.bind(("127.0.0.1", port)), taken.listen())


def test_a_taken_port_is_named_with_the_way_out(cache, offset, taken_port):
    port, take = taken_port
    take()
    done = run_lab(cache, offset)
    assert 1 == done.returncode
    assert re.search(
        rf"port {port} for prometheus is taken; stop what listens there, or move all ports with --port-offset \d+",
        told(done),
    )


def test_port_taken_during_install_is_named(monkeypatch, tmp_path, offset, taken_port):
    """The first lab installs for minutes; who came in between would else be told of by a process, with a setting that
    the lab does not have."""
    port, take = taken_port
    monkeypatch.setattr(install, "install", lambda *_: take())
    with pytest.raises(supervisor.LabError, match=f"port {port} for prometheus is taken; .* --port-offset"):
        up.configured(tmp_path, None, offset, Console(quiet=True))


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, offset):
    file = tmp_path / "file"
    file.touch()
    done = run_lab(file / "x", offset)
    assert 1 == done.returncode
    assert "cannot be written" in told(done)


@pytest.mark.prometheus
def test_an_engine_that_is_none_is_one_sentence(part, cache, offset):
    part("prometheus")
    done = run_lab(cache, offset, "--engine", "http://127.0.0.1:1")
    assert 1 == done.returncode
    assert "http://127.0.0.1:1/v1/models does not answer like a vLLM server" in told(done)


@pytest.mark.engine
@pytest.mark.prometheus
def test_engine_dying_at_start_leaves_nothing(part, tmp_path, offset):
    """The model is taken away: the real vLLM ends with its real message."""
    cache = own_cache(tmp_path / "cache")
    empty = tmp_path / "empty"
    empty.mkdir()
    stamp = json.loads((cache / "stamps/model.json").read_text())
    (cache / "stamps/model.json").write_text(json.dumps(stamp | {"path": str(empty)}))
    done = run_lab(cache, offset)
    assert 1 == done.returncode
    assert "vllm ended with status 1 while the lab started; its last words:" in told(done)
    assert "logs/vllm.log" in told(done)
    assert not processes_below(tmp_path)


def processes_below(folder: Path) -> list[str]:
    """Command lines of living processes that name a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if str(folder) in command and state != "Z" and int(entry.name) != os.getpid():
            found.append(command)
    return found


# --- one real run


def get(url: str):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class RunningLab:
    """A lab in a process of its own, as a person starts it."""

    def __init__(self, log: Path, cache: Path) -> None:
        self.offset = free_offset(plan.PORTS.values())
        self.folder = cache / f"lab-{self.offset}"
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                lab_command(self.offset), stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment(cache)
            )

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{plan.PORTS[name] + self.offset}"

    def ready(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"the lab ended: {self.log.read_text()}")
        return "ready: every process answers" in self.log.read_text()

    def query(self, expr: str):
        rows = json.loads(get(f"{self.url('prometheus')}/api/v1/query?query={urllib.request.quote(expr)}"))["data"][  # type: ignore[attr-defined]
            "result"
        ]
        return float(rows[0]["value"][1]) if rows else None

    def lab_metric(self, name: str, process: str):
        return exposition_parser.parse(get(f"{self.url('lab')}/metrics")).total(name, process=process)

    def pid(self, process: str) -> int:
        """From /proc: the child of the lab whose command line names it."""
        words = {
            "vllm": " serve ",
            "gateway": " gateway run ",
            "sidecar": " sidecar run ",
            "board": " board --prometheus ",
            "prometheus": "--storage.tsdb.path",
            "alertmanager": "--storage.path",
            "otelcol": "otelcol.yaml",
        }
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if parent == self.process.pid and words[process] in command:
                return int(entry.name)
        raise LookupError(process)


@pytest.fixture(scope="module")
def lab(part, tmp_path_factory, cache):
    for name in ("prometheus", "alertmanager", "engine", "model", "otelcol"):
        part(name)
    running = RunningLab(tmp_path_factory.mktemp("lab") / "output", cache)
    try:
        eventually(running.ready, within_s=240, what="the lab being ready")
        yield running
    finally:
        running.process.send_signal(signal.SIGINT)
        try:
            running.process.wait(60)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()


def on_the_lab(test):
    """All that the running lab is made of."""
    return pytest.mark.engine(pytest.mark.prometheus(pytest.mark.collector(test)))


def alerts_of(lab) -> dict[str, Any]:
    return {each["labels"]["alertname"]: each for each in json.loads(get(f"{lab.url('alertmanager')}/api/v2/alerts"))}


@on_the_lab
def test_every_headline_gets_a_value_and_the_watchdog_arrives(lab):
    for headline in headlines.HEADLINES:
        eventually(lambda h=headline: lab.query(h.expr) is not None, what=headline.name)
    alert = eventually(lambda: alerts_of(lab)["VLLMWatchdog"], what="the watchdog at Alertmanager")
    assert alert["annotations"]["runbook_url"].endswith("/runbooks/VLLMWatchdog?live=1")


@on_the_lab
def test_the_lab_says_where_its_boards_are(lab):
    assert f"boards and runbooks: {lab.url('board')}/" in lab.log.read_text().splitlines()


@on_the_lab
@pytest.mark.chromium
def test_a_browser_opens_the_link_that_came_with_the_alert(lab, part, tmp_path):
    """From the alert as Alertmanager holds it to the words on the screen of a real Chromium."""
    alert = eventually(lambda: next(iter(alerts_of(lab).values())), what="an alert at Alertmanager")
    link = alert["annotations"]["runbook_url"]
    assert link.startswith(lab.url("board")), "the lab's rules carry the lab's own addresses"
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
    ]
    shown = subprocess.run(
        [part("chromium").path, *quiet, f"--user-data-dir={tmp_path}", "--dump-dom", link],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "First five minutes" in shown.stdout


# A panel whose dashboard says once what is missing is hidden.
HIDDEN = "() => [...document.querySelectorAll('.panel[hidden] .chart, [hidden] .panel .chart')].map(e => e.dataset.id)"
STATES = (
    "() => Object.fromEntries([...document.querySelectorAll('.chart')].map(e => [e.dataset.id, e.dataset.state || '']))"
)


def in_sight(tab) -> None:
    """Open all rows, and have every panel in sight."""
    tab.evaluate("document.querySelectorAll('details.row:not([open])').forEach(row => { row.open = true })")
    height = tab.evaluate("document.documentElement.scrollHeight")
    if height > tab.viewport_size["height"]:
        tab.set_viewport_size({"width": 1440, "height": height})


@on_the_lab
@pytest.mark.chromium
def test_boards_open_in_a_browser(lab, new_tab, tmp_path):
    """A panel draws, or says in its own words why it is empty; nothing fails, and the browser has no complaint. Leaves
    a picture of each board."""
    folder = Path(os.environ.get("VLLM_WATCH_ARTIFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    tab = new_tab(color_scheme="dark").page
    for board in BOARDS:
        needed = {str(PanelRef(board.slug, panel.slug).panel_id): panel for panel in board.panels}
        tab.set_viewport_size({"width": 1440, "height": 1000})
        tab.goto(
            f"{lab.url('board')}/d/{board_uid(board.slug)}?from=now-5m&refresh={'5s' if board.slug == 'overview' else 'off'}"  # noqa: E501
        )

        def settled(board=board, needed=needed) -> bool:
            in_sight(tab)
            seen = (
                {panel.slug: tab_states.get(number) for number, panel in needed.items()}
                if (tab_states := tab.evaluate(STATES))
                else {}
            )
            may_be_empty = {panel.slug for panel in board.panels if panel.optional or board.slug != "overview"}
            hidden = {needed[number].slug for number in tab.evaluate(HIDDEN)}
            assert hidden <= {panel.slug for panel in board.panels if panel.requires}
            wrong = {
                slug: state
                for slug, state in seen.items()
                if state != "drawn" and (state != "empty" or slug not in may_be_empty)
            }
            assert {} == {slug: state for slug, state in wrong.items() if slug not in hidden}
            return bool(seen)

        eventually(settled, what=f"every panel of {board.slug} drawn or empty with a reason", every_s=0.1)
        tab.locator("body").screenshot(path=folder / f"board-{board.slug}.png")
    assert len(BOARDS) == len(list(folder.glob("board-*.png")))


@on_the_lab
def test_engine_of_others_gets_traffic_on_request_only(lab, cache, offset):
    """Two more labs read the engine of the first one, side by side."""
    labs = {
        at: subprocess.Popen(
            lab_command(at, "--engine", lab.url("vllm"), "--for", for_s, *options),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(cache),
        )
        for at, for_s, options in (
            (offset, "5s", ()),
            (free_offset(plan.PORTS.values()), "10s", ("--traffic",)),
        )
    }  # fmt: skip
    for (at, process), sends in zip(labs.items(), (False, True), strict=True):
        output, errors = process.communicate(timeout=180)
        said = " ".join(output.split())
        assert 0 == process.returncode, said + errors
        assert sends == bool((cache / f"lab-{at}/requests.jsonl").read_text())
        assert ("no traffic was sent" in said, "none sent; --traffic sends some" in said) == (not sends, not sends)


@on_the_lab
def test_the_live_page_of_this_vllm_is_known_and_breaks_nothing(lab):
    report = check.check(
        exposition_parser.parse(get(f"{lab.url('vllm')}/metrics")), EVERYTHING, render.uses(), plan_release()
    )
    assert () == report.unknown
    assert not report.fails
    assert all(metric.needs for metric in report.absent), "a default family of this release is missing"


def plan_release() -> str:
    return install.find("engine").version


@on_the_lab
def test_official_client_leaves_true_records(lab):
    """The official client works through the gateway and leaves true records."""
    import openai  # here, since it takes a second, and other halves of this file run without it

    keys = json.loads((lab.folder / "keys.json").read_text())
    client = openai.OpenAI(base_url=f"{lab.url('gateway')}/v1", api_key=keys["demo"], max_retries=0)
    ask = {
        "model": plan.MODEL,
        "messages": [{"role": "user", "content": "the cache"}],
        "max_tokens": 12,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**ask, extra_headers={"X-Request-Id": "whole-1"})
    chunks = list(client.chat.completions.create(**ask, stream=True, extra_headers={"X-Request-Id": "stream-1"}))
    assert all(chunk.choices for chunk in chunks), "the usage chunk was not asked for and must not be seen"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{lab.url('gateway')}/v1", api_key="wrong", max_retries=0).models.list()

    def records():
        lines = (lab.folder / "requests.jsonl").read_bytes().splitlines()
        return {record.request_id: record for record in map(parse_line, lines)}

    eventually(lambda: {"whole-1", "stream-1"} <= set(records()), what="both records")
    one, other = records()["whole-1"], records()["stream-1"]
    assert ("demo", "ok", whole.usage.prompt_tokens, 12, "length") == (
        one.team, one.outcome, one.prompt_tokens, one.completion_tokens, one.finish_reason)  # fmt: skip
    assert one.ttft_ms is None
    assert (12, "ok") == (other.completion_tokens, other.outcome)
    assert 0 < other.ttft_ms < other.e2e_ms
    assert other.tpot_ms is None or other.tpot_ms > 0, "null when a stalled machine delivers all tokens in one read"
    assert other.cached_tokens is not None
    assert plan_release() == other.engine_version


@on_the_lab
def test_the_sidecar_joins_log_and_engine(lab):
    def page():
        found = exposition_parser.parse(get(f"{lab.url('sidecar')}/metrics"))
        assert 1 == found.total("vllm_watch_source_up", kind="engine")
        return found

    found = eventually(page, what="a page of the engine")
    assert found.total("vllm_watch_requests_total", outcome="ok") > 0
    assert found.total("vllm_watch_kv_capacity_tokens") > 0
    (info,) = found.of("vllm_watch_engine_info")
    assert plan_release() == info[0]["version"]
    assert 0 == found.total("vllm_watch_source_up", kind="gpu"), "this machine has no GPU, and the page says so"
    assert not found.of("vllm_watch_gpu_utilization_ratio")


@on_the_lab
@pytest.mark.parametrize(
    "panel", [panel for panel in BOARDS[0].panels if not panel.optional], ids=lambda panel: panel.slug
)
def test_a_panel_of_overview_has_figures_on_the_running_lab(lab, panel):
    """As Grafana asks with every variable at All. The engine's own series and the log's may each be the one that
    answers first."""
    choices = {variable.name: [ALL] for variable in variables.of(BOARDS[0])}
    asked = [
        fill(query.expr, choices, Range(time.time() - 300, time.time(), scrape_s=plan.SCRAPE_INTERVAL_S))
        for query in panel.queries
    ]

    def answers() -> list[float]:
        return [value for expr in asked if (value := lab.query(expr)) is not None]

    eventually(answers, what=f"{panel.slug}: {asked}")
    if panel.unit == "percentunit":
        assert all(0 <= value <= 1 for value in answers())


@on_the_lab
def test_a_bucket_of_a_latency_panel_leads_to_a_trace(lab):
    """The sidecar offers OpenMetrics, the real Prometheus asks for it and keeps the exemplars."""
    asked = f"query=vllm_watch_ttft_seconds_bucket&start={time.time() - 600:.0f}&end={time.time() + 60:.0f}"

    def traces() -> set[str]:
        answer = json.loads(get(f"{lab.url('prometheus')}/api/v1/query_exemplars?{asked}"))
        return {exemplar["labels"]["trace_id"] for series in answer["data"] for exemplar in series["exemplars"]}

    eventually(traces, what="exemplars at Prometheus")
    assert all(re.fullmatch("[0-9a-f]{32}", trace) for trace in traces())


@on_the_lab
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_spans_reach_the_collector(lab, transport):
    """Those of the engine over gRPC, those of the request log over HTTP."""

    def accepted() -> float:
        return (
            exposition_parser.parse(get(f"{lab.url('otelcol')}/metrics")).total(
                "otelcol_receiver_accepted_spans_total", transport=transport
            )
            or 0
        )

    eventually(lambda: accepted() > 0, what=f"spans over {transport} at the collector")


# one after the other, and none comes back
VICTIMS = ("board", "sidecar", "otelcol", "alertmanager", "gateway", "vllm", "prometheus")


def killed(lab, victim: str) -> None:
    """SIGKILL, which the lab's own page tells, and which changes nothing for the others."""
    others = {name: lab.lab_metric("vllm_watch_lab_process_running", name) for name in VICTIMS if name != victim}
    os.kill(lab.pid(victim), signal.SIGKILL)
    eventually(
        lambda: lab.lab_metric("vllm_watch_lab_process_up", victim) == 0,
        what=f"the lab's page saying that {victim} is down",
    )
    eventually(
        lambda: lab.lab_metric("vllm_watch_lab_process_running", victim) == 0,
        what=f"the lab's page saying that {victim} has ended",
    )
    if victim not in ("prometheus", *plan.UNSCRAPED):
        eventually(lambda: lab.query(f'up{{job="{victim}"}}') == 0, what=f"Prometheus seeing {victim} down")
    eventually(
        lambda: others == {name: lab.lab_metric("vllm_watch_lab_process_up", name) for name in others},
        what="the others answering as before",
    )
    assert lab.process.poll() is None


def told_down(lab) -> set[str]:
    """By the last status line, of which there is one a second."""
    *_, line = [line for line in lab.log.read_text().splitlines() if "  |  alerts: " in line]
    head = line.split("  |  ", 1)[0]
    return set(head.removeprefix("down: ").split(", ")) if head != "all up" else set()


@on_the_lab
@pytest.mark.parametrize("victim", VICTIMS[:-1])
def test_killed_process_leaves_the_others_running(lab, victim):
    """When one process is killed the others go on and it is told."""
    killed(lab, victim)


@on_the_lab
def test_the_status_line_names_exactly_what_is_down(lab):
    """By now all but Prometheus."""
    eventually(lambda: set(VICTIMS[:-1]) == told_down(lab), what="the status line naming them")


@on_the_lab
def test_without_prometheus_the_labs_own_page_tells(lab):
    """And the status line, which names every target too: whether one is up nobody can say any more."""
    killed(lab, "prometheus")
    eventually(lambda: {"prometheus", "lab"} <= told_down(lab), what="the status line naming Prometheus")


@on_the_lab
def test_ctrl_c_stops_everything_that_was_started_and_only_that(lab):
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        lab.process.send_signal(signal.SIGINT)
        assert 0 == lab.process.wait(60)
        eventually(lambda: [] == processes_below(lab.folder), "the end of all processes of the lab")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
