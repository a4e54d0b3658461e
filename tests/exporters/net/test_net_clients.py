"""The clients of Prometheus and Alertmanager, against the real servers."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporters.net.alertmanager import firing_alerts
from exporters.net.prometheus import Prometheus, PrometheusError, address
from stack.lab import headlines
from tests.support.wait import eventually, until

RULES = """
groups:
  - name: test
    interval: 200ms
    rules:
      - {alert: Always, expr: vector(1), labels: {team: a}}
      - {alert: Soon, expr: vector(1), for: 1h}
"""
CONFIG = """
global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 200ms}
rule_files: [rules.yml]
alerting: {alertmanagers: [{static_configs: [{targets: ["127.0.0.1:%d"]}]}]}
scrape_configs:
  - {job_name: itself, static_configs: [{targets: ["127.0.0.1:%d"]}]}
  - {job_name: nobody, static_configs: [{targets: ["127.0.0.1:%d"]}]}
"""


def _read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def servers(part, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory):
    """A Prometheus with a rule that fires and one that is pending, and its Alertmanager; their addresses."""
    folder: Path = tmp_path_factory.mktemp("servers")
    prometheus, alertmanager = free_port(), free_port()
    (folder / "rules.yml").write_text(RULES)
    (folder / "prometheus.yml").write_text(CONFIG % (alertmanager, prometheus, free_port()))
    (folder / "alertmanager.yml").write_text("{route: {receiver: none}, receivers: [{name: none}]}")
    commands = (
        [
            part("prometheus").path,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            "--web.enable-admin-api",
            "--rules.alert.resend-delay=5s",  # the alert expires after four of them
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ],
        [
            part("alertmanager").path,
            f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/am",
            "--cluster.listen-address=",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
        ],
    )
    with (folder / "log").open("w") as log:
        running = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) for command in commands]
    urls = f"http://127.0.0.1:{prometheus}", f"http://127.0.0.1:{alertmanager}"
    try:
        eventually(lambda: _read(f"{urls[1]}/api/v2/alerts"), what="an alert at Alertmanager")
        eventually(
            lambda: len(_read(f"{urls[0]}/api/v1/targets")["data"]["activeTargets"]) == 2,
            what="both targets at Prometheus",
        )
        yield urls
    finally:
        for one in running:
            one.terminate()
            one.wait(20)


@pytest.mark.prometheus
async def test_values_targets_and_alerts_come_from_a_real_prometheus(servers):
    async with Prometheus(address(servers[0])) as prometheus:
        assert 3.0 == await prometheus.value("vector(3)")
        assert None is await prometheus.value("vector(0) / 0")
        assert None is await prometheus.value("no_such_series")
        assert None is await prometheus.value("not PromQL (")
        assert {"itself", "nobody"} == {target.labels["job"] for target in await prometheus.targets()}
        states = {alert.labels["alertname"]: alert.state for alert in await prometheus.alerts()}
        assert {"Always": "firing", "Soon": "pending"} == states


@pytest.mark.prometheus
async def test_series_can_be_deleted_where_the_admin_api_is_on(servers):
    async with Prometheus(address(servers[0])) as prometheus:
        then = await until(lambda: prometheus.value('timestamp(up{job="nobody"})'), what="a scrape of nobody")
        assert 1 == len((await prometheus.as_of('up{job="nobody"}', then)).series)
        assert await prometheus.delete_series('{job="nobody"}')
        assert () == tuple((await prometheus.as_of('up{job="nobody"}', then)).series)


@pytest.mark.prometheus
async def test_alerts_are_read_from_a_real_alertmanager_all_or_by_name(servers):
    (alert,) = await firing_alerts(servers[1])
    assert ("Always", "a", False) == (alert.name, alert.labels["team"], alert.is_muted)
    assert [alert] == await firing_alerts(servers[1], name="Always")
    assert [] == await firing_alerts(servers[1], name="Never")
    assert ["Always"] == await headlines.firing(servers[1])


@pytest.mark.prometheus
async def test_the_lab_reads_its_headlines_through_the_same_client(servers):
    async def scraped() -> bool:
        found = await headlines.targets(servers[0])
        return found is not None and found == {"itself": True, "nobody": False}

    await until(scraped, "a scrape of one target, and none of the other")
    assert dict.fromkeys(each.name for each in headlines.HEADLINES) == await headlines.read(servers[0])


async def test_a_server_that_is_down_is_said_and_the_lab_goes_on(free_port: Callable[[], int]):
    url = f"http://127.0.0.1:{free_port()}"
    async with Prometheus(address(url)) as prometheus:
        with pytest.raises(PrometheusError, match="does not answer"):
            await prometheus.targets()
    with pytest.raises(OSError, match=f"Alertmanager at {url} .*--alertmanager"):
        await firing_alerts(url)
    assert (None, None) == (await headlines.targets(url), await headlines.firing(url))
    assert {None} == set((await headlines.read(url)).values())
