"""`vllm-watch kubernetes`: the stack as manifests."""

from __future__ import annotations

from pathlib import Path

import click

from alerts import export
from dashboards.model import Profile
from stack.cli import version
from stack.cli.common import AS_JSON, mistakes_told, say_files
from stack.cli.options import DASHBOARD_BASE, RUNBOOK_BASE, SLO, THRESHOLDS
from stack.deploy.kubernetes import files
from stack.deploy.kubernetes.options import ONCE, KubernetesOptions, OwnGateway, pairs


@click.group("kubernetes")
def kubernetes() -> None:
    """The stack as Kubernetes manifests, for kustomize, Argo CD and Flux."""


@kubernetes.command("export")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="The folder to write to.")
@click.option(
    "--profile", type=click.Choice([p.value for p in Profile]), default=Profile.FULL.value, show_default=True,
    help="engine: engines are watched, without a gateway and a sidecar.",
)  # fmt: skip
@click.option(
    "--namespace",
    default="vllm",
    show_default=True,
    metavar="NAME",
    help="Where the engines run; everything goes there.",
)
@click.option(
    "--engine", "engines", multiple=True, default=("http://vllm:8000",), show_default=True, metavar="URL",
    help="Where the gateway and the sidecar find an engine; may be given more than once.",
)  # fmt: skip
@click.option(
    "--engine-selector",
    multiple=True,
    default=("app=vllm",),
    show_default=True,
    metavar="KEY=VALUE",
    help="A label of the engines' pods; several.",
)
@click.option(
    "--engine-port",
    default="8000",
    show_default=True,
    metavar="PORT",
    help="Number or name of the port that those pods declare.",
)
@click.option(
    "--job-from-label",
    "job_label",
    default="",
    metavar="KEY",
    help="A label of the engines' pods, such as their model: its value goes into the job.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="What the Prometheus Operator selects by: release=NAME of its chart.",
)
@click.option(
    "--monitoring-namespace",
    "monitoring",
    default="monitoring",
    show_default=True,
    metavar="NAME",
    help="Where Prometheus runs.",
)
@click.option(
    "--prometheus",
    default="",
    metavar="URL",
    help="What the board asks.  [default: prometheus-operated in that namespace]",
)
@click.option(
    "--cluster",
    default="",
    metavar="NAME",
    help="A label `cluster` for every series, where one Prometheus sees several.",
)
@click.option(
    "--interval",
    default="15s",
    show_default=True,
    metavar="TIME",
    help="Between two scrapes; Grafana's data source needs the same.",
)
@click.option(
    "--sample-limit",
    type=int,
    metavar="N",
    help="Refuse a page with more samples; 0: never.  [default: twice what each kind may hold]",
)
@click.option(
    "--image",
    metavar="IMAGE",
    help="Of vllm-watch, as built from its Dockerfile.  [default: vllm-watch with this version]",
)
@click.option(
    "--state-size",
    default="1Gi",
    show_default=True,
    metavar="SIZE",
    help="Of the volume for the log and what was counted from it.",
)
@click.option("--storage-class", default="", metavar="NAME", help="Of that volume.  [default: the cluster's]")
@click.option(
    "--teams-secret",
    default="vllm-watch-teams",
    show_default=True,
    metavar="NAME",
    help="The secret that holds teams.yaml.",
)
@click.option(
    "--tls-secret",
    default="",
    metavar="NAME",
    help="A secret with tls.crt, tls.key and ca.crt: metrics of gateway and sidecar over TLS.",
)
@click.option(
    "--login-secret",
    default="",
    metavar="NAME",
    help="A secret with token: metrics of gateway and sidecar only for who has it.",
)
@click.option(
    "--own-gateway",
    metavar="DEPLOYMENT:VOLUME/FILE",
    help="A gateway of yours and where it writes its request log: it gets our sidecar; no other.",
)
@click.option(
    "--open-engines",
    is_flag=True,
    help="Let whoever asks the engines directly go on; else only the gateway and Prometheus reach them.",
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(ONCE),
    help="For a second namespace of one Prometheus: it needs these once; several.",
)
@RUNBOOK_BASE
@DASHBOARD_BASE
@THRESHOLDS
@SLO
@click.option("--force", is_flag=True, help="Overwrite files that did not come from here, or were changed since.")
@AS_JSON
def kubernetes_export(
    out: Path,
    profile: str,
    namespace: str,
    engines: tuple[str, ...],
    engine_selector: tuple[str, ...],
    engine_port: str,
    job_label: str,
    labels: tuple[str, ...],
    monitoring: str,
    prometheus: str,
    cluster: str,
    interval: str,
    sample_limit: int | None,
    image: str | None,
    state_size: str,
    storage_class: str,
    teams_secret: str,
    tls_secret: str,
    login_secret: str,
    own_gateway: str | None,
    open_engines: bool,
    without: tuple[str, ...],
    runbook_base: str | None,
    dashboard_base: str | None,
    thresholds: Path | None,
    slo: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write rules, monitors, boards, gateway, sidecar, board and network policies as objects: a base for kustomize, and
    an example to build on.

    No cluster is asked and no secret is written. What each object is for: docs/guides/kubernetes.md.

    \b
    Example:  vllm-watch kubernetes export --out manifests --engine http://vllm:8000 --engine-selector app=vllm \
                --label release=kube-prometheus-stack"""
    with mistakes_told():
        rules = export.AlertOptions(thresholds, slo, export.links(runbook_base, dashboard_base))
        wanted = KubernetesOptions(
            image or f"vllm-watch:{version()}", Profile(profile), rules, namespace,
            engines, pairs(engine_selector, "--engine-selector"), engine_port, pairs(labels, "--label"),
            cluster, monitoring, prometheus, interval, sample_limit, state_size, storage_class, teams_secret,
            tls_secret,
            login_secret, open_engines, None if own_gateway is None else OwnGateway.parse(own_gateway), job_label,
            without,
        )  # fmt: skip
        written, older = files.write(out, wanted, force)
    say_files(written, older, list(files.warnings(wanted)), list(files.next_steps(out, wanted)), as_json)
