"""A GPU divided between teams: compose.mig.yml as a file, its gateways as processes, its networks as Docker makes
them, and a divided GPU's rows.

Each law of compose.mig.yml has its test here: what is one team's, the other can neither reach nor read nor hold up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from exporters import exposition
from exporters.accounting.gpu_use import mig_fraction
from exporters.accounting.prices import GpuPrice, Prices
from exporters.catalogue import gateway as catalogue_gateway
from exporters.catalogue import gpu as catalogue
from exporters.catalogue import vllm
from exporters.gpu.nvidia_smi import parse_csv
from exporters.gpu.readings import GpuReading, MigReading
from exporters.gpu.series import families
from exporters.sidecar_config import SidecarConfig
from stack import config
from stack.capacity import gpus as gpu_models
from stack.capacity import memory, model
from stack.capacity.kv import Serving, cache
from stack.deploy import init, slices
from stack.gateway.check import check
from stack.gateway.teams import make_key
from stack.lab.install import InstalledPart
from tests.support.compose_files import BASE, DEPLOY, READY, ROOT, read, resolved
from tests.support.compose_mig import GIVEN, MIG, STANDIN
from tests.support.compose_standins.private_docker import FAR_HOST, PrivateDocker
from tests.support.gateway_scene import ASK, CHAT, REPLY, FakeEngine, gateway, listening, never, says
from tests.support.joined_accounts import Books, view
from tests.support.mig_instances import INSTANCES
from tests.support.wait import until

TEAMS = ("team-a", "team-b")
GOLDEN = ROOT / "tests/golden/nvidia-smi"


# --- read as files


@pytest.fixture(scope="module")
def services(part: Callable[[str], InstalledPart]) -> dict[str, Any]:
    """What compose makes of both files."""
    found: dict[str, Any] = resolved(part, GIVEN, MIG)["services"]
    return found


@pytest.mark.compose
def test_compose_accepts_the_files_without_any_setting(part: Callable[[str], InstalledPart], tmp_path: Path) -> None:
    """What is missing is told by the service init and by the preflight, in a sentence."""
    command = [part("compose").path, "-f", "docker-compose.yml", "-f", "stack/deploy/compose.mig.yml", "config", "-q"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.compose
def test_each_team_has_an_engine_and_nothing_serves_everybody(services: dict[str, Any]) -> None:
    assert not {"vllm", "gateway", "model"} & set(services)
    assert {f"{kind}-{team}" for kind in ("init", "model", "vllm", "gateway") for team in TEAMS} <= set(services)


@pytest.mark.compose
def test_teams_share_nothing(services: dict[str, Any]) -> None:
    """Only the download's network is everybody's, where nobody listens."""
    a, b = (_belongings(services, team) for team in TEAMS)
    assert {"device", "name", "port", "volume", "network"} == {kind for kind, _ in a} == {kind for kind, _ in b}
    assert {("network", "fetch")} == a & b
    assert {"model-team-a", "model-team-b"} == {
        name for name in services if "fetch" in (services[name].get("networks") or ())
    }
    assert {("device", GIVEN["TEAM_A_MIG"]), ("name", "team-a"), ("port", "8000")} <= a
    assert {("device", GIVEN["TEAM_B_MIG"]), ("name", "team-b"), ("port", "8001")} <= b


def _belongings(services: Mapping[str, Any], team: str) -> set[tuple[str, str]]:
    its = [services[f"{kind}-{team}"] for kind in ("init", "model", "vllm", "gateway")]
    engine = services[f"vllm-{team}"]
    return {
        *(("volume", mount["source"]) for service in its for mount in service["volumes"] if mount["type"] == "volume"),
        *(("network", name) for service in its for name in service.get("networks") or ()),
        *(("port", port["published"]) for service in its for port in service.get("ports", ())),
        *(
            ("device", uuid)
            for device in engine["deploy"]["resources"]["reservations"]["devices"]
            for uuid in device["device_ids"]
        ),
        ("name", engine["command"][engine["command"].index("--served-model-name") + 1]),
    }


@pytest.mark.compose
def test_engine_is_isolated_and_writes_only_its_cache(
    part: Callable[[str], InstalledPart], services: dict[str, Any]
) -> None:
    """An engine has no way out and writes only what it compiles."""
    networks = resolved(part, GIVEN, MIG)["networks"]
    for team in TEAMS:
        engine = services[f"vllm-{team}"]
        assert [team] == list(engine["networks"])
        assert networks[team]["internal"]
        assert "1" == engine["environment"]["HF_HUB_OFFLINE"]
        assert "CUDA_VISIBLE_DEVICES" not in engine["environment"]
        assert {"/models": True, "/cache": False} == {
            mount["target"]: mount.get("read_only", False) for mount in engine["volumes"]
        }
        assert [] == engine.get("ports", [])


@pytest.mark.compose
def test_every_service_is_confined(services: dict[str, Any]) -> None:
    """Read-only roots and files of ours, no capability but the one that reads a token, no new privileges, ports on
    loopback, limits."""
    for name, service in services.items():
        assert (True, ["ALL"], ["no-new-privileges:true"]) == (
            service["read_only"],
            service["cap_drop"],
            service["security_opt"],
        ), name
        assert name.startswith("model-") or not service.get("cap_add"), name
        assert {"127.0.0.1"} >= {port["host_ip"] for port in service.get("ports", ())}, name
        assert all(mount["read_only"] for mount in service.get("volumes", ()) if mount["type"] == "bind"), name
        assert "max-size" in service["logging"]["options"], name
        if name.startswith("vllm-"):
            assert 0 < float(service["cpus"])
            assert 2**30 < int(service["mem_limit"])


@pytest.mark.compose
@pytest.mark.parametrize("team", TEAMS)
def test_a_gateway_holds_its_own_teams_key_and_log_alone(services: dict[str, Any], team: str) -> None:
    mounts = {
        mount["source"]: mount.get("read_only", False)
        for mount in services[f"gateway-{team}"]["volumes"]
        if mount["type"] == "volume"
    }
    assert {f"secrets-{team}": True, f"request-log-{team}": False} == mounts
    assert {"secrets-team-a", "secrets-team-b"}.isdisjoint(mount["source"] for mount in services["sidecar"]["volumes"])


@pytest.mark.compose
def test_each_variable_changes_its_own_team(part: Callable[[str], InstalledPart], services: dict[str, Any]) -> None:
    said = {
        "MODEL": "org/m",
        "REVISION": "v1",
        "NAME": "chat",
        "CONTEXT": "1000",
        "GPU_MEMORY": "0.5",
        "CPUS": "2",
        "MEMORY": "8g",
        "PORT": "9000",
        "ENGINE_ARGS": "--enforce-eager",
    }
    assert {f"TEAM_{team}_{name}" for team in "AB" for name in (*said, "MIG")} == set(
        re.findall(r"TEAM_[AB]_[A-Z_]+(?=:?-)", MIG.read_text())
    )
    changed = resolved(part, GIVEN | {f"TEAM_B_{name}": value for name, value in said.items()}, MIG)["services"]
    assert {"model-team-b", "vllm-team-b", "gateway-team-b"} == {
        name for name in services if services[name] != changed[name]
    }
    engine = changed["vllm-team-b"]
    assert {"org/m", "v1", "chat", "1000", "0.5", "--enforce-eager"} <= set(engine["command"])
    assert (2, 8 << 30) == (engine["cpus"], int(engine["mem_limit"]))
    assert ("9000", "org/m") == (
        changed["gateway-team-b"]["ports"][0]["published"],
        changed["model-team-b"]["environment"]["MODEL"],
    )


@pytest.mark.compose
def test_what_repeats_the_base_file_says_the_same(
    part: Callable[[str], InstalledPart], services: dict[str, Any]
) -> None:
    """A flag, a probe or a limit that is changed there is changed here."""
    base = resolved(part, {})["services"]
    own = {"--served-model-name"}
    for kind in ("vllm", "gateway", "model"):
        differs = {
            "command",
            "environment",
            "volumes",
            "networks",
            "depends_on",
            "deploy",
            "ports",
            "cpus",
            "mem_limit",
        }
        for team in TEAMS:
            mine = services[f"{kind}-{team}"]
            same = base[kind].keys() | mine.keys() - differs
            assert {key: base[kind].get(key) for key in same - differs} == {
                key: mine.get(key) for key in same - differs
            }
            assert {word for word in base[kind]["command"] or () if word[:2] == "--"} == {
                w for w in mine["command"] or () if w[:2] == "--"
            } - own
            only = {"MODEL", "MODEL_REVISION", "OTEL_SERVICE_NAME"}
            assert {k: v for k, v in base[kind].get("environment", {}).items() if k not in only} == {
                k: v for k, v in mine.get("environment", {}).items() if k not in only
            }


SCRAPED = {"vllm": "vllm-{}:8001", "gateway": "gateway-{}:8010"}


@pytest.mark.prometheus
def test_prometheus_scrapes_each_team_as_a_namespace(part: Callable[[str], InstalledPart]) -> None:
    """Prometheus scrapes each team as a namespace and else what the base file does."""
    ours, base = (read(DEPLOY / where / "prometheus/prometheus.yml") for where in ("mig", "."))
    jobs = {job["job_name"]: job["static_configs"] for job in ours["scrape_configs"]}
    for job, target in SCRAPED.items():
        assert [{"targets": [target.format(team)], "labels": {"namespace": team}} for team in TEAMS] == jobs[job]
    for page in (ours, base):
        page["scrape_configs"] = [job for job in page["scrape_configs"] if job["job_name"] not in SCRAPED]
    assert base == ours
    command = [part("promtool").path, "check", "config", "--syntax-only", DEPLOY / "mig/prometheus/prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_no_series_says_its_namespace_itself() -> None:
    """A label that the page has would come back as exported_namespace, and no alert would find it."""
    assert not [metric.name for metric in (*vllm.VLLM, *catalogue_gateway.GATEWAY) if "namespace" in metric.labels]


@pytest.mark.prometheus
def test_one_teams_engine_down_is_that_teams_alert(part: Callable[[str], InstalledPart], tmp_path: Path) -> None:
    """The other team's engine, which is up, must not pass for its spare."""
    series = [
        {
            "series": f'up{{job="{job}",namespace="{team}",instance="{target.format(team)}"}}',
            "values": f"1x5 {int(team == 'team-b')}x30",
        }
        for job, target in SCRAPED.items()
        for team in TEAMS
    ]
    asked = {
        "expr": 'count by (alertname, namespace) (ALERTS{alertstate="firing",alertname=~"VLLM(Engine|Gateway)Down"})',
        "eval_time": "20m",
        "exp_samples": [
            {"labels": f'{{alertname="VLLM{who}Down",namespace="team-a"}}', "value": 1} for who in ("Engine", "Gateway")
        ],
    }
    rules = [str(path) for path in (ROOT / "alerts/prometheus").glob("*.yaml")]
    test = {
        "rule_files": rules,
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}],
    }
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    done = subprocess.run(
        [part("promtool").path, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr


# --- the slices and whose they are


def start(tmp_path: Path, environment: Mapping[str, str], *arguments: str) -> tuple[int, Path]:
    """What a service init does, in a folder."""
    (tmp_path / "secrets").mkdir(exist_ok=True)
    sidecar = tmp_path / "sidecar.yaml"
    return slices.main(arguments, environment, tmp_path / "secrets", DEPLOY / "mig/sidecar.yaml", sidecar), sidecar


def test_the_sidecar_is_told_which_slice_serves_whom(tmp_path: Path) -> None:
    """Anew at each start, because slices change; the password stays."""
    assert 0 == start(tmp_path, GIVEN | {"TEAM_A_MIG": "MIG-former"})[0]
    before = (tmp_path / "secrets/grafana_admin_password").read_text()
    status, path = start(tmp_path, GIVEN)
    assert (0, before) == (status, (tmp_path / "secrets/grafana_admin_password").read_text())
    sidecar, base = config.sidecar(path), config.load(DEPLOY / "sidecar.yaml", SidecarConfig)
    assert {
        f"vllm-{team}": ((uuid,), f"http://vllm-{team}:8001") for team, uuid in zip(TEAMS, GIVEN.values(), strict=True)
    } == {engine.name: (engine.gpus, engine.url) for engine in sidecar.engines}
    assert TEAMS == sidecar.teams.configured
    changed = {"requests_log", "engines", "teams"}
    assert {name: getattr(base, name) for name in base.__struct_fields__ if name not in changed} == {
        name: getattr(sidecar, name) for name in sidecar.__struct_fields__ if name not in changed
    }


@pytest.mark.compose
def test_the_sidecar_reads_the_logs_that_the_gateways_write(services: dict[str, Any]) -> None:
    where = {mount["source"]: Path(mount["target"]) for mount in services["sidecar"]["volumes"]}
    logs = tuple(str(where[f"request-log-{team}"] / "requests.jsonl") for team in TEAMS)
    assert logs == config.parse((DEPLOY / "mig/sidecar.yaml").read_text(), SidecarConfig, "sidecar.yaml").requests_log
    assert str(init.SIDECAR) == services["sidecar"]["command"][-1]
    assert where["sidecar-state"] == init.SIDECAR.parent


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "no TEAM_..._MIG is set"),
        (GIVEN | {"TEAM_A_MIG": ""}, "TEAM_A_MIG is not set; give it the UUID of that team's slice"),
        (GIVEN | {"TEAM_B_MIG": "0:1"}, "TEAM_B_MIG is '0:1'; give it the UUID of that team's slice"),
        (GIVEN | {"TEAM_B_MIG": "GPU-00000000"}, "TEAM_B_MIG is 'GPU-00000000'"),
        (GIVEN | {"TEAM_B_MIG": GIVEN["TEAM_A_MIG"]}, "TEAM_A_MIG and TEAM_B_MIG are the same slice"),
        (GIVEN | {"TEAM_C_MIG": "MIG-c"}, "TEAM_C_MIG is missing in the engines of mig/sidecar.yaml"),
        ({"TEAM_A_MIG": "MIG-a"}, "TEAM_B_MIG is missing in the environment of the service init"),
    ],
)
def test_missing_slice_is_reported_before_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, environment: dict[str, str], says: str
) -> None:
    """A slice that is missing is told in one sentence before anything starts."""
    status, path = start(tmp_path, environment)
    assert (1, False) == (status, path.exists())
    [told] = caplog.messages
    assert says in told
    assert "\n" not in told


