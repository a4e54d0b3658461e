"""List of all features by name, read from the code.

Invariant: a line leaves features.txt only in a commit whose changelog names it; see test_features.py."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

import click
from aiohttp import web
from msgspec import inspect

from alerts import registry, settings, slo, thresholds
from dashboards.boards import team
from dashboards.registry import BOARDS
from exporters import catalogue, ship_service, sidecar, sidecar_config, sidecar_listener
from exporters.accounting.prices import Prices
from exporters.dataset.ship_config import ShipConfig
from exporters.engine.liveness import Cause, EngineState
from exporters.engine.probe_endpoints import ENGINE_PROBES
from exporters.events import log as events
from exporters.net import http_client, listener_auth
from exporters.requests.record import Outcome, RequestRecord
from runbooks.page import pages
from stack.bench.workload import WorkloadFile
from stack.board import server as board
from stack.board.request_pages import RequestPages
from stack.capacity import worksheet
from stack.cli import Later, main, options
from stack.deploy.helm import values
from stack.gateway import config, handler, metrics, policy, proxy, reasons, routes
from stack.golden.prompts import PromptSet
from stack.request_source import RequestSourceOptions
from stack.tuning.experiment import Experiment

CONFIGS: Mapping[str, type] = {
    "gateway": config.GatewayConfig, "teams": policy.Policy, "sidecar": sidecar_config.SidecarConfig,
    "ship": ShipConfig, "prices": Prices, "slo": slo.Objectives, "thresholds": settings.Overrides,
    "workload": WorkloadFile, "experiment": Experiment, "worksheet": worksheet.Form, "golden": PromptSet,
    "web": listener_auth.WebConfig, "http": http_client.HttpConfig,
}  # fmt: skip
VOCABULARIES: Mapping[str, Iterable[str]] = {
    "outcome": get_args(Outcome), "reason": reasons.REASONS, "engine-state": EngineState, "engine-evidence": Cause,
    "event-kind": get_args(events.Kind),
}  # fmt: skip


def features() -> list[str]:
    """Return one line for each feature: its kind and its name."""
    kinds = (commands, environment, dashboards, alerts, series, endpoints, gateway_endpoints, keys, records)
    return sorted({line for kind in kinds for line in kind()})


def commands() -> Iterator[str]:
    """Yield the commands and groups with their options and arguments."""
    for path, command in _commands(main):
        if path:
            yield f"command {path}"
        for each in command.params:
            of = f"{path} ".lstrip()
            if isinstance(each, click.Argument):
                yield f"argument {of}{re.sub(r'[][.]', '', each.human_readable_name)}"
            else:
                yield from (f"option {of}{name}" for name in (*each.opts, *each.secondary_opts))


def environment() -> Iterator[str]:
    """Yield the variables that options and arguments read."""
    given = {each.envvar for _, command in _commands(main) for each in command.params if isinstance(each.envvar, str)}
    return (f"env {name}" for name in {*given, options.PROMETHEUS_URL, options.ALERTMANAGER_URL, options.ENGINE_URL})


def _commands(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    real = command.real() if isinstance(command, Later) else command
    yield path, real
    for name, inner in getattr(real, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}".lstrip())


def dashboards() -> Iterator[str]:
    """Yield the dashboards with their panels; that of a team under the name TEAM."""
    for each in (*BOARDS, team.dashboard("team")):
        slug = "team-TEAM" if each.team else each.slug
        yield f"dashboard {slug}"
        yield from (f"panel {slug}/{panel.slug}" for panel in each.panels)


def alerts() -> Iterator[str]:
    """Yield alerts, recorded series, thresholds, objectives and runbooks."""
    yield from (f"alert {alert.name}" for alert in registry.ALERTS)
    yield from (f"recording {recording.record}" for recording in registry.RECORDINGS)
    yield from (f"threshold {threshold.name}" for threshold in thresholds.ALL)
    yield from (f"objective {objective.name}" for objective in slo.default_objectives().objectives)
    yield from (f"runbook {page.name}" for page in pages())


def series() -> Iterator[str]:
    """Yield the series of our processes with their labels, and the known series of vLLM."""
    for metric in catalogue.OURS:
        yield f"metric {metric.name}"
        yield from (f"label {metric.name} {label}" for label in metric.labels)
    yield from (f"vllm-metric {one.name}" for one in (*catalogue.VLLM, *catalogue.RETIRED, *catalogue.BESIDE))


def endpoints() -> Iterator[str]:
    """Yield the routes of the servers that have a router. HEAD is left out: it is served wherever GET is."""
    requests = RequestPages(RequestSourceOptions(), None, time.time)
    servers: dict[str, web.Application] = {
        "sidecar": sidecar_listener.application(sidecar.Sidecar(sidecar_config.SidecarConfig(gpu="off"))),
        "ship": ship_service.ShipService._application(None),
        "board": board.application(board.DashboardServer(None, requests=requests)),
    }
    for server, application in servers.items():
        for route in application.router.routes():
            if route.resource is not None and route.method != "HEAD":
                yield f"endpoint {server} {route.method} {route.resource.canonical}"


def gateway_endpoints() -> Iterator[str]:
    """Yield the routes of the gateway, which has no router: its tables, and the paths that its handlers compare."""
    for path in (*_paths(proxy.Proxy._handled), *_paths(handler.RequestHandler._steps), *proxy._ENGINE_PAGES):
        yield f"endpoint gateway GET {path}"
    for path, route in routes.ROUTES.items():
        methods = () if route.refused else route.methods - {"HEAD", "OPTIONS"}
        yield from (f"endpoint gateway {method} {path}" for method in methods)
    yield from (f"endpoint gateway {method} /v1/{{path}}" for method in routes.READS - {"HEAD"})
    for path in (*_paths(metrics.GatewayMetrics.page), *ENGINE_PROBES):
        yield f"endpoint gateway-metrics GET {path}"


def _paths(function: Callable[..., Any]) -> list[str]:
    """Return the literals of a function that are paths."""
    return [one for one in function.__code__.co_consts if isinstance(one, str) and re.fullmatch(r"(/[-\w]+)+", one)]


def keys() -> Iterator[str]:
    """Yield the keys of all configuration files, and of the Helm chart's values."""
    for file, struct in CONFIGS.items():
        yield from (f"config {key}" for key in _below(inspect.type_info(struct), file))
    yield from (f"config helm.{row.path}" for row in values.table(defaultdict(dict), {}))


def _below(kind: inspect.Type, path: str) -> Iterator[str]:
    match kind:
        case inspect.StructType() | inspect.DataclassType():
            for field in kind.fields:
                yield f"{path}.{field.encode_name}"
                yield from _below(field.type, f"{path}.{field.encode_name}")
        case inspect.UnionType():
            yield from (key for one in kind.types for key in _below(one, path))
        case inspect.DictType():
            yield from _below(kind.value_type, f"{path}.*")
        case inspect.CollectionType():
            yield from _below(kind.item_type, f"{path}[]")


def records() -> Iterator[str]:
    """Yield the fields of the request log, and the words that fields and labels may have."""
    yield from (f"request-log {name}" for name in RequestRecord.__struct_fields__)
    yield from (f"{kind} {word}" for kind, words in VOCABULARIES.items() for word in words)
