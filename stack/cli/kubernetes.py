"""`vllm-watch kubernetes`: export manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from alerts import export
from stack.cli.autoscale import autoscale_command
from stack.cli.common import AS_JSON, mistakes_as_errors, say_files
from stack.cli.options import DASHBOARD_BASE, RUNBOOK_BASE, SLO, THRESHOLDS
from stack.cli.struct_options import options_of
from stack.deploy.helm import chart
from stack.deploy.kubernetes import files
from stack.deploy.kubernetes.options import KubernetesOptions
from stack.option import Opt
from stack.root import version


def _image(
    image: Annotated[
        str | None, Opt(metavar="IMAGE", help="Image of vllm-watch.  [default: vllm-watch with this version]")
    ] = None,
) -> str:
    return image or f"vllm-watch:{version()}"


def _rules(
    runbook_base: Annotated[str | None, RUNBOOK_BASE] = None,
    dashboard_base: Annotated[str | None, DASHBOARD_BASE] = None,
    thresholds: Annotated[Path | None, THRESHOLDS] = None,
    slo: Annotated[Path | None, SLO] = None,
) -> export.AlertOptions:
    """A deployment's own rules. Raises ValueError and BadConfig."""
    return export.AlertOptions(thresholds, slo, export.links(runbook_base, dashboard_base))


def _own_rules(
    thresholds: Annotated[Path | None, THRESHOLDS] = None, slo: Annotated[Path | None, SLO] = None
) -> export.AlertOptions:
    """Rules without addresses, which are values of the chart. Raises ValueError and BadConfig."""
    return export.AlertOptions(thresholds, slo)


@click.group("kubernetes")
def kubernetes() -> None:
    """Export the stack as Kubernetes manifests."""


@kubernetes.command("chart")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@options_of(_own_rules, "rules")
@click.option("--force", is_flag=True, help="Overwrite files of something else.")
@AS_JSON
def kubernetes_chart(out: Path, rules: export.AlertOptions, force: bool, as_json: bool) -> None:
    """Write the Helm chart.

    Write the chart with the objects of `kubernetes export`, with rules of your own thresholds and objectives. All
    other options are values of the chart: values.yaml explains each.

    \b
    Example:  vllm-watch kubernetes chart --out chart"""
    with mistakes_as_errors():
        written, older = chart.write(out, rules, version(), force)
    step = f"helm upgrade --install vllm-watch {out} --namespace vllm --values VALUES.yaml    # docs/guides/helm.md"
    say_files(written, older, [], [step], as_json)


@kubernetes.command("export")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@options_of(KubernetesOptions, "wanted", image=_image, rules=_rules)
@click.option("--force", is_flag=True, help="Overwrite files that vllm-watch did not write, or that were edited.")
@AS_JSON
def kubernetes_export(out: Path, wanted: KubernetesOptions, force: bool, as_json: bool) -> None:
    """Write Kubernetes manifests for kustomize.

    Write rules, dashboards and the monitor of the engines as objects: a base for kustomize, and an example to build
    on. These change nothing for clients of the engines. --board, --sidecar, --gateway, --own-gateway and
    --restrict-engines add more, and each prints a warning with its effect.

    The command contacts no cluster and writes no secret. Purpose of each object: docs/guides/kubernetes.md.

    \b
    Example:  vllm-watch kubernetes export --out manifests --engine-selector app=vllm \
                --label release=kube-prometheus-stack --runbook-base https://wiki.example.org/runbooks \
                --dashboard-base https://grafana.example.org"""
    with mistakes_as_errors():
        written, older = files.write(out, wanted, force)
    say_files(written, older, list(files.warnings(wanted)), list(files.next_steps(out, wanted)), as_json)


kubernetes.add_command(autoscale_command)