@pytest.mark.compose
def test_nothing_starts_before_init_is_content(services: dict[str, Any]) -> None:
    def waits_for(name: str) -> set[str]:
        direct = set(services[name].get("depends_on", {}))
        return direct.union(*map(waits_for, direct))

    for name in services:
        assert name in ("init", "board", "prometheus", "alertmanager", "otelcol", "jaeger") or "init" in waits_for(
            name
        ), name


@pytest.mark.parametrize("team", TEAMS)
def test_each_gateway_knows_one_key_and_one_engine(tmp_path: Path, team: str) -> None:
    """As `vllm-watch gateway check` reads the files; and a second start changes nothing."""
    for _ in range(2):
        assert 0 == start(tmp_path, {}, team)[0]
        key = (tmp_path / "secrets/keys" / team).read_text()
    told = check(_rooted(tmp_path))
    assert ([], []) == (told["mistakes"], told["warnings"])
    assert [(team, 1, None)] == [(one["team"], one["keys"], one["models"]) for one in told["teams"]]
    assert [(f"vllm-{team}", f"http://vllm-{team}:8001")] == [
        (one["upstream"], one["url"]) for one in told["upstreams"]
    ]
    assert key == (tmp_path / "secrets/keys" / team).read_text()
    assert key not in (tmp_path / "secrets/teams.yaml").read_text()


