"""`vllm-watch metrics`: list the catalogue, check an endpoint or a dashboard, drift, buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from exporters.catalogue import EVERYTHING, NEVER_EXISTED, bounds, exposition_parser
from exporters.catalogue.metric import Metric
from exporters.catalogue.metric import key as release_key
from exporters.compat import check, drift, source_scan
from stack import render
from stack.cli.common import AS_JSON, UsageMistake, mistakes_as_errors
from stack.cli.options import HTTP_CONFIG
from stack.cli.scraped import page_of, text_of
from stack.terminal import output_width


@click.group()
def metrics() -> None:
    """Explain, check and compare vLLM metrics."""


@metrics.command("list")
@AS_JSON
@click.argument("word", default="")
def metrics_list(as_json: bool, word: str) -> None:
    """List metrics of the catalogue.

    WORD selects by name or meaning.

    \b
    Example:  vllm-watch metrics list queue
    """
    chosen = [m for m in EVERYTHING if word.lower() in f"{m.name} {m.name.replace('_', ' ')} {m.meaning}".lower()]
    if not chosen:
        raise UsageMistake(f"nothing in the catalogue has {word!r} in its name or meaning")
    if as_json:
        click.echo(json.dumps([_metric_as_json(m) for m in chosen], indent=1))
        return
    table = Table("name", "kind", "unit", "vLLM", "meaning and notes")
    for metric in chosen:
        lived = f"{metric.since or '?'} .. {metric.until or ''}" if metric.name.startswith("vllm:") else ""
        notes = [metric.meaning, *(f"- {note}" for note in metric.notes)]
        notes += [f"needs {metric.needs}"] * bool(metric.needs) + ["known from source only"] * (
            metric.evidence == "source"
        )
        table.add_row(metric.name, str(metric.kind), str(metric.unit), lived, "\n".join(notes))
    Console(width=output_width(200)).print(table)


def _metric_as_json(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric.__dataclass_fields__}


@metrics.command("buckets")
@AS_JSON
def metrics_buckets(as_json: bool) -> None:
    """Print finer histogram buckets as options of `vllm serve`.

    All default bounds are kept, so that SLOs and older data still fit. All engines of a model need the same list, and a
    restart.

    \b
    Example:  vllm serve MODEL $(vllm-watch metrics buckets)
    """
    if as_json:
        click.echo(json.dumps(bounds.ENGINE_LADDER))
        return
    click.echo(" ".join(bounds.engine_arguments()))


@metrics.command("check")
@click.argument("target", required=False)
@click.option(
    "--dashboard", "boards", multiple=True, type=click.Path(path_type=Path), help="Grafana dashboard to check as well."
)
@click.option("--release", help="vLLM version of the engine, if /version cannot be read.")
@HTTP_CONFIG
@AS_JSON
def metrics_check(
    target: str | None, boards: tuple[Path, ...], release: str | None, http_config: Path | None, as_json: bool
) -> None:
    """Check a /metrics endpoint against dashboards and rules.

    TARGET is the URL of a vLLM server, or a saved exposition. Exit 1 for unknown or escaped names, or if a required
    panel or rule can never return a result.

    \b
    Example:  vllm-watch metrics check http://127.0.0.1:8000 --dashboard mine.json
    """
    if target is None and not boards:
        raise click.UsageError("name a server, a file with its page, or a --dashboard")
    with mistakes_as_errors():
        theirs = [use for path in boards for use in check.uses_of_dashboard(text_of(path), path.name)]
        unknown = list(check.unknown_metrics(theirs, EVERYTHING, NEVER_EXISTED))
        report = None
        if target is not None:
            text, reported = page_of(target, http_config)
            report = check.check(
                exposition_parser.parse(text), EVERYTHING, [*render.uses(), *theirs], known_release(release, reported)
            )
    if as_json:
        rows = [{"place": s.use.place, "name": s.name, "instead" if s.name else "error": s.instead} for s in unknown]
        click.echo(json.dumps({"page": report.as_json() if report else None, "dashboards": rows}, indent=1))
    else:
        _say(report, unknown, len(theirs))
    raise SystemExit(1 if unknown or (report and report.fails) else 0)


@metrics.command("drift")
@click.argument("pages", metavar="[PAGE_OR_URL]...", nargs=-1)
@click.option(
    "--installed",
    "places",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PYTHON",
    help="Python with vLLM, or vLLM's source folder: read, not started; needs no GPU.",
)
@click.option("--before", help="Earlier exposition (file or server), to compare bucket bounds and help texts.")
@click.option("--release", help="vLLM version of TARGET, if it cannot be read.")
@HTTP_CONFIG
@AS_JSON
def metrics_drift(
    pages: tuple[str, ...],
    places: tuple[Path, ...],
    before: str | None,
    release: str | None,
    http_config: Path | None,
    as_json: bool,
) -> None:
    """Compare the catalogue with a vLLM release.

    Print the catalogue edits that resolve the differences.

    A page or server says what one engine shows; --installed says what any flag could bring. New families come with an
    entry to paste, the others with the field to set, and with the panels, alerts and recordings of ours that read them.
    The Rust frontend shows fewer families: what its page lacks is listed, and not called gone. Exit 0: no drift; 1:
    drift; 2: it could not be read.

    \b
    Example:  vllm-watch metrics drift http://127.0.0.1:8000 --before tests/golden/0.32.0-before.prom
    """
    if not pages and not places:
        raise click.UsageError("name a server, a file with its page, or a Python that has vLLM with --installed")
    with mistakes_as_errors():
        earlier = _found_on(before, None, http_config) if before else None
        found = {target: _found_on(target, release, http_config) for target in pages} | {
            str(place): _found_in(place, release) for place in places
        }
        uses = list(render.uses())
        changes = {where: drift.drift(it, uses=uses, before=earlier) for where, it in found.items()}
    if as_json:
        click.echo(json.dumps([_drift_as_json(where, it, changes[where]) for where, it in found.items()], indent=1))
    else:
        for where, it in found.items():
            _say_drift(where, it, changes[where])
    raise SystemExit(1 if any(changes.values()) else 0)


def _found_on(target: str, release: str | None, http_config: Path | None) -> drift.ObservedVllm:
    text, reported = page_of(target, http_config)
    try:
        found = drift.from_scrape(text, known_release(release, reported))
    except exposition_parser.BadExposition as error:
        raise ValueError(f"{target}: {error}") from error
    if not any(name.startswith(check.ENGINE) for name in found.families):
        raise ValueError(
            f"{target} holds no series of vLLM under their own names; `vllm-watch metrics check` says more"
        )
    return found


def _found_in(place: Path, release: str | None) -> drift.ObservedVllm:
    """Return the metrics of the vLLM in an environment, or in a folder of source. Raises ValueError."""
    package = _package(place)
    source = source_scan.read(source_scan.files(package))
    if not source.families:
        raise ValueError(f"{package} names no series: is it the source of vLLM?")
    return drift.from_source(source, known_release(release, source_scan.release(package)))


def _package(place: Path) -> Path:
    if place.is_dir():
        package = next((folder for folder in (place, place / "vllm") if (folder / "v1").is_dir()), None)
        if package is None:
            raise ValueError(f"{place} holds no vllm/v1: name vLLM's source, or a Python that has vLLM")
        return package
    ask = (
        "import importlib.util as u; found = u.find_spec('vllm'); print(found.submodule_search_locations[0] if found"
        " else '')"
    )
    try:
        said = subprocess.run(
            [place, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=False
        ).stdout.strip()
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{place} did not say within a minute where its vllm is") from error
    if not said:
        raise ValueError(
            f"{place} has no vllm: name a Python that has it, such as that of the environment vLLM runs in"
        )
    return Path(said)


def _drift_as_json(where: str, found: drift.ObservedVllm, changes: tuple[drift.Change, ...]) -> dict[str, Any]:
    return {
        "where": where,
        "release": found.release,
        "families": len(found.families),
        "changes": [dataclasses.asdict(change) for change in changes],
        "left_out": sorted(name for name in found.families if drift.exclusion_reason(name)),
        "unread": list(found.unread),
        "unshown": list(drift.unshown(found)),
    }


def _say_drift(where: str, found: drift.ObservedVllm, changes: tuple[drift.Change, ...]) -> None:
    click.echo(f"{where}: vLLM {found.release or 'of an unknown release'}, {len(found.families)} families read")
    for change in changes:
        moved = " -> ".join(part for part in (change.was, change.now) if part)
        click.echo(f"{change.what:9} {change.name}{': ' if moved else ''}{moved}\n          {change.advice}")
        if change.places:
            click.echo(f"          read by {', '.join(change.places)}")
        if change.paste:
            click.echo(change.paste.rstrip())
    for beginning, why in drift.LEFT_OUT.items():
        if named := [name for name in found.families if name.startswith(beginning)]:
            click.echo(f"left out  {len(named)} that begin with {beginning}: {why}")
    if missing := drift.unshown(found):
        click.echo(
            f"unshown   the page of the Rust frontend, which shows fewer families; it lacks {len(missing)}:"
            f" {', '.join(missing)}"
        )
    for place in found.unread:
        click.echo(f"unread    {place}: a name that is put together at run time; only a page can show it")
    click.echo(f"drift: {len(changes)} to look at" if changes else "no drift: the catalogue says what is there")


def known_release(asked: str | None, reported: str | None) -> str | None:
    """Return the release that the user names, else that of the engine if it can be read: builds from source call
    themselves dev."""
    if asked:
        return ".".join(map(str, release_key(asked)))
    with contextlib.suppress(ValueError):
        return ".".join(map(str, release_key(reported or "")))
    return None


def _say(report: check.CompatReport | None, unknown: list[check.UnknownMetric], read: int) -> None:
    for each in unknown:
        _print_unknown(each)
    if report is None:
        click.echo(
            f"{len(unknown)} of {read} queries to look at" if unknown else f"{read} queries read, every name is known"
        )
    elif report.is_ours:
        _say_page(report)
    else:
        click.echo(f"this page holds no series of vLLM, only {len(report.beside)} others: is it the right address?")


def _print_unknown(each: check.UnknownMetric) -> None:
    if each.name is None:
        click.echo(f"unread    {each.use.place}: {each.instead}")
    else:
        click.echo(f"no release has {each.name} ({each.use.place}){': use ' + each.instead if each.instead else ''}")


def _say_page(report: check.CompatReport) -> None:
    """Print the metrics of an engine, then what it lacks, then which of our panels and rules are empty because of
    that."""
    click.echo(_release_range(*report.releases))
    click.echo(f"known     {len(report.known)} families, and {len(report.beside)} that are not vLLM's own")
    for name in report.unknown:
        click.echo(f"unknown   {name}: not in this catalogue; a newer vLLM, or a plug-in")
    if report.escaped:
        click.echo(f"escaped   {len(report.escaped)} families such as {report.escaped[0]}: {check.ESCAPED_ADVICE}")
    for old, new in report.renamed:
        click.echo(f"renamed   {old} is called {new} in newer releases; our queries ask for both")
    _say_absent(report.absent)
    _say_empty(report.broken)
    _say_broken(report.broken)
    click.echo("in order" if not report.fails else "not in order")


def _release_range(since: str, before: str | None) -> str:
    if since == "0.0":
        return "vLLM of an unknown release"
    return f"vLLM {since} or later, before {before}" if before else f"vLLM {since} or later"


def _say_absent(absent: tuple[Metric, ...]) -> None:
    for need, names in _by_need(absent):
        listed = ", ".join(names) if len(names) < 4 else f"{len(names)} families such as {names[0]}"
        click.echo(f"absent    {listed}" + (f" (needs {need})" if need else ""))


def _say_empty(broken: tuple[check.DeadQuery, ...]) -> None:
    for why, places in _by_reason(broken):
        click.echo(f"empty     {places[0]}{f' and {len(places) - 1} more' if places[1:] else ''}: optional. {why}")


def _say_broken(broken: tuple[check.DeadQuery, ...]) -> None:
    for one in broken:
        if not one.use.optional:
            missing = [
                f"{name} (now {now})" if (now := check.successor(name, EVERYTHING)) else name for name in one.missing
            ]
            click.echo(f"broken    {one.use.place}: misses {', '.join(missing) or 'a matching series'}")


def _by_reason(broken: tuple[check.DeadQuery, ...]) -> list[tuple[str, list[str]]]:
    """Group what is empty on a healthy engine by what would fill it."""
    reasons = dict.fromkeys(b.use.optional for b in broken if b.use.optional)
    return [(reason, [b.use.place for b in broken if b.use.optional == reason]) for reason in reasons]


def _by_need(absent: tuple[Metric, ...]) -> list[tuple[str, list[str]]]:
    needs = sorted({metric.needs for metric in absent})
    return [(need, [metric.name for metric in absent if metric.needs == need]) for need in needs]
