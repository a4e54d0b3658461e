"""Table of all commands of `vllm-watch`, and the groups of `--help`. One module for each topic, imported only when it
is meant: a sidecar or gateway that runs for months does not carry the libraries of the boards. Only this folder
imports click."""

from __future__ import annotations

import importlib

import click

from stack.root import version

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


# Commands by what they are for, in the order of --help.
GROUPS: dict[str, tuple[Later, ...]] = {
    "Observe": (
        Later("metrics", "metrics:metrics", "Explain, check and compare vLLM metrics."),
        Later("dashboards", "dashboards:dashboards", "Export dashboards, or push them to Grafana."),
        Later("alerts", "alerts:alerts_group", "Export, list and derive alert rules."),
        Later("board", "board:board_command", "Serve the dashboards as web pages, without Grafana."),
        Later("sidecar", "sidecar:sidecar", "Run the exporter that joins request log, engine and GPU."),
        Later("ship", "ship:ship", "Ship request logs into a data set of Parquet segments."),
        Later("events", "events:events_command", "List configuration changes and other events."),
        Later("requests", "requests:requests_command", "Find, group and explain requests."),
    ),
    "Respond": (
        Later("runbook", "runbook:runbook_command", "Show the runbook of an alert, filled with live values."),
        Later("doctor", "doctor:doctor_command", "Find the bottleneck of a running engine."),
        Later("annotate", "events:annotate_command", "Record a configuration change for dashboards and alerts."),
    ),
    "Serve": (
        Later("gateway", "gateway:gateway", "Run the gateway: auth, admission, request log."),
        Later("kubernetes", "kubernetes:kubernetes", "Export the stack as Kubernetes manifests."),
        Later("canary", "canary:canary_command", "Compare a canary with other engines; raise or stop it."),
        Later("secrets", "deploy:secrets", "Print the passwords and keys of the compose stack."),
    ),
    "Measure": (
        Later("bench", "bench:bench", "Run a workload against an engine and measure it."),
        Later("tune", "tuning:tune_command", "Run an experiment: compare engine configurations."),
        Later("compare", "tuning:compare_command", "Compare two benchmark runs or live periods."),
        Later("golden", "golden:golden", "Record what an engine computes, and check it later."),
        Later("report", "tuning:report_command", "Write a report of a benchmark or an experiment."),
    ),
    "Plan": (
        Later("capacity", "capacity:capacity_command", "Compute KV-cache capacity, GPUs and limits."),
        Later("cost", "cost:cost_command", "Report GPU hours, energy, tokens and cost per team."),
    ),
    "Try": (
        Later("lab", "lab:lab", "Run the whole stack on this machine's CPU."),
        Later("drill", "drill:drill_command", "Inject a fault and check that its alert fires."),
    ),
}
COMMANDS = tuple(command for commands in GROUPS.values() for command in commands)
DEVELOPMENT = (
    Later("lint", "lint:lint", "Check rules, dashboards and runbooks.", hidden=True),
    Later("render", "render:render", "Regenerate dashboards, rules and reference pages.", hidden=True),
)


class Listing(click.Group):
    """Group whose commands are listed by purpose, and imported when they are called."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(str(command.name), str(command.help)) for command in commands])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.real() if isinstance(command, Later) else command, rest


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