def _rooted(tmp_path: Path, **changed: str) -> Path:
    """The shipped gateway.yaml with the paths of this machine."""
    said = yaml.safe_load((DEPLOY / "mig/gateway.yaml").read_text())
    path = tmp_path / "gateway.yaml"
    path.write_text(
        json.dumps(
            said
            | {"teams": str(tmp_path / "secrets/teams.yaml"), "requests_log": str(tmp_path / "requests.jsonl")}
            | changed
        )
    )
    return path


def test_the_printed_secrets_are_those_of_all_teams(tmp_path: Path) -> None:
    """`docker compose run --rm cli secrets` sees each team's volume beside the one with the password."""
    assert 0 == start(tmp_path, GIVEN)[0]
    for team in TEAMS:
        slices.team(team, tmp_path / "teams" / team)
    keys = init.read(tmp_path / "secrets").keys
    assert list(TEAMS) == list(keys)
    assert all(key.startswith(f"vw-{team}-") for team, key in keys.items())


NVIDIA_SMI = f"""case $1 in
-L) echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'; for u in {" ".join(GIVEN.values())}; do echo "  MIG 1g.10gb     Device  0: (UUID: $u)"; done;;
*) echo 580.82.07;;
esac"""  # noqa: E501


@pytest.mark.parametrize(
    ("environment", "status", "says"),
    [
        (GIVEN, 0, f"ok       TEAM_B_MIG {GIVEN['TEAM_B_MIG']}"),
        ({"TEAM_A_MIG": GIVEN["TEAM_A_MIG"]}, 1, "missing  TEAM_B_MIG\n         Set it to the UUID"),
        (GIVEN | {"TEAM_B_MIG": GIVEN["TEAM_A_MIG"]}, 1, "Two teams have"),
        (GIVEN | {"TEAM_B_MIG": "MIG-gone"}, 1, "(MIG-gone is not among those of nvidia-smi -L)"),
    ],
)
def test_the_preflight_looks_for_each_teams_slice(
    tmp_path: Path, environment: dict[str, str], status: int, says: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in (READY | {"nvidia-smi": NVIDIA_SMI}).items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}"}
    written = "".join(f'{name}="{value}"\n' for name, value in environment.items())
    for given, file in ((environment, ""), ({}, written.replace('"', "")), ({}, "TEAM_A_MIG=MIG-former\n" + written)):
        (tmp_path / ".env").write_text(file)  # which compose reads as well: the last line counts, without its quotes
        done = subprocess.run(
            ["/bin/sh", DEPLOY / "preflight.sh", "mig"],
            cwd=tmp_path,
            env=env | given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (status, "") == (done.returncode, done.stderr), done.stdout
        assert says in done.stdout


# --- what fits

# From the models' own config.json on the hub.
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 28,
}
CONFIGS = {
    "Qwen/Qwen2.5-1.5B-Instruct": (
        _QWEN
        | {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        }
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        _QWEN
        | {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        }
    ),
}


