"""stack/deploy/watch.py and the files of compose.watch.yml, compared with those of docker-compose.yml."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from exporters.catalogue import promql
from exporters.catalogue.metric import EngineRole
from exporters.sidecar_config import SidecarConfig
from stack import config
from stack.config import BadConfig
from stack.deploy import init, watch
from stack.deploy.watch import WatchedEngine, parse_engine, parse_engines
from tests.support.fake_engine import FakeEngine

DEPLOY = Path(__file__).parents[3] / "stack/deploy"
HOST = watch.HOST


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("http://localhost:8000", WatchedEngine("localhost:8000", "http", f"{HOST}:8000")),
        ("http://127.0.0.1:8000/", WatchedEngine("127.0.0.1:8000", "http", f"{HOST}:8000")),
        ("http://[::1]:8000", WatchedEngine("[::1]:8000", "http", f"{HOST}:8000")),
        ("https://gpu-1.example.org", WatchedEngine("gpu-1.example.org:443", "https", "gpu-1.example.org:443")),
        ("http://[2001:db8::1]:8000", WatchedEngine("[2001:db8::1]:8000", "http", "[2001:db8::1]:8000")),
        ("http://localhost.example.org:1", WatchedEngine("localhost.example.org:1", "http", "localhost.example.org:1")),
    ],
)
def test_loopback_addresses_mean_the_host(text: str, engine: WatchedEngine) -> None:
    assert engine == parse_engine(text)


@pytest.mark.parametrize(
    "text",
    ["localhost:8000", "ftp://a:1", "http://a:8000/v1", "http://a:0", "http://a:99999", "http://", "http://a:1?x", "a"],
)
def test_invalid_url_is_one_sentence(text: str) -> None:
    with pytest.raises(BadConfig, match=rf"^VLLM_WATCH_ENGINE_URL: '{re.escape(text)}' .*http://localhost:8000$"):
        parse_engine(text)


def test_password_in_url_is_not_printed() -> None:
    with pytest.raises(BadConfig, match="'http://a:8000'") as caught:
        parse_engine("http://me:hidden@a:8000")
    assert "hidden" not in str(caught.value)


def test_each_engine_is_listed_once() -> None:
    """Under the name that was written first."""
    assert ["localhost:8000", "b:1", "c:2"] == [
        engine.name for engine in parse_engines(" http://localhost:8000, http://b:1\nhttp://127.0.0.1:8000 http://c:2 ")
    ]


def test_role_reaches_sidecar_and_prometheus(tmp_path: Path) -> None:
    """One place for both: where they differ, a pair counts its requests twice in one of them."""
    volumes = Volumes(tmp_path)
    assert 0 == volumes.start("prefill=http://p.invalid:1 decode=http://d.invalid:2 http://both.invalid:3")
    roles = {"p.invalid:1": EngineRole.PREFILL, "d.invalid:2": EngineRole.DECODE, "both.invalid:3": None}
    assert roles == {engine.name: engine.role for engine in config.load(volumes.sidecar, SidecarConfig).engines}
    labels = [target["labels"] for target in json.loads(volumes.targets.read_text())]
    assert roles == {each["instance"]: each.get(promql.ROLE) for each in labels}


def test_unknown_role_is_one_sentence() -> None:
    with pytest.raises(BadConfig, match=rf"^VLLM_WATCH_ENGINE_URL: 'both' .*{' or '.join(EngineRole)} "):
        parse_engine("both=http://a:1")


@pytest.mark.parametrize("value", ["", " , "])
def test_missing_url_is_one_sentence(value: str) -> None:
    with pytest.raises(BadConfig, match=r"^VLLM_WATCH_ENGINE_URL .*not set.*http://localhost:8000$"):
        parse_engines(value)


class Volumes:
    """Folders of the service init."""

    def __init__(self, root: Path) -> None:
        self.secrets, self.sidecar, self.targets = root / "secrets", root / "sidecar.yaml", root / "vllm.json"
        self.secrets.mkdir()

    def start(self, urls: str, template: Path = DEPLOY / "watch/sidecar.yaml") -> int:
        return watch.main({watch.VARIABLE: urls}, self.secrets, template, self.sidecar, self.targets)


def test_files_name_the_same_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also engines that do not answer, which the report names with the fix."""
    volumes = Volumes(tmp_path)
    assert 0 == volumes.start("http://localhost:1,https://vllm.invalid:2")
    sidecar = config.load(volumes.sidecar, SidecarConfig)
    assert {"localhost:1": f"http://{HOST}:1", "vllm.invalid:2": "https://vllm.invalid:2"} == {
        engine.name: engine.url for engine in sidecar.engines
    }
    assert [
        {"targets": [f"{HOST}:1"], "labels": {"__scheme__": "http", "instance": "localhost:1"}},
        {"targets": ["vllm.invalid:2"], "labels": {"__scheme__": "https", "instance": "vllm.invalid:2"}},
    ] == json.loads(volumes.targets.read_text())
    assert 0o644 == stat.S_IMODE(volumes.targets.stat().st_mode), "Prometheus runs as another user"
    here, there = capsys.readouterr().out.splitlines()
    assert here.startswith(f"localhost:1: http://{HOST}:1/metrics does not answer (")
    assert there.startswith("vllm.invalid:2: https://vllm.invalid:2/metrics does not answer (")
    assert ("0.0.0.0" in here, "0.0.0.0" in there) == (True, False), "how to bind is for engines of this host"  # noqa: S104
    assert here.endswith("without it")


