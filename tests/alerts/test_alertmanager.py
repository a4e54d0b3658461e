"""Who is told, and what is kept back: the laws, the real amtool on every configuration, and a real Alertmanager with
somebody to tell."""

from __future__ import annotations

import http.server
import json
import re
import socketserver
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import printer, routing
from alerts.labels import PLACE, TARGET
from alerts.panel_ref import PanelRef
from alerts.registry import ALERTS, RECORDINGS, alerts
from alerts.rules import Alert, Links, Severity
from alerts.settings import DEFAULTS
from alerts.slo import Objective, Objectives
from exporters.catalogue import promql_ast, self_monitoring
from exporters.catalogue.producers import Component, needed
from stack.lab.install import InstalledPart
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
Labels = dict[str, str]
Post = dict[str, Any]
BY_NAME = {alert.name: alert for alert in ALERTS}
RECORDED = {recording.record: recording for recording in RECORDINGS}
RULES = routing.inhibitions(ALERTS, RECORDINGS)
KINDS = [kind for kind in routing.RECEIVERS if kind != "none"]


def named(matchers: list[str]) -> list[str]:
    return matchers[0].split('"')[1].split("|")


PAIRS = [
    (source, target, tuple(r["equal"]))
    for r in RULES
    for source in named(r["source_matchers"])
    for target in named(r["target_matchers"])
]


# ---- the laws


def made(name: str, severity: Severity, expr: str, **changes: Any) -> Alert:
    words = {
        "summary": "Thing down: {{ $labels.instance }}",
        "description": "{{ $labels.instance }} is so.",
        "panel": PanelRef("overview", "x"),
    }
    return Alert(name, severity, expr, "1m", **(words | changes))


def test_muted_alerts_are_muted_by_existing_ones() -> None:
    """A name with a typing mistake would mute nothing, and nobody would see it."""
    wanted = {(source, alert.name) for alert in ALERTS for source in alert.muted_by}
    assert wanted == {(source, target) for source, target, _ in PAIRS}


