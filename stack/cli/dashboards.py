"""`vllm-watch dashboards`: export as files, push to a Grafana."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from alerts import managed_files
from alerts.rules import Links
from dashboards import grafana_client, grafana_com, grafana_folders, grafana_json, mixin, publish
from dashboards.model import Profile
from dashboards.registry import boards as boards_of
from stack.cli.common import AS_JSON, mistakes_as_errors
from stack.cli.options import RUNBOOK_BASE, TEAM, THRESHOLDS, settings_of
from stack.root import version


@click.group()
def dashboards() -> None:
    """Export dashboards, or push them to Grafana."""


_PROFILE = click.option(
    "--profile", type=click.Choice([p.value for p in Profile]), default=Profile.FULL.value, show_default=True,
    help="engine: only panels that vLLM's own series fill.",
)  # fmt: skip


_FORMATS = {
    "import": "for Grafana's import dialog",
    "provisioning": "read-only dashboards with a provider file",
    "grafana.com": "JSON with __inputs and a description, to upload",
    "mixin": "jsonnet, with the rules",
}


@dashboards.command("export")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@_PROFILE
@click.option(
    "--format", "use", type=click.Choice(list(_FORMATS)), default="import", show_default=True,
    help=" ".join(f"{name}: {what}." for name, what in _FORMATS.items()),
)  # fmt: skip
@click.option("--path", help="Path of the folder as Grafana sees it.  [default: --out]")
@RUNBOOK_BASE
@TEAM
@THRESHOLDS
@click.option("--force", is_flag=True, help="Overwrite files that vllm-watch did not write.")
@AS_JSON
def dashboards_export(
    out: Path,
    profile: str,
    use: str,
    path: str | None,
    runbook_base: str | None,
    team: str | None,
    thresholds: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the dashboards as JSON files.

    The data source is a variable, so the files can be imported unchanged. With --team, one dashboard whose queries
    read that team only.

    \b
    Example:  vllm-watch dashboards export --out boards --format provisioning --path /var/lib/grafana/vllm
    """
    if path and use != "provisioning":
        raise click.UsageError("--path belongs to --format provisioning")
    if use == "grafana.com" and not runbook_base:
        raise click.UsageError("--format grafana.com needs --runbook-base: others cannot open links to this machine")
    if team is not None and (use != "import" or profile != Profile.FULL):
        raise click.UsageError("--team has one dashboard, of the sidecar's series; omit --format and --profile")
    seen = path or str(out.resolve())
    with mistakes_as_errors():
        files = exported(use, profile, runbook_base, thresholds, seen, team)
        written = managed_files.write(out, files, publish.foreign, force)
    older = [] if team is not None else managed_files.left_over(out, files, publish.foreign, "*.json")
    if as_json:
        rows = [{"path": str(file), "changed": changed} for file, changed in written.items()]
        click.echo(json.dumps({"files": rows, "left_over": [str(file) for file in older]}, indent=1))
        return
    for file, changed in written.items():
        click.echo(f"{'written' if changed else 'unchanged'}: {file}")
    for file in older:
        click.echo(f"left over from an earlier export, remove it: {file}")
    if team is None:
        _say_where_runbooks_are(runbook_base)
        _say_what_next(use, out, seen)


def exported(
    use: str, profile: str, runbook_base: str | None, thresholds: Path | None, seen: str, team: str | None = None
) -> dict[str, str]:
    """Return name and text of the files of a format. seen: the folder as Grafana sees it. Raises BadConfig."""
    boards = printed_boards(profile, runbook_base, use != "provisioning", thresholds, team)
    mark = f"{publish.MARK} --format {use}"
    if use == "mixin":
        links = Links(runbooks=runbook_base) if runbook_base else Links()
        return mixin.folder(boards, links, settings_of(thresholds), f"# {mark}.\n")
    files = {f"{slug}.json": text for slug, text in boards.items()}
    if use == "provisioning":
        files["vllm-watch.yaml"] = publish.provider(seen)
    if use == "grafana.com":
        files = {name: grafana_com.shared(text) for name, text in files.items()}
        files |= {
            f"{board.slug}.md": grafana_com.description(board, f"{mark}.")
            for board in boards_of(Profile(profile), settings_of(thresholds))
        }
    return files