def test_start_makes_the_password_and_no_key(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path)
    volumes.start("http://localhost:1")
    made = init.read(volumes.secrets)
    assert {} == made.keys
    assert len(made.grafana_password) >= 24
    volumes.start("http://localhost:2")
    assert made == init.read(volumes.secrets), "a second start keeps it"


def test_mistakes_change_no_file(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path)
    assert 1 == volumes.start("localhost")
    (tmp_path / "wrong.yaml").write_text("gpus: auto\n")
    assert 1 == volumes.start("http://localhost:1", tmp_path / "wrong.yaml")
    assert not volumes.sidecar.exists()
    assert not volumes.targets.exists()


async def serve(app: web.Application, port: int) -> web.AppRunner:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def test_answering_engine_is_named_with_its_version(free_port: Callable[[], int]) -> None:
    port = free_port()
    runner = await serve(FakeEngine().app(), port)
    try:
        said = await watch.describe(WatchedEngine("gpu:8000", "http", f"127.0.0.1:{port}"))
    finally:
        await runner.cleanup()
    assert said.startswith("gpu:8000: answers, vLLM ")


async def test_server_that_is_no_engine_is_named(free_port: Callable[[], int]) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="# TYPE up gauge\nup 1\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    port = free_port()
    runner = await serve(app, port)
    try:
        said = await watch.describe(WatchedEngine("gpu:8000", "http", f"127.0.0.1:{port}"))
    finally:
        await runner.cleanup()
    assert said.startswith(f"gpu:8000: http://127.0.0.1:{port}/metrics ")
    assert "no series" in said


def test_prometheus_differs_in_the_engines_only() -> None:
    """Gateway and collector are missing; the engines come from a file."""
    base, watching = (yaml.safe_load((DEPLOY / f"{d}prometheus/prometheus.yml").read_text()) for d in ("", "watch/"))
    jobs = {job["job_name"]: job for job in watching.pop("scrape_configs")}
    others = {job["job_name"]: job for job in base.pop("scrape_configs")}
    assert base == watching
    assert {"gateway", "otelcol"} == others.keys() - jobs.keys()
    files = jobs["vllm"].pop("file_sd_configs")
    others["vllm"].pop("static_configs")
    assert jobs == {name: others[name] for name in jobs}
    assert [{"files": [f"/etc/vllm-watch/targets/{watch.TARGETS.name}"]}] == files


def test_grafana_has_the_same_prometheus() -> None:
    base, watching = (
        yaml.safe_load((DEPLOY / file).read_text())
        for file in ("grafana/provisioning/datasources/datasources.yml", "watch/grafana/datasources.yml")
    )
    (prometheus,) = (source for source in base.pop("datasources") if source["type"] == "prometheus")
    prometheus["jsonData"].pop("exemplarTraceIdDestinations")
    assert [prometheus] == watching.pop("datasources")
    assert base == watching
