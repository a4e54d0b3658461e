"""`vllm-watch alerts`: list, export and derive rules, receivers and thresholds."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from alerts import derive, derived_text, managed_files, recorded_use, routing
from alerts import export as alerts
from exporters.catalogue import exposition_parser
from exporters.net.prometheus import address_from
from stack.bench import result
from stack.bench.load_curve import load_curves
from stack.capacity.worksheet import read as read_worksheet
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors, say_files
from stack.cli.options import (
    DASHBOARD_BASE,
    HTTP_CONFIG,
    PROMETHEUS_URL,
    RUNBOOK_BASE,
    SLO,
    THRESHOLDS,
    TOKEN_FILE,
    USER_FILE,
    duration,
)
from stack.cli.scraped import page_of
from stack.terminal import output_width


@click.group("alerts")
def alerts_group() -> None:
    """Export, list and derive alert rules."""


@alerts_group.command("export")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@RUNBOOK_BASE
@DASHBOARD_BASE
@THRESHOLDS
@SLO
@click.option(
    "--receiver",
    type=click.Choice(list(routing.RECEIVERS)),
    default="none",
    show_default=True,
    help="Receiver of notifications; none: do not notify.",
)
@click.option("--deadman", is_flag=True, help="Send VLLMWatchdog to a dead man's switch service.")
@click.option(
    "--secrets",
    default=routing.SECRETS,
    show_default=True,
    metavar="DIR",
    help="Folder of secret files, as Alertmanager sees it.",
)
@click.option("--force", is_flag=True, help="Overwrite files that vllm-watch did not write, or that were edited.")
@AS_JSON
def alerts_export(
    out: Path,
    runbook_base: str | None,
    dashboard_base: str | None,
    thresholds: Path | None,
    slo: Path | None,
    receiver: str,
    deadman: bool,
    secrets: str,
    force: bool,
    as_json: bool,
) -> None:
    """Export rules, Alertmanager configuration and thresholds.

    \b
    Example:  vllm-watch alerts export --out rules --runbook-base https://wiki.example.org/vllm --receiver slack
    """
    with mistakes_as_errors():
        links = alerts.links(runbook_base, dashboard_base)
        wanted = alerts.AlertOptions(thresholds, slo, links, receiver, secrets, deadman)
        warned = [*alerts.warnings(links), *alerts.without_page(wanted.objectives)]
        written, older = alerts.write(out, wanted, force)
        steps = list(alerts.next_steps(out, wanted))
    say_files(written, older, warned, steps, as_json)


@alerts_group.command("list")
@THRESHOLDS
@AS_JSON
def alerts_list(thresholds: Path | None, as_json: bool) -> None:
    """List alerts and the thresholds that can be changed.

    A changed threshold goes into a file for --thresholds.

    \b
    Example:  vllm-watch alerts list
    """
    with mistakes_as_errors():
        settings = alerts.AlertOptions(thresholds).settings
    found, numbers = list(alerts.rows(settings)), list(alerts.number_rows(settings))
    if as_json:
        click.echo(json.dumps({"alerts": found, "thresholds": numbers}, indent=1, ensure_ascii=False))
        return
    table = Table("alert", "severity", "for", "threshold", "summary", "panel")
    for row in found:
        number = f"{used['name']} = {used['value']:.12g}" if (used := row["threshold"]) else ""
        table.add_row(row["name"], row["severity"], row["for"], number, row["summary"], row["panel"])
    more = Table("threshold", "value", "default", "why")
    for own in numbers:
        more.add_row(own["name"], f"{own['value']:.12g} ({own['shown']})", f"{own['default']:.12g}", own["why"])
    console = Console(width=output_width(200))
    console.print(table, more)


@alerts_group.command("slo")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--page",
    "target",
    metavar="URL|FILE",
    help="vLLM server or saved exposition: check that every latency bound is a bucket.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write slo.yaml to this folder instead of printing it.",
)
@RUNBOOK_BASE
@DASHBOARD_BASE
@click.option("--force", is_flag=True, help="Overwrite a slo.yaml that vllm-watch did not write, or that was edited.")
@HTTP_CONFIG
@AS_JSON
def alerts_slo(
    file: Path | None,
    target: str | None,
    out: Path | None,
    runbook_base: str | None,
    dashboard_base: str | None,
    force: bool,
    http_config: Path | None,
    as_json: bool,
) -> None:
    """Export burn-rate alerts for your own objectives.

    FILE is YAML in the form of objectives.yml, which `alerts export` writes; without FILE the default ones are used.

    \b
    Example:  vllm-watch alerts slo --page http://127.0.0.1:8000
    """
    file = file or alerts.SHIPPED_OBJECTIVES
    with mistakes_as_errors():
        objectives, links = alerts.objectives(file), alerts.links(runbook_base, dashboard_base)
        if target and (
            missed := list(alerts.misses(objectives, exposition_parser.parse(page_of(target, http_config)[0]), target))
        ):
            raise ValueError(f"{file}: {'; '.join(missed)}")
        warned = [*alerts.warnings(links), *alerts.without_page(objectives)]
        groups = alerts.slo_groups(objectives, links)
        printed = alerts.slo_file(groups)
        if out:
            written = managed_files.write(out, printed, alerts.foreign, force)
    if out:
        whole = (
            "it stands on its own; with all the other rules, in place of the default objectives: vllm-watch alerts"
            f" export --slo {file}"
        )
        say_files(written, [], warned, [f"promtool check rules {out}/slo.yaml", whole], as_json)
        return
    for warning in warned:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(
            json.dumps(
                {"groups": [group.as_dict() for group in groups], "warnings": warned}, indent=1, ensure_ascii=False
            )
        )
    else:
        click.echo(printed["slo.yaml"].rstrip())


@alerts_group.command("derive")
@click.option(
    "--prometheus",
    "url",
    required=True,
    metavar="URL",
    envvar=PROMETHEUS_URL,
    show_envvar=True,
    help="Prometheus that scrapes the engines.",
)
@click.option(
    "--window",
    "window_s",
    default="7d",
    show_default=True,
    metavar="TIME",
    callback=duration,
    help="Time range to read.",
)
@click.option(
    "--bench",
    "bench_folder",
    type=click.Path(path_type=Path),
    help="Saved bench with several loads, to find the engine's saturation point.",
)
@click.option("--variant", metavar="NAME", help="Deployed variant, if the bench has several.")
@click.option(
    "--worksheet",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Capacity worksheet whose targets to use.  [default: the objectives]",
)
@click.option("--model", metavar="NAME", help="Use only this model.  [default: all; the strictest value wins]")
@THRESHOLDS
@SLO
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the thresholds file instead of printing it."
)
@click.option("--force", is_flag=True, help="Overwrite a file that vllm-watch did not write, or that was edited.")
@TOKEN_FILE
@USER_FILE
@HTTP_CONFIG
@AS_JSON
def alerts_derive(
    url: str,
    window_s: float,
    bench_folder: Path | None,
    variant: str | None,
    worksheet: Path | None,
    model: str | None,
    thresholds: Path | None,
    slo: Path | None,
    out: Path | None,
    force: bool,
    token_file: Path | None,
    user_file: Path | None,
    http_config: Path | None,
    as_json: bool,
) -> None:
    """Derive alert thresholds from recorded data.

    Find this deployment's own thresholds in what was recorded of it, each with its reason; where too little is
    known, the default stays.

    queue_length by Little's law, kv_cache_usage by where preemptions begin, ttft_p95 and inter_token_p95 by the knee of
    a bench.

    \b
    Example:  vllm-watch alerts derive --prometheus http://127.0.0.1:9090 --out thresholds.yml
    """
    if variant and not bench_folder:
        raise click.UsageError("--variant belongs to --bench")
    with mistakes_as_errors():
        settings = alerts.AlertOptions(thresholds).settings
        sheet = read_worksheet(worksheet) if worksheet else None
        promised = (sheet.ttft_p95, sheet.itl_p95) if sheet else (None, None)
        aims = derive.targets(alerts.objectives(slo or alerts.SHIPPED_OBJECTIVES), *promised)
        bench = load_curves(result.read(bench_folder), variant) if bench_folder else None
        asked = asyncio.run(
            recorded_use.ask(
                address_from(url, token_file, user_file, http_config), settings, window_s, time.time(), model
            )
        )
        found = derive.derive(asked, settings, aims, bench)
        text = derived_text.overlay(asked, settings, found)
        changed = (
            managed_files.write(
                out.parent,
                {out.name: managed_files.marked(text, "vllm-watch alerts derive")},
                managed_files.changed_since,
                force,
            )
            if out
            else {}
        )
    if as_json:
        click.echo(
            json_text(
                derived_text.as_json(asked, found)
                | {"files": [{"path": str(path), "changed": new} for path, new in changed.items()]}
            )
        )
        return
    if not out:
        click.echo(text, nl=False)
        return
    for each in found:
        is_now = (
            f"is now {each.threshold.shown}, was {each.before.shown}"
            if each.value is not None
            else f"stays at {each.before.shown}"
        )
        click.echo(f"{each.before.name} {is_now}. {each.why}")
    say_files(changed, [], [], [f"vllm-watch alerts export --out rules --thresholds {out}"], as_json=False)