@pytest.mark.compose
@pytest.mark.parametrize(("team", "slice_name"), [("team-a", "h100-80gb/1g.10gb"), ("team-b", "h100-80gb/3g.40gb")])
def test_the_shipped_models_fit_their_slices(services: dict[str, Any], team: str, slice_name: str) -> None:
    """With room for four requests of full length: a slice that holds the weights alone serves nobody."""
    command = services[f"vllm-{team}"]["command"]
    said = dict(itertools.pairwise(command))
    shape, gpu = model.shape(CONFIGS[command[0]], command[0]), gpu_models.gpu_named(slice_name)
    batch, share = memory.default_batched_tokens(gpu), float(said["--gpu-memory-utilization"])
    serving = Serving(
        max_model_len=int(said["--max-model-len"]), max_num_batched_tokens=batch, gpu_memory_utilization=share
    )
    budget = memory.kv_budget(shape, serving, gpu, memory.parts(shape, serving, gpu))
    assert cache(shape, serving, budget).concurrency > 4


# --- as processes


class Tenant(SimpleNamespace):
    """One team: its key, its engine (a fake), and its gateway (a process of the real one, on the shipped files)."""

    async def ask(self, key: str | None, path: str = CHAT, body: Any = ASK, method: str = "POST") -> tuple[int, str]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = json.dumps(body).encode() if method == "POST" else None
        async with self.session.request(method, self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def tenant(
    team: str, folder: Path, ports: Sequence[int], session: aiohttp.ClientSession
) -> AsyncIterator[Tenant]:
    engine = FakeEngine(answer=says(REPLY | {"model": team, "id": f"from-{team}"}))
    runner = await listening(engine)
    slices.team(team, folder / "secrets")
    teams = folder / "secrets/teams.yaml"
    teams.write_text(teams.read_text().replace(f"http://vllm-{team}:8001", engine.url))
    listen = {"listen": f"127.0.0.1:{ports[0]}", "metrics_listen": f"127.0.0.1:{ports[1]}"}
    with (folder / "said").open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "stack.cli", "gateway", "run", "--config", str(_rooted(folder, **listen)), cwd=ROOT,
            stdout=said, stderr=said
        )  # fmt: skip
    it = Tenant(
        team=team,
        engine=engine,
        session=session,
        folder=folder,
        url=f"http://{listen['listen']}",
        figures=f"http://{listen['metrics_listen']}",
    )
    it.key = (folder / "secrets/keys" / team).read_text()

    async def healthy() -> bool:
        if process.returncode is not None:
            pytest.fail((folder / "said").read_text())
        async with session.get(f"{it.url}/-/healthy") as answer:
            return answer.ok

    try:
        await until(healthy, "a healthy gateway")
        yield it
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 30)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def both(tmp_path: Path, free_port: Callable[[], int]) -> AsyncIterator[tuple[Tenant, Tenant]]:
    for team in TEAMS:
        (tmp_path / team).mkdir()
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        a, b = [
            await stack.enter_async_context(tenant(team, tmp_path / team, (free_port(), free_port()), session))
            for team in TEAMS
        ]
        yield a, b


