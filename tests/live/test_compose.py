"""docker-compose.yml: first read as a file, then run. What runs is real where this machine can have it: the engine,
Prometheus, Alertmanager, the collector and everything of ours; Grafana, Jaeger and the GPU are stand-ins
(tests/support/compose_standins/)."""

from __future__ import annotations

import base64
import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from alerts.panel_ref import PanelRef
from alerts.rules import LABELS_QUERY
from dashboards.model import Profile
from dashboards.registry import boards
from exporters.catalogue import gateway as gateway_series
from exporters.catalogue import gpu, vllm
from exporters.catalogue import sidecar as sidecar_series
from exporters.sidecar_config import SidecarConfig
from stack import config
from stack.deploy import init
from stack.deploy.haproxy import CHECK_MS
from stack.gateway.config import GatewayConfig
from stack.gateway.teams import load_policy, make_key, teams_of
from stack.lab.install import InstalledPart
from tests.support import compose_images
from tests.support.compose_files import (
    BASE,
    CPU,
    DEPLOY,
    READY,
    REPLICAS,
    ROOT,
    SECURE,
    SECURE_STANDINS,
    Reset,
    read,
    resolved,
)
from tests.support.compose_standins.private_docker import FAR_HOST, PrivateDocker, Project
from tests.support.engines import Engine, Engines
from tests.support.wait import eventually

SHIP = DEPLOY / "compose.ship.yml"
STANDINS, PATIENCE = (ROOT / f"tests/support/compose_standins/{name}.yml" for name in ("compose", "patience"))
GATEWAY, PROMETHEUS, ALERTMANAGER, JAEGER, BOARD = (
    f"http://127.0.0.1:{port}" for port in (8000, 9090, 9093, 16686, 9402)
)
TARGETS = {"vllm", "gateway", "sidecar", "prometheus", "alertmanager", "otelcol"}


Reset.add_constructor("!reset", lambda loader, node: None)


def services(path: Path = BASE) -> dict[str, Any]:
    found: dict[str, Any] = read(path)["services"]
    return found


def flags(path: Path) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", services(path)["vllm"]["command"]))


# --- read as files


@pytest.mark.parametrize("name", services())
def test_every_image_is_pinned_to_a_release(name: str) -> None:
    """What was tested is what starts next year."""
    image = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", services()[name]["image"])
    assert re.search(r":v?\d+\.\d+\.\d+$", image), image


def test_the_image_of_ours_bears_our_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert {f"vllm-watch:{version[1]}"} == {s["image"] for s in services().values() if "build" in s}


@pytest.mark.parametrize("name", services())
def test_every_service_is_confined(name: str) -> None:
    """Loopback only, no new privileges, all capabilities dropped, a read-only root, bounded logs."""
    service = services()[name]
    assert all(port.startswith("127.0.0.1:${VLLM_WATCH_PORT_") for port in service.get("ports", []))
    assert (["ALL"], ["no-new-privileges:true"]) == (service["cap_drop"], service["security_opt"])
    assert service["read_only"] in (True, "${VLLM_WATCH_ENGINE_READ_ONLY:-true}")
    assert "max-size" in service["logging"]["options"]


def test_the_engine_and_the_sidecar_have_no_way_out() -> None:
    """Prompts stay on the internal network; the model is fetched by another service before."""
    assert read(BASE)["networks"]["engine"]["internal"]
    assert (["engine"], ["engine"]) == (services()["vllm"]["networks"], services()["sidecar"]["networks"])
    assert "1" == services()["vllm"]["environment"]["HF_HUB_OFFLINE"]


def test_each_engine_flag_of_ours_has_its_reason_in_the_file() -> None:
    for flag in flags(BASE) - {"--host", "--port", "--revision", "--max-model-len", "--gpu-memory-utilization"}:
        assert re.search(rf"^  #   {flag} ", BASE.read_text(), re.MULTILINE), flag


def test_the_cpu_overlay_keeps_every_flag_of_observability() -> None:
    assert flags(BASE) - {"--gpu-memory-utilization"} == flags(CPU) - {"--dtype"}


def test_grafana_counts_with_the_scrape_interval() -> None:
    """$__rate_interval comes from timeInterval; were it shorter than the scrapes, panels would be empty."""
    prometheus = read(DEPLOY / "prometheus/prometheus.yml")
    sources = {s["type"]: s for s in read(DEPLOY / "grafana/provisioning/datasources/datasources.yml")["datasources"]}
    assert prometheus["global"]["scrape_interval"] == sources["prometheus"]["jsonData"]["timeInterval"]
    assert not [job for job in prometheus["scrape_configs"] if "scrape_interval" in job]
    assert TARGETS == {job["job_name"] for job in prometheus["scrape_configs"]}
    assert (
        sources["jaeger"]["uid"] == sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"][0]["datasourceUid"]
    )


def test_alertmanager_routes_by_a_severity_that_our_alerts_have() -> None:
    routed = re.findall(r'severity="(\w+)"', (DEPLOY / "alertmanager/alertmanager.yml").read_text())
    rules = [
        rule
        for path in (ROOT / "alerts/prometheus").glob("*.yaml")
        for group in read(path)["groups"]
        for rule in group["rules"]
    ]
    assert routed
    assert set(routed) <= {rule["labels"]["severity"] for rule in rules if "alert" in rule}


def test_grafana_opens_on_a_board_that_is_printed() -> None:
    home = Path(services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    provider = read(DEPLOY / "grafana/provisioning/dashboards/dashboards.yml")["providers"][0]
    assert Path(provider["options"]["path"]) == home.parent
    assert (ROOT / "dashboards/json" / home.name).is_file()


def test_our_configuration_files_are_read_by_our_programs() -> None:
    """And the gateway, the sidecar and Prometheus agree on addresses and files."""
    gateway, sidecar = (
        config.load(DEPLOY / "gateway.yaml", GatewayConfig),
        config.load(DEPLOY / "sidecar.yaml", SidecarConfig),
    )
    targets = {
        j["job_name"]: j["static_configs"][0]["targets"][0]
        for j in read(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]
    }
    assert [gateway.upstream] == [engine.url for engine in sidecar.engines] == [f"http://{targets['vllm']}"]
    assert (gateway.requests_log,) == sidecar.requests_log
    assert str(init.FOLDER / "teams.yaml") == gateway.teams
    assert init.TEAMS == sidecar.teams.configured
    assert (gateway.metrics_listen, sidecar.listen) == tuple(
        re.sub(r"^\w+", "0.0.0.0", targets[job])  # noqa: S104
        for job in ("gateway", "sidecar")
    )


@pytest.mark.compose
@pytest.mark.parametrize(
    "overlays",
    [(), (CPU,), (REPLICAS,), (CPU, REPLICAS), (SHIP,), (CPU, SHIP)],
    ids=["gpu", "cpu", "replicas", "cpu-replicas", "ship", "cpu-ship"],
)
def test_compose_accepts_the_files_without_any_setting(
    part: Callable[[str], InstalledPart], tmp_path: Path, overlays: tuple[Path, ...]
) -> None:
    """No edit, no .env: `docker compose config -q` on a bare environment."""
    files = [word for file in (BASE, *overlays) for word in ("--file", str(file))]
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [part("compose").path, *files, "config", "--quiet"], env=bare, capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)


