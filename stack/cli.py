"""The command `vllm-watch`: options, one call, output. The one click door."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from alerts import routing
from alerts.rules import Links
from alerts.settings import SHIPPED, Overlay, Settings
from dashboards import panels
from dashboards.boards import boards as boards_of
from dashboards.interpolate import duration_s
from dashboards.model import Profile
from exporters import sidecar as sidecar_module
from exporters.catalogue import EVERYTHING, NEVER_EXISTED, check, expression, page
from exporters.catalogue.metric import Metric
from exporters.catalogue.metric import key as release_key
from exporters.engine import fetch
from stack import alerts, bundle, config, export, grafana

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def version() -> str:
    """This release; 'unknown' where the code runs without having been installed."""
    try:
        return importlib.metadata.version("vllm-watch")
    except importlib.metadata.PackageNotFoundError:
        found = re.search(r'^version = "([^"]+)"', (bundle.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        return found[1] if found else "unknown"


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors that a user can act on, as one sentence and exit status 2."""
    try:
        yield
    except (config.BadConfig, expression.BadExpression, page.BadPage, ValueError, OSError) as error:
        raise Told(_sentence(error)) from error


class Told(click.ClickException):
    """A mistake that the caller can mend; exit status 2, as for wrong options."""

    exit_code = 2


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _duration(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return duration_s(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.server").addFilter(_without_bytes)


def _without_bytes(record: logging.LogRecord) -> bool:
    """aiohttp quotes what it cannot parse, and that may be a key or a prompt: the log says only that it happened."""
    if record.exc_info and type(record.exc_info[1]).__module__ == "aiohttp.http_exceptions":
        record.msg, record.args = f"a request that is no sound HTTP was refused ({type(record.exc_info[1]).__name__})", ()
        record.exc_info = record.exc_text = None
    return True


@click.group(context_settings=CONTEXT)
@click.version_option(version(), prog_name="vllm-watch")
def main() -> None:
    """The observability stack for vLLM.

    \b
    Example:  vllm-watch metrics check http://127.0.0.1:8000
    """
    # Whatever a command started must go with it, also when it is ended politely by another program.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


@main.group()
def lab() -> None:
    """A real vLLM on this machine's CPU, watched by the whole stack."""


@lab.command("up")
@click.option("--engine", metavar="URL", help="Watch this vLLM instead of starting one; the lab sends it about two small requests a second.")
@click.option("--for", "for_s", metavar="TIME", callback=_duration, help="Stop after this time of readiness; exit 0 only if all was well.")
@click.option("--port-offset", type=click.IntRange(0, 50000), default=0, show_default=True, help="Add this to every port.")
def lab_up(engine: str | None, for_s: float | None, port_offset: int) -> None:
    """Install what is missing, start everything, feed it, and show how it does.

    \b
    Example:  vllm-watch lab up --for 120s
    """
    from stack.lab.up import up  # the lab's imports are not paid for by other commands

    raise SystemExit(up(engine, for_s, port_offset, Console(width=None if sys.stdout.isatty() else 110)))


@lab.command("install")
@click.argument("names", nargs=-1)
@click.option("--every", is_flag=True, help="Every part that the tests use; in CI a missing one is a failure, elsewhere it is named.")
def lab_install(names: tuple[str, ...], every: bool) -> None:
    """Install real parts into the cache, or say where they are already. Without NAMES: all that the lab needs.

    \b
    Example:  vllm-watch lab install prometheus promtool
    """
    from stack.lab import parts
    from stack.lab.up import NEEDED

    console = Console(soft_wrap=True, highlight=False)
    unknown = sorted(set(names) - set(parts.PARTS))
    if unknown:
        raise click.UsageError(f"{unknown[0]} is no part; there are {', '.join(parts.PARTS)}")
    wanted = tuple(parts.PARTS) if every else names or NEEDED
    try:
        found = parts.ensure(wanted, console.print)
    except parts.PartMissing as error:
        if not every or os.environ.get("CI"):
            raise click.ClickException(str(error)) from error
        found = {name: part for name in wanted if (part := parts.find(name))}
        console.print(f"going on without what is missing:\n{error}")
    for part in found.values():
        console.print(f"{part.name} {part.version}: {part.path} ({part.origin})")


@main.group()
def sidecar() -> None:
    """The exporter that joins request log, engine and GPU."""


@sidecar.command("run")
@click.option("--config", "path", required=True, type=click.Path(path_type=Path), help="YAML; see stack/deploy/sidecar.yaml.")
def sidecar_run(path: Path) -> None:
    """Serve /metrics, /-/healthy and /-/ready.

    \b
    Example:  vllm-watch sidecar run --config sidecar.yaml
    """
    import uvloop

    _logging()
    with _told():
        settings = config.sidecar(path)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_sidecar(settings))


@sidecar.command("explain")
@click.argument("line", default="-")
@click.option("--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="The sidecar's YAML, with its field_names.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, one object for each line.")
def sidecar_explain(line: str, path: Path | None, as_json: bool) -> None:
    """Say what becomes of a LINE of a request log: each field, what it is counted as, or why it is refused.

    Without LINE, or with -, every line of the standard input. Exit 1 when one is refused.

    \b
    Example:  vllm-watch sidecar explain '{"request_id": "r1", "model": "tiny", "e2e_ms": 48.7, "outcome": "ok"}'
    """
    from stack import explain

    with _told():
        settings = config.sidecar(path) if path else sidecar_module.SidecarConfig()
    lines = (sys.stdin.buffer.read() if line == "-" else os.fsencode(line)).split(b"\n")
    told = [explain.explain(each, settings) for each in lines if each.strip()]
    if not told:
        raise Told("there is no line to explain")
    click.echo("\n".join(json.dumps(one) for one in told) if as_json else "\n\n".join(map(explain.as_text, told)))
    raise SystemExit(1 if any(one["refused"] for one in told) else 0)


@sidecar.command("backfill")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Where the OpenMetrics file goes.")
@click.option("--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="The sidecar's YAML, with its teams and field_names.")
@click.option("--step", "step_s", default=60, show_default=True, type=click.IntRange(1, 240), help="Seconds between samples.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Added to every series, such as job=vllm-watch.")
def sidecar_backfill(files: tuple[Path, ...], out: Path, path: Path | None, step_s: int, labels: tuple[str, ...]) -> None:
    """Make series of the past from old request logs, packed or not, for promtool to bring into Prometheus.

    Leave out what a running sidecar has counted, or it is there twice. Each FILE is best in the order of time, as it was written.

    \b
    Example:  vllm-watch sidecar backfill requests.jsonl.2.gz requests.jsonl.1 --out past.om --label job=vllm-watch
              promtool tsdb create-blocks-from openmetrics past.om /path/to/prometheus/data
    """
    from exporters import backfill
    from exporters.catalogue.ours import REQUEST_TRAFFIC
    from exporters.ledger import Window

    pairs = dict(label.partition("=")[::2] for label in labels)
    if bad := next((name for name in pairs if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)), None):
        raise click.UsageError(f"--label {bad!r} is no label; write it like job=vllm-watch")
    if taken := next((name for name in pairs for metric in REQUEST_TRAFFIC if name in (*metric.labels, "le")), None):
        raise click.UsageError(f"--label {taken} is a label that the series have already; choose another name")
    with _told(), contextlib.ExitStack() as stack:
        settings = config.sidecar(path) if path else sidecar_module.SidecarConfig()
        counts = sidecar_module.counting(settings)
        whole = sum(file.stat().st_size for file in files)
        bar = stack.enter_context(click.progressbar(length=whole, label="reading", file=sys.stderr, hidden=not sys.stderr.isatty()))
        text = stack.enter_context(out.open("w", encoding="utf-8"))
        told = backfill.run(files, text, counts, settings.fields, Window(settings.remember), step_s, pairs, bar.update)
    click.echo(backfill.summary(told, out))
    if not told.requests:
        raise SystemExit(1)


async def _serve_sidecar(settings: sidecar_module.SidecarConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sidecar = sidecar_module.Sidecar(settings, version())
    try:
        await sidecar_module.serve(sidecar, stop)
    except OSError as error:
        raise OSError(f"{settings.listen} cannot be used: {error.strerror}; choose another with `listen:`") from error


@main.group()
def gateway() -> None:
    """The way in: who asks, how it went, one JSON line for each request."""


@gateway.command("run")
@click.option("--config", "path", required=True, type=click.Path(path_type=Path), help="YAML; see stack/deploy/gateway.yaml.")
def gateway_run(path: Path) -> None:
    """Pass requests on to vLLM and log them.

    \b
    Example:  vllm-watch gateway run --config gateway.yaml
    """
    from stack.gateway import run

    _logging()
    with _told():
        raise SystemExit(run(path))


@gateway.command("key")
@click.argument("team")
def gateway_key(team: str) -> None:
    """Make a key for TEAM: the secret to hand out, and the hash that belongs into teams.yaml.

    \b
    Example:  vllm-watch gateway key demo
    """
    from stack.gateway.teams import make_key

    with _told():
        key, hashed = make_key(team)
    click.echo(f"key for {team} (shown once): {key}\nfor teams.yaml:\n  teams:\n    {team}:\n      keys: ['{hashed}']")


@gateway.command("check")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def gateway_check(file: Path, as_json: bool) -> None:
    """Find mistakes in FILE and say what it means: who goes first, who may have how much, which engine gets which share.

    FILE is teams.yaml, or gateway.yaml, with which the teams.yaml that it names is checked too. Exit 1 when there are mistakes.

    \b
    Example:  vllm-watch gateway check teams.yaml
    """
    from stack.gateway import check

    told = check.check(file)
    if as_json:
        click.echo(_as_json(told))
    elif sys.stdout.isatty() and not told["mistakes"]:
        _draw(told, Console(highlight=False))
    else:
        click.echo(check.as_text(told))
    raise SystemExit(1 if told["mistakes"] else 0)


def _draw(told: dict[str, Any], console: Console) -> None:
    from stack.gateway import check

    console.print(check.summary(told), markup=False)
    for sheet in check.sheets(told):
        table = Table(*sheet.head, title=sheet.title, title_justify="left")
        for row in sheet.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    console.print(check.verdict(told), markup=False)


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Where they are; by default the compose stack's volume.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def secrets(folder: Path | None, as_json: bool) -> None:
    """Print what the compose stack made at its first start: Grafana's password and a key for each team.

    \b
    Example:  docker compose run --rm cli secrets
    """
    from stack.deploy import init

    with _told():
        made = init.read(folder or init.FOLDER)
    if as_json:
        click.echo(json.dumps({"grafana_password": made.grafana_password, "keys": made.keys}, indent=1))
        return
    click.echo(f"Grafana     http://127.0.0.1:3000   user admin, password {made.grafana_password}")
    for team, key in made.keys.items():
        click.echo(f"key         {team:14} {key}")
    some = next(iter(made.keys.values()))
    click.echo(f'try         curl -H "Authorization: Bearer {some}" http://127.0.0.1:8000/v1/models')


@main.group()
def metrics() -> None:
    """What vLLM exposes, and whether a page or dashboard fits it."""


@metrics.command("list")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@click.argument("word", default="")
def metrics_list(as_json: bool, word: str) -> None:
    """Print the catalogue, or the part of it whose name or meaning has WORD.

    \b
    Example:  vllm-watch metrics list queue
    """
    chosen = [m for m in EVERYTHING if word.lower() in f"{m.name} {m.name.replace('_', ' ')} {m.meaning}".lower()]
    if not chosen:
        raise Told(f"nothing in the catalogue has {word!r} in its name or meaning")
    if as_json:
        click.echo(json.dumps([_metric_as_json(m) for m in chosen], indent=1))
        return
    table = Table("name", "kind", "unit", "vLLM", "meaning and notes")
    for metric in chosen:
        lived = f"{metric.since or '?'} .. {metric.until or ''}" if metric.name.startswith("vllm:") else ""
        told = [metric.meaning, *(f"- {note}" for note in metric.notes)]
        told += [f"needs {metric.needs}"] * bool(metric.needs) + ["known from source only"] * (metric.evidence == "source")
        table.add_row(metric.name, str(metric.kind), str(metric.unit), lived, "\n".join(told))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _metric_as_json(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric.__dataclass_fields__}


@metrics.command("check")
@click.argument("target", required=False)
@click.option("--dashboard", "boards", multiple=True, type=click.Path(path_type=Path), help="A Grafana dashboard of your own to check as well.")
@click.option("--release", help="The engine's vLLM version, where the page cannot be asked for it.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def metrics_check(target: str | None, boards: tuple[Path, ...], release: str | None, as_json: bool) -> None:
    """Compare a live page with the catalogue, and with every panel and rule.

    TARGET is the address of a vLLM server, or a file with its page. Exit 1 for unknown or escaped names, or when a panel or rule
    that is not optional can never return anything.

    \b
    Example:  vllm-watch metrics check http://127.0.0.1:8000 --dashboard mine.json
    """
    if target is None and not boards:
        raise click.UsageError("name a server, a file with its page, or a --dashboard")
    with _told():
        theirs = [use for path in boards for use in check.uses_of_dashboard(_text(path), path.name)]
        strangers = list(check.strangers(theirs, EVERYTHING, NEVER_EXISTED))
        report = None
        if target is not None:
            text, told = _page_of(target)
            report = check.check(page.parse(text), EVERYTHING, [*bundle.uses(), *theirs], _release(release, told))
    if as_json:
        rows = [{"place": s.use.place, "name": s.name, "instead" if s.name else "error": s.instead} for s in strangers]
        click.echo(json.dumps({"page": report.as_json() if report else None, "dashboards": rows}, indent=1))
    else:
        _say(report, strangers, len(theirs))
    raise SystemExit(1 if strangers or (report and report.fails) else 0)


def _page_of(target: str) -> tuple[str, str | None]:
    """The page and, from a live engine, its release."""
    if "://" in target:
        return asyncio.run(fetch(target))
    if not Path(target).exists() and re.fullmatch(r"[\w.-]+:\d+(/.*)?", target):
        raise ValueError(f"there is no file {target}; for a server write http://{target}")
    return _text(Path(target)), None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text") from error


def _release(asked: str | None, told: str | None) -> str | None:
    """What the user says, else what the engine says if it can be read: builds from source call themselves dev."""
    if asked:
        return ".".join(map(str, release_key(asked)))
    with contextlib.suppress(ValueError):
        return ".".join(map(str, release_key(told or "")))
    return None


def _say(report: check.Report | None, strangers: list[check.Stranger], read: int) -> None:
    for stranger in strangers:
        if stranger.name is None:
            click.echo(f"unread    {stranger.use.place}: {stranger.instead}")
        else:
            click.echo(f"no release has {stranger.name} ({stranger.use.place}){': use ' + stranger.instead if stranger.instead else ''}")
    if report is None:
        click.echo(f"{len(strangers)} of {read} queries to look at" if strangers else f"{read} queries read, every name is known")
        return
    if not report.is_ours:
        click.echo(f"this page holds no series of vLLM, only {len(report.beside)} others: is it the right address?")
        return
    since, before = report.releases
    told = "vLLM of an unknown release" if since == "0.0" else f"vLLM {since}" + (f" or later, before {before}" if before else " or later")
    click.echo(told)
    click.echo(f"known     {len(report.known)} families, and {len(report.beside)} that are not vLLM's own")
    for name in report.unknown:
        click.echo(f"unknown   {name}: not in this catalogue; a newer vLLM, or a plug-in")
    if report.escaped:
        click.echo(f"escaped   {len(report.escaped)} families such as {report.escaped[0]}: {check.ESCAPED_ADVICE}")
    for old, new in report.renamed:
        click.echo(f"renamed   {old} is called {new} in newer releases; our queries ask for both")
    for need, names in _by_need(report.absent):
        listed = ", ".join(names) if len(names) < 4 else f"{len(names)} families such as {names[0]}"
        click.echo(f"absent    {listed}" + (f" (needs {need})" if need else ""))
    for why, places in _by_reason(report.broken):
        click.echo(f"empty     {places[0]}{f' and {len(places) - 1} more' if places[1:] else ''}: optional. {why}")
    for broken in report.broken:
        if not broken.use.optional:
            missing = [f"{name} (now {now})" if (now := check.successor(name, EVERYTHING)) else name for name in broken.missing]
            click.echo(f"broken    {broken.use.place}: misses {', '.join(missing) or 'a matching series'}")
    click.echo("in order" if not report.fails else "not in order")


def _by_reason(broken: tuple[check.Broken, ...]) -> list[tuple[str, list[str]]]:
    """What is empty on a healthy engine, gathered by the one thing that would fill it."""
    reasons = dict.fromkeys(b.use.optional for b in broken if b.use.optional)
    return [(reason, [b.use.place for b in broken if b.use.optional == reason]) for reason in reasons]


def _by_need(absent: tuple[Metric, ...]) -> list[tuple[str, list[str]]]:
    needs = sorted({metric.needs for metric in absent})
    return [(need, [metric.name for metric in absent if metric.needs == need]) for need in needs]


@main.group()
def dashboards() -> None:
    """Our boards in a Grafana that is there already."""


_PROFILE = click.option(
    "--profile", type=click.Choice([p.value for p in Profile]), default=Profile.FULL.value, show_default=True,
    help="engine: only what vLLM's own series can fill.",
)  # fmt: skip
_THRESHOLDS = click.option("--thresholds", type=click.Path(path_type=Path, dir_okay=False), help="Your own numbers; see `alerts list`.")
_RUNBOOKS = click.option("--runbooks", metavar="URL", help=f"Where links to runbooks lead.  [default: {Links().runbooks}]")


@dashboards.command("export")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="The folder to write to.")
@_PROFILE
@click.option(
    "--for", "use", type=click.Choice(["import", "provisioning"]), default="import", show_default=True,
    help="import: for Grafana's import dialog. provisioning: read-only boards and the provider file beside them.",
)  # fmt: skip
@click.option("--path", help="Where Grafana will see the folder; by default --out itself.")
@_RUNBOOKS
@_THRESHOLDS
@click.option("--force", is_flag=True, help="Overwrite files that did not come from here.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def dashboards_export(
    out: Path, profile: str, use: str, path: str | None, runbooks: str | None, thresholds: Path | None, force: bool, as_json: bool
) -> None:
    """Write the boards as files, with the data source as a variable: nothing to replace before an import.

    \b
    Example:  vllm-watch dashboards export --out boards --for provisioning --path /var/lib/grafana/vllm
    """
    if path and use != "provisioning":
        raise click.UsageError("--path belongs to --for provisioning")
    with _told():
        files = {f"{slug}.json": text for slug, text in _boards(profile, runbooks, use == "import", thresholds).items()}
    seen = path or str(out.resolve())
    if use == "provisioning":
        files["vllm-watch.yaml"] = grafana.provider(seen)
    with _told():
        written = export.write(out, files, grafana.foreign, force)
    older = export.left_over(out, files, grafana.foreign, "*.json")
    if as_json:
        rows = [{"path": str(file), "changed": changed} for file, changed in written.items()]
        click.echo(json.dumps({"files": rows, "left_over": [str(file) for file in older]}, indent=1))
        return
    for file, changed in written.items():
        click.echo(f"{'written' if changed else 'unchanged'}: {file}")
    for file in older:
        click.echo(f"left over from an earlier export, remove it: {file}")
    _say_where_runbooks_are(runbooks)
    if use == "import":
        click.echo("in Grafana: Dashboards > New > Import; or let vllm-watch dashboards push do it")
        return
    click.echo(f"mount {out.resolve()} at {seen} and {out.resolve() / 'vllm-watch.yaml'} at /etc/grafana/provisioning/dashboards/vllm-watch.yaml")
    click.echo("timeInterval of the Prometheus data source must equal its scrape interval (15s where unset), or panels with rates stay empty")


def _boards(profile: str, runbooks: str | None, editable: bool, thresholds: Path | None) -> dict[str, str]:
    """Grafana's JSON by slug. Raises BadConfig."""
    links, chosen = Links(runbooks=runbooks) if runbooks else Links(), Profile(profile)
    return {board.slug: panels.to_json(board, chosen, links=links, editable=editable) for board in boards_of(chosen, _settings(thresholds))}


def _settings(thresholds: Path | None) -> Settings:
    """A deployment's own numbers, or those that are shipped. Raises BadConfig."""
    return Settings(config.load(thresholds, Overlay)) if thresholds else SHIPPED


def _say_where_runbooks_are(runbooks: str | None) -> None:
    if runbooks is None:
        click.echo(f"links to runbooks lead to {Links().runbooks}, right for this machine alone; --runbooks URL changes that")


@dashboards.command("push")
@click.option("--grafana", "url", required=True, metavar="URL", help="Where Grafana is, with its path if it has one.")
@click.option("--token-file", type=click.Path(path_type=Path), help=f"A service account's token; else {grafana.TOKEN_VARIABLE} is read.")
@click.option("--user-file", type=click.Path(path_type=Path), help="user:password, for a Grafana without service accounts.")
@click.option("--folder", default=grafana.FOLDER, show_default=True, help="Title or uid, for boards that are new; others stay where they are.")
@click.option("--datasource", metavar="NAME", help="Name or uid of the Prometheus that the boards open with.")
@_PROFILE
@_RUNBOOKS
@_THRESHOLDS
@click.option("--dry-run", is_flag=True, help="Say what would change, panel by panel, and change nothing.")
@click.option("--force", is_flag=True, help="Overwrite a board under our uid that is not ours.")
@click.option("--api", type=click.Choice(["auto", "newer", "older"]), default="auto", show_default=True, help="Which of Grafana's two APIs to use.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def dashboards_push(
    url: str, token_file: Path | None, user_file: Path | None, folder: str, datasource: str | None, profile: str, runbooks: str | None,
    thresholds: Path | None, dry_run: bool, force: bool, api: str, as_json: bool,
) -> None:  # fmt: skip
    """Create or update the boards through Grafana's API; what is equal already is left alone.

    Exit 1 when a board was refused, 2 when nothing could be done.

    \b
    Example:  GRAFANA_TOKEN=$(cat token) vllm-watch dashboards push --grafana http://127.0.0.1:3000 --dry-run
    """
    with _told():
        report = grafana.push(
            grafana.Client(url, grafana.authorization(token_file, user_file)),
            [json.loads(text) for text in _boards(profile, runbooks, True, thresholds).values()],
            folder=folder, data_source=datasource, message=f"vllm-watch {version()}", dry_run=dry_run, force=force,
            engine_only=profile == Profile.ENGINE, api=api,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(asdict(report), indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(grafana.told(report)))
        _say_where_runbooks_are(runbooks)
    raise SystemExit(1 if report.fails else 0)


@main.group("alerts")
def alerts_group() -> None:
    """Alert rules, who is told of them, and the numbers behind them."""


_RUNBOOK_BASE = click.option("--runbook-base", metavar="URL", help=f"Where runbook pages are served.  [default: {Links().runbooks}]")
_DASHBOARD_BASE = click.option("--dashboard-base", metavar="URL", help=f"Where Grafana is.  [default: {Links().dashboards}]")
_SLO = click.option("--slo", type=click.Path(path_type=Path, dir_okay=False), help="Your own objectives; see `alerts slo`.")


@alerts_group.command("export")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="The folder to write to.")
@_RUNBOOK_BASE
@_DASHBOARD_BASE
@_THRESHOLDS
@_SLO
@click.option(
    "--receiver", type=click.Choice(list(routing.RECEIVERS)), default="none", show_default=True, help="How Alertmanager tells people; none: nobody."
)
@click.option("--deadman", is_flag=True, help="Also tell a service that expects to hear from VLLMWatchdog every few minutes.")
@click.option("--secrets", default=routing.SECRETS, show_default=True, metavar="DIR", help="Where Alertmanager finds the files with its secrets.")
@click.option("--force", is_flag=True, help="Overwrite files that did not come from here, or were changed since.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def alerts_export(
    out: Path, runbook_base: str | None, dashboard_base: str | None, thresholds: Path | None, slo: Path | None, receiver: str, deadman: bool,
    secrets: str, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write rule files for Prometheus, a configuration for Alertmanager, and every number that they rest on.

    \b
    Example:  vllm-watch alerts export --out rules --runbook-base https://wiki.example.org/vllm --receiver slack
    """
    with _told():
        links = alerts.links(runbook_base, dashboard_base)
        wanted = alerts.Wanted(thresholds, slo, links, receiver, secrets, deadman)
        warned = [*alerts.warnings(links), *alerts.without_page(wanted.objectives)]
        written, older = alerts.write(out, wanted, force)
        steps = list(alerts.next_steps(out, wanted))
    _say_files(written, older, warned, steps, as_json)


def _say_files(written: dict[Path, bool], older: list[Path], warned: list[str], steps: list[str], as_json: bool) -> None:
    for warning in warned:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        rows = [{"path": str(file), "changed": changed} for file, changed in written.items()]
        click.echo(json.dumps({"files": rows, "left_over": [str(file) for file in older], "warnings": warned, "next": steps}, indent=1))
        return
    for file, changed in written.items():
        click.echo(f"{'written' if changed else 'unchanged'}: {file}")
    for file in older:
        click.echo(f"left over from an earlier export, remove it: {file}")
    for step in steps:
        click.echo(f"next: {step}")


@alerts_group.command("list")
@_THRESHOLDS
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def alerts_list(thresholds: Path | None, as_json: bool) -> None:
    """Print every alert with its number, and every number that may be set in a file for --thresholds.

    \b
    Example:  vllm-watch alerts list
    """
    with _told():
        settings = alerts.Wanted(thresholds).settings
    found, numbers = list(alerts.rows(settings)), list(alerts.number_rows(settings))
    if as_json:
        click.echo(json.dumps({"alerts": found, "thresholds": numbers}, indent=1, ensure_ascii=False))
        return
    table = Table("alert", "severity", "for", "threshold", "summary", "panel")
    for row in found:
        number = f"{used['name']} = {used['value']:.12g}" if (used := row["threshold"]) else ""
        table.add_row(row["name"], row["severity"], row["for"], number, row["summary"], row["panel"])
    more = Table("threshold", "value", "shipped", "why")
    for own in numbers:
        more.add_row(own["name"], f"{own['value']:.12g} ({own['shown']})", f"{own['shipped']:.12g}", own["why"])
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table, more)


@alerts_group.command("slo")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--page", "target", metavar="URL|FILE", help="A vLLM server or a file with its page: is every latency bound one of its buckets?")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write slo.yaml to this folder instead of printing it.")
@_RUNBOOK_BASE
@_DASHBOARD_BASE
@click.option("--force", is_flag=True, help="Overwrite a slo.yaml that did not come from here, or was changed since.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def alerts_slo(
    file: Path | None, target: str | None, out: Path | None, runbook_base: str | None, dashboard_base: str | None, force: bool, as_json: bool
) -> None:
    """Turn objectives of your own into burn-rate alerts and the recorded series that they need.

    FILE is YAML in the form of objectives.yml, which `alerts export` writes; without FILE the shipped ones are taken.

    \b
    Example:  vllm-watch alerts slo --page http://127.0.0.1:8000
    """
    file = file or alerts.SHIPPED_OBJECTIVES
    with _told():
        objectives, links = alerts.objectives(file), alerts.links(runbook_base, dashboard_base)
        if target and (missed := list(alerts.misses(objectives, page.parse(_page_of(target)[0]), target))):
            raise ValueError(f"{file}: {'; '.join(missed)}")
        warned = [*alerts.warnings(links), *alerts.without_page(objectives)]
        groups = alerts.slo_groups(objectives, links)
        printed = alerts.slo_file(groups)
        if out:
            written = export.write(out, printed, alerts.foreign, force)
    if out:
        whole = f"it stands on its own; with all the other rules, in place of the shipped objectives: vllm-watch alerts export --slo {file}"
        _say_files(written, [], warned, [f"promtool check rules {out}/slo.yaml", whole], as_json)
        return
    for warning in warned:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps({"groups": [group.as_dict() for group in groups], "warnings": warned}, indent=1, ensure_ascii=False))
    else:
        click.echo(printed["slo.yaml"].rstrip())


@main.command("board")
@click.option("--prometheus", "url", default="http://127.0.0.1:9090", show_default=True, metavar="URL", help="With its path if it has one.")
@click.option("--token-file", type=click.Path(path_type=Path), help="A bearer token for Prometheus.")
@click.option("--user-file", type=click.Path(path_type=Path), help="user:password for Prometheus.")
@click.option("--listen", default="127.0.0.1:9402", show_default=True, metavar="HOST:PORT")
@click.option("--allow-host", "allowed", multiple=True, metavar="NAME", help="A name, besides loopback, under which browsers may ask.")
@click.option("--scrape-interval", "scrape_s", metavar="TIME", callback=_duration, help="By default Prometheus is asked for it, else 15s.")
@click.option("--snapshot", type=click.Path(path_type=Path, dir_okay=False), help="Write one static page with its figures instead of serving.")
@click.option("--board", "slugs", multiple=True, metavar="SLUG", help="With --snapshot: only this board; may be given more than once.")
@click.option("--from", "start", default="now-1h", show_default=True, metavar="TIME", help="With --snapshot: now-6h, 2026-03-01T12:00:00Z or ms.")
@click.option("--to", "end", default="now", show_default=True, metavar="TIME", help="With --snapshot.")
@_THRESHOLDS
def board_command(
    url: str, token_file: Path | None, user_file: Path | None, listen: str, allowed: tuple[str, ...], scrape_s: float | None,
    snapshot: Path | None, slugs: tuple[str, ...], start: str, end: str, thresholds: Path | None,
) -> None:  # fmt: skip
    """The boards as a live page over any Prometheus, without Grafana; runbook pages are under /runbooks/.

    \b
    Example:  vllm-watch board --prometheus http://127.0.0.1:9090
    """
    import uvloop

    from stack.board import run
    from stack.prometheus import address_from

    if slugs and not snapshot:
        raise click.UsageError("--board belongs to --snapshot; the live page has every board")
    with _told():
        where, settings = address_from(url, token_file, user_file), _settings(thresholds)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if snapshot:
                runner.run(run.write_snapshot(snapshot, where, slugs, scrape_s, start, end, settings))
                click.echo(f"written: {snapshot} ({snapshot.stat().st_size / 1e6:.1f} MB)")
            else:
                _logging()
                runner.run(run.until_signal(where, listen, scrape_s, allowed, settings))


@main.command("runbook")
@click.argument("words", nargs=-1, metavar="[NAME]")
@click.option("--list", "listed", is_flag=True, help="Every page; the same as no NAME.")
@click.option("--firing", is_flag=True, help="The pages of what fires now; with NAME, that page with its labels.")
@click.option("--alertmanager", metavar="URL", help="With --firing.  [default: http://127.0.0.1:9093]")
@click.option("--from-alertmanager", "source", type=click.File("rb"), metavar="FILE", help="The body of a webhook, or amtool's JSON; - is stdin.")
@click.option("--label", "given", multiple=True, metavar="NAME=VALUE", help="Fill this into commands and queries; may be given more than once.")
@click.option("--live", is_flag=True, help="Ask Prometheus every question of the page and show what holds.")
@click.option("--prometheus", "url", default="http://127.0.0.1:9090", show_default=True, metavar="URL", help="With --live.")
@click.option("--token-file", type=click.Path(path_type=Path), help="A bearer token for Prometheus.")
@click.option("--user-file", type=click.Path(path_type=Path), help="user:password for Prometheus.")
@click.option("--section", metavar="HEADING", help="Only this part; its first letters will do, such as mitigation.")
@click.option("--url", "only_url", is_flag=True, help="Only the address of the page.")
@click.option("--base", metavar="URL", help=f"Where pages are served.  [default: {Links().runbooks}]")
@_THRESHOLDS
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def runbook_command(
    words: tuple[str, ...], listed: bool, firing: bool, alertmanager: str | None, source: IO[bytes] | None, given: tuple[str, ...], live: bool,
    url: str, token_file: Path | None, user_file: Path | None, section: str | None, only_url: bool, base: str | None, thresholds: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """What to do about an alert: its page, by name, by a part of it, or by words that it holds.

    Exit 1 when nothing was found, 2 when several pages are meant as likely, or for a mistake.

    \b
    Example:  vllm-watch runbook kv cache full --label instance=127.0.0.1:8001 --live
    """
    from stack import runbook
    from stack.prometheus import address_from

    if alertmanager and not firing:
        raise click.UsageError("--alertmanager belongs to --firing")
    if (firing and source) or (listed and (words or firing or source)):
        raise click.UsageError("choose NAME, --list, --firing or --from-alertmanager; only NAME goes together with one of the last two")
    one = live or section is not None or only_url
    if not words and not firing and not source and (one or given):
        raise click.UsageError("name a page; vllm-watch runbook --list has them all")
    links, alerts = Links(runbooks=base) if base else Links(), None
    with _told():
        settings = _settings(thresholds)
        if source:
            alerts = runbook.alerts_from(source.read(), getattr(source, "name", "<stdin>"))
        elif firing:
            alerts = asyncio.run(runbook.firing(alertmanager or runbook.ALERTMANAGER))
    choice = runbook.choose(" ".join(words), alerts, dict(map(_label, given)), bundle.pages(settings), links, one)
    if choice.page is None:
        click.echo(_as_json(choice.rows) if as_json else choice.said, err=choice.status == 1 and not as_json)
        raise SystemExit(choice.status)
    if choice.said:
        click.echo(choice.said, err=True)
    if only_url:
        address = links.runbook(choice.page.name)
        click.echo(_as_json({"page": choice.page.name, "url": address}) if as_json else address)
        return
    shown = choice.page.filled(choice.labels)
    with _told():
        heading = runbook.heading(shown, section) if section is not None else ""
        now = asyncio.run(runbook.ask(shown, address_from(url, token_file, user_file), time.time(), settings)) if live else None
    if as_json:
        click.echo(_as_json(runbook.as_json(shown, choice.labels, now, heading, links)))
    else:
        _page_out(runbook.as_text(shown, choice.labels, now, heading, links))


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise click.UsageError(f"--label {text!r} is no label; write it like instance=127.0.0.1:8001")
    return name, value


def _as_json(content: object) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False)


def _page_out(markdown: str) -> None:
    """Drawn in a terminal, through a pager where it is higher than that; as it was written into a file or pipe."""
    if not sys.stdout.isatty():
        click.echo(markdown, nl=False)
        return
    console = Console()
    with console.capture() as drawn:
        console.print(Markdown(markdown, hyperlinks=False))
    if drawn.get().count("\n") > console.height:
        click.echo_via_pager(drawn.get(), color=console.color_system is not None)
    else:
        click.echo(drawn.get(), nl=False, color=True)


@main.command("cost")
@click.option("--prometheus", "url", metavar="URL", help="What the sidecar recorded there.")
@click.option("--log", "logs", multiple=True, type=click.Path(path_type=Path, dir_okay=False), help="Request logs instead; once for each file.")
@click.option("--since", "since_s", metavar="TIME", callback=_duration, help="How far back.  [default: 24h; with --log all of it]")
@click.option("--prices", "prices_path", type=click.Path(path_type=Path, dir_okay=False), help="prices.yaml; see docs/cost.md.")
@click.option("--gpus", multiple=True, metavar="N|MODEL=N", help="With --log: how many cards a model runs on.  [default: 1]")
@click.option("--by", type=click.Choice(["team", "model", "team,model"]), default="team,model", show_default=True)
@click.option("--token-file", type=click.Path(path_type=Path), help="A bearer token for Prometheus.")
@click.option("--user-file", type=click.Path(path_type=Path), help="user:password for Prometheus.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="The rows and their total as CSV.")
def cost_command(
    url: str | None, logs: tuple[Path, ...], since_s: float | None, prices_path: Path | None, gpus: tuple[str, ...], by: str,
    token_file: Path | None, user_file: Path | None, as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """GPU hours, cost, energy and tokens of each team and model. Idle, aborted and unattributed time have rows; the total is their sum.

    How much of a shared card was whose is an estimate of share; what is shared out is exact.

    \b
    Example:  vllm-watch cost --prometheus http://127.0.0.1:9090 --since 24h
    """
    from exporters.prices import Prices
    from stack import cost
    from stack.prometheus import address_from

    if bool(url) == bool(logs):
        raise click.UsageError("name either --prometheus URL or --log FILE")
    if gpus and not logs:
        raise click.UsageError("--gpus belongs to --log; Prometheus knows the cards")
    if as_json and as_csv:
        raise click.UsageError("choose --json or --csv")
    with _told():
        prices = config.load(prices_path, Prices) if prices_path else None
        told = cost.reckon(address_from(url, token_file, user_file) if url else None, logs, since_s, time.time(), prices, gpus, by)
    if as_json or as_csv:
        click.echo(_as_json(told) if as_json else cost.as_csv(told), nl=as_json)
        return
    head, rows = cost.sheet(told)
    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number < len(cost.BY[by]) else "right")
    for number, row in enumerate(rows):
        table.add_row(*map(escape, row), end_section=number == len(rows) - 2)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for note in told["notes"]:
        click.echo(f"note: {note}")


@main.command("drill")
@click.argument("alerts", nargs=-1, metavar="[ALERT|fast|all]...")
@click.option("--list", "only_list", is_flag=True, help="Every alert with its drill, or why there is none; starts nothing.")
@click.option("--port-offset", type=click.IntRange(0, 50000), default=2000, show_default=True, help="Add this to every port.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON; what happens meanwhile goes to stderr.")
def drill_command(alerts: tuple[str, ...], only_list: bool, port_offset: int, as_json: bool) -> None:
    """Break a real vLLM in a lab of its own, and see the alert arrive, and go when it is mended.

    Windows and waiting times are fifteen times shorter than shipped, or sixty; cards are stand-ins. Exit 0 only if every alert fired and
    resolved.

    \b
    Example:  vllm-watch drill VLLMEngineDown
    """
    from stack.drill import drills, run  # imports of the lab

    if only_list:
        rows = run.listed()
        click.echo(json.dumps(rows, indent=1) if as_json else "\n".join(f"{r['alert']:30} {r['drill'] or 'none: ' + r['why_not']}" for r in rows))
        return
    if not alerts:
        raise click.UsageError("name an alert, or fast, or all; --list shows them")
    with _told():
        chosen = drills.chosen(alerts)
    raise SystemExit(run.command(chosen, port_offset, as_json))


@main.command()
@click.option("--check", "only_check", is_flag=True, help="Change nothing; exit 1 when a printed file is out of date.")
def render(only_check: bool) -> None:
    """Write dashboards and rule files from their source, in place.

    \b
    Example:  vllm-watch render --check
    """
    changed = bundle.stale() if only_check else bundle.write()
    for path in changed:
        click.echo(f"{'out of date' if only_check else 'printed'}: {path}")
    if only_check and changed:
        raise SystemExit(1)
    if not changed:
        click.echo(f"all printed files below {bundle.ROOT} are up to date")


if __name__ == "__main__":
    main()
