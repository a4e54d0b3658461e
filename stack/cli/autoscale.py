"""`vllm-watch kubernetes autoscale`: objects that scale engines, and a replay of a recorded day."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alerts import export
from stack.capacity.command import CapacityOptions
from stack.cli.common import AS_JSON, mistakes_as_errors, say_files
from stack.cli.options import SLO, THRESHOLDS
from stack.cli.struct_options import options_of
from stack.deploy.kubernetes import autoscaling, scaling_study
from stack.deploy.kubernetes.autoscaling import AutoscaleOptions
from stack.deploy.kubernetes.scaling_study import ScalingStudy
from stack.terminal import output_width

PIPED = 150  # columns where nobody says how many there are


def _own(
    thresholds: Annotated[Path | None, THRESHOLDS] = None, slo: Annotated[Path | None, SLO] = None
) -> export.AlertOptions:
    return export.AlertOptions(thresholds, slo)


@click.command("autoscale")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@options_of(AutoscaleOptions, "options")
@options_of(CapacityOptions, "asked")
@options_of(_own, "own")
@click.option("--force", is_flag=True, help="Overwrite files that vllm-watch did not write, or that were edited.")
@AS_JSON
def autoscale_command(
    out: Path, options: AutoscaleOptions, asked: CapacityOptions, own: export.AlertOptions, force: bool, as_json: bool
) -> None:
    """Write objects that scale engines by saturation.

    Write a recording rule, a ScaledObject for KEDA, and a HorizontalPodAutoscaler with values for prometheus-adapter.
    Values that are not given follow from the capacity worksheet. With --log, replay the log with these values.

    \b
    Example:  vllm-watch kubernetes autoscale --out autoscaling --deployment vllm --traffic worksheet.yaml --rate 8
    """
    with mistakes_as_errors():
        found = scaling_study.study(options, asked, own)
        written = autoscaling.write(out, found.scaling, force)
    if not as_json:
        _draw(found)
    warned = [*found.scaling.warnings, *found.notes]
    say_files(written, [], warned, list(autoscaling.next_steps(out, found.scaling)), as_json, _json(found))


def _json(found: ScalingStudy) -> dict[str, Any]:
    policy = asdict(found.scaling.policy)
    rows = [{"replicas": row.name, **asdict(row.result)} for row in found.rows]
    return {
        "model": found.scaling.model, "query": autoscaling.query(found.scaling), "policy": policy,
        "values": [asdict(value) for value in found.scaling.values],
        "replay": {"requests": found.requests, "span_s": found.span_s, "within_s": found.within_s, "rows": rows},
    }  # fmt: skip


def _draw(found: ScalingStudy) -> None:
    console = Console(width=output_width(PIPED), highlight=False)
    values = Table("value", "", "reason", title=f"autoscaling of {escape(found.scaling.model)}", title_justify="left")
    for value in found.scaling.values:
        values.add_row(value.name, value.value, escape(value.why))
    console.print(values)
    if not found.rows:
        return
    title = f"replay: {found.requests:,} requests in {found.span_s / 3600:.1f} h"
    head = ("replicas", "replica hours", f"first token within {found.within_s:g} s", "longest wait", "most waiting",
            "most replicas", "added", "removed")  # fmt: skip
    table = Table(*head, title=title, title_justify="left")
    for row in found.rows:
        it = row.result
        table.add_row(
            row.name, f"{it.hours:,.1f}", f"{it.within:.2%}", f"{it.longest_wait_s:,.0f} s", f"{it.most_waiting:,}",
            str(it.most), str(it.added), str(it.removed),
        )  # fmt: skip
    console.print(table)