def test_the_shipper_of_the_overlay_is_confined_and_scraped() -> None:
    """It reads the gateway's log, whose counters the same Prometheus has, and writes to its own volumes only."""
    ship, like = services(SHIP)["ship"], services()["sidecar"]
    confined = ("user", "restart", "read_only", "cap_drop", "security_opt", "pids_limit", "tmpfs", "logging")
    assert {name: like[name] for name in confined} == {name: ship[name] for name in confined}
    assert like["image"] == ship["image"]
    settings = config.ship(DEPLOY / "ship/ship.yaml")
    assert settings.requests_log == config.load(DEPLOY / "sidecar.yaml", SidecarConfig).requests_log
    (job,) = read(DEPLOY / "ship/scrape.yml")["scrape_configs"]
    assert [f"ship:{settings.listen.rpartition(':')[2]}"] == job["static_configs"][0]["targets"]
    assert "http://prometheus:9090" == settings.prometheus
    mounts = dict(each.split(":")[1::-1] for each in ship["volumes"] if isinstance(each, str))
    assert {
        "/var/lib/vllm-watch/log": "request-log",
        settings.state: "ship-state",
        settings.dataset: "dataset",
    } == mounts
    assert {settings.state, settings.dataset} <= set(re.findall(r"/var/lib/[-\w/]+", (ROOT / "Dockerfile").read_text()))
    (where,) = (each for each in services(SHIP)["prometheus"]["volumes"])
    assert [f"{Path(where.split(':')[1]).parent}/*.yml"] == read(DEPLOY / "prometheus/prometheus.yml")[
        "scrape_config_files"
    ]


def test_files_of_two_gateways_are_those_of_one_and_shared_ones() -> None:
    """Their gateway.yaml adds the store and the time in which HAProxy sees that one stops; Prometheus asks both."""
    one, each = (config.load(path / "gateway.yaml", GatewayConfig) for path in (DEPLOY, DEPLOY / "replicas"))
    assert each.sharing is not None
    assert each.sharing.store is not None
    assert (2, "hostname") == (each.sharing.replicas, each.sharing.index)
    assert Path(str(each.sharing.store.password_file)).parent == init.STORE
    timeouts = msgspec.structs.replace(each.timeouts, accept_grace_s=one.timeouts.accept_grace_s)
    assert one == msgspec.structs.replace(each, sharing=None, timeouts=timeouts)
    assert each.timeouts.accept_grace_s >= 4 * CHECK_MS / 1000
    one, first = (config.load(path / "sidecar.yaml", SidecarConfig) for path in (DEPLOY, DEPLOY / "replicas"))
    assert (("http://sidecar-1:9401",), "hostname") == (tuple(peer.url for peer in first.peers), first.central)
    assert one == msgspec.structs.replace(first, peers=(), central=None)
    base, both = (read(path / "prometheus/prometheus.yml") for path in (DEPLOY, DEPLOY / "replicas"))
    for job in both["scrape_configs"]:
        targets = job["static_configs"][0]["targets"]
        if job["job_name"] in ("gateway", "sidecar"):
            name, port = targets[0].split(":")
            assert [f"{name}:{port}", f"{name}-1:{port}"] == targets
            del targets[1:]
    assert base == both


@pytest.mark.compose
def test_gpu_goes_to_engine_and_sidecar(part: Callable[[str], InstalledPart]) -> None:
    """The GPU goes to engine and sidecar and the CPU overlay takes it away."""

    def devices(found: Any) -> dict[str, list[str]]:
        return {
            name: device["capabilities"]
            for name, service in found["services"].items()
            for device in (
                ((service.get("deploy") or {}).get("resources") or {}).get("reservations", {}).get("devices", [])
            )
        }

    assert {"vllm": ["gpu"], "sidecar": ["utility"]} == devices(resolved(part, {}))
    assert {} == devices(resolved(part, {}, CPU))
    assert "vllm/vllm-openai-cpu" in resolved(part, {}, CPU)["services"]["model"]["image"]


@pytest.mark.compose
def test_newer_flags_are_optional_and_quotes_stay(part: Callable[[str], InstalledPart]) -> None:
    """One variable for older engines, one for everything else."""
    command = resolved(part, {"VLLM_WATCH_ENGINE_NEWER": "", "VLLM_WATCH_ENGINE_ARGS": """--x '{"a": [1, 2]}'"""})[
        "services"
    ]["vllm"]["command"]
    assert "--enable-per-request-metrics" not in command
    assert ["--x", '{"a": [1, 2]}'] == command[-2:]
    assert "--enable-per-request-metrics" == resolved(part, {})["services"]["vllm"]["command"][-1]