def _say_what_next(use: str, out: Path, seen: str) -> None:
    if use == "import":
        click.echo("in Grafana: Dashboards > New > Import; or run vllm-watch dashboards push")
    if use == "grafana.com":
        click.echo("on grafana.com: My Plugins & Dashboards > Dashboards > Upload; the .md file is its description")
    if use == "mixin":
        click.echo(f"next: jsonnet -e \"(import '{out / 'mixin.libsonnet'}').prometheusAlerts\"")
    if use != "provisioning":
        return
    click.echo(
        f"mount {out.resolve()} at {seen} and {out.resolve() / 'vllm-watch.yaml'} at"
        " /etc/grafana/provisioning/dashboards/vllm-watch.yaml"
    )
    click.echo(
        "timeInterval of the Prometheus data source must equal its scrape interval (15s where unset), or panels with"
        " rates stay empty"
    )


def printed_boards(
    profile: str, runbook_base: str | None, editable: bool, thresholds: Path | None, team: str | None = None
) -> dict[str, str]:
    """Grafana's JSON by slug. Raises BadConfig, and ValueError for a name that no team can have."""
    links, chosen = Links(runbooks=runbook_base) if runbook_base else Links(), Profile(profile)
    return {
        board.slug: grafana_json.to_json(board, chosen, links=links, editable=editable)
        for board in boards_of(chosen, settings_of(thresholds), team)
    }


def _say_where_runbooks_are(runbook_base: str | None) -> None:
    if runbook_base is None:
        click.echo(
            f"links to runbooks lead to {Links().runbooks}, right for this machine alone; --runbook-base URL changes"
            " that"
        )


@dashboards.command("push")
@click.option("--grafana", "url", required=True, metavar="URL", help="URL of Grafana, with its path if it has one.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"File with a service account token.  [default: {grafana_client.TOKEN_VARIABLE}]",
)
@click.option(
    "--user-file",
    type=click.Path(path_type=Path),
    help="File with user:password, for a Grafana without service accounts.",
)
@click.option(
    "--folder",
    default=grafana_folders.FOLDER,
    show_default=True,
    help="Folder (title or uid) for new dashboards; existing ones are not moved.",
)
@click.option("--datasource", metavar="NAME", help="Default Prometheus data source (name or uid) of the dashboards.")
@_PROFILE
@RUNBOOK_BASE
@THRESHOLDS
@click.option("--dry-run", is_flag=True, help="Print the changes panel by panel; change nothing.")
@click.option("--force", is_flag=True, help="Overwrite a foreign dashboard that has the same uid.")
@click.option(
    "--api",
    type=click.Choice(["auto", "newer", "older"]),
    default="auto",
    show_default=True,
    help="Grafana API to use.",
)
@AS_JSON
def dashboards_push(
    url: str,
    token_file: Path | None,
    user_file: Path | None,
    folder: str,
    datasource: str | None,
    profile: str,
    runbook_base: str | None,
    thresholds: Path | None,
    dry_run: bool,
    force: bool,
    api: str,
    as_json: bool,
) -> None:
    """Create or update the dashboards in Grafana.

    Unchanged dashboards are skipped.

    Exit 1 if a dashboard was refused, 2 if nothing could be done.

    \b
    Example:  GRAFANA_TOKEN=$(cat token) vllm-watch dashboards push --grafana http://127.0.0.1:3000 --dry-run
    """
    with mistakes_as_errors():
        report = publish.push(
            grafana_client.GrafanaClient(url, grafana_client.authorization(token_file, user_file)),
            [json.loads(text) for text in printed_boards(profile, runbook_base, True, thresholds).values()],
            folder=folder, data_source=datasource, message=f"vllm-watch {version()}", dry_run=dry_run, force=force,
            engine_only=profile == Profile.ENGINE, api=api,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(asdict(report), indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(publish.as_lines(report)))
        _say_where_runbooks_are(runbook_base)
    raise SystemExit(1 if report.fails else 0)
