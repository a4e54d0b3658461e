"""`vllm-watch capacity`: users, GPU and cost of a deployment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exporters.net.http_client import HttpClientConfig
from stack.capacity import command, tables, verify
from stack.capacity.fit import NO_WAY, DoesNotFit, gib
from stack.capacity.gpus import GIB
from stack.cli.common import AS_JSON, json_text, mistakes_as_errors
from stack.cli.options import HTTP_CONFIG
from stack.cli.struct_options import options_of
from stack.gateway.config import read_key
from stack.terminal import output_width

PIPED = 150  # columns where nobody says how many there are
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("capacity")
@options_of(command.CapacityOptions, "asked")
@click.option("--live", "url", metavar="URL", help="URL of a running engine to compare with.")
@click.option("--engine-log", type=FILE, help="With --live: start-up log of the engine.")
@click.option("--api-key-file", type=FILE, help="With --live: file with the engine's API key.")
@HTTP_CONFIG
@click.option("--fill", is_flag=True, help="Print only the completed worksheet.")
@AS_JSON
def capacity_command(
    asked: command.CapacityOptions,
    fill: bool,
    as_json: bool,
    url: str | None,
    engine_log: Path | None,
    api_key_file: Path | None,
    http_config: Path | None,
) -> None:
    """Compute KV-cache capacity, GPUs and limits.

    --log also reads public traces: Azure LLM inference, BurstGPT and Mooncake.

    Exit 1 where the model fits none of the GPUs, or where only its weights are known.

    \b
    Example:  vllm-watch capacity --model config.json --gpu H200 --rate 8 --traffic worksheet.yaml
    """
    if fill and as_json:
        raise click.UsageError("choose --fill or --json")
    if (engine_log or api_key_file or http_config) and not url:
        raise click.UsageError("--engine-log, --api-key-file and --http-config belong to --live URL")
    with mistakes_as_errors():
        found = command.study(asked, somewhere=not url)
        looked = (
            _looked(found, url, engine_log, api_key_file, http_config)
            if url and isinstance(found, command.Study)
            else None
        )
    if fill and (isinstance(found, command.WeightsOnly) or len(found.plans) != 1):
        raise click.UsageError("--fill takes one --gpu that the model fits, and its config.json")
    if as_json:
        click.echo(json_text(tables.as_json(found) | ({"live": _live(looked)} if looked else {})))
    elif isinstance(found, command.WeightsOnly):
        _draw_weights(found)
    elif fill:
        click.echo(tables.filled(found), nl=False)
    else:
        _draw(found)
        if looked:
            _draw_live(looked)
    raise SystemExit(1 if isinstance(found, command.WeightsOnly) or not (found.plans or looked) else 0)


def _looked(
    found: command.Study, url: str, engine_log: Path | None, api_key_file: Path | None, http_config: Path | None
) -> verify.Verifier:
    log = engine_log.read_text(encoding="utf-8", errors="replace") if engine_log else None
    key = read_key(api_key_file, "--api-key-file") if api_key_file else None
    expected = found.plans[0].kv_bytes if found.plans else None
    return asyncio.run(
        verify.verify(
            url, found.shape, found.serving, log, key, expected, HttpClientConfig(http_config) if http_config else None
        )
    )


def _live(looked: verify.Verifier) -> dict[str, Any]:
    head = ("name", "unit", "predicted", "reported", "difference", "source")
    figures = [
        dict(zip(head, (f.name, f.unit, f.predicted, f.reported, f.difference, f.source), strict=True))
        for f in looked.figures
    ]
    in_use = [{"name": f.name, "unit": f.unit, "reported": f.reported, "source": f.source} for f in looked.in_use]
    return {
        "model": looked.model,
        "version": looked.version,
        "figures": figures,
        "in_use": in_use,
        "said": list(looked.said),
    }


def _draw_live(looked: verify.Verifier) -> None:
    rows: list[tuple[str, ...]] = [
        (
            f.name,
            *(_shown(value, f.unit) for value in (f.predicted, f.reported)),
            "" if f.difference is None else f"{f.difference:+.2%}",
            f.source,
        )
        for f in (*looked.figures, *looked.in_use)
    ]
    title = f"{looked.model}, vLLM {looked.version or 'of an unknown release'}: reckoned, and as it says itself"
    console = Console(width=output_width(PIPED), highlight=False)
    _table(console, tables.CapacityTable(title, ("figure", "reckoned", "reported", "difference", "source"), rows))
    for sentence in looked.said:
        click.echo(sentence)


def _shown(value: float | None, unit: str) -> str:
    """A figure of an engine with its unit, "" where it is not known."""
    if value is None:
        return ""
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes":
        return gib(value) if value >= GIB / 100 else f"{value:,.6g} bytes"
    return f"{value:,.2f}".removesuffix(".00")


def _draw(found: command.Study) -> None:
    console = Console(width=output_width(PIPED), highlight=False)
    alone = len(found.plans) == 1 and not found.refused
    compared = [tables.comparison(found)] if found.plans else []
    if not alone and (best := tables.conclusion(found)):
        click.echo(best)
    for sheet in tables.sheets(found.plans[0], found.disaggregated) if alone else compared:
        _table(console, sheet)
    if alone:
        click.echo(
            f"\n{found.plans[0].command}\n\n# for teams.yaml; vllm-watch gateway check says what it"
            f" means\n{found.plans[0].gateway.yaml}"
        )
    for _, error in found.refused:
        click.echo(f"refused: {getattr(error, 'what', error)}")
        if isinstance(error, DoesNotFit):
            for way in error.ways or (NO_WAY,):
                click.echo(f"    what fits: {way}")
    for note in dict.fromkeys((*found.notes, *(note for each in found.plans for note in each.notes))):
        click.echo(f"note: {note}")


def _draw_weights(found: command.WeightsOnly) -> None:
    assumed = ", assumed" if found.assumed else ""
    click.echo(
        f"weights: {found.parameters / 1e9:.4g}e9 parameters x {found.weight_bytes / found.parameters:g} bytes"
        f" ({found.dtype}{assumed})"
    )
    click.echo(f"         {found.weight_bytes / 1e9:,.1f} GB = {gib(found.weight_bytes)}")
    for name, usable in found.gpus.items():
        verdict = "smaller, so the rest may fit" if found.weight_bytes < usable else "too much for it"
        click.echo(f"{name}: vLLM may use {gib(usable)}; the weights alone are {verdict}")
    click.echo(f"refused: {found.refusal}")


def _table(console: Console, sheet: tables.CapacityTable) -> None:
    table = Table(*sheet.head, title=sheet.title, title_justify="left")
    for row in sheet.rows:
        table.add_row(*map(escape, row))
    console.print(table)