@pytest.mark.prometheus
def test_prometheus_and_alertmanager_accept_their_files(part: Callable[[str], InstalledPart]) -> None:
    for command in (
        [part("promtool").path, "check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml"],
        [part("amtool").path, "check-config", DEPLOY / "alertmanager/alertmanager.yml"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.collector
def test_the_collector_accepts_its_file(part: Callable[[str], InstalledPart]) -> None:
    command = [part("otelcol").path, "validate", f"--config={DEPLOY / 'otelcol/config.yaml'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)


def test_secrets_are_made_once_and_only_for_those_who_need_them(tmp_path: Path) -> None:
    """A second start finds what the first one made, and an edited teams.yaml stays edited."""
    made = init.make(tmp_path)
    (tmp_path / "teams.yaml").write_text((tmp_path / "teams.yaml").read_text() + "# mine\n")
    assert made == init.make(tmp_path) == init.read(tmp_path)
    assert (tmp_path / "teams.yaml").read_text().endswith("# mine\n")
    policy = load_policy(tmp_path / "teams.yaml")
    assert {team: team for team in init.TEAMS} == {name: team.band for name, team in policy.teams.items()}
    teams = teams_of(policy, "teams.yaml")
    assert {team: team for team in init.TEAMS} == {team: teams.of(key) for team, key in made.keys.items()}
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert 0o640 == modes.pop("grafana_admin_password")
    assert {"keys": 0o700, "teams.yaml": 0o600, "gateway.secret": 0o600, **dict.fromkeys(init.TEAMS, 0o600)} == modes


def test_the_password_of_the_store_is_made_once(tmp_path: Path) -> None:
    secrets, store = tmp_path / "secrets", tmp_path / "store"
    for folder in (secrets, store):
        folder.mkdir()
    assert 0 == init.main(secrets)
    assert [] == list(store.iterdir())
    assert 0 == init.main(secrets, store)
    made = (store / "password").read_text()
    assert len(made) >= 32
    assert 0o600 == stat.S_IMODE((store / "password").stat().st_mode)
    assert 0 == init.main(secrets, store)
    assert made == (store / "password").read_text()


def test_an_interrupted_start_is_finished_by_the_next(tmp_path: Path) -> None:
    """A key that was lost is made again; the others stay."""
    first = init.make(tmp_path)
    (tmp_path / "keys/demo").unlink()
    second = init.make(tmp_path)
    assert first.keys["demo"] != second.keys["demo"]
    assert first.keys["replay"] == second.keys["replay"]


def test_secrets_before_the_first_start(tmp_path: Path) -> None:
    """Asking for secrets before the first start says what to do."""
    with pytest.raises(config.BadConfig, match="docker compose up"):
        init.read(tmp_path)


def test_a_model_that_is_a_folder_is_not_fetched(tmp_path: Path) -> None:
    """No network and no huggingface_hub are needed for it; a name without either fails with the ways out."""
    fetch = [sys.executable, "-I", str(DEPLOY / "fetch_model.py")]
    folder = subprocess.run(fetch, env={"MODEL": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert 0 == folder.returncode, folder.stderr
    (tmp_path / "none").mkdir()
    name = subprocess.run(
        [sys.executable, "-S", str(DEPLOY / "fetch_model.py")],
        env={"MODEL": "a/b"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 1 == name.returncode
    assert "VLLM_WATCH_HF_TOKEN_FILE" in name.stderr


@pytest.mark.parametrize(
    ("without", "change", "arguments", "says"),
    [
        ((), {}, (), None),
        (("docker",), {}, (), "Install Docker Engine"),
        ((), {"docker": "exit 1"}, (), "systemctl start docker"),
        (
            (),
            {"docker": 'case "$1" in compose) echo v2.17.0;; *) echo 28.5.2;; esac'},
            (),
            "docker compose 2.24.4 or later",
        ),
        (("nvidia-smi",), {}, (), "Install your distribution's NVIDIA driver"),
        ((), {"nvidia-smi": "echo NVIDIA-SMI has failed; exit 9"}, (), "Install your distribution's NVIDIA driver"),
        ((), {"nvidia-smi": "echo 550.163.01"}, (), "-cu129"),
        (("nvidia-container-runtime-hook",), {}, (), "Install nvidia-container-toolkit"),
        (("nvidia-smi", "nvidia-container-runtime-hook"), {}, ("cpu",), None),
    ],
)
def test_the_preflight_names_what_is_missing_and_what_to_install(
    tmp_path: Path, without: tuple[str, ...], change: dict[str, str], arguments: tuple[str, ...], says: str | None
) -> None:
    for name, script in ({n: s for n, s in READY.items() if n not in without} | change).items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for tool in ("sh", "sort", "head", "sed", "grep"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    done = subprocess.run(
        ["/bin/sh", DEPLOY / "preflight.sh", *arguments],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (1 if says else 0) == done.returncode, done.stdout + done.stderr
    assert "" == done.stderr
    assert (says or "ok") in done.stdout


# --- run


@pytest.fixture(scope="module")
def docker(
    as_root: None, part: Callable[[str], InstalledPart], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDocker]:
    """An engine of its own with every image; gone afterwards without a trace."""
    folder = tmp_path_factory.mktemp("docker")
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    before = forwarding.read_text(), Path("/proc/net/dev").read_text().count(":")
    made = PrivateDocker(part("dockerd").path, part("docker").path, part("compose").path, folder)
    try:
        found = resolved(part, _variables(part), CPU, REPLICAS, STANDINS)["services"]
        compose_images.make(made, {name: service["image"] for name, service in found.items()}, part)
        yield made
    finally:
        made.stop()
    assert before == (forwarding.read_text(), Path("/proc/net/dev").read_text().count(":"))
    assert str(folder) not in Path("/proc/mounts").read_text()


def _variables(part: Callable[[str], InstalledPart]) -> dict[str, str]:
    return {
        "STANDIN_ENGINE": str(part("engine").path.parent.parent),
        "STANDIN_PYTHON": _python_behind(part("engine").path.parent / "python"),
        "STANDIN_MODEL": str(part("model").path),
        "VLLM_WATCH_MODEL": "/tiny",
        "VLLM_WATCH_CONTEXT": "2048",
        # float16: as in stack/lab/plan.py, which says why.
        "VLLM_WATCH_ENGINE_ARGS": (
            "--served-model-name tiny --dtype float16 --enforce-eager --block-size 32 --max-num-seqs 8"
        ),
    }


def _quick_scrapes(docker: PrivateDocker, folder: Path) -> dict[str, str]:
    """The variable of patience.yml: the Prometheus configuration of a folder, with intervals of a second."""
    quick = _with_quick_scrapes((folder / "prometheus/prometheus.yml").read_text())
    path = docker.folder / f"scrapes-{hashlib.sha256(quick.encode()).hexdigest()[:12]}.yml"
    path.write_text(quick)
    return {"STANDIN_SCRAPES": str(path)}


def _with_quick_scrapes(text: str) -> str:
    quick = re.sub(r"^(  (?:scrape|evaluation)_interval:) 15s$", r"\1 1s", text, flags=re.MULTILINE)
    assert quick.count(" 1s\n") == 2, "both intervals"
    return quick


@pytest.fixture(scope="module")
def started(docker: PrivateDocker, part: Callable[[str], InstalledPart]) -> SimpleNamespace:
    """The whole stack, on its way up: while the engine loads, others are looked at."""
    variables = _variables(part) | _quick_scrapes(docker, DEPLOY)
    project = docker.up_project([BASE, CPU, STANDINS, PATIENCE], variables, ROOT)
    project("up", "--detach", timeout_s=300)
    return SimpleNamespace(docker=docker, project=project, variables=variables)


@pytest.fixture(scope="module")
def stack(started: SimpleNamespace) -> SimpleNamespace:
    """The whole stack, up and healthy."""
    started.project("up", "--detach", "--wait", "--wait-timeout", "600", timeout_s=630)
    key = _secrets(started.project)["demo"]
    return SimpleNamespace(**vars(started), bearer={"Authorization": f"Bearer {key}"})


def _python_behind(python: Path) -> str:
    """The folder of the interpreter that a virtual environment borrows."""
    command = [python, "-c", "import sys; sys.stdout.write(sys.base_prefix)"]
    prefix = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return prefix if prefix not in ("/usr", "/usr/local") else f"{prefix}/lib/python3.11"


def _secrets(project: Project) -> dict[str, str]:
    """What the printed secrets say, as a person would read them."""
    told = project("run", "--rm", "cli", "secrets", "--json")
    found = json.loads(told)
    return {"grafana": found["grafana_password"], **found["keys"]}


# --- run with TLS and logins

PORTS = {"GATEWAY": 24000, "GRAFANA": 24001, "PROMETHEUS": 24002, "ALERTMANAGER": 24003, "BOARD": 24004}
LOGINS = ("alertmanager", "board", "grafana", "operator", "prometheus")


@pytest.fixture(scope="class")
def secured(started: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """compose.secure.yml, up and healthy on ports of its own, with everything that was made for it. It comes before
    what needs the real engine."""
    docker = started.docker
    variables = {f"VLLM_WATCH_PORT_{name}": str(port) for name, port in PORTS.items()} | {
        "COMPOSE_PROJECT_NAME": "secured"
    }
    variables |= _quick_scrapes(docker, DEPLOY / "secure")
    project = docker.up_project([BASE, CPU, SECURE, SECURE_STANDINS, PATIENCE], variables, ROOT)
    project("up", "--detach", "--wait", "--wait-timeout", "300", timeout_s=330)
    volumes = docker.folder / "data/volumes"
    passwords = {user: (volumes / f"secured_tls-{user}/_data/password").read_text() for user in LOGINS}
    authority = (volumes / "secured_tls-public/_data/ca.crt").read_text()

    def get(
        service: str, path: str, user: str = "", password: str | None = None, body: object = None, **headers: str
    ) -> tuple[int, str]:
        """As somebody outside who was given the authority, and the login of `user`."""
        if user:
            login = f"{user}:{passwords[user] if password is None else password}"
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        return docker.get(f"https://localhost:{PORTS[service]}{path}", headers, body, authority=authority)

    keys = _secrets(project)
    yield SimpleNamespace(
        docker=docker,
        project=project,
        get=get,
        keys=keys,
        passwords=passwords,
        secrets=[*passwords.values(), *keys.values()],
    )
    project("kill")


@pytest.mark.compose
@pytest.mark.collector
@pytest.mark.prometheus
class TestSecured:
    """The stack of compose.secure.yml as those see it who are let in, and those who are not."""

    def test_every_target_is_up_over_tls_but_the_two_that_have_none(self, secured: SimpleNamespace) -> None:
        def up() -> bool:
            states = json.loads(secured.get("PROMETHEUS", "/api/v1/targets", "operator")[1])["data"]["activeTargets"]
            assert dict.fromkeys(TARGETS, ("up", "")) == {
                t["labels"]["job"]: (t["health"], t["lastError"]) for t in states
            }
            assert {"vllm", "otelcol"} == {t["labels"]["job"] for t in states if t["scrapeUrl"].startswith("http://")}
            return True

        eventually(up, within_s=60, what="all targets up")

    def test_an_alert_arrives_and_its_links_begin_with_https(self, secured: SimpleNamespace) -> None:
        """Every rule is loaded, and the page that a link leads to is shown to the operator."""
        rules = json.loads(secured.get("PROMETHEUS", "/api/v1/rules", "operator")[1])["data"]["groups"]
        assert len(list((ROOT / "alerts/prometheus").glob("*.yaml"))) == len({group["file"] for group in rules})

        def arrived() -> bool:
            (alert,) = json.loads(
                secured.get("ALERTMANAGER", "/api/v2/alerts?filter=alertname=VLLMWatchdog", "operator")[1]
            )
            page = f"https://localhost:{PORTS['BOARD']}/runbooks/VLLMWatchdog?live=1"
            assert page == alert["annotations"]["runbook_url"]
            return True

        eventually(arrived, within_s=90, what="the watchdog at Alertmanager")
        status, page = secured.get("BOARD", "/runbooks/VLLMWatchdog", "operator")
        assert (200, True) == (status, "First five minutes" in page)

    @pytest.mark.parametrize("service", ["GATEWAY", "PROMETHEUS", "ALERTMANAGER", "BOARD"])
    def test_nobody_is_let_in_without_a_login_or_with_a_wrong_one(self, secured: SimpleNamespace, service: str) -> None:
        """And nobody at all without TLS."""
        path = {"GATEWAY": "/v1/models", "BOARD": "/"}.get(service, "/metrics")
        assert 401 == secured.get(service, path)[0]
        assert 401 == secured.get(service, path, "operator", "wrong")[0]
        assert 401 == secured.get(service, path, "grafana", secured.keys["grafana"])[0]
        plain = f"http://localhost:{PORTS[service]}{path}"
        try:
            answer = secured.docker.get(plain)[0]
        except ConnectionError:
            answer = 400
        assert 400 == answer  # Go's way of saying it
        with pytest.raises(OSError, match="certificate verify failed"):
            secured.docker.get(plain.replace("http:", "https:"))

    def test_gateway_answers_and_its_span_is_stored(self, secured: SimpleNamespace) -> None:
        """Client over TLS -> gateway -> sidecar -> collector over TLS -> the stand-in for Jaeger, which only those on
        its network can ask."""
        trace = hashlib.md5(os.urandom(8), usedforsecurity=False).hexdigest()
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "the queue"}]}
        bearer = {"Authorization": f"Bearer {secured.keys['demo']}", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        assert 200 == secured.get("GATEWAY", "/v1/chat/completions", body=body, **bearer)[0]
        code = f"import urllib.request; print(urllib.request.urlopen('http://jaeger:16686/api/traces/{trace}').status)"

        def told() -> bool:
            return bool(secured.project("exec", "-T", "grafana", "python3", "-c", code).strip() == "200")

        eventually(told, what="the span at the store")

    def test_grafana_uses_its_data_source_login(self, secured: SimpleNamespace) -> None:
        """Grafana asks Prometheus with the login of its data source."""
        status, answer = secured.get("GRAFANA", "/prometheus")
        assert (200, "success") == (status, json.loads(answer)["status"])

    def test_the_gateway_reads_hashes_and_neither_keys_nor_passwords(self, secured: SimpleNamespace) -> None:
        """They lie in the same volume, and are covered."""
        look = (
            "cd /var/lib/vllm-watch/secrets && cat keys/* grafana_admin_password 2> /dev/null; grep -c sha256"
            " teams.yaml"
        )
        assert str(len(init.TEAMS)) == secured.project("exec", "-T", "gateway", "sh", "-c", look).strip()

    def test_printed_secrets_name_addresses_and_password(self, secured: SimpleNamespace) -> None:
        """The printed secrets name the addresses that answer and the operator's password."""
        told = secured.project("run", "--rm", "cli", "secrets")
        assert f"https://localhost:{PORTS['GRAFANA']}   user admin, password {secured.keys['grafana']}\n" in told
        assert f"user operator, password {secured.passwords['operator']}   for" in told
        assert told.endswith(f"https://localhost:{PORTS['GATEWAY']}/v1/models\n")

    def test_no_secret_is_seen_where_it_does_not_belong(self, secured: SimpleNamespace) -> None:
        """Not in a log, a label, a container's settings, an image's history, a command line or an environment."""
        docker, project = secured.docker, secured.project
        assert len(LOGINS) + len(init.TEAMS) + 1 == len(set(secured.secrets))
        containers = docker.run(
            "ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=secured"
        ).split()
        places = {
            "logs": project("logs", "--no-color"),
            "every series that Prometheus read": secured.get(
                "PROMETHEUS", "/api/v1/query?query=%7B__name__=~%22.%2B%22%7D", "operator"
            )[1],
            "Prometheus' own page": secured.get("PROMETHEUS", "/metrics", "operator")[1],
            "Prometheus' settings": secured.get("PROMETHEUS", "/api/v1/status/config", "operator")[1],
            "containers": docker.run("inspect", *containers),
            "the image": (
                docker.run("history", "--no-trunc", "vllm-watch:0.1.0")
                + docker.run("image", "inspect", "vllm-watch:0.1.0")
            ),
            "compose's own view": project("config"),
            **{
                f"{process}/{file}": _text(process / file)
                for process in Path("/proc").glob("[0-9]*")
                for file in ("cmdline", "environ")
            },
        }
        assert all(places[place] for place in ("logs", "every series that Prometheus read", "containers"))
        assert len(places) > 2 * len(containers)
        assert [] == [place for place, text in places.items() if any(secret in text for secret in secured.secrets)]

    def test_a_second_up_makes_nothing_anew(self, secured: SimpleNamespace) -> None:
        volumes = secured.docker.folder / "data/volumes"

        def state() -> dict[str, tuple[bytes, int]]:
            files = [path for volume in volumes.glob("secured_tls-*") for path in volume.rglob("*") if path.is_file()]
            return {str(path): (path.read_bytes(), path.stat().st_ctime_ns) for path in files}

        before = secured.keys, state(), secured.project("ps", "--quiet")
        secured.project("up", "--detach", "--wait", "--wait-timeout", "300")
        assert before == (_secrets(secured.project), state(), secured.project("ps", "--quiet"))

    def test_personal_files_stay_out_of_the_image(self, docker: PrivateDocker, tmp_path: Path) -> None:
        """Keys, tokens and caches, wherever they lie; the build sees our packages and nothing else."""
        for name in (
            "stack/kept.py",
            ".env",
            "stack/.env.local",
            "stack/deploy/secure/tls.key",
            "stack/hf_token",
            "my.pem",
            "artifacts/log",
            ".git/x",
            "stack/__pycache__/a.pyc",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("planted")
        shutil.copy(ROOT / ".dockerignore", tmp_path)
        (tmp_path / "Dockerfile").write_text('FROM scratch\nCOPY . .\nCMD ["none"]\n')
        docker.run(
            "build",
            "--network",
            "none",
            "--tag",
            "planted",
            str(tmp_path),
            env={**docker.environment, "DOCKER_BUILDKIT": "0"},
        )
        name = docker.run("create", "--network", "none", "planted").strip()
        docker.run("export", "--output", str(tmp_path / "image.tar"), name)
        docker.run("rm", name)
        with tarfile.open(tmp_path / "image.tar") as image:
            ours = {member.name for member in image if member.isfile() and member.size}
        assert {"stack/kept.py"} == ours


def _text(path: Path) -> str:
    """Of a process that may be gone by now."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- run with two gateways

REPLICAS_PORTS = {"GATEWAY": 24100, "GRAFANA": 24101, "PROMETHEUS": 24102, "ALERTMANAGER": 24103, "BOARD": 24104}


@pytest.fixture(scope="class")
def replicated(docker: PrivateDocker) -> Iterator[SimpleNamespace]:
    """compose.replicas.yml, up and healthy on ports of its own, without what it leaves as it is. The engine is fake."""
    variables = {f"VLLM_WATCH_PORT_{name}": str(port) for name, port in REPLICAS_PORTS.items()} | {
        "COMPOSE_PROJECT_NAME": "replicated"
    }
    variables |= _quick_scrapes(docker, DEPLOY / "replicas")
    project = docker.up_project([BASE, CPU, REPLICAS, SECURE_STANDINS, PATIENCE], variables, ROOT)
    wanted = ("vllm", "haproxy", "store", "gateway", "gateway-1", "sidecar", "sidecar-1", "prometheus")
    project("up", "--detach", "--wait", "--wait-timeout", "300", *wanted, timeout_s=330)
    url, prometheus = (f"http://127.0.0.1:{REPLICAS_PORTS[name]}" for name in ("GATEWAY", "PROMETHEUS"))
    bearer = {"Authorization": f"Bearer {_secrets(project)['demo']}"}
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "the queue"}]}

    def ask() -> tuple[int, str]:
        status, text = docker.get(f"{url}/v1/chat/completions", bearer, body)
        return status, "" if status == 200 else text

    def values(expression: str) -> dict[str, float]:
        """Value of each instance, by its name."""
        found = json.loads(docker.get(f"{prometheus}/api/v1/query?query={expression.replace(' ', '%20')}")[1])
        return {each["metric"]["instance"]: float(each["value"][1]) for each in found["data"]["result"]}

    yield SimpleNamespace(docker=docker, project=project, ask=ask, chat=lambda: ask()[0], values=values)
    project("kill")


@pytest.mark.compose
@pytest.mark.prometheus
class TestReplicated:
    """Two gateways behind HAProxy, with a store of leases."""

    def test_both_gateways_serve_one_address_and_each_has_its_log(self, replicated: SimpleNamespace) -> None:
        eventually(lambda: replicated.chat() == 200, within_s=60, what="an answer through HAProxy")
        assert {200} == {replicated.chat() for _ in range(8)}

        def counted() -> bool:
            found = replicated.values(f'sum by (instance) ({sidecar_series.REQUESTS.name}{{team="demo"}})')
            return {"sidecar:9401", "sidecar-1:9401"} == set(found) and sum(found.values()) >= 8

        eventually(counted, within_s=90, what="the requests of both logs")
        all_up = dict.fromkeys(("gateway:8010", "gateway-1:8010", "sidecar:9401", "sidecar-1:9401"), 1.0)
        eventually(lambda: all_up == replicated.values('up{job=~"gateway|sidecar"}'), "all targets up")

    def test_limits_are_leased_and_requests_do_not_need_the_store(self, replicated: SimpleNamespace) -> None:
        names = ("gateway:8010", "gateway-1:8010")

        def lost(value: float) -> bool:
            return bool(dict.fromkeys(names, value) == replicated.values(gateway_series.LEASE_LOST.name))

        eventually(lambda: lost(0), within_s=90, what="leases of both")
        both = dict.fromkeys(names, 2.0)
        eventually(lambda: both == replicated.values(gateway_series.LEASE_REPLICAS.name), "both know of each other")
        replicated.project("stop", "store")
        eventually(lambda: lost(1), within_s=90, what="the loss at both")
        assert {200} == {replicated.chat() for _ in range(4)}
        replicated.project("start", "store")
        eventually(lambda: lost(0), within_s=90, what="leases of both again")

    def test_a_gateway_is_replaced_without_a_failed_request(self, replicated: SimpleNamespace) -> None:
        """Twice in succession: the second time it is stopped while it still starts."""

        def restart() -> None:
            for _ in range(2):
                replicated.project("restart", "gateway")

        with concurrent.futures.ThreadPoolExecutor(1) as alongside:
            restarted = alongside.submit(restart)
            answers = [replicated.ask()]
            while not restarted.done():
                answers.append(replicated.ask())
            restarted.result()
        logs = ("logs", "--no-color", "--timestamps", "--tail", "60", "haproxy", "gateway")
        assert {(200, "")} == set(answers), replicated.project(*logs)
        assert len(answers) > 10, "there was load while it stopped"

    def test_the_password_of_the_store_is_seen_by_nobody_else(self, replicated: SimpleNamespace) -> None:
        docker, project = replicated.docker, replicated.project
        password = (docker.folder / "data/volumes/replicated_store/_data/password").read_text()
        containers = docker.run(
            "ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=replicated"
        ).split()
        for text in (project("logs", "--no-color"), docker.run("inspect", *containers), project("config")):
            assert text
            assert password not in text
        look = "cat /proc/1/cmdline /proc/1/environ | tr -c '[:print:]' '\\n' | grep -cF -f /run/store/password || true"
        assert "0" == project("exec", "-T", "store", "sh", "-c", look).strip()


# --- run with a real engine


def shell_lines(page: str) -> list[str]:
    """Lines of a page's shell blocks, as a user types them."""
    blocks = "\n".join(re.findall(r"^ *```sh\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL))
    return [line.strip() for line in blocks.splitlines() if line.strip()]


def ask(stack: SimpleNamespace, expression: str) -> list[Any]:
    """An instant query: label sets and values."""
    _, text = stack.docker.get(f"{PROMETHEUS}/api/v1/query?query={expression.replace(' ', '%20')}")
    found: list[Any] = json.loads(text)["data"]["result"]
    return found


def chat(stack: SimpleNamespace, **headers: str) -> tuple[int, Any]:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "the queue"}]}
    status, text = stack.docker.get(f"{GATEWAY}/v1/chat/completions", {**stack.bearer, **headers}, body)
    return status, json.loads(text)


@pytest.mark.compose
@pytest.mark.engine
@pytest.mark.collector
@pytest.mark.prometheus
class TestRunning:
    """One stack for all; each test leaves it as healthy as it found it."""

    def test_probed_services_are_healthy(self, stack: SimpleNamespace) -> None:
        """Everything with a probe is healthy and the one shots are done."""
        lines = [json.loads(line) for line in stack.project("ps", "--all", "--format", "json").splitlines()]
        health = {line["Service"]: line["Health"] or f"{line['State']} {line['ExitCode']}" for line in lines}
        probed = ("vllm", "gateway", "sidecar", "board", "prometheus", "alertmanager", "grafana")
        done, unprobed = dict.fromkeys(("model", "init"), "exited 0"), dict.fromkeys(("otelcol", "jaeger"), "running 0")
        assert {**dict.fromkeys(probed, "healthy"), **done, **unprobed} == health

    def test_port_8000_answers_with_the_printed_key_and_only_with_it(self, stack: SimpleNamespace) -> None:
        """The engine's models, its metrics and an answer from the real engine behind the gateway."""
        assert 401 == stack.docker.get(f"{GATEWAY}/v1/models")[0]
        status, models = stack.docker.get(f"{GATEWAY}/v1/models", stack.bearer)
        assert (200, ["tiny"]) == (status, [model["id"] for model in json.loads(models)["data"]])
        status, page = stack.docker.get(f"{GATEWAY}/metrics", stack.bearer)
        assert 200 == status
        assert "# TYPE vllm:" in page
        status, answer = chat(stack)
        assert (200, 4) == (status, answer["usage"]["completion_tokens"]), answer

    def test_scrape_targets_are_up(self, stack: SimpleNamespace) -> None:
        """Every scrape target is up and rules and Alertmanager are known."""

        def up() -> bool:
            _, text = stack.docker.get(f"{PROMETHEUS}/api/v1/targets")
            states = {
                t["labels"]["job"]: (t["health"], t["lastError"]) for t in json.loads(text)["data"]["activeTargets"]
            }
            assert dict.fromkeys(TARGETS, ("up", "")) == states
            return True

        eventually(up, within_s=60, what="all targets up")
        rules = json.loads(stack.docker.get(f"{PROMETHEUS}/api/v1/rules")[1])["data"]["groups"]
        assert len(list((ROOT / "alerts/prometheus").glob("*.yaml"))) == len({group["file"] for group in rules})
        found = json.loads(stack.docker.get(f"{PROMETHEUS}/api/v1/alertmanagers")[1])["data"]["activeAlertmanagers"]
        assert ["http://alertmanager:9093/api/v2/alerts"] == [manager["url"] for manager in found]
        assert 200 == stack.docker.get(f"{ALERTMANAGER}/-/ready")[0]

    def test_alert_links_lead_to_pages_and_boards_show_values(self, stack: SimpleNamespace) -> None:
        """As the host's browser sees them: by address and by name, and by no other name."""
        rules = json.loads(stack.docker.get(f"{PROMETHEUS}/api/v1/rules")[1])["data"]["groups"]
        down = next(rule for group in rules for rule in group["rules"] if rule["name"] == "VLLMEngineDown")
        assert f"{BOARD}/runbooks/VLLMEngineDown{LABELS_QUERY}" == down["annotations"]["runbook_url"]
        for where in (BOARD, BOARD.replace("127.0.0.1", "localhost")):
            status, text = stack.docker.get(f"{where}/runbooks/VLLMEngineDown?live=1&job=vllm")
            assert (200, True) == (status, "First five minutes" in text)
        assert 421 == stack.docker.get(f"{BOARD}/", {"Host": "elsewhere.example"})[0]
        panel = (
            f"{BOARD}/api/panel/{PanelRef('overview', 'engines-up').uid}/{PanelRef('overview', 'engines-up').panel_id}"
        )
        eventually(
            lambda: [1.0] == [one["value"] for one in json.loads(stack.docker.get(panel)[1])["series"]],
            within_s=60,
            what="the engine up",
        )

    def test_sidecar_joins_the_log_and_sees_the_gpu(self, stack: SimpleNamespace) -> None:
        """One request of team demo arrives in Prometheus by team, and the GPU's absent readings are absent."""
        assert 200 == chat(stack)[0]
        eventually(
            lambda: ask(stack, f'{sidecar_series.REQUESTS.name}{{team="demo",outcome="ok"}} > 0'),
            within_s=60,
            what="the request by team",
        )
        eventually(lambda: ask(stack, f"{gpu.POWER.name} == 42.5"), within_s=60, what="the stand-in GPU's power")
        assert [] == ask(stack, gpu.TEMPERATURE.name)

    def test_change_is_annotated_without_a_token(self, stack: SimpleNamespace) -> None:
        """A change is annotated in the sidecar's container without a token."""
        stack.project(
            "exec",
            "-T",
            "sidecar",
            "vllm-watch",
            "annotate",
            "prefix caching on",
            "--diff",
            "enable-prefix-caching=off->on",
        )
        assert "prefix caching on" in stack.project("exec", "-T", "sidecar", "vllm-watch", "events", "--since", "1h")
        eventually(
            lambda: ask(stack, f'{sidecar_series.EVENT_TIME.name}{{kind="change"}} > 0'),
            within_s=60,
            what="the change at Prometheus",
        )

    def test_a_request_leaves_its_trace_in_the_trace_store(self, stack: SimpleNamespace) -> None:
        """Client's traceparent -> gateway -> real vLLM -> real collector -> the stand-in for Jaeger."""
        trace = hashlib.md5(os.urandom(8), usedforsecurity=False).hexdigest()
        assert 200 == chat(stack, traceparent=f"00-{trace}-00f067aa0ba902b7-01")[0]
        eventually(lambda: stack.docker.get(f"{JAEGER}/api/traces/{trace}")[0] == 200, what="the trace at the store")

    def test_the_engine_and_the_sidecar_cannot_reach_the_outside(self, stack: SimpleNamespace) -> None:
        """A far host answers the gateway with a refusal, and engine and sidecar not at all."""

        def far_says(service: str, python: str) -> str:
            call = f"socket.create_connection(('{FAR_HOST}', 80), 2)"
            code = f"import socket\ntry: {call}\nexcept OSError as error: print(type(error).__name__)"
            return str(stack.project("exec", "-T", service, python, "-c", code)).strip()

        assert "ConnectionRefusedError" == far_says("gateway", "python")
        assert far_says("vllm", "python3") in ("TimeoutError", "OSError")
        assert far_says("sidecar", "python") in ("TimeoutError", "OSError")

    def test_restarted_gateway_keeps_keys_and_new_team(self, stack: SimpleNamespace) -> None:
        """The ways of docs/start/gpu-host.md: teams.yaml lies in a volume that only the init service may write, and a
        signal has it read anew."""
        key, hashed = make_key("fresh")
        file = "/var/lib/vllm-watch/secrets/teams.yaml"
        stack.project(
            "run",
            "--rm",
            "-T",
            "--entrypoint",
            "sh",
            "init",
            "-c",
            f"printf '  fresh:\\n    keys: [\"{hashed}\"]\\n' >> {file}",
        )
        assert "fresh:" in stack.project("run", "--rm", "-T", "--entrypoint", "cat", "init", file)
        stack.project("restart", "gateway")
        eventually(lambda: chat(stack)[0] == 200, within_s=30, what="an answer after the restart")
        status, _ = stack.docker.get(f"{GATEWAY}/v1/models", {"Authorization": f"Bearer {key}"})
        assert 200 == status
        # without its last lines alone, the file would be taken for one whose writing was cut off
        script = f"sed -i /fresh/,+1d {file} && echo '# fresh is gone' >> {file}"
        stack.project("run", "--rm", "-T", "--entrypoint", "sh", "init", "-c", script)
        stack.project("exec", "-T", "gateway", "sh", "-c", "kill -HUP 1")
        bearer = {"Authorization": f"Bearer {key}"}
        eventually(
            lambda: stack.docker.get(f"{GATEWAY}/v1/models", bearer)[0] == 401,
            within_s=30,
            what="the file read anew without a restart",
        )

    def test_the_quick_start_of_a_gpu_host_can_be_typed_as_it_stands(
        self, stack: SimpleNamespace, tmp_path: Path
    ) -> None:
        """All of its lines but those that cannot be had here, or were typed to get so far; beside it only the files of
        the stand-ins are named."""
        otherwise = {
            "sh stack/deploy/preflight.sh": "there is no GPU; its own tests run it",
            "docker compose up -d": "the fixture has started the same stack",
            "xdg-open http://127.0.0.1:9402": "no desktop",
        }
        page = (ROOT / "docs/start/gpu-host.md").read_text().split("\n## The whole stack\n")[1]
        lines = shell_lines(page)
        variables = {**stack.variables, "COMPOSE_FILE": ":".join(map(str, (BASE, CPU, STANDINS, PATIENCE)))}
        bearer, said = stack.bearer["Authorization"].removeprefix("Bearer "), {}
        key, hashed = make_key("typed")
        for line in lines:
            if line.startswith("# now add what"):
                with (tmp_path / "teams.yaml").open("a") as file:
                    file.write(f"  typed:\n    keys: ['{hashed}']\n")
            elif not line.startswith(tuple(otherwise)):
                done = stack.docker.typed(line.replace("KEY", bearer), variables, tmp_path)
                assert 0 == done.returncode, f"{line}: {done.stderr}"
                said[line] = done.stdout
        assert all(any(line.startswith(one) for line in lines) for one in otherwise)
        assert bearer in said["docker compose run --rm cli secrets"]
        assert '"id":"tiny"' in said['curl -H "Authorization: Bearer KEY" http://127.0.0.1:8000/v1/models'].replace(
            " ", ""
        )
        assert "vllm:num_requests_running" in said["curl http://127.0.0.1:8000/metrics | grep '^vllm:'"]
        checked = next(text for line, text in said.items() if "gateway check" in line)
        assert re.search(r"^ +typed +default ", checked, re.MULTILINE), checked
        mine = {"Authorization": f"Bearer {key}"}
        eventually(
            lambda: stack.docker.get(f"{GATEWAY}/v1/models", mine)[0] == 200,
            within_s=30,
            what="the key that was just put in",
        )

    def test_keys_and_series_survive_down_and_up_on_ports_of_choice(self, stack: SimpleNamespace) -> None:
        """On a second project without an engine, which saves its start: that the key is known shows in what the gateway
        answers."""
        ports = {
            "VLLM_WATCH_PORT_GATEWAY": "18000",
            "VLLM_WATCH_PORT_PROMETHEUS": "19090",
            "VLLM_WATCH_PORT_ALERTMANAGER": "19093",
        }
        other = stack.docker.up_project(
            [BASE, CPU, STANDINS, PATIENCE], {**stack.variables, **ports, "COMPOSE_PROJECT_NAME": "second"}, ROOT
        )
        start = (
            "up",
            "--detach",
            "--wait",
            "--wait-timeout",
            "300",
            "--no-deps",
            "init",
            "gateway",
            "alertmanager",
            "prometheus",
        )
        query = "http://127.0.0.1:19090/api/v1/query?query=up"

        def scraped(at: str = "") -> Any:
            return json.loads(stack.docker.get(query + at)[1])["data"]["result"]

        other(*start)
        before = _secrets(other)
        eventually(scraped, within_s=60, what="a first scrape")
        then = scraped()[0]["value"][0]
        other("down", "--timeout", "5")
        other(*start)
        assert before == _secrets(other) != _secrets(stack.project)
        bearer = {"Authorization": f"Bearer {before['replay']}"}
        assert 401 == stack.docker.get("http://127.0.0.1:18000/v1/models", stack.bearer)[0]
        # how long its name is looked for is the resolver's
        assert stack.docker.get("http://127.0.0.1:18000/v1/models", bearer)[0] in (502, 503, 504)
        assert scraped(f"&time={then}")
        other("down", "--volumes", "--timeout", "2")

    def test_missing_toolkit_is_quoted_by_the_preflight(self, stack: SimpleNamespace) -> None:
        """Without the toolkit Docker says what the preflight quotes."""
        with pytest.raises(AssertionError, match="could not select device driver"):
            stack.docker.run("run", "--rm", "--network", "none", "--gpus", "1", "standin-base", "true")


# --- run against an engine outside of the stack

ENGINE_PORT = 8030
WATCH_PORTS = {"GRAFANA": 26000, "PROMETHEUS": 26001, "ALERTMANAGER": 26002, "BOARD": 26003}


class WatchedStack:
    """compose.watch.yml in a clone of this repository, started by the lines of its quick start, and a real engine on
    the host that it reads, which answers only later. Prometheus scrapes each second."""

    def __init__(self, docker: PrivateDocker, engine: Engine, folder: Path) -> None:
        self.docker, self.checkout = docker, folder / "vllm-watch"
        self.engine, self.engine_process = f"http://127.0.0.1:{ENGINE_PORT}", engine
        ports = {f"VLLM_WATCH_PORT_{name}": str(port) for name, port in WATCH_PORTS.items()}
        self.variables = {**ports, "COMPOSE_PROJECT_NAME": "watched"}
        section = (ROOT / "docs/start/gpu-host.md").read_text().split("\n## The whole stack\n")[0]
        self.lines, self.said, where = shell_lines(section), dict[str, str](), folder
        for line in self.lines:
            if line == "cd vllm-watch":
                where = self.checkout
                prometheus = where / "stack/deploy/watch/prometheus/prometheus.yml"
                prometheus.write_text(_with_quick_scrapes(prometheus.read_text()))
                continue
            self.said[line] = self.typed(
                line.replace("REPOSITORY", str(ROOT)).replace(":8000", f":{ENGINE_PORT}"), where
            )
        self.served_before = self.served()
        host, _, port = engine.spec.address.removeprefix("http://").partition(":")
        docker.relay(ENGINE_PORT, host, int(port))

    def served(self) -> float:
        """The requests that the engine has finished, of other tests too."""
        return self.engine_process.figure(vllm.REQUEST_SUCCESS)

    def typed(self, line: str, where: Path | None = None) -> str:
        done = self.docker.typed(line, self.variables, where or self.checkout, timeout_s=300)
        assert 0 == done.returncode, f"{line}: {done.stderr}"
        return str(done.stdout)

    def get(self, name: str, path: str) -> Any:
        status, text = self.docker.get(f"http://127.0.0.1:{WATCH_PORTS[name]}{path}")
        assert 200 == status, text
        return json.loads(text)


@pytest.fixture(scope="module")
def watched(docker: PrivateDocker, real_engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> WatchedStack:
    return WatchedStack(docker, real_engines.shared().up(), tmp_path_factory.mktemp("watch"))


@pytest.mark.compose
@pytest.mark.engine
@pytest.mark.prometheus
class TestWatching:
    def test_five_typed_commands_start_it(self, watched: WatchedStack) -> None:
        """Nobody answers there at that time, which the last of them reports, and monitoring has started."""
        assert 6 == len(watched.lines), "five commands, and the one that prints Grafana's password"
        assert f"localhost:{ENGINE_PORT}: " in watched.said["docker compose logs init"]
        assert re.search(r"user admin, password \S{20,}\n$", watched.said["docker compose run --rm cli secrets"])
        assert f"localhost:{ENGINE_PORT}: answers, vLLM 0." in watched.typed("docker compose run --rm init")

    def test_engine_is_scraped_and_overview_is_filled(self, watched: WatchedStack) -> None:
        """By requests of others: the stack itself sends none."""

        def request() -> None:
            body = {"model": "tiny", "max_tokens": 8, "prompt": "the queue"}
            assert 200 == watched.docker.get(f"{watched.engine}/v1/completions", {}, body)[0]

        assert watched.served() == watched.served_before, "only the test sends requests"
        (overview,) = (board for board in boards(Profile.ENGINE) if board.slug == "overview")
        must_show = {panel.slug for panel in overview.panels if not panel.optional}

        def filled() -> bool:
            request()
            shown = set()
            for panel in overview.panels:
                ref = PanelRef("overview", panel.slug)
                drawn = watched.get("BOARD", f"/api/panel/{ref.uid}/{ref.panel_id}?from=now-5m")
                if drawn.get("series") or drawn.get("rows"):
                    shown.add(panel.slug)
            assert set() == must_show - shown
            return True

        eventually(filled, within_s=120, what="every panel of Overview")

        def targets() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = watched.get("PROMETHEUS", "/api/v1/targets")["data"]["activeTargets"]
            assert dict.fromkeys(("vllm", "sidecar", "prometheus", "alertmanager"), "up") == {
                target["labels"]["job"]: target["health"] for target in found
            }
            return found

        found = eventually(targets, "all targets up")
        (engine,) = (target for target in found if target["labels"]["job"] == "vllm")
        assert f"localhost:{ENGINE_PORT}" == engine["labels"]["instance"]

    def test_published_ports_are_on_loopback(self, watched: WatchedStack) -> None:
        published = watched.typed("docker compose ps --format '{{.Ports}}'")
        addresses = set(re.findall(r"(\S+):\d+->", published))
        assert {"127.0.0.1"} == addresses

    def test_invalid_url_is_one_sentence(self, watched: WatchedStack) -> None:
        done = watched.docker.typed(
            "docker compose run --rm init", {**watched.variables, "VLLM_WATCH_ENGINE_URL": "localhost:8000/v1"},
            watched.checkout,
        )  # fmt: skip
        assert 1 == done.returncode
        assert "'localhost:8000/v1' is not the URL of an engine; write scheme, host and port" in done.stderr
