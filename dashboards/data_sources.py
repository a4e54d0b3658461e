"""Prometheus data sources of a Grafana, and their settings that would leave dashboards empty."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from alerts.registry import ALERTS
from dashboards.grafana_client import GrafanaClient, GrafanaTrouble
from exporters.catalogue import promql, sidecar, vllm
from exporters.text import parse_duration

ASSUMED_INTERVAL_S = 15.0  # what Grafana takes a data source without timeInterval to scrape at


def interval_s(series: Iterable[Mapping[str, Any]]) -> float | None:
    """The scrape interval in seconds that samples of a range vector show: the median distance; None below two samples a
    series."""
    steps = []
    for one in series:
        times = [float(at) for at, _ in one.get("values", ())]
        steps += [later - earlier for earlier, later in pairwise(times)]
    return statistics.median(steps) if steps else None


def duration_s(text: str) -> float | None:
    """Seconds of a data source's interval, which may be written as a floor: >30s. None for what is no duration, such as
    a variable."""
    try:
        return parse_duration(text.strip().removeprefix(">"))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class DataSource:
    """interval_s: what Grafana believes this Prometheus scrapes at; None where its setting cannot be read as a
    duration."""

    uid: str
    name: str
    interval_s: float | None
    default: bool = False


def data_sources(grafana: GrafanaClient) -> list[DataSource]:
    """Return the data sources of type Prometheus. An Editor may not list them, but the settings that every page loads
    name them too."""
    answer = grafana.ask("GET", "/api/datasources")
    found = answer.body if isinstance(answer.body, list) else None
    if found is None:
        settings = grafana.ask("GET", "/api/frontend/settings").data
        default = settings.get("defaultDatasource")
        found = [
            {"name": name, **one, "isDefault": name == default}
            for name, one in (settings.get("datasources") or {}).items()
        ]
    return [
        DataSource(
            str(one["uid"]),
            str(one.get("name", one["uid"])),
            _believed(one.get("jsonData") or {}),
            bool(one.get("isDefault")),
        )
        for one in found
        if isinstance(one, dict) and one.get("type") == "prometheus" and one.get("uid")
    ]


def _believed(settings: Mapping[str, Any]) -> float | None:
    interval = str(settings.get("timeInterval") or "")
    return duration_s(interval) if interval else ASSUMED_INTERVAL_S


def choose(sources: Sequence[DataSource], named: str | None) -> DataSource | None:
    """The one with this uid or name; without a name the default, else the first. Raises GrafanaTrouble for a name that
    nobody has."""
    if named is None:
        return next((one for one in sources if one.default), sources[0] if sources else None)
    for one in sources:
        if named in (one.uid, one.name):
            return one
    there = ", ".join(one.name for one in sources) or "none that we may see"
    raise GrafanaTrouble(f"no Prometheus data source is called {named}; there are: {there}")


class _NotChecked(Exception):
    """Reason why a data source was not checked."""


def look(grafana: GrafanaClient, source: DataSource | None, engine_only: bool = False) -> list[str]:
    """Return what would leave pushed dashboards empty, as sentences. Never raises for what it cannot find out."""
    if source is None:
        return [
            (
                "no Prometheus data source here, or none that we may see: the boards stay empty until one is added"
                " under Connections > Data sources"
            )
        ]
    questions = {
        "whether vLLM's series are there and timeInterval fits": _engines,
        "whether our rules are loaded": _rules,
    }
    if not engine_only:
        questions["whether the sidecar's series are there"] = _sidecar
    warnings: list[str] = []
    for whether, question in questions.items():
        try:
            warnings += filter(None, [question(grafana, source)])
        except _NotChecked as why:
            warnings.append(f"could not check {whether}: {why}")
    return warnings


def _engines(grafana: GrafanaClient, source: DataSource) -> str | None:
    series = (
        _prometheus(grafana, source, "query", query=f"{promql.series(vllm.NUM_REQUESTS_RUNNING)}[10m]").get("result")
        or []
    )
    if not series:
        return (
            f"{source.name} has no series of vLLM in the last ten minutes: the boards stay empty until it scrapes an"
            " engine's /metrics"
        )
    real_s = interval_s(series)
    if real_s is None or source.interval_s is None:
        raise _NotChecked("too few samples yet" if real_s is None else "its timeInterval is no duration")
    if abs(real_s - source.interval_s) <= 0.1 * real_s:
        return None
    harm = "panels are coarser than they could be, as $__rate_interval is longer than it must be"
    if source.interval_s < real_s:
        harm = "panels with rates can stay empty, as $__rate_interval need not hold two samples"
    real, believed = f"{real_s:.0f}s" if real_s >= 1 else f"{real_s:g}s", f"{source.interval_s:g}s"
    return (
        f"{source.name} takes vLLM to be scraped every {believed}, but it is every {real}: {harm}; set its timeInterval"
        f" to {real}"
    )


def _rules(grafana: GrafanaClient, source: DataSource) -> str | None:
    groups = _prometheus(grafana, source, "rules", type="alert").get("groups") or []
    loaded = {rule.get("name") for group in groups for rule in group.get("rules") or ()}
    missing = [alert.name for alert in ALERTS if alert.name not in loaded]
    if not missing:
        return None
    which = (
        f"none of our {len(ALERTS)} alerts"
        if len(missing) == len(ALERTS)
        else f"not all of our alerts (missing: {', '.join(missing)})"
    )
    return (
        f"{source.name} has {which}: name the files of alerts/prometheus in rule_files of prometheus.yml and reload it"
    )


def _sidecar(grafana: GrafanaClient, source: DataSource) -> str | None:
    if _prometheus(grafana, source, "query", query=f"count({promql.series(sidecar.SIDECAR_INFO)})").get("result"):
        return None
    return (
        f"{source.name} has no series of the sidecar: panels on requests, teams and GPUs stay empty; "
        "run vllm-watch sidecar and scrape it, or push what the engine alone can fill with --profile engine"
    )


def _prometheus(grafana: GrafanaClient, source: DataSource, endpoint: str, **query: str) -> dict[str, Any]:
    """data of an answer of Prometheus, asked through Grafana. Raises _NotChecked."""
    try:
        answer = grafana.ask(
            "GET", f"/api/datasources/proxy/uid/{quote(source.uid, safe='')}/api/v1/{endpoint}", **query
        )
    except GrafanaTrouble as error:
        raise _NotChecked(str(error)) from error
    data = answer.data.get("data")
    if answer.status == 403:
        raise _NotChecked("the service account lacks the permission datasources:query")
    if answer.status != 200 or answer.data.get("status") != "success" or not isinstance(data, dict):
        said = answer.data.get("error") or answer.says
        raise _NotChecked(f"{source.name} answers {answer.status} to {endpoint}{f' ({said})' if said else ''}")
    return data
