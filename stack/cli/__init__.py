"""The command `vllm-watch`: options, one call, output. One module for each topic, imported only when it is meant: a
sidecar or gateway that runs for months does not carry the libraries of the boards. This folder is the one click
door."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import signal
from pathlib import Path

import click

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class Later(click.Command):
    """A command as the list of commands needs it; where: `module:name` of the real one, in this folder."""

    def __init__(self, name: str, where: str, line: str, *, hidden: bool = False) -> None:
        super().__init__(name, help=line, hidden=hidden)
        self.where = where

    def real(self) -> click.Command:
        """The command itself, with all that it imports."""
        module, _, name = self.where.partition(":")
        command: click.Command = getattr(importlib.import_module(f"stack.cli.{module}"), name)
        return command


COMMANDS = (
    Later("alerts", "alerts:alerts_group", "Alert rules, who is told of them, and the numbers behind them."),
    Later("annotate", "events:annotate_command", "Write down what was changed; boards and alerts show it."),
    Later("bench", "bench:bench", "Loads with known shapes against a running engine, measured as its clients see it."),
    Later(
        "board",
        "board:board_command",
        "The boards as a live page over any Prometheus, without Grafana; runbook pages are under /runbooks/.",
    ),
    Later(
        "capacity",
        "capacity:capacity_command",
        "How many users fit, on which GPU or slice, at what cost; flags and limits that follow.",
    ),
    Later(
        "compare",
        "tuning:compare_command",
        "What B does beside A: two saved benches, arms of one, or live traffic around an event or of two variants.",
    ),
    Later("cost", "cost:cost_command", "GPU hours, cost, energy and tokens of each team and model."),
    Later("dashboards", "dashboards:dashboards", "Our boards in a Grafana that is there already."),
    Later(
        "doctor",
        "doctor:doctor_command",
        "Which resource is the bottleneck, what says so, and which one lever to pull first.",
    ),
    Later(
        "drill",
        "drill:drill_command",
        "Break a real vLLM in a lab of its own, and see the alert arrive, and go when it is mended.",
    ),
    Later(
        "events",
        "events:events_command",
        "What was changed, restarted or noted, the newest last; regions with their end, open ones marked.",
    ),
    Later("gateway", "gateway:gateway", "The way in: who asks, how it went, one JSON line for each request."),
    Later("kubernetes", "kubernetes:kubernetes", "The stack as Kubernetes manifests, for kustomize, Argo CD and Flux."),
    Later("lab", "lab:lab", "A real vLLM on this machine's CPU, watched by the whole stack."),
    Later("metrics", "metrics:metrics", "What vLLM exposes, and whether a page or dashboard fits it."),
    Later("render", "render:render", "Write dashboards and rule files from their source, in place."),
    Later(
        "report",
        "tuning:report_command",
        "One page of a bench or an experiment, with everything in it; Markdown, CSV and JSON beside it.",
    ),
    Later(
        "runbook",
        "runbook:runbook_command",
        "What to do about an alert: its page, by name, by a part of it, or by words that it holds.",
    ),
    Later(
        "secrets",
        "deploy:secrets",
        "Print what the compose stack made at its first start: Grafana's password and a key for each team; with TLS the"
        " operator's too.",
    ),
    Later("sidecar", "sidecar:sidecar", "The exporter that joins request log, engine and GPU."),
    Later(
        "tune",
        "tuning:tune_command",
        "An experiment: one workload, configurations of an engine in turns, and what the change did.",
    ),
)


DEVELOPMENT = (
    Later(
        "lint",
        "lint:lint",
        "Check alerts, recording rules, dashboards and runbooks; with FILES, dashboards of others as JSON.",
        hidden=True,
    ),
)


class Listing(click.Group):
    """Lists and completes its commands from their one line, and imports the one that was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.real() if isinstance(command, Later) else command, rest


def version() -> str:
    """This release; 'unknown' where the code runs without having been installed."""
    try:
        return importlib.metadata.version("vllm-watch")
    except importlib.metadata.PackageNotFoundError:
        found = re.search(
            r'^version = "([^"]+)"', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.MULTILINE
        )
        return found[1] if found else "unknown"


@click.group(
    cls=Listing,
    commands=sorted((*COMMANDS, *DEVELOPMENT), key=lambda command: str(command.name)),
    context_settings=CONTEXT,
)
@click.version_option(version(), prog_name="vllm-watch")
def main() -> None:
    """The observability stack for vLLM.

    \b
    Example:  vllm-watch metrics check http://127.0.0.1:8000
    """
    # Whatever a command started must go with it, also when it is ended politely by another program. A shell that puts
    # it into the background leaves it deaf to SIGINT, and so to the SIGTERM that becomes one: hence the first line.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
