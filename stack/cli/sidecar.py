"""`vllm-watch sidecar`: serve, explain, backfill. The process that runs pays for every import, so what only another
command needs is imported by that one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import click

from exporters import process, sidecar_config, sidecar_listener
from exporters.sidecar import Sidecar
from stack import config
from stack.cli.common import UsageMistake, log_to_stderr, mistakes_as_errors
from stack.root import version


@click.group()
def sidecar() -> None:
    """Run the exporter that joins request log, engine and GPU."""


@sidecar.command("run")
@click.option(
    "--config",
    "path",
    required=True,
    type=click.Path(path_type=Path),
    help="Configuration file; see stack/deploy/sidecar.yaml.",
)
def sidecar_run(path: Path) -> None:
    """Serve /metrics, /-/healthy and /-/ready.

    \b
    Example:  vllm-watch sidecar run --config sidecar.yaml
    """
    log_to_stderr()
    with mistakes_as_errors():
        settings = config.sidecar(path).on(socket.gethostname())
        with process.runner(batches=True) as runner:
            runner.run(_serve(settings))


@sidecar.command("explain")
@click.argument("line", default="-")
@click.option(
    "--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="The sidecar's YAML, for its field_names."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each line.")
def sidecar_explain(line: str, path: Path | None, as_json: bool) -> None:
    """Explain how a request log line is counted.

    Print the fields of a LINE of a request log, the series that count it, or the reason why it is rejected.

    Without LINE, or with -, read standard input. Exit 1 if a line is rejected.

    \b
    Example:  vllm-watch sidecar explain '{"request_id": "r1", "model": "tiny", "e2e_ms": 48.7, "outcome": "ok"}'
    """
    from exporters.requests import explain

    with mistakes_as_errors():
        settings = config.sidecar(path) if path else sidecar_config.SidecarConfig()
    lines = (sys.stdin.buffer.read() if line == "-" else os.fsencode(line)).split(b"\n")
    explained = [
        explain.explain(each, settings.fields, sidecar_config.counting(settings)) for each in lines if each.strip()
    ]
    if not explained:
        raise UsageMistake("there is no line to explain")
    click.echo(
        "\n".join(json.dumps(one) for one in explained) if as_json else "\n\n".join(map(explain.as_text, explained))
    )
    raise SystemExit(1 if any(one["refused"] for one in explained) else 0)


@sidecar.command("backfill")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--data", metavar="LOCATION", help="Data set of `ship` to read instead of files.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="OpenMetrics file to write."
)
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The sidecar's YAML, for its teams and field_names.",
)
@click.option(
    "--step", "step_s", default=60, show_default=True, type=click.IntRange(1, 240), help="Seconds between samples."
)
@click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="Label to add to every series, such as job=sidecar."
)
def sidecar_backfill(
    files: tuple[Path, ...], data: str | None, out: Path, path: Path | None, step_s: int, labels: tuple[str, ...]
) -> None:
    """Make OpenMetrics from old request logs.

    promtool imports them into Prometheus. Compressed logs are read as well.

    Leave out lines that a running sidecar has counted, or they count twice. Pass the files in the order of time.

    \b
    Example:  vllm-watch sidecar backfill requests.jsonl.2.gz requests.jsonl.1 --out past.om --label job=sidecar
              promtool tsdb create-blocks-from openmetrics past.om /path/to/prometheus/data
    """
    from exporters.catalogue.sidecar import REQUEST_TRAFFIC
    from exporters.requests import backfill
    from exporters.requests.duplicates import RecentRequests
    from stack.request_source import data_reader

    if bool(files) == bool(data):
        raise click.UsageError("name request logs, or a data set with --data")
    pairs = dict(label.partition("=")[::2] for label in labels)
    if bad := next((name for name in pairs if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)), None):
        raise click.UsageError(f"--label {bad!r} is no label; write it like job=sidecar")
    if taken := next((name for name in pairs for metric in REQUEST_TRAFFIC if name in (*metric.labels, "le")), None):
        raise click.UsageError(f"--label {taken} is a label that the series have already; choose another name")
    with mistakes_as_errors(), contextlib.ExitStack() as stack:
        settings = config.sidecar(path) if path else sidecar_config.SidecarConfig()
        counts = sidecar_config.counting(settings)
        whole = sum(file.stat().st_size for file in files)
        bar = stack.enter_context(
            click.progressbar(length=whole, label="reading", file=sys.stderr, hidden=not sys.stderr.isatty())
        )
        text = stack.enter_context(out.open("w", encoding="utf-8"))
        written = backfill.run(
            files, text, counts, settings.fields, RecentRequests(settings.remember), step_s, pairs, bar.update,
            data_reader(data, order="ts") if data else None,
        )  # fmt: skip
    click.echo(backfill.summary(written, out))
    if not written.requests:
        raise SystemExit(1)


async def _serve(settings: sidecar_config.SidecarConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sidecar = Sidecar(settings, version())
    await sidecar_listener.serve(sidecar, stop)