def test_no_two_alerts_mute_each_other() -> None:
    """Then neither would ever be told."""
    mutes: dict[str, set[str]] = {}
    for source, target, _ in PAIRS:
        mutes.setdefault(source, set()).add(target)

    def reached(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        return set().union(*({n} | reached(n, seen | {n}) for n in mutes.get(name, set()) - seen))

    assert not [name for name in mutes if name in reached(name)]


def test_engine_mutes_by_job_and_model_by_name() -> None:
    """An engine mutes its symptoms by job and a model its own by name."""
    found = {(source, target): equal for source, target, equal in PAIRS}
    assert (
        ("cluster", "namespace", "job")
        == found["VLLMEngineDown", "VLLMEngineUnreachable"]
        == found["VLLMEngineDown", "VLLMKVCacheNearlyFull"]
    )
    assert ("cluster", "model_name") == found["VLLMTTFTBudgetBurn", "VLLMTTFTBudgetSlowBurn"]
    assert ("uuid",) == found["VLLMGPUMissing", "VLLMGPUHot"]


def test_job_down_mutes_no_objective() -> None:
    """With `cluster` alone, one job that is down would keep back the pages of every other model."""
    assert not [(source, target) for source, target, _ in PAIRS if target.endswith("BudgetBurn")]
    down, burn = BY_NAME["VLLMEngineDown"], replace(BY_NAME["VLLMTTFTBudgetBurn"], muted_by=("VLLMEngineDown",))
    with pytest.raises(ValueError, match=r"^VLLMTTFTBudgetBurn .*job, namespace$") as refusal:
        routing.inhibitions([down, burn], RECORDINGS)
    assert "VLLMEngineDown" in str(refusal.value)


def test_a_ticket_never_mutes_a_page() -> None:
    ticket = made("VLLMTicket", Severity.WARNING, "up == 0")
    page = made("VLLMPage", Severity.CRITICAL, "up == 0", muted_by=("VLLMTicket",))
    with pytest.raises(ValueError, match=r"^VLLMPage \(critical\) .*\(warning\)$"):
        routing.inhibitions([ticket, page], ())
    assert not [(s, t) for s, t, _ in PAIRS if Severity.CRITICAL is BY_NAME[t].severity is not BY_NAME[s].severity]


def test_an_alert_about_nothing_in_particular_mutes_nothing() -> None:
    """Without a label to be equal in, it would mute its targets everywhere."""
    always = made("VLLMAlways", Severity.CRITICAL, "vector(1) > 0")
    with pytest.raises(ValueError, match=r"^VLLMOther .*any subject$"):
        routing.inhibitions([always, made("VLLMOther", Severity.WARNING, "up == 0", muted_by=("VLLMAlways",))], ())


def test_only_accounting_tickets_are_muted_by_cluster() -> None:
    """Only tickets about the accounts and the watchdog are muted by cluster."""
    assert {*routing.RECONCILIATION, routing.WATCHDOG} == {
        target for _, target, equal in PAIRS if equal == ("cluster",)
    }
    assert {Severity.WARNING} == {BY_NAME[name].severity for name in routing.RECONCILIATION}


def test_an_alert_on_hardware_names_its_card() -> None:
    """The routing takes that for granted."""
    for alert in ALERTS:
        if alert.owner == "hardware":
            assert "$labels.uuid" in alert.description, alert.name


@pytest.mark.parametrize(("source", "target", "equal"), PAIRS)
def test_what_is_equal_by_job_comes_from_the_same_job(source: str, target: str, equal: tuple[str, ...]) -> None:
    """The sidecar's job is never the engine's: a rule across the two would read well and never mute anything."""
    if "job" in equal:
        assert jobs(BY_NAME[source]) & jobs(BY_NAME[target])


def jobs(alert: Alert) -> set[str]:
    """Whose scrape jobs an alert's series come from."""
    by_component = {
        Component.ENGINE: "engine",
        Component.SIDECAR: "sidecar",
        Component.GPU: "sidecar",
        Component.GATEWAY: "gateway",
    }
    matched = {"engine": DEFAULTS.engine, "sidecar": DEFAULTS.sidecar, "gateway": DEFAULTS.gateway}
    texts = [alert.expr, *(r.expr for r in RECORDINGS if r.record in promql_ast.names(alert.expr))]
    told = {
        by_component[c] for c in needed(name for text in texts for name in promql_ast.names(text)) if c in by_component
    }
    return told | {job for job, matcher in matched.items() for text in texts if matcher in text}


def test_own_objectives_are_muted_alike() -> None:
    """Objectives of one's own are muted in the same way and missing ones leave no rule."""
    own = Objectives((Objective("Chat", 0.99, "Because.", "Us.", latency="ttft", within_s=1.0),))
    text = routing.configuration(objectives=own)
    assert "VLLMChatBudgetSlowBurn" in text
    assert "VLLMTTFTBudgetBurn" not in text


# ---- the text


def test_configurations_differ_in_their_receivers_alone() -> None:
    parts = [
        text.split("\n# Secrets are read")[0].split("\n# An empty receiver")[0] for _, text in routing.printed_files()
    ]
    assert 1 == len(set(parts))
    assert "receivers:" not in parts[0]


@pytest.mark.parametrize("kind", routing.RECEIVERS)
def test_every_secret_is_read_from_a_file(kind: str) -> None:
    """A key of that sort without _file would hold the secret itself."""
    text = routing.configuration(kind, deadman=True)
    keys = set(re.findall(r"^[ -]*(\w+):", text, re.MULTILINE))
    assert not keys & {
        "url",
        "api_url",
        "routing_key",
        "service_key",
        "auth_password",
        "auth_secret",
        "password",
        "bot_token",
    }
    files = re.findall(r"_file: (\S+)", text)
    assert sorted(files) == sorted(routing.secret_files(kind, deadman=True))


def amtool(part: Callable[[str], InstalledPart], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([part("amtool").path, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    files, folder = {}, tmp_path_factory.mktemp("printed")
    for name, text in routing.printed_files():
        files[name] = folder / name
        files[name].write_text(text)
    return files


@pytest.mark.prometheus
def test_amtool_accepts_every_configuration(part: Callable[[str], InstalledPart], printed: dict[str, Path]) -> None:
    assert ["alertmanager.yml", *(f"{kind}.yml" for kind in KINDS)] == list(printed)
    for path in printed.values():
        done = amtool(part, "check-config", path)
        assert (0, True) == (done.returncode, f"{len(RULES)} inhibit rules" in done.stdout), done.stdout + done.stderr


@pytest.mark.prometheus
@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a.name)
def test_amtool_routes_every_alert_to_who_should_act(
    part: Callable[[str], InstalledPart], printed: dict[str, Path], alert: Alert
) -> None:
    wanted = {Severity.CRITICAL: "page", Severity.WARNING: "ticket", Severity.INFO: "nobody"}[alert.severity]
    labels = (
        f"alertname={alert.name}",
        *(f"{label}={value}" for label, value in alert.labels.items()),
        "model_name=m",
        "instance=i",
    )
    told = amtool(part, "config", "routes", "test", f"--config.file={printed['slack.yml']}", *labels).stdout.strip()
    assert {routing.WATCHDOG: "deadman", routing.FAILING: "page,ticket"}.get(alert.name, wanted) == told


@pytest.mark.prometheus
def test_a_severity_that_nobody_thought_of_becomes_a_ticket(
    part: Callable[[str], InstalledPart], printed: dict[str, Path]
) -> None:
    told = amtool(
        part, "config", "routes", "test", f"--config.file={printed['slack.yml']}", "alertname=Theirs", "severity=error"
    ).stdout
    assert "ticket" == told.strip()


# ---- compose


def compose(part: Callable[[str], InstalledPart], **variables: str) -> Any:
    """The service alertmanager and all secrets as docker compose understands them."""
    command = [part("compose").path, "--file", ROOT / "docker-compose.yml", "config", "--format", "json"]
    told = json.loads(
        subprocess.run(
            command, env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True, check=True
        ).stdout
    )
    return told["services"]["alertmanager"], told["secrets"]


@pytest.mark.compose
def test_compose_mounts_configuration_and_secrets(part: Callable[[str], InstalledPart]) -> None:
    """Without any setting nobody is told, and the secrets are empty."""
    service, secrets = compose(part)
    assert (str(ROOT / "stack/deploy/alertmanager/alertmanager.yml"), True) == (
        service["volumes"][0]["source"],
        service["volumes"][0]["read_only"],
    )
    assert set(routing.secret_files("slack", deadman=True)) == {
        f"/run/secrets/{secret['source']}" for secret in service["secrets"]
    }
    assert {"/dev/null"} == {secret["file"] for secret in secrets.values()}
    chosen = {
        "VLLM_WATCH_ALERTMANAGER": "./stack/deploy/alertmanager/slack.yml",
        "VLLM_WATCH_PAGE_FILE": "/home/me/.secrets/page",
    }
    service, secrets = compose(part, **chosen)
    assert str(ROOT / "stack/deploy/alertmanager/slack.yml") == service["volumes"][0]["source"]
    assert "/home/me/.secrets/page" == secrets["alertmanager_page"]["file"]
    assert f"--config.file={service['volumes'][0]['target']}" in service["command"]


# ---- a real Alertmanager


@dataclass
class Sink:
    """Whoever is told, on loopback: what arrived, by path."""

    got: dict[str, list[Any]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    url: str = ""

    def names(self, path: str) -> list[str]:
        """The alerts that a webhook was told of, still firing ones only."""
        posts = [post for post in self.got.get(path, []) if post["status"] == "firing"]
        return [alert["labels"]["alertname"] for post in posts for alert in post["alerts"]]


@pytest.fixture
def sink() -> Iterator[Sink]:
    told = Sink()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.got.setdefault(self.path, []).append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(403 if self.path in told.refused else 202 if self.path == "/pagerduty" else 200)
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told.url = f"http://127.0.0.1:{server.server_port}"
        yield told
        server.shutdown()


@dataclass
class Manager:
    url: str

    def post(self, *posted: Post) -> None:
        ask = urllib.request.Request(
            f"{self.url}/api/v2/alerts", json.dumps(posted).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask, timeout=60) as answer:
            assert 200 == answer.status

    def state(self, name: str) -> str:
        """State of the alert of this name."""
        url = f"{self.url}/api/v2/alerts?filter=alertname%3D{name}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=60) as answer:
            (found,) = json.loads(answer.read())
            return str(found["status"]["state"])

    def states(self) -> dict[str, str]:
        """State of each alert by its label `test`, which names it: active or suppressed."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"{self.url}/api/v2/alerts", timeout=5
        ) as answer:
            return {one["labels"]["test"]: one["status"]["state"] for one in json.loads(answer.read())}


@pytest.fixture
def manager(part: Callable[[str], InstalledPart], tmp_path: Path, free_port: Callable[[], int]) -> Any:
    """Starts a real Alertmanager on a configuration. Waiting times are cut to half a second: the rest is as shipped."""

    @contextmanager
    def start(text: str, change: Callable[[dict[str, Any]], None] = lambda _: None) -> Iterator[Manager]:
        found = yaml.safe_load(text)
        for route in (found["route"], *found["route"]["routes"]):
            route |= {"group_wait": "500ms", "group_interval": "500ms"}
        change(found)
        (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(found))
        told = Manager(f"http://127.0.0.1:{free_port()}")
        with (tmp_path / "log").open("w") as log, subprocess.Popen(
            [part("alertmanager").path, f"--config.file={tmp_path}/alertmanager.yml", f"--storage.path={tmp_path}/data",
             f"--web.listen-address={told.url.removeprefix('http://')}", "--cluster.listen-address="],
            stdout=log, stderr=log,
        ) as process:  # fmt: skip
            try:
                eventually(lambda: told.states() == {}, what=f"an Alertmanager ({tmp_path}/log)")
                yield told
            finally:
                process.terminate()

    return start


def fired(name: str, labels: Labels, **more: str) -> Post:
    """An alert as Prometheus would post it, with its templates filled."""
    rule = BY_NAME[name].as_rule(Links("https://wiki.example/rb", "https://grafana.example"))

    def filled(text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)
        return re.sub(r"\{\{ \$value.*?\}\}", "93%", text)

    link = rule["annotations"]["runbook_url"].partition("?")[0]
    return {
        "labels": {"alertname": name, **rule["labels"], **labels},
        "annotations": {key: filled(text) for key, text in rule["annotations"].items()} | {"runbook_url": link},
        **more,
    }


def about(name: str) -> list[str]:
    """The labels that an alert bears."""
    return sorted(promql_ast.labels(BY_NAME[name].expr, bears) | set(routing.subject(BY_NAME[name], RECORDED)))


def bears(sample: str) -> Any:
    recorded = RECORDED.get(sample)
    return promql_ast.labels(recorded.expr, bears) if recorded else routing._LABELS[sample]


@pytest.mark.prometheus
def test_alertmanager_mutes_same_subject_only(manager: Any) -> None:
    """For every pair: the target with the source's labels, and one for each label that differs. Names in `test` are for
    this test alone."""
    posted: list[Post] = []
    expected: dict[str, str] = {}

    def post(name: str, labels: Labels, state: str, test: str) -> None:
        posted.append(fired(name, {**labels, "test": test}))
        expected[test] = state

    for number, (source, target, equal) in enumerate(PAIRS):
        labels = {label: f"{label}-{number}" for label in (*about(source), *about(target))}
        test = f"{source} > {target}"
        post(source, {label: labels[label] for label in about(source)}, "active", f"{test}: source")
        # of the watchdog its cluster, an external label
        own = {label: labels[label] for label in {*about(target), *equal}}
        post(target, own, "suppressed", test)
        for label in equal:
            post(target, {**own, label: f"another-{number}"}, "active", f"{test}: another {label}")
    with manager(routing.configuration()) as real:
        real.post(*posted)

        def as_expected() -> bool:
            assert not set(real.states().items()) ^ set(expected.items())
            return True

        eventually(as_expected, what="every state")


@pytest.mark.prometheus
def test_pages_of_another_model_come_through(manager: Any) -> None:
    """In a deployment without the labels cluster and namespace, where Alertmanager takes them for equal on all alerts;
    all at once."""
    sources = [alert for alert in ALERTS if alert.severity is not Severity.INFO]
    one = [
        fired(a.name, {label: "one" for label in about(a.name) if label not in PLACE} | {"test": f"one {a.name}"})
        for a in sources
    ]
    other = [
        fired(a.name, {label: "two" for label in about(a.name) if label not in PLACE} | {"test": a.name})
        for a in ALERTS
        if a.severity is Severity.CRITICAL and a.name not in ("VLLMEngineDown", "VLLMEngineFrozen")
    ]
    frozen = fired(
        "VLLMEngineFrozen",
        {**{label: "three" for label in (*TARGET, "model_name") if label not in PLACE}, "test": "VLLMEngineFrozen"},
    )
    with manager(routing.configuration()) as real:
        real.post(*one, *other, frozen)

        def all_told() -> bool:
            states = real.states()
            told = dict.fromkeys((*(post["labels"]["test"] for post in other), "VLLMEngineFrozen"), "active")
            return (told | {"one VLLMEngineFrozen": "suppressed"}).items() <= states.items()

        eventually(all_told, what="every page of the other model, while that of the one is muted")


# What the chart kube-prometheus-stack ships: its rule, what its Alertmanager mutes, and whom that tells. Prometheus
# posts one InfoInhibitor for each series of `ALERTS` that its expression returns, with the labels of that series.
INFO_INHIBITOR = {
    "alert": "InfoInhibitor", "labels": {"severity": "none"},
    "expr": 'ALERTS{severity = "info"} == 1 unless on(namespace) ALERTS{alertname != "InfoInhibitor", '
    'severity =~ "warning|critical", alertstate="firing"} == 1',
}  # fmt: skip
THEIR_ALERTMANAGER = """
inhibit_rules:
- {source_matchers: ['severity = critical'], target_matchers: ['severity =~ warning|info'], equal: [namespace, alertname]}
- {source_matchers: ['severity = warning'], target_matchers: ['severity = info'], equal: [namespace, alertname]}
- {source_matchers: ['alertname = InfoInhibitor'], target_matchers: ['severity = info'], equal: [namespace]}
- {target_matchers: ['alertname = InfoInhibitor']}
route: {group_by: [namespace], receiver: nobody, repeat_interval: 12h, routes: [{receiver: deadman, matchers: ['alertname = "VLLMWatchdog"']}]}
receivers: [{name: nobody}, {name: deadman, webhook_configs: [{url: URL}]}]
"""  # noqa: E501


@pytest.mark.prometheus
def test_watchdog_alone_mutes_no_information(part: Callable[[str], InstalledPart], tmp_path: Path) -> None:
    """Its InfoInhibitor fires where an alert of the severity info does and nothing worse: the real promtool, on the
    file that is printed."""
    files = {name: text for name, text in printer.rule_files() if name == "info.yaml"}
    files["theirs.yaml"] = json.dumps({"groups": [{"name": "general.rules", "rules": [INFO_INHIBITOR]}]})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    checks = [{"eval_time": "5m", "alertname": "InfoInhibitor", "exp_alerts": []}]
    test = {"rule_files": list(files), "tests": [{"interval": "1m", "alert_rule_test": checks}]}
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    done = subprocess.run(
        [part("promtool").path, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.prometheus
@pytest.mark.parametrize("place", [{}, {"namespace": "vllm"}], ids=["nowhere", "in a namespace"])
def test_kube_prometheus_inhibitions_pass_the_watchdog(place: Labels, manager: Any, sink: Sink) -> None:
    """The operator may put a namespace on every alert; with or without it, an InfoInhibitor of the same place fires
    beside the watchdog."""
    inhibitor: Post = {"labels": {"alertname": "InfoInhibitor", "severity": "none", **place, "test": "inhibitor"}}
    with manager(THEIR_ALERTMANAGER.replace("URL", f"{sink.url}/deadman")) as real:
        real.post(
            inhibitor,
            fired("VLLMWatchdog", {**place, "test": "watchdog"}),
            fired("VLLMTTFTHigh", {**place, "model_name": "m", "test": "info"}),
            fired("VLLMTTFTHigh", {"namespace": "other", "model_name": "m", "test": "info elsewhere"}),
            fired("VLLMKVCacheNearlyFull", {**place, **FULL, "test": "ticket"}),
        )
        expected = {
            "inhibitor": "suppressed",
            "watchdog": "active",
            "info": "suppressed",
            "info elsewhere": "active",
            "ticket": "active",
        }

        def as_expected() -> bool:
            assert expected == real.states()
            return True

        eventually(as_expected, what="every state")
        eventually(lambda: "VLLMWatchdog" in sink.names("/deadman"), what="the watchdog at the service that expects it")


def on_webhooks(sink: Sink, folder: Path) -> str:
    for name in ("page", "ticket", "deadman"):
        Path(routing.secret_file(name, str(folder))).write_text(f"{sink.url}/{name}\n")
    return routing.configuration("webhook", secrets=str(folder), deadman=True)


@pytest.mark.prometheus
def test_notifications_reach_their_receivers(manager: Any, sink: Sink, tmp_path: Path) -> None:
    """Pages tickets and the watchdog reach their receivers and information nobody."""
    job = {"job": "vllm-a", "instance": "10.0.0.1:8000"}
    with manager(on_webhooks(sink, tmp_path)) as real:
        real.post(
            fired("VLLMEngineDown", {"job": "vllm-a"}),
            fired("VLLMEngineUnreachable", job),
            fired("VLLMTTFTHigh", {"model_name": "m"}),
            fired("VLLMKVCacheNearlyFull", {**job, "job": "vllm-b", "model_name": "m"}),
            fired("VLLMWatchdog", {}),
        )
        eventually(lambda: sink.names("/page") and sink.names("/ticket") and sink.names("/deadman"), what="all three")
        # when this one has come, the others had their time
        real.post(fired("VLLMRuleFailing", {"rule_group": "later"}))
        eventually(lambda: "VLLMRuleFailing" in sink.names("/ticket"), what="the last ticket")
        assert (["VLLMEngineDown"], {"VLLMKVCacheNearlyFull", "VLLMRuleFailing"}) == (
            sink.names("/page"),
            set(sink.names("/ticket")),
        )
        assert {"VLLMWatchdog"} == set(sink.names("/deadman"))
        told = sink.got["/page"][0]["alerts"][0]["annotations"]
        assert "https://wiki.example/rb/VLLMEngineDown" == told["runbook_url"]
        assert told["dashboard_url"].startswith("https://grafana.example/d/vllm-watch-overview?viewPanel=")
        assert {"summary", "description"} <= told.keys()


@pytest.mark.prometheus
def test_failed_notifications_reach_the_other_receiver(
    manager: Any, sink: Sink, tmp_path: Path, part: Callable[[str], InstalledPart], free_port: Callable[[], int]
) -> None:
    """The receiver of pages refuses. A real Prometheus sees that by the expression of the alert; the alert arrives as a
    ticket, and the service that expects the watchdog hears nothing any more, so it calls."""
    sink.refused.add("/page")
    metric = self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED.name

    def pages_by_slack(found: dict[str, Any]) -> None:
        (page,) = [receiver for receiver in found["receivers"] if receiver["name"] == "page"]
        page["slack_configs"] = [{"api_url": f"{sink.url}/page"}]
        del page["webhook_configs"]
        for route in found["route"]["routes"]:
            route["repeat_interval"] = "1s"

    with (
        manager(on_webhooks(sink, tmp_path), pages_by_slack) as real,
        scraping(real, part, tmp_path, free_port()) as ask,
    ):
        eventually(lambda: ask(f'{metric}{{integration="slack"}} == 0'), what="the series before the first failure")
        real.post(fired("VLLMEngineDown", {"job": "vllm-a"}), fired("VLLMWatchdog", {}))
        eventually(lambda: sink.names("/deadman"), what="the watchdog")
        expression = BY_NAME["VLLMNotificationsFailing"].expr
        eventually(lambda: ask(expression), what="the expression to hold")
        assert [("slack", f"{real.url.removeprefix('http://')}")] == [
            (m["integration"], m["instance"]) for m in ask(expression)
        ]
        real.post(fired("VLLMNotificationsFailing", {"job": "alertmanager", "instance": "i", "integration": "slack"}))
        eventually(lambda: "VLLMNotificationsFailing" in sink.names("/ticket"), what="the ticket")
        assert "suppressed" == real.state("VLLMWatchdog")
        heard = len(sink.got["/deadman"])
        real.post(fired("VLLMRuleFailing", {"rule_group": "later"}))
        eventually(lambda: "VLLMRuleFailing" in sink.names("/ticket"), what="a later ticket")
        assert heard >= len(sink.got["/deadman"]) - 1, "one that was on its way may still arrive"


@pytest.mark.prometheus
def test_failed_webhooks_keep_a_webhook_watchdog(manager: Any, sink: Sink, tmp_path: Path) -> None:
    """Failed webhooks do not silence the watchdog whose receiver is one."""
    with manager(on_webhooks(sink, tmp_path)) as real:
        real.post(
            fired("VLLMNotificationsFailing", {"job": "alertmanager", "instance": "i", "integration": "webhook"}),
            fired("VLLMWatchdog", {}),
        )
        eventually(lambda: sink.names("/deadman") and sink.names("/page") and sink.names("/ticket"), what="all three")
        assert "active" == real.state("VLLMWatchdog")


@contextmanager
def scraping(
    real: Manager, part: Callable[[str], InstalledPart], folder: Path, port: int
) -> Iterator[Callable[[str], list[Labels]]]:
    """A real Prometheus that scrapes an Alertmanager; what it answers to a query, as labels."""
    job = {"job_name": "alertmanager", "static_configs": [{"targets": [real.url.removeprefix("http://")]}]}
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]})
    )
    command = [part("prometheus").path, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip

    def ask(query: str) -> list[Labels]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=60) as answer:
            return [one["metric"] for one in json.load(answer)["data"]["result"]]

    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield ask
        finally:
            process.terminate()


@pytest.mark.prometheus
def test_muted_alert_is_sent_when_its_source_ends(manager: Any, sink: Sink, tmp_path: Path) -> None:
    """What was kept back is told when the source is over and it still fires."""
    model, other = {"model_name": "m"}, {"model_name": "other"}
    with manager(on_webhooks(sink, tmp_path)) as real:
        real.post(
            fired("VLLMTTFTBudgetBurn", model),
            fired("VLLMTTFTBudgetSlowBurn", model),
            fired("VLLMTTFTBudgetSlowBurn", other),
        )
        eventually(
            lambda: sink.names("/page") and sink.names("/ticket"), what="a page, and the ticket of the other model"
        )
        assert [{"other"}] == [{a["labels"]["model_name"] for a in post["alerts"]} for post in sink.got["/ticket"]]
        real.post(fired("VLLMTTFTBudgetBurn", model, endsAt=datetime.now(UTC).isoformat()))
        eventually(lambda: len(sink.names("/ticket")) == 2, what="the ticket that was kept back")


SHOWN = (
    "https://wiki.example/rb/VLLMKVCacheNearlyFull", "https://grafana.example/d/vllm-watch-overview?viewPanel=",
    "full: tiny on 10.0.0.1:8000", "tiny on 10.0.0.1:8000 uses 93%",
)  # fmt: skip
TITLE = "warning: VLLMKVCacheNearlyFull, tiny, 10.0.0.1:8000"
FULL = {"model_name": "tiny", "instance": "10.0.0.1:8000", "job": "vllm"}


@pytest.mark.prometheus
def test_slack_shows_what_it_is_and_both_links(manager: Any, sink: Sink, tmp_path: Path) -> None:
    for name in ("page", "ticket"):
        Path(routing.secret_file(name, str(tmp_path))).write_text(f"{sink.url}/{name}")
    with manager(routing.configuration("slack", secrets=str(tmp_path))) as real:
        real.post(fired("VLLMKVCacheNearlyFull", FULL))
        eventually(lambda: sink.got.get("/ticket"), what="a message")
    message = sink.got["/ticket"][0]["attachments"][0]
    assert (TITLE, SHOWN[0]) == (message["title"], message["title_link"])
    assert all(part in message["text"] for part in SHOWN), message["text"]


@pytest.mark.prometheus
def test_pagerduty_gets_key_severity_and_both_links(manager: Any, sink: Sink, tmp_path: Path) -> None:
    Path(routing.secret_file("ticket", str(tmp_path))).write_text("the-key\n")

    def here(found: dict[str, Any]) -> None:
        found["receivers"][1]["pagerduty_configs"][0]["url"] = f"{sink.url}/pagerduty"

    with manager(routing.configuration("pagerduty", secrets=str(tmp_path)), here) as real:
        real.post(fired("VLLMKVCacheNearlyFull", FULL))
        eventually(lambda: sink.got.get("/pagerduty"), what="an event")
    event = sink.got["/pagerduty"][0]
    assert ("the-key", "trigger", "warning") == (
        event["routing_key"],
        event["event_action"],
        event["payload"]["severity"],
    )
    assert TITLE == event["payload"]["summary"]
    assert ["runbook", "dashboard"] == [link["text"] for link in event["links"]]
    assert all(part in event["payload"]["custom_details"]["message"] for part in SHOWN)


class FakeMail(socketserver.StreamRequestHandler):
    """A mail server's side of one delivery: takes any password and keeps the words of the client."""

    said: list[str]

    def handle(self) -> None:
        self.wfile.write(b"220 fake\r\n")
        data = False
        for line in self.rfile:
            text = line.decode().rstrip("\r\n")
            self.said.append(text)
            if data and text != ".":
                continue
            data = text == "DATA"
            answer = {"EHLO": "250-fake\r\n250 AUTH PLAIN", "AUTH": "235 in", "DATA": "354 go on", "QUIT": "221 bye"}
            self.wfile.write(answer.get(text[:4], "250 ok").encode() + b"\r\n")
            if text == "QUIT":
                return


@pytest.mark.prometheus
def test_mail_has_links_and_a_password_file(manager: Any, tmp_path: Path) -> None:
    """Mail bears what it is and both links and the password comes from its file."""
    Path(routing.secret_file("ticket", str(tmp_path))).write_text("hunter2\n")
    handler = type("Handler", (FakeMail,), {"said": (said := [])})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def here(found: dict[str, Any]) -> None:
            account = found["receivers"][1]["email_configs"][0]
            account |= {"smarthost": f"127.0.0.1:{server.server_address[1]}", "require_tls": False}

        with manager(routing.configuration("email", secrets=str(tmp_path)), here) as real:
            real.post(fired("VLLMKVCacheNearlyFull", FULL))
            eventually(lambda: "QUIT" in said, what="a mail")
        server.shutdown()
    text = re.sub(r"=\n", "", "\n".join(said)).replace("=3D", "=")
    assert "AUTH PLAIN AHZsbG0td2F0Y2hAZXhhbXBsZS5vcmcAaHVudGVyMg==" in said, (
        "the user, and the password without its line end"
    )
    assert f"Subject: {TITLE}" in text
    assert all(part in text for part in SHOWN), text


def test_paced_alerts_are_muted_alike() -> None:
    """A drill shows what is kept back in earnest."""
    assert RULES == routing.inhibitions(alerts(DEFAULTS.paced(15)), RECORDINGS)