async def test_team_key_opens_its_own_engine_only(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """At the other team's port it is refused in the very words in which any unknown key is; on its own port the other
    engine is not there."""
    async with both(tmp_path, free_port) as (a, b):
        for mine, other in ((a, b), (b, a)):
            status, answer = await mine.ask(mine.key)
            assert (200, f"from-{mine.team}") == (status, json.loads(answer)["id"])
            for path, method in (
                (CHAT, "POST"),
                ("/v1/models", "GET"),
                ("/v1/responses/resp_1", "GET"),
                ("/v1/completions/render", "POST"),
            ):
                foreign = await mine.ask(other.key, path, method=method)
                assert (
                    foreign
                    == await mine.ask(make_key(other.team)[0], path, method=method)
                    == await mine.ask("guess", path, method=method)
                )
                assert 401 == foreign[0]
                assert 401 == (await mine.ask(None, path, method=method))[0]
            assert {"/v1/chat/completions"} == {path for _, path, _, _ in mine.engine.asked}, (
                "what was refused reached no engine"
            )
            for path in (
                "/metrics",
                "/health",
                "/v1/../metrics",
                "/v1/%2e%2e/metrics",
                "/requests.jsonl",
                "/teams.yaml",
            ):
                assert 404 == (await mine.ask(mine.key, path, method="GET"))[0], path
                assert 404 == (await mine.ask(None, path, method="GET"))[0], path


async def test_a_flood_of_one_team_leaves_the_other_alone(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """400 requests that never end, more than may run at once, with 60 MB of bodies: the other team does not feel it."""
    async with both(tmp_path, free_port) as (a, b):
        a.engine.answer = never
        flood = [
            asyncio.create_task(a.ask(a.key, body=ASK | {"padding": "x" * (300_000 * (n % 2))})) for n in range(400)
        ]
        await until(lambda: len(a.engine.asked) >= 200, "a flood")
        assert {200} == {(await b.ask(b.key))[0] for _ in range(100)}, "while none of the flood is answered"
        assert 200 <= sum(not task.done() for task in flood)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        page = await _page(b)
        assert {"team-b"} == {labels["team"] for labels in page.values() if "team" in labels}
        assert "rejected" not in {labels.get("outcome") for labels in page.values()}


async def _page(it: Tenant) -> dict[tuple[str, ...], dict[str, str]]:
    """The labels of each series of a gateway's own page."""
    async with it.session.get(f"{it.figures}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    return {(s.name, *s.labels.values()): s.labels for family in families for s in family.samples}


async def test_no_key_stands_in_a_log_or_on_a_page(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Nor what somebody took for one."""
    async with both(tmp_path, free_port) as (a, b):
        guess = make_key("team-a")[0]
        for key in (a.key, b.key, guess):
            await a.ask(key)
            await a.ask(key, f"/v1/models?key={key}", method="GET")
            await a.ask(a.key, body=ASK | {"model": key})
        pages = [str(await _page(it)) for it in (a, b)]
    said = [path.read_text() for it in (a, b) for path in (it.folder / "said", it.folder / "requests.jsonl")]
    assert 6 == len((a.folder / "requests.jsonl").read_text().splitlines()), (
        "three of them by the key, three by the name of the model"
    )
    assert "" == (b.folder / "requests.jsonl").read_text()
    for key in (a.key, b.key, guess):
        assert not [text for text in pages + said[:1] + said[2:] if key in text]
    assert not [line for line in said[1].splitlines() if a.key in {**json.loads(line), "model": None}.values()]


async def test_one_gateway_for_both_keeps_them_apart_by_models(tmp_path: Path) -> None:
    """The other way, with one process: what a team may not ask for is the same to it as what does not exist, also where
    nothing is recorded."""
    engines = [FakeEngine(answer=says(REPLY | {"model": team})) for team in TEAMS]
    runners = [await listening(engine) for engine in engines]
    keys = {team: make_key(team) for team in TEAMS}
    policy = {
        "teams": {team: {"keys": [keys[team][1]], "models": [team]} for team in TEAMS},
        "models": {team: {"upstreams": [f"vllm-{team}"]} for team in TEAMS},
        "upstreams": {f"vllm-{team}": {"url": engine.url} for team, engine in zip(TEAMS, engines, strict=True)},
    }
    a, b = engines
    async with gateway(tmp_path, policy=policy, engine_pages=False) as it:

        async def ask(path: str, body: Any = None) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {keys['team-a'][0]}"}
            call = it.session.get if body is None else it.session.post
            async with call(
                it.started.url + path, headers=headers, **({} if body is None else {"json": body})
            ) as answer:
                return answer.status, await answer.text()

        assert ["team-a"] == [one["id"] for one in json.loads((await ask("/v1/models"))[1])["data"]]
        for n in range(8):  # whatever the engines are chosen by, it leads to one
            assert 200 == (await ask(CHAT, ASK | {"model": "team-a", "seed": n}))[0]
            assert 200 == (await ask("/v1/completions/render", {"model": "team-a", "prompt": str(n)}))[0]
            assert 200 == (await ask("/v1/messages/count_tokens", {"messages": [], "n": n}))[0]
            assert 404 == (await ask(f"/v1/responses/resp_{n}"))[0], "a response that the team did not make"
            for path in (CHAT, "/v1/completions/render"):
                refused, unknown = [await ask(path, ASK | {"model": name, "seed": n}) for name in ("team-b", "team-x")]
                assert 403 == refused[0]
                assert refused == (unknown[0], unknown[1].replace("team-x", "team-b"))
        assert 404 == (await ask("/metrics"))[0] == (await ask("/health"))[0]
        assert ([], True) == (b.asked, len(a.asked) == 24)
    for runner in runners:
        await runner.cleanup()


# --- as Docker runs it


@pytest.fixture(scope="module")
def docker(
    as_root: None, part: Callable[[str], InstalledPart], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Engines and gateways of both teams on a private Docker engine: our files, small programs."""
    folder = tmp_path_factory.mktemp("docker-mig")
    part("iproute2")
    engine = PrivateDocker(part("dockerd").path, part("docker").path, part("compose").path, folder)
    try:
        (folder / "index.html").write_text("here")
        with tarfile.open(folder / "image.tar", "w") as tar:
            tar.add(part("busybox").path, "bin/busybox")
            tar.add(folder / "index.html", "word/index.html")
        engine.run("import", str(folder / "image.tar"), "standin-busybox")
        project = engine.up_project([BASE, MIG, STANDIN], GIVEN, ROOT)
        for team in TEAMS:
            project("run", "--rm", "--no-deps", f"init-{team}")
        project("up", "--detach", "--no-deps", *(f"{kind}-{team}" for kind in ("vllm", "gateway") for team in TEAMS))
        yield project
    finally:
        engine.stop()


def says_each(docker: Any, service: str, command: str, words: Sequence[str]) -> dict[str, str]:
    """What a command of busybox says in a service for each word, all at once."""
    script = f'for it in "$@"; do (echo "$it: $(/bin/busybox {command} 2>&1)") & done; wait'
    said = docker("exec", "-T", service, "/bin/busybox", "sh", "-c", script, "sh", *words)
    return dict(line.split(": ", 1) for line in said.splitlines())


@pytest.mark.compose
class TestRunning:
    def test_engine_is_reached_by_its_gateway_only(self, docker: Any) -> None:
        """By addresses: a name that is not in one's network would not even be found."""
        shown = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
        at = {
            name: docker.docker.run("inspect", "--format", shown, docker("ps", "-q", name).strip()).split()
            for name in (f"{kind}-{team}" for kind in ("vllm", "gateway") for team in TEAMS)
        }
        for mine, other in (TEAMS, TEAMS[::-1]):
            [own], [theirs] = ([f"{address}:8001" for address in at[f"vllm-{team}"]] for team in (mine, other))
            gateways = [f"{address}:8000" for address in at[f"gateway-{other}"]]
            ask, gateway = "wget -T {} -q -O - http://$it/", f"gateway-{mine}"
            seen = says_each(docker, gateway, ask.format(30), [f"vllm-{mine}:8001", own, FAR_HOST])
            seen |= says_each(docker, gateway, ask.format(1), [theirs, *gateways])
            assert "here" == seen[f"vllm-{mine}:8001"] == seen[own]
            assert "Connection refused" in seen[FAR_HOST], "a way out, at whose end nobody listens"
            assert not [
                word for word in (seen[theirs], *map(seen.get, gateways)) if word == "here" or "refused" in str(word)
            ]
            blind = says_each(docker, f"vllm-{mine}", ask.format(1), [FAR_HOST, theirs, *gateways])
            assert 2 + len(gateways) == len(blind)
            assert not [word for word in blind.values() if word == "here" or "Connection refused" in word], (
                "a refusal would mean that there is a way"
            )

    def test_an_engine_cannot_write_but_to_its_cache(self, docker: Any) -> None:
        """And may not what root may: all capabilities are dropped."""
        said = says_each(docker, "vllm-team-a", "touch $it", ["/x", "/models/x", "/etc/x", "/cache/x", "/tmp/x"])
        assert {"/x", "/models/x", "/etc/x"} == {
            path for path, words in said.items() if "Read-only file system" in words
        }
        assert {"/cache/x", "/tmp/x"} == {path for path, words in said.items() if not words}
        [told] = says_each(docker, "vllm-team-a", "chown 1 $it", ["/cache/x"]).values()
        assert "Operation not permitted" in told
        assert (
            "Read-only"
            in says_each(docker, "gateway-team-a", "touch $it", ["/var/lib/vllm-watch/secrets/x"]).popitem()[1]
        )


# --- the rows of a divided GPU


def divided(name: str) -> GpuReading:
    [gpu] = parse_csv((GOLDEN / f"{name}.csv").read_text())
    return replace(gpu, instances=INSTANCES[name])


@pytest.mark.parametrize("name", ["h100-mig", "h200-mig"])
def test_what_a_divided_gpu_does_not_tell_is_not_on_the_page(name: str) -> None:
    """Missing values (utilisation of a divided GPU, activity of an instance) are omitted, never reported as 0."""
    gpu = divided(name)
    text = exposition.render(families([gpu]))
    shown = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {catalogue.UTILIZATION.name, catalogue.MEMORY_BUSY.name, catalogue.MIG_ACTIVITY.name}.isdisjoint(shown)
    assert {
        catalogue.POWER.name,
        catalogue.TEMPERATURE.name,
        catalogue.SM_CLOCK.name,
        catalogue.MIG_MEMORY_USED.name,
    } <= shown
    assert "not_available" == gpu.absent["utilization_ratio"]
    rows = [
        s.labels
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == catalogue.MIG_INFO.name
    ]
    assert [(part.mig_uuid, part.profile) for part in gpu.instances] == [
        (row["mig_uuid"], row["profile"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("gpu", "profiles"),
    [
        ("NVIDIA H100 80GB HBM3", ["3g.40gb", "4g.40gb"]),
        ("NVIDIA H100 80GB HBM3", ["1g.10gb"] * 7),
        ("NVIDIA H200", ["3g.71gb", "2g.35gb", "1g.18gb", "1g.18gb"]),
        ("NVIDIA H200", ["7g.141gb"]),
        ("NVIDIA A30", ["2g.12gb", "1g.6gb", "1g.6gb+me"]),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", ["4g.96gb"]),
    ],
)
def test_slices_that_make_up_a_gpu_cost_what_the_gpu_costs(gpu: str, profiles: list[str]) -> None:
    """To the cent and the second, with each team paying for its own."""
    engines = {f"engine-{n}": (f"MIG-{n}",) for n in range(len(profiles))}
    books = Books(engines)
    instances = tuple(MigReading("GPU-a", n, f"MIG-{n}", profile) for n, profile in enumerate(profiles))
    for _ in range(5):
        books.accounts.on_gpus([GpuReading("GPU-a", name=gpu, mig=True, instances=instances)], books.now)
        for n, name in enumerate(engines):
            books.look(view(model=f"team-{n}"), name, 8.0 if n == 0 else 0.0)
    allocated = books.figures("gpu_allocated_seconds_total", "model_name")
    assert pytest.approx(32.0, rel=1e-9) == sum(allocated.values())
    assert {
        (f"team-{n}",): pytest.approx(32.0 * mig_fraction(profile, gpu)) for n, profile in enumerate(profiles)
    } == allocated
    assert pytest.approx(0.032, rel=1e-9) == sum(
        value for (basis, _), value in books.figures("cost_total", "basis", "team").items() if basis == "allocation"
    )


def test_partly_used_gpu_is_covered_by_slice_prices() -> None:
    """Two 3g make six sevenths of a GPU: half of its price for each is the way to the whole."""
    fraction = mig_fraction("3g.40gb", "NVIDIA H100 80GB HBM3")
    by_slices, by_price = Prices(gpu_hour=3.0), Prices(gpu_hour=3.0, gpus=(GpuPrice("H100", 3.0, {"3g.40gb": 1.5}),))
    assert pytest.approx(18 / 7) == 2 * by_slices.per_hour("NVIDIA H100 80GB HBM3", fraction, "3g.40gb")
    assert pytest.approx(3.0) == 2 * by_price.per_hour("NVIDIA H100 80GB HBM3", fraction, "3g.40gb")


def test_the_time_of_a_slice_is_its_teams(tmp_path: Path) -> None:
    """The chain of compose.mig.yml: TEAM_A_MIG -> engines[].gpus -> the instance of that UUID -> seconds of team-a."""
    gpu = divided("h100-mig")
    named = {team: gpu.instances[n].mig_uuid or "" for team, n in (("team-a", 2), ("team-b", 0))}
    text = slices.filled(
        (DEPLOY / "mig/sidecar.yaml").read_text(), {"TEAM_A_MIG": named["team-a"], "TEAM_B_MIG": named["team-b"]}
    )
    engines = config.parse(text, SidecarConfig, "sidecar.yaml").engines
    books = Books({engine.name: engine.gpus for engine in engines})
    for _ in range(3):
        books.accounts.on_gpus([gpu], books.now)
        for engine in engines:
            books.look(
                view(model=engine.name.removeprefix("vllm-")), engine.name, 7.0 if engine.name == "vllm-team-a" else 0.0
            )
    allocated = books.figures("gpu_allocated_seconds_total", "model_name", "uuid")
    assert pytest.approx(14 / 7) == allocated["team-a", named["team-a"]]
    assert pytest.approx(14 * 3 / 7) == allocated["team-b", named["team-b"]]
    assert {"__none__"} == {model_name for model_name, uuid in allocated if uuid not in named.values()}, (
        "the slices of nobody are on the bill as well"
    )
